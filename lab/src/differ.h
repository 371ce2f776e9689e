// Shared by the parts of differ: what a question is made of.
#ifndef LAB_DIFFER_H
#define LAB_DIFFER_H
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum {
    PAGE = 4096,
    ROOM = 16 * PAGE,
    PATIENCE = 60, // seconds for a completion that must come
    RTR_MASK = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
    RTS_MASK = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
};

struct question {
    const char *name;
    void (*ask)(void);
};

extern const struct question questions_of_objects[], questions_of_traffic[]; // each ends with an empty one

// The device that is asked, in the process of the question.
extern struct ibv_context *context;
extern struct ibv_pd *pd;
extern union ibv_gid gid;
extern int gid_index;

struct end {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    int access;
};

// Two connected queue pairs of this process. Requests of `a` go from `from` to `to`.
struct pair {
    struct end a, b;
    unsigned char *from, *to;
    struct ibv_mr *from_mr, *to_mr;
};

void stop(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn)); // the question cannot be asked
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));            // one more part of the answer
const char *error_name(int error);
double seconds(void);

struct ibv_mr *reg(void *p, size_t size, int access);
struct end end_new(const struct ibv_qp_cap *cap, int access);
int to_init(struct end *end);
struct ibv_qp_attr rtr_attr(uint32_t remote);
int to_rtr(struct end *end, uint32_t remote);
int to_rts(struct end *end, int timeout, int rnr_retry);
int to_state(struct end *end, enum ibv_qp_state state);
struct pair pair_with(int access, int timeout, int rnr_retry);
struct pair pair_new(void);

struct ibv_send_wr *request(struct pair *pair, enum ibv_wr_opcode opcode, uint32_t size); // the same one each time
int post(struct end *end, struct ibv_send_wr *wr);
int receive(struct end *end, struct pair *pair, uint32_t size, uint64_t id);
bool next(struct end *end, struct ibv_wc *wc, double patience);

void say_status(struct end *end, const char *who); // of the next completion
void say_states(struct pair *pair);
void say_event(void); // an asynchronous one, or that there is none
#endif
