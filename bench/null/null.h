/*
 * The null provider: a libibverbs.so.1 that completes every work request at once and costs next to nothing, so that a
 * profiler sees the network plugin and little else. It needs no device: both ends of a connection live in one process,
 * and "the wire" is a pointer from one queue pair to the other.
 *
 * It is a stand-in for counting, not for testing: it checks almost nothing. softrnic is the strict one.
 */
#ifndef PINRAIL_NULL_H
#define PINRAIL_NULL_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>

/*
 * Payload up to this many bytes really arrives: credits, size records and flush words steer the protocol. Longer
 * payload is bulk data, whose copy would be the provider's cost.
 */
#define NULL_COPY_LIMIT 4096

#define NULL_MAX_QPS 65536u
#define NULL_MAX_MRS 65536u

/* What the program did to the provider. Read through pinrail_null_counters(); plain words: one thread drives a run. */
struct null_counters {
    uint64_t post_send_calls; /* doorbells of the send queues */
    uint64_t send_wrs;
    uint64_t post_recv_calls; /* doorbells of the receive queues */
    uint64_t recv_wrs;
    uint64_t poll_cq_calls;
    uint64_t poll_cq_empty;
    uint64_t completions;
    uint64_t inline_wrs;
    uint64_t signaled_wrs;
    uint64_t early_imms; /* immediates that met no posted receive: a real device would have retried */
    uint64_t faults;     /* things no correct program does; the bench refuses to report when it is not 0 */
    uint64_t live_qps;
    uint64_t live_cqs;
    uint64_t live_mrs;
    uint64_t live_mr_bytes;
};
extern struct null_counters null_counters;

struct null_cq {
    struct ibv_cq cq;
    struct ibv_wc *ring;
    uint32_t mask, head, tail;
    int armed;
};

struct null_channel {
    struct ibv_comp_channel channel; /* fd is an eventfd */
    struct null_cq *fired;           /* the last CQ that raised an event */
};

struct null_recv {
    uint64_t wr_id, addr;
    uint32_t length;
};

/* An incoming send or immediate, as the receiving side sees it. */
struct null_arrival {
    uint32_t byte_len;
    __be32 imm;
    enum ibv_wc_opcode opcode;
    unsigned int flags;
    const struct ibv_send_wr *payload; /* SEND only: copied into the receive's first element */
};

struct null_qp {
    struct ibv_qp qp;
    struct null_qp *peer; /* set at RTR */
    struct null_recv *rq;
    uint32_t rq_mask, rq_head, rq_tail;
    struct null_arrival *early;
    uint32_t early_mask, early_head, early_tail;
    int signal_all;
    struct ibv_qp_cap cap;
    uint32_t access, dest_qp_num;
};

/* memory.c: blocks of one mapping made at load time, so that a program's own memory growth can be measured around us. */
void *null_alloc(size_t bytes);
void null_free(void *block, size_t bytes);

/* data.c */
int null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int null_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int null_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int null_req_notify_cq(struct ibv_cq *cq, int solicited_only);
void null_flush_receives(struct null_qp *qp);

/* objects.c */
struct null_qp *null_qp_by_number(uint32_t number);

/* Counts the fault, names the first one on stderr and returns `code`. */
int null_fault(const char *what, int code);

#endif
