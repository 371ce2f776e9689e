// Questions about traffic: how a request ends that the other side refuses, and what is left of both queue pairs.
#include "differ.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const int ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// ---- posting

static void say_posts(struct end *end, struct pair *pair) {
    say("send %s", error_name(post(end, request(pair, IBV_WR_RDMA_WRITE, 8))));
    say("receive %s", error_name(receive(end, pair, 8, 1)));
}
static struct pair with_fresh_end(struct end *end) {
    struct pair pair = pair_new();
    *end = end_new(&(struct ibv_qp_cap){4, 4, 1, 1, 0}, ALL);
    return pair;
}
static void post_in_reset(void) {
    struct end end;
    struct pair pair = with_fresh_end(&end);
    say_posts(&end, &pair);
}
static void post_in_init(void) {
    struct end end;
    struct pair pair = with_fresh_end(&end);
    if (to_init(&end)) stop("no INIT");
    say_posts(&end, &pair);
}
static void post_in_rtr(void) {
    struct end end;
    struct pair pair = with_fresh_end(&end);
    if (to_init(&end) || to_rtr(&end, end.qp->qp_num)) stop("no RTR");
    say_posts(&end, &pair);
}
static void post_in_err(void) {
    struct pair pair = pair_new();
    if (to_state(&pair.a, IBV_QPS_ERR)) stop("no ERR");
    say_posts(&pair.a, &pair);
    struct ibv_wc wc;
    say_status(&pair.a, "");
    say("%s", next(&pair.a, &wc, 10) ? ibv_wc_status_str(wc.status) : "nothing");
}
static void post_of_too_many_sge(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    struct ibv_sge many[64];
    for (int i = 0; i < 64; i++) many[i] = *wr->sg_list;
    wr->sg_list = many;
    wr->num_sge = 64;
    say("send %s", error_name(post(&pair.a, wr)));
    struct ibv_recv_wr recv = {.sg_list = many, .num_sge = 64}, *bad;
    say("receive %s", error_name(ibv_post_recv(pair.a.qp, &recv, &bad)));
}
static void post_of_too_much_inline(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 4096);
    wr->send_flags |= IBV_SEND_INLINE;
    say("%s", error_name(post(&pair.a, wr)));
}
static void post_of_an_unknown_opcode(void) {
    struct pair pair = pair_new();
    say("%s", error_name(post(&pair.a, request(&pair, (enum ibv_wr_opcode)77, 8))));
}
static void posts_until_the_queue_is_full(void) {
    struct end end;
    struct pair pair = with_fresh_end(&end);
    if (to_init(&end)) stop("no INIT");
    int error = 0, n = 0;
    for (; !error && n < 4096; n++) error = receive(&end, &pair, 8, 1);
    say("%s", n == 4096 ? "never" : error_name(error));
}
static void bad_wr_of_a_list(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *first = request(&pair, IBV_WR_RDMA_WRITE, 8), second = *first, third = *first, *bad = NULL;
    struct ibv_sge many[64];
    for (int i = 0; i < 64; i++) many[i] = *first->sg_list;
    second.sg_list = many;
    second.num_sge = 64;
    first->next = &second;
    second.next = &third;
    int error = ibv_post_send(pair.a.qp, first, &bad);
    say("%s at %s", error_name(error), bad == first ? "the first" : bad == &second ? "the second" : bad == &third ? "the third" : "none");
    say_status(&pair.a, "first: ");
    struct ibv_wc wc;
    say("%s", next(&pair.a, &wc, 0.5) ? "and another" : "no other");
}

// ---- requests that the other side refuses

// How the request ends at both ends. `b` has a receive of the buffer's size.
static void say_ends(struct pair *pair, struct ibv_send_wr *wr) {
    int error = post(&pair->a, wr);
    if (error) {
        say("post %s", error_name(error));
        return;
    }
    say_status(&pair->a, "");
    say_states(pair);
}
static void write_with_a_bad_key(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
}
static void empty_write_with_a_bad_key(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 0);
    wr->num_sge = 0;
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
}
static void empty_read_with_a_bad_key(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_READ, 0);
    wr->num_sge = 0;
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
}
static void write_past_the_end(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->wr.rdma.remote_addr += ROOM - 4;
    say_ends(&pair, wr);
}
static void write_of_several_packets_past_the_end(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8192);
    wr->wr.rdma.remote_addr += ROOM - 4096;
    say_ends(&pair, wr);
    bool touched = false;
    for (int i = 0; i < ROOM; i++) touched |= pair.to[i] != 0;
    say("memory %s", touched ? "written" : "untouched");
}
static void write_to_a_region_without_the_right(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->wr.rdma.rkey = reg(pair.to, ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)->rkey;
    say_ends(&pair, wr);
}
static void write_to_a_queue_pair_without_the_right(void) {
    struct pair pair = pair_with(IBV_ACCESS_REMOTE_READ, 18, 7);
    say_ends(&pair, request(&pair, IBV_WR_RDMA_WRITE, 8));
}
static void read_of_a_queue_pair_without_the_right(void) {
    struct pair pair = pair_with(IBV_ACCESS_REMOTE_WRITE, 18, 7);
    say_ends(&pair, request(&pair, IBV_WR_RDMA_READ, 8));
}
static void atomic_on_a_queue_pair_without_the_right(void) {
    struct pair pair = pair_with(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, 18, 7);
    say_ends(&pair, request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, 8));
}
static void read_of_a_region_without_the_right(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_READ, 8);
    wr->wr.rdma.rkey = reg(pair.to, ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)->rkey;
    say_ends(&pair, wr);
}
static void write_to_a_region_of_another_domain(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    struct ibv_pd *other = ibv_alloc_pd(context);
    struct ibv_mr *mr = other ? ibv_reg_mr(other, pair.to, ROOM, ALL) : NULL;
    if (!mr) stop("no region in another domain");
    wr->wr.rdma.rkey = mr->rkey;
    say_ends(&pair, wr);
}
static void write_after_deregistering(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    if (ibv_dereg_mr(pair.to_mr)) stop("ibv_dereg_mr");
    say_ends(&pair, wr);
}
static void write_to_memory_that_was_unmapped(void) {
    struct pair pair = pair_new();
    char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->wr.rdma.rkey = reg(p, PAGE, ALL)->rkey;
    wr->wr.rdma.remote_addr = (uintptr_t)p;
    munmap(p, PAGE);
    say_ends(&pair, wr);
}
static void atomic_not_aligned(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
    wr->wr.atomic.remote_addr += 4;
    say_ends(&pair, wr);
}
static void atomic_aligned(void) {
    struct pair pair = pair_new();
    say_ends(&pair, request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, 8));
    uint64_t value, before;
    memcpy(&value, pair.to, 8);
    memcpy(&before, pair.from, 8);
    say("%llu after %llu", (unsigned long long)value, (unsigned long long)before);
}


static void event_of_a_refused_key(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
    say_event();
}
static void event_of_a_refused_operation(void) {
    struct pair pair = pair_with(IBV_ACCESS_REMOTE_WRITE, 18, 7);
    say_ends(&pair, request(&pair, IBV_WR_RDMA_READ, 8));
    say_event();
}
static void event_of_the_requester(void) {
    struct pair pair = pair_with(ALL, 18, 0);
    say_ends(&pair, request(&pair, IBV_WR_SEND, 8));
    say_event();
}

// ---- requests that are wrong at their own side

static void write_from_a_bad_key(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->sg_list->lkey ^= 0x5500;
    say_ends(&pair, wr);
}
static void write_from_beyond_the_region(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->sg_list->addr += ROOM - 4;
    say_ends(&pair, wr);
}
static void read_into_a_region_without_local_write(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_READ, 8);
    wr->sg_list->lkey = reg(pair.from, ROOM, IBV_ACCESS_REMOTE_READ)->lkey;
    say_ends(&pair, wr);
}
static void unsignalled_failure(void) {
    struct pair pair = pair_new();
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
    wr->send_flags = 0;
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
}
static void failure_among_others(void) {
    struct pair pair = pair_new();
    int errors = 0;
    for (int i = 0; i < 4; i++) {
        struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 8);
        wr->wr_id = (uint64_t)i;
        if (i != 0) wr->send_flags = 0; // what fails and what is flushed completes all the same
        if (i == 1) wr->wr.rdma.rkey ^= 0x5500;
        errors += post(&pair.a, wr) != 0;
    }
    struct ibv_wc wc;
    for (int i = 0; i < 4 && next(&pair.a, &wc, 5); i++) say("%d %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
    if (errors) say("%d posts refused", errors);
}

// ---- messages and receives

static void say_recv(struct end *end) {
    struct ibv_wc wc;
    if (!next(end, &wc, PATIENCE)) {
        say("nothing");
        return;
    }
    say("%s", ibv_wc_status_str(wc.status));
    if (wc.status) return;
    say("opcode %d, %u bytes, immediate %s %x, from a queue pair of %s", wc.opcode, wc.byte_len, wc.wc_flags & IBV_WC_WITH_IMM ? "yes" : "no",
        wc.wc_flags & IBV_WC_WITH_IMM ? ntohl(wc.imm_data) : 0, wc.qp_num == end->qp->qp_num ? "this number" : "another number");
}
static void say_message(struct pair *pair, enum ibv_wr_opcode opcode, uint32_t size, uint32_t room) {
    if (receive(&pair->b, pair, room, 1)) stop("no receive");
    struct ibv_send_wr *wr = request(pair, opcode, size);
    wr->imm_data = htonl(0x1234abcd);
    if (!size) wr->num_sge = 0;
    int error = post(&pair->a, wr);
    if (error) stop("post: %s", error_name(error));
    say_status(&pair->a, "");
    say_recv(&pair->b);
}
static void send_that_fits(void) {
    struct pair pair = pair_new();
    say_message(&pair, IBV_WR_SEND, 100, 200);
}
static void send_with_immediate_of_nothing(void) {
    struct pair pair = pair_new();
    say_message(&pair, IBV_WR_SEND_WITH_IMM, 0, 0);
}
static void write_with_immediate(void) {
    struct pair pair = pair_new();
    say_message(&pair, IBV_WR_RDMA_WRITE_WITH_IMM, 5000, 8);
}
static void write_with_immediate_of_nothing_and_a_bad_key(void) {
    struct pair pair = pair_new();
    pair.to_mr->rkey ^= 0x5500;
    say_message(&pair, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 8);
}
static void send_longer_than_its_receive(void) {
    struct pair pair = pair_new();
    say_message(&pair, IBV_WR_SEND, 200, 100);
    say_states(&pair);
}
static void receive_into_a_bad_key(void) {
    struct pair pair = pair_new();
    pair.to_mr->lkey ^= 0x5500;
    say_message(&pair, IBV_WR_SEND, 8, 100);
    say_states(&pair);
}
static void refused_write_with_immediate_and_its_receive(void) {
    struct pair pair = pair_new();
    if (receive(&pair.b, &pair, 8, 1)) stop("no receive");
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE_WITH_IMM, 8);
    wr->wr.rdma.rkey ^= 0x5500;
    say_ends(&pair, wr);
    struct ibv_wc wc;
    say("receive: %s", next(&pair.b, &wc, 0.5) ? ibv_wc_status_str(wc.status) : "waits");
}
static void no_receive_and_no_retries(void) {
    struct pair pair = pair_with(ALL, 18, 0);
    say_ends(&pair, request(&pair, IBV_WR_SEND, 8));
}
static void peer_without_a_receive_after_its_write(void) {
    struct pair pair = pair_with(ALL, 18, 0);
    say_ends(&pair, request(&pair, IBV_WR_RDMA_WRITE_WITH_IMM, 4096));
    bool touched = false;
    for (int i = 0; i < 4096; i++) touched |= pair.to[i] != 0;
    say("memory %s", touched ? "written" : "untouched");
}
static void peer_in_reset(void) {
    struct pair pair = pair_with(ALL, 12, 7);
    if (to_state(&pair.b, IBV_QPS_RESET)) stop("no RESET");
    say_ends(&pair, request(&pair, IBV_WR_RDMA_WRITE, 8));
}
static void peer_in_err(void) {
    struct pair pair = pair_with(ALL, 12, 7);
    if (to_state(&pair.b, IBV_QPS_ERR)) stop("no ERR");
    say_ends(&pair, request(&pair, IBV_WR_RDMA_WRITE, 8));
}
static void receives_flushed_in_order(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    for (uint64_t i = 0; i < 3; i++)
        if (receive(&pair.b, &pair, 8, i)) stop("no receive");
    if (to_state(&pair.b, IBV_QPS_ERR)) stop("no ERR");
    for (int i = 0; i < 3 && next(&pair.b, &wc, PATIENCE); i++) say("%d %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
    say_event();
}
static void reset_drops_receives(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    if (receive(&pair.b, &pair, 8, 1)) stop("no receive");
    if (to_state(&pair.b, IBV_QPS_RESET)) stop("no RESET");
    say("%s", next(&pair.b, &wc, 0.5) ? ibv_wc_status_str(wc.status) : "nothing completes");
}
static void destroy_drops_completions(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    if (post(&pair.a, request(&pair, IBV_WR_RDMA_WRITE, 8))) stop("post");
    while (!pair.to[0]) sched_yield();
    if (!next(&pair.a, &wc, PATIENCE)) stop("no completion");
    if (post(&pair.b, request(&pair, IBV_WR_RDMA_WRITE, 8))) stop("post");
    if (receive(&pair.b, &pair, 8, 1) || to_state(&pair.b, IBV_QPS_ERR)) stop("no ERR");
    if (ibv_destroy_qp(pair.b.qp)) stop("ibv_destroy_qp");
    int left = 0;
    while (next(&pair.b, &wc, 0.5)) left++;
    say("%s", left ? "some are still polled" : "nothing is polled");
}
static void message_longer_than_the_limit(void) {
    struct ibv_port_attr port;
    if (ibv_query_port(context, 1, &port)) stop("ibv_query_port");
    if (port.max_msg_sz > 64 << 20) {
        say("the limit is above 64 MiB");
        return;
    }
    struct pair pair = pair_new();
    size_t size = (size_t)port.max_msg_sz + 1;
    char *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ibv_mr *mr = reg(p, size, ALL);
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, (uint32_t)size);
    *wr->sg_list = (struct ibv_sge){(uintptr_t)p, (uint32_t)size, mr->lkey};
    wr->wr.rdma.remote_addr = (uintptr_t)p;
    wr->wr.rdma.rkey = mr->rkey;
    say_ends(&pair, wr);
}

// ---- completions

static void completion_of_a_write(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    memset(&wc, 0xff, sizeof wc);
    struct ibv_send_wr *wr = request(&pair, IBV_WR_RDMA_WRITE, 100);
    wr->wr_id = 7;
    if (post(&pair.a, wr) || !next(&pair.a, &wc, PATIENCE)) stop("no completion");
    say("%s, opcode %d, identifier %d, queue pair %s", ibv_wc_status_str(wc.status), wc.opcode, (int)wc.wr_id,
        wc.qp_num == pair.a.qp->qp_num ? "right" : "wrong");
}
static void completion_of_a_read(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    if (post(&pair.a, request(&pair, IBV_WR_RDMA_READ, 100)) || !next(&pair.a, &wc, PATIENCE)) stop("no completion");
    say("%s, opcode %d, %u bytes", ibv_wc_status_str(wc.status), wc.opcode, wc.byte_len);
}
static void too_many_completions(void) {
    struct pair pair = pair_new();
    struct ibv_wc wc;
    struct end small = {.cq = ibv_create_cq(context, 1, NULL, NULL, 0), .access = ALL};
    struct ibv_qp_init_attr init = {.send_cq = pair.a.cq, .recv_cq = small.cq, .qp_type = IBV_QPT_RC, .cap = {4, 512, 1, 1, 0}};
    small.qp = ibv_create_qp(pd, &init);
    if (!small.qp || to_init(&small)) stop("no queue pair");
    int room = small.cq->cqe, posted = 0, got = 0;
    while (posted <= room && !receive(&small, &pair, 8, 1)) posted++;
    if (posted <= room) stop("a completion queue of %d", room);
    if (to_state(&small, IBV_QPS_ERR)) stop("no ERR");
    say_event();
    while (ibv_poll_cq(small.cq, 1, &wc) == 1) got++;
    say("%s are polled", got >= posted ? "all" : got == room ? "as many as it has room for" : got ? "some" : "none");
}
static void notice_of_a_completion_that_is_there(void) {
    struct pair pair = pair_new();
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct end end = {.cq = channel ? ibv_create_cq(context, 8, NULL, channel, 0) : NULL, .access = ALL};
    struct ibv_qp_init_attr init = {.send_cq = end.cq, .recv_cq = end.cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    if (!end.cq || !(end.qp = ibv_create_qp(pd, &init))) stop("no queue pair");
    if (to_init(&end) || to_rtr(&end, end.qp->qp_num) || to_rts(&end, 18, 7)) stop("no connection with itself");
    struct pollfd file = {.fd = channel->fd, .events = POLLIN};
    struct ibv_cq *cq;
    void *argument;
    if (ibv_req_notify_cq(end.cq, 0) || post(&end, request(&pair, IBV_WR_RDMA_WRITE, 8))) stop("no request");
    say("%s of the first", poll(&file, 1, PATIENCE * 1000) == 1 ? "told" : "not told");
    if (ibv_get_cq_event(channel, &cq, &argument)) stop("no event");
    ibv_ack_cq_events(cq, 1);
    if (ibv_req_notify_cq(end.cq, 0)) stop("no notice"); // the completion was not polled
    say("%s of it again", poll(&file, 1, 500) == 1 ? "told" : "not told");
    if (post(&end, request(&pair, IBV_WR_RDMA_WRITE, 8))) stop("no request");
    say("%s of the second", poll(&file, 1, PATIENCE * 1000) == 1 ? "told" : "not told");
}

#define Q(name) {#name, name}
const struct question questions_of_traffic[] = {
    Q(post_in_reset), Q(post_in_init), Q(post_in_rtr), Q(post_in_err), Q(post_of_too_many_sge), Q(post_of_too_much_inline),
    Q(post_of_an_unknown_opcode), Q(posts_until_the_queue_is_full), Q(bad_wr_of_a_list),
    Q(write_with_a_bad_key), Q(empty_write_with_a_bad_key), Q(empty_read_with_a_bad_key), Q(write_past_the_end),
    Q(write_of_several_packets_past_the_end), Q(write_to_a_region_without_the_right), Q(write_to_a_queue_pair_without_the_right),
    Q(read_of_a_queue_pair_without_the_right), Q(read_of_a_region_without_the_right), Q(atomic_on_a_queue_pair_without_the_right),
    Q(write_to_a_region_of_another_domain), Q(write_after_deregistering), Q(write_to_memory_that_was_unmapped),
    Q(atomic_aligned), Q(atomic_not_aligned),
    Q(event_of_a_refused_key), Q(event_of_a_refused_operation), Q(event_of_the_requester),
    Q(write_from_a_bad_key), Q(write_from_beyond_the_region), Q(read_into_a_region_without_local_write), Q(unsignalled_failure),
    Q(failure_among_others),
    Q(send_that_fits), Q(send_with_immediate_of_nothing), Q(write_with_immediate), Q(write_with_immediate_of_nothing_and_a_bad_key),
    Q(send_longer_than_its_receive), Q(receive_into_a_bad_key), Q(refused_write_with_immediate_and_its_receive),
    Q(no_receive_and_no_retries), Q(peer_without_a_receive_after_its_write), Q(peer_in_reset), Q(peer_in_err),
    Q(receives_flushed_in_order), Q(reset_drops_receives), Q(destroy_drops_completions), Q(message_longer_than_the_limit),
    Q(completion_of_a_write), Q(completion_of_a_read), Q(too_many_completions), Q(notice_of_a_completion_that_is_there),
    {NULL, NULL},
};
