/* A disk that fails: nothing is answered that is not durable, nothing is lost, order is kept. */
#include "tests/unit/store/fault_vfs.h"

enum { TXNS = 4 };

struct log {
    int order[64];
    int n;
};
struct entry {
    struct log *log;
    int number;
};

static void note(void *arg, int rc, const struct error *err)
{
    struct entry *e = arg;
    if (rc)
        fail_msg("transaction %d: %s", e->number, err->message);
    e->log->order[e->log->n++] = e->number;
}

static void queue_event(struct store *s, int number, struct log *log, struct entry *entry)
{
    struct store_txn *t = begin(s);
    struct store_event e = sample_event(number, 0);
    store_add_event(t, &e);
    *entry = (struct entry){log, number};
    store_commit(t, note, entry);
}

static void in_order(const struct log *log, int n)
{
    assert_int_equal(log->n, n);
    for (int i = 0; i < n; i++)
        assert_int_equal(log->order[i], i + 1);
}

/* Each write and each fsync of four commits fails once, in turn, in each way. */
static void each_operation_fails_once(void **state)
{
    (void)state;
    int failures = 0;
    for (enum fault_kind kind = FAULT_WRITE_FULL; kind <= FAULT_SYNC; kind++) {
        for (int nth = 1;; nth++) {
            char dir[PATH_MAX];
            struct log log = {0};
            struct entry entries[TXNS];
            struct error err;
            new_dir(dir);
            struct store *s = open_store(dir);
            fault_arm("state.db-wal", kind, nth, nth);
            for (int i = 0; i < TXNS; i++) {
                queue_event(s, i + 1, &log, &entries[i]);
                if (i % 2) /* two at once, so that groups are hit as well */
                    wait_for(s, &log.n, i + 1);
            }
            int seen = fault_disarm();
            in_order(&log, TXNS);
            assert_int_equal(store_health(s, &err), ERR_OK);
            store_close(s);
            store_close(open_store(dir));
            assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), TXNS);
            drop_dir(dir);
            if (seen < nth)
                break;
            failures++;
        }
    }
    assert_true(failures >= 3 * 2); /* at least a write and an fsync of each of two commits */
}

/* Whatever fails while the files are made, the next start succeeds. */
static void opening_fails_at_each_operation(void **state)
{
    (void)state;
    int failures = 0;
    for (enum fault_kind kind = FAULT_WRITE_FULL; kind < FAULT_KINDS; kind++) {
        for (int nth = 1;; nth++) {
            char dir[PATH_MAX];
            struct store *s = NULL;
            struct error err;
            new_dir(dir);
            fault_arm(".db", kind, nth, INT32_MAX);
            int rc = store_open(dir, &s, &err);
            int seen = fault_disarm();
            if (rc) {
                assert_true(rc == ERR_NOSPACE || rc == ERR_IO);
                assert_true(err.message[0] && err.hint[0]);
            }
            store_close(s);
            store_close(open_store(dir));
            drop_dir(dir);
            if (seen < nth)
                break;
            failures++;
        }
    }
    assert_true(failures >= 12);
}

static void wait_for_health(struct store *s, int want, struct error *err)
{
    int64_t deadline = clock_mono_ns() + 30 * NS_PER_S;
    struct pollfd none = {-1, 0, 0};
    while (store_health(s, err) != want) {
        assert_true(clock_mono_ns() < deadline);
        poll(&none, 1, 5);
        store_dispatch(s);
    }
}

static void full_disk_delays_and_says_so(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    struct error err;
    struct log log = {0};
    struct entry entries[20];
    new_dir(dir);
    struct store *s = open_store(dir);
    fault_arm("state.db", FAULT_ANY_FULL, 1, INT32_MAX);
    for (int i = 0; i < 10; i++)
        queue_event(s, i + 1, &log, &entries[i]);
    wait_for_health(s, ERR_NOSPACE, &err);
    assert_non_null(strstr(err.message, "state.db"));
    assert_non_null(strstr(err.message, "no space"));
    assert_non_null(strstr(err.hint, dir));
    for (int i = 10; i < 20; i++) /* what comes meanwhile stays behind */
        queue_event(s, i + 1, &log, &entries[i]);

    const char *const names[] = {"loss"};
    const double value = 1;
    const struct store_metric metric = {1, 1, 1, 1, names, &value};
    struct outcome m = {0};
    store_add_metrics(s, 1, 1, 0, &metric, 1, on_done, &m);
    wait_for(s, &m.count, 1); /* the other file goes on */
    assert_int_equal(m.rc, ERR_OK);
    assert_int_equal(store_metrics_health(s, &err), ERR_OK);
    assert_int_equal(log.n, 0);

    fault_disarm();
    wait_for(s, &log.n, 20);
    in_order(&log, 20);
    assert_int_equal(store_health(s, &err), ERR_OK);
    store_close(s);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), 20);
    drop_dir(dir);
}

static void metrics_disk_full_leaves_state_alone(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    struct error err;
    struct log log = {0};
    struct entry entry;
    new_dir(dir);
    struct store *s = open_store(dir);
    fault_arm("metrics.db", FAULT_WRITE_IO, 1, INT32_MAX);
    enum { ROWS = 20000, NAMES = 20, BATCHES = 30 }; /* 3.2 MB of values a batch */
    const char *names[NAMES];
    static double values[NAMES];
    static struct store_metric rows[ROWS];
    for (int i = 0; i < NAMES; i++)
        names[i] = "a";
    struct outcome taken = {0}, refused = {0};
    for (int i = 0; i < ROWS; i++)
        rows[i] = (struct store_metric){i + 1, i + 1, 1, NAMES, names, values};
    for (int b = 0; b < BATCHES; b++) /* together more than may wait: the last are refused at once */
        store_add_metrics(s, 1, b + 1, 0, rows, ROWS, on_done, b < 2 ? &taken : &refused);
    wait_for(s, &refused.count, 1);
    assert_int_equal(refused.rc, ERR_REFUSED);
    assert_non_null(strstr(refused.err.message, "metrics.db"));
    assert_int_equal(taken.count, 0);
    queue_event(s, 1, &log, &entry);
    wait_for(s, &log.n, 1);
    assert_int_equal(store_health(s, &err), ERR_OK);
    while (store_metrics_health(s, &err) != ERR_IO) {
        struct pollfd none = {-1, 0, 0};
        poll(&none, 1, 5);
    }
    assert_non_null(strstr(err.message, "metrics.db"));
    fault_disarm();
    wait_for(s, &taken.count, 2);
    assert_int_equal(taken.rc, ERR_OK);
    store_close(s);
    drop_dir(dir);
}

static void count_rc(void *arg, int rc, const struct error *err)
{
    int *count = arg;
    assert_int_equal(rc, ERR_NOSPACE);
    assert_int_equal(err->code, ERR_NOSPACE);
    (*count)++;
}

/* It does not hang, and does not claim what was not kept. */
static void closing_on_a_full_disk(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    int count = 0;
    new_dir(dir);
    struct store *s = open_store(dir);
    fault_arm("state.db", FAULT_ANY_FULL, 1, INT32_MAX);
    for (int i = 0; i < 5; i++) {
        struct store_txn *t = begin(s);
        struct store_event e = sample_event(i + 1, 0);
        store_add_event(t, &e);
        store_commit(t, count_rc, &count);
    }
    int64_t start = clock_mono_ns();
    store_close(s);
    assert_true(clock_mono_ns() - start < 15 * NS_PER_S);
    assert_int_equal(count, 5);
    fault_disarm();
    store_close(open_store(dir));
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), 0);
    drop_dir(dir);
}

/* ---- a power cut that takes everything not fsynced ------------------------------------ */

static void nothing_unsynced(void *arg, int rc, const struct error *err)
{
    (void)err;
    assert_int_equal(rc, ERR_OK);
    pthread_mutex_lock(&fault.mutex);
    assert_false(fault.unsynced_wal);
    pthread_mutex_unlock(&fault.mutex);
    (*(int *)arg)++;
}

static void each_shadow_job(void *arg, const struct store_job *row)
{
    int *seen = arg;
    assert_int_equal(row->id, ++*seen);
    assert_int_equal(row->spec_len, 200000);
    assert_int_equal(((const uint8_t *)row->spec)[199999], row->id);
}

static void power_cut_keeps_all_that_was_answered(void **state)
{
    (void)state;
    char dir[PATH_MAX], after[PATH_MAX], from[2 * PATH_MAX], to[2 * PATH_MAX];
    static uint8_t spec[200000]; /* large, so that the log goes round and is copied back */
    new_dir(dir);
    new_dir(fault.shadow);
    snprintf(fault.shadow_of, sizeof fault.shadow_of, "%s", dir);
    struct store *s = open_store(dir);
    int answered = 0;
    bool metrics_unsynced = false;
    for (int i = 1; i <= 60; i++) {
        const char *const names[] = {"loss"};
        const double value = i;
        const struct store_metric metric = {i, i, 1, 1, names, &value};
        struct outcome m = {0};
        store_add_metrics(s, i, 1, 0, &metric, 1, on_done, &m);
        wait_for(s, &m.count, 1);
        pthread_mutex_lock(&fault.mutex);
        metrics_unsynced |= fault.unsynced_metrics_wal;
        pthread_mutex_unlock(&fault.mutex);

        struct store_txn *t = begin(s);
        struct store_job job = sample_job(i);
        memset(spec, i, sizeof spec);
        job.spec = spec;
        job.spec_len = sizeof spec;
        store_put_job(t, &job);
        store_commit(t, nothing_unsynced, &answered);
        wait_for(s, &answered, i);
        if (i % 6)
            continue;
        new_dir(after);
        const char *files[] = {"state.db", "state.db-wal", "metrics.db", "metrics.db-wal"};
        pthread_mutex_lock(&fault.mutex);
        for (int f = 0; f < 4; f++) {
            snprintf(from, sizeof from, "%s/%s", fault.shadow, files[f]);
            snprintf(to, sizeof to, "%s/%s", after, files[f]);
            if (fs_exists(from))
                copy_file(from, to);
        }
        pthread_mutex_unlock(&fault.mutex);
        struct store *restarted = open_store(after);
        struct error err;
        int seen = 0;
        assert_int_equal(store_load_jobs(restarted, each_shadow_job, &seen, &err), ERR_OK);
        assert_int_equal(seen, i);
        store_close(restarted);
        drop_dir(after);
    }
    /* That the shim sees what is not durable: metrics are answered before an fsync. */
    assert_true(metrics_unsynced);
    store_close(s);
    fault.shadow_of[0] = '\0';
    drop_dir(fault.shadow);
    drop_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_operation_fails_once),
        cmocka_unit_test(opening_fails_at_each_operation),
        cmocka_unit_test(full_disk_delays_and_says_so),
        cmocka_unit_test(metrics_disk_full_leaves_state_alone),
        cmocka_unit_test(closing_on_a_full_disk),
        cmocka_unit_test(power_cut_keeps_all_that_was_answered),
    };
    return cmocka_run_group_tests(tests, fault_install, NULL);
}
