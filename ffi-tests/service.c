/*
 * What is agreed with the adapter and the peer: vendor options, adaptive routing, inline room, relaxed ordering, and moves
 * of queue pairs that fail.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "host.h"
#include "pair.h"
#include "softrnic.h"

/* ---- vendor options -------------------------------------------------------------------------------------------- */

struct options {
    const char *name, *sender, *receiver, *sender_enable, *receiver_enable;
    long long both; /* -1: none are set */
};
static const struct options options[] = {
    {"equal", "3", "3", "1", "1", 3},      {"the receiver has fewer", "7", "5", "1", "1", 5},
    {"the sender has fewer", "1", "3", "1", "1", 1}, {"off at both", "3", "3", "0", "0", -1},
    {"off at the sender", "3", "3", "0", "1", -1}, {"off at the receiver", "3", "3", "1", "0", -1},
};

static void options_are(int version, int socket, const struct options *wanted, bool sender)
{
    struct net net;
    uint32_t qp;
    size_t mark = log_mark();
    setenv("SOFTRNIC_ECE", sender ? wanted->sender : wanted->receiver, 1);
    setenv("NCCL_IB_ECE_ENABLE", sender ? wanted->sender_enable : wanted->receiver_enable, 1);
    net_start(&net, version ? version : LAST_VERSION);
    void *comm = sender ? dial(&net, 0, socket) : answer(&net, 0, socket);
    CHECK(rnic_qps(&qp, 1) >= 1);
    CHECK_EQ(rnic_ece(qp), wanted->both);
    char told[64] = "no vendor options";
    if (wanted->both >= 0) snprintf(told, sizeof told, "vendor options 0x%llx", wanted->both);
    if (sender) CHECK_EQ(log_matches_since(mark, told), 1);
    meet(socket, 'e');
    if (sender) CHECK_OK(net_close_send(&net, comm));
    else CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void options_of_sender(int version, int socket, void *argument)
{
    options_are(version, socket, argument, true);
}

static void options_of_receiver(int version, int socket, void *argument)
{
    options_are(version, socket, argument, false);
}

static void vendor_options_are_reduced(int version)
{
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        run_two(version, (struct role){"sender", options_of_sender, false},
                (struct role){"receiver", options_of_receiver, false}, (void *)&options[i]);
}

/* ---- work requests ---------------------------------------------------------------------------------------------- */

static const struct route {
    const char *name;
    const char *settings[4];
    int below, above; /* work requests of a message at and above 1000 bytes */
    const char *told;
} routes[] = {
    {"RoCE", {"NCCL_IB_AR_THRESHOLD=1000"}, 1, 1, "notice with the data"},
    {"RoCE, adaptive", {"NCCL_IB_AR_THRESHOLD=1000", "NCCL_IB_ADAPTIVE_ROUTING=1"}, 1, 2, "notice apart from data above 1000 bytes"},
    {"InfiniBand", {"NCCL_IB_AR_THRESHOLD=1000", "SOFTRNIC_LINK=ib"}, 1, 2, "notice apart from data above 1000 bytes"},
    {"InfiniBand, static", {"NCCL_IB_AR_THRESHOLD=1000", "SOFTRNIC_LINK=ib", "NCCL_IB_ADAPTIVE_ROUTING=0"}, 1, 1, "notice with the data"},
    {"InfiniBand, default threshold", {"SOFTRNIC_LINK=ib"}, 1, 1, "notice apart from data above 8192 bytes"},
};

/* Writes that a message makes beside its credit, of which there is one. */
static int writes(const struct pair *pair, size_t size)
{
    uint64_t plain = rnic_counter("post_write"), notices = rnic_counter("post_write_imm");
    pair_message(pair, size, 0, size);
    CHECK_EQ(rnic_counter("post_write_imm") - notices, 1);
    return (int)(rnic_counter("post_write") - plain);
}

static void routed(int version, int socket, void *argument)
{
    const struct route *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct pair pair;
    size_t mark = log_mark();
    host_set(wanted->settings);
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    CHECK_EQ(log_matches_since(mark, wanted->told), 1);
    CHECK_EQ(writes(&pair, 1000), wanted->below);
    CHECK_EQ(writes(&pair, 1001), wanted->above);
    pair_close(&pair);
    net_stop(&net);
}

static void adaptive_routing_splits_above_the_threshold(int version)
{
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        run_one(version, (struct role){routes[i].name, routed, false}, (void *)&routes[i]);
}

static const struct room {
    const char *granted;
    int inline_credits;
    const char *told;
} rooms[] = {
    {"256", 1, NULL},
    {"48", 1, "softrnic0:1: 32 bytes inline, 64 are not granted"},
    {"20", 0, "softrnic0:1: 16 bytes inline, 64 are not granted"},
    {"0", 0, "softrnic0:1: 0 bytes inline, 64 are not granted"},
};

static void inline_room(int version, int socket, void *argument)
{
    const struct room *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct pair pair;
    size_t mark = log_mark();
    setenv("SOFTRNIC_MAX_INLINE", wanted->granted, 1);
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    uint64_t before = rnic_counter("inline");
    pair_message(&pair, 1000, 0, 1);
    CHECK_EQ(rnic_counter("inline") - before, wanted->inline_credits);
    if (wanted->told) CHECK_EQ(log_matches_since(mark, wanted->told), 1);
    else CHECK_EQ(log_matches_since(mark, "bytes inline"), 0);
    pair_close(&pair);
    net_stop(&net);
}

static void inline_steps_down_to_what_is_granted(int version)
{
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        run_one(version, (struct role){rooms[i].granted, inline_room, false}, (void *)&rooms[i]);
}

/* Credits and flags are registered without the relaxed bit, so that a device which refuses it connects; bulk memory with
 * it, and where it is demanded that fails. */
static void relaxed_ordering_is_for_bulk_memory(int version)
{
    (void)version;
    struct net net;
    struct pair pair;
    static char data[4096];
    void *mr = GARBAGE;
    size_t mark = log_mark();
    host_set((const char *[]){"SOFTRNIC_RELAXED_ORDERING=no", "NCCL_IB_PCI_RELAXED_ORDERING=1", NULL});
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    CHECK_REFUSED(net_reg_mr(&net, pair.send, data, sizeof data, NCCL_PTR_HOST, &mr));
    CHECK(log_matches_since(mark, "NCCL_IB_PCI_RELAXED_ORDERING") >= 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- moves of queue pairs that fail ----------------------------------------------------------------------------- */

static const struct failing {
    const char *name;
    enum rnic_state state;
    int count, error;
    const char *settings[4];
    const char *told; /* NULL: the connection is made */
} failing[] = {
    {"address resolved late", RNIC_RTR, 3, ETIMEDOUT, {0}, NULL},
    {"timeouts set late", RNIC_RTS, 3, ETIMEDOUT, {0}, NULL},
    {"first state late", RNIC_INIT, 3, ETIMEDOUT, {0}, NULL},
    {"any failure", RNIC_RTR, 3, EIO, {"NCCL_IB_MQP_RETRY_ALL=1"}, NULL},
    {"any failure of the first state", RNIC_INIT, 3, EIO, {"NCCL_IB_MQP_RETRY_ALL=1"}, NULL},
    {"final", RNIC_RTR, 1, EINVAL, {0}, "to RTR"},
    {"too often", RNIC_RTR, 9, ETIMEDOUT, {"NCCL_IB_MQP_RETRY_CNT=2"}, "after 3 attempts (NCCL_IB_MQP_RETRY_CNT=2)"},
};

static void moves_fail(int version, int socket, void *argument)
{
    const struct failing *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct pair pair = {.net = &net};
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *comm = NULL;
    size_t mark = log_mark();
    setenv("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "1", 1);
    host_set(wanted->settings);
    net_start(&net, LAST_VERSION);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    rnic_fail_moves(wanted->state, (uint64_t)wanted->count, wanted->error);
    if (!wanted->told) {
        WAIT_UNTIL(pair_step(&pair, 0, handle, listener), "a connection in spite of failures");
        CHECK_EQ(log_matches_since(mark, "trying again"), wanted->count);
        CHECK_EQ(log_warnings_since(mark), 0);
        pair_message(&pair, 1000, 0, 1);
        pair_close(&pair);
    } else {
        ncclResult_t result = ncclSuccess;
        /* The receiving end moves first, and tells the other why it does not. */
        WAIT_UNTIL((try_connect(&net, 0, handle), result = net_accept(&net, listener, &comm)) != ncclSuccess,
                   "accept to fail");
        CHECK(ffi_is_error(result));
        CHECK(log_matches_since(mark, wanted->told) >= 1);
        WAIT_UNTIL((result = net_connect(&net, 0, handle, &comm)) != ncclSuccess, "connect to fail");
        CHECK(log_matches_since(mark, "the peer refuses") >= 1);
        /* Nothing of the attempts is left for the adapter to write to. */
        struct rnic_counts counts = rnic_counts();
        CHECK_EQ(counts.qps, 0);
        CHECK_EQ(counts.cqs, 0);
        CHECK_EQ(counts.mrs, 0);
    }
    CHECK_OK(net_close_listen(&net, listener));
    net_stop(&net);
}

static void failed_moves_are_tried_again(int version)
{
    for (size_t i = 0; i < sizeof failing / sizeof *failing; i++)
        run_one(version, (struct role){failing[i].name, moves_fail, false}, (void *)&failing[i]);
}

/* The queue pair for flushes goes the same way, when the others are there. */
static void a_flush_queue_pair_is_tried_again(int version)
{
    struct net net;
    struct pair pair = {.net = &net};
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    size_t mark = log_mark();
    host_set((const char *[]){"NCCL_IB_MQP_RETRY_SLEEP_MSEC=1", "PINRAIL_FLUSH=always", NULL});
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    rnic_fail_moves(RNIC_RTR, 1, ETIMEDOUT);
    WAIT_UNTIL((pair_step(&pair, 0, handle, listener), log_matches_since(mark, "trying again") == 1), "the first failure");
    /* Both data queue pairs have been in this state. */
    rnic_fail_moves(RNIC_INIT, 2, ETIMEDOUT);
    WAIT_UNTIL(pair_step(&pair, 0, handle, listener), "a connection in spite of failures");
    CHECK_EQ(log_matches_since(mark, "trying again"), 3);
    CHECK_EQ(log_warnings_since(mark), 0);
    CHECK_EQ(rnic_counts().qps, 3);
    CHECK_OK(net_close_listen(&net, listener));
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* Stock sleeps between attempts in the thread that serves every connection of a GPU. Here another connection is made while
 * one waits a minute for its turn; sleeping would end this case at its deadline. */
static void nobody_sleeps_between_attempts(int version)
{
    struct net net;
    struct pair pair;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    size_t mark = log_mark();
    setenv("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "60000", 1);
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    rnic_fail_moves(RNIC_RTR, 1, ETIMEDOUT);
    while (!log_matches_since(mark, "trying again in 60s")) {
        CHECK(try_connect(&net, 0, handle) == NULL);
        CHECK(try_accept(&net, listener) == NULL);
    }
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    for (int i = 0; i < 1000; i++) {
        CHECK(try_connect(&net, 0, handle) == NULL);
        CHECK(try_accept(&net, listener) == NULL);
    }
    CHECK_OK(net_close_listen(&net, listener));
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    ONCE(vendor_options_are_reduced),
    ONCE(adaptive_routing_splits_above_the_threshold),
    ONCE(inline_steps_down_to_what_is_granted),
    ONCE(relaxed_ordering_is_for_bulk_memory),
    ONCE(failed_moves_are_tried_again),
    EACH(a_flush_queue_pair_is_tried_again),
    {.name = "nobody_sleeps_between_attempts", .run = nobody_sleeps_between_attempts, .seconds = 40},
    {0},
};
