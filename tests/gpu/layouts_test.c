/* time limit: 900 s
 * Layouts over NCCL, each rank a process with the engine on a GPU (ranks of one GPU talk over sockets; one of the tests
 * alone: its name as the argument): ten steps of
 * every strategy and kind of parallelism against one rank on the CPU in fp64, and counters against the formulas.
 *
 * Bounds. In bf16 ranks add what one rank adds in fp32: a layout's gradients may be off by twice what the same layout's
 * are in emulated bf16, whose ranks add in the same precision (LOCAL threads, the engine's own sum order). Losses and
 * norms of ten steps are each compared by the root mean square of their distances, since of one step it is chance, with
 * twice the larger of two such emulations: in the layout, and on one rank. */
#include "tests/unit/worker/layouts.h"

#include "tests/gpu/nccl_ranks.h"

static const struct kernels *gpu_kernels(const struct plan *p)
{
    (void)p;
    return k;
}
static const struct platform on_gpu = {connect_nccl, gpu_kernels};

/* ---- layouts ---- */

static struct tiny model(int factorization, int strategy)
{
    struct tiny c = tiny_default;
    c.way = (struct tiny_way){.factorization = factorization, .strategy = strategy};
    c.fp64 = false;
    c.bf16 = true;
    c.d = 64, c.f = 96, c.h = c.hk = 8, c.r = 32, c.L = 4, c.V = 96, c.s = 32;
    c.micro = 2;
    c.global = 8;
    return c;
}

struct drift {
    double loss, norm;
};
static struct drift drift_of(const struct result *r, const struct result *exact)
{
    double loss = 0, norm = 0;
    for (int s = 0; s < STEPS; s++) {
        loss += pow(relative(r->loss[s], exact->loss[s]), 2);
        norm += pow(relative(r->norm[s], exact->norm[s]), 2);
    }
    return (struct drift){sqrt(loss / STEPS), sqrt(norm / STEPS)};
}
static struct drift larger(struct drift a, struct drift b)
{
    return (struct drift){fmax(a.loss, b.loss), fmax(a.norm, b.norm)};
}

static void check(const char *name, struct tiny c)
{
    struct tiny exact = alone_of(&c), alone = exact;
    alone.fp64 = false;
    alone.bf16 = true;
    struct plan p, cpu;
    c.way.name = name;
    tiny_plan(&c, &p);
    tiny_plan(&c, &cpu);
    p.cuda = true;
    p.head_bytes = p.T / 2 * p.V_pad / p.tp * 2; /* the head in two chunks */
    struct result *one = run(&exact, STEPS, false);
    struct result *emulated = run_on(&c, &cpu, STEPS, NULL);
    struct result *single = run(&alone, STEPS, false);
    struct result *gpu = run_on(&c, &p, STEPS, &on_gpu);

    double allowed = compare(name, emulated, one, 1 << STATE_GRAD, 1), worst = compare(name, gpu, one, 1 << STATE_GRAD, 1);
    struct drift off = drift_of(gpu, one), yardstick = larger(drift_of(emulated, one), drift_of(single, one));
    print_message("%s: gradients %.1e (emulated %.1e), loss %.1e (%.1e), norm %.1e (%.1e)\n", name, worst, allowed,
                  off.loss, yardstick.loss, off.norm, yardstick.norm);
    assert_true(gpu->tokens == one->tokens && gpu->eval_tokens == one->eval_tokens);
    assert_true(worst <= 2 * allowed);
    assert_true(off.loss <= 2 * yardstick.loss);
    assert_true(off.norm <= 2 * yardstick.norm);
    assert_true(relative(gpu->eval, one->eval) <= 2 * fmax(yardstick.loss, relative(emulated->eval, one->eval)));
    check_counters_of(&p, STEPS, gpu->counters);
    result_free(one);
    result_free(emulated);
    result_free(single);
    result_free(gpu);
}

static void tensor_parallel(void **state)
{
    (void)state;
    need_gpu();
    struct tiny c = model(COLA, BTP);
    c.tp = 2;
    check("COLA BTP tp 2", c);
    c.tp = 4;
    check("COLA BTP tp 4", c);
    c.tp = 2;
    c.recompute = LOW_RANK;
    check("COLA BTP tp 2 LOW_RANK", c);
    c.recompute = 0;
    c.way.overlap = true;
    check("COLA BTP tp 2 overlap", c);
    c.way.overlap = false;
    c.way.sync = true;
    check("COLA BTP tp 2 SYNC", c);
    c = model(COLA, VANILLA);
    c.tp = 2;
    check("COLA VANILLA tp 2", c);
    c.way.published = true;
    check("COLA VANILLA PUBLISHED tp 2", c);
    c = model(FULL_RANK, FULL);
    c.tp = 2;
    check("FULL_RANK FULL tp 2", c);
    c = model(SVD, BTP);
    c.tp = 2;
    c.tied = true;
    c.hk = 4;
    check("SVD BTP tp 2 tied GQA", c);
    c = model(LAX, BTP);
    c.tp = 2;
    c.way.gate = LINEAR;
    check("LAX LINEAR BTP tp 2", c);
}

static void pipelines_and_replicas(void **state)
{
    (void)state;
    need_gpu();
    struct tiny c = model(COLA, BTP);
    c.pp = 2;
    check("COLA pp 2", c);
    c.tied = true;
    check("COLA pp 2 tied", c);
    c = model(COLA, BTP);
    c.dp = 2;
    c.zero = 1;
    check("COLA dp 2 zero 1", c);
    c.zero = 0;
    c.bucket_bytes = 20000;
    check("COLA dp 2, small buckets", c);
    c = model(COLA, BTP);
    c.tp = c.dp = 2; /* sums over dp under those over tp: two communicators of a rank at once */
    c.bucket_bytes = 20000;
    check("COLA tp 2 dp 2", c);
    c = model(COLA, BTP);
    c.tp = c.pp = 2;
    check("COLA tp 2 pp 2", c);
    c = model(LAX, BTP);
    c.tp = c.pp = 2;
    check("LAX tp 2 pp 2", c);
}

int main(int argc, char **argv)
{
    spread = true;
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_parallel),
        cmocka_unit_test(pipelines_and_replicas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
