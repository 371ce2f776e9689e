/* Registers pieces of a mapping as the words of the command line say, and prints one line for each word that answers.
 * A process of its own, because settings are read once and limits and capabilities belong to the process. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softrnic.h"

#define MRS 64

static struct ibv_pd *pd;
static struct ibv_mr *mrs[MRS];
static int live;
static char *memory;
static unsigned long pages, page;
static int access_flags = IBV_ACCESS_LOCAL_WRITE;

static void die(const char *what)
{
    printf("error %s errno=%d\n", what, errno);
    exit(1);
}

static void open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
    if (!context || !(pd = ibv_alloc_pd(context)))
        die("open");
}

static void print(const char *what, int error)
{
    printf("%s %s\n", what, error ? strerrorname_np(error) : "ok");
}

static void reg(unsigned long first, unsigned long count)
{
    if (live == MRS)
        die("too many regions");
    mrs[live] = ibv_reg_mr(pd, memory + first * page, count * page, access_flags);
    print("reg", mrs[live] ? 0 : errno);
    live += mrs[live] != NULL;
}

static struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};

static int capable(struct __user_cap_data_struct *sets)
{
    if (syscall(SYS_capget, &header, sets))
        die("capget");
    return sets[0].effective >> CAP_IPC_LOCK & 1;
}

/* CAP_IPC_LOCK on: ours already, or that of a user namespace of our own, where one may be made. Prints whether it is on. */
static void gain(void)
{
    struct __user_cap_data_struct sets[2];
    if (!capable(sets))
        (void)!unshare(CLONE_NEWUSER);
    printf("capable %d\n", capable(sets));
}

static void lose(void)
{
    struct __user_cap_data_struct sets[2];
    (void)capable(sets);
    sets[0].effective &= ~(1u << CAP_IPC_LOCK);
    if (syscall(SYS_capset, &header, sets) || capable(sets))
        die("capset");
}

static void limit(unsigned long bytes)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_MEMLOCK, &l))
        die("getrlimit");
    l.rlim_cur = bytes;
    if (setrlimit(RLIMIT_MEMLOCK, &l))
        die("setrlimit");
}

static void kinds(void)
{
    printf("kinds ");
    for (unsigned long i = 0; i < pages; i++) {
        int kind, error = softrnic_page(memory + i * page, NULL, &kind, NULL, NULL);
        if (error)
            printf("%s", error == EFAULT ? "-" : "?");
        else
            printf("%d", kind);
    }
    printf("\n");
}

/* The other words, once more in a child that opens the device anew. */
static int child(void)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        live = 0;
        open_device();
        return 0;
    }
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
        die("child");
    return 1;
}

int main(int argc, char **argv)
{
    page = (unsigned long)sysconf(_SC_PAGESIZE);
    open_device();
    for (int i = 1; i < argc; i++) {
        unsigned long a = 0, b = 0;
        char word[16];
        /* word[:number[:number]] */
        if (sscanf(argv[i], "%15[a-z]:%li:%li", word, (long *)&a, (long *)&b) < 1)
            die(argv[i]);
        if (!strcmp(word, "map")) {
            pages = a;
            memory = mmap(NULL, a * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED)
                die("mmap");
        } else if (!strcmp(word, "hole")) {
            if (munmap(memory + a * page, page))
                die("munmap");
        } else if (!strcmp(word, "protect")) {
            if (mprotect(memory + a * page, page, (int)b))
                die("mprotect");
        } else if (!strcmp(word, "access")) {
            access_flags = (int)a;
        } else if (!strcmp(word, "reg")) {
            reg(a, b);
        } else if (!strcmp(word, "dereg")) {
            if (!live || ibv_dereg_mr(mrs[--live]))
                die("dereg");
        } else if (!strcmp(word, "pin")) {
            print("pin", softrnic_pin(memory + a * page, b * page, 0));
        } else if (!strcmp(word, "unpin")) {
            print("unpin", softrnic_unpin(memory + a * page, b * page));
        } else if (!strcmp(word, "kinds")) {
            kinds();
        } else if (!strcmp(word, "pinned")) {
            printf("pinned %lu\n", (unsigned long)softrnic_counter("pinned_bytes") / page);
        } else if (!strcmp(word, "delay")) {
            printf("delay %lu\n", (unsigned long)softrnic_counter("reg_delay_ns"));
        } else if (!strcmp(word, "gain")) {
            gain();
        } else if (!strcmp(word, "lose")) {
            lose();
        } else if (!strcmp(word, "limit")) {
            limit(a * page + b);
        } else if (!strcmp(word, "child")) {
            if (child())
                return 0;
        } else {
            die(argv[i]);
        }
    }
    return 0;
}
