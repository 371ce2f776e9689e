/* Cases, checks, deadlines and processes; harness.h says what each function promises. */
#include "harness.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CASE_SECONDS = 90 };

static const char *volatile where_file = "start";
static volatile int where_line;
const char *ffi_process_name = "main";
void (*ffi_last_words)(void);

/* ---- checks -------------------------------------------------------------------------------------------------- */

void ffi_at(const char *file, int line)
{
    where_file = file;
    where_line = line;
}

void ffi_fail(const char *file, int line, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    dprintf(STDERR_FILENO, "FAIL [%s] %s:%d: %s\n", ffi_process_name, file, line, text);
    if (strcmp(file, where_file) != 0 || line != where_line)
        dprintf(STDERR_FILENO, "  last step: %s:%d\n", where_file, where_line);
    void (*last_words)(void) = ffi_last_words;
    ffi_last_words = NULL; /* they may fail too */
    if (last_words) last_words();
    _exit(1);
}

const char *ffi_result_name(ncclResult_t result)
{
    static const char *const names[] = {"ncclSuccess",       "ncclUnhandledCudaError", "ncclSystemError",
                                        "ncclInternalError", "ncclInvalidArgument",    "ncclInvalidUsage",
                                        "ncclRemoteError",   "ncclInProgress"};
    return (unsigned)result < sizeof names / sizeof *names ? names[result] : "not an ncclResult_t";
}

bool ffi_same_text(const char *a, const char *b)
{
    return a && b && strcmp(a, b) == 0;
}

bool ffi_is_error(ncclResult_t result)
{
    return result >= ncclUnhandledCudaError && result <= ncclRemoteError;
}

/* ---- deadlines ----------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static double deadline_scale(void)
{
    const char *text = getenv("FFI_DEADLINE_SCALE");
    double scale = text ? atof(text) : 1;
    return scale >= 1 ? scale : 1;
}

struct deadline deadline_in(double seconds)
{
    return (struct deadline){now_ns() + (uint64_t)(seconds * deadline_scale() * 1e9)};
}

bool deadline_passed(const struct deadline *deadline)
{
    return now_ns() > deadline->end_ns;
}

void ffi_yield(void)
{
    sched_yield();
}

static void on_alarm(int signal_number)
{
    (void)signal_number;
    dprintf(STDERR_FILENO, "FAIL [%s] the deadline of the case passed; last step: %s:%d\n", ffi_process_name, where_file,
            where_line);
    _exit(124);
}

static void set_alarm(int seconds)
{
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(seconds * deadline_scale()));
}

/* ---- processes ----------------------------------------------------------------------------------------------- */

static int case_seconds = CASE_SECONDS;

int fork_child(void)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    set_alarm(case_seconds); /* a child starts with no alarm */
    return 0;
}

static pid_t start_role(int version, const struct role *role, int own, int other, void *argument)
{
    pid_t pid = fork_child();
    if (pid > 0) return pid;
    ffi_process_name = role->name;
    close(other);
    role->run(version, own, argument);
    fflush(NULL);
    exit(0);
}

static bool ended_well(const struct role *role, int status)
{
    if (role->dies_by_kill) return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void run_roles(int version, const struct role *roles, int count, void *argument)
{
    int sockets[2], left = count;
    pid_t pids[2] = {0};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
    for (int i = 0; i < count; i++) pids[i] = start_role(version, &roles[i], sockets[i], sockets[1 - i], argument);
    close(sockets[0]);
    close(sockets[1]);
    alarm((unsigned)((case_seconds + 5) * deadline_scale())); /* theirs first: they know where they stand */
    while (left-- > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        int i = pid == pids[0] ? 0 : 1;
        CHECK(pid > 0 && pid == pids[i]);
        pids[i] = 0;
        if (ended_well(&roles[i], status)) continue;
        if (pids[1 - i] > 0) kill(pids[1 - i], SIGKILL);
        if (WIFSIGNALED(status)) FAIL("process \"%s\" died by signal %d (%s)", roles[i].name, WTERMSIG(status),
                                      strsignal(WTERMSIG(status)));
        FAIL("process \"%s\" ended with status %d", roles[i].name, WEXITSTATUS(status));
    }
}

void run_two(int version, struct role first, struct role second, void *argument)
{
    run_roles(version, (struct role[]){first, second}, 2, argument);
}

void run_one(int version, struct role role, void *argument)
{
    run_roles(version, &role, 1, argument);
}

void tell(int socket, const void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = send(socket, (const char *)bytes + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) FAIL("telling the other process: %s", strerror(errno));
        done += (size_t)n;
    }
}

void hear(int socket, void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = recv(socket, (char *)bytes + done, size - done, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) FAIL("the other process is gone: %s", n < 0 ? strerror(errno) : "end of stream");
        done += (size_t)n;
    }
}

void hear_end(int socket)
{
    char byte;
    ssize_t n;
    while ((n = recv(socket, &byte, 1, 0)) < 0 && errno == EINTR) continue;
    if (n > 0) FAIL("the other process says '%c' instead of going", byte);
}

void tell_step(int socket, char step)
{
    tell(socket, &step, 1);
}

void hear_step(int socket, char step)
{
    char got = 0;
    hear(socket, &got, 1);
    if (got != step) FAIL("the other process is at step '%c', this one at '%c'", got, step);
}

void meet(int socket, char step)
{
    tell_step(socket, step);
    hear_step(socket, step);
}

/* ---- artefacts ----------------------------------------------------------------------------------------------- */

/* A path from the environment, or the place under the repository's root where `make` puts the file. */
static const char *artefact(const char *variable, const char *in_root, char *room)
{
    const char *set = getenv(variable);
    if (set) return set;
    if (!room[0]) {
        char self[PATH_MAX] = "";
        ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
        CHECK(length > 0);
        for (int up = 0; up < 3; up++) *strrchr(self, '/') = 0; /* ROOT/target/ffi-tests/program */
        snprintf(room, PATH_MAX, "%.*s/%s", PATH_MAX - 64, self, in_root);
    }
    if (access(room, R_OK) != 0) FAIL("%s is missing: run `make` first, or set %s", room, variable);
    return room;
}

const char *plugin_path(void)
{
    static char room[PATH_MAX];
    return artefact("FFI_PLUGIN", "dist/libnccl-net-pinrail.so", room);
}

const char *softrnic_path(void)
{
    static char room[PATH_MAX];
    return artefact("FFI_SOFTRNIC", "dist/softrnic/libibverbs.so.1", room);
}

static void set_environment(void)
{
    char fabric[64];
    snprintf(fabric, sizeof fabric, "ffi-%d", (int)getpid());
    setenv("SOFTRNIC_FABRIC", fabric, 0);
    setenv("NCCL_IBVERBS_LIB", softrnic_path(), 0);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_SOCKET_RETRY_CNT", "3", 0); /* a listener that is gone is given up soon */
}

static int list_cases(void)
{
    for (const struct ffi_case *c = ffi_cases; c->name; c++) {
        if (c->once) printf("%s\n", c->name);
        for (int v = FIRST_VERSION; !c->once && v <= LAST_VERSION; v++) printf("%s v%d\n", c->name, v);
    }
    return 0;
}

int main(int argc, char **argv)
{
    int version = argc == 3 && argv[2][0] == 'v' ? atoi(argv[2] + 1) : 0;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) return list_cases();
    for (const struct ffi_case *c = ffi_cases; argc >= 2 && c->name; c++) {
        if (strcmp(c->name, argv[1]) != 0) continue;
        if (c->once ? argc != 2 : version < FIRST_VERSION || version > LAST_VERSION) break;
        signal(SIGPIPE, SIG_DFL); /* as in a program that knows nothing of sockets: a library must cope */
        case_seconds = c->seconds ? c->seconds : CASE_SECONDS;
        set_alarm(case_seconds);
        set_environment();
        c->run(version);
        return 0;
    }
    fprintf(stderr, "usage: %s --list | CASE [vN] (see --list)\n", argv[0]);
    return 2;
}
