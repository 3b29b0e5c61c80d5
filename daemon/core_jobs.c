/* The controller's jobs: the table by id, the lists they stand in, and their transitions. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/base/utf8.h"

/* ---- lists of jobs ------------------------------------------------------------------ */

struct job_link *link_active(struct job *job)
{
    return &job->active;
}

struct job_link *link_busy(struct job *job)
{
    return &job->busy;
}

struct job_link *link_pending(struct job *job)
{
    return &job->pending;
}

struct job_link *link_working(struct job *job)
{
    return &job->working;
}

struct job_link *link_dependent(struct job *job)
{
    return &job->dependent;
}

void list_add(struct job_list *list, struct job *job, struct job_link *(*link)(struct job *))
{
    struct job_link *l = link(job);
    if (l->in)
        return;
    /* Queues are by id, and most come last; the other lists have no order, new ones come first. */
    struct job *prev = link == link_pending ? list->tail : NULL;
    while (prev && prev->id > job->id)
        prev = link(prev)->prev;
    struct job *next = prev ? link(prev)->next : list->head;
    *l = (struct job_link){.next = next, .prev = prev, .in = true};
    *(prev ? &link(prev)->next : &list->head) = job;
    *(next ? &link(next)->prev : &list->tail) = job;
}

void list_remove(struct job_list *list, struct job *job, struct job_link *(*link)(struct job *))
{
    struct job_link *l = link(job);
    if (!l->in)
        return;
    *(l->prev ? &link(l->prev)->next : &list->head) = l->next;
    *(l->next ? &link(l->next)->prev : &list->tail) = l->prev;
    *l = (struct job_link){.in = false};
}

static bool waits(Boost__JobState__Value s)
{
    return s == STATE(QUEUED) || s == STATE(HELD);
}

int core_add_job(struct core *c, struct job *job)
{
    job->share = share_of(c, job->uid);
    if (!job->share)
        return ERR_NOMEM;
    if (c->n_jobs == c->cap_jobs) {
        int cap = c->cap_jobs ? 2 * c->cap_jobs : 64;
        struct job **jobs = realloc(c->jobs, (size_t)cap * sizeof *jobs);
        if (!jobs)
            return ERR_NOMEM;
        c->jobs = jobs;
        c->cap_jobs = cap;
    }
    c->jobs[c->n_jobs++] = job;
    job->share->waiting += waits(job->state);
    c->n_state[job->state]++;
    if (!job_state_terminal(job->state))
        list_add(&c->active, job, link_active);
    return ERR_OK;
}

void core_forget_job(struct core *c, struct job *job)
{
    list_remove(&c->active, job, link_active);
    list_remove(&c->busy, job, link_busy);
    queue_remove(c, job);
    c->n_state[job->state]--;
    c->n_ending -= job_shown_state(job) != job->state;
    job->share->waiting -= waits(job->state);
    list_remove(&c->working, job, link_working);
    for (int i = 0; i < c->n_jobs; i++) {
        if (c->jobs[i] == job) {
            memmove(&c->jobs[i], &c->jobs[i + 1], (size_t)(c->n_jobs - i - 1) * sizeof *c->jobs);
            c->n_jobs--;
            break;
        }
    }
    for (int i = 0; i < c->n_dirty; i++)
        if (c->dirty_jobs[i] == job)
            c->dirty_jobs[i--] = c->dirty_jobs[--c->n_dirty];
    for (struct change *ch = c->changes; ch; ch = ch->next) /* of a user who knew it by name before it was durable */
        for (int i = 0; i < ch->n_jobs; i++)
            if (ch->jobs[i] == job)
                ch->jobs[i--] = ch->jobs[--ch->n_jobs];
    job_free(job);
}

/* Index of the first job with an id above. */
static int upper_bound(const struct core *c, int64_t id)
{
    int lo = 0, hi = c->n_jobs;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (c->jobs[mid]->id <= id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct job *core_next_job(struct core *c, int64_t after_id)
{
    int i = upper_bound(c, after_id);
    return i < c->n_jobs ? c->jobs[i] : NULL;
}

struct job *core_job(struct core *c, int64_t id)
{
    int i = upper_bound(c, id);
    return i > 0 && c->jobs[i - 1]->id == id ? c->jobs[i - 1] : NULL;
}

struct job *core_task(struct core *c, int64_t array, int index, const struct job *after)
{
    for (int i = upper_bound(c, after ? after->id : array - 1); i < c->n_jobs; i++) {
        struct job *job = c->jobs[i];
        if (job->array_job != array)
            break; /* ids of an array are consecutive */
        if (index < 0 || job->array_index == index)
            return job;
    }
    return NULL;
}

static int ascending(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

int core_select(struct core *c, bool live_only, bool (*wanted)(const struct job *job, const void *arg), const void *arg,
                int64_t **ids)
{
    int n = 0, most = c->n_jobs;
    live_only = live_only && !c->n_ending; /* those are in no list */
    for (int s = STATE(COMPLETED); live_only && s < JOB_STATES; s++)
        most -= c->n_state[s];
    *ids = malloc(((size_t)most + 1) * sizeof **ids);
    if (!*ids)
        return -1;
    for (const struct job *job = live_only ? c->active.head : NULL; job; job = job->active.next)
        if (wanted(job, arg))
            (*ids)[n++] = job->id;
    for (int i = 0; !live_only && i < c->n_jobs; i++)
        if (wanted(c->jobs[i], arg))
            (*ids)[n++] = c->jobs[i]->id;
    if (live_only)
        qsort(*ids, (size_t)n, sizeof **ids, ascending);
    return n;
}

/* ---- transitions ------------------------------------------------------------------------ */

void job_reason(struct job *job, Boost__Reason__Value reason, const char *fmt, ...)
{
    char text[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    text[utf8_whole(text, strlen(text))] = '\0';
    job->reason = reason;
    text_set(&job->reason_text, text);
}

void job_busy(struct core *c, struct job *job)
{
    if (job_state_live(job->state) || job->starting || job->start_retry_due)
        list_add(&c->busy, job, link_busy);
    else
        list_remove(&c->busy, job, link_busy);
}

void job_pend(struct core *c, struct job *job)
{
    bool pend =
        job->state == STATE(QUEUED) || (job->state == STATE(RECOVERING) && !job_live_attempt(job) && !job->backoff_due);
    if (pend == job->pending.in)
        return;
    if (pend)
        queue_add(c, job);
    else
        queue_remove(c, job);
    /* One that was placed leaves nothing to others; one that is new comes when it is durable: queue_settled(). */
    c->schedule = c->schedule || (pend ? job->acknowledged : job->state != STATE(STARTING));
}

static void job_finish(struct core *c, struct job *job)
{
    job->ended_ns = now_wall(c);
    job->backoff_due = 0;
    job->tokens_per_s = job->mfu = NAN;
    if (c->parked)
        due_at(c, 0);
}

bool job_fire(struct core *c, struct job *job, enum job_event event)
{
    struct job_transition t = job_step(job->state, job->stop_target, event);
    if (!t.legal) {
        c->stats.illegal_transitions++;
        core_log_line(c, CORE_LOG_WARN, "job %lld: %s in state %s is not in the table", (long long)job->id,
                      job_event_name(event), job_state_name(job->state));
        return false;
    }
    if (job_state_live(job->state) && !job_state_live(t.next))
        job->run_s = job_elapsed_s(c, job);
    if (t.actions & ACT_CLOSE_ATTEMPT)
        attempt_close(c, job);
    job->share->waiting += waits(t.next) - waits(job->state);
    c->n_state[job->state]--;
    c->n_state[t.next]++;
    if (job_state_terminal(t.next))
        job->ended_from = job->state;
    job->state = t.next;
    c->n_ending += job_shown_state(job) != job->state;
    if (t.next != STATE(STOPPING))
        job->stop_target = 0;
    else if (t.stop_target >= 0)
        job->stop_target = t.stop_target;
    job->may_grow = job->may_grow && t.next == STATE(RUNNING);
    if (!job_state_live(t.next))
        spares_release(c, job);
    job_take_changes(c, job);
    if (job->starting && event != EV_PLACED)
        start_cancel(c, job);
    if (t.next != STATE(RECOVERING))
        job->backoff_due = 0;
    if ((t.actions & ACT_KILL) && job_live_attempt(job))
        attempt_mark_kill(c, job, job_live_attempt(job));
    if ((t.actions & ACT_STOP_TERM) && job_live_attempt(job))
        grace_arm(c, job, job_live_attempt(job));
    if (t.actions & ACT_BACKOFF)
        backoff_arm(c, job);
    if (t.actions & ACT_FINISH)
        job_finish(c, job);
    if (t.actions & ACT_SCHEDULE)
        c->schedule = true;
    job->actions |= t.actions & (ACT_START | ACT_STOP_TERM | ACT_KILL);
    account_state(c, job);
    job_pend(c, job);
    if (!job->pending.in)
        start_anew(c, job);
    job_busy(c, job);
    if (job_state_terminal(t.next))
        list_remove(&c->active, job, link_active);
    mark_job(c, job);
    if (job->state == STATE(STOPPING) && !job_live_attempt(job))
        return job_fire(c, job, EV_ATTEMPT_GONE);
    return true;
}
