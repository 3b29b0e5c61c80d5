/* T16 (ROCm/TransformerEngine#715; NeMo-RL#3788): at tp = 8 weights that are whole on every rank were counted
 * eight times in the gradient norm. T17 (Megatron-LM#7452, #5916): a tensor not flagged as sharded was
 * left out of it.
 *
 * Here the norm is the same at tp 1, 2, 4 and 8, whatever is replicated, with replicas, stages and tied tables
 * too; and it is that of every tensor: summed here over what the ranks own after the step, each element once. */
#include "tests/unit/worker/tiny.h"

struct outcome {
    struct tiny c;
    double norm, tokens;
    double squares; /* of all tensors, summed here */
    int64_t elements;
    pthread_mutex_t lock;
};

static struct tiny wide(const struct tiny_way *way)
{
    struct tiny c = tiny_default;
    c.way = *way;
    c.d = 32, c.f = 48, c.r = 8, c.h = c.hk = 8, c.V = 40, c.L = 2, c.global = 8, c.micro = 1;
    return c;
}

static int step_norm(struct engine *e, int rank, void *arg, struct error *err)
{
    struct outcome *o = arg;
    struct plan p;
    struct tiny_batch b[8];
    struct micro_batch micro[8];
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    tiny_plan(&o->c, &p);
    for (int64_t m = 0; m < p.accumulation; m++) {
        tiny_batch(&o->c, m * p.dp + plan_dp_rank(&p, rank), 5, &b[m]);
        micro[m] = b[m].micro;
    }
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    if (rc)
        return rc;
    /* A rank's own part of a slice, of a replicated tensor that of tp rank 0, of a tied table that of stage 0. */
    pthread_mutex_lock(&o->lock);
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        const struct plan_tensor *s = &t.tensor;
        bool whole = s->nrows == s->rows && s->ncols == s->cols;
        bool table = s->role == ROLE_EMBEDDING && plan_pp_rank(&p, rank) > 0;
        t.device = t.own;
        for (int64_t k = 0; k < t.count && !table && (!whole || plan_tp_rank(&p, rank) == 0); k++, o->elements++)
            o->squares += pow(tiny_get(&t, k), 2);
    }
    if (rank == p.world - 1) {
        o->norm = result.grad_norm;
        o->tokens = (double)result.tokens;
    }
    pthread_mutex_unlock(&o->lock);
    return ERR_OK;
}

static double norm_of(const struct tiny *c)
{
    struct outcome o = {.c = *c, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct plan p;
    tiny_plan(c, &p);
    tiny_run(&p, 1, step_norm, &o, NULL);
    assert_true(o.elements == plan_parameters(&p));
    assert_true(fabs(o.norm / (sqrt(o.squares) / o.tokens) - 1) < (c->fp64 ? 1e-12 : 1e-6));
    return o.norm;
}

static void the_norm_does_not_depend_on_the_layout(void **state)
{
    (void)state;
    static const struct {
        int tp, dp, pp, zero;
    } layouts[] = {{2, 1, 1, 0}, {4, 1, 1, 0}, {8, 1, 1, 0}, {1, 2, 1, 0}, {1, 2, 1, 1},
                   {1, 1, 2, 0}, {2, 2, 2, 0}, {2, 2, 2, 1}, {8, 2, 2, 1}, {4, 8, 1, 1}};
    for (int i = 0; i < 2 * TINY_WAYS; i++) {
        struct tiny c = wide(&tiny_ways[i / 2]);
        c.tied = i & 1;
        for (int single = 0; single < 2; single++) {
            c.fp64 = !single;
            c.tp = c.dp = c.pp = 1;
            c.zero = 0;
            double one = norm_of(&c);
            for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
                if (single && k % 4 != 2)
                    continue;
                c.tp = layouts[k].tp, c.dp = layouts[k].dp, c.pp = layouts[k].pp, c.zero = layouts[k].zero;
                double many = norm_of(&c), bound = single ? 1e-6 : 1e-12;
                if (!(fabs(many / one - 1) < bound))
                    fail_msg("%s%s tp %d dp %d pp %d zero %d: norm %.15g, of one rank %.15g", c.way.name,
                             c.tied ? " tied" : "", c.tp, c.dp, c.pp, c.zero, many, one);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_norm_does_not_depend_on_the_layout)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
