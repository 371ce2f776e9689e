/*
 * Messages over several rails, some of which fail: every byte and size is checked.
 */
#ifndef FFI_TESTS_TRAFFIC_H
#define FFI_TESTS_TRAFFIC_H

#include "pair.h"

enum { WINDOW = 24, MEMBERS = 8, LARGEST = 150000 };

/* A host with `rails` devices made into one, whose ports give up after a moment. */
int fused_start(struct net *net, int version, int rails, const char *qps);
/* Takes the port of a rail down or up. */
void rail_port(int rail, bool up);

/* Receives of `members` messages and the sends that answer them, WINDOW at a time, each checked when it is done. */
struct traffic {
    const struct pair *pair;
    struct guarded from[WINDOW], to[WINDOW];
    void *from_mr[WINDOW], *to_mr[WINDOW];
    void *receives[WINDOW], *sends[WINDOW][MEMBERS];
    size_t sizes[WINDOW][MEMBERS];
    uint64_t numbers[WINDOW];
    int members;
    size_t room; /* of one member */
    uint64_t random, next, done;
};

void traffic_new(struct traffic *traffic, const struct pair *pair, int members, uint64_t seed);
void traffic_free(struct traffic *traffic);
/* Posts a receive in a place of the window that is free, if the plugin takes it. */
void traffic_receive(struct traffic *traffic, int at);
/* One look at everything in the window. */
void traffic_step(struct traffic *traffic, uint64_t count);
/* Until `count` receives in all are done. */
void traffic_run(struct traffic *traffic, uint64_t count);

/* A plan in which every rail but the first meets a mishap, and payloads come in pieces and late on all. */
void traffic_plan(char *plan, size_t room, int rails, uint64_t *random);

#endif
