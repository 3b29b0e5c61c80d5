/* Checkpoints and stops: four simulated ranks with random requests, slow writers and different
 * clocks must take the same decisions, and take the ones that were asked for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/agreement.h"

enum { RANKS = 4 };

struct sim {
    struct agreement ranks[RANKS];
    struct agreement_facts facts[RANKS];
    struct agreement_actions actions; /* of all ranks: checked to be equal */
};

static void begin(struct sim *s, int64_t start, int64_t steps, int64_t every, int64_t every_ns)
{
    memset(s, 0, sizeof *s);
    for (int r = 0; r < RANKS; r++)
        agreement_init(&s->ranks[r], start, steps, every, every_ns, r == 0, 1000000 * r);
}

static void step(struct sim *s, int64_t n)
{
    struct agreement_votes joined = {0};
    for (int r = 0; r < RANKS; r++) {
        struct agreement_votes v = agreement_vote(&s->ranks[r], n, &s->facts[r]);
        joined.stop |= v.stop;
        joined.checkpoint |= v.checkpoint;
        joined.busy |= v.busy;
        joined.asked += v.asked;
    }
    for (int r = 0; r < RANKS; r++) {
        struct agreement_actions a = agreement_settle(&s->ranks[r], n, &joined);
        if (!r)
            s->actions = a;
        assert_int_equal(a.stop, s->actions.stop);
        assert_int_equal(a.checkpoint, s->actions.checkpoint);
        assert_int_equal(a.postponed, s->actions.postponed);
    }
}

static void interval_of_steps(void **state)
{
    (void)state;
    for (int64_t start = 0; start < 12; start++)
        for (int64_t every = 1; every <= 6; every++) {
            struct sim s;
            begin(&s, start, 30, every, 0);
            for (int64_t n = start + 1; n < 30; n++) {
                step(&s, n);
                assert_int_equal(s.actions.checkpoint, n % every == 0);
            }
        }
}

static void interval_of_seconds_by_the_first_rank(void **state)
{
    (void)state;
    struct sim s;
    begin(&s, 0, 100, 0, 1000);
    int taken = 0;
    for (int64_t n = 1; n <= 50; n++) {
        for (int r = 0; r < RANKS; r++)
            s.facts[r].now_ns = n * 100 + r * INT64_C(1000000000); /* other clocks are elsewhere */
        step(&s, n);
        taken += s.actions.checkpoint;
    }
    assert_in_range(taken, 4, 5);
}

static void a_request_is_served_once(void **state)
{
    (void)state;
    for (int who = 0; who < RANKS; who++) {
        struct sim s;
        begin(&s, 10, 100, 0, 0);
        for (int64_t n = 11; n < 40; n++) {
            if (n == 20)
                s.facts[who].asked++;
            step(&s, n);
            assert_int_equal(s.actions.checkpoint, n == 21);
        }
    }
}

/* Ranks see it steps apart, in any order; another one follows, and the counter wraps. */
static void a_request_that_ranks_see_at_different_steps_is_one(void **state)
{
    (void)state;
    for (int first = 0; first < RANKS; first++) {
        struct sim s;
        begin(&s, 0, 100, 0, 0);
        for (int r = 0; r < RANKS; r++)
            s.facts[r].asked = s.ranks[r].seen = s.ranks[r].served = UINT32_MAX;
        for (int64_t n = 1; n < 60; n++) {
            for (int r = 0; r < RANKS; r++)
                s.facts[r].asked += n == 10 + (r + first) % RANKS || n == 40 + (r + first) % RANKS;
            step(&s, n);
            assert_int_equal(s.actions.checkpoint, n == 11 || n == 41);
        }
    }
}

static void a_busy_writer_postpones(void **state)
{
    (void)state;
    struct sim s;
    begin(&s, 0, 100, 10, 0);
    int told = 0;
    for (int64_t n = 1; n < 28; n++) {
        s.facts[2].busy = n >= 9 && n < 15;
        step(&s, n);
        told += s.actions.postponed;
        assert_int_equal(s.actions.checkpoint, n == 16 || n == 20);
    }
    assert_int_equal(told, 1);
}

/* Of a writer that is slower than the interval every step that is due is a checkpoint, at its own step or later, or is
 * counted as skipped; and none begins while the last one is written. */
static void a_writer_slower_than_the_interval_skips(void **state)
{
    (void)state;
    for (int64_t every = 1; every <= 5; every++)
        for (int writes = 0; writes <= 23; writes++) {
            struct sim s;
            begin(&s, 0, 400, every, 0);
            int64_t taken = 0, skipped = 0, until = 0;
            for (int64_t n = 1; n <= 300; n++) {
                s.facts[1].busy = n < until;
                step(&s, n);
                skipped += s.actions.skipped;
                assert_true(s.actions.skipped == 0 || s.ranks[0].checkpoint);
                if (!s.actions.checkpoint)
                    continue;
                taken++;
                assert_true(n >= until || every == 1); /* every step: the vote cannot know yet */
                until = n + 1 + writes;
            }
            int64_t under_way = s.ranks[0].due + s.ranks[0].skipped + s.ranks[0].checkpoint;
            int64_t due = 300 / every + (301 % every == 0); /* the last step's vote is about the next one */
            assert_int_equal(taken + skipped + under_way, due);
            assert_true(writes + 2 >= every || !skipped);
            assert_true(writes <= 2 * every || skipped);
        }
}

static void a_stop_takes_effect_after_the_next_step(void **state)
{
    (void)state;
    for (int who = 0; who < RANKS; who++) {
        struct sim s;
        begin(&s, 0, 100, 0, 0);
        for (int64_t n = 1; n < 20; n++) {
            s.facts[who].stop = n >= 7;
            step(&s, n);
            assert_int_equal(s.actions.stop, n >= 8);
        }
    }
}

/* Whatever happens, ranks agree; a request, which each rank sees at another step, is served, by no more checkpoints
 * than there are requests besides the intervals'. */
static void random_histories(void **state)
{
    (void)state;
    srand(5);
    for (int trial = 0; trial < 2000; trial++) {
        struct sim s;
        begin(&s, rand() % 20, 1000, rand() % 3 ? 1 + rand() % 9 : 0, rand() % 2 ? 1 + rand() % 5000 : 0);
        int until[RANKS] = {0}, asked = 0, taken = 0;
        bool intervals = s.ranks[0].every_steps || s.ranks[0].every_ns;
        for (int64_t n = s.ranks[0].start + 1; n < 80; n++) {
            for (int r = 0; r < RANKS; r++) {
                s.facts[r].now_ns += rand() % 700;
                s.facts[r].busy = n < until[r];
                if (s.facts[r].asked < (uint32_t)asked)
                    s.facts[r].asked += rand() % 3 > 0;
            }
            asked += rand() % 25 == 0;
            step(&s, n);
            taken += s.actions.checkpoint;
            for (int r = 0; r < RANKS && s.actions.checkpoint; r++)
                until[r] = (int)n + 1 + rand() % 6;
        }
        for (int64_t n = 80; n < 90; n++) { /* quiet: all have seen all, which gets served */
            for (int r = 0; r < RANKS; r++) {
                s.facts[r].busy = false;
                s.facts[r].asked = (uint32_t)asked;
            }
            step(&s, n);
            taken += s.actions.checkpoint;
        }
        assert_true(intervals || (taken <= asked && (taken > 0) == (asked > 0)));
        for (int r = 0; r < RANKS; r++)
            assert_int_equal(s.ranks[r].served, asked);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(interval_of_steps),
        cmocka_unit_test(interval_of_seconds_by_the_first_rank),
        cmocka_unit_test(a_request_is_served_once),
        cmocka_unit_test(a_request_that_ranks_see_at_different_steps_is_one),
        cmocka_unit_test(a_busy_writer_postpones),
        cmocka_unit_test(a_writer_slower_than_the_interval_skips),
        cmocka_unit_test(a_stop_takes_effect_after_the_next_step),
        cmocka_unit_test(random_histories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
