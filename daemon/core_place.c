/* From chosen to started: the check of the checkpoint that the attempt is to start from,
 * the attempt's row, and the messages that start and stop it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"

static int spec_ranks(const Boost__JobSpec *s)
{
    const Boost__Parallel *p = s->parallel;
    return p ? p->tp * p->pp * p->dp : 1;
}

int spec_nodes(const Boost__JobSpec *s)
{
    return s->resources && s->resources->nodes > 0 ? s->resources->nodes : 1;
}

int spec_devices(const Boost__JobSpec *s)
{
    if (s->resources && s->resources->has_devices_per_node)
        return s->resources->devices_per_node;
    return spec_ranks(s) / spec_nodes(s);
}

int job_nodes(const struct job *job)
{
    return spec_nodes(job->resolved);
}

int job_devices_per_node(const struct job *job)
{
    return spec_devices(job->resolved);
}

enum sched_pool spec_pool(const Boost__JobSpec *s)
{
    return s->resources && s->resources->device == BOOST__DEVICE__VALUE__CUDA ? SCHED_GPU : SCHED_CPU;
}

static const char out_of_memory[] = "the controller is out of memory";

/* ---- starting ------------------------------------------------------------------------- */

static void start_next(struct core *c, struct job *job);

/* `soon`: what is being fetched will be wanted again. */
static void start_drop(struct core *c, struct job *job, bool soon)
{
    struct core_start *s = job->starting;
    if (!s)
        return;
    job->starting = NULL;
    task_cancel(c, s->task);
    for (int i = 0; s->fetches && i < s->n_nodes; i++) {
        if (soon)
            task_cancel(c, s->fetches[i]);
        else
            task_stop(c, s->fetches[i]);
    }
    free(s->fetches);
    for (int i = 0; i < s->n_nodes; i++)
        node_release(c, s->nodes[i], job->id, job->n_attempts + 1);
    free(s->nodes);
    free(s);
    job_busy(c, job);
    c->schedule = true;
}

void start_cancel(struct core *c, struct job *job)
{
    start_drop(c, job, false);
}

void start_anew(struct core *c, struct job *job)
{
    job->start_retry_due = 0;
    job->fetch_tries = 0;
    text_set(&job->fetch_trouble, "");
    job_busy(c, job);
}

void start_later_in(struct core *c, struct job *job, const char *why, int64_t ns)
{
    text_set(&job->start_trouble, why);
    start_drop(c, job, true);
    job->start_retry_due = now_mono(c) + ns;
    job_busy(c, job);
    due_at(c, job->start_retry_due);
    progress_changed(c, job);
}

void start_later(struct core *c, struct job *job, const char *why)
{
    start_later_in(c, job, why, CORE_RETRY_NS);
}

char *checkpoint_dir_of(struct core *c, const struct job *job)
{
    const char *dir = job->resolved->checkpoint && job->resolved->checkpoint->dir ? job->resolved->checkpoint->dir : "";
    size_t len = strlen(dir);
    while (len > 1 && dir[len - 1] == '/')
        len--;
    char *out = NULL;
    if (asprintf(&out, "%.*s/%s-%" PRId64, (int)len, dir, core_store_id(c), job->id) < 0)
        return NULL;
    return out;
}

static struct node *spare_of(const struct core_start *s, int i)
{
    return s->nodes[s->n_nodes - s->n_spares + i];
}

/* Rank r of `world` over the nodes in order: consecutive ranks share a node, as the layout expects. */
static bool fill_parts(struct attempt *a, const struct core_start *s, int per_node)
{
    int n = s->n_nodes - s->n_spares;
    a->ranks = calloc((size_t)per_node * (size_t)n, sizeof *a->ranks);
    a->parts = calloc((size_t)n, sizeof *a->parts);
    if (!a->ranks || !a->parts)
        return false;
    a->world = per_node * n;
    for (int p = 0; p < n; p++) {
        struct attempt_part *part = &a->parts[p];
        part->node = strdup(s->nodes[p]->name);
        part->ranks = calloc((size_t)per_node, sizeof *part->ranks);
        a->n_parts++;
        if (!part->node || !part->ranks)
            return false;
        for (int i = 0; i < per_node; i++) {
            int rank = p * per_node + i;
            part->ranks[part->n_ranks++] = rank;
            a->ranks[rank].part = p;
            a->ranks[rank].step = -1;
        }
    }
    return true;
}

/* Those that have ranks are taken by the attempt now; the others are held beside it. */
static void take_nodes(struct core *c, struct job *job, struct attempt *a, const struct core_start *s)
{
    for (int i = 0; i < s->n_nodes - s->n_spares; i++)
        node_holding(s->nodes[i], job->id, a->number)->reserved = false;
    for (int i = 0; i < s->n_spares; i++) {
        struct node *n = spare_of(s, i);
        node_release(c, n, job->id, a->number);
        if (spare_hold(c, job, n) && attempt_add_spare(a, n->name, strlen(n->name)))
            node_release(c, n, job->id, 0);
    }
    elastic_wanted(c, job);
}

/* "; on 3 of 4 nodes, dp 3 of 4; spares n5,n6" */
static void say_nodes(const struct job *job, struct attempt *a, char *out, size_t cap)
{
    char *spares = attempt_spares(a);
    const Boost__JobSpec *spec = core_attempt_spec(job, a);
    size_t used = 0;
    out[0] = '\0';
    if (a->n_parts < job_nodes(job) && spec)
        used = (size_t)snprintf(out, cap, "; on %d of %d nodes, dp %d of %d", a->n_parts, job_nodes(job),
                                spec->parallel->dp, job->resolved->parallel->dp);
    if (spares && used < cap)
        snprintf(out + used, cap - used, "; spare%s %.200s", a->n_spares == 1 ? "" : "s", spares);
    free(spares);
}

static bool any_damaged(const struct job *job)
{
    for (int i = 0; i < job->n_checkpoints; i++)
        if (job->checkpoints[i]->damaged)
            return true;
    return false;
}

/* The checkpoint is good (or there is none): the attempt begins. */
void start_commit(struct core *c, struct job *job)
{
    struct core_start *s = job->starting;
    const struct checkpoint *from = s->candidate;
    struct attempt made = {0};
    /* Whole before the job has it: start_cancel() goes by the number of attempts that there are. */
    double run_s = job->state == STATE(RECOVERING) ? job_elapsed_s(c, job) : job->run_s;
    struct attempt *a = fill_parts(&made, s, job_devices_per_node(job)) ? job_add_attempt(job) : NULL;
    if (!a) {
        attempt_clear_ranks(&made);
        start_later(c, job, out_of_memory);
        return;
    }
    job->run_s = run_s;
    a->parts = made.parts;
    a->n_parts = made.n_parts;
    a->ranks = made.ranks;
    a->world = made.world;
    a->from_step = a->to_step = from ? from->step : init_step(job->resolved);
    a->from_attempt = from ? from->attempt : 0;
    a->replay_until = job->step;
    a->start_ns = now_wall(c);
    a->start_mono = a->progress_mono = now_mono(c);
    a->start_boot = now_boot(c);
    a->rendezvous_due = a->start_mono + c->rendezvous_ns;
    due_at(c, c->parked ? 0 : a->rendezvous_due);
    take_nodes(c, job, a, s);
    if (!job->started_ns)
        job->started_ns = a->start_ns;
    job->starting = NULL;
    free(s->fetches);
    free(s->nodes);
    free(s);
    text_set(&job->start_trouble, "");
    job_reason(job, REASON(NONE), "%s", "");
    mark_attempt(c, job, a);
    job_fire(c, job, EV_PLACED);
    due_at(c, job_time_limit_due(job));
    char *placement = attempt_placement(a);
    char nodes[320];
    say_nodes(job, a, nodes, sizeof nodes);
    if (from)
        add_event(c, job, a->number, NULL, "controller", "started",
                  "attempt %d on %s, from the checkpoint of step %" PRId64 "%s", a->number, placement ? placement : "?",
                  from->step, nodes);
    else if (init_path(job->resolved))
        add_event(c, job, a->number, NULL, "controller", "started", "attempt %d on %s, from %s%s%s", a->number,
                  placement ? placement : "?", init_weights_only(job->resolved) ? "the weights of " : "",
                  init_path(job->resolved), nodes);
    else
        add_event(c, job, a->number, NULL, "controller", "started", "attempt %d on %s, from the initial weights%s%s",
                  a->number, placement ? placement : "?",
                  any_damaged(job) ? ": no committed checkpoint of it verifies" : "", nodes);
    free(placement);
}

/* What a verification says about the files, and not about the way to them. */
static bool is_damage(int rc)
{
    return rc == ERR_CORRUPT || rc == ERR_NOT_FOUND || rc == ERR_INVALID;
}

/* There is no older one to fall back to, and no weights of its own: somebody has to decide. */
static void init_damaged(struct core *c, struct job *job, const struct task *t, const char *why)
{
    start_cancel(c, job);
    job_reason(job, REASON(DataError),
               "checkpoint.init_from does not verify on %s: %.400s; release with: boostctl release %" PRId64,
               t->node->name, why, job->id);
    job_fire(c, job, EV_HOLD);
    attempt_say_end(c, job, job->n_attempts);
}

static void say_fetched(struct core *c, struct job *job, const struct task *t, const Boost__TaskReply *reply)
{
    const struct checkpoint *k = job->starting->candidate;
    if (!k)
        k = init_known(c, job->resolved, job->uid);
    if (k && reply && reply->moved > 0)
        add_event(c, job, job->n_attempts + 1, t->node->name, "controller", "checkpoint-restored",
                  "checkpoint of step %" PRId64 " was fetched from its copy: %.1f MiB, verified", k->step,
                  (double)reply->moved / (1 << 20));
}

static void verified(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct job *job = core_job(c, t->job);
    if (!job || !job->starting || job->starting->task != t->id)
        return;
    job->starting->task = 0;
    if (rc == ERR_OK) {
        say_fetched(c, job, t, reply);
        start_fetch(c, job);
    } else if (is_damage(rc) && !job->starting->candidate) {
        init_damaged(c, job, t, err->message);
    } else if (is_damage(rc)) {
        checkpoint_damaged(c, job, job->starting->candidate, t->node->name, err->message);
        job->starting->candidate = checkpoints_newest(job, job->starting->candidate);
        start_next(c, job);
    } else {
        char why[512];
        snprintf(why, sizeof why, "the checkpoint of step %" PRId64 " cannot be verified yet: %.280s%s%.120s%s",
                 job->starting->candidate ? job->starting->candidate->step : init_step(job->resolved), err->message,
                 *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "");
        start_later(c, job, why);
    }
}

static uint64_t verify_candidate(struct core *c, struct job *job, struct core_start *s)
{
    struct arena mem;
    uint64_t task = 0;
    arena_init(&mem, 64 << 20);
    Boost__VerifyCheckpoint verify = BOOST__VERIFY_CHECKPOINT__INIT;
    Boost__Task body = BOOST__TASK__INIT;
    const struct checkpoint *k = s->candidate ? s->candidate : init_known(c, job->resolved, job->uid);
    bool known = true, copied = k && k->mirror == BOOST__MIRROR_STATE__VALUE__MIRRORED;
    verify.has_step = verify.has_attempt = true;
    if (k) {
        verify.dir = k->path;
        verify.step = k->step;
        verify.attempt = k->attempt;
        known = checkpoint_shard_records(k, &mem, &verify.shards) == ERR_OK;
        verify.n_shards = known ? (size_t)k->world : 0;
        if (copied)
            verify.mirror = k->mirror_url;
    } else { /* its manifest says which shards it has */
        int attempt = 0;
        verify.dir = (char *)(uintptr_t)init_path(job->resolved);
        known = init_parse(verify.dir, &verify.step, &attempt);
        verify.attempt = attempt;
    }
    body.body_case = BOOST__TASK__BODY_VERIFY;
    body.verify = &verify;
    if (known)
        task = task_send(c, s->nodes[0], job, job->uid, job->gid, &body, copied ? CORE_MIRROR_NS : CORE_VERIFY_NS,
                         verified, NULL);
    arena_free(&mem);
    return task;
}

/* Verifies what the attempt is to start from, or begins when that is nothing. */
static void start_next(struct core *c, struct job *job)
{
    struct core_start *s = job->starting;
    if (!s->candidate && !init_is_verified(job->resolved)) {
        start_fetch(c, job);
        return;
    }
    s->task = verify_candidate(c, job, s);
    if (!s->task)
        start_later(c, job, "its node cannot be reached to verify the checkpoint");
    else
        progress_changed(c, job);
}

/* Numbers that the controller gave whose store this one is a copy of. */
static void skip_numbers(struct core *c, struct job *job)
{
    while (job->n_attempts < job->attempt_floor) {
        struct attempt *a = job_add_attempt(job);
        if (!a)
            return; /* start_commit() will not get one either */
        a->start_ns = a->end_ns = now_wall(c);
        a->start_mono = now_mono(c);
        a->start_boot = now_boot(c);
        a->from_step = a->to_step = job->checkpoint_step > 0 ? job->checkpoint_step : 0;
        a->fenced = true;
        a->reason = REASON(NodeLost);
        text_set(&a->text, "begun after the copy was made that this controller was adopted from");
        mark_attempt(c, job, a);
    }
}

void start_begin(struct core *c, struct job *job, struct node **nodes, int n)
{
    spares_release(c, job); /* of the attempt before: those of this one are among `nodes` */
    skip_numbers(c, job);
    struct core_start *s = calloc(1, sizeof *s);
    bool held = s != NULL;
    for (int i = 0; held && i < n; i++) {
        struct holding *h =
            node_hold(nodes[i], job->id, job->n_attempts + 1, spec_pool(job->resolved), job_devices_per_node(job));
        held = h != NULL;
        if (h)
            h->reserved = true;
    }
    if (!s) {
        free(nodes);
        start_later(c, job, out_of_memory);
        return;
    }
    *s = (struct core_start){
        .nodes = nodes, .n_nodes = n, .n_spares = n > job_nodes(job) ? n - job_nodes(job) : 0, .since = now_mono(c)};
    job->starting = s;
    job->start_retry_due = 0;
    job_busy(c, job);
    if (!held) {
        start_later(c, job, out_of_memory);
        return;
    }
    found_search(c, job);
}

void start_searched(struct core *c, struct job *job)
{
    job->starting->candidate = checkpoints_newest(job, NULL);
    shared_prove(c, job);
}

void start_proven(struct core *c, struct job *job)
{
    start_next(c, job);
}

/* ---- messages ---------------------------------------------------------------------------- */

/* Of a job like this: so far its own time over its own failures, with one more a day on each node taken for granted. */
static double mean_failure_s(struct core *c, const struct job *job, const struct attempt *now)
{
    int failures = 0;
    for (int i = 0; i < job->n_attempts; i++) {
        const struct attempt *a = job->attempts[i];
        failures += a->end_ns && a->reason >= REASON(RankExit) && a->reason <= REASON(RendezvousTimeout);
    }
    return (86400.0 / (now->n_parts > 0 ? now->n_parts : 1) + job_elapsed_s(c, job)) / (1 + failures);
}

static bool send_start(struct core *c, struct job *job, struct attempt *a, struct attempt_part *part, struct node *n)
{
    Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
    Boost__StartAttempt body = BOOST__START_ATTEMPT__INIT;
    Boost__CheckpointRef resume = BOOST__CHECKPOINT_REF__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    const struct checkpoint *from = a->from_attempt ? job_checkpoint(job, a->from_step, a->from_attempt) : NULL;
    char *dir = checkpoint_dir_of(c, job);
    char store_id[16];
    snprintf(store_id, sizeof store_id, "%s", core_store_id(c));
    start.has_mean_failure_s = true;
    start.mean_failure_s = mean_failure_s(c, job, a);
    start.has_job = start.has_attempt = start.has_world = start.has_uid = start.has_gid = true;
    start.has_rendezvous_timeout_ms = start.has_threads_per_rank = true;
    start.job = job->id;
    start.attempt = a->number;
    start.spec = (Boost__JobSpec *)(uintptr_t)core_attempt_spec(job, a);
    start.store_id = store_id;
    start.world = a->world;
    start.ranks = part->ranks;
    start.n_ranks = (size_t)part->n_ranks;
    start.checkpoint_dir = dir;
    start.threads_per_rank = job->resolved->resources ? job->resolved->resources->threads_per_rank : 0;
    start.uid = job->uid;
    start.gid = job->gid;
    start.user = job->user;
    start.node = part->node;
    start.rendezvous_timeout_ms = (int32_t)(c->rendezvous_ns / NS_PER_MS);
    if (from) {
        resume.has_step = resume.has_attempt = resume.has_shards = true;
        resume.step = from->step;
        resume.attempt = from->attempt;
        resume.path = from->path;
        resume.shards = from->world;
        start.resume = &resume;
    } else if (init_path(job->resolved)) {
        resume.path = (char *)(uintptr_t)init_path(job->resolved);
        resume.has_weights_only = true;
        resume.weights_only = init_weights_only(job->resolved);
        resume.has_step = !resume.weights_only;
        resume.step = a->from_step;
        start.resume = &resume;
    }
    body.start = &start;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_START;
    m.start = &body;
    bool sent = dir && start.spec && send_to(c, n, &m);
    free(dir);
    return sent;
}

static void send_stop(struct core *c, struct job *job, struct attempt *a, struct node *n)
{
    Boost__StopAttempt stop = BOOST__STOP_ATTEMPT__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    int64_t left = a->grace_due > now_mono(c) ? a->grace_due - now_mono(c) : NS_PER_MS;
    int64_t left_ms = left / NS_PER_MS < INT32_MAX ? left / NS_PER_MS : INT32_MAX;
    stop.has_job = stop.has_attempt = stop.has_how = stop.has_grace_ms = true;
    stop.job = job->id;
    stop.attempt = a->number;
    stop.how = BOOST__STOP_ATTEMPT__HOW__TERM;
    stop.grace_ms = (int32_t)left_ms;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_STOP;
    m.stop = &stop;
    send_to(c, n, &m);
}

void attempt_send(struct core *c, struct job *job, unsigned actions, const char *only_node)
{
    struct attempt *a = job_live_attempt(job);
    if (!a)
        return;
    for (int p = 0; p < a->n_parts; p++) {
        struct attempt_part *part = &a->parts[p];
        struct node *n = node_find(c, part->node);
        if (!n || part->gone || part->lost || (only_node && strcmp(only_node, part->node) != 0))
            continue;
        struct holding *h = node_holding(n, job->id, a->number);
        if (a->kill) {
            if (h && (actions & ACT_KILL))
                holding_kill(c, n, h);
        } else if (job->state == STATE(STOPPING)) {
            if (actions & ACT_STOP_TERM)
                send_stop(c, job, a, n);
        } else if ((actions & ACT_START) && job->state == STATE(STARTING) && a->start_durable && !part->heard) {
            send_start(c, job, a, part, n);
        }
    }
}
