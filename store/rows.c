/* The tables of state.db as data: one list of columns a row type, from which copying,
 * writing and reading follow. A new column is one line here and a migration. */
#include <math.h>
#include <string.h>

#include "store/internal.h"

#define INT(row, member) {#member, COLUMN_INT, offsetof(struct row, member), 0}
#define I64(row, member) {#member, COLUMN_I64, offsetof(struct row, member), 0}
#define U32(row, member) {#member, COLUMN_U32, offsetof(struct row, member), 0}
#define BOOL(row, member) {#member, COLUMN_BOOL, offsetof(struct row, member), 0}
#define F64(row, member) {#member, COLUMN_F64, offsetof(struct row, member), 0}
#define TEXT(row, member) {#member, COLUMN_TEXT, offsetof(struct row, member), 0}
#define BLOB(row, member) {#member, COLUMN_BLOB, offsetof(struct row, member), offsetof(struct row, member##_len)}

static const struct store_column job_columns[] = {
    I64(store_job, id),
    TEXT(store_job, name),
    U32(store_job, uid),
    U32(store_job, gid),
    TEXT(store_job, user),
    INT(store_job, state),
    INT(store_job, stop_target),
    INT(store_job, reason),
    TEXT(store_job, reason_text),
    BLOB(store_job, spec),
    BLOB(store_job, resolved),
    INT(store_job, priority),
    INT(store_job, attempt),
    INT(store_job, restarts_used),
    INT(store_job, stuck_attempts),
    INT(store_job, backoff_count),
    I64(store_job, step),
    I64(store_job, checkpoint_step),
    I64(store_job, submitted_ns),
    I64(store_job, started_ns),
    I64(store_job, ended_ns),
    F64(store_job, run_s),
    F64(store_job, productive_s),
    F64(store_job, detection_s),
    F64(store_job, restart_s),
    F64(store_job, replay_s),
    F64(store_job, queue_s),
    F64(store_job, loss),
    F64(store_job, eval_loss),
    BLOB(store_job, next_spec),
    BLOB(store_job, next_resolved),
    I64(store_job, next_step),
    I64(store_job, array_job),
    INT(store_job, array_index),
    INT(store_job, array_limit),
    I64(store_job, accounted_ns),
    I64(store_job, accounted_boot_ns),
    TEXT(store_job, accounted_boot),
    F64(store_job, attempt_s),
    F64(store_job, stall_s),
};
static const struct store_column node_columns[] = {
    TEXT(store_node, name),
    TEXT(store_node, boot_id),
    INT(store_node, admin),
    TEXT(store_node, admin_reason),
    TEXT(store_node, admin_by),
    I64(store_node, admin_ns),
    INT(store_node, cpu_slots),
    I64(store_node, memory_mib),
    U32(store_node, uid),
    TEXT(store_node, data_address),
    INT(store_node, gpus),
    TEXT(store_node, gpu_name),
    I64(store_node, gpu_mib),
    I64(store_node, drain_deadline_ns),
};
static const struct store_column attempt_columns[] = {
    I64(store_attempt, job),
    INT(store_attempt, attempt),
    I64(store_attempt, from_step),
    I64(store_attempt, to_step),
    TEXT(store_attempt, placement),
    I64(store_attempt, start_ns),
    I64(store_attempt, running_ns),
    I64(store_attempt, end_ns),
    INT(store_attempt, reason),
    TEXT(store_attempt, text),
    BOOL(store_attempt, fenced),
    I64(store_attempt, replay_until),
    TEXT(store_attempt, spares),
};
static const struct store_column checkpoint_columns[] = {
    I64(store_checkpoint, job),
    I64(store_checkpoint, step),
    INT(store_checkpoint, attempt),
    INT(store_checkpoint, state),
    TEXT(store_checkpoint, path),
    INT(store_checkpoint, world),
    I64(store_checkpoint, changed_ns),
    TEXT(store_checkpoint, note),
    INT(store_checkpoint, mirror),
    TEXT(store_checkpoint, mirror_url),
    TEXT(store_checkpoint, mirror_note),
    BOOL(store_checkpoint, pinned),
};
static const struct store_column shard_columns[] = {
    I64(store_shard, job),
    I64(store_shard, step),
    INT(store_shard, attempt),
    INT(store_shard, rank),
    TEXT(store_shard, file),
    I64(store_shard, bytes),
    U32(store_shard, crc32c),
    I64(store_shard, write_ms),
};
static const struct store_column event_columns[] = {
    I64(store_event, id),
    I64(store_event, wall_ns),
    I64(store_event, job),
    INT(store_event, attempt),
    TEXT(store_event, node),
    TEXT(store_event, actor),
    TEXT(store_event, kind),
    TEXT(store_event, text),
};

#define TABLE(name, keys, append_only) \
    {#name, name##_columns, (int)(sizeof name##_columns / sizeof name##_columns[0]), keys, append_only, \
     sizeof(struct store_##name)}
const struct store_table store_tables[ROW_KINDS] = {
    [ROW_JOB] = TABLE(job, 1, false),
    [ROW_NODE] = TABLE(node, 1, false),
    [ROW_ATTEMPT] = TABLE(attempt, 2, false),
    [ROW_CHECKPOINT] = TABLE(checkpoint, 3, false),
    [ROW_SHARD] = TABLE(shard, 4, false),
    [ROW_EVENT] = TABLE(event, 1, true),
};
_Static_assert(sizeof(struct store_job) <= STORE_ROW_MAX, "store_job is the largest row");

static const void *field(const void *row, size_t offset)
{
    return (const char *)row + offset;
}

void *store_row_copy(struct arena *mem, const struct store_table *t, const void *row)
{
    char *copy = arena_alloc(mem, t->row_size);
    if (!copy)
        return NULL;
    memcpy(copy, row, t->row_size);
    for (int i = 0; i < t->count; i++) {
        const struct store_column *c = &t->columns[i];
        if (c->type != COLUMN_TEXT && c->type != COLUMN_BLOB)
            continue;
        const char *from = *(const char *const *)field(row, c->offset);
        if (!from)
            continue;
        size_t len = c->type == COLUMN_TEXT ? strlen(from) + 1 : *(const size_t *)field(row, c->len_offset);
        char *to = arena_alloc(mem, len);
        if (!to)
            return NULL;
        if (len)
            memcpy(to, from, len);
        *(const char **)(void *)(copy + c->offset) = to;
    }
    return copy;
}

static void column_list(const struct store_table *t, struct buffer *sql)
{
    for (int i = 0; i < t->count; i++)
        buffer_printf(sql, "%s%s", i ? ", " : "", t->columns[i].name);
}

void store_row_put_sql(const struct store_table *t, struct buffer *sql)
{
    buffer_printf(sql, "INSERT INTO %s (", t->name);
    column_list(t, sql);
    buffer_append_str(sql, ") VALUES (");
    for (int i = 0; i < t->count; i++)
        buffer_append_str(sql, i ? ", ?" : "?");
    buffer_append_str(sql, ")");
    if (t->append_only)
        return;
    /* An upsert and not REPLACE, which deletes the old row and would break the references to it. */
    buffer_append_str(sql, " ON CONFLICT (");
    for (int i = 0; i < t->keys; i++)
        buffer_printf(sql, "%s%s", i ? ", " : "", t->columns[i].name);
    buffer_append_str(sql, ") DO UPDATE SET ");
    for (int i = t->keys; i < t->count; i++)
        buffer_printf(sql, "%s%s = excluded.%s", i > t->keys ? ", " : "", t->columns[i].name, t->columns[i].name);
}

void store_row_select_sql(const struct store_table *t, struct buffer *sql)
{
    buffer_append_str(sql, "SELECT ");
    column_list(t, sql);
    buffer_printf(sql, " FROM %s", t->name);
}

static int bind_pointer(sqlite3_stmt *stmt, int at, const struct store_column *c, const void *row)
{
    const char *p = *(const char *const *)field(row, c->offset);
    if (!p)
        return sqlite3_bind_null(stmt, at);
    if (c->type == COLUMN_TEXT)
        return sqlite3_bind_text(stmt, at, p, -1, SQLITE_STATIC);
    return sqlite3_bind_blob64(stmt, at, p, *(const size_t *)field(row, c->len_offset), SQLITE_STATIC);
}

int store_row_bind(sqlite3_stmt *stmt, const struct store_table *t, const void *row)
{
    int code = SQLITE_OK;
    for (int i = 0; !code && i < t->count; i++) {
        const struct store_column *c = &t->columns[i];
        const void *at = field(row, c->offset);
        switch (c->type) {
        case COLUMN_INT:
            code = sqlite3_bind_int(stmt, i + 1, *(const int *)at);
            break;
        case COLUMN_I64:
            code = sqlite3_bind_int64(stmt, i + 1, *(const int64_t *)at);
            break;
        case COLUMN_U32:
            code = sqlite3_bind_int64(stmt, i + 1, *(const uint32_t *)at);
            break;
        case COLUMN_BOOL:
            code = sqlite3_bind_int(stmt, i + 1, *(const bool *)at);
            break;
        case COLUMN_F64: /* SQLite makes NULL of a NaN; store_row_read makes NaN of it again */
            code = sqlite3_bind_double(stmt, i + 1, *(const double *)at);
            break;
        case COLUMN_TEXT:
        case COLUMN_BLOB:
            code = bind_pointer(stmt, i + 1, c, row);
            break;
        }
    }
    return code;
}

static void read_blob(sqlite3_stmt *stmt, int i, const struct store_column *c, char *row)
{
    const void *p = sqlite3_column_blob(stmt, i);
    if (!p && sqlite3_column_type(stmt, i) == SQLITE_BLOB)
        p = ""; /* an empty one, which is not the same as none */
    *(const void **)(void *)(row + c->offset) = p;
    *(size_t *)(void *)(row + c->len_offset) = (size_t)sqlite3_column_bytes(stmt, i);
}

void store_row_read(sqlite3_stmt *stmt, const struct store_table *t, void *row)
{
    memset(row, 0, t->row_size);
    for (int i = 0; i < t->count; i++) {
        const struct store_column *c = &t->columns[i];
        void *at = (char *)row + c->offset;
        switch (c->type) {
        case COLUMN_INT:
            *(int *)at = sqlite3_column_int(stmt, i);
            break;
        case COLUMN_I64:
            *(int64_t *)at = sqlite3_column_int64(stmt, i);
            break;
        case COLUMN_U32:
            *(uint32_t *)at = (uint32_t)sqlite3_column_int64(stmt, i);
            break;
        case COLUMN_BOOL:
            *(bool *)at = sqlite3_column_int(stmt, i) != 0;
            break;
        case COLUMN_F64:
            *(double *)at = sqlite3_column_type(stmt, i) == SQLITE_NULL ? (double)NAN : sqlite3_column_double(stmt, i);
            break;
        case COLUMN_TEXT:
            *(const char **)at = (const char *)sqlite3_column_text(stmt, i);
            break;
        case COLUMN_BLOB:
            read_blob(stmt, i, c, row);
            break;
        }
    }
}
