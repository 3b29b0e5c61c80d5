/* The registry of checkpoints: commits, damage, retention, what is given up. */
#include "tests/unit/daemon/core_world.h"

static const char *info(struct world *w, int64_t id, struct arena *mem)
{
    Boost__JobSummary *s = core_summary(w->core, job_of(w, id), mem);
    assert_non_null(s);
    return s->info;
}

static void damaged_ones_are_skipped_and_said(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    say_checkpoint(w, a, x, 40);
    say_step(w, a, x, 50);
    pump(w);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-40.a1");
    a->verify_code = ERR_CORRUPT;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    x = (pump(w), recovered(w, a, id));
    assert_int_equal(x->from_step, 20);
    assert_says(event_of(w, id, "checkpoint-damaged")->text, "checkpoint of step 40 does not verify");
    assert_says(event_of(w, id, "checkpoint-damaged")->text, "the one of step 20 is tried");
    assert_says(ckpt(w, id, 40, 1)->note, "damaged: ");
    /* The next one knows, over a restart too. */
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_true(ckpt(w, id, 40, 1)->damaged);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-");
    int verifies = a->verifies;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    x = (pump(w), recovered(w, a, id));
    assert_int_equal(a->verifies, verifies + 1); /* only that of step 20 */
    assert_int_equal(x->from_step, 0);
    assert_says(event_of(w, id, "started")->text, "from the initial weights: no committed checkpoint of it verifies");
    world_free(w);
}

static int answered; /* times; with one fault: 100 */

static void on_verified(void *arg, int rc, const struct error *err, const struct core_ckpt *out)
{
    (void)arg;
    if (rc)
        fail_msg("%s", err->message);
    assert_string_equal(out->node, "n1");
    answered += out->n_faults == 1 ? 100 : 1;
}

/* Who has the answer finds what it says in events and in the registry. */
static void what_verify_finds_is_durable_before_its_answer(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    Boost__CheckpointRequest q = BOOST__CHECKPOINT_REQUEST__INIT;
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    pump(w);
    const struct core_user user = {.uid = job_of(w, id)->uid, .name = "u"};
    q.has_what = true;
    q.what = BOOST__CHECKPOINT_REQUEST__WHAT__VERIFY;
    q.has_step = true;
    q.step = 20;
    answered = 0;
    core_checkpoint(w->core, job_of(w, id), &q, &user, on_verified, NULL);
    pump(w);
    assert_int_equal(answered, 1);
    static char fault[] = "shard 0 is gone";
    for (int i = 0; i < 2; i++) {
        a->tool_fault = i ? NULL : fault;
        w->store->stuck = true;
        answered = 0;
        core_checkpoint(w->core, job_of(w, id), &q, &user, on_verified, NULL);
        pump(w);
        assert_int_equal(answered, 0);
        w->store->stuck = false;
        pump(w);
        assert_int_equal(answered, i ? 1 : 100);
        assert_int_equal(ckpt(w, id, 20, 1)->damaged, !i);
        assert_int_equal(count_events(w, id, "checkpoint-damaged"), 1);
        assert_int_equal(count_events(w, id, "checkpoint-sound"), i);
    }
    world_free(w);
}

static void not_reaching_is_not_damage(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    pump(w);
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-");
    a->verify_code = ERR_IO;
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    advance(w, 3000);
    assert_state(w, id, RECOVERING);
    assert_false(ckpt(w, id, 20, 1)->damaged);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    assert_says(info(w, id, &mem), "cannot be verified yet");
    arena_free(&mem);
    a->verify_bad[0] = 0;
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    world_free(w);
}

static void retention_keeps_what_it_should(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *s = spec_new(&mem);
    s->checkpoint->has_keep = s->checkpoint->has_keep_every = 1;
    s->checkpoint->keep = 2;
    s->checkpoint->keep_every = 30;
    int64_t id = submit_spec(w, s, false);
    struct fake_attempt *x = newest(w, a, id);
    for (int64_t step = 10; step <= 60; step += 10)
        checkpoint_at(w, a, x, step);
    static const int states[] = {CKPT(DELETED), CKPT(DELETED),   CKPT(COMMITTED),
                                 CKPT(DELETED), CKPT(COMMITTED), CKPT(COMMITTED)};
    for (int i = 0; i < 6; i++)
        assert_int_equal(ckpt(w, id, 10 * (i + 1), 1)->state, states[i]);
    assert_string_equal(a->deleted, "/ckpt/0badcafe-1/step-40.a1");
    arena_free(&mem);
    world_free(w);
}

static void the_one_resumed_from_stays_until_the_next_commit(void **state)
{
    (void)state;
    struct life *l = life_begin(1, NULL);
    struct world *w = l->w;
    struct fake_agent *a = l->a;
    struct fake_attempt *x = l->x;
    int64_t id = l->id;
    checkpoint_at(w, a, x, 20);
    /* The manifest of 40 is written after the attempt that wrote it died, before 20 was read. */
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(COMMITTED));
    say_checkpoint(w, a, x, 40);
    pump(w);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(DELETED));
    assert_int_equal(ckpt(w, id, 40, 2)->state, CKPT(COMMITTED));
    life_end(l);
}

static void incomplete_and_failed_ones_are_abandoned(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 20);
    say_shard(w, a, x, 0, 20, NULL);
    say_shard(w, a, x, 1, 20, "write: No space left on device");
    pump(w);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(ABANDONED));
    assert_says(ckpt(w, id, 20, 1)->note, "No space left on device");
    assert_int_equal(job_of(w, id)->reason, REASON(DiskFull));
    assert_int_equal(a->deletes, 1); /* both ranks have spoken: the space is given back */
    assert_state(w, id, RUNNING);
    say_shard(w, a, x, 0, 40, NULL);
    pump(w);
    assert_int_equal(ckpt(w, id, 40, 1)->state, CKPT(WRITING));
    say_end_of(w, a, x, 1, (struct end){.signal = 11});
    pump(w);
    assert_int_equal(ckpt(w, id, 40, 1)->state, CKPT(ABANDONED));
    assert_says(ckpt(w, id, 40, 1)->note, "1 of 2 shards");
    assert_int_equal(a->deletes, 2);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 0);
    world_free(w);
}

/* Once the file system is back the row says so too, whatever else keeps the files. */
static void a_wait_for_a_file_system_is_over_for_good(void **state)
{
    (void)state;
    struct life *l = life_begin(1, NULL);
    checkpoint_at(l->w, l->a, l->x, 10);
    l->a->delete_code = ERR_BUSY;
    checkpoint_at(l->w, l->a, l->x, 20);
    assert_says(ckpt(l->w, l->id, 10, 1)->note, "not deleted yet: data.bin is not there (check the path)");
    l->a->delete_code = ERR_NOMEM;
    advance(l->w, 60000);
    assert_string_equal(ckpt(l->w, l->id, 10, 1)->note, "");
    controller_restart(l->w);
    assert_int_equal(ckpt(l->w, l->id, 10, 1)->state, CKPT(DELETING));
    assert_string_equal(ckpt(l->w, l->id, 10, 1)->note, "");
    life_end(l);
}

/* A crash is what ended each attempt, a full disk why nothing came of it. */
static void held_for_want_of_room_says_so(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    for (int k = 1; k <= 3; k++) {
        say_step(w, a, x, 20);
        say_shard(w, a, x, 0, 20, "write: Disk quota exceeded");
        if (k == 2)
            say_shard(w, a, x, 1, 20, NULL);
        pump(w);
        say_end_of(w, a, x, 1, (struct end){.signal = 9});
        pump(w);
        if (k < 3)
            x = recovered(w, a, id);
    }
    assert_state(w, id, HELD);
    assert_int_equal(job_of(w, id)->reason, REASON(DiskFull));
    assert_says(job_of(w, id)->reason_text, "no progress in 3 attempts, the checkpoints' disk is full; release with");
    assert_says(job_of(w, id)->reason_text, "rank 0 on n1 could not write its shard: write: Disk quota exceeded");
    assert_says(job_of(w, id)->reason_text, "signal 9");
    world_free(w);
}

static void a_manifest_without_room_says_so(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->manifest_code = ERR_NOSPACE;
    a->failure_text = "/ckpt/manifest.json.tmp: write: No space left on device";
    checkpoint_at(w, a, x, 20);
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(ABANDONED));
    assert_state(w, id, RUNNING);
    assert_int_equal(job_of(w, id)->reason, REASON(DiskFull));
    a->manifest_code = 0;
    checkpoint_at(w, a, x, 40);
    assert_int_equal(ckpt(w, id, 40, 1)->state, CKPT(COMMITTED));
    assert_int_equal(job_of(w, id)->reason, REASON(NONE));
    world_free(w);
}

static void a_manifest_under_way_is_waited_for(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    a->answers = false; /* the manifest takes its time */
    say_step(w, a, x, 100);
    say_checkpoint(w, a, x, 100);
    say_end_of(w, a, x, 0, (struct end){.done = true});
    say_end_of(w, a, x, 1, (struct end){.done = true});
    say_node_end(w, a, x);
    pump(w);
    assert_state(w, id, RUNNING);
    assert_false(x->forgotten);
    /* The task's reply, late. */
    uint64_t task = ckpt(w, id, 100, 1)->task;
    assert_true(task != 0);
    advance(w, 4000);
    say_task(w, "n1", task, NULL);
    pump(w);
    assert_state(w, id, COMPLETED);
    assert_int_equal(job_of(w, id)->checkpoint_step, 100);
    world_free(w);
}

/* The store cannot write for longer than a manifest is waited for: the last checkpoint is committed all the same. */
static void a_full_disk_of_the_store_costs_no_checkpoint(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    w->store->sick = ERR_NOSPACE;
    say_step(w, a, x, 100);
    say_checkpoint(w, a, x, 100);
    say_end_of(w, a, x, 0, (struct end){.done = true});
    say_end_of(w, a, x, 1, (struct end){.done = true});
    say_node_end(w, a, x);
    advance(w, 45500);
    assert_state(w, id, RUNNING);
    w->store->sick = 0;
    advance(w, 1000);
    assert_state(w, id, COMPLETED);
    assert_int_equal(ckpt(w, id, 100, 1)->state, CKPT(COMMITTED));
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_ones_are_skipped_and_said),
        cmocka_unit_test(what_verify_finds_is_durable_before_its_answer),
        cmocka_unit_test(not_reaching_is_not_damage),
        cmocka_unit_test(retention_keeps_what_it_should),
        cmocka_unit_test(the_one_resumed_from_stays_until_the_next_commit),
        cmocka_unit_test(incomplete_and_failed_ones_are_abandoned),
        cmocka_unit_test(a_wait_for_a_file_system_is_over_for_good),
        cmocka_unit_test(held_for_want_of_room_says_so),
        cmocka_unit_test(a_manifest_without_room_says_so),
        cmocka_unit_test(a_manifest_under_way_is_waited_for),
        cmocka_unit_test(a_full_disk_of_the_store_costs_no_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
