/* Stacks of a live attempt: who may ask, which attempt, pages, nodes that do not answer. */
#include "tests/unit/daemon/core_world.h"

static const struct core_user owner = {.uid = 1000, .gid = 1000, .name = "ann"};

static struct {
    int calls, rc, last, attempt;
    bool go_on;
    size_t n;
    int ranks[16];
    char nodes[16][32], notes[16][128], text[256];
} seen;

static bool on_page(void *arg, int rc, const struct error *err, const struct core_stacks *stacks)
{
    (void)arg;
    seen.calls++;
    seen.rc = rc;
    if (rc) {
        snprintf(seen.text, sizeof seen.text, "%s", err->message);
        return false;
    }
    assert_true(!stacks->last || !stacks->n_ranks);
    seen.last += stacks->last;
    seen.attempt = stacks->attempt;
    for (size_t i = 0; i < stacks->n_ranks; i++, seen.n++) {
        assert_true(seen.n < 16);
        seen.ranks[seen.n] = stacks->ranks[i]->rank;
        snprintf(seen.nodes[seen.n], sizeof seen.nodes[0], "%s", stacks->ranks[i]->node);
        snprintf(seen.notes[seen.n], sizeof seen.notes[0], "%s", stacks->ranks[i]->note ? stacks->ranks[i]->note : "");
    }
    return seen.go_on;
}

static void ask(struct world *w, int64_t id, const Boost__StacksRequest *r, const struct core_user *user)
{
    memset(&seen, 0, sizeof seen);
    seen.go_on = true;
    core_collect_stacks(w->core, job_of(w, id), r, user, on_page, w);
    pump(w);
}

static void every_rank_comes_once(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    Boost__StacksRequest r = BOOST__STACKS_REQUEST__INIT;
    join_world(w, a);
    int64_t id;
    run_job(w, a, &id);
    ask(w, id, &r, &owner);
    assert_int_equal(seen.rc, ERR_OK);
    assert_true(seen.n == 2 && seen.ranks[0] == 0 && seen.ranks[1] == 1); /* and none that nobody asked for */
    assert_true(seen.last == 1 && seen.attempt == 1);
    assert_string_equal(seen.nodes[1], "n1");
    int32_t one = 1;
    r.n_ranks = 1;
    r.ranks = &one;
    r.has_attempt = 1;
    r.attempt = 1;
    ask(w, id, &r, &owner);
    assert_true(seen.n == 1 && seen.ranks[0] == 1 && seen.last == 1);
    world_free(w);
}

static void who_may_ask_for_what(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    const struct core_user stranger = {.uid = 77, .gid = 77, .name = "bob"}, root = {.uid = 0, .name = "root"};
    const struct core_user admin = {.uid = 78, .gid = 78, .name = "eve", .admin = true};
    Boost__StacksRequest r = BOOST__STACKS_REQUEST__INIT;
    int64_t id = submit(w);
    ask(w, id, &r, &owner);
    assert_int_equal(seen.rc, ERR_REFUSED);
    assert_says(seen.text, "no rank of it runs");
    join_world(w, a);
    pump(w);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 1);
    pump(w);
    ask(w, id, &r, &stranger);
    assert_int_equal(seen.rc, ERR_REFUSED);
    assert_says(seen.text, "belongs to");
    ask(w, id, &r, &root);
    assert_int_equal(seen.rc, ERR_OK);
    ask(w, id, &r, &admin);
    assert_int_equal(seen.rc, ERR_OK);
    int32_t beyond = 2;
    r.n_ranks = 1;
    r.ranks = &beyond;
    ask(w, id, &r, &owner);
    assert_int_equal(seen.rc, ERR_NOT_FOUND);
    assert_says(seen.text, "ranks 0 to 1, not 2");
    r.n_ranks = 0;
    r.has_attempt = 1;
    r.attempt = 2;
    ask(w, id, &r, &owner);
    assert_int_equal(seen.rc, ERR_NOT_FOUND);
    /* The first attempt is over: its ranks are not those of the second. */
    say_end_of(w, a, x, 0, (struct end){.signal = 9});
    pump(w);
    recovered(w, a, id);
    r.attempt = 1;
    ask(w, id, &r, &owner);
    assert_int_equal(seen.rc, ERR_REFUSED);
    assert_says(seen.text, "no rank of that attempt runs");
    r.attempt = 2;
    ask(w, id, &r, &owner);
    assert_true(seen.rc == ERR_OK && seen.n == 2 && seen.attempt == 2);
    world_free(w);
}

static void a_node_that_does_not_answer_is_named(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    Boost__StacksRequest r = BOOST__STACKS_REQUEST__INIT;
    join_world(w, a);
    int64_t id;
    run_job(w, a, &id);
    a->stacks_code = ERR_NOT_FOUND;
    ask(w, id, &r, &owner);
    assert_true(seen.rc == ERR_OK && seen.n == 2 && seen.last == 1);
    assert_says(seen.notes[0], "is not there"); /* as the agent said */
    a->answers = false;
    ask(w, id, &r, &owner);
    assert_int_equal(seen.calls, 0);
    advance(w, 25000);
    assert_true(seen.n == 2 && seen.last == 1);
    assert_says(seen.notes[1], "node n1 did not answer in 20 s");
    ask(w, id, &r, &owner);
    disconnect(w, a);
    assert_true(seen.n == 2 && seen.last == 1);
    assert_says(seen.notes[0], "n1 cannot be reached");
    ask(w, id, &r, &owner);
    assert_true(seen.n == 2 && seen.last == 1);
    assert_says(seen.notes[0], "n1 cannot be reached");
    world_free(w);
}

/* A client that went away is not told more, and what it asked for is forgotten; so is all when the core ends. */
static void nothing_is_said_to_who_has_gone(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "n1", 2);
    Boost__StacksRequest r = BOOST__STACKS_REQUEST__INIT;
    join_world(w, a);
    int64_t id;
    run_job(w, a, &id);
    memset(&seen, 0, sizeof seen);
    core_collect_stacks(w->core, job_of(w, id), &r, &owner, on_page, w);
    pump(w);
    assert_true(seen.calls == 1 && seen.last == 0);
    a->answers = false;
    ask(w, id, &r, &owner);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rank_comes_once),
        cmocka_unit_test(who_may_ask_for_what),
        cmocka_unit_test(a_node_that_does_not_answer_is_named),
        cmocka_unit_test(nothing_is_said_to_who_has_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
