/*
 * What a connection that fails is told with: one line and one record, which name what was posted and to whom; what was
 * flushed with it is counted and not told.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pair.h"
#include "records.h"
#include "softrnic.h"

enum { LENGTH = 1000, SENDS = 5 };

struct stage {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
    size_t mark;
};

/* Connected, with memory at both ends and nothing told yet. */
static void set_up(struct stage *stage, int version)
{
    want_records();
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
    if (stage->to_mr) CHECK_OK(net_dereg_mr(&stage->net, stage->pair.recv, stage->to_mr));
    pair_close(&stage->pair);
    pair_open(&stage->net, 0, &stage->pair); /* the process is none the worse for it */
    pair_message(&stage->pair, 3000, 0, 1);
    pair_close(&stage->pair);
    net_stop(&stage->net);
    forget_records();
}

/* One warning with all these parts since the beginning, and a record that has them all. */
static void told(const struct stage *stage, int count, const char *const *line, const char *const *record)
{
    static char text[1 << 16];
    CHECK_EQ(log_warnings_since(stage->mark), count);
    for (; *line; line++)
        if (log_matches_since(stage->mark, *line) != 1) FAIL("no single line with %s", *line);
    CHECK_EQ(records(text, sizeof text), count);
    for (; *record; record++)
        if (!strstr(text, *record)) FAIL("no %s in\n%s", *record, text);
}

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define TOLD(STAGE, COUNT, LINE, RECORD) (HERE(), told(STAGE, COUNT, LINE, RECORD))

/* The receiver's memory goes away under several sends: the first has the reason, the others are only counted. */
static void one_reason_for_all(int version)
{
    struct stage stage;
    void *receives[SENDS], *sends[SENDS];
    char size[64], pid[64];
    set_up(&stage, version);
    for (int i = 0; i < SENDS; i++)
        receives[i] = irecv(&stage.net, stage.pair.recv, stage.to.data, LENGTH, i, stage.to_mr);
    rnic_hold(true);
    for (int i = 0; i < SENDS; i++)
        sends[i] = isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, i, stage.from_mr);
    CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, stage.to_mr));
    stage.to_mr = NULL;
    rnic_hold(false);
    CHECK_EQ(wait_error(&stage.net, sends[0]), ncclRemoteError);
    snprintf(size, sizeof size, "send of %d bytes for receive 0", LENGTH);
    snprintf(pid, sizeof pid, "pid %d", getpid());
    TOLD(&stage, 1,
         PARTS("completed with IBV_WC_REM_ACCESS_ERR (status 10", size, "it was deregistered or freed", "with key", "softrnic0:1 QP ",
               pid, "5 requests not complete, 4 work requests flushed"),
         PARTS("\"status\": \"IBV_WC_REM_ACCESS_ERR\"", "\"bytes\": 1000", "\"blame\": \"peer\"", "\"work_requests_flushed\": 4"));
    for (int i = 1; i < SENDS; i++) CHECK_EQ(wait_error(&stage.net, sends[i]), ncclRemoteError);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    /* The other end's queue was ended by its own device, which says why. */
    WAIT_UNTIL(log_matches_since(stage.mark, "IBV_EVENT_QP_ACCESS_ERR") > 0, "the receiver's device to report the write");
    size_t mark = log_mark();
    CHECK(ffi_is_error(wait_error(&stage.net, receives[0])));
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "the peer wrote to memory that is not registered for it"), 1);
    clear(&stage);
}

/* Nobody answers: the line says how long the device tried, which no other reason's line does. */
static void no_answer(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_RETRY_MS", "20", 1);
    setenv("NCCL_IB_TIMEOUT", "14", 1);
    setenv("NCCL_IB_RETRY_CNT", "3", 1);
    set_up(&stage, version);
    irecv(&stage.net, stage.pair.recv, stage.to.data, LENGTH, 0, stage.to_mr);
    void *send = isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr);
    while (!is_done(&stage.net, send, NULL)) continue; /* the credit is used up, and the next one is there */
    void *receive = irecv(&stage.net, stage.pair.recv, stage.to.data, LENGTH, 0, stage.to_mr);
    send = NULL;
    stage.mark = log_mark();
    rnic_port("softrnic0", false);
    send = isend(&stage.net, stage.pair.send, stage.from.data, LENGTH, 0, stage.from_mr);
    CHECK_EQ(wait_error(&stage.net, send), ncclRemoteError);
    rnic_port("softrnic0", true);
    CHECK_EQ(log_matches_since(stage.mark, "IBV_WC_RETRY_EXC_ERR (status 12"), 1);
    const char *patience = "4 attempts, 0.067 s each or longer, 0.3 s in all (NCCL_IB_TIMEOUT=14, NCCL_IB_RETRY_CNT=3)";
    char expected[200];
    snprintf(expected, sizeof expected, "no acknowledgement came in %s", patience);
    CHECK_EQ(log_matches_since(stage.mark, expected), 1);
    /* The port says so too, on a thread of its own. */
    snprintf(expected, sizeof expected, "fail when nothing was acknowledged in %s", patience);
    WAIT_UNTIL(log_matches_since(stage.mark, expected) == 1, "what the event of the port means");
    /* The other end, which nothing happened to, hears of it and does not wait for ever. */
    CHECK_EQ(wait_error(&stage.net, receive), ncclRemoteError);
    CHECK_EQ(log_matches_since(stage.mark, "the other end failed: "), 1);
    clear(&stage);
}

const struct ffi_case ffi_cases[] = {
    EACH(one_reason_for_all),
    EACH(no_answer),
    {0},
};
