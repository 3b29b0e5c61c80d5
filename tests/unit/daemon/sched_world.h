/* Small random clusters for the scheduler's tests, and what a patient reader of its contract would compute by trying
 * everything. Each test program includes it once. */
#ifndef BOOST_TESTS_SCHED_WORLD_H
#define BOOST_TESTS_SCHED_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/sched.h"

#define HELPER static __attribute__((unused))

enum { MAX_NODES = 6, MAX_PARTS = 64 };

struct rng {
    uint64_t s;
};
HELPER uint64_t next_random(struct rng *r)
{
    r->s ^= r->s << 13;
    r->s ^= r->s >> 7;
    r->s ^= r->s << 17;
    return r->s;
}
HELPER int pick(struct rng *r, int low, int high) /* both included */
{
    return low + (int)(next_random(r) % (uint64_t)(high - low + 1));
}

/* What is taken, kept by the test on its own. */
struct held_part {
    int node, slots, pool;
    int64_t mib, ends;
    bool exclusive;
    int runner; /* -1: placed by the scheduler */
};
struct cluster {
    struct sched_node nodes[MAX_NODES];
    int n;
    struct sched_runner runners[16];
    int n_runners;
    struct sched_held held[MAX_PARTS];
    int n_held;
    struct held_part parts[MAX_PARTS];
    int n_parts;
    char names[MAX_NODES][8];
};

HELPER void cluster_node(struct cluster *c, int slots, int64_t mib)
{
    int i = c->n++;
    snprintf(c->names[i], sizeof c->names[i], "n%d", i);
    c->nodes[i] = (struct sched_node){.name = c->names[i],
                                      .slots = {[SCHED_CPU] = slots, [SCHED_GPU] = slots},
                                      .free = {[SCHED_CPU] = slots, [SCHED_GPU] = slots},
                                      .memory_mib = mib,
                                      .free_mib = mib,
                                      .up = true,
                                      .open = true,
                                      .group = -1};
}

HELPER int cluster_runner(struct cluster *c, int priority, int64_t ends)
{
    c->runners[c->n_runners] =
        (struct sched_runner){.id = 100 + c->n_runners, .priority = priority, .since = c->n_runners, .ends = ends};
    return c->n_runners++;
}

/* The runner has so many slots of the node, when they are free. */
HELPER bool cluster_hold(struct cluster *c, int runner, int node, int slots)
{
    struct sched_node *n = &c->nodes[node];
    if (n->free[SCHED_CPU] < slots || c->n_held == MAX_PARTS)
        return false;
    n->free[SCHED_CPU] -= slots;
    n->used = true;
    c->held[c->n_held++] = (struct sched_held){.node = node, .runner = runner, .pool = SCHED_CPU, .slots = slots};
    c->parts[c->n_parts++] =
        (struct held_part){.node = node, .slots = slots, .ends = c->runners[runner].ends, .runner = runner};
    return true;
}

/* Some nodes, some of them partly taken by jobs with and without an end. */
HELPER void cluster_random(struct cluster *c, struct rng *r)
{
    *c = (struct cluster){0};
    for (int n = pick(r, 1, MAX_NODES); n > 0; n--) {
        cluster_node(c, pick(r, 1, 4), 0);
        c->nodes[c->n - 1].up = pick(r, 0, 9) > 0;
        c->nodes[c->n - 1].open = pick(r, 0, 9) > 0;
    }
    for (int k = pick(r, 0, 8); k > 0; k--) {
        int runner = cluster_runner(c, pick(r, 0, 5) * 10, pick(r, 0, 2) ? pick(r, 1, 8) * 10 : SCHED_ENDLESS);
        for (int parts = pick(r, 1, 2), i = 0; i < parts; i++)
            cluster_hold(c, runner, pick(r, 0, c->n - 1), pick(r, 1, 3));
    }
}

HELPER struct sched *cluster_sched(struct cluster *c)
{
    struct sched *s = sched_new(c->nodes, c->n, c->runners, c->n_runners, c->held, c->n_held, 0);
    assert_non_null(s);
    return s;
}

HELPER struct sched_request request_random(struct rng *r, int64_t id)
{
    return (struct sched_request){.id = id,
                                  .nodes = pick(r, 1, 3),
                                  .devices_per_node = pick(r, 1, 4),
                                  .exclusive = pick(r, 0, 7) == 0,
                                  .runs_ns = pick(r, 0, 1) ? pick(r, 1, 9) * 10 : SCHED_ENDLESS};
}

/* Devices of the node that are free at a time, all that end by then gone; -1: the request cannot use it then. */
HELPER int free_at(const struct cluster *c, const struct sched_request *q, int node, int64_t when)
{
    const struct sched_node *n = &c->nodes[node];
    int left = n->slots[SCHED_CPU], there = 0;
    bool whole = false;
    for (int k = 0; k < c->n_parts; k++) {
        const struct held_part *p = &c->parts[k];
        if (p->node != node || (p->ends != SCHED_ENDLESS && p->ends <= when))
            continue;
        left -= p->slots;
        whole |= p->exclusive;
        there++;
    }
    if (!n->up || !n->open || whole || (q->exclusive && there))
        return -1;
    return left;
}

HELPER int fitting(const struct cluster *c, const struct sched_request *q, int64_t when)
{
    int n = 0;
    for (int i = 0; i < c->n; i++)
        n += free_at(c, q, i, when) >= q->devices_per_node;
    return n;
}

/* The earliest time at which the request fits; SCHED_ENDLESS: never. */
HELPER int64_t earliest(const struct cluster *c, const struct sched_request *q)
{
    int64_t best = fitting(c, q, 0) >= q->nodes ? 0 : SCHED_ENDLESS;
    for (int k = 0; k < c->n_parts; k++) {
        int64_t at = c->parts[k].ends;
        if (at < best && fitting(c, q, at) >= q->nodes)
            best = at;
    }
    return best;
}

/* Books what the scheduler chose, and sees that it was there to be chosen. */
HELPER void cluster_take(struct cluster *c, const struct sched_request *q, const int *chosen)
{
    for (int i = 0; i < q->nodes; i++) {
        assert_in_range(chosen[i], 0, c->n - 1);
        for (int k = 0; k < i; k++)
            assert_int_not_equal(chosen[k], chosen[i]);
        assert_true(free_at(c, q, chosen[i], 0) >= q->devices_per_node);
    }
    for (int i = 0; i < q->nodes; i++)
        c->parts[c->n_parts++] = (struct held_part){.node = chosen[i],
                                                    .slots = q->devices_per_node,
                                                    .ends = q->runs_ns == SCHED_ENDLESS ? SCHED_ENDLESS : q->runs_ns,
                                                    .exclusive = q->exclusive,
                                                    .runner = -1};
}

#endif
