/* Attention of the CUDA backend: cuDNN's, by plans kept for each shape, or the own kernel; and the check at start-up
 * that compares the two. */
#include "kernels/cuda/attention_graph.h"

#include <math.h>
#include <stdlib.h>

/* A pass of a shape that was asked for, as plans for `slice` sequences at a time. */
struct entry {
    struct attention a;
    bool backward;
    int64_t slice;
    struct attention_plan *plan;
    struct entry *next;
};

/* One handle a stream: cuDNN's calls go to the stream that its handle was given. */
struct cuda_attentions {
    const struct cudnn *lib;
    cudnnHandle_t handle;
    struct entry *entries;
};

size_t cuda_attention_workspace(const struct attention *a, bool backward)
{
    return attention_bytes(a, backward);
}

void cuda_attentions_destroy(struct cuda_attentions *at)
{
    if (!at)
        return;
    while (at->entries) {
        struct entry *next = at->entries->next;
        attention_plan_destroy(at->entries->plan);
        free(at->entries);
        at->entries = next;
    }
    if (at->handle)
        (void)at->lib->destroy(at->handle);
    free(at);
}

size_t cuda_attention_version(const struct kstream *ks)
{
    return ks->attentions ? ks->attentions->lib->version : 0;
}

/* ---- plans ------------------------------------------------------------------------ */

static int open_attentions(struct kstream *ks, struct error *err)
{
    if (ks->attentions)
        return ERR_OK;
    const struct cudnn *lib;
    int rc = cudnn_open(&lib, err);
    if (rc)
        return rc;
    struct cuda_attentions *at = calloc(1, sizeof *at);
    if (!at)
        return error_set(err, ERR_NOMEM, "no memory for attention's plans");
    at->lib = lib;
    cudnnStatus_t status = lib->create(&at->handle);
    if (!status)
        status = lib->set_stream(at->handle, ks->stream);
    if (status) {
        rc = cudnn_failed(lib, status, "making a handle", err);
        cuda_attentions_destroy(at);
        return rc;
    }
    ks->attentions = at;
    return ERR_OK;
}

static bool same_shape(const struct attention *x, const struct attention *y)
{
    return x->b == y->b && x->s == y->s && x->h == y->h && x->hk == y->hk && x->e == y->e && x->ldq == y->ldq &&
           x->ldk == y->ldk && x->ldv == y->ldv && x->ldo == y->ldo && x->accumulate == y->accumulate;
}

static struct entry *find(struct kstream *ks, const struct attention *a, bool backward)
{
    struct entry *e = ks->attentions ? ks->attentions->entries : NULL;
    while (e && !(e->backward == backward && same_shape(&e->a, a)))
        e = e->next;
    return e;
}

/* Of the workspace, behind rows and sums. */
static int64_t room_for_cudnn(const struct attention *a, bool backward)
{
    int64_t bytes = (int64_t)attention_bytes(a, backward);
    return backward ? bytes - attention_rows_bytes(a) - attention_sums_bytes(a) : bytes;
}

static int check_shape(const struct attention *a, struct error *err)
{
    enum { ELEMENTS = 8 }; /* 16 bytes */
    if (a->b < 1 || a->s < 1 || a->hk < 1 || a->h % a->hk)
        return error_set(err, ERR_INVALID, "attention of %lld sequences of %lld tokens, %lld and %lld heads",
                         (long long)a->b, (long long)a->s, (long long)a->h, (long long)a->hk);
    if (a->e % ELEMENTS || a->ldq % ELEMENTS || a->ldk % ELEMENTS || a->ldv % ELEMENTS || a->ldo % ELEMENTS)
        return error_set(err, ERR_UNSUPPORTED,
                         "cuDNN's attention wants head widths and rows that are multiples of %d elements; heads have "
                         "%lld columns, rows %lld, %lld, %lld and %lld",
                         ELEMENTS, (long long)a->e, (long long)a->ldq, (long long)a->ldk, (long long)a->ldv,
                         (long long)a->ldo);
    return ERR_OK;
}

/* The plan for the most sequences at a time whose workspace stays within what was planned for. */
static int plan_slices(struct kstream *ks, struct entry *e, struct error *err)
{
    const struct attention *a = &e->a;
    int64_t room = room_for_cudnn(a, e->backward), wanted = 0;
    for (int64_t slice = e->backward ? attention_sequences(a) : a->b; slice >= 1; slice--) {
        if (a->b % slice)
            continue;
        struct attention part = *a;
        part.b = slice;
        int rc = attention_plan_create(ks->attentions->lib, ks->attentions->handle, &part, e->backward, &e->plan, err);
        if (rc)
            return rc;
        if (e->plan->workspace <= room) {
            e->slice = slice;
            return ERR_OK;
        }
        wanted = e->plan->workspace;
        attention_plan_destroy(e->plan);
        e->plan = NULL;
    }
    return error_set(err, ERR_UNSUPPORTED,
                     "cuDNN's attention wants %lld bytes of workspace for one sequence, and %lld were planned",
                     (long long)wanted, (long long)room);
}

static int plan(struct kstream *ks, const struct attention *a, bool backward, struct entry **out, struct error *err)
{
    *out = find(ks, a, backward);
    if (*out)
        return ERR_OK;
    int rc = check_shape(a, err);
    if (!rc)
        rc = open_attentions(ks, err);
    if (rc)
        return rc;
    struct entry *e = calloc(1, sizeof *e);
    if (!e)
        return error_set(err, ERR_NOMEM, "no memory for attention's plans");
    e->a = *a;
    e->backward = backward;
    rc = plan_slices(ks, e, err);
    if (rc) {
        free(e);
        return rc;
    }
    e->next = ks->attentions->entries;
    ks->attentions->entries = e;
    *out = e;
    return ERR_OK;
}

/* ---- running ---------------------------------------------------------------------- */

static void *moved(const void *p, int64_t elements, enum dtype type)
{
    return p ? (char *)(uintptr_t)p + elements * (int64_t)dtype_size(type) : NULL;
}

/* The tensors from sequence `first` on. */
static struct attention_tensors from_sequence(const struct attention *a, const struct attention_tensors *t,
                                              int64_t first)
{
    int64_t row = first * a->s;
    return (struct attention_tensors){.q = moved(t->q, row * a->ldq, DTYPE_BF16),
                                      .k = moved(t->k, row * a->ldk, DTYPE_BF16),
                                      .v = moved(t->v, row * a->ldv, DTYPE_BF16),
                                      .o = moved(t->o, row * a->ldo, DTYPE_BF16),
                                      .lse = moved(t->lse, row * a->h, DTYPE_F32),
                                      .d_o = moved(t->d_o, row * a->ldo, DTYPE_BF16),
                                      .dq = moved(t->dq, row * a->ldq, DTYPE_BF16),
                                      .dk = moved(t->dk, row * a->ldk, DTYPE_BF16),
                                      .dv = moved(t->dv, row * a->ldv, DTYPE_BF16)};
}

static bool aligned_as_planned(const struct attention_tensors *t)
{
    enum { BYTES = 16 };
    const void *const all[] = {t->q, t->k, t->v, t->o, t->lse, t->d_o, t->dq, t->dk, t->dv};
    uintptr_t bits = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        bits |= (uintptr_t)all[i];
    return bits % BYTES == 0;
}

static int run_slices(const struct entry *e, const struct attention_tensors *t, void *workspace, struct error *err)
{
    const struct attention *a = &e->a;
    char *rows = workspace, *sums = rows + (e->backward ? attention_rows_bytes(a) : 0);
    char *cudnns = sums + (e->backward ? attention_sums_bytes(a) : 0);
    for (int64_t first = 0; first < a->b; first += e->slice) {
        struct attention_tensors part = from_sequence(a, t, first);
        if (!aligned_as_planned(&part))
            return error_set(err, ERR_INVALID, "attention's tensors do not start on 16 bytes");
        int rc = attention_plan_run(e->plan, &part, (float *)(void *)rows, (float *)(void *)sums, cudnns, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

/* Plans of a shape that no check has seen are made now, unless the stream is being captured: that takes too long, and
 * may load code. */
static void run_cudnn(struct kstream *ks, const struct attention *a, bool backward, const struct attention_tensors *t,
                      void *workspace)
{
    struct error err;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    struct entry *e = find(ks, a, backward);
    if (!e) {
        if (!cuda_ok(ks, cudaStreamIsCapturing(ks->stream, &capture), "attention"))
            return;
        if (capture != cudaStreamCaptureStatusNone) {
            cuda_fault(ks, ERR_INTERNAL,
                       "attention of %lld sequences of %lld tokens was not planned before the capture", (long long)a->b,
                       (long long)a->s);
            return;
        }
    }
    if ((!e && plan(ks, a, backward, &e, &err)) || run_slices(e, t, workspace, &err))
        cuda_fault(ks, err.code, "%s", err.message);
}

void cuda_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace)
{
    const struct attention_tensors t = {.q = q, .k = k, .v = v, .o = o, .lse = lse};
    if (a->own)
        attention_own_forward(ks, a, &t);
    else
        run_cudnn(ks, a, false, &t, workspace);
}

void cuda_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace)
{
    /* o and lse are only read in this direction. */
    const struct attention_tensors t = {
        .q = q, .k = k, .v = v, .o = (void *)o, .lse = (void *)lse, .d_o = d_o, .dq = dq, .dk = dk, .dv = dv};
    if (a->own)
        attention_own_backward(ks, a, &t, workspace);
    else
        run_cudnn(ks, a, true, &t, workspace);
}

/* ---- the check ----------------------------------------------------------------------- */

enum result { RESULT_O, RESULT_LSE, RESULT_DQ, RESULT_DK, RESULT_DV, RESULTS };
enum mode { MODE_NORMAL, MODE_NEGATIVE, MODES };
static const char *const result_names[RESULTS] = {"o", "the log-sum-exp", "dq", "dk", "dv"};

/* Relative Frobenius. Both round P, dS and the result to bf16, at most 2^-8 each; two such results differ by at most
 * 6 * 2^-8 = 2.3e-2 if every rounding is the worst and points the wrong way, by less than 1e-2 as they fall. A row too
 * many, a wrong scale or a lost tile is far above. The log-sum-exp is fp32 throughout. */
static const double result_limits[RESULTS] = {2e-2, 1e-4, 2e-2, 2e-2, 2e-2};

/* All of the check's memory, in one piece. */
struct trial {
    struct attention a; /* the shape, cut down */
    void *q, *k, *v, *d_o;
    void *of[2][RESULTS]; /* cuDNN's and the own kernel's */
    void *workspace;
    struct attention_distance *distances; /* [MODES][RESULTS] */
};

static int64_t width_of(const struct attention *a, enum result r)
{
    return (r == RESULT_DK || r == RESULT_DV ? a->hk : a->h) * a->e;
}

static int64_t ld_of(const struct attention *a, enum result r)
{
    const int64_t ld[RESULTS] = {a->ldo, a->s, a->ldq, a->ldk, a->ldv};
    return ld[r];
}

static size_t result_bytes(const struct attention *a, enum result r)
{
    if (r == RESULT_LSE)
        return (size_t)(a->b * a->h * a->s) * sizeof(float);
    return (size_t)(a->b * a->s * ld_of(a, r)) * dtype_size(DTYPE_BF16);
}

/* Hands out the memory and returns its bytes; with base NULL only their number. */
static size_t place_trial(struct trial *t, char *base)
{
    const struct attention *a = &t->a;
    size_t forward = attention_bytes(a, false), backward = attention_bytes(a, true), used = 0;
    struct {
        void **where;
        size_t bytes;
    } parts[6 + 2 * RESULTS] = {{&t->q, result_bytes(a, RESULT_DQ)},
                                {&t->k, result_bytes(a, RESULT_DK)},
                                {&t->v, result_bytes(a, RESULT_DV)},
                                {&t->d_o, result_bytes(a, RESULT_O)},
                                {&t->workspace, forward > backward ? forward : backward},
                                {(void **)&t->distances, sizeof(struct attention_distance) * MODES * RESULTS}};
    for (int r = 0; r < 2 * RESULTS; r++) {
        parts[6 + r].where = &t->of[r / RESULTS][r % RESULTS];
        parts[6 + r].bytes = result_bytes(a, (enum result)(r % RESULTS));
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].where = base ? base + used : NULL;
        used += (size_t)attention_aligned((int64_t)parts[i].bytes);
    }
    return used;
}

static void compute(struct kstream *ks, const struct trial *t, bool own)
{
    struct attention a = t->a;
    void *const *r = t->of[own];
    a.own = own;
    cuda_attention_forward(ks, &a, t->q, t->k, t->v, r[RESULT_O], r[RESULT_LSE], t->workspace);
    cuda_attention_backward(ks, &a, t->q, t->k, t->v, r[RESULT_O], r[RESULT_LSE], t->d_o, r[RESULT_DQ], r[RESULT_DK],
                            r[RESULT_DV], t->workspace);
}

/* NEGATIVE: the first column of q and k makes every score about -8192, where a mask or a maximum that is not negative
 * enough shows. The gradients of that column are a sum that cancels, times a large number: only finite. */
static void try_mode(struct kstream *ks, const struct trial *t, enum mode mode, uint64_t seed)
{
    const struct attention *a = &t->a;
    float offset = mode == MODE_NEGATIVE ? (float)sqrt(8192 * sqrt((double)a->e)) : 0;
    int64_t T = a->b * a->s;
    attention_probe_fill(ks, T, a->ldq, a->e, seed, offset, t->q);
    attention_probe_fill(ks, T, a->ldk, a->e, seed + 1, -offset, t->k);
    attention_probe_fill(ks, T, a->ldv, a->e, seed + 2, 0, t->v);
    attention_probe_fill(ks, T, a->ldo, a->e, seed + 3, 0, t->d_o);
    compute(ks, t, false);
    compute(ks, t, true);
    for (int r = 0; r < RESULTS; r++) {
        bool statistic = r == RESULT_LSE, gradient = r == RESULT_DQ || r == RESULT_DK;
        int skip = gradient && mode == MODE_NEGATIVE ? 1 : 0;
        int64_t rows = statistic ? a->b * a->h : T, columns = statistic ? a->s : width_of(a, (enum result)r);
        attention_probe_compare(ks, statistic ? DTYPE_F32 : DTYPE_BF16, rows, columns, ld_of(a, (enum result)r),
                                statistic ? a->s : a->e, skip, t->of[false][r], t->of[true][r],
                                &t->distances[mode * RESULTS + r]);
    }
}

static int judge(const struct cudnn *lib, const struct attention_distance *d, struct error *err)
{
    for (int i = 0; i < MODES * RESULTS; i++) {
        const char *name = result_names[i % RESULTS], *where = i / RESULTS ? ", with very negative scores" : "";
        double difference = sqrt(d[i].error / (d[i].size > 0 ? d[i].size : 1)), limit = result_limits[i % RESULTS];
        if (d[i].not_finite > 0 || !(difference <= limit)) {
            error_set(
                err, ERR_DEVICE,
                "cuDNN %zu.%zu.%zu computes %s of attention wrongly%s: differs from the own kernel by %.3g (limit "
                "%.3g), %.0f numbers are not finite",
                lib->version / 10000, lib->version / 100 % 100, lib->version % 100, name, where, difference, limit,
                d[i].not_finite);
            return error_hint(err, "use another cuDNN 9, or the own kernel");
        }
    }
    return ERR_OK;
}

static int run_trial(struct kstream *ks, const struct trial *t, size_t bytes, struct error *err)
{
    struct attention_distance found[MODES * RESULTS];
    for (int mode = 0; mode < MODES; mode++) {
        /* NaN everywhere else: nothing may be taken from memory that was not written. The first mode's distances lie in
         * between and are fetched before the second. */
        if (!cuda_ok(ks, cudaMemsetAsync(t->q, 0xff, bytes, ks->stream), "attention's check"))
            break;
        try_mode(ks, t, (enum mode)mode, 20261129);
        if (!cuda_ok(ks,
                     cudaMemcpyAsync(found + mode * RESULTS, t->distances + mode * RESULTS, sizeof found / MODES,
                                     cudaMemcpyDeviceToHost, ks->stream),
                     "attention's check"))
            break;
    }
    int rc = cuda_stream_sync(ks, err);
    return rc ? rc : judge(ks->attentions->lib, found, err);
}

int cuda_attention_check(struct kstream *ks, const struct attention *a, void *workspace, struct error *err)
{
    enum { SEQUENCES = 2, TOKENS = 512 }; /* quick, and still several tiles of either kernel */
    /* A length that ends inside a tile is cut to one that ends there too. */
    const int64_t tokens = TOKENS - ATTENTION_TILE + (a->s - 1) % ATTENTION_TILE + 1;
    if (ks->fault.code)
        return error_set(err, ERR_INTERNAL, "attention's check on a stream that has failed: %s", ks->fault.message);
    struct attention all = *a;
    struct trial t = {0};
    struct entry *planned;
    void *own_memory = NULL;
    all.own = false;
    for (int backward = 0; backward < 2; backward++) {
        int rc = plan(ks, &all, backward, &planned, err);
        if (rc)
            return rc;
    }
    t.a = all;
    t.a.b = a->b < SEQUENCES ? a->b : SEQUENCES;
    t.a.s = a->s < tokens ? a->s : tokens;
    size_t need = place_trial(&t, NULL), forward = attention_bytes(a, false), backward = attention_bytes(a, true);
    if (!workspace || need > (forward > backward ? forward : backward)) {
        cudaError_t status = cudaMalloc(&own_memory, need);
        if (status != cudaSuccess) {
            (void)cudaGetLastError();
            return error_set(err, ERR_NOMEM, "attention's check: %zu bytes: %s", need, cudaGetErrorString(status));
        }
        workspace = own_memory;
    }
    (void)place_trial(&t, workspace);
    int rc = run_trial(ks, &t, need, err);
    (void)cudaFree(own_memory);
    return rc;
}
