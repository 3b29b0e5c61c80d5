#include "tests/world/mem_store.h"

#include <stdlib.h>
#include <string.h>

/* ---- rows ---- */

static void *more(void *rows, int n, int *cap, size_t size)
{
    if (n < *cap)
        return rows;
    *cap = *cap ? 2 * *cap : 8;
    rows = realloc(rows, (size_t)*cap * size);
    if (!rows)
        abort();
    return rows;
}
#define ADD(of, name)                                                                      \
    ((of)->name = more((of)->name, (of)->n_##name, &(of)->cap_##name, sizeof *(of)->name), \
     &(of)->name[(of)->n_##name++])

static char *text(struct mem_store *m, const char *s)
{
    char *copy = arena_strdup(&m->mem, s ? s : "");
    if (!copy)
        abort();
    return copy;
}

static void *bytes(struct mem_store *m, const void *p, size_t len)
{
    void *copy = arena_alloc(&m->mem, len + 1);
    if (!copy)
        abort();
    memcpy(copy, p, len);
    return copy;
}

/* ---- transactions ---- */

static const char *id(void *arg)
{
    (void)arg;
    return MEM_STORE_ID;
}

static int health(void *arg, struct error *err)
{
    struct mem_store *m = arg;
    if (!m->sick)
        return ERR_OK;
    return error_set(err, (enum error_code)m->sick, "state.db cannot be written: no space left on device");
}

static void *begin(void *arg)
{
    struct mem_txn *t = calloc(1, sizeof *t);
    if (!t)
        abort();
    t->store = arg;
    return t;
}

static void txn_free(struct mem_txn *t)
{
    free(t->jobs);
    free(t->attempts);
    free(t->nodes);
    free(t->checkpoints);
    free(t->shards);
    free(t->events);
    free(t);
}

static void put_job(void *txn, const struct store_job *row)
{
    struct mem_txn *t = txn;
    struct store_job *r = ADD(t, jobs);
    *r = *row;
    r->name = text(t->store, row->name);
    r->user = text(t->store, row->user);
    r->reason_text = text(t->store, row->reason_text);
    r->accounted_boot = text(t->store, row->accounted_boot);
    r->spec = bytes(t->store, row->spec, row->spec_len);
    r->resolved = bytes(t->store, row->resolved, row->resolved_len);
    r->next_spec = row->next_spec ? bytes(t->store, row->next_spec, row->next_spec_len) : NULL;
    r->next_resolved = row->next_resolved ? bytes(t->store, row->next_resolved, row->next_resolved_len) : NULL;
}

static void put_attempt(void *txn, const struct store_attempt *row)
{
    struct mem_txn *t = txn;
    struct store_attempt *r = ADD(t, attempts);
    *r = *row;
    r->placement = text(t->store, row->placement);
    r->text = text(t->store, row->text);
    r->spares = text(t->store, row->spares);
}

static void put_node(void *txn, const struct store_node *row)
{
    struct mem_txn *t = txn;
    struct store_node *r = ADD(t, nodes);
    *r = *row;
    r->name = text(t->store, row->name);
    r->boot_id = text(t->store, row->boot_id);
    r->admin_reason = text(t->store, row->admin_reason);
    r->admin_by = text(t->store, row->admin_by);
    r->data_address = text(t->store, row->data_address);
    r->gpu_name = text(t->store, row->gpu_name);
}

static void put_checkpoint(void *txn, const struct store_checkpoint *row)
{
    struct mem_txn *t = txn;
    struct store_checkpoint *r = ADD(t, checkpoints);
    *r = *row;
    r->path = text(t->store, row->path);
    r->note = text(t->store, row->note);
    r->mirror_url = text(t->store, row->mirror_url);
    r->mirror_note = text(t->store, row->mirror_note);
}

static void put_shard(void *txn, const struct store_shard *row)
{
    struct mem_txn *t = txn;
    struct store_shard *r = ADD(t, shards);
    *r = *row;
    r->file = text(t->store, row->file);
}

static void add_event(void *txn, const struct store_event *row)
{
    struct mem_txn *t = txn;
    struct store_event *r = ADD(t, events);
    *r = *row;
    r->node = text(t->store, row->node);
    r->actor = text(t->store, row->actor);
    r->kind = text(t->store, row->kind);
    r->text = text(t->store, row->text);
    if (t->store->on_event)
        t->store->on_event(t->store->on_arg, r);
}

static void commit(void *txn, store_done_fn done, void *arg)
{
    struct mem_txn *t = txn;
    struct mem_store *m = t->store;
    t->done = done;
    t->arg = arg;
    if (!m->pending)
        m->tail = &m->pending;
    *m->tail = t;
    m->tail = &t->next;
    if (m->on_queued)
        m->on_queued(m->on_arg);
}

static void add_metrics(void *arg, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                        store_done_fn done, void *done_arg)
{
    struct mem_txn *t = begin(arg);
    t->is_metrics = true;
    t->metrics = (struct mem_metrics){.job = job, .attempt = attempt, .rank = rank, .seq = rows[n - 1].seq};
    commit(t, done, done_arg);
}

/* Replaces by key, looked for from the newest, or appends. */
#define APPLY(name, same)                   \
    for (int i = 0; i < t->n_##name; i++) { \
        int at = m->n_##name - 1;           \
        while (at >= 0 && !(same))          \
            at--;                           \
        if (at >= 0)                        \
            m->name[at] = t->name[i];       \
        else                                \
            *ADD(m, name) = t->name[i];     \
    }

static void apply(struct mem_store *m, const struct mem_txn *t)
{
    APPLY(jobs, m->jobs[at].id == t->jobs[i].id)
    APPLY(nodes, strcmp(m->nodes[at].name, t->nodes[i].name) == 0)
    APPLY(attempts, m->attempts[at].job == t->attempts[i].job && m->attempts[at].attempt == t->attempts[i].attempt)
    APPLY(checkpoints, m->checkpoints[at].job == t->checkpoints[i].job &&
                           m->checkpoints[at].step == t->checkpoints[i].step &&
                           m->checkpoints[at].attempt == t->checkpoints[i].attempt)
    APPLY(shards, m->shards[at].job == t->shards[i].job && m->shards[at].step == t->shards[i].step &&
                      m->shards[at].attempt == t->shards[i].attempt && m->shards[at].rank == t->shards[i].rank)
    for (int i = 0; i < t->n_events; i++) {
        if (m->n_events && t->events[i].id <= m->events[m->n_events - 1].id)
            abort(); /* its number is not new */
        *ADD(m, events) = t->events[i];
    }
    if (!t->is_metrics)
        return;
    int at = m->n_metrics - 1;
    while (at >= 0 && !(m->metrics[at].job == t->metrics.job && m->metrics[at].attempt == t->metrics.attempt &&
                        m->metrics[at].rank == t->metrics.rank))
        at--;
    struct mem_metrics *row = at >= 0 ? &m->metrics[at] : ADD(m, metrics);
    if (at < 0 || t->metrics.seq > row->seq)
        *row = t->metrics;
}

static void finish(struct mem_store *m, struct mem_txn *t, bool call)
{
    struct error err;
    error_clear(&err);
    int rc = m->refuses;
    if (rc) {
        error_set(&err, (enum error_code)rc, "state.db is damaged");
        m->refused++;
    } else {
        if (m->on_apply)
            m->on_apply(m->on_arg, t);
        apply(m, t);
        if (m->on_applied)
            m->on_applied(m->on_arg, t);
    }
    if (call)
        t->done(t->arg, rc, &err);
    txn_free(t);
}

bool mem_commit_one(struct mem_store *m, bool call)
{
    struct mem_txn *t = m->pending;
    if (m->sick || m->stuck || !t)
        return false;
    m->pending = t->next;
    finish(m, t, call);
    return true;
}

bool mem_settle(struct mem_store *m)
{
    if (m->sick || m->stuck || !m->pending)
        return false;
    struct mem_txn *t = m->pending;
    m->pending = NULL;
    while (t) {
        struct mem_txn *next = t->next;
        finish(m, t, true);
        t = next;
    }
    return true;
}

void mem_crash(struct mem_store *m)
{
    while (m->pending) {
        struct mem_txn *t = m->pending;
        m->pending = t->next;
        txn_free(t);
    }
}

/* ---- loading ---- */

#define LOAD(name, type)                                                                                     \
    static int load_##name(void *arg, void (*each)(void *, const struct type *), void *x, struct error *err) \
    {                                                                                                        \
        struct mem_store *m = arg;                                                                           \
        (void)err;                                                                                           \
        for (int i = 0; i < m->n_##name; i++) /* of a job they came in order */                              \
            each(x, &m->name[i]);                                                                            \
        return ERR_OK;                                                                                       \
    }
LOAD(jobs, store_job)
LOAD(attempts, store_attempt)
LOAD(nodes, store_node)
LOAD(checkpoints, store_checkpoint)
LOAD(shards, store_shard)

static int load_metric_seqs(void *arg, void (*each)(void *, int64_t, int, int, int64_t), void *x, struct error *err)
{
    struct mem_store *m = arg;
    (void)err;
    for (int i = 0; i < m->n_metrics; i++)
        each(x, m->metrics[i].job, m->metrics[i].attempt, m->metrics[i].rank, m->metrics[i].seq);
    return ERR_OK;
}

static int64_t max_job_id(void *arg)
{
    struct mem_store *m = arg;
    return m->n_jobs ? m->jobs[m->n_jobs - 1].id : 0;
}

static int64_t max_event_id(void *arg)
{
    struct mem_store *m = arg;
    return m->n_events ? m->events[m->n_events - 1].id : 0;
}

/* ---- making, ending, looking ---- */

struct mem_store *mem_new(void)
{
    struct mem_store *m = calloc(1, sizeof *m);
    if (!m)
        abort();
    arena_init(&m->mem, (size_t)1 << 30);
    return m;
}

void mem_free(struct mem_store *m)
{
    mem_crash(m);
    free(m->jobs);
    free(m->attempts);
    free(m->nodes);
    free(m->checkpoints);
    free(m->shards);
    free(m->events);
    free(m->metrics);
    arena_free(&m->mem);
    free(m);
}

struct core_store mem_api(struct mem_store *m)
{
    return (struct core_store){.arg = m,
                               .id = id,
                               .health = health,
                               .begin = begin,
                               .put_job = put_job,
                               .put_attempt = put_attempt,
                               .put_node = put_node,
                               .put_checkpoint = put_checkpoint,
                               .put_shard = put_shard,
                               .add_event = add_event,
                               .commit = commit,
                               .add_metrics = add_metrics,
                               .load_jobs = load_jobs,
                               .load_attempts = load_attempts,
                               .load_nodes = load_nodes,
                               .load_checkpoints = load_checkpoints,
                               .load_shards = load_shards,
                               .load_metric_seqs = load_metric_seqs,
                               .max_job_id = max_job_id,
                               .max_event_id = max_event_id};
}

const struct store_job *mem_job(const struct mem_store *m, int64_t job)
{
    for (int i = 0; i < m->n_jobs; i++)
        if (m->jobs[i].id == job)
            return &m->jobs[i];
    return NULL;
}

const struct store_attempt *mem_attempt(const struct mem_store *m, int64_t job, int attempt)
{
    for (int i = m->n_attempts - 1; i >= 0; i--)
        if (m->attempts[i].job == job && m->attempts[i].attempt == attempt)
            return &m->attempts[i];
    return NULL;
}

const struct store_checkpoint *mem_checkpoint(const struct mem_store *m, int64_t job, int64_t step, int attempt)
{
    for (int i = m->n_checkpoints - 1; i >= 0; i--)
        if (m->checkpoints[i].job == job && m->checkpoints[i].step == step && m->checkpoints[i].attempt == attempt)
            return &m->checkpoints[i];
    return NULL;
}
