/*
 * A peer that dies at each step of a connection's life: of the handshake, call by call of either end, and of what befalls
 * one message, from before its credit to the close. The survivor's calls end, by an error or with what had come, and when it
 * has closed nothing is left. What killed.c has (idle, between messages, on a held device) is not repeated here.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "held.h"

enum { HANDLE = NCCL_NET_HANDLE_MAXSIZE, LENGTH = 20000, STEPS = 12 };

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What the survivor of anything does last. */
static void works_on(const struct net *net)
{
    struct pair pair;
    pair_open(net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
}

/* ---- the handshake ------------------------------------------------------------------------------------------- */

/* Both ends poll by turns, and one dies after so many calls. */
struct step {
    int calls;
    bool connector_dies;
};

/* One call of this end, unless it has its communicator. An error only where the other end is gone. */
static ncclResult_t poll_end(const struct net *net, bool connects, void *handle, void *listener, void **comm)
{
    if (*comm) return ncclSuccess;
    return connects ? net_connect(net, 0, handle, comm) : net_accept(net, listener, comm);
}

static void victim(int version, int socket, bool connects, int calls)
{
    struct net net;
    char handle[HANDLE] = {0};
    void *listener = NULL, *comm = NULL;
    net_start(&net, version);
    if (connects) {
        hear(socket, handle, sizeof handle);
    } else {
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        tell(socket, handle, sizeof handle);
    }
    for (int i = 0; i < calls; i++) {
        CHECK_OK(poll_end(&net, connects, handle, listener, &comm));
        meet(socket, 'p');
        hear_step(socket, 'p');
    }
    if (calls == STEPS) CHECK(comm != NULL); /* or the steps do not reach through the handshake */
    tell_step(socket, 'k');
    die();
}

/* A communicator whose peer has died: what is begun on it fails, if it is taken at all. */
static void expect_dead(const struct net *net, bool sends, void *comm)
{
    static char memory[LENGTH];
    void *mr = register_host(net, comm, memory, sizeof memory), *request = NULL, *data = memory;
    size_t size = sizeof memory;
    int tag = 0, done = 0;
    ncclResult_t result = ncclSuccess;
    WAIT_UNTIL(({
                   if (!request && sends) result = net_isend(net, comm, data, size, tag, mr, &request);
                   if (!request && !sends) result = net_irecv(net, comm, 1, &data, &size, &tag, &mr, &request);
                   if (!result && request) result = net_test(net, request, &done, NULL);
                   if (done) FAIL("a request that cannot succeed was reported as done");
                   result != ncclSuccess;
               }),
               "a request to fail");
    CHECK(ffi_is_error(result));
    CHECK_OK(net_dereg_mr(net, comm, mr));
}

static void survivor(int version, int socket, bool connects, int calls)
{
    struct net net;
    char handle[HANDLE] = {0};
    void *listener = NULL, *comm = NULL;
    rnic_keep();
    struct census before = census_take();
    net_start(&net, version);
    if (connects) {
        hear(socket, handle, sizeof handle);
    } else {
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        tell(socket, handle, sizeof handle);
    }
    for (int i = 0; i < calls; i++) {
        meet(socket, 'p');
        CHECK_OK(poll_end(&net, connects, handle, listener, &comm));
        tell_step(socket, 'p');
    }
    hear_step(socket, 'k');
    hear_end(socket);
    ncclResult_t result = ncclSuccess;
    if (connects) {
        WAIT_UNTIL((result = poll_end(&net, true, handle, NULL, &comm)) != ncclSuccess || comm, "connect to end");
    } else { /* nobody may ever come: accept says so, or has something to say of who came */
        for (int i = 0; i < 2000 && !comm && result == ncclSuccess; i++) result = poll_end(&net, false, NULL, listener, &comm);
    }
    CHECK(result == ncclSuccess || ffi_is_error(result));
    if (comm) {
        expect_dead(&net, connects, comm);
        CHECK_OK(connects ? net_close_send(&net, comm) : net_close_recv(&net, comm));
    }
    if (listener) CHECK_OK(net_close_listen(&net, listener));
    works_on(&net);
    net_stop(&net);
    if (version >= 11) expect_gone(before);
    else expect_clean(before);
}

static void connecting(int version, int socket, void *argument)
{
    const struct step *step = argument;
    (step->connector_dies ? victim : survivor)(version, socket, true, step->calls);
}

static void accepting(int version, int socket, void *argument)
{
    const struct step *step = argument;
    (step->connector_dies ? survivor : victim)(version, socket, false, step->calls);
}

static void after_each_call(int version, bool connector_dies)
{
    setenv("SOFTRNIC_RETRY_MS", "200", 1);
    for (int calls = 0; calls <= STEPS; calls++) {
        struct step step = {calls, connector_dies};
        run_two(version, (struct role){.name = "connector", .run = connecting, .dies_by_kill = connector_dies},
                (struct role){.name = "acceptor", .run = accepting, .dies_by_kill = !connector_dies}, &step);
    }
}

static void connector_dies_after_each_call(int version) { after_each_call(version, true); }
static void acceptor_dies_after_each_call(int version) { after_each_call(version, false); }

/* ---- one message --------------------------------------------------------------------------------------------- */

/* What the two ends do up to the death. `faults` are those of the sender. */
struct moment {
    const char *faults;
    bool sender_dies;
    bool receives;  /* a receive is posted */
    bool sends;     /* and answered */
    bool all_there; /* with every byte in place, which the survivor has not asked about yet */
    bool flushes;   /* the receiver has a flush under way */
    bool copied;    /* through copies at the sender */
    bool closes;    /* it dies in its close */
};

static bool is_closing;

static void log_and_die(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
    if (is_closing) die();
}

struct end {
    struct net net;
    void *comm, *mr, *request, *flush;
    struct guarded memory;
};

static void end_start(struct end *end, int version, bool held)
{
    *end = (struct end){0};
    if (held) setenv("SOFTRNIC_CMA", "all", 1);
    net_start(&end->net, version);
    end->memory = held_new(LENGTH, 0, held);
}

static void end_close(struct end *end, bool sends)
{
    CHECK_OK(net_dereg_mr(&end->net, end->comm, end->mr));
    CHECK_OK(sends ? net_close_send(&end->net, end->comm) : net_close_recv(&end->net, end->comm));
}

/* What is outstanding at the survivor ends: well if it had all come, else with an error or, for a flush, either way. */
static void end_outlives(struct end *end, const struct moment *moment, bool sends, int socket)
{
    int done = 0;
    hear_end(socket);
    if (end->request && moment->all_there) CHECK_EQ(wait_size(&end->net, end->request), LENGTH);
    else if (end->request) wait_error(&end->net, end->request);
    if (!sends && moment->all_there) CHECK_BUFFER(&end->memory, LENGTH, 7);
    if (end->flush)
        WAIT_UNTIL(net_test(&end->net, end->flush, &done, NULL) != ncclSuccess || done, "the flush to end");
    expect_dead(&end->net, sends, end->comm);
    end_close(end, sends);
}

static void sender(int version, int socket, void *argument)
{
    const struct moment *moment = argument;
    struct end end;
    rnic_keep();
    struct census before = census_take();
    end_start(&end, version, moment->copied);
    end.comm = dial(&end.net, 0, socket);
    end.mr = register_host(&end.net, end.comm, end.memory.data, LENGTH);
    pattern_fill(end.memory.data, LENGTH, 7);
    hear_step(socket, 'r');
    rnic_faults(moment->faults ? moment->faults : "");
    if (moment->sends) end.request = isend(&end.net, end.comm, end.memory.data, LENGTH, 0, end.mr);
    if (moment->sends && moment->copied) CHECK_EQ(wait_size(&end.net, end.request), LENGTH);
    tell_step(socket, 's');
    hear_step(socket, 'c');
    if (moment->closes) {
        CHECK_OK(net_dereg_mr(&end.net, end.comm, end.mr));
        if (version >= 11) CHECK_OK(net_init_context(&end.net, 9, log_and_die, &(void *){NULL}));
        else CHECK_OK(net_init(&end.net, 9, log_and_die));
        is_closing = true;
        CHECK_OK(net_close_send(&end.net, end.comm));
        FAIL("the close has told nothing");
    }
    if (moment->sender_dies) die();
    end_outlives(&end, moment, true, socket);
    rnic_faults("");
    works_on(&end.net);
    held_free(&end.memory);
    net_stop(&end.net);
    expect_clean(before);
}

static void receiver(int version, int socket, void *argument)
{
    const struct moment *moment = argument;
    struct end end;
    rnic_keep();
    struct census before = census_take();
    if (moment->flushes) setenv("PINRAIL_FLUSH", "always", 1);
    end_start(&end, version, false);
    end.comm = answer(&end.net, 0, socket);
    end.mr = register_host(&end.net, end.comm, end.memory.data, LENGTH);
    if (moment->receives) end.request = irecv(&end.net, end.comm, end.memory.data, LENGTH, 0, end.mr);
    tell_step(socket, 'r');
    hear_step(socket, 's');
    if (moment->all_there) WAIT_UNTIL(pattern_mismatch(end.memory.data, LENGTH, 7) < 0, "the bytes themselves");
    if (moment->flushes) {
        void *data = end.memory.data;
        int size = LENGTH;
        CHECK_EQ(wait_size(&end.net, end.request), LENGTH);
        end.request = NULL;
        rnic_faults("op=read nth=1 -> delay=9000s");
        CHECK_OK(net_iflush(&end.net, end.comm, 1, &data, &size, &end.mr, &end.flush));
        CHECK(end.flush != NULL);
    }
    tell_step(socket, 'c');
    if (!moment->sender_dies) die();
    end_outlives(&end, moment, false, socket);
    rnic_faults("");
    works_on(&end.net);
    guarded_free(&end.memory);
    net_stop(&end.net);
    expect_clean(before);
}

static void dies_at(int version, struct moment moment)
{
    setenv("SOFTRNIC_RETRY_MS", "200", 1);
    run_two(version, (struct role){.name = "sender", .run = sender, .dies_by_kill = moment.sender_dies},
            (struct role){.name = "receiver", .run = receiver, .dies_by_kill = !moment.sender_dies}, &moment);
}

static void sender_dies_before_a_credit(int version) { dies_at(version, (struct moment){.sender_dies = true}); }
static void sender_dies_with_a_credit(int version) { dies_at(version, (struct moment){.sender_dies = true, .receives = true}); }

/* The first half of the payload is there, and no notice: for longer than a case may last under any tool. */
static const char half[] = "op=write,write-imm bytes=10000.. nth=1 -> delay=9000s at=half";

static void sender_dies_in_a_write(int version)
{
    dies_at(version, (struct moment){.faults = half, .sender_dies = true, .receives = true, .sends = true});
}

static void receiver_dies_in_a_write(int version)
{
    dies_at(version, (struct moment){.faults = half, .receives = true, .sends = true});
}

static void sender_dies_before_the_test(int version)
{
    dies_at(version, (struct moment){.sender_dies = true, .receives = true, .sends = true, .all_there = true});
}

static void receiver_dies_before_the_test(int version)
{
    dies_at(version, (struct moment){.receives = true, .sends = true, .all_there = true});
}

static void sender_dies_in_a_flush(int version)
{
    dies_at(version, (struct moment){.sender_dies = true, .receives = true, .sends = true, .all_there = true, .flushes = true});
}

static void receiver_dies_in_a_flush(int version)
{
    dies_at(version, (struct moment){.receives = true, .sends = true, .all_there = true, .flushes = true});
}

/* Its queue pairs are gone or not, and the farewell was said or not. */
static void sender_dies_in_its_close(int version)
{
    dies_at(version, (struct moment){.sender_dies = true, .receives = true, .sends = true, .all_there = true, .copied = true, .closes = true});
}

/* ---- the close of the survivor ------------------------------------------------------------------------------- */

static void stopped_receiver(int version, int socket, void *argument)
{
    struct net net;
    int self = getpid();
    (void)argument;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded memory = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, memory.data, LENGTH);
    (void)irecv(&net, comm, memory.data, LENGTH, 0, mr);
    tell(socket, &self, sizeof self);
    raise(SIGSTOP);
}

/* The peer does nothing any more, and dies when this end has closed: the close does not wait for it. */
static void closing_sender(int version, int socket, void *argument)
{
    struct net net;
    int peer;
    (void)argument;
    rnic_keep();
    struct census before = census_take();
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded memory = guarded_new(LENGTH, 0);
    void *mr = register_host(&net, comm, memory.data, LENGTH);
    hear(socket, &peer, sizeof peer);
    (void)isend(&net, comm, memory.data, LENGTH, 0, mr);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    CHECK_EQ(kill(peer, SIGKILL), 0);
    guarded_free(&memory);
    works_on(&net);
    net_stop(&net);
    expect_clean(before);
}

static void closed_while_the_peer_is_stopped(int version)
{
    run_two(version, (struct role){.name = "sender", .run = closing_sender},
            (struct role){.name = "stopped receiver", .run = stopped_receiver, .dies_by_kill = true}, NULL);
}

const struct ffi_case ffi_cases[] = {
    EACH(connector_dies_after_each_call),
    EACH(acceptor_dies_after_each_call),
    EACH(sender_dies_before_a_credit),
    EACH(sender_dies_with_a_credit),
    EACH(sender_dies_in_a_write),
    EACH(receiver_dies_in_a_write),
    EACH(sender_dies_before_the_test),
    EACH(receiver_dies_before_the_test),
    EACH(sender_dies_in_a_flush),
    EACH(receiver_dies_in_a_flush),
    EACH(sender_dies_in_its_close),
    EACH(closed_while_the_peer_is_stopped),
    {0},
};
