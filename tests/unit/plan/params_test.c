/* Parameter slices tile their tensors exactly, groups are contiguous, and the closed forms
 * of communication equal hand-written ones. */
#include "tests/unit/plan/spec.h"

#include <math.h>
#include <stdlib.h>

enum {
    FULL_RANK = BOOST__FACTORIZATION__VALUE__FULL_RANK,
    COLA = BOOST__FACTORIZATION__VALUE__COLA,
    LAX = BOOST__FACTORIZATION__VALUE__LAX,
    IDENTITY = BOOST__LAX_GATE__VALUE__IDENTITY,
    LINEAR = BOOST__LAX_GATE__VALUE__LINEAR,
    TENSOR = BOOST__LAX_GATE__VALUE__TENSOR,
};
enum {
    FULL = BOOST__STRATEGY__VALUE__FULL,
    VANILLA = BOOST__STRATEGY__VALUE__VANILLA,
    BTP = BOOST__STRATEGY__VALUE__BTP,
};
struct way {
    int factorization, strategy, gate;
};
static const struct way ways[] = {
    {COLA, BTP, 0},     {FULL_RANK, FULL, 0},   {COLA, VANILLA, 0},     {LAX, BTP, IDENTITY},
    {LAX, BTP, LINEAR}, {LAX, VANILLA, LINEAR}, {LAX, VANILLA, TENSOR},
};
enum { WAYS = sizeof ways / sizeof ways[0] };

static void open_way(struct job *j, struct plan *p, const struct way *way, int tp, bool tied)
{
    job_open(j);
    j->spec->model->factorization = (Boost__Factorization__Value)way->factorization;
    j->spec->model->has_rank = way->factorization != FULL_RANK;
    j->spec->model->rank = j->spec->model->has_rank ? 6 : 0;
    j->spec->model->has_lax_gate = way->factorization == LAX;
    j->spec->model->lax_gate = (Boost__LaxGate__Value)way->gate;
    j->spec->parallel->has_strategy = 1;
    j->spec->parallel->strategy = (Boost__Strategy__Value)way->strategy;
    j->spec->parallel->tp = tp;
    j->spec->model->kv_heads = 6;
    j->spec->model->has_tie_embeddings = 1;
    j->spec->model->tie_embeddings = tied;
    job_plan(j, p);
}

static void open_plan(struct job *j, struct plan *p, int tp, bool tied)
{
    job_open(j);
    j->spec->parallel->tp = tp;
    j->spec->model->kv_heads = 6;
    j->spec->model->has_tie_embeddings = 1;
    j->spec->model->tie_embeddings = tied;
    job_plan(j, p);
}

/* Every element of every tensor is counted by one rank; a tensor that is not cut is whole on all of them. */
static void check_slices(const struct plan *p)
{
    int64_t parameters = 0;
    for (int64_t i = 0; i < plan_tensor_count(p); i++) {
        struct plan_tensor t;
        plan_tensor_at(p, 0, i, &t);
        int64_t cells = t.rows * t.cols;
        unsigned char *seen = calloc((size_t)cells, 1);
        for (int rank = 0; rank < p->tp; rank++) {
            struct plan_tensor s;
            plan_tensor_at(p, rank, i, &s);
            assert_string_equal(s.name, t.name);
            assert_true(s.rows == t.rows && s.cols == t.cols && s.offset == t.offset);
            assert_true(s.counted || (s.nrows == s.rows && s.ncols == s.cols));
            for (int64_t row = s.row0; s.counted && row < s.row0 + s.nrows; row++)
                for (int64_t col = s.col0; col < s.col0 + s.ncols; col++)
                    seen[row * t.cols + col]++;
        }
        for (int64_t k = 0; k < cells; k++)
            assert_int_equal(seen[k], 1);
        free(seen);
        parameters += cells;
    }
    assert_true(parameters == plan_parameters(p));
}

static void slices_tile_every_tensor(void **state)
{
    (void)state;
    const int degrees[] = {1, 2, 3, 6};
    for (int c = 0; c < 8 * WAYS; c++) {
        struct job j;
        struct plan p;
        open_way(&j, &p, &ways[c / 8], degrees[c % 8 / 2], c % 2);
        check_slices(&p);
        job_close(&j);
    }
}

static void find(const struct plan *p, int rank, const char *name, struct plan_tensor *t)
{
    for (int64_t i = 0; i < plan_tensor_count(p); i++) {
        plan_tensor_at(p, rank, i, t);
        if (!strcmp(t->name, name))
            return;
    }
    fail_msg("no tensor %s", name);
}

static void groups_are_contiguous_and_nothing_overlaps(void **state)
{
    (void)state;
    static const char *const groups[][3] = {
        {"layers.1.q.A", "layers.1.k.A", "layers.1.v.A"},
        {"layers.2.q.B", "layers.2.k.B", "layers.2.v.B"},
        {"layers.0.gate.A", "layers.0.up.A", NULL},
        {"layers.2.gate.B", "layers.2.up.B", NULL},
    };
    struct job j;
    struct plan p;
    open_plan(&j, &p, 3, false);
    for (int g = 0; g < 4; g++)
        for (int k = 1; k < 3 && groups[g][k]; k++) {
            struct plan_tensor a, b;
            find(&p, 1, groups[g][k - 1], &a);
            find(&p, 1, groups[g][k], &b);
            assert_true(b.offset == a.offset + a.nrows * a.ncols);
        }
    job_close(&j);
    for (int w = 0; w < WAYS; w++) {
        int64_t end = 0;
        open_way(&j, &p, &ways[w], 3, w & 1);
        for (int64_t i = 0; i < plan_tensor_count(&p); i++) {
            struct plan_tensor t;
            plan_tensor_at(&p, 0, i, &t);
            assert_true(t.offset >= end);
            end = t.offset + t.nrows * t.ncols;
        }
        assert_true(plan_parameter_elements(&p) >= end);
        job_close(&j);
    }
}

/* V = 300 in shards of 128: 128, 128, 44; with six ranks three of them have none. */
static void vocabulary_shards(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    open_plan(&j, &p, 6, false);
    const int64_t rows[] = {128, 128, 44, 0, 0, 0};
    for (int rank = 0; rank < 6; rank++) {
        struct plan_tensor t;
        find(&p, rank, "head", &t);
        assert_true(t.nrows == rows[rank]);
        assert_true(t.row0 == (rank < 3 ? 128 * rank : 300));
    }
    job_close(&j);
}

static void roles_decay_and_scale(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct plan_tensor t;
    open_plan(&j, &p, 2, false);
    find(&p, 0, "layers.0.norm1", &t);
    assert_false(t.decay);
    find(&p, 0, "embedding", &t);
    assert_false(t.decay);
    assert_true(t.init_std == 0.02);
    find(&p, 0, "layers.0.down.A", &t);
    assert_true(t.decay);
    /* sigma = r^-1/4 (in + out)^-1/4 with the dense widths 36 and 24 */
    assert_true(fabs(t.init_std - pow(5, -0.25) * pow(60, -0.25)) < 1e-15);
    p.decay_embeddings = true;
    find(&p, 0, "head", &t);
    assert_true(t.decay);
    job_close(&j);
}

/* The first layer has no crossing; a crossing's LayerNorm decays as little as a gain does. */
static void crossings_start_at_the_second_layer(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct plan_tensor t;
    struct way way = {LAX, BTP, TENSOR};
    open_way(&j, &p, &way, 2, false);
    for (int64_t i = 0; i < plan_tensor_count(&p); i++) {
        plan_tensor_at(&p, 0, i, &t);
        assert_false(t.layer == 0 && strstr(t.name, "cross"));
    }
    find(&p, 1, "layers.1.down.cross.gain", &t);
    assert_true(t.ncols == 6 && !t.decay && !t.counted && t.init == INIT_ONE);
    find(&p, 1, "layers.2.gate.cross.left", &t);
    assert_true(t.nrows == 2 && t.ncols == 2 && t.decay && !t.counted && t.init == INIT_UNIFORM);
    find(&p, 0, "layers.2.gate.cross.right", &t);
    assert_true(t.nrows == 3 && t.ncols == 3 && t.counted && fabs(t.init_std - 1.0 / 3) < 1e-15);
    job_close(&j);
    int64_t m, n;
    plan_gate_shape(256, &m, &n);
    assert_true(m == 16 && n == 16);
    plan_gate_shape(1024 * 3, &m, &n);
    assert_true(m == 48 && n == 64);
    plan_gate_shape(7, &m, &n);
    assert_true(m == 1 && n == 7);
}

/* The formulas of worker/plan/README.md written out once more, for T = 60, d = 24, r = 5, L = 3, two micro-batches. */
static void communication_in_closed_form(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct plan_comm_counts c;
    open_plan(&j, &p, 2, true);
    plan_comm_counts(&p, &c);
    struct plan_comm ar = c.tp[PLAN_ALL_REDUCE][PLAN_FORWARD];
    assert_int_equal(ar.calls, 2 * (3 * 4 + 3));
    assert_int_equal(ar.elements, 2 * (3 * (7 * 60 * 5 + 2 * 60) + 5 * 60));
    ar = c.tp[PLAN_ALL_REDUCE][PLAN_BACKWARD];
    assert_int_equal(ar.calls, 2 * 3 * 4);
    assert_int_equal(ar.elements, 2 * 3 * 7 * 60 * 5);
    assert_int_equal(c.tp[PLAN_ALL_GATHER][PLAN_FORWARD].elements, 2 * 60 * 24);
    assert_int_equal(c.tp[PLAN_ALL_GATHER][PLAN_BACKWARD].calls, 2);
    assert_int_equal(c.tp[PLAN_REDUCE_SCATTER][PLAN_FORWARD].calls, 2);
    assert_int_equal(c.tp[PLAN_REDUCE_SCATTER][PLAN_BACKWARD].elements, 2 * 60 * 24);
    assert_int_equal(c.tp[PLAN_ALL_REDUCE][PLAN_EVAL].calls, 3 * 4 + 3);
    assert_int_equal(c.world[PLAN_ALL_REDUCE][PLAN_STEP].elements, 8);
    job_close(&j);

    open_plan(&j, &p, 2, false);
    plan_comm_counts(&p, &c);
    assert_int_equal(c.tp[PLAN_ALL_GATHER][PLAN_BACKWARD].calls, 0);
    assert_int_equal(c.tp[PLAN_REDUCE_SCATTER][PLAN_FORWARD].calls, 0);
    job_close(&j);

    open_plan(&j, &p, 1, true);
    plan_comm_counts(&p, &c);
    struct plan_comm_counts none = {0};
    assert_memory_equal(&c, &none, sizeof c);
    job_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_tile_every_tensor),
        cmocka_unit_test(groups_are_contiguous_and_nothing_overlaps),
        cmocka_unit_test(vocabulary_shards),
        cmocka_unit_test(roles_decay_and_scale),
        cmocka_unit_test(crossings_start_at_the_second_layer),
        cmocka_unit_test(communication_in_closed_form),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
