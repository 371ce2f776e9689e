/*
 * What the tests ask of the software RNIC beyond verbs: how much is alive, and, in held mode, what may complete.
 *
 * The calls go to the instance that the plugin has opened (the same path gives the same object), and a test that asks
 * for something the library does not offer fails by name.
 */
#ifndef FFI_TESTS_SOFTRNIC_H
#define FFI_TESTS_SOFTRNIC_H

#include "harness.h"

/* Objects of this process that are alive, and operations that it has executed. */
struct softrnic_counts {
    uint64_t contexts, pds, cqs, qps, mrs;
    uint64_t reads;
};
struct softrnic_counts softrnic_counts(void);
/* From now on send requests of this process stay pending, or no longer do. */
void softrnic_hold(bool on);
/* Lets the oldest `count` pending requests go. */
void softrnic_release(uint64_t count);

#endif
