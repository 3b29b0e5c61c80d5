/* One job: its states, the table of transitions, and its in-memory record.
 *
 * The state machine is data (job_table.c): (state, event) -> (next state, actions).
 * job_step() is pure: it only looks the pair up and says what to do; an illegal pair
 * is reported to the caller, who logs and counts it. core.c builds the
 * transaction and runs the actions. */
#ifndef BOOST_DAEMON_JOB_H
#define BOOST_DAEMON_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/job.pb-c.h"
#include "proto/rpc.pb-c.h"

enum job_event {
    EV_PLACED,           /* the scheduler found devices: an attempt begins             */
    EV_ALL_STEPPED,      /* every rank finished its first step                         */
    EV_FAILED_INFRA,     /* infrastructure: restart, no budget eaten                   */
    EV_FAILED_APP,       /* application, budget left                                   */
    EV_FAILED_FINAL,     /* spec or data error, budget gone                            */
    EV_NO_PROGRESS,      /* too many attempts without a later checkpoint               */
    EV_ATTEMPT_GONE,     /* every node of the attempt confirmed or is fenced and lost  */
    EV_COMPLETED,        /* every rank ended clean with COMPLETED                      */
    EV_STOPPED,          /* every rank ended clean after a stop                        */
    EV_BACKOFF_OVER,
    EV_CANCEL,
    EV_HOLD,
    EV_RELEASE,
    EV_TIME_LIMIT,
    EV_COUNT
};

/* Bits: what the core does once the transition is durable. All idempotent. */
enum job_action {
    ACT_NONE = 0,
    ACT_START = 1 << 0,        /* send StartAttempt to every node of the attempt      */
    ACT_STOP_TERM = 1 << 1,    /* finish the step, checkpoint, end; grace timer       */
    ACT_KILL = 1 << 2,         /* kill now and wait for the nodes to confirm          */
    ACT_BACKOFF = 1 << 3,      /* arm the back-off timer                              */
    ACT_RELEASE_DEVICES = 1 << 4,
    ACT_SCHEDULE = 1 << 5,     /* a scheduling pass is due                            */
    ACT_CLOSE_ATTEMPT = 1 << 6, /* end the attempt's row, abandon its open checkpoints */
    ACT_FINISH = 1 << 7,       /* terminal: end times, notify waiters                 */
};

struct job_transition {
    bool legal;
    Boost__JobState__Value next;
    /* STOPPING: where it goes once the attempt is gone; kept when >= 0 */
    int stop_target;
    unsigned actions;
};
/* stop_target is the job's while STOPPING, otherwise ignored. */
struct job_transition job_step(Boost__JobState__Value state, int stop_target, enum job_event event);
const char *job_event_name(enum job_event e);
const char *job_state_name(Boost__JobState__Value s); /* "QUEUED" */
bool job_state_terminal(Boost__JobState__Value s);
bool job_state_live(Boost__JobState__Value s); /* an attempt may hold devices */

#endif
