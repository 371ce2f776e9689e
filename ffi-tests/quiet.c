/* Whether the plugin's thread is at rest; see quiet.h. */
#include "quiet.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "harness.h"

enum { SOCKETS = 64 };

static int stat_fd = -1, epoll_fd = -1, sockets[SOCKETS], socket_count;

void quiet_forget(void)
{
    if (stat_fd >= 0) close(stat_fd);
    stat_fd = epoll_fd = -1;
    socket_count = 0;
}

/*
 * The thread gets the processor of the one that calls the plugin, and not in the middle of a call because it has just been
 * woken: what it does comes between calls.
 */
static void keep_behind(pid_t thread)
{
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    CHECK_EQ(sched_setaffinity(0, sizeof here, &here), 0);
    CHECK_EQ(sched_setaffinity(thread, sizeof here, &here), 0);
    CHECK_EQ(sched_setscheduler(thread, SCHED_BATCH, &(struct sched_param){0}), 0);
}

/* Opens the state of the thread of that name. */
static int open_thread(const char *name)
{
    int fd = -1;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder != NULL);
    for (struct dirent *entry; fd < 0 && (entry = readdir(folder));) {
        char path[PATH_MAX], comm[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file) continue;
        if (fgets(comm, sizeof comm, file) && strncmp(comm, name, strlen(name)) == 0) {
            snprintf(path, sizeof path, "/proc/self/task/%s/stat", entry->d_name);
            fd = open(path, O_RDONLY | O_CLOEXEC);
            keep_behind(atoi(entry->d_name));
        }
        fclose(file);
    }
    closedir(folder);
    return fd;
}

/* The one descriptor of this process that watches others, and what the two ends of connections talk over. */
static void find_descriptors(void)
{
    for (int fd = 3; fd < 1024; fd++) {
        char path[64], target[64] = "";
        int type = 0, listens = 0;
        socklen_t size = sizeof type;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, target, sizeof target - 1) > 0 && strcmp(target, "anon_inode:[eventpoll]") == 0) epoll_fd = fd;
        if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &type, &size) != 0 || type != IPPROTO_TCP) continue;
        size = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens) continue;
        if (socket_count < SOCKETS) sockets[socket_count++] = fd;
    }
    if (epoll_fd < 0) FAIL("the plugin's thread waits for nothing");
}

/* Something was sent that has not reached the other socket. */
static bool is_under_way(void)
{
    for (int i = 0; i < socket_count; i++) {
        int bytes = 0;
        if (ioctl(sockets[i], SIOCOUTQ, &bytes) == 0 && bytes > 0) return true;
    }
    return false;
}

static bool sleeps(void)
{
    char text[256] = "";
    if (pread(stat_fd, text, sizeof text - 1, 0) <= 0) return true; /* it has ended */
    const char *after_name = strrchr(text, ')');
    return after_name && after_name[1] == ' ' && after_name[2] == 'S';
}

static bool is_ready(void)
{
    struct pollfd watched = {.fd = epoll_fd, .events = POLLIN};
    return poll(&watched, 1, 0) != 0;
}

void quiet_wait(void)
{
    if (stat_fd < 0) {
        stat_fd = open_thread("pinrail-events");
        if (stat_fd < 0) return;
        find_descriptors();
    }
    /* Asked again afterwards: what it took or said meanwhile shows in one of the two. */
    WAIT_UNTIL(!is_ready() && sleeps() && !is_under_way() && !is_ready(), "the plugin's thread to come to rest");
}
