/* What the simulator (tests/sim) has found, each in the smallest world that shows it. */
#include "tests/unit/daemon/core_world.h"

/* Its updates were lost, its shards were not: it ran, and may have to go without what it began from. */
static void what_sent_shards_is_not_started_again(void **state)
{
    (void)state;
    for (int restart = 0; restart < 2; restart++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "n1", 2);
        join_world(w, a);
        int64_t id = submit(w);
        pump(w);
        struct fake_attempt *x = newest(w, a, id);
        say_checkpoint(w, a, x, 20);
        pump(w);
        assert_state(w, id, STARTING);
        assert_int_equal(job_of(w, id)->checkpoint_step, 20);
        if (restart)
            controller_restart(w);
        else
            disconnect(w, a);
        x->forgotten = true; /* its disk is new */
        join_world(w, a);
        pump(w);
        assert_int_equal(x->starts, 1);
        assert_state(w, id, RECOVERING);
        assert_int_equal(job_of(w, id)->reason, REASON(NodeLost));
        world_free(w);
    }
}

/* An agent works on through a restart of the controller, and answers whoever is there. */
static void an_answer_to_an_earlier_run_is_none(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->answers = false;
    say_checkpoint(w, a, x, 20);
    pump(w);
    assert_int_equal(a->manifests, 1);
    uint64_t first = a->last_task;
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_int_equal(a->manifests, 2);
    assert_true(a->last_task != first);
    say_task(w, a->name, first, NULL);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, -1);
    say_task(w, a->name, a->last_task, NULL);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    world_free(w);
}

/* The store is found full while a job is on its way to it: its user is told no, so that it must not be placed by then.
 */
static void what_is_not_durable_is_not_placed(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    a->answers = false;
    w->store->stuck = true;
    assert_int_equal(submit_spec(w, spec_new(&mem), false), 0);
    advance(w, 2100); /* the preflight's time */
    w->store->sick = ERR_NOSPACE;
    advance(w, 6000);
    assert_int_equal(w->reply_rc, ERR_NOSPACE);
    w->store->stuck = false;
    w->store->sick = 0;
    pump(w);
    assert_state(w, 1, CANCELLED);
    assert_int_equal(job_of(w, 1)->n_attempts, 0);
    assert_int_equal(a->n_attempts, 0);
    arena_free(&mem);
    world_free(w);
}

/* What the controller drains for a process that cannot die it takes back itself; what an operator took out, it does
 * not. */
static void an_operators_cordon_outlives_the_controllers_drain(void **state)
{
    (void)state;
    static const struct core_user root = {.uid = 0, .name = "root"};
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    core_node_control(w->core, BOOST__NODE_CONTROL_REQUEST__VERB__CORDON, "n1", "a fan is loud", -1, &root, on_control,
                      w);
    pump(w);
    assert_int_equal(w->reply_rc, ERR_OK);
    a->obeys_kill = false;
    assert_int_equal(control(w, CANCEL, id, true), ERR_OK);
    advance(w, 31000);
    assert_state(w, id, CANCELLED);
    assert_says(event_of(w, 0, "kill-overdue")->text, "n1: job 1 attempt 1: 2 ranks not confirmed dead");
    kill_all(w, a, x);
    pump(w);
    id = submit(w);
    advance(w, 10000);
    assert_state(w, id, QUEUED);
    core_node_control(w->core, BOOST__NODE_CONTROL_REQUEST__VERB__RESUME, "n1", "", -1, &root, on_control, w);
    pump(w);
    assert_state(w, id, STARTING);
    world_free(w);
}

static int busy(struct world *w)
{
    struct arena mem;
    int n = 0;
    arena_init(&mem, 1 << 20);
    const Boost__NodesReply *r = core_nodes(w->core, &mem);
    for (size_t i = 0; i < r->n_nodes; i++)
        n += r->nodes[i]->cpu_slots_busy;
    arena_free(&mem);
    return n;
}

/* One device on each of so many nodes, and a spare one. */
static int64_t submit_with_spare(struct world *w, struct arena *mem, int nodes)
{
    static Boost__Resources resources;
    Boost__JobSpec *spec = spec_new(mem);
    boost__resources__init(&resources);
    spec->parallel->tp = 1;
    spec->parallel->has_dp = true;
    spec->parallel->dp = nodes;
    spec->resources = &resources;
    resources.has_nodes = resources.has_devices_per_node = resources.has_spares = true;
    resources.nodes = nodes;
    resources.devices_per_node = resources.spares = 1;
    return submit_spec(w, spec, false);
}

/* Under a limit on its user's running jobs the next attempt is placed without the spare, which has to come free. */
static void a_spare_goes_with_its_attempt(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    w->config.user_running_jobs = 1;
    controller_restart(w);
    for (int i = 0; i < 3; i++) {
        char name[8];
        snprintf(name, sizeof name, "n%d", i + 1);
        join_world(w, agent_add(w, name, 1));
    }
    int64_t id = submit_with_spare(w, &mem, 2);
    assert_int_equal(busy(w), 3);
    for (int k = 1; k <= 2; k++) {
        for (int i = 0; i < 2; i++)
            say_step(w, &w->agents[i], newest(w, &w->agents[i], id), 1);
        pump(w);
        assert_state(w, id, RUNNING);
        say_end_of(w, &w->agents[0], newest(w, &w->agents[0], id), 0, (struct end){.signal = 9});
        say_node_end(w, &w->agents[0], newest(w, &w->agents[0], id));
        for (int i = 0; i < 40 && job_of(w, id)->n_attempts == k; i++)
            advance(w, 250);
        assert_int_equal(job_of(w, id)->n_attempts, k + 1);
        assert_true(busy(w) <= 3);
    }
    assert_int_equal(control(w, CANCEL, id, true), ERR_OK);
    advance(w, 1000);
    assert_state(w, id, CANCELLED);
    assert_int_equal(busy(w), 0);
    arena_free(&mem);
    world_free(w);
}

/* The end is decided and the disk is full: told again, it is not taken off the agent's hands before the row is there,
 * or a crash would make the job run a second time. */
static void an_end_that_is_not_durable_stays_with_its_agent(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    checkpoint_at(w, a, x, x->steps);
    assert_int_equal(job_of(w, id)->checkpoint_step, 100);
    w->store->stuck = true;
    for (int i = 0; i < x->n_ranks; i++)
        say_end_of(w, a, x, i, (struct end){.done = true});
    say_node_end(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    disconnect(w, a);
    join_world(w, a); /* tells all again */
    pump(w);
    assert_false(x->forgotten);
    assert_false(x->end_acked[0] || x->node_end_acked);
    controller_restart(w);
    w->store->stuck = false;
    assert_state(w, id, RUNNING);
    join_world(w, a);
    advance(w, 20000);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    assert_true(x->forgotten && x->end_acked[0] && x->node_end_acked);
    world_free(w);
}

static void say_health(struct world *w, struct fake_agent *a, bool sound)
{
    Boost__FailedCheck failed = BOOST__FAILED_CHECK__INIT, *list = &failed;
    Boost__HealthReport report = BOOST__HEALTH_REPORT__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    report.failed = &list;
    report.n_failed = !sound;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HEALTH;
    m.health = &report;
    say(w, a->name, &m);
}

/* A node is found unsound while a checkpoint is verified for a job that is to start there. */
static void a_start_goes_with_its_nodes_health(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    pump(w);
    a->answers = false;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    for (int i = 0; i < 40 && !a->verifies; i++)
        advance(w, 250);
    assert_int_equal(a->verifies, 1);
    say_health(w, a, false);
    say_task(w, a->name, a->last_task, NULL);
    advance(w, 10000);
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    assert_state(w, id, RECOVERING);
    world_free(w);
}

/* Its node was found unsound and is well again, with a new controller in between: still the job's, or not its spare. */
static void a_spare_outlives_the_controller_on_an_unsound_node(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    struct fake_agent *a = agent_add(w, "n1", 1), *b = agent_add(w, "n2", 2);
    join_world(w, a);
    join_world(w, b);
    int64_t first = submit_with_spare(w, &mem, 1);
    assert_int_equal(busy(w), 2);
    say_health(w, b, false);
    pump(w);
    for (int k = 0; k < 2; k++) {
        controller_restart(w);
        join_world(w, a);
        join_world(w, b);
        say_health(w, b, true);
        pump(w);
        assert_int_equal(busy(w), 2);
        assert_int_equal(job_attempt(job_of(w, first), 1)->n_spares, 1);
        if (k == 0) {
            int64_t second = submit(w); /* two devices of a node */
            advance(w, 1000);
            assert_state(w, second, QUEUED);
        }
    }
    arena_free(&mem);
    world_free(w);
}

/* A job that waits for nodes has let its spare go, and the list of its last attempt still has it. */
static void a_spare_that_was_given_away_is_not_held_again(void **state)
{
    (void)state;
    static const struct core_user root = {.uid = 0, .name = "root"};
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    struct fake_agent *n[3];
    for (int i = 0; i < 3; i++) {
        char name[8];
        snprintf(name, sizeof name, "n%d", i + 1);
        join_world(w, n[i] = agent_add(w, name, 1));
    }
    int64_t first = submit_with_spare(w, &mem, 2);
    assert_int_equal(busy(w), 3);
    for (int i = 0; i < 2; i++) {
        core_node_control(w->core, BOOST__NODE_CONTROL_REQUEST__VERB__CORDON, n[i]->name, "x", -1, &root, on_control,
                          w);
        say_step(w, n[i], newest(w, n[i], first), 1);
    }
    pump(w);
    for (int i = 0; i < 2; i++) {
        say_end_of(w, n[i], newest(w, n[i], first), 0, (struct end){.signal = 9});
        say_node_end(w, n[i], newest(w, n[i], first));
    }
    advance(w, 5000);
    assert_state(w, first, RECOVERING);
    assert_int_equal(busy(w), 0);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->parallel->tp = 1;
    int64_t second = submit_spec(w, spec, false);
    advance(w, 1000);
    assert_state(w, second, STARTING);
    for (int k = 0; k < 2; k++) {
        controller_restart(w);
        for (int i = 0; i < 3; i++)
            join_world(w, n[i]);
        pump(w);
        assert_int_equal(busy(w), 1);
        assert_state(w, second, STARTING);
    }
    assert_int_equal(count_events(w, first, "spare-lost"), 1);
    assert_says(event_of(w, first, "spare-lost")->text, "others have its devices");
    arena_free(&mem);
    world_free(w);
}

/* Preempted, it has a spare on the list of its last attempt only: that does not put it before who it went for. */
static void a_job_without_its_spare_waits_its_turn(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    w->config.preempt = true;
    w->config.preempt_gap = 20;
    controller_restart(w);
    join_world(w, agent_add(w, "n1", 1));
    join_world(w, agent_add(w, "n2", 2));
    int64_t first = submit_with_spare(w, &mem, 1);
    assert_int_equal(busy(w), 2);
    Boost__JobSpec *spec = spec_new(&mem); /* two devices of a node: the spare has one of them */
    spec->has_priority = true;
    spec->priority = 90;
    int64_t second = submit_spec(w, spec, false);
    advance(w, 5000);
    assert_state(w, second, STARTING);
    assert_state(w, first, QUEUED);
    assert_int_equal(job_of(w, first)->n_attempts, 1);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_sent_shards_is_not_started_again),
        cmocka_unit_test(an_answer_to_an_earlier_run_is_none),
        cmocka_unit_test(what_is_not_durable_is_not_placed),
        cmocka_unit_test(an_end_that_is_not_durable_stays_with_its_agent),
        cmocka_unit_test(an_operators_cordon_outlives_the_controllers_drain),
        cmocka_unit_test(a_spare_goes_with_its_attempt),
        cmocka_unit_test(a_start_goes_with_its_nodes_health),
        cmocka_unit_test(a_spare_outlives_the_controller_on_an_unsound_node),
        cmocka_unit_test(a_spare_that_was_given_away_is_not_held_again),
        cmocka_unit_test(a_job_without_its_spare_waits_its_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
