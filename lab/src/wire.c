// The lab's own check of the kernel's RDMA devices, in the shape of the plugin's data path and without the plugin:
// two processes, one queue pair between them.
//
//   receiver -> sender   credits: RDMA_WRITE (inline) of a counter into the sender's memory
//   sender -> receiver   messages: RDMA_WRITE_WITH_IMM into the slot that a credit stands for, the immediate counts
//   receiver -> itself   flush: RDMA_READ of the message's last byte on a queue pair connected to itself
//
// Every byte of every message is compared, and every byte around it must be untouched.
//
//   wire SENDER-DEVICE RECEIVER-DEVICE [MESSAGES]      exit 0 = all as expected
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PAGE = 4096,
    SLOTS = 4,             // messages in flight; rxe under emulation copes with 8 of 64 KiB
    SLOT = 65536 + PAGE,   // the largest message and room to see a write past its end
    UNTOUCHED = 0xee,
    GID_INDEX = 1,         // IPv4, RoCE v2: see lab/guest/rxe
    ACK_TIMEOUT = 18,      // 4.096 us * 2^18 = 1 s
    PATIENCE = 60,         // seconds without progress
};
static const uint32_t sizes[] = {1, 4096, 65536, 0, 4095, 4097, 65535, 3};

static const char *who;

static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "wire: %s: ", who);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    _exit(1);
}

static uint32_t size_of(uint32_t message) { return sizes[message % (sizeof sizes / sizeof *sizes)]; }

static unsigned char byte_of(uint32_t message, uint32_t at) { return (message * 2654435761u + at * 40503u) >> 7; }

static unsigned char *pages(size_t size) {
    unsigned char *p = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
    if (!p) fail("no memory");
    return p;
}

static time_t seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec;
}

struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    union ibv_gid gid;
};

static struct side open_side(const char *device) {
    struct side s = {0};
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; i < n; i++)
        if (!strcmp(ibv_get_device_name(list[i]), device)) s.context = ibv_open_device(list[i]);
    if (!s.context) fail("no device %s", device);
    s.pd = ibv_alloc_pd(s.context);
    s.cq = ibv_create_cq(s.context, 256, NULL, NULL, 0);
    if (!s.pd || !s.cq) fail("no PD or CQ: %s", strerror(errno));
    if (ibv_query_gid(s.context, 1, GID_INDEX, &s.gid)) fail("no GID %d on %s", GID_INDEX, device);
    return s;
}

static struct ibv_mr *reg(struct side *s, void *p, size_t size) {
    struct ibv_mr *mr = ibv_reg_mr(s->pd, p, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    if (!mr) fail("ibv_reg_mr of %zu bytes: %s", size, strerror(errno));
    return mr;
}

static struct ibv_qp *make_qp(struct side *s) {
    struct ibv_qp_init_attr init = {
        .send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4 * SLOTS, .max_recv_wr = 2 * SLOTS, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64},
    };
    struct ibv_qp *qp = ibv_create_qp(s->pd, &init);
    if (!qp) fail("ibv_create_qp: %s", strerror(errno));
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error) fail("to INIT: %s", strerror(error));
    return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t remote, union ibv_gid gid) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = remote, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = GID_INDEX, .hop_limit = 64}},
    };
    int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error) fail("to RTR: %s", strerror(error));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = ACK_TIMEOUT, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                         IBV_QP_MAX_QP_RD_ATOMIC);
    if (error) fail("to RTS: %s", strerror(error));
}

static void post(struct ibv_qp *qp, struct ibv_send_wr wr, void *local, uint32_t size, uint32_t lkey, uint64_t remote, uint32_t rkey) {
    struct ibv_sge sge = {(uintptr_t)local, size, lkey};
    struct ibv_send_wr *bad;
    wr.sg_list = &sge;
    wr.num_sge = size ? 1 : 0;
    wr.send_flags |= IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    int error = ibv_post_send(qp, &wr, &bad);
    if (error) fail("ibv_post_send: %s", strerror(error));
}

// A completion if there is one; anything but success ends the test.
static bool poll_cq(struct side *s, struct ibv_wc *wc) {
    int n = ibv_poll_cq(s->cq, 1, wc);
    if (n < 0) fail("ibv_poll_cq");
    if (n && wc->status) fail("completion of opcode %d: %s", wc->opcode, ibv_wc_status_str(wc->status));
    if (!n) sched_yield();
    return n;
}

// What each side tells the other before the first message: where to write.
struct hello {
    union ibv_gid gid;
    uint64_t addr;
    uint32_t rkey, qpn;
};

static struct hello exchange(int fd, struct hello mine) {
    struct hello theirs;
    if (write(fd, &mine, sizeof mine) != sizeof mine || read(fd, &theirs, sizeof theirs) != sizeof theirs)
        fail("the other process is gone");
    return theirs;
}

// Neither side may write before the other is ready to receive, nor leave while the other waits for its packets.
static void barrier(int fd) {
    char c = 0;
    if (write(fd, &c, 1) != 1 || read(fd, &c, 1) != 1) fail("the other process is gone");
}

static void send_all(const char *device, int fd, uint32_t messages) {
    struct side s = open_side(device);
    unsigned char *buffer = pages((size_t)SLOTS * SLOT);
    struct ibv_mr *mr = reg(&s, buffer, (size_t)SLOTS * SLOT);
    volatile uint64_t *credits = memset(pages(PAGE), 0, PAGE);
    struct ibv_mr *credit_mr = reg(&s, (void *)credits, PAGE);
    struct ibv_qp *qp = make_qp(&s);
    struct hello peer = exchange(fd, (struct hello){s.gid, (uintptr_t)credits, credit_mr->rkey, qp->qp_num});
    connect_qp(qp, peer.qpn, peer.gid);
    barrier(fd);

    uint32_t posted = 0, done = 0;
    time_t last = seconds();
    while (done < messages) {
        struct ibv_wc wc;
        // A credit allows the message; the buffer it is sent from must be free too.
        if (posted < messages && posted < *credits && posted - done < SLOTS) {
            uint32_t slot = posted % SLOTS, size = size_of(posted);
            unsigned char *p = buffer + (size_t)slot * SLOT;
            for (uint32_t i = 0; i < size; i++) p[i] = byte_of(posted, i);
            post(qp, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htonl(posted)}, p, size, mr->lkey,
                 peer.addr + (uint64_t)slot * SLOT, peer.rkey);
            posted++;
        }
        if (poll_cq(&s, &wc)) {
            done++;
            last = seconds();
        }
        if (seconds() - last > PATIENCE)
            fail("stuck: %u of %u posted, %u done, %llu credits", posted, messages, done, (unsigned long long)*credits);
    }
    barrier(fd);
}

static void receive_all(const char *device, int fd, uint32_t messages) {
    struct side s = open_side(device);
    unsigned char *buffer = memset(pages((size_t)SLOTS * SLOT), UNTOUCHED, (size_t)SLOTS * SLOT);
    struct ibv_mr *mr = reg(&s, buffer, (size_t)SLOTS * SLOT);
    unsigned char *scratch = memset(pages(PAGE), 0, PAGE);
    struct ibv_mr *scratch_mr = reg(&s, scratch, PAGE);
    struct ibv_qp *qp = make_qp(&s), *self = make_qp(&s);
    struct ibv_recv_wr receive = {0}, *bad;
    connect_qp(self, self->qp_num, s.gid);
    for (int i = 0; i < SLOTS; i++)
        if (ibv_post_recv(qp, &receive, &bad)) fail("ibv_post_recv");
    struct hello peer = exchange(fd, (struct hello){s.gid, (uintptr_t)buffer, mr->rkey, qp->qp_num});
    connect_qp(qp, peer.qpn, peer.gid);
    barrier(fd);

    uint64_t granted = SLOTS, bytes = 0;
    struct ibv_send_wr credit = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_INLINE};
    post(qp, credit, &granted, sizeof granted, 0, peer.addr, peer.rkey);
    uint32_t got = 0, arrived = 0;
    bool flushing = false;
    time_t last = seconds();
    while (got < messages) {
        struct ibv_wc wc;
        uint32_t slot = got % SLOTS, size = size_of(got);
        unsigned char *p = buffer + (size_t)slot * SLOT;
        if (arrived > got && !flushing) {
            scratch[0] = (unsigned char)~p[size ? size - 1 : 0];
            post(self, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_READ}, scratch, 1, scratch_mr->lkey,
                 (uintptr_t)(p + (size ? size - 1 : 0)), mr->rkey);
            flushing = true;
        }
        if (seconds() - last > PATIENCE) fail("stuck: %u of %u arrived, %u checked", arrived, messages, got);
        if (!poll_cq(&s, &wc)) continue;
        last = seconds();
        if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
            if (ntohl(wc.imm_data) != arrived) fail("message %u has immediate %u", arrived, ntohl(wc.imm_data));
            if (wc.byte_len != size_of(arrived)) fail("message %u has %u bytes, not %u", arrived, wc.byte_len, size_of(arrived));
            arrived++;
        }
        if (wc.opcode != IBV_WC_RDMA_READ) continue;
        flushing = false;
        if (size && scratch[0] != byte_of(got, size - 1)) fail("flush of message %u read %02x", got, scratch[0]);
        for (uint32_t i = 0; i < SLOT; i++) {
            unsigned char want = i < size ? byte_of(got, i) : UNTOUCHED;
            if (p[i] != want) fail("message %u of %u bytes: byte %u is %02x, not %02x", got, size, i, p[i], want);
        }
        memset(p, UNTOUCHED, size);
        bytes += size;
        got++;
        granted++;
        if (ibv_post_recv(qp, &receive, &bad)) fail("ibv_post_recv");
        post(qp, credit, &granted, sizeof granted, 0, peer.addr, peer.rkey);
    }
    barrier(fd);
    printf("wire: %u messages, %llu bytes, flushed and checked, on %s\n", got, (unsigned long long)bytes, device);
}

int main(int argc, char **argv) {
    int fds[2], status;
    who = "start";
    if (argc < 3) fail("usage: wire SENDER-DEVICE RECEIVER-DEVICE [MESSAGES]");
    uint32_t messages = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 64;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) fail("socketpair: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) fail("fork: %s", strerror(errno));
    close(fds[child ? 1 : 0]);
    if (!child) {
        who = "sender";
        send_all(argv[1], fds[1], messages);
        _exit(0);
    }
    who = "receiver";
    receive_all(argv[2], fds[0], messages);
    if (waitpid(child, &status, 0) != child || status) fail("the sender failed");
    return 0;
}
