/* What the store's tests share: private directories, waiting for callbacks, sample rows. */
#ifndef BOOST_TESTS_STORE_FIXTURE_H
#define BOOST_TESTS_STORE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <limits.h>
#include <math.h>
#include <poll.h>
#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "store/store.h"

#define UNUSED __attribute__((unused))

/* A new directory; the caller removes it with drop_dir. */
UNUSED static void new_dir(char dir[PATH_MAX])
{
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, PATH_MAX, "%s/store-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(dir));
}

UNUSED static void drop_dir(const char *dir)
{
    struct error err;
    assert_int_equal(fs_remove_tree(dir, &err), ERR_OK);
}

UNUSED static struct store *open_store(const char *dir)
{
    struct store *s = NULL;
    struct error err;
    if (store_open(dir, &s, &err))
        fail_msg("store_open: %s (%s)", err.message, err.hint);
    return s;
}

/* Dispatches until *count is at least `want`; fails after 30 s. */
UNUSED static void wait_for(struct store *s, const int *count, int want)
{
    int64_t deadline = clock_mono_ns() + 30 * NS_PER_S;
    while (*count < want) {
        struct pollfd p = {store_fd(s), POLLIN, 0};
        int64_t left_ms = (deadline - clock_mono_ns()) / NS_PER_MS;
        if (left_ms <= 0)
            fail_msg("waited 30 s for %d callbacks, %d came", want, *count);
        poll(&p, 1, (int)left_ms);
        store_dispatch(s);
    }
}

struct outcome {
    int count;
    int rc;
    struct error err;
};

UNUSED static void on_done(void *arg, int rc, const struct error *err)
{
    struct outcome *o = arg;
    o->count++;
    o->rc = rc;
    o->err = *err;
}

UNUSED static int commit_and_wait(struct store *s, struct store_txn *t)
{
    struct outcome o = {0};
    store_commit(t, on_done, &o);
    wait_for(s, &o.count, 1);
    return o.rc;
}

UNUSED static struct store_txn *begin(struct store *s)
{
    struct store_txn *t = store_begin(s);
    assert_non_null(t);
    return t;
}

UNUSED static struct store_job sample_job(int64_t id)
{
    return (struct store_job){.id = id, .name = "job", .user = "someone", .reason_text = "", .checkpoint_step = -1,
                              .loss = NAN, .eval_loss = NAN};
}

UNUSED static struct store_event sample_event(int64_t id, int64_t job)
{
    return (struct store_event){.id = id, .wall_ns = 1000 + id, .job = job, .node = "n1", .actor = "boostd",
                                .kind = "test", .text = "text"};
}

UNUSED static void sql(const char *dir, const char *file, const char *text)
{
    char path[PATH_MAX];
    sqlite3 *db = NULL;
    snprintf(path, sizeof path, "%s/%s", dir, file);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    if (sqlite3_exec(db, text, NULL, NULL, NULL))
        fail_msg("%s: %s", text, sqlite3_errmsg(db));
    sqlite3_close(db);
}

UNUSED static int64_t sql_int(const char *dir, const char *file, const char *text)
{
    char path[PATH_MAX];
    sqlite3 *db = NULL;
    sqlite3_stmt *stmt = NULL;
    snprintf(path, sizeof path, "%s/%s", dir, file);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, text, -1, &stmt, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(stmt), SQLITE_ROW);
    int64_t value = sqlite3_column_int64(stmt, 0);
    sqlite3_finalize(stmt);
    sqlite3_close(db);
    return value;
}

#endif
