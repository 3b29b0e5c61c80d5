/* op_times.h */
#include "tests/bench/support/op_times.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"

#if __has_include(<cublasLt.h>)
#include "kernels/cuda/cuda.h"
static void *native(struct kstream *ks)
{
    return ks->stream;
}
enum { HAS_EVENTS = 1 };
#else
static void *native(struct kstream *ks)
{
    return ks;
}
enum { HAS_EVENTS = 0 };
#endif

enum { LABEL_MAX = 56, CALLS_MAX = 1 << 17 };

struct call {
    char label[LABEL_MAX];
    enum trace_share share;
    double bytes, flop;
    void *begin, *end; /* events; on the CPU unused */
    double ms;
    int64_t runs; /* of a row of the table */
    enum op_kind kind;
    union {
        struct gemm gemm;
        struct attention attention;
    };
};

static struct kernels real;
static struct {
    bool cuda, on;
    int64_t n, events, vocabulary, started;
    struct call *calls; /* [CALLS_MAX] */
    int (*create)(void **event, unsigned flags);
    int (*record)(void *event, void *stream);
    int (*elapsed)(float *ms, void *begin, void *end);
} times;

/* ---- a call ---- */

/* NULL: nothing is recorded now, or there is no more room. */
static struct call *begin(struct kstream *ks, enum trace_share share, double bytes, double flop)
{
    struct call *c = times.on && times.n < CALLS_MAX ? &times.calls[times.n] : NULL;
    if (!c)
        return NULL;
    times.n++;
    c->kind = OP_OTHER;
    c->share = share;
    c->bytes = bytes;
    c->flop = flop;
    if (!times.cuda) {
        times.started = clock_mono_ns();
        return c;
    }
    if (!c->begin && (times.create(&c->begin, 0) || times.create(&c->end, 0)))
        return NULL;
    times.record(c->begin, native(ks));
    return c;
}

static void end(struct kstream *ks, struct call *c)
{
    if (!c)
        return;
    if (times.cuda)
        times.record(c->end, native(ks));
    else
        c->ms = (double)(clock_mono_ns() - times.started) / (double)NS_PER_MS;
}

static void keep_nothing(struct call *c)
{
    (void)c;
}
static void keep_gemm(struct call *c, const struct gemm *g)
{
    c->kind = OP_GEMM;
    c->gemm = *g;
}
static void keep_attention(struct call *c, enum op_kind kind, const struct attention *a)
{
    c->kind = kind;
    c->attention = *a;
}

/* The operation `name`: what else is kept of a call, its kind, bytes and FLOP, its label's format and numbers. */
#define UNPACK(...) __VA_ARGS__
#define TIMED_KEEPING(keep, name, parameters, arguments, share, bytes, flop, ...) \
    static void timed_##name(struct kstream *ks, UNPACK parameters)               \
    {                                                                             \
        struct call *call = begin(ks, share, (double)(bytes), (double)(flop));    \
        if (call) {                                                               \
            snprintf(call->label, sizeof call->label, #name __VA_ARGS__);         \
            keep;                                                                 \
        }                                                                         \
        real.name(ks, UNPACK arguments);                                          \
        end(ks, call);                                                            \
    }
#define TIMED(...) TIMED_KEEPING(keep_nothing(call), __VA_ARGS__)

enum { ACT = 2, GRAD = 4 }; /* bytes of the CUDA backend's */
#define ll long long        /* for printf */

static bool of_head(const struct gemm *g)
{
    return times.vocabulary && (g->m == times.vocabulary || g->n == times.vocabulary || g->k == times.vocabulary);
}

static double gemm_bytes(const struct gemm *g)
{
    double a = (double)g->m * (double)g->k, b = (double)g->k * (double)g->n, c = (double)g->m * (double)g->n;
    return g->batch * (ACT * (a + b) + c * (g->c_grad ? GRAD : ACT) * (g->beta != 0 ? 2 : 1));
}

/* Of the scores below the diagonal. */
static double attention_flop(const struct attention *a)
{
    return 2.0 * (double)(a->b * a->h * a->e) * (double)a->s * (double)a->s;
}
static double attention_bytes_of(const struct attention *a, int wide, int narrow)
{
    return ACT * (double)(a->b * a->s * a->e) * (double)(wide * a->h + narrow * a->hk);
}

TIMED(zero, (void *dst, size_t bytes), (dst, bytes), SHARE_COPY, bytes, 0, " %" PRId64 " KiB", (int64_t)(bytes >> 10))
TIMED(cast, (enum dtype to, void *dst, enum dtype from, const void *src, int64_t n), (to, dst, from, src, n),
      SHARE_COPY, n *(int64_t)(dtype_size(to) + dtype_size(from)), 0, " %" PRId64, n)
TIMED_KEEPING(keep_gemm(call, g), gemm, (const struct gemm *g, const void *a, const void *b, void *c), (g, a, b, c),
              of_head(g) ? SHARE_HEAD : SHARE_GEMM, gemm_bytes(g),
              2.0 * (double)g->m * (double)g->n * (double)g->k * g->batch,
              " %s%s %" PRId64 "x%" PRId64 "x%" PRId64 "%s b%d", g->trans_a ? "t" : "n", g->trans_b ? "t" : "n", g->m,
              g->n, g->k, g->c_grad ? " grad" : "", g->batch)
TIMED(embed,
      (int64_t T, int64_t first, int64_t rows, int64_t width, int parts, const int32_t *tokens, const void *table,
       void *out),
      (T, first, rows, width, parts, tokens, table, out), SHARE_ELEMENT, 2 * ACT * T * width, 0,
      " %" PRId64 "x%" PRId64, T, width)
TIMED(embed_backward,
      (int64_t T, int64_t first, int64_t rows, int64_t width, int parts, const int32_t *tokens, const void *dout,
       void *dtable),
      (T, first, rows, width, parts, tokens, dout, dtable), SHARE_ELEMENT, (ACT + 2 * GRAD) * T * width, 0,
      " %" PRId64 "x%" PRId64, T, width)
TIMED(residual_gain,
      (int64_t T, int64_t w, const void *x, const void *y, const void *gain, void *x_out, void *n, void *S),
      (T, w, x, y, gain, x_out, n, S), SHARE_ELEMENT, ACT *T *w *(1 + !!y + (y || x_out != x) + !!n), 0,
      " %" PRId64 "x%" PRId64, T, w)
TIMED(norm_apply,
      (int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain, const void *S, void *R, void *n),
      (T, w, d, eps, x, gain, S, R, n), SHARE_ELEMENT, 2 * ACT * T * w, 0, " %" PRId64 "x%" PRId64, T, w)
TIMED(gain_backward,
      (int64_t T, int64_t w, const void *x, const void *gain, const void *R, const void *k, const void *dn,
       bool accumulate, void *dx, void *dgain),
      (T, w, x, gain, R, k, dn, accumulate, dx, dgain), SHARE_ELEMENT, ACT *T *w *(3 + accumulate), 0,
      " %" PRId64 "x%" PRId64, T, w)
TIMED(norm_forward,
      (int64_t T, int64_t d, double eps, const void *x, const void *y, const void *gain, void *x_out, void *R, void *n),
      (T, d, eps, x, y, gain, x_out, R, n), SHARE_ELEMENT, ACT *T *d *(2 + !!y + (y || x_out != x)), 0,
      " %" PRId64 "x%" PRId64, T, d)
TIMED(norm_backward,
      (int64_t T, int64_t d, const void *x, const void *gain, const void *R, const void *dn, void *dx, void *k,
       void *dgain),
      (T, d, x, gain, R, dn, dx, k, dgain), SHARE_ELEMENT, 4 * ACT * T * d, 0, " %" PRId64 "x%" PRId64, T, d)
TIMED(latent_forward,
      (int64_t T, int64_t n, int64_t d, double eps, enum latent_act act, const void *H, const void *S, void *R,
       void *z),
      (T, n, d, eps, act, H, S, R, z), SHARE_ELEMENT, 2 * ACT * T * n * (R || z != H), 0, " %" PRId64 "x%" PRId64, T, n)
TIMED(latent_backward,
      (int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent, const void *R, void *dz, void *k),
      (T, n, d, act, latent, R, dz, k), SHARE_ELEMENT, 3 * ACT * T * n * (R || act != LATENT_IDENTITY), 0,
      " %" PRId64 "x%" PRId64, T, n)
TIMED(cross_sum,
      (const struct crossing *c, const void *Y, const void *G, int64_t ldg, const void *bias, void *u, void *sums),
      (c, Y, G, ldg, bias, u, sums), SHARE_ELEMENT, 3 * ACT * c->rows * c->w, 0, " %" PRId64 "x%" PRId64, c->rows, c->w)
TIMED(cross_forward,
      (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *bias, void *z),
      (c, u, sums, gain, bias, z), SHARE_ELEMENT, 2 * ACT * c->rows * c->w, 0, " %" PRId64 "x%" PRId64, c->rows, c->w)
TIMED(cross_backward_sums,
      (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *bias, void *dz,
       void *back, void *dgain, void *dbias),
      (c, u, sums, gain, bias, dz, back, dgain, dbias), SHARE_ELEMENT, 3 * ACT * c->rows * c->w, 0,
      " %" PRId64 "x%" PRId64, c->rows, c->w)
TIMED(cross_backward,
      (const struct crossing *c, const void *u, const void *sums, const void *gain, const void *back, void *dv,
       void *dbias),
      (c, u, sums, gain, back, dv, dbias), SHARE_ELEMENT, 3 * ACT * c->rows * c->w, 0, " %" PRId64 "x%" PRId64, c->rows,
      c->w)
TIMED(rope, (int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta, bool inverse, void *x),
      (T, s, heads, e, ld, theta, inverse, x), SHARE_ELEMENT, 2 * ACT * T * heads * e, 0, " %" PRId64 "x%" PRId64, T,
      (heads * e))
TIMED_KEEPING(keep_attention(call, OP_ATTENTION_FORWARD, a), attention_forward,
              (const struct attention *a, const void *q, const void *k, const void *v, void *o, void *lse,
               void *workspace),
              (a, q, k, v, o, lse, workspace), SHARE_ATTENTION, attention_bytes_of(a, 2, 2), attention_flop(a),
              " b%" PRId64 " h%" PRId64 " s%" PRId64, a->b, a->h, a->s)
TIMED_KEEPING(keep_attention(call, OP_ATTENTION_BACKWARD, a), attention_backward,
              (const struct attention *a, const void *q, const void *k, const void *v, const void *o, const void *lse,
               const void *d_o, void *dq, void *dk, void *dv, void *workspace),
              (a, q, k, v, o, lse, d_o, dq, dk, dv, workspace), SHARE_ATTENTION, attention_bytes_of(a, 4, 4),
              2.5 * attention_flop(a), " b%" PRId64 " h%" PRId64 " s%" PRId64, a->b, a->h, a->s)
TIMED(glu_forward, (int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate, const void *up, void *out),
      (rows, n, ld, silu, gate, up, out), SHARE_ELEMENT, 3 * ACT * rows * n, 0, " %" PRId64 "x%" PRId64, rows, n)
TIMED(glu_backward,
      (int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate, const void *up, const void *dout, void *dgate,
       void *dup, void *out),
      (rows, n, ld, silu, gate, up, dout, dgate, dup, out), SHARE_ELEMENT, (out ? 6 : 5) * ACT * rows * n, 0,
      " %" PRId64 "x%" PRId64, rows, n)
TIMED(ce_max, (int64_t T, int64_t ld, int64_t valid, const void *logits, void *m), (T, ld, valid, logits, m),
      SHARE_HEAD, ACT *T *valid, 0, " %" PRId64 "x%" PRId64, T, valid)
TIMED(ce_sums,
      (int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits, const void *m, const int32_t *targets,
       void *sums),
      (T, ld, valid, first, logits, m, targets, sums), SHARE_HEAD, ACT *T *valid, 0, " %" PRId64 "x%" PRId64, T, valid)
TIMED(ce_backward,
      (int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits, const void *m, const void *sums,
       const int32_t *targets, double *loss, void *c),
      (T, ld, valid, first, logits, m, sums, targets, loss, c), SHARE_HEAD, 2 * ACT * T * valid * !!c, 0,
      " %" PRId64 "x%" PRId64, T, valid)
TIMED(row_dot, (int64_t T, int64_t w, const void *a, const void *b, void *out), (T, w, a, b, out), SHARE_ELEMENT,
      2 * ACT * T * w, 0, " %" PRId64 "x%" PRId64, T, w)
TIMED(norm_k, (int64_t T, int64_t d, const void *R, const void *c, void *k), (T, d, R, c, k), SHARE_ELEMENT,
      3 * GRAD * T, 0, " %" PRId64, T)
TIMED(copy_rows, (int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y, int64_t ldy),
      (rows, w, x, ldx, accumulate, y, ldy), SHARE_COPY, (2 + accumulate) * ACT * rows * w, 0, " %" PRId64 "x%" PRId64,
      rows, w)
TIMED(interleave, (int parts, int64_t T, int64_t w, const void *in, void *out), (parts, T, w, in, out), SHARE_COPY,
      2 * ACT * parts * T * w, 0, " %dx%" PRId64 "x%" PRId64, parts, T, w)
TIMED(grad_squares, (int64_t n, const void *grad, double *acc), (n, grad, acc), SHARE_OPTIMIZER, GRAD *n, 0,
      " (all sizes)")
TIMED(adamw,
      (int64_t n, const struct adamw *hyper, const struct step_block *block, const void *grad, void *m, void *v,
       void *master, void *weight),
      (n, hyper, block, grad, m, v, master, weight), SHARE_OPTIMIZER, (7 * GRAD + ACT) * n, 0, " (all sizes)")

/* ---- the table ---- */

static bool symbol(void *library, const char *name, void *out)
{
    void *found = library ? dlsym(library, name) : NULL;
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

int op_times_open(struct kernels *table, bool cuda, struct error *err)
{
    void *driver = cuda ? dlopen("libcuda.so.1", RTLD_NOW) : NULL;
    times.cuda = cuda;
    if (cuda && (!HAS_EVENTS || !symbol(driver, "cuEventCreate", &times.create) ||
                 !symbol(driver, "cuEventRecord", &times.record) ||
                 (!symbol(driver, "cuEventElapsedTime_v2", &times.elapsed) &&
                  !symbol(driver, "cuEventElapsedTime", &times.elapsed))))
        return error_set(err, ERR_UNSUPPORTED, "this build or this driver has no events");
    if (!(times.calls = calloc(CALLS_MAX, sizeof *times.calls)))
        return error_set(err, ERR_NOMEM, "no memory for %d calls", CALLS_MAX);
    real = *table;
#define ROW(name) table->name = timed_##name
    ROW(zero);
    ROW(cast);
    ROW(gemm);
    ROW(embed);
    ROW(embed_backward);
    ROW(residual_gain);
    ROW(norm_apply);
    ROW(gain_backward);
    ROW(norm_forward);
    ROW(norm_backward);
    ROW(latent_forward);
    ROW(latent_backward);
    ROW(cross_sum);
    ROW(cross_forward);
    ROW(cross_backward_sums);
    ROW(cross_backward);
    ROW(rope);
    ROW(attention_forward);
    ROW(attention_backward);
    ROW(glu_forward);
    ROW(glu_backward);
    ROW(ce_max);
    ROW(ce_sums);
    ROW(ce_backward);
    ROW(row_dot);
    ROW(norm_k);
    ROW(copy_rows);
    ROW(interleave);
    ROW(grad_squares);
    ROW(adamw);
#undef ROW
    return ERR_OK;
}

void op_times_vocabulary(int64_t columns)
{
    times.vocabulary = columns;
}

void op_times_begin(void)
{
    times.n = 0;
    times.on = true;
}

void op_times_stop(void)
{
    times.on = false;
}

/* ---- the sums ---- */

static int by_label(const void *a, const void *b)
{
    return strcmp(((const struct call *)a)->label, ((const struct call *)b)->label);
}
static int by_time(const void *a, const void *b)
{
    const struct call *x = a, *y = b;
    return (x->ms < y->ms) - (x->ms > y->ms);
}

static int read_events(struct error *err)
{
    for (int64_t i = 0; i < times.n && times.cuda; i++) {
        struct call *c = &times.calls[i];
        float ms = 0;
        int status = c->end ? times.elapsed(&ms, c->begin, c->end) : -1;
        if (status)
            return error_set(err, ERR_DEVICE, "no time for %s: the driver says %d", c->label, status);
        c->ms = ms;
    }
    return ERR_OK;
}

static void print_row(FILE *out, const struct call *c, int steps)
{
    double seconds = c->ms / 1e3;
    fprintf(out, "%9.3f %7.1f %9.2f %8.0f ", c->ms / steps, (double)c->runs / steps, 1e3 * c->ms / (double)c->runs,
            c->bytes / seconds / 1e9);
    if (c->flop > 0)
        fprintf(out, "%8.0f", c->flop / seconds / 1e12);
    else
        fprintf(out, "%8s", "");
    fprintf(out, "  %-9s %s\n", trace_share_names[c->share], c->label);
}

int op_times_end(int steps, FILE *out, struct op_times *sums, struct error *err)
{
    int64_t kinds = 0;
    *sums = (struct op_times){.calls = (double)times.n / steps};
    times.on = false;
    int rc = times.n == CALLS_MAX ? error_set(err, ERR_INVALID, "more than %d calls in %d steps", CALLS_MAX, steps)
                                  : read_events(err);
    struct call *rows = malloc((size_t)(times.n + 1) * sizeof *rows);
    if (!rc && !rows)
        rc = error_set(err, ERR_NOMEM, "no memory for the sums");
    if (rc)
        goto out;
    memcpy(rows, times.calls, (size_t)times.n * sizeof *rows);
    qsort(rows, (size_t)times.n, sizeof *rows, by_label);
    for (int64_t i = 0; i < times.n; i++) {
        sums->share_ms[rows[i].share] += rows[i].ms / steps;
        if (rows[i].share == SHARE_ELEMENT)
            sums->element_gb += rows[i].bytes / 1e9 / steps;
        if (kinds && !strcmp(rows[kinds - 1].label, rows[i].label)) {
            rows[kinds - 1].ms += rows[i].ms;
            rows[kinds - 1].bytes += rows[i].bytes;
            rows[kinds - 1].flop += rows[i].flop;
        } else {
            rows[kinds++] = rows[i];
        }
        rows[kinds - 1].runs++;
    }
    qsort(rows, (size_t)kinds, sizeof *rows, by_time);
    fprintf(out, "%9s %7s %9s %8s %8s  %-9s %s\n", "ms/step", "runs", "us each", "GB/s", "TFLOP/s", "what",
            "operation");
    for (int64_t i = 0; i < kinds; i++)
        print_row(out, &rows[i], steps);
out:
    free(rows);
    return rc;
}

int64_t op_times_count(void)
{
    return times.n;
}

void op_times_call(int64_t i, struct op_call *out)
{
    const struct call *c = &times.calls[i];
    *out = (struct op_call){
        .kind = c->kind, .share = c->share, .label = c->label, .bytes = c->bytes, .flop = c->flop, .ms = c->ms};
    if (c->kind == OP_GEMM)
        out->gemm = c->gemm;
    else if (c->kind != OP_OTHER)
        out->attention = c->attention;
}
