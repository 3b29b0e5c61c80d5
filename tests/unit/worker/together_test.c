/* What the ranks of a mixed layout decide together: skipped updates, votes; and what each says that it does. */
#include "tests/unit/worker/tiny.h"

#define REQUIRE(condition)                                                            \
    do {                                                                              \
        if (!(condition))                                                             \
            return error_set(err, ERR_INTERNAL, "line %d: %s", __LINE__, #condition); \
    } while (0)

struct task {
    struct tiny c;
    int special; /* the rank that differs */
};

static void count(void *arg)
{
    ++*(int *)arg;
}

static int step(struct engine *e, int rank, const struct task *t, const struct step_request *request,
                struct step_result *result, struct error *err)
{
    int progress = 0;
    struct plan p;
    struct tiny_batch b[4];
    struct micro_batch micro[4];
    tiny_plan(&t->c, &p);
    for (int64_t m = 0; m < p.accumulation; m++) {
        tiny_batch(&t->c, (m * p.dp + plan_dp_rank(&p, rank)) * t->c.micro, 0, &b[m]);
        micro[m] = b[m].micro;
    }
    int rc = engine_step(e, micro, request, result, count, &progress, err);
    if (!rc)
        REQUIRE(progress == 2 * p.accumulation); /* each forward, each backward */
    return rc;
}

/* All state that this rank has, summed in a way that sees any change. */
static double fingerprint(struct engine *e)
{
    double sum = 0;
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            struct state_tensor here = t;
            here.device = t.device ? t.device : t.own;
            int64_t n = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
            for (int64_t k = 0; k < n; k++)
                if (isfinite(tiny_get(&here, k)))
                    sum += tiny_get(&here, k) * (1 + (double)(k % 97) + kind);
        }
    return sum;
}

/* A weight of one rank is infinite for one step; under zero 1, where replicas give each other their weights, of all
 * replicas of that rank. */
static int skips(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct task *t = arg;
    struct step_request request = {.lr = 1e-2};
    struct step_result result;
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = step(e, rank, t, &request, &result, err);
    if (rc)
        return rc;
    REQUIRE(!result.skipped && tiny_adam_t(e) == 1);
    struct state_tensor w;
    engine_tensor(e, 2, STATE_WEIGHT, &w);
    double kept = tiny_get(&w, 0);
    bool replica = rank % 2 == t->special % 2 && rank / 4 == t->special / 4; /* same tp and pp rank */
    if (rank == t->special || (t->c.zero && replica))
        tiny_put(&w, 0, INFINITY);
    double before = fingerprint(e);
    rc = step(e, rank, t, &request, &result, err);
    if (rc)
        return rc;
    REQUIRE(result.skipped && tiny_adam_t(e) == 1 && fingerprint(e) == before);
    tiny_put(&w, 0, kept);
    rc = step(e, rank, t, &request, &result, err);
    if (rc)
        return rc;
    REQUIRE(!result.skipped && isfinite(result.loss) && tiny_adam_t(e) == 2 && fingerprint(e) != before);
    return ERR_OK;
}

static int votes(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct task *t = arg;
    int rc = engine_init_weights(e, err);
    for (int s = 0; s < 4 && !rc; s++) {
        bool mine = rank == t->special;
        struct step_request request = {
            .lr = 1e-3, .stop = mine && s == 1, .checkpoint = mine && s == 2, .busy = mine && s == 3};
        struct step_result result;
        rc = step(e, rank, t, &request, &result, err);
        if (rc)
            return rc;
        REQUIRE(result.stop == (s == 1) && result.checkpoint == (s == 2) && result.busy == (s == 3));
        REQUIRE(result.tokens == (int64_t)t->c.global * t->c.s);
    }
    return rc;
}

static void run(struct task *t, int (*body)(struct engine *, int, void *, struct error *))
{
    struct plan p;
    tiny_plan(&t->c, &p);
    tiny_run(&p, 1, body, t, NULL);
}

static struct task mixed(void)
{
    struct task t = {.c = tiny_default};
    t.c.tp = t.c.dp = t.c.pp = 2;
    t.c.micro = 1;
    t.c.global = 4;
    return t;
}

static void any_rank_makes_all_skip(void **state)
{
    (void)state;
    for (int i = 0; i < 32; i++) {
        struct task t = mixed();
        t.special = i / 4;
        t.c.zero = i & 1;
        t.c.tied = i & 2;
        run(&t, skips);
    }
}

static void any_vote_reaches_all(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct task t = mixed();
        t.special = i;
        run(&t, votes);
    }
}

/* ---- what is done ---- */

struct told {
    char text[8][96];
    int n;
};

static void hear(void *arg, const char *doing)
{
    struct told *t = arg;
    if (t->n < 8)
        snprintf(t->text[t->n++], sizeof t->text[0], "%s", doing);
}

static int says(struct engine *e, int rank, void *arg, struct error *err)
{
    static const char *const expected[2][4] = {
        {"forward of micro-batch 1 of 2 in stage 1 of 2", "forward of micro-batch 2 of 2 in stage 1 of 2",
         "backward of micro-batch 1 of 2 in stage 1 of 2", "backward of micro-batch 2 of 2 in stage 1 of 2"},
        {"forward of micro-batch 1 of 2 in stage 2 of 2", "backward of micro-batch 1 of 2 in stage 2 of 2",
         "forward of micro-batch 2 of 2 in stage 2 of 2", "backward of micro-batch 2 of 2 in stage 2 of 2"}};
    const struct task *t = arg;
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    struct told told = {.n = 0};
    engine_watch(e, hear, &told);
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = step(e, rank, t, &request, &result, err);
    if (rc)
        return rc;
    REQUIRE(told.n == 4);
    for (int i = 0; i < 4; i++)
        REQUIRE(!strcmp(told.text[i], expected[rank / 4][i]));
    return ERR_OK;
}

static void stage_and_micro_batch_are_told(void **state)
{
    (void)state;
    struct task t = mixed();
    run(&t, says);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_rank_makes_all_skip),
        cmocka_unit_test(any_vote_reaches_all),
        cmocka_unit_test(stage_and_micro_batch_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
