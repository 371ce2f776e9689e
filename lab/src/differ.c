// What a device answers to a list of questions about the verbs, one line each, so that two devices can be compared: the
// software RNIC and the kernel's rxe (lab/differ).
//
//   differ DEVICE GID-INDEX [QUESTION]      prints "QUESTION<tab>ANSWER" for each
//
// Each question is asked in a process of its own, so that one that ends the process is an answer as well. Nothing here
// knows what is right. Answers are in words that do not depend on addresses, keys or time.
#include "differ.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct ibv_context *context;
struct ibv_pd *pd;
union ibv_gid gid;
int gid_index;

static const char *device;
static bool *begun; // the answer has a first part; shared with the process of the question

void stop(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("cannot be asked: ");
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    _exit(1);
}

void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (*begun) printf("; ");
    vprintf(format, args);
    fflush(stdout); // a question that ends the process has said this
    *begun = true;
}

const char *error_name(int error) { return error ? strerrorname_np(error < 0 ? -error : error) : "ok"; }

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// ---- objects

struct ibv_mr *reg(void *p, size_t size, int access) {
    struct ibv_mr *mr = ibv_reg_mr(pd, p, size, access);
    if (!mr) stop("ibv_reg_mr: %s", strerror(errno));
    return mr;
}

struct end end_new(const struct ibv_qp_cap *cap, int access) {
    struct end end = {.cq = ibv_create_cq(context, 64, NULL, NULL, 0), .access = access};
    if (!end.cq) stop("ibv_create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr init = {.send_cq = end.cq, .recv_cq = end.cq, .qp_type = IBV_QPT_RC, .cap = *cap};
    end.qp = ibv_create_qp(pd, &init);
    if (!end.qp) stop("ibv_create_qp: %s", strerror(errno));
    return end;
}

int to_init(struct end *end) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)end->access};
    return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

struct ibv_qp_attr rtr_attr(uint32_t remote) {
    return (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = remote, .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64}},
    };
}

int to_rtr(struct end *end, uint32_t remote) {
    struct ibv_qp_attr attr = rtr_attr(remote);
    return ibv_modify_qp(end->qp, &attr, RTR_MASK);
}

int to_rts(struct end *end, int timeout, int rnr_retry) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .timeout = (uint8_t)timeout, .retry_cnt = timeout < 16 ? 1 : 7,
                               .rnr_retry = (uint8_t)rnr_retry, .max_rd_atomic = 1};
    return ibv_modify_qp(end->qp, &attr, RTS_MASK);
}

int to_state(struct end *end, enum ibv_qp_state state) {
    struct ibv_qp_attr attr = {.qp_state = state};
    return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE);
}

static const struct ibv_qp_cap usual = {
    .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 32};

struct pair pair_with(int access, int timeout, int rnr_retry) {
    struct pair pair = {.a = end_new(&usual, access), .b = end_new(&usual, access)};
    static const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    pair.from = aligned_alloc(PAGE, ROOM);
    pair.to = aligned_alloc(PAGE, ROOM);
    if (!pair.from || !pair.to) stop("no memory");
    memset(pair.from, 1, ROOM);
    memset(pair.to, 0, ROOM);
    pair.from_mr = reg(pair.from, ROOM, all);
    pair.to_mr = reg(pair.to, ROOM, all);
    int error = to_init(&pair.a);
    if (!error) error = to_init(&pair.b);
    if (!error) error = to_rtr(&pair.a, pair.b.qp->qp_num);
    if (!error) error = to_rtr(&pair.b, pair.a.qp->qp_num);
    if (!error) error = to_rts(&pair.a, timeout, rnr_retry);
    if (!error) error = to_rts(&pair.b, timeout, rnr_retry);
    if (error) stop("no connection: %s", strerror(error));
    return pair;
}

struct pair pair_new(void) {
    return pair_with(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC, 18, 7);
}

// ---- work

struct ibv_send_wr *request(struct pair *pair, enum ibv_wr_opcode opcode, uint32_t size) {
    static struct ibv_sge sge;
    static struct ibv_send_wr wr;
    sge = (struct ibv_sge){(uintptr_t)pair->from, size, pair->from_mr->lkey};
    wr = (struct ibv_send_wr){.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    wr.wr.rdma.remote_addr = (uintptr_t)pair->to;
    wr.wr.rdma.rkey = pair->to_mr->rkey;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)pair->to;
        wr.wr.atomic.rkey = pair->to_mr->rkey;
        wr.wr.atomic.compare_add = 1;
    }
    return &wr;
}

int post(struct end *end, struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    return ibv_post_send(end->qp, wr, &bad);
}

int receive(struct end *end, struct pair *pair, uint32_t size, uint64_t id) {
    struct ibv_sge sge = {(uintptr_t)pair->to, size, pair->to_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(end->qp, &wr, &bad);
}

bool next(struct end *end, struct ibv_wc *wc, double patience) {
    for (double until = seconds() + patience;;) {
        int n = ibv_poll_cq(end->cq, 1, wc);
        if (n < 0) stop("ibv_poll_cq: %d", n);
        if (n) return true;
        if (seconds() > until) return false;
        sched_yield();
    }
}

static const char *state_of(struct end *end) {
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(end->qp, &attr, IBV_QP_STATE, &init)) return "?";
    return attr.qp_state < 7 ? names[attr.qp_state] : "?";
}

void say_status(struct end *end, const char *who) {
    struct ibv_wc wc;
    if (next(end, &wc, PATIENCE))
        say("%s%s", who, ibv_wc_status_str(wc.status));
    else
        say("%snothing", who);
}

void say_states(struct pair *pair) { say("%s and %s", state_of(&pair->a), state_of(&pair->b)); }

void say_event(void) {
    struct pollfd file = {.fd = context->async_fd, .events = POLLIN};
    struct ibv_async_event event;
    // That none comes can only be seen by waiting; what is raised at all is raised before the completions above.
    if (poll(&file, 1, 500) != 1) {
        say("no event");
        return;
    }
    if (ibv_get_async_event(context, &event)) stop("ibv_get_async_event: %s", strerror(errno));
    say("event: %s", ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
}

// ---- the list

static void open_device(void) {
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; i < n && !context; i++)
        if (!strcmp(ibv_get_device_name(list[i]), device)) context = ibv_open_device(list[i]);
    if (!context) stop("no device %s", device);
    pd = ibv_alloc_pd(context);
    if (!pd) stop("ibv_alloc_pd: %s", strerror(errno));
    if (ibv_query_gid(context, 1, gid_index, &gid)) stop("no GID %d", gid_index);
}

static void ask(const struct question *question) {
    printf("%s\t", question->name);
    fflush(stdout);
    *begun = false;
    pid_t child = fork();
    if (child < 0) stop("fork: %s", strerror(errno));
    if (!child) {
        alarm(120);
        open_device();
        question->ask();
        fflush(stdout);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child) stop("waitpid: %s", strerror(errno));
    if (WIFSIGNALED(status)) printf("%sended by SIG%s", *begun ? "; " : "", sigabbrev_np(WTERMSIG(status)));
    printf("\n");
}

int main(int argc, char **argv) {
    const struct question *const lists[] = {questions_of_objects, questions_of_traffic};
    int asked = 0;
    if (argc < 3) stop("usage: differ DEVICE GID-INDEX [QUESTION]");
    device = argv[1];
    gid_index = atoi(argv[2]);
    begun = mmap(NULL, sizeof *begun, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (begun == MAP_FAILED) stop("mmap: %s", strerror(errno));
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    for (int i = 0; i < 2; i++)
        for (const struct question *question = lists[i]; question->name; question++)
            if (argc == 3 || !strcmp(argv[3], question->name)) {
                ask(question);
                asked++;
            }
    fflush(stdout);
    return asked ? 0 : 1;
}
