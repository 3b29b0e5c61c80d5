/* What turns reduced gradients into new weights: AdamW, or another one with the same state
 * buffers. A second optimizer is a file of its own and a line in find_optimizer(). */
#ifndef BOOST_WORKER_OPTIMIZER_H
#define BOOST_WORKER_OPTIMIZER_H

#include "worker/plan/plan.h"

struct engine;

struct optimizer {
    const char *name;
    /* Enqueues the update of every element that this replica owns (under zero 0: of all). The gradients are summed
     * over the replicas, the step block says rate, scale, bias corrections and whether to skip; factors of
     * one pair are neighbours in the tensor list. Calls no collective: the engine gathers the weights. */
    void (*update)(struct engine *e);
};

const struct optimizer *find_optimizer(const struct plan *p);

#endif
