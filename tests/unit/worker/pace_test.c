/* The interval that loses least, against a search of Daly's own expectation of the run time. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "worker/pace.h"

/* Time that a run of 1 s of work takes, checkpoints every t: Daly (2006), eq. 20, without a restart's time. */
static double expected(double t, double cost, double m)
{
    return m * (exp((t + cost) / m) - 1) / t;
}

static void near_the_best(void **state)
{
    (void)state;
    static const double cases[][2] = {{0.1, 86400}, {2, 3600}, {30, 86400}, {5, 600}};
    for (int i = 0; i < 4; i++) {
        double cost = cases[i][0], m = cases[i][1], t = pace_seconds(cost, m), best = INFINITY;
        for (double x = 1; x < m; x *= 1.001)
            best = fmin(best, expected(x, cost, m));
        assert_true(expected(t, cost, m) < best * 1.0005);
        assert_true(fabs(t / sqrt(2 * cost * m) - 1) < 0.15); /* Young */
    }
}

static void at_its_ends(void **state)
{
    (void)state;
    assert_true(pace_seconds(1e-9, 10) == PACE_MIN_S);
    assert_true(pace_seconds(1000, 100) == 100);
    assert_true(pace_seconds(0.5, 86400) < pace_seconds(1, 86400));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(near_the_best),
        cmocka_unit_test(at_its_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
