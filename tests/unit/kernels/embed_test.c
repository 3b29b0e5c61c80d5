/* embed, embed_backward and interleave; tokens of other shards, repeated tokens, several parts. */
#include "check.h"

static int32_t *some_tokens(struct variant *v, int64_t T, int64_t vocab)
{
    int32_t *tokens = keep_host(v, (size_t)T * sizeof *tokens);
    for (int64_t i = 0; i < T; i++)
        tokens[i] = (int32_t)random_below(v, vocab);
    return tokens;
}

static void one_embed(struct variant *v, int64_t T, int64_t first, int64_t rows, int64_t vocab, int64_t w, int parts)
{
    int64_t width = w * parts, n = T * width, nt = rows * width;
    int32_t *tokens = some_tokens(v, T, vocab);
    double *table = host_random(v, nt, 1), *dout = host_random(v, n, 1), *dtable = host_random(v, nt, 1);
    real *want = host_reals(v, n), *want_t = host_reals(v, nt), *size = host_reals(v, nt);
    for (int64_t i = 0; i < nt; i++)
        size[i] = fabsl(want_t[i] = dtable[i]);
    for (int64_t i = 0; i < T; i++) {
        int64_t row = tokens[i] - first;
        if (row < 0 || row >= rows)
            continue;
        for (int64_t j = 0; j < width; j++) {
            int64_t at = (j / w) * T * w + i * w + j % w;
            want[at] = table[row * width + j];
            want_t[row * width + j] += dout[at];
            size[row * width + j] += fabsl(dout[at]);
        }
    }
    int32_t *dtok = device_tokens(v, T, tokens);
    void *out = device_poison(v, n), *dt[2], *ddout = device_values(v, n, dout);
    v->k->embed(v->ks, T, first, rows, width, parts, dtok, device_values(v, nt, table), out);
    check(v, "embedding", n, out, want, NULL, 0);
    for (int r = 0; r < 2; r++) {
        dt[r] = grad_values(v, nt, dtable);
        v->k->embed_backward(v->ks, T, first, rows, width, parts, dtok, ddout, dt[r]);
    }
    check(v, "dtable", nt, dt[0], want_t, size, sum_roundings(T));
    check_same_bits(v, "dtable", nt, dt[0], dt[1]);
    forget(v);
}

static void embeds(struct variant *v)
{
    one_embed(v, 1, 0, 1, 1, 1, 1);
    one_embed(v, 50, 0, 20, 20, 12, 1);
    one_embed(v, 50, 5, 6, 20, 7, 3);
    one_embed(v, 700, 128, 128, 256, 33, 2);
    one_embed(v, 700, 0, 3, 3, 130, 1); /* every row many times */
    one_embed(v, 1100, 4, 30, 40, 65, 2);
    one_embed(v, 300, 2, 5, 9, 264, 2);
}

static void test_embed(void **state)
{
    (void)state;
    each_variant(embeds);
}

/* The order of the sum is that of the tokens: 1e8 + 1 - 1e8 in floats is 0, in another order 1. */
static void ordered(struct variant *v)
{
    int32_t tokens[3] = {1, 1, 1};
    double dout[3] = {1e8, 1, -1e8}, zero[2] = {0, 0};
    void *dtable = grad_values(v, 2, zero);
    v->k->embed_backward(v->ks, 3, 0, 2, 1, 1, device_tokens(v, 3, tokens), device_values(v, 3, dout), dtable);
    assert_true(fetch(v, dtable, 2)[1] == (v->k->act == DTYPE_F64 ? 1 : 0));
}

static void test_token_order(void **state)
{
    (void)state;
    each_variant(ordered);
}

static void interleaves(struct variant *v)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {2, 200, 96}, {4, 33, 65}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t parts = shapes[s][0], T = shapes[s][1], w = shapes[s][2], n = parts * T * w;
        double *in = host_random(v, n, 1);
        real *want = host_reals(v, n);
        for (int64_t i = 0; i < n; i++) {
            int64_t row = i / (parts * w), column = i % (parts * w);
            want[i] = in[(column / w * T + row) * w + column % w];
        }
        void *out = device_poison(v, n);
        v->k->interleave(v->ks, (int)parts, T, w, device_values(v, n, in), out);
        check(v, "interleaved", n, out, want, NULL, 0);
        forget(v);
    }
}

static void test_interleave(void **state)
{
    (void)state;
    each_variant(interleaves);
}

/* Columns between others, which stay as they are. */
static void one_copy(struct variant *v, int64_t rows, int64_t w, int64_t ldx, int64_t ldy, bool accumulate)
{
    double *x = host_random(v, rows * ldx, 1), *y = host_random(v, rows * ldy, 1);
    real *want = host_reals(v, rows * ldy);
    for (int64_t i = 0; i < rows * ldy; i++) {
        bool inside = i % ldy < w;
        want[i] = (!inside || accumulate ? (real)y[i] : 0) + (inside ? (real)x[i / ldy * ldx + i % ldy] : 0);
    }
    void *out = device_values(v, rows * ldy, y);
    v->k->copy_rows(v->ks, rows, w, device_values(v, rows * ldx, x), ldx, accumulate, out, ldy);
    check(v, "copied", rows * ldy, out, want, NULL, accumulate ? 1 : 0);
    forget(v);
}

static void copies(struct variant *v)
{
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        one_copy(v, 1, 1, 1, 1, accumulate);
        one_copy(v, 33, 7, 9, 12, accumulate);
        one_copy(v, 700, 96, 96, 96, accumulate);
        one_copy(v, 1400, 96, 97, 96, accumulate);
    }
}

static void test_copy_rows(void **state)
{
    (void)state;
    each_variant(copies);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_token_order),
        cmocka_unit_test(test_interleave),
        cmocka_unit_test(test_copy_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
