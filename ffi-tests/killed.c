/*
 * A peer that dies: killed in each state of a connection. The survivor's call has to end in an error: not in success,
 * not never. Then the communicator keeps giving that error, closes cleanly, and the rest of the process works on.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pair.h"

enum { HANDLE = NCCL_NET_HANDLE_MAXSIZE, LENGTH = 3000, SEVERAL = 4 };

static const char *state; /* which moment the victim dies at */

static bool at(const char *moment)
{
    return strcmp(state, moment) == 0;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* The survivor's last word on a failed communicator is the first: the same code from every call, no new warnings. */
static void expect_latched(const struct net *net, bool is_send, void *comm, void *request, ncclResult_t code, void *data,
                           void *mr)
{
    size_t mark = log_mark();
    for (int i = 0; i < 20; i++) {
        void *again = GARBAGE;
        size_t size = 8;
        int tag = 0, done = 0;
        if (is_send) CHECK_EQ(net_isend(net, comm, data, 8, 0, mr, &again), code);
        if (!is_send) CHECK_EQ(net_irecv(net, comm, 1, &data, &size, &tag, &mr, &again), code);
        if (request) CHECK_EQ(net_test(net, request, &done, NULL), code);
    }
    if (log_warnings_since(mark) != 0) FAIL("%d warnings for an old failure", log_warnings_since(mark));
}

static void works_on(const struct net *net)
{
    struct pair pair;
    pair_open(net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
}

/* ---- the sender dies ----------------------------------------------------------------------------------------- */

static void dying_sender(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    if (at("after its handshake began")) {
        char handle[HANDLE];
        hear(socket, handle, sizeof handle);
        (void)try_connect(&net, 0, handle);
        tell_step(socket, 'k');
        die();
    }
    void *comm = dial(&net, 0, socket);
    struct guarded from = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, from.data, LENGTH);
    pattern_fill(from.data, LENGTH, 1);
    if (at("after one message")) CHECK_EQ(wait_size(&net, isend(&net, comm, from.data, LENGTH, 0, mr)), LENGTH);
    if (at("with a send under way")) isend(&net, comm, from.data, LENGTH, 0, mr); /* held by its device */
    hear_step(socket, 'r');
    die();
}

static void bereaved_receiver(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket), *requests[SEVERAL];
    struct guarded to = guarded_new((size_t)SEVERAL * LENGTH, 0);
    void *mr = register_host(&net, comm, to.data, to.size);
    size_t mark = log_mark();
    int first = 0;
    for (int i = 0; i < SEVERAL; i++) requests[i] = irecv(&net, comm, to.data + i * LENGTH, LENGTH, 0, mr);
    if (at("after one message")) { /* which came whole, and counts */
        CHECK_EQ(wait_size(&net, requests[first++]), LENGTH);
        CHECK_PART(&to, 0, LENGTH, LENGTH, 1);
    }
    tell_step(socket, 'r');
    ncclResult_t code = wait_error(&net, requests[first]);
    for (int i = first; i < SEVERAL; i++) CHECK_EQ(wait_error(&net, requests[i]), code);
    CHECK(log_warnings_since(mark) >= 1);
    expect_latched(&net, false, comm, requests[first], code, to.data, mr);
    if (!at("after one message")) CHECK_BUFFER(&to, 0, 0);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    works_on(&net);
    net_stop(&net);
}

static void sender_dies(int version, const char *moment)
{
    state = moment;
    setenv("SOFTRNIC_RETRY_MS", "500", 1);
    run_two(version, (struct role){.name = "dying sender", .run = dying_sender, .dies_by_kill = true},
            (struct role){.name = "receiver", .run = bereaved_receiver}, NULL);
}

static void sender_dies_idle(int version) { sender_dies(version, "idle"); }
static void sender_dies_after_one_message(int version) { sender_dies(version, "after one message"); }

static void holding_sender(int version, int socket, void *argument)
{
    setenv("SOFTRNIC_HOLD", "sq", 1);
    dying_sender(version, socket, argument);
}

static void sender_dies_with_a_send_under_way(int version)
{
    state = "with a send under way";
    run_two(version, (struct role){.name = "dying sender", .run = holding_sender, .dies_by_kill = true},
            (struct role){.name = "receiver", .run = bereaved_receiver}, NULL);
}

/* ---- the receiver dies --------------------------------------------------------------------------------------- */

static void dying_receiver(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded to = guarded_new((size_t)SEVERAL * LENGTH, 0);
    void *mr = register_host(&net, comm, to.data, to.size);
    for (int i = 0; i < SEVERAL && !at("before any receive"); i++)
        irecv(&net, comm, to.data + i * LENGTH, LENGTH, 0, mr);
    tell_step(socket, 'r');
    hear_step(socket, 'k');
    die();
}

/* A send that cannot be delivered: refused by isend, or failed by test. Returns the code, and the request if any. */
static ncclResult_t failing_send(const struct net *net, void *comm, void *data, void *mr, void **request)
{
    /* A kernel destroys the queue pairs of a dead process some time after its sockets: until then receives that were
     * posted are answered, and such a send is rightly done. */
    for (int sent = 0;; sent++) {
        ncclResult_t result = ncclSuccess;
        int done = 0;
        *request = NULL;
        WAIT_UNTIL((result = net_isend(net, comm, data, LENGTH, 0, mr, request)) != ncclSuccess || *request,
                   "isend to take the message or to fail");
        if (result != ncclSuccess) *request = NULL;
        if (result == ncclSuccess)
            WAIT_UNTIL((result = net_test(net, *request, &done, NULL)) != ncclSuccess || done, "a send to end");
        if (result != ncclSuccess) {
            CHECK(ffi_is_error(result));
            return result;
        }
        if (at("before any receive") || sent >= SEVERAL) FAIL("a request that cannot succeed was reported as done");
    }
}

static void bereaved_sender(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = dial(&net, 0, socket), *requests[SEVERAL] = {NULL};
    struct guarded from = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, from.data, LENGTH);
    ncclResult_t code;
    hear_step(socket, 'r');
    if (at("before any receive")) CHECK_PTR(try_isend(&net, comm, from.data, LENGTH, 0, mr), NULL);
    if (at("with sends under way"))
        for (int i = 0; i < SEVERAL; i++) requests[i] = isend(&net, comm, from.data, LENGTH, 0, mr);
    size_t mark = log_mark();
    tell_step(socket, 'k');
    if (at("with sends under way")) {
        code = wait_error(&net, requests[0]); /* nothing completes on the held device: the connection itself is gone */
        for (int i = 0; i < SEVERAL; i++) CHECK_EQ(wait_error(&net, requests[i]), code);
    } else {
        hear_end(socket);
        code = failing_send(&net, comm, from.data, mr, &requests[0]);
    }
    CHECK(log_warnings_since(mark) >= 1);
    expect_latched(&net, true, comm, requests[0], code, from.data, mr);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    if (!at("with sends under way")) works_on(&net); /* on a held device nothing would */
    net_stop(&net);
}

static void holding_bereaved_sender(int version, int socket, void *argument)
{
    setenv("SOFTRNIC_HOLD", "sq", 1);
    bereaved_sender(version, socket, argument);
}

static void receiver_dies(int version, const char *moment, bool sender_holds)
{
    state = moment;
    setenv("SOFTRNIC_RETRY_MS", "500", 1);
    run_two(version,
            (struct role){.name = "sender", .run = sender_holds ? holding_bereaved_sender : bereaved_sender},
            (struct role){.name = "dying receiver", .run = dying_receiver, .dies_by_kill = true}, NULL);
}

static void receiver_dies_before_any_receive(int version) { receiver_dies(version, "before any receive", false); }
static void receiver_dies_with_receives_posted(int version) { receiver_dies(version, "with receives posted", false); }
static void receiver_dies_with_sends_under_way(int version) { receiver_dies(version, "with sends under way", true); }

/* ---- dying while connecting ---------------------------------------------------------------------------------- */

static void dying_listener(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    char handle[HANDLE] = {0};
    void *listener = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    tell(socket, handle, sizeof handle);
    if (at("half way")) {
        hear_step(socket, 'h');
        for (int i = 0; i < 3; i++) (void)try_accept(&net, listener);
    }
    tell_step(socket, 'k');
    die();
}

static void bereaved_connector(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    char handle[HANDLE];
    void *comm = NULL;
    ncclResult_t result = ncclSuccess;
    net_start(&net, version);
    hear(socket, handle, sizeof handle);
    if (at("half way")) {
        comm = try_connect(&net, 0, handle);
        tell_step(socket, 'h');
    }
    hear_step(socket, 'k');
    hear_end(socket);
    if (!comm)
        WAIT_UNTIL((result = net_connect(&net, 0, handle, &comm)) != ncclSuccess || comm, "connect to fail");
    if (comm) { /* the listener had answered before it died: then the communicator has to notice */
        char byte[LENGTH];
        void *mr = register_host(&net, comm, byte, sizeof byte), *request;
        failing_send(&net, comm, byte, mr, &request);
        CHECK_OK(net_dereg_mr(&net, comm, mr));
        CHECK_OK(net_close_send(&net, comm));
    } else {
        CHECK(ffi_is_error(result));
    }
    works_on(&net);
    net_stop(&net);
}

static void listener_dies(int version, const char *moment)
{
    state = moment;
    setenv("SOFTRNIC_RETRY_MS", "500", 1);
    run_two(version, (struct role){.name = "connector", .run = bereaved_connector},
            (struct role){.name = "dying listener", .run = dying_listener, .dies_by_kill = true}, NULL);
}

static void listener_dies_before_connect(int version) { listener_dies(version, "before connect"); }
static void listener_dies_half_way(int version) { listener_dies(version, "half way"); }

/* accept has nobody to report to: it may go on waiting or give an error, but closes cleanly and takes nothing with it. */
static void bereaved_acceptor(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    char handle[HANDLE] = {0};
    void *listener = NULL, *comm = NULL;
    net_start(&net, version);
    struct census before = census_take();
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    tell(socket, handle, sizeof handle);
    hear_step(socket, 'k');
    hear_end(socket);
    for (int i = 0; i < 2000 && !comm; i++)
        if (net_accept(&net, listener, &comm) != ncclSuccess) break;
    if (comm) CHECK_OK(net_close_recv(&net, comm));
    CHECK_OK(net_close_listen(&net, listener));
    CHECK_EQ(census_take().descriptors, before.descriptors);
    works_on(&net);
    net_stop(&net);
}

static void connector_dies_half_way(int version)
{
    state = "after its handshake began";
    run_two(version, (struct role){.name = "dying connector", .run = dying_sender, .dies_by_kill = true},
            (struct role){.name = "acceptor", .run = bereaved_acceptor}, NULL);
}

const struct ffi_case ffi_cases[] = {
    EACH(sender_dies_idle),
    EACH(sender_dies_after_one_message),
    EACH(sender_dies_with_a_send_under_way),
    EACH(receiver_dies_before_any_receive),
    EACH(receiver_dies_with_receives_posted),
    EACH(receiver_dies_with_sends_under_way),
    EACH(listener_dies_before_connect),
    EACH(listener_dies_half_way),
    EACH(connector_dies_half_way),
    {0},
};
