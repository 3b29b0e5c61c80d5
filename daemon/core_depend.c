/* What a job waits for before it may be placed at all: other jobs, and its user's limits. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/dependency.h"

/* ---- dependencies ------------------------------------------------------------------------ */

/* What is not durable yet has not happened. A job that the store has lost holds nobody up for ever. */
static enum depend depend_one(struct core *c, const char *text, const struct job **on)
{
    enum dependency_kind kind;
    int64_t id;
    *on = dependency_parse(text, &kind, &id) ? core_job(c, id) : NULL;
    if (!*on)
        return DEPEND_NEVER;
    const struct job *x = *on;
    bool ended = job_state_terminal(x->state), ok = x->state == STATE(COMPLETED);
    if (kind == AFTER)
        return x->started_ns || ended ? DEPEND_MET : DEPEND_WAITS;
    if (!ended || x->unsettled)
        return DEPEND_WAITS;
    return kind == AFTER_ANY || ok == (kind == AFTER_OK) ? DEPEND_MET : DEPEND_NEVER;
}

enum depend job_depends(struct core *c, const struct job *job, char *text, size_t cap)
{
    int waits = 0;
    if (job->started_ns) /* they were met once */
        return DEPEND_MET;
    for (size_t i = 0; i < job->resolved->n_after; i++) {
        const struct job *on;
        const char *after = job->resolved->after[i];
        enum depend d = depend_one(c, after, &on);
        if (d == DEPEND_NEVER) {
            if (text && on)
                snprintf(text, cap, "%s can never be met: job %" PRId64 " (%s) is %s", after, on->id, on->name,
                         job_state_name(on->state));
            else if (text)
                snprintf(text, cap, "%s can never be met: there is no such job", after);
            return d;
        }
        if (d == DEPEND_WAITS && !waits++ && text)
            snprintf(text, cap, "%s: job %" PRId64 " (%s) is %s", after, on->id, on->name,
                     job_state_name(job_shown_state(on)));
        if (waits && !text)
            break;
    }
    return waits ? DEPEND_WAITS : DEPEND_MET;
}

int depend_check(struct core *c, const Boost__JobSpec *spec, struct error *err)
{
    for (size_t i = 0; i < spec->n_after; i++) {
        const struct job *on;
        if (depend_one(c, spec->after[i], &on) != DEPEND_NEVER || on)
            continue;
        error_set(err, ERR_INVALID, "after[%zu] = '%s': there is no such job", i, spec->after[i]);
        return error_hint(err, "boostctl status -a lists all jobs; submit the one to wait for first");
    }
    return ERR_OK;
}

bool depend_hold(struct core *c, struct job *job)
{
    char why[256];
    if (job->state != STATE(QUEUED) || job_depends(c, job, why, sizeof why) != DEPEND_NEVER)
        return false;
    job_reason(job, REASON(Dependency), "%s; boostctl release %" PRId64 " runs it without, cancel drops it", why,
               job->id);
    add_event(c, job, 0, NULL, "controller", "held", "%s", job->reason_text);
    job_fire(c, job, EV_HOLD);
    return true;
}

void depend_ended(struct core *c)
{
    for (struct job *job = c->dependent.head, *next; job; job = next) {
        next = job->dependent.next;
        depend_hold(c, job);
    }
}

static void waive_in(struct core *c, Boost__JobSpec *spec)
{
    size_t left = 0;
    for (size_t i = 0; spec && i < spec->n_after; i++) {
        const struct job *on;
        if (depend_one(c, spec->after[i], &on) == DEPEND_NEVER)
            free(spec->after[i]); /* as protobuf-c took it */
        else
            spec->after[left++] = spec->after[i];
    }
    if (spec)
        spec->n_after = left;
}

/* In what was submitted too: a restart with changes begins with that. */
void depend_waive(struct core *c, struct job *job)
{
    waive_in(c, job->resolved);
    waive_in(c, job->spec);
    waive_in(c, job->next_resolved);
    waive_in(c, job->next_spec);
}

/* ---- limits of users ----------------------------------------------------------------------- */

static const struct share *limits_of(struct core *c, struct share *s, const char *user)
{
    char number[16];
    if (s->limits_known)
        return s;
    snprintf(number, sizeof number, "%u", (unsigned)s->uid);
    s->limits_known = true;
    s->max_running = c->user_running_jobs;
    s->max_devices = c->user_devices;
    s->max_queued = c->user_queued_jobs;
    for (size_t i = 0; i < c->config->n_user_limit; i++) {
        const Boost__UserLimit *x = c->config->user_limit[i];
        if (!x->user || (strcmp(x->user, number) != 0 && (!user || strcmp(x->user, user) != 0)))
            continue;
        s->max_running = x->has_running_jobs ? x->running_jobs : s->max_running;
        s->max_devices = x->has_devices ? x->devices : s->max_devices;
        s->max_queued = x->has_queued_jobs ? x->queued_jobs : s->max_queued;
    }
    return s;
}

bool limit_keeps(struct core *c, const struct job *job, char *text, size_t cap)
{
    const struct share *s = limits_of(c, job->share, job->user);
    int needs = job_nodes(job) * job_devices_per_node(job);
    if (s->max_running && s->running >= s->max_running) {
        if (text)
            snprintf(text, cap, "user limit: %d of %d running jobs", s->running, s->max_running);
        return true;
    }
    if (s->max_devices && s->devices + needs > s->max_devices) {
        int n = text ? snprintf(text, cap, "user limit: %d of %d devices", s->devices, s->max_devices) : 0;
        if (text && s->devices < s->max_devices && n > 0 && (size_t)n < cap)
            snprintf(text + n, cap - (size_t)n, ", needs %d", needs);
        return true;
    }
    return false;
}

int limit_check(struct core *c, uint32_t uid, const char *user, const Boost__JobSpec *resolved, int jobs,
                struct error *err)
{
    struct share *mine = share_of(c, uid);
    if (!mine)
        return error_set(err, ERR_NOMEM, "out of memory");
    const struct share *s = limits_of(c, mine, user);
    int needs = spec_nodes(resolved) * spec_devices(resolved);
    if (s->max_devices && needs > s->max_devices) {
        error_set(err, ERR_REFUSED, "the job needs %d devices, and %s may have %d at once", needs, user,
                  s->max_devices);
        return error_hint(err, "ask for fewer, or have user_devices raised in boostd's configuration");
    }
    if (s->max_queued && s->waiting + jobs > s->max_queued) {
        error_set(err, ERR_REFUSED, "%s has %d job%s queued or held, and may have %d", user, s->waiting,
                  s->waiting == 1 ? "" : "s", s->max_queued);
        return error_hint(err, "wait for some to start, cancel some, or have user_queued_jobs raised");
    }
    return ERR_OK;
}
