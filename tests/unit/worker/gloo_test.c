/* Gloo between real processes: every kind, type and shape against sums that are exact, the
 * groups of a 2 x 2 layout, and what a rank says when another one is killed, missing or stopped. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/clock.h"
#include "tests/unit/support/fake_agent.h"
#include "worker/comm/comm.h"
#include "worker/rendezvous.h"

enum { MAX_WORLD = 4, CONNECT_MS = 10000, TIMED_OUT = 99 };

struct world {
    int size, tp, op_timeout_ms;
    char dir[64], socket[96];
    struct fake_agent *agent;
    pid_t pids[MAX_WORLD];
    int from[MAX_WORLD]; /* what a rank writes, read by the test */
};
typedef int rank_body(struct comms *comms, int to_test);

/* Complains and fails the rank; runs in a child, where cmocka must not be used. */
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "# rank %d: %s:%d: %s\n", comms->world.rank, __FILE__, __LINE__, #condition); \
            return 1; \
        } \
    } while (0)

static void child(struct world *w, int rank, rank_body *body, int to_test)
{
    signal(SIGPIPE, SIG_IGN);
    alarm(60);
    struct rendezvous_client client;
    struct comms comms;
    struct error err;
    error_clear(&err);
    if (rendezvous_open(&client, w->socket, 1, 1, rank, CONNECT_MS, &err))
        _exit(10);
    struct rendezvous rv = rendezvous_table(&client);
    if (gloo_comms_create(rank, w->size, w->tp, "127.0.0.1", &rv, CONNECT_MS, w->op_timeout_ms, &comms, &err)) {
        fprintf(stderr, "# rank %d: %s\n", rank, err.message);
        _exit(11);
    }
    rendezvous_close(&client);
    int rc = body(&comms, to_test);
    comms_destroy(&comms);
    _exit(rc);
}

static void start(struct world *w, int size, int tp, int op_timeout_ms, rank_body *body)
{
    *w = (struct world){.size = size, .tp = tp, .op_timeout_ms = op_timeout_ms};
    snprintf(w->dir, sizeof w->dir, "/tmp/boost-gloo-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    snprintf(w->socket, sizeof w->socket, "%s/rv.sock", w->dir);
    w->agent = fake_agent_start(w->socket);
    assert_non_null(w->agent);
    fflush(NULL);
    for (int i = 0; i < size; i++) {
        int fds[2];
        assert_int_equal(pipe(fds), 0);
        w->pids[i] = fork();
        assert_true(w->pids[i] >= 0);
        if (!w->pids[i]) {
            close(fds[0]);
            child(w, i, body, fds[1]);
        }
        close(fds[1]);
        w->from[i] = fds[0];
    }
}

/* Everything that a rank wrote until its end. */
static void collect(struct world *w, int rank, char *out, size_t cap)
{
    size_t len = 0;
    for (ssize_t n; len < cap - 1 && (n = read(w->from[rank], out + len, cap - 1 - len)) > 0;)
        len += (size_t)n;
    out[len] = '\0';
}

static void await_text(struct world *w, int rank, const char *text)
{
    char got[64] = "";
    size_t len = strlen(text);
    assert_int_equal(read(w->from[rank], got, len), (ssize_t)len);
    assert_string_equal(got, text);
}

/* Exit status of a rank, its signal negated. */
static int ended(struct world *w, int rank)
{
    int status;
    assert_int_equal(waitpid(w->pids[rank], &status, 0), w->pids[rank]);
    w->pids[rank] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void stop(struct world *w)
{
    for (int i = 0; i < w->size; i++) {
        close(w->from[i]);
        if (w->pids[i] > 0) {
            kill(w->pids[i], SIGKILL);
            waitpid(w->pids[i], NULL, 0);
        }
    }
    fake_agent_stop(w->agent);
    unlink(w->socket);
    rmdir(w->dir);
}

static void all_end_well(struct world *w)
{
    int bad = 0;
    for (int i = 0; i < w->size; i++)
        bad += ended(w, i) != 0;
    stop(w);
    assert_int_equal(bad, 0);
}

/* ---- exact sums ------------------------------------------------------------------ */

/* Element i of rank r: small integers, so that every sum is exact in every type. */
static double value(int rank, int64_t i)
{
    return (double)((rank + 1) * (int)(i % 13) - 6);
}

static double get(enum dtype t, const void *data, int64_t i)
{
    switch (t) {
    case DTYPE_F64:
        return ((const double *)data)[i];
    case DTYPE_I32:
        return ((const int32_t *)data)[i];
    case DTYPE_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return (double)f;
    }
    default:
        return (double)((const float *)data)[i];
    }
}

static void put(enum dtype t, void *data, int64_t i, double v)
{
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (t == DTYPE_F64)
        ((double *)data)[i] = v;
    else if (t == DTYPE_I32)
        ((int32_t *)data)[i] = (int32_t)v;
    else if (t == DTYPE_BF16)
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16); /* these values are exact in bf16 */
    else
        ((float *)data)[i] = f;
}

static double expected(enum comm_op op, int ranks, int first, int64_t i)
{
    double v = value(first, i);
    for (int r = 1; r < ranks; r++) {
        double x = value(first + r, i);
        v = op == COMM_SUM ? v + x : x > v ? x : v;
    }
    return v;
}

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
    struct comm_segment s[] = {{joined, 20, DTYPE_F32}, {joined + 20, 30, DTYPE_F32}, {apart, 7, DTYPE_F32},
                               {wide, 3, DTYPE_F64}};
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
    assert_int_equal(gloo_comms_create(0, 2, 2, "127.0.0.1", &rv, 300, 1000, &comms, &err), ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "rank 1 did not come"));
    assert_int_not_equal(gloo_comms_create(0, 2, 2, "203.0.113.7", &rv, 300, 1000, &comms, &err), 0);
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
        cmocka_unit_test(segments_are_one_call),
        cmocka_unit_test(reduce_scatter_and_all_gather_agree),
        cmocka_unit_test(sums_repeat_bit_for_bit),
        cmocka_unit_test(a_killed_rank_is_named_by_all),
        cmocka_unit_test(a_stopped_rank_runs_into_the_deadline),
        cmocka_unit_test(a_rank_that_never_comes_is_named),
        cmocka_unit_test(latency),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
