/* What the kernel tests share: every backend and instruction set in turn, device memory from host values,
 * and the comparison with a long double reference.
 *
 * The bound of an element is  roundings * u * magnitude:  u is the unit roundoff of the backend (2^-53, 2^-24)
 * and magnitude the sum of the absolute terms that the element is made of (so that cancellation is
 * allowed for exactly). A sum of K terms in any order has roundings <= K in the worst case and about
 * sqrt(K) in practice; sum_roundings() takes 6 sqrt(K) + 6, six standard deviations of a random walk
 * (Higham and Mary, "A new approach to probabilistic rounding error analysis"), so a lost or doubled term shows.
 * Device memory is written by upload() and read by download() only, so that a device which is not the host can join:
 * the CUDA backend does where $BOOST_CUDA_LIBRARY names its library (and then has to), or where the library lies in
 * the build's lib/ and a device is there. BOOST_TEST_BACKEND=cuda runs the backends of that name alone, for tools under
 * which the others would take minutes.
 *
 * The bf16 backends compute in fp32 and round what they store as act once more: that adds 2^-8 of the result, which is
 * what the same computation done plainly has too. Inputs are floats, or bf16 numbers for those backends, so the
 * reference sees exactly what the kernel sees. */
#ifndef BOOST_TESTS_KERNELS_CHECK_H
#define BOOST_TESTS_KERNELS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka needs the four above first */
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/library.h"
#include "proto/base/bf16.h"
#include "proto/version.h"

#define UNUSED __attribute__((unused))

enum { POOL = 4096 };

struct variant {
    char label[64];
    const struct kernels *k;
    struct kstream *ks;
    bool gpu;
    void *scratch; /* the stream's, or NULL */
    double u;      /* unit roundoff of the arithmetic */
    double store;  /* and of storing as act, where that is more; else 0 */
    uint64_t random;
    void *host[POOL], *device[POOL];
    enum dtype type[POOL]; /* of what is at device[] */
    int hosts, devices;
};

typedef long double real;

/* ---- random values (splitmix64) --------------------------------------------------- */

static UNUSED uint64_t random_bits(struct variant *v)
{
    uint64_t z = v->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static UNUSED double round_bf16(double x)
{
    return from_bf16(to_bf16((float)x));
}

/* Uniform in [-scale, scale), a float; a bf16 number where that is act. */
static UNUSED double random_value(struct variant *v, double scale)
{
    float x = (float)(((double)(random_bits(v) >> 11) * 0x1p-52 - 1) * scale);
    return v->k->act == DTYPE_BF16 ? round_bf16(x) : x;
}

static UNUSED int64_t random_below(struct variant *v, int64_t n)
{
    return (int64_t)(random_bits(v) % (uint64_t)n);
}

/* ---- memory ------------------------------------------------------------------------ */

static UNUSED void *keep_host(struct variant *v, size_t bytes)
{
    assert_true(v->hosts < POOL);
    void *p = calloc(1, bytes ? bytes : 1);
    assert_non_null(p);
    return v->host[v->hosts++] = p;
}

static UNUSED double *host_values(struct variant *v, int64_t n)
{
    return keep_host(v, (size_t)n * sizeof(double));
}

static UNUSED real *host_reals(struct variant *v, int64_t n)
{
    return keep_host(v, (size_t)n * sizeof(real));
}

static UNUSED double *host_random(struct variant *v, int64_t n, double scale)
{
    double *p = host_values(v, n);
    for (int64_t i = 0; i < n; i++)
        p[i] = random_value(v, scale);
    return p;
}

static UNUSED void *device_bytes(struct variant *v, size_t bytes)
{
    struct error err;
    assert_true(v->devices < POOL);
    void *p = v->k->alloc(bytes, &err);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 256, 0);
    return v->device[v->devices++] = p;
}

static UNUSED void *device_typed(struct variant *v, enum dtype t, int64_t n)
{
    void *p = device_bytes(v, (size_t)n * dtype_size(t));
    v->type[v->devices - 1] = t;
    return p;
}

/* Of what was made by the functions below. */
static UNUSED enum dtype type_at(struct variant *v, const void *device)
{
    for (int i = v->devices - 1; i >= 0; i--)
        if (v->device[i] == device)
            return v->type[i];
    fail_msg("%s: not a tensor of this test", v->label);
    return DTYPE_COUNT;
}

static UNUSED void must_sync(struct variant *v)
{
    struct error err;
    if (v->k->stream_sync(v->ks, &err) != ERR_OK)
        fail_msg("%s: %s", v->label, err.message);
}

/* Between the host and the device; done when they return. */
static UNUSED void put_bytes(struct variant *v, void *dst, const void *host, size_t bytes)
{
    v->k->upload(v->ks, dst, host, bytes);
    must_sync(v);
}

static UNUSED void get_bytes(struct variant *v, void *host, const void *src, size_t bytes)
{
    v->k->download(v->ks, host, src, bytes);
    must_sync(v);
}

static UNUSED void *bytes_at(struct variant *v, const void *src, size_t bytes)
{
    void *host = keep_host(v, bytes);
    get_bytes(v, host, src, bytes);
    return host;
}

static UNUSED void poison(struct variant *v, void *dst, size_t bytes)
{
    void *host = malloc(bytes ? bytes : 1);
    assert_non_null(host);
    memset(host, 0xff, bytes);
    put_bytes(v, dst, host, bytes);
    free(host);
}

static UNUSED void put(struct variant *v, void *dst, int64_t n, const double *values)
{
    enum dtype t = type_at(v, dst);
    size_t bytes = (size_t)n * dtype_size(t);
    void *host = malloc(bytes ? bytes : 1);
    assert_non_null(host);
    for (int64_t i = 0; i < n; i++) {
        if (t == DTYPE_F64)
            ((double *)host)[i] = values[i];
        else if (t == DTYPE_F32)
            ((float *)host)[i] = (float)values[i];
        else
            ((uint16_t *)host)[i] = to_bf16((float)values[i]);
    }
    put_bytes(v, dst, host, bytes);
    free(host);
}

static UNUSED void *typed_values(struct variant *v, enum dtype t, int64_t n, const double *values)
{
    void *p = device_typed(v, t, n);
    put(v, p, n, values);
    return p;
}

/* An output that has not been written shows as NaN. */
static UNUSED void *typed_poison(struct variant *v, enum dtype t, int64_t n)
{
    void *p = device_typed(v, t, n);
    poison(v, p, (size_t)n * dtype_size(t));
    return p;
}

static UNUSED void *device_values(struct variant *v, int64_t n, const double *values)
{
    return typed_values(v, v->k->act, n, values);
}

static UNUSED void *stat_values(struct variant *v, int64_t n, const double *values)
{
    return typed_values(v, v->k->stat, n, values);
}

static UNUSED void *grad_values(struct variant *v, int64_t n, const double *values)
{
    return typed_values(v, v->k->grad, n, values);
}

static UNUSED void *device_poison(struct variant *v, int64_t n)
{
    return typed_poison(v, v->k->act, n);
}

static UNUSED void *stat_poison(struct variant *v, int64_t n)
{
    return typed_poison(v, v->k->stat, n);
}

static UNUSED void *grad_zero(struct variant *v, int64_t n)
{
    void *p = device_typed(v, v->k->grad, n);
    v->k->zero(v->ks, p, (size_t)n * dtype_size(v->k->grad));
    return p;
}

static UNUSED int32_t *device_tokens(struct variant *v, int64_t n, const int32_t *tokens)
{
    int32_t *p = device_bytes(v, (size_t)n * sizeof *p);
    put_bytes(v, p, tokens, (size_t)n * sizeof *p);
    return p;
}

/* The fp64 numbers that sums of a step are kept in. */
static UNUSED double *device_doubles(struct variant *v, int n, const double *values)
{
    double *p = device_typed(v, DTYPE_F64, n);
    put(v, p, n, values);
    return p;
}

static UNUSED double *fetch(struct variant *v, const void *device, int64_t n)
{
    enum dtype t = type_at(v, device);
    size_t bytes = (size_t)n * dtype_size(t);
    double *out = host_values(v, n);
    void *host = malloc(bytes ? bytes : 1);
    assert_non_null(host);
    get_bytes(v, host, device, bytes);
    for (int64_t i = 0; i < n; i++) {
        if (t == DTYPE_F64)
            out[i] = ((double *)host)[i];
        else
            out[i] = t == DTYPE_F32 ? ((float *)host)[i] : from_bf16(((uint16_t *)host)[i]);
    }
    free(host);
    return out;
}

static UNUSED void forget(struct variant *v)
{
    for (int i = 0; i < v->hosts; i++)
        free(v->host[i]);
    for (int i = 0; i < v->devices; i++)
        v->k->release(v->device[i]);
    v->hosts = v->devices = 0;
}

/* ---- comparison --------------------------------------------------------------------- */

static UNUSED double sum_roundings(int64_t terms)
{
    return 6 * sqrt((double)terms) + 6;
}

/* |got - want| <= roundings * u * magnitude for every element, and where that is not 0 what storing adds;
 * magnitude NULL means |want|. The fp32 exponential
 * is 0 below 2.4e-38; what is computed from it by a few factors may be off by that times those factors. */
static UNUSED void check(struct variant *v, const char *what, int64_t n, const void *device, const real *want,
                         const real *magnitude, double roundings)
{
    double *got = fetch(v, device, n);
    for (int64_t i = 0; i < n; i++) {
        real size = magnitude ? magnitude[i] : fabsl(want[i]);
        real bound = (real)(roundings * v->u) * size;
        if (bound > 0 && type_at(v, device) == DTYPE_BF16)
            bound += (real)v->store * (fabsl(want[i]) + bound);
        bound += v->k->act == DTYPE_F64 ? 1e-300L : 1e-33L;
        if (!(fabsl(got[i] - want[i]) <= bound))
            fail_msg("%s: %s[%lld of %lld] is %.17g, should be %.17Lg (error %.3Lg, bound %.3Lg)", v->label, what,
                     (long long)i, (long long)n, got[i], want[i], fabsl(got[i] - want[i]), bound);
    }
}

static UNUSED double frobenius_error(int64_t n, const double *got, const real *want)
{
    real error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return (double)sqrtl(error / (size > 0 ? size : 1));
}

static UNUSED void check_frobenius(struct variant *v, const char *what, int64_t n, const void *device, const real *want,
                                   double limit)
{
    double error = frobenius_error(n, fetch(v, device, n), want);
    if (!(error <= limit))
        fail_msg("%s: %s differs by %.3g (relative Frobenius), limit %.3g", v->label, what, error, limit);
}

static UNUSED void check_same_bits(struct variant *v, const char *what, int64_t n, const void *a, const void *b)
{
    size_t bytes = (size_t)n * dtype_size(type_at(v, a));
    void *x = malloc(bytes), *y = malloc(bytes);
    assert_non_null(x);
    assert_non_null(y);
    get_bytes(v, x, a, bytes);
    get_bytes(v, y, b, bytes);
    bool same = memcmp(x, y, bytes) == 0;
    free(x);
    free(y);
    if (!same)
        fail_msg("%s: %s differs between two equal calls", v->label, what);
}

/* Central differences of `loss` against the analytic gradient of `n` values at `x`. With h = 1e-5 the truncation is
 * about h^2 = 1e-10 and the rounding 1e-16 / h = 1e-11, relative to values of order one. */
static UNUSED void check_differences(struct variant *v, const char *what, int64_t n, double *x, const double *gradient,
                                     double (*loss)(void *), void *arg)
{
    real *want = host_reals(v, n);
    const double h = 1e-5;
    for (int64_t i = 0; i < n; i++) {
        double old = x[i];
        x[i] = old + h;
        double above = loss(arg);
        x[i] = old - h;
        double below = loss(arg);
        x[i] = old;
        want[i] = (above - below) / (2 * h);
    }
    double error = frobenius_error(n, gradient, want);
    if (!(error < 1e-7))
        fail_msg("%s: gradient of %s differs from central differences by %.3g", v->label, what, error);
}

/* ---- variants ------------------------------------------------------------------------ */

/* Larger than any tensor of these tests. */
static const struct scratch_shape largest = {.T = 4096, .width = 4096, .vocab = 4096};

static UNUSED void give_scratch(struct variant *v)
{
    struct error err;
    if (!v->k->scratch_bytes)
        return;
    size_t bytes = v->k->scratch_bytes(&largest);
    v->scratch = v->k->alloc(bytes, &err);
    assert_non_null(v->scratch);
    v->k->set_scratch(v->ks, v->scratch, bytes);
    poison(v, v->scratch, bytes);
}

static UNUSED void run_variant(const struct kernels *k, const char *isa, int threads, void (*body)(struct variant *))
{
    struct error err;
    const char *only = getenv("BOOST_TEST_BACKEND");
    if (only && strncmp(k->name, only, strlen(only)) != 0)
        return;
    struct variant *v = calloc(1, sizeof *v);
    assert_non_null(v);
    if (isa)
        setenv("BOOST_CPU_ISA", isa, 1);
    int rc = k->stream_create(threads, &v->ks, &err);
    unsetenv("BOOST_CPU_ISA");
    if (rc == ERR_OK) {
        v->k = k;
        v->gpu = strncmp(k->name, "cuda", 4) == 0;
        v->u = k->act == DTYPE_F64 ? 0x1p-53 : 0x1p-24;
        v->store = k->act == DTYPE_BF16 ? 0x1p-8 : 0;
        v->random = 20261129;
        snprintf(v->label, sizeof v->label, "%s %s, %d threads", k->name, isa ? isa : "", threads);
        give_scratch(v);
        body(v);
        must_sync(v);
        forget(v);
        k->release(v->scratch);
        k->stream_destroy(v->ks);
    } else {
        assert_true(isa && rc == ERR_INVALID); /* this machine lacks that instruction set */
    }
    free(v);
}

/* The CUDA backend, or NULL where it is not there, which is said once. */
static UNUSED const struct kernels *find_cuda(void)
{
    static bool known;
    static const struct kernels *found;
    if (known)
        return found;
    struct error err;
    void *symbol;
    const struct kernels *k = NULL, *(*table)(void);
    int rc = kernels_library(boost_build_id(), "kernels_cuda", &symbol, &err);
    if (!rc) {
        struct kstream *ks;
        memcpy(&table, &symbol, sizeof symbol);
        k = table();
        rc = k->stream_create(1, &ks, &err);
        if (!rc)
            k->stream_destroy(ks);
    }
    if (rc && getenv("BOOST_CUDA_LIBRARY"))
        fail_msg("BOOST_CUDA_LIBRARY is set, but: %s", err.message);
    if (rc)
        print_message("the CUDA backend was not tested: %s\n", err.message);
    found = rc ? NULL : k;
    known = true;
    return found;
}

static UNUSED void cuda_variant(void (*body)(struct variant *))
{
    if (find_cuda())
        run_variant(find_cuda(), NULL, 1, body);
}

static UNUSED void each_variant(void (*body)(struct variant *))
{
    run_variant(kernels_cpu_fp64(), NULL, 1, body);
    run_variant(kernels_cpu_fp32(), "baseline", 1, body);
    run_variant(kernels_cpu_fp32(), "avx2", 1, body);
    run_variant(kernels_cpu_fp32(), "avx512", 1, body);
    run_variant(kernels_cpu_fp32(), NULL, 3, body);
    run_variant(kernels_cpu_bf16(), "baseline", 1, body);
    run_variant(kernels_cpu_bf16(), NULL, 3, body);
    cuda_variant(body);
}

#endif
