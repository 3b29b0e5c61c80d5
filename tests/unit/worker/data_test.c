/* Token files, windows, the order of samples, batches; and what is said about bad files. */
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
#include "worker/data.h"

static char dir[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-data-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static char *write_file(const char *name, const void *data, size_t len)
{
    char *path = path_of(name);
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
    return path;
}

/* n tokens: id of token i is i*7 % 1000, in the given width. */
static char *write_tokens(const char *name, int64_t n, int width)
{
    uint8_t *raw = calloc((size_t)n, (size_t)width);
    for (int64_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)(i * 7 % (width == 1 ? 200 : 1000));
        for (int b = 0; b < width; b++)
            raw[i * width + b] = (uint8_t)(id >> 8 * b);
    }
    char *path = write_file(name, raw, (size_t)(n * width));
    free(raw);
    return path;
}

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
    assert_int_equal(token_file_open(&f, write_file("odd", "12345678901234567890x", 21), BOOST__FORMAT__VALUE__U16, 8,
                                     65536, &err),
                     ERR_INVALID);
    assert_non_null(strstr(err.message, "21 bytes"));
    assert_int_equal(token_file_open(&f, path_of("odd"), BOOST__FORMAT__VALUE__LLMC, 8, 256, &err), ERR_UNSUPPORTED);
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
    assert_non_null(strstr(err.message, "token id 500 at token 21"));
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

/* ---- order ------------------------------------------------------------------------------ */

static void every_epoch_is_a_permutation(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 1023, 4096, 5000};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int64_t n = sizes[k];
            bool *seen = calloc((size_t)n, 1);
            for (int64_t i = 0; i < n; i++) {
                int64_t x = data_permute(7, epoch, n, i);
                assert_true(x >= 0 && x < n && !seen[x]);
                seen[x] = true;
            }
            free(seen);
        }
}

/* Large n in constant time; the values, from an independent program, are written down so that the order
 * never changes unnoticed. */
static void the_order_is_fixed_for_ever(void **state)
{
    (void)state;
    assert_int_equal(data_permute(1, 0, 1000, 0), data_permute(1, 0, 1000, 0));
    int64_t n = INT64_C(1) << 40;
    for (int64_t i = 0; i < 1000; i++)
        assert_in_range(data_permute(3, 2, n, n - 1 - i), 0, n - 1);
    int moved = 0, other_seed = 0, other_epoch = 0;
    for (int64_t i = 0; i < 1000; i++) {
        moved += data_permute(1, 0, 1000, i) != i;
        other_seed += data_permute(1, 0, 1000, i) != data_permute(2, 0, 1000, i);
        other_epoch += data_permute(1, 0, 1000, i) != data_permute(1, 1, 1000, i);
    }
    assert_true(moved > 980 && other_seed > 980 && other_epoch > 980);
    static const int64_t first[] = {148, 449, 672, 575, 445, 219, 134, 601};
    for (int64_t i = 0; i < 8; i++)
        assert_int_equal(data_permute(1, 0, 1000, i), first[i]);
}

/* Mean displacement of neighbours: a shuffle, not a rotation. Pairs (i, i+1) of a uniform permutation are
 * (n+1)/3 apart on average with standard error below n / (4 sqrt(n)). */
static void neighbours_are_torn_apart(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 5; seed++) {
        int64_t n = 10000;
        double sum = 0;
        for (int64_t i = 0; i + 1 < n; i++)
            sum += (double)llabs(data_permute(seed, 0, n, i + 1) - data_permute(seed, 0, n, i));
        double mean = sum / (double)(n - 1);
        assert_true(mean > 3333 - 5 * 25 && mean < 3334 + 5 * 25);
    }
}

/* ---- batches ------------------------------------------------------------------------------ */

static struct plan small_plan(void)
{
    return (struct plan){.s = 8, .V = 256, .tp = 1, .pp = 1, .dp = 1, .world = 1, .micro_batch = 2,
                         .global_batch = 6, .accumulation = 3, .T = 16, .data_seed = 11};
}

struct spec {
    Boost__JobSpec job;
    Boost__Data data;
    Boost__Run run;
    Boost__TokenFile train, eval;
    Boost__TokenFile *trains[2], *evals[1];
    char train_path[128], eval_path[128];
};

static void make_spec(struct spec *s, int64_t train_tokens, int64_t eval_tokens)
{
    *s = (struct spec){.job = BOOST__JOB_SPEC__INIT, .data = BOOST__DATA__INIT, .run = BOOST__RUN__INIT,
                       .train = BOOST__TOKEN_FILE__INIT, .eval = BOOST__TOKEN_FILE__INIT};
    snprintf(s->train_path, sizeof s->train_path, "%s", write_tokens("train", train_tokens, 1));
    snprintf(s->eval_path, sizeof s->eval_path, "%s", write_tokens("eval", eval_tokens, 1));
    s->job.data = &s->data;
    s->job.run = &s->run;
    s->train.path = s->train_path;
    s->eval.path = s->eval_path;
    s->trains[0] = s->trains[1] = &s->train;
    s->evals[0] = &s->eval;
    s->data.train = s->trains;
    s->data.n_train = 1;
    s->data.eval = s->evals;
    s->data.n_eval = 1;
    s->data.format = BOOST__FORMAT__VALUE__TEXT;
    s->run.eval_tokens = 40;
}

/* Every sample of the run, in order, against the definition; across an epoch's end. */
static void batches_are_the_samples_in_order(void **state)
{
    (void)state;
    struct spec s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    make_spec(&s, 13 * 8 + 1, 50);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    assert_int_equal(d.train.windows, 13);
    for (int64_t step = 1; step <= 9; step++) {
        const struct micro_batch *m;
        assert_int_equal(data_train(&d, step, &m, &err), 0);
        for (int64_t i = 0; i < 6; i++) {
            int64_t sample = (step - 1) * 6 + i, window = data_permute(11, sample / 13, 13, sample % 13);
            for (int64_t x = 0; x < 8; x++) {
                assert_int_equal(m[i / 2].inputs[i % 2 * 8 + x], (window * 8 + x) * 7 % 200);
                assert_int_equal(m[i / 2].targets[i % 2 * 8 + x], (window * 8 + x + 1) * 7 % 200);
            }
        }
        int64_t first, last;
        data_range(&d, step, &first, &last);
        assert_int_equal(first, (step - 1) * 6);
        assert_int_equal(last, step * 6 - 1);
    }
    data_close(&d);
}

/* The same samples whatever the cut: all samples of a step by dp = 1 and by dp = 3. */
static void replicas_share_a_step(void **state)
{
    (void)state;
    struct spec s;
    struct plan whole = small_plan(), cut = small_plan();
    struct data d;
    struct error err;
    cut.dp = cut.world = 3;
    cut.accumulation = 1;
    make_spec(&s, 40 * 8 + 1, 50);
    int32_t all[6][8];
    const struct micro_batch *m;
    assert_int_equal(data_open(&d, &s.job, &whole, 0, &err), 0);
    assert_int_equal(data_train(&d, 3, &m, &err), 0);
    memcpy(all, m[0].inputs, sizeof all);
    data_close(&d);
    for (int rank = 0; rank < 3; rank++) {
        assert_int_equal(data_open(&d, &s.job, &cut, rank, &err), 0);
        assert_int_equal(data_train(&d, 3, &m, &err), 0);
        assert_memory_equal(m[0].inputs, all[rank * 2], sizeof all[0] * 2);
        data_close(&d);
    }
}

static void evaluation_covers_fixed_windows(void **state)
{
    (void)state;
    struct spec s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    const struct micro_batch *m;
    make_spec(&s, 200, 21 * 8 + 1);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    assert_int_equal(d.eval_windows, 5); /* 40 tokens are 5 windows of 8 */
    assert_int_equal(data_eval_count(&d), 3);
    int64_t seen = 0, unmasked = 0;
    for (int64_t i = 0; i < 3; i++) {
        assert_int_equal(data_eval(&d, i, &m, &err), 0);
        for (int64_t j = 0; j < 16; j++)
            unmasked += m->targets[j] >= 0;
        for (int64_t j = 0; j < 2 && seen < 5; j++, seen++)
            assert_int_equal(m->inputs[j * 8], (seen * 21 / 5) * 8 * 7 % 200);
    }
    assert_int_equal(unmasked, 40);
    data_close(&d);
    s.run.eval_tokens = 1000000; /* capped by the file */
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    assert_int_equal(d.eval_windows, 21);
    data_close(&d);
}

static void masks_leave_targets_out(void **state)
{
    (void)state;
    struct spec s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    const struct micro_batch *m;
    make_spec(&s, 200, 50);
    s.data.pad_id = 14;
    s.data.eod_id = 35;
    s.data.mask_eod = true;
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    int pads = 0, ends = 0;
    for (int64_t step = 1; step <= 4; step++) { /* all 24 windows */
        assert_int_equal(data_train(&d, step, &m, &err), 0);
        for (int64_t i = 0; i < 48; i++) {
            int32_t in = d.inputs[i], expect = (in + 7) % 200;
            bool masked = expect == 14 || in == 35;
            pads += expect == 14;
            ends += in == 35;
            assert_int_equal(d.targets[i], masked ? -1 : expect);
        }
    }
    assert_true(pads && ends);
    data_close(&d);
}

static void several_training_files_are_refused(void **state)
{
    (void)state;
    struct spec s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    make_spec(&s, 200, 50);
    s.data.n_train = 2;
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "data.train"));
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
        cmocka_unit_test(every_epoch_is_a_permutation),
        cmocka_unit_test(the_order_is_fixed_for_ever),
        cmocka_unit_test(neighbours_are_torn_apart),
        cmocka_unit_test(batches_are_the_samples_in_order),
        cmocka_unit_test(replicas_share_a_step),
        cmocka_unit_test(evaluation_covers_fixed_windows),
        cmocka_unit_test(masks_leave_targets_out),
        cmocka_unit_test(several_training_files_are_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
