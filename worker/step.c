/* One training step of a rank, top to bottom; what a strategy does differently is behind its table. */
#include "worker/engine_internal.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), "plan.h and comm.h number alike")
SAME(PLAN_ALL_REDUCE, COMM_ALL_REDUCE);
SAME(PLAN_REDUCE_SCATTER, COMM_REDUCE_SCATTER);
SAME(PLAN_ALL_GATHER, COMM_ALL_GATHER);
SAME(PLAN_KINDS, COMM_KIND_COUNT);
SAME(PLAN_FORWARD, PASS_FORWARD);
SAME(PLAN_BACKWARD, PASS_BACKWARD);
SAME(PLAN_RECOMPUTE, PASS_RECOMPUTE);
SAME(PLAN_STEP, PASS_STEP);
SAME(PLAN_EVAL, PASS_EVAL);
SAME(PLAN_PASSES, PASS_COUNT);

/* Embedding, blocks, head: logits. */
static int forward(struct engine *e, const struct micro_batch *micro, enum comm_pass pass, struct error *err)
{
    const struct plan *p = e->plan;
    size_t bytes = (size_t)p->T * sizeof(int32_t);
    engine_set_pass(e, pass);
    e->k->upload(e->ks, engine_buffer(e, BUF_INPUTS, 0), micro->inputs, bytes);
    e->k->upload(e->ks, engine_buffer(e, BUF_TARGETS, 0), micro->targets, bytes);
    int rc = e->strategy->embed_forward(e, err);
    for (int64_t i = 0; i < p->L && !rc; i++)
        rc = block_forward(e, i, err);
    if (!rc)
        rc = head_forward(e, err);
    return rc;
}

/* Adds to the gradient buffers those of the micro-batch's loss sum. */
static int backward(struct engine *e, struct error *err)
{
    engine_set_pass(e, PASS_BACKWARD);
    int rc = head_backward(e, err);
    for (int64_t i = e->plan->L - 1; i >= 0 && !rc; i--)
        rc = block_backward(e, i, err);
    if (!rc)
        rc = e->strategy->embed_backward(e, err);
    return rc;
}

static int forward_backward(struct engine *e, const struct micro_batch *micro, double *sum, struct error *err)
{
    int rc = forward(e, micro, PASS_FORWARD, err);
    if (!rc)
        rc = head_loss(e, sum, true, err);
    if (!rc)
        rc = backward(e, err);
    return rc;
}

static void zero_gradients(struct engine *e)
{
    e->k->zero(e->ks, engine_buffer(e, BUF_GRADS, 0), (size_t)e->places.at[BUF_GRADS].bytes);
}

/* Only one rank of a tp group reports the loss, which all of them know. */
static double *loss_slot(struct engine *e)
{
    return e->tp_rank == 0 ? &e->block->agree[AGREE_LOSS] : NULL;
}

/* Rate and votes onto the device; the rest of the agreement starts at zero. */
static void open_step(struct engine *e, const struct step_request *request)
{
    struct step_block *block = e->block;
    e->host.lr = request->lr;
    e->host.votes[0] = request->stop;
    e->host.votes[AGREE_CHECKPOINT - AGREE_STOP] = request->checkpoint;
    e->host.votes[AGREE_BUSY - AGREE_STOP] = request->busy;
    e->k->zero(e->ks, block->agree, sizeof block->agree);
    e->k->upload(e->ks, &block->agree[AGREE_STOP], e->host.votes, sizeof e->host.votes);
    e->k->upload(e->ks, &block->lr, &e->host.lr, sizeof e->host.lr);
}

/* The step's one collective over the world: loss, tokens, gradient norm, faults and votes. */
static int agree(struct engine *e, struct error *err)
{
    for (int64_t i = 0; i < e->tensor_count; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        if (t.tensor.counted && t.tensor.nrows)
            e->k->grad_squares(e->ks, t.tensor.nrows * t.tensor.ncols, t.device, &e->block->agree[AGREE_SQUARES]);
    }
    struct comm_segment block = {.data = e->block->agree, .count = AGREE_SLOTS, .dtype = DTYPE_F64};
    engine_set_pass(e, PASS_STEP);
    return comm_all_reduce(&e->comms->world, e->ks, &block, 1, COMM_SUM, "agreement", err);
}

static void update(struct engine *e)
{
    const struct plan *p = e->plan;
    e->k->step_finish(e->ks, e->block, p->beta1, p->beta2, p->grad_clip);
    for (int64_t i = 0; i < e->tensor_count; i++) {
        const struct plan_tensor *t = &e->tensors[i];
        struct adamw hyper = {p->beta1, p->beta2, p->eps, t->decay ? p->weight_decay : 0};
        struct state_tensor grad, m, v, master;
        engine_tensor(e, i, STATE_GRAD, &grad);
        engine_tensor(e, i, STATE_MOMENT1, &m);
        engine_tensor(e, i, STATE_MOMENT2, &v);
        engine_tensor(e, i, STATE_WEIGHT, &master);
        if (t->nrows)
            e->k->adamw(e->ks, t->nrows * t->ncols, &hyper, e->block, grad.device, m.device, v.device, master.device,
                        act_at(e, engine_buffer(e, BUF_WEIGHTS, 0), t->offset));
    }
}

static int close_step(struct engine *e, struct step_result *result, struct error *err)
{
    const struct step_block *block = &e->host.block;
    e->k->download(e->ks, &e->host.block, e->block, sizeof e->host.block);
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
    };
    return ERR_OK;
}

int engine_step(struct engine *e, const struct micro_batch *micro, const struct step_request *request,
                struct step_result *result, void (*progress)(void *arg), void *arg, struct error *err)
{
    open_step(e, request);
    zero_gradients(e);
    for (int64_t i = 0; i < e->plan->accumulation; i++) {
        int rc = forward_backward(e, &micro[i], loss_slot(e), err);
        if (rc)
            return rc;
        if (progress)
            progress(arg);
    }
    int rc = agree(e, err);
    if (rc)
        return rc;
    update(e);
    return close_step(e, result, err);
}

/* Loss sum and tokens of a forward pass, from BUF_EVAL. */
static int read_sums(struct engine *e, double *loss_sum, double *tokens, struct error *err)
{
    e->k->download(e->ks, e->host.eval, engine_buffer(e, BUF_EVAL, 0), sizeof e->host.eval);
    int rc = e->k->stream_sync(e->ks, err);
    if (rc)
        return rc;
    *loss_sum = e->host.eval[0];
    if (tokens)
        *tokens = e->host.eval[1];
    return ERR_OK;
}

int engine_eval(struct engine *e, const struct micro_batch *micro, double *loss_sum, double *tokens, struct error *err)
{
    double *sums = engine_buffer(e, BUF_EVAL, 0);
    e->k->zero(e->ks, sums, sizeof e->host.eval);
    int rc = forward(e, micro, PASS_EVAL, err);
    if (!rc)
        rc = head_loss(e, sums, false, err);
    if (!rc)
        rc = read_sums(e, loss_sum, tokens, err);
    return rc;
}

int engine_gradients(struct engine *e, const struct micro_batch *micro, double *loss_sum, struct error *err)
{
    double *sums = engine_buffer(e, BUF_EVAL, 0);
    e->k->zero(e->ks, sums, sizeof e->host.eval);
    zero_gradients(e);
    int rc = forward_backward(e, micro, sums, err);
    if (!rc)
        rc = read_sums(e, loss_sum, NULL, err);
    return rc;
}

int engine_logits(struct engine *e, const struct micro_batch *micro, void *host, struct error *err)
{
    int rc = forward(e, micro, PASS_EVAL, err);
    if (rc)
        return rc;
    e->k->download(e->ks, host, engine_buffer(e, BUF_LOGITS, 0), (size_t)e->places.at[BUF_LOGITS].bytes);
    return e->k->stream_sync(e->ks, err);
}
