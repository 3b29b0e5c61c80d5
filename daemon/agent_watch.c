/* agent_attempts.h: what happens in a run directory. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_hang.h"
#include "daemon/agent_node.h"
#include "daemon/agent_tasks.h"
#include "daemon/keeper.h"
#include "daemon/keeper_exit.h"
#include "daemon/keeper_log.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

enum {
    UPDATE_MS = 500,        /* between two RankUpdates without news of weight       */
    METRICS_WAIT_MS = 3000, /* NodeEnd waits so long for metrics to be sent        */
    RESEND_MS = 5000,       /* reports that nobody acknowledged go again            */
    ACKS_SAVE_MS = 2000,
    TAIL_MS = 10000, /* between two tails of a rank's output */
    TAIL_BYTES = 4 << 10,
    DEVICE_MS = 500, /* the end of a rank whose device failed waits so long for what the driver knows */
    RELEASE_MS = 5000, /* NodeEnd waits so long for GPUs to let go of the attempt's memory */
    RELEASE_LOOK_MS = 100,
};

/* ---- files of the keeper ---- */

/* In a directory that belongs to the job's user, what counts is what we or our keeper wrote. */
static bool own_file(const struct agent_attempt *a, const char *name, char path[PATH_MAX])
{
    struct stat st;
    return !fs_join(path, PATH_MAX, NULL, a->run_dir, name) && lstat(path, &st) == 0 && S_ISREG(st.st_mode) &&
           st.st_uid == geteuid();
}

static void load_exit(struct agent_attempt *a, struct agent_rank *r)
{
    char name[32], path[PATH_MAX];
    struct buffer packed;
    struct error err;
    snprintf(name, sizeof name, "rank-%d.exit", r->rank);
    if (r->exit || !own_file(a, name, path))
        return;
    buffer_init(&packed, LIMIT_FRAME);
    int rc = fs_read_regular(path, &packed, &err);
    if (!rc) {
        r->exit = boost__exit_record__unpack(NULL, packed.len, packed.data);
        if (!r->exit)
            rc = error_set(&err, ERR_CORRUPT, "%s is damaged", path);
    }
    if (rc)
        log_error(LOG_ERROR, &err, "the end of rank %d", r->rank);
    else if (r->exit->exit_code == RANK_EXIT_INFRA && !r->exit->signal && a->start->n_devices && a->agent->devices) {
        r->device_look = devices_look_now(a->agent);
        r->device_due = clock_mono_ns() + DEVICE_MS * NS_PER_MS;
    }
    buffer_free(&packed);
}

static void load_identities(struct agent_attempt *a)
{
    char name[32], path[PATH_MAX];
    struct buffer text;
    if (!a->has_keeper && own_file(a, "keeper.id", path))
        a->has_keeper = !procid_load(path, &a->keeper, NULL);
    if (a->has_keeper && !a->cgroup.path[0] && own_file(a, "keeper.cgroup", path)) {
        buffer_init(&text, PATH_MAX);
        if (!fs_read_regular(path, &text, NULL) && text.len)
            cgroup_adopt(&a->cgroup, (char *)text.data);
        buffer_free(&text);
    }
    for (size_t i = 0; i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        snprintf(name, sizeof name, "rank-%d.pid", r->rank);
        if (!r->has_pid && own_file(a, name, path))
            r->has_pid = !procid_load(path, &r->pid, NULL);
        load_exit(a, r);
    }
}

/* ---- the end ---- */

static void set_ended(struct agent_attempt *a)
{
    char text[48];
    a->state = ATTEMPT_ENDED;
    a->ended_ns = clock_mono_ns();
    log_line(LOG_INFO, "attempt %s: no process of it is left", attempt_text(a, text));
    agent_tasks_wake(a->agent); /* whoever follows its log */
    attempt_epilog(a);
}

static bool ended_on_disk(struct agent_attempt *a)
{
    char path[PATH_MAX];
    if (!own_file(a, "keeper.end", path))
        return false;
    load_identities(a); /* every record was there before that file */
    return true;
}

/* SIGKILL to all that can be found of an attempt without a keeper; whether anything is left. */
static bool sweep(struct agent_attempt *a)
{
    char marker[PATH_MAX + 16];
    struct procid *leaders = calloc(a->rank_count, sizeof *leaders);
    struct proc_sweep s = {.marker = marker, .only_uid = geteuid() == 0 && a->uid != 0, .uid = a->uid};
    snprintf(marker, sizeof marker, "BOOST_RUN_DIR=%s", a->run_dir);
    for (size_t i = 0; leaders && i < a->rank_count; i++) {
        if (a->ranks[i].has_pid)
            leaders[s.leader_count++] = a->ranks[i].pid;
    }
    s.leaders = leaders;
    cgroup_kill(&a->cgroup);
    int found = proc_sweep(&s, SIGKILL);
    free(leaders);
    return found != 0 || cgroup_populated(&a->cgroup);
}

/* Records of ends that nobody saw, then the keeper's last word in its stead. */
static int write_lost_ends(struct agent_attempt *a, struct error *err)
{
    char path[PATH_MAX];
    int64_t seq = 0;
    int rc = ERR_OK;
    for (size_t i = 0; i < a->rank_count; i++) {
        if (a->ranks[i].exit && a->ranks[i].exit->seq > seq)
            seq = a->ranks[i].exit->seq;
    }
    for (size_t i = 0; i < a->rank_count && !rc; i++) {
        struct agent_rank *r = &a->ranks[i];
        if (r->exit)
            continue;
        struct buffer tail;
        int64_t offset = 0;
        buffer_init(&tail, KEEPER_LOG_TAIL);
        if (!keeper_log_end(a->run_dir, r->rank, &offset, NULL)) {
            offset = offset > KEEPER_LOG_TAIL ? offset - KEEPER_LOG_TAIL : 0;
            if (keeper_log_read(a->run_dir, r->rank, &offset, -1, KEEPER_LOG_TAIL, &tail, NULL))
                buffer_clear(&tail);
        }
        seq++;
        struct rank_exit end = {
            .rank = r->rank, .seq = seq, .wall_ns = clock_wall_ns(), .lost = true, .killed_by_us = a->kill};
        rc = rank_exit_write(a->start, &end, &tail, err);
        buffer_free(&tail);
        load_exit(a, r);
    }
    if (!rc)
        rc = fs_join(path, sizeof path, err, a->run_dir, "keeper.end");
    return rc ? rc : fs_write_durable(path, "lost\n", 5, 0644, err);
}

static bool run_dir_gone(const struct agent_attempt *a)
{
    struct stat st;
    return lstat(a->run_dir, &st) < 0 && errno == ENOENT;
}

static void take_over_from_lost_keeper(struct agent_attempt *a)
{
    struct error err;
    if (!a->note[0]) {
        if (run_dir_gone(a))
            snprintf(a->note, sizeof a->note, "its run directory was removed; its ranks were killed");
        else
            snprintf(a->note, sizeof a->note, "boost-keeper (pid %ld) was lost; its ranks were killed",
                     (long)a->keeper.pid);
        log_line(LOG_ERROR, "%s: %s", a->run_dir, a->note);
    }
    if (sweep(a)) /* the clock looks again: one that cannot die must not keep this node busy with looking */
        return;
    /* A directory that was removed is made anew for the ends alone. */
    if (fs_make_dirs(a->run_dir, 0700, &err) || write_lost_ends(a, &err)) {
        log_error(LOG_ERROR, &err, "%s: not over yet", a->run_dir);
        return;
    }
    cgroup_remove(&a->cgroup);
    set_ended(a);
}

/* The keeper never was: it died before it had written who it is, or nobody started one. */
static void look_without_keeper(struct agent_attempt *a)
{
    int lock;
    struct error err;
    if (keeper_lock(a->run_dir, &lock, &err)) {
        if (a->state == ATTEMPT_PREPARED && err.code == ERR_BUSY)
            a->state = ATTEMPT_LIVE;
        return;
    }
    char path[PATH_MAX];
    if (!own_file(a, "keeper.id", path)) { /* under its lock: it cannot appear now */
        if (a->kill && !fs_join(path, sizeof path, NULL, a->run_dir, "keeper.end") &&
            !fs_write_durable(path, "never started\n", 14, 0644, &err)) {
            snprintf(a->note, sizeof a->note, "stopped before its ranks started");
            set_ended(a);
        } else {
            a->state = ATTEMPT_PREPARED;
        }
    }
    close(lock);
}

static void look_after_keeper(struct agent_attempt *a)
{
    if (ended_on_disk(a))
        set_ended(a);
    else if (!a->has_keeper && run_dir_gone(a)) /* and who the keeper was is gone with it */
        take_over_from_lost_keeper(a);
    else if (!a->has_keeper)
        look_without_keeper(a);
    else if (!procid_alive(&a->keeper) && ended_on_disk(a)) /* it ended just between the two looks */
        set_ended(a);
    else if (!procid_alive(&a->keeper))
        take_over_from_lost_keeper(a);
}

/* ---- progress ---- */

static void send_update(struct agent_attempt *a, struct agent_rank *r, const struct rank_status *page)
{
    Boost__RankUpdate u = BOOST__RANK_UPDATE__INIT;
    u.has_job = u.has_attempt = u.has_rank = u.has_phase = u.has_step = u.has_progress = true;
    u.job = a->job;
    u.attempt = a->attempt;
    u.rank = r->rank;
    u.phase = page->phase <= BOOST__RANK_UPDATE__PHASE__ENDED ? (Boost__RankUpdate__Phase)page->phase
                                                              : BOOST__RANK_UPDATE__PHASE__LAUNCHED;
    u.step = page->step;
    u.progress = page->progress;
    if (!agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE, &u.base))
        return;
    r->told = *page;
    r->has_told = true;
    r->told_ns = clock_mono_ns();
}

static void look_at_progress(struct agent_attempt *a, struct agent_rank *r)
{
    struct rank_status page;
    int64_t now = clock_mono_ns();
    const Boost__AgentConfig *c = a->agent->config;
    if (r->exit || !r->has_pid || !rank_status_read(a->run_dir, r->rank, &page))
        return;
    int64_t from = a->start->resume ? a->start->resume->step : 0;
    bool first_step = r->told.step <= from && page.step > from;
    bool changed = page.step != r->told.step || page.progress != r->told.progress;
    if (!r->has_told || page.phase != r->told.phase || first_step ||
        (changed && now - r->told_ns >= UPDATE_MS * NS_PER_MS))
        send_update(a, r, &page);
    if (!hang_look(&r->hang, &page, now, c->hang_min_ms, c->hang_max_ms))
        return;
    char text[512];
    Boost__HangReport report = BOOST__HANG_REPORT__INIT;
    hang_describe(&r->hang, r->rank, now, hang_limit_ns(&r->hang, c->hang_min_ms, c->hang_max_ms), text, sizeof text);
    report.has_job = report.has_attempt = report.has_rank = true;
    report.job = a->job;
    report.attempt = a->attempt;
    report.rank = r->rank;
    report.text = text;
    if (agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_HANG, &report.base))
        log_line(LOG_WARN, "attempt %lld.%d: %s", (long long)a->job, a->attempt, text);
    else
        r->hang.reported = false; /* again once there is somebody to tell */
}

/* What it printed last, for the controller to keep in case that this node is lost. */
static void look_at_output(struct agent_attempt *a, struct agent_rank *r)
{
    int64_t now = clock_mono_ns(), end;
    struct buffer tail;
    if (r->exit || (r->tail_ns && now - r->tail_ns < TAIL_MS * NS_PER_MS) || !link_up_ready(a->agent->link) ||
        keeper_log_end(a->run_dir, r->rank, &end, NULL) || end <= r->tail_end)
        return;
    int64_t from = end > TAIL_BYTES ? end - TAIL_BYTES : 0;
    buffer_init(&tail, TAIL_BYTES + 1);
    if (!keeper_log_read(a->run_dir, r->rank, &from, -1, TAIL_BYTES, &tail, NULL) && tail.len) {
        Boost__LogTail t = BOOST__LOG_TAIL__INIT;
        t.has_job = t.has_attempt = t.has_rank = t.has_data = true;
        t.job = a->job;
        t.attempt = a->attempt;
        t.rank = r->rank;
        t.data.data = tail.data;
        t.data.len = tail.len;
        if (agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_LOG_TAIL, &t.base)) {
            r->tail_end = end;
            r->tail_ns = now;
        }
    }
    buffer_free(&tail);
}

/* ---- reports ---- */

static void send_exit(struct agent_attempt *a, struct agent_rank *r)
{
    Boost__RankEnd end = BOOST__RANK_END__INIT;
    end.record = r->exit;
    r->exit_sent = agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_RANK_END, &end.base);
    if (r->exit_sent)
        a->report_ns = clock_mono_ns();
}

static void send_end(struct agent_attempt *a)
{
    Boost__NodeEnd end = BOOST__NODE_END__INIT;
    end.has_job = end.has_attempt = true;
    end.job = a->job;
    end.attempt = a->attempt;
    end.note = a->note;
    end.has_epilog = a->epilog_runs;
    end.epilog = a->epilog_runs;
    a->end_sent = agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_NODE_END, &end.base);
    if (a->end_sent)
        a->report_ns = clock_mono_ns();
}

static bool all_acked(const struct agent_attempt *a)
{
    for (size_t i = 0; i < a->rank_count; i++) {
        const struct agent_rank *r = &a->ranks[i];
        if ((r->exit && !r->exit_acked) || r->metrics.mark_count || r->shards.mark_count || !r->metrics.caught_up ||
            !r->shards.caught_up)
            return false;
    }
    return a->end_acked;
}

/* Whether the end can be told: what is known of the device is in it. */
static bool device_named(struct agent_attempt *a, struct agent_rank *r)
{
    if (!r->device_due)
        return true;
    if (devices_looked(a->agent->devices) < r->device_look && clock_mono_ns() < r->device_due)
        return false;
    r->device_due = 0;
    free(r->exit->device);
    r->exit->device = devices_describe(a->agent, a->start, r->rank);
    return true;
}

/* The earliest end not reported, by the keeper's order, so that the first failure is heard first; NULL: none. */
static struct agent_rank *next_exit(struct agent_attempt *a, bool again)
{
    struct agent_rank *first = NULL;
    for (size_t i = 0; i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        bool due = r->exit && (!r->exit_sent || (again && !r->exit_acked && !r->exit_again));
        if (due && (!first || r->exit->seq < first->exit->seq))
            first = r;
    }
    return first && device_named(a, first) ? first : NULL;
}

static void send_exits(struct agent_attempt *a, bool again)
{
    for (struct agent_rank *r; (r = next_exit(a, again));) {
        send_exit(a, r);
        r->exit_again = true;
        if (!r->exit_sent)
            break;
    }
    for (size_t i = 0; i < a->rank_count; i++)
        a->ranks[i].exit_again = false;
}

/* Whether its GPUs can be given to another attempt, which were refused while they seem to be in use. */
static bool devices_free(struct agent_attempt *a, int64_t now)
{
    if (a->released || !a->start->n_devices || !a->agent->devices)
        return true;
    if (!a->release_due) {
        a->release_due = now + RELEASE_MS * NS_PER_MS;
        a->release_look = devices_look_now(a->agent);
        a->release_ns = now;
        return false;
    }
    bool looked = devices_looked(a->agent->devices) >= a->release_look;
    a->released = (looked && devices_released(a->agent, a->start)) || now >= a->release_due;
    if (!a->released && looked && now - a->release_ns >= RELEASE_LOOK_MS * NS_PER_MS) {
        a->release_look = devices_look_now(a->agent);
        a->release_ns = now;
    }
    return a->released;
}

/* Everything new, records before the end they precede. */
static void report(struct agent_attempt *a)
{
    if (!link_up_ready(a->agent->link) || (a->state == ATTEMPT_ENDED && all_acked(a)))
        return;
    int64_t now = clock_mono_ns();
    bool again = now - a->report_ns > RESEND_MS * NS_PER_MS;
    bool all_sent = true;
    for (size_t i = 0; i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        forward_shards(a, r);
        forward_metrics(a, r);
    }
    send_exits(a, again);
    for (size_t i = 0; i < a->rank_count; i++) {
        const struct agent_rank *r = &a->ranks[i];
        bool metrics = r->metrics.caught_up || now - a->ended_ns > METRICS_WAIT_MS * NS_PER_MS;
        all_sent = all_sent && r->shards.caught_up && metrics && (!r->exit || r->exit_sent);
    }
    bool due = a->state == ATTEMPT_ENDED && all_sent && (!a->end_sent || (again && !a->end_acked));
    if (due && devices_free(a, now))
        send_end(a);
}

/* One that another controller began. Ours knows of it only that it takes devices, from our Register: its end is told
 * by another Register. All else is kept until its own controller is back. */
static void poll_of_another(struct agent_attempt *a)
{
    if (a->state == ATTEMPT_ENDED)
        return;
    load_identities(a);
    look_after_keeper(a);
    if (a->state == ATTEMPT_ENDED && !a->epilog_runs)
        link_up_again(a->agent->link, "an attempt of another controller has ended, which frees its devices");
}

void attempt_poll(struct agent_attempt *a)
{
    if (a->busy)
        return; /* a thread or a process works on it and says when it is done */
    if (!attempt_is_ours(a)) {
        poll_of_another(a);
        return;
    }
    if (a->state != ATTEMPT_ENDED) {
        load_identities(a);
        look_after_keeper(a);
    }
    if (a->state == ATTEMPT_PREPARED && a->confirmed && !a->kill) {
        attempt_run_keeper(a);
        return;
    }
    for (size_t i = 0; i < a->rank_count && a->state == ATTEMPT_LIVE; i++) {
        look_at_progress(a, &a->ranks[i]);
        look_at_output(a, &a->ranks[i]);
        attempt_ask(a, &a->ranks[i]);
    }
    report(a);
    int64_t now = clock_mono_ns();
    if (a->grace_end_ns && now >= a->grace_end_ns && attempt_alive(a)) {
        log_line(LOG_WARN, "attempt %lld.%d: its grace is over", (long long)a->job, a->attempt);
        attempt_kill(a);
    }
    if (a->acks_dirty && now - a->acks_ns > ACKS_SAVE_MS * NS_PER_MS)
        acks_save(a);
    attempt_try_forget(a);
}

/* ---- events ---- */

static void run_dir_changed(uv_fs_event_t *handle, const char *name, int events, int status)
{
    (void)events;
    struct agent_attempt *a = handle->data;
    /* Output and our own notes are not news; a follower of a log has its own timer. */
    if (!a || status < 0 || (name && (strstr(name, ".log") || strstr(name, "agent.acks"))))
        return;
    agent_poll_soon(a->agent);
}

void attempt_watch(struct agent_attempt *a)
{
    if (a->events)
        return;
    a->events = calloc(1, sizeof *a->events);
    if (!a->events || uv_fs_event_init(a->agent->loop, a->events) < 0) {
        free(a->events);
        a->events = NULL;
        return;
    }
    a->events->data = a;
    if (uv_fs_event_start(a->events, run_dir_changed, a->run_dir, 0) < 0)
        log_line(LOG_DEBUG, "%s is looked at by the clock only", a->run_dir);
}
