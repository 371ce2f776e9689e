/* Prints sizes and offsets of the system's verbs header, for comparison with the Rust declarations. */
#include <infiniband/verbs.h>
#include <stdio.h>

#define S(t) printf("%s %zu\n", #t, sizeof(struct t))
#define O(t, f) printf("%s.%s %zu\n", #t, #f, offsetof(struct t, f))

int main(void)
{
    S(ibv_device); S(ibv_context); S(verbs_context); S(ibv_pd); S(ibv_mr); S(ibv_cq); S(ibv_qp); S(ibv_srq); S(ibv_wc);
    S(ibv_sge); S(ibv_recv_wr); S(ibv_qp_init_attr); S(ibv_ah_attr); S(ibv_device_attr); S(ibv_gid_entry);
    S(ibv_comp_channel); S(ibv_async_event); S(ibv_ece); S(ibv_srq_init_attr);
    O(ibv_context, ops); O(ibv_context, async_fd); O(ibv_context, abi_compat);
    O(ibv_context, ops.poll_cq); O(ibv_context, ops.req_notify_cq); O(ibv_context, ops.post_srq_recv);
    O(ibv_context, ops.post_send); O(ibv_context, ops.post_recv);
    O(verbs_context, query_port); O(verbs_context, query_device_ex); O(verbs_context, create_qp_ex);
    O(verbs_context, get_srq_num); O(verbs_context, create_srq_ex); O(verbs_context, sz); O(verbs_context, context);
    O(ibv_qp, qp_num); O(ibv_qp, state); O(ibv_cq, handle); O(ibv_srq, handle);
    O(ibv_send_wr, opcode); O(ibv_send_wr, imm_data); O(ibv_send_wr, wr.rdma.remote_addr); O(ibv_send_wr, wr.rdma.rkey);
    O(ibv_send_wr, wr.atomic.compare_add); O(ibv_send_wr, wr.atomic.swap); O(ibv_send_wr, wr.atomic.rkey);
    O(ibv_qp_attr, qp_access_flags); O(ibv_qp_attr, cap); O(ibv_qp_attr, ah_attr); O(ibv_qp_attr, pkey_index);
    O(ibv_qp_attr, max_rd_atomic); O(ibv_qp_attr, port_num); O(ibv_qp_attr, timeout); O(ibv_qp_attr, alt_timeout);
    O(ibv_ah_attr, dlid); O(ibv_ah_attr, is_global); O(ibv_ah_attr, port_num);
    O(ibv_device_attr, max_qp); O(ibv_device_attr, atomic_cap); O(ibv_device_attr, phys_port_cnt);
    O(ibv_port_attr, gid_tbl_len); O(ibv_port_attr, lid); O(ibv_port_attr, link_layer); O(ibv_wc, wc_flags);
    return 0;
}
