/*
 * Closing: in any order, with receives nobody answered, with sends still on their way (held), memory deregistered
 * first, one side before the other. NCCL closes like this on abort and never waits for the peer.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pair.h"
#include "softrnic.h"

enum { HANDLE = NCCL_NET_HANDLE_MAXSIZE, DEPTH = NCCL_NET_MAX_REQUESTS, LENGTH = 500 };

/* A pair whose listener is still open. */
struct trio {
    struct pair pair;
    void *listener;
};

static void trio_open(const struct net *net, struct trio *trio)
{
    char handle[HANDLE] = {0};
    *trio = (struct trio){.pair.net = net};
    CHECK_OK(net_listen(net, 0, handle, &trio->listener));
    WAIT_UNTIL(pair_step(&trio->pair, 0, handle, trio->listener), "a pair");
}

static void close_one(const struct trio *trio, int which)
{
    const struct net *net = trio->pair.net;
    if (which == 0) CHECK_OK(net_close_send(net, trio->pair.send));
    if (which == 1) CHECK_OK(net_close_recv(net, trio->pair.recv));
    if (which == 2) CHECK_OK(net_close_listen(net, trio->listener));
}

static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

static void expect_nothing_left(struct rnic_counts before)
{
    struct rnic_counts after = rnic_counts();
    CHECK_EQ(after.qps, before.qps);
    CHECK_EQ(after.cqs, before.cqs);
    CHECK_EQ(after.mrs, before.mrs);
    CHECK_EQ(after.pds, before.pds);
}

/* Device-wide objects may stay for the next connection; the first pair of a process brings them up. */
static void warm_up(const struct net *net)
{
    struct pair pair;
    pair_open(net, 0, &pair);
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
}

static void any_order_when_idle(int version)
{
    struct net net;
    struct trio trio;
    net_start(&net, version);
    warm_up(&net);
    struct rnic_counts before = rnic_counts();
    for (int o = 0; o < 6; o++) {
        trio_open(&net, &trio);
        pair_message(&trio.pair, 1000, 0, (uint64_t)o);
        for (int i = 0; i < 3; i++) close_one(&trio, orders[o][i]);
        expect_nothing_left(before);
    }
    net_stop(&net);
}

/* Nobody answers the receives; on both sides something is registered and stays so. */
static void any_order_with_receives_posted(int version)
{
    struct net net;
    struct trio trio;
    net_start(&net, version);
    warm_up(&net);
    struct rnic_counts before = rnic_counts();
    for (int o = 0; o < 6; o++) {
        trio_open(&net, &trio);
        struct guarded to = guarded_new((size_t)DEPTH * LENGTH, 0);
        void *mr = register_host(&net, trio.pair.recv, to.data, to.size), *requests[DEPTH];
        for (int i = 0; i < DEPTH; i++)
            requests[i] = irecv(&net, trio.pair.recv, to.data + i * LENGTH, LENGTH, 0, mr);
        CHECK(!is_done(&net, requests[0], NULL));
        if (o % 2) CHECK_OK(net_dereg_mr(&net, trio.pair.recv, mr)); /* as on abort */
        for (int i = 0; i < 3; i++) close_one(&trio, orders[o][i]);
        if (o % 2 == 0) CHECK_OK(net_dereg_mr(&net, trio.pair.recv, mr)); /* late, with a communicator that is gone */
        CHECK_BUFFER(&to, 0, 0);
        guarded_free(&to);
        expect_nothing_left(before);
    }
    net_stop(&net);
}

/* Completed but never tested, on both sides. */
static void any_order_with_requests_untested(int version)
{
    struct net net;
    struct trio trio;
    net_start(&net, version);
    warm_up(&net);
    struct rnic_counts before = rnic_counts();
    for (int o = 0; o < 6; o++) {
        trio_open(&net, &trio);
        struct guarded from = guarded_new(LENGTH, 0), to = guarded_new(LENGTH, 0);
        void *from_mr = register_host(&net, trio.pair.send, from.data, LENGTH);
        void *to_mr = register_host(&net, trio.pair.recv, to.data, LENGTH);
        for (int i = 0; i < 10; i++) {
            irecv(&net, trio.pair.recv, to.data, LENGTH, 0, to_mr);
            isend(&net, trio.pair.send, from.data, LENGTH, 0, from_mr);
        }
        CHECK_OK(net_dereg_mr(&net, trio.pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, trio.pair.recv, to_mr));
        for (int i = 0; i < 3; i++) close_one(&trio, orders[o][i]);
        guarded_free(&from);
        guarded_free(&to);
        expect_nothing_left(before);
    }
    net_stop(&net);
}

/*
 * The device holds the sends: they are on their way when the memory is deregistered, unmapped and the communicators
 * closed. Released afterwards, they must find nothing to touch, and nothing may be left over.
 */
static void any_order_with_sends_held(int version)
{
    struct net net;
    struct trio trio;
    net_start(&net, version);
    warm_up(&net);
    struct rnic_counts before = rnic_counts();
    for (int o = 0; o < 6; o++) {
        enum { COUNT = 8 };
        void *receives[COUNT], *sends[COUNT];
        trio_open(&net, &trio);
        struct guarded from = guarded_new((size_t)COUNT * LENGTH, 0), to = guarded_new((size_t)COUNT * LENGTH, 0);
        void *from_mr = register_host(&net, trio.pair.send, from.data, from.size);
        void *to_mr = register_host(&net, trio.pair.recv, to.data, to.size);
        for (int i = 0; i < COUNT; i++)
            receives[i] = irecv(&net, trio.pair.recv, to.data + i * LENGTH, LENGTH, 0, to_mr);
        rnic_hold(true);
        for (int i = 0; i < COUNT; i++)
            sends[i] = isend(&net, trio.pair.send, from.data + i * LENGTH, LENGTH, 0, from_mr);
        for (int i = 0; i < COUNT; i++) CHECK(!is_done(&net, sends[i], NULL) && !is_done(&net, receives[i], NULL));
        if (o % 2) CHECK_OK(net_dereg_mr(&net, trio.pair.send, from_mr));
        if (o % 3) CHECK_OK(net_dereg_mr(&net, trio.pair.recv, to_mr));
        for (int i = 0; i < 3; i++) close_one(&trio, orders[o][i]);
        if (o % 2 == 0) CHECK_OK(net_dereg_mr(&net, trio.pair.send, from_mr)); /* late */
        if (o % 3 == 0) CHECK_OK(net_dereg_mr(&net, trio.pair.recv, to_mr));
        guarded_free(&from);
        CHECK_BUFFER(&to, 0, 0);
        guarded_free(&to);
        rnic_hold(false);
        rnic_release(UINT64_MAX);
        expect_nothing_left(before);
    }
    warm_up(&net);
    net_stop(&net);
}

/* Held messages come through unharmed when the device lets them go, one at a time. */
static void held_sends_released_one_by_one(int version)
{
    enum { COUNT = 6 };
    struct net net;
    struct pair pair;
    void *receives[COUNT], *sends[COUNT];
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new((size_t)COUNT * LENGTH, 0), to = guarded_new((size_t)COUNT * LENGTH, 0);
    void *from_mr = register_host(&net, pair.send, from.data, from.size);
    void *to_mr = register_host(&net, pair.recv, to.data, to.size);
    for (int i = 0; i < COUNT; i++) receives[i] = irecv(&net, pair.recv, to.data + i * LENGTH, LENGTH, 0, to_mr);
    rnic_hold(true);
    for (int i = 0; i < COUNT; i++) {
        pattern_fill(from.data + i * LENGTH, LENGTH, (uint64_t)i);
        sends[i] = isend(&net, pair.send, from.data + i * LENGTH, LENGTH, 0, from_mr);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(!is_done(&net, receives[i], NULL));
        WAIT_UNTIL((rnic_release(1), is_done(&net, receives[i], NULL)), "a released message");
        CHECK_PART(&to, (size_t)i * LENGTH, LENGTH, LENGTH, (uint64_t)i);
    }
    rnic_hold(false);
    rnic_release(UINT64_MAX);
    for (int i = 0; i < COUNT; i++) CHECK_EQ(wait_size(&net, sends[i]), LENGTH);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

/* ---- one side first, between processes ------------------------------------------------------------------------ */

struct plan {
    bool sender_closes_first;
};

static void close_sender(int version, int socket, void *argument)
{
    const struct plan *plan = argument;
    struct net net;
    void *requests[DEPTH];
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded from = guarded_new((size_t)DEPTH * LENGTH, 0);
    void *mr = register_host(&net, comm, from.data, from.size);
    for (int i = 0; i < DEPTH; i++) {
        pattern_fill(from.data + i * LENGTH, LENGTH, (uint64_t)i);
        requests[i] = isend(&net, comm, from.data + i * LENGTH, LENGTH, 0, mr);
    }
    if (!plan->sender_closes_first) hear_step(socket, 'c'); /* the other side is closed, perhaps gone */
    for (int i = 0; i < DEPTH; i++) CHECK_EQ(wait_size(&net, requests[i]), LENGTH);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
    if (plan->sender_closes_first) tell_step(socket, 'c');
}

static void close_receiver(int version, int socket, void *argument)
{
    const struct plan *plan = argument;
    struct net net;
    void *requests[DEPTH];
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded to = guarded_new((size_t)DEPTH * LENGTH, 0);
    void *mr = register_host(&net, comm, to.data, to.size);
    for (int i = 0; i < DEPTH; i++) requests[i] = irecv(&net, comm, to.data + i * LENGTH, LENGTH, 0, mr);
    if (plan->sender_closes_first) hear_step(socket, 'c');
    for (int i = 0; i < DEPTH; i++) CHECK_EQ(wait_size(&net, requests[i]), LENGTH);
    for (int i = 0; i < DEPTH; i++) CHECK_PART(&to, (size_t)i * LENGTH, LENGTH, LENGTH, (uint64_t)i);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
    if (!plan->sender_closes_first) tell_step(socket, 'c');
}

static void one_side_first(int version, bool sender)
{
    struct plan plan = {.sender_closes_first = sender};
    run_two(version, (struct role){.name = "sender", .run = close_sender},
            (struct role){.name = "receiver", .run = close_receiver}, &plan);
}

/* What was delivered before the peer left counts: the other side finds all of it, and no error. */
static void sender_closes_first(int version) { one_side_first(version, true); }
static void receiver_closes_first(int version) { one_side_first(version, false); }

const struct ffi_case ffi_cases[] = {
    EACH(any_order_when_idle),
    EACH(any_order_with_receives_posted),
    EACH(any_order_with_requests_untested),
    EACH(any_order_with_sends_held),
    EACH(held_sends_released_one_by_one),
    EACH(sender_closes_first),
    EACH(receiver_closes_first),
    {0},
};
