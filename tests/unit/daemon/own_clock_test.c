/* Time that stands still while the process does not run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/log.h"
#include "daemon/own_clock.h"
#include "proto/base/clock.h"

#define S NS_PER_S

static void runs_with_the_clock(void **state)
{
    (void)state;
    struct own_clock c = {0};
    assert_int_equal(own_clock_ns(&c, 100 * S), 100 * S);
    assert_int_equal(own_clock_ns(&c, 200 * S), 200 * S); /* nothing was planned: work of its own, or the first look */
    own_clock_sleep(&c, 210 * S);
    assert_int_equal(own_clock_ns(&c, 210 * S + S / 4), 210 * S + S / 4); /* a little late */
    own_clock_sleep(&c, INT64_MAX);
    assert_int_equal(own_clock_ns(&c, 900 * S), 900 * S); /* nothing was to be done */
    own_clock_sleep(&c, 901 * S);
    for (int ms = 100; ms <= 5000; ms += 100) /* long work, with looks in between */
        assert_int_equal(own_clock_ns(&c, 900 * S + ms * NS_PER_MS), 900 * S + ms * NS_PER_MS);
}

static void stands_still_while_the_process_does(void **state)
{
    (void)state;
    struct own_clock c = {0};
    log_set_level(LOG_ERROR);
    own_clock_ns(&c, 100 * S);
    own_clock_sleep(&c, 101 * S);
    assert_int_equal(own_clock_ns(&c, 160 * S), 100 * S);
    assert_int_equal(c.behind_ns, 60 * S);
    assert_int_equal(own_clock_ns(&c, 160 * S + 1), 100 * S + 1);
    own_clock_sleep(&c, 161 * S);
    assert_int_equal(own_clock_ns(&c, 161 * S), 101 * S);
    own_clock_sleep(&c, 162 * S);
    assert_int_equal(own_clock_ns(&c, 170 * S), 101 * S); /* and again */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_with_the_clock),
        cmocka_unit_test(stands_still_while_the_process_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
