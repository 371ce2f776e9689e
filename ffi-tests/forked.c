/* Mappings, canaries and children; see forked.h. */
#include "forked.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void forks_set(enum forks forks)
{
    static const char *const names[] = {"copy-on-fork", "old-kernel", "old-library"};
    setenv("SOFTRNIC_FORK", names[forks], 1);
    if (forks == OLD_LIBRARY) setenv("RDMAV_FORK_SAFE", "1", 1);
}

void with_preloaded(const char *library, const char *name_of_case)
{
    const char *set = getenv("LD_PRELOAD");
    if (set && strstr(set, library)) return;
    setenv("LD_PRELOAD", library, 1);
    execl("/proc/self/exe", program_invocation_name, name_of_case, NULL);
    FAIL("exec: %m");
}

/* ---- mappings ------------------------------------------------------------------------------------------------ */

struct mapping {
    uint8_t *start, *end;
    char rights[5], flags[160];
    bool status;
};

/* All of them by ascending address, in memory that is no part of what is looked at. */
static int mappings(struct mapping **all)
{
    static struct mapping room[4096];
    char line[4096];
    int count = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file)) {
        unsigned long start, end;
        char rights[5];
        if (sscanf(line, "%lx-%lx %4s ", &start, &end, rights) == 3) {
            CHECK(count < 4096);
            room[count] = (struct mapping){.start = (uint8_t *)start, .end = (uint8_t *)end};
            room[count].status = strstr(line, "/memfd:pinrail-status") != NULL;
            memcpy(room[count++].rights, rights, sizeof rights);
        } else if (strncmp(line, "VmFlags:", 8) == 0) {
            CHECK(count > 0);
            line[strcspn(line, "\n")] = 0;
            snprintf(room[count - 1].flags, sizeof room->flags, " %.150s", line + 9);
        }
    }
    fclose(file);
    *all = room;
    return count;
}

static bool has(const struct mapping *mapping, const char *flag)
{
    char word[8];
    snprintf(word, sizeof word, " %s ", flag);
    return strstr(mapping->flags, word) != NULL;
}

bool mapping_has(const void *address, const char *flag)
{
    struct mapping *all;
    int count = mappings(&all);
    for (int i = 0; i < count; i++)
        if (all[i].start <= (const uint8_t *)address && (const uint8_t *)address < all[i].end) return has(&all[i], flag);
    FAIL("nothing is mapped at %p", address);
}

bool is_withheld(const void *address)
{
    return mapping_has(address, "dc");
}

size_t withheld_(const struct stretch *mine, int mines)
{
    struct mapping *all;
    size_t bytes = 0;
    int count = mappings(&all);
    for (int m = 0; m < mines; m++)
        for (const uint8_t *at = mine[m].start; at < mine[m].end; at += 4096)
            if (!is_withheld(at)) FAIL("%p is not withheld", (const void *)at);
    for (int i = 0; i < count; i++) {
        bool known = false;
        if (!has(&all[i], "dc") || has(&all[i], "io") || has(&all[i], "pf")) continue;
        /* What `pinrail status` reads: no child may write it, whatever the library does about registrations. */
        if (all[i].status) continue;
        bytes += (size_t)(all[i].end - all[i].start);
        for (int m = 0; m < mines; m++) known |= mine[m].start <= all[i].start && all[i].end <= mine[m].end;
        if (known) continue;
        bool before = i > 0 && all[i - 1].end == all[i].start && strcmp(all[i - 1].rights, "---p") == 0;
        bool behind = i + 1 < count && all[i + 1].start == all[i].end && strcmp(all[i + 1].rights, "---p") == 0;
        if (!before || !behind || strcmp(all[i].rights, "rw-p") != 0)
            FAIL("%p-%p %s%s is withheld from children and no mapping of the plugin", (void *)all[i].start,
                 (void *)all[i].end, all[i].rights, all[i].flags);
    }
    return bytes;
}

/* ---- the heap ------------------------------------------------------------------------------------------------ */

/* A list that a child walks: the pointers are on the heap too. */
struct canary {
    struct canary *next;
    size_t size;
    uint64_t key;
    uint8_t bytes[];
};
static struct canary *canaries;

void canaries_plant(int count)
{
    uint64_t random = 0xCA9A;
    for (int i = 0; i < count; i++) {
        /* Many small ones, which share pages, and some larger than a page. */
        size_t size = next_random(&random) % (i % 16 ? 300 : 9000);
        void *hole = i % 3 ? NULL : malloc(next_random(&random) % 700);
        struct canary *canary = malloc(sizeof *canary + size);
        CHECK(canary != NULL);
        *canary = (struct canary){.next = canaries, .size = size, .key = (uint64_t)i};
        pattern_fill(canary->bytes, size, canary->key);
        canaries = canary;
        free(hole);
    }
}

void canaries_free(void)
{
    while (canaries) {
        struct canary *gone = canaries;
        canaries = gone->next;
        free(gone);
    }
}

int child_status(int pid)
{
    int status = -1;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return status;
}

void child_reads_canaries_(void)
{
    CHECK(canaries != NULL);
    int child = fork_child();
    if (child == 0) {
        int count = 0;
        for (struct canary *c = canaries; c; c = c->next, count++)
            if (pattern_mismatch(c->bytes, c->size, c->key) != -1) FAIL("canary %d is not what it was", count);
        canaries_plant(2000);
        canaries_free();
        exit(0);
    }
    int status = child_status(child);
    if (WIFSIGNALED(status)) FAIL("a child that reads its heap died by signal %d", WTERMSIG(status));
    CHECK_EQ(status, 0);
}
