/*
 * Memory from pinrail_host_alloc: pinned in the right order, used by every registration of a part of it, alive until it
 * is freed whatever NCCL and the application unload, and gone without a trace afterwards.
 *
 * All memory is in CMA here, as the software RNIC's page ledger has it: a short pin that comes first would make every
 * later registration of the page fail.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../include/pinrail.h"
#include "fakecuda.h"
#include "pair.h"
#include "softrnic.h"

enum { PAGE = 4096, DEVICES = 2, IN_CMA = 4, ANY_NODE = -1 };

/* ---- the library under test, its verbs and its driver --------------------------------------------------------- */

struct api {
    void *library;
    __typeof__(&pinrail_host_alloc) alloc;
    __typeof__(&pinrail_host_free) free;
};

static void *symbol(void *library, const char *name)
{
    void *address = dlsym(library, name);
    if (!address) FAIL("dlsym: %s", dlerror());
    return address;
}

static struct api api_load(void)
{
    void *library = dlopen(plugin_path(), RTLD_NOW | RTLD_LOCAL);
    if (!library) FAIL("dlopen: %s", dlerror());
    return (struct api){
        .library = library,
        .alloc = (__typeof__(&pinrail_host_alloc))symbol(library, "pinrail_host_alloc"),
        .free = (__typeof__(&pinrail_host_free))symbol(library, "pinrail_host_free"),
    };
}

static void api_unload(const struct api *api)
{
    CHECK_EQ(dlclose(api->library), 0);
}

/* The software RNIC, open over the whole case so that it can be asked when the plugin is gone, with all memory in CMA. */
static void rnic_start(void)
{
    char devices[8];
    snprintf(devices, sizeof devices, "%d", DEVICES);
    setenv("SOFTRNIC_DEVICES", devices, 0);
    setenv("SOFTRNIC_CMA", "all", 0);
    setenv("PINRAIL_REG_FALLBACK", "fail", 0); /* a registration that cannot be is one that fails */
    setenv("PINRAIL_LOG", "debug", 0);
    if (!dlopen(softrnic_path(), RTLD_NOW | RTLD_LOCAL)) FAIL("dlopen: %s", dlerror());
}

/* Every page of an allocation is where it may stay, held by each device and by so many others. */
static void check_pages(const uint8_t *memory, size_t size, unsigned others)
{
    for (size_t at = 0; at < size; at += PAGE) {
        struct rnic_page page = rnic_page(memory + at);
        if (page.migratetype == IN_CMA) FAIL("the page at %zu is in CMA", at);
        CHECK_EQ(page.long_pins, DEVICES);
        CHECK_EQ(page.short_pins, others);
    }
}

static struct {
    void (*current)(int);
    void (*refuse)(int);
    void (*refuse_context)(int);
    void (*reset)(void);
    int (*retained)(void);
    size_t (*calls)(struct fake_cuda_call *, size_t);
} cuda;

static void cuda_load(void)
{
    char path[4096] = "";
    CHECK(readlink("/proc/self/exe", path, sizeof path - 16) > 0);
    strcpy(strrchr(path, '/'), "/libcuda.so.1");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) FAIL("dlopen: %s", dlerror());
    cuda.current = (void (*)(int))symbol(library, "fake_cuda_current");
    cuda.refuse = (void (*)(int))symbol(library, "fake_cuda_refuse");
    cuda.refuse_context = (void (*)(int))symbol(library, "fake_cuda_refuse_context");
    cuda.reset = (void (*)(void))symbol(library, "fake_cuda_reset");
    cuda.retained = (int (*)(void))symbol(library, "fake_cuda_retained");
    cuda.calls = (size_t(*)(struct fake_cuda_call *, size_t))symbol(library, "fake_cuda_calls");
}

static void *alloc_with(const struct api *api, size_t size, unsigned flags)
{
    void *memory = GARBAGE;
    CHECK_EQ(api->alloc(size, flags, ANY_NODE, &memory), 0);
    CHECK(memory != NULL && memory != GARBAGE);
    return memory;
}

static uint8_t *alloc(const struct api *api, size_t size)
{
    return alloc_with(api, size, 0);
}

static void alloc_fails(const struct api *api, size_t size, unsigned flags, int node, int want)
{
    void *memory = GARBAGE;
    size_t mark = log_mark();
    CHECK_EQ(api->alloc(size, flags, node, &memory), want);
    CHECK_PTR(memory, NULL);
    CHECK_EQ(log_warnings_since(mark), 1);
}

static bool is_mapped_at(void *address)
{
    unsigned char resident;
    return mincore(address, 1, &resident) == 0;
}

/* As expect_gone, but for address space: threads of a program leave some of it with the C library. */
static void expect_gone_but_space(struct census before)
{
    if (is_mapped("libnccl-net-pinrail")) FAIL("the library is still mapped");
    WAIT_UNTIL(census_take().threads == before.threads, "the last thread to leave the list");
    if (census_take().descriptors != before.descriptors) census_print("left over");
    CHECK_EQ(census_take().descriptors, before.descriptors);
    struct rnic_counts counts = rnic_counts();
    CHECK_EQ(counts.mrs, 0);
    CHECK_EQ(counts.qps, 0);
    CHECK_EQ(counts.cqs, 0);
    CHECK_EQ(counts.pds, 0);
    CHECK_EQ(counts.contexts, 0);
}

/* One message from one place to another, both in memory of pinrail_host_alloc, registered as `type`. */
static void move(const struct pair *pair, uint8_t *from, uint8_t *to, size_t size, int type, uint64_t key)
{
    const struct net *net = pair->net;
    void *from_mr = GARBAGE, *to_mr = GARBAGE;
    uint64_t before = rnic_counts().mrs;
    CHECK_OK(net_reg_mr(net, pair->send, from, size, type, &from_mr));
    CHECK_OK(net_reg_mr(net, pair->recv, to, size, type, &to_mr));
    CHECK_EQ(rnic_counts().mrs, before);
    pattern_fill(from, size, key);
    memset(to, 0xC3, size);
    void *receive = irecv(net, pair->recv, to, size, 0, to_mr);
    void *send = isend(net, pair->send, from, size, 0, from_mr);
    CHECK_EQ(wait_size(net, send), size);
    CHECK_EQ(wait_size(net, receive), size);
    CHECK_EQ(pattern_mismatch(to, size, key), -1);
    CHECK_OK(net_dereg_mr(net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(net, pair->recv, to_mr));
    CHECK_EQ(rnic_counts().mrs, before);
}

static void move_both_ways(const struct pair *pair, uint8_t *memory, size_t size, uint64_t key)
{
    move(pair, memory, memory + size / 2, size / 2, NCCL_PTR_HOST, key);
    move(pair, memory, memory + size / 2, size / 2, NCCL_PTR_CUDA, key + 1);
}

/* ---- the order of pins ---------------------------------------------------------------------------------------- */

static void devices_first_then_the_gpu(int version)
{
    (void)version;
    enum { SIZE = 5 * PAGE + 1, WHOLE = 6 * PAGE };
    struct fake_cuda_call calls[2];
    rnic_start();
    cuda_load();
    cuda.current(1);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, SIZE);
    CHECK_EQ(cuda.calls(calls, 2), 1);
    CHECK_EQ(calls[0].name, FAKE_REGISTER);
    CHECK_PTR(calls[0].address, memory);
    CHECK_EQ(calls[0].size, WHOLE);
    CHECK_EQ(calls[0].flags, 3); /* portable, and mapped */
    CHECK_EQ(calls[0].regions, DEVICES);
    CHECK_EQ(calls[0].least_long, DEVICES);
    CHECK_EQ(calls[0].most_short, 0);
    CHECK_EQ(calls[0].pages_in_cma, 0);
    check_pages(memory, WHOLE, 1);
    CHECK_EQ(api.free(memory), 0);
    CHECK_EQ(cuda.calls(calls, 2), 2);
    CHECK_EQ(calls[1].name, FAKE_UNREGISTER);
    CHECK_PTR(calls[1].address, memory);
    CHECK_EQ(calls[1].regions, DEVICES);
    CHECK_EQ(calls[1].least_long, DEVICES);
    CHECK_EQ(calls[1].result, 0);
    CHECK_EQ(rnic_counts().mrs, 0);
    CHECK(!is_mapped_at(memory));
    api_unload(&api);
}

/* What the test rests on: with the weaker pin first, the same page cannot be registered. */
static void the_other_order_fails(int version)
{
    (void)version;
    struct net net;
    struct pair pair;
    void *mr = GARBAGE;
    rnic_start();
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    struct guarded memory = guarded_new(PAGE, 0);
    CHECK_EQ(rnic_page(memory.data).migratetype, IN_CMA);
    rnic_pin(memory.data, PAGE, false);
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, memory.data, PAGE, NCCL_PTR_HOST, &mr));
    rnic_unpin(memory.data, PAGE);
    CHECK_OK(net_dereg_mr(&net, pair.recv, register_host(&net, pair.recv, memory.data, PAGE)));
    pair_close(&pair);
    net_stop(&net);
}

/* Leaves the GPU out, says why, and pins the memory all the same. */
static void expect_no_gpu(const struct api *api, unsigned flags, const char *why)
{
    size_t mark = log_mark();
    uint8_t *memory = alloc_with(api, 3 * PAGE, flags);
    CHECK_EQ(log_matches_since(mark, "host memory for the application"), 1);
    CHECK_EQ(log_matches_since(mark, why), 1);
    CHECK_EQ(log_warnings_since(mark), 0);
    check_pages(memory, 3 * PAGE, 0);
    CHECK_EQ(api->free(memory), 0);
}

static void without_a_gpu(int version)
{
    (void)version;
    struct net net;
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    expect_no_gpu(&api, 0, "no CUDA driver is loaded");
    cuda_load();
    expect_no_gpu(&api, 0, "no CUDA context is current");
    cuda.current(1);
    expect_no_gpu(&api, PINRAIL_HOST_NO_CUDA, "not asked for");
    CHECK_EQ(cuda.calls(NULL, 0), 0);
    api_unload(&api);
    net_stop(&net);
}

static void the_gpu_refuses(int version)
{
    (void)version;
    struct net net;
    rnic_start();
    cuda_load();
    cuda.current(1);
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    size_t mark = log_mark();
    cuda.refuse(2); /* CUDA_ERROR_OUT_OF_MEMORY */
    alloc_fails(&api, PAGE, 0, ANY_NODE, ENOMEM);
    cuda.refuse(712); /* CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED */
    alloc_fails(&api, PAGE, 0, ANY_NODE, EIO);
    CHECK_EQ(log_matches_since(mark, "CUDA error 712"), 1);
    CHECK_EQ(rnic_counts().mrs, 0);
    CHECK_EQ(rnic_counts().contexts, 0);
    cuda.refuse(0);
    CHECK_EQ(api.free(alloc(&api, PAGE)), 0);
    api_unload(&api);
    net_stop(&net);
}

struct errand {
    const struct api *api;
    void *memory;
};

static void *free_elsewhere(void *argument)
{
    struct errand *errand = argument;
    CHECK_EQ(errand->api->free(errand->memory), 0);
    return NULL;
}

/* Frees on a thread without a context. */
static void free_on_another_thread(const struct api *api, void *memory)
{
    pthread_t thread;
    struct errand errand = {api, memory};
    uint64_t before = rnic_counts().mrs;
    CHECK_EQ(pthread_create(&thread, NULL, free_elsewhere, &errand), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(cuda.retained(), 0);
    CHECK_EQ(rnic_counts().mrs, before - DEVICES);
    CHECK(!is_mapped_at(memory));
}

/* What was called after the registration. */
static void expect_calls(const enum fake_cuda_name *want, size_t count)
{
    struct fake_cuda_call calls[10];
    CHECK(count < 10);
    CHECK_EQ(cuda.calls(calls, 10), count + 1);
    CHECK_EQ(calls[0].name, FAKE_REGISTER);
    for (size_t i = 0; i < count; i++) CHECK_EQ(calls[i + 1].name, want[i]);
}

#define EXPECT_CALLS(...) \
    (HERE(), expect_calls((const enum fake_cuda_name[]){__VA_ARGS__}, \
                          sizeof((const enum fake_cuda_name[]){__VA_ARGS__}) / sizeof(enum fake_cuda_name)))

/* A thread that has no context borrows the device's own, and has none again afterwards. */
static void freed_by_another_thread(int version)
{
    (void)version;
    struct fake_cuda_call calls[6];
    rnic_start();
    cuda_load();
    cuda.current(1);
    struct api api = api_load();
    free_on_another_thread(&api, alloc(&api, PAGE));
    EXPECT_CALLS(FAKE_UNREGISTER, FAKE_RETAIN, FAKE_PUSH, FAKE_UNREGISTER, FAKE_POP, FAKE_RELEASE);
    cuda.calls(calls, 6);
    CHECK_EQ(calls[4].result, 0);
    CHECK_EQ(calls[4].least_long, DEVICES);
    api_unload(&api);
}

/* The device was reset: the context of the allocation is gone and is not touched, and nothing is left to warn of. */
static void freed_after_a_reset(int version)
{
    (void)version;
    struct net net;
    rnic_start();
    cuda_load();
    cuda.current(1);
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, PAGE), *other = alloc(&api, PAGE);
    cuda.reset();
    size_t mark = log_mark();
    free_on_another_thread(&api, memory);
    CHECK_EQ(cuda.calls(NULL, 0), 2 + 6);
    CHECK_EQ(api.free(other), 0); /* this thread's context is the one that is gone */
    CHECK_EQ(cuda.calls(NULL, 0), 2 + 6 + 6);
    CHECK_EQ(cuda.retained(), 0);
    CHECK_EQ(log_warnings_since(mark), 0);
    CHECK_EQ(log_matches_since(mark, "CUDA error 713; the driver has let go of them before"), 2);
    cuda.current(1);
    CHECK_EQ(api.free(alloc(&api, PAGE)), 0);
    api_unload(&api);
    net_stop(&net);
}

/* No context is to be had: that is told, and the memory goes all the same. */
static void freed_where_no_context_can_be_had(int version)
{
    (void)version;
    struct net net;
    rnic_start();
    cuda_load();
    cuda.current(1);
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, PAGE);
    cuda.refuse_context(2); /* CUDA_ERROR_OUT_OF_MEMORY */
    size_t mark = log_mark();
    free_on_another_thread(&api, memory);
    EXPECT_CALLS(FAKE_UNREGISTER, FAKE_RETAIN);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "cuDevicePrimaryCtxRetain to unmap 4096 bytes"), 1);
    CHECK_EQ(log_matches_since(mark, "CUDA error 2; the GPU may still map them"), 1);
    api_unload(&api);
    net_stop(&net);
}

/* ---- a device that refuses ------------------------------------------------------------------------------------ */

static void a_device_refuses(int version)
{
    (void)version;
    struct net net;
    rnic_start();
    cuda_load();
    cuda.current(1);
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    uint8_t *other = alloc(&api, PAGE); /* what is there already is not touched */
    size_t mark = log_mark();
    for (uint64_t nth = 1; nth <= DEVICES; nth++) {
        uint64_t before = rnic_counts().mrs;
        rnic_fail_registration(nth);
        alloc_fails(&api, 1 << 20, 0, ANY_NODE, ENOMEM);
        CHECK_EQ(rnic_counts().mrs, before);
    }
    CHECK_EQ(log_matches_since(mark, "ibv_reg_mr"), DEVICES);
    CHECK_EQ(cuda.calls(NULL, 0), 1); /* the GPU had no part in it */
    CHECK_EQ(api.free(alloc(&api, 1 << 20)), 0);
    CHECK_EQ(api.free(other), 0);
    api_unload(&api);
    net_stop(&net);
}

/* Registrations with relaxed ordering are refused: they are made without, and found by whoever would ask for it. */
static void a_device_without_relaxed_ordering(int version)
{
    (void)version;
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_RELAXED_ORDERING", "no", 1);
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, 8 * PAGE);
    check_pages(memory, 8 * PAGE, 0);
    pair_open(&net, 1, &pair);
    move_both_ways(&pair, memory, 8 * PAGE, 1);
    pair_close(&pair);
    CHECK_EQ(api.free(memory), 0);
    api_unload(&api);
    net_stop(&net);
}

/* Where the operator demands it, that is the answer. */
static void relaxed_ordering_is_demanded(int version)
{
    (void)version;
    struct net net;
    setenv("SOFTRNIC_RELAXED_ORDERING", "no", 1);
    setenv("NCCL_IB_PCI_RELAXED_ORDERING", "1", 1);
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    alloc_fails(&api, PAGE, 0, ANY_NODE, EINVAL);
    CHECK_EQ(rnic_counts().mrs, 0);
    api_unload(&api);
    net_stop(&net);
}

/* ---- with connections ----------------------------------------------------------------------------------------- */

static void any_part_is_registered_already(int version)
{
    enum { SIZE = 1 << 18 };
    struct net net;
    struct pair pair;
    uint64_t random = 5;
    rnic_start();
    net_start(&net, version);
    struct api api = api_load();
    pair_open(&net, 0, &pair);
    uint8_t *memory = alloc(&api, SIZE);
    check_pages(memory, SIZE, 0);
    for (int i = 0; i < 60; i++) {
        size_t offset = next_random(&random) % (SIZE / 2 - 1);
        size_t size = 1 + next_random(&random) % (SIZE / 2 - offset);
        move(&pair, memory + offset, memory + SIZE / 2 + offset, size, i % 2 ? NCCL_PTR_HOST : NCCL_PTR_CUDA,
             (uint64_t)i);
    }
    move_both_ways(&pair, memory, SIZE, 77);
    check_pages(memory, SIZE, 0);
    pair_close(&pair);
    CHECK_EQ(api.free(memory), 0);
    api_unload(&api);
    net_stop(&net);
}

/* Memory first: NCCL's init finds the devices that it is registered with, again and again. */
static void before_init(int version)
{
    enum { SIZE = 1 << 16, TIMES = 3 };
    rnic_start();
    struct census before = census_take();
    struct api api = api_load();
    uint8_t *memory = alloc(&api, SIZE);
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        struct pair pair;
        size_t mark = log_mark();
        net_start(&net, version);
        CHECK(log_matches_since(mark, "using ") >= (i == 0)); /* NCCL's log says once what is used */
        for (int dev = 0; dev < DEVICES; dev++) {
            pair_open(&net, dev, &pair);
            move_both_ways(&pair, memory, SIZE, (uint64_t)i);
            pair_close(&pair);
        }
        net_stop(&net);
        check_pages(memory, SIZE, 0);
    }
    CHECK_EQ(api.free(memory), 0);
    api_unload(&api);
    expect_gone(before);
}

/* Finalize, the last communicator and every dlclose go by; then the memory goes, and takes everything with it. */
static void outlives_everything(int version)
{
    enum { SIZE = 1 << 16 };
    struct net net;
    struct pair pair;
    rnic_start();
    cuda_load();
    cuda.current(1);
    struct census before = census_take();
    net_start(&net, version);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, SIZE), *second = alloc(&api, 3);
    pair_open(&net, 0, &pair);
    move_both_ways(&pair, memory, SIZE, 1);
    pair_close(&pair);
    net_stop(&net);
    api_unload(&api);
    CHECK(is_mapped("libnccl-net-pinrail"));
    CHECK_EQ(rnic_counts().mrs, 2 * DEVICES);
    CHECK_EQ(rnic_counts().contexts, DEVICES);
    CHECK_EQ(rnic_counts().qps, 0);
    CHECK_EQ(pattern_mismatch(memory + SIZE / 2, SIZE / 2, 2), -1);
    check_pages(memory, SIZE, 1);
    /* The function is still there, as long as there is memory; nothing but that holds the library now. */
    CHECK_EQ(api.free(second), 0);
    CHECK(is_mapped("libnccl-net-pinrail"));
    CHECK_EQ(rnic_counts().mrs, DEVICES);
    CHECK_EQ(api.free(memory), 0);
    CHECK(!is_mapped_at(memory));
    expect_gone(before);
}

/* Loaded, used and unloaded, with and without NCCL, in either order. */
static void twenty_times(int version)
{
    enum { TIMES = 20, SIZE = 1 << 14 };
    rnic_start();
    cuda_load();
    cuda.current(1);
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        struct pair pair;
        bool nccl = i % 4 != 0, memory_last = i % 2;
        struct api api = api_load();
        uint8_t *memory = alloc(&api, SIZE);
        if (nccl) {
            net_start(&net, version);
            pair_open(&net, 0, &pair);
            move_both_ways(&pair, memory, SIZE, (uint64_t)i);
            if (!memory_last) CHECK_EQ(api.free(memory), 0);
            pair_close(&pair);
            net_stop(&net);
        }
        if (!nccl || memory_last) CHECK_EQ(api.free(memory), 0);
        api_unload(&api);
        expect_gone(before);
    }
}

/* Freed while a communicator has parts registered: no device reaches memory that is somebody else's by then. */
static void freed_while_registered(int version)
{
    enum { SIZE = 1 << 16 };
    struct net net;
    struct pair pair;
    rnic_start();
    cuda_load();
    cuda.current(1);
    net_start(&net, version);
    struct api api = api_load();
    pair_open(&net, 0, &pair);
    uint64_t before = rnic_counts().mrs;
    uint8_t *memory = alloc(&api, SIZE);
    void *from_mr = register_host(&net, pair.send, memory, 1000);
    void *to_mr = register_host(&net, pair.recv, memory + SIZE / 2, 1000);
    CHECK_EQ(api.free(memory), 0);
    CHECK_EQ(cuda.calls(NULL, 0), 2); /* the GPU is done with it at once */
    CHECK_EQ(rnic_counts().mrs, before + 1); /* of the one device that the communicators use */
    CHECK(is_mapped_at(memory) && is_mapped_at(memory + SIZE - PAGE));
    size_t mark = log_mark();
    CHECK_EQ(api.free(memory), EINVAL);
    CHECK_EQ(log_warnings_since(mark), 1);
    pattern_fill(memory, 1000, 9);
    void *receive = irecv(&net, pair.recv, memory + SIZE / 2, 1000, 0, to_mr);
    void *send = isend(&net, pair.send, memory, 1000, 0, from_mr);
    CHECK_EQ(wait_size(&net, send), 1000);
    CHECK_EQ(wait_size(&net, receive), 1000);
    CHECK_EQ(pattern_mismatch(memory + SIZE / 2, 1000, 9), -1);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK(is_mapped_at(memory));
    pair_close(&pair); /* ends the other registration */
    CHECK(!is_mapped_at(memory));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    CHECK_EQ(rnic_counts().mrs, 0);
    api_unload(&api);
    net_stop(&net);
}

/* ---- arguments ------------------------------------------------------------------------------------------------ */

/* Whether the line VmFlags of the mapping at an address has a flag. */
static bool has_flag(const void *address, const char *flag)
{
    FILE *smaps = fopen("/proc/self/smaps", "re");
    char *line = NULL;
    size_t room = 0;
    bool inside = false, found = false;
    CHECK(smaps != NULL);
    while (getline(&line, &room, smaps) > 0) {
        uintptr_t start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            inside = start <= (uintptr_t)address && (uintptr_t)address < end;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) found = strstr(line, flag) != NULL;
    }
    free(line);
    fclose(smaps);
    return found;
}

/* All bytes are zero and can be written, and what is around them cannot be touched. */
static void check_memory(uint8_t *memory, size_t size)
{
    size_t whole = (size + PAGE - 1) / PAGE * PAGE;
    CHECK_EQ((uintptr_t)memory % PAGE, 0);
    for (size_t i = 0; i < whole; i++)
        if (memory[i] != 0) FAIL("byte %zu is 0x%02x", i, memory[i]);
    pattern_fill(memory, whole, size);
    CHECK_EQ(pattern_mismatch(memory, whole, size), -1);
    int null = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    CHECK(null >= 0);
    CHECK(read(null, memory - 1, 1) == -1 && errno == EFAULT);
    close(null);
}

static void sizes_and_huge_pages(int version)
{
    (void)version;
    static const size_t sizes[] = {1,           PAGE - 1,      PAGE,    PAGE + 1,          (1 << 20) - 1,
                                   (1 << 20) + 1, (2 << 20) - 1, 2 << 20, (5 << 20) + 12345, 16 << 20};
    struct net net;
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    bool transparent = access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) == 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t *plain = alloc(&api, sizes[i]);
        check_pages(plain, sizes[i], 0);
        check_memory(plain, sizes[i]);
        CHECK(!has_flag(plain, " ht") && !has_flag(plain, " hg"));
        uint8_t *huge = alloc_with(&api, sizes[i], PINRAIL_HOST_HUGE);
        check_pages(huge, sizes[i], 0);
        check_memory(huge, sizes[i]);
        bool pool = has_flag(huge, " ht");
        printf("%zu bytes are in %s pages\n", sizes[i], pool ? "the pool's" : "transparent or small");
        if (!pool && transparent && sizes[i] >= 2 << 20 && sysconf(_SC_PAGESIZE) == PAGE) {
            CHECK(has_flag(huge, " hg"));
            CHECK_EQ((uintptr_t)huge % (2 << 20), 0);
        }
        CHECK_EQ(api.free(plain), 0);
        CHECK_EQ(api.free(huge), 0);
        CHECK(!is_mapped_at(plain) && !is_mapped_at(huge));
    }
    api_unload(&api);
    net_stop(&net);
}

static void wrong_arguments(int version)
{
    (void)version;
    static const size_t too_much[] = {SIZE_MAX, SIZE_MAX - PAGE, SIZE_MAX / 2, (size_t)1 << 50, (size_t)1 << 46};
    static const int no_nodes[] = {-2, -1000, 1023, 1024, 100000, 0x7fffffff};
    struct net net;
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    alloc_fails(&api, 0, 0, ANY_NODE, EINVAL);
    alloc_fails(&api, PAGE, 4, ANY_NODE, EINVAL);
    alloc_fails(&api, PAGE, 0x80000000u | PINRAIL_HOST_HUGE, ANY_NODE, EINVAL);
    for (size_t i = 0; i < sizeof too_much / sizeof *too_much; i++)
        for (unsigned flags = 0; flags <= 3; flags++) alloc_fails(&api, too_much[i], flags, ANY_NODE, ENOMEM);
    /* Containers may forbid the call that asks for a node. */
    unsigned long mask[2] = {1, 0};
    void *place = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool allowed = syscall(SYS_mbind, place, PAGE, 1, mask, 65, 0) == 0 || errno != EPERM;
    for (size_t i = 0; i < sizeof no_nodes / sizeof *no_nodes; i++)
        alloc_fails(&api, PAGE, 0, no_nodes[i], no_nodes[i] < 0 || no_nodes[i] > 1023 || allowed ? EINVAL : EPERM);
    size_t mark = log_mark();
    CHECK_EQ(api.alloc(PAGE, 0, ANY_NODE, NULL), EINVAL);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(rnic_counts().mrs, 0);
    if (allowed) {
        void *memory = GARBAGE;
        CHECK_EQ(api.alloc(PAGE, PINRAIL_HOST_HUGE, 0, &memory), 0); /* the node that every machine has */
        CHECK_EQ(api.free(memory), 0);
    }
    api_unload(&api);
    net_stop(&net);
}

static void wrong_pointers(int version)
{
    (void)version;
    struct net net;
    uint8_t byte;
    rnic_start();
    net_start(&net, LAST_VERSION);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, 3 * PAGE), *other = alloc(&api, PAGE);
    uint8_t *wrong[] = {&byte, (uint8_t *)1, memory + 1, memory + PAGE, memory + 3 * PAGE - 1, memory + 3 * PAGE,
                        memory - PAGE, (uint8_t *)UINTPTR_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        size_t mark = log_mark();
        CHECK_EQ(api.free(wrong[i]), EINVAL);
        CHECK_EQ(log_warnings_since(mark), 1);
        CHECK_EQ(log_matches_since(mark, "lies inside the allocation"), i >= 2 && i <= 4);
    }
    size_t mark = log_mark();
    CHECK_EQ(api.free(NULL), 0);
    CHECK_EQ(log_mark(), mark);
    CHECK_EQ(api.free(memory), 0);
    CHECK_EQ(api.free(memory), EINVAL);
    check_pages(other, PAGE, 0);
    CHECK_EQ(api.free(other), 0);
    api_unload(&api);
    net_stop(&net);
}

/* ---- processes and threads ------------------------------------------------------------------------------------ */

static void child_of_a_fork_is_refused(int version)
{
    (void)version;
    int status = 0, pipes[2];
    rnic_start();
    struct api api = api_load();
    uint8_t *memory = alloc(&api, PAGE);
    memory[0] = 7;
    CHECK_EQ(pipe(pipes), 0);
    int pid = fork_child();
    if (pid == 0) {
        void *more = GARBAGE;
        CHECK_EQ(api.alloc(PAGE, 0, ANY_NODE, &more), EPERM);
        CHECK_PTR(more, NULL);
        CHECK_EQ(api.free(memory), EPERM);
        CHECK_EQ(api.free(NULL), 0);
        CHECK(write(pipes[1], memory, 1) == -1 && errno == EFAULT); /* a hole, not a copy */
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    CHECK_EQ(memory[0], 7);
    check_pages(memory, PAGE, 0);
    CHECK_EQ(api.free(memory), 0);
    api_unload(&api);
}

struct crowd {
    const struct api *api;
    uint64_t seed;
};

static void *crowd_work(void *argument)
{
    struct crowd *crowd = argument;
    uint8_t *held[4] = {0};
    size_t sizes[4] = {0};
    if (crowd->seed % 2) cuda.current(1);
    for (int i = 0; i < 100; i++) {
        int k = (int)(next_random(&crowd->seed) % 4);
        if (held[k]) {
            CHECK_EQ(pattern_mismatch(held[k], sizes[k], (uintptr_t)held[k]), -1);
            CHECK_EQ(crowd->api->free(held[k]), 0);
            held[k] = NULL;
        } else {
            sizes[k] = 1 + next_random(&crowd->seed) % (20 * PAGE);
            held[k] = alloc(crowd->api, sizes[k]);
            pattern_fill(held[k], sizes[k], (uintptr_t)held[k]);
        }
    }
    for (int k = 0; k < 4; k++) CHECK_EQ(crowd->api->free(held[k]), 0);
    return NULL;
}

/* Threads allocate and free while NCCL comes and goes on this one. */
static void many_threads(int version)
{
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    struct crowd crowd[THREADS];
    rnic_start();
    cuda_load();
    struct census before = census_take();
    struct api api = api_load();
    for (int i = 0; i < THREADS; i++) {
        crowd[i] = (struct crowd){&api, (uint64_t)(100 * version + i)};
        CHECK_EQ(pthread_create(&threads[i], NULL, crowd_work, &crowd[i]), 0);
    }
    for (int i = 0; i < 10; i++) {
        struct net net;
        struct pair pair;
        net_start(&net, version);
        pair_open(&net, i % DEVICES, &pair);
        pair_message(&pair, 3000, 0, (uint64_t)i);
        pair_close(&pair);
        net_stop(&net);
    }
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    api_unload(&api);
    expect_gone_but_space(before);
}

/* ---- nothing to pin with -------------------------------------------------------------------------------------- */

/* What the process writes to stderr between begin and end; with no logger, warnings are there. */
static int stderr_kept, stderr_file;

static void stderr_begin(void)
{
    stderr_kept = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    stderr_file = memfd_create("stderr", MFD_CLOEXEC);
    CHECK(stderr_kept >= 0 && stderr_file >= 0);
    CHECK_EQ(dup2(stderr_file, STDERR_FILENO), STDERR_FILENO);
}

static void stderr_end(char *text, size_t room)
{
    CHECK_EQ(dup2(stderr_kept, STDERR_FILENO), STDERR_FILENO);
    ssize_t length = pread(stderr_file, text, room - 1, 0);
    CHECK(length >= 0);
    text[length] = 0;
    close(stderr_kept);
    close(stderr_file);
}

static void expect_plain_memory(void)
{
    char text[1000];
    struct api api = api_load();
    cuda_load();
    cuda.current(1);
    stderr_begin();
    uint8_t *memory = alloc(&api, 100000), *huge = alloc_with(&api, 4 << 20, PINRAIL_HOST_HUGE);
    stderr_end(text, sizeof text);
    CHECK_STR(text, "");
    check_memory(memory, 100000);
    check_memory(huge, 4 << 20);
    CHECK_EQ(cuda.calls(NULL, 0), 0);
    CHECK_EQ(api.free(memory), 0);
    CHECK_EQ(api.free(huge), 0);
    stderr_begin();
    CHECK_EQ(api.free(huge), EINVAL);
    stderr_end(text, sizeof text);
    CHECK(strstr(text, "NET/pinrail: pinrail_host_free: ") == text);
    CHECK(strchr(text, '\n') == text + strlen(text) - 1);
    api_unload(&api);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

static void no_verbs_library(int version)
{
    (void)version;
    setenv("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1", 1);
    setenv("PINRAIL_SYSFS", "/nonexistent", 1); /* a machine whose kernel has no RDMA device either */
    expect_plain_memory();
}

static void no_device(int version)
{
    (void)version;
    setenv("SOFTRNIC_DEVICES", "0", 1);
    expect_plain_memory();
}

/* A program that asked for memory, and NCCL that finds no device: it is told so as ever. */
static void no_device_and_nccl(int version)
{
    struct net net;
    int ndev = 0x5bad;
    setenv("SOFTRNIC_DEVICES", "0", 1);
    struct api api = api_load();
    uint8_t *memory = alloc(&api, PAGE);
    size_t mark = log_mark();
    net_load(&net, version);
    ncclResult_t result = net_init(&net, 1, ffi_logger);
    if (result == ncclSuccess) CHECK_OK(net_devices(&net, &ndev));
    CHECK(result != ncclSuccess || ndev == 0);
    CHECK_EQ(log_matches_since(mark, "no usable RDMA port"), 1);
    if (result == ncclSuccess) CHECK_OK(net_finalize(&net, net.context));
    net_unload(&net);
    memory[0] = 1;
    CHECK_EQ(api.free(memory), 0);
    api_unload(&api);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

const struct ffi_case ffi_cases[] = {
    ONCE(devices_first_then_the_gpu),
    ONCE(the_other_order_fails),
    ONCE(without_a_gpu),
    ONCE(the_gpu_refuses),
    ONCE(freed_by_another_thread),
    ONCE(freed_after_a_reset),
    ONCE(freed_where_no_context_can_be_had),
    ONCE(a_device_refuses),
    ONCE(a_device_without_relaxed_ordering),
    ONCE(relaxed_ordering_is_demanded),
    EACH(any_part_is_registered_already),
    EACH(before_init),
    EACH(outlives_everything),
    EACH(twenty_times),
    EACH(freed_while_registered),
    ONCE(sizes_and_huge_pages),
    ONCE(wrong_arguments),
    ONCE(wrong_pointers),
    ONCE(child_of_a_fork_is_refused),
    EACH(many_threads),
    ONCE(no_verbs_library),
    ONCE(no_device),
    EACH(no_device_and_nccl),
    {0},
};
