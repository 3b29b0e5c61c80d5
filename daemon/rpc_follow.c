/* Requests that may wait for something new: events, metrics, logs, watch. A follow is
 * a chain of them, each from the cursor that the last one gave. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/rpc_call.h"
#include "proto/base/clock.h"

static int within(int32_t v, int32_t low, int32_t high)
{
    return v < low ? low : v > high ? high : v;
}

/* ---- events ------------------------------------------------------------------ */

enum { EVENTS_MAX = 10000 };

static void read_events(struct rpc_call *call);

static void reply_events(struct rpc_call *call, Boost__EventsReply *events)
{
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_EVENTS;
    reply.events = events;
    call_reply(call, &reply);
}

static void events_read(void *arg, const struct store_event *rows, size_t n, int rc, const struct error *err)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__EventsReply events = BOOST__EVENTS_REPLY__INIT;
    if (!n && !call->all_stored && !call_expired(call)) {
        call_park(call, read_events);
        return;
    }
    events.has_job_ended = 1;
    events.job_ended = !n && call->all_stored;
    events.events = arena_alloc(&call->arena, (n ? n : 1) * sizeof *events.events);
    size_t bytes = 0;
    for (size_t i = 0; events.events && i < n && bytes < RPC_PAGE_BYTES; i++) {
        if (!rpc_event(&call->arena, &rows[i], &events.events[i])) {
            events.events = NULL;
            break;
        }
        bytes += boost__event__get_packed_size(events.events[i]) + 8;
        events.n_events++;
    }
    if (events.events)
        reply_events(call, &events);
    else
        call_fail_nomem(call);
}

static void read_events(struct rpc_call *call)
{
    call->seen = rpc_version(call->rpc, call->job);
    call->all_stored = call_job_over(call);
    store_read_events(call->rpc->store, call->job, call->cursor, within(call->request->events->limit, 1, EVENTS_MAX),
                      false, events_read, call);
}

void rpc_events(struct rpc_call *call, const Boost__EventsRequest *request)
{
    if (request->job) {
        const struct job *job = call_find_job(call, request->job);
        if (!job)
            return;
        call->job = job->id;
    }
    call->cursor = request->after_id;
    call_set_wait(call, request->wait_ms);
    read_events(call);
}

/* ---- metrics ----------------------------------------------------------------- */

enum { METRICS_MAX = 100000 };

static void read_metrics(struct rpc_call *call);

static bool wanted(const Boost__MetricsRequest *r, const char *name)
{
    for (size_t i = 0; i < r->n_names; i++) {
        if (r->names[i] && !strcmp(r->names[i], name))
            return true;
    }
    return !r->n_names;
}

static size_t count_wanted(const Boost__MetricsRequest *r, const struct store_metric_row *row)
{
    size_t n = 0;
    for (int i = 0; i < row->n; i++)
        n += wanted(r, row->names[i]);
    return n;
}

static Boost__MetricRow *metric_row(struct arena *a, const Boost__MetricsRequest *r, const struct store_metric_row *row,
                                    size_t n)
{
    Boost__MetricRow *out = arena_alloc(a, sizeof *out);
    Boost__Metric *values = arena_alloc(a, n * sizeof *values);
    Boost__Metric **list = arena_alloc(a, n * sizeof(Boost__Metric *));
    if (!out || !values || !list)
        return NULL;
    boost__metric_row__init(out);
    out->has_row = out->has_attempt = out->has_step = out->has_wall_ns = 1;
    out->row = row->row;
    out->attempt = row->attempt;
    out->step = row->step;
    out->wall_ns = row->wall_ns;
    out->values = list;
    for (int i = 0; i < row->n; i++) {
        if (!wanted(r, row->names[i]))
            continue;
        Boost__Metric *m = &values[out->n_values];
        boost__metric__init(m);
        m->name = arena_strdup(a, row->names[i]);
        m->has_value = 1;
        m->value = row->values[i];
        if (!m->name)
            return NULL;
        list[out->n_values++] = m;
    }
    return out;
}

/* Rows without a wanted value are passed over. False when memory is out. */
static bool fill_metrics(struct rpc_call *call, Boost__MetricsReply *metrics, const struct store_metric_row *rows,
                         size_t n)
{
    const Boost__MetricsRequest *r = call->request->metrics;
    size_t bytes = 0;
    metrics->rows = arena_alloc(&call->arena, (n ? n : 1) * sizeof *metrics->rows);
    if (!metrics->rows)
        return false;
    for (size_t i = 0; i < n && bytes < RPC_PAGE_BYTES; i++) {
        size_t values = r->has_attempt && rows[i].attempt != r->attempt ? 0 : count_wanted(r, &rows[i]);
        if (!values)
            continue;
        Boost__MetricRow *row = metric_row(&call->arena, r, &rows[i], values);
        if (!row)
            return false;
        bytes += boost__metric_row__get_packed_size(row) + 8;
        metrics->rows[metrics->n_rows++] = row;
    }
    return true;
}

/* The attempt that was asked for has been followed by another. */
static bool attempt_over(const struct rpc_call *call)
{
    const Boost__MetricsRequest *r = call->request->metrics;
    const struct job *job = core_job(call->rpc->core, call->job);
    return job && r->has_attempt && r->attempt < job->n_attempts;
}

static void metrics_read(void *arg, const struct store_metric_row *rows, size_t n, int rc, const struct error *err)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__MetricsReply metrics = BOOST__METRICS_REPLY__INIT;
    if (!fill_metrics(call, &metrics, rows, n)) {
        call_fail_nomem(call);
        return;
    }
    if (n && !metrics.n_rows) { /* nothing of these names in this page: the next one */
        call->cursor = rows[n - 1].row;
        read_metrics(call);
        return;
    }
    bool over = call->all_stored || attempt_over(call);
    if (!n && !over && !call_expired(call)) {
        call_park(call, read_metrics);
        return;
    }
    metrics.has_job_ended = 1;
    metrics.job_ended = !n && over;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_METRICS;
    reply.metrics = &metrics;
    call_reply(call, &reply);
}

static void read_from_cursor(struct rpc_call *call)
{
    const Boost__MetricsRequest *r = call->request->metrics;
    store_read_metrics(call->rpc->store, call->job, r->rank, call->cursor, within(r->limit, 1, METRICS_MAX),
                       metrics_read, call);
}

static void metrics_settled(void *arg, int rc, const struct error *err)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    call->all_stored = true;
    read_from_cursor(call);
}

static void read_metrics(struct rpc_call *call)
{
    call->seen = rpc_version(call->rpc, call->job);
    /* The end of a job may be on the disk before its last metrics, which go another way: an empty batch comes
     * back behind them. */
    if (call_job_over(call) && !call->all_stored)
        store_add_metrics(call->rpc->store, call->job, 1, call->request->metrics->rank, NULL, 0, metrics_settled, call);
    else
        read_from_cursor(call);
}

/* Attempts on fewer nodes have fewer ranks. Before the first one nobody knows. */
static bool has_rank(const struct job *job, const Boost__MetricsRequest *r, struct error *err)
{
    int world = 0;
    for (int k = 0; k < job->n_attempts; k++)
        if ((!r->has_attempt || r->attempt == k + 1) && job->attempts[k]->world > world)
            world = job->attempts[k]->world;
    if (r->rank >= 0 && (!world || r->rank < world))
        return true;
    world = world ? world : 1;
    if (r->has_attempt)
        error_set(err, ERR_NOT_FOUND, "attempt %d of job %" PRId64 " has ranks 0 to %d", r->attempt, job->id,
                  world - 1);
    else
        error_set(err, ERR_NOT_FOUND, "job %" PRId64 " has ranks 0 to %d", job->id, world - 1);
    return false;
}

void rpc_metrics(struct rpc_call *call, const Boost__MetricsRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    struct error err;
    if (!job)
        return;
    if (!has_rank(job, request, &err)) {
        call_fail(call, &err);
        return;
    }
    call->job = job->id;
    call->cursor = request->after_row;
    call_set_wait(call, request->wait_ms);
    read_metrics(call);
}

/* ---- logs -------------------------------------------------------------------- */

static void log_read(void *arg, int rc, const struct error *err, const struct core_log *log)
{
    struct rpc_call *call = arg;
    if (call_abandoned(call))
        return;
    if (rc) {
        call_fail(call, err);
        return;
    }
    Boost__LogsReply logs = BOOST__LOGS_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_LOGS;
    reply.logs = &logs;
    logs.has_data = logs.has_next_offset = logs.has_attempt = logs.has_newest_attempt = 1;
    logs.has_finished = logs.has_job_ended = 1;
    logs.data = (ProtobufCBinaryData){.data = (uint8_t *)log->data, .len = log->len};
    logs.next_offset = log->next_offset;
    logs.attempt = log->attempt;
    logs.newest_attempt = log->newest_attempt;
    logs.finished = log->finished;
    logs.note = (char *)log->note;
    logs.job_ended = call_job_over(call) && log->finished && !log->len && log->attempt >= log->newest_attempt;
    call_reply(call, &reply);
}

static int by_number(const void *x, const void *y)
{
    const int32_t *a = x, *b = y;
    return (*a > *b) - (*a < *b);
}

/* Which ranks of the attempt are on the node. */
static void reply_ranks(struct rpc_call *call, const struct job *job, const Boost__LogsRequest *request)
{
    struct error err;
    int number = request->has_attempt ? request->attempt : job->n_attempts;
    const struct attempt *a = job_attempt(job, number);
    const struct attempt_part *part = NULL;
    for (int p = 0; a && p < a->n_parts; p++)
        if (!strcmp(a->parts[p].node, request->node))
            part = &a->parts[p];
    if (!part) {
        if (!a && !request->has_attempt)
            error_set(&err, ERR_NOT_FOUND, "job %" PRId64 " has not started on any node", job->id);
        else if (!a)
            error_set(&err, ERR_NOT_FOUND, "job %" PRId64 " has no attempt %d (the newest is %d)", job->id, number,
                      job->n_attempts);
        else
            error_set(&err, ERR_NOT_FOUND, "no rank of attempt %d of job %" PRId64 " is on node %s", number, job->id,
                      request->node);
        error_hint(&err, "boostctl show %" PRId64 " names the nodes of each attempt", job->id);
        call_fail(call, &err);
        return;
    }
    Boost__LogsReply logs = BOOST__LOGS_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_LOGS;
    reply.logs = &logs;
    logs.has_attempt = logs.has_newest_attempt = 1;
    logs.attempt = number;
    logs.newest_attempt = job->n_attempts;
    logs.ranks = arena_alloc(&call->arena, ((size_t)part->n_ranks + 1) * sizeof *logs.ranks);
    if (!logs.ranks) {
        call_fail_nomem(call);
        return;
    }
    for (int i = 0; i < part->n_ranks; i++)
        logs.ranks[logs.n_ranks++] = part->ranks[i];
    qsort(logs.ranks, logs.n_ranks, sizeof *logs.ranks, by_number);
    call_reply(call, &reply);
}

void rpc_logs(struct rpc_call *call, const Boost__LogsRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    if (!job)
        return;
    call->job = job->id;
    if (request->node) {
        reply_ranks(call, job, request);
        return;
    }
    Boost__LogsRequest bounded = *request;
    bounded.has_wait_ms = bounded.has_max_bytes = 1;
    bounded.wait_ms = within(request->wait_ms, 0, RPC_MAX_WAIT_MS);
    bounded.max_bytes = within(request->max_bytes, 1, RPC_PAGE_BYTES);
    core_read_log(call->rpc->core, job, &bounded, log_read, call);
}

/* ---- watch ------------------------------------------------------------------- */

static void watch(struct rpc_call *call)
{
    const struct job *job = core_job(call->rpc->core, call->job);
    int64_t version = rpc_version(call->rpc, call->job);
    if (version == call->seen && !call_expired(call)) {
        call_park(call, watch);
        return;
    }
    Boost__WatchReply reply_watch = BOOST__WATCH_REPLY__INIT;
    Boost__Reply reply = BOOST__REPLY__INIT;
    reply.body_case = BOOST__REPLY__BODY_WATCH;
    reply.watch = &reply_watch;
    reply_watch.summary = job ? core_summary(call->rpc->core, job, &call->arena) : NULL;
    if (!reply_watch.summary) {
        call_fail_nomem(call);
        return;
    }
    reply_watch.has_version = reply_watch.has_ended = 1;
    reply_watch.version = version;
    reply_watch.ended = call_job_over(call);
    call_reply(call, &reply);
}

void rpc_watch(struct rpc_call *call, const Boost__WatchRequest *request)
{
    const struct job *job = call_find_job(call, request->job);
    if (!job)
        return;
    call->job = job->id;
    call->seen = request->version;
    call_set_wait(call, request->wait_ms);
    watch(call);
}
