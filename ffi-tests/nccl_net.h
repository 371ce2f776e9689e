/*
 * The NCCL network plugin ABI, versions 6 to 12, declared from its description and from nothing else.
 *
 * These declarations are deliberately independent of the plugin's own: every offset and every size is asserted
 * as a literal number at the end of this file, so that one wrong guess on either side cannot hide the other.
 * Names follow NCCL's where NCCL has one.
 */
#ifndef FFI_TESTS_NCCL_NET_H
#define FFI_TESTS_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

enum { NCCL_NET_HANDLE_MAXSIZE = 128, NCCL_NET_MAX_REQUESTS = 32, NCCL_NET_MAX_RECVS = 8 };
enum { NCCL_PTR_HOST = 1, NCCL_PTR_CUDA = 2, NCCL_PTR_DMABUF = 4 };
#define NCCL_NET_OPTIONAL_RECV_COMPLETION ((void *)0x1)

typedef enum { NCCL_NET_DEVICE_HOST = 0, NCCL_NET_DEVICE_UNPACK = 1 } ncclNetDeviceType;

typedef enum {
    NCCL_LOG_NONE = 0,
    NCCL_LOG_VERSION = 1,
    NCCL_LOG_WARN = 2,
    NCCL_LOG_INFO = 3,
    NCCL_LOG_ABORT = 4,
    NCCL_LOG_TRACE = 5
} ncclDebugLogLevel;

typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char *file,
                                  int line, const char *fmt, ...);
typedef ncclResult_t (*ncclProfilerCallback_t)(void **eHandle, int type, void *pHandle,
                                               int64_t pluginId, void *extData);

enum { ncclProfilerNetEventStart = 0, ncclProfilerNetEventStop, ncclProfilerNetEventUpdate, ncclProfilerNetEventUpdateAndStop };

typedef struct {
    uint8_t type; /* bit 0: about a queue pair */
    struct {
        int device;
        uint64_t wr_id;
        int opcode;
        int qpNum;
        size_t length;
    } qp;
} ncclProfilerNetIbDescr_v1_t;

typedef struct {
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
    void *handle;
    size_t size;
    int needsProxyProgress;
} ncclNetDeviceHandle_t; /* one layout from v7 to v12 */

typedef struct {
    int trafficClass;
} ncclNetCommConfig_t; /* v10, v11, v12 */

typedef struct {
    int32_t maxConcurrentPeers;
    int32_t minConcurrentPeers;
    int32_t maxFlowsPerPeer;
    int32_t minFlowsPerPeer;
} ncclNetCommAttr_t; /* v11, v12 */

typedef struct {
    ncclNetCommAttr_t sendCommAttr;
    ncclNetCommAttr_t recvCommAttr;
    uint32_t op;
    uint32_t algo;
    uint32_t proto;
} ncclNetAttr_t; /* v11, v12 */

typedef struct {
    int ndevs;
    int devs[4];
} ncclNetVDeviceProps4_t; /* v9, v10, v11 */

typedef struct {
    int ndevs;
    int devs[8];
} ncclNetVDeviceProps8_t; /* v12 */

/* ---- properties ---------------------------------------------------------------------------------------------- */

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
} ncclNetProperties_v6_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
} ncclNetProperties_v7_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
} ncclNetProperties_v8_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps4_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
} ncclNetProperties_v9_t;

typedef ncclNetProperties_v9_t ncclNetProperties_v10_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps4_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
} ncclNetProperties_v11_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    ncclNetDeviceType netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps8_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId;
    int16_t planeId;
} ncclNetProperties_v12_t;

/* ---- function tables ----------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logFunction);
    ncclResult_t (*devices)(int *ndev);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v6_t *props);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm);
    ncclResult_t (*accept)(void *listenComm, void **recvComm);
    ncclResult_t (*regMr)(void *comm, void *data, int size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles,
                          void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
} ncclNet_v6_t;

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logFunction);
    ncclResult_t (*devices)(int *ndev);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v7_t *props);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **sendDevComm);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **recvDevComm);
    ncclResult_t (*regMr)(void *comm, void *data, int size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles,
                          void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
} ncclNet_v7_t;

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logFunction);
    ncclResult_t (*devices)(int *ndev);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v8_t *props);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **sendDevComm);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **recvDevComm);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles,
                          void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
} ncclNet_v8_t;

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logFunction);
    ncclResult_t (*devices)(int *ndev);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v9_t *props);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **sendDevComm);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **recvDevComm);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                          void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *d, ncclNetVDeviceProps4_t *props);
} ncclNet_v9_t;

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logFunction, ncclProfilerCallback_t profFunction);
    ncclResult_t (*devices)(int *ndev);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v10_t *props);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, ncclNetCommConfig_t *config, void *handle, void **sendComm,
                            ncclNetDeviceHandle_t **sendDevComm);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **recvDevComm);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                          void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                          void **phandles, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *d, ncclNetVDeviceProps4_t *props);
} ncclNet_v10_t;

#define FFI_TABLE_FROM_11(PROPERTIES, VPROPS)                                                                     \
    const char *name;                                                                                             \
    ncclResult_t (*init)(void **ctx, uint64_t commId, ncclNetCommConfig_t *config,                                \
                         ncclDebugLogger_t logFunction, ncclProfilerCallback_t profFunction);                     \
    ncclResult_t (*devices)(int *ndev);                                                                           \
    ncclResult_t (*getProperties)(int dev, PROPERTIES *props);                                                    \
    ncclResult_t (*listen)(void *ctx, int dev, void *handle, void **listenComm);                                  \
    ncclResult_t (*connect)(void *ctx, int dev, void *handle, void **sendComm,                                    \
                            ncclNetDeviceHandle_t **sendDevComm);                                                 \
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **recvDevComm);               \
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);                         \
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,           \
                                void **mhandle);                                                                  \
    ncclResult_t (*deregMr)(void *comm, void *mhandle);                                                           \
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *phandle,         \
                          void **request);                                                                        \
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles,          \
                          void **phandles, void **request);                                                       \
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);      \
    ncclResult_t (*test)(void *request, int *done, int *sizes);                                                   \
    ncclResult_t (*closeSend)(void *sendComm);                                                                    \
    ncclResult_t (*closeRecv)(void *recvComm);                                                                    \
    ncclResult_t (*closeListen)(void *listenComm);                                                                \
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);                                  \
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);                                          \
    ncclResult_t (*makeVDevice)(int *d, VPROPS *props);                                                           \
    ncclResult_t (*finalize)(void *ctx);                                                                          \
    ncclResult_t (*setNetAttr)(void *ctx, ncclNetAttr_t *netAttr);

typedef struct {
    FFI_TABLE_FROM_11(ncclNetProperties_v11_t, ncclNetVDeviceProps4_t)
} ncclNet_v11_t;

typedef struct {
    FFI_TABLE_FROM_11(ncclNetProperties_v12_t, ncclNetVDeviceProps8_t)
} ncclNet_v12_t;

/* ---- the numbers --------------------------------------------------------------------------------------------- */

#define FFI_AT(TYPE, FIELD, OFFSET) _Static_assert(offsetof(TYPE, FIELD) == (OFFSET), #TYPE "." #FIELD)
#define FFI_SIZE(TYPE, SIZE) _Static_assert(sizeof(TYPE) == (SIZE), #TYPE)

#define FFI_TABLE_COMMON(TYPE)                                                                                    \
    FFI_AT(TYPE, name, 0);                                                                                        \
    FFI_AT(TYPE, init, 8);                                                                                        \
    FFI_AT(TYPE, devices, 16);                                                                                    \
    FFI_AT(TYPE, getProperties, 24);                                                                              \
    FFI_AT(TYPE, listen, 32);                                                                                     \
    FFI_AT(TYPE, connect, 40);                                                                                    \
    FFI_AT(TYPE, accept, 48);                                                                                     \
    FFI_AT(TYPE, regMr, 56);                                                                                      \
    FFI_AT(TYPE, regMrDmaBuf, 64);                                                                                \
    FFI_AT(TYPE, deregMr, 72);                                                                                    \
    FFI_AT(TYPE, isend, 80);                                                                                      \
    FFI_AT(TYPE, irecv, 88);                                                                                      \
    FFI_AT(TYPE, iflush, 96);                                                                                     \
    FFI_AT(TYPE, test, 104);                                                                                      \
    FFI_AT(TYPE, closeSend, 112);                                                                                 \
    FFI_AT(TYPE, closeRecv, 120);                                                                                 \
    FFI_AT(TYPE, closeListen, 128)
#define FFI_TABLE_FROM_7(TYPE)                                                                                    \
    FFI_TABLE_COMMON(TYPE);                                                                                       \
    FFI_AT(TYPE, getDeviceMr, 136);                                                                               \
    FFI_AT(TYPE, irecvConsumed, 144)

FFI_TABLE_COMMON(ncclNet_v6_t);
FFI_SIZE(ncclNet_v6_t, 136);
FFI_TABLE_FROM_7(ncclNet_v7_t);
FFI_SIZE(ncclNet_v7_t, 152);
FFI_TABLE_FROM_7(ncclNet_v8_t);
FFI_SIZE(ncclNet_v8_t, 152);
FFI_TABLE_FROM_7(ncclNet_v9_t);
FFI_AT(ncclNet_v9_t, makeVDevice, 152);
FFI_SIZE(ncclNet_v9_t, 160);
FFI_TABLE_FROM_7(ncclNet_v10_t);
FFI_AT(ncclNet_v10_t, makeVDevice, 152);
FFI_SIZE(ncclNet_v10_t, 160);
FFI_TABLE_FROM_7(ncclNet_v11_t);
FFI_AT(ncclNet_v11_t, makeVDevice, 152);
FFI_AT(ncclNet_v11_t, finalize, 160);
FFI_AT(ncclNet_v11_t, setNetAttr, 168);
FFI_SIZE(ncclNet_v11_t, 176);
FFI_TABLE_FROM_7(ncclNet_v12_t);
FFI_AT(ncclNet_v12_t, makeVDevice, 152);
FFI_AT(ncclNet_v12_t, finalize, 160);
FFI_AT(ncclNet_v12_t, setNetAttr, 168);
FFI_SIZE(ncclNet_v12_t, 176);

#define FFI_PROPS_HEAD(TYPE)                                                                                      \
    FFI_AT(TYPE, name, 0);                                                                                        \
    FFI_AT(TYPE, pciPath, 8);                                                                                     \
    FFI_AT(TYPE, guid, 16);                                                                                       \
    FFI_AT(TYPE, ptrSupport, 24)
#define FFI_PROPS_TAIL(TYPE, SPEED)                                                                               \
    FFI_AT(TYPE, speed, SPEED);                                                                                   \
    FFI_AT(TYPE, port, (SPEED) + 4);                                                                              \
    FFI_AT(TYPE, latency, (SPEED) + 8);                                                                           \
    FFI_AT(TYPE, maxComms, (SPEED) + 12);                                                                         \
    FFI_AT(TYPE, maxRecvs, (SPEED) + 16)
#define FFI_PROPS_FROM_9(TYPE, P2P)                                                                               \
    FFI_PROPS_HEAD(TYPE);                                                                                         \
    FFI_AT(TYPE, regIsGlobal, 28);                                                                                \
    FFI_AT(TYPE, forceFlush, 32);                                                                                 \
    FFI_PROPS_TAIL(TYPE, 36);                                                                                     \
    FFI_AT(TYPE, netDeviceType, 56);                                                                              \
    FFI_AT(TYPE, netDeviceVersion, 60);                                                                           \
    FFI_AT(TYPE, vProps, 64);                                                                                     \
    FFI_AT(TYPE, maxP2pBytes, P2P);                                                                               \
    FFI_AT(TYPE, maxCollBytes, (P2P) + 8)

FFI_PROPS_HEAD(ncclNetProperties_v6_t);
FFI_PROPS_TAIL(ncclNetProperties_v6_t, 28);
FFI_SIZE(ncclNetProperties_v6_t, 48);
FFI_PROPS_HEAD(ncclNetProperties_v7_t);
FFI_PROPS_TAIL(ncclNetProperties_v7_t, 28);
FFI_AT(ncclNetProperties_v7_t, netDeviceType, 48);
FFI_AT(ncclNetProperties_v7_t, netDeviceVersion, 52);
FFI_SIZE(ncclNetProperties_v7_t, 56);
FFI_PROPS_HEAD(ncclNetProperties_v8_t);
FFI_AT(ncclNetProperties_v8_t, regIsGlobal, 28);
FFI_PROPS_TAIL(ncclNetProperties_v8_t, 32);
FFI_AT(ncclNetProperties_v8_t, netDeviceType, 52);
FFI_AT(ncclNetProperties_v8_t, netDeviceVersion, 56);
FFI_SIZE(ncclNetProperties_v8_t, 64);
FFI_PROPS_FROM_9(ncclNetProperties_v9_t, 88);
FFI_SIZE(ncclNetProperties_v9_t, 104);
FFI_PROPS_FROM_9(ncclNetProperties_v11_t, 88);
FFI_AT(ncclNetProperties_v11_t, maxMultiRequestSize, 104);
FFI_SIZE(ncclNetProperties_v11_t, 112);
FFI_PROPS_FROM_9(ncclNetProperties_v12_t, 104);
FFI_AT(ncclNetProperties_v12_t, maxMultiRequestSize, 120);
FFI_AT(ncclNetProperties_v12_t, railId, 124);
FFI_AT(ncclNetProperties_v12_t, planeId, 126);
FFI_SIZE(ncclNetProperties_v12_t, 128);

FFI_SIZE(ncclNetVDeviceProps4_t, 20);
FFI_AT(ncclNetVDeviceProps4_t, devs, 4);
FFI_SIZE(ncclNetVDeviceProps8_t, 36);
FFI_AT(ncclNetVDeviceProps8_t, devs, 4);
FFI_SIZE(ncclNetCommConfig_t, 4);
FFI_SIZE(ncclNetCommAttr_t, 16);
FFI_AT(ncclNetCommAttr_t, minConcurrentPeers, 4);
FFI_AT(ncclNetCommAttr_t, maxFlowsPerPeer, 8);
FFI_AT(ncclNetCommAttr_t, minFlowsPerPeer, 12);
FFI_SIZE(ncclNetAttr_t, 44);
FFI_AT(ncclNetAttr_t, recvCommAttr, 16);
FFI_AT(ncclNetAttr_t, op, 32);
FFI_AT(ncclNetAttr_t, algo, 36);
FFI_AT(ncclNetAttr_t, proto, 40);
FFI_SIZE(ncclProfilerNetIbDescr_v1_t, 40);
FFI_AT(ncclProfilerNetIbDescr_v1_t, qp.device, 8);
FFI_AT(ncclProfilerNetIbDescr_v1_t, qp.wr_id, 16);
FFI_AT(ncclProfilerNetIbDescr_v1_t, qp.opcode, 24);
FFI_AT(ncclProfilerNetIbDescr_v1_t, qp.qpNum, 28);
FFI_AT(ncclProfilerNetIbDescr_v1_t, qp.length, 32);
FFI_SIZE(ncclNetDeviceHandle_t, 32);
FFI_AT(ncclNetDeviceHandle_t, netDeviceVersion, 4);
FFI_AT(ncclNetDeviceHandle_t, handle, 8);
FFI_AT(ncclNetDeviceHandle_t, size, 16);
FFI_AT(ncclNetDeviceHandle_t, needsProxyProgress, 24);

#endif
