/* store.h: opening and closing, the lock, and answers on the caller's thread. */
#include "store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "store/internal.h"

enum { METRICS_QUEUE_BYTES = 64 << 20, NOTICE_BYTES = 8 << 10 };

/* ---- the lock ------------------------------------------------------------------- */

static int locked_by_other(int fd, const char *dir, struct error *err)
{
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    if (n > 0) {
        text[n] = '\0';
        text[strcspn(text, "\n")] = '\0';
    }
    /* Between taking the lock and writing its number the holder has no name yet. */
    if (text[0])
        error_set(err, ERR_BUSY, "%s is in use by boostd with pid %s", dir, text);
    else
        error_set(err, ERR_BUSY, "%s is in use by another boostd", dir);
    return error_hint(err, "stop that one, or name another state directory");
}

/* The kernel drops the lock with the process, however it ends, so a left-over file means nothing. */
static int take_lock(struct store *s, struct error *err)
{
    char path[PATH_MAX], text[32];
    int rc = fs_join(path, sizeof path, err, s->dir, "boostd.lock");
    if (rc)
        return rc;
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->lock_fd < 0) {
        error_errno(err, errno, "open %s", path);
        return error_hint(err, "the user of boostd must be able to write the state directory");
    }
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
            return locked_by_other(s->lock_fd, s->dir, err);
        return error_errno(err, errno, "lock %s", path);
    }
    int len = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    /* Only for the message of a second one: on a full disk the lock holds without it. */
    if (ftruncate(s->lock_fd, 0) == 0)
        (void)!pwrite(s->lock_fd, text, (size_t)len, 0);
    return ERR_OK;
}

/* ---- opening ----------------------------------------------------------------------- */

static int read_id(struct store_db *db, char out[9], struct error *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = store_db_prepare(db, "SELECT value FROM meta WHERE key = 'store_id'", &stmt, err);
    if (rc)
        return rc;
    int code = sqlite3_step(stmt);
    out[0] = '\0';
    if (code == SQLITE_ROW)
        snprintf(out, 9, "%s", (const char *)sqlite3_column_text(stmt, 0));
    else if (code != SQLITE_DONE)
        rc = store_db_error(db, code, "meta", err);
    sqlite3_finalize(stmt);
    return rc;
}

/* Metrics of another store would be taken for those of jobs with the same numbers. */
static int pair_files(struct store *s, struct error *err)
{
    char metrics_id[9];
    int rc = read_id(&s->state.db, s->id, err);
    if (!rc)
        rc = read_id(&s->metrics.db, metrics_id, err);
    if (rc)
        return rc;
    if (strlen(s->id) != 8)
        return error_set(err, ERR_CORRUPT, "%s has no store id", s->state.db.path);
    if (!metrics_id[0]) {
        char sql[80];
        snprintf(sql, sizeof sql, "INSERT INTO meta VALUES ('store_id', '%s')", s->id);
        return store_db_exec(&s->metrics.db, sql, err);
    }
    if (strcmp(metrics_id, s->id) == 0)
        return ERR_OK;
    error_set(err, ERR_CORRUPT, "%s belongs to store %s, but %s is store %s", s->metrics.db.path, metrics_id,
              s->state.db.path, s->id);
    return error_hint(err, "restore the two files that belong together, or move metrics.db and its -wal and -shm "
                           "files aside to start without old metrics");
}

/* Curves are not worth a controller that does not start: damaged ones are kept for people to look at, under another
 * name, and new ones begun. */
static int set_metrics_aside(struct store *s, const struct error *why, struct error *err)
{
    static const char *const suffixes[] = {"", "-wal", "-shm"};
    char from[PATH_MAX], to[PATH_MAX], name[64], kept[64];
    store_db_close(&s->metrics.db);
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        snprintf(name, sizeof name, "%s%s", store_metrics_schema.name, suffixes[i]);
        snprintf(kept, sizeof kept, "%s.damaged%s", store_metrics_schema.name, suffixes[i]);
        int rc = fs_join(from, sizeof from, err, s->dir, name);
        if (!rc)
            rc = fs_join(to, sizeof to, err, s->dir, kept);
        if (rc)
            return rc;
        if (rename(from, to) < 0 && (errno != ENOENT || (unlink(to) < 0 && errno != ENOENT)))
            return error_errno(err, errno, "cannot move %s aside", from);
    }
    buffer_printf(&s->notice, "%s: set aside as %s.damaged, metrics begin anew. ", why->message,
                  store_metrics_schema.name);
    return fs_sync_dir(s->dir, err);
}

static int open_metrics(struct store *s, struct error *err)
{
    struct error why;
    int rc = store_schema_open(&s->metrics.db, s->dir, &store_metrics_schema, &s->notice, &why);
    if (rc == ERR_CORRUPT) {
        rc = set_metrics_aside(s, &why, err);
        return rc ? rc : store_schema_open(&s->metrics.db, s->dir, &store_metrics_schema, &s->notice, err);
    }
    if (rc && err)
        *err = why;
    return rc;
}

static int open_files(struct store *s, bool adopt, struct error *err)
{
    int rc = store_schema_open(&s->state.db, s->dir, &store_state_schema, &s->notice, err);
    if (!rc)
        rc = open_metrics(s, err);
    if (!rc)
        rc = store_take_epoch(&s->state.db, adopt, &s->epoch, err);
    if (!rc)
        rc = pair_files(s, err);
    if (!rc)
        rc = store_db_int(&s->state.db, "SELECT max(id) FROM job", &s->max_job, err);
    if (!rc)
        rc = store_db_int(&s->state.db, "SELECT max(id) FROM event", &s->max_event, err);
    if (!rc)
        rc = store_db_open(&s->boot_state, s->dir, store_state_schema.name, STORE_DB_READ, err);
    if (!rc)
        rc = store_db_open(&s->boot_metrics, s->dir, store_metrics_schema.name, STORE_DB_READ, err);
    return rc;
}

static int start_threads(struct store *s, struct error *err)
{
    s->answers.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->answers.fd < 0)
        return error_errno(err, errno, "eventfd");
    s->state.answers = s->metrics.answers = s->reader.answers = &s->answers;
    s->metrics.max_queued = METRICS_QUEUE_BYTES;
    int rc = store_state_init(&s->state, err);
    if (!rc)
        rc = store_metrics_init(&s->metrics, err);
    if (!rc)
        rc = store_reader_start(&s->reader, s->dir, err);
    if (!rc)
        rc = store_writer_start(&s->state, "store-state", err);
    if (!rc)
        rc = store_writer_start(&s->metrics, "store-metrics", err);
    return rc;
}

static int open_store(const char *state_dir, bool adopt, struct store **out, struct error *err)
{
    *out = NULL;
    struct store *s = calloc(1, sizeof *s);
    if (!s)
        return error_set(err, ERR_NOMEM, "store: out of memory");
    s->lock_fd = s->answers.fd = -1;
    buffer_init(&s->notice, NOTICE_BYTES);
    pthread_mutex_init(&s->answers.mutex, NULL);
    store_work_list_init(&s->answers.list);
    int rc = ERR_OK;
    if (snprintf(s->dir, sizeof s->dir, "%s", state_dir) >= (int)sizeof s->dir)
        rc = error_set(err, ERR_INVALID, "the path of the state directory is too long");
    if (!rc)
        rc = fs_make_dirs(s->dir, 0700, err);
    if (!rc)
        rc = take_lock(s, err);
    if (!rc)
        rc = open_files(s, adopt, err);
    if (!rc)
        rc = start_threads(s, err);
    if (rc) {
        store_close(s);
        return rc;
    }
    *out = s;
    return ERR_OK;
}

int store_open(const char *state_dir, struct store **out, struct error *err)
{
    return open_store(state_dir, false, out, err);
}

int store_adopt(const char *state_dir, struct store **out, struct error *err)
{
    return open_store(state_dir, true, out, err);
}

/* ---- running ------------------------------------------------------------------------- */

void store_dispatch(struct store *s)
{
    eventfd_t count;
    (void)!eventfd_read(s->answers.fd, &count);
    struct store_work_list list;
    store_work_list_init(&list);
    pthread_mutex_lock(&s->answers.mutex);
    store_work_list_join(&list, &s->answers.list);
    pthread_mutex_unlock(&s->answers.mutex);
    while (list.head) {
        struct store_work *work = list.head;
        list.head = work->next;
        work->finish(work);
    }
}

void store_close(struct store *s)
{
    if (!s)
        return;
    store_writer_stop(&s->state);
    store_writer_stop(&s->metrics);
    store_reader_stop(&s->reader);
    /* What a callback queues now is answered with ERR_CANCELLED, in the next round. */
    while (s->answers.list.head)
        store_dispatch(s);
    store_db_close(&s->boot_state);
    store_db_close(&s->boot_metrics);
    if (s->answers.fd >= 0)
        close(s->answers.fd);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    buffer_free(&s->notice);
    free(s);
}

const char *store_id(const struct store *s)
{
    return s->id;
}

const char *store_notice(const struct store *s)
{
    return s->notice.len ? (const char *)s->notice.data : "";
}

int store_fd(const struct store *s)
{
    return s->answers.fd;
}

int store_health(const struct store *s, struct error *err)
{
    return store_writer_health(&((struct store *)s)->state, err);
}

int store_metrics_health(const struct store *s, struct error *err)
{
    return store_writer_health(&((struct store *)s)->metrics, err);
}

int64_t store_max_job_id(struct store *s)
{
    return s->max_job;
}

int64_t store_max_event_id(struct store *s)
{
    return s->max_event;
}
