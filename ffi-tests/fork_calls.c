/*
 * Calls from a forked child, in every version of the table: each is refused and writes its out-pointer, none of them waits,
 * and the parent's objects are as they were. What else a child may do: end, exec, use its heap, fork again.
 */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "forked.h"

enum { LENGTH = 1000 };

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};

static void desk_open(struct desk *desk, int version)
{
    setenv("PINRAIL_FLUSH", "always", 1);
    net_start(&desk->net, version);
    pair_open(&desk->net, 0, &desk->pair);
    desk->from = guarded_new(LENGTH, 0);
    desk->to = guarded_new(LENGTH, 0);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, LENGTH);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to.data, LENGTH);
    pattern_fill(desk->from.data, LENGTH, 7);
}

static void desk_close(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    net_stop(&desk->net);
}

static void desk_message(struct desk *desk)
{
    guarded_reset(&desk->to);
    void *receive = irecv(&desk->net, desk->pair.recv, desk->to.data, LENGTH, 0, desk->to_mr);
    void *send = isend(&desk->net, desk->pair.send, desk->from.data, LENGTH, 0, desk->from_mr);
    CHECK_EQ(wait_size(&desk->net, send), LENGTH);
    CHECK_EQ(wait_size(&desk->net, receive), LENGTH);
    CHECK_BUFFER(&desk->to, LENGTH, 7);
}

/* ---- every call ---------------------------------------------------------------------------------------------- */

/* An attempt to connect that was begun, a listener, and requests in every state. */
struct open {
    void *listener, *sending;
    char handle[NCCL_NET_HANDLE_MAXSIZE];
    void *receive, *complete, *flush;
};

static void refuse_everything(struct desk *desk, struct open *open)
{
    const struct net *net = &desk->net;
    void *out = GARBAGE, *data = desk->to.data;
    char handle[NCCL_NET_HANDLE_MAXSIZE];
    size_t size = LENGTH;
    int number = 0x5bad, tag = 0, sizes = LENGTH, done = 1;
    union {
        char room[1024];
        struct net_properties properties;
    } any;
#define CLEARED(OUT)                                                                                              \
    do {                                                                                                          \
        CHECK_PTR(OUT, NULL);                                                                                     \
        (OUT) = GARBAGE;                                                                                          \
    } while (0)
    memset(desk->to.data, 0xee, LENGTH); /* its own copy */
    CHECK_REFUSED(net_init_context((struct net *)net, 5, ffi_logger, &out));
    if (net->version >= 11) CLEARED(out);
    CHECK_REFUSED(net_devices(net, &number));
    CHECK_EQ(number, 0);
    CHECK_REFUSED(net_get_properties(net, 0, &any.properties));
    CHECK_REFUSED(net_listen(net, 0, handle, &out));
    CLEARED(out);
    CHECK_REFUSED(net_connect(net, 0, open->handle, &open->sending));
    CLEARED(open->sending);
    CHECK_REFUSED(net_accept(net, open->listener, &out));
    CLEARED(out);
    CHECK_REFUSED(net_reg_mr(net, desk->pair.send, desk->from.data, LENGTH, NCCL_PTR_HOST, &out));
    CLEARED(out);
    CHECK_REFUSED(net_reg_mr_dmabuf(net, desk->pair.recv, data, LENGTH, NCCL_PTR_DMABUF, 0, STDIN_FILENO, &out));
    CLEARED(out);
    CHECK_REFUSED(net_isend(net, desk->pair.send, desk->from.data, LENGTH, 0, desk->from_mr, &out));
    out = GARBAGE;
    CHECK_REFUSED(net_irecv(net, desk->pair.recv, 1, &data, &size, &tag, &desk->to_mr, &out));
    out = NULL;
    CHECK_REFUSED(net_iflush(net, desk->pair.recv, 1, &data, &sizes, &desk->to_mr, &out));
    /* One that has nothing to flush waits for nothing, here too. */
    sizes = 0;
    CHECK_OK(net_iflush(net, desk->pair.recv, 1, &data, &sizes, &desk->to_mr, &out));
    CHECK_PTR(out, NULL);
    void *const requests[] = {open->receive, open->complete, open->flush};
    for (int i = 0; i < 3; i++) {
        for (int twice = 0; twice < 2; twice++) CHECK_REFUSED(net_test(net, requests[i], &done, NULL));
        CHECK_EQ(done, 0);
        done = 1;
    }
    if (net->version >= 9) {
        ncclNetVDeviceProps8_t members = {.ndevs = 1};
        size_t at = net->version == 9 ? offsetof(ncclNet_v9_t, makeVDevice)
                  : net->version == 10 ? offsetof(ncclNet_v10_t, makeVDevice)
                  : net->version == 11 ? offsetof(ncclNet_v11_t, makeVDevice) : offsetof(ncclNet_v12_t, makeVDevice);
        ncclResult_t (*fuse)(int *, void *) = (ncclResult_t(*)(int *, void *))net_slot(net, at);
        CHECK_REFUSED(fuse(&number, &members));
        CHECK_EQ(number, -1);
    }
    /* Ends, too: what they would end is the parent's. */
    CHECK_REFUSED(net_dereg_mr(net, desk->pair.send, desk->from_mr));
    CHECK_REFUSED(net_close_send(net, desk->pair.send));
    CHECK_REFUSED(net_close_recv(net, desk->pair.recv));
    CHECK_REFUSED(net_close_listen(net, open->listener));
    if (net->version >= 11) CHECK_REFUSED(net_finalize(net, net->context));
    /* It says why. */
    CHECK(log_matches_since(0, "forked child") > 10);
}

static void every_call_is_refused(int version)
{
    struct desk desk;
    struct open open = {.sending = NULL};
    desk_open(&desk, version);
    CHECK_OK(net_listen(&desk.net, 0, open.handle, &open.listener));
    CHECK_PTR(try_connect(&desk.net, 0, open.handle), NULL);
    /* A send that is complete and was not tested, a receive that waits, a flush whose READ is held. */
    open.receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    open.complete = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, open.receive), LENGTH);
    open.receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
    rnic_hold(true);
    void *data = desk.to.data;
    int sizes = LENGTH;
    open.flush = NULL;
    CHECK_OK(net_iflush(&desk.net, desk.pair.recv, 1, &data, &sizes, &desk.to_mr, &open.flush));
    CHECK(open.flush != NULL);
    int child = fork_child();
    if (child == 0) {
        refuse_everything(&desk, &open);
        _exit(0);
    }
    CHECK_EQ(child_status(child), 0);
    rnic_hold(false);
    wait_done(&desk.net, open.flush, NULL);
    CHECK_EQ(wait_size(&desk.net, open.complete), LENGTH);
    guarded_reset(&desk.to);
    pattern_fill(desk.from.data, LENGTH, 7);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, send), LENGTH);
    CHECK_EQ(wait_size(&desk.net, open.receive), LENGTH);
    CHECK_BUFFER(&desk.to, LENGTH, 7);
    /* What was half made goes on. */
    struct pair late = {.net = &desk.net};
    WAIT_UNTIL(pair_step(&late, 0, open.handle, open.listener), "the connection that was begun before the fork");
    pair_message(&late, 3000, 1, 2);
    pair_close(&late);
    CHECK_OK(net_close_listen(&desk.net, open.listener));
    desk_close(&desk);
}

/* One request that the parent has seen complete together with another: the child is not told "done". */
static void seen_complete_before(int version)
{
    enum { COUNT = 4 };
    struct desk desk;
    void *receives[COUNT], *sends[COUNT];
    desk_open(&desk, version);
    for (int i = 0; i < COUNT; i++)
        receives[i] = irecv(&desk.net, desk.pair.recv, desk.to.data + i * 100, 100, i, desk.to_mr);
    for (int i = 0; i < COUNT; i++)
        sends[i] = isend(&desk.net, desk.pair.send, desk.from.data + i * 100, 100, i, desk.from_mr);
    /* The last is complete, so are the others, and a poll has seen them. */
    CHECK_EQ(wait_size(&desk.net, receives[COUNT - 1]), 100);
    CHECK_EQ(wait_size(&desk.net, sends[COUNT - 1]), 100);
    int child = fork_child();
    if (child == 0) {
        int done = 1;
        for (int i = 0; i < COUNT - 1; i++) {
            CHECK_REFUSED(net_test(&desk.net, receives[i], &done, NULL));
            CHECK_EQ(done, 0);
            CHECK_REFUSED(net_test(&desk.net, sends[i], &done, NULL));
            CHECK_EQ(done, 0);
        }
        _exit(0);
    }
    CHECK_EQ(child_status(child), 0);
    for (int i = 0; i < COUNT - 1; i++) {
        CHECK_EQ(wait_size(&desk.net, receives[i]), 100);
        CHECK_EQ(wait_size(&desk.net, sends[i]), 100);
    }
    desk_message(&desk);
    desk_close(&desk);
}

/* ---- what a child may do ------------------------------------------------------------------------------------- */

static void children_live(int version)
{
    struct desk desk;
    forks_set(OLD_KERNEL);
    canaries_plant(500);
    desk_open(&desk, version);
    for (int i = 0; i < 8; i++) {
        void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, LENGTH, 0, desk.to_mr);
        int child = fork_child();
        if (child == 0) {
            canaries_plant(500); /* its heap */
            canaries_free();
            if (i % 4 == 0) _exit(0);
            if (i % 4 == 1) exit(0); /* with its destructors */
            if (i % 4 == 2) execlp("true", "true", NULL);
            int grandchild = fork();
            if (grandchild == 0) {
                int done = 0;
                CHECK_REFUSED(net_test(&desk.net, receive, &done, NULL));
                exit(0);
            }
            exit(child_status(grandchild));
        }
        int status = child_status(child);
        if (WIFSIGNALED(status)) FAIL("child %d died by signal %d", i, WTERMSIG(status));
        CHECK_EQ(status, 0);
        void *send = isend(&desk.net, desk.pair.send, desk.from.data, LENGTH, 0, desk.from_mr);
        CHECK_EQ(wait_size(&desk.net, send), LENGTH);
        CHECK_EQ(wait_size(&desk.net, receive), LENGTH);
    }
    desk_message(&desk);
    desk_close(&desk);
    canaries_free();
}

/* Children of a process whose other threads are inside the plugin, and hold whatever locks it has. */
struct busy {
    const struct net *net;
    bool stop;
};

static void *registers(void *argument)
{
    struct busy *busy = argument;
    struct pair pair;
    struct guarded buffer = guarded_new(9000, 11);
    pair_open_(busy->net, 0, &pair);
    while (!__atomic_load_n(&busy->stop, __ATOMIC_RELAXED))
        CHECK_OK(net_dereg_mr(busy->net, pair.send, register_host_(busy->net, pair.send, buffer.data, buffer.size)));
    pair_close_(&pair);
    return NULL;
}

static void forks_beside_threads(int version)
{
    enum { THREADS = 3, FORKS = 60 };
    struct desk desk;
    pthread_t threads[THREADS];
    forks_set(OLD_KERNEL);
    desk_open(&desk, version);
    struct busy busy = {.net = &desk.net};
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, registers, &busy), 0);
    for (int i = 0; i < FORKS; i++) {
        int child = fork_child();
        if (child == 0) {
            /* None of them waits for a lock that nobody releases: the log is the program's. */
            CHECK_REFUSED(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
            CHECK_REFUSED(net_close_recv(&desk.net, desk.pair.recv));
            if (version >= 11) CHECK_REFUSED(net_finalize(&desk.net, desk.net.context));
            _exit(0);
        }
        CHECK_EQ(child_status(child), 0);
    }
    __atomic_store_n(&busy.stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    desk_message(&desk);
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(every_call_is_refused),
    EACH(seen_complete_before),
    EACH(children_live),
    EACH(forks_beside_threads),
    {0},
};
