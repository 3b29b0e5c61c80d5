/* rope and causal attention against the formulas in long double, and the backward against central differences.
 * fp32 and bf16 attention are held to FlashAttention's rule: at most twice the error of the same computation done
 * plainly in float, and stored in the backend's type. */
#include "check.h"

/* ---- rope --------------------------------------------------------------------------- */

static void one_rope(struct variant *v, int64_t T, int64_t s, int64_t heads, int64_t e, bool inverse)
{
    int64_t ld = heads * e + 3, n = T * ld, half = e / 2;
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
    one_rope(v, 1, 1, 1, 2, false);
    one_rope(v, 12, 4, 3, 6, false);
    one_rope(v, 600, 300, 2, 32, true); /* another table, then the first again */
    one_rope(v, 12, 4, 3, 6, true);
    one_rope(v, 130, 65, 4, 40, false);
    one_rope(v, 400, 400, 5, 80, false);
}

static void test_rope(void **state)
{
    (void)state;
    each_variant(ropes);
}

/* ---- attention ------------------------------------------------------------------------ */

/* The formulas, generated for long double (the reference), float (the plain computation that sets fp32's limit), and
 * float where what enters a product is first rounded to bf16: P, dS, and the O that D = <dO, O> is taken from (a GPU's
 * plain computation: its matrix units take bf16 and add in fp32). Outputs dense over [rows, ld]; the gap between rows is left at zero. */
#define DEFINE_PLAIN(REAL, NAME, EXP, LOG, SQRT, IN)                                                                     \
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
                            o[jo + x] += IN(p[l]) * (REAL)v[(i * a->s + l) * a->ldv + nk * a->e + x];                     \
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
#define AS_BF16(x) from_bf16(to_bf16(x))
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

static void one_attention(struct variant *v, int64_t b, int64_t s, int64_t h, int64_t hk, int64_t e, double spread)
{
    struct attention a = {
        .b = b, .s = s, .h = h, .hk = hk, .e = e, .ldq = h * e + 2, .ldk = hk * e + 5, .ldv = hk * e, .ldo = h * e + 1};
    int64_t n[OUTPUTS], T = b * s;
    sizes_of(&a, n);
    double *q = host_random(v, T * a.ldq, spread), *k = host_random(v, T * a.ldk, spread),
           *val = host_random(v, T * a.ldv, 1), *d_o = host_random(v, T * a.ldo, 1);
    real *want[OUTPUTS];
    float *plain[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) {
        want[i] = host_reals(v, n[i]);
        plain[i] = keep_host(v, (size_t)n[i] * sizeof(float));
    }
    plain_real(&a, q, k, val, d_o, want[O], want[LSE], want[DQ], want[DK], want[DV], host_reals(v, s),
               host_reals(v, s));
    (v->gpu ? plain_gpu : plain_float)(&a, q, k, val, d_o, plain[O], plain[LSE], plain[DQ], plain[DK], plain[DV],
                keep_host(v, (size_t)s * sizeof(float)), keep_host(v, (size_t)s * sizeof(float)));

    void *in[4] = {device_values(v, T * a.ldq, q), device_values(v, T * a.ldk, k), device_values(v, T * a.ldv, val),
                   device_values(v, T * a.ldo, d_o)};
    void *out[OUTPUTS], *again[OUTPUTS];
    outputs(v, &a, out);
    outputs(v, &a, again);
    run_both(v, &a, in, out);
    run_both(v, &a, in, again);
    for (int i = 0; i < OUTPUTS; i++) {
        double limit = 1e-13;
        if (v->k->act != DTYPE_F64) {
            double *rounded = host_values(v, n[i]);
            for (int64_t j = 0; j < n[i]; j++)
                rounded[j] = v->store > 0 && i != LSE ? round_bf16(plain[i][j]) : plain[i][j];
            limit = 2 * frobenius_error(n[i], rounded, want[i]) + 2 * v->u;
            /* By powers of two, as a GPU does it, a score is first multiplied by log2 e and the sum's logarithm by
             * ln 2, and the device's exp2 and log2 are good to two units each. */
            if (v->gpu && i == LSE)
                limit += 6 * v->u;
            /* s = 1: dq and dk are exactly zero in real arithmetic, rounding of D in ours; where D comes from the
             * stored O, it is off by half a unit of bf16 of each of its e terms, all at most 1. */
            if (s == 1 && (i == DQ || i == DK))
                limit = v->gpu ? v->store / 2 * (double)e * spread : 8 * v->u * spread;
        }
        check_frobenius(v, names[i], n[i], out[i], want[i], limit);
        check_same_bits(v, names[i], n[i], out[i], again[i]);
    }
    forget(v);
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
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_many_heads),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
