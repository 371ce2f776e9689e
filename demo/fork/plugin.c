/*
 * What pinrail registers for itself, the flush scratch among it, must not harm a child: connections are open, messages
 * and flushes went over them, and a forked child reads a heap full of canaries.
 *
 * A program of ffi-tests by its form: main, the checks and the client of the plugin are that folder's.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pair.h"
#include "softrnic.h"
#include "table.h"

/* ---- canaries ------------------------------------------------------------------------------------------------ */

enum { CANARIES = 30000, FLUSHES = 3 };

/* Blocks of the heap, each full of its own pattern. The plugin allocates in between. */
struct cage {
    uint8_t *canary[CANARIES];
    int count;
};

static size_t size_of(int i)
{
    return 16 + (size_t)i * 7919 % 480;
}

static void breed(struct cage *cage, int part)
{
    for (int i = 0; i < CANARIES / part; i++, cage->count++) {
        uint8_t *canary = malloc(size_of(cage->count));
        CHECK(canary != NULL);
        pattern_fill(canary, size_of(cage->count), (uint64_t)cage->count);
        cage->canary[cage->count] = canary;
    }
}

static bool all_alive(const void *built)
{
    const struct cage *cage = built;
    for (int i = 0; i < cage->count; i++)
        if (pattern_mismatch(cage->canary[i], size_of(i), (uint64_t)i) >= 0) return false;
    return true;
}

/* ---- the software RNIC, which the plugin has loaded ------------------------------------------------------------ */

static void *entry(const char *name)
{
    void *library = dlopen(softrnic_path(), RTLD_NOW | RTLD_NOLOAD), *call = library ? dlsym(library, name) : NULL;
    if (!call) FAIL("no %s in %s", name, softrnic_path());
    dlclose(library); /* it stays loaded; see rnic_keep */
    return call;
}

/* What is asked of the device in all live regions. */
static size_t registered(void)
{
    return ((uint64_t (*)(const char *))entry("softrnic_counter"))("registered_bytes");
}

/* ---- the connection ------------------------------------------------------------------------------------------ */

static uint8_t *pages_new(size_t size)
{
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    return pages;
}

/* Messages, each flushed, through buffers of the caller's that are deregistered afterwards. They fill whole pages: what
 * shares its pages would be copied here, and what the CPU has copied needs no flush. */
static void traffic(const struct net *net, const struct pair *pair)
{
    enum { SIZE = 3 * 4096 };
    uint8_t *from = pages_new(SIZE), *to = pages_new(SIZE);
    void *from_mr = register_host(net, pair->send, from, SIZE);
    void *to_mr = register_host(net, pair->recv, to, SIZE);
    uint64_t reads = rnic_counts().reads;
    for (int i = 0; i < FLUSHES; i++) {
        void *data = to, *request = NULL;
        int size = SIZE;
        pattern_fill(from, SIZE, (uint64_t)i);
        void *receive = irecv(net, pair->recv, to, SIZE, i, to_mr);
        void *send = isend(net, pair->send, from, SIZE, i, from_mr);
        wait_done(net, send, NULL);
        CHECK_EQ(wait_size(net, receive), SIZE);
        CHECK_OK(net_iflush(net, pair->recv, 1, &data, &size, &to_mr, &request));
        CHECK(request != NULL);
        wait_done(net, request, NULL);
        CHECK_EQ(pattern_mismatch(to, SIZE, (uint64_t)i), -1);
    }
    CHECK_EQ(rnic_counts().reads - reads, FLUSHES); /* into the scratch */
    CHECK_OK(net_dereg_mr(net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(net, pair->recv, to_mr));
    CHECK_EQ(munmap(from, SIZE), 0);
    CHECK_EQ(munmap(to, SIZE), 0);
}

static void row(const char *asked, const struct cage *cage, bool open)
{
    struct withheld now = withheld_now();
    struct ending child = child_looks(all_alive, cage);
    const char *wrong = NULL;
    if (!all_alive(cage)) wrong = "the parent's own canaries changed";
    else if (open && now.bytes == 0) wrong = "nothing is withheld, so nothing is shown";
    else if (!open && now.bytes > 0) wrong = "something is still withheld";
    else if (now.foreign > 0) wrong = "pages of something larger are withheld";
    else if (!ended_well(&child)) wrong = "the child misses canaries";
    char reason[128];
    if (open)
        snprintf(reason, sizeof reason, "%d mappings of the plugin's own, %d canaries read", now.mappings, cage->count);
    else
        snprintf(reason, sizeof reason, "%d canaries read", cage->count);
    table_row(asked, &now, &child, wrong, reason);
}

/* `plant` withholds four bytes of a canary as well, as a small registration would. */
static void run(const char *pair_of_kernel_and_library, bool plant)
{
    static struct cage cage;
    struct net net;
    struct pair pair;
    char asked[64];
    setenv("SOFTRNIC_FORK", pair_of_kernel_and_library, 1);
    setenv("PINRAIL_FLUSH", "always", 1);
    breed(&cage, 3);
    net_start(&net, 12);
    rnic_keep();
    breed(&cage, 3);
    pair_open(&net, 0, &pair);
    traffic(&net, &pair);
    breed(&cage, 3);
    if (plant) {
        int (*dontfork)(void *, size_t) = (int (*)(void *, size_t))entry("ibv_dontfork_range");
        CHECK_EQ(dontfork(cage.canary[CANARIES / 2], 4), 0);
    }
    snprintf(asked, sizeof asked, "%zu bytes in %d regions, connected", registered(), (int)rnic_counts().mrs);
    row(asked, &cage, true);
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(rnic_counts().mrs, 0);
    row("nothing, closed", &cage, false);
    if (table_result() != 0) FAIL("a row is not as it must be");
}

static void old_kernel(int version)
{
    (void)version;
    table_section("pinrail with its flush scratch, softrnic as an old kernel");
    run("old-kernel", false);
}

/* Debian 12 with RDMAV_FORK_SAFE set, as some installations do. */
static void old_library(int version)
{
    (void)version;
    setenv("RDMAV_FORK_SAFE", "1", 1);
    table_section("pinrail with its flush scratch, softrnic as rdma-core before 51 on a new kernel, RDMAV_FORK_SAFE=1");
    run("old-library", false);
}

/* Must fail: tests/demo_fork.rs makes sure that a harmed child is noticed. */
static void planted(int version)
{
    (void)version;
    table_section("pinrail, and four bytes of the heap that somebody else registered");
    run("old-kernel", true);
}

const struct ffi_case ffi_cases[] = {ONCE(old_kernel), ONCE(old_library), ONCE(planted), {0}};
