/* shard_writer.h */
#include "worker/shard_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"
#include "proto/reclog.h"
#include "proto/worker.pb-c.h"

enum {
    PIECE = 4 << 20,        /* of a write past the page cache */
    PIECE_CACHED = 1 << 20, /* of one into it: copied by this thread, so shorter */
    PIECE_CAPPED = 1 << 18,
    BLOCK = 1 << 18, /* is checked, then summed, while it is in the processor's cache */
    DIRECT_ALIGN = 4096,
    SYNC_EVERY = 64 << 20, /* so that the last fsync is short and `bytes` means bytes on disk */
};

#define TELL_NS (20 * NS_PER_S) /* a full disk of the agent's is waited for: the shard itself is safe */

struct shard_writer {
    int rank;
    struct shard_pace pace;
    uint64_t *bytes;
    struct reclog_writer records;
    int64_t seq;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, quit; /* under lock */
    int cancel;      /* atomic */
    int awaited;     /* atomic; somebody stands still until the file is written */
    struct shard_job job;
    struct error outcome; /* of the last write */
};

/* ---- pace --------------------------------------------------------------------- */

/* Of a write: when its next piece may go out. */
struct pacer {
    int64_t due_ns;                /* by the cap */
    int64_t wall_ns, processor_ns; /* at the last look */
};

static int64_t processor_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * NS_PER_S + t.tv_nsec;
}

static bool is_set(const int *flag)
{
    return __atomic_load_n(flag, __ATOMIC_RELAXED);
}

/* Ends early where the write is given up, or `unless` is set. */
static void sleep_until(const struct shard_writer *w, int64_t due, const int *unless)
{
    while (!is_set(&w->cancel) && !(unless && is_set(unless))) {
        int64_t left = due - clock_mono_ns();
        if (left <= 0)
            return;
        if (left > 100 * NS_PER_MS)
            left = 100 * NS_PER_MS;
        struct timespec t = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
        nanosleep(&t, NULL);
    }
}

static struct pacer pacer_start(void)
{
    int64_t now = clock_mono_ns();
    return (struct pacer){.due_ns = now, .wall_ns = now, .processor_ns = processor_ns()};
}

/* After `bytes` more. Training on the same processors goes on in steps that all its threads take together, so what this
 * thread takes of one processor holds all of them up: it takes little at a time, and never all it could get. A lower
 * priority would not do: a processor that training keeps busy might not come back to this thread for minutes. */
static void keep_pace(const struct shard_writer *w, struct pacer *p, size_t bytes)
{
    int64_t used = processor_ns() - p->processor_ns;
    if (w->pace.mib_s > 0) {
        int64_t now = clock_mono_ns();
        p->due_ns += (int64_t)((double)bytes / (w->pace.mib_s * 1048576.0) * (double)NS_PER_S);
        if (p->due_ns < now) /* the disk was slow: that is not made up for */
            p->due_ns = now;
        sleep_until(w, p->due_ns, NULL);
    }
    if (w->pace.cpu > 0)
        sleep_until(w, p->wall_ns + (int64_t)((double)used / w->pace.cpu), &w->awaited);
    p->wall_ns = clock_mono_ns();
    p->processor_ns += used;
}

/* ---- one file ---------------------------------------------------------------- */

/* The file that is being written. */
struct output {
    const char *path;
    int fd;
    bool direct; /* past the page cache: no copy, and nothing of it stays in memory that others could use */
};

static void set_direct(struct output *o, bool on)
{
    int flags = fcntl(o->fd, F_GETFL);
    if (flags >= 0 && fcntl(o->fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0)
        o->direct = on;
}

/* What a file system or the memory is not made for shows at the first write, or at the odd end. */
static int write_piece(struct output *o, const char *at, size_t n, struct error *err)
{
    while (n) {
        size_t whole = o->direct && n % DIRECT_ALIGN ? n - n % DIRECT_ALIGN : n;
        if (!whole) {
            set_direct(o, false);
            whole = n;
        }
        ssize_t done = write(o->fd, at, whole);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0 && o->direct && (errno == EINVAL || errno == EFAULT || errno == EOPNOTSUPP)) {
            set_direct(o, false);
            if (!o->direct)
                continue;
        }
        if (done < 0)
            return error_errno(err, errno, "cannot write %s", o->path);
        at += done;
        n -= (size_t)done;
    }
    return ERR_OK;
}

static int check_and_sum(const struct shard_job *job, size_t from, size_t to, uint32_t *crc, struct error *err)
{
    for (size_t next; from < to; from = next) {
        next = to - from < BLOCK ? to : from + BLOCK;
        int rc = job->check ? job->check(job->arg, from, next, err) : ERR_OK;
        if (rc)
            return rc;
        *crc = crc32c(*crc, (const char *)job->data + from, next - from);
    }
    return ERR_OK;
}

/* At most what the cap gives in a second: a writer that shows no progress for longer is taken to hang. */
static size_t capped_piece(double mib_s)
{
    double second = mib_s * 1048576.0;
    if (second >= PIECE_CAPPED)
        return PIECE_CAPPED;
    return second <= DIRECT_ALIGN ? DIRECT_ALIGN : (size_t)second / DIRECT_ALIGN * DIRECT_ALIGN;
}

static int write_data(struct shard_writer *w, struct output *o, uint32_t *crc, struct error *err)
{
    const struct shard_job *job = &w->job;
    struct pacer pacer = pacer_start();
    size_t synced = 0;
    *crc = 0;
    for (size_t done = 0; done < job->size;) {
        size_t piece = w->pace.mib_s > 0 ? capped_piece(w->pace.mib_s) : o->direct ? PIECE : PIECE_CACHED;
        size_t n = job->size - done < piece ? job->size - done : piece;
        int rc = check_and_sum(job, done, done + n, crc, err);
        if (!rc)
            rc = write_piece(o, (const char *)job->data + done, n, err);
        if (rc)
            return rc;
        done += n;
        if (!o->direct && done - synced >= SYNC_EVERY) {
            if (fdatasync(o->fd) < 0)
                return error_errno(err, errno, "cannot write %s: fdatasync", o->path);
            synced = done;
        }
        if (w->bytes)
            __atomic_fetch_add(w->bytes, n, __ATOMIC_RELAXED);
        keep_pace(w, &pacer, n);
        if (is_set(&w->cancel))
            return error_set(err, ERR_CANCELLED, "the rank ended before the write did");
    }
    return fsync(o->fd) < 0 ? error_errno(err, errno, "cannot write %s: fsync", o->path) : ERR_OK;
}

/* The step's directory and none above it. Those above are gone where a file system is not mounted any more: what would be
 * written below its mount point is hidden when it is back, and by then retention has forgotten what is on it. */
static int make_step_dir(const char *dir, struct error *err)
{
    struct stat st;
    const char *slash = strrchr(dir, '/');
    if (mkdir(dir, 0755) == 0)
        return ERR_OK;
    int errnum = errno;
    if (errnum == EEXIST && stat(dir, &st) == 0)
        return S_ISDIR(st.st_mode) ? ERR_OK : error_set(err, ERR_IO, "%s is not a directory", dir);
    if (errnum == ENOTDIR && slash)
        return error_set(err, ERR_IO, "%.*s is not a directory", (int)(slash - dir), dir);
    if (errnum != ENOENT || !slash)
        return error_errno(err, errnum, "cannot create directory %s", dir);
    error_set(err, ERR_IO, "%.*s is not there: is its file system mounted?", (int)(slash - dir), dir);
    return error_hint(err, "to give the job's checkpoints up, make an empty directory of that name");
}

static int write_shard(struct shard_writer *w, uint32_t *crc, struct error *err)
{
    const struct shard_job *job = &w->job;
    char path[PATH_MAX], temp[PATH_MAX], parent[PATH_MAX];
    int rc = make_step_dir(job->dir, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, job->dir, job->file);
    if (!rc)
        rc = fs_join(parent, sizeof parent, err, job->dir, "..");
    if (rc)
        return rc;
    int used = snprintf(temp, sizeof temp, "%s/.%s.tmp", job->dir, job->file);
    if (used < 0 || (size_t)used >= sizeof temp)
        return error_set(err, ERR_INVALID, "path too long: %s", job->dir);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW;
    struct output o = {.path = temp, .fd = open(temp, flags, 0644)};
    if (o.fd < 0 && errno == ENOENT) { /* another rank that failed took it away */
        rc = make_step_dir(job->dir, err);
        if (rc)
            return rc;
        o.fd = open(temp, flags, 0644);
    }
    if (o.fd < 0)
        return error_errno(err, errno, "cannot create %s", temp);
    if (job->size >= PIECE)
        set_direct(&o, true);
    rc = write_data(w, &o, crc, err);
    if (close(o.fd) < 0 && !rc)
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
    int rc = w->job.ready ? w->job.ready(w->job.arg, outcome) : ERR_OK;
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
    while (told == ERR_NOSPACE && clock_mono_ns() < give_up && !is_set(&w->cancel)) {
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

int shard_writer_create(const char *records, int rank, const struct shard_pace *pace, uint64_t *bytes,
                        struct shard_writer **out, struct error *err)
{
    struct shard_writer *w = calloc(1, sizeof *w);
    if (!w)
        return error_set(err, ERR_NOMEM, "out of memory");
    w->rank = rank;
    w->pace = *pace;
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

/* With the lock. */
static void await_idle(struct shard_writer *w)
{
    __atomic_store_n(&w->awaited, 1, __ATOMIC_RELAXED);
    while (w->busy)
        pthread_cond_wait(&w->changed, &w->lock);
    __atomic_store_n(&w->awaited, 0, __ATOMIC_RELAXED);
}

void shard_writer_start(struct shard_writer *w, const struct shard_job *job)
{
    pthread_mutex_lock(&w->lock);
    await_idle(w);
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
    await_idle(w);
    if (err)
        *err = w->outcome;
    int rc = (int)w->outcome.code;
    pthread_mutex_unlock(&w->lock);
    return rc;
}
