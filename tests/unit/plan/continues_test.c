/* plan_continues: every field of the model is compared, whatever it changes, and the position in the data. */
#include "tests/unit/plan/spec.h"

#include <stdio.h>
#include <stdlib.h>

static const struct plan_machine machine;

static const char lax_job[] =
    "spec_version: 1 name: \"plan\"\n"
    "model { factorization: LAX hidden: 24 layers: 3 heads: 6 kv_heads: 2 intermediate: 36 rank: 5 vocab: 300 }\n"
    "parallel { global_batch: 12 }\n"
    "data { train { path: \"/d/train.txt\" } seq_len: 10 }\n"
    "optimizer { lr: 0.001 }\n"
    "run { steps: 10 }\n"
    "checkpoint { dir: \"/d/ckpt\" }\n";

static Boost__JobSpec *resolved(const char *text)
{
    struct job j;
    struct error err = {0};
    Boost__JobSpec *out = NULL;
    job_open_text(&j, text);
    if (plan_resolve(j.spec, &machine, &out, &err))
        fail_msg("%s", err.message);
    job_close(&j);
    return out;
}

static const ProtobufCFieldDescriptor *field_of(const char *name)
{
    return reflect_field(&boost__model__descriptor, name, strlen(name));
}

/* Another value of the field than it has. */
static void change(Boost__Model *m, const ProtobufCFieldDescriptor *f)
{
    void *at = reflect_get(&m->base, f, 0);
    if (f->type == PROTOBUF_C_TYPE_DOUBLE)
        *(double *)at *= 2;
    else if (f->type == PROTOBUF_C_TYPE_BOOL)
        *(protobuf_c_boolean *)at ^= 1;
    else
        *(int *)at += *(int *)at == 2 ? -1 : 1;
}

static void every_field_of_the_model(void **state)
{
    (void)state;
    Boost__JobSpec *was = resolved(lax_job);
    struct error err = {0};
    assert_int_equal(plan_continues(was, was, false, &err), ERR_OK);
    for (unsigned i = 0; i < boost__model__descriptor.n_fields; i++)
        for (int weights_only = 0; weights_only < 2; weights_only++) {
            const ProtobufCFieldDescriptor *f = &boost__model__descriptor.fields[i];
            char start[64];
            Boost__JobSpec *now = resolved(lax_job);
            if (!reflect_count(&now->model->base, f))
                fail_msg("%s has no value in a resolved job", f->name);
            change(now->model, f);
            error_clear(&err);
            assert_int_equal(plan_continues(was, now, weights_only, &err), ERR_INVALID);
            snprintf(start, sizeof start, "model.%s = ", f->name);
            assert_int_equal(strncmp(err.message, start, strlen(start)), 0);
            snprintf(start, sizeof start, "--set model.%s=", f->name);
            assert_int_equal(strncmp(err.hint, start, strlen(start)), 0);
            boost__job_spec__free_unpacked(now, NULL);
        }
    boost__job_spec__free_unpacked(was, NULL);
}

static void says_both_values_and_the_mend(void **state)
{
    (void)state;
    static const char meant[] = "where it is meant: boostctl ckpt export, change config.json";
    Boost__JobSpec *was = resolved(minimal_job), *now = resolved(minimal_job);
    struct error err = {0};
    now->model->rope_theta = 500;
    now->model->norm_eps = 0.1;
    now->model->mlp_activation = BOOST__SWITCH__VALUE__ON;
    assert_int_equal(plan_continues(was, now, true, &err), ERR_INVALID);
    assert_string_equal(err.message,
                        "model.rope_theta = 500, the checkpoint has 10000; model.norm_eps = 0.1, the checkpoint has 1e-06; "
                        "model.mlp_activation = ON, the checkpoint has OFF");
    assert_non_null(strstr(err.hint, "--set model.rope_theta=10000; --set model.norm_eps=1e-06; "
                                     "--set model.mlp_activation=OFF"));
    assert_non_null(strstr(err.hint, meant));
    assert_int_equal(plan_continues(was, now, false, &err), ERR_INVALID);
    assert_null(strstr(err.hint, meant));
    assert_int_equal(plan_continues(was, now, false, NULL), ERR_INVALID);
    boost__job_spec__free_unpacked(now, NULL);
    boost__job_spec__free_unpacked(was, NULL);
}

/* Of a checkpoint that is older than a field. */
static void what_is_not_known_is_no_difference(void **state)
{
    (void)state;
    Boost__JobSpec *was = resolved(minimal_job), *now = resolved(minimal_job);
    struct error err = {0};
    now->model->rope_theta = 500;
    now->model->norm_eps = 0.1;
    reflect_clear(&was->model->base, field_of("rope_theta"));
    reflect_clear(&was->model->base, field_of("norm_eps"));
    assert_int_equal(plan_continues(was, now, false, &err), ERR_OK);
    boost__job_spec__free_unpacked(now, NULL);
    boost__job_spec__free_unpacked(was, NULL);
}

/* config.json of a program that has it in fp32 gives 1e-5 as 9.999999747378752e-06. */
static void constants_of_fp32_are_the_same(void **state)
{
    (void)state;
    Boost__JobSpec *was = resolved(minimal_job), *now = resolved(minimal_job);
    struct error err = {0};
    was->model->norm_eps = 9.999999747378752e-06;
    now->model->norm_eps = 1e-5;
    assert_int_equal(plan_continues(was, now, false, &err), ERR_OK);
    now->model->norm_eps = 1.0001e-5;
    assert_int_equal(plan_continues(was, now, false, &err), ERR_INVALID);
    boost__job_spec__free_unpacked(now, NULL);
    boost__job_spec__free_unpacked(was, NULL);
}

static void the_position_but_for_weights_alone(void **state)
{
    (void)state;
    Boost__JobSpec *was = resolved(minimal_job), *now = resolved(minimal_job);
    struct error err = {0};
    now->parallel->global_batch = 24;
    now->data->seed = 7;
    assert_int_equal(plan_continues(was, now, false, &err), ERR_INVALID);
    assert_string_equal(err.message, "parallel.global_batch = 24, the checkpoint has 12; data.seed = 7, the checkpoint has 1");
    assert_string_equal(err.hint, "--set parallel.global_batch=12; --set data.seed=1");
    assert_int_equal(plan_continues(was, now, true, &err), ERR_OK);
    boost__job_spec__free_unpacked(now, NULL);
    boost__job_spec__free_unpacked(was, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_of_the_model),
        cmocka_unit_test(says_both_values_and_the_mend),
        cmocka_unit_test(what_is_not_known_is_no_difference),
        cmocka_unit_test(constants_of_fp32_are_the_same),
        cmocka_unit_test(the_position_but_for_weights_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
