/* Reads while the daemon runs: one thread with connections of its own, so that a long page
 * neither holds up a commit (WAL) nor the loop. */
#include <stdlib.h>
#include <string.h>

#include "store/internal.h"

enum {
    PAGE_ROWS = 10000,
    PAGE_BYTES = 64 << 20,
};

struct read_request {
    struct store_work work; /* first: a request is a piece of work */
    void (*read)(struct store_reader *r, struct read_request *q);
    int64_t job, after;
    int rank, limit;
    bool newest_first;
    void *rows; /* struct store_event or store_metric_row [n], in work.mem */
    size_t n;
    store_events_fn events_done;
    store_metrics_fn metrics_done;
    void *arg;
};

static void finish(struct store_work *work)
{
    struct read_request *q = (struct read_request *)work;
    size_t n = work->rc ? 0 : q->n;
    if (q->events_done)
        q->events_done(q->arg, q->rows, n, work->rc, &work->err);
    if (q->metrics_done)
        q->metrics_done(q->arg, q->rows, n, work->rc, &work->err);
    arena_free(&work->mem);
    free(q);
}

static int out_of_memory(struct read_request *q, struct store_db *db)
{
    return q->work.rc = error_set(&q->work.err, ERR_NOMEM, "%s: a page of %d rows does not fit in memory", db->name,
                                  q->limit);
}

/* A page that outgrows its memory is cut short: the caller's cursor goes on behind it. An error when there is none. */
static void page_end(struct read_request *q, struct store_db *db, int code, bool full)
{
    if (full && q->n == 0)
        out_of_memory(q, db);
    else if (!full && code != SQLITE_DONE)
        q->work.rc = store_db_error(db, code, "read", &q->work.err);
}

/* ---- events ------------------------------------------------------------------------ */

static void read_events(struct store_reader *r, struct read_request *q)
{
    const struct store_table *t = &store_tables[ROW_EVENT];
    sqlite3_stmt *stmt = r->events[(q->job ? 2 : 0) + (q->newest_first ? 1 : 0)];
    struct store_event *rows = arena_alloc(&q->work.mem, (size_t)q->limit * sizeof *rows);
    if (!rows) {
        out_of_memory(q, &r->state_db);
        return;
    }
    q->rows = rows;
    sqlite3_bind_int64(stmt, 1, q->after);
    sqlite3_bind_int(stmt, 2, q->limit);
    if (q->job)
        sqlite3_bind_int64(stmt, 3, q->job);
    int code;
    bool full = false;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        struct store_event row;
        store_row_read(stmt, t, &row);
        const struct store_event *copy = store_row_copy(&q->work.mem, t, &row);
        if ((full = copy == NULL))
            break;
        rows[q->n++] = *copy;
    }
    page_end(q, &r->state_db, code, full);
    sqlite3_reset(stmt);
    for (size_t i = 0, j = q->n; q->newest_first && i + 1 < j; i++) {
        struct store_event swap = rows[i];
        rows[i] = rows[--j];
        rows[j] = swap;
    }
}

/* ---- metrics ----------------------------------------------------------------------- */

/* Columns: row, attempt, step, wall_ns, level, merged, names, data. */
static bool read_metric(sqlite3_stmt *stmt, struct arena *mem, struct store_metric_row *row)
{
    int level = sqlite3_column_int(stmt, 4);
    size_t per_name = level == METRIC_FULL ? 1 : METRIC_SUMMARY_VALUES;
    size_t names_len = (size_t)sqlite3_column_bytes(stmt, 6);
    const uint8_t *data = sqlite3_column_blob(stmt, 7);
    size_t n = (size_t)sqlite3_column_bytes(stmt, 7) / 8 / per_name;
    char *text = arena_alloc(mem, names_len);
    const char **names = arena_alloc(mem, n * sizeof *names);
    double *values = arena_alloc(mem, n * 3 * sizeof *values);
    if (!text || !names || !values)
        return false;
    if (names_len)
        memcpy(text, sqlite3_column_blob(stmt, 6), names_len);
    double *mins = level == METRIC_FULL ? values : values + n, *maxs = level == METRIC_FULL ? values : values + 2 * n;
    size_t at = 0, have = 0;
    for (; have < n && at < names_len; have++) {
        names[have] = text + at;
        at += strlen(text + at) + 1;
        const uint8_t *v = data + have * per_name * 8;
        values[have] = store_f64_read(v);
        if (level != METRIC_FULL) {
            mins[have] = store_f64_read(v + 8);
            maxs[have] = store_f64_read(v + 16);
        }
    }
    *row = (struct store_metric_row){
        .row = sqlite3_column_int64(stmt, 0),
        .attempt = sqlite3_column_int(stmt, 1),
        .step = sqlite3_column_int64(stmt, 2),
        .wall_ns = sqlite3_column_int64(stmt, 3),
        .n = (int)have,
        .names = names,
        .values = values,
        .merged = sqlite3_column_int(stmt, 5),
        .mins = mins,
        .maxs = maxs,
    };
    return true;
}

static void read_metrics(struct store_reader *r, struct read_request *q)
{
    struct store_metric_row *rows = arena_alloc(&q->work.mem, (size_t)q->limit * sizeof *rows);
    if (!rows) {
        out_of_memory(q, &r->metrics_db);
        return;
    }
    q->rows = rows;
    sqlite3_bind_int64(r->metrics, 1, q->job);
    sqlite3_bind_int(r->metrics, 2, q->rank);
    sqlite3_bind_int64(r->metrics, 3, q->after);
    sqlite3_bind_int(r->metrics, 4, q->limit);
    int code;
    bool full = false;
    while ((code = sqlite3_step(r->metrics)) == SQLITE_ROW) {
        if ((full = !read_metric(r->metrics, &q->work.mem, &rows[q->n])))
            break;
        q->n++;
    }
    page_end(q, &r->metrics_db, code, full);
    sqlite3_reset(r->metrics);
}

/* ---- the loop's side ---------------------------------------------------------------- */

static void answer(struct store_reader *r, struct read_request *q)
{
    struct store_work_list one;
    store_work_list_init(&one);
    store_work_list_add(&one, &q->work);
    store_answers_post(r->answers, &one);
}

static void ask(struct store_reader *r, const struct read_request *wanted)
{
    struct read_request *q = malloc(sizeof *q);
    if (!q) { /* nothing to queue an answer with: the one callback that comes inside the call */
        struct error err;
        int rc = error_set(&err, ERR_NOMEM, "read of job %lld: out of memory", (long long)wanted->job);
        if (wanted->events_done)
            wanted->events_done(wanted->arg, NULL, 0, rc, &err);
        if (wanted->metrics_done)
            wanted->metrics_done(wanted->arg, NULL, 0, rc, &err);
        return;
    }
    *q = *wanted;
    q->work.finish = finish;
    q->limit = q->limit < 1 ? 1 : q->limit > PAGE_ROWS ? PAGE_ROWS : q->limit;
    arena_init(&q->work.mem, PAGE_BYTES);
    pthread_mutex_lock(&r->mutex);
    bool refused = r->stopping;
    if (!refused) {
        store_work_list_add(&r->queue, &q->work);
        pthread_cond_signal(&r->wake);
    }
    pthread_mutex_unlock(&r->mutex);
    if (refused) {
        q->work.rc = error_set(&q->work.err, ERR_CANCELLED, "read of job %lld: the store is closing",
                               (long long)q->job);
        answer(r, q);
    }
}

void store_read_events(struct store *s, int64_t job, int64_t after_id, int limit, bool newest_first,
                       store_events_fn done, void *arg)
{
    struct read_request q = {.read = read_events, .job = job, .after = after_id, .limit = limit,
                             .newest_first = newest_first, .events_done = done, .arg = arg};
    ask(&s->reader, &q);
}

void store_read_metrics(struct store *s, int64_t job, int rank, int64_t after_row, int limit, store_metrics_fn done,
                        void *arg)
{
    struct read_request q = {.read = read_metrics, .job = job, .rank = rank, .after = after_row, .limit = limit,
                             .metrics_done = done, .arg = arg};
    ask(&s->reader, &q);
}

static void *reader_main(void *arg)
{
    struct store_reader *r = arg;
    for (;;) {
        pthread_mutex_lock(&r->mutex);
        while (!r->queue.head && !r->stopping)
            pthread_cond_wait(&r->wake, &r->mutex);
        struct read_request *q = (struct read_request *)r->queue.head;
        if (q) {
            r->queue.head = q->work.next;
            if (!r->queue.head)
                store_work_list_init(&r->queue);
        }
        pthread_mutex_unlock(&r->mutex);
        if (!q)
            return NULL;
        q->read(r, q);
        answer(r, q);
    }
}

static int prepare_events(struct store_reader *r, struct error *err)
{
    struct buffer sql;
    buffer_init(&sql, 16 << 10);
    int rc = ERR_OK;
    for (int i = 0; !rc && i < 4; i++) {
        buffer_clear(&sql);
        store_row_select_sql(&store_tables[ROW_EVENT], &sql);
        buffer_printf(&sql, " WHERE id > ?1%s ORDER BY id%s LIMIT ?2", i & 2 ? " AND job = ?3" : "",
                      i & 1 ? " DESC" : "");
        rc = sql.failed ? error_set(err, ERR_NOMEM, "state.db: out of memory")
                        : store_db_prepare(&r->state_db, (const char *)sql.data, &r->events[i], err);
    }
    buffer_free(&sql);
    return rc;
}

int store_reader_start(struct store_reader *r, const char *dir, struct error *err)
{
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->wake, NULL);
    store_work_list_init(&r->queue);
    int rc = store_db_open(&r->state_db, dir, store_state_schema.name, STORE_DB_READ, err);
    if (!rc)
        rc = store_db_open(&r->metrics_db, dir, store_metrics_schema.name, STORE_DB_READ, err);
    if (!rc)
        rc = prepare_events(r, err);
    if (!rc)
        rc = store_db_prepare(&r->metrics_db,
                              "SELECT m.row, m.attempt, m.step, m.wall_ns, m.level, m.merged, n.names, m.data"
                              " FROM metric m JOIN metric_names n ON n.id = m.names"
                              " WHERE m.job = ? AND m.rank = ? AND m.row > ? ORDER BY m.row LIMIT ?",
                              &r->metrics, err);
    if (!rc)
        rc = store_thread_start(&r->thread, "store-read", reader_main, r, err);
    r->started = rc == ERR_OK;
    return rc;
}

void store_reader_stop(struct store_reader *r)
{
    if (r->started) {
        pthread_mutex_lock(&r->mutex);
        r->stopping = true;
        pthread_cond_signal(&r->wake);
        pthread_mutex_unlock(&r->mutex);
        pthread_join(r->thread, NULL);
    }
    for (int i = 0; i < 4; i++)
        sqlite3_finalize(r->events[i]);
    sqlite3_finalize(r->metrics);
    store_db_close(&r->state_db);
    store_db_close(&r->metrics_db);
}
