/*
 * Memory that another driver holds where it lies: on the software RNIC its pages are in CMA and pinned for short, so that
 * no registration of them succeeds and the plugin has to reach them through copies.
 */
#ifndef FFI_TESTS_HELD_H
#define FFI_TESTS_HELD_H

#include "pair.h"
#include "softrnic.h"

/* net_start on a machine all of whose pages are in CMA. What nobody holds can be moved and so be registered. */
void held_start(struct net *net, int version);
/* A guarded buffer; `held`: the pages of all of it, guards included, are held. */
struct guarded held_new(size_t size, size_t misalignment, bool held);
/* Lets go of a held one, and unmaps it. */
void held_free(struct guarded *buffer);

/* Whether a device holds the buffer: on its first and last page there is a region of the plugin. */
bool is_registered(const struct guarded *buffer);
/* register_host of a whole buffer that must end in a region over its pages, or just not do that. */
void *register_direct_(const struct net *net, void *comm, const struct guarded *buffer);
void *register_bounced_(const struct net *net, void *comm, const struct guarded *buffer);
#define register_direct(...) (HERE(), register_direct_(__VA_ARGS__))
#define register_bounced(...) (HERE(), register_bounced_(__VA_ARGS__))

/* A connection of this process with a buffer on each end, held there or not. */
struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};
/* The ends that are reached through copies. */
enum ends { NEITHER, SENDER, RECEIVER, BOTH };
/* Pair and buffers over a plugin that was started. */
void desk_lay(struct desk *desk, enum ends held, size_t from, size_t to);
/* held_start and desk_lay of two buffers of one size. */
void desk_open(struct desk *desk, int version, enum ends held, size_t size);
void desk_clear(struct desk *desk);
void desk_close(struct desk *desk);

/* One call each: part [offset, offset + size) of the buffer under tag `tag`; NULL when the plugin would block. */
void *desk_irecv(struct desk *desk, size_t offset, size_t size, int tag);
void *desk_isend(struct desk *desk, size_t offset, size_t size, int tag);

/* One message from start to start of two buffers: `sent` bytes for a receive of `asked`; every byte is checked. */
void held_message_(const struct pair *pair, struct guarded *from, void *from_mr, size_t sent, struct guarded *to,
                   void *to_mr, size_t asked, uint64_t key);
#define held_message(...) (HERE(), held_message_(__VA_ARGS__))

#endif
