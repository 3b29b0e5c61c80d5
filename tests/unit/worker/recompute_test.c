/* Recompute: the same bits whatever is kept, and the bytes that are kept. */
#include "tests/unit/worker/tiny.h"

#include "worker/plan/arena.h"

/* Gradients and weights of every rank behind a step of two micro-batches. */
struct left {
    struct tiny c;
    unsigned char *bytes[4];
    size_t size[4];
};

static int one_step(struct engine *e, int rank, void *arg, struct error *err)
{
    struct left *l = arg;
    struct tiny_batch b[2];
    struct micro_batch micro[2];
    struct step_request request = {.lr = 1e-3};
    struct step_result result;
    for (int i = 0; i < 2; i++) {
        tiny_batch(&l->c, i * l->c.micro, 5, &b[i]);
        micro[i] = b[i].micro;
    }
    tiny_randomize(e, 7);
    int rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
    static const enum state_kind kinds[] = {STATE_GRAD, STATE_WEIGHT};
    for (int pass = 0; pass < 2 && !rc; pass++) { /* to count, then to copy */
        size_t at = 0;
        for (int64_t i = 0; i < engine_tensor_count(e); i++)
            for (int k = 0; k < 2; k++) {
                struct state_tensor t;
                engine_tensor(e, i, kinds[k], &t);
                size_t n = (size_t)(t.tensor.nrows * t.tensor.ncols) * dtype_size(t.dtype);
                if (pass)
                    memcpy(l->bytes[rank] + at, t.device, n);
                at += n;
            }
        if (!pass)
            l->bytes[rank] = malloc(at);
        l->size[rank] = at;
    }
    return rc;
}

static void run(const struct tiny *c, struct left *out)
{
    struct plan p;
    *out = (struct left){.c = *c};
    tiny_plan(c, &p);
    tiny_run(&p, 1, one_step, out, NULL);
}

static void bits_are_the_same(void **state)
{
    (void)state;
    static const char *const precisions[] = {"fp64", "fp32", "bf16"};
    for (int i = 0; i < 6 * TINY_WAYS; i++) {
        struct tiny c = tiny_of(i / 6);
        struct left all, some;
        c.fp64 = i % 3 == 0;
        c.bf16 = i % 3 == 2;
        c.tp = 1 + i % 2;
        c.hk = (i ^ i / 6) & 1 ? 2 : 4;
        c.micro = 1 + i % 6 / 3; /* two: slices of whole sequences */
        c.global = 2 * c.micro;
        run(&c, &all);
        for (c.recompute = LOW_RANK; c.recompute <= LAYER; c.recompute++) {
            if (c.recompute == LOW_RANK && c.way.factorization == FULL_RANK)
                continue;
            run(&c, &some);
            for (int rank = 0; rank < c.tp; rank++) {
                if (all.size[rank] != some.size[rank] || memcmp(all.bytes[rank], some.bytes[rank], all.size[rank]))
                    fail_msg("%s, tp %d, %s: recompute %d changes bits", c.way.name, c.tp, precisions[i % 3],
                             c.recompute);
                free(some.bytes[rank]);
            }
        }
        for (int rank = 0; rank < c.tp; rank++)
            free(all.bytes[rank]);
    }
}

static int64_t saved(const struct tiny *c, bool *least)
{
    struct plan p;
    struct plan_backend b;
    struct plan_memory m;
    tiny_plan(c, &p);
    plan_backend_estimate(&p, &b);
    plan_memory(&p, &b, &m);
    static int64_t total;
    *least = !c->recompute || m.total < total; /* less than the mode before it needs */
    total = m.total;
    return m.bytes[MEM_SAVED];
}

/* T = 64 of fp32, so that every buffer is a multiple of the alignment. A layer keeps, per token: LOW_RANK under BTP 7r
 * latents, the residual d/t and R of two norms; under VANILLA 7r/t, two residuals d and R; LAYER one residual, and LAX
 * the latents that went on (LOW_RANK: besides those that came in). */
static void what_is_kept(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++)
        for (int tp = 1; tp <= 4; tp *= 2) {
            struct tiny c = tiny_of(i);
            bool btp, lax, least;
            c.fp64 = false;
            c.d = 64, c.f = 128, c.r = 16, c.s = 32, c.micro = 2, c.global = 2, c.tp = tp;
            btp = c.way.strategy == BTP;
            lax = c.way.factorization == LAX;
            int64_t T = 64, floats = 4, l = btp ? c.r : c.r / tp, x = btp ? c.d / tp : c.d;
            /* VANILLA's crossings keep what they took in, whole, and the sums of their norms. */
            bool gathers = lax && c.way.gate != IDENTITY && l < c.r;
            int64_t crossing = lax ? 7 * l + 14 + (gathers ? 7 * c.r : 0) : 0;
            saved(&c, &least);
            if (c.way.factorization != FULL_RANK) {
                c.recompute = LOW_RANK;
                assert_true(saved(&c, &least) == floats * c.L * T * (7 * l + (btp ? x : 2 * x) + 2 + crossing));
                assert_true(least);
            }
            c.recompute = LAYER;
            assert_true(saved(&c, &least) == floats * c.L * T * (x + (lax ? 7 * l : 0)));
            assert_true(least);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_the_same),
        cmocka_unit_test(what_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
