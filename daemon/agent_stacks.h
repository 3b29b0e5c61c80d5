/* Where ranks of an attempt are: asked of the ranks themselves, else read from /proc. */
#ifndef BOOST_DAEMON_AGENT_STACKS_H
#define BOOST_DAEMON_AGENT_STACKS_H

#include <limits.h>

#include "daemon/procid.h"
#include "proto/agent.pb-c.h"
#include "proto/base/error.h"
#include "proto/rankfiles.h"

struct agent;

enum { AGENT_STACKS_RANKS = 8, AGENT_STACKS_MS = 2000 };

/* One CollectStacks. Zeroed before the first use. */
struct agent_stacks {
    int64_t job;
    int32_t attempt;
    char run_dir[PATH_MAX];
    struct {
        int rank;
        struct procid pid;
        bool has_pid, ended;
        uint32_t request; /* 0: could not be asked */
        struct rank_status before;
        bool has_before;
        Boost__StackRecord *answer;
    } ranks[AGENT_STACKS_RANKS];
    int n_ranks;
    Boost__RankStacks *list[AGENT_STACKS_RANKS]; /* the answer, protobuf-c's memory */
    size_t n;
};

/* Copies what the work needs; the agent's loop. ERR_NOT_FOUND: the attempt is not here, or is not ours. */
MUST_USE int agent_stacks_prepare(struct agent *agent, int64_t job, const Boost__CollectStacks *order,
                                  struct agent_stacks *out, struct error *err);
/* Fills `list`; takes up to AGENT_STACKS_MS. Any thread. */
MUST_USE int agent_stacks_collect(struct agent_stacks *s, struct error *err);
void agent_stacks_free(struct agent_stacks *s);

#endif
