/* rpc.h: the life of a call, and who waits for what. */
#include "daemon/rpc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/rpc_call.h"
#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/reflect.h"

enum { CALL_ARENA = 96 << 20, VERSIONS_GROW = 1024 };

/* ---- lists ------------------------------------------------------------------- */

static void unlink_call(struct rpc_call *call)
{
    struct rpc *rpc = call->rpc;
    if (call->prev)
        call->prev->next = call->next;
    else
        rpc->lists[call->state] = call->next;
    if (call->next)
        call->next->prev = call->prev;
    call->prev = call->next = NULL;
    if (call->state == CALL_PARKED)
        rpc->parked--;
}

static void link_call(struct rpc_call *call, enum call_state state)
{
    struct rpc *rpc = call->rpc;
    call->state = state;
    call->prev = NULL;
    call->next = rpc->lists[state];
    if (call->next)
        call->next->prev = call;
    rpc->lists[state] = call;
    if (state == CALL_PARKED)
        rpc->parked++;
}

static void move(struct rpc_call *call, enum call_state state)
{
    unlink_call(call);
    link_call(call, state);
}

static void free_call(struct rpc_call *call)
{
    unlink_call(call);
    arena_free(&call->arena);
    free(call->ids);
    free(call->after_node);
    free(call);
}

static void end_call(struct rpc_call *call)
{
    struct session *s = call->session;
    free_call(call);
    if (s)
        session_request_end(s);
}

/* ---- answers ----------------------------------------------------------------- */

Boost__Failure *call_failure(struct arena *a, const struct error *err)
{
    Boost__Failure *failure = arena_alloc(a, sizeof *failure);
    if (!failure)
        return NULL;
    boost__failure__init(failure);
    failure->has_code = 1;
    failure->code = (int)(err->code ? err->code : ERR_INTERNAL);
    failure->message = arena_strdup(a, err->message);
    failure->hint = *err->hint ? arena_strdup(a, err->hint) : NULL;
    return failure;
}

static int send_reply(struct rpc_call *call, Boost__Reply *reply, bool more, struct error *err)
{
    reply->has_id = 1;
    reply->id = call->id;
    reply->has_more = more;
    reply->more = more;
    return session_send(call->session, &reply->base, err);
}

void call_fail(struct rpc_call *call, const struct error *err)
{
    if (call->session) {
        Boost__Failure failure = BOOST__FAILURE__INIT;
        Boost__Reply reply = BOOST__REPLY__INIT;
        failure.has_code = 1;
        failure.code = (int)(err->code ? err->code : ERR_INTERNAL);
        failure.message = (char *)err->message;
        failure.hint = *err->hint ? (char *)err->hint : NULL;
        reply.body_case = BOOST__REPLY__BODY_FAILURE;
        reply.failure = &failure;
        struct error ignored; /* the session closes, and with it the call */
        int rc = send_reply(call, &reply, false, &ignored);
        if (rc)
            log_line(LOG_DEBUG, "an answer could not be sent: %s", ignored.message);
    }
    end_call(call);
}

void call_fail_nomem(struct rpc_call *call)
{
    struct error err;
    error_set(&err, ERR_NOMEM, "boostd has no memory for this answer");
    error_hint(&err, "ask for less at once");
    call_fail(call, &err);
}

void call_reply(struct rpc_call *call, Boost__Reply *reply)
{
    struct error err;
    if (call->session && send_reply(call, reply, false, &err) == ERR_INVALID)
        call_fail(call, &err);
    else
        end_call(call);
}

bool call_page(struct rpc_call *call, Boost__Reply *reply)
{
    struct error err;
    if (call->session && send_reply(call, reply, true, &err) == ERR_OK)
        return true;
    if (call->session)
        call_fail(call, &err);
    else
        end_call(call);
    return false;
}

/* ---- waiting ----------------------------------------------------------------- */

bool call_abandoned(struct rpc_call *call)
{
    if (call->session)
        return false;
    free_call(call);
    return true;
}

void call_set_wait(struct rpc_call *call, int32_t wait_ms)
{
    if (wait_ms > RPC_MAX_WAIT_MS)
        wait_ms = RPC_MAX_WAIT_MS;
    call->deadline_ns = wait_ms > 0 ? clock_mono_ns() + wait_ms * NS_PER_MS : 0;
}

bool call_expired(const struct rpc_call *call)
{
    return !call->deadline_ns || clock_mono_ns() >= call->deadline_ns || call->rpc->parked >= RPC_MAX_PARKED;
}

void call_park(struct rpc_call *call, void (*resume)(struct rpc_call *call))
{
    call->resume = resume;
    /* What changed while it looked must not be slept over. */
    move(call, rpc_version(call->rpc, call->job) == call->seen ? CALL_PARKED : CALL_READY);
}

void call_wait_for_room(struct rpc_call *call, void (*resume)(struct rpc_call *call))
{
    call->resume = resume;
    move(call, CALL_ROOM);
}

int64_t rpc_version(const struct rpc *rpc, int64_t job)
{
    if (job > 0 && (size_t)job < rpc->n_job_versions && rpc->job_versions[job])
        return rpc->job_versions[job];
    return job ? rpc->started_ns : rpc->version;
}

void rpc_changed(struct rpc *rpc, int64_t job)
{
    rpc->version++;
    if (job <= 0)
        return;
    if ((size_t)job >= rpc->n_job_versions) {
        size_t n = (size_t)job + VERSIONS_GROW;
        int64_t *grown = realloc(rpc->job_versions, n * sizeof *grown);
        if (!grown)
            return; /* its followers then see the change when their wait is over */
        memset(grown + rpc->n_job_versions, 0, (n - rpc->n_job_versions) * sizeof *grown);
        rpc->job_versions = grown;
        rpc->n_job_versions = n;
    }
    rpc->job_versions[job] = rpc->version;
}

int64_t rpc_settle(struct rpc *rpc, int64_t now_ns)
{
    int64_t next = INT64_MAX;
    bool changed = rpc->settled != rpc->version;
    rpc->settled = rpc->version;
    for (struct rpc_call *call = rpc->lists[CALL_PARKED], *after; call; call = after) {
        after = call->next;
        if (call->deadline_ns <= now_ns || (changed && rpc_version(rpc, call->job) != call->seen))
            move(call, CALL_READY);
        else if (call->deadline_ns < next)
            next = call->deadline_ns;
    }
    struct rpc_call *call;
    while ((call = rpc->lists[CALL_READY])) {
        move(call, CALL_BUSY);
        call->resume(call);
    }
    /* One that parked again just now, or a change that a call made, wants another round. */
    for (call = rpc->lists[CALL_PARKED]; call; call = call->next) {
        if (call->deadline_ns < next)
            next = call->deadline_ns;
    }
    return rpc->settled != rpc->version ? now_ns : next;
}

/* ---- jobs -------------------------------------------------------------------- */

struct job *call_find_job(struct rpc_call *call, const Boost__JobRef *ref)
{
    struct error err;
    struct job *job = NULL;
    int rc = ref && ref->text && *ref->text ? core_find_job(call->rpc->core, ref->text, &job, &err)
                                            : error_set(&err, ERR_INVALID, "the request names no job");
    if (!rc)
        return job;
    call_fail(call, &err);
    return NULL;
}

bool call_job_over(const struct rpc_call *call)
{
    const struct job *job = call->job ? core_job(call->rpc->core, call->job) : NULL;
    return job && job_state_terminal(job_shown_state(job)) && !job->unsettled;
}

/* ---- requests ---------------------------------------------------------------- */

/* What would be acknowledged here and known nowhere else. */
static bool changes(const Boost__Request *r)
{
    switch (r->body_case) {
    case BOOST__REQUEST__BODY_LIST:
    case BOOST__REQUEST__BODY_SHOW:
    case BOOST__REQUEST__BODY_EVENTS:
    case BOOST__REQUEST__BODY_METRICS:
    case BOOST__REQUEST__BODY_LOGS:
    case BOOST__REQUEST__BODY_CHECKPOINTS:
    case BOOST__REQUEST__BODY_NODES:
    case BOOST__REQUEST__BODY_WATCH:
    case BOOST__REQUEST__BODY_USAGE:
    case BOOST__REQUEST__BODY_STACKS:
    case BOOST__REQUEST__BODY_PING:
        return false;
    default:
        return true;
    }
}

static void dispatch(struct rpc_call *call)
{
    const Boost__Request *r = call->request;
    const char *replaced = call->session ? call->session->set->replaced : "";
    if (*replaced && changes(r)) {
        struct error refused;
        error_set(&refused, ERR_REFUSED, "this boostd was replaced: %s", replaced);
        error_hint(&refused, "ask the later one (--host); if there is none, this one has to be started with --adopt");
        call_fail(call, &refused);
        return;
    }
    switch (r->body_case) {
    case BOOST__REQUEST__BODY_SUBMIT:
        rpc_submit(call, r->submit);
        return;
    case BOOST__REQUEST__BODY_LIST:
        rpc_list(call, r->list);
        return;
    case BOOST__REQUEST__BODY_SHOW:
        rpc_show(call, r->show);
        return;
    case BOOST__REQUEST__BODY_EVENTS:
        rpc_events(call, r->events);
        return;
    case BOOST__REQUEST__BODY_METRICS:
        rpc_metrics(call, r->metrics);
        return;
    case BOOST__REQUEST__BODY_LOGS:
        rpc_logs(call, r->logs);
        return;
    case BOOST__REQUEST__BODY_CONTROL:
        rpc_control(call, r->control);
        return;
    case BOOST__REQUEST__BODY_CHECKPOINTS:
        rpc_checkpoints(call, r->checkpoints);
        return;
    case BOOST__REQUEST__BODY_NODES:
        rpc_nodes(call);
        return;
    case BOOST__REQUEST__BODY_WATCH:
        rpc_watch(call, r->watch);
        return;
    case BOOST__REQUEST__BODY_NODE_CONTROL:
        rpc_node_control(call, r->node_control);
        return;
    case BOOST__REQUEST__BODY_RESTART:
        rpc_restart(call, r->restart);
        return;
    case BOOST__REQUEST__BODY_UPDATE:
        rpc_update(call, r->update);
        return;
    case BOOST__REQUEST__BODY_USAGE:
        rpc_usage(call, r->usage);
        return;
    case BOOST__REQUEST__BODY_PING:
        rpc_ping(call);
        return;
    case BOOST__REQUEST__BODY_CHECKPOINT:
        rpc_checkpoint(call, r->checkpoint);
        return;
    case BOOST__REQUEST__BODY_STACKS:
        rpc_stacks(call, r->stacks);
        return;
    case BOOST__REQUEST__BODY__NOT_SET:
    case _BOOST__REQUEST__BODY__CASE_IS_INT_SIZE:
        break;
    }
    struct error err;
    error_set(&err, ERR_UNSUPPORTED, "boostd does not know this kind of request");
    error_hint(&err, "boostctl is newer than boostd: install the same version");
    call_fail(call, &err);
}

static void named(void *arg, int rc)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    call->user.name = users_name(call->rpc->users, call->user.uid);
    if (rc || !call->user.name) {
        struct error err;
        error_set(&err, (enum error_code)(rc ? rc : ERR_INTERNAL), "cannot look up the user with uid %u",
                  (unsigned)call->user.uid);
        call_fail(call, &err);
        return;
    }
    dispatch(call);
}

static void dispatch_or_name(struct rpc_call *call)
{
    const struct session *s = call->session;
    const struct tls_peer *peer = session_peer(s);
    struct users *users = call->rpc->users;
    call->user = (struct core_user){.uid = s->uid,
                                    .gid = s->gid,
                                    .name = users_name(users, s->uid),
                                    .admin = peer && peer->role == TLS_ADMIN};
    if (call->user.name)
        dispatch(call);
    else
        users_lookup(users, s->uid, named, call);
}

/* The certificate's user, on this machine. */
static void found(void *arg, int rc, uid_t uid, gid_t gid)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    struct session *s = call->session;
    if (!rc) {
        s->uid = uid;
        s->gid = gid;
        s->uid_known = true;
        dispatch_or_name(call);
        return;
    }
    struct error err;
    const char *name = session_peer(s)->name;
    if (rc == ERR_NOT_FOUND) {
        error_set(&err, ERR_REFUSED, "your certificate is of user %s, whom the controller's machine does not know",
                  name);
        error_hint(&err, "make the account there (the same uid as on the nodes), or use another user's certificate");
    } else {
        error_set(&err, (enum error_code)rc, "cannot look up user %s of your certificate", name);
    }
    call_fail(call, &err);
}

int rpc_frame(struct rpc *rpc, struct session *s, const uint8_t *payload, size_t len, struct error *err)
{
    struct rpc_call *call = calloc(1, sizeof *call);
    if (!call)
        return error_set(err, ERR_NOMEM, "boostd has no memory for the request");
    arena_init(&call->arena, CALL_ARENA);
    ProtobufCMessage *m = reflect_unpack(&boost__request__descriptor, payload, len, &call->arena, err);
    if (!m) {
        arena_free(&call->arena);
        free(call);
        if (err->code != ERR_NOMEM)
            err->code = ERR_PROTOCOL;
        error_hint(err, "the client is damaged, or is none of BOOST");
        return error_context(err, "request");
    }
    call->rpc = rpc;
    call->session = s;
    call->request = (const Boost__Request *)m;
    call->id = call->request->id;
    link_call(call, CALL_BUSY);
    session_request_begin(s);
    if (s->uid_known)
        dispatch_or_name(call);
    else
        users_find(rpc->users, session_peer(s)->name, found, call);
    return ERR_OK;
}

int rpc_opened(const struct session *s, struct error *err)
{
    const struct tls_peer *peer = session_peer(s);
    if (!peer || peer->role == TLS_USER || peer->role == TLS_ADMIN)
        return ERR_OK;
    if (peer->role == TLS_NOBODY)
        error_set(err, ERR_REFUSED, "your certificate does not say whose it is");
    else
        error_set(err, ERR_REFUSED, "your certificate is of %s %s, not of a user", tls_role_name(peer->role),
                  peer->name);
    return error_hint(err, "use a user's certificate: deploy/make-certs.sh DIR user NAME");
}

void rpc_drained(struct rpc *rpc, struct session *s)
{
    for (struct rpc_call *call = rpc->lists[CALL_ROOM], *after; call; call = after) {
        after = call->next;
        if (call->session == s)
            move(call, CALL_READY);
    }
}

void rpc_closed(struct rpc *rpc, struct session *s)
{
    for (int state = 0; state < CALL_STATES; state++) {
        for (struct rpc_call *call = rpc->lists[state], *after; call; call = after) {
            after = call->next;
            if (call->session != s)
                continue;
            call->session = NULL;
            if (state != CALL_BUSY)
                free_call(call);
        }
    }
}

/* ---- making ------------------------------------------------------------------ */

int rpc_create(struct store *store, struct users *users, struct rpc **out, struct error *err)
{
    struct rpc *rpc = calloc(1, sizeof *rpc);
    if (!rpc)
        return error_set(err, ERR_NOMEM, "no memory for the request table");
    rpc->store = store;
    rpc->users = users;
    rpc->started_ns = clock_wall_ns();
    rpc->started_mono_ns = clock_mono_ns();
    rpc->version = rpc->settled = rpc->started_ns;
    *out = rpc;
    return ERR_OK;
}

void rpc_set_core(struct rpc *rpc, struct core *core)
{
    rpc->core = core;
}

void rpc_destroy(struct rpc *rpc)
{
    if (!rpc)
        return;
    for (int state = 0; state < CALL_STATES; state++) {
        while (rpc->lists[state])
            free_call(rpc->lists[state]);
    }
    free(rpc->job_versions);
    free(rpc);
}
