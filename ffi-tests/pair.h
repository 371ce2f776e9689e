/*
 * Connections and the calls on them that every scenario needs: connect the way NCCL does, register, post until the
 * plugin takes the request, poll until it is done.
 *
 * Every out-pointer is handed over full of garbage, as NCCL's are, and must have been written on success.
 */
#ifndef FFI_TESTS_PAIR_H
#define FFI_TESTS_PAIR_H

#include "net.h"

#define GARBAGE ((void *)0x5bad5bad5bad5bad)

/* A send and a receive communicator of this process, connected to each other by this thread alone. */
struct pair {
    const struct net *net;
    void *send, *recv;
};
/* One poll of whichever side is missing; true once both are there. */
bool pair_step_(struct pair *pair, int dev, void *handle, void *listener);
/* `sender` and `receiver` are the devices of the two ends. */
void pair_open_between_(const struct net *net, int sender, int receiver, struct pair *pair);
void pair_open_(const struct net *net, int dev, struct pair *pair);
void pair_close_(struct pair *pair);

/* The two ends of a connection between processes; the handle travels over the socket pair. */
void *dial_(const struct net *net, int dev, int socket);
void *answer_(const struct net *net, int dev, int socket);

/* One poll each: NULL when the plugin is not there yet. */
void *try_connect_(const struct net *net, int dev, void *handle);
void *try_accept_(const struct net *net, void *listen_comm);

void *register_host_(const struct net *net, void *comm, void *data, size_t size);
/* One call: NULL when the plugin would block. */
void *try_isend_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle);
void *try_irecv_(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles);
void *isend_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle);
void *irecv_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle);
void *irecv_group_(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles);
/* One test() with a garbage `done`; what it says. `sizes` as for the plugin. */
bool is_done_(const struct net *net, void *request, int *sizes);
void wait_done_(const struct net *net, void *request, int *sizes);
/* Waits for a request with one size and returns that size. */
int wait_size_(const struct net *net, void *request);
/* Polls test() until it fails, which it must within the deadline without ever saying "done"; returns the code. */
ncclResult_t wait_error_(const struct net *net, void *request);

/* The call site is what a failure should name. */
#define pair_step(...) (HERE(), pair_step_(__VA_ARGS__))
#define pair_open_between(...) (HERE(), pair_open_between_(__VA_ARGS__))
#define pair_open(...) (HERE(), pair_open_(__VA_ARGS__))
#define pair_close(...) (HERE(), pair_close_(__VA_ARGS__))
#define dial(...) (HERE(), dial_(__VA_ARGS__))
#define answer(...) (HERE(), answer_(__VA_ARGS__))
#define try_connect(...) (HERE(), try_connect_(__VA_ARGS__))
#define try_accept(...) (HERE(), try_accept_(__VA_ARGS__))
#define register_host(...) (HERE(), register_host_(__VA_ARGS__))
#define try_isend(...) (HERE(), try_isend_(__VA_ARGS__))
#define try_irecv(...) (HERE(), try_irecv_(__VA_ARGS__))
#define isend(...) (HERE(), isend_(__VA_ARGS__))
#define irecv(...) (HERE(), irecv_(__VA_ARGS__))
#define irecv_group(...) (HERE(), irecv_group_(__VA_ARGS__))
#define is_done(...) (HERE(), is_done_(__VA_ARGS__))
#define wait_done(...) (HERE(), wait_done_(__VA_ARGS__))
#define wait_size(...) (HERE(), wait_size_(__VA_ARGS__))
#define wait_error(...) (HERE(), wait_error_(__VA_ARGS__))

/* One message of `size` bytes through a pair of this process, checked on arrival in guarded buffers. */
void pair_message_(const struct pair *pair, size_t size, int tag, uint64_t key);
#define pair_message(...) (HERE(), pair_message_(__VA_ARGS__))

#endif
