/* Which nodes does a job get, and who goes first? Pure: a picture of the nodes and of what runs on them, then one
 * request after the other in the scheduler's order; each that is placed changes the picture, all of its nodes or none.
 *
 * - Best fit: the nodes with the least left over, so that large jobs find whole ones; several nodes come from one
 *   switch where one has enough of them (the one with the least to spare), else from as few switches as possible.
 *   Nodes are given in an order that keeps a switch's together: ranks are numbered through them, so that tensor
 *   parallel groups stay inside a node and pipeline stages go across.
 * - The first of a pool that has to wait is its head (sched_reserve): it is promised the nodes that it can have at the
 *   earliest time known, which goes by the time limits of what runs. Whoever comes later may start only when that does
 *   not make the head's time later: it ends before, or it takes what the head leaves over. What has no limit never
 *   ends, so a head that waits for it has no time: then only those with a limit may use nodes that it could use.
 * - sched_preempt() says who has to go for a head.
 *
 * Memory of its own, freed by sched_free(); the arrays given to sched_new() stay the caller's and outlive it. */
#ifndef BOOST_DAEMON_SCHED_H
#define BOOST_DAEMON_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/rpc.pb-c.h"

/* A node's devices are two pools that know nothing of each other. */
enum sched_pool { SCHED_CPU, SCHED_GPU, SCHED_POOLS };

#define SCHED_ENDLESS INT64_MAX

struct sched_node {
    const char *name;
    int slots[SCHED_POOLS]; /* devices that work */
    int free[SCHED_POOLS];  /* of them, 0 or more */
    int64_t memory_mib;     /* 0: not known, and then not counted */
    int64_t free_mib;       /* what no job has reserved */
    bool up;                /* liveness UP */
    bool open;              /* admin state takes new work */
    bool used;              /* some job has something of it: not for one that wants it whole */
    uint32_t uid;           /* of its agent: 0 takes everyone's jobs, else only its own */
    Boost__KeyValue *const *labels;
    size_t n_labels;
    int group;          /* nodes with the same number >= 0 hang on one switch; -1: not told */
    const int *islands; /* free GPUs of each NVLink group; NULL: all are joined, or nothing is known */
    int n_islands;
};

/* Something that runs, or is being stopped. */
struct sched_runner {
    int64_t id; /* of the job, for the caller */
    int priority;
    int64_t since; /* ns of the caller's clock: who came last goes first */
    int64_t ends;  /* at the latest, SCHED_ENDLESS: not known */
    bool leaving;  /* its devices come free without anybody being asked */
    bool firm;     /* is never preempted */
};
/* What it has on one node. */
struct sched_held {
    int node, runner; /* indices */
    enum sched_pool pool;
    int slots;
    int64_t mib;
    bool exclusive;
};

struct sched_request {
    int64_t id; /* of the job; 0: of one to come */
    enum sched_pool pool;
    int nodes;            /* >= 1 */
    int devices_per_node; /* >= 1 */
    int tp;               /* a tensor parallel group that should share NVLink; 0 or 1: none */
    int64_t mib_per_rank; /* 0: its share of the node's slots, of the CPU pool; of GPUs nothing */
    bool exclusive;       /* nobody else on its nodes */
    uint32_t uid;
    const char *constraint, *nodelist, *exclude; /* checked; "" or NULL: none */
    int64_t runs_ns;                             /* at most; SCHED_ENDLESS: no limit */
    const int *avoid;                            /* nodes where an earlier attempt is not confirmed dead */
    int n_avoid;
};

/* BEHIND: it would fit, and would make the head of its pool wait longer. NEVER: not even were all nodes that are up
 * empty. */
enum sched_verdict { SCHED_PLACED, SCHED_WAIT, SCHED_BEHIND, SCHED_NEVER };

enum { SCHED_TEXT = 512 };
struct sched_answer {
    enum sched_verdict verdict;
    Boost__Reason__Value reason; /* when not placed */
    char text[SCHED_TEXT];       /* "needs 2 devices, 1 of 2 free" */
};

struct sched;
/* NULL: out of memory. `now` is of the clock that runners' `ends` go by. */
struct sched *sched_new(const struct sched_node *nodes, int n_nodes, const struct sched_runner *runners, int n_runners,
                        const struct sched_held *held, int n_held, int64_t now);
void sched_free(struct sched *s);

/* PLACED: chosen[0..request->nodes) gets indices of nodes, and the picture has them taken. Else nothing changes. */
enum sched_verdict sched_place(struct sched *s, const struct sched_request *request, int *chosen);
/* What sched_place() would say, with the reason in words; changes nothing. */
void sched_explain(struct sched *s, const struct sched_request *request, struct sched_answer *out);
/* The request that got WAIT is the head of its pool from now on, unless there is one. */
void sched_reserve(struct sched *s, const struct sched_request *request);
/* The head's job; -1: none. *when: the time that it was promised, SCHED_ENDLESS: not known. */
int64_t sched_head(const struct sched *s, enum sched_pool pool, int64_t *when);
/* No request of the pool can be placed any more. */
bool sched_full(const struct sched *s, enum sched_pool pool);
/* Who has to go so that the request, which got WAIT, fits: indices of runners into victims (room for all), the count.
 * As few as need be: of the lowest priority first, the latest started first among equals; none of a priority over
 * `priority` - `gap`. 0: nobody, since that would not do, or those that are leaving do. */
int sched_preempt(struct sched *s, const struct sched_request *request, int priority, int gap, int *victims);
/* Memory ran out on the way: answers since then may be WAIT for that alone. */
bool sched_failed(const struct sched *s);

#endif
