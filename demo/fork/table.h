/*
 * What the programs of the demonstration share: what smaps says is withheld from children, a child that reads, and rows
 * of the table.
 */
#ifndef DEMO_FORK_TABLE_H
#define DEMO_FORK_TABLE_H

#include <stdbool.h>
#include <stddef.h>

/* Ends the program with a line that says what failed and what to do. */
__attribute__((noreturn, format(printf, 1, 2))) void give_up(const char *fmt, ...);

/* ---- withheld pages ------------------------------------------------------------------------------------------ */

/* Mappings that children do without: those with the flag dc ("don't copy on fork") in smaps. */
struct withheld {
    size_t bytes;
    int mappings;
    /* Mappings among them that something readable touches: marked pages of something larger. */
    int foreign;
};
struct withheld withheld_now(void);

/* ---- the child ----------------------------------------------------------------------------------------------- */

/* How a process ended, in words. */
struct ending {
    int status; /* of waitpid */
    char text[32];
};
bool ended_well(const struct ending *ending);
bool ended_by_segv(const struct ending *ending);
/* Forks. The child looks at what the parent has built and exits with 0 if it is all there, 1 if it reads other bytes. */
struct ending child_looks(bool (*intact)(const void *), const void *built);

/* ---- four bytes and what lies beside them -------------------------------------------------------------------- */

struct spot {
    int *word;   /* what is registered */
    char *state; /* what a child needs */
};
/* Both from malloc, on one page: as when a small field of some object is registered. */
struct spot spot_shared(void);
/* The word on a page of its own, with nothing else on it; the rest as before. */
struct spot spot_alone(void);
bool spot_intact(const void *spot);

/* ---- rows ---------------------------------------------------------------------------------------------------- */

/* What the table is about, and its columns. */
void table_title(void);
/* Whose rows follow. */
__attribute__((format(printf, 1, 2))) void table_section(const char *fmt, ...);
/* One row. `wrong` is what is not as it must be, or NULL and `reason` says why it must be so. */
void table_row(const char *asked, const struct withheld *withheld, const struct ending *child, const char *wrong,
               const char *reason);
/* The row of one spot: how much is withheld and how the child must end follow from `marked` and from where it lies. */
void table_spot(const char *asked, const struct spot *spot, bool shared, bool marked);
/* 0 if all rows of this program were as they must be, and at least one was printed; else 1. */
int table_result(void);

#endif
