/*
 * Sizes at the limits: messages larger than the device takes in one piece, sizes that test() could not report in its
 * int, negative sizes in the versions that have an int, and devices with small queues.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pair.h"

enum { PIECE = 65536 };

static void one_message(const struct pair *pair, size_t size, uint64_t key)
{
    pair_message(pair, size, (int)key, key);
}

/* max_msg_sz of 64 KiB: longer messages become several work requests, and nobody sees it. */
static void split_by_the_device(int version, const char *qps, const char *split)
{
    static const size_t sizes[] = {PIECE - 1,     PIECE,         PIECE + 1,      2 * PIECE - 1, 2 * PIECE,     2 * PIECE + 1,
                                   3 * PIECE + 7, 8 * PIECE - 1, 16 * PIECE + 1, 1,             64 * PIECE + 5};
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_MAX_MSG_SZ", "65536", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) one_message(&pair, sizes[i], i);
    pair_close(&pair);
    net_stop(&net);
}

static void split_1_qp(int version) { split_by_the_device(version, "1", "0"); }
static void split_4_qps(int version) { split_by_the_device(version, "4", "0"); }
static void split_4_qps_and_data(int version) { split_by_the_device(version, "4", "1"); }

/* A limit that no chunk of 128 divides: the pieces must still join without a gap. */
static void split_at_an_odd_limit(int version)
{
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_MAX_MSG_SZ", "5000", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    for (size_t size = 4998; size < 5003; size++) one_message(&pair, size, size);
    for (size_t size = 9998; size < 10003; size++) one_message(&pair, size, size);
    one_message(&pair, 300001, 7);
    pair_close(&pair);
    net_stop(&net);
}

/* Members of a group each above the limit, some of them below or empty. */
static void split_in_a_group(int version)
{
    enum { MEMBERS = 8, SLOT = 4 * PIECE };
    static const size_t lengths[MEMBERS] = {PIECE + 1, 0, 3 * PIECE, 1, PIECE, 2 * PIECE + 77, 200, 4 * PIECE};
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_MAX_MSG_SZ", "65536", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new((size_t)MEMBERS * SLOT, 3), to = guarded_new((size_t)MEMBERS * SLOT, 1);
    void *from_mr = register_host(&net, pair.send, from.data, from.size);
    void *to_mr = register_host(&net, pair.recv, to.data, to.size);
    for (int round = 0; round < 10; round++) {
        void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS];
        size_t sizes[MEMBERS];
        int tags[MEMBERS], got[64] = {0};
        guarded_reset(&to);
        for (int i = 0; i < MEMBERS; i++) {
            data[i] = to.data + i * SLOT;
            mrs[i] = to_mr;
            sizes[i] = SLOT;
            tags[i] = i;
            pattern_fill(from.data + i * SLOT, lengths[i], (uint64_t)(round * 8 + i));
        }
        void *receive = irecv_group(&net, pair.recv, MEMBERS, data, sizes, tags, mrs);
        for (int k = 0; k < MEMBERS; k++) {
            int i = (k * 3 + round) % MEMBERS;
            sends[i] = isend(&net, pair.send, from.data + i * SLOT, lengths[i], i, from_mr);
        }
        for (int i = 0; i < MEMBERS; i++) CHECK_EQ(wait_size(&net, sends[i]), lengths[i]);
        wait_done(&net, receive, got);
        for (int i = 0; i < MEMBERS; i++) {
            CHECK_EQ(got[i], lengths[i]);
            CHECK_PART(&to, (size_t)i * SLOT, SLOT, lengths[i], (uint64_t)(round * 8 + i));
        }
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

/* 32 long messages in flight, each of many work requests: the send queue must be deep enough or filled in turns. */
static void split_many_in_flight(int version)
{
    enum { COUNT = NCCL_NET_MAX_REQUESTS, SIZE = 40 * 4096 + 11 };
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_MAX_MSG_SZ", "4096", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new((size_t)COUNT * SIZE, 0), to = guarded_new((size_t)COUNT * SIZE, 0);
    void *from_mr = register_host(&net, pair.send, from.data, from.size);
    void *to_mr = register_host(&net, pair.recv, to.data, to.size);
    void *sends[COUNT], *receives[COUNT];
    for (int i = 0; i < COUNT; i++) receives[i] = irecv(&net, pair.recv, to.data + i * SIZE, SIZE, 0, to_mr);
    for (int i = 0; i < COUNT; i++) {
        pattern_fill(from.data + i * SIZE, SIZE, (uint64_t)i);
        sends[i] = isend(&net, pair.send, from.data + i * SIZE, SIZE, 0, from_mr);
    }
    for (int i = COUNT - 1; i >= 0; i--) {
        CHECK_EQ(wait_size(&net, sends[i]), SIZE);
        CHECK_EQ(wait_size(&net, receives[i]), SIZE);
    }
    for (int i = 0; i < COUNT; i++) CHECK_PART(&to, (size_t)i * SIZE, SIZE, SIZE, (uint64_t)i);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

/* isend of more than an int can say is refused, with the limit in the log, and it hurts no other communicator. */
static void size_beyond_int(int version)
{
    static const size_t wrong[] = {(size_t)INT_MAX + 1, (size_t)UINT_MAX, (size_t)UINT_MAX + 101, (size_t)1 << 40, SIZE_MAX};
    struct net net;
    struct pair pair, other;
    net_start(&net, version);
    pair_open(&net, 0, &other);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char byte[64];
        void *request = GARBAGE;
        if (net_has_int_sizes(version) && (int)wrong[i] >= 0) continue; /* this version's int cannot say it */
        pair_open(&net, 0, &pair);
        void *mr = register_host(&net, pair.send, byte, sizeof byte);
        void *to_mr = register_host(&net, pair.recv, byte, sizeof byte);
        void *receive = irecv(&net, pair.recv, byte, sizeof byte, 0, to_mr);
        (void)receive;
        size_t mark = log_mark();
        CHECK_REFUSED(net_isend(&net, pair.send, byte, wrong[i], 0, mr, &request));
        if (!net_has_int_sizes(version)) CHECK(log_matches_since(mark, "2147483647") >= 1);
        CHECK_OK(net_dereg_mr(&net, pair.send, mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        pair_close(&pair);
    }
    one_message(&other, 1000, 3);
    pair_close(&other);
    net_stop(&net);
}

/* A receive may ask for more than a message can have: refused, or taken as the most there is; never a wrong answer. */
static void receive_beyond_int(int version)
{
    static const size_t asked[] = {(size_t)INT_MAX, (size_t)INT_MAX + 1, (size_t)1 << 32, ((size_t)1 << 32) + 100};
    const size_t room = ((size_t)1 << 32) + 4096;
    struct net net;
    struct pair pair;
    net_start(&net, version);
    uint8_t *to = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(to != MAP_FAILED); /* address space only: a page is backed when it is touched */
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        struct guarded from = guarded_new(500, 0);
        void *data = to, *request = GARBAGE, *send;
        size_t size = asked[i];
        int tag = 0;
        if (net_has_int_sizes(version) && size > INT_MAX) continue;
        pair_open(&net, 0, &pair);
        void *from_mr = register_host(&net, pair.send, from.data, 500);
        void *to_mr = register_host(&net, pair.recv, to, version <= 7 ? INT_MAX : room);
        pattern_fill(from.data, 500, i);
        ncclResult_t result = net_irecv(&net, pair.recv, 1, &data, &size, &tag, &to_mr, &request);
        printf("irecv of %zu: %s\n", size, ffi_result_name(result));
        if (result == ncclSuccess) {
            CHECK(request != NULL && request != GARBAGE);
            send = isend(&net, pair.send, from.data, 500, 0, from_mr);
            CHECK_EQ(wait_size(&net, send), 500);
            CHECK_EQ(wait_size(&net, request), 500);
            CHECK_EQ(pattern_mismatch(to, 500, i), -1);
            CHECK_EQ(to[500], 0);
        } else {
            CHECK(ffi_is_error(result)); /* more than the memory handle has */
            CHECK(size >= INT_MAX);
        }
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        pair_close(&pair);
    }
    net_stop(&net);
}

/* v6 to v8 have an int: a negative size is nobody's message. */
static void negative_size(int version)
{
    struct net net;
    struct pair pair;
    char byte[64];
    void *request = GARBAGE, *data = byte;
    size_t minus = (size_t)-1;
    int tag = 0;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    void *mr = register_host(&net, pair.send, byte, sizeof byte);
    void *to_mr = register_host(&net, pair.recv, byte, sizeof byte);
    irecv(&net, pair.recv, byte, sizeof byte, 0, to_mr); /* so that the send would not block */
    CHECK_REFUSED(net_isend(&net, pair.send, byte, minus, 0, mr, &request));
    request = GARBAGE;
    if (net_has_int_sizes(version)) CHECK_REFUSED(net_irecv(&net, pair.recv, 1, &data, &minus, &tag, &to_mr, &request));
    if (version <= 7) CHECK_REFUSED(net_reg_mr(&net, pair.recv, byte, minus, NCCL_PTR_HOST, &request));
    pair_close(&pair);
    net_stop(&net);
}

/* Queues so small that the protocol cannot live with them have to be refused by name, not found out in traffic. */
static void with_queue_depth(int version, int socket, void *argument)
{
    (void)socket;
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *send = NULL, *recv = NULL;
    int ndev = 0;
    size_t mark = log_mark();
    setenv("SOFTRNIC_MAX_QP_WR", argument, 1);
    net_load(&net, version);
    ncclResult_t result = net_init(&net, 1, ffi_logger);
    if (result == ncclSuccess) result = net_devices(&net, &ndev);
    if (result == ncclSuccess && ndev > 0) {
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        WAIT_UNTIL(({
                       if (!send) result = net_connect(&net, 0, handle, &send);
                       if (!recv && result == ncclSuccess) result = net_accept(&net, listener, &recv);
                       (send && recv) || result != ncclSuccess;
                   }),
                   "a connection, or the reason why not");
        struct pair pair = {&net, send, recv};
        for (int m = 0; m < 300 && result == ncclSuccess; m++) one_message(&pair, (size_t)m, (uint64_t)m);
        if (send) CHECK_OK(net_close_send(&net, send));
        if (recv) CHECK_OK(net_close_recv(&net, recv));
        CHECK_OK(net_close_listen(&net, listener));
    }
    printf("max_qp_wr %s: %s, %d devices\n", (char *)argument, ffi_result_name(result), ndev);
    if (result != ncclSuccess || ndev == 0) CHECK(log_warnings_since(mark) >= 1);
    if (atoi(argument) >= 4096) CHECK(result == ncclSuccess && ndev > 0);
    net_stop(&net);
}

static void small_queues(int version)
{
    static const char *const depths[] = {"1", "16", "64", "256", "1024", "4096"};
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++)
        run_one(version, (struct role){.name = depths[i], .run = with_queue_depth}, (void *)(uintptr_t)depths[i]);
}

const struct ffi_case ffi_cases[] = {
    EACH(split_1_qp),
    EACH(split_4_qps),
    EACH(split_4_qps_and_data),
    EACH(split_at_an_odd_limit),
    EACH(split_in_a_group),
    EACH(split_many_in_flight),
    EACH(size_beyond_int),
    EACH(receive_beyond_int),
    EACH(negative_size),
    EACH(small_queues),
    {0},
};
