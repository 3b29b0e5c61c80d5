/* Which rank hangs, with made-up times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "daemon/agent_hang.h"
#include "proto/base/clock.h"

enum { MIN_MS = 30000, MAX_MS = 600000 };

static struct rank_status page;
static struct hang_watch watch;
static int64_t now;

static int setup(void **state)
{
    (void)state;
    page = (struct rank_status){.magic = RANK_STATUS_MAGIC};
    watch = (struct hang_watch){0};
    now = 1000 * NS_PER_S;
    return 0;
}

static bool look_after(double seconds)
{
    now += (int64_t)(seconds * (double)NS_PER_S);
    return hang_look(&watch, &page, now, MIN_MS, MAX_MS);
}

static void train(int micro_batches, double each_s)
{
    page.phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    look_after(0);
    for (int i = 0; i < micro_batches; i++) {
        page.progress++;
        assert_false(look_after(each_s));
    }
}

static void test_floor(void **state)
{
    (void)state;
    train(20, 0.1); /* 5 x 0.1 s is below the floor of 30 s */
    assert_int_equal(hang_limit_ns(&watch, MIN_MS, MAX_MS), 30 * NS_PER_S);
    assert_false(look_after(29.9));
    assert_true(look_after(0.2));
    assert_false(look_after(100)); /* once */
    page.progress++;
    assert_false(look_after(0));
    assert_false(look_after(29));
    assert_true(look_after(100)); /* and once again */
}

static void test_five_micro_batches(void **state)
{
    (void)state;
    train(50, 20); /* so the limit is 100 s */
    assert_in_range(hang_limit_ns(&watch, MIN_MS, MAX_MS), 99 * NS_PER_S, 101 * NS_PER_S);
    assert_false(look_after(98));
    assert_true(look_after(4));
}

static void test_ceiling_and_no_sample(void **state)
{
    (void)state;
    train(0, 0); /* the first micro-batch may take long: nothing to go by */
    assert_false(look_after(599));
    assert_true(look_after(2));
    setup(NULL);
    train(5, 500);
    assert_false(look_after(599));
    assert_true(look_after(2));
}

static void test_several_micro_batches_between_looks(void **state)
{
    (void)state;
    train(1, 1);
    for (int i = 0; i < 30; i++) {
        page.progress += 10;
        look_after(100); /* 10 s each */
    }
    assert_in_range(hang_limit_ns(&watch, MIN_MS, MAX_MS), 49 * NS_PER_S, 51 * NS_PER_S);
}

static void test_any_movement_counts(void **state)
{
    (void)state;
    train(10, 1);
    page.step++;
    assert_false(look_after(29));
    page.bytes += 1;
    assert_false(look_after(29));
    page.phase = BOOST__RANK_UPDATE__PHASE__EVALUATING;
    assert_false(look_after(29));
    snprintf(page.doing, sizeof page.doing, "reading its palm"); /* texts are not progress */
    assert_true(look_after(31));
}

/* The pause between training and evaluation is no micro-batch. */
static void test_phases_are_not_mixed(void **state)
{
    (void)state;
    train(20, 1);
    page.phase = BOOST__RANK_UPDATE__PHASE__SAVING;
    look_after(0);
    page.bytes++;
    look_after(50);
    page.phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    look_after(50);
    page.progress++;
    look_after(1);
    page.progress++;
    look_after(1);
    assert_int_equal(hang_limit_ns(&watch, MIN_MS, MAX_MS), 30 * NS_PER_S);
}

/* A GPU tells of whole steps, and of micro-batches where it evaluates: the short ones must not make a step a hang. */
static void test_steps_and_short_evaluations(void **state)
{
    (void)state;
    train(3, 50);
    page.phase = BOOST__RANK_UPDATE__PHASE__EVALUATING;
    assert_false(look_after(1));
    assert_in_range(hang_limit_ns(&watch, MIN_MS, MAX_MS), 249 * NS_PER_S, 251 * NS_PER_S); /* no sample of its own */
    for (int i = 0; i < 50; i++) {
        page.progress++;
        assert_false(look_after(1));
    }
    assert_int_equal(hang_limit_ns(&watch, MIN_MS, MAX_MS), 30 * NS_PER_S);
    page.phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    assert_false(look_after(1));
    assert_false(look_after(50));
    assert_false(look_after(190));
    assert_true(look_after(20));
}

/* An evaluation in front of the first step says nothing of how long one takes. */
static void test_evaluation_comes_first(void **state)
{
    (void)state;
    page.phase = BOOST__RANK_UPDATE__PHASE__EVALUATING;
    look_after(0);
    for (int i = 0; i < 10; i++) {
        page.progress++;
        look_after(1);
    }
    page.phase = BOOST__RANK_UPDATE__PHASE__TRAINING;
    look_after(1);
    assert_false(look_after(599));
    assert_true(look_after(2));
}

static void test_bytes(void **state)
{
    (void)state;
    page.phase = BOOST__RANK_UPDATE__PHASE__LOADING;
    look_after(0);
    for (int i = 0; i < 10; i++) {
        page.bytes += 4096;
        assert_false(look_after(59));
    }
    assert_false(look_after(59));
    assert_true(look_after(2));
}

static void test_phases_with_limits_elsewhere(void **state)
{
    (void)state;
    static const uint32_t phases[] = {BOOST__RANK_UPDATE__PHASE__LAUNCHED, BOOST__RANK_UPDATE__PHASE__RENDEZVOUS,
                                      BOOST__RANK_UPDATE__PHASE__ENDED, 77};
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++) {
        page.phase = phases[i];
        look_after(0);
        assert_false(look_after(100000));
    }
}

static void test_a_machine_that_stood_still(void **state)
{
    (void)state;
    train(10, 1);
    look_after(20);
    now += 3600 * NS_PER_S;
    hang_excuse(&watch, 3600 * NS_PER_S);
    assert_false(look_after(9));
    assert_true(look_after(2));
}

static void test_text(void **state)
{
    (void)state;
    char text[512];
    train(10, 1);
    page.step = 120;
    snprintf(page.collective, sizeof page.collective, "all_reduce tp0 latent qkv layer 3");
    look_after(0);
    assert_true(look_after(31));
    hang_describe(&watch, 3, now, hang_limit_ns(&watch, MIN_MS, MAX_MS), text, sizeof text);
    assert_string_equal(text, "rank 3 made no progress for 31.0 s (limit 30.0 s) while training, 120 steps done; last "
                              "collective: all_reduce tp0 latent qkv layer 3");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, setup)
    const struct CMUnitTest tests[] = {
        TEST(test_floor),
        TEST(test_five_micro_batches),
        TEST(test_ceiling_and_no_sample),
        TEST(test_several_micro_batches_between_looks),
        TEST(test_any_movement_counts),
        TEST(test_phases_are_not_mixed),
        TEST(test_steps_and_short_evaluations),
        TEST(test_evaluation_comes_first),
        TEST(test_bytes),
        TEST(test_phases_with_limits_elsewhere),
        TEST(test_a_machine_that_stood_still),
        TEST(test_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
