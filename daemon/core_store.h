/* The store as the core sees it: the functions of store/store.h that it calls, as a
 * table, so that tests and the simulator can put a deterministic store in memory
 * (with crashes that lose what was not durable) in its place. Contracts are
 * store/store.h's, one for one. */
#ifndef BOOST_DAEMON_CORE_STORE_H
#define BOOST_DAEMON_CORE_STORE_H

#include "store/store.h"

struct core_store {
    void *arg; /* first argument of all */
    const char *(*id)(void *arg);
    int (*health)(void *arg, struct error *err);

    void *(*begin)(void *arg); /* a transaction; NULL: out of memory */
    void (*put_job)(void *txn, const struct store_job *row);
    void (*put_attempt)(void *txn, const struct store_attempt *row);
    void (*put_node)(void *txn, const struct store_node *row);
    void (*put_checkpoint)(void *txn, const struct store_checkpoint *row);
    void (*put_shard)(void *txn, const struct store_shard *row);
    void (*add_event)(void *txn, const struct store_event *row);
    void (*commit)(void *txn, store_done_fn done, void *done_arg);
    void (*add_metrics)(void *arg, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                        store_done_fn done, void *done_arg);

    int (*load_jobs)(void *arg, void (*each)(void *, const struct store_job *), void *each_arg, struct error *err);
    int (*load_attempts)(void *arg, void (*each)(void *, const struct store_attempt *), void *each_arg,
                         struct error *err);
    int (*load_nodes)(void *arg, void (*each)(void *, const struct store_node *), void *each_arg, struct error *err);
    int (*load_checkpoints)(void *arg, void (*each)(void *, const struct store_checkpoint *), void *each_arg,
                            struct error *err);
    int (*load_shards)(void *arg, void (*each)(void *, const struct store_shard *), void *each_arg, struct error *err);
    int (*load_metric_seqs)(void *arg, void (*each)(void *, int64_t job, int attempt, int rank, int64_t seq),
                            void *each_arg, struct error *err);
    int64_t (*max_job_id)(void *arg);
    int64_t (*max_event_id)(void *arg);
};

/* The SQLite store behind that table. */
struct core_store core_store_sqlite(struct store *store);

#endif
