/* Control calls of the software RNIC, exported under the version node SOFTRNIC_1.
 *
 * They act on the calling process's instance of the library: look them up (dlsym) in the very libibverbs.so.1 that the
 * program under test has loaded. Unless said otherwise they return 0 or an errno value. */
#ifndef SOFTRNIC_H
#define SOFTRNIC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ibv_context;
struct ibv_qp_attr;

/* Held mode: send requests that are posted from now on stay pending, nothing of them happens. Ending it runs them. */
int softrnic_hold(int on);

/* Runs up to n held requests of the process, oldest first over all QPs. Returns how many were released; one of them may
 * still wait for a receive. */
uint64_t softrnic_release(uint64_t n);

/* A counter by name, UINT64_MAX if unknown. Posts: post_write post_write_imm post_send post_send_imm post_read
 * post_cmp_swap post_fetch_add post_recv post_srq_recv; doorbells (post_send calls) inline signaled unsignaled sq_full;
 * bytes_written bytes_read; parked rnr_parked held released; send_completions recv_completions error_completions
 * cq_overruns poll_nonempty async_events; modify_qp reg_mr dereg_mr registered_bytes. Live objects: contexts_live
 * pds_live mrs_live channels_live cqs_live srqs_live qps_live. */
uint64_t softrnic_counter(const char *name);

/* Number of live objects of the process; each kind that is not zero is printed on stderr. */
int softrnic_leaks(void);

/* Attributes and mask of the last successful modify that led to `state`; fills 136 bytes. ENOENT if there was none. */
int softrnic_qp_trace(uint32_t qp_num, int state, struct ibv_qp_attr *attr, int *mask);

/* Raises an async event. `element` is the QP number, CQ handle, SRQ handle or port number, by event type. */
int softrnic_inject_event(struct ibv_context *context, int event_type, uint32_t element);

/* Moves a QP of this process to the error state and raises QP_FATAL. */
int softrnic_kill_qp(uint32_t qp_num);

/* Takes a port of this process's device down (0) or up, with the async event. Sends in either direction wait. */
int softrnic_port(const char *device, int port, int up);

/* Makes the n-th registration from now fail with ENOMEM; 0 = none. */
int softrnic_fail_reg_mr(uint64_t n);

#ifdef __cplusplus
}
#endif

#endif
