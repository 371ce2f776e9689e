/* What libwatch.so, which stands between the plugin and the distribution's libibverbs, notes about registrations. */
#ifndef LAB_WATCH_H
#define LAB_WATCH_H
#include <stddef.h>

enum { WATCH_ENTRIES = 256 };

struct watch_entry {
    const char *data;
    size_t size;
    int worked;
    size_t pages, before, after; /* those that lay among the forbidden frames, before it and after */
};

struct watch {
    int count;
    struct watch_entry entries[WATCH_ENTRIES];
};

#endif
