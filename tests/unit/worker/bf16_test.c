/* Training in bf16, whose activations and statistics are of different types: gradients and losses against fp64 and
 * fp32 in every way and degree, what is the same bits as something else, and what a call of both types counts.
 *
 * Bounds. bf16 has 16 bits of mantissa less than fp32, so where both do the same operations, and round as often, its
 * error is 2^16 times fp32's, whatever the condition of a gradient. It rounds less often (sums are fp32), which makes
 * it about half of that, and more where ranks add in bf16. FACTOR allows for there being one sample of each. At the
 * initial weights there are plain bounds too. A rounding is 2^-8 / sqrt(12) = 1.1e-3 in the root mean square or less,
 * and some 50 lie on the way to a gradient of the first block: 8e-3 of it where nothing cancels. That is what a dense
 * model shows; in the gradient of a low-rank pair fewer errors average out, and LAX's LayerNorms divide by latents'
 * small spread. */
#include "tests/unit/worker/tiny_grads.h"

#include "proto/base/bf16.h"

enum { FACTOR = 4, STEPS = 60 };

static struct tiny model(int way)
{
    struct tiny c = tiny_of(way);
    c.d = 64, c.f = 96, c.h = 4, c.hk = way & 1 ? 4 : 2, c.V = 40, c.s = 16, c.micro = c.global = 8;
    c.r = c.way.factorization == LAX && c.way.gate == TENSOR ? 12 : 16;
    c.tied = way >> 1 & 1;
    c.mlp_silu = way & 1;
    return c;
}

static void gradients_at_degree(struct tiny c, bool initial, const struct grads *exact)
{
    struct grads bf16, fp32;
    double worst = 0;
    c.fp64 = false;
    gradients_at(&c, initial, &fp32);
    c.bf16 = true;
    gradients_at(&c, initial, &bf16);
    for (int64_t i = 0; i < exact->count; i++) {
        double ratio = grads_distance(&bf16, exact, i) / (0x1p16 * grads_distance(&fp32, exact, i));
        worst = fmax(worst, ratio);
        if (!(ratio < FACTOR))
            fail_msg("%s, tp %d: %s is off by %.2g, %.1f times fp32's error scaled", c.way.name, c.tp,
                     exact->tensors[i].name, grads_distance(&bf16, exact, i), ratio);
    }
    double whole = grads_whole_distance(&bf16, exact), loss = fabs(bf16.loss / exact->loss - 1);
    print_message("%s, %s weights, tp %d: all gradients %.1e, loss %.1e; a tensor at most %.2f of fp32's scaled\n",
                  c.way.name, initial ? "initial" : "random", c.tp, whole, loss, worst);
    if (initial) {
        int kind = c.way.factorization;
        assert_true(whole < (kind == LAX ? 0.2 : kind == FULL_RANK ? 1e-2 : 2.5e-2));
        assert_true(loss < 3e-4);
    } else {
        assert_true(loss < 1e-2);
    }
    grads_free(&bf16);
    grads_free(&fp32);
}

static void gradients_against_fp64(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * TINY_WAYS; i++) {
        struct tiny c = model(i / 2);
        struct grads exact;
        gradients_at(&c, i & 1, &exact);
        for (c.tp = 1; c.tp <= (i & 1 ? c.hk : 1); c.tp *= 2)
            gradients_at_degree(c, i & 1, &exact);
        grads_free(&exact);
    }
}

/* ---- losses ------------------------------------------------------------------------------ */

struct curve {
    struct tiny c;
    int steps;
    bool rounded; /* the initial weights, to bf16 */
    double loss[STEPS], norm[STEPS];
};

static void round_weights(struct engine *e)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        for (int64_t k = 0; k < t.tensor.nrows * t.tensor.ncols; k++)
            tiny_put(&t, k, from_bf16(to_bf16((float)tiny_get(&t, k))));
    }
}

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch batches[8];
    struct micro_batch micro[8];
    int n = c->global / c->micro / c->dp, dp_rank = rank / c->tp % c->dp;
    int rc = engine_init_weights(e, err);
    if (r->rounded)
        round_weights(e);
    for (int step = 0; step < r->steps && !rc; step++) {
        for (int m = 0; m < n; m++) {
            int64_t first = (int64_t)(step % 10) * c->global + (int64_t)(m * c->dp + dp_rank) * c->micro;
            tiny_batch(c, first, 0, &batches[m]);
            micro[m] = batches[m].micro;
        }
        struct step_request request = {.lr = c->lr};
        struct step_result result;
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && result.skipped)
            rc = error_set(err, ERR_INTERNAL, "step %d was skipped", step + 1);
        if (!rc && rank == 0) {
            r->loss[step] = result.loss;
            r->norm[step] = result.grad_norm;
        }
    }
    return rc;
}

static struct curve curve_of(const struct tiny *c, int steps, bool rounded)
{
    struct curve r = {.c = *c, .steps = steps, .rounded = rounded};
    struct plan p;
    tiny_plan(c, &p);
    tiny_run(&p, 1, train, &r, NULL);
    return r;
}

static double gap(const struct curve *a, const struct curve *b)
{
    double most = 0;
    for (int s = 0; s < a->steps; s++)
        most = fmax(most, fabs(a->loss[s] / b->loss[s] - 1));
    return most;
}

/* bf16's curve lies on fp32's at every degree: every loss within 4 %, the last ten in the mean within 2 % (LAX: 15 and
 * 10 %). How far small changes carry is up to the model, so there is a yardstick too: what comes of rounding fp32's
 * initial weights to bf16 and nothing after that, which for LAX's matrix gates alone is 7 %. */
static void losses_overlay(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = model(i);
        c.fp64 = false;
        c.lr = 3e-3;
        if (c.way.ungrouped || c.way.published)
            continue; /* no other roundings than those of the rest */
        struct curve fp32 = curve_of(&c, STEPS, false);
        struct curve rounded = curve_of(&c, STEPS, true);
        double yardstick = gap(&rounded, &fp32);
        bool lax = c.way.factorization == LAX;
        assert_true(fp32.loss[STEPS - 1] < 0.7 * fp32.loss[0]); /* it learns, so the comparison means something */
        c.bf16 = true;
        for (c.tp = 1; c.tp <= c.hk; c.tp *= c.hk) {
            struct curve bf16 = curve_of(&c, STEPS, false);
            double worst = gap(&bf16, &fp32), mean = 0;
            for (int s = STEPS - 10; s < STEPS; s++)
                mean += (bf16.loss[s] / fp32.loss[s] - 1) / 10;
            print_message("%s tp %d: %.3f to %.3f; off by at most %.1e (yardstick %.1e), the last ten by %.1e\n",
                          c.way.name, c.tp, fp32.loss[0], fp32.loss[STEPS - 1], worst, yardstick, mean);
            assert_true(worst < 5 * yardstick);
            assert_true(worst < (lax ? 0.15 : 0.04));
            assert_true(fabs(mean) < (lax ? 0.1 : 0.02));
        }
    }
}

/* ---- the same bits -------------------------------------------------------------------------- */

static void expect_same(const char *what, const struct curve *a, const struct curve *b)
{
    for (int s = 0; s < a->steps; s++)
        if (a->loss[s] != b->loss[s])
            fail_msg("%s: %s changes the loss of step %d from %.17g to %.17g", a->c.way.name, what, s + 1, a->loss[s],
                     b->loss[s]);
}

/* A border between stages carries bf16 as it is, replicas add fp32 gradients in one order, and every replica rounds the
 * same master weights: whether it has all of them or the pieces of zero 1, gathered as bf16. */
static void layouts_with_the_same_bits(void **state)
{
    (void)state;
    enum { SOME = 6 };
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = model(i);
        c.fp64 = false;
        c.bf16 = true;
        c.d = 32, c.f = 48, c.s = 8, c.micro = 1, c.global = 4;
        c.clip = 0; /* the norm is a sum in another order */
        struct curve one = curve_of(&c, SOME, false), again = curve_of(&c, SOME, false);
        expect_same("nothing", &one, &again);
        c.pp = 2;
        struct curve staged = curve_of(&c, SOME, false);
        if (!c.tied) /* else two gradients of a table are added in another order */
            expect_same("pp 2", &one, &staged);
        c.pp = 1;
        c.dp = 2;
        struct curve replicas = curve_of(&c, SOME, false);
        c.zero = 1;
        struct curve sharded = curve_of(&c, SOME, false);
        expect_same("zero 1", &replicas, &sharded);
    }
}

/* ---- a call of both types ----------------------------------------------------------------------- */

/* ONLINE's statistics are fp32 and travel with bf16 latents, in the same calls and elements as ever. */
static void online_payload_is_counted(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    c.fp64 = false;
    c.tp = 2;
    for (int ungrouped = 0; ungrouped < 2; ungrouped++) {
        struct comm_counters fp32[2], bf16[2];
        struct plan p;
        c.way.ungrouped = ungrouped;
        struct curve r = {.c = c, .steps = 1};
        c.bf16 = false;
        tiny_plan(&c, &p);
        tiny_run(&p, 1, train, &r, fp32);
        c.bf16 = true;
        tiny_plan(&c, &p);
        tiny_run(&p, 1, train, &r, bf16);
        const struct comm_count *a = &fp32[0].by[GROUP_TP][COMM_ALL_REDUCE][PASS_FORWARD];
        const struct comm_count *b = &bf16[0].by[GROUP_TP][COMM_ALL_REDUCE][PASS_FORWARD];
        /* Statistics a token: one of each norm, one of the last, the loss's maximum and its three sums. */
        int64_t statistics = p.T * (2 * p.L + 1 + 4);
        assert_true(a->calls == b->calls && a->elements == b->elements);
        assert_true(b->bytes == 2 * (b->elements - statistics) + 4 * statistics);
        a = &fp32[0].by[GROUP_TP][COMM_ALL_REDUCE][PASS_BACKWARD];
        b = &bf16[0].by[GROUP_TP][COMM_ALL_REDUCE][PASS_BACKWARD];
        assert_true(a->calls == b->calls && a->elements == b->elements && b->bytes == 2 * b->elements);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_against_fp64),
        cmocka_unit_test(losses_overlay),
        cmocka_unit_test(layouts_with_the_same_bits),
        cmocka_unit_test(online_payload_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
