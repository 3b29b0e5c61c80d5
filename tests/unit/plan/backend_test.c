/* What a plan assumes of the backend that will run it: the CUDA backend's scratch, the head's rows at a time, and that
 * both reach the figure of a rank's memory. */
#include "spec.h"

#include "kernels/cuda/scratch_size.h"
#include "worker/plan/arena.h"

static void scratch_is_the_backends(void **state)
{
    (void)state;
    static const int64_t rows[] = {1, 100, 16384, 1 << 22}, widths[] = {1, 255, 256, 2048, 65536, 1 << 21},
                         tables[] = {1, 32000, 1 << 23};
    int larger = 0;
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < 6; w++)
            for (int v = 0; v < 3; v++) {
                struct scratch_shape shape = {.T = rows[r], .width = widths[w], .vocab = tables[v]};
                struct plan_largest largest = {.T = rows[r], .width = widths[w], .vocab = tables[v]};
                int64_t sums = (int64_t)scratch_sums_bytes(&shape);
                int64_t bytes = sums > CUDA_GEMM_WORKSPACE ? sums : CUDA_GEMM_WORKSPACE;
                assert_int_equal(plan_cuda_scratch(&largest), bytes);
                larger += sums > CUDA_GEMM_WORKSPACE;
            }
    assert_true(larger > 0); /* both sides were seen */
}

static int64_t rows_of(int64_t T, int64_t V, int tp, int64_t bytes)
{
    struct plan p = {.T = T, .V_pad = V, .tp = tp, .cuda = true, .s = T, .micro_batch = 1, .head_bytes = bytes};
    p.d = p.h = p.hk = p.e = p.f = p.r = 1;
    int64_t n = plan_head_rows(&p);
    assert_true(n >= 1 && T % n == 0);
    return n;
}

/* bf16: 128 MiB are 67108864 logits. */
static void head_rows_are_bounded(void **state)
{
    (void)state;
    const int64_t mib = 1 << 20, bound = 128 * mib;
    assert_int_equal(rows_of(16384, 32000, 1, bound), 2048);  /* of 2097 */
    assert_int_equal(rows_of(16384, 32000, 4, bound), 8192);  /* of 8388 */
    assert_int_equal(rows_of(16384, 32000, 8, bound), 16384); /* all: of 16777 */
    assert_int_equal(rows_of(16384, 32000, 1, 0), 16384);
    assert_int_equal(rows_of(9 * 1024, 32000, 1, bound), 1536); /* 2048 does not divide it */
    assert_int_equal(rows_of(7000, 32000, 1, bound), 1750);     /* no multiple of 128 divides it */
    assert_int_equal(rows_of(4099, 32000, 1, bound), 4099);     /* a prime: above the bound, not row by row */
    assert_int_equal(rows_of(2 * 4099, 32000, 1, bound), 4099);
    assert_int_equal(rows_of(12, 128, 1, 3 * 256), 3);
    assert_int_equal(rows_of(12, 128, 1, 1), 1); /* less than a row is a row */
}

/* On CUDA a job computes in bf16 whatever AUTO was, and its memory has both. */
static void memory_has_both(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct plan_backend cpu, cuda;
    struct plan_arena a;
    job_open(&j);
    job_plan(&j, &p);
    plan_backend_estimate(&p, &cpu);
    assert_true(cpu.scratch == 0 && plan_head_rows(&p) == p.T);
    plan_arena(&p, 0, &cpu, &a);
    assert_true(a.at[BUF_SCRATCH].bytes == 0);
    p.cuda = true;
    p.head_bytes = 15 * p.V_pad / p.tp * 2;
    plan_backend_estimate(&p, &cuda);
    assert_true(cuda.act == DTYPE_BF16 && cuda.stat == DTYPE_F32 && cuda.grad == DTYPE_F32);
    plan_arena(&p, 0, &cuda, &a);
    assert_true(a.at[BUF_SCRATCH].bytes == CUDA_GEMM_WORKSPACE && a.at[BUF_SCRATCH].category == MEM_SCRATCH);
    assert_true(a.at[BUF_ATTENTION].bytes == cuda.attention_workspace);
    assert_int_equal(plan_head_rows(&p), 15); /* of 60 */
    assert_int_equal(a.at[BUF_LOGITS].bytes, 15 * p.V_pad / p.tp * 2);
    assert_int_equal(a.at[BUF_MAX].bytes, 15 * 4);
    assert_int_equal(a.at[BUF_SUMS].bytes, 15 * 3 * 4);
    assert_int_equal(a.at[BUF_C].bytes, p.T * 4);
    /* Twice four calls of the loss in place of twice one. */
    struct plan_comm_counts chunks, whole;
    plan_comm_counts(&p, &chunks);
    p.head_bytes = 0;
    plan_comm_counts(&p, &whole);
    for (int pass = 0; pass < PLAN_PASSES; pass++) {
        const struct plan_comm *x = &chunks.tp[PLAN_ALL_REDUCE][pass], *y = &whole.tp[PLAN_ALL_REDUCE][pass];
        int64_t forwards = pass == PLAN_FORWARD ? p.accumulation : pass == PLAN_EVAL;
        assert_true(x->calls - y->calls == 6 * forwards);
        assert_true(x->elements == y->elements && x->statistics == y->statistics);
    }
    job_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scratch_is_the_backends),
        cmocka_unit_test(head_rows_are_bounded),
        cmocka_unit_test(memory_has_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
