/* fp64.h: rotary positions and causal attention. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/fp64.h"

void fp64_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x)
{
    (void)ks;
    int64_t half = e / 2;
    for (int64_t i = 0; i < T; i++) {
        for (int64_t j = 0; j < half; j++) {
            double angle = (double)(i % s) * pow(theta, -2.0 * (double)j / (double)e);
            double co = cos(angle), si = inverse ? -sin(angle) : sin(angle);
            for (int64_t n = 0; n < heads; n++) {
                double *first = (double *)x + i * ld + n * e + j, *second = first + half;
                double a = *first, b = *second;
                *first = a * co - b * si;
                *second = b * co + a * si;
            }
        }
    }
}

static double dot(int64_t n, const double *a, const double *b)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void add_scaled(int64_t n, double factor, const double *x, double *y)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += factor * x[i];
}

/* Offsets of (sequence i, token j, head n) in q and o, and of the key-value head that n reads in k and v. */
static int64_t at(const struct attention *a, int64_t ld, int64_t i, int64_t j, int64_t n)
{
    return (i * a->s + j) * ld + n * a->e;
}

static int64_t kv_head(const struct attention *a, int64_t n)
{
    return n / (a->h / a->hk);
}

size_t fp64_attention_workspace(const struct attention *a, bool backward)
{
    (void)backward;
    return (size_t)a->s * sizeof(double); /* one row of scores */
}

void fp64_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace)
{
    (void)ks;
    double scale = 1 / sqrt((double)a->e), *score = workspace;
    for (int64_t i = 0; i < a->b; i++) {
        for (int64_t n = 0; n < a->h; n++) {
            int64_t nk = kv_head(a, n);
            for (int64_t j = 0; j < a->s; j++) {
                double top = -INFINITY, sum = 0;
                for (int64_t l = 0; l <= j; l++) {
                    score[l] = scale * dot(a->e, (const double *)q + at(a, a->ldq, i, j, n),
                                           (const double *)k + at(a, a->ldk, i, l, nk));
                    top = fmax(top, score[l]);
                }
                for (int64_t l = 0; l <= j; l++)
                    sum += exp(score[l] - top);
                /* cppcheck-suppress invalidFunctionArg ; l = 0 is always seen, so the sum is at least 1 */
                double row_lse = top + log(sum);
                ((double *)lse)[(i * a->h + n) * a->s + j] = row_lse;

                double *out = (double *)o + at(a, a->ldo, i, j, n);
                memset(out, 0, (size_t)a->e * sizeof *out);
                for (int64_t l = 0; l <= j; l++)
                    add_scaled(a->e, exp(score[l] - row_lse), (const double *)v + at(a, a->ldv, i, l, nk), out);
            }
        }
    }
}

static void zero_heads(const struct attention *a, int64_t heads, int64_t ld, double *x)
{
    for (int64_t row = 0; row < a->b * a->s; row++)
        memset(x + row * ld, 0, (size_t)(heads * a->e) * sizeof *x);
}

/* With p = softmax row, dp_l = <do, v_l>, D = <do, o> = sum_l p_l dp_l:
 * ds_l = p_l (dp_l - D);  dq = scale sum_l ds_l k_l;  dk_l += scale ds_l q;  dv_l += p_l do. */
void fp64_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace)
{
    (void)ks;
    (void)workspace;
    double scale = 1 / sqrt((double)a->e);
    zero_heads(a, a->h, a->ldq, dq);
    zero_heads(a, a->hk, a->ldk, dk);
    zero_heads(a, a->hk, a->ldv, dv);
    for (int64_t i = 0; i < a->b; i++) {
        for (int64_t n = 0; n < a->h; n++) {
            int64_t nk = kv_head(a, n);
            for (int64_t j = 0; j < a->s; j++) {
                int64_t at_q = at(a, a->ldq, i, j, n), at_o = at(a, a->ldo, i, j, n);
                const double *row_do = (const double *)d_o + at_o;
                double row_lse = ((const double *)lse)[(i * a->h + n) * a->s + j];
                double D = dot(a->e, row_do, (const double *)o + at_o);
                for (int64_t l = 0; l <= j; l++) {
                    int64_t at_k = at(a, a->ldk, i, l, nk), at_v = at(a, a->ldv, i, l, nk);
                    double p = exp(scale * dot(a->e, (const double *)q + at_q, (const double *)k + at_k) - row_lse);
                    double ds = p * (dot(a->e, row_do, (const double *)v + at_v) - D);
                    add_scaled(a->e, scale * ds, (const double *)k + at_k, (double *)dq + at_q);
                    add_scaled(a->e, scale * ds, (const double *)q + at_q, (double *)dk + at_k);
                    add_scaled(a->e, p, row_do, (double *)dv + at_v);
                }
            }
        }
    }
}
