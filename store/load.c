/* Boot: every row of a table in key order, synchronously, on the caller's connection. */
#include "store/internal.h"

/* Hands each row to `each`; the row lives until it returns. */
static int load_table(struct store *s, enum store_row_kind kind, void (*each)(void *ctx, const void *row), void *ctx,
                      struct error *err)
{
    const struct store_table *t = &store_tables[kind];
    struct buffer sql;
    sqlite3_stmt *stmt = NULL;
    _Alignas(16) char row[STORE_ROW_MAX];
    buffer_init(&sql, 16 << 10);
    store_row_select_sql(t, &sql);
    buffer_append_str(&sql, " ORDER BY ");
    for (int i = 0; i < t->keys; i++)
        buffer_printf(&sql, "%s%s", i ? ", " : "", t->columns[i].name);
    int rc = sql.failed ? error_set(err, ERR_NOMEM, "state.db: out of memory")
                        : store_db_prepare(&s->boot_state, (const char *)sql.data, &stmt, err);
    if (rc)
        goto out;
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        store_row_read(stmt, t, row);
        each(ctx, row);
    }
    if (code != SQLITE_DONE)
        rc = store_db_error(&s->boot_state, code, t->name, err);
out:
    sqlite3_finalize(stmt);
    buffer_free(&sql);
    return rc;
}

/* One typed door per table onto load_table, without casting function pointers. */
#define LOADER(kind, type, function) \
    struct type##_sink { \
        void (*each)(void *arg, const struct type *row); \
        void *arg; \
    }; \
    static void type##_give(void *ctx, const void *row) \
    { \
        const struct type##_sink *sink = ctx; \
        sink->each(sink->arg, row); \
    } \
    int function(struct store *s, void (*each)(void *arg, const struct type *), void *arg, struct error *err) \
    { \
        struct type##_sink sink = {each, arg}; \
        return load_table(s, kind, type##_give, &sink, err); \
    }

LOADER(ROW_JOB, store_job, store_load_jobs)
LOADER(ROW_ATTEMPT, store_attempt, store_load_attempts)
LOADER(ROW_NODE, store_node, store_load_nodes)
LOADER(ROW_CHECKPOINT, store_checkpoint, store_load_checkpoints)
LOADER(ROW_SHARD, store_shard, store_load_shards)

int store_load_metric_seqs(struct store *s, void (*each)(void *arg, int64_t job, int attempt, int rank, int64_t seq),
                           void *arg, struct error *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = store_db_prepare(&s->boot_metrics,
                              "SELECT job, attempt, rank, contiguous_seq FROM metric_series WHERE contiguous_seq > 0"
                              " ORDER BY job, attempt, rank",
                              &stmt, err);
    if (rc)
        return rc;
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW)
        each(arg, sqlite3_column_int64(stmt, 0), sqlite3_column_int(stmt, 1), sqlite3_column_int(stmt, 2),
             sqlite3_column_int64(stmt, 3));
    if (code != SQLITE_DONE)
        rc = store_db_error(&s->boot_metrics, code, "metric_series", err);
    sqlite3_finalize(stmt);
    return rc;
}
