/* The two databases as numbered migrations, and the checks before one is trusted.
 *
 * A migration that has been released is never edited: a change is a new number. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/base/fs.h"
#include "store/internal.h"

static const struct store_migration state_migrations[] = {
    {1,
     "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;"
     "INSERT INTO meta VALUES ('store_id', lower(hex(randomblob(4))));"

     "CREATE TABLE job (id INTEGER PRIMARY KEY, name TEXT, uid INTEGER, gid INTEGER, user TEXT, state INTEGER,"
     " stop_target INTEGER, reason INTEGER, reason_text TEXT, spec BLOB, resolved BLOB, priority INTEGER,"
     " attempt INTEGER, restarts_used INTEGER, stuck_attempts INTEGER, backoff_count INTEGER, step INTEGER,"
     " checkpoint_step INTEGER, submitted_ns INTEGER, started_ns INTEGER, ended_ns INTEGER, run_s REAL,"
     " productive_s REAL, detection_s REAL, restart_s REAL, replay_s REAL, queue_s REAL, loss REAL,"
     " eval_loss REAL) STRICT;"

     "CREATE TABLE node (name TEXT PRIMARY KEY, boot_id TEXT, admin INTEGER, admin_reason TEXT, admin_by TEXT,"
     " admin_ns INTEGER, cpu_slots INTEGER, memory_mib INTEGER, uid INTEGER, data_address TEXT)"
     " STRICT, WITHOUT ROWID;"

     "CREATE TABLE attempt (job INTEGER REFERENCES job (id), attempt INTEGER, from_step INTEGER, to_step INTEGER,"
     " placement TEXT, start_ns INTEGER, running_ns INTEGER, end_ns INTEGER, reason INTEGER, text TEXT,"
     " fenced INTEGER, PRIMARY KEY (job, attempt)) STRICT, WITHOUT ROWID;"

     "CREATE TABLE checkpoint (job INTEGER REFERENCES job (id), step INTEGER, attempt INTEGER, state INTEGER,"
     " path TEXT, world INTEGER, changed_ns INTEGER, note TEXT, PRIMARY KEY (job, step, attempt))"
     " STRICT, WITHOUT ROWID;"

     "CREATE TABLE shard (job INTEGER, step INTEGER, attempt INTEGER, rank INTEGER, file TEXT, bytes INTEGER,"
     " crc32c INTEGER, write_ms INTEGER, PRIMARY KEY (job, step, attempt, rank),"
     " FOREIGN KEY (job, step, attempt) REFERENCES checkpoint (job, step, attempt)) STRICT, WITHOUT ROWID;"

     "CREATE TABLE event (id INTEGER PRIMARY KEY, wall_ns INTEGER, job INTEGER, attempt INTEGER, node TEXT,"
     " actor TEXT, kind TEXT, text TEXT) STRICT;"
     "CREATE INDEX event_by_job ON event (job);"},
    {2,
     "ALTER TABLE node ADD COLUMN gpus INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE node ADD COLUMN gpu_name TEXT;"
     "ALTER TABLE node ADD COLUMN gpu_mib INTEGER NOT NULL DEFAULT 0;"},
    {3,
     "ALTER TABLE job ADD COLUMN next_spec BLOB;"
     "ALTER TABLE job ADD COLUMN next_resolved BLOB;"
     "ALTER TABLE job ADD COLUMN next_step INTEGER NOT NULL DEFAULT -1;"
     "ALTER TABLE job ADD COLUMN accounted_ns INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE job ADD COLUMN stall_s REAL NOT NULL DEFAULT 0;"
     "ALTER TABLE attempt ADD COLUMN replay_until INTEGER NOT NULL DEFAULT -1;"
     "ALTER TABLE attempt ADD COLUMN spares TEXT;"
     "ALTER TABLE node ADD COLUMN drain_deadline_ns INTEGER NOT NULL DEFAULT 0;"},
    {4,
     "ALTER TABLE job ADD COLUMN array_job INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE job ADD COLUMN array_index INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE job ADD COLUMN array_limit INTEGER NOT NULL DEFAULT 0;"},
    {5,
     "ALTER TABLE checkpoint ADD COLUMN mirror INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE checkpoint ADD COLUMN mirror_url TEXT;"
     "ALTER TABLE checkpoint ADD COLUMN mirror_note TEXT;"},
    {6, "ALTER TABLE checkpoint ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;"},
    {7,
     "ALTER TABLE job ADD COLUMN accounted_boot_ns INTEGER NOT NULL DEFAULT 0;"
     "ALTER TABLE job ADD COLUMN accounted_boot TEXT;"
     "ALTER TABLE job ADD COLUMN attempt_s REAL NOT NULL DEFAULT -1;"},
};

/* metric.row ascends in order of arrival without AUTOINCREMENT: thinning keeps the last row of what it
 * merges, so the largest row is never deleted and no number is used twice.
 * metric_series: all rows up to contiguous_seq have come; those up to thin_seq are 1 in 10, those up to
 * coarse_seq 1 in 100; due = look whether there is something to thin. */
static const struct store_migration metrics_migrations[] = {
    {1,
     "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;"

     "CREATE TABLE metric_names (id INTEGER PRIMARY KEY, names BLOB NOT NULL UNIQUE) STRICT;"

     "CREATE TABLE metric (row INTEGER PRIMARY KEY, job INTEGER NOT NULL, attempt INTEGER NOT NULL,"
     " rank INTEGER NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL, wall_ns INTEGER NOT NULL,"
     " level INTEGER NOT NULL, merged INTEGER NOT NULL, names INTEGER NOT NULL REFERENCES metric_names (id),"
     " data BLOB NOT NULL, UNIQUE (job, attempt, rank, seq)) STRICT;"
     "CREATE INDEX metric_by_rank ON metric (job, rank);"

     "CREATE TABLE metric_series (job INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,"
     " contiguous_seq INTEGER NOT NULL, max_seq INTEGER NOT NULL, last_step INTEGER NOT NULL,"
     " thin_seq INTEGER NOT NULL DEFAULT 0, coarse_seq INTEGER NOT NULL DEFAULT 0, due INTEGER NOT NULL DEFAULT 0,"
     " PRIMARY KEY (job, attempt, rank)) STRICT, WITHOUT ROWID;"
     "CREATE INDEX metric_series_due ON metric_series (due) WHERE due = 1;"},
};

#define COUNT(a) ((int)(sizeof(a) / sizeof(a)[0]))

/* The application ids are "BSTS" and "BSTM" in ASCII: they tell our files from others and from each other. */
const struct store_schema store_state_schema = {
    "state.db", 0x42535453, "FULL", INT64_MAX, state_migrations, COUNT(state_migrations),
};
const struct store_schema store_metrics_schema = {
    "metrics.db", 0x4253544d, "NORMAL", 64 << 20, metrics_migrations, COUNT(metrics_migrations),
};

static int64_t size_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (int64_t)st.st_size : -1;
}

/* SQLite deletes a WAL that lies beside an empty or missing database, and with it all that the WAL holds.
 * So that is looked at before SQLite sees the files. */
static int check_not_emptied(const struct store_schema *schema, const char *dir, struct buffer *notice,
                             struct error *err)
{
    char path[PATH_MAX], wal[PATH_MAX], wal_name[64];
    snprintf(wal_name, sizeof wal_name, "%s-wal", schema->name);
    int rc = fs_join(path, sizeof path, err, dir, schema->name);
    if (!rc)
        rc = fs_join(wal, sizeof wal, err, dir, wal_name);
    if (rc)
        return rc;
    int64_t size = size_of(path);
    if (size > 0)
        return ERR_OK;
    if (size_of(wal) > 0) {
        error_set(err, ERR_CORRUPT, "%s is %s but its write-ahead log %s-wal is not", path,
                  size < 0 ? "missing" : "empty (0 bytes)", schema->name);
        return error_hint(err, "restore %s from a backup, or move %s-wal aside to start without the old content",
                          schema->name, schema->name);
    }
    if (size == 0)
        buffer_printf(notice, "%s was empty (0 bytes, as after a power cut or a full disk): started as new. ", path);
    return ERR_OK;
}

/* Version and owner are read before anything is changed. */
static int check_ours(struct store_db *db, const struct store_schema *schema, int64_t *version, struct error *err)
{
    int64_t application = 0, tables = 0;
    int rc = store_db_int(db, "PRAGMA user_version", version, err);
    if (!rc)
        rc = store_db_int(db, "PRAGMA application_id", &application, err);
    if (!rc)
        rc = store_db_int(db, "SELECT count(*) FROM sqlite_schema", &tables, err);
    if (rc)
        return rc;
    bool fresh = *version == 0 && tables == 0;
    if (!fresh && application != schema->application_id) {
        error_set(err, ERR_CORRUPT, "%s is an SQLite database, but not BOOST's %s", db->path, schema->name);
        return error_hint(err, "move it aside, or name another state directory");
    }
    int newest = schema->migrations[schema->count - 1].version;
    if (*version > newest) {
        error_set(err, ERR_UNSUPPORTED, "%s has version %lld; this build knows up to %d", db->path,
                  (long long)*version, newest);
        return error_hint(err, "start the newer boostd that wrote it, or restore the file from before the upgrade");
    }
    return ERR_OK;
}

int store_schema_check(struct store_db *db, struct error *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = ERR_OK;
    int code = sqlite3_prepare_v2(db->handle, "PRAGMA quick_check(1)", -1, &stmt, NULL);
    if (!code)
        code = sqlite3_step(stmt);
    if (code != SQLITE_ROW) {
        rc = store_db_error(db, code, "quick_check", err);
    } else {
        const char *text = (const char *)sqlite3_column_text(stmt, 0);
        if (!text || strcmp(text, "ok") != 0) {
            error_set(err, ERR_CORRUPT, "%s is damaged: %s", db->path, text ? text : "quick_check gave nothing");
            rc = error_hint(err, "restore it from a backup, or move it and its -wal and -shm files aside to start "
                                 "without it");
        }
    }
    sqlite3_finalize(stmt);
    return rc;
}

static int apply_migration(struct store_db *db, const struct store_schema *schema, const struct store_migration *m,
                           struct error *err)
{
    char stamp[96];
    snprintf(stamp, sizeof stamp, "PRAGMA application_id = %lld; PRAGMA user_version = %d",
             (long long)schema->application_id, m->version);
    int rc = store_db_exec(db, "BEGIN IMMEDIATE", err);
    if (rc)
        return rc;
    int code = sqlite3_exec(db->handle, m->sql, NULL, NULL, NULL);
    if (!code)
        code = sqlite3_exec(db->handle, stamp, NULL, NULL, NULL);
    if (!code)
        code = sqlite3_exec(db->handle, "COMMIT", NULL, NULL, NULL);
    if (!code)
        return ERR_OK;
    char what[48];
    snprintf(what, sizeof what, "migration to version %d", m->version);
    rc = store_db_error(db, code, what, err);
    if (!sqlite3_get_autocommit(db->handle))
        (void)sqlite3_exec(db->handle, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

int store_schema_open(struct store_db *db, const char *dir, const struct store_schema *schema, struct buffer *notice,
                      struct error *err)
{
    int rc = check_not_emptied(schema, dir, notice, err);
    if (!rc)
        rc = store_db_open(db, dir, schema->name, STORE_DB_WRITE, err);
    if (rc)
        return rc;

    char sql[160];
    int64_t version = 0;
    rc = check_ours(db, schema, &version, err);
    /* wal_autocheckpoint is off because writer.c checkpoints after it has answered, not inside COMMIT. */
    snprintf(sql, sizeof sql,
             "PRAGMA journal_mode = WAL; PRAGMA synchronous = %s; PRAGMA foreign_keys = 1; "
             "PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = 16777216",
             schema->synchronous);
    if (!rc)
        rc = store_db_exec(db, sql, err);
    db->unchecked = version > 0 && size_of(db->path) > schema->check_at_open_max;
    if (!rc && version > 0 && !db->unchecked)
        rc = store_schema_check(db, err);
    for (int i = 0; !rc && i < schema->count; i++)
        if (schema->migrations[i].version > version)
            rc = apply_migration(db, schema, &schema->migrations[i], err);
    if (!rc && version == 0)
        rc = fs_sync_dir(dir, err);
    if (rc)
        store_db_close(db);
    return rc;
}
