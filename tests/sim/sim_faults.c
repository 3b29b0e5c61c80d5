/* What goes wrong: which, where and when is the seed's. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

const char *fault_name(int fault)
{
    static const char *const names[FAULTS] = {
        [FAULT_RANK_KILLED] = "rank killed",
        [FAULT_RANK_FAILS] = "rank fails",
        [FAULT_RANK_SPEC] = "rank finds the job in error",
        [FAULT_RANK_HANGS] = "rank hangs",
        [FAULT_RANK_UNDYING] = "rank that cannot be killed",
        [FAULT_KEEPER_KILLED] = "keeper killed",
        [FAULT_AGENT_KILLED] = "agent killed",
        [FAULT_AGENT_PAUSED] = "agent paused",
        [FAULT_NODE_REBOOTED] = "node rebooted",
        [FAULT_NODE_WIPED] = "node rebooted, disk new",
        [FAULT_NODE_FROZEN] = "node frozen",
        [FAULT_CUT_UP] = "link cut to the controller",
        [FAULT_CUT_DOWN] = "link cut from the controller",
        [FAULT_CUT_BOTH] = "link cut both ways",
        [FAULT_RESET] = "connection reset",
        [FAULT_SLOW] = "link slow",
        [FAULT_LOSSY] = "link repeats and overtakes",
        [FAULT_CONTROLLER_KILLED] = "controller killed",
        [FAULT_COMMIT_CRASH] = "controller to die at a commit",
        [FAULT_STORE_FULL] = "controller's disk full",
        [FAULT_STORE_SLOW] = "controller's disk slow",
        [FAULT_CLOCK] = "controller's clock jumps",
        [FAULT_HEALTH] = "node's health fails, or is well again",
        [FAULT_GPU] = "GPU breaks, or works again",
        [FAULT_DISK_FULL] = "node's disk full",
        [FAULT_DAMAGE] = "checkpoint damaged",
    };
    return names[fault];
}

/* ---- ranks ---- */

/* What holds for longer already is left. */
static void until_then(int64_t *field, int64_t until)
{
    if (until > *field)
        *field = until;
}

static struct proc *any_rank(struct sim *s, struct run **run)
{
    struct run *runs[64];
    struct proc *ranks[64];
    int n = 0;
    for (int i = 0; i < s->n_nodes; i++)
        for (struct run *r = s->nodes[i].runs; r; r = r->next)
            for (int k = 0; k < r->n && n < 64; k++)
                if (r->ranks[k].alive) {
                    runs[n] = r;
                    ranks[n++] = &r->ranks[k];
                }
    if (!n)
        return NULL;
    int at_ = (int)between(s, 0, n - 1);
    *run = runs[at_];
    return ranks[at_];
}

static void hurt_rank(struct sim *s, enum fault fault)
{
    struct run *r = NULL;
    struct proc *p = any_rank(s, &r);
    if (!p)
        return;
    struct sim_job *job = job_by_id(s, r->job);
    switch (fault) {
    case FAULT_RANK_KILLED:
        rank_end(s, r, p, 0, 9, false);
        break;
    case FAULT_RANK_FAILS:
        if (job && !one_in(s, 4)) {
            job->app_failures++;
            rank_end(s, r, p, one_in(s, 2) ? 7 : 0, one_in(s, 2) ? 11 : 0, false);
        } else {
            rank_end(s, r, p, 66, 0, false);
        }
        break;
    case FAULT_RANK_SPEC:
        if (job)
            job->wrong = true;
        rank_end(s, r, p, 64, 0, false);
        break;
    case FAULT_RANK_HANGS:
        p->hung = true;
        break;
    case FAULT_RANK_UNDYING:
        until_then(&p->undying_until, s->now + between(s, S, one_in(s, 3) ? 300 * S : 60 * S));
        break;
    default:
        keeper_die(s, r);
        break;
    }
}

/* ---- nodes ---- */

static void power_on(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (n->powered)
        return;
    n->powered = true;
    n->boot++;
    trace(s, "%s boots", n->name);
    agent_start(s, n);
}

static void power_off(struct sim *s, struct sim_node *n, bool wiped)
{
    if (!n->powered)
        return;
    agent_die(s, n, true);
    n->powered = false;
    n->frozen_until = n->paused_until = 0;
    ranks_power_off(s, n);
    while (wiped && n->runs) {
        struct run *r = n->runs;
        n->runs = r->next;
        run_free(r);
    }
    struct event *e = at(s, s->now + between(s, 2 * S, 60 * S), power_on, "node boots");
    e->node = n->index;
}

static void disk_has_room(struct sim *s, struct event *e)
{
    s->nodes[e->node].disk_full = false;
}

static int64_t a_while(struct sim *s)
{
    return s->now + (one_in(s, 2) ? between(s, 500 * MS, 5 * S) : between(s, 5 * S, 40 * S));
}

static void hurt_node(struct sim *s, enum fault fault)
{
    struct sim_node *n = &s->nodes[between(s, 0, s->n_nodes - 1)];
    int64_t until = a_while(s);
    trace(s, "  at %s", n->name);
    until_then(&n->calm_from, until);
    switch (fault) {
    case FAULT_AGENT_KILLED:
        agent_die(s, n, false);
        break;
    case FAULT_AGENT_PAUSED:
        until_then(&n->paused_until, until);
        break;
    case FAULT_NODE_REBOOTED:
    case FAULT_NODE_WIPED:
        power_off(s, n, fault == FAULT_NODE_WIPED);
        break;
    case FAULT_NODE_FROZEN:
        until_then(&n->frozen_until, until);
        break;
    case FAULT_CUT_UP:
        until_then(&n->cut_until[0], until);
        break;
    case FAULT_CUT_DOWN:
        until_then(&n->cut_until[1], until);
        break;
    case FAULT_CUT_BOTH:
        until_then(&n->cut_until[0], until);
        until_then(&n->cut_until[1], until);
        break;
    case FAULT_RESET:
        if (n->conn) {
            link_close(s, n, true);
            link_retry(s, n);
        }
        break;
    case FAULT_SLOW:
        until_then(&n->slow_until, until);
        n->slow_ns = between(s, 10 * MS, 3 * S);
        break;
    case FAULT_LOSSY:
        until_then(&n->lossy_until, until);
        break;
    case FAULT_HEALTH:
        n->sick = !n->sick;
        if (n->agent_up && n->checks)
            agent_check(s, n);
        break;
    case FAULT_GPU:
        if (n->gpus) {
            bool *broken = &n->gpu_broken[between(s, 0, n->gpus - 1)];
            *broken = !*broken;
            if (n->agent_up)
                report_devices(s, n);
        }
        break;
    default:
        n->disk_full = true;
        at(s, until, disk_has_room, "disk has room")->node = n->index;
        break;
    }
}

/* ---- the controller ---- */

static void store_mended(struct sim *s, struct event *e)
{
    (void)e;
    s->store->sick = 0;
    s->store->stuck = false;
    store_kick(s);
    controller_poke(s);
}

static void hurt_controller(struct sim *s, enum fault fault)
{
    int64_t until = a_while(s);
    for (int i = 0; i < s->n_nodes; i++)
        until_then(&s->nodes[i].calm_from, until + 10 * S);
    switch (fault) {
    case FAULT_CONTROLLER_KILLED:
        controller_die(s);
        break;
    case FAULT_COMMIT_CRASH:
        s->crash_at = (int)between(s, 1, 12);
        s->crash_how = (int)between(s, CRASH_LOST, CRASH_TOLD);
        break;
    case FAULT_STORE_FULL:
        s->store->sick = one_in(s, 3) ? 0 : ERR_NOSPACE;
        s->store->stuck = !s->store->sick;
        at(s, until, store_mended, "store mended");
        break;
    case FAULT_STORE_SLOW:
        until_then(&s->store_slow_until, until);
        break;
    default:
        s->wall_offset += between(s, -7200, 7200) * S;
        break;
    }
}

static void damage(struct sim *s)
{
    if (s->n_saved)
        s->saved[between(s, 0, s->n_saved - 1)].damaged = true;
}

/* ---- when ---- */

static void fault(struct sim *s, struct event *e)
{
    if (s->healed)
        return;
    int sum = 0, f = 0;
    for (int i = 0; i < FAULTS; i++)
        sum += s->weight[i];
    int64_t draw = between(s, 1, sum);
    while (draw > s->weight[f])
        draw -= s->weight[f++];
    trace(s, "FAULT %s", fault_name(f));
    s->faults++;
    if (f <= FAULT_KEEPER_KILLED)
        hurt_rank(s, (enum fault)f);
    else if (f == FAULT_DAMAGE)
        damage(s);
    else if (f >= FAULT_CONTROLLER_KILLED && f <= FAULT_CLOCK)
        hurt_controller(s, (enum fault)f);
    else
        hurt_node(s, (enum fault)f);
    at(s, s->now + between(s, one_in(s, 4) ? 0 : 100 * MS, 2 * s->fault_gap), fault, e->what);
}

void faults_begin(struct sim *s)
{
    for (int i = 0; i < FAULTS; i++)
        if (s->weight[i]) {
            at(s, between(s, S, 2 * s->fault_gap), fault, "fault");
            return;
        }
}

/* What is broken mends by itself: here only what would take long. */
void faults_heal(struct sim *s)
{
    s->healed = true;
    trace(s, "the last fault was; all is healed");
    s->crash_at = 0;
    s->store_slow_until = 0;
    s->store->sick = 0;
    s->store->stuck = false;
    store_kick(s);
    for (int i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        n->disk_full = false;
        n->cut_until[0] = n->cut_until[1] = 0;
        n->slow_until = n->lossy_until = 0;
        memset(n->gpu_broken, 0, sizeof n->gpu_broken);
        n->sick = false;
        if (n->agent_up && n->checks)
            agent_check(s, n);
        if (n->agent_up)
            report_devices(s, n);
    }
    users_release_all(s);
}

void faults_bury(struct sim *s)
{
    for (int i = 0; i < s->n_nodes; i++)
        for (struct run *r = s->nodes[i].runs; r; r = r->next)
            for (int k = 0; k < r->n; k++) {
                if (!r->ranks[k].alive || s->now >= r->ranks[k].undying_until)
                    continue;
                r->ranks[k].undying_until = s->now;
                if (r->stop_file && r->keeper_alive)
                    keeper_kill_all(s, r);
            }
}
