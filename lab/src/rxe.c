/*
 * What ffi-tests has for the software RNIC only, in a form for rxe0 and rxe1: fused devices (rails.c wants eight),
 * flushes whose READs nobody counts, messages above the device's limit, objects as the kernel counts them, and forked
 * children of a process whose pages the distribution's library withholds. lab/ffi builds it and runs it as one more program of ffi-tests.
 */
#define ffi_cases of_eight_devices
#define fused of_eight
#include "rails.c"
#undef fused
#undef ffi_cases

#include <stdio.h>

#include "forked.h"

/* A device made of both. */
static int both(struct net *net, int version)
{
    int dev = -1, count = 0;
    net_start(net, version);
    CHECK_OK(net_devices(net, &count));
    CHECK_EQ(count, 2);
    if (version >= 12) {
        ncclNetVDeviceProps8_t props = {.ndevs = 2, .devs = {0, 1}};
        CHECK_OK(((const ncclNet_v12_t *)net->table)->makeVDevice(&dev, &props));
    } else {
        ncclNetVDeviceProps4_t props = {.ndevs = 2, .devs = {0, 1}};
        CHECK_OK(((const ncclNet_v9_t *)net->table)->makeVDevice(&dev, &props));
    }
    CHECK_EQ(dev, 2);
    return dev;
}

static void all_between(int version, const char *qps, const char *split)
{
    struct net net;
    struct pair pair;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    int dev = both(&net, version);
    pair_open(&net, dev, &pair);
    messages(&pair);
    groups(&pair);
    pair_close(&pair);
    net_stop(&net);
}


static void fused(int version) { (void)version; all_between(12, "1", "0"); }
static void fused_in_v9(int version) { (void)version; all_between(9, "1", "0"); } /* the first that has makeVDevice */
static void fused_in_v11(int version) { (void)version; all_between(11, "1", "0"); }

static void fused_2_qps(int version) { (void)version; all_between(12, "2", "0"); }
static void fused_4_qps_split(int version) { (void)version; all_between(12, "4", "1"); }
static void fused_3_qps_split(int version) { (void)version; all_between(12, "3", "1"); }

/* Fused on one end and either device alone on the other, both ways round; then one device alone to the other. */
static void fused_to_one(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    int dev = both(&net, 12), ends[][2] = {{dev, 0}, {dev, 1}, {0, dev}, {1, dev}, {0, 1}, {1, 0}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        pair_open_between(&net, ends[i][0], ends[i][1], &pair);
        messages(&pair);
        groups(&pair);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* Receive, flush, next. The flush reads although there is no GPU memory here. */
static void flush_after_each(int members, const char *qps)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_FLUSH", "always", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    int dev = both(&net, 12);
    pair_open(&net, members == 2 ? dev : 0, &pair);
    struct guarded to = guarded_new(4096, 0);
    void *mr = register_host(&net, pair.recv, to.data, to.size), *data = to.data;
    int size = 4096;
    for (int i = 0; i < 100; i++) {
        void *request = NULL;
        pair_message(&pair, (size_t)i * 331, i, (uint64_t)i);
        CHECK_OK(net_iflush(&net, pair.recv, 1, &data, &size, &mr, &request));
        CHECK(request != NULL);
        wait_done(&net, request, NULL);
    }
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    pair_close(&pair);
    net_stop(&net);
}

static void flush_4_qps(int version) { (void)version; flush_after_each(1, "4"); }
static void fused_flush(int version) { (void)version; flush_after_each(2, "1"); }
static void fused_flush_4_qps(int version) { (void)version; flush_after_each(2, "4"); }

/* A work request of rxe carries 8 MiB at most, as its port says; the rest of a message takes more of them. */
static void above_the_limit(const char *qps, const char *split, int members)
{
    enum { LIMIT = 8 << 20 };
    static const size_t sizes[] = {LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT + 4097};
    struct net net;
    struct pair pair;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    int dev = both(&net, 12);
    pair_open(&net, members == 2 ? dev : 0, &pair);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) pair_message(&pair, sizes[i], (int)i, i);
    pair_close(&pair);
    net_stop(&net);
}

static void long_messages(int version) { (void)version; above_the_limit("1", "0", 1); }
static void long_messages_fused(int version) { (void)version; above_the_limit("1", "0", 2); }

/* What the kernel holds for RDMA, of all processes: a line for each device. */
static void objects(char *text, size_t room)
{
    FILE *pipe = popen("rdma resource show", "re");
    CHECK(pipe != NULL);
    size_t length = fread(text, 1, room - 1, pipe);
    text[length] = 0;
    CHECK_EQ(pclose(pipe), 0);
    CHECK(strstr(text, "rxe0: pd ") != NULL && strstr(text, " qp ") != NULL);
}

/* After the last close and dlclose the process holds what it held before. */
static void no_object_is_left(int version)
{
    char before[1024], after[1024];
    (void)version;
    setenv("PINRAIL_FLUSH", "always", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", "2", 1);
    objects(before, sizeof before);
    for (int round = 0; round < 5; round++) {
        struct net net;
        struct pair fused_pair, plain;
        int dev = both(&net, 12);
        pair_open(&net, dev, &fused_pair);
        pair_open(&net, 0, &plain);
        objects(after, sizeof after);
        if (strcmp(before, after) == 0) FAIL("rdma resource does not see two pairs:\n%s", after);
        pair_message(&plain, 1000, 0, 1);
        groups(&fused_pair);
        pair_close(&fused_pair);
        pair_close(&plain);
        net_stop(&net);
        objects(after, sizeof after);
        if (strcmp(before, after) != 0) FAIL("round %d left objects; before:\n%safter:\n%s", round, before, after);
    }
}

/* ---- children ------------------------------------------------------------------------------------------------ */

/* Whether the distribution's library takes registered pages from children, as it does before rdma-core 51 when it is asked. */
static bool marks(void)
{
    const char *file = realpath(softrnic_path(), NULL), *release = file ? strstr(file, ".so.1.") : NULL;
    int private_version, major = 0;
    if (!release || sscanf(release, ".so.1.%d.%d.", &private_version, &major) != 2) FAIL("which release is %s?", file);
    return major < 51;
}

static void children(int version)
{
    struct net net;
    struct pair pair;
    setenv("RDMAV_FORK_SAFE", "1", 1);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    canaries_plant(2000);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    canaries_plant(2000);
    for (int i = 0; i < 3; i++) pair_message(&pair, 5000, i, (uint64_t)i); /* between buffers that share their pages */
    CHECK_EQ(withheld(NULL, 0) > 0, marks());
    CHECK_EQ(log_matches_since(0, "do not own their pages") > 0, marks());
    child_reads_canaries();
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
    child_reads_canaries();
    CHECK_EQ(log_matches_since(0, ": clean;"), 3);
}

static void children_have_everything(int version) { (void)version; children(12); }
static void children_have_everything_in_v9(int version) { (void)version; children(9); }

const struct ffi_case ffi_cases[] = {
    ONCE(children_have_everything),
    ONCE(children_have_everything_in_v9),
    ONCE(fused),
    ONCE(fused_in_v9),
    ONCE(fused_in_v11),
    ONCE(fused_2_qps),
    ONCE(fused_3_qps_split),
    ONCE(fused_4_qps_split),
    ONCE(fused_to_one),
    ONCE(flush_4_qps),
    ONCE(fused_flush),
    ONCE(fused_flush_4_qps),
    ONCE(long_messages),
    ONCE(long_messages_fused),
    ONCE(no_object_is_left),
    {0},
};
