/*
 * Connections: listen, connect and accept as NCCL polls them, handles that are not ours, strangers on the socket,
 * listeners closed in every state, and communicators that outlive their listener.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "pair.h"
#include "softrnic.h"

enum { HANDLE = NCCL_NET_HANDLE_MAXSIZE };

static void one_process_one_thread(int version)
{
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 1, 0xC0);
    pair_close(&pair);
    net_stop(&net);
}

/* Without NCCL_SOCKET_IFNAME the plugin has to find an interface itself. */
static void default_interface(int version)
{
    unsetenv("NCCL_SOCKET_IFNAME");
    one_process_one_thread(version);
}

static void each_device(int version)
{
    struct net net;
    struct pair pair;
    int ndev = 0;
    setenv("SOFTRNIC_DEVICES", "2", 1);
    net_start(&net, version);
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 2);
    for (int dev = 0; dev < ndev; dev++) {
        pair_open(&net, dev, &pair);
        pair_message(&pair, 5000, dev, 0xDE + (unsigned)dev);
        pair_close(&pair);
    }
    net_stop(&net);
}

static void infiniband_link_layer(int version)
{
    setenv("SOFTRNIC_LINK", "ib", 1);
    one_process_one_thread(version);
}

static void sender(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded buffer = guarded_new(4096, 0);
    pattern_fill(buffer.data, buffer.size, 77);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, isend(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receiver(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded buffer = guarded_new(4096, 0);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    CHECK_EQ(wait_size(&net, irecv(&net, comm, buffer.data, buffer.size, 1, mr)), 4096);
    CHECK_BUFFER(&buffer, 4096, 77);
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void two_processes(int version)
{
    run_two(version, (struct role){.name = "sender", .run = sender}, (struct role){.name = "receiver", .run = receiver},
            NULL);
}

static int other_version;

static void receiver_of_other_version(int version, int socket, void *argument)
{
    (void)version;
    receiver(other_version, socket, argument);
}

/* Two ranks may run different NCCL releases: the tables differ, the wire does not. */
static void any_version_talks_to_any(int version)
{
    for (other_version = FIRST_VERSION; other_version <= LAST_VERSION; other_version++)
        run_two(version, (struct role){.name = "sender", .run = sender},
                (struct role){.name = "receiver of another version", .run = receiver_of_other_version}, NULL);
}

/* The 128 bytes are all there is: nothing in front or behind is written, by listen or by connect's state machine. */
static void handle_is_128_bytes(int version)
{
    struct net net;
    net_start(&net, version);
    struct guarded handle = guarded_new(HANDLE, 0), sent = guarded_new(HANDLE, 0);
    struct pair pair = {.net = &net};
    void *listener = NULL;
    CHECK_OK(net_listen(&net, 0, handle.data, &listener));
    memcpy(sent.data, handle.data, HANDLE); /* connect gets a copy, as on another rank */
    WAIT_UNTIL(pair_step(&pair, 0, sent.data, listener), "a pair");
    for (int i = 0; i < 2; i++) {
        struct guarded *one = i ? &sent : &handle;
        memset(one->data, 0xC3, HANDLE); /* the guard byte: with it the whole buffer has to look untouched */
        CHECK_BUFFER(one, 0, 0);
    }
    pair_message(&pair, 100, 0, 1); /* and nothing refers to the handle any more */
    CHECK_OK(net_close_listen(&net, listener));
    pair_close(&pair);
    net_stop(&net);
}

/* connect without a peer that accepts, accept without a peer that connects: "not yet", as often as one asks. */
static void polls_never_block(int version)
{
    struct net net;
    struct pair pair = {.net = &net};
    char handle[HANDLE] = {0};
    void *listener = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    for (int i = 0; i < 2000; i++) CHECK_PTR(try_accept(&net, listener), NULL);
    for (int i = 0; i < 2000 && !pair.send; i++) pair.send = try_connect(&net, 0, handle);
    WAIT_UNTIL(pair_step(&pair, 0, handle, listener), "the pair, after many polls of one side alone");
    CHECK_OK(net_close_listen(&net, listener));
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

static void several_listeners(int version)
{
    enum { COUNT = 16 };
    struct net net;
    char handles[COUNT][HANDLE];
    void *listeners[COUNT], *send[COUNT] = {0}, *recv[COUNT] = {0};
    int order[COUNT], left = COUNT;
    uint64_t random = 5;
    net_start(&net, version);
    memset(handles, 0, sizeof handles);
    for (int i = 0; i < COUNT; i++) {
        order[i] = i;
        CHECK_OK(net_listen(&net, 0, handles[i], &listeners[i]));
        for (int j = 0; j < i; j++)
            if (memcmp(handles[i], handles[j], HANDLE) == 0) FAIL("listeners %d and %d have the same handle", i, j);
    }
    shuffle(order, COUNT, &random);
    WAIT_UNTIL(({
                   for (int k = 0; k < COUNT; k++) {
                       int i = order[k];
                       if (!send[i]) left -= (send[i] = try_connect(&net, 0, handles[i])) && recv[i];
                       if (!recv[i]) left -= (recv[i] = try_accept(&net, listeners[i])) && send[i];
                   }
                   left == 0;
               }),
               "all pairs");
    for (int i = 0; i < COUNT; i++) CHECK_OK(net_close_listen(&net, listeners[i]));
    for (int i = 0; i < COUNT; i++) {
        struct pair pair = {&net, send[i], recv[i]};
        pair_message(&pair, 64 + (size_t)i, i, 0x100 + (uint64_t)i);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* Pointers for the device side: NULL targets, as NCCL's own GDR probe passes them. */
static void no_device_communicator(int version)
{
    struct net net;
    char handle[HANDLE] = {0};
    void *listener = NULL, *send = NULL, *recv = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    WAIT_UNTIL(({
                   if (!send) CHECK_OK(net_connect_device(&net, 0, handle, &send, NULL));
                   if (!recv) CHECK_OK(net_accept_device(&net, listener, &recv, NULL));
                   send && recv;
               }),
               "a pair");
    CHECK_OK(net_close_listen(&net, listener));
    struct pair pair = {&net, send, recv};
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- handles that are not ours ------------------------------------------------------------------------------- */

static void refuse_handle(const struct net *net, const char *what, const void *handle)
{
    char copy[HANDLE];
    void *comm = NULL;
    memcpy(copy, handle, sizeof copy);
    size_t mark = log_mark();
    ncclResult_t result = net_connect(net, 0, copy, &comm);
    if (!ffi_is_error(result)) FAIL("%s: connect returned %d", what, (int)result);
    if (comm) FAIL("%s: an error and a communicator", what);
    if (log_warnings_since(mark) != 1) FAIL("%s: %d warnings, want one", what, log_warnings_since(mark));
}

static void foreign_handles(int version)
{
    struct net net;
    char real[HANDLE] = {0}, wrong[HANDLE];
    void *listener = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, real, &listener));
    struct census before = census_take();

    memset(wrong, 0, sizeof wrong);
    refuse_handle(&net, "all zero", wrong);
    memset(wrong, 0xFF, sizeof wrong);
    refuse_handle(&net, "all ones", wrong);
    for (uint64_t seed = 0; seed < 64; seed++) {
        pattern_fill(wrong, sizeof wrong, seed);
        refuse_handle(&net, "random bytes", wrong);
    }
    /* What the stock transport puts there: a socket address, then its own magic. */
    memset(wrong, 0, sizeof wrong);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(4711), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    memcpy(wrong, &address, sizeof address);
    refuse_handle(&net, "a stock handle", wrong);
    for (size_t at = 0; at < 4; at++) {
        memcpy(wrong, real, sizeof wrong);
        wrong[at] ^= 0x20;
        refuse_handle(&net, "a damaged magic", wrong);
    }
    for (size_t keep = 1; keep < 16; keep += 5) {
        memset(wrong, 0, sizeof wrong);
        memcpy(wrong, real, keep);
        refuse_handle(&net, "a handle cut short", wrong);
    }
    struct census after = census_take();
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK_OK(net_close_listen(&net, listener));
    net_stop(&net);
}

/* Any single damaged byte: an error, or no connection, or a connection that works; never a crash or a wrong byte. */
static void damaged_handles(int version)
{
    struct net net;
    struct pair pair;
    net_start(&net, version);
    for (size_t at = 0; at < HANDLE; at++) {
        char real[HANDLE] = {0}, handle[HANDLE];
        void *listener = NULL, *send = NULL, *recv = NULL;
        CHECK_OK(net_listen(&net, 0, real, &listener));
        memcpy(handle, real, sizeof handle);
        handle[at] ^= 0x41;
        for (int i = 0; i < 300 && !(send && recv); i++) {
            if (!send && net_connect(&net, 0, handle, &send) != ncclSuccess) break;
            if (!recv && net_accept(&net, listener, &recv) != ncclSuccess) break;
            ffi_yield();
        }
        if (send && recv) {
            pair = (struct pair){&net, send, recv};
            pair_message(&pair, 100, 0, at);
        }
        if (send) CHECK_OK(net_close_send(&net, send));
        if (recv) CHECK_OK(net_close_recv(&net, recv));
        CHECK_OK(net_close_listen(&net, listener));
    }
    pair_open(&net, 0, &pair); /* and the plugin is none the worse */
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- listeners ----------------------------------------------------------------------------------------------- */

static void listener_without_accept(int version)
{
    struct net net;
    net_start(&net, version);
    struct census before = census_take();
    for (int i = 0; i < 50; i++) {
        char handle[HANDLE] = {0};
        void *listener = NULL;
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        if (i % 2) CHECK_PTR(try_accept(&net, listener), NULL);
        CHECK_OK(net_close_listen(&net, listener));
    }
    if (census_take().descriptors != before.descriptors) census_print("left over");
    CHECK_EQ(census_take().descriptors, before.descriptors);
    net_stop(&net);
}

/* The connector has got some way when the listener goes: an error for it, and nothing of either side is left. */
static void listener_closed_half_way(int version)
{
    struct net net;
    net_start(&net, version);
    for (int polls = 0; polls < 12; polls++) {
        char handle[HANDLE] = {0};
        void *listener = NULL, *send = NULL, *recv = NULL;
        ncclResult_t result = ncclSuccess;
        CHECK_OK(net_listen(&net, 0, handle, &listener));
        for (int i = 0; i < polls; i++) {
            if (!send) send = try_connect(&net, 0, handle);
            if (!recv && i % 2) recv = try_accept(&net, listener);
        }
        CHECK_OK(net_close_listen(&net, listener));
        if (!send) WAIT_UNTIL((result = net_connect(&net, 0, handle, &send)) || send, "connect to give up");
        if (result) CHECK(ffi_is_error(result));
        if (send && !recv) { /* the listener had answered already: then the communicator finds out */
            char byte[8];
            void *request = NULL, *mr = register_host(&net, send, byte, sizeof byte);
            WAIT_UNTIL((result = net_isend(&net, send, byte, sizeof byte, 0, mr, &request)), "isend to fail");
            CHECK(ffi_is_error(result));
            CHECK_OK(net_dereg_mr(&net, send, mr));
        }
        if (send) CHECK_OK(net_close_send(&net, send));
        if (recv) CHECK_OK(net_close_recv(&net, recv));
    }
    struct pair pair;
    pair_open(&net, 0, &pair);
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- strangers ----------------------------------------------------------------------------------------------- */

/* The port of the one TCP socket of this process that listens. */
static int listening_port(void)
{
    for (int fd = 3; fd < 256; fd++) {
        int listening = 0;
        socklen_t size = sizeof listening;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || !listening) continue;
        struct sockaddr_storage address;
        size = sizeof address;
        if (getsockname(fd, (struct sockaddr *)&address, &size) != 0) continue;
        if (address.ss_family == AF_INET) return ntohs(((struct sockaddr_in *)&address)->sin_port);
        if (address.ss_family == AF_INET6) return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    }
    FAIL("no listening TCP socket in this process");
}

static int stranger(int port, const void *bytes, size_t size)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    if (size) CHECK_EQ(send(fd, bytes, size, MSG_NOSIGNAL), size);
    return fd;
}

/* Scanners and lost peers connect to anything that listens: they must neither block nor kill the real connection. */
static void strangers_on_the_socket(int version)
{
    enum { KINDS = 5 };
    struct net net;
    struct pair pair = {0};
    char handle[HANDLE] = {0}, noise[4096];
    void *listener = NULL;
    int fds[KINDS];
    net_start(&net, version);
    pair.net = &net;
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    int port = listening_port();
    pattern_fill(noise, sizeof noise, 9);
    fds[0] = stranger(port, NULL, 0);                        /* says nothing */
    fds[1] = stranger(port, noise, sizeof noise);            /* noise */
    fds[2] = stranger(port, noise, 3);                       /* the start of something, then silence */
    fds[3] = stranger(port, "GET / HTTP/1.0\r\n\r\n", 18);
    fds[4] = stranger(port, noise, 64);
    close(fds[4]); /* gone again */
    WAIT_UNTIL(pair_step(&pair, 0, handle, listener), "the real peer, among strangers");
    CHECK_OK(net_close_listen(&net, listener));
    pair_message(&pair, 1000, 0, 1);
    for (int i = 0; i < KINDS - 1; i++) close(fds[i]);
    pair_message(&pair, 1000, 0, 2);
    pair_close(&pair);
    net_stop(&net);
}

/* A handle of another transport, with bytes where this one keeps its own state: said to be foreign, every time. */
static void another_transports_handle(int version)
{
    struct net net;
    net_start(&net, version);
    for (int round = 0; round < 3; round++) {
        char handle[HANDLE];
        void *send = GARBAGE;
        memset(handle, 1 + round, sizeof handle);
        for (int call = 0; call < 2; call++) {
            size_t mark = log_mark();
            CHECK(ffi_is_error(net_connect(&net, 0, handle, &send)));
            CHECK(send == NULL || send == GARBAGE);
            CHECK_EQ(log_matches_since(mark, "was not made by pinrail"), 1);
        }
    }
    net_stop(&net);
}

/* The last ends of an older communicator close while an attempt to connect is under way: that one goes on. */
static void closing_others_meanwhile(int version)
{
    struct net net;
    struct pair others;
    char handle[HANDLE] = {0};
    void *listener = NULL, *send = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    CHECK_OK(net_close_listen(&net, listener)); /* refused, which a network that is coming up does too */
    CHECK_PTR(try_connect(&net, 0, handle), NULL);
    pair_open(&net, 0, &others);
    CHECK_PTR(try_connect(&net, 0, handle), NULL);
    pair_close(&others);
    CHECK_OK(net_connect(&net, 0, handle, &send)); /* still trying, not "ended" */
    CHECK_PTR(send, NULL);
    net_stop(&net);
}

/* An init while nothing but an attempt to connect is under way: devices stay the same objects for everybody. */
static void init_during_an_attempt(int version)
{
    struct net net;
    struct pair pair = {.net = &net};
    char first[NCCL_NET_HANDLE_MAXSIZE] = {0}, second[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *other = NULL, *again = NULL;
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, first, &listener));
    CHECK_PTR(try_connect(&net, 0, first), NULL); /* takes more than one call */
    CHECK_OK(net_close_listen(&net, listener));
    CHECK_EQ(rnic_counts().contexts, 1);
    if (version >= 11)
        CHECK_OK(net_init_context(&net, 7, ffi_logger, &again));
    else
        CHECK_OK(net_init(&net, 7, ffi_logger));
    CHECK_OK(net_listen(&net, 0, second, &other));
    WAIT_UNTIL(pair_step(&pair, 0, second, other), "a pair");
    CHECK_EQ(rnic_counts().contexts, 1);
    CHECK_OK(net_close_listen(&net, other));
    pair_close(&pair);
    if (again) CHECK_OK(net_finalize(&net, again));
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(one_process_one_thread),
    EACH(default_interface),
    EACH(each_device),
    EACH(infiniband_link_layer),
    EACH(two_processes),
    EACH(any_version_talks_to_any),
    EACH(handle_is_128_bytes),
    EACH(polls_never_block),
    EACH(init_during_an_attempt),
    EACH(several_listeners),
    EACH(no_device_communicator),
    EACH(foreign_handles),
    EACH(damaged_handles),
    EACH(listener_without_accept),
    EACH(listener_closed_half_way),
    EACH(strangers_on_the_socket),
    EACH(another_transports_handle),
    EACH(closing_others_meanwhile),
    {0},
};
