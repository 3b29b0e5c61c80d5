/* The state machine of a job, as a table. What it means is in daemon/README.md. */
#include "daemon/job.h"

enum {
    QUEUED = BOOST__JOB_STATE__VALUE__QUEUED,
    HELD = BOOST__JOB_STATE__VALUE__HELD,
    STARTING = BOOST__JOB_STATE__VALUE__STARTING,
    RUNNING = BOOST__JOB_STATE__VALUE__RUNNING,
    RECOVERING = BOOST__JOB_STATE__VALUE__RECOVERING,
    STOPPING = BOOST__JOB_STATE__VALUE__STOPPING,
    COMPLETED = BOOST__JOB_STATE__VALUE__COMPLETED,
    FAILED = BOOST__JOB_STATE__VALUE__FAILED,
    CANCELLED = BOOST__JOB_STATE__VALUE__CANCELLED,
    TIMEOUT = BOOST__JOB_STATE__VALUE__TIMEOUT,
};

enum { KEEP = -1, TO_TARGET = -2 };
#define TARGET(s) (1U << (s))
/* Where a stop that does not end the job may be going: the user may still change that. */
#define RETURNING  (TARGET(HELD) | TARGET(QUEUED) | TARGET(RECOVERING))
#define ANY_TARGET (RETURNING | TARGET(CANCELLED) | TARGET(TIMEOUT) | TARGET(FAILED))

struct row {
    int state;
    unsigned targets; /* of STOPPING: the row holds for these stop targets */
    enum job_event event;
    int next;
    int target;
    unsigned actions;
};

static const struct row table[] = {
    {QUEUED, 0, EV_PLACED, STARTING, KEEP, ACT_START},
    {QUEUED, 0, EV_HOLD, HELD, KEEP, ACT_SCHEDULE},
    {QUEUED, 0, EV_CANCEL, CANCELLED, KEEP, ACT_FINISH | ACT_SCHEDULE},
    {QUEUED, 0, EV_CANCEL_NOW, CANCELLED, KEEP, ACT_FINISH | ACT_SCHEDULE},

    {HELD, 0, EV_RELEASE, QUEUED, KEEP, ACT_SCHEDULE},
    {HELD, 0, EV_CANCEL, CANCELLED, KEEP, ACT_FINISH},
    {HELD, 0, EV_CANCEL_NOW, CANCELLED, KEEP, ACT_FINISH},

    /* No rank has more than its first step to lose: nothing is asked to checkpoint. */
    {STARTING, 0, EV_ALL_STEPPED, RUNNING, KEEP, ACT_NONE},
    {STARTING, 0, EV_FAILED_INFRA, RECOVERING, KEEP, ACT_KILL},
    {STARTING, 0, EV_FAILED_APP, RECOVERING, KEEP, ACT_KILL},
    {STARTING, 0, EV_FAILED_FINAL, STOPPING, FAILED, ACT_KILL},
    {STARTING, 0, EV_COMPLETED, COMPLETED, KEEP, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {STARTING, 0, EV_CANCEL, STOPPING, CANCELLED, ACT_KILL},
    {STARTING, 0, EV_CANCEL_NOW, STOPPING, CANCELLED, ACT_KILL},
    {STARTING, 0, EV_HOLD, STOPPING, HELD, ACT_KILL},
    {STARTING, 0, EV_TIME_LIMIT, STOPPING, TIMEOUT, ACT_KILL},
    {STARTING, 0, EV_REQUEUE, STOPPING, QUEUED, ACT_KILL},
    {STARTING, 0, EV_RESTART, STOPPING, RECOVERING, ACT_KILL},

    {RUNNING, 0, EV_FAILED_INFRA, RECOVERING, KEEP, ACT_KILL},
    {RUNNING, 0, EV_FAILED_APP, RECOVERING, KEEP, ACT_KILL},
    {RUNNING, 0, EV_FAILED_FINAL, STOPPING, FAILED, ACT_KILL},
    {RUNNING, 0, EV_COMPLETED, COMPLETED, KEEP, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {RUNNING, 0, EV_CANCEL, STOPPING, CANCELLED, ACT_STOP_TERM},
    {RUNNING, 0, EV_CANCEL_NOW, STOPPING, CANCELLED, ACT_KILL},
    {RUNNING, 0, EV_HOLD, STOPPING, HELD, ACT_STOP_TERM},
    {RUNNING, 0, EV_TIME_LIMIT, STOPPING, TIMEOUT, ACT_STOP_TERM},
    {RUNNING, 0, EV_REQUEUE, STOPPING, QUEUED, ACT_STOP_TERM},
    {RUNNING, 0, EV_RESTART, STOPPING, RECOVERING, ACT_STOP_TERM},

    {RECOVERING, 0, EV_ATTEMPT_GONE, RECOVERING, KEEP, ACT_CLOSE_ATTEMPT | ACT_BACKOFF | ACT_SCHEDULE},
    {RECOVERING, 0, EV_NO_PROGRESS, HELD, KEEP, ACT_CLOSE_ATTEMPT | ACT_SCHEDULE},
    /* Given up for a hang or a lost node, and yet every rank got to the end before the kill. */
    {RECOVERING, 0, EV_COMPLETED, COMPLETED, KEEP, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {RECOVERING, 0, EV_BACKOFF_OVER, RECOVERING, KEEP, ACT_SCHEDULE},
    {RECOVERING, 0, EV_PLACED, STARTING, KEEP, ACT_START},
    {RECOVERING, 0, EV_CANCEL, STOPPING, CANCELLED, ACT_KILL},
    {RECOVERING, 0, EV_CANCEL_NOW, STOPPING, CANCELLED, ACT_KILL},
    {RECOVERING, 0, EV_HOLD, STOPPING, HELD, ACT_KILL},
    {RECOVERING, 0, EV_TIME_LIMIT, STOPPING, TIMEOUT, ACT_KILL},
    {RECOVERING, 0, EV_REQUEUE, STOPPING, QUEUED, ACT_KILL},
    {RECOVERING, 0, EV_RESTART, STOPPING, RECOVERING, ACT_KILL},

    {STOPPING, TARGET(RECOVERING), EV_ATTEMPT_GONE, TO_TARGET, KEEP, ACT_CLOSE_ATTEMPT | ACT_BACKOFF | ACT_SCHEDULE},
    {STOPPING, TARGET(HELD) | TARGET(QUEUED), EV_ATTEMPT_GONE, TO_TARGET, KEEP, ACT_CLOSE_ATTEMPT | ACT_SCHEDULE},
    {STOPPING, TARGET(CANCELLED) | TARGET(TIMEOUT) | TARGET(FAILED), EV_ATTEMPT_GONE, TO_TARGET, KEEP,
     ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    /* A job that finished its last step while it was asked to stop has finished. */
    {STOPPING, ANY_TARGET & ~TARGET(FAILED), EV_COMPLETED, COMPLETED, KEEP,
     ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {STOPPING, ANY_TARGET, EV_FAILED_INFRA, STOPPING, KEEP, ACT_KILL},
    {STOPPING, ANY_TARGET, EV_FAILED_APP, STOPPING, KEEP, ACT_KILL},
    {STOPPING, ANY_TARGET, EV_FAILED_FINAL, STOPPING, KEEP, ACT_KILL},
    {STOPPING, ANY_TARGET, EV_GRACE_OVER, STOPPING, KEEP, ACT_KILL},
    {STOPPING, RETURNING, EV_CANCEL, STOPPING, CANCELLED, ACT_NONE},
    {STOPPING, RETURNING, EV_CANCEL_NOW, STOPPING, CANCELLED, ACT_KILL},
    {STOPPING, TARGET(CANCELLED) | TARGET(TIMEOUT), EV_CANCEL_NOW, STOPPING, KEEP, ACT_KILL},
    {STOPPING, TARGET(QUEUED) | TARGET(RECOVERING), EV_HOLD, STOPPING, HELD, ACT_NONE},
    {STOPPING, TARGET(HELD), EV_RELEASE, STOPPING, QUEUED, ACT_NONE},
};

struct job_transition job_step(Boost__JobState__Value state, int stop_target, enum job_event event)
{
    struct job_transition t = {.legal = false, .next = state, .stop_target = -1, .actions = ACT_NONE};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const struct row *r = &table[i];
        if (r->state != (int)state || r->event != event)
            continue;
        if (r->state == STOPPING &&
            (stop_target < 0 || stop_target >= JOB_STATES || !(r->targets & TARGET(stop_target))))
            continue;
        t.legal = true;
        t.next = (Boost__JobState__Value)(r->next == TO_TARGET ? stop_target : r->next);
        t.stop_target = r->target;
        t.actions = r->actions;
        return t;
    }
    return t;
}

const char *job_event_name(enum job_event e)
{
    static const char *const names[EV_COUNT] = {
        [EV_PLACED] = "placed",
        [EV_ALL_STEPPED] = "all-stepped",
        [EV_FAILED_INFRA] = "failed-infra",
        [EV_FAILED_APP] = "failed-application",
        [EV_FAILED_FINAL] = "failed-final",
        [EV_NO_PROGRESS] = "no-progress",
        [EV_ATTEMPT_GONE] = "attempt-gone",
        [EV_COMPLETED] = "completed",
        [EV_BACKOFF_OVER] = "back-off-over",
        [EV_CANCEL] = "cancel",
        [EV_CANCEL_NOW] = "cancel-now",
        [EV_HOLD] = "hold",
        [EV_RELEASE] = "release",
        [EV_TIME_LIMIT] = "time-limit",
        [EV_REQUEUE] = "requeue",
        [EV_RESTART] = "restart",
        [EV_GRACE_OVER] = "grace-over",
    };
    return (unsigned)e < EV_COUNT ? names[e] : "?";
}

const char *job_state_name(Boost__JobState__Value s)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(&boost__job_state__value__descriptor, (int)s);
    return v ? v->name : "?";
}

bool job_state_terminal(Boost__JobState__Value s)
{
    return s >= BOOST__JOB_STATE__VALUE__COMPLETED;
}

bool job_state_live(Boost__JobState__Value s)
{
    return s >= BOOST__JOB_STATE__VALUE__STARTING && s <= BOOST__JOB_STATE__VALUE__STOPPING;
}
