/* What the replicas of a stage do together, and the two stages that hold a tied table: sums of
 * gradients, each bucket as soon as the last micro-batch's backward has completed it and under the rest of
 * that backward, and under zero 1 the new weights from whoever updated them. */
#ifndef BOOST_WORKER_DATA_PARALLEL_H
#define BOOST_WORKER_DATA_PARALLEL_H

#include "worker/engine_internal.h"

/* Fills in e->buckets and e->owned from plan, stage and rank. */
MUST_USE int data_parallel_prepare(struct engine *e, struct error *err);
/* No bucket of the step is reduced yet. */
void data_parallel_begin(struct engine *e);
/* Begins to sum every bucket that is complete now that the backward of `layer` is done (L: of the head, -1: of all).
 * The order is the same on all replicas. Until data_parallel_wait() its gradients are nobody else's. */
void data_parallel_reduce(struct engine *e, int64_t layer);
/* Until all that was begun is summed; under zero 1 a replica then has the sum of its own pieces only. */
MUST_USE int data_parallel_wait(struct engine *e, struct error *err);
/* Behind the last bucket: adds the gradients of a tied table on first and last stage. */
MUST_USE int data_parallel_join_tables(struct engine *e, struct error *err);
/* Under zero 1: every replica gets the weights that the others own. */
MUST_USE int data_parallel_gather(struct engine *e, struct error *err);

#endif
