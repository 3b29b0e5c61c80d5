/* Jobs that differ in what they ask of the scheduler, in the world of core_world.h. Each test program includes it
 * once, instead of that. */
#ifndef BOOST_TESTS_CORE_WANTS_H
#define BOOST_TESTS_CORE_WANTS_H

#include "tests/unit/daemon/core_world.h"

/* What a test's jobs differ in. */
struct want {
    const struct core_user *user; /* NULL: ann */
    int priority;                 /* 0: 50 */
    int nodes, tp;                /* 0: 1 */
    int64_t limit_s, mib;
    const char *constraint, *nodelist, *after;
    bool exclusive, held;
};

/* 0: refused, and reply_text says why. */
HELPER int64_t try_want(struct world *w, struct want want)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    Boost__Resources *r = arena_alloc(&mem, sizeof *r);
    boost__resources__init(r);
    s->resources = r;
    s->parallel->tp = want.tp ? want.tp : 1;
    s->has_priority = want.priority > 0;
    s->priority = want.priority;
    s->has_time_limit_s = want.limit_s > 0;
    s->time_limit_s = want.limit_s;
    r->has_nodes = want.nodes > 0;
    r->nodes = want.nodes ? want.nodes : 1;
    r->has_memory_mib = want.mib > 0;
    r->memory_mib = want.mib;
    r->has_exclusive = r->exclusive = want.exclusive;
    r->constraint = want.constraint ? arena_strdup(&mem, want.constraint) : r->constraint;
    r->nodelist = want.nodelist ? arena_strdup(&mem, want.nodelist) : r->nodelist;
    char *after[] = {(char *)(uintptr_t)want.after};
    s->after = after;
    s->n_after = want.after != NULL;
    w->reply_rc = -1;
    core_submit(w->core, s, want.user ? want.user : &user_ann, want.held, on_submit, w);
    pump(w);
    arena_free(&mem);
    return w->reply_rc ? 0 : w->reply_job;
}

HELPER int64_t submit_want(struct world *w, struct want want)
{
    int64_t id = try_want(w, want);
    if (!id)
        fail_msg("submit: %s", w->reply_text);
    return id;
}

HELPER const char *info(struct world *w, int64_t id)
{
    static struct arena mem;
    arena_free(&mem);
    arena_init(&mem, 1 << 20);
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), &mem);
    assert_non_null(s);
    return s->info;
}

/* Every rank of the job has made a step. */
HELPER void runs(struct world *w, int64_t id)
{
    struct attempt *a = job_live_attempt(job_of(w, id));
    assert_non_null(a);
    for (int p = 0; p < a->n_parts; p++) {
        struct fake_agent *agent = agent_of(w, a->parts[p].node);
        struct fake_attempt *x = newest(w, agent, id);
        say_step(w, agent, x, x->from_step + 1);
    }
    pump(w);
    assert_state(w, id, RUNNING);
}

HELPER void ends(struct world *w, int64_t id)
{
    struct attempt *a = job_live_attempt(job_of(w, id));
    int n = a->n_parts;
    char nodes[4][32];
    for (int p = 0; p < n; p++)
        snprintf(nodes[p], sizeof nodes[p], "%s", a->parts[p].node);
    for (int p = 0; p < n; p++) {
        struct fake_agent *agent = agent_of(w, nodes[p]);
        say_finished(w, agent, newest(w, agent, id));
    }
    advance(w, 1000);
    assert_state(w, id, COMPLETED);
}

/* A boostd with another configuration and nothing in its store, in place of the one that runs. */
HELPER void reconfigured(struct world *w)
{
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    boot(w);
}

#endif
