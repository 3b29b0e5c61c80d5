/* Which GPUs an attempt gets: against a search of all choices for the fewest NVLink groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/agent_choose.h"

static void expect(const int *group, const int *room, int n, int wanted, const char *says)
{
    int order[64];
    char text[128] = "";
    int given = choose_gpus(group, room, n, wanted, order);
    for (int i = 0, used = 0; i < given; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", i ? " " : "", order[i]);
    assert_string_equal(text, says);
}

static void what_is_joined_stays_together(void **state)
{
    (void)state;
    static const int two[] = {0, 0, 2, 2}, all[] = {0, 0, 0, 0}, none[] = {-1, -1, -1, -1}, pair[] = {-1, 1, 1, -1};
    static const int every[] = {1, 1, 1, 1}, but_first[] = {0, 1, 1, 1}, shares[] = {1, 0, 2, 2};
    expect(two, every, 4, 2, "0 1");
    expect(two, but_first, 4, 2, "2 3"); /* in order it would be 1 and 2, which nothing joins */
    expect(two, but_first, 4, 1, "1");   /* and the pair stays whole */
    expect(two, but_first, 4, 3, "2 3 1");
    expect(two, every, 4, 4, "0 1 2 3");
    expect(two, but_first, 4, 4, "2 3 1"); /* no more are there */
    expect(all, but_first, 4, 3, "1 2 3");
    expect(none, but_first, 4, 2, "1 2");
    expect(pair, every, 4, 2, "1 2");
    expect(pair, every, 4, 1, "0");
    expect(two, shares, 4, 3, "2 2 3");
    expect(NULL, NULL, 0, 2, "");
}

static int groups_in(const int *group, int n, const int *order, int given)
{
    int count = 0;
    for (int i = 0; i < given; i++) {
        int seen = 0;
        for (int k = 0; k < i; k++)
            seen |= order[k] == order[i] || (group[order[k]] >= 0 && group[order[k]] == group[order[i]]);
        count += !seen;
    }
    (void)n;
    return count;
}

/* The fewest groups that have room for so many, by trying all sets of GPUs. */
static int fewest(const int *group, const int *room, int n, int wanted)
{
    int best = n + 1;
    for (unsigned set = 0; set < 1u << n; set++) {
        int order[16], given = 0, total = 0;
        for (int i = 0; i < n; i++)
            if (set >> i & 1 && room[i]) {
                order[given++] = i;
                total += room[i];
            }
        int g = groups_in(group, n, order, given);
        if (total >= wanted && g < best)
            best = g;
    }
    return best;
}

static void as_few_groups_as_can_be(void **state)
{
    (void)state;
    srand(7);
    for (int round = 0; round < 3000; round++) {
        int group[8], room[8], order[16], n = 1 + rand() % 8, total = 0;
        for (int i = 0; i < n; i++) {
            group[i] = rand() % 4 - 1;
            room[i] = rand() % 3;
            total += room[i];
        }
        group[0] = 0; /* known */
        int wanted = 1 + rand() % 8, given = choose_gpus(group, room, n, wanted, order);
        assert_int_equal(given, wanted < total ? wanted : total);
        for (int i = 0; i < n; i++) {
            int used = 0;
            for (int k = 0; k < given; k++)
                used += order[k] == i;
            assert_true(used <= room[i]);
        }
        if (given == wanted)
            assert_int_equal(groups_in(group, n, order, given), fewest(group, room, n, wanted));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_joined_stays_together),
        cmocka_unit_test(as_few_groups_as_can_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
