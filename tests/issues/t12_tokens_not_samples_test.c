/* T12 (transformers#24725, #35203; torchtune#1875): with accumulation, samples of 11 and of 101 tokens were
 * averaged as means of means.
 *
 * Here a step's loss and gradient are sums over tokens by their number, however the samples are spread over
 * micro-batches and replicas. */
#include "tests/unit/worker/tiny.h"

enum { SAMPLES = 4, LONGEST = 101 };
static const int lengths[SAMPLES] = {11, 101, 3, 57};

struct outcome {
    struct tiny c;
    double loss, norm;
    int64_t tokens;
    double alone[SAMPLES]; /* loss sums of the samples one by one */
};

static void sample(const struct tiny *c, int n, int32_t *inputs, int32_t *targets)
{
    int32_t window[LONGEST + 1];
    tiny_sample(c, n, window);
    for (int j = 0; j < c->s; j++) {
        inputs[j] = window[j];
        targets[j] = j < lengths[n] ? window[j + 1] : -1;
    }
}

static int one_step(struct engine *e, int rank, void *arg, struct error *err)
{
    struct outcome *o = arg;
    const struct tiny *c = &o->c;
    static _Thread_local int32_t inputs[SAMPLES * LONGEST], targets[SAMPLES * LONGEST];
    struct micro_batch micro[SAMPLES];
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    struct plan p;
    tiny_plan(c, &p);
    for (int64_t m = 0; m < p.accumulation; m++) {
        int32_t *in = inputs + m * p.T, *out = targets + m * p.T;
        for (int j = 0; j < c->micro; j++)
            sample(c, (int)(m * p.dp + plan_dp_rank(&p, rank)) * c->micro + j, in + j * c->s, out + j * c->s);
        micro[m] = (struct micro_batch){in, out};
    }
    tiny_randomize(e, 3);
    int rc = ERR_OK;
    for (int m = 0; m < SAMPLES && c->micro == 1 && p.world == 1 && !rc; m++) {
        double tokens;
        rc = engine_eval(e, &micro[m], &o->alone[m], &tokens, err);
        if (!rc && tokens != lengths[m])
            rc = error_set(err, ERR_INTERNAL, "%g tokens of %d", tokens, lengths[m]);
    }
    if (!rc)
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    if (rank == 0 && !rc) {
        o->loss = result.loss;
        o->norm = result.grad_norm;
        o->tokens = result.tokens;
    }
    return rc;
}

static void run(struct outcome *o, int micro, int dp)
{
    struct plan p;
    *o = (struct outcome){.c = tiny_default};
    o->c.s = LONGEST;
    o->c.micro = micro;
    o->c.global = SAMPLES;
    o->c.dp = dp;
    tiny_plan(&o->c, &p);
    tiny_run(&p, 1, one_step, o, NULL);
}

static void every_token_weighs_the_same(void **state)
{
    (void)state;
    struct outcome apart, other;
    run(&apart, 1, 1);
    double sum = 0, means = 0;
    int total = 0;
    for (int i = 0; i < SAMPLES; i++) {
        sum += apart.alone[i];
        total += lengths[i];
        means += apart.alone[i] / lengths[i] / SAMPLES;
    }
    assert_true(apart.tokens == total);
    assert_true(fabs(apart.loss / (sum / total) - 1) < 1e-12);
    assert_true(fabs(apart.loss / means - 1) > 1e-3); /* a mean of means would be seen */
    static const int layouts[][2] = {{2, 1}, {4, 1}, {1, 2}, {2, 2}, {1, 4}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        run(&other, layouts[i][0], layouts[i][1]);
        assert_true(other.tokens == total);
        assert_true(fabs(other.loss / apart.loss - 1) < 1e-12);
        assert_true(fabs(other.norm / apart.norm - 1) < 1e-11);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_token_weighs_the_same)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
