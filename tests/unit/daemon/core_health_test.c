/* The controller core and what nodes say of themselves: labels, and the health checks by which they are cordoned. */
#include "tests/unit/daemon/core_world.h"

#include "daemon/core_internal.h"

static struct node *node_of(struct world *w, const char *name)
{
    struct node *n = node_find(w->core, name);
    assert_non_null(n);
    return n;
}

/* A report with up to two failed checks, each "name: text". */
static void say_health(struct world *w, const char *node, const char *first, const char *second, bool pending)
{
    Boost__HealthReport r = BOOST__HEALTH_REPORT__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__FailedCheck checks[2], *list[2];
    char names[2][32];
    const char *const texts[] = {first, second};
    for (int i = 0; i < 2 && texts[i]; i++) {
        const char *colon = strstr(texts[i], ": ");
        snprintf(names[i], sizeof names[i], "%.*s", (int)(colon - texts[i]), texts[i]);
        boost__failed_check__init(&checks[i]);
        checks[i].check = names[i];
        checks[i].text = (char *)(uintptr_t)(colon + 2);
        list[r.n_failed++] = &checks[i];
    }
    r.failed = list;
    r.has_pending = pending;
    r.pending = pending;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_HEALTH;
    m.health = &r;
    say(w, node, &m);
    pump(w);
}

static void a_failed_check_cordons_until_one_passes(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    say_health(w, "n1", "memory: 12 MiB available", "script: disk /dev/sdb is missing", false);
    const struct node *n = node_of(w, "n1");
    assert_int_equal(n->admin, ADMIN(CORDONED));
    assert_string_equal(n->admin_reason, "memory: 12 MiB available; script: disk /dev/sdb is missing");
    assert_says(event_of(w, 0, "node-cordoned")->text, "n1 takes no new work: memory: 12 MiB available; script");
    int64_t id = submit(w);
    assert_state(w, id, QUEUED);
    /* The same again, but for numbers, is no event. */
    say_health(w, "n1", "memory: 11 MiB available", "script: disk /dev/sdb is missing", false);
    assert_string_equal(n->admin_reason, "memory: 11 MiB available; script: disk /dev/sdb is missing");
    assert_int_equal(count_events(w, 0, "node-cordoned"), 1);
    say_health(w, "n1", "script: disk /dev/sdb is missing", NULL, false);
    assert_int_equal(count_events(w, 0, "node-cordoned"), 2);
    say_health(w, "n1", NULL, NULL, false);
    assert_int_equal(n->admin, ADMIN(NONE));
    assert_int_equal(count_events(w, 0, "node-resumed"), 1);
    assert_state(w, id, STARTING);
    world_free(w);
}

static void attempts_go_on_on_a_cordoned_node(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 4);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_health(w, "n1", "port: no address", NULL, false);
    advance(w, 5000);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->kills + x->terms, 0);
    world_free(w);
}

/* What made it silent may have changed it. */
static void a_node_that_was_down_is_checked_before_it_gets_work(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    say_health(w, "n1", NULL, NULL, false);
    a->beating = false;
    advance(w, 45000);
    assert_int_equal(node_of(w, "n1")->liveness, LIVENESS(DOWN));
    int64_t id = submit(w);
    a->beating = true;
    advance(w, 5000);
    assert_int_equal(node_of(w, "n1")->liveness, LIVENESS(UP));
    assert_int_equal(node_of(w, "n1")->admin, ADMIN(CORDONED));
    assert_state(w, id, QUEUED);
    say_health(w, "n1", "memory: none", NULL, false);
    assert_state(w, id, QUEUED);
    say_health(w, "n1", NULL, NULL, false);
    assert_state(w, id, STARTING);
    world_free(w);
}

/* Only what health has cordoned is resumed by it, and what others have cordoned is theirs. */
static void others_cordons_stay(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    struct node *n = node_of(w, "n1");
    n->admin = ADMIN(CORDONED);
    text_set(&n->admin_by, "uid 0 (root)");
    text_set(&n->admin_reason, "new cables");
    say_health(w, "n1", "memory: none", NULL, false);
    assert_string_equal(n->admin_reason, "new cables");
    say_health(w, "n1", NULL, NULL, false);
    assert_int_equal(n->admin, ADMIN(CORDONED));
    assert_string_equal(n->admin_by, "uid 0 (root)");
    /* Its end finds the node unsound after all. */
    say_health(w, "n1", "memory: none", NULL, false);
    n->admin = ADMIN(NONE);
    node_health_settle(w->core, n);
    change_commit(w->core);
    assert_int_equal(n->admin, ADMIN(CORDONED));
    assert_string_equal(n->admin_by, "health");
    world_free(w);
}

/* A returning node gets nothing before its check has ended, and nobody hears of that wait unless it fails. */
static void nothing_before_the_first_check_has_ended(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    say_health(w, "n1", NULL, NULL, true);
    int64_t id = submit(w);
    assert_state(w, id, QUEUED);
    assert_int_equal(node_of(w, "n1")->admin, ADMIN(CORDONED));
    say_health(w, "n1", NULL, NULL, false);
    assert_state(w, id, STARTING);
    assert_int_equal(count_events(w, 0, "node-cordoned") + count_events(w, 0, "node-resumed"), 0);
    world_free(w);
}

static void a_failure_outlives_both_restarts(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    say_health(w, "n1", "script: no", NULL, false);
    controller_restart(w);
    assert_int_equal(node_of(w, "n1")->admin, ADMIN(CORDONED));
    /* As the agent of the same node registers again, before it has checked. */
    Boost__HealthReport pending = BOOST__HEALTH_REPORT__INIT;
    pending.has_pending = pending.pending = true;
    node_health(w->core, node_of(w, "n1"), &pending);
    change_commit(w->core);
    assert_string_equal(node_of(w, "n1")->admin_reason, "script: no");
    node_health(w->core, node_of(w, "n1"), NULL); /* an agent that checks nothing */
    change_commit(w->core);
    assert_int_equal(node_of(w, "n1")->admin, ADMIN(NONE));
    world_free(w);
}

static void say_node_gone(struct world *w, const char *node, const struct fake_attempt *x, bool epilog)
{
    Boost__NodeEnd end = BOOST__NODE_END__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    end.has_job = end.has_attempt = true;
    end.job = x->job;
    end.attempt = x->attempt;
    end.has_epilog = end.epilog = epilog;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_NODE_END;
    m.node_end = &end;
    say(w, node, &m);
    pump(w);
}

/* The job goes on elsewhere at once; the devices are free when the epilog has ended, and no kill waits for it. */
static void an_epilog_keeps_the_devices_and_not_the_job(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2), *b;
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    b = agent_add(w, "n2", 2);
    join_world(w, b);
    a = &w->agents[0];
    x = newest(w, a, id);
    for (int i = 0; i < x->n_ranks; i++)
        say_end_of(w, a, x, i, (struct end){.exit_code = 1});
    x->alive = false;
    say_node_gone(w, "n1", x, true);
    struct node *n = node_of(w, "n1");
    assert_int_equal(node_busy(n, SCHED_CPU), 2);
    advance(w, 60000); /* past the time in which a kill is to be confirmed */
    assert_non_null(newest(w, b, id));
    assert_int_equal(n->admin, ADMIN(NONE));
    assert_int_equal(node_busy(n, SCHED_CPU), 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    char expected[64];
    snprintf(expected, sizeof expected, "the epilog of %lld.1 runs", (long long)id);
    assert_string_equal(core_nodes(w->core, &mem)->nodes[0]->reason, expected);
    arena_free(&mem);
    say_node_gone(w, "n1", x, false);
    assert_int_equal(node_busy(n, SCHED_CPU), 0);
    world_free(w);
}

/* The link breaks while it runs, and boostd with it: nothing is fenced, nothing is waited for, the devices stay taken. */
static void an_epilog_outlasts_a_connection(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    (void)agent_add(w, "n2", 2);
    a = &w->agents[0];
    join_world(w, &w->agents[1]);
    x = newest(w, a, id);
    for (int i = 0; i < x->n_ranks; i++)
        say_end_of(w, a, x, i, (struct end){.exit_code = 1});
    x->alive = false;
    x->epilog = true;
    say_node_gone(w, "n1", x, true);
    advance(w, 20000);
    assert_non_null(newest(w, &w->agents[1], id));
    int kills = x->kills; /* with the first rank's end */
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            disconnect(w, a);
        else
            controller_restart(w);
        for (int k = 0; k < w->n_agents; k++)
            if (!w->agents[k].connected)
                join_world(w, &w->agents[k]);
        struct node *n = node_of(w, "n1");
        assert_int_equal(node_busy(n, SCHED_CPU), 2);
        assert_true(node_holding(n, id, 1)->epilog);
        assert_int_equal(node_holding(n, id, 1)->kill_due, 0);
        advance(w, 60000);
        assert_int_equal(n->admin, ADMIN(NONE));
        assert_int_equal(node_busy(n, SCHED_CPU), 2);
    }
    assert_int_equal(x->kills, kills);
    x->epilog = false;
    say_node_gone(w, "n1", x, false);
    assert_int_equal(node_busy(node_of(w, "n1"), SCHED_CPU), 0);
    assert_true(x->forgotten);
    world_free(w);
}

/* The node itself limits its prolog: the time for the rendezvous begins behind it. */
static void a_long_prolog_is_no_lost_rendezvous(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    struct fake_attempt *x = newest(w, a, id);
    Boost__AttemptDoing doing = BOOST__ATTEMPT_DOING__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    doing.has_job = doing.has_attempt = true;
    doing.job = id;
    doing.attempt = 1;
    doing.text = (char *)(uintptr_t) "prolog";
    doing.has_limit_ms = true;
    doing.limit_ms = 500000;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_DOING;
    m.doing = &doing;
    say(w, "n1", &m);
    pump(w);
    advance(w, 400000);
    assert_state(w, id, STARTING);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__ShowReply *s = core_show(w->core, job_of(w, id), &mem);
    assert_string_equal(s->waits[0]->name, "prolog on n1");
    assert_true(s->waits[0]->elapsed_s > 399);
    arena_free(&mem);
    say_update(w, a, x, 0, PHASE(LAUNCHED), -1); /* and then no more is heard */
    pump(w);
    advance(w, 250000);
    assert_non_null(event_of(w, id, "rendezvous-timeout"));
    world_free(w);
}

/* What never comes to its end there, a file system that does not answer, ends the attempt all the same. */
static void a_prolog_that_outlives_its_time_is(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    Boost__AttemptDoing doing = BOOST__ATTEMPT_DOING__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    doing.has_job = doing.has_attempt = doing.has_limit_ms = true;
    doing.job = id;
    doing.attempt = 1;
    doing.text = (char *)(uintptr_t) "prolog";
    doing.limit_ms = 200000;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_DOING;
    m.doing = &doing;
    say(w, "n1", &m);
    pump(w);
    advance(w, 190000);
    assert_state(w, id, STARTING);
    assert_null(event_of(w, id, "rendezvous-timeout"));
    advance(w, 200000);
    assert_non_null(event_of(w, id, "rendezvous-timeout"));
    world_free(w);
}

/* Refused behind its prolog: what that has set up is being taken down, and nobody else comes there meanwhile. */
static void a_refusal_with_an_epilog_keeps_the_devices(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    struct fake_attempt *x = newest(w, a, id);
    Boost__AttemptRefused refused = BOOST__ATTEMPT_REFUSED__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    refused.has_job = refused.has_attempt = refused.has_class_ = refused.has_epilog = refused.epilog = true;
    refused.job = id;
    refused.attempt = 1;
    refused.class_ = CLASS(INFRA);
    refused.text = (char *)(uintptr_t) "no keeper";
    m.body_case = BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED;
    m.attempt_refused = &refused;
    x->alive = false;
    say(w, "n1", &m);
    pump(w);
    struct node *n = node_of(w, "n1");
    advance(w, 120000);
    assert_int_equal(node_busy(n, SCHED_CPU), 2);
    assert_true(node_holding(n, id, 1)->epilog);
    assert_int_equal(n->admin, ADMIN(NONE));
    assert_int_equal(job_of(w, id)->n_attempts, 1);
    say_node_gone(w, "n1", x, false);
    advance(w, 1000);
    assert_null(node_holding(n, id, 1));
    assert_int_equal(newest(w, a, id)->attempt, 2);
    world_free(w);
}

/* What one node refuses another is asked for first; without another it is asked again. */
static void a_node_that_refused_is_the_last_choice(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    join_world(w, a);
    int64_t id = submit(w);
    assert_non_null(newest(w, a, id));
    for (int attempt = 1; attempt < 3; attempt++) {
        Boost__AttemptRefused x = BOOST__ATTEMPT_REFUSED__INIT;
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        x.has_job = x.has_attempt = x.has_class_ = true;
        x.job = id;
        x.attempt = attempt;
        x.class_ = CLASS(INFRA);
        x.text = (char *)(uintptr_t) "not mounted";
        m.body_case = BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED;
        m.attempt_refused = &x;
        newest(w, a, id)->alive = false;
        newest(w, a, id)->forgotten = true;
        say(w, "n1", &m);
        pump(w);
        if (attempt == 2) { /* free again, and by name before n2 */
            join_world(w, agent_add(w, "n2", 2));
            a = &w->agents[0];
        }
        advance(w, 10000);
    }
    assert_int_equal(job_of(w, id)->n_attempts, 3);
    assert_string_equal(job_live_attempt(job_of(w, id))->parts[0].node, "n2");
    world_free(w);
}

static void labels_are_shown_and_found(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    struct error err;
    Boost__KeyValue rack = BOOST__KEY_VALUE__INIT, *labels[] = {&rack};
    Boost__Register m = BOOST__REGISTER__INIT;
    agent_add(w, "n1", 2)->connected = true;
    arena_init(&mem, 1 << 20);
    rack.key = (char *)(uintptr_t) "rack";
    rack.value = (char *)(uintptr_t) "r1";
    m.node = (char *)(uintptr_t) "n1";
    m.boot_id = m.instance = (char *)(uintptr_t) "x";
    m.has_cpu_slots = true;
    m.cpu_slots = 2;
    m.n_label = 1;
    m.label = labels;
    m.switch_ = (char *)(uintptr_t) "leaf1";
    assert_int_equal(core_agent_register(w->core, &m, &err), 0);
    const struct node *n = node_of(w, "n1");
    assert_string_equal(node_label(n, "rack"), "r1");
    assert_null(node_label(n, "row"));
    assert_string_equal(node_switch(n), "leaf1");
    Boost__NodesReply *r = core_nodes(w->core, &mem);
    assert_int_equal(r->nodes[0]->n_label, 1);
    assert_string_equal(r->nodes[0]->label[0]->value, "r1");
    assert_string_equal(r->nodes[0]->switch_, "leaf1");
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_check_cordons_until_one_passes),
        cmocka_unit_test(attempts_go_on_on_a_cordoned_node),
        cmocka_unit_test(a_node_that_was_down_is_checked_before_it_gets_work),
        cmocka_unit_test(others_cordons_stay),
        cmocka_unit_test(nothing_before_the_first_check_has_ended),
        cmocka_unit_test(a_failure_outlives_both_restarts),
        cmocka_unit_test(an_epilog_keeps_the_devices_and_not_the_job),
        cmocka_unit_test(an_epilog_outlasts_a_connection),
        cmocka_unit_test(a_long_prolog_is_no_lost_rendezvous),
        cmocka_unit_test(a_prolog_that_outlives_its_time_is),
        cmocka_unit_test(a_refusal_with_an_epilog_keeps_the_devices),
        cmocka_unit_test(a_node_that_refused_is_the_last_choice),
        cmocka_unit_test(labels_are_shown_and_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
