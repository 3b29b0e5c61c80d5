/* Telling formats apart, loading files and their faults, saving, --set, absolute paths. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "proto/jobfile.h"
#include "proto/text.h"

static char dir[256];
static struct job_file file;
static struct error err;

static const char text_spec[] =
    "spec_version: 1\nname: \"a\"\nmodel {\n  hidden: 64\n}\ndata {\n  train {\n    path: \"t\"\n  }\n}\n";

static int make_dir(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/jobfile-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, &err);
}

static const char *in_dir(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static int load(const char *name, const void *data, size_t len, enum job_format format, bool allow_unknown)
{
    assert_int_equal(fs_write_atomic(in_dir(name), data, len, 0600, &err), 0);
    error_clear(&err);
    return jobfile_load(&file, in_dir(name), format, allow_unknown, &err);
}

static void test_formats_by_content(void **state)
{
    (void)state;
    static const struct {
        const char *data;
        size_t len;
        enum job_format format;
    } cases[] = {
        {"name: \"a\"", 9, JOB_FORMAT_TEXT},   {"  \t\r\n{}", 7, JOB_FORMAT_JSON},
        {"\x08\x01", 2, JOB_FORMAT_BINARY},    {"# {\n", 4, JOB_FORMAT_TEXT},
        {"\xEF\xBB\xBF{", 4, JOB_FORMAT_JSON}, {"name: \"\x7f\xc3\xa9\"", 10, JOB_FORMAT_TEXT},
        {"{\x01", 2, JOB_FORMAT_JSON},         {"a\x1b", 2, JOB_FORMAT_BINARY},
        {"a\0b", 3, JOB_FORMAT_BINARY},        {"", 0, JOB_FORMAT_TEXT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(job_format_of(cases[i].data, cases[i].len), cases[i].format);
    enum job_format format;
    assert_int_equal(job_format_by_name("pbtxt", &format, &err), 0);
    assert_int_equal(format, JOB_FORMAT_TEXT);
    assert_int_equal(job_format_by_name("yaml", &format, &err), ERR_USAGE);
    assert_string_equal(job_format_name(JOB_FORMAT_JSON), "json");
}

static void test_load_and_save_in_each(void **state)
{
    (void)state;
    assert_int_equal(load("job", text_spec, strlen(text_spec), JOB_FORMAT_AUTO, false), 0);
    assert_int_equal(file.format, JOB_FORMAT_TEXT);
    for (int format = JOB_FORMAT_BINARY; format <= JOB_FORMAT_JSON; format++) {
        struct job_file again;
        assert_int_equal(jobfile_save(file.spec, in_dir("again"), (enum job_format)format, &err), 0);
        if (jobfile_load(&again, in_dir("again"), JOB_FORMAT_AUTO, false, &err))
            fail_msg("%s", err.message);
        assert_int_equal(again.format, format);
        assert_true(reflect_equal(&file.spec->base, &again.spec->base));
        jobfile_free(&again);
        struct buffer out;
        buffer_init(&out, 1 << 16);
        assert_int_equal(jobfile_write(file.spec, (enum job_format)format, &out, &err), 0);
        if (format == JOB_FORMAT_TEXT)
            assert_string_equal((char *)out.data, text_spec);
        buffer_free(&out);
    }
    jobfile_free(&file);
}

static void expect_fault(const char *name, const void *data, size_t len, enum job_format format, const char *message)
{
    char want[768];
    assert_int_not_equal(load(name, data, len, format, false), 0);
    snprintf(want, sizeof want, "%s%s", in_dir(name), message);
    assert_string_equal(err.message, want);
    jobfile_free(&file);
}

static void test_faults_name_file_and_mend(void **state)
{
    (void)state;
    expect_fault("empty", "", 0, JOB_FORMAT_AUTO, " is empty");
    expect_fault("blank", " \n\t\r\n", 5, JOB_FORMAT_AUTO, " is empty");
    assert_true(err.hint[0]);
    expect_fault("cut.pb",
                 "\x08\x01\x12\x05"
                 "ab",
                 6, JOB_FORMAT_AUTO, ": the data are cut off at byte 6, inside name");
    assert_non_null(strstr(err.hint, "make it again"));
    expect_fault("job.pbtxt", "model { rnk: 3 }", 16, JOB_FORMAT_AUTO,
                 ":1:9: unknown field 'rnk' in model; did you mean 'rank'?");
    expect_fault("job.json", "{\"nme\": 1}", 10, JOB_FORMAT_AUTO,
                 ": unknown field 'nme' in JobSpec; did you mean 'name'?");
    expect_fault("forced", "name: \"a\"", 9, JOB_FORMAT_JSON, ":1:4: '[' or '{' expected near 'name'");
    expect_fault("elf",
                 "\x7f"
                 "ELF\x02\x01\x01\0",
                 8, JOB_FORMAT_AUTO, ": after[0]: wire type of another kind of field at byte 1");

    assert_int_equal(jobfile_load(&file, in_dir("none"), JOB_FORMAT_AUTO, false, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.message, "/none: No such file"));
    jobfile_free(&file);
    assert_int_equal(jobfile_load(&file, dir, JOB_FORMAT_AUTO, false, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "is a directory, not a job file"));
    jobfile_free(&file);
    char *large = calloc(1, LIMIT_JOB_FILE + 1);
    assert_non_null(large);
    memset(large, '#', LIMIT_JOB_FILE + 1);
    assert_int_not_equal(load("large", large, LIMIT_JOB_FILE + 1, JOB_FORMAT_AUTO, false), 0);
    assert_non_null(strstr(err.message, "is larger than the limit of 1048576 bytes"));
    jobfile_free(&file);
    assert_int_equal(load("fits", large, LIMIT_JOB_FILE, JOB_FORMAT_AUTO, false), 0); /* one long comment */
    jobfile_free(&file);
    free(large);
}

/* Every strict prefix of a packed spec is a clear error or a smaller spec, never a wrong reading of it. */
static void test_cut_binary(void **state)
{
    (void)state;
    assert_int_equal(load("job", text_spec, strlen(text_spec), JOB_FORMAT_AUTO, false), 0);
    struct buffer packed;
    buffer_init(&packed, 1 << 16);
    assert_int_equal(jobfile_write(file.spec, JOB_FORMAT_BINARY, &packed, &err), 0);
    int whole = 0;
    for (size_t len = 1; len < packed.len; len++) {
        struct job_file cut;
        int rc = jobfile_parse(&cut, "cut.pb", packed.data, len, JOB_FORMAT_BINARY, false, &err);
        if (rc)
            assert_non_null(strstr(err.message, "cut.pb: the data are cut off at byte"));
        else
            assert_int_equal(protobuf_c_message_get_packed_size(&cut.spec->base), len);
        whole += !rc;
        jobfile_free(&cut);
    }
    assert_int_equal(whole, 3); /* after spec_version, name, model */
    buffer_free(&packed);
    jobfile_free(&file);
}

static void test_unknown_fields(void **state)
{
    (void)state;
    static const char binary[] = "\x08\x01\x98\x06\x05\x1a\x03\x90\x03\x01";
    assert_int_equal(load("new.pb", binary, sizeof binary - 1, JOB_FORMAT_AUTO, false), ERR_INVALID);
    assert_non_null(strstr(err.message, "new.pb: unknown field numbers: #99, model.#50"));
    assert_non_null(strstr(err.hint, "--allow-unknown"));
    jobfile_free(&file);
    assert_int_equal(load("new.pb", binary, sizeof binary - 1, JOB_FORMAT_AUTO, true), 0);
    assert_string_equal((char *)file.unknown.data, "#99, model.#50");
    struct buffer out;
    buffer_init(&out, 4096);
    assert_int_equal(jobfile_write(file.spec, JOB_FORMAT_BINARY, &out, &err), 0);
    assert_int_equal(out.len, sizeof binary - 1); /* kept on the way through */
    buffer_clear(&out);
    assert_int_equal(jobfile_write(file.spec, JOB_FORMAT_TEXT, &out, &err), 0);
    assert_string_equal((char *)out.data,
                        "spec_version: 1\nmodel {\n  # unknown field 50, 1 bytes\n}\n# unknown field 99, 1 bytes\n");
    buffer_free(&out);
    jobfile_free(&file);
    assert_int_equal(load("new.pbtxt", "new: 1 name: 'a'", 16, JOB_FORMAT_AUTO, true), 0);
    assert_string_equal((char *)file.unknown.data, "new");
    jobfile_free(&file);
}

/* ---- --set ---- */

static void set_ok(const char *assignment)
{
    if (jobfile_set(file.spec, &file.arena, assignment, &err))
        fail_msg("%s: %s", assignment, err.message);
}

static void set_bad(const char *assignment, const char *message)
{
    assert_int_not_equal(jobfile_set(file.spec, &file.arena, assignment, &err), 0);
    assert_string_equal(err.message, message);
}

static void test_set(void **state)
{
    (void)state;
    assert_int_equal(load("job", text_spec, strlen(text_spec), JOB_FORMAT_AUTO, false), 0);
    Boost__JobSpec *s = file.spec;
    set_ok("optimizer.lr=1e-3");
    assert_true(s->optimizer->has_lr && s->optimizer->lr == 1e-3);
    set_ok("model.hidden=0x80");
    set_ok("parallel.strategy=BTP");
    set_ok("model.tie_embeddings=true");
    set_ok("name=two words = one \"name\"");
    assert_string_equal(s->name, "two words = one \"name\"");
    set_ok("name=\"quoted\\n\"");
    assert_string_equal(s->name, "quoted\n");
    set_ok("name=");
    assert_string_equal(s->name, "");
    assert_true(s->model->hidden == 128 && s->model->tie_embeddings &&
                s->parallel->strategy == BOOST__STRATEGY__VALUE__BTP);
    set_ok("model.hidden=");
    assert_false(s->model->has_hidden);
    set_ok("data.train[0].path=new.bin");
    set_ok("data.train[1].path=second");
    set_ok("data.train[1].weight=.5");
    assert_true(s->data->n_train == 2 && s->data->train[1]->weight == 0.5);
    assert_string_equal(s->data->train[0]->path, "new.bin");
    set_ok("data.eval=[{path: \"x\"}, <path: 'y'>]");
    assert_int_equal(s->data->n_eval, 2);
    set_ok("after=afterok:1");
    set_ok("after+=afterok:2");
    set_ok("after+=[\"afterok:3\", 'afterok:4']");
    set_ok("after[1]=afterok:22");
    assert_int_equal(s->n_after, 4);
    assert_string_equal(s->after[1], "afterok:22");
    assert_string_equal(s->after[3], "afterok:4");
    set_ok("after=afterok:5");
    assert_int_equal(s->n_after, 1);
    set_ok("after=");
    assert_int_equal(s->n_after, 0);
    set_ok("checkpoint={dir: \"c\" init_from { path: \"p\" }}");
    assert_string_equal(s->checkpoint->init_from->path, "p");
    set_ok("checkpoint.init_from=");
    assert_null(s->checkpoint->init_from);
    set_ok("run.steps=5");
    set_ok("run.steps=6"); /* not "given a second time" */
    assert_int_equal(s->run->steps, 6);
    jobfile_free(&file);
}

static void test_set_faults(void **state)
{
    (void)state;
    assert_int_equal(load("job", text_spec, strlen(text_spec), JOB_FORMAT_AUTO, false), 0);
    set_bad("optimizer.lrr=1", "cannot set optimizer.lrr: unknown field 'lrr' in optimizer; did you mean 'lr'?");
    set_bad("optmizer.lr=1", "cannot set optmizer.lr: unknown field 'optmizer' in JobSpec; did you mean 'optimizer'?");
    set_bad("lr=1", "cannot set lr: unknown field 'lr' in JobSpec; did you mean 'optimizer.lr'?");
    set_bad("key=1", "cannot set key: unknown field 'key' in JobSpec; did you mean 'label[0].key'?");
    set_bad("resources.device=GPU", "cannot set resources.device: resources.device cannot be 'GPU' (one of AUTO CPU "
                                    "CUDA); did you mean 'CUDA'?");
    set_bad("resources.device=CPUU", "cannot set resources.device: resources.device cannot be 'CPUU' (one of AUTO CPU "
                                     "CUDA); did you mean 'CPU'?");
    set_bad("parallel.strategy=BTTP", "cannot set parallel.strategy: parallel.strategy cannot be 'BTTP' (one of FULL "
                                      "VANILLA BTP); did you mean 'BTP'?");
    set_bad("model.hidden=big", "cannot set model.hidden: model.hidden: expected a whole number, found 'big'");
    set_bad("model.hidden=64 65", "cannot set model.hidden: model.hidden: expected nothing more, found '65'");
    assert_true(file.spec->model->hidden == 64); /* a bad value changes nothing */
    set_bad("model.hidden.x=1", "cannot set model.hidden.x: model.hidden is a int32: it has no fields");
    set_bad("model[0].hidden=1", "cannot set model[0].hidden: model is not a list: leave out the index");
    set_bad("data.train.path=a", "cannot set data.train.path: data.train is a list");
    assert_string_equal(err.hint, "say which entry: data.train[0]");
    set_bad("data.train[2].path=a", "cannot set data.train[2].path: train has 1 entries, there is no [2]");
    set_bad("data.train[x].path=a", "cannot set data.train[x].path: expected [number] at '[x].path=a'");
    set_bad("data.train=3", "cannot set data.train: data.train: expected '{', found '3'");
    assert_int_equal(file.spec->data->n_train, 1);
    set_bad("name+=x", "cannot set name: += appends to a list, and name is none");
    set_bad("name", "'name' is not an assignment");
    assert_int_equal(err.code, ERR_USAGE);
    set_bad("=1", "cannot set : expected a field name at '=1'");
    set_bad("model..hidden=1", "cannot set model..hidden: expected a field name at '.hidden=1'");
    set_bad("name!=1", "cannot set name!: expected '=' at '!=1'");
    jobfile_free(&file);
}

/* A message that another allocator owns can be edited too; what is added lives in the arena. */
static void test_set_on_unpacked_message(void **state)
{
    (void)state;
    Boost__JobSpec *s = boost__job_spec__unpack(NULL, 9,
                                                (const uint8_t *)"\x12\x01"
                                                                 "a"
                                                                 "\x7a\x01"
                                                                 "b"
                                                                 "\x7a\x01"
                                                                 "c");
    assert_non_null(s);
    struct arena arena;
    arena_init(&arena, 1 << 20);
    char *name = s->name, **after = s->after;
    size_t n_after = s->n_after;
    assert_int_equal(jobfile_set(s, &arena, "name=new", &err), 0);
    assert_int_equal(jobfile_set(s, &arena, "after+=d", &err), 0);
    assert_int_equal(s->n_after, 3);
    assert_string_equal(s->after[0], "b");
    assert_string_equal(s->after[2], "d");
    s->name = name;
    s->after = after;
    s->n_after = n_after;
    boost__job_spec__free_unpacked(s, NULL);
    arena_free(&arena);
}

static void test_absolute_paths(void **state)
{
    (void)state;
    const char *text =
        "workdir: 'w' data { train { path: 'a/b' } train { path: '/abs' } train { path: 'https://x/y' } train {}\n"
        "eval { path: './e' } cache_dir: '' } checkpoint { dir: './/ckpt' init_from { path: 'job:17@8000' } }\n"
        "run { tensorboard_dir: '.' } notify { secret_file: '../s' }";
    assert_int_equal(jobfile_parse(&file, "t", text, strlen(text), JOB_FORMAT_AUTO, false, &err), 0);
    assert_int_equal(jobfile_check_paths(file.spec, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "relative path"));
    assert_int_equal(jobfile_absolute_paths(file.spec, &file.arena, "/home/u", &err), 0);
    assert_int_equal(jobfile_check_paths(file.spec, &err), 0);
    const Boost__JobSpec *s = file.spec;
    assert_string_equal(s->workdir, "/home/u/w");
    assert_string_equal(s->data->train[0]->path, "/home/u/a/b");
    assert_string_equal(s->data->train[1]->path, "/abs");
    assert_string_equal(s->data->train[2]->path, "https://x/y");
    assert_null(s->data->train[3]->path);
    assert_string_equal(s->data->eval[0]->path, "/home/u/e");
    assert_string_equal(s->data->cache_dir, "");
    assert_string_equal(s->checkpoint->dir, "/home/u/ckpt");
    assert_string_equal(s->checkpoint->init_from->path, "job:17@8000");
    assert_string_equal(s->run->tensorboard_dir, "/home/u");
    assert_string_equal(s->notify->secret_file, "/home/u/../s");
    assert_int_equal(jobfile_absolute_paths(file.spec, &file.arena, "rel", &err), ERR_INVALID);
    jobfile_free(&file);
    Boost__JobSpec empty = BOOST__JOB_SPEC__INIT;
    struct arena arena;
    arena_init(&arena, 1 << 16);
    assert_int_equal(jobfile_absolute_paths(&empty, &arena, "/", &err), 0);
    arena_free(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats_by_content),
        cmocka_unit_test(test_load_and_save_in_each),
        cmocka_unit_test(test_faults_name_file_and_mend),
        cmocka_unit_test(test_cut_binary),
        cmocka_unit_test(test_unknown_fields),
        cmocka_unit_test(test_set),
        cmocka_unit_test(test_set_faults),
        cmocka_unit_test(test_set_on_unpacked_message),
        cmocka_unit_test(test_absolute_paths),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
