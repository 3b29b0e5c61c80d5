/* Whole jobs in one process: records, stops, checkpoints on demand, slow and failing writers, resuming
 * from what does not fit, bad data; exit codes and texts. */
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>

#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/rankfiles.h"
#include "tests/unit/worker/tiny_job.h"
#include "worker/safetensors.h"

enum { STEPS = 120, TP = 2 };

static char dir[64], run[160];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-train-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(run, sizeof run, "%s/run", dir);
    tiny_job_write(dir, TP, STEPS, "eval_tokens: 300", "every_steps: 40");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

/* Reads all that is left of the child's output. */
static const char *rest_of(int out)
{
    static char text[1 << 17];
    size_t len = 0;
    for (ssize_t n; len < sizeof text - 1 && (n = read(out, text + len, sizeof text - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = '\0';
    close(out);
    return text;
}

/* Runs to the end; the exit status. */
static int run_job(const char *resume, const char *const *set, size_t n, const char **text)
{
    int out;
    pid_t pid = tiny_job_start(dir, run, resume, set, n, &out);
    *text = rest_of(out);
    return tiny_job_end(pid);
}

static void wait_for(int out, const char *what)
{
    FILE *f = fdopen(dup(out), "r");
    setvbuf(f, NULL, _IONBF, 0);
    char line[512];
    bool found = false;
    while (!found && fgets(line, sizeof line, f))
        found = strstr(line, what) != NULL;
    fclose(f);
    assert_true(found);
}

static Boost__DoneRecord *done_of(int rank)
{
    return tiny_job_done(run, rank);
}

/* The n-th shard record of a rank, or NULL. */
static Boost__ShardRecord *shard_of(int rank, int nth)
{
    char path[256];
    struct buffer b;
    struct error err;
    uint64_t offset = 0;
    bool got = true;
    snprintf(path, sizeof path, "%s/rank-%d.shards", run, rank);
    buffer_init(&b, RECLOG_MAX_RECORD);
    for (int i = 0; got && i <= nth; i++)
        assert_int_equal(reclog_read(path, &offset, &b, &got, &err), 0);
    Boost__ShardRecord *r = got ? boost__shard_record__unpack(NULL, b.len, b.data) : NULL;
    buffer_free(&b);
    return r;
}

static int count_shards(int rank)
{
    int n = 0;
    for (Boost__ShardRecord *r; (r = shard_of(rank, n)); n++)
        boost__shard_record__free_unpacked(r, NULL);
    return n;
}

static void records_say_what_is_on_disk(void **state)
{
    (void)state;
    const char *text;
    assert_int_equal(run_job(NULL, NULL, 0, &text), 0);
    for (int rank = 0; rank < TP; rank++) {
        for (int i = 0; i < count_shards(rank); i++) {
            Boost__ShardRecord *r = shard_of(rank, i);
            char path[512];
            struct buffer b;
            struct error err;
            assert_int_equal(r->seq, i + 1);
            assert_int_equal(r->rank, rank);
            assert_false(r->failed);
            snprintf(path, sizeof path, "%s/%s", r->dir, r->file);
            buffer_init(&b, 1 << 24);
            assert_int_equal(fs_read_file(path, &b, &err), 0);
            assert_int_equal(r->bytes, b.len);
            assert_int_equal(r->crc32c, crc32c(0, b.data, b.len));
            buffer_free(&b);
            boost__shard_record__free_unpacked(r, NULL);
        }
        Boost__ShardRecord *last = shard_of(rank, count_shards(rank) - 1);
        assert_int_equal(last->step, STEPS);
        boost__shard_record__free_unpacked(last, NULL);
        Boost__DoneRecord *d = done_of(rank);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__COMPLETED);
        assert_int_equal(d->step, STEPS);
        boost__done_record__free_unpacked(d, NULL);
    }
    double loss[STEPS + 1];
    bool have[STEPS + 1] = {false};
    assert_int_equal(tiny_job_metric(run, "loss", loss, have, STEPS), STEPS);
    for (int n = 1; n <= STEPS; n++)
        assert_true(have[n]);
    assert_true(loss[1] > 4.5 && loss[STEPS] < 3.0); /* from ln(128) = 4.85 downwards: it learns */
}

static void log_every_and_eval_every(void **state)
{
    (void)state;
    const char *text, *const set[] = {"run.log_every=7", "run.eval_every=50"};
    assert_int_equal(run_job(NULL, set, 2, &text), 0);
    double value[STEPS + 1];
    bool loss[STEPS + 1] = {false}, eval[STEPS + 1] = {false};
    tiny_job_metric(run, "loss", value, loss, STEPS);
    tiny_job_metric(run, "eval_loss", value, eval, STEPS);
    for (int n = 0; n <= STEPS; n++) {
        assert_int_equal(loss[n], n && (n % 7 == 0 || n == STEPS));
        assert_int_equal(eval[n], n % 50 == 0 || n == STEPS);
    }
    Boost__DoneRecord *d = done_of(0);
    assert_true(d->has_eval_loss && d->eval_loss == value[STEPS]);
    boost__done_record__free_unpacked(d, NULL);
}

static void sigterm_stops_after_a_checkpoint(void **state)
{
    (void)state;
    int out;
    const char *const set[] = {"run.steps=100000", "checkpoint.every_steps=0"};
    pid_t pid = tiny_job_start(dir, run, NULL, set, 2, &out);
    wait_for(out, "step 30/");
    kill(pid, SIGTERM);
    const char *text = rest_of(out);
    assert_int_equal(tiny_job_end(pid), 0);
    assert_non_null(strstr(text, "stopped at step"));
    for (int rank = 0; rank < TP; rank++) {
        Boost__DoneRecord *d = done_of(rank);
        Boost__ShardRecord *r = shard_of(rank, 0);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__STOPPED);
        assert_non_null(r);
        assert_int_equal(r->step, d->step);
        assert_int_equal(count_shards(rank), 1);
        boost__done_record__free_unpacked(d, NULL);
        boost__shard_record__free_unpacked(r, NULL);
    }
}

/* Stopping was asked for, and is done: that the checkpoint cannot be written is told, and no failure of the rank. */
static void sigterm_stops_without_a_checkpoint_too(void **state)
{
    (void)state;
    int out;
    char file[160], set_dir[200];
    struct error err;
    snprintf(file, sizeof file, "%s/file", dir);
    assert_int_equal(fs_write_atomic(file, "x", 1, 0644, &err), 0);
    snprintf(set_dir, sizeof set_dir, "checkpoint.dir=%s/below", file);
    const char *const set[] = {"run.steps=100000", "checkpoint.every_steps=0", set_dir};
    pid_t pid = tiny_job_start(dir, run, NULL, set, 3, &out);
    wait_for(out, "step 30/");
    kill(pid, SIGTERM);
    const char *text = rest_of(out);
    assert_int_equal(tiny_job_end(pid), 0);
    assert_non_null(strstr(text, "without its checkpoint"));
    for (int rank = 0; rank < TP; rank++) {
        Boost__DoneRecord *d = done_of(rank);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__STOPPED);
        assert_null(d->error);
        boost__done_record__free_unpacked(d, NULL);
    }
}

static void the_control_page_stops_and_checkpoints(void **state)
{
    (void)state;
    int out;
    struct error err;
    const char *const set[] = {"run.steps=100000", "checkpoint.every_steps=0"};
    pid_t pid = tiny_job_start(dir, run, NULL, set, 2, &out);
    wait_for(out, "step 5/");
    struct rank_control *control = rank_file_map(run, 1, "control", RANK_CONTROL_MAGIC, 0, &err);
    struct rank_status *status = rank_file_map(run, 0, "status", RANK_STATUS_MAGIC, 0, &err);
    assert_non_null(control);
    __atomic_store_n(&control->checkpoint, 1, __ATOMIC_RELAXED);
    wait_for(out, "step 20/");
    while (!count_shards(0) || !count_shards(1)) /* written meanwhile, in a thread of theirs */
        wait_for(out, "step ");
    uint64_t progress = __atomic_load_n(&status->progress, __ATOMIC_RELAXED);
    wait_for(out, "step ");
    __atomic_store_n(&control->stop, 1, __ATOMIC_RELAXED);
    rest_of(out);
    assert_int_equal(tiny_job_end(pid), 0);
    assert_true(status->progress > progress && status->bytes > 0);
    for (int rank = 0; rank < TP; rank++) {
        assert_int_equal(count_shards(rank), 2); /* the one asked for and that of the stop */
        Boost__DoneRecord *d = done_of(rank);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__STOPPED);
        assert_int_equal(status->step, d->step);
        boost__done_record__free_unpacked(d, NULL);
    }
    rank_file_unmap(control);
    rank_file_unmap(status);
}

/* A shard of about 60 KB at 0.25 MiB/s takes a quarter of a second: steps go on, the next checkpoint waits, those that
 * fall due meanwhile are skipped, and both are told. */
static void a_slow_writer_postpones_and_keeps_the_rate(void **state)
{
    (void)state;
    int out;
    const char *const set[] = {"checkpoint.write_mib_s=0.25", "checkpoint.every_steps=5", "run.steps=1000000"};
    int64_t began = clock_mono_ns();
    pid_t pid = tiny_job_start(dir, run, NULL, set, 3, &out);
    wait_for(out, "checkpoint postponed");
    wait_for(out, "skipped: writing one takes longer than checkpoint.every_steps");
    kill(pid, SIGTERM);
    rest_of(out);
    assert_int_equal(tiny_job_end(pid), 0);
    int64_t took = (clock_mono_ns() - began) / NS_PER_MS;
    int64_t writing = 0;
    int n = count_shards(0);
    for (int i = 0; i < n; i++) {
        Boost__ShardRecord *r = shard_of(0, i);
        double least = (double)r->bytes / (0.25 * 1048576) * 1000;
        assert_true((double)r->write_ms >= least - 1 && !r->failed);
        writing += r->write_ms;
        boost__shard_record__free_unpacked(r, NULL);
    }
    Boost__DoneRecord *d = done_of(0);
    assert_true(n >= 2 && n < d->step / 5);
    assert_true(writing <= took + n); /* one at a time; each is rounded to whole milliseconds */
    boost__done_record__free_unpacked(d, NULL);
}

static void a_failing_disk_stops_nothing_but_the_end(void **state)
{
    (void)state;
    char file[160], set_dir[200];
    struct error err;
    const char *text;
    snprintf(file, sizeof file, "%s/file", dir);
    assert_int_equal(fs_write_atomic(file, "x", 1, 0644, &err), 0);
    snprintf(set_dir, sizeof set_dir, "checkpoint.dir=%s/below", file);
    const char *const set[] = {set_dir};
    assert_int_equal(run_job(NULL, set, 1, &text), RANK_EXIT_INFRA); /* no fault of the job's */
    assert_non_null(strstr(text, "is not a directory"));
    char want[64];
    snprintf(want, sizeof want, "step %d/%d", STEPS, STEPS);
    assert_non_null(strstr(text, want));
    assert_true(count_shards(0) >= 2);
    Boost__ShardRecord *r = shard_of(0, 0);
    assert_true(r->failed && !r->has_crc32c);
    assert_non_null(strstr(r->error, file));
    boost__shard_record__free_unpacked(r, NULL);
    Boost__DoneRecord *d = done_of(0);
    assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
    assert_non_null(strstr(d->error, "final checkpoint"));
    boost__done_record__free_unpacked(d, NULL);
}

/* ---- resuming from what does not fit -------------------------------------------------------- */

static void refused(const char *from, const char *assignment, int code, const char *what)
{
    const char *text, *const set[] = {assignment};
    int got = run_job(from, set, assignment != NULL, &text);
    if (got != code || !strstr(text, what))
        fail_msg("exit %d (want %d), output: %s", got, code, text);
}

static void a_checkpoint_that_does_not_fit_is_refused(void **state)
{
    (void)state;
    const char *text;
    char from[320], shard[400];
    assert_int_equal(run_job(NULL, NULL, 0, &text), 0);
    assert_true(tiny_job_newest(dir, TP, STEPS - 1, from, sizeof from));
    refused(from, "model.rank=8", RANK_EXIT_SPEC, "tensor layers.0.q.A");
    refused(from, "model.layers=1", RANK_EXIT_SPEC, "which this job's model does not have");
    refused(from, "model.layers=3", RANK_EXIT_SPEC, "has no tensor layers.2.");
    refused(from, "run.precision=FP64", RANK_EXIT_SPEC, "F32");
    refused(from, "parallel.global_batch=8", RANK_EXIT_SPEC, "global_batch");
    refused(from, "data.seed=9", RANK_EXIT_SPEC, "data.seed = 1");
    refused("/nonexistent/step-1.a1", NULL, RANK_EXIT_SPEC, "/nonexistent/step-1.a1");
    snprintf(shard, sizeof shard, "%s/rank-00001-of-00002.safetensors", from);
    struct stat st;
    assert_int_equal(stat(shard, &st), 0);
    assert_int_equal(truncate(shard, st.st_size - 1), 0);
    refused(from, NULL, RANK_EXIT_APP, "rank-00001-of-00002.safetensors");
    assert_int_equal(unlink(shard), 0);
    refused(from, NULL, RANK_EXIT_APP, "rank-00001-of-00002.safetensors");
}

/* ---- bad input --------------------------------------------------------------------------------- */

static void bad_data_fails_without_hope(void **state)
{
    (void)state;
    refused(NULL, "model.vocab=64", RANK_EXIT_SPEC, "is not below the vocabulary of 64");
    for (int rank = 0; rank < TP; rank++) {
        Boost__DoneRecord *d = done_of(rank);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
        assert_non_null(strstr(d->error, "train.txt"));
        assert_non_null(d->hint);
        boost__done_record__free_unpacked(d, NULL);
    }
    refused(NULL, "data.train=[{path: \"/nonexistent/x\"}]", RANK_EXIT_SPEC, "/nonexistent/x");
    refused(NULL, "data.seq_len=100000", RANK_EXIT_SPEC, "fewer than one window");
    refused(NULL, "parallel.tp=3", RANK_EXIT_SPEC, "tp");
}

/* T31: updates that are not finite are skipped on all ranks, told, and end the job after max_skipped; no checkpoint
 * of theirs pushes out a good one. */
static void a_run_that_is_not_finite_is_ended(void **state)
{
    (void)state;
    const char *text, *const set[] = {"optimizer.max_skipped=3", "checkpoint.every_steps=1"};
    char from[320], shard[400];
    struct error err;
    struct safetensors_file f;
    assert_int_equal(run_job(NULL, NULL, 0, &text), 0);
    assert_true(tiny_job_newest(dir, TP, STEPS - 1, from, sizeof from));
    snprintf(shard, sizeof shard, "%s/rank-00000-of-00002.safetensors", from);
    assert_int_equal(safetensors_open(&f, shard, &err), 0);
    const struct safetensors_entry *head = safetensors_find(&f, "head");
    assert_true(head && head->end > head->begin);
    int64_t at = strtoll(safetensors_meta(&f, "step"), NULL, 10);
    float nan_value = NAN;
    int fd = open(shard, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, &nan_value, sizeof nan_value, (off_t)(f.data_at + head->begin)), sizeof nan_value);
    close(fd);
    safetensors_close(&f);
    int before = count_shards(0);
    assert_int_equal(run_job(from, set, 2, &text), RANK_EXIT_APP);
    assert_int_equal(count_shards(0), before);
    assert_non_null(strstr(text, "checkpoint postponed until an update is finite again"));
    char want[200];
    snprintf(want, sizeof want,
             "3 updates in a row were skipped because loss or gradient was not finite: steps %lld to %lld, samples "
             "%lld to %lld",
             (long long)at + 1, (long long)at + 3, (long long)at * 4, (long long)(at + 3) * 4 - 1);
    if (!strstr(text, want))
        fail_msg("%s is not in: %s", want, text);
    assert_non_null(strstr(text, "update skipped"));
    for (int rank = 0; rank < TP; rank++) {
        Boost__DoneRecord *d = done_of(rank);
        assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
        assert_int_equal(d->step, at + 3);
        assert_non_null(strstr(d->error, want));
        boost__done_record__free_unpacked(d, NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(records_say_what_is_on_disk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(log_every_and_eval_every, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sigterm_stops_after_a_checkpoint, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sigterm_stops_without_a_checkpoint_too, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_control_page_stops_and_checkpoints, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_slow_writer_postpones_and_keeps_the_rate, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_failing_disk_stops_nothing_but_the_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_checkpoint_that_does_not_fit_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bad_data_fails_without_hope, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_run_that_is_not_finite_is_ended, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
