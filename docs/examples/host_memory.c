/*
 * A buffer in host memory that RDMA devices and the GPU may use, from pinrail.
 *
 *     cc host_memory.c -I include dist/libnccl-net-pinrail.so -Wl,-rpath,$PWD/dist -o host_memory
 *
 * NCCL must load the same file (NCCL_NET_PLUGIN=pinrail with its folder in LD_LIBRARY_PATH, or the path itself).
 */
#include <pinrail.h>

#include <stdio.h>
#include <string.h>

int main(void)
{
    size_t size = 8 << 20;
    void *buffer;

    /* Before NCCL is initialised or after, on any thread. With a CUDA context current, the GPU gets the memory too. */
    int error = pinrail_host_alloc(size, PINRAIL_HOST_HUGE, -1, &buffer);
    if (error) {
        fprintf(stderr, "pinrail_host_alloc: %s\n", strerror(error));
        return 1;
    }

    memset(buffer, 1, size);
    printf("%zu bytes at %p\n", size, buffer);

    /*
     * With NCCL, this is the place for
     *
     *     ncclCommRegister(comm, buffer, size, &handle);
     *     ... collectives and sends on any part of the buffer ...
     *     ncclCommDeregister(comm, handle);
     */

    error = pinrail_host_free(buffer);
    if (error) {
        fprintf(stderr, "pinrail_host_free: %s\n", strerror(error));
        return 1;
    }
    return 0;
}
