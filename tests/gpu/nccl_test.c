/* NCCL between real processes that share one GPU, which NCCL does over sockets: every kind, type and shape against sums
 * that are exact, captured calls, and memory that the ranks share. */
#include "tests/gpu/nccl_ranks.h"

/* ---- exact sums ------------------------------------------------------------------------ */

static int check_all_reduce(struct comms *comms, struct comm *c, int first)
{
    static const int64_t counts[] = {1, 7, 1000, 300001};
    struct error err;
    for (int t = 0; t < DTYPE_COUNT; t++)
        for (int op = COMM_SUM; op <= COMM_MAX; op++)
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                struct comm_segment s = {numbers((enum dtype)t, counts[i], comms->world.rank), counts[i],
                                         (enum dtype)t};
                CHECK(s.data);
                CHECK(!comm_all_reduce(c, ks, &s, 1, (enum comm_op)op, "test", &err));
                CHECK(holds((enum dtype)t, s.data, counts[i], (enum comm_op)op, c->size, first, 0, 1));
                k->release(s.data);
            }
    return 0;
}

static int all_reduces(struct comms *comms, int to_test)
{
    (void)to_test;
    int tp = comms->tp.size;
    return check_all_reduce(comms, &comms->world, 0) ||
           (tp > 1 && check_all_reduce(comms, &comms->tp, comms->world.rank / tp * tp));
}

static void sums_and_maxima_are_exact_for_every_type(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, all_reduces);
    all_end_well(&w);
    begin(&w, 2, 2, 1, all_reduces);
    all_end_well(&w);
}

static int groups_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    struct comm_layout layout = {
        .tp = comms->tp.size, .dp = comms->dp.size, .pp = comms->pp.size, .ends = comms->pp.size > 1};
    for (int g = 0; g < GROUP_COUNT; g++) {
        struct comm_place place = comm_place_of(&layout, comms->world.rank, (enum comm_group)g);
        double x = comms->world.rank, want = 0;
        for (int i = 0; i < place.size; i++)
            want += place.first + i * place.step;
        struct comm_segment s = {k->alloc(sizeof x, &err), 1, DTYPE_F64};
        CHECK(s.data);
        k->upload(ks, s.data, &x, sizeof x);
        CHECK(!comm_all_reduce(comms_group(comms, (enum comm_group)g), ks, &s, 1, COMM_SUM, "test", &err));
        k->download(ks, &x, s.data, sizeof x);
        CHECK(!k->stream_sync(ks, &err));
        CHECK(x == want);
        k->release(s.data);
    }
    return 0;
}

static void every_layout_has_its_groups(void **state)
{
    (void)state;
    need_gpu();
    static const int layouts[][3] = {{2, 2, 1}, {2, 1, 2}, {1, 2, 2}, {1, 1, 3}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct world w;
        begin(&w, layouts[i][0], layouts[i][1], layouts[i][2], groups_body);
        all_end_well(&w);
    }
}

/* A latent in bf16 with its statistic in fp32, as the online norm sends them. */
static int segments_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    struct comm *c = &comms->tp;
    struct comm_segment s[] = {{numbers(DTYPE_BF16, 70000, c->rank), 70000, DTYPE_BF16},
                               {numbers(DTYPE_F32, 513, c->rank), 513, DTYPE_F32},
                               {numbers(DTYPE_F64, 3, c->rank), 3, DTYPE_F64}};
    c->pass = PASS_BACKWARD;
    CHECK(s[0].data && s[1].data && s[2].data);
    CHECK(!comm_all_reduce(c, ks, s, 3, COMM_SUM, "test", &err));
    for (int i = 0; i < 3; i++)
        CHECK(holds(s[i].dtype, s[i].data, s[i].count, COMM_SUM, c->size, 0, 0, 1));
    const struct comm_count *count = &comms->counters.by[GROUP_TP][COMM_ALL_REDUCE][PASS_BACKWARD];
    CHECK(count->calls == 1 && count->elements == 70516 && count->bytes == 70000 * 2 + 513 * 4 + 3 * 8);
    return 0;
}

static void segments_are_one_call(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, segments_body);
    all_end_well(&w);
}

/* Apart and in place, as the engine does both. */
static int scatter_and_gather(struct comms *comms, int to_test)
{
    (void)to_test;
    static const int64_t chunks[] = {1, 5, 100003};
    struct error err;
    struct comm *c = &comms->world;
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
        for (int t = 0; t < DTYPE_COUNT; t++)
            for (int in_place = 0; in_place < 2; in_place++) {
                enum dtype dtype = (enum dtype)t;
                int64_t chunk = chunks[i], all = chunk * c->size, mine = chunk * c->rank;
                char *data = numbers(dtype, all, c->rank), *apart = numbers(dtype, chunk, c->rank);
                CHECK(data && apart);
                char *part = in_place ? data + (size_t)mine * dtype_size(dtype) : apart;
                CHECK(!comm_reduce_scatter(c, ks, data, part, chunk, dtype, "test", &err));
                CHECK(holds(dtype, part, chunk, COMM_SUM, c->size, 0, mine, 1));
                CHECK(!comm_all_gather(c, ks, part, data, chunk, dtype, "test", &err));
                CHECK(holds(dtype, data, all, COMM_SUM, c->size, 0, 0, 1));
                k->release(data);
                k->release(apart);
            }
    const struct comm_count *count = &comms->counters.by[GROUP_WORLD][COMM_ALL_GATHER][PASS_FORWARD];
    CHECK(count->calls == 24 && count->elements == 8 * c->size * (1 + 5 + 100003));
    return 0;
}

static void reduce_scatter_and_all_gather_agree(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, scatter_and_gather);
    all_end_well(&w);
    begin(&w, 4, 1, 1, scatter_and_gather);
    all_end_well(&w);
}

/* Both directions of a border at once, several segments each way, between neighbours of a chain. */
static int exchange_body(struct comms *comms, int to_test)
{
    (void)to_test;
    enum { UP = 400, MORE = 600, DOWN = 70000 };
    struct error err;
    struct comm *c = &comms->pp;
    int rank = c->rank, last = c->size - 1;
    struct comm_segment up[] = {{numbers(DTYPE_BF16, UP, rank), UP, DTYPE_BF16},
                                {numbers(DTYPE_F32, MORE, rank), MORE, DTYPE_F32}},
                        down = {numbers(DTYPE_BF16, DOWN, rank), DOWN, DTYPE_BF16},
                        of_left[] = {{numbers(DTYPE_BF16, UP, 9), UP, DTYPE_BF16},
                                     {numbers(DTYPE_F32, MORE, 9), MORE, DTYPE_F32}},
                        of_right = {numbers(DTYPE_BF16, DOWN, 9), DOWN, DTYPE_BF16};
    for (int turn = 0; turn < 5; turn++) {
        struct comm_message to_right = {rank + 1, up, 2, PASS_FORWARD}, to_left = {rank - 1, &down, 1, PASS_BACKWARD};
        struct comm_message from_left = {rank - 1, of_left, 2, PASS_FORWARD},
                            from_right = {rank + 1, &of_right, 1, PASS_BACKWARD};
        CHECK(!comm_exchange(c, ks, rank < last ? &to_right : NULL, rank > 0 ? &from_left : NULL, "up", &err));
        CHECK(!comm_exchange(c, ks, rank > 0 ? &to_left : NULL, rank < last ? &from_right : NULL, "down", &err));
        if (rank < 2) { /* between two ranks in one call */
            struct comm_message give = {1 - rank, rank ? &down : up, rank ? 1 : 2, PASS_STEP};
            struct comm_message take = {1 - rank, rank ? of_left : &of_right, rank ? 2 : 1, PASS_STEP};
            CHECK(!comm_exchange(c, ks, &give, &take, "both", &err));
        }
        if (rank > 0)
            CHECK(holds(DTYPE_BF16, of_left[0].data, UP, COMM_SUM, 1, rank - 1, 0, 1) &&
                  holds(DTYPE_F32, of_left[1].data, MORE, COMM_SUM, 1, rank - 1, 0, 1));
        if (rank < last)
            CHECK(holds(DTYPE_BF16, of_right.data, DOWN, COMM_SUM, 1, rank + 1, 0, 1));
    }
    const struct comm_count *sent = &comms->counters.by[GROUP_PP][COMM_SEND][PASS_BACKWARD];
    CHECK(sent->calls == (rank > 0 ? 5 : 0) && sent->elements == sent->calls * DOWN);
    return 0;
}

static void neighbours_exchange(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 1, 1, 3, exchange_body);
    all_end_well(&w);
}

/* ---- captured calls -------------------------------------------------------------------- */

/* Each replay sums what the one before left: S, then S size, then S size^2. */
static int replay(struct comms *comms, bool after_a_plain_call)
{
    enum { N = 5000, CHUNK = 1000 };
    struct error err;
    struct comm *c = &comms->tp;
    struct comm_segment s[] = {{numbers(DTYPE_BF16, N, c->rank), N, DTYPE_BF16},
                               {numbers(DTYPE_F32, 77, c->rank), 77, DTYPE_F32}};
    char *parts = numbers(DTYPE_F32, CHUNK * c->size, c->rank), *part = numbers(DTYPE_F32, CHUNK, c->rank);
    void *plain = numbers(DTYPE_F32, N, c->rank);
    struct kgraph *graph;
    CHECK(s[0].data && s[1].data && parts && part && plain);
    if (after_a_plain_call) {
        struct comm_segment one = {plain, N, DTYPE_F32};
        CHECK(!comm_all_reduce(c, ks, &one, 1, COMM_SUM, "test", &err));
        CHECK(holds(DTYPE_F32, plain, N, COMM_SUM, c->size, 0, 0, 1));
    }
    CHECK(!k->capture_begin(ks, &err));
    CHECK(!comm_all_reduce(c, ks, s, 2, COMM_SUM, "test", &err));
    CHECK(!comm_reduce_scatter(&comms->world, ks, parts, part, CHUNK, DTYPE_F32, "test", &err));
    CHECK(!comm_all_gather(&comms->world, ks, part, parts, CHUNK, DTYPE_F32, "test", &err));
    CHECK(!k->capture_end(ks, &graph, &err));
    double times = 1;
    for (int turn = 0; turn < 3; turn++, times *= c->size) {
        k->graph_launch(ks, graph);
        CHECK(holds(DTYPE_BF16, s[0].data, N, COMM_SUM, c->size, 0, 0, times));
        CHECK(holds(DTYPE_F32, s[1].data, 77, COMM_SUM, c->size, 0, 0, times));
        CHECK(holds(DTYPE_F32, parts, CHUNK * c->size, COMM_SUM, c->size, 0, 0, times));
    }
    k->graph_destroy(graph);
    return 0;
}

static int captured(struct comms *comms, int to_test)
{
    (void)to_test;
    return replay(comms, true);
}

static int captured_first(struct comms *comms, int to_test)
{
    (void)to_test;
    return replay(comms, false);
}

static void captured_calls_replay(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, captured);
    all_end_well(&w);
    begin(&w, 4, 1, 1, captured);
    all_end_well(&w);
}

static void the_first_call_may_be_captured(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, captured_first);
    all_end_well(&w);
}

/* ---- what a rank waits for ------------------------------------------------------------ */

/* A launch makes both calls; the watcher tells the one that the device came to, which is not what the host did last. */
static int tells(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    struct comm_segment s = {numbers(DTYPE_F32, 100, comms->world.rank), 100, DTYPE_F32};
    struct kgraph *graph;
    CHECK(s.data);
    CHECK(!comm_all_reduce(&comms->world, ks, &s, 1, COMM_SUM, "plain", &err));
    CHECK(comes_to("plain"));
    CHECK(!k->capture_begin(ks, &err));
    CHECK(!comm_all_reduce(&comms->world, ks, &s, 1, COMM_SUM, "first", &err));
    CHECK(!comm_all_reduce(&comms->world, ks, &s, 1, COMM_SUM, "second", &err));
    CHECK(!k->capture_end(ks, &graph, &err));
    CHECK(!comm_all_reduce(&comms->world, ks, &s, 1, COMM_SUM, "plain again", &err));
    CHECK(comes_to("plain again"));
    k->graph_launch(ks, graph);
    CHECK(comes_to("second"));
    CHECK(told.seq == 4); /* of the world: plain, plain again, and both of the launch */
    CHECK(!k->stream_sync(ks, &err));
    k->graph_destroy(graph);
    return 0;
}

static void the_device_tells_how_far_it_is(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 2, 1, 1, tells);
    all_end_well(&w);
}

/* ---- shared memory -------------------------------------------------------------------- */

/* Of small and large calls, which NCCL makes in different ways, two types in one, some elements off the 16 bytes. */
static int shared(struct comms *comms, int to_test)
{
    (void)to_test;
    enum { ROOM = 4 << 20 };
    static const int64_t counts[] = {1, 513, 300001, 2 << 20};
    struct error err;
    struct comm *c = &comms->tp;
    char *memory = k->alloc(2 * ROOM, &err);
    struct kgraph *graph = NULL;
    CHECK(memory);
    CHECK(!comms_share(comms, memory, 2 * ROOM, &err));
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int odd = 0; odd < 2; odd++) {
            int64_t n = counts[i] - (odd && i == 3);
            struct comm_segment s[] = {{memory + 2 * odd, n, DTYPE_BF16}, {memory + ROOM + 4 * odd, 4096, DTYPE_F32}};
            for (int turn = 0; turn < 4; turn++) { /* plain; captured; and launched again */
                CHECK(lay(DTYPE_BF16, s[0].data, n, c->rank) && lay(DTYPE_F32, s[1].data, 4096, c->rank));
                CHECK(turn != 1 || !k->capture_begin(ks, &err));
                CHECK(turn > 1 || !comm_all_reduce(c, ks, s, 2, COMM_SUM, "test", &err));
                CHECK(turn != 1 || !k->capture_end(ks, &graph, &err));
                if (turn)
                    k->graph_launch(ks, graph);
                CHECK(holds(DTYPE_BF16, s[0].data, n, COMM_SUM, c->size, 0, 0, 1));
                CHECK(holds(DTYPE_F32, s[1].data, 4096, COMM_SUM, c->size, 0, 0, 1));
            }
            k->graph_destroy(graph);
        }
    for (int64_t chunk = 512; chunk <= 513; chunk++) { /* of an odd one the second rank's part begins off a word */
        char *out = memory + ROOM;
        CHECK(lay(DTYPE_BF16, memory, chunk * c->size, c->rank));
        CHECK(!comm_reduce_scatter(c, ks, memory, out, chunk, DTYPE_BF16, "test", &err));
        CHECK(holds(DTYPE_BF16, out, chunk, COMM_SUM, c->size, 0, chunk * c->rank, 1));
        CHECK(!comm_all_gather(c, ks, out, memory, chunk, DTYPE_BF16, "test", &err));
        CHECK(holds(DTYPE_BF16, memory, chunk * c->size, COMM_SUM, c->size, 0, 0, 1));
    }
    struct comm_segment most = {memory, 1000, DTYPE_F32};
    CHECK(lay(DTYPE_F32, memory, 1000, c->rank));
    CHECK(!comm_all_reduce(c, ks, &most, 1, COMM_MAX, "test", &err));
    CHECK(holds(DTYPE_F32, memory, 1000, COMM_MAX, c->size, 0, 0, 1));
    CHECK(!k->stream_sync(ks, &err));
    k->release(memory);
    return 0;
}

/* The ranks each on a GPU where there are two; on one GPU nothing is shared, and the sums are the same. */
static void shared_memory_gives_the_same_sums(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    spread = true;
    begin(&w, 2, 1, 1, shared);
    all_end_well(&w);
    spread = false;
}

/* ---- sums in the kernels that use them -------------------------------------------------- */

enum { PLACE = 1 << 20, PLACES = 12 };

static bool same_bytes(const void *a, const void *b, size_t bytes)
{
    struct error err;
    char *x = malloc(bytes), *y = malloc(bytes);
    k->download(ks, x, a, bytes);
    k->download(ks, y, b, bytes);
    bool same = !k->stream_sync(ks, &err) && !memcmp(x, y, bytes);
    free(x);
    free(y);
    return same;
}

/* Numbers of a rank with more bits than a sum in bf16 keeps. */
static bool lay_uneven(enum dtype t, void *to, int64_t n, int rank, int seed)
{
    struct error err;
    unsigned x = (unsigned)(seed * 7919 + rank * 104729 + 1);
    void *host = malloc((size_t)n * dtype_size(t));
    for (int64_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        put(t, host, i, ((double)(x >> 8) / (1 << 24) - (t == DTYPE_F32 ? 0 : 0.5)) * 3);
    }
    k->upload(ks, to, host, (size_t)n * dtype_size(t));
    bool there = !k->stream_sync(ks, &err);
    free(host);
    return there;
}

/* Both operations at one shape, against the sum and the operation by themselves, to the bit; in turn at two places. */
static int sums_at(struct comms *comms, char *memory, int64_t T, int64_t n, bool silu, bool normed, int turn)
{
    enum { D = 96 };
    struct error err;
    struct comm *c = &comms->tp;
    enum latent_act act = silu ? LATENT_SILU : LATENT_IDENTITY;
    char *at[PLACES];
    for (int i = 0; i < PLACES; i++)
        at[i] = memory + (size_t)i * PLACE;
    char *part = at[0], *S = part + PLACE / 2;
    char *H = at[2], *R = at[3], *z = silu ? at[4] : at[2], *apart = at[5], *want_z = silu ? at[6] : at[5],
         *want_R = at[7];
    CHECK(lay_uneven(DTYPE_BF16, part, T * n, c->rank, turn) && lay_uneven(DTYPE_BF16, apart, T * n, c->rank, turn));
    CHECK(lay_uneven(DTYPE_F32, S, T, c->rank, turn) && lay_uneven(DTYPE_F32, want_R, T, c->rank, turn));
    struct comm_segment s[] = {{apart, T * n, DTYPE_BF16}, {want_R, T, DTYPE_F32}};
    CHECK(!comm_all_reduce(c, ks, s, 2, COMM_SUM, "test", &err));
    k->latent_forward(ks, T, n, D, 1e-5, act, apart, normed ? want_R : NULL, normed ? want_R : NULL, want_z);
    k->latent_sum_forward(ks, c->reach, T, n, D, 1e-5, act, part, normed ? S : NULL, H, normed ? R : NULL, z);
    CHECK(same_bytes(z, want_z, (size_t)(T * n) * 2));
    CHECK(!silu || same_bytes(H, apart, (size_t)(T * n) * 2));
    CHECK(!normed || same_bytes(R, want_R, (size_t)T * 4));
    char *dz = at[8], *K = at[9], *want_dz = at[10], *want_K = at[11];
    part = at[1];
    CHECK(lay_uneven(DTYPE_BF16, part, T * n, c->rank, ~turn) &&
          lay_uneven(DTYPE_BF16, want_dz, T * n, c->rank, ~turn));
    struct comm_segment gradient = {want_dz, T * n, DTYPE_BF16};
    CHECK(!comm_all_reduce(c, ks, &gradient, 1, COMM_SUM, "test", &err));
    const void *latent = silu ? H : z, *factor = normed ? R : NULL;
    k->latent_backward(ks, T, n, D, act, latent, factor, want_dz, normed ? want_K : NULL);
    k->latent_sum_backward(ks, c->reach, T, n, D, act, latent, factor, part, dz, normed ? K : NULL);
    CHECK(same_bytes(dz, want_dz, (size_t)(T * n) * 2));
    CHECK(!normed || same_bytes(K, want_K, (size_t)T * 4));
    return 0;
}

static int own_sums(struct comms *comms, int to_test)
{
    (void)to_test;
    static const int64_t shapes[][2] = {{1, 8}, {3, 5}, {40, 96}, {2300, 96}, {77, 2304}, {64, 1000}};
    struct error err;
    char *memory = k->alloc((size_t)PLACES * PLACE, &err);
    int turn = 0;
    CHECK(memory);
    CHECK(!comms_share(comms, memory, (size_t)PLACES * PLACE, &err));
    CHECK(comms->tp.reach);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int way = 0; way < 4; way++)
            if (sums_at(comms, memory, shapes[i][0], shapes[i][1], way & 1, way & 2, turn++))
                return 1;
    k->release(memory);
    return 0;
}

static void latents_are_summed_where_they_are_used(void **state)
{
    (void)state;
    char list[256];
    need_gpu();
    if (devices(list) < 2)
        skip(); /* ranks that share a GPU do not reach each other's memory */
    struct world w;
    spread = true;
    begin(&w, 2, 1, 1, own_sums);
    all_end_well(&w);
    spread = false;
}

/* ---- one rank ------------------------------------------------------------------------- */

static int alone(struct comms *comms, int to_test)
{
    (void)to_test;
    struct error err;
    void *a = numbers(DTYPE_F32, 100, 2), *b = numbers(DTYPE_F32, 100, 5);
    CHECK(a && b && comms->world.size == 1);
    CHECK(!comm_all_gather(&comms->tp, ks, a, b, 100, DTYPE_F32, "test", &err));
    CHECK(holds(DTYPE_F32, b, 100, COMM_SUM, 1, 2, 0, 1));
    return 0;
}

static void a_rank_alone_needs_nobody(void **state)
{
    (void)state;
    need_gpu();
    struct world w;
    begin(&w, 1, 1, 1, alone);
    all_end_well(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_alone_needs_nobody),
        cmocka_unit_test(sums_and_maxima_are_exact_for_every_type),
        cmocka_unit_test(every_layout_has_its_groups),
        cmocka_unit_test(segments_are_one_call),
        cmocka_unit_test(reduce_scatter_and_all_gather_agree),
        cmocka_unit_test(neighbours_exchange),
        cmocka_unit_test(captured_calls_replay),
        cmocka_unit_test(the_device_tells_how_far_it_is),
        cmocka_unit_test(the_first_call_may_be_captured),
        cmocka_unit_test(shared_memory_gives_the_same_sums),
        cmocka_unit_test(latents_are_summed_where_they_are_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
