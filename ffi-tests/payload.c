/* Patterns, guarded buffers and shuffles; harness.h says what each function promises. */
#include "harness.h"

#include <string.h>
#include <sys/mman.h>

enum { GUARD = 512, GUARD_BYTE = 0xC3 };

static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t pattern_word(uint64_t key, size_t offset)
{
    return mix(mix(key) ^ (offset >> 3));
}

void pattern_fill(void *data, size_t size, uint64_t key)
{
    uint8_t *bytes = data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = pattern_word(key, i);
        memcpy(bytes + i, &word, size - i < 8 ? size - i : 8);
    }
}

ptrdiff_t pattern_mismatch(const void *data, size_t size, uint64_t key)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = pattern_word(key, i);
        size_t n = size - i < 8 ? size - i : 8;
        if (memcmp(bytes + i, &word, n) == 0) continue;
        for (size_t j = 0; j < n; j++)
            if (bytes[i + j] != ((const uint8_t *)&word)[j]) return (ptrdiff_t)(i + j);
    }
    return -1;
}

struct guarded guarded_new(size_t size, size_t misalignment)
{
    struct guarded buffer = {.size = size, .map_size = GUARD + misalignment + size + GUARD};
    buffer.map = mmap(NULL, buffer.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(buffer.map != MAP_FAILED);
    buffer.data = buffer.map + GUARD + misalignment;
    guarded_reset(&buffer);
    return buffer;
}

void guarded_free(struct guarded *buffer)
{
    munmap(buffer->map, buffer->map_size);
    *buffer = (struct guarded){0};
}

void guarded_reset(struct guarded *buffer)
{
    memset(buffer->map, GUARD_BYTE, buffer->map_size);
}

static void check_untouched(const char *file, int line, const struct guarded *buffer, const uint8_t *from,
                            const uint8_t *to, const char *what)
{
    for (const uint8_t *p = from; p < to; p++)
        if (*p != GUARD_BYTE)
            ffi_fail(file, line, "%s: byte at offset %td of a buffer of %zu is 0x%02x, should be untouched", what,
                     p - buffer->data, buffer->size, *p);
}

void guarded_check_part(const char *file, int line, const struct guarded *buffer, size_t offset, size_t room,
                        size_t size, uint64_t key)
{
    if (size > room || offset + room > buffer->size)
        ffi_fail(file, line, "%zu bytes at %zu do not fit into %zu", size, offset, room);
    ptrdiff_t wrong = pattern_mismatch(buffer->data + offset, size, key);
    if (wrong >= 0)
        ffi_fail(file, line, "payload of message 0x%llx: byte %td of %zu is 0x%02x, should be 0x%02x",
                 (unsigned long long)key, wrong, size, buffer->data[offset + (size_t)wrong],
                 (uint8_t)(pattern_word(key, (size_t)wrong) >> (8 * ((size_t)wrong & 7))));
    check_untouched(file, line, buffer, buffer->data + offset + size, buffer->data + offset + room,
                    "behind the message");
}

void guarded_check(const char *file, int line, const struct guarded *buffer, size_t size, uint64_t key)
{
    guarded_check_part(file, line, buffer, 0, buffer->size, size, key);
    check_untouched(file, line, buffer, buffer->map, buffer->data, "guard in front");
    check_untouched(file, line, buffer, buffer->data + buffer->size, buffer->map + buffer->map_size, "guard behind");
}

uint64_t next_random(uint64_t *state)
{
    return mix((*state)++);
}

void shuffle(int *items, int count, uint64_t *state)
{
    for (int i = count - 1; i > 0; i--) {
        int j = (int)(next_random(state) % (uint64_t)(i + 1));
        int swapped = items[i];
        items[i] = items[j];
        items[j] = swapped;
    }
}
