/* Files of token ids: windows, headers, and what is said about bad ones. */
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "proto/tokenfile.h"
#include "tests/unit/support/token_files.h"

static void windows_overlap_by_one_token(void **state)
{
    (void)state;
    static const Boost__Format__Value formats[] = {BOOST__FORMAT__VALUE__TEXT, BOOST__FORMAT__VALUE__U16,
                                                   BOOST__FORMAT__VALUE__U32};
    for (int k = 0; k < 3; k++) {
        int width = 1 << k;
        struct token_file f;
        struct error err;
        int32_t out[9];
        char *path = write_tokens("t.bin", 50, width);
        assert_int_equal(token_file_open(&f, path, formats[k], 8, 1000, &err), 0);
        assert_int_equal(f.tokens, 50);
        assert_int_equal(f.windows, 6); /* 6*8+1 = 49 of 50: one token is dropped */
        for (int64_t w = 0; w < f.windows; w++) {
            assert_int_equal(token_file_window(&f, w, out, &err), 0);
            for (int i = 0; i < 9; i++)
                assert_int_equal(out[i], (w * 8 + i) * 7 % (width == 1 ? 200 : 1000));
        }
        token_file_close(&f);
    }
}

static void an_exact_file_has_exact_windows(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    for (int64_t n = 9; n <= 34; n++) {
        assert_int_equal(token_file_open(&f, write_tokens("e", n, 1), BOOST__FORMAT__VALUE__TEXT, 8, 256, &err), 0);
        assert_int_equal(f.windows, (n - 1) / 8);
        token_file_close(&f);
    }
}

/* Offsets beyond 4 GiB, in a file with a hole. */
static void large_files_have_64_bit_offsets(void **state)
{
    (void)state;
    char *path = path_of("big.u16");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    int64_t tokens = INT64_C(3) << 30; /* 6 GiB */
    uint8_t last[2] = {0x2a, 0x01};
    assert_int_equal(pwrite(fd, last, 2, (tokens - 1) * 2), 2);
    close(fd);
    struct token_file f;
    struct error err;
    int32_t out[9];
    assert_int_equal(token_file_open(&f, path, BOOST__FORMAT__VALUE__U16, 8, 65536, &err), 0);
    assert_int_equal(f.tokens, tokens);
    assert_int_equal(f.windows, (tokens - 1) / 8);
    assert_int_equal(token_file_window(&f, f.windows - 1, out, &err), 0);
    assert_int_equal(out[8], 0);
    f.s = 1; /* the very last token */
    assert_int_equal(token_file_window(&f, tokens - 2, out, &err), 0);
    assert_int_equal(out[1], 0x12a);
    token_file_close(&f);
}

static void bad_files_are_named(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    assert_int_equal(token_file_open(&f, path_of("none"), BOOST__FORMAT__VALUE__TEXT, 8, 256, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.message, "none"));
    assert_int_equal(token_file_open(&f, dir, BOOST__FORMAT__VALUE__TEXT, 8, 256, &err), ERR_INVALID);
    assert_int_equal(token_file_open(&f, write_tokens("s", 8, 1), BOOST__FORMAT__VALUE__TEXT, 8, 256, &err),
                     ERR_INVALID);
    assert_non_null(strstr(err.message, "seq_len + 1 = 9"));
    assert_non_null(strstr(err.hint, "7"));
    assert_int_equal(token_file_open(&f, write_file("empty", "", 0), BOOST__FORMAT__VALUE__TEXT, 8, 256, &err),
                     ERR_INVALID);
    assert_int_equal(
        token_file_open(&f, write_file("odd", "12345678901234567890x", 21), BOOST__FORMAT__VALUE__U16, 8, 65536, &err),
        ERR_INVALID);
    assert_non_null(strstr(err.message, "21 bytes"));
}

/* T19: a token id at or above the vocabulary. */
static void an_id_beyond_the_vocabulary_is_named(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    int32_t out[9];
    uint32_t raw[40] = {0};
    raw[21] = 500;
    raw[30] = UINT32_MAX;
    char *path = write_file("v.u32", raw, sizeof raw);
    assert_int_equal(token_file_open(&f, path, BOOST__FORMAT__VALUE__U32, 8, 500, &err), 0);
    assert_int_equal(token_file_window(&f, 0, out, &err), 0);
    assert_int_equal(token_file_window(&f, 2, out, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "v.u32"));
    assert_non_null(strstr(err.message, "token id 500 at token 21 (byte 84)"));
    assert_non_null(strstr(err.message, "vocabulary of 500"));
    assert_int_equal(token_file_window(&f, 3, out, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "token id 4294967295 at token 30"));
    token_file_close(&f);
}

static void a_file_that_shrinks_is_an_error_not_a_signal(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    int32_t out[9];
    char *path = write_tokens("shrink", 100, 1);
    assert_int_equal(token_file_open(&f, path, BOOST__FORMAT__VALUE__TEXT, 8, 256, &err), 0);
    assert_int_equal(truncate(path, 30), 0);
    assert_int_equal(token_file_window(&f, 2, out, &err), 0);
    assert_int_equal(token_file_window(&f, 8, out, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "ends before byte 64"));
    token_file_close(&f);
}

/* ---- headers and indices, written here byte by byte --------------------------------------- */

struct bytes {
    uint8_t data[1 << 16];
    size_t len;
};

static void put(struct bytes *b, uint64_t value, int width)
{
    assert_true(b->len + (size_t)width <= sizeof b->data);
    for (int i = 0; i < width; i++)
        b->data[b->len++] = (uint8_t)(value >> 8 * i);
}

static void patch(struct bytes *b, size_t at, uint64_t value, int width)
{
    for (int i = 0; i < width; i++)
        b->data[at + (size_t)i] = (uint8_t)(value >> 8 * i);
}

static int open_it(struct token_file *f, const char *path, Boost__Format__Value format, struct error *err)
{
    error_clear(err);
    return token_file_open(f, path, format, 8, 1000, err);
}

static void refused(const char *name, Boost__Format__Value format, int code, const char *part, const char *other)
{
    struct token_file f;
    struct error err;
    char path[128];
    snprintf(path, sizeof path, "%s", path_of(name));
    assert_int_equal(open_it(&f, path, format, &err), code);
    if (!strstr(err.message, part) || !strstr(err.message, other))
        fail_msg("'%s' and '%s' are not both in '%s'", part, other, err.message);
    assert_true(err.hint[0]);
    assert_int_equal(f.fd, -1);
    assert_null(f.path);
}

/* Token i is 3 * i + 1. */
static void expect_tokens(struct token_file *f, int64_t tokens)
{
    struct error err;
    int32_t out[9];
    assert_int_equal(f->tokens, tokens);
    assert_int_equal(f->windows, (tokens - 1) / 8);
    for (int64_t w = 0; w < f->windows; w++) {
        assert_int_equal(token_file_window(f, w, out, &err), 0);
        for (int i = 0; i < 9; i++)
            assert_int_equal(out[i], (w * 8 + i) * 3 + 1);
    }
}

static struct bytes llmc(int magic, int version, int width, int tokens)
{
    struct bytes b = {.len = 0};
    put(&b, (uint64_t)magic, 4);
    put(&b, (uint64_t)version, 4);
    put(&b, (uint64_t)tokens, 4);
    while (b.len < 1024)
        put(&b, 0, 4);
    for (int i = 0; i < tokens; i++)
        put(&b, (uint64_t)i * 3 + 1, width);
    return b;
}

static void shards_of_llmc(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    struct bytes b = llmc(20240520, 1, 2, 41);
    assert_int_equal(open_it(&f, write_file("a.bin", b.data, b.len), BOOST__FORMAT__VALUE__AUTO, &err), 0);
    assert_int_equal(f.format, BOOST__FORMAT__VALUE__LLMC);
    expect_tokens(&f, 41);
    token_file_close(&f);
    b = llmc(20240801, 7, 4, 33);
    assert_int_equal(open_it(&f, write_file("llama.bin", b.data, b.len), BOOST__FORMAT__VALUE__LLMC, &err), 0);
    expect_tokens(&f, 33);
    int32_t out[9];
    f.vocab = 91; /* token 30 is 91 */
    assert_int_equal(token_file_window(&f, 3, out, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "token id 91 at token 30 (byte 1144) is not below the vocabulary of 91"));
    token_file_close(&f);
}

static void bad_shards_of_llmc(void **state)
{
    (void)state;
    static const Boost__Format__Value LLMC = BOOST__FORMAT__VALUE__LLMC;
    struct bytes b = llmc(20240520, 1, 2, 41);
    write_file("cut", b.data, 1000);
    refused("cut", LLMC, ERR_INVALID, "1000 bytes", "1024");
    write_file("cut", b.data, b.len - 2);
    refused("cut", LLMC, ERR_INVALID, "ends at byte 1104", "41 tokens that its header tells of at byte 8 end at 1106");
    write_file("more", b.data, b.len + 2);
    refused("more", LLMC, ERR_INVALID, "ends at byte 1108", "1106");
    patch(&b, 8, UINT32_MAX, 4);
    write_file("negative", b.data, b.len);
    refused("negative", LLMC, ERR_INVALID, "negative", "-1 tokens");
    b = llmc(20240520, 7, 2, 41); /* a version of the other kind */
    write_file("version", b.data, b.len);
    refused("version", LLMC, ERR_INVALID, "magic 20240520 at byte 0", "version 7 at byte 4");
    b = llmc(20240522, 1, 2, 41);
    write_file("questions", b.data, b.len);
    refused("questions", LLMC, ERR_UNSUPPORTED, "questions", "llm.c");
    b = llmc(20240520, 1, 2, 8);
    write_file("short", b.data, b.len);
    refused("short", LLMC, ERR_INVALID, "8 tokens", "seq_len + 1 = 9");
    write_tokens("raw.bin", 2000, 2);
    refused("raw.bin", BOOST__FORMAT__VALUE__AUTO, ERR_INVALID, "raw.bin", "not that of an llm.c shard");
}

/* Sequences of the given lengths, each a document but for the last two, which share one. */
static const int lengths[] = {11, 0, 20, 7, 3};
enum {
    SEQUENCES = 5,
    MARKS = 5,
    TOKENS = 41,
    LENGTHS_AT = 34,
    OFFSETS_AT = LENGTHS_AT + 4 * SEQUENCES,
    MARKS_AT = OFFSETS_AT + 8 * SEQUENCES
};

static struct bytes megatron_index(int code, int width)
{
    static const int marks[MARKS] = {0, 1, 2, 3, 5};
    struct bytes b = {.len = 9};
    memcpy(b.data, "MMIDIDX\0\0", 9);
    put(&b, 1, 8);
    put(&b, (uint64_t)code, 1);
    put(&b, SEQUENCES, 8);
    put(&b, MARKS, 8);
    for (int i = 0; i < SEQUENCES; i++)
        put(&b, (uint64_t)lengths[i], 4);
    for (int i = 0, at = 0; i < SEQUENCES; at += lengths[i++] * width)
        put(&b, (uint64_t)at, 8);
    for (int i = 0; i < MARKS; i++)
        put(&b, (uint64_t)marks[i], 8);
    return b;
}

static struct bytes megatron_data(int width)
{
    struct bytes b = {.len = 0};
    for (int i = 0; i < TOKENS; i++)
        put(&b, (uint64_t)i * 3 + 1, width);
    return b;
}

static void pairs_of_megatron(void **state)
{
    (void)state;
    static const struct {
        int code, width;
    } types[] = {{8, 2}, {4, 4}, {1, 1}};
    static const char *const names[] = {"m.bin", "m.idx", "m"};
    for (int k = 0; k < 3; k++) {
        struct bytes index = megatron_index(types[k].code, types[k].width), data = megatron_data(types[k].width);
        write_file("m.idx", index.data, index.len);
        write_file("m.bin", data.data, data.len);
        for (int n = 0; n < 3; n++) {
            struct token_file f;
            struct error err;
            Boost__Format__Value format = n == 2 ? BOOST__FORMAT__VALUE__MEGATRON : BOOST__FORMAT__VALUE__AUTO;
            assert_int_equal(open_it(&f, path_of(names[n]), format, &err), 0);
            assert_int_equal(f.format, BOOST__FORMAT__VALUE__MEGATRON);
            assert_non_null(strstr(f.path, "m.bin"));
            expect_tokens(&f, TOKENS);
            token_file_close(&f);
        }
    }
    struct token_file f;
    struct error err;
    int32_t out[9];
    struct bytes index = megatron_index(4, 4), data = megatron_data(4);
    patch(&data, 17 * 4, (uint64_t)-5, 4);
    write_file("m.idx", index.data, index.len);
    assert_int_equal(open_it(&f, write_file("m.bin", data.data, data.len), BOOST__FORMAT__VALUE__AUTO, &err), 0);
    assert_int_equal(token_file_window(&f, 2, out, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "m.bin: token id -5 at token 17 (byte 68)"));
    token_file_close(&f);
}

/* One byte of the index changed at a time, or its end. */
static void bad_pairs_of_megatron(void **state)
{
    (void)state;
    static const Boost__Format__Value MEGATRON = BOOST__FORMAT__VALUE__MEGATRON;
    static const struct {
        size_t at;
        uint64_t value;
        int width, code;
        const char *part, *other;
    } faults[] = {
        {0, 'X', 1, ERR_INVALID, "x.idx", "does not begin with MMIDIDX"},
        {9, 2, 8, ERR_INVALID, "x.idx", "version 1 (byte 9)"},
        {17, 5, 1, ERR_UNSUPPORTED, "ids of type 5 (i64) at byte 17", "u16"},
        {17, 200, 1, ERR_UNSUPPORTED, "ids of type 200", "unknown"},
        {18, 6, 8, ERR_INVALID, "6 sequences and 5 document marks", "ends at byte 134"},
        {18, UINT64_MAX, 8, ERR_INVALID, "18446744073709551615 sequences", "x.idx"},
        {26, UINT64_C(1) << 61, 8, ERR_INVALID, "document marks", "x.idx"}, /* times 8 is 0 in 64 bits */
        {LENGTHS_AT + 8, (uint64_t)-20, 4, ERR_INVALID, "sequence 2 has -20 tokens", "byte 42"},
        {LENGTHS_AT + 8, 19, 4, ERR_INVALID, "sequence 3 begins at byte 62 of the data (byte 78 here)", "ends at 60"},
        {LENGTHS_AT + 16, 4, 4, ERR_INVALID, "x.bin ends at byte 82, within sequence 4", "ends at 84"},
        {LENGTHS_AT + 16, 2, 4, ERR_INVALID, "x.bin ends at byte 82", "x.idx at 80"},
        {OFFSETS_AT, 2, 8, ERR_INVALID, "sequence 0 begins at byte 2", "ends at 0"},
        {OFFSETS_AT + 20, 1, 4, ERR_INVALID, "sequence 2 begins at byte 4294967318", "byte 70 here"},
        {MARKS_AT + 16, 0, 8, ERR_INVALID, "document mark 2 is 0 (byte 110)", "x.idx"},
        {MARKS_AT + 32, 6, 8, ERR_INVALID, "document mark 4 is 6", "5 sequences"},
    };
    struct bytes index = megatron_index(8, 2), data = megatron_data(2);
    write_file("x.bin", data.data, data.len);
    refused("x", MEGATRON, ERR_NOT_FOUND, "x.idx", "index of");
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct bytes bad = index;
        patch(&bad, faults[i].at, faults[i].value, faults[i].width);
        write_file("x.idx", bad.data, bad.len);
        refused("x.bin", BOOST__FORMAT__VALUE__AUTO, faults[i].code, faults[i].part, faults[i].other);
    }
    for (size_t len = 0; len < index.len; len++) { /* cut anywhere */
        write_file("x.idx", index.data, len);
        refused("x", MEGATRON, ERR_INVALID, "x.idx", "ends at byte");
    }
    write_file("x.idx", index.data, index.len + SEQUENCES);
    refused("x", MEGATRON, ERR_UNSUPPORTED, "x.idx", "multimodal");
    write_file("x.idx", index.data, index.len);
    write_file("x.bin", data.data, data.len - 1);
    refused("x", MEGATRON, ERR_INVALID, "x.bin ends at byte 81", "x.idx");
}

/* Each byte of the index, and of a shard's header, set to other values: what is not refused reads like a file. */
static void any_damage_is_refused_or_harmless(void **state)
{
    (void)state;
    static const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff};
    struct bytes index = megatron_index(8, 2), data = megatron_data(2), shard = llmc(20240520, 1, 2, TOKENS);
    int opened = 0, refusals = 0;
    write_file("y.bin", data.data, data.len);
    for (size_t at = 0; at < index.len + 12; at++)
        for (size_t v = 0; v < sizeof values; v++) {
            bool pair = at < index.len;
            struct bytes bad = pair ? index : shard;
            struct token_file f;
            struct error err;
            int32_t out[9];
            bad.data[pair ? at : at - index.len] = values[v];
            char *path = write_file(pair ? "y.idx" : "z.bin", bad.data, bad.len);
            int rc = open_it(&f, path, BOOST__FORMAT__VALUE__AUTO, &err);
            if (rc) {
                assert_true((rc == ERR_INVALID || rc == ERR_UNSUPPORTED) && err.message[0] && err.hint[0]);
                refusals++;
                continue;
            }
            for (int64_t w = 0; w < f.windows; w++)
                assert_int_equal(token_file_window(&f, w, out, &err), 0);
            assert_in_range(f.tokens, 1, f.bytes);
            token_file_close(&f);
            opened++;
        }
    assert_true(opened > 100 && refusals > 500); /* values that were there already, and marks that stay in order */
}

/* More sequences than one read takes, and data beyond 4 GiB. */
static void long_indices_and_large_pairs(void **state)
{
    (void)state;
    enum { N = 5000 };
    int64_t length = 500000, total = (int64_t)N * length; /* 2.5e9 tokens, 5e9 bytes */
    uint8_t *raw = calloc(1, 34 + N * 12 + 16), *at = raw + 34;
    memcpy(raw, "MMIDIDX\0\0\1", 10);
    raw[17] = 8;
    raw[18] = N & 255;
    raw[19] = N >> 8;
    raw[26] = 2;
    for (int i = 0; i < N; i++, at += 4)
        for (int b = 0; b < 4; b++)
            at[b] = (uint8_t)(length >> 8 * b);
    for (int64_t i = 0; i < N; i++, at += 8)
        for (int b = 0; b < 8; b++)
            at[b] = (uint8_t)(i * length * 2 >> 8 * b);
    at[8] = N & 255;
    at[9] = N >> 8;
    char path[128];
    snprintf(path, sizeof path, "%s", write_file("large.idx", raw, 34 + N * 12 + 16));
    char *data = path_of("large.bin");
    int fd = open(data, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    assert_int_equal(ftruncate(fd, total * 2), 0);
    assert_int_equal(pwrite(fd, "\x2a\x01", 2, (total - 1) * 2), 2);
    close(fd);
    struct token_file f;
    struct error err;
    int32_t out[9];
    assert_int_equal(open_it(&f, path, BOOST__FORMAT__VALUE__AUTO, &err), 0);
    assert_int_equal(f.tokens, total);
    f.s = 1;
    assert_int_equal(token_file_window(&f, total - 2, out, &err), 0);
    assert_int_equal(out[1], 0x12a);
    token_file_close(&f);
    raw[34 + N * 4 + 4000 * 8] ^= 1; /* in the second read */
    snprintf(path, sizeof path, "%s", write_file("large.idx", raw, 34 + N * 12 + 16));
    assert_int_equal(open_it(&f, path, BOOST__FORMAT__VALUE__AUTO, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "sequence 4000"));
    free(raw);
}

static void names_tell_formats(void **state)
{
    (void)state;
    assert_int_equal(token_format_of_name("/a/b.u16"), BOOST__FORMAT__VALUE__U16);
    assert_int_equal(token_format_of_name("b.u32"), BOOST__FORMAT__VALUE__U32);
    assert_int_equal(token_format_of_name("b.bin"), BOOST__FORMAT__VALUE__AUTO);
    assert_int_equal(token_format_of_name("b.idx"), BOOST__FORMAT__VALUE__AUTO);
    assert_int_equal(token_format_of_name("b.txt"), BOOST__FORMAT__VALUE__TEXT);
    assert_int_equal(token_format_of_name(".u16"), BOOST__FORMAT__VALUE__TEXT);
    assert_int_equal(token_format_of_name(""), BOOST__FORMAT__VALUE__TEXT);
}

static void a_resting_file_is_opened_again(void **state)
{
    (void)state;
    struct token_file f;
    struct error err;
    int32_t before[9], after[9];
    char *path = write_tokens("rest.u16", 50, 2);
    assert_int_equal(open_it(&f, path, BOOST__FORMAT__VALUE__AUTO, &err), 0);
    assert_int_equal(token_file_window(&f, 3, before, &err), 0);
    token_file_rest(&f);
    assert_int_equal(f.fd, -1);
    assert_int_equal(token_file_window(&f, 3, after, &err), 0);
    assert_memory_equal(before, after, sizeof before);
    token_file_rest(&f);
    assert_int_equal(truncate(f.path, 98), 0);
    assert_int_equal(token_file_window(&f, 3, after, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "has 98 bytes, and had 100"));
    token_file_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_overlap_by_one_token),
        cmocka_unit_test(an_exact_file_has_exact_windows),
        cmocka_unit_test(large_files_have_64_bit_offsets),
        cmocka_unit_test(bad_files_are_named),
        cmocka_unit_test(an_id_beyond_the_vocabulary_is_named),
        cmocka_unit_test(a_file_that_shrinks_is_an_error_not_a_signal),
        cmocka_unit_test(shards_of_llmc),
        cmocka_unit_test(bad_shards_of_llmc),
        cmocka_unit_test(pairs_of_megatron),
        cmocka_unit_test(bad_pairs_of_megatron),
        cmocka_unit_test(any_damage_is_refused_or_harmless),
        cmocka_unit_test(long_indices_and_large_pairs),
        cmocka_unit_test(names_tell_formats),
        cmocka_unit_test(a_resting_file_is_opened_again),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
