/* Slow ranks as the core tells them: from records of metrics to event, status and show, and not too often. */
#include "tests/unit/daemon/core_world.h"

/* A step of each rank: what it took outside of collectives, within a step as long as the longest. */
static void say_step_times(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step, double first,
                           double second)
{
    const double outside[2] = {first, second};
    double longest = first > second ? first : second;
    for (int i = 0; i < 2; i++) {
        const struct named_value times[] = {{"step_ms", longest}, {"comm_ms", longest - outside[i]}};
        say_values(w, a, x, i, step, times, 2);
    }
    pump(w);
}

static int64_t go(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step, int seconds,
                  double first, double second)
{
    for (int t = 0; t < seconds; t++) {
        for (int i = 0; i < 10; i++)
            say_step_times(w, a, x, ++step, first, second);
        advance(w, 1000);
    }
    return step;
}

static void assert_info(struct world *w, int64_t id, const char *has, const char *has_not)
{
    struct arena mem;
    arena_init(&mem, 4 << 20);
    const Boost__JobSummary *s = core_summary(w->core, job_of(w, id), &mem);
    if (has)
        assert_says(s->info, has);
    if (has_not)
        assert_null(strstr(s->info, has_not));
    arena_free(&mem);
}

static void a_slow_rank_is_told_with_its_node(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu02", 2);
    struct arena mem;
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    int64_t step = go(w, a, x, 1, 6, 50, 52);
    assert_int_equal(count_events(w, id, "straggler"), 0);
    assert_info(w, id, "gpu02", "slow");
    step = go(w, a, x, step, 8, 50, 80);
    assert_int_equal(count_events(w, id, "straggler"), 1);
    assert_says(event_of(w, id, "straggler")->text, "rank 1 on gpu02 is slow: 80.0 ms a step outside collectives, "
                                                    "1.6 times as long as rank 0 on gpu02 (50.0 ms)");
    assert_string_equal(event_of(w, id, "straggler")->node, "gpu02");
    assert_info(w, id, "gpu02; rank 1 on gpu02 is slow (1.6x)", NULL);
    arena_init(&mem, 4 << 20);
    const Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_int_equal(show->n_stragglers, 1);
    const Boost__StragglerInfo *s = show->stragglers[0];
    assert_true(s->rank == 1 && s->fastest_rank == 0 && !s->itself && s->outside_ms > 79 && s->fastest_ms < 51);
    assert_string_equal(s->node, "gpu02");
    arena_free(&mem);
    assert_state(w, id, RUNNING); /* nothing is done about it */
    step = go(w, a, x, step, 8, 50, 51);
    assert_int_equal(count_events(w, id, "straggler-over"), 1);
    assert_info(w, id, NULL, "slow");
    world_free(w);
}

static void it_goes_with_its_attempt(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    go(w, a, x, 1, 8, 50, 100);
    assert_int_equal(count_events(w, id, "straggler"), 1);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    assert_info(w, id, NULL, "slow");
    x = recovered(w, a, id);
    assert_info(w, id, NULL, "slow");
    go(w, a, x, x->from_step + 1, 8, 50, 50);
    assert_int_equal(count_events(w, id, "straggler"), 1);
    /* A restart of the controller forgets it, and learns anew. */
    controller_restart(w);
    join_world(w, a);
    x = newest(w, a, id);
    go(w, a, x, x->from_step + 200, 8, 100, 50);
    assert_int_equal(count_events(w, id, "straggler"), 2);
    world_free(w);
}

static void events_have_a_limit(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    int64_t step = 1;
    for (int i = 0; i < 12; i++) {
        step = go(w, a, x, step, 6, 50, 100);
        step = go(w, a, x, step, 6, 50, 50);
    }
    assert_int_equal(count_events(w, id, "straggler") + count_events(w, id, "straggler-over"), 6);
    assert_says(event_of(w, id, "straggler-over")->text, "not told for some minutes");
    for (int i = 0; i < 12; i++)
        advance(w, 60000);
    step = go(w, a, x, step, 6, 50, 100);
    assert_int_equal(count_events(w, id, "straggler"), 4);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_rank_is_told_with_its_node),
        cmocka_unit_test(it_goes_with_its_attempt),
        cmocka_unit_test(events_have_a_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
