/*
 * Waits that have a bound of their own: for the first receive of the other end, for its answer when a rail failed; and how
 * long ago a request that failed was posted.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pair.h"
#include "records.h"
#include "softrnic.h"

enum { LENGTH = 5000 };

struct stage {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
    size_t mark;
};

static void set_up(struct stage *stage, int version)
{
    net_start(&stage->net, version);
    pair_open(&stage->net, 0, &stage->pair);
    stage->from = guarded_new(LENGTH, 0);
    stage->to = guarded_new(LENGTH, 0);
    pattern_fill(stage->from.data, LENGTH, 7);
    stage->from_mr = register_host(&stage->net, stage->pair.send, stage->from.data, LENGTH);
    stage->to_mr = register_host(&stage->net, stage->pair.recv, stage->to.data, LENGTH);
    stage->mark = log_mark();
}

static void clear(struct stage *stage)
{
    CHECK_OK(net_dereg_mr(&stage->net, stage->pair.send, stage->from_mr));
    CHECK_OK(net_dereg_mr(&stage->net, stage->pair.recv, stage->to_mr));
    pair_close(&stage->pair);
    pair_open(&stage->net, 0, &stage->pair); /* the process is none the worse for it */
    pair_message(&stage->pair, 3000, 0, 1);
    pair_close(&stage->pair);
    net_stop(&stage->net);
}

static void *to_send(struct stage *stage)
{
    return try_isend(&stage->net, stage->pair.send, stage->from.data, LENGTH, 0, stage->from_mr);
}

static void *to_receive(struct stage *stage)
{
    return irecv(&stage->net, stage->pair.recv, stage->to.data, LENGTH, 0, stage->to_mr);
}

/* Longer than the bounds of these tests: what has not run out by then does not. */
static void let_them_pass(void)
{
    struct deadline deadline = deadline_in(2.5);
    while (!deadline_passed(&deadline)) ffi_yield();
}

/* The other rank never receives: the sending end gives up and says where it was, and the other end hears of it. */
static void first_receive_never_comes(int version)
{
    struct stage stage;
    void *request = NULL;
    ncclResult_t result = ncclSuccess;
    setenv("PINRAIL_FIRST_CREDIT_TIMEOUT", "1", 1);
    set_up(&stage, version);
    WAIT_UNTIL(({
                   result = net_isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr, &request);
                   if (result == ncclSuccess) CHECK_PTR(request, NULL);
                   result != ncclSuccess;
               }),
               "the wait for the first receive to end");
    CHECK_EQ(result, ncclRemoteError);
    CHECK_EQ(log_matches_since(stage.mark, "waiting for the peer's first receive: none came in 1s (PINRAIL_FIRST_CREDIT_TIMEOUT)"), 1);
    CHECK_EQ(net_isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr, &request), result);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    void *data = stage.to.data, *receive = NULL;
    size_t size = LENGTH;
    int tag = 0;
    WAIT_UNTIL(net_irecv(&stage.net, stage.pair.recv, 1, &data, &size, &tag, &stage.to_mr, &receive) != ncclSuccess,
               "the other end to hear of it");
    CHECK_EQ(log_matches_since(stage.mark, "the other end failed: "), 1);
    clear(&stage);
}

/* It comes after its time, but before anybody asks again: then all is well, as if there were no bound. */
static void first_receive_comes_late(int version)
{
    struct stage stage;
    void *send = NULL;
    setenv("PINRAIL_FIRST_CREDIT_TIMEOUT", "1", 1);
    set_up(&stage, version);
    CHECK_PTR(to_send(&stage), NULL);
    void *receive = to_receive(&stage);
    let_them_pass();
    WAIT_UNTIL(send = to_send(&stage), "the send");
    CHECK_EQ(wait_size(&stage.net, send), LENGTH);
    CHECK_EQ(wait_size(&stage.net, receive), LENGTH);
    CHECK_BUFFER(&stage.to, LENGTH, 7);
    for (int m = 0; m < 100; m++) pair_message(&stage.pair, (size_t)m * 77, m, (uint64_t)m);
    let_them_pass(); /* only the first is bounded */
    CHECK_PTR(to_send(&stage), NULL);
    let_them_pass();
    CHECK_PTR(to_send(&stage), NULL);
    CHECK_EQ(log_warnings_since(stage.mark), 0);
    clear(&stage);
}

/* A connection that nobody sends over waits for nothing; and without the setting nobody is ever late. */
static void nobody_asks_and_nobody_minds(int version)
{
    struct stage stage;
    setenv("PINRAIL_FIRST_CREDIT_TIMEOUT", "1", 1);
    set_up(&stage, version);
    let_them_pass();
    pair_message(&stage.pair, 3000, 0, 1);
    CHECK_EQ(log_warnings_since(stage.mark), 0);
    clear(&stage);
    unsetenv("PINRAIL_FIRST_CREDIT_TIMEOUT");
    set_up(&stage, version);
    CHECK_PTR(to_send(&stage), NULL);
    let_them_pass();
    CHECK_PTR(to_send(&stage), NULL);
    pair_message(&stage.pair, 3000, 0, 1);
    clear(&stage);
}

/* ---- the answer about a rail --------------------------------------------------------------------------------- */

static int fused_pair(struct net *net, int version)
{
    setenv("SOFTRNIC_DEVICES", "2", 1);
    setenv("SOFTRNIC_RETRY_MS", "5", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    setenv("PINRAIL_FAILOVER_TIMEOUT", "1", 1);
    net_start(net, version);
    return net_fuse(net, 2);
}

static void asks_in_vain(int version, int socket, void *argument)
{
    struct net net;
    int receiver, done = 0;
    ncclResult_t result = ncclSuccess;
    (void)argument;
    int dev = fused_pair(&net, version);
    void *comm = dial(&net, dev, socket);
    hear(socket, &receiver, sizeof receiver);
    struct guarded from = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, from.data, LENGTH);
    hear_step(socket, 'r');
    CHECK_EQ(kill(receiver, SIGSTOP), 0);
    rnic_faults("device=softrnic1 nth=1 -> drop");
    size_t mark = log_mark();
    void *send = isend(&net, comm, from.data, LENGTH, 0, mr);
    WAIT_UNTIL((result = net_test(&net, send, &done, NULL)) != ncclSuccess, "the wait for the other end's answer to end");
    CHECK_EQ(result, ncclRemoteError);
    CHECK_EQ(done, 0);
    CHECK_EQ(log_matches_since(mark, "did not tell in 1s what it has received (PINRAIL_FAILOVER_TIMEOUT)"), 1);
    CHECK_EQ(kill(receiver, SIGCONT), 0);
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void is_stopped(int version, int socket, void *argument)
{
    struct net net;
    int self = getpid();
    (void)argument;
    int dev = fused_pair(&net, version);
    void *comm = answer(&net, dev, socket);
    tell(socket, &self, sizeof self);
    struct guarded to = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, to.data, LENGTH);
    void *receive = irecv(&net, comm, to.data, LENGTH, 0, mr);
    tell_step(socket, 'r');
    meet(socket, 'e');
    CHECK(ffi_is_error(wait_error(&net, receive)));
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void no_answer_about_a_rail(int version)
{
    (void)version;
    run_two(LAST_VERSION, (struct role){.name = "asks in vain", .run = asks_in_vain},
            (struct role){.name = "is stopped", .run = is_stopped}, NULL);
}

/* ---- what nobody asks for ------------------------------------------------------------------------------------ */

/* The credit of a receive that is complete at once is lost, and nobody polls for it: the end that waits for it hears of it
 * all the same. */
static void a_lost_credit_that_nobody_asks_for(int version)
{
    struct stage stage;
    ncclResult_t result = ncclSuccess;
    void *request = NULL, *data, *receive = NCCL_NET_OPTIONAL_RECV_COMPLETION;
    size_t size = LENGTH;
    int tag = 0, done = 0;
    setenv("NCCL_IB_TIMEOUT", "10", 1);
    setenv("NCCL_IB_RETRY_CNT", "1", 1);
    setenv("SOFTRNIC_RETRY_MS", "30", 1);
    set_up(&stage, version);
    for (int m = 0; m < 40; m++) pair_message(&stage.pair, 100, m, (uint64_t)m);
    data = stage.to.data;
    rnic_faults("op=write nth=1 -> drop");
    CHECK_OK(net_irecv(&stage.net, stage.pair.recv, 1, &data, &size, &tag, &stage.to_mr, &receive));
    CHECK(receive != NULL);
    if (version >= 9) { /* earlier ones know no such receives, and just nobody asks */
        CHECK_OK(net_test(&stage.net, receive, &done, NULL));
        CHECK_EQ(done, 1);
    }
    WAIT_UNTIL(({
                   result = net_isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr, &request);
                   if (result == ncclSuccess) CHECK_PTR(request, NULL);
                   result != ncclSuccess;
               }),
               "the sending end to hear of the lost credit");
    CHECK_EQ(result, ncclRemoteError);
    CHECK_EQ(log_matches_since(stage.mark, "the other end failed: a queue pair failed while nobody asked"), 1);
    /* And whoever asks the receiving end learns why. */
    receive = NULL;
    result = net_irecv(&stage.net, stage.pair.recv, 1, &data, &size, &tag, &stage.to_mr, &receive);
    CHECK_EQ(result, ncclRemoteError);
    CHECK_EQ(log_matches_since(stage.mark, "completed with IBV_WC_RETRY_EXC_ERR"), 1);
    rnic_faults("");
    clear(&stage);
}

/* ---- age ----------------------------------------------------------------------------------------------------- */

/* The number behind a key of the last record. */
static double number_in(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (!at) FAIL("no %s in\n%s", key, text);
    return strtod(at + strlen(key), NULL);
}

/* The device gives up after seconds: the line and the record say how long ago the request was posted. */
static void the_age_is_told(int version)
{
    static char text[1 << 16];
    const double retry = 2.5;
    struct stage stage;
    setenv("SOFTRNIC_RETRY_MS", "2500", 1);
    want_records();
    set_up(&stage, version);
    for (int m = 0; m < 40; m++) pair_message(&stage.pair, 100, m, (uint64_t)m);
    to_receive(&stage);
    void *send = isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr);
    CHECK_EQ(wait_size(&stage.net, send), LENGTH);
    to_receive(&stage); /* what it is answered by gets lost */
    stage.mark = log_mark();
    rnic_faults("bytes=5000 -> drop");
    send = isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr);
    CHECK_EQ(wait_error(&stage.net, send), ncclRemoteError);
    rnic_faults("");
    CHECK_EQ(log_matches_since(stage.mark, "send of 5000 bytes for receive 41, posted "), 1);
    CHECK_EQ(log_matches_since(stage.mark, " s ago, completed with IBV_WC_RETRY_EXC_ERR"), 1);
    CHECK_EQ(records(text, sizeof text), 1);
    double least = number_in(text, "\"at_least\": "), most = number_in(text, "\"at_most\": ");
    printf("posted %.3f to %.3f s ago\n", least, most);
    CHECK(least <= most && most >= retry);
    clear(&stage);
    forget_records();
}

const struct ffi_case ffi_cases[] = {
    EACH(first_receive_never_comes),
    EACH(first_receive_comes_late),
    EACH(nobody_asks_and_nobody_minds),
    EACH(the_age_is_told),
    EACH(a_lost_credit_that_nobody_asks_for),
    ONCE(no_answer_about_a_rail),
    {0},
};
