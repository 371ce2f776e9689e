// The causal matrix of a failed registration, on a real kernel with real memory regions.
//
// A page in CMA or ZONE_MOVABLE must stay movable, so a long-term pin (which every ibv_reg_mr takes) first moves it
// elsewhere. A pin that somebody took before without FOLL_LONGTERM left the page where it was and forbids the move:
// the registration then fails with ENOMEM, whatever its size. Five cases, each many times, on fresh memory:
//
//   A  no pin before                                      registers, page moved out
//   B  short pin before                                   NULL, ENOMEM, page stays; registers once the pin is gone
//   C  long-term pin before                               registers, page moved out by that pin
//   D  short pin before, on a page that is elsewhere      registers, page stays
//   E  registered first, short pin after, second region   both register: the order that always works
//
//   matrix DEVICE TRIES PAGES vmsplice|module [FIRST-PFN END-PFN]
//
// The short pin is vmsplice into a pipe (any kernel) or the test module's. With the module (/dev/pinlab) the kernel
// itself says where a page lies; without, its PFN (/proc/self/pagemap) is compared with the range given.
// With MATRIX_TRACE set the kernel's tracing is on during the registration, and only then.
// Exit 0: every try of every case went as above.
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#include "frames.h"
#include "pinlab.h"

enum { PAGE = FRAME_SIZE };
enum { NONE, SHORT, LONG };

static const struct {
    char name;
    const char *what;
    bool moved_before;  // the pages have left CMA/ZONE_MOVABLE by an earlier registration
    bool region_before; // ... which is still there
    int pin;
    int error;          // of the registration; 0: it succeeds
} cases[] = {
    {'A', "no pin before", false, false, NONE, 0},
    {'B', "short pin before", false, false, SHORT, ENOMEM},
    {'C', "long-term pin before", false, false, LONG, 0},
    {'D', "short pin before, page elsewhere", true, false, SHORT, 0},
    {'E', "registered first, short pin after", true, true, SHORT, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static struct ibv_pd *pd;
static int module = -1;
static bool pin_by_module;
static struct frames forbidden; // without the module
static size_t size;

static void stop(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("matrix: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(2);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// ---- where a page lies

struct place {
    uint64_t pfn;
    bool movable;      // in CMA or ZONE_MOVABLE
    const char *where; // in words; by the module the pageblock's migratetype, and "zone" in ZONE_MOVABLE
};

static struct place place_of(const char *p) {
    if (module >= 0) {
        struct pinlab_place at = {.addr = (uintptr_t)p};
        if (ioctl(module, PINLAB_PLACE, &at)) stop("PINLAB_PLACE: %s", strerror(errno));
        static const char *const types[] = {"Unmovable", "Movable", "Reclaimable"};
        if (at.flags & PINLAB_ZONE_MOVABLE && at.migratetype != 1) stop("a block of type %d in ZONE_MOVABLE", at.migratetype);
        const char *type = at.migratetype >= 0 && at.migratetype < 3 ? types[at.migratetype] : "other block";
        const char *where = at.flags & PINLAB_CMA ? "CMA" : at.flags & PINLAB_ZONE_MOVABLE ? "Movable, zone" : type;
        return (struct place){at.pfn, at.flags != 0, where};
    }
    uint64_t pfn = frame_of(p);
    if (!pfn) stop("no page at %p, or /proc/self/pagemap hides page numbers: run as root", (const void *)p);
    bool movable = frames_have(forbidden, p);
    return (struct place){pfn, movable, movable ? "in range" : "elsewhere"};
}

// All pages of a buffer alike, else the whole is worth nothing as evidence.
static struct place place_of_all(const char *p) {
    struct place first = place_of(p);
    for (size_t i = PAGE; i < size; i += PAGE)
        if (place_of(p + i).movable != first.movable) stop("pages of one buffer lie in different places");
    return first;
}

static const char *describe(struct place at, char *text) {
    sprintf(text, "%6llx %s", (unsigned long long)at.pfn, at.where);
    return text;
}

static bool is_movable(const char *page) { return place_of(page).movable; }

// ---- pins

struct pin {
    int kind;
    struct short_pin pipe;
    struct ibv_mr *mr;
};

static struct ibv_mr *reg(char *p) { return ibv_reg_mr(pd, p, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE); }

static struct pin take(int kind, char *p) {
    struct pin pin = {.kind = kind};
    if (kind == NONE) return pin;
    if (pin_by_module) {
        struct pinlab_pin range = {.addr = (uintptr_t)p, .size = size, .longterm = kind == LONG};
        if (ioctl(module, PINLAB_PIN, &range)) stop("PINLAB_PIN: %s", strerror(errno));
    } else if (kind == LONG) { // without the module: another region
        pin.mr = reg(p);
        if (!pin.mr) stop("long-term pin by another region: %s", strerror(errno));
    } else if (!short_pin_take(&pin.pipe, p, size))
        stop("vmsplice: %s", strerror(errno));
    return pin;
}

static void drop(struct pin *pin) {
    if (pin->kind == NONE) return;
    if (pin_by_module)
        ioctl(module, PINLAB_UNPIN);
    else if (pin->mr)
        ibv_dereg_mr(pin->mr);
    else
        short_pin_drop(&pin->pipe);
    pin->kind = NONE;
}

// on: "1" or "0"
static void trace(const char *on, int c) {
    static int control = -1, marker = -1;
    if (!getenv("MATRIX_TRACE")) return;
    if (control < 0) control = open("/sys/kernel/tracing/tracing_on", O_WRONLY | O_CLOEXEC);
    if (marker < 0) marker = open("/sys/kernel/tracing/trace_marker", O_WRONLY | O_CLOEXEC);
    if (*on == '0') dprintf(marker, "case %c ends", cases[c].name);
    if (write(control, on, 1) != 1) stop("tracing_on: %s", strerror(errno));
    if (*on == '1') dprintf(marker, "case %c: %s", cases[c].name, cases[c].what);
}

// ---- one try of a case: NULL if all went as it must, else what did not

static struct outcome {
    struct place start, before, after;
    int error;
    double ms;
} last[CASES];

static unsigned char byte_at(size_t i, unsigned seed) { return (unsigned char)(i * 31 + i / PAGE + seed); }

static const char *attempt(int c, unsigned seed) {
    struct outcome *o = &last[c];
    const char *wrong = NULL;
    char *p = find_pages(size, is_movable);
    if (!p) stop("no memory in CMA or ZONE_MOVABLE found: is the guest started with cma= or movablecore=?");
    for (size_t i = 0; i < size; i++) p[i] = (char)byte_at(i, seed);
    o->start = place_of_all(p);

    struct ibv_mr *first = cases[c].moved_before ? reg(p) : NULL;
    if (cases[c].moved_before && !first) stop("the region before: %s", strerror(errno));
    if (first && !cases[c].region_before) {
        ibv_dereg_mr(first);
        first = NULL;
    }
    struct pin pin = take(cases[c].pin, p);
    o->before = place_of_all(p);

    trace("1", c);
    errno = 0;
    double begin = now_ms();
    struct ibv_mr *mr = reg(p);
    o->error = mr ? 0 : errno;
    o->ms = now_ms() - begin;
    trace("0", c);
    o->after = place_of_all(p);

    if (o->error != cases[c].error)
        wrong = "the registration's result";
    else if (!mr && (!o->after.movable || o->after.pfn != o->start.pfn))
        wrong = "a failed registration moved the page";
    else if (mr && (o->after.movable || o->after.pfn == o->start.pfn))
        wrong = "the page is registered and still where it must not be";
    else if ((cases[c].moved_before || cases[c].pin == LONG) && o->after.pfn != o->before.pfn)
        wrong = "a page that was already elsewhere moved again";
    drop(&pin);
    if (!mr && !wrong) { // the cure: nothing but the pin stood in the way
        mr = reg(p);
        if (!mr || place_of_all(p).movable) wrong = "the registration after the pin was dropped";
    }
    for (size_t i = 0; i < size && !wrong; i++)
        if ((unsigned char)p[i] != byte_at(i, seed)) wrong = "the contents";
    if (mr) ibv_dereg_mr(mr);
    if (first) ibv_dereg_mr(first);
    munmap(p, size);
    return wrong;
}

int main(int argc, char **argv) {
    if (argc != 5 && argc != 7) stop("usage: matrix DEVICE TRIES PAGES vmsplice|module [FIRST-PFN END-PFN]");
    int tries = atoi(argv[2]), n, good[CASES] = {0};
    size = (size_t)atoi(argv[3]) * PAGE;
    pin_by_module = !strcmp(argv[4], "module");
    module = open("/dev/pinlab", O_RDWR | O_CLOEXEC);
    if (pin_by_module && module < 0) stop("/dev/pinlab: %s", strerror(errno));
    if (argc == 7) {
        forbidden.first = strtoull(argv[5], NULL, 0);
        forbidden.end = strtoull(argv[6], NULL, 0);
    } else if (module < 0)
        stop("without /dev/pinlab the range of page frames is needed");
    if (tries < 1 || size < PAGE || size > CHUNK) stop("1 try and 1 to %d pages at least", CHUNK / PAGE);

    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; i < n && !pd; i++) {
        struct ibv_context *context = strcmp(ibv_get_device_name(list[i]), argv[1]) ? NULL : ibv_open_device(list[i]);
        if (context) pd = ibv_alloc_pd(context);
    }
    if (!pd) stop("no device %s", argv[1]);

    for (int t = 0; t < tries; t++)
        for (int c = 0; c < CASES; c++) {
            const char *wrong = attempt(c, (unsigned)t * CASES + c);
            if (!wrong)
                good[c]++;
            else
                printf("try %d of %c: unexpected: %s (errno %d)\n", t, cases[c].name, wrong, last[c].error);
        }

    bool all = true;
    char at[3][64];
    printf("short pin by %s, placement by %s, %zu pages; the last try of each case:\n", argv[4], module >= 0 ? "pinlab.ko" : "pagemap",
           size / PAGE);
    printf("case %-34s %-7s %-19s %-19s %-19s %-11s %9s\n", "", "tries", "page found at", "before ibv_reg_mr", "after", "result", "took");
    for (int c = 0; c < CASES; c++) {
        char count[24];
        sprintf(count, "%d/%d", good[c], tries);
        printf("%c    %-34s %-7s %-19s %-19s %-19s %-11s %6.2f ms\n", cases[c].name, cases[c].what, count, describe(last[c].start, at[0]),
               describe(last[c].before, at[1]), describe(last[c].after, at[2]),
               !last[c].error ? "MR" : last[c].error == ENOMEM ? "NULL ENOMEM" : strerror(last[c].error), last[c].ms);
        all &= good[c] == tries;
    }
    return all ? 0 : 1;
}
