/*
 * Memory of the null provider. One mapping, made when the library is loaded, holds everything it ever hands out: the
 * bench measures a connection's memory as the growth of the process, and the provider must not be part of it.
 */
#include "null.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define ARENA_BYTES ((size_t)4 << 30)
#define CLASSES 32

static char *arena;
static size_t arena_used;
static void *free_blocks[CLASSES];
static pthread_mutex_t arena_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void reserve(void)
{
    void *block = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena = block == MAP_FAILED ? NULL : block;
}

__attribute__((destructor)) static void release(void)
{
    if (arena)
        munmap(arena, ARENA_BYTES);
}

/* Power-of-two classes from 64 bytes on. */
static int class_of(size_t bytes)
{
    int class = 6;
    while (((size_t)1 << class) < bytes)
        class++;
    return class;
}

void *null_alloc(size_t bytes)
{
    int class = class_of(bytes);
    void *block = NULL;
    pthread_mutex_lock(&arena_lock);
    if (class < CLASSES && free_blocks[class]) {
        block = free_blocks[class];
        free_blocks[class] = *(void **)block;
    } else if (class < CLASSES && arena && arena_used + ((size_t)1 << class) <= ARENA_BYTES) {
        block = arena + arena_used;
        arena_used += (size_t)1 << class;
    }
    pthread_mutex_unlock(&arena_lock);
    if (block)
        memset(block, 0, bytes);
    return block;
}

void null_free(void *block, size_t bytes)
{
    if (!block)
        return;
    int class = class_of(bytes);
    pthread_mutex_lock(&arena_lock);
    *(void **)block = free_blocks[class];
    free_blocks[class] = block;
    pthread_mutex_unlock(&arena_lock);
}

int null_fault(const char *what, int code)
{
    if (null_counters.faults++ == 0)
        fprintf(stderr, "null provider: %s\n", what);
    return code;
}
