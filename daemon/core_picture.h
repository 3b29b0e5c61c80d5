/* The scheduler's picture of the nodes, as a pass makes it: between core_picture.c and core_queue.c. */
#ifndef BOOST_DAEMON_CORE_PICTURE_H
#define BOOST_DAEMON_CORE_PICTURE_H

#include "daemon/core_internal.h"

struct avoided {
    int64_t job;
    int node;
};

struct picture {
    struct sched *sched;
    struct sched_node *nodes;
    struct node **of; /* the same, the core's */
    int n;
    struct sched_runner *runners;
    struct job **running; /* the same */
    int n_runners, cap_runners;
    struct sched_held *held;
    int n_held, cap_held;
    struct avoided *avoided; /* what jobs that wait have not let go yet */
    int n_avoided, cap_avoided;
    int *islands;
    int n_islands, cap_islands;
    int *scratch; /* [n]: nodes of one request */
};

/* Of the nodes as they are now, in place of the last one; NULL, and that one stays: out of memory. */
struct picture *picture_make(struct core *c);
/* One more task of its array runs. */
void array_runs(struct core *c, const struct job *job);
/* Whether so many tasks of its array run already as may; in words when `text` is not NULL. */
bool array_keeps(struct core *c, const struct job *job, char *text, size_t cap);
/* Of its time limit; SCHED_ENDLESS: it has none. */
int64_t job_left_ns(struct core *c, const struct job *job);

#endif
