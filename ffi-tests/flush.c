/*
 * iflush: what makes received bytes visible to a GPU. Here it is checked as an operation: when it has work, when it has
 * none, that it costs one READ, that many may be outstanding, and that closing with one outstanding is safe. GPU memory
 * is stood in for by host memory under the CUDA type and by a memfd under the DMA-BUF type, where the device has them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pair.h"
#include "softrnic.h"

enum { MEMBERS = NCCL_NET_MAX_RECVS, SLOT = 8192 };

struct desk {
    struct net net;
    struct pair pair;
    struct guarded from, to;
    void *from_mr, *to_mr;
};

static void desk_open(struct desk *desk, int version)
{
    net_start(&desk->net, version);
    pair_open(&desk->net, 0, &desk->pair);
    desk->from = guarded_new((size_t)MEMBERS * SLOT, 0);
    desk->to = guarded_new((size_t)MEMBERS * SLOT, 0);
    desk->from_mr = register_host(&desk->net, desk->pair.send, desk->from.data, desk->from.size);
    desk->to_mr = register_host(&desk->net, desk->pair.recv, desk->to.data, desk->to.size);
}

static void desk_close(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    net_stop(&desk->net);
}

static void desk_message(struct desk *desk, size_t size, uint64_t key)
{
    guarded_reset(&desk->to);
    pattern_fill(desk->from.data, size, key);
    void *receive = irecv(&desk->net, desk->pair.recv, desk->to.data, size, 0, desk->to_mr);
    void *send = isend(&desk->net, desk->pair.send, desk->from.data, size, 0, desk->from_mr);
    CHECK_EQ(wait_size(&desk->net, send), size);
    CHECK_EQ(wait_size(&desk->net, receive), size);
}

/* Starts a flush of the first n slots; the request is NULL on entry, as NCCL has it. */
static void *flush(struct desk *desk, int n, int *sizes)
{
    void *data[MEMBERS], *mrs[MEMBERS], *request = NULL;
    for (int i = 0; i < MEMBERS; i++) {
        data[i] = desk->to.data + i * SLOT;
        mrs[i] = desk->to_mr;
    }
    CHECK_OK(net_iflush(&desk->net, desk->pair.recv, n, data, sizes, mrs, &request));
    return request;
}

static void nothing_to_flush(int version)
{
    struct desk desk;
    int zero[MEMBERS] = {0};
    desk_open(&desk, version);
    desk_message(&desk, 0, 1);
    static const int members[] = {1, 2, MEMBERS};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        struct rnic_counts before = rnic_counts();
        void *request = flush(&desk, members[i], zero);
        if (request) wait_done(&desk.net, request, NULL);
        CHECK_EQ(rnic_counts().reads - before.reads, 0); /* nothing came, nothing is read */
    }
    desk_close(&desk);
}

static void no_sizes(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    desk_message(&desk, 100, 1);
    void *request = flush(&desk, 1, NULL);
    if (request) wait_done(&desk.net, request, NULL);
    desk_message(&desk, 100, 2);
    CHECK_BUFFER(&desk.to, 100, 2);
    desk_close(&desk);
}

static void one_read_each(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    for (int i = 1; i <= 100; i++) {
        int sizes[1] = {i * 80};
        desk_message(&desk, (size_t)sizes[0], (uint64_t)i);
        struct rnic_counts before = rnic_counts();
        void *request = flush(&desk, 1, sizes);
        CHECK(request != NULL);
        wait_done(&desk.net, request, NULL);
        CHECK_EQ(rnic_counts().reads - before.reads, 1);
        CHECK_BUFFER(&desk.to, (size_t)sizes[0], (uint64_t)i);
    }
    desk_close(&desk);
}

/* One operation per group with any non-empty member, whichever member that is. */
static void one_read_for_a_group(int version)
{
    struct desk desk;
    desk_open(&desk, version);
    desk_message(&desk, 64, 1); /* a flush is for rails that have carried data */
    guarded_reset(&desk.to);
    for (int mask = 1; mask < 1 << MEMBERS; mask += 7) {
        int sizes[MEMBERS];
        for (int i = 0; i < MEMBERS; i++) sizes[i] = mask >> i & 1 ? 64 : 0;
        struct rnic_counts before = rnic_counts();
        void *request = flush(&desk, MEMBERS, sizes);
        CHECK(request != NULL);
        wait_done(&desk.net, request, NULL);
        CHECK_EQ(rnic_counts().reads - before.reads, 1);
    }
    CHECK_BUFFER(&desk.to, 0, 0); /* a flush reads, it never writes into the buffers */
    desk_close(&desk);
}

static void several_outstanding(int version)
{
    enum { COUNT = 8 };
    struct desk desk;
    int sizes[1] = {64};
    desk_open(&desk, version);
    desk_message(&desk, 64, 1);
    for (int round = 0; round < 200; round++) {
        void *flushes[COUNT], *receives[COUNT];
        for (int i = 0; i < COUNT; i++)
            receives[i] = irecv(&desk.net, desk.pair.recv, desk.to.data + i * SLOT, 64, i, desk.to_mr);
        for (int i = 0; i < COUNT; i++) CHECK((flushes[i] = flush(&desk, 1, sizes)) != NULL);
        for (int i = 0; i < COUNT; i++) {
            void *send = isend(&desk.net, desk.pair.send, desk.from.data + i * SLOT, 64, i, desk.from_mr);
            CHECK_EQ(wait_size(&desk.net, send), 64);
        }
        for (int i = COUNT - 1; i >= 0; i--) {
            wait_done(&desk.net, flushes[i], NULL);
            CHECK_EQ(wait_size(&desk.net, receives[i]), 64);
        }
    }
    desk_close(&desk);
}

/* As NCCL does with several QPs and devices: receive, flush, next. */
static void on_4_qps(int version)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1);
    setenv("NCCL_IB_SPLIT_DATA_ON_QPS", "1", 1);
    one_read_each(version);
}

static void wrong_calls(int version)
{
    struct desk desk;
    int sizes[16] = {[0 ... 15] = 64};
    void *data[16], *mrs[16], *request = NULL;
    desk_open(&desk, version);
    for (int i = 0; i < 16; i++) {
        data[i] = desk.to.data;
        mrs[i] = desk.to_mr;
    }
    CHECK_REFUSED(net_iflush(&desk.net, desk.pair.recv, MEMBERS + 1, data, sizes, mrs, &request));
    CHECK_REFUSED(net_iflush(&desk.net, desk.pair.recv, -1, data, sizes, mrs, &request));
    CHECK_REFUSED(net_iflush(&desk.net, desk.pair.recv, 1, data, sizes, mrs, NULL));
    CHECK_REFUSED(net_iflush(&desk.net, desk.pair.send, 1, data, sizes, mrs, &request));
    desk_close(&desk);
}

/* ---- memory of other kinds ----------------------------------------------------------------------------------- */

static int pointer_support(const struct net *net)
{
    struct net_properties properties;
    CHECK_OK(net_get_properties(net, 0, &properties));
    return properties.ptrSupport;
}

/* The registration goes through `mr`; the bytes are checked through `to`. */
static void receive_and_flush(struct desk *desk, uint8_t *to, size_t size, void *mr)
{
    for (int i = 1; i <= 20; i++) {
        size_t length = size - (size_t)i;
        void *data = to + i, *request = NULL;
        int flush_size = (int)length;
        memset(to, 0xC3, size);
        pattern_fill(desk->from.data, length, (uint64_t)i);
        void *receive = irecv(&desk->net, desk->pair.recv, data, length, 0, mr);
        void *send = isend(&desk->net, desk->pair.send, desk->from.data, length, 0, desk->from_mr);
        CHECK_EQ(wait_size(&desk->net, send), length);
        CHECK_EQ(wait_size(&desk->net, receive), length);
        CHECK_OK(net_iflush(&desk->net, desk->pair.recv, 1, &data, &flush_size, &mr, &request));
        CHECK(request != NULL);
        wait_done(&desk->net, request, NULL);
        CHECK_EQ(pattern_mismatch(data, length, (uint64_t)i), -1);
        for (int k = 0; k < i; k++) CHECK_EQ(to[k], 0xC3);
    }
}

static void cuda_type(int version)
{
    struct desk desk;
    struct guarded memory = guarded_new(SLOT, 0);
    void *mr = GARBAGE;
    desk_open(&desk, version);
    ncclResult_t result = net_reg_mr(&desk.net, desk.pair.recv, memory.data, SLOT, NCCL_PTR_CUDA, &mr);
    if (!(pointer_support(&desk.net) & NCCL_PTR_CUDA)) printf("ptrSupport has no CUDA bit: refusing is allowed\n");
    if (pointer_support(&desk.net) & NCCL_PTR_CUDA) CHECK_EQ(result, ncclSuccess);
    if (result == ncclSuccess) { /* a promise: then it has to work */
        CHECK(mr != NULL && mr != GARBAGE);
        receive_and_flush(&desk, memory.data, SLOT, mr);
        CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    } else {
        CHECK(ffi_is_error(result));
    }
    desk_close(&desk);
}

/* The descriptor is closed right after the call, as NCCL does; the offset is 0 and the range whole pages. */
static void dmabuf(int version)
{
    struct desk desk;
    size_t size = 4 * SLOT;
    int fd = memfd_create("ffi-dmabuf", MFD_CLOEXEC);
    void *mr = GARBAGE;
    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, (off_t)size), 0);
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    desk_open(&desk, version);
    CHECK(net_slot(&desk.net, 64) != NULL);
    ncclResult_t result = net_reg_mr_dmabuf(&desk.net, desk.pair.recv, memory, size, NCCL_PTR_CUDA, 0, fd, &mr);
    close(fd);
    if (pointer_support(&desk.net) & NCCL_PTR_DMABUF) {
        CHECK_EQ(result, ncclSuccess);
        CHECK(mr != NULL && mr != GARBAGE);
        receive_and_flush(&desk, memory, size, mr);
        CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, mr));
    } else {
        printf("ptrSupport has no DMABUF bit: registering one has to be refused\n");
        CHECK(ffi_is_error(result));
    }
    desk_close(&desk);
}

static void dmabuf_with_a_bad_descriptor(int version)
{
    struct desk desk;
    uint8_t *memory = mmap(NULL, SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *mr = GARBAGE;
    desk_open(&desk, version);
    CHECK_REFUSED(net_reg_mr_dmabuf(&desk.net, desk.pair.recv, memory, SLOT, NCCL_PTR_CUDA, 0, -1, &mr));
    CHECK_REFUSED(net_reg_mr_dmabuf(&desk.net, desk.pair.recv, memory, SLOT, NCCL_PTR_CUDA, 0, 9999, &mr));
    desk_close(&desk);
}

/* ---- held ---------------------------------------------------------------------------------------------------- */

/* The READ stays on its way until the close: its target must not be freed under it. */
static void closed_with_a_flush_outstanding(int version)
{
    struct desk desk;
    int sizes[1] = {64};
    desk_open(&desk, version);
    struct rnic_counts before = rnic_counts();
    desk_message(&desk, 64, 1);
    rnic_hold(true);
    void *request = flush(&desk, 1, sizes);
    CHECK(request != NULL);
    for (int i = 0; i < 100; i++) CHECK(!is_done(&desk.net, request, NULL));
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    rnic_hold(false);
    rnic_release(UINT64_MAX);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    CHECK(rnic_counts().mrs < before.mrs);
    struct pair fresh;
    pair_open(&desk.net, 0, &fresh);
    pair_message(&fresh, 1000, 0, 1);
    pair_close(&fresh);
    net_stop(&desk.net);
}

static void held_then_released(int version)
{
    struct desk desk;
    int sizes[1] = {64};
    desk_open(&desk, version);
    desk_message(&desk, 64, 1);
    rnic_hold(true);
    void *first = flush(&desk, 1, sizes), *second = flush(&desk, 1, sizes);
    CHECK(first != NULL && second != NULL);
    for (int i = 0; i < 100; i++) CHECK(!is_done(&desk.net, first, NULL) && !is_done(&desk.net, second, NULL));
    rnic_hold(false);
    rnic_release(UINT64_MAX);
    wait_done(&desk.net, second, NULL);
    wait_done(&desk.net, first, NULL);
    desk_close(&desk);
}

/* The sender has everything acknowledged and closes in order; what was received must still become visible. */
static void after_the_sender_closed(int version)
{
    struct desk desk;
    int sizes[1] = {64};
    desk_open(&desk, version);
    void *receive = irecv(&desk.net, desk.pair.recv, desk.to.data, 64, 0, desk.to_mr);
    void *send = isend(&desk.net, desk.pair.send, desk.from.data, 64, 0, desk.from_mr);
    wait_done(&desk.net, send, NULL);
    CHECK_EQ(wait_size(&desk.net, receive), 64);
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.send, desk.from_mr));
    CHECK_OK(net_close_send(&desk.net, desk.pair.send));
    desk.pair.send = NULL;
    /* The goodbye is noticed at some moment of this. */
    for (int i = 0; i < 3000; i++) {
        void *request = flush(&desk, 1, sizes);
        CHECK(request != NULL);
        wait_done(&desk.net, request, NULL);
        ffi_yield();
    }
    CHECK_OK(net_dereg_mr(&desk.net, desk.pair.recv, desk.to_mr));
    CHECK_OK(net_close_recv(&desk.net, desk.pair.recv));
    net_stop(&desk.net);
}

const struct ffi_case ffi_cases[] = {
    EACH(nothing_to_flush),
    EACH(no_sizes),
    EACH(one_read_each),
    EACH(one_read_for_a_group),
    EACH(several_outstanding),
    EACH(on_4_qps),
    EACH(wrong_calls),
    EACH(cuda_type),
    EACH(dmabuf),
    EACH(dmabuf_with_a_bad_descriptor),
    EACH(closed_with_a_flush_outstanding),
    EACH(held_then_released),
    EACH(after_the_sender_closed),
    {0},
};
