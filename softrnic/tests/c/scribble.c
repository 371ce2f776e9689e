/* Overwrites random words of another process's region until it is gone: the worst that a peer can do.
 * argv[1] is the pid; prints "scribbling" once it has found the region. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TABLES (40u << 20)

static volatile unsigned *find(int pid)
{
    char dir[64], path[128], link[256];
    struct dirent *e;
    snprintf(dir, sizeof dir, "/proc/%d/fd", pid);
    DIR *d = opendir(dir);
    while (d && (e = readdir(d))) {
        snprintf(path, sizeof path, "%s/%.20s", dir, e->d_name);
        ssize_t n = readlink(path, link, sizeof link - 1);
        if (n <= 0)
            continue;
        link[n] = 0;
        if (strstr(link, "softrnic-region")) {
            int fd = open(path, O_RDWR);
            void *p = mmap(NULL, TABLES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            closedir(d);
            return p == MAP_FAILED ? NULL : p;
        }
    }
    if (d)
        closedir(d);
    return NULL;
}

int main(int argc, char **argv)
{
    int pid = argc > 1 ? atoi(argv[1]) : 0;
    volatile unsigned *p;
    unsigned long x = 88172645463325252ul, rounds = 0;
    while (!(p = find(pid)))
        if (kill(pid, 0))
            return 1;
    printf("scribbling\n");
    fflush(stdout);
    for (;; rounds++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        /* Mostly where small tables and first entries lie, sometimes anywhere. */
        unsigned long word = (x >> 8) % (TABLES / 4);
        if (x & 1)
            word = word / 4096 * 4096 / 4 + (x >> 40) % 256;
        if (p[word % (TABLES / 4)] || (x & 6) == 6)
            p[word % (TABLES / 4)] = (x & 64) ? (unsigned)(x >> 16) : (unsigned)(x >> 60);
        if (rounds % 4096 == 0 && kill(pid, 0))
            return 0;
    }
}
