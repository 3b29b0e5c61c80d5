/* Damaged input never crashes a reader and never hangs it: random mutations of
 * good job files in every format, and random bytes. Run it under
 * -fsanitize=address,undefined as well (make BUILD=... OPT="-O1 -g -fsanitize=address,undefined"
 * LDFLAGS="-pthread -fsanitize=address,undefined"); BOOST_MUTATIONS overrides the number of rounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "all_types.h"
#include "proto/jobfile.h"
#include "proto/json.h"
#include "proto/text.h"
#include "proto/validate.h"
#include "random_message.h"

enum { ROUNDS = 4000, SEEDS = 40 };

static int rounds(void)
{
    const char *text = getenv("BOOST_MUTATIONS");
    return text ? (int)strtol(text, NULL, 10) : ROUNDS;
}

/* One to four edits: flip, overwrite with a telling byte, delete, insert, repeat or cut a stretch. */
static size_t mutate(struct rng *g, uint8_t *p, size_t len, size_t cap)
{
    static const char telling[] = "{}[]<>:;,#\"'\\-.0x9eEfuU_\n\0\x7f\x80\xff";
    for (unsigned edits = 1 + rng_below(g, 4); edits > 0; edits--) {
        size_t at = len ? rng_below(g, (unsigned)len) : 0;
        size_t run = len - at ? 1 + rng_below(g, (unsigned)(len - at < 16 ? len - at : 16)) : 0;
        switch (rng_below(g, 6)) {
        case 0:
            if (len)
                p[at] ^= (uint8_t)(1u << rng_below(g, 8));
            break;
        case 1:
            if (len)
                p[at] = (uint8_t)telling[rng_below(g, sizeof telling - 1)];
            break;
        case 2:
            memmove(p + at, p + at + run, len - at - run);
            len -= run;
            break;
        case 3:
            if (len < cap) {
                memmove(p + at + 1, p + at, len - at);
                p[at] = (uint8_t)rng_next(g);
                len++;
            }
            break;
        case 4:
            if (len + run <= cap) {
                memmove(p + at + run, p + at, len - at);
                len += run;
            }
            break;
        default:
            if (rng_below(g, 8) == 0)
                len = at;
            break;
        }
    }
    return len;
}

/* Whatever is read is used: checked, resolved, written in all formats, and read again. */
static void use(Boost__JobSpec *spec, struct arena *a)
{
    struct error err = {0};
    struct buffer out;
    buffer_init(&out, 16 << 20);
    if (validate_job_spec(spec, &err))
        assert_true(err.code == ERR_INVALID && err.message[0] && strlen(err.message) < sizeof err.message);
    assert_int_equal(jobfile_absolute_paths(spec, a, "/work", &err), 0);
    for (int format = JOB_FORMAT_BINARY; format <= JOB_FORMAT_JSON; format++) {
        buffer_clear(&out);
        assert_int_equal(jobfile_write(spec, (enum job_format)format, &out, &err), 0);
    }
    assert_int_equal(reflect_fill_defaults(&spec->base, a, &err), 0);
    buffer_free(&out);
}

static void damaged(enum job_format format)
{
    struct rng g = {(uint64_t)format * 7919 + 1};
    int accepted = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
        struct arena a;
        struct error err = {0};
        struct buffer good;
        arena_init(&a, 16 << 20);
        buffer_init(&good, 1 << 20);
        Boost__JobSpec *spec = (Boost__JobSpec *)random_message(&g, &a, &boost__job_spec__descriptor, true, 0);
        assert_int_equal(jobfile_write(spec, format, &good, &err), 0);
        for (int i = 0; i < rounds() / SEEDS; i++) {
            size_t cap = good.len + 256;
            uint8_t *bad = malloc(cap);
            assert_non_null(bad);
            memset(bad, 0, cap);
            if (good.len)
                memcpy(bad, good.data, good.len);
            size_t len = mutate(&g, bad, good.len, cap);
            /* the exact size, so that a sanitizer sees one byte too far */
            uint8_t *exact = malloc(len ? len : 1);
            assert_non_null(exact);
            memcpy(exact, bad, len);
            free(bad);
            struct job_file f;
            struct error fault = {0};
            int rc = jobfile_parse(&f, "bad", exact, len, i % 2 ? format : JOB_FORMAT_AUTO, i % 3 == 0, &fault);
            if (rc)
                assert_true(fault.code == (enum error_code)rc && fault.message[0]);
            else
                use(f.spec, &f.arena);
            accepted += !rc;
            jobfile_free(&f);
            free(exact);
        }
        buffer_free(&good);
        arena_free(&a);
    }
    assert_true(accepted > rounds() / 100); /* the mutations are not all hopeless */
}

static void test_damaged_text(void **state)
{
    (void)state;
    damaged(JOB_FORMAT_TEXT);
}

static void test_damaged_json(void **state)
{
    (void)state;
    damaged(JOB_FORMAT_JSON);
}

static void test_damaged_binary(void **state)
{
    (void)state;
    damaged(JOB_FORMAT_BINARY);
}

static void test_random_bytes(void **state)
{
    (void)state;
    struct rng g = {4711};
    for (int i = 0; i < rounds(); i++) {
        uint8_t data[64];
        size_t len = rng_below(&g, sizeof data);
        for (size_t k = 0; k < len; k++)
            data[k] = (uint8_t)rng_next(&g);
        for (int format = JOB_FORMAT_AUTO; format <= JOB_FORMAT_JSON; format++) {
            struct job_file f;
            struct error err = {0};
            if (!jobfile_parse(&f, "noise", data, len, (enum job_format)format, true, &err))
                use(f.spec, &f.arena);
            jobfile_free(&f);
        }
    }
}

/* The types that a JobSpec lacks, and its oneof. */
static void test_damaged_all_types(void **state)
{
    (void)state;
    struct rng g = {31337};
    for (int i = 0; i < rounds(); i++) {
        struct arena a;
        struct error err = {0};
        struct buffer text;
        arena_init(&a, 16 << 20);
        buffer_init(&text, 1 << 20);
        ProtobufCMessage *m = random_message(&g, &a, &all_types_descriptor, false, 1);
        assert_int_equal(i % 2 ? text_write(m, &text, &err) : json_write(m, &text, &err), 0);
        uint8_t *at = buffer_reserve(&text, 64);
        assert_non_null(at);
        size_t len = mutate(&g, text.data, text.len, text.len + 64);
        ProtobufCMessage *back = reflect_new(&a, &all_types_descriptor);
        struct read_options options = {i % 3 == 0, NULL};
        int rc = i % 2 ? text_read(back, &a, "t", (char *)text.data, len, &options, &err)
                       : json_read(back, &a, "j", (char *)text.data, len, &options, &err);
        if (rc)
            assert_true(err.message[0]);
        buffer_free(&text);
        size_t packed = protobuf_c_message_get_packed_size(m);
        uint8_t *bytes = malloc(packed + 32);
        assert_non_null(bytes);
        protobuf_c_message_pack(m, bytes);
        len = mutate(&g, bytes, packed, packed + 32);
        back = reflect_unpack(&all_types_descriptor, bytes, len, &a, &err);
        if (back)
            assert_true(reflect_equal(back, back) || protobuf_c_message_get_packed_size(back) == 0);
        free(bytes);
        arena_free(&a);
    }
}

/* `--set` with damaged assignments. */
static void test_damaged_assignments(void **state)
{
    (void)state;
    static const char *const good[] = {
        "optimizer.lr=1e-3",         "parallel.strategy=BTP", "data.train[0].path=a",  "after+=afterok:18",
        "data.eval=[{path: \"a\"}]", "model={hidden: 3}",     "label[1]={key: \"a\"}", "name="};
    struct rng g = {271828};
    struct arena a;
    arena_init(&a, 64 << 20);
    Boost__JobSpec *spec = (Boost__JobSpec *)reflect_new(&a, &boost__job_spec__descriptor);
    for (int i = 0; i < rounds(); i++) {
        uint8_t text[96] = {0};
        const char *from = good[rng_below(&g, sizeof good / sizeof *good)];
        memcpy(text, from, strlen(from));
        text[mutate(&g, text, strlen(from), 90)] = 0;
        struct error err = {0};
        if (jobfile_set(spec, &a, (char *)text, &err) && err.code != ERR_NOMEM)
            assert_true(err.message[0]);
    }
    struct buffer out;
    buffer_init(&out, 16 << 20);
    assert_int_equal(text_write(&spec->base, &out, NULL), 0);
    buffer_free(&out);
    arena_free(&a);
}

/* An arena that is full after any number of bytes: an error that says so, or success, and nothing else. */
static void test_memory_runs_out_anywhere(void **state)
{
    (void)state;
    struct rng g = {1234567};
    struct arena a;
    struct error err = {0};
    struct buffer out[JOB_FORMAT_JSON + 1];
    arena_init(&a, 16 << 20);
    ProtobufCMessage *m = random_message(&g, &a, &boost__job_spec__descriptor, true, 0);
    for (int format = JOB_FORMAT_BINARY; format <= JOB_FORMAT_JSON; format++) {
        buffer_init(&out[format], 1 << 20);
        assert_int_equal(jobfile_write((Boost__JobSpec *)m, (enum job_format)format, &out[format], &err), 0);
    }
    int succeeded = 0;
    for (size_t max = 0; max < 32768; max += 24) {
        for (int format = JOB_FORMAT_BINARY; format <= JOB_FORMAT_JSON; format++) {
            struct arena small;
            arena_init(&small, max);
            ProtobufCMessage *back = reflect_new(&small, m->descriptor);
            const char *data = (char *)out[format].data;
            size_t len = out[format].len;
            int rc = ERR_NOMEM;
            if (back && format == JOB_FORMAT_TEXT)
                rc = text_read(back, &small, "t", data, len, NULL, &err);
            else if (back && format == JOB_FORMAT_JSON)
                rc = json_read(back, &small, "j", data, len, NULL, &err);
            else if (back)
                rc = (back = reflect_unpack(m->descriptor, data, len, &small, &err)) ? ERR_OK : (int)err.code;
            if (!rc) {
                assert_true(reflect_equal(m, back));
                rc = reflect_fill_defaults(back, &small, &err);
                succeeded += !rc;
            }
            if (rc && rc != ERR_NOMEM)
                fail_msg("%d bytes: %s: %s", (int)max, error_code_name((enum error_code)rc), err.message);
            arena_free(&small);
        }
    }
    assert_true(succeeded > 3);
    for (int format = JOB_FORMAT_BINARY; format <= JOB_FORMAT_JSON; format++)
        buffer_free(&out[format]);
    arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged_text),
        cmocka_unit_test(test_damaged_json),
        cmocka_unit_test(test_damaged_binary),
        cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_damaged_all_types),
        cmocka_unit_test(test_damaged_assignments),
        cmocka_unit_test(test_memory_runs_out_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
