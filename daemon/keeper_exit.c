/* keeper_exit.h */
#include "daemon/keeper_exit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "proto/rankfiles.h"

enum { DONE_MAX = 64 << 10, RECORD_ROOM = 8 << 10, ERROR_TEXT = 2048 };

bool rank_file_regular(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool rank_status_read(const char *run_dir, int rank, struct rank_status *out)
{
    char path[PATH_MAX];
    if (rank_file_path(path, sizeof path, run_dir, rank, "status", NULL))
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    ssize_t n = pread(fd, out, sizeof *out, 0);
    close(fd);
    out->collective[sizeof out->collective - 1] = out->doing[sizeof out->doing - 1] = '\0';
    for (int i = 0; i < RANK_GROUPS; i++) {
        struct rank_collective *c = &out->groups[i];
        c->group[sizeof c->group - 1] = c->kind[sizeof c->kind - 1] = c->what[sizeof c->what - 1] = '\0';
    }
    return n == sizeof *out && out->magic == RANK_STATUS_MAGIC;
}

Boost__DoneRecord *rank_done_read(const Boost__AttemptStart *start, int rank)
{
    char path[PATH_MAX];
    struct buffer packed;
    buffer_init(&packed, DONE_MAX);
    Boost__DoneRecord *done = NULL;
    if (!rank_file_path(path, sizeof path, start->run_dir, rank, "done", NULL) &&
        !fs_read_regular(path, &packed, NULL))
        done = boost__done_record__unpack(NULL, packed.len, packed.data);
    buffer_free(&packed);
    if (done && !(done->has_why && done->job == start->job && done->attempt == start->attempt && done->rank == rank)) {
        boost__done_record__free_unpacked(done, NULL);
        done = NULL;
    }
    return done;
}

/* Where its page says that the rank stood; false when there is none. */
static bool read_place(const char *run_dir, int rank, int64_t *step, char collective[RANK_COLLECTIVE_TEXT])
{
    struct rank_status status;
    if (!rank_status_read(run_dir, rank, &status))
        return false;
    *step = status.step;
    rank_collective_text(&status, collective, RANK_COLLECTIVE_TEXT);
    return true;
}

int rank_exit_reserve(const char *run_dir, int ranks, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, run_dir, "keeper.reserve");
    if (rc)
        return rc;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int errnum = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)ranks * RECORD_ROOM);
    if (fd >= 0)
        close(fd);
    return errnum ? error_errno(err, errnum, "cannot reserve room in %s", path) : ERR_OK;
}

static int write_record(const char *path, const Boost__ExitRecord *record, struct error *err)
{
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    size_t size = boost__exit_record__get_packed_size(record);
    uint8_t *at = buffer_reserve(&packed, size);
    int rc = at ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for an exit record");
    if (!rc) {
        packed.len = boost__exit_record__pack(record, at);
        rc = fs_write_durable(path, packed.data, packed.len, 0644, err);
    }
    buffer_free(&packed);
    return rc;
}

int rank_exit_write(const Boost__AttemptStart *start, const struct rank_exit *end, const struct buffer *tail,
                    struct error *err)
{
    char path[PATH_MAX], reserve[PATH_MAX], text[ERROR_TEXT], collective[RANK_COLLECTIVE_TEXT] = "";
    int rc = rank_file_path(path, sizeof path, start->run_dir, end->rank, "exit", err);
    if (rc)
        return rc;
    Boost__ExitRecord r = BOOST__EXIT_RECORD__INIT;
    r.has_job = r.has_attempt = r.has_rank = r.has_seq = r.has_wall_ns = true;
    r.job = start->job;
    r.attempt = start->attempt;
    r.rank = end->rank;
    r.seq = end->seq;
    r.wall_ns = end->wall_ns;
    r.has_lost = r.lost = end->lost;
    if (!end->lost && WIFSIGNALED(end->status)) {
        r.has_signal = true;
        r.signal = WTERMSIG(end->status);
        r.has_core_dumped = r.core_dumped = WCOREDUMP(end->status);
    } else if (!end->lost) {
        r.has_exit_code = true;
        r.exit_code = WEXITSTATUS(end->status);
    }
    r.has_killed_by_us = r.has_oom = r.has_done = true;
    r.killed_by_us = end->killed_by_us;
    r.oom = end->oom;
    r.has_last_step = read_place(start->run_dir, end->rank, &r.last_step, collective);
    r.collective = collective[0] ? collective : NULL;
    Boost__DoneRecord *done = rank_done_read(start, end->rank);
    r.done = done != NULL;
    r.error = (char *)(uintptr_t)end->error;
    if (done && done->has_step) {
        r.has_last_step = true;
        r.last_step = done->step;
    }
    if (!end->error && done && done->error && *done->error) {
        bool hint = done->hint && *done->hint;
        snprintf(text, sizeof text, "%s%s%s%s", done->error, hint ? " (" : "", hint ? done->hint : "", hint ? ")" : "");
        r.error = text;
    }
    if (tail && tail->len) {
        r.has_log_tail = true;
        r.log_tail.data = tail->data;
        r.log_tail.len = tail->len;
    }
    rc = write_record(path, &r, err);
    if (rc == ERR_NOSPACE) {
        r.has_log_tail = false;
        if (!fs_join(reserve, sizeof reserve, NULL, start->run_dir, "keeper.reserve"))
            unlink(reserve);
        rc = write_record(path, &r, err);
    }
    if (done)
        boost__done_record__free_unpacked(done, NULL);
    return rc;
}
