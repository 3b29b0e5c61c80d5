/* keeper_log.h: the writing side. */
#include "daemon/keeper_log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/rankfiles.h"

static const char split_mark[] = " [boost: line goes on]\n";

struct keeper_log {
    struct keeper_logs *logs;
    struct keeper_log *next;
    int rank;
    char path[PATH_MAX], old_path[PATH_MAX], pos_path[PATH_MAX], times_path[PATH_MAX];
    int64_t max_bytes;
    /* loop only */
    size_t line_len; /* of the unfinished line */
    uint8_t *tail;   /* ring of KEEPER_LOG_TAIL bytes */
    uint64_t tail_total;
    /* under logs->lock */
    struct buffer queue;
    int64_t dropped, dropped_reported;
    int drop_errno; /* of the newest failure, 0 = the disk stood still */
    /* writer thread only */
    struct buffer writing;
    int fd;
    int64_t size, pos; /* of the current file; of its end in the stream */
    struct keeper_log_mark *marks;
    size_t n_marks;
    int64_t interval_ns; /* between two of them */
};

struct keeper_logs {
    ssize_t (*write_fn)(int fd, const void *data, size_t len);
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    struct keeper_log *first;
    bool closing, busy, finished;
    int64_t progress_ns; /* when the writer last came out of the system */
};

/* ---- writer thread ---- */

/* Opens with the position file written first: a reader never sees a file whose place it cannot tell. */
static int open_current(struct keeper_log *log)
{
    char fresh[PATH_MAX + 8], text[160];
    snprintf(fresh, sizeof fresh, "%s.new", log->path);
    struct stat old, now;
    bool have_old = lstat(log->path, &old) == 0;
    int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return -1;
    if (fstat(fd, &now) < 0)
        goto fail;
    int len = 0;
    if (have_old)
        len = snprintf(text, sizeof text, "%" PRIu64 " %" PRId64 "\n", (uint64_t)old.st_ino, log->pos - log->size);
    len += snprintf(text + len, sizeof text - (size_t)len, "%" PRIu64 " %" PRId64 "\n", (uint64_t)now.st_ino, log->pos);
    struct error err;
    if (fs_write_atomic(log->pos_path, text, (size_t)len, 0644, &err)) {
        errno = err.code == ERR_NOSPACE ? ENOSPC : EIO;
        goto fail;
    }
    if ((have_old && rename(log->path, log->old_path) < 0) || rename(fresh, log->path) < 0)
        goto fail;
    return fd;
fail:
    close(fd);
    return -1;
}

/* The current file is full. When there is no room for a new one the old one grows on. */
static void rotate(struct keeper_log *log)
{
    int fd = open_current(log);
    if (fd < 0)
        return;
    close(log->fd);
    log->fd = fd;
    log->size = 0;
}

static void drop_locked(struct keeper_log *log, size_t len, int errnum)
{
    log->dropped += (int64_t)len;
    log->drop_errno = errnum;
}

static void note_drop(struct keeper_log *log, size_t len, int errnum)
{
    pthread_mutex_lock(&log->logs->lock);
    drop_locked(log, len, errnum);
    log->logs->progress_ns = clock_mono_ns();
    pthread_mutex_unlock(&log->logs->lock);
}

static void note_progress(struct keeper_logs *logs)
{
    pthread_mutex_lock(&logs->lock);
    logs->progress_ns = clock_mono_ns();
    pthread_mutex_unlock(&logs->lock);
}

/* How much of data[0..len) still goes into the current file: up to a line end where there is one. */
static size_t fitting(const struct keeper_log *log, const uint8_t *data, size_t len)
{
    int64_t room = log->max_bytes - log->size;
    if (room <= 0)
        return 0;
    if ((int64_t)len <= room)
        return len;
    const uint8_t *end = memrchr(data, '\n', (size_t)room);
    if (end)
        return (size_t)(end - data) + 1;
    return log->size ? 0 : (size_t)room;
}

/* Every other mark goes; those that stay stand for what came behind them as well. */
static void thin_marks(struct keeper_log *log)
{
    for (size_t i = 0; i < log->n_marks / 2; i++) {
        const struct keeper_log_mark *gone = &log->marks[2 * i + 1];
        log->marks[i] = log->marks[2 * i];
        log->marks[i].interval_ns = gone->wall_ns + gone->interval_ns - log->marks[i].wall_ns;
    }
    log->n_marks /= 2;
    log->interval_ns *= 2;
    struct error err;
    (void)!fs_write_atomic(log->times_path, log->marks, log->n_marks * sizeof *log->marks, 0644, &err);
}

/* Notes when the stream came to where it is; a mark that cannot be written is only missing. */
static void mark_time(struct keeper_log *log)
{
    int64_t now = clock_wall_ns();
    const struct keeper_log_mark *last = log->n_marks ? &log->marks[log->n_marks - 1] : NULL;
    if (!log->marks || (last && now >= last->wall_ns && now - last->wall_ns < log->interval_ns))
        return;
    if (log->n_marks == KEEPER_LOG_MARKS)
        thin_marks(log);
    log->marks[log->n_marks++] = (struct keeper_log_mark){now, log->pos, log->interval_ns};
    int fd = open(log->times_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd >= 0) {
        (void)!write(fd, &log->marks[log->n_marks - 1], sizeof *log->marks);
        close(fd);
    }
}

/* Writes all of it, or drops the rest at the first error. */
static void write_out(struct keeper_log *log, const uint8_t *data, size_t len)
{
    while (len) {
        if (log->fd < 0) {
            log->fd = open_current(log);
            if (log->fd < 0) {
                note_drop(log, len, errno);
                return;
            }
        }
        size_t part = fitting(log, data, len);
        if (!part && log->size) {
            rotate(log);
            part = log->size ? len : fitting(log, data, len);
        }
        ssize_t n = log->logs->write_fn(log->fd, data, part);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            note_drop(log, len, n < 0 ? errno : EIO);
            return;
        }
        note_progress(log->logs);
        log->size += n;
        log->pos += n;
        data += n;
        len -= (size_t)n;
    }
}

/* Says in the log itself how much is missing, once the disk takes anything again. */
static void report_drops(struct keeper_log *log, int64_t missing, int errnum)
{
    char text[160];
    int len = snprintf(text, sizeof text, "\n[boost: %" PRId64 " bytes of output were dropped here: %s]\n", missing,
                       errnum ? strerror(errnum) : "the disk did not take them in time");
    ssize_t n = log->fd >= 0 ? log->logs->write_fn(log->fd, text, (size_t)len) : -1;
    if (n <= 0)
        return;
    log->size += n;
    log->pos += n;
    pthread_mutex_lock(&log->logs->lock);
    log->dropped_reported += missing;
    pthread_mutex_unlock(&log->logs->lock);
}

static struct keeper_log *next_work(struct keeper_logs *logs)
{
    for (struct keeper_log *log = logs->first; log; log = log->next) {
        if (log->queue.len)
            return log;
    }
    return NULL;
}

static void *writer(void *arg)
{
    struct keeper_logs *logs = arg;
    pthread_mutex_lock(&logs->lock);
    for (;;) {
        struct keeper_log *log = next_work(logs);
        if (!log) {
            logs->busy = false;
            pthread_cond_broadcast(&logs->idle);
            if (logs->closing)
                break;
            pthread_cond_wait(&logs->work, &logs->lock);
            continue;
        }
        logs->busy = true;
        logs->progress_ns = clock_mono_ns();
        struct buffer taken = log->queue;
        log->queue = log->writing;
        log->writing = taken;
        int64_t missing = log->dropped - log->dropped_reported;
        int errnum = log->drop_errno;
        pthread_mutex_unlock(&logs->lock);
        mark_time(log);
        if (missing && log->fd >= 0)
            report_drops(log, missing, errnum);
        write_out(log, log->writing.data, log->writing.len);
        buffer_clear(&log->writing);
        pthread_mutex_lock(&logs->lock);
    }
    logs->finished = true;
    pthread_cond_broadcast(&logs->idle);
    pthread_mutex_unlock(&logs->lock);
    return NULL;
}

/* ---- loop ---- */

int keeper_logs_create(ssize_t (*write_fn)(int, const void *, size_t), struct keeper_logs **out, struct error *err)
{
    struct keeper_logs *logs = calloc(1, sizeof *logs);
    if (!logs)
        return error_set(err, ERR_NOMEM, "no memory for logs");
    logs->write_fn = write_fn ? write_fn : write;
    pthread_mutex_init(&logs->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&logs->work, &attr);
    pthread_cond_init(&logs->idle, &attr);
    pthread_condattr_destroy(&attr);
    int errnum = pthread_create(&logs->thread, NULL, writer, logs);
    if (errnum) {
        free(logs);
        return error_errno(err, errnum, "cannot start the log writer");
    }
    *out = logs;
    return ERR_OK;
}

bool keeper_logs_destroy(struct keeper_logs *logs, int timeout_ms)
{
    if (!logs)
        return true;
    int64_t deadline = clock_mono_ns() + timeout_ms * NS_PER_MS;
    struct timespec until = {.tv_sec = deadline / NS_PER_S, .tv_nsec = deadline % NS_PER_S};
    pthread_mutex_lock(&logs->lock);
    logs->closing = true;
    pthread_cond_signal(&logs->work);
    int rc = 0;
    while (!logs->finished && rc != ETIMEDOUT)
        rc = pthread_cond_timedwait(&logs->idle, &logs->lock, &until);
    bool finished = logs->finished;
    pthread_mutex_unlock(&logs->lock);
    if (!finished) {
        /* It is inside the system and owns everything here: the memory stays until the process ends. */
        pthread_detach(logs->thread);
        return false;
    }
    pthread_join(logs->thread, NULL);
    while (logs->first) {
        struct keeper_log *log = logs->first;
        logs->first = log->next;
        if (log->fd >= 0)
            close(log->fd);
        buffer_free(&log->queue);
        buffer_free(&log->writing);
        free(log->tail);
        free(log->marks);
        free(log);
    }
    pthread_cond_destroy(&logs->work);
    pthread_cond_destroy(&logs->idle);
    pthread_mutex_destroy(&logs->lock);
    free(logs);
    return true;
}

int keeper_log_add(struct keeper_logs *logs, const char *run_dir, int rank, int64_t max_bytes, struct keeper_log **out,
                   struct error *err)
{
    struct keeper_log *log = calloc(1, sizeof *log);
    uint8_t *tail = malloc(KEEPER_LOG_TAIL);
    int rc = log && tail ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a log");
    if (!rc)
        rc = rank_file_path(log->path, sizeof log->path, run_dir, rank, "log", err);
    if (!rc)
        rc = rank_file_path(log->old_path, sizeof log->old_path, run_dir, rank, "log.1", err);
    if (!rc)
        rc = rank_file_path(log->pos_path, sizeof log->pos_path, run_dir, rank, "log.pos", err);
    if (!rc)
        rc = rank_file_path(log->times_path, sizeof log->times_path, run_dir, rank, "log.times", err);
    if (rc) {
        free(log);
        free(tail);
        return rc;
    }
    log->logs = logs;
    log->rank = rank;
    log->max_bytes = max_bytes > 0 ? max_bytes : INT64_MAX;
    log->tail = tail;
    log->marks = malloc(KEEPER_LOG_MARKS * sizeof *log->marks); /* without: no times are kept */
    log->interval_ns = NS_PER_S;
    log->fd = -1;
    buffer_init(&log->queue, KEEPER_LOG_QUEUE);
    buffer_init(&log->writing, KEEPER_LOG_QUEUE);
    log->fd = open_current(log);
    pthread_mutex_lock(&logs->lock);
    log->next = logs->first;
    logs->first = log;
    pthread_mutex_unlock(&logs->lock);
    *out = log;
    return ERR_OK;
}

static bool stalled(const struct keeper_logs *logs)
{
    return logs->busy && clock_mono_ns() - logs->progress_ns > KEEPER_LOG_STALL_MS * NS_PER_MS;
}

size_t keeper_log_room(struct keeper_log *log)
{
    struct keeper_logs *logs = log->logs;
    pthread_mutex_lock(&logs->lock);
    /* Marks of split lines take room too: less than one byte in a thousand. */
    size_t room = (KEEPER_LOG_QUEUE - log->queue.len) / 2;
    if (room < LIMIT_LOG_LINE)
        room = stalled(logs) ? KEEPER_LOG_QUEUE : 0;
    pthread_mutex_unlock(&logs->lock);
    return room;
}

static void put_tail(struct keeper_log *log, const uint8_t *data, size_t len)
{
    log->tail_total += len;
    if (len > KEEPER_LOG_TAIL) {
        data += len - KEEPER_LOG_TAIL;
        len = KEEPER_LOG_TAIL;
    }
    size_t at = (size_t)((log->tail_total - len) % KEEPER_LOG_TAIL);
    size_t first = len < KEEPER_LOG_TAIL - at ? len : KEEPER_LOG_TAIL - at;
    memcpy(log->tail + at, data, first);
    memcpy(log->tail, data + first, len - first);
}

void keeper_log_tail(const struct keeper_log *log, struct buffer *out)
{
    size_t len = log->tail_total < KEEPER_LOG_TAIL ? (size_t)log->tail_total : KEEPER_LOG_TAIL;
    size_t at = (size_t)((log->tail_total - len) % KEEPER_LOG_TAIL);
    size_t first = len < KEEPER_LOG_TAIL - at ? len : KEEPER_LOG_TAIL - at;
    buffer_append(out, log->tail + at, first);
    buffer_append(out, log->tail, len - first);
}

/* Onto the queue and the tail; the lock is held. */
static void put(struct keeper_log *log, const uint8_t *data, size_t len)
{
    put_tail(log, data, len);
    if (buffer_append(&log->queue, data, len)) {
        log->queue.failed = false;
        drop_locked(log, len, 0);
    }
}

void keeper_log_feed(struct keeper_log *log, const void *data, size_t len)
{
    struct keeper_logs *logs = log->logs;
    const uint8_t *at = data;
    pthread_mutex_lock(&logs->lock);
    while (len) {
        if (log->line_len == LIMIT_LOG_LINE && *at != '\n') {
            put(log, (const uint8_t *)split_mark, sizeof split_mark - 1);
            log->line_len = 0;
        }
        size_t room = LIMIT_LOG_LINE - log->line_len;
        if (!room) /* a line of just the limit, and its end */
            room = 1;
        size_t part = len < room ? len : room;
        const uint8_t *end = memchr(at, '\n', part);
        if (end)
            part = (size_t)(end - at) + 1;
        put(log, at, part);
        log->line_len = end ? 0 : log->line_len + part;
        at += part;
        len -= part;
    }
    pthread_cond_signal(&logs->work);
    pthread_mutex_unlock(&logs->lock);
}

int64_t keeper_log_dropped(struct keeper_log *log)
{
    pthread_mutex_lock(&log->logs->lock);
    int64_t dropped = log->dropped;
    pthread_mutex_unlock(&log->logs->lock);
    return dropped;
}
