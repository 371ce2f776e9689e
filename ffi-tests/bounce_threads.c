/*
 * Buffers that are reached through copies on several threads: NCCL's service thread registers more of them while its
 * progress thread moves data, and every communicator has threads of its own.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "held.h"

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
    const struct net *net = clerk->pair->net;
    uint64_t random = 77;
    while (clerk->registrations < 96 || atomic_load(&clerk->go_on)) {
        void *mrs[8], *comms[8];
        for (int i = 0; i < 8; i++) {
            size_t offset = next_random(&random) % (clerk->memory.size - 1);
            size_t size = 1 + next_random(&random) % (clerk->memory.size - offset);
            comms[i] = i % 2 ? clerk->pair->send : clerk->pair->recv;
            mrs[i] = register_host_(net, comms[i], clerk->memory.data + offset, size);
        }
        for (int i = 0; i < 8; i++) CHECK_OK(net_dereg_mr(net, comms[(i * 3) % 8], mrs[(i * 3) % 8]));
        clerk->registrations += 8;
    }
    return NULL;
}

static void registrations_during_traffic(int version)
{
    enum { SIZE = 200000 };
    struct desk desk;
    pthread_t thread;
    desk_open(&desk, version, BOTH, SIZE);
    struct clerk clerk = {.pair = &desk.pair, .memory = held_new(1 << 20, 0, true), .go_on = true};
    CHECK_EQ(pthread_create(&thread, NULL, clerk_work, &clerk), 0);
    for (int i = 0; i < 200; i++) {
        held_message(&desk.pair, &desk.from, desk.from_mr, (size_t)(i * 7919) % SIZE, &desk.to, desk.to_mr, SIZE, (uint64_t)i);
        if (i % 10) continue;
        CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
        CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
        desk.from_mr = register_bounced(&desk.net, desk.pair.send, &desk.from);
        desk.to_mr = register_bounced(&desk.net, desk.pair.recv, &desk.to);
    }
    atomic_store(&clerk.go_on, false);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(!is_registered(&clerk.memory));
    CHECK_BUFFER(&clerk.memory, 0, 0);
    held_free(&clerk.memory);
    desk_close(&desk);
}

/* ---- threads with a connection each -------------------------------------------------------------------------- */

enum { THREADS = 4 };

struct worker {
    const struct net *net;
    size_t size;
};

/* What all threads copy through is borrowed and given back the whole time. */
static void *work(void *argument)
{
    const struct worker *worker = argument;
    for (size_t round = 0; round < 8; round++) {
        struct desk desk = {.net = *worker->net};
        desk_lay(&desk, BOTH, worker->size, worker->size);
        for (size_t i = 0; i < 4; i++)
            held_message(&desk.pair, &desk.from, desk.from_mr, worker->size - i, &desk.to, desk.to_mr, worker->size, round * 4 + i);
        desk_clear(&desk);
    }
    return NULL;
}

static void pairs_of_their_own(int version)
{
    struct net net;
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    held_start(&net, version);
    work(&(struct worker){.net = &net, .size = 1000}); /* device-wide objects may stay for the next connection */
    struct rnic_counts before = rnic_counts();
    for (size_t t = 0; t < THREADS; t++) {
        workers[t] = (struct worker){.net = &net, .size = 150000 * (t + 1)};
        CHECK_EQ(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
    }
    for (int t = 0; t < THREADS; t++) CHECK_EQ(pthread_join(threads[t], NULL), 0);
    CHECK_EQ(rnic_counts().mrs, before.mrs);
    CHECK_EQ(rnic_counts().qps, before.qps);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(registrations_during_traffic),
    EACH(pairs_of_their_own),
    {0},
};
