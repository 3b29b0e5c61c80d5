/* Thinning of old metrics: every row for the newest METRIC_KEEP_FULL steps of a job, 1 in 10
 * for the METRIC_KEEP_TENS before them, 1 in 100 before that, with mean, minimum and maximum.
 *
 * Rows are merged by bucket, step / 10 and step / 100, within one (job, attempt, rank). The
 * merged row takes the place of the last one of its bucket, with its number and step, so the
 * order of arrival stays and a reader's cursor never sees it as new. One call works on a
 * slice of one series in a transaction of its own; the writer calls it while nothing waits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "store/internal.h"

enum {
    SLICE_ROWS = 2000,            /* some 10 ms: bounds how long a new batch may wait */
    SLICE_BYTES = 64 << 20,
};

struct key {
    int64_t job;
    int attempt, rank;
};
struct slice_row {
    int64_t row, seq, step;
    int level;
    int64_t merged;
    const char *names;
    size_t names_len;
    const uint8_t *data;
    size_t values; /* numbers in data */
};
struct slice {
    struct arena mem;
    struct slice_row *rows;
    int n;
    bool more; /* the series has rows behind these */
};
/* One metric of a bucket. */
struct summary {
    const char *name;
    double sum, min, max, count;
};

static void bind_key(sqlite3_stmt *stmt, const struct key *k)
{
    sqlite3_bind_int64(stmt, 1, k->job);
    sqlite3_bind_int(stmt, 2, k->attempt);
    sqlite3_bind_int(stmt, 3, k->rank);
}

static void *copy_column(struct arena *mem, sqlite3_stmt *stmt, int i, size_t *len)
{
    const void *from = sqlite3_column_blob(stmt, i);
    *len = (size_t)sqlite3_column_bytes(stmt, i);
    void *to = arena_alloc(mem, *len);
    if (to && *len)
        memcpy(to, from, *len);
    return to;
}

/* The rows with after < seq <= upto and step < end, at most SLICE_ROWS. */
static int read_slice(struct store_metrics_state *m, const struct key *k, int64_t after, int64_t upto, int64_t end,
                      struct slice *s)
{
    s->n = 0;
    s->more = false;
    s->rows = arena_alloc(&s->mem, SLICE_ROWS * sizeof *s->rows);
    if (!s->rows)
        return SQLITE_NOMEM;
    bind_key(m->slice, k);
    sqlite3_bind_int64(m->slice, 4, after);
    sqlite3_bind_int64(m->slice, 5, upto);
    sqlite3_bind_int(m->slice, 6, SLICE_ROWS);
    int code;
    while ((code = sqlite3_step(m->slice)) == SQLITE_ROW) {
        struct slice_row *r = &s->rows[s->n];
        r->row = sqlite3_column_int64(m->slice, 0);
        r->seq = sqlite3_column_int64(m->slice, 1);
        r->step = sqlite3_column_int64(m->slice, 2);
        r->level = sqlite3_column_int(m->slice, 4);
        r->merged = sqlite3_column_int64(m->slice, 5);
        size_t data_len;
        r->names = copy_column(&s->mem, m->slice, 6, &r->names_len);
        r->data = copy_column(&s->mem, m->slice, 7, &data_len);
        r->values = data_len / 8;
        if (!r->names || !r->data) {
            code = SQLITE_NOMEM;
            break;
        }
        if (r->step >= end) {
            code = SQLITE_DONE;
            break;
        }
        s->n++;
    }
    s->more = s->n == SLICE_ROWS;
    sqlite3_reset(m->slice);
    return code == SQLITE_DONE ? SQLITE_OK : code;
}

static struct summary *summary_of(struct summary *all, int *n, int cap, const char *name, int guess)
{
    if (guess < *n && !strcmp(all[guess].name, name))
        return &all[guess];
    for (int i = 0; i < *n; i++)
        if (!strcmp(all[i].name, name))
            return &all[i];
    if (*n == cap)
        return NULL;
    all[*n] = (struct summary){.name = name, .min = NAN, .max = NAN};
    return &all[(*n)++];
}

static void add_to_summaries(struct summary *all, int *n, int cap, const struct slice_row *r)
{
    size_t per_name = r->level == METRIC_FULL ? 1 : METRIC_SUMMARY_VALUES;
    size_t at = 0;
    for (int i = 0; at < r->names_len && ((size_t)i + 1) * per_name <= r->values; i++) {
        const char *name = r->names + at;
        at += strlen(name) + 1;
        const uint8_t *v = r->data + 8 * per_name * (size_t)i;
        double mean = store_f64_read(v), min = mean, max = mean, count = isnan(mean) ? 0 : 1;
        if (r->level != METRIC_FULL) {
            min = store_f64_read(v + 8);
            max = store_f64_read(v + 16);
            count = store_f64_read(v + 24);
        }
        struct summary *s = summary_of(all, n, cap, name, i);
        if (!s || count == 0)
            continue;
        s->sum += mean * count;
        s->count += count;
        s->min = fmin(s->min, min); /* of a number and a NaN, the number */
        s->max = fmax(s->max, max);
    }
}

static int count_names(const struct slice_row *rows, int n)
{
    int names = 0;
    for (int i = 0; i < n; i++)
        for (size_t at = 0; at < rows[i].names_len; at++)
            names += rows[i].names[at] == '\0';
    return names;
}

/* Puts one row of `level` in the place of the last of n. */
static int merge_bucket(struct store_writer *w, const struct key *k, struct arena *mem, const struct slice_row *rows,
                        int n, int level)
{
    struct store_metrics_state *m = w->state;
    int cap = count_names(rows, n), count = 0;
    struct summary *all = arena_alloc(mem, (size_t)cap * sizeof *all);
    if (!all)
        return SQLITE_NOMEM;
    int64_t merged = 0;
    size_t names_len = 0;
    for (int i = 0; i < n; i++) {
        add_to_summaries(all, &count, cap, &rows[i]);
        merged += rows[i].merged;
    }
    for (int i = 0; i < count; i++)
        names_len += strlen(all[i].name) + 1;
    size_t data_len = (size_t)count * METRIC_SUMMARY_VALUES * 8;
    char *names = arena_alloc(mem, names_len);
    uint8_t *data = arena_alloc(mem, data_len);
    if (!names || !data)
        return SQLITE_NOMEM;
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        size_t len = strlen(all[i].name) + 1;
        memcpy(names + at, all[i].name, len);
        at += len;
        uint8_t *v = data + (size_t)i * METRIC_SUMMARY_VALUES * 8;
        store_f64_write(v, all[i].count > 0 ? all[i].sum / all[i].count : (double)NAN);
        store_f64_write(v + 8, all[i].min);
        store_f64_write(v + 16, all[i].max);
        store_f64_write(v + 24, all[i].count);
    }
    int64_t names_id = 0;
    int code = store_metric_names_id(w, names, names_len, &names_id);
    if (code)
        return code;
    const struct slice_row *last = &rows[n - 1];
    bind_key(m->drop_rows, k);
    sqlite3_bind_int64(m->drop_rows, 4, rows[0].seq);
    sqlite3_bind_int64(m->drop_rows, 5, last->seq);
    if ((code = store_db_step(m->drop_rows)))
        return code;
    sqlite3_bind_int(m->replace_row, 1, level);
    sqlite3_bind_int64(m->replace_row, 2, merged);
    sqlite3_bind_int64(m->replace_row, 3, names_id);
    sqlite3_bind_blob64(m->replace_row, 4, data_len ? (const void *)data : "", data_len, SQLITE_STATIC);
    sqlite3_bind_int64(m->replace_row, 5, last->row);
    return store_db_step(m->replace_row);
}

/* Merges one slice into buckets of `span` steps below step `end`; *after goes behind what is merged. */
static int thin_level(struct store_writer *w, const struct key *k, int64_t *after, int64_t upto, int64_t end,
                      int64_t span, int level, bool *more)
{
    struct slice s;
    arena_init(&s.mem, SLICE_BYTES);
    int code = read_slice(w->state, k, *after, upto, end, &s);
    for (int first = 0, next; !code && first < s.n; first = next) {
        next = first + 1;
        while (next < s.n && s.rows[next].step / span == s.rows[first].step / span)
            next++;
        /* The last bucket of a full slice may go on behind it: left for the next slice, unless it is all there is. */
        if (s.more && next == s.n && first > 0)
            break;
        code = merge_bucket(w, k, &s.mem, s.rows + first, next - first, level);
        *after = s.rows[next - 1].seq;
    }
    *more = s.more;
    arena_free(&s.mem);
    return code;
}

static int64_t floor_to(int64_t step, int64_t span)
{
    return step > 0 ? step - step % span : 0;
}

static int thin_due_series(struct store_writer *w, bool *more)
{
    struct store_metrics_state *m = w->state;
    int code = sqlite3_step(m->find_due);
    *more = code == SQLITE_ROW;
    struct key k = {sqlite3_column_int64(m->find_due, 0), sqlite3_column_int(m->find_due, 1),
                    sqlite3_column_int(m->find_due, 2)};
    int64_t contiguous = sqlite3_column_int64(m->find_due, 3);
    int64_t thin = sqlite3_column_int64(m->find_due, 4), coarse = sqlite3_column_int64(m->find_due, 5);
    sqlite3_reset(m->find_due);
    if (code != SQLITE_ROW)
        return code == SQLITE_DONE ? SQLITE_OK : code;

    sqlite3_bind_int64(m->horizon, 1, k.job);
    sqlite3_bind_int(m->horizon, 2, k.rank);
    code = sqlite3_step(m->horizon);
    int64_t newest = sqlite3_column_int64(m->horizon, 0);
    sqlite3_reset(m->horizon);
    if (code != SQLITE_ROW)
        return code;

    bool again = false;
    code = thin_level(w, &k, &thin, contiguous, floor_to(newest - METRIC_KEEP_FULL, 10), 10, METRIC_TENS, &again);
    if (!code && !again)
        code = thin_level(w, &k, &coarse, thin, floor_to(newest - METRIC_KEEP_FULL - METRIC_KEEP_TENS, 100), 100,
                          METRIC_HUNDREDS, &again);
    if (code)
        return code;
    sqlite3_bind_int64(m->set_thinned, 1, thin);
    sqlite3_bind_int64(m->set_thinned, 2, coarse);
    sqlite3_bind_int(m->set_thinned, 3, again);
    sqlite3_bind_int64(m->set_thinned, 4, k.job);
    sqlite3_bind_int(m->set_thinned, 5, k.attempt);
    sqlite3_bind_int(m->set_thinned, 6, k.rank);
    return store_db_step(m->set_thinned);
}

bool store_metrics_thin(struct store_writer *w)
{
    bool more = false;
    /* Trouble with the disk shows at the next batch, which is retried; this is tried again after it. */
    if (store_db_step(w->begin))
        return false;
    int code = thin_due_series(w, &more);
    if (!code)
        code = store_db_step(w->commit);
    if (code) {
        if (!sqlite3_get_autocommit(w->db.handle))
            (void)store_db_step(w->rollback);
        w->ops->rolled_back(w);
        return false;
    }
    return more;
}
