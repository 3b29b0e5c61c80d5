/* When to checkpoint and when to stop, the same on every rank without asking anybody: a
 * rank votes while it does step n, the step's all-reduce joins the votes, and what was
 * agreed in step n takes effect after step n+1. Pure. */
#ifndef BOOST_WORKER_AGREEMENT_H
#define BOOST_WORKER_AGREEMENT_H

#include <stdbool.h>
#include <stdint.h>

struct agreement {
    int64_t start;       /* steps done when the attempt began */
    int64_t steps;       /* of the whole run */
    int64_t every_steps; /* interval STEPS; 0: none */
    int64_t every_ns;    /* interval SECONDS and AUTO, which may change it; 0: none */
    bool first_rank;     /* votes for the interval's checkpoints */
    /* private */
    bool due;            /* the interval's checkpoint is wanted and not agreed yet */
    int64_t last_ns;     /* when the last one was agreed, by the first rank's clock */
    int64_t now_ns;
    uint32_t seen, served; /* counter of checkpoints asked for: as this rank saw it last; as agreed, the same on all
                            * ranks, ahead of what this one has seen while others were quicker */
    bool stop, checkpoint; /* agreed in the last step */
    bool waiting;          /* a checkpoint was postponed and has not been agreed since */
    int64_t skipped;       /* of the interval since then */
};

struct agreement_votes {
    bool stop, checkpoint, busy;
    double asked; /* > 0: for a checkpoint besides the interval's; a sum when joined */
};
/* What this rank knows before a step. */
struct agreement_facts {
    bool stop;       /* it was asked to stop */
    uint32_t asked;  /* counter of checkpoints asked for */
    bool busy;       /* its last checkpoint is still being written */
    int64_t now_ns;  /* monotonic */
};
/* What all ranks do after a step. */
struct agreement_actions {
    bool stop, checkpoint;
    bool postponed; /* from here on a checkpoint is wanted, but some rank is still writing the last one */
    int64_t skipped; /* with the agreement on a checkpoint that was postponed: how many more of interval STEPS fell due
                      * meanwhile and are not made; the first rank's alone */
};

void agreement_init(struct agreement *a, int64_t start, int64_t steps, int64_t every_steps, int64_t every_ns,
                    bool first_rank, int64_t now_ns);
/* Votes of this rank in step n (start + 1 is the first). */
struct agreement_votes agreement_vote(struct agreement *a, int64_t n, const struct agreement_facts *facts);
/* After step n, with the joined votes of all ranks. The checkpoint at the very end is the
 * caller's: it needs no vote. */
struct agreement_actions agreement_settle(struct agreement *a, int64_t n, const struct agreement_votes *joined);

#endif
