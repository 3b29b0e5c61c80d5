/* What the core_*.c files share. Nothing else includes it. */
#ifndef BOOST_DAEMON_CORE_INTERNAL_H
#define BOOST_DAEMON_CORE_INTERNAL_H

#include "daemon/core.h"
#include "daemon/job.h"
#include "daemon/kv.h"
#include "daemon/sched.h"
#include "proto/base/clock.h"

#define STATE(s)    BOOST__JOB_STATE__VALUE__##s
#define REASON(r)   BOOST__REASON__VALUE__##r
#define LIVENESS(l) BOOST__NODE_LIVENESS__VALUE__##l
#define ADMIN(a)    BOOST__NODE_ADMIN__VALUE__##a
#define CKPT(s)     BOOST__CHECKPOINT_STATE__VALUE__##s
#define CLASS(c)    BOOST__EXIT_CLASS__VALUE__##c
#define PHASE(p)    BOOST__RANK_UPDATE__PHASE__##p

/* Waits that no configuration sets. */
#define CORE_PREFLIGHT_NS (2 * NS_PER_S)   /* then the submit is taken unchecked                  */
#define CORE_SHARED_NS    (30 * NS_PER_S)  /* a look into a checkpoint directory                   */
#define CORE_VERIFY_NS    (600 * NS_PER_S) /* a checkpoint read back whole                        */
#define CORE_MIRROR_NS    (24 * 3600 * NS_PER_S) /* a copy made or fetched; its requests have limits of their own */
#define CORE_FETCH_NS     (24 * 3600 * NS_PER_S) /* likewise */
#define CORE_TOOL_NS      (6 * 3600 * NS_PER_S) /* a checkpoint read and written in another form */
#define CORE_MANIFEST_NS  (60 * NS_PER_S)
#define CORE_DELETE_NS    (600 * NS_PER_S)
#define CORE_LOG_EXTRA_NS (5 * NS_PER_S)  /* over the reader's own wait                          */
#define CORE_CLOSE_NS     (10 * NS_PER_S) /* an ended attempt waits for manifests                */
#define CORE_FINAL_NS     (5 * NS_PER_S)  /* a clean end waits for word of its last checkpoint   */
#define CORE_CAUSE_NS     NS_PER_S        /* a failure waits for the ends that came before it    */
#define CORE_STORE_NS     (5 * NS_PER_S)  /* a user waits for a store that cannot write          */
#define CORE_HEART_ALONE  6              /* node time-outs that heartbeats alone keep a node up    */
#define CORE_REFUSED_NS   (300 * NS_PER_S) /* a node that would not start a job is its last choice    */
#define CORE_ADOPTED_GAP  10000            /* numbers that may have been given since a copy was made  */
#define CORE_RETRY_NS     (5 * NS_PER_S)  /* between tries of a task or a start                  */
#define CORE_STOP_MIN_NS  (30 * NS_PER_S) /* the least automatic stop grace                      */
#define CORE_PASS_NS      (5 * NS_PER_MS) /* a scheduling pass that takes longer is followed by a pause */
#define CORE_TASK_TRIES   3

/* What a node's devices are taken by. */
struct holding {
    int64_t job;
    int attempt;
    enum sched_pool pool;
    int slots;
    struct job *of;   /* NULL: not looked up yet, or of no job here */
    int64_t mib;      /* of the host, and whether it has the node whole: once it is looked up */
    bool exclusive;
    bool epilog;      /* its processes are gone, the site's script behind them still runs */
    bool spare;       /* held for an attempt to come, `attempt` is 0 */
    bool reserved;    /* chosen, StartAttempt not decided yet */
    int64_t kill_due; /* a kill was sent: to be confirmed by then, 0 = none */
    int64_t kill_from;
    bool overdue; /* never confirmed: the node was drained for it */
};

struct node {
    struct node *next; /* by name */
    char *name, *boot_id, *instance, *version, *data_address;
    Boost__NodeAdmin__Value admin;
    char *admin_reason, *admin_by;
    int64_t admin_ns;
    int64_t drain_due; /* mono: what runs there is queued again; 0 = it may end by itself */
    int cpu_slots;
    int cores; /* told when its agent registers; 0: not known yet */
    int64_t memory_mib;
    /* Of its last agent: so many, of this name, the least memory of one. */
    int gpus;
    char *gpu_name;
    int64_t gpu_mib;
    Boost__DeviceReport *devices; /* newest, of this run of the controller; NULL: none yet */
    Boost__Register *told;        /* without attempts, devices and health; NULL: not in this run of the controller */
    Boost__HealthReport *health;  /* newest; NULL: its agent checks nothing, or was not heard of */
    bool health_silent;           /* cordoned only until the first check has ended: no event tells of that */
    uint32_t uid;
    Boost__NodeLiveness__Value liveness;
    bool registered; /* in this run of the controller */
    bool connected;
    int64_t cut_since; /* mono ns, while it is not connected */
    int64_t last_seen; /* mono ns; the controller's start until it is heard of */
    struct holding *holdings;
    int n_holdings;
    int switch_id; /* of the scheduler: 0 not looked up, -1 not told, else from 1 */
    bool dirty;
    struct node *next_dirty;
};

/* A Task on its way; done with rc ERR_UNREACHABLE or ERR_TIMEOUT when no reply came. */
struct task;
typedef void (*task_done_fn)(struct core *c, struct task *t, int rc, const struct error *err,
                             const Boost__TaskReply *reply);
struct task {
    struct task *next;
    uint64_t id;
    struct node *node;
    int64_t job;
    int64_t since, deadline, limit; /* limit: for the whole of it, or since its files last came on */
    int64_t bytes_done, bytes_total; /* of files that are on their way; 0: not told */
    task_done_fn done;
    int64_t step; /* of the checkpoint it is about */
    int attempt;
    void *arg;
    void (*drop)(void *arg); /* may be NULL */
};

/* Devices chosen for a job's next attempt while its checkpoint is verified. */
struct core_start {
    struct node **nodes;
    int n_nodes;  /* all of them */
    int n_spares; /* of them, the last ones, without ranks */
    struct checkpoint *candidate; /* being verified; NULL: from the initial weights */
    int proving;                  /* core_shared: the node that is asked */
    char nonce[48];
    uint64_t task;
    uint64_t *fetches; /* core_data: tasks, by node; 0: it has its data. NULL: not asked yet */
    int fetching;      /* so many are not answered */
    int64_t fetched_from; /* when they were asked */
    int64_t since;
};

struct after { /* a call owed once a change is durable */
    struct after *next;
    void (*fn)(struct core *c, void *arg, int rc, const struct error *err);
    void (*late)(struct core *c, void *arg, const struct error *err); /* NULL, or once, before fn: see changes_run() */
    void (*drop)(void *arg);
    void *arg;
};

/* What a row of a change says of what is shown, for when it is durable. */
struct change_row {
    int64_t job;
    Boost__JobState__Value state; /* of the job's own row */
    int restarts_used;
    int64_t step; /* of a checkpoint's row */
    int attempt;  /* 0: the job's own */
    struct checkpoint_durable checkpoint;
};

/* One transaction on its way to the disk. */
struct change {
    struct core *core;
    struct change *next, *prev;
    struct job **jobs;
    int n_jobs;
    struct change_row *rows;
    int n_rows;
    bool jobless; /* events of no job */
    int64_t since; /* mono */
    struct after *after;
};

/* A log request for a job that has not started. */
struct parked_log;

struct job_list {
    struct job *head, *tail;
};

/* A user as the scheduler sees one. */
enum { PRIORITIES = 101 };
struct share {
    uint32_t uid;
    double used;     /* device-seconds, decayed to `used_at` (mono) */
    int64_t used_at;
    int devices, running; /* held, by so many jobs; as of the last picture and what was placed since */
    int waiting;          /* jobs QUEUED or HELD */
    bool limits_known;
    int max_running, max_devices, max_queued; /* 0: none */
    struct job_list queue[PRIORITIES]; /* by id */
    uint64_t some[2];                  /* queues that are not empty */
};
/* The scheduler's last picture, and whom it is of. */
struct picture;

struct core {
    struct core_ops ops;
    struct core_store store;
    struct core_stats stats;
    /* configuration, ns */
    int64_t heartbeat_ns, suspect_ns, node_timeout_ns, restart_grace_ns;
    int64_t backoff_min_ns, backoff_max_ns, rendezvous_ns, kill_confirm_ns;
    int fetch_tries;      /* 0: no bound */
    int64_t half_life_ns; /* 0: no fair share */
    bool backfill, preempt;
    int preempt_gap;
    int user_running_jobs, user_devices, user_queued_jobs; /* 0: no limit */
    Boost__BoostdConfig *config;                           /* a copy, for its lists */
    int64_t up_since; /* mono */
    bool adopted; /* the store was a copy once */
    int64_t settle_until; /* mono; after an adoption nothing is started before; 0 = no adoption */

    struct job **jobs; /* by id, ascending */
    int n_jobs, cap_jobs;
    struct job_list active, busy, working, dependent;
    int n_state[JOB_STATES]; /* jobs in each */
    int n_ending;            /* have ended, and their rows do not say so yet */
    struct share **shares; /* by uid */
    int n_shares;
    int n_pending[SCHED_POOLS];
    struct picture *picture;
    uint64_t pictures; /* so many were made */
    char **switches;   /* [id - 1] */
    int n_switches;
    struct node *nodes;       /* by name */
    struct node **node_index; /* the same */
    int n_nodes, cap_nodes;
    struct core_gpus { /* of all nodes that take the user's jobs; known until a node tells something else */
        bool known, own, any; /* own: some node is of one user only, so that this is of `uid` */
        uint32_t uid;
        int64_t least_mib;
    } gpus;
    struct node *dirty_nodes; /* whose rows are to be written */
    struct task *tasks;
    uint64_t next_task;
    struct kv *kv;
    int64_t kv_due;
    struct parked_log *parked;

    int64_t next_job_id, next_event_id;
    int64_t learn_below; /* what agents tell of jobs from this number on is not believed */
    int64_t arrivals;
    int64_t due;   /* nothing to run before */
    bool schedule; /* a scheduling pass is due */
    bool spares_used; /* some job holds or held spare nodes */
    bool elastic;  /* some job has fewer nodes or spares than it asks for, and may find more */
    int64_t pass_due;     /* mono: not before; 0: at once */
    int64_t schedule_due; /* mono, when one is tried again for which there was no memory; 0: none is */
    bool work;     /* working jobs are to be looked at */

    /* the open change: rows are marked dirty, events are in `txn` */
    void *txn;
    struct job **dirty_jobs;
    int n_dirty, cap_dirty;
    bool jobless;
    struct after *after;
    struct change *changes; /* on their way */
    int64_t refused_due;    /* mono, when what the store refused is written again; INT64_MAX: nothing */
    bool refused_nodes;
    struct metrics_owed *metrics;
};

/* ---- core.c ---------------------------------------------------------------------- */

int64_t now_mono(struct core *c);
int64_t now_boot(struct core *c);
int64_t now_wall(struct core *c);
void core_log_line(struct core *c, enum core_log_level level, const char *fmt, ...) PRINTF_LIKE(3, 4);
void due_at(struct core *c, int64_t mono_ns); /* core_run has something to do then */

/* ---- core_change.c ---------------------------------------------------------------- */

/* Every public function that may change something ends with it: one transaction of all that is marked. */
void change_commit(struct core *c);
void mark_job(struct core *c, struct job *job); /* its row is to be written, its version grows */
void mark_attempt(struct core *c, struct job *job, struct attempt *a);
void mark_checkpoint(struct core *c, struct job *job, struct checkpoint *k);
struct checkpoint_durable checkpoint_row(const struct checkpoint *k); /* what its row says, once it is durable */
void mark_node(struct core *c, struct node *n);
void put_shard(struct core *c, struct job *job, struct checkpoint *k, int rank);
/* job may be NULL, attempt 0, node NULL. */
void add_event(struct core *c, struct job *job, int attempt, const char *node, const char *actor, const char *kind,
               const char *fmt, ...) PRINTF_LIKE(7, 8);
/* `drop` frees arg, whether fn was called or the core ended before. */
void after_durable(struct core *c, void (*fn)(struct core *, void *, int, const struct error *), void *arg,
                   void (*drop)(void *));
/* As after_durable, for a user who waits for it: `late` says what keeps the store from writing, once it is too long. */
void after_durable_or_late(struct core *c, void (*fn)(struct core *, void *, int, const struct error *),
                           void (*late)(struct core *, void *, const struct error *), void *arg, void (*drop)(void *));
/* Calls what is late, and writes again what the store refused; when to look again. */
int64_t changes_run(struct core *c, int64_t now);
void progress_changed(struct core *c, struct job *job); /* something a summary shows, no row */

/* ---- core_answer.c ---------------------------------------------------------------- */

/* The answer to a request that is a change; `text` says what will happen. */
struct answer {
    core_text_reply_fn reply;
    void *arg;
    char text[512];
    bool replied;
};
/* NULL: out of memory. The caller frees it, or hands it to answer_when_durable(). */
struct answer *answer_new(core_text_reply_fn reply, void *arg);
void answer_when_durable(struct core *c, struct answer *x);
/* From what keeps the store from writing to what its user is told meanwhile. */
struct error answer_late_error(const struct error *why);

/* ---- core_jobs.c ------------------------------------------------------------------ */

/* Takes the transition: state, lists, immediate actions; the others run when it is durable. False: illegal, counted. */
bool job_fire(struct core *c, struct job *job, enum job_event event);
void job_reason(struct job *job, Boost__Reason__Value reason, const char *fmt, ...) PRINTF_LIKE(3, 4);
void list_add(struct job_list *list, struct job *job, struct job_link *(*link)(struct job *));
void list_remove(struct job_list *list, struct job *job, struct job_link *(*link)(struct job *));
struct job_link *link_active(struct job *job);
struct job_link *link_busy(struct job *job);
struct job_link *link_pending(struct job *job);
struct job_link *link_working(struct job *job);
struct job_link *link_dependent(struct job *job);
MUST_USE int core_add_job(struct core *c, struct job *job); /* ids ascending */
void core_forget_job(struct core *c, struct job *job);      /* never became durable */
/* Keeps it in the list of those with something on a node, reserved on one, or with a timer, as long as it belongs there. */
void job_busy(struct core *c, struct job *job);
/* Puts the job into or takes it out of the scheduler's list, as its state says. */
void job_pend(struct core *c, struct job *job);

/* ---- core_submit.c ---------------------------------------------------------------- */

/* What the controller can tell of a spec without files: valid, resolved (the caller's to free), what it starts from. */
MUST_USE int spec_resolve(struct core *c, const Boost__JobSpec *spec, uint32_t uid, Boost__JobSpec **resolved,
                          struct error *err);

/* Asks an agent that can act for the user whether the job's files are there; false: there is none, `done` is not called.
 * `done` takes the task's arg over (sets arg and drop of the task to NULL). */
bool preflight_send(struct core *c, Boost__JobSpec *resolved, uint32_t uid, uint32_t gid, task_done_fn done, void *arg,
                    void (*drop)(void *arg));
bool preflight_is_definite(int rc); /* a fault of the job, and not of the way to its files */

/* ---- core_restart.c ----------------------------------------------------------------- */

/* What a restart has changed takes effect, once no attempt is live. */
void job_take_changes(struct core *c, struct job *job);

/* ---- core_init.c: starting from another job's checkpoint ---------------------------- */

const char *init_path(const Boost__JobSpec *resolved); /* the checkpoint's directory, or its URL; NULL: none */
const char *init_url(const Boost__JobSpec *resolved); /* where that is one, which its nodes fetch; else NULL */
/* Whether it is a checkpoint here, verified before an attempt begins from it; what ranks take from a directory of Hugging
 * Face's they check themselves. */
bool init_is_verified(const Boost__JobSpec *resolved);
bool init_weights_only(const Boost__JobSpec *resolved);
int64_t init_step(const Boost__JobSpec *resolved);     /* that the first attempt begins with; 0 without one */
bool init_parse(const char *path, int64_t *step, int *attempt); /* ".../step-<n>.a<k>" */
/* Puts the directory in the place of "job:17@8000"; ERR_INVALID: no such one, or another model. */
MUST_USE int init_resolve(struct core *c, Boost__JobSpec *resolved, struct error *err);
/* ERR_INVALID: the registry has deleted it since. */
MUST_USE int init_still_there(struct core *c, const Boost__JobSpec *resolved, struct error *err);
/* A job has none of its own yet and is to start from it. */
bool init_in_use(struct core *c, const struct checkpoint *k);
/* The checkpoint of some job that init_from names by its directory; NULL: none is known. */
const struct checkpoint *init_known(struct core *c, const Boost__JobSpec *resolved, uint32_t uid);
/* The files that init_from names are not there, or not sound: where their copy is, where there is one. */
void init_hint_copy(struct core *c, const Boost__JobSpec *resolved, uint32_t uid, struct error *err);
/* The newest committed one of that step, or (-1) of any; ERR_NOT_FOUND names the steps that there are. */
MUST_USE int checkpoint_choose(const struct job *job, int64_t step, struct checkpoint **out, struct error *err);

/* ---- core_boot.c ------------------------------------------------------------------ */

MUST_USE int core_load(struct core *c, struct error *err);

/* ---- core_account.c: where a job's time goes --------------------------------------- */

enum core_account { ACCOUNT_NONE, ACCOUNT_QUEUE, ACCOUNT_RESTART, ACCOUNT_REPLAY, ACCOUNT_PRODUCTIVE };
void account_state(struct core *c, struct job *job);                        /* as state and step say, from now on */
/* Loaded: what passed since its row was written counts for the state that it is in. */
void account_adopted(struct core *c, struct job *job);
/* ns since the row was written that an earlier controller left. */
int64_t account_away(struct core *c, const struct job *job);
/* ns that the attempt lasted, or has until now, whatever was done to the wall clock. */
int64_t attempt_lasted(struct core *c, const struct attempt *a);
/* Devices that it held, spares too. */
double attempt_devices(const struct attempt *a);
void account_stall(struct job *job, double seconds); /* of the open stretch, the ranks waited for their checkpoint */
void account_detection(struct core *c, struct job *job, int64_t silent_ns); /* the last stretch was detection */
void account_totals(struct core *c, const struct job *job, Boost__Goodput *out); /* with the open stretch */
double job_elapsed_s(struct core *c, const struct job *job);       /* STARTING + RUNNING + RECOVERING of all attempts */
/* When it has to begin with its end, so that the step, its successor and a checkpoint fit in: mono, INT64_MAX: never. */
int64_t job_time_limit_due(const struct job *job);
double job_time_limit_lead_s(const struct job *job); /* so long before the limit */

/* ---- core_nodes.c ------------------------------------------------------------------ */

struct node *node_find(struct core *c, const char *name);
struct node *node_get(struct core *c, const char *name); /* made when new; NULL: out of memory */
void node_free(struct node *n);
struct holding *node_holding(struct node *n, int64_t job, int attempt);
/* Adds or returns. */
struct holding *node_hold(struct node *n, int64_t job, int attempt, enum sched_pool pool, int slots);
void node_release(struct core *c, struct node *n, int64_t job, int attempt);
int node_slots(const struct node *n, enum sched_pool pool); /* that work */
int node_busy(const struct node *n, enum sched_pool pool);
int node_room(const struct node *n, enum sched_pool pool); /* negative: more is held than is there */
int node_free_slots(const struct node *n, enum sched_pool pool);
/* Takes over what the agent says of its GPUs (NULL: nothing yet); tells what became unhealthy, and healthy again. */
void node_devices(struct core *c, struct node *n, const Boost__DeviceReport *report);
bool node_usable(const struct node *n); /* UP and connected */
/* Something came from it. */
void node_seen(struct core *c, struct node *n);
int64_t nodes_run(struct core *c, int64_t now);
/* StopAttempt KILL, and the time by which the node has to confirm it. */
void holding_kill(struct core *c, struct node *n, struct holding *h);
void holding_kill_sent(struct core *c, struct holding *h);
bool send_to(struct core *c, struct node *n, const Boost__ControllerMessage *m);

/* Whether two texts differ in no more than numbers: a counter that rises is no news. */
bool same_but_numbers(const char *a, const char *b);

/* ---- core_health.c: what a node says of itself --------------------------------------- */

void node_told(struct node *n, const Boost__Register *m);
const char *node_label(const struct node *n, const char *key); /* NULL: it has none of that key, or is not known */
const char *node_switch(const struct node *n);                 /* "" = not told */
/* Takes over what the agent has found (NULL: it checks nothing), and cordons or resumes the node by it. */
void node_health(struct core *c, struct node *n, const Boost__HealthReport *report);
/* For when a cordon or drain by others has ended: whether health still forbids work. */
void node_health_settle(struct core *c, struct node *n);
/* Has the node checked now; a report follows. mended: an operator's word, which alone ends what prolog and epilog have
 * shown. False: it cannot be reached. */
bool node_check_health(struct core *c, struct node *n, bool mended);
/* The same for a node that comes back: it gets no work before the report. False: its agent checks nothing, or a check
 * is on its way already. */
bool node_recheck(struct core *c, struct node *n, bool mended);

/* ---- core_control.c ---------------------------------------------------------------- */

/* ERR_REFUSED unless it is the user's own job, or all jobs are the user's to change. */
MUST_USE int job_may_change(const struct core *c, const struct job *job, const struct core_user *user,
                            struct error *err);

/* ---- core_drain.c ------------------------------------------------------------------ */

void node_drain(struct core *c, struct node *n, const char *reason); /* the controller's own */
/* Gives back what is reserved there and not begun with: it takes no new work now. */
void node_cancel_starts(struct core *c, struct node *n);
/* Ends the controller's own drain, once nothing overdue is left: what it was for is confirmed after all. */
void node_undrain(struct core *c, struct node *n);
void node_emptied(struct core *c, struct node *n);    /* DRAINED, when it is DRAINING and nothing is left there */
void node_drain_over(struct core *c, struct node *n); /* the deadline has come */

/* ---- core_elastic.c: spare nodes, and fewer than asked for ----------------------------- */

int job_spares(const struct job *job);
bool job_is_elastic(const struct job *job); /* it has spares, or may do with fewer nodes */
int elastic_most(const struct job *job); /* nodes to ask for at first, spares among them */
/* The next lower number to try when so many cannot be had; 0: the job waits. */
int elastic_fewer(struct core *c, const struct job *job, int nodes, enum sched_verdict v);
/* The most, over `nodes` and up to `upto`, that it can be laid out on; 0: none. */
int elastic_more(const struct job *job, int nodes, int upto);
void elastic_wanted(struct core *c, const struct job *job);  /* marks a job that has less than it asks for */
void elastic_committed(struct core *c, struct job *job);     /* a checkpoint: it may grow */
void elastic_grow(struct core *c, struct job *job, int nodes);
bool job_has_spares(const struct job *job);
struct attempt *job_spare_holder(const struct job *job); /* whose spares are held; NULL: the job holds none */
bool spare_hold(struct core *c, struct job *job, struct node *n);
bool spare_add(struct core *c, struct job *job, struct node *n); /* to those of the live attempt */
void spares_hold(struct core *c, struct job *job);    /* those that its newest attempt lists */
void spares_release(struct core *c, struct job *job); /* likewise; the list stays */
void spares_lost(struct core *c, struct node *n, const char *why);
/* The list outlives the holding: behind a restart, what it names may have been given to others meanwhile. */
void spares_give_way(struct core *c, struct node *n);

/* ---- core_show_nodes.c ---------------------------------------------------------------- */

/* Appends the node's GPUs to (*list)[*count..], only the job's when it is not NULL; false: out of memory. */
bool show_devices(const struct node *n, const struct job *job, struct arena *mem, Boost__DeviceInfo ***list,
                  size_t *count);

/* ---- core_tasks.c ------------------------------------------------------------------ */

/* Sends the Task (id, job, uid, gid are filled in); 0 when the node cannot be reached or memory is out. */
uint64_t task_send(struct core *c, struct node *n, const struct job *job, uint32_t uid, uint32_t gid, Boost__Task *body,
                   int64_t limit_ns, task_done_fn done, struct task **out);
struct task *task_find(struct core *c, uint64_t id);
void task_cancel(struct core *c, uint64_t id); /* done is not called */
void task_stop(struct core *c, uint64_t id);   /* likewise, and its agent is told to leave off */
void task_reply(struct core *c, struct node *n, const Boost__TaskReply *reply);
void task_progress(struct core *c, struct node *n, const Boost__TaskProgress *m); /* its time begins anew */
void tasks_lost(struct core *c, struct node *n); /* the connection broke */
int64_t tasks_run(struct core *c, int64_t now);
/* A node that may work on this user's files now, the job's own first, then one that has devices of the pool. */
struct node *task_node(struct core *c, const struct job *job, uint32_t uid, enum sched_pool pool);

/* ---- core_share.c: users and their recent use ---------------------------------------- */

struct share *share_of(struct core *c, uint32_t uid); /* made when new; NULL: out of memory */
void shares_free(struct core *c);
/* What a closed attempt has used, and an open one until now: for the boot. */
void share_add_past(struct core *c, struct job *job);
/* Decays all to now, with the devices of the last picture as held until then. */
void shares_advance(struct core *c);
/* Who has used less goes first; to whole device-seconds, so that equals are equal. */
double share_key(const struct core *c, const struct share *s);

/* ---- core_depend.c: other jobs and limits --------------------------------------------- */

enum depend { DEPEND_MET, DEPEND_WAITS, DEPEND_NEVER };
/* text NULL, or gets what it waits for. */
enum depend job_depends(struct core *c, const struct job *job, char *text, size_t cap);
MUST_USE int depend_check(struct core *c, const Boost__JobSpec *spec, struct error *err); /* jobs that are not there */
bool depend_hold(struct core *c, struct job *job);   /* holds it when they can never be met; whether it did */
void depend_ended(struct core *c);                   /* some job has ended: holds those that waited in vain */
void depend_waive(struct core *c, struct job *job);  /* drops those that can never be met */
/* Whether its user has all that is allowed; text NULL, or gets which limit it is. */
bool limit_keeps(struct core *c, const struct job *job, char *text, size_t cap);
/* Whether so many more jobs like that may be taken. */
MUST_USE int limit_check(struct core *c, uint32_t uid, const char *user, const Boost__JobSpec *resolved, int jobs,
                         struct error *err);

/* ---- core_queue.c: who waits, in which order, and the scheduling pass ------------------- */

void queue_add(struct core *c, struct job *job);
void queue_remove(struct core *c, struct job *job);
/* A job that waits is durable: a pass is due, unless the last one says already that it changes nothing. */
void queue_settled(struct core *c, struct job *job);
void picture_free(struct picture *p);
/* What nodes have told of themselves goes: the next pass looks anew. */
void picture_forget(struct core *c);
/* What the scheduler would say now, the jobs ahead of it included. */
void job_pending_reason(struct core *c, const struct job *job, struct sched_answer *out);
void spec_pending_reason(struct core *c, const Boost__JobSpec *resolved, uint32_t uid, struct sched_answer *out);
void schedule_pass(struct core *c);

/* ---- core_place.c: from pending to StartAttempt ------------------------------------- */

int job_nodes(const struct job *job);
int job_devices_per_node(const struct job *job);
int spec_nodes(const Boost__JobSpec *resolved);
int spec_devices(const Boost__JobSpec *resolved);
enum sched_pool spec_pool(const Boost__JobSpec *resolved);
/* Devices were chosen (takes over `nodes`): its checkpoint is verified, then the attempt begins. */
bool core_settling(struct core *c); /* see core_adopted() */
void start_begin(struct core *c, struct job *job, struct node **nodes, int n);
/* start_begin() goes on with this; it ends with start_proven(), start_later() or a failed attempt. core_shared.c */
void shared_prove(struct core *c, struct job *job);
void start_proven(struct core *c, struct job *job);
/* Before that: it ends with start_searched() or start_later(). core_rescan.c */
void found_search(struct core *c, struct job *job);
void start_searched(struct core *c, struct job *job);
/* What it starts from is there: it ends with start_commit(), start_later() or HELD. core_data.c */
void start_fetch(struct core *c, struct job *job);
void start_commit(struct core *c, struct job *job); /* the attempt is there */
/* It is tried again, after CORE_RETRY_NS or `ns`; its devices are given back, and others may have them meanwhile.
 * `why` "": fetch_told() says it. */
void start_later(struct core *c, struct job *job, const char *why);
void start_later_in(struct core *c, struct job *job, const char *why, int64_t ns);
/* The job waits no longer to start, or for something else than before: how it went counts no more. */
void start_anew(struct core *c, struct job *job);
/* Fetching that has failed: ", try 5 of 10; last: status 500" of the try that is under way or comes next; else "". */
void fetch_told(const struct core *c, const struct job *job, char *out, size_t cap);
void start_cancel(struct core *c, struct job *job); /* gives reserved devices back */
/* Sends StartAttempt, StopAttempt: what state calls for, to every node or to one. */
void attempt_send(struct core *c, struct job *job, unsigned actions, const char *only_node);
char *checkpoint_dir_of(struct core *c, const struct job *job); /* caller frees */

/* ---- core_attempts.c: how an attempt goes ------------------------------------ */

/* Whether the site's prolog (or the like) is to be over there before its ranks can be. */
bool part_prepares(const struct attempt *a, const struct attempt_part *part);
/* Some rank says that `step` steps are done. */
void attempt_reached(struct job *job, struct attempt *a, int64_t step);
void attempt_rank_update(struct core *c, struct job *job, struct attempt *a, struct node *n,
                         const Boost__RankUpdate *u);
void attempt_rank_end(struct core *c, struct job *job, struct attempt *a, struct node *n, const Boost__ExitRecord *x);
/* Confirmed gone from the node, or `lost` with it. */
void attempt_part_over(struct core *c, struct job *job, struct attempt *a, const char *node, bool lost,
                       const char *note);
/* Anything but a rank's end: hang, lost node, rendezvous, refusal. Ignored when the cause is known already. */
void attempt_fail(struct core *c, struct job *job, struct attempt *a, Boost__ExitClass__Value class,
                  Boost__Reason__Value reason, const char *kind, const char *node, const char *text);
/* The rank made no progress. */
void attempt_hang(struct core *c, struct job *job, struct attempt *a, int rank, const char *text);
/* Finds the cause among the ends known; `force`: no more are to come, or not soon. */
void attempt_decide(struct core *c, struct job *job, struct attempt *a, bool force);
void attempt_mark_kill(struct core *c, struct job *job, struct attempt *a);
void backoff_arm(struct core *c, struct job *job); /* ACT_BACKOFF */
int64_t backoff_ns(struct core *c, int before); /* the delay after so many others */
void grace_arm(struct core *c, struct job *job, struct attempt *a);
int64_t attempt_run(struct core *c, struct job *job, int64_t now); /* its timers */

/* ---- core_ending.c --------------------------------------------------------------------- */

/* Ends the live attempt when all of it is over and nothing is waited for. */
void attempt_try_close(struct core *c, struct job *job);
/* The time that an ended attempt waits for its manifests begins anew. */
void attempt_close_anew(struct core *c, struct attempt *a);
void attempt_close(struct core *c, struct job *job); /* ACT_CLOSE_ATTEMPT */
/* The event of the state that the job has come to. */
void attempt_say_end(struct core *c, struct job *job, int attempt);
void ack_rank_end(struct core *c, const struct job *job, struct attempt *a, int rank);
/* All that the agents still owe of it, and that they may forget it. */
void ack_attempt_ends(struct core *c, struct job *job, struct attempt *a);

/* ---- core_cause.c: texts and classes of failures --------------------------------------- */

Boost__ExitClass__Value classify(const Boost__ExitRecord *x);
/* The first failing rank; -1 = none. *certain: no end that is still to come can be before it. */
int attempt_cause(const struct attempt *a, bool *certain);
Boost__Reason__Value cause_reason(const struct job *job, const struct attempt *a, int rank);
/* "rank 1 on gpu01: signal 9 (SIGKILL)"; with_log appends lines of their own: the collective
 * that it was in last, its last words. Caller frees. */
char *cause_text(const struct attempt *a, int rank, bool with_log);
/* "1, 3-5" */
char *rank_list(const int *ranks, int n);

/* ---- core_checkpoints.c -------------------------------------------------------------- */

void checkpoints_shards(struct core *c, struct job *job, struct attempt *a, const Boost__ShardBatch *batch);
void checkpoints_abandon_open(struct core *c, struct job *job, const struct attempt *a, const char *why);
/* Of an ended attempt: 0 nothing is open, 1 a manifest is on its way, 2 shards of the newest are missing. */
int checkpoints_open(const struct job *job, const struct attempt *a);
/* One of the attempt's that there was no room for; NULL: none. */
const struct checkpoint *checkpoints_disk_full(const struct job *job, const struct attempt *a);
/* What is no more to be kept becomes DELETING, so that no crash leaves a job without any. */
void checkpoints_retain(struct core *c, struct job *job);
/* Is there another one than k to go on from that a crash of now would leave? */
bool checkpoint_has_other(const struct job *job, const struct checkpoint *k);
bool checkpoint_in_use(struct core *c, const struct job *job, const struct checkpoint *k); /* may still be read */
/* The highest step ever committed by the attempts up to `attempt`, whatever became of it; -1 = none. */
int64_t checkpoints_highest(const struct job *job, int attempt);
/* Newest COMMITTED that is not damaged, below `below` when it is not NULL. */
struct checkpoint *checkpoints_newest(const struct job *job, const struct checkpoint *below);
int64_t checkpoints_durable_step(const struct job *job); /* of the newest that a crash of now would leave; -1 = none */
void checkpoints_renew(struct job *job); /* job->checkpoint_step, when one came or went */
/* Those of later steps: the job is to go on from `step`, and not from them. */
void checkpoints_set_aside(struct core *c, struct job *job, int64_t step);
void checkpoint_damaged(struct core *c, struct job *job, struct checkpoint *k, const char *node, const char *why);
/* One that was, and is found sound. */
void checkpoint_sound(struct core *c, struct job *job, struct checkpoint *k, const char *node);
/* Fills a packed list of the shards into *out (arrays from `arena`). */
MUST_USE int checkpoint_shard_records(const struct checkpoint *k, struct arena *arena, Boost__ShardRecord ***out);
bool checkpoint_whole(const struct checkpoint *k); /* all shards are there */
/* Its manifest is written. */
void checkpoint_commit(struct core *c, struct job *job, struct checkpoint *k, const char *node);
/* It is given up, since something of it could not be written on `node`; a job that runs shows why. */
void checkpoint_failed(struct core *c, struct job *job, struct checkpoint *k, const char *node, const char *why);

/* ---- core_ckpt_files.c --------------------------------------------------------------- */

bool checkpoint_file_work(const struct job *job);       /* whether it belongs to c->working */
void checkpoints_work(struct core *c, struct job *job); /* sends the tasks that are due */
void checkpoints_run(struct core *c);                   /* all that have work; their next tries are due_at() */
/* A deletion that waits for its file system is tried now. */
void checkpoint_hurry(struct core *c, struct checkpoint *k);
void checkpoints_hurry(struct core *c); /* all of these: a node that comes may have it */

/* ---- core_mirror.c: copies in an object store ------------------------------------------- */

bool mirror_wanted(const struct checkpoint *k); /* it is to be copied, or tried again some time */
void mirror_want(const struct job *job, struct checkpoint *k); /* it was committed */
void mirror_work(struct core *c, struct job *job); /* sends the task that is due, one at a time, the newest first */
/* "s3://bucket/prefix/<store>-<job>/step-<n>.a<k>", the caller's to free; NULL: it is to have none, or memory is out. */
char *mirror_copy_url(const struct checkpoint *k);
/* A user wants it: tried now, whatever came before; one that has a copy is compared with it. */
MUST_USE int mirror_ask(struct core *c, struct job *job, struct checkpoint *k, struct error *err);
void mirrors_hurry(struct core *c); /* a new agent may have keys and addresses that the one before did not have */

/* ---- core_agents.c ---------------------------------------------------------------------- */

void send_forget(struct core *c, struct node *n, int64_t job, int attempt);
void kv_answered(void *arg, const struct kv_asker *asker, const void *value, size_t len, const char *error);

/* ---- core_pace.c: slow ranks --------------------------------------------------------------- */

/* A record of the live attempt's. */
void pace_add(struct core *c, struct job *job, struct attempt *a, int rank, const Boost__MetricRecord *record);
void pace_free(struct attempt *a); /* it has ended */
/* "rank 3 on gpu02 is slow (1.6x)"; NULL: no rank is (or memory is out). */
char *pace_line(const struct job *job, struct arena *mem);
bool pace_show(const struct job *job, struct arena *mem, Boost__ShowReply *show); /* false: memory is out */

/* ---- core_metrics.c, core_logs.c ------------------------------------------------------- */

void metrics_batch(struct core *c, struct job *job, struct attempt *a, struct node *n, const Boost__MetricBatch *b);
void metrics_free(struct core *c);
void send_ack(struct core *c, const char *node, Boost__Ack *ack);
/* What a rank that runs printed last. */
void log_tail(struct attempt *a, const Boost__LogTail *tail);
/* Gives what is known of an ended attempt's output away to be kept. */
void logs_keep(struct core *c, const struct job *job, const struct attempt *a);
void parked_run(struct core *c, int64_t now);
int64_t parked_due(struct core *c);
void parked_free(struct core *c);

#endif
