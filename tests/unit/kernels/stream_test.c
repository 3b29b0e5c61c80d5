/* Streams, memory, copies, casts, the fast exponential, the choice of instruction set, and independence of the threads.
 */
#include "check.h"

#include <pthread.h>

#include "kernels/cpu/fp32_loops.h"

static void test_stream_arguments(void **state)
{
    (void)state;
    const struct kernels *backends[] = {kernels_cpu_fp64(), kernels_cpu_fp32(), kernels_cpu_bf16(), find_cuda()};
    for (int i = 0; i < 4 && backends[i]; i++) {
        struct error err;
        struct kstream *ks;
        assert_int_equal(backends[i]->stream_create(0, &ks, &err), ERR_INVALID);
        assert_null(ks);
        backends[i]->stream_destroy(NULL);
        void *p = backends[i]->alloc(0, &err);
        assert_non_null(p);
        backends[i]->release(p);
        p = backends[i]->alloc((5 << 20) + 1, &err); /* more than a huge page, and no whole number of them */
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 256, 0);
        backends[i]->release(p);
        assert_null(backends[i]->alloc(SIZE_MAX - 5, &err));
        assert_int_equal(err.code, ERR_NOMEM);
    }
    setenv("BOOST_CPU_ISA", "vax", 1);
    struct error err;
    struct kstream *ks;
    assert_int_equal(kernels_cpu_fp32()->stream_create(1, &ks, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "vax"));
    unsetenv("BOOST_CPU_ISA");
}

#define SLOT(name) (offsetof(struct kernels, name) / sizeof(void (*)(void)))
/* Groups that a backend has as a whole or not at all. */
static const struct {
    size_t first, last;
} optional[] = {
    {SLOT(gemm_seconds), SLOT(gemm_seconds)},
    {SLOT(scratch_bytes), SLOT(set_scratch)},
    {SLOT(stream_beside), SLOT(await)},
    {SLOT(capture_begin), SLOT(graph_destroy)},
    {SLOT(range_begin), SLOT(range_end)},
    {SLOT(choices_save), SLOT(choices_load)},
    {SLOT(attention_check), SLOT(attention_check)},
    {SLOT(latent_sum_forward), SLOT(latent_sum_backward)},
};

static void *slot_of(const struct kernels *k, size_t slot)
{
    void *p;
    memcpy(&p, (const char *)k + slot * sizeof p, sizeof p);
    return p;
}

static void complete(struct variant *v)
{
    for (size_t slot = SLOT(stream_create); slot <= SLOT(adamw); slot++) {
        size_t i = 0, n = sizeof optional / sizeof *optional;
        while (i < n && (slot < optional[i].first || slot > optional[i].last))
            i++;
        if (i < n)
            assert_true((slot_of(v->k, slot) != NULL) == (slot_of(v->k, optional[i].first) != NULL));
        else
            assert_non_null(slot_of(v->k, slot));
    }
}

static void test_tables_are_complete(void **state)
{
    (void)state;
    each_variant(complete);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void copies(struct variant *v)
{
    enum { N = 100003 };
    struct error err;
    unsigned char *out = v->k->host_alloc(N, &err), *back = v->k->host_alloc(N, &err);
    assert_non_null(out);
    assert_non_null(back);
    for (int i = 0; i < N; i++)
        out[i] = (unsigned char)random_bits(v);
    unsigned char *device = device_bytes(v, N);
    v->k->upload(v->ks, device, out, N);
    v->k->zero(v->ks, device + 5, 1000);
    v->k->zero(v->ks, device, 0);
    v->k->download(v->ks, back, device, N);
    must_sync(v);
    memset(out + 5, 0, 1000);
    assert_memory_equal(back, out, N);
    v->k->host_release(out);
    v->k->host_release(back);
    v->k->host_release(NULL);
    v->k->release(NULL);
}

/* Places at a distance, and nothing between them. */
static void zeros(struct variant *v)
{
    enum { N = 1000, FIRST = 7, COUNT = 13, STRIDE = 40, TIMES = 5, OF_ALL = 3 };
    float host[N], seen[N];
    for (int i = 0; i < N; i++)
        host[i] = (float)(i + 1);
    float *device = device_bytes(v, sizeof host);
    v->k->upload(v->ks, device, host, sizeof host);
    v->k->zero_each(v->ks, device + FIRST, COUNT * sizeof *host, STRIDE * sizeof *host, TIMES);
    v->k->zero_each(v->ks, device + N - OF_ALL, sizeof *host, sizeof *host, OF_ALL); /* side by side */
    v->k->zero_each(v->ks, device, sizeof *host, sizeof *host, 0);
    v->k->zero_each(v->ks, device, 0, sizeof *host, 3);
    v->k->download(v->ks, seen, device, sizeof seen);
    must_sync(v);
    for (int i = 0; i < N; i++) {
        int at = i - FIRST;
        bool in = at >= 0 && at / STRIDE < TIMES && at % STRIDE < COUNT;
        assert_true(seen[i] == (in || i >= N - OF_ALL ? 0 : host[i]));
    }
}

static void test_zeros(void **state)
{
    (void)state;
    each_variant(zeros);
}

static void test_copies(void **state)
{
    (void)state;
    each_variant(copies);
}

/* ---- cast ----------------------------------------------------------------------------------- */

/* n values of one type as another, on the device. */
static void cast(struct variant *v, enum dtype to, void *out, enum dtype from, const void *in, int64_t n)
{
    void *src = device_typed(v, from, n), *dst = device_typed(v, to, n);
    put_bytes(v, src, in, (size_t)n * dtype_size(from));
    poison(v, dst, (size_t)n * dtype_size(to));
    v->k->cast(v->ks, to, dst, from, src, n);
    get_bytes(v, out, dst, (size_t)n * dtype_size(to));
}

static void casts(struct variant *v)
{
    enum { N = 4000 };
    double x[N], back[N];
    float f[N];
    uint16_t h[N], again[N];
    for (int i = 0; i < N; i++)
        x[i] = ldexp(random_value(v, 1), (int)random_below(v, 60) - 30) * (1 + 0x1p-40);
    cast(v, DTYPE_F32, f, DTYPE_F64, x, N);
    for (int i = 0; i < N; i++)
        assert_true(f[i] == (float)x[i]);
    cast(v, DTYPE_F64, back, DTYPE_F32, f, N);
    for (int i = 0; i < N; i++)
        assert_true(back[i] == (double)f[i]);
    cast(v, DTYPE_BF16, h, DTYPE_F32, f, N);
    for (int i = 0; i < N; i++)
        assert_int_equal(h[i], to_bf16(f[i]));
    cast(v, DTYPE_BF16, h, DTYPE_F64, x, N);
    cast(v, DTYPE_F64, back, DTYPE_BF16, h, N);
    for (int i = 0; i < N; i++) {
        /* The nearest of 8 significant bits. */
        int exponent;
        double scaled = ldexp(frexp(x[i], &exponent), 8);
        assert_true(back[i] == ldexp(nearbyint(scaled), exponent - 8));
    }
    cast(v, DTYPE_BF16, again, DTYPE_F64, back, N);
    assert_memory_equal(again, h, sizeof h);
    cast(v, DTYPE_F64, back, DTYPE_F64, x, N);
    assert_memory_equal(back, x, sizeof x);
}

static void special_casts(struct variant *v)
{
    static const struct {
        double from;
        uint16_t to;
    } of[] = {
        {1, 0x3f80},
        {1 + 0x1p-8, 0x3f80},           /* a tie goes to even, below */
        {1 + 3 * 0x1p-8, 0x3f82},       /* and above */
        {1 + 0x1p-8 + 0x1p-45, 0x3f81}, /* just over the tie: float would say "tie" */
        {1 + 3 * 0x1p-8 - 0x1p-45, 0x3f81},
        {-(1 + 0x1p-8 + 0x1p-45), 0xbf81},
        {INFINITY, 0x7f80},
        {-1e300, 0xff80},
        {0x1.fefp127, 0x7f7f}, /* below the middle between the largest and infinity */
        {0x1.ffp127, 0x7f80},
        {-0.0, 0x8000},
        {1e-300, 0},
        {0x1p-133, 0x0001}, /* the smallest denormal */
    };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        uint16_t got;
        cast(v, DTYPE_BF16, &got, DTYPE_F64, &of[i].from, 1);
        if (got != of[i].to)
            fail_msg("%s: %a as bf16 is %04x, should be %04x", v->label, of[i].from, got, of[i].to);
    }
    uint16_t nan;
    cast(v, DTYPE_BF16, &nan, DTYPE_F64, &(double){NAN}, 1);
    assert_true((nan & 0x7f80) == 0x7f80 && (nan & 0x7f) != 0);
}

static void test_cast(void **state)
{
    (void)state;
    each_variant(casts);
    each_variant(special_casts);
}

static void bad_cast(struct variant *v)
{
    void *from = device_typed(v, DTYPE_I32, 1), *to = device_typed(v, DTYPE_F64, 1);
    struct error err;
    v->k->cast(v->ks, DTYPE_F64, to, DTYPE_I32, from, 1);
    assert_int_equal(v->k->stream_sync(v->ks, &err), ERR_INTERNAL);
    assert_non_null(strstr(err.message, "I32"));
}

static void test_bad_cast(void **state)
{
    (void)state;
    each_variant(bad_cast);
}

/* ---- the exponential ---------------------------------------------------------------------------- */

static void check_exponential(const char *isa)
{
    enum { N = 1 << 20 };
    const struct fp32_loops *loops;
    struct error err;
    setenv("BOOST_CPU_ISA", isa, 1);
    int rc = fp32_loops_choose(&loops, &err);
    unsetenv("BOOST_CPU_ISA");
    if (rc != ERR_OK)
        return;
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    assert_non_null(x);
    assert_non_null(y);
    for (int i = 0; i < N; i++)
        x[i] = (float)(-86.6 + (88.7 + 86.6) * i / (N - 1));
    loops->exponential(N, x, y);
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double want = exp((double)x[i]);
        double ulp = ldexp(1, ilogb(want) - 23);
        worst = fmax(worst, fabs((double)y[i] - want) / ulp);
    }
    print_message("%s: exponential within %.3f units in the last place\n", isa, worst);
    assert_true(worst <= 1.5);
    float special[9] = {0, -0.0f, -87, -1000, -INFINITY, 89, 1e30f, INFINITY, NAN}, out[9];
    loops->exponential(9, special, out);
    assert_true(out[0] == 1 && out[1] == 1);
    assert_true(out[2] == 0 && out[3] == 0 && out[4] == 0);
    assert_true(isinf(out[5]) && isinf(out[6]) && isinf(out[7]) && out[5] > 0);
    assert_true(isnan(out[8]));
    free(x);
    free(y);
}

static void test_exponential(void **state)
{
    (void)state;
    check_exponential("baseline");
    check_exponential("avx2");
    check_exponential("avx512");
}

/* ---- threads --------------------------------------------------------------------------------------- */

/* Our own loops give the same bits for every number of threads. */
enum { RANK_FLOATS = 300 * 192 + 300 * 64 + 2000 };

static void run_loops(int threads, float *out, int64_t n_out)
{
    enum { T = 300, W = 192 };
    struct error err;
    const struct kernels *k = kernels_cpu_fp32();
    struct kstream *ks;
    assert_int_equal(k->stream_create(threads, &ks, &err), ERR_OK);
    struct variant *v = calloc(1, sizeof *v);
    assert_non_null(v);
    v->k = k;
    v->ks = ks;
    v->random = 5;
    double *x = host_random(v, T * W, 1), *y = host_random(v, T * W, 1), *g = host_random(v, W, 1),
           *r = host_random(v, T, 1);
    float *dx = device_values(v, T * W, x), *dy = device_values(v, T * W, y), *dg = device_values(v, W, g),
          *dr = device_values(v, T, r);
    float *S = device_poison(v, T), *sum = device_poison(v, T * W), *n = device_poison(v, T * W),
          *dgain = grad_zero(v, W);
    float *k_row = device_poison(v, T), *o = device_poison(v, T * 64), *lse = device_poison(v, T);
    double *acc = device_doubles(v, 2, (const double[2]){0, 0});
    k->residual_gain(ks, T, W, dx, dy, dg, sum, n, S);
    k->latent_backward(ks, T, W, W, LATENT_SILU, sum, S, dx, k_row);
    k->gain_backward(ks, T, W, sum, dg, dr, k_row, dx, true, n, dgain);
    k->grad_squares(ks, T * W, n, acc);
    struct attention a = {.b = 3, .s = 100, .h = 1, .hk = 1, .e = 64, .ldq = W, .ldk = W, .ldv = W, .ldo = 64};
    k->attention_forward(ks, &a, sum, sum + 64, sum + 128, o, lse, device_bytes(v, k->attention_workspace(&a, false)));
    int64_t at = 0;
    const struct {
        const float *p;
        int64_t n;
    } parts[] = {{S, T}, {n, T * W}, {dgain, W}, {k_row, T}, {o, T * 64}, {lse, T}, {(float *)acc, 4}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        assert_true(at + parts[i].n <= n_out);
        memcpy(out + at, parts[i].p, (size_t)parts[i].n * sizeof *out);
        at += parts[i].n;
    }
    must_sync(v);
    forget(v);
    free(v);
    k->stream_destroy(ks);
}

static void test_threads_do_not_matter(void **state)
{
    (void)state;
    enum { N = RANK_FLOATS };
    float *one = calloc(N, sizeof *one), *more = calloc(N, sizeof *more);
    assert_non_null(one);
    assert_non_null(more);
    run_loops(1, one, N);
    for (int threads = 2; threads <= 5; threads++) {
        run_loops(threads, more, N);
        assert_memory_equal(one, more, N * sizeof *one);
    }
    free(one);
    free(more);
}

/* Ranks of a LOCAL world are threads of one process, each with its stream: neither may change the other's results, nor
 * its threads. */
struct rank {
    pthread_t thread;
    int threads;
    float *loops;
    float product[64 * 96];
};

static void *run_rank(void *arg)
{
    enum { M = 64, N = 96, K = 512 };
    struct rank *r = arg;
    struct error err;
    const struct kernels *k = kernels_cpu_fp32();
    struct kstream *ks;
    float *a = calloc(M * K, sizeof *a), *b = calloc(N * K, sizeof *b);
    if (!a || !b || k->stream_create(r->threads, &ks, &err) != ERR_OK)
        abort();
    for (int i = 0; i < M * K; i++)
        a[i] = (float)(i % 1013) / 1013 - 0.3f;
    for (int i = 0; i < N * K; i++)
        b[i] = (float)(i % 997) / 997 - 0.6f;
    const struct gemm g = {.m = M, .n = N, .k = K, .trans_b = true, .lda = K, .ldb = K, .ldc = N, .batch = 1};
    for (int i = 0; i < 50; i++)
        k->gemm(ks, &g, a, b, r->product);
    run_loops(r->threads, r->loops, RANK_FLOATS);
    k->stream_destroy(ks);
    free(a);
    free(b);
    return NULL;
}

static void test_ranks_as_threads(void **state)
{
    (void)state;
    enum { RANKS = 4 };
    struct rank *alone = calloc(RANKS, sizeof *alone), *together = calloc(RANKS, sizeof *together);
    assert_non_null(alone);
    assert_non_null(together);
    for (int i = 0; i < RANKS; i++) {
        alone[i].threads = together[i].threads = 1 + i % 2;
        alone[i].loops = calloc(RANK_FLOATS, sizeof(float));
        together[i].loops = calloc(RANK_FLOATS, sizeof(float));
        assert_non_null(alone[i].loops);
        assert_non_null(together[i].loops);
        run_rank(&alone[i]);
    }
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(pthread_create(&together[i].thread, NULL, run_rank, &together[i]), 0);
    for (int i = 0; i < RANKS; i++)
        pthread_join(together[i].thread, NULL);
    for (int i = 0; i < RANKS; i++) {
        assert_memory_equal(together[i].product, alone[i].product, sizeof alone[i].product);
        assert_memory_equal(together[i].loops, alone[i].loops, RANK_FLOATS * sizeof(float));
        free(alone[i].loops);
        free(together[i].loops);
    }
    free(alone);
    free(together);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_arguments),
        cmocka_unit_test(test_tables_are_complete),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_zeros),
        cmocka_unit_test(test_cast),
        cmocka_unit_test(test_bad_cast),
        cmocka_unit_test(test_exponential),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_ranks_as_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
