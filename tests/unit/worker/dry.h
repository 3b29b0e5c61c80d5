/* An engine that computes nothing: its operations are empty, its memory is addresses only and its collectives are
 * counted and not made. So a rank of any shape runs here, and what it would call is known. */
#ifndef BOOST_TESTS_WORKER_DRY_H
#define BOOST_TESTS_WORKER_DRY_H

#include <stdlib.h>
#include <sys/mman.h>

#include "worker/engine.h"

/* ---- operations ---- */

static int dry_stream_create(int threads, struct kstream **out, struct error *err)
{
    static char stream;
    (void)threads, (void)err;
    *out = (struct kstream *)&stream;
    return ERR_OK;
}
static void dry_stream_destroy(struct kstream *ks)
{
    (void)ks;
}
static int dry_stream_sync(struct kstream *ks, struct error *err)
{
    (void)ks, (void)err;
    return ERR_OK;
}
static double dry_gemm_seconds(struct kstream *ks)
{
    (void)ks;
    return 0;
}

/* Address space without memory behind it: a step that touched it would end the test. */
static size_t dry_bytes;
static void *dry_alloc(size_t bytes, struct error *err)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    dry_bytes = bytes;
    if (p != MAP_FAILED)
        return p;
    error_set(err, ERR_NOMEM, "no address space of %zu bytes", bytes);
    return NULL;
}
static void dry_release(void *p)
{
    munmap(p, dry_bytes);
}
static void *dry_host_alloc(size_t bytes, struct error *err)
{
    void *p = calloc(1, bytes);
    if (!p)
        error_set(err, ERR_NOMEM, "no memory of %zu bytes", bytes);
    return p;
}
static void dry_host_release(void *p)
{
    free(p);
}
static size_t dry_attention_workspace(const struct attention *a, bool backward)
{
    (void)a, (void)backward;
    return 0;
}

/* name, parameters behind the stream, their names */
#define DRY(name, parameters, unused)                             \
    static void dry_##name(struct kstream *ks, UNPACK parameters) \
    {                                                             \
        (void)ks, (void)(unused);                                 \
    }
#define UNPACK(...) __VA_ARGS__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
DRY(upload, (void *dst, const void *host, size_t bytes), dst)
DRY(download, (void *host, const void *src, size_t bytes), host)
DRY(zero, (void *dst, size_t bytes), dst)
DRY(zero_each, (void *dst, size_t bytes, size_t stride, int64_t times), dst)
DRY(cast, (enum dtype to, void *dst, enum dtype from, const void *src, int64_t n), dst)
DRY(gemm, (const struct gemm *g, const void *a, const void *b, void *c), g)
DRY(embed,
    (int64_t T, int64_t first, int64_t rows, int64_t width, int parts, const int32_t *tokens, const void *table,
     void *out),
    out)
DRY(embed_backward,
    (int64_t T, int64_t first, int64_t rows, int64_t width, int parts, const int32_t *tokens, const void *dout,
     void *dtable),
    dtable)
DRY(residual_gain,
    (int64_t T, int64_t w, const void *x, const void *y, const void *gain, void *x_out, void *n, void *S), S)
DRY(norm_apply,
    (int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain, const void *S, void *R, void *n), n)
DRY(gain_backward,
    (int64_t T, int64_t w, const void *x, const void *gain, const void *R, const void *k, const void *dn,
     bool accumulate, void *dx, void *dgain),
    dx)
DRY(norm_forward,
    (int64_t T, int64_t d, double eps, const void *x, const void *y, const void *gain, void *x_out, void *R, void *n),
    n)
DRY(norm_backward,
    (int64_t T, int64_t d, const void *x, const void *gain, const void *R, const void *dn, void *dx, void *k,
     void *dgain),
    dx)
DRY(latent_forward,
    (int64_t T, int64_t n, int64_t d, double eps, enum latent_act act, const void *H, const void *S, void *R, void *z),
    z)
DRY(latent_backward,
    (int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent, const void *R, void *dz, void *k), dz)
DRY(cross_sum,
    (const struct crossing *c, const void *Y, const void *G, int64_t ldg, const void *bias, void *u, void *sums), u)
DRY(cross_forward,
    (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *bias, void *z), z)
DRY(cross_backward_sums,
    (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *bias, void *dz,
     void *back, void *dgain, void *dbias),
    dz)
DRY(cross_backward,
    (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *back, void *dv,
     void *dbias),
    dv)
DRY(rope, (int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta, bool inverse, void *x), x)
DRY(attention_forward,
    (const struct attention *a, const void *q, const void *k, const void *v, void *o, void *lse, void *workspace), o)
DRY(attention_backward,
    (const struct attention *a, const void *q, const void *k, const void *v, const void *o, const void *lse,
     const void *d_o, void *dq, void *dk, void *dv, void *workspace),
    dq)
DRY(glu_forward, (int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate, const void *up, void *out), out)
DRY(glu_backward,
    (int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate, const void *up, const void *dout, void *dgate,
     void *dup, void *out),
    dup)
DRY(ce_max, (int64_t T, int64_t ld, int64_t valid, const void *logits, void *m), m)
DRY(ce_sums,
    (int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits, const void *m, const int32_t *targets,
     void *sums),
    sums)
DRY(ce_backward,
    (int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits, const void *m, const void *sums,
     const int32_t *targets, double *loss, void *c),
    c)
DRY(row_dot, (int64_t T, int64_t w, const void *a, const void *b, void *out), out)
DRY(norm_k, (int64_t T, int64_t d, const void *R, const void *c, void *k), k)
DRY(copy_rows, (int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y, int64_t ldy), y)
DRY(interleave, (int parts, int64_t T, int64_t w, const void *in, void *out), out)
DRY(grad_squares, (int64_t n, const void *grad, double *acc), acc)
DRY(step_finish, (struct step_block * block, double beta1, double beta2, double clip), block)
DRY(adamw,
    (int64_t n, const struct adamw *hyper, const struct step_block *block, const void *grad, void *m, void *v,
     void *master, void *weight),
    weight)

/* ---- collectives ---- */

static int dry_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                          enum comm_op op, struct error *err)
{
    return ERR_OK;
}
static int dry_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk,
                              enum dtype dtype, struct error *err)
{
    return ERR_OK;
}
static int dry_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk,
                          enum dtype dtype, struct error *err)
{
    return ERR_OK;
}
static int dry_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send,
                        const struct comm_message *recv, struct error *err)
{
    return ERR_OK;
}
#pragma GCC diagnostic pop

static inline const struct kernels *dry_kernels(void)
{
#define ROW(name) .name = dry_##name
    static const struct kernels table = {
        .name = "dry",
        .act = DTYPE_F32,
        .stat = DTYPE_F32,
        .grad = DTYPE_F32,
        ROW(stream_create),
        ROW(stream_destroy),
        ROW(stream_sync),
        ROW(gemm_seconds),
        ROW(alloc),
        ROW(release),
        ROW(host_alloc),
        ROW(host_release),
        ROW(upload),
        ROW(download),
        ROW(zero),
        ROW(zero_each),
        ROW(cast),
        ROW(gemm),
        ROW(embed),
        ROW(embed_backward),
        ROW(residual_gain),
        ROW(norm_apply),
        ROW(gain_backward),
        ROW(norm_forward),
        ROW(norm_backward),
        ROW(latent_forward),
        ROW(latent_backward),
        ROW(cross_sum),
        ROW(cross_forward),
        ROW(cross_backward_sums),
        ROW(cross_backward),
        ROW(rope),
        ROW(attention_workspace),
        ROW(attention_forward),
        ROW(attention_backward),
        ROW(glu_forward),
        ROW(glu_backward),
        ROW(ce_max),
        ROW(ce_sums),
        ROW(ce_backward),
        ROW(row_dot),
        ROW(norm_k),
        ROW(copy_rows),
        ROW(interleave),
        ROW(grad_squares),
        ROW(step_finish),
        ROW(adamw),
    };
#undef ROW
    return &table;
}

static inline void dry_comms(const struct plan *p, int rank, struct comms *out)
{
    static const struct comm_backend backend = {.name = "dry",
                                                .all_reduce = dry_all_reduce,
                                                .reduce_scatter = dry_reduce_scatter,
                                                .all_gather = dry_all_gather,
                                                .exchange = dry_exchange};
    struct comm_layout layout = engine_layout(p);
    *out = (struct comms){.seconds = {0}};
    for (int g = 0; g < GROUP_COUNT; g++) {
        struct comm_place place = comm_place_of(&layout, rank, (enum comm_group)g);
        *comms_group(out, (enum comm_group)g) = (struct comm){.backend = &backend,
                                                              .group = (enum comm_group)g,
                                                              .rank = place.rank,
                                                              .size = place.size,
                                                              .world_rank = rank,
                                                              .counters = &out->counters,
                                                              .seconds = &out->seconds[g]};
    }
}

/* What one step of rank 0 calls; its loss and tokens mean nothing. */
static inline int dry_step(const struct plan *p, struct comm_counters *out, struct error *err)
{
    struct comms comms;
    struct engine *e;
    dry_comms(p, 0, &comms);
    int rc = engine_create(p, dry_kernels(), &comms, 0, 1, &e, err);
    int32_t *tokens = calloc((size_t)p->T, sizeof *tokens);
    struct micro_batch micro[1] = {{tokens, tokens}};
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    if (!rc)
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    engine_destroy(e);
    free(tokens);
    *out = comms.counters;
    return rc;
}

#endif
