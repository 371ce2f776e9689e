/*
 * Fused devices: one connection over several rails, with equal and unequal numbers of them on the two ends.
 */
#include "pair.h"
#include "softrnic.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

static bool has_come(const struct guarded *to, const uint8_t *wanted, size_t offset, size_t size)
{
    return memcmp(to->data + offset, wanted + offset, size) == 0;
}

static bool is_untouched(const struct guarded *to, size_t offset, size_t size)
{
    uint8_t guard = to->data[-1];
    for (size_t i = offset; i < offset + size; i++)
        if (to->data[i] != guard) return false;
    return true;
}

/*
 * One message over `members` rails whose shares end at `ends`, with each port down in turn: everything else arrives,
 * its share does not, and neither end is done before it has. Stock looks at the first four members only.
 */
static void done_after_all(int version, int members, const size_t *ends)
{
    struct net net;
    struct pair pair;
    int dev = fused(&net, version, members);
    size_t size = ends[members - 1];
    pair_open(&net, dev, &pair);
    struct guarded from = guarded_new(size, 0), to = guarded_new(size, 0);
    void *from_mr = register_host(&net, pair.send, from.data, size);
    void *to_mr = register_host(&net, pair.recv, to.data, size);
    pair_message(&pair, 1, 0, 0); /* credits go over the lanes in turn: now the next one's over lane 1 */
    for (int down = 0; down < members; down++) {
        char name[32];
        snprintf(name, sizeof name, "softrnic%d", down);
        guarded_reset(&to);
        pattern_fill(from.data, size, (uint64_t)down);
        void *receive = irecv(&net, pair.recv, to.data, size, 0, to_mr);
        rnic_port(name, false);
        void *send = isend(&net, pair.send, from.data, size, 0, from_mr);
        for (int part = 0; part < members; part++) {
            size_t at = part ? ends[part - 1] : 0;
            if (part != down) WAIT_UNTIL(has_come(&to, from.data, at, ends[part] - at), "the other shares");
        }
        for (int i = 0; i < 1000; i++) CHECK(!is_done(&net, send, NULL) && !is_done(&net, receive, NULL));
        size_t at = down ? ends[down - 1] : 0;
        if (!is_untouched(&to, at, ends[down] - at))
            FAIL("bytes %zu to %zu did not wait for %s", at, ends[down], name);
        rnic_port(name, true);
        CHECK_EQ(wait_size(&net, send), size);
        CHECK_EQ(wait_size(&net, receive), size);
        CHECK_BUFFER(&to, size, (uint64_t)down);
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
    pair_close(&pair);
    net_stop(&net);
}

static void done_after_all_eight(int version)
{
    static const size_t ends[] = {1024, 2048, 3072, 4096, 5120, 6144, 7168, 8000};
    (void)version;
    done_after_all(12, 8, ends);
}

/* 400, 200, 200 and 100 Gb/s: shares as 4 to 2 to 2 to 1. */
static void shares_as_fast_as_ports(int version)
{
    static const size_t ends[] = {4 << 16, 6 << 16, 8 << 16, 9 << 16};
    (void)version;
    setenv("SOFTRNIC_SPEED", "128,64,64,32", 1);
    done_after_all(11, 4, ends);
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

static void unequal_speeds(int version)
{
    (void)version;
    setenv("SOFTRNIC_SPEED", "32,128,2,64,256", 1);
    all_of_it(12, 5);
}

static void unequal_speeds_split_in_v9(int version)
{
    (void)version;
    setenv("SOFTRNIC_SPEED", "64,32", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", "3", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    all_of_it(9, 2);
}

static void unequal_speeds_with_adaptive_routing(int version)
{
    (void)version;
    setenv("SOFTRNIC_SPEED", "64,32,32", 1);
    setenv("NCCL_IB_ADAPTIVE_ROUTING", "1", 1);
    setenv("NCCL_IB_AR_THRESHOLD", "500", 1);
    all_of_it(12, 3);
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

/*
 * One rail here, eight there, and everything that can be in flight completes before anybody polls: the queue of the one
 * rail has room for the completions of all eight lanes. Stock's is as large as for one.
 */
static void completions_of_more_rails_over_there(int version)
{
    enum { FLIGHT = 32, SIZE = 4096 };
    struct net net;
    struct pair pair;
    void *sends[FLIGHT], *receives[FLIGHT];
    (void)version;
    int dev = fused(&net, 12, 8);
    for (int way = 0; way < 2; way++) {
        pair_open_between(&net, way ? dev : 0, way ? 0 : dev, &pair);
        struct guarded from = guarded_new(FLIGHT * SIZE, 0), to = guarded_new(FLIGHT * SIZE, 0);
        void *from_mr = register_host(&net, pair.send, from.data, from.size);
        void *to_mr = register_host(&net, pair.recv, to.data, to.size);
        guarded_reset(&to);
        pattern_fill(from.data, from.size, 7);
        for (int i = 0; i < FLIGHT; i++)
            receives[i] = irecv(&net, pair.recv, to.data + i * SIZE, SIZE, 0, to_mr);
        rnic_hold(true);
        for (int i = 0; i < FLIGHT; i++) sends[i] = isend(&net, pair.send, from.data + i * SIZE, SIZE, 0, from_mr);
        CHECK_EQ(rnic_release(UINT64_MAX), FLIGHT * 8);
        rnic_hold(false);
        CHECK_EQ(rnic_counts().cq_overruns, 0);
        for (int i = 0; i < FLIGHT; i++) {
            CHECK_EQ(wait_size(&net, sends[i]), SIZE);
            CHECK_EQ(wait_size(&net, receives[i]), SIZE);
        }
        CHECK_BUFFER(&to, to.size, 7);
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        guarded_free(&from);
        guarded_free(&to);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* A registration that a later member refuses takes the earlier ones back. Stock forgets those of DMA-BUFs. */
static void refused_by_a_later_member(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    int dev = fused(&net, 12, 8), fd = memfd_create("buffer", 0);
    struct guarded buffer = guarded_new(8192, 0);
    CHECK(fd >= 0 && ftruncate(fd, 16384) == 0);
    uint64_t offset = (uintptr_t)buffer.data % 4096; /* as far into a page as the address */
    pair_open(&net, dev, &pair);
    uint64_t before = rnic_counts().mrs;
    /* The probes that explain a failure register too, and leave nothing either. */
    for (int member = 1; member <= 8; member++) {
        for (int dmabuf = 0; dmabuf < 2; dmabuf++) {
            void *mr = GARBAGE;
            rnic_fail_registrations_from((uint64_t)member);
            ncclResult_t result =
                dmabuf ? net_reg_mr_dmabuf(&net, pair.recv, buffer.data, 8192, NCCL_PTR_CUDA, offset, fd, &mr)
                       : net_reg_mr(&net, pair.recv, buffer.data, 8192, NCCL_PTR_HOST, &mr);
            rnic_fail_registrations_from(0);
            if (!ffi_is_error(result)) FAIL("refused by member %d, and yet %s", member, ffi_result_name(result));
            CHECK_EQ(rnic_counts().mrs, before);
        }
    }
    /* Nobody refuses: eight each. */
    void *host = register_host(&net, pair.recv, buffer.data, 8192), *dma = GARBAGE;
    CHECK_OK(net_reg_mr_dmabuf(&net, pair.recv, buffer.data, 8192, NCCL_PTR_CUDA, offset, fd, &dma));
    CHECK_EQ(rnic_counts().mrs, before + 16);
    CHECK_OK(net_dereg_mr(&net, pair.recv, host));
    CHECK_OK(net_dereg_mr(&net, pair.recv, dma));
    CHECK_EQ(rnic_counts().mrs, before);
    pair_message(&pair, 10000, 0, 1);
    close(fd);
    guarded_free(&buffer);
    pair_close(&pair);
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

/* What a fused device says of itself; four members at most before v12. */
static void properties_in(int version)
{
    struct net net;
    struct net_properties p, first;
    char name[128] = "softrnic0";
    setenv("SOFTRNIC_SPEED", "64,32", 1); /* 200, then 100 Gb/s */
    setenv("NCCL_IB_HCA", "=softrnic0:1:5:2,softrnic1:1:5:4,softrnic2:1:6:4,softrnic3:1:6,"
                          "softrnic4,softrnic5,softrnic6,softrnic7", 1);
    int members = version >= 12 ? 8 : 4;
    for (int i = 1; i < members; i++) snprintf(name + strlen(name), sizeof name - strlen(name), "+softrnic%d", i);
    int dev = fused(&net, version, members);
    CHECK_OK(net_get_properties(&net, 0, &first));
    CHECK_EQ(first.speed, 200000);
    CHECK_OK(net_get_properties(&net, dev, &p));
    CHECK_STR(p.name, name);
    CHECK_EQ(p.speed, 200000 + (members - 1) * 100000);
    CHECK_EQ(p.ndevs, members);
    for (int i = 0; i < members; i++) CHECK_EQ(p.devs[i], i);
    CHECK_EQ(p.ptrSupport, first.ptrSupport);
    CHECK_EQ(p.railId, -1); /* the members' differ */
    CHECK_EQ(p.planeId, -1);
    if (version >= 12) {
        static const int ids[][2] = {{5, 2}, {5, 4}, {6, 4}, {6, -1}, {-1, -1}};
        for (int i = 0; i < 5; i++) {
            CHECK_OK(net_get_properties(&net, i, &p));
            CHECK_EQ(p.railId, ids[i][0]);
            CHECK_EQ(p.planeId, ids[i][1]);
        }
        CHECK_OK(net_get_properties(&net, net_fuse(&net, 2), &p));
        CHECK_EQ(p.railId, 5);
        CHECK_EQ(p.planeId, 1 << 14 | 3); /* the first and the second plane of this host */
        CHECK_OK(net_get_properties(&net, net_fuse(&net, 3), &p));
        CHECK_EQ(p.railId, -1);
        CHECK_EQ(p.planeId, 1 << 14 | 3);
    }
    net_stop(&net);
}

static void properties(int version)
{
    for (version = 9; version <= LAST_VERSION; version++) properties_in(version);
}

/* NCCL_IB_MERGE_NICS=0 refuses to fuse, and what cannot be fused is refused without a trace. */
static void refusals_in(int version)
{
    struct net net;
    int made, count;
    setenv("SOFTRNIC_DEVICES", "4", 1);
    setenv("SOFTRNIC_LINK", "ethernet,ethernet,ib", 1);
    for (int merge = 1; merge >= 0; merge--) {
        static const struct { int ndevs, devs[5]; bool ok; } rows[] = {
            {2, {0, 1}, true}, {2, {3, 2}, true}, {1, {1}, true}, {2, {1, 2}, false}, {2, {0, 0}, false},
            {2, {0, 4}, false}, {2, {0, -1}, false}, {0, {0}, false}, {9, {0}, false},
        };
        setenv("NCCL_IB_MERGE_NICS", merge ? "1" : "0", 1);
        net_start(&net, version);
        int good = 4;
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            ncclNetVDeviceProps8_t eight = {.ndevs = rows[i].ndevs};
            ncclNetVDeviceProps4_t four = {.ndevs = rows[i].ndevs};
            for (int k = 0; k < 5; k++) eight.devs[k] = rows[i].devs[k];
            for (int k = 0; k < 4; k++) four.devs[k] = rows[i].devs[k];
            made = 77;
            ncclResult_t result = version >= 12 ? ((const ncclNet_v12_t *)net.table)->makeVDevice(&made, &eight)
                                                : ((const ncclNet_v9_t *)net.table)->makeVDevice(&made, &four);
            bool ok = rows[i].ok && (merge || rows[i].ndevs == 1);
            if ((result == ncclSuccess) != ok) FAIL("row %zu: %s", i, ffi_result_name(result));
            if (ok) CHECK_EQ(made, good++);
            CHECK_OK(net_devices(&net, &count));
            CHECK_EQ(count, good);
        }
        net_stop(&net);
    }
}

static void refusals(int version)
{
    for (version = 9; version <= LAST_VERSION; version++) refusals_in(version);
}

/* NCCL fuses once per process, and uses the number with the next communicator, after the last one was finalized. */
static void fused_once_in(int version)
{
    struct net net;
    struct pair pair;
    struct net_properties p;
    int count;
    int dev = fused(&net, version, 3);
    CHECK_OK(net_finalize(&net, net.context));
    CHECK_OK(net_init_context(&net, 2, ffi_logger, &net.context));
    CHECK_OK(net_devices(&net, &count));
    CHECK_EQ(count, RAILS); /* whoever begins anew counts ports */
    CHECK_OK(net_get_properties(&net, dev, &p));
    CHECK_EQ(p.ndevs, 3);
    CHECK_REFUSED(net_get_properties(&net, dev + 1, &p));
    pair_open(&net, dev, &pair);
    pair_message(&pair, 100000, 0, 1);
    pair_close(&pair);
    CHECK_EQ(net_fuse(&net, 2), dev); /* and fuses them itself */
    CHECK_OK(net_get_properties(&net, dev, &p));
    CHECK_EQ(p.ndevs, 2);
    net_stop(&net);
}

static void fused_once(int version)
{
    for (version = 11; version <= LAST_VERSION; version++) fused_once_in(version);
}

static void plant(const char *root, const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *slash = full + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(full, 0700) != 0 && errno != EEXIST) FAIL("mkdir %s: %s", full, strerror(errno));
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) FAIL("%s: %s", full, strerror(errno));
}

/* Queue pairs of one end of a connection between devices that have these interfaces. */
static int lanes_between(int version, const char *root, const char *given)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_SYSFS", root, 1);
    setenv("PINRAIL_FLUSH", "never", 1);
    if (given) setenv("NCCL_IB_QPS_PER_CONNECTION", given, 1);
    else unsetenv("NCCL_IB_QPS_PER_CONNECTION");
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    uint64_t qps = rnic_counts().qps;
    for (int i = 0; i < 100; i++) pair_message(&pair, (size_t)i * 50, i, (uint64_t)i);
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(qps % 2, 0);
    return (int)qps / 2;
}

/* One queue pair stays on one link of a bond, so there is one for each unless somebody said otherwise. */
static void bonds(int version)
{
    static const struct { const char *slaves; int lanes; } rows[] = {
        {"eth0 eth1\n", 2}, {"eth0\n", 1}, {"\n", 1}, {"a b c d e f\n", 4},
    };
    char root[] = "/tmp/pinrail-rails-XXXXXX", command[64];
    CHECK(mkdtemp(root) != NULL);
    plant(root, "class/infiniband/softrnic0/ports/1/gid_attrs/ndevs/0", "bond7\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        plant(root, "class/net/bond7/bonding/slaves", rows[i].slaves);
        CHECK_EQ(lanes_between(version, root, NULL), rows[i].lanes);
        CHECK_EQ(lanes_between(version, root, "1"), 1);
        CHECK_EQ(lanes_between(version, root, "6"), 6);
    }
    /* A VLAN on top, and no bond at all. */
    plant(root, "class/infiniband/softrnic0/ports/1/gid_attrs/ndevs/0", "vlan9\n");
    plant(root, "class/net/vlan9/lower_bond7", "");
    CHECK_EQ(lanes_between(version, root, NULL), 4);
    plant(root, "class/infiniband/softrnic0/ports/1/gid_attrs/ndevs/0", "eth0\n");
    plant(root, "class/net/eth0/address", "");
    CHECK_EQ(lanes_between(version, root, NULL), 1);
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQ(system(command), 0);
}

/* A limit holds the plugin's own memory for one rail and not for the next: the verdict is there as for one. */
static void own_memory_refused_by_a_later_member(int version)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *send = NULL;
    ncclResult_t result = ncclSuccess;
    (void)version;
    setenv("SOFTRNIC_MEMLOCK", "16384", 1);
    int dev = fused(&net, LAST_VERSION, 2);
    CHECK_OK(net_listen(&net, dev, handle, &listener));
    size_t mark = log_mark();
    WAIT_UNTIL((result = net_connect(&net, dev, handle, &send)) != ncclSuccess, "connect to be refused");
    CHECK(ffi_is_error(result));
    CHECK_EQ(log_matches_since(mark, "softrnic1"), 1);
    CHECK_EQ(log_matches_since(mark, "Verdict: "), 1);
    CHECK_OK(net_close_listen(&net, listener));
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    ONCE(two), ONCE(two_in_v9), ONCE(three), ONCE(four_in_v11), ONCE(eight), ONCE(two_with_four_qps_split),
    ONCE(unequal_ends), ONCE(flush_reads_on_every_rail),
    ONCE(done_after_all_eight), ONCE(shares_as_fast_as_ports), ONCE(unequal_speeds), ONCE(unequal_speeds_split_in_v9),
    ONCE(unequal_speeds_with_adaptive_routing), ONCE(completions_of_more_rails_over_there),
    ONCE(refused_by_a_later_member), ONCE(own_memory_refused_by_a_later_member), ONCE(properties), ONCE(refusals), ONCE(fused_once), EACH(bonds), {0},
};
