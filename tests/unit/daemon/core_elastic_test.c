/* Jobs over several nodes of which some are lost: on fewer, back on all, and with spare ones. */
#include "tests/unit/daemon/core_world.h"

static Boost__JobSpec *spec_on(struct arena *mem, int nodes, int min_nodes, int spares)
{
    Boost__JobSpec *spec = spec_new(mem);
    Boost__Resources *r = arena_alloc(mem, sizeof *r);
    boost__resources__init(r);
    r->has_nodes = r->has_min_nodes = r->has_spares = 1;
    r->nodes = nodes;
    r->min_nodes = min_nodes;
    r->spares = spares;
    spec->resources = r;
    spec->parallel->has_dp = 1;
    spec->parallel->dp = nodes;
    spec->parallel->global_batch = 12;
    spec->parallel->micro_batch = 12 / nodes;
    return spec;
}

struct cluster {
    struct world *w;
    struct arena mem;
    struct fake_agent *n[4];
    int64_t job;
};

static void cluster_new(struct cluster *k, int nodes)
{
    static const char *const names[] = {"n1", "n2", "n3", "n4"};
    k->w = world_new();
    arena_init(&k->mem, 1 << 20);
    for (int i = 0; i < nodes; i++) {
        k->n[i] = agent_add(k->w, names[i], 2);
        join_world(k->w, k->n[i]);
    }
    advance(k->w, 31000); /* before that nothing is DOWN */
}

static void cluster_free(struct cluster *k)
{
    assert_int_equal(core_stats(k->w->core)->illegal_transitions, 0);
    arena_free(&k->mem);
    world_free(k->w);
}

/* Every node of the newest attempt is at this step. */
static void all_step(struct cluster *k, int64_t step)
{
    for (int i = 0; i < k->w->n_agents; i++) {
        struct fake_attempt *x = fake_find(k->n[i], k->job, job_of(k->w, k->job)->n_attempts);
        if (x && x->alive)
            say_step(k->w, k->n[i], x, step);
    }
    pump(k->w);
}

static void all_checkpoint(struct cluster *k, int64_t step)
{
    all_step(k, step);
    for (int i = 0; i < k->w->n_agents; i++) {
        struct fake_attempt *x = fake_find(k->n[i], k->job, job_of(k->w, k->job)->n_attempts);
        if (x && x->alive)
            say_checkpoint(k->w, k->n[i], x, step);
    }
    pump(k->w);
}

static void lose(struct cluster *k, int i)
{
    k->n[i]->beating = false;
    disconnect(k->w, k->n[i]);
}

/* The node comes back with nothing on it. */
static void comes_back(struct cluster *k, int i)
{
    for (int a = 0; a < k->n[i]->n_attempts; a++) {
        k->n[i]->attempts[a].alive = false;
        k->n[i]->attempts[a].forgotten = true;
    }
    k->n[i]->beating = true;
    join_world(k->w, k->n[i]);
    pump(k->w);
}

static void assert_on(struct cluster *k, const char *nodes)
{
    char on[128] = "";
    const struct attempt *a = job_live_attempt(job_of(k->w, k->job));
    assert_non_null(a);
    for (int p = 0; p < a->n_parts; p++)
        snprintf(on + strlen(on), sizeof on - strlen(on), "%s%s", p ? "," : "", a->parts[p].node);
    assert_string_equal(on, nodes);
}

static void on_fewer_and_back(void **state)
{
    (void)state;
    struct cluster k;
    cluster_new(&k, 3);
    k.job = submit_spec(k.w, spec_on(&k.mem, 3, 1, 0), false);
    assert_true(k.job > 0);
    assert_on(&k, "n1,n2,n3");
    assert_int_equal(newest(k.w, k.n[0], k.job)->dp, 3);
    all_step(&k, 1);
    assert_state(k.w, k.job, RUNNING);
    all_checkpoint(&k, 20);
    lose(&k, 2);
    advance(k.w, 9000);
    assert_state(k.w, k.job, RUNNING);
    advance(k.w, 5000);
    assert_state(k.w, k.job, STARTING);
    assert_on(&k, "n1,n2");
    struct fake_attempt *x = newest(k.w, k.n[0], k.job);
    assert_int_equal(x->dp, 2);
    assert_int_equal(x->micro_batch, 3); /* 12 sequences over 2 replicas: 2 of 3, where 3 had 1 of 4 */
    assert_int_equal(x->from_step, 20);
    assert_says(event_of(k.w, k.job, "started")->text, "on 2 of 3 nodes, dp 2 of 3");
    all_step(&k, 21);
    /* A second one goes: one replica is left. */
    lose(&k, 1);
    advance(k.w, 15000);
    assert_on(&k, "n1");
    assert_int_equal(newest(k.w, k.n[0], k.job)->dp, 1);
    all_step(&k, 21);
    assert_state(k.w, k.job, RUNNING);
    /* Back: nothing before a checkpoint, then all at once, from the step that the stop came to. */
    comes_back(&k, 1);
    comes_back(&k, 2);
    advance(k.w, 60000);
    assert_on(&k, "n1");
    all_checkpoint(&k, 40);
    assert_non_null(event_of(k.w, k.job, "growing"));
    for (int i = 0; i < 20 && job_of(k.w, k.job)->state != STATE(STARTING); i++)
        advance(k.w, 250);
    assert_on(&k, "n1,n2,n3");
    assert_int_equal(newest(k.w, k.n[0], k.job)->dp, 3);
    assert_int_equal(newest(k.w, k.n[2], k.job)->from_step, 41);
    assert_int_equal(job_of(k.w, k.job)->restarts_used, 0);
    cluster_free(&k);
}

static void as_far_as_it_can(void **state)
{
    (void)state;
    struct cluster k;
    cluster_new(&k, 3);
    k.job = submit_spec(k.w, spec_on(&k.mem, 3, 3, 0), false);
    all_step(&k, 1);
    lose(&k, 2);
    advance(k.w, 60000);
    assert_state(k.w, k.job, RECOVERING); /* it may not */
    comes_back(&k, 2);
    assert_on(&k, "n1,n2,n3");
    cluster_free(&k);

    /* Without min_nodes it is the same; and what can not be laid out is refused, with what can. */
    cluster_new(&k, 1);
    Boost__JobSpec *spec = spec_on(&k.mem, 3, 2, 0);
    spec->parallel->global_batch = 9;
    spec->parallel->micro_batch = 1;
    assert_int_equal(submit_spec(k.w, spec, false), 0);
    assert_says(k.w->reply_text, "resources.min_nodes = 2 nodes hold no whole replicas");
    assert_says(k.w->reply_hint, "set resources.min_nodes: 3");
    cluster_free(&k);
}

/* A node that is only late, or busy with others, is no missing one. */
static void late_is_not_missing(void **state)
{
    (void)state;
    struct cluster k;
    cluster_new(&k, 3);
    k.job = submit_spec(k.w, spec_on(&k.mem, 3, 1, 0), false);
    all_checkpoint(&k, 20);
    controller_restart(k.w);
    struct cluster first = k;
    comes_back(&first, 0); /* has lost its part, so that the attempt is over when the others have come */
    advance(k.w, 3000);
    join_world(k.w, k.n[1]);
    advance(k.w, 3000);
    assert_state(k.w, k.job, RECOVERING);
    assert_int_equal(job_of(k.w, k.job)->n_attempts, 1);
    join_world(k.w, k.n[2]);
    advance(k.w, 5000);
    assert_on(&k, "n1,n2,n3");
    cluster_free(&k);

    cluster_new(&k, 2);
    int64_t other = submit(k.w);
    assert_state(k.w, other, STARTING);
    k.job = submit_spec(k.w, spec_on(&k.mem, 2, 1, 0), false);
    advance(k.w, 60000);
    assert_state(k.w, k.job, QUEUED);
    say_finished(k.w, k.n[0], newest(k.w, k.n[0], other));
    pump(k.w);
    assert_on(&k, "n1,n2");
    cluster_free(&k);
}

static int busy(struct cluster *k, int i)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    const Boost__NodesReply *r = core_nodes(k->w->core, &mem);
    int n = r->nodes[i]->devices_busy;
    arena_free(&mem);
    return n;
}

static void spare_takes_over(void **state)
{
    (void)state;
    for (int restart = 0; restart < 2; restart++) {
        struct cluster k;
        cluster_new(&k, 3);
        k.job = submit_spec(k.w, spec_on(&k.mem, 2, 2, 1), false);
        assert_on(&k, "n1,n2");
        assert_says(event_of(k.w, k.job, "started")->text, "; spare n3");
        assert_int_equal(busy(&k, 2), 2);
        all_checkpoint(&k, 20);
        int64_t other = submit(k.w); /* wants two devices, and would get those of the spare */
        if (restart) {
            controller_restart(k.w);
            for (int i = 0; i < 3; i++)
                join_world(k.w, k.n[i]);
            all_step(&k, 21);
        }
        advance(k.w, 60000);
        assert_state(k.w, other, QUEUED);
        assert_state(k.w, k.job, RUNNING);
        lose(&k, 1);
        advance(k.w, 12500);
        assert_state(k.w, k.job, STARTING);
        assert_on(&k, "n1,n3");
        assert_int_equal(newest(k.w, k.n[2], k.job)->from_step, 20);
        assert_state(k.w, other, QUEUED);
        all_step(&k, 21);
        /* Who waits comes before a new spare. */
        comes_back(&k, 1);
        advance(k.w, 1000);
        assert_state(k.w, other, STARTING);
        say_finished(k.w, k.n[1], newest(k.w, k.n[1], other));
        advance(k.w, 1000);
        assert_non_null(event_of(k.w, k.job, "spare-held"));
        assert_int_equal(busy(&k, 1), 2);
        /* And it goes with the job. */
        control(k.w, CANCEL, k.job, true);
        advance(k.w, 1000);
        assert_state(k.w, k.job, CANCELLED);
        for (int i = 0; i < 3; i++)
            assert_int_equal(busy(&k, i), 0);
        cluster_free(&k);
    }
}

/* Found by the simulator: with a head in the queue, and no back-off to end, nobody looked at the job again. */
static void goes_on_at_once_behind_a_head(void **state)
{
    (void)state;
    struct cluster k;
    cluster_new(&k, 3);
    k.job = submit_spec(k.w, spec_on(&k.mem, 2, 2, 1), false);
    all_checkpoint(&k, 20);
    int64_t other = submit(k.w);
    advance(k.w, 1000);
    assert_state(k.w, other, QUEUED);
    for (int i = 0; i < 2; i++) { /* their keepers die */
        struct fake_attempt *x = newest(k.w, k.n[i], k.job);
        for (int r = 0; r < x->n_ranks; r++)
            say_end_of(k.w, k.n[i], x, r, (struct end){.lost = true});
        say_node_end(k.w, k.n[i], x);
    }
    advance(k.w, 3000);
    assert_state(k.w, k.job, STARTING); /* on one of its nodes and the spare: the other one may have got a node first */
    /* A node is held once, as a spare or for ranks. */
    int taken = 0;
    for (int i = 0; i < 3; i++)
        taken += busy(&k, i);
    assert_int_equal(taken, 6);
    cluster_free(&k);
}

static void spare_itself_is_lost(void **state)
{
    (void)state;
    struct cluster k;
    cluster_new(&k, 4);
    k.job = submit_spec(k.w, spec_on(&k.mem, 2, 1, 1), false);
    all_checkpoint(&k, 20);
    lose(&k, 2);
    advance(k.w, 12000);
    assert_says(event_of(k.w, k.job, "spare-lost")->text, "n3 is no spare any more: no heartbeat");
    assert_says(event_of(k.w, k.job, "spare-held")->text, "n4 is held as a spare");
    assert_state(k.w, k.job, RUNNING);
    /* Drained, it serves nobody. */
    static const struct core_user root = {.uid = 0, .name = "root"};
    core_node_control(k.w->core, BOOST__NODE_CONTROL_REQUEST__VERB__DRAIN, "n4", "disk", -1, &root, on_control, k.w);
    pump(k.w);
    assert_int_equal(k.w->reply_rc, ERR_OK);
    assert_int_equal(busy(&k, 3), 0);
    lose(&k, 1);
    advance(k.w, 15000);
    assert_on(&k, "n1");
    cluster_free(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_fewer_and_back),   cmocka_unit_test(as_far_as_it_can),
        cmocka_unit_test(late_is_not_missing), cmocka_unit_test(goes_on_at_once_behind_a_head),
        cmocka_unit_test(spare_takes_over),    cmocka_unit_test(spare_itself_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
