/* The plan's bytes of the CUDA backend's attention are the backend's own, and serve any part of a batch. */
#include "spec.h"

#include "kernels/cuda/attention_size.h"

static int64_t both(int64_t b, int64_t s, int64_t h, int64_t hk, int64_t e, bool own, bool accumulate)
{
    struct attention a = {.b = b, .s = s, .h = h, .hk = hk, .e = e, .own = own, .accumulate = accumulate};
    struct plan_attention p = {.b = b, .s = s, .h = h, .hk = hk, .e = e, .own = own, .accumulate = accumulate};
    int64_t backward = (int64_t)attention_bytes(&a, true), forward = (int64_t)attention_bytes(&a, false);
    assert_int_equal(plan_cuda_attention(&p), backward > forward ? backward : forward);
    return backward;
}

static void formulas_agree(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 100, 128, 1000, 2048, 4096, 32768}, heads[][2] = {{1, 1}, {32, 32}, {32, 8}},
                         widths[] = {16, 64, 128};
    for (int s = 0; s < 7; s++)
        for (int h = 0; h < 3; h++)
            for (int e = 0; e < 3; e++)
                for (int choice = 0; choice < 4; choice++) {
                    int64_t before = 0;
                    for (int64_t b = 1; b <= 9; b++) {
                        int64_t n = both(b, lengths[s], heads[h][0], heads[h][1], widths[e], choice & 1, choice & 2);
                        assert_true(n >= before);
                        before = n;
                    }
                }
}

/* Counted by hand: 8 sequences of 2048 tokens, 32 heads of 64. */
static void known_bytes(void **state)
{
    (void)state;
    const int64_t mib = 1 << 20, rows = 2 * mib, slack = 16 * mib;
    assert_int_equal(both(8, 2048, 32, 32, 64, true, false), rows);
    assert_int_equal(both(8, 2048, 32, 32, 64, false, false), rows + 2048 * mib + slack);
    assert_int_equal(both(8, 2048, 32, 32, 64, false, true), rows + 128 * mib + slack);
    /* Twice the batch: twice the slices. */
    assert_int_equal(both(16, 2048, 32, 32, 64, false, false), 2 * rows + 2048 * mib + slack);
    /* dk and dv of all query heads, 8 MiB each a sequence: 256 + 16 MiB fit seven times. */
    assert_int_equal(both(8, 2048, 32, 8, 64, false, false), rows + 7 * 272 * mib + slack);
    /* One sequence is more than the limit: it goes alone. */
    assert_int_equal(both(4, 32768, 2, 2, 64, false, false), mib + 4096 * mib + slack);
}

static void estimate_is_of_the_device(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct plan_backend cpu, cuda;
    job_open(&j);
    job_plan(&j, &p);
    assert_false(p.cuda);
    assert_true(p.attention_own && p.deterministic);
    plan_backend_estimate(&p, &cpu);
    p.cuda = true;
    p.attention_own = false;
    p.precision = BOOST__PRECISION__VALUE__BF16;
    plan_backend_estimate(&p, &cuda);
    struct plan_widths w;
    plan_widths(&p, &w);
    assert_int_equal(cuda.attention_workspace, both(p.micro_batch, p.s, w.heads, w.kv_heads, p.e, false, false));
    assert_int_not_equal(cpu.attention_workspace, cuda.attention_workspace);
    job_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas_agree),
        cmocka_unit_test(known_bytes),
        cmocka_unit_test(estimate_is_of_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
