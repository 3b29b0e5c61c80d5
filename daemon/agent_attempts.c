/* agent_attempts.h: the table, and adoption at start. */
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

#include "daemon/agent_node.h"
#include "daemon/keeper.h"
#include "daemon/keeper_exit.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

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
    return a->state != ATTEMPT_ENDED || a->epilog_runs;
}

struct agent_attempt *attempts_add(struct agent *agent, Boost__AttemptStart *start)
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
        rc = fs_read_regular(path, &packed, err);
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

static bool runs(const char *run_dir)
{
    char marker[PATH_MAX + 16];
    int lock = -1;
    if (keeper_lock(run_dir, &lock, NULL) == ERR_BUSY)
        return true;
    if (lock >= 0)
        close(lock);
    snprintf(marker, sizeof marker, "BOOST_RUN_DIR=%s", run_dir);
    struct proc_sweep sweep = {.marker = marker};
    return proc_sweep(&sweep, 0) > 0;
}

static int check_name(const struct agent *agent, const char *name, struct error *err)
{
    char run_dir[PATH_MAX];
    Boost__AttemptStart *start;
    if (fs_join(run_dir, sizeof run_dir, NULL, agent->attempts_dir, name) || load_start(run_dir, name, &start, NULL))
        return ERR_OK; /* adoption says what is wrong with it */
    if (start->node && *start->node && strcmp(start->node, agent->node) != 0 && runs(run_dir)) {
        error_set(err, ERR_BUSY,
                  "attempt %" PRId64 ".%d of node %s runs in the state directory %s, and this agent is node %s%s",
                  start->job, start->attempt, start->node, agent->state_dir, agent->node,
                  *agent->config->node ? "" : " (the host name)");
        error_hint(err,
                   "start it with --node %s (node in agent.conf) until its jobs here are over (boostctl cancel or hold "
                   "ends them); with another --state-dir they go on with nobody to look after them",
                   start->node);
    }
    boost__attempt_start__free_unpacked(start, NULL);
    return err->code;
}

int attempts_check_names(const struct agent *agent, struct error *err)
{
    error_clear(err);
    DIR *dir = opendir(agent->attempts_dir);
    if (!dir)
        return error_errno(err, errno, "cannot read %s", agent->attempts_dir);
    struct dirent *e;
    int rc = ERR_OK;
    while (!rc && (e = readdir(dir)))
        rc = e->d_name[0] == '.' ? ERR_OK : check_name(agent, e->d_name, err);
    closedir(dir);
    return rc;
}

/* A directory that cannot be read: whatever runs there is killed, since nobody could report it. */
static void quarantine(struct agent *agent, const char *run_dir, const char *name, const struct error *why)
{
    char path[PATH_MAX], lost[PATH_MAX], target[PATH_MAX + 64], marker[PATH_MAX + 16];
    struct procid keeper;
    struct error err;
    int rc = fs_join(path, sizeof path, &err, run_dir, "keeper.id");
    if (!rc && !procid_load(path, &keeper, NULL) && !procid_signal(&keeper, SIGTERM, NULL))
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
    struct agent_attempt *a = attempts_add(agent, start);
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

static void remove_gone(const struct agent *agent, const char *name)
{
    char path[PATH_MAX];
    struct error err;
    if (fs_join(path, sizeof path, &err, agent->attempts_dir, name) || fs_remove_tree(path, &err))
        log_error(LOG_WARN, &err, "%s", name);
}

int attempts_load(struct agent *agent, struct error *err)
{
    DIR *dir = opendir(agent->attempts_dir);
    if (!dir)
        return error_errno(err, errno, "cannot read %s", agent->attempts_dir);
    struct dirent *e;
    while ((e = readdir(dir))) {
        if (!strncmp(e->d_name, ATTEMPT_GONE_PREFIX, strlen(ATTEMPT_GONE_PREFIX)))
            remove_gone(agent, e->d_name);
        else if (e->d_name[0] != '.')
            adopt(agent, e->d_name);
    }
    closedir(dir);
    return ERR_OK;
}
