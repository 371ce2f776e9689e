/*
 * Many communicators: 64 pairs in one process, and several threads, each the master of its own communicators while
 * others connect and close, as the service and progress threads of several NCCL communicators do.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"
#include "softrnic.h"

enum { PAIRS = 64 };

static void sixty_four_pairs(int version)
{
    struct net net;
    struct pair pairs[PAIRS];
    struct guarded buffers[PAIRS][2];
    void *mrs[PAIRS][2], *requests[PAIRS][2];
    net_start(&net, version);
    pair_open(&net, 0, &pairs[0]);
    struct census one = census_take();
    for (int i = 1; i < PAIRS; i++) pair_open(&net, 0, &pairs[i]);
    CHECK_EQ(census_take().threads, one.threads); /* the number of threads does not grow with the connections */
    for (int i = 0; i < PAIRS; i++)
        for (int side = 0; side < 2; side++) {
            buffers[i][side] = guarded_new(4096, (size_t)i);
            mrs[i][side] = register_host(&net, side ? pairs[i].recv : pairs[i].send, buffers[i][side].data, 4096);
        }
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < PAIRS; i++) {
            guarded_reset(&buffers[i][1]);
            pattern_fill(buffers[i][0].data, 4096, (uint64_t)(round * PAIRS + i));
            requests[i][1] = irecv(&net, pairs[i].recv, buffers[i][1].data, 4096, i, mrs[i][1]);
        }
        for (int i = PAIRS - 1; i >= 0; i--)
            requests[i][0] = isend(&net, pairs[i].send, buffers[i][0].data, 4096, i, mrs[i][0]);
        for (int i = 0; i < PAIRS; i++) {
            int k = (i * 29 + round) % PAIRS;
            CHECK_EQ(wait_size(&net, requests[k][1]), 4096);
            CHECK_EQ(wait_size(&net, requests[k][0]), 4096);
            CHECK_BUFFER(&buffers[k][1], 4096, (uint64_t)(round * PAIRS + k));
        }
    }
    for (int i = 0; i < PAIRS; i++) {
        CHECK_OK(net_dereg_mr(&net, pairs[i].send, mrs[i][0]));
        CHECK_OK(net_dereg_mr(&net, pairs[i].recv, mrs[i][1]));
    }
    for (int i = 0; i < PAIRS; i++) pair_close(&pairs[(i * 11) % PAIRS]);
    net_stop(&net);
}

/* ---- threads ------------------------------------------------------------------------------------------------- */

struct worker {
    struct net *net;
    struct pair pair;
    uint64_t key;
    int messages;
};

static void *worker_traffic(void *argument)
{
    struct worker *worker = argument;
    const struct pair *pair = &worker->pair;
    struct guarded from = guarded_new(8192, 0), to = guarded_new(8192, 0);
    void *from_mr = register_host_(worker->net, pair->send, from.data, 8192);
    void *to_mr = register_host_(worker->net, pair->recv, to.data, 8192);
    for (int m = 0; m < worker->messages; m++) {
        size_t size = (size_t)(m * 13) % 8192;
        uint64_t key = worker->key << 32 | (unsigned)m;
        guarded_reset(&to);
        pattern_fill(from.data, size, key);
        void *receive = irecv_(worker->net, pair->recv, to.data, size, m, to_mr);
        void *send = isend_(worker->net, pair->send, from.data, size, m, from_mr);
        CHECK_EQ(wait_size_(worker->net, send), size);
        CHECK_EQ(wait_size_(worker->net, receive), size);
        CHECK_BUFFER(&to, size, key);
    }
    CHECK_OK(net_dereg_mr(worker->net, pair->send, from_mr));
    CHECK_OK(net_dereg_mr(worker->net, pair->recv, to_mr));
    guarded_free(&from);
    guarded_free(&to);
    return NULL;
}

static void *worker_connections(void *argument)
{
    struct worker *worker = argument;
    for (int i = 0; i < 40; i++) {
        pair_open_(worker->net, 0, &worker->pair);
        pair_message_(&worker->pair, 3000, i, worker->key + (uint64_t)i);
        pair_close_(&worker->pair);
    }
    return NULL;
}

static void threads_with_their_own_pairs(int version)
{
    enum { THREADS = 4 };
    struct net net;
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    net_start(&net, version);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.net = &net, .key = (uint64_t)i, .messages = 1500};
        pair_open(&net, 0, &workers[i].pair);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, worker_traffic, &workers[i]), 0);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < THREADS; i++) pair_close(&workers[i].pair);
    net_stop(&net);
}

static void connections_come_and_go_beside_traffic(int version)
{
    enum { THREADS = 4 };
    struct net net;
    struct worker workers[THREADS];
    pthread_t threads[THREADS];
    net_start(&net, version);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.net = &net, .key = 100 + (uint64_t)i, .messages = 2000};
        if (i % 2) pair_open(&net, 0, &workers[i].pair);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, i % 2 ? worker_traffic : worker_connections, &workers[i]), 0);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    for (int i = 1; i < THREADS; i += 2) pair_close(&workers[i].pair);
    net_stop(&net);
}

/* The two ends of one connection on two threads, as two ranks in one process have them. */
struct end {
    struct pair *pair;
    int messages;
};

static void *sending_end(void *argument)
{
    struct end *end = argument;
    const struct net *net = end->pair->net;
    struct guarded from = guarded_new(4096, 0);
    void *mr = register_host_(net, end->pair->send, from.data, 4096);
    for (int m = 0; m < end->messages; m++) {
        pattern_fill(from.data, 4096, (uint64_t)m);
        CHECK_EQ(wait_size_(net, isend_(net, end->pair->send, from.data, (size_t)m % 4096, 0, mr)), m % 4096);
    }
    CHECK_OK(net_dereg_mr(net, end->pair->send, mr));
    return NULL;
}

static void *receiving_end(void *argument)
{
    struct end *end = argument;
    const struct net *net = end->pair->net;
    struct guarded to = guarded_new(4096, 0);
    void *mr = register_host_(net, end->pair->recv, to.data, 4096);
    for (int m = 0; m < end->messages; m++) {
        guarded_reset(&to);
        CHECK_EQ(wait_size_(net, irecv_(net, end->pair->recv, to.data, 4096, 0, mr)), m % 4096);
        CHECK_BUFFER(&to, (size_t)m % 4096, (uint64_t)m);
    }
    CHECK_OK(net_dereg_mr(net, end->pair->recv, mr));
    return NULL;
}

static void two_ends_on_two_threads(int version)
{
    struct net net;
    struct pair pair;
    struct end end = {.pair = &pair, .messages = 5000};
    pthread_t threads[2];
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    CHECK_EQ(pthread_create(&threads[0], NULL, sending_end, &end), 0);
    CHECK_EQ(pthread_create(&threads[1], NULL, receiving_end, &end), 0);
    for (int i = 0; i < 2; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(sixty_four_pairs),
    EACH(threads_with_their_own_pairs),
    EACH(connections_come_and_go_beside_traffic),
    EACH(two_ends_on_two_threads),
    {0},
};
