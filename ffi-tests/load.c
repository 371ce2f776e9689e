/*
 * Loading: what NCCL finds when it opens the library, on a machine with a working verbs library, with none, with a
 * file that is none, and with no device. None of the failures may take the process down, and each says why once.
 */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net.h"

/* Every slot that NCCL calls without looking, and those that it allows to be NULL. */
struct slot {
    const char *name;
    size_t offset;
    int from; /* first version that has it */
    bool optional;
};
static const struct slot slots[] = {
    {"init", 8, 6, false},          {"devices", 16, 6, false},       {"getProperties", 24, 6, false},
    {"listen", 32, 6, false},       {"connect", 40, 6, false},       {"accept", 48, 6, false},
    {"regMr", 56, 6, false},        {"regMrDmaBuf", 64, 6, true},    {"deregMr", 72, 6, false},
    {"isend", 80, 6, false},        {"irecv", 88, 6, false},         {"iflush", 96, 6, false},
    {"test", 104, 6, false},        {"closeSend", 112, 6, false},    {"closeRecv", 120, 6, false},
    {"closeListen", 128, 6, false}, {"getDeviceMr", 136, 7, true},   {"irecvConsumed", 144, 7, true},
    {"makeVDevice", 152, 9, true},  {"finalize", 160, 11, false},    {"setNetAttr", 168, 11, true},
};

static void table(int version)
{
    struct net net;
    net_load(&net, version);
    CHECK_STR(*(const char *const *)net.table, "pinrail");
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        if (version < slots[i].from) continue;
        const void *function = net_slot(&net, slots[i].offset);
        Dl_info info;
        if (!function && slots[i].optional) printf("%s is NULL\n", slots[i].name);
        if (!function && slots[i].optional) continue;
        if (!function) FAIL("slot %s is NULL", slots[i].name);
        CHECK(dladdr(function, &info) != 0);
        if (!strstr(info.dli_fname, "pinrail"))
            FAIL("slot %s leads into %s", slots[i].name, info.dli_fname);
    }
    net_unload(&net);
}

/* The symbol is data, exactly as large as the version's table: a longer or shorter one would be another version's. */
static void symbol(int version)
{
    struct net net;
    Dl_info info;
    const ElfW(Sym) *entry = NULL;
    char name[32];
    net_load(&net, version);
    snprintf(name, sizeof name, "ncclNetPlugin_v%d", version);
    CHECK(dladdr1(net.table, &info, (void **)&entry, RTLD_DL_SYMENT) != 0);
    CHECK_STR(info.dli_sname, name);
    CHECK_PTR(info.dli_saddr, net.table);
    CHECK(entry != NULL);
    CHECK_EQ(ELF64_ST_TYPE(entry->st_info), STT_OBJECT);
    CHECK_EQ(entry->st_size, net_table_size(version));
    net_unload(&net);
}

static void other_versions(void)
{
    struct net net;
    static const char *const kinds[] = {"ncclNetPlugin", "ncclCollNetPlugin", "ncclGinPlugin", "ncclRmaPlugin",
                                        "ncclTunerPlugin", "ncclProfiler"};
    net_load(&net, LAST_VERSION);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (int v = 1; v <= 40; v++) {
            char name[64];
            bool wanted = kind == 0 && v >= FIRST_VERSION && v <= LAST_VERSION;
            snprintf(name, sizeof name, "%s_v%d", kinds[kind], v);
            if ((dlsym(net.library, name) != NULL) != wanted) FAIL("%s %s", name, wanted ? "absent" : "present");
        }
    net_unload(&net);
}

static void absent_versions(int version)
{
    (void)version;
    other_versions();
}

/* RTLD_LOCAL: nothing of the plugin, and nothing of a library it opens, becomes visible to the program. */
static void stays_local(int version)
{
    static const char *const names[] = {"ncclNetPlugin_v12", "pinrail_version", "ibv_open_device", "rust_eh_personality"};
    struct net net;
    net_start(&net, version);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (dlsym(RTLD_DEFAULT, names[i])) FAIL("%s is visible to the whole program", names[i]);
    net_stop(&net);
}

static void loaded_twice(int version)
{
    struct net first, second;
    net_start(&first, version);
    net_load(&second, version);
    CHECK_PTR(second.table, first.table); /* GIN and tuner code opens the library again by name */
    net_unload(&second);
    int ndev = -1;
    CHECK_OK(net_devices(&first, &ndev));
    CHECK(ndev >= 1);
    net_stop(&first);
}

/* Loading alone must touch nothing: NCCL opens every candidate of a list before it chooses. */
static void loading_does_nothing(int version)
{
    struct net net;
    struct census before = census_take();
    net_load(&net, version);
    struct census after = census_take();
    CHECK_EQ(after.threads, before.threads);
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK(!is_mapped("libibverbs"));
    net_unload(&net);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

/*
 * init, then devices, as NCCL does: one of them has to fail or there are no devices; either way the reason is in the
 * log, once. NCCL up to 2.28.3 calls finalize after a failed init with whatever the context is, and tries again later.
 */
static void expect_unusable(int version, const char *reason)
{
    struct net net;
    net_load(&net, version);
    for (int attempt = 0; attempt < 2; attempt++) {
        size_t mark = log_mark();
        int ndev = 0x5bad;
        net.context = NULL;
        ncclResult_t result = net_init(&net, 7, ffi_logger);
        if (result == ncclSuccess) {
            result = net_devices(&net, &ndev);
            if (result == ncclSuccess && ndev != 0) FAIL("%d devices", ndev);
        }
        if (result != ncclSuccess && !ffi_is_error(result)) FAIL("result %d", (int)result);
        if (attempt == 0) CHECK_EQ(log_matches_since(mark, reason), 1);
        CHECK_OK(net_finalize(&net, net.context));
    }
    CHECK_OK(net_finalize(&net, NULL));
    net_unload(&net);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

static void no_verbs_library(int version)
{
    setenv("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1", 1);
    expect_unusable(version, "cannot open the verbs library /nonexistent/libibverbs.so.1");
}

static void not_a_verbs_library(int version)
{
    setenv("NCCL_IBVERBS_LIB", "libm.so.6", 1);
    expect_unusable(version, "libm.so.6 has no ibv_");
}

static void no_device(int version)
{
    setenv("SOFTRNIC_DEVICES", "0", 1);
    expect_unusable(version, "no usable RDMA port");
}

static void no_device_passes_the_filter(int version)
{
    setenv("NCCL_IB_HCA", "=no_such_hca", 1);
    expect_unusable(version, "no usable RDMA port");
}

static void failing_without_a_logger(int version)
{
    struct net net;
    int ndev = 0x5bad;
    setenv("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1", 1);
    net_load(&net, version);
    ncclResult_t result = net_init(&net, 7, NULL);
    if (result == ncclSuccess) result = net_devices(&net, &ndev);
    CHECK(result != ncclSuccess || ndev == 0);
    net_unload(&net);
}

/* Calls that NCCL does not make before init, but a wrong caller might: an answer, not a crash. */
static void used_before_init(int version)
{
    struct net net;
    struct net_properties properties;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    int ndev = 0x5bad;
    void *comm = NULL;
    net_load(&net, version);
    ncclResult_t result = net_devices(&net, &ndev);
    CHECK(ffi_is_error(result) || (result == ncclSuccess && ndev >= 0));
    result = net_get_properties(&net, 0, &properties);
    CHECK(ffi_is_error(result) || result == ncclSuccess);
    CHECK_REFUSED(net_connect(&net, 0, handle, &comm));
    CHECK_OK(net_finalize(&net, NULL));
    net_unload(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(table),
    EACH(symbol),
    ONCE(absent_versions),
    EACH(stays_local),
    EACH(loaded_twice),
    EACH(loading_does_nothing),
    EACH(no_verbs_library),
    EACH(not_a_verbs_library),
    EACH(no_device),
    EACH(no_device_passes_the_filter),
    EACH(failing_without_a_logger),
    EACH(used_before_init),
    {0},
};
