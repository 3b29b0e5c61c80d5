/* One rank's training engine: parameters, the step, evaluation. It knows the model,
 * the plan, the kernels and the collectives; it knows nothing of files, data
 * formats, agents or jobs. One thread per engine. */
#ifndef BOOST_WORKER_ENGINE_H
#define BOOST_WORKER_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/comm/comm.h"
#include "worker/plan/plan.h"

struct engine;

/* The groups that the ranks of a plan form. */
struct comm_layout engine_layout(const struct plan *plan);

/* plan, kernels and comms stay the caller's and outlive the engine. Allocates the arena (plan_memory); where there
 * is no room for it the error says what it would hold: ERR_NOMEM, on CUDA ERR_INVALID, since a rank has its device to
 * itself and it will not fit next time, or ERR_DEVICE when other processes have that memory. Checks the attention that
 * the plan asks for. */
MUST_USE int engine_create(const struct plan *plan, const struct kernels *k, struct comms *comms, int rank, int threads,
                           struct engine **out, struct error *err);
/* Behind whoever was handed its streams. */
void engine_destroy(struct engine *e);
/* What there is to tell the log since the last call (NULL: nothing); the engine's until then. */
const char *engine_note(struct engine *e);
void engine_tell(struct engine *e, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Whether steps are captured and launched as a whole, where the backend can: the first step runs plainly, the second
 * is captured. On unless this says otherwise, before the first step; never where a stage has more than 512 blocks a
 * step (layers times micro-batches). */
void engine_set_capture(struct engine *e, bool on);

/* Initial weights: each tensor from (seed, name) alone, so that every layout starts from the same model. */
MUST_USE int engine_init_weights(struct engine *e, struct error *err);

/* One micro-batch on the host, int32: inputs[T], targets[T] (below 0: no loss). */
struct micro_batch {
    const int32_t *inputs;
    const int32_t *targets;
};

struct step_request {
    double lr;
    bool stop, checkpoint, busy; /* this rank's votes; any rank's vote counts */
    double asked;                /* likewise, added up over the ranks: 0 or a power of two */
};
struct step_result {
    double loss; /* mean over the unmasked tokens of the global batch */
    int64_t tokens;
    double grad_norm;            /* before clipping */
    bool skipped;                /* the update did not happen: non-finite */
    bool stop, checkpoint, busy; /* agreed by all ranks */
    double asked;                /* the sum */
};
/* Forward and backward of plan->accumulation micro-batches, agreement, update. `progress` (may be
 * NULL) is called after each micro-batch; in a pipeline after its forward and after its backward; where the backend
 * computes later, once the step is done. The micro-batches are copied before anything is enqueued. */
MUST_USE int engine_step(struct engine *e, const struct micro_batch *micro, const struct step_request *request,
                         struct step_result *result, void (*progress)(void *arg), void *arg, struct error *err);

/* Before each forward and backward `watch` gets a text such as "backward of micro-batch 2 of 8 in stage 1 of 4"; before
 * a captured sequence is launched, what it is. */
void engine_watch(struct engine *e, void (*watch)(void *arg, const char *doing), void *arg);

/* Loss sum and token count of one micro-batch without gradients: the same on every tp rank of the last
 * stage, zeros on earlier stages. All stages call it for the same micro-batches. */
MUST_USE int engine_eval(struct engine *e, const struct micro_batch *micro, double *loss_sum, double *tokens,
                         struct error *err);
/* The sums of an evaluation whose micro-batches are spread over replicas and stages, on every rank: one
 * all-reduce over the world (none when dp = pp = 1, where each rank has them). In place. */
MUST_USE int engine_eval_total(struct engine *e, double *loss_sum, double *tokens, struct error *err);
/* Gradients of the loss SUM of one micro-batch (with replicas: of one each) into the gradient buffers (whatever
 * they held), summed over dp, no update: for tests. The loss as in engine_eval. */
MUST_USE int engine_gradients(struct engine *e, const struct micro_batch *micro, double *loss_sum, struct error *err);
/* Full logits of this rank's vocabulary slice, [T, V_pad/t] act, copied to host memory (last stage): for tests. */
MUST_USE int engine_logits(struct engine *e, const struct micro_batch *micro, void *host, struct error *err);

/* ---- state, for checkpoints and tests --------------------------------------- */

enum state_kind { STATE_WEIGHT /* master */, STATE_MOMENT1, STATE_MOMENT2, STATE_GRAD, STATE_KINDS };
struct state_tensor {
    struct plan_tensor tensor; /* name, global shape, this rank's slice, counted */
    enum state_kind kind;
    enum dtype dtype;
    void *device; /* nrows * ncols, dense; NULL: only the owned part is here (zero 1: moments, masters) */
    /* What this replica owns of the slice (of each element there is one owner among the replicas): [first, first +
     * count) of nrows * ncols. Under zero 1 a reduced gradient is valid there only. own is NULL when count is 0. */
    int64_t first, count;
    void *own;
};
/* Tensors of this rank's stage. */
int64_t engine_tensor_count(const struct engine *e);
void engine_tensor(const struct engine *e, int64_t i, enum state_kind kind, struct state_tensor *out);
/* After weights were written from outside (restore, tests): refreshes the compute copies. All replicas call it. */
MUST_USE int engine_weights_changed(struct engine *e, struct error *err);
MUST_USE int engine_adam_t(struct engine *e, double *t, struct error *err);
MUST_USE int engine_set_adam_t(struct engine *e, double t, struct error *err);

/* Copies of the state that steps may go on beside. Downloads enqueued on *out between the two copy the state as it is
 * now, and the next update waits for them. *out is the engine's own stream where the backend has no other; else
 * one that belongs to whoever called, and its thread, until the next engine_copies_begin() or engine_destroy(), either
 * only when what was enqueued is done. */
MUST_USE int engine_copies_begin(struct engine *e, struct kstream **out, struct error *err);
void engine_copies_end(struct engine *e);

const struct kernels *engine_kernels(const struct engine *e);
struct kstream *engine_stream(const struct engine *e);
/* NAN where the host cannot tell. */
double engine_gemm_seconds(const struct engine *e);

#endif
