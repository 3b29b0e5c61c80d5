/* Requests that change something: submit, control, restart, node control. They are answered when the
 * change is durable. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/rpc_call.h"
#include "proto/jobfile.h"
#include "proto/reflect.h"

/* ---- submit ------------------------------------------------------------------ */

static void describe(Boost__SubmitReply *reply, const Boost__JobSpec *resolved)
{
    reply->name = resolved->name;
    reply->has_priority = 1;
    reply->priority = resolved->priority;
    if (resolved->resources) {
        reply->has_nodes = reply->has_devices_per_node = 1;
        reply->nodes = resolved->resources->nodes;
        reply->devices_per_node = resolved->resources->devices_per_node;
    }
}

static void submitted(void *arg, int rc, const struct error *err, int64_t id)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__SubmitReply submit = BOOST__SUBMIT_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_SUBMIT;
    reply.submit = &submit;
    submit.has_job = 1;
    submit.job = id;
    const struct job *job = core_job(call->rpc->core, id);
    if (job && job->resolved)
        describe(&submit, job->resolved);
    call_reply(call, &reply);
}

/* The other tasks of an array, of which the first is what is shown. */
static int dry_run_more(struct rpc_call *call, const Boost__SubmitRequest *request, bool *would_wait,
                        const char **reason, struct error *err)
{
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < request->n_more; i++) {
        Boost__JobSpec *resolved = NULL;
        bool waits = false;
        const char *why = NULL;
        rc = core_dry_run(call->rpc->core, request->more[i], 1 + (int)request->n_more, &call->user, &call->arena,
                          &resolved, &waits, &why, err);
        if (rc)
            rc = error_context(err, "task %d", request->array_index[i + 1]);
        else
            boost__job_spec__free_unpacked(resolved, NULL);
        if (!rc && waits && !*would_wait) {
            *would_wait = true;
            *reason = why;
        }
    }
    return rc;
}

static void dry_run(struct rpc_call *call, const Boost__SubmitRequest *request)
{
    Boost__JobSpec *resolved = NULL;
    bool would_wait = false;
    const char *reason = NULL;
    struct error err;
    int rc = core_dry_run(call->rpc->core, request->spec, 1 + (int)request->n_more, &call->user, &call->arena,
                          &resolved, &would_wait, &reason, &err);
    if (!rc && (rc = dry_run_more(call, request, &would_wait, &reason, &err)))
        boost__job_spec__free_unpacked(resolved, NULL);
    if (rc) {
        call_fail(call, &err);
        return;
    }
    Boost__SubmitReply submit = BOOST__SUBMIT_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_SUBMIT;
    reply.submit = &submit;
    submit.has_would_wait = 1;
    submit.would_wait = would_wait;
    submit.wait_reason = (char *)reason;
    submit.resolved = resolved;
    describe(&submit, resolved);
    call_reply(call, &reply);
    boost__job_spec__free_unpacked(resolved, NULL);
}

/* A field that this boostd does not know could change what the job means. */
static int refuse_unknown(const Boost__JobSpec *spec, struct error *err)
{
    struct buffer paths;
    buffer_init(&paths, 512);
    int rc = ERR_OK;
    if (reflect_unknown_fields(&spec->base, &paths)) {
        error_set(err, ERR_INVALID, "the job has fields that boostd does not know: %s",
                  paths.len ? (const char *)paths.data : "(too many to list)");
        rc = error_hint(err, "boostd may be older than boostctl; --allow-unknown submits it without them");
    }
    buffer_free(&paths);
    return rc;
}

enum { MAX_TASKS = 1000, MAX_INDEX = 999999 };

static int check_spec(const Boost__JobSpec *spec, bool allow_unknown, struct error *err)
{
    int rc = allow_unknown ? ERR_OK : refuse_unknown(spec, err);
    return rc ? rc : jobfile_check_paths(spec, err);
}

static int check_array(const Boost__SubmitRequest *r, struct error *err)
{
    if (r->n_array_index != r->n_more + (r->n_array_index > 0))
        return error_set(err, ERR_INVALID, "the array has %zu tasks and %zu numbers for them", r->n_more + 1,
                         r->n_array_index);
    if (r->n_array_index > MAX_TASKS)
        return error_set(err, ERR_INVALID, "the array has %zu tasks, the limit is %d", r->n_array_index, MAX_TASKS);
    if (r->array_limit < 0)
        return error_set(err, ERR_INVALID, "the array's limit is %d", r->array_limit);
    for (size_t i = 0; i < r->n_array_index; i++)
        if (r->array_index[i] < 0 || r->array_index[i] > MAX_INDEX || (i && r->array_index[i] <= r->array_index[i - 1]))
            return error_set(err, ERR_INVALID, "the numbers of an array ascend from 0 to at most %d", MAX_INDEX);
    return ERR_OK;
}

static void submit_array(struct rpc_call *call, const Boost__SubmitRequest *request)
{
    int n = (int)request->n_array_index;
    Boost__JobSpec **specs = arena_alloc(&call->arena, (size_t)n * sizeof(Boost__JobSpec *));
    if (!specs) {
        call_fail_nomem(call);
        return;
    }
    specs[0] = request->spec;
    for (int i = 1; i < n; i++)
        specs[i] = request->more[i - 1];
    core_submit_array(call->rpc->core, specs, n, request->array_index, request->array_limit, &call->user, request->hold,
                      submitted, call);
}

void rpc_submit(struct rpc_call *call, const Boost__SubmitRequest *request)
{
    struct error err;
    int rc =
        request->spec ? check_array(request, &err) : error_set(&err, ERR_INVALID, "the submit request holds no job");
    if (!rc)
        rc = check_spec(request->spec, request->allow_unknown, &err);
    for (size_t i = 0; !rc && i < request->n_more; i++)
        rc = check_spec(request->more[i], request->allow_unknown, &err);
    if (rc)
        call_fail(call, &err);
    else if (request->dry_run)
        dry_run(call, request);
    else if (request->n_array_index)
        submit_array(call, request);
    else
        core_submit(call->rpc->core, request->spec, &call->user, request->hold, submitted, call);
}

/* ---- control ----------------------------------------------------------------- */

/* One of the jobs of a request; in the call's arena. */
struct control_item {
    struct rpc_call *call;
    Boost__ControlResult *result;
};

static void one_done(struct rpc_call *call)
{
    if (--call->left || call_abandoned(call))
        return;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_CONTROL;
    reply.control = call->results;
    call_reply(call, &reply);
}

static void controlled(void *arg, int rc, const struct error *err, const char *text)
{
    struct control_item *item = arg;
    struct arena *a = &item->call->arena;
    if (rc)
        item->result->failure = call_failure(a, err);
    else
        item->result->text = arena_strdup(a, text ? text : "");
    one_done(item->call);
}

static Boost__ControlReply *make_results(struct arena *a, size_t n, struct control_item **items)
{
    Boost__ControlReply *reply = arena_alloc(a, sizeof *reply);
    Boost__ControlResult **list = arena_alloc(a, n * sizeof(Boost__ControlResult *));
    Boost__ControlResult *results = arena_alloc(a, n * sizeof *results);
    *items = arena_alloc(a, n * sizeof **items);
    if (!reply || !list || !results || !*items)
        return NULL;
    boost__control_reply__init(reply);
    reply->results = list;
    reply->n_results = n;
    for (size_t i = 0; i < n; i++) {
        boost__control_result__init(&results[i]);
        list[i] = &results[i];
    }
    return reply;
}

static int check_refs(size_t n, struct error *err)
{
    if (!n)
        return error_set(err, ERR_INVALID, "the request names no job");
    if (n > RPC_MAX_REFS)
        return error_set(err, ERR_INVALID, "the request names %zu jobs, the limit is %d", n, RPC_MAX_REFS);
    return ERR_OK;
}

static int check_control(const Boost__ControlRequest *request, struct error *err)
{
    if (!request->has_verb)
        return error_set(err, ERR_INVALID, "the control request has no verb");
    if (request->verb < BOOST__CONTROL_REQUEST__VERB__CANCEL ||
        request->verb > BOOST__CONTROL_REQUEST__VERB__CHECKPOINT)
        return error_set(err, ERR_UNSUPPORTED, "boostd does not know the control verb %d", (int)request->verb);
    return check_refs(request->n_jobs, err);
}

/* "17_*": the array's first task; NULL: the reference is of another form, or there is no such array. */
static struct job *array_of(struct core *core, const char *ref)
{
    size_t digits = strspn(ref, "0123456789");
    if (!digits || digits > 18 || strcmp(ref + digits, "_*") != 0)
        return NULL;
    return core_task(core, (int64_t)strtoll(ref, NULL, 10), -1, NULL);
}

/* The next of its tasks that has not ended, from `job` on. */
static struct job *live_task(struct core *core, struct job *job)
{
    while (job && job_state_terminal(job->state))
        job = core_task(core, job->array_job, -1, job);
    return job;
}

struct named {
    const char *ref;
    int64_t job; /* 0: to be looked up */
};

/* What is named, arrays task by task; list NULL: only the count. Before anything is changed. */
static size_t name_all(struct core *core, Boost__JobRef *const *refs, size_t n, struct named *list)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const char *text = refs[i]->text ? refs[i]->text : "";
        struct job *task = live_task(core, array_of(core, text));
        if (!task) {
            if (list)
                list[count] = (struct named){text, 0};
            count++;
        }
        for (; task; task = live_task(core, core_task(core, task->array_job, -1, task))) {
            if (list)
                list[count] = (struct named){text, task->id};
            count++;
        }
    }
    return count;
}

/* Starts the change on every job that is named; the answer goes out when all are done. */
static void each_job(struct rpc_call *call, Boost__JobRef *const *refs, size_t n,
                     void (*start)(struct control_item *item, int64_t job))
{
    struct core *core = call->rpc->core;
    struct error err;
    struct control_item *items;
    size_t all = name_all(core, refs, n, NULL);
    struct named *list = arena_alloc(&call->arena, all * sizeof *list);
    call->results = make_results(&call->arena, all, &items);
    if (!call->results || !list) {
        call_fail_nomem(call);
        return;
    }
    name_all(core, refs, n, list);
    call->left = all + 1; /* one for this loop: answers may come inside it */
    for (size_t i = 0; i < all; i++) {
        Boost__ControlResult *result = call->results->results[i];
        struct job *job = list[i].job ? core_job(core, list[i].job) : NULL;
        items[i] = (struct control_item){.call = call, .result = result};
        result->ref = (char *)(uintptr_t)list[i].ref;
        int rc = job ? ERR_OK : core_find_job(core, list[i].ref, &job, &err);
        if (rc) {
            controlled(&items[i], rc, &err, NULL);
            continue;
        }
        result->has_job = 1;
        result->job = job->id;
        start(&items[i], job->id);
    }
    one_done(call);
}

static void start_control(struct control_item *item, int64_t job)
{
    const Boost__ControlRequest *r = item->call->request->control;
    core_control(item->call->rpc->core, r->verb, job, r->now, &item->call->user, controlled, item);
}

void rpc_control(struct rpc_call *call, const Boost__ControlRequest *request)
{
    struct error err;
    if (check_control(request, &err))
        call_fail(call, &err);
    else
        each_job(call, request->jobs, request->n_jobs, start_control);
}

static void start_update(struct control_item *item, int64_t job)
{
    core_update(item->call->rpc->core, item->call->request->update, job, &item->call->user, controlled, item);
}

void rpc_update(struct rpc_call *call, const Boost__UpdateRequest *request)
{
    struct error err;
    if (check_refs(request->n_jobs, &err))
        call_fail(call, &err);
    else
        each_job(call, request->jobs, request->n_jobs, start_update);
}

/* ---- restart ----------------------------------------------------------------- */

static void restarted(void *arg, int rc, const struct error *err, int64_t job, bool new_job, const char *text)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__RestartReply body = BOOST__RESTART_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_RESTART;
    reply.restart = &body;
    body.has_job = body.has_new_job = true;
    body.job = job;
    body.new_job = new_job;
    body.text = arena_strdup(&call->arena, text);
    call_reply(call, &reply);
}

void rpc_restart(struct rpc_call *call, const Boost__RestartRequest *request)
{
    struct error err;
    int rc = request->spec ? refuse_unknown(request->spec, &err) : ERR_OK;
    if (!rc && request->spec)
        rc = jobfile_check_paths(request->spec, &err);
    if (!rc && request->has_from_step && request->from_step < 0)
        rc = error_set(&err, ERR_INVALID, "a checkpoint's step is 0 or more");
    if (rc) {
        call_fail(call, &err);
        return;
    }
    struct job *job = call_find_job(call, request->job);
    if (job)
        core_restart(call->rpc->core, job->id, request->spec, request->has_from_step ? request->from_step : -1,
                     &call->user, restarted, call);
}

/* ---- checkpoints ------------------------------------------------------------- */

static void checkpoint_done(void *arg, int rc, const struct error *err, const struct core_ckpt *out)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__CheckpointReply body = BOOST__CHECKPOINT_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_CHECKPOINT;
    reply.checkpoint = &body;
    body.has_job = body.has_step = body.has_attempt = out->job != 0;
    body.job = out->job;
    body.step = out->step;
    body.attempt = out->attempt;
    body.path = (char *)(uintptr_t)out->path;
    body.node = (char *)(uintptr_t)out->node;
    body.text = (char *)(uintptr_t)out->text;
    body.faults = out->faults;
    body.n_faults = out->n_faults;
    call_reply(call, &reply);
}

void rpc_checkpoint(struct rpc_call *call, const Boost__CheckpointRequest *request)
{
    struct error err;
    struct job *job = NULL;
    if (!request->has_what ||
        !protobuf_c_enum_descriptor_get_value(&boost__checkpoint_request__what__descriptor, (int)request->what)) {
        error_set(&err, ERR_UNSUPPORTED, "boostd does not know what to do with a checkpoint (%d)", (int)request->what);
        call_fail(call, &err);
        return;
    }
    if (request->job && !(job = call_find_job(call, request->job)))
        return;
    core_checkpoint(call->rpc->core, job, request, &call->user, checkpoint_done, call);
}

/* ---- nodes ------------------------------------------------------------------- */

static void node_controlled(void *arg, int rc, const struct error *err, const char *text)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__NodeControlReply body = BOOST__NODE_CONTROL_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_NODE_CONTROL;
    reply.node_control = &body;
    body.text = arena_strdup(&call->arena, text);
    call_reply(call, &reply);
}

void rpc_node_control(struct rpc_call *call, const Boost__NodeControlRequest *request)
{
    struct error err;
    if (!request->has_verb || !request->node || !*request->node) {
        error_set(&err, ERR_INVALID, "the request names no node or no verb");
        call_fail(call, &err);
        return;
    }
    core_node_control(call->rpc->core, request->verb, request->node, request->reason,
                      request->has_deadline_s ? request->deadline_s : -1, &call->user, node_controlled, call);
}
