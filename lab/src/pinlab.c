// SPDX-License-Identifier: GPL-2.0
/*
 * Test module for the lab: says where a page of the caller lies (PFN, migratetype of the pageblock, zone) and takes a
 * device-style pin on a range, short (FOLL_PIN) or long-term (with FOLL_LONGTERM), until told to drop it or closed.
 *
 * The pageblock's migratetype has no exported reader, so it is found through kallsyms, and that through a kprobe:
 * good enough for a test kernel, not for anything else.
 */
#include <linux/fs.h>
#include <linux/kprobes.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include "pinlab.h"

struct pins {
	struct mutex lock;
	struct page **pages;
	long count;
};

static int (*get_migratetype)(const struct page *page, unsigned long pfn); /* newer kernels */
static unsigned long (*get_flags_mask)(const struct page *page, unsigned long pfn, unsigned long mask); /* older ones */

static unsigned long kernel_symbol(const char *name)
{
	static unsigned long (*lookup)(const char *);
	struct kprobe probe = { .symbol_name = "kallsyms_lookup_name" };

	if (!lookup && !register_kprobe(&probe)) {
		lookup = (void *)probe.addr;
		unregister_kprobe(&probe);
	}
	return lookup ? lookup(name) : 0;
}

static long place(struct pinlab_place __user *arg)
{
	struct pinlab_place at;
	struct page *page;
	long n;

	if (copy_from_user(&at, arg, sizeof(at)))
		return -EFAULT;
	n = get_user_pages_fast(at.addr, 1, 0, &page);
	if (n != 1)
		return n < 0 ? n : -EFAULT;
	at.pfn = page_to_pfn(page);
	at.migratetype = get_migratetype ? get_migratetype(page, at.pfn) : (int)get_flags_mask(page, at.pfn, 7);
	at.flags = page_zonenum(page) == ZONE_MOVABLE ? PINLAB_ZONE_MOVABLE : 0;
#ifdef CONFIG_CMA
	if (at.migratetype == MIGRATE_CMA)
		at.flags |= PINLAB_CMA;
#endif
	put_page(page);
	return copy_to_user(arg, &at, sizeof(at)) ? -EFAULT : 0;
}

static void unpin(struct pins *pins)
{
	if (pins->pages)
		unpin_user_pages(pins->pages, pins->count);
	kvfree(pins->pages);
	pins->pages = NULL;
}

static long pin(struct pins *pins, struct pinlab_pin __user *arg)
{
	struct pinlab_pin range;
	long want, got;

	if (copy_from_user(&range, arg, sizeof(range)))
		return -EFAULT;
	if (pins->pages)
		return -EBUSY;
	want = DIV_ROUND_UP(offset_in_page(range.addr) + range.size, PAGE_SIZE);
	pins->pages = kvcalloc(want, sizeof(*pins->pages), GFP_KERNEL);
	if (!pins->pages)
		return -ENOMEM;
	got = pin_user_pages_fast(range.addr & PAGE_MASK, want, FOLL_WRITE | (range.longterm ? FOLL_LONGTERM : 0),
				  pins->pages);
	pins->count = max(got, 0L);
	if (got == want)
		return 0;
	unpin(pins);
	return got < 0 ? got : -EFAULT;
}

static long pinlab_ioctl(struct file *file, unsigned int command, unsigned long arg)
{
	struct pins *pins = file->private_data;
	long result = 0;

	mutex_lock(&pins->lock);
	switch (command) {
	case PINLAB_PLACE:
		result = place((void __user *)arg);
		break;
	case PINLAB_PIN:
		result = pin(pins, (void __user *)arg);
		break;
	case PINLAB_UNPIN:
		unpin(pins);
		break;
	default:
		result = -ENOTTY;
	}
	mutex_unlock(&pins->lock);
	return result;
}

static int pinlab_open(struct inode *inode, struct file *file)
{
	struct pins *pins = kzalloc(sizeof(*pins), GFP_KERNEL);

	if (!pins)
		return -ENOMEM;
	mutex_init(&pins->lock);
	file->private_data = pins;
	return 0;
}

static int pinlab_release(struct inode *inode, struct file *file)
{
	unpin(file->private_data);
	kfree(file->private_data);
	return 0;
}

static const struct file_operations pinlab_operations = {
	.owner = THIS_MODULE,
	.open = pinlab_open,
	.release = pinlab_release,
	.unlocked_ioctl = pinlab_ioctl,
};
static struct miscdevice pinlab_device = { .minor = MISC_DYNAMIC_MINOR, .name = "pinlab", .fops = &pinlab_operations };

static int __init pinlab_init(void)
{
	get_migratetype = (void *)kernel_symbol("get_pfnblock_migratetype");
	get_flags_mask = (void *)kernel_symbol("get_pfnblock_flags_mask");
	if (!get_migratetype && !get_flags_mask) {
		pr_err("pinlab: this kernel offers no way to read a pageblock's migratetype\n");
		return -ENOENT;
	}
	return misc_register(&pinlab_device);
}

static void __exit pinlab_exit(void)
{
	misc_deregister(&pinlab_device);
}

module_init(pinlab_init);
module_exit(pinlab_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("page placement and pins, for tests");
