/* Hosts made for a test; host.h says what each function promises. */
#include "host.h"

#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];

void host_set(const char *const *settings)
{
    for (; *settings; settings++) {
        const char *equals = strchr(*settings, '=');
        char name[64];
        CHECK(equals != NULL && equals - *settings < (ptrdiff_t)sizeof name);
        snprintf(name, sizeof name, "%.*s", (int)(equals - *settings), *settings);
        CHECK_EQ(setenv(name, equals + 1, 1), 0);
    }
}

static int forget(const char *path, const struct stat *status, int kind, struct FTW *where)
{
    (void)status, (void)kind, (void)where;
    return remove(path);
}

static void remove_root(void)
{
    nftw(root, forget, 16, FTW_DEPTH | FTW_PHYS);
}

void host_sysfs(void)
{
    snprintf(root, sizeof root, "/tmp/pinrail-sysfs-XXXXXX");
    CHECK(mkdtemp(root) != NULL);
    CHECK_EQ(atexit(remove_root), 0);
    CHECK_EQ(setenv("PINRAIL_SYSFS", root, 1), 0);
}

/* Makes the folders above `path`. */
static void make_room(char *path)
{
    for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0755); /* one that is there already shows when its contents cannot be made */
        *slash = '/';
    }
}

void host_file(const char *text, const char *path, ...)
{
    char full[PATH_MAX];
    va_list args;
    int length = snprintf(full, sizeof full, "%s/", root);
    va_start(args, path);
    vsnprintf(full + length, sizeof full - (size_t)length, path, args);
    va_end(args);
    make_room(full);
    FILE *file = fopen(full, "we");
    if (!file) FAIL("%s cannot be made", full);
    CHECK(fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

void host_pci(const char *device, const char *function)
{
    char target[PATH_MAX], link[PATH_MAX];
    host_file("0\n", "devices/%s/numa_node", function);
    snprintf(target, sizeof target, "%s/devices/%s", root, function);
    snprintf(link, sizeof link, "%s/class/infiniband/%s/device", root, device);
    make_room(link);
    CHECK_EQ(symlink(target, link), 0);
}

void host_gid_kinds(const char *device, const char *kinds)
{
    for (int index = 0; kinds[index]; index++) {
        const char *text = kinds[index] == '2' ? "RoCE v2\n" : kinds[index] == '1' ? "IB/RoCE v1\n" : NULL;
        if (text) host_file(text, "class/infiniband/%s/ports/1/gid_attrs/types/%d", device, index);
    }
}
