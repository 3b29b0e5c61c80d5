/* plan_validate: what is refused, with which code, text and mend. */
#include "tests/unit/plan/spec.h"

#include <stdlib.h>

#include "worker/plan/built.h"

static void refused(struct job *j, enum error_code code, const char *message, const char *hint)
{
    struct error err = {0};
    int rc = plan_validate(j->spec, &err);
    if (rc != (int)code || !strstr(err.message, message) || !strstr(err.hint, hint))
        fail_msg("expected %s \"%s\" with the hint \"%s\", got %s \"%s\" with \"%s\"", error_code_name(code), message,
                 hint, error_code_name((enum error_code)rc), err.message, err.hint);
    job_close(j);
}

static void minimal_job_is_valid(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    job_open(&j);
    if (plan_validate(j.spec, &err))
        fail_msg("%s", err.message);
    /* The same spec with every default made explicit. */
    assert_int_equal(reflect_fill_defaults(&j.spec->base, &j.arena, &err), 0);
    if (plan_validate(j.spec, &err))
        fail_msg("%s", err.message);
    job_close(&j);
}

static void proto_faults_come_first(void **state)
{
    (void)state;
    struct job j;
    job_open(&j);
    j.spec->model->rank = -4;
    j.spec->parallel->tp = 5;
    refused(&j, ERR_INVALID, "model.rank", "");
}

#define CHANGE(code, message, hint, ...)            \
    do {                                            \
        struct job j;                               \
        job_open(&j);                               \
        Boost__JobSpec *spec = j.spec;              \
        Boost__Model *model = spec->model;          \
        Boost__Parallel *parallel = spec->parallel; \
        (void)model;                                \
        (void)parallel;                             \
        __VA_ARGS__;                                \
        refused(&j, code, message, hint);           \
    } while (0)

static void layout_names_legal_values(void **state)
{
    (void)state;
    CHANGE(ERR_INVALID, "model.heads = 6 is not divisible by parallel.tp = 4; legal tp here: 1, 2, 3, 6",
           "set parallel.tp to one of 1, 2, 3, 6", parallel->tp = 4;
           model->kv_heads = 6);
    CHANGE(ERR_INVALID, "model.kv_heads = 2 is not divisible by parallel.tp = 3; legal tp here: 1, 2",
           "model.kv_heads: 3", parallel->tp = 3);
    CHANGE(ERR_INVALID, "model.intermediate = 37 is not divisible by parallel.tp = 2; legal tp here: 1",
           "model.intermediate: 36 or 38", model->intermediate = 37);
    CHANGE(ERR_INVALID, "parallel.global_batch = 12 is not a multiple of parallel.micro_batch * parallel.dp = 5 * 1",
           "10 or 15", parallel->has_micro_batch = 1;
           parallel->micro_batch = 5);
    CHANGE(ERR_INVALID, "is odd", "even", model->heads = model->kv_heads = 8; parallel->tp = 1);
    CHANGE(ERR_INVALID, "above 2147483647", "lower", parallel->global_batch = 100000; parallel->has_micro_batch = 1;
           parallel->micro_batch = 100000; spec->data->seq_len = 1 << 20);
    CHANGE(ERR_INVALID, "parallel.pp = 4 stages are more than model.layers = 3", "set parallel.pp to at most 3",
           parallel->has_pp = 1;
           parallel->pp = 4);
    CHANGE(ERR_INVALID, "parallel.global_batch = 12 is not a multiple of parallel.dp = 5", "10 or 15",
           parallel->has_dp = 1;
           parallel->dp = 5);
    struct job j;
    job_open(&j);
    Boost__Resources res = BOOST__RESOURCES__INIT;
    res.has_devices_per_node = 1;
    res.devices_per_node = 3;
    j.spec->resources = &res;
    refused(&j, ERR_INVALID, "resources.nodes * devices_per_node = 1 * 3 is not parallel.tp * pp * dp = 2", "leave");
}

/* A mend meets all rules at once: no multiple of 3 divides a hidden of 64, so no number of heads is offered for tp 3. */
static void a_mend_of_tp_breaks_no_other_rule(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    job_open(&j);
    j.spec->model->hidden = 64;
    j.spec->model->heads = 8;
    j.spec->model->has_kv_heads = 0;
    j.spec->parallel->tp = 3;
    assert_int_equal(plan_validate(j.spec, &err), ERR_INVALID);
    assert_string_equal(err.hint, "set parallel.tp to one of 1, 2, 4");
    job_close(&j);
    /* 96 has such divisors, and kv_heads follows: 96 / 6 and 96 / 12 are even, 96 / 9 is no number. */
    job_open(&j);
    j.spec->model->hidden = 96;
    j.spec->model->heads = 8;
    j.spec->model->has_kv_heads = 0;
    j.spec->parallel->tp = 3;
    assert_int_equal(plan_validate(j.spec, &err), ERR_INVALID);
    assert_string_equal(err.hint, "set parallel.tp to one of 1, 2, 4, or model.heads: 6 or 12");
    job_close(&j);
}

/* VANILLA cuts the rank and, SLICED, the heads; never the MLP's columns. */
static void vanilla_cuts_the_rank(void **state)
{
    (void)state;
    CHANGE(ERR_INVALID, "model.rank = 5 is not divisible by parallel.tp = 2; legal tp here: 1", "model.rank: 4 or 6",
           parallel->has_strategy = 1;
           parallel->strategy = BOOST__STRATEGY__VALUE__VANILLA);
    CHANGE(ERR_INVALID, "model.kv_heads = 2 is not divisible by parallel.tp = 4; legal tp here: 1, 2",
           "model.kv_heads: 4", parallel->has_strategy = 1;
           parallel->strategy = BOOST__STRATEGY__VALUE__VANILLA; parallel->tp = 4; model->rank = 8; model->heads = 12;
           model->hidden = 48);
    struct job j;
    struct error err = {0};
    job_open(&j);
    Boost__Parallel *parallel = j.spec->parallel;
    parallel->has_strategy = parallel->has_vanilla_attention = 1;
    parallel->strategy = BOOST__STRATEGY__VALUE__VANILLA;
    parallel->vanilla_attention = BOOST__VANILLA_ATTENTION__VALUE__PUBLISHED;
    parallel->tp = 4;
    j.spec->model->rank = 8;
    j.spec->model->intermediate = 35;
    assert_int_equal(plan_validate(j.spec, &err), 0);
    job_close(&j);
}

static void layout_reports_every_fault(void **state)
{
    (void)state;
    CHANGE(ERR_INVALID, "model.kv_heads = 2 is not divisible by parallel.tp = 4; legal tp here: 1, 2; model.inter", "",
           parallel->tp = 4;
           model->intermediate = 38);
}

static void options_that_do_not_apply(void **state)
{
    (void)state;
    CHANGE(ERR_INVALID, "parallel.strategy FULL", "BTP", parallel->has_strategy = 1;
           parallel->strategy = BOOST__STRATEGY__VALUE__FULL);
    CHANGE(ERR_INVALID, "parallel.norm applies to strategy BTP only", "leave", parallel->has_strategy = 1;
           parallel->strategy = BOOST__STRATEGY__VALUE__VANILLA; model->rank = 6; parallel->has_norm = 1;
           parallel->norm = BOOST__NORM__VALUE__ONLINE);
    for (int grouped = BOOST__SWITCH__VALUE__ON; grouped <= BOOST__SWITCH__VALUE__OFF; grouped++)
        CHANGE(ERR_INVALID, "parallel.grouped applies to low-rank models only", "leave",
               model->factorization = BOOST__FACTORIZATION__VALUE__FULL_RANK;
               model->has_rank = 0; model->rank = 0; parallel->has_grouped = 1;
               parallel->grouped = (Boost__Switch__Value)grouped);
    CHANGE(ERR_INVALID, "parallel.zero = 1", "dp", parallel->has_zero = 1; parallel->zero = 1);
    CHANGE(ERR_INVALID, "parallel.bucket_mib = 8", "dp", parallel->has_bucket_mib = 1; parallel->bucket_mib = 8);
}

static void options_of_one_device(void **state)
{
    (void)state;
    Boost__Resources cpu = BOOST__RESOURCES__INIT, cuda = BOOST__RESOURCES__INIT;
    cpu.has_device = cuda.has_device = 1;
    cpu.device = BOOST__DEVICE__VALUE__CPU;
    cuda.device = BOOST__DEVICE__VALUE__CUDA;
    CHANGE(ERR_INVALID, "parallel.deterministic = false applies to CUDA only", "set resources.device: CUDA",
           spec->resources = &cpu;
           parallel->has_deterministic = 1; parallel->deterministic = 0);
    CHANGE(ERR_INVALID, "parallel.attention = CUDNN applies to CUDA only", "set resources.device: CUDA",
           spec->resources = &cpu;
           parallel->has_attention = 1; parallel->attention = BOOST__ATTENTION__VALUE__CUDNN);
    for (int only_cpu = BOOST__PRECISION__VALUE__FP32; only_cpu <= BOOST__PRECISION__VALUE__FP64; only_cpu++) {
        if (only_cpu == BOOST__PRECISION__VALUE__BF16)
            continue;
        CHANGE(ERR_INVALID, "CUDA trains in BF16 in this version", "set run.precision: BF16", spec->resources = &cuda;
               spec->run->has_precision = 1; spec->run->precision = (Boost__Precision__Value)only_cpu);
        /* No device has both. */
        CHANGE(ERR_INVALID, "CUDA trains in BF16 in this version", "set run.precision: BF16", spec->run->has_precision = 1;
               spec->run->precision = (Boost__Precision__Value)only_cpu; parallel->has_attention = 1;
               parallel->attention = BOOST__ATTENTION__VALUE__CUDNN);
    }
}

static void unbuilt_things_are_named(void **state)
{
    (void)state;
    CHANGE(ERR_INVALID, "data.train[0].path is a URL and needs data.cache_dir", "data.cache_dir",
           spec->data->train[0]->path = (char *)"s3://b/x");
    CHANGE(ERR_INVALID, "checkpoint.dir is a URL", "checkpoint.mirror to s3://bucket/prefix",
           spec->checkpoint->dir = (char *)"s3://b/p");
}

/* Each unsupported field has its mend in the hint, and what does not fit is counted. */
static void every_mend_is_told(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    job_open(&j);
    j.spec->parallel->has_auto_ = 1;
    j.spec->parallel->auto_ = 1;
    Boost__Notify notify = BOOST__NOTIFY__INIT;
    notify.url = "https://x";
    j.spec->notify = &notify;
    assert_int_equal(plan_validate(j.spec, &err), ERR_UNSUPPORTED);
    assert_string_equal(err.hint, "set parallel.auto: false; leave notify.url out");
    /* "; and N more" stands for those whose mend is not among the ones that the hint shows. */
    enum { FILES = 12, FIELDS = 4 + FILES };
    Boost__TokenFile files[FILES], *list[FILES];
    for (int i = 0; i < FILES; i++) {
        files[i] = *j.spec->data->train[0];
        files[i].has_weight = 1;
        files[i].weight = 2;
        list[i] = &files[i];
    }
    j.spec->data->eval = list;
    j.spec->data->n_eval = FILES;
    notify.events = "failed";
    notify.secret_file = "/secret";
    assert_int_equal(plan_validate(j.spec, &err), ERR_UNSUPPORTED);
    int shown = 0, more = 0;
    for (const char *at = err.hint; at; at = strstr(at, "; ") ? strstr(at, "; ") + 2 : NULL) {
        shown += !strncmp(at, "set ", 4) || !strncmp(at, "leave ", 6) || !strncmp(at, "give ", 5);
        if (!strncmp(at, "and ", 4))
            more = (int)strtol(at + 4, NULL, 10);
    }
    assert_int_equal(shown + more, FIELDS);
    assert_true(more > 0);
    job_close(&j);
}

/* Two training files of these weights, and an evaluation file of that one (0: none). */
static void open_weighted(struct job *j, double first, double second, double eval)
{
    static Boost__TokenFile files[3];
    static Boost__TokenFile *list[3] = {&files[0], &files[1], &files[2]};
    double weights[] = {first, second, eval};
    job_open(j);
    for (int i = 0; i < 3; i++) {
        files[i] = *j->spec->data->train[0];
        files[i].has_weight = 1;
        files[i].weight = weights[i];
    }
    j->spec->data->train = list;
    j->spec->data->n_train = 2;
    j->spec->data->eval = list + 2;
    j->spec->data->n_eval = eval > 0;
}

static void weights_of_files(void **state)
{
    (void)state;
    struct job j;
    struct error err = {0};
    open_weighted(&j, 1, 0.3, 1);
    if (plan_validate(j.spec, &err))
        fail_msg("%s", err.message);
    job_close(&j);
    open_weighted(&j, 1, 9e-7, 0);
    refused(&j, ERR_INVALID, "data.train[1].weight = 9e-07 is less than one part in 1048576", "leave the file out");
    open_weighted(&j, 1.5e308, 1.5e308, 0);
    refused(&j, ERR_INVALID, "sum of data.train weights", "divide all weights");
    open_weighted(&j, 1, 1, 2);
    refused(&j, ERR_UNSUPPORTED, "data.eval[0].weight = 2", "set data.eval[0].weight: 1");
}

/* Every leaf of the descriptor has exactly one row; every row is a field. */
static int leaves(const ProtobufCMessageDescriptor *type, const char *path)
{
    int found = 0;
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &type->fields[i];
        char at[REFLECT_PATH];
        reflect_path(at, path, f->name, -1);
        if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            found += leaves(f->descriptor, at);
            continue;
        }
        int rows = 0;
        for (size_t r = 0; r < built_rule_count; r++)
            rows += !strcmp(built_rules[r].path, at);
        if (rows != 1)
            fail_msg("%s has %d rows in worker/plan/built.c", at, rows);
        found++;
    }
    return found;
}

static void table_covers_every_field(void **state)
{
    (void)state;
    enum { LISTS = 2 }; /* data.train and data.eval have rows of their own besides their leaves */
    assert_int_equal(leaves(&boost__job_spec__descriptor, "") + LISTS, (int)built_rule_count);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mend_is_told),
        cmocka_unit_test(weights_of_files),          cmocka_unit_test(options_of_one_device),
        cmocka_unit_test(minimal_job_is_valid),      cmocka_unit_test(proto_faults_come_first),
        cmocka_unit_test(layout_names_legal_values), cmocka_unit_test(layout_reports_every_fault),
        cmocka_unit_test(a_mend_of_tp_breaks_no_other_rule),
        cmocka_unit_test(vanilla_cuts_the_rank),     cmocka_unit_test(options_that_do_not_apply),
        cmocka_unit_test(unbuilt_things_are_named),  cmocka_unit_test(table_covers_every_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
