/* SPDX-License-Identifier: GPL-2.0 */
/* What the test module pinlab.ko and its user agree on: /dev/pinlab. */
#ifndef PINLAB_H
#define PINLAB_H
#include <linux/ioctl.h>
#include <linux/types.h>

enum { PINLAB_CMA = 1, PINLAB_ZONE_MOVABLE = 2 };

struct pinlab_place {
	__u64 addr; /* in: any address of the page */
	__u64 pfn;
	__s32 migratetype; /* of its pageblock, as the kernel numbers it */
	__u32 flags; /* PINLAB_*: what forbids a long-term pin where the page lies now */
};

struct pinlab_pin {
	__u64 addr, size;
	__u32 longterm; /* 0: FOLL_PIN alone; 1: with FOLL_LONGTERM */
	__u32 pad;
};

#define PINLAB_PLACE _IOWR('P', 1, struct pinlab_place)
#define PINLAB_PIN _IOW('P', 2, struct pinlab_pin) /* one at a time for an open file */
#define PINLAB_UNPIN _IO('P', 3)
#endif
