/* Overlap: the queue of all-reduces, and a step whose latents are summed slice by slice under the products of the
 * other slice. */
#include "tests/unit/worker/tiny.h"
#include <semaphore.h>

#include "worker/overlap.h"

/* ---- the queue ---- */

enum { RANKS = 3, CALLS = 200 };

struct member {
    struct local_world *world;
    int rank;
    bool aborts;
    int rc;
    struct error err;
    bool wrong;
    int64_t counted;
    pthread_t thread;
};
static sem_t first_began; /* by rank 0, while nobody else has: to begin is not to wait */

/* Up to OVERLAP_CALLS under way, waited for in order; every sum is right when its wait returns. */
static void *work_off(void *arg)
{
    struct member *m = arg;
    struct comms comms;
    struct overlap *o = NULL;

    double values[OVERLAP_CALLS][3];
    int64_t numbers[OVERLAP_CALLS];
    m->rc = local_comms_join(m->world, m->rank, &comms, &m->err);
    if (!m->rc)
        m->rc = overlap_create(&o, &m->err);
    for (int i = 0; i < CALLS + OVERLAP_CALLS && !m->rc; i++) {
        int at = i % OVERLAP_CALLS;
        if (i >= OVERLAP_CALLS) {
            m->rc = overlap_wait(o, numbers[at], &m->err);
            double per_rank = 3 * (i - OVERLAP_CALLS);
            for (int k = 0; k < 3 && !m->rc; k++)
                m->wrong = m->wrong || values[at][k] != RANKS * (per_rank + k) + RANKS * (RANKS - 1) / 2.0;
        }
        if (i >= CALLS || m->rc)
            continue;
        for (int k = 0; k < 3; k++)
            values[at][k] = 3 * i + k + m->rank;
        struct comm_segment segments[2] = {{values[at], 2, DTYPE_F64}, {&values[at][2], 1, DTYPE_F64}};
        if (m->aborts && i == 20)
            local_world_abort(m->world, m->rank);
        if (i == 0 && m->rank)
            sem_wait(&first_began);
        numbers[at] = overlap_begin(o, &comms.tp, NULL, segments, 2, "test");
        for (int k = 1; k < RANKS && i == 0 && m->rank == 0; k++)
            sem_post(&first_began);
    }
    overlap_destroy(o); /* also with calls under way that fail */
    m->counted = comms.counters.by[GROUP_TP][COMM_ALL_REDUCE][PASS_FORWARD].calls;
    comms_destroy(&comms);
    return NULL;
}

static void run_members(struct member m[RANKS], int aborts)
{
    struct comm_layout layout = {.tp = RANKS, .dp = 1, .pp = 1};
    struct local_world *world;
    struct error err;
    sem_init(&first_began, 0, 0);
    assert_int_equal(local_world_create(&layout, &world, &err), 0);
    for (int i = 0; i < RANKS; i++) {
        m[i] = (struct member){.world = world, .rank = i, .aborts = i == aborts};
        pthread_create(&m[i].thread, NULL, work_off, &m[i]);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(m[i].thread, NULL);
    local_world_destroy(world);
}

static void calls_are_done_in_order(void **state)
{
    (void)state;
    struct member m[RANKS];
    run_members(m, -1);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(m[i].rc, 0);
        assert_false(m[i].wrong);
        assert_true(m[i].counted == CALLS);
    }
}

static void a_lost_peer_ends_the_wait(void **state)
{
    (void)state;
    struct member m[RANKS];
    run_members(m, 1);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(m[i].rc, ERR_PEER_LOST);
        assert_non_null(strstr(m[i].err.message, "test"));
        assert_false(m[i].wrong);
    }
}

/* ---- a step ---- */

struct outcome {
    struct tiny c;
    double loss[3], norm[3];
};
static int three_steps(struct engine *e, int rank, void *arg, struct error *err)
{
    struct outcome *o = arg;
    tiny_randomize(e, 7);
    for (int s = 0; s < 3; s++) {
        struct tiny_batch b;
        struct step_request request = {.lr = 1e-4};
        struct step_result result;
        tiny_batch(&o->c, s * o->c.micro, 5, &b);
        int rc = engine_step(e, &b.micro, &request, &result, NULL, NULL, err);
        if (rc)
            return rc;
        if (rank == 0) {
            o->loss[s] = result.loss;
            o->norm[s] = result.grad_norm;
        }
    }
    return ERR_OK;
}

static void run(struct outcome *o)
{
    struct plan p;
    tiny_plan(&o->c, &p);
    tiny_run(&p, 1, three_steps, o, NULL);
}

/* Every row's forward is the same operations in the same order, so the first loss is the same to the bit; weight
 * gradients are sums over rows in two parts. Slices of whole sequences, of tokens (one sequence), and of one token,
 * which cannot be cut. */
static void slices_change_sums_over_rows_only(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        if (!tiny_ways[i].overlap)
            continue;
        for (int k = 0; k < 8; k++) {
            struct outcome with = {.c = tiny_of(i)}, without;
            with.c.tp = k & 1 ? 4 : 2;
            with.c.micro = with.c.global = (int[]){1, 2, 3, 1}[k / 2];
            with.c.s = (int[]){7, 6, 5, 1}[k / 2];
            without = with;
            without.c.way.overlap = false;
            run(&with);
            run(&without);
            assert_true(with.loss[0] == without.loss[0]);
            for (int s = 0; s < 3; s++) {
                assert_true(fabs(with.loss[s] / without.loss[s] - 1) < 1e-9);
                assert_true(fabs(with.norm[s] / without.norm[s] - 1) < 1e-9);
            }
        }
    }
}

static void slices_are_whole_sequences(void **state)
{
    (void)state;
    struct tiny c = tiny_default;
    struct plan p;
    c.tp = 2;
    c.way.overlap = true;
    c.micro = c.global = 5;
    tiny_plan(&c, &p);
    assert_true(plan_first_slice(&p) == 3 * c.s);
    c.micro = c.global = 1;
    c.s = 7;
    tiny_plan(&c, &p);
    assert_true(plan_first_slice(&p) == 4);
    c.tp = 1; /* nothing to hide */
    tiny_plan(&c, &p);
    assert_true(plan_first_slice(&p) == p.T);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_done_in_order),
        cmocka_unit_test(a_lost_peer_ends_the_wait),
        cmocka_unit_test(slices_change_sums_over_rows_only),
        cmocka_unit_test(slices_are_whole_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
