/* Submitting: validate, resolve, ask an agent whether the files are there, store. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/reflect.h"
#include "worker/plan/plan.h"

/* One job, or the tasks of an array: all are taken, or none. */
struct submit {
    struct submit_task {
        Boost__JobSpec *spec, *resolved;
        struct job *job; /* once it is on its way to the disk */
        int index;       /* in the array */
    } * tasks;
    int n, checked; /* so many have passed the preflight */
    bool array;
    int limit; /* of the array */
    uint32_t uid, gid;
    char *user;
    bool hold;
    core_reply_fn reply;
    void *arg;
    bool replied;
};

static const char submit_again[] = "running jobs go on; submit again when the state directory can be written";

static void submit_free(void *arg)
{
    struct submit *s = arg;
    for (int i = 0; s->tasks && i < s->n; i++) {
        if (s->tasks[i].spec)
            boost__job_spec__free_unpacked(s->tasks[i].spec, NULL);
        if (s->tasks[i].resolved)
            boost__job_spec__free_unpacked(s->tasks[i].resolved, NULL);
    }
    free(s->tasks);
    free(s->user);
    free(s);
}

static void refuse(struct submit *s, const struct error *err)
{
    s->replied = true;
    s->reply(s->arg, (int)err->code, err, 0);
}

/* What is known of the user's GPUs is looked up once: nodes are many, and change seldom. */
static void look_at_gpus(struct core *c, uint32_t uid)
{
    struct core_gpus *g = &c->gpus;
    if (g->known && (!g->own || g->uid == uid))
        return;
    *g = (struct core_gpus){.known = true, .uid = uid};
    for (const struct node *n = c->nodes; n; n = n->next) {
        g->own = g->own || (n->gpus && n->uid != 0);
        if (!n->gpus || (n->uid != 0 && n->uid != uid))
            continue;
        g->any = true;
        if (n->gpu_mib > 0 && (!g->least_mib || n->gpu_mib < g->least_mib))
            g->least_mib = n->gpu_mib;
    }
}

/* Memory of a rank on the first node that would do; unknown while none is UP. Of GPUs the smallest known counts, of
 * whichever node: one that is not UP now may be the one that the job waits for. */
static struct plan_machine machine_of(struct core *c, uint32_t uid)
{
    struct plan_machine m = {0};
    const struct node *n = task_node(c, NULL, uid, SCHED_CPU);
    if (n && n->cpu_slots > 0)
        m.memory_bytes = n->memory_mib * (INT64_C(1) << 20) / n->cpu_slots;
    look_at_gpus(c, uid);
    int64_t least_mib = c->gpus.least_mib;
    m.has_cuda = c->gpus.any;
    if (least_mib)
        m.cuda_bytes = least_mib * (INT64_C(1) << 20) - plan_cuda_reserve();
    if (least_mib && m.cuda_bytes < 1)
        m.cuda_bytes = 1; /* 0 would be unknown */
    return m;
}

/* More threads than cores are slower, and thousands cannot even be started: refused by the largest node known, so
 * that a job is not ended later by whichever it is placed on. */
static int check_threads(struct core *c, const Boost__JobSpec *resolved, struct error *err)
{
    int threads = resolved->resources ? resolved->resources->threads_per_rank : 0;
    const struct node *most = NULL;
    if (threads <= 0)
        return ERR_OK;
    for (const struct node *n = c->nodes; n && (!most || most->cores < threads); n = n->next)
        if (n->cores > 0 && (!most || n->cores > most->cores))
            most = n;
    if (!most || threads <= most->cores)
        return ERR_OK;
    error_set(err, ERR_INVALID, "resources.threads_per_rank = %d: no node has so many cores, %s has most, %d", threads,
              most->name, most->cores);
    return error_hint(err, "use 1 to %d, or 0 to share a node's cores evenly among its ranks", most->cores);
}

/* Fewer replicas may each need more memory: under zero 1 they share the optimizer's state. */
static int check_fewest(const Boost__JobSpec *resolved, const struct plan_machine *machine, struct error *err)
{
    const Boost__Resources *r = resolved->resources;
    Boost__JobSpec *fewest = NULL, *again = NULL;
    if (!r || r->min_nodes >= r->nodes)
        return ERR_OK;
    int rc = plan_on_fewer_nodes(resolved, r->min_nodes, &fewest, err);
    if (!rc)
        rc = plan_resolve(fewest, machine, &again, err);
    if (fewest)
        boost__job_spec__free_unpacked(fewest, NULL);
    if (again)
        boost__job_spec__free_unpacked(again, NULL);
    return rc ? error_context(err, "on resources.min_nodes = %d", r->min_nodes) : ERR_OK;
}

int spec_resolve(struct core *c, const Boost__JobSpec *spec, uint32_t uid, Boost__JobSpec **resolved, struct error *err)
{
    struct plan_machine machine = machine_of(c, uid);
    *resolved = NULL;
    int rc = plan_resolve(spec, &machine, resolved, err); /* which validates */
    if (!rc)
        rc = check_threads(c, *resolved, err);
    if (!rc)
        rc = check_fewest(*resolved, &machine, err);
    if (!rc)
        rc = init_resolve(c, *resolved, err);
    if (rc && *resolved) {
        boost__job_spec__free_unpacked(*resolved, NULL);
        *resolved = NULL;
    }
    return rc;
}

static void not_taken(struct core *c, struct job *job)
{
    if (job_state_terminal(job->state))
        return;
    job_reason(job, REASON(Cancelled), "not taken: the state directory could not be written when it was submitted");
    job_fire(c, job, EV_CANCEL_NOW);
    add_event(c, job, 0, NULL, "controller", "cancelled", "%s", job->reason_text);
}

static void submitted(struct core *c, void *arg, int rc, const struct error *err)
{
    struct submit *s = arg;
    int64_t first = s->tasks[0].job->id;
    for (int i = 0; i < s->n; i++) {
        if (rc)
            core_forget_job(c, s->tasks[i].job);
        else if (s->replied)
            not_taken(c, s->tasks[i].job);
    }
    if (!s->replied)
        s->reply(s->arg, rc, rc ? err : NULL, rc ? 0 : first);
}

/* The store cannot write. What the user is told must be true whenever it can again: the job does not run. */
static void submit_late(struct core *c, void *arg, const struct error *err)
{
    struct error late = *err;
    (void)c;
    error_context(&late, "the job is not taken");
    error_hint(&late, "%s", submit_again);
    refuse(arg, &late);
}

/* A job in the table, of which the store does not know yet. */
static int add_task(struct core *c, struct submit *s, struct submit_task *t, int64_t first, struct error *err)
{
    struct job *job = job_new();
    if (!job)
        return error_set(err, ERR_NOMEM, "out of memory");
    job->id = c->next_job_id;
    text_set(&job->name, t->spec->name);
    text_set(&job->user, s->user);
    text_set(&job->reason_text, "");
    job->uid = s->uid;
    job->gid = s->gid;
    job->spec = t->spec;
    job->resolved = t->resolved;
    t->spec = t->resolved = NULL;
    job->priority = job->resolved->priority;
    if (s->array) {
        job->array_job = first;
        job->array_index = t->index;
        job->array_limit = s->limit;
    }
    job->state = s->hold ? STATE(HELD) : STATE(QUEUED);
    if (s->hold)
        job_reason(job, REASON(Held), "held at submit; release with: boostctl release %" PRId64, job->id);
    job->submitted_ns = now_wall(c);
    if (!job->name || !job->user || core_add_job(c, job)) {
        job_free(job);
        return error_set(err, ERR_NOMEM, "out of memory");
    }
    c->next_job_id++;
    t->job = job;
    return ERR_OK;
}

static void announce(struct core *c, const struct submit *s, struct job *job)
{
    char actor[128], array[64] = "";
    snprintf(actor, sizeof actor, "uid %u (%s)", s->uid, s->user);
    if (s->array)
        snprintf(array, sizeof array, ", task %d of array %" PRId64, job->array_index, job->array_job);
    int nodes = job_nodes(job), devices = job_devices_per_node(job);
    account_state(c, job);
    job_pend(c, job);
    mark_job(c, job);
    add_event(c, job, 0, NULL, actor, "submitted", "%s: %d node%s x %d device%s, priority %d%s%s", job->name, nodes,
              nodes == 1 ? "" : "s", devices, devices == 1 ? "" : "s", job->priority, array, s->hold ? ", held" : "");
}

/* Takes over s. */
static void accept(struct core *c, struct submit *s)
{
    struct error err;
    int rc = c->store.health(c->store.arg, &err);
    if (rc) {
        error_context(&err, "the job is not taken");
        error_hint(&err, "%s", submit_again);
    }
    for (int i = 0; !rc && i < s->n; i++)
        rc = init_still_there(c, s->tasks[i].resolved, &err); /* the preflight took its time */
    int64_t first = c->next_job_id;
    for (int i = 0; !rc && i < s->n; i++)
        rc = add_task(c, s, &s->tasks[i], first, &err);
    if (rc) {
        for (int i = 0; i < s->n && s->tasks[i].job; i++)
            core_forget_job(c, s->tasks[i].job);
        err.code = (enum error_code)rc;
        refuse(s, &err);
        submit_free(s);
        return;
    }
    for (int i = 0; i < s->n; i++)
        announce(c, s, s->tasks[i].job);
    after_durable_or_late(c, submitted, submit_late, s, submit_free);
}

bool preflight_is_definite(int rc)
{
    return rc == ERR_INVALID || rc == ERR_NOT_FOUND || rc == ERR_IO || rc == ERR_NOSPACE || rc == ERR_CORRUPT ||
           rc == ERR_UNSUPPORTED || rc == ERR_REFUSED;
}

static bool send_preflight(struct core *c, struct submit *s);

static void preflighted(struct core *c, struct task *t, int rc, const struct error *err, const Boost__TaskReply *reply)
{
    struct submit *s = t->arg;
    const struct submit_task *one = &s->tasks[s->checked];
    (void)reply;
    t->arg = NULL; /* `accept` or the refusal ends it */
    t->drop = NULL;
    if (!preflight_is_definite(rc)) {
        if (rc)
            core_log_line(c, CORE_LOG_WARN, "preflight of %s on %s: %s: taken unchecked", one->spec->name,
                          t->node->name, err->message);
        s->checked++;
        if (s->checked == s->n || rc || !send_preflight(c, s))
            accept(c, s);
        return;
    }
    struct error refused = *err;
    init_hint_copy(c, one->resolved, s->uid, &refused);
    refused.code = ERR_INVALID;
    if (s->array)
        error_context(&refused, "task %d", one->index);
    refuse(s, &refused);
    submit_free(s);
}

bool preflight_send(struct core *c, Boost__JobSpec *resolved, uint32_t uid, uint32_t gid, task_done_fn done, void *arg,
                    void (*drop)(void *arg))
{
    struct node *n = task_node(c, NULL, uid, spec_pool(resolved));
    Boost__Preflight preflight = BOOST__PREFLIGHT__INIT;
    Boost__Task body = BOOST__TASK__INIT;
    struct task *t = NULL;
    preflight.spec = resolved;
    body.body_case = BOOST__TASK__BODY_PREFLIGHT;
    body.preflight = &preflight;
    if (!n || !task_send(c, n, NULL, uid, gid, &body, CORE_PREFLIGHT_NS, done, &t))
        return false;
    t->arg = arg;
    t->drop = drop;
    return true;
}

static bool send_preflight(struct core *c, struct submit *s)
{
    return preflight_send(c, s->tasks[s->checked].resolved, s->uid, s->gid, preflighted, s, submit_free);
}

/* Resolves one task and sees whether it may be taken. */
static int prepare(struct core *c, struct submit *s, const Boost__JobSpec *spec, struct submit_task *t,
                   struct error *err)
{
    int rc = spec_resolve(c, spec, s->uid, &t->resolved, err);
    if (!rc)
        rc = depend_check(c, spec, err);
    if (!rc)
        rc = limit_check(c, s->uid, s->user, t->resolved, s->n, err);
    if (!rc && !(t->spec = (Boost__JobSpec *)reflect_clone(&spec->base)))
        rc = error_set(err, ERR_NOMEM, "out of memory");
    return rc && s->array ? error_context(err, "task %d", t->index) : rc;
}

void core_submit_array(struct core *c, Boost__JobSpec *const *specs, int n, const int32_t *index, int limit,
                       const struct core_user *user, bool hold, core_reply_fn reply, void *arg)
{
    struct error err;
    struct submit *s = calloc(1, sizeof *s);
    error_clear(&err);
    if (!s) {
        error_set(&err, ERR_NOMEM, "out of memory");
        reply(arg, ERR_NOMEM, &err, 0);
        return;
    }
    *s = (struct submit){.n = n,
                         .array = index != NULL,
                         .limit = limit,
                         .uid = user->uid,
                         .gid = user->gid,
                         .hold = hold,
                         .reply = reply,
                         .arg = arg};
    s->user = strdup(user->name ? user->name : "?");
    s->tasks = calloc((size_t)n, sizeof *s->tasks);
    int rc = s->user && s->tasks ? ERR_OK : error_set(&err, ERR_NOMEM, "out of memory");
    for (int i = 0; !rc && i < n; i++) {
        s->tasks[i].index = index ? index[i] : 0;
        rc = prepare(c, s, specs[i], &s->tasks[i], &err);
    }
    if (!rc && c->store.health(c->store.arg, &err)) {
        rc = (int)err.code;
        error_context(&err, "the job is not taken");
        error_hint(&err, "%s", submit_again);
    }
    if (rc) {
        err.code = (enum error_code)rc;
        refuse(s, &err);
        submit_free(s);
    } else if (hold || !send_preflight(c, s)) {
        accept(c, s);
    }
    change_commit(c);
}

void core_submit(struct core *c, const Boost__JobSpec *spec, const struct core_user *user, bool hold,
                 core_reply_fn reply, void *arg)
{
    Boost__JobSpec *one = (Boost__JobSpec *)(uintptr_t)spec;
    core_submit_array(c, &one, 1, NULL, 0, user, hold, reply, arg);
}

int core_dry_run(struct core *c, const Boost__JobSpec *spec, int jobs, const struct core_user *user,
                 struct arena *arena, Boost__JobSpec **resolved, bool *would_wait, const char **reason,
                 struct error *err)
{
    *resolved = NULL;
    *reason = "";
    *would_wait = false;
    int rc = spec_resolve(c, spec, user->uid, resolved, err);
    if (!rc && ((rc = depend_check(c, spec, err)) ||
                (rc = limit_check(c, user->uid, user->name ? user->name : "?", *resolved, jobs, err)))) {
        boost__job_spec__free_unpacked(*resolved, NULL);
        *resolved = NULL;
    }
    if (!rc && !*resolved)
        rc = error_set(err, ERR_INTERNAL, "the job was not resolved");
    if (rc)
        return rc;
    struct sched_answer answer;
    spec_pending_reason(c, *resolved, user->uid, &answer);
    *would_wait = answer.verdict != SCHED_PLACED;
    const char *text = arena_strdup(arena, answer.text);
    *reason = text ? text : "";
    return ERR_OK;
}
