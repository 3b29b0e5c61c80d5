/* What a step promises besides its numbers: skipping, votes, padding, decay, evaluation without
 * traces, refusals. */
#include "tests/unit/worker/tiny.h"

#include "worker/plan/arena.h"

/* ---- comparing whole states ---- */

struct snapshot {
    double *values[STATE_KINDS]; /* weights, moments (gradients are not state) */
    int64_t n;
    double adam_t;
};

static void take(struct engine *e, struct snapshot *s)
{
    s->n = 0;
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        s->n += t.tensor.nrows * t.tensor.ncols;
    }
    for (int kind = 0; kind < STATE_GRAD; kind++) {
        s->values[kind] = calloc((size_t)s->n, sizeof(double));
        for (int64_t i = 0, at = 0; i < engine_tensor_count(e); i++) {
            struct state_tensor t;
            engine_tensor(e, i, kind, &t);
            for (int64_t k = 0; k < t.tensor.nrows * t.tensor.ncols; k++)
                s->values[kind][at++] = tiny_get(&t, k);
        }
    }
    s->adam_t = tiny_adam_t(e);
}

static void drop(struct snapshot *s)
{
    for (int kind = 0; kind < STATE_GRAD; kind++)
        free(s->values[kind]);
}

static bool equal(const struct snapshot *a, const struct snapshot *b)
{
    bool same = a->n == b->n && a->adam_t == b->adam_t;
    for (int kind = 0; kind < STATE_GRAD && same; kind++)
        same = !memcmp(a->values[kind], b->values[kind], (size_t)a->n * sizeof(double));
    return same;
}

/* ---- helpers of the bodies, which run in the ranks' threads ---- */

#define REQUIRE(condition)                                                            \
    do {                                                                              \
        if (!(condition))                                                             \
            return error_set(err, ERR_INTERNAL, "line %d: %s", __LINE__, #condition); \
    } while (0)

static int step(struct engine *e, const struct tiny *c, int64_t first, double lr, struct step_result *result,
                struct error *err)
{
    struct tiny_batch b;
    struct step_request request = {.lr = lr};
    tiny_batch(c, first, 0, &b);
    return engine_step(e, &b.micro, &request, result, NULL, NULL, err);
}

static void run(const struct tiny *c, int (*body)(struct engine *, int, void *, struct error *), void *arg)
{
    struct plan p;
    tiny_plan(c, &p);
    tiny_run(&p, 1, body, arg, NULL);
}

/* A weight of one rank becomes infinite: every rank skips the update, keeps its state and Adam's t,
 * and goes on once the weight is mended. */
static int skips_together(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct tiny *c = arg;
    struct step_result result;
    struct snapshot before, after;
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = step(e, c, 0, 1e-2, &result, err);
    if (rc)
        return rc;
    REQUIRE(!result.skipped && tiny_adam_t(e) == 1);
    struct state_tensor t;
    engine_tensor(e, 3, STATE_WEIGHT, &t);
    double kept = tiny_get(&t, 0);
    if (rank == c->tp - 1)
        tiny_put(&t, 0, INFINITY);
    rc = engine_weights_changed(e, err);
    take(e, &before);
    if (!rc)
        rc = step(e, c, 2, 1e-2, &result, err);
    if (rc)
        return rc;
    take(e, &after);
    REQUIRE(result.skipped);
    REQUIRE(equal(&before, &after));
    drop(&before);
    drop(&after);
    tiny_put(&t, 0, kept);
    rc = engine_weights_changed(e, err);
    if (!rc)
        rc = step(e, c, 2, 1e-2, &result, err);
    if (rc)
        return rc;
    REQUIRE(!result.skipped && tiny_adam_t(e) == 2 && isfinite(result.loss));
    return ERR_OK;
}

static void nonfinite_updates_are_skipped_by_all(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct tiny c = tiny_default;
        c.tp = i & 1 ? 2 : 1;
        c.fp64 = i & 2;
        run(&c, skips_together, &c);
    }
}

/* A micro-batch without any target: nothing to learn from, so no update either. */
static int no_tokens(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct tiny *c = arg;
    struct tiny_batch b;
    struct step_request request = {.lr = 1e-2};
    struct step_result result;
    (void)rank;
    tiny_batch(c, 0, 1, &b);
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = engine_step(e, &b.micro, &request, &result, NULL, NULL, err);
    if (rc)
        return rc;
    REQUIRE(result.skipped && result.tokens == 0 && result.loss == 0 && tiny_adam_t(e) == 0);
    return ERR_OK;
}

static void a_step_without_tokens_is_skipped(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    run(&c, no_tokens, &c);
}

static void count_progress(void *arg)
{
    ++*(int *)arg;
}

/* Any rank's vote reaches all, in this step and not in the next. */
static int votes(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct tiny *c = arg;
    struct tiny_batch b;
    struct micro_batch micro[2];
    int progress = 0;
    tiny_batch(c, 0, 0, &b);
    micro[0] = micro[1] = b.micro;
    int rc = engine_init_weights(e, err);
    for (int s = 0; s < 4 && !rc; s++) {
        struct step_request request = {
            .lr = 1e-3, .stop = s == 1 && rank == 1, .checkpoint = s == 2 && rank == 0, .busy = s == 3, .asked = s == 3 ? 1 << 17 : s == rank};
        struct step_result result;
        rc = engine_step(e, micro, &request, &result, count_progress, &progress, err);
        if (rc)
            return rc;
        REQUIRE(result.stop == (s == 1) && result.checkpoint == (s == 2) && result.busy == (s == 3));
        REQUIRE(result.asked == (s == 3 ? 2 << 17 : s < 2));
        REQUIRE(result.tokens == 2 * c->micro * c->s);
        REQUIRE(progress == 2 * (s + 1));
    }
    return rc;
}

static void one_vote_is_enough(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    c.tp = 2;
    c.global = 4;
    run(&c, votes, &c);
}

/* Evaluation leaves the state and the next step as they were, and gives the step's own loss. */
static int evaluates(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct tiny *c = arg;
    struct tiny_batch b;
    struct snapshot before, after;
    struct step_result result;
    double loss, tokens;
    (void)rank;
    tiny_batch(c, 0, 0, &b);
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = step(e, c, 4, 1e-2, &result, err);
    take(e, &before);
    if (!rc)
        rc = engine_eval(e, &b.micro, &loss, &tokens, err);
    take(e, &after);
    if (rc)
        return rc;
    REQUIRE(equal(&before, &after));
    rc = step(e, c, 0, 1e-2, &result, err);
    if (rc)
        return rc;
    REQUIRE(result.loss == loss / tokens);
    drop(&before);
    drop(&after);
    return ERR_OK;
}

static void evaluation_leaves_no_trace(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    for (c.tp = 1; c.tp <= 2; c.tp++)
        run(&c, evaluates, &c);
}

/* V = 20 of 128 rows a rank: whatever stands in the padding rows of head or tied embedding, the
 * losses of three steps do not change by a bit, and the rows do not either. */
struct padding {
    struct tiny c;
    double fill;
    double loss[3];
};
static int with_padding(struct engine *e, int rank, void *arg, struct error *err)
{
    struct padding *p = arg;
    int rc = engine_init_weights(e, err);
    struct state_tensor t;
    int64_t last = engine_tensor_count(e) - 1;
    engine_tensor(e, p->c.tied ? 0 : last, STATE_WEIGHT, &t);
    int64_t from = t.tensor.nrows * t.tensor.ncols, to = 128 * t.tensor.ncols;
    for (int64_t k = from; k < to; k++)
        tiny_put(&t, k, p->fill * (double)(k % 5 - 2));
    if (!rc)
        rc = engine_weights_changed(e, err);
    for (int s = 0; s < 3 && !rc; s++) {
        struct step_result result;
        rc = step(e, &p->c, 2 * s, 1e-2, &result, err);
        if (rank == 0)
            p->loss[s] = result.loss;
    }
    for (int64_t k = from; k < to && !rc; k++)
        REQUIRE(tiny_get(&t, k) == p->fill * (double)(k % 5 - 2));
    return rc;
}

static void padding_has_no_influence(void **state)
{
    (void)state;
    for (int i = 0; i < 8 * TINY_WAYS; i++) {
        struct padding none = {.c = tiny_default}, some;
        none.c = tiny_of(i / 8);
        none.c.tied = i & 1;
        none.c.tp = i & 2 ? 2 : 1; /* with two ranks the second has padding only */
        none.c.fp64 = i & 4;
        some = none;
        some.fill = 7;
        run(&none.c, with_padding, &none);
        run(&some.c, with_padding, &some);
        assert_memory_equal(none.loss, some.loss, sizeof none.loss);
    }
}

/* With a rate so small that Adam's own step is known, what is left of an update is the decay: one minus
 * lr * decay for factors, nothing for gains, and nothing for embedding and head unless asked. */
struct decaying {
    struct tiny c;
    bool embeddings;
};
static int decays(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct decaying *d = arg;
    struct snapshot before;
    struct step_result result;
    (void)rank;
    tiny_randomize(e, 3);
    take(e, &before);
    double lr = 1e-3;
    int rc = step(e, &d->c, 0, lr, &result, err);
    if (rc)
        return rc;
    int64_t at = 0;
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor w, g;
        engine_tensor(e, i, STATE_WEIGHT, &w);
        engine_tensor(e, i, STATE_GRAD, &g);
        bool edge = w.tensor.role == ROLE_EMBEDDING || w.tensor.role == ROLE_HEAD;
        bool offset = strstr(w.tensor.name, "norm") || strstr(w.tensor.name, "cross.gain") ||
                      strstr(w.tensor.name, "cross.bias") || strstr(w.tensor.name, "cross.b");
        double decay = offset || (edge && !d->embeddings) ? 0 : d->c.decay;
        for (int64_t k = 0; k < w.tensor.nrows * w.tensor.ncols; k++, at++) {
            /* First update: m/bias1 = g, v/bias2 = g^2, g being clipped and of the mean loss. */
            double clip = result.grad_norm > d->c.clip ? d->c.clip / result.grad_norm : 1;
            double grad = tiny_get(&g, k) * clip / (double)result.tokens;
            double old = before.values[STATE_WEIGHT][at];
            double expected = old - lr * (grad / (fabs(grad) + 1e-8) + decay * old);
            REQUIRE(fabs(tiny_get(&w, k) - expected) < 1e-12);
        }
    }
    drop(&before);
    return ERR_OK;
}

/* The clip norm is that of every tensor of the model, each element once however many ranks hold it: the whole
 * gradients are put together here from what the ranks have after the step. */
struct norms {
    struct tiny c;
    pthread_mutex_t lock;
    double grads[TINY_TENSORS][4096]; /* by tensor, whole */
    bool replicas_differ;
    double grad_norm, tokens;
};
static int sums_squares(struct engine *e, int rank, void *arg, struct error *err)
{
    struct norms *n = arg;
    struct step_result result;
    (void)rank;
    tiny_randomize(e, 3);
    int rc = step(e, &n->c, 0, 1e-3, &result, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&n->lock);
    n->grad_norm = result.grad_norm;
    n->tokens = (double)result.tokens;
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor g;
        engine_tensor(e, i, STATE_GRAD, &g);
        for (int64_t k = 0; k < g.tensor.nrows * g.tensor.ncols; k++) {
            double *at =
                &n->grads[i][(g.tensor.row0 + k / g.tensor.ncols) * g.tensor.cols + g.tensor.col0 + k % g.tensor.ncols];
            if (*at != 0 && *at != tiny_get(&g, k))
                n->replicas_differ = true;
            *at = tiny_get(&g, k);
        }
    }
    pthread_mutex_unlock(&n->lock);
    return ERR_OK;
}

static void check_norm(int way, bool tied, int tp)
{
    struct norms *n = calloc(1, sizeof *n);
    double squares = 0;
    pthread_mutex_init(&n->lock, NULL);
    n->c = tiny_of(way);
    n->c.tied = tied;
    n->c.tp = tp;
    run(&n->c, sums_squares, n);
    for (int i = 0; i < TINY_TENSORS; i++)
        for (int k = 0; k < 4096; k++)
            squares += pow(n->grads[i][k], 2);
    assert_false(n->replicas_differ);
    assert_true(fabs(n->grad_norm / (sqrt(squares) / n->tokens) - 1) < 1e-12);
    free(n);
}

static void the_norm_is_of_all_tensors(void **state)
{
    (void)state;
    for (int i = 0; i < 6 * TINY_WAYS; i++)
        check_norm(i / 6, i & 1, 1 << i % 6 / 2);
}

static void decay_is_for_factors_only(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct decaying d = {.c = tiny_of(i), .embeddings = i & 1};
        struct plan p;
        d.c.tied = i & 2;
        d.c.decay = 0.5;
        d.c.clip = 0.1;
        if (d.c.way.gate != TENSOR && i % 3 == 0 && d.c.way.strategy == BTP)
            d.c.r = 1; /* factors of one row are no gains */
        tiny_plan(&d.c, &p);
        p.decay_embeddings = d.embeddings;
        tiny_run(&p, 1, decays, &d, NULL);
    }
}

/* The arena is plan_memory()'s figure, and saved activations grow with layers, nothing else does. */
static void memory_is_the_plans(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    struct plan p, deeper;
    struct plan_backend b = {DTYPE_F64, DTYPE_F64, DTYPE_F64, 1000, 0};
    struct plan_memory m, more;
    tiny_plan(&c, &p);
    plan_memory(&p, &b, &m);
    deeper = p;
    deeper.L = 2 * p.L;
    plan_memory(&deeper, &b, &more);
    assert_true(more.bytes[MEM_SAVED] == 2 * m.bytes[MEM_SAVED]);
    assert_true(more.bytes[MEM_SCRATCH] == m.bytes[MEM_SCRATCH] && more.bytes[MEM_HEAD] == m.bytes[MEM_HEAD]);
    assert_int_equal(m.bytes[MEM_MASTER], 0);
    b.act = DTYPE_F32; /* a narrower compute copy wants a master of its own */
    plan_memory(&p, &b, &m);
    assert_true(m.bytes[MEM_MASTER] == 2 * m.bytes[MEM_WEIGHTS]);
    /* With unequal types the statistic moves to an aligned place of its own. */
    assert_int_equal(plan_statistic_offset(&p, &b, 3 * p.r) % PLAN_ALIGN, 0);
    b.act = DTYPE_F64;
    assert_true(plan_statistic_offset(&p, &b, 3 * p.r) == p.T * 3 * p.r * 8);
}

static void wrong_groups_are_refused(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    struct plan p;
    struct local_world *world;
    struct comms comms;
    struct engine *e;
    struct error err;
    c.tp = 2;
    tiny_plan(&c, &p);
    struct comm_layout alone = {.tp = 1, .dp = 1, .pp = 1};
    assert_int_equal(local_world_create(&alone, &world, &err), 0);
    assert_int_equal(local_comms_join(world, 0, &comms, &err), 0);
    assert_int_equal(engine_create(&p, kernels_cpu_fp64(), &comms, 0, 1, &e, &err), ERR_INTERNAL);
    assert_null(e);
    p.tp = 1;
    p.dp = 2;
    assert_int_equal(engine_create(&p, kernels_cpu_fp64(), &comms, 0, 1, &e, &err), ERR_INTERNAL);
    p.dp = 1;
    p.pp = 2;
    assert_int_equal(engine_create(&p, kernels_cpu_fp64(), &comms, 0, 1, &e, &err), ERR_INTERNAL);
    comms_destroy(&comms);
    local_world_destroy(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nonfinite_updates_are_skipped_by_all),
        cmocka_unit_test(a_step_without_tokens_is_skipped),
        cmocka_unit_test(one_vote_is_enough),
        cmocka_unit_test(evaluation_leaves_no_trace),
        cmocka_unit_test(padding_has_no_influence),
        cmocka_unit_test(the_norm_is_of_all_tensors),
        cmocka_unit_test(decay_is_for_factors_only),
        cmocka_unit_test(memory_is_the_plans),
        cmocka_unit_test(wrong_groups_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
