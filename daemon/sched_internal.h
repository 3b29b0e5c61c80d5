/* What the sched*.c files share. Nothing else includes it.
 *
 * Sets of nodes are bits. A view keeps the nodes of a pool in buckets by how many devices they have to give, so that
 * a request looks at bits of nodes and never at nodes one by one, unless it counts memory or switches. What did not
 * fit once does not fit later in the same picture: the shapes of requests remember it. */
#ifndef BOOST_DAEMON_SCHED_INTERNAL_H
#define BOOST_DAEMON_SCHED_INTERNAL_H

#include "daemon/sched.h"

enum { BUCKETS = 257, TOP = BUCKETS - 1 }; /* nodes with TOP devices and more share the last bucket */

struct view {
    int *avail;              /* [n] */
    uint64_t *bits[BUCKETS]; /* NULL: nobody was ever in it */
    int count[BUCKETS];
    uint64_t some[(BUCKETS + 63) / 64]; /* buckets that are not empty */
};

/* The nodes that one kind of request may use at all: up, open, of its user, as labels and lists say. */
struct filter {
    struct filter *next;
    const char *constraint, *nodelist, *exclude;
    uint32_t uid;
    uint64_t *bits;
};
/* What one of its texts says alone: many filters share it. */
enum filter_kind { FILTER_CONSTRAINT, FILTER_LIST, FILTER_EXCLUDE };
struct part_filter {
    struct part_filter *next;
    enum filter_kind kind;
    char *text;
    uint64_t *bits;
};

/* Requests that differ in nothing but who asks. */
struct shape {
    struct shape *next;
    const struct filter *filter;
    enum sched_pool pool;
    int nodes, devices, tp;
    int64_t mib;
    bool exclusive;
    bool never, possible;   /* known: not even on empty nodes; it would be there */
    bool fails, fails_late; /* in the view of now; in the view of what the head leaves */
    bool explained;
    struct sched_answer answer;
};

/* What is taken of one node. */
struct part {
    int node, runner; /* -1: placed in this picture */
    enum sched_pool pool;
    int slots;
    int64_t mib, ends;
    bool exclusive;
};

struct head {
    bool set;
    struct sched_request request;
    const struct filter *filter;
    int64_t when; /* SCHED_ENDLESS: not known */
    bool explained;
    struct sched_answer answer; /* why it waits, once it is asked for */
    uint64_t *reserved;         /* its nodes: those promised, or all that it could use when no time is known */
    int *spare;                 /* [n] devices left at `when` beside the head */
    int64_t *spare_mib;
    struct view late;  /* min(free now, spare) */
    int64_t *late_mib; /* [n] likewise */
};

struct sched {
    const struct sched_node *nodes;
    int n, words, groups;
    int64_t now;
    const struct sched_runner *runners;
    int n_runners;
    struct part *parts; /* what runs, and what was placed since */
    int n_parts, cap_parts;
    struct view slots[SCHED_POOLS], free[SCHED_POOLS];
    int64_t *free_mib, *all_mib;
    uint64_t *idle;
    bool counts_memory; /* somebody has reserved some */
    bool everyone;      /* no node is of one user only */
    struct part_filter *part_filters;
    struct filter *filters, *plain; /* plain: the one without lists and labels, of everyone */
    struct shape *shapes[1024];
    struct head heads[SCHED_POOLS];
    uint64_t *mask; /* scratch */
    int *list, *group_count;
    bool failed;
};

bool view_init(struct view *v, int n, int words);
void view_free(struct view *v);
bool view_set(struct view *v, int words, int node, int avail);

static inline bool bit_get(const uint64_t *bits, int i)
{
    return bits[i / 64] >> (i % 64) & 1;
}
static inline void bit_put(uint64_t *bits, int i, bool on)
{
    uint64_t b = UINT64_C(1) << (i % 64);
    bits[i / 64] = on ? bits[i / 64] | b : bits[i / 64] & ~b;
}

/* NULL: out of memory. */
const struct filter *filter_of(struct sched *s, const struct sched_request *r);
void filters_free(struct sched *s);
struct shape *shape_of(struct sched *s, const struct sched_request *r);

/* MiB that the request reserves on the node. */
int64_t request_mib(const struct sched_node *n, const struct sched_request *r);
/* The nodes that the request may look at, all heads respected that it would outlast; scratch or the filter's. */
const uint64_t *request_mask(struct sched *s, const struct sched_request *r, const struct filter *f);
/* Whether the request outlasts the time promised to the head of the pool. */
bool request_late(const struct sched *s, const struct sched_request *r, enum sched_pool pool);

/* Picks among the nodes of the mask: all or none. free_mib NULL: memory is not asked; idle NULL: nor whether the
 * nodes are empty. chosen NULL: only whether it can be done. */
bool choose(struct sched *s, const struct sched_request *r, const struct view *v, const uint64_t *mask,
            const int64_t *free_mib, const uint64_t *idle, int *chosen);
bool possible(struct sched *s, const struct sched_request *r, struct shape *shape);
/* As sched_place(), changing nothing but what the shape remembers. */
enum sched_verdict sched_judge(struct sched *s, const struct sched_request *r, struct shape *shape);
void take(struct sched *s, const struct sched_request *r, const int *chosen);
/* The free devices and memory of nodes from which parts are given back: what a head, or who preempts, will find. */
struct later {
    int *free;    /* [n] of the request's pool */
    int64_t *mib; /* [n] */
    int *parts;   /* [n] of any pool that are still there */
    int fits;     /* nodes of the filter that fit the request */
    const uint64_t *bits;
};
bool later_init(struct sched *s, const struct sched_request *r, const uint64_t *bits, struct later *l);
void later_free(struct later *l);
/* Gives the part back (or takes it again) and counts anew whether its node fits. */
void later_give(const struct sched *s, const struct sched_request *r, struct later *l, const struct part *p, bool back);

#endif
