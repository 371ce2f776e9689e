/*
 * What every test program shares: cases, checks, deadlines, processes, patterns, guarded buffers, the logger.
 *
 * A program defines `ffi_cases` and gets its main() from here:
 *     program --list           prints every case, one a line ("name" or "name vN")
 *     program name [vN]        runs one case in a process of its own; exit status 0 is a pass
 * A failed check prints file, line and the values and ends the process; nothing carries on after it.
 */
#ifndef FFI_TESTS_HARNESS_H
#define FFI_TESTS_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_net.h"

enum { FIRST_VERSION = 6, LAST_VERSION = 12 };

struct ffi_case {
    const char *name;
    void (*run)(int version);
    bool once;   /* one run that is not tied to a version of the table */
    int seconds; /* deadline of the case; 0 means the usual one */
};

#define EACH(FUNCTION) {.name = #FUNCTION, .run = FUNCTION}
#define ONCE(FUNCTION) {.name = #FUNCTION, .run = FUNCTION, .once = true}
extern const struct ffi_case ffi_cases[]; /* ends with a NULL name */

/* ---- checks -------------------------------------------------------------------------------------------------- */

__attribute__((noreturn, format(printf, 3, 4))) void ffi_fail(const char *file, int line, const char *fmt, ...);
/* Remembers where the test is, for the deadline's message and for failures inside a shared helper. */
void ffi_at(const char *file, int line);
const char *ffi_result_name(ncclResult_t result);
/* Called, if set, before a process ends by a failed check: for what only this process can still say. */
extern void (*ffi_last_words)(void);

#define HERE() ffi_at(__FILE__, __LINE__)
#define FAIL(...) ffi_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(CONDITION)                                                                                          \
    do {                                                                                                          \
        if (!(CONDITION)) FAIL("%s", #CONDITION);                                                                 \
    } while (0)
#define CHECK_EQ(GOT, WANT)                                                                                       \
    do {                                                                                                          \
        long long got_ = (long long)(GOT), want_ = (long long)(WANT);                                             \
        if (got_ != want_) FAIL("%s is %lld (0x%llx), want %s = %lld (0x%llx)", #GOT, got_,                       \
                                (unsigned long long)got_, #WANT, want_, (unsigned long long)want_);               \
    } while (0)
#define CHECK_PTR(GOT, WANT)                                                                                      \
    do {                                                                                                          \
        const void *got_ = (GOT), *want_ = (WANT);                                                                \
        if (got_ != want_) FAIL("%s is %p, want %s = %p", #GOT, got_, #WANT, want_);                              \
    } while (0)
#define CHECK_STR(GOT, WANT)                                                                                      \
    do {                                                                                                          \
        const char *got_ = (GOT), *want_ = (WANT);                                                                \
        if (!ffi_same_text(got_, want_)) FAIL("%s is \"%s\", want \"%s\"", #GOT, got_ ? got_ : "(null)", want_); \
    } while (0)
#define CHECK_OK(CALL)                                                                                            \
    do {                                                                                                          \
        HERE();                                                                                                   \
        ncclResult_t result_ = (CALL);                                                                            \
        if (result_ != ncclSuccess) FAIL("%s returned %d (%s)", #CALL, (int)result_, ffi_result_name(result_));   \
    } while (0)
/* The call must answer with an error code: not success, not "in progress", nothing outside the enum. */
#define CHECK_REFUSED(CALL)                                                                                       \
    do {                                                                                                          \
        HERE();                                                                                                   \
        ncclResult_t result_ = (CALL);                                                                            \
        if (!ffi_is_error(result_)) FAIL("%s returned %d (%s), want an error", #CALL, (int)result_,               \
                                         ffi_result_name(result_));                                               \
    } while (0)

/* "main", or the role of a process that run_two or run_one started. */
extern const char *ffi_process_name;
bool ffi_same_text(const char *a, const char *b);
bool ffi_is_error(ncclResult_t result);

/* ---- deadlines ----------------------------------------------------------------------------------------------- */

struct deadline {
    uint64_t end_ns;
};
struct deadline deadline_in(double seconds); /* scaled by FFI_DEADLINE_SCALE, for valgrind */
bool deadline_passed(const struct deadline *deadline);

/* Polls CONDITION, giving the processor away in between. Everything that waits in these tests waits here. */
#define WAIT_UNTIL(CONDITION, WHAT)                                                                               \
    do {                                                                                                          \
        struct deadline deadline_ = deadline_in(30);                                                              \
        HERE();                                                                                                   \
        while (!(CONDITION)) {                                                                                    \
            if (deadline_passed(&deadline_)) FAIL("waited too long for %s", WHAT);                                \
            ffi_yield();                                                                                          \
        }                                                                                                         \
    } while (0)
void ffi_yield(void);

/* ---- processes ----------------------------------------------------------------------------------------------- */

struct role {
    const char *name;
    void (*run)(int version, int socket, void *argument);
    bool dies_by_kill; /* this process must end by SIGKILL, not by exit(0) */
};
/* Runs two processes joined by a socket pair. Returns when both ended as they should; fails as soon as one did not. */
void run_two(int version, struct role first, struct role second, void *argument);
/* One process of its own, for what a process can only do once, such as reading its settings. */
void run_one(int version, struct role role, void *argument);

/* fork, for tests about forking: the child dies with its parent and has the case's deadline. */
int fork_child(void);

/* Blocking transfer over the socket pair; the end of the stream is a failure ("the other process is gone"). */
void tell(int socket, const void *bytes, size_t size);
void hear(int socket, void *bytes, size_t size);
/* Waits until the other process has closed its end, which a killed one has. */
void hear_end(int socket);
/* One letter, so that the two sides agree which step they are at. */
void tell_step(int socket, char step);
void hear_step(int socket, char step);
/* Both: afterwards the two sides are at the same point. */
void meet(int socket, char step);

/* ---- payload ------------------------------------------------------------------------------------------------- */

/* Byte `offset` of message `key` is a function of both, so that a byte in a wrong place or of an old message shows. */
void pattern_fill(void *data, size_t size, uint64_t key);
/* The offset of the first wrong byte, or -1. */
ptrdiff_t pattern_mismatch(const void *data, size_t size, uint64_t key);

/* A buffer with guard bytes on both sides, at a chosen offset inside its first page. */
struct guarded {
    uint8_t *data;
    size_t size;
    uint8_t *map;
    size_t map_size;
};
struct guarded guarded_new(size_t size, size_t misalignment);
void guarded_free(struct guarded *buffer);
/* All bytes, guards included, become the guard byte: what a receive has not written stays recognisable. */
void guarded_reset(struct guarded *buffer);
/* The first `size` bytes carry the pattern of `key`; the rest of the buffer and both guards are untouched. */
void guarded_check(const char *file, int line, const struct guarded *buffer, size_t size, uint64_t key);
/* As guarded_check for a part of the buffer: [offset, offset + size) carries `key`, up to offset + room is untouched. */
void guarded_check_part(const char *file, int line, const struct guarded *buffer, size_t offset, size_t room,
                        size_t size, uint64_t key);
#define CHECK_BUFFER(BUFFER, SIZE, KEY) guarded_check(__FILE__, __LINE__, BUFFER, SIZE, KEY)
#define CHECK_PART(BUFFER, OFFSET, ROOM, SIZE, KEY)                                                               \
    guarded_check_part(__FILE__, __LINE__, BUFFER, OFFSET, ROOM, SIZE, KEY)

/* A small deterministic generator, for shuffles. */
uint64_t next_random(uint64_t *state);
void shuffle(int *items, int count, uint64_t *state);

/* ---- the logger ---------------------------------------------------------------------------------------------- */

/* Prints to stderr, keeps the text, and fails the test when a message does not come through "%s" as one line. */
void ffi_logger(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *fmt, ...);
size_t log_mark(void);
/* How many messages at WARN came after `mark`. */
int log_warnings_since(size_t mark);
/* How many messages of any level after `mark` contain `text`. */
int log_matches_since(size_t mark, const char *text);

/* ---- this process -------------------------------------------------------------------------------------------- */

struct census {
    int threads;
    int descriptors;
    int megabytes; /* of address space */
};
struct census census_take(void);
bool is_mapped(const char *path_fragment);
void census_print(const char *label);

const char *plugin_path(void);
const char *softrnic_path(void);

#endif
