/*
 * Connections over several rails that go on when one of them fails: every message arrives once and whole, whatever was
 * under way, and what no other rail can do is an error.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softrnic.h"
#include "traffic.h"

/* ---- cases --------------------------------------------------------------------------------------------------- */

/* Messages before, during and after the loss of a rail. */
static void lose_one(int version, int rails, const char *qps, int members, int victim)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    int dev = fused_start(&net, version, rails, qps);
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, members, (uint64_t)(rails * 10 + victim + 1));
    traffic_run(&traffic, 100);
    size_t mark = log_mark();
    rail_port(victim, false);
    traffic_run(&traffic, 400);
    CHECK(log_matches_since(mark, "queue pairs are not used any more") >= 1);
    CHECK(log_matches_since(mark, "IBV_WC_RETRY_EXC_ERR") >= 1);
    rail_port(victim, true); /* it is not used again */
    traffic_run(&traffic, 500);
    traffic_free(&traffic);
    pair_close(&pair);
    pair_open(&net, dev, &pair); /* with all rails again */
    pair_message(&pair, 100000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

static void first_of_two(int version)
{
    (void)version;
    lose_one(12, 2, "1", 1, 0);
}

static void second_of_two(int version)
{
    (void)version;
    lose_one(9, 2, "2", 1, 1);
}

static void one_of_four(int version)
{
    (void)version;
    lose_one(11, 4, "2", 1, 2);
}

static void several_members(int version)
{
    (void)version;
    lose_one(12, 2, "2", MEMBERS, 1);
}

/* One after another, while what the one before left is still being sent again, until one rail is left. */
static void one_after_another(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int dev = fused_start(&net, 12, 8, "1");
    for (uint64_t seed = 1; seed <= 12; seed++) {
        int rails[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        uint64_t random = seed;
        shuffle(rails, 8, &random);
        pair_open(&net, dev, &pair);
        traffic_new(&traffic, &pair, seed % 3 ? 1 : 3, seed);
        traffic_run(&traffic, 30);
        for (int lost = 0; lost < 7; lost++) {
            rail_port(rails[lost], false);
            for (uint64_t steps = next_random(&random) % 40; steps; steps--) traffic_step(&traffic, 400);
        }
        traffic_run(&traffic, 400);
        for (int lost = 0; lost < 7; lost++) rail_port(rails[lost], true);
        traffic_free(&traffic);
        pair_close(&pair);
    }
    net_stop(&net);
}

/*
 * Plans by chance, of which each takes all rails but the first from a connection. FAILOVER_PLANS says how many, and
 * FAILOVER_SEED the first; the plan that fails is printed.
 */
static void by_plans(int rails, const char *qps)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    int dev = fused_start(&net, 12, rails, qps);
    const char *count = getenv("FAILOVER_PLANS"), *first = getenv("FAILOVER_SEED");
    uint64_t seed = first ? strtoull(first, NULL, 0) : 1, last = seed + (count ? strtoull(count, NULL, 0) : 20);
    for (; seed < last; seed++) {
        char plan[2000];
        uint64_t random = seed * 1000 + (uint64_t)rails;
        pair_open(&net, dev, &pair);
        traffic_new(&traffic, &pair, seed % 4 ? 1 : 3, seed);
        traffic_plan(plan, sizeof plan, rails, &random);
        fprintf(stderr, "seed %llu:\n%s", (unsigned long long)seed, plan);
        rnic_faults(plan);
        traffic_run(&traffic, 150);
        rnic_faults("");
        for (int rail = 1; rail < rails; rail++) rail_port(rail, true);
        traffic_free(&traffic);
        pair_close(&pair);
    }
    net_stop(&net);
}

static void plans_on_two(int version)
{
    (void)version;
    by_plans(2, "1");
}

static void plans_on_four(int version)
{
    (void)version;
    by_plans(4, "2");
}

static void plans_on_a_thread(int version)
{
    (void)version;
    setenv("SOFTRNIC_ENGINE", "thread", 1);
    by_plans(3, "1");
}

/* Tests a request that is still there; it is gone once it failed or, having been done before, completed. */
static bool is_over(const struct net *net, void **request)
{
    int done, sizes[MEMBERS];
    if (!*request || *request == GARBAGE) return true;
    if (!ffi_is_error(net_test(net, *request, &done, sizes)) && !done) return false;
    *request = NULL;
    return true;
}

static bool all_over(struct traffic *traffic)
{
    bool over = true;
    for (int at = 0; at < WINDOW; at++) {
        over &= is_over(traffic->pair->net, &traffic->receives[at]);
        over &= is_over(traffic->pair->net, &traffic->sends[at][0]);
    }
    return over;
}

/* With the last rail the connection fails: at both ends, in bounded time, with the code that blames the path. */
static void none_left(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int dev = fused_start(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 5);
    traffic_run(&traffic, 50);
    for (int at = 0; at < WINDOW; at++) traffic_receive(&traffic, at);
    rail_port(0, false);
    rail_port(1, false);
    for (int at = 0; at < WINDOW; at++)
        if (traffic.numbers[at])
            traffic.sends[at][0] = try_isend(&net, pair.send, traffic.from[at].data, traffic.sizes[at][0], 0, traffic.from_mr[at]);
    WAIT_UNTIL(all_over(&traffic), "every request to fail");
    void *request = NULL, *data = traffic.to[0].data, *mr = traffic.to_mr[0];
    size_t size = 8;
    int tag = 0;
    CHECK_EQ(net_isend(&net, pair.send, traffic.from[0].data, 8, 0, traffic.from_mr[0], &request), ncclRemoteError);
    WAIT_UNTIL(ffi_is_error(net_irecv(&net, pair.recv, 1, &data, &size, &tag, &mr, &request)), "the receiver to fail");
    rail_port(0, true);
    rail_port(1, true);
    traffic_free(&traffic);
    pair_close(&pair);
    pair_open(&net, dev, &pair);
    pair_message(&pair, 100000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* Nobody asked for it: the first failure is the end. */
static void not_asked_for(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "0", 1);
    int dev = fused_start(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    pair_message(&pair, LARGEST, 0, 1);
    struct guarded from = guarded_new(LARGEST, 0), to = guarded_new(LARGEST, 0);
    void *from_mr = register_host(&net, pair.send, from.data, LARGEST);
    void *to_mr = register_host(&net, pair.recv, to.data, LARGEST);
    irecv(&net, pair.recv, to.data, LARGEST, 0, to_mr);
    rail_port(1, false);
    void *send = isend(&net, pair.send, from.data, LARGEST, 0, from_mr);
    CHECK_EQ(wait_error(&net, send), ncclRemoteError);
    rail_port(1, true);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- one message --------------------------------------------------------------------------------------------------- */

enum { ONE = 100000 };

/* Both ends of a connection over two rails, with a buffer each. */
struct stage {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};

static void set_up(struct stage *stage, const char *qps)
{
    int dev = fused_start(&stage->net, 12, 2, qps);
    pair_open(&stage->net, dev, &stage->pair);
    stage->from = guarded_new(ONE, 0);
    stage->to = guarded_new(ONE, 0);
    stage->from_mr = register_host(&stage->net, stage->pair.send, stage->from.data, ONE);
    stage->to_mr = register_host(&stage->net, stage->pair.recv, stage->to.data, ONE);
}

static void *to_receive(struct stage *stage)
{
    guarded_reset(&stage->to);
    return irecv(&stage->net, stage->pair.recv, stage->to.data, ONE, 0, stage->to_mr);
}

static void *to_send(struct stage *stage, uint64_t key)
{
    pattern_fill(stage->from.data, ONE, key);
    return isend(&stage->net, stage->pair.send, stage->from.data, ONE, 0, stage->from_mr);
}

static void close_sender(struct stage *stage)
{
    CHECK_OK(net_dereg_mr(&stage->net, stage->pair.send, stage->from_mr));
    CHECK_OK(net_close_send(&stage->net, stage->pair.send));
}

static void close_receiver(struct stage *stage)
{
    CHECK_OK(net_dereg_mr(&stage->net, stage->pair.recv, stage->to_mr));
    CHECK_OK(net_close_recv(&stage->net, stage->pair.recv));
}

static void clear(struct stage *stage)
{
    guarded_free(&stage->from);
    guarded_free(&stage->to);
    net_stop(&stage->net);
}

/*
 * The sender has its answer and goes, before it hears of a rail that the receiver gave up, over which the data came: by
 * another queue pair than the credit, or the device would have told.
 */
static void sender_closes_first(int version)
{
    struct stage stage;
    (void)version;
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "0", 1);
    set_up(&stage, "2");
    for (uint64_t i = 0; i < 2; i++) {
        if (i == 1) rnic_faults("op=write nth=1 -> status=retry-exc at=end"); /* the acknowledgement of a credit */
        void *receive = to_receive(&stage);
        rnic_faults("");
        CHECK_EQ(wait_size(&stage.net, to_send(&stage, i)), ONE);
        if (i == 1) close_sender(&stage);
        CHECK_EQ(wait_size(&stage.net, receive), ONE);
        CHECK_BUFFER(&stage.to, ONE, i);
    }
    close_receiver(&stage);
    clear(&stage);
}

/* The receiver has everything and goes; only the acknowledgement is lost. */
static void receiver_closes_first(int version)
{
    struct stage stage;
    (void)version;
    set_up(&stage, "1");
    void *receive = to_receive(&stage);
    rnic_faults("device=softrnic1 op=write-imm nth=1 -> drop at=end");
    void *send = to_send(&stage, 1);
    CHECK_EQ(wait_size(&stage.net, receive), ONE);
    CHECK_BUFFER(&stage.to, ONE, 1);
    close_receiver(&stage);
    CHECK_EQ(wait_size(&stage.net, send), ONE);
    rnic_faults("");
    close_sender(&stage);
    clear(&stage);
}

/* The queue pair of flushes fails: that rail is given up, and the others flush. */
static void flush_queue_pair(int version)
{
    struct stage stage;
    (void)version;
    setenv("PINRAIL_FLUSH", "always", 1);
    set_up(&stage, "1");
    size_t mark = log_mark();
    for (uint64_t i = 0; i < 20; i++) {
        void *receive = to_receive(&stage), *send = to_send(&stage, i), *flush = NULL, *data = stage.to.data;
        int size = ONE;
        CHECK_EQ(wait_size(&stage.net, send), ONE);
        CHECK_EQ(wait_size(&stage.net, receive), ONE);
        CHECK_BUFFER(&stage.to, ONE, i);
        if (i == 3) rnic_faults("device=softrnic1 op=read nth=1 -> kill-qp");
        CHECK_OK(net_iflush(&stage.net, stage.pair.recv, 1, &data, &size, &stage.to_mr, &flush));
        if (flush) wait_done(&stage.net, flush, NULL);
        if (i == 3) WAIT_UNTIL(log_matches_since(mark, "are not used any more") > 0, "the rail to be given up");
    }
    rnic_faults("");
    close_sender(&stage);
    close_receiver(&stage);
    clear(&stage);
}

/* Receives whose end nobody waits for: the credit is lost with its rail, and has to be sent another way all the same. */
static void optional_receives(int version)
{
    struct stage stage;
    (void)version;
    set_up(&stage, "1");
    for (uint64_t i = 0; i < 20; i++) {
        if (i == 5) rnic_faults("device=softrnic1 op=write nth=1 -> drop");
        void *data = stage.to.data, *receive = NCCL_NET_OPTIONAL_RECV_COMPLETION;
        size_t size = ONE;
        int tag = 0;
        guarded_reset(&stage.to);
        CHECK_OK(net_irecv(&stage.net, stage.pair.recv, 1, &data, &size, &tag, &stage.to_mr, &receive));
        CHECK(receive != NULL);
        void *send = NULL;
        pattern_fill(stage.from.data, ONE, i);
        WAIT_UNTIL((is_over(&stage.net, &receive),
                    send = try_isend(&stage.net, stage.pair.send, stage.from.data, ONE, 0, stage.from_mr)),
                   "the credit");
        CHECK_EQ(wait_size(&stage.net, send), ONE);
        WAIT_UNTIL(is_over(&stage.net, &receive), "the receive");
        CHECK_BUFFER(&stage.to, ONE, i);
    }
    rnic_faults("");
    close_sender(&stage);
    close_receiver(&stage);
    clear(&stage);
}

/* ---- two processes ------------------------------------------------------------------------------------------- */

enum { ROUNDS = 40 };

struct hosts {
    const char *sender, *receiver; /* what either asks for */
    bool killed;                   /* the receiver, as soon as a rail is lost */
};

static void sends(int version, int socket, void *argument)
{
    const struct hosts *hosts = argument;
    struct net net;
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", hosts->sender, 1);
    int dev = fused_start(&net, version, 2, "1");
    void *comm = dial(&net, dev, socket);
    struct guarded from = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, from.data, LARGEST);
    bool asked = strcmp(hosts->sender, "1") == 0 && strcmp(hosts->receiver, "1") == 0;
    for (int i = 0; i < ROUNDS; i++) {
        pattern_fill(from.data, LARGEST, (uint64_t)i);
        hear_step(socket, 'r'); /* it has posted, and does nothing until this end is done */
        if (i == ROUNDS / 2) {
            rail_port(1, false);
            void *send = isend(&net, comm, from.data, LARGEST, 0, mr);
            if (hosts->killed) {
                tell_step(socket, 'k');
                hear_end(socket);
            }
            if (!asked || hosts->killed) {
                CHECK_EQ(wait_error(&net, send), ncclRemoteError);
                goto end;
            }
            CHECK_EQ(wait_size(&net, send), LARGEST);
        } else {
            void *send = isend(&net, comm, from.data, LARGEST, 0, mr);
            CHECK_EQ(wait_size(&net, send), LARGEST);
        }
        tell_step(socket, 's');
    }
    meet(socket, 'e');
end:
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&from);
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receives(int version, int socket, void *argument)
{
    const struct hosts *hosts = argument;
    struct net net;
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", hosts->receiver, 1);
    int dev = fused_start(&net, version, 2, "1");
    void *comm = answer(&net, dev, socket);
    struct guarded to = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, to.data, LARGEST);
    bool asked = strcmp(hosts->sender, "1") == 0 && strcmp(hosts->receiver, "1") == 0;
    for (int i = 0; i < ROUNDS; i++) {
        guarded_reset(&to);
        void *receive = irecv(&net, comm, to.data, LARGEST, 0, mr);
        tell_step(socket, 'r');
        if (i == ROUNDS / 2 && hosts->killed) {
            hear_step(socket, 'k');
            kill(getpid(), SIGKILL);
        }
        if (i == ROUNDS / 2 && !asked) {
            CHECK(ffi_is_error(wait_error(&net, receive)));
            goto end;
        }
        hear_step(socket, 's');
        CHECK_EQ(wait_size(&net, receive), LARGEST);
        CHECK_BUFFER(&to, LARGEST, (uint64_t)i);
    }
    meet(socket, 'e');
end:
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&to);
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void hosts(const char *sender, const char *receiver, bool killed)
{
    struct hosts hosts = {sender, receiver, killed};
    run_two(12, (struct role){"sender", sends, false}, (struct role){"receiver", receives, killed}, &hosts);
}

/* The other end is in nobody's hands while it is asked what came. */
static void nobody_at_home(int version)
{
    (void)version;
    hosts("1", "1", false);
}

static void one_end_asks(int version)
{
    (void)version;
    hosts("1", "0", false);
    hosts("0", "1", false);
}

static void killed_when_asked(int version)
{
    (void)version;
    hosts("1", "1", true);
}

/* Pieces of a part are under way on the rail that fails: the part goes nowhere before the receiver has stopped too. */
static void sends_pieces(int version, int socket, void *argument)
{
    struct net net;
    int receiver;
    (void)argument;
    setenv("SOFTRNIC_MAX_MSG_SZ", "512", 1);
    int dev = fused_start(&net, version, 2, "1");
    void *comm = dial(&net, dev, socket);
    hear(socket, &receiver, sizeof receiver);
    struct guarded from = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, from.data, LARGEST);
    pattern_fill(from.data, LARGEST, 1);
    hear_step(socket, 'r');
    size_t mark = log_mark();
    CHECK_EQ(kill(receiver, SIGSTOP), 0);
    rnic_faults("device=softrnic1 op=write nth=20 -> drop");
    void *send = isend(&net, comm, from.data, LARGEST, 0, mr);
    bool done = false; /* while the other end's queue pair still takes what comes late */
    WAIT_UNTIL((done |= is_done(&net, send, NULL), log_matches_since(mark, "are not used any more") > 0), "the rail to be given up");
    for (int i = 0; i < 20000 && !done; i++) done = is_done(&net, send, NULL);
    CHECK(!done);
    CHECK_EQ(kill(receiver, SIGCONT), 0);
    CHECK_EQ(wait_size(&net, send), LARGEST);
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&from);
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receives_pieces(int version, int socket, void *argument)
{
    struct net net;
    int self = getpid();
    (void)argument;
    setenv("SOFTRNIC_MAX_MSG_SZ", "512", 1);
    int dev = fused_start(&net, version, 2, "1");
    void *comm = answer(&net, dev, socket);
    tell(socket, &self, sizeof self);
    struct guarded to = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, to.data, LARGEST);
    guarded_reset(&to);
    void *receive = irecv(&net, comm, to.data, LARGEST, 0, mr);
    tell_step(socket, 'r');
    CHECK_EQ(wait_size(&net, receive), LARGEST);
    CHECK_BUFFER(&to, LARGEST, 1);
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&to);
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void pieces_wait(int version)
{
    (void)version;
    run_two(12, (struct role){"sender", sends_pieces, false}, (struct role){"receiver", receives_pieces, false}, NULL);
}

const struct ffi_case ffi_cases[] = {
    ONCE(first_of_two),
    ONCE(second_of_two),
    ONCE(one_of_four),
    ONCE(several_members),
    ONCE(one_after_another),
    ONCE(plans_on_two),
    ONCE(plans_on_four),
    ONCE(plans_on_a_thread),
    ONCE(none_left),
    ONCE(not_asked_for),
    ONCE(nobody_at_home),
    ONCE(one_end_asks),
    ONCE(killed_when_asked),
    ONCE(sender_closes_first),
    ONCE(receiver_closes_first),
    ONCE(flush_queue_pair),
    ONCE(optional_receives),
    ONCE(pieces_wait),
    {0},
};
