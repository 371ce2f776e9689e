/*
 * Faults under traffic: what a request, a queue or a device does wrong either ends the connections it concerns, with an
 * error that comes in bounded time at both ends, or is not to be seen, with every byte in place. Others work on, and
 * nothing is left.
 *
 * The rules pick the messages of one connection by their size, which only they have.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"
#include "softrnic.h"

enum { WINDOW = 8, VICTIM = 5000, NEIGHBOUR = 7000, STRANGER = 3000, MESSAGES = 30 };

/* ---- a connection under traffic ------------------------------------------------------------------------------ */

struct side {
    void *comm, *mr;
    struct guarded memory;
    void *requests[WINDOW];
    uint64_t posted, done;
    ncclResult_t code; /* the first error that any call gave */
};

struct link {
    const struct net *net;
    struct side send, recv;
    size_t length;
    bool vary;       /* messages of all sizes up to the length */
    uint64_t key;    /* of the first message of this run */
    int wrong_bytes; /* in messages that were reported as received */
};

/* Traffic over a connection that is there. */
static void link_over(const struct pair *pair, size_t length, struct link *link)
{
    const struct net *net = pair->net;
    *link = (struct link){.net = net, .length = length, .send.comm = pair->send, .recv.comm = pair->recv};
    for (int i = 0; i < 2; i++) {
        struct side *side = i ? &link->recv : &link->send;
        side->memory = guarded_new(WINDOW * length, 0);
        side->mr = register_host(net, side->comm, side->memory.data, side->memory.size);
    }
}

static void link_open(const struct net *net, int dev, size_t length, struct link *link)
{
    struct pair pair;
    pair_open(net, dev, &pair);
    link_over(&pair, length, link);
}

static void side_close(const struct link *link, struct side *side)
{
    if (!side->comm) return;
    CHECK_OK(net_dereg_mr(link->net, side->comm, side->mr));
    CHECK_OK(side == &link->send ? net_close_send(link->net, side->comm) : net_close_recv(link->net, side->comm));
    side->comm = NULL;
}

static void link_close(struct link *link)
{
    side_close(link, &link->send);
    side_close(link, &link->recv);
    guarded_free(&link->send.memory);
    guarded_free(&link->recv.memory);
}

static uint64_t message_key(const struct link *link, uint64_t n)
{
    return link->key + n;
}

static size_t message_size(const struct link *link, uint64_t n)
{
    uint64_t state = message_key(link, n);
    return link->vary ? next_random(&state) % (link->length + 1) : link->length;
}

/* What a call said. The first error stays the only one; only what was complete before is still reported as that. */
static bool well(struct side *side, ncclResult_t result, bool complete)
{
    if (result != ncclSuccess && !ffi_is_error(result)) FAIL("%d (%s)", (int)result, ffi_result_name(result));
    if (side->code != ncclSuccess && !complete) CHECK_EQ(result, side->code);
    if (result != ncclSuccess) side->code = result;
    return result == ncclSuccess;
}

static void post(struct link *link, struct side *side, uint64_t messages)
{
    while (side->comm && side->code == ncclSuccess && side->posted < messages && !side->requests[side->posted % WINDOW]) {
        uint64_t n = side->posted, slot = n % WINDOW;
        void *data = side->memory.data + slot * link->length, *request = GARBAGE;
        ncclResult_t result;
        if (side == &link->recv) {
            size_t size = link->length;
            int tag = 0;
            memset(data, 0, size);
            result = net_irecv(link->net, side->comm, 1, &data, &size, &tag, &side->mr, &request);
        } else {
            pattern_fill(data, message_size(link, n), message_key(link, n));
            result = net_isend(link->net, side->comm, data, message_size(link, n), 0, side->mr, &request);
        }
        if (!well(side, result, false) || !request) return;
        CHECK(request != GARBAGE);
        side->requests[slot] = request;
        side->posted++;
    }
}

/* Message `n` has arrived: whole, in its place. */
static void arrived(struct link *link, uint64_t n, int size)
{
    size_t want = message_size(link, n);
    const uint8_t *data = link->recv.memory.data + n % WINDOW * link->length;
    CHECK_EQ(size, want);
    uint8_t *pattern = malloc(want + 1);
    CHECK(pattern != NULL);
    pattern_fill(pattern, want, message_key(link, n));
    for (size_t i = 0; i < want; i++) link->wrong_bytes += data[i] != pattern[i];
    for (size_t i = want; i < link->length; i++)
        if (data[i] != 0) FAIL("byte %zu behind a message of %zu bytes was written", i, want);
    free(pattern);
}

/* Tests what is outstanding; how many requests are. */
static int look(struct link *link, struct side *side)
{
    int outstanding = 0;
    for (int slot = 0; slot < WINDOW && side->comm; slot++) {
        int done = 0x5bad, size = 0x5bad;
        if (!side->requests[slot]) continue;
        ncclResult_t result = net_test(link->net, side->requests[slot], &done, &size);
        if (well(side, result, done == 1)) {
            if (done == 0) {
                outstanding++;
                continue;
            }
            CHECK_EQ(done, 1);
            side->done++;
            /* The youngest message of this slot that was posted. */
            uint64_t n = (side->posted - 1 - (uint64_t)slot) / WINDOW * WINDOW + (uint64_t)slot;
            if (side == &link->recv) arrived(link, n, size);
        }
        side->requests[slot] = NULL;
    }
    return outstanding;
}

/* Which ends of a connection. */
enum ends { NEITHER, SENDER, RECEIVER, BOTH };

/* Sends so many messages until all are there or an end fails. Then those of `by_itself` have to fail with both ends still
 * open. An end that failed is closed, as NCCL does, and what the other one waits for ends too. True: all are there. */
static bool link_run_(struct link *link, uint64_t messages, enum ends by_itself)
{
    struct side *send = &link->send, *recv = &link->recv;
    struct deadline deadline = deadline_in(30);
    link->key += 1000;
    link->wrong_bytes = 0;
    send->posted = send->done = recv->posted = recv->done = 0;
    for (;;) {
        post(link, recv, messages);
        post(link, send, messages);
        look(link, recv);
        look(link, send);
        if (send->done == messages && recv->done == messages) return true;
        bool found_out = (send->code || !(by_itself & SENDER)) && (recv->code || !(by_itself & RECEIVER));
        if ((send->code || recv->code) && found_out) break;
        if (deadline_passed(&deadline))
            FAIL("%d of %d sent: %s; %d received: %s", (int)send->done, (int)messages, ffi_result_name(send->code),
                 (int)recv->done, ffi_result_name(recv->code));
        ffi_yield();
    }
    struct side *first = send->code ? send : recv, *second = send->code ? recv : send;
    WAIT_UNTIL(look(link, first) == 0, "the requests of a failed connection to end");
    side_close(link, first);
    WAIT_UNTIL(look(link, second) == 0, "the requests of the other end to end");
    return false;
}
#define link_run(...) (HERE(), link_run_(__VA_ARGS__))

/* Messages that have to arrive as they were sent. */
static void link_works_(struct link *link, uint64_t messages)
{
    if (!link_run_(link, messages, NEITHER)) FAIL("send %s, receive %s", ffi_result_name(link->send.code), ffi_result_name(link->recv.code));
    CHECK_EQ(link->wrong_bytes, 0);
}
#define link_works(...) (HERE(), link_works_(__VA_ARGS__))

/* ---- one fault at a time ------------------------------------------------------------------------------------- */

struct breakage {
    const char *rule;
    enum ends ends; /* which find out by themselves */
    bool all_of_device; /* every connection of the device is concerned */
    void (*then)(const struct net *); /* what else holds while the broken ones are still there */
};

static void two_devices(struct net *net, int version)
{
    setenv("SOFTRNIC_DEVICES", "2", 1);
    setenv("SOFTRNIC_RETRY_MS", "30", 1);
    rnic_keep();
    net_start(net, version);
}

/* The victim has a neighbour on its device and a stranger on another. */
static void breaks(const struct net *net, const struct breakage *breakage)
{
    struct link victim, neighbour, stranger;
    struct rnic_counts before = rnic_counts();
    struct census at_rest = census_take();
    printf("%s\n", breakage->rule);
    link_open(net, 0, VICTIM, &victim);
    link_open(net, 0, NEIGHBOUR, &neighbour);
    link_open(net, 1, STRANGER, &stranger);
    link_works(&victim, 3);
    rnic_faults(breakage->rule);
    if (link_run(&victim, MESSAGES, breakage->ends)) FAIL("all messages arrived in spite of: %s", breakage->rule);
    CHECK_EQ(victim.wrong_bytes, 0);
    CHECK_EQ(rnic_fault_fired(0), 1);
    link_works(&stranger, MESSAGES);
    if (!breakage->all_of_device) link_works(&neighbour, MESSAGES);
    if (breakage->all_of_device && link_run(&neighbour, MESSAGES, NEITHER)) FAIL("a device that is gone carried messages");
    rnic_faults("");
    if (breakage->then) breakage->then(net);
    link_close(&victim);
    link_close(&neighbour);
    link_close(&stranger);
    struct rnic_counts after = rnic_counts();
    CHECK_EQ(after.mrs, before.mrs);
    CHECK_EQ(after.qps, before.qps);
    CHECK_EQ(after.cqs, before.cqs);
    CHECK_EQ(census_take().descriptors, at_rest.descriptors);
}

static void works_on(const struct net *net, int dev)
{
    struct link fresh;
    link_open(net, dev, 1000, &fresh);
    link_works(&fresh, 3);
    link_close(&fresh);
}

/* What the plugin makes once per device and keeps is there before anything is counted. */
static void settle(const struct net *net)
{
    for (int dev = 0; dev < 2; dev++) works_on(net, dev);
}

static void each_of(int version, const struct breakage *list, size_t count)
{
    struct net net;
    rnic_keep();
    struct census before = census_take();
    two_devices(&net, version);
    settle(&net);
    for (size_t i = 0; i < count; i++) {
        breaks(&net, &list[i]);
        works_on(&net, 0); /* the process is none the worse for it */
    }
    net_stop(&net);
    expect_gone(before);
}

/* Any status of a send, with nothing, half or all of the message at the receiver. Each version takes its turn at a part
 * of them, so that together they see every status. */
static void statuses(int version)
{
    static const char *const stages[] = {"start", "half", "payload", "end"};
    enum { STATUSES = 23, STAGES = 4, PART = 8 };
    static char rules[PART][100];
    struct breakage list[PART];
    for (int i = 0; i < PART; i++) {
        int n = version * PART + i;
        snprintf(rules[i], sizeof rules[i], "bytes=5000 nth=%d -> status=%d vendor=0x%x at=%s", 1 + n % 12,
                 1 + n % STATUSES, n, stages[n % STAGES]);
        list[i] = (struct breakage){.rule = rules[i], .ends = SENDER};
    }
    each_of(version, list, PART);
}

/* The receiver's end breaks over a message, or over a credit that it writes. */
static void receivers(int version)
{
    static const struct breakage list[] = {
        {.rule = "side=remote bytes=5000 nth=7 -> status=loc-prot", .ends = BOTH},
        {.rule = "side=remote bytes=5000 nth=1 -> status=loc-qp-op", .ends = BOTH},
        {.rule = "side=remote bytes=5000 nth=9 -> status=general at=end", .ends = BOTH},
        {.rule = "device=softrnic0 op=write nth=5 -> status=rem-access", .ends = RECEIVER},
        {.rule = "device=softrnic0 op=write nth=2 -> status=retry-exc at=end", .ends = RECEIVER},
        {.rule = "device=softrnic0 op=write nth=4 -> drop", .ends = RECEIVER},
        {.rule = "device=softrnic0 op=write nth=3 -> kill-qp", .ends = RECEIVER},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

static void lost(int version)
{
    static const struct breakage list[] = {
        {.rule = "bytes=5000 nth=1 -> drop", .ends = SENDER},
        {.rule = "bytes=5000 nth=8 -> drop at=half", .ends = SENDER},
        {.rule = "bytes=5000 nth=8 -> drop at=payload", .ends = SENDER},
        {.rule = "bytes=5000 nth=12 -> drop at=end", .ends = SENDER},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

static void queue_pairs_die(int version)
{
    static const struct breakage list[] = {
        {.rule = "bytes=5000 nth=1 -> kill-qp", .ends = SENDER},
        {.rule = "bytes=5000 nth=10 -> kill-qp at=half", .ends = SENDER},
        {.rule = "bytes=5000 nth=10 -> kill-qp at=end", .ends = SENDER},
        {.rule = "side=remote bytes=5000 nth=1 -> kill-qp", .ends = BOTH},
        {.rule = "side=remote bytes=5000 nth=10 -> kill-qp at=payload", .ends = BOTH},
        {.rule = "side=remote bytes=5000 nth=10 -> kill-qp at=end", .ends = BOTH},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

static void completion_queues_overrun(int version)
{
    static const struct breakage list[] = {
        {.rule = "bytes=5000 nth=1 -> cq-overrun", .ends = SENDER},
        {.rule = "bytes=5000 nth=11 -> cq-overrun", .ends = SENDER},
        {.rule = "side=remote bytes=5000 nth=1 -> cq-overrun", .ends = BOTH},
        {.rule = "side=remote bytes=5000 nth=11 -> cq-overrun", .ends = BOTH},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

/* Down for good: only a new connection over it finds it well again, once it is. */
static void port_returns(const struct net *net)
{
    rnic_port("softrnic0", true);
    works_on(net, 0);
}

static void port_goes_down(int version)
{
    static const struct breakage list[] = {
        {.rule = "bytes=5000 nth=1 -> port-down", .ends = SENDER, .all_of_device = true, .then = port_returns},
        {.rule = "bytes=5000 nth=9 -> port-down at=half", .ends = SENDER, .all_of_device = true, .then = port_returns},
        {.rule = "bytes=5000 nth=9 -> port-down at=end", .ends = SENDER, .all_of_device = true, .then = port_returns},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

/* A connection over a dead device comes to an error, not to nothing. */
static void nobody_connects(const struct net *net)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *send = NULL, *recv = NULL;
    ncclResult_t result = net_listen(net, 0, handle, &listener);
    if (result == ncclSuccess) { /* a socket needs no device */
        WAIT_UNTIL((result = net_connect(net, 0, handle, &send)) != ncclSuccess || send ||
                       (result = net_accept(net, listener, &recv)) != ncclSuccess || recv,
                   "connecting over a dead device to fail");
        CHECK_OK(net_close_listen(net, listener));
    }
    CHECK(ffi_is_error(result));
    works_on(net, 1);
}

/* The other device works on. Once nobody holds the dead one open, all is well again. */
static void device_dies(int version)
{
    static const struct breakage list[] = {
        {.rule = "bytes=5000 nth=1 -> device-fatal", .ends = SENDER, .all_of_device = true, .then = nobody_connects},
        {.rule = "bytes=5000 nth=9 -> device-fatal at=half", .ends = SENDER, .all_of_device = true, .then = nobody_connects},
        {.rule = "bytes=5000 nth=9 -> device-fatal at=end", .ends = SENDER, .all_of_device = true, .then = nobody_connects},
    };
    each_of(version, list, sizeof list / sizeof *list);
}

/* ---- ports and addresses ------------------------------------------------------------------------------------- */

/* The port returns by itself, before the device gives up: every message arrives, late. */
static void port_returns_in_time(int version)
{
    struct net net;
    struct link link, idle;
    setenv("SOFTRNIC_RETRY_MS", "20000", 1);
    net_start(&net, version);
    link_open(&net, 0, VICTIM, &link);
    link_open(&net, 0, NEIGHBOUR, &idle);
    size_t mark = log_mark();
    rnic_faults("bytes=5000 nth=4 -> port-down for=20ms\nbytes=5000 nth=20 -> port-down for=30ms at=half");
    link_works(&link, MESSAGES);
    for (unsigned rule = 0; rule < 2; rule++) CHECK_EQ(rnic_fault_fired(rule), 1);
    WAIT_UNTIL(log_matches_since(mark, "softrnic0:1: IBV_EVENT_PORT_ACTIVE") == 2, "the events of the port's return");
    CHECK_EQ(log_matches_since(mark, "softrnic0:1: IBV_EVENT_PORT_ERR: the port is down"), 2);
    rnic_faults("");
    link_works(&idle, MESSAGES);
    link_close(&link);
    link_close(&idle);
    net_stop(&net);
}

/* One attempt to connect; false when a call gave an error, with everything closed that came into being. */
static bool attempt(const struct net *net, struct pair *pair)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    ncclResult_t connected = ncclSuccess, accepted = ncclSuccess;
    *pair = (struct pair){.net = net};
    if (net_listen(net, 0, handle, &listener) != ncclSuccess) return false;
    WAIT_UNTIL(({
                   if (!pair->send) connected = net_connect(net, 0, handle, &pair->send);
                   if (!pair->recv && !connected) accepted = net_accept(net, listener, &pair->recv);
                   (pair->send && pair->recv) || connected || accepted;
               }),
               "a connection or an error");
    CHECK_OK(net_close_listen(net, listener));
    if (!connected && !accepted) return true;
    if (pair->send) CHECK_OK(net_close_send(net, pair->send));
    if (pair->recv) CHECK_OK(net_close_recv(net, pair->recv));
    return false;
}

/* It returns when the device has given up: what was under way fails, what was idle works on, and so does whatever is new. */
static void port_returns_too_late(int version)
{
    struct net net;
    struct link link, idle;
    struct pair fresh;
    two_devices(&net, version);
    link_open(&net, 0, VICTIM, &link);
    link_open(&net, 0, NEIGHBOUR, &idle);
    link_works(&idle, 3);
    size_t mark = log_mark();
    rnic_faults("bytes=5000 nth=4 -> port-down for=400ms");
    CHECK(!link_run(&link, MESSAGES, SENDER));
    CHECK_EQ(link.send.code, ncclRemoteError);
    CHECK(log_matches_since(mark, "completed with IBV_WC_RETRY_EXC_ERR") >= 1); /* the other end may have had a credit under way */
    WAIT_UNTIL(log_matches_since(mark, "softrnic0:1: IBV_EVENT_PORT_ACTIVE") == 1, "the port's return");
    rnic_faults("");
    link_works(&idle, MESSAGES);
    WAIT_UNTIL(attempt(&net, &fresh), "a new connection over the port");
    pair_message(&fresh, 3000, 0, 1);
    pair_close(&fresh);
    link_close(&link);
    link_close(&idle);
    net_stop(&net);
}

/* Where the newest queue pairs, two for a connection, go. */
static void expect_newest_to(const uint8_t address[4])
{
    uint8_t mapped[16] = {[10] = 0xff, [11] = 0xff};
    uint32_t qps[64];
    memcpy(mapped + 12, address, 4);
    int count = rnic_qps(qps, 64);
    CHECK(count >= 2 && count < 64);
    for (int i = count - 2; i < count; i++) {
        struct rnic_attr attr = rnic_attr(qps[i], RNIC_RTR);
        CHECK_EQ(memcmp(attr.dgid, mapped, 16), 0);
    }
}

/* The address of a port changes under a message, at either end: connections go on, new ones have the new address. */
static void address_changes(int version)
{
    static const struct {
        const char *rule, *told;
        uint8_t address[4];
    } list[] = {
        {"bytes=5000 nth=5 -> gid=0/10.0.0.9", "GID 0 10.0.0.1, which connections use, is 0 10.0.0.9 now", {10, 0, 0, 9}},
        {"side=remote bytes=5000 nth=17 -> gid=0/10.0.0.8", "GID 0 10.0.0.9, which connections use, is 0 10.0.0.8 now", {10, 0, 0, 8}},
    };
    struct net net;
    struct link link, neighbour;
    setenv("SOFTRNIC_GIDS", "10.0.0.1", 1);
    setenv("PINRAIL_FLUSH", "never", 1); /* so that the newest queue pairs are those between the ends */
    net_start(&net, version);
    link_open(&net, 0, VICTIM, &link);
    link_open(&net, 0, NEIGHBOUR, &neighbour);
    expect_newest_to((const uint8_t[]){10, 0, 0, 1});
    link_works(&neighbour, 3); /* the software RNIC looks an address up with the first request */
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        struct link fresh;
        size_t mark = log_mark();
        rnic_faults(list[i].rule);
        link_works(&link, MESSAGES);
        CHECK_EQ(rnic_fault_fired(0), 1);
        rnic_faults("");
        WAIT_UNTIL(log_matches_since(mark, list[i].told) == 1, "the event");
        link_open(&net, 0, 1000, &fresh);
        expect_newest_to(list[i].address);
        CHECK_EQ(log_matches_since(mark, "softrnic0:1 is used under GID 0 10.0.0."), 1);
        link_works(&fresh, MESSAGES);
        link_works(&neighbour, MESSAGES);
        link_close(&fresh);
    }
    link_works(&link, MESSAGES);
    link_close(&link);
    link_close(&neighbour);
    net_stop(&net);
}

/* It changes while a connection is made, at each step: what comes of it works, or fails with a reason in bounded time. */
static void address_changes_while_connecting(int version)
{
    enum { STEPS = 10 };
    struct net net;
    struct pair pair;
    int worked = 0;
    setenv("SOFTRNIC_GIDS", "10.0.0.1", 1);
    setenv("SOFTRNIC_RETRY_MS", "30", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    pair_close(&pair);
    for (int steps = 0; steps < STEPS; steps++) {
        char handle[NCCL_NET_HANDLE_MAXSIZE] = {0}, address[32];
        void *listener = NULL;
        struct link link;
        bool there = false;
        snprintf(address, sizeof address, "10.0.0.%d", steps + 2);
        pair = (struct pair){.net = &net};
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        for (int i = 0; i < steps && !there; i++) there = pair_step(&pair, 0, handle, listener);
        rnic_set_gid("softrnic0", 0, address);
        if (!there) WAIT_UNTIL(pair_step(&pair, 0, handle, listener), "the connection");
        CHECK_OK(net_close_listen(&net, listener));
        size_t mark = log_mark();
        link_over(&pair, VICTIM, &link);
        bool works = link_run(&link, 10, NEITHER);
        if (works) CHECK_EQ(link.wrong_bytes, 0);
        if (!works) CHECK(log_matches_since(mark, "IBV_WC_RETRY_EXC_ERR") >= 1);
        worked += works;
        link_close(&link);
        works_on(&net, 0);
    }
    printf("%d of %d work\n", worked, STEPS);
    CHECK(worked > 0);
    net_stop(&net);
}

/* ---- nothing under way --------------------------------------------------------------------------------------- */

/* Receives that wait for a peer which sends nothing hear of what ends them, and others do not. */
static void who_waits_hears_of_it(int version)
{
    enum { COUNT = 3 }; /* two on one device, the last on another */
    struct net net;
    struct link links[COUNT];
    uint32_t qps[2 * COUNT + 1];
    setenv("PINRAIL_FLUSH", "never", 1);
    two_devices(&net, version);
    for (int i = 0; i < COUNT; i++) {
        link_open(&net, i == COUNT - 1, 1000 * (size_t)(i + 1), &links[i]);
        link_works(&links[i], 3);
        links[i].key += 1000;
        links[i].recv.posted = links[i].recv.done = links[i].send.posted = links[i].send.done = 0;
        post(&links[i], &links[i].recv, 4);
    }
    CHECK_EQ(rnic_qps(qps, 2 * COUNT + 1), 2 * COUNT);
    rnic_kill_qp(qps[1]); /* the first connection's receiving end was made after its sending end */
    WAIT_UNTIL(look(&links[0], &links[0].recv) == 0, "the receives over a queue pair that broke to end");
    CHECK(ffi_is_error(links[0].recv.code));
    for (int polls = 0; polls < 100; polls++)
        for (int i = 1; i < COUNT; i++) CHECK_EQ(look(&links[i], &links[i].recv), 4);
    rnic_device_fatal("softrnic0");
    WAIT_UNTIL(look(&links[1], &links[1].recv) == 0, "the receives over a device that died to end");
    CHECK_EQ(links[1].recv.code, ncclSystemError);
    for (int polls = 0; polls < 100; polls++) CHECK_EQ(look(&links[2], &links[2].recv), 4);
    WAIT_UNTIL(({
                   post(&links[2], &links[2].send, 4);
                   look(&links[2], &links[2].send) + look(&links[2], &links[2].recv) == 0 && links[2].recv.done == 4;
               }),
               "the messages over the other device");
    CHECK_EQ(links[2].wrong_bytes, 0);
    for (int i = 0; i < COUNT; i++) link_close(&links[i]);
    works_on(&net, 0);
    net_stop(&net);
}

/* NCCL_IB_RETURN_ASYNC_EVENTS=0: the event is told and ends nothing by itself; what the device gives back does. */
static void fatal_events_are_only_told(int version)
{
    struct net net;
    struct link link;
    setenv("NCCL_IB_RETURN_ASYNC_EVENTS", "0", 1);
    two_devices(&net, version);
    link_open(&net, 0, VICTIM, &link);
    link_works(&link, 3);
    size_t mark = log_mark();
    rnic_device_fatal("softrnic0");
    WAIT_UNTIL(log_matches_since(mark, "softrnic0: IBV_EVENT_DEVICE_FATAL") == 1, "the event");
    CHECK(!link_run(&link, MESSAGES, NEITHER));
    CHECK_EQ(log_matches_since(mark, "the device reported a fatal error"), 0);
    link_close(&link);
    works_on(&net, 0);
    net_stop(&net);
}

/* ---- what must not be seen ----------------------------------------------------------------------------------- */

/* Nothing on the wire notices bytes that change behind its checksums: they arrive, and only they. */
static void corruption_arrives(int version)
{
    struct net net;
    struct link link;
    two_devices(&net, version);
    link_open(&net, 0, VICTIM, &link);
    for (int bytes = 1; bytes <= VICTIM; bytes = bytes * 5 + 2) {
        char rule[100];
        snprintf(rule, sizeof rule, "bytes=5000 nth=4 -> corrupt=%d", bytes);
        rnic_faults(rule);
        CHECK(link_run(&link, MESSAGES, NEITHER));
        CHECK_EQ(link.wrong_bytes, bytes);
        CHECK_EQ(rnic_fault_fired(0), 1);
    }
    rnic_faults("");
    link_works(&link, MESSAGES);
    link_close(&link);
    net_stop(&net);
}

static char last_plan[1000];

static void print_plan(void)
{
    fprintf(stderr, "the plan was:\n%sthe last events of the device:\n", last_plan);
    fflush(stderr);
    rnic_trace_print(60);
}

/* A port that comes back in time, and every kind of disorder, on four queue pairs: all bytes are in place. */
static void disorder(int version)
{
    struct net net;
    struct link link, other;
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    setenv("SOFTRNIC_RETRY_MS", "10000", 1);
    net_start(&net, version);
    link_open(&net, 0, 20000, &link);
    link_open(&net, 0, 900, &other);
    link.vary = other.vary = true;
    ffi_last_words = print_plan;
    for (int seed = 1; seed <= 5; seed++) {
        snprintf(last_plan, sizeof last_plan,
                 "seed=%d\np=0.05 -> delay=200us\np=0.1 -> behind=3 for=500us\nside=remote p=0.05 -> delay=50us at=end\n"
                 "op=write,write-imm p=0.3 -> shuffle=%d\nevery=100 -> port-down for=2ms\n",
                 seed, 16 << seed);
        rnic_faults(last_plan);
        link_works(&link, 100);
        link_works(&other, 100);
        uint64_t fired = 0;
        for (unsigned rule = 0; rule < 5; rule++) fired += rnic_fault_fired(rule);
        CHECK(fired >= 20);
    }
    rnic_faults("");
    ffi_last_words = NULL;
    link_close(&link);
    link_close(&other);
    net_stop(&net);
}

/* ---- plans by chance ----------------------------------------------------------------------------------------- */

/* One to four rules for device 0, all drawn from the seed. */
static void draw_plan(uint64_t seed, char *plan, size_t size)
{
    static const char *const faults[] = {
        "delay=100us",        "delay=1ms at=end", "behind=2 for=300us", "shuffle",        "shuffle=100",
        "status=retry-exc",   "status=rem-op",    "drop at=half",       "drop at=end",    "kill-qp at=payload",
        "kill-qp",            "cq-overrun",       "port-down for=1ms",  "port-down for=1ms at=end",
        "status=general at=end",
    };
    uint64_t state = seed;
    int at = snprintf(plan, size, "seed=%d\n", (int)seed);
    for (uint64_t rules = 1 + next_random(&state) % 4; rules > 0; rules--) {
        const char *fault = faults[next_random(&state) % (sizeof faults / sizeof *faults)];
        bool remote = next_random(&state) % 3 == 0 && strncmp(fault, "behind", 6) != 0;
        at += snprintf(plan + at, size - (size_t)at, "device=softrnic0 %s nth=%d -> %s\n", remote ? "side=remote" : "",
                       1 + (int)(next_random(&state) % 120), fault);
    }
}

/* Whatever happens to one device's connections: exact or ended, and gone without a rest. Connections of the other device
 * do not notice. */
static void by_chance(int version, const char *engine)
{
    enum { SEEDS = 15 };
    struct net net;
    int failed = 0;
    rnic_keep();
    struct census before = census_take();
    setenv("SOFTRNIC_ENGINE", engine, 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", "2", 1);
    two_devices(&net, version);
    settle(&net);
    struct rnic_counts at_rest = rnic_counts();
    ffi_last_words = print_plan;
    for (int seed = 1; seed <= SEEDS; seed++) {
        struct link link, stranger;
        link_open(&net, 0, 9000, &link);
        link_open(&net, 1, STRANGER, &stranger);
        link.vary = stranger.vary = true;
        draw_plan((uint64_t)(seed + 1000 * version), last_plan, sizeof last_plan);
        rnic_faults(last_plan);
        failed += !link_run(&link, 60, NEITHER);
        CHECK_EQ(link.wrong_bytes, 0);
        link_works(&stranger, MESSAGES);
        rnic_faults("");
        rnic_port("softrnic0", true); /* both ends are in this process, so the device is open */
        link_close(&link);
        link_close(&stranger);
        struct rnic_counts now = rnic_counts();
        CHECK_EQ(now.mrs, at_rest.mrs);
        CHECK_EQ(now.qps, at_rest.qps);
        CHECK_EQ(now.cqs, at_rest.cqs);
    }
    ffi_last_words = NULL;
    printf("%d of %d plans ended the connection\n", failed, SEEDS);
    CHECK(failed > 0 && failed < SEEDS);
    net_stop(&net);
    expect_gone(before);
}

static void by_chance_at_once(int version) { by_chance(version, "inline"); }
static void by_chance_in_steps(int version) { by_chance(version, "stepped"); }
static void by_chance_on_a_thread(int version) { by_chance(version, "thread"); }

const struct ffi_case ffi_cases[] = {
    EACH(statuses),
    EACH(receivers),
    EACH(lost),
    EACH(queue_pairs_die),
    EACH(completion_queues_overrun),
    EACH(port_goes_down),
    EACH(device_dies),
    EACH(port_returns_in_time),
    EACH(port_returns_too_late),
    EACH(address_changes),
    EACH(address_changes_while_connecting),
    EACH(who_waits_hears_of_it),
    EACH(fatal_events_are_only_told),
    EACH(corruption_arrives),
    EACH(disorder),
    EACH(by_chance_at_once),
    EACH(by_chance_in_steps),
    EACH(by_chance_on_a_thread),
    {0},
};
