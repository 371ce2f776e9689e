/*
 * Fused devices: one connection over several rails, with equal and unequal numbers of them on the two ends.
 */
#include "pair.h"
#include "softrnic.h"

#include <stdlib.h>
#include <string.h>

enum { RAILS = 8, MEMBERS = 8 };

/* A host with eight devices, and a device made of the first `n`; v12 takes eight, v9 to v11 four. */
static int fused(struct net *net, int version, int n)
{
    int count = 0;
    setenv("SOFTRNIC_DEVICES", "8", 1);
    net_start(net, version);
    CHECK_OK(net_devices(net, &count));
    CHECK_EQ(count, RAILS);
    int dev = net_fuse(net, n);
    CHECK_EQ(dev, RAILS);
    CHECK_OK(net_devices(net, &count));
    CHECK_EQ(count, RAILS + 1);
    return dev;
}

static void messages(const struct pair *pair)
{
    static const size_t sizes[] = {0, 1, 8, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 4096, 65535, 65536, 1000003};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) pair_message(pair, sizes[i], (int)i, i);
    for (int i = 0; i < 200; i++) pair_message(pair, (size_t)i * 37, i, (uint64_t)i);
}

/* Receives of one to eight members, some empty, sent in reverse order. */
static void groups(const struct pair *pair)
{
    const struct net *net = pair->net;
    enum { SLOT = 5000 };
    struct guarded from = guarded_new(MEMBERS * SLOT, 0), to = guarded_new(MEMBERS * SLOT, 0);
    void *from_mr = register_host(net, pair->send, from.data, from.size);
    void *to_mr = register_host(net, pair->recv, to.data, to.size);
    for (int n = 1; n <= MEMBERS; n++) {
        void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS];
        size_t sizes[MEMBERS];
        int tags[MEMBERS], got[64];
        guarded_reset(&to);
        for (int i = 0; i < n; i++) {
            data[i] = to.data + i * SLOT;
            mrs[i] = to_mr;
            sizes[i] = (size_t)(i * 613 % SLOT);
            tags[i] = 100 + i;
            pattern_fill(from.data + i * SLOT, sizes[i], (uint64_t)(n * 100 + i));
        }
        void *receive = irecv_group(net, pair->recv, n, data, sizes, tags, mrs);
        for (int i = n - 1; i >= 0; i--)
            sends[i] = isend(net, pair->send, from.data + i * SLOT, sizes[i], tags[i], from_mr);
        wait_done(net, receive, got);
        for (int i = 0; i < n; i++) {
            CHECK_EQ(wait_size(net, sends[i]), sizes[i]);
            CHECK_EQ(got[i], sizes[i]);
            CHECK_PART(&to, (size_t)i * SLOT, SLOT, sizes[i], (uint64_t)(n * 100 + i));
        }
    }
    CHECK_OK(net_dereg_mr(net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(net, pair->recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
}

static void all_of_it(int version, int members)
{
    struct net net;
    struct pair pair;
    int dev = fused(&net, version, members);
    pair_open(&net, dev, &pair);
    messages(&pair);
    groups(&pair);
    pair_close(&pair);
    net_stop(&net);
}

static void two(int version) { (void)version; all_of_it(12, 2); }
static void two_in_v9(int version) { (void)version; all_of_it(9, 2); }
static void three(int version) { (void)version; all_of_it(12, 3); }
static void four_in_v11(int version) { (void)version; all_of_it(11, 4); }
static void eight(int version) { (void)version; all_of_it(12, 8); }

static void two_with_four_qps_split(int version)
{
    (void)version;
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    all_of_it(12, 2);
}

/* More members on one end than on the other, both ways round. */
static void unequal_ends(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    int dev = fused(&net, 12, 3);
    for (int way = 0; way < 2; way++) {
        pair_open_between(&net, way ? dev : 5, way ? 5 : dev, &pair);
        messages(&pair);
        groups(&pair);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* A flush reads on every rail that carried data. */
static void flush_reads_on_every_rail(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    int dev = fused(&net, 12, 2);
    pair_open(&net, dev, &pair);
    struct guarded to = guarded_new(4096, 0);
    void *mr = register_host(&net, pair.recv, to.data, to.size), *data = to.data, *request = GARBAGE;
    int size = 4096;
    pair_message(&pair, 100000, 0, 1); /* both rails */
    struct rnic_counts before = rnic_counts();
    CHECK_OK(net_iflush(&net, pair.recv, 1, &data, &size, &mr, &request));
    CHECK(request != NULL && request != GARBAGE);
    wait_done(&net, request, NULL);
    CHECK_EQ(rnic_counts().reads - before.reads, 2);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    ONCE(two), ONCE(two_in_v9), ONCE(three), ONCE(four_in_v11), ONCE(eight), ONCE(two_with_four_qps_split),
    ONCE(unequal_ends), ONCE(flush_reads_on_every_rail), {0},
};
