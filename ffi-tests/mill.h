/*
 * One connection of this process under traffic by chance, each call of which is checked.
 *
 * A seed decides everything: how many members a receive has, their sizes (0 to MiB), tags and order, whether memory is
 * registered for one message only, what is flushed, and which call comes next. Whatever happens to the connection, a
 * request completes once, with its bytes in place, or its end has failed, with one code from then on.
 */
#ifndef FFI_TESTS_MILL_H
#define FFI_TESTS_MILL_H

#include "held.h"

enum { MILL_MEMBERS = 8, MILL_WINDOW = 32 };

/* One message: a member of a receive, and the send that answers it. */
struct grain {
    size_t sent, asked;
    size_t from, to; /* offsets in the memory of the ends */
    int tag;
    void *from_mr, *to_mr; /* registrations of its own */
    void *send;
    bool posted, done;
};

/* A receive of up to eight members. */
struct batch {
    uint64_t number; /* from 1; 0: free */
    int count;
    struct grain grains[MILL_MEMBERS];
    int order[MILL_MEMBERS]; /* in which the sends come */
    int next;                /* of them, the first that is not posted */
    void *receive, *flush;
    bool posted, received, optional;
};

struct mill_end {
    void *comm, *mr;
    struct guarded memory;
    ncclResult_t code; /* the first error that any call gave */
    bool sends;
};

struct mill {
    const struct net *net;
    struct mill_end send, recv;
    struct batch batches[MILL_WINDOW];
    int window, members;
    size_t largest, room; /* of a message; of a batch */
    uint64_t next, want;  /* batches begun, and to be begun */
    uint64_t finished;
    uint64_t sending; /* the batch whose sends are posted */
    uint64_t random;
    uint64_t messages, bytes, flushed; /* whole ones */
    uint64_t wrong_bytes;
    uint64_t hash; /* of everything that was answered */
    bool flushes, worn; /* worn: its memory must not be written any more */
};

/* What a mill is like; `held` are the ends whose memory cannot be registered. */
struct mill_plan {
    int dev;
    uint64_t seed, batches;
    enum ends held;
    bool flushes;
};

/* Connects and registers. False: that failed, with nothing left. */
bool mill_open(struct mill *mill, const struct net *net, const struct mill_plan *plan);
/* One call by chance. */
void mill_turn(struct mill *mill);
bool mill_has_finished(const struct mill *mill);
bool mill_has_failed(const struct mill *mill);
/* One test of everything that is outstanding at an end; whether nothing is. */
bool mill_settled(struct mill *mill, struct mill_end *end);
/* A failed end says the same as ever. */
void mill_expect_latched(struct mill *mill, struct mill_end *end);
/* Closes an end, whatever is under way. */
void mill_close_end(struct mill *mill, struct mill_end *end);
/* From here on nothing may be written, which mill_free checks: both ends are closed. */
void mill_wear(struct mill *mill);
void mill_free(struct mill *mill);

#endif
