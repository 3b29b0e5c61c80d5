/* Copies of checkpoints in an object store, as the controller sees them. */
#include "tests/unit/daemon/core_world.h"

#define MIRROR(s) BOOST__MIRROR_STATE__VALUE__##s

static struct life *begin(int keep)
{
    return life_begin(keep, "s3://bucket/p");
}

static void commit(struct life *r, int64_t step)
{
    checkpoint_at(r->w, r->a, r->x, step);
}

static void what_is_committed_is_copied_and_goes_with_its_copy(void **state)
{
    (void)state;
    struct life *r = begin(1);
    commit(r, 10);
    assert_int_equal(r->a->mirrors, 1);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-10.a1 s3://bucket/p");
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    assert_says(event_of(r->w, r->id, "checkpoint-mirrored")->text,
                "step 10 copied to s3://bucket/p/0badcafe-1/step-10.a1: ");
    commit(r, 20);
    assert_string_equal(r->a->deleted, "/ckpt/0badcafe-1/step-10.a1");
    assert_string_equal(r->a->deleted_copy, "s3://bucket/p");
    /* It is known after a restart, and what is resumed from it may be fetched. */
    controller_restart(r->w);
    join_world(r->w, r->a);
    pump(r->w);
    assert_int_equal(r->a->mirrors, 2);
    assert_int_equal(ckpt(r->w, r->id, 20, 1)->mirror, MIRROR(MIRRORED));
    say_end_of(r->w, r->a, r->x, 0, (struct end){.signal = 9});
    r->x = (pump(r->w), recovered(r->w, r->a, r->id));
    assert_int_equal(r->x->from_step, 20);
    assert_string_equal(r->a->verify_mirror, "s3://bucket/p");
    life_end(r);
}

static void a_store_that_is_away_is_tried_again(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_UNREACHABLE;
    commit(r, 10);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(PENDING));
    assert_says(ckpt(r->w, r->id, 10, 1)->mirror_note, "no copy yet: ");
    int before = r->a->mirrors;
    advance(r->w, 30000);
    assert_true(r->a->mirrors > before && r->a->mirrors < before + 6);
    assert_state(r->w, r->id, RUNNING); /* it stops nothing */
    r->a->mirror_code = ERR_OK;
    advance(r->w, 600000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    assert_string_equal(ckpt(r->w, r->id, 10, 1)->mirror_note, "");
    life_end(r);
}

static void the_newest_goes_first(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_UNREACHABLE;
    commit(r, 10);
    r->a->mirror_code = ERR_OK;
    commit(r, 20);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-20.a1 s3://bucket/p");
    advance(r->w, 20000);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-10.a1 s3://bucket/p");
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    life_end(r);
}

static void wrong_keys_are_given_up_and_said(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_REFUSED;
    commit(r, 10);
    advance(r->w, 60000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(FAILED));
    assert_int_equal(r->a->mirrors, 3);
    assert_says(event_of(r->w, r->id, "checkpoint-not-mirrored")->text, "after 3 tries");
    assert_state(r->w, r->id, RUNNING);
    r->a->mirror_code = ERR_OK;
    commit(r, 20); /* each has its own chance */
    assert_int_equal(ckpt(r->w, r->id, 20, 1)->mirror, MIRROR(MIRRORED));
    life_end(r);
}

static void ask_copy(struct life *r, int64_t step)
{
    ask_ckpt(r->w, r->id, BOOST__CHECKPOINT_REQUEST__WHAT__MIRROR, step, NULL);
}

static void one_that_was_given_up_is_tried_now_and_then(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_REFUSED;
    commit(r, 10);
    advance(r->w, 60000);
    assert_int_equal(r->a->mirrors, 3);
    advance(r->w, 4 * 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(FAILED));
    assert_in_range(r->a->mirrors, 3 + 6, 3 + 8); /* 5, 10, 20, 40, 60, 60 ... minutes */
    assert_int_equal(count_events(r->w, r->id, "checkpoint-not-mirrored"), 1);
    r->a->mirror_code = ERR_OK;
    advance(r->w, 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    assert_string_equal(ckpt(r->w, r->id, 10, 1)->mirror_note, "");
    life_end(r);
}

static void a_new_controller_or_agent_tries_at_once(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_REFUSED;
    commit(r, 10);
    advance(r->w, 60000);
    controller_restart(r->w);
    join_world(r->w, r->a);
    pump(r->w);
    assert_int_equal(r->a->mirrors, 4);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(FAILED));
    r->a->mirror_code = ERR_OK; /* its configuration was mended */
    disconnect(r->w, r->a);
    snprintf(r->a->instance, sizeof r->a->instance, "instance-n1-2");
    join_world(r->w, r->a);
    pump(r->w);
    assert_int_equal(r->a->mirrors, 5);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    life_end(r);
}

static void a_user_has_it_tried_at_once(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_REFUSED;
    commit(r, 10);
    advance(r->w, 60000);
    r->a->mirror_code = ERR_OK;
    ask_copy(r, -1);
    assert_int_equal(r->w->reply_rc, ERR_OK);
    assert_says(r->w->reply_text, "1 checkpoint of job");
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    ask_copy(r, -1);
    assert_says(r->w->reply_text, "no checkpoint without a copy");
    assert_int_equal(r->a->mirrors, 4);
    ask_copy(r, 10); /* by name: compared, and made where it is gone */
    assert_int_equal(r->a->mirrors, 5);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    life_end(r);
}

static void how_far_it_is_shows(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->silent_mirror = true;
    commit(r, 10);
    struct checkpoint *k = ckpt(r->w, r->id, 10, 1);
    assert_true(k->mirror_task != 0);
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__TaskProgress p = BOOST__TASK_PROGRESS__INIT;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK_PROGRESS;
    m.task_progress = &p;
    p.has_id = p.has_done = p.has_total = true;
    p.id = k->mirror_task;
    p.done = 300;
    p.total = 1000;
    say(r->w, r->a->name, &m);
    pump(r->w);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__ShowReply *show = core_show(r->w->core, job_of(r->w, r->id), &mem);
    assert_int_equal(show->checkpoints[0]->mirror_done, 300);
    assert_int_equal(show->checkpoints[0]->mirror_total, 1000);
    Boost__WaitInfo *wait = show->waits[show->n_waits - 1];
    assert_says(wait->name, "copy of the checkpoint of step 10");
    assert_true(wait->bytes_done == 300 && wait->bytes_total == 1000);
    arena_free(&mem);
    life_end(r);
}

static void an_outage_leaves_no_copy_behind(void **state)
{
    (void)state;
    struct life *r = begin(1);
    commit(r, 10);
    r->a->delete_code = ERR_UNREACHABLE;
    commit(r, 20);
    advance(r->w, 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->state, BOOST__CHECKPOINT_STATE__VALUE__DELETING);
    assert_says(ckpt(r->w, r->id, 10, 1)->mirror_note, "not deleted yet");
    assert_in_range(r->a->deletes, 6, 12);
    r->a->delete_code = ERR_OK;
    advance(r->w, 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->state, BOOST__CHECKPOINT_STATE__VALUE__DELETED);
    assert_string_equal(ckpt(r->w, r->id, 10, 1)->mirror_note, "");
    life_end(r);
}

/* What is not mounted is not gone, however long it takes; the copy then has all its tries. */
static void files_that_are_not_mounted_are_waited_for(void **state)
{
    (void)state;
    struct life *r = begin(1);
    commit(r, 10);
    r->a->delete_code = ERR_BUSY;
    r->a->failure_text = "/ckpt is not there: is its file system mounted?";
    commit(r, 20);
    advance(r->w, 48 * 3600 * 1000);
    controller_restart(r->w);
    join_world(r->w, r->a);
    advance(r->w, 60 * 1000);
    struct checkpoint *k = ckpt(r->w, r->id, 10, 1);
    assert_int_equal(k->state, CKPT(DELETING));
    assert_says(k->note, "not deleted yet: /ckpt is not there");
    assert_int_equal(count_events(r->w, r->id, "checkpoint-not-deleted"), 1);
    r->a->delete_code = ERR_UNREACHABLE; /* the copy's */
    advance(r->w, 3600 * 1000);
    k = ckpt(r->w, r->id, 10, 1);
    assert_int_equal(k->state, CKPT(DELETING));
    assert_string_equal(k->note, "");
    assert_says(k->mirror_note, "not deleted yet");
    r->a->delete_code = ERR_OK;
    advance(r->w, 3600 * 1000);
    k = ckpt(r->w, r->id, 10, 1);
    assert_int_equal(k->state, CKPT(DELETED));
    assert_string_equal(k->note, "");
    life_end(r);
}

/* Neither whoever asks for it again has to wait, nor who brings the file system back with a node. */
static void a_deletion_that_waits_is_tried_at_once_when_somebody_comes(void **state)
{
    (void)state;
    struct life *r = begin(1);
    commit(r, 10);
    r->a->delete_code = ERR_BUSY;
    r->a->failure_text = "/ckpt is not there: is its file system mounted?";
    commit(r, 20);
    commit(r, 30);
    advance(r->w, 24 * 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->state, CKPT(DELETING));
    r->a->delete_code = ERR_OK;
    ask_ckpt(r->w, r->id, BOOST__CHECKPOINT_REQUEST__WHAT__RM, 10, NULL);
    assert_int_equal(r->w->reply_rc, ERR_OK);
    advance(r->w, 1000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->state, CKPT(DELETED));
    assert_int_equal(ckpt(r->w, r->id, 20, 1)->state, CKPT(DELETING));
    disconnect(r->w, r->a);
    join_world(r->w, r->a);
    advance(r->w, 1000);
    assert_int_equal(ckpt(r->w, r->id, 20, 1)->state, CKPT(DELETED));
    life_end(r);
}

/* What was waited for is no try: one that was given up has all of them, as one that was committed. */
static void one_that_was_given_up_has_all_its_tries_after_the_wait(void **state)
{
    (void)state;
    struct life *r = begin(1);
    commit(r, 10);
    r->a->delete_code = ERR_BUSY;
    r->a->failure_text = "/ckpt is not there: is its file system mounted?";
    say_step(r->w, r->a, r->x, 20);
    say_shard(r->w, r->a, r->x, 0, 20, "/ckpt is not there");
    say_shard(r->w, r->a, r->x, 1, 20, "/ckpt is not there");
    advance(r->w, 24 * 3600 * 1000);
    assert_int_equal(ckpt(r->w, r->id, 20, 1)->state, CKPT(ABANDONED));
    assert_true(r->a->deletes > 20);
    r->a->delete_code = ERR_IO;
    for (int before = r->a->deletes; r->a->deletes == before;)
        advance(r->w, 1000);
    r->a->delete_code = ERR_OK;
    advance(r->w, 60 * 1000);
    assert_string_equal(ckpt(r->w, r->id, 20, 1)->path, "");
    assert_int_equal(count_events(r->w, r->id, "checkpoint-not-deleted"), 0);
    life_end(r);
}

static void an_agent_that_goes_is_no_failure(void **state)
{
    (void)state;
    struct life *r = begin(3);
    r->a->mirror_code = ERR_BUSY;
    commit(r, 10);
    advance(r->w, 300000); /* an earlier run of the agent still copies */
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(PENDING));
    assert_true(r->a->mirrors > 10);
    r->a->mirror_code = ERR_OK;
    advance(r->w, 10000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    life_end(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_committed_is_copied_and_goes_with_its_copy),
        cmocka_unit_test(a_store_that_is_away_is_tried_again),
        cmocka_unit_test(the_newest_goes_first),
        cmocka_unit_test(wrong_keys_are_given_up_and_said),
        cmocka_unit_test(an_agent_that_goes_is_no_failure),
        cmocka_unit_test(one_that_was_given_up_is_tried_now_and_then),
        cmocka_unit_test(a_new_controller_or_agent_tries_at_once),
        cmocka_unit_test(a_user_has_it_tried_at_once),
        cmocka_unit_test(how_far_it_is_shows),
        cmocka_unit_test(an_outage_leaves_no_copy_behind),
        cmocka_unit_test(files_that_are_not_mounted_are_waited_for),
        cmocka_unit_test(a_deletion_that_waits_is_tried_at_once_when_somebody_comes),
        cmocka_unit_test(one_that_was_given_up_has_all_its_tries_after_the_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
