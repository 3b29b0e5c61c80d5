/* Gradients of the whole model: fp64 against central differences, fp32 against fp64, shards against the unsharded
 * model, and every way of a model against the plainest one.
 * time limit: 240 s */
#include "tests/unit/worker/tiny_rounded.h"

/* Two models for each way: all shapes of heads, tied and not, with and without the MLP's activation. */
enum { VARIANTS = 2 * TINY_WAYS };
static struct tiny variant_at(int i)
{
    static const int heads[] = {4, 2, 1, 2, 4, 1, 2};
    struct tiny c = tiny_of(i / 2);
    c.hk = heads[i % 7];
    c.tied = (i ^ i >> 1) & 1;
    c.mlp_silu = (i >> 2 ^ i) & 1;
    return c;
}

static double largest; /* found by expect_close, for the reader */

static void expect_close(const char *what, const struct grads *a, const struct grads *b, double bound)
{
    assert_true(a->count == b->count);
    for (int64_t i = 0; i < a->count; i++) {
        double relative = grads_distance(a, b, i);
        largest = fmax(largest, relative);
        if (!(relative < bound))
            fail_msg("%s (%s, tied %d, hk %d, tp %d): %s differs by %.3g, bound %.3g", what, a->c.way.name, a->c.tied,
                     a->c.hk, a->c.tp, a->tensors[i].name, relative, bound);
    }
}

/* A tensor's elements are dealt into at most this many directions, each element to one, with a sign of its own: the
 * derivative along a direction is the signed sum of its elements' gradients, so a wrong one shows. */
enum { DIRECTIONS = 24 };
static double sign_of(const char *name, int64_t k)
{
    return init_key((uint64_t)k, name) & 1 ? 1 : -1;
}

/* Fourth-order differences of the loss sum (about 30): their error is h^4/30 times the fifth derivative,
 * which is large where a token's embedding is short and its norm bends sharply, plus rounding of
 * 1e-16 * 30 / h. At h = 5e-5 the largest found is 9e-8 (LAX, whose norms bend too), else 6e-9; at 2e-4 it is 2e-5,
 * all of it the first term. */
static int differences(struct engine *e, int rank, void *arg, struct error *err)
{
    struct grads *g = arg;
    struct tiny_batch b;
    (void)rank;
    tiny_batch(&g->c, 0, TINY_MASK, &b);
    tiny_randomize(e, 7);
    g->count = engine_tensor_count(e);
    for (int64_t i = 0; i < g->count; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        int64_t n = t.tensor.nrows * t.tensor.ncols;
        double *start = calloc((size_t)n, sizeof *start);
        g->tensors[i] = t.tensor;
        g->values[i] = calloc((size_t)n, sizeof(double));
        for (int64_t k = 0; k < n; k++)
            start[k] = tiny_get(&t, k);
        for (int64_t direction = 0; direction < n && direction < DIRECTIONS; direction++) {
            static const double offset[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
            double h = 5e-5, sum = 0;
            for (int s = 0; s < 4; s++) {
                double loss, tokens;
                for (int64_t k = direction; k < n; k += DIRECTIONS)
                    tiny_put(&t, k, start[k] + offset[s] * h * sign_of(t.tensor.name, k));
                int rc = engine_eval(e, &b.micro, &loss, &tokens, err);
                if (rc)
                    return rc;
                sum += weight[s] * loss;
            }
            for (int64_t k = direction; k < n; k += DIRECTIONS)
                tiny_put(&t, k, start[k]);
            g->values[i][direction] = sum / (12 * h);
        }
        free(start);
    }
    return ERR_OK;
}

/* Gradients to derivatives along the directions. */
static void project(struct grads *g)
{
    for (int64_t i = 0; i < g->count; i++) {
        int64_t n = g->tensors[i].rows * g->tensors[i].cols;
        double along[DIRECTIONS] = {0};
        for (int64_t k = 0; k < n; k++)
            along[k % DIRECTIONS] += sign_of(g->tensors[i].name, k) * g->values[i][k];
        for (int64_t k = 0; k < n; k++)
            g->values[i][k] = k < DIRECTIONS ? along[k] : 0;
    }
}

static void fp64_against_central_differences(void **state)
{
    (void)state;
    for (int i = 0; i < VARIANTS; i++) {
        struct tiny c = variant_at(i);
        struct grads exact, numeric = {.c = c};
        struct plan p;
        gradients_of(&c, &exact);
        tiny_plan(&c, &p);
        tiny_run(&p, 1, differences, &numeric, NULL);
        project(&exact);
        largest = 0;
        expect_close("fp64 against differences", &exact, &numeric, 1e-6);
        print_message("%s: largest difference %.1e\n", c.way.name, largest);
        grads_free(&exact);
        grads_free(&numeric);
    }
}

/* Gradients that roundings alone move further than any arithmetic could answer for: in the control (tiny_rounded.h) all
 * that is stored is rounded to fp32, and nothing else. */
static void expect_no_worse_than_rounding(const struct grads *single, const struct grads *exact, int64_t i)
{
    enum { DRAWS = 32 };
    double most = 0, error = grads_distance(single, exact, i);
    for (int draw = 1; draw <= DRAWS; draw++) {
        struct grads control;
        rounded_gradients(&exact->c, false, FP32_DIGITS, (uint64_t)draw, &control);
        most = fmax(most, grads_distance(&control, exact, i));
        grads_free(&control);
    }
    print_message("%s: %s differs by %.2g; roundings of what is stored move it by %.2g\n", exact->c.way.name,
                  exact->tensors[i].name, error, most);
    if (!(error <= 2 * most))
        fail_msg("fp32 against fp64 (%s, tied %d, hk %d): %s differs by %.3g, roundings alone by %.3g",
                 exact->c.way.name, exact->c.tied, exact->c.hk, exact->tensors[i].name, error, most);
}

/* Within 1e-4; a tensor that is not must be ill-conditioned, which is shown on the spot. */
static void fp32_against_fp64(void **state)
{
    (void)state;
    for (int i = 0; i < VARIANTS; i++) {
        struct tiny c = variant_at(i);
        struct grads exact, single;
        gradients_of(&c, &exact);
        c.fp64 = false;
        gradients_of(&c, &single);
        for (int64_t k = 0; k < exact.count; k++)
            if (!(grads_distance(&single, &exact, k) < 1e-4))
                expect_no_worse_than_rounding(&single, &exact, k);
        assert_true(fabs(single.loss / exact.loss - 1) < 1e-6);
        grads_free(&exact);
        grads_free(&single);
    }
}

/* Sums in another order only: a few thousand roundings of 1e-16 of values of order one. */
static void shards_against_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < VARIANTS; i++) {
        struct tiny c = variant_at(i);
        struct grads whole, shards;
        gradients_of(&c, &whole);
        for (c.tp = 2; c.tp <= c.hk; c.tp *= 2) {
            gradients_of(&c, &shards);
            expect_close("shards against the whole", &shards, &whole, 1e-11);
            assert_true(fabs(shards.loss / whole.loss - 1) < 1e-13);
            grads_free(&shards);
        }
        grads_free(&whole);
    }
}

/* Every way of one model is the same function. */
static void ways_agree(void **state)
{
    (void)state;
    for (int i = 0; i < VARIANTS; i++) {
        struct tiny c = variant_at(i);
        struct grads one, other;
        if (c.way.factorization == FULL_RANK)
            continue;
        gradients_of(&c, &one);
        c.way.strategy = BTP;
        c.way.published = c.way.sync = c.way.ungrouped = c.way.overlap = false;
        gradients_of(&c, &other);
        expect_close("against grouped BTP", &one, &other, 1e-11);
        assert_true(fabs(one.loss / other.loss - 1) < 1e-13);
        grads_free(&one);
        grads_free(&other);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp64_against_central_differences),
        cmocka_unit_test(fp32_against_fp64),
        cmocka_unit_test(shards_against_the_whole),
        cmocka_unit_test(ways_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
