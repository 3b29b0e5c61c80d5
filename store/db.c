/* One SQLite connection: opening, statements, and SQLite's errors in our words. */
#include <errno.h>
#include <string.h>

#include "proto/base/fs.h"
#include "store/internal.h"

bool store_db_in_trouble(int rc)
{
    switch (rc & 0xff) {
    case SQLITE_FULL:
    case SQLITE_IOERR:
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_NOMEM:
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_PROTOCOL:
    case SQLITE_PERM:
    case SQLITE_INTERRUPT:
        return true;
    default:
        return false;
    }
}

static int io_error(struct store_db *db, const char *what, struct error *err)
{
    int errnum = db->handle ? sqlite3_system_errno(db->handle) : 0;
    if (errnum)
        error_errno(err, errnum, "%s: %s", db->name, what);
    else
        error_set(err, ERR_IO, "%s: %s: disk I/O error", db->name, what);
    if (errnum == ENOSPC || errnum == EDQUOT)
        return error_hint(err, "free space on the file system of %s", db->path);
    /* A vanished state directory is a fault of the disk here, not a thing that was asked for. */
    if (err && err->code == ERR_NOT_FOUND)
        err->code = ERR_IO;
    error_hint(err, "check the disk and the mount of %s", db->path);
    return errnum == ENOMEM ? ERR_NOMEM : ERR_IO;
}

int store_db_error(struct store_db *db, int rc, const char *what, struct error *err)
{
    const char *text = db->handle ? sqlite3_errmsg(db->handle) : sqlite3_errstr(rc);
    switch (rc & 0xff) {
    case SQLITE_FULL:
        error_set(err, ERR_NOSPACE, "%s: %s: no space left", db->name, what);
        error_hint(err, "free space on the file system of %s", db->path);
        return ERR_NOSPACE;
    case SQLITE_IOERR:
        return rc == SQLITE_IOERR_NOMEM ? error_set(err, ERR_NOMEM, "%s: %s: out of memory", db->name, what)
                                        : io_error(db, what, err);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_PROTOCOL:
        error_set(err, ERR_BUSY, "%s: %s: another process holds a lock", db->name, what);
        error_hint(err, "end the transaction of the other program that has %s open (an sqlite3 shell?)", db->path);
        return ERR_BUSY;
    case SQLITE_NOMEM:
        return error_set(err, ERR_NOMEM, "%s: %s: out of memory", db->name, what);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        error_set(err, ERR_CORRUPT, "%s is damaged: %s: %s", db->path, what, text);
        error_hint(err, "restore it from a backup, or move it and its -wal and -shm files aside to start without it");
        return ERR_CORRUPT;
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
        error_set(err, ERR_IO, "%s: %s: %s", db->path, what, text);
        error_hint(err, "the user of boostd must be able to write the file and its directory");
        return ERR_IO;
    case SQLITE_CONSTRAINT:
    case SQLITE_TOOBIG:
    case SQLITE_MISMATCH:
        return error_set(err, ERR_INVALID, "%s: %s: %s", db->name, what, text);
    default:
        return error_set(err, ERR_INTERNAL, "%s: %s: %s", db->name, what, text);
    }
}

int store_db_open(struct store_db *db, const char *dir, const char *name, enum store_db_mode mode, struct error *err)
{
    db->handle = NULL;
    db->unchecked = false;
    db->name = name;
    int rc = fs_join(db->path, sizeof db->path, err, dir, name);
    if (rc)
        return rc;
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
    if (mode == STORE_DB_WRITE)
        flags |= SQLITE_OPEN_CREATE;
    int code = sqlite3_open_v2(db->path, &db->handle, flags, NULL);
    if (code) {
        rc = store_db_error(db, code, "open", err);
        store_db_close(db);
        return rc;
    }
    sqlite3_busy_timeout(db->handle, STORE_BUSY_MS);
    /* A reader opens the file writable all the same: it must be able to use the WAL's shared memory. */
    if (mode == STORE_DB_READ && (rc = store_db_exec(db, "PRAGMA query_only = 1", err)))
        store_db_close(db);
    return rc;
}

void store_db_close(struct store_db *db)
{
    if (db->handle)
        sqlite3_close_v2(db->handle);
    db->handle = NULL;
}

int store_db_exec(struct store_db *db, const char *sql, struct error *err)
{
    int code = sqlite3_exec(db->handle, sql, NULL, NULL, NULL);
    return code ? store_db_error(db, code, sql, err) : ERR_OK;
}

int store_db_prepare(struct store_db *db, const char *sql, sqlite3_stmt **out, struct error *err)
{
    int code = sqlite3_prepare_v3(db->handle, sql, -1, SQLITE_PREPARE_PERSISTENT, out, NULL);
    return code ? store_db_error(db, code, "prepare", err) : ERR_OK;
}

int store_db_int(struct store_db *db, const char *sql, int64_t *out, struct error *err)
{
    sqlite3_stmt *stmt = NULL;
    *out = 0;
    int code = sqlite3_prepare_v2(db->handle, sql, -1, &stmt, NULL);
    if (!code) {
        code = sqlite3_step(stmt);
        if (code == SQLITE_ROW)
            *out = sqlite3_column_int64(stmt, 0);
        code = code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code;
    }
    int rc = code ? store_db_error(db, code, sql, err) : ERR_OK;
    sqlite3_finalize(stmt);
    return rc;
}

int store_db_step(sqlite3_stmt *stmt)
{
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW)
        ;
    sqlite3_reset(stmt);
    return code == SQLITE_DONE ? SQLITE_OK : code;
}
