/*
 * Load, use, unload, twenty times in one process. NCCL closes the library when its last communicator goes and opens it
 * again for the next: no thread, descriptor, mapping or object of the device may be left.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "pair.h"
#include "softrnic.h"

enum { TIMES = 20 };

static void twenty_times(int version)
{
    rnic_keep();
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        struct pair pair;
        net_start(&net, version);
        pair_open(&net, 0, &pair);
        pair_message(&pair, 10000, 0, (uint64_t)i);
        pair_close(&pair);
        net_stop(&net);
        expect_gone(before);
    }
}

static void twenty_times_with_4_qps_and_8_pairs(int version)
{
    rnic_keep();
    struct census before = census_take();
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    for (int i = 0; i < TIMES; i++) {
        enum { PAIRS = 8 };
        struct net net;
        struct pair pairs[PAIRS];
        net_start(&net, version);
        for (int p = 0; p < PAIRS; p++) pair_open(&net, 0, &pairs[p]);
        for (int p = 0; p < PAIRS; p++) pair_message(&pairs[p], 5000, p, (uint64_t)p);
        for (int p = 0; p < PAIRS; p++) pair_close(&pairs[(p * 3) % PAIRS]);
        net_stop(&net);
        expect_gone(before);
    }
}

static void twenty_times_init_only(int version)
{
    rnic_keep();
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        net_start(&net, version);
        net_stop(&net);
        expect_gone(before);
    }
}

static void twenty_times_load_only(int version)
{
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        net_load(&net, version);
        net_unload(&net);
        CHECK(!is_mapped("libnccl-net-pinrail"));
    }
    CHECK_EQ(census_take().descriptors, before.descriptors);
}

/* v6 to v10 have no finalize: with the last communicator and listener closed, the library must be at rest. */
static void at_rest_before_dlclose(int version)
{
    struct net net;
    struct pair pair;
    rnic_keep();
    struct census before = census_take();
    net_start(&net, version);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    CHECK_OK(net_finalize(&net, net.context));
    struct deadline deadline = deadline_in(10);
    while (census_take().threads != before.threads && !deadline_passed(&deadline)) ffi_yield();
    CHECK_EQ(census_take().threads, before.threads);
    net_unload(&net);
    expect_gone(before);
}

static void init_again_without_unloading(int version)
{
    struct net net;
    rnic_keep();
    struct census before = census_take();
    net_load(&net, version);
    for (int i = 0; i < TIMES; i++) {
        struct pair pair;
        int ndev = -1;
        CHECK_OK(net_init(&net, (uint64_t)i, ffi_logger));
        CHECK_OK(net_devices(&net, &ndev));
        CHECK(ndev >= 1);
        pair_open(&net, 0, &pair);
        pair_message(&pair, 1000, 0, (uint64_t)i);
        pair_close(&pair);
        CHECK_OK(net_finalize(&net, net.context));
        if (version >= 11) expect_clean(before);
    }
    net_unload(&net);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

/* Two communicators' contexts: the first finalize takes nothing from the second. */
static void finalize_of_another_context(int version)
{
    struct net net;
    struct pair pair;
    void *other = NULL;
    rnic_keep();
    net_start(&net, version);
    CHECK_OK(net_init_context(&net, 2, ffi_logger, &other));
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    CHECK_OK(net_finalize(&net, other));
    pair_message(&pair, 1000, 0, 2);
    pair_close(&pair);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 3);
    pair_close(&pair);
    net_stop(&net);
    CHECK(!is_mapped("libnccl-net-pinrail"));
}

/* ---- a thread that outlives the library ---------------------------------------------------------------------- */

struct outliver {
    struct pair *pair;
    sem_t worked, unloaded;
};

static void *outliver_work(void *argument)
{
    struct outliver *outliver = argument;
    for (int i = 0; i < 10; i++) pair_message(outliver->pair, 1000, i, (uint64_t)i);
    struct pair own; /* connects and closes here, so that whatever is kept per thread is kept for this one */
    pair_open(outliver->pair->net, 0, &own);
    pair_message(&own, 1000, 0, 1);
    pair_close(&own);
    sem_post(&outliver->worked);
    while (sem_wait(&outliver->unloaded) != 0) continue;
    return NULL; /* a destructor that points into the library would run now */
}

static void thread_outlives_the_library(int version)
{
    for (int i = 0; i < 5; i++) {
        struct net net;
        struct pair pair;
        struct outliver outliver = {.pair = &pair};
        pthread_t thread;
        net_start(&net, version);
        pair_open(&net, 0, &pair);
        CHECK_EQ(sem_init(&outliver.worked, 0, 0), 0);
        CHECK_EQ(sem_init(&outliver.unloaded, 0, 0), 0);
        CHECK_EQ(pthread_create(&thread, NULL, outliver_work, &outliver), 0);
        while (sem_wait(&outliver.worked) != 0) continue;
        pair_close(&pair);
        net_stop(&net);
        if (is_mapped("libnccl-net-pinrail")) FAIL("a thread that once called the library keeps it mapped");
        sem_post(&outliver.unloaded);
        CHECK_EQ(pthread_join(thread, NULL), 0);
    }
}

/* Failures on the way leave nothing either. */
static void after_failures(int version)
{
    rnic_keep();
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        struct pair pair;
        char handle[NCCL_NET_HANDLE_MAXSIZE] = {0}, memory[100];
        void *comm = NULL, *mr, *request;
        net_start(&net, version);
        CHECK_REFUSED(net_connect(&net, 0, handle, &comm));
        pair_open(&net, 0, &pair);
        mr = register_host(&net, pair.recv, memory, sizeof memory);
        request = irecv(&net, pair.recv, memory, sizeof memory, 0, mr);
        CHECK_OK(net_close_send(&net, pair.send));
        wait_error(&net, request);
        CHECK_OK(net_dereg_mr(&net, pair.recv, mr));
        CHECK_OK(net_close_recv(&net, pair.recv));
        net_stop(&net);
        expect_gone(before);
    }
}

/* Work still on the device when everything is closed and unloaded. */
static void with_work_in_flight(int version)
{
    rnic_keep();
    struct census before = census_take();
    for (int i = 0; i < TIMES; i++) {
        struct net net;
        struct pair pair;
        net_start(&net, version);
        pair_open(&net, 0, &pair);
        struct guarded from = guarded_new(1000, 0), to = guarded_new(1000, 0);
        void *from_mr = register_host(&net, pair.send, from.data, 1000);
        void *to_mr = register_host(&net, pair.recv, to.data, 1000);
        irecv(&net, pair.recv, to.data, 1000, 0, to_mr);
        rnic_hold(true);
        isend(&net, pair.send, from.data, 1000, 0, from_mr);
        CHECK_OK(net_dereg_mr(&net, pair.send, from_mr));
        CHECK_OK(net_dereg_mr(&net, pair.recv, to_mr));
        if (i % 2) CHECK_OK(net_close_recv(&net, pair.recv));
        CHECK_OK(net_close_send(&net, pair.send));
        if (i % 2 == 0) CHECK_OK(net_close_recv(&net, pair.recv));
        net_stop(&net);
        rnic_hold(false);
        rnic_release(UINT64_MAX);
        CHECK_BUFFER(&to, 0, 0);
        guarded_free(&from);
        guarded_free(&to);
        expect_gone(before);
    }
}

/* The application unloads the library with connections open. They are lost to it, but nothing may run where nothing is. */
static void with_connections_open(int version)
{
    struct net nets[5];
    for (int i = 0; i < 5; i++) {
        struct pair pair;
        net_start(&nets[i], version);
        pair_open(&nets[i], 0, &pair);
        if (i % 2) pair_message(&pair, 1000, 0, 1);
        CHECK_EQ(dlclose(nets[i].library), 0);
        for (int k = 0; k < 100; k++) ffi_yield();
    }
}

const struct ffi_case ffi_cases[] = {
    EACH(twenty_times),
    EACH(twenty_times_with_4_qps_and_8_pairs),
    EACH(twenty_times_init_only),
    EACH(twenty_times_load_only),
    EACH(at_rest_before_dlclose),
    EACH(init_again_without_unloading),
    EACH(finalize_of_another_context),
    EACH(thread_outlives_the_library),
    EACH(after_failures),
    EACH(with_work_in_flight),
    EACH(with_connections_open),
    {0},
};
