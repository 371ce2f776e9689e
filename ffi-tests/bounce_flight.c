/*
 * Many transfers at once over buffers that are reached through copies: windows that fill all room and must wait, messages
 * longer than the room there is, streams between processes, the marker of an
 * optional completion, flushes.
 */
#include <stdlib.h>
#include <string.h>

#include "held.h"

/* What the plugin copies through: pieces of a message on the sending end, and so many of them at once. */
enum { CHUNK = 128 << 10, CHUNKS = 16 };
enum { DEPTH = NCCL_NET_MAX_REQUESTS, MEMBERS = NCCL_NET_MAX_RECVS };

/* ---- windows ------------------------------------------------------------------------------------------------- */

/* As many receives as can be in flight, which together fill one buffer; the sends run out of chunks on the way. */
static void thirty_two_of_one_buffer(int version)
{
    enum { SLOT = 1 << 16, LENGTH = 60000 };
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH];
    int order[DEPTH];
    uint64_t random = 32;
    desk_open(&desk, version, BOTH, DEPTH * SLOT);
    for (int round = 0; round < 3; round++) {
        int sent = 0;
        guarded_reset(&desk.to);
        for (int i = 0; i < DEPTH; i++) {
            order[i] = i;
            pattern_fill(desk.from.data + i * SLOT, LENGTH, (uint64_t)(round * 100 + i));
            receives[i] = desk_irecv(&desk, (size_t)i * SLOT, SLOT, 1);
            if (!receives[i]) FAIL("receive %d of %d would block", i + 1, DEPTH);
        }
        for (int i = 0; i < 10; i++) CHECK_PTR(desk_irecv(&desk, 0, SLOT, 1), NULL);
        rnic_hold(true);
        while (sent <= CHUNKS) { /* the last of these waits for a chunk */
            WAIT_UNTIL((sends[sent] = desk_isend(&desk, (size_t)sent * SLOT, LENGTH, 1)), "a send into a chunk");
            sent++;
        }
        for (int i = 0; i < 100; i++) CHECK_PTR(desk_isend(&desk, (size_t)sent * SLOT, LENGTH, 1), NULL);
        for (int i = 0; i < sent; i++) CHECK(!is_done(&desk.net, sends[i], NULL));
        rnic_hold(false);
        for (; sent < DEPTH; sent++)
            WAIT_UNTIL((sends[sent] = desk_isend(&desk, (size_t)sent * SLOT, LENGTH, 1)), "a send among 32");
        shuffle(order, DEPTH, &random);
        for (int i = 0; i < DEPTH; i++) {
            CHECK_EQ(wait_size(&desk.net, sends[order[i]]), LENGTH);
            CHECK_EQ(wait_size(&desk.net, receives[order[i]]), LENGTH);
        }
        for (int i = 0; i < DEPTH; i++) CHECK_PART(&desk.to, (size_t)i * SLOT, SLOT, LENGTH, (uint64_t)(round * 100 + i));
    }
    desk_close(&desk);
}

/* Receives into the buffer that is copied to and into one that is not by turns, sends from either, tested in any order. */
static void mixed_in_flight(int version, const char *qps, const char *split)
{
    enum { SLOT = 20000 };
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH];
    size_t lengths[DEPTH];
    int order[DEPTH];
    uint64_t random = 0x313D;
    setenv("NCCL_IB_QPS_PER_CONNECTION", qps, 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", split, 1);
    desk_open(&desk, version, BOTH, DEPTH * SLOT);
    struct guarded from = held_new(DEPTH * SLOT, 1, false), to = held_new(DEPTH * SLOT, 2, false);
    void *from_mr = register_direct(&desk.net, desk.pair.send, &from), *to_mr = register_direct(&desk.net, desk.pair.recv, &to);
    for (int round = 0; round < 20; round++) {
        uint64_t there = next_random(&random), here = next_random(&random);
        guarded_reset(&desk.to);
        guarded_reset(&to);
        for (int i = 0; i < DEPTH; i++) {
            struct guarded *into = here >> i & 1 ? &desk.to : &to;
            order[i] = i;
            lengths[i] = next_random(&random) % SLOT;
            receives[i] = irecv(&desk.net, desk.pair.recv, into->data + i * SLOT, SLOT, 3, here >> i & 1 ? desk.to_mr : to_mr);
        }
        for (int i = 0; i < DEPTH; i++) {
            struct guarded *source = there >> i & 1 ? &desk.from : &from;
            pattern_fill(source->data + i * SLOT, lengths[i], (uint64_t)(round * DEPTH + i));
            void *mr = there >> i & 1 ? desk.from_mr : from_mr;
            sends[i] = isend(&desk.net, desk.pair.send, source->data + i * SLOT, lengths[i], 3, mr);
        }
        shuffle(order, DEPTH, &random);
        for (int k = 0; k < DEPTH; k++) CHECK_EQ(wait_size(&desk.net, receives[order[k]]), lengths[order[k]]);
        for (int k = 0; k < DEPTH; k++) CHECK_EQ(wait_size(&desk.net, sends[order[k]]), lengths[order[k]]);
        for (int i = 0; i < DEPTH; i++) {
            bool copied = here >> i & 1;
            uint64_t key = (uint64_t)(round * DEPTH + i);
            CHECK_PART(&desk.to, (size_t)i * SLOT, SLOT, copied ? lengths[i] : 0, key);
            CHECK_PART(&to, (size_t)i * SLOT, SLOT, copied ? 0 : lengths[i], key);
        }
    }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, to_mr));
    held_free(&from);
    held_free(&to);
    desk_close(&desk);
}

static void mixed_with_direct_ones(int version) { mixed_in_flight(version, "1", "0"); }
static void mixed_with_direct_ones_on_4_qps(int version) { mixed_in_flight(version, "4", "1"); }

/* Two receives of a whole buffer: the second has no room until the first was copied out. */
static void no_room_for_the_second(int version)
{
    enum { SIZE = 700000 };
    struct desk desk;
    desk_open(&desk, version, RECEIVER, SIZE);
    void *data = desk.to.data, *first = desk_irecv(&desk, 0, SIZE, 1), *second, *send;
    size_t size = SIZE;
    int tag = 1;
    CHECK(first != NULL);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 20; i++) CHECK_PTR(desk_irecv(&desk, 0, SIZE, 1), NULL);
        void *marked = NCCL_NET_OPTIONAL_RECV_COMPLETION; /* is taken away: NCCL would otherwise test pointer 1 */
        CHECK_OK(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &desk.to_mr, &marked));
        CHECK_PTR(marked, NULL);
        guarded_reset(&desk.to);
        pattern_fill(desk.from.data, SIZE, (uint64_t)round);
        WAIT_UNTIL((send = desk_isend(&desk, 0, SIZE, 1)), "a send");
        CHECK_EQ(wait_size(&desk.net, send), SIZE);
        /* Asking for the second alone gets the first copied. */
        WAIT_UNTIL((second = desk_irecv(&desk, 0, SIZE, 1)), "room for the second");
        CHECK(is_done(&desk.net, first, NULL));
        CHECK_BUFFER(&desk.to, SIZE, (uint64_t)round);
        first = second;
    }
    desk_close(&desk);
}

/* More groups than there is room for at once: every one gets it in its turn. */
static void more_groups_than_room(int version)
{
    enum { GROUPS = 200, SLOT = 500 };
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH][MEMBERS];
    int posted = 0, sent = 0, done = 0, refused = 0;
    desk_open(&desk, version, BOTH, (size_t)DEPTH * MEMBERS * SLOT);
    struct deadline deadline = deadline_in(60);
    while (done < GROUPS) {
        if (deadline_passed(&deadline)) FAIL("%d receives posted, %d sends, %d done", posted, sent, done);
        if (posted < GROUPS && posted < done + DEPTH) {
            void *data[MEMBERS], *mrs[MEMBERS];
            size_t asked[MEMBERS];
            int tags[MEMBERS];
            for (int i = 0; i < MEMBERS; i++) {
                data[i] = desk.to.data + (posted % DEPTH * MEMBERS + i) * SLOT;
                mrs[i] = desk.to_mr;
                asked[i] = SLOT;
                tags[i] = i;
            }
            void *receive = try_irecv(&desk.net, desk.pair.recv, MEMBERS, data, asked, tags, mrs);
            receives[posted % DEPTH] = receive;
            posted += receive != NULL;
            refused += receive == NULL;
        }
        if (sent < posted * MEMBERS) {
            int g = sent / MEMBERS, i = (sent * 3 + g) % MEMBERS;
            size_t place = (size_t)(g % DEPTH * MEMBERS + i) * SLOT;
            pattern_fill(desk.from.data + place, (size_t)(SLOT - i), (uint64_t)(g * MEMBERS + i));
            void *send = desk_isend(&desk, place, (size_t)(SLOT - i), i);
            sends[g % DEPTH][i] = send;
            sent += send != NULL;
        }
        if (done < posted && sent >= (done + 1) * MEMBERS) {
            int got[64] = {0};
            if (!is_done(&desk.net, receives[done % DEPTH], got)) continue;
            for (int i = 0; i < MEMBERS; i++) {
                size_t place = (size_t)(done % DEPTH * MEMBERS + i) * SLOT;
                CHECK_EQ(got[i], SLOT - i);
                CHECK_PART(&desk.to, place, SLOT, (size_t)(SLOT - i), (uint64_t)(done * MEMBERS + i));
                memset(desk.to.data + place, 0xC3, SLOT);
                CHECK_EQ(wait_size(&desk.net, sends[done % DEPTH][i]), SLOT - i);
            }
            done++;
        }
    }
    CHECK_BUFFER(&desk.to, 0, 0);
    CHECK(refused > 0); /* 256 members in flight need more than there is */
    desk_close(&desk);
}

/* A message longer than all chunks together, with others behind it that may not overtake it. A buffer has room for eight
 * receives that fill it, whatever their sizes; where the device writes there is room for all. */
static void long_one_first(int version, enum ends held, int count)
{
    enum { LONG = 2 * CHUNKS * CHUNK + 12345, SHORT = 3000 };
    struct desk desk;
    void *receives[DEPTH], *sends[DEPTH];
    desk_open(&desk, version, held, LONG + DEPTH * SHORT);
    struct guarded plain = held_new(DEPTH * SHORT, 1, false); /* every other one behind it could take the short way */
    void *plain_mr = register_direct(&desk.net, desk.pair.send, &plain);
    for (int stepped = 0; stepped < 2; stepped++) {
        guarded_reset(&desk.to);
        for (int i = 0; i < count; i++) {
            size_t size = i ? SHORT : LONG, at = i ? LONG + (size_t)(i - 1) * SHORT : 0;
            pattern_fill(i % 2 ? plain.data + i * SHORT : desk.from.data + at, size, 0x10A6u + (unsigned)i);
            receives[i] = desk_irecv(&desk, at, size, 7); /* one tag: order is all that tells them apart */
            if (!receives[i]) FAIL("receive %d of %d would block", i + 1, count);
        }
        rnic_hold(stepped);
        WAIT_UNTIL((sends[0] = desk_isend(&desk, 0, LONG, 7)), "the long send");
        uint64_t released = 0;
        while (stepped && !is_done(&desk.net, sends[0], NULL)) {
            if (released + CHUNKS < LONG / CHUNK) /* some of it is not under way */
                CHECK_PTR(try_isend(&desk.net, desk.pair.send, plain.data + SHORT, SHORT, 7, plain_mr), NULL);
            CHECK(!is_done(&desk.net, receives[1], NULL));
            released += rnic_release(1);
        }
        if (stepped && released < LONG / CHUNK) FAIL("%llu pieces for %d bytes", (unsigned long long)released, LONG);
        rnic_hold(false);
        for (int i = 1; i < count; i++) {
            uint8_t *from = i % 2 ? plain.data + i * SHORT : desk.from.data + LONG + (i - 1) * SHORT;
            sends[i] = isend(&desk.net, desk.pair.send, from, SHORT, 7, i % 2 ? plain_mr : desk.from_mr);
        }
        if (!stepped) CHECK_EQ(wait_size(&desk.net, sends[0]), LONG);
        for (int i = 1; i < count; i++) CHECK_EQ(wait_size(&desk.net, sends[i]), SHORT);
        for (int i = count - 1; i >= 0; i--) CHECK_EQ(wait_size(&desk.net, receives[i]), i ? SHORT : LONG);
        for (int i = 0; i < count; i++)
            CHECK_PART(&desk.to, i ? LONG + (size_t)(i - 1) * SHORT : 0, i ? SHORT : LONG, i ? SHORT : LONG, 0x10A6u + (unsigned)i);
    }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, plain_mr));
    held_free(&plain);
    desk_close(&desk);
}

static void longer_than_all_chunks(int version) { long_one_first(version, SENDER, DEPTH); }
static void longer_than_all_chunks_into_copies(int version) { long_one_first(version, BOTH, MEMBERS); }

/* ---- a stream between two processes -------------------------------------------------------------------------- */

enum { MESSAGES = 600, WINDOW = 16, LARGEST = 2 * CHUNK + 999 };

static size_t stream_size(int message)
{
    uint64_t state = 0x57EEu + (unsigned)message;
    return next_random(&state) % (message % 5 ? 4000 : LARGEST);
}

static void stream_out(int version, int socket, void *argument)
{
    bool held = *(enum ends *)argument & SENDER;
    struct net net;
    held_start(&net, version);
    void *comm = dial(&net, 0, socket), *requests[WINDOW] = {NULL};
    struct guarded buffer = held_new((size_t)WINDOW * LARGEST, 1, held);
    void *mr = held ? register_bounced(&net, comm, &buffer) : register_direct(&net, comm, &buffer);
    for (int m = 0; m < MESSAGES + WINDOW; m++) {
        int w = m % WINDOW;
        if (requests[w]) CHECK_EQ(wait_size(&net, requests[w]), stream_size(m - WINDOW));
        requests[w] = NULL;
        if (m >= MESSAGES) continue;
        pattern_fill(buffer.data + w * LARGEST, stream_size(m), (uint64_t)m);
        requests[w] = isend(&net, comm, buffer.data + w * LARGEST, stream_size(m), m, mr);
    }
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    held_free(&buffer);
    CHECK_OK(net_close_send(&net, comm));
    net_stop(&net);
}

static void stream_in(int version, int socket, void *argument)
{
    bool held = *(enum ends *)argument & RECEIVER;
    struct net net;
    held_start(&net, version);
    void *comm = answer(&net, 0, socket), *requests[WINDOW] = {NULL};
    struct guarded buffer = held_new((size_t)WINDOW * LARGEST, 2, held);
    void *mr = held ? register_bounced(&net, comm, &buffer) : register_direct(&net, comm, &buffer);
    for (int m = 0; m < MESSAGES + WINDOW; m++) {
        int w = m % WINDOW;
        if (requests[w]) {
            CHECK_EQ(wait_size(&net, requests[w]), stream_size(m - WINDOW));
            CHECK_PART(&buffer, (size_t)w * LARGEST, LARGEST, stream_size(m - WINDOW), (uint64_t)(m - WINDOW));
            memset(buffer.data + w * LARGEST, 0xC3, LARGEST);
        }
        requests[w] = m < MESSAGES ? irecv(&net, comm, buffer.data + w * LARGEST, LARGEST, m, mr) : NULL;
    }
    CHECK_BUFFER(&buffer, 0, 0);
    meet(socket, 'e');
    CHECK_OK(net_dereg_mr(&net, comm, mr));
    held_free(&buffer);
    CHECK_OK(net_close_recv(&net, comm));
    net_stop(&net);
}

static void stream(int version, enum ends held)
{
    run_two(version, (struct role){.name = "sender", .run = stream_out}, (struct role){.name = "receiver", .run = stream_in},
            &held);
}

static void stream_from_copies(int version) { stream(version, SENDER); }
static void stream_into_copies(int version) { stream(version, RECEIVER); }
static void stream_between_copies(int version) { stream(version, BOTH); }

/* ---- the marker of an optional completion -------------------------------------------------------------------- */

/* Who sets it reads arrival from the data and takes a request that is done at once. Data that must be copied would never
 * come to who polls them alone, so the receive is done when they are there and no sooner. */
static void marker_means_nothing_here(int version)
{
    enum { SIZE = 3 << 19 };
    struct desk desk;
    desk_open(&desk, version, RECEIVER, SIZE);
    struct guarded direct = held_new(SIZE, 0, false);
    void *direct_mr = register_direct(&desk.net, desk.pair.recv, &direct);
    for (int round = 0; round < 20; round++) {
        bool copied = round % 4 != 3; /* between them one that the device writes, to see that the marker counts there */
        struct guarded *to = copied ? &desk.to : &direct;
        void *data = to->data, *mr = copied ? desk.to_mr : direct_mr, *request, *send;
        size_t size = SIZE, less = SIZE - (size_t)round;
        int tag = 1;
        guarded_reset(to);
        WAIT_UNTIL(({
                       request = NCCL_NET_OPTIONAL_RECV_COMPLETION;
                       CHECK_OK(net_irecv(&desk.net, desk.pair.recv, 1, &data, &size, &tag, &mr, &request));
                       request;
                   }),
                   "irecv to take the receive");
        CHECK(request != NCCL_NET_OPTIONAL_RECV_COMPLETION);
        bool early = is_done(&desk.net, request, NULL);
        CHECK_EQ(early, !copied && version >= 9); /* earlier versions know no marker */
        for (int i = 0; copied && i < 200; i++) CHECK(!is_done(&desk.net, request, NULL));
        pattern_fill(desk.from.data, less, (uint64_t)round);
        WAIT_UNTIL((send = desk_isend(&desk, 0, less, 1)), "the send");
        CHECK_EQ(wait_size(&desk.net, send), less);
        if (!early) CHECK_EQ(wait_size(&desk.net, request), less);
        if (early) WAIT_UNTIL(pattern_mismatch(data, less, (uint64_t)round) < 0, "the data themselves");
        CHECK_BUFFER(to, less, (uint64_t)round);
    }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, direct_mr));
    held_free(&direct);
    desk_close(&desk);
}

/* ---- flushes ------------------------------------------------------------------------------------------------- */

/* A flush reads where the device wrote. What the host copied needs none, and its address means nothing to the device. */
static void flush_reads_no_copies(int version)
{
    enum { SLOT = 4096 };
    struct desk desk;
    setenv("PINRAIL_FLUSH", "always", 1);
    desk_open(&desk, version, RECEIVER, MEMBERS * SLOT);
    struct guarded direct = held_new(MEMBERS * SLOT, 0, false);
    void *direct_mr = register_direct(&desk.net, desk.pair.recv, &direct);
    for (unsigned copied = 0; copied < 1 << MEMBERS; copied += 5)
        for (int n = 1; n <= MEMBERS; n += 7) {
            void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS], *request = GARBAGE;
            size_t asked[MEMBERS];
            int tags[MEMBERS], got[64] = {0}, reads = 0;
            for (int i = 0; i < n; i++) {
                bool here = copied >> i & 1;
                data[i] = (here ? desk.to.data : direct.data) + i * SLOT;
                mrs[i] = here ? desk.to_mr : direct_mr;
                asked[i] = (size_t)(i == 2 ? 0 : SLOT - i);
                tags[i] = i;
                reads |= !here && asked[i];
                pattern_fill(desk.from.data + i * SLOT, asked[i], copied << 8 | (unsigned)i);
            }
            void *receive = irecv_group(&desk.net, desk.pair.recv, n, data, asked, tags, mrs);
            for (int i = n - 1; i >= 0; i--)
                sends[i] = isend(&desk.net, desk.pair.send, desk.from.data + i * SLOT, asked[i], tags[i], desk.from_mr);
            wait_done(&desk.net, receive, got);
            struct rnic_counts before = rnic_counts();
            CHECK_OK(net_iflush(&desk.net, desk.pair.recv, n, data, got, mrs, &request));
            if (reads) {
                CHECK(request != NULL && request != GARBAGE);
                wait_done(&desk.net, request, NULL);
            } else {
                CHECK_PTR(request, NULL);
            }
            CHECK_EQ(rnic_counts().reads - before.reads, reads);
            for (int i = 0; i < n; i++) {
                CHECK_EQ(wait_size(&desk.net, sends[i]), asked[i]);
                CHECK_EQ(pattern_mismatch(data[i], asked[i], copied << 8 | (unsigned)i), -1);
            }
        }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, direct_mr));
    held_free(&direct);
    desk_close(&desk);
}

const struct ffi_case ffi_cases[] = {
    EACH(thirty_two_of_one_buffer),
    EACH(mixed_with_direct_ones),
    EACH(mixed_with_direct_ones_on_4_qps),
    EACH(no_room_for_the_second),
    EACH(more_groups_than_room),
    EACH(longer_than_all_chunks),
    EACH(longer_than_all_chunks_into_copies),
    EACH(stream_from_copies),
    EACH(stream_into_copies),
    EACH(stream_between_copies),
    EACH(marker_means_nothing_here),
    EACH(flush_reads_no_copies),
    {0},
};
