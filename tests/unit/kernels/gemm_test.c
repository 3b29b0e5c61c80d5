/* gemm against a long double triple loop: transposes, leading dimensions, batches, beta, faults, repeatability. */
#include "check.h"

struct shape {
    int64_t m, n, k;
    int batch;
};
static const struct shape shapes[] = {
    {1, 1, 1, 1},    {1, 7, 3, 1},     {5, 1, 9, 2},     {17, 13, 11, 3},   {64, 33, 31, 1},
    {37, 64, 96, 2}, {24, 40, 515, 1}, {130, 48, 65, 1}, {520, 3, 1030, 1}, {2, 517, 513, 2},
};

/* add: what beta is of; c where it is C itself. */
static void reference(const struct gemm *g, const double *a, const double *b, const double *c, const double *add,
                      real *want, real *size, int64_t c_elements)
{
    for (int64_t i = 0; i < c_elements; i++) {
        want[i] = c[i];
        size[i] = 0;
    }
    for (int p = 0; p < g->batch; p++) {
        for (int64_t i = 0; i < g->m; i++) {
            for (int64_t j = 0; j < g->n; j++) {
                int64_t at = p * g->stride_c + i * g->ldc + j;
                real sum = g->beta == 0 ? 0 : g->beta * (real)add[at], total = fabsl(sum);
                for (int64_t l = 0; l < g->k; l++) {
                    real x = a[p * g->stride_a + (g->trans_a ? l * g->lda + i : i * g->lda + l)];
                    real y = b[p * g->stride_b + (g->trans_b ? j * g->ldb + l : l * g->ldb + j)];
                    sum += x * y;
                    total += fabsl(x * y);
                }
                want[at] = sum;
                size[at] = total;
            }
        }
    }
}

/* apart: C is the sum of the product and another matrix, and not read itself. */
static void one_gemm(struct variant *v, const struct shape *s, bool trans_a, bool trans_b, double beta, bool apart)
{
    int64_t rows_a = trans_a ? s->k : s->m, cols_a = trans_a ? s->m : s->k;
    int64_t rows_b = trans_b ? s->n : s->k, cols_b = trans_b ? s->k : s->n;
    struct gemm g = {
        .m = s->m,
        .n = s->n,
        .k = s->k,
        .trans_a = trans_a,
        .trans_b = trans_b,
        .lda = cols_a + 3,
        .ldb = cols_b + 1,
        .ldc = s->n + 5,
        .batch = s->batch,
        .beta = beta,
        .c_grad = trans_a && !apart,
    };
    g.stride_a = rows_a * g.lda + 2;
    g.stride_b = rows_b * g.ldb;
    g.stride_c = s->m * g.ldc + 7;
    int64_t na = s->batch * g.stride_a, nb = s->batch * g.stride_b, nc = s->batch * g.stride_c;
    double *a = host_random(v, na, 1), *b = host_random(v, nb, 1), *c = host_random(v, nc, 1);
    real *want = host_reals(v, nc), *size = host_reals(v, nc);
    double *add = apart ? host_random(v, nc, 1) : c;
    reference(&g, a, b, c, add, want, size, nc);

    void *da = device_values(v, na, a), *db = device_values(v, nb, b), *dc, *again;
    g.add = apart ? device_values(v, nc, add) : NULL;
    for (int64_t i = 0; (beta == 0 || apart) && i < nc; i++) {
        /* Where C is written it must not have been read; between the rows it must stay as it was. */
        if (size[i] != 0)
            c[i] = NAN;
    }
    dc = typed_values(v, g.c_grad ? v->k->grad : v->k->act, nc, c);
    again = typed_values(v, g.c_grad ? v->k->grad : v->k->act, nc, c);
    v->k->gemm(v->ks, &g, da, db, dc);
    v->k->gemm(v->ks, &g, da, db, again);
    must_sync(v);
    check(v, "C", nc, dc, want, size, sum_roundings(s->k + 1));
    check_same_bits(v, "C", nc, dc, again);
    forget(v);
}

static void all_gemms(struct variant *v)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int mode = 0; mode < 12; mode++) {
            if (v->k->set_spare)
                v->k->set_spare(v->ks, mode % 3 ? 0 : 16);
            one_gemm(v, &shapes[i], mode & 1, mode & 2, (mode / 4) * 0.5, false);
            one_gemm(v, &shapes[i], mode & 1, mode & 2, (mode / 4) * 0.5, true);
        }
    if (v->k->set_spare)
        v->k->set_spare(v->ks, 0);
    assert_true(!v->k->gemm_seconds || v->k->gemm_seconds(v->ks) > 0);
}

static void test_gemm(void **state)
{
    (void)state;
    each_variant(all_gemms);
}

/* C = A B^T, or a weight gradient A^T B, of matrices without gaps. */
static struct gemm dense(const struct shape *s, bool wgrad)
{
    return (struct gemm){.m = s->m,
                         .n = s->n,
                         .k = s->k,
                         .trans_a = wgrad,
                         .trans_b = !wgrad,
                         .lda = wgrad ? s->m : s->k,
                         .ldb = wgrad ? s->n : s->k,
                         .ldc = s->n,
                         .batch = s->batch,
                         .stride_a = s->m * s->k,
                         .stride_b = s->n * s->k,
                         .stride_c = s->m * s->n};
}

/* At the shapes of a training step, where a library may pick another algorithm or split k: the same bits
 * twenty times over, at other addresses too. */
static void repeat(struct variant *v)
{
    static const struct shape training[] = {
        {512, 192, 128, 1}, {192, 128, 2048, 1}, {64, 32, 256, 1}, {96, 256, 1024, 2}};
    for (size_t i = 0; i < sizeof training / sizeof *training; i++) {
        const struct shape *s = &training[i];
        bool wgrad = s->k > 512;
        struct gemm g = dense(s, wgrad);
        int64_t na = s->batch * g.stride_a, nb = s->batch * g.stride_b, nc = s->batch * g.stride_c;
        double *a = host_random(v, na, 1), *b = host_random(v, nb, 1);
        void *da = device_values(v, na, a), *db = device_values(v, nb, b), *first = device_poison(v, nc);
        v->k->gemm(v->ks, &g, da, db, first);
        for (int r = 0; r < 20; r++) {
            void *da2 = device_values(v, na, a), *c = device_poison(v, nc);
            v->k->gemm(v->ks, &g, r % 2 ? da : da2, db, c);
            check_same_bits(v, "C", nc, first, c);
        }
        forget(v);
    }
}

static void test_repeatable(void **state)
{
    (void)state;
    run_variant(kernels_cpu_fp32(), NULL, 1, repeat);
    run_variant(kernels_cpu_fp32(), NULL, 2, repeat);
    run_variant(kernels_cpu_bf16(), NULL, 2, repeat);
    cuda_variant(repeat);
}

/* Shapes of a real layer, on a device alone, which splits k over its multiprocessors where m and n are few: some
 * elements against the reference, and the same bits ten times over. */
static void one_large(struct variant *v, const struct shape *s, bool wgrad)
{
    enum { SAMPLES = 256, TIMES = 10 };
    struct gemm g = dense(s, wgrad);
    g.c_grad = wgrad;
    int64_t na = s->batch * g.stride_a, nb = s->batch * g.stride_b, nc = s->batch * g.stride_c;
    double *a = host_random(v, na, 1), *b = host_random(v, nb, 1);
    void *da = device_values(v, na, a), *db = device_values(v, nb, b), *c[2];
    for (int i = 0; i < 2; i++)
        c[i] = typed_poison(v, wgrad ? v->k->grad : v->k->act, nc);
    v->k->gemm(v->ks, &g, da, db, c[0]);
    for (int r = 0; r < TIMES; r++) {
        v->k->gemm(v->ks, &g, da, db, c[1]);
        check_same_bits(v, "C", nc, c[0], c[1]);
    }
    double *got = fetch(v, c[0], nc);
    for (int sample = 0; sample < SAMPLES; sample++) {
        int64_t at = sample == 0 ? 0 : sample == 1 ? nc - 1 : random_below(v, nc);
        int64_t p = at / g.stride_c, i = at % g.stride_c / s->n, j = at % s->n;
        real sum = 0, size = 0;
        for (int64_t l = 0; l < s->k; l++) {
            real x = a[p * g.stride_a + (wgrad ? l * g.lda + i : i * g.lda + l)];
            real y = b[p * g.stride_b + (wgrad ? l * g.ldb + j : j * g.ldb + l)];
            sum += x * y;
            size += fabsl(x * y);
        }
        real bound = (real)(sum_roundings(s->k) * v->u) * size;
        if (!wgrad)
            bound += (real)v->store * (fabsl(sum) + bound);
        if (!(fabsl(got[at] - sum) <= bound))
            fail_msg("%s: C[%lld] of m=%lld n=%lld k=%lld is %.9g, should be %.9Lg (bound %.3Lg)", v->label,
                     (long long)at, (long long)s->m, (long long)s->n, (long long)s->k, got[at], sum, bound);
    }
    forget(v);
}

static void large(struct variant *v)
{
    one_large(v, &(struct shape){1024, 512, 16384, 1}, true);
    one_large(v, &(struct shape){256, 512, 16384, 2}, true);
    one_large(v, &(struct shape){64, 64, 32768, 1}, true);
    one_large(v, &(struct shape){4096, 1024, 256, 1}, false);
    one_large(v, &(struct shape){2048, 256, 5440, 1}, false);
    one_large(v, &(struct shape){4096, 512, 128, 3}, false);
}

static void test_large(void **state)
{
    (void)state;
    if (!find_cuda())
        skip();
    cuda_variant(large);
}

static void fault(struct variant *v)
{
    double zeros[64] = {0};
    void *a = device_values(v, 64, zeros), *c = device_poison(v, 64);
    struct gemm g = {.m = 4, .n = 4, .k = 4, .lda = 2, .ldb = 4, .ldc = 4, .batch = 1};
    struct error err;
    v->k->gemm(v->ks, &g, a, a, c); /* lda shorter than a row */
    g.lda = 4;
    v->k->gemm(v->ks, &g, a, a, c); /* a good one does not hide it */
    assert_int_equal(v->k->stream_sync(v->ks, &err), ERR_INTERNAL);
    assert_non_null(strstr(err.message, "lda=2"));
    assert_int_equal(v->k->stream_sync(v->ks, &err), ERR_OK);
}

static void test_fault_is_reported_once(void **state)
{
    (void)state;
    each_variant(fault);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_repeatable),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_fault_is_reported_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
