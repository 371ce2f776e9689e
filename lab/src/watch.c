/*
 * libwatch.so: opened in place of libibverbs.so.1, which serves every call. It notes what is registered, and how much of
 * it lay among the frames LAB_FRAMES ("FIRST END") before and after. One thread at a time.
 */
#include <dlfcn.h>

#include "frames.h"
#include "watch.h"

struct watch watch;

static size_t forbidden_pages(const char *data, size_t size)
{
    struct frames frames;
    char *end = getenv("LAB_FRAMES");
    size_t count = 0;
    frames.first = strtoull(end, &end, 10);
    frames.end = strtoull(end, NULL, 10);
    const char *page = data - (uintptr_t)data % FRAME_SIZE;
    for (; page < data + size; page += FRAME_SIZE) count += frames_have(frames, page);
    return count;
}

static void *real(const char *name, const char *version)
{
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD), *function = NULL;
    if (library) function = dlvsym(library, name, version);
    if (!function) abort();
    return function;
}

static int depth; /* a verb may be made of the other, which then is not noted */

static struct watch_entry begin(const void *data, size_t size)
{
    if (depth++ > 0) return (struct watch_entry){0};
    size_t first = (uintptr_t)data / FRAME_SIZE, last = ((uintptr_t)data + size - 1) / FRAME_SIZE;
    return (struct watch_entry){.data = data, .size = size, .pages = last - first + 1, .before = forbidden_pages(data, size)};
}

static void *end(struct watch_entry entry, void *mr)
{
    if (--depth > 0) return mr;
    entry.worked = mr != NULL;
    entry.after = forbidden_pages(entry.data, entry.size);
    if (watch.count == WATCH_ENTRIES) abort();
    watch.entries[watch.count++] = entry;
    return mr;
}

void *ibv_reg_mr(void *pd, void *data, size_t size, int access);
void *ibv_reg_mr(void *pd, void *data, size_t size, int access)
{
    typedef void *function(void *, void *, size_t, int);
    struct watch_entry entry = begin(data, size);
    return end(entry, ((function *)real("ibv_reg_mr", "IBVERBS_1.1"))(pd, data, size, access));
}

void *ibv_reg_mr_iova2(void *pd, void *data, size_t size, uint64_t iova, unsigned access);
void *ibv_reg_mr_iova2(void *pd, void *data, size_t size, uint64_t iova, unsigned access)
{
    typedef void *function(void *, void *, size_t, uint64_t, unsigned);
    struct watch_entry entry = begin(data, size);
    return end(entry, ((function *)real("ibv_reg_mr_iova2", "IBVERBS_1.8"))(pd, data, size, iova, access));
}
