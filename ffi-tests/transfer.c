/*
 * Single messages between two processes: every size where something changes (words, chunks of 128, pages, the number
 * of QPs), odd alignments, receives longer and shorter than what is sent. Every byte is checked, guards included.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"

enum { MOST_SIZES = 256, LARGEST = 1 << 20 | 1, ROOM = LARGEST + 4096 };

/* Boundaries of the wire: a chunk is size/QPs rounded up to 128 bytes, so q QPs change shape near k × q × 128. */
static int boundary_sizes(size_t *sizes)
{
    static const size_t fixed[] = {0,    1,    2,    3,    4,    7,    8,     9,     63,    64,     65,     127,    128,
                                   129,  4095, 4096, 4097, 8191, 8192, 8193,  65535, 65536, 65537,  131071, 131072, 131073,
                                   1048575, 1048576, 1048577};
    int count = 0;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) sizes[count++] = fixed[i];
    for (size_t qps = 2; qps <= 4; qps += 2)
        for (size_t chunks = 1; chunks <= 3; chunks++)
            for (size_t k = 0; k < 3; k++) sizes[count++] = qps * chunks * 128 + k - 1;
    for (size_t k = 0; k < 3; k++) sizes[count++] = 3 * 128 + k - 1; /* one QP of four has nothing left */
    return count;
}

static uint64_t key_of(int index)
{
    return 0x7E57000000u + (unsigned)index;
}

static void send_sizes(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    size_t sizes[MOST_SIZES];
    int count = boundary_sizes(sizes);
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    for (int i = 0; i < count; i++) {
        struct guarded buffer = guarded_new(sizes[i], (size_t)i * 7 % 131);
        void *mr = register_host(&net, comm, buffer.data, sizes[i] ? sizes[i] : 1);
        pattern_fill(buffer.data, sizes[i], key_of(i));
        CHECK_EQ(wait_size(&net, isend(&net, comm, buffer.data, sizes[i], i, mr)), sizes[i]);
        CHECK_BUFFER(&buffer, sizes[i], key_of(i));
        CHECK_OK(net_dereg_mr(&net, comm, mr));
        guarded_free(&buffer);
    }
    meet(socket, 'e');
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receive_sizes(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    size_t sizes[MOST_SIZES];
    int count = boundary_sizes(sizes);
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    for (int i = 0; i < count; i++) {
        struct guarded buffer = guarded_new(sizes[i], (size_t)i * 11 % 127);
        void *mr = register_host(&net, comm, buffer.data, sizes[i] ? sizes[i] : 1);
        CHECK_EQ(wait_size(&net, irecv(&net, comm, buffer.data, sizes[i], i, mr)), sizes[i]);
        CHECK_BUFFER(&buffer, sizes[i], key_of(i));
        CHECK_OK(net_dereg_mr(&net, comm, mr));
        guarded_free(&buffer);
    }
    meet(socket, 'e');
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void all_sizes(int version, const char *qps, const char *split)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    run_two(version, (struct role){.name = "sender", .run = send_sizes},
            (struct role){.name = "receiver", .run = receive_sizes}, NULL);
}

static void sizes_1_qp(int version) { all_sizes(version, "1", "0"); }
static void sizes_2_qps(int version) { all_sizes(version, "2", "0"); }
static void sizes_4_qps(int version) { all_sizes(version, "4", "0"); }
static void sizes_2_qps_split(int version) { all_sizes(version, "2", "1"); }
static void sizes_4_qps_split(int version) { all_sizes(version, "4", "1"); }

/* NCCL's adaptive-routing form: data as plain writes, then a separate immediate. */
static void sizes_adaptive_routing(int version)
{
    setenv("NCCL_IB_ADAPTIVE_ROUTING", "1", 1);
    setenv("NCCL_IB_AR_THRESHOLD", "100", 1);
    all_sizes(version, "2", "1");
}

static void sizes_without_inline(int version)
{
    setenv("SOFTRNIC_MAX_INLINE", "0", 1);
    all_sizes(version, "1", "0");
}

/* ---- what is sent against what was asked for ----------------------------------------------------------------- */

struct lengths {
    size_t sent, asked;
};
static const struct lengths uneven[] = {
    {0, 1},       {0, 4096},     {1, 2},        {1, 4096},  {100, 128},     {127, 128},      {4095, 65536},
    {65537, 1 << 20}, {1, 0},    {4096, 0},     {2, 1},     {129, 128},     {128, 127},      {4096, 1},
    {65536, 4095},    {1 << 20, 65537},         {513, 512}, {1000, 999},    {1 << 20, (1 << 20) - 1},
};
enum { UNEVEN = sizeof uneven / sizeof *uneven };

static int smaller(const struct lengths *lengths)
{
    return (int)(lengths->sent < lengths->asked ? lengths->sent : lengths->asked);
}

static void send_uneven(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = dial(&net, 0, socket);
    struct guarded buffer = guarded_new(ROOM, 1);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    for (int i = 0; i < UNEVEN; i++) {
        guarded_reset(&buffer);
        pattern_fill(buffer.data, uneven[i].sent, key_of(i));
        CHECK_EQ(wait_size(&net, isend(&net, comm, buffer.data, uneven[i].sent, 3, mr)), smaller(&uneven[i]));
    }
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void receive_uneven(int version, int socket, void *argument)
{
    (void)argument;
    struct net net;
    net_start(&net, version);
    void *comm = answer(&net, 0, socket);
    struct guarded buffer = guarded_new(ROOM, 1);
    void *mr = register_host(&net, comm, buffer.data, buffer.size);
    for (int i = 0; i < UNEVEN; i++) {
        guarded_reset(&buffer);
        CHECK_EQ(wait_size(&net, irecv(&net, comm, buffer.data, uneven[i].asked, 3, mr)), smaller(&uneven[i]));
        CHECK_BUFFER(&buffer, (size_t)smaller(&uneven[i]), key_of(i));
    }
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void all_uneven(int version, const char *qps, const char *split)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    run_two(version, (struct role){.name = "sender", .run = send_uneven},
            (struct role){.name = "receiver", .run = receive_uneven}, NULL);
}

static void sent_and_asked_differ(int version) { all_uneven(version, "1", "0"); }
static void sent_and_asked_differ_4_qps(int version) { all_uneven(version, "4", "1"); }

/* ---- in one process ------------------------------------------------------------------------------------------ */

static void both_directions(int version)
{
    struct net net;
    struct pair there, back;
    net_start(&net, version);
    pair_open(&net, 0, &there);
    pair_open(&net, 0, &back);
    for (int i = 0; i < 100; i++) {
        pair_message(&there, (size_t)i * 97, i, key_of(i));
        pair_message(&back, (size_t)i * 89, -i, key_of(1000 + i));
    }
    pair_close(&there);
    pair_close(&back);
    net_stop(&net);
}

/* Any int is a tag: NCCL's are ranks, the bootstrap passes its own. */
static void any_tag(int version)
{
    static const int tags[] = {0, 1, -1, 0x7fffffff, -0x7fffffff - 1, 0x5bad, 65536, 255, 256};
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) pair_message(&pair, 200 + i, tags[i], i);
    pair_close(&pair);
    net_stop(&net);
}

/* The smallest useful run, for valgrind and for a first look. */
static void hello(int version)
{
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    for (int i = 0; i < 3; i++) pair_message(&pair, i == 0 ? 0 : i == 1 ? 13 : 5000, 1, key_of(i));
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(hello),
    EACH(sizes_1_qp),
    EACH(sizes_2_qps),
    EACH(sizes_4_qps),
    EACH(sizes_2_qps_split),
    EACH(sizes_4_qps_split),
    EACH(sizes_adaptive_routing),
    EACH(sizes_without_inline),
    EACH(sent_and_asked_differ),
    EACH(sent_and_asked_differ_4_qps),
    EACH(both_directions),
    EACH(any_tag),
    {0},
};
