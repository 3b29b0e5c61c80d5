/* A deterministic simulation of a cluster around the controller's core: what happens
 * in it follows from the seed alone. The core and everything it decides with are the
 * product's; the store, the network, the agents, keepers and ranks are models of the
 * real ones, and a truth of their own that the core is held against.
 *
 *   sim_main.c        the program: seeds, options, what a failure prints
 *   sim_world.c       one seed from its start to its end; the queue of what is to happen
 *   sim_controller.c  the core: its boot, its death, its clock, its commits
 *   sim_link.c        connections between agents and controller, and what they do to messages
 *   sim_agent.c       an agent: orders, records, reports until acknowledged
 *   sim_report.c      what an agent says
 *   sim_ranks.c       keepers, ranks, and the steps they do together
 *   sim_files.c       the checkpoint directories that all nodes share
 *   sim_users.c       jobs, and what users ask of them
 *   sim_faults.c      what goes wrong
 *   sim_check.c       what must never be
 *
 * One thread; nothing here reads a clock, a file or the environment. */
#ifndef BOOST_TESTS_SIM_H
#define BOOST_TESTS_SIM_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/core.h"
#include "proto/base/clock.h"
#include "tests/world/mem_store.h"

/* A job comes to some tens of attempts at most; one that is placed and stopped without an end comes to any number. */
enum { MAX_ATTEMPTS = 500 };
enum { MAX_NODES = 5, MAX_SLOTS = 4, MAX_WORLD = MAX_NODES * MAX_SLOTS, MAX_JOBS = 48, MAX_TASKS = 3, MAX_FORMER = 64 };

#define US INT64_C(1000)
#define MS NS_PER_MS
#define S  NS_PER_S

struct sim;
struct event {
    int64_t at;
    uint64_t order;
    void (*fn)(struct sim *s, struct event *e);
    const char *what; /* for the trace and the digest */
    int node;
    uint64_t guard; /* whatever `fn` compares to find out that its time is past */
    int64_t a, b;
    void *data; /* freed behind fn, which may take it (NULL) */
    size_t len;
};

/* ---- a node: machine, agent, link ---- */

enum phase { LAUNCHED, RENDEZVOUS, LOADING, TRAINING, EVALUATING, SAVING };

struct shard_record { /* of a rank's file of shard records; number i has seq i + 1 */
    int64_t step;
    bool failed;
};

struct proc {
    int rank;
    /* the process */
    uint64_t pid; /* never used twice; 0: was never started */
    bool alive;
    enum phase phase;
    int64_t step;
    bool joined;
    bool hung;
    int64_t undying_until; /* no signal ends it before */
    bool stop;             /* was asked to */
    bool leaving;          /* ends clean as soon as its last shard is written */
    int writing;           /* shards on their way to the disk */
    int64_t moved;         /* when it last got further */
    bool set_sent, get_open;
    /* its files */
    struct shard_record *shards;
    int n_shards;
    int n_metrics;
    bool ended; /* there is a record of its end: */
    int64_t seq, last_step;
    int code, signal;
    bool killed, done, lost, oom;
    /* the agent's memory */
    int shards_sent, shards_acked, metrics_sent, metrics_acked;
    int64_t shards_ns, metrics_ns;
    bool exit_sent, exit_acked, told, hang_told;
    enum phase told_phase;
    int64_t told_step, told_ns;
};

enum run_state { PREPARING, PREPARED, LIVE, ENDED };

/* One attempt's share of a node: run directory, keeper, ranks. */
struct run {
    struct run *next;
    int node;
    int64_t job;
    int attempt, world, n;
    struct proc ranks[MAX_SLOTS];
    bool cuda;
    int gpu[MAX_SLOTS]; /* of each of `ranks` */
    int64_t steps, every, from_step;
    int from_attempt; /* 0: from the initial weights; else the checkpoint is: */
    int64_t from_job, from_saved;
    int rendezvous_ms;
    /* files */
    bool complete;     /* the directory is */
    bool keeper_was;   /* a keeper has been started, ever */
    bool keeper_alive; /* and is */
    bool stop_file;    /* it is told to kill */
    bool end_file;     /* all of it is over, and every end is on disk */
    int64_t seq;
    int64_t stop_since; /* when it was last told so */
    int64_t over_seen;  /* when its attempt was first found over, and a process of it alive */
    /* the agent's memory */
    enum run_state state;
    bool confirmed, kill, forget;
    bool end_sent, end_acked;
    int64_t grace_end, ended_ns, report_ns;
    int64_t asked_until; /* a gentle stop: the controller waits so long before it sees about a kill */
};

struct sim_node {
    char name[16];
    int index, slots;
    int64_t memory_mib; /* 0: not told, so that slots alone are counted */
    int gpus;
    bool gpu_broken[MAX_SLOTS];
    bool checks, sick; /* its agent checks its health; which is bad */
    /* the machine */
    int boot;
    bool powered;
    int64_t frozen_until;
    bool disk_full;
    struct run *runs;
    /* the agent */
    bool agent_up;
    uint64_t instance;
    bool check_pending; /* its first check has not ended */
    int64_t paused_until;
    uint64_t conn;      /* 0: none; */
    uint64_t conn_life; /* to this life of the controller */
    bool registered;
    int64_t last_answer;
    int64_t retry_ms;
    /* the link; [0] is to the controller, [1] from it */
    int64_t cut_until[2];
    int64_t slow_until, lossy_until;
    int64_t slow_ns;
    int64_t last_at[2];
    bool far;       /* heartbeats have a connection of their own, */
    uint64_t heart; /* which belongs to this life of the controller */
    int64_t heart_at;
    /* the controller's side */
    uint64_t core_conn;
    uint64_t core_instance; /* as registered */
    bool core_sick;         /* it was told that the node is, or may be */
    bool drained;           /* it says so itself */
    bool closed;            /* an operator was told that it is, and nobody asked for it back */
    int64_t heard;          /* by this life of the controller; at its start: then */
    int64_t given_up;       /* when the controller last lost it (or one of its kills) */
    int64_t calm_from;      /* from then on nothing hinders what it is told */
};

/* ---- an attempt as its ranks see it, a job as its user does ---- */

struct gang {
    struct gang *next;
    int64_t job;
    int attempt, world;
    int64_t step, steps, every, from_step;
    int64_t stop_at, checkpoint_at; /* 0: no */
    int64_t step_ns;
    bool started;  /* every rank has got as far as training, once */
    bool finished; /* the last step is done */
    bool silent;   /* ranks do not notice that a peer is gone */
};

struct sim_job {
    int64_t id;
    int64_t step_ns;
    bool known;           /* durable once */
    bool acknowledged;    /* its user was told that it is taken */
    bool cancel_asked;    /* by whoever, acknowledged or not */
    bool cancel_promised; /* and acknowledged, */
    int64_t promised_ns;  /* then */
    int submit_no;
    uint32_t uid;
    int64_t array; /* 0: of none */
    int array_limit;
    bool limited; /* has a time limit */
    bool wrong;   /* a rank was made to say that the job is in error */
    int max_restarts;
    int app_failures;   /* what may count against its restarts */
    int last_attempt;   /* highest ever durable */
    int state;          /* the durable one; -1: none */
    int replayed;       /* what the events say, */
    bool replayed_open; /* and whether an attempt is under way */
};

enum other_verb { VERB_SUBMIT = -1, VERB_RESTART = -2, VERB_UPDATE = -3, VERB_NODE = -4 };

struct user_op { /* a request on its way */
    struct user_op *next;
    struct sim *sim;
    uint64_t life; /* of the controller that was asked */
    int verb;      /* Boost__ControlRequest__Verb, or one of enum other_verb */
    int64_t job;   /* of a submit: its number among all submits, which is the job's name */
    int tasks;     /* of VERB_SUBMIT: so many jobs */
    int node;      /* of VERB_NODE: its index */
    bool close;
    bool answered, refused;
};

/* A directory of a checkpoint, on the file system that all nodes share. */
struct saved {
    int64_t job, step;
    int attempt, world;
    bool shard[MAX_WORLD];
    bool manifest, damaged;
};

/* ---- what may happen in this seed ---- */

enum fault {
    FAULT_RANK_KILLED,
    FAULT_RANK_FAILS,
    FAULT_RANK_SPEC,
    FAULT_RANK_HANGS,
    FAULT_RANK_UNDYING,
    FAULT_KEEPER_KILLED,
    FAULT_AGENT_KILLED,
    FAULT_AGENT_PAUSED,
    FAULT_NODE_REBOOTED,
    FAULT_NODE_WIPED,
    FAULT_NODE_FROZEN,
    FAULT_CUT_UP,
    FAULT_CUT_DOWN,
    FAULT_CUT_BOTH,
    FAULT_RESET,
    FAULT_SLOW,
    FAULT_LOSSY,
    FAULT_CONTROLLER_KILLED,
    FAULT_COMMIT_CRASH,
    FAULT_STORE_FULL,
    FAULT_STORE_SLOW,
    FAULT_CLOCK,
    FAULT_DISK_FULL,
    FAULT_GPU,
    FAULT_HEALTH,
    FAULT_DAMAGE,
    FAULTS
};

struct sim {
    uint64_t seed, rng, core_rng;
    uint64_t digest; /* of everything that happened, in order */
    bool trace;
    int64_t now, wall_offset;
    struct event *heap;
    int n_heap, cap_heap;
    uint64_t next_order, next_id;
    uint64_t happened;

    struct sim_node nodes[MAX_NODES];
    int n_nodes;
    struct gang *gangs;
    struct sim_job jobs[MAX_JOBS];
    int n_jobs;
    struct saved *saved;
    int n_saved, cap_saved;
    struct user_op *ops;

    struct mem_store *store;
    Boost__BoostdConfig config;
    struct core *core; /* NULL: dead */
    uint64_t life;
    int64_t core_up, core_due;
    bool store_busy; /* a commit is on its way */
    int64_t store_slow_until;
    int crash_at; /* after so many commits; 0: never */
    enum { CRASH_LOST, CRASH_DURABLE, CRASH_TOLD } crash_how;
    bool crash_soon;
    int restless; /* so many times in a row the core was due at once */

    int weight[FAULTS];
    int64_t fault_gap;
    int64_t faults_end;
    bool healed;
    int to_submit;
    int64_t control_gap;

    /* results */
    int submitted, completed, faults, boots, attempts, resumes;
    char failure[64]; /* the invariant */
    char why[1024];
    jmp_buf failed;
};

/* ---- sim_world.c ---- */

/* Runs one seed; false when an invariant did not hold: s->failure and s->why. */
bool sim_run(struct sim *s, uint64_t seed, bool trace);
void sim_free(struct sim *s);
struct event *at(struct sim *s, int64_t when, void (*fn)(struct sim *, struct event *), const char *what);
/* From inside e->fn: the same again, in the order that it was made in among those of that time. */
void postpone(struct sim *s, struct event *e, int64_t when);
uint64_t chance(struct sim *s);                         /* 64 random bits */
int64_t between(struct sim *s, int64_t lo, int64_t hi); /* lo..hi, both in */
bool one_in(struct sim *s, int n);
void trace(struct sim *s, const char *fmt, ...) PRINTF_LIKE(2, 3);
_Noreturn void violated(struct sim *s, const char *invariant, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Everything that a seed's draw decides before it begins. */
void draw_world(struct sim *s);

/* ---- sim_controller.c ---- */

void controller_boot(struct sim *s);
void controller_die(struct sim *s);  /* not from inside a call of the core */
void controller_poke(struct sim *s); /* after every input */
void store_kick(struct sim *s);

/* ---- sim_link.c ---- */

void link_connect(struct sim *s, struct sim_node *n);
/* The agent ends its connection; `told`: the other side gets to know when it can. */
void link_close(struct sim *s, struct sim_node *n, bool told);
void link_retry(struct sim *s, struct sim_node *n);
void link_up(struct sim *s, struct sim_node *n, const Boost__AgentMessage *m);
void link_heart(struct sim *s, struct sim_node *n);
bool link_down(struct sim *s, struct sim_node *n, const Boost__ControllerMessage *m);

/* ---- sim_agent.c ---- */

void agent_start(struct sim *s, struct sim_node *n);
void agent_die(struct sim *s, struct sim_node *n, bool quietly);
bool agent_stopped(const struct sim *s, const struct sim_node *n); /* it takes no part for now */
int64_t agent_wakes(const struct sim_node *n);
void agent_check(struct sim *s, struct sim_node *n); /* its health, which it then tells */
void agent_soon(struct sim *s, struct sim_node *n);  /* it looks at its run directories */
void agent_order(struct sim *s, struct sim_node *n, const Boost__ControllerMessage *m);
struct run *run_find(struct sim_node *n, int64_t job, int attempt);
void run_free(struct run *r);

/* ---- sim_report.c ---- */

void report_register(struct sim *s, struct sim_node *n);
void report_run(struct sim *s, struct sim_node *n, struct run *r);
/* Which rank has the GPU; NULL: none. */
const struct run *gpu_user(const struct sim_node *n, int gpu, int *rank);
void report_devices(struct sim *s, struct sim_node *n);
void report_health(struct sim *s, struct sim_node *n);
void report_again(struct sim_node *n); /* the link is new: nothing counts as sent */
void report_node_end(struct sim *s, struct sim_node *n, int64_t job, int attempt);
void report_refused(struct sim *s, struct sim_node *n, int64_t job, int attempt, Boost__ExitClass__Value class,
                    Boost__Reason__Value reason, const char *text);
void report_kv(struct sim *s, struct sim_node *n, const struct run *r, const struct proc *p, bool set);
void report_ack(struct sim_node *n, const Boost__Ack *ack);
bool report_all_acked(const struct run *r);

/* ---- sim_ranks.c ---- */

void keeper_start(struct sim *s, struct run *r);
void keeper_die(struct sim *s, struct run *r);
void keeper_kill_all(struct sim *s, struct run *r); /* the stop file is there */
void rank_end(struct sim *s, struct run *r, struct proc *p, int code, int signal, bool done);
void rank_joined(struct sim *s, struct run *r, struct proc *p, bool ok);
bool run_has_process(const struct run *r);
struct gang *gang_find(struct sim *s, int64_t job, int attempt);
void gangs_free(struct sim *s);
void ranks_power_off(struct sim *s, struct sim_node *n);

/* ---- sim_files.c ---- */

struct saved *saved_find(struct sim *s, int64_t job, int64_t step, int attempt);
/* Of ".../0badcafe-<job>/step-<n>.a<k>". */
bool saved_name(const char *dir, int64_t *job, int64_t *step, int *attempt);
void saved_shard(struct sim *s, int64_t job, int64_t step, int attempt, int world, int rank);
void file_task(struct sim *s, struct sim_node *n, const Boost__Task *t);
bool saved_whole(const struct saved *k);

/* ---- sim_users.c ---- */

void users_begin(struct sim *s);
void users_release_all(struct sim *s);
bool users_wait(const struct sim *s);                             /* for an answer */
struct sim_job *job_by_id(struct sim *s, int64_t id);             /* NULL: not known */
bool was_refused(const struct sim *s, const struct sim_job *job); /* in this life of the controller */

/* ---- sim_faults.c ---- */

void faults_begin(struct sim *s);
void faults_heal(struct sim *s);
void faults_bury(struct sim *s); /* what could not be killed can be */
const char *fault_name(int fault);

/* ---- sim_check.c ---- */

void check_start(struct sim *s, const struct sim_node *n, const Boost__AttemptStart *start); /* as it is sent */
void check_spawn(struct sim *s, const struct run *r);                                        /* before the ranks are */
void check_gpus(struct sim *s, const struct sim_node *n, const struct run *r);               /* it finds too few free */
void check_loaded(struct sim *s, const struct run *r);
void check_delete(struct sim *s, const struct saved *k);
void check_event(void *arg, const struct store_event *e);
void check_apply(void *arg, const struct mem_txn *t);   /* before its rows replace others */
void check_applied(void *arg, const struct mem_txn *t); /* after */
void check_always(struct sim *s);                       /* after every event */
bool check_over(struct sim *s);                         /* every job has ended */
_Noreturn void check_late(struct sim *s, int hours);    /* it does not come to be over */
void check_end(struct sim *s);

#endif
