/* Agents that a test drives by hand: they do what they are told as real ones would, and say what the test says. */
#ifndef BOOST_TESTS_AGENTS_H
#define BOOST_TESTS_AGENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/core.h"

struct world;

struct end {
    int exit_code, signal;
    bool killed, done, oom, lost;
    const char *error, *log, *device;
    int64_t seq; /* 0: the next one */
};

struct fake_attempt {
    int64_t job;
    int attempt, world, dp, micro_batch;
    int ranks[8], n_ranks;
    bool cuda;
    int gpus[8]; /* by index into ranks */
    int64_t from_step, step, steps;
    char resume[256], ckpt_dir[256];
    bool alive, forgotten, node_end_acked;
    bool epilog; /* runs: told so when the agent registers, with alive */
    bool ended[8]; /* by index into ranks */
    bool end_acked[8];
    struct end ends[8];
    int64_t seq; /* keeper's */
    int64_t metrics_seq[8], shards_seq[8];
    const char *warning; /* in its metrics from now on */
    int terms, kills, starts, checkpoints_asked;
};

struct fake_agent {
    char name[32], boot[32], instance[32];
    int slots;
    int cores; /* 0: not told */
    int gpus;
    bool gpus_unknown; /* its driver has not answered yet */
    const char *gpu_trouble[8];
    bool gpu_taken[8]; /* by a process of somebody else */
    uint32_t uid;
    bool connected, beating;
    bool obeys_kill, obeys_term, answers; /* true: as a sound one */
    struct fake_attempt attempts[256];
    int n_attempts;
    int preflight_code; /* 0: fine */
    int verify_code;    /* for the paths that contain verify_bad; */
    char verify_bad[64];
    char *tool_fault; /* that a look at a checkpoint finds; NULL: none */
    int manifest_code;
    const char *failure_text; /* of whichever of these; NULL: some words */
    int mirror_code, delete_code, fetch_code;
    int fetches;            /* FetchData; */
    int fetch_tries;        /* of each request, in the newest, */
    bool fetched_init;      /* which was for init_from too, */
    bool silent_fetch;      /* and takes for ever */
    uint64_t cancelled;     /* id of the newest task that nobody wants any more */
    bool silent_mirror;     /* copies take for ever */
    int mirrors;            /* copies that were asked for; */
    char mirrored[512];     /* the newest: directory and where to */
    char deleted_copy[256]; /* with the newest deletion; "" = none */
    char verify_mirror[256];
    int stacks_code;                /* of CollectStacks */
    int shared_code;                /* of ProveShared */
    Boost__FoundCheckpoint **found; /* of FindCheckpoints */
    size_t n_found;
    int manifests, deletes, verifies, preflights, proofs, finds;
    uint64_t last_task; /* id of the newest */
    char deleted[512];
    int64_t next_beat;
};

struct fake_agent *agent_of(struct world *w, const char *name);
struct fake_attempt *fake_find(struct fake_agent *a, int64_t job, int attempt);
void say(struct world *w, const char *node, const Boost__AgentMessage *m);
/* The answer to a task that was left without one; failure: NULL = it is done. */
void say_task(struct world *w, const char *node, uint64_t task, Boost__Failure *failure);
void say_update(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int phase, int64_t step);
/* All ranks of the attempt on this node have done `step` steps. */
void say_step(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step);
void say_end_of(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, struct end e);
void say_node_end(struct world *w, struct fake_agent *a, struct fake_attempt *x);
void say_shard(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step, const char *error);
void say_checkpoint(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step);
/* The attempt comes to the step and writes its checkpoint, and the core is done with that. */
void checkpoint_at(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step);
enum { MOST_VALUES = 4 };
struct named_value {
    const char *name;
    double value;
};
/* The next metrics of a rank, by index into ranks. */
void say_values(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step,
                const struct named_value *values, size_t n);
void say_metrics(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step, double loss);
/* Every rank finishes its last step, checkpoints and ends clean. */
void say_finished(struct world *w, struct fake_agent *a, struct fake_attempt *x);
void kill_all(struct world *w, struct fake_agent *a, struct fake_attempt *x);
enum { GPU_MIB = 100000 };

/* What a real agent tells of its GPUs, in memory of the next call's. */
Boost__DeviceReport *gpu_report(const struct fake_agent *a);
void say_devices(struct world *w, struct fake_agent *a);
bool world_send(void *arg, const char *node, const Boost__ControllerMessage *m);

#endif
