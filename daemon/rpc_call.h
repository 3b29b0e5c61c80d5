/* One request on its way to its answer. Shared by the rpc*.c files only.
 *
 * A call is always in one list: BUSY (a callback of the core, the store or the
 * name lookup will come), PARKED (waits for a change of its job or its deadline),
 * ROOM (waits until its session has sent more), READY (resume() is due).
 * When its client goes, a BUSY call loses its session and ends at its callback; the
 * others end at once. */
#ifndef BOOST_DAEMON_RPC_CALL_H
#define BOOST_DAEMON_RPC_CALL_H

#include "daemon/rpc.h"

enum call_state { CALL_BUSY, CALL_PARKED, CALL_ROOM, CALL_READY, CALL_STATES };

struct rpc_call {
    struct rpc_call *prev, *next;
    struct rpc *rpc;
    struct session *session; /* NULL: the client is gone */
    enum call_state state;
    uint64_t id;
    const Boost__Request *request; /* in the arena */
    struct arena arena;
    struct core_user user;
    void (*resume)(struct rpc_call *call);

    /* of a follow */
    int64_t job;         /* 0 = all */
    int64_t deadline_ns; /* 0 = does not wait */
    int64_t seen;        /* rpc_version() when it last looked */
    int64_t cursor;
    bool all_stored; /* of an ended job: whatever it wrote is on the disk */

    /* of a reply in pages, or of several results */
    int64_t *ids;
    size_t n_ids, at;
    size_t left;
    char *after_node; /* of a list of nodes: the last name that was sent */
    const Boost__CheckpointsReply *checkpoints; /* all of a job's as they were, in the arena */
    Boost__ControlReply *results;
};

struct rpc {
    struct core *core;
    struct store *store;
    struct users *users;
    struct rpc_call *lists[CALL_STATES];
    size_t parked;
    int64_t started_ns; /* wall clock: where version counters begin */
    int64_t started_mono_ns;
    /* version counters: one for all, one a job, so that a watch sees every change once */
    int64_t version, settled;
    int64_t *job_versions;
    size_t n_job_versions;
};

/* The counter of a job (0: of anything); it differs from every value of an earlier run of the daemon. */
int64_t rpc_version(const struct rpc *rpc, int64_t job);

/* Answers and ends the call. */
void call_reply(struct rpc_call *call, Boost__Reply *reply);
void call_fail(struct rpc_call *call, const struct error *err);
void call_fail_nomem(struct rpc_call *call);
/* Sends one page of several and keeps the call; false when it is over (the session closes, or the page was refused). */
bool call_page(struct rpc_call *call, Boost__Reply *reply);
/* Puts the call to wait. */
void call_park(struct rpc_call *call, void (*resume)(struct rpc_call *call));
void call_wait_for_room(struct rpc_call *call, void (*resume)(struct rpc_call *call));
/* For a callback: true when the client has gone, and the call with it. */
bool call_abandoned(struct rpc_call *call);
/* Whether a follow's wait is over. */
bool call_expired(const struct rpc_call *call);
void call_set_wait(struct rpc_call *call, int32_t wait_ms);
/* Finds the job of a reference or fails the call; NULL then. */
struct job *call_find_job(struct rpc_call *call, const Boost__JobRef *ref);
/* Terminal, and that is on the disk: no event of it will follow. */
bool call_job_over(const struct rpc_call *call);
Boost__Failure *call_failure(struct arena *a, const struct error *err);

/* rpc_query.c */
void rpc_list(struct rpc_call *call, const Boost__ListRequest *request);
void rpc_show(struct rpc_call *call, const Boost__ShowRequest *request);
void rpc_checkpoints(struct rpc_call *call, const Boost__CheckpointsRequest *request);
void rpc_nodes(struct rpc_call *call);
void rpc_ping(struct rpc_call *call);
void rpc_usage(struct rpc_call *call, const Boost__UsageRequest *request);
void rpc_stacks(struct rpc_call *call, const Boost__StacksRequest *request);
/* An event row of the store in wire form; false when memory is out. */
bool rpc_event(struct arena *a, const struct store_event *row, Boost__Event **out);
/* rpc_change.c */
void rpc_submit(struct rpc_call *call, const Boost__SubmitRequest *request);
void rpc_control(struct rpc_call *call, const Boost__ControlRequest *request);
void rpc_restart(struct rpc_call *call, const Boost__RestartRequest *request);
void rpc_update(struct rpc_call *call, const Boost__UpdateRequest *request);
void rpc_checkpoint(struct rpc_call *call, const Boost__CheckpointRequest *request);
void rpc_node_control(struct rpc_call *call, const Boost__NodeControlRequest *request);
/* rpc_follow.c */
void rpc_events(struct rpc_call *call, const Boost__EventsRequest *request);
void rpc_metrics(struct rpc_call *call, const Boost__MetricsRequest *request);
void rpc_logs(struct rpc_call *call, const Boost__LogsRequest *request);
void rpc_watch(struct rpc_call *call, const Boost__WatchRequest *request);

#endif
