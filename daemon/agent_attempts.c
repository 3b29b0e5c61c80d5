/* agent_attempts.h: the table, adoption at start, orders of the controller. */
#include "daemon/agent_attempts.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_logs.h"
#include "daemon/agent_node.h"
#include "daemon/keeper.h"
#include "daemon/keeper_exit.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

enum { FORGET_WAIT_MS = 30000 /* for metrics still to be acknowledged */ };

/* ---- the table ---- */

const char *attempt_text(const struct agent_attempt *a, char out[48])
{
    snprintf(out, 48, "%" PRId64 ".%d", a->job, a->attempt);
    return out;
}

static bool same_store(const struct agent_attempt *a, const char *store_id)
{
    return !*store_id || !strcmp(a->store_id, store_id);
}

bool attempt_is_ours(const struct agent_attempt *a)
{
    return same_store(a, a->agent->store_id);
}

struct agent_attempt *attempts_find(struct agent *agent, int64_t job, int32_t attempt)
{
    for (struct agent_attempt *a = agent->attempts; a; a = a->next) {
        if (a->job == job && a->attempt == attempt && attempt_is_ours(a))
            return a;
    }
    return NULL;
}

struct agent_rank *attempt_rank(struct agent_attempt *a, int rank)
{
    for (size_t i = 0; i < a->rank_count; i++) {
        if (a->ranks[i].rank == rank)
            return &a->ranks[i];
    }
    return NULL;
}

bool attempt_alive(const struct agent_attempt *a)
{
    return a->state != ATTEMPT_ENDED;
}

/* Takes over `start`. NULL when out of memory; `start` is then freed. */
static struct agent_attempt *add_attempt(struct agent *agent, Boost__AttemptStart *start)
{
    struct agent_attempt *a = calloc(1, sizeof *a);
    struct agent_rank *ranks = calloc(start->n_ranks, sizeof *ranks);
    int used = a ? snprintf(a->run_dir, sizeof a->run_dir, "%s", start->run_dir) : -1;
    if (!a || !ranks || used < 0 || (size_t)used >= sizeof a->run_dir) {
        free(a);
        free(ranks);
        boost__attempt_start__free_unpacked(start, NULL);
        return NULL;
    }
    a->agent = agent;
    a->start = start;
    a->job = start->job;
    a->attempt = start->attempt;
    a->uid = start->has_uid ? start->uid : (uint32_t)geteuid();
    a->ranks = ranks;
    a->rank_count = start->n_ranks;
    snprintf(a->store_id, sizeof a->store_id, "%s", start->store_id);
    for (size_t i = 0; i < a->rank_count; i++)
        ranks[i].rank = start->ranks[i];
    a->next = agent->attempts;
    agent->attempts = a;
    return a;
}

static void events_closed(uv_handle_t *handle)
{
    free(handle);
}

void attempt_drop(struct agent_attempt *a)
{
    for (struct agent_attempt **at = &a->agent->attempts; *at; at = &(*at)->next) {
        if (*at == a) {
            *at = a->next;
            break;
        }
    }
    if (a->events) {
        a->events->data = NULL;
        uv_close((uv_handle_t *)a->events, events_closed);
    }
    for (size_t i = 0; i < a->rank_count; i++) {
        if (a->ranks[i].exit)
            boost__exit_record__free_unpacked(a->ranks[i].exit, NULL);
    }
    free(a->ranks);
    boost__attempt_start__free_unpacked(a->start, NULL);
    free(a);
}

void attempts_close(struct agent *agent)
{
    while (agent->attempts) {
        struct agent_attempt *a = agent->attempts;
        if (a->acks_dirty)
            acks_save(a);
        attempt_drop(a);
    }
}

/* ---- adoption ---- */

/* start.pb as the agent wrote it: the directory is its user's, but this file has to be ours. */
static int load_start(const char *run_dir, const char *name, Boost__AttemptStart **out, struct error *err)
{
    char path[PATH_MAX], expected[128];
    struct stat st;
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    *out = NULL;
    int rc = fs_join(path, sizeof path, err, run_dir, "start.pb");
    if (!rc && lstat(path, &st) < 0)
        rc = error_errno(err, errno, "%s", path);
    if (!rc && (!S_ISREG(st.st_mode) || st.st_uid != geteuid()))
        rc = error_set(err, ERR_CORRUPT, "%s was not written by this agent", path);
    if (!rc)
        rc = fs_read_file(path, &packed, err);
    if (!rc) {
        /* Checks the bytes before they become a message that this process keeps. */
        struct arena a;
        arena_init(&a, 64 << 20);
        if (!packed.len || !reflect_unpack(&boost__attempt_start__descriptor, packed.data, packed.len, &a, err))
            rc = error_set(err, ERR_CORRUPT, "%s is damaged", path);
        else if (!(*out = boost__attempt_start__unpack(NULL, packed.len, packed.data)))
            rc = error_set(err, ERR_NOMEM, "no memory for %s", path);
        arena_free(&a);
    }
    buffer_free(&packed);
    if (rc)
        return rc;
    Boost__AttemptStart *s = *out;
    snprintf(expected, sizeof expected, "%s-%" PRId64 ".%d", s->store_id ? s->store_id : "", s->job, s->attempt);
    if (!s->store_id || !s->n_ranks || !s->run_dir || strcmp(s->run_dir, run_dir) || strcmp(expected, name)) {
        boost__attempt_start__free_unpacked(s, NULL);
        *out = NULL;
        return error_set(err, ERR_CORRUPT, "%s is of another run directory", path);
    }
    return ERR_OK;
}

/* A directory that cannot be read: whatever runs there is killed, since nobody could report it. */
static void quarantine(struct agent *agent, const char *run_dir, const char *name, const struct error *why)
{
    char path[PATH_MAX], lost[PATH_MAX], target[PATH_MAX + 64], marker[PATH_MAX + 16];
    struct procid keeper;
    struct error err;
    int rc = fs_join(path, sizeof path, &err, run_dir, "keeper.id");
    if (!rc && rank_file_regular(path) && !procid_load(path, &keeper, NULL) &&
        !procid_signal(&keeper, SIGTERM, NULL))
        log_line(LOG_WARN, "%s: its keeper still ran and was told to kill everything", name);
    snprintf(marker, sizeof marker, "BOOST_RUN_DIR=%s", run_dir);
    struct proc_sweep sweep = {.marker = marker};
    proc_sweep(&sweep, SIGKILL);
    rc = fs_join(lost, sizeof lost, &err, agent->state_dir, "lost+found");
    if (!rc)
        rc = fs_make_dirs(lost, 0700, &err);
    snprintf(target, sizeof target, "%s/%s.%" PRId64, lost, name, clock_wall_ns() / NS_PER_S);
    if (!rc && rename(run_dir, target) < 0)
        rc = error_errno(&err, errno, "cannot move %s to %s", run_dir, target);
    if (rc)
        log_error(LOG_ERROR, &err, "%s cannot be read (%s) and stays where it is", run_dir, why->message);
    else
        log_line(LOG_ERROR, "%s cannot be read (%s): moved to %s", run_dir, why->message, target);
}

static void adopt(struct agent *agent, const char *name)
{
    char run_dir[PATH_MAX], path[PATH_MAX];
    struct error err;
    Boost__AttemptStart *start;
    if (fs_join(run_dir, sizeof run_dir, &err, agent->attempts_dir, name))
        return;
    int rc = load_start(run_dir, name, &start, &err);
    if (rc == ERR_NOT_FOUND && !fs_join(path, sizeof path, NULL, run_dir, "keeper.id") && !fs_exists(path)) {
        log_line(LOG_INFO, "%s was never finished and nothing of it ran: removed", run_dir);
        if (fs_remove_tree(run_dir, &err))
            log_error(LOG_WARN, &err, "%s", run_dir);
        return;
    }
    if (rc) {
        quarantine(agent, run_dir, name, &err);
        return;
    }
    struct agent_attempt *a = add_attempt(agent, start);
    if (!a) {
        log_line(LOG_ERROR, "no memory to adopt %s", run_dir);
        return;
    }
    acks_load(a);
    bool known = !fs_join(path, sizeof path, NULL, run_dir, "keeper.id") && fs_exists(path);
    int lock = -1;
    if (!known && keeper_lock(run_dir, &lock, &err) != ERR_BUSY) {
        a->state = ATTEMPT_PREPARED; /* the agent died before the keeper was there */
        if (lock >= 0)
            close(lock);
    } else {
        a->state = ATTEMPT_LIVE;
    }
    attempt_watch(a);
    attempt_poll(a);
    log_line(LOG_INFO, "adopted attempt %s: %s", name,
             a->state == ATTEMPT_LIVE    ? "it runs"
             : a->state == ATTEMPT_ENDED ? "it has ended"
                                         : "its keeper never started");
}

int attempts_load(struct agent *agent, struct error *err)
{
    DIR *dir = opendir(agent->attempts_dir);
    if (!dir)
        return error_errno(err, errno, "cannot read %s", agent->attempts_dir);
    struct dirent *e;
    while ((e = readdir(dir))) {
        if (e->d_name[0] != '.')
            adopt(agent, e->d_name);
    }
    closedir(dir);
    return ERR_OK;
}

/* ---- start ---- */

static bool name_is_safe(const char *store_id)
{
    size_t len = strlen(store_id);
    return len > 0 && len <= 16 && strspn(store_id, "0123456789abcdefABCDEF") == len;
}

static int check_order(struct agent *agent, const Boost__AttemptStart *s, struct error *err)
{
    if (!s || s->job <= 0 || s->attempt <= 0 || !s->n_ranks || !s->spec || !s->store_id || !name_is_safe(s->store_id))
        return error_set(err, ERR_PROTOCOL, "the start order is incomplete");
    uint32_t uid = s->has_uid ? s->uid : (uint32_t)geteuid();
    if (geteuid() != 0 && uid != geteuid()) {
        error_set(err, ERR_REFUSED, "the agent of node %s runs as uid %u and takes only jobs of that user, not of %s (uid %u)",
                  agent->node, (unsigned)geteuid(), s->user ? s->user : "another user", (unsigned)uid);
        return error_hint(err, "run boost-agent as root, or submit as its user");
    }
    for (struct agent_attempt *a = agent->attempts; a; a = a->next) {
        if (a->job != s->job || strcmp(a->store_id, s->store_id) || a->attempt == s->attempt)
            continue;
        if (a->attempt > s->attempt)
            return error_set(err, ERR_BUSY, "attempt %d of job %" PRId64 " is older than attempt %d, which node %s has",
                             s->attempt, s->job, a->attempt, agent->node);
        if (attempt_alive(a)) {
            error_set(err, ERR_BUSY, "attempt %d of job %" PRId64 " still has processes on node %s", a->attempt, s->job,
                      agent->node);
            return error_hint(err, "attempt %d may start once their end is confirmed", s->attempt);
        }
    }
    return ERR_OK;
}

/* A copy of the order with what only this node knows filled in. */
static Boost__AttemptStart *complete_order(struct agent *agent, const Boost__AttemptStart *order)
{
    size_t size = boost__attempt_start__get_packed_size(order);
    uint8_t *packed = malloc(size);
    if (!packed)
        return NULL;
    boost__attempt_start__pack(order, packed);
    Boost__AttemptStart *s = boost__attempt_start__unpack(NULL, size, packed);
    free(packed);
    if (!s)
        return NULL;
    char run_dir[PATH_MAX];
    snprintf(run_dir, sizeof run_dir, "%s/%s-%" PRId64 ".%d", agent->attempts_dir, s->store_id, s->job, s->attempt);
    char **fields[] = {&s->run_dir, &s->rendezvous_socket, &s->data_address, &s->worker_path, &s->node};
    const char *values[] = {run_dir, agent->rendezvous_path, agent->config->data_address, agent->worker_path, agent->node};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        free(*fields[i]);
        *fields[i] = strdup(values[i]);
        if (!*fields[i]) {
            boost__attempt_start__free_unpacked(s, NULL);
            return NULL;
        }
    }
    int wanted = s->spec->resources ? s->spec->resources->threads_per_rank : 0;
    int fair = agent->cores / agent->cpu_slots > 0 ? agent->cores / agent->cpu_slots : 1;
    if (s->threads_per_rank <= 0)
        s->threads_per_rank = wanted > 0 ? wanted : fair;
    s->has_threads_per_rank = true;
    return s;
}

void attempts_start(struct agent *agent, const Boost__AttemptStart *order)
{
    struct error err;
    int rc = check_order(agent, order, &err);
    if (rc) {
        attempt_refuse(agent, order ? order->job : 0, order ? order->attempt : 0,
                       rc == ERR_BUSY ? BOOST__EXIT_CLASS__VALUE__INFRA : BOOST__EXIT_CLASS__VALUE__SPEC,
                       rc == ERR_BUSY ? BOOST__REASON__VALUE__NONE : BOOST__REASON__VALUE__SpecError, &err);
        return;
    }
    struct agent_attempt *a = NULL;
    for (a = agent->attempts; a; a = a->next) {
        if (a->job == order->job && a->attempt == order->attempt && !strcmp(a->store_id, order->store_id))
            break;
    }
    if (a) { /* told again: it is on its way, runs or has ended, and the reports say so */
        a->confirmed = true;
        if (a->state == ATTEMPT_PREPARED && !a->kill)
            attempt_run_keeper(a);
        else
            attempt_poll(a);
        return;
    }
    Boost__AttemptStart *start = complete_order(agent, order);
    a = start ? add_attempt(agent, start) : NULL;
    if (!a) {
        error_set(&err, ERR_NOMEM, "no memory for the attempt");
        attempt_refuse(agent, order->job, order->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE, &err);
        return;
    }
    a->confirmed = true;
    a->state = ATTEMPT_PREPARING;
    attempt_launch(a);
}

/* ---- stop, checkpoint ---- */

static bool write_control(struct agent_attempt *a, int rank, size_t offset, const uint32_t *value)
{
    char path[PATH_MAX];
    if (rank_file_path(path, sizeof path, a->run_dir, rank, "control", NULL))
        return false;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    /* A short file is the user's doing: a write would not reach the mapping anyway. */
    bool ok = lseek(fd, 0, SEEK_END) >= RANK_FILE_BYTES && pwrite(fd, value, sizeof *value, (off_t)offset) == sizeof *value;
    close(fd);
    return ok;
}

/* Whether any rank of it has got as far as training, so that there is something to keep. */
static bool has_trained(const struct agent_attempt *a)
{
    for (size_t i = 0; i < a->rank_count; i++) {
        struct rank_status status;
        if (rank_status_read(a->run_dir, a->ranks[i].rank, &status) &&
            (int)status.phase >= BOOST__RANK_UPDATE__PHASE__TRAINING)
            return true;
    }
    return false;
}

static void stop_gently(struct agent_attempt *a, const Boost__StopAttempt *order)
{
    uint32_t stop = order->no_checkpoint ? 2 : 1;
    for (size_t i = 0; i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        if (r->exit)
            continue;
        if (!write_control(a, r->rank, offsetof(struct rank_control, stop), &stop))
            log_line(LOG_WARN, "rank %d of %s has no control page: it gets the signal only", r->rank, a->run_dir);
        if (!order->no_checkpoint && r->has_pid && procid_signal(&r->pid, SIGTERM, NULL) == ERR_IO)
            log_line(LOG_WARN, "rank %d of %s cannot be signalled", r->rank, a->run_dir);
    }
    if (order->grace_ms > 0 && !a->grace_end_ns)
        a->grace_end_ns = clock_mono_ns() + order->grace_ms * NS_PER_MS;
}

static void send_node_end(struct agent *agent, int64_t job, int32_t attempt, const char *note)
{
    Boost__NodeEnd end = BOOST__NODE_END__INIT;
    end.has_job = end.has_attempt = true;
    end.job = job;
    end.attempt = attempt;
    end.note = (char *)(uintptr_t)note;
    agent_send(agent, BOOST__AGENT_MESSAGE__BODY_NODE_END, &end.base);
}

void attempts_stop(struct agent *agent, const Boost__StopAttempt *order)
{
    struct agent_attempt *a = attempts_find(agent, order->job, order->attempt);
    if (!a) {
        send_node_end(agent, order->job, order->attempt, "nothing of this attempt is on the node");
        return;
    }
    if (!attempt_alive(a)) {
        a->end_sent = a->end_acked = false;
        attempt_poll(a);
        return;
    }
    char text[48];
    bool now = order->how == BOOST__STOP_ATTEMPT__HOW__KILL || !has_trained(a);
    log_line(LOG_INFO, "attempt %s: told to %s", attempt_text(a, text), now ? "kill it" : "stop it");
    if (now)
        attempt_kill(a);
    else
        stop_gently(a, order);
    attempt_poll(a);
}

void attempts_checkpoint(struct agent *agent, const Boost__RequestCheckpoint *order)
{
    struct agent_attempt *a = attempts_find(agent, order->job, order->attempt);
    for (size_t i = 0; a && i < a->rank_count; i++) {
        /* Ranks agree on the step; each has to see the counter move, and only this agent writes it. */
        char path[PATH_MAX];
        uint32_t page[3] = {0};
        int rank = a->ranks[i].rank;
        if (rank_file_path(path, sizeof path, a->run_dir, rank, "control", NULL))
            continue;
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        ssize_t n = fd < 0 ? -1 : pread(fd, page, sizeof page, 0);
        if (fd >= 0)
            close(fd);
        uint32_t next = page[2] + 1;
        if (n == sizeof page)
            (void)write_control(a, rank, offsetof(struct rank_control, checkpoint), &next);
    }
}

void attempt_kill(struct agent_attempt *a)
{
    char path[PATH_MAX];
    struct error err;
    a->kill = true;
    a->grace_end_ns = 0;
    if (a->state == ATTEMPT_PREPARING || a->state == ATTEMPT_ENDED)
        return; /* the launch looks at `kill` before it starts anything */
    int rc = fs_join(path, sizeof path, &err, a->run_dir, "stop");
    if (!rc)
        rc = fs_write_atomic(path, "kill\n", 5, 0644, &err);
    if (rc)
        log_error(LOG_WARN, &err, "the keeper is told by a signal instead");
    if (rc && a->has_keeper && procid_signal(&a->keeper, SIGTERM, NULL))
        log_line(LOG_WARN, "the keeper of %s is gone", a->run_dir);
}

/* ---- acknowledgements, forgetting ---- */

void attempts_ack(struct agent *agent, const Boost__Ack *ack)
{
    struct agent_attempt *a = attempts_find(agent, ack->job, ack->attempt);
    if (!a)
        return;
    struct agent_rank *r = attempt_rank(a, ack->rank);
    if (r && ack->has_metrics_seq)
        forward_ack(&r->metrics, ack->metrics_seq);
    if (r && ack->has_shards_seq)
        forward_ack(&r->shards, ack->shards_seq);
    if (r && ack->rank_end)
        r->exit_acked = true;
    if (ack->node_end)
        a->end_acked = true;
    a->acks_dirty = true;
    if (a->forget)
        attempt_try_forget(a);
    else
        agent_poll_soon(agent); /* the window may have room again */
}

void attempts_resend(struct agent *agent)
{
    for (struct agent_attempt *a = agent->attempts; a; a = a->next) {
        a->end_sent = a->end_acked = false;
        for (size_t i = 0; i < a->rank_count; i++) {
            forward_rewind(&a->ranks[i].metrics);
            forward_rewind(&a->ranks[i].shards);
            a->ranks[i].exit_sent = a->ranks[i].exit_acked = false;
            a->ranks[i].has_told = false;
        }
    }
}

static bool metrics_owed(const struct agent_attempt *a)
{
    for (size_t i = 0; i < a->rank_count; i++) {
        const struct forward *f = &a->ranks[i].metrics;
        if (!f->broken && (f->mark_count || !f->caught_up))
            return true;
    }
    return false;
}

void attempt_try_forget(struct agent_attempt *a)
{
    struct error err;
    char text[48];
    if (!a->forget || a->state != ATTEMPT_ENDED || a->busy)
        return;
    if (metrics_owed(a) && clock_mono_ns() - a->ended_ns < FORGET_WAIT_MS * NS_PER_MS)
        return;
    if (agent_logs_keep(a->agent, a->run_dir, &err))
        log_error(LOG_WARN, &err, "logs of attempt %s are lost", attempt_text(a, text));
    cgroup_remove(&a->cgroup);
    if (fs_remove_tree(a->run_dir, &err))
        log_error(LOG_WARN, &err, "run directory of attempt %s", attempt_text(a, text));
    log_line(LOG_INFO, "attempt %s is done with", attempt_text(a, text));
    attempt_drop(a);
}

void attempts_forget(struct agent *agent, int64_t job, int32_t attempt)
{
    struct agent_attempt *a = attempts_find(agent, job, attempt);
    if (!a)
        return;
    a->forget = true;
    if (attempt_alive(a))
        attempt_kill(a);
    attempt_poll(a); /* forgets it when that is possible now */
}

void attempts_verdict(struct agent *agent, const Boost__Verdict *verdict)
{
    struct agent_attempt *a = attempts_find(agent, verdict->job, verdict->attempt);
    if (!a)
        return;
    switch (verdict->what) {
    case BOOST__VERDICT__WHAT__FENCE:
        if (attempt_alive(a))
            attempt_kill(a);
        attempt_poll(a);
        break;
    case BOOST__VERDICT__WHAT__FORGET:
        attempts_forget(agent, verdict->job, verdict->attempt);
        break;
    default:
        a->confirmed = true;
        if (a->state == ATTEMPT_PREPARED && !a->kill)
            attempt_run_keeper(a);
        break;
    }
}
