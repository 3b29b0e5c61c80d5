/* Requests that only look: list, show, checkpoints, nodes, ping, stacks. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/rpc_call.h"
#include "proto/base/clock.h"
#include "proto/version.h"

enum { SHOW_EVENTS = 10, SHOW_BYTES = LIMIT_FRAME - (64 << 10), CHECKPOINTS_PAGE = 2000, NODES_PAGE = 1 << 20 };

/* ---- list -------------------------------------------------------------------- */

static bool same_user(const struct job *job, const char *user)
{
    char number[16];
    snprintf(number, sizeof number, "%u", (unsigned)job->uid);
    return !strcmp(user, number) || (job->user && !strcmp(user, job->user));
}

static bool let_through(const struct job *job, const void *arg)
{
    const Boost__ListRequest *r = arg;
    Boost__JobState__Value state = job_shown_state(job);
    bool ended = job_state_terminal(state);
    if (!job->durable.row) /* nobody but whoever submits it, and waits, has heard of it */
        return false;
    if (r->n_states) {
        bool wanted = false;
        for (size_t i = 0; i < r->n_states; i++)
            wanted |= r->states[i] == state;
        if (!wanted)
            return false;
    } else if (ended && !r->all && !r->has_since_wall_ns) {
        return false;
    }
    if (r->user && *r->user && !same_user(job, r->user))
        return false;
    /* A job that has not ended is of the present, however long ago it was submitted. */
    return !r->has_since_wall_ns || !ended || job->submitted_ns > r->since_wall_ns || job->ended_ns > r->since_wall_ns;
}

static bool add_id(struct rpc_call *call, size_t *room, int64_t id)
{
    if (call->n_ids == *room) {
        size_t n = *room ? *room * 2 : 256;
        int64_t *grown = realloc(call->ids, n * sizeof *grown);
        if (!grown)
            return false;
        call->ids = grown;
        *room = n;
    }
    call->ids[call->n_ids++] = id;
    return true;
}

/* The ids to show, so that pages sent over some time fit together. */
static int collect(struct rpc_call *call, const Boost__ListRequest *r, struct error *err)
{
    struct core *core = call->rpc->core;
    size_t room = 0;
    if (r->n_jobs > RPC_MAX_REFS)
        return error_set(err, ERR_INVALID, "the request names %zu jobs, the limit is %d", r->n_jobs, RPC_MAX_REFS);
    for (size_t i = 0; i < r->n_jobs; i++) {
        struct job *job = NULL;
        int rc = core_find_job(core, r->jobs[i]->text ? r->jobs[i]->text : "", &job, err);
        if (rc)
            return rc;
        if (!add_id(call, &room, job->id))
            return error_set(err, ERR_NOMEM, "boostd has no memory for this list");
    }
    if (r->n_jobs)
        return ERR_OK;
    bool live_only = !r->n_states && !r->all && !r->has_since_wall_ns;
    int n = core_select(core, live_only, let_through, r, &call->ids);
    if (n < 0)
        return error_set(err, ERR_NOMEM, "boostd has no memory for this list");
    call->n_ids = (size_t)n;
    if (r->has_limit && r->limit > 0 && call->n_ids > (size_t)r->limit)
        call->at = call->n_ids - (size_t)r->limit;
    return ERR_OK;
}

/* One page from call->ids[at]; its rows live in an arena of their own. */
static bool fill_page(struct rpc_call *call, Boost__ListReply *list, struct arena *a)
{
    struct core *core = call->rpc->core;
    size_t left = call->n_ids - call->at, bytes = 0;
    list->jobs = arena_alloc(a, (left ? left : 1) * sizeof *list->jobs);
    if (!list->jobs)
        return false;
    while (call->at < call->n_ids && bytes < RPC_PAGE_BYTES) {
        const struct job *job = core_job(core, call->ids[call->at]);
        call->at++;
        if (!job)
            continue;
        Boost__JobSummary *summary = core_summary(core, job, a);
        if (!summary)
            return false;
        bytes += boost__job_summary__get_packed_size(summary) + 8;
        list->jobs[list->n_jobs++] = summary;
    }
    return true;
}

static void send_list(struct rpc_call *call)
{
    for (;;) {
        struct arena a;
        arena_init(&a, 64 << 20);
        Boost__ListReply list = BOOST__LIST_REPLY__INIT;
        Boost__Reply reply = BOOST__REPLY__INIT;
        reply.body_case = BOOST__REPLY__BODY_LIST;
        reply.list = &list;
        bool ok = fill_page(call, &list, &a);
        bool last = call->at == call->n_ids;
        if (ok && last)
            ok = (list.totals = core_totals(call->rpc->core, &a)) != NULL;
        bool go_on = false;
        if (!ok)
            call_fail_nomem(call);
        else if (last)
            call_reply(call, &reply);
        else
            go_on = call_page(call, &reply);
        arena_free(&a);
        if (!go_on)
            return;
        if (session_full(call->session)) {
            call_wait_for_room(call, send_list);
            return;
        }
    }
}

void rpc_list(struct rpc_call *call, const Boost__ListRequest *request)
{
    struct error err;
    if (collect(call, request, &err))
        call_fail(call, &err);
    else
        send_list(call);
}

/* ---- show -------------------------------------------------------------------- */

bool rpc_event(struct arena *a, const struct store_event *row, Boost__Event **out)
{
    Boost__Event *e = arena_alloc(a, sizeof *e);
    if (!e)
        return false;
    boost__event__init(e);
    e->has_id = e->has_wall_ns = 1;
    e->id = row->id;
    e->wall_ns = row->wall_ns;
    e->has_job = row->job != 0;
    e->job = row->job;
    e->has_attempt = row->attempt != 0;
    e->attempt = row->attempt;
    e->node = row->node && *row->node ? arena_strdup(a, row->node) : NULL;
    e->actor = arena_strdup(a, row->actor ? row->actor : "");
    e->kind = arena_strdup(a, row->kind ? row->kind : "");
    e->text = arena_strdup(a, row->text ? row->text : "");
    *out = e;
    return e->actor && e->kind && e->text;
}

static bool add_events(struct arena *a, Boost__ShowReply *show, const struct store_event *rows, size_t n)
{
    show->events = arena_alloc(a, (n ? n : 1) * sizeof *show->events);
    if (!show->events)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (!rpc_event(a, &rows[i], &show->events[show->n_events]))
            return false;
        show->n_events++;
    }
    return true;
}

/* Drops the oldest attempts and checkpoints of a very long history. */
static void fit_frame(Boost__ShowReply *show)
{
    while (boost__show_reply__get_packed_size(show) > SHOW_BYTES && (show->n_attempts > 1 || show->n_checkpoints > 1)) {
        size_t attempts = show->n_attempts / 2, checkpoints = show->n_checkpoints / 2;
        show->attempts += attempts;
        show->n_attempts -= attempts;
        show->checkpoints += checkpoints;
        show->n_checkpoints -= checkpoints;
    }
}

static void show_events(void *arg, const struct store_event *rows, size_t n, int rc, const struct error *err)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    struct rpc *rpc = call->rpc;
    const struct job *job = core_job(rpc->core, call->job);
    Boost__ShowReply *show = job ? core_show(rpc->core, job, &call->arena) : NULL;
    if (!show || !add_events(&call->arena, show, rows, n)) {
        call_fail_nomem(call);
        return;
    }
    fit_frame(show);
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_SHOW;
    reply.show = show;
    call_reply(call, &reply);
}

void rpc_show(struct rpc_call *call, const Boost__ShowRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    if (!job)
        return;
    call->job = job->id;
    store_read_events(call->rpc->store, job->id, 0, SHOW_EVENTS, true, show_events, call);
}

/* ---- checkpoints, nodes, ping ------------------------------------------------ */

static void send_checkpoints(struct rpc_call *call)
{
    const Boost__CheckpointsReply *all = call->checkpoints;
    Boost__CheckpointsReply page = *all;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_CHECKPOINTS;
    reply.checkpoints = &page;
    for (; all->n_checkpoints - call->at > CHECKPOINTS_PAGE; call->at += CHECKPOINTS_PAGE) {
        if (call->session && session_full(call->session)) {
            call_wait_for_room(call, send_checkpoints);
            return;
        }
        page.checkpoints = all->checkpoints + call->at;
        page.n_checkpoints = CHECKPOINTS_PAGE;
        if (!call_page(call, &reply))
            return;
    }
    page.checkpoints = all->checkpoints + call->at;
    page.n_checkpoints = all->n_checkpoints - call->at;
    call_reply(call, &reply);
}

void rpc_checkpoints(struct rpc_call *call, const Boost__CheckpointsRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    if (!job)
        return;
    call->checkpoints = core_checkpoints(call->rpc->core, job, &call->arena);
    if (call->checkpoints)
        send_checkpoints(call);
    else
        call_fail_nomem(call);
}

/* The part of the list behind the cursor that fits into a page (and one node in any case), for the caller to send; the
 * cursor moves to its last one. *last: no more are behind it. */
static void cut_nodes(struct rpc_call *call, Boost__NodesReply *all, bool *last)
{
    const char *only = call->request->nodes->node;
    size_t from = 0, n = 0, bytes = 0;
    /* By name, since nodes may come between two pages. */
    while (from < all->n_nodes && ((call->after_node && strcmp(all->nodes[from]->name, call->after_node) <= 0) ||
                                   (only && strcmp(all->nodes[from]->name, only) != 0)))
        from++;
    for (; from + n < all->n_nodes && !(only && n); n++) {
        bytes += boost__node_info__get_packed_size(all->nodes[from + n]) + 8;
        if (n && bytes > NODES_PAGE)
            break;
    }
    all->nodes += from;
    *last = only || from + n == all->n_nodes;
    all->n_nodes = n;
}

static void send_nodes(struct rpc_call *call)
{
    for (bool last = false; !last;) {
        struct arena a;
        Boost__Reply reply = BOOST__REPLY__INIT;
        arena_init(&a, 96 << 20);
        reply.body_case = BOOST__REPLY__BODY_NODES;
        reply.nodes = core_nodes(call->rpc->core, &a);
        if (reply.nodes)
            cut_nodes(call, reply.nodes, &last);
        char *cursor = reply.nodes && !last ? strdup(reply.nodes->nodes[reply.nodes->n_nodes - 1]->name) : NULL;
        bool go_on = false;
        if (!reply.nodes || (!last && !cursor)) {
            call_fail_nomem(call);
        } else if (last) {
            call_reply(call, &reply);
        } else if ((go_on = call_page(call, &reply))) {
            free(call->after_node);
            call->after_node = cursor;
            cursor = NULL;
        }
        free(cursor);
        arena_free(&a);
        if (!go_on)
            return;
        if (session_full(call->session)) {
            call_wait_for_room(call, send_nodes);
            return;
        }
    }
}

void rpc_nodes(struct rpc_call *call)
{
    send_nodes(call);
}

/* NULL when all is well. */
static char *health_text(struct arena *a, int rc, const struct error *err)
{
    if (!rc)
        return NULL;
    return arena_printf(a, "%s%s%s%s", err->message, *err->hint ? " (" : "", err->hint, *err->hint ? ")" : "");
}

void rpc_usage(struct rpc_call *call, const Boost__UsageRequest *request)
{
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_USAGE;
    reply.usage = core_usage(call->rpc->core, request->user, request->since_wall_ns, &call->arena);
    if (reply.usage)
        call_reply(call, &reply);
    else
        call_fail_nomem(call);
}

void rpc_ping(struct rpc_call *call)
{
    struct rpc *rpc = call->rpc;
    const Boost__Totals *totals = core_totals(rpc->core, &call->arena);
    if (!totals) {
        call_fail_nomem(call);
        return;
    }
    Boost__PingReply ping = BOOST__PING_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_PING;
    reply.ping = &ping;
    ping.version = (char *)boost_version();
    ping.store_id = (char *)store_id(rpc->store);
    ping.has_up_s = ping.has_jobs_live = ping.has_nodes_up = 1;
    ping.up_s = (double)(clock_mono_ns() - rpc->started_mono_ns) / NS_PER_S;
    ping.jobs_live = totals->running + totals->recovering + totals->queued + totals->held;
    ping.nodes_up = totals->nodes_up;
    struct error err;
    ping.state_health = health_text(&call->arena, store_health(rpc->store, &err), &err);
    ping.metrics_health = health_text(&call->arena, store_metrics_health(rpc->store, &err), &err);
    call_reply(call, &reply);
}

/* ---- stacks ------------------------------------------------------------------- */

static bool stacks_page(void *arg, int rc, const struct error *err, const struct core_stacks *stacks)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return false;
    if (rc) {
        call_fail(call, err);
        return false;
    }
    struct attempt *live = job_live_attempt(stacks->job);
    const Boost__JobSpec *spec = live ? core_attempt_spec(stacks->job, live) : NULL;
    const Boost__Parallel *layout = spec ? spec->parallel : stacks->job->resolved->parallel;
    Boost__StacksReply page = BOOST__STACKS_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_STACKS;
    reply.stacks = &page;
    page.has_job = page.has_attempt = page.has_world = page.has_tp = page.has_dp = page.has_pp = 1;
    page.job = stacks->job->id;
    page.attempt = stacks->attempt;
    page.tp = layout ? layout->tp : 1;
    page.dp = layout ? layout->dp : 1;
    page.pp = layout ? layout->pp : 1;
    page.world = page.tp * page.dp * page.pp;
    page.ranks = stacks->ranks;
    page.n_ranks = stacks->n_ranks;
    if (!stacks->last)
        return call_page(call, &reply);
    call_reply(call, &reply);
    return false;
}

void rpc_stacks(struct rpc_call *call, const Boost__StacksRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    if (job)
        core_collect_stacks(call->rpc->core, job, request, &call->user, stacks_page, call);
}
