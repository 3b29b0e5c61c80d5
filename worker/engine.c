/* engine.h: making an engine, its memory and its state. The step is in step.c. */
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
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

void *act_rows(const struct engine *e, const void *base, int64_t ld)
{
    return act_at(e, base, e->rows.first * ld);
}

void *stat_rows(const struct engine *e, const void *base, int64_t ld)
{
    return (char *)base + e->rows.first * ld * (int64_t)dtype_size(e->k->stat);
}

struct param param_at(const struct engine *e, const struct param *p, int64_t elements)
{
    return (struct param){act_at(e, p->weight, elements), (char *)p->grad + elements * (int64_t)dtype_size(e->k->grad)};
}

void engine_set_pass(struct engine *e, enum comm_pass pass)
{
    comms_set_pass(e->comms, pass);
}

void engine_range(const struct engine *e, const char *fmt, ...)
{
    char name[64];
    va_list args;
    if (!e->k->range_begin)
        return;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    e->k->range_begin(name);
}

void engine_range_end(const struct engine *e)
{
    if (e->k->range_end)
        e->k->range_end();
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

/* Of every kernel that may come to run: AUTO's library may turn out not to be right here. */
static int64_t attention_workspace(const struct engine *e)
{
    size_t most = 0;
    bool automatic = !e->plan->attention_own && !e->plan->attention_cudnn;
    struct attention a = e->attention;
    for (int own = 0; own < 2; own++)
        for (int backward = 0; backward < 2; backward++) {
            a.own = own;
            size_t bytes = automatic || a.own == e->attention.own ? e->k->attention_workspace(&a, backward) : 0;
            most = bytes > most ? bytes : most;
        }
    return (int64_t)most;
}

static int64_t scratch(const struct engine *e)
{
    struct plan_largest l;
    plan_largest(e->plan, &l);
    struct scratch_shape shape = {.T = l.T, .width = l.width, .vocab = l.vocab};
    return e->k->scratch_bytes ? (int64_t)e->k->scratch_bytes(&shape) : 0;
}

static void describe(struct engine *e)
{
    const struct plan *p = e->plan;
    e->cut = plan_cut(p);
    plan_widths(p, &e->w);
    e->adds = plan_adds_residual(p);
    e->attention = (struct attention){.b = p->micro_batch,
                                      .s = p->s,
                                      .h = e->w.heads,
                                      .hk = e->w.kv_heads,
                                      .e = p->e,
                                      .ldq = site_output(e, SITE_QKV, 0).ld,
                                      .ldk = site_output(e, SITE_QKV, 1).ld,
                                      .ldv = site_output(e, SITE_QKV, 2).ld,
                                      .ldo = e->w.out[PROJ_Q],
                                      .own = p->attention_own,
                                      .accumulate = !p->deterministic};
    e->head_rows = plan_head_rows(p);
    e->backend = (struct plan_backend){.act = e->k->act,
                                       .stat = e->k->stat,
                                       .grad = e->k->grad,
                                       .attention_workspace = attention_workspace(e),
                                       .scratch = scratch(e)};
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

/* ---- making it ---- */

static int make_tensors(struct engine *e, struct error *err)
{
    e->tensor_count = e->stage.tensors;
    e->tensors = calloc((size_t)e->tensor_count, sizeof *e->tensors);
    e->layers = calloc((size_t)e->plan->L, sizeof *e->layers);
    if (!e->tensors || !e->layers)
        return error_set(err, ERR_NOMEM, "no memory for %lld tensor records", (long long)e->tensor_count);
    for (int64_t i = 0; i < e->tensor_count; i++)
        plan_stage_tensor_at(e->plan, &e->stage, e->rank, i, &e->tensors[i]);
    return ERR_OK;
}

/* What would not fit, and which of it a job can do without. `err` holds the allocator's words, which say what is free.
 */
static int too_large(const struct engine *e, const struct plan_memory *m, struct error *err)
{
    static const char *const recompute[] = {
        [BOOST__RECOMPUTE__VALUE__NONE] = "NONE",
        [BOOST__RECOMPUTE__VALUE__LOW_RANK] = "LOW_RANK",
        [BOOST__RECOMPUTE__VALUE__LAYER] = "LAYER",
    };
    const struct plan *p = e->plan;
    const int code = !err ? ERR_NOMEM : err->code == ERR_NOMEM && p->cuda ? ERR_INVALID : (int)err->code;
    char hint[sizeof err->hint] = "";
    size_t used = 0;
    long long mib[MEM_COUNT];
    for (int i = 0; i < MEM_COUNT; i++)
        mib[i] = (long long)(m->bytes[i] >> 20);
    error_context(err,
                  "rank %d wants %lld MiB of its device: weights %lld, master weights %lld, gradients %lld, moments "
                  "%lld, saved activations %lld (recompute %s), scratch %lld, head %lld",
                  e->rank, (long long)(m->total >> 20), mib[MEM_WEIGHTS], mib[MEM_MASTER], mib[MEM_GRADS],
                  mib[MEM_MOMENTS], mib[MEM_SAVED], recompute[p->recompute], mib[MEM_SCRATCH], mib[MEM_HEAD]);
    if (err)
        err->code = (enum error_code)code;
    if (code == ERR_DEVICE)
        return code; /* whose mend is the allocator's */
    const struct {
        bool helps;
        const char *what;
    } mends[] = {
        {p->micro_batch > 1, "lower parallel.micro_batch"},
        {p->recompute == BOOST__RECOMPUTE__VALUE__NONE, "set parallel.recompute"},
        {true, "raise parallel.tp"},
        {p->dp > 1 && !p->zero, "set parallel.zero: 1"},
    };
    for (size_t i = 0; i < sizeof mends / sizeof *mends; i++)
        if (mends[i].helps && used < sizeof hint)
            used += (size_t)snprintf(hint + used, sizeof hint - used, "%s%s", used ? ", or " : "", mends[i].what);
    error_hint(err, "%s", hint);
    return code;
}

static int make_memory(struct engine *e, struct error *err)
{
    const struct kernels *k = e->k;
    struct plan_memory memory;
    plan_stage_memory(e->plan, e->stage.index, &e->backend, &memory);
    assert(memory.total == e->places.total);
    e->arena = k->alloc((size_t)memory.total, err);
    if (!e->arena)
        return too_large(e, &memory, err);
    k->zero(e->ks, e->arena, (size_t)memory.total);
    int rc = comms_share(e->comms, e->arena, (size_t)memory.total, err);
    if (rc)
        return rc;
    e->sums_latents = plan_sums_in_kernels(e->plan) && k->latent_sum_forward && e->comms->tp.reach;
    if (k->set_scratch)
        k->set_scratch(e->ks, engine_buffer(e, BUF_SCRATCH, 0), (size_t)e->backend.scratch);
    size_t tokens = (size_t)(2 * e->plan->accumulation * e->plan->T) * sizeof e->host->tokens[0];
    e->host = k->host_alloc(sizeof *e->host + tokens, err);
    if (!e->host)
        return error_context(err, "for the tokens of a step");
    memset(e->host, 0, sizeof *e->host + tokens);
    e->block = engine_buffer(e, BUF_BLOCK, 0);
    return ERR_OK;
}

/* A library's attention is only used where it gives what the own kernel gives. */
static int check_attention(struct engine *e, struct error *err)
{
    const struct kernels *k = e->k;
    struct error why = {.code = ERR_OK};
    struct attention shapes[PLAN_SLICES];
    int n = block_attentions(e, shapes), rc = ERR_OK;
    if (e->attention.own)
        return ERR_OK;
    if (!k->attention_check)
        rc = error_set(&why, ERR_UNSUPPORTED, "the kernels %s have no library's attention", k->name);
    for (int i = 0; i < n && !rc; i++)
        rc = k->attention_check(e->ks, &shapes[i], engine_buffer(e, BUF_ATTENTION, 0), &why);
    if (rc && e->plan->attention_cudnn) {
        *err = why;
        error_context(err, "parallel.attention: CUDNN");
        return err->hint[0] ? rc : (error_hint(err, "set parallel.attention: OWN, or leave it out"), rc);
    }
    if (rc) {
        e->attention.own = true;
        engine_tell(e, "attention by the own kernel: %s", why.message);
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
    engine_set_capture(e, true);
    e->gradients = (struct sequence){.what = "the micro-batches of a step, launched at once", .body = step_gradients};
    e->updating = (struct sequence){.what = "the update, launched at once", .body = step_update};
    rc = check_groups(plan, comms, rank, err);
    if (rc)
        goto out;
    plan_stage_at(plan, plan_pp_rank(plan, rank), &e->stage);
    describe(e);
    rc = make_tensors(e, err);
    if (!rc)
        rc = k->stream_create(threads, &e->ks, err);
    if (!rc)
        rc = data_parallel_prepare(e, err);
    if (!rc)
        rc = optimizer_prepare(e, err);
    if (!rc)
        rc = gradients_prepare(e, err);
    if (!rc)
        rc = make_memory(e, err);
    if (rc)
        goto out;
    bind_parameters(e);
    if (plan->overlap)
        rc = overlap_create(k, e->ks, PLAN_SLICES * PROJ_COUNT, &e->overlap, err);
    if (!rc)
        rc = check_attention(e, err);
    if (!rc)
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
    sequence_destroy(e, &e->gradients);
    sequence_destroy(e, &e->updating);
    overlap_destroy(e->overlap);
    overlap_destroy(e->sums);
    if (e->copies)
        e->k->stream_destroy(e->copies);
    if (e->arena)
        e->k->release(e->arena);
    if (e->host)
        e->k->host_release(e->host);
    if (e->ks)
        e->k->stream_destroy(e->ks);
    free(e->tensors);
    free(e->owned);
    free(e->updates);
    free(e->squares);
    free(e->zeroed);
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

int engine_adam_t(struct engine *e, double *t, struct error *err)
{
    e->k->download(e->ks, &e->host->adam_t, &e->block->adam_t, sizeof e->host->adam_t);
    int rc = e->k->stream_sync(e->ks, err);
    if (!rc)
        *t = e->host->adam_t;
    return rc;
}

int engine_set_adam_t(struct engine *e, double t, struct error *err)
{
    e->host->adam_t = t;
    e->k->upload(e->ks, &e->block->adam_t, &e->host->adam_t, sizeof e->host->adam_t);
    return e->k->stream_sync(e->ks, err);
}

int engine_copies_begin(struct engine *e, struct kstream **out, struct error *err)
{
    *out = e->ks;
    if (!e->k->stream_beside)
        return ERR_OK;
    int rc = e->copies ? ERR_OK : e->k->stream_beside(e->ks, &e->copies, err);
    if (rc)
        return rc;
    e->k->mark(e->ks, MARK_STATE);
    e->k->await(e->copies, e->ks, MARK_STATE);
    *out = e->copies;
    return ERR_OK;
}

void engine_copies_end(struct engine *e)
{
    e->copying = e->copies != NULL;
    if (e->copying)
        e->k->mark(e->copies, MARK_COPIED);
}

/* A captured step holds every block of every micro-batch, some 70 nodes each: what it takes of the device's memory lies
 * outside the arena. Longer steps keep a device busy as well when they are enqueued anew. */
void engine_set_capture(struct engine *e, bool on)
{
    enum { CAPTURED_BLOCKS = 512 };
    e->captures = on && e->k->capture_begin && e->plan->accumulation * e->plan->L <= CAPTURED_BLOCKS * e->plan->pp;
}

void engine_tell(struct engine *e, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(e->note, sizeof e->note, fmt, args);
    va_end(args);
    e->noted = true;
}

const char *engine_note(struct engine *e)
{
    bool news = e->noted;
    e->noted = false;
    return news ? e->note : NULL;
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
    return e->k->gemm_seconds ? e->k->gemm_seconds(e->ks) : NAN;
}
