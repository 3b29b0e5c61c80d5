/* Whatever the gradient buffers hold before a step, all of it NaN here and padding too, nothing of it is left behind
 * it: gradients, padding, losses, norms and weights have the bits of steps that begin with zeros and only ever add. */
#include "tests/unit/worker/tiny.h"

#include "worker/engine_internal.h"

enum { STEPS = 3, RANKS = 8, ACCUMULATION = 3 };

/* What every rank has behind each step, byte by byte. */
struct run {
    struct tiny c;
    struct plan plan;
    bool stale;
    struct buffer seen[RANKS];
};

static void fill(struct engine *e, bool stale)
{
    memset(engine_buffer(e, BUF_GRADS, 0), stale ? 0xff : 0, (size_t)e->places.at[BUF_GRADS].bytes);
}

static void see(const struct engine *e, struct run *r, const void *at, size_t bytes)
{
    (void)!buffer_append(&r->seen[e->rank], at, bytes);
}

static void see_all(const struct engine *e, struct run *r)
{
    static const enum plan_buffer buffers[] = {BUF_GRADS, BUF_WEIGHTS, BUF_MASTER};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (e->places.at[buffers[i]].bytes)
            see(e, r, engine_buffer(e, buffers[i], 0), (size_t)e->places.at[buffers[i]].bytes);
}

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct run *r = arg;
    const struct plan *p = &r->plan;
    struct tiny_batch batches[ACCUMULATION];
    struct micro_batch micro[ACCUMULATION];
    struct step_request request = {.lr = 1e-2};
    double loss, tokens;
    int rc = ERR_OK;
    tiny_randomize(e, 5);
    for (int64_t s = 0; s < STEPS && !rc; s++) {
        struct step_result result;
        for (int64_t m = 0; m < p->accumulation; m++) {
            int64_t sample = ((s * p->accumulation + m) * p->dp + plan_dp_rank(p, rank)) * r->c.micro;
            tiny_batch(&r->c, sample, (int)(m + 2), &batches[m]);
            micro[m] = batches[m].micro;
        }
        fill(e, r->stale);
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (rc)
            return rc;
        if (result.skipped)
            return error_set(err, ERR_INTERNAL, "%s: step %d was skipped", r->c.way.name, (int)s);
        see(e, r, &result.loss, sizeof result.loss);
        see(e, r, &result.grad_norm, sizeof result.grad_norm);
        see_all(e, r);
        rc = engine_eval(e, micro, &loss, &tokens, err); /* between the steps */
    }
    fill(e, r->stale);
    if (!rc)
        rc = engine_gradients(e, micro, &loss, err);
    see(e, r, &loss, sizeof loss);
    see_all(e, r);
    return rc;
}

/* A table of kernels that adds every gradient of weights to what is there. */
static const struct kernels *real;
static void adding_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    struct gemm adding = *g;
    if (g->c_grad)
        adding.beta = 1;
    real->gemm(ks, &adding, a, b, c);
}

static void run(struct run *r)
{
    struct kernels table = *tiny_kernels(&r->plan);
    real = tiny_kernels(&r->plan);
    if (!r->stale)
        table.gemm = adding_gemm;
    for (int i = 0; i < r->plan.world; i++)
        buffer_init(&r->seen[i], 64 << 20);
    tiny_run_on(&r->plan, (struct tiny_device){.kernels = &table}, 1, train, r, NULL);
}

static void compare(const struct tiny *c, bool chunks)
{
    struct run zeros = {.c = *c}, stale;
    tiny_plan(c, &zeros.plan);
    if (chunks) /* 4 of 12 rows at a time: the head in three */
        zeros.plan.head_bytes = 4 * zeros.plan.V_pad / c->tp * (c->fp64 ? 8 : c->bf16 ? 2 : 4);
    assert_int_equal(plan_head_rows(&zeros.plan), chunks ? 4 : 12);
    stale = zeros;
    stale.stale = true;
    run(&zeros);
    run(&stale);
    for (int i = 0; i < zeros.plan.world; i++) {
        const struct buffer *a = &zeros.seen[i], *b = &stale.seen[i];
        size_t at = 0;
        assert_true(a->len == b->len && a->len > STEPS * sizeof(double));
        while (at < a->len && ((const char *)a->data)[at] == ((const char *)b->data)[at])
            at++;
        if (at < a->len)
            fail_msg(
                "%s tp %d dp %d pp %d zero %d tied %d global %d recompute %d chunks %d: rank %d differs at byte %zu "
                "of %zu",
                c->way.name, c->tp, c->dp, c->pp, c->zero, c->tied, c->global, c->recompute, chunks, i, at, a->len);
        buffer_free(&zeros.seen[i]);
        buffer_free(&stale.seen[i]);
    }
}

static void a_step_leaves_nothing_of_what_was_there(void **state)
{
    (void)state;
    static const struct {
        int tp, dp, pp, zero;
    } layouts[] = {{1, 1, 1, 0}, {2, 1, 1, 0}, {1, 2, 1, 0}, {1, 2, 1, 1}, {1, 1, 2, 0}, {2, 2, 2, 1}};
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    static const int recompute[] = {BOOST__RECOMPUTE__VALUE__NONE, LOW_RANK, LAYER};
    for (int way = 0; way < TINY_WAYS; way++)
        for (int i = 0; i < 4 * LAYOUTS; i++) {
            struct tiny c = tiny_of(way);
            int layout = i / 4, turn = way + layout + i; /* every mode and precision with every way and layout */
            c.tied = i & 1;
            c.tp = layouts[layout].tp;
            c.dp = layouts[layout].dp;
            c.pp = layouts[layout].pp;
            c.zero = layouts[layout].zero;
            c.global = c.micro * c.dp * (i & 2 ? ACCUMULATION : 1);
            c.bucket_bytes = c.dp > 1 && turn % 2 ? 1 : 0; /* a bucket for each layer */
            c.fp64 = turn % 3 == 0;
            c.bf16 = turn % 3 == 1;
            c.recompute = recompute[(turn / 3 + i) % 3];
            if (!tiny_is_valid(&c))
                c.recompute = BOOST__RECOMPUTE__VALUE__NONE; /* a dense model has no latents to keep */
            compare(&c, turn / 2 % 2);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_leaves_nothing_of_what_was_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
