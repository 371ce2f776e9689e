/*
 * How buffers that are reached through copies come to an end: deregistered and unmapped with work in flight, closed before
 * that or after, unloaded, and with a peer that dies. Nothing may touch a buffer once deregMr has returned, and nothing
 * may be left.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "held.h"

/* What the plugin copies through: pieces of a message on the sending end, and so many of them at once. */
enum { CHUNK = 256 << 10, CHUNKS = 16, LONG = (CHUNKS + 4) * CHUNK + 12345, SHORT = 3000 };

/* A connection that came later, with held buffers of its own. */
static void works_on(const struct net *net)
{
    struct desk desk = {.net = *net};
    desk_lay(&desk, BOTH, SHORT, SHORT);
    held_message(&desk.pair, &desk.from, desk.from_mr, SHORT, &desk.to, desk.to_mr, SHORT, 1);
    desk_clear(&desk);
}

/* The same code from every call on a communicator that failed. */
static void expect_latched(struct desk *desk, bool is_send, void *request, ncclResult_t code)
{
    size_t mark = log_mark();
    for (int i = 0; i < 20; i++) {
        void *again = GARBAGE, *data = NULL, *no_mr = NULL;
        size_t size = 0;
        int tag = 0, done = 0;
        if (is_send) CHECK_EQ(net_isend(&desk->net, desk->pair.send, NULL, 0, 0, NULL, &again), code);
        if (!is_send) CHECK_EQ(net_irecv(&desk->net, desk->pair.recv, 1, &data, &size, &tag, &no_mr, &again), code);
        CHECK_EQ(net_test(&desk->net, request, &done, NULL), code);
    }
    CHECK_EQ(log_warnings_since(mark), 0);
}

/* ---- deregistered under work --------------------------------------------------------------------------------- */

/* What was copied already comes through, although the buffer is gone. */
static void deregistered_under_a_short_send(int version)
{
    enum { SIZE = 3 * CHUNK + 77 };
    struct desk desk;
    desk_open(&desk, version, SENDER, SIZE);
    void *receive = desk_irecv(&desk, 0, SIZE, 0), *send;
    pattern_fill(desk.from.data, SIZE, 8);
    rnic_hold(true);
    WAIT_UNTIL((send = desk_isend(&desk, 0, SIZE, 0)), "the send");
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    held_free(&desk.from);
    CHECK(!is_done(&desk.net, send, NULL));
    rnic_hold(false);
    CHECK_EQ(wait_size(&desk.net, send), SIZE);
    CHECK_EQ(wait_size(&desk.net, receive), SIZE);
    CHECK_BUFFER(&desk.to, SIZE, 8);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    pair_close(&desk.pair);
    held_free(&desk.to);
    net_stop(&desk.net);
}

/* What was not is an error on this end, and no end at all for the receive. */
static void deregistered_under_a_long_send(int version)
{
    struct desk desk;
    desk_open(&desk, version, BOTH, LONG);
    void *receive = desk_irecv(&desk, 0, LONG, 0), *send;
    rnic_hold(true);
    WAIT_UNTIL((send = desk_isend(&desk, 0, LONG, 0)), "the send");
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    held_free(&desk.from);
    size_t mark = log_mark();
    rnic_hold(false);
    ncclResult_t code = wait_error(&desk.net, send);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "was deregistered"), 1);
    expect_latched(&desk, true, send, code);
    CHECK(!is_done(&desk.net, receive, NULL));
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    wait_error(&desk.net, receive);
    CHECK_BUFFER(&desk.to, 0, 0);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    held_free(&desk.to);
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    works_on(&desk.net);
    net_stop(&desk.net);
}

/* Before anything came: the data find their place, which is the plugin's, and go no further. */
static void deregistered_under_a_receive(int version)
{
    struct desk desk;
    desk_open(&desk, version, RECEIVER, LONG);
    void *first = desk_irecv(&desk, 0, SHORT, 0), *second = desk_irecv(&desk, SHORT, LONG - SHORT, 0), *send[2];
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    CHECK_BUFFER(&desk.to, 0, 0);
    held_free(&desk.to);
    WAIT_UNTIL((send[0] = desk_isend(&desk, 0, SHORT, 0)), "the first send");
    WAIT_UNTIL((send[1] = desk_isend(&desk, 0, LONG - SHORT, 0)), "the second send");
    CHECK_EQ(wait_size(&desk.net, send[0]), SHORT);
    CHECK_EQ(wait_size(&desk.net, send[1]), LONG - SHORT);
    size_t mark = log_mark();
    ncclResult_t code = wait_error(&desk.net, first);
    CHECK_EQ(wait_error(&desk.net, second), code);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "was deregistered"), 1);
    expect_latched(&desk, false, first, code);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    held_free(&desk.from);
    pair_close(&desk.pair);
    works_on(&desk.net);
    net_stop(&desk.net);
}

/* While it is being copied out: what is there stays, and not a byte more is written. */
static void deregistered_in_the_middle_of_a_copy(int version)
{
    struct desk desk;
    desk_open(&desk, version, RECEIVER, LONG);
    void *receive = desk_irecv(&desk, 0, LONG, 0), *send;
    pattern_fill(desk.from.data, LONG, 9);
    WAIT_UNTIL((send = desk_isend(&desk, 0, LONG, 0)), "the send");
    CHECK_EQ(wait_size(&desk.net, send), LONG);
    WAIT_UNTIL((is_done(&desk.net, receive, NULL), pattern_mismatch(desk.to.data, CHUNK, 9) < 0), "the first bytes");
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    ptrdiff_t copied = pattern_mismatch(desk.to.data, LONG, 9);
    if (copied < 0) FAIL("%d bytes were copied by one test", LONG);
    CHECK_PART(&desk.to, 0, LONG, (size_t)copied, 9);
    wait_error(&desk.net, receive);
    CHECK_BUFFER(&desk.to, (size_t)copied, 9);
    held_free(&desk.to);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    held_free(&desk.from);
    pair_close(&desk.pair);
    works_on(&desk.net);
    net_stop(&desk.net);
}

/* ---- closed with work in flight ------------------------------------------------------------------------------ */

/* One of the ways to end a connection on abort, bit by bit. */
enum way {
    RECEIVER_CLOSES_FIRST = 1,
    SENDER_DEREGISTERS_LATE = 2, /* after its communicator is closed */
    RECEIVER_DEREGISTERS_LATE = 4,
    SENDS_HELD = 8, /* by the device; else all has come and is being copied */
    WAYS = 16,
};

static void forget(const struct desk *desk, void *comm, void *mr, struct guarded *buffer, bool untouched)
{
    CHECK_OK(net_dereg_mr(&desk->net, comm, mr));
    if (untouched) CHECK_BUFFER(buffer, 0, 0);
    held_free(buffer);
}

static void end(struct desk *desk, unsigned way)
{
    void *receives[2], *sends[2];
    pattern_fill(desk->from.data, LONG + SHORT, way);
    receives[0] = desk_irecv(desk, 0, LONG, 0);
    receives[1] = desk_irecv(desk, LONG, SHORT, 0);
    CHECK(receives[0] && receives[1]);
    rnic_hold(way & SENDS_HELD);
    WAIT_UNTIL((sends[0] = desk_isend(desk, 0, LONG, 0)), "the long send");
    if (way & SENDS_HELD) {
        CHECK_PTR(desk_isend(desk, LONG, SHORT, 0), NULL);
        CHECK(!is_done(&desk->net, sends[0], NULL) && !is_done(&desk->net, receives[0], NULL));
    } else {
        CHECK_EQ(wait_size(&desk->net, sends[0]), LONG);
        WAIT_UNTIL((is_done(&desk->net, receives[0], NULL), desk->to.data[0] != 0xC3), "the first bytes");
        WAIT_UNTIL((sends[1] = desk_isend(desk, LONG, SHORT, 0)), "the short send");
    }
    if (!(way & SENDER_DEREGISTERS_LATE)) forget(desk, desk->pair.send, desk->from_mr, &desk->from, false);
    if (!(way & RECEIVER_DEREGISTERS_LATE)) forget(desk, desk->pair.recv, desk->to_mr, &desk->to, way & SENDS_HELD);
    if (way & RECEIVER_CLOSES_FIRST) CHECK_OK(net_close_recv(&desk->net, desk->pair.recv));
    CHECK_OK(net_close_send(&desk->net, desk->pair.send));
    if (!(way & RECEIVER_CLOSES_FIRST)) CHECK_OK(net_close_recv(&desk->net, desk->pair.recv));
    if (way & SENDER_DEREGISTERS_LATE) forget(desk, desk->pair.send, desk->from_mr, &desk->from, false);
    if (way & RECEIVER_DEREGISTERS_LATE) forget(desk, desk->pair.recv, desk->to_mr, &desk->to, way & SENDS_HELD);
    rnic_hold(false);
    rnic_release(UINT64_MAX); /* what is left of it finds nothing to touch */
}

static void any_order(int version)
{
    struct desk desk;
    held_start(&desk.net, version);
    works_on(&desk.net); /* device-wide objects may stay for the next connection */
    struct rnic_counts before = rnic_counts();
    for (unsigned way = 0; way < WAYS; way++) {
        desk_lay(&desk, BOTH, LONG + SHORT, LONG + SHORT);
        end(&desk, way);
        struct rnic_counts after = rnic_counts();
        CHECK_EQ(after.qps, before.qps);
        CHECK_EQ(after.cqs, before.cqs);
        CHECK_EQ(after.mrs, before.mrs);
        CHECK_EQ(after.pds, before.pds);
    }
    works_on(&desk.net);
    net_stop(&desk.net);
}

/* Loaded, used and unloaded again and again, each time with another end. */
static void load_and_unload(int version)
{
    rnic_keep();
    struct census before = census_take();
    for (unsigned i = 0; i < 20; i++) {
        struct desk desk;
        held_start(&desk.net, version);
        works_on(&desk.net);
        desk_lay(&desk, BOTH, LONG + SHORT, LONG + SHORT);
        if (i % 2) end(&desk, i * 5 % WAYS);
        if (i % 2 == 0) desk_clear(&desk);
        net_stop(&desk.net);
        expect_gone(before);
    }
}

static void twenty_times(int version)
{
    (void)version;
    load_and_unload(12);
}

static void twenty_times_in_v9(int version)
{
    (void)version;
    load_and_unload(9);
}

/* ---- a peer that dies ---------------------------------------------------------------------------------------- */

enum { PIECES = 3 };

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void dying_sender(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    held_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded from = held_new(LONG, 0, true);
    void *mr = register_bounced(&net, comm, &from);
    pattern_fill(from.data, LONG, 1);
    rnic_hold(true);
    isend(&net, comm, from.data, LONG, 0, mr);
    CHECK_EQ(rnic_release(PIECES), PIECES);
    hear_step(socket, 'r');
    die();
}

static void bereaved_receiver(int version, int socket, void *argument)
{
    (void)argument;
    struct desk desk;
    held_start(&desk.net, version);
    desk.pair = (struct pair){.net = &desk.net, .recv = answer(&desk.net, 0, socket)};
    desk.to = held_new(LONG + SHORT, 0, true);
    desk.to_mr = register_bounced(&desk.net, desk.pair.recv, &desk.to);
    void *first = desk_irecv(&desk, 0, LONG, 0), *second = desk_irecv(&desk, LONG, SHORT, 0);
    size_t mark = log_mark();
    tell_step(socket, 'r');
    ncclResult_t code = wait_error(&desk.net, first);
    CHECK_EQ(wait_error(&desk.net, second), code);
    CHECK(log_warnings_since(mark) >= 1);
    expect_latched(&desk, false, first, code);
    CHECK_BUFFER(&desk.to, 0, 0); /* a message that came in part is none */
    forget(&desk, desk.pair.recv, desk.to_mr, &desk.to, true);
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    works_on(&desk.net);
    net_stop(&desk.net);
}

static void sender_dies_in_the_middle(int version)
{
    setenv("SOFTRNIC_RETRY_MS", "500", 1);
    run_two(version, (struct role){.name = "dying sender", .run = dying_sender, .dies_by_kill = true},
            (struct role){.name = "receiver", .run = bereaved_receiver}, NULL);
}

static void dying_receiver(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    held_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded to = held_new(LONG, 0, true);
    void *mr = register_bounced(&net, comm, &to);
    irecv(&net, comm, to.data, LONG, 0, mr);
    hear_step(socket, 'k');
    die();
}

static void bereaved_sender(int version, int socket, void *argument)
{
    (void)argument;
    struct desk desk;
    held_start(&desk.net, version);
    desk.pair = (struct pair){.net = &desk.net, .send = dial(&desk.net, 0, socket)};
    desk.from = held_new(LONG, 0, true);
    desk.from_mr = register_bounced(&desk.net, desk.pair.send, &desk.from);
    rnic_hold(true);
    void *send;
    WAIT_UNTIL((send = desk_isend(&desk, 0, LONG, 0)), "the send");
    CHECK_EQ(rnic_release(PIECES), PIECES);
    CHECK(!is_done(&desk.net, send, NULL));
    size_t mark = log_mark();
    tell_step(socket, 'k');
    hear_end(socket);
    rnic_hold(false);
    ncclResult_t code = wait_error(&desk.net, send);
    CHECK(log_warnings_since(mark) >= 1);
    expect_latched(&desk, true, send, code);
    forget(&desk, desk.pair.send, desk.from_mr, &desk.from, false);
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    works_on(&desk.net);
    net_stop(&desk.net);
}

static void receiver_dies_in_the_middle(int version)
{
    setenv("SOFTRNIC_RETRY_MS", "500", 1);
    run_two(version, (struct role){.name = "sender", .run = bereaved_sender},
            (struct role){.name = "dying receiver", .run = dying_receiver, .dies_by_kill = true}, NULL);
}

/* A handle serves the connection it was registered with: another one has other chunks and another landing place. */
static void handle_of_another_connection(int version)
{
    struct desk desk;
    struct pair other;
    void *request = GARBAGE;
    enum { SIZE = 3000 };
    desk_open(&desk, version, BOTH, SIZE);
    pair_open(&desk.net, 0, &other);
    int tag = 0;
    size_t size = SIZE;
    void *to = desk.to.data, *to_mr = desk.to_mr;
    CHECK_REFUSED(net_irecv(&desk.net, other.recv, 1, &to, &size, &tag, &to_mr, &request));
    CHECK_PTR(request, NULL);
    pair_message(&other, SIZE, 0, 7); /* nothing is left of it */
    struct guarded direct = held_new(SIZE, 0, false);
    void *direct_mr = register_direct(&desk.net, other.recv, &direct);
    void *receive = irecv(&desk.net, other.recv, direct.data, SIZE, 0, direct_mr);
    request = GARBAGE;
    ncclResult_t result;
    WAIT_UNTIL((result = net_isend(&desk.net, other.send, desk.from.data, SIZE, 0, desk.from_mr, &request)) != ncclSuccess ||
                   request,
               "an answer about the handle"); /* the credit may still be on its way */
    CHECK(ffi_is_error(result));
    CHECK_PTR(request, NULL);
    struct guarded own = held_new(SIZE, 0, false);
    void *own_mr = register_direct(&desk.net, other.send, &own);
    pattern_fill(own.data, SIZE, 8);
    void *send = isend(&desk.net, other.send, own.data, SIZE, 0, own_mr);
    CHECK_EQ(wait_size(&desk.net, send), SIZE);
    CHECK_EQ(wait_size(&desk.net, receive), SIZE);
    CHECK_BUFFER(&direct, SIZE, 8);
    CHECK_OK(net_dereg_mr(&desk.net, other.send, own_mr));
    CHECK_OK(net_dereg_mr(&desk.net, other.recv, direct_mr));
    pair_close(&other);
    held_message(&desk.pair, &desk.from, desk.from_mr, SIZE, &desk.to, desk.to_mr, SIZE, 9);
    held_free(&own);
    held_free(&direct);
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(deregistered_under_a_short_send),
    EACH(deregistered_under_a_long_send),
    EACH(deregistered_under_a_receive),
    EACH(deregistered_in_the_middle_of_a_copy),
    EACH(any_order),
    EACH(handle_of_another_connection),
    EACH(sender_dies_in_the_middle),
    EACH(receiver_dies_in_the_middle),
    ONCE(twenty_times),
    ONCE(twenty_times_in_v9),
    {0},
};
