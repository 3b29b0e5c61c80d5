/* Training in bf16, whose activations and statistics are of different types: gradients and losses against fp64 in every
 * way and degree, what is the same bits as something else, and what a call of both types counts.
 *
 * No bound here is a number of its own. An error may be twice that of the control of tiny_rounded.h at its worst of so
 * many draws: roundings to bf16 wherever something is stored, and exact arithmetic. (The same rule by which an
 * attention in bf16 is compared with a plain one in bf16.) The control also says what is due to the model: LAX's
 * gradients are off by up to a tenth, ten times as much as a dense model's, for the roundings alone.
 *
 * time limit: 300 s */
#include "tests/unit/worker/tiny_rounded.h"

enum { DRAWS = 8, CURVES = 3, STEPS = 60 };

static struct tiny model(int way)
{
    struct tiny c = tiny_of(way);
    c.d = 64, c.f = 96, c.h = 4, c.hk = way & 1 ? 4 : 2, c.V = 40, c.s = 16, c.micro = c.global = 4;
    c.r = c.way.factorization == LAX && c.way.gate == TENSOR ? 12 : 16;
    c.tied = way >> 1 & 1;
    c.mlp_silu = way & 1;
    return c;
}

/* What the control's draws allow. Twice the worst of them; but few numbers may be right by chance in all draws, so of
 * the loss, and of tensors with less than FEW elements, six times their root mean square, which a Student's t of DRAWS
 * degrees of freedom exceeds once in 3000 times. */
enum { FEW = 64 };
struct limits {
    double tensor[TINY_TENSORS], whole, loss;
};
static struct limits limits_of(const struct tiny *c, bool initial, const struct grads *exact)
{
    struct limits most = {0}, squares = {0};
    for (int draw = 1; draw <= DRAWS; draw++) {
        struct grads g;
        rounded_gradients(c, initial, BF16_DIGITS, (uint64_t)draw, &g);
        for (int64_t i = 0; i < exact->count; i++) {
            double error = grads_distance(&g, exact, i);
            most.tensor[i] = fmax(most.tensor[i], error);
            squares.tensor[i] += error * error / DRAWS;
        }
        most.whole = fmax(most.whole, grads_whole_distance(&g, exact));
        squares.loss += pow(g.loss / exact->loss - 1, 2) / DRAWS;
        grads_free(&g);
    }
    most.whole *= 2;
    most.loss = 6 * sqrt(squares.loss);
    for (int64_t i = 0; i < exact->count; i++) {
        bool few = exact->tensors[i].rows * exact->tensors[i].cols < FEW;
        most.tensor[i] = few ? 6 * sqrt(squares.tensor[i]) : 2 * most.tensor[i];
    }
    return most;
}

static void gradients_at_degree(struct tiny c, bool initial, const struct grads *exact)
{
    struct limits limits = limits_of(&c, initial, exact);
    struct grads bf16;
    double worst = 0;
    c.fp64 = false;
    c.bf16 = true;
    gradients_at(&c, initial, &bf16);
    for (int64_t i = 0; i < exact->count; i++) {
        double error = grads_distance(&bf16, exact, i);
        worst = fmax(worst, error / limits.tensor[i]);
        if (!(error <= limits.tensor[i]))
            fail_msg("%s, tp %d: %s is off by %.2g, limit %.2g", c.way.name, c.tp, exact->tensors[i].name, error,
                     limits.tensor[i]);
    }
    double whole = grads_whole_distance(&bf16, exact), loss = fabs(bf16.loss / exact->loss - 1);
    print_message(
        "%s, %s weights, tp %d: all gradients %.1e (limit %.1e), loss %.1e (%.1e); a tensor %.2f of its limit\n",
        c.way.name, initial ? "initial" : "random", c.tp, whole, limits.whole, loss, limits.loss, worst);
    assert_true(whole <= limits.whole);
    assert_true(loss <= limits.loss);
    grads_free(&bf16);
}

/* The control runs at the same degree: partial sums are stored, and so rounded. */
static void gradients_against_fp64(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * TINY_WAYS; i++) {
        struct tiny c = model(i / 2);
        bool initial = i & 1;
        struct grads exact;
        if (!initial && (c.way.ungrouped || c.way.published || c.way.overlap))
            continue; /* other sums, but no roundings other than those of the rest */
        gradients_at(&c, initial, &exact);
        for (c.tp = 1; c.tp <= (initial ? c.hk : 1); c.tp *= 2)
            gradients_at_degree(c, initial, &exact);
        grads_free(&exact);
    }
}

/* ---- losses ------------------------------------------------------------------------------ */

struct curve {
    struct tiny c;
    int steps;
    bool control; /* whose weights are rounded for each step */
    double loss[STEPS], norm[STEPS];
};

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch batches[8];
    struct micro_batch micro[8];
    int n = c->global / c->micro / c->dp, dp_rank = rank / c->tp % c->dp;
    int rc = engine_init_weights(e, err);
    for (int step = 0; step < r->steps && !rc; step++) {
        for (int m = 0; m < n; m++) {
            int64_t first = (int64_t)(step % 10) * c->global + (int64_t)(m * c->dp + dp_rank) * c->micro;
            tiny_batch(c, first, 0, &batches[m]);
            micro[m] = batches[m].micro;
        }
        struct step_request request = {.lr = c->lr};
        struct step_result result;
        double *masters[TINY_TENSORS];
        if (r->control)
            rounded_weights(e, masters);
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (r->control)
            rounded_masters(e, masters);
        if (!rc && result.skipped)
            rc = error_set(err, ERR_INTERNAL, "step %d was skipped", step + 1);
        if (!rc && rank == 0) {
            r->loss[step] = result.loss;
            r->norm[step] = result.grad_norm;
        }
    }
    return rc;
}

static struct curve curve_on(const struct tiny *c, int steps, const struct kernels *control)
{
    struct curve r = {.c = *c, .steps = steps, .control = control != NULL};
    struct plan p;
    tiny_plan(c, &p);
    tiny_run_on(&p, (struct tiny_device){.kernels = control ? control : tiny_kernels(&p)}, 1, train, &r, NULL);
    return r;
}

static struct curve curve_of(const struct tiny *c, int steps)
{
    return curve_on(c, steps, NULL);
}

static double gap(const struct curve *a, const struct curve *b)
{
    double most = 0;
    for (int s = 0; s < a->steps; s++)
        most = fmax(most, fabs(a->loss[s] / b->loss[s] - 1));
    return most;
}

/* The mean distance of the last ten. */
static double late(const struct curve *a, const struct curve *b)
{
    double mean = 0;
    for (int s = a->steps - 10; s < a->steps; s++)
        mean += fabs(a->loss[s] / b->loss[s] - 1) / 10;
    return mean;
}

/* bf16's curve lies as near to fp64's as the control's does; which is how far the model carries roundings in so many
 * steps, whoever makes them. */
static void losses_overlay(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = model(i);
        c.d = 32, c.f = 48;
        c.lr = 3e-3;
        if (c.way.ungrouped || c.way.published || c.way.overlap || c.way.sync)
            continue; /* no roundings other than those of the rest */
        struct curve exact = curve_of(&c, STEPS);
        assert_true(exact.loss[STEPS - 1] < 0.8 * exact.loss[0]); /* it learns, so the comparison means something */
        double most = 0, last = 0;
        for (int draw = 1; draw <= CURVES; draw++) {
            struct curve control = curve_on(&c, STEPS, rounded_kernels(&c, BF16_DIGITS, (uint64_t)draw));
            most = fmax(most, gap(&control, &exact));
            last = fmax(last, late(&control, &exact));
        }
        c.fp64 = false;
        c.bf16 = true;
        for (c.tp = 1; c.tp <= c.hk; c.tp *= c.hk) {
            struct curve bf16 = curve_of(&c, STEPS);
            print_message("%s tp %d: %.3f to %.3f; off by at most %.1e (control %.1e), the last ten by %.1e (%.1e)\n",
                          c.way.name, c.tp, exact.loss[0], exact.loss[STEPS - 1], gap(&bf16, &exact), most,
                          late(&bf16, &exact), last);
            assert_true(gap(&bf16, &exact) <= 2 * most);
            assert_true(late(&bf16, &exact) <= 2 * last);
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
        struct curve one = curve_of(&c, SOME), again = curve_of(&c, SOME);
        expect_same("nothing", &one, &again);
        c.pp = 2;
        struct curve staged = curve_of(&c, SOME);
        if (!c.tied) /* else two gradients of a table are added in another order */
            expect_same("pp 2", &one, &staged);
        c.pp = 1;
        c.dp = 2;
        struct curve replicas = curve_of(&c, SOME);
        c.zero = 1;
        struct curve sharded = curve_of(&c, SOME);
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
