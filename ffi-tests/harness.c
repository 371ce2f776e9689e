/* The shared part of the test programs; harness.h says what each function promises. */
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CASE_SECONDS = 90, GUARD = 512, GUARD_BYTE = 0xC3, LOG_LINES = 4096 };

static const char *volatile where_file = "start";
static volatile int where_line;
static const char *process_name = "main";

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
    dprintf(STDERR_FILENO, "FAIL [%s] %s:%d: %s\n", process_name, file, line, text);
    if (strcmp(file, where_file) != 0 || line != where_line)
        dprintf(STDERR_FILENO, "  last step: %s:%d\n", where_file, where_line);
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
    dprintf(STDERR_FILENO, "FAIL [%s] the deadline of the case passed; last step: %s:%d\n", process_name, where_file,
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
    process_name = role->name;
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

/* ---- payload ------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t pattern_word(uint64_t key, size_t offset)
{
    return mix(mix(key) ^ (offset >> 3));
}

void pattern_fill(void *data, size_t size, uint64_t key)
{
    uint8_t *bytes = data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = pattern_word(key, i);
        memcpy(bytes + i, &word, size - i < 8 ? size - i : 8);
    }
}

ptrdiff_t pattern_mismatch(const void *data, size_t size, uint64_t key)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = pattern_word(key, i);
        size_t n = size - i < 8 ? size - i : 8;
        if (memcmp(bytes + i, &word, n) == 0) continue;
        for (size_t j = 0; j < n; j++)
            if (bytes[i + j] != ((const uint8_t *)&word)[j]) return (ptrdiff_t)(i + j);
    }
    return -1;
}

struct guarded guarded_new(size_t size, size_t misalignment)
{
    struct guarded buffer = {.size = size, .map_size = GUARD + misalignment + size + GUARD};
    buffer.map = mmap(NULL, buffer.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(buffer.map != MAP_FAILED);
    buffer.data = buffer.map + GUARD + misalignment;
    guarded_reset(&buffer);
    return buffer;
}

void guarded_free(struct guarded *buffer)
{
    munmap(buffer->map, buffer->map_size);
    *buffer = (struct guarded){0};
}

void guarded_reset(struct guarded *buffer)
{
    memset(buffer->map, GUARD_BYTE, buffer->map_size);
}

static void check_untouched(const char *file, int line, const struct guarded *buffer, const uint8_t *from,
                            const uint8_t *to, const char *what)
{
    for (const uint8_t *p = from; p < to; p++)
        if (*p != GUARD_BYTE)
            ffi_fail(file, line, "%s: byte at offset %td of a buffer of %zu is 0x%02x, should be untouched", what,
                     p - buffer->data, buffer->size, *p);
}

void guarded_check_part(const char *file, int line, const struct guarded *buffer, size_t offset, size_t room,
                        size_t size, uint64_t key)
{
    if (size > room || offset + room > buffer->size)
        ffi_fail(file, line, "%zu bytes at %zu do not fit into %zu", size, offset, room);
    ptrdiff_t wrong = pattern_mismatch(buffer->data + offset, size, key);
    if (wrong >= 0)
        ffi_fail(file, line, "payload of message 0x%llx: byte %td of %zu is 0x%02x, should be 0x%02x",
                 (unsigned long long)key, wrong, size, buffer->data[offset + (size_t)wrong],
                 (uint8_t)(pattern_word(key, (size_t)wrong) >> (8 * ((size_t)wrong & 7))));
    check_untouched(file, line, buffer, buffer->data + offset + size, buffer->data + offset + room,
                    "behind the message");
}

void guarded_check(const char *file, int line, const struct guarded *buffer, size_t size, uint64_t key)
{
    guarded_check_part(file, line, buffer, 0, buffer->size, size, key);
    check_untouched(file, line, buffer, buffer->map, buffer->data, "guard in front");
    check_untouched(file, line, buffer, buffer->data + buffer->size, buffer->map + buffer->map_size, "guard behind");
}

uint64_t next_random(uint64_t *state)
{
    return mix((*state)++);
}

void shuffle(int *items, int count, uint64_t *state)
{
    for (int i = count - 1; i > 0; i--) {
        int j = (int)(next_random(state) % (uint64_t)(i + 1));
        int swapped = items[i];
        items[i] = items[j];
        items[j] = swapped;
    }
}

/* ---- the logger ---------------------------------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    ncclDebugLogLevel level;
    char text[480];
} log_lines[LOG_LINES];
static size_t log_count;

void ffi_logger(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    char text[4096];
    va_list args;
    if (!fmt || strcmp(fmt, "%s") != 0) FAIL("a log message came through format \"%s\"", fmt ? fmt : "(null)");
    va_start(args, fmt);
    int length = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (length <= 0) FAIL("an empty log message from %s:%d", file ? file : "(null)", line);
    if (strchr(text, '\n')) FAIL("a log message of several lines: \"%s\"", text);
    pthread_mutex_lock(&log_lock);
    if (log_count < LOG_LINES) {
        log_lines[log_count].level = level;
        snprintf(log_lines[log_count].text, sizeof log_lines[0].text, "%.479s", text);
        log_count++;
    }
    pthread_mutex_unlock(&log_lock);
    dprintf(STDERR_FILENO, "  [%s] log level %d flags 0x%lx: %s\n", process_name, (int)level, flags, text);
}

size_t log_mark(void)
{
    pthread_mutex_lock(&log_lock);
    size_t mark = log_count;
    pthread_mutex_unlock(&log_lock);
    return mark;
}

int log_warnings_since(size_t mark)
{
    int count = 0;
    pthread_mutex_lock(&log_lock);
    for (size_t i = mark; i < log_count; i++) count += log_lines[i].level == NCCL_LOG_WARN;
    pthread_mutex_unlock(&log_lock);
    return count;
}

int log_matches_since(size_t mark, const char *text)
{
    int count = 0;
    pthread_mutex_lock(&log_lock);
    for (size_t i = mark; i < log_count; i++) count += strstr(log_lines[i].text, text) != NULL;
    pthread_mutex_unlock(&log_lock);
    return count;
}

/* ---- this process -------------------------------------------------------------------------------------------- */

/* Counts the entries of a /proc folder. */
static int count_entries(const char *path)
{
    DIR *folder = opendir(path);
    CHECK(folder != NULL);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));) count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static int address_space(void)
{
    FILE *statm = fopen("/proc/self/statm", "re");
    long pages = 0;
    CHECK(statm != NULL && fscanf(statm, "%ld", &pages) == 1);
    fclose(statm);
    return (int)(pages * sysconf(_SC_PAGESIZE) >> 20);
}

struct census census_take(void)
{
    return (struct census){
        .threads = count_entries("/proc/self/task"),
        .descriptors = count_entries("/proc/self/fd") - 1, /* the folder itself */
        .megabytes = address_space(),
    };
}

bool is_mapped(const char *path_fragment)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    char *line = NULL;
    size_t room = 0;
    bool found = false;
    while (!found && getline(&line, &room, maps) > 0) found = strstr(line, path_fragment) != NULL;
    free(line);
    fclose(maps);
    return found;
}

/* Says which threads and descriptors there are, for a failed comparison of two census. */
void census_print(const char *label)
{
    static const char *const folders[] = {"/proc/self/fd", "/proc/self/task"};
    for (int f = 0; f < 2; f++) {
        DIR *folder = opendir(folders[f]);
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char path[PATH_MAX], target[256] = "";
            if (entry->d_name[0] == '.') continue;
            if (f == 0) {
                snprintf(path, sizeof path, "%s/%s", folders[f], entry->d_name);
                ssize_t length = readlink(path, target, sizeof target - 1);
                target[length > 0 ? length : 0] = 0;
            } else {
                snprintf(path, sizeof path, "%s/%s/comm", folders[f], entry->d_name);
                FILE *name = fopen(path, "re");
                if (name && fgets(target, sizeof target, name)) target[strcspn(target, "\n")] = 0;
                if (name) fclose(name);
            }
            dprintf(STDERR_FILENO, "  %s: %s/%s %s\n", label, folders[f], entry->d_name, target);
        }
        if (folder) closedir(folder);
    }
}

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
