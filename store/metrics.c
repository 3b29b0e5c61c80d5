/* What the writer of metrics.db does: batches of a rank's metrics, each row once, and the
 * highest number up to which nothing is missing. The layout is in schema.c. */
#include <stdlib.h>
#include <string.h>

#include "store/internal.h"

enum { BATCH_BYTES = 32 << 20 };

struct batch_row {
    int64_t seq, step, wall_ns;
    const void *names; /* each NUL-terminated, joined; shared by rows in a row that name the same */
    size_t names_len;
    const void *data; /* little-endian doubles */
    size_t data_len;
};
struct batch {
    struct store_work work; /* first: a batch is a piece of work */
    int64_t job;
    int attempt, rank, n;
    struct batch_row *rows;
    store_done_fn done;
    void *arg;
};
struct series {
    int64_t contiguous_seq, max_seq, last_step;
};

void store_f64_write(uint8_t *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)(bits >> (8 * i));
}

double store_f64_read(const uint8_t *at)
{
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits |= (uint64_t)at[i] << (8 * i);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- the loop's side -------------------------------------------------------------- */

static void finish(struct store_work *work)
{
    struct batch *b = (struct batch *)work;
    if (b->done)
        b->done(b->arg, work->rc, &work->err);
    arena_free(&work->mem);
    free(b);
}

static int encode_row(struct arena *mem, const struct store_metric *m, const struct batch_row *before,
                      struct batch_row *row)
{
    *row = (struct batch_row){.seq = m->seq, .step = m->step, .wall_ns = m->wall_ns};
    for (int i = 0; i < m->n; i++)
        row->names_len += strlen(m->names[i]) + 1;
    char *names = arena_alloc(mem, row->names_len);
    uint8_t *data = arena_alloc(mem, (size_t)m->n * 8);
    if (!names || !data)
        return ERR_NOMEM;
    size_t at = 0;
    for (int i = 0; i < m->n; i++) {
        size_t len = strlen(m->names[i]) + 1;
        memcpy(names + at, m->names[i], len);
        at += len;
        store_f64_write(data + 8 * i, m->values[i]);
    }
    bool same = before && before->names_len == row->names_len && !memcmp(before->names, names, row->names_len);
    row->names = same ? before->names : names;
    row->data = data;
    row->data_len = (size_t)m->n * 8;
    return ERR_OK;
}

static int encode(struct batch *b, const struct store_metric *rows, int n, struct error *err)
{
    b->n = n;
    b->rows = arena_alloc(&b->work.mem, (size_t)n * sizeof *b->rows);
    int rc = b->rows ? ERR_OK : ERR_NOMEM;
    for (int i = 0; !rc && i < n; i++) {
        if (rows[i].seq < 1)
            return error_set(err, ERR_INVALID, "metrics of job %lld rank %d: sequence number %lld, they start at 1",
                             (long long)b->job, b->rank, (long long)rows[i].seq);
        rc = encode_row(&b->work.mem, &rows[i], i ? &b->rows[i - 1] : NULL, &b->rows[i]);
    }
    if (rc)
        error_set(err, ERR_NOMEM, "metrics of job %lld rank %d: %d rows do not fit in memory (limit %d MiB)",
                  (long long)b->job, b->rank, n, BATCH_BYTES >> 20);
    return rc;
}


void store_add_metrics(struct store *s, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                       store_done_fn done, void *arg)
{
    struct batch *b = calloc(1, sizeof *b);
    if (!b) { /* nothing to queue an answer with: the one callback that comes inside the call */
        struct error err;
        int rc = error_set(&err, ERR_NOMEM, "metrics of job %lld rank %d: out of memory", (long long)job, rank);
        if (done)
            done(arg, rc, &err);
        return;
    }
    b->work.finish = finish;
    b->job = job;
    b->attempt = attempt;
    b->rank = rank;
    b->done = done;
    b->arg = arg;
    arena_init(&b->work.mem, BATCH_BYTES);
    b->work.rc = encode(b, rows, n, &b->work.err);
    store_writer_add(&s->metrics, &b->work);
}

/* ---- the writer's side ------------------------------------------------------------- */

static int64_t *cached_id(struct store_metrics_state *m, const void *names, size_t len)
{
    for (size_t i = 0; i < sizeof m->cache / sizeof m->cache[0]; i++)
        if (m->cache[i].names && m->cache[i].len == len && !memcmp(m->cache[i].names, names, len))
            return &m->cache[i].id;
    return NULL;
}

static void cache_id(struct store_metrics_state *m, const void *names, size_t len, int64_t id)
{
    void *copy = malloc(len ? len : 1);
    if (!copy)
        return; /* only slower */
    if (len)
        memcpy(copy, names, len);
    free(m->cache[m->cache_next].names);
    m->cache[m->cache_next].names = copy;
    m->cache[m->cache_next].len = len;
    m->cache[m->cache_next].id = id;
    m->cache_next = (m->cache_next + 1) % (int)(sizeof m->cache / sizeof m->cache[0]);
}

/* Ids made in a transaction that was lost are void. */
static void forget_names(struct store_writer *w)
{
    struct store_metrics_state *m = w->state;
    for (size_t i = 0; i < sizeof m->cache / sizeof m->cache[0]; i++) {
        free(m->cache[i].names);
        m->cache[i].names = NULL;
    }
}

int store_metric_names_id(struct store_writer *w, const void *names, size_t len, int64_t *id)
{
    struct store_metrics_state *m = w->state;
    int64_t *known = cached_id(m, names, len);
    if (known) {
        *id = *known;
        return SQLITE_OK;
    }
    const void *blob = len ? names : "";
    sqlite3_bind_blob64(m->find_names, 1, blob, len, SQLITE_STATIC);
    int code = sqlite3_step(m->find_names);
    bool found = code == SQLITE_ROW;
    if (found)
        *id = sqlite3_column_int64(m->find_names, 0);
    sqlite3_reset(m->find_names);
    if (!found && code != SQLITE_DONE)
        return code;
    if (!found) {
        sqlite3_bind_blob64(m->add_names, 1, blob, len, SQLITE_STATIC);
        if ((code = store_db_step(m->add_names)))
            return code;
        *id = sqlite3_last_insert_rowid(w->db.handle);
    }
    cache_id(m, names, len, *id);
    return SQLITE_OK;
}

static void bind_key(sqlite3_stmt *stmt, const struct batch *b)
{
    sqlite3_bind_int64(stmt, 1, b->job);
    sqlite3_bind_int(stmt, 2, b->attempt);
    sqlite3_bind_int(stmt, 3, b->rank);
}

static int find_series(struct store_metrics_state *m, const struct batch *b, struct series *s)
{
    *s = (struct series){.last_step = INT64_MIN};
    bind_key(m->find_series, b);
    int code = sqlite3_step(m->find_series);
    if (code == SQLITE_ROW) {
        s->contiguous_seq = sqlite3_column_int64(m->find_series, 0);
        s->max_seq = sqlite3_column_int64(m->find_series, 1);
        s->last_step = sqlite3_column_int64(m->find_series, 2);
        code = SQLITE_DONE;
    }
    sqlite3_reset(m->find_series);
    return code == SQLITE_DONE ? SQLITE_OK : code;
}

static int add_row(struct store_writer *w, const struct batch *b, const struct batch_row *row)
{
    struct store_metrics_state *m = w->state;
    int64_t names = 0;
    int code = store_metric_names_id(w, row->names, row->names_len, &names);
    if (code)
        return code;
    bind_key(m->add_row, b);
    sqlite3_bind_int64(m->add_row, 4, row->seq);
    sqlite3_bind_int64(m->add_row, 5, row->step);
    sqlite3_bind_int64(m->add_row, 6, row->wall_ns);
    sqlite3_bind_int64(m->add_row, 7, names);
    sqlite3_bind_blob64(m->add_row, 8, row->data_len ? row->data : "", row->data_len, SQLITE_STATIC);
    return store_db_step(m->add_row);
}

/* A gap was there before or is now: walk the stored rows from the last contiguous one. */
static int close_gap(struct store_metrics_state *m, const struct batch *b, struct series *s)
{
    bind_key(m->next_seqs, b);
    sqlite3_bind_int64(m->next_seqs, 4, s->contiguous_seq);
    int code;
    while ((code = sqlite3_step(m->next_seqs)) == SQLITE_ROW) {
        if (sqlite3_column_int64(m->next_seqs, 0) != s->contiguous_seq + 1)
            break;
        s->contiguous_seq++;
    }
    sqlite3_reset(m->next_seqs);
    return code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code;
}

static int put_series(struct store_metrics_state *m, const struct batch *b, const struct series *s, int64_t step_before)
{
    bind_key(m->put_series, b);
    sqlite3_bind_int64(m->put_series, 4, s->contiguous_seq);
    sqlite3_bind_int64(m->put_series, 5, s->max_seq);
    sqlite3_bind_int64(m->put_series, 6, s->last_step);
    int code = store_db_step(m->put_series);
    bool passed = step_before == INT64_MIN || s->last_step / METRIC_THIN_STRIDE != step_before / METRIC_THIN_STRIDE;
    if (code || s->last_step <= METRIC_KEEP_FULL || !passed)
        return code;
    /* All attempts: what an earlier one left ages with the newest step of the job. */
    sqlite3_bind_int64(m->mark_due, 1, b->job);
    sqlite3_bind_int(m->mark_due, 2, b->rank);
    return store_db_step(m->mark_due);
}

static int apply(struct store_writer *w, struct store_work *work, struct error *err)
{
    struct store_metrics_state *m = w->state;
    const struct batch *b = (const struct batch *)work;
    struct series s;
    int code = find_series(m, b, &s);
    int64_t step_before = s.last_step;
    for (int i = 0; !code && i < b->n; i++) {
        const struct batch_row *row = &b->rows[i];
        if (row->seq <= s.contiguous_seq) /* a repeat, perhaps of one that has been thinned away */
            continue;
        code = add_row(w, b, row);
        if (row->seq == s.contiguous_seq + 1)
            s.contiguous_seq++;
        s.max_seq = row->seq > s.max_seq ? row->seq : s.max_seq;
        s.last_step = row->step > s.last_step ? row->step : s.last_step;
    }
    if (!code && s.max_seq > s.contiguous_seq)
        code = close_gap(m, b, &s);
    if (!code && b->n)
        code = put_series(m, b, &s, step_before);
    if (code)
        store_db_error(&w->db, code, "metrics", err);
    return code;
}

static void free_state(struct store_writer *w)
{
    struct store_metrics_state *m = w->state;
    sqlite3_stmt *all[] = {m->find_names, m->add_names, m->find_series, m->put_series, m->mark_due,
                           m->add_row,    m->next_seqs, m->find_due,    m->horizon,    m->slice,
                           m->drop_rows,  m->replace_row, m->set_thinned};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        sqlite3_finalize(all[i]);
    forget_names(w);
    free(m);
}

static const struct store_writer_ops ops = {
    .apply = apply,
    .rolled_back = forget_names,
    .chore = store_metrics_thin,
    .free = free_state,
};

int store_metrics_init(struct store_writer *w, struct error *err)
{
    struct store_metrics_state *m = calloc(1, sizeof *m);
    if (!m)
        return error_set(err, ERR_NOMEM, "metrics.db: out of memory");
    w->state = m;
    w->ops = &ops;
    const struct {
        sqlite3_stmt **stmt;
        const char *sql;
    } all[] = {
        {&m->find_names, "SELECT id FROM metric_names WHERE names = ?"},
        {&m->add_names, "INSERT INTO metric_names (names) VALUES (?)"},
        {&m->find_series, "SELECT contiguous_seq, max_seq, last_step FROM metric_series"
                          " WHERE job = ? AND attempt = ? AND rank = ?"},
        {&m->put_series, "INSERT INTO metric_series (job, attempt, rank, contiguous_seq, max_seq, last_step)"
                         " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (job, attempt, rank) DO UPDATE SET"
                         " contiguous_seq = excluded.contiguous_seq, max_seq = excluded.max_seq,"
                         " last_step = excluded.last_step"},
        {&m->mark_due, "UPDATE metric_series SET due = 1 WHERE job = ? AND rank = ?"},
        {&m->add_row, "INSERT INTO metric (job, attempt, rank, seq, step, wall_ns, level, merged, names, data)"
                      " VALUES (?, ?, ?, ?, ?, ?, 0, 1, ?, ?) ON CONFLICT (job, attempt, rank, seq) DO NOTHING"},
        {&m->next_seqs, "SELECT seq FROM metric WHERE job = ? AND attempt = ? AND rank = ? AND seq > ?"
                        " ORDER BY seq"},
        {&m->find_due, "SELECT job, attempt, rank, contiguous_seq, thin_seq, coarse_seq FROM metric_series"
                       " WHERE due = 1 LIMIT 1"},
        {&m->horizon, "SELECT max(last_step) FROM metric_series WHERE job = ? AND rank = ?"},
        {&m->slice, "SELECT m.row, m.seq, m.step, m.wall_ns, m.level, m.merged, n.names, m.data FROM metric m"
                    " JOIN metric_names n ON n.id = m.names"
                    " WHERE m.job = ? AND m.attempt = ? AND m.rank = ? AND m.seq > ? AND m.seq <= ?"
                    " ORDER BY m.seq LIMIT ?"},
        {&m->drop_rows, "DELETE FROM metric WHERE job = ? AND attempt = ? AND rank = ? AND seq >= ? AND seq < ?"},
        {&m->replace_row, "UPDATE metric SET level = ?, merged = ?, names = ?, data = ? WHERE row = ?"},
        {&m->set_thinned, "UPDATE metric_series SET thin_seq = ?, coarse_seq = ?, due = ?"
                          " WHERE job = ? AND attempt = ? AND rank = ?"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        int rc = store_db_prepare(&w->db, all[i].sql, all[i].stmt, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}
