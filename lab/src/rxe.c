/*
 * What ffi-tests has for the software RNIC only, in a form for rxe0 and rxe1: fused devices (rails.c wants eight),
 * flushes whose READs nobody counts, messages above the device's limit, objects as the kernel counts them, forked children
 * of a process whose pages the distribution's library withholds, and two network namespaces. lab/ffi builds it and runs it
 * as one more program of ffi-tests.
 */
#define ffi_cases of_eight_devices
#define fused of_eight
#include "rails.c"
#undef fused
#undef ffi_cases

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "forked.h"

/* A device made of both. */
static int both(struct net *net, int version)
{
    int dev = -1, count = 0;
    net_start(net, version);
    CHECK_OK(net_devices(net, &count));
    CHECK_EQ(count, 2);
    if (version >= 12) {
        ncclNetVDeviceProps8_t props = {.ndevs = 2, .devs = {0, 1}};
        CHECK_OK(((const ncclNet_v12_t *)net->table)->makeVDevice(&dev, &props));
    } else {
        ncclNetVDeviceProps4_t props = {.ndevs = 2, .devs = {0, 1}};
        CHECK_OK(((const ncclNet_v9_t *)net->table)->makeVDevice(&dev, &props));
    }
    CHECK_EQ(dev, 2);
    return dev;
}

static void all_between(int version, const char *qps, const char *split)
{
    struct net net;
    struct pair pair;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    int dev = both(&net, version);
    pair_open(&net, dev, &pair);
    messages(&pair);
    groups(&pair);
    pair_close(&pair);
    net_stop(&net);
}

static void fused(int version) { (void)version; all_between(12, "1", "0"); }
static void fused_in_v9(int version) { (void)version; all_between(9, "1", "0"); } /* the first that has makeVDevice */
static void fused_in_v11(int version) { (void)version; all_between(11, "1", "0"); }

static void fused_2_qps(int version) { (void)version; all_between(12, "2", "0"); }
static void fused_4_qps_split(int version) { (void)version; all_between(12, "4", "1"); }
static void fused_3_qps_split(int version) { (void)version; all_between(12, "3", "1"); }

/* Fused on one end and either device alone on the other, both ways round; then one device alone to the other. */
static void fused_to_one(int version)
{
    struct net net;
    struct pair pair;
    (void)version;
    int dev = both(&net, 12), ends[][2] = {{dev, 0}, {dev, 1}, {0, dev}, {1, dev}, {0, 1}, {1, 0}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        pair_open_between(&net, ends[i][0], ends[i][1], &pair);
        messages(&pair);
        groups(&pair);
        pair_close(&pair);
    }
    net_stop(&net);
}

/* Receive, flush, next. The flush reads although there is no GPU memory here. */
static void flush_after_each(int members, const char *qps)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_FLUSH", "always", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    int dev = both(&net, 12);
    pair_open(&net, members == 2 ? dev : 0, &pair);
    struct guarded to = guarded_new(4096, 0);
    void *mr = register_host(&net, pair.recv, to.data, to.size), *data = to.data;
    int size = 4096;
    for (int i = 0; i < 100; i++) {
        void *request = NULL;
        pair_message(&pair, (size_t)i * 331, i, (uint64_t)i);
        CHECK_OK(net_iflush(&net, pair.recv, 1, &data, &size, &mr, &request));
        CHECK(request != NULL);
        wait_done(&net, request, NULL);
    }
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    pair_close(&pair);
    net_stop(&net);
}

static void flush_4_qps(int version) { (void)version; flush_after_each(1, "4"); }
static void fused_flush(int version) { (void)version; flush_after_each(2, "1"); }
static void fused_flush_4_qps(int version) { (void)version; flush_after_each(2, "4"); }

/* A work request of rxe carries 8 MiB at most, as its port says; the rest of a message takes more of them. */
static void above_the_limit(const char *qps, const char *split, int members)
{
    enum { LIMIT = 8 << 20 };
    static const size_t sizes[] = {LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT + 4097};
    struct net net;
    struct pair pair;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    int dev = both(&net, 12);
    pair_open(&net, members == 2 ? dev : 0, &pair);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) pair_message(&pair, sizes[i], (int)i, i);
    pair_close(&pair);
    net_stop(&net);
}

static void long_messages(int version) { (void)version; above_the_limit("1", "0", 1); }
static void long_messages_fused(int version) { (void)version; above_the_limit("1", "0", 2); }

/* What the kernel holds for RDMA, of all processes: a line for each device. */
static void objects(char *text, size_t room)
{
    FILE *pipe = popen("rdma resource show", "re");
    CHECK(pipe != NULL);
    size_t length = fread(text, 1, room - 1, pipe);
    text[length] = 0;
    CHECK_EQ(pclose(pipe), 0);
    CHECK(strstr(text, "rxe0: pd ") != NULL && strstr(text, " qp ") != NULL);
}

/* After the last close and dlclose the process holds what it held before. */
static void no_object_is_left(int version)
{
    char before[1024], after[1024];
    (void)version;
    setenv("PINRAIL_FLUSH", "always", 1);
    setenv("NCCL_IB_QPS_PER_CONNECTION", "2", 1);
    objects(before, sizeof before);
    for (int round = 0; round < 5; round++) {
        struct net net;
        struct pair fused_pair, plain;
        int dev = both(&net, 12);
        pair_open(&net, dev, &fused_pair);
        pair_open(&net, 0, &plain);
        objects(after, sizeof after);
        if (strcmp(before, after) == 0) FAIL("rdma resource does not see two pairs:\n%s", after);
        pair_message(&plain, 1000, 0, 1);
        groups(&fused_pair);
        pair_close(&fused_pair);
        pair_close(&plain);
        net_stop(&net);
        objects(after, sizeof after);
        if (strcmp(before, after) != 0) FAIL("round %d left objects; before:\n%safter:\n%s", round, before, after);
    }
}

/* ---- children ------------------------------------------------------------------------------------------------ */

/* Whether the distribution's library takes registered pages from children, as it does before rdma-core 51 when it is asked. */
static bool marks(void)
{
    const char *file = realpath(softrnic_path(), NULL), *release = file ? strstr(file, ".so.1.") : NULL;
    int private_version, major = 0;
    if (!release || sscanf(release, ".so.1.%d.%d.", &private_version, &major) != 2) FAIL("which release is %s?", file);
    return major < 51;
}

static void children(int version)
{
    struct net net;
    struct pair pair;
    setenv("RDMAV_FORK_SAFE", "1", 1);
    setenv("PINRAIL_FORK_CHECK", "1", 1);
    canaries_plant(2000);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    canaries_plant(2000);
    for (int i = 0; i < 3; i++) pair_message(&pair, 5000, i, (uint64_t)i); /* between buffers that share their pages */
    CHECK_EQ(withheld(NULL, 0) > 0, marks());
    CHECK_EQ(log_matches_since(0, "do not own their pages") > 0, marks());
    child_reads_canaries();
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
    child_reads_canaries();
    CHECK_EQ(log_matches_since(0, ": clean;"), 3);
}

static void children_have_everything(int version) { (void)version; children(12); }
static void children_have_everything_in_v9(int version) { (void)version; children(9); }

/* What `pinrail forks` says about an address of this process. */
static void ask_forks(const void *address, char *text, size_t room)
{
    char command[4200];
    const char *pinrail = getenv("LAB_PINRAIL");
    CHECK(pinrail != NULL);
    snprintf(command, sizeof command, "'%s' forks %d --core-address %p", pinrail, (int)getpid(), address);
    FILE *pipe = popen(command, "re");
    CHECK(pipe != NULL);
    size_t length = fread(text, 1, room - 1, pipe);
    text[length] = 0;
    dprintf(STDERR_FILENO, "$ pinrail forks PID --core-address %p\n%s", address, text);
    int status = pclose(pipe);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) <= 1); /* withheld or not; more: it did not come to an answer */
}

/* A child that reads one byte; the signal that it dies by, 0 if it does not. */
static int child_reads(const volatile uint8_t *byte)
{
    int pid = fork_child();
    if (pid == 0) _exit(*byte == 0x5a ? 0 : 3);
    int status = child_status(pid);
    if (WIFEXITED(status)) CHECK_EQ(WEXITSTATUS(status), 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* 300 bytes of the heap, registered as they are because the operator said so: where the library marks pages, children
 * lack their neighbours too, and the command names who took them. The other child of the same fork has everything. */
static void forks_names_the_registration(int version)
{
    struct net net;
    struct pair pair;
    char text[1 << 14], want[200];
    (void)version;
    setenv("RDMAV_FORK_SAFE", "1", 1);
    setenv("PINRAIL_FORK_COLLATERAL", "register", 1);
    net_start(&net, 12);
    pair_open(&net, 0, &pair);
    uint8_t *heap = (uint8_t *)malloc(300 + 64), *planted = heap + 64;
    memset(heap, 0x5a, 300 + 64);
    CHECK_EQ(child_reads(heap), 0);
    void *mr = register_host(&net, pair.recv, planted, 300);
    snprintf(want, sizeof want, "300 bytes asked for at %p by regMr", (void *)planted);
    ask_forks(planted, text, sizeof text);
    if (!strstr(text, want)) FAIL("no '%s' in\n%s", want, text);
    CHECK_EQ(strstr(text, "is withheld: ") != NULL, marks());
    CHECK_EQ(strstr(text, "bytes of collateral") != NULL, marks());
    CHECK_EQ(child_reads(planted), marks() ? SIGSEGV : 0);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    ask_forks(planted, text, sizeof text);
    CHECK(strstr(text, "is not withheld") != NULL && strstr(text, "asked for at") == NULL);
    CHECK_EQ(child_reads(planted), 0);
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(withheld(NULL, 0), 0);
    free(heap);
}

/* ---- network namespaces ---------------------------------------------------------------------------------------- */

/* Into a network namespace, with the interfaces and the sysfs that a container has there. Before anything has a thread. */
static void enter(const char *space, const char *device)
{
    char path[100];
    snprintf(path, sizeof path, "/run/netns/%s", space);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) FAIL("%s: %m: is the guest started with --netns?", path);
    CHECK_EQ(setns(file, CLONE_NEWNET), 0);
    close(file);
    CHECK_EQ(unshare(CLONE_NEWNS), 0);
    CHECK_EQ(mount("", "/", NULL, MS_SLAVE | MS_REC, NULL), 0);
    CHECK_EQ(umount2("/sys", MNT_DETACH), 0);
    CHECK_EQ(mount("sys", "/sys", "sysfs", 0, NULL), 0);
    setenv("NCCL_SOCKET_IFNAME", "v", 1);
    setenv("NCCL_IB_HCA", device, 1);
}

/* Each namespace sends to the other and receives from it: single messages and receives of eight members. */
static void in_a_space(int version, int socket, bool first, const char *qps)
{
    enum { ROOM = 300000, SLOT = ROOM / MEMBERS };
    static const size_t sizes[] = {0, 1, 8, 4095, 4097, 65536, 131073, ROOM};
    struct net net;
    int count = 0;
    void *send = NULL;
    enter(first ? "n0" : "n1", first ? "=rxe0" : "=rxe1");
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    net_start(&net, version);
    CHECK_OK(net_devices(&net, &count));
    CHECK_EQ(count, 1);
    if (first) send = dial(&net, 0, socket);
    void *recv = answer(&net, 0, socket);
    if (!first) send = dial(&net, 0, socket);
    struct guarded from = guarded_new(ROOM, 0), to = guarded_new(ROOM, 0);
    void *from_mr = register_host(&net, send, from.data, ROOM), *to_mr = register_host(&net, recv, to.data, ROOM);
    uint64_t out = first ? 1000 : 2000, in = first ? 2000 : 1000;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        guarded_reset(&to);
        pattern_fill(from.data, sizes[i], out + i);
        void *receive = irecv(&net, recv, to.data, ROOM, (int)i, to_mr);
        void *sending = isend(&net, send, from.data, sizes[i], (int)i, from_mr);
        CHECK_EQ(wait_size(&net, sending), sizes[i]);
        CHECK_EQ(wait_size(&net, receive), sizes[i]);
        CHECK_BUFFER(&to, sizes[i], in + i);
    }
    for (uint64_t round = 0; round < 4; round++) {
        void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS];
        size_t room[MEMBERS];
        int tags[MEMBERS], got[MEMBERS];
        guarded_reset(&to);
        for (int i = 0; i < MEMBERS; i++) {
            data[i] = to.data + i * SLOT;
            mrs[i] = to_mr;
            tags[i] = 100 + i;
            room[i] = (round * 7001 + (unsigned)i * 613) % SLOT;
            pattern_fill(from.data + i * SLOT, room[i], out + 100 * round + (unsigned)i);
        }
        void *receive = irecv_group(&net, recv, MEMBERS, data, room, tags, mrs);
        for (int i = MEMBERS - 1; i >= 0; i--) sends[i] = isend(&net, send, from.data + i * SLOT, room[i], tags[i], from_mr);
        for (int i = 0; i < MEMBERS; i++) CHECK_EQ(wait_size(&net, sends[i]), room[i]);
        wait_done(&net, receive, got);
        for (int i = 0; i < MEMBERS; i++) {
            CHECK_EQ(got[i], room[i]);
            CHECK_PART(&to, (size_t)i * SLOT, SLOT, room[i], in + 100 * round + (unsigned)i);
        }
    }
    meet(socket, 'e'); /* nobody closes while the other receives */
    CHECK_OK(net_dereg_mr(&net, send, from_mr));
    CHECK_OK(net_dereg_mr(&net, recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
    CHECK_OK(net_close_send(&net, send));
    CHECK_OK(net_close_recv(&net, recv));
    net_stop(&net);
}

static void first_space(int version, int socket, void *qps) { in_a_space(version, socket, true, (const char *)qps); }
static void second_space(int version, int socket, void *qps) { in_a_space(version, socket, false, (const char *)qps); }

static void between_spaces(const char *qps)
{
    char text[8];
    snprintf(text, sizeof text, "%s", qps);
    run_two(12, (struct role){.name = "in n0", .run = first_space}, (struct role){.name = "in n1", .run = second_space}, text);
}

static void two_namespaces(int version) { (void)version; between_spaces("1"); }
static void two_namespaces_4_qps(int version) { (void)version; between_spaces("4"); }

const struct ffi_case ffi_cases[] = {
    ONCE(children_have_everything),
    ONCE(children_have_everything_in_v9),
    ONCE(forks_names_the_registration),
    ONCE(two_namespaces),
    ONCE(two_namespaces_4_qps),
    ONCE(fused),
    ONCE(fused_in_v9),
    ONCE(fused_in_v11),
    ONCE(fused_2_qps),
    ONCE(fused_3_qps_split),
    ONCE(fused_4_qps_split),
    ONCE(fused_to_one),
    ONCE(flush_4_qps),
    ONCE(fused_flush),
    ONCE(fused_flush_4_qps),
    ONCE(long_messages),
    ONCE(long_messages_fused),
    ONCE(no_object_is_left),
    {0},
};
