/*
 * What runs out: depths of queues, objects of the device, file descriptors. Where less will do, less is taken, and
 * nothing of the traffic shows it; else the error names the limit, what this process has and what helps.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "host.h"
#include "pair.h"
#include "softrnic.h"

/* One attempt to connect; false when a call gave an error, with everything closed that came into being. */
static bool attempt(const struct net *net, struct pair *pair)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    ncclResult_t connected = ncclSuccess, accepted = ncclSuccess;
    *pair = (struct pair){.net = net};
    ncclResult_t listening = net_listen(net, 0, handle, &listener);
    if (listening != ncclSuccess) {
        CHECK(ffi_is_error(listening));
        return false;
    }
    WAIT_UNTIL(({
                   if (!pair->send) connected = net_connect(net, 0, handle, &pair->send);
                   if (!pair->recv && !connected) accepted = net_accept(net, listener, &pair->recv);
                   (pair->send && pair->recv) || connected || accepted;
               }),
               "a connection or an error");
    CHECK_OK(net_close_listen(net, listener));
    if (!connected && !accepted) return true;
    CHECK(ffi_is_error(connected ? connected : accepted));
    if (!pair->send && !connected)
        WAIT_UNTIL((connected = net_connect(net, 0, handle, &pair->send)) || pair->send, "connect to give up too");
    if (pair->send) CHECK_OK(net_close_send(net, pair->send));
    if (pair->recv) CHECK_OK(net_close_recv(net, pair->recv));
    return false;
}

/* ---- depths -------------------------------------------------------------------------------------------------- */

/* All that can be in flight is, over and over, in messages of all sizes: the depth of no queue is ever exceeded. */
static void traffic(const struct pair *pair)
{
    enum { COUNT = NCCL_NET_MAX_REQUESTS, ROUNDS = 12, SIZE = 30000 };
    const struct net *net = pair->net;
    struct guarded from = guarded_new((size_t)COUNT * SIZE, 0), to = guarded_new((size_t)COUNT * SIZE, 0);
    void *from_mr = register_host(net, pair->send, from.data, from.size);
    void *to_mr = register_host(net, pair->recv, to.data, to.size);
    void *sends[COUNT], *receives[COUNT], *flushes[COUNT];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t random = (uint64_t)round;
        guarded_reset(&to);
        for (int i = 0; i < COUNT; i++) receives[i] = irecv(net, pair->recv, to.data + i * SIZE, SIZE, i % 3, to_mr);
        size_t sizes[COUNT];
        for (int i = 0; i < COUNT; i++) {
            sizes[i] = round == 0 ? SIZE : next_random(&random) % (SIZE + 1);
            pattern_fill(from.data + i * SIZE, sizes[i], (uint64_t)(round * COUNT + i));
            sends[i] = isend(net, pair->send, from.data + i * SIZE, sizes[i], i % 3, from_mr);
        }
        for (int i = 0; i < COUNT; i++) CHECK_EQ(wait_size(net, sends[i]), sizes[i]);
        for (int i = 0; i < COUNT; i++) CHECK_EQ(wait_size(net, receives[i]), sizes[i]);
        for (int i = 0; i < COUNT; i++) {
            void *data = to.data + i * SIZE;
            int size = SIZE;
            CHECK_OK(net_iflush(net, pair->recv, 1, &data, &size, &to_mr, &flushes[i]));
        }
        for (int i = 0; i < COUNT; i++) {
            if (flushes[i]) wait_done(net, flushes[i], NULL);
            CHECK_PART(&to, (size_t)i * SIZE, SIZE, sizes[i], (uint64_t)(round * COUNT + i));
        }
    }
    CHECK_OK(net_dereg_mr(net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(net, pair->recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
    for (int m = 0; m < 100; m++) pair_message(pair, (size_t)m * 50, m, (uint64_t)m);
}

struct depth {
    const char *setting, *value;
    const char *told; /* in the log of a connection, or of the error */
    bool works;
};

static const struct depth depths[] = {
    {"SOFTRNIC_MAX_QP_WR", "128", NULL, true},
    {"SOFTRNIC_MAX_QP_WR", "127", "softrnic0:1: queues of 96 sends and 0 receives, 128 and 0 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "95", "queues of 80 sends and 0 receives, 128 and 0 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "64", "queues of 48 sends and 0 receives, 128 and 0 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "63", "queues of 32 sends and 48 receives, 64 and 64 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "47", "queues of 32 sends and 40 receives, 64 and 64 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "32", "queues of 16 sends and 0 receives, 128 and 0 are not granted", true},
    {"SOFTRNIC_MAX_QP_WR", "31", "the device's queues have 31 slots (max_qp_wr) and a connection needs 32", false},
    {"SOFTRNIC_MAX_QP_WR", "15", "the device's queues have 15 slots (max_qp_wr) and a connection needs 16", false},
    {"SOFTRNIC_MAX_CQE", "500", NULL, true},
    {"SOFTRNIC_MAX_CQE", "128", "queues of 32 sends and 48 receives, 64 and 64 are not granted", true},
    {"SOFTRNIC_MAX_CQE", "96", "queues of 32 sends and 32 receives, 64 and 64 are not granted", true},
    {"SOFTRNIC_MAX_CQE", "95", "completion queues have 95 entries (max_cqe) and a connection needs 96; lower", false},
};

static void with_depth(int version, int socket, void *argument)
{
    (void)socket;
    const struct depth *depth = argument;
    struct net net;
    struct pair pair;
    setenv(depth->setting, depth->value, 1);
    setenv("PINRAIL_FLUSH", "always", 1);
    net_start(&net, version);
    size_t mark = log_mark();
    CHECK_EQ(attempt(&net, &pair), depth->works);
    if (depth->told && log_matches_since(mark, depth->told) < 1) FAIL("not told: %s", depth->told);
    if (depth->works) {
        CHECK_EQ(log_warnings_since(mark), 0);
        if (!depth->told) CHECK_EQ(log_matches_since(mark, "are not granted"), 0);
        traffic(&pair);
        pair_close(&pair);
    } else if (log_matches_since(mark, "QPs of max_qp 16384") < 1) {
        FAIL("the counts are not told");
    }
    CHECK_EQ(rnic_counts().cq_overruns, 0);
    CHECK_EQ(rnic_counts().qps, 0);
    net_stop(&net);
}

static void depths_step_down(int version)
{
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++)
        run_one(version, (struct role){.name = depths[i].value, .run = with_depth}, (void *)(uintptr_t)&depths[i]);
}

/* Where data and notice are apart, and where a message goes over several queue pairs. */
static void of_each_kind(int version, int socket, void *argument)
{
    (void)socket;
    struct net net;
    struct pair pair;
    host_set(argument);
    setenv("PINRAIL_FLUSH", "always", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    traffic(&pair);
    CHECK_EQ(rnic_counts().cq_overruns, 0);
    pair_close(&pair);
    net_stop(&net);
}

static void small_queues_carry_every_kind(int version)
{
    static const char *const kinds[][5] = {
        {"SOFTRNIC_LINK=ib", "SOFTRNIC_MAX_QP_WR=40", "NCCL_IB_AR_THRESHOLD=1000", NULL},
        {"SOFTRNIC_LINK=ib", "SOFTRNIC_MAX_QP_WR=90", "NCCL_IB_AR_THRESHOLD=1000", NULL},
        {"SOFTRNIC_MAX_QP_WR=33", "NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_IB_SPLIT_DATA_ON_QPS=1", NULL},
        {"SOFTRNIC_MAX_QP_WR=50", "NCCL_IB_QPS_PER_CONNECTION=3", NULL},
        {"SOFTRNIC_MAX_QP_WR=32", "SOFTRNIC_MAX_MSG_SZ=1000", NULL},
        {"SOFTRNIC_MAX_QP_WR=32", "SOFTRNIC_ENGINE=thread", NULL},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        run_one(version, (struct role){.name = kinds[i][1], .run = of_each_kind}, (void *)(uintptr_t)kinds[i]);
}

/* ---- numbers ------------------------------------------------------------------------------------------------- */

/* Each call that makes something fails once: what then comes is a connection with less, or none and nothing left. */
static void each_call_fails_once(int version)
{
    static const char *const calls[] = {"create-qp", "create-cq"};
    struct net net;
    struct pair pair;
    setenv("PINRAIL_FLUSH", "always", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair); /* what is made once per device is there from now on */
    pair_close(&pair);
    struct rnic_counts before = rnic_counts();
    struct census at_rest = census_take();
    for (int i = 0; i < 2; i++) {
        for (int n = 1; n <= 4; n++) {
            char plan[100];
            snprintf(plan, sizeof plan, "op=%s nth=%d -> fail=ENOMEM", calls[i], n);
            rnic_faults(plan);
            CHECK(attempt(&net, &pair));
            if (n <= 2) CHECK_EQ(rnic_fault_fired(0), 1);
            rnic_faults("");
            traffic(&pair);
            pair_close(&pair);
            struct rnic_counts after = rnic_counts();
            CHECK_EQ(after.mrs, before.mrs);
            CHECK_EQ(after.qps, before.qps);
            CHECK_EQ(after.cqs, before.cqs);
            CHECK_EQ(census_take().descriptors, at_rest.descriptors);
        }
    }
    net_stop(&net);
}

/* A call that always fails: nothing is left, the limit and the counts are told, and when it works again all is well. */
static void a_call_fails_for_good(int version)
{
    static const struct {
        const char *plan, *told, *counts;
    } list[] = {
        {"op=create-qp -> fail=ENOMEM", "other processes may have the rest of max_qp", "0 QPs of max_qp 16384"},
        {"op=create-qp -> fail=ENOMEM\nop=create-cq nth=1 -> fail=EINVAL", "ibv_create_qp", "of max_cq 16384"},
        {"op=create-cq -> fail=ENOMEM", "other processes may have the rest of max_cq", "0 CQs of max_cq 16384"},
        {"op=create-cq skip=1 -> fail=EAGAIN", "ibv_create_cq", "1 PDs of max_pd 32768"},
        {"op=alloc-pd -> fail=ENOMEM", "other processes may have the rest of max_pd", "0 PDs of max_pd 32768"},
        {"op=create-qp -> fail=EIO", "ibv_create_qp", NULL},
    };
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    pair_close(&pair);
    struct rnic_counts before = rnic_counts();
    struct census at_rest = census_take();
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        size_t mark = log_mark();
        rnic_faults(list[i].plan);
        CHECK(!attempt(&net, &pair));
        if (log_matches_since(mark, list[i].told) < 1) FAIL("%s: not told: %s", list[i].plan, list[i].told);
        if (list[i].counts && log_matches_since(mark, list[i].counts) < 1) FAIL("%s: %s", list[i].plan, list[i].counts);
        CHECK(log_warnings_since(mark) >= 1);
        rnic_faults("");
        struct rnic_counts after = rnic_counts();
        CHECK_EQ(after.mrs, before.mrs);
        CHECK_EQ(after.qps, before.qps);
        CHECK_EQ(after.cqs, before.cqs);
        CHECK_EQ(after.pds, before.pds);
        CHECK_EQ(census_take().descriptors, at_rest.descriptors);
        pair_open(&net, 0, &pair);
        pair_message(&pair, 5000, 0, i);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* All that a device can have is this process's: the next connection fails and says so, and is made when there is room. */
static void all_of_a_device(int version, const char *setting, const char *told)
{
    enum { ROOM = 3 };
    struct net net;
    struct pair pairs[ROOM], more;
    setenv(setting, "6", 1); /* one at each end of a connection */
    net_start(&net, version);
    for (int i = 0; i < ROOM; i++) pair_open(&net, 0, &pairs[i]);
    size_t mark = log_mark();
    CHECK(!attempt(&net, &more));
    CHECK(log_matches_since(mark, told) >= 1);
    CHECK(log_matches_since(mark, "have fewer connections on it") >= 1);
    for (int i = 0; i < ROOM; i++) pair_message(&pairs[i], 3000, 0, (uint64_t)i);
    pair_close(&pairs[1]);
    pair_open(&net, 0, &pairs[1]);
    for (int i = 0; i < ROOM; i++) pair_message(&pairs[i], 3000, 0, (uint64_t)i);
    for (int i = 0; i < ROOM; i++) pair_close(&pairs[i]);
    net_stop(&net);
}

static void no_more_queue_pairs(int version)
{
    setenv("PINRAIL_FLUSH", "never", 1);
    all_of_a_device(version, "SOFTRNIC_MAX_QP", "this process alone has all that the device has (max_qp 6)");
}

static void no_more_completion_queues(int version)
{
    all_of_a_device(version, "SOFTRNIC_MAX_CQ", "this process alone has all that the device has (max_cq 6)");
}

/* ---- descriptors --------------------------------------------------------------------------------------------- */

enum { MOST = 200 };
static int hogged[MOST], hogs;

/* A limit that is soon reached, and that the plugin cannot raise. */
static void few_descriptors(void)
{
    struct rlimit limit = {MOST, MOST};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/* Takes every descriptor that is left but `left`. */
static void hog(int left)
{
    int fd;
    while ((fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0) hogged[hogs++] = fd;
    while (left-- > 0) close(hogged[--hogs]);
}

static void let_go(void)
{
    while (hogs > 0) close(hogged[--hogs]);
}

/* Calls that are made once say which limit it is. */
static void starved(int version)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    struct pair pair;
    int ndev = 0;
    few_descriptors();
    net_load(&net, version);
    size_t mark = log_mark();
    for (int left = 0; left < 6; left++) {
        hog(left);
        ncclResult_t result = net_init(&net, 1, ffi_logger);
        let_go();
        CHECK(ffi_is_error(result));
    }
    CHECK(log_matches_since(mark, "RLIMIT_NOFILE: soft 200, hard 200") >= 6);
    CHECK_OK(net_init(&net, 1, ffi_logger));
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 1);
    for (int left = 0; left < 8; left++) {
        mark = log_mark();
        hog(left);
        ncclResult_t result = net_listen(&net, 0, handle, &listener);
        let_go();
        CHECK(ffi_is_error(result));
        CHECK_EQ(log_matches_since(mark, "RLIMIT_NOFILE: soft 200, hard 200"), 1);
        CHECK_EQ(log_warnings_since(mark), 1);
    }
    pair_open(&net, 0, &pair);
    mark = log_mark();
    hog(0);
    CHECK_REFUSED(net_listen(&net, 0, handle, &listener)); /* the device is open, a socket is not to be had */
    let_go();
    /* Three of the device and its events, two channels, two of the thread; what the software RNIC has besides is its own. */
    CHECK_EQ(log_matches_since(mark, "6 of them pinrail's"), 1);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

static int left_over;

/* The peer of a process that lacks descriptors. */
static void dialler(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded buffer = guarded_new(4096, 0);
    pattern_fill(buffer.data, buffer.size, 77);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, isend(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void starved_listener(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *comm = NULL;
    few_descriptors();
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    size_t mark = log_mark();
    hog(left_over);
    tell(socket, handle, sizeof handle);
    WAIT_UNTIL(({
                   CHECK_PTR(try_accept(&net, listener), NULL);
                   log_matches_since(mark, "accept waits until there are some") >= 1;
               }),
               "accept to find no descriptor");
    for (int i = 0; i < 100; i++) CHECK_PTR(try_accept(&net, listener), NULL);
    let_go();
    WAIT_UNTIL(comm = try_accept(&net, listener), "the true peer");
    CHECK(log_warnings_since(mark) >= 1 && log_warnings_since(mark) <= 3);
    CHECK_OK(net_close_listen(&net, listener));
    struct guarded buffer = guarded_new(4096, 0);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, irecv(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    CHECK_BUFFER(&buffer, 4096, 77);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void accept_waits_for_descriptors(int version)
{
    for (left_over = 0; left_over < 5; left_over++)
        run_two(version, (struct role){.name = "dialler", .run = dialler},
                (struct role){.name = "starved listener", .run = starved_listener}, NULL);
}

static void answerer(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded buffer = guarded_new(4096, 0);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, irecv(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    CHECK_BUFFER(&buffer, 4096, 77);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void starved_dialler(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE];
    void *comm = NULL;
    few_descriptors();
    setenv("NCCL_SOCKET_RETRY_SLEEP_MSEC", "1", 1);
    setenv("NCCL_SOCKET_RETRY_CNT", "0", 1); /* attempts for want of descriptors do not count */
    net_start(&net, version);
    hear(socket, handle, sizeof handle);
    size_t mark = log_mark();
    hog(left_over);
    WAIT_UNTIL(({
                   CHECK_PTR(try_connect(&net, 0, handle), NULL);
                   log_matches_since(mark, "connecting goes on for") >= 1;
               }),
               "connect to find no descriptor");
    for (int i = 0; i < 100; i++) CHECK_PTR(try_connect(&net, 0, handle), NULL);
    let_go();
    WAIT_UNTIL(comm = try_connect(&net, 0, handle), "the connection");
    struct guarded buffer = guarded_new(4096, 0);
    pattern_fill(buffer.data, buffer.size, 77);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, isend(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void connect_waits_for_descriptors(int version)
{
    for (left_over = 0; left_over < 8; left_over += 3)
        run_two(version, (struct role){.name = "starved dialler", .run = starved_dialler},
                (struct role){.name = "answerer", .run = answerer}, NULL);
}

/* No descriptor comes free: the deadline ends it, and the line says what was missing. */
static void the_deadline_names_the_limit(int version)
{
    struct net net;
    struct pair pair;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *send = NULL, *recv = NULL;
    ncclResult_t result = ncclSuccess;
    few_descriptors();
    setenv("PINRAIL_CONNECT_TIMEOUT", "1", 1);
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    hog(0);
    WAIT_UNTIL((result = net_connect(&net, 0, handle, &send)) != ncclSuccess, "connect to give up");
    CHECK(ffi_is_error(result));
    let_go();
    CHECK_EQ(log_matches_since(0, "(PINRAIL_CONNECT_TIMEOUT) while connecting to the listener; connecting to"), 1);
    CHECK(log_matches_since(0, "RLIMIT_NOFILE: soft 200, hard 200") >= 2);
    size_t mark = log_mark();
    WAIT_UNTIL((result = net_accept(&net, listener, &recv)) != ncclSuccess, "accept to give up");
    CHECK(ffi_is_error(result));
    CHECK_EQ(log_matches_since(mark, "while waiting for the peer to connect"), 1);
    CHECK_EQ(log_matches_since(mark, "RLIMIT_NOFILE"), 0);
    CHECK_OK(net_close_listen(&net, listener));
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(depths_step_down),
    EACH(small_queues_carry_every_kind),
    EACH(each_call_fails_once),
    EACH(a_call_fails_for_good),
    EACH(no_more_queue_pairs),
    EACH(no_more_completion_queues),
    EACH(starved),
    EACH(accept_waits_for_descriptors),
    EACH(connect_waits_for_descriptors),
    EACH(the_deadline_names_the_limit),
    {0},
};
