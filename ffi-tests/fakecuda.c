/* The CUDA driver of the tests; see fakecuda.h. Built as libcuda.so.1 and loaded by the program under test. */
#include "fakecuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_REGISTERED = 713, MOST = 256 };
enum { ATTRIBUTE_MEMORY_TYPE = 2, MEMORY_TYPE_HOST = 1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_cuda_call noted[MOST];
static size_t count;
static int refusal;
static struct {
    char *start;
    size_t size;
} registered[MOST];

static char only_context;
static __thread void *current;

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
    current = on ? &only_context : NULL;
}

void fake_cuda_refuse(int code)
{
    refusal = code;
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

int cuCtxGetCurrent(void **context)
{
    *context = current;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context)
{
    if (context != &only_context) return INVALID_CONTEXT;
    current = context;
    pthread_mutex_lock(&lock);
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
    if (!current) call.result = INVALID_CONTEXT;
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
    if (!current) call.result = INVALID_CONTEXT;
    else if (place < MOST) call.result = SUCCESS;
    note(call);
    if (call.result == SUCCESS) {
        if (unpin(address, call.size) != 0) abort();
        registered[place].start = NULL;
    }
    pthread_mutex_unlock(&lock);
    return call.result;
}

int cuPointerGetAttribute(void *out, int attribute, unsigned long long address)
{
    int result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
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
