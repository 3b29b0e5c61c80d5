/* The pipeline of stages: which work a stage does when (one forward, one backward: 1F1B), and
 * what goes over its borders in between. With one stage it is a loop over micro-batches. */
#ifndef BOOST_WORKER_PIPELINE_H
#define BOOST_WORKER_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/error.h"
#include "worker/comm/comm.h"

struct engine;

enum work_kind { WORK_NONE, WORK_FORWARD, WORK_BACKWARD };
struct work {
    enum work_kind kind;
    int64_t micro; /* number of the micro-batch */
};

/* Work number k of 2n of a stage, for n micro-batches; WORK_NONE outside [0, 2n). At first as many forwards as stages
 * follow, then forward and backward in turn, then the backwards that are left: so that at most
 * stages - stage micro-batches wait for their backward (Narayanan and others, PipeDream-Flush). Pure. */
struct work pipeline_work(int64_t stages, int64_t stage, int64_t n, int64_t k);

/* Whether what `next` receives can only be made once `done` is sent, so that the two cannot be one call: where there
 * are too few micro-batches to fill the pipeline, from the last forward to the first backward. Pure. */
bool pipeline_depends(int64_t stages, int64_t stage, struct work done, struct work next);

/* Between two works of this stage, as one call (two where pipeline_depends()): hands on what `done` made and takes in
 * what `next` needs (the residual and, with LAX, the latents go forward, their gradients back). pass: PASS_FORWARD, or
 * PASS_EVAL for a forward alone. */
MUST_USE int pipeline_exchange(struct engine *e, struct work done, struct work next, enum comm_pass pass,
                               struct error *err);
/* The residual behind this stage's last block, for the next stage (the latents lie where their block put them). */
void pipeline_hand_on(struct engine *e);
/* What came from the next stage becomes the gradient of the last block's output. */
void pipeline_take_over(struct engine *e);

#endif
