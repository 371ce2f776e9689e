/*
 * The one device of the null provider: "null0", one active InfiniBand port.
 */
#include "null.h"

#include <errno.h>
#include <string.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define GUID 0x0100000000b16e02ull /* network order of 02:6e:b1:00:00:00:00:01 */

/* Providers look behind the public struct; the padding reads as "not one of mine". */
static struct {
    struct ibv_device device;
    char padding[512];
} null_device = {
    .device = {.node_type = IBV_NODE_CA,
               .transport_type = IBV_TRANSPORT_IB,
               .name = "null0",
               .dev_name = "uverbs0",
               .dev_path = "/dev/null",
               .ibdev_path = "/nonexistent/null0"},
};

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = null_alloc(2 * sizeof *list);
    if (!list) {
        errno = ENOMEM;
        return NULL;
    }
    list[0] = &null_device.device;
    if (count)
        *count = 1;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    null_free(list, 2 * sizeof *list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    (void)device;
    return GUID;
}

int ibv_get_device_index(struct ibv_device *device)
{
    (void)device;
    return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
    struct ibv_port_attr full;
    (void)context;
    if (port != 1)
        return EINVAL;
    memset(&full, 0, sizeof full);
    full.state = IBV_PORT_ACTIVE;
    full.max_mtu = full.active_mtu = IBV_MTU_4096;
    full.gid_tbl_len = 1;
    full.max_msg_sz = 1u << 31;
    full.pkey_tbl_len = 1;
    full.lid = 1;
    full.sm_lid = 1;
    full.max_vl_num = 1;
    full.active_width = 2;
    full.active_speed = 128;
    full.phys_state = 5;
    full.link_layer = IBV_LINK_LAYER_INFINIBAND;
    memcpy(attr, &full, size < sizeof full ? size : sizeof full);
    return 0;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    /* The exported call knows the 48-byte struct only. */
    return query_port(context, port, (struct ibv_port_attr *)attr, 48);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    memset(attr, 0, sizeof *attr);
    strcpy(attr->fw_ver, "0");
    attr->node_guid = attr->sys_image_guid = GUID;
    attr->max_mr_size = ~0ull;
    attr->page_size_cap = ~0xfffull;
    attr->max_qp = (int)NULL_MAX_QPS - 32;
    attr->max_qp_wr = 16384;
    attr->max_sge = attr->max_sge_rd = 16;
    attr->max_cq = 65536;
    attr->max_cqe = 1 << 20;
    attr->max_mr = (int)NULL_MAX_MRS;
    attr->max_pd = 4096;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
    attr->max_res_rd_atom = 1 << 16;
    attr->atomic_cap = IBV_ATOMIC_HCA;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct verbs_context *outer = null_alloc(sizeof *outer);
    struct ibv_context *context;
    if (!outer) {
        errno = ENOMEM;
        return NULL;
    }
    outer->sz = sizeof *outer;
    outer->query_port = query_port;
    context = &outer->context;
    context->device = device;
    context->ops.poll_cq = null_poll_cq;
    context->ops.req_notify_cq = null_req_notify_cq;
    context->ops.post_send = null_post_send;
    context->ops.post_recv = null_post_recv;
    context->cmd_fd = -1;
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    context->num_comp_vectors = 1;
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    pthread_mutex_init(&context->mutex, NULL);
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    struct verbs_context *outer = verbs_get_ctx(context);
    close(context->async_fd);
    pthread_mutex_destroy(&context->mutex);
    null_free(outer, sizeof *outer);
    return 0;
}

/* Nothing ever happens to this device: a blocking caller waits for good, a non-blocking one gets EAGAIN. */
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    uint64_t one;
    (void)event;
    if (read(context->async_fd, &one, sizeof one) != sizeof one)
        return -1;
    errno = EIO;
    return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    (void)context;
    if (port != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    gid->global.subnet_prefix = 0x80feull;
    gid->global.interface_id = GUID;
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t size)
{
    struct ibv_gid_entry full;
    (void)flags;
    memset(&full, 0, sizeof full);
    if (ibv_query_gid(context, (uint8_t)port, (int)index, &full.gid))
        return ENODATA;
    full.port_num = 1;
    full.gid_type = IBV_GID_TYPE_IB;
    memcpy(entry, &full, size < sizeof full ? size : sizeof full);
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max, uint32_t flags,
                             size_t size)
{
    if (max < 1)
        return -EINVAL;
    return _ibv_query_gid_ex(context, 1, 0, entries, flags, size) ? -EINVAL : 1;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    (void)context, (void)port, (void)index;
    *pkey = 0xffff;
    return 0;
}

int ibv_fork_init(void)
{
    return 0;
}

enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

/* The strings name the number only; nobody reads them in a run that works. */
static const char *numbered(const char *what, int value)
{
    static __thread char text[64];
    snprintf(text, sizeof text, "%s %d", what, value);
    return text;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    return numbered("completion status", status);
}

const char *ibv_event_type_str(enum ibv_event_type type)
{
    return numbered("event", type);
}

const char *ibv_node_type_str(enum ibv_node_type type)
{
    return numbered("node type", type);
}

const char *ibv_port_state_str(enum ibv_port_state state)
{
    return numbered("port state", state);
}
