/* Properties of the formats over random messages: what is written reads back to
 * the same bytes, in text and JSON, for every type that protobuf has.
 *
 * Also the converter that tests/e2e/jobfile_protoc_test.py compares with protoc:
 *   roundtrip_test convert TYPE text|binary|json text|binary|json < in > out
 *   roundtrip_test random TYPE SEED > binary
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "all_types.h"
#include "proto/agent.pb-c.h"
#include "proto/base/fs.h"
#include "proto/config.pb-c.h"
#include "proto/job.pb-c.h"
#include "proto/json.h"
#include "proto/rpc.pb-c.h"
#include "proto/text.h"
#include "random_message.h"

enum { ARENA = 64 << 20, OUTPUT = 16 << 20, ROUNDS = 600 };

static void text_back(const ProtobufCMessage *m, struct arena *a)
{
    struct error err = {0};
    struct buffer text;
    buffer_init(&text, OUTPUT);
    assert_int_equal(text_write(m, &text, &err), 0);
    ProtobufCMessage *back = reflect_new(a, m->descriptor);
    if (text_read(back, a, "t", text.data ? (char *)text.data : "", text.len, NULL, &err))
        fail_msg("%s\n%s", err.message, (char *)text.data);
    if (!reflect_equal(m, back))
        fail_msg("differs after text:\n%s", (char *)text.data);
    buffer_clear(&text);
    assert_int_equal(text_write_line(m, &text, &err), 0);
    back = reflect_new(a, m->descriptor);
    if (text_read(back, a, "t", text.data ? (char *)text.data : "", text.len, NULL, &err) || !reflect_equal(m, back))
        fail_msg("one line: %s\n%s", err.message, (char *)text.data);
    buffer_free(&text);
}

static void json_back(const ProtobufCMessage *m, struct arena *a)
{
    struct error err = {0};
    struct buffer text;
    buffer_init(&text, OUTPUT);
    assert_int_equal(json_write(m, &text, &err), 0);
    ProtobufCMessage *back = reflect_new(a, m->descriptor);
    if (json_read(back, a, "t", (char *)text.data, text.len, NULL, &err))
        fail_msg("%s\n%s", err.message, (char *)text.data);
    if (!reflect_equal(m, back))
        fail_msg("differs after JSON:\n%s", (char *)text.data);
    buffer_free(&text);
}

static void binary_back(const ProtobufCMessage *m, struct arena *a)
{
    struct error err = {0};
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *packed = arena_alloc(a, len + 1);
    assert_int_equal(protobuf_c_message_pack(m, packed), len);
    ProtobufCMessage *back = reflect_unpack(m->descriptor, packed, len, a, &err);
    if (!back)
        fail_msg("%s", err.message);
    assert_true(reflect_equal(m, back));
    assert_true(reflect_equal(m, reflect_copy(a, m)));
}

static void all_back(const ProtobufCMessageDescriptor *type, uint64_t seed)
{
    struct rng g = {seed};
    for (int round = 0; round < ROUNDS; round++) {
        struct arena a;
        arena_init(&a, ARENA);
        ProtobufCMessage *m = random_message(&g, &a, type, false, 0);
        assert_non_null(m);
        text_back(m, &a);
        json_back(m, &a);
        binary_back(m, &a);
        arena_free(&a);
    }
}

static void test_job_spec(void **state)
{
    (void)state;
    all_back(&boost__job_spec__descriptor, 17);
}

static void test_all_types(void **state)
{
    (void)state;
    all_back(&all_types_descriptor, 23);
}

static void test_messages_with_oneofs(void **state)
{
    (void)state;
    all_back(&boost__request__descriptor, 5);
    all_back(&boost__controller_message__descriptor, 6);
}

/* Filling defaults changes no value that a reader of the spec sees, and filling twice is filling once. */
static void test_defaults(void **state)
{
    (void)state;
    struct rng g = {99};
    for (int round = 0; round < ROUNDS; round++) {
        struct arena a;
        struct error err;
        arena_init(&a, ARENA);
        ProtobufCMessage *m = random_message(&g, &a, &boost__job_spec__descriptor, false, 0);
        Boost__JobSpec *before = (Boost__JobSpec *)m;
        Boost__JobSpec *filled = (Boost__JobSpec *)reflect_copy(&a, m);
        assert_int_equal(reflect_fill_defaults(&filled->base, &a, &err), 0);
        assert_int_equal(filled->priority, before->priority);
        assert_string_equal(filled->workdir, before->workdir);
        assert_true(filled->has_priority && filled->model && filled->checkpoint->init_from);
        if (before->optimizer)
            assert_memory_equal(&filled->optimizer->beta2, &before->optimizer->beta2, sizeof(double));
        else
            assert_true(filled->optimizer->beta2 == 0.95 && filled->optimizer->has_beta2);
        assert_int_equal(filled->model->has_rank, before->model && before->model->has_rank);
        ProtobufCMessage *again = reflect_copy(&a, &filled->base);
        assert_int_equal(reflect_fill_defaults(again, &a, &err), 0);
        assert_true(reflect_equal(again, &filled->base));
        text_back(&filled->base, &a);
        arena_free(&a);
    }
}

/* ---- the converter ---- */

static const ProtobufCMessageDescriptor *type_named(const char *name)
{
    static const ProtobufCMessageDescriptor *const types[] = {
        &boost__job_spec__descriptor, &boost__boostd_config__descriptor,      &boost__agent_config__descriptor,
        &boost__request__descriptor,  &boost__controller_message__descriptor, &all_types_descriptor,
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i]->name, name) == 0)
            return types[i];
    return NULL;
}

static int put(const ProtobufCMessage *m, const char *format, struct buffer *out, struct error *err)
{
    if (strcmp(format, "text") == 0)
        return text_write(m, out, err);
    if (strcmp(format, "json") == 0)
        return json_write(m, out, err);
    uint8_t *at = buffer_reserve(out, protobuf_c_message_get_packed_size(m));
    if (!at)
        return error_set(err, ERR_NOMEM, "output");
    out->len += protobuf_c_message_pack(m, at);
    return ERR_OK;
}

static int convert(const ProtobufCMessageDescriptor *type, const char *from, const char *to)
{
    struct arena a;
    struct error err = {0};
    struct buffer in, out;
    arena_init(&a, ARENA);
    buffer_init(&in, OUTPUT);
    buffer_init(&out, OUTPUT);
    int rc = fs_read_file("/dev/stdin", &in, &err);
    ProtobufCMessage *m = reflect_new(&a, type);
    const char *text = in.data ? (char *)in.data : "";
    if (!rc && strcmp(from, "text") == 0)
        rc = text_read(m, &a, "in", text, in.len, NULL, &err);
    else if (!rc && strcmp(from, "json") == 0)
        rc = json_read(m, &a, "in", text, in.len, NULL, &err);
    else if (!rc)
        rc = (m = reflect_unpack(type, text, in.len, &a, &err)) ? 0 : ERR_INVALID;
    if (!rc)
        rc = put(m, to, &out, &err);
    if (!rc && out.len)
        rc = fs_write_all(STDOUT_FILENO, out.data, out.len, &err);
    if (rc)
        fprintf(stderr, "%s\n", err.message);
    buffer_free(&in);
    buffer_free(&out);
    arena_free(&a);
    return rc ? 1 : 0;
}

static int put_random(const ProtobufCMessageDescriptor *type, const char *seed)
{
    struct rng g = {strtoull(seed, NULL, 10) * 2654435761u + 1};
    struct arena a;
    struct error err;
    struct buffer out;
    arena_init(&a, ARENA);
    buffer_init(&out, OUTPUT);
    int rc = put(random_message(&g, &a, type, false, 0), "binary", &out, &err);
    if (!rc && out.len)
        rc = fs_write_all(STDOUT_FILENO, out.data, out.len, &err);
    buffer_free(&out);
    arena_free(&a);
    return rc ? 1 : 0;
}

int main(int argc, char **argv)
{
    const ProtobufCMessageDescriptor *type = argc > 2 ? type_named(argv[2]) : NULL;
    if (argc == 5 && type && strcmp(argv[1], "convert") == 0)
        return convert(type, argv[3], argv[4]);
    if (argc == 4 && type && strcmp(argv[1], "random") == 0)
        return put_random(type, argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_spec),
        cmocka_unit_test(test_all_types),
        cmocka_unit_test(test_messages_with_oneofs),
        cmocka_unit_test(test_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
