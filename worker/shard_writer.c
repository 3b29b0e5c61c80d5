/* shard_writer.h */
#include "worker/shard_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/reclog.h"
#include "proto/worker.pb-c.h"

enum {
    CHUNK = 1 << 20,
    SYNC_EVERY = 64 << 20, /* so that the last fsync is short and `bytes` means bytes on disk */
};

#define TELL_NS (20 * NS_PER_S) /* a full disk of the agent's is waited for: the shard itself is safe */

struct shard_writer {
    int rank;
    double mib_s;
    uint64_t *bytes;
    struct reclog_writer records;
    int64_t seq;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, quit; /* under lock */
    int cancel;      /* atomic */
    struct shard_job job;
    struct error outcome; /* of the last write */
};

/* ---- one file ---------------------------------------------------------------- */

/* Sleeps until `done` bytes may have been written since `start`. */
static void throttle(const struct shard_writer *w, int64_t start, size_t done)
{
    if (w->mib_s <= 0)
        return;
    int64_t due = start + (int64_t)((double)done / (w->mib_s * 1048576.0) * (double)NS_PER_S);
    while (!__atomic_load_n(&w->cancel, __ATOMIC_RELAXED)) {
        int64_t left = due - clock_mono_ns();
        if (left <= 0)
            return;
        if (left > 100 * NS_PER_MS) /* wake up for a cancel */
            left = 100 * NS_PER_MS;
        struct timespec t = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
        nanosleep(&t, NULL);
    }
}

static int write_data(struct shard_writer *w, int fd, uint32_t *crc, struct error *err)
{
    const char *data = w->job.data;
    int64_t start = clock_mono_ns();
    size_t synced = 0;
    *crc = 0;
    for (size_t done = 0; done < w->job.size;) {
        size_t n = w->job.size - done < CHUNK ? w->job.size - done : CHUNK;
        int rc = fs_write_all(fd, data + done, n, err);
        if (rc)
            return rc;
        *crc = crc32c(*crc, data + done, n);
        done += n;
        if (done - synced >= SYNC_EVERY && fdatasync(fd) < 0)
            return error_errno(err, errno, "fdatasync");
        if (done - synced >= SYNC_EVERY)
            synced = done;
        if (w->bytes)
            __atomic_fetch_add(w->bytes, n, __ATOMIC_RELAXED);
        throttle(w, start, done);
        if (__atomic_load_n(&w->cancel, __ATOMIC_RELAXED))
            return error_set(err, ERR_CANCELLED, "the rank ended before the write did");
    }
    return fsync(fd) < 0 ? error_errno(err, errno, "fsync") : ERR_OK;
}

static int write_shard(struct shard_writer *w, uint32_t *crc, struct error *err)
{
    const struct shard_job *job = &w->job;
    char path[PATH_MAX], temp[PATH_MAX], parent[PATH_MAX];
    int rc = fs_make_dirs(job->dir, 0755, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, job->dir, job->file);
    if (!rc)
        rc = fs_join(parent, sizeof parent, err, job->dir, "..");
    if (rc)
        return rc;
    int used = snprintf(temp, sizeof temp, "%s/.%s.tmp", job->dir, job->file);
    if (used < 0 || (size_t)used >= sizeof temp)
        return error_set(err, ERR_INVALID, "path too long: %s", job->dir);
    int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return error_errno(err, errno, "cannot create %s", temp);
    rc = write_data(w, fd, crc, err);
    if (rc)
        error_context(err, "cannot write %s", temp);
    if (close(fd) < 0 && !rc)
        rc = error_errno(err, errno, "cannot close %s", temp);
    if (!rc && rename(temp, path) < 0)
        rc = error_errno(err, errno, "cannot rename %s to %s", temp, path);
    if (!rc)
        rc = fs_sync_dir(job->dir, err);
    if (!rc)
        rc = fs_sync_dir(parent, err);
    if (rc) {
        unlink(temp);
        rmdir(job->dir); /* only if nobody put anything there */
    }
    return rc;
}

/* ---- telling ------------------------------------------------------------------ */

static int append_record(struct shard_writer *w, Boost__ShardRecord *r, struct error *err)
{
    size_t len = boost__shard_record__get_packed_size(r);
    uint8_t *packed = malloc(len);
    if (!packed)
        return error_set(err, ERR_NOMEM, "out of memory");
    boost__shard_record__pack(r, packed);
    int rc = reclog_append(&w->records, packed, len, true, err);
    free(packed);
    return rc;
}

static void run_job(struct shard_writer *w, struct error *outcome)
{
    int64_t start = clock_mono_ns();
    uint32_t crc = 0;
    error_clear(outcome);
    int rc = w->job.check ? w->job.check(w->job.check_arg, outcome) : ERR_OK;
    if (!rc)
        rc = write_shard(w, &crc, outcome);
    Boost__ShardRecord r = BOOST__SHARD_RECORD__INIT;
    r.has_seq = r.has_step = r.has_rank = r.has_bytes = r.has_write_ms = true;
    r.seq = w->seq + 1;
    r.step = w->job.step;
    r.rank = w->rank;
    r.file = w->job.file;
    r.dir = w->job.dir;
    r.bytes = (int64_t)w->job.size;
    r.write_ms = (clock_mono_ns() - start) / NS_PER_MS;
    r.has_crc32c = !rc;
    r.crc32c = crc;
    r.has_failed = rc != 0;
    r.failed = rc != 0;
    r.error = rc ? outcome->message : NULL;
    struct error failed;
    int told = append_record(w, &r, &failed);
    int64_t give_up = clock_mono_ns() + TELL_NS;
    while (told == ERR_NOSPACE && clock_mono_ns() < give_up && !__atomic_load_n(&w->cancel, __ATOMIC_RELAXED)) {
        struct timespec t = {.tv_nsec = 100 * NS_PER_MS};
        nanosleep(&t, NULL);
        told = append_record(w, &r, &failed);
    }
    if (!told)
        w->seq = r.seq;
    else if (!rc) { /* on disk, but nobody will know: as good as not written */
        *outcome = failed;
        error_context(outcome, "the shard of step %lld is written but cannot be reported", (long long)w->job.step);
    }
}

static void *writer_main(void *arg)
{
    struct shard_writer *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->busy && !w->quit)
            pthread_cond_wait(&w->changed, &w->lock);
        if (!w->busy)
            break;
        pthread_mutex_unlock(&w->lock);
        struct error outcome;
        run_job(w, &outcome);
        pthread_mutex_lock(&w->lock);
        w->outcome = outcome;
        w->busy = false;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- the caller's side ---------------------------------------------------------- */

/* Records already there, so that the sequence goes on. */
static int count_records(const char *path, int64_t *out, struct error *err)
{
    struct buffer record;
    buffer_init(&record, RECLOG_MAX_RECORD);
    uint64_t offset = 0;
    bool got = true;
    int rc = ERR_OK;
    for (*out = -1; got && !rc; ++*out)
        rc = reclog_read(path, &offset, &record, &got, err);
    buffer_free(&record);
    return rc;
}

int shard_writer_create(const char *records, int rank, double mib_s, uint64_t *bytes, struct shard_writer **out,
                        struct error *err)
{
    struct shard_writer *w = calloc(1, sizeof *w);
    if (!w)
        return error_set(err, ERR_NOMEM, "out of memory");
    w->rank = rank;
    w->mib_s = mib_s;
    w->bytes = bytes;
    w->records.fd = -1;
    int rc = reclog_open(&w->records, records, err);
    if (!rc)
        rc = count_records(records, &w->seq, err);
    if (rc)
        goto out;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    int errnum = pthread_create(&w->thread, NULL, writer_main, w);
    if (errnum) {
        rc = error_errno(err, errnum, "cannot start the checkpoint thread");
        pthread_cond_destroy(&w->changed);
        pthread_mutex_destroy(&w->lock);
    }
out:
    if (rc) {
        reclog_close(&w->records);
        free(w);
        return rc;
    }
    *out = w;
    return ERR_OK;
}

void shard_writer_destroy(struct shard_writer *w)
{
    if (!w)
        return;
    __atomic_store_n(&w->cancel, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&w->lock);
    w->quit = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    reclog_close(&w->records);
    free(w);
}

void shard_writer_start(struct shard_writer *w, const struct shard_job *job)
{
    pthread_mutex_lock(&w->lock);
    while (w->busy)
        pthread_cond_wait(&w->changed, &w->lock);
    w->job = *job;
    w->busy = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

bool shard_writer_busy(struct shard_writer *w)
{
    pthread_mutex_lock(&w->lock);
    bool busy = w->busy;
    pthread_mutex_unlock(&w->lock);
    return busy;
}

int shard_writer_wait(struct shard_writer *w, struct error *err)
{
    pthread_mutex_lock(&w->lock);
    while (w->busy)
        pthread_cond_wait(&w->changed, &w->lock);
    if (err)
        *err = w->outcome;
    int rc = (int)w->outcome.code;
    pthread_mutex_unlock(&w->lock);
    return rc;
}
