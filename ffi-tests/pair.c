/* Connections and single calls on them; see pair.h. */
#include "pair.h"

/* As CHECK_OK, but the place to report is the caller's, which HERE() noted before the helper was entered. */
#define MUST(CALL)                                                                                                \
    do {                                                                                                          \
        ncclResult_t result_ = (CALL);                                                                            \
        if (result_ != ncclSuccess) FAIL("%s returned %d (%s)", #CALL, (int)result_, ffi_result_name(result_));   \
    } while (0)
#define POLL(CONDITION, WHAT)                                                                                     \
    do {                                                                                                          \
        struct deadline deadline_ = deadline_in(30);                                                              \
        while (!(CONDITION)) {                                                                                    \
            if (deadline_passed(&deadline_)) FAIL("waited too long for %s", WHAT);                                \
            ffi_yield();                                                                                          \
        }                                                                                                         \
    } while (0)

/* ---- connections --------------------------------------------------------------------------------------------- */

void *try_connect_(const struct net *net, int dev, void *handle)
{
    void *comm = NULL; /* NCCL polls until this is no longer NULL, so NULL is what it holds */
    MUST(net_connect(net, dev, handle, &comm));
    return comm;
}

void *try_accept_(const struct net *net, void *listen_comm)
{
    void *comm = NULL;
    MUST(net_accept(net, listen_comm, &comm));
    return comm;
}

bool pair_step_(struct pair *pair, int dev, void *handle, void *listener)
{
    if (!pair->send) pair->send = try_connect_(pair->net, dev, handle);
    if (!pair->recv) pair->recv = try_accept_(pair->net, listener);
    return pair->send && pair->recv;
}

void pair_open_between_(const struct net *net, int sender, int receiver, struct pair *pair)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = GARBAGE;
    *pair = (struct pair){.net = net};
    MUST(net_listen(net, receiver, handle, &listener));
    CHECK(listener != NULL && listener != GARBAGE);
    POLL(pair_step_(pair, sender, handle, listener), "connect and accept, driven in one loop");
    MUST(net_close_listen(net, listener));
}

void pair_open_(const struct net *net, int dev, struct pair *pair)
{
    pair_open_between_(net, dev, dev, pair);
}

void pair_close_(struct pair *pair)
{
    MUST(net_close_send(pair->net, pair->send));
    MUST(net_close_recv(pair->net, pair->recv));
    *pair = (struct pair){0};
}

void *dial_(const struct net *net, int dev, int socket)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE];
    void *comm = NULL;
    hear(socket, handle, sizeof handle);
    POLL((comm = try_connect_(net, dev, handle)), "connect");
    return comm;
}

void *answer_(const struct net *net, int dev, int socket)
{
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = GARBAGE, *comm = NULL;
    MUST(net_listen(net, dev, handle, &listener));
    CHECK(listener != NULL && listener != GARBAGE);
    tell(socket, handle, sizeof handle);
    POLL((comm = try_accept_(net, listener)), "accept");
    MUST(net_close_listen(net, listener));
    return comm;
}

/* ---- one call each ------------------------------------------------------------------------------------------- */

void *register_host_(const struct net *net, void *comm, void *data, size_t size)
{
    void *mhandle = GARBAGE;
    MUST(net_reg_mr(net, comm, data, size, NCCL_PTR_HOST, &mhandle));
    CHECK(mhandle != NULL && mhandle != GARBAGE);
    return mhandle;
}

void *try_isend_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle)
{
    void *request = GARBAGE;
    MUST(net_isend(net, comm, data, size, tag, mhandle, &request));
    if (request == GARBAGE) FAIL("isend succeeded without writing the request pointer");
    return request;
}

void *try_irecv_(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles)
{
    void *request = GARBAGE;
    MUST(net_irecv(net, comm, n, data, sizes, tags, mhandles, &request));
    if (request == GARBAGE) FAIL("irecv succeeded without writing the request pointer");
    return request;
}

void *isend_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle)
{
    void *request;
    POLL((request = try_isend_(net, comm, data, size, tag, mhandle)), "isend to take the message");
    return request;
}

void *irecv_group_(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles)
{
    void *request;
    POLL((request = try_irecv_(net, comm, n, data, sizes, tags, mhandles)), "irecv to take the receive");
    return request;
}

void *irecv_(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle)
{
    return irecv_group_(net, comm, 1, &data, &size, &tag, &mhandle);
}

bool is_done_(const struct net *net, void *request, int *sizes)
{
    int done = 0x5bad;
    MUST(net_test(net, request, &done, sizes));
    if (done != 0 && done != 1) FAIL("test left done = 0x%x", (unsigned)done);
    return done == 1;
}

void wait_done_(const struct net *net, void *request, int *sizes)
{
    POLL(is_done_(net, request, sizes), "a request to be done");
}

int wait_size_(const struct net *net, void *request)
{
    int sizes[64];
    for (int i = 0; i < 64; i++) sizes[i] = 0x5bad;
    wait_done_(net, request, sizes);
    for (int i = 1; i < 64; i++)
        if (sizes[i] != 0x5bad) FAIL("test of a single message wrote sizes[%d] = %d", i, sizes[i]);
    return sizes[0];
}

ncclResult_t wait_error_(const struct net *net, void *request)
{
    ncclResult_t result = ncclSuccess;
    int done = 0, sizes[64] = {0};
    POLL((result = net_test(net, request, &done, sizes)) != ncclSuccess || done, "an error from test");
    if (result == ncclSuccess) FAIL("a request that cannot succeed was reported as done");
    if (!ffi_is_error(result)) FAIL("test returned %d (%s)", (int)result, ffi_result_name(result));
    return result;
}

/* ---- a whole message ----------------------------------------------------------------------------------------- */

void pair_message_(const struct pair *pair, size_t size, int tag, uint64_t key)
{
    const struct net *net = pair->net;
    struct guarded from = guarded_new(size, 3), to = guarded_new(size, 5);
    pattern_fill(from.data, size, key);
    void *from_mr = register_host_(net, pair->send, from.data, size ? size : 1);
    void *to_mr = register_host_(net, pair->recv, to.data, size ? size : 1);
    void *receive = irecv_(net, pair->recv, to.data, size, tag, to_mr);
    void *send = isend_(net, pair->send, from.data, size, tag, from_mr);
    CHECK_EQ(wait_size_(net, send), size);
    CHECK_EQ(wait_size_(net, receive), size);
    CHECK_BUFFER(&from, size, key);
    CHECK_BUFFER(&to, size, key);
    MUST(net_dereg_mr(net, pair->send, from_mr));
    MUST(net_dereg_mr(net, pair->recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
}
