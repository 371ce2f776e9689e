/*
 * Buffers that cannot be registered where they lie and are reached through copies, on one end or on both: every size at
 * which something changes, several queue pairs and rails, groups that mix them with others, many in flight, the marker of
 * an optional completion, flushes. Every byte is checked, guards included. See bounce_life.c for their coming and going.
 */
#include <stdlib.h>
#include <string.h>

#include "held.h"

/* What the plugin copies through: pieces of a message on the sending end, and so many of them at once. */
enum { CHUNK = 128 << 10, CHUNKS = 16 };
enum { DEPTH = NCCL_NET_MAX_REQUESTS, MEMBERS = NCCL_NET_MAX_RECVS };

/* ---- sizes --------------------------------------------------------------------------------------------------- */

static const size_t sizes[] = {0,     1,     2,     7,     8,     9,      63,     64,     65,     127,     128,           129,          1000,
                               4095,  4096,  4097,  65535, 65537, 131071, 131072, 131073, 300000, 1 << 20, (1 << 20) + 1, (3 << 20) + 5};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* Each size between buffers of just that size, as it is, sent smaller than asked for, and asked for smaller than sent. */
static void all_sizes(int version, enum ends held)
{
    struct net net;
    struct pair pair;
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    for (int i = 0; i < SIZES; i++) {
        bool at_sender = held & SENDER, at_receiver = held & RECEIVER;
        size_t size = sizes[i], less = size - size / 3;
        struct guarded from = held_new(size, (size_t)i * 7 % 16, at_sender), to = held_new(size, (size_t)i * 5 % 16, at_receiver);
        void *from_mr = (at_sender ? register_bounced_ : register_direct_)(&net, pair.send, &from);
        void *to_mr = (at_receiver ? register_bounced_ : register_direct_)(&net, pair.recv, &to);
        held_message(&pair, &from, from_mr, size, &to, to_mr, size, 0x517E00u + (unsigned)i);
        held_message(&pair, &from, from_mr, less, &to, to_mr, size, 0x517E50u + (unsigned)i);
        held_message(&pair, &from, from_mr, size, &to, to_mr, less, 0x517EA0u + (unsigned)i);
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        held_free(&from);
        held_free(&to);
    }
    pair_close(&pair);
    net_stop(&net);
}

static void sizes_send(int version) { all_sizes(version, SENDER); }
static void sizes_recv(int version) { all_sizes(version, RECEIVER); }
static void sizes_both(int version) { all_sizes(version, BOTH); }

/* Parts of one large buffer at any distance from a word, between the two ends' distances too. */
static void any_alignment(int version)
{
    enum { ROOM = 3 * 4096 };
    struct desk desk;
    desk_open(&desk, version, BOTH, ROOM);
    for (size_t there = 0; there < 16; there++)
        for (size_t here = 0; here < 16; here++) {
            size_t size = 1 + (there * 16 + here) * 31 % 4200, offset = here * 257;
            uint64_t key = 0xA119u << 8 | there << 4 | here;
            guarded_reset(&desk.to);
            pattern_fill(desk.from.data + there * 3, size, key);
            void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data + offset, size + 40, 0, desk.to_mr);
            void *send = isend(&desk.net, desk.pair.send, desk.from.data + there * 3, size, 0, desk.from_mr);
            CHECK_EQ(wait_size(&desk.net, send), size);
            CHECK_EQ(wait_size(&desk.net, receive), size);
            CHECK_PART(&desk.to, 0, offset, 0, 0);
            CHECK_PART(&desk.to, offset, ROOM - offset, size, key);
        }
    desk_close(&desk);
}

/* The smallest useful run, for valgrind and for a first look. */
static void hello(int version)
{
    struct desk desk;
    desk_open(&desk, version, BOTH, 300000);
    held_message(&desk.pair, &desk.from, desk.from_mr, 300000, &desk.to, desk.to_mr, 300000, 1);
    held_message(&desk.pair, &desk.from, desk.from_mr, 13, &desk.to, desk.to_mr, 300000, 2);
    desk_close(&desk);
}

/* ---- groups -------------------------------------------------------------------------------------------------- */

/* Two buffers on each end, one that is held and one that is not; member i of a receive lies in slot i of either. */
struct board {
    const struct net *net;
    struct pair pair;
    struct guarded from[2], to[2];
    void *from_mrs[2], *to_mrs[2];
    size_t slot;
};

static void board_lay(struct board *board, const struct pair *pair, size_t slot)
{
    *board = (struct board){.net = pair->net, .pair = *pair, .slot = slot};
    for (int h = 0; h < 2; h++) {
        board->from[h] = held_new(MEMBERS * slot, 1, h);
        board->to[h] = held_new(MEMBERS * slot, 6, h);
        board->from_mrs[h] = (h ? register_bounced_ : register_direct_)(pair->net, pair->send, &board->from[h]);
        board->to_mrs[h] = (h ? register_bounced_ : register_direct_)(pair->net, pair->recv, &board->to[h]);
    }
}

static void board_clear(struct board *board)
{
    for (int h = 0; h < 2; h++) {
        CHECK_OK(net_dereg_mr(board->net, board->pair.send, board->from_mrs[h]));
        CHECK_OK(net_dereg_mr(board->net, board->pair.recv, board->to_mrs[h]));
        held_free(&board->from[h]);
        held_free(&board->to[h]);
    }
}

/* One receive of `n` members that are sent in any order; bit i of a mask says that member i is in the held buffer. */
static void board_group(struct board *board, int n, unsigned held_there, unsigned held_here, uint64_t seed)
{
    const struct net *net = board->net;
    void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS];
    size_t asked[MEMBERS], sent[MEMBERS];
    int tags[MEMBERS], order[MEMBERS], got[64];
    uint64_t random = seed;
    for (int h = 0; h < 2; h++) guarded_reset(&board->to[h]);
    for (int i = 0; i < n; i++) {
        bool here = held_here >> i & 1;
        uint64_t shape = next_random(&random);
        data[i] = board->to[here].data + (size_t)i * board->slot;
        mrs[i] = board->to_mrs[here];
        asked[i] = shape % 6 == 0 ? 0 : shape % 6 == 1 ? board->slot : next_random(&random) % board->slot;
        sent[i] = next_random(&random) % 4 == 0 ? asked[i] / 2 : asked[i];
        tags[i] = 40 - i * 9;
        order[i] = i;
    }
    shuffle(order, n, &random);
    void *receive = irecv_group(net, board->pair.recv, n, data, asked, tags, mrs);
    for (int k = 0; k < n; k++) {
        int i = order[k];
        bool there = held_there >> i & 1;
        uint8_t *from = board->from[there].data + (size_t)i * board->slot;
        pattern_fill(from, sent[i], seed << 8 | (unsigned)i);
        sends[i] = isend(net, board->pair.send, from, sent[i], tags[i], board->from_mrs[there]);
    }
    for (int i = 0; i < 64; i++) got[i] = 0x5bad;
    wait_done(net, receive, got);
    for (int i = 0; i < 64; i++) CHECK_EQ(got[i], i < n ? (int)sent[i] : 0x5bad);
    for (int i = 0; i < MEMBERS; i++)
        for (int h = 0; h < 2; h++) {
            bool is_it = i < n && h == (int)(held_here >> i & 1);
            CHECK_PART(&board->to[h], (size_t)i * board->slot, board->slot, is_it ? sent[i] : 0, seed << 8 | (unsigned)i);
        }
    for (int i = 0; i < n; i++) CHECK_EQ(wait_size(net, sends[i]), sent[i]);
}

static void board_groups(const struct pair *pair, int rounds, size_t slot)
{
    struct board board;
    uint64_t random = 0xB04D;
    board_lay(&board, pair, slot);
    for (int r = 0; r < rounds; r++) {
        unsigned there = (unsigned)next_random(&random), here = (unsigned)next_random(&random);
        board_group(&board, 1 + r * 5 % MEMBERS, there, here, (uint64_t)r);
    }
    board_group(&board, MEMBERS, 0xff, 0xff, 0xA11); /* nothing but copies */
    board_group(&board, MEMBERS, 0x55, 0xaa, 0xA12); /* each member on one end only */
    board_clear(&board);
}

static void mixed_groups(int version)
{
    struct net net;
    struct pair pair;
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    board_groups(&pair, 40, CHUNK + 5000);
    board_groups(&pair, 40, 300);
    pair_close(&pair);
    net_stop(&net);
}

/* A receive that wants more room in one buffer than the buffer has: asking again would never help. */
static void members_that_overlap(int version)
{
    enum { SIZE = 70000 };
    struct desk desk;
    desk_open(&desk, version, BOTH, SIZE);
    void *data[MEMBERS], *mrs[MEMBERS], *request;
    size_t whole[MEMBERS];
    int tags[MEMBERS] = {0};
    for (int i = 0; i < MEMBERS; i++) {
        data[i] = desk.to.data;
        mrs[i] = desk.to_mr;
        whole[i] = SIZE;
    }
    for (int n = 2; n <= MEMBERS; n++) CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, n, data, whole, tags, mrs, &request));
    /* While another receive has the room, it looks as if it helped. */
    void *first = desk_irecv(&desk, 0, SIZE, 1);
    CHECK(first != NULL);
    CHECK_PTR(try_irecv(&desk.net, desk.pair.recv, 2, data, whole, tags, mrs), NULL);
    pattern_fill(desk.from.data, SIZE, 1);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, SIZE, 1, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, send), SIZE);
    CHECK_EQ(wait_size(&desk.net, first), SIZE);
    CHECK_BUFFER(&desk.to, SIZE, 1);
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 2, data, whole, tags, mrs, &request));
    /* What is refused takes nothing and spoils nothing. */
    held_message(&desk.pair, &desk.from, desk.from_mr, SIZE, &desk.to, desk.to_mr, SIZE, 2);
    desk_close(&desk);
}

/* Outside of the range that was registered, by a byte. */
static void outside_the_range(int version)
{
    enum { SIZE = 5000 };
    struct desk desk;
    size_t size = SIZE;
    int tag = 0;
    desk_open(&desk, version, BOTH, SIZE);
    void *request = GARBAGE, *data = desk.to.data + 1;
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &request));
    data = desk.to.data - 1;
    CHECK_REFUSED(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &request));
    void *receive = desk_irecv(&desk, 0, SIZE, 0);
    CHECK(receive != NULL);
    for (int i = -1; i < 2; i += 2) {
        ncclResult_t result;
        WAIT_UNTIL(({
                       request = NULL;
                       result = net_isend(&desk.net, desk.pair.send, desk.from.data + i, SIZE, 0, desk.from_mr, &request);
                       result != ncclSuccess || request;
                   }),
                   "isend to say no");
        CHECK(ffi_is_error(result));
    }
    pattern_fill(desk.from.data, SIZE, 5);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, SIZE, 0, desk.from_mr);
    CHECK_EQ(wait_size(&desk.net, send), SIZE);
    CHECK_EQ(wait_size(&desk.net, receive), SIZE);
    CHECK_BUFFER(&desk.to, SIZE, 5);
    desk_close(&desk);
}

/* ---- several queue pairs and rails --------------------------------------------------------------------------- */

static void all_ways(const struct pair *pair)
{
    static const size_t some[] = {0, 1, 129, 4097, 131073, 300000, (1 << 20) + 1, (3 << 20) + 5};
    for (enum ends held = SENDER; held <= BOTH; held++)
        for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
            bool at_sender = held & SENDER, at_receiver = held & RECEIVER;
            struct guarded from = held_new(some[i], 9, at_sender), to = held_new(some[i], 2, at_receiver);
            void *from_mr = (at_sender ? register_bounced_ : register_direct_)(pair->net, pair->send, &from);
            void *to_mr = (at_receiver ? register_bounced_ : register_direct_)(pair->net, pair->recv, &to);
            for (uint64_t k = 0; k < 6; k++) /* each on another lane than the one before */
                held_message(pair, &from, from_mr, some[i] - k % 2 * (some[i] / 2), &to, to_mr, some[i], i << 8 | k);
            CHECK_OK(net_dereg_mr(pair->net, pair->send, from_mr));
            CHECK_OK(net_dereg_mr(pair->net, pair->recv, to_mr));
            held_free(&from);
            held_free(&to);
        }
    board_groups(pair, 24, 50000);
}

static void several(int version, const char *qps, const char *split)
{
    struct net net;
    struct pair pair;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    held_start(&net, version);
    pair_open(&net, 0, &pair);
    all_ways(&pair);
    pair_close(&pair);
    net_stop(&net);
}

static void four_qps(int version) { (void)version; several(12, "4", "0"); }
static void four_qps_in_v9(int version) { (void)version; several(9, "4", "0"); }
static void four_qps_split(int version) { (void)version; several(12, "4", "1"); }
static void four_qps_split_in_v9(int version) { (void)version; several(9, "4", "1"); }

/* Data as plain writes, then a separate immediate. */
static void adaptive_routing(int version)
{
    (void)version;
    setenv("NCCL_IB_ADAPTIVE_ROUTING", "1", 1);
    setenv("NCCL_IB_AR_THRESHOLD", "100", 1);
    several(12, "1", "0");
}

/* A device whose messages are shorter than a piece that is copied. */
static void short_device_messages(int version)
{
    (void)version;
    setenv("SOFTRNIC_MAX_MSG_SZ", "5000", 1);
    several(12, "2", "0");
}

/* One rail, or two fused, on either end. */
static void rails(int version, bool sender_fused, bool receiver_fused)
{
    struct net net;
    struct pair pair;
    setenv("SOFTRNIC_DEVICES", "2", 1);
    held_start(&net, version);
    int fused = net_fuse(&net, 2);
    pair_open_between(&net, sender_fused ? fused : 1, receiver_fused ? fused : 1, &pair);
    all_ways(&pair);
    pair_close(&pair);
    net_stop(&net);
}

static void two_rails(int version) { (void)version; rails(12, true, true); }
static void two_rails_in_v9(int version) { (void)version; rails(9, true, true); }
static void two_rails_to_one(int version) { (void)version; rails(12, true, false); }
static void two_rails_to_one_in_v9(int version) { (void)version; rails(9, true, false); }
static void one_rail_to_two(int version) { (void)version; rails(12, false, true); }
static void one_rail_to_two_in_v9(int version) { (void)version; rails(9, false, true); }

const struct ffi_case ffi_cases[] = {
    EACH(hello),
    EACH(sizes_send),
    EACH(sizes_recv),
    EACH(sizes_both),
    EACH(any_alignment),
    EACH(mixed_groups),
    EACH(members_that_overlap),
    EACH(outside_the_range),
    ONCE(four_qps),
    ONCE(four_qps_in_v9),
    ONCE(four_qps_split),
    ONCE(four_qps_split_in_v9),
    ONCE(adaptive_routing),
    ONCE(short_device_messages),
    ONCE(two_rails),
    ONCE(two_rails_in_v9),
    ONCE(two_rails_to_one),
    ONCE(two_rails_to_one_in_v9),
    ONCE(one_rail_to_two),
    ONCE(one_rail_to_two_in_v9),
    {0},
};
