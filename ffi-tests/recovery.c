/*
 * Rails that failed and come back while their connections go on: with new queue pairs, after their path was tried, and
 * with every message delivered once and whole, whatever happens on the way.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softrnic.h"
#include "traffic.h"

/* A host as for failover, which takes rails back soon. */
static int recovering(struct net *net, int version, int rails, const char *qps)
{
    if (!getenv("NCCL_IB_RESILIENCY_PORT_RECOVERY")) setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", "1", 1);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", "2", 0);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL", "1", 0);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT", "2000", 0);
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "1000", 0);
    return fused_start(net, version, rails, qps);
}

/* Messages until the log has said `what` at least `times` times after `mark`, and then until all that began are done. */
static void run_until(struct traffic *traffic, size_t mark, const char *what, int times)
{
    WAIT_UNTIL((traffic_step(traffic, UINT64_MAX - 1), log_matches_since(mark, what) >= times), what);
    traffic_run(traffic, traffic->next - 1);
}

/* Until both ends have said `times` times that a rail is used again. */
static void run_until_back(struct traffic *traffic, size_t mark, int times)
{
    run_until(traffic, mark, "is used again", 2 * times);
}

/* So many more than began already. */
static void run_more(struct traffic *traffic, uint64_t count)
{
    traffic_run(traffic, traffic->next - 1 + count);
}

/* Data and credits go over a rail. */
static void expect_used(struct traffic *traffic, int rail)
{
    char plan[200];
    snprintf(plan, sizeof plan, "device=softrnic%d op=write-imm -> delay=1us\ndevice=softrnic%d op=write bytes=1.. -> delay=1us\n",
             rail, rail);
    rnic_faults(plan);
    run_more(traffic, 200);
    uint64_t data = rnic_fault_fired(0), credits = rnic_fault_fired(1);
    rnic_faults("");
    if (data < 20 || credits < 20)
        FAIL("%llu parts and %llu credits went over rail %d", (unsigned long long)data, (unsigned long long)credits, rail);
}

static bool every_rule_fired(unsigned rules)
{
    bool every = true;
    for (unsigned rule = 0; rule < rules; rule++) every &= rnic_fault_fired(rule) > 0;
    return every;
}

/* Until data and credits go over every rail. */
static void run_until_all_used(struct traffic *traffic, int rails)
{
    char plan[1600];
    size_t used = 0;
    for (int rail = 0; rail < rails; rail++)
        used += (size_t)snprintf(plan + used, sizeof plan - used,
                                 "device=softrnic%d op=write-imm -> delay=1us\n"
                                 "device=softrnic%d op=write bytes=32..256 -> delay=1us\n", rail, rail);
    rnic_faults(plan);
    WAIT_UNTIL((traffic_step(traffic, UINT64_MAX - 1), every_rule_fired(2 * (unsigned)rails)), "every rail to be used");
    rnic_faults("");
    traffic_run(traffic, traffic->next - 1);
}

/* Breaks a rail by what befalls its `nth` write, and goes on until both ends gave it up. */
static void break_rail(struct traffic *traffic, int rail, const char *action, int nth)
{
    char plan[160];
    size_t mark = log_mark();
    snprintf(plan, sizeof plan, "device=softrnic%d op=write,write-imm nth=%d -> %s\n", rail, nth, action);
    rnic_faults(plan);
    run_until(traffic, mark, "are not used any more", 2);
    rnic_faults("");
}

/* ---- cases --------------------------------------------------------------------------------------------------- */

static void lose_and_find(int version, int rails, const char *qps, int members, int victim)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    int dev = recovering(&net, version, rails, qps);
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, members, (uint64_t)(rails * 10 + victim + 1));
    run_more(&traffic, 100);
    expect_used(&traffic, victim);
    size_t mark = log_mark();
    rail_port(victim, false);
    run_until(&traffic, mark, "are not used any more", 2);
    run_more(&traffic, 300);
    CHECK_EQ(log_matches_since(mark, "is used again"), 0); /* its port is down */
    rail_port(victim, true);
    run_until_back(&traffic, mark, 1);
    expect_used(&traffic, victim);
    mark = log_mark();
    traffic_free(&traffic);
    pair_close(&pair);
    CHECK_EQ(log_matches_since(mark, "rails came back 1 times"), 2);
    net_stop(&net);
}

static void first_of_two(int version)
{
    (void)version;
    lose_and_find(12, 2, "1", 1, 0);
}

static void second_of_two(int version)
{
    (void)version;
    lose_and_find(9, 2, "2", 1, 1);
}

static void one_of_four(int version)
{
    (void)version;
    lose_and_find(11, 4, "2", 1, 2);
}

static void several_members(int version)
{
    (void)version;
    lose_and_find(12, 2, "2", MEMBERS, 1);
}

/* There is nothing to bring back where the first failed rail is the end, and that is said. */
static void without_failover(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "0", 1);
    size_t mark = log_mark();
    int dev = recovering(&net, 12, 2, "1");
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_RESILIENCY_PORT_RECOVERY=1 has no effect"), 1);
    pair_open(&net, dev, &pair);
    pair_message(&pair, 100000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* Each rail in turn, so that what came back carries everything while the next is away. */
static void by_turns(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    static const char *const actions[] = {"port-down for=60ms", "kill-qp", "drop", "status=retry-exc at=half"};
    (void)version;
    int dev = recovering(&net, 12, 2, "2");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 7);
    for (int i = 0; i < 8; i++) {
        size_t mark = log_mark();
        break_rail(&traffic, i % 2, actions[i / 2], i * 3 + 1);
        run_until_back(&traffic, mark, 1);
        expect_used(&traffic, i % 2);
    }
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* All rails but one at once, and all come back. */
static void all_but_one(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int dev = recovering(&net, 12, 8, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 3);
    for (int kept = 0; kept < 8; kept += 7) {
        size_t mark = log_mark();
        for (int rail = 0; rail < 8; rail++)
            if (rail != kept) rail_port(rail, false);
        run_until(&traffic, mark, "are not used any more", 14);
        for (int rail = 0; rail < 8; rail++)
            if (rail != kept) rail_port(rail, true);
        run_until_back(&traffic, mark, 7);
        for (int rail = 0; rail < 8; rail++) expect_used(&traffic, rail);
    }
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* Two rails that meet one over there: its lanes fail by pairs of rails. */
static void unequal_ends(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int two = recovering(&net, 12, 2, "2");
    for (int sends = 0; sends < 2; sends++) {
        pair_open_between(&net, sends ? two : 0, sends ? 0 : two, &pair);
        traffic_new(&traffic, &pair, 1, 11);
        for (int i = 0; i < 3; i++) {
            size_t mark = log_mark();
            break_rail(&traffic, 1, "port-down for=60ms", i + 1);
            run_until_back(&traffic, mark, 1);
        }
        traffic_free(&traffic);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* A path that is still dead costs attempts and nothing else. */
static void dead_for_a_while(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int dev = recovering(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 9);
    run_more(&traffic, 50);
    size_t mark = log_mark();
    /* What has no bytes and no immediate tries a path. */
    rnic_faults("device=softrnic1 op=write-imm nth=5 -> drop\ndevice=softrnic1 op=write bytes=0 every=3 times=4 -> drop\n");
    run_until_back(&traffic, mark, 1);
    CHECK_EQ(rnic_fault_fired(1), 4);
    CHECK(log_matches_since(mark, "the path is not well: IBV_WC_RETRY_EXC_ERR") >= 2);
    rnic_faults("");
    expect_used(&traffic, 1);
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* Attempts are limited, until a port comes up. */
static void given_up(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "3", 1);
    int dev = recovering(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 9);
    run_more(&traffic, 50);
    size_t mark = log_mark();
    rnic_faults("device=softrnic1 op=write-imm nth=5 -> drop\ndevice=softrnic1 op=write bytes=0 -> drop\n");
    run_until(&traffic, mark, "it stays unused after 3 attempts", 1);
    rnic_faults("");
    run_more(&traffic, 500);
    CHECK_EQ(log_matches_since(mark, "is used again"), 0);
    rail_port(1, false);
    rail_port(1, true);
    run_until_back(&traffic, mark, 1);
    /* One that fails as soon as it is back uses up its attempts too. */
    for (int i = 0; i < 3; i++) {
        if (i) run_until_back(&traffic, mark, 1 + i);
        break_rail(&traffic, 1, "kill-qp", 4);
    }
    run_until(&traffic, mark, "it failed again soon after it came back", 1);
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* Changes of state fail at each step of an attempt in turn, at either end. */
static void moves_fail(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    static const enum rnic_state states[] = {RNIC_INIT, RNIC_RTR, RNIC_RTS};
    (void)version;
    int dev = recovering(&net, 12, 2, "2");
    for (int i = 0; i < 12; i++) {
        pair_open(&net, dev, &pair);
        traffic_new(&traffic, &pair, 1, (uint64_t)i + 1);
        size_t mark = log_mark();
        rnic_fail_moves(states[i % 3], (uint64_t)(i / 3 * 2 + 1), i % 2 ? 110 : 22);
        break_rail(&traffic, 1, "kill-qp", i + 1);
        run_until_back(&traffic, mark, 1);
        CHECK(log_matches_since(mark, "not back yet") >= 1);
        expect_used(&traffic, 1);
        traffic_free(&traffic);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* The first write over what just came back, at either end, fails; and again. */
static void fails_at_once(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    int dev = recovering(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 17);
    for (int i = 0; i < 4; i++) {
        size_t mark = log_mark();
        rnic_faults(i % 2 ? "device=softrnic1 op=write-imm times=3 -> kill-qp at=end\n"
                          : "device=softrnic1 op=write bytes=1.. times=3 -> drop at=end\n");
        WAIT_UNTIL((traffic_step(&traffic, UINT64_MAX - 1), rnic_fault_fired(0) == 3), "three failures");
        run_until_back(&traffic, mark, 3);
        rnic_faults("");
        expect_used(&traffic, 1);
    }
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* The address of a port is another one when it comes back. */
static void another_address(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    setenv("SOFTRNIC_GIDS", "10.0.0.1/v2,-", 1);
    int dev = recovering(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 19);
    run_more(&traffic, 50);
    size_t mark = log_mark();
    rail_port(1, false);
    run_until(&traffic, mark, "are not used any more", 2);
    rnic_set_gid("softrnic1", 1, "10.0.0.77/v2");
    rnic_set_gid("softrnic1", 0, "-");
    rail_port(1, true);
    run_until_back(&traffic, mark, 1);
    CHECK(log_matches_since(mark, "is used under GID") >= 1);
    expect_used(&traffic, 1);
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/* Either end, or both, closes at any time after a rail failed: nothing is waited for, and nothing is left. */
static void closed_on_the_way(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    rnic_keep();
    struct census at_rest = census_take();
    int dev = recovering(&net, 12, 2, "2");
    struct rnic_counts before = rnic_counts();
    uint64_t random = 23;
    for (int i = 0; i < 80; i++) {
        pair_open(&net, dev, &pair);
        traffic_new(&traffic, &pair, 1, (uint64_t)i + 1);
        run_more(&traffic, 10);
        if (i % 4 == 3) rnic_faults("device=softrnic1 op=write bytes=0 -> delay=20ms\n");
        size_t mark = log_mark();
        rail_port(1, false);
        run_until(&traffic, mark, "are not used any more", 2);
        rail_port(1, true);
        for (uint64_t steps = next_random(&random) % 16; steps; steps--) traffic_step(&traffic, UINT64_MAX - 1);
        run_more(&traffic, i % 2);
        traffic_free(&traffic);
        if (i % 3) {
            pair_close(&pair);
        } else {
            CHECK_OK(net_close_recv(&net, pair.recv));
            CHECK_OK(net_close_send(&net, pair.send));
        }
        rnic_faults("");
        struct rnic_counts after = rnic_counts();
        CHECK_EQ(after.qps, before.qps);
        CHECK_EQ(after.cqs, before.cqs);
        CHECK_EQ(after.mrs, before.mrs);
        CHECK_EQ(after.cq_overruns, 0);
        if (i % 10 == 9) {
            net_stop(&net);
            expect_gone(at_rest);
            dev = recovering(&net, 12, 2, "2");
        }
    }
    net_stop(&net);
}

/* The queue pair of flushes fails: it comes back with its rail, and reads go over it again. */
static void flush_queue_pair(int version)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    (void)version;
    setenv("PINRAIL_FLUSH", "always", 1);
    int dev = recovering(&net, 12, 2, "1");
    pair_open(&net, dev, &pair);
    traffic_new(&traffic, &pair, 1, 29);
    for (int round = 0; round < 3; round++) {
        size_t mark = log_mark();
        run_more(&traffic, 100);
        for (int i = 0; i < 4; i++) {
            void *flush = NULL, *data = traffic.to[0].data;
            int size = LARGEST;
            if (i == 1) rnic_faults("device=softrnic1 op=read nth=1 -> kill-qp\n");
            uint64_t reads = rnic_counts().reads;
            CHECK_OK(net_iflush(&net, pair.recv, 1, &data, &size, &traffic.to_mr[0], &flush));
            if (flush) wait_done(&net, flush, NULL);
            if (i < 2) CHECK_EQ(rnic_counts().reads - reads, 2);
            if (i == 1) run_until(&traffic, mark, "are not used any more", 2);
            if (i == 1) run_until_back(&traffic, mark, 1);
            if (i == 1) expect_used(&traffic, 1);
        }
        rnic_faults("");
    }
    traffic_free(&traffic);
    pair_close(&pair);
    net_stop(&net);
}

/*
 * Plans by chance, of which each breaks all rails but the first, and some of them again on their way back. When all are
 * back the first goes. FAILOVER_PLANS says how many, and FAILOVER_SEED the first; the plan that fails is printed.
 */
static void by_plans(int rails, const char *qps, const char *engine)
{
    struct net net;
    struct pair pair;
    struct traffic traffic;
    static const char *const probes[] = {
        "op=write bytes=0 p=0.2 times=4 -> drop\n",
        "op=write bytes=0 p=0.2 times=4 -> drop at=end\n",
        "op=write bytes=0 p=0.3 times=4 -> delay=1ms\n",
        "op=write bytes=0 p=0.1 times=2 -> kill-qp\n",
        "op=write bytes=0 p=0.1 times=2 -> port-down for=3ms\n",
        "",
    };
    setenv("SOFTRNIC_ENGINE", engine, 1);
    rnic_keep();
    struct census at_rest = census_take();
    int dev = recovering(&net, 12, rails, qps);
    const char *count = getenv("FAILOVER_PLANS"), *first = getenv("FAILOVER_SEED");
    uint64_t seed = first ? strtoull(first, NULL, 0) : 1, last = seed + (count ? strtoull(count, NULL, 0) : 30);
    for (; seed < last; seed++) {
        char plan[3000];
        uint64_t random = seed * 1000 + (uint64_t)rails;
        pair_open(&net, dev, &pair);
        traffic_new(&traffic, &pair, seed % 4 ? 1 : 3, seed);
        /* Twice: the second time the rails are those that came back. */
        for (int round = 0; round < 2; round++) {
            size_t used = (size_t)snprintf(plan, sizeof plan, "%s", probes[next_random(&random) % 6]);
            traffic_plan(plan + used, sizeof plan - used, rails, &random);
            fprintf(stderr, "seed %llu, round %d:\n%s", (unsigned long long)seed, round, plan);
            rnic_faults(plan);
            run_more(&traffic, 100);
            rnic_faults("");
            for (int rail = 1; rail < rails; rail++) rail_port(rail, true);
            run_more(&traffic, 20);
        }
        run_until_all_used(&traffic, rails);
        rail_port(0, false);
        run_more(&traffic, 60);
        rail_port(0, true);
        traffic_free(&traffic);
        pair_close(&pair);
    }
    CHECK_EQ(rnic_counts().cq_overruns, 0);
    net_stop(&net);
    expect_gone(at_rest);
}

static void plans_on_two(int version)
{
    (void)version;
    by_plans(2, "1", "inline");
}

static void plans_on_four(int version)
{
    (void)version;
    by_plans(4, "2", "inline");
}

static void plans_on_a_thread(int version)
{
    (void)version;
    by_plans(3, "1", "thread");
}

static void plans_by_steps(int version)
{
    (void)version;
    by_plans(2, "2", "stepped");
}

/* Parts of many work requests, and a record of sizes behind them. */
static void plans_in_pieces(int version)
{
    (void)version;
    setenv("SOFTRNIC_MAX_MSG_SZ", "4096", 1);
    setenv("NCCL_IB_ADAPTIVE_ROUTING", "1", 1);
    by_plans(2, "2", "thread");
}

/* ---- two processes ------------------------------------------------------------------------------------------- */

enum { ROUNDS = 400 };

struct hosts {
    const char *sender, *receiver; /* what either asks for */
};

/* One message a round; a rail fails early and comes back, whose port is down at one end only. */
static void sends(int version, int socket, void *argument)
{
    const struct hosts *hosts = argument;
    struct net net;
    bool asked = strcmp(hosts->sender, "1") == 0 && strcmp(hosts->receiver, "1") == 0;
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", hosts->sender, 1);
    int dev = recovering(&net, version, 2, "1");
    void *comm = dial(&net, dev, socket);
    struct guarded from = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, from.data, LARGEST);
    size_t mark = log_mark();
    for (int i = 0; i < ROUNDS; i++) {
        pattern_fill(from.data, LARGEST, (uint64_t)i);
        hear_step(socket, 'r');
        if (i == 20) rail_port(1, false);
        if (i == 40) rail_port(1, true);
        void *send = isend(&net, comm, from.data, LARGEST, 0, mr);
        CHECK_EQ(wait_size(&net, send), LARGEST);
        tell_step(socket, 's');
    }
    /* More of them until it is back, if it can be. */
    for (bool back = !asked;;) {
        tell_step(socket, back ? 'e' : 'm');
        if (back) break;
        hear_step(socket, 'r');
        pattern_fill(from.data, LARGEST, 1);
        void *send = isend(&net, comm, from.data, LARGEST, 0, mr);
        CHECK_EQ(wait_size(&net, send), LARGEST);
        back = log_matches_since(mark, "is used again") > 0;
    }
    CHECK_EQ(log_matches_since(mark, "is used again"), asked);
    meet(socket, 'z');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&from);
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receives(int version, int socket, void *argument)
{
    const struct hosts *hosts = argument;
    struct net net;
    setenv("NCCL_IB_RESILIENCY_PORT_RECOVERY", hosts->receiver, 1);
    int dev = recovering(&net, version, 2, "1");
    void *comm = answer(&net, dev, socket);
    struct guarded to = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, to.data, LARGEST);
    for (int i = 0;; i++) {
        if (i >= ROUNDS) {
            char step;
            hear(socket, &step, 1);
            if (step == 'e') break;
            CHECK_EQ(step, 'm');
        }
        guarded_reset(&to);
        void *receive = irecv(&net, comm, to.data, LARGEST, 0, mr);
        tell_step(socket, 'r');
        if (i < ROUNDS) hear_step(socket, 's');
        CHECK_EQ(wait_size(&net, receive), LARGEST);
        CHECK_BUFFER(&to, LARGEST, i < ROUNDS ? (uint64_t)i : 1);
    }
    meet(socket, 'z');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&to);
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void hosts(const char *sender, const char *receiver)
{
    struct hosts hosts = {sender, receiver};
    run_two(12, (struct role){"sender", sends, false}, (struct role){"receiver", receives, false}, &hosts);
}

static void two_hosts(int version)
{
    (void)version;
    hosts("1", "1");
}

static void one_end_asks(int version)
{
    (void)version;
    hosts("1", "0");
    hosts("0", "1");
}

/* The receiver is killed while a rail comes back. */
static void sends_to_the_end(int version, int socket, void *argument)
{
    struct net net;
    (void)argument;
    rnic_keep();
    struct census at_rest = census_take();
    int dev = recovering(&net, version, 2, "2");
    void *comm = dial(&net, dev, socket);
    struct guarded from = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, from.data, LARGEST);
    rnic_faults("device=softrnic1 op=write-imm nth=5 -> kill-qp\n");
    ncclResult_t result = ncclSuccess;
    struct deadline deadline = deadline_in(30);
    for (void *send = NULL; !ffi_is_error(result);) {
        int done = 0, size;
        if (!send) result = net_isend(&net, comm, from.data, LARGEST, 0, mr, &send);
        if (!ffi_is_error(result) && send) result = net_test(&net, send, &done, &size);
        if (done) send = NULL;
        if (deadline_passed(&deadline)) FAIL("waited too long for the end");
        ffi_yield();
    }
    CHECK_EQ(result, ncclRemoteError);
    hear_end(socket);
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    guarded_free(&from);
    CHECK_OK(net_close_send(&net, comm));
    CHECK_EQ(rnic_counts().qps, 0);
    net_stop(&net);
    expect_gone(at_rest);
}

static void receives_until_killed(int version, int socket, void *argument)
{
    struct net net;
    uint64_t after = *(const uint64_t *)argument;
    int dev = recovering(&net, version, 2, "2");
    void *comm = answer(&net, dev, socket);
    struct guarded to = guarded_new(LARGEST, 0);
    void *mr = register_host(&net, comm, to.data, LARGEST);
    size_t mark = log_mark();
    for (uint64_t since = 0; since < after;) {
        CHECK_EQ(wait_size(&net, irecv(&net, comm, to.data, LARGEST, 0, mr)), LARGEST);
        since += log_matches_since(mark, "are not used any more") > 0;
    }
    kill(getpid(), SIGKILL);
}

static void killed_on_the_way(int version)
{
    (void)version;
    for (uint64_t after = 1; after < 200; after += after / 2 + 1)
        run_two(12, (struct role){"sender", sends_to_the_end, false}, (struct role){"receiver", receives_until_killed, true},
                &after);
}

enum { BATCH = 60, BATCHES = 6, AHEAD = 16, RAILS = 3 };

/* One end of many messages, AHEAD at a time, each of a size and content that both ends know. */
struct end {
    struct net net;
    void *comm;
    bool sends;
    struct guarded buffers[AHEAD];
    void *mrs[AHEAD], *requests[AHEAD];
    uint64_t numbers[AHEAD], begun;
};

static size_t size_of(uint64_t number)
{
    uint64_t random = number;
    size_t size = (size_t)(next_random(&random) % (LARGEST + 1));
    return number % 4 ? size : size % 200;
}

/* Messages up to `end`. */
static void run_end(struct end *e, uint64_t end)
{
    uint64_t left = end - e->begun;
    struct deadline deadline = deadline_in(30);
    while (left) {
        for (int at = 0; at < AHEAD; at++) {
            if (!e->requests[at] || !is_done(&e->net, e->requests[at], NULL)) continue;
            e->requests[at] = NULL;
            if (!e->sends) CHECK_BUFFER(&e->buffers[at], size_of(e->numbers[at]), e->numbers[at]);
            left--;
        }
        while (e->begun < end) {
            int at = (int)(e->begun % AHEAD), tag = 0;
            void *data = e->buffers[at].data;
            size_t room = LARGEST, size = size_of(e->begun);
            if (e->requests[at]) break;
            if (e->sends) pattern_fill(data, size, e->begun);
            if (!e->sends) guarded_reset(&e->buffers[at]);
            e->requests[at] = e->sends ? try_isend(&e->net, e->comm, data, size, 0, e->mrs[at])
                                       : try_irecv(&e->net, e->comm, 1, &data, &room, &tag, &e->mrs[at]);
            if (!e->requests[at]) break;
            e->numbers[at] = e->begun++;
        }
        if (deadline_passed(&deadline)) FAIL("waited too long for messages up to %llu", (unsigned long long)end);
        ffi_yield();
    }
}

/* Both hosts break rails by plans of their own while messages go; then every rail comes back, for data and for credits. */
static void run_host(int version, int socket, bool is_sender)
{
    struct end e = {.sends = is_sender};
    const char *count = getenv("FAILOVER_PLANS"), *first = getenv("FAILOVER_SEED");
    uint64_t seed = first ? strtoull(first, NULL, 0) : 1, last = seed + (count ? strtoull(count, NULL, 0) : 20);
    int dev = recovering(&e.net, version, RAILS, "1");
    for (; seed < last; seed++) {
        char plan[3000];
        uint64_t random = seed * 2 + is_sender, end = 0;
        e.comm = is_sender ? dial(&e.net, dev, socket) : answer(&e.net, dev, socket);
        e.begun = 0;
        for (int i = 0; i < AHEAD; i++) {
            e.buffers[i] = guarded_new(LARGEST, 0);
            e.mrs[i] = register_host(&e.net, e.comm, e.buffers[i].data, LARGEST);
        }
        for (int batch = 0; batch < BATCHES; batch++) {
            traffic_plan(plan, sizeof plan, RAILS, &random);
            fprintf(stderr, "seed %llu, %s:\n%s", (unsigned long long)seed, ffi_process_name, plan);
            rnic_faults(next_random(&random) % 3 ? plan : "");
            run_end(&e, end += BATCH);
            for (int rail = 1; rail < RAILS; rail++) rail_port(rail, true);
        }
        rnic_faults(is_sender ? "device=softrnic1 op=write-imm -> delay=1us\ndevice=softrnic2 op=write-imm -> delay=1us\n"
                              : "device=softrnic1 op=write bytes=1.. -> delay=1us\ndevice=softrnic2 op=write bytes=1.. -> delay=1us\n");
        for (char ours, theirs = 'n';;) {
            ours = rnic_fault_fired(0) > 1 && rnic_fault_fired(1) > 1 ? 'y' : 'n';
            tell(socket, &ours, 1);
            hear(socket, &theirs, 1);
            if (ours == 'y' && theirs == 'y') break;
            run_end(&e, end += BATCH);
        }
        rnic_faults("");
        for (int i = 0; i < AHEAD; i++) {
            CHECK_OK(net_dereg_mr(&e.net, e.comm, e.mrs[i]));
            guarded_free(&e.buffers[i]);
        }
        CHECK_OK(is_sender ? net_close_send(&e.net, e.comm) : net_close_recv(&e.net, e.comm));
    }
    net_stop(&e.net);
}

static void sends_by_plans(int version, int socket, void *argument)
{
    (void)argument;
    run_host(version, socket, true);
}

static void receives_by_plans(int version, int socket, void *argument)
{
    (void)argument;
    run_host(version, socket, false);
}

static void two_hosts_by_plans(int version)
{
    (void)version;
    run_two(12, (struct role){"sender", sends_by_plans, false}, (struct role){"receiver", receives_by_plans, false}, NULL);
}

const struct ffi_case ffi_cases[] = {
    ONCE(first_of_two),
    ONCE(second_of_two),
    ONCE(one_of_four),
    ONCE(several_members),
    ONCE(without_failover),
    ONCE(by_turns),
    ONCE(all_but_one),
    ONCE(unequal_ends),
    ONCE(dead_for_a_while),
    ONCE(given_up),
    ONCE(moves_fail),
    ONCE(fails_at_once),
    ONCE(another_address),
    ONCE(closed_on_the_way),
    ONCE(flush_queue_pair),
    ONCE(plans_on_two),
    ONCE(plans_on_four),
    ONCE(plans_on_a_thread),
    ONCE(plans_by_steps),
    ONCE(plans_in_pieces),
    ONCE(two_hosts),
    ONCE(killed_on_the_way),
    ONCE(two_hosts_by_plans),
    ONCE(one_end_asks),
    {0},
};
