/* Memory that cannot be registered, and transfers from and to it; see held.h. */
#include "held.h"

#include <stdlib.h>

void held_start(struct net *net, int version)
{
    setenv("SOFTRNIC_CMA", "all", 1);
    net_start(net, version);
}

struct guarded held_new(size_t size, size_t misalignment, bool held)
{
    struct guarded buffer = guarded_new(size, misalignment);
    rnic_forget(buffer.map, buffer.map_size); /* what was there before may have been moved out of CMA */
    if (held) rnic_pin(buffer.map, buffer.map_size, false);
    return buffer;
}

void held_free(struct guarded *buffer)
{
    if (rnic_page(buffer->map).short_pins) rnic_unpin(buffer->map, buffer->map_size);
    guarded_free(buffer);
}

/* ---- who holds it -------------------------------------------------------------------------------------------- */

bool is_registered(const struct guarded *buffer)
{
    const uint8_t *last = buffer->data + (buffer->size ? buffer->size - 1 : 0);
    unsigned pins = rnic_page(buffer->data).long_pins;
    if ((rnic_page(last).long_pins > 0) != (pins > 0)) FAIL("a buffer of %zu bytes is registered in part", buffer->size);
    return pins > 0;
}

void *register_direct_(const struct net *net, void *comm, const struct guarded *buffer)
{
    void *mr = register_host_(net, comm, buffer->data, buffer->size ? buffer->size : 1);
    CHECK(is_registered(buffer));
    return mr;
}

void *register_bounced_(const struct net *net, void *comm, const struct guarded *buffer)
{
    void *mr = register_host_(net, comm, buffer->data, buffer->size ? buffer->size : 1);
    CHECK(!is_registered(buffer));
    CHECK_EQ(rnic_page(buffer->data).short_pins, 1);
    return mr;
}

/* ---- a connection with buffers ------------------------------------------------------------------------------- */

void desk_lay(struct desk *desk, enum ends held, size_t from, size_t to)
{
    const struct net *net = &desk->net;
    bool at_sender = held & SENDER, at_receiver = held & RECEIVER;
    pair_open(net, 0, &desk->pair);
    desk->from = held_new(from, 3, at_sender);
    desk->to = held_new(to, 5, at_receiver);
    desk->from_mr = (at_sender ? register_bounced_ : register_direct_)(net, desk->pair.send, &desk->from);
    desk->to_mr = (at_receiver ? register_bounced_ : register_direct_)(net, desk->pair.recv, &desk->to);
}

void desk_open(struct desk *desk, int version, enum ends held, size_t size)
{
    held_start(&desk->net, version);
    desk_lay(desk, held, size, size);
}

void desk_clear(struct desk *desk)
{
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.send, desk->from_mr));
    CHECK_OK(net_dereg_mr(&desk->net, desk->pair.recv, desk->to_mr));
    pair_close(&desk->pair);
    held_free(&desk->from);
    held_free(&desk->to);
}

void desk_close(struct desk *desk)
{
    desk_clear(desk);
    net_stop(&desk->net);
}

void *desk_irecv(struct desk *desk, size_t offset, size_t size, int tag)
{
    void *data = desk->to.data + offset;
    return try_irecv_(&desk->net, desk->pair.recv, 1, &data, &size, &tag, &desk->to_mr);
}

void *desk_isend(struct desk *desk, size_t offset, size_t size, int tag)
{
    return try_isend_(&desk->net, desk->pair.send, desk->from.data + offset, size, tag, desk->from_mr);
}

/* ---- a whole message ----------------------------------------------------------------------------------------- */

void held_message_(const struct pair *pair, struct guarded *from, void *from_mr, size_t sent, struct guarded *to,
                   void *to_mr, size_t asked, uint64_t key)
{
    const struct net *net = pair->net;
    size_t moved = sent < asked ? sent : asked;
    guarded_reset(from);
    guarded_reset(to);
    pattern_fill(from->data, sent, key);
    void *receive = irecv_(net, pair->recv, to->data, asked, (int)key, to_mr);
    void *send = isend_(net, pair->send, from->data, sent, (int)key, from_mr);
    CHECK_EQ(wait_size_(net, send), moved);
    CHECK_EQ(wait_size_(net, receive), moved);
    CHECK_BUFFER(to, moved, key);
    CHECK_BUFFER(from, sent, key);
}
