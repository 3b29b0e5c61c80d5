/* LOCAL collectives: results, order of sums, counters, mismatched calls, and a rank that is lost. */
#include "tests/unit/worker/tiny.h"

#include <time.h>

enum { MAX_WORLD = 8 };

struct member {
    struct local_world *world;
    int rank, size, tp;
    int (*body)(struct member *m, struct comms *c, struct error *err);
    struct error err;
    int rc;
    struct comms comms;
    pthread_t thread;
};

static void *member_main(void *arg)
{
    struct member *m = arg;
    m->rc = local_comms_join(m->world, m->rank, &m->comms, &m->err);
    if (!m->rc)
        m->rc = m->body(m, &m->comms, &m->err);
    comms_destroy(&m->comms);
    return NULL;
}

static void run(int size, int tp, int (*body)(struct member *, struct comms *, struct error *), struct member *members)
{
    struct error err;
    struct local_world *world;
    struct comm_layout layout = {.tp = tp, .dp = size / tp, .pp = 1};
    assert_int_equal(local_world_create(&layout, &world, &err), 0);
    for (int i = 0; i < size; i++) {
        members[i] = (struct member){.world = world, .rank = i, .size = size, .tp = tp, .body = body};
        pthread_create(&members[i].thread, NULL, member_main, &members[i]);
    }
    for (int i = 0; i < size; i++)
        pthread_join(members[i].thread, NULL);
    local_world_destroy(world);
}

static void all_fine(const struct member *members, int size)
{
    for (int i = 0; i < size; i++)
        if (members[i].rc)
            fail_msg("rank %d: %s", i, members[i].err.message);
}

static int wrong(struct error *err, const char *what)
{
    return error_set(err, ERR_INTERNAL, "%s: wrong result", what);
}

/* Values whose float sum depends on the order: ascending ranks only. */
static float value(int rank, int64_t i)
{
    return (float)(rank + 1) * 0.1f + (float)(i % 7) * 1e6f * (rank % 2 ? -1.0f : 1.0f);
}

static int reductions(struct member *m, struct comms *c, struct error *err)
{
    enum { N = 1337 };
    static _Thread_local float a[N], b[3];
    static _Thread_local double d[N];
    for (int round = 0; round < 20; round++) {
        for (int64_t i = 0; i < N; i++) {
            a[i] = value(m->rank, i);
            d[i] = m->rank * 1000 + (double)i;
        }
        for (int i = 0; i < 3; i++)
            b[i] = (float)((m->rank * 5 + i) % m->size);
        struct comm_segment segments[] = {{a, N, DTYPE_F32}, {d, N, DTYPE_F64}};
        int rc = comm_all_reduce(&c->world, NULL, segments, 2, COMM_SUM, "two segments", err);
        struct comm_segment top = {b, 3, DTYPE_F32};
        if (!rc)
            rc = comm_all_reduce(&c->world, NULL, &top, 1, COMM_MAX, "maximum", err);
        if (rc)
            return rc;
        for (int64_t i = 0; i < N; i++) {
            float sum = value(0, i);
            double total = (double)i;
            for (int r = 1; r < m->size; r++) {
                sum += value(r, i);
                total += r * 1000 + (double)i;
            }
            if (a[i] != sum || d[i] != total)
                return wrong(err, "sum");
        }
        for (int i = 0; i < 3; i++) {
            int most = 0;
            for (int r = 0; r < m->size; r++)
                most = (r * 5 + i) % m->size > most ? (r * 5 + i) % m->size : most;
            if (b[i] != (float)most)
                return wrong(err, "maximum");
        }
    }
    const struct comm_count *n = &c->counters.by[GROUP_WORLD][COMM_ALL_REDUCE][PASS_FORWARD];
    bool counted = n->calls == 40 && n->elements == 20 * (2 * N + 3) && n->bytes == 20 * (N * 12 + 12);
    return counted ? ERR_OK : wrong(err, "counters");
}

static int scatter_and_gather(struct member *m, struct comms *c, struct error *err)
{
    enum { CHUNK = 77 };
    static _Thread_local double data[MAX_WORLD * CHUNK], part[CHUNK], all[MAX_WORLD * CHUNK];
    int first = m->rank / m->tp * m->tp, at = m->rank - first; /* within the tp group */
    for (int i = 0; i < m->tp * CHUNK; i++)
        data[i] = m->rank * 10000 + i;
    int rc = comm_reduce_scatter(&c->tp, NULL, data, part, CHUNK, DTYPE_F64, "scatter", err);
    if (rc)
        return rc;
    for (int i = 0; i < CHUNK; i++) {
        double sum = 0;
        for (int r = first; r < first + m->tp; r++)
            sum += r * 10000 + at * CHUNK + i;
        if (part[i] != sum || data[at * CHUNK + i] != sum)
            return wrong(err, "reduce_scatter");
        part[i] = m->rank * 100 + i;
    }
    rc = comm_all_gather(&c->tp, NULL, part, all, CHUNK, DTYPE_F64, "gather", err);
    for (int i = 0; i < m->tp * CHUNK && !rc; i++)
        if (all[i] != (first + i / CHUNK) * 100 + i % CHUNK)
            rc = wrong(err, "all_gather");
    if (rc)
        return rc;
    c->tp.pass = PASS_BACKWARD; /* the pass is the caller's to set */
    rc = comm_all_gather(&c->tp, NULL, part, all, CHUNK, DTYPE_F64, "gather", err);
    const struct comm_counters *n = &c->counters;
    int64_t calls = m->tp > 1;
    if (!rc && (n->by[GROUP_TP][COMM_ALL_GATHER][PASS_BACKWARD].calls != calls ||
                n->by[GROUP_TP][COMM_REDUCE_SCATTER][PASS_FORWARD].elements != calls * m->tp * CHUNK))
        rc = wrong(err, "counters");
    return rc;
}

/* 1 + 2^-8 in bf16 is a tie that goes down to the even 1, so the order of ranks shows: 1 three times over, but
 * 2^-8 three times before 1 is 1 + 2^-6. A NaN stays one. */
static int rounds_to_bf16(struct member *m, struct comms *c, struct error *err)
{
    enum { ONE = 0x3f80, SMALL = 0x3b80, TWO_SMALL = 0x3c00, NOT_A_NUMBER = 0x7fc0, MINUS_ONE = 0xbf80 };
    uint16_t x[3] = {m->rank == 0 ? ONE : SMALL, m->rank == 3 ? ONE : SMALL, m->rank == 2 ? NOT_A_NUMBER : ONE};
    uint16_t top[2] = {m->rank == 1 ? TWO_SMALL : SMALL, m->rank == 1 ? NOT_A_NUMBER : MINUS_ONE};
    struct comm_segment sum = {x, 3, DTYPE_BF16}, most = {top, 2, DTYPE_BF16};
    int rc = comm_all_reduce(&c->world, NULL, &sum, 1, COMM_SUM, "bf16", err);
    if (!rc)
        rc = comm_all_reduce(&c->world, NULL, &most, 1, COMM_MAX, "bf16", err);
    if (rc)
        return rc;
    bool good = x[0] == ONE && x[1] == 0x3f82 && (x[2] & 0x7fff) > 0x7f80 && top[0] == TWO_SMALL &&
                (top[1] & 0x7fff) > 0x7f80;
    return good ? ERR_OK : wrong(err, "bf16");
}

static void collectives_are_exact(void **state)
{
    (void)state;
    struct member members[MAX_WORLD];
    const int sizes[] = {1, 2, 3, 5, 8};
    for (int i = 1; i < 5; i++) {
        run(sizes[i], 1, reductions, members);
        all_fine(members, sizes[i]);
    }
    run(4, 1, rounds_to_bf16, members);
    all_fine(members, 4);
    const int groups[][2] = {{1, 1}, {2, 2}, {4, 2}, {6, 3}, {8, 8}};
    for (int i = 0; i < 5; i++) {
        run(groups[i][0], groups[i][1], scatter_and_gather, members);
        all_fine(members, groups[i][0]);
    }
}

/* Rank 2 fails before its third call; the others wait in it, or come later. */
static int lose_rank_two(struct member *m, struct comms *c, struct error *err)
{
    double x[4] = {0};
    struct comm_segment s = {x, 4, DTYPE_F64};
    for (int i = 0; i < 10; i++) {
        if (m->rank == 2 && i == 2) {
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* so that the others are in the call */
            local_world_abort(m->world, m->rank);
            return ERR_OK;
        }
        int rc = comm_all_reduce(&c->world, NULL, &s, 1, COMM_SUM, "latent qkv", err);
        if (rc) {
            int again = comm_all_reduce(&c->world, NULL, &s, 1, COMM_SUM, "latent qkv", err);
            return again == rc ? rc : wrong(err, "a dead group");
        }
    }
    return ERR_OK;
}

static void a_lost_rank_wakes_the_rest(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        struct member members[4];
        run(4, 2, lose_rank_two, members);
        assert_int_equal(members[2].rc, ERR_OK);
        for (int i = 0; i < 4; i++) {
            if (i == 2)
                continue;
            assert_int_equal(members[i].rc, ERR_PEER_LOST);
            if (!strstr(members[i].err.message, "rank 2 is gone") || !strstr(members[i].err.message, "latent qkv") ||
                !strstr(members[i].err.message, "group world"))
                fail_msg("%s", members[i].err.message);
        }
    }
}

/* ---- exchanges along a pipeline of all ranks ---- */

/* Values go up and down a chain at once; then rank 1 fails while its neighbours wait for it. */
static int along_the_chain(struct member *m, struct comms *c, struct error *err)
{
    enum { N = 33 };
    int last = c->pp.size - 1, rank = c->pp.rank;
    double up[N], down[2], from_left[N], from_right[2];
    for (int turn = 0; turn < 50; turn++) {
        for (int i = 0; i < N; i++)
            up[i] = rank * 100 + turn + i;
        down[0] = down[1] = -rank - turn;
        struct comm_segment s[] = {
            {up, N, DTYPE_F64}, {down, 2, DTYPE_F64}, {from_left, N, DTYPE_F64}, {from_right, 2, DTYPE_F64}};
        struct comm_message to_right = {rank + 1, &s[0], 1, PASS_FORWARD},
                            to_left = {rank - 1, &s[1], 1, PASS_BACKWARD};
        struct comm_message of_left = {rank - 1, &s[2], 1, PASS_FORWARD},
                            of_right = {rank + 1, &s[3], 1, PASS_BACKWARD};
        int rc = comm_exchange(&c->pp, NULL, rank < last ? &to_right : NULL, rank > 0 ? &of_left : NULL, "up", err);
        if (!rc)
            rc = comm_exchange(&c->pp, NULL, rank > 0 ? &to_left : NULL, rank < last ? &of_right : NULL, "down", err);
        if (rc)
            return rc;
        if ((rank > 0 && from_left[N - 1] != (rank - 1) * 100 + turn + N - 1) ||
            (rank < last && from_right[1] != -rank - 1 - turn))
            return wrong(err, "exchange");
    }
    const struct comm_count *got = &c->counters.by[GROUP_PP][COMM_RECV][PASS_FORWARD];
    if (got->calls != (rank > 0 ? 50 : 0) || got->elements != got->calls * N || got->bytes != got->elements * 8)
        return wrong(err, "counters");
    if (rank == 1) {
        local_world_abort(m->world, m->rank);
        return ERR_OK;
    }
    struct comm_segment s = {up, N, DTYPE_F64};
    struct comm_message with = {1, &s, 1, PASS_FORWARD};
    return comm_exchange(&c->pp, NULL, rank == 0 ? &with : NULL, rank == 0 ? NULL : &with, "lost", err);
}

static int unequal_ends(struct member *m, struct comms *c, struct error *err)
{
    double x[8] = {0};
    struct comm_segment s = {x, m->rank ? 5 : 4, DTYPE_F64};
    struct comm_message one = {1 - m->rank, &s, 1, PASS_FORWARD};
    return comm_exchange(&c->pp, NULL, m->rank ? NULL : &one, m->rank ? &one : NULL, "sizes", err);
}

static void run_pipeline(int size, int (*body)(struct member *, struct comms *, struct error *), struct member *members)
{
    struct error err;
    struct local_world *world;
    struct comm_layout layout = {.tp = 1, .dp = 1, .pp = size};
    assert_int_equal(local_world_create(&layout, &world, &err), 0);
    for (int i = 0; i < size; i++) {
        members[i] = (struct member){.world = world, .rank = i, .size = size, .tp = 1, .body = body};
        pthread_create(&members[i].thread, NULL, member_main, &members[i]);
    }
    for (int i = 0; i < size; i++)
        pthread_join(members[i].thread, NULL);
    local_world_destroy(world);
}

static void neighbours_exchange(void **state)
{
    (void)state;
    struct member members[MAX_WORLD];
    run_pipeline(3, along_the_chain, members);
    for (int i = 0; i < 3; i++) {
        if (members[i].rc != (i == 1 ? ERR_OK : ERR_PEER_LOST))
            fail_msg("rank %d: %s", i, members[i].err.message);
        if (i != 1)
            assert_non_null(strstr(members[i].err.message, "exchange \"lost\" in group pp of rank"));
    }
    run_pipeline(2, unequal_ends, members);
    assert_int_equal(members[0].rc, ERR_INTERNAL);
    assert_int_equal(members[1].rc, ERR_INTERNAL);
}

/* Who is with whom: rank = (pp * dp + dp_rank) * tp + tp_rank. */
static void groups_of_a_layout(void **state)
{
    (void)state;
    struct comm_layout l = {.tp = 2, .dp = 3, .pp = 4, .ends = true};
    assert_int_equal(comm_world_size(&l), 24);
    struct comm_place p = comm_place_of(&l, 23, GROUP_PP);
    assert_true(p.rank == 3 && p.size == 4 && p.first == 5 && p.step == 6);
    p = comm_place_of(&l, 9, GROUP_DP); /* stage 1, replica 1, slice 1 */
    assert_true(p.rank == 1 && p.size == 3 && p.first == 7 && p.step == 2);
    p = comm_place_of(&l, 9, GROUP_TP);
    assert_true(p.rank == 1 && p.size == 2 && p.first == 8 && p.step == 1);
    p = comm_place_of(&l, 9, GROUP_ENDS); /* in the middle of the pipeline: alone */
    assert_true(p.rank == 0 && p.size == 1 && p.first == 9);
    p = comm_place_of(&l, 21, GROUP_ENDS);
    assert_true(p.rank == 1 && p.size == 2 && p.first == 3 && p.step == 18);
}

static int disagree(struct member *m, struct comms *c, struct error *err)
{
    double x[8] = {0};
    struct comm_segment s = {x, m->rank == 1 ? 5 : 4, DTYPE_F64};
    return comm_all_reduce(&c->world, NULL, &s, 1, COMM_SUM, "sizes", err);
}

static void different_calls_are_an_error_on_every_rank(void **state)
{
    (void)state;
    struct member members[3];
    run(3, 1, disagree, members);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(members[i].rc, ERR_INTERNAL);
        assert_non_null(strstr(members[i].err.message, "ranks 0 and 1 are in different calls"));
    }
}

static void worlds_that_cannot_be(void **state)
{
    (void)state;
    struct error err;
    struct local_world *w;
    struct comm_layout layout = {.tp = 0, .dp = 1, .pp = 1};
    assert_int_equal(local_world_create(&layout, &w, &err), ERR_INVALID);
    layout.tp = 64;
    layout.pp = 2;
    assert_int_equal(local_world_create(&layout, &w, &err), ERR_INVALID);
    assert_null(w);
    layout.tp = layout.pp = 1;
    layout.dp = 2;
    assert_int_equal(local_world_create(&layout, &w, &err), 0);
    struct comms c;
    assert_int_equal(local_comms_join(w, 2, &c, &err), ERR_INVALID);
    local_world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_are_exact),
        cmocka_unit_test(a_lost_rank_wakes_the_rest),
        cmocka_unit_test(different_calls_are_an_error_on_every_rank),
        cmocka_unit_test(neighbours_exchange),
        cmocka_unit_test(groups_of_a_layout),
        cmocka_unit_test(worlds_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
