/* Presence, lists, names, defaults, and the walk over packed bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "all_types.h"
#include "proto/job.pb-c.h"
#include "proto/reflect.h"

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

static const ProtobufCFieldDescriptor *field(const ProtobufCMessageDescriptor *type, const char *name)
{
    const ProtobufCFieldDescriptor *f = reflect_field(type, name, strlen(name));
    assert_non_null(f);
    return f;
}

static void test_presence(void **state)
{
    (void)state;
    Boost__JobSpec *s = (Boost__JobSpec *)reflect_new(&arena, &boost__job_spec__descriptor);
    const ProtobufCFieldDescriptor *priority = field(s->base.descriptor, "priority");
    const ProtobufCFieldDescriptor *workdir = field(s->base.descriptor, "workdir");
    assert_int_equal(reflect_count(&s->base, priority), 0);
    assert_int_equal(s->priority, 50);
    *(int32_t *)reflect_add(&s->base, priority, &arena) = 7;
    assert_true(s->has_priority && s->priority == 7 && reflect_count(&s->base, priority) == 1);
    reflect_clear(&s->base, priority);
    assert_true(!s->has_priority && s->priority == 50);
    assert_int_equal(reflect_count(&s->base, workdir), 0); /* the default "" is not presence */
    *(char **)reflect_add(&s->base, workdir, &arena) = arena_strdup(&arena, "");
    assert_int_equal(reflect_count(&s->base, workdir), 1); /* an explicit "" is */
    reflect_clear(&s->base, workdir);
    assert_int_equal(reflect_count(&s->base, workdir), 0);
    assert_string_equal(s->workdir, "");
    ProtobufCMessage *model = reflect_sub(&s->base, field(s->base.descriptor, "model"), &arena);
    assert_ptr_equal(model, s->model);
    assert_ptr_equal(reflect_sub(&s->base, field(s->base.descriptor, "model"), &arena), model);
    reflect_clear(&s->base, field(s->base.descriptor, "model"));
    assert_null(s->model);
}

static void test_oneof(void **state)
{
    (void)state;
    struct all_types *m = (struct all_types *)reflect_new(&arena, &all_types_descriptor);
    const ProtobufCFieldDescriptor *number = field(&all_types_descriptor, "pick_number");
    const ProtobufCFieldDescriptor *text = field(&all_types_descriptor, "pick_text");
    *(int32_t *)reflect_add(&m->base, number, &arena) = 0;
    assert_true(m->pick_case == 25 && reflect_count(&m->base, number) == 1 && reflect_count(&m->base, text) == 0);
    *(char **)reflect_add(&m->base, text, &arena) = arena_strdup(&arena, "x");
    assert_true(m->pick_case == 26 && reflect_count(&m->base, number) == 0 && reflect_count(&m->base, text) == 1);
    reflect_clear(&m->base, number); /* not the member that is set */
    assert_int_equal(m->pick_case, 26);
    reflect_clear(&m->base, text);
    assert_int_equal(m->pick_case, 0);
}

static void test_lists(void **state)
{
    (void)state;
    struct all_types *m = (struct all_types *)reflect_new(&arena, &all_types_descriptor);
    const ProtobufCFieldDescriptor *list = field(&all_types_descriptor, "list_i32");
    for (int32_t i = 0; i < 1000; i++)
        *(int32_t *)reflect_push(&m->base, list, &arena) = i * i;
    assert_int_equal(reflect_count(&m->base, list), 1000);
    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(*(int32_t *)reflect_get(&m->base, list, i), i * i);
    /* another owner's list, of exactly its size: reflect_add may not write behind it */
    int32_t own[5] = {1, 2, 3, 4, 5};
    m->list_i32 = own;
    m->n_list[0] = 5;
    *(int32_t *)reflect_add(&m->base, list, &arena) = 6;
    assert_ptr_not_equal(m->list_i32, own);
    assert_int_equal(m->n_list[0], 6);
    *(int32_t *)reflect_push(&m->base, list, &arena) = 7;
    for (int32_t i = 0; i < 7; i++)
        assert_int_equal(m->list_i32[i], i + 1);
}

static void test_nearest(void **state)
{
    (void)state;
    const ProtobufCMessageDescriptor *model = &boost__model__descriptor;
    static const struct {
        const char *typed, *meant;
    } cases[] = {{"rnk", "rank"},
                 {"Rank", "rank"},
                 {"ranks", "rank"},
                 {"arnk", "rank"},
                 {"layer", "layers"},
                 {"hiden", "hidden"},
                 {"intermidiate", "intermediate"},
                 {"kv-heads", "kv_heads"},
                 {"x", NULL},
                 {"zzzz", NULL},
                 {"", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *near = reflect_nearest_field(model, cases[i].typed, strlen(cases[i].typed));
        if (cases[i].meant ? !near || strcmp(near, cases[i].meant) != 0 : near != NULL)
            fail_msg("'%s' is near '%s'", cases[i].typed, near ? near : "nothing");
    }
    char longest[300];
    memset(longest, 'r', sizeof longest);
    assert_null(reflect_nearest_field(model, longest, sizeof longest));
    assert_string_equal(reflect_nearest_enum(&boost__factorization__value__descriptor, "cola", 4), "COLA");
    assert_int_equal(reflect_unknown_field_error(&err, "p: ", "", model, longest, sizeof longest, REFLECT_BRACES),
                     ERR_INVALID);
    assert_true(strlen(err.message) < 200);
}

static void test_defaults(void **state)
{
    (void)state;
    Boost__JobSpec *s = (Boost__JobSpec *)reflect_new(&arena, &boost__job_spec__descriptor);
    const ProtobufCFieldDescriptor *data = field(s->base.descriptor, "data");
    ProtobufCMessage *d = reflect_sub(&s->base, data, &arena);
    *(ProtobufCMessage **)reflect_add(d, field(d->descriptor, "train"), &arena) =
        reflect_new(&arena, &boost__token_file__descriptor);
    assert_int_equal(reflect_fill_defaults(&s->base, &arena, &err), 0);
    assert_true(s->optimizer->has_beta2 && s->optimizer->beta2 == 0.95 && !s->optimizer->has_lr);
    assert_true(s->data->train[0]->has_weight && s->data->train[0]->weight == 1 && s->data->n_eval == 0);
    assert_true(s->checkpoint->init_from && s->checkpoint->init_from->has_weights_only);
    assert_true(s->parallel->has_deterministic && s->parallel->deterministic && !s->parallel->has_strategy);
    assert_true(s->data->has_eod_id && s->data->eod_id == -1);
    assert_int_equal(reflect_count(&s->base, field(s->base.descriptor, "workdir")), 1);
    struct arena tiny;
    arena_init(&tiny, 64);
    Boost__JobSpec plain = BOOST__JOB_SPEC__INIT;
    assert_int_equal(reflect_fill_defaults(&plain.base, &tiny, &err), ERR_NOMEM);
    arena_free(&tiny);
}

static void expect_wire(const void *data, size_t len, const char *message)
{
    assert_null(reflect_unpack(&boost__job_spec__descriptor, data, len, &arena, &err));
    assert_string_equal(err.message, message);
    assert_true(err.hint[0]);
}

static void test_wire_faults(void **state)
{
    (void)state;
    expect_wire("\x1a\x30\x10\x01", 4, "the data are cut off at byte 4, inside model");
    expect_wire("\x1a\x02\x10", 3, "the data are cut off at byte 3, inside model");
    expect_wire("\x32\x09\x19\x00\x00", 5, "the data are cut off at byte 5, inside optimizer");
    expect_wire("\x32\x03\x19\x00\x00", 5, "the data are cut off at byte 5, inside optimizer.lr");
    expect_wire("\x08", 1, "the data are cut off at byte 1, inside spec_version");
    expect_wire("\x88", 1, "the data are cut off at byte 1, inside the first field");
    expect_wire("\x0d\x01\x00\x00\x00", 5, "spec_version: wire type of another kind of field at byte 1");
    expect_wire("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 12, "spec_version: overlong number at byte 11");
    expect_wire("\x00\x01", 2, "bad field number at byte 1");
    expect_wire("\x9b\x06\x9c\x06", 4, "#99: unknown wire type at byte 2"); /* a group */
    expect_wire("\x12\x03"
                "a\0b",
                5, "name holds a NUL byte");
    expect_wire("\x2a\x05\x0a\x03\x0a\x01\x00", 7, "data.train[0].path holds a NUL byte");
    expect_wire("\x7a\x01"
                "a"
                "\x7a\x02"
                "b",
                6, "the data are cut off at byte 6, inside after[1]");
}

static void test_unknown_numbers(void **state)
{
    (void)state;
    /* field 99 at the top and field 50 of data.train[1] */
    static const char data[] = "\x98\x06\x05"
                               "\x2a\x07"
                               "\x0a\x00"
                               "\x0a\x03\x90\x03\x01";
    ProtobufCMessage *m = reflect_unpack(&boost__job_spec__descriptor, data, sizeof data - 1, &arena, &err);
    if (!m)
        fail_msg("%s", err.message);
    struct buffer names;
    buffer_init(&names, 256);
    assert_int_equal(reflect_unknown_fields(m, &names), 2);
    assert_string_equal((char *)names.data, "#99, data.train[1].#50");
    buffer_free(&names);
    ProtobufCMessage *clone = reflect_clone(m);
    assert_non_null(clone);
    assert_true(reflect_equal(m, clone));
    protobuf_c_message_free_unpacked(clone, NULL); /* the system allocator's: clean under AddressSanitizer */
    ProtobufCMessage *copy = reflect_copy(&arena, m);
    assert_true(reflect_equal(m, copy)); /* unknown fields are kept */
    assert_false(reflect_equal(m, reflect_new(&arena, m->descriptor)));
}

static void test_packed_lists(void **state)
{
    (void)state;
    /* list_i32 packed [1, 300], then one more by itself; list_real packed with a piece missing */
    struct all_types *m = (struct all_types *)reflect_unpack(&all_types_descriptor,
                                                             "\x92\x01\x03\x01\xac\x02\x90\x01\x07", 9, &arena, &err);
    if (!m)
        fail_msg("%s", err.message);
    assert_int_equal(m->n_list[0], 3);
    assert_int_equal(m->list_i32[1], 300);
    assert_int_equal(m->list_i32[2], 7);
    assert_null(reflect_unpack(&all_types_descriptor, "\x9a\x01\x05\x00\x00\x80\x3f\x00", 8, &arena, &err));
    assert_string_equal(err.message, "list_real[1]: packed list with a part of an entry at byte 7");
}

static void test_wire_depth(void **state)
{
    (void)state;
    uint8_t data[1024];
    size_t len = 0; /* sub { sub { ... } }, written from the inside; the tag of sub is 0x8a 0x01 */
    for (int level = 0; level < REFLECT_MAX_DEPTH + 1; level++) {
        uint8_t head[4] = {0x8a, 0x01, (uint8_t)(len & 0x7f), (uint8_t)(len >> 7)};
        size_t head_len = 3;
        if (len > 127) {
            head[2] |= 0x80;
            head_len = 4;
        }
        memmove(data + head_len, data, len);
        memcpy(data, head, head_len);
        len += head_len;
        ProtobufCMessage *m = reflect_unpack(&all_types_descriptor, data, len, &arena, &err);
        if (level < REFLECT_MAX_DEPTH)
            assert_non_null(m);
        else
            assert_null(m);
    }
    assert_non_null(strstr(err.message, "messages nest too deep"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_presence, setup, teardown),
        cmocka_unit_test_setup_teardown(test_oneof, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nearest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_defaults, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wire_faults, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unknown_numbers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_packed_lists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wire_depth, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
