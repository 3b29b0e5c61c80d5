/* A checkpoint written in one layout goes on in another: masters and moments are A's, element by element and bit by
 * bit, and the steps that follow have the losses of an engine in layout B into which the test itself put A's state; so
 * have those behind B's checkpoint, resumed in A. A rank reads no byte of the shards' data that it does not need.
 *
 * time limit: 300 s */
#include "tests/unit/worker/relayout.h"

enum { MORE = 3, AGAIN = 2 };

static const struct pair pairs[] = {
    {.name = "the same", .factorization = COLA, .V = 20, .a = {2, 1, 2, 0, BTP}, .b = {2, 1, 2, 0, BTP}},
    {.name = "zero off", .factorization = COLA, .V = 20, .a = {1, 1, 2, 1, BTP}, .b = {1, 1, 2, 0, BTP}},
    {.name = "tp to dp", .factorization = COLA, .V = 20, .a = {4, 1, 1, 0, BTP}, .b = {1, 1, 4, 1, BTP}},
    {.name = "dp to tp, bf16",
     .factorization = SVD,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 20,
     .a = {1, 1, 4, 1, BTP},
     .b = {4, 1, 1, 0, BTP}},
    {.name = "halves to thirds",
     .factorization = COLA,
     .six = true,
     .V = 37,
     .a = {2, 1, 2, 0, BTP},
     .b = {3, 1, 1, 0, BTP}},
    {.name = "one to all", .factorization = COLA, .V = 37, .a = {1, 1, 1, 0, BTP}, .b = {2, 2, 2, 1, BTP}},
    {.name = "all to one, bf16 to fp32",
     .factorization = COLA,
     .from_bf16 = true,
     .V = 37,
     .a = {2, 2, 2, 1, BTP},
     .b = {1, 1, 1, 0, BTP}},
    {.name = "stages, tied",
     .factorization = COLA,
     .tied = true,
     .V = 37,
     .a = {2, 3, 1, 0, BTP},
     .b = {1, 2, 2, 1, BTP}},
    {.name = "untied stages, fp64",
     .factorization = SVD,
     .fp64 = true,
     .V = 21,
     .a = {1, 3, 2, 1, BTP},
     .b = {4, 1, 1, 0, VANILLA}},
    {.name = "sliced to BTP", .factorization = COLA, .V = 20, .a = {2, 1, 2, 1, VANILLA}, .b = {4, 1, 1, 0, BTP}},
    {.name = "BTP to published, tied, fp32 to bf16",
     .factorization = SVD,
     .tied = true,
     .to_bf16 = true,
     .V = 37,
     .a = {4, 1, 2, 1, BTP},
     .b = {2, 2, 2, 0, VANILLA, true}},
    {.name = "published to sliced",
     .factorization = COLA,
     .V = 37,
     .a = {4, 1, 1, 0, VANILLA, true},
     .b = {2, 1, 2, 1, VANILLA}},
    {.name = "dense", .factorization = FULL_RANK, .V = 37, .a = {4, 1, 1, 0, FULL}, .b = {2, 2, 2, 1, FULL}},
    {.name = "dense, tied, bf16",
     .factorization = FULL_RANK,
     .tied = true,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 37,
     .a = {2, 1, 4, 1, FULL},
     .b = {1, 3, 1, 0, FULL}},
    {.name = "LAX",
     .factorization = LAX,
     .gate = IDENTITY,
     .V = 37,
     .a = {2, 1, 2, 1, BTP},
     .b = {4, 2, 1, 0, VANILLA}},
    {.name = "LAX LINEAR",
     .factorization = LAX,
     .gate = LINEAR,
     .tied = true,
     .V = 37,
     .a = {4, 1, 2, 1, VANILLA},
     .b = {1, 3, 1, 0, BTP}},
    {.name = "LAX TENSOR, bf16",
     .factorization = LAX,
     .gate = TENSOR,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 37,
     .a = {2, 3, 1, 0, BTP},
     .b = {4, 1, 2, 1, VANILLA, true}},
};
enum { PAIRS = sizeof pairs / sizeof pairs[0] };

/* Every element has one owner in both, and the same bits (doubles hold a float and its sign of zero exactly). */
static void same_state(const char *what, const struct result *got, const struct result *want)
{
    assert_int_equal(got->n, want->n);
    for (int i = 0; i < want->n; i++) {
        const struct whole *w = &want->tensors[i], *g = NULL;
        for (int k = 0; k < got->n && !g; k++)
            g = strcmp(got->tensors[k].name, w->name) ? NULL : &got->tensors[k];
        assert_non_null(g);
        for (int kind = 0; kind < STATE_GRAD; kind++)
            for (int64_t k = 0; k < w->rows * w->cols; k++)
                if (g->seen[kind][k] != 1 || w->seen[kind][k] != 1 ||
                    memcmp(&g->values[kind][k], &w->values[kind][k], sizeof(double)))
                    fail_msg("%s: element %lld of %s, kind %d: %.17g, not %.17g", what, (long long)k, w->name, kind,
                             g->values[kind][k], w->values[kind][k]);
    }
}

/* A; B from A's checkpoint; B from what the test puts in; A again from B's checkpoint, and from what the test puts in. */
static void goes_on(const struct pair *pair)
{
    char to[2][96], from[2][128];
    struct run_position want = {.step = TRAINED, .samples = 8 * TRAINED, .tokens = 17 * TRAINED, .skipped = 3};
    for (int i = 0; i < 2; i++) {
        snprintf(to[i], sizeof to[i], "%s/%s/%d", dir, pair->name, i);
        snprintf(from[i], sizeof from[i], "%s/step-%d.a1", to[i], TRAINED + i * MORE);
    }
    struct leg *a = new_leg(pair, &pair->a, 0, TRAINED), *on = new_leg(pair, &pair->a, TRAINED, MORE);
    struct leg *b = new_leg(pair, &pair->b, TRAINED, MORE), *put = new_leg(pair, &pair->b, TRAINED, MORE);
    struct leg *back = new_leg(pair, &pair->a, TRAINED + MORE, AGAIN);
    struct leg *again = new_leg(pair, &pair->a, TRAINED + MORE, AGAIN);
    a->to = to[0];
    run_leg(a);
    on->put = put->put = a->end;
    on->adam_t = put->adam_t = a->adam_t;
    run_leg(on);
    run_leg(put);
    b->from = from[0];
    b->to = to[1];
    run_leg(b);
    same_state(pair->name, b->begin, a->end);
    same_state(pair->name, b->end, put->end);
    assert_true(b->adam_t == TRAINED + MORE && b->at.adam_t == TRAINED);
    assert_true(b->at.step == want.step && b->at.samples == want.samples && b->at.tokens == want.tokens &&
                b->at.skipped == want.skipped && b->at.spike.mean == 3.25);
    for (int s = 0; s < MORE; s++)
        assert_true(b->loss[s] == put->loss[s] && b->norm[s] == put->norm[s]);
    /* The function is A's too: the first loss to the rounding of a forward pass (fp32: layouts.h has 1e-6; bf16: 2^-9,
     * as if each logit were rounded once more). To the bit where nothing changed. */
    double apart = relative(b->loss[0], on->loss[0]);
    bool bf16 = pair->from_bf16 || pair->to_bf16;
    print_message("%s: first loss %.9f, %.1e from A's; %lld bytes read, %lld of state\n", pair->name, b->loss[0], apart,
                  (long long)b->read, (long long)b->needed);
    assert_true(apart < (bf16 ? 0x1p-9 : 1e-6));
    if (same_cut(pair)) {
        assert_memory_equal(b->loss, on->loss, sizeof b->loss);
        same_state(pair->name, b->end, on->end);
    }
    back->from = from[1];
    run_leg(back);
    same_state(pair->name, back->begin, b->end);
    again->put = b->end;
    again->adam_t = b->adam_t;
    run_leg(again);
    same_state(pair->name, back->end, again->end);
    for (int s = 0; s < AGAIN; s++)
        assert_true(back->loss[s] == again->loss[s] && back->norm[s] == again->norm[s]);
    free_leg(again);
    free_leg(a);
    free_leg(on);
    free_leg(b);
    free_leg(put);
    free_leg(back);
}

static void every_pair(void **state)
{
    (void)state;
    for (int i = 0; i < PAIRS; i++)
        goes_on(&pairs[i]);
}

/* ---- replicas share what they hold ---- */

/* A model that is large beside the holes that align tensors, with a vocabulary that is not padded. With zero 0 and with
 * zero 1 each replica writes its 1/dp. */
static void replicas_write_even_shares(void **state)
{
    (void)state;
    static const struct pair large[] = {
        {.name = "two", .factorization = COLA, .V = 1536, .d = 192, .a = {2, 1, 2, 0, BTP}, .b = {2, 1, 2, 1, BTP}},
        {.name = "three", .factorization = SVD, .V = 1536, .d = 192, .a = {1, 2, 3, 0, BTP}, .b = {1, 2, 3, 1, BTP}},
        {.name = "four", .factorization = FULL_RANK, .V = 1536, .d = 192, .a = {1, 1, 4, 0, FULL}, .b = {2, 1, 4, 1, FULL}},
    };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        for (int b = 0; b < 2; b++) {
            struct leg *l = new_leg(&large[i], b ? &large[i].b : &large[i].a, 0, 0);
            char to[96];
            snprintf(to, sizeof to, "%s/%s%d", dir, large[i].name, b);
            l->c.global = 12;
            l->c.micro = 1;
            l->to = to;
            l->shared = true;
            result_free(l->begin);
            result_free(l->end);
            l->begin = l->end = NULL;
            run_leg(l);
            free_leg(l);
        }
}

/* ---- slices of more bytes than are read at once ---- */

struct large {
    const char *from;
    const struct plan *plan;
    int64_t differ, compared;
};

/* Initial weights do not depend on the layout: those of a checkpoint from another one are those drawn here. */
static int restores_initial_weights(struct engine *e, int rank, void *arg, struct error *err)
{
    struct large *l = arg;
    struct run_position at;
    int64_t n = engine_tensor_count(e);
    double **drawn = calloc((size_t)n, sizeof *drawn);
    int rc = engine_init_weights(e, err);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < n; i++) {
            struct state_tensor t;
            engine_tensor(e, i, STATE_WEIGHT, &t);
            int64_t count = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
            double *now = calloc((size_t)count + 1, sizeof *now);
            tiny_download(e, t.dtype, t.device ? t.device : t.own, count, now);
            for (int64_t k = 0; k < count && pass; k++)
                __atomic_fetch_add(&l->differ, now[k] != drawn[i][k], __ATOMIC_RELAXED);
            __atomic_fetch_add(&l->compared, pass ? count : 0, __ATOMIC_RELAXED);
            free(drawn[i]);
            drawn[i] = pass ? NULL : now;
            if (pass)
                free(now);
        }
        if (!pass) {
            tiny_randomize(e, 9);
            rc = rc ? rc : checkpoint_restore(l->from, l->plan, e, rank, NULL, &at, err);
        }
    }
    free(drawn);
    return rc;
}

/* An embedding [70000, 8], cut along hidden in slices of rows of 16 bytes: one of 1.1 MB, which is read in pieces that
 * go row by row to their places, or row by row. */
static void large_slices(void **state)
{
    (void)state;
    static const struct pair wide = {
        .name = "wide", .factorization = COLA, .V = 70000, .d = 8, .a = {2, 1, 1, 0, BTP}, .b = {1, 1, 1, 0, BTP}};
    for (int i = 0; i < 2; i++) {
        struct leg *l = new_leg(&wide, i ? &wide.b : &wide.a, 0, 0);
        struct tiny c = tiny_cut(&wide, i ? &wide.a : &wide.b);
        struct plan p;
        struct large large = {0};
        char to[96], from[128];
        result_free(l->begin);
        result_free(l->end);
        l->begin = l->end = NULL;
        snprintf(to, sizeof to, "%s/wide%d", dir, i);
        snprintf(from, sizeof from, "%s/step-0.a1", to);
        l->to = to;
        run_leg(l);
        free_leg(l);
        tiny_plan(&c, &p);
        large.from = from;
        large.plan = &p;
        tiny_run(&p, 1, restores_initial_weights, &large, NULL);
        assert_int_equal(large.differ, 0);
        assert_true(large.compared >= 2 * 70000 * 8); /* embedding and head, of one rank or of all */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair),
        cmocka_unit_test(replicas_write_even_shares),
        cmocka_unit_test(large_slices),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
