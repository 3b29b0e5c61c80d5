/* What must never be. The truth is in the models: processes, files, what users were
 * told; the core is never asked what it believes, but for its counters, its table of
 * jobs and, now and then, its table of nodes. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

#define STATE(x) BOOST__JOB_STATE__VALUE__##x
#define CKPT(x)  BOOST__CHECKPOINT_STATE__VALUE__##x

static bool terminal(int state)
{
    return state >= (int)STATE(COMPLETED);
}

static const char *name_of(int state)
{
    return state < 0 ? "nothing" : job_state_name((Boost__JobState__Value)state);
}

/* ---- processes ---- */

/* Whether the controller may take it that nothing of the attempt is on the node, though something is: it was fenced,
 * and the node was lost since, or did not confirm a kill. */
static bool given_up(const struct sim *s, const struct run *r)
{
    const struct store_attempt *a = mem_attempt(s->store, r->job, r->attempt);
    return a && a->fenced && s->nodes[r->node].given_up >= 0;
}

void check_start(struct sim *s, const struct sim_node *n, const Boost__AttemptStart *start)
{
    const struct store_attempt *a = mem_attempt(s->store, start->job, start->attempt);
    const struct sim_job *job = job_by_id(s, start->job);
    if (!a || !job)
        violated(s, "rows before orders", "%s is told to start %" PRId64 ".%d, of which no row is durable", n->name,
                 start->job, start->attempt);
    if (a->end_ns)
        violated(s, "attempts only increase", "%s is told to start %" PRId64 ".%d, which has ended", n->name,
                 start->job, start->attempt);
    if (start->attempt < job->last_attempt)
        violated(s, "attempts only increase", "%s is told to start %" PRId64 ".%d after attempt %d", n->name,
                 start->job, start->attempt, job->last_attempt);
    if (terminal(job->state))
        violated(s, "terminal states are final", "%s is told to start %" PRId64 ".%d of a job that is %s", n->name,
                 start->job, start->attempt, name_of(job->state));
    if (was_refused(s, job))
        violated(s, "what was refused never runs", "job %" PRId64 " was refused and starts on %s", job->id, n->name);
    for (const struct run *r = n->runs; r; r = r->next)
        if (r->job == start->job && r->attempt != start->attempt && run_has_process(r))
            violated(s, "one live attempt a device", "%s is told to start %" PRId64 ".%d beside attempt %d", n->name,
                     start->job, start->attempt, r->attempt);
    if (!start->resume)
        return;
    s->resumes++;
    int64_t from, step;
    int attempt;
    const struct store_checkpoint *k =
        saved_name(start->resume->path, &from, &step, &attempt) ? mem_checkpoint(s->store, from, step, attempt) : NULL;
    if (!k || k->state != (int)CKPT(COMMITTED))
        violated(s, "resume only from committed checkpoints", "%" PRId64 ".%d starts from %s, which is %s", start->job,
                 start->attempt, start->resume->path, k ? "not committed" : "no checkpoint");
}

void check_spawn(struct sim *s, const struct run *r)
{
    const struct sim_node *n = &s->nodes[r->node];
    int busy = r->n;
    s->attempts++;
    for (const struct run *x = n->runs; x; x = x->next) {
        if (x == r)
            continue;
        for (int i = 0; i < x->n && x->cuda == r->cuda; i++)
            busy += x->ranks[i].alive;
        if (x->job == r->job && run_has_process(x))
            violated(s, "one live attempt a device", "%" PRId64 ".%d starts on %s beside attempt %d", r->job,
                     r->attempt, n->name, x->attempt);
    }
    int there = r->cuda ? n->gpus : n->slots;
    if (busy > there)
        violated(s, "no node over-committed", "%" PRId64 ".%d makes %d ranks on the %d %s of %s", r->job, r->attempt,
                 busy, there, r->cuda ? "GPUs" : "slots", n->name);
    const struct store_attempt *mine = mem_attempt(s->store, r->job, r->attempt);
    bool fenced = mine && mine->fenced; /* it is late: whoever fenced it has to bear with it */
    for (int i = 0; i < s->n_nodes && !fenced; i++)
        for (const struct run *x = s->nodes[i].runs; x; x = x->next)
            if (x->job == r->job && x->attempt != r->attempt && run_has_process(x) && !given_up(s, x))
                violated(s, "one live attempt a device", "%" PRId64 ".%d starts on %s while attempt %d runs on %s",
                         r->job, r->attempt, n->name, x->attempt, s->nodes[i].name);
}

void check_gpus(struct sim *s, const struct sim_node *n, const struct run *r)
{
    const struct store_attempt *mine = mem_attempt(s->store, r->job, r->attempt);
    for (int g = 0; g < n->gpus; g++)
        if (n->gpu_broken[g])
            return;
    if (mine && !mine->fenced)
        violated(s, "no node over-committed",
                 "%" PRId64 ".%d is to have %d GPUs of %s, which has %d, and too few are free", r->job, r->attempt,
                 r->n, n->name, n->gpus);
}

void check_loaded(struct sim *s, const struct run *r)
{
    if (!r->from_attempt)
        return;
    const struct store_attempt *mine = mem_attempt(s->store, r->job, r->attempt);
    const struct saved *k = saved_find(s, r->from_job, r->from_saved, r->from_attempt);
    if ((!k || !k->manifest || !saved_whole(k)) && mine && !mine->fenced && !mine->end_ns)
        violated(s, "resume only from committed checkpoints",
                 "%" PRId64 ".%d finds no whole checkpoint of step %" PRId64 " of %" PRId64 ".%d", r->job, r->attempt,
                 r->from_saved, r->from_job, r->from_attempt);
}

void check_delete(struct sim *s, const struct saved *k)
{
    const struct store_checkpoint *row = mem_checkpoint(s->store, k->job, k->step, k->attempt);
    if (row && row->state == (int)CKPT(COMMITTED))
        violated(s, "what is committed stays",
                 "the files of step %" PRId64 " of %" PRId64 ".%d go, and its row is COMMITTED", k->step, k->job,
                 k->attempt);
}

/* ---- events ---- */

/* "attempt 2 on n1:0,1;n2:2, from ..." */
static void check_placed(struct sim *s, const struct store_event *e)
{
    for (int i = 0; i < s->n_nodes; i++) {
        char first[24], later[24];
        snprintf(first, sizeof first, " %s:", s->nodes[i].name);
        snprintf(later, sizeof later, ";%s:", s->nodes[i].name);
        const struct sim_node *n = &s->nodes[i];
        const char *why = n->closed      ? "was taken out of use"
                          : n->core_sick ? "is not sound"
                          : n->drained   ? "is drained"
                                         : NULL;
        if (why && (strstr(e->text, first) || strstr(e->text, later)))
            violated(s, "a node out of use gets nothing new", "%s %s, and job %" PRId64 ": %s", n->name, why, e->job,
                     e->text);
    }
}

static void note_drained(struct sim *s, const struct store_event *e)
{
    bool drained = strcmp(e->kind, "node-drained") == 0;
    for (int i = 0; i < s->n_nodes && (drained || strcmp(e->kind, "node-resumed") == 0); i++)
        if (strcmp(s->nodes[i].name, e->node) == 0)
            s->nodes[i].drained = drained;
}

void check_event(void *arg, const struct store_event *e)
{
    struct sim *s = arg;
    bool down = strcmp(e->kind, "node-down") == 0;
    if (strcmp(e->kind, "started") == 0)
        check_placed(s, e);
    note_drained(s, e);
    if (!down && strcmp(e->kind, "node-drained") != 0 && strcmp(e->kind, "kill-overdue") != 0)
        return;
    for (int i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        if (strcmp(n->name, e->node) != 0)
            continue;
        n->given_up = s->now;
        if (!down)
            continue;
        int64_t silent = s->now - n->heard;
        if (silent < s->config.node_timeout_ms * MS)
            violated(s, "a node that is heard is never DOWN", "%s is DOWN %.3f s after a message of it", n->name,
                     (double)silent / (double)S);
        if (s->now - s->core_up < s->config.restart_grace_ms * MS)
            violated(s, "a node that is heard is never DOWN", "%s is DOWN %.3f s after the controller's start", n->name,
                     (double)(s->now - s->core_up) / (double)S);
    }
}

static bool is(const struct store_event *e, const char *kind)
{
    return strcmp(e->kind, kind) == 0;
}

static bool says(const char *text, const char *part)
{
    const char *end = strchr(text, '\n'), *found = strstr(text, part);
    return found && (!end || found < end);
}

/* The state of a job behind an event, from its state before. open: it has an attempt that has not ended. */
static int replay(int state, bool open, const struct store_event *e)
{
    static const struct {
        const char *kind;
        int state;
    } plain[] = {{"started", STATE(STARTING)}, {"running", STATE(RUNNING)},     {"completed", STATE(COMPLETED)},
                 {"failed", STATE(FAILED)},    {"cancelled", STATE(CANCELLED)}, {"timeout", STATE(TIMEOUT)},
                 {"held", STATE(HELD)},        {"queued", STATE(QUEUED)},       {"recovering", STATE(RECOVERING)}};
    static const char *const failures[] = {"rank-exit", "node-lost", "hang", "rendezvous-timeout", "attempt-refused"};
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++)
        if (is(e, plain[i].kind))
            return plain[i].state;
    bool live = state == (int)STATE(STARTING) || state == (int)STATE(RUNNING);
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++)
        if (is(e, failures[i]) && live)
            return says(e->text, "no restart can help") || says(e->text, "restarts used") ? (int)STATE(STOPPING)
                                                                                          : (int)STATE(RECOVERING);
    if (is(e, "submitted"))
        return says(e->text, ", held") ? STATE(HELD) : STATE(QUEUED);
    if ((is(e, "released") || is(e, "restart")) && state == (int)STATE(HELD))
        return STATE(QUEUED);
    if (is(e, "restart") && open)
        return STATE(STOPPING);
    if ((is(e, "cancel") || is(e, "hold") || is(e, "time-limit") || is(e, "drained") || is(e, "preempted") ||
         is(e, "growing")) &&
        (live || state == (int)STATE(RECOVERING)))
        return STATE(STOPPING);
    return state;
}

static void replay_one(struct sim_job *job, const struct store_event *e)
{
    static const char *const ends[] = {"completed", "failed",     "cancelled", "timeout",
                                       "held",      "recovering", "queued",    "submitted"};
    job->replayed = replay(job->replayed, job->replayed_open, e);
    job->replayed_open = job->replayed_open || is(e, "started");
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (is(e, ends[i]))
            job->replayed_open = false;
}

/* ---- rows ---- */

static struct sim_job *job_row(struct sim *s, const struct store_job *row)
{
    struct sim_job *job = job_by_id(s, row->id);
    if (job)
        return job;
    if (s->n_jobs == MAX_JOBS)
        violated(s, "simulator", "more than %d jobs", MAX_JOBS);
    job = &s->jobs[s->n_jobs++];
    *job = (struct sim_job){.id = row->id, .state = -1, .replayed = -1, .step_ns = between(s, 50, 1500) * MS};
    Boost__JobSpec *spec = boost__job_spec__unpack(NULL, row->resolved_len, row->resolved);
    if (!spec)
        violated(s, "events replay to the job table", "the row of job %" PRId64 " does not unpack", row->id);
    job->max_restarts = spec->restart->max_restarts;
    job->limited = spec->time_limit_s > 0;
    job->uid = row->uid;
    job->array = row->array_job;
    job->array_limit = row->array_limit;
    /* A later one of the same name is a restart of the first. */
    job->submit_no = (int)strtol(row->name, NULL, 10);
    for (int i = 0; i < s->n_jobs - 1; i++)
        if (s->jobs[i].submit_no == job->submit_no && (!job->array || s->jobs[i].array != job->array))
            job->submit_no = 0;
    boost__job_spec__free_unpacked(spec, NULL);
    return job;
}

/* What ended has nothing left, but where it was given up. */
static void check_gone(struct sim *s, const struct sim_job *job)
{
    for (int i = 0; i < s->n_nodes; i++)
        for (const struct run *r = s->nodes[i].runs; r; r = r->next)
            if (r->job == job->id && run_has_process(r) && !given_up(s, r))
                violated(s, "terminal states are final", "job %" PRId64 " is %s, and attempt %d still runs on %s",
                         job->id, name_of(job->state), r->attempt, s->nodes[i].name);
}

static void check_why(struct sim *s, const struct sim_job *job)
{
    if (job->state == (int)STATE(CANCELLED) && !job->cancel_asked && job->acknowledged)
        violated(s, "terminal states are final", "job %" PRId64 " is CANCELLED, and nobody asked for it", job->id);
    if (job->state == (int)STATE(TIMEOUT) && !job->limited)
        violated(s, "terminal states are final", "job %" PRId64 " is TIMEOUT without a limit", job->id);
    if (job->state == (int)STATE(FAILED) && !job->wrong && job->app_failures <= job->max_restarts)
        violated(s, "jobs finish", "job %" PRId64 " is FAILED after %d failures of its own; it has %d restarts",
                 job->id, job->app_failures, job->max_restarts);
}

static void check_job(struct sim *s, struct sim_job *job, const struct store_job *row)
{
    if (terminal(job->state) && row->state != job->state)
        violated(s, "terminal states are final", "job %" PRId64 " was %s and becomes %s", job->id, name_of(job->state),
                 name_of(row->state));
    if (row->attempt < job->last_attempt)
        violated(s, "attempts only increase", "job %" PRId64 " was at attempt %d and is at %d", job->id,
                 job->last_attempt, row->attempt);
    if (job->replayed != row->state)
        violated(s, "events replay to the job table", "job %" PRId64 " is %s by its events, %s by its row", job->id,
                 name_of(job->replayed), name_of(row->state));
    bool news = job->state != row->state;
    if (news)
        trace(s, "    durable: job %" PRId64 " is %s, attempt %d", job->id, name_of(row->state), row->attempt);
    job->state = row->state;
    job->known = true;
    if (!news || !terminal(job->state))
        return;
    check_why(s, job);
    if (job->state == (int)STATE(COMPLETED))
        s->completed++;
}

static void check_completed(struct sim *s, const struct sim_job *job)
{
    const struct gang *g = gang_find(s, job->id, job->last_attempt);
    if (job->state == (int)STATE(COMPLETED) && g && !g->finished)
        violated(s, "jobs finish", "job %" PRId64 " is COMPLETED, and attempt %d did not do its last step", job->id,
                 job->last_attempt);
}

void check_apply(void *arg, const struct mem_txn *t)
{
    struct sim *s = arg;
    for (int i = 0; i < t->n_jobs; i++)
        job_row(s, &t->jobs[i]);
    for (int i = 0; i < t->n_attempts; i++) {
        const struct store_attempt *a = &t->attempts[i];
        struct sim_job *job = job_by_id(s, a->job);
        const struct store_attempt *before = mem_attempt(s->store, a->job, a->attempt);
        if (!job || a->attempt > job->last_attempt + 1)
            violated(s, "attempts only increase", "%" PRId64 ".%d comes behind attempt %d", a->job, a->attempt,
                     job ? job->last_attempt : 0);
        if (before && before->end_ns && !a->end_ns)
            violated(s, "attempts only increase", "%" PRId64 ".%d had ended and lives again", a->job, a->attempt);
        if (a->attempt > job->last_attempt)
            job->last_attempt = a->attempt;
        if (a->attempt > MAX_ATTEMPTS)
            violated(s, "the core comes to rest", "job %" PRId64 " is at attempt %d", a->job, a->attempt);
    }
    for (int i = 0; i < t->n_checkpoints; i++) {
        const struct store_checkpoint *k = &t->checkpoints[i];
        const struct store_checkpoint *before = mem_checkpoint(s->store, k->job, k->step, k->attempt);
        const struct saved *files = saved_find(s, k->job, k->step, k->attempt);
        if (k->state == (int)CKPT(COMMITTED) && !(before && before->state == k->state) &&
            (!files || !files->manifest || !saved_whole(files)))
            violated(s, "resume only from committed checkpoints",
                     "step %" PRId64 " of %" PRId64 ".%d is COMMITTED before all of it is there", k->step, k->job,
                     k->attempt);
    }
    for (int i = 0; i < t->n_events; i++) {
        struct sim_job *job = t->events[i].job ? job_by_id(s, t->events[i].job) : NULL;
        if (t->events[i].job && !job)
            violated(s, "events replay to the job table", "an event of job %" PRId64 ", which has no row",
                     t->events[i].job);
        if (job)
            replay_one(job, &t->events[i]);
    }
    for (int i = 0; i < t->n_jobs; i++) {
        struct sim_job *job = job_by_id(s, t->jobs[i].id);
        check_job(s, job, &t->jobs[i]);
        check_completed(s, job);
    }
}

static bool runs(const struct sim_job *job)
{
    return job->state == (int)STATE(STARTING) || job->state == (int)STATE(RUNNING);
}

static void check_limits(struct sim *s, const struct sim_job *job)
{
    int tasks = 0, jobs = 0;
    for (int i = 0; i < s->n_jobs; i++) {
        tasks += runs(&s->jobs[i]) && s->jobs[i].array == job->array;
        jobs += runs(&s->jobs[i]) && s->jobs[i].uid == job->uid;
    }
    if (job->array_limit && tasks > job->array_limit)
        violated(s, "limits hold", "%d tasks of array %" PRId64 " run, its limit is %d", tasks, job->array,
                 job->array_limit);
    if (s->config.user_running_jobs && jobs > s->config.user_running_jobs)
        violated(s, "limits hold", "%d jobs of uid %u run, the limit is %d", jobs, job->uid,
                 s->config.user_running_jobs);
}

void check_applied(void *arg, const struct mem_txn *t)
{
    struct sim *s = arg;
    for (int i = 0; i < t->n_attempts; i++) {
        const struct store_attempt *a = &t->attempts[i];
        const struct store_attempt *before = a->attempt > 1 ? mem_attempt(s->store, a->job, a->attempt - 1) : NULL;
        if (before && !before->end_ns)
            violated(s, "attempts only increase", "%" PRId64 ".%d begins before attempt %d has ended", a->job,
                     a->attempt, a->attempt - 1);
    }
    for (int i = 0; i < t->n_jobs; i++)
        if (terminal(t->jobs[i].state))
            check_gone(s, job_by_id(s, t->jobs[i].id));
    for (int i = 0; i < t->n_jobs; i++) {
        const struct sim_job *job = job_by_id(s, t->jobs[i].id);
        if (runs(job))
            check_limits(s, job);
    }
}

/* ---- after every event ---- */

static void check_nodes(struct sim *s)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__NodesReply *reply = core_nodes(s->core, &mem);
    for (size_t i = 0; reply && i < reply->n_nodes; i++) {
        const Boost__NodeInfo *n = reply->nodes[i];
        /* Before it has registered, parts of attempts may be counted that it had confirmed gone. */
        if (n->cpu_slots_busy > n->cpu_slots && n->liveness == BOOST__NODE_LIVENESS__VALUE__UP)
            violated(s, "no node over-committed", "%s has %d of %d slots taken", n->name, n->cpu_slots_busy,
                     n->cpu_slots);
    }
    arena_free(&mem);
}

/* Whoever looks may take it that a crash of now leaves what there is to see. */
static void check_shown_of(struct sim *s, struct arena *mem, const struct job *job)
{
    Boost__CheckpointsReply *ls = core_checkpoints(s->core, job, mem);
    Boost__JobSummary *sum = core_summary(s->core, job, mem);
    const struct store_job *its = mem_job(s->store, job->id);
    bool last = sum && !sum->has_last_checkpoint_step;
    for (size_t i = 0; ls && i < ls->n_checkpoints; i++) {
        const Boost__CheckpointInfo *k = ls->checkpoints[i];
        const struct store_checkpoint *row = mem_checkpoint(s->store, job->id, k->step, k->attempt);
        int state = row ? row->state : (int)CKPT(WRITING);
        if ((int)k->state != state || (k->has_pinned && k->pinned) != (row && row->pinned) ||
            (int)k->mirror != (row ? row->mirror : 0))
            violated(s, "what is shown is durable",
                     "step %" PRId64 " of %" PRId64 ".%d is shown as %d, its row says %d", k->step, job->id,
                     k->attempt, (int)k->state, state);
        last = last || (sum && state == (int)CKPT(COMMITTED) && k->step == sum->last_checkpoint_step);
    }
    if (sum && !last)
        violated(s, "what is shown is durable",
                 "job %" PRId64 " shows a checkpoint of step %" PRId64 ", and none is durable", job->id,
                 sum->last_checkpoint_step);
    if (sum && terminal((int)sum->state) && !(its && its->state == (int)sum->state))
        violated(s, "what is shown is durable", "job %" PRId64 " is shown as %s, its row says %s", job->id,
                 name_of((int)sum->state), name_of(its ? its->state : -1));
}

static void check_shown(struct sim *s)
{
    struct arena mem;
    arena_init(&mem, 64 << 20);
    for (const struct job *job = core_next_job(s->core, 0); job; job = core_next_job(s->core, job->id))
        check_shown_of(s, &mem, job);
    arena_free(&mem);
}

/* What has to come to its end does so in time, where nothing hinders it. */
static void check_process(struct sim *s, const struct sim_node *n, struct run *r)
{
    enum { SOON_S = 20, GRACE_S = 60 };
    const struct sim_job *job = job_by_id(s, r->job);
    const struct store_attempt *a = mem_attempt(s->store, r->job, r->attempt);
    bool undying = false;
    for (int i = 0; i < r->n; i++)
        undying = undying || (r->ranks[i].alive && s->now < r->ranks[i].undying_until + 2 * S);
    bool over = a && (a->fenced || a->end_ns);
    if (over && !r->over_seen)
        r->over_seen = s->now;
    int64_t calm = s->now - n->calm_from - SOON_S * S;
    if (!undying && over && calm > 0 && s->now > r->over_seen + SOON_S * S)
        violated(s, "what is fenced is killed", "%" PRId64 ".%d is over, and %s, which could be told, still runs it",
                 r->job, r->attempt, n->name);
    if (!undying && job && job->cancel_promised && calm > GRACE_S * S &&
        s->now > job->promised_ns + (SOON_S + GRACE_S) * S)
        violated(s, "cancel ends every process",
                 "job %" PRId64 " was to be cancelled %.0f s ago, and attempt %d runs on %s", job->id,
                 (double)(s->now - job->promised_ns) / (double)S, r->attempt, n->name);
    int64_t confirm = s->config.kill_confirm_ms * MS;
    bool ending = job && (job->state == (int)STATE(RECOVERING) || job->state == (int)STATE(STOPPING));
    int64_t killed = r->stop_since > r->asked_until ? r->stop_since : r->asked_until;
    if (undying && r->stop_file && ending && !over && calm > confirm && s->now > killed + confirm + SOON_S * S)
        violated(s, "every wait ends", "the kill of %" PRId64 ".%d on %s is waited for since %.0f s", r->job,
                 r->attempt, n->name, (double)(s->now - r->stop_since) / (double)S);
}

static void check_processes(struct sim *s)
{
    for (int i = 0; i < s->n_nodes; i++)
        for (struct run *r = s->nodes[i].runs; r && s->nodes[i].registered; r = r->next)
            if (run_has_process(r))
                check_process(s, &s->nodes[i], r);
}

void check_always(struct sim *s)
{
    if (!s->core)
        return;
    const struct core_stats *stats = core_stats(s->core);
    if (stats->illegal_transitions)
        violated(s, "no illegal transition", "the core counts %" PRIu64, stats->illegal_transitions);
    for (int i = 0; i < s->n_jobs; i++) {
        const struct sim_job *job = &s->jobs[i];
        const struct job *theirs = job->acknowledged ? core_job(s->core, job->id) : NULL;
        if (!job->acknowledged)
            continue;
        if (!theirs)
            violated(s, "acknowledged submits survive", "job %" PRId64 " was acknowledged and is not there", job->id);
        if (terminal(job->state) && (int)theirs->state != job->state)
            violated(s, "terminal states are final", "job %" PRId64 " was %s and is %s", job->id, name_of(job->state),
                     name_of((int)theirs->state));
        if (theirs->n_attempts < job->last_attempt)
            violated(s, "attempts only increase", "job %" PRId64 " was at attempt %d and is at %d", job->id,
                     job->last_attempt, theirs->n_attempts);
    }
    if (s->happened % 16 == 0)
        check_processes(s);
    if (s->happened % 32 == 8)
        check_shown(s);
    if (s->happened % 64 == 0)
        check_nodes(s);
}

/* ---- the end ---- */

bool check_over(struct sim *s)
{
    if (!s->core || s->to_submit > 0 || users_wait(s))
        return false;
    for (int i = 0; i < s->n_jobs; i++)
        if (!terminal(s->jobs[i].state))
            return false;
    return true;
}

_Noreturn void check_late(struct sim *s, int hours)
{
    char why[512] = "";
    struct arena mem;
    arena_init(&mem, 1 << 20);
    for (int i = 0; s->core && i < s->n_jobs; i++) {
        const struct job *job = core_job(s->core, s->jobs[i].id);
        const Boost__JobSummary *x = job && !terminal((int)job->state) ? core_summary(s->core, job, &mem) : NULL;
        size_t used = strlen(why);
        if (x)
            snprintf(why + used, sizeof why - used, "; job %" PRId64 " is %s: %.200s", job->id,
                     name_of((int)job->state), x->info);
    }
    arena_free(&mem);
    violated(s, "jobs finish", "not over %d simulated hours after the last fault%s", hours, why);
}

void check_end(struct sim *s)
{
    for (int i = 0; i < s->n_nodes; i++) {
        for (const struct run *r = s->nodes[i].runs; r; r = r->next) {
            const struct sim_job *job = job_by_id(s, r->job);
            if (run_has_process(r))
                violated(s, job && job->cancel_promised ? "cancel ends every process" : "jobs finish",
                         "all jobs have ended, and %" PRId64 ".%d still runs on %s", r->job, r->attempt,
                         s->nodes[i].name);
            violated(s, "agents may forget", "all jobs have ended, and %s still keeps %" PRId64 ".%d", s->nodes[i].name,
                     r->job, r->attempt);
        }
    }
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__NodesReply *reply = core_nodes(s->core, &mem);
    for (size_t i = 0; reply && i < reply->n_nodes; i++) {
        const Boost__NodeInfo *n = reply->nodes[i];
        if (n->cpu_slots_busy)
            violated(s, "devices come free", "all jobs have ended, and %s has %d slots taken", n->name,
                     n->cpu_slots_busy);
        if (n->admin != BOOST__NODE_ADMIN__VALUE__NONE)
            violated(s, "devices come free", "%s takes no work at the end: %s", n->name, n->reason ? n->reason : "");
        if (n->liveness != BOOST__NODE_LIVENESS__VALUE__UP)
            violated(s, "a node that is heard is never DOWN", "%s is not UP at the end", n->name);
    }
    arena_free(&mem);
}
