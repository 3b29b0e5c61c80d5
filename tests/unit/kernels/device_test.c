/* What a device has and the CPU backends have not: work recorded and replayed, several streams, scratch, choices of
 * algorithms that are saved. Skipped where no device is, but for the refusal of the library. */
#include "check.h"

#include "proto/base/buffer.h"

static void on_device(void (*body)(struct variant *))
{
    if (!find_cuda())
        skip();
    cuda_variant(body);
}

enum { M = 192, N = 128, K = 320 };
static const struct gemm product = {.m = M, .n = N, .k = K, .trans_b = true, .lda = K, .ldb = K, .ldc = N, .batch = 1};

struct operands {
    double *a, *b;
    void *da, *db, *c;
};

static struct operands operands(struct variant *v)
{
    struct operands o = {.a = host_random(v, M * K, 1), .b = host_random(v, N * K, 1)};
    o.da = device_values(v, M * K, o.a);
    o.db = device_values(v, N * K, o.b);
    o.c = device_poison(v, M * N);
    return o;
}

/* ---- captured sequences -------------------------------------------------------------------- */

/* Recorded, not run; every launch reads its inputs anew, those in page-locked host memory too, and gives the bits of
 * the same calls made one by one. */
static void captured(struct variant *v)
{
    const struct kernels *k = v->k;
    struct error err;
    struct kgraph *graph;
    struct operands o = operands(v);
    void *wide = typed_poison(v, DTYPE_F32, M * N), *eager = device_poison(v, M * N), *input = device_poison(v, M * K);
    uint16_t *host = k->host_alloc((size_t)M * K * sizeof *host, &err);
    assert_non_null(host);
    k->gemm(v->ks, &product, o.da, o.db, o.c); /* makes the plan */
    poison(v, o.c, (size_t)M * N * 2);

    assert_int_equal(k->capture_begin(v->ks, &err), ERR_OK);
    k->upload(v->ks, input, host, (size_t)M * K * sizeof *host);
    k->gemm(v->ks, &product, input, o.db, o.c);
    k->cast(v->ks, DTYPE_F32, wide, DTYPE_BF16, o.c, M * N);
    assert_int_equal(k->capture_end(v->ks, &graph, &err), ERR_OK);
    assert_true(isnan(fetch(v, o.c, M * N)[0]));

    for (int turn = 0; turn < 3; turn++) {
        double *a = host_random(v, M * K, 1);
        for (int i = 0; i < M * K; i++)
            host[i] = to_bf16((float)a[i]);
        k->graph_launch(v->ks, graph);
        must_sync(v);
        k->gemm(v->ks, &product, device_values(v, M * K, a), o.db, eager);
        check_same_bits(v, "C", M * N, o.c, eager);
        assert_memory_equal(fetch(v, wide, M * N), fetch(v, eager, M * N), M * N * sizeof(double));
    }
    k->graph_destroy(graph);
    k->graph_destroy(NULL);
    k->host_release(host);
}

static void test_captured(void **state)
{
    (void)state;
    on_device(captured);
}

/* A fault between the two is capture_end()'s, and the stream is usable behind it. */
static void capture_fault(struct variant *v)
{
    const struct kernels *k = v->k;
    struct error err;
    struct kgraph *graph;
    struct operands o = operands(v);
    struct gemm bad = product;
    bad.lda = 1;
    assert_int_equal(k->capture_begin(v->ks, &err), ERR_OK);
    k->gemm(v->ks, &bad, o.da, o.db, o.c);
    assert_int_equal(k->capture_end(v->ks, &graph, &err), ERR_INTERNAL);
    assert_null(graph);
    assert_non_null(strstr(err.message, "lda=1"));
    assert_int_equal(k->stream_sync(v->ks, &err), ERR_OK);
    k->gemm(v->ks, &product, o.da, o.db, o.c);
    assert_true(isfinite(fetch(v, o.c, M * N)[0]));
}

static void test_capture_fault(void **state)
{
    (void)state;
    on_device(capture_fault);
}

/* ---- several streams --------------------------------------------------------------------------- */

/* Rows that are copied from one to the next, in turn by two streams: without the waits a link would read what is not
 * there yet. Products before each mark keep the first stream busy. */
enum { LINKS = 16, W = 64, ALL = (LINKS + 1) * W };
static void chain(struct variant *v, struct kstream *beside, const struct operands *o, char *x)
{
    const struct kernels *k = v->k;
    size_t row = W * dtype_size(k->act);
    for (int i = 0; i < LINKS; i += 2) {
        char *at = x + (size_t)i * row;
        k->gemm(v->ks, &product, o->da, o->db, o->c);
        k->copy_rows(v->ks, 1, W, at, W, false, at + row, W);
        k->mark(v->ks, 0);
        k->await(beside, v->ks, 0);
        k->copy_rows(beside, 1, W, at + row, W, false, at + 2 * row, W);
        k->mark(beside, 1);
        k->await(v->ks, beside, 1);
    }
}

static void streams(struct variant *v)
{
    const struct kernels *k = v->k;
    struct error err;
    struct kstream *beside;
    struct operands o = operands(v);
    assert_int_equal(k->stream_beside(v->ks, &beside, &err), ERR_OK);
    k->await(v->ks, beside, 7); /* not marked yet: not waited for */
    must_sync(v);
    k->mark(v->ks, KSTREAM_MARKS);
    assert_int_equal(k->stream_sync(v->ks, &err), ERR_INTERNAL);
    k->gemm(beside, &product, o.da, o.db, o.c); /* it has no scratch for one */
    assert_int_equal(k->stream_sync(beside, &err), ERR_INTERNAL);

    double *values = host_values(v, ALL);
    for (int i = 0; i < ALL; i++)
        values[i] = i < W ? random_value(v, 1) : NAN;
    for (int turn = 0; turn < 20; turn++) {
        char *x = device_values(v, ALL, values);
        if (turn % 2 == 0) {
            chain(v, beside, &o, x);
        } else {
            struct kgraph *graph;
            assert_int_equal(k->capture_begin(v->ks, &err), ERR_OK);
            chain(v, beside, &o, x);
            assert_int_equal(k->capture_end(v->ks, &graph, &err), ERR_OK);
            k->graph_launch(v->ks, graph);
            must_sync(v);
            k->graph_destroy(graph);
            k->await(beside, v->ks, 0); /* a mark of the sequence is none here */
        }
        const double *got = fetch(v, x, ALL);
        for (int i = 0; i <= LINKS; i++)
            assert_memory_equal(got + (size_t)i * W, values, W * sizeof *got);
    }
    must_sync(v);
    assert_int_equal(k->stream_sync(beside, &err), ERR_OK);
    k->stream_destroy(beside);
}

static void test_streams(void **state)
{
    (void)state;
    on_device(streams);
}

/* ---- scratch ---------------------------------------------------------------------------------------- */

/* Without it an operation does with none, or is a fault that says so. */
static void scratch(struct variant *v)
{
    struct error err;
    enum { ROWS = 1000, WIDTH = 96 };
    double *x = host_random(v, ROWS * WIDTH, 1), *zero = host_values(v, ROWS);
    real *want = host_reals(v, WIDTH);
    for (int i = 0; i < ROWS * WIDTH; i++)
        want[i % WIDTH] += (real)x[i] * x[i];
    void *dx = device_values(v, ROWS * WIDTH, x), *gain = device_values(v, WIDTH, x), *k = stat_values(v, ROWS, zero);
    void *out = device_poison(v, ROWS * WIDTH), *dgain = grad_zero(v, WIDTH);
    v->k->set_scratch(v->ks, NULL, 0);
    v->k->gain_backward(v->ks, ROWS, WIDTH, dx, gain, NULL, k, dx, false, out, dgain);
    if (v->k->stream_sync(v->ks, &err) == ERR_OK)
        check(v, "dgain", WIDTH, dgain, want, NULL, sum_roundings(ROWS));
    else
        assert_non_null(strstr(err.message, "scratch"));
}

static void test_scratch(void **state)
{
    (void)state;
    on_device(scratch);
}

/* ---- choices ------------------------------------------------------------------------------------------ */

static void save(struct variant *v, struct kstream *ks, struct buffer *out)
{
    struct error err;
    buffer_init(out, 1 << 20);
    if (v->k->choices_save(ks, out, &err) != ERR_OK)
        fail_msg("%s: %s", v->label, err.message);
}

static void choices(struct variant *v)
{
    const struct kernels *k = v->k;
    struct error err;
    struct kstream *other;
    struct buffer text, again;
    struct operands o = operands(v);
    void *c = device_poison(v, M * N);
    k->gemm(v->ks, &product, o.da, o.db, o.c);
    save(v, v->ks, &text);
    assert_int_equal(k->stream_create(1, &other, &err), ERR_OK);
    assert_int_equal(k->choices_load(other, (const char *)text.data, text.len, &err), ERR_OK);
    save(v, other, &again); /* kept although not used yet */
    assert_int_equal(again.len, text.len);
    assert_memory_equal(again.data, text.data, text.len);
    buffer_free(&again);
    k->set_scratch(other, v->scratch, k->scratch_bytes(&largest));
    k->gemm(other, &product, o.da, o.db, c);
    assert_int_equal(k->stream_sync(other, &err), ERR_OK);
    check_same_bits(v, "C", M * N, o.c, c);

    /* Of another device or library: not taken. */
    char *copy = keep_host(v, text.len + 1);
    memcpy(copy, text.data, text.len);
    *strchr(copy, '\n') = '~';
    assert_int_equal(k->choices_load(other, copy, text.len, &err), ERR_UNSUPPORTED);
    assert_int_equal(k->choices_load(other, "", 0, &err), ERR_UNSUPPORTED);
    /* A line that is cut short. */
    assert_int_equal(k->choices_load(other, (const char *)text.data, text.len - 1, &err), ERR_CORRUPT);
    k->stream_destroy(other);
    buffer_free(&text);
}

static void test_choices(void **state)
{
    (void)state;
    on_device(choices);
}

/* ---- the library ----------------------------------------------------------------------------------------- */

/* One of another build, or none at all, is refused with the reason. */
static void test_library(void **state)
{
    (void)state;
    struct error err;
    void *symbol = &err;
    bool there = find_cuda() != NULL;
    int rc = kernels_library("another build", "kernels_cuda", &symbol, &err);
    if (there) {
        assert_int_equal(rc, ERR_OK); /* open already, for this build */
        assert_int_equal(kernels_library(boost_build_id(), "no such name", &symbol, &err), ERR_UNSUPPORTED);
        assert_non_null(strstr(err.message, "no such name"));
    } else {
        assert_true(rc == ERR_DEVICE || rc == ERR_UNSUPPORTED);
        assert_true(strlen(err.message) > 0 && strlen(err.hint) > 0);
    }
    assert_true(rc == ERR_OK || symbol == NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_captured), cmocka_unit_test(test_capture_fault), cmocka_unit_test(test_streams),
        cmocka_unit_test(test_scratch),  cmocka_unit_test(test_library),       cmocka_unit_test(test_choices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
