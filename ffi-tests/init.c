/*
 * Before any connection: init as often as NCCL does it, devices, properties with every byte written, and arguments
 * that are out of range or NULL, which must be answered with an error code.
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net.h"

static void without_a_logger(int version)
{
    struct net net;
    int ndev = -1;
    net_load(&net, version);
    CHECK_OK(net_init(&net, 1, NULL));
    CHECK_OK(net_devices(&net, &ndev));
    CHECK(ndev >= 1);
    net_stop(&net);
}

/* v11 and v12 call init for every communicator, each with a context of its own, finalized in any order. */
static void several_times(int version)
{
    enum { INITS = 5 };
    static const int order[INITS] = {1, 4, 0, 3, 2};
    struct net net;
    void *contexts[INITS];
    net_load(&net, version);
    for (int i = 0; i < INITS; i++) {
        int ndev = -1;
        contexts[i] = (void *)(uintptr_t)0x5bad5bad;
        CHECK_OK(net_init_context(&net, (uint64_t)i, ffi_logger, &contexts[i]));
        if (version >= 11) CHECK(contexts[i] != (void *)(uintptr_t)0x5bad5bad);
        CHECK_OK(net_devices(&net, &ndev));
        CHECK(ndev >= 1);
    }
    for (int i = 0; i < INITS; i++) {
        int ndev = -1;
        CHECK_OK(net_devices(&net, &ndev));
        CHECK(ndev >= 1);
        CHECK_OK(net_finalize(&net, contexts[order[i]]));
    }
    /* NCCL starts again after its count went back to zero. */
    CHECK_OK(net_init(&net, 9, ffi_logger));
    int ndev = -1;
    CHECK_OK(net_devices(&net, &ndev));
    CHECK(ndev >= 1);
    net_stop(&net);
}

static void counts_devices(int version)
{
    struct net net;
    int ndev = -1;
    setenv("SOFTRNIC_DEVICES", "3", 1);
    setenv("SOFTRNIC_PORTS", "2", 1);
    net_load(&net, version);
    CHECK_OK(net_init(&net, 1, ffi_logger));
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 6); /* one per active port */
    for (int a = 0; a < ndev; a++) {
        struct net_properties first, second;
        CHECK_OK(net_get_properties(&net, a, &first));
        for (int b = a + 1; b < ndev; b++) {
            CHECK_OK(net_get_properties(&net, b, &second));
            /* guid and port say "same physical port" to NCCL, which then shares the bandwidth */
            if (first.guid == second.guid && first.port == second.port) FAIL("devices %d and %d look the same", a, b);
        }
    }
    net_stop(&net);
}

/* Padding belongs to nobody; every other byte has to be written. */
static bool is_padding(int version, size_t offset)
{
    switch (version) {
    case 8: return offset >= 60;
    case 9:
    case 10: return offset >= 84 && offset < 88;
    case 11: return (offset >= 84 && offset < 88) || offset >= 108;
    case 12: return offset >= 100 && offset < 104;
    default: return false;
    }
}

static void every_property_is_written(int version)
{
    enum { BEHIND = 64, MOST = 128 + BEHIND };
    struct net net;
    unsigned char first[MOST], second[MOST];
    size_t size = net_properties_size(version);
    net_start(&net, version);
    memset(first, 0xA5, sizeof first);
    memset(second, 0x5A, sizeof second);
    CHECK_OK(net_get_properties_raw(&net, 0, first));
    CHECK_OK(net_get_properties_raw(&net, 0, second));
    for (size_t i = 0; i < size; i++)
        if (!is_padding(version, i) && first[i] != second[i])
            FAIL("byte %zu of the properties was 0x%02x, then 0x%02x: not written", i, first[i], second[i]);
    for (size_t i = size; i < sizeof first; i++)
        if (first[i] != 0xA5 || second[i] != 0x5A) FAIL("byte %zu, behind the properties, was written", i);
    net_stop(&net);
}

static void properties_are_true(int version)
{
    struct net net;
    struct net_properties p;
    net_start(&net, version);
    CHECK_OK(net_get_properties(&net, 0, &p));
    CHECK(p.name != NULL && strlen(p.name) > 0 && strlen(p.name) < 256);
    CHECK(p.pciPath == NULL || p.pciPath[0] == '/');
    CHECK(p.ptrSupport & NCCL_PTR_HOST);
    CHECK_EQ(p.ptrSupport & ~(NCCL_PTR_HOST | NCCL_PTR_CUDA | NCCL_PTR_DMABUF), 0);
    CHECK(p.regIsGlobal == 0 || p.regIsGlobal == 1);
    CHECK(p.forceFlush == 0 || p.forceFlush == 1);
    CHECK(p.speed > 0);
    CHECK(p.port >= 1);
    CHECK(isfinite(p.latency) && p.latency >= 0);
    CHECK(p.maxComms > 0);
    CHECK_EQ(p.maxRecvs, 8);
    CHECK_EQ(p.netDeviceType, NCCL_NET_DEVICE_HOST);
    CHECK_EQ(p.netDeviceVersion, 0);
    CHECK_EQ(p.ndevs, 1);
    CHECK_EQ(p.devs[0], 0);
    /* test() reports sizes in an int, so nothing above INT_MAX is true; below 2^30 NCCL's own slices would not fit. */
    CHECK(p.maxP2pBytes >= (size_t)1 << 30);
    CHECK(p.maxP2pBytes <= INT_MAX);
    CHECK(p.maxCollBytes > 0 && p.maxCollBytes <= (size_t)1 << 40);
    CHECK(p.maxMultiRequestSize >= 1);
    CHECK(p.railId >= -1);
    CHECK(p.planeId >= -1);
    printf("%s guid %llx ptr %d speed %d port %d comms %d p2p %zu\n", p.name, (unsigned long long)p.guid, p.ptrSupport,
           p.speed, p.port, p.maxComms, p.maxP2pBytes);
    net_stop(&net);
}

/* NCCL keeps the two strings beyond the call. */
static void strings_stay(int version)
{
    struct net net;
    struct net_properties before, after;
    net_start(&net, version);
    CHECK_OK(net_get_properties(&net, 0, &before));
    char *copy = strdup(before.name);
    for (int i = 0; i < 100; i++) {
        int ndev;
        CHECK_OK(net_devices(&net, &ndev));
        CHECK_OK(net_get_properties(&net, 0, &after));
        CHECK_PTR(after.name, before.name);
        CHECK_PTR(after.pciPath, before.pciPath);
    }
    CHECK_STR(before.name, copy);
    free(copy);
    net_stop(&net);
}

static void device_out_of_range(int version)
{
    struct net net;
    struct net_properties p;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    int ndev = -1;
    net_start(&net, version);
    CHECK_OK(net_devices(&net, &ndev));
    int wrong[] = {-1, ndev, ndev + 1, 128, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        void *comm = NULL;
        CHECK_REFUSED(net_get_properties(&net, wrong[i], &p));
        CHECK_REFUSED(net_listen(&net, wrong[i], handle, &comm));
        CHECK_PTR(comm, NULL);
    }
    CHECK_OK(net_get_properties(&net, 0, &p));
    void *listener = NULL;
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char copy[NCCL_NET_HANDLE_MAXSIZE];
        void *comm = NULL;
        memcpy(copy, handle, sizeof copy);
        CHECK_REFUSED(net_connect(&net, wrong[i], copy, &comm));
        CHECK_PTR(comm, NULL);
    }
    CHECK_OK(net_close_listen(&net, listener));
    net_stop(&net);
}

static void null_arguments(int version)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    char byte[64];
    void *out = NULL;
    int done = 0;
    void *data[1] = {byte};
    size_t sizes[1] = {sizeof byte};
    int flush_sizes[1] = {1}, tags[1] = {0};
    void *mhandles[1] = {NULL};
    net_start(&net, version);
    CHECK_REFUSED(net_devices(&net, NULL));
    CHECK_REFUSED(net_get_properties_raw(&net, 0, NULL));
    CHECK_REFUSED(net_listen(&net, 0, NULL, &out));
    CHECK_REFUSED(net_listen(&net, 0, handle, NULL));
    CHECK_REFUSED(net_connect(&net, 0, NULL, &out));
    CHECK_REFUSED(net_accept(&net, NULL, &out));
    CHECK_REFUSED(net_reg_mr(&net, NULL, byte, sizeof byte, NCCL_PTR_HOST, &out));
    CHECK_REFUSED(net_reg_mr_dmabuf(&net, NULL, byte, sizeof byte, NCCL_PTR_CUDA, 0, -1, &out));
    CHECK_REFUSED(net_isend(&net, NULL, byte, sizeof byte, 0, NULL, &out));
    CHECK_REFUSED(net_irecv(&net, NULL, 1, data, sizes, tags, mhandles, &out));
    CHECK_REFUSED(net_iflush(&net, NULL, 1, data, flush_sizes, mhandles, &out));
    CHECK_REFUSED(net_test(&net, NULL, &done, NULL));
    CHECK_PTR(out, NULL);
    /* Closing nothing: NCCL does not do it; an error and success are both an answer, a crash is not. */
    (void)net_close_send(&net, NULL);
    (void)net_close_recv(&net, NULL);
    (void)net_close_listen(&net, NULL);
    (void)net_dereg_mr(&net, NULL, NULL);
    if (version >= 11) CHECK_REFUSED(net_init_context(&net, 1, ffi_logger, NULL));
    net_stop(&net);
}

static void attributes(int version)
{
    struct net net;
    net_start(&net, version);
    ncclNetAttr_t attr = {.sendCommAttr = {4, 1, 2, 1}, .recvCommAttr = {4, 1, 2, 1}, .op = 1u << 4, .algo = 2, .proto = 4};
    const ncclNet_v11_t *table = net.table; /* v12 has the slot at the same place with the same signature */
    if (version >= 11 && table->setNetAttr) {
        CHECK_OK(table->setNetAttr(net.context, &attr));
        attr.op = attr.algo = attr.proto = (uint32_t)-1;
        CHECK_OK(table->setNetAttr(net.context, &attr));
    }
    net_stop(&net);
}

/* Fusing is NCCL's wish; refusing is allowed, but a wrong request must be refused and a success must be a device. */
static void virtual_devices(int version)
{
    struct net net;
    ncclNetVDeviceProps8_t wanted = {.ndevs = 2, .devs = {0, 1000}};
    int before = 0, after = 0, made = -1;
    net_start(&net, version);
    CHECK_OK(net_devices(&net, &before));
    const ncclNet_v12_t *table = net.table;
    if (version >= 9 && table->makeVDevice) {
        CHECK_REFUSED(table->makeVDevice(&made, &wanted));
        wanted = (ncclNetVDeviceProps8_t){.ndevs = 0};
        CHECK_REFUSED(table->makeVDevice(&made, &wanted));
        wanted = (ncclNetVDeviceProps8_t){.ndevs = 99};
        CHECK_REFUSED(table->makeVDevice(&made, &wanted));
        CHECK_REFUSED(table->makeVDevice(&made, NULL));
    }
    CHECK_OK(net_devices(&net, &after));
    CHECK_EQ(after, before);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(without_a_logger),
    EACH(several_times),
    EACH(counts_devices),
    EACH(every_property_is_written),
    EACH(properties_are_true),
    EACH(strings_stay),
    EACH(device_out_of_range),
    EACH(null_arguments),
    EACH(attributes),
    EACH(virtual_devices),
    {0},
};
