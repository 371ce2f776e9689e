/*
 * Protection domains, memory regions, completion queues and queue pairs of the null provider.
 */
#include "null.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static pthread_mutex_t objects_lock = PTHREAD_MUTEX_INITIALIZER;
static struct null_qp *qps[NULL_MAX_QPS];
static uint32_t next_qp = 17;
static uint32_t highest_qp;
static uint32_t next_key = 1;

static uint32_t power_of_two(uint32_t wanted)
{
    uint32_t size = 16;
    while (size < wanted)
        size <<= 1;
    return size;
}

struct null_qp *null_qp_by_number(uint32_t number)
{
    return number < NULL_MAX_QPS ? qps[number] : NULL;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = null_alloc(sizeof *pd);
    if (pd)
        pd->context = context;
    else
        errno = ENOMEM;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    null_free(pd, sizeof *pd);
    return 0;
}

#undef ibv_reg_mr
#undef ibv_reg_mr_iova
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
    struct ibv_mr *mr = null_alloc(sizeof *mr);
    (void)iova;
    (void)access;
    if (!mr) {
        errno = ENOMEM;
        return NULL;
    }
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = addr;
    mr->length = length;
    pthread_mutex_lock(&objects_lock);
    mr->lkey = mr->rkey = next_key++;
    null_counters.live_mrs++;
    null_counters.live_mr_bytes += length;
    pthread_mutex_unlock(&objects_lock);
    return mr;
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
    return ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    pthread_mutex_lock(&objects_lock);
    null_counters.live_mrs--;
    null_counters.live_mr_bytes -= mr->length;
    pthread_mutex_unlock(&objects_lock);
    null_free(mr, sizeof *mr);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct null_channel *channel = null_alloc(sizeof *channel);
    if (!channel) {
        errno = ENOMEM;
        return NULL;
    }
    channel->channel.context = context;
    channel->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return &channel->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    null_free(channel, sizeof(struct null_channel));
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int vector)
{
    struct null_cq *cq = null_alloc(sizeof *cq);
    uint32_t size = power_of_two((uint32_t)cqe);
    (void)vector;
    if (cq)
        cq->ring = null_alloc(size * sizeof *cq->ring);
    if (!cq || !cq->ring) {
        null_free(cq, sizeof *cq);
        errno = ENOMEM;
        return NULL;
    }
    cq->mask = size - 1;
    cq->cq.context = context;
    cq->cq.channel = channel;
    cq->cq.cq_context = cq_context;
    cq->cq.cqe = (int)size;
    pthread_mutex_lock(&objects_lock);
    null_counters.live_cqs++;
    pthread_mutex_unlock(&objects_lock);
    return &cq->cq;
}

int ibv_destroy_cq(struct ibv_cq *ibcq)
{
    struct null_cq *cq = (struct null_cq *)ibcq;
    null_free(cq->ring, (cq->mask + 1) * sizeof *cq->ring);
    null_free(cq, sizeof *cq);
    pthread_mutex_lock(&objects_lock);
    null_counters.live_cqs--;
    pthread_mutex_unlock(&objects_lock);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
    uint64_t one;
    if (read(channel->fd, &one, sizeof one) != sizeof one)
        return -1;
    *cq = &((struct null_channel *)channel)->fired->cq;
    *cq_context = (*cq)->cq_context;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int events)
{
    (void)cq, (void)events;
}

static int grow_rings(struct null_qp *qp, uint32_t receives)
{
    uint32_t size = power_of_two(receives);
    qp->rq = null_alloc(size * sizeof *qp->rq);
    qp->rq_mask = size - 1;
    qp->early = null_alloc(size * sizeof *qp->early);
    qp->early_mask = size - 1;
    return qp->rq && qp->early;
}

static void free_qp(struct null_qp *qp)
{
    null_free(qp->rq, (qp->rq_mask + 1) * sizeof *qp->rq);
    null_free(qp->early, (qp->early_mask + 1) * sizeof *qp->early);
    null_free(qp, sizeof *qp);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct null_qp *qp;
    if (attr->qp_type != IBV_QPT_RC || attr->srq || attr->cap.max_inline_data > 1024) {
        errno = EINVAL;
        return NULL;
    }
    qp = null_alloc(sizeof *qp);
    if (!qp || !grow_rings(qp, attr->cap.max_recv_wr)) {
        if (qp)
            free_qp(qp);
        errno = ENOMEM;
        return NULL;
    }
    qp->signal_all = attr->sq_sig_all;
    qp->cap = attr->cap;
    qp->qp.context = pd->context;
    qp->qp.qp_context = attr->qp_context;
    qp->qp.pd = pd;
    qp->qp.send_cq = attr->send_cq;
    qp->qp.recv_cq = attr->recv_cq;
    qp->qp.state = IBV_QPS_RESET;
    qp->qp.qp_type = IBV_QPT_RC;
    pthread_mutex_lock(&objects_lock);
    for (uint32_t tried = 0; tried < NULL_MAX_QPS && !qp->qp.qp_num; tried++) {
        uint32_t number = next_qp;
        next_qp = next_qp + 1 == NULL_MAX_QPS ? 17 : next_qp + 1;
        if (!qps[number]) {
            qps[number] = qp;
            qp->qp.qp_num = number;
            if (number >= highest_qp)
                highest_qp = number + 1;
            null_counters.live_qps++;
        }
    }
    pthread_mutex_unlock(&objects_lock);
    if (!qp->qp.qp_num) {
        free_qp(qp);
        errno = ENOMEM;
        return NULL;
    }
    return &qp->qp;
}

/*
 * A queue pair that goes away leaves whoever points at it unconnected rather than pointing at freed memory. All are
 * looked at, not only its own peer: either side may have been reset first.
 */
static void unpair(struct null_qp *qp)
{
    for (uint32_t number = 0; number < highest_qp; number++)
        if (qps[number] && qps[number]->peer == qp)
            qps[number]->peer = NULL;
    qp->peer = NULL;
}

int ibv_destroy_qp(struct ibv_qp *ibqp)
{
    struct null_qp *qp = (struct null_qp *)ibqp;
    pthread_mutex_lock(&objects_lock);
    unpair(qp);
    qps[ibqp->qp_num] = NULL;
    null_counters.live_qps--;
    pthread_mutex_unlock(&objects_lock);
    free_qp(qp);
    return 0;
}

int ibv_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask)
{
    struct null_qp *qp = (struct null_qp *)ibqp;
    if (mask & IBV_QP_ACCESS_FLAGS)
        qp->access = attr->qp_access_flags;
    if (mask & IBV_QP_DEST_QPN) {
        pthread_mutex_lock(&objects_lock);
        qp->dest_qp_num = attr->dest_qp_num;
        qp->peer = null_qp_by_number(attr->dest_qp_num);
        pthread_mutex_unlock(&objects_lock);
        if (!qp->peer)
            return EINVAL;
    }
    if (mask & IBV_QP_STATE) {
        ibqp->state = attr->qp_state;
        if (attr->qp_state == IBV_QPS_ERR)
            null_flush_receives(qp);
        if (attr->qp_state == IBV_QPS_RESET) {
            pthread_mutex_lock(&objects_lock);
            unpair(qp);
            pthread_mutex_unlock(&objects_lock);
            qp->rq_head = qp->rq_tail = qp->early_head = qp->early_tail = 0;
        }
    }
    return 0;
}

int ibv_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
    struct null_qp *qp = (struct null_qp *)ibqp;
    (void)mask;
    /* Field by field: some clients pass the shorter attribute struct of an older header. */
    attr->qp_state = attr->cur_qp_state = ibqp->state;
    attr->path_mtu = IBV_MTU_4096;
    attr->dest_qp_num = qp->dest_qp_num;
    attr->qp_access_flags = qp->access;
    attr->cap = qp->cap;
    attr->port_num = 1;
    init->qp_context = ibqp->qp_context;
    init->send_cq = ibqp->send_cq;
    init->recv_cq = ibqp->recv_cq;
    init->srq = NULL;
    init->cap = qp->cap;
    init->qp_type = IBV_QPT_RC;
    init->sq_sig_all = qp->signal_all;
    return 0;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    (void)qp, (void)ece;
    return EOPNOTSUPP;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    (void)qp, (void)ece;
    return EOPNOTSUPP;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    (void)qp;
    return NULL;
}
