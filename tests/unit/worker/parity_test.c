/* The same run at tp = 1, 2 and 4: losses and gradient norms of 50 steps from the real initial
 * weights. In fp64 nothing but the order of sums differs. In fp32 the yardstick is what a mere
 * change of that order does to a run on one rank. */
#include "tests/unit/worker/tiny.h"

enum { STEPS = 50 };

/* The same run with its sums in another order: the samples of a step reversed (sums over rows), or
 * every width of the model reversed, whole heads for the attention (sums over columns). */
enum order { ORDER_GIVEN = 0, ORDER_ROWS = 1, ORDER_COLUMNS = 2, ORDERS = 4 };

struct curve {
    struct tiny c;
    int order;
    double loss[STEPS], norm[STEPS];
};

/* Index i of a width of n made of units of `unit` elements, the units in reverse. */
static int64_t reverse(int64_t i, int64_t n, int64_t unit)
{
    return (n / unit - 1 - i / unit) * unit + i % unit;
}

/* The model with its hidden, MLP and latent columns and its heads in reverse: the same function. */
static void reverse_columns(struct engine *e, const struct tiny *c)
{
    int64_t head = c->d / c->h;
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        const struct plan_tensor *p = &t.tensor;
        bool by_heads = p->projection >= PROJ_Q && p->projection <= PROJ_V;
        bool gives = p->role == ROLE_UP || p->role == ROLE_DENSE, takes = p->role == ROLE_DOWN || p->role == ROLE_DENSE;
        int64_t n = p->rows * p->cols;
        double *old = calloc((size_t)n, sizeof *old);
        for (int64_t k = 0; k < n; k++)
            old[k] = tiny_get(&t, k);
        for (int64_t row = 0; row < p->rows; row++)
            for (int64_t col = 0; col < p->cols; col++) {
                int64_t from_row = row, from_col = reverse(col, p->cols, 1);
                if (p->role == ROLE_DOWN || p->role == ROLE_GATE || p->role == ROLE_GATE_LEFT)
                    from_row = reverse(row, p->rows, 1);
                if (takes && p->projection == PROJ_O)
                    from_col = reverse(col, p->cols, head);
                if (gives)
                    from_row = reverse(row, p->rows, by_heads ? head : 1);
                tiny_put(&t, row * p->cols + col, old[from_row * p->cols + from_col]);
            }
        free(old);
    }
}

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    int accumulation = c->global / c->micro;
    struct tiny_batch *batches = calloc((size_t)accumulation, sizeof *batches);
    struct micro_batch micro[8];
    int rc = engine_init_weights(e, err);
    if (r->order & ORDER_COLUMNS)
        reverse_columns(e, c);
    bool reversed = r->order & ORDER_ROWS;
    for (int step = 0; step < STEPS && !rc; step++) {
        int64_t first = (int64_t)(step % 10) * c->global; /* ten batches over and over: the loss falls */
        for (int i = 0; i < accumulation; i++) {
            tiny_batch(c, first + (int64_t)i * c->micro, 0, &batches[i]);
            if (reversed) /* sequences within the micro-batch */
                for (int j = 0; j < c->micro; j++) {
                    struct tiny one = *c;
                    struct tiny_batch b;
                    one.micro = 1;
                    tiny_batch(&one, first + (int64_t)i * c->micro + c->micro - 1 - j, 0, &b);
                    memcpy(batches[i].inputs + j * c->s, b.inputs, (size_t)c->s * sizeof(int32_t));
                    memcpy(batches[i].targets + j * c->s, b.targets, (size_t)c->s * sizeof(int32_t));
                }
            micro[reversed ? accumulation - 1 - i : i] = batches[i].micro;
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
    free(batches);
    return rc;
}

static void run_curve(const struct tiny *c, int tp, int order, struct curve *out)
{
    struct plan p;
    *out = (struct curve){.c = *c, .order = order};
    out->c.tp = tp;
    tiny_plan(&out->c, &p);
    tiny_run(&p, 1, train, out, NULL);
}

static struct tiny config(int way, bool fp64)
{
    struct tiny c = tiny_default;
    c.way = tiny_ways[way];
    c.fp64 = fp64;
    c.d = 32, c.f = 48, c.r = 8, c.h = 8, c.hk = way & 1 ? 4 : 8, c.V = 40, c.s = 16, c.micro = 2, c.global = 4;
    c.lr = 1e-2;
    c.tied = c.mlp_silu = way & 1;
    if (c.way.factorization == LAX) { /* a LayerNorm of few columns divides by what may be little by chance */
        c.r = 16;
        c.lr = 3e-3;
    }
    return c;
}

static double relative(double a, double b)
{
    return fabs(a - b) / fabs(b);
}

static void fp64_any_degree(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = config(i, true);
        struct curve one, many;
        run_curve(&c, 1, ORDER_GIVEN, &one);
        assert_true(one.loss[STEPS - 1] < 0.9 * one.loss[0]); /* it learns, so the comparison means something */
        for (int tp = 2; tp <= 4; tp *= 2) {
            double loss = 0, norm = 0;
            run_curve(&c, tp, ORDER_GIVEN, &many);
            for (int s = 0; s < STEPS; s++) {
                loss = fmax(loss, relative(many.loss[s], one.loss[s]));
                norm = fmax(norm, relative(many.norm[s], one.norm[s]));
            }
            print_message("fp64 %s tp %d: loss %.1e, gradient norm %.1e\n", c.way.name, tp, loss, norm);
            assert_true(loss < 1e-10);
            assert_true(norm < 1e-6);
        }
    }
}

static void fp32_any_degree(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = config(i, false);
        struct curve one, other[ORDERS], many;
        int plain = c.way.factorization == LAX ? 1 : 2;
        if (c.way.ungrouped || c.way.published || c.way.sync || c.way.overlap)
            continue; /* no other products than those of the rest */
        run_curve(&c, 1, ORDER_GIVEN, &one);
        for (int order = 1; order < ORDERS; order++)
            run_curve(&c, 1, order, &other[order]);
        for (int tp = 2; tp <= 4; tp *= 2) {
            double gap = 0, norm_gap = 0, worst_early = 0, worst_ratio = 0, worst_norm = 0;
            run_curve(&c, tp, ORDER_GIVEN, &many);
            for (int s = 0; s < STEPS; s++) {
                double off = relative(many.loss[s], one.loss[s]), norm_off = relative(many.norm[s], one.norm[s]);
                for (int order = 1; order < ORDERS; order++) {
                    gap = fmax(gap, relative(other[order].loss[s], one.loss[s]));
                    norm_gap = fmax(norm_gap, relative(other[order].norm[s], one.norm[s]));
                }
                if (s < 5)
                    worst_early = fmax(worst_early, off);
                else
                    worst_ratio = fmax(worst_ratio, off / gap);
                /* Adam's first updates are nearly signs, so roundings grow at once: the plain bound is for
                 * the steps before that shows (LAX: the first), the same yardstick for those behind. */
                if (s < plain)
                    worst_norm = fmax(worst_norm, norm_off);
                else
                    worst_ratio = fmax(worst_ratio, norm_off / norm_gap);
            }
            print_message("fp32 %s tp %d: steps 1-5 loss %.1e, 1-%d norm %.1e; later %.2f of the gap (%.1e)\n",
                          c.way.name, tp, worst_early, plain, worst_norm, worst_ratio, gap);
            assert_true(worst_early < 1e-6);
            assert_true(worst_norm < 1e-6);
            assert_true(worst_ratio < 10);
        }
    }
}

/* Two micro-batches of two sequences are one of four, up to the order of sums; also when they have
 * unequal numbers of tokens with loss. */
static int one_gradient_step(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    (void)rank;
    struct tiny_batch batches[2];
    struct micro_batch micro[2];
    for (int i = 0; i < c->global / c->micro; i++) {
        tiny_batch(c, (int64_t)i * c->micro, 0, &batches[i]);
        for (int k = 0; k < c->micro * c->s; k++) /* the first two sequences lose most of their targets */
            if (i * c->micro * c->s + k < 2 * c->s - 3)
                batches[i].targets[k] = -1;
        micro[i] = batches[i].micro;
    }
    int rc = engine_init_weights(e, err);
    for (int s = 0; s < 3 && !rc; s++) {
        struct step_request request = {.lr = 1e-2};
        struct step_result result;
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        r->loss[s] = result.loss;
        r->norm[s] = result.grad_norm;
    }
    return rc;
}

static void accumulation_is_a_larger_batch(void **state)
{
    (void)state;
    struct curve two = {.c = config(0, true)}, one;
    struct plan p;
    one = two;
    one.c.micro = 4;
    tiny_plan(&two.c, &p);
    assert_true(p.accumulation == 2);
    tiny_run(&p, 1, one_gradient_step, &two, NULL);
    tiny_plan(&one.c, &p);
    assert_true(p.accumulation == 1);
    tiny_run(&p, 1, one_gradient_step, &one, NULL);
    for (int s = 0; s < 3; s++) {
        assert_true(relative(two.loss[s], one.loss[s]) < 1e-12);
        assert_true(relative(two.norm[s], one.norm[s]) < 1e-11);
    }
}

/* The CPU is always deterministic: the same job again gives the same bits, whatever the threads and ranks. */
static void runs_repeat_bit_for_bit(void **state)
{
    (void)state;
    struct tiny c = config(0, false);
    for (c.tp = 1; c.tp <= 2; c.tp++) {
        struct curve first, again;
        struct plan p;
        tiny_plan(&c, &p);
        first = again = (struct curve){.c = c};
        tiny_run(&p, 2, train, &first, NULL);
        tiny_run(&p, 2, train, &again, NULL);
        assert_memory_equal(first.loss, again.loss, sizeof first.loss);
        assert_memory_equal(first.norm, again.norm, sizeof first.norm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp64_any_degree),
        cmocka_unit_test(fp32_any_degree),
        cmocka_unit_test(accumulation_is_a_larger_batch),
        cmocka_unit_test(runs_repeat_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
