/*
 * A CUDA driver for tests: libcuda.so.1, with the few functions that the plugin looks up and no GPU behind them.
 *
 * cuMemHostRegister takes what the driver takes: a short pin on every page, here from the software RNIC's page ledger.
 * Every call is noted with what it found, so that a test can say in which order things happened.
 */
#ifndef FFI_TESTS_FAKECUDA_H
#define FFI_TESTS_FAKECUDA_H

#include <stddef.h>
#include <stdint.h>

enum fake_cuda_name { FAKE_REGISTER = 1, FAKE_UNREGISTER, FAKE_RETAIN, FAKE_PUSH, FAKE_POP, FAKE_RELEASE, FAKE_FLUSH };

struct fake_cuda_call {
    enum fake_cuda_name name;
    void *address;
    size_t size;
    unsigned flags;
    uint64_t regions;     /* of the software RNIC, alive during the call */
    unsigned least_long;  /* long-term pins of the page that has the fewest */
    unsigned most_short;  /* short pins of the page that has the most, before the call */
    unsigned pages_in_cma;
    int result;
};

/* Makes the device's own context current on the calling thread, or none. */
void fake_cuda_current(int on);
/* As cudaDeviceReset: the device's context goes, with everything that was registered. Using it afterwards aborts. */
void fake_cuda_reset(void);
/* What cuDevicePrimaryCtxRetain answers from now on; 0: success. */
void fake_cuda_refuse_context(int code);
/* How often the device's context is retained and not released. */
int fake_cuda_retained(void);
/* What cuMemHostRegister answers from now on; 0: success. */
void fake_cuda_refuse(int code);
/* A range that is memory of the GPU with this number in the process; one at a time. Contexts are of number 5. */
void fake_cuda_memory(void *address, size_t size, int ordinal);
/* Whom the GPUs offer a flush (1: the host, 2: streams), and what it answers from now on; 0: success. */
void fake_cuda_flush(int options, int code);
/* Copies the calls so far, at most `room`; returns how many there were. */
size_t fake_cuda_calls(struct fake_cuda_call *calls, size_t room);

/* The driver's own. */
int cuInit(unsigned flags);
int cuCtxGetDevice(int *device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags);
int cuMemHostUnregister(void *address);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuFlushGPUDirectRDMAWrites(int target, int scope);
int cuPointerGetAttribute(void *out, int attribute, unsigned long long address);

#endif
