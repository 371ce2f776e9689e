/* The C API of the pinrail NCCL network plugin. Generated from plugin/capi.rs; `make header` refreshes it. */

#ifndef PINRAIL_H
#define PINRAIL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 The plugin's version as a NUL-terminated string, such as "0.1.0". Static: never freed. Callable from any thread, at
 any time.
 */
const char *pinrail_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINRAIL_H */
