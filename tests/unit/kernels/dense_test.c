/* Products and truncated singular value decompositions on the host, against matrices whose decomposition is known in closed
 * form: W = sum over k of s_k u_k v_k^T with the orthonormal vectors of a cosine transform. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/dense.h"

static const double PI = 3.14159265358979323846;

/* Component i of basis vector k of n: the orthonormal DCT-II. */
static double basis(int64_t n, int64_t k, int64_t i)
{
    return sqrt((k ? 2.0 : 1.0) / (double)n) * cos(PI * (double)k * (2 * (double)i + 1) / (2 * (double)n));
}

/* Singular value number k. */
static double value(int64_t k)
{
    return 3 * pow(0.8, (double)k);
}

/* Its terms from number `first` to `end`, of element (i, j). */
static double term_sum(int64_t m, int64_t n, int64_t first, int64_t end, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t k = first; k < end; k++)
        sum += value(k) * basis(m, k, i) * basis(n, k, j);
    return sum;
}

static void check(int64_t m, int64_t n, int64_t r)
{
    struct error err;
    int64_t least = m < n ? m : n;
    float *w = calloc((size_t)(m * n), sizeof *w), *product = calloc((size_t)(m * n), sizeof *product);
    float *b = calloc((size_t)(m * r), sizeof *b), *a = calloc((size_t)(r * n), sizeof *a);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            w[i * n + j] = (float)term_sum(m, n, 0, least, i, j);
    assert_int_equal(dense_truncate(m, n, r, w, b, a, &err), 0);
    assert_int_equal(dense_product(m, n, r, b, a, product, &err), 0);
    double error2 = 0, discarded2 = 0, worst = 0;
    for (int64_t k = r; k < least; k++)
        discarded2 += value(k) * value(k);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double all = term_sum(m, n, 0, least, i, j), kept = term_sum(m, n, 0, r, i, j);
            error2 += (product[i * n + j] - all) * (product[i * n + j] - all);
            worst = fmax(worst, fabs(product[i * n + j] - kept));
        }
    /* fp32's rounding of a decomposition is some units of 2^-24 of the largest value, per step of its length. */
    double bound = 0x1p-24 * value(0) * (double)(m + n);
    assert_true(worst < bound);
    assert_true(fabs(sqrt(error2) - sqrt(discarded2)) < bound);
    /* Both factors have the root of each value: columns of b and rows of a are orthogonal, of length sqrt(s_k). */
    for (int64_t k = 0; k < r; k++)
        for (int64_t l = 0; l < r; l++) {
            double bb = 0, aa = 0, want = k == l ? value(k) : 0;
            for (int64_t i = 0; i < m; i++)
                bb += (double)b[i * r + k] * b[i * r + l];
            for (int64_t j = 0; j < n; j++)
                aa += (double)a[k * n + j] * a[l * n + j];
            assert_true(fabs(bb - want) < bound && fabs(aa - want) < bound);
        }
    free(w);
    free(product);
    free(b);
    free(a);
}

static void error_is_what_was_discarded(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{24, 24, 6},  {40, 24, 8}, {24, 40, 8},  {16, 16, 16},
                                        {9, 31, 9},   {31, 9, 9},  {7, 5, 1},    {1, 12, 1},
                                        {64, 96, 24}, {96, 64, 1}, {33, 65, 32}, {65, 33, 5}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(shapes[i][0], shapes[i][1], shapes[i][2]);
}

static void what_is_not_finite_is_refused(void **state)
{
    (void)state;
    struct error err;
    float w[6] = {1, 2, 3, NAN, 5, 6}, b[2], a[3];
    assert_int_equal(dense_truncate(2, 3, 1, w, b, a, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "finite"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_is_what_was_discarded),
        cmocka_unit_test(what_is_not_finite_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
