/* The store that the controller's core sees (daemon/core_store.h), in memory: it
 * commits when it is told to, in the order of the commits, and can lose what was not
 * durable. Deterministic; one thread. Aborts when memory is out: for tests only. */
#ifndef BOOST_TESTS_MEM_STORE_H
#define BOOST_TESTS_MEM_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core_store.h"
#include "proto/base/arena.h"

/* Rows of one kind; the texts in them belong to the store's arena. */
#define MEM_ROWS(type, name) \
    type *name;              \
    int n_##name, cap_##name

struct mem_metrics { /* the highest seq of a rank */
    int64_t job, seq;
    int attempt, rank;
};

struct mem_txn {
    struct mem_txn *next;
    struct mem_store *store;
    MEM_ROWS(struct store_job, jobs);
    MEM_ROWS(struct store_attempt, attempts);
    MEM_ROWS(struct store_node, nodes);
    MEM_ROWS(struct store_checkpoint, checkpoints);
    MEM_ROWS(struct store_shard, shards);
    MEM_ROWS(struct store_event, events);
    bool is_metrics;
    struct mem_metrics metrics;
    store_done_fn done;
    void *arg;
};

struct mem_store {
    struct arena mem;
    /* What is durable. */
    MEM_ROWS(struct store_job, jobs);
    MEM_ROWS(struct store_attempt, attempts);
    MEM_ROWS(struct store_node, nodes);
    MEM_ROWS(struct store_checkpoint, checkpoints);
    MEM_ROWS(struct store_shard, shards);
    MEM_ROWS(struct store_event, events);
    MEM_ROWS(struct mem_metrics, metrics);
    struct mem_txn *pending, **tail;
    int sick;    /* enum error_code: commits wait, and health says so  */
    bool stuck;  /* commits wait, and nobody knows yet                 */
    int refuses; /* enum error_code: commits fail, and their rows are lost */
    int refused; /* so many did                                        */
    /* May be NULL. An event as it is added, long before it is durable; a transaction as it is queued, as it is about to
     * become durable, and when it is. */
    void (*on_event)(void *arg, const struct store_event *e);
    void (*on_queued)(void *arg);
    void (*on_apply)(void *arg, const struct mem_txn *t);
    void (*on_applied)(void *arg, const struct mem_txn *t);
    void *on_arg;
};

#define MEM_STORE_ID "0badcafe"

struct mem_store *mem_new(void);
void mem_free(struct mem_store *m);
struct core_store mem_api(struct mem_store *m);

/* Makes the oldest transaction durable (or refuses it); `call`: and says so, else its maker never hears of it, as when
 * the controller dies in between. False: nothing waits, or it may not. */
bool mem_commit_one(struct mem_store *m, bool call);
/* All that wait by now. */
bool mem_settle(struct mem_store *m);
/* The controller dies: what was not durable is lost. */
void mem_crash(struct mem_store *m);

/* Durable rows; NULL: none. */
const struct store_job *mem_job(const struct mem_store *m, int64_t job);
const struct store_attempt *mem_attempt(const struct mem_store *m, int64_t job, int attempt);
const struct store_checkpoint *mem_checkpoint(const struct mem_store *m, int64_t job, int64_t step, int attempt);

#endif
