/* Learning-rate schedules: the fixed points of known-failures.md T22 and the shapes between. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "worker/schedule.h"

static Boost__Optimizer optimizer(Boost__Schedule__Value schedule, int64_t warmup)
{
    Boost__Optimizer o = BOOST__OPTIMIZER__INIT;
    o.lr = 3e-3;
    o.schedule = schedule;
    o.warmup_steps = warmup;
    o.min_lr_ratio = 0.1;
    o.wsd_decay_steps = schedule == BOOST__SCHEDULE__VALUE__WSD ? 20 : 0;
    return o;
}

static void near(double a, double b)
{
    assert_true(fabs(a - b) < 1e-15);
}

static void fixed_points(void **state)
{
    (void)state;
    for (int schedule = BOOST__SCHEDULE__VALUE__COSINE; schedule <= BOOST__SCHEDULE__VALUE__WSD; schedule++) {
        Boost__Optimizer o = optimizer((Boost__Schedule__Value)schedule, 10);
        near(schedule_lr(&o, 100, 1), 3e-4); /* peak / warmup: the first step does something */
        near(schedule_lr(&o, 100, 7), 2.1e-3);
        near(schedule_lr(&o, 100, 10), 3e-3);
        near(schedule_lr(&o, 100, 100), schedule == BOOST__SCHEDULE__VALUE__CONSTANT ? 3e-3 : 3e-4);
        for (int64_t s = 10; s < 100; s++) /* never rises again */
            assert_true(schedule_lr(&o, 100, s + 1) <= schedule_lr(&o, 100, s));
    }
}

static void shapes(void **state)
{
    (void)state;
    Boost__Optimizer o = optimizer(BOOST__SCHEDULE__VALUE__COSINE, 20);
    near(schedule_lr(&o, 100, 60), 3e-4 + 2.7e-3 / 2);                           /* half-way */
    near(schedule_lr(&o, 100, 40), 3e-4 + 2.7e-3 * 0.5 * (1 + sqrt(0.5)));       /* an eighth of the wave */
    o.schedule = BOOST__SCHEDULE__VALUE__LINEAR;
    near(schedule_lr(&o, 100, 40), 3e-3 - 2.7e-3 / 4);
    o = optimizer(BOOST__SCHEDULE__VALUE__WSD, 20);
    near(schedule_lr(&o, 100, 80), 3e-3); /* stable until the last 20 steps */
    near(schedule_lr(&o, 100, 90), 3e-3 - 2.7e-3 / 2);
}

static void edges(void **state)
{
    (void)state;
    Boost__Optimizer o = optimizer(BOOST__SCHEDULE__VALUE__COSINE, 0);
    assert_true(schedule_lr(&o, 1000, 1) > 0.99999 * 3e-3);
    near(schedule_lr(&o, 1000, 1000), 3e-4);
    o.warmup_steps = 50; /* longer than the run: still on the warm-up line */
    near(schedule_lr(&o, 10, 10), 3e-3 / 5);
    o.warmup_steps = 10; /* as long as the run */
    near(schedule_lr(&o, 10, 10), 3e-3);
    o = optimizer(BOOST__SCHEDULE__VALUE__WSD, 30);
    o.wsd_decay_steps = 90; /* overlaps the warm-up: the decay starts behind it */
    near(schedule_lr(&o, 100, 30), 3e-3);
    near(schedule_lr(&o, 100, 100), 3e-4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixed_points),
        cmocka_unit_test(shapes),
        cmocka_unit_test(edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
