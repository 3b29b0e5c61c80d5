/* grad_squares, step_finish and adamw: closed forms, clipping, skipped steps, huge gradients. */
#include "check.h"

/* ---- grad_squares --------------------------------------------------------------------------- */

static void squares(struct variant *v)
{
    static const int64_t sizes[] = {1, 63, 64, 65, 1000, 100003};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t n = sizes[s];
        double *g = host_random(v, n, 1);
        const double start[2] = {3, 0};
        double *acc = device_doubles(v, 2, start), *again = device_doubles(v, 2, start);
        void *dg = grad_values(v, n, g);
        real want = 3;
        for (int64_t i = 0; i < n; i++)
            want += (real)g[i] * g[i];
        v->k->grad_squares(v->ks, n, dg, acc);
        v->k->grad_squares(v->ks, n, dg, again);
        const double *got = fetch(v, acc, 2);
        assert_true(fabsl(got[0] - want) <= sum_roundings(n) * 0x1p-53 * want); /* fp64 in every backend */
        assert_true(got[1] == 0);
        check_same_bits(v, "sum of squares", 2, acc, again);

        static const double bad[] = {NAN, INFINITY, -INFINITY};
        for (int b = 0; b < 3; b++) {
            double *copy = host_values(v, n);
            memcpy(copy, g, (size_t)n * sizeof *g);
            copy[random_below(v, n)] = bad[b];
            put(v, acc, 2, (const double[2]){0, 1});
            v->k->grad_squares(v->ks, n, grad_values(v, n, copy), acc);
            assert_true(fetch(v, acc, 2)[1] == 2);
        }
        forget(v);
    }
    /* 1e19 squared is beyond float. */
    double huge[3] = {1e19, -3e38, 1}, *acc = device_doubles(v, 2, (const double[2]){0, 0});
    v->k->grad_squares(v->ks, 3, grad_values(v, 3, huge), acc);
    const double *got = fetch(v, acc, 2);
    assert_true(fabs(got[0] / 9e76 - 1) < 1e-6 && got[1] == 0);
}

static void test_grad_squares(void **state)
{
    (void)state;
    each_variant(squares);
}

/* ---- step_finish ------------------------------------------------------------------------------ */

static struct step_block new_block(double loss, double tokens, double squares_sum, double nonfinite)
{
    struct step_block b = {.lr = 0.01, .adam_t = 4};
    b.agree[AGREE_LOSS] = loss;
    b.agree[AGREE_TOKENS] = tokens;
    b.agree[AGREE_SQUARES] = squares_sum;
    b.agree[AGREE_NONFINITE] = nonfinite;
    return b;
}

/* step_finish() on the device's copy, which stays there. */
static void finish(struct variant *v, struct step_block *b, void *device, double beta1, double beta2, double clip)
{
    put_bytes(v, device, b, sizeof *b);
    v->k->step_finish(v->ks, device, beta1, beta2, clip);
    get_bytes(v, b, device, sizeof *b);
}

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-14 * fabs(want)))
        fail_msg("%.17g, should be %.17g", got, want);
}

static void finishes(struct variant *v)
{
    void *device = device_bytes(v, sizeof(struct step_block));
    struct step_block b = new_block(100, 50, 40000, 0);
    finish(v, &b, device, 0.9, 0.95, 0); /* no clip */
    near(b.grad_norm, 4);
    near(b.grad_scale, 1.0 / 50);
    near(b.adam_t, 5);
    near(b.bias1, 1 - 0.9 * 0.9 * 0.9 * 0.9 * 0.9);
    near(b.bias2, 1 - 0.95 * 0.95 * 0.95 * 0.95 * 0.95);
    assert_true(b.skip == 0);

    b = new_block(100, 50, 40000, 0);
    finish(v, &b, device, 0.9, 0.95, 1); /* norm 4, clip 1: a quarter */
    near(b.grad_norm, 4);
    near(b.grad_scale, 0.25 / 50);

    b = new_block(100, 50, 40000, 0);
    finish(v, &b, device, 0.9, 0.95, 8); /* below the clip: as it is */
    near(b.grad_scale, 1.0 / 50);

    /* beta 0 is a valid choice: no bias. */
    b = new_block(100, 50, 40000, 0);
    finish(v, &b, device, 0, 0, 1);
    near(b.bias1, 1);
    near(b.bias2, 1);

    static const double skipped[][4] = {
        {1, 1, 1, 1},        {NAN, 1, 1, 0}, {INFINITY, 1, 1, 0}, {1, 1, NAN, 0},
        {1, 1, INFINITY, 0}, {0, 0, 0, 0},   {1, 1, 1, NAN},      {1, NAN, 1, 0},
    };
    for (size_t i = 0; i < sizeof skipped / sizeof *skipped; i++) {
        b = new_block(skipped[i][0], skipped[i][1], skipped[i][2], skipped[i][3]);
        finish(v, &b, device, 0.9, 0.95, 1);
        assert_true(b.skip == 1);
        assert_true(b.adam_t == 4);
        /* The next good step goes on as if this one had not been. */
        memcpy(b.agree, new_block(1, 1, 1, 0).agree, sizeof b.agree);
        finish(v, &b, device, 0.9, 0.95, 1);
        assert_true(b.skip == 0);
        assert_true(b.adam_t == 5);
    }
}

static void test_step_finish(void **state)
{
    (void)state;
    each_variant(finishes);
}

/* ---- adamw --------------------------------------------------------------------------------------- */

/* Several steps against the algorithm in long double. The bound is on the parameter's movement: each step
 * rounds the parameter once and its own size about twelve times. */
static void one_adamw(struct variant *v, int64_t n, double decay, bool shared)
{
    enum { STEPS = 5 };
    const struct adamw hyper = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = decay};
    double *x0 = host_random(v, n, 1);
    real *x = host_reals(v, n), *m = host_reals(v, n), *s = host_reals(v, n), *size = host_reals(v, n);
    real *size_m = host_reals(v, n);
    bool copy = v->k->act != v->k->grad; /* the weight is the master rounded */
    void *master = grad_values(v, n, x0), *weight = shared && !copy ? master : device_poison(v, n);
    void *dm = grad_zero(v, n), *dv = grad_zero(v, n);
    struct step_block b = new_block(1, 8, 64, 0);
    void *block = device_bytes(v, sizeof b);
    b.adam_t = 0;
    for (int64_t i = 0; i < n; i++)
        x[i] = x0[i];
    for (int step = 1; step <= STEPS; step++) {
        double *g = host_random(v, n, 100);
        b.lr = 0.01 * step;
        finish(v, &b, block, hyper.beta1, hyper.beta2, 0.5); /* norm 1, so half of 1/8 */
        v->k->adamw(v->ks, n, &hyper, block, grad_values(v, n, g), dm, dv, master, weight);
        for (int64_t i = 0; i < n; i++) {
            real gi = g[i] * (real)0.5 / 8;
            m[i] = 0.9L * m[i] + 0.1L * gi;
            s[i] = 0.95L * s[i] + 0.05L * gi * gi;
            size_m[i] = 0.9L * size_m[i] + 0.1L * fabsl(gi);
            real root = sqrtl(s[i] / (1 - powl(0.95L, step))) + 1e-8L, bias1 = 1 - powl(0.9L, step);
            x[i] -= (real)b.lr * (m[i] / bias1 / root + (real)decay * x[i]);
            size[i] += 1 + (real)b.lr * size_m[i] / bias1 / root;
        }
    }
    /* The double 0.9 is not 0.9, and 1 - 0.95 is off by its own ulp: 20 of them show in the bias of step 1. */
    check(v, "master", n, master, x, size, 24);
    check(v, "m", n, dm, m, size_m, 24);
    check(v, "v", n, dv, s, NULL, 40);
    if (!copy)
        check_same_bits(v, "weight", n, weight, master);
    double *stored = fetch(v, weight, n), *exact = fetch(v, master, n);
    for (int64_t i = 0; i < n && copy; i++)
        assert_true(stored[i] == round_bf16(exact[i]));

    /* A skipped step leaves everything as it was, whatever the gradient. */
    double *bad = host_values(v, n), *before[3] = {fetch(v, master, n), fetch(v, dm, n), fetch(v, dv, n)};
    for (int64_t i = 0; i < n; i++)
        bad[i] = i % 2 ? NAN : INFINITY;
    b.agree[AGREE_NONFINITE] = 1;
    finish(v, &b, block, hyper.beta1, hyper.beta2, 0.5);
    v->k->adamw(v->ks, n, &hyper, block, grad_values(v, n, bad), dm, dv, master, weight);
    const void *now[3] = {fetch(v, master, n), fetch(v, dm, n), fetch(v, dv, n)};
    for (int i = 0; i < 3; i++)
        assert_memory_equal(now[i], before[i], (size_t)n * sizeof(double));
    assert_true(b.adam_t == STEPS);
    forget(v);
}

static void adamws(struct variant *v)
{
    static const int64_t sizes[] = {1, 17, 1000, 40001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        one_adamw(v, sizes[i], 0.1, true);
        one_adamw(v, sizes[i], 0, false);
    }
}

static void test_adamw(void **state)
{
    (void)state;
    each_variant(adamws);
}

/* The first step moves by lr * sign(g) whatever the size of the gradient, up to 1e19; zero gradients only decay. */
static void first_step(struct variant *v)
{
    double g[4] = {1e19, -1e-3, 0, 5}, x[4] = {1, 1, 1, -1}, want[4] = {0.9, 1.1, 1, -1.1};
    const struct adamw hyper = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-12, .weight_decay = 0};
    double *acc = device_doubles(v, 2, (const double[2]){0, 0});
    struct step_block b = new_block(1, 1, 0, 0);
    void *block = device_bytes(v, sizeof b);
    void *dg = grad_values(v, 4, g), *master = grad_values(v, 4, x), *m = grad_zero(v, 4), *s = grad_zero(v, 4);
    v->k->grad_squares(v->ks, 4, dg, acc);
    const double *sums = fetch(v, acc, 2);
    b.agree[AGREE_SQUARES] = sums[0];
    b.agree[AGREE_NONFINITE] = sums[1];
    b.adam_t = 0;
    b.lr = 0.1;
    finish(v, &b, block, hyper.beta1, hyper.beta2, 0);
    assert_true(fabs(b.grad_norm / 1e19 - 1) < 1e-7); /* 1e19 is not a float */
    v->k->adamw(v->ks, 4, &hyper, block, dg, m, s, master, v->k->act == v->k->grad ? master : device_poison(v, 4));
    double *got = fetch(v, master, 4);
    for (int i = 0; i < 4; i++)
        assert_true(fabs(got[i] - want[i]) < 1e-6);
}

static void test_first_step(void **state)
{
    (void)state;
    each_variant(first_step);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grad_squares),
        cmocka_unit_test(test_step_finish),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_first_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
