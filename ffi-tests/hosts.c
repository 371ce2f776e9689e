/*
 * Two hosts that are not alike: other numbers of devices, other speeds, other tables, other subnets. Each is a process
 * with an environment of its own; one test gives each a network namespace too.
 */
#include "pair.h"
#include "softrnic.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MEMBERS = 8, SLOT = 5000 };

/* A host, and the device that it uses: port `dev`, or one made of the first `fused` ports. */
struct host {
    int version;
    const char *devices, *ports, *speeds, *gids;
    int fused, dev;
    const char *log;   /* a line that must come, for each connection or as often as this: */
    int times;
    int warnings;
    const char *never; /* one that must not */
};

struct meeting {
    struct host first, second;
    const char *settings[4]; /* pairs of name and value, for both */
    bool namespaces;
};

static const size_t sizes[] = {0, 1, 127, 128, 129, 1000, 1024, 1025, 4096, 65535, 1000003, 3 << 20};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* Messages and groups from the end that dialled to the one that answered. */
static void send_all(const struct net *net, void *comm, int socket)
{
    struct guarded from = guarded_new(3 << 20, 0);
    void *mr = register_host(net, comm, from.data, from.size), *sends[MEMBERS];
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < SIZES; i++) {
            size_t size = round ? sizes[i] % 70000 : sizes[i];
            pattern_fill(from.data, size, (uint64_t)(round * SIZES + i));
            CHECK_EQ(wait_size(net, isend(net, comm, from.data, size, i, mr)), size);
        }
    }
    for (int n = 1; n <= MEMBERS; n++) {
        for (int i = 0; i < n; i++) pattern_fill(from.data + i * SLOT, (size_t)(i * 613), (uint64_t)(n * 100 + i));
        for (int i = n - 1; i >= 0; i--)
            sends[i] = isend(net, comm, from.data + i * SLOT, (size_t)(i * 613), i, mr);
        for (int i = 0; i < n; i++) CHECK_EQ(wait_size(net, sends[i]), i * 613);
    }
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(net, comm, mr));
    CHECK_OK(net_close_send(net, comm));
    guarded_free(&from);
}

static void receive_all(const struct net *net, void *comm, int socket)
{
    struct guarded to = guarded_new(3 << 20, 0);
    void *mr = register_host(net, comm, to.data, to.size);
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < SIZES; i++) {
            size_t size = round ? sizes[i] % 70000 : sizes[i];
            if (round < 2) guarded_reset(&to);
            CHECK_EQ(wait_size(net, irecv(net, comm, to.data, round ? 70000 : to.size, i, mr)), size);
            if (round < 2) CHECK_BUFFER(&to, size, (uint64_t)(round * SIZES + i));
            else CHECK_EQ(pattern_mismatch(to.data, size, (uint64_t)(round * SIZES + i)), -1);
        }
    }
    for (int n = 1; n <= MEMBERS; n++) {
        void *data[MEMBERS], *mrs[MEMBERS];
        size_t room[MEMBERS];
        int tags[MEMBERS], got[64];
        guarded_reset(&to);
        for (int i = 0; i < n; i++) {
            data[i] = to.data + i * SLOT;
            mrs[i] = mr;
            room[i] = SLOT;
            tags[i] = i;
        }
        wait_done(net, irecv_group(net, comm, n, data, room, tags, mrs), got);
        for (int i = 0; i < n; i++) {
            CHECK_EQ(got[i], i * 613);
            CHECK_PART(&to, (size_t)i * SLOT, SLOT, (size_t)i * 613, (uint64_t)(n * 100 + i));
        }
    }
    meet(socket, 'd');
    CHECK_OK(net_dereg_mr(net, comm, mr));
    CHECK_OK(net_close_recv(net, comm));
    guarded_free(&to);
}

static void command(const char *text)
{
    if (system(text) != 0) FAIL("%s", text);
}

static bool is_running(const char *name)
{
    struct ifreq request = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request) != 0) FAIL("the flags of %s: %m", name);
    close(fd);
    return (request.ifr_flags & IFF_RUNNING) != 0;
}

/* A namespace for the second host, and a cable between the two: this needs iproute2 and a kernel that has veth. */
static void cable(bool first, int socket)
{
    char text[160];
    if (first) {
        pid_t there;
        hear(socket, &there, sizeof there);
        snprintf(text, sizeof text, "ip link add name rail-a type veth peer name rail-b netns %d", (int)there);
        command(text);
        command("ip addr add 10.9.8.1/24 dev rail-a && ip link set rail-a up");
    } else {
        pid_t here = getpid();
        if (unshare(CLONE_NEWNET) != 0) FAIL("unshare: %m");
        tell(socket, &here, sizeof here);
    }
    meet(socket, 'c');
    if (!first) command("ip addr add 10.9.8.2/24 dev rail-b && ip link set rail-b up");
    setenv("NCCL_SOCKET_IFNAME", first ? "=rail-a" : "=rail-b", 1);
    meet(socket, 'u');
    WAIT_UNTIL(is_running(first ? "rail-a" : "rail-b"), "the cable");
}

static void live(const struct meeting *meeting, bool first, int socket)
{
    struct host host = first ? meeting->first : meeting->second;
    struct net net;
    setenv("SOFTRNIC_DEVICES", host.devices, 1);
    setenv("SOFTRNIC_PORTS", host.ports ? host.ports : "1", 1);
    setenv("SOFTRNIC_SPEED", host.speeds ? host.speeds : "32", 1);
    setenv("SOFTRNIC_GIDS", host.gids ? host.gids : first ? "10.1.1.1" : "10.1.2.1", 1);
    for (int i = 0; i < 4 && meeting->settings[i]; i += 2) setenv(meeting->settings[i], meeting->settings[i + 1], 1);
    if (meeting->namespaces) cable(first, socket);
    net_start(&net, host.version);
    size_t mark = log_mark();
    int dev = host.fused ? net_fuse(&net, host.fused) : host.dev;
    /* One connection each way, as NCCL makes them. */
    if (first) {
        send_all(&net, dial(&net, dev, socket), socket);
        receive_all(&net, answer(&net, dev, socket), socket);
    } else {
        receive_all(&net, answer(&net, dev, socket), socket);
        send_all(&net, dial(&net, dev, socket), socket);
    }
    CHECK_EQ(rnic_counts().cq_overruns, 0);
    if (host.log) CHECK_EQ(log_matches_since(mark, host.log), host.times ? host.times : 2);
    if (host.never && log_matches_since(mark, host.never)) FAIL("\"%s\" in the log", host.never);
    CHECK_EQ(log_warnings_since(mark), host.warnings);
    net_stop(&net);
}

static void first_host(int version, int socket, void *argument)
{
    (void)version;
    live(argument, true, socket);
}

static void second_host(int version, int socket, void *argument)
{
    (void)version;
    live(argument, false, socket);
}

static void hold_meeting(struct meeting meeting)
{
    run_two(0, (struct role){.name = "first host", .run = first_host},
            (struct role){.name = "second host", .run = second_host}, &meeting);
}

/* ---- numbers and speeds -------------------------------------------------------------------------------------- */

static void eight_and_three(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "8", .speeds = "64,32", .fused = 8,
                  .log = "messages are cut", .times = 1},
        .second = {.version = 12, .devices = "4", .speeds = "128,64", .fused = 3,
                   .log = "messages are cut", .times = 1},
    });
}

static void four_in_v9_and_eight(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 9, .devices = "4", .speeds = "256,128", .fused = 4},
        .second = {.version = 12, .devices = "8", .speeds = "64,64,2", .fused = 8},
    });
}

static void one_in_v6_and_four_in_v11(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 6, .devices = "2", .dev = 1},
        .second = {.version = 11, .devices = "4", .speeds = "64,32,64,128", .fused = 4},
    });
}

/*
 * Size records go over lanes that join ports of different numbers. Stock takes their key by the number at the wrong end.
 */
static void two_and_three_with_more_queue_pairs(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 11, .devices = "2", .speeds = "128,32", .fused = 2},
        .second = {.version = 12, .devices = "3", .fused = 3},
        .settings = {"NCCL_IB_QPS_PER_CONNECTION", "3", "NCCL_IB_SPLIT_DATA_ON_QPS", "0"},
    });
}

static void two_and_three_split(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 11, .devices = "2", .speeds = "128,32", .fused = 2},
        .second = {.version = 12, .devices = "3", .fused = 3},
        .settings = {"NCCL_IB_QPS_PER_CONNECTION", "3", "NCCL_IB_SPLIT_DATA_ON_QPS", "1"},
    });
}

/*
 * Two ports of one device against port 1 of two devices. Stock sends from the port whose number the peer's has.
 */
static void ports_of_other_numbers(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "1", .ports = "2", .speeds = "128,64", .fused = 2},
        .second = {.version = 12, .devices = "2", .speeds = "64,128", .fused = 2},
    });
}

/* Equal speeds are cut as ever. */
static void two_and_two(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .fused = 2, .never = "messages are cut"},
        .second = {.version = 12, .devices = "2", .fused = 2, .never = "messages are cut"},
    });
}

/* NCCL_IB_WARN_RAIL_LOCAL compares the numbers of devices, whatever their order. */
static void other_devices_are_told(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "3", .fused = 2,
                  .log = "devices [0, 1] here, [0, 1, 2] at the peer", .times = 1, .warnings = 1},
        .second = {.version = 12, .devices = "3", .fused = 3,
                   .log = "devices [0, 1, 2] here, [0, 1] at the peer", .times = 1, .warnings = 1},
        .settings = {"NCCL_IB_WARN_RAIL_LOCAL", "1"},
    });
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .dev = 1, .never = "at the peer"},
        .second = {.version = 12, .devices = "3", .dev = 1, .never = "at the peer"},
        .settings = {"NCCL_IB_WARN_RAIL_LOCAL", "1"},
    });
}

/* ---- subnets ------------------------------------------------------------------------------------------------- */

#define BY_SUBNET {"NCCL_IB_SUBNET_AWARE_ROUTING", "1"}

/* Cables without a switch: who was given a device that leads elsewhere takes the one that leads to the peer. */
static void device_by_subnet(int version)
{
    hold_meeting((struct meeting){
        .first = {.version = version, .devices = "4", .gids = "10.0.1.1;10.0.2.1;10.0.3.1;10.0.4.1", .dev = 0,
                  .log = "softrnic2:1 (10.0.3.1) used instead of softrnic0:1 (10.0.1.1)"},
        .second = {.version = version, .devices = "1", .gids = "10.0.3.2", .never = "used instead"},
        .settings = BY_SUBNET,
    });
}

static void device_by_ipv6_subnet(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .gids = "fd00:1::1;fd00:2::1", .dev = 0,
                  .log = "softrnic1:1 (fd00:2::/64) used instead of softrnic0:1 (fd00:1::/64)"},
        .second = {.version = 12, .devices = "1", .gids = "fd00:2::7", .never = "used instead"},
        .settings = {"NCCL_IB_SUBNET_AWARE_ROUTING", "1", "NCCL_IB_ADDR_FAMILY", "AF_INET6"},
    });
}

/* The prefix counts: of 16 bits all are in one subnet. */
static void device_by_short_prefix(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .gids = "10.0.1.1;10.0.3.1", .dev = 0, .never = "used instead"},
        .second = {.version = 12, .devices = "1", .gids = "10.0.3.2", .never = "used instead"},
        .settings = {"NCCL_IB_SUBNET_AWARE_ROUTING", "1", "NCCL_IB_SUBNET_PREFIX_LEN", "16"},
    });
}

/* Off by default. */
static void device_as_given(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .gids = "10.0.1.1;10.0.3.1", .dev = 0, .never = "subnet"},
        .second = {.version = 12, .devices = "1", .gids = "10.0.3.2", .never = "subnet"},
    });
}

/* Where no device fits, the given one is used all the same. */
static void no_device_in_the_subnet(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "2", .gids = "10.0.1.1;10.0.2.1", .dev = 0,
                  .log = "no device shares a subnet"},
        .second = {.version = 12, .devices = "1", .gids = "10.0.3.2", .log = "no device shares a subnet"},
        .settings = BY_SUBNET,
    });
}

/* A fused device of which one port leads elsewhere gives way to a port; the handle promised two. */
static void fused_device_gives_way(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "3", .gids = "10.0.1.1;10.0.2.1;10.0.3.1", .fused = 3,
                  .log = "softrnic1:1 (10.0.2.1) used instead of"},
        .second = {.version = 12, .devices = "2", .gids = "10.0.2.2;10.0.9.2", .fused = 2,
                   .log = "softrnic0:1 (10.0.2.2) used instead of"},
        .settings = BY_SUBNET,
    });
}

/* Planes that do not meet, and ports in another order. */
static void ports_in_the_order_of_subnets(int version)
{
    (void)version;
    hold_meeting((struct meeting){
        .first = {.version = 12, .devices = "3", .gids = "10.0.1.1;10.0.2.1;10.0.3.1", .fused = 3,
                  .log = "softrnic2:1 (10.0.3.1)+softrnic0:1 (10.0.1.1)+softrnic1:1 (10.0.2.1)", .times = 1},
        .second = {.version = 12, .devices = "3", .gids = "10.0.3.2;10.0.1.2;10.0.2.2", .fused = 3,
                   .log = "softrnic1:1 (10.0.1.2)+softrnic2:1 (10.0.2.2)+softrnic0:1 (10.0.3.2)", .times = 1},
        .settings = BY_SUBNET,
    });
}

/* ---- namespaces ---------------------------------------------------------------------------------------------- */

static void in_two_namespaces(int version)
{
    (void)version;
    /* Its own user is root there, so that anybody may run this. */
    uid_t user = geteuid();
    gid_t group = getegid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) FAIL("unshare: %m; user namespaces are needed");
    char map[64];
    static const char *const files[] = {"/proc/self/setgroups", "/proc/self/uid_map", "/proc/self/gid_map"};
    for (int i = 0; i < 3; i++) {
        if (i == 0) snprintf(map, sizeof map, "deny");
        else snprintf(map, sizeof map, "0 %u 1", i == 1 ? (unsigned)user : (unsigned)group);
        int fd = open(files[i], O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, map, strlen(map)) != (ssize_t)strlen(map)) FAIL("%s: %m", files[i]);
        close(fd);
    }
    hold_meeting((struct meeting){
        .first = {.version = 11, .devices = "4", .speeds = "64,32", .fused = 4},
        .second = {.version = 12, .devices = "3", .speeds = "128,32,64", .fused = 3},
        .namespaces = true,
    });
}

const struct ffi_case ffi_cases[] = {
    ONCE(eight_and_three), ONCE(four_in_v9_and_eight), ONCE(one_in_v6_and_four_in_v11),
    ONCE(two_and_three_with_more_queue_pairs), ONCE(two_and_three_split), ONCE(ports_of_other_numbers), ONCE(two_and_two),
    ONCE(other_devices_are_told), EACH(device_by_subnet), ONCE(device_by_ipv6_subnet), ONCE(device_by_short_prefix),
    ONCE(device_as_given), ONCE(no_device_in_the_subnet), ONCE(fused_device_gives_way),
    ONCE(ports_in_the_order_of_subnets), ONCE(in_two_namespaces), {0},
};
