/* One seed from its start to its end, and the queue of what is to happen in it. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

/* ---- randomness ---- */

static uint64_t splitmix(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

uint64_t chance(struct sim *s)
{
    return splitmix(&s->rng);
}

int64_t between(struct sim *s, int64_t lo, int64_t hi)
{
    return hi <= lo ? lo : lo + (int64_t)(chance(s) % (uint64_t)(hi - lo + 1));
}

bool one_in(struct sim *s, int n)
{
    return chance(s) % (uint64_t)n == 0;
}

/* ---- trace, failure ---- */

void trace(struct sim *s, const char *fmt, ...)
{
    if (!s->trace)
        return;
    va_list args;
    printf("%10.4f ", (double)s->now / (double)S);
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    putchar('\n');
}

void violated(struct sim *s, const char *invariant, const char *fmt, ...)
{
    va_list args;
    snprintf(s->failure, sizeof s->failure, "%s", invariant);
    va_start(args, fmt);
    vsnprintf(s->why, sizeof s->why, fmt, args);
    va_end(args);
    trace(s, "VIOLATED %s: %s", invariant, s->why);
    longjmp(s->failed, 1);
}

/* ---- the queue: a heap by time, then by order of making ---- */

static bool earlier(const struct event *x, const struct event *y)
{
    return x->at != y->at ? x->at < y->at : x->order < y->order;
}

static struct event *push(struct sim *s, struct event e)
{
    if (s->n_heap == s->cap_heap) {
        s->cap_heap = s->cap_heap ? 2 * s->cap_heap : 256;
        s->heap = realloc(s->heap, (size_t)s->cap_heap * sizeof *s->heap);
        if (!s->heap)
            abort();
    }
    int i = s->n_heap++;
    while (i > 0 && earlier(&e, &s->heap[(i - 1) / 2])) {
        s->heap[i] = s->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    s->heap[i] = e;
    return &s->heap[i];
}

struct event *at(struct sim *s, int64_t when, void (*fn)(struct sim *, struct event *), const char *what)
{
    return push(s,
                (struct event){
                    .at = when < s->now ? s->now : when, .order = ++s->next_order, .fn = fn, .what = what, .node = -1});
}

void postpone(struct sim *s, struct event *e, int64_t when)
{
    struct event later = *e;
    later.at = when;
    e->data = NULL;
    push(s, later);
}

static struct event pop(struct sim *s)
{
    struct event first = s->heap[0], last = s->heap[--s->n_heap];
    int i = 0;
    for (int k = 1; k < s->n_heap; k = 2 * i + 1) {
        if (k + 1 < s->n_heap && earlier(&s->heap[k + 1], &s->heap[k]))
            k++;
        if (earlier(&last, &s->heap[k]))
            break;
        s->heap[i] = s->heap[k];
        i = k;
    }
    if (s->n_heap)
        s->heap[i] = last;
    return first;
}

static void digest(struct sim *s, uint64_t value)
{
    s->digest = (s->digest ^ value) * 0x100000001B3ULL;
    s->digest ^= s->digest >> 29;
}

static void step(struct sim *s)
{
    struct event e = pop(s);
    if (e.at > s->now)
        s->now = e.at;
    s->happened++;
    digest(s, (uint64_t)e.at);
    digest(s, (uint64_t)(unsigned char)e.what[0] << 16 | (uint64_t)(unsigned char)e.what[1] << 8 | (uint64_t)e.node);
    digest(s, s->rng);
    e.fn(s, &e);
    free(e.data);
    if (s->crash_soon)
        controller_die(s);
    check_always(s);
}

/* ---- a seed ---- */

void draw_world(struct sim *s)
{
    s->n_nodes = (int)between(s, 1, 4);
    for (int i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        *n = (struct sim_node){.index = i, .slots = (int)between(s, 1, MAX_SLOTS), .boot = 1, .powered = true};
        snprintf(n->name, sizeof n->name, "n%d", i + 1);
        n->given_up = -1;
        n->far = one_in(s, 2);
        n->checks = one_in(s, 2);
        n->gpus = one_in(s, 3) ? (int)between(s, 1, MAX_SLOTS) : 0;
        n->memory_mib = one_in(s, 2) ? 65536 : 0;
    }
    boost__boostd_config__init(&s->config);
    s->config.backoff_max_ms = (int32_t)between(s, 5, 60) * 1000;
    s->config.kill_confirm_ms = (int32_t)between(s, 5, 30) * 1000;
    s->config.rendezvous_timeout_ms = (int32_t)between(s, 20, 120) * 1000;
    if (one_in(s, 3))
        s->config.restart_grace_ms = (int32_t)between(s, 12, 30) * 1000;
    s->config.has_preempt = s->config.preempt = one_in(s, 2);
    s->config.has_user_running_jobs = one_in(s, 6);
    s->config.user_running_jobs = s->config.has_user_running_jobs ? (int32_t)between(s, 1, 2) : 0;
    s->to_submit = (int)between(s, 1, 6);
    s->control_gap = between(s, 5, 60) * S;
    s->faults_end = between(s, 30, 200) * S;
    s->fault_gap = between(s, 1, 25) * S;
    /* Each seed has a few kinds of faults only, so that each kind also comes without the others. */
    bool all = one_in(s, 4);
    for (int f = 0; f < FAULTS; f++)
        s->weight[f] = all || one_in(s, 4) ? (int)between(s, 1, 10) : 0;
    s->weight[FAULT_RANK_SPEC] = s->weight[FAULT_RANK_SPEC] && one_in(s, 4) ? 1 : 0;
}

enum { LONGEST_S = 6 * 3600, QUIET_S = 120 };

static void run(struct sim *s)
{
    draw_world(s);
    s->store = mem_new();
    s->store->on_arg = s;
    s->store->on_event = check_event;
    s->store->on_apply = check_apply;
    s->store->on_applied = check_applied;
    controller_boot(s);
    for (int i = 0; i < s->n_nodes; i++)
        agent_start(s, &s->nodes[i]);
    users_begin(s);
    faults_begin(s);
    while (s->now < s->faults_end)
        step(s);
    faults_heal(s);
    /* Nothing goes wrong any more: all that was begun comes to its end. */
    int64_t limit = s->now + LONGEST_S * S;
    while (!check_over(s)) {
        if (s->now > limit)
            check_late(s, LONGEST_S / 3600);
        step(s);
    }
    faults_bury(s);
    int64_t quiet = s->now + QUIET_S * S;
    while (s->now < quiet)
        step(s);
    check_end(s);
}

bool sim_run(struct sim *s, uint64_t seed, bool trace_it)
{
    memset(s, 0, sizeof *s);
    s->seed = seed;
    s->rng = seed * 0x2545F4914F6CDD1DULL + 0x632BE59BD9B4E019ULL;
    s->core_rng = seed ^ 0xA0761D6478BD642FULL;
    s->trace = trace_it;
    s->wall_offset = INT64_C(1700000000) * S;
    if (setjmp(s->failed))
        return false;
    run(s);
    return true;
}

void sim_free(struct sim *s)
{
    if (s->store)
        mem_crash(s->store);
    core_destroy(s->core);
    if (s->store)
        mem_free(s->store);
    while (s->n_heap)
        free(s->heap[--s->n_heap].data);
    free(s->heap);
    gangs_free(s);
    for (int i = 0; i < s->n_nodes; i++) {
        while (s->nodes[i].runs) {
            struct run *r = s->nodes[i].runs;
            s->nodes[i].runs = r->next;
            run_free(r);
        }
    }
    while (s->ops) {
        struct user_op *op = s->ops;
        s->ops = op->next;
        free(op);
    }
    free(s->saved);
}
