/* Copies for a standby while the store is written to, what they may be opened by, and the epoch. */
#include "tests/unit/store/fixture.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { EVENTS = 3000 };

static void put_event(struct store *s, int64_t id)
{
    struct store_txn *t = begin(s);
    struct store_event e = sample_event(id, 0);
    store_add_event(t, &e);
    assert_int_equal(commit_and_wait(s, t), ERR_OK);
}

static void join(char out[PATH_MAX], const char *dir, const char *name)
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, dir, name), ERR_OK);
}

static struct store *adopt(const char *dir)
{
    struct store *s = NULL;
    struct error err;
    if (store_adopt(dir, &s, &err))
        fail_msg("store_adopt: %s (%s)", err.message, err.hint);
    return s;
}

static void a_copy_is_adopted(void **state)
{
    (void)state;
    char dir[PATH_MAX], copy[PATH_MAX], id[9];
    struct error err;
    struct store *s, *other = NULL;
    new_dir(dir);
    join(copy, dir, "deep/copy");
    s = open_store(dir);
    uint64_t epoch = store_epoch(s);
    assert_int_equal(epoch >> 32, 1);
    snprintf(id, sizeof id, "%s", store_id(s));
    put_event(s, 1);
    assert_int_equal(store_backup(s, copy, true, &err), ERR_OK);
    put_event(s, 2);
    /* Not without being told that the other one is gone, and not over itself. */
    assert_int_equal(store_open(copy, &other, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "--adopt"));
    assert_int_equal(store_backup(s, dir, true, &err), ERR_INVALID);
    /* Another copy over the first. */
    assert_int_equal(store_backup(s, copy, false, &err), ERR_OK);
    struct store *new = adopt(copy);
    assert_string_equal(store_id(new), id);
    assert_int_equal(store_epoch(new) >> 32, 2);
    assert_int_equal(store_max_event_id(new), 2);
    put_event(new, 3);
    /* It lives now: no copy goes over it, held open or not. */
    assert_int_equal(store_backup(s, copy, true, &err), ERR_REFUSED);
    store_close(new);
    assert_int_equal(store_backup(s, copy, true, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "is not a copy"));
    new = open_store(copy); /* from now on without adopting */
    assert_int_equal(store_epoch(new) >> 32, 2);
    assert_int_equal(store_max_event_id(new), 3);
    store_close(new);
    store_close(s);
    /* The old one is as it was, and may be adopted in its turn. */
    s = open_store(dir);
    assert_true(store_epoch(s) == epoch);
    store_close(s);
    s = adopt(dir);
    assert_int_equal(store_epoch(s) >> 32, 2);
    store_close(s);
    drop_dir(dir);
}

static void another_store_is_in_the_way(void **state)
{
    (void)state;
    char dir[PATH_MAX], other[PATH_MAX], copy[PATH_MAX], path[PATH_MAX];
    struct error err;
    new_dir(dir);
    join(other, dir, "other");
    join(copy, dir, "copy");
    struct store *a = open_store(dir), *b = open_store(other);
    assert_int_equal(store_backup(b, copy, true, &err), ERR_OK);
    assert_int_equal(store_backup(a, copy, true, &err), ERR_REFUSED);
    join(path, dir, "file");
    assert_int_equal(fs_write_atomic(path, "x", 1, 0600, &err), ERR_OK);
    assert_int_not_equal(store_backup(a, path, true, &err), ERR_OK);
    /* Rubbish under the file's name is somebody's too. */
    join(copy, dir, "rubbish");
    assert_int_equal(fs_make_dirs(copy, 0700, &err), ERR_OK);
    join(path, copy, "state.db");
    assert_int_equal(fs_write_atomic(path, "rubbish, and more of it than a header", 37, 0600, &err), ERR_OK);
    assert_int_not_equal(store_backup(a, copy, true, &err), ERR_OK);
    store_close(a);
    store_close(b);
    drop_dir(dir);
}

struct copier {
    struct store *s;
    const char *dir;
    atomic_bool stop;
    int copies;
};

static void *copy_on(void *arg)
{
    struct copier *c = arg;
    struct error err;
    while (!atomic_load(&c->stop)) {
        int rc = store_backup(c->s, c->dir, c->copies % 2 == 0, &err);
        if (rc == ERR_CANCELLED)
            break;
        if (rc)
            fail_msg("%s", err.message);
        c->copies++;
    }
    return NULL;
}

/* Every copy is a whole one: the events of it are 1 to n without a gap, and quick_check (which opening does) likes it. */
static void while_it_is_written_to(void **state)
{
    (void)state;
    char dir[PATH_MAX], copy[PATH_MAX];
    pthread_t thread;
    new_dir(dir);
    join(copy, dir, "copy");
    struct copier c = {.s = open_store(dir), .dir = copy};
    assert_int_equal(pthread_create(&thread, NULL, copy_on, &c), 0);
    struct outcome done = {0};
    for (int i = 1; i <= EVENTS; i++) {
        struct store_txn *t = begin(c.s);
        struct store_event e = sample_event(i, 0);
        store_add_event(t, &e);
        store_commit(t, on_done, &done);
        if (i % 50 == 0)
            wait_for(c.s, &done.count, i);
    }
    atomic_store(&c.stop, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(c.copies > 0);
    store_backup_stop(c.s);
    struct error err;
    assert_int_equal(store_backup(c.s, copy, true, &err), ERR_CANCELLED);
    store_close(c.s);
    struct store *s = adopt(copy);
    sqlite3 *db = NULL;
    sqlite3_stmt *q = NULL;
    char path[PATH_MAX];
    join(path, copy, "state.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT count(*), max(id) FROM event", -1, &q, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(q), SQLITE_ROW);
    assert_int_equal(sqlite3_column_int64(q, 0), sqlite3_column_int64(q, 1));
    sqlite3_finalize(q);
    sqlite3_close(db);
    store_close(s);
    drop_dir(dir);
}

/* SIGKILL at any moment leaves the copy before or the new one. */
static void killed_while_copying(void **state)
{
    (void)state;
    char dir[PATH_MAX], copy[PATH_MAX];
    struct error err;
    new_dir(dir);
    join(copy, dir, "copy");
    struct store *s = open_store(dir);
    for (int i = 1; i <= 200; i++)
        put_event(s, i);
    assert_int_equal(store_backup(s, copy, true, &err), ERR_OK);
    store_close(s);
    for (int round = 0; round < 12; round++) {
        pid_t child = fork();
        if (child == 0) {
            s = NULL;
            if (store_open(dir, &s, &err))
                _exit(1);
            for (;;)
                if (store_backup(s, copy, true, &err))
                    _exit(2);
        }
        assert_true(child > 0);
        poll(NULL, 0, 15 + round * 7);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        struct store *refused = NULL;
        assert_int_equal(store_open(copy, &refused, &err), ERR_REFUSED); /* and not ERR_CORRUPT */
    }
    s = adopt(copy);
    assert_int_equal(store_max_event_id(s), 200);
    store_close(s);
    drop_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_is_adopted),
        cmocka_unit_test(another_store_is_in_the_way),
        cmocka_unit_test(while_it_is_written_to),
        cmocka_unit_test(killed_while_copying),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
