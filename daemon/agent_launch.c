/* agent_attempts.h: from an order to a running keeper. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_data.h"
#include "daemon/agent_init.h"
#include "daemon/agent_node.h"
#include "daemon/agent_preflight.h"
#include "daemon/keeper.h"
#include "daemon/log.h"
#include "proto/base/fs.h"
#include "proto/jobfile.h"

enum {
    LOG_TAIL = 400,
    FILES_MS = 120000, /* for the preflight: beyond it a file system does not answer */
};

void attempt_refuse(struct agent *agent, int64_t job, int32_t attempt, Boost__ExitClass__Value class_,
                    Boost__Reason__Value reason, const struct error *why, bool epilog)
{
    Boost__AttemptRefused r = BOOST__ATTEMPT_REFUSED__INIT;
    log_error(LOG_WARN, why, "attempt %lld.%d is refused", (long long)job, attempt);
    r.has_job = r.has_attempt = r.has_class_ = r.has_reason = true;
    r.job = job;
    r.attempt = attempt;
    r.class_ = class_;
    r.reason = reason;
    r.text = (char *)(uintptr_t)why->message;
    r.hint = (char *)(uintptr_t)why->hint;
    r.has_epilog = true;
    r.epilog = epilog;
    /* Not durable: when it is lost the controller orders the start again and hears it again. */
    agent_send(agent, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED, &r.base);
}

/* ---- in a thread ---- */

struct launch {
    uv_work_t work;
    struct agent_attempt *a;
    int rc;
    struct error err;
    Boost__ExitClass__Value class_;
    Boost__Reason__Value reason;
    struct findings found; /* wrong with the node */
    bool prolog_failed;
    Boost__JobSpec *spec; /* with files in the place of URLs; NULL: there are none */
};

static int make_pages(const struct agent_attempt *a, struct error *err)
{
    static const struct {
        const char *suffix;
        uint32_t magic;
    } pages[] = {{"status", RANK_STATUS_MAGIC}, {"control", RANK_CONTROL_MAGIC}};
    for (size_t i = 0; i < a->rank_count; i++) {
        for (size_t k = 0; k < 2; k++) {
            char path[PATH_MAX];
            int rank = a->ranks[i].rank;
            void *page = rank_file_map(a->run_dir, rank, pages[k].suffix, pages[k].magic, 1, err);
            if (!page)
                return (int)err->code;
            rank_file_unmap(page);
            int rc = rank_file_path(path, sizeof path, a->run_dir, rank, pages[k].suffix, err);
            if (!rc && geteuid() == 0 && chown(path, a->uid, a->start->gid) < 0)
                rc = error_errno(err, errno, "cannot give %s to uid %u", path, a->uid);
            if (rc)
                return rc;
        }
    }
    return ERR_OK;
}

/* A checkpoint by URL lies in the cache by now. */
static int local_resume(Boost__AttemptStart *start, Boost__CheckpointRef *resume, char path[PATH_MAX],
                        struct error *err)
{
    bool has = false;
    if (!start->resume || !jobfile_is_url(start->resume->path))
        return ERR_OK;
    int rc = init_local(start->spec, path, &has, err);
    *resume = *start->resume;
    resume->path = path;
    start->resume = resume;
    return rc || has ? rc : error_set(err, ERR_PROTOCOL, "a checkpoint by URL is not the job's");
}

/* The directory is the job's user's own; start.pb comes last and makes it count. */
static int make_run_dir(const struct agent_attempt *a, Boost__JobSpec *spec, struct error *err)
{
    char path[PATH_MAX];
    Boost__AttemptStart start = *a->start;
    Boost__CheckpointRef resume;
    char fetched[PATH_MAX];
    start.spec = spec;
    struct buffer packed;
    buffer_init(&packed, LIMIT_FRAME);
    int rc = local_resume(&start, &resume, fetched, err);
    if (!rc)
        rc = fs_remove_tree(a->run_dir, err);
    if (!rc)
        rc = fs_make_dirs(a->run_dir, 0700, err);
    if (!rc)
        rc = make_pages(a, err);
    if (!rc)
        rc = fs_join(path, sizeof path, err, a->run_dir, "start.pb");
    uint8_t *at = buffer_reserve(&packed, boost__attempt_start__get_packed_size(&start));
    if (!rc && !at)
        rc = error_set(err, ERR_INVALID, "the start order is over %d bytes", LIMIT_FRAME);
    if (!rc) {
        packed.len = boost__attempt_start__pack(&start, at);
        rc = fs_write_durable(path, packed.data, packed.len, 0644, err);
    }
    if (!rc && geteuid() == 0 && chown(a->run_dir, a->uid, a->start->gid) < 0)
        rc = error_errno(err, errno, "cannot give %s to uid %u", a->run_dir, a->uid);
    if (!rc)
        rc = fs_sync_dir(a->agent->attempts_dir, err);
    buffer_free(&packed);
    return rc;
}

static int check_worker(const char *path, struct error *err)
{
    if (access(path, X_OK) == 0)
        return ERR_OK;
    error_errno(err, errno, "cannot run %s", path);
    return error_hint(err, "install boost-worker next to boost-agent");
}

/* What would stop it here whatever the job is. */
static int check_node(struct launch *l)
{
    const struct agent *agent = l->a->agent;
    char text[600];
    checks_at_once(agent->config, &l->found);
    check_earlier_attempts(agent->attempts_dir, l->a->start, &l->found);
    if (!l->found.n) /* the script takes longer, and is not needed to know */
        check_script(agent->config, agent->node, l->a->start, &l->found);
    if (!l->found.n)
        return check_room(l->a->start, &l->err);
    findings_text(&l->found, text, sizeof text);
    error_set(&l->err, ERR_BUSY, "health check: %s", text);
    return error_hint(&l->err, "the node takes no work until its check passes (boostctl node show %s)", agent->node);
}

static int run_prolog(struct launch *l)
{
    struct agent_attempt *a = l->a;
    const Boost__AgentConfig *c = a->agent->config;
    if (!*c->prolog)
        return ERR_OK;
    a->prolog_ran = true;
    int rc = site_script("prolog", c->prolog, c->prolog_timeout_ms, a->cancel_fd, a->agent->node, a->start, &l->err);
    l->prolog_failed = rc && rc != ERR_REFUSED;
    return rc;
}

static void prepare(uv_work_t *work)
{
    struct launch *l = work->data;
    struct agent_attempt *a = l->a;
    uint32_t gid = a->start->has_gid ? a->start->gid : (uint32_t)getegid();
    l->class_ = BOOST__EXIT_CLASS__VALUE__SPEC;
    l->reason = BOOST__REASON__VALUE__DataError;
    if (data_has_urls(a->start->spec))
        l->rc = data_local(a->start->spec, &l->spec, &l->err);
    if (l->rc)
        return;
    Boost__JobSpec *spec = l->spec ? l->spec : a->start->spec;
    l->rc = agent_preflight(spec, a->start->checkpoint_dir, a->uid, gid, &l->reason, &l->err);
    if (l->rc)
        return;
    /* Of a node that never came back nobody else would clear it. */
    if (a->attempt > 1 && a->rank_count && a->ranks[0].rank == 0)
        attempt_clear_torn(a, 1, a->attempt - 1);
    l->class_ = BOOST__EXIT_CLASS__VALUE__INFRA;
    l->reason = BOOST__REASON__VALUE__NONE;
    l->rc = check_node(l);
    if (!l->rc)
        l->rc = check_worker(a->start->worker_path, &l->err);
    if (!l->rc && a->start->n_devices)
        l->rc = agent_preflight_cuda(a->start->worker_path, &l->err);
    if (!l->rc)
        l->rc = run_prolog(l);
    if (!l->rc)
        l->rc = make_run_dir(a, spec, &l->err);
    if (l->rc == ERR_NOSPACE)
        l->reason = BOOST__REASON__VALUE__DiskFull;
}

/* ---- on the loop ---- */

/* Nothing of it ran: as if it had never been ordered. What a prolog has set up an epilog takes down. */
static void give_up(struct agent_attempt *a, const struct launch *l)
{
    struct error err;
    if (fs_remove_tree(a->run_dir, &err))
        log_error(LOG_WARN, &err, "%s", a->run_dir);
    if (a->prolog_ran && !l->prolog_failed) {
        a->state = ATTEMPT_ENDED;
        a->forget = a->end_sent = true;
        attempt_epilog(a);
    }
    if (a->epilog_runs) /* for whoever hears of its end alone: a refusal is not told again */
        snprintf(a->note, sizeof a->note, "not started: %.400s", l->err.message);
    attempt_refuse(a->agent, a->job, a->attempt, l->class_, l->reason, &l->err, a->epilog_runs);
    if (!a->epilog_runs)
        attempt_drop(a);
}

static void prepared(uv_work_t *work, int status)
{
    struct launch *l = work->data;
    struct agent_attempt *a = l->a;
    a->busy--;
    if (l->spec)
        protobuf_c_message_free_unpacked(&l->spec->base, NULL);
    l->spec = NULL;
    if (a->cancel_fd > 0)
        close(a->cancel_fd);
    a->cancel_fd = 0;
    if (status == UV_ECANCELED || a->agent->closing) { /* what is on disk is for the next agent */
        free(l);
        return;
    }
    if (l->found.n) /* told before the refusal: the job is not to come back here */
        health_found(a->agent, &l->found);
    if (l->prolog_failed) {
        health_failed(a->agent, "prolog", l->err.message);
        error_context(&l->err, "prolog");
    }
    if (l->rc && !a->kill) {
        give_up(a, l);
    } else if (l->rc) { /* ordered to stop meanwhile: the end counts, not why it could not begin */
        if (fs_remove_tree(a->run_dir, &l->err))
            log_error(LOG_WARN, &l->err, "%s", a->run_dir);
        a->state = ATTEMPT_ENDED;
        if (a->prolog_ran && !l->prolog_failed)
            attempt_epilog(a);
        attempt_poll(a);
    } else {
        a->state = ATTEMPT_PREPARED;
        attempt_watch(a);
        if (a->kill)
            attempt_poll(a);
        else
            attempt_run_keeper(a);
    }
    free(l);
}

void attempt_tell_doing(struct agent_attempt *a)
{
    const Boost__AgentConfig *c = a->agent->config;
    Boost__AttemptDoing doing = BOOST__ATTEMPT_DOING__INIT;
    if (a->state != ATTEMPT_PREPARING || !*c->prolog)
        return;
    doing.has_job = doing.has_attempt = true;
    doing.job = a->job;
    doing.attempt = a->attempt;
    doing.text = "prolog";
    doing.has_limit_ms = true;
    doing.limit_ms = FILES_MS + c->prolog_timeout_ms + (*c->health_script ? c->health_timeout_ms : 0);
    agent_send(a->agent, BOOST__AGENT_MESSAGE__BODY_DOING, &doing.base);
}

void attempt_launch(struct agent_attempt *a)
{
    struct launch *l = calloc(1, sizeof *l);
    struct error err;
    if (!l) {
        error_set(&err, ERR_NOMEM, "no memory to prepare the attempt");
        attempt_refuse(a->agent, a->job, a->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE, &err,
                       false);
        attempt_drop(a);
        return;
    }
    l->a = a;
    l->work.data = l;
    if (*a->agent->config->prolog)
        a->cancel_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    a->busy++;
    uv_queue_work(a->agent->loop, &l->work, prepare, prepared);
    attempt_tell_doing(a);
}

struct keeper_process {
    uv_process_t process;
    struct agent_attempt *a;
};

static void process_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void keeper_failed(struct agent_attempt *a, const char *what)
{
    struct launch l = {.class_ = BOOST__EXIT_CLASS__VALUE__INFRA, .reason = BOOST__REASON__VALUE__NONE};
    char path[PATH_MAX];
    struct buffer log;
    buffer_init(&log, 1 << 20);
    if (!fs_join(path, sizeof path, NULL, a->run_dir, "keeper.log") && fs_read_regular(path, &log, NULL))
        buffer_clear(&log);
    size_t from = log.len > LOG_TAIL ? log.len - LOG_TAIL : 0;
    error_set(&l.err, ERR_IO, "boost-keeper %s: %s", what, log.len ? (char *)log.data + from : "it left no message");
    buffer_free(&log);
    give_up(a, &l);
}

/* The process that was run has made the keeper (0) or could not. */
static void keeper_started(uv_process_t *process, int64_t exit_status, int term_signal)
{
    struct keeper_process *k = process->data;
    struct agent_attempt *a = k->a;
    char path[PATH_MAX], what[64];
    struct procid id;
    uv_close((uv_handle_t *)process, process_closed);
    a->busy--;
    if (a->agent->closing)
        return;
    /* A keeper that an agent before us had started may have been quicker: then this one had to give up. With the
     * lock in hand no other can begin, and the directory may go. */
    int lock = -1;
    bool there = exit_status == 0 || keeper_lock(a->run_dir, &lock, NULL) == ERR_BUSY ||
                 (!fs_join(path, sizeof path, NULL, a->run_dir, "keeper.id") && !procid_load(path, &id, NULL));
    if (there) {
        if (lock >= 0)
            close(lock);
        a->state = ATTEMPT_LIVE;
        attempt_poll(a);
        return;
    }
    snprintf(what, sizeof what, "ended with %s %lld", term_signal ? "signal" : "status",
             term_signal ? (long long)term_signal : (long long)exit_status);
    keeper_failed(a, what);
    if (lock >= 0)
        close(lock);
}

void attempt_run_keeper(struct agent_attempt *a)
{
    struct keeper_process *k = calloc(1, sizeof *k);
    char *args[] = {a->agent->keeper_path, a->run_dir, NULL};
    uv_stdio_container_t stdio[3] = {{.flags = UV_IGNORE}, {.flags = UV_IGNORE}, {.flags = UV_IGNORE}};
    uv_process_options_t options = {.exit_cb = keeper_started,
                                    .file = a->agent->keeper_path,
                                    .args = args,
                                    .cwd = "/",
                                    .stdio_count = 3,
                                    .stdio = stdio};
    if (!k) {
        keeper_failed(a, "cannot be run: no memory");
        return;
    }
    k->a = a;
    k->process.data = k;
    a->state = ATTEMPT_STARTING;
    int rc = uv_spawn(a->agent->loop, &k->process, &options);
    if (rc < 0) {
        uv_close((uv_handle_t *)&k->process, process_closed);
        keeper_failed(a, uv_strerror(rc));
        return;
    }
    a->busy++;
}
