/* rope and causal attention against the formulas in long double, and the backward against central differences.
 * fp32 and bf16 attention are held to FlashAttention's rule: at most twice the error of the same computation done
 * plainly in float, and stored in the backend's type. */
#include "check.h"

/* ---- rope --------------------------------------------------------------------------- */

static void one_rope(struct variant *v, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t gap, bool inverse)
{
    int64_t ld = heads * e + gap, n = T * ld, half = e / 2;
    double theta = 10000, *x = host_random(v, n, 1);
    real *want = host_reals(v, n), *size = host_reals(v, n);
    for (int64_t i = 0; i < n; i++) {
        want[i] = x[i];
        size[i] = 0; /* the gap between rows stays as it was */
    }
    for (int64_t i = 0; i < T; i++) {
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t j = 0; j < half; j++) {
                real angle = (real)(i % s) * powl((real)theta, -2 * (real)j / (real)e);
                real a = x[i * ld + h * e + j], b = x[i * ld + h * e + j + half];
                real si = inverse ? -sinl(angle) : sinl(angle);
                int64_t at = i * ld + h * e + j;
                want[at] = a * cosl(angle) - b * si;
                want[at + half] = b * cosl(angle) + a * si;
                /* fp64 computes the angle itself in doubles: its relative error is times the angle. */
                real slack = v->k->act == DTYPE_F64 ? 1 + angle : 1;
                size[at] = size[at + half] = (fabsl(a) + fabsl(b)) * slack;
            }
        }
    }
    void *dx = device_values(v, n, x);
    v->k->rope(v->ks, T, s, heads, e, ld, theta, inverse, dx);
    check(v, "rope", n, dx, want, size, 6);
    v->k->rope(v->ks, T, s, heads, e, ld, theta, !inverse, dx);
    for (int64_t i = 0; i < n; i++) {
        want[i] = x[i];
        size[i] *= 2;
    }
    check(v, "rope and back", n, dx, want, size, 6 + v->store / v->u); /* what the first stored, turned */
    forget(v);
}

static void ropes(struct variant *v)
{
    one_rope(v, 1, 1, 1, 2, 3, false);
    one_rope(v, 12, 4, 3, 6, 3, false);
    one_rope(v, 600, 300, 2, 32, 3, true); /* another table, then the first again */
    one_rope(v, 12, 4, 3, 6, 3, true);
    one_rope(v, 130, 65, 4, 40, 3, false);
    one_rope(v, 400, 400, 5, 80, 3, false);
    one_rope(v, 44, 4, 3, 32, 8, false);
    one_rope(v, 39, 13, 2, 144, 0, true);
}

static void test_rope(void **state)
{
    (void)state;
    each_variant(ropes);
}

/* ---- attention ------------------------------------------------------------------------ */

/* The formulas, generated for long double (the reference), float (the plain computation that sets fp32's limit), and
 * float where what enters a product is first rounded to bf16: P, dS, and the O that D = <dO, O> is taken from (a GPU's
 * plain computation: its matrix units take bf16 and add in fp32). Outputs dense over [rows, ld]; the gap between rows
 * is left at zero. */
#define DEFINE_PLAIN(REAL, NAME, EXP, LOG, SQRT, IN)                                                                  \
    static void NAME(const struct attention *a, const double *q, const double *k, const double *v, const double *d_o, \
                     REAL *o, REAL *lse, REAL *dq, REAL *dk, REAL *dv, REAL *p, REAL *ds)                             \
    {                                                                                                                 \
        REAL scale = 1 / SQRT((REAL)a->e);                                                                            \
        for (int64_t i = 0; i < a->b; i++) {                                                                          \
            for (int64_t n = 0; n < a->h; n++) {                                                                      \
                int64_t nk = n * a->hk / a->h;                                                                        \
                for (int64_t j = 0; j < a->s; j++) {                                                                  \
                    int64_t jq = (i * a->s + j) * a->ldq + n * a->e, jo = (i * a->s + j) * a->ldo + n * a->e;         \
                    REAL top = -INFINITY, sum = 0, D = 0;                                                             \
                    for (int64_t l = 0; l <= j; l++) {                                                                \
                        p[l] = 0;                                                                                     \
                        for (int64_t x = 0; x < a->e; x++)                                                            \
                            p[l] += (REAL)q[jq + x] * (REAL)k[(i * a->s + l) * a->ldk + nk * a->e + x];               \
                        p[l] *= scale;                                                                                \
                        top = p[l] > top ? p[l] : top;                                                                \
                    }                                                                                                 \
                    for (int64_t l = 0; l <= j; l++) {                                                                \
                        p[l] = EXP(p[l] - top);                                                                       \
                        sum += p[l];                                                                                  \
                    }                                                                                                 \
                    lse[(i * a->h + n) * a->s + j] = top + LOG(sum);                                                  \
                    for (int64_t l = 0; l <= j; l++) {                                                                \
                        p[l] /= sum;                                                                                  \
                        for (int64_t x = 0; x < a->e; x++)                                                            \
                            o[jo + x] += IN(p[l]) * (REAL)v[(i * a->s + l) * a->ldv + nk * a->e + x];                 \
                    }                                                                                                 \
                    for (int64_t l = 0; l <= j; l++) {                                                                \
                        ds[l] = 0;                                                                                    \
                        for (int64_t x = 0; x < a->e; x++)                                                            \
                            ds[l] += (REAL)d_o[jo + x] * (REAL)v[(i * a->s + l) * a->ldv + nk * a->e + x];            \
                    }                                                                                                 \
                    for (int64_t x = 0; x < a->e; x++)                                                                \
                        D += (REAL)d_o[jo + x] * IN(o[jo + x]);                                                       \
                    for (int64_t l = 0; l <= j; l++) {                                                                \
                        int64_t lk = (i * a->s + l) * a->ldk + nk * a->e, lv = (i * a->s + l) * a->ldv + nk * a->e;   \
                        REAL g = IN(scale * p[l] * (ds[l] - D));                                                      \
                        for (int64_t x = 0; x < a->e; x++) {                                                          \
                            dq[jq + x] += g * (REAL)k[lk + x];                                                        \
                            dk[lk + x] += g * (REAL)q[jq + x];                                                        \
                            dv[lv + x] += IN(p[l]) * (REAL)d_o[jo + x];                                               \
                        }                                                                                             \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
#define AS_IT_IS(x) (x)
#define AS_BF16(x)  from_bf16(to_bf16(x))
DEFINE_PLAIN(real, plain_real, expl, logl, sqrtl, AS_IT_IS)
DEFINE_PLAIN(float, plain_float, expf, logf, sqrtf, AS_IT_IS)
DEFINE_PLAIN(float, plain_gpu, expf, logf, sqrtf, AS_BF16)

enum { O, LSE, DQ, DK, DV, OUTPUTS };
static const char *const names[OUTPUTS] = {"o", "lse", "dq", "dk", "dv"};

static void sizes_of(const struct attention *a, int64_t n[OUTPUTS])
{
    int64_t T = a->b * a->s;
    n[O] = T * a->ldo;
    n[LSE] = a->b * a->h * a->s;
    n[DQ] = T * a->ldq;
    n[DK] = T * a->ldk;
    n[DV] = T * a->ldv;
}

/* NaN where the kernel must write, zero in the gaps between rows (where it must not). */
static void *gapped(struct variant *v, int64_t rows, int64_t ld, int64_t used)
{
    double *x = host_values(v, rows * ld);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < used; j++)
            x[i * ld + j] = NAN;
    return device_values(v, rows * ld, x);
}

static void outputs(struct variant *v, const struct attention *a, void *out[OUTPUTS])
{
    int64_t T = a->b * a->s;
    out[O] = gapped(v, T, a->ldo, a->h * a->e);
    out[LSE] = stat_poison(v, a->b * a->h * a->s);
    out[DQ] = gapped(v, T, a->ldq, a->h * a->e);
    out[DK] = gapped(v, T, a->ldk, a->hk * a->e);
    out[DV] = gapped(v, T, a->ldv, a->hk * a->e);
}

static void run_both(struct variant *v, const struct attention *a, void *const in[4], void *out[OUTPUTS])
{
    const struct kernels *k = v->k;
    /* Exactly as large as asked for, and poisoned: the sanitizer sees a step too far. */
    size_t forward = k->attention_workspace(a, false), backward = k->attention_workspace(a, true);
    void *w1 = device_bytes(v, forward), *w2 = device_bytes(v, backward);
    poison(v, w1, forward);
    poison(v, w2, backward);
    k->attention_forward(v->ks, a, in[0], in[1], in[2], out[O], out[LSE], w1);
    k->attention_backward(v->ks, a, in[0], in[1], in[2], out[O], out[LSE], in[3], out[DQ], out[DK], out[DV], w2);
    must_sync(v);
}

/* Sets the first column of each head. */
static void first_columns(const struct attention *a, int64_t heads, int64_t ld, double to, double *x)
{
    for (int64_t i = 0; i < a->b * a->s; i++)
        for (int64_t n = 0; n < heads; n++)
            x[i * ld + n * a->e] = to;
}

/* The gradients of those columns are a sum that cancels, times a large number: they are finite, and count no further.
 */
static void check_first_columns(struct variant *v, const char *what, const struct attention *a, int64_t heads,
                                int64_t ld, const double *x)
{
    for (int64_t i = 0; i < a->b * a->s; i++)
        for (int64_t n = 0; n < heads; n++)
            if (!isfinite(x[i * ld + n * a->e]))
                fail_msg("%s: %s is not finite", v->label, what);
}

/* The error that the plain computation has, and what the backend's own arithmetic may add. */
static double limit_of(struct variant *v, const struct attention *a, int output, double spread, double plain_error)
{
    if (v->k->act == DTYPE_F64)
        return 1e-13;
    /* s = 1: dq and dk are exactly zero in real arithmetic, rounding of D in ours; where D comes from the
     * stored O, it is off by half a unit of bf16 of each of its e terms, all at most 1. */
    if (a->s == 1 && (output == DQ || output == DK))
        return v->gpu ? v->store / 2 * (double)a->e * spread : 8 * v->u * spread;
    /* By powers of two, as a GPU may do it, a score is first multiplied by log2 e and the sum's logarithm by
     * ln 2, and the device's exp2 and log2 are good to two units each: 6. Its matrix units cut each of the e terms of a
     * score off (they do not round) at 2u of the largest, u on average, all to the same side. */
    double units = v->gpu && output == LSE ? 6 + (double)a->e : 0;
    return 2 * plain_error + (2 + units) * v->u;
}

/* negative: every score is about -8192. */
static void try_attention(struct variant *v, const struct attention *shape, double spread, bool negative)
{
    struct attention a = *shape;
    int64_t n[OUTPUTS], T = a.b * a.s, s = a.s;
    sizes_of(&a, n);
    double *q = host_random(v, T * a.ldq, spread), *k = host_random(v, T * a.ldk, spread),
           *val = host_random(v, T * a.ldv, 1), *d_o = host_random(v, T * a.ldo, 1);
    if (negative) {
        double offset = round_bf16(sqrt(8192 * sqrt((double)a.e)));
        first_columns(&a, a.h, a.ldq, offset, q);
        first_columns(&a, a.hk, a.ldk, -offset, k);
    }
    real *want[OUTPUTS];
    float *plain[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) {
        want[i] = host_reals(v, n[i]);
        plain[i] = keep_host(v, (size_t)n[i] * sizeof(float));
    }
    plain_real(&a, q, k, val, d_o, want[O], want[LSE], want[DQ], want[DK], want[DV], host_reals(v, s),
               host_reals(v, s));
    (v->gpu ? plain_gpu : plain_float)(&a, q, k, val, d_o, plain[O], plain[LSE], plain[DQ], plain[DK], plain[DV],
                                       keep_host(v, (size_t)s * sizeof(float)),
                                       keep_host(v, (size_t)s * sizeof(float)));

    void *in[4] = {device_values(v, T * a.ldq, q), device_values(v, T * a.ldk, k), device_values(v, T * a.ldv, val),
                   device_values(v, T * a.ldo, d_o)};
    void *out[OUTPUTS], *again[OUTPUTS];
    outputs(v, &a, out);
    outputs(v, &a, again);
    run_both(v, &a, in, out);
    run_both(v, &a, in, again);
    for (int i = 0; i < OUTPUTS; i++) {
        double *rounded = host_values(v, n[i]), *got = fetch(v, out[i], n[i]);
        for (int64_t j = 0; j < n[i]; j++)
            rounded[j] = v->store > 0 && i != LSE ? round_bf16(plain[i][j]) : plain[i][j];
        if (negative && (i == DQ || i == DK)) {
            int64_t heads = i == DQ ? a.h : a.hk, ld = i == DQ ? a.ldq : a.ldk;
            check_first_columns(v, names[i], &a, heads, ld, got);
            first_columns(&a, heads, ld, 0, got);
            first_columns(&a, heads, ld, 0, rounded);
            for (int64_t j = 0; j < T * heads; j++)
                want[i][j / heads * ld + j % heads * a.e] = 0;
        }
        double limit = limit_of(v, &a, i, spread, frobenius_error(n[i], rounded, want[i]));
        double error = frobenius_error(n[i], got, want[i]);
        if (!(error <= limit))
            fail_msg("%s: %s differs by %.3g (relative Frobenius), limit %.3g", v->label, names[i], error, limit);
        if (!a.accumulate)
            check_same_bits(v, names[i], n[i], out[i], again[i]);
    }
    forget(v);
}

/* The backend's own kernel, where it has two, with gaps between rows that no vector fits. */
static void one_attention(struct variant *v, int64_t b, int64_t s, int64_t h, int64_t hk, int64_t e, double spread)
{
    struct attention a = {.b = b,
                          .s = s,
                          .h = h,
                          .hk = hk,
                          .e = e,
                          .ldq = h * e + 2,
                          .ldk = hk * e + 5,
                          .ldv = hk * e,
                          .ldo = h * e + 1,
                          .own = true};
    try_attention(v, &a, spread, false);
}

static void attentions(struct variant *v)
{
    one_attention(v, 1, 1, 1, 1, 2, 1);
    one_attention(v, 2, 7, 4, 2, 6, 1);
    one_attention(v, 3, 64, 2, 2, 8, 2);
    one_attention(v, 1, 65, 6, 2, 20, 1);
    one_attention(v, 2, 130, 4, 1, 32, 3);
    one_attention(v, 1, 257, 2, 1, 64, 1);
    one_attention(v, 1, 9, 2, 1, 17, 1); /* one column more than whole vectors */
}

static void test_attention(void **state)
{
    (void)state;
    each_variant(attentions);
}

/* ---- a library's attention, where a backend has one ------------------------------------- */

/* Rows of whole vectors; q, k and v as slices of one row. */
static struct attention packed(int64_t b, int64_t s, int64_t h, int64_t hk, int64_t e)
{
    int64_t ld = (h + 2 * hk) * e;
    return (struct attention){.b = b, .s = s, .h = h, .hk = hk, .e = e, .ldq = ld, .ldk = ld, .ldv = ld, .ldo = h * e};
}

/* False: this machine lacks the library, which is said. Any other fault of it is the test's. */
static bool library_checks(struct variant *v, const struct attention *a)
{
    struct error err;
    if (!v->k->attention_check)
        return true;
    size_t forward = v->k->attention_workspace(a, false), backward = v->k->attention_workspace(a, true);
    int rc = v->k->attention_check(v->ks, a, device_bytes(v, forward > backward ? forward : backward), &err);
    if (rc == ERR_NOT_FOUND)
        print_message("%s: attention of a library was not tested: %s\n", v->label, err.message);
    else if (rc)
        fail_msg("%s: %s", v->label, err.message);
    return rc == ERR_OK;
}

/* Both kernels, and the library's accumulating form. */
static void all_forms(struct variant *v, struct attention a, double spread, bool negative)
{
    a.own = true;
    try_attention(v, &a, spread, negative);
    a.own = false;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        a.accumulate = accumulate;
        if (library_checks(v, &a))
            try_attention(v, &a, spread, negative);
    }
}

static void small_forms(struct variant *v)
{
    all_forms(v, packed(2, 70, 4, 2, 64), 1, false);
}

static void larger_forms(struct variant *v)
{
    all_forms(v, packed(2, 256, 4, 4, 64), 1, false);
    all_forms(v, packed(1, 320, 8, 2, 64), 2, false);
    all_forms(v, packed(1, 200, 4, 2, 128), 1, false);
    all_forms(v, packed(2, 129, 2, 2, 64), 1, true);
    all_forms(v, packed(1, 192, 4, 1, 128), 1, true);
}

/* What the own kernel pads or takes in smaller tiles. */
static void odd_widths(struct variant *v)
{
    one_attention(v, 1, 100, 3, 1, 72, 1);
    one_attention(v, 2, 70, 2, 2, 200, 1);
    one_attention(v, 40, 5, 2, 2, 4, 1);
    struct attention a = packed(1, 100, 2, 1, 256);
    a.own = true;
    try_attention(v, &a, 1, false);
    try_attention(v, &a, 1, true);
}

static void test_forms(void **state)
{
    (void)state;
    each_variant(small_forms);
    cuda_variant(larger_forms);
    cuda_variant(odd_widths);
}

/* A shape that the library does not take is refused, by the check and as a fault of the stream. */
static void refusal(struct variant *v)
{
    struct error err;
    struct attention a = packed(1, 64, 2, 2, 64);
    a.ldq++;
    int rc = v->k->attention_check(v->ks, &a, NULL, &err);
    if (rc == ERR_NOT_FOUND)
        return;
    assert_int_equal(rc, ERR_UNSUPPORTED);
    void *x = device_poison(v, a.b * a.s * a.ldq), *lse = device_bytes(v, 1024);
    v->k->attention_forward(v->ks, &a, x, x, x, x, lse, x);
    assert_int_equal(v->k->stream_sync(v->ks, &err), ERR_UNSUPPORTED);
    assert_int_equal(v->k->stream_sync(v->ks, &err), ERR_OK);
}

static void test_refusal(void **state)
{
    (void)state;
    cuda_variant(refusal);
}

/* Captured and launched, the two passes give the bits of a plain call. */
static void captured(struct variant *v)
{
    struct attention a = packed(2, 200, 4, 2, 64);
    const struct kernels *k = v->k;
    for (int own = 0; own < 2; own++) {
        a.own = own;
        if (!own && !library_checks(v, &a))
            continue;
        int64_t n[OUTPUTS], T = a.b * a.s;
        sizes_of(&a, n);
        void *in[4] = {device_values(v, T * a.ldq, host_random(v, T * a.ldq, 1)),
                       device_values(v, T * a.ldk, host_random(v, T * a.ldk, 1)),
                       device_values(v, T * a.ldv, host_random(v, T * a.ldv, 1)),
                       device_values(v, T * a.ldo, host_random(v, T * a.ldo, 1))};
        void *out[OUTPUTS], *again[OUTPUTS], *w = device_bytes(v, k->attention_workspace(&a, true));
        outputs(v, &a, out);
        outputs(v, &a, again);
        run_both(v, &a, in, out);
        struct error err;
        struct kgraph *graph;
        assert_int_equal(k->capture_begin(v->ks, &err), ERR_OK);
        k->attention_forward(v->ks, &a, in[0], in[1], in[2], again[O], again[LSE], w);
        k->attention_backward(v->ks, &a, in[0], in[1], in[2], again[O], again[LSE], in[3], again[DQ], again[DK],
                              again[DV], w);
        if (k->capture_end(v->ks, &graph, &err))
            fail_msg("%s: %s", v->label, err.message);
        k->graph_launch(v->ks, graph);
        k->graph_launch(v->ks, graph);
        must_sync(v);
        k->graph_destroy(graph);
        for (int i = 0; i < OUTPUTS; i++)
            check_same_bits(v, names[i], n[i], out[i], again[i]);
        forget(v);
    }
}

static void test_captured(void **state)
{
    (void)state;
    cuda_variant(captured);
}

/* Scores of a sequence are 1 GiB in the library's backward, so that a batch of four goes through in two slices; that is
 * too much for a reference on the host, so the own kernel stands for it (which the tests above hold to one). Each
 * rounds P, dS and the result once: at most 2^-8 each, 6 * 2^-8 together. */
static void slices(struct variant *v)
{
    struct attention a = packed(4, 16384, 2, 2, 64);
    int64_t n[OUTPUTS], T = a.b * a.s;
    a.ldq = a.ldk = a.ldv = a.h * a.e;
    sizes_of(&a, n);
    if (!library_checks(v, &a))
        return;
    void *in[4] = {device_values(v, T * a.ldq, host_random(v, T * a.ldq, 1)),
                   device_values(v, T * a.ldk, host_random(v, T * a.ldk, 1)),
                   device_values(v, T * a.ldv, host_random(v, T * a.ldv, 1)),
                   device_values(v, T * a.ldo, host_random(v, T * a.ldo, 1))};
    void *out[3][OUTPUTS], *w = device_bytes(v, v->k->attention_workspace(&a, true));
    for (int run = 0; run < 3; run++) {
        a.own = run == 2;
        outputs(v, &a, out[run]);
        v->k->attention_forward(v->ks, &a, in[0], in[1], in[2], out[run][O], out[run][LSE], w);
        v->k->attention_backward(v->ks, &a, in[0], in[1], in[2], out[run][O], out[run][LSE], in[3], out[run][DQ],
                                 out[run][DK], out[run][DV], w);
        must_sync(v);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        double *own = fetch(v, out[2][i], n[i]);
        real *want = host_reals(v, n[i]);
        for (int64_t j = 0; j < n[i]; j++)
            want[j] = own[j];
        check_frobenius(v, names[i], n[i], out[0][i], want, i == LSE ? 1e-5 : 6 * 0x1p-8);
        check_same_bits(v, names[i], n[i], out[0][i], out[1][i]);
    }
    forget(v);
}

static void test_slices(void **state)
{
    (void)state;
    if (getenv("BOOST_TEST_SANITIZED")) /* an hour under racecheck, and no kernel that the others do not launch */
        skip();
    cuda_variant(slices);
}

/* More tasks than the kernel has tiles for. */
static void many(struct variant *v)
{
    one_attention(v, 40, 5, 2, 2, 4, 1);
}

static void test_many_heads(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp32(), NULL, 4, many);
}

/* ---- backward against differences -------------------------------------------------------- */

struct problem {
    struct variant *v;
    struct attention a;
    double *q, *k, *val, *weight;
    void *dev[3], *o, *lse, *workspace;
};

static double loss(void *arg)
{
    struct problem *p = arg;
    int64_t T = p->a.b * p->a.s, n = T * p->a.ldo;
    put(p->v, p->dev[0], T * p->a.ldq, p->q);
    put(p->v, p->dev[1], T * p->a.ldk, p->k);
    put(p->v, p->dev[2], T * p->a.ldv, p->val);
    p->v->k->attention_forward(p->v->ks, &p->a, p->dev[0], p->dev[1], p->dev[2], p->o, p->lse, p->workspace);
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += p->weight[i] * ((double *)p->o)[i];
    return sum;
}

static void differences(struct variant *v)
{
    struct problem p = {.v = v,
                        .a = {.b = 2, .s = 6, .h = 4, .hk = 2, .e = 4, .ldq = 16, .ldk = 8, .ldv = 8, .ldo = 16}};
    int64_t T = 12;
    p.q = host_random(v, T * 16, 1);
    p.k = host_random(v, T * 8, 1);
    p.val = host_random(v, T * 8, 1);
    p.weight = host_random(v, T * 16, 1);
    p.dev[0] = device_poison(v, T * 16);
    p.dev[1] = device_poison(v, T * 8);
    p.dev[2] = device_poison(v, T * 8);
    p.o = device_poison(v, T * 16);
    p.lse = device_poison(v, 2 * 4 * 6);
    p.workspace = device_bytes(v, v->k->attention_workspace(&p.a, true));
    void *dq = device_poison(v, T * 16), *dk = device_poison(v, T * 8), *dv = device_poison(v, T * 8);
    loss(&p);
    v->k->attention_backward(v->ks, &p.a, p.dev[0], p.dev[1], p.dev[2], p.o, p.lse, device_values(v, T * 16, p.weight),
                             dq, dk, dv, p.workspace);
    check_differences(v, "q", T * 16, p.q, fetch(v, dq, T * 16), loss, &p);
    check_differences(v, "k", T * 8, p.k, fetch(v, dk, T * 8), loss, &p);
    check_differences(v, "v", T * 8, p.val, fetch(v, dv, T * 8), loss, &p);
}

static void test_differences(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp64(), NULL, 1, differences);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope),       cmocka_unit_test(test_attention),   cmocka_unit_test(test_forms),
        cmocka_unit_test(test_refusal),    cmocka_unit_test(test_captured),    cmocka_unit_test(test_slices),
        cmocka_unit_test(test_many_heads), cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
