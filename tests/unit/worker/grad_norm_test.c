/* The gradient norm in fp32 is the same in every layout, for each factorisation, gate and strategy: step 1's to 1e-6,
 * against one rank in fp32 and in fp64. So are those of steps 2 and 3 for FULL_RANK and COLA; for SVD and LAX Adam has
 * by then made other weights of the roundings, since its first updates are nearly signs (up to 6e-6; parity_test.c goes
 * on from there). From the real initial weights, with a model of the proportions of BOOST's parity runs. */
#include "tests/unit/worker/tiny.h"

enum { STEPS = 3, SAMPLES = 8 };

static const struct layout {
    const char *name;
    int tp, pp, dp, zero;
} layouts[] = {
    {"tp 2", 2, 1, 1, 0}, {"tp 4", 4, 1, 1, 0},      {"pp 2", 1, 2, 1, 0},
    {"dp 2", 1, 1, 2, 0}, {"dp 2 zero", 1, 1, 2, 1}, {"tp 2 pp 2 dp 2 zero", 2, 2, 2, 1},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static const struct tiny_way ways[] = {
    {.name = "FULL_RANK FULL", .factorization = FULL_RANK, .strategy = FULL},
    {.name = "SVD BTP", .factorization = SVD, .strategy = BTP},
    {.name = "SVD BTP SYNC", .factorization = SVD, .strategy = BTP, .sync = true},
    {.name = "SVD VANILLA", .factorization = SVD, .strategy = VANILLA},
    {.name = "COLA BTP", .factorization = COLA, .strategy = BTP},
    {.name = "COLA BTP SYNC", .factorization = COLA, .strategy = BTP, .sync = true},
    {.name = "COLA VANILLA", .factorization = COLA, .strategy = VANILLA},
    {.name = "LAX BTP", .factorization = LAX, .strategy = BTP, .gate = IDENTITY},
    {.name = "LAX LINEAR BTP", .factorization = LAX, .strategy = BTP, .gate = LINEAR},
    {.name = "LAX TENSOR BTP", .factorization = LAX, .strategy = BTP, .gate = TENSOR},
    {.name = "LAX SVD BTP", .factorization = LAX, .strategy = BTP, .gate = IDENTITY, .svd_base = true},
    {.name = "LAX VANILLA", .factorization = LAX, .strategy = VANILLA, .gate = IDENTITY},
    {.name = "LAX LINEAR VANILLA", .factorization = LAX, .strategy = VANILLA, .gate = LINEAR},
    {.name = "LAX TENSOR VANILLA", .factorization = LAX, .strategy = VANILLA, .gate = TENSOR},
};
enum { WAYS = sizeof ways / sizeof *ways };

struct curve {
    struct tiny c;
    double norm[STEPS];
};

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch batches[SAMPLES];
    struct micro_batch micro[SAMPLES];
    int n = c->global / c->micro / c->dp, dp_rank = rank / c->tp % c->dp;
    int rc = engine_init_weights(e, err);
    for (int step = 0; step < STEPS && !rc; step++) {
        struct step_request request = {.lr = c->lr};
        struct step_result result;
        for (int m = 0; m < n; m++) {
            tiny_batch(c, (int64_t)step * c->global + (int64_t)(m * c->dp + dp_rank) * c->micro, 0, &batches[m]);
            micro[m] = batches[m].micro;
        }
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && rank == 0)
            r->norm[step] = result.grad_norm;
    }
    return rc;
}

static struct curve curve_of(struct tiny c, const struct layout *layout)
{
    struct plan p;
    if (layout) {
        c.tp = layout->tp;
        c.pp = layout->pp;
        c.dp = layout->dp;
        c.zero = layout->zero;
    }
    struct curve r = {.c = c};
    tiny_plan(&c, &p);
    tiny_run(&p, 1, train, &r, NULL);
    return r;
}

static double off(const struct curve *a, const struct curve *b, int step)
{
    return fabs(a->norm[step] / b->norm[step] - 1);
}

static void step_one_and_more(const struct tiny_way *way)
{
    struct tiny c = tiny_default;
    c.way = *way;
    c.d = 64, c.f = 192, c.r = 16, c.h = c.hk = 8, c.V = 256, c.s = 32, c.micro = 2, c.global = SAMPLES;
    struct curve exact = curve_of(c, NULL);
    c.fp64 = false;
    struct curve one = curve_of(c, NULL);
    double apart[STEPS] = {0}, wrong[STEPS];
    for (int s = 0; s < STEPS; s++)
        wrong[s] = off(&one, &exact, s);
    for (int k = 0; k < LAYOUTS; k++) {
        struct curve many = curve_of(c, &layouts[k]);
        for (int s = 0; s < STEPS; s++) {
            apart[s] = fmax(apart[s], off(&many, &one, s));
            wrong[s] = fmax(wrong[s], off(&many, &exact, s));
        }
        if (!(apart[0] < 1e-6))
            fail_msg("%s, %s: step 1's norm is %.1e from one rank's", way->name, layouts[k].name, apart[0]);
    }
    print_message("%s: layouts are apart by %.1e, %.1e, %.1e; from fp64 by %.1e, %.1e, %.1e\n", way->name, apart[0],
                  apart[1], apart[2], wrong[0], wrong[1], wrong[2]);
    bool calm = way->factorization == FULL_RANK || way->factorization == COLA;
    for (int s = 0; s < (calm ? STEPS : 1); s++)
        assert_true(apart[s] < 1e-6 && wrong[s] < 1e-6);
}

static void any_layout(void **state)
{
    (void)state;
    for (int i = 0; i < WAYS; i++)
        step_one_and_more(&ways[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_layout)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
