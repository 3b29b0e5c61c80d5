/* The container: what is written reads back, the layout on disk is the published one, and a damaged
 * header is refused, whatever the damage. */
#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "worker/safetensors.h"

static char dir[64], path[128];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-st-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/x.safetensors", dir);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static void put(const void *data, size_t len)
{
    struct error err;
    assert_int_equal(fs_write_atomic(path, data, len, 0644, &err), 0);
}

static const struct safetensors_entry entries[] = {
    {.name = "b", .dtype = DTYPE_F64, .dims = 2, .shape = {2, 1}, .begin = 0, .end = 16},
    {.name = "a.w", .dtype = DTYPE_F32, .dims = 1, .shape = {3}, .begin = 16, .end = 28},
    {.name = "scalar", .dtype = DTYPE_BF16, .dims = 0, .begin = 28, .end = 30},
    {.name = "none", .dtype = DTYPE_I32, .dims = 2, .shape = {0, 7}, .begin = 30, .end = 30},
};
static const struct safetensors_meta meta[] = {{"step", "12"}, {"shard:a.w", "3,1,0,0"}};
static const uint8_t content[30] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};

static void make(struct buffer *b)
{
    struct error err;
    buffer_init(b, 1 << 20);
    assert_int_equal(safetensors_header(b, entries, 4, meta, 2, 1000, &err), 0);
    buffer_append(b, content, sizeof content);
}

static void written_reads_back(void **state)
{
    (void)state;
    struct buffer b;
    struct safetensors_file f;
    struct error err;
    make(&b);
    put(b.data, b.len);
    assert_int_equal(safetensors_open(&f, path, &err), 0);
    assert_int_equal(f.n, 4);
    assert_int_equal(f.data_at % SAFETENSORS_ALIGN, 0);
    assert_true(f.data_at >= 1000);
    assert_string_equal(safetensors_meta(&f, "step"), "12");
    assert_string_equal(safetensors_meta(&f, "shard:a.w"), "3,1,0,0");
    assert_null(safetensors_meta(&f, "other"));
    assert_null(safetensors_find(&f, "__metadata__"));
    for (size_t i = 0; i < 4; i++) {
        const struct safetensors_entry *e = safetensors_find(&f, entries[i].name);
        uint8_t out[16];
        assert_non_null(e);
        assert_int_equal(e->dtype, entries[i].dtype);
        assert_int_equal(e->dims, entries[i].dims);
        assert_memory_equal(e->shape, entries[i].shape, sizeof e->shape);
        assert_int_equal(safetensors_read(&f, e, out, &err), 0);
        assert_memory_equal(out, content + entries[i].begin, e->end - e->begin);
    }
    safetensors_close(&f);
    buffer_free(&b);
}

/* The bytes, by the published description: length, JSON that begins with '{' and may end in spaces. */
static void bytes_are_the_published_ones(void **state)
{
    (void)state;
    struct buffer b;
    make(&b);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--)
        len = len << 8 | b.data[i];
    assert_int_equal(8 + len + sizeof content, b.len);
    assert_int_equal(b.data[8], '{');
    json_t *j = json_loadb((char *)b.data + 8, len, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(j);
    assert_string_equal(json_string_value(json_object_get(json_object_get(j, "__metadata__"), "step")), "12");
    json_t *w = json_object_get(j, "a.w");
    assert_string_equal(json_string_value(json_object_get(w, "dtype")), "F32");
    assert_int_equal(json_integer_value(json_array_get(json_object_get(w, "data_offsets"), 1)), 28);
    json_decref(j);
    buffer_free(&b);
}

static void names_that_would_break_json_are_refused(void **state)
{
    (void)state;
    struct buffer b;
    struct error err;
    const struct safetensors_entry bad = {.name = "a\"b"};
    const struct safetensors_meta bad_key = {"k\n", "v"}, bad_value = {"k", "\xc3\xa4"};
    buffer_init(&b, 1 << 20);
    assert_int_equal(safetensors_header(&b, &bad, 1, NULL, 0, 0, &err), ERR_INVALID);
    buffer_clear(&b);
    assert_int_equal(safetensors_header(&b, NULL, 0, &bad_key, 1, 0, &err), ERR_INVALID);
    buffer_clear(&b);
    assert_int_equal(safetensors_header(&b, NULL, 0, &bad_value, 1, 0, &err), ERR_INVALID);
    buffer_free(&b);
}

/* Any ASCII, as a JSON parser gives it back. */
static void values_are_any_text(void **state)
{
    (void)state;
    static const char text[] = "gemm \"16384 2048\"\n\t\\ algo: 7\x1f{}";
    struct buffer b;
    struct error err;
    const struct safetensors_meta choices = {"choices", text};
    buffer_init(&b, 1 << 20);
    assert_int_equal(safetensors_header(&b, NULL, 0, &choices, 1, 0, &err), 0);
    json_t *j = json_loadb((const char *)b.data + 8, b.len - 8, 0, NULL);
    assert_non_null(j);
    assert_string_equal(json_string_value(json_object_get(json_object_get(j, "__metadata__"), "choices")), text);
    json_decref(j);
    buffer_free(&b);
}

static void check_refused(const char *json, size_t data)
{
    struct buffer b;
    struct safetensors_file f;
    struct error err;
    buffer_init(&b, 1 << 20);
    uint8_t length[8] = {(uint8_t)strlen(json), (uint8_t)(strlen(json) >> 8)};
    buffer_append(&b, length, 8);
    buffer_append_str(&b, json);
    for (size_t i = 0; i < data; i++)
        buffer_append(&b, "x", 1);
    put(b.data, b.len);
    if (safetensors_open(&f, path, &err) != ERR_CORRUPT)
        fail_msg("accepted: %s", json);
    assert_non_null(strstr(err.message, path));
    buffer_free(&b);
}

static void bad_headers_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "[]", "{", "{}x", "{\"a\":{}}", "{\"a\":5}",
        "{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4611686018427387904],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}",
        "{\"__metadata__\":{\"k\":1},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        check_refused(bad[i], 4);
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 5); /* bytes too many */
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3); /* too few */
}

/* Cut anywhere, or with any header byte changed: never a crash, and a cut is never accepted. */
static void damage_is_survived(void **state)
{
    (void)state;
    struct buffer b;
    struct safetensors_file f;
    struct error err;
    make(&b);
    for (size_t n = 0; n < b.len; n += n < 20 || n + 40 > b.len ? 1 : 37) {
        put(b.data, n);
        assert_int_equal(safetensors_open(&f, path, &err), ERR_CORRUPT);
    }
    srand(3);
    for (int i = 0; i < 3000; i++) {
        size_t at = (size_t)rand() % 420;
        uint8_t old = b.data[at];
        b.data[at] = (uint8_t)rand();
        put(b.data, b.len);
        if (!safetensors_open(&f, path, &err)) {
            for (size_t k = 0; k < f.n; k++)
                assert_true(f.entries[k].end <= sizeof content);
            safetensors_close(&f);
        }
        b.data[at] = old;
    }
    uint8_t huge[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
    put(huge, sizeof huge);
    assert_int_equal(safetensors_open(&f, path, &err), ERR_CORRUPT);
    buffer_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_reads_back),
        cmocka_unit_test(bytes_are_the_published_ones),
        cmocka_unit_test(names_that_would_break_json_are_refused),
        cmocka_unit_test(values_are_any_text),
        cmocka_unit_test(bad_headers_are_refused),
        cmocka_unit_test(damage_is_survived),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
