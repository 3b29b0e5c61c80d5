/* ctl/format and ctl/json_out: numbers, durations, states, tables, UTF-8. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ctl/format.h"
#include "ctl/json_out.h"
#include "ctl/plot.h"

static void counts_have_three_digits(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0, "0"},          {7, "7"},          {950, "950"},      {999.6, "1.00k"}, {1210, "1.21k"},
                 {12100, "12.1k"},  {99940, "99.9k"},  {121000, "121k"},  {1.21e6, "1.21M"}, {999.96e6, "1.00G"},
                 {3.5e9, "3.50G"},  {7.25, "7.25"}};
    char out[FORMAT_TEXT];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_string_equal(format_count(cases[i].value, out), cases[i].text);
    assert_string_equal(format_bytes(1536, out), "1.50 KiB");
    assert_string_equal(format_bytes(12, out), "12 B");
}

static void durations_round_trip_by_eye(void **state)
{
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0.0s"},      {0.44, "0.4s"},     {9.96, "10s"},      {59.4, "59s"},     {59.6, "1m0s"},
                 {2462, "41m2s"},  {5520, "1h32m"},    {86400, "1d0h"},    {-3, "0.0s"},      {NAN, "0.0s"}};
    char out[FORMAT_TEXT];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_string_equal(format_duration(cases[i].seconds, out), cases[i].text);
}

static void durations_parse(void **state)
{
    (void)state;
    double s;
    assert_true(parse_duration("90", &s) && s == 90);
    assert_true(parse_duration("1.5h", &s) && s == 5400);
    assert_true(parse_duration("250ms", &s) && s == 0.25);
    assert_true(parse_duration("2d", &s) && s == 172800);
    assert_false(parse_duration("", &s));
    assert_false(parse_duration("h", &s));
    assert_true(parse_duration("40000d", &s));
    assert_false(parse_duration("50000d", &s)); /* 4.3e9 s */
    assert_false(parse_duration("inf", &s));
    assert_false(parse_duration("1e300", &s));
    assert_false(parse_duration("-1s", &s));
    assert_false(parse_duration("nan", &s));
    assert_false(parse_duration("inf", &s));
    assert_false(parse_duration("5 parsecs", &s));
}

static void states_have_letters_and_names(void **state)
{
    (void)state;
    const ProtobufCEnumDescriptor *type = &boost__job_state__value__descriptor;
    for (unsigned i = 0; i < type->n_values; i++) {
        Boost__JobState__Value value = (Boost__JobState__Value)type->values[i].value, back;
        assert_string_equal(state_name(value), type->values[i].name);
        assert_true(state_parse(state_letters(value), &back));
        assert_int_equal(back, value);
        assert_true(state_parse(state_name(value), &back));
        assert_int_equal(back, value);
    }
    Boost__JobState__Value out;
    assert_true(state_parse("running", &out));
    assert_false(state_parse("RUNNIN", &out));
}

/* What print_safe or table_print wrote. */
static char *captured;
static size_t captured_len;

static FILE *capture(void)
{
    free(captured);
    captured = NULL;
    return open_memstream(&captured, &captured_len);
}

static void text_of_a_job_cannot_drive_the_terminal(void **state)
{
    (void)state;
    FILE *f = capture();
    print_safe(f, "a\033[2Jb\a\tc\nd\xc2\x9b" "e\xff" "f\xe2\x82\xac\xe2\x82");
    fclose(f);
    assert_string_equal(captured, "a?[2Jb?\tc\nd?e?f\xe2\x82\xac??");
}

static void columns_align_by_characters(void **state)
{
    (void)state;
    static const char *const headers[] = {"N", "NAME", "INFO"};
    struct table *t = table_new(3, headers, "rll");
    table_cell(t, "%d", 7);
    table_cell(t, "\xc3\xa9t\xc3\xa9");
    table_cell(t, "two\nlines");
    table_cell(t, "%d", 1234);
    table_cell(t, "winter");
    table_cell(t, "x");
    FILE *f = capture();
    table_print(t, f, false, 1);
    fclose(f);
    table_free(t);
    assert_string_equal(captured, "    N  NAME    INFO\n    7  \xc3\xa9t\xc3\xa9     two lines\n 1234  winter  x\n");
}

static void broken_bytes_become_replacement_characters(void **state)
{
    (void)state;
    static const struct {
        const char *in;
        size_t len;
        const char *out;
    } cases[] = {
        {"ok", 2, "ok"},
        {"\xc3\xa9", 2, "\xc3\xa9"},
        {"a\xff" "b", 3, "a\xef\xbf\xbd" "b"},
        {"\xc0\x80", 2, "\xef\xbf\xbd\xef\xbf\xbd"},             /* overlong NUL   */
        {"\xed\xa0\x80", 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* surrogate      */
        {"\xf4\x90\x80\x80", 4, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xe2\x82", 2, "\xef\xbf\xbd\xef\xbf\xbd"},             /* cut at the end */
        {"\xf0\x9f\x98\x80", 4, "\xf0\x9f\x98\x80"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *v = json_bytes(cases[i].in, cases[i].len);
        assert_non_null(v);
        assert_string_equal(json_string_value(v), cases[i].out);
        json_decref(v);
    }
}

static void unknown_values_are_absent(void **state)
{
    (void)state;
    Boost__JobSummary s = BOOST__JOB_SUMMARY__INIT;
    s.id = 17;
    s.name = (char[]){"x"};
    s.state = BOOST__JOB_STATE__VALUE__QUEUED;
    s.has_loss = true;
    s.loss = NAN;
    json_t *o = json_summary(&s);
    assert_int_equal(json_integer_value(json_object_get(o, "id")), 17);
    assert_string_equal(json_string_value(json_object_get(o, "state")), "QUEUED");
    assert_string_equal(json_string_value(json_object_get(o, "reason")), "");
    assert_null(json_object_get(o, "loss"));
    assert_null(json_object_get(o, "step"));
    assert_null(json_object_get(o, "last_checkpoint_step"));
    json_decref(o);
}

static void a_plot_puts_points_where_they_belong(void **state)
{
    (void)state;
    /* a falling line: top left to bottom right, one restart in the middle */
    struct plot_point points[5];
    for (int i = 0; i < 5; i++)
        points[i] = (struct plot_point){i, 4 - i};
    double marks[] = {2};
    FILE *f = capture();
    plot_print(f, "loss", points, 5, marks, 1, 5, 5, false);
    fclose(f);
    char *save = NULL;
    int row = 0;
    for (char *line = strtok_r(captured, "\n", &save); line; line = strtok_r(NULL, "\n", &save), row++) {
        char *bar = strchr(line, '|');
        if (row >= 1 && row <= 5) {
            assert_non_null(bar);
            assert_int_equal(bar[1 + row - 1], '*'); /* on the diagonal */
        }
        if (row == 7)
            assert_int_equal(strchr(line, '^') - line, 9 + 1 + 2);
    }
    assert_int_equal(row, 9);
    f = capture();
    plot_print(f, "loss", NULL, 0, NULL, 0, 5, 5, true);
    fclose(f);
    assert_string_equal(captured, "loss: no points yet\n");
    free(captured);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_have_three_digits),
        cmocka_unit_test(durations_round_trip_by_eye),
        cmocka_unit_test(durations_parse),
        cmocka_unit_test(states_have_letters_and_names),
        cmocka_unit_test(text_of_a_job_cannot_drive_the_terminal),
        cmocka_unit_test(columns_align_by_characters),
        cmocka_unit_test(broken_bytes_become_replacement_characters),
        cmocka_unit_test(unknown_values_are_absent),
        cmocka_unit_test(a_plot_puts_points_where_they_belong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
