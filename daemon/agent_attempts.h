/* The attempts whose run directories are on this node: what the agent knows of them,
 * is told to do with them and still owes the controller. The directory is the truth and
 * the memory here a view of it, so an agent can die at any time (D2, D5, D30).
 *
 *   agent_attempts.c  the table, adoption at start
 *   agent_orders.c    what the controller orders, acknowledges and forgets
 *   agent_launch.c    from an order to a running keeper
 *   agent_epilog.c    the site's script behind the last process
 *   agent_watch.c     what happens in a run directory: progress, ends, hangs, a lost keeper
 *   agent_forward.c   metrics and shard records, from offsets, until acknowledged
 *
 * All on the agent's loop, except where a function says "any thread". */
#ifndef BOOST_DAEMON_AGENT_ATTEMPTS_H
#define BOOST_DAEMON_AGENT_ATTEMPTS_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/cgroup.h"
#include "daemon/procid.h"
#include "proto/agent.pb-c.h"
#include "proto/base/error.h"
#include "proto/rankfiles.h"

struct agent;

#define ATTEMPT_GONE_PREFIX ".gone-" /* of run directories on their way out */

enum attempt_state {
    ATTEMPT_PREPARING, /* a thread checks the job's files and makes the run directory          */
    ATTEMPT_PREPARED,  /* the directory is complete, no keeper was ever seen                   */
    ATTEMPT_STARTING,  /* boost-keeper was run and has not answered                            */
    ATTEMPT_LIVE,      /* a keeper is or was there and not all is known to be over             */
    ATTEMPT_ENDED,     /* no process is left and every end is on disk                          */
};

enum { FORWARD_WINDOW = 8 };
/* One record log of one rank on its way to the controller. */
struct forward {
    uint64_t sent, acked;        /* offsets into the file */
    int64_t sent_seq, acked_seq; /* of the last record before each */
    struct {
        uint64_t offset;
        int64_t seq;
    } marks[FORWARD_WINDOW]; /* batches sent and not acknowledged, oldest first */
    int mark_count;
    int64_t last_ns; /* of the newest batch or acknowledgement */
    bool caught_up;  /* the last look found nothing to send */
    bool broken;     /* a record is damaged: what follows cannot be told from noise */
};

/* What tells a rank that hangs from one that works. */
struct hang_watch {
    bool running; /* `seen` is of this phase */
    struct rank_status seen;
    int64_t changed_ns;
    int64_t micro_ns;                  /* when `progress` last grew */
    double training_ns, evaluating_ns; /* of a unit of it, smoothed; 0 = no sample yet */
    bool reported;
};

struct agent_rank {
    int rank;
    bool has_pid;
    struct procid pid;
    struct forward metrics, shards;
    struct rank_status told; /* as in the last RankUpdate */
    bool has_told;
    int64_t told_ns;
    struct hang_watch hang;
    int64_t tail_end, tail_ns; /* of its output, as told last; monotonic */
    Boost__ExitRecord *exit; /* NULL: has not ended */
    bool exit_sent, exit_acked;
    bool exit_again; /* sent in this round of repeats */
    bool ask;        /* for a checkpoint: its control page could not be written yet */
    /* Of one whose device failed: until this look at the GPUs is over, or that time, its end is kept back. */
    uint64_t device_look;
    int64_t device_due;
};

struct agent_attempt {
    struct agent *agent;
    struct agent_attempt *next;
    char store_id[17];
    int64_t job;
    int32_t attempt;
    char run_dir[PATH_MAX];
    enum attempt_state state;
    Boost__AttemptStart *start;
    uint32_t uid; /* of the job's user */
    struct agent_rank *ranks;
    size_t rank_count;
    struct procid keeper;
    bool has_keeper;
    struct cgroup cgroup;
    uv_fs_event_t *events; /* its own memory: outlives the attempt until closed */
    int busy;              /* threads and keepers on their way that use it: it cannot go yet */
    bool confirmed;        /* by this run's controller: a keeper may be started */
    bool kill, forget;     /* wanted */
    bool going;            /* its files are being moved and removed */
    bool prolog_ran;       /* so that an epilog is due whatever becomes of it */
    bool epilog_runs;      /* of a thread; the attempt counts as alive until it has ended */
    bool epilog_over;
    int cancel_fd;         /* while it is PREPARING: an eventfd that ends its prolog; 0 = none */
    int64_t grace_end_ns;  /* then kill; 0 = no */
    int64_t ended_ns;      /* monotonic; when ENDED was seen */
    char note[512];        /* for NodeEnd: what was unusual about the end */
    bool end_sent, end_acked;
    /* Its end is kept back until this look finds that its GPUs have let go of its memory, or that time; 0: not yet. */
    uint64_t release_look;
    int64_t release_due, release_ns;
    bool released;
    bool acks_dirty;
    int64_t acks_ns;
    int64_t report_ns; /* when an end was last reported */
};

struct agent_attempt *attempts_find(struct agent *agent, int64_t job, int32_t attempt);
struct agent_rank *attempt_rank(struct agent_attempt *a, int rank);
bool attempt_alive(const struct agent_attempt *a); /* a process of it may be there */
/* The controller we are registered with owns it (or we do not know yet). */
bool attempt_is_ours(const struct agent_attempt *a);
/* "17.2" */
const char *attempt_text(const struct agent_attempt *a, char out[48]);

/* ERR_BUSY: an attempt that another node's name began runs in state_dir/attempts. The controller knows it by that name
 * only: under this one it would be nobody's, and be killed. Changes nothing. */
MUST_USE int attempts_check_names(const struct agent *agent, struct error *err);
/* Reads state_dir/attempts: adopts, and moves what cannot be read to lost+found. */
MUST_USE int attempts_load(struct agent *agent, struct error *err);
void attempts_close(struct agent *agent);

/* ---- orders ---- */

void attempts_start(struct agent *agent, const Boost__AttemptStart *order);
void attempts_stop(struct agent *agent, const Boost__StopAttempt *order);
void attempts_checkpoint(struct agent *agent, const Boost__RequestCheckpoint *order);
void attempts_ack(struct agent *agent, const Boost__Ack *ack);
void attempts_forget(struct agent *agent, int64_t job, int32_t attempt);
void attempts_verdict(struct agent *agent, const Boost__Verdict *verdict);
/* The link is up again, or lost: what was sent and not acknowledged has to go again. */
void attempts_resend(struct agent *agent);

/* Kills every process of it now, through the keeper while there is one. */
void attempt_kill(struct agent_attempt *a);
/* Takes over `start`. NULL when out of memory; `start` is then freed. */
struct agent_attempt *attempts_add(struct agent *agent, Boost__AttemptStart *start);
/* Takes it off the table; its directory is the caller's affair. */
void attempt_drop(struct agent_attempt *a);
/* Everything of it is known to the controller: logs go to state_dir/logs, the rest away, `a` too, unless it has to
 * wait. */
void attempt_try_forget(struct agent_attempt *a);
/* Asks the rank for a checkpoint, if that is owed. */
void attempt_ask(const struct agent_attempt *a, struct agent_rank *r);
/* In a thread: what these attempts of its job, which are over, left half-written of checkpoints. */
void attempt_clear_torn(const struct agent_attempt *a, int32_t first, int32_t last);

/* ---- agent_launch.c ---- */

/* Preflight, run directory and start.pb in a thread, then the keeper; or AttemptRefused. */
void attempt_launch(struct agent_attempt *a);
/* Tells what one that is PREPARING waits for, where that may take long. */
void attempt_tell_doing(struct agent_attempt *a);
/* For one that is PREPARED. */
void attempt_run_keeper(struct agent_attempt *a);
/* epilog: one of it runs, a NodeEnd follows. */
void attempt_refuse(struct agent *agent, int64_t job, int32_t attempt, Boost__ExitClass__Value class_,
                    Boost__Reason__Value reason, const struct error *why, bool epilog);

/* ---- agent_epilog.c ---- */

/* For one that is ENDED: runs the site's epilog, if there is one and it has not run. */
void attempt_epilog(struct agent_attempt *a);

/* ---- agent_watch.c ---- */

/* Begins to watch the run directory; the interval timer works without it. */
void attempt_watch(struct agent_attempt *a);
/* Looks at everything there is to see and reports what is new. */
void attempt_poll(struct agent_attempt *a);

/* ---- agent_forward.c ---- */

/* Sends what is new, as far as window and link allow; `caught_up` tells whether that was all. */
void forward_metrics(struct agent_attempt *a, struct agent_rank *r);
void forward_shards(struct agent_attempt *a, struct agent_rank *r);
void forward_ack(struct forward *f, int64_t seq);
void forward_rewind(struct forward *f); /* to what was acknowledged */

/* How far the controller has acknowledged, in <run_dir>/agent.acks: only saves sending again. */
void acks_load(struct agent_attempt *a);
void acks_save(struct agent_attempt *a);

#endif
