/* residual_gain, norm_apply, gain_backward, norm_forward, norm_backward, latent_forward, latent_backward, norm_k
 * against their formulas, and the whole online norm on one and two shards against central differences. */
#include "check.h"

static const struct {
    int64_t T, w;
} shapes[] = {{1, 1}, {1, 40}, {7, 13}, {65, 64}, {300, 96}, {129, 130}, {1370, 96}, {37, 520}, {9, 2056}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static real sigma(real y)
{
    return 1 / (1 + expl(-y));
}

/* ---- residual_gain ------------------------------------------------------------------- */

static void one_residual(struct variant *v, int64_t T, int64_t w, bool with_y, bool with_n, bool in_place)
{
    int64_t n = T * w;
    double *x = host_random(v, n, 2), *y = host_random(v, n, 2), *gain = host_random(v, w, 1.5);
    void *dx = device_values(v, n, x), *dy = with_y ? device_values(v, n, y) : NULL, *dg = device_values(v, w, gain);
    void *out = in_place ? dx : device_poison(v, n), *dn = with_n ? device_poison(v, n) : NULL, *S = stat_poison(v, T);
    v->k->residual_gain(v->ks, T, w, dx, dy, with_n ? dg : NULL, out, dn, S);

    real *want = host_reals(v, n), *product = host_reals(v, n), *sum = host_reals(v, T);
    for (int64_t i = 0; i < n; i++)
        want[i] = with_y ? (real)x[i] + (real)y[i] : (real)x[i];
    check(v, "x_out", n, out, want, NULL, 1);
    /* S and n are of the stored values. */
    double *stored = fetch(v, out, n);
    for (int64_t i = 0; i < n; i++) {
        product[i] = (real)stored[i] * gain[i % w];
        sum[i / w] += (real)stored[i] * stored[i];
    }
    check(v, "S", T, S, sum, NULL, sum_roundings(w));
    if (with_n)
        check(v, "n", n, dn, product, NULL, 1);
    forget(v);
}

static void residuals(struct variant *v)
{
    for (int i = 0; i < SHAPES; i++)
        for (int mode = 0; mode < 8; mode++)
            one_residual(v, shapes[i].T, shapes[i].w, mode & 1, mode & 2, mode & 4);
}

static void test_residual_gain(void **state)
{
    (void)state;
    each_variant(residuals);
}

/* ---- norm_apply and norm_k -------------------------------------------------------------- */

static void norms(struct variant *v)
{
    for (int i = 0; i < SHAPES; i++) {
        int64_t T = shapes[i].T, w = shapes[i].w, n = T * w, d = 2 * w;
        double eps = 1e-3;
        double *x = host_random(v, n, 2), *gain = host_random(v, w, 1.5), *S = host_random(v, T, 20),
               *c = host_random(v, T, 3);
        real *R = host_reals(v, T), *want = host_reals(v, n), *k = host_reals(v, T);
        for (int64_t t = 0; t < T; t++) {
            S[t] = t == 3 ? 0 : fabs(S[t]); /* a row of zeros: eps alone */
            R[t] = 1 / sqrtl((real)S[t] / d + (real)eps);
        }
        for (int64_t j = 0; j < n; j++)
            want[j] = R[j / w] * x[j] * gain[j % w];
        void *dR = stat_poison(v, T), *out = device_poison(v, n), *dS = stat_values(v, T, S),
             *dc = stat_values(v, T, c);
        v->k->norm_apply(v->ks, T, w, d, eps, device_values(v, n, x), device_values(v, w, gain), dS, dR, out);
        check(v, "R", T, dR, R, NULL, 5);
        check(v, "n", n, out, want, NULL, 8);
        /* R in S's place, and R given: the same bits. */
        void *again = device_poison(v, n), *given = device_poison(v, n), *in_place = stat_values(v, T, S);
        void *same_x = device_values(v, n, x), *same_gain = device_values(v, w, gain);
        v->k->norm_apply(v->ks, T, w, d, eps, same_x, same_gain, in_place, in_place, again);
        v->k->norm_apply(v->ks, T, w, d, eps, same_x, same_gain, NULL, in_place, given);
        check_same_bits(v, "R", T, dR, in_place);
        check_same_bits(v, "n", n, out, again);
        check_same_bits(v, "n", n, out, given);

        double *stored = fetch(v, dR, T);
        for (int64_t t = 0; t < T; t++)
            k[t] = (real)stored[t] * stored[t] / d * c[t];
        v->k->norm_k(v->ks, T, d, dR, dc, dc); /* k may alias c */
        check(v, "k", T, dc, k, NULL, 5);
        forget(v);
    }
}

static void test_norm_apply(void **state)
{
    (void)state;
    each_variant(norms);
}

/* ---- row_dot ------------------------------------------------------------------------------ */

static void row_dots(struct variant *v)
{
    for (int i = 0; i < SHAPES; i++) {
        int64_t T = shapes[i].T, w = shapes[i].w, n = T * w;
        double *a = host_random(v, n, 2), *b = host_random(v, n, 2);
        real *want = host_reals(v, T), *size = host_reals(v, T);
        for (int64_t j = 0; j < n; j++) {
            want[j / w] += (real)a[j] * b[j];
            size[j / w] += fabsl((real)a[j] * b[j]);
        }
        void *out = stat_poison(v, T);
        v->k->row_dot(v->ks, T, w, device_values(v, n, a), device_values(v, n, b), out);
        check(v, "dot", T, out, want, size, sum_roundings(w));
        forget(v);
    }
}

static void test_row_dot(void **state)
{
    (void)state;
    each_variant(row_dots);
}

/* ---- gain_backward ------------------------------------------------------------------------ */

static void one_gain_backward(struct variant *v, int64_t T, int64_t w, bool with_R, bool accumulate)
{
    int64_t n = T * w;
    double *x = host_random(v, n, 2), *gain = host_random(v, w, 1.5), *R = host_random(v, T, 1),
           *k = host_random(v, T, 1);
    double *dn = host_random(v, n, 1), *dx = host_random(v, n, 1), *dgain = host_random(v, w, 1);
    real *want = host_reals(v, n), *size = host_reals(v, n), *want_g = host_reals(v, w), *size_g = host_reals(v, w);
    for (int64_t j = 0; j < w; j++)
        size_g[j] = fabsl(want_g[j] = dgain[j]);
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i / w, j = i % w;
        real u = (with_R ? (real)R[t] : 1) * dn[i];
        want[i] = u * gain[j] - (real)k[t] * x[i] + (accumulate ? (real)dx[i] : 0);
        size[i] = fabsl(u * gain[j]) + fabsl((real)k[t] * x[i]) + (accumulate ? fabsl(dx[i]) : 0);
        want_g[j] += x[i] * u;
        size_g[j] += fabsl(x[i] * u);
    }
    void *a[5] = {device_values(v, n, x), device_values(v, w, gain), with_R ? stat_values(v, T, R) : NULL,
                  stat_values(v, T, k), device_values(v, n, dn)};
    void *out[2], *out_g[2];
    for (int r = 0; r < 2; r++) {
        out[r] = accumulate ? device_values(v, n, dx) : device_poison(v, n);
        out_g[r] = grad_values(v, w, dgain);
        v->k->gain_backward(v->ks, T, w, a[0], a[1], a[2], a[3], a[4], accumulate, out[r], out_g[r]);
    }
    check(v, "dx", n, out[0], want, size, 5);
    check(v, "dgain", w, out_g[0], want_g, size_g, sum_roundings(T));
    check_same_bits(v, "dx", n, out[0], out[1]);
    check_same_bits(v, "dgain", w, out_g[0], out_g[1]);
    forget(v);
}

static void gain_backwards(struct variant *v)
{
    for (int i = 0; i < SHAPES; i++)
        for (int mode = 0; mode < 4; mode++)
            one_gain_backward(v, shapes[i].T, shapes[i].w, mode & 1, mode & 2);
}

static void test_gain_backward(void **state)
{
    (void)state;
    each_variant(gain_backwards);
}

/* ---- norm_forward and norm_backward --------------------------------------------------------- */

static void one_rows_forward(struct variant *v, int64_t T, int64_t d, bool with_y, bool in_place)
{
    int64_t n = T * d;
    double eps = 1e-3, *x = host_random(v, n, 2), *y = host_random(v, n, 2), *gain = host_random(v, d, 1.5);
    for (int64_t j = 0; j < d && T > 3; j++)
        x[3 * d + j] = y[3 * d + j] = 0; /* eps alone */
    void *dx = device_values(v, n, x), *dy = with_y ? device_values(v, n, y) : NULL, *dg = device_values(v, d, gain);
    void *out = in_place ? dx : device_poison(v, n), *dn = device_poison(v, n), *dR = stat_poison(v, T);
    v->k->norm_forward(v->ks, T, d, eps, dx, dy, dg, out, dR, dn);

    real *sum = host_reals(v, n), *S = host_reals(v, T), *R = host_reals(v, T), *want = host_reals(v, n);
    for (int64_t i = 0; i < n; i++)
        sum[i] = with_y ? (real)x[i] + (real)y[i] : (real)x[i];
    check(v, "x_out", n, out, sum, NULL, 1);
    /* R and n are of the stored values. */
    double *stored = fetch(v, out, n), *r = fetch(v, dR, T);
    for (int64_t i = 0; i < n; i++) {
        S[i / d] += (real)stored[i] * stored[i];
        want[i] = (real)r[i / d] * stored[i] * gain[i % d];
    }
    for (int64_t t = 0; t < T; t++)
        R[t] = 1 / sqrtl(S[t] / d + (real)eps);
    check(v, "R", T, dR, R, NULL, sum_roundings(d) + 5);
    check(v, "n", n, dn, want, NULL, 3);
    void *remade = device_poison(v, n);
    v->k->norm_apply(v->ks, T, d, d, eps, out, dg, NULL, dR, remade);
    check_same_bits(v, "n", n, dn, remade);
    forget(v);
}

static void one_rows_backward(struct variant *v, int64_t T, int64_t d)
{
    int64_t n = T * d;
    double *x = host_random(v, n, 2), *gain = host_random(v, d, 1.5), *R = host_random(v, T, 1);
    double *dn = host_random(v, n, 1), *dx = host_random(v, n, 1), *dgain = host_random(v, d, 1);
    real *want = host_reals(v, n), *size = host_reals(v, n), *want_g = host_reals(v, d), *size_g = host_reals(v, d);
    real *want_k = host_reals(v, T), *size_k = host_reals(v, T);
    void *a[4] = {device_values(v, n, x), device_values(v, d, gain), stat_values(v, T, R), device_values(v, n, dn)};
    void *out[2], *k[2], *out_g[2];
    for (int r = 0; r < 2; r++) {
        out[r] = device_values(v, n, dx);
        k[r] = stat_poison(v, T);
        out_g[r] = grad_values(v, d, dgain);
        v->k->norm_backward(v->ks, T, d, a[0], a[1], a[2], a[3], out[r], k[r], out_g[r]);
    }
    for (int64_t i = 0; i < n; i++) {
        real part = (real)R[i / d] * R[i / d] / d * R[i / d] * dn[i] * x[i] * gain[i % d];
        want_k[i / d] += part;
        size_k[i / d] += fabsl(part);
    }
    check(v, "k", T, k[0], want_k, size_k, sum_roundings(d) + 6);
    double *stored = fetch(v, k[0], T);
    for (int64_t j = 0; j < d; j++)
        size_g[j] = fabsl(want_g[j] = dgain[j]);
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i / d, j = i % d;
        real u = (real)R[t] * dn[i];
        want[i] = u * gain[j] - (real)stored[t] * x[i] + (real)dx[i];
        size[i] = fabsl(u * gain[j]) + fabsl((real)stored[t] * x[i]) + fabsl(dx[i]);
        want_g[j] += x[i] * u;
        size_g[j] += fabsl(x[i] * u);
    }
    check(v, "dx", n, out[0], want, size, 5);
    check(v, "dgain", d, out_g[0], want_g, size_g, sum_roundings(T));
    check_same_bits(v, "dx", n, out[0], out[1]);
    check_same_bits(v, "k", T, k[0], k[1]);
    check_same_bits(v, "dgain", d, out_g[0], out_g[1]);
    forget(v);
}

/* Beside the small ones those on either side of what a block of a GPU holds, in vectors and one by one. */
static void whole_rows(struct variant *v)
{
    static const struct {
        int64_t T, d;
    } wide[] = {{600, 2056}, {5, 4104}, {5, 8192}, {6, 8200}, {9, 700}, {9, 1001}, {9, 1025}};
    for (int i = 0; i < SHAPES; i++) {
        for (int mode = 0; mode < 4; mode++)
            one_rows_forward(v, shapes[i].T, shapes[i].w, mode & 1, mode & 2);
        one_rows_backward(v, shapes[i].T, shapes[i].w);
    }
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        one_rows_forward(v, wide[i].T, wide[i].d, true, i % 2);
        one_rows_backward(v, wide[i].T, wide[i].d);
    }
}

static void test_whole_rows(void **state)
{
    (void)state;
    each_variant(whole_rows);
}

/* ---- the bottleneck -------------------------------------------------------------------------- */

static void one_latent(struct variant *v, int64_t T, int64_t n, bool silu, bool norm, bool in_place)
{
    enum latent_act act = silu ? LATENT_SILU : LATENT_IDENTITY;
    int64_t all = T * n, d = 4 * n;
    double eps = 1e-5, *H = host_random(v, all, 6), *S = host_random(v, T, 8), *dz = host_random(v, all, 1);
    real *R = host_reals(v, T), *Y = host_reals(v, all), *z = host_reals(v, all), *size = host_reals(v, all);
    for (int64_t t = 0; t < T; t++) {
        S[t] = fabs(S[t]);
        R[t] = norm ? 1 / sqrtl((real)S[t] / d + (real)eps) : 1;
    }
    for (int64_t i = 0; i < all; i++)
        Y[i] = R[i / n] * H[i];
    void *dH = device_values(v, all, H), *dS = norm ? stat_values(v, T, S) : NULL,
         *dR = norm ? stat_poison(v, T) : NULL;
    void *out = in_place ? device_values(v, all, H) : device_poison(v, all), *dY = device_poison(v, all);
    v->k->latent_forward(v->ks, T, n, d, eps, act, in_place ? out : dH, dS, dR, out);
    check_same_bits(v, "H", all, dH, device_values(v, all, H));
    v->k->latent_forward(v->ks, T, n, d, eps, LATENT_IDENTITY, dH, NULL, dR, dY);
    check(v, "Y", all, dY, Y, NULL, norm ? 6 : 0.5);
    /* z, and later the backward, are of Y as it would be stored. */
    double *y = fetch(v, dY, all);
    for (int64_t i = 0; i < all; i++) {
        z[i] = silu ? y[i] * sigma(y[i]) : y[i];
        size[i] = fabsl(z[i]) * (1 + fabs(y[i])); /* the exponential passes on the absolute error of its argument */
    }
    check(v, "z", all, out, z, size, 16);
    if (norm)
        check(v, "R", T, dR, R, NULL, 5);

    if (norm) {
        void *z_again = device_poison(v, all), *z_given = device_poison(v, all), *dSR = stat_values(v, T, S);
        v->k->latent_forward(v->ks, T, n, d, eps, act, dH, dSR, dSR, z_again);
        check_same_bits(v, "R", T, dR, dSR);
        check_same_bits(v, "z", all, out, z_again);
        v->k->latent_forward(v->ks, T, n, d, eps, act, dH, NULL, dSR, z_given);
        check_same_bits(v, "z", all, out, z_given);
    }

    double *r = norm ? fetch(v, dR, T) : NULL;
    real *want = host_reals(v, all), *k = host_reals(v, T), *size_k = host_reals(v, T);
    for (int64_t i = 0; i < all; i++) {
        real sig = sigma(y[i]), ri = norm ? (real)r[i / n] : 1;
        real slope = silu ? sig + y[i] * sig * (1 - sig) : 1;
        real dy = dz[i] * slope;
        want[i] = ri * dy;
        size[i] = fabsl(ri * dz[i]) * (silu ? sig * (1 + fabsl(y[i])) * (1 + fabsl(y[i])) : 1);
        k[i / n] += ri * ri / d * dy * y[i];
        size_k[i / n] += ri / d * size[i] * fabsl(y[i]);
    }
    void *ddz = device_values(v, all, dz), *dk = norm ? stat_poison(v, T) : NULL;
    v->k->latent_backward(v->ks, T, n, d, act, silu ? dH : dY, dR, ddz, dk);
    check(v, "dH", all, ddz, want, size, 12);
    if (norm)
        check(v, "k", T, dk, k, size_k, sum_roundings(n) + 12);
    forget(v);
}

static void latents(struct variant *v)
{
    for (int i = 0; i < SHAPES; i++)
        for (int mode = 0; mode < 4; mode++)
            one_latent(v, shapes[i].T, shapes[i].w, mode & 1, mode & 2, false);
    one_latent(v, 9, 21, false, true, true);
}

static void test_latent(void **state)
{
    (void)state;
    each_variant(latents);
}

/* SiLU far out: no overflow into NaN, and the right limits. */
static void extremes(struct variant *v)
{
    double H[8] = {-1e4, -200, -89, -30, 0, 89, 200, 1e4};
    void *dH = device_values(v, 8, H), *z = device_poison(v, 8);
    v->k->latent_forward(v->ks, 1, 8, 8, 0, LATENT_SILU, dH, NULL, NULL, z);
    double *got = fetch(v, z, 8), *stored = fetch(v, dH, 8);
    for (int i = 0; i < 8; i++) {
        double want = stored[i] / (1 + exp(-stored[i]));
        assert_true(fabs(got[i] - want) <= (1e-6 + v->store) * fabs(want) + 1e-35);
    }
    double ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    void *dz = device_values(v, 8, ones);
    v->k->latent_backward(v->ks, 1, 8, 8, LATENT_SILU, dH, NULL, dz, NULL);
    got = fetch(v, dz, 8);
    for (int i = 0; i < 8; i++) {
        double limit = H[i] < 0 ? 0 : H[i] > 0 ? 1 : 0.5;
        assert_true(fabs(got[i] - limit) < 1e-10);
    }
}

static void test_extremes(void **state)
{
    (void)state;
    each_variant(extremes);
}

/* ---- the online norm as a whole, on 1 and 2 shards ---------------------------------------------- */

enum { ROWS = 5, LATENT = 3, WIDTH = 4, MAX_SHARDS = 2 };
struct layer {
    struct variant *v;
    int shards;
    bool online; /* else the plain norm, whose output is n itself */
    double *x[MAX_SHARDS], *gain[MAX_SHARDS], *A[MAX_SHARDS], *weight[MAX_SHARDS]; /* weight: of the loss */
    double *zw;
    /* device */
    void *dx[MAX_SHARDS], *dg[MAX_SHARDS], *n[MAX_SHARDS], *dA[MAX_SHARDS], *R, *Y, *z;
};

static int64_t global_width(const struct layer *l)
{
    return (int64_t)WIDTH * l->shards;
}

/* Device to host and back, added: what an all-reduce does. */
static void add_into(struct variant *v, double *sum, const void *part, int64_t n)
{
    double *p = fetch(v, part, n);
    for (int64_t i = 0; i < n; i++)
        sum[i] += p[i];
}

static double layer_loss(void *arg)
{
    struct layer *l = arg;
    struct variant *v = l->v;
    int hosts = v->hosts, devices = v->devices;
    const double eps = 1e-3;
    double *S = host_values(v, ROWS), *H = host_values(v, ROWS * LATENT), loss = 0;
    for (int i = 0; i < l->shards; i++) {
        void *x = device_values(v, ROWS * WIDTH, l->x[i]), *gain = device_values(v, WIDTH, l->gain[i]);
        void *part_S = device_poison(v, ROWS), *part_H = device_poison(v, ROWS * LATENT);
        v->k->residual_gain(v->ks, ROWS, WIDTH, x, NULL, gain, l->dx[i], l->n[i], part_S);
        v->k->cast(v->ks, DTYPE_F64, l->dg[i], DTYPE_F64, gain, WIDTH);
        struct gemm g = {
            .m = ROWS, .n = LATENT, .k = WIDTH, .trans_b = true, .lda = WIDTH, .ldb = WIDTH, .ldc = LATENT, .batch = 1};
        v->k->gemm(v->ks, &g, l->n[i], l->dA[i], part_H);
        add_into(v, S, part_S, ROWS);
        add_into(v, H, part_H, ROWS * LATENT);
    }
    void *dS = device_values(v, ROWS, S);
    if (l->online) {
        put(v, l->Y, ROWS * LATENT, H);
        v->k->latent_forward(v->ks, ROWS, LATENT, global_width(l), eps, LATENT_SILU, l->Y, dS, l->R, l->z);
        double *z = fetch(v, l->z, ROWS * LATENT);
        for (int i = 0; i < ROWS * LATENT; i++)
            loss += l->zw[i] * z[i];
    } else {
        for (int i = 0; i < l->shards; i++) {
            v->k->norm_apply(v->ks, ROWS, WIDTH, global_width(l), eps, l->dx[i], l->dg[i], dS, l->R, l->n[i]);
            double *n = fetch(v, l->n[i], ROWS * WIDTH);
            for (int j = 0; j < ROWS * WIDTH; j++)
                loss += l->weight[i][j] * n[j];
        }
    }
    while (v->hosts > hosts)
        free(v->host[--v->hosts]);
    while (v->devices > devices)
        v->k->release(v->device[--v->devices]);
    return loss;
}

static void check_layer(struct variant *v, int shards, bool online)
{
    struct layer l = {.v = v, .shards = shards, .online = online, .zw = host_random(v, ROWS * LATENT, 1)};
    l.R = device_poison(v, ROWS);
    l.Y = device_poison(v, ROWS * LATENT);
    l.z = device_poison(v, ROWS * LATENT);
    for (int i = 0; i < shards; i++) {
        l.x[i] = host_random(v, ROWS * WIDTH, 1);
        l.gain[i] = host_random(v, WIDTH, 1);
        l.A[i] = host_random(v, LATENT * WIDTH, 1);
        l.weight[i] = host_random(v, ROWS * WIDTH, 1);
        l.dx[i] = device_poison(v, ROWS * WIDTH);
        l.dg[i] = device_poison(v, WIDTH);
        l.n[i] = device_poison(v, ROWS * WIDTH);
        l.dA[i] = device_values(v, LATENT * WIDTH, l.A[i]);
    }
    layer_loss(&l);

    void *k = device_poison(v, ROWS), *dH = device_values(v, ROWS * LATENT, l.zw), *dn[MAX_SHARDS];
    if (online) {
        v->k->latent_backward(v->ks, ROWS, LATENT, global_width(&l), LATENT_SILU, l.Y, l.R, dH, k);
    } else {
        double c[ROWS] = {0}; /* <dn, n>, which the engine gets from the cross-entropy */
        for (int i = 0; i < shards; i++) {
            double *n = fetch(v, l.n[i], ROWS * WIDTH);
            for (int j = 0; j < ROWS * WIDTH; j++)
                c[j / WIDTH] += l.weight[i][j] * n[j];
        }
        v->k->norm_k(v->ks, ROWS, global_width(&l), l.R, device_values(v, ROWS, c), k);
    }
    for (int i = 0; i < shards; i++) {
        dn[i] = device_poison(v, ROWS * WIDTH);
        struct gemm g = {.m = ROWS, .n = WIDTH, .k = LATENT, .lda = LATENT, .ldb = WIDTH, .ldc = WIDTH, .batch = 1};
        if (online)
            v->k->gemm(v->ks, &g, dH, l.dA[i], dn[i]);
        else
            put(v, dn[i], ROWS * WIDTH, l.weight[i]);
        void *dx = device_poison(v, ROWS * WIDTH), *dgain = grad_zero(v, WIDTH);
        v->k->gain_backward(v->ks, ROWS, WIDTH, l.dx[i], l.dg[i], online ? NULL : l.R, k, dn[i], false, dx, dgain);
        check_differences(v, "x", ROWS * WIDTH, l.x[i], fetch(v, dx, ROWS * WIDTH), layer_loss, &l);
        check_differences(v, "gain", WIDTH, l.gain[i], fetch(v, dgain, WIDTH), layer_loss, &l);
    }
    forget(v);
}

static void layers(struct variant *v)
{
    for (int shards = 1; shards <= MAX_SHARDS; shards++) {
        check_layer(v, shards, true);
        check_layer(v, shards, false);
    }
}

static void test_norm_gradient(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp64(), NULL, 1, layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_residual_gain), cmocka_unit_test(test_norm_apply),
        cmocka_unit_test(test_gain_backward), cmocka_unit_test(test_row_dot),
        cmocka_unit_test(test_whole_rows),    cmocka_unit_test(test_latent),
        cmocka_unit_test(test_extremes),      cmocka_unit_test(test_norm_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
