/* proto/base: error, buffer, arena, clock, number, utf8. */
#include <errno.h>
#include <float.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/base/arena.h"
#include "proto/base/buffer.h"
#include "proto/base/clock.h"
#include "proto/base/number.h"
#include "proto/base/utf8.h"

static void test_error_text(void **state)
{
    (void)state;
    struct error err;
    assert_int_equal(error_set(&err, ERR_INVALID, "rank = %d", -4), ERR_INVALID);
    assert_string_equal(err.message, "rank = -4");
    assert_string_equal(err.hint, "");
    assert_int_equal(error_hint(&err, "use %d", 1), ERR_INVALID);
    assert_int_equal(error_context(&err, "job %d", 17), ERR_INVALID);
    assert_string_equal(err.message, "job 17: rank = -4");
    assert_string_equal(err.hint, "use 1"); /* context keeps the mend */
    error_set(&err, ERR_IO, "other");
    assert_string_equal(err.hint, ""); /* a new error drops the old mend */
    error_clear(&err);
    assert_true(err.code == ERR_OK && !err.message[0] && !err.hint[0]);
}

static void test_error_arguments_may_be_its_own_texts(void **state)
{
    (void)state;
    struct error err;
    error_set(&err, ERR_INVALID, "no field");
    error_hint(&err, "write x");
    error_hint(&err, "%s; or y", err.hint);
    assert_string_equal(err.hint, "write x; or y");
    error_hint(&err, "of %s: %s", err.message, err.hint);
    assert_string_equal(err.hint, "of no field: write x; or y");
    error_context(&err, "%s (%s)", err.message, err.hint);
    assert_string_equal(err.message, "no field (of no field: write x; or y): no field");
    error_set(&err, ERR_IO, "again: %s; %s", err.message + 3, err.hint);
    assert_string_equal(err.message,
                        "again: field (of no field: write x; or y): no field; of no field: write x; or y");
    assert_string_equal(err.hint, "");
    error_set(&err, ERR_IO, "file");
    error_hint(&err, "mend");
    error_errno(&err, EIO, "%s and %s", err.message, err.hint);
    assert_memory_equal(err.message, "file and mend: ", 15);
    assert_string_equal(err.hint, "");
}

static void test_error_is_cut_not_overrun(void **state)
{
    (void)state;
    struct {
        struct error err;
        char guard[64];
    } box;
    memset(&box, 0x5a, sizeof box);
    char large[4096];
    memset(large, 'x', sizeof large - 1);
    large[sizeof large - 1] = '\0';
    error_set(&box.err, ERR_IO, "%s", large);
    assert_int_equal(strlen(box.err.message), sizeof box.err.message - 1);
    error_hint(&box.err, "%s", large);
    assert_int_equal(strlen(box.err.hint), sizeof box.err.hint - 1);
    error_context(&box.err, "in %s", "here");
    assert_memory_equal(box.err.message, "in here: xxx", 12);
    assert_int_equal(strlen(box.err.message), sizeof box.err.message - 1);
    error_context(&box.err, "%s", large); /* a context as long as the whole */
    assert_int_equal(strlen(box.err.message), sizeof box.err.message - 1);
    error_errno(&box.err, EIO, "%s", large);
    assert_int_equal(strlen(box.err.message), sizeof box.err.message - 1);
    for (size_t i = 0; i < sizeof box.guard; i++)
        assert_int_equal(box.guard[i], 0x5a);
}

static void test_error_codes(void **state)
{
    (void)state;
    struct error err;
    assert_int_equal(error_errno(&err, ENOSPC, "write of %s", "f"), ERR_NOSPACE);
    assert_non_null(strstr(err.message, "write of f: No space left"));
    assert_int_equal(error_errno(&err, EDQUOT, "x"), ERR_NOSPACE);
    assert_int_equal(error_errno(&err, ENOENT, "x"), ERR_NOT_FOUND);
    assert_int_equal(error_errno(&err, ENOMEM, "x"), ERR_NOMEM);
    assert_int_equal(error_errno(&err, EACCES, "x"), ERR_IO);
    assert_int_equal(error_set(NULL, ERR_BUSY, "x"), ERR_BUSY);
    assert_int_equal(error_errno(NULL, ENOSPC, "x"), ERR_NOSPACE);
    assert_int_equal(error_hint(NULL, "x"), ERR_OK);
    assert_int_equal(error_context(NULL, "x"), ERR_OK);
    for (int i = 0; i < ERR_CODE_COUNT; i++) {
        const char *name = error_code_name((enum error_code)i);
        assert_true(name && name[0]);
        for (int j = 0; j < i; j++)
            assert_string_not_equal(name, error_code_name((enum error_code)j));
    }
    assert_string_equal(error_code_name(ERR_PEER_LOST), "PEER_LOST");
    assert_string_equal(error_code_name(ERR_INTERNAL), "INTERNAL");
    assert_string_equal(error_code_name((enum error_code)999), "UNKNOWN");
}

static void test_buffer_grows_to_its_maximum(void **state)
{
    (void)state;
    struct buffer b;
    buffer_init(&b, 1000);
    for (int i = 0; i < 100; i++)
        assert_int_equal(buffer_append(&b, "0123456789", 10), 0);
    assert_int_equal(b.len, 1000);
    assert_int_equal(b.data[1000], 0);
    assert_false(b.failed);
    assert_int_equal(buffer_append(&b, "x", 1), ERR_NOMEM);
    assert_true(b.failed && b.len == 1000 && memcmp(b.data + 990, "0123456789", 10) == 0);
    assert_int_equal(buffer_append(&b, "", 0), 0); /* nothing still fits */
    assert_null(buffer_reserve(&b, SIZE_MAX));
    buffer_consume(&b, 995);
    assert_string_equal((char *)b.data, "56789");
    buffer_clear(&b);
    assert_true(b.len == 0 && !b.failed && b.data[0] == 0);
    assert_int_equal(buffer_printf(&b, "%d-%s", 7, "x"), 0);
    assert_string_equal((char *)b.data, "7-x");
    char large[2000];
    memset(large, 'y', sizeof large - 1);
    large[sizeof large - 1] = '\0';
    assert_int_equal(buffer_printf(&b, "%s", large), ERR_NOMEM);
    assert_string_equal((char *)b.data, "7-x"); /* as it was */
    buffer_free(&b);
    assert_true(!b.data && b.len == 0);
    assert_int_equal(buffer_append_str(&b, "again"), 0);
    buffer_free(&b);
}

static void test_arena(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 1 << 20);
    for (size_t size = 0; size < 300; size++) {
        uint8_t *p = arena_alloc(&a, size);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        for (size_t i = 0; i < size; i++)
            assert_int_equal(p[i], 0);
        memset(p, 0xff, size); /* pieces do not overlap: the next one is zero again */
    }
    assert_non_null(arena_alloc(&a, 100000)); /* larger than a chunk */
    assert_string_equal(arena_strdup(&a, "text"), "text");
    assert_string_equal(arena_printf(&a, "%05d", 42), "00042");
    assert_false(a.failed);
    assert_null(arena_alloc(&a, 1 << 20));
    assert_true(a.failed);
    assert_null(arena_alloc(&a, SIZE_MAX));
    assert_null(arena_alloc(&a, SIZE_MAX - 8)); /* rounding up may not wrap */
    size_t got = 0;
    while (arena_alloc(&a, 1000))
        got += 1000;
    assert_true(a.used <= a.max && got > 700000);
    void *p = a.allocator.alloc(a.allocator.allocator_data, 16);
    assert_true(!p || a.used <= a.max);
    a.allocator.free(a.allocator.allocator_data, p); /* pieces are never freed alone */
    arena_free(&a);
    assert_int_equal(a.used, 0);
    assert_non_null(arena_alloc(&a, 1000)); /* can be used again */
    arena_free(&a);
}

static void test_arena_odd_maximum(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 100);
    for (int i = 0; i < 100; i++)
        if (!arena_alloc(&a, 1))
            break;
    assert_true(a.used <= 100 + 15); /* the rounding of the last piece at most */
    assert_null(arena_alloc(&a, 1));
    arena_free(&a);
}

static void test_clock(void **state)
{
    (void)state;
    char text[CLOCK_TEXT];
    assert_string_equal(clock_rfc3339(0, text), "1970-01-01T00:00:00.000Z");
    assert_string_equal(clock_rfc3339(INT64_C(1796000000999999999), text), "2026-11-30T00:53:20.999Z");
    assert_string_equal(clock_rfc3339(INT64_C(951782400) * NS_PER_S, text), "2000-02-29T00:00:00.000Z");
    int64_t last = clock_mono_ns();
    for (int i = 0; i < 1000; i++) {
        int64_t now = clock_mono_ns();
        assert_true(now >= last);
        last = now;
    }
    assert_true(clock_wall_ns() > INT64_C(1700000000) * NS_PER_S);
    assert_int_equal(clock_left_ms(last - NS_PER_S), 0);
    assert_int_equal(clock_left_ms(INT64_MAX / 2), INT_MAX);
    int left = clock_left_ms(clock_mono_ns() + 3600 * NS_PER_S);
    assert_true(left <= 3600000 && left > 3000000);
}

static void test_number_round_trip(void **state)
{
    (void)state;
    static const struct {
        double v;
        const char *text;
    } cases[] = {{0.1, "0.1"},
                 {1, "1"},
                 {-0.0, "-0"},
                 {1e-8, "1e-08"},
                 {0.001, "0.001"},
                 {1e22, "1e+22"},
                 {1e23, "1e+23"},
                 {5e-324, "5e-324"},
                 {INFINITY, "inf"},
                 {-INFINITY, "-inf"},
                 {NAN, "nan"},
                 {0.1 + 0.2, "0.30000000000000004"},
                 {DBL_MAX, "1.7976931348623157e+308"},
                 {10000, "10000"}};
    char text[NUMBER_TEXT];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_string_equal(number_from_double(cases[i].v, text), cases[i].text);
    assert_string_equal(number_from_float(0.1f, text), "0.1");
    assert_string_equal(number_from_float(16777216.0f, text), "16777216");
    assert_string_equal(number_from_float(FLT_MAX, text), "3.4028235e+38");
    uint64_t bits = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        double v;
        memcpy(&v, &bits, 8);
        if (isnan(v))
            continue;
        assert_true(number_to_double(number_from_double(v, text), NULL) == v);
        uint32_t low = (uint32_t)bits;
        float f;
        memcpy(&f, &low, 4);
        if (!isnan(f))
            assert_true((float)number_to_double(number_from_float(f, text), NULL) == f);
    }
}

/* A locale with a decimal comma changes nothing. Such a locale need not be installed. */
static void test_number_in_another_locale(void **state)
{
    (void)state;
    char text[NUMBER_TEXT];
    if (!setlocale(LC_ALL, "de_DE.UTF-8") && !setlocale(LC_ALL, "fr_FR.UTF-8"))
        skip();
    assert_string_equal(number_from_double(0.5, text), "0.5");
    assert_true(number_to_double("0.5", NULL) == 0.5);
    setlocale(LC_ALL, "C");
}

static void test_utf8(void **state)
{
    (void)state;
    for (uint32_t code = 0; code <= 0x10FFFF; code++) {
        char bytes[4];
        size_t n = utf8_put(code, bytes);
        bool surrogate = code >= 0xD800 && code < 0xE000;
        if (utf8_length(bytes, n) != (surrogate ? 0 : n) || (n > 1 && utf8_length(bytes, n - 1) != 0))
            fail_msg("U+%04X", code);
    }
    static const char *const bad[] = {
        "\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80",
        "\xff", "\xc3(",    "\xe2\x82("};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(utf8_length(bad[i], strlen(bad[i])), 0);
    assert_int_equal(utf8_length("", 0), 0);
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
    static const size_t whole[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10};
    for (size_t len = 0; len < sizeof text; len++)
        assert_int_equal(utf8_whole(text, len), whole[len]);
    assert_int_equal(utf8_whole("\x80\x80\x80\x80\x80", 5), 5); /* not UTF-8: as it is */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_text),
        cmocka_unit_test(test_error_arguments_may_be_its_own_texts),
        cmocka_unit_test(test_error_is_cut_not_overrun),
        cmocka_unit_test(test_error_codes),
        cmocka_unit_test(test_buffer_grows_to_its_maximum),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_arena_odd_maximum),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_number_round_trip),
        cmocka_unit_test(test_number_in_another_locale),
        cmocka_unit_test(test_utf8),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
