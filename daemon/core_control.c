/* What users ask of jobs: cancel, hold, release, checkpoint; and finding the job they mean. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/buffer.h"

/* ---- finding ----------------------------------------------------------------------------- */

/* "17", "17.2", "17.2/3": the job's number, -1 when ref is not of that form; *attempt is -1 when it names none. */
static int64_t id_of(const char *ref, int64_t *attempt)
{
    char *end;
    *attempt = -1;
    if (!isdigit((unsigned char)ref[0]))
        return -1;
    long long id = strtoll(ref, &end, 10);
    for (const char *sep = "."; *end && *sep; sep = *sep == '.' ? "/" : "") {
        if (*end != *sep || !isdigit((unsigned char)end[1]))
            return -1;
        long long number = strtoll(end + 1, &end, 10);
        if (*sep == '.')
            *attempt = number;
    }
    return *end ? -1 : id;
}

static int ambiguous(struct core *c, const char *ref, bool exact, struct error *err)
{
    struct buffer list;
    int n = 0;
    size_t len = strlen(ref);
    buffer_init(&list, 4096);
    for (int i = 0; i < c->n_jobs; i++) {
        const struct job *job = c->jobs[i];
        if (exact ? strcmp(job->name, ref) != 0 : strncmp(job->name, ref, len) != 0)
            continue;
        if (n++ < 8)
            buffer_printf(&list, "%s%" PRId64 " (%s)", n > 1 ? ", " : "", job->id, job->name);
    }
    error_set(err, ERR_AMBIGUOUS, "\"%s\" fits %d jobs: %s%s", ref, n, list.data ? (const char *)list.data : "",
              n > 8 ? ", ..." : "");
    error_hint(err, "give the job's number");
    buffer_free(&list);
    return ERR_AMBIGUOUS;
}

static int no_attempt(const struct job *job, int64_t attempt, struct error *err)
{
    error_set(err, ERR_NOT_FOUND, "job %" PRId64 " has no attempt %" PRId64, job->id, attempt);
    if (job->n_attempts > 1)
        error_hint(err, "its attempts are 1 to %d", job->n_attempts);
    else
        error_hint(err, job->n_attempts ? "its only attempt is 1" : "it has not started yet");
    return ERR_NOT_FOUND;
}

/* "17_3" */
static struct job *task_of(struct core *c, const char *ref)
{
    char *end;
    if (!isdigit((unsigned char)ref[0]))
        return NULL;
    long long array = strtoll(ref, &end, 10);
    if (*end != '_' || !isdigit((unsigned char)end[1]))
        return NULL;
    long index = strtol(end + 1, &end, 10);
    return *end || index > INT32_MAX ? NULL : core_task(c, array, (int)index, NULL);
}

int core_find_job(struct core *c, const char *ref, struct job **out, struct error *err)
{
    struct job *exact = NULL, *prefix = NULL;
    int n_exact = 0, n_prefix = 0;
    size_t len = strlen(ref);
    int64_t attempt, id = id_of(ref, &attempt);
    *out = NULL;
    struct job *numbered = id >= 0 ? core_job(c, id) : task_of(c, ref);
    if (numbered && attempt >= 0 && (attempt < 1 || attempt > numbered->n_attempts))
        return no_attempt(numbered, attempt, err);
    if (numbered) {
        *out = numbered;
        return ERR_OK;
    }
    for (int i = 0; len && i < c->n_jobs; i++) {
        struct job *job = c->jobs[i];
        if (strncmp(job->name, ref, len) != 0)
            continue;
        prefix = job;
        n_prefix++;
        if (job->name[len] == '\0') {
            exact = job;
            n_exact++;
        }
    }
    if (n_exact == 1 || (n_exact == 0 && n_prefix == 1)) {
        *out = n_exact ? exact : prefix;
        return ERR_OK;
    }
    if (n_prefix > 1)
        return ambiguous(c, ref, n_exact > 0, err);
    error_set(err, ERR_NOT_FOUND, "no job %s%s%s", id >= 0 ? "" : "is named \"", ref, id >= 0 ? "" : "\"");
    error_hint(err, "boostctl status -a lists all jobs");
    return ERR_NOT_FOUND;
}

/* ---- control ------------------------------------------------------------------------------ */

int job_may_change(const struct core *c, const struct job *job, const struct core_user *user, struct error *err)
{
    if (user->admin || user->uid == 0 || user->uid == c->ops.uid || user->uid == job->uid)
        return ERR_OK;
    error_set(err, ERR_REFUSED, "job %" PRId64 " belongs to %s (uid %u)", job->id, job->user, job->uid);
    return error_hint(err, "only its owner, root, an admin and the user of boostd may do that");
}

/* How long a stop with a checkpoint may take, for the answer. */
static double grace_s(struct core *c, const struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    return a && a->grace_due ? (double)(a->grace_due - now_mono(c)) / (double)NS_PER_S : 0;
}

static void say_stop(struct core *c, const struct job *job, const char *then, struct answer *x)
{
    if (job_state_terminal(job->state) || job->state == STATE(HELD))
        snprintf(x->text, sizeof x->text, "%s", then);
    else if (grace_s(c, job) > 0)
        snprintf(x->text, sizeof x->text, "finishes its step, checkpoints (at most %.0f s) and is %s", grace_s(c, job),
                 then);
    else
        snprintf(x->text, sizeof x->text, "is killed and then %s", then);
}

static int refused(const struct job *job, const char *why, const char *hint, struct error *err)
{
    bool ends = job_shown_state(job) != job->state;
    error_set(err, ERR_REFUSED, "job %" PRId64 " is %s: %s", job->id, job_state_name(job_shown_state(job)),
              ends ? job_ended_text(job) : why);
    if (hint)
        error_hint(err, "%s", hint);
    return ERR_REFUSED;
}

static bool allowed(const struct job *job, enum job_event event)
{
    return job_step(job->state, job->stop_target, event).legal;
}

static int cancel(struct core *c, struct job *job, bool now, const char *actor, struct answer *x, struct error *err)
{
    enum job_event event = now ? EV_CANCEL_NOW : EV_CANCEL;
    bool was_live = job_live_attempt(job) != NULL;
    if (job_state_terminal(job->state))
        return refused(job, "it has ended", NULL, err);
    if (!allowed(job, event))
        return refused(job, "it is being stopped already", now ? NULL : "boostctl cancel --now does not wait for it",
                       err);
    if (!(job->state == STATE(STOPPING) && job->stop_target >= (int)STATE(COMPLETED)))
        job_reason(job, REASON(Cancelled), "cancelled by %s", actor);
    add_event(c, job, job->n_attempts, NULL, actor, "cancel", "cancel%s at step %" PRId64,
              now ? " without a checkpoint" : "", job->step < 0 ? 0 : job->step);
    job_fire(c, job, event);
    if (!was_live)
        add_event(c, job, job->n_attempts, NULL, "controller", "cancelled", "%s", job->reason_text);
    say_stop(c, job, job->stop_target == (int)STATE(TIMEOUT) ? "TIMEOUT" : "CANCELLED", x);
    return ERR_OK;
}

static int hold(struct core *c, struct job *job, const char *actor, struct answer *x, struct error *err)
{
    bool was_live = job_live_attempt(job) != NULL;
    if (!allowed(job, EV_HOLD))
        return refused(job, job_state_terminal(job->state) ? "it has ended" : "it cannot be held now", NULL, err);
    job_reason(job, REASON(Held), "held by %s; release with: boostctl release %" PRId64, actor, job->id);
    add_event(c, job, job->n_attempts, NULL, actor, "hold", "hold at step %" PRId64, job->step < 0 ? 0 : job->step);
    job_fire(c, job, EV_HOLD);
    if (!was_live)
        add_event(c, job, job->n_attempts, NULL, "controller", "held", "%s", job->reason_text);
    say_stop(c, job, "HELD", x);
    return ERR_OK;
}

static int release(struct core *c, struct job *job, const char *actor, struct answer *x, struct error *err)
{
    if (!allowed(job, EV_RELEASE))
        return refused(job, "only a held job can be released", NULL, err);
    job->stuck_attempts = 0;
    job->backoff_count = 0;
    if (job->reason == REASON(Dependency))
        depend_waive(c, job);
    job_reason(job, REASON(NONE), "%s", "");
    add_event(c, job, job->n_attempts, NULL, actor, "released", "released, to be queued");
    job_fire(c, job, EV_RELEASE);
    snprintf(x->text, sizeof x->text, "%s",
             job->state == STATE(QUEUED) ? "QUEUED" : "is queued as soon as it has stopped");
    return ERR_OK;
}

bool core_preempt(struct core *c, struct job *victim, const struct job *for_job)
{
    if (victim->state == STATE(STOPPING))
        return true;
    if (!allowed(victim, EV_REQUEUE))
        return false;
    int64_t step = victim->step < 0 ? 0 : victim->step;
    job_reason(victim, REASON(Preempted), "preempted at step %" PRId64 " by job %" PRId64 " (%s, priority %d)", step,
               for_job->id, for_job->name, for_job->priority);
    add_event(c, victim, victim->n_attempts, NULL, "controller", "preempted",
              "job %" PRId64 " (%s, priority %d) needs its devices: checkpoints at step %" PRId64
              " and is queued again",
              for_job->id, for_job->name, for_job->priority, step);
    bool was_live = job_live_attempt(victim) != NULL;
    job_fire(c, victim, EV_REQUEUE);
    if (!was_live)
        attempt_say_end(c, victim, victim->n_attempts);
    due_at(c, now_mono(c));
    return true;
}

static int ask_checkpoint(struct core *c, struct job *job, const char *actor, struct answer *x, struct error *err)
{
    struct attempt *a = job_live_attempt(job);
    if (job->state != STATE(RUNNING) || !a || a->failing)
        return refused(job, "only a running job can checkpoint", NULL, err);
    Boost__RequestCheckpoint body = BOOST__REQUEST_CHECKPOINT__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    body.has_job = body.has_attempt = true;
    body.job = job->id;
    body.attempt = a->number;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT;
    m.checkpoint = &body;
    /* All ranks have to hear of it before any of them agrees on a step, or none. */
    for (int p = 0; p < a->n_parts; p++) {
        struct node *n = node_find(c, a->parts[p].node);
        if (!n || !n->connected) {
            error_set(err, ERR_UNREACHABLE, "node %s cannot be reached now", a->parts[p].node);
            error_hint(err, "job %" PRId64 " goes on; try again", job->id);
            return ERR_UNREACHABLE;
        }
    }
    for (int p = 0; p < a->n_parts; p++)
        send_to(c, node_find(c, a->parts[p].node), &m);
    add_event(c, job, a->number, NULL, actor, "checkpoint-requested", "checkpoint asked for at step %" PRId64,
              a->to_step);
    snprintf(x->text, sizeof x->text, "takes a checkpoint at one of its next steps");
    return ERR_OK;
}

void core_control(struct core *c, Boost__ControlRequest__Verb verb, int64_t id, bool now, const struct core_user *user,
                  core_text_reply_fn reply, void *arg)
{
    struct error err;
    struct job *job = core_job(c, id);
    struct answer *x = answer_new(reply, arg);
    char actor[128];
    int rc;
    snprintf(actor, sizeof actor, "uid %u (%s)", user->uid, user->name ? user->name : "?");
    if (!x) {
        rc = error_set(&err, ERR_NOMEM, "out of memory");
        goto out;
    }
    if (!job) {
        rc = error_set(&err, ERR_NOT_FOUND, "no job %" PRId64, id);
        goto out;
    }
    rc = job_may_change(c, job, user, &err);
    if (rc)
        goto out;
    switch (verb) {
    case BOOST__CONTROL_REQUEST__VERB__CANCEL:
        rc = cancel(c, job, now, actor, x, &err);
        break;
    case BOOST__CONTROL_REQUEST__VERB__HOLD:
        rc = hold(c, job, actor, x, &err);
        break;
    case BOOST__CONTROL_REQUEST__VERB__RELEASE:
        rc = release(c, job, actor, x, &err);
        break;
    case BOOST__CONTROL_REQUEST__VERB__CHECKPOINT:
        rc = ask_checkpoint(c, job, actor, x, &err);
        break;
    default:
        rc = error_set(&err, ERR_UNSUPPORTED, "unknown verb %d", (int)verb);
        break;
    }
out:
    if (rc) {
        reply(arg, rc, &err, "");
        free(x);
    } else {
        answer_when_durable(c, x);
    }
    change_commit(c);
}
