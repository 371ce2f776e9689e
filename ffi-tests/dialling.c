/*
 * How the side channel is reached: which interface carries it, and what happens while nobody answers.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "pair.h"

enum { PORT_AT = 12, CHECKSUM = 48, SUBNETS = 64 }; /* docs/protocol.md */

static int get_port(const char *handle)
{
    return (uint8_t)handle[PORT_AT] | (uint8_t)handle[PORT_AT + 1] << 8;
}

/* Sends whoever has the handle to another port. */
static void set_port(char *handle, int port)
{
    uint64_t sum = 0xcbf29ce484222325u;
    handle[PORT_AT] = (char)port;
    handle[PORT_AT + 1] = (char)(port >> 8);
    for (int i = 0; i < NCCL_NET_HANDLE_MAXSIZE; i++)
        if (i < CHECKSUM || i >= SUBNETS) sum = (sum ^ (uint8_t)handle[i]) * 0x100000001b3u;
    memcpy(handle + CHECKSUM, &sum, sizeof sum);
}

/* A socket of this host's loopback with a port; while nobody listens on it, connecting is refused. */
static int bound(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(fd >= 0);
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    *port = ntohs(address.sin_port);
    return fd;
}

/* Brings what has come on one socket to the other. */
static void bring(int from, int to)
{
    char bytes[8192];
    ssize_t got = recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) CHECK_EQ(send(to, bytes, (size_t)got, MSG_NOSIGNAL), got);
}

/* The network is still coming up: connections are refused for a while. Stock's Service thread sleeps meanwhile. */
static void refused_for_a_while(int version)
{
    struct net net;
    struct pair pair = {.net = &net};
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    int port = 0, near = -1, far;
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_RETRY_SLEEP_MSEC", "1", 1);
    setenv("NCCL_SOCKET_RETRY_CNT", "10000", 1);
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    struct sockaddr_in real = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)get_port(handle)),
                               .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int door = bound(&port);
    set_port(handle, port);
    size_t mark = log_mark();
    WAIT_UNTIL((pair_step(&pair, 0, handle, listener), log_matches_since(mark, "trying again") >= 3),
               "refused attempts");
    CHECK(log_matches_since(mark, "trying again in 2ms, 2 of 10000 times and for 5") == 1);
    CHECK_EQ(listen(door, 4), 0);
    WAIT_UNTIL((pair_step(&pair, 0, handle, listener), near = accept(door, NULL, NULL)) >= 0,
               "an attempt that is not refused");
    far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(far, (struct sockaddr *)&real, sizeof real), 0);
    WAIT_UNTIL((bring(near, far), bring(far, near), pair_step(&pair, 0, handle, listener)), "the connection");
    CHECK_EQ(log_warnings_since(mark), 0);
    pair_message(&pair, 1000, 0, 1);
    CHECK_OK(net_close_listen(&net, listener));
    pair_close(&pair);
    close(door);
    close(near);
    close(far);
    net_stop(&net);
}

/* Polls connect until it fails. */
static void connect_fails(const struct net *net, char *handle, const char *told)
{
    size_t mark = log_mark();
    void *comm = NULL;
    ncclResult_t result = ncclSuccess;
    WAIT_UNTIL((result = net_connect(net, 0, handle, &comm)) != ncclSuccess, "connect to give up");
    CHECK(ffi_is_error(result));
    CHECK_PTR(comm, NULL);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, told), 1);
}

static void given_up(int version, const char *told)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    int port = 0, door = bound(&port);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    set_port(handle, port);
    connect_fails(&net, handle, told);
    CHECK_OK(net_close_listen(&net, listener));
    close(door);
    net_stop(&net);
}

static void given_up_after_the_count(int version)
{
    setenv("NCCL_SOCKET_RETRY_SLEEP_MSEC", "1", 1);
    setenv("NCCL_SOCKET_RETRY_CNT", "2", 1);
    given_up(version, "after 3 attempts (NCCL_SOCKET_RETRY_CNT=2)");
}

static void given_up_at_the_deadline(int version)
{
    (void)version;
    setenv("NCCL_SOCKET_RETRY_SLEEP_MSEC", "60000", 1);
    setenv("PINRAIL_CONNECT_TIMEOUT", "1", 1);
    given_up(LAST_VERSION, "no success in 1s (PINRAIL_CONNECT_TIMEOUT) while connecting to the listener");
}

static void no_interface(const char *name, const char *family, const char *told)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    setenv("NCCL_SOCKET_IFNAME", name, 1);
    setenv("NCCL_SOCKET_FAMILY", family, 1);
    net_start(&net, LAST_VERSION);
    size_t mark = log_mark();
    CHECK_REFUSED(net_listen(&net, 0, handle, &listener));
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, told), 1);
    CHECK_EQ(log_matches_since(mark, "present: "), 1);
    net_stop(&net);
}

static void no_such_interface(int version)
{
    (void)version;
    no_interface("=nosuch0", "AF_INET", "NCCL_SOCKET_IFNAME =nosuch0: there is no interface nosuch0");
}

/* The loopback's IPv6 address reaches nobody. */
static void no_address_of_the_family(int version)
{
    (void)version;
    no_interface("lo", "AF_INET6", "NCCL_SOCKET_IFNAME lo leaves no running interface with an address of family AF_INET6");
}

const struct ffi_case ffi_cases[] = {
    EACH(refused_for_a_while),
    EACH(given_up_after_the_count),
    ONCE(given_up_at_the_deadline),
    ONCE(no_such_interface),
    ONCE(no_address_of_the_family),
    {0},
};
