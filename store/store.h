/* The controller's memory: SQLite behind one writer thread.
 *
 * Two files in the state directory: state.db (jobs, attempts, nodes, events,
 * checkpoints, shards; WAL, synchronous=FULL) and metrics.db (WAL, NORMAL).
 * All SQL of the product lives in this folder.
 *
 * Threads: every function is called from one thread, the controller's loop, and
 * none of them waits for a disk but store_open, store_close and the store_load_*
 * family (boot only). Writes and later reads are queued; their callbacks run on
 * the caller's thread from store_dispatch(), when store_fd() is readable.
 *
 * Group commit: the writer takes every transaction that is waiting and commits
 * them in one SQLite transaction; each callback comes after that commit is durable.
 * One that fails (a constraint) fails alone. With ENOSPC or an I/O error the
 * writer keeps the transactions queued in order and retries; store_health() says so.
 * Metrics have a writer thread of their own, so they never delay state.
 * Strings and blobs are copied by the calls; rows handed to callbacks are the
 * store's until the callback returns. A NULL string or blob comes back as NULL, an
 * empty one as empty, a NaN as NaN.
 * Callbacks: each comes exactly once, at the latest from store_close; `err` is never
 * NULL and has code ERR_OK when rc is 0. They may call everything here but store_close.
 * Only when there is no memory even for the request does it come inside the call. */
#ifndef BOOST_STORE_STORE_H
#define BOOST_STORE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

struct store;

/* Takes the lock file first (ERR_BUSY names the holder's pid), makes the directory,
 * runs quick_check (of a metrics.db over 64 MiB on its own thread: store_metrics_health
 * tells what it found) and the numbered migrations. A database of a newer version
 * is ERR_UNSUPPORTED, a damaged or foreign one, or a pair of files that do not belong
 * together, ERR_CORRUPT naming the file and the mend. */
MUST_USE int store_open(const char *state_dir, struct store **out, struct error *err);
/* The same for a boostd that takes the place of one that is gone: opens a copy that store_backup() has made too, which
 * store_open() refuses (ERR_REFUSED), and the epoch goes up. */
MUST_USE int store_adopt(const char *state_dir, struct store **out, struct error *err);
/* Of two boostds with one store id the later has the greater epoch: the high 32 bits count adoptions, the low ones are
 * random, so that two that adopt copies of one age differ. */
uint64_t store_epoch(const struct store *s);
/* Copies both files (metrics.db only where `metrics`), each as it is at one moment, with SQLite's backup interface, to a
 * directory that is made. A crash leaves the last whole copy. Any thread, one at a time, until store_close(); blocks for
 * as long as it takes. ERR_REFUSED: what lies there is no copy of this store, or was adopted. ERR_CANCELLED: see below. */
MUST_USE int store_backup(const struct store *s, const char *dir, bool metrics, struct error *err);
/* One that runs ends soon, none begins any more. */
void store_backup_stop(struct store *s);
/* Drains the writers, calls the callbacks that are due, checkpoints the WAL, releases the
 * lock. A disk that fails is waited for a few seconds; then what waits is answered with
 * its error. */
void store_close(struct store *s);
/* What store_open found and mended, one sentence each ("" = nothing): for the log. */
const char *store_notice(const struct store *s);
const char *store_id(const struct store *s); /* 8 hex digits, made with the database */
int store_fd(const struct store *s);         /* eventfd, readable: call store_dispatch */
void store_dispatch(struct store *s);
/* ERR_OK, or what keeps the writer from committing now (text in *err). Submits are
 * refused while it is not ERR_OK; running jobs go on. */
int store_health(const struct store *s, struct error *err);
/* The same of metrics.db. Refuses nothing: batches wait, and past 64 MiB of them
 * store_add_metrics answers ERR_REFUSED. */
int store_metrics_health(const struct store *s, struct error *err);

/* ---- rows; times are wall-clock ns, 0 = not yet -------------------------- */

struct store_job {
    int64_t id; /* the caller numbers them: store_max_job_id() + 1 */
    const char *name;
    uint32_t uid;
    uint32_t gid;
    const char *user;
    int state;         /* Boost__JobState__Value */
    int stop_target;   /* Boost__JobState__Value while STOPPING */
    int reason;        /* Boost__Reason__Value */
    const char *reason_text;
    const void *spec;  /* JobSpec as submitted, packed */
    size_t spec_len;
    const void *resolved;
    size_t resolved_len;
    int priority;
    int attempt;       /* newest, 0 = none yet */
    int restarts_used; /* application failures, against max_restarts */
    int stuck_attempts; /* in a row without a later checkpoint, against no_progress_limit */
    int backoff_count; /* consecutive restarts, doubles the delay */
    int64_t step;      /* newest known step of any attempt */
    int64_t checkpoint_step; /* newest COMMITTED, -1 = none */
    int64_t submitted_ns, started_ns, ended_ns;
    double run_s; /* run time of the ended attempts, for the time limit */
    /* goodput, seconds, of what is over */
    double productive_s, detection_s, restart_s, replay_s, queue_s;
    double loss, eval_loss; /* newest; NaN = none */
    const void *next_spec;  /* of a restart that is accepted and not begun: JobSpecs, packed; NULL = none */
    size_t next_spec_len;
    const void *next_resolved;
    size_t next_resolved_len;
    int64_t next_step;    /* of its checkpoint, -1 = the newest */
    int64_t array_job;    /* of an array's task: the first task; 0 = of none */
    int array_index, array_limit;
    int64_t accounted_ns; /* wall clock up to which the goodput counts; 0 = not known */
    int64_t accounted_boot_ns;  /* likewise by the clock since boot */
    const char *accounted_boot; /* which boot; NULL or "" = not known */
    double attempt_s;           /* from the start of the newest attempt until then; below 0 = not known */
    double stall_s;       /* goodput: ranks that waited for their checkpoints */
};
struct store_attempt {
    int64_t job;
    int attempt;
    int64_t from_step, to_step;
    const char *placement; /* "node:rank,rank;node:rank" */
    int64_t start_ns, running_ns, end_ns;
    int reason;
    const char *text;
    bool fenced; /* no report of it counts any more */
    int64_t replay_until; /* steps up to this were done before it began; -1 = none */
    const char *spares;   /* "node,node" held beside it; NULL or "" = none */
};
struct store_node {
    const char *name;
    const char *boot_id;
    int admin; /* Boost__NodeAdmin__Value */
    const char *admin_reason;
    const char *admin_by;
    int64_t admin_ns;
    int cpu_slots;
    int64_t memory_mib;
    uint32_t uid;
    const char *data_address;
    int gpus;             /* devices of that kind, shares of one counted each */
    const char *gpu_name; /* "" = none */
    int64_t gpu_mib;      /* memory of the smallest */
    int64_t drain_deadline_ns; /* wall clock when its jobs are queued again; 0 = they may end by themselves */
};
struct store_checkpoint {
    int64_t job;
    int64_t step;
    int attempt;
    int state; /* Boost__CheckpointState__Value */
    const char *path;
    int world;
    int64_t changed_ns;
    const char *note;
    int mirror; /* Boost__MirrorState__Value */
    const char *mirror_url; /* where the copy is, or is to be */
    const char *mirror_note;
    bool pinned; /* retention leaves it */
};
struct store_shard {
    int64_t job;
    int64_t step;
    int attempt;
    int rank;
    const char *file;
    int64_t bytes;
    uint32_t crc32c;
    int64_t write_ms;
};
struct store_event {
    int64_t id; /* given by the caller, ascending: store_max_event_id() + 1 */
    int64_t wall_ns;
    int64_t job; /* 0 = none */
    int attempt; /* 0 = none */
    const char *node;
    const char *actor;
    const char *kind;
    const char *text;
};

/* ---- transactions --------------------------------------------------------- */

struct store_txn;
typedef void (*store_done_fn)(void *arg, int rc, const struct error *err);
/* All puts of one txn are committed together or not at all. put = insert or replace by key.
 * The order of puts within one does not matter, but what a row refers to must exist by its
 * end: the job of an attempt and of a checkpoint, the checkpoint of a shard. An event's
 * id must be new. What breaks this is ERR_INVALID at `done`, and nothing of the txn is kept. */
MUST_USE struct store_txn *store_begin(struct store *s); /* NULL: out of memory */
void store_put_job(struct store_txn *t, const struct store_job *row);
void store_put_attempt(struct store_txn *t, const struct store_attempt *row);
void store_put_node(struct store_txn *t, const struct store_node *row);
void store_put_checkpoint(struct store_txn *t, const struct store_checkpoint *row);
void store_put_shard(struct store_txn *t, const struct store_shard *row);
void store_add_event(struct store_txn *t, const struct store_event *row);
/* Queues it; done may be NULL. Transactions commit in the order of these calls. */
void store_commit(struct store_txn *t, store_done_fn done, void *arg);
/* Drops it instead. */
void store_abort(struct store_txn *t);

/* ---- metrics -------------------------------------------------------------- */

struct store_metric {
    int64_t seq; /* from 1; key (job, attempt, rank, seq): a repeat is ignored */
    int64_t step;
    int64_t wall_ns;
    int n;
    const char *const *names;
    const double *values;
};
/* done comes when the batch is committed. Never delays state transactions. ERR_REFUSED:
 * too much waits already, nothing of it was kept, send it again later (the agent keeps
 * its file until it is acknowledged). One rank's seqs and steps ascend within an attempt.
 * Old steps are thinned: all of the newest 100,000, then 1 in 10 for 1,000,000, then 1 in 100. */
void store_add_metrics(struct store *s, int64_t job, int attempt, int rank, const struct store_metric *rows, int n,
                       store_done_fn done, void *arg);

/* ---- boot: synchronous, in key order -------------------------------------- */

MUST_USE int store_load_jobs(struct store *s, void (*each)(void *arg, const struct store_job *), void *arg,
                             struct error *err);
MUST_USE int store_load_attempts(struct store *s, void (*each)(void *arg, const struct store_attempt *), void *arg,
                                 struct error *err);
MUST_USE int store_load_nodes(struct store *s, void (*each)(void *arg, const struct store_node *), void *arg,
                              struct error *err);
MUST_USE int store_load_checkpoints(struct store *s, void (*each)(void *arg, const struct store_checkpoint *),
                                    void *arg, struct error *err);
MUST_USE int store_load_shards(struct store *s, void (*each)(void *arg, const struct store_shard *), void *arg,
                               struct error *err);
/* Highest id ever put, committed or still queued; 0 = none. Known since store_open, no I/O. */
int64_t store_max_job_id(struct store *s);
int64_t store_max_event_id(struct store *s);
/* Highest seq stored without a gap from 1, for acknowledging after a restart. */
MUST_USE int store_load_metric_seqs(struct store *s,
                                    void (*each)(void *arg, int64_t job, int attempt, int rank, int64_t seq),
                                    void *arg, struct error *err);

/* ---- reads while running: on a reader thread of their own ------------------ */

typedef void (*store_events_fn)(void *arg, const struct store_event *rows, size_t n, int rc, const struct error *err);
/* job 0: of all. Rows with id > after_id, ascending, at most `limit` (1 to 10,000);
 * newest_first gives the last `limit` ones instead, still ascending. A page of very long
 * texts may be shorter than `limit`: the end is an empty page. */
void store_read_events(struct store *s, int64_t job, int64_t after_id, int limit, bool newest_first,
                       store_events_fn done, void *arg);

struct store_metric_row {
    int64_t row; /* cursor, ascending in order of arrival */
    int attempt;
    int64_t step;
    int64_t wall_ns;
    int n;
    const char *const *names;
    const double *values; /* of a thinned row: the means */
    int merged;           /* rows that went into this one; 1 = as reported */
    const double *mins;   /* equal to values where merged is 1 */
    const double *maxs;
};
/* A thinned row keeps the number and the step of the last one it stands for. */
typedef void (*store_metrics_fn)(void *arg, const struct store_metric_row *rows, size_t n, int rc,
                                 const struct error *err);
void store_read_metrics(struct store *s, int64_t job, int rank, int64_t after_row, int limit, store_metrics_fn done,
                        void *arg);

#endif
