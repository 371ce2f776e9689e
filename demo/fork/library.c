/*
 * The same by the libibverbs of this system. Its fork handling needs no device: ibv_dontfork_range is what ibv_reg_mr
 * calls first. It is exported for drivers and in no header.
 *
 * A library from rdma-core 51 on marks nothing where the kernel copies pinned pages for children; then that is shown.
 */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

enum { NOT_NEEDED = 2 };

static void *entry(void *library, const char *name, const char *version)
{
    void *call = dlvsym(library, name, version);
    if (!call) give_up("libibverbs.so.1 has no %s (%s)", name, version);
    return call;
}

/* The version of rdma-core, which the library's file name ends with: libibverbs.so.1.14.44.0 is 44.0. */
static const char *release(const void *call)
{
    static char path[PATH_MAX];
    Dl_info info;
    if (!dladdr(call, &info) || !realpath(info.dli_fname, path)) return "of unknown version";
    const char *name = strrchr(path, '/') + 1;
    int major, minor, skip = 0;
    if (sscanf(name, "libibverbs.so.%*d.%*d.%n%d.%d", &skip, &major, &minor) != 2) return name;
    return name + skip;
}

int main(void)
{
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    if (!library) give_up("%s; please run: apt-get install libibverbs1", dlerror());
    int (*fork_init)(void) = entry(library, "ibv_fork_init", "IBVERBS_1.1");
    int (*dontfork)(void *, size_t) = entry(library, "ibv_dontfork_range", "IBVERBS_1.1");
    int (*dofork)(void *, size_t) = entry(library, "ibv_dofork_range", "IBVERBS_1.1");
    int (*status)(void) = dlvsym(library, "ibv_is_fork_initialized", "IBVERBS_1.13");

    if (fork_init() != 0) give_up("ibv_fork_init failed");
    bool needed = !status || status() != NOT_NEEDED;
    table_section("libibverbs of this system (rdma-core %s): ibv_fork_init, ibv_dontfork_range%s", release(fork_init),
                  needed ? "" : "; it says that marks are not needed");

    struct spot shared = spot_shared();
    if (dontfork(shared.word, sizeof *shared.word) != 0) give_up("ibv_dontfork_range failed");
    bool marked = needed || withheld_now().bytes > 0;
    table_spot("4 bytes beside other data", &shared, true, marked);
    if (dofork(shared.word, sizeof *shared.word) != 0) give_up("ibv_dofork_range failed");
    table_spot("the same after ibv_dofork_range", &shared, true, false);

    struct spot alone = spot_alone();
    if (dontfork(alone.word, sizeof *alone.word) != 0) give_up("ibv_dontfork_range failed");
    table_spot("4 bytes on a page of their own", &alone, false, marked);
    if (dofork(alone.word, sizeof *alone.word) != 0) give_up("ibv_dofork_range failed");

    return table_result();
}
