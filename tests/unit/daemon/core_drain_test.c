/* Nodes taken out of use by their operators, and back. */
#include "tests/unit/daemon/core_world.h"

#define CORDON BOOST__NODE_CONTROL_REQUEST__VERB__CORDON
#define DRAIN  BOOST__NODE_CONTROL_REQUEST__VERB__DRAIN
#define RESUME BOOST__NODE_CONTROL_REQUEST__VERB__RESUME

static const struct core_user operator= {.uid = 500, .gid = 500, .name = "boost"};

static int node_control(struct world *w, Boost__NodeControlRequest__Verb verb, const char *node, const char *reason,
                        double deadline_s)
{
    w->reply_rc = -1;
    core_node_control(w->core, verb, node, reason, deadline_s, &operator, on_control, w);
    pump(w);
    return w->reply_rc;
}

static const Boost__NodeInfo *info_of(struct world *w, struct arena *mem, const char *node)
{
    const Boost__NodesReply *r = core_nodes(w->core, mem);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (strcmp(r->nodes[i]->name, node) == 0)
            return r->nodes[i];
    fail_msg("no node %s", node);
    return NULL;
}

static void assert_admin(struct world *w, const char *node, Boost__NodeAdmin__Value admin, const char *reason)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__NodeInfo *n = info_of(w, &mem, node);
    assert_int_equal(n->admin, admin);
    assert_string_equal(n->reason, reason);
    arena_free(&mem);
}

static void cordoned_node_gets_no_new_work(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 4);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(node_control(w, CORDON, "gpu01", "fan is loud", -1), ERR_OK);
    assert_says(w->reply_text, "takes no new work; 1 job there goes on");
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__CORDONED, "fan is loud");
    int64_t second = submit(w);
    advance(w, 60000);
    assert_state(w, id, RUNNING);
    assert_state(w, second, QUEUED);
    assert_int_equal(x->terms, 0);
    /* A restart of the controller changes nothing of it. */
    controller_restart(w);
    join_world(w, a);
    advance(w, 5000);
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__CORDONED, "fan is loud");
    assert_state(w, second, QUEUED);
    assert_int_equal(node_control(w, RESUME, "gpu01", NULL, -1), ERR_OK);
    assert_state(w, second, STARTING);
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__NONE, "");
    assert_int_equal(node_control(w, RESUME, "gpu01", NULL, -1), ERR_REFUSED);
    world_free(w);
}

static void drain_waits_for_its_jobs(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(node_control(w, DRAIN, "gpu01", "new kernel", -1), ERR_OK);
    advance(w, 3600000);
    assert_state(w, id, RUNNING);
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__DRAINING, "new kernel");
    say_finished(w, a, x);
    advance(w, 1000);
    assert_state(w, id, COMPLETED);
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__DRAINED, "new kernel");
    assert_non_null(event_of(w, 0, "node-drain-over"));
    world_free(w);
}

/* At the deadline the job checkpoints, and goes on elsewhere; over a restart of the controller too. */
static void drain_with_deadline(void **state)
{
    (void)state;
    for (int restart = 0; restart < 2; restart++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "gpu01", 2), *b = agent_add(w, "gpu02", 2);
        join_world(w, a);
        int64_t id;
        struct fake_attempt *x = run_job(w, a, &id);
        join_world(w, b);
        say_step(w, a, x, 7);
        assert_int_equal(node_control(w, DRAIN, "gpu01", "new kernel", 600), ERR_OK);
        assert_says(w->reply_text, "1 job there, in 600 s its jobs checkpoint and are queued again");
        advance(w, 300000);
        if (restart) {
            controller_restart(w);
            join_world(w, a);
            join_world(w, b);
            say_step(w, a, x, 7);
        }
        advance(w, 299000);
        assert_state(w, id, RUNNING);
        assert_int_equal(x->terms, 0);
        advance(w, 2000);
        assert_int_equal(x->terms, 1);
        assert_int_equal(x->kills, 0);
        assert_says(event_of(w, id, "drained")->text, "gpu01 is drained (new kernel); checkpoints at step 7");
        assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__DRAINED, "new kernel");
        struct fake_attempt *y = newest(w, b, id);
        assert_int_equal(y->from_step, 8);
        assert_int_equal(job_of(w, id)->restarts_used, 0);
        world_free(w);
    }
}

static void who_and_what_is_refused(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    core_node_control(w->core, CORDON, "gpu01", "mine", -1, &user_ann, on_control, w);
    assert_int_equal(w->reply_rc, ERR_REFUSED);
    assert_int_equal(node_control(w, CORDON, "gpu09", "x", -1), ERR_NOT_FOUND);
    assert_int_equal(node_control(w, CORDON, "gpu01", "", -1), ERR_INVALID);
    assert_int_equal(node_control(w, DRAIN, "gpu01", "x", 1e12), ERR_INVALID);
    char novel[1002];
    memset(novel, 'x', sizeof novel - 1);
    novel[sizeof novel - 1] = '\0';
    assert_int_equal(node_control(w, CORDON, "gpu01", novel, -1), ERR_INVALID);
    assert_admin(w, "gpu01", BOOST__NODE_ADMIN__VALUE__NONE, "");
    assert_int_equal(node_control(w, DRAIN, "gpu01", "x", 0), ERR_OK);
    assert_says(w->reply_text, "is drained: nothing ran there");
    world_free(w);
}

/* What cannot be killed keeps its node out of use, whoever asks. */
static void no_resume_over_an_unkillable_rank(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id;
    run_job(w, a, &id);
    a->obeys_kill = false;
    control(w, CANCEL, id, true);
    advance(w, 31000);
    assert_state(w, id, CANCELLED);
    assert_int_equal(node_control(w, RESUME, "gpu01", NULL, -1), ERR_REFUSED);
    assert_says(w->reply_text, "attempt 1 of job 1 is not confirmed dead there");
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cordoned_node_gets_no_new_work),
        cmocka_unit_test(drain_waits_for_its_jobs),
        cmocka_unit_test(drain_with_deadline),
        cmocka_unit_test(who_and_what_is_refused),
        cmocka_unit_test(no_resume_over_an_unkillable_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
