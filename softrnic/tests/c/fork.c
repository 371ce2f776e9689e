/* Marks, registers and forks as the words of the command line say, and prints one line for each word that answers. Runs
 * on the software RNIC or, with the words that need no device, on any libibverbs. A process of its own, because marks are
 * armed once and settings are read once. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* Exported by every libibverbs, for its drivers, and in no public header. */
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

#define MRS 64
/* Low and far from where the kernel puts mappings by itself, so that nobody fills a hole, and the same in every run. */
#define BASE ((char *)0x100000000000)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mrs[MRS];
static int made;
static size_t page, pages;

static void die(const char *what)
{
    printf("error %s errno=%d\n", what, errno);
    fflush(stdout);
    _exit(1);
}

static void print(const char *what, int error)
{
    printf("%s %s\n", what, error ? strerrorname_np(error) : "ok");
}

static void *own(const char *name)
{
    void *call = dlsym(RTLD_DEFAULT, name);
    if (!call)
        die(name);
    return call;
}

static unsigned long counter(const char *name)
{
    return ((uint64_t(*)(const char *))own("softrnic_counter"))(name);
}

static void devices(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (list)
        ibv_free_device_list(list);
}

static void open_device(void)
{
    if (context)
        return;
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = list && *list ? ibv_open_device(*list) : NULL;
    if (!context || !(pd = ibv_alloc_pd(context)))
        die("open");
}

/* Everything goes with it. */
static void close_device(void)
{
    if (ibv_close_device(context))
        die("close");
    context = NULL;
}

static void keep(struct ibv_mr *mr)
{
    if (made == MRS)
        die("too many regions");
    print("reg", mr ? 0 : errno);
    if (mr)
        mrs[made++] = mr;
}

/* Calls `see` with every mapping and whether children do without it. */
static void each_mapping(void (*see)(size_t from, size_t to, int withheld, void *argument), void *argument)
{
    static char line[4096];
    size_t from = 0, to = 0;
    FILE *smaps = fopen("/proc/self/smaps", "re");
    if (!smaps)
        die("smaps");
    while (fgets(line, sizeof line, smaps)) {
        size_t first, next;
        if (sscanf(line, "%lx-%lx ", &first, &next) == 2) {
            from = first;
            to = next;
        }
        if (!strncmp(line, "VmFlags:", 8))
            see(from, to, strstr(line, " dc") != NULL, argument);
    }
    fclose(smaps);
}

static void mark(size_t from, size_t to, int withheld, void *text)
{
    for (size_t i = 0; i < pages; i++) {
        size_t at = (size_t)BASE + i * page;
        if (at >= from && at < to)
            ((char *)text)[i] = withheld ? 'd' : '.';
    }
}

/* One letter for each page: d withheld, . inherited, - not mapped. */
static void marks(void)
{
    char text[pages + 1];
    memset(text, '-', pages);
    text[pages] = 0;
    each_mapping(mark, text);
    printf("marks %s\n", text);
}

static void add(size_t from, size_t to, int withheld, void *sum)
{
    *(size_t *)sum += withheld ? to - from : 0;
}

static size_t withheld_bytes(void)
{
    size_t sum = 0;
    each_mapping(add, &sum);
    return sum;
}

/* Forks; the child reads one byte and ends. */
static void child_reads(const char *what, const volatile char *where)
{
    int status;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_DUMPABLE, 0); /* no core of a crash that is wanted */
        (void)*where;
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        die("child");
    if (WIFSIGNALED(status))
        printf("%s SIG%s\n", what, sigabbrev_np(WTERMSIG(status)));
    else
        printf("%s %d\n", what, WEXITSTATUS(status));
}

/* Four bytes of the heap are registered; a child reads what happens to lie beside them. */
static void heap(void)
{
    int *word;
    char *neighbour;
    int tries = 0;
    open_device();
    /* Freed blocks come first, from anywhere; then fresh ones, side by side. */
    do {
        word = malloc(sizeof *word);
        neighbour = calloc(1, 32);
    } while ((size_t)neighbour / page != (size_t)word / page && ++tries < 100000);
    if (tries == 100000)
        die("no neighbour on the page");
    size_t before = withheld_bytes();
    struct ibv_mr *mr = ibv_reg_mr(pd, word, sizeof *word, IBV_ACCESS_LOCAL_WRITE);
    if (!mr)
        die("ibv_reg_mr");
    printf("withheld %zu\n", withheld_bytes() - before);
    child_reads("registered", neighbour);
    if (ibv_dereg_mr(mr))
        die("ibv_dereg_mr");
    printf("withheld %zu\n", withheld_bytes() - before);
    child_reads("deregistered", neighbour);
}

/* A file in memory stands for a dma-buf; it is mapped by the library, and not marked. */
static void dmabuf(void)
{
    int fd = memfd_create("dmabuf", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)page))
        die("memfd");
    open_device();
    keep(ibv_reg_dmabuf_mr(pd, 0, page, 0, fd, IBV_ACCESS_LOCAL_WRITE));
    close(fd);
}

static void *come_and_go(void *argument)
{
    uint64_t state = (uintptr_t)argument;
    size_t held[8][2];
    memset(held, 0, sizeof held);
    for (int i = 0; i < 4000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t *range = held[state >> 61], first = (state >> 33) % pages, count = 1 + (state >> 20) % (pages - first);
        if (range[1] && ibv_dofork_range(BASE + range[0] * page, range[1] * page))
            die("dofork");
        range[0] = first;
        range[1] = count;
        if (ibv_dontfork_range(BASE + first * page, count * page))
            die("dontfork");
    }
    for (int i = 0; i < 8; i++)
        if (held[i][1] && ibv_dofork_range(BASE + held[i][0] * page, held[i][1] * page))
            die("dofork");
    return NULL;
}

static void threads(unsigned long n)
{
    pthread_t threads[n];
    for (unsigned long i = 0; i < n; i++)
        if (pthread_create(&threads[i], NULL, come_and_go, (void *)(i + 1)))
            die("pthread_create");
    for (unsigned long i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
}

/* The other words, once more in a forked child. */
static int child(void)
{
    int status;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        context = NULL;
        made = 0;
        return 0;
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
        die("child");
    return 1;
}

static void map(size_t size, int flags)
{
    char *at = mmap(BASE, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | flags, -1, 0);
    pages = size / page;
    print("map", at == BASE ? 0 : errno);
}

int main(int argc, char **argv)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 1; i < argc; i++) {
        unsigned long a = 0, b = 0;
        char word[16];
        /* word[:number[:number]] */
        if (sscanf(argv[i], "%15[a-z]:%li:%li", word, (long *)&a, (long *)&b) < 1)
            die(argv[i]);
        if (!strcmp(word, "map")) {
            map(a * page, 0);
        } else if (!strcmp(word, "huge")) {
            map(a << 20, MAP_HUGETLB);
        } else if (!strcmp(word, "hole")) {
            if (munmap(BASE + a * page, page))
                die("munmap");
        } else if (!strcmp(word, "init")) {
            print("init", ibv_fork_init());
        } else if (!strcmp(word, "status")) {
            printf("status %d\n", (int)ibv_is_fork_initialized());
        } else if (!strcmp(word, "devices")) {
            devices();
        } else if (!strcmp(word, "close")) {
            close_device();
        } else if (!strcmp(word, "dont")) { /* pages */
            print("dont", ibv_dontfork_range(BASE + a * page, b * page) ? errno : 0);
        } else if (!strcmp(word, "do")) {
            print("do", ibv_dofork_range(BASE + a * page, b * page) ? errno : 0);
        } else if (!strcmp(word, "dontb")) { /* bytes */
            print("dont", ibv_dontfork_range(BASE + a, b) ? errno : 0);
        } else if (!strcmp(word, "nothing")) {
            print("nothing", ibv_dontfork_range(NULL, page) || ibv_dontfork_range(BASE, 0) ? errno : 0);
        } else if (!strcmp(word, "reg")) { /* bytes */
            open_device();
            keep(ibv_reg_mr(pd, BASE + a, b, IBV_ACCESS_LOCAL_WRITE));
        } else if (!strcmp(word, "dereg")) {
            if (a >= (unsigned long)made || ibv_dereg_mr(mrs[a]))
                die("dereg");
        } else if (!strcmp(word, "fail")) {
            ((int (*)(uint64_t))own("softrnic_fail_reg_mr"))(a);
        } else if (!strcmp(word, "dmabuf")) {
            dmabuf();
        } else if (!strcmp(word, "marks")) {
            marks();
        } else if (!strcmp(word, "calls")) {
            printf("calls %lu %lu\n", counter("dontfork"), counter("dofork"));
        } else if (!strcmp(word, "withheld")) {
            printf("withheld %zu\n", withheld_bytes());
        } else if (!strcmp(word, "reads")) {
            child_reads("reads", BASE + a * page);
        } else if (!strcmp(word, "heap")) {
            heap();
        } else if (!strcmp(word, "threads")) {
            threads(a);
        } else if (!strcmp(word, "child")) {
            if (child())
                return 0;
        } else {
            die(argv[i]);
        }
    }
    return 0;
}
