/* How an attempt goes: progress, the ends of its ranks, the decision what its failure
 * was, and its timers.
 *
 * A rank's end is acknowledged only when its attempt's row says how that ended: the
 * ends themselves are not stored here, and after a restart of the controller the
 * agents tell them again. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/buffer.h"

/* ---- stopping ------------------------------------------------------------------------ */

void attempt_mark_kill(struct core *c, struct job *job, struct attempt *a)
{
    a->kill = true;
    a->grace_due = 0;
    a->rendezvous_due = 0;
    /* The row's reason is what tells a restarted controller to kill and not to ask. */
    if (a->reason == REASON(NONE) && !a->failing) {
        a->reason = job->reason;
        text_set(&a->text, job->reason_text);
    }
    mark_attempt(c, job, a);
}

/* 4 steps and 2 checkpoints: the step under way, the one after which a stop takes effect, and room. */
void grace_arm(struct core *c, struct job *job, struct attempt *a)
{
    int64_t grace = job->resolved->stop_grace_s * NS_PER_S;
    if (grace <= 0) {
        grace = (int64_t)(4 * job->step_ms * (double)NS_PER_MS) + 2 * job->checkpoint_ms * NS_PER_MS;
        if (grace < CORE_STOP_MIN_NS)
            grace = CORE_STOP_MIN_NS;
    }
    a->grace_from = now_mono(c);
    a->grace_due = a->grace_from + grace;
    due_at(c, a->grace_due);
}

int64_t backoff_ns(struct core *c, int before)
{
    double delay = (double)c->backoff_min_ns;
    for (int i = 0; i < before && delay < (double)c->backoff_max_ns; i++)
        delay *= 2;
    /* +-25 %, so that jobs which fell together do not come back together. */
    delay *= 0.75 + 0.5 * ((double)(c->ops.random(c->ops.arg) >> 11) / 9007199254740992.0);
    return delay > (double)c->backoff_max_ns ? c->backoff_max_ns : (int64_t)delay;
}

void backoff_arm(struct core *c, struct job *job)
{
    job->backoff_from = job->backoff_due = 0;
    if (job->reason == REASON(NodeLost) && job_has_spares(job))
        return; /* what it waits for is there */
    job->backoff_from = now_mono(c);
    job->backoff_due = job->backoff_from + backoff_ns(c, job->backoff_count);
    if (job->backoff_count < 64)
        job->backoff_count++;
    due_at(c, job->backoff_due);
}

/* ---- failing --------------------------------------------------------------------------- */

/* Kills at once, without waiting for the disk: see core.h. */
static void fail_begins(struct core *c, struct job *job, struct attempt *a)
{
    if (a->failing)
        return;
    a->failing = true;
    a->failing_mono = now_mono(c);
    due_at(c, a->failing_mono + CORE_CAUSE_NS);
    attempt_mark_kill(c, job, a);
    attempt_send(c, job, ACT_KILL, NULL);
}

/* What the failure costs, in words, and the event of the table. Counts the restart. */
static enum job_event charge(struct job *job, Boost__ExitClass__Value class, char *text, size_t cap)
{
    int max = job->resolved->restart ? job->resolved->restart->max_restarts : 3;
    switch (class) {
    case CLASS(SPEC):
        snprintf(text, cap, "no restart can help");
        return EV_FAILED_FINAL;
    case CLASS(APPLICATION):
        if (job->state == STATE(STOPPING)) {
            snprintf(text, cap, "while it was stopping");
            return EV_FAILED_APP;
        }
        if (job->restarts_used >= max) {
            snprintf(text, cap, "application failure; all %d restarts used", max);
            return EV_FAILED_FINAL;
        }
        job->restarts_used++;
        snprintf(text, cap, "application failure, restart %d of %d", job->restarts_used, max);
        return EV_FAILED_APP;
    default:
        snprintf(text, cap, "infrastructure, no restart used");
        return EV_FAILED_INFRA;
    }
}

void attempt_fail(struct core *c, struct job *job, struct attempt *a, Boost__ExitClass__Value class,
                  Boost__Reason__Value reason, const char *kind, const char *node, const char *text)
{
    char cost[128];
    if (a->decided)
        return;
    fail_begins(c, job, a);
    a->decided = true;
    enum job_event event = charge(job, class, cost, sizeof cost);
    a->reason = reason;
    text_set(&a->text, text);
    bool asked = job->state == STATE(STOPPING); /* then why it ends is what was asked for */
    if (!asked)
        job_reason(job, reason, "%s", text);
    const char *lines = strchr(text, '\n');
    int head = lines ? (int)(lines - text) : (int)strlen(text);
    add_event(c, job, a->number, node, "controller", kind, "%.*s; %s; attempt %d at step %" PRId64 "%s", head, text,
              cost, a->number, a->to_step, lines ? lines : "");
    mark_attempt(c, job, a);
    job_fire(c, job, event);
    attempt_try_close(c, job);
}

/* In a collective it waits for another rank, which is the one to be named if that hangs too. */
static bool waits_for_others(const char *text)
{
    const char *at = strstr(text, "last collective: ");
    size_t len = at ? strcspn(at, ";") : 0;
    return at && !memmem(at, len, ", done", 6);
}

static void hang_decide(struct core *c, struct job *job, struct attempt *a)
{
    char text[1024];
    const char *node = a->parts[a->ranks[a->hang_rank].part].node;
    a->hang_due = 0;
    snprintf(text, sizeof text, "rank %d on %s hangs: %.800s", a->hang_rank, node,
             a->hang_text ? a->hang_text : "no progress");
    attempt_fail(c, job, a, CLASS(APPLICATION), REASON(Hang), "hang", node, text);
}

void attempt_hang(struct core *c, struct job *job, struct attempt *a, int rank, const char *text)
{
    bool waits = waits_for_others(text);
    if (a->decided || a->failing)
        return;
    if (!a->hang_due) {
        account_detection(c, job, now_mono(c) - a->progress_mono);
        a->hang_due = now_mono(c) + CORE_CAUSE_NS;
        due_at(c, a->hang_due);
        a->hang_rank = rank;
        text_set(&a->hang_text, text);
    } else if (!waits) {
        a->hang_rank = rank;
        text_set(&a->hang_text, text);
    }
    if (!waits || !a->hang_text)
        hang_decide(c, job, a);
}

static const struct attempt_part *lost_part(const struct attempt *a)
{
    for (int p = 0; p < a->n_parts; p++)
        if (a->parts[p].lost)
            return &a->parts[p];
    return NULL;
}

void attempt_decide(struct core *c, struct job *job, struct attempt *a, bool force)
{
    bool certain;
    int r = attempt_cause(a, &certain);
    if (a->decided || !(certain || force))
        return;
    const struct attempt_part *lost = lost_part(a);
    if (r >= 0 && (a->ranks[r].end->class != CLASS(PEER_LOST) || !lost)) {
        char *text = cause_text(a, r, true);
        attempt_fail(c, job, a, a->ranks[r].end->class, cause_reason(job, a, r), "rank-exit",
                     a->parts[a->ranks[r].part].node, text ? text : "a rank failed");
        free(text);
    } else if (lost) {
        char text[160];
        snprintf(text, sizeof text, "%s lost", lost->node);
        attempt_fail(c, job, a, CLASS(INFRA), REASON(NodeLost), "node-lost", lost->node, text);
    } else {
        attempt_fail(c, job, a, CLASS(INFRA), REASON(RankSignal), "rank-exit", a->parts[0].node,
                     "its ranks were killed on the node without being told to by the controller");
    }
}

/* ---- what agents report -------------------------------------------------------------------- */

static struct attempt_part *part_on(struct attempt *a, const char *node)
{
    for (int p = 0; p < a->n_parts; p++)
        if (strcmp(a->parts[p].node, node) == 0)
            return &a->parts[p];
    return NULL;
}

void attempt_reached(struct job *job, struct attempt *a, int64_t step)
{
    if (step > a->to_step)
        a->to_step = step;
    if (step > job->step)
        job->step = step;
}

void attempt_rank_update(struct core *c, struct job *job, struct attempt *a, struct node *n, const Boost__RankUpdate *u)
{
    struct rank *r = &a->ranks[u->rank];
    bool further = u->step > r->step || u->progress > r->progress || u->phase != r->phase;
    (void)n;
    a->parts[r->part].heard = true;
    r->heard = true;
    r->phase = u->phase;
    r->progress = u->progress;
    if (u->step > r->step)
        r->step = u->step;
    if (further)
        a->progress_mono = now_mono(c);
    if (u->step > a->from_step)
        attempt_reached(job, a, u->step);
    bool met = true, stepped = true;
    for (int i = 0; i < a->world; i++) {
        met = met && a->ranks[i].heard && a->ranks[i].phase >= PHASE(LOADING);
        stepped = stepped && a->ranks[i].step > a->from_step;
    }
    if (met)
        a->rendezvous_due = 0;
    if (stepped && job->state == STATE(STARTING) && !a->failing) {
        a->running_ns = now_wall(c);
        a->running_mono = now_mono(c);
        a->rendezvous_due = 0;
        mark_attempt(c, job, a);
        job_fire(c, job, EV_ALL_STEPPED);
        add_event(c, job, a->number, NULL, "controller", "running",
                  "every rank finished its first step, %.1f s after the start; at step %" PRId64,
                  (double)(a->running_mono - a->start_mono) / (double)NS_PER_S, a->to_step);
    }
    account_state(c, job);
    progress_changed(c, job);
}

static struct rank_end *end_of(struct core *c, const Boost__ExitRecord *x)
{
    struct rank_end *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    *e = (struct rank_end){.class = classify(x),
                           .exit_code = x->exit_code,
                           .signal = x->signal,
                           .core_dumped = x->core_dumped,
                           .killed_by_us = x->killed_by_us,
                           .oom = x->oom,
                           .done = x->done,
                           .lost = x->lost,
                           .seq = x->seq,
                           .arrival = ++c->arrivals,
                           .last_step = x->has_last_step ? x->last_step : -1};
    if (x->error)
        e->error = strndup(x->error, 4096);
    if (x->collective)
        e->collective = strndup(x->collective, 256);
    if (x->device)
        e->device = strndup(x->device, 1024);
    size_t len = x->log_tail.len < LIMIT_LOG_LINE ? x->log_tail.len : LIMIT_LOG_LINE;
    e->log_tail = len ? malloc(len) : NULL;
    if (e->log_tail) {
        memcpy(e->log_tail, x->log_tail.data + (x->log_tail.len - len), len);
        e->log_tail_len = len;
    }
    return e;
}

void attempt_rank_end(struct core *c, struct job *job, struct attempt *a, struct node *n, const Boost__ExitRecord *x)
{
    struct rank *r = &a->ranks[x->rank];
    (void)n;
    a->parts[r->part].heard = true;
    if (r->end) { /* sent again: the answer was lost, or it is not due yet */
        if (a->decided && job->unsettled == 0)
            ack_rank_end(c, job, a, x->rank);
        return;
    }
    r->end = end_of(c, x);
    if (!r->end)
        return; /* not acknowledged: it comes again */
    if (r->end->last_step > r->step)
        r->step = r->end->last_step;
    attempt_reached(job, a, r->end->last_step);
    progress_changed(c, job);
    if (r->end->class != CLASS(CLEAN) && r->end->class != CLASS(KILLED)) {
        fail_begins(c, job, a);
        attempt_decide(c, job, a, false);
    }
    attempt_try_close(c, job);
}

static void missing_ends(struct attempt *a, struct attempt_part *part, int64_t *arrivals)
{
    for (int i = 0; i < part->n_ranks; i++) {
        struct rank *r = &a->ranks[part->ranks[i]];
        if (r->end)
            continue;
        r->end = calloc(1, sizeof *r->end);
        if (r->end)
            *r->end = (struct rank_end){.class = a->kill ? CLASS(KILLED) : CLASS(INFRA),
                                        .lost = true,
                                        .killed_by_us = a->kill,
                                        .seq = INT64_MAX,
                                        .arrival = ++*arrivals,
                                        .last_step = -1};
    }
}

void attempt_part_over(struct core *c, struct job *job, struct attempt *a, const char *node, bool lost,
                       const char *note)
{
    struct attempt_part *part = part_on(a, node);
    struct node *n = node_find(c, node);
    if (!part)
        return;
    if (!lost && n)
        node_release(c, n, job->id, a->number);
    if (part->gone || part->lost)
        return;
    char text[512];
    if (lost) {
        part->lost = true;
        a->fenced = true;
        mark_attempt(c, job, a);
        snprintf(text, sizeof text, "%s lost (%s)", node, note);
        if (!a->failing && !a->kill)
            attempt_fail(c, job, a, CLASS(INFRA), REASON(NodeLost), "node-lost", node, text);
    } else {
        int missing = 0;
        for (int i = 0; i < part->n_ranks; i++)
            missing += a->ranks[part->ranks[i]].end == NULL;
        part->gone = true;
        missing_ends(a, part, &c->arrivals);
        progress_changed(c, job);
        if (missing && !a->failing && !a->kill) {
            char *ranks = rank_list(part->ranks, part->n_ranks);
            snprintf(text, sizeof text, "%s has nothing left of rank%s %s and no record of how %s ended%s%s", node,
                     part->n_ranks == 1 ? "" : "s", ranks ? ranks : "?", part->n_ranks == 1 ? "it" : "they",
                     note && *note ? ": " : "", note ? note : "");
            free(ranks);
            attempt_fail(c, job, a, CLASS(INFRA), REASON(NodeLost), "node-lost", node, text);
        }
    }
    attempt_try_close(c, job);
}

/* ---- timers -------------------------------------------------------------------------------------- */

/* Ranks that have not come so far; the count. */
static int ranks_before(const struct attempt *a, Boost__RankUpdate__Phase phase, int *out)
{
    int n = 0;
    for (int r = 0; r < a->world; r++)
        if (!a->ranks[r].heard || a->ranks[r].phase < phase)
            out[n++] = r;
    return n;
}

bool part_prepares(const struct attempt *a, const struct attempt_part *part)
{
    for (int i = 0; i < part->n_ranks; i++)
        if (a->ranks[part->ranks[i]].heard)
            return false;
    return part->doing && *part->doing && !part->gone && !part->lost && !a->kill;
}

/* Until the ranks are there a node's own time limits count, as it has told them. */
static bool any_prepares(const struct attempt *a, int64_t now)
{
    for (int p = 0; p < a->n_parts; p++)
        if (part_prepares(a, &a->parts[p]) && now < a->parts[p].doing_until)
            return true;
    return false;
}

static void rendezvous_over(struct core *c, struct job *job, struct attempt *a)
{
    int *missing = calloc((size_t)a->world, sizeof *missing);
    /* Those that wait at the meeting place wait for the others. */
    int n = missing ? ranks_before(a, PHASE(RENDEZVOUS), missing) : 0;
    if (missing && !n)
        n = ranks_before(a, PHASE(LOADING), missing);
    a->rendezvous_due = 0;
    char *ranks = n ? rank_list(missing, n) : NULL;
    if (ranks) {
        const char *node = a->parts[a->ranks[missing[0]].part].node;
        char text[512];
        snprintf(text, sizeof text, "no rendezvous in %.0f s: rank%s %.200s missing (first one on %s)",
                 (double)c->rendezvous_ns / (double)NS_PER_S, n == 1 ? "" : "s", ranks, node);
        attempt_fail(c, job, a, CLASS(INFRA), REASON(RendezvousTimeout), "rendezvous-timeout", node, text);
    }
    free(ranks);
    free(missing);
}

static int64_t live_run(struct core *c, struct job *job, struct attempt *a, int64_t now)
{
    int64_t next = INT64_MAX;
    bool certain;
    if (a->failing && !a->decided && now >= a->failing_mono + CORE_CAUSE_NS) {
        int r = attempt_cause(a, &certain);
        /* A lost peer is never the cause while another end may still come: the kill's confirmation has a timer. */
        if (r >= 0 && a->ranks[r].end->class != CLASS(PEER_LOST))
            attempt_decide(c, job, a, true);
    } else if (a->failing && !a->decided) {
        next = a->failing_mono + CORE_CAUSE_NS;
    }
    if (a->failing)
        a->hang_due = 0; /* a rank's end says more */
    if (a->hang_due && now >= a->hang_due)
        hang_decide(c, job, a);
    if (a->rendezvous_due && now >= a->rendezvous_due && any_prepares(a, now))
        a->rendezvous_due = now + c->rendezvous_ns;
    if (a->rendezvous_due && now >= a->rendezvous_due)
        rendezvous_over(c, job, a);
    if (a->grace_due && now >= a->grace_due && !a->kill) {
        add_event(c, job, a->number, NULL, "controller", "stop-overdue",
                  "not stopped %.0f s after it was asked to: killed", (double)(now - a->grace_from) / (double)NS_PER_S);
        job_fire(c, job, EV_GRACE_OVER);
    }
    if (a->close_due && now >= a->close_due)
        attempt_try_close(c, job);
    if (job_live_attempt(job) != a)
        return 0; /* it ended: look again */
    if (a->hang_due && a->hang_due < next)
        next = a->hang_due;
    if (a->rendezvous_due && a->rendezvous_due < next)
        next = a->rendezvous_due;
    if (a->grace_due && !a->kill && a->grace_due < next)
        next = a->grace_due;
    if (a->close_due > now && a->close_due < next)
        next = a->close_due;
    return next;
}

/* Ranks that trained on while there was no controller are further than it knows before it hears of them. */
static void say_where(const struct job *job, char *out, size_t cap)
{
    const struct attempt *a = job_live_attempt(job);
    int64_t step = job->step > job->checkpoint_step ? job->step : job->checkpoint_step;
    bool heard = !a || job->state != STATE(RUNNING);
    for (int r = 0; !heard && r < a->world; r++)
        heard = a->ranks[r].heard;
    if (step < 0)
        snprintf(out, cap, "before its first step");
    else
        snprintf(out, cap, "at step %" PRId64 "%s", step, heard ? "" : " or later");
}

int64_t attempt_run(struct core *c, struct job *job, int64_t now)
{
    int64_t next = INT64_MAX;
    int64_t limit_due = job_time_limit_due(job);
    if (now >= limit_due) {
        char left[64] = "", where[64];
        if (job_time_limit_lead_s(job) >= 0.1)
            snprintf(left, sizeof left, ", but for %.1f s for a checkpoint", job_time_limit_lead_s(job));
        say_where(job, where, sizeof where);
        job_reason(job, REASON(TimeLimit), "time limit of %" PRId64 " s reached %s%s", job->resolved->time_limit_s, where,
                   left);
        add_event(c, job, job->n_attempts, NULL, "controller", "time-limit", "%s", job->reason_text);
        job_fire(c, job, EV_TIME_LIMIT);
        if (job_state_terminal(job->state))
            attempt_say_end(c, job, job->n_attempts);
    } else {
        next = limit_due;
    }
    if (job->backoff_due && now >= job->backoff_due) {
        job->backoff_due = 0;
        job_fire(c, job, EV_BACKOFF_OVER);
    } else if (job->backoff_due && job->backoff_due < next) {
        next = job->backoff_due;
    }
    if (job->start_retry_due && now >= job->start_retry_due) {
        job->start_retry_due = 0;
        job_busy(c, job);
        c->schedule = true;
    } else if (job->start_retry_due && job->start_retry_due < next) {
        next = job->start_retry_due;
    }
    struct attempt *a = job_live_attempt(job);
    int64_t live = a ? live_run(c, job, a, now) : INT64_MAX;
    return live < next ? live : next;
}
