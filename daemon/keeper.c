/* keeper.h: one poll loop over signals, the stop file and the ranks' pipes. */
#include "daemon/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/cgroup.h"
#include "daemon/keeper_exit.h"
#include "daemon/keeper_log.h"
#include "daemon/keeper_rank.h"
#include "daemon/log.h"
#include "daemon/procid.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/rankfiles.h"

enum {
    POLL_MS = 200,     /* the stop file, should inotify fail; retries      */
    KILL_POLL_MS = 20, /* between rounds of killing                        */
    DRAIN_MS = 1000,   /* for what a dead rank left in its pipe            */
    FLUSH_MS = 10000,  /* for the disk to take the last output             */
    READ_CHUNK = 64 << 10,
};

static const char end_ready[] = "keeper.end.ready"; /* becomes keeper.end: a rename needs no room */

struct keeper_rank {
    int rank;
    pid_t pid; /* 0 = never started or reaped */
    int output_fd;
    struct keeper_log *log;
    bool ended, recorded;
    struct rank_exit end;
    char error[1200]; /* why it never started */
};

struct keeper {
    const char *run_dir;
    char stop_path[PATH_MAX];
    Boost__AttemptStart *start;
    struct keeper_rank *ranks;
    size_t count;
    struct keeper_logs *logs;
    struct cgroup cgroup;
    struct pollfd *polls;
    int lock_fd, signal_fd, notify_fd;
    int64_t seq;
    bool killing;
    int64_t oom_kills; /* as last read */
    uint8_t *chunk;
};

/* ---- set-up ---- */

int keeper_lock(const char *run_dir, int *fd, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, run_dir, "keeper.lock");
    if (rc)
        return rc;
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0)
        return ERR_OK;
    rc = errno == EWOULDBLOCK ? error_set(err, ERR_BUSY, "another keeper has %s", run_dir)
                              : error_errno(err, errno, "cannot lock %s", path);
    close(*fd);
    *fd = -1;
    return rc;
}

static int load_start(struct keeper *k, struct error *err)
{
    char path[PATH_MAX];
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    int rc = fs_join(path, sizeof path, err, k->run_dir, "start.pb");
    if (!rc)
        rc = fs_read_regular(path, &packed, err);
    if (!rc) {
        k->start = boost__attempt_start__unpack(NULL, packed.len, packed.data);
        Boost__AttemptStart *s = k->start;
        if (!s || !s->n_ranks || !s->run_dir || !s->worker_path)
            rc = error_set(err, ERR_CORRUPT, "%s is damaged", path);
        else if (strcmp(s->run_dir, k->run_dir))
            rc = error_set(err, ERR_INVALID, "%s belongs to %s", path, s->run_dir);
    }
    buffer_free(&packed);
    return rc;
}

static int open_signals(struct keeper *k, struct error *err)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return error_errno(err, errno, "cannot block signals");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    k->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (k->signal_fd < 0)
        return error_errno(err, errno, "signalfd");
    k->notify_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (k->notify_fd >= 0 && inotify_add_watch(k->notify_fd, k->run_dir, IN_CREATE | IN_MOVED_TO) < 0) {
        close(k->notify_fd);
        k->notify_fd = -1; /* the poll interval does it */
    }
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        return error_errno(err, errno, "cannot become a child subreaper");
    return ERR_OK;
}

static void open_cgroup(struct keeper *k, bool wanted)
{
    char name[96], path[PATH_MAX];
    struct error err;
    snprintf(name, sizeof name, "%s-%lld.%d-%ld", k->start->store_id ? k->start->store_id : "",
             (long long)k->start->job, k->start->attempt, (long)getpid());
    if (!wanted || cgroup_create(&k->cgroup, name, &err)) {
        k->cgroup.path[0] = '\0';
        if (wanted)
            log_line(LOG_INFO, "no cgroup for this attempt (%s): descendants are found as their subreaper",
                     err.message);
        return;
    }
    k->oom_kills = cgroup_oom_kills(&k->cgroup);
    if (fs_join(path, sizeof path, &err, k->run_dir, "keeper.cgroup") ||
        fs_write_durable(path, k->cgroup.path, strlen(k->cgroup.path), 0644, &err)) {
        log_error(LOG_WARN, &err, "the cgroup is not used");
        cgroup_remove(&k->cgroup);
    }
}

static int prepare(struct keeper *k, const struct keeper_options *options, struct error *err)
{
    char path[PATH_MAX];
    struct procid self;
    int rc = fs_join(k->stop_path, sizeof k->stop_path, err, k->run_dir, "stop");
    if (!rc)
        rc = keeper_lock(k->run_dir, &k->lock_fd, err);
    if (!rc)
        rc = load_start(k, err);
    if (!rc)
        rc = open_signals(k, err);
    if (!rc)
        rc = keeper_logs_create(NULL, &k->logs, err);
    if (rc)
        return rc;
    k->count = k->start->n_ranks;
    k->ranks = calloc(k->count, sizeof *k->ranks);
    k->polls = calloc(k->count + 2, sizeof *k->polls);
    k->chunk = malloc(READ_CHUNK);
    if (!k->ranks || !k->polls || !k->chunk)
        return error_set(err, ERR_NOMEM, "no memory for %zu ranks", k->count);
    for (size_t i = 0; i < k->count && !rc; i++) {
        struct keeper_rank *r = &k->ranks[i];
        r->rank = k->start->ranks[i];
        r->output_fd = -1;
        rc = keeper_log_add(k->logs, k->run_dir, r->rank, k->start->log_max_bytes, &r->log, err);
    }
    struct error reserve;
    if (!rc && rank_exit_reserve(k->run_dir, (int)k->count, &reserve))
        log_error(LOG_WARN, &reserve, "exit records have no reserve");
    if (!rc)
        rc = fs_join(path, sizeof path, err, k->run_dir, end_ready);
    if (!rc)
        rc = fs_write_durable(path, "ended\n", 6, 0644, err);
    if (!rc)
        rc = procid_get(getpid(), &self, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, k->run_dir, "keeper.id");
    if (!rc) {
        open_cgroup(k, options->use_cgroup);
        rc = procid_save(path, &self, err);
    }
    return rc;
}

static void mark_ended(struct keeper *k, struct keeper_rank *r, int status)
{
    r->ended = true;
    r->end = (struct rank_exit){.rank = r->rank,
                                .seq = ++k->seq,
                                .wall_ns = clock_wall_ns(),
                                .status = status,
                                .killed_by_us = k->killing,
                                .error = r->error[0] ? r->error : NULL};
}

static void start_rank(struct keeper *k, size_t i)
{
    struct keeper_rank *r = &k->ranks[i];
    struct rank_launch launch = {.start = k->start, .local_rank = (int)i, .cgroup = &k->cgroup};
    struct rank_process process;
    struct procid id;
    struct error err;
    char path[PATH_MAX];
    int rc = keeper_rank_start(&launch, &process, &err);
    if (rc) {
        log_error(LOG_ERROR, &err, "rank %d did not start", r->rank);
        snprintf(r->error, sizeof r->error, "%s%s%s%s", err.message, *err.hint ? " (" : "", err.hint,
                 *err.hint ? ")" : "");
        mark_ended(k, r, (rc == ERR_INVALID ? RANK_EXIT_SPEC : RANK_EXIT_INFRA) << 8);
        return;
    }
    r->pid = process.pid;
    r->output_fd = process.output_fd;
    rc = procid_get(r->pid, &id, &err);
    if (!rc)
        rc = rank_file_path(path, sizeof path, k->run_dir, r->rank, "pid", &err);
    if (!rc)
        rc = procid_save(path, &id, &err);
    if (rc)
        log_error(LOG_WARN, &err, "rank %d has no identity file", r->rank);
}

/* ---- output ---- */

/* One read from the rank's pipe; false when nothing more is there now. */
static bool read_output(struct keeper *k, struct keeper_rank *r, size_t room)
{
    size_t want = room < READ_CHUNK ? room : READ_CHUNK;
    ssize_t n = read(r->output_fd, k->chunk, want);
    if (n < 0 && errno == EINTR)
        return true;
    if (n < 0 && errno == EAGAIN)
        return false;
    if (n <= 0) {
        close(r->output_fd);
        r->output_fd = -1;
        return false;
    }
    keeper_log_feed(r->log, k->chunk, (size_t)n);
    return true;
}

/* What a dead rank left in its pipe is all there already; a descendant that still
 * writes to it, or a slow disk, must not delay the record of the end. */
static void drain_output(struct keeper *k, struct keeper_rank *r)
{
    int64_t deadline = clock_mono_ns() + DRAIN_MS * NS_PER_MS;
    int capacity = r->output_fd >= 0 ? fcntl(r->output_fd, F_GETPIPE_SZ) : 0;
    for (int64_t left = capacity; left > 0 && r->output_fd >= 0 && clock_mono_ns() < deadline;) {
        size_t room = keeper_log_room(r->log);
        if (!room) {
            poll(NULL, 0, 1);
            continue;
        }
        if (!read_output(k, r, room))
            break;
        left -= (int64_t)(room < READ_CHUNK ? room : READ_CHUNK);
    }
}

/* ---- ends ---- */

static bool out_of_memory(struct keeper *k)
{
    /* Only a cgroup with the memory controller tells whose death it was; the system-wide
     * counter does not, so without one a SIGKILL stays unexplained. */
    int64_t now = cgroup_oom_kills(&k->cgroup);
    bool more = now > 0 && now > k->oom_kills;
    if (now >= 0)
        k->oom_kills = now;
    return more;
}

static void record_end(struct keeper *k, struct keeper_rank *r)
{
    struct buffer tail;
    struct error err;
    buffer_init(&tail, KEEPER_LOG_TAIL);
    keeper_log_tail(r->log, &tail);
    if (rank_exit_write(k->start, &r->end, &tail, &err))
        log_error(LOG_ERROR, &err, "the end of rank %d is not recorded yet", r->rank);
    else
        r->recorded = true;
    buffer_free(&tail);
}

/* Records every end that is seen but not on disk: at once, and again while the disk is full. */
static void record_ends(struct keeper *k)
{
    for (size_t i = 0; i < k->count; i++) {
        if (k->ranks[i].ended && !k->ranks[i].recorded)
            record_end(k, &k->ranks[i]);
    }
}

static struct keeper_rank *find_rank(struct keeper *k, pid_t pid)
{
    for (size_t i = 0; i < k->count; i++) {
        if (k->ranks[i].pid == pid)
            return &k->ranks[i];
    }
    return NULL;
}

/* Takes every child that has ended: ranks, and orphans that came to us as their subreaper.
 * Returns whether any child, dead or alive, is left. */
static bool reap(struct keeper *k)
{
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0)
            return errno != ECHILD;
        pid_t pid = info.si_pid;
        if (pid == 0)
            return true;
        struct keeper_rank *r = find_rank(k, pid);
        if (r) /* before it is reaped, while its pid and so its group cannot be anybody else's */
            kill(-pid, SIGKILL);
        int status;
        if (waitpid(pid, &status, WNOHANG) != pid || !r)
            continue;
        r->pid = 0;
        drain_output(k, r);
        mark_ended(k, r, status);
        r->end.oom = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && out_of_memory(k);
        record_end(k, r);
        log_line(LOG_INFO, "rank %d ended: %s %d%s", r->rank, WIFSIGNALED(status) ? "signal" : "exit",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), k->killing ? ", killed by us" : "");
    }
}

static bool all_ended(const struct keeper *k)
{
    for (size_t i = 0; i < k->count; i++) {
        if (!k->ranks[i].ended)
            return false;
    }
    return true;
}

static bool all_recorded(const struct keeper *k)
{
    for (size_t i = 0; i < k->count; i++) {
        if (!k->ranks[i].recorded)
            return false;
    }
    return true;
}

static void kill_round(struct keeper *k)
{
    cgroup_kill(&k->cgroup);
    for (size_t i = 0; i < k->count; i++) {
        if (k->ranks[i].pid > 0)
            kill(-k->ranks[i].pid, SIGKILL);
    }
    /* What these leave behind becomes our child and is met in the next round. */
    proc_kill_children();
}

/* ---- loop ---- */

static void take_signals(struct keeper *k)
{
    struct signalfd_siginfo info;
    while (read(k->signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD || k->killing)
            continue;
        log_line(LOG_INFO, "signal %u: killing every process of the attempt", info.ssi_signo);
        k->killing = true;
    }
}

static void look_for_stop(struct keeper *k)
{
    uint8_t events[4096];
    while (k->notify_fd >= 0 && read(k->notify_fd, events, sizeof events) > 0)
        ;
    if (!k->killing && fs_exists(k->stop_path)) {
        log_line(LOG_INFO, "told to stop: killing every process of the attempt");
        k->killing = true;
    }
}

static void wait_events(struct keeper *k, int timeout_ms)
{
    k->polls[0] = (struct pollfd){.fd = k->signal_fd, .events = POLLIN};
    k->polls[1] = (struct pollfd){.fd = k->notify_fd, .events = POLLIN};
    for (size_t i = 0; i < k->count; i++) {
        struct keeper_rank *r = &k->ranks[i];
        bool room = r->output_fd >= 0 && keeper_log_room(r->log) > 0;
        k->polls[i + 2] = (struct pollfd){.fd = room ? r->output_fd : -1, .events = POLLIN};
        if (r->output_fd >= 0 && !room && timeout_ms > 5)
            timeout_ms = 5; /* the writer makes room without telling this loop */
    }
    if (poll(k->polls, k->count + 2, timeout_ms) <= 0)
        return;
    for (size_t i = 0; i < k->count; i++) {
        if (k->ranks[i].output_fd >= 0 && k->polls[i + 2].revents)
            read_output(k, &k->ranks[i], keeper_log_room(k->ranks[i].log));
    }
}

/* Removed or moved away, by its owner or by an agent that could not read it: no end can be told any more, and the next
 * agent would know nothing of what runs here and give its devices to another attempt. */
static bool run_dir_lost(const struct keeper *k)
{
    char path[PATH_MAX];
    struct stat held, there;
    if (fs_join(path, sizeof path, NULL, k->run_dir, "keeper.lock") || fstat(k->lock_fd, &held) < 0)
        return false;
    if (stat(path, &there) < 0)
        return errno == ENOENT || errno == ENOTDIR;
    return there.st_dev != held.st_dev || there.st_ino != held.st_ino;
}

/* Until every rank has ended, no process is left and every end is on disk, or there is no place for that. */
static void run_loop(struct keeper *k)
{
    for (;;) {
        take_signals(k);
        bool children = reap(k), lost = run_dir_lost(k);
        if (lost && !k->killing)
            log_line(LOG_ERROR, "the run directory is gone: killing every process of the attempt");
        k->killing = k->killing || lost;
        if (!lost)
            record_ends(k);
        bool over = all_ended(k);
        if (over && !children && !cgroup_populated(&k->cgroup) && (all_recorded(k) || lost))
            return;
        look_for_stop(k);
        bool kill_now = k->killing || (over && (children || cgroup_populated(&k->cgroup)));
        if (kill_now)
            kill_round(k);
        wait_events(k, kill_now ? KILL_POLL_MS : POLL_MS);
    }
}

static int finish(struct keeper *k, struct error *err)
{
    char path[PATH_MAX], ready[PATH_MAX];
    for (size_t i = 0; i < k->count; i++) {
        int64_t dropped = keeper_log_dropped(k->ranks[i].log);
        if (dropped)
            log_line(LOG_WARN, "rank %d: %lld bytes of output could not be written", k->ranks[i].rank,
                     (long long)dropped);
        if (k->ranks[i].output_fd >= 0) /* every writer is dead: all there is */
            drain_output(k, &k->ranks[i]);
    }
    keeper_logs_destroy(k->logs, FLUSH_MS);
    k->logs = NULL;
    cgroup_remove(&k->cgroup);
    if (!fs_join(path, sizeof path, NULL, k->run_dir, "keeper.reserve"))
        unlink(path);
    int rc = fs_join(path, sizeof path, err, k->run_dir, "keeper.end");
    if (!rc)
        rc = fs_join(ready, sizeof ready, err, k->run_dir, end_ready);
    /* Nobody may believe that processes are left for want of disk space: the file is there already. */
    if (!rc && rename(ready, path) < 0)
        rc = error_errno(err, errno, "cannot rename %s", ready);
    return rc ? rc : fs_sync_dir(k->run_dir, err);
}

int keeper_run(const struct keeper_options *options, struct error *err)
{
    struct keeper k = {.run_dir = options->run_dir, .lock_fd = -1, .signal_fd = -1, .notify_fd = -1, .oom_kills = -1};
    int rc = prepare(&k, options, err);
    if (rc)
        goto out;
    if (options->ready_fd >= 0) {
        ssize_t n = write(options->ready_fd, "R", 1);
        if (n != 1)
            log_line(LOG_WARN, "the agent that started this keeper is gone");
        close(options->ready_fd);
    }
    look_for_stop(&k);
    for (size_t i = 0; i < k.count; i++) {
        if (!k.killing) {
            start_rank(&k, i);
            continue;
        }
        snprintf(k.ranks[i].error, sizeof k.ranks[i].error, "killed before it started");
        mark_ended(&k, &k.ranks[i], RANK_EXIT_INFRA << 8);
    }
    run_loop(&k);
    rc = finish(&k, err);
out:
    keeper_logs_destroy(k.logs, FLUSH_MS);
    if (k.start)
        boost__attempt_start__free_unpacked(k.start, NULL);
    int fds[] = {k.signal_fd, k.notify_fd, k.lock_fd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    for (size_t i = 0; i < k.count && k.ranks; i++) {
        if (k.ranks[i].output_fd >= 0)
            close(k.ranks[i].output_fd);
    }
    free(k.ranks);
    free(k.polls);
    free(k.chunk);
    return rc;
}
