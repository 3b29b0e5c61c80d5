/* What the engine does for a device whose operations are done later than they are asked for: captured steps, sums on
 * streams beside, copies of the state, the head in chunks. All numbers are those of the CPU to the bit. */
#include "tests/unit/worker/tiny.h"

#include "tests/unit/worker/late.h"

#define REQUIRE(condition)                                                            \
    do {                                                                              \
        if (!(condition))                                                             \
            return error_set(err, ERR_INTERNAL, "line %d: %s", __LINE__, #condition); \
    } while (0)

enum { STEPS = 6, RANKS = 4, MICRO = 4 };

static struct tiny_device late(void)
{
    return (struct tiny_device){late_kernels(), late_comms};
}

/* ---- captured steps ---- */

struct run {
    struct tiny c;
    bool plain;
    struct step_result steps[RANKS][STEPS];
    double eval[RANKS][2], adam_t[RANKS];
    float *state[RANKS]; /* weights and moments */
    size_t n[RANKS];
    int told[RANKS], progress[RANKS];
    char launched[RANKS][128];
};

struct listener {
    struct run *run;
    int rank;
};

static void hear(void *arg, const char *doing)
{
    struct listener *l = arg;
    if (strstr(doing, "at once"))
        snprintf(l->run->launched[l->rank], sizeof l->run->launched[0], "%s", doing);
    l->run->told[l->rank]++;
}

static void count(void *arg)
{
    struct listener *l = arg;
    l->run->progress[l->rank]++;
}

static void keep_state(struct engine *e, struct run *r, int rank)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            r->state[rank] = realloc(r->state[rank], (r->n[rank] + (size_t)t.count + 1) * sizeof(float));
            memcpy(r->state[rank] + r->n[rank], t.own, (size_t)t.count * sizeof(float));
            r->n[rank] += (size_t)t.count;
        }
}

/* Rate, tokens, masks and votes change from step to step; an evaluation comes between. */
static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct run *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch batches[MICRO];
    struct micro_batch micro[MICRO];
    struct listener l = {r, rank};
    int n = c->global / c->micro / c->dp, dp_rank = rank / c->tp % c->dp;
    engine_set_capture(e, !r->plain);
    engine_watch(e, hear, &l);
    int rc = engine_init_weights(e, err);
    for (int s = 0; s < STEPS && !rc; s++) {
        struct step_request request = {.lr = 1e-2 / (s + 1), .stop = s == 5, .checkpoint = s == 3 && rank == 0};
        for (int m = 0; m < n; m++) {
            tiny_batch(c, ((int64_t)s * n + m) * c->dp + dp_rank, 2 + s, &batches[m]);
            micro[m] = batches[m].micro;
        }
        rc = engine_step(e, micro, &request, &r->steps[rank][s], count, &l, err);
        memset(batches, 0x7f, sizeof batches); /* nobody looks at them any more */
        if (!rc && s == 2) {
            tiny_batch(c, 100, 0, &batches[0]);
            rc = engine_eval(e, &batches[0].micro, &r->eval[rank][0], &r->eval[rank][1], err);
        }
    }
    if (rc)
        return rc;
    r->adam_t[rank] = engine_adam_t(e);
    keep_state(e, r, rank);
    return ERR_OK;
}

static void same(const char *what, const struct plan *p, const struct run *a, const struct run *b,
                 const struct comm_counters *ca, const struct comm_counters *cb)
{
    for (int rank = 0; rank < p->world; rank++) {
        for (int s = 0; s < STEPS; s++)
            if (memcmp(&a->steps[rank][s], &b->steps[rank][s], offsetof(struct step_result, skipped)) ||
                a->steps[rank][s].stop != (s == 5) || b->steps[rank][s].stop != (s == 5) ||
                a->steps[rank][s].checkpoint != (s == 3) || b->steps[rank][s].checkpoint != (s == 3))
                fail_msg("%s: step %d of rank %d: loss %.17g and %.17g", what, s + 1, rank, a->steps[rank][s].loss,
                         b->steps[rank][s].loss);
        assert_true(!memcmp(a->eval[rank], b->eval[rank], sizeof a->eval[rank]));
        assert_true(a->adam_t[rank] == STEPS && b->adam_t[rank] == STEPS);
        assert_true(a->n[rank] == b->n[rank]);
        if (memcmp(a->state[rank], b->state[rank], a->n[rank] * sizeof(float)))
            fail_msg("%s: the state of rank %d differs", what, rank);
        assert_memory_equal(&ca[rank], &cb[rank], sizeof ca[rank]);
    }
}

static void forget(struct run *r)
{
    for (int rank = 0; rank < RANKS; rank++)
        free(r->state[rank]);
}

static const struct tiny_way overlapped = {
    .name = "COLA BTP overlap", .factorization = COLA, .strategy = BTP, .overlap = true};
static const struct tiny_way vanilla = {.name = "COLA VANILLA", .factorization = COLA, .strategy = VANILLA};
static const struct tiny_way lax = {.name = "LAX LINEAR BTP", .factorization = LAX, .strategy = BTP, .gate = LINEAR};
static const struct tiny_way dense = {.name = "FULL", .factorization = FULL_RANK, .strategy = FULL};

static const struct {
    const struct tiny_way *way;
    int tp, dp, pp, zero, micros, recompute, L;
    int64_t bucket_bytes, head_bytes;
    bool tied;
} cases[] = {
    {&overlapped, 1, 1, 1, 0, 3, 0, 2, 0, 0, false},
    {&overlapped, 2, 1, 1, 0, 2, 0, 2, 0, 1024, true},
    {&overlapped, 2, 2, 1, 1, 2, LAYER, 3, 1, 0, false},
    {&vanilla, 2, 2, 1, 0, 1, 0, 3, 1, 1024, false},
    {&lax, 1, 1, 2, 0, 3, LOW_RANK, 4, 0, 0, true},
    {&dense, 1, 2, 2, 1, 4, 0, 40, 1, 2048, true}, /* more buckets than a stream has marks */
};
enum { CASES = sizeof cases / sizeof cases[0] };

static struct tiny case_of(int i)
{
    struct tiny c = tiny_default;
    c.way = *cases[i].way;
    c.fp64 = false;
    c.r = 4;
    c.L = cases[i].L;
    c.tp = cases[i].tp, c.dp = cases[i].dp, c.pp = cases[i].pp, c.zero = cases[i].zero;
    c.recompute = cases[i].recompute;
    c.tied = cases[i].tied;
    c.bucket_bytes = cases[i].bucket_bytes;
    c.global = c.micro * c.dp * cases[i].micros;
    return c;
}

static void captured_steps_are_the_plain_ones(void **state)
{
    (void)state;
    for (int i = 0; i < CASES; i++) {
        struct plan p;
        struct run cpu = {.c = case_of(i)}, plain = {.c = cpu.c, .plain = true}, captured = {.c = cpu.c};
        struct comm_counters of_cpu[RANKS], of_plain[RANKS], of_captured[RANKS];
        tiny_plan(&cpu.c, &p);
        p.head_bytes = cases[i].head_bytes;
        tiny_run(&p, 1, train, &cpu, of_cpu);
        late_launches = 0;
        tiny_run_on(&p, late(), 1, train, &plain, of_plain);
        assert_int_equal(late_launches, 0);
        tiny_run_on(&p, late(), 1, train, &captured, of_captured);
        assert_int_equal(late_launches, p.world * 2 * (STEPS - 1));
        same("beside", &p, &cpu, &plain, of_cpu, of_plain);
        same("captured", &p, &cpu, &captured, of_cpu, of_captured);
        for (int rank = 0; rank < p.world; rank++) {
            int first = (int)p.accumulation * (p.pp > 1 ? 2 : 1);
            assert_int_equal(plain.progress[rank], STEPS * first);
            assert_int_equal(captured.progress[rank], first + 2 * (STEPS - 1));
            assert_int_equal(captured.told[rank], 2 * p.accumulation + 2 * (STEPS - 1));
            assert_string_equal(captured.launched[rank], "the update, launched at once");
            assert_string_equal(plain.launched[rank], "");
        }
        forget(&cpu);
        forget(&plain);
        forget(&captured);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(captured_steps_are_the_plain_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
