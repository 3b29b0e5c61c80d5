/* Users: the jobs they submit and what they ask of them, and what they were promised. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"
#include "tests/world/spec.h"

static const struct core_user users[] = {{.uid = 1000, .gid = 1000, .name = "ann"},
                                         {.uid = 1001, .gid = 1001, .name = "bob"}};
static const struct core_user root = {.uid = 0, .gid = 0, .name = "root"};

struct sim_job *job_by_id(struct sim *s, int64_t id)
{
    for (int i = 0; i < s->n_jobs; i++)
        if (s->jobs[i].id == id)
            return &s->jobs[i];
    return NULL;
}

static struct user_op *op_new(struct sim *s, int verb)
{
    struct user_op *op = calloc(1, sizeof *op);
    if (!op)
        abort();
    *op = (struct user_op){.next = s->ops, .sim = s, .life = s->life, .verb = verb};
    s->ops = op;
    return op;
}

bool users_wait(const struct sim *s)
{
    for (const struct user_op *op = s->ops; op; op = op->next)
        if (!op->answered && op->life == s->life)
            return true;
    return false;
}

/* ---- submits ---- */

static void submitted(void *arg, int rc, const struct error *err, int64_t id)
{
    struct user_op *op = arg;
    struct sim *s = op->sim;
    op->answered = true;
    if (rc) {
        trace(s, "submit refused: %s", err->message);
        op->refused = true;
        return;
    }
    for (int i = 0; i < op->tasks; i++) {
        struct sim_job *job = job_by_id(s, id + i);
        if (!job)
            violated(s, "acknowledged submits survive", "job %lld is acknowledged, and no row of it is durable",
                     (long long)id + i);
        trace(s, "job %lld is acknowledged", (long long)id + i);
        job->acknowledged = true;
    }
}

static int pool_of(const struct sim_node *n, bool cuda)
{
    return cuda ? n->gpus : n->slots;
}

static void submit(struct sim *s)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *spec = spec_new(&mem);
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    int most = 0, fit = 0, gpus = 0;
    for (int i = 0; i < s->n_nodes; i++)
        gpus += s->nodes[i].gpus > 0;
    bool cuda = gpus && one_in(s, 2);
    for (int i = 0; i < s->n_nodes; i++)
        most = pool_of(&s->nodes[i], cuda) > most ? pool_of(&s->nodes[i], cuda) : most;
    int nodes = one_in(s, 2) ? 1 : (int)between(s, 1, s->n_nodes);
    int per_node = (int)between(s, 1, most);
    for (int i = 0; i < s->n_nodes; i++)
        fit += pool_of(&s->nodes[i], cuda) >= per_node;
    if (nodes > fit)
        nodes = fit;
    spec->resources = &resources;
    resources.has_nodes = resources.has_devices_per_node = true;
    resources.nodes = nodes;
    resources.devices_per_node = per_node;
    resources.has_device = true;
    resources.device = cuda ? BOOST__DEVICE__VALUE__CUDA : BOOST__DEVICE__VALUE__CPU;
    spec->parallel->tp = 1;
    spec->parallel->has_dp = true;
    spec->parallel->dp = nodes * per_node;
    spec->parallel->micro_batch = 1;
    spec->parallel->global_batch = 60 * nodes * per_node; /* that fewer nodes share it evenly */
    if (nodes > 1 && one_in(s, 2)) {
        resources.has_min_nodes = true;
        resources.min_nodes = (int32_t)between(s, 1, nodes - 1);
    }
    if (one_in(s, 4)) {
        resources.has_spares = true;
        resources.spares = (int32_t)between(s, 1, 2);
    }
    spec->run->steps = one_in(s, 5) ? between(s, 60, 250) : between(s, 3, 40);
    spec->checkpoint->every_steps = between(s, 2, 12);
    spec->checkpoint->has_keep = true;
    spec->checkpoint->keep = (int32_t)between(s, 1, 3);
    spec->has_priority = true;
    spec->priority = (int32_t)between(s, 0, 2) * 40;
    spec->restart->has_max_restarts = spec->restart->has_no_progress_limit = true;
    spec->restart->max_restarts = (int32_t)between(s, 0, 6);
    spec->restart->no_progress_limit = (int32_t)between(s, 1, 6);
    if (one_in(s, 8)) {
        spec->has_time_limit_s = true;
        spec->time_limit_s = between(s, 10, 300);
    }
    if (one_in(s, 5)) {
        spec->has_stop_grace_s = true;
        spec->stop_grace_s = between(s, 1, 40);
    }
    resources.has_exclusive = resources.exclusive = one_in(s, 10);
    /* Most of these come to be met; one that never can is held, and released in the end. */
    static const char *const kinds[] = {"after", "afterany", "afterok", "afternotok"};
    char *after[2];
    for (int i = 0; i < 2 && s->n_jobs && one_in(s, 8); i++) {
        after[i] =
            arena_printf(&mem, "%s:%lld", kinds[between(s, 0, 3)], (long long)s->jobs[between(s, 0, s->n_jobs - 1)].id);
        spec->n_after = (size_t)i + 1;
    }
    spec->after = after;
    struct user_op *op = op_new(s, VERB_SUBMIT);
    op->job = ++s->submitted;
    spec->name = arena_printf(&mem, "%d", s->submitted);
    trace(s, "submit: %d x %d, %lld steps", nodes, per_node, (long long)spec->run->steps);
    op->tasks = one_in(s, 6) ? (int)between(s, 2, MAX_TASKS) : 1;
    Boost__JobSpec *all[MAX_TASKS] = {spec, spec, spec};
    static const int32_t index[MAX_TASKS] = {3, 5, 7};
    const struct core_user *user = &users[between(s, 0, 1)];
    bool hold = one_in(s, 10);
    if (op->tasks > 1)
        core_submit_array(s->core, all, op->tasks, index, (int)between(s, 0, 2), user, hold, submitted, op);
    else
        core_submit(s->core, spec, user, hold, submitted, op);
    arena_free(&mem);
    controller_poke(s);
}

static void submits(struct sim *s, struct event *e)
{
    if (s->to_submit <= 0)
        return;
    if (s->core && s->n_jobs < MAX_JOBS - 2 * MAX_TASKS) {
        s->to_submit--;
        submit(s);
    }
    if (s->to_submit > 0)
        at(s, s->now + between(s, 100 * MS, 20 * S), submits, e->what);
}

/* ---- controls ---- */

static void controlled(void *arg, int rc, const struct error *err, const char *text)
{
    struct user_op *op = arg;
    struct sim *s = op->sim;
    struct sim_job *job = job_by_id(s, op->job);
    op->answered = true;
    trace(s, "job %lld: verb %d: %s", (long long)op->job, op->verb, rc ? err->message : text);
    if (rc || !job || op->verb != (int)BOOST__CONTROL_REQUEST__VERB__CANCEL || job->cancel_promised)
        return;
    job->cancel_promised = true;
    job->promised_ns = s->now;
}

bool was_refused(const struct sim *s, const struct sim_job *job)
{
    for (const struct user_op *op = s->ops; op; op = op->next)
        if (op->verb == VERB_SUBMIT && op->job == job->submit_no)
            return op->refused && op->life == s->life;
    return false;
}

static void control(struct sim *s, int64_t id, Boost__ControlRequest__Verb verb, bool now)
{
    struct user_op *op = op_new(s, (int)verb);
    struct sim_job *job = job_by_id(s, id);
    op->job = id;
    if (job && verb == BOOST__CONTROL_REQUEST__VERB__CANCEL)
        job->cancel_asked = true;
    core_control(s->core, verb, id, now, &root, controlled, op);
    controller_poke(s);
}

static void restarted(void *arg, int rc, const struct error *err, int64_t job, bool new_job, const char *text)
{
    (void)job;
    (void)new_job;
    controlled(arg, rc, err, text);
}

/* From its newest checkpoint or an older one, sometimes with changes. */
static void restart(struct sim *s, int64_t id)
{
    struct user_op *op = op_new(s, VERB_RESTART);
    const struct store_job *row = mem_job(s->store, id);
    Boost__JobSpec *spec = NULL;
    int64_t from = -1;
    op->job = id;
    if (one_in(s, 3) && (spec = boost__job_spec__unpack(NULL, row->spec_len, row->spec))) {
        spec->optimizer->lr *= 0.5;
        spec->run->steps += between(s, 0, 5);
    }
    for (int i = s->store->n_checkpoints - 1; i >= 0 && from < 0 && one_in(s, 2); i--)
        if (s->store->checkpoints[i].job == id)
            from = s->store->checkpoints[i].step;
    core_restart(s->core, id, spec, from, &root, restarted, op);
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    controller_poke(s);
}

static void update(struct sim *s, struct sim_job *job)
{
    Boost__UpdateRequest what = BOOST__UPDATE_REQUEST__INIT;
    struct user_op *op = op_new(s, VERB_UPDATE);
    op->job = job->id;
    what.has_priority = true;
    what.priority = (int32_t)between(s, 0, 100);
    what.has_time_limit_s = one_in(s, 6);
    what.time_limit_s = between(s, 0, 1) * between(s, 60, 600);
    job->limited = job->limited || what.time_limit_s;
    core_update(s->core, &what, job->id, &root, controlled, op);
    controller_poke(s);
}

static void node_controlled(void *arg, int rc, const struct error *err, const char *text)
{
    const struct user_op *op = arg;
    controlled(arg, rc, err, text);
    if (rc == ERR_OK && op->close)
        op->sim->nodes[op->node].closed = true;
}

static void node_control(struct sim *s, int i, Boost__NodeControlRequest__Verb verb)
{
    struct user_op *op = op_new(s, VERB_NODE);
    op->node = i;
    op->close = verb != BOOST__NODE_CONTROL_REQUEST__VERB__RESUME;
    for (struct user_op *x = s->ops; x && !op->close; x = x->next)
        if (x->verb == VERB_NODE && x->node == i)
            x->close = false; /* whatever it is answered yet */
    if (!op->close)
        s->nodes[i].closed = false;
    double deadline = one_in(s, 2) ? -1 : (double)between(s, 0, 60);
    core_node_control(s->core, verb, s->nodes[i].name, "somebody looks at it", deadline, &root, node_controlled, op);
    controller_poke(s);
}

static void controls(struct sim *s, struct event *e)
{
    static const Boost__ControlRequest__Verb verbs[] = {
        BOOST__CONTROL_REQUEST__VERB__CANCEL,     BOOST__CONTROL_REQUEST__VERB__HOLD,
        BOOST__CONTROL_REQUEST__VERB__HOLD,       BOOST__CONTROL_REQUEST__VERB__RELEASE,
        BOOST__CONTROL_REQUEST__VERB__RELEASE,    BOOST__CONTROL_REQUEST__VERB__RELEASE,
        BOOST__CONTROL_REQUEST__VERB__CHECKPOINT, BOOST__CONTROL_REQUEST__VERB__CHECKPOINT};
    if (s->healed)
        return;
    at(s, s->now + between(s, S, 2 * s->control_gap), controls, e->what);
    if (!s->core)
        return;
    if (one_in(s, 5)) {
        node_control(s, (int)between(s, 0, s->n_nodes - 1), (Boost__NodeControlRequest__Verb)between(s, 0, 2));
        return;
    }
    struct sim_job *job = s->n_jobs ? &s->jobs[between(s, 0, s->n_jobs - 1)] : NULL;
    if (!job)
        return;
    if (one_in(s, 6) && s->n_jobs < MAX_JOBS - 8)
        restart(s, job->id);
    else if (one_in(s, 8))
        update(s, job);
    else
        control(s, job->id, verbs[between(s, 0, 7)], one_in(s, 3));
}

static void releases(struct sim *s, struct event *e)
{
    for (int i = 0; s->core && i < s->n_jobs; i++) {
        const struct store_job *row = mem_job(s->store, s->jobs[i].id);
        if (!row || row->state != BOOST__JOB_STATE__VALUE__HELD)
            continue;
        /* What another job left for it is damaged: no release can help. */
        bool lost = strstr(row->reason_text, "init_from") != NULL;
        control(s, row->id, lost ? BOOST__CONTROL_REQUEST__VERB__CANCEL : BOOST__CONTROL_REQUEST__VERB__RELEASE, false);
    }
    for (int i = 0; s->core && i < s->store->n_nodes; i++) {
        const struct store_node *row = &s->store->nodes[i]; /* "n1", ... */
        if (row->admin && strcmp(row->admin_by, "controller") != 0)
            node_control(s, (int)strtol(row->name + 1, NULL, 10) - 1, BOOST__NODE_CONTROL_REQUEST__VERB__RESUME);
    }
    at(s, s->now + 10 * S, releases, e->what);
}

void users_release_all(struct sim *s)
{
    at(s, s->now + S, releases, "user releases");
}

void users_begin(struct sim *s)
{
    at(s, between(s, 0, 2 * S), submits, "user submits");
    at(s, between(s, S, s->control_gap), controls, "user asks");
}
