/* submit --array: numbers, and what --set gives to each task. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ctl/array.h"

static void numbers(void **state)
{
    (void)state;
    static const struct {
        const char *text, *want;
        int limit;
    } rows[] = {
        {"0-3", "0 1 2 3 ", 0},
        {"7", "7 ", 0},
        {"1,3,5-7", "1 3 5 6 7 ", 0},
        {"0-10:5", "0 5 10 ", 0},
        {"0-9:4%2", "0 4 8 ", 2},
        {"5,999999%1000", "5 999999 ", 1000},
        {"0-2,10-20:10", "0 1 2 10 20 ", 0},
    };
    struct array a;
    struct error err;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char got[64] = "";
        assert_int_equal(array_parse(rows[i].text, &a, &err), ERR_OK);
        for (int k = 0; k < a.n; k++)
            snprintf(got + strlen(got), sizeof got - strlen(got), "%d ", a.index[k]);
        assert_string_equal(got, rows[i].want);
        assert_int_equal(a.limit, rows[i].limit);
    }
    assert_int_equal(array_parse("0-999", &a, &err), ERR_OK);
    static const char *const bad[] = {"",        "-1",  "a",      "3-1",      "1,1",  "2,1",
                                      "1-",      "1:0", "0-9%0",  "1,,2",     "0-9%", "0-5,",
                                      "1000000", "1 2", "0-1000", "0-9%4,12", "0-9:", "1-3,2-4"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (array_parse(bad[i], &a, &err) != ERR_USAGE)
            fail_msg("'%s' is taken", bad[i]);
        assert_non_null(strstr(err.hint, "0-99%4"));
    }
}

static void substitution(void **state)
{
    (void)state;
    struct array a;
    struct error err;
    char *out;
    static const struct {
        const char *from, *second;
    } rows[] = {
        {"optimizer.lr={1e-3|2e-3|4e-3}", "optimizer.lr=2e-3"},
        {"run.seed={i}", "run.seed=5"},
        {"checkpoint.dir=/c/{i}/{a|b|c}{i}", "checkpoint.dir=/c/5/b5"},
        {"name={|x|}", "name=x"},
        {"label+={key: \"a\" value: \"{i}\"}", "label+={key: \"a\" value: \"5\"}"},
        {"env+={key: \"A\"}", "env+={key: \"A\"}"},
        {"x=}{", "x=}{"},
        {"plain", "plain"},
    };
    assert_int_equal(array_parse("3,5,7", &a, &err), ERR_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(array_substitute(&a, 1, rows[i].from, &out, &err), ERR_OK);
        assert_string_equal(out, rows[i].second);
        free(out);
    }
    assert_int_equal(array_substitute(&a, 0, "optimizer.lr={1|2}", &out, &err), ERR_USAGE);
    assert_string_equal(err.message, "--set optimizer.lr={1|2}: the alternatives in {} are not as many as the 3 tasks");
    assert_null(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(numbers), cmocka_unit_test(substitution)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
