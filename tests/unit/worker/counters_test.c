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

static void equal_the_formulas(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct tiny c = tiny_default;
        bool tied = c.tied = i & 1;
        c.fp64 = i & 2;
        c.way.factorization = i & 4 ? SVD : COLA;
        c.tp = i & 4 ? 4 : 2;
        c.micro = 2, c.global = 6;
        struct plan p;
        struct comm_counters counters[4];
        tiny_plan(&c, &p);
        tiny_run(&p, 1, step_and_eval, &c, counters);
        int64_t T = c.micro * c.s, d = c.d, r = c.r, L = c.L, micro = 3, size = c.fp64 ? 8 : 4;
        for (int rank = 0; rank < c.tp; rank++) {
            const struct comm_counters *n = &counters[rank];
            expect_plan(n, &p, size);
            /* Layers: four calls each way, 7Tr, and the statistic of two norms on the way forward.
             * Edges: statistic T, maximum T, three sums 3T; all-gather of the head's input. */
            expect(n, GROUP_TP, COMM_ALL_REDUCE, PASS_FORWARD, micro * (4 * L + 3),
                   micro * (L * (7 * T * r + 2 * T) + 5 * T), size);
            expect(n, GROUP_TP, COMM_ALL_REDUCE, PASS_BACKWARD, micro * 4 * L, micro * L * 7 * T * r, size);
            expect(n, GROUP_TP, COMM_ALL_GATHER, PASS_FORWARD, micro, micro * T * d, size);
            expect(n, GROUP_TP, COMM_REDUCE_SCATTER, PASS_BACKWARD, micro, micro * T * d, size);
            expect(n, GROUP_TP, COMM_REDUCE_SCATTER, PASS_FORWARD, tied * micro, tied * micro * T * d, size);
            expect(n, GROUP_TP, COMM_ALL_GATHER, PASS_BACKWARD, tied * micro, tied * micro * T * d, size);
            expect(n, GROUP_TP, COMM_ALL_REDUCE, PASS_EVAL, 4 * L + 3, L * (7 * T * r + 2 * T) + 5 * T, size);
            expect(n, GROUP_WORLD, COMM_ALL_REDUCE, PASS_STEP, 1, 8, 8);
            for (int k = 0; k < COMM_KIND_COUNT; k++)
                expect(n, GROUP_TP, k, PASS_RECOMPUTE, 0, 0, size);
        }
    }
}

/* FULL, written out: two all-reduces of Td a layer each way, the embedding's and the head's, and the loss. */
static void full_equals_the_formulas(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct tiny c = tiny_default;
        c.way = (struct tiny_way){"FULL", FULL_RANK, FULL};
        c.tied = i & 1;
        c.tp = i & 2 ? 4 : 2;
        c.micro = 2, c.global = 6;
        struct plan p;
        struct comm_counters counters[4];
        tiny_plan(&c, &p);
        tiny_run(&p, 1, step_and_eval, &c, counters);
        int64_t T = c.micro * c.s, d = c.d, L = c.L, micro = 3;
        for (int rank = 0; rank < c.tp; rank++) {
            const struct comm_counters *n = &counters[rank];
            expect_plan(n, &p, 8);
            expect(n, GROUP_TP, COMM_ALL_REDUCE, PASS_FORWARD, micro * (2 * L + 3),
                   micro * (L * 2 * T * d + T * d + 4 * T), 8);
            expect(n, GROUP_TP, COMM_ALL_REDUCE, PASS_BACKWARD, micro * (2 * L + 1), micro * (L * 2 * T * d + T * d),
                   8);
            expect(n, GROUP_TP, COMM_ALL_GATHER, PASS_FORWARD, 0, 0, 8);
            expect(n, GROUP_TP, COMM_REDUCE_SCATTER, PASS_BACKWARD, 0, 0, 8);
        }
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_the_formulas),
        cmocka_unit_test(full_equals_the_formulas),
        cmocka_unit_test(one_rank_is_silent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
