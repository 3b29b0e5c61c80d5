/* One training step of a rank, top to bottom; what a strategy does differently is behind its table. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "worker/data_parallel.h"
#include "worker/engine_internal.h"
#include "worker/pipeline.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), "plan.h and comm.h number alike")
SAME(PLAN_ALL_REDUCE, COMM_ALL_REDUCE);
SAME(PLAN_REDUCE_SCATTER, COMM_REDUCE_SCATTER);
SAME(PLAN_ALL_GATHER, COMM_ALL_GATHER);
SAME(PLAN_SEND, COMM_SEND);
SAME(PLAN_RECV, COMM_RECV);
SAME(PLAN_KINDS, COMM_KIND_COUNT);
SAME(PLAN_FORWARD, PASS_FORWARD);
SAME(PLAN_BACKWARD, PASS_BACKWARD);
SAME(PLAN_RECOMPUTE, PASS_RECOMPUTE);
SAME(PLAN_STEP, PASS_STEP);
SAME(PLAN_EVAL, PASS_EVAL);
SAME(PLAN_PASSES, PASS_COUNT);

/* Where the tokens of micro-batch m lie on the host, from where they are uploaded whenever they are wanted. */
static int32_t *staged_inputs(const struct engine *e, int64_t m)
{
    return e->host->tokens + 2 * m * e->plan->T;
}

static int32_t *staged_targets(const struct engine *e, int64_t m)
{
    return staged_inputs(e, m) + e->plan->T;
}

/* Nothing reads them at this moment: every call that uploads ends with a stream_sync(). */
static void stage_tokens(struct engine *e, const struct micro_batch *micro, int64_t n)
{
    size_t bytes = (size_t)e->plan->T * sizeof(int32_t);
    for (int64_t m = 0; m < n; m++) {
        memcpy(staged_inputs(e, m), micro[m].inputs, bytes);
        memcpy(staged_targets(e, m), micro[m].targets, bytes);
    }
}

static void upload_tokens(struct engine *e, enum plan_buffer buffer, const int32_t *from)
{
    e->k->upload(e->ks, engine_buffer(e, buffer, 0), from, (size_t)e->plan->T * sizeof *from);
}

/* Embedding or the residual of the stage before; blocks; head, or the residual for the stage behind. */
static int forward(struct engine *e, int64_t micro, enum comm_pass pass, struct error *err)
{
    const struct plan_stage *stage = &e->stage;
    engine_set_pass(e, pass);
    upload_tokens(e, BUF_INPUTS, staged_inputs(e, micro));
    upload_tokens(e, BUF_TARGETS, staged_targets(e, micro));
    int rc = stage->first ? e->strategy->embed_forward(e, err) : ERR_OK;
    for (int64_t i = stage->layer0; i < stage->layer0 + stage->layers && !rc; i++)
        rc = block_forward(e, i, err);
    if (!rc && stage->last)
        rc = head_forward(e, err);
    else if (!rc)
        pipeline_hand_on(e);
    return rc;
}

static int loss(struct engine *e, double *sum, bool gradient, struct error *err)
{
    return e->stage.last ? head_loss(e, sum, gradient, err) : ERR_OK;
}

/* The gradients of the micro-batch's loss sum, to what those before it left. Behind the `final` one of a step they are
 * complete layer by layer, and the replicas add them up meanwhile. */
static int backward(struct engine *e, int64_t micro, bool final, struct error *err)
{
    const struct plan_stage *stage = &e->stage;
    engine_set_pass(e, PASS_BACKWARD);
    int rc = ERR_OK;
    if (stage->last)
        rc = head_backward(e, err);
    else
        pipeline_take_over(e);
    if (!rc && final)
        data_parallel_reduce(e, e->plan->L);
    for (int64_t i = stage->layer0 + stage->layers - 1; i >= stage->layer0 && !rc; i--) {
        rc = block_backward(e, i, err);
        if (!rc && final)
            data_parallel_reduce(e, i);
    }
    if (!rc && stage->first) { /* the micro-batches behind it have put their tokens there */
        upload_tokens(e, BUF_INPUTS, staged_inputs(e, micro));
        rc = e->strategy->embed_backward(e, err);
    }
    if (!rc && final)
        data_parallel_reduce(e, -1);
    return rc;
}

static void tell(struct engine *e, struct work w, int64_t n)
{
    char text[96];
    if (!e->watch || e->capturing)
        return;
    int used = snprintf(text, sizeof text, "%s of micro-batch %" PRId64 " of %" PRId64,
                        w.kind == WORK_FORWARD ? "forward" : "backward", w.micro + 1, n);
    if (e->plan->pp > 1 && used > 0 && (size_t)used < sizeof text)
        snprintf(text + used, sizeof text - (size_t)used, " in stage %d of %d", e->stage.index + 1, e->plan->pp);
    e->watch(e->watch_arg, text);
}

/* What is enqueued has not run: a micro-batch tells nothing of how far the device is. */
static bool computes_later(const struct engine *e)
{
    return e->k->stream_beside != NULL;
}

/* Forward and backward of n micro-batches in the order of the pipeline; their gradients, summed over the replicas. */
static int micro_batches(struct engine *e, int64_t n, double *sum, struct error *err)
{
    struct work done = {WORK_NONE, 0};
    gradients_begin(e);
    data_parallel_begin(e);
    for (int64_t k = 0; k <= 2 * n; k++) {
        struct work next = pipeline_work(e->plan->pp, e->stage.index, n, k);
        int rc = pipeline_exchange(e, done, next, PASS_FORWARD, err);
        if (!rc && next.kind != WORK_NONE)
            tell(e, next, n);
        e->first_micro = next.micro == 0; /* whose backward is the first on every stage */
        if (!rc && next.kind == WORK_FORWARD) {
            rc = forward(e, next.micro, PASS_FORWARD, err);
            if (!rc)
                rc = loss(e, sum, true, err);
        } else if (!rc && next.kind == WORK_BACKWARD) {
            rc = backward(e, next.micro, next.micro == n - 1, err);
        }
        if (rc)
            return rc;
        /* In a pipeline the backward of a micro-batch may be long after its forward. */
        if (e->progress && !computes_later(e) &&
            (next.kind == WORK_BACKWARD || (next.kind == WORK_FORWARD && e->plan->pp > 1)))
            e->progress(e->progress_arg);
        done = next;
    }
    int rc = data_parallel_wait(e, err);
    /* The first stage comes last: not before its gradient is sent. */
    return rc ? rc : data_parallel_join_tables(e, err);
}

/* Only one rank of a tp group reports the loss, which all of them know. */
static double *loss_slot(struct engine *e)
{
    return e->tp_rank == 0 ? &e->block->agree[AGREE_LOSS] : NULL;
}

/* All that a step has of its own, to where its uploads read it. */
static void stage_step(struct engine *e, const struct micro_batch *micro, const struct step_request *request)
{
    stage_tokens(e, micro, e->plan->accumulation);
    e->host->lr = request->lr;
    e->host->votes[0] = request->stop;
    e->host->votes[AGREE_CHECKPOINT - AGREE_STOP] = request->checkpoint;
    e->host->votes[AGREE_BUSY - AGREE_STOP] = request->busy;
    e->host->votes[AGREE_ASKED - AGREE_STOP] = request->asked;
}

/* Rate and votes onto the device; the rest of the agreement starts at zero. */
static void open_step(struct engine *e)
{
    struct step_block *block = e->block;
    e->k->zero(e->ks, block->agree, sizeof block->agree);
    e->k->upload(e->ks, &block->agree[AGREE_STOP], e->host->votes, sizeof e->host->votes);
    e->k->upload(e->ks, &block->lr, &e->host->lr, sizeof e->host->lr);
}

/* The step's one collective over the world: loss, tokens, gradient norm, faults and votes. Every element of
 * the model is counted by one rank: the owner among its replicas. */
static int agree(struct engine *e, struct error *err)
{
    const char *grads = engine_buffer(e, BUF_GRADS, 0);
    for (int64_t i = 0; i < e->square_count; i++) {
        const struct span *r = &e->squares[i];
        e->k->grad_squares(e->ks, r->count, grads + r->at * (int64_t)dtype_size(e->k->grad),
                           &e->block->agree[AGREE_SQUARES]);
    }
    struct comm_segment block = {.data = e->block->agree, .count = AGREE_SLOTS, .dtype = DTYPE_F64};
    engine_set_pass(e, PASS_STEP);
    return comm_all_reduce(&e->comms->world, e->ks, &block, 1, COMM_SUM, "agreement", err);
}

/* A step up to what all ranks agree on. */
int step_gradients(struct engine *e, struct error *err)
{
    open_step(e);
    int rc = micro_batches(e, e->plan->accumulation, loss_slot(e), err);
    return rc ? rc : agree(e, err);
}

int step_update(struct engine *e, struct error *err)
{
    const struct plan *p = e->plan;
    engine_range(e, "update");
    e->k->step_finish(e->ks, e->block, p->beta1, p->beta2, p->grad_clip);
    e->optimizer->update(e);
    int rc = data_parallel_gather(e, err);
    engine_range_end(e);
    return rc;
}

/* Nothing of the state changes while it is copied. */
static void await_copies(struct engine *e)
{
    if (e->copying)
        e->k->await(e->ks, e->copies, MARK_COPIED);
    e->copying = false;
}

static int close_step(struct engine *e, struct step_result *result, struct error *err)
{
    const struct step_block *block = &e->host->block;
    e->k->download(e->ks, &e->host->block, e->block, sizeof e->host->block);
    int rc = e->k->stream_sync(e->ks, err);
    if (rc)
        return rc;
    double tokens = block->agree[AGREE_TOKENS];
    *result = (struct step_result){
        .loss = tokens > 0 ? block->agree[AGREE_LOSS] / tokens : 0,
        .tokens = (int64_t)tokens,
        .grad_norm = block->grad_norm,
        .skipped = block->skip != 0,
        .stop = block->agree[AGREE_STOP] > 0,
        .checkpoint = block->agree[AGREE_CHECKPOINT] > 0,
        .busy = block->agree[AGREE_BUSY] > 0,
        .asked = block->agree[AGREE_ASKED],
    };
    return ERR_OK;
}

int engine_step(struct engine *e, const struct micro_batch *micro, const struct step_request *request,
                struct step_result *result, void (*progress)(void *arg), void *arg, struct error *err)
{
    stage_step(e, micro, request);
    e->progress = progress;
    e->progress_arg = arg;
    int rc = sequence_run(e, &e->gradients, err);
    await_copies(e);
    if (!rc)
        rc = sequence_run(e, &e->updating, err);
    if (!rc)
        rc = close_step(e, result, err);
    if (!rc && progress && computes_later(e))
        progress(arg);
    e->progress = NULL;
    return rc;
}

/* Loss sum and tokens of a forward pass, from BUF_EVAL. */
static int read_sums(struct engine *e, double *loss_sum, double *tokens, struct error *err)
{
    e->k->download(e->ks, e->host->eval, engine_buffer(e, BUF_EVAL, 0), sizeof e->host->eval);
    int rc = e->k->stream_sync(e->ks, err);
    if (rc)
        return rc;
    *loss_sum = e->host->eval[0];
    if (tokens)
        *tokens = e->host->eval[1];
    return ERR_OK;
}

/* The micro-batch through the stages, without a backward. */
static int forward_alone(struct engine *e, const struct micro_batch *micro, struct error *err)
{
    struct work none = {WORK_NONE, 0}, one = {WORK_FORWARD, 0};
    stage_tokens(e, micro, 1);
    int rc = pipeline_exchange(e, none, one, PASS_EVAL, err);
    if (!rc)
        rc = forward(e, 0, PASS_EVAL, err);
    if (!rc)
        rc = pipeline_exchange(e, one, none, PASS_EVAL, err);
    return rc;
}

int engine_eval(struct engine *e, const struct micro_batch *micro, double *loss_sum, double *tokens, struct error *err)
{
    double *sums = engine_buffer(e, BUF_EVAL, 0);
    e->k->zero(e->ks, sums, sizeof e->host->eval);
    int rc = forward_alone(e, micro, err);
    if (!rc)
        rc = loss(e, sums, false, err);
    if (!rc)
        rc = read_sums(e, loss_sum, tokens, err);
    return rc;
}

int engine_eval_total(struct engine *e, double *loss_sum, double *tokens, struct error *err)
{
    if (e->plan->dp == 1 && e->plan->pp == 1)
        return ERR_OK;
    double *sums = engine_buffer(e, BUF_EVAL, 0);
    bool reports = e->stage.last && e->tp_rank == 0;
    e->host->eval[0] = reports ? *loss_sum : 0;
    e->host->eval[1] = reports ? *tokens : 0;
    e->k->upload(e->ks, sums, e->host->eval, sizeof e->host->eval);
    struct comm_segment both = {.data = sums, .count = 2, .dtype = DTYPE_F64};
    engine_set_pass(e, PASS_EVAL);
    int rc = comm_all_reduce(&e->comms->world, e->ks, &both, 1, COMM_SUM, "evaluation", err);
    return rc ? rc : read_sums(e, loss_sum, tokens, err);
}

int engine_gradients(struct engine *e, const struct micro_batch *micro, double *loss_sum, struct error *err)
{
    double *sums = engine_buffer(e, BUF_EVAL, 0);
    e->k->zero(e->ks, sums, sizeof e->host->eval);
    stage_tokens(e, micro, 1);
    int rc = micro_batches(e, 1, sums, err);
    if (!rc)
        rc = read_sums(e, loss_sum, NULL, err);
    return rc;
}

int engine_logits(struct engine *e, const struct micro_batch *micro, void *host, struct error *err)
{
    int rc = forward_alone(e, micro, err);
    int64_t row = e->plan->V_pad / e->plan->tp * (int64_t)dtype_size(e->k->act);
    for (struct rows r = {0, e->head_rows}; e->stage.last && r.first < e->plan->T && !rc; r.first += r.count) {
        head_logits(e, &r);
        e->k->download(e->ks, (char *)host + r.first * row, engine_buffer(e, BUF_LOGITS, 0), (size_t)(r.count * row));
    }
    int rc_sync = e->k->stream_sync(e->ks, rc ? NULL : err);
    return rc ? rc : rc_sync;
}
