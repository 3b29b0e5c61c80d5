/* Stages, buckets and owners: everything is somewhere exactly once, and where the engine looks for it. */
#include "tests/unit/plan/spec.h"

#include <stdlib.h>

static void plan_for(struct plan *p, int layers, int tp, int dp, int pp, bool tied, int zero)
{
    struct job j;
    job_open(&j);
    j.spec->model->layers = layers;
    j.spec->model->has_tie_embeddings = 1;
    j.spec->model->tie_embeddings = tied;
    Boost__Parallel *par = j.spec->parallel;
    par->tp = tp;
    par->has_dp = par->has_pp = par->has_zero = par->has_micro_batch = 1;
    par->dp = dp;
    par->pp = pp;
    par->zero = zero;
    par->micro_batch = 1;
    par->global_batch = 12 * dp;
    job_plan(&j, p);
    job_close(&j);
}

static void ranks_count_in_one_way(void **state)
{
    (void)state;
    struct plan p;
    plan_for(&p, 4, 2, 3, 4, false, 0);
    for (int rank = 0; rank < p.world; rank++)
        assert_int_equal(plan_rank(&p, plan_pp_rank(&p, rank), plan_dp_rank(&p, rank), plan_tp_rank(&p, rank)), rank);
    assert_int_equal(plan_rank(&p, 3, 2, 1), 23);
    assert_int_equal(plan_pp_rank(&p, 23), 3);
    assert_int_equal(plan_dp_rank(&p, 9), 1);
}

/* Five layers on three stages are 2, 2, 1; each tensor is on one stage, a tied table on both ends. */
static void stages_share_the_model_out(void **state)
{
    (void)state;
    static const int uneven[] = {2, 2, 1};
    for (int i = 0; i < 24; i++) {
        bool tied = i & 1;
        int zero = i >> 1 & 1, pp = 1 + i / 4 % 3, layers = i < 12 ? 5 : 3, dp = zero ? 3 : 1;
        struct plan p;
        plan_for(&p, layers, 1 + i % 2, dp, pp, tied, zero);
        int64_t seen = 0, layer = 0, parameters = 0;
        for (int s = 0; s < pp; s++) {
            struct plan_stage stage;
            plan_stage_at(&p, s, &stage);
            assert_true(stage.layer0 == layer && stage.layers >= 1);
            if (layers == 5 && pp == 3)
                assert_int_equal(stage.layers, uneven[s]);
            assert_true(stage.slots == (pp - s < p.accumulation ? pp - s : p.accumulation));
            layer += stage.layers;
            int64_t end = 0;
            for (int64_t k = 0; k < stage.tensors; k++) {
                struct plan_tensor t;
                plan_stage_tensor_at(&p, &stage, plan_rank(&p, s, 0, 0), k, &t);
                assert_true(t.offset >= end);
                end = t.offset + t.nrows * t.ncols;
                if (t.layer >= 0)
                    assert_true(t.layer >= stage.layer0 && t.layer < stage.layer0 + stage.layers);
                if (!t.counted) {
                    assert_true(tied && s == pp - 1 && pp > 1 && k == 0);
                    continue;
                }
                seen++;
                parameters += t.rows * t.cols;
            }
            assert_true(end <= stage.elements);
            assert_true(!zero || stage.elements % dp == 0);
        }
        assert_true(layer == p.L && seen == plan_tensor_count(&p) && parameters == plan_parameters(&p));
    }
}

/* Buckets follow one another backwards without a gap; every element of every tensor has one owner. */
static void buckets_and_owners(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 10000, 1 << 20};
    for (int i = 0; i < 36; i++) {
        int zero = i & 1, pp = 1 + (i >> 1 & 1), dp = 2 + i / 4 % 3;
        struct plan p;
        plan_for(&p, 3, 2, dp, pp, i % 5 == 0, zero);
        p.bucket_bytes = sizes[i / 12];
        for (int s = 0; s < pp; s++) {
            struct plan_stage stage;
            struct plan_bucket buckets[8];
            plan_stage_at(&p, s, &stage);
            int64_t n = plan_buckets(&p, &stage, 4, buckets), end = stage.elements, after = p.L + 1;
            assert_true(n <= stage.layers + 2 && n == plan_buckets(&p, &stage, 4, NULL));
            if (p.bucket_bytes == 1) /* a bucket for everything: behind the blocks, a layer, the table */
                assert_true(n == stage.last + stage.layers + stage.embedding);
            for (int64_t b = 0; b < n; b++) {
                assert_true(buckets[b].first + buckets[b].elements == end && buckets[b].after < after);
                end = buckets[b].first;
                after = buckets[b].after;
                assert_true(!zero || buckets[b].elements % dp == 0);
                int64_t at = buckets[b].first, first, count;
                for (int k = 0; k < dp; k++) {
                    plan_piece(&p, &buckets[b], k, &first, &count);
                    assert_true(first == at && (!zero || count == buckets[b].elements / dp));
                    at += count;
                }
                assert_true(at == buckets[b].first + buckets[b].elements);
            }
            assert_true(end == 0);
            for (int64_t k = 0; k < stage.tensors; k++) {
                struct plan_tensor t;
                plan_stage_tensor_at(&p, &stage, plan_rank(&p, s, 0, 1), k, &t);
                int64_t at = 0;
                for (int r = 0; r < dp; r++) {
                    int64_t first, count;
                    plan_owned(&p, buckets, n, r, &t, &first, &count);
                    assert_true(!count || first == at);
                    at += count;
                }
                assert_true(at == t.nrows * t.ncols);
            }
        }
    }
}

/* A job on one node takes tp * pp * dp devices of it. */
static void devices_follow_the_degrees(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    struct plan_machine machine = {0};
    Boost__JobSpec *out;
    job_open(&j);
    Boost__Parallel *par = j.spec->parallel;
    par->has_dp = par->has_pp = 1;
    par->dp = 2;
    par->pp = 3;
    assert_int_equal(plan_resolve(j.spec, &machine, &out, &err), 0);
    assert_int_equal(out->resources->devices_per_node, 12);
    assert_int_equal(out->parallel->zero, 0);
    assert_int_equal(out->parallel->bucket_mib, 64);
    boost__job_spec__free_unpacked(out, NULL);
    job_close(&j);
}

static void writers_of_what_several_ranks_hold(void **state)
{
    (void)state;
    struct plan p;
    struct plan_stage last;
    plan_for(&p, 3, 2, 2, 3, true, 0);
    plan_stage_at(&p, 2, &last);
    int rank = plan_rank(&p, 2, 0, 1);
    assert_int_equal(plan_writer(&p, &last, rank, 0, 1), plan_rank(&p, 0, 1, 1)); /* the table: the first stage */
    assert_int_equal(plan_writer(&p, &last, rank, 1, 1), plan_rank(&p, 2, 1, 1));
}

/* Under zero 1 moments shrink to 1/dp; saved activations are those of the micro-batches under way. */
static void memory_of_stages_and_replicas(void **state)
{
    (void)state;
    struct plan whole, sharded;
    struct plan_backend b;
    struct plan_memory m, z;
    plan_for(&whole, 4, 1, 2, 2, false, 0);
    plan_for(&sharded, 4, 1, 2, 2, false, 1);
    plan_backend_estimate(&whole, &b);
    for (int s = 0; s < 2; s++) {
        plan_stage_memory(&whole, s, &b, &m);
        plan_stage_memory(&sharded, s, &b, &z);
        assert_true(m.bytes[MEM_WEIGHTS] == z.bytes[MEM_WEIGHTS] && m.bytes[MEM_GRADS] == z.bytes[MEM_GRADS]);
        assert_true(m.bytes[MEM_MOMENTS] == 2 * z.bytes[MEM_MOMENTS]);
    }
    struct plan_memory first, last, most;
    plan_stage_memory(&whole, 0, &b, &first);
    plan_stage_memory(&whole, 1, &b, &last);
    plan_memory(&whole, &b, &most);
    assert_true(first.bytes[MEM_SAVED] == 2 * last.bytes[MEM_SAVED]); /* two layers each, two slots and one */
    assert_true(most.total == (first.total > last.total ? first.total : last.total));
    for (int pp = 1; pp <= 7; pp++)
        for (int tied = 0; tied < 2; tied++) {
            struct plan_memory one;
            int64_t largest = 0;
            plan_for(&whole, 7, 2, 1, pp, tied, 0);
            for (int s = 0; s < pp; s++) {
                plan_stage_memory(&whole, s, &b, &one);
                largest = one.total > largest ? one.total : largest;
            }
            plan_memory(&whole, &b, &most);
            assert_true(most.total == largest);
        }
}

/* Written out once more: Td/t over each border for each micro-batch, the local parameters over dp once. */
static void counts_of_borders_and_replicas(void **state)
{
    (void)state;
    struct plan p;
    struct plan_comm_counts c;
    struct plan_stage stage;
    plan_for(&p, 4, 2, 2, 3, true, 0);
    int64_t border = p.T * p.d / 2, n = p.accumulation, table = p.V_pad / 2 * p.d;
    for (int s = 0; s < 3; s++) {
        plan_stage_comm_counts(&p, s, &c);
        plan_stage_at(&p, s, &stage);
        assert_true(c.pp[PLAN_SEND][PLAN_FORWARD].elements == (s < 2) * n * border);
        assert_true(c.pp[PLAN_RECV][PLAN_FORWARD].elements == (s > 0) * n * border);
        assert_true(c.pp[PLAN_SEND][PLAN_BACKWARD].calls == (s > 0) * n);
        assert_true(c.pp[PLAN_RECV][PLAN_BACKWARD].calls == (s < 2) * n);
        assert_true(c.dp[PLAN_ALL_REDUCE][PLAN_STEP].elements == stage.elements);
        assert_true(c.ends[PLAN_ALL_REDUCE][PLAN_STEP].elements == (s != 1) * table);
    }
    p.zero = 1;
    plan_stage_comm_counts(&p, 0, &c);
    plan_stage_at(&p, 0, &stage);
    assert_true(c.dp[PLAN_ALL_REDUCE][PLAN_STEP].calls == 0);
    assert_true(c.dp[PLAN_REDUCE_SCATTER][PLAN_STEP].elements == stage.elements);
    assert_true(c.dp[PLAN_ALL_GATHER][PLAN_STEP].elements == stage.elements);
    assert_true(c.ends[PLAN_ALL_REDUCE][PLAN_STEP].elements == table / 2);
}

/* Beyond 2^63 elements a count stays there: 2^31 tokens of a micro-batch, 2^22 wide, 2^24 times. */
static void counts_do_not_wrap(void **state)
{
    (void)state;
    for (int pp = 1; pp <= 2; pp++) {
        struct job j;
        struct plan p;
        struct plan_comm_counts c;
        job_open(&j);
        j.spec->model->factorization = BOOST__FACTORIZATION__VALUE__SVD;
        j.spec->model->hidden = 6 << 17;
        j.spec->model->rank = 6;
        j.spec->model->intermediate = 1 << 22;
        j.spec->data->seq_len = 1 << 20;
        Boost__Parallel *par = j.spec->parallel;
        par->has_strategy = par->has_micro_batch = par->has_pp = 1;
        par->strategy = BOOST__STRATEGY__VALUE__VANILLA;
        par->micro_batch = 1 << 10;
        par->global_batch = 1 << 24;
        par->pp = pp;
        job_plan(&j, &p);
        p.accumulation = 1 << 24;
        plan_stage_comm_counts(&p, 0, &c);
        assert_true(c.tp[PLAN_ALL_REDUCE][PLAN_FORWARD].elements == INT64_MAX);
        assert_true(c.tp[PLAN_ALL_REDUCE][PLAN_BACKWARD].elements == INT64_MAX);
        assert_true(pp == 1 || c.pp[PLAN_SEND][PLAN_FORWARD].elements == INT64_MAX);
        job_close(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_count_in_one_way),
        cmocka_unit_test(stages_share_the_model_out),
        cmocka_unit_test(buckets_and_owners),
        cmocka_unit_test(devices_follow_the_degrees),
        cmocka_unit_test(writers_of_what_several_ranks_hold),
        cmocka_unit_test(memory_of_stages_and_replicas),
        cmocka_unit_test(counts_of_borders_and_replicas),
        cmocka_unit_test(counts_do_not_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
