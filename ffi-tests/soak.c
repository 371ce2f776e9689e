/*
 * The soak: connections under traffic and faults by chance on the stepped engine, both ends of each in this process.
 *
 * A seed is a number of hosts, each a process with settings of its own; a host lives through days. A day begins with a
 * fresh device, a fault plan and some connections, and ends with all of it gone. Every byte, every size and every
 * completion is checked, and at the end of a day that nothing is left. What is drawn for a day follows from the seed and
 * the numbers of host and day, so that a day that fails can be had again alone; what failed says how.
 *
 *     SOAK_SEEDS=1..20 SOAK_MESSAGES=100000 target/ffi-tests/soak seeds
 *     SOAK_SEEDS=7 SOAK_HOST=3 SOAK_DAY=12 target/ffi-tests/soak seeds
 *
 * SOAK_SEEDS is a seed or a range, SOAK_MESSAGES how many messages of each seed have to arrive, SOAK_LOG=1 prints what the
 * plugin logs as it comes.
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "mill.h"
#include "quiet.h"

enum { HOSTS = 8, MILLS = 4, DEVICES = 3, LINES = 60, NOBODY = -1 };

/* What came of a seed, in memory that all its hosts share. */
struct tally {
    uint64_t days, messages, bytes, flushed, connections, failed, refused, abandoned, spared, faults, hash;
};

struct host {
    uint64_t seed, messages; /* to arrive on this host */
    int number, only_day;    /* NOBODY: all days */
    bool alone;              /* rails do not stand in for each other */
    struct tally *tally;
};

/* ---- for when it fails --------------------------------------------------------------------------------------- */

static struct {
    uint64_t seed;
    int host, day;
    char settings[1000], plan[2000];
} now;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_lines[LINES][600];
static unsigned log_next;

/* Keeps the last lines: there are too many to print. */
static void keep_line(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    va_list args;
    (void)level, (void)flags, (void)file, (void)line;
    pthread_mutex_lock(&log_lock);
    va_start(args, fmt);
    vsnprintf(log_lines[log_next % LINES], sizeof log_lines[0], fmt, args);
    va_end(args);
    if (getenv("SOAK_LOG")) fprintf(stderr, "  %s\n", log_lines[log_next % LINES]);
    log_next++;
    pthread_mutex_unlock(&log_lock);
}

static void last_words(void)
{
    fprintf(stderr, "the last events of the device:\n");
    rnic_trace_print(200);
    fprintf(stderr, "the last lines of the plugin:\n");
    for (unsigned i = log_next > LINES ? log_next - LINES : 0; i < log_next; i++) fprintf(stderr, "  %s\n", log_lines[i % LINES]);
    fprintf(stderr, "settings: %s\nthe plan:\n%s", now.settings, now.plan);
    fprintf(stderr, "again: SOAK_SEEDS=%llu SOAK_HOST=%d SOAK_DAY=%d target/ffi-tests/soak seeds\n",
            (unsigned long long)now.seed, now.host, now.day);
}

/* ---- the device ---------------------------------------------------------------------------------------------- */

static void *entry(const char *name)
{
    static void *library;
    if (!library) library = dlopen(softrnic_path(), RTLD_NOW | RTLD_LOCAL);
    void *address = library ? dlsym(library, name) : NULL;
    if (!address) FAIL("%s has no %s", softrnic_path(), name);
    return address;
}

static uint64_t steps(uint64_t n)
{
    static uint64_t (*step)(uint64_t);
    if (!step) step = (uint64_t(*)(uint64_t))entry("softrnic_step");
    return step(n);
}

/* Until nothing can happen any more: all limits have passed, and what waits waits for ever. */
static void run_dry(void)
{
    enum { CALM = 300 };
    for (int calm = 0; calm < CALM;) calm = steps(1) ? 0 : calm + 1;
}

/* Every device, held open over a day, so that its ports can be taken up and its plan be read whatever was closed. */
static void hold_devices(struct ibv_context *held[DEVICES], int count)
{
    typedef struct ibv_device **list(int *);
    int found = 0;
    struct ibv_device **devices = ((list *)entry("ibv_get_device_list"))(&found);
    CHECK(devices != NULL && found >= count);
    for (int i = 0; i < count; i++) {
        held[i] = ((struct ibv_context * (*)(struct ibv_device *)) entry("ibv_open_device"))(devices[i]);
        CHECK(held[i] != NULL);
    }
    ((void (*)(struct ibv_device **))entry("ibv_free_device_list"))(devices);
}

static void release_devices(struct ibv_context *held[DEVICES], int count)
{
    for (int i = 0; i < count; i++) CHECK_EQ(((int (*)(struct ibv_context *))entry("ibv_close_device"))(held[i]), 0);
}

/* ---- faults -------------------------------------------------------------------------------------------------- */

struct weather {
    unsigned dead, weak; /* devices that connections may die of; that a connection with other rails survives */
    bool registrations;  /* may fail on any device */
    uint64_t corrupted;  /* bytes, per firing of the rule */
    int corrupting, rules;
    uint64_t grave; /* rules that the plugin's thread hears of */
};

/* Must not be seen. */
static const char *const drizzle[] = {
    "p=0.02 -> delay=300us",
    "p=0.05 -> shuffle",
    "p=0.05 bytes=100.. -> shuffle=256",
    "p=0.02 -> behind=3 for=1ms",
    "every=%u -> delay=50us at=half",
    "every=%u side=remote -> delay=80us",
    "every=%u times=3 -> delay=2ms at=end",
    "nth=%u -> port-down for=1ms",
    "nth=%u -> gid=1/10.0.0.77",
};

/* A connection goes on over its other rails. */
static const char *const gusts[] = {
    "op=write-imm nth=%u -> drop",
    "op=write-imm nth=%u -> drop at=half",
    "op=write-imm nth=%u -> drop at=payload",
    "op=write-imm nth=%u -> drop at=end",
    "op=write-imm nth=%u -> status=retry-exc at=end",
    "op=write-imm nth=%u -> status=retry-exc at=half",
    "op=write-imm nth=%u -> status=wr-flush at=end",
    "op=write nth=%u -> drop",
    "op=write nth=%u -> drop at=end",
    "op=write nth=%u -> status=retry-exc at=payload",
    "op=write-imm nth=%u -> kill-qp at=end",
    "op=write,write-imm nth=%u -> kill-qp",
    "op=write,write-imm nth=%u -> port-down",
    "op=write-imm nth=%u -> port-down at=half",
};

/* Connections may end. */
static const char *const storms[] = {
    "nth=%u -> status=loc-len",
    "nth=%u -> status=loc-prot at=half",
    "nth=%u -> status=rem-access at=payload",
    "nth=%u -> status=rem-inv-req",
    "nth=%u -> status=rem-op at=end",
    "nth=%u -> status=rnr-retry-exc",
    "nth=%u -> status=fatal at=half",
    "nth=%u -> status=general vendor=0x99 at=end",
    "nth=%u -> cq-overrun",
    "nth=%u -> device-fatal",
    "nth=%u -> device-fatal at=half",
    "side=remote nth=%u -> status=loc-prot",
    "side=remote nth=%u -> status=general at=end",
    "side=remote nth=%u -> kill-qp",
    "side=remote nth=%u -> kill-qp at=payload",
    "side=remote nth=%u -> cq-overrun",
    "side=remote nth=%u -> drop",
    "op=read nth=%u -> kill-qp",
    "op=read nth=%u -> status=retry-exc",
    "after=5ms nth=%u -> port-down",
};

static const char *pick(const char *const *from, size_t count, uint64_t *random)
{
    return from[next_random(random) % count];
}
#define PICK(LIST, RANDOM) pick(LIST, sizeof(LIST) / sizeof *(LIST), RANDOM)

static int add_rule(char *plan, size_t room, int device, const char *rule, uint64_t *random)
{
    size_t used = strlen(plan);
    used += (size_t)snprintf(plan + used, room - used, "device=softrnic%d ", device);
    used += (size_t)snprintf(plan + used, room - used, rule, (unsigned)(next_random(random) % 300 + 1));
    snprintf(plan + used, room - used, "\n");
    return 1;
}

/* One day in four is calm; on others each device has drizzle, and maybe something worse. */
static struct weather draw_weather(char *plan, size_t room, int devices, uint64_t *random)
{
    struct weather weather = {.corrupting = NOBODY};
    snprintf(plan, room, "seed=%u\n", (unsigned)(next_random(random) % 100000));
    if (next_random(random) % 4 == 0) return weather;
    for (int d = 0; d < devices; d++) {
        for (uint64_t n = next_random(random) % 3; n; n--) weather.rules += add_rule(plan, room, d, PICK(drizzle, random), random);
        uint64_t worse = next_random(random) % 8;
        if (worse < 3) {
            weather.grave |= 1ull << weather.rules;
            weather.rules += add_rule(plan, room, d, PICK(gusts, random), random);
            weather.weak |= 1u << d;
        } else if (worse < 5) {
            weather.grave |= 1ull << weather.rules;
            weather.rules += add_rule(plan, room, d, PICK(storms, random), random);
            weather.dead |= 1u << d;
        } else if (worse == 5 && weather.corrupting == NOBODY) {
            /* What is longer than any credit and any record of sizes is payload. */
            weather.corrupting = weather.rules;
            weather.corrupted = 1 + next_random(random) % 50;
            size_t used = strlen(plan);
            snprintf(plan + used, room - used, "device=softrnic%d op=write,write-imm bytes=600.. nth=%u -> corrupt=%u\n", d,
                     (unsigned)(next_random(random) % 60 + 1), (unsigned)weather.corrupted);
            weather.rules++;
        }
    }
    if (next_random(random) % 8 == 0) {
        size_t used = strlen(plan);
        snprintf(plan + used, room - used, "op=reg-mr nth=%u -> fail=ENOMEM\n", (unsigned)(next_random(random) % 40 + 1));
        weather.rules++;
        weather.registrations = true;
    }
    return weather;
}

/* ---- a host -------------------------------------------------------------------------------------------------- */

struct traits {
    int version, devices, fused; /* fused: the device of all, or NOBODY */
    bool failover, flushes, held;
};

static void set(const char *name, const char *value)
{
    size_t used = strlen(now.settings);
    setenv(name, value, 1);
    snprintf(now.settings + used, sizeof now.settings - used, "%s=%s ", name, value);
}

static struct traits settle(const struct host *host)
{
    static const char *const counts[] = {"1", "1", "2", "4"}, *const devices[] = {"1", "2", "3"};
    static const char *const limits[] = {"2147483648", "2147483648", "65536", "4097"};
    static const char *const speeds[] = {"32", "32", "128,32,64", "32,64,128"};
    static const char *const engine_steps[] = {"0", "1", "2"};
    uint64_t random = host->seed * 1000 + (uint64_t)host->number;
    struct traits traits = {.version = FIRST_VERSION + (int)(next_random(&random) % 7), .fused = NOBODY};
    now.settings[0] = 0;
    set("SOFTRNIC_ENGINE", "stepped");
    set("SOFTRNIC_RETRY_MS", "5");
    traits.devices = (int)(next_random(&random) % 3) + 1;
    set("SOFTRNIC_DEVICES", devices[traits.devices - 1]);
    set("SOFTRNIC_SPEED", speeds[next_random(&random) % 4]);
    set("SOFTRNIC_MAX_MSG_SZ", limits[next_random(&random) % 4]);
    set("NCCL_IB_QPS_PER_CONNECTION", counts[next_random(&random) % 4]);
    set("NCCL_IB_SPLIT_DATA_ON_QPS", next_random(&random) % 2 ? "1" : "0");
    traits.failover = next_random(&random) % 3 != 0 && !host->alone;
    set("NCCL_IB_RESILIENCY_PORT_FAILOVER", traits.failover ? "1" : "0");
    /* Where rails fail the plugin's thread moves queue pairs, in the middle of a call that polls: only between calls may the
     * device do anything then, or two runs would not be the same. */
    uint64_t pace = next_random(&random) % 3;
    set("SOFTRNIC_STEPS", traits.failover ? "0" : engine_steps[pace]);
    if (next_random(&random) % 3 == 0) {
        set("NCCL_IB_ADAPTIVE_ROUTING", "1");
        set("NCCL_IB_AR_THRESHOLD", "3000");
    }
    if (next_random(&random) % 4 == 0) set("NCCL_IB_USE_INLINE", "0");
    traits.flushes = next_random(&random) % 3 == 0;
    if (traits.flushes) set("PINRAIL_FLUSH", "always");
    traits.held = next_random(&random) % 3 == 0;
    if (traits.held) set("SOFTRNIC_CMA", "all");
    return traits;
}

/* Whether faults of this day may end a connection over these devices. */
static bool may_fail(const struct weather *weather, const struct traits *traits, int dev)
{
    unsigned rails = dev == traits->fused ? (1u << traits->devices) - 1 : 1u << dev;
    if (rails & weather->dead) return true;
    if (!(rails & weather->weak)) return false;
    return !(dev == traits->fused && traits->failover && rails & ~weather->weak);
}

struct day {
    const struct host *host;
    const struct net *net;
    const struct traits *traits;
    struct weather weather;
    struct mill mills[MILLS];
    int devs[MILLS], count;
    bool stormy;
    uint64_t random;
};

static void open_mills(struct day *day)
{
    int wanted = 1 + (int)(next_random(&day->random) % MILLS);
    for (int i = 0; i < wanted; i++) {
        int dev = (int)(next_random(&day->random) % (uint64_t)day->traits->devices);
        if (day->traits->fused != NOBODY && next_random(&day->random) % 2) dev = day->traits->fused;
        struct mill_plan plan = {
            .dev = dev,
            .seed = next_random(&day->random),
            .batches = 20 + next_random(&day->random) % 300,
            .held = day->traits->held ? next_random(&day->random) % 4 : NEITHER,
            .flushes = day->traits->flushes,
        };
        bool open = mill_open(&day->mills[day->count], day->net, &plan);
        if (!open && !day->weather.registrations && !may_fail(&day->weather, day->traits, dev))
            FAIL("a connection over device %d was refused on a day without a reason", dev);
        day->host->tally->connections += open;
        day->host->tally->refused += !open;
        if (open) day->devs[day->count++] = dev;
    }
}

static uint64_t fired(int rule)
{
    static uint64_t (*count)(unsigned);
    if (!count) count = (uint64_t(*)(unsigned))entry("softrnic_fault_fired");
    return count((unsigned)rule);
}

/* From the first grave fault on, what the plugin's thread has to do is done before anything else happens. */
static void let_thread_act(struct day *day)
{
    for (int r = 0; r < day->weather.rules && !day->stormy; r++) day->stormy = day->weather.grave >> r & 1 && fired(r) != 0;
    if (day->stormy) quiet_wait();
}

static bool is_over(const struct mill *mill)
{
    return mill_has_finished(mill) || mill_has_failed(mill);
}

/* Turns of all connections by chance, with steps of the device between them. False: the day ends early, in the middle. */
static bool work(struct day *day)
{
    uint64_t patience = next_random(&day->random) % 6 ? UINT64_MAX : next_random(&day->random) % 5000, finished = 0;
    struct deadline deadline = deadline_in(30);
    for (;;) {
        int over = 0;
        uint64_t sum = 0;
        for (int i = 0; i < day->count; i++) over += is_over(&day->mills[i]), sum += day->mills[i].finished;
        if (over == day->count) return true;
        if (patience-- == 0) return false;
        if (sum != finished) deadline = deadline_in(30);
        if (deadline_passed(&deadline)) FAIL("no message was completed for 30 s");
        finished = sum;
        struct mill *mill = &day->mills[next_random(&day->random) % (uint64_t)day->count];
        if (!is_over(mill)) {
            mill_turn(mill);
            let_thread_act(day);
        }
        uint64_t n = next_random(&day->random) % 4;
        if (n && steps(n)) let_thread_act(day);
    }
}

/* Those that failed: what is outstanding ends, at the end that found out first and, once that is closed, at the other. */
static void bury(struct day *day)
{
    for (int second = 0; second < 2; second++) {
        run_dry();
        quiet_wait();
        WAIT_UNTIL(({
                       bool settled = true;
                       for (int i = 0; i < day->count; i++) {
                           struct mill *mill = &day->mills[i];
                           if (!mill_has_failed(mill)) continue;
                           struct mill_end *first = mill->send.code ? &mill->send : &mill->recv;
                           struct mill_end *other = first == &mill->send ? &mill->recv : &mill->send;
                           settled &= mill_settled(mill, second ? other : first);
                       }
                       steps(8);
                       settled;
                   }),
                   "the requests of failed connections to end");
        for (int i = 0; i < day->count; i++) {
            struct mill *mill = &day->mills[i];
            if (!mill_has_failed(mill)) continue;
            bool sender_first = mill->send.code != ncclSuccess;
            struct mill_end *end = sender_first == !second ? &mill->send : &mill->recv;
            mill_expect_latched(mill, end);
            mill_close_end(mill, end);
        }
    }
}

/* All that are left, in any order. */
static void close_mills(struct day *day)
{
    int order[2 * MILLS];
    for (int i = 0; i < 2 * day->count; i++) order[i] = i;
    shuffle(order, 2 * day->count, &day->random);
    for (int i = 0; i < 2 * day->count; i++) {
        struct mill *mill = &day->mills[order[i] / 2];
        mill_close_end(mill, order[i] % 2 ? &mill->send : &mill->recv);
        if (next_random(&day->random) % 2) steps(next_random(&day->random) % 8);
    }
}

static void account(struct day *day)
{
    struct tally *tally = day->host->tally;
    uint64_t wrong = 0, allowed = 0;
    for (int r = 0; r < day->weather.rules; r++) {
        uint64_t times = fired(r);
        CHECK(times != UINT64_MAX);
        tally->faults += times;
        if (r == day->weather.corrupting) allowed = times * day->weather.corrupted;
    }
    for (int i = 0; i < day->count; i++) {
        struct mill *mill = &day->mills[i];
        bool failed = mill_has_failed(mill), could = may_fail(&day->weather, day->traits, day->devs[i]);
        if (failed && !could)
            FAIL("a connection over device %d failed without a reason: send %s, receive %s", day->devs[i],
                 ffi_result_name(mill->send.code), ffi_result_name(mill->recv.code));
        wrong += mill->wrong_bytes;
        tally->messages += mill->messages;
        tally->bytes += mill->bytes;
        tally->flushed += mill->flushed;
        tally->failed += failed;
        tally->spared += !failed && day->weather.weak != 0;
        tally->hash = (tally->hash ^ mill->hash) * 0x100000001B3u;
    }
    if (wrong > allowed) FAIL("%llu wrong bytes, and %llu that were changed on their way", (unsigned long long)wrong,
                              (unsigned long long)allowed);
}

static void live(const struct host *host, const struct net *net, const struct traits *traits, int number)
{
    struct day day = {.host = host, .net = net, .traits = traits};
    struct ibv_context *held[DEVICES];
    day.random = (host->seed * 1000 + (uint64_t)host->number) * 1000003 + (uint64_t)number;
    now.day = number;
    struct census before = census_take();
    struct rnic_counts at_rest = rnic_counts();
    CHECK_EQ(((int (*)(uint64_t))entry("softrnic_seed"))(next_random(&day.random)), 0);
    day.weather = draw_weather(now.plan, sizeof now.plan, traits->devices, &day.random);
    hold_devices(held, traits->devices);
    bool from_the_start = next_random(&day.random) % 3 == 0;
    if (from_the_start) rnic_faults(now.plan);
    open_mills(&day);
    if (!from_the_start) rnic_faults(now.plan);
    bool whole = day.count == 0 || work(&day);
    host->tally->abandoned += !whole;
    bury(&day);
    account(&day);
    rnic_faults("");
    for (int d = 0; d < traits->devices; d++) {
        char name[32];
        snprintf(name, sizeof name, "softrnic%d", d);
        rnic_port(name, true);
    }
    close_mills(&day);
    for (int i = 0; i < day.count; i++) mill_wear(&day.mills[i]);
    run_dry();
    for (int i = 0; i < day.count; i++) mill_free(&day.mills[i]);
    release_devices(held, traits->devices);
    quiet_forget();
    struct rnic_counts after = rnic_counts();
    CHECK_EQ(after.mrs, at_rest.mrs);
    CHECK_EQ(after.qps, at_rest.qps);
    CHECK_EQ(after.cqs, at_rest.cqs);
    CHECK_EQ(after.pds, at_rest.pds);
    CHECK_EQ(after.contexts, at_rest.contexts);
    struct census left;
    WAIT_UNTIL((left = census_take()).threads == before.threads, "the threads of a day to end");
    if (left.descriptors != before.descriptors) census_print("left over");
    CHECK_EQ(left.descriptors, before.descriptors);
    host->tally->days++;
}

static void live_on(int version, int socket, void *argument)
{
    const struct host *host = argument;
    struct net net;
    (void)version, (void)socket;
    now.seed = host->seed;
    now.host = host->number;
    struct traits traits = settle(host);
    rnic_keep();
    ffi_last_words = last_words;
    struct census before = census_take();
    net_load(&net, traits.version);
    CHECK_OK(net_init(&net, host->seed, keep_line));
    if (traits.devices > 1 && traits.version >= 9) traits.fused = net_fuse(&net, traits.devices);
    uint64_t enough = host->tally->messages + host->messages;
    if (host->only_day != NOBODY) live(host, &net, &traits, host->only_day);
    for (int day = 0; host->only_day == NOBODY && host->tally->messages < enough; day++) live(host, &net, &traits, day);
    net_stop(&net);
    expect_gone(before);
}

/* ---- seeds --------------------------------------------------------------------------------------------------- */

static struct tally *shared_tally(void)
{
    void *memory = mmap(NULL, sizeof(struct tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

static void run_seed(uint64_t seed, uint64_t messages, bool alone, struct tally *tally)
{
    struct timespec begin, end;
    int host = (int)number_of("SOAK_HOST", UINT64_MAX), day = (int)number_of("SOAK_DAY", UINT64_MAX);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    *tally = (struct tally){0};
    for (int h = 0; h < HOSTS; h++) {
        struct host one = {.seed = seed, .messages = messages / HOSTS + 1, .number = h, .only_day = day, .alone = alone, .tally = tally};
        if (host == NOBODY || host == h) run_one(0, (struct role){.name = "host", .run = live_on}, &one);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9;
    printf("seed %llu: %llu messages, %llu MB in %llu days and %.1f s (%.0f messages/s); %llu flushes, %llu faults; %llu "
           "connections: %llu failed, %llu refused, %llu went on under faults of rails; %llu days ended early; %016llx\n",
           (unsigned long long)seed, (unsigned long long)tally->messages, (unsigned long long)tally->bytes >> 20,
           (unsigned long long)tally->days, seconds, (double)tally->messages / seconds, (unsigned long long)tally->flushed,
           (unsigned long long)tally->faults, (unsigned long long)tally->connections, (unsigned long long)tally->failed,
           (unsigned long long)tally->refused, (unsigned long long)tally->spared, (unsigned long long)tally->abandoned,
           (unsigned long long)tally->hash);
    fflush(stdout);
}

/* Every seed of SOAK_SEEDS; by itself a few, with a few thousand messages each. */
static void seeds(int version)
{
    const char *range = getenv("SOAK_SEEDS"), *dots = range ? strstr(range, "..") : NULL;
    uint64_t first = range ? strtoull(range, NULL, 0) : 1, last = dots ? strtoull(dots + 2, NULL, 0) : range ? first : 3;
    struct tally *tally = shared_tally();
    (void)version;
    for (uint64_t seed = first; seed <= last; seed++) {
        run_seed(seed, number_of("SOAK_MESSAGES", 1000), false, tally);
        if (getenv("SOAK_HOST")) continue;
        /* Chance has to do something: a seed that breaks nothing tests little. */
        CHECK(tally->failed > 0 && tally->failed < tally->connections && tally->faults > 0);
    }
}

/*
 * What is drawn, and what the plugin and the device answer, is the same in every run of a seed. Where rails stand in for
 * each other it is nearly always: when one fails, the thread of the plugin may get a processor in the middle of a call.
 */
static void same_run(int version)
{
    struct tally *one = shared_tally(), *two = shared_tally();
    (void)version;
    run_seed(77, 1000, true, one);
    run_seed(77, 1000, true, two);
    CHECK(memcmp(one, two, sizeof *one) == 0);
}

const struct ffi_case ffi_cases[] = {
    {.name = "seeds", .run = seeds, .once = true, .seconds = 180},
    ONCE(same_run),
    {0},
};
