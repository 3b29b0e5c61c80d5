/* Whom the ranks of a job wait for: pages of every rank, and who is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "ctl/behind.h"

enum { RANKS = 8, GROUPS = 3 };

static Boost__StacksReply layout;
static Boost__RankStacks ranks[RANKS];
static const Boost__RankStacks *list[RANKS];
static Boost__CollectiveInfo calls[RANKS][GROUPS], *call_list[RANKS][GROUPS];
static struct behind *found;
static size_t n_found;

static int world(void **state, int tp, int dp, int pp)
{
    (void)state;
    boost__stacks_reply__init(&layout);
    layout.tp = tp;
    layout.dp = dp;
    layout.pp = pp;
    for (int r = 0; r < RANKS; r++) {
        boost__rank_stacks__init(&ranks[r]);
        ranks[r].rank = r;
        ranks[r].phase = (char *)(uintptr_t) "training";
        ranks[r].collectives = call_list[r];
        list[r] = &ranks[r];
        for (int g = 0; g < GROUPS; g++)
            call_list[r][g] = &calls[r][g];
    }
    return 0;
}

/* The rank's last call of a group. */
static void at(int rank, const char *group, uint64_t seq, Boost__CollectiveInfo__Where where)
{
    Boost__CollectiveInfo *c = NULL;
    for (size_t i = 0; i < ranks[rank].n_collectives && !c; i++)
        if (!strcmp(calls[rank][i].group, group))
            c = &calls[rank][i];
    if (!c) {
        c = &calls[rank][ranks[rank].n_collectives++];
        boost__collective_info__init(c);
        c->group = (char *)(uintptr_t)group;
    }
    c->seq = seq;
    c->where = where;
}
#define INSIDE  BOOST__COLLECTIVE_INFO__WHERE__INSIDE
#define LEFT    BOOST__COLLECTIVE_INFO__WHERE__LEFT
#define REACHED BOOST__COLLECTIVE_INFO__WHERE__REACHED

static void look(int n)
{
    behind_free(found, n_found);
    n_found = behind_find(list, (size_t)n, &layout, &found);
}

static int forget(void **state)
{
    (void)state;
    behind_free(found, n_found);
    found = NULL;
    n_found = 0;
    return 0;
}

static void the_one_that_has_not_come_is_named(void **state)
{
    world(state, 4, 1, 1);
    for (int r = 0; r < 4; r++)
        at(r, "tp", r == 2 ? 11 : 12, r == 2 ? LEFT : INSIDE);
    look(4);
    assert_int_equal(n_found, 1);
    assert_true(found[0].rank->rank == 2 && found[0].calls == 11 && found[0].waits_in->seq == 12);
    assert_int_equal(found[0].n_waiting, 3);
    assert_int_equal(found[0].waiting[2]->rank, 3);
}

/* One that never began any call of the group, and one that others wait for in their first. */
static void the_first_call_too(void **state)
{
    world(state, 2, 1, 1);
    at(1, "tp", 1, INSIDE);
    look(2);
    assert_int_equal(n_found, 1);
    assert_true(found[0].rank->rank == 0 && found[0].calls == 0);
}

static void nobody_when_all_are_in_it_or_have_left(void **state)
{
    world(state, 2, 1, 1);
    at(0, "tp", 5, INSIDE);
    at(1, "tp", 5, INSIDE); /* the network is slow, or a third party: no rank is to blame */
    look(2);
    assert_int_equal(n_found, 0);
    at(0, "tp", 5, LEFT);
    look(2);
    assert_int_equal(n_found, 0);
    at(1, "tp", 6, LEFT);
    look(2);
    assert_int_equal(n_found, 0);
}

/* The pages are read one after the other: of ranks that run, numbers mean nothing. */
static void nobody_while_they_get_further(void **state)
{
    world(state, 2, 1, 1);
    at(0, "tp", 6, INSIDE);
    at(1, "tp", 5, LEFT);
    ranks[0].moved = true;
    look(2);
    assert_int_equal(n_found, 0);
}

/* dp 2 x tp 2: rank 3 is stuck; rank 2 waits for it in tp, rank 0 for rank 2 in dp, rank 1 for rank 3 in dp. Only the
 * one that waits for nobody is named. */
static void who_waits_is_not_to_blame(void **state)
{
    world(state, 2, 2, 1);
    at(0, "tp", 20, LEFT);
    at(1, "tp", 20, LEFT);
    at(2, "tp", 20, INSIDE);
    at(3, "tp", 19, LEFT);
    at(0, "dp", 4, INSIDE);
    at(1, "dp", 4, INSIDE);
    at(2, "dp", 3, LEFT);
    at(3, "dp", 3, LEFT);
    look(4);
    assert_int_equal(n_found, 1);
    assert_true(found[0].rank->rank == 3 && !strcmp(found[0].group, "tp"));
    assert_int_equal(found[0].n_waiting, 1);
    assert_int_equal(found[0].waiting[0]->rank, 2);
}

/* Two groups of tp: each has numbers of its own. */
static void groups_of_one_name_are_apart(void **state)
{
    world(state, 2, 2, 1);
    at(0, "tp", 90, INSIDE);
    at(1, "tp", 90, INSIDE);
    at(2, "tp", 7, INSIDE);
    at(3, "tp", 7, INSIDE);
    look(4);
    assert_int_equal(n_found, 0);
    at(3, "tp", 6, LEFT);
    look(4);
    assert_int_equal(n_found, 1);
    assert_true(found[0].rank->rank == 3 && found[0].waits_in->seq == 7);
}

/* pp 4: first and last stage have a group that the two between are not in. */
static void ends_are_two(void **state)
{
    world(state, 1, 1, 4);
    at(0, "ends", 3, INSIDE);
    at(3, "ends", 2, LEFT);
    look(4);
    assert_int_equal(n_found, 1);
    assert_int_equal(found[0].rank->rank, 3);
}

/* A device tells only which call it has come to. */
static void devices_too(void **state)
{
    world(state, 4, 1, 1);
    for (int r = 0; r < 4; r++)
        at(r, "tp", r == 1 ? 40 : 41, REACHED);
    look(4);
    assert_int_equal(n_found, 1);
    assert_int_equal(found[0].rank->rank, 1);
}

/* Of a rank whose node cannot be reached there is no page: nothing is said of it. */
static void one_that_is_not_known_is_not_accused(void **state)
{
    world(state, 2, 1, 1);
    at(0, "tp", 2, INSIDE);
    ranks[1].phase = NULL;
    look(2);
    assert_int_equal(n_found, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(the_one_that_has_not_come_is_named, forget),
        cmocka_unit_test_teardown(the_first_call_too, forget),
        cmocka_unit_test_teardown(nobody_when_all_are_in_it_or_have_left, forget),
        cmocka_unit_test_teardown(nobody_while_they_get_further, forget),
        cmocka_unit_test_teardown(who_waits_is_not_to_blame, forget),
        cmocka_unit_test_teardown(groups_of_one_name_are_apart, forget),
        cmocka_unit_test_teardown(ends_are_two, forget),
        cmocka_unit_test_teardown(devices_too, forget),
        cmocka_unit_test_teardown(one_that_is_not_known_is_not_accused, forget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
