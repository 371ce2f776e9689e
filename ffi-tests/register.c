/*
 * Registration: any address and length, overlapping and repeated ranges, from another thread than the data path, and
 * what must be refused. NCCL's bootstrap registers pieces of its stack and heap; its service thread registers user
 * buffers while the progress thread runs.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pair.h"
#include "softrnic.h"

/* One message between two places, through registrations that exist already. */
static void move(const struct pair *pair, void *from, void *from_mr, void *to, void *to_mr, size_t size, uint64_t key)
{
    pattern_fill(from, size, key);
    void *receive = irecv(pair->net, pair->recv, to, size, 0, to_mr);
    void *send = isend(pair->net, pair->send, from, size, 0, from_mr);
    CHECK_EQ(wait_size(pair->net, send), size);
    CHECK_EQ(wait_size(pair->net, receive), size);
    CHECK_EQ(pattern_mismatch(to, size, key), -1);
}

static void stack_and_heap(int version)
{
    struct net net;
    struct pair pair;
    uint8_t on_stack[600];
    uint8_t *on_heap = malloc(600);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    for (size_t offset = 0; offset < 70; offset += 3)
        for (size_t size = 1; size < 500; size += 61) {
            memset(on_stack, 0xC3, sizeof on_stack);
            void *from_mr = register_host(&net, pair.send, on_heap + offset, size);
            void *to_mr = register_host(&net, pair.recv, on_stack + offset, size);
            move(&pair, on_heap + offset, from_mr, on_stack + offset, to_mr, size, offset * 1000 + size);
            for (size_t i = 0; i < sizeof on_stack; i++)
                if ((i < offset || i >= offset + size) && on_stack[i] != 0xC3) FAIL("stack byte %zu was written", i);
            CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
            CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        }
    free(on_heap);
    pair_close(&pair);
    net_stop(&net);
}

/* A handle serves any part of its range. */
static void part_of_a_range(int version)
{
    struct net net;
    struct pair pair;
    enum { SIZE = 1 << 18 };
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new(SIZE, 0), to = guarded_new(SIZE, 0);
    void *from_mr = register_host(&net, pair.send, from.data, SIZE);
    void *to_mr = register_host(&net, pair.recv, to.data, SIZE);
    for (size_t offset = 0; offset < SIZE; offset += 4093) {
        size_t size = SIZE - offset < 3000 ? SIZE - offset : 3000;
        move(&pair, from.data + offset, from_mr, to.data + offset, to_mr, size, offset);
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

/* Ranges that overlap in every way; each handle stays good until its own deregistration. */
static void overlapping_ranges(int version)
{
    enum { COUNT = 40, PAGE = 4096 };
    struct net net;
    struct pair pair;
    void *from_mrs[COUNT], *to_mrs[COUNT];
    size_t offsets[COUNT], sizes[COUNT];
    int order[COUNT];
    uint64_t random = 40;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct rnic_counts before = rnic_counts();
    struct guarded from = guarded_new(16 * PAGE, 0), to = guarded_new(16 * PAGE, 0);
    for (int i = 0; i < COUNT; i++) {
        order[i] = i;
        offsets[i] = next_random(&random) % (14 * PAGE);
        sizes[i] = 1 + next_random(&random) % (16 * PAGE - offsets[i]);
        from_mrs[i] = register_host(&net, pair.send, from.data + offsets[i], sizes[i]);
        to_mrs[i] = register_host(&net, pair.recv, to.data + offsets[i], sizes[i]);
    }
    shuffle(order, COUNT, &random);
    for (int k = 0; k < COUNT; k++) {
        for (int rest = k; rest < COUNT; rest++) {
            int i = order[rest];
            move(&pair, from.data + offsets[i], from_mrs[i], to.data + offsets[i], to_mrs[i], sizes[i],
                 (uint64_t)(k * COUNT + i));
        }
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mrs[order[k]]));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mrs[order[k]]));
    }
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    pair_close(&pair);
    net_stop(&net);
}

static void same_range_again_and_again(int version)
{
    enum { COUNT = 300 };
    struct net net;
    struct pair pair;
    void *mrs[COUNT];
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct rnic_counts before = rnic_counts();
    struct guarded from = guarded_new(4096, 0), to = guarded_new(4096, 0);
    void *from_mr = register_host(&net, pair.send, from.data, 4096);
    for (int i = 0; i < COUNT; i++) mrs[i] = register_host(&net, pair.recv, to.data, 4096);
    for (int i = 0; i < COUNT; i++) {
        move(&pair, from.data, from_mr, to.data, mrs[i], 4096, (uint64_t)i);
        CHECK_OK(net_dereg_mr(&net, pair.recv, mrs[i]));
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    pair_close(&pair);
    net_stop(&net);
}

/* Memory that went away and came back at the same address must not be served by the old registration. */
static void unmapped_and_mapped_again(int version)
{
    enum { SIZE = 65536 };
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new(SIZE, 0);
    void *from_mr = register_host(&net, pair.send, from.data, SIZE), *place = NULL;
    for (int i = 0; i < 50; i++) {
        place = mmap(place, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (place ? MAP_FIXED : 0), -1, 0);
        CHECK(place != MAP_FAILED);
        void *mr = register_host(&net, pair.recv, place, SIZE);
        move(&pair, from.data, from_mr, place, mr, SIZE, (uint64_t)i);
        CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
        CHECK_EQ(munmap(place, SIZE), 0);
    }
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    pair_close(&pair);
    net_stop(&net);
}

static void nothing_to_deregister(int version)
{
    struct net net;
    struct pair pair;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    CHECK_OK(net_dereg_mr(&net, pair.send, NULL));
    CHECK_OK(net_dereg_mr(&net, pair.recv, NULL));
    pair_message(&pair, 100, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

static void refused_registrations(int version)
{
    struct net net;
    struct pair pair;
    static const int types[] = {0, 3, 8, -1, 1 << 20};
    uint8_t byte[64];
    void *mr = GARBAGE;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    uint8_t *hole = mmap(NULL, 8 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK_EQ(munmap(hole + 4 * 4096, 4096), 0);
    size_t mark = log_mark();
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, hole, 8 * 4096, NCCL_PTR_HOST, &mr)); /* a hole in the middle */
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, hole + 4 * 4096, 1, NCCL_PTR_HOST, &mr));
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, NULL, 64, NCCL_PTR_HOST, &mr));
    CHECK_REFUSED(net_reg_mr(&net, pair.recv, byte, sizeof byte, NCCL_PTR_HOST, NULL));
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        CHECK_REFUSED(net_reg_mr(&net, pair.recv, byte, sizeof byte, types[i], &mr));
    if (version >= 8) /* the end of the range lies beyond the address space */
        CHECK_REFUSED(net_reg_mr(&net, pair.recv, byte, SIZE_MAX - 100, NCCL_PTR_HOST, &mr));
    void *good = register_host(&net, pair.recv, hole, 4 * 4096); /* what is in front of the hole is fine */
    CHECK_OK(net_dereg_mr(&net, pair.recv, good));
    pair_message(&pair, 100, 0, 1); /* and a refused registration spoils nothing */
    pair_close(&pair);
    net_stop(&net);
}

/* The device has no room for one more: the reason is told, the communicator lives on. */
static void device_refuses(int version)
{
    struct net net;
    struct pair pair;
    enum { MOST = 4096 };
    void *mrs[MOST];
    int count = 0;
    setenv("SOFTRNIC_MR_LIMIT", "100", 1);
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded memory = guarded_new((size_t)MOST * 4096, 0);
    ncclResult_t result = ncclSuccess;
    size_t mark = log_mark();
    while (count < MOST) {
        mrs[count] = GARBAGE;
        result = net_reg_mr(&net, pair.recv, memory.data + (size_t)count * 4096, 100, NCCL_PTR_HOST, &mrs[count]);
        if (result != ncclSuccess) break;
        count++;
    }
    if (count == MOST) FAIL("%d registrations on a device that allows 100", count);
    CHECK(ffi_is_error(result));
    CHECK_EQ(log_warnings_since(mark), 1);
    while (count > 0) CHECK_OK(net_dereg_mr(&net, pair.recv, mrs[--count]));
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- two threads --------------------------------------------------------------------------------------------- */

struct clerk {
    const struct pair *pair;
    struct guarded memory;
    atomic_bool go_on;
    int registrations;
};

/* The service thread: registers and deregisters on both communicators while the other thread moves data. */
static void *clerk_work(void *argument)
{
    struct clerk *clerk = argument;
    const struct pair *pair = clerk->pair;
    uint64_t random = 77;
    while (clerk->registrations < 1000 || atomic_load(&clerk->go_on)) {
        void *mrs[8], *comms[8];
        for (int i = 0; i < 8; i++) {
            size_t offset = next_random(&random) % (clerk->memory.size - 1);
            size_t size = 1 + next_random(&random) % (clerk->memory.size - offset);
            comms[i] = i % 2 ? pair->send : pair->recv;
            mrs[i] = register_host_(pair->net, comms[i], clerk->memory.data + offset, size);
        }
        for (int i = 0; i < 8; i++) CHECK_OK(net_dereg_mr(pair->net, comms[(i * 3) % 8], mrs[(i * 3) % 8]));
        clerk->registrations += 8;
    }
    return NULL;
}

static void during_traffic(int version)
{
    struct net net;
    struct pair pair;
    pthread_t thread;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded from = guarded_new(20000, 0), to = guarded_new(20000, 0);
    struct clerk clerk = {.pair = &pair, .memory = guarded_new(1 << 18, 0), .go_on = true};
    void *from_mr = register_host(&net, pair.send, from.data, from.size);
    void *to_mr = register_host(&net, pair.recv, to.data, to.size);
    CHECK_EQ(pthread_create(&thread, NULL, clerk_work, &clerk), 0);
    for (int i = 0; i < 3000; i++) move(&pair, from.data, from_mr, to.data, to_mr, (size_t)(i * 7) % 20000, (uint64_t)i);
    atomic_store(&clerk.go_on, false);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(clerk.registrations >= 1000);
    CHECK_BUFFER(&clerk.memory, 0, 0);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    pair_close(&pair);
    net_stop(&net);
}

/* The clerk registers the very ranges that the traffic uses: cached registrations come and go under it. */
static void same_ranges_during_traffic(int version)
{
    struct net net;
    struct pair pair;
    pthread_t thread;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct guarded both = guarded_new(40000, 0);
    struct clerk clerk = {.pair = &pair, .memory = both, .go_on = true};
    CHECK_EQ(pthread_create(&thread, NULL, clerk_work, &clerk), 0);
    for (int i = 0; i < 1500; i++) {
        void *from_mr = register_host(&net, pair.send, both.data, 20000);
        void *to_mr = register_host(&net, pair.recv, both.data + 20000, 20000);
        move(&pair, both.data, from_mr, both.data + 20000, to_mr, (size_t)(i * 13) % 20000, (uint64_t)i);
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
    }
    atomic_store(&clerk.go_on, false);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- one that takes long --------------------------------------------------------------------------------------- */

struct slow {
    const struct net *net;
    void *comm, *mr;
    struct guarded memory;
};

static void *register_slowly(void *argument)
{
    struct slow *slow = argument;
    slow->mr = register_host_(slow->net, slow->comm, slow->memory.data, slow->memory.size);
    return NULL;
}

/*
 * A registration that the device does not answer holds up nobody: others of the same device, even of the same range, are
 * made and end meanwhile, and so do connections. The stock transport holds the device's lock during the verb.
 */
static void while_another_waits(int version)
{
    struct net net;
    struct pair pair, late;
    pthread_t thread;
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    struct rnic_counts before = rnic_counts();
    struct guarded from = guarded_new(10000, 0), to = guarded_new(10000, 0);
    struct slow slow = {.net = &net, .comm = pair.recv, .memory = guarded_new(70000, 0)};
    rnic_pause_registration(true);
    CHECK_EQ(pthread_create(&thread, NULL, register_slowly, &slow), 0);
    WAIT_UNTIL(rnic_registration_paused(), "a registration to wait in the verb");
    for (int i = 0; i < 20; i++) {
        struct net_properties properties;
        void *from_mr = register_host(&net, pair.send, from.data, from.size);
        void *to_mr = register_host(&net, pair.recv, to.data, to.size);
        void *same_mr = register_host(&net, pair.recv, slow.memory.data, slow.memory.size);
        move(&pair, from.data, from_mr, to.data, to_mr, 5000, (uint64_t)i);
        move(&pair, from.data, from_mr, slow.memory.data, same_mr, 5000, (uint64_t)i);
        CHECK_OK(net_get_properties(&net, 0, &properties));
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, same_mr));
    }
    pair_open(&net, 0, &late);
    pair_message(&late, 1000, 0, 1);
    pair_close(&late);
    CHECK(rnic_registration_paused());
    /* Of two registrations of one range, one of which came later, one is kept. */
    void *same_mr = register_host(&net, pair.recv, slow.memory.data, slow.memory.size);
    rnic_pause_registration(false);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(rnic_counts().mrs - before.mrs, 1);
    CHECK_OK(net_dereg_mr(&net, pair.recv, same_mr));
    void *from_mr = register_host(&net, pair.send, from.data, from.size);
    move(&pair, from.data, from_mr, slow.memory.data, slow.mr, 5000, 99);
    CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
    CHECK_OK(net_dereg_mr(&net, pair.recv, slow.mr));
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(stack_and_heap),
    EACH(part_of_a_range),
    EACH(overlapping_ranges),
    EACH(same_range_again_and_again),
    EACH(unmapped_and_mapped_again),
    EACH(nothing_to_deregister),
    EACH(refused_registrations),
    EACH(device_refuses),
    EACH(during_traffic),
    EACH(same_ranges_during_traffic),
    EACH(while_another_waits),
    {0},
};
