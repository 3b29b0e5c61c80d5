/* The learning-rate table: its corners exactly, its shape, and that it depends on the step alone (T22). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "worker/schedule.h"

static Boost__Optimizer optimizer(Boost__Schedule__Value schedule, int64_t warmup)
{
    Boost__Optimizer o = BOOST__OPTIMIZER__INIT;
    o.lr = 3e-3;
    o.min_lr_ratio = 0.1;
    o.schedule = schedule;
    o.warmup_steps = warmup;
    o.wsd_decay_steps = 20;
    return o;
}

static void near(double a, double b)
{
    assert_true(fabs(a - b) <= 1e-12 * fabs(b));
}

static void corners(void **state)
{
    (void)state;
    static const Boost__Schedule__Value all[] = {BOOST__SCHEDULE__VALUE__COSINE, BOOST__SCHEDULE__VALUE__LINEAR,
                                                 BOOST__SCHEDULE__VALUE__WSD, BOOST__SCHEDULE__VALUE__CONSTANT};
    for (size_t i = 0; i < 4; i++)
        for (int64_t warmup = 1; warmup <= 50; warmup += 7) {
            Boost__Optimizer o = optimizer(all[i], warmup);
            near(schedule_lr(&o, 100, 1), o.lr / (double)warmup);
            near(schedule_lr(&o, 100, warmup), o.lr);
            near(schedule_lr(&o, 100, 100), all[i] == BOOST__SCHEDULE__VALUE__CONSTANT ? o.lr : o.lr * 0.1);
            for (int64_t n = 1; n < 100; n++) {
                double a = schedule_lr(&o, 100, n), b = schedule_lr(&o, 100, n + 1);
                assert_true(a > 0 && a <= o.lr * (1 + 1e-15));
                assert_true(n < warmup ? b > a : b <= a);
            }
        }
}

static void shapes(void **state)
{
    (void)state;
    Boost__Optimizer o = optimizer(BOOST__SCHEDULE__VALUE__COSINE, 0);
    near(schedule_lr(&o, 100, 50), o.lr * 0.55);
    near(schedule_lr(&o, 100, 25), o.lr * (0.1 + 0.9 * 0.5 * (1 + sqrt(0.5))));
    o = optimizer(BOOST__SCHEDULE__VALUE__LINEAR, 20);
    near(schedule_lr(&o, 100, 60), o.lr * 0.55);
    o = optimizer(BOOST__SCHEDULE__VALUE__WSD, 10);
    near(schedule_lr(&o, 100, 80), o.lr);
    near(schedule_lr(&o, 100, 90), o.lr * 0.55);
    o = optimizer(BOOST__SCHEDULE__VALUE__COSINE, 200); /* the warm-up is never done */
    near(schedule_lr(&o, 100, 100), o.lr / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(corners), cmocka_unit_test(shapes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
