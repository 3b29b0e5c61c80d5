/* Changing what a job was submitted with, while it waits or runs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/core_internal.h"

struct update {
    void (*reply)(void *arg, int rc, const struct error *err, const char *text);
    void *arg;
    char text[256];
    bool replied;
};

static void updated(struct core *c, void *arg, int rc, const struct error *err)
{
    struct update *x = arg;
    (void)c;
    if (!x->replied)
        x->reply(x->arg, rc, rc ? err : NULL, x->text);
}

static void update_late(struct core *c, void *arg, const struct error *err)
{
    struct update *x = arg;
    struct error late = *err;
    (void)c;
    error_context(&late, "not done yet");
    error_hint(&late, "it is done by itself as soon as the state directory can be written");
    x->replied = true;
    x->reply(x->arg, (int)late.code, &late, "");
}

static void drop_update(void *arg)
{
    free(arg);
}

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
        return error_set(err, ERR_REFUSED, "job %" PRId64 " is %s: it has ended", job->id, job_state_name(job->state));
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
                 void (*reply)(void *arg, int rc, const struct error *err, const char *text), void *arg)
{
    struct error err;
    struct job *job = core_job(c, id);
    struct update *x = calloc(1, sizeof *x);
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
    *x = (struct update){.reply = reply, .arg = arg};
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
    after_durable_or_late(c, updated, update_late, x, drop_update);
    change_commit(c);
}
