/*
 * Faults of the device: registrations that fail while a connection is made, a port that goes away for a moment, a port
 * that is down from the start. What fails is undone completely; what can go on goes on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"
#include "softrnic.h"

/* One attempt to connect; false when either side gave an error, with everything closed that came into being. */
static bool attempt(const struct net *net, struct pair *pair)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    ncclResult_t connected = ncclSuccess, accepted = ncclSuccess;
    *pair = (struct pair){.net = net};
    if (net_listen(net, 0, handle, &listener) != ncclSuccess) return false;
    WAIT_UNTIL(({
                   if (!pair->send) connected = net_connect(net, 0, handle, &pair->send);
                   if (!pair->recv && !connected) accepted = net_accept(net, listener, &pair->recv);
                   (pair->send && pair->recv) || connected || accepted;
               }),
               "a connection or an error");
    CHECK_OK(net_close_listen(net, listener));
    if (!connected && !accepted) return true;
    CHECK(ffi_is_error(connected ? connected : accepted));
    if (!pair->send && !connected) /* the other side gave up, which connect has to find out */
        WAIT_UNTIL((connected = net_connect(net, 0, handle, &pair->send)) || pair->send, "connect to give up too");
    if (pair->send) CHECK_OK(net_close_send(net, pair->send));
    if (pair->recv) CHECK_OK(net_close_recv(net, pair->recv));
    return false;
}

/* Each of the registrations that a connection makes fails once; the attempt leaves nothing, and the next one works. */
static void registration_fails_while_connecting(int version)
{
    struct net net;
    struct pair pair;
    int failures = 0;
    setenv("PINRAIL_REG_FALLBACK", "fail", 1); /* else the memory comes from where it was pinned before */
    net_start(&net, version);
    pair_open(&net, 0, &pair); /* what is made once per device is there from now on */
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    struct rnic_counts before = rnic_counts();
    struct census at_rest = census_take();
    for (uint64_t n = 1; n < 20; n++) {
        size_t mark = log_mark();
        rnic_fail_registration(n);
        bool worked = attempt(&net, &pair);
        rnic_fail_registration(0);
        if (worked) pair_close(&pair);
        if (!worked) failures++;
        if (!worked) CHECK(log_warnings_since(mark) >= 1);
        struct rnic_counts after = rnic_counts();
        CHECK_EQ(after.mrs, before.mrs);
        CHECK_EQ(after.qps, before.qps);
        CHECK_EQ(after.cqs, before.cqs);
        CHECK_EQ(census_take().descriptors, at_rest.descriptors);
        pair_open(&net, 0, &pair);
        pair_message(&pair, 1000, 0, n);
        pair_close(&pair);
        if (worked) break; /* a connection makes fewer registrations than n */
    }
    if (failures == 0) FAIL("no registration of a connection could be made to fail");
    printf("%d registrations per connection\n", failures);
    net_stop(&net);
}

/* A shortage that is over when somebody asks again is nobody's concern; one that lasts is told, and is over once it is
 * over. */
static void user_registration_fails(int version)
{
    struct net net;
    struct pair pair;
    char memory[8192];
    void *mr = GARBAGE;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct rnic_counts before = rnic_counts();
    size_t mark = log_mark();
    rnic_fail_registration(1);
    mr = register_host(&net, pair.recv, memory, sizeof memory);
    CHECK_EQ(log_warnings_since(mark), 0);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    rnic_fail_registrations_from(1);
    mr = GARBAGE;
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, memory, sizeof memory, NCCL_PTR_HOST, &mr));
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    rnic_fail_registrations_from(0);
    mr = register_host(&net, pair.recv, memory, sizeof memory);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* Down and up again within the transport's retry time: the message arrives late, and that is all. */
static void port_down_and_up(int version)
{
    struct net net;
    struct pair pair;
    enum { LENGTH = 3000 };
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new(LENGTH, 0), to = guarded_new(LENGTH, 0);
    void *from_mr = register_host(&net, pair.send, from.data, LENGTH);
    void *to_mr = register_host(&net, pair.recv, to.data, LENGTH);
    for (int i = 0; i < 5; i++) {
        guarded_reset(&to);
        pattern_fill(from.data, LENGTH, (uint64_t)i);
        void *receive = irecv(&net, pair.recv, to.data, LENGTH, 0, to_mr);
        rnic_port("softrnic0", false);
        void *send = isend(&net, pair.send, from.data, LENGTH, 0, from_mr); /* the credit was there before */
        for (int polls = 0; polls < 50; polls++) CHECK(!is_done(&net, receive, NULL));
        rnic_port("softrnic0", true);
        CHECK_EQ(wait_size(&net, send), LENGTH);
        CHECK_EQ(wait_size(&net, receive), LENGTH);
        CHECK_BUFFER(&to, LENGTH, (uint64_t)i);
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(registration_fails_while_connecting),
    EACH(user_registration_fails),
    EACH(port_down_and_up),
    {0},
};
