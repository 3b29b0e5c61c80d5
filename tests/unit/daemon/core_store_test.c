/* The controller core on the real store: what it writes is what it finds again. */
#include "tests/unit/daemon/core_world.h"

#include "proto/base/fs.h"

static void open_real(struct world *w, const char *dir)
{
    struct error err;
    if (store_open(dir, &w->real, &err))
        fail_msg("store_open: %s", err.message);
    w->api = core_store_sqlite(w->real);
    boot(w);
}

static void close_real(struct world *w)
{
    store_close(w->real);
    core_destroy(w->core);
    w->core = NULL;
    w->real = NULL;
    queue_drop(w);
    for (int i = 0; i < w->n_agents; i++)
        w->agents[i].connected = false;
}

static void a_life_over_two_restarts(void **state)
{
    (void)state;
    char dir[] = "/tmp/core_store_test.XXXXXX";
    struct error err;
    assert_non_null(mkdtemp(dir));
    struct world *w = world_new();
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    open_real(w, dir);
    char id8[16];
    snprintf(id8, sizeof id8, "%s", core_store_id(w->core));
    assert_int_equal(strlen(id8), 8);
    struct fake_agent *a = agent_add(w, "n1", 2);
    int64_t id;
    w->store_id = id8;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    assert_int_equal(id, 1);
    say_step(w, a, x, 20);
    say_metrics(w, a, x, 0, 20, 4.5);
    say_metrics(w, a, x, 1, 20, 4.5);
    say_checkpoint(w, a, x, 20);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 20);
    say_end_of(w, a, x, 1, (struct end){.exit_code = 7});
    pump(w);
    x = recovered(w, a, id);
    assert_int_equal(x->from_step, 20);
    say_shard(w, a, x, 0, 40, NULL);
    pump(w);
    close_real(w);

    open_real(w, dir);
    assert_string_equal(core_store_id(w->core), id8);
    struct job *job = job_of(w, id);
    assert_state(w, id, RUNNING);
    assert_int_equal(job->n_attempts, 2);
    assert_int_equal(job->attempts[0]->reason, REASON(RankExit));
    assert_says(job->attempts[0]->text, "rank 1 on n1: exit code 7");
    assert_true(job->attempts[0]->end_ns > 0 && job->attempts[1]->end_ns == 0);
    assert_int_equal(job->attempts[1]->from_step, 20);
    assert_int_equal(job->attempts[0]->ranks[0].metrics_seq, 1);
    assert_int_equal(job->attempts[0]->ranks[1].metrics_seq, 1);
    assert_int_equal(job->checkpoint_step, 20);
    assert_int_equal(job->restarts_used, 1);
    const struct checkpoint *k = job_checkpoint(job, 20, 1);
    assert_int_equal(k->state, CKPT(COMMITTED));
    assert_int_equal(k->shards[1].bytes, 1001);
    assert_int_equal(k->shards[1].crc32c, 20);
    assert_string_equal(k->shards[1].file, "shard-1.safetensors");
    k = job_checkpoint(job, 40, 2);
    assert_int_equal(k->state, CKPT(WRITING));
    assert_int_equal(k->n_shards, 1);
    assert_string_equal(job->spec->name, "tiny");
    join_world(w, a);
    say_shard(w, a, x, 1, 40, NULL);
    pump(w);
    assert_int_equal(job_of(w, id)->checkpoint_step, 40);
    say_finished(w, a, x);
    pump(w);
    assert_state(w, id, COMPLETED);
    int64_t next = submit(w);
    assert_int_equal(next, 2);
    close_real(w);

    open_real(w, dir);
    assert_state(w, id, COMPLETED);
    assert_int_equal(core_stats(w->core)->store_failures, 0);
    close_real(w);
    w->api = (struct core_store){0};
    world_free(w);
    assert_int_equal(fs_remove_tree(dir, &err), ERR_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_life_over_two_restarts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
