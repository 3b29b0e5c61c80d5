/* Where a job's time goes, in full: over restarts of the controller, with checkpoint stalls, in device-seconds. */
#include <math.h>

#include "tests/unit/daemon/core_world.h"

static Boost__Goodput goodput(struct world *w, int64_t id)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__ShowReply *show = core_show(w->core, job_of(w, id), &mem);
    assert_non_null(show);
    Boost__Goodput g = *show->goodput;
    arena_free(&mem);
    return g;
}

#define assert_near(value, want)                                                                    \
    do {                                                                                            \
        double v = (value);                                                                         \
        if (fabs(v - (want)) > 0.11)                                                                \
            fail_msg("%s:%d: " #value " is %.3f, not %.3f", __FILE__, __LINE__, v, (double)(want)); \
    } while (0)

static void away(struct world *w, struct fake_agent *a, int64_t ms)
{
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    queue_drop(w);
    w->now += ms * NS_PER_MS;
    a->connected = false;
    boot(w);
    join_world(w, a);
    pump(w);
}

/* Ranks train on while the controller is away: its time is theirs. */
static void time_without_a_controller_counts(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id, second;
    struct fake_attempt *x = run_job(w, a, &id);
    second = submit(w);
    advance(w, 10000);
    say_checkpoint(w, a, x, 20); /* writes the row */
    pump(w);
    away(w, a, 500000);
    advance(w, 5000);
    assert_state(w, id, RUNNING);
    assert_near(goodput(w, id).productive_s, 515);
    assert_near(goodput(w, id).device_s, 2 * 515);
    assert_near(goodput(w, second).queue_s, 515);
    assert_near(goodput(w, second).device_s, 0);
    /* A wall clock that was set back adds nothing. */
    say_checkpoint(w, a, x, 40);
    pump(w);
    w->wall_offset -= 3600 * NS_PER_S;
    away(w, a, 1000);
    assert_near(goodput(w, id).productive_s, 515);
    world_free(w);
}

static void say_stall(struct world *w, struct fake_agent *a, struct fake_attempt *x, double ms)
{
    const struct named_value stall = {"ckpt_ms", ms};
    say_values(w, a, x, 0, 20, &stall, 1);
    x->metrics_seq[0]--; /* its answer was lost: it comes again, and counts once */
    say_values(w, a, x, 0, 20, &stall, 1);
}

static void stalls_are_not_productive(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    advance(w, 20000);
    say_stall(w, a, x, 4000);
    pump(w);
    assert_near(goodput(w, id).stall_s, 4);
    assert_near(goodput(w, id).productive_s, 16);
    advance(w, 1000);
    say_checkpoint(w, a, x, 20);
    pump(w);
    away(w, a, 10000);
    assert_near(goodput(w, id).stall_s, 4);
    assert_near(goodput(w, id).productive_s, 27);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(time_without_a_controller_counts),
        cmocka_unit_test(stalls_are_not_productive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
