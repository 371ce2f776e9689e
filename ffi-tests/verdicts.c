/*
 * Why a registration failed: each cause is brought about on the software RNIC beside its nearest neighbour, and the
 * warning and the record of the event must name the right one of the two.
 */
#include <dirent.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pair.h"
#include "records.h"
#include "softrnic.h"

enum { PAGE = 4096 };

/* One warning and one record since `mark`, and both name the cause; the record also has every one of `parts`. */
static void expect(size_t mark, const char *cause, const char *const *parts)
{
    static char text[1 << 16];
    char wanted[100], words[100];
    snprintf(wanted, sizeof wanted, "\"cause\": \"%s\"", cause);
    snprintf(words, sizeof words, "Verdict: %s", cause);
    for (char *c = words; *c; c++)
        if (*c == '_') *c = ' ';
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, words), 1);
    CHECK_EQ(log_matches_since(mark, "Remedy: "), 1);
    CHECK_EQ(records(text, sizeof text), 1);
    if (!strstr(text, wanted)) FAIL("no %s in\n%s", wanted, text);
    for (; *parts; parts++)
        if (!strstr(text, *parts)) FAIL("no %s in\n%s", *parts, text);
    forget_records();
}

#define EXPECT(MARK, CAUSE, ...) (HERE(), expect(MARK, CAUSE, (const char *const[]){__VA_ARGS__, NULL}))

/* ---- what goes wrong ----------------------------------------------------------------------------------------- */

static void *pages(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* This process may lock `bytes`, and no capability helps it. */
static void limit_locked_memory(size_t bytes)
{
    struct rlimit limit = {bytes, bytes};
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2];
    CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    CHECK_EQ(syscall(SYS_capget, &header, sets), 0);
    sets[CAP_IPC_LOCK / 32].effective &= ~(1u << (CAP_IPC_LOCK % 32));
    CHECK_EQ(syscall(SYS_capset, &header, sets), 0);
}

struct stage {
    struct net net;
    struct pair pair;
    size_t mark;
};

/* Connected, with records wanted and nothing told yet. */
static void set_up(struct stage *stage, int version)
{
    want_records();
    net_start(&stage->net, version);
    pair_open(&stage->net, 0, &stage->pair);
    stage->mark = log_mark();
}

static void clear_up(struct stage *stage)
{
    pair_message(&stage->pair, 1000, 0, 1); /* a refused registration spoils nothing */
    pair_close(&stage->pair);
    net_stop(&stage->net);
}

static void refused(struct stage *stage, void *data, size_t size, int type)
{
    void *mr = GARBAGE;
    CHECK_REFUSED(net_reg_mr(&stage->net, stage->pair.recv, data, size, type, &mr));
}

/* ---- quota or placement -------------------------------------------------------------------------------------- */

/* Another driver holds pages of a contiguous area: size is irrelevant, and the pages are named. */
static void placement(int version)
{
    struct stage stage;
    char first[40];
    setenv("SOFTRNIC_CMA", "all", 1);
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(64 * PAGE);
    rnic_pin(memory + 20 * PAGE, 2 * PAGE, false);
    refused(&stage, memory, 64 * PAGE, NCCL_PTR_HOST);
    snprintf(first, sizeof first, "%p", (void *)(memory + 20 * PAGE));
    CHECK(log_matches_since(stage.mark, "2 of 64 pages fail") == 1);
    EXPECT(stage.mark, "placement", first, "\"errno\": 12", "\"pages\": 64", "\"direction\": \"receive\"",
           "\"long_term\": \"yes\"");
    rnic_unpin(memory + 20 * PAGE, 2 * PAGE);
    void *mr = register_host(&stage.net, stage.pair.recv, memory, 64 * PAGE);
    CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, mr));
    clear_up(&stage);
}

/* The same errno, size and memory, but the limit is the reason; both figures are there. */
static void memlock(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_MEMLOCK", "rlimit", 1);
    limit_locked_memory(300 * PAGE);
    set_up(&stage, version);
    refused(&stage, pages(400 * PAGE), 400 * PAGE, NCCL_PTR_HOST);
    CHECK(log_matches_since(stage.mark, "ulimit -l unlimited") == 1);
    EXPECT(stage.mark, "memlock_quota", "\"soft\": 1228800", "\"request_bytes\": 1638400", "\"cap_ipc_lock\": false");
    clear_up(&stage);
}

/* A limit that would allow this is not blamed, however low it is. */
static void placement_under_a_low_limit(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_MEMLOCK", "rlimit", 1);
    setenv("SOFTRNIC_CMA", "all", 1);
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    limit_locked_memory(400 * PAGE);
    set_up(&stage, version);
    uint8_t *memory = pages(PAGE);
    rnic_pin(memory, PAGE, false);
    refused(&stage, memory, PAGE, NCCL_PTR_HOST);
    EXPECT(stage.mark, "placement", "\"refuses\": false");
    rnic_unpin(memory, PAGE);
    clear_up(&stage);
}

/* ---- the device or the kernel -------------------------------------------------------------------------------- */

static void device_limit(int version)
{
    struct stage stage;
    enum { MOST = 200 };
    void *mrs[MOST], *mr = GARBAGE;
    int count = 0;
    setenv("SOFTRNIC_MAX_MR", "100", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(MOST * PAGE);
    while (count < MOST) {
        ncclResult_t result = net_reg_mr(&stage.net, stage.pair.recv, memory + count * PAGE, PAGE, NCCL_PTR_HOST, &mr);
        if (result != ncclSuccess) break;
        mrs[count++] = mr;
    }
    CHECK(count > 50 && count < 100);
    EXPECT(stage.mark, "device_limit", "\"max_mr\": 100", "\"live_regions\": 100");
    while (count > 0) CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, mrs[--count]));
    clear_up(&stage);
}

/* A /proc of our own that says how little memory there is, and what kind. */
static void write_meminfo(const char *proc, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/meminfo", proc);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

static void remove_meminfo(const char *proc)
{
    char path[200];
    snprintf(path, sizeof path, "%s/meminfo", proc);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(rmdir(proc), 0);
}

/* The same refusals with hardly any memory left: the kernel, not the device. */
static void kernel_memory(int version)
{
    struct stage stage;
    char proc[] = "/tmp/pinrail-proc-XXXXXX";
    CHECK(mkdtemp(proc) != NULL);
    write_meminfo(proc, "MemTotal: 1000000 kB\nMemFree: 900 kB\nMemAvailable: 1000 kB\n");
    setenv("PINRAIL_PROC", proc, 1);
    set_up(&stage, version);
    rnic_fail_registrations_from(1);
    refused(&stage, pages(8 * PAGE), 8 * PAGE, NCCL_PTR_HOST);
    EXPECT(stage.mark, "kernel_memory", "\"available_bytes\": 1024000");
    rnic_fail_registrations_from(0);
    clear_up(&stage);
    remove_meminfo(proc);
}

/* ---- the address --------------------------------------------------------------------------------------------- */

static void nothing_mapped(int version)
{
    struct stage stage;
    char hole[40];
    set_up(&stage, version);
    uint8_t *memory = pages(8 * PAGE);
    CHECK_EQ(munmap(memory + 4 * PAGE, PAGE), 0);
    refused(&stage, memory, 8 * PAGE, NCCL_PTR_HOST);
    snprintf(hole, sizeof hole, "nothing is mapped at %p", (void *)(memory + 4 * PAGE));
    EXPECT(stage.mark, "bad_address", hole, "\"errno\": 14");
    clear_up(&stage);
}

/* The same where the device answers as if memory were short, as libraries do that keep marks about forks; and where memory
 * is set aside for what cannot be registered: nobody may copy from a hole. */
static void nothing_mapped_and_no_memory(int version)
{
    struct stage stage;
    set_up(&stage, version);
    uint8_t *memory = pages(8 * PAGE);
    CHECK_EQ(munmap(memory + 4 * PAGE, PAGE), 0);
    rnic_fail_registrations_from(1);
    refused(&stage, memory, 8 * PAGE, NCCL_PTR_HOST);
    EXPECT(stage.mark, "bad_address", "nothing is mapped at", "\"errno\": 12");
    rnic_fail_registrations_from(0);
    clear_up(&stage);
}

static void read_only(int version)
{
    struct stage stage;
    set_up(&stage, version);
    uint8_t *memory = pages(4 * PAGE);
    CHECK_EQ(mprotect(memory + PAGE, PAGE, PROT_READ), 0);
    refused(&stage, memory, 4 * PAGE, NCCL_PTR_HOST);
    EXPECT(stage.mark, "bad_address", "cannot be written");
    clear_up(&stage);
}

/* An address that is said to be the GPU's, on a host without the module that makes it reachable. */
static void peer_memory_missing(int version)
{
    struct stage stage;
    set_up(&stage, version);
    refused(&stage, pages(PAGE), PAGE, NCCL_PTR_CUDA);
    CHECK(log_matches_since(stage.mark, "nvidia_peermem") == 1);
    EXPECT(stage.mark, "peer_memory_missing", "\"pointer\": \"cuda\"");
    clear_up(&stage);
}

/* ---- access flags -------------------------------------------------------------------------------------------- */

/* Optional flags that the device does not know are left out, and that is said once. */
static void optional_flags(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_RELAXED_ORDERING", "no", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(2 * PAGE);
    void *first = register_host(&stage.net, stage.pair.recv, memory, PAGE);
    void *second = register_host(&stage.net, stage.pair.recv, memory + PAGE, PAGE);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    CHECK_EQ(log_matches_since(stage.mark, "Verdict: access flags (certain)"), 1);
    CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, first));
    CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, second));
    clear_up(&stage);
    forget_records();
}

/* Demanded, they are not left out: the registration fails and says what to set. */
static void demanded_flags(int version)
{
    struct stage stage;
    void *mr = GARBAGE;
    setenv("SOFTRNIC_RELAXED_ORDERING", "no", 1);
    setenv("NCCL_IB_PCI_RELAXED_ORDERING", "1", 1);
    set_up(&stage, version);
    CHECK_REFUSED(net_reg_mr(&stage.net, stage.pair.recv, pages(PAGE), PAGE, NCCL_PTR_HOST, &mr));
    CHECK(log_matches_since(stage.mark, "NCCL_IB_PCI_RELAXED_ORDERING=2") == 1);
    EXPECT(stage.mark, "access_flags", "\"optional_flags_demanded\": true", "\"errno\": 22");
    pair_close(&stage.pair);
    net_stop(&stage.net);
}

/* ---- telling ------------------------------------------------------------------------------------------------- */

/* Ten buffers, one reason: one warning, but a record of each; and a way out is not told as if there were none. */
static void one_line_for_one_cause(int version)
{
    struct stage stage;
    static char text[1 << 16];
    void *mrs[10];
    setenv("SOFTRNIC_CMA", "all", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(10 * PAGE);
    rnic_pin(memory, 10 * PAGE, false);
    for (int i = 0; i < 10; i++) mrs[i] = register_host(&stage.net, stage.pair.recv, memory + i * PAGE, PAGE);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    CHECK_EQ(log_matches_since(stage.mark, "NCCL_PROTO=^LL128"), 1);
    CHECK_EQ(records(text, sizeof text), 10);
    for (int i = 0; i < 10; i++) CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, mrs[i]));
    rnic_unpin(memory, 10 * PAGE);
    clear_up(&stage);
    forget_records();
}

/* The same without a way out: one warning, however often it fails, and another one for another cause. */
static void refused_again_and_again(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_CMA", "all", 1);
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(10 * PAGE);
    rnic_pin(memory, 10 * PAGE, false);
    for (int i = 0; i < 10; i++) refused(&stage, memory + i * PAGE, PAGE, NCCL_PTR_HOST);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    rnic_unpin(memory, 10 * PAGE);
    refused(&stage, (void *)0x1000, PAGE, NCCL_PTR_HOST);
    CHECK_EQ(log_warnings_since(stage.mark), 2);
    clear_up(&stage);
    forget_records();
}

/* From version 11 on the communicator has a name. */
static void names_the_communicator(int version)
{
    struct stage stage;
    setenv("SOFTRNIC_CMA", "all", 1);
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    set_up(&stage, version);
    uint8_t *memory = pages(PAGE);
    rnic_pin(memory, PAGE, false);
    refused(&stage, memory, PAGE, NCCL_PTR_HOST);
    EXPECT(stage.mark, "placement", version >= 11 ? "\"comm\": \"0x" : "\"comm\": null", "\"protocol\": null");
    rnic_unpin(memory, PAGE);
    clear_up(&stage);
}

/* A folder that cannot be written costs one warning beside the diagnosis, not the job. */
static void unwritable_folder(int version)
{
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_CMA", "all", 1);
    setenv("PINRAIL_REPORT_DIR", "/proc/self/no such folder", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    size_t mark = log_mark();
    uint8_t *memory = pages(2 * PAGE);
    rnic_pin(memory, 2 * PAGE, false);
    void *first = register_host(&net, pair.recv, memory, PAGE), *second = register_host(&net, pair.recv, memory + PAGE, PAGE);
    CHECK_EQ(log_warnings_since(mark), 2);
    CHECK_EQ(log_matches_since(mark, "PINRAIL_REPORT_DIR"), 1);
    CHECK_OK(net_dereg_mr(&net, pair.recv, first));
    CHECK_OK(net_dereg_mr(&net, pair.recv, second));
    rnic_unpin(memory, 2 * PAGE);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(placement),
    EACH(memlock),
    EACH(placement_under_a_low_limit),
    EACH(device_limit),
    EACH(kernel_memory),
    EACH(nothing_mapped),
    EACH(nothing_mapped_and_no_memory),
    EACH(read_only),
    EACH(peer_memory_missing),
    EACH(optional_flags),
    EACH(demanded_flags),
    EACH(one_line_for_one_cause),
    EACH(refused_again_and_again),
    EACH(names_the_communicator),
    EACH(unwritable_folder),
    {0},
};
