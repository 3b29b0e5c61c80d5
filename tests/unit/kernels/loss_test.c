/* The gated product, and cross-entropy on one and several vocabulary shards against a whole softmax in long double. */
#include "check.h"

static real sigma(real y)
{
    return 1 / (1 + expl(-y));
}

/* ---- gated product ------------------------------------------------------------------------ */

/* gap elements between the rows, which stay as they were. */
static void one_glu(struct variant *v, int64_t rows, int64_t n, int64_t gap, bool silu, bool in_place)
{
    int64_t ld = n + gap, dense = rows * n, all = rows * ld;
    double *gate = host_random(v, all, 8), *up = host_random(v, all, 2), *dout = host_random(v, dense, 1);
    double *into_gate = host_random(v, all, 1), *into_up = host_random(v, all, 1);
    real *out = host_reals(v, dense), *dgate = host_reals(v, all), *dup = host_reals(v, all);
    real *size = host_reals(v, dense), *size_gate = host_reals(v, all), *size_up = host_reals(v, all);
    for (int64_t i = 0; i < all; i++) {
        int64_t j = i / ld * n + i % ld;
        real g = gate[i], s = sigma(g), f = silu ? g * s : g, slope = silu ? s + g * s * (1 - s) : 1;
        if (i % ld >= n) {
            dgate[i] = in_place ? gate[i] : into_gate[i];
            dup[i] = in_place ? up[i] : into_up[i];
            size_gate[i] = size_up[i] = 0;
            continue;
        }
        out[j] = f * up[i];
        dgate[i] = dout[j] * up[i] * slope;
        dup[i] = dout[j] * f;
        size[j] = fabsl(out[j]) * (1 + fabsl(g));
        size_up[i] = fabsl(dup[i]) * (1 + fabsl(g));
        size_gate[i] = fabsl((real)dout[j] * up[i]) * (silu ? s * (1 + fabsl(g)) : 1);
    }
    void *dg = device_values(v, all, gate), *du = device_values(v, all, up), *dy = device_values(v, dense, dout);
    void *o = device_poison(v, dense), *og = in_place ? dg : device_values(v, all, into_gate);
    void *ou = in_place ? du : device_values(v, all, into_up);
    v->k->glu_forward(v->ks, rows, n, ld, silu, dg, du, o);
    void *again = silu == in_place ? device_poison(v, dense) : NULL;
    v->k->glu_backward(v->ks, rows, n, ld, silu, dg, du, dy, og, ou, again);
    check(v, "out", dense, o, out, size, 8);
    if (again)
        assert_memory_equal(fetch(v, again, dense), fetch(v, o, dense), (size_t)dense * sizeof(double));
    check(v, "dgate", all, og, dgate, size_gate, 12);
    check(v, "dup", all, ou, dup, size_up, 8);
    forget(v);
}

static void glus(struct variant *v)
{
    static const struct {
        int64_t rows, n, gap;
    } sizes[] = {{1, 1, 0},     {1, 15, 0},   {1, 1000, 0}, {1, 16384, 0}, {1, 16385, 0}, {1, 50000, 0}, {1, 131075, 0},
                 {20, 1000, 0}, {13, 40, 40}, {7, 8, 24},   {9, 5, 3},     {3, 16385, 1}, {5, 136, 3},   {3, 131, 8}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int mode = 0; mode < 4; mode++)
            one_glu(v, sizes[i].rows, sizes[i].n, sizes[i].gap, mode & 1, mode & 2);
}

static void test_glu(void **state)
{
    (void)state;
    each_variant(glus);
}

/* ---- cross-entropy -------------------------------------------------------------------------- */

enum { MAX_SHARDS = 4 };
struct loss_case {
    int64_t T, vocab, per_shard, ld; /* the last shard may have fewer valid columns, or none */
    int shards;
    double spread;
};

static int64_t valid_columns(const struct loss_case *c, int shard)
{
    int64_t left = c->vocab - shard * c->per_shard;
    return left < 0 ? 0 : left < c->per_shard ? left : c->per_shard;
}

static void one_loss(struct variant *v, const struct loss_case *c)
{
    int64_t T = c->T, V = c->vocab, n = T * c->ld;
    double *logits = host_random(v, T * V, c->spread);
    int32_t *targets = keep_host(v, (size_t)T * sizeof *targets);
    for (int64_t i = 0; i < T; i++)
        targets[i] = i % 5 == 3 ? -1 : (int32_t)random_below(v, V);
    int32_t *dt = device_tokens(v, T, targets);

    /* Each shard's columns, and NaN in the padding. */
    void *dl[MAX_SHARDS];
    double *top = host_values(v, T), *sums = host_values(v, T * 3);
    for (int64_t i = 0; i < T; i++)
        top[i] = -INFINITY;
    for (int p = 0; p < c->shards; p++) {
        double *part = host_values(v, n);
        for (int64_t i = 0; i < n; i++) {
            int64_t column = i % c->ld;
            part[i] = column < valid_columns(c, p) ? logits[i / c->ld * V + p * c->per_shard + column] : NAN;
        }
        dl[p] = device_values(v, n, part);
        void *m = stat_poison(v, T);
        v->k->ce_max(v->ks, T, c->ld, valid_columns(c, p), dl[p], m);
        double *got = fetch(v, m, T);
        for (int64_t i = 0; i < T; i++)
            top[i] = fmax(top[i], got[i]);
    }
    void *dm = stat_values(v, T, top);
    for (int p = 0; p < c->shards; p++) {
        void *s = stat_poison(v, T * 3);
        v->k->ce_sums(v->ks, T, c->ld, valid_columns(c, p), p * c->per_shard, dl[p], dm, dt, s);
        double *got = fetch(v, s, T * 3);
        for (int64_t i = 0; i < T * 3; i++)
            sums[i] += got[i];
    }
    void *ds = stat_values(v, T * 3, sums);

    /* The reference, from all logits at once. An exponential passes on the absolute error of its argument. */
    real loss = 0, size_loss = 0, tokens = 0;
    real *want_c = host_reals(v, T), *size_c = host_reals(v, T), *grad = host_reals(v, T * V),
         *size = host_reals(v, T * V);
    for (int64_t i = 0; i < T; i++) {
        const double *l = logits + i * V;
        real high = -INFINITY, total = 0, mean = 0, mean_size = 0;
        for (int64_t j = 0; j < V; j++)
            high = fmaxl(high, l[j]);
        assert_true(top[i] == (double)high);
        for (int64_t j = 0; j < V; j++)
            total += expl(l[j] - high);
        bool masked = targets[i] < 0;
        for (int64_t j = 0; j < V; j++) {
            real p = expl(l[j] - high) / total;
            mean += p * l[j];
            mean_size += p * fabsl(l[j]) * (1 + fabsl(l[j] - high));
            grad[i * V + j] = masked ? 0 : p - (j == targets[i]);
            size[i * V + j] = masked ? 0 : p * (1 + fabsl(l[j] - high)) + (j == targets[i]);
        }
        if (masked)
            continue;
        tokens += 1;
        loss += high + logl(total) - l[targets[i]];
        size_loss += fabsl(high) + 1 + logl(total) + fabsl((real)l[targets[i]]);
        want_c[i] = mean - l[targets[i]];
        size_c[i] = mean_size + fabsl((real)l[targets[i]]);
    }

    double roundings = sum_roundings(V) + 8;
    for (int p = 0; p < c->shards; p++) {
        double seven[2] = {7, 7}, got[2];
        double *dloss = device_doubles(v, 2, seven);
        void *dc = stat_poison(v, T), *evaluated = device_values(v, n, fetch(v, dl[p], n));
        v->k->ce_backward(v->ks, T, c->ld, valid_columns(c, p), p * c->per_shard, evaluated, dm, ds, dt, dloss, NULL);
        check_same_bits(v, "logits of an evaluation", n, evaluated, dl[p]);
        v->k->ce_backward(v->ks, T, c->ld, valid_columns(c, p), p * c->per_shard, dl[p], dm, ds, dt, p ? NULL : dloss,
                          dc);
        get_bytes(v, got, dloss, sizeof got);
        int times = p ? 1 : 2; /* added to what was there */
        assert_true(got[1] == 7 + times * (double)tokens);
        assert_true(fabsl(got[0] - 7 - times * loss) <= roundings * v->u * (size_loss + 8) * times);
        check(v, "c", T, dc, want_c, size_c, roundings);

        real *want = host_reals(v, n), *bound = host_reals(v, n);
        for (int64_t i = 0; i < n; i++) {
            int64_t column = i % c->ld, at = i / c->ld * V + p * c->per_shard + column;
            bool real_column = column < valid_columns(c, p);
            want[i] = real_column ? grad[at] : 0;
            bound[i] = real_column ? size[at] : 0;
        }
        check(v, "dlogits", n, dl[p], want, bound, roundings);
    }
    forget(v);
}

static void losses(struct variant *v)
{
    static const struct loss_case cases[] = {
        {.T = 1, .vocab = 1, .per_shard = 1, .ld = 1, .shards = 1, .spread = 1},
        {.T = 9, .vocab = 13, .per_shard = 13, .ld = 16, .shards = 1, .spread = 3},
        {.T = 9, .vocab = 13, .per_shard = 8, .ld = 8, .shards = 2, .spread = 3},
        {.T = 20, .vocab = 257, .per_shard = 128, .ld = 131, .shards = 4, .spread = 10}, /* the last shard is padding */
        {.T = 300, .vocab = 256, .per_shard = 256, .ld = 256, .shards = 1, .spread = 1},
        {.T = 1100, .vocab = 120, .per_shard = 120, .ld = 120, .shards = 1, .spread = 2},
        {.T = 40, .vocab = 100, .per_shard = 50, .ld = 64, .shards = 2, .spread = 200}, /* most exponentials vanish */
        {.T = 6, .vocab = 9003, .per_shard = 4600, .ld = 4608, .shards = 2, .spread = 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        one_loss(v, &cases[i]);
}

static void test_cross_entropy(void **state)
{
    (void)state;
    each_variant(losses);
}

/* A logit that is not finite makes the loss so, and is not clipped away by a maximum. */
static void poisoned(struct variant *v)
{
    static const double bad[] = {NAN, INFINITY};
    for (int b = 0; b < 2; b++) {
        double logits[20] = {0}, zero[2] = {0, 0};
        logits[7] = bad[b];
        int32_t target = 3;
        void *l = device_values(v, 20, logits), *m = stat_poison(v, 1), *s = stat_poison(v, 3), *c = stat_poison(v, 1);
        double *loss = device_doubles(v, 2, zero);
        int32_t *t = device_tokens(v, 1, &target);
        v->k->ce_max(v->ks, 1, 20, 20, l, m);
        v->k->ce_sums(v->ks, 1, 20, 20, 0, l, m, t, s);
        v->k->ce_backward(v->ks, 1, 20, 20, 0, l, m, s, t, loss, c);
        assert_false(isfinite(fetch(v, loss, 2)[0]));
    }
}

static void test_not_finite(void **state)
{
    (void)state;
    each_variant(poisoned);
}

/* ---- differences -------------------------------------------------------------------------------- */

enum { ROWS = 4, VOCAB = 7 };
struct problem {
    struct variant *v;
    double *logits, *gate, *up, *weight;
    int32_t *targets;
    void *l, *m, *sums, *c, *g, *u, *out;
    double *total;
};

static double ce_loss(void *arg)
{
    struct problem *p = arg;
    const struct kernels *k = p->v->k;
    put(p->v, p->l, ROWS * VOCAB, p->logits);
    p->total[0] = p->total[1] = 0;
    k->ce_max(p->v->ks, ROWS, VOCAB, VOCAB, p->l, p->m);
    k->ce_sums(p->v->ks, ROWS, VOCAB, VOCAB, 0, p->l, p->m, p->targets, p->sums);
    k->ce_backward(p->v->ks, ROWS, VOCAB, VOCAB, 0, p->l, p->m, p->sums, p->targets, p->total, p->c);
    return p->total[0];
}

static double glu_loss(void *arg)
{
    struct problem *p = arg;
    put(p->v, p->g, ROWS, p->gate);
    put(p->v, p->u, ROWS, p->up);
    p->v->k->glu_forward(p->v->ks, 1, ROWS, ROWS, true, p->g, p->u, p->out);
    double sum = 0;
    for (int i = 0; i < ROWS; i++)
        sum += p->weight[i] * ((double *)p->out)[i];
    return sum;
}

static void differences(struct variant *v)
{
    int32_t targets[ROWS] = {2, -1, 0, 6};
    struct problem p = {.v = v,
                        .logits = host_random(v, ROWS * VOCAB, 2),
                        .gate = host_random(v, ROWS, 2),
                        .up = host_random(v, ROWS, 1),
                        .weight = host_random(v, ROWS, 1),
                        .targets = device_tokens(v, ROWS, targets),
                        .l = device_poison(v, ROWS * VOCAB),
                        .m = device_poison(v, ROWS),
                        .sums = device_poison(v, ROWS * 3),
                        .c = device_poison(v, ROWS),
                        .g = device_poison(v, ROWS),
                        .u = device_poison(v, ROWS),
                        .out = device_poison(v, ROWS),
                        .total = device_bytes(v, 2 * sizeof(double))};
    ce_loss(&p);
    double *grad = fetch(v, p.l, ROWS * VOCAB);
    check_differences(v, "logits", ROWS * VOCAB, p.logits, grad, ce_loss, &p);

    void *dgate = device_poison(v, ROWS), *dup = device_poison(v, ROWS);
    glu_loss(&p);
    v->k->glu_backward(v->ks, 1, ROWS, ROWS, true, p.g, p.u, device_values(v, ROWS, p.weight), dgate, dup, NULL);
    check_differences(v, "gate", ROWS, p.gate, fetch(v, dgate, ROWS), glu_loss, &p);
    check_differences(v, "up", ROWS, p.up, fetch(v, dup, ROWS), glu_loss, &p);
}

static void test_differences(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp64(), NULL, 1, differences);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_glu),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
