/* plan_resolve and plan_make: every AUTO gets its value, memory chooses the micro-batch. */
#include "tests/unit/plan/spec.h"

#include "worker/plan/arena.h"

static Boost__JobSpec *resolve(struct job *j, int64_t memory)
{
    struct error err = {0};
    struct plan_machine machine = {.memory_bytes = memory};
    Boost__JobSpec *out;
    if (plan_resolve(j->spec, &machine, &out, &err))
        fail_msg("%s", err.message);
    return out;
}

/* A resolved spec has no absent field that has a default, and no AUTO. */
static void nothing_left_open(const ProtobufCMessage *m)
{
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        size_t n = reflect_count(m, f);
        if (f->label != PROTOBUF_C_LABEL_REPEATED && !n && (f->type == PROTOBUF_C_TYPE_MESSAGE || f->default_value))
            fail_msg("%s is still absent", f->name);
        for (size_t k = 0; k < n; k++) {
            void *at = reflect_get(m, f, k);
            if (f->type == PROTOBUF_C_TYPE_MESSAGE)
                nothing_left_open(*(ProtobufCMessage **)at);
            if (f->type == PROTOBUF_C_TYPE_ENUM &&
                !strcmp(protobuf_c_enum_descriptor_get_value(f->descriptor, *(int *)at)->name, "AUTO"))
                fail_msg("%s is still AUTO", f->name);
        }
    }
}

static void fills_everything(void **state)
{
    (void)state;
    struct job j;
    job_open(&j);
    Boost__JobSpec *s = resolve(&j, 0);
    nothing_left_open(&s->base);
    assert_int_equal(s->parallel->strategy, BOOST__STRATEGY__VALUE__BTP);
    assert_int_equal(s->parallel->norm, BOOST__NORM__VALUE__ONLINE);
    assert_int_equal(s->parallel->recompute, BOOST__RECOMPUTE__VALUE__NONE);
    assert_int_equal(s->parallel->micro_batch, 6); /* 8 does not divide 12 */
    assert_int_equal(s->model->mlp_activation, BOOST__SWITCH__VALUE__OFF);
    assert_int_equal(s->data->format, BOOST__FORMAT__VALUE__TEXT);
    assert_int_equal(s->run->precision, BOOST__PRECISION__VALUE__FP32);
    assert_int_equal(s->resources->devices_per_node, 2);
    assert_int_equal(s->resources->threads_per_rank, 0); /* the agent's choice */
    /* Resolving is a fixed point. */
    struct job again = {.spec = s};
    Boost__JobSpec *twice = resolve(&again, 0);
    assert_true(reflect_equal(&s->base, &twice->base));
    boost__job_spec__free_unpacked(twice, NULL);
    boost__job_spec__free_unpacked(s, NULL);

    j.spec->model->factorization = BOOST__FACTORIZATION__VALUE__SVD;
    j.spec->data->train[0]->path = (char *)"/d/x.u16";
    j.spec->model->has_kv_heads = 0;
    s = resolve(&j, 0);
    assert_int_equal(s->model->mlp_activation, BOOST__SWITCH__VALUE__ON);
    assert_int_equal(s->data->format, BOOST__FORMAT__VALUE__U16);
    assert_int_equal(s->model->kv_heads, 6);
    boost__job_spec__free_unpacked(s, NULL);

    j.spec->data->train[0]->path = (char *)"/d/x.bin"; /* only the node sees whether an index lies beside it */
    s = resolve(&j, 0);
    assert_int_equal(s->data->format, BOOST__FORMAT__VALUE__AUTO);
    boost__job_spec__free_unpacked(s, NULL);
    job_close(&j);
}

/* Resolves to `s`, from which the same comes again. */
static Boost__JobSpec *resolve_twice(struct job *j)
{
    Boost__JobSpec *s = resolve(j, 0);
    struct job again = {.spec = s};
    Boost__JobSpec *twice = resolve(&again, 0);
    assert_true(reflect_equal(&s->base, &twice->base));
    boost__job_spec__free_unpacked(twice, NULL);
    return s;
}

/* Options without a choice stay AUTO. */
static void dense_models_resolve(void **state)
{
    (void)state;
    struct job j;
    job_open(&j);
    j.spec->model->factorization = BOOST__FACTORIZATION__VALUE__FULL_RANK;
    j.spec->model->has_rank = 0;
    Boost__JobSpec *s = resolve_twice(&j);
    assert_int_equal(s->parallel->strategy, BOOST__STRATEGY__VALUE__FULL);
    assert_int_equal(s->parallel->norm, BOOST__NORM__VALUE__AUTO);
    assert_int_equal(s->parallel->grouped, BOOST__SWITCH__VALUE__AUTO);
    assert_int_equal(s->model->mlp_activation, BOOST__SWITCH__VALUE__ON);
    boost__job_spec__free_unpacked(s, NULL);
    job_close(&j);
}

/* Options of one strategy or factorisation get their defaults where they apply, and only there. */
static void options_that_apply_resolve(void **state)
{
    (void)state;
    struct job j;
    job_open(&j);
    Boost__JobSpec *s = resolve_twice(&j);
    assert_false(s->parallel->has_vanilla_attention || s->model->has_lax_gate || s->model->has_lax_base);
    boost__job_spec__free_unpacked(s, NULL);
    j.spec->model->factorization = BOOST__FACTORIZATION__VALUE__LAX;
    j.spec->model->rank = 6;
    j.spec->parallel->has_strategy = 1;
    j.spec->parallel->strategy = BOOST__STRATEGY__VALUE__VANILLA;
    s = resolve_twice(&j);
    assert_true(s->parallel->has_vanilla_attention && s->model->has_lax_gate && s->model->has_lax_base);
    assert_int_equal(s->parallel->vanilla_attention, BOOST__VANILLA_ATTENTION__VALUE__SLICED);
    assert_int_equal(s->model->lax_base, BOOST__LAX_BASE__VALUE__COLA);
    assert_int_equal(s->model->lax_gate, BOOST__LAX_GATE__VALUE__IDENTITY);
    boost__job_spec__free_unpacked(s, NULL);
    job_close(&j);
}

/* BF16 is the user's choice on the CPU: the master weights come to the rest, and activations take half. */
static void bf16_has_master_weights(void **state)
{
    (void)state;
    static const enum plan_memory_category same[] = {MEM_GRADS, MEM_MOMENTS};
    struct job j;
    struct plan p;
    struct plan_backend b;
    struct plan_memory fp32, bf16;
    job_open(&j);
    job_plan(&j, &p);
    plan_backend_estimate(&p, &b);
    plan_memory(&p, &b, &fp32);
    j.spec->run->has_precision = 1;
    j.spec->run->precision = BOOST__PRECISION__VALUE__BF16;
    Boost__JobSpec *s = resolve_twice(&j);
    assert_int_equal(s->run->precision, BOOST__PRECISION__VALUE__BF16);
    boost__job_spec__free_unpacked(s, NULL);
    job_plan(&j, &p);
    plan_backend_estimate(&p, &b);
    assert_true(b.act == DTYPE_BF16 && b.stat == DTYPE_F32 && b.grad == DTYPE_F32);
    plan_memory(&p, &b, &bf16);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        assert_true(bf16.bytes[same[i]] == fp32.bytes[same[i]]);
    assert_true(fp32.bytes[MEM_MASTER] == 0 && bf16.bytes[MEM_MASTER] == fp32.bytes[MEM_WEIGHTS]);
    assert_true(2 * bf16.bytes[MEM_WEIGHTS] - fp32.bytes[MEM_WEIGHTS] < 2 * PLAN_ALIGN);
    assert_true(bf16.bytes[MEM_SAVED] < 0.6 * (double)fp32.bytes[MEM_SAVED]);
    job_close(&j);
}

static int64_t bytes_at(struct job *j, int micro, Boost__Recompute__Value recompute)
{
    struct plan p;
    struct plan_backend b;
    struct plan_memory m;
    job_plan(j, &p);
    p.recompute = recompute;
    p.micro_batch = micro;
    p.T = micro * p.s;
    plan_backend_estimate(&p, &b);
    plan_memory(&p, &b, &m);
    int64_t sum = 0;
    for (int i = 0; i < MEM_COUNT; i++)
        sum += m.bytes[i];
    assert_true(sum == m.total);
    return m.total;
}

static void memory_limits_the_micro_batch(void **state)
{
    (void)state;
    const Boost__Recompute__Value none = BOOST__RECOMPUTE__VALUE__NONE, layer = BOOST__RECOMPUTE__VALUE__LAYER;
    const Boost__Recompute__Value low_rank = BOOST__RECOMPUTE__VALUE__LOW_RANK;
    struct job j;
    job_open(&j);
    const int divisors[] = {1, 2, 3, 4, 6, 12};
    for (int i = 0; i < 6; i++) {
        Boost__JobSpec *s = resolve(&j, bytes_at(&j, divisors[i], none));
        assert_int_equal(s->parallel->micro_batch, divisors[i]);
        boost__job_spec__free_unpacked(s, NULL);
        if (i) {
            s = resolve(&j, bytes_at(&j, divisors[i], none) - 1);
            assert_int_equal(s->parallel->micro_batch, divisors[i - 1]);
            boost__job_spec__free_unpacked(s, NULL);
        }
    }
    /* Nothing fits without recomputing: then the largest micro-batch that does with LOW_RANK, at last with LAYER. */
    Boost__JobSpec *s = resolve(&j, bytes_at(&j, 1, none) - 1);
    assert_int_equal(s->parallel->recompute, low_rank);
    boost__job_spec__free_unpacked(s, NULL);
    s = resolve(&j, bytes_at(&j, 1, low_rank) - 1);
    assert_int_equal(s->parallel->recompute, layer);
    assert_int_equal(s->parallel->micro_batch, 1);
    boost__job_spec__free_unpacked(s, NULL);
    struct error err = {0};
    Boost__JobSpec *no_job;
    struct plan_machine tight = {.memory_bytes = bytes_at(&j, 1, layer) - 1};
    assert_int_equal(plan_resolve(j.spec, &tight, &no_job, &err), ERR_INVALID);
    assert_null(no_job);
    assert_non_null(strstr(err.message, "at parallel.micro_batch = 1"));
    /* What is given stays. */
    j.spec->parallel->has_micro_batch = 1;
    j.spec->parallel->micro_batch = 4;
    j.spec->parallel->has_recompute = 1;
    j.spec->parallel->recompute = none;
    tight.memory_bytes = bytes_at(&j, 4, none) - 1;
    assert_int_equal(plan_resolve(j.spec, &tight, &no_job, &err), ERR_INVALID);
    assert_non_null(strstr(err.hint, "parallel.micro_batch"));
    assert_non_null(strstr(err.hint, "leave parallel.recompute out"));
    j.spec->parallel->recompute = BOOST__RECOMPUTE__VALUE__AUTO;
    s = resolve(&j, tight.memory_bytes);
    assert_true(s->parallel->micro_batch == 4 && s->parallel->recompute == low_rank);
    boost__job_spec__free_unpacked(s, NULL);
    job_close(&j);
}

static Boost__JobSpec *resolve_on(struct job *j, bool has_cuda)
{
    struct error err = {0};
    struct plan_machine machine = {.has_cuda = has_cuda};
    Boost__JobSpec *out;
    if (plan_resolve(j->spec, &machine, &out, &err))
        fail_msg("%s", err.message);
    return out;
}

/* AUTO is CUDA where there is some, unless an option that only one device has decides. */
static void device_by_node_and_option(void **state)
{
    (void)state;
    enum option { NONE, CUDNN, FAST, FP32, FP64 };
    enum { CPU = BOOST__DEVICE__VALUE__CPU, CUDA = BOOST__DEVICE__VALUE__CUDA };
    static const int want[][2] = {
        [NONE] = {CPU, CUDA}, [CUDNN] = {CUDA, CUDA}, [FAST] = {CUDA, CUDA}, [FP32] = {CPU, CPU}, [FP64] = {CPU, CPU}};
    for (enum option o = NONE; o <= FP64; o++)
        for (int has_cuda = 0; has_cuda < 2; has_cuda++) {
            struct job j;
            job_open(&j);
            j.spec->parallel->has_attention = o == CUDNN;
            j.spec->parallel->attention = o == CUDNN ? BOOST__ATTENTION__VALUE__CUDNN : BOOST__ATTENTION__VALUE__AUTO;
            j.spec->parallel->has_deterministic = o == FAST;
            j.spec->parallel->deterministic = o != FAST;
            j.spec->run->has_precision = o >= FP32;
            j.spec->run->precision = o == FP32   ? BOOST__PRECISION__VALUE__FP32
                                     : o == FP64 ? BOOST__PRECISION__VALUE__FP64
                                                 : BOOST__PRECISION__VALUE__AUTO;
            Boost__JobSpec *s = resolve_on(&j, has_cuda != 0);
            bool cuda = want[o][has_cuda] == CUDA;
            assert_int_equal(s->resources->device, want[o][has_cuda]);
            if (o < FP32)
                assert_int_equal(s->run->precision,
                                 cuda ? BOOST__PRECISION__VALUE__BF16 : BOOST__PRECISION__VALUE__FP32);
            if (!cuda)
                assert_int_equal(s->parallel->attention, BOOST__ATTENTION__VALUE__OWN);
            boost__job_spec__free_unpacked(s, NULL);
            job_close(&j);
        }
}

/* On CUDA it is the device's memory that counts. */
static void memory_of_the_device(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    struct plan_machine machine = {.memory_bytes = 1, .cuda_bytes = INT64_C(1) << 40, .has_cuda = true};
    Boost__JobSpec *s;
    job_open(&j);
    assert_int_equal(plan_resolve(j.spec, &machine, &s, &err), 0);
    assert_int_equal(s->parallel->micro_batch, 12);
    boost__job_spec__free_unpacked(s, NULL);
    machine = (struct plan_machine){.memory_bytes = INT64_C(1) << 40, .cuda_bytes = 1, .has_cuda = true};
    assert_int_equal(plan_resolve(j.spec, &machine, &s, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "the smallest GPU gives it 0 MiB"));
    job_close(&j);
}

/* Sizes whose byte count is above 2^63 saturate instead of wrapping round. */
static void memory_saturates(void **state)
{
    (void)state;
    struct job j;
    job_open(&j);
    Boost__Model *m = j.spec->model;
    m->hidden = 1 << 20, m->heads = m->kv_heads = 1 << 12, m->layers = 4096, m->intermediate = 1 << 22;
    m->rank = 1 << 20, m->vocab = 1 << 24;
    j.spec->data->seq_len = 1 << 20;
    j.spec->parallel->global_batch = 2047;
    j.spec->parallel->has_micro_batch = 1;
    j.spec->parallel->micro_batch = 2047;
    struct plan p;
    job_plan(&j, &p);
    struct plan_backend b;
    struct plan_memory memory;
    plan_backend_estimate(&p, &b);
    plan_memory(&p, &b, &memory);
    assert_true(memory.total == INT64_MAX);
    assert_true(memory.bytes[MEM_WEIGHTS] > 0);
    job_close(&j);
}

static void plan_needs_a_resolved_spec(void **state)
{
    (void)state;
    struct job j;
    struct plan p;
    struct error err;
    job_open(&j);
    assert_int_equal(plan_make(j.spec, &p, &err), ERR_INTERNAL);
    job_plan(&j, &p);
    assert_int_equal(p.V_pad, 512); /* 300 up to a multiple of 128 * 2 */
    assert_int_equal(p.accumulation, 2);
    assert_int_equal(p.T, 60);
    assert_int_equal(p.e, 4);
    job_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fills_everything),           cmocka_unit_test(dense_models_resolve),
        cmocka_unit_test(options_that_apply_resolve), cmocka_unit_test(memory_limits_the_micro_batch),
        cmocka_unit_test(bf16_has_master_weights),    cmocka_unit_test(memory_saturates),
        cmocka_unit_test(plan_needs_a_resolved_spec), cmocka_unit_test(device_by_node_and_option),
        cmocka_unit_test(memory_of_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
