/* What comm.c asks of a backend whose calls are enqueued on a device. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "worker/comm/comm.h"

static struct {
    struct kstream *ks;
    void *to;
    const void *from;
    size_t bytes;
    int calls;
} copied;
static const struct error *aborted;

static void copy(struct kstream *ks, void *to, const void *from, size_t bytes)
{
    copied.ks = ks;
    copied.to = to;
    copied.from = from;
    copied.bytes = bytes;
    copied.calls++;
}

static void give_up(struct comm *world, const struct error *why)
{
    (void)world;
    aborted = why;
}

static const struct comm_backend device = {.name = "device", .enqueues = true, .copy = copy, .abort = give_up};
static const struct comm_backend host = {.name = "host"};

static void alone(struct comms *c, const struct comm_backend *backend)
{
    *c = (struct comms){.seconds = {[GROUP_TP] = 3}};
    for (int g = 0; g < GROUP_COUNT; g++)
        *comms_group(c, (enum comm_group)g) = (struct comm){.backend = backend,
                                                            .group = (enum comm_group)g,
                                                            .size = 1,
                                                            .counters = &c->counters,
                                                            .seconds = &c->seconds[g]};
}

/* A group of one leaves device memory to the backend, on the caller's stream, and touches nothing in place. */
static void a_group_of_one_copies_with_its_backend(void **state)
{
    (void)state;
    struct comms c;
    struct error err;
    char a[8] = "before", b[8] = "after";
    struct kstream *ks = (struct kstream *)(void *)a; /* never looked into */
    alone(&c, &device);
    assert_int_equal(comm_all_gather(&c.tp, ks, a, b, 2, DTYPE_F32, "test", &err), 0);
    assert_true(copied.ks == ks && copied.to == b && copied.from == a && copied.bytes == 8 && copied.calls == 1);
    assert_int_equal(comm_reduce_scatter(&c.tp, ks, b, a, 4, DTYPE_BF16, "test", &err), 0);
    assert_true(copied.to == a && copied.from == b && copied.bytes == 8 && copied.calls == 2);
    assert_int_equal(comm_all_gather(&c.tp, ks, a, a, 2, DTYPE_F32, "test", &err), 0);
    assert_int_equal(comm_reduce_scatter(&c.tp, ks, a, a, 2, DTYPE_F32, "test", &err), 0);
    assert_int_equal(copied.calls, 2);
    assert_string_equal(b, "after");
    alone(&c, &host);
    assert_int_equal(comm_all_gather(&c.tp, NULL, b, a, 2, DTYPE_F32, "test", &err), 0);
    assert_string_equal(a, "after");
    assert_int_equal(copied.calls, 2);
}

static void time_is_told_only_where_the_host_knows_it(void **state)
{
    (void)state;
    struct comms c;
    alone(&c, &device);
    assert_true(isnan(comms_seconds(&c)));
    alone(&c, &host);
    assert_true(comms_seconds(&c) == 3);
}

/* ---- what is under way ---- */

static char heard[96];

static void hear(void *arg, const struct comm_call *call, bool entered)
{
    (void)arg;
    snprintf(heard, sizeof heard, "host %s: %s %s %s %lld", entered ? "in" : "out", call->kind, call->what,
             comm_group_name(call->group), (long long)call->bytes);
}
static void stamp(struct comm *c, struct kstream *ks, const struct comm_call *call)
{
    (void)c, (void)ks;
    snprintf(heard, sizeof heard, "device: %s", call->what);
}
static int outcome;
static char during[96];
static int done(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                struct error *err)
{
    (void)c, (void)ks, (void)segments, (void)n, (void)op;
    snprintf(during, sizeof during, "%s", heard);
    return outcome ? error_set(err, (enum error_code)outcome, "as the test wants it") : ERR_OK;
}

/* A backend whose calls are done later says itself when they begin. */
static void a_call_is_told_by_who_knows_when_it_begins(void **state)
{
    (void)state;
    static const struct comm_backend now = {.name = "now", .all_reduce = done};
    static const struct comm_backend later = {.name = "later", .all_reduce = done, .enqueues = true, .stamp = stamp};
    struct comms c;
    struct error err;
    struct comm_segment s = {.dtype = DTYPE_F32, .count = 6};
    alone(&c, &now);
    comms_set_note(&c, hear, NULL);
    c.tp.size = 2;
    c.tp.group = GROUP_TP;
    assert_int_equal(comm_all_reduce(&c.tp, NULL, &s, 1, COMM_SUM, "latent qkv", &err), 0);
    assert_string_equal(during, "host in: all_reduce latent qkv tp 24");
    assert_string_equal(heard, "host out: all_reduce latent qkv tp 24");
    outcome = ERR_PEER_LOST; /* one that failed was not left: it is where the rank stood */
    assert_int_equal(comm_all_reduce(&c.tp, NULL, &s, 1, COMM_SUM, "latent o", &err), ERR_PEER_LOST);
    assert_string_equal(heard, "host in: all_reduce latent o tp 24");
    outcome = ERR_OK;
    c.tp.backend = &later;
    assert_int_equal(comm_all_reduce(&c.tp, NULL, &s, 1, COMM_SUM, "latent o", &err), 0);
    assert_string_equal(heard, "device: latent o");
}

static void an_abort_reaches_the_backend_that_wants_it(void **state)
{
    (void)state;
    struct comms c = {0};
    struct error why;
    error_set(&why, ERR_IO, "disk");
    comms_abort(&c, &why); /* never connected */
    alone(&c, &host);
    comms_abort(&c, &why);
    assert_null(aborted);
    alone(&c, &device);
    comms_abort(&c, &why);
    assert_ptr_equal(aborted, &why);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_group_of_one_copies_with_its_backend),
        cmocka_unit_test(time_is_told_only_where_the_host_knows_it),
        cmocka_unit_test(a_call_is_told_by_who_knows_when_it_begins),
        cmocka_unit_test(an_abort_reaches_the_backend_that_wants_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
