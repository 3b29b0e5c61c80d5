/* agent_attempts.h: orders of the controller, its acknowledgements, forgetting. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/agent_checkpoint.h"
#include "daemon/agent_logs.h"
#include "daemon/agent_node.h"
#include "daemon/agent_user.h"
#include "daemon/keeper_exit.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

enum { FORGET_WAIT_MS = 30000 /* for metrics still to be acknowledged */ };

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
        error_set(err, ERR_REFUSED,
                  "the agent of node %s runs as uid %u and takes only jobs of that user, not of %s (uid %u)",
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
            error_set(err, ERR_BUSY, "attempt %d of job %" PRId64 " still has %s on node %s", a->attempt, s->job,
                      a->epilog_runs ? "its epilog" : "processes", agent->node);
            return error_hint(err, "attempt %d may start once their end is confirmed", s->attempt);
        }
    }
    return ERR_OK;
}

/* Copies the node's environment into the order. */
static bool add_node_env(Boost__AttemptStart *s, const Boost__AgentConfig *c)
{
    if (!c->n_env)
        return true;
    s->node_env = calloc(c->n_env, sizeof(Boost__KeyValue *)); /* the message's: freed with it */
    for (size_t i = 0; s->node_env && i < c->n_env; i++) {
        s->node_env[i] = (Boost__KeyValue *)reflect_clone(&c->env[i]->base);
        if (!s->node_env[i])
            return false;
        s->n_node_env++;
    }
    return s->node_env != NULL;
}

/* A copy of the order with what only this node knows filled in. */
static Boost__AttemptStart *complete_order(struct agent *agent, const Boost__AttemptStart *order)
{
    Boost__AttemptStart *s = (Boost__AttemptStart *)reflect_clone(&order->base);
    if (!s)
        return NULL;
    char run_dir[PATH_MAX];
    snprintf(run_dir, sizeof run_dir, "%s/%s-%" PRId64 ".%d", agent->attempts_dir, s->store_id, s->job, s->attempt);
    char **fields[] = {&s->run_dir, &s->rendezvous_socket, &s->data_address, &s->worker_path, &s->node};
    const char *values[] = {run_dir, agent->rendezvous_path, agent->config->data_address, agent->worker_path,
                            agent->node};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        free(*fields[i]);
        *fields[i] = strdup(values[i]);
        if (!*fields[i]) {
            boost__attempt_start__free_unpacked(s, NULL);
            return NULL;
        }
    }
    if (!add_node_env(s, agent->config)) {
        boost__attempt_start__free_unpacked(s, NULL);
        return NULL;
    }
    int wanted = s->spec->resources ? s->spec->resources->threads_per_rank : 0;
    bool cuda = s->spec->resources && s->spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    int fair = !cuda && agent->cores / agent->cpu_slots > 0 ? agent->cores / agent->cpu_slots : 1;
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
                       rc == ERR_BUSY ? BOOST__REASON__VALUE__NONE : BOOST__REASON__VALUE__SpecError, &err, false);
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
    if (start && (rc = devices_assign(agent, start, &err))) {
        boost__attempt_start__free_unpacked(start, NULL);
        attempt_refuse(agent, order->job, order->attempt, BOOST__EXIT_CLASS__VALUE__INFRA,
                       BOOST__REASON__VALUE__NoDevices, &err, false);
        return;
    }
    a = start ? attempts_add(agent, start) : NULL;
    if (!a) {
        error_set(&err, ERR_NOMEM, "no memory for the attempt");
        attempt_refuse(agent, order->job, order->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE,
                       &err, false);
        return;
    }
    a->confirmed = true;
    a->state = ATTEMPT_PREPARING;
    attempt_launch(a);
}

/* ---- stop, checkpoint ---- */

static bool write_control(const struct agent_attempt *a, int rank, size_t offset, const uint32_t *value)
{
    char path[PATH_MAX];
    if (rank_file_path(path, sizeof path, a->run_dir, rank, "control", NULL))
        return false;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    /* A short file is the user's doing: a write would not reach the mapping anyway. */
    bool ok =
        lseek(fd, 0, SEEK_END) >= RANK_FILE_BYTES && pwrite(fd, value, sizeof *value, (off_t)offset) == sizeof *value;
    int errnum = errno;
    close(fd);
    errno = errnum;
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
    uint32_t stop = 1;
    for (size_t i = 0; i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        if (r->exit)
            continue;
        if (!write_control(a, r->rank, offsetof(struct rank_control, stop), &stop))
            log_line(LOG_WARN, "rank %d of %s has no control page: it gets the signal only", r->rank, a->run_dir);
        if (r->has_pid && procid_signal(&r->pid, SIGTERM, NULL) == ERR_IO)
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
    if (a->state == ATTEMPT_ENDED) {
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

/* Ranks agree on the step; each has to see the counter move, and only this agent writes it. False: not now. */
static bool move_counter(const struct agent_attempt *a, int rank)
{
    char path[PATH_MAX];
    uint32_t page[3] = {0};
    if (rank_file_path(path, sizeof path, a->run_dir, rank, "control", NULL))
        return true;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
        return false;
    ssize_t n = fd < 0 ? -1 : pread(fd, page, sizeof page, 0);
    if (fd >= 0)
        close(fd);
    uint32_t next = page[2] + 1;
    return n != sizeof page || write_control(a, rank, offsetof(struct rank_control, checkpoint), &next);
}

void attempt_ask(const struct agent_attempt *a, struct agent_rank *r)
{
    if (r->ask)
        r->ask = !r->exit && !move_counter(a, r->rank);
}

void attempts_checkpoint(struct agent *agent, const Boost__RequestCheckpoint *order)
{
    struct agent_attempt *a = attempts_find(agent, order->job, order->attempt);
    for (size_t i = 0; a && i < a->rank_count; i++) {
        struct agent_rank *r = &a->ranks[i];
        r->ask = true;
        attempt_ask(a, r);
        if (r->ask)
            log_line(LOG_WARN, "rank %d of %s cannot be asked for a checkpoint (%s): tried again", r->rank, a->run_dir,
                     strerror(errno));
    }
}

void attempt_kill(struct agent_attempt *a)
{
    char path[PATH_MAX];
    struct error err;
    a->kill = true;
    a->grace_end_ns = 0;
    uint64_t one = 1;
    if (a->state == ATTEMPT_PREPARING && a->cancel_fd && write(a->cancel_fd, &one, sizeof one) != sizeof one)
        log_line(LOG_WARN, "the prolog of %s goes on to its end", a->run_dir);
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
            a->ranks[i].has_told = a->ranks[i].hang.reported = false;
            a->ranks[i].tail_end = a->ranks[i].tail_ns = 0;
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

/* In a thread: a big directory takes its time. Renamed first, so that half a one is never adopted. */
struct forgetting {
    uv_work_t work;
    struct agent_attempt *a;
};

void attempt_clear_torn(const struct agent_attempt *a, int32_t first, int32_t last)
{
    struct as_user user;
    struct error err;
    uint32_t gid = a->start->has_gid ? a->start->gid : (uint32_t)getegid();
    if (!a->start->checkpoint_dir || !*a->start->checkpoint_dir)
        return;
    int rc = as_user_begin(&user, a->uid, gid, &err);
    if (!rc) {
        rc = checkpoints_clear_torn(a->start->checkpoint_dir, first, last, &err);
        as_user_end(&user);
    }
    if (rc)
        log_error(LOG_WARN, &err, "half-written checkpoints of an ended attempt stay");
}

static void remove_files(uv_work_t *work)
{
    const struct forgetting *f = work->data;
    const struct agent_attempt *a = f->a;
    struct error err;
    char gone[PATH_MAX + 16];
    attempt_clear_torn(a, a->attempt, a->attempt);
    if (agent_logs_keep(a->agent, a->run_dir, &err))
        log_error(LOG_WARN, &err, "logs of %s are lost", a->run_dir);
    snprintf(gone, sizeof gone, "%s/%s%s", a->agent->attempts_dir, ATTEMPT_GONE_PREFIX, strrchr(a->run_dir, '/') + 1);
    int rc = fs_remove_tree(gone, &err);
    if (!rc && rename(a->run_dir, gone) < 0 && errno != ENOENT)
        rc = error_errno(&err, errno, "cannot rename %s", a->run_dir);
    if (!rc)
        rc = fs_remove_tree(gone, &err);
    if (rc)
        log_error(LOG_WARN, &err, "the files of an ended attempt");
}

static void files_removed(uv_work_t *work, int status)
{
    struct forgetting *f = work->data;
    struct agent_attempt *a = f->a;
    char text[48];
    (void)status;
    free(f);
    a->busy--;
    log_line(LOG_INFO, "attempt %s is done with", attempt_text(a, text));
    attempt_drop(a);
}

void attempt_try_forget(struct agent_attempt *a)
{
    if (!a->forget || a->state != ATTEMPT_ENDED || a->busy || a->epilog_runs || (a->epilog_over && !a->end_sent))
        return;
    if (metrics_owed(a) && clock_mono_ns() - a->ended_ns < FORGET_WAIT_MS * NS_PER_MS)
        return;
    struct forgetting *f = calloc(1, sizeof *f);
    if (!f)
        return; /* at the next look */
    cgroup_remove(&a->cgroup);
    f->a = a;
    f->work.data = f;
    a->going = true;
    a->busy++;
    uv_queue_work(a->agent->loop, &f->work, remove_files, files_removed);
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
