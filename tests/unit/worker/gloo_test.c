/* Gloo between real processes: every kind, type and shape against sums that are exact, the
 * groups of a 2 x 2 layout, and what a rank says when another one is killed, missing or stopped. */
#include "tests/unit/worker/exact_sums.h"
#include "tests/unit/worker/processes.h"

/* ---- exact sums ------------------------------------------------------------------ */

static int check_all_reduce(struct comms *comms, struct comm *c, int first)
{
    static const int64_t counts[] = {1, 2, 3, 7, 1000, 300001};
    struct error err;
    for (int t = 0; t < DTYPE_COUNT; t++)
        for (int op = COMM_SUM; op <= COMM_MAX; op++)
            for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
                enum dtype dtype = (enum dtype)t;
                int64_t n = counts[k];
                void *data = malloc((size_t)n * dtype_size(dtype));
                for (int64_t i = 0; i < n; i++)
                    put(dtype, data, i, value(comms->world.rank, i));
                struct comm_segment s = {data, n, dtype};
                CHECK(!comm_all_reduce(c, NULL, &s, 1, (enum comm_op)op, "test", &err));
                for (int64_t i = 0; i < n; i++)
                    CHECK(get(dtype, data, i) == expected((enum comm_op)op, c->size, first, i));
                free(data);
            }
    return 0;
}

static int all_reduces(struct comms *comms, int to_test)
{
    (void)to_test;
    return check_all_reduce(comms, &comms->world, 0) ||
           check_all_reduce(comms, &comms->tp, comms->world.rank / comms->tp.size * comms->tp.size);
}

/* Every group of 2 x 2 x 2, with the first and last stage's. */
static int groups_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    int rank = comms->world.rank, tp = rank % 2, dp = rank / 2 % 2, pp = rank / 4;
    const struct {
        struct comm *c;
        double sum;
    } groups[] = {{&comms->world, 28},
                  {&comms->tp, 2 * rank - 2 * tp + 1},
                  {&comms->dp, 2 * rank - 4 * dp + 2},
                  {&comms->pp, 2 * rank - 8 * pp + 4},
                  {&comms->ends, 2 * rank - 8 * pp + 4}};
    for (int i = 0; i < 5; i++) {
        double x = rank;
        struct comm_segment s = {&x, 1, DTYPE_F64};
        CHECK(!comm_all_reduce(groups[i].c, NULL, &s, 1, COMM_SUM, "test", &err));
        CHECK(x == groups[i].sum);
    }
    return 0;
}

static void every_layout_has_its_groups(void **state)
{
    (void)state;
    struct world w;
    struct comm_layout layout = {.tp = 2, .dp = 2, .pp = 2, .ends = true};
    start_layout(&w, 8, &layout, 20000, groups_body);
    all_end_well(&w);
}

/* Both directions at once between neighbours of a chain, of unequal sizes, and one direction alone. */
static int exchange_body(struct comms *comms, int to_test)
{
    (void)to_test;
    static float up[1000], down[70000], from_left[1000], from_right[70000];
    struct error err;
    int rank = comms->pp.rank, last = comms->pp.size - 1;
    for (int turn = 0; turn < 20; turn++) {
        for (int i = 0; i < 1000; i++)
            up[i] = (float)(rank * 10000 + turn * 1000 + i);
        for (int i = 0; i < 70000; i++)
            down[i] = (float)(rank + turn * 100000 + i);
        struct comm_segment s[] = {
            {up, 400, DTYPE_F32},        {up + 400, 600, DTYPE_F32},        {down, 70000, DTYPE_F32},
            {from_left, 400, DTYPE_F32}, {from_left + 400, 600, DTYPE_F32}, {from_right, 70000, DTYPE_F32}};
        struct comm_message to_right = {rank + 1, s, 2, PASS_FORWARD}, to_left = {rank - 1, s + 2, 1, PASS_BACKWARD};
        struct comm_message of_left = {rank - 1, s + 3, 2, PASS_FORWARD},
                            of_right = {rank + 1, s + 5, 1, PASS_BACKWARD};
        CHECK(!comm_exchange(&comms->pp, NULL, rank < last ? &to_right : NULL, rank > 0 ? &of_left : NULL, "up", &err));
        CHECK(
            !comm_exchange(&comms->pp, NULL, rank > 0 ? &to_left : NULL, rank < last ? &of_right : NULL, "down", &err));
        for (int i = 0; i < 1000 && rank > 0; i++)
            CHECK(from_left[i] == (float)((rank - 1) * 10000 + turn * 1000 + i));
        for (int i = 0; i < 70000 && rank < last; i++)
            CHECK(from_right[i] == (float)(rank + 1 + turn * 100000 + i));
        /* Opposite directions between two ranks in one call. */
        if (rank < 2) {
            struct comm_message give = {1 - rank, rank ? s + 2 : s, 1, PASS_FORWARD};
            struct comm_message take = {1 - rank, rank ? s + 3 : s + 5, 1, PASS_FORWARD};
            CHECK(!comm_exchange(&comms->pp, NULL, &give, &take, "both", &err));
        }
    }
    const struct comm_count *sent = &comms->counters.by[GROUP_PP][COMM_SEND][PASS_BACKWARD];
    CHECK(sent->calls == (rank > 0 ? 20 : 0) && sent->elements == sent->calls * 70000);
    return 0;
}

static void neighbours_exchange(void **state)
{
    (void)state;
    struct world w;
    struct comm_layout layout = {.tp = 1, .dp = 1, .pp = 3};
    start_layout(&w, 3, &layout, 20000, exchange_body);
    all_end_well(&w);
}

static int segments_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    float joined[50], apart[7];
    double wide[3];
    for (int i = 0; i < 50; i++)
        joined[i] = (float)value(comms->world.rank, i);
    for (int i = 0; i < 7; i++)
        apart[i] = (float)value(comms->world.rank, i);
    for (int i = 0; i < 3; i++)
        wide[i] = value(comms->world.rank, i);
    struct comm_segment s[] = {
        {joined, 20, DTYPE_F32}, {joined + 20, 30, DTYPE_F32}, {apart, 7, DTYPE_F32}, {wide, 3, DTYPE_F64}};
    comms->tp.pass = PASS_BACKWARD;
    CHECK(!comm_all_reduce(&comms->tp, NULL, s, 4, COMM_SUM, "test", &err));
    for (int i = 0; i < 50; i++)
        CHECK((double)joined[i] == expected(COMM_SUM, comms->tp.size, 0, i));
    for (int i = 0; i < 7; i++)
        CHECK((double)apart[i] == expected(COMM_SUM, comms->tp.size, 0, i));
    for (int i = 0; i < 3; i++)
        CHECK(wide[i] == expected(COMM_SUM, comms->tp.size, 0, i));
    const struct comm_count *count = &comms->counters.by[GROUP_TP][COMM_ALL_REDUCE][PASS_BACKWARD];
    CHECK(count->calls == 1 && count->elements == 60 && count->bytes == 57 * 4 + 3 * 8);
    return 0;
}

static int scatter_and_gather(struct comms *comms, int to_test)
{
    (void)to_test;
    static const int64_t chunks[] = {1, 5, 100003};
    struct error err;
    struct comm *c = &comms->world;
    for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++)
        for (int t = 0; t < DTYPE_COUNT; t++) {
            enum dtype dtype = (enum dtype)t;
            int64_t chunk = chunks[k], all = chunk * c->size;
            size_t size = dtype_size(dtype);
            char *data = malloc((size_t)all * size), *mine = malloc((size_t)chunk * size);
            for (int64_t i = 0; i < all; i++)
                put(dtype, data, i, value(c->rank, i));
            CHECK(!comm_reduce_scatter(c, NULL, data, mine, chunk, dtype, "test", &err));
            for (int64_t i = 0; i < chunk; i++)
                CHECK(get(dtype, mine, i) == expected(COMM_SUM, c->size, 0, c->rank * chunk + i));
            CHECK(!memcmp(mine, data + (size_t)c->rank * (size_t)chunk * size, (size_t)chunk * size));
            CHECK(!comm_all_gather(c, NULL, mine, data, chunk, dtype, "test", &err));
            for (int64_t i = 0; i < all; i++)
                CHECK(get(dtype, data, i) == expected(COMM_SUM, c->size, 0, i));
            free(data);
            free(mine);
        }
    return 0;
}

static void sums_are_exact_for_every_type(void **state)
{
    (void)state;
    for (int size = 2; size <= 4; size++) {
        struct world w;
        start(&w, size, size, 20000, all_reduces);
        all_end_well(&w);
    }
}

static void a_2_by_2_layout_has_its_own_groups(void **state)
{
    (void)state;
    struct world w;
    start(&w, 4, 2, 20000, all_reduces);
    all_end_well(&w);
}

static void segments_are_one_call(void **state)
{
    (void)state;
    struct world w;
    start(&w, 2, 2, 20000, segments_body);
    all_end_well(&w);
}

static void reduce_scatter_and_all_gather_agree(void **state)
{
    (void)state;
    for (int size = 2; size <= 4; size++) {
        struct world w;
        start(&w, size, size, 20000, scatter_and_gather);
        all_end_well(&w);
    }
}

/* Sums of numbers that do not add exactly must come out the same every time and on every rank. */
static int repeat_body(struct comms *comms, int to_test)
{
    enum { N = 4099 };
    static float first[N], data[N];
    struct error err;
    for (int turn = 0; turn < 20; turn++) {
        for (int i = 0; i < N; i++)
            data[i] = 1.0f / (float)(1 + (i * 37 + comms->world.rank * 101) % 1009);
        struct comm_segment s = {data, N, DTYPE_F32};
        CHECK(!comm_all_reduce(&comms->world, NULL, &s, 1, COMM_SUM, "test", &err));
        if (!turn)
            memcpy(first, data, sizeof data);
        CHECK(!memcmp(first, data, sizeof data));
    }
    CHECK(write(to_test, first, sizeof first) == (ssize_t)sizeof first);
    return 0;
}

static void sums_repeat_bit_for_bit(void **state)
{
    (void)state;
    static char a[20000], b[20000];
    struct world w;
    start(&w, 4, 4, 20000, repeat_body);
    collect(&w, 0, a, sizeof a);
    for (int i = 1; i < 4; i++) {
        collect(&w, i, b, sizeof b);
        assert_memory_equal(a, b, 4099 * sizeof(float));
    }
    all_end_well(&w);
}

/* ---- losses ------------------------------------------------------------------------ */

/* Reduces for ever; tells the test that it runs, and at the end the code and text of the error. */
static int reduce_until_error(struct comms *comms, int to_test)
{
    enum { N = 100000 };
    static float data[N];
    struct error err;
    error_clear(&err);
    for (int turn = 0;; turn++) {
        struct comm_segment s = {data, N, DTYPE_F32};
        int rc = comm_all_reduce(&comms->tp, NULL, &s, 1, COMM_SUM, "latent qkv", &err);
        if (rc) {
            dprintf(to_test, "%s %s", error_code_name((enum error_code)rc), err.message);
            /* After an error the comm is dead and says so at once. */
            CHECK(comm_all_reduce(&comms->tp, NULL, &s, 1, COMM_SUM, "again", &err) == ERR_PEER_LOST);
            return 0;
        }
        if (turn == 3)
            CHECK(write(to_test, "runs", 4) == 4);
    }
}

/* A chain that passes messages up for ever, with an answer down. */
static int exchange_until_error(struct comms *comms, int to_test)
{
    enum { N = 50000 };
    static float up[N], down[N], from_left[N], from_right[N];
    struct comm *c = &comms->pp;
    struct comm_segment s[] = {
        {up, N, DTYPE_F32}, {down, N, DTYPE_F32}, {from_left, N, DTYPE_F32}, {from_right, N, DTYPE_F32}};
    struct comm_message to_right = {c->rank + 1, &s[0], 1, PASS_FORWARD},
                        to_left = {c->rank - 1, &s[1], 1, PASS_BACKWARD};
    struct comm_message of_left = {c->rank - 1, &s[2], 1, PASS_FORWARD},
                        of_right = {c->rank + 1, &s[3], 1, PASS_BACKWARD};
    bool first = c->rank == 0, last = c->rank == c->size - 1;
    struct error err;
    error_clear(&err);
    for (int turn = 0;; turn++) {
        int rc = comm_exchange(c, NULL, last ? NULL : &to_right, first ? NULL : &of_left, "stage border", &err);
        if (!rc)
            rc = comm_exchange(c, NULL, first ? NULL : &to_left, last ? NULL : &of_right, "stage border", &err);
        if (rc) {
            dprintf(to_test, "%s %s", error_code_name((enum error_code)rc), err.message);
            return 0;
        }
        if (turn == 3)
            CHECK(write(to_test, "runs", 4) == 4);
    }
}

/* Whoever dies in a pipeline is named on every stage, not the neighbour that gave up because of it. */
static void a_killed_stage_is_named_by_all(void **state)
{
    (void)state;
    for (int victim = 0; victim < 4; victim++) {
        struct world w;
        struct comm_layout layout = {.tp = 1, .dp = 1, .pp = 4};
        start_layout(&w, 4, &layout, 20000, exchange_until_error);
        for (int i = 0; i < 4; i++)
            await_text(&w, i, "runs");
        kill(w.pids[victim], SIGKILL);
        char name[32];
        snprintf(name, sizeof name, "lost rank %d", victim);
        for (int i = 0; i < 4; i++) {
            char text[1024];
            if (i == victim)
                continue;
            collect(&w, i, text, sizeof text);
            if (strncmp(text, "PEER_LOST ", 10) || !strstr(text, name) || !strstr(text, "stage border"))
                fail_msg("rank %d says: %s", i, text);
            assert_int_equal(ended(&w, i), 0);
        }
        assert_int_equal(ended(&w, victim), -SIGKILL);
        stop(&w);
    }
}

/* T24: kill -9 of one rank during all-reduce. */
static void a_killed_rank_is_named(int size, int victim)
{
    struct world w;
    start(&w, size, size, 20000, reduce_until_error);
    for (int i = 0; i < size; i++)
        await_text(&w, i, "runs");
    kill(w.pids[victim], SIGKILL);
    int64_t killed = clock_mono_ns();
    char name[32];
    snprintf(name, sizeof name, "lost rank %d", victim);
    for (int i = 0; i < size; i++) {
        if (i == victim)
            continue;
        char text[1024];
        collect(&w, i, text, sizeof text);
        if (strncmp(text, "PEER_LOST ", 10))
            fail_msg("rank %d says: %s", i, text);
        const char *at = strstr(text, name);
        if (!at || (at[strlen(name)] && at[strlen(name)] != ' '))
            fail_msg("rank %d says: %s", i, text);
        assert_non_null(strstr(text, "latent qkv"));
        assert_int_equal(ended(&w, i), 0);
    }
    assert_true(clock_mono_ns() - killed < 3 * NS_PER_S);
    assert_int_equal(ended(&w, victim), -SIGKILL);
    stop(&w);
}

static void a_killed_rank_is_named_by_all(void **state)
{
    (void)state;
    a_killed_rank_is_named(2, 1);
    a_killed_rank_is_named(2, 0);
    for (int turn = 0; turn < 5; turn++)
        a_killed_rank_is_named(4, turn % 4);
}

static void a_stopped_rank_runs_into_the_deadline(void **state)
{
    (void)state;
    struct world w;
    start(&w, 2, 2, 500, reduce_until_error);
    await_text(&w, 0, "runs");
    await_text(&w, 1, "runs");
    kill(w.pids[1], SIGSTOP);
    int64_t stopped = clock_mono_ns();
    char text[1024];
    collect(&w, 0, text, sizeof text);
    assert_true(clock_mono_ns() - stopped < 5 * NS_PER_S);
    assert_int_equal(strncmp(text, "TIMEOUT ", 8), 0);
    assert_non_null(strstr(text, "rank 1"));
    assert_int_equal(ended(&w, 0), 0);
    stop(&w);
}

static void a_rank_that_never_comes_is_named(void **state)
{
    (void)state;
    struct world w;
    start(&w, 0, 1, 1000, reduce_until_error);
    struct rendezvous_client client;
    struct comms comms;
    struct error err;
    assert_int_equal(rendezvous_open(&client, w.socket, 1, 1, 0, 1000, &err), 0);
    struct rendezvous rv = rendezvous_table(&client);
    struct comm_layout layout = {.tp = 2, .dp = 1, .pp = 1};
    assert_int_equal(gloo_comms_create(0, &layout, "127.0.0.1", &rv, 300, 1000, &comms, &err), ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "rank 1 did not come"));
    assert_int_not_equal(gloo_comms_create(0, &layout, "203.0.113.7", &rv, 300, 1000, &comms, &err), 0);
    assert_non_null(strstr(err.message, "203.0.113.7"));
    rendezvous_close(&client);
    stop(&w);
}

/* ---- latency, for people: BOOST_GLOO_BENCH=1 -------------------------------------------- */

static int bench_body(struct comms *comms, int to_test)
{
    static const int64_t counts[] = {8, 256, 256 * 64, 256 * 97, 256 * 193, 256 * 385, 1 << 20};
    static float data[1 << 20];
    struct error err;
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        int turns = 0;
        struct comm_segment s = {data, counts[k], DTYPE_F32};
        int64_t began = clock_mono_ns();
        for (; turns < 300; turns++)
            CHECK(!comm_all_reduce(&comms->tp, NULL, &s, 1, COMM_SUM, "bench", &err));
        if (comms->tp.rank == 0)
            dprintf(to_test, "# gloo all_reduce fp32 x %lld on %d ranks: %.1f us\n", (long long)counts[k],
                    comms->tp.size, (double)(clock_mono_ns() - began) / turns / 1e3);
    }
    return 0;
}

static void latency(void **state)
{
    (void)state;
    if (!getenv("BOOST_GLOO_BENCH"))
        skip();
    char text[4096];
    struct world w;
    start(&w, 2, 2, 20000, bench_body);
    collect(&w, 0, text, sizeof text);
    fputs(text, stdout);
    all_end_well(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_exact_for_every_type),
        cmocka_unit_test(a_2_by_2_layout_has_its_own_groups),
        cmocka_unit_test(every_layout_has_its_groups),
        cmocka_unit_test(neighbours_exchange),
        cmocka_unit_test(segments_are_one_call),
        cmocka_unit_test(reduce_scatter_and_all_gather_agree),
        cmocka_unit_test(sums_repeat_bit_for_bit),
        cmocka_unit_test(a_killed_rank_is_named_by_all),
        cmocka_unit_test(a_killed_stage_is_named_by_all),
        cmocka_unit_test(a_stopped_rank_runs_into_the_deadline),
        cmocka_unit_test(a_rank_that_never_comes_is_named),
        cmocka_unit_test(latency),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
