/* The text format's errors, word for word with line and column, and its edges.
 * Agreement with protoc is tests/e2e/jobfile_protoc_test.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "all_types.h"
#include "proto/base/fs.h"
#include "proto/config.pb-c.h"
#include "proto/job.pb-c.h"
#include "proto/text.h"

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

static Boost__JobSpec *read_job(const char *text, const struct read_options *options)
{
    ProtobufCMessage *m = reflect_new(&arena, &boost__job_spec__descriptor);
    return text_read(m, &arena, "job.pbtxt", text, strlen(text), options, &err) ? NULL : (Boost__JobSpec *)m;
}

static void expect_error(const char *text, const char *message)
{
    assert_null(read_job(text, NULL));
    assert_int_equal(err.code, ERR_INVALID);
    assert_string_equal(err.message, message);
}

static void test_error_messages(void **state)
{
    (void)state;
    expect_error("name: \"a\"\nmodel {\n  hidden: 64\n    rnk: 4\n}\n",
                 "job.pbtxt:4:5: unknown field 'rnk' in model; did you mean 'rank'?");
    assert_non_null(strstr(err.hint, "rank"));
    expect_error("lr: 1e-3", "job.pbtxt:1:1: unknown field 'lr' in JobSpec; did you mean 'optimizer { lr }'?");
    expect_error("zzz: 1", "job.pbtxt:1:1: unknown field 'zzz' in JobSpec");
    expect_error("data { train { path: \"a\" }\n train { pth: 1 } }",
                 "job.pbtxt:2:10: unknown field 'pth' in data.train[1]; did you mean 'path'?");
    expect_error(
        "model { factorization: CLA }",
        "job.pbtxt:1:24: model.factorization cannot be 'CLA' (one of FULL_RANK SVD COLA LAX); did you mean 'COLA'?");
    expect_error("model { hidden: 1.5 }", "job.pbtxt:1:17: model.hidden: expected a whole number, found '1.5'");
    expect_error("model { hidden: 2147483648 }",
                 "job.pbtxt:1:17: model.hidden = 2147483648 does not fit its type int32");
    assert_string_equal(err.hint, "model.hidden takes -2147483648 to 2147483647");
    expect_error("model { hidden: 1\n", "job.pbtxt:2:1: model: expected '}', found the end");
    expect_error("name = \"a\"", "job.pbtxt:1:6: name: expected ':', found '='");
    expect_error("name: cola", "job.pbtxt:1:7: name: expected text in quotes, found 'cola'");
    assert_string_equal(err.hint, "write name: \"cola\"");
    expect_error("name: \"a\n\"",
                 "job.pbtxt:1:9: a string ends with its quote on the same line (write a line break as \\n)");
    expect_error("name: \"a\\q\"", "job.pbtxt:1:9: unknown escape in a string");
    expect_error("name: \"a\\000b\"", "job.pbtxt:1:7: name holds a NUL byte, which a string cannot");
    expect_error("name: \"a\"\nname: \"b\"", "job.pbtxt:2:1: name is given a second time");
    expect_error("model {} # one\n\tmodel {}", "job.pbtxt:2:2: model is given a second time");
    expect_error("model { tie_embeddings: yes }",
                 "job.pbtxt:1:25: model.tie_embeddings: expected true or false, found 'yes'");
    expect_error("priority: 08", "job.pbtxt:1:12: a number that begins with 0 is octal: digits 0 to 7");
    expect_error("priority: 1x", "job.pbtxt:1:12: expected a space between a number and a word");
    expect_error("after: [\"a\" \"b\" 3]", "job.pbtxt:1:17: after[0]: expected ',' or ']', found '3'");
    expect_error("\xc3\xa9: 1", "job.pbtxt:1:1: byte 0xc3 outside a string");
}

static void test_oneof_twice(void **state)
{
    (void)state;
    ProtobufCMessage *m = reflect_new(&arena, &all_types_descriptor);
    const char *text = "pick_number: 1 pick_text: \"a\"";
    assert_int_equal(text_read(m, &arena, "t", text, strlen(text), NULL, &err), ERR_INVALID);
    assert_string_equal(err.message, "t:1:16: pick_text is given beside 'pick_number'; only one of them may be");
}

static void test_values(void **state)
{
    (void)state;
    Boost__JobSpec *s =
        read_job("# a job\nname: 'a' \"\\x41\\101\\n\" priority: 0x10; time_limit_s: -9223372036854775808,\n"
                 "model < factorization: 2 hidden: 017 norm_eps: 1e-6f rope_theta: inf tie_embeddings: t >\n"
                 "data: { train [{ path: \"p\" }, < weight: .5 >] eval { path: \"\\u00e9\" } }\n"
                 "after: [\"x\", \"y\"] after: \"z\"",
                 NULL);
    if (!s)
        fail_msg("%s", err.message);
    assert_string_equal(s->name, "aAA\n");
    assert_int_equal(s->priority, 16);
    assert_true(s->time_limit_s == INT64_MIN);
    assert_int_equal(s->model->factorization, BOOST__FACTORIZATION__VALUE__COLA);
    assert_int_equal(s->model->hidden, 15);
    assert_true(s->model->norm_eps == 1e-6);
    assert_true(s->model->tie_embeddings && s->model->has_tie_embeddings && !s->model->has_layers);
    assert_int_equal(s->data->n_train, 2);
    assert_true(s->data->train[1]->weight == 0.5 && s->data->train[0]->weight == 1 && !s->data->train[0]->has_weight);
    assert_string_equal(s->data->eval[0]->path, "\xc3\xa9");
    assert_int_equal(s->n_after, 3);
    assert_string_equal(s->after[2], "z");
    assert_int_equal(s->stop_grace_s, 0);
}

static void test_unknown_fields_passed_over(void **state)
{
    (void)state;
    struct buffer names;
    buffer_init(&names, 1024);
    struct read_options options = {true, &names};
    const char *text = "new: 3 model { hidden: 4 deep { a: -inf b: [1, 'x' \"y\", {}] c < d: e > } x: FOO } \n"
                       "[ext.name/of.Any] { z: 1 }, list: [], name: \"n\"";
    Boost__JobSpec *s = read_job(text, &options);
    if (!s)
        fail_msg("%s", err.message);
    assert_string_equal((char *)names.data, "new, model.deep, model.x, [ext.name/of.Any], list");
    assert_int_equal(s->model->hidden, 4);
    assert_string_equal(s->name, "n");
    static const char *const bad[] = {"new: {",     "new",    "new: [1 2]", "new { a }", "new: \"\\q\"",
                                      "new: - foo", "new: ]", "[a: 1",      "new: <}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_null(read_job(bad[i], &options)); /* unknown is no excuse for bad syntax */
    buffer_free(&names);
}

static void nest(char *out, size_t cap, int levels)
{
    size_t n = 0;
    for (int i = 0; i < levels; i++)
        n += (size_t)snprintf(out + n, cap - n, "sub{");
    for (int i = 0; i < levels; i++)
        n += (size_t)snprintf(out + n, cap - n, "}");
}

static void test_depth(void **state)
{
    (void)state;
    char text[2048];
    ProtobufCMessage *m = reflect_new(&arena, &all_types_descriptor);
    nest(text, sizeof text, REFLECT_MAX_DEPTH);
    assert_int_equal(text_read(m, &arena, "t", text, strlen(text), NULL, &err), 0);
    struct buffer out;
    buffer_init(&out, 1 << 20);
    assert_int_equal(text_write(m, &out, &err), 0); /* what is read can be written */
    buffer_free(&out);
    nest(text, sizeof text, REFLECT_MAX_DEPTH + 1);
    m = reflect_new(&arena, &all_types_descriptor);
    assert_int_equal(text_read(m, &arena, "t", text, strlen(text), NULL, &err), ERR_INVALID);
    assert_string_equal(err.message, "t:1:260: messages nest deeper than 64");
    struct read_options skip = {true, NULL};
    memset(text, '{', sizeof text);
    memcpy(text, "unknown", 7);
    m = reflect_new(&arena, &all_types_descriptor);
    assert_int_equal(text_read(m, &arena, "t", text, sizeof text, &skip, &err), ERR_INVALID);
}

static void test_list_limit_and_memory(void **state)
{
    (void)state;
    struct buffer text;
    buffer_init(&text, 4 << 20);
    for (int i = 0; i <= REFLECT_MAX_REPEATED; i++)
        buffer_append_str(&text, "list_i32:1 ");
    struct arena large;
    arena_init(&large, 64 << 20);
    ProtobufCMessage *m = reflect_new(&large, &all_types_descriptor);
    assert_int_equal(text_read(m, &large, "t", (char *)text.data, text.len, NULL, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "more than 65536 entries"));
    assert_int_equal(((struct all_types *)m)->n_list[0], REFLECT_MAX_REPEATED);
    arena_free(&large);
    arena_init(&large, 1 << 10); /* too small: an error, not a crash */
    m = reflect_new(&large, &all_types_descriptor);
    assert_int_not_equal(text_read(m, &large, "t", (char *)text.data, text.len, NULL, &err), 0);
    arena_free(&large);
    buffer_free(&text);
}

static void test_writer(void **state)
{
    (void)state;
    struct buffer out;
    buffer_init(&out, 1 << 20);
    Boost__JobSpec *s = read_job("name: \"a\\\"\\\\\\n\\001\\377\xc3\xa9\" optimizer { lr: 0.001 eps: 1e-8 } model {}\n"
                                 "data { train { path: \"p\" weight: 3 } }",
                                 NULL);
    assert_non_null(s);
    assert_int_equal(text_write(&s->base, &out, &err), 0);
    assert_string_equal((char *)out.data, "name: \"a\\\"\\\\\\n\\001\\377\xc3\xa9\"\n"
                                          "model {\n}\n"
                                          "data {\n  train {\n    path: \"p\"\n    weight: 3\n  }\n}\n"
                                          "optimizer {\n  lr: 0.001\n  eps: 1e-08\n}\n");
    buffer_clear(&out);
    assert_int_equal(text_write_line(&s->base, &out, &err), 0);
    assert_string_equal((char *)out.data,
                        "name: \"a\\\"\\\\\\n\\001\\377\xc3\xa9\" model { } "
                        "data { train { path: \"p\" weight: 3 } } optimizer { lr: 0.001 eps: 1e-08 }");
    buffer_free(&out);
    buffer_init(&out, 10);
    assert_int_equal(text_write(&s->base, &out, &err), ERR_NOMEM);
    buffer_free(&out);
}

static void test_load_configuration(void **state)
{
    (void)state;
    const char *dir = getenv("BOOST_TEST_DIR");
    char path[512];
    snprintf(path, sizeof path, "%s/boostd.conf", dir ? dir : "/tmp");
    const char *text = "# boostd\nheartbeat_ms: 200\nsocket: \"/x\"\n";
    assert_int_equal(fs_write_atomic(path, text, strlen(text), 0600, &err), 0);
    Boost__BoostdConfig *c = (Boost__BoostdConfig *)text_load(&boost__boostd_config__descriptor, path, &arena, &err);
    assert_non_null(c);
    assert_int_equal(c->heartbeat_ms, 200);
    assert_int_equal(c->suspect_ms, 3000);
    assert_string_equal(c->state_dir, "/var/lib/boost");
    assert_int_equal(fs_write_atomic(path, "", 0, 0600, &err), 0); /* an empty file is all defaults */
    assert_non_null(text_load(&boost__boostd_config__descriptor, path, &arena, &err));
    assert_int_equal(fs_write_atomic(path, "hartbeat_ms: 1", 14, 0600, &err), 0);
    assert_null(text_load(&boost__boostd_config__descriptor, path, &arena, &err));
    assert_non_null(strstr(
        err.message, "boostd.conf:1:1: unknown field 'hartbeat_ms' in BoostdConfig; did you mean 'heartbeat_ms'?"));
    unlink(path);
    assert_null(text_load(&boost__boostd_config__descriptor, path, &arena, &err));
    assert_int_equal(err.code, ERR_NOT_FOUND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_error_messages, setup, teardown),
        cmocka_unit_test_setup_teardown(test_oneof_twice, setup, teardown),
        cmocka_unit_test_setup_teardown(test_values, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unknown_fields_passed_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_depth, setup, teardown),
        cmocka_unit_test_setup_teardown(test_list_limit_and_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_load_configuration, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
