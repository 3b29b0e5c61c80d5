/* Who is slow: synthetic paces of a step outside collectives, with noise, spells and work that differs by stage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/straggler.h"
#include "proto/base/clock.h"

enum { ROOM = 16 };

static struct stragglers *s;
static int64_t now;
static unsigned seed;
static struct straggler news[ROOM];
static int n_news;

static void begin(int world, int stage)
{
    s = stragglers_new(world, stage);
    assert_non_null(s);
    now = NS_PER_S;
    seed = 1;
    n_news = 0;
}

static int finish(void **state)
{
    (void)state;
    stragglers_free(s);
    s = NULL;
    return 0;
}

/* Within +-10 %. */
static double noisy(double ms)
{
    seed = seed * 1664525 + 1013904223;
    return ms * (0.9 + 0.2 * (double)(seed >> 16 & 0x7FFF) / 0x7FFF);
}

/* So many seconds of 20 steps each; news are kept. */
static void go(int seconds, const double *ms, int world)
{
    for (int t = 0; t < seconds; t++) {
        for (int i = 0; i < 20; i++)
            for (int r = 0; r < world; r++)
                stragglers_add(s, r, noisy(ms[r]));
        now += NS_PER_S;
        n_news += stragglers_look(s, now, news + n_news, ROOM - n_news);
    }
}

static void the_slow_one_is_named_and_let_go(void **state)
{
    (void)state;
    begin(4, 4);
    go(20, (double[]){50, 50, 50, 50}, 4);
    assert_int_equal(n_news, 0);
    go(2, (double[]){50, 50, 80, 50}, 4);
    assert_int_equal(n_news, 0); /* not at the first sight */
    go(20, (double[]){50, 50, 80, 50}, 4);
    assert_int_equal(n_news, 1);
    assert_true(news[0].rank == 2 && news[0].slow && !news[0].itself);
    assert_true(news[0].factor > 1.4 && news[0].factor < 1.8 && news[0].fastest_rank != 2);
    struct straggler now_slow[2];
    assert_int_equal(stragglers_slow(s, now_slow, 2), 1);
    assert_int_equal(now_slow[0].rank, 2);
    go(20, (double[]){50, 50, 50, 50}, 4);
    assert_int_equal(n_news, 2);
    assert_true(news[1].rank == 2 && !news[1].slow);
    assert_int_equal(stragglers_slow(s, now_slow, 2), 0);
}

/* Around the bound it stays what it is. */
static void no_flapping_at_the_bound(void **state)
{
    (void)state;
    begin(2, 2);
    for (int i = 0; i < 30; i++)
        go(2, i % 2 ? (double[]){50, 62} : (double[]){50, 67}, 2);
    assert_true(n_news <= 1);
}

static void spells_and_long_steps_are_nothing(void **state)
{
    (void)state;
    begin(4, 4);
    for (int t = 0; t < 60; t++) {
        go(1, (double[]){50, 50, 50, 50}, 4);
        stragglers_add(s, t % 4, 5000); /* a page fault storm, an evaluation */
        if (t % 10 == 0) /* and a bad second or two */
            go(2, (double[]){50, 120, 50, 50}, 4);
    }
    assert_int_equal(n_news, 0);
}

static void small_differences_of_small_steps_are_nothing(void **state)
{
    (void)state;
    begin(2, 2);
    go(30, (double[]){2, 5}, 2);
    assert_int_equal(n_news, 0);
}

/* The last stage has the head: it is no straggler, but one of its ranks can be. */
static void stages_are_apart(void **state)
{
    (void)state;
    begin(4, 2);
    go(30, (double[]){50, 50, 90, 90}, 4);
    assert_int_equal(n_news, 0);
    go(30, (double[]){50, 50, 90, 150}, 4);
    assert_int_equal(n_news, 1);
    assert_true(news[0].rank == 3 && news[0].fastest_rank == 2);
}

/* One rank alone, or one of a stage of its own, has its own best to be compared with. */
static void against_its_own_best(void **state)
{
    (void)state;
    begin(1, 1);
    go(10, (double[]){40}, 1);
    go(10, (double[]){75}, 1);
    assert_int_equal(n_news, 1);
    assert_true(news[0].slow && news[0].itself && news[0].best_ms < 45 && news[0].factor > 1.5);
    go(10, (double[]){41}, 1);
    assert_true(n_news == 2 && !news[1].slow);
}

/* All have become slower alike (longer sequences, a hot room): nobody lags behind. */
static void all_slower_is_nobody(void **state)
{
    (void)state;
    begin(4, 4);
    go(10, (double[]){50, 50, 50, 50}, 4);
    go(30, (double[]){100, 100, 100, 100}, 4);
    assert_int_equal(n_news, 0);
}

static void nothing_is_judged_of_nothing(void **state)
{
    (void)state;
    begin(3, 3);
    go(1, (double[]){50, 50, 50}, 0);
    assert_int_equal(n_news, 0);
    for (int i = 0; i < STRAGGLER_LEAST - 1; i++)
        stragglers_add(s, 0, 500);
    stragglers_add(s, 3, 1);  /* no such rank */
    stragglers_add(s, -1, 1); /* nor that */
    stragglers_add(s, 1, 0.0 / 0.0);
    for (int i = 0; i < 10; i++) {
        now += NS_PER_S;
        n_news += stragglers_look(s, now, news, ROOM);
    }
    assert_int_equal(n_news, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(the_slow_one_is_named_and_let_go, finish),
        cmocka_unit_test_teardown(no_flapping_at_the_bound, finish),
        cmocka_unit_test_teardown(spells_and_long_steps_are_nothing, finish),
        cmocka_unit_test_teardown(small_differences_of_small_steps_are_nothing, finish),
        cmocka_unit_test_teardown(stages_are_apart, finish),
        cmocka_unit_test_teardown(against_its_own_best, finish),
        cmocka_unit_test_teardown(all_slower_is_nobody, finish),
        cmocka_unit_test_teardown(nothing_is_judged_of_nothing, finish),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
