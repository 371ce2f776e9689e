/* A hostile application: every call with rubbish, stale and foreign handles, and threads that race on live ones.
 * Must end with "survived". */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#undef ibv_query_port
#undef ibv_reg_mr

static unsigned long long state = 88172645463325252ull;

static unsigned long long rnd(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void *rubbish(void)
{
    static char zeros[4096], ones[4096];
    memset(ones, 0xff, sizeof ones);
    switch (rnd() % 6) {
    case 0: return NULL;
    case 1: return (void *)(rnd() % 4096);
    case 2: return (void *)rnd();
    case 3: return zeros + rnd() % 64;
    case 4: return ones + rnd() % 64;
    default: return (void *)~0ul;
    }
}

static void expect(int got, const char *what)
{
    if (got == 0) {
        printf("accepted rubbish: %s\n", what);
        exit(1);
    }
}

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char *buf;

static struct ibv_qp *new_qp(void)
{
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2}};
    return ibv_create_qp(pd, &init);
}

static void to_rts(struct ibv_qp *qp, unsigned dest)
{
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 14};
    ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = 5;
    a.dest_qp_num = dest;
    a.max_dest_rd_atomic = 1;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    ibv_query_gid(ctx, 1, 0, &a.ah_attr.grh.dgid);
    ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 1;
    a.max_rd_atomic = 1;
    ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC);
}

static void random_send(struct ibv_qp *qp)
{
    struct ibv_sge sge[2] = {{(uintptr_t)buf + rnd() % 9000, (unsigned)(rnd() % 9000), rnd() % 3 ? mr->lkey : (unsigned)rnd()},
                             {rnd(), (unsigned)rnd(), (unsigned)rnd()}};
    struct ibv_send_wr wr, *bad;
    memset(&wr, 0, sizeof wr);
    wr.sg_list = sge;
    wr.num_sge = (int)(rnd() % 5) - 1;
    wr.opcode = (enum ibv_wr_opcode)(rnd() % 12);
    wr.send_flags = (unsigned)(rnd() % 16) & ~(unsigned)IBV_SEND_INLINE;
    wr.wr.atomic.remote_addr = (uintptr_t)buf + rnd() % 9000;
    wr.wr.rdma.rkey = rnd() % 3 ? mr->rkey : (unsigned)rnd();
    if (wr.num_sge <= 2)
        ibv_post_send(qp, &wr, &bad);
}

static void *churn(void *arg)
{
    (void)arg;
    for (int i = 0; i < 300; i++) {
        struct ibv_qp *a = new_qp(), *b = new_qp();
        struct ibv_mr *m = ibv_reg_mr(pd, buf, 8192, 15);
        struct ibv_wc wc[4];
        if (!a || !b || !m) {
            printf("creation failed: %d\n", errno);
            exit(1);
        }
        to_rts(a, b->qp_num);
        to_rts(b, a->qp_num);
        for (int k = 0; k < 6; k++) {
            struct ibv_recv_wr r = {.wr_id = 1}, *bad;
            ibv_post_recv(b, &r, &bad);
            random_send(a);
            ibv_poll_cq(cq, 4, wc);
        }
        ibv_dereg_mr(m);
        ibv_destroy_qp(a);
        ibv_destroy_qp(b);
    }
    return NULL;
}

int main(void)
{
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    ctx = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(ctx);
    cq = ibv_create_cq(ctx, 4096, NULL, NULL, 0);
    buf = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mr = ibv_reg_mr(pd, buf, 8192, 15);
    if (!ctx || !pd || !cq || !mr)
        return 1;
    for (int i = 0; i < 20000; i++) {
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        struct ibv_async_event event;
        memset(&attr, (int)rnd(), sizeof attr);
        memset(&init, (int)rnd(), sizeof init);
        memset(&event, (int)rnd(), sizeof event);
        expect(ibv_destroy_qp(rubbish()), "destroy_qp");
        expect(ibv_modify_qp(rubbish(), &attr, (int)rnd()), "modify_qp");
        expect(ibv_query_qp(rubbish(), &attr, 0, &init), "query_qp");
        expect(ibv_destroy_cq(rubbish()), "destroy_cq");
        expect(ibv_destroy_srq(rubbish()), "destroy_srq");
        expect(ibv_dereg_mr(rubbish()), "dereg_mr");
        expect(ibv_dealloc_pd(rubbish()), "dealloc_pd");
        expect(ibv_close_device(rubbish()), "close_device");
        expect(ibv_destroy_comp_channel(rubbish()), "destroy_comp_channel");
        expect(ibv_open_device(rubbish()) == NULL, "open_device");
        expect(ibv_alloc_pd(rubbish()) == NULL, "alloc_pd");
        expect(ibv_create_cq(rubbish(), 16, NULL, NULL, 0) == NULL, "create_cq");
        expect(ibv_create_cq(ctx, 0, NULL, NULL, 0) == NULL, "create_cq 0");
        expect(ibv_create_cq(ctx, 16, NULL, rubbish(), 1) == NULL, "create_cq channel");
        expect(ibv_create_qp(pd, &init) == NULL, "create_qp");
        expect(ibv_create_qp(rubbish(), &init) == NULL, "create_qp pd");
        expect(ibv_reg_mr(rubbish(), buf, 10, 1) == NULL, "reg_mr pd");
        expect(ibv_reg_mr(pd, (void *)(rnd() | 1ull << 63), 4096, 1) == NULL, "reg_mr addr");
        expect(ibv_query_device(rubbish(), (void *)&attr), "query_device");
        expect(ibv_query_port(rubbish(), 1, (void *)&attr), "query_port");
        expect(ibv_query_port(ctx, (unsigned char)(rnd() % 254 + 2), (void *)&attr), "query_port number");
        expect(ibv_query_ece(rubbish(), (void *)&attr), "query_ece");
        ibv_ack_async_event(&event);
        ibv_ack_cq_events(rubbish(), 3);
    }
    struct ibv_qp *qp = new_qp(), *peer = new_qp();
    for (int i = 0; i < 20000; i++) {
        struct ibv_wc wc[8];
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
        random_send(qp);
        ibv_poll_cq(cq, 8, wc);
        if (i % 8 == 0) {
            ibv_modify_qp(qp, &attr, IBV_QP_STATE);
            ibv_modify_qp(peer, &attr, IBV_QP_STATE);
            to_rts(qp, rnd() % 4 ? peer->qp_num : (unsigned)rnd() & 0xffffff);
            to_rts(peer, qp->qp_num);
        }
    }
    /* A destroyed QP that is still used, and a forged one. */
    struct ibv_qp forged = *qp;
    struct ibv_send_wr wr, *bad;
    memset(&wr, 0, sizeof wr);
    expect(ibv_post_send(&forged, &wr, &bad), "post_send on a copy");
    ibv_destroy_qp(qp);
    expect(ibv_post_send(qp, &wr, &bad), "post_send after destroy");
    ibv_destroy_qp(peer);
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&t[i], NULL, churn, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    if (ibv_dereg_mr(mr) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(ctx)) {
        printf("teardown failed: %d\n", errno);
        return 1;
    }
    printf("survived\n");
    return 0;
}
