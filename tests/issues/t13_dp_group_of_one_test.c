/* T13 (Megatron-LM#6660): in a data-parallel group of one, with sharded gradients, every micro-step doubled
 * the gradient: 2^N instead of N.
 *
 * Here N equal micro-steps give N times the gradient, for zero 0 and 1, on one replica and on several. */
#include "tests/unit/worker/tiny.h"

enum { MAX_STEPS = 8 };

struct outcome {
    struct tiny c;
    int zero;
    double norm, loss;
    double squares; /* of the gradient sums that the replicas own */
    pthread_mutex_t lock;
};

static int one_step(struct engine *e, int rank, void *arg, struct error *err)
{
    struct outcome *o = arg;
    struct tiny_batch b;
    struct micro_batch micro[MAX_STEPS];
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    tiny_batch(&o->c, 0, 0, &b);
    for (int i = 0; i < MAX_STEPS; i++)
        micro[i] = b.micro;
    tiny_randomize(e, 3);
    int rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&o->lock);
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        t.device = t.own;
        for (int64_t k = 0; k < t.count; k++)
            o->squares += pow(tiny_get(&t, k), 2);
    }
    if (rank == 0) {
        o->norm = result.grad_norm;
        o->loss = result.loss;
    }
    pthread_mutex_unlock(&o->lock);
    return ERR_OK;
}

static void run(struct outcome *o, int steps, int dp, int zero)
{
    struct plan p;
    *o = (struct outcome){.c = tiny_default, .zero = zero, .lock = PTHREAD_MUTEX_INITIALIZER};
    o->c.dp = dp;
    o->c.global = o->c.micro * steps * dp;
    tiny_plan(&o->c, &p);
    p.zero = zero; /* a job with dp = 1 and zero = 1 is refused; the engine must be right all the same */
    tiny_run(&p, 1, one_step, o, NULL);
}

static void micro_steps_add_up(void **state)
{
    (void)state;
    static const int steps[] = {1, 2, 8};
    struct outcome one;
    run(&one, 1, 1, 0);
    for (int i = 0; i < 3; i++)
        for (int dp = 1; dp <= 2; dp++)
            for (int zero = 0; zero <= 1; zero++) {
                struct outcome n;
                run(&n, steps[i], dp, zero);
                double times = steps[i] * dp;
                assert_true(fabs(sqrt(n.squares / one.squares) / times - 1) < 1e-12);
                assert_true(fabs(n.norm / one.norm - 1) < 1e-12); /* of the mean */
                assert_true(fabs(n.loss / one.loss - 1) < 1e-13);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(micro_steps_add_up)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
