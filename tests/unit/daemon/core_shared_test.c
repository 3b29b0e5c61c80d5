/* Several nodes: one checkpoint directory for all of them or no attempt; and heartbeats that come without the agent's
 * other connection. */
#include "tests/unit/daemon/core_world.h"

static int64_t submit_two(struct world *w)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *s = spec_new(&mem);
    Boost__Resources r = BOOST__RESOURCES__INIT;
    s->resources = &r;
    s->parallel->tp = 2;
    r.has_nodes = true;
    r.nodes = 2;
    int64_t id = submit_spec(w, s, false);
    arena_free(&mem);
    return id;
}

static void proven_once(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 1);
    join_world(w, a);
    join_world(w, b);
    int64_t id = submit_two(w);
    assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__STARTING);
    assert_int_equal(a->proofs, 2); /* put and remove */
    assert_int_equal(b->proofs, 1);
    struct fake_attempt *x = newest(w, a, id);
    assert_non_null(x);
    /* The next attempt on the same nodes is not asked again. */
    say_end_of(w, a, x, 0, (struct end){.exit_code = 1});
    pump(w);
    advance(w, 5000);
    assert_int_equal(job_of(w, id)->n_attempts, 2);
    assert_int_equal(a->proofs, 2);
    /* One that is new is, by one that has passed before. */
    disconnect(w, b);
    struct fake_agent *d = agent_add(w, "n3", 1);
    join_world(w, d);
    advance(w, 30000);
    assert_int_equal(job_of(w, id)->n_attempts, 3);
    assert_int_equal(a->proofs, 4);
    assert_int_equal(b->proofs, 1);
    assert_int_equal(d->proofs, 1);
    world_free(w);
}

static void not_shared(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 1);
    join_world(w, a);
    join_world(w, b);
    b->shared_code = ERR_NOT_FOUND;
    int64_t id = submit_two(w);
    struct job *job = job_of(w, id);
    assert_int_equal(job->state, BOOST__JOB_STATE__VALUE__FAILED);
    assert_int_equal(job->reason, BOOST__REASON__VALUE__SpecError);
    assert_non_null(strstr(job->reason_text, "what n1 writes there n2 does not see"));
    assert_null(fake_find(a, id, 1)); /* no rank was ever started */
    assert_null(fake_find(b, id, 1));
    /* And the devices are free. */
    b->shared_code = 0;
    int64_t next = submit_two(w);
    assert_int_equal(job_of(w, next)->state, BOOST__JOB_STATE__VALUE__STARTING);
    world_free(w);
}

static void cannot_be_asked(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 1);
    join_world(w, a);
    join_world(w, b);
    b->shared_code = ERR_UNREACHABLE;
    int64_t id = submit_two(w);
    assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__QUEUED);
    assert_non_null(strstr(job_of(w, id)->start_trouble, "cannot be seen yet"));
    b->shared_code = 0;
    advance(w, 6000);
    assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__STARTING);
    world_free(w);
}

/* What is wrong with the directory itself the attempt's own preflight says better. */
static void cannot_be_written(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 1);
    join_world(w, a);
    join_world(w, b);
    a->shared_code = ERR_IO;
    int64_t id = submit_two(w);
    assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__STARTING);
    assert_int_equal(b->proofs, 0);
    world_free(w);
}

static void heartbeats_alone(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    advance(w, 60000); /* behind the grace of a new controller */
    int64_t id;
    run_job(w, a, &id);
    disconnect(w, a);
    for (int s = 0; s < 30; s++) {
        core_agent_alive(w->core, "n1", a->instance);
        advance(w, 1000);
    }
    assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__RUNNING);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    /* Of another run of the agent they count nothing, and at some time they are no longer enough. */
    for (int s = 0; s < 20; s++) {
        core_agent_alive(w->core, "n1", "another");
        advance(w, 1000);
    }
    assert_int_not_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__RUNNING);
    core_agent_alive(w->core, "n1", a->instance); /* DOWN is DOWN until it registers */
    assert_int_not_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__RUNNING);
    core_agent_alive(w->core, "nobody", "x");
    world_free(w);
}

static void heartbeats_alone_end(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    advance(w, 60000);
    int64_t id;
    run_job(w, a, &id);
    disconnect(w, a);
    int s = 0;
    while (s < 100 && job_of(w, id)->state == BOOST__JOB_STATE__VALUE__RUNNING) {
        core_agent_alive(w->core, "n1", a->instance);
        advance(w, 1000);
        s++;
    }
    assert_in_range(s, 65, 75); /* six time-outs of 10 s, then one more */
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(proven_once),       cmocka_unit_test(not_shared),           cmocka_unit_test(cannot_be_asked),
        cmocka_unit_test(cannot_be_written), cmocka_unit_test(heartbeats_alone),     cmocka_unit_test(heartbeats_alone_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
