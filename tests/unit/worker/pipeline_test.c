/* The order of work of a stage: every micro-batch forward and backward once, few under way, and an order
 * of exchanges that never waits for itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdbool.h>
#include <string.h>

#include "worker/pipeline.h"

enum { MAX_STAGES = 8, MAX_MICRO = 20 };

static void every_micro_batch_once(void **state)
{
    (void)state;
    for (int stages = 1; stages <= MAX_STAGES; stages++)
        for (int stage = 0; stage < stages; stage++)
            for (int n = 1; n <= MAX_MICRO; n++) {
                int forward = 0, backward = 0, most = 0;
                for (int k = 0; k < 2 * n; k++) {
                    struct work w = pipeline_work(stages, stage, n, k);
                    /* Both in ascending order, so that sums of gradients have one order for every layout. */
                    if (w.kind == WORK_FORWARD)
                        assert_int_equal(w.micro, forward++);
                    else
                        assert_int_equal(w.micro, backward++);
                    assert_true(backward <= forward);
                    most = forward - backward > most ? forward - backward : most;
                }
                assert_true(forward == n && backward == n);
                assert_int_equal(most, stages - stage < n ? stages - stage : n);
                assert_int_equal(pipeline_work(stages, stage, n, -1).kind, WORK_NONE);
                assert_int_equal(pipeline_work(stages, stage, n, 2 * n).kind, WORK_NONE);
            }
}

/* What a stage's exchange between works k - 1 and k wants: a message number over its upper border (to the
 * stage behind) or its lower one, up or down; -1: none. */
struct wants {
    int64_t send_up, send_down, recv_up, recv_down;
    bool sends_first;
};
static struct wants wants_of(int stages, int stage, int n, int k)
{
    struct work done = pipeline_work(stages, stage, n, k - 1), next = pipeline_work(stages, stage, n, k);
    struct wants w = {-1, -1, -1, -1, pipeline_depends(stages, stage, done, next)};
    if (done.kind == WORK_FORWARD && stage < stages - 1)
        w.send_up = done.micro;
    if (done.kind == WORK_BACKWARD && stage > 0)
        w.send_down = done.micro;
    if (next.kind == WORK_FORWARD && stage > 0)
        w.recv_up = next.micro;
    if (next.kind == WORK_BACKWARD && stage < stages - 1)
        w.recv_down = next.micro;
    return w;
}

/* A transport whose calls send first or receive first (even and odd ranks), one after the other, and where a send
 * waits for its receive: all stages get to the end. */
struct ready {
    bool sends, receives;
};
static struct ready ready_of(const struct wants *w, bool even)
{
    bool sent = w->send_up < 0 && w->send_down < 0, received = w->recv_up < 0 && w->recv_down < 0;
    bool sends_first = even || w->sends_first;
    return (struct ready){.sends = sends_first || received, .receives = !sends_first || sent};
}

static void one_after_the_other_also_ends(void **state)
{
    (void)state;
    for (int stages = 1; stages <= MAX_STAGES; stages++)
        for (int n = 1; n <= MAX_MICRO; n++) {
            int at[MAX_STAGES] = {0};
            struct wants w[MAX_STAGES];
            for (int s = 0; s < stages; s++)
                w[s] = wants_of(stages, s, n, 0);
            for (bool moved = true; moved;) {
                moved = false;
                for (int s = 0; s + 1 < stages; s++) {
                    struct ready low = ready_of(&w[s], s % 2 == 0), high = ready_of(&w[s + 1], s % 2);
                    if (low.sends && high.receives && w[s].send_up >= 0 && w[s + 1].recv_up >= 0) {
                        w[s].send_up = w[s + 1].recv_up = -1;
                        moved = true;
                    }
                    if (high.sends && low.receives && w[s + 1].send_down >= 0 && w[s].recv_down >= 0) {
                        w[s + 1].send_down = w[s].recv_down = -1;
                        moved = true;
                    }
                }
                for (int s = 0; s < stages; s++)
                    if (w[s].send_up < 0 && w[s].send_down < 0 && w[s].recv_up < 0 && w[s].recv_down < 0 &&
                        at[s] <= 2 * n) {
                        w[s] = wants_of(stages, s, n, ++at[s]);
                        moved = true;
                    }
            }
            for (int s = 0; s < stages; s++)
                assert_int_equal(at[s], 2 * n + 1);
        }
}

/* Messages that are handed over only when sender and receiver are both in their calls, in any order within a
 * call: they are the same ones, and all stages get to the end. */
static void exchanges_always_meet(void **state)
{
    (void)state;
    for (int stages = 1; stages <= MAX_STAGES; stages++)
        for (int n = 1; n <= MAX_MICRO; n++) {
            int at[MAX_STAGES] = {0};
            struct wants w[MAX_STAGES];
            for (int s = 0; s < stages; s++)
                w[s] = wants_of(stages, s, n, 0);
            for (bool moved = true; moved;) {
                moved = false;
                for (int s = 0; s + 1 < stages; s++) {
                    if (w[s].send_up >= 0 && w[s + 1].recv_up >= 0) {
                        assert_int_equal(w[s].send_up, w[s + 1].recv_up);
                        w[s].send_up = w[s + 1].recv_up = -1;
                        moved = true;
                    }
                    if (w[s + 1].send_down >= 0 && w[s].recv_down >= 0) {
                        assert_int_equal(w[s + 1].send_down, w[s].recv_down);
                        w[s + 1].send_down = w[s].recv_down = -1;
                        moved = true;
                    }
                }
                for (int s = 0; s < stages; s++)
                    if (w[s].send_up < 0 && w[s].send_down < 0 && w[s].recv_up < 0 && w[s].recv_down < 0 &&
                        at[s] <= 2 * n) {
                        w[s] = wants_of(stages, s, n, ++at[s]);
                        moved = true;
                    }
            }
            for (int s = 0; s < stages; s++)
                assert_int_equal(at[s], 2 * n + 1);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_micro_batch_once),
        cmocka_unit_test(exchanges_always_meet),
        cmocka_unit_test(one_after_the_other_also_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
