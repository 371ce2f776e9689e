/* The far end of cross-process tests: owns a registered buffer and obeys one-line commands on stdin.
 * Built against the system's verbs header, so that the tests also check our declarations against it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE (4u << 20)

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static unsigned char *buf;

static void die(const char *what)
{
    printf("error %s errno=%d\n", what, errno);
    exit(1);
}

static void print_wc(void)
{
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    if (n < 0)
        die("poll");
    printf("wc status=%d opcode=%d len=%u imm=%u flags=%u qpn=%u id=%llu\n", wc.status, wc.opcode, wc.byte_len,
           ntohl(wc.imm_data), wc.wc_flags, wc.qp_num, (unsigned long long)wc.wr_id);
}

static void connect_to(unsigned qpn)
{
    struct ibv_qp_attr a;
    union ibv_gid gid;
    memset(&a, 0, sizeof a);
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        die("init");
    if (ibv_query_gid(ctx, 1, 0, &gid))
        die("gid");
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = qpn;
    a.max_dest_rd_atomic = 4;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.grh.dgid = gid;
    a.ah_attr.grh.hop_limit = 64;
    a.ah_attr.port_num = 1;
    if (ibv_modify_qp(qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        die("rtr");
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 14;
    a.retry_cnt = 7;
    a.rnr_retry = 7;
    a.max_rd_atomic = 4;
    if (ibv_modify_qp(qp, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        die("rts");
    printf("ok\n");
}

/* Watches a block that the peer rewrites with growing numbers: when the last word shows k, no earlier word may be older. */
static void watch(unsigned long bytes, unsigned long last)
{
    volatile unsigned long *w = (volatile unsigned long *)buf;
    unsigned long n = bytes / 8, seen = 0;
    while (seen < last) {
        seen = __atomic_load_n(&w[n - 1], __ATOMIC_ACQUIRE);
        for (unsigned long i = 0; i < n - 1; i++)
            if (w[i] < seen) {
                printf("torn word=%lu has=%lu last=%lu\n", i, w[i], seen);
                return;
            }
    }
    printf("ok\n");
}

static void post_recv(unsigned n, unsigned len)
{
    for (unsigned i = 0; i < n; i++) {
        struct ibv_sge sge = {(uintptr_t)buf, len, mr->lkey};
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = len ? 1 : 0}, *bad;
        if (ibv_post_recv(qp, &wr, &bad))
            die("post_recv");
    }
    printf("ok\n");
}

int main(int argc, char **argv)
{
    int n, access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    struct ibv_device **list = ibv_get_device_list(&n);
    char line[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!list || n < 1 || !(ctx = ibv_open_device(list[0])))
        die("open");
    pd = ibv_alloc_pd(ctx);
    cq = ibv_create_cq(ctx, 1024, NULL, NULL, 0);
    if (!pd || !cq)
        die("pd/cq");
    struct ibv_qp_init_attr init = {.send_cq = cq,
                                    .recv_cq = cq,
                                    .cap = {.max_send_wr = 64, .max_recv_wr = 512, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    qp = ibv_create_qp(pd, &init);
    if (!qp)
        die("qp");
    if (argc > 1 && !strcmp(argv[1], "dmabuf")) {
        int fd = memfd_create("target", 0);
        if (fd < 0 || ftruncate(fd, SIZE))
            die("memfd");
        buf = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        mr = ibv_reg_dmabuf_mr(pd, 0, SIZE, (uintptr_t)buf, fd, access);
        close(fd);
    } else {
        buf = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mr = ibv_reg_mr(pd, buf, SIZE, access);
    }
    if (buf == MAP_FAILED || !mr)
        die("mr");
    printf("ready qpn=%u addr=%llu rkey=%u pid=%d\n", qp->qp_num, (unsigned long long)(uintptr_t)buf, mr->rkey, getpid());
    while (fgets(line, sizeof line, stdin)) {
        unsigned long a = 0, b = 0;
        char verb[32] = "";
        sscanf(line, "%31s %lu %lu", verb, &a, &b);
        if (!strcmp(verb, "connect"))
            connect_to(a);
        else if (!strcmp(verb, "recv"))
            post_recv(a, b);
        else if (!strcmp(verb, "poll"))
            print_wc();
        else if (!strcmp(verb, "word"))
            printf("word %lu\n", *(volatile unsigned long *)(buf + a));
        else if (!strcmp(verb, "set"))
            *(volatile unsigned long *)(buf + a) = b, printf("ok\n");
        else if (!strcmp(verb, "watch"))
            watch(a, b);
        else if (!strcmp(verb, "event")) {
            struct ibv_async_event e;
            if (ibv_get_async_event(ctx, &e))
                die("event");
            ibv_ack_async_event(&e);
            printf("event %d\n", e.event_type);
        } else if (!strcmp(verb, "destroy")) {
            if (ibv_destroy_qp(qp))
                die("destroy");
            printf("ok\n");
        } else if (!strcmp(verb, "exit"))
            return 0;
        else
            die("command");
    }
    return 0;
}
