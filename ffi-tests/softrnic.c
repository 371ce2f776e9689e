/* The software RNIC's own calls; see softrnic.h. */
#include "softrnic.h"

#include <dlfcn.h>

static void *entry(const char *name)
{
    void *library = dlopen(softrnic_path(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) FAIL("%s is not loaded", softrnic_path());
    void *address = dlsym(library, name);
    if (!address) FAIL("%s has no %s", softrnic_path(), name);
    dlclose(library); /* the plugin holds it */
    return address;
}

struct softrnic_counts softrnic_counts(void)
{
    entry("softrnic_counters");
    return (struct softrnic_counts){0};
}

void softrnic_hold(bool on)
{
    (void)on;
    entry("softrnic_hold");
}

void softrnic_release(uint64_t count)
{
    (void)count;
    entry("softrnic_release");
}
