/* The end of an attempt: all of it is over, its last checkpoint is in the registry or
 * given up, the job goes on to what comes next, and the agents are told to forget it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

enum { TAIL_OF_OTHERS = 4 << 10 }; /* bytes of its output kept of a rank that was not the cause */

static bool all_over(const struct attempt *a)
{
    for (int p = 0; p < a->n_parts; p++)
        if (!a->parts[p].gone && !a->parts[p].lost)
            return false;
    return true;
}

/* An attempt of no known rank (see core_boot.c) is not. */
static bool all_clean(const struct attempt *a)
{
    for (int r = 0; r < a->world; r++)
        if (!a->ranks[r].end || a->ranks[r].end->class != CLASS(CLEAN))
            return false;
    return a->world > 0;
}

static bool all_steps_done(const struct job *job, const struct attempt *a)
{
    for (int r = 0; r < a->world; r++)
        if (a->ranks[r].step < job->resolved->run->steps)
            return false;
    return true;
}

/* True while the end has to wait for checkpoints; arms the limit. */
static bool waits_for_checkpoints(struct core *c, const struct job *job, struct attempt *a, bool clean)
{
    int open = checkpoints_open(job, a);
    if (open == 0 || (open == 2 && !clean))
        return false;
    if (!a->close_due) {
        a->close_from = now_mono(c);
        a->close_due = a->close_from + (open == 1 ? CORE_CLOSE_NS : CORE_FINAL_NS);
    } else if (open == 1 && a->close_due - a->close_from < CORE_CLOSE_NS) {
        a->close_due = a->close_from + CORE_CLOSE_NS;
    }
    /* Nothing is done for a checkpoint before its shards are in the store: a full disk there is no fault of its. */
    if (open == 1 && job->unsettled && now_mono(c) >= a->close_due)
        attempt_close_anew(c, a);
    due_at(c, a->close_due);
    return now_mono(c) < a->close_due;
}

void attempt_close_anew(struct core *c, struct attempt *a)
{
    a->close_from = now_mono(c);
    a->close_due = a->close_from + CORE_CLOSE_NS;
}

void attempt_say_end(struct core *c, struct job *job, int attempt)
{
    double elapsed = job->run_s;
    char last[64] = "no checkpoint";
    if (job->checkpoint_step >= 0)
        snprintf(last, sizeof last, "last checkpoint at step %" PRId64, job->checkpoint_step);
    switch (job->state) {
    case STATE(COMPLETED):
        add_event(c, job, attempt, NULL, "controller", "completed",
                  "all %" PRId64 " steps done in %.1f s, %d attempt%s", job->resolved->run->steps, elapsed,
                  job->n_attempts, job->n_attempts == 1 ? "" : "s");
        break;
    case STATE(FAILED):
        add_event(c, job, attempt, NULL, "controller", "failed", "%s", job->reason_text);
        break;
    case STATE(CANCELLED):
        add_event(c, job, attempt, NULL, "controller", "cancelled", "%s; %s", job->reason_text, last);
        break;
    case STATE(TIMEOUT):
        add_event(c, job, attempt, NULL, "controller", "timeout", "%s; %s", job->reason_text, last);
        break;
    case STATE(HELD):
        add_event(c, job, attempt, NULL, "controller", "held", "%s", job->reason_text);
        break;
    case STATE(QUEUED):
        add_event(c, job, attempt, NULL, "controller", "queued", "stopped and queued again%s%s; %s",
                  *job->reason_text ? ": " : "", job->reason_text, last);
        break;
    case STATE(RECOVERING):
        add_event(c, job, attempt, NULL, "controller", "recovering", "attempt %d in %.1f s%s", job->n_attempts + 1,
                  (double)(job->backoff_due - job->backoff_from) / (double)NS_PER_S,
                  job->checkpoint_step >= 0  ? ", from the newest checkpoint that verifies"
                  : init_path(job->resolved) ? ", from where it first began"
                                             : ", from the beginning");
        break;
    default:
        break;
    }
}

/* An attempt that did not fail: it came to the job's end, or was asked to stop. */
static void say_why_ended(struct core *c, struct job *job, struct attempt *a, bool complete)
{
    if (a->reason != REASON(NONE) || (a->text && *a->text))
        return;
    if (complete) {
        text_set(&a->text, "all steps done");
    } else if (job->state == STATE(STOPPING)) {
        a->reason = job->reason;
        text_set(&a->text, job->reason_text && *job->reason_text ? job->reason_text : "stopped");
    }
    mark_attempt(c, job, a);
}

/* What is to be mended before a release makes sense goes before the bare fact. */
static void say_stuck(struct job *job, const struct attempt *a)
{
    const struct checkpoint *full = checkpoints_disk_full(job, a);
    Boost__Reason__Value reason = full || a->reason == REASON(DiskFull) ? REASON(DiskFull) : REASON(NoProgress);
    char *last = strdup(job->reason_text ? job->reason_text : ""), no_room[700] = "";
    if (full)
        snprintf(no_room, sizeof no_room, "\nno checkpoint of step %" PRId64 ": %.600s; make room there first",
                 full->step, full->note);
    job_reason(job, reason,
               "no progress in %d attempt%s%s; release with: boostctl release %" PRId64 "%s\nthe last one: %s",
               job->stuck_attempts, job->stuck_attempts == 1 ? "" : "s",
               reason == REASON(DiskFull) ? ", the checkpoints' disk is full" : "", job->id, no_room, last ? last : "");
    free(last);
}

/* Of an attempt that was asked to stop: the newest checkpoint, should it have failed to write it. */
static void say_what_is_lost(struct job *job, const struct attempt *a)
{
    const struct checkpoint *lost = NULL;
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        if (k->attempt == a->number && k->state == CKPT(ABANDONED) && k->step > job->checkpoint_step)
            lost = k;
    }
    char *why = lost ? strdup(job->reason_text ? job->reason_text : "") : NULL;
    if (why)
        job_reason(job, job->reason, "%s%sno checkpoint of step %" PRId64 ": %s", why, *why ? "; " : "",
                   lost->step, lost->note ? lost->note : "");
    free(why);
}

static void ended(struct core *c, struct job *job, struct attempt *a, bool complete)
{
    int limit = job->resolved->restart ? job->resolved->restart->no_progress_limit : 3;
    int target = job->stop_target;
    if (job->state == STATE(STOPPING) && !complete)
        say_what_is_lost(job, a);
    say_why_ended(c, job, a, complete);
    if (complete && !(job->state == STATE(STOPPING) && target == (int)STATE(FAILED))) {
        job_reason(job, REASON(NONE), "%s", "");
        job_fire(c, job, EV_COMPLETED);
    } else if (job->state == STATE(STOPPING)) {
        job_fire(c, job, EV_ATTEMPT_GONE);
    } else {
        if (!a->advanced)
            job->stuck_attempts++;
        if (job->stuck_attempts >= limit) {
            say_stuck(job, a);
            job_fire(c, job, EV_NO_PROGRESS);
        } else {
            job_fire(c, job, EV_ATTEMPT_GONE);
        }
    }
    attempt_say_end(c, job, a->number);
}

void attempt_try_close(struct core *c, struct job *job)
{
    struct attempt *a = job_live_attempt(job);
    if (!a || !all_over(a))
        return;
    bool clean = all_clean(a);
    bool complete = clean && all_steps_done(job, a);
    bool stopping = job->state == STATE(STOPPING);
    if (!a->decided && a->failing) {
        attempt_decide(c, job, a, true);
        return; /* it comes back here */
    }
    if (!a->decided && !stopping && !complete) {
        if (clean)
            attempt_fail(c, job, a, CLASS(INFRA), REASON(RankExit), "rank-exit", a->parts[0].node,
                         "every rank stopped in good order before the last step, unasked by the controller");
        else
            attempt_decide(c, job, a, true);
        return;
    }
    if (waits_for_checkpoints(c, job, a, clean))
        return;
    ended(c, job, a, complete);
}

struct closing {
    int64_t job;
    int attempt;
};

static void closed(struct core *c, void *arg, int rc, const struct error *err)
{
    const struct closing *x = arg;
    struct job *job = core_job(c, x->job);
    struct attempt *a = job ? job_attempt(job, x->attempt) : NULL;
    (void)err;
    if (a && rc == ERR_OK)
        ack_attempt_ends(c, job, a);
    else if (a)
        a->acks_owed = true; /* until the row is written after all: job_act() */
}

void ack_rank_end(struct core *c, const struct job *job, struct attempt *a, int rank)
{
    Boost__Ack ack = BOOST__ACK__INIT;
    ack.has_job = ack.has_attempt = ack.has_rank = ack.has_rank_end = true;
    ack.job = job->id;
    ack.attempt = a->number;
    ack.rank = rank;
    ack.rank_end = true;
    send_ack(c, a->parts[a->ranks[rank].part].node, &ack);
}

void ack_attempt_ends(struct core *c, struct job *job, struct attempt *a)
{
    for (int r = 0; r < a->world; r++)
        if (a->ranks[r].end)
            ack_rank_end(c, job, a, r);
    for (int p = 0; p < a->n_parts; p++) {
        struct node *n = node_find(c, a->parts[p].node);
        if (!n || !a->parts[p].gone)
            continue;
        Boost__Ack ack = BOOST__ACK__INIT;
        ack.has_job = ack.has_attempt = ack.has_node_end = true;
        ack.job = job->id;
        ack.attempt = a->number;
        ack.node_end = true;
        send_ack(c, n->name, &ack);
        send_forget(c, n, job->id, a->number);
    }
}

/* The controller keeps the words of the first failing rank and a little of each other. */
static void trim_tails(struct attempt *a)
{
    bool certain;
    int cause = attempt_cause(a, &certain);
    for (int r = 0; r < a->world; r++) {
        struct rank_end *e = a->ranks[r].end;
        if (!e || r == cause || e->log_tail_len <= TAIL_OF_OTHERS)
            continue;
        memmove(e->log_tail, e->log_tail + (e->log_tail_len - TAIL_OF_OTHERS), TAIL_OF_OTHERS);
        uint8_t *less = realloc(e->log_tail, TAIL_OF_OTHERS);
        e->log_tail = less ? less : e->log_tail;
        e->log_tail_len = TAIL_OF_OTHERS;
    }
}

static void drop_closing(void *arg)
{
    free(arg);
}

void attempt_close(struct core *c, struct job *job)
{
    struct attempt *a = job_live_attempt(job);
    if (!a)
        return;
    a->end_ns = a->start_ns + attempt_lasted(c, a); /* not the wall clock, which may have been set since the start */
    pace_free(a);
    kv_drop(c->kv, job->id, a->number, "the attempt has ended");
    checkpoints_abandon_open(c, job, a, "its attempt ended");
    trim_tails(a);
    if (!all_clean(a))
        logs_keep(c, job, a);
    mark_attempt(c, job, a);
    c->work = true; /* what could not be deleted under it */
    struct closing *x = calloc(1, sizeof *x);
    if (x) {
        *x = (struct closing){.job = job->id, .attempt = a->number};
        after_durable(c, closed, x, drop_closing);
    }
}
