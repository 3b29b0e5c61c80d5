/* The controller without its sockets: jobs, attempts, nodes, checkpoints, scheduling
 * and every decision between them. Pure in the sense of the house: no libuv, no
 * SQLite, no socket, no clock of its own; time, messages out and randomness come
 * through struct core_ops, durability through struct core_store, so that a
 * simulator can drive it from a seed.
 *
 * Order of every change: the rows that one input changed and its event rows go into
 * one store transaction; when it is durable the actions run. Actions are idempotent
 * and are derived from state again at boot and after every reconnect. The one thing
 * that does not wait for the disk is the kill of an attempt one of whose ranks failed:
 * a restart would derive it again from the same unacknowledged report.
 *
 * One thread, the controller's loop. */
#ifndef BOOST_DAEMON_CORE_H
#define BOOST_DAEMON_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core_store.h"
#include "daemon/job.h"
#include "proto/agent.pb-c.h"
#include "proto/base/arena.h"
#include "proto/base/error.h"
#include "proto/config.pb-c.h"
#include "proto/rpc.pb-c.h"

struct core;

enum core_log_level { CORE_LOG_DEBUG, CORE_LOG_INFO, CORE_LOG_WARN, CORE_LOG_ERROR };

struct core_ops {
    void *arg;
    int64_t (*mono_ns)(void *arg);
    int64_t (*wall_ns)(void *arg);
    /* Since the boot that boot_id names: nobody sets it, and it goes on while this process does not run. NULL: mono_ns
     * is that. With an id what passed between two controllers is told by it, else by the wall clock. */
    int64_t (*boot_ns)(void *arg);
    const char *boot_id; /* NULL or "": not known */
    uint64_t (*random)(void *arg);
    /* Queues a message to an agent; false when it is not connected (the core sends again after it registers). */
    bool (*send)(void *arg, const char *node, const Boost__ControllerMessage *message);
    /* Something a follower may wait for has changed: the job's row, its events (also those of no job, 0) or its
     * metrics. Rows and events are durable by then. May come often (progress); do no more than mark. */
    void (*changed)(void *arg, int64_t job);
    /* One line for the daemon's own log. May be NULL. */
    void (*log)(void *arg, enum core_log_level level, const char *text);
    /* What ranks of attempts that failed printed last (KeptLogs, packed), for when their nodes cannot be reached; NULL:
     * not kept. keep_logs is not waited for; kept_logs calls `done` once, maybe at once, data NULL when there is none. */
    void (*keep_logs)(void *arg, int64_t job, int attempt, const void *packed, size_t len);
    void (*kept_logs)(void *arg, int64_t job, int attempt, void (*done)(void *done_arg, const void *packed, size_t len),
                      void *done_arg);
    uint32_t uid; /* the daemon's own: may do all, like root */
};

/* config, store and ops are copied, what their pointers point at stays the caller's. Loads everything from the store
 * and re-derives timers and actions; every node starts JOINING until it registers, and none is DOWN before
 * restart_grace. */
MUST_USE int core_create(const Boost__BoostdConfig *config, const struct core_store *store, const struct core_ops *ops,
                         struct core **out, struct error *err);
/* Frees memory only; sends and stores nothing. Replies still owed are not given. The store may not call back
 * afterwards: close it first. */
void core_destroy(struct core *c);

/* What should stay small; shown by nothing yet but read by tests and the simulator. */
struct core_stats {
    uint64_t illegal_transitions; /* (state, event) pairs outside the table: bugs */
    uint64_t stale_reports;       /* of fenced or unknown attempts, refused       */
    uint64_t protocol_errors;     /* messages that make no sense                  */
    uint64_t store_failures;      /* transactions the store refused               */
};
const struct core_stats *core_stats(const struct core *c);
const char *core_store_id(const struct core *c);
/* Right after core_create(), when the store was a copy once: what happened since it was made is not known. Before a job
 * starts its checkpoints are looked for, once. `now`, when it has just been adopted: until every known node has
 * registered, or restart_grace_ms is over, nothing is started; numbers of jobs leave a gap, and those of attempts that
 * agents tell of are not given again. */
void core_adopted(struct core *c, bool now);

/* ---- agents ------------------------------------------------------------------ */

/* The answer goes out through ops->send, which must know the node by then: bind the connection to msg->node first
 * and unbind it when this fails. Another instance of an agent whose connection still lives (connected and heard of
 * within suspect_ms) makes it ERR_REFUSED; a bad name or missing field ERR_PROTOCOL. */
MUST_USE int core_agent_register(struct core *c, const Boost__Register *msg, struct error *err);
/* A heartbeat of the registered instance that came another way than its messages do: the node lives, even while it is
 * not connected (for six times node_timeout_ms). */
void core_agent_alive(struct core *c, const char *node, const char *instance);
/* Every other message. A report of a fenced or unknown attempt is counted, answered with FENCE or FORGET, never
 * applied. */
void core_agent_message(struct core *c, const char *node, const Boost__AgentMessage *msg);
/* The connection broke: liveness keeps running on the timers. */
void core_agent_disconnected(struct core *c, const char *node);

/* ---- timers ------------------------------------------------------------------ */

/* Runs whatever is due; returns the monotonic ns of the next due time (INT64_MAX: none). Call it when that time has
 * come and after every input: each call of this header that takes a struct core *c and is not const, and
 * store_dispatch(). Cheap when nothing is due. */
int64_t core_run(struct core *c);

/* ---- users ------------------------------------------------------------------- */

struct core_user {
    uint32_t uid, gid;
    const char *name; /* for display */
    bool admin;       /* may do all, like root */
};
/* `text` is the core's until it returns. */
typedef void (*core_text_reply_fn)(void *arg, int rc, const struct error *err, const char *text);
typedef void (*core_reply_fn)(void *arg, int rc, const struct error *err, int64_t job);
/* Validates (plan_validate), resolves, asks an agent for a preflight unless held or no agent is UP, stores; `reply`
 * is called when the job is durable or refused. Root and the daemon's own uid may do all; other users see all
 * jobs and change only their own. */
void core_submit(struct core *c, const Boost__JobSpec *spec, const struct core_user *user, bool hold,
                 core_reply_fn reply, void *arg);
/* The same of an array: n tasks with these numbers, all taken or none, of which so many may run at once (0: all). Their
 * jobs have consecutive ids; the reply tells the first, by which the array is known. */
void core_submit_array(struct core *c, Boost__JobSpec *const *specs, int n, const int32_t *index, int limit,
                       const struct core_user *user, bool hold, core_reply_fn reply, void *arg);
/* Dry run of one of `jobs` that are submitted together: validates and resolves (caller frees *resolved); *would_wait with
 * its reason (arena). */
MUST_USE int core_dry_run(struct core *c, const Boost__JobSpec *spec, int jobs, const struct core_user *user,
                          struct arena *arena, Boost__JobSpec **resolved, bool *would_wait, const char **reason,
                          struct error *err);
/* `text` says what will happen, the job's number not included ("finishes its step, checkpoints (at most 30 s) and is
 * HELD"); it is the core's until the reply returns. Refused with the reason when the state does not allow it. The reply
 * comes when the change is durable. */
void core_control(struct core *c, Boost__ControlRequest__Verb verb, int64_t job, bool now, const struct core_user *user,
                  core_text_reply_fn reply, void *arg);
/* A job that has not ended goes on in a new attempt, after a checkpoint where it is RUNNING; an ended one as a new job
 * of its owner, which is `job` of the reply. spec: as it is to be, NULL: unchanged; from_step: of a committed checkpoint,
 * -1: the newest. ERR_INVALID: the state of the job would not fit. As with core_control the reply comes when the change
 * is durable, and `text` says what will happen. */
typedef void (*core_restart_reply_fn)(void *arg, int rc, const struct error *err, int64_t job, bool new_job,
                                      const char *text);
void core_restart(struct core *c, int64_t job, const Boost__JobSpec *spec, int64_t from_step,
                  const struct core_user *user, core_restart_reply_fn reply, void *arg);
/* Cordons, drains or resumes a node, which only root and the daemon's own uid may. deadline_s: of a drain, when its jobs
 * checkpoint and are queued again; less than 0: never. `text` says what will happen, the node's name not included; it
 * is the core's until the reply returns, which comes when the change is durable. */
void core_node_control(struct core *c, Boost__NodeControlRequest__Verb verb, const char *node, const char *reason,
                       double deadline_s, const struct core_user *user, core_text_reply_fn reply, void *arg);
/* Takes the victim's devices for `for_job`: it checkpoints (when it is RUNNING; else it is killed), is QUEUED again and
 * goes on from there; the devices are free when it has stopped. What the scheduler calls: committed with the
 * caller's change, else by the next core_run(). True: it stops, whoever asked; false: it has no attempt to stop. */
bool core_preempt(struct core *c, struct job *victim, const struct job *for_job);
/* Changes priority or time limit of a job that has not ended; as core_control. */
void core_update(struct core *c, const Boost__UpdateRequest *what, int64_t job, const struct core_user *user,
                 core_text_reply_fn reply, void *arg);
/* The task of the array with that index, or the one behind `after` (a task of it; NULL: the first) with index -1. NULL:
 * there is none. */
struct job *core_task(struct core *c, int64_t array, int index, const struct job *after);
/* "17", "17.2", task "17_3", a name, a unique prefix of names; ERR_NOT_FOUND, or ERR_AMBIGUOUS listing the candidates. */
MUST_USE int core_find_job(struct core *c, const char *ref, struct job **out, struct error *err);

/* ---- looking ------------------------------------------------------------------ */

/* Jobs by ascending id; NULL ends. */
struct job *core_next_job(struct core *c, int64_t after_id);
struct job *core_job(struct core *c, int64_t id);
/* The jobs that `wanted` says yes to, by ascending id, of those at least whose end is not durable, or of all: *ids is
 * the caller's to free. -1: out of memory. */
int core_select(struct core *c, bool live_only, bool (*wanted)(const struct job *job, const void *arg), const void *arg,
                int64_t **ids);
/* Everything is allocated in `arena`; NULL when out of memory. */
Boost__JobSummary *core_summary(struct core *c, const struct job *job, struct arena *arena);
/* summary, spec, resolved, attempts, checkpoints, waits, goodput, reason; not the events (the store has them). */
Boost__ShowReply *core_show(struct core *c, const struct job *job, struct arena *arena);
Boost__CheckpointsReply *core_checkpoints(struct core *c, const struct job *job, struct arena *arena);
Boost__NodesReply *core_nodes(struct core *c, struct arena *arena);
Boost__Totals *core_totals(struct core *c, struct arena *arena);
/* Device-seconds of each user since then, most first; user NULL or "": all, else a name or uid. */
Boost__UsageReply *core_usage(struct core *c, const char *user, int64_t since_wall_ns, struct arena *arena);

/* The resolved spec that the attempt runs: the job's own, or of fewer replicas while nodes are missing. It lives as long
 * as the attempt; NULL: out of memory. */
const Boost__JobSpec *core_attempt_spec(const struct job *job, struct attempt *a);

/* A rank's log, wherever it is: asks the node's agent (Task ReadLog), or gives what the controller kept of a
 * lost node (at most 64 KiB) with `note`. */
struct core_log {
    const uint8_t *data;
    size_t len;
    int64_t next_offset;
    int attempt, newest_attempt;
    bool finished;
    const char *note;
};
void core_read_log(struct core *c, const struct job *job, const Boost__LogsRequest *request,
                   void (*reply)(void *arg, int rc, const struct error *err, const struct core_log *log), void *arg);

/* One checkpoint of the job (NULL: a directory that the request names): pinned, unpinned, or deleted in two phases by the
 * registry, or given to an agent's tool. Owner, root, admins and the daemon's own user. `reply` is called once, when the
 * change is durable or the tool is done; what it is given lives until it returns. */
struct core_ckpt {
    int64_t job, step; /* job 0: none */
    int attempt;
    const char *path, *node, *text; /* may be NULL */
    char **faults;                  /* VERIFY */
    size_t n_faults;
};
typedef void (*core_ckpt_reply_fn)(void *arg, int rc, const struct error *err, const struct core_ckpt *out);
void core_checkpoint(struct core *c, struct job *job, const Boost__CheckpointRequest *request,
                     const struct core_user *user, core_ckpt_reply_fn reply, void *arg);

/* Where the ranks of the live attempt are, asked of its nodes' agents; in pages. */
struct core_stacks {
    const struct job *job;
    int attempt;
    Boost__RankStacks **ranks; /* of this page; the caller's until the call returns */
    size_t n_ranks;
    bool last; /* without ranks */
};
/* Owner, root and the daemon's own user. `page` is called at least once, with an error or with pages up to `last`; false
 * from it ends the call. May be called before this returns. */
void core_collect_stacks(struct core *c, const struct job *job, const Boost__StacksRequest *request,
                         const struct core_user *user,
                         bool (*page)(void *arg, int rc, const struct error *err, const struct core_stacks *stacks),
                         void *arg);

#endif
