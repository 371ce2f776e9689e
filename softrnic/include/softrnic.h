/* Control calls of the software RNIC, exported under the version node SOFTRNIC_1.
 *
 * They act on the calling process's instance of the library: look them up (dlsym) in the very libibverbs.so.1 that the
 * program under test has loaded. Unless said otherwise they return 0 or an errno value. */
#ifndef SOFTRNIC_H
#define SOFTRNIC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ibv_context;
struct ibv_qp_attr;
struct ibv_ece;

/* Held mode: send requests that are posted from now on stay pending, nothing of them happens. Ending it runs them. */
int softrnic_hold(int on);

/* Runs up to n held requests of the process, oldest first over all QPs. Returns how many were released; one of them may
 * still wait for a receive. */
uint64_t softrnic_release(uint64_t n);

/* A counter by name, UINT64_MAX if unknown. Posts: post_write post_write_imm post_send post_send_imm post_read
 * post_cmp_swap post_fetch_add post_recv post_srq_recv; doorbells (post_send calls) inline signaled unsignaled sq_full;
 * bytes_written bytes_read; parked rnr_parked held released; send_completions recv_completions error_completions
 * cq_overruns poll_nonempty async_events; modify_qp reg_mr dereg_mr registered_bytes; pinned_bytes (what live MRs count
 * against the memlock quota, whether there is one or not) migrated_pages (moved out of CMA) reg_delay_ns (time that
 * SOFTRNIC_REG_US and SOFTRNIC_REG_PAGE_NS took); dontfork dofork (ranges of pages that were withheld from forked
 * children and given back, one madvise each). Live objects: contexts_live pds_live mrs_live channels_live cqs_live
 * srqs_live qps_live. */
uint64_t softrnic_counter(const char *name);

/* Number of live objects of the process; each kind that is not zero is printed on stderr. */
int softrnic_leaks(void);

/* Attributes and mask of the last successful modify that led to `state`; fills 136 bytes. ENOENT if there was none. */
int softrnic_qp_trace(uint32_t qp_num, int state, struct ibv_qp_attr *attr, int *mask);

/* Numbers of the live QPs of the process in ascending order, up to `max` of them. Returns how many there are. */
int softrnic_qps(uint32_t *numbers, int max);

/* The vendor extensions (ECE) that were set on a QP; 12 bytes. ENOENT if none were. */
int softrnic_qp_ece(uint32_t qp_num, struct ibv_ece *ece);

/* Makes the next `count` changes of any QP to `state` fail with an errno (up to 4095), and nothing else of them happen. */
int softrnic_fail_modify_qp(int state, uint64_t count, int errno_value);

/* Replaces an entry of a port's GID table in this process, with the async event. `entry` is written as in SOFTRNIC_GIDS;
 * "-" empties the slot. QPs keep the addresses they were given. */
int softrnic_set_gid(const char *device, int port, int index, const char *entry);
/* Opcode and payload bytes of the newest send request with this id among the last 128 that were posted on a QP of this
 * process. ENOENT: not among them. */
int softrnic_posted(uint32_t qp_num, uint64_t wr_id, int *opcode, uint64_t *bytes);

/* Makes the next registration of this process wait until this is called with 0. */
int softrnic_pause_reg(int on);

/* 1 while a registration waits because of that. */
int softrnic_reg_paused(void);

/* Raises an async event. `element` is the QP number, CQ handle, SRQ handle or port number, by event type. */
int softrnic_inject_event(struct ibv_context *context, int event_type, uint32_t element);

/* Moves a QP of this process to the error state and raises QP_FATAL. */
int softrnic_kill_qp(uint32_t qp_num);

/* Takes a port of this process's device down (0) or up, with the async event. Sends in either direction wait. */
int softrnic_port(const char *device, int port, int up);

/* Makes the n-th registration from now fail with ENOMEM; 0 = none. */
int softrnic_fail_reg_mr(uint64_t n);

/* Makes every registration from the n-th from now on fail with ENOMEM, as on a machine that is out of kernel memory;
 * 0 = none. */
int softrnic_fail_reg_from(uint64_t n);

/* The errno (up to 4095) that those two use instead; 0 = ENOMEM again. */
int softrnic_reg_errno(int errno_value);

/* Fault plans. A plan is text, one rule a line, "matchers -> action"; README.md lists the words. The rules act on this
 * process's requests, registrations and objects from now on. A plan that is not understood changes nothing: EINVAL, and a
 * line on stderr that names the line and the remedy. At most 64 rules. */

/* Replaces the plan and its counts; NULL or "" ends it. */
int softrnic_faults(const char *plan);

/* Adds rules behind those that are there. */
int softrnic_fault_add(const char *rules);

/* How often a rule fired, and how many requests it was about. Rules count from 0 in the order of the plan. UINT64_MAX if
 * there is no such rule, or no device is open. */
uint64_t softrnic_fault_fired(unsigned rule);
uint64_t softrnic_fault_matched(unsigned rule);

/* Lets a device die: DEVICE_FATAL, ports down, QPs in the error state, and EIO from calls that make, register or connect
 * something, until all devices of the process are closed. */
int softrnic_device_fatal(const char *device);

/* The stepped engine (SOFTRNIC_ENGINE=stepped). */

/* Makes up to n steps and returns how many did something; ends with the first that did not. */
uint64_t softrnic_step(uint64_t n);

/* Moves the virtual clock; EOPNOTSUPP with another engine. */
int softrnic_advance(uint64_t ns);

/* The clock that delays and limits are measured with, in nanoseconds; with other engines the machine's. */
uint64_t softrnic_now(void);

/* Begins anew with a seed: generator, clock, trace, count of QPs. EBUSY while there are QPs. */
int softrnic_seed(uint64_t seed);

/* The last 4096 events as text, cut to the buffer and NUL-terminated. Returns the length of the whole text. With other
 * engines the trace has the faults that fired and the ports only. */
size_t softrnic_trace(char *buffer, size_t size);

/* Prints the last n of them on stderr. */
void softrnic_trace_print(unsigned n);

/* A number that two equal traces share, from the beginning and not only of the events that are kept. */
uint64_t softrnic_trace_hash(void);

/* The page ledger: what the kernel does with pages when memory is pinned, simulated.
 *
 * A page gets its place, in CMA or not, from the map when somebody first asks about it: a registration, a pin, a query.
 * It keeps it until it is migrated or forgotten. A short pin (FOLL_PIN alone) takes a page as it lies. A long-term pin
 * (FOLL_LONGTERM) may not hold a page in CMA: it moves the page elsewhere first, and if a short pin is in the way, it is
 * refused with ENOMEM. Every ibv_reg_mr is a long-term pin, which its MR holds; dma-bufs are left alone.
 *
 * Ranges are widened to whole pages. NULL, no length and a range that wraps are EINVAL, memory that is not mapped is
 * EFAULT. */

/* Replaces the map for pages that nobody has asked about yet: "off", "all", "every=N" (pages whose number is a multiple of
 * N) or a comma list of hexadecimal address ranges "lo-hi". EINVAL changes nothing. SOFTRNIC_CMA is the map at the start. */
int softrnic_cma(const char *spec);

/* Pins every page of a range, as another driver would (CUDA for cuMemHostRegister), for long or not. Pins are counted per
 * page. A long-term pin that is refused holds nothing, but what it had migrated stays so: every CMA page without a short
 * pin up to the failing one, and those behind it in the same batch of 512. */
int softrnic_pin(void *addr, size_t len, int longterm);

/* Ends one pin of softrnic_pin on every page: a short one if the page has one, else a long-term one. EINVAL, and nothing
 * is ended, if a page has none. */
int softrnic_unpin(void *addr, size_t len);

/* Says where the page at an address lies: simulated frame number; migratetype with the kernel's numbers (0 unmovable: it
 * was migrated, 1 movable: an ordinary page, 4 CMA); short pins; long-term pins, those of MRs included. Any out-pointer
 * may be NULL. */
int softrnic_page(const void *addr, uint64_t *pfn, int *migratetype, unsigned *short_pins, unsigned *long_pins);

/* Forgets the pages of a range, so that the map places them anew: for memory that was unmapped or is to count as fresh.
 * EBUSY, and nothing is forgotten, if a page is pinned or belongs to an MR. */
int softrnic_forget(void *addr, size_t len);

#ifdef __cplusplus
}
#endif

#endif
