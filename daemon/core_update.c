/* Changing what a job was submitted with, while it waits or runs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/core_internal.h"

static void write_into(Boost__JobSpec *spec, const Boost__UpdateRequest *what)
{
    if (spec && what->has_priority) {
        spec->has_priority = 1;
        spec->priority = what->priority;
    }
    if (spec && what->has_time_limit_s) {
        spec->has_time_limit_s = 1;
        spec->time_limit_s = what->time_limit_s;
    }
}

/* Also into what a restart goes by: one that is under way already, and later ones. */
static void apply(struct core *c, struct job *job, const Boost__UpdateRequest *what)
{
    bool queued = job->pending.in;
    if (what->has_priority)
        queue_remove(c, job);
    write_into(job->spec, what);
    write_into(job->resolved, what);
    write_into(job->next_spec, what);
    write_into(job->next_resolved, what);
    job->priority = what->has_priority ? what->priority : job->priority;
    if (what->has_priority && queued)
        queue_add(c, job);
    due_at(c, now_mono(c));
}

static int check(const struct core *c, const struct job *job, const Boost__UpdateRequest *what,
                 const struct core_user *user, struct error *err)
{
    int rc = job_may_change(c, job, user, err);
    if (rc)
        return rc;
    if (job_state_terminal(job->state))
        return error_set(err, ERR_REFUSED, "job %" PRId64 " is %s: %s", job->id,
                         job_state_name(job_shown_state(job)), job_ended_text(job));
    if (what->has_priority && (what->priority < 0 || what->priority >= PRIORITIES)) {
        error_set(err, ERR_INVALID, "priority = %d is not in 0 to 100", what->priority);
        return error_hint(err, "higher is placed first");
    }
    if (what->has_time_limit_s && (what->time_limit_s < 0 || what->time_limit_s > 1000000000)) {
        error_set(err, ERR_INVALID, "time_limit_s = %" PRId64 " is not in 0 to 1000000000", what->time_limit_s);
        return error_hint(err, "seconds over all attempts, 0 for no limit");
    }
    if (!what->has_priority && !what->has_time_limit_s)
        return error_set(err, ERR_INVALID, "the request changes nothing");
    return ERR_OK;
}

void core_update(struct core *c, const Boost__UpdateRequest *what, int64_t id, const struct core_user *user,
                 core_text_reply_fn reply, void *arg)
{
    struct error err;
    struct job *job = core_job(c, id);
    struct answer *x = answer_new(reply, arg);
    int rc = !x ? error_set(&err, ERR_NOMEM, "out of memory") : ERR_OK;
    if (!rc && !job)
        rc = error_set(&err, ERR_NOT_FOUND, "no job %" PRId64, id);
    if (!rc)
        rc = check(c, job, what, user, &err);
    if (rc) {
        reply(arg, rc, &err, "");
        free(x);
        return;
    }
    char actor[128], limit[48] = "";
    snprintf(actor, sizeof actor, "uid %u (%s)", user->uid, user->name ? user->name : "?");
    apply(c, job, what);
    if (what->has_time_limit_s && what->time_limit_s)
        snprintf(limit, sizeof limit, "time limit %" PRId64 " s", what->time_limit_s);
    else if (what->has_time_limit_s)
        snprintf(limit, sizeof limit, "no time limit");
    if (what->has_priority)
        snprintf(x->text, sizeof x->text, "priority %d%s%s", what->priority, *limit ? ", " : "", limit);
    else
        snprintf(x->text, sizeof x->text, "%s", limit);
    add_event(c, job, job->n_attempts, NULL, actor, "updated", "%s", x->text);
    c->schedule = true;
    answer_when_durable(c, x);
    change_commit(c);
}
