/*
 * Waiting for the plugin's own thread to have done what there was to do.
 *
 * What that thread learns (the other end's messages, events of devices) reaches the data path at some moment. A test that
 * is to run the same way twice lets the thread come to rest before each of its own calls.
 */
#ifndef FFI_TESTS_QUIET_H
#define FFI_TESTS_QUIET_H

/* Returns when the thread sleeps and nothing is ready for it; at once when there is none. */
void quiet_wait(void);
/* The thread may be another one from here on: the last communicator was closed, or a first one made. */
void quiet_forget(void);

#endif
