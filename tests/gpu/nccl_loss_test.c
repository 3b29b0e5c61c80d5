/* How ranks over NCCL end when one of them is killed, missing, stuck or fails. */
#include "tests/gpu/nccl_ranks.h"
#include "worker/comm/peers.h"

/* ---- losses ----------------------------------------------------------------------------- */

static int reduce_turns(struct comms *comms, int turns, struct comm_segment *s)
{
    struct error err;
    error_clear(&err);
    for (int turn = 0; turns < 0 || turn < turns; turn++) {
        int rc = comm_all_reduce(&comms->tp, ks, s, 1, COMM_SUM, "latent qkv", &err);
        if (!rc)
            rc = k->stream_sync(ks, &err);
        if (rc)
            tell_and_end(&err);
        if (turn == 3)
            CHECK(write(to_parent, "runs", 4) == 4);
    }
    return 0;
}

static int reduce_for_ever(struct comms *comms, int to_test)
{
    (void)to_test;
    struct comm_segment s = {numbers(DTYPE_F32, 100000, 0), 100000, DTYPE_F32};
    CHECK(s.data);
    return reduce_turns(comms, -1, &s);
}

/* What `rank` said at its end: ERR_PEER_LOST and who. */
static void says_lost(struct world *w, int rank, int victim)
{
    char text[1024], want[64];
    snprintf(want, sizeof want, "PEER_LOST lost rank %d", victim);
    collect(w, rank, text, sizeof text);
    if (strcmp(text, want))
        fail_msg("rank %d says: %s", rank, text);
    assert_int_equal(ended(w, rank), RANK_EXIT_PEER);
}

/* T24. */
static void a_killed_rank_is_named(int size, int victim)
{
    struct world w;
    begin(&w, size, 1, 1, reduce_for_ever);
    for (int i = 0; i < size; i++)
        await_text(&w, i, "runs");
    kill(w.pids[victim], SIGKILL);
    int64_t killed = clock_mono_ns();
    for (int i = 0; i < size; i++)
        if (i != victim)
            says_lost(&w, i, victim);
    assert_true(clock_mono_ns() - killed < 10 * NS_PER_S);
    assert_int_equal(ended(&w, victim), -SIGKILL);
    stop(&w);
}

static void a_killed_rank_is_named_by_all(void **state)
{
    (void)state;
    need_gpu();
    a_killed_rank_is_named(2, 1);
    a_killed_rank_is_named(2, 0);
    a_killed_rank_is_named(4, 2);
}

/* T25: rank 1 fails by itself, with a call under way that rank 0 never makes and a captured one that still lives. */
static int fail_alone(struct comms *comms, int to_test)
{
    struct error err, why;
    struct comm_segment s = {numbers(DTYPE_F32, 100000, 0), 100000, DTYPE_F32};
    CHECK(s.data);
    CHECK(!reduce_turns(comms, 4, &s));
    struct kgraph *graph;
    CHECK(!k->capture_begin(ks, &err));
    CHECK(!comm_all_reduce(&comms->tp, ks, &s, 1, COMM_SUM, "test", &err));
    CHECK(!k->capture_end(ks, &graph, &err));
    if (comms->world.rank == 0)
        for (;;)
            pause(); /* the watcher ends it */
    k->graph_launch(ks, graph);
    CHECK(!comm_all_reduce(&comms->tp, ks, &s, 1, COMM_SUM, "test", &err));
    error_set(&why, ERR_IO, "disk");
    comms_abort(comms, &why);
    CHECK(comm_all_reduce(&comms->tp, ks, &s, 1, COMM_SUM, "test", &err) == ERR_PEER_LOST);
    k->graph_destroy(graph);
    k->release(s.data);
    k->stream_destroy(ks);
    CHECK(write(to_test, "freed", 5) == 5);
    comms_destroy(comms);
    _exit(7);
}

static void a_rank_that_fails_aborts_and_ends(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, fail_alone);
    await_text(&w, 0, "runs");
    await_text(&w, 1, "runs");
    int64_t began = clock_mono_ns();
    await_text(&w, 1, "freed");
    assert_int_equal(ended(&w, 1), 7);
    says_lost(&w, 0, 1);
    assert_true(clock_mono_ns() - began < 15 * NS_PER_S);
    stop(&w);
}

/* ---- connecting ------------------------------------------------------------------------- */

static int never(struct comms *comms, int to_test)
{
    (void)comms;
    (void)to_test;
    return 1; /* no rank gets here */
}

static void a_rank_that_never_comes_is_named(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    struct comm_layout layout = {.tp = 2, .dp = 1, .pp = 1};
    char text[1024];
    connect_ms = 3000;
    start_connected(&w, 1, &layout, ALIVE_MS, connect_nccl, never);
    connect_ms = 40000;
    collect(&w, 0, text, sizeof text);
    if (strncmp(text, "TIMEOUT ", 8) || !strstr(text, "group world") || !strstr(text, "rank 1 did not come"))
        fail_msg("rank 0 says: %s", text);
    assert_int_equal(ended(&w, 0), RANK_EXIT_PEER);
    stop(&w);
}

/* Rank 1 comes to the rendezvous and no further. */
static int half_way(const struct world *w, int rank, const struct rendezvous *rv, int to_test, struct comms *comms,
                    struct error *err)
{
    if (rank == 0)
        return connect_nccl(w, rank, rv, to_test, comms, err);
    struct peers *peers;
    if (peers_connect(rank, w->size, "127.0.0.1", rv, connect_ms, &peers, err) ||
        rv->set(rv->arg, "world", "device-1", "elsewhere", 9, err))
        return 1;
    CHECK(write(to_test, "there", 5) == 5);
    for (;;)
        pause();
}

static void connecting_ends_by_the_deadline(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    struct comm_layout layout = {.tp = 2, .dp = 1, .pp = 1};
    char text[1024];
    connect_ms = 15000;
    start_connected(&w, 2, &layout, ALIVE_MS, half_way, never);
    connect_ms = 40000;
    collect(&w, 0, text, sizeof text);
    if (strncmp(text, "TIMEOUT ", 8) || !strstr(text, "did not connect"))
        fail_msg("rank 0 says: %s", text);
    assert_int_equal(ended(&w, 0), RANK_EXIT_PEER);
    stop(&w);
}

static void a_rank_killed_while_connecting_is_named(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    struct comm_layout layout = {.tp = 2, .dp = 1, .pp = 1};
    start_connected(&w, 2, &layout, ALIVE_MS, half_way, never);
    await_text(&w, 1, "there");
    kill(w.pids[1], SIGKILL);
    says_lost(&w, 0, 1);
    stop(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_rank_is_named_by_all),           cmocka_unit_test(a_rank_that_fails_aborts_and_ends),
        cmocka_unit_test(a_rank_that_never_comes_is_named),        cmocka_unit_test(connecting_ends_by_the_deadline),
        cmocka_unit_test(a_rank_killed_while_connecting_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
