/*
 * What the tests ask of the software RNIC beyond verbs: how much is alive, and, in held mode, what may complete.
 *
 * The library is opened by its path a second time (the plugin has its own reference), so these calls reach the same
 * instance the plugin uses, and a test that asks for something the library does not offer fails by name.
 */
#ifndef FFI_TESTS_SOFTRNIC_H
#define FFI_TESTS_SOFTRNIC_H

#include "harness.h"

#endif
