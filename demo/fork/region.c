/*
 * The same by a memory region of a device, the software RNIC: ibv_fork_init, then ibv_reg_mr.
 *
 *   region LIBRARY PAIR    PAIR is a value of SOFTRNIC_FORK: which kernel and library it stands for
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

#undef ibv_reg_mr /* the header makes a macro of it, which calls what is linked */

static struct ibv_pd *pd;
static struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
static int (*dereg_mr)(struct ibv_mr *);

static void *entry(void *library, const char *name)
{
    void *call = dlvsym(library, name, "IBVERBS_1.1");
    if (!call) give_up("the library has no %s", name);
    return call;
}

static void open_device(void *library)
{
    struct ibv_device **(*list)(int *) = entry(library, "ibv_get_device_list");
    struct ibv_context *(*open)(struct ibv_device *) = entry(library, "ibv_open_device");
    struct ibv_pd *(*alloc)(struct ibv_context *) = entry(library, "ibv_alloc_pd");
    int (*fork_init)(void) = entry(library, "ibv_fork_init");
    if (fork_init() != 0) give_up("ibv_fork_init failed");
    struct ibv_device **devices = list(NULL);
    struct ibv_context *context = devices && *devices ? open(*devices) : NULL;
    if (!context || !(pd = alloc(context))) give_up("the software RNIC does not open");
    reg_mr = entry(library, "ibv_reg_mr");
    dereg_mr = entry(library, "ibv_dereg_mr");
}

static void region_of(const struct spot *spot, bool shared, bool marked)
{
    struct ibv_mr *mr = reg_mr(pd, spot->word, sizeof *spot->word, IBV_ACCESS_LOCAL_WRITE);
    if (!mr) give_up("ibv_reg_mr of 4 bytes failed");
    table_spot(shared ? "4 bytes beside other data" : "4 bytes on a page of their own", spot, shared, marked);
    if (dereg_mr(mr) != 0) give_up("ibv_dereg_mr failed");
}

int main(int argc, char **argv)
{
    if (argc != 3) give_up("usage: region LIBRARY PAIR");
    const char *pair = argv[2];
    bool marked = strcmp(pair, "copy-on-fork") != 0;
    setenv("SOFTRNIC_FORK", pair, 1);
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) give_up("%s; please run: make", dlerror());
    open_device(library);
    if (!marked)
        table_section("softrnic, a kernel that copies pinned pages and a library that relies on it: ibv_reg_mr");
    else if (strcmp(pair, "old-kernel") == 0)
        table_section("softrnic, an old kernel: ibv_fork_init, ibv_reg_mr");
    else
        table_section("softrnic, a kernel that copies pinned pages and a library that marks all the same: ibv_reg_mr");

    struct spot shared = spot_shared(), alone = spot_alone();
    region_of(&shared, true, marked);
    if (marked) {
        table_spot("the same after ibv_dereg_mr", &shared, true, false);
        region_of(&alone, false, marked);
    }
    return table_result();
}
