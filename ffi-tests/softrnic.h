/*
 * What the tests ask of the software RNIC beyond verbs: how much is alive, what may complete in held mode, faults.
 *
 * The calls go to the instance that the plugin has opened (the same path gives the same object), and a test that asks
 * for something the library does not offer fails by name.
 */
#ifndef FFI_TESTS_SOFTRNIC_H
#define FFI_TESTS_SOFTRNIC_H

#include "harness.h"

/* Objects of this process that are alive, READs that it has posted, and completion queues that ran over. */
struct rnic_counts {
    uint64_t contexts, pds, cqs, qps, mrs;
    uint64_t reads;
    uint64_t cq_overruns;
};
struct rnic_counts rnic_counts(void);
/* Keeps the library loaded from here on, so that its counters can be read when the plugin is gone. */
void rnic_keep(void);
/* Nothing is left: threads and descriptors as in `before`, address space nearly so, no object of the device alive. */
void expect_clean_(struct census before);
/* And the plugin is gone, and no device is open. */
void expect_gone_(struct census before);
#define expect_clean(...) (HERE(), expect_clean_(__VA_ARGS__))
#define expect_gone(...) (HERE(), expect_gone_(__VA_ARGS__))
/* Holding keeps every send request of this process pending; its end lets all of them run. */
void rnic_hold(bool on);
/* Lets the oldest `count` held requests run; returns how many there were. */
uint64_t rnic_release(uint64_t count);
/* The n-th registration from now fails with ENOMEM; 0 takes that back. */
void rnic_fail_registration(uint64_t n);
/* Every registration from the n-th from now on fails with ENOMEM; 0 takes that back. */
void rnic_fail_registrations_from(uint64_t n);
/* The errno of registrations that are made to fail; 0: ENOMEM again. */
void rnic_registration_errno(int value);
/* Opcode and bytes of a send request that was posted on a QP; fails the test where there is none with this id. */
struct rnic_request {
    int opcode;
    uint64_t bytes;
};
struct rnic_request rnic_posted(int qp, uint64_t wr_id);
/* Makes the next registration wait, or lets it go on; whether one waits. */
void rnic_pause_registration(bool on);
bool rnic_registration_paused(void);
/* Where pages that nobody has looked at yet lie: "all", "every=N", ranges, or "off"; see SOFTRNIC_CMA. */
void rnic_cma(const char *where);
/* Pins as another driver would take them; a short one keeps a page where it is. */
void rnic_pin(void *data, size_t size, bool longterm);
void rnic_unpin(void *data, size_t size);
/* What the pages were is forgotten: the map places them anew. Nobody may hold them. */
void rnic_forget(void *data, size_t size);
/* Where a page lies and who holds it. */
struct rnic_page {
    uint64_t pfn;
    int migratetype; /* 4: CMA */
    unsigned short_pins, long_pins;
};
struct rnic_page rnic_page(const void *data);
/* A counter by its name. */
uint64_t rnic_counter(const char *name);
/* Numbers of the live queue pairs in ascending order, which is the order they were made in. Returns how many there are. */
int rnic_qps(uint32_t *numbers, int room);
/* What a queue pair was told when it went to a state. */
enum rnic_state { RNIC_INIT = 1, RNIC_RTR = 2, RNIC_RTS = 3 };
struct rnic_attr {
    int pkey_index, port, access;                                  /* INIT */
    int mtu, sl, path_port, dlid, is_global, sgid, hops, tc, rnr;  /* RTR */
    uint32_t dest, rq_psn;
    uint8_t dgid[16];
    int timeout, retry, rnr_retry; /* RTS */
};
struct rnic_attr rnic_attr(uint32_t qp, enum rnic_state state);
/* The options (ECE) that were set on a queue pair, -1 if none were. */
long long rnic_ece(uint32_t qp);
/* The next `count` changes of any queue pair to `state` fail with this errno. */
void rnic_fail_moves(enum rnic_state state, uint64_t count, int error);
/* Replaces an entry of the GID table of a device's first port, with the event; "-" empties it. */
void rnic_set_gid(const char *device, int index, const char *entry);
/* Takes the first port of a device down or up. */
void rnic_port(const char *device, bool up);
/* Lets a queue pair break, or a device die, with the event. */
void rnic_kill_qp(uint32_t qp);
void rnic_device_fatal(const char *device);
/* Replaces the fault plan of this process; "" ends it. softrnic/README.md has the words. */
void rnic_faults(const char *plan);
/* How often a rule of the plan fired; rules count from 0. */
uint64_t rnic_fault_fired(unsigned rule);
/* Prints the last events of the device on stderr. */
void rnic_trace_print(unsigned events);

#endif
