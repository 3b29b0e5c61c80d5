/* What users ask of single checkpoints: where a tool may write. */
#include "tests/unit/daemon/core_world.h"

static void nothing_is_written_among_the_checkpoints_of_a_job(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 4);
    int64_t id, other;
    join_world(w, a);
    struct fake_attempt *x = run_job(w, a, &id);
    say_checkpoint(w, a, x, 20);
    run_job(w, a, &other);
    pump(w);
    assert_int_equal(id, 1);
    assert_int_equal(other, 2);
    static const struct {
        const char *to, *whose; /* NULL: it may be written */
    } places[] = {
        {"/ckpt/0badcafe-1", "checkpoints of job 1, /ckpt/0badcafe-1"},
        {"/ckpt/0badcafe-2", "checkpoints of job 2, /ckpt/0badcafe-2"},
        {"/ckpt/0badcafe-2/a/b", "checkpoints of job 2, /ckpt/0badcafe-2"},
        {"/ckpt//x/.././0badcafe-1/", "checkpoints of job 1, /ckpt/0badcafe-1"},
        {"/else/0badcafe-3", "checkpoints of a later job 3, /else/0badcafe-3"}, /* its checkpoint.dir may be /else */
        {"/else/0badcafe-1", NULL},
        {"/ckpt/0badcafe-1x", NULL},
        {"/ckpt/0badcafe-01", NULL},
        {"/ckpt/0badcafe-", NULL},
        {"/ckpt/1badcafe-1", NULL}, /* of another controller: the tool looks */
        {"/ckpt/0badcafe-1/../out", NULL},
        {"/ckpt", NULL},
        {"/", NULL},
    };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        ask_ckpt(w, id, BOOST__CHECKPOINT_REQUEST__WHAT__CONVERT, -1, places[i].to);
        assert_int_equal(w->reply_rc, places[i].whose ? ERR_REFUSED : ERR_OK);
        if (places[i].whose)
            assert_says(w->reply_text, places[i].whose);
    }
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_written_among_the_checkpoints_of_a_job),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
