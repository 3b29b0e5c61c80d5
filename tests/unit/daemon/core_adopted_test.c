/* A controller on an adopted copy of the store: the world has gone on since the copy was made. */
#include "tests/unit/daemon/core_world.h"

static void adopted(struct world *w)
{
    controller_restart(w);
    core_adopted(w->core, true);
}

/* What the copy knows is as it was: nothing is touched. */
static void nothing_has_changed(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    adopted(w);
    join_world(w, a);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    assert_true(x->alive && x->kills == 0);
    say_step(w, a, x, 9);
    pump(w);
    assert_int_equal(job_of(w, id)->step, 9);
    world_free(w);
}

/* Meanwhile attempt 4 began, of a job of which the copy knows attempt 1. It is fenced, and its number not used again. */
static void numbers_go_on(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    x->attempt = 4;
    struct fake_attempt other = *x; /* and a job that the copy does not know */
    other.job = 7;
    other.attempt = 1;
    struct fake_attempt *y = &a->attempts[a->n_attempts++];
    *y = other;
    other.job = 500000; /* no number of this store */
    a->attempts[a->n_attempts++] = other;
    a->slots = 6;
    adopted(w);
    join_world(w, a);
    advance(w, 5000);
    assert_false(x->alive || y->alive);
    struct job *job = job_of(w, id);
    assert_int_equal(job->n_attempts, 5);
    assert_non_null(strstr(job_attempt(job, 3)->text, "after the copy"));
    assert_true(job_attempt(job, 4)->fenced && job_attempt(job, 4)->end_ns);
    assert_int_equal(newest(w, a, id)->attempt, 5);
    int64_t next = submit(w);
    assert_true(next > 7 && next < 100000);
    /* It can be read again. */
    controller_restart(w);
    assert_int_equal(job_of(w, id)->n_attempts, 5);
    join_world(w, a);
    assert_int_equal(job_of(w, id)->n_attempts, 5);
    world_free(w);
}

/* What nothing was adopted for, or is past: a node that tells of attempts which never were has no numbers skipped. */
static void made_up_numbers_are_no_numbers(void **state)
{
    (void)state;
    for (int copy = 0; copy < 2; copy++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2);
        int64_t id = 0;
        if (copy)
            adopted(w);
        join_world(w, a);
        struct fake_attempt *x = run_job(w, a, &id);
        assert_int_equal(job_of(w, id)->searched, copy);
        struct fake_attempt *lie = &a->attempts[a->n_attempts++];
        *lie = *x;
        lie->attempt = 9000;
        lie->alive = false;
        disconnect(w, a);
        join_world(w, a);
        say_end_of(w, a, x, 0, (struct end){.exit_code = 1});
        advance(w, 60000);
        assert_int_equal(newest(w, a, id)->attempt, 2);
        assert_int_equal(job_of(w, id)->n_attempts, 2);
        world_free(w);
    }
}

/* A node that is not back yet may have what nobody knows of: nothing starts before, nor for ever. */
static void waits_for_every_node(void **state)
{
    (void)state;
    for (int comes = 0; comes < 2; comes++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2), *b = agent_add(w, "n2", 2);
        join_world(w, a);
        join_world(w, b);
        advance(w, 1000);
        adopted(w);
        join_world(w, a);
        int64_t id = submit(w);
        advance(w, 5000);
        assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__QUEUED);
        struct arena mem;
        arena_init(&mem, 1 << 20);
        Boost__JobSummary *s = core_summary(w->core, job_of(w, id), &mem);
        assert_non_null(strstr(s->info, "until every node has registered"));
        arena_free(&mem);
        if (comes)
            join_world(w, b);
        else
            advance(w, 30000); /* restart_grace_ms */
        advance(w, 100);
        assert_int_equal(job_of(w, id)->state, BOOST__JOB_STATE__VALUE__STARTING);
        world_free(w);
    }
}

/* The copy knows no checkpoint of it; since then one was committed, by an attempt that it does not know either. */
static void checkpoints_are_found(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    Boost__ShardRecord records[2] = {BOOST__SHARD_RECORD__INIT, BOOST__SHARD_RECORD__INIT};
    Boost__ShardRecord *list[2] = {&records[0], &records[1]};
    Boost__FoundCheckpoint good = BOOST__FOUND_CHECKPOINT__INIT, bad = BOOST__FOUND_CHECKPOINT__INIT;
    Boost__FoundCheckpoint made_up, *found[3] = {&made_up, &bad, &good};
    for (int r = 0; r < 2; r++) {
        records[r].has_rank = records[r].has_bytes = records[r].has_crc32c = true;
        records[r].rank = r;
        records[r].file = (char *)(uintptr_t) "rank-x";
        records[r].bytes = 10;
    }
    good.has_step = good.has_attempt = good.has_world = true;
    good.step = 70;
    good.attempt = 6;
    good.world = 2;
    good.n_shards = 2;
    good.shards = list;
    bad = good;
    bad.step = 90;
    bad.world = 3;
    made_up = good; /* in a directory that the user can write */
    made_up.step = 95;
    made_up.attempt = 2000000000;
    a->found = found;
    a->n_found = 3;
    x->alive = false; /* nothing of it is left on the node */
    x->forgotten = true;
    adopted(w);
    join_world(w, a);
    advance(w, 5000);
    struct job *job = job_of(w, id);
    assert_int_equal(a->finds, 1);
    assert_int_equal(job->checkpoint_step, 70);
    assert_int_equal(job->n_attempts, 7);
    assert_int_equal(job_live_attempt(job)->from_step, 70);
    assert_int_equal(count_events(w, id, "checkpoint-found"), 1);
    assert_int_equal(a->verifies, 1);
    /* Known from now on. */
    controller_restart(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 70);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_has_changed), cmocka_unit_test(numbers_go_on),
                                       cmocka_unit_test(made_up_numbers_are_no_numbers),
                                       cmocka_unit_test(waits_for_every_node),
                                       cmocka_unit_test(checkpoints_are_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
