/* engine.h: making an engine, its memory and its state. The step is in step.c. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "worker/data_parallel.h"
#include "worker/engine_internal.h"

_Static_assert(sizeof(struct step_block) <= PLAN_BLOCK_BYTES, "the plan's arena has room for the step block");

void *engine_buffer(const struct engine *e, enum plan_buffer buffer, int64_t layer)
{
    const struct plan_place *at = &e->places.at[buffer];
    return e->arena + at->offset + (e->slot * at->layers + at->front + layer - e->stage.layer0) * at->stride;
}

void *act_at(const struct engine *e, const void *base, int64_t elements)
{
    return (char *)base + elements * (int64_t)dtype_size(e->k->act);
}

struct param param_at(const struct engine *e, const struct param *p, int64_t elements)
{
    return (struct param){act_at(e, p->weight, elements), (char *)p->grad + elements * (int64_t)dtype_size(e->k->grad)};
}

void engine_set_pass(struct engine *e, enum comm_pass pass)
{
    comms_set_pass(e->comms, pass);
}

static const struct strategy *find_strategy(const struct plan *p)
{
    static const struct strategy *const strategies[] = {
        [BOOST__STRATEGY__VALUE__FULL] = &strategy_full,
        [BOOST__STRATEGY__VALUE__VANILLA] = &strategy_vanilla,
        [BOOST__STRATEGY__VALUE__BTP] = &strategy_btp,
    };
    return strategies[p->strategy];
}

/* Where a tensor of a block belongs; NULL for the later branches of a site, which follow the first. */
static struct param *slot_of(struct layer *l, const struct plan_tensor *t)
{
    enum plan_site site = plan_site_of(t->projection);
    if (t->projection != (int)plan_branches(site).first)
        return NULL;
    switch (t->role) {
    case ROLE_GAIN:
        return site == SITE_QKV ? &l->norm1 : &l->norm2;
    case ROLE_DOWN:
        return &l->site[site].down;
    case ROLE_CROSS_GAIN:
        return &l->site[site].cross_gain;
    case ROLE_CROSS_BIAS:
        return &l->site[site].cross_bias;
    case ROLE_GATE:
        return &l->site[site].gate;
    case ROLE_GATE_BIAS:
        return &l->site[site].gate_bias;
    case ROLE_GATE_LEFT:
        return &l->site[site].gate_left;
    default:
        return &l->site[site].up;
    }
}

static void bind_parameters(struct engine *e)
{
    const struct param start = {engine_buffer(e, BUF_WEIGHTS, 0), engine_buffer(e, BUF_GRADS, 0)};
    for (int64_t i = 0; i < e->tensor_count; i++) {
        const struct plan_tensor *t = &e->tensors[i];
        struct param *to;
        if (t->role == ROLE_EMBEDDING)
            to = &e->embedding;
        else if (t->role == ROLE_HEAD)
            to = &e->head;
        else if (t->layer < 0)
            to = &e->norm;
        else
            to = slot_of(&e->layers[t->layer], t);
        if (to)
            *to = param_at(e, &start, t->offset);
        if (t->role == ROLE_HEAD || (t->role == ROLE_EMBEDDING && !plan_embedding_by_hidden(e->plan))) {
            e->vocab_first = t->row0;
            e->vocab_rows = t->nrows;
        }
    }
    if (e->plan->tied)
        e->head = e->embedding;
}

static void describe(struct engine *e)
{
    const struct plan *p = e->plan;
    e->cut = plan_cut(p);
    plan_widths(p, &e->w);
    e->attention = (struct attention){.b = p->micro_batch,
                                      .s = p->s,
                                      .h = e->w.heads,
                                      .hk = e->w.kv_heads,
                                      .e = p->e,
                                      .ldq = e->w.out[PROJ_Q],
                                      .ldk = e->w.out[PROJ_K],
                                      .ldv = e->w.out[PROJ_V],
                                      .ldo = e->w.out[PROJ_Q]};
    size_t forward = e->k->attention_workspace(&e->attention, false);
    size_t backward = e->k->attention_workspace(&e->attention, true);
    e->backend = (struct plan_backend){.act = e->k->act,
                                       .stat = e->k->stat,
                                       .grad = e->k->grad,
                                       .attention_workspace = (int64_t)(forward > backward ? forward : backward)};
    plan_arena(p, e->stage.index, &e->backend, &e->places);
}

struct comm_layout engine_layout(const struct plan *p)
{
    return (struct comm_layout){.tp = p->tp, .dp = p->dp, .pp = p->pp, .ends = p->tied};
}

static int check_groups(const struct plan *plan, struct comms *comms, int rank, struct error *err)
{
    struct comm_layout layout = engine_layout(plan);
    for (int g = 0; g < GROUP_COUNT; g++) {
        struct comm_place place = comm_place_of(&layout, rank, (enum comm_group)g);
        const struct comm *c = comms_group(comms, (enum comm_group)g);
        if (c->size != place.size || c->rank != place.rank)
            return error_set(err, ERR_INTERNAL, "rank %d of tp = %d, dp = %d, pp = %d got a group %s of %d", rank,
                             plan->tp, plan->dp, plan->pp, comm_group_name((enum comm_group)g), c->size);
    }
    return ERR_OK;
}

int engine_create(const struct plan *plan, const struct kernels *k, struct comms *comms, int rank, int threads,
                  struct engine **out, struct error *err)
{
    *out = NULL;
    int rc = ERR_OK;
    struct engine *e = calloc(1, sizeof *e);
    if (!e)
        return error_set(err, ERR_NOMEM, "no memory for the engine of rank %d", rank);
    *e = (struct engine){.plan = plan, .k = k, .comms = comms, .rank = rank, .tp_rank = plan_tp_rank(plan, rank)};
    e->strategy = find_strategy(plan);
    e->rows = (struct rows){0, plan->T};
    e->optimizer = find_optimizer(plan);
    rc = check_groups(plan, comms, rank, err);
    if (rc)
        goto out;
    plan_stage_at(plan, plan_pp_rank(plan, rank), &e->stage);
    describe(e);
    e->tensor_count = e->stage.tensors;
    e->tensors = calloc((size_t)e->tensor_count, sizeof *e->tensors);
    e->layers = calloc((size_t)plan->L, sizeof *e->layers);
    if (!e->tensors || !e->layers) {
        rc = error_set(err, ERR_NOMEM, "no memory for %lld tensor records", (long long)e->tensor_count);
        goto out;
    }
    for (int64_t i = 0; i < e->tensor_count; i++)
        plan_stage_tensor_at(plan, &e->stage, rank, i, &e->tensors[i]);
    rc = data_parallel_prepare(e, err);
    if (rc)
        goto out;

    struct plan_memory memory;
    plan_stage_memory(plan, e->stage.index, &e->backend, &memory);
    assert(memory.total == e->places.total);
    rc = k->stream_create(threads, &e->ks, err);
    if (rc)
        goto out;
    e->arena = k->alloc((size_t)memory.total, err);
    if (!e->arena) {
        rc = ERR_NOMEM;
        goto out;
    }
    k->zero(e->ks, e->arena, (size_t)memory.total);
    bind_parameters(e);
    if (plan->overlap)
        rc = overlap_create(PLAN_SLICES * PROJ_COUNT, &e->overlap, err);
    if (rc)
        goto out;
    e->block = engine_buffer(e, BUF_BLOCK, 0);
    rc = k->stream_sync(e->ks, err);
out:
    if (rc) {
        engine_destroy(e);
        return rc;
    }
    *out = e;
    return ERR_OK;
}

void engine_destroy(struct engine *e)
{
    if (!e)
        return;
    overlap_destroy(e->overlap);
    overlap_destroy(e->sums);
    if (e->arena)
        e->k->release(e->arena);
    if (e->ks)
        e->k->stream_destroy(e->ks);
    free(e->tensors);
    free(e->owned);
    free(e->buckets);
    free(e->bucket_calls);
    free(e->layers);
    free(e);
}

int64_t engine_tensor_count(const struct engine *e)
{
    return e->tensor_count;
}

void engine_tensor(const struct engine *e, int64_t i, enum state_kind kind, struct state_tensor *out)
{
    static const enum plan_buffer buffers[STATE_KINDS] = {BUF_MASTER, BUF_MOMENT1, BUF_MOMENT2, BUF_GRADS};
    assert(i >= 0 && i < e->tensor_count && (unsigned)kind < STATE_KINDS);
    enum plan_buffer buffer = buffers[kind];
    if (kind == STATE_WEIGHT && !e->places.at[BUF_MASTER].bytes)
        buffer = BUF_WEIGHTS; /* act = grad: the weights are their own master */
    char *base = engine_buffer(e, buffer, 0);
    int64_t element = (int64_t)dtype_size(e->k->grad);
    bool cut = e->plan->zero && buffer != BUF_WEIGHTS && buffer != BUF_GRADS;
    const struct owned *o = &e->owned[i];
    *out = (struct state_tensor){
        .tensor = e->tensors[i],
        .kind = kind,
        .dtype = e->k->grad,
        .device = cut ? NULL : base + e->tensors[i].offset * element,
        .first = o->first,
        .count = o->count,
        .own = !o->count ? NULL : base + (cut ? o->state : e->tensors[i].offset + o->first) * element,
    };
}

int engine_weights_changed(struct engine *e, struct error *err)
{
    void *weights = engine_buffer(e, BUF_WEIGHTS, 0), *master = engine_buffer(e, BUF_MASTER, 0);
    bool separate = e->places.at[BUF_MASTER].bytes != 0;
    int rc = ERR_OK;
    if (separate && !e->plan->zero)
        e->k->cast(e->ks, e->k->act, weights, e->k->grad, master, e->stage.elements);
    for (int64_t i = 0; i < e->tensor_count && separate && e->plan->zero; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        if (t.count)
            e->k->cast(e->ks, e->k->act, act_at(e, weights, t.tensor.offset + t.first), e->k->grad, t.own, t.count);
    }
    if (separate)
        rc = data_parallel_gather(e, err);
    return rc ? rc : e->k->stream_sync(e->ks, err);
}

void engine_watch(struct engine *e, void (*watch)(void *arg, const char *doing), void *arg)
{
    e->watch = watch;
    e->watch_arg = arg;
}

double engine_adam_t(struct engine *e)
{
    e->k->download(e->ks, &e->host.adam_t, &e->block->adam_t, sizeof e->host.adam_t);
    return e->k->stream_sync(e->ks, NULL) ? 0 : e->host.adam_t;
}

int engine_set_adam_t(struct engine *e, double t, struct error *err)
{
    e->host.adam_t = t;
    e->k->upload(e->ks, &e->block->adam_t, &e->host.adam_t, sizeof e->host.adam_t);
    return e->k->stream_sync(e->ks, err);
}

const struct kernels *engine_kernels(const struct engine *e)
{
    return e->k;
}

struct kstream *engine_stream(const struct engine *e)
{
    return e->ks;
}

double engine_gemm_seconds(const struct engine *e)
{
    return e->k->gemm_seconds(e->ks);
}
