/*
 * What tests about forked children share: the process's mappings as the kernel describes them, a heap whose content is
 * known, and a child that looks at it.
 */
#ifndef FFI_TESTS_FORKED_H
#define FFI_TESTS_FORKED_H

#include "pair.h"
#include "softrnic.h"

/* What a process of another time or place does with the pages of a registration; see SOFTRNIC_FORK. */
enum forks {
    COPIED,      /* the kernel copies them for children, and the library knows it */
    OLD_KERNEL,  /* children do not get them once the library is armed, which the plugin does */
    OLD_LIBRARY, /* they do not get them although the kernel would copy, once somebody armed it: RDMAV_FORK_SAFE does */
};
/* The environment for it. Before the library is loaded. */
void forks_set(enum forks forks);

/* Runs the calling program's case once more with a library loaded before all others; returns in that run only. */
void with_preloaded(const char *library, const char *name_of_case);

/* Bytes of this process that children do not get. Each stretch must be the inside of a mapping of the plugin, with an
 * inaccessible page on either side, or lie in one of the `count` ranges at `mine`, which must all be withheld. */
struct stretch {
    const uint8_t *start, *end;
};
size_t withheld_(const struct stretch *mine, int count);
#define withheld(...) (HERE(), withheld_(__VA_ARGS__))
/* Whether the page at an address is kept from children. */
bool is_withheld(const void *address);
/* Whether the mapping of an address has a flag, such as "hg". */
bool mapping_has(const void *address, const char *flag);

/* Objects of all sizes on the heap, between holes, with a pattern each. */
void canaries_plant(int count);
void canaries_free(void);
/* Forks a child that reads every canary, allocates and frees, and ends with exit(); nothing of that may go wrong. */
void child_reads_canaries_(void);
#define child_reads_canaries() (HERE(), child_reads_canaries_())
/* Waits for a child; its status as waitpid has it. */
int child_status(int pid);

#endif
