/* What people are shown is what a crash leaves: the store's acknowledgement is held back, or it refuses. */
#include "tests/unit/daemon/core_world.h"

#define PIN   BOOST__CHECKPOINT_REQUEST__WHAT__PIN
#define UNPIN BOOST__CHECKPOINT_REQUEST__WHAT__UNPIN
#define RM    BOOST__CHECKPOINT_REQUEST__WHAT__RM

static struct life *begin(int keep)
{
    struct life *l = life_begin(keep, NULL);
    checkpoint_at(l->w, l->a, l->x, 20);
    return l;
}

/* What `ckpt ls` has; show has the same. */
static const Boost__CheckpointInfo *shown(struct life *l, int64_t step)
{
    struct job *job = job_of(l->w, l->id);
    Boost__CheckpointsReply *ls = core_checkpoints(l->w->core, job, &l->mem);
    Boost__ShowReply *show = core_show(l->w->core, job, &l->mem);
    assert_non_null(ls);
    assert_non_null(show);
    assert_int_equal(show->n_checkpoints, ls->n_checkpoints);
    for (size_t i = 0; i < ls->n_checkpoints; i++) {
        assert_int_equal(show->checkpoints[i]->state, ls->checkpoints[i]->state);
        assert_int_equal(show->checkpoints[i]->pinned, ls->checkpoints[i]->pinned);
        if (ls->checkpoints[i]->step == step)
            return ls->checkpoints[i];
    }
    fail_msg("no checkpoint of step %lld is shown", (long long)step);
    return NULL;
}

static int64_t last_shown(struct life *l)
{
    Boost__JobSummary *s = core_summary(l->w->core, job_of(l->w, l->id), &l->mem);
    assert_non_null(s);
    return s->has_last_checkpoint_step ? s->last_checkpoint_step : -1;
}

static int row(struct life *l, int64_t step)
{
    const struct store_checkpoint *k = mem_checkpoint(l->w->store, l->id, step, 1);
    return k ? k->state : -1;
}

/* The manifest is written, and what the controller makes of that is on its way to the store. */
static void commit_held_back(struct life *l, int64_t step)
{
    l->a->answers = false;
    checkpoint_at(l->w, l->a, l->x, step);
    l->w->store->stuck = true;
    uint64_t task = ckpt(l->w, l->id, step, 1)->task;
    assert_true(task != 0);
    say_task(l->w, "n1", task, NULL);
    pump(l->w);
    l->a->answers = true;
}

/* Of those that wait. */
static void store_one(struct life *l, int refuses)
{
    l->w->store->stuck = false;
    l->w->store->refuses = refuses;
    assert_true(mem_commit_one(l->w->store, true));
    l->w->store->refuses = 0;
}

static void a_commit_is_shown_when_it_is_durable(void **state)
{
    (void)state;
    struct life *l = begin(1);
    job_of(l->w, l->id)->restarts_used = 2; /* an earlier attempt's, in its row with the next change */
    ask_ckpt(l->w, l->id, PIN, 20, NULL);
    ask_ckpt(l->w, l->id, UNPIN, 20, NULL);
    commit_held_back(l, 40);
    assert_int_equal(row(l, 40), CKPT(WRITING));
    assert_int_equal(shown(l, 40)->state, CKPT(WRITING));
    assert_int_equal(shown(l, 20)->state, CKPT(COMMITTED));
    assert_int_equal(last_shown(l), 20);
    assert_int_equal(core_show(l->w->core, job_of(l->w, l->id), &l->mem)->restarts_used, 2);
    assert_int_equal(count_events(l->w, l->id, "checkpoint"), 1);
    assert_int_equal(l->a->deletes, 0);
    advance(l->w, 20000);
    assert_int_equal(shown(l, 40)->state, CKPT(WRITING));
    assert_int_equal(l->a->deletes, 0);
    l->w->store->stuck = false;
    pump(l->w);
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    assert_int_equal(shown(l, 20)->state, CKPT(DELETED));
    assert_int_equal(last_shown(l), 40);
    assert_int_equal(core_show(l->w->core, job_of(l->w, l->id), &l->mem)->restarts_used, 0);
    assert_int_equal(l->a->deletes, 1);
    life_end(l);
}

static void a_crash_leaves_what_was_shown(void **state)
{
    (void)state;
    struct life *l = begin(1);
    commit_held_back(l, 40);
    const int before[] = {shown(l, 20)->state, shown(l, 40)->state};
    l->w->store->stuck = false;
    controller_restart(l->w);
    assert_int_equal(shown(l, 20)->state, before[0]);
    assert_int_equal(shown(l, 40)->state, before[1]);
    assert_int_equal(last_shown(l), 20);
    join_world(l->w, l->a); /* its manifest is written again */
    pump(l->w);
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    assert_int_equal(shown(l, 20)->state, CKPT(DELETED));
    life_end(l);
}

static void a_full_disk_of_the_store_commits_nothing(void **state)
{
    (void)state;
    struct life *l = begin(1);
    commit_held_back(l, 40);
    l->w->store->sick = ERR_NOSPACE;
    advance(l->w, 60000);
    assert_int_equal(shown(l, 40)->state, CKPT(WRITING));
    assert_says(shown(l, 40)->note, "COMMITTED as soon as state.db is written");
    assert_int_equal(shown(l, 20)->state, CKPT(COMMITTED));
    l->w->store->stuck = false;
    l->w->store->sick = 0;
    pump(l->w);
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    life_end(l);
}

/* No manifest is asked for before the rows of its shards are there: the usual way to wait. */
static void a_full_disk_of_the_store_is_said_of_shards_too(void **state)
{
    (void)state;
    struct life *l = begin(1);
    l->w->store->stuck = true;
    l->w->store->sick = ERR_NOSPACE;
    say_step(l->w, l->a, l->x, 40);
    say_checkpoint(l->w, l->a, l->x, 40);
    advance(l->w, 60000);
    assert_int_equal(job_checkpoint(job_of(l->w, l->id), 40, 1)->state, CKPT(WRITING));
    assert_says(shown(l, 40)->note, "COMMITTED as soon as state.db is written");
    l->w->store->stuck = false;
    l->w->store->sick = 0;
    pump(l->w);
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    assert_string_equal(shown(l, 40)->note, "");
    life_end(l);
}

static void a_refused_commit_is_shown_when_it_is_written_after_all(void **state)
{
    (void)state;
    struct life *l = begin(1);
    commit_held_back(l, 40);
    store_one(l, ERR_NOMEM);
    assert_int_equal(shown(l, 40)->state, CKPT(WRITING));
    assert_int_equal(shown(l, 20)->state, CKPT(COMMITTED));
    assert_int_equal(l->a->deletes, 0);
    advance(l->w, 2000);
    assert_int_equal(row(l, 40), CKPT(COMMITTED));
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    assert_int_equal(shown(l, 20)->state, CKPT(DELETED));
    life_end(l);
}

static void pins_are_shown_when_they_are_durable(void **state)
{
    (void)state;
    struct life *l = begin(1);
    for (int on = 1; on >= 0; on--) {
        l->w->store->stuck = true;
        ask_ckpt(l->w, l->id, on ? PIN : UNPIN, 20, NULL);
        assert_int_equal(l->w->replies, 0);
        assert_int_equal(shown(l, 20)->pinned, !on);
        l->w->store->stuck = false;
        pump(l->w);
        assert_int_equal(l->w->replies, 1);
        assert_int_equal(shown(l, 20)->pinned, on);
    }
    life_end(l);
}

static void a_deletion_is_shown_when_it_is_durable(void **state)
{
    (void)state;
    struct life *l = begin(2);
    say_checkpoint(l->w, l->a, l->x, 40);
    pump(l->w);
    l->w->store->stuck = true;
    ask_ckpt(l->w, l->id, RM, 20, NULL);
    assert_int_equal(l->w->replies, 0);
    assert_int_equal(shown(l, 20)->state, CKPT(COMMITTED));
    assert_int_equal(l->a->deletes, 0);
    store_one(l, 0);
    l->w->store->stuck = true;
    core_run(l->w->core);
    pump(l->w); /* the files are gone, and the row of that waits */
    assert_int_equal(l->w->replies, 1);
    assert_int_equal(l->a->deletes, 1);
    assert_int_equal(shown(l, 20)->state, CKPT(DELETING));
    l->w->store->stuck = false;
    pump(l->w);
    assert_int_equal(shown(l, 20)->state, CKPT(DELETED));
    life_end(l);
}

/* The commit is refused, the change behind it is not: what it had made superfluous is still needed. */
static void no_older_one_goes_for_one_that_is_not_durable(void **state)
{
    (void)state;
    struct life *l = begin(1);
    ask_ckpt(l->w, l->id, PIN, 20, NULL);
    assert_int_equal(shown(l, 20)->pinned, 1);
    commit_held_back(l, 40);
    ask_ckpt(l->w, l->id, RM, 20, NULL);
    assert_int_equal(l->w->reply_rc, ERR_REFUSED); /* pinned */
    ask_ckpt(l->w, l->id, UNPIN, 20, NULL);
    ask_ckpt(l->w, l->id, RM, 20, NULL);
    assert_int_equal(l->w->reply_rc, ERR_REFUSED);
    assert_says(l->w->reply_text, "is the only one that job 1 can go on from");
    store_one(l, ERR_NOMEM); /* the commit */
    store_one(l, 0);         /* the unpinning */
    assert_int_equal(row(l, 20), CKPT(COMMITTED));
    assert_int_equal(row(l, 40), CKPT(WRITING));
    assert_int_equal(shown(l, 20)->state, CKPT(COMMITTED));
    assert_int_equal(shown(l, 20)->pinned, 0);
    assert_int_equal(l->a->deletes, 0);
    advance(l->w, 2000); /* all is written again */
    assert_int_equal(shown(l, 40)->state, CKPT(COMMITTED));
    assert_int_equal(shown(l, 20)->state, CKPT(DELETED));
    life_end(l);
}

static void what_a_job_began_from_stays_until_its_own_is_durable(void **state)
{
    (void)state;
    struct life *l = begin(1);
    int64_t first = l->id;
    say_finished(l->w, l->a, l->x);
    pump(l->w);
    assert_state(l->w, first, COMPLETED);
    int64_t step = last_shown(l);
    Boost__JobSpec *s = spec_new(&l->mem);
    Boost__InitFrom from = BOOST__INIT_FROM__INIT;
    static char path[] = "job:1";
    from.path = path;
    from.has_weights_only = from.weights_only = true;
    s->checkpoint->init_from = &from;
    int64_t second = l->id = submit_spec(l->w, s, false);
    assert_true(second > first);
    l->x = newest(l->w, l->a, second);
    commit_held_back(l, 40);
    l->id = first;
    ask_ckpt(l->w, l->id, RM, step, NULL);
    assert_int_equal(l->w->replies, 1);
    assert_int_equal(l->w->reply_rc, ERR_REFUSED);
    assert_says(l->w->reply_text, "is in use");
    l->w->store->stuck = false;
    pump(l->w);
    ask_ckpt(l->w, l->id, RM, step, NULL);
    assert_int_equal(l->w->reply_rc, ERR_OK);
    assert_int_equal(shown(l, step)->state, CKPT(DELETED));
    life_end(l);
}

static bool any(const struct job *job, const void *arg)
{
    (void)job;
    (void)arg;
    return true;
}

/* An end waits for the store too: whoever acts on it, as a script behind `wait`, has to find it there later. */
static void an_end_is_shown_when_it_is_durable(void **state)
{
    (void)state;
    struct life *l = begin(1);
    Boost__JobSummary *s;
    int64_t *ids = NULL;
    Boost__JobSpec *behind = spec_new(&l->mem);
    char *after[] = {"afternotok:1"};
    behind->n_after = 1;
    behind->after = after;
    int64_t waits = submit_spec(l->w, behind, false);
    l->a->obeys_kill = false;
    assert_int_equal(control(l->w, CANCEL, l->id, true), ERR_OK);
    l->w->store->stuck = true;
    kill_all(l->w, l->a, l->x);
    pump(l->w);
    assert_state(l->w, l->id, CANCELLED);
    s = core_summary(l->w->core, job_of(l->w, l->id), &l->mem);
    assert_int_equal(s->state, STATE(STOPPING));
    assert_false(s->has_ended_wall_ns);
    assert_says(s->info, "to CANCELLED as soon as state.db is written");
    assert_int_equal(core_select(l->w->core, true, any, NULL, &ids), 2);
    free(ids);
    /* Nor is anybody else told of it. */
    assert_says(core_summary(l->w->core, job_of(l->w, waits), &l->mem)->info, "is STOPPING");
    const Boost__ControlRequest__Verb verbs[] = {CANCEL, HOLD, RELEASE, CHECKPOINT};
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
        assert_int_equal(control(l->w, verbs[i], l->id, true), ERR_REFUSED);
        assert_string_equal(l->w->reply_text, "job 1 is STOPPING: it ends as soon as state.db is written");
    }
    l->w->store->stuck = false;
    pump(l->w);
    s = core_summary(l->w->core, job_of(l->w, l->id), &l->mem);
    assert_int_equal(s->state, STATE(CANCELLED));
    assert_true(s->has_ended_wall_ns);
    assert_int_equal(core_select(l->w->core, true, any, NULL, &ids), 1);
    free(ids);
    life_end(l);
}

/* Nor does it go back to a state that it has left, whatever its row says still. */
static void an_end_is_shown_from_where_the_job_was(void **state)
{
    (void)state;
    struct life *l = begin(1);
    say_finished(l->w, l->a, l->x);
    pump(l->w);
    l->id = submit(l->w);
    l->x = newest(l->w, l->a, l->id);
    assert_state(l->w, l->id, STARTING);
    l->w->store->stuck = true;
    say_step(l->w, l->a, l->x, 1);
    pump(l->w);
    assert_int_equal(core_summary(l->w->core, job_of(l->w, l->id), &l->mem)->state, STATE(RUNNING));
    l->a->obeys_kill = false;
    core_control(l->w->core, CANCEL, l->id, true, &user_ann, on_control, l->w);
    pump(l->w);
    kill_all(l->w, l->a, l->x);
    pump(l->w);
    assert_state(l->w, l->id, CANCELLED);
    assert_int_equal(mem_job(l->w->store, l->id)->state, STATE(STARTING));
    assert_int_equal(core_summary(l->w->core, job_of(l->w, l->id), &l->mem)->state, STATE(STOPPING));
    store_one(l, 0);
    assert_int_equal(core_summary(l->w->core, job_of(l->w, l->id), &l->mem)->state, STATE(STOPPING));
    pump(l->w);
    assert_int_equal(core_summary(l->w->core, job_of(l->w, l->id), &l->mem)->state, STATE(CANCELLED));
    life_end(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_commit_is_shown_when_it_is_durable),
        cmocka_unit_test(a_crash_leaves_what_was_shown),
        cmocka_unit_test(a_full_disk_of_the_store_commits_nothing),
        cmocka_unit_test(a_full_disk_of_the_store_is_said_of_shards_too),
        cmocka_unit_test(a_refused_commit_is_shown_when_it_is_written_after_all),
        cmocka_unit_test(pins_are_shown_when_they_are_durable),
        cmocka_unit_test(a_deletion_is_shown_when_it_is_durable),
        cmocka_unit_test(no_older_one_goes_for_one_that_is_not_durable),
        cmocka_unit_test(what_a_job_began_from_stays_until_its_own_is_durable),
        cmocka_unit_test(an_end_is_shown_when_it_is_durable),
        cmocka_unit_test(an_end_is_shown_from_where_the_job_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
