/* The SQLite store behind struct core_store. */
#include "daemon/core_store.h"

static const char *id(void *arg)
{
    return store_id(arg);
}
/* The writer of metrics is the busy one, so it finds a full disk first: both databases are on it. */
static int health(void *arg, struct error *err)
{
    struct error metrics;
    int rc = store_health(arg, err);
    if (rc || store_metrics_health(arg, &metrics) != ERR_NOSPACE)
        return rc;
    if (err)
        *err = metrics;
    return ERR_NOSPACE;
}
static void *begin(void *arg)
{
    return store_begin(arg);
}
static void put_job(void *txn, const struct store_job *row)
{
    store_put_job(txn, row);
}
static void put_attempt(void *txn, const struct store_attempt *row)
{
    store_put_attempt(txn, row);
}
static void put_node(void *txn, const struct store_node *row)
{
    store_put_node(txn, row);
}
static void put_checkpoint(void *txn, const struct store_checkpoint *row)
{
    store_put_checkpoint(txn, row);
}
static void put_shard(void *txn, const struct store_shard *row)
{
    store_put_shard(txn, row);
}
static void add_event(void *txn, const struct store_event *row)
{
    store_add_event(txn, row);
}
static void commit(void *txn, store_done_fn done, void *done_arg)
{
    store_commit(txn, done, done_arg);
}
static void add_metrics(void *arg, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                        store_done_fn done, void *done_arg)
{
    store_add_metrics(arg, job, attempt, rank, rows, n, done, done_arg);
}
static int load_jobs(void *arg, void (*each)(void *, const struct store_job *), void *each_arg, struct error *err)
{
    return store_load_jobs(arg, each, each_arg, err);
}
static int load_attempts(void *arg, void (*each)(void *, const struct store_attempt *), void *each_arg,
                         struct error *err)
{
    return store_load_attempts(arg, each, each_arg, err);
}
static int load_nodes(void *arg, void (*each)(void *, const struct store_node *), void *each_arg, struct error *err)
{
    return store_load_nodes(arg, each, each_arg, err);
}
static int load_checkpoints(void *arg, void (*each)(void *, const struct store_checkpoint *), void *each_arg,
                            struct error *err)
{
    return store_load_checkpoints(arg, each, each_arg, err);
}
static int load_shards(void *arg, void (*each)(void *, const struct store_shard *), void *each_arg, struct error *err)
{
    return store_load_shards(arg, each, each_arg, err);
}
static int load_metric_seqs(void *arg, void (*each)(void *, int64_t, int, int, int64_t), void *each_arg,
                            struct error *err)
{
    return store_load_metric_seqs(arg, each, each_arg, err);
}
static int64_t max_job_id(void *arg)
{
    return store_max_job_id(arg);
}
static int64_t max_event_id(void *arg)
{
    return store_max_event_id(arg);
}

struct core_store core_store_sqlite(struct store *store)
{
    return (struct core_store){
        .arg = store,
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
        .max_event_id = max_event_id,
    };
}
