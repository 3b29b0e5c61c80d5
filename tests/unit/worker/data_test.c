/* Batches: which tokens are in a step, whatever the layout; masks; evaluation. */
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "tests/unit/support/token_files.h"
#include "worker/data.h"

/* ---- batches ------------------------------------------------------------------------------ */

static struct plan small_plan(void)
{
    return (struct plan){.s = 8,
                         .V = 256,
                         .tp = 1,
                         .pp = 1,
                         .dp = 1,
                         .world = 1,
                         .micro_batch = 2,
                         .global_batch = 6,
                         .accumulation = 3,
                         .T = 16,
                         .data_seed = 11};
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
    *s = (struct spec){.job = BOOST__JOB_SPEC__INIT,
                       .data = BOOST__DATA__INIT,
                       .run = BOOST__RUN__INIT,
                       .train = BOOST__TOKEN_FILE__INIT,
                       .eval = BOOST__TOKEN_FILE__INIT};
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

/* ---- several files ------------------------------------------------------------------------ */

enum { FILES = 3, MANY = 150 };

/* Files whose first token tells which file it is and whose others tell the window: TEXT, windows of 8. */
static char *write_numbered(const char *name, int file, int windows)
{
    uint8_t raw[8 * 200 + 1];
    for (int w = 0; w < windows; w++) {
        raw[w * 8] = (uint8_t)file;
        memset(raw + w * 8 + 1, w, 7);
    }
    raw[windows * 8] = (uint8_t)file;
    return write_file(name, raw, (size_t)windows * 8 + 1);
}

struct several {
    Boost__JobSpec job;
    Boost__Data data;
    Boost__Run run;
    Boost__TokenFile file[MANY], *list[MANY];
    char path[MANY][128];
};

static void make_several(struct several *s, int files, const double *weights, const int *windows)
{
    *s = (struct several){.job = BOOST__JOB_SPEC__INIT, .data = BOOST__DATA__INIT, .run = BOOST__RUN__INIT};
    for (int f = 0; f < files; f++) {
        char name[32];
        boost__token_file__init(&s->file[f]);
        snprintf(name, sizeof name, "several-%d", f);
        snprintf(s->path[f], sizeof s->path[f], "%s", write_numbered(name, f, windows[f % FILES]));
        s->file[f].path = s->path[f];
        s->file[f].weight = weights ? weights[f] : 1;
        s->list[f] = &s->file[f];
    }
    s->job.data = &s->data;
    s->job.run = &s->run;
    s->data.train = s->data.eval = s->list;
    s->data.n_train = s->data.n_eval = (size_t)files;
    s->data.format = BOOST__FORMAT__VALUE__TEXT;
    s->run.eval_tokens = 1000000;
}

static const int windows_of[FILES] = {5, 9, 4};

/* Every sample of 30 steps by one rank, into seen[180] as file * 1000 + window, and what the files gave. */
static void run_through(struct data *d, int steps, int *seen)
{
    struct error err;
    const struct micro_batch *m;
    for (int step = 1; step <= steps; step++) {
        assert_int_equal(data_train(d, step, &m, &err), 0);
        for (int i = 0; i < 6; i++)
            seen[(step - 1) * 6 + i] = m[i / 2].inputs[i % 2 * 8] * 1000 + m[i / 2].inputs[i % 2 * 8 + 1];
    }
}

static void files_are_mixed_by_weight(void **state)
{
    (void)state;
    static const double weights[FILES] = {0.5, 0.3, 0.2};
    struct several s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    enum { STEPS = 30, SAMPLES = STEPS * 6 };
    int seen[SAMPLES], given[FILES] = {0}, times[FILES][10] = {{0}};
    make_several(&s, FILES, weights, windows_of);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    assert_int_equal(d.train.windows, 18);
    run_through(&d, STEPS, seen);
    for (int n = 0; n < SAMPLES; n++) {
        int file = seen[n] / 1000, window = seen[n] % 1000, said;
        int64_t said_window;
        data_sample(&d, n, &said, &said_window);
        assert_int_equal(said, file);
        assert_int_equal(said_window, window);
        times[file][window]++;
        given[file]++;
        for (int f = 0; f < FILES; f++) /* the mixture, over every prefix */
            assert_true(fabs(given[f] - (n + 1) * weights[f]) < 1 + 1e-9);
        for (int w = 0; w < windows_of[file]; w++) /* epochs of each file: no window is twice ahead of another */
            assert_true(times[file][window] - times[file][w] <= 1);
    }
    char line[256];
    data_describe(&d, 1, line, sizeof line);
    assert_non_null(strstr(line, "several-1, 73 tokens, 9 windows, 3 of 10 samples"));
    data_close(&d);
}

/* What is sample n does not depend on how the step is cut: dp, micro_batch and accumulation, and the step at
 * which another layout goes on. */
static void any_layout_sees_the_same_samples(void **state)
{
    (void)state;
    static const double weights[FILES] = {1, 2, 4};
    static const struct {
        int dp, micro;
    } cuts[] = {{1, 1}, {1, 3}, {1, 6}, {2, 1}, {2, 3}, {3, 1}, {3, 2}, {6, 1}};
    struct several s;
    struct plan whole = small_plan();
    struct data d;
    struct error err;
    enum { STEPS = 20 };
    int seen[STEPS * 6];
    make_several(&s, FILES, weights, windows_of);
    assert_int_equal(data_open(&d, &s.job, &whole, 0, &err), 0);
    run_through(&d, STEPS, seen);
    data_close(&d);
    for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
        struct plan p = small_plan();
        p.dp = p.world = cuts[k].dp;
        p.micro_batch = cuts[k].micro;
        p.accumulation = 6 / (p.dp * p.micro_batch);
        p.T = p.micro_batch * 8;
        for (int rank = 0; rank < p.dp; rank++) {
            assert_int_equal(data_open(&d, &s.job, &p, rank, &err), 0);
            for (int step = 11; step <= STEPS; step++) {
                const struct micro_batch *m;
                assert_int_equal(data_train(&d, step, &m, &err), 0);
                for (int64_t i = 0; i < p.accumulation; i++)
                    for (int64_t j = 0; j < p.micro_batch; j++) {
                        int64_t n = (step - 1) * 6 + (i * p.dp + rank) * p.micro_batch + j;
                        assert_int_equal(m[i].inputs[j * 8] * 1000 + m[i].inputs[j * 8 + 1], seen[n]);
                    }
            }
            data_close(&d);
        }
    }
}

/* All windows of all files once, and a part of them evenly; the same for every micro-batch size. */
static void evaluation_covers_all_files(void **state)
{
    (void)state;
    struct several s;
    struct error err;
    make_several(&s, FILES, NULL, windows_of);
    for (int micro = 1; micro <= 5; micro++) {
        struct plan p = small_plan();
        struct data d;
        const struct micro_batch *m;
        int times[FILES][10] = {{0}}, unmasked = 0;
        p.micro_batch = micro;
        p.T = micro * 8;
        s.run.eval_tokens = 1000000;
        assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
        assert_int_equal(d.eval_windows, 18);
        for (int64_t i = 0; i < data_eval_count(&d); i++) {
            assert_int_equal(data_eval(&d, i, &m, &err), 0);
            for (int j = 0; j < micro; j++)
                if (m->targets[j * 8] >= 0)
                    times[m->inputs[j * 8]][m->inputs[j * 8 + 1]]++;
            for (int j = 0; j < micro * 8; j++)
                unmasked += m->targets[j] >= 0;
        }
        assert_int_equal(unmasked, 18 * 8);
        for (int f = 0; f < FILES; f++)
            for (int w = 0; w < 10; w++)
                assert_int_equal(times[f][w], w < windows_of[f]);
        data_close(&d);
        s.run.eval_tokens = 41; /* six windows of 18: every third */
        assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
        assert_int_equal(d.eval_windows, 6);
        static const int expected[6] = {0, 3, 1001, 1004, 1007, 2001};
        for (int64_t k = 0; k < 6; k++) {
            assert_int_equal(data_eval(&d, k / micro, &m, &err), 0);
            const int32_t *row = m->inputs + k % micro * 8;
            assert_int_equal(row[0] * 1000 + row[1], expected[k]);
        }
        data_close(&d);
    }
}

/* More files than a rank keeps open: the same samples, and few descriptors. */
static void many_files_need_few_descriptors(void **state)
{
    (void)state;
    struct several s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    int seen[180], first = open("/dev/null", O_RDONLY | O_CLOEXEC);
    make_several(&s, MANY, NULL, windows_of);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), 0);
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_int_equal(next, first + 1); /* the lowest free one */
    run_through(&d, 30, seen);
    for (int n = 0; n < 180; n++)
        assert_int_equal(seen[n] / 1000, n % MANY); /* equal weights: in turn */
    close(first);
    close(next);
    data_close(&d);
}

static void the_faulty_file_is_named(void **state)
{
    (void)state;
    struct several s;
    struct plan p = small_plan();
    struct data d;
    struct error err;
    make_several(&s, FILES, NULL, windows_of);
    write_file("several-1", "short", 5);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "several-1: 5 tokens"));
    s.file[2].path = NULL;
    write_numbered("several-1", 1, 5);
    assert_int_equal(data_open(&d, &s.job, &p, 0, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "data.train[2] has no path"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_are_the_samples_in_order), cmocka_unit_test(replicas_share_a_step),
        cmocka_unit_test(evaluation_covers_fixed_windows),  cmocka_unit_test(masks_leave_targets_out),
        cmocka_unit_test(files_are_mixed_by_weight),        cmocka_unit_test(any_layout_sees_the_same_samples),
        cmocka_unit_test(evaluation_covers_all_files),      cmocka_unit_test(many_files_need_few_descriptors),
        cmocka_unit_test(the_faulty_file_is_named),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
