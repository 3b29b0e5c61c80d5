/* Restarts on a user's word: with changes, from an older checkpoint, and of jobs that have ended, which start from
 * the checkpoint of another. */
#include "tests/unit/daemon/core_world.h"

struct answer {
    int rc;
    int64_t job;
    bool new_job;
    char text[1024], hint[512];
    int n;
};

static void on_restart(void *arg, int rc, const struct error *err, int64_t job, bool new_job, const char *text)
{
    struct answer *a = arg;
    a->n++;
    a->rc = rc;
    a->job = job;
    a->new_job = new_job;
    snprintf(a->text, sizeof a->text, "%s", rc ? err->message : text);
    snprintf(a->hint, sizeof a->hint, "%s", rc ? err->hint : "");
}

static struct answer restart(struct world *w, int64_t id, const Boost__JobSpec *spec, int64_t from)
{
    struct answer a = {.rc = -1};
    core_restart(w->core, id, spec, from, &user_ann, on_restart, &a);
    pump(w);
    assert_int_equal(a.n, 1);
    return a;
}

static void with_changes(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    checkpoint_at(w, a, x, 20);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->optimizer->lr = 5e-4;
    spec->run->steps = 500;
    struct answer r = restart(w, id, spec, -1);
    assert_int_equal(r.rc, ERR_OK);
    assert_int_equal(r.job, id);
    assert_false(r.new_job);
    assert_says(r.text, "finishes its step, checkpoints (at most 30 s), then goes on in attempt 2");
    assert_int_equal(x->terms, 1);
    x = recovered(w, a, id);
    assert_int_equal(x->attempt, 2);
    assert_int_equal(x->from_step, 21);
    assert_int_equal(x->steps, 500);
    assert_true(job_of(w, id)->resolved->optimizer->lr == 5e-4 && job_of(w, id)->spec->optimizer->lr == 5e-4);
    assert_int_equal(job_of(w, id)->restarts_used, 0);
    assert_non_null(event_of(w, id, "restart"));
    assert_says(event_of(w, id, "restart")->text, "with changes");
    arena_free(&mem);
    world_free(w);
}

static void on_control_of(void *arg, int rc, const struct error *err, const char *text)
{
    (void)err;
    (void)text;
    *(int *)arg = rc;
}

static bool on_page(void *arg, int rc, const struct error *err, const struct core_stacks *stacks)
{
    (void)err;
    (void)stacks;
    if (rc)
        *(int *)arg = rc;
    return true;
}

/* Whose word counts for a job is the same whatever is asked. */
static void its_owner_and_those_who_may_do_all(void **state)
{
    (void)state;
    static const struct core_user admin = {.uid = 1002, .gid = 1002, .name = "carol", .admin = true};
    const struct {
        const struct core_user *user;
        int rc;
    } who[] = {{&user_bob, ERR_REFUSED}, {&user_ann, ERR_OK}, {&admin, ERR_OK}};
    for (size_t i = 0; i < sizeof who / sizeof *who; i++) {
        struct world *w = world_new();
        struct fake_agent *a = agent_add(w, "gpu01", 2);
        join_world(w, a);
        int64_t id;
        run_job(w, a, &id);
        int rc = -1;
        Boost__UpdateRequest update = BOOST__UPDATE_REQUEST__INIT;
        update.has_priority = 1;
        update.priority = 60;
        core_update(w->core, &update, id, who[i].user, on_control_of, &rc);
        pump(w);
        assert_int_equal(rc, who[i].rc);
        Boost__StacksRequest stacks = BOOST__STACKS_REQUEST__INIT;
        int looked = ERR_OK;
        core_collect_stacks(w->core, job_of(w, id), &stacks, who[i].user, on_page, &looked);
        assert_int_equal(looked, who[i].rc);
        struct answer r = {.rc = -1};
        core_restart(w->core, id, NULL, -1, who[i].user, on_restart, &r);
        pump(w);
        assert_int_equal(r.rc, who[i].rc);
        rc = -1;
        core_control(w->core, BOOST__CONTROL_REQUEST__VERB__CANCEL, id, true, who[i].user, on_control_of, &rc);
        pump(w);
        assert_int_equal(rc, who[i].rc);
        world_free(w);
    }
}

/* Acknowledged and not begun: it outlives the controller. */
static void changes_outlive_the_controller(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    a->obeys_term = false;
    Boost__JobSpec *spec = spec_new(&mem);
    spec->run->steps = 500;
    assert_int_equal(restart(w, id, spec, -1).rc, ERR_OK);
    assert_state(w, id, STOPPING);
    assert_int_equal(job_of(w, id)->resolved->run->steps, 100);
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_state(w, id, STOPPING);
    kill_all(w, a, x);
    pump(w);
    x = recovered(w, a, id);
    assert_int_equal(x->steps, 500);
    assert_null(job_of(w, id)->next_spec);
    controller_restart(w);
    join_world(w, a);
    pump(w);
    assert_int_equal(job_of(w, id)->spec->run->steps, 500);
    arena_free(&mem);
    world_free(w);
}

static void from_an_older_checkpoint(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    for (int64_t step = 20; step <= 60; step += 20)
        checkpoint_at(w, a, x, step);
    struct answer r = restart(w, id, NULL, 30);
    assert_int_equal(r.rc, ERR_NOT_FOUND);
    assert_says(r.hint, "it has those of step 20, 40, 60");
    assert_state(w, id, RUNNING);
    assert_int_equal(restart(w, id, NULL, 40).rc, ERR_OK);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 40);
    assert_int_equal(job_of(w, id)->checkpoint_step, 40);
    assert_int_equal(job_of(w, id)->step, 41);
    /* Its next failure does not go on from what was set aside, whatever the number of its step, and whoever asks. */
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    controller_restart(w);
    join_world(w, a);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 40);
    /* Progress is what comes after 40. */
    checkpoint_at(w, a, x, 50);
    assert_true(job_attempt(job_of(w, id), 3)->advanced);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    assert_int_equal(recovered(w, a, id)->from_step, 50);
    world_free(w);
}

/* It ends while its new files are looked at. */
static void ended_meanwhile(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    a->answers = false;
    struct answer r = {.rc = -1};
    core_restart(w->core, id, spec_new(&mem), -1, &user_ann, on_restart, &r);
    pump(w);
    assert_int_equal(r.n, 0);
    kill_all(w, a, x);
    control(w, CANCEL, id, true);
    advance(w, 3000);
    assert_state(w, id, CANCELLED);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.rc, ERR_REFUSED);
    assert_says(r.text, "has ended meanwhile");
    /* An agent that does not answer keeps nothing up. */
    a->answers = true;
    id = submit(w);
    a->answers = false;
    r = (struct answer){.rc = -1};
    core_restart(w->core, id, spec_new(&mem), -1, &user_ann, on_restart, &r);
    advance(w, 3000);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.rc, ERR_OK);
    arena_free(&mem);
    world_free(w);
}

static void held_and_queued_ones(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *spec = spec_new(&mem), *more = spec_new(&mem);
    more->run->steps = 500;
    more->has_priority = 1;
    more->priority = 70;
    int64_t first = submit_spec(w, spec, false), second = submit_spec(w, spec, false);
    int64_t held = submit_spec(w, spec, true);
    assert_int_equal(restart(w, second, more, -1).rc, ERR_OK);
    assert_state(w, second, QUEUED);
    assert_int_equal(restart(w, held, more, -1).rc, ERR_OK);
    assert_state(w, held, QUEUED);
    join_world(w, a);
    pump(w);
    assert_state(w, first, QUEUED);
    assert_state(w, second, STARTING); /* of the higher priority now */
    assert_int_equal(newest(w, a, second)->steps, 500);
    arena_free(&mem);
    world_free(w);
}

static Boost__JobSpec *from_job(struct arena *mem, const char *path, bool weights_only)
{
    Boost__JobSpec *spec = spec_new(mem);
    Boost__InitFrom *init = arena_alloc(mem, sizeof *init);
    boost__init_from__init(init);
    init->path = arena_strdup(mem, path);
    init->has_weights_only = 1;
    init->weights_only = weights_only;
    spec->checkpoint->init_from = init;
    return spec;
}

static void what_cannot_be(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->model->has_norm_eps = 1;
    spec->model->norm_eps = 0.1;
    assert_says(restart(w, id, spec, -1).text, "job 1 checkpoints and goes on from that: model.norm_eps = 0.1");
    checkpoint_at(w, a, x, 20);
    spec = spec_new(&mem);
    spec->model->hidden = 128;
    spec->parallel->global_batch = 8;
    struct answer r = restart(w, id, spec, -1);
    assert_int_equal(r.rc, ERR_INVALID);
    assert_says(r.text, "model.hidden = 128, the checkpoint has 64");
    assert_says(r.text, "parallel.global_batch = 8, the checkpoint has 4");
    assert_says(r.hint, "--set model.hidden=64");
    spec = spec_new(&mem);
    spec->model->has_rope_theta = 1;
    spec->model->rope_theta = 500;
    assert_says(restart(w, id, spec, -1).text, "model.rope_theta = 500, the checkpoint has 10000");
    spec = spec_new(&mem);
    spec->run->has_seed = 1;
    spec->run->seed = 5;
    assert_says(restart(w, id, spec, -1).text, "run.seed = 5, the weights were drawn with 1");
    assert_says(restart(w, id, from_job(&mem, "job:1", false), -1).text, "from its own checkpoint, not from job:1");
    spec = spec_new(&mem);
    spec->run->steps = 15;
    assert_says(restart(w, id, spec, -1).text, "run.steps = 15: the checkpoint is of step 20 already");
    spec = spec_new(&mem);
    spec->name = arena_strdup(&mem, "other");
    assert_says(restart(w, id, spec, -1).text, "does not rename job 1 (tiny)");
    spec = spec_new(&mem);
    spec->optimizer->lr = 99;
    assert_int_equal(restart(w, id, spec, -1).rc, ERR_INVALID);
    /* Files that are not there are found while the old attempt still runs. */
    a->preflight_code = ERR_NOT_FOUND;
    struct answer r2 = restart(w, id, spec_new(&mem), -1);
    assert_int_equal(r2.rc, ERR_INVALID);
    assert_says(r2.text, "data.bin is not there");
    a->preflight_code = 0;
    struct answer other = {.rc = -1};
    core_restart(w->core, id, NULL, -1, &user_bob, on_restart, &other);
    assert_int_equal(other.rc, ERR_REFUSED);
    assert_state(w, id, RUNNING);
    assert_int_equal(x->terms + x->kills, 0);
    a->obeys_term = false;
    control(w, CANCEL, id, false);
    assert_int_equal(restart(w, id, NULL, -1).rc, ERR_REFUSED);
    arena_free(&mem);
    world_free(w);
}

/* While the files of a job that has not trained are looked at, it trains. */
static void what_can_no_longer_be(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    Boost__JobSpec *spec = spec_new(&mem);
    int64_t id = submit_spec(w, spec, false);
    pump(w);
    assert_state(w, id, STARTING);
    spec->model->has_rope_theta = 1;
    spec->model->rope_theta = 500;
    struct answer r = {.rc = -1};
    a->answers = false;
    core_restart(w->core, id, spec, -1, &user_ann, on_restart, &r);
    pump(w);
    uint64_t task = a->last_task;
    a->answers = true;
    checkpoint_at(w, a, newest(w, a, id), 20);
    assert_int_equal(r.n, 0);
    say_task(w, a->name, task, NULL);
    pump(w);
    assert_int_equal(r.rc, ERR_INVALID);
    assert_says(r.text, "model.rope_theta = 500, the checkpoint has 10000");
    assert_state(w, id, RUNNING);
    /* One that starts writes nothing: it begins anew with another model. */
    id = submit_spec(w, spec_new(&mem), false);
    control(w, CANCEL, 1, true);
    advance(w, 1000);
    assert_state(w, id, STARTING);
    assert_int_equal(restart(w, id, spec, -1).rc, ERR_OK);
    arena_free(&mem);
    world_free(w);
}

/* The event comes once, whether or not the agent heard that it came, and a rank cannot write any number of them. */
static void what_a_rank_warns_of_is_an_event(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    say_metrics(w, a, x, 0, 20, 3.0);
    pump(w);
    assert_int_equal(count_events(w, id, "warning"), 0);
    x->warning = "the training data is another";
    say_metrics(w, a, x, 1, 20, 3.0); /* not rank 0 */
    say_metrics(w, a, x, 0, 20, 3.0);
    x->metrics_seq[0]--;
    say_metrics(w, a, x, 0, 20, 3.0);
    pump(w);
    assert_int_equal(count_events(w, id, "warning"), 1);
    assert_string_equal(event_of(w, id, "warning")->text, "the training data is another");
    assert_string_equal(event_of(w, id, "warning")->actor, "rank 0");
    assert_string_equal(event_of(w, id, "warning")->node, "gpu01");
    for (int i = 0; i < 100; i++)
        say_metrics(w, a, x, 0, 21 + i, 3.0);
    pump(w);
    assert_int_equal(count_events(w, id, "warning"), 16);
    world_free(w);
}

/* A job that failed goes on as a new one; what it starts from stays as long as that needs it. */
static void ended_job_as_a_new_one(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    say_step(w, a, x, 40);
    say_checkpoint(w, a, x, 20);
    say_checkpoint(w, a, x, 40);
    pump(w);
    control(w, CANCEL, id, true);
    advance(w, 1000);
    assert_state(w, id, CANCELLED);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->optimizer->lr = 5e-4;
    struct answer r = restart(w, id, spec, -1);
    assert_int_equal(r.rc, ERR_OK);
    assert_true(r.new_job && r.job == id + 1);
    assert_says(r.text, "goes on from the checkpoint of step 40 of job 1");
    advance(w, 1000);
    assert_state(w, r.job, STARTING);
    x = newest(w, a, r.job);
    assert_int_equal(x->from_step, 40);
    assert_string_equal(x->resume, "/ckpt/0badcafe-1/step-40.a1");
    assert_string_equal(job_of(w, r.job)->spec->checkpoint->init_from->path, "job:1@40");
    assert_int_equal(job_of(w, r.job)->uid, 1000);
    say_step(w, a, x, 41);
    pump(w);
    assert_state(w, r.job, RUNNING);
    /* Lost before its first checkpoint it begins there again, also under a new controller. */
    controller_restart(w);
    join_world(w, a);
    pump(w);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, r.job);
    assert_int_equal(x->from_step, 40);
    checkpoint_at(w, a, x, 60);
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    x = recovered(w, a, r.job);
    assert_int_equal(x->from_step, 60);
    assert_says(x->resume, "0badcafe-2/step-60.a2");
    arena_free(&mem);
    world_free(w);
}

static void init_from_is_protected(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2), *b = agent_add(w, "gpu02", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    checkpoint_at(w, a, x, 10);
    int64_t child = submit_spec(w, from_job(&mem, "job:1", true), false);
    assert_int_not_equal(child, 0);
    for (int64_t step = 20; step <= 60; step += 10)
        checkpoint_at(w, a, x, step);
    assert_int_equal(ckpt(w, id, 10, 1)->state, CKPT(COMMITTED));
    assert_int_equal(ckpt(w, id, 20, 1)->state, CKPT(DELETED));
    join_world(w, b);
    pump(w);
    struct fake_attempt *y = newest(w, b, child);
    assert_string_equal(y->resume, "/ckpt/0badcafe-1/step-10.a1");
    assert_int_equal(y->from_step, 0);
    checkpoint_at(w, b, y, 20);
    checkpoint_at(w, a, x, 70);
    assert_int_equal(ckpt(w, id, 10, 1)->state, CKPT(DELETED));
    arena_free(&mem);
    world_free(w);
}

static void init_from_is_checked(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 4);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(submit_spec(w, from_job(&mem, "job:1", false), false), 0);
    assert_says(w->reply_text, "job 1 has no committed checkpoint");
    checkpoint_at(w, a, x, 20);
    assert_int_equal(submit_spec(w, from_job(&mem, "job:7", false), false), 0);
    assert_int_equal(submit_spec(w, from_job(&mem, "job:1@30", false), false), 0);
    assert_says(w->reply_hint, "it has those of step 20");
    assert_int_equal(submit_spec(w, from_job(&mem, "job:1@x", false), false), 0);
    assert_int_equal(submit_spec(w, from_job(&mem, "/some/dir", false), false), 0);
    assert_says(w->reply_text, "is not a checkpoint directory");
    Boost__JobSpec *spec = from_job(&mem, "job:1", true);
    spec->model->layers = 3;
    assert_int_equal(submit_spec(w, spec, false), 0);
    assert_says(w->reply_text, "model.layers = 3, the checkpoint has 2");
    spec = from_job(&mem, "job:1", false);
    spec->run->steps = 20;
    assert_int_equal(submit_spec(w, spec, false), 0);
    assert_says(w->reply_text, "the checkpoint is of step 20 already");
    /* Damaged on the disk: nothing to fall back to, so somebody is to look at it. */
    snprintf(a->verify_bad, sizeof a->verify_bad, "step-20.a1");
    a->verify_code = ERR_CORRUPT;
    int64_t child = submit_spec(w, from_job(&mem, "job:1@20", false), false);
    advance(w, 1000);
    assert_state(w, child, HELD);
    assert_says(job_of(w, child)->reason_text, "does not verify on gpu01");
    a->verify_bad[0] = '\0';
    control(w, RELEASE, child, false);
    advance(w, 1000);
    assert_state(w, child, STARTING);
    assert_int_equal(newest(w, a, child)->from_step, 20);
    arena_free(&mem);
    world_free(w);
}

static void on_update(void *arg, int rc, const struct error *err, const char *text)
{
    (void)err;
    (void)text;
    *(int *)arg = rc;
}

/* What was acknowledged counts for the attempt that a restart brings, and for the job file that it is made from. */
static void an_update_outlives_a_restart(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, a);
    int64_t id;
    run_job(w, a, &id);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->optimizer->lr = 5e-4;
    a->obeys_term = false; /* it is stopping when the update comes */
    assert_int_equal(restart(w, id, spec, -1).rc, ERR_OK);
    Boost__UpdateRequest what = BOOST__UPDATE_REQUEST__INIT;
    what.has_priority = what.has_time_limit_s = true;
    what.priority = 77;
    what.time_limit_s = 7000;
    int rc = -1;
    core_update(w->core, &what, id, &user_ann, on_update, &rc);
    pump(w);
    assert_int_equal(rc, ERR_OK);
    advance(w, 60000);
    const struct job *job = job_of(w, id);
    assert_int_equal(job->n_attempts, 2);
    assert_true(job->resolved->optimizer->lr == 5e-4);
    assert_true(job->priority == 77 && job->resolved->priority == 77 && job->spec->priority == 77);
    assert_true(job->resolved->time_limit_s == 7000 && job->spec->time_limit_s == 7000);
    arena_free(&mem);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(its_owner_and_those_who_may_do_all),
        cmocka_unit_test(with_changes),
        cmocka_unit_test(changes_outlive_the_controller),
        cmocka_unit_test(from_an_older_checkpoint),
        cmocka_unit_test(held_and_queued_ones),
        cmocka_unit_test(ended_meanwhile),
        cmocka_unit_test(what_cannot_be),
        cmocka_unit_test(what_can_no_longer_be),
        cmocka_unit_test(what_a_rank_warns_of_is_an_event),
        cmocka_unit_test(ended_job_as_a_new_one),
        cmocka_unit_test(init_from_is_protected),
        cmocka_unit_test(init_from_is_checked),
        cmocka_unit_test(an_update_outlives_a_restart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
