// Questions about objects: what a registration, a queue pair, a completion queue is refused for.
#include "differ.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const int ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

static char *map(size_t pages, int protection) {
    char *p = mmap(NULL, pages * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) stop("mmap: %s", strerror(errno));
    return p;
}

// ---- registrations

static void say_reg(void *p, size_t size, int access) {
    errno = 0;
    struct ibv_mr *mr = ibv_reg_mr(pd, p, size, access);
    say("%s", mr ? "ok" : error_name(errno));
}

static void reg_plain(void) {
    struct ibv_mr *mr = reg(map(4, PROT_READ | PROT_WRITE), 4 * PAGE, ALL);
    say("lkey %s rkey", mr->lkey == mr->rkey ? "is" : "is not");
}
static void reg_empty(void) { say_reg(map(1, PROT_READ | PROT_WRITE), 0, ALL); }
static void reg_null(void) { say_reg(NULL, PAGE, ALL); }
static void reg_wraps(void) { say_reg((void *)(~(uintptr_t)0 - PAGE + 1), 2 * PAGE, ALL); }
static void reg_hole(void) {
    char *p = map(3, PROT_READ | PROT_WRITE);
    munmap(p + PAGE, PAGE);
    say_reg(p, 3 * PAGE, ALL);
}
static void reg_read_only_memory_for_writes(void) { say_reg(map(1, PROT_READ), PAGE, ALL); }
static void reg_read_only_memory_for_reads(void) { say_reg(map(1, PROT_READ), PAGE, IBV_ACCESS_REMOTE_READ); }
static void reg_no_access_memory(void) { say_reg(map(1, PROT_NONE), PAGE, IBV_ACCESS_REMOTE_READ); }
static void reg_write_without_local_write(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, IBV_ACCESS_REMOTE_WRITE); }
static void reg_relaxed_ordering(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL | IBV_ACCESS_RELAXED_ORDERING); }
static void reg_unknown_flag(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL | 1 << 15); }
static void reg_unknown_optional_flag(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL | 1 << 25); }
static void reg_on_demand(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL | IBV_ACCESS_ON_DEMAND); }
static void reg_zero_based(void) { say_reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL | IBV_ACCESS_ZERO_BASED); }
static void reg_dmabuf_of_no_file(void) {
    errno = 0;
    say("%s", ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, -1, ALL) ? "ok" : error_name(errno));
}
static void reg_as_another_address(void) {
    errno = 0;
    char *p = map(1, PROT_READ | PROT_WRITE);
    say("%s", ibv_reg_mr_iova(pd, p, PAGE, 0x1000, ALL) ? "aligned: ok" : error_name(errno));
    say("%s", ibv_reg_mr_iova(pd, p, PAGE, 0x1234, ALL) ? "not: ok" : error_name(errno));
}
static void reg_rereg(void) {
    struct ibv_mr *mr = reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL);
    int result = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
    say("%s", result ? "error" : "ok");
}
static void unmapped_after_registering(void) {
    char *p = map(1, PROT_READ | PROT_WRITE);
    struct ibv_mr *mr = reg(p, PAGE, ALL);
    munmap(p, PAGE);
    say("%s", error_name(ibv_dereg_mr(mr)));
}

// ---- what is still in use

static void dealloc_pd_in_use(void) {
    reg(map(1, PROT_READ | PROT_WRITE), PAGE, ALL);
    say("%s", error_name(ibv_dealloc_pd(pd)));
}
static void destroy_cq_in_use(void) {
    struct end end = end_new(&(struct ibv_qp_cap){1, 1, 1, 1, 0}, ALL);
    say("%s", error_name(ibv_destroy_cq(end.cq)));
}

// ---- making queues

static void say_qp(struct ibv_qp_cap cap) {
    struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = cap};
    errno = 0;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    say("%s", qp ? "ok" : error_name(errno));
}
static struct ibv_device_attr limits(void) {
    struct ibv_device_attr attr;
    if (ibv_query_device(context, &attr)) stop("ibv_query_device");
    return attr;
}
static void qp_of_no_entries(void) { say_qp((struct ibv_qp_cap){0, 0, 0, 0, 0}); }
static void qp_with_more_than_max_qp_wr(void) { say_qp((struct ibv_qp_cap){(uint32_t)limits().max_qp_wr + 1, 1, 1, 1, 0}); }
static void qp_with_more_than_max_sge(void) { say_qp((struct ibv_qp_cap){1, 1, (uint32_t)limits().max_sge + 1, 1, 0}); }
static void qp_with_much_inline(void) {
    say_qp((struct ibv_qp_cap){1, 1, 1, 1, 256});
    say_qp((struct ibv_qp_cap){1, 1, 1, 1, 1 << 20});
}
static void qp_without_cq(void) {
    struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
    errno = 0;
    say("%s", ibv_create_qp(pd, &init) ? "ok" : error_name(errno));
}
static void qp_gets_at_least_what_it_asks_for(void) {
    struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {10, 10, 2, 2, 60}};
    if (!ibv_create_qp(pd, &init)) stop("ibv_create_qp: %s", strerror(errno));
    const struct ibv_qp_cap *cap = &init.cap;
    bool enough = cap->max_send_wr >= 10 && cap->max_recv_wr >= 10 && cap->max_send_sge >= 2 && cap->max_recv_sge >= 2 &&
                  cap->max_inline_data >= 60;
    say("%s", enough ? "yes" : "no");
}
static void say_cq(int entries, int vector) {
    errno = 0;
    say("%s", ibv_create_cq(context, entries, NULL, NULL, vector) ? "ok" : error_name(errno));
}
static void cq_of_no_entries(void) { say_cq(0, 0); }
static void cq_with_more_than_max_cqe(void) { say_cq(limits().max_cqe + 1, 0); }
static void cq_of_a_vector_too_many(void) { say_cq(4, context->num_comp_vectors); }

// ---- states

static struct end fresh(void) { return end_new(&(struct ibv_qp_cap){4, 4, 1, 1, 0}, ALL); }
static struct end at_init(void) {
    struct end end = fresh();
    if (to_init(&end)) stop("no INIT");
    return end;
}
static void reset_to_rtr(void) {
    struct end end = fresh();
    say("%s", error_name(to_rtr(&end, 1)));
}
static void init_without_port(void) {
    struct end end = fresh();
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
    say("%s", error_name(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS)));
}
static void say_init(int port, int pkey) {
    struct end end = fresh();
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)port, .pkey_index = (uint16_t)pkey};
    say("%s", error_name(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)));
}
static void init_with_port_9(void) { say_init(9, 0); }
static void init_with_pkey_index_999(void) { say_init(1, 999); }
static void say_rtr(void (*change)(struct ibv_qp_attr *), int mask) {
    struct end end = at_init();
    struct ibv_qp_attr attr = rtr_attr(end.qp->qp_num);
    change(&attr);
    say("%s", error_name(ibv_modify_qp(end.qp, &attr, mask)));
}
static void as_it_is(struct ibv_qp_attr *attr) { (void)attr; }
static void far_gid(struct ibv_qp_attr *attr) { attr->ah_attr.grh.sgid_index = 250; }
static void no_grh(struct ibv_qp_attr *attr) { attr->ah_attr.is_global = 0; }
static void wide_mtu(struct ibv_qp_attr *attr) { attr->path_mtu = IBV_MTU_4096 + 1; }
static void deep(struct ibv_qp_attr *attr) { attr->max_dest_rd_atomic = 255; }
static void long_timer(struct ibv_qp_attr *attr) { attr->min_rnr_timer = 32; }
static void rtr_with_gid_index_250(void) { say_rtr(far_gid, RTR_MASK); }
static void rtr_without_grh(void) { say_rtr(no_grh, RTR_MASK); }
static void rtr_with_unknown_mtu(void) { say_rtr(wide_mtu, RTR_MASK); }
static void rtr_with_255_reads(void) { say_rtr(deep, RTR_MASK); }
static void rtr_with_rnr_timer_32(void) { say_rtr(long_timer, RTR_MASK); }
static void rtr_without_mtu(void) { say_rtr(as_it_is, RTR_MASK & ~IBV_QP_PATH_MTU); }
static void rtr_with_a_timeout(void) { say_rtr(as_it_is, RTR_MASK | IBV_QP_TIMEOUT); }
static void say_rts(int timeout, int retries, int rnr, int reads) {
    struct end end = at_init();
    if (to_rtr(&end, end.qp->qp_num)) stop("no RTR");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .timeout = (uint8_t)timeout, .retry_cnt = (uint8_t)retries,
                               .rnr_retry = (uint8_t)rnr, .max_rd_atomic = (uint8_t)reads};
    say("%s", error_name(ibv_modify_qp(end.qp, &attr, RTS_MASK)));
}
static void rts_with_timeout_32(void) { say_rts(32, 7, 7, 1); }
static void rts_with_8_retries(void) { say_rts(14, 8, 7, 1); }
static void rts_with_8_rnr_retries(void) { say_rts(14, 7, 8, 1); }
static void rts_with_255_reads(void) { say_rts(14, 7, 7, 255); }
static void rts_with_no_reads(void) { say_rts(14, 7, 7, 0); }
static void query_reports_what_was_set(void) {
    struct end end = at_init();
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (to_rtr(&end, 0x123456) || to_rts(&end, 17, 5)) stop("no RTS");
    if (ibv_query_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT, &init)) stop("ibv_query_qp");
    say("destination %x, timeout %d, retries %d and %d, MTU %d, gid %d", attr.dest_qp_num, attr.timeout, attr.retry_cnt, attr.rnr_retry,
        128 << attr.path_mtu, attr.ah_attr.grh.sgid_index == gid_index);
}

// ---- tables of the port

static void gid_beyond_the_table(void) {
    union ibv_gid there;
    struct ibv_port_attr port;
    if (ibv_query_port(context, 1, &port)) stop("ibv_query_port");
    errno = 0;
    say("%s", ibv_query_gid(context, 1, port.gid_tbl_len, &there) ? "refused" : "ok");
}
static void pkey_beyond_the_table(void) {
    struct ibv_port_attr port;
    __be16 pkey;
    if (ibv_query_port(context, 1, &port)) stop("ibv_query_port");
    say("%s", ibv_query_pkey(context, 1, port.pkey_tbl_len, &pkey) ? "refused" : "ok");
}
static void port_9(void) {
    struct ibv_port_attr port;
    say("%s", error_name(ibv_query_port(context, 9, &port)));
}
static void port_1(void) {
    struct ibv_port_attr port;
    if (ibv_query_port(context, 1, &port)) stop("ibv_query_port");
    say("state %d, link layer %d, active MTU %d, lid %d, %u P_Key", port.state, port.link_layer, 128 << port.active_mtu,
        port.lid, port.pkey_tbl_len);
}
static void longest_message(void) {
    struct ibv_port_attr port;
    if (ibv_query_port(context, 1, &port)) stop("ibv_query_port");
    say("%u bytes", port.max_msg_sz);
}
static void words(void) {
    for (int i = -1; i < 26; i++) say("%s", ibv_wc_status_str((enum ibv_wc_status)i));
    for (int i = -1; i < 22; i++) say("%s", ibv_event_type_str((enum ibv_event_type)i));
    for (int i = -1; i < 8; i++) say("%s", ibv_port_state_str((enum ibv_port_state)i));
    for (int i = -1; i < 9; i++) say("%s", ibv_node_type_str((enum ibv_node_type)i));
}
static void atomic_capability(void) { say("%d", limits().atomic_cap); }

#define Q(name) {#name, name}
const struct question questions_of_objects[] = {
    Q(words), Q(port_1), Q(port_9), Q(longest_message), Q(atomic_capability), Q(gid_beyond_the_table), Q(pkey_beyond_the_table),
    Q(reg_plain), Q(reg_empty), Q(reg_null), Q(reg_wraps), Q(reg_hole), Q(reg_no_access_memory),
    Q(reg_read_only_memory_for_writes), Q(reg_read_only_memory_for_reads), Q(reg_write_without_local_write),
    Q(reg_relaxed_ordering), Q(reg_unknown_flag), Q(reg_unknown_optional_flag), Q(reg_on_demand), Q(reg_zero_based),
    Q(reg_dmabuf_of_no_file), Q(reg_as_another_address), Q(reg_rereg), Q(unmapped_after_registering),
    Q(dealloc_pd_in_use), Q(destroy_cq_in_use),
    Q(qp_of_no_entries), Q(qp_with_more_than_max_qp_wr), Q(qp_with_more_than_max_sge), Q(qp_with_much_inline), Q(qp_without_cq),
    Q(qp_gets_at_least_what_it_asks_for), Q(cq_of_no_entries), Q(cq_with_more_than_max_cqe), Q(cq_of_a_vector_too_many),
    Q(reset_to_rtr), Q(init_without_port), Q(init_with_port_9), Q(init_with_pkey_index_999),
    Q(rtr_with_gid_index_250), Q(rtr_without_grh), Q(rtr_with_unknown_mtu), Q(rtr_with_255_reads), Q(rtr_with_rnr_timer_32),
    Q(rtr_without_mtu), Q(rtr_with_a_timeout),
    Q(rts_with_timeout_32), Q(rts_with_8_retries), Q(rts_with_8_rnr_retries), Q(rts_with_255_reads), Q(rts_with_no_reads),
    Q(query_reports_what_was_set), {NULL, NULL},
};
