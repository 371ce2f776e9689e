/* See table.h. */
#include "table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

void give_up(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fflush(stdout);
    fputs("demo-fork: ", stderr);
    vfprintf(stderr, fmt, args);
    fputs("\n", stderr);
    exit(2);
}

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- withheld pages ------------------------------------------------------------------------------------------ */

struct area {
    size_t from, to;
    bool readable, dc;
};

/* Two marked mappings without a gap are one larger thing of which everything is marked: no harm. */
static bool touches(const struct area *left, const struct area *right)
{
    return left->to == right->from && (left->dc ? right : left)->readable && left->dc != right->dc;
}

struct withheld withheld_now(void)
{
    struct withheld sum = {0};
    struct area last = {0}, area = {0};
    bool last_is_foreign = false, shown = false;
    static char line[8192];
    FILE *smaps = fopen("/proc/self/smaps", "re");
    if (!smaps) give_up("/proc/self/smaps: %s", strerror(errno));
    while (fgets(line, sizeof line, smaps)) {
        size_t from, to;
        char mode[8];
        if (sscanf(line, "%zx-%zx %7s ", &from, &to, mode) == 3) {
            /* What `pinrail status` reads is no memory of a program's, and no child may write it. */
            shown = strstr(line, "/memfd:pinrail-status") != NULL;
            area = (struct area){.from = from, .to = to, .readable = mode[0] == 'r' && !shown};
        } else if (strncmp(line, "VmFlags:", 8) == 0) {
            area.dc = strstr(line, " dc") != NULL && !shown;
            bool meets = touches(&last, &area);
            if (area.dc) {
                sum.bytes += area.to - area.from;
                sum.mappings++;
            }
            if (meets && !(last.dc && last_is_foreign)) sum.foreign++;
            last_is_foreign = meets;
            last = area;
        }
    }
    fclose(smaps);
    return sum;
}

/* ---- the child ----------------------------------------------------------------------------------------------- */

bool ended_well(const struct ending *ending)
{
    return WIFEXITED(ending->status) && WEXITSTATUS(ending->status) == 0;
}

bool ended_by_segv(const struct ending *ending)
{
    return WIFSIGNALED(ending->status) && WTERMSIG(ending->status) == SIGSEGV;
}

struct ending child_looks(bool (*intact)(const void *), const void *built)
{
    struct ending ending;
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) give_up("fork: %s", strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_DUMPABLE, 0); /* some of them are meant to crash; nobody wants the core */
        _exit(intact(built) ? 0 : 1);
    }
    while (waitpid(pid, &ending.status, 0) != pid)
        if (errno != EINTR) give_up("waitpid: %s", strerror(errno));
    if (WIFSIGNALED(ending.status))
        snprintf(ending.text, sizeof ending.text, "killed by signal %d", WTERMSIG(ending.status));
    else
        snprintf(ending.text, sizeof ending.text, "exit %d", WEXITSTATUS(ending.status));
    return ending;
}

/* ---- four bytes and what lies beside them -------------------------------------------------------------------- */

static const char STATE[] = "rank 3 saves shard 17 of 64";

static char *new_state(void)
{
    char *state = malloc(sizeof STATE);
    if (!state) give_up("malloc: %s", strerror(errno));
    memcpy(state, STATE, sizeof STATE);
    return state;
}

struct spot spot_shared(void)
{
    /* What was freed earlier is handed out first, anywhere; soon both come from fresh memory, one behind the other. */
    for (int i = 0; i < 100000; i++) {
        int *word = malloc(sizeof *word);
        char *state = new_state();
        uintptr_t page = (uintptr_t)word / page_size();
        if ((uintptr_t)state / page_size() == page && ((uintptr_t)state + sizeof STATE - 1) / page_size() == page)
            return (struct spot){word, state};
    }
    give_up("malloc never puts two small blocks on one page; is this a usual allocator?");
}

struct spot spot_alone(void)
{
    /* With an inaccessible page on either side, so that this is a mapping that touches no other. */
    char *room = mmap(NULL, 3 * page_size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED || mprotect(room + page_size(), page_size(), PROT_READ | PROT_WRITE) != 0)
        give_up("mapping a page: %s", strerror(errno));
    return (struct spot){(int *)(room + page_size()), new_state()};
}

bool spot_intact(const void *spot)
{
    return memcmp(((const struct spot *)spot)->state, STATE, sizeof STATE) == 0;
}

/* ---- rows ---------------------------------------------------------------------------------------------------- */

static int rows, wrong_rows;

#define COLUMNS "  %-40s  %-27s  %-19s  %s\n"

void table_title(void)
{
    printf("What a forked child loses when memory is registered\n\n");
    printf(COLUMNS, "asked for", "withheld from children", "the forked child", "verdict");
}

void table_section(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    printf("\n");
    vprintf(fmt, args);
    printf("\n");
}

void table_row(const char *asked, const struct withheld *withheld, const struct ending *child, const char *wrong,
               const char *reason)
{
    char bytes[64] = "nothing", verdict[160];
    if (withheld->bytes)
        snprintf(bytes, sizeof bytes, "%zu bytes, dc in smaps", withheld->bytes);
    snprintf(verdict, sizeof verdict, "%s: %s", wrong ? "WRONG" : "right", wrong ? wrong : reason);
    printf(COLUMNS, asked, bytes, child->text, verdict);
    fflush(stdout);
    rows++;
    wrong_rows += wrong != NULL;
}

void table_spot(const char *asked, const struct spot *spot, bool shared, bool marked)
{
    struct withheld now = withheld_now();
    struct ending child = child_looks(spot_intact, spot);
    bool crash = marked && shared;
    const char *wrong = NULL, *reason = "the page stays";
    if (marked) reason = shared ? "what lies beside them is gone" : "nothing else is on it";
    if (!spot_intact(spot)) wrong = "the parent's own bytes changed";
    else if (now.bytes != (marked ? page_size() : 0)) wrong = marked ? "not one page" : "something is withheld";
    else if (marked && now.foreign != (shared ? 1 : 0)) wrong = "the page does not lie where it should";
    else if (crash && !ended_by_segv(&child)) wrong = "the child should have met the hole";
    else if (!crash && !ended_well(&child)) wrong = "the child should have found everything";
    table_row(asked, &now, &child, wrong, reason);
}

int table_result(void)
{
    return rows > 0 && wrong_rows == 0 ? 0 : 1;
}
