/* Every collective of a step is counted, and the counts are the closed forms of worker/plan/README.md, both from
 * plan_comm_counts() and written out once more here. */
#include "tests/unit/worker/tiny.h"

/* One step and one evaluation. */
static int step_and_eval(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct tiny *c = arg;
    struct tiny_batch batches[4];
    struct micro_batch micro[4];
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    double loss, tokens;
    (void)rank;
    for (int i = 0; i < c->global / c->micro; i++) {
        tiny_batch(c, (int64_t)i * c->micro, 0, &batches[i]);
        micro[i] = batches[i].micro;
    }
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    if (!rc)
        rc = engine_eval(e, micro, &loss, &tokens, err);
    return rc;
}

static void expect(const struct comm_counters *c, enum comm_group g, enum comm_kind k, enum comm_pass p, int64_t calls,
                   int64_t elements, int64_t element_bytes)
{
    const struct comm_count *got = &c->by[g][k][p];
    if (got->calls != calls || got->elements != elements || got->bytes != elements * element_bytes)
        fail_msg("%s %s %s: %lld calls, %lld elements, %lld bytes; expected %lld, %lld", comm_group_name(g),
                 comm_kind_name(k), comm_pass_name(p), (long long)got->calls, (long long)got->elements,
                 (long long)got->bytes, (long long)calls, (long long)elements);
}

static void expect_plan(const struct comm_counters *c, const struct plan *p, int64_t element_bytes)
{
    struct plan_comm_counts formula;
    plan_comm_counts(p, &formula);
    for (int k = 0; k < COMM_KIND_COUNT; k++)
        for (int pass = 0; pass < PASS_COUNT; pass++) {
            const struct plan_comm *tp = &formula.tp[k][pass], *world = &formula.world[k][pass];
            expect(c, GROUP_TP, k, pass, tp->calls, tp->elements, element_bytes);
            expect(c, GROUP_WORLD, k, pass, world->calls, world->elements, 8);
            expect(c, GROUP_PP, k, pass, 0, 0, 1);
            expect(c, GROUP_DP, k, pass, 0, 0, 1);
        }
}

/* What a micro-batch of one way has to count, with [kind][pass] calls and elements of forward, backward and recompute.
 */
struct expected {
    struct comm_count by[COMM_KIND_COUNT][PASS_RECOMPUTE + 1];
};
static void add(struct expected *x, enum comm_kind kind, enum comm_pass pass, int64_t calls, int64_t elements)
{
    x->by[kind][pass].calls += calls;
    x->by[kind][pass].elements += elements;
}

static void btp_layers(struct expected *x, const struct tiny *c, int64_t T)
{
    int64_t calls = (c->way.ungrouped ? 7 : 4) * (c->way.overlap ? 2 : 1), latents = 7 * T * c->r;
    add(x, COMM_ALL_REDUCE, PASS_FORWARD, c->L * (calls + (c->way.sync ? 2 : 0)), c->L * (latents + 2 * T));
    add(x, COMM_ALL_REDUCE, PASS_BACKWARD, c->L * (calls + (c->way.sync ? 2 : 0)),
        c->L * (latents + (c->way.sync ? 2 * T : 0)));
}

static void vanilla_layers(struct expected *x, const struct tiny *c, int64_t T)
{
    int64_t L = c->L, d = c->d, f = c->f, kv = c->hk * (d / c->h);
    int64_t apart = c->way.ungrouped;
    if (c->way.factorization == LAX) {
        int64_t calls = (L - 1) * (apart ? 7 : 4);
        add(x, COMM_ALL_REDUCE, PASS_FORWARD, calls, (L - 1) * 7 * 2 * T);
        add(x, COMM_ALL_REDUCE, PASS_BACKWARD, calls, (L - 1) * 7 * 2 * T);
        if (c->way.gate != IDENTITY) {
            add(x, COMM_ALL_GATHER, PASS_FORWARD, calls, (L - 1) * 7 * T * c->r);
            add(x, c->way.gate == LINEAR ? COMM_REDUCE_SCATTER : COMM_ALL_GATHER, PASS_BACKWARD, calls,
                (L - 1) * 7 * T * c->r);
        }
    }
    if (c->way.published) { /* rows (b) and (b') */
        add(x, COMM_ALL_REDUCE, PASS_FORWARD, 7 * L, L * T * (3 * d + 2 * kv + 2 * f));
        add(x, COMM_ALL_REDUCE, PASS_BACKWARD, (apart ? 7 : 4) * L, L * T * ((apart ? 6 : 3) * d + f));
        return;
    }
    add(x, COMM_REDUCE_SCATTER, PASS_FORWARD, 3 * L, L * T * (d + 2 * kv));
    add(x, COMM_ALL_GATHER, PASS_FORWARD, L, L * T * d);
    add(x, COMM_ALL_REDUCE, PASS_FORWARD, 4 * L, L * T * (2 * d + 2 * f));
    add(x, COMM_ALL_GATHER, PASS_BACKWARD, 3 * L, L * T * (d + 2 * kv));
    add(x, COMM_REDUCE_SCATTER, PASS_BACKWARD, L, L * T * d);
    add(x, COMM_ALL_REDUCE, PASS_BACKWARD, (apart ? 6 : 3) * L, L * T * ((apart ? 5 : 2) * d + f));
}

/* LOW_RANK under BTP: nothing at all. VANILLA runs again what B gives inside a block, LAYER all up to down's A. */
static void reforward(struct expected *x, const struct tiny *c, int64_t T)
{
    int64_t L = c->L, d = c->d, f = c->f, kv = c->hk * (d / c->h);
    if (c->way.strategy == BTP && c->recompute == LAYER)
        add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE,
            L * ((c->way.ungrouped ? 7 : 4) * (c->way.overlap ? 2 : 1) + (c->way.sync ? 2 : 0)),
            L * (7 * T * c->r + 2 * T));
    if (c->way.strategy == FULL)
        add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE, L, L * T * d);
    if (c->way.strategy != VANILLA)
        return;
    if (c->way.published) { /* T(3d + 2f) with k and v as wide as q */
        add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE, 5 * L, L * T * (d + 2 * kv + 2 * f));
    } else {
        add(x, COMM_REDUCE_SCATTER, PASS_RECOMPUTE, 3 * L, L * T * (d + 2 * kv));
        add(x, COMM_ALL_GATHER, PASS_RECOMPUTE, L, L * T * d);
        add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE, 2 * L, L * T * 2 * f);
    }
    if (c->recompute != LAYER)
        return;
    add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE, L, L * T * d);
    if (c->way.factorization == LAX) {
        int64_t calls = (L - 1) * (c->way.ungrouped ? 7 : 4);
        add(x, COMM_ALL_REDUCE, PASS_RECOMPUTE, calls, (L - 1) * 7 * 2 * T);
        if (c->way.gate != IDENTITY)
            add(x, COMM_ALL_GATHER, PASS_RECOMPUTE, calls, (L - 1) * 7 * T * c->r);
    }
}

static void edges(struct expected *x, const struct tiny *c, int64_t T)
{
    int64_t Td = T * c->d;
    add(x, COMM_ALL_REDUCE, PASS_FORWARD, 2, 4 * T); /* maximum, three sums */
    if (c->way.strategy == BTP) {
        add(x, COMM_ALL_REDUCE, PASS_FORWARD, 1, T); /* the last norm's statistic */
        add(x, COMM_ALL_GATHER, PASS_FORWARD, 1, Td);
        add(x, COMM_REDUCE_SCATTER, PASS_BACKWARD, 1, Td);
        add(x, COMM_REDUCE_SCATTER, PASS_FORWARD, c->tied, c->tied * Td);
        add(x, COMM_ALL_GATHER, PASS_BACKWARD, c->tied, c->tied * Td);
    } else {
        add(x, COMM_ALL_REDUCE, PASS_FORWARD, 1, Td);
        add(x, COMM_ALL_REDUCE, PASS_BACKWARD, 1, Td);
    }
}

static void check_counters(struct tiny c)
{
    struct plan p;
    struct comm_counters counters[4];
    struct expected x = {0};
    int64_t T = c.micro * c.s, micro = c.global / c.micro, size = c.fp64 ? 8 : 4;
    tiny_plan(&c, &p);
    tiny_run(&p, 1, step_and_eval, &c, counters);
    edges(&x, &c, T);
    if (c.recompute)
        reforward(&x, &c, T);
    if (c.way.strategy == BTP) {
        btp_layers(&x, &c, T);
    } else if (c.way.strategy == VANILLA) {
        vanilla_layers(&x, &c, T);
    } else {
        add(&x, COMM_ALL_REDUCE, PASS_FORWARD, 2 * c.L, c.L * 2 * T * c.d);
        add(&x, COMM_ALL_REDUCE, PASS_BACKWARD, 2 * c.L, c.L * 2 * T * c.d);
    }
    for (int rank = 0; rank < c.tp; rank++) {
        const struct comm_counters *n = &counters[rank];
        expect_plan(n, &p, size);
        expect(n, GROUP_WORLD, COMM_ALL_REDUCE, PASS_STEP, 1, 8, 8);
        for (int k = 0; k < COMM_KIND_COUNT; k++) {
            const struct comm_count *forward = &x.by[k][PASS_FORWARD], *backward = &x.by[k][PASS_BACKWARD];
            expect(n, GROUP_TP, k, PASS_FORWARD, micro * forward->calls, micro * forward->elements, size);
            expect(n, GROUP_TP, k, PASS_BACKWARD, micro * backward->calls, micro * backward->elements, size);
            expect(n, GROUP_TP, k, PASS_EVAL, forward->calls, forward->elements, size);
            const struct comm_count *again = &x.by[k][PASS_RECOMPUTE];
            expect(n, GROUP_TP, k, PASS_RECOMPUTE, micro * again->calls, micro * again->elements, size);
        }
    }
}

static void equal_the_formulas(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * TINY_WAYS; i++) {
        struct tiny c = tiny_of(i / 4);
        bool low_rank = c.way.factorization != FULL_RANK;
        c.recompute = (int[]){0, LAYER, low_rank ? LOW_RANK : 0, 0}[(i + i / 4) % 4];
        c.tied = i & 1;
        c.fp64 = (i ^ i >> 2) & 1;
        c.tp = i & 2 ? 4 : 2;
        c.hk = i & 2 ? 4 : 2;
        c.micro = 2, c.global = 6;
        check_counters(c);
    }
}

/* One rank makes no call and counts none. */
static void one_rank_is_silent(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    struct plan p;
    struct comm_counters counters, nothing = {0};
    c.tied = true;
    for (int i = 0; i < TINY_WAYS; i++) {
        c.way = tiny_ways[i];
        tiny_plan(&c, &p);
        tiny_run(&p, 1, step_and_eval, &c, &counters);
        assert_memory_equal(&counters, &nothing, sizeof counters);
        expect_plan(&counters, &p, 8);
    }
}

/* In bf16 statistics are fp32: of every way's bytes two an element, and two more for each that the plan counts as one.
 */
static void bf16_has_statistics_of_fp32(void **state)
{
    (void)state;
    for (int i = 0; i < 3 * TINY_WAYS; i++) {
        struct tiny c = tiny_of(i / 3);
        struct plan p;
        struct comm_counters counters[2];
        struct plan_comm_counts formula;
        bool low_rank = c.way.factorization != FULL_RANK;
        int64_t statistics = 0;
        c.recompute = (int[]){0, LAYER, low_rank ? LOW_RANK : 0}[i % 3];
        c.fp64 = false;
        c.bf16 = true;
        c.tp = c.hk = 2;
        c.micro = 2, c.global = 6;
        tiny_plan(&c, &p);
        tiny_run(&p, 1, step_and_eval, &c, counters);
        plan_comm_counts(&p, &formula);
        for (int k = 0; k < COMM_KIND_COUNT; k++)
            for (int pass = 0; pass < PASS_COUNT; pass++) {
                const struct comm_count *got = &counters[1].by[GROUP_TP][k][pass];
                const struct plan_comm *want = &formula.tp[k][pass];
                assert_true(got->calls == want->calls && got->elements == want->elements);
                assert_true(got->bytes == 2 * want->elements + 2 * want->statistics);
                statistics += want->statistics;
            }
        assert_true(statistics > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_the_formulas),
        cmocka_unit_test(one_rank_is_silent),
        cmocka_unit_test(bf16_has_statistics_of_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
