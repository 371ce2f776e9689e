/*
 * GPU memory as far as it can be had without a GPU: what devices say of it, DMA-BUFs (memfds stand in for them), how a
 * flush is done (with the CUDA driver of the tests), and what of all that the log tells.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakecuda.h"
#include "pair.h"
#include "softrnic.h"

enum { PAGE = 4096, GPU = 5, GUARD = 0xC3 };

/* ---- a machine -------------------------------------------------------------------------------------------------- */

static char root[] = "/tmp/ffi-gpu-XXXXXX";

/* An empty sysfs, which the plugin is told to read. */
static void sysfs_start(void)
{
    CHECK(mkdtemp(root) != NULL);
    setenv("PINRAIL_SYSFS", root, 1);
}

/* The folders of a path below the root, and what the last part is: a file, or a link where it leads somewhere. */
static void sysfs_put(const char *below, const char *target)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, below);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(path, 0700);
        *at = '/';
    }
    if (target) {
        CHECK_EQ(symlink(target, path), 0);
    } else {
        int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        CHECK(fd >= 0);
        close(fd);
    }
}

static void sysfs_take(const char *below)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, below);
    CHECK_EQ(unlink(path), 0);
}

static void sysfs_end(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQ(system(command), 0);
}

static struct net_properties properties(const struct net *net, int dev)
{
    struct net_properties p;
    CHECK_OK(net_get_properties(net, dev, &p));
    return p;
}

/* A DMA-BUF: memory that a descriptor stands for. */
struct buffer {
    int fd;
    size_t size;
    uint8_t *map;
};

static struct buffer buffer_new(size_t size)
{
    struct buffer buffer = {.fd = memfd_create("ffi-gpu", MFD_CLOEXEC), .size = size};
    CHECK(buffer.fd >= 0);
    CHECK_EQ(ftruncate(buffer.fd, (off_t)size), 0);
    buffer.map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, buffer.fd, 0);
    CHECK(buffer.map != MAP_FAILED);
    memset(buffer.map, GUARD, size);
    return buffer;
}

/* All bytes but `size` from `at` on are untouched, and those carry the pattern. */
static void buffer_check(const struct buffer *buffer, size_t at, size_t size, uint64_t key)
{
    CHECK_EQ(pattern_mismatch(buffer->map + at, size, key), -1);
    for (size_t i = 0; i < buffer->size; i++)
        if ((i < at || i >= at + size) && buffer->map[i] != GUARD) FAIL("byte %zu of the buffer was written", i);
    memset(buffer->map, GUARD, buffer->size);
}

/* ---- a connection ----------------------------------------------------------------------------------------------- */

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from;
    void *from_mr;
};

static void desk_open_on(struct desk *desk, int dev)
{
    pair_open(&desk->net, dev, &desk->pair);
    desk->from = guarded_new(1 << 16, 0);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, desk->from.size);
}

static void desk_open(struct desk *desk, int version)
{
    net_start(&desk->net, version);
    desk_open_on(desk, 0);
}

static void desk_close(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    pair_close(&desk->pair);
    net_stop(&desk->net);
}

static void *register_buffer(struct desk *desk, void *address, size_t size, size_t offset, int fd)
{
    void *mr = GARBAGE;
    CHECK_OK(net_reg_mr_dmabuf(&desk->net, desk->pair.recv, address, size, NCCL_PTR_CUDA, offset, fd, &mr));
    CHECK(mr != NULL && mr != GARBAGE);
    return mr;
}

/* One message to an address that a memory handle answers to. */
static void receive_at(struct desk *desk, void *address, size_t size, void *mr, uint64_t key)
{
    pattern_fill(desk->from.data, size, key);
    void *receive = irecv(&desk->net, desk->pair.recv, address, size, 0, mr);
    void *send = isend(&desk->net, desk->pair.send, desk->from.data, size, 0, desk->from_mr);
    CHECK_EQ(wait_size(&desk->net, send), size);
    CHECK_EQ(wait_size(&desk->net, receive), size);
}

/* A flush, waited for; whether it was a request. */
static bool flush(struct desk *desk, void *address, size_t size, void *mr)
{
    void *request = GARBAGE;
    int bytes = (int)size;
    CHECK_OK(net_iflush(&desk->net, desk->pair.recv, 1, &address, &bytes, &mr, &request));
    CHECK(request != GARBAGE);
    if (request) wait_done(&desk->net, request, NULL);
    return request != NULL;
}

/* ---- what devices say of it -------------------------------------------------------------------------------------- */

/* Every module by which memory can be registered by address, and none. */
static void pointer_kinds(int version)
{
    static const struct {
        const char *file, *name;
    } modules[] = {
        {NULL, "no peer-memory module is loaded"},
        {"kernel/mm/memory_peers/nv_mem/version", "through nv_mem"},
        {"kernel/mm/memory_peers/nv_mem_nc/version", "through nv_mem_nc"},
        {"module/nvidia_peermem/version", "through nvidia_peermem"},
        {"module/nv_peer_mem/version", "through nv_peer_mem"},
    };
    sysfs_start();
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        struct desk desk;
        struct guarded memory = guarded_new(PAGE, 0);
        void *mr = GARBAGE;
        size_t mark = log_mark();
        if (modules[i].file) sysfs_put(modules[i].file, NULL);
        desk_open(&desk, version);
        int wanted = NCCL_PTR_HOST | NCCL_PTR_DMABUF | (modules[i].file ? NCCL_PTR_CUDA : 0);
        CHECK_EQ(properties(&desk.net, 0).ptrSupport, wanted);
        CHECK(log_matches_since(mark, modules[i].name) >= 1);
        if (modules[i].file) {
            CHECK_OK(net_reg_mr(&desk.net, desk.pair.recv, memory.data, PAGE, NCCL_PTR_CUDA, &mr));
            receive_at(&desk, memory.data, 1000, mr, i);
            CHECK_BUFFER(&memory, 1000, i);
            CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
        } else {
            CHECK_REFUSED(net_reg_mr(&desk.net, desk.pair.recv, memory.data, PAGE, NCCL_PTR_CUDA, &mr));
            CHECK_PTR(mr, NULL);
        }
        desk_close(&desk);
        if (modules[i].file) sysfs_take(modules[i].file);
        guarded_free(&memory);
    }
    sysfs_end();
}

static void without_dmabuf(int version, const char *how)
{
    struct desk desk;
    struct buffer buffer = buffer_new(PAGE);
    void *mr = GARBAGE;
    setenv("SOFTRNIC_DMABUF", how, 1);
    sysfs_start();
    desk_open(&desk, version);
    CHECK_EQ(properties(&desk.net, 0).ptrSupport, NCCL_PTR_HOST);
    CHECK_EQ(log_matches_since(0, "no device takes DMA-BUFs"), 1);
    CHECK_REFUSED(net_reg_mr_dmabuf(&desk.net, desk.pair.recv, buffer.map, PAGE, NCCL_PTR_CUDA, 0, buffer.fd, &mr));
    CHECK_PTR(mr, NULL);
    pair_message(&desk.pair, 1000, 0, 1);
    desk_close(&desk);
    sysfs_end();
}

static void dmabufs_not_supported(int version) { without_dmabuf(version, "no"); }
static void dmabufs_unknown_to_the_kernel(int version) { without_dmabuf(version, "unknown"); }

/* Asked of each device; what is fused can what all its members can. */
static void each_device_for_itself(int version)
{
    struct net net;
    setenv("SOFTRNIC_DEVICES", "3", 1);
    setenv("SOFTRNIC_DMABUF", "yes,no,yes", 1);
    sysfs_start();
    net_start(&net, version);
    for (int dev = 0; dev < 3; dev++)
        CHECK_EQ(properties(&net, dev).ptrSupport & NCCL_PTR_DMABUF, dev == 1 ? 0 : NCCL_PTR_DMABUF);
    CHECK_EQ(log_matches_since(0, "DMA-BUFs on softrnic0:1, softrnic2:1 only"), 1);
    if (version >= 9) CHECK_EQ(properties(&net, net_fuse(&net, 2)).ptrSupport, NCCL_PTR_HOST);
    net_stop(&net);
    sysfs_end();
}

static void force_flush(int version, const char *wish, const char *against, int wanted)
{
    struct net net;
    setenv("NCCL_NET_FORCE_FLUSH", wish, 1);
    if (against) setenv(against, strcmp(against, "PINRAIL_FLUSH") ? "1" : "never", 1);
    net_start(&net, version);
    CHECK_EQ(properties(&net, 0).forceFlush, version < 9 ? 0 : wanted);
    net_stop(&net);
    if (against) unsetenv(against);
}

static void forced_flush(int version)
{
    force_flush(version, "0", NULL, 0);
    force_flush(version, "1", NULL, 1);
    force_flush(version, "1", "NCCL_GDR_FLUSH_DISABLE", 0);
    force_flush(version, "1", "PINRAIL_FLUSH", 0);
}

/* Found, told, and not used: the device is the same as ever. Only devices of that driver are asked. */
static void data_direct(int version)
{
    struct net net;
    char path[4096] = "";
    CHECK(readlink("/proc/self/exe", path, sizeof path - 16) > 0);
    strcpy(strrchr(path, '/'), "/libmlx5.so.1");
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) FAIL("dlopen: %s", dlerror());
    setenv("SOFTRNIC_DEVICES", "2", 1);
    sysfs_start();
    sysfs_put("class/infiniband/softrnic1/device/driver", "../../../../bus/pci/drivers/mlx5_core");
    sysfs_put("class/infiniband/softrnic0/device/driver", "../../../../bus/pci/drivers/mlx4_core");
    net_start(&net, version);
    CHECK_EQ(log_matches_since(0, "Data Direct"), 1);
    CHECK_EQ(log_matches_since(0, "softrnic1: its Data Direct interface /sys/devices/pci0001:00/0001:00:00.0"), 1);
    int count = 0;
    CHECK_OK(net_devices(&net, &count));
    CHECK_EQ(count, 2);
    CHECK_STR(properties(&net, 1).name, "softrnic1");
    CHECK_EQ(properties(&net, 1).forceFlush, 0);
    net_stop(&net);
    sysfs_end();
}

/* ---- DMA-BUFs ---------------------------------------------------------------------------------------------------- */

/* The range begins at the offset, whatever the address that it answers to. */
static void dmabuf_offsets(int version)
{
    static const size_t offsets[] = {0, PAGE, 3 * PAGE, PAGE + 64, 7 * PAGE + 4000};
    struct desk desk;
    struct buffer buffer = buffer_new(8 * PAGE);
    desk_open(&desk, version);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        size_t at = offsets[i], room = buffer.size - at, size = room < 3000 ? room - 5 : 3000;
        /* Where it is mapped, and somewhere else. */
        for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
            uint8_t *address = elsewhere ? (uint8_t *)0x700000000000 + at % PAGE : buffer.map + at;
            void *mr = register_buffer(&desk, address, room, at, buffer.fd);
            receive_at(&desk, address + 5, size, mr, i);
            buffer_check(&buffer, at + 5, size, i);
            CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
        }
    }
    desk_close(&desk);
}

/* Devices map whole pages, so an address that lies differently in its page than the offset cannot be; that is told. */
static void dmabuf_out_of_step(int version)
{
    struct desk desk;
    struct buffer buffer = buffer_new(2 * PAGE);
    void *mr = GARBAGE;
    desk_open(&desk, version);
    size_t mark = log_mark();
    CHECK_REFUSED(net_reg_mr_dmabuf(&desk.net, desk.pair.recv, buffer.map + 64, PAGE, NCCL_PTR_CUDA, 0, buffer.fd, &mr));
    CHECK_PTR(mr, NULL);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "both must lie equally far into a page"), 1);
    desk_close(&desk);
}

/*
 * Two buffers that answer to one address, and a third behind the number of a descriptor that was closed: each gets what
 * is sent to it. The stock transport knows a registration by its address alone.
 */
static void dmabuf_identity(int version)
{
    struct desk desk;
    uint8_t *address = (uint8_t *)0x710000000000;
    struct buffer buffers[3];
    void *mrs[3];
    desk_open(&desk, version);
    uint64_t live = rnic_counts().mrs;
    int number = -1;
    for (int i = 0; i < 3; i++) {
        buffers[i] = buffer_new(4 * PAGE);
        if (i == 0) number = buffers[i].fd;
        /* As NCCL does: closed right after the call, so that the number is taken by the next. */
        CHECK_EQ(buffers[i].fd, number);
        mrs[i] = register_buffer(&desk, address, 4 * PAGE, 0, buffers[i].fd);
        close(buffers[i].fd);
    }
    CHECK_EQ(rnic_counts().mrs - live, 3);
    for (int round = 0; round < 4; round++)
        for (int i = 2; i >= 0; i--) {
            uint64_t key = (uint64_t)(round * 3 + i);
            receive_at(&desk, address + 100, 5000, mrs[i], key);
            buffer_check(&buffers[i], 100, 5000, key);
            for (int k = 0; k < 3; k++) buffer_check(&buffers[k], 0, 0, 0);
        }
    /* One and the same buffer again, from another place in it on. */
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    struct buffer twice = buffer_new(4 * PAGE);
    void *first = register_buffer(&desk, address, 2 * PAGE, 0, twice.fd);
    void *second = register_buffer(&desk, address, 2 * PAGE, 2 * PAGE, twice.fd);
    receive_at(&desk, address, 1000, second, 77);
    buffer_check(&twice, 2 * PAGE, 1000, 77);
    receive_at(&desk, address, 1000, first, 78);
    buffer_check(&twice, 0, 1000, 78);
    close(fd);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, first));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, second));
    for (int i = 0; i < 3; i++) CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mrs[i]));
    CHECK_EQ(rnic_counts().mrs, live);
    desk_close(&desk);
}

/* A member that refuses leaves nothing of what the others registered. */
static void one_member_refuses(int version)
{
    enum { MEMBERS = 4 };
    struct desk desk;
    struct buffer buffer = buffer_new(2 * PAGE);
    struct guarded memory = guarded_new(PAGE, 0);
    void *mr = GARBAGE;
    (void)version;
    setenv("SOFTRNIC_DEVICES", "4", 1);
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    net_start(&desk.net, LAST_VERSION);
    desk_open_on(&desk, net_fuse(&desk.net, MEMBERS));
    uint64_t live = rnic_counts().mrs;
    for (int member = 1; member <= MEMBERS; member++) {
        rnic_fail_registrations_from((uint64_t)member);
        CHECK_REFUSED(net_reg_mr_dmabuf(&desk.net, desk.pair.recv, buffer.map, 2 * PAGE, NCCL_PTR_CUDA, 0, buffer.fd, &mr));
        CHECK_EQ(rnic_counts().mrs, live);
        rnic_fail_registrations_from((uint64_t)member);
        CHECK_REFUSED(net_reg_mr(&desk.net, desk.pair.recv, memory.data, PAGE, NCCL_PTR_HOST, &mr));
        CHECK_EQ(rnic_counts().mrs, live);
    }
    rnic_fail_registrations_from(0);
    mr = register_buffer(&desk, buffer.map, 2 * PAGE, 0, buffer.fd);
    CHECK_EQ(rnic_counts().mrs - live, MEMBERS);
    receive_at(&desk, buffer.map + 9, 5000, mr, 3);
    buffer_check(&buffer, 9, 5000, 3);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    CHECK_EQ(rnic_counts().mrs, live);
    desk_close(&desk);
}

/* ---- flushes ----------------------------------------------------------------------------------------------------- */

static struct {
    void (*current)(int);
    void (*memory)(void *, size_t, int);
    void (*flush)(int, int);
    size_t (*calls)(struct fake_cuda_call *, size_t);
} cuda;

static void *symbol(void *library, const char *name)
{
    void *address = dlsym(library, name);
    if (!address) FAIL("dlsym: %s", dlerror());
    return address;
}

static void cuda_load(void)
{
    char path[4096] = "";
    CHECK(readlink("/proc/self/exe", path, sizeof path - 16) > 0);
    strcpy(strrchr(path, '/'), "/libcuda.so.1");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) FAIL("dlopen: %s", dlerror());
    cuda.current = (void (*)(int))symbol(library, "fake_cuda_current");
    cuda.memory = (void (*)(void *, size_t, int))symbol(library, "fake_cuda_memory");
    cuda.flush = (void (*)(int, int))symbol(library, "fake_cuda_flush");
    cuda.calls = (size_t(*)(struct fake_cuda_call *, size_t))symbol(library, "fake_cuda_calls");
}

static int driver_flushes(void)
{
    static struct fake_cuda_call calls[256];
    size_t all = cuda.calls(calls, 256);
    int flushes = 0;
    CHECK(all <= 256);
    for (size_t i = 0; i < all; i++) flushes += calls[i].name == FAKE_FLUSH;
    return flushes;
}

/* Asked for and offered: no device is needed, there is nothing to wait for, and the close says how it was done. */
static void flushed_by_the_driver(int version)
{
    struct desk desk;
    struct buffer buffer = buffer_new(4 * PAGE);
    setenv("PINRAIL_FLUSH_METHOD", "cuda", 1);
    setenv("PINRAIL_LOG", "debug", 1);
    cuda_load();
    desk_open(&desk, version);
    cuda.current(1);
    cuda.memory(buffer.map, buffer.size, GPU);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    struct rnic_counts before = rnic_counts();
    for (int i = 1; i <= 40; i++) {
        receive_at(&desk, buffer.map, 5000, mr, (uint64_t)i);
        CHECK(!flush(&desk, buffer.map, 5000, mr));
        CHECK_EQ(driver_flushes(), i);
    }
    /* Not of host memory. */
    struct guarded host = guarded_new(PAGE, 0);
    void *host_mr = register_host(&desk.net, desk.pair.recv, host.data, PAGE);
    CHECK(flush(&desk, host.data, 64, host_mr));
    CHECK_EQ(driver_flushes(), 40);
    CHECK_EQ(rnic_counts().reads - before.reads, 1);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, host_mr));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    size_t mark = log_mark();
    desk_close(&desk);
    CHECK_EQ(log_matches_since(mark, "1 flushes by 1 reads, 40 by the CUDA driver, 0 had nothing to wait for"), 1);
}

/* Where the driver does not do it, reads do, and why is told once. */
static void driver_does_not_flush(int version)
{
    enum { EACH = 3 };
    struct desk desk;
    struct buffer buffer = buffer_new(4 * PAGE);
    static const struct {
        bool context;
        int gpu, options, result;
        const char *why;
    } turns[] = {
        {false, GPU, 1, 0, "no CUDA context is current"},
        {true, GPU + 1, 1, 0, "not of the GPU of NCCL's thread"},
        {true, GPU, 1, 709, "CUDA error 709"},
    };
    setenv("PINRAIL_FLUSH_METHOD", "cuda", 1);
    cuda_load();
    desk_open(&desk, version);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        cuda.current(turns[i].context);
        cuda.memory(buffer.map, buffer.size, turns[i].gpu);
        cuda.flush(turns[i].options, turns[i].result);
        size_t mark = log_mark();
        struct rnic_counts before = rnic_counts();
        for (int k = 0; k < EACH; k++) {
            receive_at(&desk, buffer.map, 5000, mr, i);
            CHECK(flush(&desk, buffer.map, 5000, mr));
        }
        CHECK_EQ(rnic_counts().reads - before.reads, EACH);
        CHECK_EQ(log_matches_since(mark, turns[i].why), 1);
        CHECK_EQ(log_matches_since(mark, "flushes by reads"), 1);
    }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    desk_close(&desk);
}

/* A GPU that offers it to streams only. */
static void driver_does_not_offer_it(int version)
{
    struct desk desk;
    struct buffer buffer = buffer_new(PAGE);
    setenv("PINRAIL_FLUSH_METHOD", "cuda", 1);
    cuda_load();
    cuda.flush(2, 0);
    desk_open(&desk, version);
    cuda.current(1);
    cuda.memory(buffer.map, buffer.size, GPU);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    receive_at(&desk, buffer.map, 100, mr, 1);
    for (int i = 0; i < 3; i++) CHECK(flush(&desk, buffer.map, 100, mr));
    CHECK_EQ(driver_flushes(), 0);
    CHECK_EQ(log_matches_since(0, "does not offer cuFlushGPUDirectRDMAWrites"), 1);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    desk_close(&desk);
}

/* No driver is loaded, and none by the plugin. */
static void asked_for_without_a_driver(int version)
{
    struct desk desk;
    struct buffer buffer = buffer_new(PAGE);
    setenv("PINRAIL_FLUSH_METHOD", "cuda", 1);
    desk_open(&desk, version);
    CHECK_EQ(log_matches_since(0, "no CUDA driver with cuFlushGPUDirectRDMAWrites is loaded"), 1);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    receive_at(&desk, buffer.map, 100, mr, 1);
    struct rnic_counts before = rnic_counts();
    CHECK(flush(&desk, buffer.map, 100, mr));
    CHECK_EQ(rnic_counts().reads - before.reads, 1);
    CHECK(!is_mapped("libcuda"));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    desk_close(&desk);
}

/* Not asked for: the driver is left alone, and the close says what the reads were. */
static void flushed_by_reads(int version)
{
    struct desk desk;
    struct buffer buffer = buffer_new(PAGE);
    setenv("PINRAIL_LOG", "debug", 1);
    cuda_load();
    desk_open(&desk, version);
    cuda.current(1);
    cuda.memory(buffer.map, buffer.size, GPU);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    receive_at(&desk, buffer.map, 100, mr, 1);
    for (int i = 0; i < 40; i++) CHECK(flush(&desk, buffer.map, 100, mr));
    CHECK(!flush(&desk, buffer.map, 0, mr));
    CHECK_EQ(driver_flushes(), 0);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    size_t mark = log_mark();
    desk_close(&desk);
    CHECK_EQ(log_matches_since(mark, "40 flushes by 40 reads, 0 by the CUDA driver, 1 had nothing to wait for"), 1);
}

/* On fused devices: a read on every member that carried data, and on no other; or one flush of the driver for all. */
static void flushed_on_every_member(int version)
{
    enum { MEMBERS = 6 };
    struct desk desk;
    struct buffer buffer = buffer_new(16 * PAGE);
    (void)version;
    setenv("SOFTRNIC_DEVICES", "8", 1);
    setenv("PINRAIL_LOG", "debug", 1);
    net_start(&desk.net, LAST_VERSION);
    desk_open_on(&desk, net_fuse(&desk.net, MEMBERS));
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    receive_at(&desk, buffer.map, 128, mr, 1); /* one piece: one member */
    struct rnic_counts before = rnic_counts();
    CHECK(flush(&desk, buffer.map, 128, mr));
    CHECK_EQ(rnic_counts().reads - before.reads, 1);
    receive_at(&desk, buffer.map, 60000, mr, 2);
    before = rnic_counts();
    CHECK(flush(&desk, buffer.map, 60000, mr));
    CHECK_EQ(rnic_counts().reads - before.reads, MEMBERS);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    size_t mark = log_mark();
    desk_close(&desk);
    CHECK_EQ(log_matches_since(mark, "2 flushes by 7 reads, 0 by the CUDA driver, 0 had nothing to wait for"), 1);
}

static void flushed_once_for_all_members(int version)
{
    enum { MEMBERS = 6 };
    struct desk desk;
    struct buffer buffer = buffer_new(16 * PAGE);
    (void)version;
    setenv("SOFTRNIC_DEVICES", "8", 1);
    setenv("PINRAIL_FLUSH_METHOD", "cuda", 1);
    cuda_load();
    net_start(&desk.net, LAST_VERSION);
    desk_open_on(&desk, net_fuse(&desk.net, MEMBERS));
    cuda.current(1);
    cuda.memory(buffer.map, buffer.size, GPU);
    void *mr = register_buffer(&desk, buffer.map, buffer.size, 0, buffer.fd);
    receive_at(&desk, buffer.map, 60000, mr, 2);
    struct rnic_counts before = rnic_counts();
    CHECK(!flush(&desk, buffer.map, 60000, mr));
    CHECK_EQ(rnic_counts().reads - before.reads, 0);
    CHECK_EQ(driver_flushes(), 1);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(pointer_kinds),
    EACH(dmabufs_not_supported),
    EACH(dmabufs_unknown_to_the_kernel),
    EACH(each_device_for_itself),
    EACH(forced_flush),
    EACH(data_direct),
    EACH(dmabuf_offsets),
    EACH(dmabuf_out_of_step),
    EACH(dmabuf_identity),
    EACH(flushed_by_the_driver),
    EACH(driver_does_not_flush),
    EACH(driver_does_not_offer_it),
    EACH(asked_for_without_a_driver),
    EACH(flushed_by_reads),
    ONCE(one_member_refuses),
    ONCE(flushed_on_every_member),
    ONCE(flushed_once_for_all_members),
    {0},
};
