/*
 * The data path of the null provider: a work request is done before the post call returns.
 *
 * Order is the real device's: payload first, then the receiver's completion, then the sender's.
 */
#include "null.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

struct null_counters null_counters;

__attribute__((visibility("default"))) const struct null_counters *pinrail_null_counters(void)
{
    return &null_counters;
}

/* While held, work is done but no completion can be seen: the state in which a test finds nothing. */
static int held;

__attribute__((visibility("default"))) void pinrail_null_hold(int hold)
{
    held = hold;
}

static void push(struct null_cq *cq, uint64_t wr_id, enum ibv_wc_status status, enum ibv_wc_opcode opcode,
                 uint32_t qp_num, uint32_t byte_len, unsigned int flags, __be32 imm)
{
    if (cq->tail - cq->head > cq->mask) {
        null_fault("a completion queue overran", 0);
        return;
    }
    struct ibv_wc *wc = &cq->ring[cq->tail & cq->mask];
    wc->wr_id = wr_id;
    wc->status = status;
    wc->opcode = opcode;
    wc->vendor_err = 0;
    wc->byte_len = byte_len;
    wc->imm_data = imm;
    wc->qp_num = qp_num;
    wc->src_qp = 0;
    wc->wc_flags = flags;
    cq->tail++;
    null_counters.completions++;
    if (cq->armed) {
        cq->armed = 0;
        struct null_channel *channel = (struct null_channel *)cq->cq.channel;
        uint64_t one = 1;
        channel->fired = cq;
        if (write(channel->channel.fd, &one, sizeof one) != sizeof one)
            null_fault("an event could not be raised", 0);
    }
}

static uint32_t length_of(const struct ibv_send_wr *wr)
{
    uint32_t length = 0;
    for (int i = 0; i < wr->num_sge; i++)
        length += wr->sg_list[i].length;
    return length;
}

/* Copies a request's payload to one place, at most NULL_COPY_LIMIT bytes; longer payload is dropped. */
static void gather(const struct ibv_send_wr *wr, char *to, uint32_t length)
{
    if (length > NULL_COPY_LIMIT)
        return;
    for (int i = 0; i < wr->num_sge; i++) {
        memcpy(to, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        to += wr->sg_list[i].length;
    }
}

static void scatter(const struct ibv_send_wr *wr, const char *from, uint32_t length)
{
    if (length > NULL_COPY_LIMIT)
        return;
    for (int i = 0; i < wr->num_sge; i++) {
        memcpy((void *)(uintptr_t)wr->sg_list[i].addr, from, wr->sg_list[i].length);
        from += wr->sg_list[i].length;
    }
}

static void deliver(struct null_qp *qp, const struct null_arrival *arrival)
{
    struct null_recv *recv = &qp->rq[qp->rq_head++ & qp->rq_mask];
    if (arrival->payload) {
        if (arrival->byte_len > recv->length)
            null_fault("a send is longer than the receive it met", 0);
        else
            gather(arrival->payload, (char *)(uintptr_t)recv->addr, arrival->byte_len);
    }
    push((struct null_cq *)qp->qp.recv_cq, recv->wr_id, IBV_WC_SUCCESS, arrival->opcode, qp->qp.qp_num,
         arrival->byte_len, arrival->flags, arrival->imm);
}

/* Hands an arrival to the peer's oldest receive. One that comes too early waits, as RNR retries would make it. */
static void arrive(struct null_qp *peer, const struct null_arrival *arrival)
{
    if (peer->rq_head != peer->rq_tail) {
        deliver(peer, arrival);
        return;
    }
    null_counters.early_imms++;
    if (arrival->payload || peer->early_tail - peer->early_head > peer->early_mask) {
        null_fault("nobody posted a receive for an arrival", 0);
        return;
    }
    peer->early[peer->early_tail++ & peer->early_mask] = *arrival;
}

static int execute(struct null_qp *qp, struct ibv_send_wr *wr)
{
    struct null_qp *peer = qp->peer;
    uint32_t length = length_of(wr);
    enum ibv_wc_opcode opcode = IBV_WC_RDMA_WRITE;
    char *remote = (char *)(uintptr_t)wr->wr.rdma.remote_addr;
    struct null_arrival arrival = {.byte_len = length, .imm = wr->imm_data};

    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE:
        gather(wr, remote, length);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        gather(wr, remote, length);
        arrival.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        arrival.flags = IBV_WC_WITH_IMM;
        arrive(peer, &arrival);
        break;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        opcode = IBV_WC_SEND;
        arrival.opcode = IBV_WC_RECV;
        arrival.flags = wr->opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_WITH_IMM : 0;
        arrival.payload = wr;
        arrive(peer, &arrival);
        break;
    case IBV_WR_RDMA_READ:
        opcode = IBV_WC_RDMA_READ;
        scatter(wr, remote, length);
        break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD: {
        uint64_t *word = (uint64_t *)(uintptr_t)wr->wr.atomic.remote_addr;
        uint64_t old = __atomic_fetch_add(word, wr->wr.atomic.compare_add, __ATOMIC_SEQ_CST);
        opcode = IBV_WC_FETCH_ADD;
        scatter(wr, (char *)&old, sizeof old);
        break;
    }
    case IBV_WR_ATOMIC_CMP_AND_SWP: {
        uint64_t *word = (uint64_t *)(uintptr_t)wr->wr.atomic.remote_addr;
        uint64_t old = wr->wr.atomic.compare_add;
        __atomic_compare_exchange_n(word, &old, wr->wr.atomic.swap, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        opcode = IBV_WC_COMP_SWAP;
        scatter(wr, (char *)&old, sizeof old);
        break;
    }
    default:
        return null_fault("an opcode that is not emulated was posted", EINVAL);
    }

    null_counters.inline_wrs += (wr->send_flags & IBV_SEND_INLINE) != 0;
    if (qp->signal_all || (wr->send_flags & IBV_SEND_SIGNALED)) {
        null_counters.signaled_wrs++;
        push((struct null_cq *)qp->qp.send_cq, wr->wr_id, IBV_WC_SUCCESS, opcode, qp->qp.qp_num, length, 0, 0);
    }
    return 0;
}

int null_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct null_qp *qp = (struct null_qp *)ibqp;
    int code = 0;

    null_counters.post_send_calls++;
    if (ibqp->state == IBV_QPS_ERR) {
        /* As the device does: accepted, and flushed. */
        for (; wr; wr = wr->next)
            push((struct null_cq *)ibqp->send_cq, wr->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RDMA_WRITE, ibqp->qp_num, 0,
                 0, 0);
        return 0;
    }
    if (ibqp->state != IBV_QPS_RTS || !qp->peer) {
        *bad = wr;
        return null_fault("post_send on a queue pair that is not ready", EINVAL);
    }
    for (; wr; wr = wr->next) {
        null_counters.send_wrs++;
        code = execute(qp, wr);
        if (code) {
            *bad = wr;
            break;
        }
    }
    return code;
}

int null_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct null_qp *qp = (struct null_qp *)ibqp;

    null_counters.post_recv_calls++;
    for (; wr; wr = wr->next) {
        if (qp->rq_tail - qp->rq_head > qp->rq_mask) {
            *bad = wr;
            return ENOMEM;
        }
        struct null_recv *recv = &qp->rq[qp->rq_tail++ & qp->rq_mask];
        recv->wr_id = wr->wr_id;
        recv->addr = wr->num_sge ? wr->sg_list[0].addr : 0;
        recv->length = wr->num_sge ? wr->sg_list[0].length : 0;
        null_counters.recv_wrs++;
        if (qp->early_head != qp->early_tail)
            deliver(qp, &qp->early[qp->early_head++ & qp->early_mask]);
    }
    if (ibqp->state == IBV_QPS_ERR)
        null_flush_receives(qp);
    return 0;
}

void null_flush_receives(struct null_qp *qp)
{
    while (qp->rq_head != qp->rq_tail) {
        struct null_recv *recv = &qp->rq[qp->rq_head++ & qp->rq_mask];
        push((struct null_cq *)qp->qp.recv_cq, recv->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, qp->qp.qp_num, 0, 0, 0);
    }
}

int null_poll_cq(struct ibv_cq *ibcq, int count, struct ibv_wc *wc)
{
    struct null_cq *cq = (struct null_cq *)ibcq;
    int found = 0;

    null_counters.poll_cq_calls++;
    while (found < count && cq->head != cq->tail && !held)
        wc[found++] = cq->ring[cq->head++ & cq->mask];
    null_counters.poll_cq_empty += found == 0;
    return found;
}

int null_req_notify_cq(struct ibv_cq *ibcq, int solicited_only)
{
    struct null_cq *cq = (struct null_cq *)ibcq;

    (void)solicited_only;
    if (!ibcq->channel)
        return EINVAL;
    cq->armed = 1;
    return 0;
}
