/* ctl/pace: what is left of an attempt, before, over and after a recovery. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stddef.h>

#include <cmocka.h>

#include "ctl/pace.h"
#include "proto/base/clock.h"

static void steps_of_one_attempt_give_its_pace(void **state)
{
    (void)state;
    struct pace p = {0};
    assert_true(pace_left_s(&p, 1, 10, 100, 50 * NS_PER_S) < 0);
    assert_true(pace_left_s(&p, 1, 10, 100, 55 * NS_PER_S) < 0);
    /* 20 steps in 10 s leave 70 steps, 35 s; powers of two and small integers: exact */
    assert_true(pace_left_s(&p, 1, 30, 100, 60 * NS_PER_S) == 35);
}

static void a_new_attempt_starts_the_measurement_again(void **state)
{
    (void)state;
    struct pace p = {0};
    (void)pace_left_s(&p, 1, 0, 180, 0);
    assert_true(pace_left_s(&p, 1, 90, 180, 90 * NS_PER_S) == 90);
    /* Back at step 60, ten times as fast; ahead of it, if the first look comes late. */
    assert_true(pace_left_s(&p, 2, 60, 180, 200 * NS_PER_S) < 0);
    assert_true(pace_left_s(&p, 2, 80, 180, 202 * NS_PER_S) == 10);
    assert_true(pace_left_s(&p, 3, 100, 180, 300 * NS_PER_S) < 0);
    assert_true(pace_left_s(&p, 3, 140, 180, 301 * NS_PER_S) == 1);
}

static void too_short_a_look_gives_nothing(void **state)
{
    (void)state;
    struct pace p = {0};
    (void)pace_left_s(&p, 1, 0, 100, 0);
    assert_true(pace_left_s(&p, 1, 50, 100, NS_PER_S / 2) < 0);
    assert_true(pace_left_s(&p, 1, 50, 100, NS_PER_S) == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_one_attempt_give_its_pace),
        cmocka_unit_test(a_new_attempt_starts_the_measurement_again),
        cmocka_unit_test(too_short_a_look_gives_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
