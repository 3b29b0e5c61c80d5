/* One job: its states, the table of transitions, and its in-memory record.
 *
 * The state machine is data (job_table.c): (state, event) -> (next state, actions).
 * job_step() is pure: it only looks the pair up and says what to do; an illegal pair
 * is reported to the caller, who logs and counts it. core_*.c build the
 * transaction and run the actions.
 *
 * The records below are the controller's memory. Only core_*.c write them; the
 * server reads them through core.h and may read the plain fields of struct job. */
#ifndef BOOST_DAEMON_JOB_H
#define BOOST_DAEMON_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/agent.pb-c.h"
#include "proto/base/error.h"
#include "proto/job.pb-c.h"
#include "proto/rpc.pb-c.h"
#include "proto/worker.pb-c.h"

enum job_event {
    EV_PLACED,       /* the scheduler found devices: an attempt begins             */
    EV_ALL_STEPPED,  /* every rank finished its first step                         */
    EV_FAILED_INFRA, /* infrastructure: restart, no budget eaten                   */
    EV_FAILED_APP,   /* application, budget left                                   */
    EV_FAILED_FINAL, /* spec or data error, budget gone                            */
    EV_NO_PROGRESS,  /* too many attempts in a row without a later checkpoint      */
    EV_ATTEMPT_GONE, /* every node of the attempt confirmed, or is lost and fenced */
    EV_COMPLETED,    /* every rank ended clean after the last step                 */
    EV_BACKOFF_OVER,
    EV_CANCEL,     /* checkpoint first                                             */
    EV_CANCEL_NOW, /* kill                                                         */
    EV_HOLD,
    EV_RELEASE,
    EV_TIME_LIMIT,
    EV_REQUEUE, /* others need its devices, or its node is drained: checkpoint, QUEUED */
    EV_RESTART, /* a new attempt, of other settings or on other nodes: checkpoint, RECOVERING */
    EV_GRACE_OVER, /* the ranks had their time to stop                             */
    EV_COUNT
};

/* Bits: what the core does once the transition is durable. All idempotent. */
enum job_action {
    ACT_NONE = 0,
    ACT_START = 1 << 0,         /* send StartAttempt to every node of the attempt      */
    ACT_STOP_TERM = 1 << 1,     /* finish the step, checkpoint, end; grace timer       */
    ACT_KILL = 1 << 2,          /* kill now and wait for the nodes to confirm          */
    ACT_BACKOFF = 1 << 3,       /* arm the back-off timer                              */
    ACT_SCHEDULE = 1 << 4,      /* a scheduling pass is due                            */
    ACT_CLOSE_ATTEMPT = 1 << 5, /* end the attempt's row, abandon its open checkpoints */
    ACT_FINISH = 1 << 6,        /* terminal: end time, nothing pending any more        */
};

enum { JOB_STATES = BOOST__JOB_STATE__VALUE__TIMEOUT + 1 };

struct job_transition {
    bool legal;
    Boost__JobState__Value next;
    int stop_target; /* new target when next is STOPPING; -1 = as it was */
    unsigned actions;
};
/* stop_target is the job's while STOPPING, otherwise ignored. */
struct job_transition job_step(Boost__JobState__Value state, int stop_target, enum job_event event);
const char *job_event_name(enum job_event e);
const char *job_state_name(Boost__JobState__Value s); /* "QUEUED" */
bool job_state_terminal(Boost__JobState__Value s);
bool job_state_live(Boost__JobState__Value s); /* an attempt may hold devices: STARTING RUNNING RECOVERING STOPPING */

/* ---- the record -------------------------------------------------------------- */

/* How one rank ended, from its ExitRecord. Owned by the rank. */
struct rank_end {
    Boost__ExitClass__Value class;
    int exit_code, signal; /* signal 0: it exited */
    bool core_dumped, killed_by_us, oom, done, lost;
    int64_t seq;       /* keeper's order on its node, from 1 */
    int64_t arrival;   /* controller's order over all nodes  */
    int64_t last_step; /* -1 = not said */
    char *error;       /* may be NULL */
    char *collective;  /* that it was in, or in last, as rank_collective_text(); NULL: in none, or not known */
    char *device;      /* the GPU that it had, where that may be the cause; may be NULL */
    uint8_t *log_tail;
    size_t log_tail_len;
};

struct rank {
    int part;   /* index into attempt->parts */
    bool heard; /* a RankUpdate of it came to this run of the controller */
    Boost__RankUpdate__Phase phase;
    int64_t step;
    uint64_t progress;
    struct rank_end *end; /* NULL while it runs */
    bool end_acked;
    int64_t metrics_seq; /* stored without a gap */
    uint8_t *tail;       /* what it printed last, while it runs; NULL: not told */
    size_t tail_len;
};

/* One node's share of an attempt. */
struct attempt_part {
    char *node;
    int *ranks;
    int n_ranks;
    bool gone;  /* the node confirmed that nothing of it is left */
    bool lost;  /* the node is DOWN or never confirmed: not waited for */
    bool heard; /* something came from it: the agent has it */
    char *doing; /* what it waits for there before it has ranks; NULL: nothing was said */
    int64_t doing_until; /* of the monotonic clock */
};

struct attempt {
    int number;                 /* from 1 */
    int64_t from_step, to_step; /* to_step: highest seen */
    int from_attempt;           /* that wrote the checkpoint it started from; 0 = initial weights or unknown */
    struct attempt_part *parts;
    int n_parts;
    struct rank *ranks; /* [world] */
    int world;
    int64_t start_ns, running_ns, end_ns; /* wall, 0 = not yet */
    Boost__Reason__Value reason;
    char *text;
    bool fenced;
    Boost__JobSpec *spec;          /* on fewer nodes than the job asks for: see core_attempt_spec(); NULL: not made */
    const Boost__JobSpec *spec_of; /* what that was made of */
    char **spares;                 /* nodes held beside it, for the next */
    int n_spares;
    int64_t replay_until; /* steps up to this were done before: replay; -1 = none */

    /* of the live attempt only */
    bool start_durable; /* its row is: StartAttempt may be sent */
    bool failing;       /* a rank failed; the rest is being killed                   */
    bool decided;       /* the cause is known, reason and text are set               */
    bool kill;          /* to be killed, not asked to stop                           */
    int64_t start_mono, running_mono;
    int64_t start_boot; /* as start_ns, by now_boot(); of the newest attempt */
    int64_t failing_mono;   /* when the first failing rank was heard of         */
    int64_t progress_mono;  /* when a rank last got further                     */
    int64_t hang_due;       /* a rank hangs: which one is to blame is decided then, 0 = none does */
    int hang_rank;
    char *hang_text;
    int64_t rendezvous_due; /* mono ns, 0 = none                                */
    int64_t grace_due, grace_from;
    int64_t close_due, close_from; /* waits for manifests of complete checkpoints */
    bool committed;                /* a later checkpoint of it is COMMITTED            */
    bool advanced;                 /* ... beyond all that attempts before it committed */
    bool dirty;                    /* row to be written with the open change           */
    int64_t metrics_shown;         /* rank 0's records up to this are in the summary   */
    int warnings;                  /* of rank 0 that became events                     */
    struct stragglers *stragglers; /* which ranks are slow; NULL: nothing is known */
    int64_t pace_from;             /* mono ns; pace_events were told since */
    int pace_events;
    bool acks_owed;                /* it has ended, but the store refused to write how */
};

/* What a crash of now would leave of a row: the store has acknowledged it. What people are shown is this, and what
 * nothing can bring back is decided by it. All 0 while no row is durable: WRITING. */
struct checkpoint_durable {
    Boost__CheckpointState__Value state;
    Boost__MirrorState__Value mirror;
    bool pinned;
    int64_t changed_ns;
};

struct checkpoint {
    int64_t step;
    int attempt;
    Boost__CheckpointState__Value state;
    char *path; /* "" once an abandoned one is removed */
    int world;
    int64_t changed_ns;
    char *note;
    struct checkpoint_shard {
        bool have;
        bool failed; /* the rank said so; memory only */
        char *file;
        int64_t bytes;
        uint32_t crc32c;
        int64_t write_ms;
    } * shards;    /* [world] */
    int n_shards;  /* with `have` */
    bool damaged;  /* did not verify: never resumed from */
    bool aside;    /* the job went on from an older one on purpose: likewise */
    bool pinned;   /* by a user: retention leaves it */
    int readers;   /* checkpoint tools that work on it; memory only */
    uint64_t task; /* manifest or delete under way, 0 = none */
    int64_t retry_due;
    int tries;
    bool away; /* its deletion waits for its file system; memory only */
    Boost__MirrorState__Value mirror;
    char *mirror_url, *mirror_note;
    uint64_t mirror_task; /* a copy is being made, 0 = none */
    int64_t mirror_due;
    int mirror_tries;
    struct checkpoint_durable durable;
    bool dirty;
    bool shards_dirty; /* the rows of its shards are to be written again */
};

struct job {
    int64_t id;
    char *name;
    uint32_t uid, gid;
    char *user;
    Boost__JobState__Value state;
    int stop_target;             /* Boost__JobState__Value while STOPPING */
    Boost__Reason__Value reason; /* pending jobs: computed when asked, see core_summary */
    char *reason_text;
    Boost__JobSpec *spec, *resolved;
    /* Of a restart that is accepted and waits for the live attempt's end; NULL, -1: none, newest checkpoint. */
    Boost__JobSpec *next_spec, *next_resolved;
    int64_t next_step;
    int priority;
    int restarts_used, stuck_attempts, backoff_count;
    int64_t step;            /* highest of any attempt, -1 = none */
    int64_t checkpoint_step; /* newest COMMITTED, -1 = none */
    int64_t submitted_ns, started_ns, ended_ns;
    double run_s; /* see job_elapsed_s() */
    double ckpt_every_s, ckpt_cost_s, mean_failure_s; /* of interval AUTO, as rank 0 has told; 0 = not yet */
    double productive_s, detection_s, restart_s, replay_s, queue_s, stall_s;
    double loss, eval_loss, tokens_per_s, mfu; /* NaN = none */

    struct attempt **attempts; /* attempts[k - 1] */
    int n_attempts;
    struct checkpoint **checkpoints; /* by step, then attempt */
    int n_checkpoints;

    struct { /* of its row, as struct checkpoint_durable */
        bool row; /* there is one */
        Boost__JobState__Value state;
        int restarts_used;
    } durable;
    Boost__JobState__Value ended_from; /* the last state before its end, which is shown until that is durable */

    uint64_t version; /* grows with every change that a summary shows */

    /* ---- the core's ---- */
    int unsettled; /* changes of it on their way to the disk */
    bool dirty;
    bool may_grow;     /* a checkpoint was committed by an attempt on too few nodes */
    bool refused;      /* the store took a change of it for good: all of it is written again, unsettled until then */
    bool acknowledged; /* its first row is durable */
    unsigned actions;  /* due once it is settled */
    int64_t backoff_due, backoff_from;
    double step_ms;        /* smoothed, for the stop grace; 0 = unknown */
    int64_t checkpoint_ms; /* slowest shard of the newest checkpoint */
    int account;           /* enum core_account: where time goes now */
    int64_t account_since;
    /* Of the row that an earlier controller left: the wall clock, 0 = none; that since boot, 0 = of another boot; what
     * the newest attempt had lasted by then, below 0 = not known. */
    int64_t accounted_ns, accounted_boot_ns;
    double attempt_s;
    int accounted_attempt; /* which that was */
    struct core_start *starting; /* devices reserved, checkpoint being verified */
    int64_t start_retry_due;
    /* Of its files by URL, in a row; a restart of the controller counts anew. */
    int fetch_tries;     /* that failed, for what is not the node's alone */
    int64_t fetch_since; /* mono, when the first of these began */
    char *fetch_trouble; /* how the last one failed; NULL, "": none did */
    /* Nodes that would not start it, which are tried last for a while. */
    struct refusal {
        char node[65];
        int64_t until; /* mono */
    } refusals[8];
    int n_refusals;
    bool searched;     /* core_rescan: what there is is known */
    int attempt_floor; /* the greatest number of an attempt that an agent has told of */
    char **shared; /* nodes that see its checkpoint directory, as one of them has proven (core_shared) */
    int n_shared;
    char *start_trouble; /* why the last start could not be prepared; NULL = nothing */
    /* Lists of the core: not ended; see job_busy(); waiting for the scheduler, by priority and id; with checkpoint files;
     * waiting for other jobs. */
    struct job_link {
        struct job *next, *prev;
        bool in;
    } active, busy, pending, working, dependent;
    /* Of an array's task: the first task's job, its own number in the array, how many may run at once (0: all). */
    int64_t array_job;
    int array_index, array_limit;
    uint64_t array_picture; /* of the first task: the scheduler's picture that array_running is of */
    int array_running;
    struct share *share; /* of its user; the core's, for as long as it lives */
    int queued_priority; /* that it stands in the queue with */
    uint64_t picture;    /* the scheduler's picture in which `runner` is its index */
    int runner;
};

/* What people are told: that a job has ended when its row says so, since it may not come back to life then. */
Boost__JobState__Value job_shown_state(const struct job *job);
/* Of one that has ended, for who wants something of it: "it has ended", or what that waits for. */
const char *job_ended_text(const struct job *job);
/* The newest attempt while it is not closed, else NULL. */
struct attempt *job_live_attempt(const struct job *job);
struct attempt *job_attempt(const struct job *job, int number); /* NULL: no such one */
struct checkpoint *job_checkpoint(const struct job *job, int64_t step, int attempt);
/* Some attempt did a step, so its files and directories were right once: what is wrong with them since may pass. */
bool job_has_trained(const struct job *job);
/* "node:0,1;node2:2,3", the form in the store. NULL when out of memory. */
char *attempt_placement(const struct attempt *a);
/* "node,node", the form in the store; NULL: none, or out of memory. */
char *attempt_spares(const struct attempt *a);
MUST_USE int attempt_add_spare(struct attempt *a, const char *node, size_t len);
void attempt_clear_ranks(struct attempt *a); /* frees parts and ranks, and leaves none */
/* Makes parts and ranks from that form. ERR_CORRUPT when it does not parse. */
MUST_USE int attempt_parse_placement(struct attempt *a, const char *placement, struct error *err);

/* Makers and enders of the records; NULL when out of memory. */
struct job *job_new(void);
void job_free(struct job *job);
struct attempt *job_add_attempt(struct job *job);
/* Adds at its place in the order. */
struct checkpoint *job_add_checkpoint(struct job *job, int64_t step, int attempt, int world);
void rank_end_free(struct rank_end *end);
/* Replaces *field by a copy of text; an old value stays when memory is out. */
void text_set(char **field, const char *text);

#endif
