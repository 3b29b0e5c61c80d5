/* cross_sum, cross_forward, cross_backward_sums and cross_backward against their formulas, whole and as two shards
 * whose sums are added, and against central differences. */
#include "check.h"

struct shape {
    int64_t T;
    int branches;
    int64_t r;
    bool silu, bias;
};
static const struct shape shapes[] = {
    {1, 1, 4, true, false},     {7, 3, 5, true, true},     {65, 2, 64, false, true}, {300, 1, 130, true, true},
    {129, 3, 66, false, false}, {700, 3, 66, true, true},  {9, 3, 512, true, true},  {70, 2, 776, true, false},
    {5, 2, 1160, true, true},   {40, 1, 256, false, true},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static real sigma(real y)
{
    return 1 / (1 + expl(-y));
}

/* What a crossing has, on the host; parameters and row i are [branches, r] and of branch i % branches. */
struct host {
    int64_t rows, r;
    int branches;
    bool silu;
    double eps, *Y, *G, *gbias, *gain, *bias, *dz;
};

static struct host random_host(struct variant *v, const struct shape *s)
{
    int64_t rows = s->T * s->branches, n = rows * s->r, p = s->branches * s->r;
    return (struct host){rows,
                         s->r,
                         s->branches,
                         s->silu,
                         1e-3,
                         host_random(v, n, 1),
                         host_random(v, n, 1),
                         s->bias ? host_random(v, p, 1) : NULL,
                         host_random(v, p, 1.5),
                         host_random(v, p, 0.5),
                         host_random(v, n, 1)};
}

/* In long double: z, du and the gradients of the three parameters. */
struct want {
    real *u, *z, *du, *dgain, *dbias, *dgbias;
};
static struct want reference(struct variant *v, const struct host *h)
{
    int64_t r = h->r, n = h->rows * r, p = h->branches * r;
    struct want w = {host_reals(v, n), host_reals(v, n), host_reals(v, n),
                     host_reals(v, p), host_reals(v, p), host_reals(v, p)};
    for (int64_t i = 0; i < h->rows; i++) {
        int64_t first = i % h->branches * r;
        real mean = 0, variance = 0, total = 0, along = 0;
        for (int64_t j = 0; j < r; j++) {
            w.u[i * r + j] = (real)h->Y[i * r + j] + h->G[i * r + j] + (h->gbias ? (real)h->gbias[first + j] : 0);
            mean += w.u[i * r + j] / r;
        }
        for (int64_t j = 0; j < r; j++)
            variance += (w.u[i * r + j] - mean) * (w.u[i * r + j] - mean) / r;
        real scale = 1 / sqrtl(variance + (real)h->eps);
        for (int64_t j = 0; j < r; j++) {
            real xhat = (w.u[i * r + j] - mean) * scale, y = h->gain[first + j] * xhat + h->bias[first + j];
            real s = sigma(y), dv = h->dz[i * r + j] * (h->silu ? s + y * s * (1 - s) : 1);
            w.z[i * r + j] = h->silu ? y * s : y;
            w.dgain[first + j] += dv * xhat;
            w.dbias[first + j] += dv;
            total += dv * h->gain[first + j] / r;
            along += dv * h->gain[first + j] * xhat / r;
            w.du[i * r + j] = dv * h->gain[first + j];
        }
        for (int64_t j = 0; j < r; j++) {
            real xhat = (w.u[i * r + j] - mean) * scale;
            w.du[i * r + j] = scale * (w.du[i * r + j] - total - xhat * along);
            w.dgbias[first + j] += w.du[i * r + j];
        }
    }
    return w;
}

/* Columns [from, from + w) of a [rows, r] tensor. */
static double *columns(struct variant *v, const double *x, int64_t rows, int64_t r, int64_t from, int64_t w)
{
    double *out = host_values(v, rows * w);
    for (int64_t i = 0; x && i < rows * w; i++)
        out[i] = x[i / w * r + from + i % w];
    return out;
}

static void paste(const double *part, double *whole, int64_t rows, int64_t r, int64_t from, int64_t w)
{
    for (int64_t i = 0; i < rows * w; i++)
        whole[i / w * r + from + i % w] = part[i];
}

struct got {
    double *u, *z, *du, *dgain, *dbias, *dgbias;
};

/* The kernels over `shards` blocks of columns. */
static struct got run(struct variant *v, const struct host *h, int shards)
{
    enum { MOST = 2 };
    int64_t r = h->r, n = h->rows * r, p = h->branches * r;
    struct got g = {host_values(v, n), host_values(v, n), host_values(v, n),
                    host_values(v, p), host_values(v, p), host_values(v, p)};
    struct crossing c[MOST];
    void *u[MOST], *sums[MOST], *gain[MOST], *bias[MOST], *dz[MOST], *back[MOST], *grads[MOST][3];
    int64_t at[MOST + 1] = {0, shards == 1 ? r : r / 2 + (r > 2), r};
    double *total = host_values(v, 2 * h->rows);
    for (int k = 0; k < shards; k++) {
        int64_t w = at[k + 1] - at[k];
        c[k] = (struct crossing){h->rows, w, r, h->branches, h->eps, h->silu ? LATENT_SILU : LATENT_IDENTITY};
        u[k] = device_poison(v, h->rows * w);
        sums[k] = stat_poison(v, 2 * h->rows);
        void *gbias =
            h->gbias ? device_values(v, h->branches * w, columns(v, h->gbias, h->branches, r, at[k], w)) : NULL;
        void *G = device_values(v, n, h->G); /* read as columns of the whole */
        v->k->cross_sum(v->ks, &c[k], device_values(v, h->rows * w, columns(v, h->Y, h->rows, r, at[k], w)),
                        (char *)G + (size_t)at[k] * dtype_size(v->k->act), r, gbias, u[k], sums[k]);
        double *part = fetch(v, sums[k], 2 * h->rows);
        for (int64_t i = 0; i < 2 * h->rows; i++)
            total[i] += part[i];
    }
    double *back_total = host_values(v, 2 * h->rows);
    for (int k = 0; k < shards; k++) {
        int64_t w = c[k].w;
        put(v, sums[k], 2 * h->rows, total);
        gain[k] = device_values(v, h->branches * w, columns(v, h->gain, h->branches, r, at[k], w));
        bias[k] = device_values(v, h->branches * w, columns(v, h->bias, h->branches, r, at[k], w));
        dz[k] = device_values(v, h->rows * w, columns(v, h->dz, h->rows, r, at[k], w));
        back[k] = stat_poison(v, 2 * h->rows);
        for (int i = 0; i < 3; i++)
            grads[k][i] = grad_zero(v, h->branches * w);
        void *z = device_poison(v, h->rows * w);
        v->k->cross_forward(v->ks, &c[k], u[k], sums[k], gain[k], bias[k], z);
        v->k->cross_backward_sums(v->ks, &c[k], u[k], sums[k], gain[k], bias[k], dz[k], back[k], grads[k][0],
                                  grads[k][1]);
        paste(fetch(v, u[k], h->rows * w), g.u, h->rows, r, at[k], w);
        paste(fetch(v, z, h->rows * w), g.z, h->rows, r, at[k], w);
        double *part = fetch(v, back[k], 2 * h->rows);
        for (int64_t i = 0; i < 2 * h->rows; i++)
            back_total[i] += part[i];
    }
    for (int k = 0; k < shards; k++) {
        int64_t w = c[k].w;
        double *const to[3] = {g.dgain, g.dbias, g.dgbias};
        put(v, back[k], 2 * h->rows, back_total);
        v->k->cross_backward(v->ks, &c[k], u[k], sums[k], gain[k], back[k], dz[k], grads[k][2]);
        paste(fetch(v, dz[k], h->rows * w), g.du, h->rows, r, at[k], w);
        for (int i = 0; i < 3; i++)
            paste(fetch(v, grads[k][i], h->branches * w), to[i], h->branches, r, at[k], w);
    }
    return g;
}

/* Frobenius, relative: a row's mean and variance carry the error of all its columns. The variance is a difference
 * of numbers a few times as large, so a few units are lost there. */
static void close_to(struct variant *v, const char *what, int64_t n, const double *got, const real *want, double limit)
{
    double error = frobenius_error(n, got, want);
    if (!(error <= limit))
        fail_msg("%s: %s differs by %.3g (relative Frobenius), limit %.3g", v->label, what, error, limit);
}

static void formulas(struct variant *v)
{
    for (int s = 0; s < SHAPES; s++)
        for (int shards = 1; shards <= 2; shards++) {
            struct host h = random_host(v, &shapes[s]);
            int64_t n = h.rows * h.r, p = h.branches * h.r;
            struct want w = reference(v, &h);
            struct got g = run(v, &h, shards);
            close_to(v, "u", n, g.u, w.u, 2 * v->u + v->store);
            close_to(v, "z", n, g.z, w.z, 64 * v->u + 2 * v->store);
            close_to(v, "du", n, g.du, w.du, 512 * v->u + 2 * v->store);
            close_to(v, "dgain", p, g.dgain, w.dgain, 512 * v->u + 2 * v->store);
            close_to(v, "dbias", p, g.dbias, w.dbias, 512 * v->u + 2 * v->store);
            /* Sums of du over rows: of a value that may cancel. */
            real *size = host_reals(v, 1);
            for (int64_t i = 0; i < n; i++)
                size[0] += w.du[i] * w.du[i];
            for (int64_t j = 0; j < p; j++)
                assert_true(fabsl(g.dgbias[j] - w.dgbias[j]) <= (512 * v->u + 2 * v->store) * sqrtl(size[0]));
            forget(v);
        }
}

static void test_formulas(void **state)
{
    (void)state;
    each_variant(formulas);
}

/* Whole rows whose mean is OFFSET spreads from zero. u is rounded to OFFSET units, and so is what is taken off it; a
 * variance that is a difference of sums would be off by OFFSET^2. */
static void far_from_zero(struct variant *v)
{
    enum { OFFSET = 200 };
    for (int s = 1; s < SHAPES; s++) {
        struct host h = random_host(v, &shapes[s]);
        int64_t n = h.rows * h.r;
        for (int64_t i = 0; i < n; i++) /* one of both has the offset: exact in every type */
            h.Y[i] = OFFSET, h.G[i] *= 2;
        struct want w = reference(v, &h);
        struct got g = run(v, &h, 1);
        close_to(v, "z", n, g.z, w.z, 4 * OFFSET * (v->u + v->store));
        close_to(v, "du", n, g.du, w.du, 16 * OFFSET * (v->u + v->store));
        forget(v);
    }
}

static void test_far_from_zero(void **state)
{
    (void)state;
    each_variant(far_from_zero);
}

/* u without sums leaves what was reduced as it is. */
static void without_sums(struct variant *v)
{
    struct host h = random_host(v, &shapes[1]);
    int64_t n = h.rows * h.r;
    struct crossing c = {h.rows, h.r, h.r, h.branches, h.eps, LATENT_SILU};
    void *Y = device_values(v, n, h.Y), *G = device_values(v, n, h.G), *u[2], *sums = stat_poison(v, 2 * h.rows);
    for (int i = 0; i < 2; i++) {
        u[i] = device_poison(v, n);
        v->k->cross_sum(v->ks, &c, Y, G, h.r, NULL, u[i], i ? NULL : sums);
    }
    check_same_bits(v, "u", n, u[0], u[1]);
    forget(v);
}

static void test_without_sums(void **state)
{
    (void)state;
    each_variant(without_sums);
}

/* Central differences of <z, dz>. */
struct loss {
    struct variant *v;
    const struct host *h;
};
static double loss(void *arg)
{
    const struct loss *l = arg;
    int hosts = l->v->hosts;
    struct want w = reference(l->v, l->h);
    real sum = 0;
    for (int64_t i = 0; i < l->h->rows * l->h->r; i++)
        sum += w.z[i] * l->h->dz[i];
    while (l->v->hosts > hosts)
        free(l->v->host[--l->v->hosts]);
    return (double)sum;
}

static void differences(struct variant *v)
{
    for (int s = 1; s < 3; s++) {
        struct shape small = shapes[s];
        small.T = 3;
        small.r = 5;
        struct host h = random_host(v, &small);
        struct got g = run(v, &h, 1);
        struct loss l = {v, &h};
        int64_t n = h.rows * h.r, p = h.branches * h.r;
        check_differences(v, "Y", n, h.Y, g.du, loss, &l);
        check_differences(v, "G", n, h.G, g.du, loss, &l);
        check_differences(v, "gain", p, h.gain, g.dgain, loss, &l);
        check_differences(v, "bias", p, h.bias, g.dbias, loss, &l);
        check_differences(v, "the sum's bias", p, h.gbias, g.dgbias, loss, &l);
        forget(v);
    }
}

static void test_differences(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp64(), NULL, 1, differences);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formulas),
        cmocka_unit_test(test_far_from_zero),
        cmocka_unit_test(test_without_sums),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
