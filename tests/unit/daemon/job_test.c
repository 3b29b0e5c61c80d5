/* The table of transitions pair by pair, and the records of a job. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/job.h"

#define S(name) BOOST__JOB_STATE__VALUE__##name

/* Every legal pair, written down apart from job_table.c: state, stop target, event -> state, target.
 * What is not here must be refused. */
static const struct {
    int state, target;
    enum job_event event;
    int next, next_target;
    unsigned actions;
} legal[] = {
    {S(QUEUED), 0, EV_PLACED, S(STARTING), -1, ACT_START},
    {S(QUEUED), 0, EV_HOLD, S(HELD), -1, ACT_SCHEDULE},
    {S(QUEUED), 0, EV_CANCEL, S(CANCELLED), -1, ACT_FINISH | ACT_SCHEDULE},
    {S(QUEUED), 0, EV_CANCEL_NOW, S(CANCELLED), -1, ACT_FINISH | ACT_SCHEDULE},
    {S(HELD), 0, EV_RELEASE, S(QUEUED), -1, ACT_SCHEDULE},
    {S(HELD), 0, EV_CANCEL, S(CANCELLED), -1, ACT_FINISH},
    {S(HELD), 0, EV_CANCEL_NOW, S(CANCELLED), -1, ACT_FINISH},
    {S(STARTING), 0, EV_ALL_STEPPED, S(RUNNING), -1, 0},
    {S(STARTING), 0, EV_FAILED_INFRA, S(RECOVERING), -1, ACT_KILL},
    {S(STARTING), 0, EV_FAILED_APP, S(RECOVERING), -1, ACT_KILL},
    {S(STARTING), 0, EV_FAILED_FINAL, S(STOPPING), S(FAILED), ACT_KILL},
    {S(STARTING), 0, EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STARTING), 0, EV_CANCEL, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(STARTING), 0, EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(STARTING), 0, EV_HOLD, S(STOPPING), S(HELD), ACT_KILL},
    {S(STARTING), 0, EV_TIME_LIMIT, S(STOPPING), S(TIMEOUT), ACT_KILL},
    {S(STARTING), 0, EV_REQUEUE, S(STOPPING), S(QUEUED), ACT_KILL},
    {S(STARTING), 0, EV_RESTART, S(STOPPING), S(RECOVERING), ACT_KILL},
    {S(RUNNING), 0, EV_FAILED_INFRA, S(RECOVERING), -1, ACT_KILL},
    {S(RUNNING), 0, EV_FAILED_APP, S(RECOVERING), -1, ACT_KILL},
    {S(RUNNING), 0, EV_FAILED_FINAL, S(STOPPING), S(FAILED), ACT_KILL},
    {S(RUNNING), 0, EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(RUNNING), 0, EV_CANCEL, S(STOPPING), S(CANCELLED), ACT_STOP_TERM},
    {S(RUNNING), 0, EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(RUNNING), 0, EV_HOLD, S(STOPPING), S(HELD), ACT_STOP_TERM},
    {S(RUNNING), 0, EV_TIME_LIMIT, S(STOPPING), S(TIMEOUT), ACT_STOP_TERM},
    {S(RUNNING), 0, EV_REQUEUE, S(STOPPING), S(QUEUED), ACT_STOP_TERM},
    {S(RUNNING), 0, EV_RESTART, S(STOPPING), S(RECOVERING), ACT_STOP_TERM},
    {S(RECOVERING), 0, EV_ATTEMPT_GONE, S(RECOVERING), -1, ACT_CLOSE_ATTEMPT | ACT_BACKOFF | ACT_SCHEDULE},
    {S(RECOVERING), 0, EV_NO_PROGRESS, S(HELD), -1, ACT_CLOSE_ATTEMPT | ACT_SCHEDULE},
    {S(RECOVERING), 0, EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(RECOVERING), 0, EV_BACKOFF_OVER, S(RECOVERING), -1, ACT_SCHEDULE},
    {S(RECOVERING), 0, EV_PLACED, S(STARTING), -1, ACT_START},
    {S(RECOVERING), 0, EV_CANCEL, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(RECOVERING), 0, EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(RECOVERING), 0, EV_HOLD, S(STOPPING), S(HELD), ACT_KILL},
    {S(RECOVERING), 0, EV_TIME_LIMIT, S(STOPPING), S(TIMEOUT), ACT_KILL},
    {S(RECOVERING), 0, EV_REQUEUE, S(STOPPING), S(QUEUED), ACT_KILL},
    {S(RECOVERING), 0, EV_RESTART, S(STOPPING), S(RECOVERING), ACT_KILL},
    {S(STOPPING), S(RECOVERING), EV_ATTEMPT_GONE, S(RECOVERING), -1, ACT_CLOSE_ATTEMPT | ACT_BACKOFF | ACT_SCHEDULE},
    {S(STOPPING), S(QUEUED), EV_ATTEMPT_GONE, S(QUEUED), -1, ACT_CLOSE_ATTEMPT | ACT_SCHEDULE},
    {S(STOPPING), S(HELD), EV_ATTEMPT_GONE, S(HELD), -1, ACT_CLOSE_ATTEMPT | ACT_SCHEDULE},
    {S(STOPPING), S(CANCELLED), EV_ATTEMPT_GONE, S(CANCELLED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(TIMEOUT), EV_ATTEMPT_GONE, S(TIMEOUT), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(FAILED), EV_ATTEMPT_GONE, S(FAILED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(RECOVERING), EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(QUEUED), EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(HELD), EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(CANCELLED), EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(TIMEOUT), EV_COMPLETED, S(COMPLETED), -1, ACT_CLOSE_ATTEMPT | ACT_FINISH | ACT_SCHEDULE},
    {S(STOPPING), S(RECOVERING), EV_CANCEL, S(STOPPING), S(CANCELLED), 0},
    {S(STOPPING), S(QUEUED), EV_CANCEL, S(STOPPING), S(CANCELLED), 0},
    {S(STOPPING), S(HELD), EV_CANCEL, S(STOPPING), S(CANCELLED), 0},
    {S(STOPPING), S(RECOVERING), EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(STOPPING), S(QUEUED), EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(STOPPING), S(HELD), EV_CANCEL_NOW, S(STOPPING), S(CANCELLED), ACT_KILL},
    {S(STOPPING), S(CANCELLED), EV_CANCEL_NOW, S(STOPPING), -1, ACT_KILL},
    {S(STOPPING), S(TIMEOUT), EV_CANCEL_NOW, S(STOPPING), -1, ACT_KILL},
    {S(STOPPING), S(RECOVERING), EV_HOLD, S(STOPPING), S(HELD), 0},
    {S(STOPPING), S(QUEUED), EV_HOLD, S(STOPPING), S(HELD), 0},
    {S(STOPPING), S(HELD), EV_RELEASE, S(STOPPING), S(QUEUED), 0},
};
static const int targets[] = {S(CANCELLED), S(TIMEOUT), S(HELD), S(QUEUED), S(RECOVERING), S(FAILED)};

static int find(int state, int target, enum job_event event)
{
    for (size_t i = 0; i < sizeof legal / sizeof legal[0]; i++)
        if (legal[i].state == state && legal[i].event == event && (state != S(STOPPING) || legal[i].target == target))
            return (int)i;
    return -1;
}

static void check(int state, int target, enum job_event event)
{
    struct job_transition t = job_step((Boost__JobState__Value)state, target, event);
    bool stays = state == S(STOPPING) && (event == EV_FAILED_INFRA || event == EV_FAILED_APP ||
                                          event == EV_FAILED_FINAL || event == EV_GRACE_OVER);
    int i = find(state, target, event);
    if (stays) { /* whatever the target: the rest is killed */
        assert_true(t.legal);
        assert_int_equal(t.next, S(STOPPING));
        assert_int_equal(t.stop_target, -1);
        assert_int_equal(t.actions, ACT_KILL);
    } else if (i < 0) {
        assert_false(t.legal);
        assert_int_equal(t.next, state);
        assert_int_equal(t.actions, ACT_NONE);
    } else {
        assert_true(t.legal);
        assert_int_equal(t.next, legal[i].next);
        assert_int_equal(t.stop_target, legal[i].next_target);
        assert_int_equal(t.actions, legal[i].actions);
    }
}

static void every_pair(void **state)
{
    (void)state;
    for (int s = 0; s < JOB_STATES; s++)
        for (int e = 0; e < EV_COUNT; e++)
            for (size_t k = 0; k < sizeof targets / sizeof targets[0]; k++)
                check(s, targets[k], (enum job_event)e);
}

static void terminal_states_are_final(void **state)
{
    (void)state;
    for (int s = S(COMPLETED); s < JOB_STATES; s++) {
        assert_true(job_state_terminal((Boost__JobState__Value)s));
        for (int e = 0; e < EV_COUNT; e++)
            assert_false(job_step((Boost__JobState__Value)s, 0, (enum job_event)e).legal);
    }
}

static void stopping_needs_a_target(void **state)
{
    (void)state;
    for (int e = 0; e < EV_COUNT; e++) {
        assert_false(job_step(S(STOPPING), -1, (enum job_event)e).legal);
        assert_false(job_step(S(STOPPING), JOB_STATES, (enum job_event)e).legal);
        assert_false(job_step(S(STOPPING), S(RUNNING), (enum job_event)e).legal);
    }
}

static void names(void **state)
{
    (void)state;
    assert_string_equal(job_state_name(S(RECOVERING)), "RECOVERING");
    for (int e = 0; e < EV_COUNT; e++)
        assert_string_not_equal(job_event_name((enum job_event)e), "?");
    assert_true(job_state_live(S(STARTING)) && job_state_live(S(STOPPING)));
    assert_false(job_state_live(S(QUEUED)) || job_state_live(S(HELD)) || job_state_live(S(FAILED)));
}

static void placements_go_both_ways(void **state)
{
    (void)state;
    static const char *const good[] = {"n1:0", "n1:0,1", "a.b-c_1:0,1,2,3;n2:4,5", "n1:1;n2:0", ""};
    static const char *const bad[] = {"n1",        ":0",   "n1:",   "n1:0,", "n1:0,0", "n1:1",
                                      "n1:0;n2:0", "n1:x", "n1:0;", "n1:-1", "n1:0,2", "n1:70000"};
    struct error err;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct job *job = job_new();
        struct attempt *a = job_add_attempt(job);
        assert_int_equal(attempt_parse_placement(a, good[i], &err), ERR_OK);
        char *text = attempt_placement(a);
        assert_string_equal(text, good[i]);
        for (int r = 0; r < a->world; r++)
            assert_true(a->ranks[r].part >= 0 && a->ranks[r].part < a->n_parts);
        free(text);
        job_free(job);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct job *job = job_new();
        struct attempt *a = job_add_attempt(job);
        int rc = attempt_parse_placement(a, bad[i], &err);
        /* A trailing separator with nothing behind it is the same placement. */
        if (rc == ERR_OK) {
            assert_true(strcmp(bad[i], "n1:") == 0 || strcmp(bad[i], "n1:0,") == 0 || strcmp(bad[i], "n1:0;") == 0);
        } else {
            assert_int_equal(rc, ERR_CORRUPT);
            assert_int_equal(a->world + a->n_parts, 0);
        }
        job_free(job);
    }
}

static void checkpoints_are_kept_in_order(void **state)
{
    (void)state;
    struct job *job = job_new();
    static const int order[][2] = {{40, 1}, {20, 1}, {60, 2}, {40, 2}, {10, 3}};
    for (int i = 0; i < 5; i++)
        assert_non_null(job_add_checkpoint(job, order[i][0], order[i][1], 2));
    for (int i = 1; i < 5; i++) {
        const struct checkpoint *x = job->checkpoints[i - 1], *y = job->checkpoints[i];
        assert_true(x->step < y->step || (x->step == y->step && x->attempt < y->attempt));
    }
    assert_int_equal(job_checkpoint(job, 40, 2)->attempt, 2);
    assert_null(job_checkpoint(job, 40, 3));
    job_free(job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair),
        cmocka_unit_test(terminal_states_are_final),
        cmocka_unit_test(stopping_needs_a_target),
        cmocka_unit_test(names),
        cmocka_unit_test(placements_go_both_ways),
        cmocka_unit_test(checkpoints_are_kept_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
