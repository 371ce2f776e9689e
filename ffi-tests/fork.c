/*
 * What forked children have of the memory of a process that uses the plugin, where registered pages are taken from them:
 * everything but the plugin's own pages. On the software RNIC as an old kernel and as an old library make it.
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "forked.h"

enum { PAGE = 4096, HUGE = 2 << 20 };

/* A connection; its own buffers are whole pages, which registrations take from children. */
struct desk {
    struct net net;
    struct pair pair;
    uint8_t *from, *to;
    size_t size;
    void *from_mr, *to_mr;
};

static uint8_t *map_pages(size_t size, int advice)
{
    uint8_t *data = mmap(NULL, size + 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    data += HUGE - (uintptr_t)data % HUGE; /* the edges stay mapped until the process ends */
    if (advice) CHECK_EQ(madvise(data, size, advice), 0);
    memset(data, 0, size);
    return data;
}

static void desk_lay(struct desk *desk, size_t size, int advice)
{
    pair_open(&desk->net, 0, &desk->pair);
    desk->size = size;
    desk->from = map_pages(size, advice);
    desk->to = map_pages(size, advice);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from, size);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to, size);
}

/* A message with a flush behind it. */
static void desk_message(struct desk *desk, size_t size, uint64_t key)
{
    const struct net *net = &desk->net;
    memset(desk->to, 0xa5, desk->size);
    pattern_fill(desk->from, size, key);
    void *receive = irecv(net, desk->pair.recv, desk->to, size, 7, desk->to_mr);
    void *send = isend(net, desk->pair.send, desk->from, size, 7, desk->from_mr);
    CHECK_EQ(wait_size(net, send), size);
    CHECK_EQ(wait_size(net, receive), size);
    CHECK_EQ(pattern_mismatch(desk->to, size, key), -1);
    void *data = desk->to, *request = NULL;
    int sizes = (int)size;
    uint64_t reads = rnic_counts().reads;
    CHECK_OK(net_iflush(net, desk->pair.recv, 1, &data, &sizes, &desk->to_mr, &request));
    CHECK(request != NULL);
    wait_done(net, request, NULL);
    CHECK_EQ(rnic_counts().reads, reads + 1);
}

static size_t desk_withheld(const struct desk *desk)
{
    struct stretch mine[] = {{desk->from, desk->from + desk->size}, {desk->to, desk->to + desk->size}};
    return withheld(mine, 2);
}

static void desk_clear(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
}

/* ---- all of it ----------------------------------------------------------------------------------------------- */

static void everything(int version, enum forks forks, int advice)
{
    struct desk desk;
    forks_set(forks);
    setenv("PINRAIL_FLUSH", "always", 1);
    rnic_keep();
    canaries_plant(3000);
    net_start(&desk.net, version);
    CHECK_EQ(withheld(NULL, 0), 0);
    child_reads_canaries();
    desk_lay(&desk, HUGE, advice);
    /* Two that share their pages with canaries, registered while children look. */
    enum { SMALL = 700 };
    uint8_t *from = malloc(SMALL), *to = malloc(SMALL);
    void *from_mr = register_host(&desk.net, desk.pair.send, from, SMALL);
    void *to_mr = register_host(&desk.net, desk.pair.recv, to, SMALL);
    canaries_plant(3000); /* on what was free beside the plugin's objects, too */
    for (int i = 0; i < 5; i++) {
        desk_message(&desk, 1 + (size_t)i * 300000, (uint64_t)i);
        pattern_fill(from, SMALL, (uint64_t)i);
        void *receive = irecv(&desk.net, desk.pair.recv, to, SMALL, i, to_mr);
        void *send = isend(&desk.net, desk.pair.send, from, SMALL, i, from_mr);
        CHECK_EQ(wait_size(&desk.net, send), SMALL);
        CHECK_EQ(wait_size(&desk.net, receive), SMALL);
        CHECK_EQ(pattern_mismatch(to, SMALL, (uint64_t)i), -1);
        pair_message(&desk.pair, 5000, i, (uint64_t)i);
    }
    CHECK(desk_withheld(&desk) > 2 * HUGE); /* the plugin's own are among them */
    if (advice) CHECK(mapping_has(desk.from, "hg") && mapping_has(desk.to, "hg"));
    child_reads_canaries();
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, to_mr));
    free(from);
    free(to);
    desk_clear(&desk);
    child_reads_canaries();
    net_stop(&desk.net);
    CHECK_EQ(withheld(NULL, 0), 0);
    child_reads_canaries();
    canaries_free();
}

static void old_kernel(int version) { everything(version, OLD_KERNEL, 0); }
static void old_library(int version) { everything(version, OLD_LIBRARY, 0); }
static void transparent_huge_pages(int version) { (void)version; everything(LAST_VERSION, OLD_KERNEL, MADV_HUGEPAGE); }

/* As the data loaders of a job do, under the allocator that many of them use. */
static void another_allocator(int version)
{
    (void)version;
    with_preloaded("libjemalloc.so.2", "another_allocator");
    if (!dlsym(RTLD_DEFAULT, "mallctl")) FAIL("jemalloc is not there: apt-get install libjemalloc2");
    everything(LAST_VERSION, OLD_LIBRARY, 0);
}

/* Where the kernel copies, nothing is withheld and memory that shares its pages is registered. */
static void nothing_is_withheld_without_need(int version)
{
    struct net net;
    struct pair pair;
    struct guarded buffer = guarded_new(100, 3);
    rnic_keep();
    forks_set(COPIED);
    setenv("RDMAV_FORK_SAFE", "1", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    void *mr = register_host(&net, pair.send, buffer.data, buffer.size);
    CHECK(rnic_page(buffer.data).long_pins > 0);
    CHECK_EQ(withheld(NULL, 0), 0);
    CHECK_EQ(log_matches_since(0, "do not own their pages"), 0);
    CHECK_OK(net_dereg_mr(&net, pair.send, mr));
    pair_close(&pair);
    net_stop(&net);
}

static void a_hundred_communicators(int version)
{
    enum { PAIRS = 100 };
    struct net net;
    static struct pair pairs[PAIRS];
    (void)version;
    forks_set(OLD_KERNEL);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    rnic_keep();
    canaries_plant(1000);
    net_start(&net, LAST_VERSION);
    for (int i = 0; i < PAIRS; i++) {
        pair_open(&net, 0, &pairs[i]);
        canaries_plant(50);
    }
    for (int i = 0; i < PAIRS; i++) pair_message(&pairs[i], 3000 + (size_t)i, i, (uint64_t)i);
    CHECK(withheld(NULL, 0) > PAIRS * 3 * PAGE);
    child_reads_canaries();
    for (int i = 0; i < PAIRS; i += 2) pair_close(&pairs[i]);
    withheld(NULL, 0);
    child_reads_canaries();
    for (int i = 1; i < PAIRS; i += 2) pair_close(&pairs[i]);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
    CHECK_EQ(log_matches_since(0, ": clean;"), 3);
    canaries_free();
}

/* ---- memory that shares its pages ---------------------------------------------------------------------------- */

/* As a bootstrap over the network does it: words on the stack and small objects on the heap. */
static void stack_and_heap(int version, enum forks forks)
{
    enum { SIZE = 300, ROUNDS = 8 };
    struct net net;
    struct pair pair;
    struct {
        uint8_t before[40], to[SIZE], behind[40];
    } stack;
    forks_set(forks);
    rnic_keep();
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    size_t mark = log_mark();
    canaries_plant(100);
    uint8_t *heap = (uint8_t *)malloc(SIZE + 80) + 40;
    memset(heap - 40, 0xa5, SIZE + 80);
    canaries_plant(100);
    memset(&stack, 0xa5, sizeof stack);
    void *heap_mr = register_host(&net, pair.send, heap, SIZE);
    void *stack_mr = register_host(&net, pair.recv, stack.to, SIZE);
    CHECK_EQ(rnic_page(heap).long_pins, 0); /* no device reaches them */
    CHECK_EQ(rnic_page(stack.to).long_pins, 0);
    withheld(NULL, 0);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        size_t size = round < 3 ? (size_t)round : SIZE - round;
        memset(stack.to, 0xa5, SIZE);
        pattern_fill(heap, size, round);
        void *receive = irecv(&net, pair.recv, stack.to, SIZE, 1, stack_mr);
        void *send = isend(&net, pair.send, heap, size, 1, heap_mr);
        CHECK_EQ(wait_size(&net, send), size);
        CHECK_EQ(wait_size(&net, receive), size);
        CHECK_EQ(pattern_mismatch(stack.to, size, round), -1);
        for (size_t i = size; i < SIZE; i++) CHECK_EQ(stack.to[i], 0xa5);
    }
    for (size_t i = 0; i < 40; i++) CHECK(stack.before[i] == 0xa5 && stack.behind[i] == 0xa5);
    for (size_t i = 0; i < 40; i++) CHECK(heap[(ptrdiff_t)i - 40] == 0xa5 && heap[SIZE + i] == 0xa5);
    child_reads_canaries();
    /* Once for each kind of memory, with what it is about. */
    void *again = register_host(&net, pair.send, heap, SIZE / 2);
    CHECK_OK(net_dereg_mr(&net, pair.send, again));
    CHECK_EQ(log_warnings_since(mark), 2);
    CHECK_EQ(log_matches_since(mark, "300 bytes at"), 2);
    CHECK_EQ(log_matches_since(mark, "PINRAIL_FORK_COLLATERAL=register"), 2);
    CHECK_EQ(log_matches_since(mark, "in [heap] do not own their pages: registering them takes "), 1);
    CHECK_EQ(log_matches_since(mark, "in [stack] do not own their pages: registering them takes "), 1);
    CHECK_OK(net_dereg_mr(&net, pair.send, heap_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, stack_mr));
    pair_close(&pair);
    net_stop(&net);
    free(heap - 40);
    canaries_free();
    CHECK_EQ(withheld(NULL, 0), 0);
}

static void copies_on_an_old_kernel(int version) { stack_and_heap(version, OLD_KERNEL); }
static void copies_with_an_old_library(int version) { stack_and_heap(version, OLD_LIBRARY); }

/* Whether a child that reads an address gets through. */
static bool child_can_read(const volatile uint8_t *address)
{
    int child = fork_child();
    if (child == 0) {
        (void)*address;
        _exit(0);
    }
    int status = child_status(child);
    if (!WIFSIGNALED(status)) CHECK_EQ(status, 0);
    return !WIFSIGNALED(status);
}

/* The crash that copies prevent, where the operator wants no copies: told before, found by the check, over at the end. */
static void registered(const char *setting, const char *value, const char *why)
{
    struct net net;
    struct pair pair;
    char text[64];
    forks_set(OLD_KERNEL);
    rnic_keep();
    setenv(setting, value, 1);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    uint8_t *page = aligned_alloc(PAGE, PAGE), *neighbour = page + 4;
    size_t mark = log_mark();
    CHECK(child_can_read(neighbour));
    void *mr = register_host(&net, pair.send, page, 4);
    CHECK(rnic_page(page).long_pins > 0);
    CHECK(is_withheld(neighbour));
    CHECK(!child_can_read(neighbour));
    CHECK_EQ(log_matches_since(mark, why), 1);
    CHECK_EQ(log_matches_since(mark, "takes 4096 bytes from forked children, 4092 of which nobody asked for"), 1);
    snprintf(text, sizeof text, "4096 bytes at %p-%p", (void *)page, (void *)(page + PAGE));
    CHECK_EQ(log_matches_since(mark, text), 1);
    snprintf(text, sizeof text, "4 bytes at %p were asked for", (void *)page);
    CHECK_EQ(log_matches_since(mark, text), 1);
    CHECK_EQ(log_matches_since(mark, "and a child did not have them"), 1);
    CHECK_OK(net_dereg_mr(&net, pair.send, mr));
    CHECK(child_can_read(neighbour));
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
    free(page);
}

static void registered_all_the_same(int version)
{
    (void)version;
    registered("PINRAIL_FORK_COLLATERAL", "register", "(PINRAIL_FORK_COLLATERAL=register)");
}

static void no_copies_are_allowed(int version)
{
    (void)version;
    registered("PINRAIL_REG_FALLBACK", "fail", "(PINRAIL_REG_FALLBACK=fail allows no copies)");
}

static void no_room_for_copies(int version)
{
    enum { SIZE = 3 << 20 };
    struct net net;
    struct pair pair;
    (void)version;
    forks_set(OLD_KERNEL);
    rnic_keep();
    setenv("PINRAIL_BOUNCE_BYTES", "1048576", 1);
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    struct guarded buffer = guarded_new(SIZE, 8);
    size_t mark = log_mark();
    void *mr = register_host(&net, pair.recv, buffer.data, SIZE);
    CHECK(rnic_page(buffer.data).long_pins > 0);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "PINRAIL_BOUNCE_BYTES"), 1);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
}

/* ---- the check ----------------------------------------------------------------------------------------------- */

static void *verbs_symbol(const char *name)
{
    void *library = dlopen(softrnic_path(), RTLD_NOW | RTLD_LOCAL);
    if (!library) FAIL("dlopen: %s", dlerror());
    void *address = dlsym(library, name);
    if (!address) FAIL("dlsym: %s", dlerror());
    return address;
}

/* Another user of the verbs library in this process registers four bytes on the heap. */
struct stranger {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
};

static void stranger_registers(struct stranger *stranger, void *data, size_t size)
{
    struct ibv_device **(*list)(int *) = (struct ibv_device * *(*)(int *)) verbs_symbol("ibv_get_device_list");
    struct ibv_context *(*open)(struct ibv_device *) =
        (struct ibv_context * (*)(struct ibv_device *)) verbs_symbol("ibv_open_device");
    struct ibv_pd *(*alloc)(struct ibv_context *) =
        (struct ibv_pd * (*)(struct ibv_context *)) verbs_symbol("ibv_alloc_pd");
    typedef struct ibv_mr *reg(struct ibv_pd *, void *, size_t, int);
    struct ibv_device **devices = list(NULL);
    CHECK(devices && devices[0]);
    CHECK((stranger->context = open(devices[0])) != NULL);
    CHECK((stranger->pd = alloc(stranger->context)) != NULL);
    CHECK((stranger->mr = ((reg *)verbs_symbol("ibv_reg_mr"))(stranger->pd, data, size, 0)) != NULL);
}

static void stranger_leaves(struct stranger *stranger)
{
    CHECK_EQ(((int (*)(struct ibv_mr *))verbs_symbol("ibv_dereg_mr"))(stranger->mr), 0);
    CHECK_EQ(((int (*)(struct ibv_pd *))verbs_symbol("ibv_dealloc_pd"))(stranger->pd), 0);
    CHECK_EQ(((int (*)(struct ibv_context *))verbs_symbol("ibv_close_device"))(stranger->context), 0);
}

static void planted(int version, enum forks forks)
{
    struct net net;
    struct pair pair;
    struct stranger stranger;
    char text[64];
    forks_set(forks);
    rnic_keep();
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    uint8_t *page = aligned_alloc(PAGE, PAGE);
    stranger_registers(&stranger, page + 100, 4);
    CHECK(!child_can_read(page));
    size_t mark = log_mark();
    struct guarded buffer = guarded_new(100, 3);
    CHECK_OK(net_dereg_mr(&net, pair.send, register_host(&net, pair.send, buffer.data, buffer.size)));
    snprintf(text, sizeof text, "4096 bytes at %p-%p ([heap]; flags rd wr", (void *)page, (void *)(page + PAGE));
    CHECK_EQ(log_matches_since(mark, text), 1);
    CHECK_EQ(log_matches_since(mark, "and a child did not have them; pinrail did not register them"), 1);
    CHECK_EQ(log_matches_since(mark, ": clean;"), 0);
    stranger_leaves(&stranger);
    mark = log_mark();
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(log_matches_since(mark, "fork check before the first connection closes: clean;"), 1);
    CHECK_EQ(log_matches_since(mark, "fork check after the last close: clean; forked children lack 0 bytes"), 1);
    CHECK_EQ(log_warnings_since(mark), 0);
    free(page);
}

static void planted_on_an_old_kernel(int version) { planted(version, OLD_KERNEL); }
static void planted_with_an_old_library(int version) { (void)version; planted(LAST_VERSION, OLD_LIBRARY); }

static void *come_and_go(void *argument)
{
    const volatile bool *stop = argument;
    while (!*stop) {
        uint8_t *data = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(data != MAP_FAILED);
        data[PAGE] = 1;
        if (data[PAGE] == 1) CHECK_EQ(munmap(data, 8 * PAGE), 0);
        free(malloc(300000));
    }
    return NULL;
}

/* The check meets a process that does not stand still, and no handler or wait of the program meets its child. */
static volatile sig_atomic_t children_heard;
static void on_child(int number)
{
    (void)number;
    children_heard++;
}

static void check_beside_threads(int version)
{
    enum { THREADS = 4 };
    struct net net;
    struct pair pair;
    pthread_t threads[THREADS];
    bool stop = false;
    (void)version;
    forks_set(OLD_KERNEL);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    rnic_keep();
    signal(SIGCHLD, on_child);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, come_and_go, &stop), 0);
    for (int round = 0; round < 4; round++) {
        net_start(&net, LAST_VERSION);
        pair_open(&net, 0, &pair);
        pair_message(&pair, 100, 0, 1);
        pair_close(&pair);
        net_stop(&net);
    }
    __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(log_matches_since(0, ": clean;"), 3 * 4);
    CHECK_EQ(log_matches_since(0, "fork check"), 3 * 4);
    CHECK_EQ(children_heard, 0);
    CHECK_EQ(waitpid(-1, NULL, WNOHANG | __WALL), -1);
}

/* Where a fork is not safe, the check does not fork. */
static void no_check_where_a_fork_harms(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    forks_set(OLD_KERNEL);
    rnic_keep();
    setenv("PINRAIL_FORK", "never", 1);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    net_start(&net, LAST_VERSION);
    CHECK_EQ(log_matches_since(0, "PINRAIL_FORK=never: "), 1);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 100, 0, 1);
    CHECK_EQ(log_matches_since(0, "no child was forked"), 1);
    CHECK_EQ(log_matches_since(0, "looked at"), 0);
    CHECK_EQ(withheld(NULL, 0), 0);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- arming -------------------------------------------------------------------------------------------------- */

static int fork_status(void)
{
    return ((int (*)(void))verbs_symbol("ibv_is_fork_initialized"))();
}

struct arming {
    const char *rnic, *policy;
    bool by_environment, marks, warned;
    const char *told;
};

/* One process each: a library is armed for good. */
static void arms(int version, int socket, void *argument)
{
    const struct arming *want = argument;
    struct net net;
    struct pair pair;
    (void)socket;
    setenv("SOFTRNIC_FORK", want->rnic, 1);
    if (want->policy) setenv("PINRAIL_FORK", want->policy, 1);
    if (want->by_environment) setenv("IBV_FORK_SAFE", "0", 1); /* whatever its value */
    rnic_keep();
    net_start(&net, version);
    CHECK_EQ(log_matches_since(0, "fork safety: "), 1);
    CHECK_EQ(log_matches_since(0, want->told), 1);
    CHECK_EQ(log_matches_since(0, "PINRAIL_FORK=never: "), want->warned);
    CHECK_EQ(log_matches_since(0, want->by_environment ? "IBV_FORK_SAFE set" : "IBV_FORK_SAFE not set"), 1);
    pair_open(&net, 0, &pair);
    CHECK_EQ(withheld(NULL, 0) > 0, want->marks);
    if (strcmp(want->rnic, "old-kernel") == 0) CHECK_EQ(fork_status(), want->marks); /* enabled, disabled */
    pair_message(&pair, 1000, 0, 1);
    CHECK_EQ(log_matches_since(0, "do not own their pages") > 0, want->marks);
    pair_close(&pair);
    net_stop(&net);
}

static void policies(int version)
{
    static const struct arming all[] = {
        {"copy-on-fork", NULL, false, false, false, "not armed by pinrail (PINRAIL_FORK=auto)"},
        {"copy-on-fork", "arm", false, false, false, "armed (PINRAIL_FORK=arm)"},
        {"copy-on-fork", "never", true, false, false, "not armed by pinrail (PINRAIL_FORK=never)"},
        {"old-kernel", NULL, false, true, false, "armed (PINRAIL_FORK=auto)"},
        {"old-kernel", "arm", false, true, false, "armed (PINRAIL_FORK=arm)"},
        {"old-kernel", "never", false, false, true, "not armed by pinrail (PINRAIL_FORK=never)"},
        {"old-kernel", "never", true, true, false, "not armed by pinrail (PINRAIL_FORK=never)"},
        {"old-library", NULL, false, false, false, "not armed by pinrail (PINRAIL_FORK=auto)"},
        {"old-library", NULL, true, true, false, "whether children get registered pages will show"},
        {"old-library", "arm", false, true, false, "armed (PINRAIL_FORK=arm)"},
        {"old-library", "never", false, false, false, "the kernel copies pinned pages"},
    };
    (void)version;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s %s %d", all[i].rnic, all[i].policy ? all[i].policy : "auto", all[i].by_environment);
        run_one(LAST_VERSION, (struct role){name, arms, false}, (void *)(uintptr_t)&all[i]);
    }
}

/* Somebody else arms the library, before the plugin or too late. */
static void armed_by_somebody_else(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    forks_set(OLD_LIBRARY);
    unsetenv("RDMAV_FORK_SAFE");
    rnic_keep();
    int (*arm)(void) = (int (*)(void))verbs_symbol("ibv_fork_init");
    CHECK_EQ(arm(), 0);
    net_start(&net, LAST_VERSION);
    CHECK_EQ(log_matches_since(0, "children get all pages unless somebody else armed the library"), 1);
    pair_open(&net, 0, &pair);
    size_t mark = log_mark();
    pair_message(&pair, 1000, 0, 1);
    CHECK(log_matches_since(mark, "do not own their pages") > 0); /* the kernel was asked, not the library */
    CHECK(withheld(NULL, 0) > 0);
    pair_close(&pair);
    net_stop(&net);
}

static void armed_too_late(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    forks_set(OLD_LIBRARY);
    unsetenv("RDMAV_FORK_SAFE");
    rnic_keep();
    net_start(&net, LAST_VERSION);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    CHECK(((int (*)(void))verbs_symbol("ibv_fork_init"))() != 0);
    pair_message(&pair, 1000, 0, 2);
    CHECK_EQ(log_matches_since(0, "do not own their pages"), 0);
    CHECK_EQ(withheld(NULL, 0), 0);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(old_kernel),
    EACH(old_library),
    EACH(nothing_is_withheld_without_need),
    EACH(copies_on_an_old_kernel),
    EACH(copies_with_an_old_library),
    EACH(planted_on_an_old_kernel),
    ONCE(planted_with_an_old_library),
    ONCE(transparent_huge_pages),
    ONCE(another_allocator),
    ONCE(a_hundred_communicators),
    ONCE(registered_all_the_same),
    ONCE(no_copies_are_allowed),
    ONCE(no_room_for_copies),
    ONCE(check_beside_threads),
    ONCE(no_check_where_a_fork_harms),
    ONCE(policies),
    ONCE(armed_by_somebody_else),
    ONCE(armed_too_late),
    {0},
};
