/* The order of samples: permutations, and the mixture of files. */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/data_order.h"

static void every_epoch_is_a_permutation(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 1023, 4096, 5000};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int64_t n = sizes[k];
            bool *seen = calloc((size_t)n, 1);
            for (int64_t i = 0; i < n; i++) {
                int64_t x = data_permute(7, epoch, n, i);
                assert_true(x >= 0 && x < n && !seen[x]);
                seen[x] = true;
            }
            free(seen);
        }
}

/* Large n in constant time; the values, from an independent program, are written down so that the order
 * never changes unnoticed. */
static void the_order_is_fixed_for_ever(void **state)
{
    (void)state;
    assert_int_equal(data_permute(1, 0, 1000, 0), data_permute(1, 0, 1000, 0));
    int64_t n = INT64_C(1) << 40;
    for (int64_t i = 0; i < 1000; i++)
        assert_in_range(data_permute(3, 2, n, n - 1 - i), 0, n - 1);
    int moved = 0, other_seed = 0, other_epoch = 0;
    for (int64_t i = 0; i < 1000; i++) {
        moved += data_permute(1, 0, 1000, i) != i;
        other_seed += data_permute(1, 0, 1000, i) != data_permute(2, 0, 1000, i);
        other_epoch += data_permute(1, 0, 1000, i) != data_permute(1, 1, 1000, i);
    }
    assert_true(moved > 980 && other_seed > 980 && other_epoch > 980);
    static const int64_t first[] = {148, 449, 672, 575, 445, 219, 134, 601};
    for (int64_t i = 0; i < 8; i++)
        assert_int_equal(data_permute(1, 0, 1000, i), first[i]);
}

/* Mean displacement of neighbours: a shuffle, not a rotation. Pairs (i, i+1) of a uniform permutation are
 * (n+1)/3 apart on average with standard error below n / (4 sqrt(n)). */
static void neighbours_are_torn_apart(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 5; seed++) {
        int64_t n = 10000;
        double sum = 0;
        for (int64_t i = 0; i + 1 < n; i++)
            sum += (double)llabs(data_permute(seed, 0, n, i + 1) - data_permute(seed, 0, n, i));
        double mean = sum / (double)(n - 1);
        assert_true(mean > 3333 - 5 * 25 && mean < 3334 + 5 * 25);
    }
}

/* ---- mixture ------------------------------------------------------------------------------ */

static void make(struct data_mixture *m, const double *weights, int files)
{
    struct error err = {0};
    if (data_mixture_make(m, weights, files, &err))
        fail_msg("%s", err.message);
}

/* Over every prefix of three periods: each file within one sample of its share, each file's samples numbered
 * 0, 1, 2, ... without a gap; all in whole numbers. Then against the weights as they were given. */
static void hold(const double *weights, int files, double off_by)
{
    struct data_mixture m;
    make(&m, weights, files);
    int64_t *given = calloc((size_t)files, sizeof *given), all = 0;
    double sum = 0, worst = 0;
    for (int f = 0; f < files; f++) {
        assert_true(m.share[f] >= 1);
        all += m.share[f];
        sum += weights[f];
    }
    assert_int_equal(all, m.period);
    int64_t step = files > 100 ? 997 : 1; /* which prefixes are looked at whole */
    for (int64_t n = 0; n < 3 * (int64_t)m.period; n++) {
        int file;
        int64_t number;
        data_mixture_at(&m, n, &file, &number);
        assert_in_range(file, 0, files - 1);
        assert_int_equal(number, given[file]++);
        /* The file that was given one must not be ahead; a file that is behind shows at the next look at all. */
        assert_true(given[file] * m.period - (n + 1) * m.share[file] < m.period);
        if ((n + 1) % step)
            continue;
        for (int f = 0; f < files; f++) {
            int64_t lag = (n + 1) * m.share[f] - given[f] * m.period;
            assert_true(lag < m.period && lag > -m.period);
        }
    }
    for (int f = 0; f < files; f++) {
        assert_int_equal(given[f], 3 * (int64_t)m.share[f]);
        worst = fmax(worst, fabs((double)m.share[f] / m.period - weights[f] / sum));
    }
    assert_true(worst <= off_by);
    free(given);
    data_mixture_free(&m);
}

static void every_prefix_is_within_one_sample(void **state)
{
    (void)state;
    static const double exact = 1e-12, part = 1.0 / MIXTURE_PERIOD_MAX;
    hold((double[]){5}, 1, exact);
    hold((double[]){1, 1}, 2, exact);
    hold((double[]){3, 1}, 2, exact);
    hold((double[]){0.7, 0.2, 0.1}, 3, exact);
    hold((double[]){1, 1e-5}, 2, exact);
    hold((double[]){99, 1, 50, 50}, 4, exact);
    hold((double[]){1e300, 2e300}, 2, exact);
    hold((double[]){1, M_PI, M_E}, 3, part);
    hold((double[]){1, 2.2e-6}, 2, part);
    double many[300];
    uint32_t x = 9;
    for (int k = 0; k < 300; k++) {
        x = x * 1664525 + 1013904223;
        many[k] = exp((double)(x >> 8) / (1 << 24) * 8);
    }
    hold(many, 40, part);
    hold(many, 300, part);
    for (int k = 0; k < 300; k++)
        many[k] = 0.1 + k % 7;
    hold(many, 300, part);
}

/* Small integer ratios are hit exactly, with the smallest period; the sequences are worked out by hand from
 * "earliest deadline first, then the lower number". */
static void small_ratios_by_hand(void **state)
{
    (void)state;
    static const struct {
        double weights[3];
        int files, period;
        const char *sequence;
    } cases[] = {
        {{1}, 1, 1, "0000"},
        {{2, 2}, 2, 2, "0101"},
        {{3, 1}, 2, 4, "00010001"},
        {{1, 2}, 2, 3, "101101"},
        {{0.5, 0.25, 0.25}, 3, 4, "01020102"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct data_mixture m;
        make(&m, cases[k].weights, cases[k].files);
        assert_int_equal(m.period, cases[k].period);
        for (int64_t n = 0; cases[k].sequence[n]; n++) {
            int file;
            int64_t number;
            data_mixture_at(&m, n, &file, &number);
            assert_int_equal(file, cases[k].sequence[n] - '0');
        }
        data_mixture_free(&m);
    }
}

static void a_share_of_nothing_is_refused(void **state)
{
    (void)state;
    struct data_mixture m;
    struct error err;
    double weights[] = {1, 1, 1e-9};
    assert_int_equal(data_mixture_make(&m, weights, 3, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "data.train[2].weight = 1e-09"));
}

static void files_have_seeds_of_their_own(void **state)
{
    (void)state;
    assert_int_equal(data_file_seed(42, 0), 42); /* one file: the order that it always had */
    for (int f = 1; f < 50; f++)
        for (int g = 0; g < f; g++)
            assert_true(data_file_seed(42, f) != data_file_seed(42, g));
    assert_true(data_file_seed(42, 1) != data_file_seed(43, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_epoch_is_a_permutation),  cmocka_unit_test(the_order_is_fixed_for_ever),
        cmocka_unit_test(neighbours_are_torn_apart),     cmocka_unit_test(every_prefix_is_within_one_sample),
        cmocka_unit_test(small_ratios_by_hand),          cmocka_unit_test(a_share_of_nothing_is_refused),
        cmocka_unit_test(files_have_seeds_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
