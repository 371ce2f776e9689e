/*
 * Hosts made for a test: settings for the plugin and the software RNIC, and the sysfs files that the plugin reads.
 *
 * Both read their settings once in a process, so that a table of hosts is a process for each row (run_one).
 */
#ifndef FFI_TESTS_HOST_H
#define FFI_TESTS_HOST_H

#include "harness.h"

/* Sets "NAME=value" settings of this process up to a NULL. */
void host_set(const char *const *settings);
/* Makes a folder that takes the place of /sys from here on (PINRAIL_SYSFS), and goes when the process ends. */
void host_sysfs(void);
/* A file of that tree, with the folders above it; the path is a printf format. */
__attribute__((format(printf, 2, 3))) void host_file(const char *text, const char *path, ...);
/* The PCI function of an RDMA device, as "pci0000:3a/0000:3b:00.1". */
void host_pci(const char *device, const char *function);
/* The kinds of the GIDs of a device's first port in order: '1' and '2' for RoCE v1 and v2, anything else for none. */
void host_gid_kinds(const char *device, const char *kinds);

#endif
