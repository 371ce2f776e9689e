/*
 * What the settings say about addresses, partitions, classes and timeouts, as it reaches the adapter in the attributes of
 * queue pairs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "pair.h"
#include "softrnic.h"

/* ---- addresses ------------------------------------------------------------------------------------------------ */

#define USUAL "fe80::1/v1,fe80::1/v2,10.0.0.1/v1,10.0.0.1/v2,fd00::1/v1,fd00::1/v2"
#define USUAL_KINDS "121212"

struct chosen {
    const char *name;
    const char *gids, *kinds;
    const char *settings[4];
    int index;        /* -1: the port is left out */
    const char *told; /* by which line */
};
static const struct chosen choices[] = {
    {"usual", USUAL, USUAL_KINDS, {0}, 3, "softrnic0:1: GID 3 10.0.0.1 v2: first AF_INET entry of RoCE v2"},
    {"family", USUAL, USUAL_KINDS, {"NCCL_IB_ADDR_FAMILY=AF_INET6"}, 5, "GID 5 fd00::1 v2: first AF_INET6 entry"},
    {"version 1", USUAL, USUAL_KINDS, {"NCCL_IB_ROCE_VERSION_NUM=1"}, 2, "first AF_INET entry of RoCE v1"},
    {"range", "10.0.0.1/v2,10.9.0.1/v2", "22", {"NCCL_IB_ADDR_RANGE=10.9.0.0/16"}, 1, "GID 1 10.9.0.1"},
    {"range of nothing", USUAL, USUAL_KINDS, {"NCCL_IB_ADDR_RANGE=172.16.0.0/12"}, -1,
     "softrnic0:1 is left out: no GID lies in NCCL_IB_ADDR_RANGE 172.16.0.0/12; the table holds: 0 fe80::1 v1"},
    {"sparse", "fe80::1/v1,-,-,-,10.0.0.1/v2", "1---2", {0}, 4, "GID 4 10.0.0.1 v2"},
    {"IPv6 only", "fe80::1/v1,fe80::1/v2,fd00::1/v1,fd00::1/v2", "1212", {0}, 3, "no better entry is AF_INET"},
    {"link-local only", "fe80::1/v1,fe80::1/v2", "12", {0}, 1, "its address is link-local"},
    {"version 1 only", "fe80::1/v1,10.0.0.1/v1", "11", {0}, 1, "it is RoCE v1; a peer that uses v2 cannot talk to it"},
    {"no kinds", "fe80::1,10.0.0.1", "--", {0}, 1, "its RoCE version is unknown"},
    {"fixed", USUAL, USUAL_KINDS, {"NCCL_IB_GID_INDEX=5"}, 5, "NCCL_IB_GID_INDEX names it"},
    {"fixed, empty", "10.0.0.1/v2,-", "2-", {"NCCL_IB_GID_INDEX=1"}, -1,
     "NCCL_IB_GID_INDEX 1 is an empty slot; the table holds: 0 10.0.0.1 v2"},
    {"list", USUAL, USUAL_KINDS, {"NCCL_IB_GID_INDEX=softrnic0:2"}, 2, "NCCL_IB_GID_INDEX names it"},
    {"list of others", USUAL, USUAL_KINDS, {"NCCL_IB_GID_INDEX=softrnic9:2"}, 3, "NCCL_IB_GID_INDEX: there is no device softrnic9"},
    {"nothing", "-,-", "--", {0}, -1, "no GID belongs to an interface of this network namespace; the table holds: nothing"},
};

static void address_is(int version, int socket, void *argument)
{
    const struct chosen *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct pair pair;
    uint32_t qps[4];
    size_t mark = log_mark();
    setenv("SOFTRNIC_GIDS", wanted->gids, 1);
    host_set(wanted->settings);
    host_sysfs();
    host_gid_kinds("softrnic0", wanted->kinds);
    if (wanted->index < 0) {
        int ndev = -1;
        net_load(&net, LAST_VERSION);
        CHECK_OK(net_init(&net, 1, ffi_logger));
        CHECK_OK(net_devices(&net, &ndev));
        CHECK_EQ(ndev, 0);
        CHECK_EQ(log_warnings_since(mark), 1);
    } else {
        net_start(&net, LAST_VERSION);
        pair_open(&net, 0, &pair);
        CHECK(rnic_qps(qps, 4) >= 2);
        for (int end = 0; end < 2; end++) CHECK_EQ(rnic_attr(qps[end], RNIC_RTR).sgid, wanted->index);
        pair_message(&pair, 1000, 0, 1);
        pair_close(&pair);
    }
    if (log_matches_since(mark, wanted->told) != 1) FAIL("%s: not told once: \"%s\"", wanted->name, wanted->told);
    net_stop(&net);
}

static void gid_choice(int version)
{
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        run_one(version, (struct role){choices[i].name, address_is, false}, (void *)&choices[i]);
}

/* A container sees the adapters of the whole host; those whose interfaces it does not have cannot connect. */
static void ports_of_another_namespace_are_skipped(int version)
{
    (void)version;
    struct net net;
    struct net_properties p;
    int ndev = 0;
    size_t mark = log_mark();
    host_set((const char *[]){"SOFTRNIC_DEVICES=3", "SOFTRNIC_NAME=mlx5_0,mlx5_1,mlx5_2", NULL});
    host_sysfs();
    for (int i = 0; i < 3; i++) {
        char device[16];
        snprintf(device, sizeof device, "mlx5_%d", i);
        host_gid_kinds(device, "2");
        host_file(i == 1 ? "net1\n" : "eth5\n", "class/infiniband/%s/ports/1/gid_attrs/ndevs/0", device);
    }
    host_file("1500\n", "class/net/net1/mtu");
    net_start(&net, LAST_VERSION);
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 1);
    CHECK_OK(net_get_properties(&net, 0, &p));
    CHECK_STR(p.name, "mlx5_1");
    CHECK_EQ(log_warnings_since(mark), 2);
    CHECK_EQ(log_matches_since(mark, "mlx5_0:1 is left out: no GID belongs to an interface of this network"), 1);
    CHECK_EQ(log_matches_since(mark, "mlx5_2:1 is left out"), 1);
    net_stop(&net);
}

static void expect_dgid(uint32_t qp, const uint8_t address[4])
{
    uint8_t mapped[16] = {[10] = 0xff, [11] = 0xff};
    memcpy(mapped + 12, address, 4);
    struct rnic_attr attr = rnic_attr(qp, RNIC_RTR);
    CHECK_EQ(memcmp(attr.dgid, mapped, 16), 0);
}

/* An address moves while the job runs: what is connected goes on, and whoever connects afterwards takes the new one, also
 * through a listener from before. */
static void a_changed_gid_is_followed(int version)
{
    struct net net;
    struct pair before, after = {0};
    uint32_t qps[8];
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    setenv("SOFTRNIC_GIDS", "10.0.0.1/v2,-", 1);
    host_sysfs();
    host_gid_kinds("softrnic0", "22");
    net_start(&net, version);
    pair_open(&net, 0, &before);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    int connected = rnic_qps(qps, 8);
    expect_dgid(qps[0], (const uint8_t[]){10, 0, 0, 1});
    size_t mark = log_mark();
    rnic_set_gid("softrnic0", 1, "10.0.0.7/v2");
    WAIT_UNTIL(log_matches_since(mark, "GID 0 10.0.0.1, which connections use, is as it was"), "the first event");
    rnic_set_gid("softrnic0", 0, "-");
    WAIT_UNTIL(log_matches_since(mark, "softrnic0:1: IBV_EVENT_GID_CHANGE; GID 0 10.0.0.1, which connections use, is 0 :: now"),
               "the second event");
    after.net = &net;
    WAIT_UNTIL(pair_step(&after, 0, handle, listener), "a connection after the change");
    CHECK_OK(net_close_listen(&net, listener));
    CHECK_EQ(log_matches_since(mark, "softrnic0:1 is used under GID 1 10.0.0.7 v2 from here on"), 1);
    CHECK(rnic_qps(qps, 8) >= connected + 2);
    for (int end = connected; end < connected + 2; end++) {
        expect_dgid(qps[end], (const uint8_t[]){10, 0, 0, 7});
        CHECK_EQ(rnic_attr(qps[end], RNIC_RTR).sgid, 1);
    }
    pair_message(&after, 1000, 0, 1);
    pair_close(&before);
    pair_close(&after);
    net_stop(&net);
}

/* ---- attributes ------------------------------------------------------------------------------------------------ */

/* What both ends are told; the sender's class of traffic and the receiver's differ. */
struct told {
    const char *name;
    const char *settings[6];
    int class; /* of the communicator */
    int pkey, is_global, sgid, sl, sent_tc, credit_tc, timeout, retry;
};
#define ETHERNET 0, 1, 0
static const struct told attributes[] = {
    {"defaults", {0}, -1, ETHERNET, 0, 0, 0, 20, 7},
    {"class of the communicator", {0}, 5, ETHERNET, 5, 5, 5, 20, 7},
    {"class that is no service level", {0}, 106, ETHERNET, 0, 106, 106, 20, 7},
    {"settings win", {"NCCL_IB_SL=3", "NCCL_IB_TC=41"}, 5, ETHERNET, 3, 41, 41, 20, 7},
    {"credits apart", {"NCCL_IB_TC=41", "NCCL_IB_FIFO_TC=96"}, -1, ETHERNET, 0, 41, 96, 20, 7},
    {"timeouts", {"NCCL_IB_TIMEOUT=14", "NCCL_IB_RETRY_CNT=2"}, -1, ETHERNET, 0, 0, 0, 14, 2},
    {"too high", {"NCCL_IB_TIMEOUT=300", "NCCL_IB_RETRY_CNT=15"}, -1, ETHERNET, 0, 0, 0, 31, 7},
    {"pkey by index", {"NCCL_IB_PKEY=2"}, -1, 2, 1, 0, 0, 0, 0, 20, 7},
    {"pkey by value", {"NCCL_IB_PKEY_VALUE=0x8001"}, -1, 1, 1, 0, 0, 0, 0, 20, 7},
    {"pkey of another membership", {"NCCL_IB_PKEY_VALUE=0x8002"}, -1, 2, 1, 0, 0, 0, 0, 20, 7},
    {"value before index", {"NCCL_IB_PKEY_VALUE=0x8001", "NCCL_IB_PKEY=2"}, -1, 1, 1, 0, 0, 0, 0, 20, 7},
    {"RoCE with a LID", {"SOFTRNIC_ETHERNET_LID=9"}, -1, ETHERNET, 0, 0, 0, 20, 7},
    {"InfiniBand", {"SOFTRNIC_LINK=ib", "NCCL_IB_SL=4"}, -1, 0, 0, 0, 4, 0, 0, 20, 7},
    {"header required", {"SOFTRNIC_LINK=ib", "SOFTRNIC_GRH=1", "NCCL_IB_TC=7"}, -1, 0, 1, 0, 0, 7, 7, 20, 7},
    {"FLID", {"SOFTRNIC_LINK=ib", "SOFTRNIC_GRH=1", "SOFTRNIC_GIDS=fe80::1/ib,fe80:0:12::1/ib"}, -1, 0, 1, 1, 0, 0, 0, 20, 7},
    {"FLID elsewhere", {"SOFTRNIC_LINK=ib", "SOFTRNIC_GRH=1", "SOFTRNIC_GIDS=fe80::1/ib,fe80:0:11::1/ib,fe80:0:12::1/ib",
     "NCCL_IB_ROUTABLE_FLID_GID_INDEX=2"}, -1, 0, 1, 2, 0, 0, 0, 20, 7},
};

static void attributes_are(int version, int socket, void *argument)
{
    const struct told *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct pair pair;
    uint32_t qps[4];
    setenv("SOFTRNIC_PKEYS", "0xffff,0x8001,0x0002", 1);
    host_set(wanted->settings);
    net_traffic_class = wanted->class;
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    CHECK(rnic_qps(qps, 4) >= 2); /* connect makes its own before accept hears of it */
    bool roce = !getenv("SOFTRNIC_LINK");
    for (int end = 0; end < 2; end++) {
        struct rnic_attr init = rnic_attr(qps[end], RNIC_INIT), rtr = rnic_attr(qps[end], RNIC_RTR),
                         rts = rnic_attr(qps[end], RNIC_RTS);
        CHECK_EQ(init.pkey_index, wanted->pkey);
        CHECK_EQ(init.port, 1);
        CHECK_EQ(init.access, 2); /* a peer may write, and nothing else */
        CHECK_EQ(rtr.dest, qps[!end]);
        CHECK_EQ(rtr.path_port, 1);
        CHECK_EQ(rtr.mtu, 5);
        CHECK_EQ(rtr.rnr, 12);
        CHECK_EQ(rtr.sl, wanted->sl);
        CHECK_EQ(rtr.is_global, wanted->is_global);
        CHECK_EQ(rtr.sgid, wanted->sgid);
        CHECK_EQ(rtr.hops, wanted->is_global ? 255 : 0);
        CHECK_EQ(rtr.tc, end == 0 ? wanted->sent_tc : wanted->credit_tc);
        CHECK_EQ(rtr.dlid, roce ? 0 : 1);
        CHECK_EQ(rts.timeout, wanted->timeout);
        CHECK_EQ(rts.retry, wanted->retry);
        CHECK_EQ(rts.rnr_retry, 7);
    }
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

static void attributes_of_queue_pairs(int version)
{
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        run_one(version, (struct role){attributes[i].name, attributes_are, false}, (void *)&attributes[i]);
}

/* v10 has the class in connect, v11 and v12 in init. */
static void traffic_class_of_each_version(int version)
{
    struct net net;
    struct pair pair;
    uint32_t qps[4];
    net_traffic_class = 9;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    CHECK(rnic_qps(qps, 4) >= 2);
    int class = version >= 10 ? 9 : 0;
    for (int end = 0; end < 2; end++) {
        CHECK_EQ(rnic_attr(qps[end], RNIC_RTR).tc, class);
        CHECK_EQ(rnic_attr(qps[end], RNIC_RTR).sl, class);
    }
    pair_close(&pair);
    net_stop(&net);
}

static void partition_is_missing(int version, int socket, void *argument)
{
    const char *const *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    int ndev = -1;
    size_t mark = log_mark();
    setenv("SOFTRNIC_PKEYS", "0xffff,0,0x8001", 1);
    host_set((const char *[]){wanted[0], NULL});
    net_load(&net, LAST_VERSION);
    CHECK_OK(net_init(&net, 1, ffi_logger));
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 0);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, wanted[1]), 1);
    CHECK_EQ(log_matches_since(mark, "the port has no such partition key; its table holds 0 0xffff, 2 0x8001"), 1);
    net_stop(&net);
}

static void partitions_are_looked_up(int version)
{
    static const char *const missing[][2] = {
        {"NCCL_IB_PKEY=7", "NCCL_IB_PKEY=7: "}, /* beyond the table */
        {"NCCL_IB_PKEY=1", "NCCL_IB_PKEY=1: "}, /* an empty place */
        {"NCCL_IB_PKEY_VALUE=0x7777", "NCCL_IB_PKEY_VALUE=0x7777: "},
    };
    for (int i = 0; i < 3; i++)
        run_one(version, (struct role){missing[i][0], partition_is_missing, false}, (void *)missing[i]);
}

const struct ffi_case ffi_cases[] = {
    ONCE(gid_choice),
    ONCE(ports_of_another_namespace_are_skipped),
    EACH(a_changed_gid_is_followed),
    ONCE(attributes_of_queue_pairs),
    EACH(traffic_class_of_each_version),
    ONCE(partitions_are_looked_up),
    {0},
};
