/* Restarting on a user's word: a job that has not ended goes on in a new attempt, with other
 * settings or from an older checkpoint; one that has ended goes on as a new job.
 *
 * The changes wait in the job's row until the live attempt is over, since what that still writes
 * belongs to the old ones. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"
#include "worker/plan/plan.h"

static void drop_changes(struct job *job)
{
    if (job->next_spec)
        boost__job_spec__free_unpacked(job->next_spec, NULL);
    if (job->next_resolved)
        boost__job_spec__free_unpacked(job->next_resolved, NULL);
    job->next_spec = job->next_resolved = NULL;
    job->next_step = -1;
}

void job_take_changes(struct core *c, struct job *job)
{
    if ((!job->next_spec && job->next_step < 0) || job_live_attempt(job))
        return;
    bool pends = job->pending.in;
    if (job->next_spec && job->next_resolved && !job_state_terminal(job->state)) {
        Boost__JobSpec *spec = job->spec, *resolved = job->resolved;
        queue_remove(c, job);
        job->spec = job->next_spec;
        job->resolved = job->next_resolved;
        job->next_spec = spec;
        job->next_resolved = resolved;
        job->priority = job->resolved->priority;
        job->step_ms = 0;
        if (pends)
            queue_add(c, job);
    }
    if (job->next_step >= 0 && !job_state_terminal(job->state)) {
        checkpoints_set_aside(c, job, job->next_step);
        if (job->step > job->next_step)
            job->step = job->next_step;
    }
    drop_changes(job);
    c->schedule = true;
    mark_job(c, job);
}

/* ---- the request ----------------------------------------------------------------------------- */

struct restart {
    core_restart_reply_fn reply;
    void *arg;
    int64_t job;
    bool new_job, replied;
    char text[512];
    /* Of a job that has not ended. */
    Boost__JobSpec *spec, *resolved; /* NULL: unchanged */
    int64_t from_step;               /* -1: newest */
    char actor[128];
};

static void restarted(struct core *c, void *arg, int rc, const struct error *err)
{
    struct restart *x = arg;
    (void)c;
    if (!x->replied)
        x->reply(x->arg, rc, rc ? err : NULL, x->job, x->new_job, x->text);
}

static void restart_late(struct core *c, void *arg, const struct error *err)
{
    struct restart *x = arg;
    struct error late = answer_late_error(err);
    (void)c;
    x->replied = true;
    x->reply(x->arg, (int)late.code, &late, x->job, x->new_job, "");
}

static void drop_restart(void *arg)
{
    struct restart *x = arg;
    if (x->spec)
        boost__job_spec__free_unpacked(x->spec, NULL);
    if (x->resolved)
        boost__job_spec__free_unpacked(x->resolved, NULL);
    free(x);
}

static void refuse(struct restart *x, const struct error *err)
{
    x->reply(x->arg, (int)err->code, err, x->job, false, "");
    drop_restart(x);
}

/* A job that goes on from its own state begins nowhere else, and draws no weights. */
static int check_origin(const struct job *job, const Boost__JobSpec *spec, struct error *err)
{
    const char *began = init_path(job->spec), *asked = init_path(spec);
    if (asked && (!began || strcmp(asked, began) != 0)) {
        error_set(err, ERR_INVALID, "a job that is restarted goes on from its own checkpoint, not from %.300s", asked);
        return error_hint(err, "boostctl submit FILE --set checkpoint.init_from.path=%.200s", asked);
    }
    if (spec->run && job->spec->run && spec->run->seed != job->spec->run->seed) {
        error_set(err, ERR_INVALID, "run.seed = %" PRId64 ", the weights were drawn with %" PRId64, spec->run->seed,
                  job->spec->run->seed);
        return error_hint(err, "--set run.seed=%" PRId64 "; other weights need a new job (boostctl submit)",
                          job->spec->run->seed);
    }
    return ERR_OK;
}

/* What a restart may not change, or changes in vain. */
static int check_changes(const struct job *job, const Boost__JobSpec *spec, const Boost__JobSpec *resolved,
                         const struct checkpoint *from, struct error *err)
{
    bool writes = job->state == STATE(RUNNING); /* one more when it stops, and goes on from that */
    if (!spec->name || strcmp(spec->name, job->name) != 0) {
        error_set(err, ERR_INVALID, "a restart does not rename job %" PRId64 " (%s)", job->id, job->name);
        return error_hint(err, "leave name as it is");
    }
    if (from && from->step >= resolved->run->steps) {
        error_set(err, ERR_INVALID, "run.steps = %" PRId64 ": the checkpoint is of step %" PRId64 " already",
                  resolved->run->steps, from->step);
        return error_hint(err, "raise run.steps, or name an older checkpoint with --from");
    }
    if (!from && !writes)
        return ERR_OK;
    int rc = check_origin(job, spec, err);
    if (rc || !plan_continues(job->resolved, resolved, false, err))
        return rc;
    return from ? (int)err->code : error_context(err, "job %" PRId64 " checkpoints and goes on from that", job->id);
}

/* ---- a job that has not ended ---------------------------------------------------------------- */

static int check_state(const struct job *job, struct error *err)
{
    if (job->state == STATE(HELD) || job->state == STATE(QUEUED) ||
        job_step(job->state, job->stop_target, EV_RESTART).legal)
        return ERR_OK;
    error_set(err, ERR_REFUSED, "job %" PRId64 " is %s: it is being stopped already", job->id,
              job_state_name(job->state));
    return error_hint(err, "restart it when it has stopped");
}

/* Everything that can be refused without looking at files. */
static int prepare(struct core *c, struct job *job, const Boost__JobSpec *spec, struct restart *x, struct error *err)
{
    struct checkpoint *from = checkpoints_newest(job, NULL);
    int rc = check_state(job, err);
    if (!rc && x->from_step >= 0)
        rc = checkpoint_choose(job, x->from_step, &from, err);
    if (rc || !spec)
        return rc;
    rc = spec_resolve(c, spec, job->uid, &x->resolved, err);
    if (!rc)
        rc = check_changes(job, spec, x->resolved, from, err);
    x->spec = rc ? NULL : (Boost__JobSpec *)reflect_clone(&spec->base);
    return rc || x->spec ? rc : error_set(err, ERR_NOMEM, "out of memory");
}

static void say_restart(struct core *c, const struct job *job, const char *where, struct restart *x)
{
    const struct attempt *a = job_live_attempt(job);
    if (a && a->grace_due)
        snprintf(x->text, sizeof x->text,
                 "finishes its step, checkpoints (at most %.0f s), then goes on in attempt %d, %s",
                 (double)(a->grace_due - now_mono(c)) / (double)NS_PER_S, job->n_attempts + 1, where);
    else
        snprintf(x->text, sizeof x->text, "goes on in attempt %d, %s", job->n_attempts + 1, where);
}

/* The job stops, where it runs, with the changes in its row. */
static void begin(struct core *c, struct job *job, struct restart *x)
{
    const char *with = x->spec ? " with changes" : "";
    char where[64] = "from its newest checkpoint";
    bool live = job_live_attempt(job) != NULL, held = job->state == STATE(HELD);
    drop_changes(job); /* of a restart before, which has not begun */
    job->next_spec = x->spec;
    job->next_resolved = x->resolved;
    job->next_step = x->from_step;
    x->spec = x->resolved = NULL;
    job->restarts_used = job->stuck_attempts = job->backoff_count = 0;
    if (x->from_step >= 0)
        snprintf(where, sizeof where, "from the checkpoint of step %" PRId64, x->from_step);
    job_reason(job, REASON(NONE), "restarted by %s%s, %s", x->actor, with, where);
    add_event(c, job, job->n_attempts, NULL, x->actor, "restart", "to be restarted%s, %s; at step %" PRId64, with,
              where, job->step < 0 ? 0 : job->step);
    if (job->state == STATE(QUEUED)) {
        start_cancel(c, job);
        start_anew(c, job);
        job_take_changes(c, job);
    } else {
        job_fire(c, job, held ? EV_RELEASE : EV_RESTART);
    }
    if (!live && job->state == STATE(RECOVERING))
        attempt_say_end(c, job, job->n_attempts);
    say_restart(c, job, where, x);
    mark_job(c, job);
    after_durable_or_late(c, restarted, restart_late, x, drop_restart);
}

/* While its files were looked at the job went on: what held then may not hold now. */
static void preflighted(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct restart *x = t->arg;
    struct job *job = core_job(c, x->job);
    struct checkpoint *from = job ? checkpoints_newest(job, NULL) : NULL;
    struct error why;
    (void)reply;
    t->arg = NULL;
    t->drop = NULL;
    if (preflight_is_definite(rc)) {
        why = *err;
        why.code = ERR_INVALID;
        refuse(x, &why);
    } else if (!job || job_state_terminal(job->state)) {
        error_set(&why, ERR_REFUSED, "job %" PRId64 " has ended meanwhile", x->job);
        error_hint(&why, "restart it again: it goes on as a new job");
        refuse(x, &why);
    } else if (check_state(job, &why) || (x->from_step >= 0 && checkpoint_choose(job, x->from_step, &from, &why)) ||
               (x->spec && check_changes(job, x->spec, x->resolved, from, &why))) {
        refuse(x, &why);
    } else {
        begin(c, job, x);
    }
}

/* ---- an ended job -------------------------------------------------------------------------- */

static void resubmitted(void *arg, int rc, const struct error *err, int64_t job)
{
    struct restart *x = arg;
    char text[600];
    snprintf(text, sizeof text, "queued: %s", x->text);
    x->reply(x->arg, rc, err, job, true, rc ? "" : text);
    free(x);
}

/* Takes over x. */
static void restart_ended(struct core *c, struct job *job, const Boost__JobSpec *spec, const struct checkpoint *from,
                          const struct core_user *user, struct restart *x)
{
    struct arena mem;
    struct error err;
    arena_init(&mem, 64 << 20);
    Boost__JobSpec *again = (Boost__JobSpec *)reflect_copy(&mem, spec ? &spec->base : &job->spec->base);
    Boost__InitFrom *init = arena_alloc(&mem, sizeof *init);
    char *path = from ? arena_printf(&mem, "job:%" PRId64 "@%" PRId64, job->id, from->step) : NULL;
    if (!again || !again->checkpoint || !init || (from && !path)) {
        error_set(&err, ERR_NOMEM, "out of memory");
        refuse(x, &err);
    } else if (from && spec && check_origin(job, spec, &err)) {
        refuse(x, &err);
    } else {
        if (from) {
            boost__init_from__init(init);
            init->path = path;
            again->checkpoint->init_from = init;
            snprintf(x->text, sizeof x->text, "goes on from the checkpoint of step %" PRId64 " of job %" PRId64,
                     from->step, job->id);
        } else {
            snprintf(x->text, sizeof x->text, "begins anew: job %" PRId64 " has no checkpoint", job->id);
        }
        core_submit(c, again, user, false, resubmitted, x);
    }
    arena_free(&mem);
}

void core_restart(struct core *c, int64_t id, const Boost__JobSpec *spec, int64_t from_step,
                  const struct core_user *user, core_restart_reply_fn reply, void *arg)
{
    struct error err;
    struct job *job = core_job(c, id);
    struct restart *x = calloc(1, sizeof *x);
    int rc = job ? ERR_OK : error_set(&err, ERR_NOT_FOUND, "no job %" PRId64, id);
    if (!rc)
        rc = job_may_change(c, job, user, &err);
    if (!x) {
        error_set(&err, ERR_NOMEM, "out of memory");
        reply(arg, ERR_NOMEM, &err, id, false, "");
        return;
    }
    *x = (struct restart){.reply = reply, .arg = arg, .job = id, .from_step = from_step < 0 ? -1 : from_step};
    snprintf(x->actor, sizeof x->actor, "uid %u (%s)", user->uid, user->name ? user->name : "?");
    if (!rc && job_state_terminal(job->state)) {
        struct core_user owner = {.uid = job->uid, .gid = job->gid, .name = job->user};
        struct checkpoint *from = checkpoints_newest(job, NULL);
        if (from_step >= 0)
            rc = checkpoint_choose(job, from_step, &from, &err);
        if (!rc) {
            restart_ended(c, job, spec, from, &owner, x);
            return;
        }
    } else if (!rc) {
        rc = prepare(c, job, spec, x, &err);
    }
    if (rc)
        refuse(x, &err);
    else if (!spec || !preflight_send(c, x->resolved, job->uid, job->gid, preflighted, x, drop_restart))
        begin(c, job, x);
    change_commit(c);
}
