/* Small models for the engine's tests: a plan from a few numbers, ranks as threads of a LOCAL
 * world, weights and tokens that do not depend on the layout. */
#ifndef BOOST_TESTS_WORKER_TINY_H
#define BOOST_TESTS_WORKER_TINY_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/engine.h"
#include "worker/init.h"

/* What is computed, and how it is cut: the rows of this table are all that this version has. Each is tested for
 * what every one of them promises. */
enum {
    FULL_RANK = BOOST__FACTORIZATION__VALUE__FULL_RANK,
    SVD = BOOST__FACTORIZATION__VALUE__SVD,
    COLA = BOOST__FACTORIZATION__VALUE__COLA,
    LAX = BOOST__FACTORIZATION__VALUE__LAX,
    IDENTITY = BOOST__LAX_GATE__VALUE__IDENTITY,
    LINEAR = BOOST__LAX_GATE__VALUE__LINEAR,
    TENSOR = BOOST__LAX_GATE__VALUE__TENSOR,
    LOW_RANK = BOOST__RECOMPUTE__VALUE__LOW_RANK,
    LAYER = BOOST__RECOMPUTE__VALUE__LAYER,
    FULL = BOOST__STRATEGY__VALUE__FULL,
    VANILLA = BOOST__STRATEGY__VALUE__VANILLA,
    BTP = BOOST__STRATEGY__VALUE__BTP,
};
struct tiny_way {
    const char *name;
    int factorization, strategy;
    bool ungrouped, sync, published, overlap;
    int gate;
    bool svd_base; /* of LAX */
};
static const struct tiny_way tiny_ways[] = {
    {.name = "FULL_RANK FULL", .factorization = FULL_RANK, .strategy = FULL},
    {.name = "SVD BTP", .factorization = SVD, .strategy = BTP},
    {.name = "COLA BTP", .factorization = COLA, .strategy = BTP},
    {.name = "COLA BTP ungrouped", .factorization = COLA, .strategy = BTP, .ungrouped = true},
    {.name = "COLA BTP SYNC", .factorization = COLA, .strategy = BTP, .sync = true},
    {.name = "SVD BTP SYNC ungrouped", .factorization = SVD, .strategy = BTP, .sync = true, .ungrouped = true},
    {.name = "COLA BTP overlap", .factorization = COLA, .strategy = BTP, .overlap = true},
    {.name = "SVD BTP SYNC ungrouped overlap",
     .factorization = SVD,
     .strategy = BTP,
     .sync = true,
     .ungrouped = true,
     .overlap = true},
    {.name = "COLA VANILLA", .factorization = COLA, .strategy = VANILLA},
    {.name = "SVD VANILLA ungrouped", .factorization = SVD, .strategy = VANILLA, .ungrouped = true},
    {.name = "COLA VANILLA PUBLISHED", .factorization = COLA, .strategy = VANILLA, .published = true},
    {.name = "SVD VANILLA PUBLISHED ungrouped",
     .factorization = SVD,
     .strategy = VANILLA,
     .published = true,
     .ungrouped = true},
    {.name = "LAX BTP", .factorization = LAX, .strategy = BTP},
    {.name = "LAX SVD LINEAR BTP", .factorization = LAX, .strategy = BTP, .svd_base = true, .gate = LINEAR},
    {.name = "LAX TENSOR BTP", .factorization = LAX, .strategy = BTP, .gate = TENSOR},
    {.name = "LAX SVD TENSOR BTP SYNC ungrouped",
     .factorization = LAX,
     .strategy = BTP,
     .svd_base = true,
     .gate = TENSOR,
     .sync = true,
     .ungrouped = true},
    {.name = "LAX LINEAR BTP overlap", .factorization = LAX, .strategy = BTP, .gate = LINEAR, .overlap = true},
    {.name = "LAX TENSOR BTP ungrouped overlap",
     .factorization = LAX,
     .strategy = BTP,
     .gate = TENSOR,
     .ungrouped = true,
     .overlap = true},
    {.name = "LAX SVD VANILLA", .factorization = LAX, .strategy = VANILLA, .svd_base = true},
    {.name = "LAX LINEAR VANILLA", .factorization = LAX, .strategy = VANILLA, .gate = LINEAR},
    {.name = "LAX LINEAR VANILLA ungrouped",
     .factorization = LAX,
     .strategy = VANILLA,
     .gate = LINEAR,
     .ungrouped = true},
    {.name = "LAX TENSOR VANILLA PUBLISHED",
     .factorization = LAX,
     .strategy = VANILLA,
     .gate = TENSOR,
     .published = true},
};
enum { TINY_WAYS = sizeof tiny_ways / sizeof tiny_ways[0], TINY_TENSORS = 128 /* of any model here */ };

struct tiny {
    struct tiny_way way;
    int recompute;                   /* Boost__Recompute__Value; 0: NONE, since the memory is not known */
    bool tied, mlp_silu, fp64, bf16; /* neither: FP32 */
    int d, f, r, L, h, hk, V, s;
    int micro, global, tp, dp, pp, zero;
    int64_t bucket_bytes; /* 0: the default, more than these models have */
    double lr, clip, decay;
    int64_t seed;
};

static const struct tiny tiny_default = {
    .way = {.name = "COLA BTP", .factorization = COLA, .strategy = BTP},
    .fp64 = true,
    .d = 8,
    .f = 12,
    .r = 3,
    .L = 2,
    .h = 4,
    .hk = 4,
    .V = 20,
    .s = 6,
    .micro = 2,
    .global = 2,
    .tp = 1,
    .dp = 1,
    .pp = 1,
    .lr = 3e-3,
    .clip = 1,
    .decay = 0.01,
    .seed = 1,
};

/* The default model computed in way number i; its rank can be cut where the way cuts it, and its latents cross
 * into a block that hands them on. */
static inline struct tiny tiny_of(int i)
{
    struct tiny c = tiny_default;
    c.way = tiny_ways[i];
    if (c.way.strategy == VANILLA)
        c.r = 4;
    if (c.way.factorization == LAX) {
        c.L = 3;
        c.r = c.way.gate == TENSOR ? 12 : 4; /* a matrix [3, 4] */
    }
    return c;
}

/* Through the real path: a spec, validated; with `out`, resolved and planned too. */
static inline int tiny_try(const struct tiny *c, struct plan *out, struct error *err)
{
    Boost__TokenFile file = BOOST__TOKEN_FILE__INIT, *files[] = {&file};
    Boost__Model model = BOOST__MODEL__INIT;
    Boost__Parallel parallel = BOOST__PARALLEL__INIT;
    Boost__Data data = BOOST__DATA__INIT;
    Boost__Optimizer optimizer = BOOST__OPTIMIZER__INIT;
    Boost__Run run = BOOST__RUN__INIT;
    Boost__Checkpoint checkpoint = BOOST__CHECKPOINT__INIT;
    Boost__JobSpec spec = BOOST__JOB_SPEC__INIT;
#define PUT(m, field, v) ((m).has_##field = 1, (m).field = (v))
    file.path = (char *)"/none";
    PUT(model, factorization, (Boost__Factorization__Value)c->way.factorization);
    PUT(model, hidden, c->d);
    PUT(model, layers, c->L);
    PUT(model, heads, c->h);
    PUT(model, kv_heads, c->hk);
    PUT(model, intermediate, c->f);
    if (c->way.factorization != FULL_RANK)
        PUT(model, rank, c->r);
    PUT(model, vocab, c->V);
    PUT(model, tie_embeddings, c->tied);
    PUT(model, mlp_activation, c->mlp_silu ? BOOST__SWITCH__VALUE__ON : BOOST__SWITCH__VALUE__OFF);
    PUT(parallel, strategy, (Boost__Strategy__Value)c->way.strategy);
    if (c->way.factorization == LAX) {
        PUT(model, lax_gate, (Boost__LaxGate__Value)c->way.gate);
        PUT(model, lax_base, c->way.svd_base ? BOOST__LAX_BASE__VALUE__SVD : BOOST__LAX_BASE__VALUE__COLA);
    }
    PUT(parallel, recompute, (Boost__Recompute__Value)c->recompute);
    if (c->way.sync)
        PUT(parallel, norm, BOOST__NORM__VALUE__SYNC);
    if (c->way.ungrouped)
        PUT(parallel, grouped, BOOST__SWITCH__VALUE__OFF);
    if (c->way.overlap)
        PUT(parallel, overlap, BOOST__SWITCH__VALUE__ON);
    if (c->way.published)
        PUT(parallel, vanilla_attention, BOOST__VANILLA_ATTENTION__VALUE__PUBLISHED);
    PUT(parallel, tp, c->tp);
    PUT(parallel, dp, c->dp ? c->dp : 1);
    PUT(parallel, pp, c->pp ? c->pp : 1);
    PUT(parallel, zero, c->zero);
    PUT(parallel, micro_batch, c->micro);
    PUT(parallel, global_batch, c->global);
    data.n_train = 1;
    data.train = files;
    PUT(data, seq_len, c->s);
    PUT(optimizer, lr, c->lr);
    PUT(optimizer, grad_clip, c->clip);
    PUT(optimizer, weight_decay, c->decay);
    PUT(run, steps, 100);
    PUT(run, seed, c->seed);
    PUT(run, precision,
        c->fp64   ? BOOST__PRECISION__VALUE__FP64
        : c->bf16 ? BOOST__PRECISION__VALUE__BF16
                  : BOOST__PRECISION__VALUE__FP32);
    checkpoint.dir = (char *)"/none";
    PUT(spec, spec_version, 1);
#undef PUT
    spec.name = (char *)"tiny";
    spec.model = &model;
    spec.parallel = &parallel;
    spec.data = &data;
    spec.optimizer = &optimizer;
    spec.run = &run;
    spec.checkpoint = &checkpoint;
    if (!out)
        return plan_validate(&spec, err);
    Boost__JobSpec *resolved;
    struct plan_machine machine = {0};
    int rc = plan_resolve(&spec, &machine, &resolved, err);
    if (!rc)
        rc = plan_make(resolved, out, err);
    boost__job_spec__free_unpacked(resolved, NULL);
    if (c->bucket_bytes)
        out->bucket_bytes = c->bucket_bytes;
    return rc;
}

static inline bool tiny_is_valid(const struct tiny *c)
{
    struct error err = {0};
    return tiny_try(c, NULL, &err) == ERR_OK;
}

static inline void tiny_plan(const struct tiny *c, struct plan *out)
{
    struct error err = {0};
    if (tiny_try(c, out, &err))
        fail_msg("%s (%s)", err.message, err.hint);
}

static inline const struct kernels *tiny_kernels(const struct plan *p)
{
    return p->precision == BOOST__PRECISION__VALUE__FP64   ? kernels_cpu_fp64()
           : p->precision == BOOST__PRECISION__VALUE__BF16 ? kernels_cpu_bf16()
                                                           : kernels_cpu_fp32();
}

/* ---- ranks as threads ---- */

/* What computes: kernels, and what else is done to the groups of ranks (NULL: nothing). */
struct tiny_device {
    const struct kernels *kernels;
    void (*comms)(struct comms *c);
};
struct tiny_rank {
    const struct plan *plan;
    struct tiny_device device;
    struct local_world *world;
    int rank, threads;
    int (*body)(struct engine *e, int rank, void *arg, struct error *err);
    void *arg;
    struct comms comms;
    int rc;
    struct error err;
    pthread_t thread;
};

static inline void *tiny_rank_main(void *arg)
{
    struct tiny_rank *r = arg;
    struct engine *e = NULL;
    r->rc = local_comms_join(r->world, r->rank, &r->comms, &r->err);
    if (!r->rc && r->device.comms)
        r->device.comms(&r->comms);
    if (!r->rc)
        r->rc = engine_create(r->plan, r->device.kernels, &r->comms, r->rank, r->threads, &e, &r->err);
    if (!r->rc)
        r->rc = r->body(e, r->rank, r->arg, &r->err);
    if (r->rc)
        local_world_abort(r->world, r->rank);
    engine_destroy(e);
    comms_destroy(&r->comms);
    return NULL;
}

/* Runs `body` on every rank of the plan, each with an engine; fails the test when one fails. Bodies
 * may not use cmocka's assertions: they run in threads. counters: NULL, or [world]. */
static inline void tiny_run_on(const struct plan *plan, struct tiny_device device, int threads,
                               int (*body)(struct engine *e, int rank, void *arg, struct error *err), void *arg,
                               struct comm_counters *counters)
{
    struct error err = {0};
    struct local_world *world;
    struct comm_layout layout = engine_layout(plan);
    if (local_world_create(&layout, &world, &err))
        fail_msg("%s", err.message);
    struct tiny_rank *ranks = calloc((size_t)plan->world, sizeof *ranks);
    for (int i = 0; i < plan->world; i++) {
        ranks[i] = (struct tiny_rank){.plan = plan,
                                      .device = device,
                                      .world = world,
                                      .rank = i,
                                      .threads = threads,
                                      .body = body,
                                      .arg = arg};
        pthread_create(&ranks[i].thread, NULL, tiny_rank_main, &ranks[i]);
    }
    char text[1024] = "";
    for (int i = 0; i < plan->world; i++) {
        pthread_join(ranks[i].thread, NULL);
        if (ranks[i].rc && !text[0])
            snprintf(text, sizeof text, "rank %d: %s", i, ranks[i].err.message);
        if (counters)
            counters[i] = ranks[i].comms.counters;
    }
    free(ranks);
    local_world_destroy(world);
    if (text[0])
        fail_msg("%s", text);
}

/* On the CPU, in the plan's precision. */
static inline void tiny_run(const struct plan *plan, int threads,
                            int (*body)(struct engine *e, int rank, void *arg, struct error *err), void *arg,
                            struct comm_counters *counters)
{
    tiny_run_on(plan, (struct tiny_device){.kernels = tiny_kernels(plan)}, threads, body, arg, counters);
}

/* ---- tensors ---- */

static inline double tiny_get(const struct state_tensor *t, int64_t i)
{
    return t->dtype == DTYPE_F64 ? ((const double *)t->device)[i] : (double)((const float *)t->device)[i];
}

static inline void tiny_put(const struct state_tensor *t, int64_t i, double value)
{
    if (t->dtype == DTYPE_F64)
        ((double *)t->device)[i] = value;
    else
        ((float *)t->device)[i] = (float)value;
}

/* n elements of a tensor's dtype at `device`, to and from the host; done when they return. */
static inline void tiny_download(struct engine *e, enum dtype t, const void *device, int64_t n, double *out)
{
    struct error err;
    void *host = malloc((size_t)n * dtype_size(t) + 1);
    engine_kernels(e)->download(engine_stream(e), host, device, (size_t)n * dtype_size(t));
    (void)!engine_kernels(e)->stream_sync(engine_stream(e), &err);
    for (int64_t i = 0; i < n; i++)
        out[i] = t == DTYPE_F64 ? ((double *)host)[i] : (double)((float *)host)[i];
    free(host);
}
static inline void tiny_upload(struct engine *e, enum dtype t, void *device, int64_t n, const double *values)
{
    struct error err;
    void *host = malloc((size_t)n * dtype_size(t) + 1);
    for (int64_t i = 0; i < n; i++)
        if (t == DTYPE_F64)
            ((double *)host)[i] = values[i];
        else
            ((float *)host)[i] = (float)values[i];
    engine_kernels(e)->upload(engine_stream(e), device, host, (size_t)n * dtype_size(t));
    (void)!engine_kernels(e)->stream_sync(engine_stream(e), &err);
    free(host);
}

/* Weights at which no gradient is small: wide embeddings, gains away from one. The values depend on
 * tensor name and place alone, and are exact in fp32 so that both precisions start equal. */
static inline void tiny_randomize(struct engine *e, uint64_t seed)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        const struct plan_tensor *p = &t.tensor;
        uint64_t key = init_key(seed, p->name);
        bool whole = t.device != NULL; /* else, under zero 1, this replica's part of the master */
        int64_t first = whole ? 0 : t.first, count = whole ? p->nrows * p->ncols : t.count;
        double *values = calloc((size_t)count + 1, sizeof *values);
        for (int64_t row = 0; row < p->nrows; row++)
            for (int64_t col = 0; col < p->ncols; col++) {
                double x;
                init_normal(key, (uint64_t)((p->row0 + row) * p->cols + p->col0 + col), 1, &x);
                if (p->init == INIT_ONE)
                    x = 1 + 0.3 * x;
                else if (p->init == INIT_ZERO)
                    x *= 0.3;
                else
                    x *= p->role == ROLE_EMBEDDING ? 0.5
                         : p->role == ROLE_HEAD    ? 0.3
                         : p->role == ROLE_DENSE   ? 0.4
                                                   : 1.5 * p->init_std;
                int64_t at = row * p->ncols + col - first;
                if (at >= 0 && at < count)
                    values[at] = (double)(float)x;
            }
        tiny_upload(e, t.dtype, whole ? t.device : t.own, count, values);
        free(values);
    }
    struct error err;
    (void)!engine_weights_changed(e, &err);
}

/* Tokens of global sample number n, [s + 1]: noisy arithmetic sequences, so that there is something to learn. */
static inline void tiny_sample(const struct tiny *c, int64_t n, int32_t *out)
{
    uint64_t x = init_key((uint64_t)n, "sample");
    int32_t at = (int32_t)(x % (uint64_t)c->V), step = 1 + (int32_t)((x >> 20) % 3);
    for (int j = 0; j <= c->s; j++) {
        out[j] = at;
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        at = (int32_t)((x >> 33) % 8 ? (at + step) % c->V : (int)((x >> 40) % (uint64_t)c->V));
    }
}

/* Micro-batch of samples first, first + 1, ...; every `mask`-th target is without loss (0: none). */
struct tiny_batch {
    struct micro_batch micro;
    int32_t inputs[1024], targets[1024];
};
static inline void tiny_batch(const struct tiny *c, int64_t first, int mask, struct tiny_batch *b)
{
    int32_t window[256];
    int at = 0;
    for (int i = 0; i < c->micro; i++) {
        tiny_sample(c, first + i, window);
        for (int j = 0; j < c->s; j++, at++) {
            b->inputs[at] = window[j];
            b->targets[at] = mask && at % mask == mask - 1 ? -1 : window[j + 1];
        }
    }
    b->micro = (struct micro_batch){b->inputs, b->targets};
}

static inline double tiny_adam_t(struct engine *e)
{
    double t;
    return engine_adam_t(e, &t, NULL) ? NAN : t;
}

#endif
