// What a memory region does to a forked child: 4 bytes on a heap page are registered, the child reads another object
// of that page. No plugin takes part; this is the control for the plugin's own fork test.
//
//   forked DEVICE       exit 0: the child read it; 1: the child was killed by SIGSEGV; 2: neither
//
// With RDMAV_FORK_SAFE=1 an rdma-core before 51 takes the whole page from children (MADV_DONTFORK), even where the
// kernel copies pinned pages on fork and needs no such help.
#include <errno.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

static int stop(const char *what) {
    fprintf(stderr, "forked: %s: %s\n", what, strerror(errno));
    exit(2);
}

// The size in KiB of the mapping that holds p, and whether children do without it (dc).
static void mapping(const char *when, const void *p) {
    FILE *smaps = fopen("/proc/self/smaps", "re");
    char line[512];
    unsigned long from, to, here = 0;
    if (!smaps) stop("smaps");
    while (fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) here = (uintptr_t)p >= from && (uintptr_t)p < to ? to - from : 0;
        if (here && !strncmp(line, "VmFlags:", 8))
            printf("  %-18s mapping of %lu KiB, %s\n", when, here / 1024, strstr(line, " dc") ? "dc: withheld from children" : "inherited");
    }
    fclose(smaps);
}

int main(int argc, char **argv) {
    struct ibv_pd *pd = NULL;
    int n, status;
    if (argc != 2) stop("usage: forked DEVICE");
    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; i < n && !pd; i++) {
        struct ibv_context *context = strcmp(ibv_get_device_name(list[i]), argv[1]) ? NULL : ibv_open_device(list[i]);
        if (context) pd = ibv_alloc_pd(context);
    }
    if (!pd) stop("no such device");

    int *registered = malloc(sizeof *registered);
    volatile int *neighbour = NULL;
    for (int i = 0; i < 100000 && (uintptr_t)neighbour / PAGE != (uintptr_t)registered / PAGE; i++) neighbour = malloc(32);
    if ((uintptr_t)neighbour / PAGE != (uintptr_t)registered / PAGE) stop("no neighbour on the page");
    *neighbour = 42;
    printf("RDMAV_FORK_SAFE=%s\n", getenv("RDMAV_FORK_SAFE") ? getenv("RDMAV_FORK_SAFE") : "(not set)");
    mapping("before ibv_reg_mr", registered);
    struct ibv_mr *mr = ibv_reg_mr(pd, registered, sizeof *registered, IBV_ACCESS_LOCAL_WRITE);
    if (!mr) stop("ibv_reg_mr");
    mapping("registered 4 bytes", registered);
    fflush(stdout);

    pid_t child = fork();
    if (child < 0) stop("fork");
    if (!child) _exit(*neighbour == 42 ? 0 : 3);
    if (waitpid(child, &status, 0) != child) stop("waitpid");
    ibv_dereg_mr(mr);
    mapping("deregistered", registered);
    if (WIFSIGNALED(status)) printf("  child: killed by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else printf("  child: exit %d\n", WEXITSTATUS(status));
    return !status ? 0 : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV ? 1 : 2;
}
