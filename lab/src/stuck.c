/*
 * What the plugin does on a kernel that refuses a registration: buffers lie in CMA or ZONE_MOVABLE and are pinned short
 * (vmsplice) before regMr. And what it does about memory of its own where each new page lies there. lab/bounce builds it
 * and runs it as one more program of ffi-tests, in guests that hand out such memory.
 *
 * LAB_FRAMES: "FIRST END", the frames in which a long-term pin is forbidden. LAB_PLACE: "cma" or "zone", what they are.
 */
#define ffi_cases of_softrnic
#include "verdicts.c" /* its stage and its records */
#undef ffi_cases

#include "frames.h"
#include "pinlab.h"
#include "watch.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>

enum { ROOM = 1 << 20, MEMBERS = 8, SLOT = ROOM / MEMBERS };

/* ---- memory that cannot be registered --------------------------------------------------------------------------- */

static struct frames forbidden;
static bool in_zone;

static void read_frames(void)
{
    const char *text = getenv("LAB_FRAMES"), *place = getenv("LAB_PLACE");
    CHECK(text != NULL && sscanf(text, "%lu %lu", &forbidden.first, &forbidden.end) == 2);
    CHECK(forbidden.first < forbidden.end && place != NULL);
    in_zone = strcmp(place, "zone") == 0;
    CHECK(in_zone || strcmp(place, "cma") == 0);
}

static bool is_forbidden(const char *page)
{
    return frames_have(forbidden, page);
}

/* A buffer with guards among those frames, and what was pinned of it. */
struct stuck {
    struct guarded buffer;
    struct short_pin pin;
    bool pinned;
    uint64_t *frames;
};

static size_t pages_of(const struct stuck *stuck)
{
    return stuck->buffer.map_size / PAGE;
}

static struct stuck stuck_new(size_t size, size_t offset)
{
    struct stuck stuck = {.buffer = {.size = size, .map_size = (offset + size + PAGE - 1) / PAGE * PAGE}};
    stuck.buffer.map = (uint8_t *)find_pages(stuck.buffer.map_size, is_forbidden);
    if (!stuck.buffer.map) FAIL("no memory found that must stay movable: is the guest started with cma= or movablecore=?");
    stuck.buffer.data = stuck.buffer.map + offset;
    guarded_reset(&stuck.buffer);
    stuck.frames = calloc(pages_of(&stuck), sizeof *stuck.frames);
    for (size_t i = 0; i < pages_of(&stuck); i++) {
        stuck.frames[i] = frame_of(stuck.buffer.map + i * PAGE);
        CHECK(stuck.frames[i] >= forbidden.first && stuck.frames[i] < forbidden.end);
    }
    return stuck;
}

static void pin(struct stuck *stuck)
{
    if (!short_pin_take(&stuck->pin, stuck->buffer.map, stuck->buffer.map_size)) FAIL("vmsplice: %s", strerror(errno));
    stuck->pinned = true;
}

static void unpin(struct stuck *stuck)
{
    short_pin_drop(&stuck->pin);
    stuck->pinned = false;
}

/* Registered itself, a page has left; reached through copies, it is where it was. */
static void check_frames(const struct stuck *stuck, bool moved)
{
    for (size_t i = 0; i < pages_of(stuck); i++) {
        const uint8_t *page = stuck->buffer.map + i * PAGE;
        if (moved && frames_have(forbidden, page)) FAIL("page %zu is registered and lies in frame 0x%lx", i, frame_of(page));
        if (!moved && frame_of(page) != stuck->frames[i])
            FAIL("page %zu was pinned in frame 0x%lx and lies in 0x%lx", i, stuck->frames[i], frame_of(page));
    }
}

static void stuck_free(struct stuck *stuck)
{
    if (stuck->pinned) unpin(stuck);
    free(stuck->frames);
    guarded_free(&stuck->buffer);
}

/* ---- what the plugin says --------------------------------------------------------------------------------------- */

static char record[1 << 16];

static int count_records(void)
{
    return records(record, sizeof record);
}

static bool says(const char *part)
{
    return strstr(record, part) != NULL;
}

static void must_say(const char *part)
{
    if (!says(part)) FAIL("no %s in\n%s", part, record);
}

/* Prints the parts of the record that the kernel's answers are in. */
static void show(void)
{
    for (const char *section = record; (section = strstr(section, "\n  \"")); section += 5) {
        static const char *const wanted[] = {"placement\"", "probe\"", "verdict\""};
        bool print = false;
        for (int i = 0; i < 3; i++) print |= strncmp(section + 4, wanted[i], strlen(wanted[i])) == 0;
        const char *end = strstr(section, "\n  }");
        if (print && end) dprintf(STDERR_FILENO, "%.*s\n", (int)(end + 4 - section), section);
    }
}

/* Where a page lies by the kernel itself: its frame, and the type of the block that the frame is in. */
static void check_with_module(const uint8_t *page, uint64_t frame)
{
    int module = open("/dev/pinlab", O_RDWR | O_CLOEXEC);
    if (module < 0) FAIL("/dev/pinlab: %m: did lab/bounce load the module?");
    struct pinlab_place at = {.addr = (uintptr_t)page};
    CHECK_EQ(ioctl(module, PINLAB_PLACE, &at), 0);
    close(module);
    dprintf(STDERR_FILENO, "the kernel: %p is frame 0x%llx, migratetype %d%s%s\n", (const void *)page, (unsigned long long)at.pfn,
            at.migratetype, at.flags & PINLAB_CMA ? ", CMA" : "", at.flags & PINLAB_ZONE_MOVABLE ? ", ZONE_MOVABLE" : "");
    CHECK_EQ(at.pfn, frame);
    CHECK_EQ(at.flags, in_zone ? PINLAB_ZONE_MOVABLE : PINLAB_CMA);
}

/* The record names the page, its frame and what forbids a long-term pin of that frame, and the kernel's own answer is the same. */
static void check_placement(const struct stuck *stuck, size_t first, size_t last)
{
    char text[100];
    size_t pages[] = {first, last};
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "\"%s_failing_page\": \"%p\"", i ? "last" : "first", (void *)(stuck->buffer.map + pages[i] * PAGE));
        must_say(text);
        snprintf(text, sizeof text, "\"frame\": \"0x%lx\"", stuck->frames[pages[i]]);
        must_say(text);
        check_with_module(stuck->buffer.map + pages[i] * PAGE, stuck->frames[pages[i]]);
    }
    must_say("\"confidence\": \"certain\"");
    must_say(in_zone ? "\"zone\": \"Movable\"" : "\"migratetype\": \"cma\"");
    must_say(in_zone ? "in ZONE_MOVABLE" : "CmaTotal ");
}

/* Registers a buffer that is pinned short: it works, and there is one more record. */
static void *register_stuck(const struct net *net, void *comm, const struct stuck *stuck)
{
    int before = count_records();
    void *mr = register_host(net, comm, stuck->buffer.data, stuck->buffer.size);
    CHECK_EQ(count_records(), before + 1);
    must_say("\"cause\": \"placement\"");
    must_say("\"errno\": 12");
    check_frames(stuck, false);
    return mr;
}

/* ---- traffic ---------------------------------------------------------------------------------------------------- */

/* What one process uses of a connection, or of the two connections of both directions. */
struct end {
    const struct net *net;
    void *send, *recv;
    int out, in; /* direction of what is sent and received, for the pattern */
    struct stuck from, to;
    struct guarded plain; /* never pinned */
    void *from_mr, *to_mr, *plain_mr;
};

enum { FROM = 1, TO = 2 };

/* Buffers of which those in `stuck` cannot be registered. */
static void end_open(struct end *end, int stuck)
{
    end->from = stuck_new(ROOM, 1003);
    end->to = stuck_new(ROOM, 517);
    end->plain = guarded_new(ROOM, 0);
    if (stuck & FROM) pin(&end->from);
    if (stuck & TO) pin(&end->to);
    end->from_mr = stuck & FROM ? register_stuck(end->net, end->send, &end->from)
                                : register_host(end->net, end->send, end->from.buffer.data, ROOM);
    end->to_mr =
        stuck & TO ? register_stuck(end->net, end->recv, &end->to) : register_host(end->net, end->recv, end->to.buffer.data, ROOM);
    end->plain_mr = register_host(end->net, end->recv, end->plain.data, ROOM);
}

static void end_close(struct end *end)
{
    check_frames(&end->from, !end->from.pinned);
    check_frames(&end->to, !end->to.pinned);
    CHECK_OK(net_dereg_mr(end->net, end->send, end->from_mr));
    CHECK_OK(net_dereg_mr(end->net, end->recv, end->to_mr));
    CHECK_OK(net_dereg_mr(end->net, end->recv, end->plain_mr));
    stuck_free(&end->from);
    stuck_free(&end->to);
    guarded_free(&end->plain);
}

static uint64_t key_of(int direction, int message)
{
    return (uint64_t)direction << 32 | (unsigned)message;
}

/* A message each way, or from itself to itself, and a flush. */
static void message(struct end *end, size_t size, int number)
{
    size_t at = (size_t)number * 13 % (ROOM - size + 1);
    void *data = end->to.buffer.data + at, *flush = NULL;
    int length = (int)size;
    guarded_reset(&end->to.buffer);
    pattern_fill(end->from.buffer.data, size, key_of(end->out, number));
    void *receive = irecv(end->net, end->recv, data, size, number, end->to_mr);
    void *send = isend(end->net, end->send, end->from.buffer.data, size, number, end->from_mr);
    CHECK_EQ(wait_size(end->net, send), size);
    CHECK_EQ(wait_size(end->net, receive), size);
    CHECK_OK(net_iflush(end->net, end->recv, 1, &data, &length, &end->to_mr, &flush));
    if (flush) wait_done(end->net, flush, NULL);
    CHECK_PART(&end->to.buffer, at, ROOM - at, size, key_of(end->in, number));
    for (const uint8_t *p = end->to.buffer.map; p < end->to.buffer.data + at; p++) CHECK_EQ(*p, end->to.buffer.map[0]);
}

static void messages(struct end *end)
{
    static const size_t sizes[] = {1, 7, 8, 100, 4095, 4096, 4097, 65536, 131071, 131073, 300007, ROOM - 1, ROOM, 0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) message(end, sizes[i], (int)i);
}

/* A receive of `n` members, every other one in the plain buffer if `mixed`; sent in reverse order. */
static void group(struct end *end, int n, bool mixed, int number)
{
    void *data[MEMBERS], *mrs[MEMBERS], *sends[MEMBERS];
    int tags[MEMBERS], got[MEMBERS];
    size_t sizes[MEMBERS];
    guarded_reset(&end->to.buffer);
    guarded_reset(&end->plain);
    for (int i = 0; i < n; i++) {
        bool plain = mixed && i % 2;
        data[i] = (plain ? end->plain.data : end->to.buffer.data) + i * SLOT;
        mrs[i] = plain ? end->plain_mr : end->to_mr;
        tags[i] = 100 * number + i;
        sizes[i] = i == 3 ? 0 : i == 5 ? SLOT : (size_t)(number + 1) * 977 * (unsigned)(i + 1) % SLOT;
        pattern_fill(end->from.buffer.data + i * SLOT, sizes[i], key_of(end->out, tags[i]));
    }
    void *receive = irecv_group(end->net, end->recv, n, data, sizes, tags, mrs);
    for (int i = n - 1; i >= 0; i--)
        sends[i] = isend(end->net, end->send, end->from.buffer.data + i * SLOT, sizes[i], tags[i], end->from_mr);
    for (int i = 0; i < n; i++) CHECK_EQ(wait_size(end->net, sends[i]), sizes[i]);
    wait_done(end->net, receive, got);
    for (int i = 0; i < n; i++) {
        bool plain = mixed && i % 2;
        CHECK_EQ(got[i], sizes[i]);
        CHECK_PART(plain ? &end->plain : &end->to.buffer, (size_t)i * SLOT, SLOT, sizes[i], key_of(end->in, tags[i]));
        CHECK_PART(plain ? &end->to.buffer : &end->plain, (size_t)i * SLOT, SLOT, 0, 0);
    }
}

static void traffic(struct end *end)
{
    messages(end);
    for (int i = 0; i < 4; i++) group(end, (int[]){8, 3, 1, 5}[i], i % 2, i + 1);
    group(end, 8, true, 5);
}

/* Sending, receiving or both through copies; then nobody pins the buffers any more. Of all this one warning. */
static void all_ways(struct end *end, void (*together)(void *), void *argument)
{
    size_t mark = log_mark();
    for (int stuck = FROM; stuck <= (FROM | TO); stuck++) {
        end_open(end, stuck);
        together(argument);
        traffic(end);
        together(argument);
        end_close(end);
    }
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "Verdict: placement"), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_PROTO=^LL128"), 1);
    int told = count_records();
    CHECK_EQ(told, 4);
    end_open(end, 0);
    check_frames(&end->from, true);
    check_frames(&end->to, true);
    together(argument);
    messages(end);
    together(argument);
    end_close(end);
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(count_records(), told);
}

/* ---- cases ------------------------------------------------------------------------------------------------------ */

static void nothing(void *argument) { (void)argument; }

static void one_process(int version)
{
    struct stage stage;
    read_frames();
    set_up(&stage, version);
    struct end end = {.net = &stage.net, .send = stage.pair.send, .recv = stage.pair.recv};
    all_ways(&end, nothing, NULL);
    forget_records();
    clear_up(&stage);
}

static void meet_peer(void *argument) { meet(*(int *)argument, 'm'); }

/* Each process sends to the other and receives from it. */
static void two_ends(int version, int socket, bool dials_first)
{
    struct net net;
    struct end end = {.net = &net, .out = dials_first, .in = !dials_first};
    want_records();
    net_start(&net, version);
    if (dials_first) end.send = dial(&net, 0, socket);
    end.recv = answer(&net, 0, socket);
    if (!dials_first) end.send = dial(&net, 0, socket);
    all_ways(&end, meet_peer, &socket);
    forget_records();
    CHECK_OK(net_close_send(&net, end.send));
    CHECK_OK(net_close_recv(&net, end.recv));
    net_stop(&net);
}

static void first_end(int version, int socket, void *argument)
{
    (void)argument;
    two_ends(version, socket, true);
}

static void second_end(int version, int socket, void *argument)
{
    (void)argument;
    two_ends(version, socket, false);
}

static void two_processes(int version)
{
    read_frames();
    run_two(version, (struct role){.name = "first", .run = first_end}, (struct role){.name = "second", .run = second_end}, NULL);
}

/* Two pages of sixteen are pinned: those two are named, with their frames. */
static void two_pages(int version)
{
    enum { FIRST = 5, LAST = 9, PAGES = 16 };
    struct stage stage;
    struct short_pin pins[2];
    read_frames();
    set_up(&stage, version);
    struct stuck stuck = stuck_new(PAGES * PAGE, 0);
    CHECK(short_pin_take(&pins[0], stuck.buffer.map + FIRST * PAGE, PAGE));
    CHECK(short_pin_take(&pins[1], stuck.buffer.map + LAST * PAGE, PAGE));
    for (int i = 0; i < 10; i++) { /* a busy emulator may spend the time that a search has */
        void *mr = register_host(&stage.net, stage.pair.recv, stuck.buffer.data, stuck.buffer.size);
        CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, mr));
        CHECK_EQ(count_records(), i + 1);
        if (!says("\"cut_short_by\": \"time\"")) break;
    }
    show();
    must_say("\"failing_pages\": 2,");
    must_say("\"failing_pages_exact\": true");
    check_placement(&stuck, FIRST, LAST);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    CHECK_EQ(frame_of(stuck.buffer.map + FIRST * PAGE), stuck.frames[FIRST]);
    CHECK_EQ(frame_of(stuck.buffer.map + LAST * PAGE), stuck.frames[LAST]);
    short_pin_drop(&pins[0]);
    short_pin_drop(&pins[1]);
    stuck_free(&stuck);
    clear_up(&stage);
    forget_records();
}

/* The operator wants no copies: an error with the same verdict, and nothing in the way once the pin is gone. */
static void refused_by_setting(int version)
{
    struct stage stage;
    read_frames();
    setenv("PINRAIL_REG_FALLBACK", "fail", 1);
    set_up(&stage, version);
    CHECK_EQ(log_matches_since(0, "pinned ahead"), 0);
    struct stuck stuck = stuck_new(2 * PAGE, 0);
    pin(&stuck);
    refused(&stage, stuck.buffer.data, stuck.buffer.size, NCCL_PTR_HOST);
    check_frames(&stuck, false);
    EXPECT(stage.mark, "placement", "\"errno\": 12", "\"refuses\": false");
    unpin(&stuck);
    void *mr = register_host(&stage.net, stage.pair.recv, stuck.buffer.data, stuck.buffer.size);
    check_frames(&stuck, true);
    CHECK_EQ(log_warnings_since(stage.mark), 1);
    CHECK_OK(net_dereg_mr(&stage.net, stage.pair.recv, mr));
    stuck_free(&stuck);
    clear_up(&stage);
}

/* What was registered so far besides `end`'s buffers left the forbidden frames, where most of it lay before. */
static void check_own(const char *when, const struct end *end)
{
    void *library = dlopen(getenv("LAB_WATCH"), RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != NULL);
    const struct watch *watch = dlsym(library, "watch");
    CHECK(watch != NULL);
    size_t pages = 0, before = 0;
    int own = 0;
    for (int i = 0; i < watch->count; i++) {
        const struct watch_entry *entry = &watch->entries[i];
        const struct guarded *given[] = {&end->from.buffer, &end->to.buffer, &end->plain};
        bool ours = false;
        for (int k = 0; k < 3; k++) ours |= given[k]->map && (uint8_t *)entry->data >= given[k]->map &&
                                            (uint8_t *)entry->data < given[k]->map + given[k]->map_size;
        CHECK(entry->worked);
        CHECK_EQ(entry->after, 0);
        if (ours) continue;
        own++;
        pages += entry->pages;
        before += entry->before;
    }
    dprintf(STDERR_FILENO, "%s: %d registrations of the plugin's own memory, %zu pages; among the forbidden frames %zu before, 0 after\n",
            when, own, pages, before);
    CHECK(own > 0 && before > 0);
    dlclose(library);
}

/* Each new page lies where a long-term pin is forbidden; the plugin registers its own before anybody else pins them. */
static void own_memory(int version)
{
    enum { FRESH = 4 << 20 };
    struct net net;
    struct pair pair;
    struct end end = {0};
    size_t inside = 0;
    read_frames();
    want_records();
    CHECK(getenv("LAB_WATCH") != NULL);
    setenv("NCCL_IBVERBS_LIB", getenv("LAB_WATCH"), 1);
    net_start(&net, version);
    CHECK_EQ(log_matches_since(0, " bytes are pinned ahead"), version >= 11); /* before, init has no counterpart */
    CHECK_EQ(log_matches_since(0, in_zone ? "in ZONE_MOVABLE" : "CmaTotal "), version >= 11);
    if (version >= 11) check_own("after init", &end);
    pair_open(&net, 0, &pair);
    CHECK_EQ(log_matches_since(0, " bytes are pinned ahead"), 1);
    uint8_t *fresh = pages(FRESH);
    CHECK_EQ(madvise(fresh, FRESH, MADV_NOHUGEPAGE), 0);
    for (size_t i = 0; i < FRESH; i += PAGE) {
        fresh[i] = 1;
        inside += frames_have(forbidden, fresh + i);
    }
    dprintf(STDERR_FILENO, "of %d new pages %zu lie among the forbidden frames\n", FRESH / PAGE, inside);
    CHECK(inside > FRESH / PAGE / 2);
    end = (struct end){.net = &net, .send = pair.send, .recv = pair.recv};
    end_open(&end, 0);
    traffic(&end);
    check_own("with traffic", &end);
    end_close(&end);
    CHECK_EQ(log_warnings_since(0), 0);
    CHECK_EQ(count_records(), 0);
    forget_records();
    pair_close(&pair);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(one_process), EACH(two_processes), EACH(two_pages), EACH(refused_by_setting), EACH(own_memory), {0},
};
