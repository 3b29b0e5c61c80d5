/* The rank's files: metric numbering without gaps, values left out when they are not known, status and
 * control page, DONE record. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <signal.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "worker/comm/comm.h"
#include "worker/report.h"

static char dir[64];
static Boost__AttemptStart start;

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-rep-XXXXXX");
    boost__attempt_start__init(&start);
    start.run_dir = dir;
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static void add(struct report *r, int64_t step)
{
    struct metrics m = {.n = 0};
    metrics_add(&m, "loss", (double)step / 3);
    metrics_add(&m, "grad_norm", NAN);
    metrics_add(&m, "lr", INFINITY);
    metrics_add(&m, "tokens", 5);
    report_metrics(r, step, &m);
}

/* Sequence numbers 1, 2, ... and exact values; returns how many records. */
static int64_t check_file(void)
{
    char path[PATH_MAX];
    struct buffer b;
    struct error err;
    uint64_t offset = 0;
    bool got = true;
    int64_t n = 0;
    assert_int_equal(rank_file_path(path, sizeof path, dir, 3, "metrics", &err), 0);
    buffer_init(&b, RECLOG_MAX_RECORD);
    while (true) {
        assert_int_equal(reclog_read(path, &offset, &b, &got, &err), 0);
        if (!got)
            break;
        Boost__MetricRecord *m = boost__metric_record__unpack(NULL, b.len, b.data);
        assert_non_null(m);
        assert_int_equal(m->seq, ++n);
        assert_int_equal(m->n_values, 2);
        assert_string_equal(m->values[0]->name, "loss");
        assert_true(m->values[0]->value == (double)m->step / 3);
        assert_string_equal(m->values[1]->name, "tokens");
        boost__metric_record__free_unpacked(m, NULL);
    }
    buffer_free(&b);
    return n;
}

static void numbering_goes_on_without_gaps(void **state)
{
    (void)state;
    struct report r;
    struct error err;
    for (int run = 0; run < 3; run++) {
        assert_int_equal(report_open(&r, &start, 3, true, stderr, &err), 0);
        for (int64_t i = 0; i < 10; i++)
            add(&r, i);
        report_close(&r);
    }
    assert_int_equal(check_file(), 30);
}

/* A full disk loses records, not numbers, and does not stop the rank. */
static void a_full_disk_leaves_no_gap(void **state)
{
    (void)state;
    struct report r;
    struct error err;
    FILE *log = tmpfile();
    assert_int_equal(report_open(&r, &start, 3, true, log, &err), 0);
    for (int64_t i = 0; i < 5; i++)
        add(&r, i);
    struct rlimit old, small;
    struct stat st;
    char path[PATH_MAX];
    assert_int_equal(rank_file_path(path, sizeof path, dir, 3, "metrics", &err), 0);
    assert_int_equal(stat(path, &st), 0);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = (rlim_t)st.st_size + 10;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    for (int64_t i = 5; i < 9; i++)
        add(&r, i);
    setrlimit(RLIMIT_FSIZE, &old);
    for (int64_t i = 9; i < 12; i++)
        add(&r, i);
    assert_int_equal(check_file(), 8);
    report_close(&r);
    rewind(log);
    char line[256];
    int lines = 0;
    while (fgets(line, sizeof line, log)) {
        lines++;
        assert_non_null(strstr(line, "metrics are being lost from step 5"));
    }
    assert_int_equal(lines, 1);
    fclose(log);
}

static void pages(void **state)
{
    (void)state;
    struct report r;
    struct error err;
    /* Without an agent's pages it is an error that names the file. */
    assert_int_not_equal(report_open(&r, &start, 3, false, stderr, &err), 0);
    assert_non_null(strstr(err.message, "rank-3.status"));
    struct rank_status *status = rank_file_map(dir, 3, "status", RANK_STATUS_MAGIC, 1, &err);
    struct rank_control *control = rank_file_map(dir, 3, "control", RANK_CONTROL_MAGIC, 1, &err);
    assert_non_null(status);
    assert_non_null(control);
    control->checkpoint = 4;
    assert_int_equal(report_open(&r, &start, 3, false, stderr, &err), 0);
    assert_int_equal(report_checkpoints_asked(&r), 4);
    report_phase(&r, BOOST__RANK_UPDATE__PHASE__TRAINING);
    report_step_done(&r, 17);
    report_progress(&r);
    report_progress(&r);
    char longer[200];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    struct comm_call call = {longer, "all_reduce", GROUP_DP, 1};
    char text[RANK_COLLECTIVE_TEXT];
    assert_string_equal(rank_collective_text(status, text, sizeof text), "");
    report_collective(&r, &call, true);
    assert_int_equal(status->groups[GROUP_DP].inside, RANK_INSIDE);
    report_collective(&r, &call, false);
    call = (struct comm_call){"latent qkv", "all_reduce", GROUP_TP, 512 << 10};
    report_collective(&r, &call, true);
    assert_string_equal(rank_collective_text(status, text, sizeof text),
                        "all_reduce \"latent qkv\" in group tp (call 1, 512 KiB)");
    report_collective(&r, &call, false);
    assert_string_equal(rank_collective_text(status, text, sizeof text),
                        "all_reduce \"latent qkv\" in group tp (call 1, 512 KiB, done)");
    report_doing(&r, "waiting for rank %d", 2);
    assert_int_equal(status->phase, BOOST__RANK_UPDATE__PHASE__TRAINING);
    assert_int_equal(status->step, 17);
    assert_int_equal(status->progress, 2);
    assert_int_equal(status->collective_seq, 2);
    assert_string_equal(status->collective, "latent qkv");
    call.what = longer;
    report_reached(&r, &call, 9); /* of a device, which counts by itself */
    assert_int_equal(strlen(status->collective), sizeof status->collective - 1);
    assert_int_equal(strlen(status->groups[GROUP_TP].what), sizeof status->groups[GROUP_TP].what - 1);
    assert_int_equal(status->groups[GROUP_TP].seq, 9);
    assert_int_equal(status->groups[GROUP_TP].inside, RANK_REACHED);
    assert_int_equal(status->groups[GROUP_DP].seq, 1);
    status->groups[GROUP_TP].what[3] = '\033'; /* what a page says is shown to people */
    assert_null(strchr(rank_collective_text(status, text, sizeof text), '\033'));
    assert_string_equal(status->doing, "waiting for rank 2");
    assert_false(report_stop_asked(&r));
    control->stop = 1;
    assert_true(report_stop_asked(&r));
    control->stop = 0;
    assert_false(report_stop_asked(&r));
    report_terminate(); /* for good: this test is the last to look */
    assert_true(report_stop_asked(&r));
    report_close(&r);
    rank_file_unmap(status);
    rank_file_unmap(control);
}

static void done_record(void **state)
{
    (void)state;
    struct error err, failure;
    struct buffer b;
    char path[PATH_MAX];
    error_set(&failure, ERR_INVALID, "no such thing");
    error_hint(&failure, "make it");
    assert_int_equal(report_done(dir, 17, 2, 3, BOOST__DONE_RECORD__WHY__FAILED, 99, NAN, &failure, &err), 0);
    assert_int_equal(rank_file_path(path, sizeof path, dir, 3, "done", &err), 0);
    buffer_init(&b, 4096);
    assert_int_equal(fs_read_file(path, &b, &err), 0);
    Boost__DoneRecord *d = boost__done_record__unpack(NULL, b.len, b.data);
    assert_non_null(d);
    assert_int_equal(d->why, BOOST__DONE_RECORD__WHY__FAILED);
    assert_int_equal(d->job, 17);
    assert_int_equal(d->attempt, 2);
    assert_int_equal(d->rank, 3);
    assert_int_equal(d->step, 99);
    assert_false(d->has_eval_loss);
    assert_string_equal(d->error, "no such thing");
    assert_string_equal(d->hint, "make it");
    boost__done_record__free_unpacked(d, NULL);
    buffer_free(&b);
    char gone[96];
    snprintf(gone, sizeof gone, "%s/none", dir);
    assert_int_not_equal(report_done(gone, 1, 1, 0, BOOST__DONE_RECORD__WHY__COMPLETED, 1, NAN, NULL, &err), 0);
}

static void counts_are_short(void **state)
{
    (void)state;
    char out[32];
    assert_string_equal(report_count(0, out, sizeof out), "0");
    assert_string_equal(report_count(998, out, sizeof out), "998");
    assert_string_equal(report_count(1234, out, sizeof out), "1.23k");
    assert_string_equal(report_count(10234, out, sizeof out), "10.2k");
    assert_string_equal(report_count(999600, out, sizeof out), "1.00M");
    assert_string_equal(report_count(1.21e6, out, sizeof out), "1.21M");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(numbering_goes_on_without_gaps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_full_disk_leaves_no_gap, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pages, set_up, tear_down),
        cmocka_unit_test_setup_teardown(done_record, set_up, tear_down),
        cmocka_unit_test_setup_teardown(counts_are_short, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
