/* The software RNIC's own calls; see softrnic.h. */
#include "softrnic.h"

#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

static void *entry(const char *name)
{
    void *library = dlopen(softrnic_path(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) FAIL("%s is not loaded", softrnic_path());
    void *address = dlsym(library, name);
    if (!address) FAIL("%s has no %s", softrnic_path(), name);
    dlclose(library); /* the plugin holds it */
    return address;
}

static uint64_t counter(const char *name)
{
    uint64_t (*read)(const char *) = (uint64_t(*)(const char *))entry("softrnic_counter");
    uint64_t value = read(name);
    if (value == UINT64_MAX) FAIL("the software RNIC has no counter \"%s\"", name);
    return value;
}

uint64_t rnic_counter(const char *name)
{
    return counter(name);
}

struct rnic_counts rnic_counts(void)
{
    return (struct rnic_counts){
        .contexts = counter("contexts_live"),
        .pds = counter("pds_live"),
        .cqs = counter("cqs_live"),
        .qps = counter("qps_live"),
        .mrs = counter("mrs_live"),
        .reads = counter("post_read"),
        .cq_overruns = counter("cq_overruns"),
    };
}

void rnic_keep(void)
{
    if (!dlopen(softrnic_path(), RTLD_NOW | RTLD_LOCAL)) FAIL("dlopen: %s", dlerror());
}

void expect_clean_(struct census before)
{
    struct census now;
    /* A joined thread may be in the list for the moment the kernel needs to remove it. */
    struct deadline deadline = deadline_in(10);
    while ((now = census_take()).threads != before.threads && !deadline_passed(&deadline)) ffi_yield();
    if (now.threads != before.threads || now.descriptors != before.descriptors) census_print("left over");
    CHECK_EQ(now.threads, before.threads);
    CHECK_EQ(now.descriptors, before.descriptors);
    if (now.megabytes > before.megabytes + 256) /* libc keeps an arena of 64 MB and a stack per thread */
        FAIL("%d MB of address space, %d MB before", now.megabytes, before.megabytes);
    struct rnic_counts counts = rnic_counts();
    CHECK_EQ(counts.mrs, 0);
    CHECK_EQ(counts.qps, 0);
    CHECK_EQ(counts.cqs, 0);
    CHECK_EQ(counts.pds, 0);
}

void expect_gone_(struct census before)
{
    if (is_mapped("libnccl-net-pinrail")) FAIL("the library is still mapped after dlclose");
    expect_clean_(before);
    CHECK_EQ(rnic_counts().contexts, 0);
}

void rnic_hold(bool on)
{
    int (*hold)(int) = (int (*)(int))entry("softrnic_hold");
    CHECK_EQ(hold(on), 0);
}

uint64_t rnic_release(uint64_t count)
{
    uint64_t (*release)(uint64_t) = (uint64_t(*)(uint64_t))entry("softrnic_release");
    return release(count);
}

void rnic_fail_registration(uint64_t n)
{
    int (*fail)(uint64_t) = (int (*)(uint64_t))entry("softrnic_fail_reg_mr");
    CHECK_EQ(fail(n), 0);
}

void rnic_fail_registrations_from(uint64_t n)
{
    int (*fail)(uint64_t) = (int (*)(uint64_t))entry("softrnic_fail_reg_from");
    CHECK_EQ(fail(n), 0);
}

void rnic_registration_errno(int value)
{
    int (*set)(int) = (int (*)(int))entry("softrnic_reg_errno");
    CHECK_EQ(set(value), 0);
}

struct rnic_request rnic_posted(int qp, uint64_t wr_id)
{
    typedef int look(uint32_t, uint64_t, int *, uint64_t *);
    struct rnic_request request = {0};
    int error = ((look *)entry("softrnic_posted"))((uint32_t)qp, wr_id, &request.opcode, &request.bytes);
    if (error) FAIL("QP %d has not posted a request with id %#llx (%s)", qp, (unsigned long long)wr_id, strerror(error));
    return request;
}

void rnic_pause_registration(bool on)
{
    int (*pause_next)(int) = (int (*)(int))entry("softrnic_pause_reg");
    CHECK_EQ(pause_next(on), 0);
}

bool rnic_registration_paused(void)
{
    int (*paused)(void) = (int (*)(void))entry("softrnic_reg_paused");
    return paused();
}

void rnic_cma(const char *where)
{
    int (*set)(const char *) = (int (*)(const char *))entry("softrnic_cma");
    CHECK_EQ(set(where), 0);
}

void rnic_pin(void *data, size_t size, bool longterm)
{
    int (*pin)(void *, size_t, int) = (int (*)(void *, size_t, int))entry("softrnic_pin");
    CHECK_EQ(pin(data, size, longterm), 0);
}

void rnic_unpin(void *data, size_t size)
{
    int (*unpin)(void *, size_t) = (int (*)(void *, size_t))entry("softrnic_unpin");
    CHECK_EQ(unpin(data, size), 0);
}

void rnic_forget(void *data, size_t size)
{
    int (*forget)(void *, size_t) = (int (*)(void *, size_t))entry("softrnic_forget");
    CHECK_EQ(forget(data, size), 0);
}

struct rnic_page rnic_page(const void *data)
{
    typedef int look(const void *, uint64_t *, int *, unsigned *, unsigned *);
    struct rnic_page page;
    CHECK_EQ(((look *)entry("softrnic_page"))(data, &page.pfn, &page.migratetype, &page.short_pins, &page.long_pins), 0);
    return page;
}

void rnic_port(const char *device, bool up)
{
    int (*port)(const char *, int, int) = (int (*)(const char *, int, int))entry("softrnic_port");
    CHECK_EQ(port(device, 1, up), 0);
}

int rnic_qps(uint32_t *numbers, int room)
{
    int (*list)(uint32_t *, int) = (int (*)(uint32_t *, int))entry("softrnic_qps");
    int count = list(numbers, room);
    CHECK(count >= 0);
    return count;
}

struct rnic_attr rnic_attr(uint32_t qp, enum rnic_state state)
{
    typedef int look(uint32_t, int, struct ibv_qp_attr *, int *);
    struct ibv_qp_attr attr = {0};
    int mask = 0;
    CHECK_EQ(((look *)entry("softrnic_qp_trace"))(qp, (int)state, &attr, &mask), 0);
    struct rnic_attr seen = {
        .pkey_index = attr.pkey_index,
        .port = attr.port_num,
        .access = (int)attr.qp_access_flags,
        .mtu = (int)attr.path_mtu,
        .sl = attr.ah_attr.sl,
        .path_port = attr.ah_attr.port_num,
        .dlid = attr.ah_attr.dlid,
        .is_global = attr.ah_attr.is_global,
        .sgid = attr.ah_attr.grh.sgid_index,
        .hops = attr.ah_attr.grh.hop_limit,
        .tc = attr.ah_attr.grh.traffic_class,
        .rnr = attr.min_rnr_timer,
        .dest = attr.dest_qp_num,
        .rq_psn = attr.rq_psn,
        .timeout = attr.timeout,
        .retry = attr.retry_cnt,
        .rnr_retry = attr.rnr_retry,
    };
    memcpy(seen.dgid, attr.ah_attr.grh.dgid.raw, sizeof seen.dgid);
    return seen;
}

long long rnic_ece(uint32_t qp)
{
    struct ibv_ece ece = {0};
    int rc = ((int (*)(uint32_t, struct ibv_ece *))entry("softrnic_qp_ece"))(qp, &ece);
    if (rc == ENOENT) return -1;
    CHECK_EQ(rc, 0);
    return ece.options;
}

void rnic_fail_moves(enum rnic_state state, uint64_t count, int error)
{
    int (*fail)(int, uint64_t, int) = (int (*)(int, uint64_t, int))entry("softrnic_fail_modify_qp");
    CHECK_EQ(fail((int)state, count, error), 0);
}

void rnic_set_gid(const char *device, int index, const char *to)
{
    int (*set)(const char *, int, int, const char *) =
        (int (*)(const char *, int, int, const char *))entry("softrnic_set_gid");
    CHECK_EQ(set(device, 1, index, to), 0);
}

void rnic_kill_qp(uint32_t qp)
{
    int (*kill_qp)(uint32_t) = (int (*)(uint32_t))entry("softrnic_kill_qp");
    CHECK_EQ(kill_qp(qp), 0);
}

void rnic_device_fatal(const char *device)
{
    int (*fatal)(const char *) = (int (*)(const char *))entry("softrnic_device_fatal");
    CHECK_EQ(fatal(device), 0);
}

void rnic_faults(const char *plan)
{
    int (*set)(const char *) = (int (*)(const char *))entry("softrnic_faults");
    CHECK_EQ(set(plan), 0);
}

uint64_t rnic_fault_fired(unsigned rule)
{
    uint64_t (*fired)(unsigned) = (uint64_t(*)(unsigned))entry("softrnic_fault_fired");
    uint64_t times = fired(rule);
    if (times == UINT64_MAX) FAIL("there is no fault rule %u", rule);
    return times;
}

void rnic_trace_print(unsigned events)
{
    void (*print)(unsigned) = (void (*)(unsigned))entry("softrnic_trace_print");
    print(events);
}
