/* Where a job's time goes: queue, restart, replay, productive, detection; and the
 * run time that its limit counts. One stretch is open at a time, by the monotonic
 * clock; the totals so far go into the row whenever it is written, with the time of
 * the clock since boot. What passes while the controller is down counts for the state
 * that the next one finds: ranks train on meanwhile, and who waits goes on waiting.
 * The wall clock, which anybody may set, is asked only how long ago a row of another
 * boot was written. */
#include "daemon/core_internal.h"

static double *account_field(struct job *job, int kind)
{
    switch (kind) {
    case ACCOUNT_QUEUE:
        return &job->queue_s;
    case ACCOUNT_RESTART:
        return &job->restart_s;
    case ACCOUNT_REPLAY:
        return &job->replay_s;
    case ACCOUNT_PRODUCTIVE:
        return &job->productive_s;
    default:
        return NULL;
    }
}

static double open_s(struct core *c, const struct job *job)
{
    return job->account_since ? (double)(now_mono(c) - job->account_since) / (double)NS_PER_S : 0;
}

/* Starting counts as restart time, the first one too: no step is made in it. */
static enum core_account kind_of(const struct job *job)
{
    const struct attempt *a = job_live_attempt(job);
    switch (job->state) {
    case STATE(QUEUED):
        return ACCOUNT_QUEUE;
    case STATE(STARTING):
    case STATE(RECOVERING):
        return ACCOUNT_RESTART;
    case STATE(RUNNING):
        return a && a->to_step < a->replay_until ? ACCOUNT_REPLAY : ACCOUNT_PRODUCTIVE;
    case STATE(STOPPING):
        return a && a->running_ns && !a->kill ? ACCOUNT_PRODUCTIVE : ACCOUNT_NONE;
    default:
        return ACCOUNT_NONE;
    }
}

void account_state(struct core *c, struct job *job)
{
    int kind = (int)kind_of(job);
    if (kind == job->account && job->account_since)
        return;
    double *field = account_field(job, job->account);
    if (field)
        *field += open_s(c, job);
    job->account = kind;
    job->account_since = now_mono(c);
}

int64_t account_away(struct core *c, const struct job *job)
{
    if (!job->accounted_ns)
        return 0;
    if (job->accounted_boot_ns && now_boot(c) >= job->accounted_boot_ns)
        return now_boot(c) - job->accounted_boot_ns;
    int64_t away = now_wall(c) - job->accounted_ns;
    return away > 0 ? away : 0; /* a clock that was set back says nothing */
}

void account_adopted(struct core *c, struct job *job)
{
    double *field = account_field(job, (int)kind_of(job));
    if (field)
        *field += (double)account_away(c, job) / (double)NS_PER_S;
    job->accounted_ns = 0;
    account_state(c, job);
}

void account_stall(struct job *job, double seconds)
{
    double *field = account_field(job, job->account);
    if (!field || !(seconds > 0))
        return;
    *field -= seconds; /* of the open stretch, which is not in yet */
    job->stall_s += seconds;
}

int64_t attempt_lasted(struct core *c, const struct attempt *a)
{
    int64_t lasted = a->end_ns ? a->end_ns - a->start_ns : a->start_boot ? now_boot(c) - a->start_boot : 0;
    return lasted > 0 ? lasted : 0;
}

double attempt_devices(const struct attempt *a)
{
    return a->world + (double)a->n_spares * (a->n_parts ? a->world / a->n_parts : 0);
}

/* Of the newest attempt it goes on. */
static double device_seconds(struct core *c, const struct job *job)
{
    double sum = 0;
    for (int i = 0; i < job->n_attempts; i++)
        sum += attempt_devices(job->attempts[i]) * (double)attempt_lasted(c, job->attempts[i]) / (double)NS_PER_S;
    return sum;
}

void account_detection(struct core *c, struct job *job, int64_t silent_ns)
{
    double *field = account_field(job, job->account);
    double all = open_s(c, job);
    double silent = (double)silent_ns / (double)NS_PER_S;
    if (!field || silent <= 0)
        return;
    if (silent > all)
        silent = all;
    *field += all - silent;
    job->detection_s += silent;
    job->account_since = now_mono(c);
}

void account_totals(struct core *c, const struct job *job, Boost__Goodput *out)
{
    struct job copy = *job;
    double *field = account_field(&copy, job->account);
    if (field)
        *field += open_s(c, job);
    out->has_stall_s = out->has_device_s = true;
    out->stall_s = copy.stall_s;
    out->device_s = device_seconds(c, job);
    out->has_productive_s = out->has_detection_s = out->has_restart_s = out->has_replay_s = out->has_queue_s = true;
    out->productive_s = copy.productive_s;
    out->detection_s = copy.detection_s;
    out->restart_s = copy.restart_s;
    out->replay_s = copy.replay_s;
    out->queue_s = copy.queue_s;
}

double job_elapsed_s(struct core *c, const struct job *job)
{
    const struct attempt *newest = job_attempt(job, job->n_attempts);
    if (!job_state_live(job->state) || !newest)
        return job->run_s;
    return job->run_s + (double)(now_mono(c) - newest->start_mono) / (double)NS_PER_S;
}

double job_time_limit_lead_s(const struct job *job)
{
    double lead = (2 * job->step_ms + 2 * (double)job->checkpoint_ms) / 1e3;
    double most = (double)job->resolved->time_limit_s / 2;
    return job->state != STATE(RUNNING) ? 0 : lead < most ? lead : most;
}

int64_t job_time_limit_due(const struct job *job)
{
    const struct attempt *newest = job_attempt(job, job->n_attempts);
    int64_t limit = job->resolved->time_limit_s;
    bool counts = job->state == STATE(STARTING) || job->state == STATE(RUNNING) || job->state == STATE(RECOVERING);
    if (limit <= 0 || !counts || !newest)
        return INT64_MAX;
    double left = (double)limit - job_time_limit_lead_s(job) - job->run_s;
    return newest->start_mono + (int64_t)(left * (double)NS_PER_S);
}
