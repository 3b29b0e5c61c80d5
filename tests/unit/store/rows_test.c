/* Rows: what is put comes back the same, transactions are whole, in order and alone in failing. */
#include "tests/unit/store/fixture.h"

#include <pthread.h>

static void same_text(const char *a, const char *b)
{
    if (!a || !b)
        assert_true(!a && !b);
    else
        assert_string_equal(a, b);
}

static void same_f64(double a, double b)
{
    assert_true((isnan(a) && isnan(b)) || a == b);
}

/* ---- round trips --------------------------------------------------------------- */

static const char spec[] = "a\0b\0\xff\xfe";

static struct store_job full_job(void)
{
    return (struct store_job){
        .id = INT64_C(1) << 40, .name = "cola-60m", .uid = 4294967294u, .gid = 4294967295u, .user = "user \xff\xfe",
        .state = 3, .stop_target = 9, .reason = 17, .reason_text = "", .spec = spec, .spec_len = sizeof spec,
        .resolved = "", .resolved_len = 0, .priority = 100, .attempt = 7, .restarts_used = 2, .stuck_attempts = 1,
        .backoff_count = 4, .step = INT64_MAX, .checkpoint_step = -1, .submitted_ns = 1, .started_ns = 2,
        .ended_ns = 3, .run_s = 1.25, .productive_s = 2, .detection_s = 0.1, .restart_s = 1e-300, .replay_s = 1e300,
        .queue_s = (double)INFINITY, .loss = NAN, .eval_loss = 0x1.921fb54442d18p+1,
        .next_spec = spec, .next_spec_len = sizeof spec, .next_resolved = "", .next_step = 8000, .accounted_ns = 4,
        .accounted_boot_ns = 5, .accounted_boot = "b-1", .attempt_s = -1, .stall_s = 0.5,
    };
}

static void check_job(const struct store_job *a, const struct store_job *b)
{
    assert_true(a->id == b->id && a->uid == b->uid && a->gid == b->gid);
    same_text(a->name, b->name);
    same_text(a->user, b->user);
    same_text(a->reason_text, b->reason_text);
    assert_true(a->state == b->state && a->stop_target == b->stop_target && a->reason == b->reason);
    assert_int_equal(a->spec_len, b->spec_len);
    assert_int_equal(a->resolved_len, b->resolved_len);
    assert_true(!a->spec == !b->spec && !a->resolved == !b->resolved);
    if (a->spec)
        assert_memory_equal(a->spec, b->spec, a->spec_len);
    assert_true(a->priority == b->priority && a->attempt == b->attempt && a->restarts_used == b->restarts_used);
    assert_true(a->stuck_attempts == b->stuck_attempts && a->backoff_count == b->backoff_count);
    assert_true(a->step == b->step && a->checkpoint_step == b->checkpoint_step);
    assert_true(a->submitted_ns == b->submitted_ns && a->started_ns == b->started_ns && a->ended_ns == b->ended_ns);
    same_f64(a->run_s, b->run_s);
    same_f64(a->productive_s, b->productive_s);
    same_f64(a->detection_s, b->detection_s);
    same_f64(a->restart_s, b->restart_s);
    same_f64(a->replay_s, b->replay_s);
    same_f64(a->queue_s, b->queue_s);
    same_f64(a->loss, b->loss);
    same_f64(a->eval_loss, b->eval_loss);
    same_f64(a->stall_s, b->stall_s);
    assert_true(a->next_step == b->next_step && a->accounted_ns == b->accounted_ns);
    assert_int_equal(a->accounted_boot_ns, b->accounted_boot_ns);
    same_text(a->accounted_boot, b->accounted_boot);
    same_f64(a->attempt_s, b->attempt_s);
    assert_int_equal(a->next_spec_len, b->next_spec_len);
    assert_true(!a->next_spec == !b->next_spec && !a->next_resolved == !b->next_resolved);
    if (a->next_spec)
        assert_memory_equal(a->next_spec, b->next_spec, a->next_spec_len);
}

static const struct store_node node = {"gpu01", "b-1", 2, "disk is \"full\"; '--", NULL, 99, 64, 1 << 20, 1000, "",
                                       4, "NVIDIA H200", 143771, 77};
static const struct store_checkpoint ckpt = {
    1, 8000, 3, 2, "/d/00-1/step-8000.a3", 2, 7, NULL, 3, "s3://b/p", "no keys", true};
static const struct store_shard shard = {1, 8000, 3, 1, "rank-1.safetensors", INT64_C(1) << 41, 0xffffffffu, 12};
static const struct store_attempt attempt = {1, 3, 10, 20, "n1:0,1", 1, 2, 3, 8, NULL, true, 15, "n2,n3"};

static int jobs_seen, others_seen;

static void each_job(void *arg, const struct store_job *row)
{
    const struct store_job *want = arg;
    check_job(&want[jobs_seen++], row);
}

static void each_node(void *arg, const struct store_node *r)
{
    (void)arg;
    others_seen++;
    same_text(r->name, node.name);
    same_text(r->boot_id, node.boot_id);
    same_text(r->admin_reason, node.admin_reason);
    same_text(r->admin_by, node.admin_by);
    same_text(r->data_address, node.data_address);
    assert_true(r->admin == node.admin && r->admin_ns == node.admin_ns && r->cpu_slots == node.cpu_slots);
    assert_true(r->memory_mib == node.memory_mib && r->uid == node.uid);
    same_text(r->gpu_name, node.gpu_name);
    assert_true(r->gpus == node.gpus && r->gpu_mib == node.gpu_mib && r->drain_deadline_ns == node.drain_deadline_ns);
}

static void each_checkpoint(void *arg, const struct store_checkpoint *r)
{
    (void)arg;
    others_seen++;
    assert_true(r->job == ckpt.job && r->step == ckpt.step && r->attempt == ckpt.attempt && r->state == ckpt.state);
    assert_true(r->world == ckpt.world && r->changed_ns == ckpt.changed_ns && r->pinned == ckpt.pinned);
    same_text(r->path, ckpt.path);
    same_text(r->note, ckpt.note);
    assert_int_equal(r->mirror, ckpt.mirror);
    same_text(r->mirror_url, ckpt.mirror_url);
    same_text(r->mirror_note, ckpt.mirror_note);
}

static void each_shard(void *arg, const struct store_shard *r)
{
    (void)arg;
    others_seen++;
    assert_true(r->job == shard.job && r->step == shard.step && r->attempt == shard.attempt && r->rank == shard.rank);
    assert_true(r->bytes == shard.bytes && r->crc32c == shard.crc32c && r->write_ms == shard.write_ms);
    same_text(r->file, shard.file);
}

static void each_attempt(void *arg, const struct store_attempt *r)
{
    (void)arg;
    others_seen++;
    assert_true(r->job == attempt.job && r->attempt == attempt.attempt && r->from_step == attempt.from_step);
    assert_true(r->to_step == attempt.to_step && r->start_ns == attempt.start_ns && r->end_ns == attempt.end_ns);
    assert_true(r->running_ns == attempt.running_ns && r->reason == attempt.reason && r->fenced == attempt.fenced);
    same_text(r->placement, attempt.placement);
    same_text(r->text, attempt.text);
    same_text(r->spares, attempt.spares);
    assert_true(r->replay_until == attempt.replay_until);
}

static void rows_come_back(void **state)
{
    (void)state;
    char dir[PATH_MAX], id[16];
    struct error err;
    new_dir(dir);
    struct store *s = open_store(dir);
    assert_int_equal(strlen(store_id(s)), 8);
    assert_int_equal(strspn(store_id(s), "0123456789abcdef"), 8);
    snprintf(id, sizeof id, "%s", store_id(s));
    assert_int_equal(store_max_job_id(s), 0);
    assert_int_equal(store_max_event_id(s), 0);
    struct store_job want[2] = {sample_job(1), full_job()};
    want[0].name = NULL;

    /* Children before parents on purpose: the order of puts does not matter. */
    struct store_txn *t = begin(s);
    char volatile_name[] = "cola-60m";
    want[1].name = volatile_name;
    store_put_shard(t, &shard);
    store_put_checkpoint(t, &ckpt);
    store_put_attempt(t, &attempt);
    store_put_node(t, &node);
    store_put_job(t, &want[1]);
    store_put_job(t, &want[0]);
    struct store_event e = sample_event(41, 1);
    store_add_event(t, &e);
    memset(volatile_name, 'x', sizeof volatile_name - 1); /* copied by the call */
    want[1].name = "cola-60m";
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
    assert_int_equal(store_health(s, &err), ERR_OK);

    for (int round = 0; round < 2; round++) { /* as written, and after a restart */
        jobs_seen = others_seen = 0;
        assert_int_equal(store_load_jobs(s, each_job, want, &err), ERR_OK);
        assert_int_equal(store_load_nodes(s, each_node, NULL, &err), ERR_OK);
        assert_int_equal(store_load_checkpoints(s, each_checkpoint, NULL, &err), ERR_OK);
        assert_int_equal(store_load_shards(s, each_shard, NULL, &err), ERR_OK);
        assert_int_equal(store_load_attempts(s, each_attempt, NULL, &err), ERR_OK);
        assert_int_equal(jobs_seen, 2);
        assert_int_equal(others_seen, 4);
        assert_true(store_max_job_id(s) == want[1].id);
        assert_int_equal(store_max_event_id(s), 41);
        assert_string_equal(store_id(s), id);
        assert_string_equal(store_notice(s), "");
        store_close(s);
        s = open_store(dir);
    }

    /* A second put of the same keys replaces, also while children refer to the row. */
    want[0].name = "renamed";
    want[0].loss = 1.5;
    want[0].spec = "";
    t = begin(s);
    store_put_job(t, &want[0]);
    store_put_checkpoint(t, &ckpt);
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
    jobs_seen = others_seen = 0;
    assert_int_equal(store_load_jobs(s, each_job, want, &err), ERR_OK);
    assert_int_equal(store_load_shards(s, each_shard, NULL, &err), ERR_OK);
    assert_int_equal(jobs_seen, 2);
    assert_int_equal(others_seen, 1);
    store_close(s);
    drop_dir(dir);
}

/* ---- transactions ----------------------------------------------------------------- */

enum { MANY = 3000 };
static int order[MANY], order_n;

struct numbered {
    int number;
    int rc;
};

static void note_order(void *arg, int rc, const struct error *err)
{
    struct numbered *n = arg;
    (void)err;
    n->rc = rc;
    order[order_n++] = n->number;
}

/* Each third transaction breaks a rule after having put a good row: it fails alone, the others do not notice. */
static void one_failing_fails_alone(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    static struct numbered numbers[MANY];
    new_dir(dir);
    struct store *s = open_store(dir);
    struct store_txn *t = begin(s);
    struct store_job job = sample_job(1);
    store_put_job(t, &job);
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
    order_n = 0;
    for (int i = 0; i < MANY; i++) {
        t = begin(s);
        struct store_event e = sample_event(i + 1, 1);
        store_add_event(t, &e);
        if (i % 3 == 1) { /* no such job */
            struct store_attempt bad = attempt;
            bad.job = 77;
            store_put_attempt(t, &bad);
        } else if (i % 3 == 2) { /* an event's id is never used twice */
            e.id = 1;
            store_add_event(t, &e);
        }
        numbers[i] = (struct numbered){i, -1};
        store_commit(t, note_order, &numbers[i]);
    }
    wait_for(s, &order_n, MANY);
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(order[i], i);
        assert_int_equal(numbers[i].rc, i % 3 ? ERR_INVALID : ERR_OK);
    }
    struct error err;
    assert_int_equal(store_health(s, &err), ERR_OK);
    store_close(s);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), MANY / 3);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event WHERE id % 3 != 1"), 0);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM attempt"), 0);
    drop_dir(dir);
}

static void close_answers_all(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    struct outcome o = {0};
    for (int i = 1; i <= 500; i++) {
        struct store_txn *t = begin(s);
        struct store_event e = sample_event(i, 0);
        store_add_event(t, &e);
        store_commit(t, i % 2 ? on_done : NULL, &o);
    }
    struct store_txn *dropped = begin(s);
    struct store_event e = sample_event(1000, 0);
    store_add_event(dropped, &e);
    store_abort(dropped);
    store_close(s);
    assert_int_equal(o.count, 250);
    assert_int_equal(o.rc, ERR_OK);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), 500);
    /* Closed in good order: nothing is left in a log. */
    char wal[PATH_MAX + 16];
    snprintf(wal, sizeof wal, "%s/state.db-wal", dir);
    assert_false(fs_exists(wal));
    drop_dir(dir);
}

/* ---- reads ------------------------------------------------------------------------- */

struct page {
    int count;
    int64_t ids[64];
    size_t n;
    int rc;
};

static void on_events(void *arg, const struct store_event *rows, size_t n, int rc, const struct error *err)
{
    struct page *p = arg;
    assert_non_null(err);
    p->count++;
    p->n = n;
    p->rc = rc;
    for (size_t i = 0; i < n; i++) {
        p->ids[i] = rows[i].id;
        assert_true(rows[i].wall_ns == 1000 + rows[i].id);
        assert_string_equal(rows[i].kind, "test");
        assert_string_equal(rows[i].text, "text");
    }
}

static struct page read_page(struct store *s, int64_t job, int64_t after, int limit, bool newest)
{
    struct page p = {0};
    store_read_events(s, job, after, limit, newest, on_events, &p);
    wait_for(s, &p.count, 1);
    assert_int_equal(p.rc, ERR_OK);
    return p;
}

static void events_in_pages(void **state)
{
    (void)state;
    char dir[PATH_MAX];
    new_dir(dir);
    struct store *s = open_store(dir);
    struct store_txn *t = begin(s);
    for (int i = 1; i <= 50; i++) { /* of job 1 and 2 in turn */
        struct store_event e = sample_event(10 * i, 1 + i % 2);
        store_add_event(t, &e);
    }
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
    struct page p = read_page(s, 0, 0, 60, false);
    assert_int_equal(p.n, 50);
    int64_t after = 0;
    int seen = 0;
    do { /* by cursor, one job */
        p = read_page(s, 2, after, 7, false);
        for (size_t i = 0; i < p.n; i++)
            assert_int_equal(p.ids[i], 10 * (1 + 2 * seen++));
        after = p.n ? p.ids[p.n - 1] : after;
    } while (p.n);
    assert_int_equal(seen, 25);
    p = read_page(s, 0, 0, 3, true);
    assert_int_equal(p.n, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(p.ids[i], 480 + 10 * i);
    p = read_page(s, 1, 470, 5, true);
    assert_int_equal(p.n, 2);
    assert_true(p.ids[0] == 480 && p.ids[1] == 500);
    p = read_page(s, 9, 0, 5, false);
    assert_int_equal(p.n, 0);
    store_close(s);
    drop_dir(dir);
}

/* An open read transaction, as of a long page, keeps its view while commits go on. */
static void reader_holds_up_nothing(void **state)
{
    (void)state;
    char dir[PATH_MAX], path[PATH_MAX + 16];
    new_dir(dir);
    struct store *s = open_store(dir);
    struct store_txn *t = begin(s);
    struct store_event e = sample_event(1, 0);
    store_add_event(t, &e);
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
    sqlite3 *db;
    sqlite3_stmt *count;
    snprintf(path, sizeof path, "%s/state.db", dir);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN", NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT count(*) FROM event", -1, &count, NULL), SQLITE_OK);
    for (int i = 2; i <= 40; i++) {
        assert_int_equal(sqlite3_step(count), SQLITE_ROW);
        assert_int_equal(sqlite3_column_int(count, 0), 1);
        sqlite3_reset(count);
        t = begin(s);
        e = sample_event(i, 0);
        store_add_event(t, &e);
        assert_int_equal(commit_and_wait(s, t), ERR_OK);
    }
    sqlite3_finalize(count);
    sqlite3_close(db);
    assert_int_equal(read_page(s, 0, 0, 60, false).n, 40);
    store_close(s);
    drop_dir(dir);
}

/* ---- an outside write lock (known failure D15) ------------------------------------------ */

struct holder {
    sqlite3 *db;
    int release[2]; /* a byte: let go after the time */
};

static void *let_go(void *arg)
{
    struct holder *h = arg;
    char byte;
    assert_int_equal(read(h->release[0], &byte, 1), 1);
    struct pollfd none = {-1, 0, 0};
    poll(&none, 1, 3000); /* the lock is held this long on purpose */
    sqlite3_exec(h->db, "COMMIT", NULL, NULL, NULL);
    return NULL;
}

static void outside_lock_only_delays(void **state)
{
    (void)state;
    char dir[PATH_MAX], path[PATH_MAX + 16];
    struct holder h;
    pthread_t thread;
    struct error err;
    new_dir(dir);
    struct store *s = open_store(dir);
    snprintf(path, sizeof path, "%s/state.db", dir);
    assert_int_equal(pipe(h.release), 0);
    assert_int_equal(sqlite3_open(path, &h.db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(h.db, "BEGIN IMMEDIATE; INSERT INTO meta VALUES ('outside', '1')", NULL, NULL, NULL),
                     SQLITE_OK);
    assert_int_equal(pthread_create(&thread, NULL, let_go, &h), 0);

    struct outcome o = {0};
    int64_t start = clock_mono_ns();
    for (int i = 1; i <= 100; i++) {
        struct store_txn *t = begin(s);
        struct store_event e = sample_event(i, 0);
        store_add_event(t, &e);
        store_commit(t, on_done, &o);
    }
    assert_true(clock_mono_ns() - start < NS_PER_S / 2); /* the caller waits for nothing */
    struct outcome m = {0};
    const char *const names[] = {"loss"};
    const double values[] = {1};
    struct store_metric metric = {.seq = 1, .step = 1, .n = 1, .names = names, .values = values};
    store_add_metrics(s, 1, 1, 0, &metric, 1, on_done, &m);
    wait_for(s, &m.count, 1); /* the other file is not locked */
    assert_int_equal(m.rc, ERR_OK);
    assert_int_equal(o.count, 0);
    assert_int_equal(write(h.release[1], "x", 1), 1);
    start = clock_mono_ns();
    while (!o.count) { /* health stays good: it is only a delay */
        assert_int_equal(store_health(s, &err), ERR_OK);
        struct pollfd p = {store_fd(s), POLLIN, 0};
        poll(&p, 1, 100);
        store_dispatch(s);
        assert_true(clock_mono_ns() - start < 20 * NS_PER_S);
    }
    assert_true(clock_mono_ns() - start >= 5 * NS_PER_S / 2); /* it did wait for the lock */
    wait_for(s, &o.count, 100);
    assert_int_equal(o.rc, ERR_OK);
    pthread_join(thread, NULL);
    sqlite3_close(h.db);
    close(h.release[0]);
    close(h.release[1]);
    store_close(s);
    assert_int_equal(sql_int(dir, "state.db", "SELECT count(*) FROM event"), 100);
    drop_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_come_back),          cmocka_unit_test(one_failing_fails_alone),
        cmocka_unit_test(close_answers_all),       cmocka_unit_test(events_in_pages),
        cmocka_unit_test(reader_holds_up_nothing), cmocka_unit_test(outside_lock_only_delays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
