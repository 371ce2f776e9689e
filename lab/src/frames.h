/*
 * Page frames: where memory of this process lies, memory that lies where a long-term pin is forbidden, and a short pin
 * that keeps it there. For programs that run in the guest as root.
 */
#ifndef LAB_FRAMES_H
#define LAB_FRAMES_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FRAME_SIZE = 4096, CHUNK = 4 << 20, MAX_CHUNKS = 512 };

/* The frame behind an address; 0: nothing is there, or the kernel does not tell. */
static inline uint64_t frame_of(const void *p)
{
    static int pagemap = -1;
    uint64_t entry;
    if (pagemap < 0) pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pread(pagemap, &entry, sizeof entry, (off_t)((uintptr_t)p / FRAME_SIZE * sizeof entry)) != sizeof entry) return 0;
    return entry >> 63 ? entry & ((1ull << 55) - 1) : 0;
}

/* Frames in which a long-term pin is forbidden: the CMA reserve or ZONE_MOVABLE. */
struct frames {
    uint64_t first, end;
};

static inline bool frames_have(struct frames frames, const void *p)
{
    uint64_t frame = frame_of(p);
    return frame >= frames.first && frame < frames.end;
}

/* Anonymous memory of `size` bytes, touched until all of it lies as wanted; what was touched besides is given back. */
static inline char *find_pages(size_t size, bool (*wanted)(const char *page))
{
    static char *chunks[MAX_CHUNKS];
    char *found = NULL;
    int n = 0;
    while (n < MAX_CHUNKS && !found) {
        char *p = (char *)mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) break;
        madvise(p, CHUNK, MADV_NOHUGEPAGE); /* else huge pages decide the placement */
        chunks[n++] = p;
        size_t run = 0;
        for (size_t i = 0; i < CHUNK && !found; i += FRAME_SIZE) {
            p[i] = 1;
            run = wanted(p + i) ? run + FRAME_SIZE : 0;
            if (run == size) found = p + i + FRAME_SIZE - size;
        }
    }
    for (int i = 0; i < n; i++) {
        char *p = chunks[i], *end = p + CHUNK;
        if (found < p || found >= end) {
            munmap(p, CHUNK);
            continue;
        }
        if (found > p) munmap(p, (size_t)(found - p));
        if (found + size < end) munmap(found + size, (size_t)(end - found) - size);
    }
    return found;
}

/* Pages in a pipe: pinned without FOLL_LONGTERM as long as it is open. */
struct short_pin {
    int pipe[2];
};

static inline bool short_pin_take(struct short_pin *pin, void *data, size_t size)
{
    struct iovec io = {data, size};
    return pipe2(pin->pipe, O_CLOEXEC) == 0 && fcntl(pin->pipe[1], F_SETPIPE_SZ, (int)size) >= 0 &&
           vmsplice(pin->pipe[1], &io, 1, SPLICE_F_NONBLOCK) == (ssize_t)size;
}

static inline void short_pin_drop(struct short_pin *pin)
{
    close(pin->pipe[0]);
    close(pin->pipe[1]);
}

#endif
