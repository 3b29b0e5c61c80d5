/* An agent: what it is told, what it finds in its run directories, what it does about
 * both. As daemon/agent_*.c: its memory is a view of its disk, a start is an adoption. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

/* ---- its runs ---- */

struct run *run_find(struct sim_node *n, int64_t job, int attempt)
{
    for (struct run *r = n->runs; r; r = r->next)
        if (r->job == job && r->attempt == attempt)
            return r;
    return NULL;
}

void run_free(struct run *r)
{
    for (int i = 0; i < r->n; i++)
        free(r->ranks[i].shards);
    free(r);
}

static void run_remove(struct sim *s, struct sim_node *n, struct run *gone)
{
    for (struct run **at_ = &n->runs; *at_; at_ = &(*at_)->next)
        if (*at_ == gone) {
            *at_ = gone->next;
            break;
        }
    trace(s, "%s has done with %lld.%d", n->name, (long long)gone->job, gone->attempt);
    run_free(gone);
}

/* ---- looking ---- */

bool agent_stopped(const struct sim *s, const struct sim_node *n)
{
    return n->powered && (s->now < n->paused_until || s->now < n->frozen_until);
}

int64_t agent_wakes(const struct sim_node *n)
{
    return n->paused_until > n->frozen_until ? n->paused_until : n->frozen_until;
}

static void kill_run(struct sim *s, struct run *r)
{
    r->kill = true;
    r->grace_end = 0;
    if (r->state == PREPARING || r->state == ENDED)
        return;
    r->stop_since = s->now;
    r->stop_file = true;
    if (r->keeper_alive)
        keeper_kill_all(s, r);
}

static void set_ended(struct sim *s, struct run *r)
{
    r->state = ENDED;
    r->ended_ns = s->now;
    if (r->cuda)
        report_devices(s, &s->nodes[r->node]);
}

/* SIGKILL to all, then records of the ends that nobody saw. */
static void take_over(struct sim *s, struct run *r)
{
    for (int i = 0; i < r->n; i++) {
        struct proc *p = &r->ranks[i];
        if (p->alive && s->now >= p->undying_until)
            p->alive = false;
    }
    if (run_has_process(r))
        return; /* at the next look */
    for (int i = 0; i < r->n; i++) {
        struct proc *p = &r->ranks[i];
        if (p->ended)
            continue;
        p->ended = p->lost = true;
        p->killed = r->kill;
        p->seq = ++r->seq;
        p->last_step = -1;
    }
    r->end_file = true;
    set_ended(s, r);
}

static void look_at_end(struct sim *s, struct run *r)
{
    if (r->end_file)
        set_ended(s, r);
    else if (r->keeper_was && !r->keeper_alive)
        take_over(s, r);
    else if (!r->keeper_was && r->kill) {
        r->end_file = true; /* "never started" */
        set_ended(s, r);
    } else if (!r->keeper_was) {
        r->state = PREPARED;
    }
}

static bool try_forget(struct sim *s, struct sim_node *n, struct run *r)
{
    bool owed = false;
    for (int i = 0; i < r->n; i++)
        owed = owed || r->ranks[i].metrics_acked < r->ranks[i].n_metrics;
    if (!r->forget || r->state != ENDED || (owed && s->now - r->ended_ns < 30 * S))
        return false;
    run_remove(s, n, r);
    return true;
}

/* True when r is gone. */
static bool look_at(struct sim *s, struct sim_node *n, struct run *r)
{
    if (r->state == PREPARING)
        return false; /* a thread works on it */
    if (r->state != ENDED)
        look_at_end(s, r);
    if (r->state == PREPARED && r->confirmed && !r->kill) {
        r->state = LIVE;
        keeper_start(s, r);
        return false;
    }
    report_run(s, n, r);
    if (r->grace_end && s->now >= r->grace_end && r->state != ENDED)
        kill_run(s, r);
    return try_forget(s, n, r);
}

static void look(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up || n->instance != e->guard || agent_stopped(s, n))
        return;
    for (struct run *r = n->runs, *next; r; r = next) {
        next = r->next;
        look_at(s, n, r);
    }
}

void agent_soon(struct sim *s, struct sim_node *n)
{
    struct event *e = at(s, s->now + between(s, MS, 50 * MS), look, "agent looks");
    e->node = n->index;
    e->guard = n->instance;
}

static void checked(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up || n->instance != e->guard)
        return;
    n->check_pending = false;
    report_health(s, n);
}

void agent_check(struct sim *s, struct sim_node *n)
{
    struct event *e = at(s, s->now + between(s, 20 * MS, 4 * S), checked, "health checked");
    e->node = n->index;
    e->guard = n->instance;
}

/* ---- orders ---- */

static bool older_alive(const struct sim_node *n, const Boost__AttemptStart *o)
{
    for (const struct run *r = n->runs; r; r = r->next)
        if (r->job == o->job && r->attempt != o->attempt && (r->attempt > o->attempt || r->state != ENDED))
            return true;
    return false;
}

static void prepared(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    struct run *r = run_find(n, e->a, (int)e->b);
    if (!n->agent_up || n->instance != e->guard || !r || r->state != PREPARING)
        return;
    if (agent_stopped(s, n)) {
        postpone(s, e, agent_wakes(n));
        return;
    }
    if (n->disk_full && !r->kill) {
        report_refused(s, n, r->job, r->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__DiskFull,
                       "no space left on device");
        run_remove(s, n, r);
        return;
    }
    r->complete = !n->disk_full;
    r->state = r->complete ? PREPARED : ENDED;
    r->end_file = !r->complete;
    look_at(s, n, r);
}

static bool take_gpus(const struct sim_node *n, struct run *r)
{
    int i = 0, rank;
    for (int g = 0; g < n->gpus && i < r->n; g++)
        if (!n->gpu_broken[g] && !gpu_user(n, g, &rank))
            r->gpu[i++] = g;
    return i == r->n;
}

static void start(struct sim *s, struct sim_node *n, const Boost__AttemptStart *o)
{
    struct run *r = run_find(n, o->job, o->attempt);
    if (older_alive(n, o)) {
        report_refused(s, n, o->job, o->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NONE,
                       "another attempt of the job is here");
        return;
    }
    if (r) {
        r->confirmed = true;
        look_at(s, n, r);
        return;
    }
    r = calloc(1, sizeof *r);
    if (!r)
        abort();
    *r = (struct run){.next = n->runs,
                      .node = n->index,
                      .job = o->job,
                      .attempt = o->attempt,
                      .world = o->world,
                      .confirmed = true,
                      .steps = o->spec->run->steps,
                      .every = o->spec->checkpoint->every_steps,
                      .rendezvous_ms = o->rendezvous_timeout_ms};
    if (o->n_ranks > MAX_SLOTS)
        violated(s, "no node over-committed", "%s is to run %zu ranks of one attempt", n->name, o->n_ranks);
    for (size_t i = 0; i < o->n_ranks; i++)
        r->ranks[r->n++] = (struct proc){.rank = o->ranks[i]};
    if (o->resume) {
        r->from_step = o->resume->step;
        if (!saved_name(o->resume->path, &r->from_job, &r->from_saved, &r->from_attempt))
            violated(s, "protocol", "%lld.%d is to start from %s", (long long)r->job, r->attempt, o->resume->path);
    }
    r->cuda = o->spec->resources && o->spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    if (r->cuda && !take_gpus(n, r)) {
        check_gpus(s, n, r);
        report_refused(s, n, r->job, r->attempt, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NoDevices,
                       "too few GPUs are free");
        run_free(r);
        return;
    }
    n->runs = r;
    if (r->cuda)
        report_devices(s, n);
    struct event *e = at(s, s->now + between(s, 2 * MS, 300 * MS), prepared, "run directory made");
    e->node = n->index;
    e->guard = n->instance;
    e->a = r->job;
    e->b = r->attempt;
}

static bool has_trained(const struct run *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->ranks[i].pid && r->ranks[i].phase >= TRAINING)
            return true;
    return false;
}

static void stop(struct sim *s, struct sim_node *n, const Boost__StopAttempt *o)
{
    struct run *r = run_find(n, o->job, o->attempt);
    if (!r) {
        report_node_end(s, n, o->job, o->attempt);
        return;
    }
    if (o->how != BOOST__STOP_ATTEMPT__HOW__KILL)
        r->asked_until = s->now + o->grace_ms * MS;
    if (r->state == ENDED) {
        r->end_sent = r->end_acked = false;
    } else if (o->how == BOOST__STOP_ATTEMPT__HOW__KILL || !has_trained(r)) {
        kill_run(s, r);
    } else {
        for (int i = 0; i < r->n; i++)
            r->ranks[i].stop = true;
        if (o->grace_ms > 0 && !r->grace_end)
            r->grace_end = s->now + o->grace_ms * MS;
    }
    look_at(s, n, r);
}

static void forget(struct sim *s, struct sim_node *n, int64_t job, int attempt)
{
    struct run *r = run_find(n, job, attempt);
    if (!r)
        return;
    r->forget = true;
    if (r->state != ENDED)
        kill_run(s, r);
    look_at(s, n, r);
}

static void verdict(struct sim *s, struct sim_node *n, const Boost__Verdict *v)
{
    struct run *r = run_find(n, v->job, v->attempt);
    if (!r)
        return;
    switch (v->what) {
    case BOOST__VERDICT__WHAT__FENCE:
        trace(s, "%s: %lld.%d is fenced", n->name, (long long)r->job, r->attempt);
        if (r->state != ENDED)
            kill_run(s, r);
        look_at(s, n, r);
        break;
    case BOOST__VERDICT__WHAT__FORGET:
        forget(s, n, v->job, v->attempt);
        break;
    default:
        r->confirmed = true;
        look_at(s, n, r);
        break;
    }
}

static void registered(struct sim *s, struct sim_node *n, const Boost__Registered *m)
{
    n->registered = true;
    n->heart = n->far ? n->conn_life : 0;
    if (s->now > n->calm_from)
        n->calm_from = s->now;
    n->retry_ms = 0;
    report_again(n);
    report_devices(s, n); /* what has changed since the registration was sent */
    report_health(s, n);
    for (size_t i = 0; i < m->n_verdicts; i++)
        verdict(s, n, m->verdicts[i]);
    /* What ranks still wait for in the rendezvous, and what they have put there. */
    for (struct run *r = n->runs; r; r = r->next)
        for (int i = 0; i < r->n; i++) {
            const struct proc *p = &r->ranks[i];
            if (p->alive && p->set_sent)
                report_kv(s, n, r, p, true);
            if (p->alive && p->get_open)
                report_kv(s, n, r, p, false);
        }
    agent_soon(s, n);
}

static void kv_answer(struct sim *s, struct sim_node *n, const Boost__KvAnswer *m)
{
    struct run *r = run_find(n, m->job, m->attempt);
    for (int i = 0; r && i < r->n; i++) {
        struct proc *p = &r->ranks[i];
        if (p->rank == m->rank && p->alive && p->get_open && m->id == p->pid * 2 + 1) {
            p->get_open = false;
            rank_joined(s, r, p, m->result->ok);
        }
    }
}

static void ask_checkpoint(struct sim *s, const struct run *r)
{
    struct gang *g = r ? gang_find(s, r->job, r->attempt) : NULL;
    if (g && g->started && !g->checkpoint_at)
        g->checkpoint_at = g->step + 1;
}

static void trace_order(struct sim *s, const struct sim_node *n, const Boost__ControllerMessage *m)
{
    const char *name = s->trace ? protobuf_c_message_descriptor_get_field(m->base.descriptor, m->body_case)->name : "";
    switch (m->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_START:
        trace(s, "%s <- start %lld.%d", n->name, (long long)m->start->start->job, m->start->start->attempt);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_STOP:
        trace(s, "%s <- stop %lld.%d, %s", n->name, (long long)m->stop->job, m->stop->attempt,
              m->stop->how == BOOST__STOP_ATTEMPT__HOW__KILL ? "kill" : "gently");
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_FORGET:
        trace(s, "%s <- forget %lld.%d", n->name, (long long)m->forget->job, m->forget->attempt);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED:
    case BOOST__CONTROLLER_MESSAGE__BODY_TASK:
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT:
        trace(s, "%s <- %s", n->name, name);
        break;
    default:
        break;
    }
}

void agent_order(struct sim *s, struct sim_node *n, const Boost__ControllerMessage *m)
{
    struct run *r;
    trace_order(s, n, m);
    switch (m->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED:
        registered(s, n, m->registered);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_START:
        start(s, n, m->start->start);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_STOP:
        stop(s, n, m->stop);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT:
        ask_checkpoint(s, run_find(n, m->checkpoint->job, m->checkpoint->attempt));
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_ACK:
        report_ack(n, m->ack);
        r = run_find(n, m->ack->job, m->ack->attempt);
        if (r && r->forget)
            try_forget(s, n, r);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_KV:
        kv_answer(s, n, m->kv);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_TASK:
        file_task(s, n, m->task);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_FORGET:
        forget(s, n, m->forget->job, m->forget->attempt);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECK_HEALTH:
        agent_check(s, n);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK:
        n->last_answer = s->now;
        break;
    default:
        break;
    }
    n->last_answer = s->now;
}

/* ---- its life ---- */

static void beat(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up || n->instance != e->guard)
        return;
    int64_t next = s->now + S;
    if (agent_stopped(s, n)) {
        next = agent_wakes(n);
        /* What it has not read yet will count as an answer. */
        n->last_answer = next;
    } else {
        if (n->conn && s->now - n->last_answer > 3 * S) {
            trace(s, "%s has no answer: it connects anew", n->name);
            link_close(s, n, true);
            link_retry(s, n);
        } else if (n->heart) {
            link_heart(s, n);
        } else if (n->registered) {
            Boost__Heartbeat h = BOOST__HEARTBEAT__INIT;
            Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
            m.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
            m.heartbeat = &h;
            link_up(s, n, &m);
        }
        look(s, e);
    }
    struct event *again = at(s, next, beat, "beat");
    again->node = n->index;
    again->guard = n->instance;
}

void agent_start(struct sim *s, struct sim_node *n)
{
    n->agent_up = true;
    n->instance = ++s->next_id;
    n->retry_ms = 0;
    n->conn = 0;
    n->heart = 0;
    n->check_pending = n->checks;
    if (n->checks)
        agent_check(s, n);
    n->registered = false;
    trace(s, "the agent of %s starts", n->name);
    for (struct run *r = n->runs, *next; r; r = next) {
        next = r->next;
        if (!r->complete) { /* nothing of it ran */
            run_remove(s, n, r);
            continue;
        }
        r->confirmed = r->kill = r->forget = r->end_sent = r->end_acked = false;
        r->grace_end = r->report_ns = 0;
        r->ended_ns = s->now;
        for (int i = 0; i < r->n; i++) {
            struct proc *p = &r->ranks[i];
            p->exit_sent = p->exit_acked = p->told = p->hang_told = false;
            p->shards_sent = p->shards_acked;
            p->metrics_sent = p->metrics_acked;
        }
        r->state = LIVE;
        look_at_end(s, r);
    }
    struct event *e = at(s, s->now + S, beat, "beat");
    e->node = n->index;
    e->guard = n->instance;
    link_retry(s, n);
}

static void starts_again(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up && n->powered && n->instance == e->guard)
        agent_start(s, n);
}

void agent_die(struct sim *s, struct sim_node *n, bool quietly)
{
    if (!n->agent_up)
        return;
    trace(s, "the agent of %s dies", n->name);
    link_close(s, n, !quietly);
    n->agent_up = false;
    n->instance = ++s->next_id;
    n->paused_until = 0;
    struct event *e = at(s, s->now + (one_in(s, 3) ? between(s, 5 * S, 40 * S) : between(s, 50 * MS, 2 * S)),
                         starts_again, "agent starts");
    e->node = n->index;
    e->guard = n->instance;
}
