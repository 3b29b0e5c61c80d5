/* Overlap: the queue of collectives, a step whose latents are summed slice by slice under the products of the other
 * slice, and gradients that are summed over replicas under the rest of the backward. */
#include "tests/unit/worker/tiny_grads.h"
#include <semaphore.h>
#include <time.h>

#include "tests/unit/worker/dry.h"

#include "worker/overlap.h"

/* ---- the queue ---- */

enum { RANKS = 3, CALLS = 200, UNDER_WAY = 8 };

struct member {
    struct local_world *world;
    int rank;
    bool aborts;
    int rc;
    struct error err;
    bool wrong;
    int64_t counted[COMM_KIND_COUNT];
    pthread_t thread;
};
static sem_t first_began; /* by rank 0, while nobody else has: to begin is not to wait */

/* Every third call is a reduce-scatter, of which a rank gets one element. */
static bool scatters(int i)
{
    return i % 3 == 2;
}

/* Up to UNDER_WAY under way, waited for in order; every sum is right when its wait returns. */
static void *work_off(void *arg)
{
    struct member *m = arg;
    struct comms comms;
    struct overlap *o = NULL;

    double values[UNDER_WAY][3];
    int64_t numbers[UNDER_WAY];
    m->rc = local_comms_join(m->world, m->rank, &comms, &m->err);
    if (!m->rc)
        m->rc = overlap_create(kernels_cpu_fp64(), NULL, UNDER_WAY, &o, &m->err);
    for (int i = 0; i < CALLS + UNDER_WAY && !m->rc; i++) {
        int at = i % UNDER_WAY;
        if (i >= UNDER_WAY) {
            m->rc = overlap_wait(o, numbers[at], &m->err);
            double per_rank = 3 * (i - UNDER_WAY);
            for (int k = 0; k < 3 && !m->rc; k++)
                if (!scatters(i - UNDER_WAY) || k == m->rank)
                    m->wrong = m->wrong || values[at][k] != RANKS * (per_rank + k) + RANKS * (RANKS - 1) / 2.0;
        }
        if (i >= CALLS || m->rc)
            continue;
        for (int k = 0; k < 3; k++)
            values[at][k] = 3 * i + k + m->rank;
        struct overlap_call call = {
            .kind = scatters(i) ? COMM_REDUCE_SCATTER : COMM_ALL_REDUCE,
            .comm = &comms.tp,
            .what = "test",
            .segments = {{values[at], 2, DTYPE_F64}, {&values[at][2], 1, DTYPE_F64}},
            .n = 2,
            .data = values[at],
            .out = &values[at][m->rank],
            .chunk = 1,
            .dtype = DTYPE_F64,
        };
        if (m->aborts && i == 20)
            local_world_abort(m->world, m->rank);
        if (i == 0 && m->rank)
            sem_wait(&first_began);
        /* A call counts under the pass in which it was begun. */
        comms_set_pass(&comms, i % 2 ? PASS_STEP : PASS_BACKWARD);
        numbers[at] = overlap_begin(o, &call);
        comms_set_pass(&comms, PASS_EVAL);
        for (int k = 1; k < RANKS && i == 0 && m->rank == 0; k++)
            sem_post(&first_began);
    }
    overlap_destroy(o); /* also with calls under way that fail */
    for (int k = 0; k < COMM_KIND_COUNT; k++)
        for (int p = PASS_BACKWARD; p <= PASS_STEP; p++)
            m->counted[k] += comms.counters.by[GROUP_TP][k][p].calls;
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
        assert_int_equal(m[i].counted[COMM_REDUCE_SCATTER], CALLS / 3);
        assert_int_equal(m[i].counted[COMM_ALL_REDUCE], CALLS - CALLS / 3);
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

/* Gradients of slices of whole sequences and of tokens, whatever is kept of the forward, are those of one rank without
 * slices. */
static void slices_have_the_gradients_of_all_rows(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        for (int micro = 1; micro <= 4 && tiny_ways[i].overlap; micro++) {
            struct tiny c = tiny_of(i);
            struct grads whole, cut;
            c.micro = c.global = micro;
            c.way.overlap = false;
            gradients_of(&c, &whole);
            c.way.overlap = true;
            for (c.recompute = 0; c.recompute <= LAYER; c.recompute++) {
                c.tp = micro % 2 ? 2 : 4;
                gradients_of(&c, &cut);
                for (int64_t k = 0; k < whole.count; k++)
                    if (grads_distance(&cut, &whole, k) > 1e-11)
                        fail_msg("%s, %d sequences, recompute %d: %s differs by %.2g", c.way.name, micro, c.recompute,
                                 whole.tensors[k].name, grads_distance(&cut, &whole, k));
                grads_free(&cut);
            }
            grads_free(&whole);
        }
    }
}

/* ---- the order ---- */

/* What a rank enqueues in the middle one of three blocks, on streams beside each other: S begins a sum and W waits for
 * one, P is a product, G one that makes a weight's gradient, both small where they leave processors for a sum, A
 * attention, N a norm, M the gated product; each with its slice or, of all rows, a star. */
enum { SEQUENCE = 5 };
static struct order {
    char text[1024];
    bool open;
    int64_t rows; /* of the micro-batch */
    char last;    /* slice of the latest product */
    bool room;    /* for a sum beside it */
    char marked[KSTREAM_MARKS];
} order;
static char beside;

static char slice_of(int64_t rows)
{
    return rows == order.rows ? '*' : rows > order.rows / 2 ? '0' : '1';
}

static void note(char what, char slice)
{
    size_t used = strlen(order.text);
    if (order.open && used + 4 < sizeof order.text)
        snprintf(order.text + used, sizeof order.text - used, "%s%c%c", used ? " " : "", what, slice);
}

static int order_beside(struct kstream *ks, struct kstream **out, struct error *err)
{
    (void)ks, (void)err;
    *out = (struct kstream *)&beside;
    return ERR_OK;
}
static void order_mark(struct kstream *ks, int slot)
{
    if (ks == (struct kstream *)&beside)
        order.marked[slot] = order.last;
}
static void order_await(struct kstream *ks, struct kstream *of, int slot)
{
    (void)ks;
    if (of == (struct kstream *)&beside)
        note('W', order.marked[slot]);
}
static int order_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                            enum comm_op op, struct error *err)
{
    (void)c, (void)segments, (void)n, (void)op, (void)err;
    if (ks == (struct kstream *)&beside)
        note('S', order.last);
    return ERR_OK;
}
static void order_range(const char *name)
{
    order.open = strstr(name, "block 1") != NULL;
}
static void order_range_end(void)
{
    order.open = false;
}
static void order_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c)
{
    (void)ks, (void)a, (void)b, (void)c;
    order.last = slice_of(g->c_grad ? g->k : g->m);
    char what = g->c_grad ? 'G' : 'P';
    note(order.room ? (char)(what - 'A' + 'a') : what, order.last);
}
static void order_set_spare(struct kstream *ks, int processors)
{
    (void)ks;
    order.room = processors > 0;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
static void order_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                                    const void *v, void *o, void *lse, void *workspace)
{
    note('A', slice_of(a->b * a->s));
}
static void order_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                                     const void *v, const void *o, const void *lse, const void *d_o, void *dq, void *dk,
                                     void *dv, void *workspace)
{
    note('A', slice_of(a->b * a->s));
}
static void order_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y,
                                const void *gain, void *x_out, void *n, void *S)
{
    note('N', slice_of(T));
}
static void order_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain,
                                const void *R, const void *k, const void *dn, bool accumulate, void *dx, void *dgain)
{
    note('N', slice_of(T));
}
static void order_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                              const void *up, void *out)
{
    note('M', slice_of(rows));
}
static void order_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                               const void *up, const void *dout, void *dgate, void *dup, void *out)
{
    note('M', slice_of(rows));
}
#pragma GCC diagnostic pop

/* Forward and backward of block 1. */
static void take_order(const struct tiny *c)
{
    static const struct comm_backend backend = {.name = "noted",
                                                .all_reduce = order_all_reduce,
                                                .reduce_scatter = dry_reduce_scatter,
                                                .all_gather = dry_all_gather,
                                                .exchange = dry_exchange};
    struct kernels k = *dry_kernels();
    struct plan p;
    struct comms comms;
    struct engine *e;
    struct error err = {0};
    double loss;
    int32_t tokens[64] = {0};
    struct micro_batch micro = {tokens, tokens};
    k.stream_beside = order_beside, k.mark = order_mark, k.await = order_await, k.set_spare = order_set_spare;
    k.range_begin = order_range, k.range_end = order_range_end;
    k.gemm = order_gemm, k.residual_gain = order_residual_gain, k.gain_backward = order_gain_backward;
    k.attention_forward = order_attention_forward, k.attention_backward = order_attention_backward;
    k.glu_forward = order_glu_forward, k.glu_backward = order_glu_backward;
    tiny_plan(c, &p);
    dry_comms(&p, 0, &comms);
    comms.tp.backend = &backend;
    order = (struct order){.rows = p.T};
    assert_int_equal(engine_create(&p, &k, &comms, 0, 1, &e, &err), 0);
    int rc = engine_gradients(e, &micro, &loss, &err);
    engine_destroy(e);
    if (rc)
        fail_msg("%s", err.message);
}

/* Every sum of a slice has all that the other does between two of its own to run under, and so from block to block. */
static void a_slice_is_summed_while_the_other_works(void **state)
{
    (void)state;
    static const char together[] = "W0 p0 A0 P0 S0 W1 p1 A1 P1 S1 "
                                   "W0 p0 N0 P0 S0 W1 p1 N1 P1 S1 "
                                   "W0 p0 M0 P0 S0 W1 p1 M1 P1 S1 "
                                   "W0 p0 N0 P0 S0 W1 p1 N1 P1 S1 "
                                   "W0 p0 M0 g0 P0 S0 g0 W1 p1 M1 g1 P1 S1 g1 "
                                   "W0 g0 p0 N0 P0 S0 g0 W1 g1 p1 N1 P1 S1 g1 "
                                   "W0 g0 p0 A0 P0 S0 g0 W1 g1 p1 A1 P1 S1 g1 "
                                   "W0 g0 p0 N0 P0 S0 g0 W1 g1 p1 N1 P1 S1 g1";
    /* The attention of a sequence that is cut wants both slices. */
    static const char alone[] = "W0 p0 W1 P1 A* P0 S0 p1 S1 "
                                "W0 p0 N0 P0 S0 W1 p1 N1 P1 S1 "
                                "W0 p0 M0 P0 S0 W1 p1 M1 P1 S1 "
                                "W0 p0 N0 P0 S0 W1 p1 N1 P1 S1 "
                                "W0 p0 M0 g0 P0 S0 g0 W1 p1 M1 g1 P1 S1 g1 "
                                "W0 g0 p0 N0 P0 S0 g0 W1 g1 p1 N1 P1 S1 g1 "
                                "W0 g0 p0 W1 G1 P1 A* P0 S0 g0 p1 S1 g1 "
                                "W0 g0 p0 N0 P0 S0 g0 W1 g1 p1 N1 P1 S1 g1";
    struct tiny c = tiny_default;
    c.fp64 = false, c.L = 3, c.s = SEQUENCE, c.h = c.hk = 8, c.d = 16, c.tp = 2;
    c.way.overlap = true;
    c.micro = c.global = 3;
    take_order(&c);
    assert_string_equal(order.text, together);
    c.micro = c.global = 1;
    take_order(&c);
    assert_string_equal(order.text, alone);
    c.way.overlap = false;
    take_order(&c);
    assert_null(strpbrk(order.text, "SW01pg"));
}

/* ---- gradients of replicas ---- */

/* An engine that computes nothing, as the first of two replicas. The first sum of gradients does not return before
 * the embedding's backward has run, which is the last operation of the backward: a rank that waited for the sum before
 * it went on would wait for ever (here: until the limit, which is an error). */
static struct replica {
    sem_t embedding_done;
    int begun, done; /* sums of gradients; of the queue's thread */
    int at_agreement;
} replica;

static void end_of_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                            const int32_t *tokens, const void *dout, void *dtable)
{
    dry_embed_backward(ks, T, first, rows, width, parts, tokens, dout, dtable);
    sem_post(&replica.embedding_done);
}

static int wait_for_the_end(struct error *err)
{
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 20;
    if (replica.begun++ == 0 && sem_timedwait(&replica.embedding_done, &limit))
        return error_set(err, ERR_TIMEOUT, "the backward did not go on under the sum of gradients");
    replica.done++;
    return ERR_OK;
}

static int sum_gradients(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                         enum comm_op op, struct error *err)
{
    (void)ks, (void)segments, (void)n, (void)op;
    if (c->group == GROUP_DP)
        return wait_for_the_end(err);
    replica.at_agreement = replica.done;
    return ERR_OK;
}

static int scatter_gradients(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                             struct error *err)
{
    (void)c, (void)ks, (void)data, (void)out, (void)chunk, (void)dtype;
    return wait_for_the_end(err);
}

static void gradients_are_summed_under_the_backward(void **state)
{
    (void)state;
    static const struct comm_backend backend = {.name = "held",
                                                .all_reduce = sum_gradients,
                                                .reduce_scatter = scatter_gradients,
                                                .all_gather = dry_all_gather,
                                                .exchange = dry_exchange};
    struct kernels k = *dry_kernels();
    k.embed_backward = end_of_backward;
    for (int zero = 0; zero <= 1; zero++) {
        struct tiny c = tiny_default;
        struct plan p;
        struct comms comms;
        struct engine *e;
        struct error err = {0};
        int32_t tokens[64] = {0}; /* T is 12 */
        struct micro_batch micro = {tokens, tokens};
        struct step_request request = {.lr = 1e-3};
        struct step_result result;
        c.fp64 = false;
        c.dp = 2;
        c.global = 2 * c.micro;
        c.zero = zero;
        c.bucket_bytes = 1; /* each layer by itself */
        tiny_plan(&c, &p);
        dry_comms(&p, 0, &comms);
        for (int g = 0; g < GROUP_COUNT; g++)
            comms_group(&comms, (enum comm_group)g)->backend = &backend;
        replica = (struct replica){.begun = 0};
        sem_init(&replica.embedding_done, 0, 0);
        assert_int_equal(engine_create(&p, &k, &comms, 0, 1, &e, &err), 0);
        if (engine_step(e, &micro, &request, &result, NULL, NULL, &err))
            fail_msg("%s", err.message);
        engine_destroy(e);
        struct plan_stage stage;
        plan_stage_at(&p, 0, &stage);
        int64_t buckets = plan_buckets(&p, &stage, sizeof(float), NULL);
        assert_true(buckets > c.L);
        assert_int_equal(replica.at_agreement, buckets);
        assert_int_equal(comms.counters.by[GROUP_DP][zero ? COMM_REDUCE_SCATTER : COMM_ALL_REDUCE][PASS_STEP].calls,
                         buckets);
        sem_destroy(&replica.embedding_done);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_done_in_order),
        cmocka_unit_test(a_lost_peer_ends_the_wait),
        cmocka_unit_test(slices_change_sums_over_rows_only),
        cmocka_unit_test(slices_are_whole_sequences),
        cmocka_unit_test(slices_have_the_gradients_of_all_rows),
        cmocka_unit_test(a_slice_is_summed_while_the_other_works),
        cmocka_unit_test(gradients_are_summed_under_the_backward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
