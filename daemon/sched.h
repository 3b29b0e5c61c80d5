/* Which nodes does a job get? Pure: a picture of the nodes and one request in, a
 * choice or the reason to wait out. Called in the order priority (higher first),
 * then submit; the caller passes over the pool of the first job that has to wait for what others
 * hold (SCHED_WAIT), so that small jobs never starve a large one, and passes over
 * one that the nodes present could not take even when empty (SCHED_NEVER). */
#ifndef BOOST_DAEMON_SCHED_H
#define BOOST_DAEMON_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/rpc.pb-c.h"

/* A node's devices are two pools that know nothing of each other. */
enum sched_pool { SCHED_CPU, SCHED_GPU, SCHED_POOLS };

struct sched_node {
    const char *name;
    int slots[SCHED_POOLS]; /* devices that work */
    int free[SCHED_POOLS];  /* of them, 0 or more */
    bool up;                /* liveness UP */
    bool open;              /* admin state takes new work */
    uint32_t uid;           /* of its agent: 0 takes everyone's jobs, else only its own */
};

struct sched_request {
    enum sched_pool pool;
    int nodes;            /* >= 1 */
    int devices_per_node; /* >= 1 */
    uint32_t uid;
};

enum sched_verdict { SCHED_PLACED, SCHED_WAIT, SCHED_NEVER };

enum { SCHED_TEXT = 256 };
struct sched_answer {
    enum sched_verdict verdict;
    Boost__Reason__Value reason; /* when not placed */
    char text[SCHED_TEXT];       /* "needs 2 devices, 1 of 2 free" */
    bool no_memory;              /* to look: waits, and for nothing that anybody would tell of */
};

/* chosen[0..request->nodes) gets indices into nodes[], first fit in their order, all or nothing. */
void sched_place(const struct sched_node *nodes, int n_nodes, const struct sched_request *request, int *chosen,
                 struct sched_answer *out);

#endif
