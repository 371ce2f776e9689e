/*
 * Records of events that a test asked for: one JSON document per file, in a folder of the test's own.
 */
#ifndef FFI_TESTS_RECORDS_H
#define FFI_TESTS_RECORDS_H

#include "harness.h"

/* From the next init on, records go to a new folder. */
void want_records(void);
/* How many there are; the text of the last. Each is whole, for its owner only, and nothing else is in the folder. */
int records(char *text, size_t room);
/* Removes them and the folder. */
void forget_records(void);

#endif
