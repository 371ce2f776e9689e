/*
 * What decides whether a buffer is reached through copies: memory set aside ahead where the machine shows that it may be
 * needed, so that everything works when no registration succeeds any more; the settings that forbid copies or bound them;
 * and nothing of all this where pages only lie in the wrong place.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "held.h"

enum { CMA = 4, UNMOVABLE = 0, SIZE = 700000 };

/* ---- machines ------------------------------------------------------------------------------------------------ */

/* A folder that stands in for /proc; the plugin reads from it what kind of machine this is. */
static char machine[64];
static const char *const machine_files[] = {"meminfo", "zoneinfo", "cmdline"};

static void machine_write(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", machine, name);
    FILE *file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

static void machine_new(void)
{
    strcpy(machine, "/tmp/ffi-machine-XXXXXX");
    CHECK(mkdtemp(machine) != NULL);
    machine_write("meminfo", "MemTotal: 16777216 kB\nMemFree: 8388608 kB\nMemAvailable: 8388608 kB\n");
    setenv("PINRAIL_PROC", machine, 1);
}

static void machine_remove(void)
{
    for (size_t i = 0; i < sizeof machine_files / sizeof *machine_files; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", machine, machine_files[i]);
        unlink(path);
    }
    CHECK_EQ(rmdir(machine), 0);
    unsetenv("PINRAIL_PROC");
}

static const char with_cma[] = "MemTotal: 16777216 kB\nMemFree: 8388608 kB\nMemAvailable: 8388608 kB\nCmaTotal: 65536 kB\n"
                               "CmaFree: 60000 kB\n";

/* ---- ahead --------------------------------------------------------------------------------------------------- */

/* A buffer that nobody holds, and that is registered with no device all the same. */
static void *register_copied(const struct net *net, void *comm, const struct guarded *buffer)
{
    void *mr = register_host(net, comm, buffer->data, buffer->size);
    CHECK(!is_registered(buffer));
    return mr;
}

/* Messages and a group between buffers of an open pair. */
static void traffic(const struct pair *pair)
{
    const struct net *net = pair->net;
    static const size_t sizes[] = {0, 1, 4097, 131073, SIZE};
    struct guarded from = held_new(SIZE, 3, false), to = held_new(SIZE, 5, false);
    void *from_mr = register_copied(net, pair->send, &from), *to_mr = register_copied(net, pair->recv, &to);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        held_message(pair, &from, from_mr, sizes[i], &to, to_mr, SIZE, 0xA4EADu + i);
    void *data[2] = {to.data, to.data + SIZE / 2}, *mrs[2] = {to_mr, to_mr};
    size_t asked[2] = {SIZE / 2, SIZE / 2};
    int tags[2] = {4, 5}, got[64];
    guarded_reset(&to);
    pattern_fill(from.data, 1000, 1);
    void *receive = irecv_group(net, pair->recv, 2, data, asked, tags, mrs);
    void *second = isend(net, pair->send, from.data, 1000, 5, from_mr), *first = isend(net, pair->send, from.data, 10, 4, from_mr);
    wait_done(net, receive, got);
    CHECK_EQ(got[0], 10);
    CHECK_EQ(got[1], 1000);
    CHECK_EQ(wait_size(net, first), 10);
    CHECK_EQ(wait_size(net, second), 1000);
    CHECK_PART(&to, SIZE / 2, SIZE / 2, 1000, 1);
    CHECK_OK(net_dereg_mr(net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(net, pair->recv, to_mr));
    held_free(&from);
    held_free(&to);
}

/* A listener, then no registration succeeds any more: the connection comes up and data move, out of what was set aside. */
static void works_without_registrations(const struct net *net, int dev, uint64_t regions)
{
    struct pair pair = {.net = net};
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL;
    CHECK_OK(net_listen(net, dev, handle, &listener));
    CHECK_EQ(rnic_counts().mrs, regions);
    rnic_fail_registrations_from(1);
    WAIT_UNTIL(pair_step(&pair, dev, handle, listener), "a pair without registrations");
    struct pair another;
    pair_open(net, dev, &another);
    traffic(&pair);
    traffic(&another);
    CHECK_EQ(rnic_counts().mrs, regions);
    pair_close(&another);
    CHECK_OK(net_close_listen(net, listener));
    traffic(&pair);
    pair_close(&pair);
    rnic_fail_registrations_from(0);
}

/* From v11 on the last context takes it away, before that the last communicator. */
static void set_aside(int version)
{
    struct net net;
    bool with_context = version >= 11;
    rnic_keep();
    machine_new();
    machine_write("meminfo", with_cma);
    setenv("PINRAIL_BOUNCE_BYTES", "67108864", 1);
    struct census before = census_take();
    for (int i = 0; i < 3; i++) {
        net_start(&net, version);
        CHECK_EQ(rnic_counts().mrs, with_context);
        works_without_registrations(&net, 0, 1);
        CHECK_EQ(rnic_counts().mrs, with_context);
        works_without_registrations(&net, 0, 1);
        CHECK_OK(net_finalize(&net, net.context));
        expect_clean(before);
        net_unload(&net);
        expect_gone(before);
    }
    machine_remove();
}

/* Every device gets a region over it, so that any of them, or several fused, can be used. */
static void set_aside_with_every_device(int version)
{
    struct net net;
    (void)version;
    rnic_keep();
    machine_new();
    machine_write("meminfo", with_cma);
    setenv("PINRAIL_BOUNCE_BYTES", "67108864", 1);
    setenv("SOFTRNIC_DEVICES", "2", 1);
    struct census before = census_take();
    net_start(&net, 12);
    int fused = net_fuse(&net, 2);
    for (int dev = 0; dev <= fused; dev++) works_without_registrations(&net, dev, 2);
    net_stop(&net);
    expect_gone(before);
    machine_remove();
}

/* A buffer for which what was set aside is too small, when nothing else is to be had. */
static void set_aside_too_little(int version)
{
    struct net net;
    struct pair pair;
    void *mr = GARBAGE;
    machine_new();
    machine_write("meminfo", with_cma);
    setenv("PINRAIL_BOUNCE_BYTES", "8388608", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    rnic_fail_registrations_from(1);
    struct guarded large = held_new(4 << 20, 0, false);
    traffic(&pair); /* fits */
    size_t mark = log_mark();
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, large.data, large.size, NCCL_PTR_HOST, &mr));
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "PINRAIL_BOUNCE_BYTES"), 1);
    traffic(&pair);
    rnic_fail_registrations_from(0);
    mr = register_direct(&net, pair.recv, &large);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    pair_close(&pair);
    net_stop(&net);
    held_free(&large);
    machine_remove();
}

/* That it cannot be set aside is a warning, and no more. */
static void cannot_be_set_aside(int version)
{
    struct net net;
    struct pair pair;
    rnic_keep();
    machine_new();
    machine_write("meminfo", with_cma);
    rnic_fail_registration(1);
    size_t mark = log_mark();
    net_start(&net, version);
    if (version >= 11) CHECK_EQ(log_warnings_since(mark), 1);
    pair_open(&net, 0, &pair);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "no memory is pinned ahead"), 1);
    pair_message(&pair, SIZE, 0, 1);
    pair_close(&pair);
    net_stop(&net);
    machine_remove();
}

/* What shows the risk, and what does not. */
static void machines(int version)
{
    (void)version;
    static const struct {
        const char *file, *text, *fallback;
        int regions;
    } all[] = {
        {"meminfo", "CmaTotal: 0 kB\nCmaFree: 0 kB\n", "bounce", 0},
        {"meminfo", with_cma, "bounce", 1},
        {"meminfo", with_cma, "fail", 0},
        {"meminfo", "CmaTotal: 0 kB\nCmaFree: 2048 kB\n", "bounce", 1}, /* kexec handover */
        {"zoneinfo", "Node 0, zone   Normal\n  pages free 1\n        managed  1000\n", "bounce", 0},
        {"zoneinfo", "Node 0, zone  Movable\n  pages free 1\n        managed  1000\n", "bounce", 1},
        {"cmdline", "quiet kho=on\n", "bounce", 1},
        {"cmdline", "quiet\n", "bounce", 0},
    };
    rnic_keep();
    setenv("PINRAIL_BOUNCE_BYTES", "67108864", 1);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct net net;
        machine_new();
        machine_write(all[i].file, all[i].text);
        setenv("PINRAIL_REG_FALLBACK", all[i].fallback, 1);
        net_start(&net, 12);
        if (rnic_counts().mrs != (uint64_t)all[i].regions)
            FAIL("%s \"%s\": %llu regions at rest, want %d", all[i].file, all[i].text, (unsigned long long)rnic_counts().mrs,
                 all[i].regions);
        net_stop(&net);
        machine_remove();
    }
}

/* ---- forbidden and bounded ----------------------------------------------------------------------------------- */

/* A held buffer that is refused. The first time a warning says why; the same cause is not told again. */
static void refuse(const struct pair *pair, void *comm, size_t size, const char *named)
{
    struct guarded buffer = held_new(size, 0, true);
    void *mr = GARBAGE;
    size_t mark = log_mark();
    CHECK_REFUSED(net_reg_mr(pair->net, comm, buffer.data, size, NCCL_PTR_HOST, &mr));
    CHECK(mr == NULL || mr == GARBAGE);
    CHECK_EQ(log_warnings_since(mark), named ? 1 : 0);
    if (named) CHECK_EQ(log_matches_since(mark, named), 1);
    CHECK(!is_registered(&buffer));
    held_free(&buffer);
}

static void direct_message(const struct pair *pair)
{
    struct guarded from = held_new(SIZE, 3, false), to = held_new(SIZE, 5, false);
    void *from_mr = register_direct(pair->net, pair->send, &from), *to_mr = register_direct(pair->net, pair->recv, &to);
    held_message(pair, &from, from_mr, SIZE, &to, to_mr, SIZE, 1);
    CHECK_OK(net_dereg_mr(pair->net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(pair->net, pair->recv, to_mr));
    held_free(&from);
    held_free(&to);
}

static void forbidden(int version)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    refuse(&pair, pair.recv, 4096, "erdict: placement");
    for (int i = 0; i < 4; i++) refuse(&pair, i % 2 ? pair.send : pair.recv, 4096, NULL);
    direct_message(&pair);
    pair_close(&pair);
    net_stop(&net);
}

static void too_large_to_receive(int version)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_BOUNCE_BYTES", "1048576", 1); /* the least */
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    struct rnic_counts before = rnic_counts();
    refuse(&pair, pair.recv, 4 << 20, "PINRAIL_BOUNCE_BYTES");
    refuse(&pair, pair.recv, 4 << 20, NULL);
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    direct_message(&pair);
    struct guarded small = held_new(SIZE, 0, true), other = held_new(SIZE, 0, false); /* fits */
    void *mr = register_bounced(&net, pair.recv, &small), *other_mr = register_direct(&net, pair.send, &other);
    held_message(&pair, &other, other_mr, SIZE, &small, mr, SIZE, 2);
    CHECK_OK(net_dereg_mr(&net, pair.send, other_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    held_free(&small);
    held_free(&other);
    pair_close(&pair);
    net_stop(&net);
}

/* A sending end makes do with few chunks, whatever the size of its buffer. */
static void large_send_with_little_room(int version)
{
    struct desk desk;
    enum { LARGE = 4 << 20 };
    setenv("PINRAIL_BOUNCE_BYTES", "1048576", 1); /* the least */
    desk_open(&desk, version, SENDER, LARGE);
    held_message(&desk.pair, &desk.from, desk.from_mr, LARGE, &desk.to, desk.to_mr, LARGE, 3);
    desk_close(&desk);
}

/* The first of them fit and was told of; that a later one does not is news. */
static void too_large_after_others(int version)
{
    struct net net;
    struct pair pair;
    setenv("PINRAIL_BOUNCE_BYTES", "1048576", 1);
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded small = held_new(SIZE, 0, true);
    size_t mark = log_mark();
    void *mr = register_bounced(&net, pair.recv, &small);
    CHECK_EQ(log_warnings_since(mark), 1);
    refuse(&pair, pair.recv, SIZE, "PINRAIL_BOUNCE_BYTES");
    refuse(&pair, pair.recv, SIZE, NULL);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    mark = log_mark();
    mr = register_bounced(&net, pair.recv, &small); /* there is room again */
    CHECK_EQ(log_warnings_since(mark), 0);
    CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
    held_free(&small);
    pair_close(&pair);
    net_stop(&net);
}

/* Each registration takes longer than a diagnosis may: what it must know it finds out all the same. */
static void slow_registrations(int version)
{
    struct desk desk;
    (void)version;
    setenv("SOFTRNIC_REG_US", "600000", 1);
    desk_open(&desk, 12, BOTH, SIZE);
    held_message(&desk.pair, &desk.from, desk.from_mr, SIZE, &desk.to, desk.to_mr, SIZE, 1);
    desk_close(&desk);
}

/* ---- nothing in the way -------------------------------------------------------------------------------------- */

/* All memory lies where it may not stay and nobody holds it: it is moved when it is registered, and nothing is copied. */
static void in_the_wrong_place_only(int version)
{
    struct net net;
    struct pair pair;
    size_t mark = log_mark();
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = held_new(SIZE, 3, false), to = held_new(SIZE, 5, false);
    CHECK_EQ(rnic_page(to.data).migratetype, CMA);
    void *from_mr = register_direct(&net, pair.send, &from), *to_mr = register_direct(&net, pair.recv, &to);
    CHECK_EQ(rnic_page(to.data).migratetype, UNMOVABLE);
    for (size_t size = 0; size <= SIZE; size += 99999)
        held_message(&pair, &from, from_mr, size, &to, to_mr, SIZE, size);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    held_free(&from);
    held_free(&to);
    pair_close(&pair);
    net_stop(&net);
    CHECK_EQ(log_warnings_since(mark), 0);
}

/* Nobody closes what never came into being: a connect that fails gives back what was set aside for it. */
static void connect_that_fails(int version)
{
    struct net net;
    char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *comm = NULL;
    bool with_context = version >= 11;
    rnic_keep();
    machine_new();
    machine_write("meminfo", with_cma);
    setenv("PINRAIL_BOUNCE_BYTES", "67108864", 1);
    setenv("NCCL_SOCKET_RETRY_CNT", "0", 1);
    struct census before = census_take();
    net_start(&net, version);
    CHECK_OK(net_listen(&net, 0, handle, &listener));
    CHECK_OK(net_close_listen(&net, listener)); /* nobody is there any more */
    ncclResult_t result = ncclSuccess;
    WAIT_UNTIL((result = net_connect(&net, 0, handle, &comm)) != ncclSuccess || comm, "connect to give up");
    CHECK(ffi_is_error(result));
    CHECK_EQ(rnic_counts().mrs, with_context ? 1 : 0);
    CHECK_EQ(rnic_counts().contexts, with_context ? 1 : 0);
    CHECK_REFUSED(net_connect(&net, 77, handle, &comm));
    CHECK_REFUSED(net_listen(&net, 77, handle, &listener));
    CHECK_EQ(rnic_counts().contexts, with_context ? 1 : 0);
    net_stop(&net);
    expect_gone(before);
    machine_remove();
}

/* What is set aside is a small part of what the machine has left. */
static void set_aside_with_little_left(int version)
{
    struct net net;
    struct pair pair;
    machine_new();
    machine_write("meminfo", "MemTotal: 16777216 kB\nMemAvailable: 262144 kB\nCmaTotal: 65536 kB\nCmaFree: 60000 kB\n");
    size_t mark = log_mark();
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    CHECK_EQ(log_matches_since(mark, "33554432 bytes are pinned ahead"), 1);
    pair_close(&pair);
    net_stop(&net);
    machine_write("meminfo", "MemTotal: 16777216 kB\nMemAvailable: 16384 kB\nCmaTotal: 65536 kB\nCmaFree: 60000 kB\n");
    mark = log_mark();
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    CHECK_EQ(log_matches_since(mark, "memory is short"), 1);
    CHECK_EQ(log_warnings_since(mark), 0);
    pair_close(&pair);
    net_stop(&net);
    machine_remove();
}

/* Not even the usual chunks may be locked: fewer do. */
static void little_may_be_locked(int version)
{
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_MEMLOCK", "3000000", 1);
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = held_new(SIZE, 1, true), to = held_new(SIZE, 2, true);
    void *from_mr = register_bounced(&net, pair.send, &from), *to_mr = register_bounced(&net, pair.recv, &to);
    for (int i = 0; i < 20; i++) held_message(&pair, &from, from_mr, SIZE, &to, to_mr, SIZE, (uint64_t)i);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    held_free(&from);
    held_free(&to);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(set_aside),
    EACH(set_aside_too_little),
    EACH(cannot_be_set_aside),
    EACH(forbidden),
    EACH(little_may_be_locked),
    EACH(connect_that_fails),
    EACH(set_aside_with_little_left),
    EACH(too_large_to_receive),
    EACH(large_send_with_little_room),
    EACH(too_large_after_others),
    EACH(in_the_wrong_place_only),
    ONCE(set_aside_with_every_device),
    ONCE(machines),
    ONCE(slow_registrations),
    {0},
};
