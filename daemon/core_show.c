/* What people see of jobs: summaries, show, checkpoints. Nothing here changes anything. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

static double seconds(int64_t ns)
{
    return (double)ns / (double)NS_PER_S;
}

/* Only the first line: the rest is log. */
static char *first_line(struct arena *mem, const char *text)
{
    const char *end = text ? strchr(text, '\n') : NULL;
    return end ? arena_printf(mem, "%.*s", (int)(end - text), text) : arena_strdup(mem, text ? text : "");
}

/* The nodes of the live attempt, or of the last one of a job that has ended; else none. */
static int node_names(const struct job *job, struct arena *mem, char ***out)
{
    const struct attempt *a =
        job_state_terminal(job->state) ? job_attempt(job, job->n_attempts) : job_live_attempt(job);
    char **names = a ? arena_alloc(mem, (size_t)a->n_parts * sizeof *names) : NULL;
    *out = names;
    if (!names)
        return 0;
    for (int p = 0; p < a->n_parts; p++)
        names[p] = arena_strdup(mem, a->parts[p].node);
    return a->n_parts;
}

static char *node_line(const struct job *job, struct arena *mem)
{
    const struct attempt *a = job_live_attempt(job);
    char *line = NULL;
    for (int p = 0; a && p < a->n_parts; p++)
        line = line ? arena_printf(mem, "%s,%s", line, a->parts[p].node) : arena_strdup(mem, a->parts[p].node);
    if (line && a->n_parts < job_nodes(job))
        line = arena_printf(mem, "%s (%d of %d nodes)", line, a->n_parts, job_nodes(job));
    return line ? line : arena_strdup(mem, "");
}

/* ---- waits: every one has a name and a timer ------------------------------------------------- */

struct waits {
    struct core *c;
    struct arena *mem;
    Boost__WaitInfo **list;
    size_t n, cap;
    bool failed;
};

/* limit_due 0: without one. */
static void wait_add(struct waits *w, char *name, int64_t since, int64_t limit_due)
{
    if (w->n == w->cap) {
        size_t cap = w->cap ? 2 * w->cap : 8;
        Boost__WaitInfo **list = arena_alloc(w->mem, cap * sizeof *list);
        if (!list) {
            w->failed = true;
            return;
        }
        if (w->n)
            memcpy(list, w->list, w->n * sizeof *list);
        w->list = list;
        w->cap = cap;
    }
    Boost__WaitInfo *x = arena_alloc(w->mem, sizeof *x);
    if (!x || !name) {
        w->failed = true;
        return;
    }
    boost__wait_info__init(x);
    x->name = name;
    x->has_elapsed_s = true;
    x->elapsed_s = seconds(now_mono(w->c) - since);
    if (limit_due) {
        x->has_limit_s = true;
        x->limit_s = seconds(limit_due - since);
    }
    w->list[w->n++] = x;
}

static void waits_of_attempt(struct waits *w, const struct job *job, const struct attempt *a)
{
    for (int p = 0; p < a->n_parts; p++) {
        struct node *n = node_find(w->c, a->parts[p].node);
        if (!n || a->parts[p].gone || a->parts[p].lost)
            continue;
        const struct holding *h = node_holding(n, job->id, a->number);
        if (!n->registered)
            wait_add(w, arena_printf(w->mem, "agent of %s to come back after the controller's start", n->name),
                     w->c->up_since, w->c->up_since + w->c->restart_grace_ns);
        else if (!n->connected || n->liveness != LIVENESS(UP))
            wait_add(w, arena_printf(w->mem, "%s to be heard of again (still believed running)", n->name), n->last_seen,
                     n->last_seen + w->c->node_timeout_ns);
        else if (h && h->kill_due)
            wait_add(w, arena_printf(w->mem, "kill confirmed by %s", n->name), h->kill_from, h->kill_due);
        else if (part_prepares(a, &a->parts[p]))
            wait_add(w, arena_printf(w->mem, "%s on %s", a->parts[p].doing, n->name), a->start_mono,
                     a->parts[p].doing_until);
        else if (a->kill)
            wait_add(w, arena_printf(w->mem, "kill to be sent to %s", n->name),
                     a->failing_mono ? a->failing_mono : a->start_mono, 0);
    }
    if (a->hang_due)
        wait_add(w, arena_strdup(w->mem, "other ranks that hang, to tell which one holds them up"),
                 a->hang_due - CORE_CAUSE_NS, a->hang_due);
    if (a->failing && !a->decided)
        wait_add(w, arena_strdup(w->mem, "ends of the other ranks, to tell the first"), a->failing_mono, 0);
    if (a->rendezvous_due)
        wait_add(w, arena_strdup(w->mem, "rendezvous"), a->rendezvous_due - w->c->rendezvous_ns, a->rendezvous_due);
    else if (job->state == STATE(STARTING) && !a->kill)
        wait_add(w, arena_strdup(w->mem, "first step of every rank"), a->start_mono, 0);
    if (a->grace_due && !a->kill)
        wait_add(w, arena_strdup(w->mem, "ranks to finish their step and checkpoint"), a->grace_from, a->grace_due);
    if (a->close_due)
        wait_add(w, arena_strdup(w->mem, "last checkpoint of the attempt to be committed"), a->close_from,
                 a->close_due);
}

/* The wait that was added last is for files that a task moves. */
static void wait_moves(struct waits *w, int64_t done, int64_t total)
{
    if (w->failed || !w->n || (!done && !total))
        return;
    Boost__WaitInfo *x = w->list[w->n - 1];
    x->has_bytes_done = true;
    x->bytes_done = done;
    x->has_bytes_total = total > 0;
    x->bytes_total = total;
}

static void wait_moves_of(struct waits *w, uint64_t task)
{
    const struct task *t = task_find(w->c, task);
    if (t)
        wait_moves(w, t->bytes_done, t->bytes_total);
}

static void waits_of_fetches(struct waits *w, const struct job *job)
{
    const struct core_start *s = job->starting;
    int64_t done = 0, total = 0;
    char told[SCHED_TEXT];
    fetch_told(w->c, job, told, sizeof told);
    wait_add(w, arena_printf(w->mem, "files fetched by %d node%s%s", s->fetching, s->fetching == 1 ? "" : "s", told),
             s->since, 0);
    for (int i = 0; i < s->n_nodes; i++) {
        const struct task *t = task_find(w->c, s->fetches[i]);
        done += t ? t->bytes_done : 0;
        total += t ? t->bytes_total : 0;
    }
    wait_moves(w, done, total);
}

static void waits_of_checkpoints(struct waits *w, const struct job *job)
{
    for (int i = 0; i < job->n_checkpoints; i++) {
        const struct checkpoint *k = job->checkpoints[i];
        const struct task *t = task_find(w->c, k->task);
        if (t)
            wait_add(w,
                     arena_printf(w->mem, "%s of the checkpoint of step %" PRId64 " by %s",
                                  k->state == CKPT(WRITING) ? "manifest" : "deletion", k->step, t->node->name),
                     t->since, t->deadline);
        t = task_find(w->c, k->mirror_task);
        if (!t)
            continue;
        wait_add(w, arena_printf(w->mem, "copy of the checkpoint of step %" PRId64 " by %s", k->step, t->node->name),
                 t->since, 0);
        wait_moves(w, t->bytes_done, t->bytes_total);
    }
}

static void waits_of(struct waits *w, const struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    if (job->pending.in && !job->starting) {
        struct sched_answer answer;
        job_pending_reason(w->c, job, &answer);
        if (job->start_retry_due > now_mono(w->c)) /* it takes no devices meanwhile */
            wait_add(w, arena_printf(w->mem, "next try: %s", answer.text), job->account_since,
                     job->start_retry_due);
        else
            wait_add(w, arena_printf(w->mem, "devices: %s", answer.verdict == SCHED_PLACED ? "next pass" : answer.text),
                     job->account_since, 0);
    }
    if (job->starting && !job->starting->fetches && job->starting->proving < job->starting->n_nodes)
        wait_add(w,
                 arena_printf(w->mem, "%s to look into the checkpoint directory",
                              job->starting->nodes[job->starting->proving]->name),
                 job->starting->since, job->starting->since + CORE_SHARED_NS);
    else if (job->starting && job->starting->fetches)
        waits_of_fetches(w, job);
    else if (job->starting && job->starting->candidate) {
        const struct task *t = task_find(w->c, job->starting->task);
        wait_add(w,
                 arena_printf(w->mem, "checkpoint of step %" PRId64 " verified by %s", job->starting->candidate->step,
                              job->starting->nodes[0]->name),
                 job->starting->since, t && t->bytes_total ? 0 : job->starting->since + CORE_VERIFY_NS);
        wait_moves_of(w, job->starting->task);
    } else if (job->starting)
        wait_add(w, arena_printf(w->mem, "checkpoint.init_from verified by %s", job->starting->nodes[0]->name),
                 job->starting->since, job->starting->since + CORE_VERIFY_NS);
    if (job->backoff_due)
        wait_add(w, arena_strdup(w->mem, "back-off"), job->backoff_from, job->backoff_due);
    if (a)
        waits_of_attempt(w, job, a);
    waits_of_checkpoints(w, job);
    if (job->unsettled)
        wait_add(w, arena_strdup(w->mem, "state.db to be written"), job->account_since, 0);
}

/* ---- the one line --------------------------------------------------------------------------- */

/* What its start does, on which node when `on` is said. */
static char *preparing_line(const struct core *c, const struct job *job, struct arena *mem, const char *on)
{
    const struct core_start *s = job->starting;
    char told[SCHED_TEXT];
    fetch_told(c, job, told, sizeof told);
    return arena_printf(mem, "%s%s%s%s",
                        s->fetches                ? "fetches its files"
                        : s->proving < s->n_nodes ? "looks into its checkpoint directory"
                                                  : "verifies its checkpoint",
                        *on ? " on " : "", on, s->fetches ? told : "");
}

/* Of a job that waits for its next start. */
static char *pending_line(struct core *c, const struct job *job, struct arena *mem, const char *next,
                          Boost__Reason__Value *reason)
{
    struct sched_answer answer;
    char told[SCHED_TEXT];
    job_pending_reason(c, job, &answer);
    fetch_told(c, job, told, sizeof told);
    const char *text = answer.verdict == SCHED_PLACED ? next : answer.text;
    if (reason)
        *reason = answer.reason;
    return job->start_retry_due > now_mono(c) || !*told
               ? arena_strdup(mem, text)
               : arena_printf(mem, "%s; then fetches its files%s", text, told);
}

static char *recovering_line(struct core *c, const struct job *job, struct arena *mem)
{
    char *why = first_line(mem, job->reason_text);
    char from[64];
    snprintf(from, sizeof from, "from %s", init_path(job->resolved) ? "where it first began" : "the beginning");
    if (checkpoints_durable_step(job) >= 0)
        snprintf(from, sizeof from, "from step %" PRId64, checkpoints_durable_step(job));
    if (!why)
        return NULL;
    if (job_live_attempt(job))
        return arena_printf(mem, "ending attempt %d: %s", job->n_attempts, why);
    if (job->backoff_due) {
        double in = seconds(job->backoff_due - now_mono(c));
        return arena_printf(mem, "attempt %d in %.0fs: %s; %s", job->n_attempts + 1, in > 0 ? ceil(in) : 0, why, from);
    }
    const char *does = job->starting ? preparing_line(c, job, mem, "") : pending_line(c, job, mem, "now", NULL);
    return does ? arena_printf(mem, "attempt %d %s: %s; %s", job->n_attempts + 1, does, why, from) : NULL;
}

static char *stopping_line(struct core *c, const struct job *job, struct arena *mem)
{
    const struct attempt *a = job_live_attempt(job);
    char *why = first_line(mem, job->reason_text);
    if (a && a->grace_due && !a->kill)
        return arena_printf(mem, "to %s in at most %.0fs: %s", job_state_name((Boost__JobState__Value)job->stop_target),
                            ceil(seconds(a->grace_due - now_mono(c))), why ? why : "");
    return arena_printf(mem, "to %s, ending attempt %d: %s", job_state_name((Boost__JobState__Value)job->stop_target),
                        job->n_attempts, why ? why : "");
}

/* A running job whose node is silent is believed running, and says so. */
static char *running_line(struct core *c, const struct job *job, struct arena *mem)
{
    const struct attempt *a = job_live_attempt(job);
    for (int p = 0; a && p < a->n_parts; p++) {
        const struct node *n = node_find(c, a->parts[p].node);
        if (n && !a->parts[p].gone && (!n->connected || n->liveness != LIVENESS(UP)))
            return arena_printf(mem, "%s; %s unreachable %.0fs, still believed running", node_line(job, mem), n->name,
                                seconds(now_mono(c) - n->last_seen));
    }
    if (job->reason_text && *job->reason_text)
        return arena_printf(mem, "%s; %s", node_line(job, mem), first_line(mem, job->reason_text));
    const char *slow = pace_line(job, mem);
    return slow ? arena_printf(mem, "%s; %s", node_line(job, mem), slow) : node_line(job, mem);
}

static char *completed_line(const struct job *job, struct arena *mem)
{
    char result[64] = "";
    if (!isnan(job->eval_loss))
        snprintf(result, sizeof result, ", eval loss %.4f", job->eval_loss);
    else if (!isnan(job->loss))
        snprintf(result, sizeof result, ", loss %.4f", job->loss);
    return arena_printf(mem, "%d attempt%s%s", job->n_attempts, job->n_attempts == 1 ? "" : "s", result);
}

static char *info_line(struct core *c, const struct job *job, struct arena *mem, Boost__Reason__Value *reason)
{
    if (job_shown_state(job) != job->state) {
        char *why = first_line(mem, job->reason_text);
        return arena_printf(mem, "to %s as soon as state.db is written%s%s", job_state_name(job->state),
                            why && *why ? ": " : "", why ? why : "");
    }
    switch (job->state) {
    case STATE(QUEUED):
        if (job->starting)
            return preparing_line(c, job, mem, job->starting->nodes[0]->name);
        return pending_line(c, job, mem, "starts next", reason);
    case STATE(RECOVERING):
        return recovering_line(c, job, mem);
    case STATE(STOPPING):
        return stopping_line(c, job, mem);
    case STATE(STARTING):
    case STATE(RUNNING):
        return running_line(c, job, mem);
    case STATE(COMPLETED):
        return completed_line(job, mem);
    default:
        return first_line(mem, job->reason_text);
    }
}

/* ---- messages ---------------------------------------------------------------------------------- */

static double elapsed(struct core *c, const struct job *job)
{
    if (job->n_attempts)
        return job_elapsed_s(c, job);
    int64_t end = job->ended_ns ? job->ended_ns : now_wall(c);
    return end > job->submitted_ns ? seconds(end - job->submitted_ns) : 0;
}

Boost__JobSummary *core_summary(struct core *c, const struct job *job, struct arena *arena)
{
    Boost__JobSummary *s = arena_alloc(arena, sizeof *s);
    if (!s)
        return NULL;
    boost__job_summary__init(s);
    s->has_id = s->has_state = s->has_reason = s->has_steps = s->has_devices = s->has_elapsed_s = true;
    s->has_priority = s->has_submitted_wall_ns = s->has_restarts = true;
    s->id = job->id;
    s->name = arena_strdup(arena, job->name);
    s->user = arena_strdup(arena, job->user);
    s->state = job_shown_state(job);
    s->reason = job->reason;
    s->info = info_line(c, job, arena, &s->reason);
    s->steps = job->resolved->run->steps;
    s->has_step = job->step >= 0;
    s->step = job->step;
    const struct attempt *live = job_live_attempt(job);
    s->has_attempt_step = live && live->to_step > live->from_step;
    s->attempt_step = s->has_attempt_step ? live->to_step : 0;
    s->has_loss = !isnan(job->loss);
    s->loss = job->loss;
    s->has_eval_loss = !isnan(job->eval_loss);
    s->eval_loss = job->eval_loss;
    s->has_tokens_per_s = job->state == STATE(RUNNING) && !isnan(job->tokens_per_s);
    s->tokens_per_s = job->tokens_per_s;
    s->has_mfu = job->state == STATE(RUNNING) && !isnan(job->mfu);
    s->mfu = job->mfu;
    s->has_attempt = job->n_attempts > 0;
    s->attempt = job->n_attempts;
    s->devices = live ? live->world : job_nodes(job) * job_devices_per_node(job);
    s->n_nodes = (size_t)node_names(job, arena, &s->nodes);
    s->elapsed_s = elapsed(c, job);
    s->last_checkpoint_step = checkpoints_durable_step(job);
    s->has_last_checkpoint_step = s->last_checkpoint_step >= 0;
    s->priority = job->priority;
    s->has_array_job = s->has_array_index = job->array_job != 0;
    s->array_job = job->array_job;
    s->array_index = job->array_index;
    s->submitted_wall_ns = job->submitted_ns;
    s->has_ended_wall_ns = job->ended_ns != 0 && s->state == job->state;
    s->ended_wall_ns = job->ended_ns;
    s->restarts = job->n_attempts > 1 ? job->n_attempts - 1 : 0;
    return s->name && s->user && s->info ? s : NULL;
}

static Boost__AttemptInfo *attempt_info(const struct job *job, struct attempt *a, struct arena *mem)
{
    Boost__AttemptInfo *x = arena_alloc(mem, sizeof *x);
    if (!x)
        return NULL;
    boost__attempt_info__init(x);
    x->has_attempt = x->has_from_step = x->has_to_step = x->has_start_wall_ns = x->has_reason = true;
    x->attempt = a->number;
    x->from_step = a->from_step;
    x->to_step = a->to_step;
    x->start_wall_ns = a->start_ns;
    x->has_end_wall_ns = a->end_ns != 0;
    x->end_wall_ns = a->end_ns;
    x->reason = a->reason;
    x->text = arena_strdup(mem, a->text ? a->text : "");
    x->nodes = arena_alloc(mem, (size_t)(a->n_parts + 1) * sizeof *x->nodes);
    if (!x->nodes)
        return NULL;
    x->n_nodes = (size_t)a->n_parts;
    x->has_devices = true;
    x->devices = a->world;
    const Boost__JobSpec *spec = core_attempt_spec(job, a);
    x->has_dp = spec && spec->parallel;
    x->dp = x->has_dp ? spec->parallel->dp : 0;
    x->spares = arena_alloc(mem, (size_t)(a->n_spares + 1) * sizeof *x->spares);
    for (int i = 0; x->spares && i < a->n_spares; i++)
        x->spares[x->n_spares++] = arena_strdup(mem, a->spares[i]);
    for (int p = 0; p < a->n_parts; p++)
        x->nodes[p] = arena_strdup(mem, a->parts[p].node);
    return x;
}

/* It is whole, and what it lacks is in a row: its own, or those of its shards, which come before the manifest. */
static bool waits_for_store(const struct job *job, const struct checkpoint *k)
{
    if (k->durable.state != CKPT(WRITING))
        return false;
    return k->state == CKPT(COMMITTED) ||
           (k->state == CKPT(WRITING) && checkpoint_whole(k) && !k->task && job->unsettled);
}

/* State, pin and copy are those that outlive a crash of now: who has seen them may count on them. */
static Boost__CheckpointInfo *checkpoint_info(struct core *c, const struct job *job, const struct checkpoint *k,
                                              struct arena *mem)
{
    Boost__CheckpointInfo *x = arena_alloc(mem, sizeof *x);
    if (!x)
        return NULL;
    boost__checkpoint_info__init(x);
    x->has_step = x->has_attempt = x->has_state = x->has_shards = x->has_world = x->has_bytes = x->has_wall_ns = true;
    x->step = k->step;
    x->attempt = k->attempt;
    x->state = k->durable.state;
    x->path = arena_strdup(mem, k->path ? k->path : "");
    x->has_pinned = k->durable.pinned;
    x->pinned = k->durable.pinned;
    x->shards = k->n_shards;
    x->world = k->world;
    for (int r = 0; r < k->world; r++)
        x->bytes += k->shards[r].have ? k->shards[r].bytes : 0;
    x->wall_ns = k->durable.changed_ns ? k->durable.changed_ns : k->changed_ns;
    bool waits = waits_for_store(job, k);
    const char *note = waits ? "all of it is there: COMMITTED as soon as state.db is written" : k->note;
    x->note = arena_strdup(mem, note ? note : "");
    x->mirror_note = arena_strdup(mem, k->mirror_note ? k->mirror_note : "");
    /* A copy goes with its checkpoint. */
    x->mirror = x->state == CKPT(DELETED) ? BOOST__MIRROR_STATE__VALUE__NONE : k->durable.mirror;
    x->has_mirror = x->mirror != BOOST__MIRROR_STATE__VALUE__NONE;
    const struct task *copying = task_find(c, k->mirror_task);
    x->has_mirror_done = x->has_mirror_total = copying && copying->bytes_total > 0;
    x->mirror_done = x->has_mirror_done ? copying->bytes_done : 0;
    x->mirror_total = x->has_mirror_total ? copying->bytes_total : 0;
    char *url = x->mirror == BOOST__MIRROR_STATE__VALUE__MIRRORED ? mirror_copy_url(k) : NULL;
    x->mirror_url = url ? arena_strdup(mem, url) : NULL;
    free(url);
    x->has_mirror_retry_s = mirror_wanted(k) && !copying && k->mirror_due > now_mono(c);
    x->mirror_retry_s = x->has_mirror_retry_s ? seconds(k->mirror_due - now_mono(c)) : 0;
    return x->path && x->note && x->mirror_note ? x : NULL;
}

/* The list of a job's checkpoints; false when out of memory. */
static bool checkpoint_list(struct core *c, const struct job *job, struct arena *mem, Boost__CheckpointInfo ***out,
                            size_t *n)
{
    *out = arena_alloc(mem, (size_t)(job->n_checkpoints + 1) * sizeof **out);
    *n = 0;
    for (int i = 0; *out && i < job->n_checkpoints; i++) {
        (*out)[i] = checkpoint_info(c, job, job->checkpoints[i], mem);
        if (!(*out)[i])
            return false;
        (*n)++;
    }
    return *out != NULL;
}

Boost__ShowReply *core_show(struct core *c, const struct job *job, struct arena *arena)
{
    Boost__ShowReply *s = arena_alloc(arena, sizeof *s);
    Boost__Goodput *g = arena_alloc(arena, sizeof *g);
    struct waits w = {.c = c, .mem = arena};
    if (!s || !g)
        return NULL;
    boost__show_reply__init(s);
    boost__goodput__init(g);
    s->summary = core_summary(c, job, arena);
    s->spec = job->spec;
    s->resolved = job->resolved;
    s->attempts = arena_alloc(arena, (size_t)(job->n_attempts + 1) * sizeof *s->attempts);
    if (!s->summary || !s->attempts || !checkpoint_list(c, job, arena, &s->checkpoints, &s->n_checkpoints))
        return NULL;
    for (int i = 0; i < job->n_attempts; i++) {
        s->attempts[i] = attempt_info(job, job->attempts[i], arena);
        if (!s->attempts[i])
            return NULL;
        s->n_attempts++;
    }
    waits_of(&w, job);
    const struct attempt *live = job_live_attempt(job);
    for (int p = 0; live && p < live->n_parts; p++) {
        const struct node *n = node_find(c, live->parts[p].node);
        if (n && !show_devices(n, job, arena, &s->devices, &s->n_devices))
            return NULL;
    }
    if (w.failed || !pace_show(job, arena, s))
        return NULL;
    s->waits = w.list;
    s->n_waits = w.n;
    s->has_checkpoint_every_s = s->has_checkpoint_cost_s = s->has_mean_failure_s = job->ckpt_every_s > 0;
    s->checkpoint_every_s = job->ckpt_every_s;
    s->checkpoint_cost_s = job->ckpt_cost_s;
    s->mean_failure_s = job->mean_failure_s;
    account_totals(c, job, g);
    s->goodput = g;
    bool waits = job->state == STATE(QUEUED) || job->state == STATE(RECOVERING);
    const char *why = job->reason_text ? job->reason_text : "";
    s->reason_text = arena_strdup(arena, !*why && waits ? s->summary->info : why);
    s->has_restarts_used = true;
    s->restarts_used = job->durable.restarts_used;
    return s->reason_text ? s : NULL;
}

Boost__CheckpointsReply *core_checkpoints(struct core *c, const struct job *job, struct arena *arena)
{
    Boost__CheckpointsReply *r = arena_alloc(arena, sizeof *r);
    (void)c;
    if (!r)
        return NULL;
    boost__checkpoints_reply__init(r);
    r->has_job = true;
    r->job = job->id;
    return checkpoint_list(c, job, arena, &r->checkpoints, &r->n_checkpoints) ? r : NULL;
}
