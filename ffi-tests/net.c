/* Each version's own signatures behind one set of calls; see net.h. */
#include "net.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { MOST_MEMBERS = 64 };

int net_traffic_class = -1;

#define TABLE(N) ((const ncclNet_v##N##_t *)net->table)
/* The same call through whichever table this is; for the slots whose signature never changed. */
#define SAME_IN_ALL(CALL)                                                                                         \
    switch (net->version) {                                                                                       \
    case 6: return TABLE(6)->CALL;                                                                                \
    case 7: return TABLE(7)->CALL;                                                                                \
    case 8: return TABLE(8)->CALL;                                                                                \
    case 9: return TABLE(9)->CALL;                                                                                \
    case 10: return TABLE(10)->CALL;                                                                              \
    case 11: return TABLE(11)->CALL;                                                                              \
    case 12: return TABLE(12)->CALL;                                                                              \
    default: FAIL("no table version %d", net->version);                                                           \
    }

/* ---- loading ------------------------------------------------------------------------------------------------- */

void net_load(struct net *net, int version)
{
    char symbol[32];
    *net = (struct net){.version = version};
    net->library = dlopen(plugin_path(), RTLD_NOW | RTLD_LOCAL);
    if (!net->library) FAIL("dlopen: %s", dlerror());
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
    net->table = dlsym(net->library, symbol);
    if (!net->table) FAIL("dlsym: %s", dlerror());
}

void net_unload(struct net *net)
{
    if (dlclose(net->library) != 0) FAIL("dlclose: %s", dlerror());
    net->library = NULL;
    net->table = NULL;
}

void net_start_profiled(struct net *net, int version, ncclProfilerCallback_t profiler)
{
    int ndev = -1;
    net_load(net, version);
    net->profiler = profiler;
    CHECK_OK(net_init(net, 0x1122334455667788u, ffi_logger));
    CHECK_OK(net_devices(net, &ndev));
    if (ndev < 1) FAIL("%d devices on the software RNIC", ndev);
}

void net_start(struct net *net, int version)
{
    net_start_profiled(net, version, NULL);
}

void net_stop(struct net *net)
{
    CHECK_OK(net_finalize(net, net->context));
    net_unload(net);
}

bool net_has_int_sizes(int version)
{
    return version <= 8;
}

const void *net_slot(const struct net *net, size_t offset)
{
    const void *slot;
    memcpy(&slot, (const char *)net->table + offset, sizeof slot);
    return slot;
}

size_t net_table_size(int version)
{
    static const size_t sizes[] = {136, 152, 152, 160, 160, 176, 176};
    return sizes[version - FIRST_VERSION];
}

size_t net_properties_size(int version)
{
    static const size_t sizes[] = {48, 56, 64, 104, 104, 112, 128};
    return sizes[version - FIRST_VERSION];
}

/* ---- process-wide calls -------------------------------------------------------------------------------------- */

ncclResult_t net_init_context(struct net *net, uint64_t comm_id, ncclDebugLogger_t logger, void **context)
{
    ncclNetCommConfig_t config = {.trafficClass = net_traffic_class};
    switch (net->version) {
    case 6: return TABLE(6)->init(logger);
    case 7: return TABLE(7)->init(logger);
    case 8: return TABLE(8)->init(logger);
    case 9: return TABLE(9)->init(logger);
    case 10: return TABLE(10)->init(logger, net->profiler);
    case 11: return TABLE(11)->init(context, comm_id, &config, logger, net->profiler);
    default: return TABLE(12)->init(context, comm_id, &config, logger, net->profiler);
    }
}

ncclResult_t net_init(struct net *net, uint64_t comm_id, ncclDebugLogger_t logger)
{
    return net_init_context(net, comm_id, logger, &net->context);
}

ncclResult_t net_finalize(const struct net *net, void *context)
{
    if (net->version == 11) return TABLE(11)->finalize(context);
    if (net->version == 12) return TABLE(12)->finalize(context);
    return ncclSuccess;
}

ncclResult_t net_devices(const struct net *net, int *ndev)
{
    SAME_IN_ALL(devices(ndev));
}

ncclResult_t net_get_properties_raw(const struct net *net, int dev, void *properties)
{
    SAME_IN_ALL(getProperties(dev, properties));
}

#define COPY(FIELD) to->FIELD = from.FIELD
#define COPY_FROM_6                                                                                               \
    (COPY(name), COPY(pciPath), COPY(guid), COPY(ptrSupport), COPY(speed), COPY(port), COPY(latency),             \
     COPY(maxComms), COPY(maxRecvs))
#define COPY_FROM_7 (COPY_FROM_6, to->netDeviceType = (int)from.netDeviceType, COPY(netDeviceVersion))
#define COPY_FROM_8 (COPY_FROM_7, COPY(regIsGlobal))
#define COPY_FROM_9                                                                                               \
    (COPY_FROM_8, COPY(forceFlush), to->ndevs = from.vProps.ndevs,                                                \
     memcpy(to->devs, from.vProps.devs, sizeof from.vProps.devs), COPY(maxP2pBytes), COPY(maxCollBytes))
#define COPY_FROM_11 (COPY_FROM_9, COPY(maxMultiRequestSize))
#define COPY_FROM_12 (COPY_FROM_11, COPY(railId), COPY(planeId))
#define PROPERTIES(N, COPY_ALL)                                                                                   \
    {                                                                                                             \
        ncclNetProperties_v##N##_t from;                                                                          \
        memset(&from, 0xA5, sizeof from);                                                                         \
        ncclResult_t result = TABLE(N)->getProperties(dev, &from);                                                \
        if (result == ncclSuccess) COPY_ALL;                                                                      \
        return result;                                                                                            \
    }

ncclResult_t net_get_properties(const struct net *net, int dev, struct net_properties *to)
{
    *to = (struct net_properties){.ndevs = 1,
                                  .devs = {dev},
                                  .maxP2pBytes = (size_t)1 << 30,
                                  .maxCollBytes = (size_t)1 << 29,
                                  .maxMultiRequestSize = 1,
                                  .railId = -1,
                                  .planeId = -1};
    switch (net->version) {
    case 6: PROPERTIES(6, COPY_FROM_6)
    case 7: PROPERTIES(7, COPY_FROM_7)
    case 8: PROPERTIES(8, COPY_FROM_8)
    case 9: PROPERTIES(9, COPY_FROM_9)
    case 10: PROPERTIES(10, COPY_FROM_9)
    case 11: PROPERTIES(11, COPY_FROM_11)
    default: PROPERTIES(12, COPY_FROM_12)
    }
}

int net_fuse(const struct net *net, int n)
{
    int dev = -1;
    if (net->version >= 12) {
        ncclNetVDeviceProps8_t props = {.ndevs = n};
        for (int i = 0; i < n; i++) props.devs[i] = i;
        CHECK_OK(TABLE(12)->makeVDevice(&dev, &props));
    } else {
        ncclNetVDeviceProps4_t props = {.ndevs = n};
        for (int i = 0; i < n; i++) props.devs[i] = i;
        CHECK_OK(TABLE(9)->makeVDevice(&dev, &props));
    }
    return dev;
}

/* ---- connections --------------------------------------------------------------------------------------------- */

ncclResult_t net_listen(const struct net *net, int dev, void *handle, void **listen_comm)
{
    switch (net->version) {
    case 6: return TABLE(6)->listen(dev, handle, listen_comm);
    case 7: return TABLE(7)->listen(dev, handle, listen_comm);
    case 8: return TABLE(8)->listen(dev, handle, listen_comm);
    case 9: return TABLE(9)->listen(dev, handle, listen_comm);
    case 10: return TABLE(10)->listen(dev, handle, listen_comm);
    case 11: return TABLE(11)->listen(net->context, dev, handle, listen_comm);
    default: return TABLE(12)->listen(net->context, dev, handle, listen_comm);
    }
}

ncclResult_t net_connect_device(const struct net *net, int dev, void *handle, void **send_comm,
                                ncclNetDeviceHandle_t **device_comm)
{
    ncclNetCommConfig_t config = {.trafficClass = net_traffic_class};
    switch (net->version) {
    case 6: return TABLE(6)->connect(dev, handle, send_comm);
    case 7: return TABLE(7)->connect(dev, handle, send_comm, device_comm);
    case 8: return TABLE(8)->connect(dev, handle, send_comm, device_comm);
    case 9: return TABLE(9)->connect(dev, handle, send_comm, device_comm);
    case 10: return TABLE(10)->connect(dev, &config, handle, send_comm, device_comm);
    case 11: return TABLE(11)->connect(net->context, dev, handle, send_comm, device_comm);
    default: return TABLE(12)->connect(net->context, dev, handle, send_comm, device_comm);
    }
}

ncclResult_t net_accept_device(const struct net *net, void *listen_comm, void **recv_comm,
                               ncclNetDeviceHandle_t **device_comm)
{
    switch (net->version) {
    case 6: return TABLE(6)->accept(listen_comm, recv_comm);
    case 7: return TABLE(7)->accept(listen_comm, recv_comm, device_comm);
    case 8: return TABLE(8)->accept(listen_comm, recv_comm, device_comm);
    case 9: return TABLE(9)->accept(listen_comm, recv_comm, device_comm);
    case 10: return TABLE(10)->accept(listen_comm, recv_comm, device_comm);
    case 11: return TABLE(11)->accept(listen_comm, recv_comm, device_comm);
    default: return TABLE(12)->accept(listen_comm, recv_comm, device_comm);
    }
}

/* NCCL passes a pointer that holds NULL and expects it to hold NULL afterwards on a device that needs no driver. */
ncclResult_t net_connect(const struct net *net, int dev, void *handle, void **send_comm)
{
    ncclNetDeviceHandle_t *device_comm = NULL;
    ncclResult_t result = net_connect_device(net, dev, handle, send_comm, &device_comm);
    CHECK_PTR(device_comm, NULL);
    return result;
}

ncclResult_t net_accept(const struct net *net, void *listen_comm, void **recv_comm)
{
    ncclNetDeviceHandle_t *device_comm = NULL;
    ncclResult_t result = net_accept_device(net, listen_comm, recv_comm, &device_comm);
    CHECK_PTR(device_comm, NULL);
    return result;
}

ncclResult_t net_close_send(const struct net *net, void *send_comm)
{
    SAME_IN_ALL(closeSend(send_comm));
}

ncclResult_t net_close_recv(const struct net *net, void *recv_comm)
{
    SAME_IN_ALL(closeRecv(recv_comm));
}

ncclResult_t net_close_listen(const struct net *net, void *listen_comm)
{
    SAME_IN_ALL(closeListen(listen_comm));
}

/* ---- registration -------------------------------------------------------------------------------------------- */

ncclResult_t net_reg_mr(const struct net *net, void *comm, void *data, size_t size, int type, void **mhandle)
{
    switch (net->version) {
    case 6: return TABLE(6)->regMr(comm, data, (int)size, type, mhandle);
    case 7: return TABLE(7)->regMr(comm, data, (int)size, type, mhandle);
    case 8: return TABLE(8)->regMr(comm, data, size, type, mhandle);
    case 9: return TABLE(9)->regMr(comm, data, size, type, mhandle);
    case 10: return TABLE(10)->regMr(comm, data, size, type, mhandle);
    case 11: return TABLE(11)->regMr(comm, data, size, type, mhandle);
    default: return TABLE(12)->regMr(comm, data, size, type, mhandle);
    }
}

ncclResult_t net_reg_mr_dmabuf(const struct net *net, void *comm, void *data, size_t size, int type,
                               uint64_t offset, int fd, void **mhandle)
{
    SAME_IN_ALL(regMrDmaBuf(comm, data, size, type, offset, fd, mhandle));
}

ncclResult_t net_dereg_mr(const struct net *net, void *comm, void *mhandle)
{
    SAME_IN_ALL(deregMr(comm, mhandle));
}

/* ---- data path ----------------------------------------------------------------------------------------------- */

ncclResult_t net_isend_for(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle,
                           void *phandle, void **request)
{
    switch (net->version) {
    case 6: return TABLE(6)->isend(comm, data, (int)size, tag, mhandle, request);
    case 7: return TABLE(7)->isend(comm, data, (int)size, tag, mhandle, request);
    case 8: return TABLE(8)->isend(comm, data, (int)size, tag, mhandle, request);
    case 9: return TABLE(9)->isend(comm, data, size, tag, mhandle, request);
    case 10: return TABLE(10)->isend(comm, data, size, tag, mhandle, phandle, request);
    case 11: return TABLE(11)->isend(comm, data, size, tag, mhandle, phandle, request);
    default: return TABLE(12)->isend(comm, data, size, tag, mhandle, phandle, request);
    }
}

ncclResult_t net_isend(const struct net *net, void *comm, void *data, size_t size, int tag, void *mhandle,
                       void **request)
{
    return net_isend_for(net, comm, data, size, tag, mhandle, NULL, request);
}

ncclResult_t net_irecv_for(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags,
                           void **mhandles, void **phandles, void **request)
{
    int narrow[MOST_MEMBERS];
    int *int_sizes = sizes ? narrow : NULL;
    for (int i = 0; sizes && net_has_int_sizes(net->version) && i < n && i < MOST_MEMBERS; i++)
        narrow[i] = (int)sizes[i];
    switch (net->version) {
    case 6: return TABLE(6)->irecv(comm, n, data, int_sizes, tags, mhandles, request);
    case 7: return TABLE(7)->irecv(comm, n, data, int_sizes, tags, mhandles, request);
    case 8: return TABLE(8)->irecv(comm, n, data, int_sizes, tags, mhandles, request);
    case 9: return TABLE(9)->irecv(comm, n, data, sizes, tags, mhandles, request);
    case 10: return TABLE(10)->irecv(comm, n, data, sizes, tags, mhandles, phandles, request);
    case 11: return TABLE(11)->irecv(comm, n, data, sizes, tags, mhandles, phandles, request);
    default: return TABLE(12)->irecv(comm, n, data, sizes, tags, mhandles, phandles, request);
    }
}

ncclResult_t net_irecv(const struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags,
                       void **mhandles, void **request)
{
    return net_irecv_for(net, comm, n, data, sizes, tags, mhandles, NULL, request);
}

ncclResult_t net_iflush(const struct net *net, void *comm, int n, void **data, int *sizes, void **mhandles,
                        void **request)
{
    SAME_IN_ALL(iflush(comm, n, data, sizes, mhandles, request));
}

ncclResult_t net_test(const struct net *net, void *request, int *done, int *sizes)
{
    SAME_IN_ALL(test(request, done, sizes));
}
