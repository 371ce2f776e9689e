/* The CUDA driver of the tests; see fakecuda.h. Built as libcuda.so.1 and loaded by the program under test. */
#include "fakecuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, DESTROYED = 709, NOT_REGISTERED = 713 };
enum { DEVICE = 5, MOST = 256, MOST_RESETS = 8 };
enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_ORDINAL = 9, MEMORY_TYPE_HOST = 1, MEMORY_TYPE_DEVICE = 2 };
enum { DEVICES = 8, FLUSH_OPTIONS = 117, OF_THE_CONTEXT = 0, TO_ITS_GPU = 100 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_cuda_call noted[MOST];
static size_t count;
static int refusal, context_refusal, retained;
static struct {
    char *start;
    size_t size;
} registered[MOST];

static struct {
    char *start;
    size_t size;
    int ordinal;
} gpu_memory;
static int flush_options = 1, flush_result;

/* One after the other: each reset ends one. */
static char contexts[MOST_RESETS];
static size_t resets;
static __thread void *current;

static void *live_context(void)
{
    return &contexts[resets];
}

/* What a call in the context of this thread answers before it does anything. */
static int context_result(void)
{
    if (!current) return INVALID_CONTEXT;
    return current == live_context() ? SUCCESS : DESTROYED;
}

static void misused(const char *what)
{
    dprintf(STDERR_FILENO, "the CUDA driver of the tests: %s\n", what);
    abort();
}

static void *rnic(const char *name)
{
    void *library = dlopen(getenv("NCCL_IBVERBS_LIB"), RTLD_NOW | RTLD_NOLOAD);
    void *address = library ? dlsym(library, name) : NULL;
    if (!address) {
        dprintf(STDERR_FILENO, "the CUDA driver of the tests needs %s of the software RNIC\n", name);
        abort();
    }
    dlclose(library);
    return address;
}

static void note(struct fake_cuda_call call)
{
    int (*page)(const void *, uint64_t *, int *, unsigned *, unsigned *) =
        (int (*)(const void *, uint64_t *, int *, unsigned *, unsigned *))rnic("softrnic_page");
    uint64_t (*counter)(const char *) = (uint64_t(*)(const char *))rnic("softrnic_counter");
    call.regions = counter("mrs_live");
    call.least_long = ~0u;
    for (size_t at = 0; at < call.size; at += (size_t)sysconf(_SC_PAGESIZE)) {
        unsigned short_pins = 0, long_pins = 0;
        int migratetype = 0;
        if (page((char *)call.address + at, NULL, &migratetype, &short_pins, &long_pins) != 0) abort();
        if (long_pins < call.least_long) call.least_long = long_pins;
        if (short_pins > call.most_short) call.most_short = short_pins;
        call.pages_in_cma += migratetype == 4;
    }
    if (count < MOST) noted[count] = call;
    count++;
}

void fake_cuda_current(int on)
{
    pthread_mutex_lock(&lock);
    current = on ? live_context() : NULL;
    pthread_mutex_unlock(&lock);
}

void fake_cuda_reset(void)
{
    int (*unpin)(void *, size_t) = (int (*)(void *, size_t))rnic("softrnic_unpin");
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MOST; i++) {
        if (registered[i].start && unpin(registered[i].start, registered[i].size) != 0) abort();
        registered[i].start = NULL;
    }
    if (++resets == MOST_RESETS) abort();
    pthread_mutex_unlock(&lock);
}

void fake_cuda_refuse_context(int code)
{
    context_refusal = code;
}

int fake_cuda_retained(void)
{
    pthread_mutex_lock(&lock);
    int now = retained;
    pthread_mutex_unlock(&lock);
    return now;
}

void fake_cuda_refuse(int code)
{
    refusal = code;
}

void fake_cuda_memory(void *address, size_t size, int ordinal)
{
    pthread_mutex_lock(&lock);
    gpu_memory.start = address;
    gpu_memory.size = size;
    gpu_memory.ordinal = ordinal;
    pthread_mutex_unlock(&lock);
}

void fake_cuda_flush(int options, int code)
{
    pthread_mutex_lock(&lock);
    flush_options = options;
    flush_result = code;
    pthread_mutex_unlock(&lock);
}

size_t fake_cuda_calls(struct fake_cuda_call *calls, size_t room)
{
    pthread_mutex_lock(&lock);
    size_t all = count;
    for (size_t i = 0; i < all && i < room && i < MOST; i++) calls[i] = noted[i];
    pthread_mutex_unlock(&lock);
    return all;
}

int cuInit(unsigned flags)
{
    return flags ? INVALID_VALUE : SUCCESS;
}

int cuCtxGetDevice(int *device)
{
    pthread_mutex_lock(&lock);
    int result = context_result();
    pthread_mutex_unlock(&lock);
    if (result == SUCCESS) *device = DEVICE;
    return result;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    pthread_mutex_lock(&lock);
    int result = device == DEVICE ? context_refusal : INVALID_DEVICE;
    note((struct fake_cuda_call){.name = FAKE_RETAIN, .result = result});
    if (result == SUCCESS) {
        *context = live_context();
        retained++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    pthread_mutex_lock(&lock);
    if (device != DEVICE || retained == 0) misused("a context is released that was not retained");
    retained--;
    note((struct fake_cuda_call){.name = FAKE_RELEASE});
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* The driver need not recognise a context that is gone. */
int cuCtxPushCurrent_v2(void *context)
{
    pthread_mutex_lock(&lock);
    if (context != live_context() || retained == 0) misused("a context is pushed that nobody keeps alive");
    current = context;
    note((struct fake_cuda_call){.name = FAKE_PUSH});
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = current;
    current = NULL;
    pthread_mutex_lock(&lock);
    note((struct fake_cuda_call){.name = FAKE_POP});
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    int (*pin)(void *, size_t, int) = (int (*)(void *, size_t, int))rnic("softrnic_pin");
    struct fake_cuda_call call = {
        .name = FAKE_REGISTER, .address = address, .size = size, .flags = flags, .result = refusal};
    size_t place = 0;
    pthread_mutex_lock(&lock);
    while (place < MOST && registered[place].start) place++;
    if (context_result() != SUCCESS) call.result = context_result();
    if (place == MOST) abort();
    note(call);
    if (call.result == SUCCESS) {
        if (pin(address, size, 0) != 0) abort();
        registered[place].start = address;
        registered[place].size = size;
    }
    pthread_mutex_unlock(&lock);
    return call.result;
}

int cuMemHostUnregister(void *address)
{
    int (*unpin)(void *, size_t) = (int (*)(void *, size_t))rnic("softrnic_unpin");
    struct fake_cuda_call call = {.name = FAKE_UNREGISTER, .address = address, .result = NOT_REGISTERED};
    size_t place = 0;
    pthread_mutex_lock(&lock);
    while (place < MOST && registered[place].start != address) place++;
    if (place < MOST) call.size = registered[place].size;
    if (context_result() != SUCCESS) call.result = context_result();
    else if (place < MOST) call.result = SUCCESS;
    note(call);
    if (call.result == SUCCESS) {
        if (unpin(address, call.size) != 0) abort();
        registered[place].start = NULL;
    }
    pthread_mutex_unlock(&lock);
    return call.result;
}

int cuDeviceGet(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (attribute != FLUSH_OPTIONS) return INVALID_VALUE;
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    *value = flush_options;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    pthread_mutex_lock(&lock);
    int result = target == OF_THE_CONTEXT && scope == TO_ITS_GPU ? context_result() : INVALID_VALUE;
    if (result == SUCCESS) result = flush_result;
    note((struct fake_cuda_call){.name = FAKE_FLUSH, .result = result});
    pthread_mutex_unlock(&lock);
    return result;
}

int cuPointerGetAttribute(void *out, int attribute, unsigned long long address)
{
    int result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    unsigned long long gpu = (unsigned long long)(uintptr_t)gpu_memory.start;
    if (gpu && address >= gpu && address - gpu < gpu_memory.size) {
        result = attribute == ATTRIBUTE_MEMORY_TYPE || attribute == ATTRIBUTE_ORDINAL ? SUCCESS : INVALID_VALUE;
        if (attribute == ATTRIBUTE_MEMORY_TYPE) *(unsigned *)out = MEMORY_TYPE_DEVICE;
        if (attribute == ATTRIBUTE_ORDINAL) *(int *)out = gpu_memory.ordinal;
    }
    for (size_t i = 0; i < MOST; i++) {
        unsigned long long start = (unsigned long long)(uintptr_t)registered[i].start;
        if (!start || address < start || address - start >= registered[i].size) continue;
        if (attribute != ATTRIBUTE_MEMORY_TYPE) continue;
        *(unsigned *)out = MEMORY_TYPE_HOST;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
