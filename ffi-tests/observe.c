/* What the plugin logs, and what the process holds; harness.h says what each function promises. */
#include "harness.h"

#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOG_LINES = 4096 };

/* ---- the logger ---------------------------------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    ncclDebugLogLevel level;
    char text[1000]; /* about what NCCL keeps of a line */
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
        snprintf(log_lines[log_count].text, sizeof log_lines[0].text, "%.999s", text);
        log_count++;
    }
    pthread_mutex_unlock(&log_lock);
    dprintf(STDERR_FILENO, "  [%s] log level %d flags 0x%lx: %s\n", ffi_process_name, (int)level, flags, text);
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
