/*
 * Many requests at once: 32 receives on a communicator and up to 256 sends that answer them, the 33rd that has to
 * wait, completion in any order, ten thousand messages through a window, and out-pointers full of garbage.
 */
#include <stdlib.h>
#include <string.h>

#include "pair.h"

enum { DEPTH = NCCL_NET_MAX_REQUESTS, MEMBERS = NCCL_NET_MAX_RECVS, SLOT = 256, LENGTH = 150 };

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};

static void desk_open(struct desk *desk, int version, size_t slots)
{
    net_start(&desk->net, version);
    pair_open(&desk->net, 0, &desk->pair);
    desk->from = guarded_new(slots * SLOT, 0);
    desk->to = guarded_new(slots * SLOT, 1);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, desk->from.size);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to.data, desk->to.size);
    for (size_t i = 0; i < slots; i++) pattern_fill(desk->from.data + i * SLOT, LENGTH, 0xDE5C0000u + i);
}

static void desk_close(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    net_stop(&desk->net);
    guarded_free(&desk->from);
    guarded_free(&desk->to);
}

static void *desk_receive(struct desk *desk, int slot)
{
    void *data = desk->to.data + slot * SLOT;
    size_t size = SLOT;
    int tag = 1;
    return try_irecv(&desk->net, desk->pair.recv, 1, &data, &size, &tag, &desk->to_mr);
}

static void *desk_send(struct desk *desk, int slot)
{
    return try_isend(&desk->net, desk->pair.send, desk->from.data + slot * SLOT, LENGTH, 1, desk->from_mr);
}

static void desk_expect(struct desk *desk, int slot, int message)
{
    CHECK_PART(&desk->to, (size_t)slot * SLOT, SLOT, LENGTH, 0xDE5C0000u + (unsigned)message);
}

/* `order` is the order in which the requests are tested: both sides fill up first. */
static void fill_up(int version, const int *order)
{
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH];
    desk_open(&desk, version, DEPTH + 1);
    for (int round = 0; round < 3; round++) {
        guarded_reset(&desk.to);
        for (int i = 0; i < DEPTH; i++) {
            receives[i] = desk_receive(&desk, i);
            if (!receives[i]) FAIL("receive %d of %d would block", i + 1, DEPTH);
        }
        for (int i = 0; i < 10; i++) CHECK_PTR(desk_receive(&desk, DEPTH), NULL);
        for (int i = 0; i < DEPTH; i++) WAIT_UNTIL((sends[i] = desk_send(&desk, i)), "a send among 32");
        for (int i = 0; i < 10; i++) CHECK_PTR(desk_send(&desk, DEPTH), NULL); /* nobody asked for a 33rd */
        for (int i = 0; i < DEPTH; i++) {
            CHECK_EQ(wait_size(&desk.net, sends[order[i]]), LENGTH);
            CHECK_EQ(wait_size(&desk.net, receives[order[i]]), LENGTH);
        }
        for (int i = 0; i < DEPTH; i++) desk_expect(&desk, i, i);
        CHECK_PART(&desk.to, (size_t)DEPTH * SLOT, SLOT, 0, 0);
    }
    desk_close(&desk);
}

static void thirty_two_in_order(int version)
{
    int order[DEPTH];
    for (int i = 0; i < DEPTH; i++) order[i] = i;
    fill_up(version, order);
}

static void thirty_two_in_reverse(int version)
{
    int order[DEPTH];
    for (int i = 0; i < DEPTH; i++) order[i] = DEPTH - 1 - i;
    fill_up(version, order);
}

static void thirty_two_shuffled(int version)
{
    int order[DEPTH];
    uint64_t random = 32;
    for (int i = 0; i < DEPTH; i++) order[i] = i;
    shuffle(order, DEPTH, &random);
    fill_up(version, order);
}

static void thirty_two_on_4_qps(int version)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    thirty_two_shuffled(version);
}

/* 32 groups of 8: 256 sends in flight on one communicator, none tested before the last is posted. */
static void two_hundred_fifty_six_sends(int version)
{
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH][MEMBERS];
    int order[DEPTH * MEMBERS];
    uint64_t random = 256;
    desk_open(&desk, version, DEPTH * MEMBERS);
    for (int i = 0; i < DEPTH * MEMBERS; i++) order[i] = i;
    for (int round = 0; round < 3; round++) {
        guarded_reset(&desk.to);
        for (int g = 0; g < DEPTH; g++) {
            void *data[MEMBERS], *mrs[MEMBERS];
            size_t sizes[MEMBERS];
            int tags[MEMBERS];
            for (int i = 0; i < MEMBERS; i++) {
                data[i] = desk.to.data + (g * MEMBERS + i) * SLOT;
                mrs[i] = desk.to_mr;
                sizes[i] = SLOT;
                tags[i] = 10 * i;
            }
            receives[g] = try_irecv(&desk.net, desk.pair.recv, MEMBERS, data, sizes, tags, mrs);
            if (!receives[g]) FAIL("group %d of %d would block", g + 1, DEPTH);
        }
        for (int g = 0; g < DEPTH; g++)
            for (int k = 0; k < MEMBERS; k++) {
                int i = (k * 5 + g) % MEMBERS;
                void *from = desk.from.data + (g * MEMBERS + i) * SLOT;
                sends[g][i] = isend(&desk.net, desk.pair.send, from, LENGTH, 10 * i, desk.from_mr);
            }
        shuffle(order, DEPTH * MEMBERS, &random);
        for (int i = 0; i < DEPTH * MEMBERS; i++)
            CHECK_EQ(wait_size(&desk.net, sends[order[i] / MEMBERS][order[i] % MEMBERS]), LENGTH);
        for (int g = DEPTH - 1; g >= 0; g--) {
            int sizes[64] = {0};
            wait_done(&desk.net, receives[g], sizes);
            for (int i = 0; i < MEMBERS; i++) CHECK_EQ(sizes[i], LENGTH);
        }
        for (int i = 0; i < DEPTH * MEMBERS; i++) desk_expect(&desk, i, i);
    }
    desk_close(&desk);
}

/* ---- a stream between two processes -------------------------------------------------------------------------- */

enum { MESSAGES = 10000, WINDOW = 16, LARGEST = 3000 };

static size_t stream_size(int message)
{
    uint64_t state = (uint64_t)message;
    return next_random(&state) % LARGEST;
}

static void stream_out(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = dial(&net, 0, socket), *requests[WINDOW] = {NULL};
    struct guarded buffer = guarded_new((size_t)WINDOW * LARGEST, 1);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    for (int m = 0; m < MESSAGES + WINDOW; m++) {
        int w = m % WINDOW;
        if (requests[w]) CHECK_EQ(wait_size(&net, requests[w]), stream_size(m - WINDOW));
        requests[w] = NULL;
        if (m >= MESSAGES) continue;
        pattern_fill(buffer.data + w * LARGEST, stream_size(m), (uint64_t)m);
        requests[w] = isend(&net, comm, buffer.data + w * LARGEST, stream_size(m), m, mr);
    }
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void stream_in(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket), *requests[WINDOW] = {NULL};
    struct guarded buffer = guarded_new((size_t)WINDOW * LARGEST, 2);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    for (int m = 0; m < MESSAGES + WINDOW; m++) {
        int w = m % WINDOW;
        if (requests[w]) {
            CHECK_EQ(wait_size(&net, requests[w]), stream_size(m - WINDOW));
            CHECK_PART(&buffer, (size_t)w * LARGEST, LARGEST, stream_size(m - WINDOW), (uint64_t)(m - WINDOW));
            memset(buffer.data + w * LARGEST, 0xC3, LARGEST);
        }
        requests[w] = m < MESSAGES ? irecv(&net, comm, buffer.data + w * LARGEST, LARGEST, m, mr) : NULL;
    }
    CHECK_BUFFER(&buffer, 0, 0);
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void stream(int version, const char *qps, const char *split)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    run_two(version, (struct role){.name = "sender", .run = stream_out},
            (struct role){.name = "receiver", .run = stream_in}, NULL);
}

static void ten_thousand(int version) { stream(version, "1", "0"); }
static void ten_thousand_4_qps(int version) { stream(version, "4", "0"); }
static void ten_thousand_4_qps_split(int version) { stream(version, "4", "1"); }

/* ---- out-pointers -------------------------------------------------------------------------------------------- */

/* The marker of an optional completion: a real request must take its place, and the data must still come. */
static void optional_completion_marker(int version)
{
    struct desk desk;
    desk_open(&desk, version, 4);
    for (int i = 0; i < 100; i++) {
        void *data = desk.to.data, *request = NULL, *send = NULL;
        size_t size = SLOT;
        int tag = 1, done = 0x5bad;
        guarded_reset(&desk.to);
        WAIT_UNTIL(({
                       request = NCCL_NET_OPTIONAL_RECV_COMPLETION;
                       CHECK_OK(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &request));
                       request;
                   }),
                   "irecv to take the receive");
        CHECK(request != NCCL_NET_OPTIONAL_RECV_COMPLETION);
        CHECK_OK(net_test(&desk.net, request, &done, NULL)); /* may be done at once */
        CHECK(done == 0 || done == 1);
        WAIT_UNTIL((send = desk_send(&desk, 0)), "the send");
        wait_done(&desk.net, send, NULL);
        if (!done) wait_done(&desk.net, request, NULL);
        WAIT_UNTIL(pattern_mismatch(data, LENGTH, 0xDE5C0000u) < 0, "the data themselves");
        desk_expect(&desk, 0, 0);
    }
    desk_close(&desk);
}

/* A receive that would block has to take the marker away: NCCL would otherwise test pointer 1. */
static void marker_and_would_block(int version)
{
    struct desk desk;
    void *receives[DEPTH], *data, *send = NULL;
    size_t size = SLOT;
    int tag = 1;
    desk_open(&desk, version, DEPTH + 1);
    data = desk.to.data + DEPTH * SLOT;
    for (int i = 0; i < DEPTH; i++) CHECK((receives[i] = desk_receive(&desk, i)) != NULL);
    void *request = NCCL_NET_OPTIONAL_RECV_COMPLETION;
    CHECK_OK(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &request));
    CHECK_PTR(request, NULL);
    for (int i = 0; i < DEPTH; i++) {
        WAIT_UNTIL((send = desk_send(&desk, i)), "a send");
        wait_done(&desk.net, send, NULL);
        wait_done(&desk.net, receives[i], NULL);
        desk_expect(&desk, i, i);
    }
    desk_close(&desk);
}

/* The bootstrap passes no sizes at all. */
static void no_sizes(int version)
{
    struct desk desk;
    desk_open(&desk, version, DEPTH);
    for (int i = 0; i < DEPTH; i++) {
        void *receive, *send;
        WAIT_UNTIL((receive = desk_receive(&desk, i)), "a receive");
        WAIT_UNTIL((send = desk_send(&desk, i)), "a send");
        wait_done(&desk.net, send, NULL);
        wait_done(&desk.net, receive, NULL);
        desk_expect(&desk, i, i);
    }
    desk_close(&desk);
}

/* test writes `done` each time, also when nothing has happened, and touches no size before the end. */
static void test_before_anything_came(int version)
{
    struct desk desk;
    void *receive, *send;
    int sizes[64];
    desk_open(&desk, version, 1);
    WAIT_UNTIL((receive = desk_receive(&desk, 0)), "a receive");
    for (int i = 0; i < 64; i++) sizes[i] = 0x5bad;
    for (int i = 0; i < 1000; i++) CHECK(!is_done(&desk.net, receive, sizes));
    for (int i = 0; i < 64; i++) CHECK_EQ(sizes[i], 0x5bad);
    WAIT_UNTIL((send = desk_send(&desk, 0)), "the send");
    CHECK_EQ(wait_size(&desk.net, send), LENGTH);
    CHECK_EQ(wait_size(&desk.net, receive), LENGTH);
    desk_expect(&desk, 0, 0);
    desk_close(&desk);
}

/* Receives that nobody tests for a while cost the sender nothing, and the other way round. */
static void one_side_runs_ahead(int version)
{
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH];
    desk_open(&desk, version, DEPTH);
    for (int round = 0; round < 200; round++) {
        int count = 1 + round % DEPTH;
        guarded_reset(&desk.to);
        for (int i = 0; i < count; i++) WAIT_UNTIL((receives[i] = desk_receive(&desk, i)), "a receive");
        for (int i = 0; i < count; i++) WAIT_UNTIL((sends[i] = desk_send(&desk, i)), "a send");
        if (round % 2)
            for (int i = 0; i < count; i++) CHECK_EQ(wait_size(&desk.net, sends[i]), LENGTH);
        for (int i = 0; i < count; i++) CHECK_EQ(wait_size(&desk.net, receives[i]), LENGTH);
        if (round % 2 == 0)
            for (int i = 0; i < count; i++) CHECK_EQ(wait_size(&desk.net, sends[i]), LENGTH);
        for (int i = 0; i < count; i++) desk_expect(&desk, i, i);
    }
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(thirty_two_in_order),
    EACH(thirty_two_in_reverse),
    EACH(thirty_two_shuffled),
    EACH(thirty_two_on_4_qps),
    EACH(two_hundred_fifty_six_sends),
    EACH(ten_thousand),
    EACH(ten_thousand_4_qps),
    EACH(ten_thousand_4_qps_split),
    EACH(optional_completion_marker),
    EACH(marker_and_would_block),
    EACH(no_sizes),
    EACH(test_before_anything_came),
    EACH(one_side_runs_ahead),
    {0},
};
