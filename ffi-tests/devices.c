/*
 * Which devices the plugin has, as the operator's settings and the host's files say, and what it tells of its settings.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "host.h"
#include "pair.h"
#include "softrnic.h"

/* NCCL_IB_DISABLE means all of RDMA; NCCL then goes on to its next network. */
static void disabled(int version)
{
    struct net net;
    size_t mark = log_mark();
    setenv("NCCL_IB_DISABLE", "1", 1);
    net_load(&net, version);
    CHECK_REFUSED(net_init(&net, 1, ffi_logger));
    CHECK_EQ(log_warnings_since(mark), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_DISABLE=1 turns pinrail off too; NCCL_NET=pinrail would override it"), 1);
    net_unload(&net);
}

static void disabled_but_asked_for(int version)
{
    struct net net;
    struct pair pair;
    size_t mark = log_mark();
    host_set((const char *[]){"NCCL_IB_DISABLE=1", "NCCL_NET=Pinrail", NULL});
    net_start(&net, version);
    CHECK_EQ(log_warnings_since(mark), 0);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- the device filter --------------------------------------------------------------------------------------- */

struct filter {
    const char *text;
    const char *devices; /* name:port, as reported */
    int rail, plane;     /* of the first */
    const char *told;
};
static const struct filter filters[] = {
    {"mlx5_1", "mlx5_1:1 mlx5_1:2 mlx5_11:1 mlx5_11:2 ", -1, -1, "mlx5_0:1 is left out: NCCL_IB_HCA does not list it"},
    {"=mlx5_1", "mlx5_1:1 mlx5_1:2 ", -1, -1, "mlx5_11:1 is left out: NCCL_IB_HCA does not list it"},
    {"^mlx5_1", "mlx5_0:1 mlx5_0:2 ", -1, -1, "mlx5_11:2 is left out: NCCL_IB_HCA excludes `mlx5_1`"},
    {"^=mlx5_1", "mlx5_0:1 mlx5_0:2 mlx5_11:1 mlx5_11:2 ", -1, -1, "mlx5_1:1 is left out: NCCL_IB_HCA excludes"},
    {"=mlx5_0:2,mlx5_1:1", "mlx5_0:2 mlx5_1:1 ", -1, -1, "mlx5_0:1 is left out"},
    {"=mlx5_0:1:3:2,mlx5_1:1:4", "mlx5_0:1 mlx5_1:1 ", 3, 2, "using mlx5_0:1 100000 Mb/s, mlx5_1:1 100000 Mb/s"},
    {"=mlx5_1,mlx5_2:1", "mlx5_1:1 mlx5_1:2 ", -1, -1, "NCCL_IB_HCA: mlx5_2:1 matches no port of this host"},
};

static void filtered(int version, int socket, void *argument)
{
    const struct filter *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct net_properties p;
    char devices[256] = "";
    int ndev = 0;
    size_t mark = log_mark();
    host_set((const char *[]){"SOFTRNIC_DEVICES=3", "SOFTRNIC_PORTS=2", "SOFTRNIC_NAME=mlx5_0,mlx5_1,mlx5_11", NULL});
    setenv("NCCL_IB_HCA", wanted->text, 1);
    net_start(&net, LAST_VERSION);
    CHECK_OK(net_devices(&net, &ndev));
    for (int i = 0; i < ndev; i++) {
        char one[64];
        CHECK_OK(net_get_properties(&net, i, &p));
        snprintf(one, sizeof one, "%s:%d ", p.name, p.port);
        strncat(devices, one, sizeof devices - strlen(devices) - 1);
    }
    CHECK_STR(devices, wanted->devices);
    CHECK_OK(net_get_properties(&net, 0, &p));
    CHECK_EQ(p.railId, wanted->rail);
    CHECK_EQ(p.planeId, wanted->plane);
    if (!log_matches_since(mark, wanted->told)) FAIL("%s: nothing is said of \"%s\"", wanted->text, wanted->told);
    net_stop(&net);
}

static void filter_grammar(int version)
{
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
        run_one(version, (struct role){filters[i].text, filtered, false}, (void *)&filters[i]);
}

/* ---- PCI ------------------------------------------------------------------------------------------------------ */

struct placed {
    const char *name, *path;
    int port;
};
struct layout {
    const char *name, *order, *merge_vfs;
    struct placed devices[5];
};
#define SYS "/sys/devices/pci0000:00/"
static const struct layout layouts[] = {
    {"in PCI order", "1", "1",
     {{"mlx5_2", SYS "0000:3b:00.0", 1}, {"mlx5_1", SYS "0000:c1:00.0", 1}, {"mlx5_3", SYS "0000:c1:00.0", 2},
      {"mlx5_4", SYS "0000:c1:00.0", 3}, {"mlx5_0", NULL, 1}}},
    {"in the library's order", "0", "1",
     {{"mlx5_0", NULL, 1}, {"mlx5_1", SYS "0000:c1:00.0", 1}, {"mlx5_2", SYS "0000:3b:00.0", 1},
      {"mlx5_3", SYS "0000:c1:00.0", 2}, {"mlx5_4", SYS "0000:c1:00.0", 3}}},
    {"virtual functions apart", "1", "0",
     {{"mlx5_2", SYS "0000:3b:00.0", 1}, {"mlx5_1", SYS "0000:c1:00.0", 1}, {"mlx5_3", SYS "0000:c1:00.0", 2},
      {"mlx5_4", SYS "0000:c1:02.0", 1}, {"mlx5_0", NULL, 1}}},
};

static void laid_out(int version, int socket, void *argument)
{
    const struct layout *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    int ndev = 0;
    host_set((const char *[]){"SOFTRNIC_DEVICES=5", "SOFTRNIC_NAME=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4", NULL});
    setenv("NCCL_IB_DEVICE_PCI_ORDER", wanted->order, 1);
    setenv("NCCL_IB_MERGE_VFS", wanted->merge_vfs, 1);
    host_sysfs();
    host_pci("mlx5_1", "pci0000:00/0000:c1:00.0");
    host_pci("mlx5_2", "pci0000:00/0000:3b:00.1");
    host_pci("mlx5_3", "pci0000:00/0000:c1:00.1"); /* the other function of mlx5_1's adapter */
    host_pci("mlx5_4", "pci0000:00/0000:c1:02.3"); /* a virtual one */
    net_start(&net, LAST_VERSION);
    CHECK_OK(net_devices(&net, &ndev));
    CHECK_EQ(ndev, 5);
    for (int i = 0; i < ndev; i++) {
        struct net_properties p;
        CHECK_OK(net_get_properties(&net, i, &p));
        CHECK_STR(p.name, wanted->devices[i].name);
        if (wanted->devices[i].path) CHECK_STR(p.pciPath, wanted->devices[i].path);
        else CHECK_PTR(p.pciPath, NULL);
        CHECK_EQ(p.port, wanted->devices[i].port);
    }
    net_stop(&net);
}

static void pci_paths_ports_and_order(int version)
{
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        run_one(version, (struct role){layouts[i].name, laid_out, false}, (void *)&layouts[i]);
}

/* ---- speed ---------------------------------------------------------------------------------------------------- */

static const struct speed {
    const char *name, *lane, *width, *query;
    int megabits;
} speeds[] = {
    {"SDR 1X", "1", "1", "0", 2500},          {"QDR 4X", "4", "2", "0", 40000},
    {"FDR10 4X", "8", "2", "0", 40000},       {"FDR 4X", "16", "2", "0", 56000},
    {"EDR 8X", "32", "4", "0", 200000},       {"HDR 2X", "64", "16", "0", 100000},
    {"NDR 4X", "128", "2", "0", 400000},      {"XDR 4X", "256", "2", "0", 800000},
    {"XDR 4X, asked", "256", "2", "1", 800000}, {"HDR 12X, asked", "64", "8", "1", 600000},
};

static void fast(int version, int socket, void *argument)
{
    const struct speed *wanted = argument;
    (void)version, (void)socket;
    struct net net;
    struct net_properties p;
    setenv("SOFTRNIC_SPEED", wanted->lane, 1);
    setenv("SOFTRNIC_WIDTH", wanted->width, 1);
    setenv("NCCL_IB_QUERY_PORT_SPEED", wanted->query, 1);
    net_start(&net, LAST_VERSION);
    CHECK_OK(net_get_properties(&net, 0, &p));
    CHECK_EQ(p.speed, wanted->megabits);
    net_stop(&net);
}

static void speeds_up_to_xdr(int version)
{
    for (size_t i = 0; i < sizeof speeds / sizeof *speeds; i++)
        run_one(version, (struct role){speeds[i].name, fast, false}, (void *)&speeds[i]);
}

/* What the kernel has and the verbs library lacks is a missing provider, and nobody would know. */
static void a_provider_is_missing(int version)
{
    (void)version;
    struct net net;
    size_t mark = log_mark();
    host_sysfs();
    host_pci("bnxt_re0", "pci0000:00/0000:c1:00.0");
    net_start(&net, LAST_VERSION);
    CHECK_EQ(log_matches_since(mark, "the kernel has bnxt_re0, but the verbs library does not offer it"), 1);
    net_stop(&net);
}

/* Devices are put into another order than the library's after they were found; stock's threads for events hold on to places
 * in the list and can speak of the wrong device. */
static void an_event_names_its_device(int version)
{
    struct net net;
    struct net_properties p;
    struct pair pair;
    host_set((const char *[]){"SOFTRNIC_DEVICES=2", "SOFTRNIC_NAME=mlx5_0,mlx5_1", "SOFTRNIC_GIDS=10.0.0.1,-", NULL});
    host_sysfs();
    host_pci("mlx5_0", "pci0000:00/0000:c1:00.0");
    host_pci("mlx5_1", "pci0000:00/0000:3b:00.0");
    net_start(&net, version);
    CHECK_OK(net_get_properties(&net, 0, &p));
    CHECK_STR(p.name, "mlx5_1");
    pair_open(&net, 0, &pair);
    size_t mark = log_mark();
    rnic_set_gid("mlx5_1", 1, "10.0.0.9");
    WAIT_UNTIL(log_matches_since(mark, "IBV_EVENT_GID_CHANGE"), "the event");
    CHECK_EQ(log_matches_since(mark, "mlx5_1:1: IBV_EVENT_GID_CHANGE; GID 0 10.0.0.2, which connections use, is as it was"), 1);
    pair_close(&pair);
    net_stop(&net);
}

/* Stock counts an init that failed, and takes the next one for a second user of what is not there. */
static void init_after_a_failed_init(int version)
{
    struct net net;
    struct pair pair;
    int ndev = 0;
    setenv("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1", 1);
    net_load(&net, version);
    CHECK_REFUSED(net_init(&net, 1, ffi_logger));
    CHECK_REFUSED(net_devices(&net, &ndev));
    setenv("NCCL_IBVERBS_LIB", softrnic_path(), 1);
    CHECK_OK(net_init(&net, 1, ffi_logger));
    CHECK_OK(net_devices(&net, &ndev));
    CHECK(ndev >= 1);
    pair_open(&net, 0, &pair);
    pair_message(&pair, 1000, 0, 1);
    pair_close(&pair);
    net_stop(&net);
}

/* ---- settings ------------------------------------------------------------------------------------------------- */

static void settings_are_told_once(int version)
{
    struct net net;
    char path[] = "/tmp/pinrail-conf-XXXXXX", told[256];
    static const char text[] = "# a comment\nNCCL_IB_SL=5\nNCCL_IB_TIMEOUT=18\n";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    size_t mark = log_mark();
    setenv("NCCL_CONF_FILE", path, 1);
    host_set((const char *[]){"NCCL_IB_TIMEOUT=99", "NCCL_IB_OOO_RQ=1", "NCCL_IB_TIMOUT=22", "NCCL_SOCKET_IFNAMES=lo",
                              "NCCL_IB_RETRY_CNT=many", NULL});
    net_start(&net, version);
    unlink(path);
    CHECK_EQ(log_matches_since(mark, "settings: "), 1);
    snprintf(told, sizeof told, "NCCL_IB_SL=5 (%s)", path);
    CHECK_EQ(log_matches_since(mark, told), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_TIMEOUT=31 (environment: 99)"), 1);
    CHECK_EQ(log_matches_since(mark, "unlike stock: NCCL_IB_USE_INLINE=1 (stock 0)"), 1);
    CHECK_EQ(log_matches_since(mark, "out of range; accepted is a number from 0 to 31; using 31 (8796.093 s per attempt)"), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_OOO_RQ=1 (environment) has no effect in pinrail"), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_TIMOUT (environment) is not known"), 1);
    CHECK_EQ(log_matches_since(mark, "the nearest known name is NCCL_SOCKET_IFNAME"), 1);
    CHECK_EQ(log_matches_since(mark, "NCCL_IB_RETRY_CNT=\"many\" (environment) cannot be read"), 1);
    net_stop(&net);
}

/* Each connection holds a socket, and the usual soft limit is 1024. */
static void file_descriptors_are_raised(int version)
{
    (void)version;
    struct net net;
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK(limit.rlim_max > 128);
    limit.rlim_cur = 128;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    net_start(&net, LAST_VERSION);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_EQ(limit.rlim_cur, limit.rlim_max);
    net_stop(&net);
}

const struct ffi_case ffi_cases[] = {
    EACH(disabled),
    EACH(disabled_but_asked_for),
    ONCE(filter_grammar),
    ONCE(pci_paths_ports_and_order),
    ONCE(speeds_up_to_xdr),
    ONCE(a_provider_is_missing),
    EACH(an_event_names_its_device),
    EACH(init_after_a_failed_init),
    EACH(settings_are_told_once),
    ONCE(file_descriptors_are_raised),
    {0},
};
