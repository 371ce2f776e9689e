/*
 * One client for every version of the table.
 *
 * `struct net` is a loaded plugin seen through one table version; the net_* calls go through that version's own
 * signatures (int or size_t sizes, with or without context, device handle, phandle), so a scenario written once runs
 * against the ABI of each version. What a version cannot say (no context, no finalize) is left out, not imitated.
 */
#ifndef FFI_TESTS_NET_H
#define FFI_TESTS_NET_H

#include "harness.h"

struct net {
    int version;
    void *library;     /* dlopen handle */
    const void *table; /* ncclNet_vN_t */
    void *context;     /* v11, v12 */
    ncclProfilerCallback_t profiler; /* given to init in v10 and later */
};

/* The traffic class that communicators ask for, -1 for none: a word of init in v11 and v12, of connect in v10. */
extern int net_traffic_class;

/* The properties of every version; what a version has no field for keeps the value noted here. */
struct net_properties {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal; /* 0 before v8 */
    int forceFlush;  /* 0 before v9 */
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;    /* 0 in v6 */
    int netDeviceVersion; /* 0 in v6 */
    int ndevs;            /* 1 before v9 */
    int devs[8];
    size_t maxP2pBytes;  /* 2^30 before v9 */
    size_t maxCollBytes; /* 2^29 before v9 */
    int maxMultiRequestSize; /* 1 before v11 */
    int railId, planeId;     /* -1 before v12 */
};

/* dlopen as NCCL does it, and the table of one version. */
void net_load(struct net *net, int version);
void net_unload(struct net *net);
/* As net_start, with a profiler. */
void net_start_profiled(struct net *net, int version, ncclProfilerCallback_t profiler);
/* net_load, init with the test's logger, and at least one device. */
void net_start(struct net *net, int version);
/* finalize where the version has it, then net_unload. */
void net_stop(struct net *net);

ncclResult_t net_init(struct net *net, uint64_t comm_id, ncclDebugLogger_t logger);
ncclResult_t net_init_context(struct net *net, uint64_t comm_id, ncclDebugLogger_t logger, void **context);
ncclResult_t net_devices(const struct net *net, int *ndev);
ncclResult_t net_get_properties(const struct net *net, int dev, struct net_properties *properties);
/* The version's own structure as it is, for tests about its bytes. */
ncclResult_t net_get_properties_raw(const struct net *net, int dev, void *properties);
size_t net_properties_size(int version);
size_t net_table_size(int version);
/* Makes a device of the first `n`; v9 and later, which take four, and eight from v12 on. Its number. */
int net_fuse(const struct net *net, int n);
ncclResult_t net_listen(const struct net *net, int dev, void *handle, void **listen_comm);
ncclResult_t net_connect(const struct net *net, int dev, void *handle, void **send_comm);
ncclResult_t net_accept(const struct net *net, void *listen_comm, void **recv_comm);
/* With the pointer for the device-side communicator, which may be NULL; v6 has none and ignores it. */
ncclResult_t net_connect_device(const struct net *net, int dev, void *handle, void **send_comm,
                                ncclNetDeviceHandle_t **device_comm);
ncclResult_t net_accept_device(const struct net *net, void *listen_comm, void **recv_comm,
                               ncclNetDeviceHandle_t **device_comm);
ncclResult_t net_reg_mr(const struct net *net, void *comm, void *data, size_t size, int type, void **mhandle);
ncclResult_t net_reg_mr_dmabuf(const struct net *net, void *comm, void *data, size_t size, int type,
                               uint64_t offset, int fd, void **mhandle);
ncclResult_t net_dereg_mr(const struct net *net, void *comm, void *mhandle);
ncclResult_t net_isend(const struct net *net, void *send_comm, void *data, size_t size, int tag, void *mhandle,
                       void **request);
ncclResult_t net_irecv(const struct net *net, void *recv_comm, int n, void **data, size_t *sizes, int *tags,
                       void **mhandles, void **request);
/* The same with what events for a profiler belong to, which versions before v10 cannot say. */
ncclResult_t net_isend_for(const struct net *net, void *send_comm, void *data, size_t size, int tag, void *mhandle,
                           void *phandle, void **request);
ncclResult_t net_irecv_for(const struct net *net, void *recv_comm, int n, void **data, size_t *sizes, int *tags,
                           void **mhandles, void **phandles, void **request);
ncclResult_t net_iflush(const struct net *net, void *recv_comm, int n, void **data, int *sizes, void **mhandles,
                        void **request);
ncclResult_t net_test(const struct net *net, void *request, int *done, int *sizes);
ncclResult_t net_close_send(const struct net *net, void *send_comm);
ncclResult_t net_close_recv(const struct net *net, void *recv_comm);
ncclResult_t net_close_listen(const struct net *net, void *listen_comm);
/* Success without a call where the version has no finalize. */
ncclResult_t net_finalize(const struct net *net, void *context);

/* The sizes that are an int in v6 to v8 (isend, irecv) and in v6 and v7 (regMr). */
bool net_has_int_sizes(int version);
/* The function pointer at a byte offset of the table. */
const void *net_slot(const struct net *net, size_t offset);

#endif
