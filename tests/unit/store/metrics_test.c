/* Metrics: each row once, acknowledged up to the first gap, thinned with age. */
#include "tests/unit/store/fixture.h"

/* ---- reading all of a series ------------------------------------------------------ */

enum { NAMES = 8 };
struct read_row {
    int64_t row, step, wall_ns;
    int attempt, merged, n;
    char names[NAMES][24];
    double values[NAMES], mins[NAMES], maxs[NAMES];
};
struct all_rows {
    struct read_row *rows;
    size_t n, cap;
    int count;
    size_t last_n;
};

static void on_metrics(void *arg, const struct store_metric_row *rows, size_t n, int rc, const struct error *err)
{
    struct all_rows *all = arg;
    assert_non_null(err);
    assert_int_equal(rc, ERR_OK);
    all->count++;
    all->last_n = n;
    for (size_t i = 0; i < n; i++) {
        if (all->n == all->cap) {
            all->cap = all->cap ? 2 * all->cap : 256;
            all->rows = realloc(all->rows, all->cap * sizeof *all->rows);
            assert_non_null(all->rows);
        }
        struct read_row *r = &all->rows[all->n++];
        assert_true(rows[i].n <= NAMES);
        *r = (struct read_row){.row = rows[i].row, .step = rows[i].step, .wall_ns = rows[i].wall_ns,
                               .attempt = rows[i].attempt, .merged = rows[i].merged, .n = rows[i].n};
        for (int j = 0; j < r->n; j++) {
            snprintf(r->names[j], sizeof r->names[j], "%s", rows[i].names[j]);
            r->values[j] = rows[i].values[j];
            r->mins[j] = rows[i].mins[j];
            r->maxs[j] = rows[i].maxs[j];
        }
    }
}

static struct all_rows read_from(struct store *s, int64_t job, int rank, int64_t after, int limit)
{
    struct all_rows all = {0};
    do {
        int before = all.count;
        store_read_metrics(s, job, rank, after, limit, on_metrics, &all);
        wait_for(s, &all.count, before + 1);
        after = all.n ? all.rows[all.n - 1].row : after;
    } while (all.last_n);
    for (size_t i = 1; i < all.n; i++)
        assert_true(all.rows[i].row > all.rows[i - 1].row);
    return all;
}

/* ---- writing ------------------------------------------------------------------------ */

static const char *const loss_name[] = {"loss"};

/* Adds steps first..last of one attempt, seq = step - base, loss = value(step), in one batch, and waits. */
static void add_steps(struct store *s, int64_t job, int attempt, int64_t first, int64_t last, int64_t base,
                      double (*value)(int64_t step))
{
    size_t n = (size_t)(last - first + 1);
    struct store_metric *rows = calloc(n, sizeof *rows);
    double *values = calloc(n, sizeof *values);
    assert_true(rows && values);
    for (size_t i = 0; i < n; i++) {
        int64_t step = first + (int64_t)i;
        values[i] = value(step);
        rows[i] = (struct store_metric){step - base, step, step * 10, 1, loss_name, &values[i]};
    }
    struct outcome o = {0};
    store_add_metrics(s, job, attempt, 0, rows, (int)n, on_done, &o);
    wait_for(s, &o.count, 1);
    assert_int_equal(o.rc, ERR_OK);
    free(rows);
    free(values);
}

static double value_of(int64_t step)
{
    return (double)(step % 7) - 3 + (double)step * 0.5;
}

struct seqs {
    int n;
    int64_t job[8], seq[8];
    int attempt[8], rank[8];
};

static void each_seq(void *arg, int64_t job, int attempt, int rank, int64_t seq)
{
    struct seqs *q = arg;
    assert_true(q->n < 8);
    q->job[q->n] = job;
    q->attempt[q->n] = attempt;
    q->rank[q->n] = rank;
    q->seq[q->n++] = seq;
}

static int64_t acknowledged(struct store *s)
{
    struct seqs q = {0};
    struct error err;
    assert_int_equal(store_load_metric_seqs(s, each_seq, &q, &err), ERR_OK);
    return q.n ? q.seq[0] : 0;
}

/* ---- tests ------------------------------------------------------------------------------ */

static void values_come_back(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    const char *const names[] = {"loss", "", "lr", "grad_norm"};
    const double v1[] = {NAN, 1e-310, -0.0, (double)INFINITY}, v2[] = {2, 3};
    const struct store_metric rows[] = {
        {1, 1, 11, 4, names, v1},
        {2, 2, 12, 2, names + 2, v2},
        {3, 3, 13, 0, NULL, NULL},
    };
    struct outcome o = {0};
    store_add_metrics(s, 5, 2, 1, rows, 3, on_done, &o);
    store_add_metrics(s, 5, 2, 1, NULL, 0, on_done, &o);
    const struct store_metric zero = {0, 1, 1, 0, NULL, NULL};
    wait_for(s, &o.count, 2);
    assert_int_equal(o.rc, ERR_OK);
    store_add_metrics(s, 5, 2, 1, &zero, 1, on_done, &o);
    wait_for(s, &o.count, 3);
    assert_int_equal(o.rc, ERR_INVALID);

    struct all_rows all = read_from(s, 5, 1, 0, 2);
    assert_int_equal(all.n, 3);
    const struct read_row *r = all.rows;
    assert_true(r->step == 1 && r->wall_ns == 11 && r->attempt == 2 && r->merged == 1 && r->n == 4);
    for (int i = 0; i < 4; i++) {
        assert_string_equal(r->names[i], names[i]);
        assert_memory_equal(&r->values[i], &v1[i], sizeof v1[i]); /* bit for bit */
        assert_memory_equal(&r->mins[i], &v1[i], sizeof v1[i]);
        assert_memory_equal(&r->maxs[i], &v1[i], sizeof v1[i]);
    }
    assert_true(all.rows[1].n == 2 && all.rows[1].values[1] == 3.0 && all.rows[2].n == 0);
    assert_int_equal(read_from(s, 5, 0, 0, 10).n, 0);
    assert_int_equal(read_from(s, 4, 1, 0, 10).n, 0);
    free(all.rows);
    store_close(s);
    drop_dir(dir);
}

static void repeats_and_gaps(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    add_steps(s, 1, 1, 1, 10, 0, value_of);
    assert_int_equal(acknowledged(s), 10);
    add_steps(s, 1, 1, 5, 12, 0, value_of); /* a resend that overlaps */
    assert_int_equal(acknowledged(s), 12);
    add_steps(s, 1, 1, 15, 20, 0, value_of); /* 13 and 14 are missing */
    add_steps(s, 1, 1, 22, 25, 0, value_of);
    assert_int_equal(acknowledged(s), 12);
    add_steps(s, 1, 1, 14, 14, 0, value_of);
    assert_int_equal(acknowledged(s), 12);
    store_close(s);
    s = open_store(dir); /* the gap is remembered */
    add_steps(s, 1, 1, 13, 13, 0, value_of);
    assert_int_equal(acknowledged(s), 20);
    add_steps(s, 1, 1, 21, 21, 0, value_of);
    assert_int_equal(acknowledged(s), 25);
    struct all_rows all = read_from(s, 1, 0, 0, 1000);
    assert_int_equal(all.n, 25);
    bool seen[26] = {false};
    for (size_t i = 0; i < all.n; i++) {
        assert_false(seen[all.rows[i].step]);
        seen[all.rows[i].step] = true;
        assert_true(all.rows[i].values[0] == value_of(all.rows[i].step));
    }
    free(all.rows);

    /* Keyed by attempt and rank, listed in key order. */
    add_steps(s, 1, 2, 8, 9, 7, value_of);
    const double v = 1;
    const struct store_metric one = {1, 1, 1, 1, loss_name, &v};
    struct outcome o = {0};
    store_add_metrics(s, 1, 1, 3, &one, 1, on_done, &o);
    wait_for(s, &o.count, 1);
    struct seqs q = {0};
    struct error err;
    assert_int_equal(store_load_metric_seqs(s, each_seq, &q, &err), ERR_OK);
    assert_int_equal(q.n, 3);
    assert_true(q.attempt[0] == 1 && q.rank[0] == 0 && q.seq[0] == 25);
    assert_true(q.attempt[1] == 1 && q.rank[1] == 3 && q.seq[1] == 1);
    assert_true(q.attempt[2] == 2 && q.rank[2] == 0 && q.seq[2] == 2);
    store_close(s);
    drop_dir(dir);
}

/* Reads until the series has `want` rows; thinning goes on in its own time. */
static struct all_rows await_rows(struct store *s, int64_t job, size_t want)
{
    int64_t deadline = clock_mono_ns() + 60 * NS_PER_S;
    for (;;) {
        struct all_rows all = read_from(s, job, 0, 0, 10000);
        if (all.n == want)
            return all;
        if (clock_mono_ns() > deadline)
            fail_msg("waited 60 s for %zu rows, there are %zu", want, all.n);
        free(all.rows);
    }
}

/* What one row that stands for steps first..last must hold, computed from the function itself. */
static void check_summary(const struct read_row *r, int64_t first, int64_t last)
{
    double sum = 0, min = INFINITY, max = -INFINITY, scale = 0;
    for (int64_t step = first; step <= last; step++) {
        double v = value_of(step);
        sum += v;
        min = fmin(min, v);
        max = fmax(max, v);
        scale = fmax(scale, fabs(v));
    }
    double mean = sum / (double)(last - first + 1);
    assert_int_equal(r->step, last);
    assert_int_equal(r->wall_ns, last * 10);
    assert_int_equal(r->merged, last - first + 1);
    /* at most 100 additions and one product of rounding each */
    assert_true(fabs(r->values[0] - mean) <= 200 * 0x1p-53 * scale);
    assert_true(r->mins[0] == min && r->maxs[0] == max);
}

/* 103,000 steps, all reported: the newest 100,000 stay, the 3,000 before them become 300. */
static void every_step_of_the_newest(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    enum { LAST = 103000, BATCH = 1000 };
    int64_t cursor = 0;
    for (int64_t step = 1; step <= LAST; step += BATCH) {
        add_steps(s, 1, 1, step, step + BATCH - 1, 0, value_of);
        if (step == 50001) {
            struct all_rows all = read_from(s, 1, 0, 0, 10000);
            cursor = all.rows[all.n - 1].row;
            assert_int_equal(all.n, 51000);
            free(all.rows);
        }
    }
    /* limit 3,000: buckets 0 (steps 1..9) to 299; rows of step 3,000 and later are whole */
    struct all_rows all = await_rows(s, 1, 300 + LAST - 2999);
    check_summary(&all.rows[0], 1, 9);
    for (int64_t b = 1; b < 300; b++)
        check_summary(&all.rows[b], 10 * b, 10 * b + 9);
    for (size_t i = 300; i < all.n; i++) {
        assert_int_equal(all.rows[i].step, 3000 + (int64_t)(i - 300));
        assert_int_equal(all.rows[i].merged, 1);
        assert_true(all.rows[i].values[0] == value_of(all.rows[i].step));
    }
    free(all.rows);
    all = read_from(s, 1, 0, cursor, 10000); /* a follower gets what is new, and nothing twice */
    assert_int_equal(all.n, LAST - 51000);
    assert_int_equal(all.rows[0].step, 51001);
    free(all.rows);
    /* What has been thinned away is not taken for new when it is sent again. */
    add_steps(s, 1, 1, 1, 50, 0, value_of);
    assert_int_equal(acknowledged(s), LAST);
    free(await_rows(s, 1, 300 + LAST - 2999).rows);
    store_close(s);
    drop_dir(dir);
}

/* Steps far apart stand for a long run: 250 old steps, then two jumps that age them past both limits. */
static void old_steps_by_tens_then_hundreds(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    add_steps(s, 1, 1, 1, 250, 0, value_of);
    add_steps(s, 1, 2, 101, 180, 100, value_of); /* a second attempt, from step 100 */
    add_steps(s, 1, 2, 100400, 100400, 100319, value_of);
    /* first attempt: 0..9, ..., 250; second 101..109, ..., 170..179, 180 */
    struct all_rows all = await_rows(s, 1, 26 + 9 + 1);
    check_summary(&all.rows[0], 1, 9);
    check_summary(&all.rows[25], 250, 250);
    check_summary(&all.rows[26], 101, 109);
    check_summary(&all.rows[34], 180, 180);
    assert_int_equal(all.rows[26].attempt, 2);
    free(all.rows);
    store_close(s);
    s = open_store(dir);
    add_steps(s, 1, 2, 1100400, 1100400, 1100318, value_of);
    all = await_rows(s, 1, 3 + 1 + 2);
    check_summary(&all.rows[0], 1, 99);
    check_summary(&all.rows[1], 100, 199);
    check_summary(&all.rows[2], 200, 250);
    check_summary(&all.rows[3], 101, 180);
    assert_int_equal(all.rows[4].step, 100400);
    assert_int_equal(all.rows[5].step, 1100400);
    free(all.rows);
    assert_int_equal(acknowledged(s), 250);
    store_close(s);
    drop_dir(dir);
}

/* A metric that is reported now and then, and one that is not always a number, are counted for themselves. */
static void mixed_names_in_a_bucket(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    const char *const plain[] = {"loss", "skipped"}, *const with_eval[] = {"eval_loss", "loss", "skipped"};
    double values[10][3];
    struct store_metric rows[11];
    for (int i = 0; i < 10; i++) {
        values[i][0] = i == 3 ? NAN : i;
        values[i][1] = NAN;
        rows[i] = (struct store_metric){i + 1, 10 + i, 1, 2, plain, values[i]};
    }
    const double eval_row[] = {7.5, 5, NAN};
    rows[5] = (struct store_metric){6, 15, 1, 3, with_eval, eval_row};
    const double last = 1;
    rows[10] = (struct store_metric){11, 101000, 1, 1, loss_name, &last};
    struct outcome o = {0};
    store_add_metrics(s, 1, 1, 0, rows, 11, on_done, &o);
    wait_for(s, &o.count, 1);
    struct all_rows all = await_rows(s, 1, 2);
    const struct read_row *r = &all.rows[0];
    assert_true(r->n == 3 && r->merged == 10 && r->step == 19);
    assert_string_equal(r->names[0], "loss");
    assert_string_equal(r->names[1], "skipped");
    assert_string_equal(r->names[2], "eval_loss");
    assert_true(fabs(r->values[0] - 42.0 / 9) < 1e-14 && r->mins[0] == 0 && r->maxs[0] == 9);
    assert_true(isnan(r->values[1]) && isnan(r->mins[1]) && isnan(r->maxs[1]));
    assert_true(r->values[2] == 7.5 && r->mins[2] == 7.5 && r->maxs[2] == 7.5);
    free(all.rows);
    store_close(s);
    drop_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_come_back),
        cmocka_unit_test(repeats_and_gaps),
        cmocka_unit_test(every_step_of_the_newest),
        cmocka_unit_test(old_steps_by_tens_then_hundreds),
        cmocka_unit_test(mixed_names_in_a_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
