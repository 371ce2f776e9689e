/*
 * Wrong use and failures inside one process: an error code, never a crash, told once; a failed communicator keeps its
 * error; memory that was not registered is neither read nor written.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pair.h"

enum { LENGTH = 1000 };

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};

static void desk_fill(struct desk *desk)
{
    pair_open(&desk->net, 0, &desk->pair);
    desk->from = guarded_new(LENGTH, 0);
    desk->to = guarded_new(LENGTH, 0);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, LENGTH);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to.data, LENGTH);
    pattern_fill(desk->from.data, LENGTH, 7);
}

static void desk_open(struct desk *desk, int version)
{
    net_start(&desk->net, version);
    desk_fill(desk);
}

static void desk_empty(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    guarded_free(&desk->from);
    guarded_free(&desk->to);
}

static void desk_close(struct desk *desk)
{
    desk_empty(desk);
    struct pair fresh; /* the process is none the worse for it */
    pair_open(&desk->net, 0, &fresh);
    pair_message(&fresh, 3000, 0, 1);
    pair_close(&fresh);
    net_stop(&desk->net);
}

/* ---- misuse -------------------------------------------------------------------------------------------------- */

static void communicators_confused(int version)
{
    struct desk desk;
    void *request = GARBAGE, *data;
    size_t size = LENGTH;
    int tag = 0, flush_size = 1;
    desk_open(&desk, version);
    data = desk.to.data;
    CHECK_REFUSED(net_isend(&desk.net, desk.pair.recv, data, LENGTH, 0, desk.to_mr, &request));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.send, 1, &data, &size, &tag, &desk.from_mr, &request));
    CHECK_REFUSED(net_iflush(&desk.net, desk.pair.send, 1, &data, &flush_size, &desk.from_mr, &request));
    CHECK_REFUSED(net_close_send(&desk.net, desk.pair.recv));
    CHECK_REFUSED(net_close_recv(&desk.net, desk.pair.send));
    CHECK_REFUSED(net_close_listen(&desk.net, desk.pair.send));
    CHECK_REFUSED(net_accept(&desk.net, desk.pair.recv, &request));
    desk_close(&desk);
}

static void out_pointers_missing(int version)
{
    struct desk desk;
    void *data, *request;
    size_t size = LENGTH;
    int tag = 0;
    desk_open(&desk, version);
    data = desk.to.data;
    CHECK_REFUSED(net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr, NULL));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, NULL));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, NULL, &size, &tag, &desk.to_mr, &request));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, NULL, &tag, &desk.to_mr, &request));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, NULL, &desk.to_mr, &request));
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, NULL, &request));
    desk_close(&desk);
}

static void done_pointer_missing(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    CHECK_REFUSED(net_test(&desk.net, receive, NULL, NULL));
    desk_close(&desk);
}

static void no_memory_handle(int version)
{
    struct desk desk;
    void *request = GARBAGE, *data, *none = NULL;
    size_t size = LENGTH;
    int tag = 0;
    desk_open(&desk, version);
    data = desk.to.data;
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &none, &request));
    desk_empty(&desk);
    desk_fill(&desk);
    irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    CHECK_REFUSED(net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, NULL, &request));
    desk_close(&desk);
}

/* After done = 1 the request is the plugin's again: testing it once more is an error, and harms no live request. */
static void request_tested_again(int version)
{
    struct desk desk;
    int done = 0x5bad;
    desk_open(&desk, version);
    void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, send), LENGTH);
    CHECK_EQ(wait_size(&desk.net, receive), LENGTH);
    CHECK_REFUSED(net_test(&desk.net, send, &done, NULL));
    CHECK_REFUSED(net_test(&desk.net, receive, &done, NULL));
    CHECK_BUFFER(&desk.to, LENGTH, 7);
    desk_close(&desk);
}

/* ---- memory -------------------------------------------------------------------------------------------------- */

/* A wrong address has to fail somewhere: at the call, or at test; the bytes must not have moved. */
static bool send_fails(struct desk *desk, void *data, size_t size)
{
    void *request = NULL;
    ncclResult_t result = ncclSuccess;
    WAIT_UNTIL((result = net_isend(&desk->net, desk->pair.send, data, size, 0, desk->from_mr, &request)) || request,
               "isend");
    if (result == ncclSuccess) result = wait_error(&desk->net, request);
    return ffi_is_error(result);
}

static void sent_from_unregistered_memory(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    struct guarded elsewhere = guarded_new(1 << 20, 0);
    pattern_fill(elsewhere.data, LENGTH, 9);
    irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    CHECK(send_fails(&desk, elsewhere.data, LENGTH));
    CHECK_BUFFER(&desk.to, 0, 0);
    desk_close(&desk);
}

static void sent_past_the_registration(int version)
{
    struct desk desk;
    enum { FAR = 64 * 4096 };
    desk_open(&desk, version);
    struct guarded large = guarded_new(FAR, 0), target = guarded_new(FAR, 0);
    void *mr = register_host(&desk.net, desk.pair.send, large.data, 4096);
    void *target_mr = register_host(&desk.net, desk.pair.recv, target.data, FAR);
    void *own = desk.from_mr;
    desk.from_mr = mr;
    irecv(&desk.net, desk.pair.recv, target.data, FAR, 0, target_mr);
    CHECK(send_fails(&desk, large.data, FAR));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, mr));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, target_mr));
    desk.from_mr = own;
    desk_close(&desk);
}

/* The receiver advertises memory that its handle does not cover: nothing may be written there. */
static void received_into_unregistered_memory(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    struct guarded elsewhere = guarded_new(1 << 20, 0);
    void *data = elsewhere.data, *request = NULL, *send = NULL;
    size_t size = LENGTH;
    int tag = 0;
    ncclResult_t result = net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &request);
    if (result == ncclSuccess) {
        CHECK(request != NULL);
        WAIT_UNTIL((result = net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr, &send)) || send,
                   "isend");
        if (result == ncclSuccess) CHECK(ffi_is_error(wait_error(&desk.net, send)));
        CHECK(ffi_is_error(wait_error(&desk.net, request)));
    } else {
        CHECK(ffi_is_error(result));
    }
    CHECK_BUFFER(&elsewhere, 0, 0);
    desk_close(&desk);
}

/* The receive's memory is deregistered before the send comes, as on abort: the key is dead, both sides get errors. */
static void deregistered_under_a_receive(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    struct guarded memory = guarded_new(1 << 16, 0);
    void *mr = register_host(&desk.net, desk.pair.recv, memory.data, memory.size);
    void *receive = irecv(&desk.net, desk.pair.recv, memory.data, LENGTH, 0, mr);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    CHECK(send_fails(&desk, desk.from.data, LENGTH));
    CHECK(ffi_is_error(wait_error(&desk.net, receive)));
    CHECK_BUFFER(&memory, 0, 0);
    desk_close(&desk);
}

/* ---- the latch ----------------------------------------------------------------------------------------------- */

static void failed_sender_stays_failed(int version)
{
    struct desk desk;
    void *request = NULL;
    ncclResult_t code = ncclSuccess;
    desk_open(&desk, version);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    WAIT_UNTIL((code = net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr, &request)) ||
                   request,
               "isend to notice that the peer closed");
    if (code == ncclSuccess) code = wait_error(&desk.net, request);
    CHECK(ffi_is_error(code));
    size_t mark = log_mark();
    for (int i = 0; i < 100; i++) {
        void *again = GARBAGE;
        int done = 0;
        CHECK_EQ(net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, i, desk.from_mr, &again), code);
        if (request && code) CHECK(net_test(&desk.net, request, &done, NULL) == code || !request);
    }
    CHECK_EQ(log_warnings_since(mark), 0);
    void *mr = register_host(&desk.net, desk.pair.send, desk.from.data, 10); /* registration is no data path */
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, mr));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    desk_fill(&desk);
    desk_close(&desk);
}

static void failed_receiver_stays_failed(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    void *second = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    CHECK(!is_done(&desk.net, receive, NULL));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    ncclResult_t code = wait_error(&desk.net, receive);
    size_t mark = log_mark();
    for (int i = 0; i < 100; i++) {
        void *data = desk.to.data, *again = GARBAGE;
        size_t size = LENGTH;
        int tag = 0, done = 0;
        CHECK_EQ(net_test(&desk.net, second, &done, NULL), code);
        CHECK_EQ(net_test(&desk.net, receive, &done, NULL), code);
        CHECK_EQ(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &again), code);
    }
    CHECK_EQ(log_warnings_since(mark), 0);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    desk_fill(&desk);
    desk_close(&desk);
}

/* One communicator's failure is not another's, although they share a device. */
static void others_are_not_touched(int version)
{
    struct desk desk;
    struct pair bystanders[4];
    desk_open(&desk, version);
    for (int i = 0; i < 4; i++) pair_open(&desk.net, 0, &bystanders[i]);
    struct guarded elsewhere = guarded_new(1 << 20, 0);
    irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    CHECK(send_fails(&desk, elsewhere.data, LENGTH));
    for (int m = 0; m < 100; m++) pair_message(&bystanders[m % 4], (size_t)m * 10, m, (uint64_t)m);
    for (int i = 0; i < 4; i++) pair_close(&bystanders[i]);
    desk_close(&desk);
}

/* ---- fork ---------------------------------------------------------------------------------------------------- */

/* A child of the process has the communicators' memory but none of the device's rights: it is told so. */
static void child_of_a_fork_is_refused(int version)
{
    struct desk desk;
    int status;
    desk_open(&desk, version);
    void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    int child = fork_child();
    if (child == 0) {
        void *request = GARBAGE, *mr = GARBAGE;
        int done = 0;
        memset(desk.to.data, 0xEE, LENGTH); /* its own copy */
        CHECK_REFUSED(net_isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr, &request));
        CHECK_REFUSED(net_test(&desk.net, receive, &done, NULL));
        CHECK_REFUSED(net_reg_mr(&desk.net, desk.pair.send, desk.from.data, LENGTH, NCCL_PTR_HOST, &mr));
        /* Ends, too: what they would end is the parent's. */
        CHECK_REFUSED(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
        CHECK_REFUSED(net_close_send(&desk.net, desk.pair.send));
        CHECK_REFUSED(net_close_recv(&desk.net, desk.pair.recv));
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, send), LENGTH);
    CHECK_EQ(wait_size(&desk.net, receive), LENGTH);
    CHECK_BUFFER(&desk.to, LENGTH, 7);
    desk_close(&desk);
}

/* A child that ends, as every system() and every data loader does, takes nothing from its parent. */
static void child_of_a_fork_ends(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    for (int i = 0; i < 20; i++) {
        int status;
        void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
        guarded_reset(&desk.to);
        int child = fork_child();
        if (child == 0 && i % 2) _exit(0);
        if (child == 0) exit(0); /* with its destructors */
        void *send = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
        CHECK_EQ(wait_size(&desk.net, send), LENGTH);
        CHECK_EQ(wait_size(&desk.net, receive), LENGTH);
        CHECK_BUFFER(&desk.to, LENGTH, 7);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
    }
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(communicators_confused),
    EACH(out_pointers_missing),
    EACH(done_pointer_missing),
    EACH(no_memory_handle),
    EACH(request_tested_again),
    EACH(sent_from_unregistered_memory),
    EACH(sent_past_the_registration),
    EACH(received_into_unregistered_memory),
    EACH(deregistered_under_a_receive),
    EACH(failed_sender_stays_failed),
    EACH(failed_receiver_stays_failed),
    EACH(others_are_not_touched),
    EACH(child_of_a_fork_is_refused),
    EACH(child_of_a_fork_ends),
    {0},
};
