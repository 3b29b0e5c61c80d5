/* What the core's tests begin with. */
#ifndef BOOST_TESTS_CORE_WORLD_H
#define BOOST_TESTS_CORE_WORLD_H

#include "tests/world/world.h"

#define HELPER static __attribute__((unused))

HELPER struct checkpoint *ckpt(struct world *w, int64_t id, int64_t step, int attempt)
{
    struct checkpoint *k = job_checkpoint(job_of(w, id), step, attempt);
    assert_non_null(k);
    return k;
}

/* A job that keeps so many checkpoints, with copies in `mirror` (NULL: none), runs on node n1. */
struct life {
    struct world *w;
    struct fake_agent *a;
    struct fake_attempt *x; /* the first one */
    int64_t id;
    struct arena mem;
};

HELPER struct life *life_begin(int keep, const char *mirror)
{
    static struct life l;
    arena_init(&l.mem, 1 << 20);
    l.w = world_new();
    l.a = agent_add(l.w, "n1", 2);
    join_world(l.w, l.a);
    Boost__JobSpec *s = spec_new(&l.mem);
    s->checkpoint->mirror = mirror ? arena_strdup(&l.mem, mirror) : NULL;
    s->checkpoint->has_keep = 1;
    s->checkpoint->keep = keep;
    l.id = submit_spec(l.w, s, false);
    l.x = newest(l.w, l.a, l.id);
    return &l;
}

HELPER void life_end(struct life *l)
{
    arena_free(&l->mem);
    world_free(l->w);
}

HELPER void ckpt_answered(void *arg, int rc, const struct error *err, const struct core_ckpt *out)
{
    struct world *w = arg;
    w->replies++;
    w->reply_rc = rc;
    snprintf(w->reply_text, sizeof w->reply_text, "%s", rc ? err->message : out->text ? out->text : "");
}

/* What its owner asks of a checkpoint; step -1: no step is named, to: where a tool is to write. The answer is the
 * world's reply; replies is 0 while there is none. */
HELPER void ask_ckpt(struct world *w, int64_t id, Boost__CheckpointRequest__What what, int64_t step, const char *to)
{
    Boost__CheckpointRequest q = BOOST__CHECKPOINT_REQUEST__INIT;
    const struct core_user user = {.uid = job_of(w, id)->uid, .name = "u"};
    q.has_what = true;
    q.what = what;
    q.has_step = step >= 0;
    q.step = step;
    q.to = (char *)(uintptr_t)to;
    w->replies = 0;
    w->reply_rc = -1;
    core_checkpoint(w->core, job_of(w, id), &q, &user, ckpt_answered, w);
    pump(w);
}

#endif
