/* Keepers and ranks: processes and the files they leave. The ranks of an attempt do
 * their steps together, wherever they run, and stop, checkpoint and end at a step they
 * agree on; one that is gone, hung or frozen stops all. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

/* ---- finding ---- */

bool run_has_process(const struct run *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->ranks[i].alive)
            return true;
    return false;
}

struct gang *gang_find(struct sim *s, int64_t job, int attempt)
{
    for (struct gang *g = s->gangs; g; g = g->next)
        if (g->job == job && g->attempt == attempt)
            return g;
    return NULL;
}

void gangs_free(struct sim *s)
{
    while (s->gangs) {
        struct gang *g = s->gangs;
        s->gangs = g->next;
        free(g);
    }
}

static struct proc *rank_by_pid(struct sim *s, int node, uint64_t pid, struct run **run)
{
    for (struct run *r = s->nodes[node].runs; r; r = r->next)
        for (int i = 0; i < r->n; i++)
            if (r->ranks[i].pid == pid && pid) {
                *run = r;
                return &r->ranks[i];
            }
    return NULL;
}

static bool frozen(const struct sim *s, const struct run *r)
{
    return s->now < s->nodes[r->node].frozen_until;
}

/* ---- ends ---- */

static void keeper_looks(struct sim *s, struct run *r)
{
    struct sim_node *n = &s->nodes[r->node];
    if (r->keeper_alive && !run_has_process(r)) {
        r->keeper_alive = false;
        r->end_file = true;
    }
    if (n->agent_up)
        agent_soon(s, n);
}

void rank_end(struct sim *s, struct run *r, struct proc *p, int code, int signal, bool done)
{
    if (!p->alive || s->now < p->undying_until)
        return;
    p->alive = false;
    if (!r->keeper_alive)
        return; /* nobody sees it */
    p->ended = true;
    p->seq = ++r->seq;
    p->code = code;
    p->signal = signal;
    p->done = done;
    p->killed = r->stop_file && !(code == 0 && signal == 0 && done);
    p->last_step = p->step;
    trace(s, "rank %d of %lld.%d on %s ends: code %d signal %d at step %lld", p->rank, (long long)r->job, r->attempt,
          s->nodes[r->node].name, code, signal, (long long)p->step);
    keeper_looks(s, r);
}

static void kill_now(struct sim *s, struct event *e)
{
    struct run *r = run_find(&s->nodes[e->node], e->a, (int)e->b);
    if (!r || !r->keeper_alive)
        return;
    if (frozen(s, r)) {
        postpone(s, e, s->nodes[e->node].frozen_until);
        return;
    }
    int64_t again = 0;
    for (int i = 0; i < r->n; i++) {
        if (s->now < r->ranks[i].undying_until && r->ranks[i].undying_until > again && r->ranks[i].alive)
            again = r->ranks[i].undying_until;
        rank_end(s, r, &r->ranks[i], 0, 9, false);
    }
    keeper_looks(s, r);
    if (!again)
        return;
    struct event *later = at(s, again, kill_now, e->what);
    later->node = e->node;
    later->a = e->a;
    later->b = e->b;
}

void keeper_kill_all(struct sim *s, struct run *r)
{
    struct event *e = at(s, s->now + between(s, MS, 60 * MS), kill_now, "keeper kills");
    e->node = r->node;
    e->a = r->job;
    e->b = r->attempt;
}

void keeper_die(struct sim *s, struct run *r)
{
    if (!r->keeper_alive)
        return;
    trace(s, "the keeper of %lld.%d on %s dies", (long long)r->job, r->attempt, s->nodes[r->node].name);
    r->keeper_alive = false;
    if (s->nodes[r->node].agent_up)
        agent_soon(s, &s->nodes[r->node]);
}

void ranks_power_off(struct sim *s, struct sim_node *n)
{
    (void)s;
    for (struct run *r = n->runs; r; r = r->next) {
        r->keeper_alive = false;
        for (int i = 0; i < r->n; i++) {
            r->ranks[i].alive = false;
            r->ranks[i].undying_until = 0;
        }
    }
}

/* ---- shards ---- */

static void shard_written(struct sim *s, struct event *e)
{
    struct run *r;
    struct proc *p = rank_by_pid(s, e->node, e->guard, &r);
    if (!p || !p->alive)
        return;
    if (frozen(s, r)) {
        postpone(s, e, s->nodes[e->node].frozen_until);
        return;
    }
    bool failed = s->nodes[e->node].disk_full;
    p->shards = realloc(p->shards, (size_t)(p->n_shards + 1) * sizeof *p->shards);
    if (!p->shards)
        abort();
    p->shards[p->n_shards++] = (struct shard_record){.step = e->a, .failed = failed};
    if (!failed)
        saved_shard(s, r->job, e->a, r->attempt, r->world, p->rank);
    p->writing--;
    if (s->nodes[e->node].agent_up)
        agent_soon(s, &s->nodes[e->node]);
    if (p->leaving && p->writing == 0)
        rank_end(s, r, p, 0, 0, true);
}

static void write_shard(struct sim *s, struct run *r, struct proc *p, int64_t step)
{
    p->writing++;
    struct event *e = at(s, s->now + between(s, 5 * MS, one_in(s, 10) ? 4 * S : 300 * MS), shard_written, "shard");
    e->node = r->node;
    e->guard = p->pid;
    e->a = step;
}

/* ---- steps ---- */

struct all { /* the ranks of a gang, wherever they are */
    struct run *run[MAX_WORLD];
    struct proc *rank[MAX_WORLD];
    bool still; /* something of it is there, or may come */
};

static void gather(struct sim *s, const struct gang *g, struct all *all)
{
    memset(all, 0, sizeof *all);
    for (int i = 0; i < s->n_nodes; i++) {
        struct run *r = run_find(&s->nodes[i], g->job, g->attempt);
        if (!r)
            continue;
        all->still = all->still || r->state != ENDED || run_has_process(r);
        for (int k = 0; k < r->n; k++) {
            all->run[r->ranks[k].rank] = r;
            all->rank[r->ranks[k].rank] = &r->ranks[k];
        }
    }
}

static bool busy_writing(const struct gang *g, const struct all *all)
{
    for (int i = 0; i < g->world; i++)
        if (all->rank[i]->writing)
            return true;
    return false;
}

static void one_step(struct sim *s, struct gang *g, struct all *all)
{
    bool stop = false;
    g->started = true;
    g->step++;
    for (int i = 0; i < g->world; i++) {
        struct proc *p = all->rank[i];
        p->step = g->step;
        p->moved = s->now;
        stop = stop || p->stop;
    }
    all->rank[0]->n_metrics++;
    if (stop && !g->stop_at)
        g->stop_at = g->step + 1;
    bool last = g->step >= g->steps;
    bool leave = last || (g->stop_at && g->step >= g->stop_at);
    bool due = (g->every > 0 && g->step % g->every == 0) || (g->checkpoint_at && g->step >= g->checkpoint_at);
    if (leave || (due && !busy_writing(g, all))) {
        g->checkpoint_at = 0;
        for (int i = 0; i < g->world; i++) {
            write_shard(s, all->run[i], all->rank[i], g->step);
            all->rank[i]->leaving = leave;
        }
        g->finished = g->finished || last;
    }
}

static void gang_remove(struct sim *s, struct gang *gone)
{
    for (struct gang **at_ = &s->gangs; *at_; at_ = &(*at_)->next)
        if (*at_ == gone) {
            *at_ = gone->next;
            free(gone);
            return;
        }
}

static void tick(struct sim *s, struct event *e)
{
    struct gang *g = gang_find(s, e->a, (int)e->b);
    if (!g)
        return;
    struct all all;
    gather(s, g, &all);
    bool together = true, gone = false;
    for (int i = 0; i < g->world; i++) {
        const struct proc *p = all.rank[i];
        bool there = p && p->alive;
        gone = gone || (p && p->pid && !p->alive);
        together = together && there && p->phase == TRAINING && !p->hung && !p->leaving && !frozen(s, all.run[i]);
    }
    if (together)
        one_step(s, g, &all);
    /* Those who wait for a peer that is gone find out, most of them. */
    for (int i = 0; i < g->world && gone && !g->silent; i++) {
        struct proc *p = all.rank[i];
        if (p && p->alive && !p->hung && !p->leaving && p->phase >= LOADING && !frozen(s, all.run[i]) && one_in(s, 5))
            rank_end(s, all.run[i], p, 65, 0, false);
    }
    if (!all.still) {
        gang_remove(s, g);
        return;
    }
    struct event *again = at(s, s->now + g->step_ns, tick, "step");
    again->a = e->a;
    again->b = e->b;
}

static struct gang *gang_get(struct sim *s, const struct run *r)
{
    struct gang *g = gang_find(s, r->job, r->attempt);
    if (g)
        return g;
    g = calloc(1, sizeof *g);
    if (!g)
        abort();
    struct sim_job *job = job_by_id(s, r->job);
    *g = (struct gang){.next = s->gangs,
                       .job = r->job,
                       .attempt = r->attempt,
                       .world = r->world,
                       .step = r->from_step,
                       .from_step = r->from_step,
                       .steps = r->steps,
                       .every = r->every,
                       .step_ns = job ? job->step_ns : 200 * MS,
                       .silent = one_in(s, 6)};
    s->gangs = g;
    struct event *e = at(s, s->now + g->step_ns, tick, "step");
    e->a = g->job;
    e->b = g->attempt;
    return g;
}

/* ---- from the start to training ---- */

static void advance(struct sim *s, struct event *e);

static void advance_in(struct sim *s, const struct run *r, const struct proc *p, int64_t ns)
{
    struct event *e = at(s, s->now + ns, advance, "rank goes on");
    e->node = r->node;
    e->guard = p->pid;
}

static void advance(struct sim *s, struct event *e)
{
    struct run *r;
    struct proc *p = rank_by_pid(s, e->node, e->guard, &r);
    struct sim_node *n = &s->nodes[e->node];
    if (!p || !p->alive || p->hung)
        return;
    if (frozen(s, r)) {
        advance_in(s, r, p, n->frozen_until - s->now);
        return;
    }
    p->moved = s->now;
    if (p->phase == LAUNCHED) {
        p->phase = RENDEZVOUS;
        p->set_sent = p->get_open = true;
        if (n->agent_up) {
            report_kv(s, n, r, p, true);
            report_kv(s, n, r, p, false);
        }
        advance_in(s, r, p, r->rendezvous_ms * MS);
    } else if (p->phase == RENDEZVOUS) {
        rank_end(s, r, p, 66, 0, false); /* nobody came */
    } else if (p->phase == LOADING) {
        check_loaded(s, r);
        p->phase = TRAINING;
    }
    if (n->agent_up)
        agent_soon(s, n);
}

void rank_joined(struct sim *s, struct run *r, struct proc *p, bool ok)
{
    if (p->phase != RENDEZVOUS)
        return;
    if (!ok) {
        rank_end(s, r, p, 66, 0, false);
        return;
    }
    p->joined = true;
    p->phase = LOADING;
    p->moved = s->now;
    advance_in(s, r, p, between(s, 50 * MS, 3 * S));
    agent_soon(s, &s->nodes[r->node]);
}

void keeper_start(struct sim *s, struct run *r)
{
    if (r->keeper_was)
        return;
    check_spawn(s, r);
    r->keeper_was = r->keeper_alive = true;
    gang_get(s, r);
    trace(s, "%lld.%d runs on %s, from step %lld", (long long)r->job, r->attempt, s->nodes[r->node].name,
          (long long)r->from_step);
    for (int i = 0; i < r->n; i++) {
        struct proc *p = &r->ranks[i];
        p->pid = ++s->next_id;
        p->alive = true;
        p->phase = LAUNCHED;
        p->step = r->from_step;
        p->moved = s->now;
        advance_in(s, r, p, between(s, 20 * MS, 400 * MS));
    }
}
