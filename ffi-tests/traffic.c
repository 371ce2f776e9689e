#include "traffic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softrnic.h"

int fused_start(struct net *net, int version, int rails, const char *qps)
{
    char devices[16];
    snprintf(devices, sizeof devices, "%d", rails);
    setenv("SOFTRNIC_DEVICES", devices, 1);
    setenv("SOFTRNIC_RETRY_MS", "5", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 0);
    if (!getenv("NCCL_IB_RESILIENCY_PORT_FAILOVER")) setenv("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", 1);
    net_start(net, version);
    return net_fuse(net, rails);
}

void rail_port(int rail, bool up)
{
    char name[32];
    snprintf(name, sizeof name, "softrnic%d", rail);
    rnic_port(name, up);
}

void traffic_new(struct traffic *traffic, const struct pair *pair, int members, uint64_t seed)
{
    memset(traffic, 0, sizeof *traffic);
    traffic->pair = pair;
    traffic->members = members;
    traffic->random = seed;
    traffic->room = LARGEST / (size_t)members;
    traffic->next = 1; /* no message has number 0 */
    for (int i = 0; i < WINDOW; i++) {
        traffic->from[i] = guarded_new(LARGEST, 0);
        traffic->to[i] = guarded_new(LARGEST, 0);
        traffic->from_mr[i] = register_host(pair->net, pair->send, traffic->from[i].data, LARGEST);
        traffic->to_mr[i] = register_host(pair->net, pair->recv, traffic->to[i].data, LARGEST);
    }
}

void traffic_free(struct traffic *traffic)
{
    for (int i = 0; i < WINDOW; i++) {
        CHECK_OK(net_dereg_mr(traffic->pair->net, traffic->pair->send, traffic->from_mr[i]));
        CHECK_OK(net_dereg_mr(traffic->pair->net, traffic->pair->recv, traffic->to_mr[i]));
        guarded_free(&traffic->from[i]);
        guarded_free(&traffic->to[i]);
    }
}

void traffic_receive(struct traffic *traffic, int at)
{
    void *data[MEMBERS], *mrs[MEMBERS];
    size_t sizes[MEMBERS];
    int tags[MEMBERS];
    guarded_reset(&traffic->to[at]);
    for (int m = 0; m < traffic->members; m++) {
        data[m] = traffic->to[at].data + (size_t)m * traffic->room;
        mrs[m] = traffic->to_mr[at];
        sizes[m] = traffic->room;
        tags[m] = m;
    }
    traffic->receives[at] =
        try_irecv(traffic->pair->net, traffic->pair->recv, traffic->members, data, sizes, tags, mrs);
    if (!traffic->receives[at]) return;
    traffic->numbers[at] = traffic->next++;
    for (int m = 0; m < traffic->members; m++) {
        uint64_t pick = next_random(&traffic->random);
        /* Small ones go in one part, others over all rails. */
        traffic->sizes[at][m] = pick % 4 ? pick / 4 % (traffic->room + 1) : pick / 4 % 200;
        pattern_fill(traffic->from[at].data + (size_t)m * traffic->room, traffic->sizes[at][m],
                     traffic->numbers[at] * MEMBERS + (uint64_t)m);
    }
}

void traffic_step(struct traffic *traffic, uint64_t count)
{
    const struct net *net = traffic->pair->net;
    bool blocked = false;
    for (int at = 0; at < WINDOW; at++) {
        if (!blocked && !traffic->receives[at] && !traffic->numbers[at] && traffic->next < count + 1) {
            traffic_receive(traffic, at);
            blocked = !traffic->receives[at]; /* until others are done, which must be asked all the same */
        }
        if (!traffic->numbers[at]) continue;
        int got[MEMBERS], left = 0;
        if (traffic->receives[at] && is_done(net, traffic->receives[at], got)) {
            traffic->receives[at] = NULL;
            for (int m = 0; m < traffic->members; m++) {
                CHECK_EQ(got[m], traffic->sizes[at][m]);
                CHECK_PART(&traffic->to[at], (size_t)m * traffic->room, traffic->room, traffic->sizes[at][m],
                           traffic->numbers[at] * MEMBERS + (uint64_t)m);
            }
        }
        for (int m = 0; m < traffic->members; m++)
            if (traffic->sends[at][m] && traffic->sends[at][m] != GARBAGE && is_done(net, traffic->sends[at][m], NULL))
                traffic->sends[at][m] = GARBAGE;
        for (int m = 0; m < traffic->members; m++) left += traffic->sends[at][m] != GARBAGE;
        if (left || traffic->receives[at]) continue;
        memset(traffic->sends[at], 0, sizeof traffic->sends[at]);
        traffic->numbers[at] = 0;
        traffic->done++;
    }
    /* Sends answer receives in their order. */
    for (;;) {
        int oldest = -1;
        for (int at = 0; at < WINDOW; at++) {
            bool unsent = false;
            for (int m = 0; m < traffic->members; m++) unsent |= traffic->numbers[at] && !traffic->sends[at][m];
            if (unsent && (oldest < 0 || traffic->numbers[at] < traffic->numbers[oldest])) oldest = at;
        }
        if (oldest < 0) return;
        for (int m = traffic->members - 1; m >= 0; m--) {
            if (traffic->sends[oldest][m]) continue;
            traffic->sends[oldest][m] =
                try_isend(net, traffic->pair->send, traffic->from[oldest].data + (size_t)m * traffic->room,
                          traffic->sizes[oldest][m], m, traffic->from_mr[oldest]);
            if (!traffic->sends[oldest][m]) return;
        }
    }
}

void traffic_run(struct traffic *traffic, uint64_t count)
{
    WAIT_UNTIL((traffic_step(traffic, count), traffic->done == count), "all messages");
}

/* What befalls rails, as rules of fault plans: every way for a part to be lost, and for one to arrive that is said to be lost. */
static const char *const mishaps[] = {
    "op=write-imm nth=%u -> drop",
    "op=write-imm nth=%u -> drop at=half",
    "op=write-imm nth=%u -> drop at=payload",
    "op=write-imm nth=%u -> drop at=end", /* the acknowledgement alone */
    "op=write-imm nth=%u -> status=retry-exc at=end",
    "op=write-imm nth=%u -> status=retry-exc at=half",
    "op=write-imm nth=%u -> status=wr-flush at=end",
    "op=write nth=%u -> drop", /* a credit, or a piece */
    "op=write nth=%u -> drop at=end",
    "op=write nth=%u -> status=retry-exc at=payload",
    "op=write-imm nth=%u -> kill-qp at=end",
    "op=write,write-imm nth=%u -> kill-qp",
    "op=write,write-imm nth=%u -> port-down",
};

void traffic_plan(char *plan, size_t room, int rails, uint64_t *random)
{
    size_t used = 0;
    for (int rail = 1; rail < rails; rail++) {
        const char *mishap = mishaps[next_random(random) % (sizeof mishaps / sizeof *mishaps)];
        char rule[160];
        snprintf(rule, sizeof rule, mishap, (unsigned)(next_random(random) % 60 + 1));
        used += (size_t)snprintf(plan + used, room - used, "device=softrnic%d %s\n", rail, rule);
    }
    used += (size_t)snprintf(plan + used, room - used, "seed=%u\n", (unsigned)(next_random(random) % 1000));
    if (next_random(random) % 2) used += (size_t)snprintf(plan + used, room - used, "op=write-imm p=0.1 -> shuffle\n");
    if (next_random(random) % 2) snprintf(plan + used, room - used, "op=write p=0.05 -> delay=200us\n");
}
