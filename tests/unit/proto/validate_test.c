/* Every rule of validate.c refuses what it should, with a message that names the
 * field, and accepts the edges of its range. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto/jobfile.h"
#include "proto/text.h"
#include "proto/validate.h"

static const char good[] =
    "spec_version: 1 name: 'demo'\n"
    "model { factorization: COLA hidden: 64 layers: 2 heads: 4 intermediate: 128 rank: 16 vocab: 256 }\n"
    "parallel { global_batch: 8 }\n"
    "data { train { path: '/t' } eval { path: '/e' } seq_len: 32 }\n"
    "optimizer { lr: 1e-3 } run { steps: 10 } checkpoint { dir: '/c' }\n";

static struct job_file file;
static struct error err;

static void load(const char *text)
{
    if (jobfile_parse(&file, "job", text, strlen(text), JOB_FORMAT_TEXT, false, &err))
        fail_msg("%s", err.message);
}

/* The good spec after --set assignments separated by '|'. */
static int check_after(const char *assignments)
{
    load(good);
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", assignments);
    for (char *at = copy, *next; at && *at; at = next) {
        next = strchr(at, '|');
        if (next)
            *next++ = '\0';
        if (jobfile_set(file.spec, &file.arena, at, &err))
            fail_msg("%s: %s", at, err.message);
    }
    error_clear(&err);
    return validate_job_spec(file.spec, &err);
}

static void refuse(const char *assignments, const char *message)
{
    int rc = check_after(assignments);
    jobfile_free(&file);
    assert_int_equal(rc, ERR_INVALID);
    assert_int_equal(err.code, ERR_INVALID);
    assert_string_equal(err.message, message);
    assert_true(err.hint[0]);
}

static void accept(const char *assignments)
{
    int rc = check_after(assignments);
    jobfile_free(&file);
    if (rc)
        fail_msg("%s: %s", assignments, err.message);
}

static void test_good(void **state)
{
    (void)state;
    accept("");
    load(good); /* resolved is as valid as before */
    assert_int_equal(reflect_fill_defaults(&file.spec->base, &file.arena, &err), 0);
    if (validate_job_spec(file.spec, &err))
        fail_msg("%s", err.message);
    jobfile_free(&file);
}

static void test_required(void **state)
{
    (void)state;
    static const char *const leaves[] = {"spec_version",
                                         "name",
                                         "model.factorization",
                                         "model.hidden",
                                         "model.layers",
                                         "model.heads",
                                         "model.intermediate",
                                         "model.vocab",
                                         "parallel.global_batch",
                                         "data.train",
                                         "data.seq_len",
                                         "optimizer.lr",
                                         "run.steps",
                                         "checkpoint.dir",
                                         "model",
                                         "data"};
    for (size_t i = 0; i < sizeof leaves / sizeof *leaves; i++) {
        char assignment[64], want[96];
        bool string = strcmp(leaves[i], "name") == 0 || strcmp(leaves[i], "checkpoint.dir") == 0;
        snprintf(assignment, sizeof assignment, "%s=", leaves[i]);
        snprintf(want, sizeof want, "%s is %s", leaves[i], string ? "empty" : "required");
        refuse(assignment, want);
    }
    refuse("parallel=", "parallel.global_batch is required");
    refuse("optimizer=", "optimizer.lr is required");
    refuse("run=", "run.steps is required");
    refuse("checkpoint=", "checkpoint.dir is required");
    refuse("data.train[0].path=", "data.train[0].path is empty");
    refuse("data.eval[1].weight=1", "data.eval[1].path is required");
    refuse("label[0].value=x", "label[0].key is required");
    Boost__JobSpec empty = BOOST__JOB_SPEC__INIT;
    assert_int_equal(validate_job_spec(&empty, &err), ERR_INVALID);
    assert_string_equal(
        err.message,
        "spec_version is required; name is required; model is required; parallel.global_batch is required; "
        "data is required; optimizer.lr is required; run.steps is required; checkpoint.dir is required");
}

/* path, the lowest and highest good value, one below and one above (NULL: none). */
static void test_ranges(void **state)
{
    (void)state;
    static const struct {
        const char *path, *low, *high, *under, *over, *range;
    } rows[] = {
        {"priority", "0", "100", "-1", "101", "0 to 100"},
        {"time_limit_s", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"stop_grace_s", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"model.hidden", "1", "1048576", "0", "1048577", "1 to 1048576"},
        {"model.layers", "1", "4096", "0", "4097", "1 to 4096"},
        {"model.heads", "1", "65536", "0", "65537", "1 to 65536"},
        {"model.kv_heads", "1", "65536", "0", "65537", "1 to 65536"},
        {"model.intermediate", "1", "4194304", "0", "4194305", "1 to 4194304"},
        {"model.rank", "1", "1048576", "-4", "1048577", "1 to 1048576"},
        {"model.vocab", "2", "16777216", "1", "16777217", "2 to 16777216"},
        {"model.rope_theta", "1.0000001", "1e300", "1", NULL, "greater than 1"},
        {"model.norm_eps", "1e-30", "0.1", "0", "0.11", "greater than 0, at most 0.1"},
        {"parallel.tp", "1", "65536", "0", "65537", "1 to 65536"},
        {"parallel.pp", "1", "65536", "0", "65537", "1 to 65536"},
        {"parallel.dp", "1", "65536", "0", "65537", "1 to 65536"},
        {"parallel.micro_batch", "1", "1048576", "0", "1048577", "1 to 1048576"},
        {"parallel.global_batch", "1", "16777216", "0", "16777217", "1 to 16777216"},
        {"parallel.zero", "0", "1", "-1", "2", "0 to 1"},
        {"parallel.bucket_mib", "1", "4096", "0", "4097", "1 to 4096"},
        {"data.train[0].weight", "1e-30", "1e30", "0", NULL, "greater than 0"},
        {"data.seq_len", "1", "1048576", "0", "1048577", "1 to 1048576"},
        {"data.seed", "0", "9223372036854775807", "-1", NULL, "0 or more"},
        {"data.eod_id", "-1", "255", "-2", NULL, "-1 to 16777215"},
        {"data.pad_id", "-1", "255", "-2", NULL, "-1 to 16777215"},
        {"data.cache_max_mib", "0", "1000", "-1", NULL, "0 or more"},
        {"optimizer.lr", "1e-30", "10", "0", "10.5", "greater than 0, at most 10"},
        {"optimizer.beta1", "0", "0.999999", "-0.5", "1", "0 to below 1"},
        {"optimizer.beta2", "0", "0.999999", "-0.5", "1", "0 to below 1"},
        {"optimizer.eps", "1e-30", "1", "0", NULL, "greater than 0"},
        {"optimizer.weight_decay", "0", "10", "-0.5", "10.5", "0 to 10"},
        {"optimizer.grad_clip", "0", "1e9", "-1", NULL, "0 or more"},
        {"optimizer.warmup_steps", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"optimizer.min_lr_ratio", "0", "1", "-0.5", "1.5", "0 to 1"},
        {"optimizer.max_skipped", "1", "2147483647", "0", NULL, "1 or more"},
        {"run.steps", "1", "1000000000", "0", "1000000001", "1 to 1000000000"},
        {"run.eval_every", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"run.eval_tokens", "1", "9223372036854775807", "0", NULL, "1 or more"},
        {"run.log_every", "1", "1000000000", "0", "1000000001", "1 to 1000000000"},
        {"run.seed", "0", "9223372036854775807", "-1", NULL, "0 or more"},
        {"checkpoint.every_steps", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"checkpoint.keep", "1", "2147483647", "0", NULL, "1 or more"},
        {"checkpoint.keep_every", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"checkpoint.write_mib_s", "0", "1e6", "-1", NULL, "0 or more"},
        {"resources.nodes", "1", "65536", "0", "65537", "1 to 65536"},
        {"resources.devices_per_node", "1", "65536", "0", "65537", "1 to 65536"},
        {"resources.spares", "0", "65536", "-1", "65537", "0 to 65536"},
        {"resources.threads_per_rank", "0", "1024", "-1", "1025", "0 to 1024"},
        {"resources.memory_mib", "0", "1000000000", "-1", "1000000001", "0 to 1000000000"},
        {"restart.max_restarts", "0", "2147483647", "-1", NULL, "0 or more"},
        {"restart.no_progress_limit", "1", "2147483647", "0", NULL, "1 or more"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[128], want[192];
        const char *ends[] = {rows[i].low, rows[i].high};
        const char *outside[] = {rows[i].under, rows[i].over};
        for (int k = 0; k < 2; k++) {
            snprintf(text, sizeof text, "%s=%s", rows[i].path, ends[k]);
            accept(text);
            if (!outside[k])
                continue;
            snprintf(text, sizeof text, "%s=%s", rows[i].path, outside[k]);
            snprintf(want, sizeof want, "%s = %s is out of range (%s)", rows[i].path, outside[k], rows[i].range);
            refuse(text, want);
        }
    }
    refuse("checkpoint.every_seconds=-1", "checkpoint.every_seconds = -1 is out of range (0 to 1000000000)");
    refuse("optimizer.wsd_decay_steps=-1", "optimizer.wsd_decay_steps = -1 is out of range (0 to 1000000000)");
    refuse("resources.min_nodes=0", "resources.min_nodes = 0 is out of range (1 to 65536)");
    refuse("spec_version=2", "spec_version = 2 is not supported");
    refuse("optimizer.lr=nan", "optimizer.lr = nan is out of range (greater than 0, at most 10)");
    refuse("optimizer.grad_clip=inf", "optimizer.grad_clip = inf is out of range (0 or more)");
    refuse("data.eval[0].weight=-inf", "data.eval[0].weight = -inf is out of range (greater than 0)");
}

static void test_names(void **state)
{
    (void)state;
    accept("name=A-z_0.9");
    accept("name=0123456789012345678901234567890123456789012345678901234567890123");
    refuse("name=01234567890123456789012345678901234567890123456789012345678901234",
           "name '01234567890123456789012345678901234567890123456789012345678901234' is not allowed (65 bytes)");
    refuse("name=a b", "name 'a b' is not allowed (3 bytes)");
    refuse("name=a/b", "name 'a/b' is not allowed (3 bytes)");
    refuse("name=a\x1b[2J\xc3\xa9", "name 'a?[2J?"
                                    "?' is not allowed (7 bytes)");
    accept("after=afterok:17|after+=after:1|after+=afterany:2|after+=afternotok:3");
    refuse("after=17", "after[0] = '17' is not a dependency (after, afterany, afterok or afternotok:<job>)");
    refuse("after=afterok:0", "after[0] = 'afterok:0' is not a dependency (after, afterany, afterok or afternotok:<job>)");
    refuse("after=afterok:1x", "after[0] = 'afterok:1x' is not a dependency (after, afterany, afterok or afternotok:<job>)");
    refuse("env=[{key: 'A=B'}]", "env[0].key = 'A=B' holds a '='");
    refuse("env=[{key: 'A'}, {key: 'B'}, {key: 'A'}]", "env 'A' is given twice ([0] and [2])");
    refuse("env=[{key: 'A'}, {key: 'CUDA_VISIBLE_DEVICES' value: '0'}]",
           "env[1].key = 'CUDA_VISIBLE_DEVICES' is set by the node");
    refuse("env=[{key: 'BOOST_RUN_DIR' value: '/x'}]", "env[0].key = 'BOOST_RUN_DIR' is set by the node");
    refuse("env=[{key: 'BOOST_ATTEMPT' value: 'a-1.1'}, {key: 'BOOST_RANK' value: '0'}]",
           "env[0].key = 'BOOST_ATTEMPT' is set by the node; env[1].key = 'BOOST_RANK' is set by the node");
    refuse("env=[{key: 'CUDA_DEVICE_ORDER'}]", "env[0].key = 'CUDA_DEVICE_ORDER' is set by the node");
    accept("label=[{key: 'A'}, {key: 'B' value: 'A=B'}]");
}

static void test_between_fields(void **state)
{
    (void)state;
    refuse("model.rank=", "model.rank is required unless FULL_RANK");
    refuse("model.factorization=FULL_RANK", "model.rank does not apply to factorization FULL_RANK");
    accept("model.factorization=FULL_RANK|model.rank=");
    accept("model.factorization=FULL_RANK|model.rank=|parallel.strategy=FULL");
    refuse("model.factorization=FULL_RANK|model.rank=|parallel.strategy=BTP",
           "model.factorization FULL_RANK needs parallel.strategy FULL");
    refuse("parallel.strategy=FULL", "parallel.strategy FULL applies to factorization FULL_RANK only");
    refuse("model.lax_base=SVD", "model.lax_base applies to factorization LAX only");
    refuse("model.lax_gate=LINEAR", "model.lax_gate applies to factorization LAX only");
    accept("model.factorization=LAX|model.lax_base=SVD|model.lax_gate=TENSOR");
    refuse("parallel.vanilla_attention=SLICED", "parallel.vanilla_attention applies to strategy VANILLA only");
    accept("parallel.strategy=VANILLA|parallel.vanilla_attention=PUBLISHED");
    accept("parallel.tp=256|parallel.dp=256");
    refuse("parallel.tp=256|parallel.dp=256|parallel.pp=2", "tp * pp * dp = 131072 is over the limit of 65536 ranks");
    refuse("data.eod_id=256", "data.eod_id = 256 is not below model.vocab = 256");
    refuse("data.pad_id=300", "data.pad_id = 300 is not below model.vocab = 256");
    refuse("data.mask_eod=true", "data.mask_eod needs data.eod_id");
    accept("data.mask_eod=true|data.eod_id=0");
    accept("run.eval_every=5");
    refuse("run.eval_every=5|data.eval=", "run.eval_every = 5 needs data.eval");
    refuse("run.steps=1000000000|parallel.global_batch=16777216|data.seq_len=1048576",
           "run.steps * parallel.global_batch * data.seq_len is over 2^62 tokens");
    refuse("optimizer.wsd_decay_steps=5", "optimizer.wsd_decay_steps applies to schedule WSD only");
    accept("optimizer.wsd_decay_steps=5|optimizer.schedule=WSD");
    refuse("checkpoint.every_seconds=5", "checkpoint.every_seconds applies to interval SECONDS only");
    refuse("checkpoint.interval=SECONDS", "checkpoint.interval SECONDS needs checkpoint.every_seconds");
    accept("checkpoint.interval=SECONDS|checkpoint.every_seconds=5");
    refuse("checkpoint.interval=AUTO|checkpoint.every_steps=5",
           "checkpoint.every_steps applies to interval STEPS only");
    refuse("checkpoint.mirror=/x", "checkpoint.mirror is not an s3:// address");
    refuse("checkpoint.init_from.weights_only=true",
           "checkpoint.init_from.weights_only needs checkpoint.init_from.path");
    accept("checkpoint.init_from.weights_only=true|checkpoint.init_from.path=job:17@8000");
    char set[1000] = "checkpoint.dir=/";
    memset(set + strlen(set), 'x', 899);
    accept(set);
    set[strlen(set)] = 'y';
    refuse(set, "checkpoint.dir has 901 bytes, the limit is 900");
    refuse("checkpoint.dir=s3://b/p", "checkpoint.dir is a URL: ranks write into directories alone");
    refuse("checkpoint.init_from.path=file:///p/step-8.a1", "checkpoint.init_from.path: file:// is no URL that can be fetched");
    refuse("data.train[0].path=file:///p/a.txt", "data.train[0].path: file:// is no URL that can be fetched");
    refuse("checkpoint.init_from.path=s3://b/p/step-8.a1", "checkpoint.init_from.path is a URL and needs data.cache_dir");
    accept("checkpoint.init_from.path=s3://b/p/step-8.a1|data.cache_dir=/c");
    refuse("resources.min_nodes=2", "resources.min_nodes = 2 is over resources.nodes = 1");
    accept("resources.constraint=gpu=h200&!rack=r3");
    refuse("resources.constraint=gpu=&x", "resources.constraint: 'gpu=&x' is not a constraint: no value at character 5");
    refuse("resources.constraint=(gpu",
           "resources.constraint: '(gpu' is not a constraint: a parenthesis that does not close at character 5");
    accept("resources.nodelist=gpu[01-04,07],n1|resources.exclude=gpu03");
    refuse("resources.nodelist=gpu[4-1]",
           "resources.nodelist: 'gpu[4-1]' is not a list of nodes: a range that goes down at character 5");
    refuse("resources.exclude=a,,b", "resources.exclude: 'a,,b' is not a list of nodes: no name at character 3");
    refuse("notify.events=failed", "notify.events needs notify.url");
    accept("notify.url=https://x|notify.events=failed,recovered,completed");
    refuse("notify.url=https://x|notify.events=failed,flown",
           "notify.events: 'flown' is none of failed, recovered, completed");
    refuse("notify.url=https://x|notify.events=failed,", "notify.events ends in a comma");
    refuse("notify.url=ftp://x", "notify.url is not an http:// or https:// address");
    refuse("notify.secret_file=/s", "notify.secret_file needs notify.url");
}

static void test_enum_numbers(void **state)
{
    (void)state;
    load(good);
    file.spec->model->factorization = (Boost__Factorization__Value)9;
    assert_int_equal(validate_job_spec(file.spec, &err), ERR_INVALID);
    assert_string_equal(err.message, "model.factorization cannot be '9' (one of FULL_RANK SVD COLA LAX)");
    jobfile_free(&file);
}

static void test_list_limits(void **state)
{
    (void)state;
    static const struct {
        const char *path, *entry;
        int limit;
    } lists[] = {{"after", "after+=afterok:1", 256},
                 {"data.train", "data.train+={path: 'a'}", 4096},
                 {"data.eval", "data.eval+={path: 'a'}", 4096}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        char clear[32], want[96];
        load(good);
        snprintf(clear, sizeof clear, "%s=", lists[i].path);
        assert_int_equal(jobfile_set(file.spec, &file.arena, clear, &err), 0);
        struct arena extra; /* each += copies the list */
        arena_init(&extra, 1 << 30);
        for (int k = 0; k < lists[i].limit; k++)
            assert_int_equal(jobfile_set(file.spec, &extra, lists[i].entry, &err), 0);
        assert_int_equal(validate_job_spec(file.spec, &err), 0);
        assert_int_equal(jobfile_set(file.spec, &extra, lists[i].entry, &err), 0);
        assert_int_equal(validate_job_spec(file.spec, &err), ERR_INVALID);
        snprintf(want, sizeof want, "%s has %d entries, over the limit of %d", lists[i].path, lists[i].limit + 1,
                 lists[i].limit);
        assert_string_equal(err.message, want);
        arena_free(&extra);
        jobfile_free(&file);
    }
    load(good);
    for (int k = 0; k < 257; k++) {
        char text[64];
        snprintf(text, sizeof text, "env+={key: 'K%d'}", k);
        assert_int_equal(jobfile_set(file.spec, &file.arena, text, &err), 0);
        snprintf(text, sizeof text, "label+={key: 'K%d'}", k);
        if (k < 65)
            assert_int_equal(jobfile_set(file.spec, &file.arena, text, &err), 0);
    }
    assert_int_equal(validate_job_spec(file.spec, &err), ERR_INVALID);
    assert_string_equal(err.message,
                        "label has 65 entries, over the limit of 64; env has 257 entries, over the limit of 256");
    jobfile_free(&file);
}

static void test_all_faults_are_told(void **state)
{
    (void)state;
    refuse("model.rank=-4|run.steps=|optimizer.lr=0",
           "model.rank = -4 is out of range (1 to 1048576); optimizer.lr = 0 is out of range (greater than 0, at most "
           "10); run.steps is required");
    load(good);
    for (int i = 0; i < 100; i++)
        assert_int_equal(jobfile_set(file.spec, &file.arena, "after+=x", &err), 0);
    assert_int_equal(validate_job_spec(file.spec, &err), ERR_INVALID);
    int shown = 0;
    for (const char *at = err.message; (at = strstr(at, "is not a dependency")); at++)
        shown++;
    char want[32];
    snprintf(want, sizeof want, "; and %d more", 100 - shown);
    assert_true(shown > 5 && shown < 100);
    assert_string_equal(err.message + strlen(err.message) - strlen(want), want);
    assert_non_null(strstr(err.hint, "afterok:17"));
    assert_int_equal(validate_job_spec(file.spec, NULL), ERR_INVALID); /* only the code is wanted */
    jobfile_free(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),           cmocka_unit_test(test_required),
        cmocka_unit_test(test_ranges),         cmocka_unit_test(test_names),
        cmocka_unit_test(test_between_fields), cmocka_unit_test(test_enum_numbers),
        cmocka_unit_test(test_list_limits),    cmocka_unit_test(test_all_faults_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
