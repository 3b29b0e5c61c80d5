/* Group commit: one thread per database takes all work that waits, commits it in one
 * transaction and only then answers. There are two of them, for state.db and for metrics.db,
 * so that metrics never delay state.
 *
 * Each piece of work has a savepoint of its own, so that a broken one fails alone. When the
 * file or the disk is the trouble, the whole group is rolled back and tried again, before
 * anything that came later, until it succeeds or the store is closed. */
#include <errno.h>
#include <time.h>

#include "proto/base/clock.h"
#include "store/internal.h"

enum {
    GROUP_MAX = 4096,             /* pieces of work in one commit: bounds the wait of the first */
    RETRY_FIRST_MS = 100,         /* doubles up to RETRY_MAX_MS */
    RETRY_MAX_MS = 1000,          /* and so long after space is back submits are taken again */
    IDLE_MS = 1000,               /* without work for so long: empty the WAL */
    WAL_PASSIVE_PAGES = 1000,     /* copy the WAL into the database from here on */
    WAL_TRUNCATE_PAGES = 16384,   /* 64 MiB: wait for no reader, but try hard to cut it */
    COMMITS_WITHOUT_CHORE = 64,   /* a writer that is never idle still does its upkeep */
    HANGING_MS = 10000,           /* a commit that takes longer is reported by store_health */
};

static void wait_until(struct store_writer *w, int64_t until_ns)
{
    struct timespec t = {(time_t)(until_ns / NS_PER_S), (long)(until_ns % NS_PER_S)};
    pthread_cond_timedwait(&w->wake, &w->mutex, &t);
}

/* ---- the thread ---------------------------------------------------------------- */

static void roll_back(struct store_writer *w)
{
    if (!sqlite3_get_autocommit(w->db.handle))
        (void)store_db_step(w->rollback);
    if (w->ops->rolled_back)
        w->ops->rolled_back(w);
}

/* One piece of work in its savepoint. SQLITE_OK also when it failed alone; else the whole group must be retried. */
static int apply_one(struct store_writer *w, struct store_work *work, struct error *err)
{
    work->rc = ERR_OK;
    error_clear(&work->err);
    int code = store_db_step(w->savepoint);
    if (code) {
        store_db_error(&w->db, code, "savepoint", err);
        return code;
    }
    code = w->ops->apply(w, work, &work->err);
    if (store_db_in_trouble(code) || (code && sqlite3_get_autocommit(w->db.handle))) {
        *err = work->err;
        return code;
    }
    if (code) {
        work->rc = (int)work->err.code;
        code = store_db_step(w->undo);
        if (w->ops->rolled_back)
            w->ops->rolled_back(w);
    }
    if (!code)
        code = store_db_step(w->release);
    if (code)
        store_db_error(&w->db, code, "savepoint", err);
    return code;
}

static int commit_group(struct store_writer *w, struct store_work *first, struct error *err)
{
    int code = store_db_step(w->begin);
    if (code) {
        store_db_error(&w->db, code, "begin", err);
        return code;
    }
    for (struct store_work *work = first; work && !code; work = work->next)
        code = apply_one(w, work, err);
    if (!code && (code = store_db_step(w->commit)))
        store_db_error(&w->db, code, "commit", err);
    if (code)
        roll_back(w);
    return code;
}

/* False when the store is being closed and patience has run out. */
static bool wait_before_retry(struct store_writer *w, const struct error *err, int64_t delay_ms)
{
    pthread_mutex_lock(&w->mutex);
    w->trouble = *err;
    int64_t now = clock_mono_ns(), until = now + delay_ms * NS_PER_MS;
    while (now < until) {
        int64_t give_up = w->stopping ? w->stop_ns + STORE_CLOSE_MS * NS_PER_MS : INT64_MAX;
        if (now >= give_up)
            break;
        wait_until(w, until < give_up ? until : give_up);
        now = clock_mono_ns();
    }
    bool again = !w->stopping || now < w->stop_ns + STORE_CLOSE_MS * NS_PER_MS;
    pthread_mutex_unlock(&w->mutex);
    return again;
}

/* Into a damaged file nothing more is written: what comes is answered with the reason. */
static void refuse(struct store_writer *w, struct store_work_list *group)
{
    pthread_mutex_lock(&w->mutex);
    w->busy_since_ns = 0;
    pthread_mutex_unlock(&w->mutex);
    for (struct store_work *work = group->head; work; work = work->next) {
        work->rc = (int)w->trouble.code;
        work->err = w->trouble;
    }
    store_answers_post(w->answers, group);
}

static void check_late(struct store_writer *w)
{
    struct error err;
    int rc = store_schema_check(&w->db, &err);
    pthread_mutex_lock(&w->mutex);
    w->broken = rc == ERR_CORRUPT;
    if (w->broken)
        w->trouble = err;
    w->checking = false;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->mutex);
}

static void commit_until_done(struct store_writer *w, struct store_work_list *group)
{
    struct error err;
    int64_t delay_ms = RETRY_FIRST_MS;
    error_clear(&err);
    while (commit_group(w, group->head, &err)) {
        if (!wait_before_retry(w, &err, delay_ms)) {
            for (struct store_work *work = group->head; work; work = work->next) {
                work->rc = (int)err.code;
                work->err = err;
            }
            break;
        }
        delay_ms = delay_ms * 2 < RETRY_MAX_MS ? delay_ms * 2 : RETRY_MAX_MS;
        error_clear(&err);
    }
    pthread_mutex_lock(&w->mutex);
    w->trouble = err;
    w->busy_since_ns = 0;
    pthread_mutex_unlock(&w->mutex);
    store_answers_post(w->answers, group);
}

/* Copies the WAL into the database, after the answers are out. A reader or an outside lock only puts it off. */
static void checkpoint(struct store_writer *w, int mode)
{
    sqlite3_busy_timeout(w->db.handle, 0);
    int log_frames = 0;
    if (sqlite3_wal_checkpoint_v2(w->db.handle, NULL, mode, &log_frames, NULL) == SQLITE_OK &&
        mode == SQLITE_CHECKPOINT_TRUNCATE)
        w->wal_pages = 0;
    sqlite3_busy_timeout(w->db.handle, STORE_BUSY_MS);
}

static int on_wal_commit(void *arg, sqlite3 *db, const char *schema, int pages)
{
    (void)db;
    (void)schema;
    ((struct store_writer *)arg)->wal_pages = pages;
    return SQLITE_OK;
}

static void after_commit(struct store_writer *w)
{
    if (w->wal_pages >= WAL_TRUNCATE_PAGES)
        checkpoint(w, SQLITE_CHECKPOINT_TRUNCATE);
    else if (w->wal_pages >= WAL_PASSIVE_PAGES)
        checkpoint(w, SQLITE_CHECKPOINT_PASSIVE);
    if (++w->commits_without_chore >= COMMITS_WITHOUT_CHORE && w->ops->chore) {
        w->commits_without_chore = 0;
        (void)w->ops->chore(w);
    }
}

/* Moves up to GROUP_MAX pieces from the queue. With the mutex held. */
static void take_group(struct store_writer *w, struct store_work_list *group)
{
    for (int n = 0; w->queue.head && n < GROUP_MAX; n++) {
        struct store_work *work = w->queue.head;
        w->queue.head = work->next;
        w->queued -= work->mem.used;
        store_work_list_add(group, work);
    }
    if (!w->queue.head)
        store_work_list_init(&w->queue);
    w->busy_since_ns = clock_mono_ns();
}

static void *writer_main(void *arg)
{
    struct store_writer *w = arg;
    if (w->db.unchecked)
        check_late(w);
    bool chores = w->ops->chore != NULL && !w->broken;
    for (;;) {
        struct store_work_list group;
        store_work_list_init(&group);
        pthread_mutex_lock(&w->mutex);
        int64_t idle_at = clock_mono_ns() + IDLE_MS * NS_PER_MS;
        bool idle = false;
        while (!w->queue.head && !w->stopping && !chores && !idle) {
            if (w->wal_pages > 0) {
                wait_until(w, idle_at);
                idle = clock_mono_ns() >= idle_at;
            } else {
                pthread_cond_wait(&w->wake, &w->mutex);
            }
        }
        bool end = w->stopping && !w->queue.head;
        take_group(w, &group);
        if (!group.head)
            w->busy_since_ns = 0;
        pthread_mutex_unlock(&w->mutex);

        if (end)
            break;
        if (group.head && w->broken) {
            refuse(w, &group);
        } else if (group.head) {
            commit_until_done(w, &group);
            after_commit(w);
            chores = w->ops->chore != NULL;
        } else if (chores) {
            w->commits_without_chore = 0;
            chores = w->ops->chore(w);
        } else {
            checkpoint(w, SQLITE_CHECKPOINT_TRUNCATE);
            w->wal_pages = 0; /* when a reader was in the way: again after the next commit */
        }
    }
    checkpoint(w, SQLITE_CHECKPOINT_TRUNCATE);
    return NULL;
}

/* ---- the loop's side -------------------------------------------------------------- */

static int prepare_statements(struct store_writer *w, struct error *err)
{
    const struct {
        sqlite3_stmt **stmt;
        const char *sql;
    } all[] = {
        {&w->begin, "BEGIN IMMEDIATE"},       {&w->commit, "COMMIT"},
        {&w->rollback, "ROLLBACK"},           {&w->savepoint, "SAVEPOINT one"},
        {&w->release, "RELEASE SAVEPOINT one"}, {&w->undo, "ROLLBACK TO SAVEPOINT one"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        int rc = store_db_prepare(&w->db, all[i].sql, all[i].stmt, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

int store_writer_start(struct store_writer *w, const char *thread_name, struct error *err)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&w->mutex, NULL);
    store_work_list_init(&w->queue);
    sqlite3_wal_hook(w->db.handle, on_wal_commit, w);
    w->checking = w->db.unchecked;
    w->wal_pages = 1; /* what an earlier run left is emptied at the first quiet moment */
    int rc = prepare_statements(w, err);
    if (!rc)
        rc = store_thread_start(&w->thread, thread_name, writer_main, w, err);
    w->started = rc == ERR_OK;
    if (rc) {
        pthread_cond_destroy(&w->wake);
        pthread_mutex_destroy(&w->mutex);
    }
    return rc;
}

void store_writer_stop(struct store_writer *w)
{
    if (w->started) {
        pthread_mutex_lock(&w->mutex);
        w->stopping = true;
        w->stop_ns = clock_mono_ns();
        pthread_cond_signal(&w->wake);
        while (w->checking) { /* again and again: one that comes before the check has begun is lost */
            sqlite3_interrupt(w->db.handle);
            wait_until(w, clock_mono_ns() + 10 * NS_PER_MS);
        }
        pthread_mutex_unlock(&w->mutex);
        pthread_join(w->thread, NULL);
    }
    sqlite3_stmt **all[] = {&w->begin, &w->commit, &w->rollback, &w->savepoint, &w->release, &w->undo};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        sqlite3_finalize(*all[i]);
        *all[i] = NULL;
    }
    if (w->ops && w->state)
        w->ops->free(w);
    w->state = NULL;
    store_db_close(&w->db);
}

void store_writer_add(struct store_writer *w, struct store_work *work)
{
    pthread_mutex_lock(&w->mutex);
    if (w->stopping) {
        work->rc = error_set(&work->err, ERR_CANCELLED, "%s: the store is closing", w->db.name);
    } else if (w->max_queued && w->queued && w->queued + work->mem.used > w->max_queued) {
        work->rc = error_set(&work->err, ERR_REFUSED, "%s: %zu MiB wait to be written%s%s", w->db.name,
                             w->queued >> 20, w->trouble.code ? ": " : "", w->trouble.message);
        error_hint(&work->err, "send it again later");
    }
    bool refused = work->rc != ERR_OK;
    if (!refused) {
        bool was_empty = !w->queue.head;
        w->queued += work->mem.used;
        store_work_list_add(&w->queue, work);
        if (was_empty)
            pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&w->mutex);
    if (refused) {
        struct store_work_list one;
        store_work_list_init(&one);
        store_work_list_add(&one, work);
        store_answers_post(w->answers, &one);
    }
}

int store_writer_health(struct store_writer *w, struct error *err)
{
    pthread_mutex_lock(&w->mutex);
    struct error trouble = w->trouble;
    int64_t since = w->busy_since_ns;
    pthread_mutex_unlock(&w->mutex);
    if (trouble.code) {
        if (err)
            *err = trouble;
        return (int)trouble.code;
    }
    int64_t waited_ns = since ? clock_mono_ns() - since : 0;
    if (waited_ns < HANGING_MS * NS_PER_MS) {
        error_clear(err);
        return ERR_OK;
    }
    error_set(err, ERR_TIMEOUT, "%s: a commit has waited %lld s for the disk", w->db.name,
              (long long)(waited_ns / NS_PER_S));
    error_hint(err, "check the disk and the mount of %s", w->db.path);
    return ERR_TIMEOUT;
}
