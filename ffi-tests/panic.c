/*
 * A panic inside the plugin: it ends at the boundary as ncclInternalError, and the plugin goes on. The entry point that
 * panics exists only in a build with the feature provoke-panic (FFI_PANIC_PLUGIN names it), never in dist/.
 */
#include <dlfcn.h>
#include <stdlib.h>

#include "pair.h"

typedef ncclResult_t (*provoke_t)(void);

static void contained(int version)
{
    struct net net;
    struct pair pair;
    const char *path = getenv("FFI_PANIC_PLUGIN");
    if (!path) FAIL("FFI_PANIC_PLUGIN has to name a plugin built with --features provoke-panic");
    setenv("FFI_PLUGIN", path, 1);
    net_start(&net, version);
    provoke_t provoke = (provoke_t)dlsym(net.library, "pinrail_provoke_panic");
    if (!provoke) FAIL("dlsym: %s", dlerror());
    pair_open(&net, 0, &pair);
    for (int i = 0; i < 3; i++) {
        size_t mark = log_mark();
        CHECK_EQ(provoke(), ncclInternalError);
        CHECK_EQ(log_matches_since(mark, "panic"), 1);
        pair_message(&pair, 1000, 0, (uint64_t)i);
    }
    pair_close(&pair);
    net_stop(&net);
}

static void contained_before_init(int version)
{
    struct net net;
    const char *path = getenv("FFI_PANIC_PLUGIN");
    if (!path) FAIL("FFI_PANIC_PLUGIN has to name a plugin built with --features provoke-panic");
    setenv("FFI_PLUGIN", path, 1);
    net_load(&net, version ? version : LAST_VERSION);
    provoke_t provoke = (provoke_t)dlsym(net.library, "pinrail_provoke_panic");
    if (!provoke) FAIL("dlsym: %s", dlerror());
    CHECK_EQ(provoke(), ncclInternalError);
    net_unload(&net);
}

static void not_in_the_shipped_library(int version)
{
    struct net net;
    net_load(&net, version ? version : LAST_VERSION);
    CHECK_PTR(dlsym(net.library, "pinrail_provoke_panic"), NULL);
    net_unload(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(contained),
    ONCE(contained_before_init),
    ONCE(not_in_the_shipped_library),
    {0},
};
