/* JSON reading and writing of messages: names, types, errors with paths. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "all_types.h"
#include "proto/job.pb-c.h"
#include "proto/json.h"

static struct arena arena;
static struct error err;

static int setup(void **state)
{
    (void)state;
    arena_init(&arena, 16 << 20);
    error_clear(&err);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    arena_free(&arena);
    return 0;
}

static void *read_as(const ProtobufCMessageDescriptor *type, const char *text, const struct read_options *options)
{
    ProtobufCMessage *m = reflect_new(&arena, type);
    return json_read(m, &arena, "job.json", text, strlen(text), options, &err) ? NULL : m;
}

static void expect_error(const char *text, const char *message)
{
    assert_null(read_as(&boost__job_spec__descriptor, text, NULL));
    assert_int_equal(err.code, ERR_INVALID);
    assert_string_equal(err.message, message);
}

static void test_error_messages(void **state)
{
    (void)state;
    expect_error("{\"model\": {\"rnk\": 3}}", "job.json: unknown field 'rnk' in model; did you mean 'rank'?");
    expect_error("{\"model\": {\"rank\": 1.5}}", "job.json: model.rank: expected a whole number of type int32");
    expect_error("{\"model\": {\"rank\": true}}", "job.json: model.rank: expected a whole number, found true");
    expect_error("{\"model\": {\"rank\": 2147483648}}", "job.json: model.rank: 2147483648 does not fit its type int32");
    expect_error("{\"model\": {\"rank\": -2147483649}}",
                 "job.json: model.rank: -2147483649 does not fit its type int32");
    expect_error("{\"model\": 3}", "job.json: model: expected an object, found an integer");
    expect_error("{\"model\": {\"factorization\": \"CLA\"}}",
                 "job.json: model.factorization cannot be 'CLA' (one of FULL_RANK SVD COLA LAX); did you mean 'COLA'?");
    expect_error("{\"model\": {\"factorization\": 9}}",
                 "job.json: model.factorization cannot be '9' (one of FULL_RANK SVD COLA LAX)");
    expect_error("{\"model\": {\"tie_embeddings\": 1}}",
                 "job.json: model.tie_embeddings: expected true or false, found an integer");
    expect_error("{\"data\": {\"train\": [{}, {\"path\": 3}]}}",
                 "job.json: data.train[1].path: expected a string, found an integer");
    expect_error("{\"data\": {\"train\": {\"path\": \"a\"}}}",
                 "job.json: data.train: expected an array, found an object");
    expect_error("{\"after\": \"afterok:1\"}", "job.json: after: expected an array, found a string");
    expect_error("{\"optimizer\": {\"lr\": \"fast\"}}", "job.json: optimizer.lr: 'fast' is not a number");
    expect_error("[1]", "job.json: expected an object, found an array");
    expect_error("{\n  \"name\": \"a\",\n}", "job.json:3:1: string or '}' expected near '}'");
    assert_non_null(strstr(err.hint, "no comma before"));
    expect_error("{\"name\": \"a\", \"name\": \"b\"}", "job.json:1:20: duplicate object key near '\"name\"'");
    expect_error("{\"name\": \"a\\u0000b\"}", "job.json:1:19: a string cannot hold a NUL byte");
    expect_error("{} {}", "job.json:1:4: end of file expected near '{'");
}

static void test_values(void **state)
{
    (void)state;
    struct all_types *m = read_as(
        &all_types_descriptor,
        "\xEF\xBB\xBF{\"i32\": -5.0, \"i64\": \"-9223372036854775808\", \"u64\": \"18446744073709551615\", \"u32\": "
        "4294967295,"
        "\"real\": \"-Infinity\", \"wide\": 1, \"flag\": true, \"choice\": -3, \"text\": null, \"raw\": \"/-8=\","
        "\"list_choice\": [\"ONE\", 0], \"list_text\": [\"\\u20ac\"], \"list_raw\": [\"\", \"YQ\", \"YWI=\", \"YWJj\"],"
        "\"pick_text\": \"p\", \"list_sub\": [{}, {\"sub\": {\"i32\": 1}}]}",
        NULL);
    if (!m)
        fail_msg("%s", err.message);
    assert_int_equal(m->i32, -5);
    assert_true(m->i64 == INT64_MIN && m->u64 == UINT64_MAX && m->u32 == UINT32_MAX);
    assert_true(isinf(m->real) && m->real < 0 && m->wide == 1 && m->flag == 1 && m->choice == CHOICE_MINUS);
    assert_null(m->text);
    assert_int_equal(m->raw.len, 2);
    assert_memory_equal(m->raw.data, "\xff\xef", 2);
    assert_int_equal(m->list_choice[0], CHOICE_ONE);
    assert_string_equal(m->list_text[0], "\xe2\x82\xac");
    assert_int_equal(m->list_raw[0].len, 0);
    assert_memory_equal(m->list_raw[1].data, "a", 1);
    assert_memory_equal(m->list_raw[2].data, "ab", 2);
    assert_memory_equal(m->list_raw[3].data, "abc", 3);
    assert_int_equal(m->pick_case, 26);
    assert_int_equal(m->list_sub[1]->sub->i32, 1);
    assert_null(read_as(&all_types_descriptor, "{\"pick_number\": 1, \"pick_text\": \"a\"}", NULL));
    assert_string_equal(err.message, "job.json: pick_text: given beside 'pick_number'; only one of them may be");
    static const char *const bad[] = {"{\"raw\": \"a\"}",      "{\"raw\": \"a*bc\"}",
                                      "{\"raw\": 3}",          "{\"u32\": -1}",
                                      "{\"u64\": 1e20}",       "{\"i64\": 1e19}",
                                      "{\"i64\": \"\"}",       "{\"i64\": \"-\"}",
                                      "{\"i64\": \"1x\"}",     "{\"u64\": \"18446744073709551616\"}",
                                      "{\"wide\": \"0x10\"}",  "{\"wide\": \"\"}",
                                      "{\"choice\": 1.0}",     "{\"sub\": []}",
                                      "{\"list_i32\": [null]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (read_as(&all_types_descriptor, bad[i], NULL))
            fail_msg("accepted %s", bad[i]);
}

static void test_unknown_fields_passed_over(void **state)
{
    (void)state;
    struct buffer names;
    buffer_init(&names, 1024);
    struct read_options options = {true, &names};
    Boost__JobSpec *s =
        read_as(&boost__job_spec__descriptor, "{\"new\": [1], \"model\": {\"x\": {}, \"hidden\": 4}}", &options);
    assert_non_null(s);
    assert_int_equal(s->model->hidden, 4);
    assert_string_equal((char *)names.data, "new, model.x");
    buffer_free(&names);
}

static void test_writer(void **state)
{
    (void)state;
    Boost__JobSpec *s = read_as(
        &boost__job_spec__descriptor,
        "{\"name\": \"a\\\"\\\\\\n\\u0001\", \"optimizer\": {\"lr\": 1}, \"model\": {}, \"after\": [\"x\", \"y\"],"
        "\"data\": {\"train\": [{\"path\": \"p\"}], \"format\": \"U16\", \"seed\": 9007199254740993}}",
        NULL);
    assert_non_null(s);
    struct buffer out;
    buffer_init(&out, 1 << 20);
    assert_int_equal(json_write(&s->base, &out, &err), 0);
    assert_string_equal(
        (char *)out.data,
        "{\n  \"name\": \"a\\\"\\\\\\n\\u0001\",\n  \"model\": {},\n  \"data\": {\n    \"train\": [\n      {\n"
        "        \"path\": \"p\"\n      }\n    ],\n    \"format\": \"U16\",\n    \"seed\": 9007199254740993\n  },\n"
        "  \"optimizer\": {\n    \"lr\": 1.0\n  },\n  \"after\": [\"x\", \"y\"]\n}\n");
    /* D41: bytes that are not UTF-8 must not break a JSON list */
    s->name = arena_strdup(&arena, "a\xff\xc3(\xed\xa0\x80\xf0\x9f\x98\x80\xe2\x82");
    buffer_clear(&out);
    assert_int_equal(json_write(&s->base, &out, &err), 0);
    assert_non_null(strstr((char *)out.data, "\"a"
                                             "\xEF\xBF\xBD"
                                             "\xEF\xBF\xBD"
                                             "("
                                             "\xEF\xBF\xBD"
                                             "\xEF\xBF\xBD"
                                             "\xEF\xBF\xBD"
                                             "\xf0\x9f\x98\x80"
                                             "\xEF\xBF\xBD"
                                             "\xEF\xBF\xBD"
                                             "\""));
    buffer_free(&out);
    json_t *tree = json_tree(&s->base);
    assert_non_null(tree);
    assert_true(json_integer_value(json_object_get(json_object_get(tree, "data"), "seed")) == 9007199254740993);
    json_decref(tree);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_error_messages, setup, teardown),
        cmocka_unit_test_setup_teardown(test_values, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unknown_fields_passed_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_writer, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
