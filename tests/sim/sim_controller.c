/* The controller: its boots and deaths, its clock, and the disk under its store. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tests/sim/sim.h"

/* ---- what the core is given ---- */

static int64_t mono(void *arg)
{
    return ((struct sim *)arg)->now;
}

static int64_t wall(void *arg)
{
    const struct sim *s = arg;
    return s->now + s->wall_offset;
}

static uint64_t random_bits(void *arg)
{
    struct sim *s = arg;
    uint64_t z = s->core_rng += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    return z ^ (z >> 31);
}

static bool send(void *arg, const char *node, const Boost__ControllerMessage *m)
{
    struct sim *s = arg;
    for (int i = 0; i < s->n_nodes; i++) {
        struct sim_node *n = &s->nodes[i];
        if (strcmp(n->name, node) != 0)
            continue;
        if (!n->core_conn)
            return false;
        if (m->body_case == BOOST__CONTROLLER_MESSAGE__BODY_START)
            check_start(s, n, m->start->start);
        return link_down(s, n, m);
    }
    violated(s, "protocol", "a message for %s, which is no node", node);
}

static void changed(void *arg, int64_t job)
{
    (void)arg;
    (void)job;
}

static void log_line(void *arg, enum core_log_level level, const char *text)
{
    struct sim *s = arg;
    if (s->trace)
        trace(s, "  core %s%s", level >= CORE_LOG_WARN ? "(warns) " : "", text);
}

/* ---- timers ---- */

static void timer(struct sim *s, struct event *e)
{
    if (!s->core || e->guard != s->life || e->a != s->core_due)
        return;
    s->core_due = INT64_MAX;
    controller_poke(s);
}

void controller_poke(struct sim *s)
{
    if (!s->core)
        return;
    int64_t due = core_run(s->core);
    if (due <= s->now) {
        due = s->now + US;
        if (++s->restless > 100)
            violated(s, "the core comes to rest", "it has been due at once 100 times in a row");
    } else {
        s->restless = 0;
    }
    if (due >= s->core_due)
        return;
    s->core_due = due;
    struct event *e = at(s, due, timer, "core timer");
    e->guard = s->life;
    e->a = due;
}

/* ---- the store's disk ---- */

static void store_step(struct sim *s, struct event *e)
{
    (void)e;
    s->store_busy = false;
    if (s->store->sick || s->store->stuck)
        return; /* kicked again when it is mended */
    /* Some of those that wait, in order, as one group. */
    int group = (int)between(s, 1, 4);
    for (int i = 0; i < group && s->store->pending && s->core; i++) {
        bool crash = s->crash_at && --s->crash_at == 0;
        if (crash) {
            trace(s, "FAULT the controller dies at a commit (%s)",
                  s->crash_how == CRASH_LOST      ? "before it is durable"
                  : s->crash_how == CRASH_DURABLE ? "durable, untold"
                                                  : "told, not acted");
            s->crash_soon = true;
            if (s->crash_how == CRASH_LOST)
                return;
            mem_commit_one(s->store, s->crash_how == CRASH_TOLD);
            return;
        }
        mem_commit_one(s->store, true);
        controller_poke(s);
    }
    store_kick(s);
}

void store_kick(struct sim *s)
{
    if (s->store_busy || !s->store->pending || s->store->sick || s->store->stuck)
        return;
    s->store_busy = true;
    int64_t slow = s->now < s->store_slow_until ? between(s, 100 * MS, 3 * S) : between(s, 100 * US, 5 * MS);
    at(s, s->now + slow, store_step, "store commits");
}

static void queued(void *arg)
{
    store_kick(arg);
}

/* ---- life and death ---- */

void controller_boot(struct sim *s)
{
    struct error err;
    struct core_store api = mem_api(s->store);
    struct core_ops ops = {.arg = s,
                           .mono_ns = mono,
                           .wall_ns = wall,
                           .random = random_bits,
                           .send = send,
                           .changed = changed,
                           .log = log_line,
                           .uid = 500};
    s->store->on_arg = s;
    s->store->on_queued = queued;
    s->life = ++s->next_id;
    s->boots++;
    s->core_up = s->now;
    s->core_due = INT64_MAX;
    s->restless = 0;
    trace(s, "the controller starts");
    for (int i = 0; i < s->n_nodes; i++) {
        s->nodes[i].heard = s->now;
        s->nodes[i].core_sick = s->nodes[i].drained = false;
    }
    if (core_create(&s->config, &api, &ops, &s->core, &err))
        violated(s, "boot", "the controller does not start: %s", err.message);
    controller_poke(s);
}

static void boot_again(struct sim *s, struct event *e)
{
    if (!s->core && e->guard == s->life)
        controller_boot(s);
}

void controller_die(struct sim *s)
{
    s->crash_soon = false;
    s->crash_at = 0;
    if (!s->core)
        return;
    trace(s, "the controller is dead");
    mem_crash(s->store);
    core_destroy(s->core);
    s->core = NULL;
    s->store_busy = false;
    for (int i = 0; i < s->n_nodes; i++)
        s->nodes[i].core_conn = 0; /* its sockets are closed: agents find out when they next hear or say something */
    int64_t down = one_in(s, 3) ? between(s, 5 * S, 50 * S) : between(s, 50 * MS, 3 * S);
    struct event *e = at(s, s->now + down, boot_again, "controller boots");
    e->guard = s->life;
}
