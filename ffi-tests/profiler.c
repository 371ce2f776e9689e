/*
 * Events for NCCL's profiler, through the callback that init gets from v10 on: one START and one STOP for each queue pair
 * that a message uses, with a description that is true of a posted work request; nothing where there is no parent, and
 * no STOP where nobody listened. Versions before v10 have no callback: the same scenarios make no event there.
 *
 * The stock transport calls back with NULL for a parent, reads an array of parents that is not there, and stops each event
 * twice; all of that fails here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pair.h"
#include "softrnic.h"

enum { MEMBERS = NCCL_NET_MAX_RECVS, SLOT = 4096, MOST = 8192, WRITE = 0, WRITE_IMM = 1 };

struct event {
    void *parent;
    ncclProfilerNetIbDescr_v1_t told;
    int stops;
};
static struct event events[MOST];
static int count;     /* of events */
static int questions; /* STARTs, answered or not */
static bool listening = true;

/* NCCL's own: it dereferences the parent, and leaves the handle alone where the class of events is not active. */
static ncclResult_t profiler(void **handle, int type, void *parent, int64_t identity, void *data)
{
    CHECK(handle != NULL);
    if (type == ncclProfilerNetEventStart) {
        const ncclProfilerNetIbDescr_v1_t *told = data;
        CHECK(parent != NULL);
        CHECK_EQ(*(const int *)parent, 0x0dd);
        CHECK_PTR(*handle, NULL);
        CHECK_EQ(identity, 1 << 16 | 1);
        CHECK_EQ(told->type, 1);
        questions++;
        if (!listening) return ncclSuccess;
        if (count == MOST) FAIL("more than %d events", MOST);
        events[count] = (struct event){.parent = parent, .told = *told};
        *handle = &events[count++];
    } else {
        CHECK_EQ(type, ncclProfilerNetEventStop);
        const struct event *end = events + count;
        struct event *event = *handle;
        if (event < events || event >= end) FAIL("%p was never given out", *handle);
        event->stops++;
        if (event->stops > 1) FAIL("event %td was stopped %d times", event - events, event->stops);
    }
    return ncclSuccess;
}

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
    int parents[2 * MEMBERS]; /* of members of a send, then of a receive */
};

static void desk_open_on(struct desk *desk, int dev)
{
    pair_open(&desk->net, dev, &desk->pair);
    desk->from = guarded_new((size_t)1 << 20, 0);
    desk->to = guarded_new((size_t)1 << 20, 0);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, desk->from.size);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to.data, desk->to.size);
    for (int i = 0; i < 2 * MEMBERS; i++) desk->parents[i] = 0x0dd;
}

static void desk_open(struct desk *desk, int version)
{
    net_start_profiled(&desk->net, version, profiler);
    desk_open_on(desk, 0);
}

static void desk_close(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    net_stop(&desk->net);
    for (int i = 0; i < count; i++) CHECK_EQ(events[i].stops, 1);
}

static void *send_parent(struct desk *desk, int member) { return &desk->parents[member]; }
static void *recv_parent(struct desk *desk, int member) { return &desk->parents[MEMBERS + member]; }

static void *send_for(struct desk *desk, size_t offset, size_t size, int tag, void *parent)
{
    void *request = NULL;
    WAIT_UNTIL(net_isend_for(&desk->net, desk->pair.send, desk->from.data + offset, size, tag, desk->from_mr, parent,
                             &request) != ncclSuccess || request != NULL, "isend");
    CHECK(request != NULL);
    return request;
}

static void *recv_for(struct desk *desk, int n, const size_t *sizes, const int *tags, void **parents)
{
    void *data[MEMBERS], *mrs[MEMBERS], *request = NULL;
    for (int i = 0; i < n; i++) {
        data[i] = desk->to.data + (n == 1 ? 0 : i * SLOT);
        mrs[i] = desk->to_mr;
    }
    WAIT_UNTIL(net_irecv_for(&desk->net, desk->pair.recv, n, data, (size_t *)sizes, (int *)tags, mrs, parents,
                             &request) != ncclSuccess || request != NULL, "irecv");
    CHECK(request != NULL);
    return request;
}

/* One message with the first parents of either end. */
static void message(struct desk *desk, size_t size, uint64_t key)
{
    static const int tag = 7;
    void *parent = recv_parent(desk, 0);
    guarded_reset(&desk->to);
    pattern_fill(desk->from.data, size, key);
    void *receive = recv_for(desk, 1, &size, &tag, &parent);
    void *send = send_for(desk, 0, size, tag, send_parent(desk, 0));
    CHECK_EQ(wait_size(&desk->net, send), size);
    CHECK_EQ(wait_size(&desk->net, receive), size);
    CHECK_BUFFER(&desk->to, size, key);
}

/* The events of one parent from number `first` on: how many, how many bytes, over how many queue pairs. */
struct tally {
    int events, queue_pairs, running;
    size_t bytes;
};
static struct tally tally(const void *parent, int first)
{
    struct tally sum = {0};
    for (int i = first; i < count; i++) {
        if (events[i].parent != parent) continue;
        bool known = false;
        for (int k = first; k < i; k++)
            known |= events[k].parent == parent && events[k].told.qp.qpNum == events[i].told.qp.qpNum;
        sum.queue_pairs += !known;
        sum.events++;
        sum.running += events[i].stops == 0;
        sum.bytes += events[i].told.qp.length;
    }
    return sum;
}

/* What an event says of a work request is true: one with this id and opcode was posted on a queue pair of this number. */
static void check_work(const struct event *event, int device, bool sends)
{
    struct rnic_request posted = rnic_posted(event->told.qp.qpNum, event->told.qp.wr_id);
    CHECK_EQ(event->told.qp.opcode, posted.opcode);
    CHECK_EQ(event->told.qp.device, device);
    if (sends && posted.opcode == WRITE_IMM) CHECK_EQ(event->told.qp.length, posted.bytes);
}

static void check_one(struct desk *desk, int first, size_t size, int device)
{
    struct tally sent = tally(send_parent(desk, 0), first), received = tally(recv_parent(desk, 0), first);
    int each = desk->net.version >= 10;
    CHECK_EQ(sent.events, each);
    CHECK_EQ(received.events, each);
    CHECK_EQ(sent.bytes, each * size);
    CHECK_EQ(received.bytes, each * size);
    CHECK_EQ(sent.running + received.running, 0);
    CHECK_EQ(count - first, 2 * each);
    for (int i = first; i < count; i++) check_work(&events[i], device, events[i].parent == send_parent(desk, 0));
}

static void one_of_each(int version)
{
    static const size_t sizes[] = {0, 1, 8, 4096, 65537, 1 << 20};
    struct desk desk;
    desk_open(&desk, version);
    for (int round = 0; round < 20; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            int first = count;
            message(&desk, sizes[i], (uint64_t)round * 10 + i);
            check_one(&desk, first, sizes[i], 0);
        }
    desk_close(&desk);
}

/* The number of the device that NCCL knows. */
static void on_the_second_device(int version)
{
    struct desk desk;
    setenv("SOFTRNIC_DEVICES", "3", 1);
    net_start_profiled(&desk.net, version, profiler);
    desk_open_on(&desk, 1);
    message(&desk, 1000, 1);
    check_one(&desk, 0, 1000, 1);
    desk_close(&desk);
}

/* Data and notice are two work requests: the event is about the data. */
static void adaptive_routing(int version)
{
    struct desk desk;
    setenv("NCCL_IB_ADAPTIVE_ROUTING", "1", 1);
    setenv("NCCL_IB_AR_THRESHOLD", "100", 1);
    desk_open(&desk, version);
    for (int i = 0; i < 50; i++) {
        int first = count;
        size_t size = i % 2 ? 50 : 5000;
        message(&desk, size, (uint64_t)i);
        check_one(&desk, first, size, 0);
        for (int k = first; k < count; k++)
            if (events[k].parent == send_parent(&desk, 0)) CHECK_EQ(events[k].told.qp.opcode, i % 2 ? WRITE_IMM : WRITE);
    }
    desk_close(&desk);
}

/* A message that takes many work requests of one queue pair is still one event, of all its bytes. */
static void longer_than_a_work_request(int version)
{
    struct desk desk;
    setenv("SOFTRNIC_MAX_MSG_SZ", "8192", 1);
    desk_open(&desk, version);
    for (int i = 1; i <= 5; i++) {
        int first = count;
        message(&desk, (size_t)i * 200000, (uint64_t)i);
        check_one(&desk, first, (size_t)i * 200000, 0);
    }
    desk_close(&desk);
}

static void four_qps_in_turn(int version)
{
    struct desk desk;
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    desk_open(&desk, version);
    for (int i = 0; i < 8; i++) {
        int first = count;
        message(&desk, 3000, (uint64_t)i);
        check_one(&desk, first, 3000, 0);
    }
    if (version >= 10) CHECK_EQ(tally(send_parent(&desk, 0), 0).queue_pairs, 4);
    desk_close(&desk);
}

/* Parts of a message that is split over so many queue pairs, in pieces of 128 bytes; one for an empty message. */
static int parts_of(size_t size, int qps)
{
    int pieces = (int)((size + 127) / 128), each = (pieces + qps - 1) / qps;
    return pieces ? (pieces + each - 1) / each : 1;
}

/* One event per queue pair that carries a part, and no more of them than there are parts. */
static void four_qps_split(int version)
{
    static const size_t sizes[] = {1, 100, 129, 300, 512, 4096, 100000, 1 << 20};
    struct desk desk;
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    desk_open(&desk, version);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int first = count;
        message(&desk, sizes[i], i);
        struct tally sent = tally(send_parent(&desk, 0), first);
        int parts = version < 10 ? 0 : parts_of(sizes[i], 4);
        CHECK_EQ(sent.events, parts);
        CHECK_EQ(sent.queue_pairs, parts);
        CHECK_EQ(sent.bytes, version < 10 ? 0 : sizes[i]);
        CHECK_EQ(sent.running, 0);
        CHECK_EQ(tally(recv_parent(&desk, 0), first).events, version >= 10);
        for (int k = first; k < count; k++) check_work(&events[k], 0, events[k].parent == send_parent(&desk, 0));
    }
    desk_close(&desk);
}

/* Members have parents of their own; some of them none, and some no data. */
static void group_on(struct desk *desk, int qps)
{
    enum { N = 5, WITHOUT_PARENT = 3 };
    static const size_t sizes[N] = {1000, 0, 4096, 77, 640};
    static const int tags[N] = {10, 11, 12, 13, 14};
    for (int round = 0; round < 40; round++) {
        void *parents[N], *sends[N];
        int first = count, got[64] = {0}, each = desk->net.version >= 10;
        guarded_reset(&desk->to);
        for (int i = 0; i < N; i++) {
            parents[i] = i == WITHOUT_PARENT ? NULL : recv_parent(desk, i);
            pattern_fill(desk->from.data + i * SLOT, sizes[i], (uint64_t)(round * N + i));
        }
        void *receive = recv_for(desk, N, sizes, tags, parents);
        for (int i = N - 1; i >= 0; i--)
            sends[i] = send_for(desk, (size_t)i * SLOT, sizes[i], tags[i], i == WITHOUT_PARENT ? NULL : send_parent(desk, i));
        wait_done(&desk->net, receive, got);
        for (int i = 0; i < N; i++) {
            CHECK_EQ(wait_size(&desk->net, sends[i]), sizes[i]);
            CHECK_EQ(got[i], sizes[i]);
            CHECK_PART(&desk->to, (size_t)i * SLOT, SLOT, sizes[i], (uint64_t)(round * N + i));
            struct tally sent = tally(send_parent(desk, i), first), received = tally(recv_parent(desk, i), first);
            int wanted = i == WITHOUT_PARENT ? 0 : parts_of(sizes[i], qps);
            CHECK_EQ(sent.events, each * wanted);
            CHECK_EQ(sent.queue_pairs, each * wanted);
            CHECK_EQ(received.events, each * (i != WITHOUT_PARENT));
            CHECK_EQ(sent.bytes, i == WITHOUT_PARENT ? 0 : (size_t)each * sizes[i]);
            CHECK_EQ(received.bytes, i == WITHOUT_PARENT ? 0 : (size_t)each * sizes[i]);
            CHECK_EQ(sent.running + received.running, 0);
        }
        for (int k = first; k < count; k++) check_work(&events[k], 0, false);
    }
}

static void group(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    group_on(&desk, 1);
    desk_close(&desk);
}

static void group_on_4_qps_split(int version)
{
    struct desk desk;
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    desk_open(&desk, version);
    group_on(&desk, 4);
    desk_close(&desk);
}

/* As NCCL's bootstrap calls: no parent, and no array of parents. */
static void without_parents(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    for (int i = 0; i < 100; i++) pair_message(&desk.pair, 1000, i, (uint64_t)i);
    void *none = NULL;
    size_t size = 100;
    int tag = 7;
    void *receive = recv_for(&desk, 1, &size, &tag, &none);
    CHECK_EQ(wait_size(&desk.net, send_for(&desk, 0, 100, tag, NULL)), 100);
    CHECK_EQ(wait_size(&desk.net, receive), 100);
    CHECK_EQ(questions, 0);
    /* And one that has them is told of. */
    message(&desk, 100, 1);
    check_one(&desk, 0, 100, 0);
    desk_close(&desk);
}

/* Nobody listens: asked less and less, nothing is stopped, and told of again soon after somebody does. */
static void nobody_listens(int version)
{
    enum { BEFORE = 300, QUIET = 640, SOON = 32 };
    struct desk desk;
    listening = false;
    desk_open(&desk, version);
    for (int i = 0; i < BEFORE; i++) message(&desk, 100, (uint64_t)i);
    int asked = questions;
    if (version >= 10) CHECK(asked >= 2 * 256 && asked < 2 * BEFORE);
    for (int i = 0; i < QUIET; i++) message(&desk, 100, (uint64_t)i);
    CHECK_EQ(questions - asked, version < 10 ? 0 : 2 * QUIET / 32);
    CHECK_EQ(count, 0);
    listening = true;
    for (int i = 0; i < SOON + 1; i++) message(&desk, 100, (uint64_t)i);
    for (int i = 0; i < 100; i++) {
        int first = count;
        message(&desk, 100, (uint64_t)i);
        check_one(&desk, first, 100, 0);
    }
    listening = false;
    for (int i = 0; i < BEFORE; i++) message(&desk, 100, (uint64_t)i);
    asked = questions;
    for (int i = 0; i < QUIET; i++) message(&desk, 100, (uint64_t)i);
    CHECK_EQ(questions - asked, version < 10 ? 0 : 2 * QUIET / 32);
    desk_close(&desk);
}

static void asked_always(int version)
{
    struct desk desk;
    listening = false;
    setenv("PINRAIL_PROFILER", "on", 1);
    desk_open(&desk, version);
    for (int i = 0; i < 1000; i++) message(&desk, 100, (uint64_t)i);
    CHECK_EQ(questions, version < 10 ? 0 : 2000);
    CHECK_EQ(count, 0);
    desk_close(&desk);
}

static void asked_never(int version)
{
    struct desk desk;
    setenv("PINRAIL_PROFILER", "off", 1);
    desk_open(&desk, version);
    for (int i = 0; i < 100; i++) message(&desk, 100, (uint64_t)i);
    CHECK_EQ(questions, 0);
    desk_close(&desk);
}

/* A receive that may complete early is told of until its data are here. */
static void early_completion(int version)
{
    struct desk desk;
    static const int tag = 7;
    desk_open(&desk, version);
    for (int i = 0; i < 50; i++) {
        void *parent = recv_parent(&desk, 0), *data = desk.to.data, *receive = NCCL_NET_OPTIONAL_RECV_COMPLETION;
        size_t size = 64;
        int tags[1] = {tag}, first = count;
        CHECK_OK(net_irecv_for(&desk.net, desk.pair.recv, 1, &data, &size, tags, &desk.to_mr, &parent, &receive));
        CHECK(receive != NULL && receive != NCCL_NET_OPTIONAL_RECV_COMPLETION);
        if (version >= 10) {
            wait_done(&desk.net, receive, NULL);
            CHECK_EQ(tally(parent, first).running, 1);
        }
        CHECK_EQ(wait_size(&desk.net, send_for(&desk, 0, 64, tag, send_parent(&desk, 0))), 64);
        if (version < 10) wait_done(&desk.net, receive, NULL);
        message(&desk, 8, (uint64_t)i); /* whose test sees the arrival of the one before */
        CHECK_EQ(tally(parent, first).running, 0);
        CHECK_EQ(tally(parent, first).events, version >= 10 ? 2 : 0);
    }
    desk_close(&desk);
}

/* An event ends with the work, not before. */
static void held_then_released(int version)
{
    struct desk desk;
    static const int tag = 7;
    static const size_t size = 1000;
    int each = version >= 10;
    desk_open(&desk, version);
    void *parent = recv_parent(&desk, 0);
    void *receive = recv_for(&desk, 1, &size, &tag, &parent);
    rnic_hold(true);
    void *send = send_for(&desk, 0, size, tag, send_parent(&desk, 0));
    for (int i = 0; i < 100; i++) CHECK(!is_done(&desk.net, send, NULL) && !is_done(&desk.net, receive, NULL));
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running, each);
    CHECK_EQ(tally(parent, 0).running, each);
    rnic_hold(false);
    CHECK_EQ(wait_size(&desk.net, send), size);
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running, 0);
    CHECK_EQ(wait_size(&desk.net, receive), size);
    CHECK_EQ(tally(parent, 0).running, 0);
    desk_close(&desk);
}

/* Closed with work under way: all events end, each once, and before the close returns. */
static void closed_under_way(int version)
{
    enum { COUNT = 8 };
    struct desk desk;
    static const int tag = 7;
    static const size_t size = 1000;
    desk_open(&desk, version);
    rnic_keep();
    void *parent = recv_parent(&desk, 0);
    for (int i = 0; i < COUNT; i++) recv_for(&desk, 1, &size, &tag, &parent);
    rnic_hold(true);
    for (int i = 0; i < COUNT; i++) send_for(&desk, 0, size, tag, send_parent(&desk, 0));
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running, version < 10 ? 0 : COUNT);
    CHECK_EQ(tally(parent, 0).running, version < 10 ? 0 : COUNT);
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running, 0);
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    CHECK_EQ(tally(parent, 0).running, 0);
    CHECK_OK(net_dereg_mr(&desk.net, NULL, desk.from_mr));
    CHECK_OK(net_dereg_mr(&desk.net, NULL, desk.to_mr));
    net_stop(&desk.net);
}

/* The send fails for good: what it began ends with it, and the close has nothing left to end. */
static void failed(int version)
{
    struct desk desk;
    static const int tag = 7;
    static const size_t size = 1000;
    desk_open(&desk, version);
    void *parent = recv_parent(&desk, 0);
    recv_for(&desk, 1, &size, &tag, &parent);
    recv_for(&desk, 1, &size, &tag, &parent);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    void *send = send_for(&desk, 0, size, tag, send_parent(&desk, 0));
    send_for(&desk, 0, size, tag, send_parent(&desk, 0));
    CHECK(ffi_is_error(wait_error(&desk.net, send)));
    CHECK_EQ(tally(send_parent(&desk, 0), 0).events, version < 10 ? 0 : 2);
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running, 0);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    pair_close(&desk.pair);
    net_stop(&desk.net);
    for (int i = 0; i < count; i++) CHECK_EQ(events[i].stops, 1);
}

/* The callback belongs to the communicator whose init brought it, from v11 on. */
static void of_its_own_communicator(int version)
{
    struct desk desk;
    void *other = NULL;
    desk_open(&desk, version);
    desk.net.profiler = NULL;
    CHECK_OK(net_init_context(&desk.net, 2, ffi_logger, &other));
    message(&desk, 100, 1);
    check_one(&desk, 0, 100, 0);
    if (version >= 11) {
        struct net silent = desk.net;
        struct pair pair;
        int first = count;
        silent.context = other;
        pair_open(&silent, 0, &pair);
        pair_message(&pair, 100, 0, 1);
        pair_close(&pair);
        CHECK_EQ(count, first);
        CHECK_OK(net_finalize(&desk.net, other));
    }
    desk_close(&desk);
}

/* A child is refused, and its parent's events are not its own to end. */
static void forked_under_way(int version)
{
    struct desk desk;
    static const int tag = 7;
    static const size_t size = 1000;
    int running = version < 10 ? 0 : 1;
    desk_open(&desk, version);
    void *parent = recv_parent(&desk, 0);
    void *receive = recv_for(&desk, 1, &size, &tag, &parent);
    rnic_hold(true);
    void *send = send_for(&desk, 0, size, tag, send_parent(&desk, 0));
    int child = fork_child(), before = questions, status = 0;
    if (child == 0) {
        void *data = desk.to.data, *request = NULL;
        int tags[1] = {tag}, done = 0;
        size_t sizes[1] = {size};
        CHECK_REFUSED(net_isend_for(&desk.net, desk.pair.send, data, size, tag, desk.from_mr, send_parent(&desk, 0), &request));
        CHECK_REFUSED(net_irecv_for(&desk.net, desk.pair.recv, 1, &data, sizes, tags, &desk.to_mr, &parent, &request));
        CHECK_REFUSED(net_test(&desk.net, send, &done, NULL));
        CHECK_REFUSED(net_close_send(&desk.net, desk.pair.send));
        CHECK_REFUSED(net_close_recv(&desk.net, desk.pair.recv));
        CHECK_EQ(questions, before);
        CHECK_EQ(tally(send_parent(&desk, 0), 0).running, running);
        CHECK_EQ(tally(parent, 0).running, running);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    rnic_hold(false);
    CHECK_EQ(wait_size(&desk.net, send), size);
    CHECK_EQ(wait_size(&desk.net, receive), size);
    CHECK_EQ(tally(send_parent(&desk, 0), 0).running + tally(parent, 0).running, 0);
    desk_close(&desk);
}

static void without_a_callback(int version)
{
    struct desk desk;
    net_start_profiled(&desk.net, version, NULL);
    desk_open_on(&desk, 0);
    for (int i = 0; i < 100; i++) message(&desk, 100, (uint64_t)i);
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(one_of_each),
    EACH(on_the_second_device),
    EACH(adaptive_routing),
    EACH(longer_than_a_work_request),
    EACH(four_qps_in_turn),
    EACH(four_qps_split),
    EACH(group),
    EACH(group_on_4_qps_split),
    EACH(without_parents),
    EACH(nobody_listens),
    EACH(asked_always),
    EACH(asked_never),
    EACH(early_completion),
    EACH(held_then_released),
    EACH(closed_under_way),
    EACH(failed),
    EACH(forked_under_way),
    EACH(of_its_own_communicator),
    EACH(without_a_callback),
    {0},
};
