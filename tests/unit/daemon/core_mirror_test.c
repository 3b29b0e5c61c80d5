/* Copies of checkpoints in an object store, as the controller sees them. */
#include "tests/unit/daemon/core_world.h"

#define MIRROR(s) BOOST__MIRROR_STATE__VALUE__##s

static struct checkpoint *ckpt(struct world *w, int64_t id, int64_t step, int attempt)
{
    struct checkpoint *k = job_checkpoint(job_of(w, id), step, attempt);
    assert_non_null(k);
    return k;
}

struct run {
    struct world *w;
    struct fake_agent *a;
    struct fake_attempt *x;
    int64_t id;
    struct arena mem;
};

static struct run *begin(int keep)
{
    static struct run r;
    arena_init(&r.mem, 1 << 20);
    r.w = world_new();
    r.a = agent_add(r.w, "n1", 2);
    join_world(r.w, r.a);
    Boost__JobSpec *s = spec_new(&r.mem);
    s->checkpoint->mirror = arena_strdup(&r.mem, "s3://bucket/p");
    s->checkpoint->has_keep = 1;
    s->checkpoint->keep = keep;
    r.id = submit_spec(r.w, s, false);
    r.x = newest(r.w, r.a, r.id);
    return &r;
}

static void end(struct run *r)
{
    arena_free(&r->mem);
    world_free(r->w);
}

static void commit(struct run *r, int64_t step)
{
    say_step(r->w, r->a, r->x, step);
    say_checkpoint(r->w, r->a, r->x, step);
    pump(r->w);
}

static void what_is_committed_is_copied_and_goes_with_its_copy(void **state)
{
    (void)state;
    struct run *r = begin(1);
    commit(r, 10);
    assert_int_equal(r->a->mirrors, 1);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-10.a1 s3://bucket/p");
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    assert_says(event_of(r->w, r->id, "checkpoint-mirrored")->text, "step 10 copied to s3://bucket/p");
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
    end(r);
}

static void a_store_that_is_away_is_tried_again(void **state)
{
    (void)state;
    struct run *r = begin(3);
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
    end(r);
}

static void the_newest_goes_first(void **state)
{
    (void)state;
    struct run *r = begin(3);
    r->a->mirror_code = ERR_UNREACHABLE;
    commit(r, 10);
    r->a->mirror_code = ERR_OK;
    commit(r, 20);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-20.a1 s3://bucket/p");
    advance(r->w, 20000);
    assert_string_equal(r->a->mirrored, "/ckpt/0badcafe-1/step-10.a1 s3://bucket/p");
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    end(r);
}

static void wrong_keys_are_given_up_and_said(void **state)
{
    (void)state;
    struct run *r = begin(3);
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
    end(r);
}

static void an_agent_that_goes_is_no_failure(void **state)
{
    (void)state;
    struct run *r = begin(3);
    r->a->mirror_code = ERR_BUSY;
    commit(r, 10);
    advance(r->w, 300000); /* an earlier run of the agent still copies */
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(PENDING));
    assert_true(r->a->mirrors > 10);
    r->a->mirror_code = ERR_OK;
    advance(r->w, 10000);
    assert_int_equal(ckpt(r->w, r->id, 10, 1)->mirror, MIRROR(MIRRORED));
    end(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_committed_is_copied_and_goes_with_its_copy),
        cmocka_unit_test(a_store_that_is_away_is_tried_again),
        cmocka_unit_test(the_newest_goes_first),
        cmocka_unit_test(wrong_keys_are_given_up_and_said),
        cmocka_unit_test(an_agent_that_goes_is_no_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
