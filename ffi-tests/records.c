/* Records of events that a test asked for: one JSON document per file, in a folder of the test's own. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "records.h"

static char folder[64];

void want_records(void)
{
    snprintf(folder, sizeof folder, "/tmp/pinrail-records-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    setenv("PINRAIL_REPORT_DIR", folder, 1);
}

int records(char *text, size_t room)
{
    struct dirent **names;
    int count = scandir(folder, &names, NULL, versionsort), found = 0;
    CHECK(count >= 0);
    for (int i = 0; i < count; i++) {
        /* The status of all connections comes with a failure; what a test asks for is the failure. */
        if (names[i]->d_name[0] == '.' || strncmp(names[i]->d_name, "pinrail-status-", 15) == 0) continue;
        char path[400];
        struct stat status;
        snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        FILE *file = fopen(path, "r");
        CHECK(file != NULL);
        CHECK_EQ(fstat(fileno(file), &status), 0);
        CHECK_EQ(status.st_mode & 0777, 0600);
        size_t size = fread(text, 1, room - 1, file);
        text[size] = 0;
        CHECK_EQ(text[0], '{'); /* whole, and nothing else in the folder */
        CHECK(size > 2 && strcmp(text + size - 2, "}\n") == 0);
        fclose(file);
        found++;
    }
    for (int i = 0; i < count; i++) free(names[i]);
    free(names);
    return found;
}

void forget_records(void)
{
    DIR *entries = opendir(folder);
    CHECK(entries != NULL);
    for (struct dirent *entry; (entry = readdir(entries));)
        if (entry->d_name[0] != '.') CHECK_EQ(unlinkat(dirfd(entries), entry->d_name, 0), 0);
    closedir(entries);
    CHECK_EQ(rmdir(folder), 0);
}
