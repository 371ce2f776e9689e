/*
 * The whole fault without any RDMA. What a library does for a registration while its fork handling is armed is done here
 * by hand: the bytes are widened to whole pages, and those are withheld from children.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "table.h"

static void advise(void *bytes, size_t size, int advice)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)bytes / page * page;
    uintptr_t end = ((uintptr_t)bytes + size + page - 1) / page * page;
    if (madvise((void *)first, end - first, advice) != 0) give_up("madvise: %s", strerror(errno));
}

int main(void)
{
    table_title();
    table_section("No RDMA: madvise(MADV_DONTFORK) on the page of the bytes");

    struct spot shared = spot_shared();
    advise(shared.word, sizeof *shared.word, MADV_DONTFORK);
    table_spot("4 bytes beside other data", &shared, true, true);
    advise(shared.word, sizeof *shared.word, MADV_DOFORK);

    struct spot alone = spot_alone();
    advise(alone.word, sizeof *alone.word, MADV_DONTFORK);
    table_spot("4 bytes on a page of their own", &alone, false, true);
    advise(alone.word, sizeof *alone.word, MADV_DOFORK);

    return table_result();
}
