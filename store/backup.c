/* store.h: copies of the two files for a standby, made while boostd runs, and who may go on from one. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "store/internal.h"

enum { PAGES_A_STEP = 1024 };

/* ---- meta ----------------------------------------------------------------------- */

static int read_meta(struct store_db *db, const char *key, char out[STORE_META_MAX], struct error *err)
{
    sqlite3_stmt *stmt = NULL;
    out[0] = '\0';
    int rc = store_db_prepare(db, "SELECT value FROM meta WHERE key = ?", &stmt, err);
    if (rc)
        return rc;
    int code = sqlite3_bind_text(stmt, 1, key, -1, SQLITE_STATIC);
    if (!code)
        code = sqlite3_step(stmt);
    if (code == SQLITE_ROW)
        snprintf(out, STORE_META_MAX, "%s", (const char *)sqlite3_column_text(stmt, 0));
    else if (code != SQLITE_DONE)
        rc = store_db_error(db, code, "meta", err);
    sqlite3_finalize(stmt);
    return rc;
}

/* ---- epoch and adoption --------------------------------------------------------- */

static int write_epoch(struct store_db *db, uint64_t epoch, struct error *err)
{
    char sql[160];
    snprintf(sql, sizeof sql,
             "BEGIN IMMEDIATE; INSERT OR REPLACE INTO meta VALUES ('epoch', '%" PRIu64 "');"
             " DELETE FROM meta WHERE key = 'copied'; COMMIT",
             epoch);
    int rc = store_db_exec(db, sql, err);
    if (rc && !sqlite3_get_autocommit(db->handle))
        (void)sqlite3_exec(db->handle, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

int store_take_epoch(struct store_db *db, bool adopt, uint64_t *epoch, struct error *err)
{
    char text[STORE_META_MAX], copied[STORE_META_MAX];
    int rc = read_meta(db, "epoch", text, err);
    if (!rc)
        rc = read_meta(db, "copied", copied, err);
    if (rc)
        return rc;
    if (*copied && !adopt) {
        error_set(err, ERR_REFUSED, "%s is a copy that a boostd made for a standby", db->path);
        return error_hint(err, "if that boostd is gone for good, take its place with: boostd --adopt");
    }
    char *end;
    uint64_t now = strtoull(text, &end, 10);
    bool fresh = !*text;
    if (!fresh && (*end || !now))
        return error_set(err, ERR_CORRUPT, "%s: \"%s\" is no epoch", db->path, text);
    *epoch = now;
    if (!fresh && !adopt)
        return ERR_OK;
    uint32_t random = 0;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        random = (uint32_t)clock_mono_ns();
    *epoch = ((now >> 32) + 1) << 32 | random;
    return write_epoch(db, *epoch, err);
}

/* ---- copying -------------------------------------------------------------------- */

/* What lies at the target must be an earlier copy of this store: one that was adopted lives. */
static int check_target(const struct store *s, const char *dir, struct error *err)
{
    struct store_db old = {0};
    char path[PATH_MAX], id[STORE_META_MAX], copied[STORE_META_MAX];
    int rc = fs_join(path, sizeof path, err, dir, store_state_schema.name);
    struct stat st;
    if (rc || stat(path, &st) < 0)
        return rc;
    rc = store_db_open(&old, dir, store_state_schema.name, STORE_DB_READ, err);
    if (!rc)
        rc = read_meta(&old, "store_id", id, err);
    if (!rc)
        rc = read_meta(&old, "copied", copied, err);
    store_db_close(&old);
    if (!rc && strcmp(id, s->id) == 0 && *copied)
        return ERR_OK;
    if (!rc)
        error_set(err, ERR_REFUSED, "%s is not a copy of store %s: nothing is written over it", path, s->id);
    else
        error_context(err, "what is in the way of a copy");
    return error_hint(err, "name another backup_dir, or move what is there aside");
}

static int copy_pages(const struct store *s, struct store_db *from, struct store_db *to, struct error *err)
{
    sqlite3_backup *b = sqlite3_backup_init(to->handle, "main", from->handle, "main");
    if (!b)
        return store_db_error(to, sqlite3_errcode(to->handle), "begin of the copy", err);
    int code;
    do
        code = sqlite3_backup_step(b, PAGES_A_STEP);
    while (code == SQLITE_OK && !atomic_load(&s->backup_stop));
    int finish = sqlite3_backup_finish(b);
    if (code == SQLITE_OK)
        return error_set(err, ERR_CANCELLED, "the copy was cut short");
    if (code == SQLITE_DONE && !finish)
        return ERR_OK;
    return store_db_error(to, code == SQLITE_DONE ? finish : code, "copy", err);
}

static int sync_file(const char *path, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0 ? error_errno(err, errno, "fsync of %s", path) : ERR_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}

/* One file as it is at this moment, under a temporary name; `mark` makes it a copy that only adoption opens. */
static int copy_to(const struct store *s, const char *name, const char *dir, const char *temporary, bool mark,
                   struct error *err)
{
    struct store_db from = {0}, to = {0};
    int rc = store_db_open(&from, s->dir, name, STORE_DB_READ, err);
    if (!rc)
        rc = store_db_open(&to, dir, temporary, STORE_DB_WRITE, err);
    /* Reading holds the moment: without it a commit meanwhile would make the copy begin again. */
    if (!rc)
        rc = store_db_exec(&from, "BEGIN; SELECT count(*) FROM meta", err);
    if (!rc)
        rc = copy_pages(s, &from, &to, err);
    if (!rc)
        rc = store_db_exec(&to, "PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL", err);
    char sql[96];
    snprintf(sql, sizeof sql, "INSERT OR REPLACE INTO meta VALUES ('copied', '%" PRId64 "')", clock_wall_ns());
    if (!rc && mark)
        rc = store_db_exec(&to, sql, err);
    store_db_close(&from);
    store_db_close(&to);
    return rc;
}

static int copy_file(const struct store *s, const char *name, const char *dir, bool mark, struct error *err)
{
    char temporary[64], from[PATH_MAX], to[PATH_MAX], leftover[PATH_MAX];
    snprintf(temporary, sizeof temporary, "%s.new", name);
    int rc = fs_join(from, sizeof from, err, dir, temporary);
    if (!rc)
        rc = fs_join(to, sizeof to, err, dir, name);
    if (rc)
        return rc;
    static const char *const tails[] = {"", "-wal", "-shm", "-journal"};
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        if (snprintf(leftover, sizeof leftover, "%s%s", from, tails[i]) < (int)sizeof leftover)
            unlink(leftover);
    }
    rc = copy_to(s, name, dir, temporary, mark, err);
    if (!rc)
        rc = sync_file(from, err);
    if (!rc) /* again: making the copy took its time, and the one before may have been adopted meanwhile */
        rc = check_target(s, dir, err);
    if (!rc && rename(from, to) < 0)
        rc = error_errno(err, errno, "rename to %s", to);
    if (rc)
        unlink(from);
    return rc;
}

int store_backup(const struct store *s, const char *dir, bool metrics, struct error *err)
{
    char here[PATH_MAX], there[PATH_MAX];
    int rc = atomic_load(&s->backup_stop) ? error_set(err, ERR_CANCELLED, "the store is being closed")
                                          : fs_make_dirs(dir, 0700, err);
    if (!rc && realpath(dir, there) && realpath(s->dir, here) && strcmp(here, there) == 0)
        rc = error_set(err, ERR_INVALID, "the copy of %s cannot go into itself", s->dir);
    if (!rc)
        rc = check_target(s, dir, err);
    /* Metrics first: jobs that they know and state.db does not harm nobody, and state.db is what makes it a store. */
    if (!rc && metrics)
        rc = copy_file(s, store_metrics_schema.name, dir, false, err);
    if (!rc)
        rc = copy_file(s, store_state_schema.name, dir, true, err);
    return rc ? rc : fs_sync_dir(dir, err);
}

void store_backup_stop(struct store *s)
{
    atomic_store(&s->backup_stop, true);
}

uint64_t store_epoch(const struct store *s)
{
    return s->epoch;
}
