/* What an agent does to files for the controller: preflight, what lies in a cache,
 * manifest, verification, removal, kept logs, and as whom. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "daemon/agent_cache.h"
#include "daemon/agent_checkpoint.h"
#include "daemon/agent_logs.h"
#include "daemon/agent_preflight.h"
#include "daemon/agent_user.h"
#include "worker/plan/plan.h"
#include "proto/base/crc32c.h"
#include "proto/base/fs.h"

enum { NOBODY = 65534, WORLD = 2 };

static char dir[PATH_MAX];
static struct error err;
static Boost__Reason__Value reason;

static Boost__JobSpec spec;
static Boost__Data data;
static Boost__TokenFile train, *trains[] = {&train}, eval, *evals[] = {&eval};
static Boost__Checkpoint checkpoint;
static Boost__Parallel parallel;
static Boost__Run run;
static char train_path[PATH_MAX], checkpoint_path[PATH_MAX], step_path[PATH_MAX];

static void path_in(char out[PATH_MAX], const char *name)
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, dir, name), 0);
}

static void put(const char *path, const char *content, size_t len)
{
    assert_int_equal(fs_write_atomic(path, content, len, 0644, NULL), 0);
}

static int setup(void **state)
{
    (void)state;
    const char *base = getenv("BOOST_TEST_DIR");
    snprintf(dir, sizeof dir, "%s/files-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(dir));
    assert_int_equal(chmod(dir, 0755), 0);
    path_in(train_path, "train.bin");
    path_in(checkpoint_path, "ckpt/new");
    path_in(step_path, "ckpt/0badcafe-17/step-120.a2");
    boost__job_spec__init(&spec);
    boost__data__init(&data);
    boost__token_file__init(&train);
    boost__token_file__init(&eval);
    boost__checkpoint__init(&checkpoint);
    boost__parallel__init(&parallel);
    boost__run__init(&run);
    spec.data = &data;
    spec.checkpoint = &checkpoint;
    spec.parallel = &parallel;
    spec.run = &run;
    data.train = trains;
    data.n_train = 1;
    data.has_format = data.has_seq_len = true;
    data.format = BOOST__FORMAT__VALUE__U16;
    data.seq_len = 8;
    train.path = train_path;
    checkpoint.dir = checkpoint_path;
    parallel.has_tp = parallel.has_global_batch = run.has_seed = data.has_seed = true;
    parallel.tp = 2;
    parallel.global_batch = 32;
    run.seed = 5;
    data.seed = 6;
    put(train_path, "0123456789abcdef01", 18); /* 9 tokens: just one window */
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static int preflight(void)
{
    reason = BOOST__REASON__VALUE__NONE;
    return agent_preflight(&spec, NULL, (uint32_t)geteuid(), (uint32_t)getegid(), &reason, &err);
}

static void expect_fault(int code, Boost__Reason__Value why, const char *text)
{
    assert_int_equal(preflight(), code);
    assert_int_equal(reason, why);
    if (!strstr(err.message, text))
        fail_msg("'%s' is not in '%s'", text, err.message);
    assert_true(err.hint[0]);
}

static void test_preflight(void **state)
{
    (void)state;
    assert_int_equal(preflight(), 0);
    struct stat st;
    assert_int_equal(stat(checkpoint_path, &st), 0); /* made */
    assert_int_equal(rmdir(checkpoint_path), 0);     /* and empty: no probe is left */
    data.seq_len = 9;
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "9 tokens are fewer than one window of seq_len + 1 = 10");
    assert_string_equal(err.hint, "give a longer file or set data.seq_len to at most 8");
    put(train_path, "01", 2);
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "1 tokens are fewer than one window");
    assert_string_equal(err.hint, "give a longer file"); /* no seq_len makes a window of it */
    data.seq_len = 4;
    put(train_path, "0123456789abcdef0", 17);
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "not a whole number of 2-byte tokens");
    data.format = BOOST__FORMAT__VALUE__TEXT;
    assert_int_equal(preflight(), 0);
    data.format = BOOST__FORMAT__VALUE__LLMC;
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "17 bytes are fewer than the 1024 of an llm.c header");
    data.format = BOOST__FORMAT__VALUE__MEGATRON;
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "train.idx");
    char index_path[PATH_MAX];
    path_in(index_path, "train.idx");
    static const char index[] = "MMIDIDX\0\0\1\0\0\0\0\0\0\0\1" /* ids of 1 byte */
                                "\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\x11\0\0\0" "\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0";
    put(index_path, index, sizeof index);
    assert_int_equal(preflight(), 0);
    data.format = BOOST__FORMAT__VALUE__AUTO; /* by what lies beside train.bin */
    assert_int_equal(preflight(), 0);
    put(index_path, index, sizeof index - 1);
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "train.idx ends at byte 53");
    assert_int_equal(unlink(index_path), 0);
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "llm.c header");
    data.format = BOOST__FORMAT__VALUE__TEXT;
    data.eval = evals;
    data.n_eval = 1;
    eval.path = "/no/such/val.txt";
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "/no/such/val.txt");
    eval.path = dir;
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__DataError, "not a regular file");
    eval.path = "https://example.org/val.txt";
    assert_int_equal(preflight(), 0); /* what it is about is looked at by agent_data */
    data.n_eval = 0;
    checkpoint.dir = "/dev/null/ckpt";
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__SpecError, "/dev/null is not a directory");
    checkpoint.dir = "/proc/ckpt"; /* read-only for root as well */
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__SpecError, "/proc/ckpt");
    checkpoint.dir = checkpoint_path;
    /* A model of 12 bytes a parameter, weights and two moments, against what the file system has. */
    struct statvfs fs;
    assert_int_equal(statvfs(checkpoint_path, &fs), 0);
    Boost__Model model = BOOST__MODEL__INIT;
    Boost__Optimizer optimizer = BOOST__OPTIMIZER__INIT;
    Boost__Parallel layout = BOOST__PARALLEL__INIT;
    spec.has_spec_version = model.has_factorization = model.has_hidden = model.has_layers = model.has_heads = true;
    model.has_intermediate = model.has_vocab = optimizer.has_lr = run.has_steps = layout.has_global_batch = true;
    spec.spec_version = 1;
    spec.name = "big";
    model.factorization = BOOST__FACTORIZATION__VALUE__FULL_RANK;
    model.hidden = model.intermediate = 256;
    model.layers = model.heads = 1;
    model.vocab = 256;
    optimizer.lr = 1e-3;
    run.steps = layout.global_batch = 1;
    layout.has_strategy = true;
    layout.strategy = BOOST__STRATEGY__VALUE__FULL;
    spec.model = &model;
    spec.optimizer = &optimizer;
    spec.parallel = &layout;
    struct plan_machine machine = {.memory_bytes = INT64_C(1) << 50};
    Boost__JobSpec *resolved;
    if (plan_resolve(&spec, &machine, &resolved, &err))
        fail_msg("%s", err.message);
    assert_int_equal(agent_preflight(resolved, NULL, (uint32_t)geteuid(), (uint32_t)getegid(), &reason, &err), 0);
    resolved->model->hidden = resolved->model->intermediate = 32768;
    resolved->model->heads = resolved->model->kv_heads = 256;
    resolved->model->layers = 1000; /* some 90 TB */
    if ((double)fs.f_bavail * (double)fs.f_frsize > 8e13)
        skip();
    assert_int_equal(agent_preflight(resolved, NULL, (uint32_t)geteuid(), (uint32_t)getegid(), &reason, &err), ERR_NOSPACE);
    assert_int_equal(reason, BOOST__REASON__VALUE__DiskFull);
    assert_non_null(strstr(err.message, "MiB, and a checkpoint takes "));
    boost__job_spec__free_unpacked(resolved, NULL);
    spec.model = NULL;
    spec.parallel = &parallel;
    spec.workdir = "/no/such/workdir";
    expect_fault(ERR_INVALID, BOOST__REASON__VALUE__SpecError, "/no/such/workdir");
}

/* A yes is remembered of this worker with this library, and of no other pair. */
static void test_the_cuda_check_is_remembered(void **state)
{
    (void)state;
    char worker[PATH_MAX], library[PATH_MAX], calls[PATH_MAX], text[PATH_MAX + 64];
    static const size_t asked[] = {1, 1, 2, 2, 3};
    path_in(worker, "worker.sh");
    path_in(library, "boost-cuda.so");
    path_in(calls, "calls");
    int len = snprintf(text, sizeof text, "#!/bin/sh\nprintf x >>%s\n", calls);
    assert_int_equal(fs_write_atomic(worker, text, (size_t)len, 0755, NULL), 0);
    setenv("BOOST_CUDA_LIBRARY", library, 1);
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        struct stat st;
        if (i == 2)
            put(library, "another", 7);
        if (i == 4)
            assert_int_equal(unlink(library), 0);
        assert_int_equal(agent_preflight_cuda(worker, &err), 0);
        assert_int_equal(stat(calls, &st), 0);
        assert_int_equal(st.st_size, asked[i]);
    }
    unsetenv("BOOST_CUDA_LIBRARY");
}

/* The directory in checkpoint.dir that the checkpoints really go to may be there already, and be something else. */
static void test_own_directory(void **state)
{
    (void)state;
    char own[PATH_MAX];
    uint32_t uid = (uint32_t)geteuid(), gid = (uint32_t)getegid();
    int used = snprintf(own, sizeof own, "%s/store-7", checkpoint_path);
    assert_true(used > 0 && (size_t)used < sizeof own);
    assert_int_equal(agent_preflight(&spec, own, uid, gid, &reason, &err), 0);
    assert_int_equal(agent_preflight(&spec, own, uid, gid, &reason, &err), 0); /* at the next attempt too */
    assert_int_equal(rmdir(own), 0);                                           /* no probe is left */
    put(own, "", 0);
    assert_int_equal(agent_preflight(&spec, own, uid, gid, &reason, &err), ERR_INVALID);
    assert_int_equal(reason, BOOST__REASON__VALUE__SpecError);
    assert_non_null(strstr(err.message, own));
    assert_true(err.hint[0]);
    assert_int_equal(unlink(own), 0);
    if (geteuid() != 0)
        return;
    assert_int_equal(chmod(checkpoint_path, 0777), 0);
    assert_int_equal(mkdir(own, 0755), 0); /* somebody else's */
    assert_int_equal(agent_preflight(&spec, own, NOBODY, NOBODY, &reason, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, own));
    assert_non_null(strstr(err.message, "cannot be written"));
    assert_int_equal(chown(own, NOBODY, NOBODY), 0);
    assert_int_equal(agent_preflight(&spec, own, NOBODY, NOBODY, &reason, &err), 0);
}

static bool nobody_finds(const char *path, bool directory)
{
    const struct agent_remote by = {.uid = NOBODY, .gid = NOBODY};
    const struct cache c = {.by = &by};
    struct as_user user;
    assert_int_equal(as_user_begin(&user, NOBODY, NOBODY, &err), 0);
    bool found = cache_has(&c, path, directory);
    as_user_end(&user);
    return found;
}

static void test_what_a_cache_holds(void **state)
{
    (void)state;
    char path[PATH_MAX];
    if (geteuid() != 0)
        skip();
    path_in(path, "entry");
    put(path, "x", 1);
    assert_int_equal(chmod(path, 0644), 0);
    assert_true(nobody_finds(path, false)); /* root's, for all */
    assert_false(nobody_finds(path, true));
    assert_int_equal(chmod(path, 0600), 0);
    assert_false(nobody_finds(path, false));
    assert_int_equal(chown(path, NOBODY, NOBODY), 0);
    assert_true(nobody_finds(path, false));
    assert_int_equal(chown(path, NOBODY - 1, NOBODY), 0);
    assert_int_equal(chmod(path, 0666), 0);
    assert_false(nobody_finds(path, false)); /* somebody else's */
    assert_int_equal(unlink(path), 0);
    assert_false(nobody_finds(path, false));
}

static void test_as_the_jobs_user(void **state)
{
    (void)state;
    if (geteuid() != 0) { /* another user's job cannot be served */
        assert_int_equal(agent_preflight(&spec, NULL, (uint32_t)geteuid() + 1, (uint32_t)getegid(), &reason, &err),
                         ERR_REFUSED);
        return;
    }
    char owned[PATH_MAX];
    struct stat st;
    path_in(owned, "owned");
    assert_int_equal(mkdir(owned, 0755), 0);
    checkpoint.dir = owned;
    assert_int_equal(agent_preflight(&spec, NULL, NOBODY, NOBODY, &reason, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "cannot be written"));
    assert_int_equal(chown(owned, NOBODY, NOBODY), 0);
    assert_int_equal(agent_preflight(&spec, NULL, NOBODY, NOBODY, &reason, &err), 0);
    assert_int_equal(chmod(train_path, 0600), 0);
    assert_int_equal(agent_preflight(&spec, NULL, NOBODY, NOBODY, &reason, &err), ERR_INVALID);
    assert_int_equal(reason, BOOST__REASON__VALUE__DataError);
    assert_non_null(strstr(err.message, "cannot be read"));
    /* What is made belongs to the user, and root is root again afterwards. */
    struct as_user user;
    assert_int_equal(as_user_begin(&user, NOBODY, NOBODY, &err), 0);
    path_in(owned, "owned/file");
    put(owned, "x", 1);
    as_user_end(&user);
    assert_int_equal(stat(owned, &st), 0);
    assert_int_equal(st.st_uid, NOBODY);
    path_in(owned, "root");
    put(owned, "x", 1);
    assert_int_equal(stat(owned, &st), 0);
    assert_int_equal(st.st_uid, 0);
}

/* ---- checkpoints ---- */

static Boost__ShardRecord shards[WORLD], *shard_list[WORLD];
static char names[WORLD][32], contents[WORLD][5000];
static Boost__WriteManifest manifest;
static Boost__VerifyCheckpoint verify;

static void shard_file(int rank, char out[PATH_MAX])
{
    assert_int_equal(fs_join(out, PATH_MAX, NULL, step_path, names[rank]), 0);
}

static void make_checkpoint(void)
{
    char path[PATH_MAX];
    assert_int_equal(fs_make_dirs(step_path, 0755, NULL), 0);
    for (int i = 0; i < WORLD; i++) {
        snprintf(names[i], sizeof names[i], "rank-0000%d.safetensors", i);
        memset(contents[i], 'a' + i, sizeof contents[i]);
        shard_file(i, path);
        put(path, contents[i], sizeof contents[i]);
        boost__shard_record__init(&shards[i]);
        shards[i].has_step = shards[i].has_rank = shards[i].has_bytes = shards[i].has_crc32c = true;
        shards[i].step = 120;
        shards[i].rank = i;
        shards[i].bytes = sizeof contents[i];
        shards[i].crc32c = crc32c(0, contents[i], sizeof contents[i]);
        shards[i].file = names[i];
        shard_list[i] = &shards[i];
    }
    boost__write_manifest__init(&manifest);
    boost__verify_checkpoint__init(&verify);
    manifest.dir = verify.dir = step_path;
    manifest.has_step = manifest.has_attempt = manifest.has_world = verify.has_step = verify.has_attempt = true;
    manifest.step = verify.step = 120;
    manifest.attempt = verify.attempt = 2;
    manifest.world = WORLD;
    manifest.shards = verify.shards = shard_list;
    manifest.n_shards = verify.n_shards = WORLD;
    manifest.spec = &spec;
    manifest.store_id = "0badcafe";
}

static void test_manifest(void **state)
{
    (void)state;
    char path[PATH_MAX];
    make_checkpoint();
    assert_int_equal(checkpoint_verify(&verify, &err), ERR_NOT_FOUND); /* shards alone are no checkpoint */
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    assert_int_equal(fs_join(path, sizeof path, NULL, step_path, "manifest.json"), 0);
    json_t *m = json_load_file(path, 0, NULL);
    assert_non_null(m);
    assert_int_equal(json_integer_value(json_object_get(m, "job")), 17);
    assert_int_equal(json_integer_value(json_object_get(m, "step")), 120);
    assert_int_equal(json_integer_value(json_object_get(m, "data_position")), 120 * 32);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "layout"), "tp")), 2);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "seeds"), "init")), 5);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "seeds"), "data")), 6);
    json_t *shard = json_array_get(json_object_get(m, "shards"), 1);
    assert_string_equal(json_string_value(json_object_get(shard, "file")), names[1]);
    assert_int_equal(json_integer_value(json_object_get(shard, "crc32c")), shards[1].crc32c);
    json_t *parallel_json = json_object_get(json_object_get(m, "spec"), "parallel");
    assert_int_equal(json_integer_value(json_object_get(parallel_json, "global_batch")), 32);
    json_decref(m);
    assert_int_equal(checkpoint_verify(&verify, &err), 0);
    verify.n_shards = 0; /* by the manifest's own list */
    assert_int_equal(checkpoint_verify(&verify, &err), 0);
}

static void test_find(void **state)
{
    (void)state;
    struct arena mem;
    Boost__TaskReply found = BOOST__TASK_REPLY__INIT;
    char parent[PATH_MAX], other[PATH_MAX], path[PATH_MAX];
    arena_init(&mem, 1 << 20);
    make_checkpoint();
    snprintf(parent, sizeof parent, "%s", step_path);
    *strrchr(parent, '/') = '\0';
    assert_int_equal(checkpoints_find(parent, &mem, &found, &err), 0); /* no manifest yet: not a checkpoint */
    assert_int_equal(found.n_found, 0);
    /* Copied there from another job, or of another controller's. */
    assert_int_equal(checkpoint_write_manifest(&manifest, 1, &err), 0);
    assert_int_equal(checkpoints_find(parent, &mem, &found, &err), 0);
    assert_int_equal(found.n_found, 0);
    manifest.store_id = "0badcaff";
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    assert_int_equal(checkpoints_find(parent, &mem, &found, &err), 0);
    assert_int_equal(found.n_found, 0);
    manifest.store_id = "0badcafe";
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    static const char *const others[] = {"step-200.a3", "step-x.a1", "step-7.a0", "step-9.a1.deleting"};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(fs_join(other, sizeof other, NULL, parent, others[i]), 0);
        assert_int_equal(fs_make_dirs(other, 0755, &err), 0);
        assert_int_equal(fs_join(path, sizeof path, NULL, other, "manifest.json"), 0);
        assert_int_equal(fs_write_atomic(path, "{\"schema\": \"boost.checkpoint/1\"", 32, 0644, &err), 0);
    }
    assert_int_equal(checkpoints_find(parent, &mem, &found, &err), 0);
    assert_int_equal(found.n_found, 1);
    const Boost__FoundCheckpoint *f = found.found[0];
    assert_int_equal(f->step, 120);
    assert_int_equal(f->attempt, 2);
    assert_int_equal(f->n_shards, WORLD);
    for (int r = 0; r < WORLD; r++) {
        assert_int_equal(f->shards[r]->rank, r);
        assert_string_equal(f->shards[r]->file, shard_list[r]->file);
        assert_int_equal(f->shards[r]->bytes, shard_list[r]->bytes);
        assert_int_equal(f->shards[r]->crc32c, shard_list[r]->crc32c);
    }
    assert_int_equal(checkpoints_find("/nowhere/at/all", &mem, &found, &err), 0);
    assert_int_equal(found.n_found, 0);
    assert_int_equal(checkpoints_find("relative", &mem, &found, &err), ERR_PROTOCOL);
    arena_free(&mem);
}

static void test_manifest_refuses(void **state)
{
    (void)state;
    char path[PATH_MAX];
    make_checkpoint();
    manifest.n_shards = 1;
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), ERR_INVALID);
    manifest.n_shards = WORLD;
    shards[1].rank = 0; /* one rank twice */
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), ERR_INVALID);
    shards[1].rank = 1;
    shards[1].file = "../../secret";
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), ERR_REFUSED);
    shards[1].file = names[1];
    manifest.attempt = 3;
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), ERR_REFUSED);
    manifest.attempt = 2;
    shard_file(1, path);
    put(path, "short", 5);
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), ERR_CORRUPT);
    assert_non_null(strstr(err.message, names[1]));
    assert_int_equal(fs_join(path, sizeof path, NULL, step_path, "manifest.json"), 0);
    assert_false(fs_exists(path));
}

static void expect_damage(int code, const char *text)
{
    for (int i = 0; i < 2; i++) { /* by the order's list and by the manifest's */
        verify.n_shards = i ? 0 : WORLD;
        assert_int_equal(checkpoint_verify(&verify, &err), code);
        assert_non_null(strstr(err.message, text));
    }
}

static void test_verify_names_the_damage(void **state)
{
    (void)state;
    char path[PATH_MAX];
    make_checkpoint();
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    shard_file(1, path);
    contents[1][4321] ^= 1; /* one bit */
    put(path, contents[1], sizeof contents[1]);
    expect_damage(ERR_CORRUPT, names[1]);
    put(path, contents[1], 100);
    expect_damage(ERR_CORRUPT, "has 100 bytes, 5000 were written");
    unlink(path);
    expect_damage(ERR_NOT_FOUND, names[1]);
    verify.step = 121;
    assert_int_equal(checkpoint_verify(&verify, &err), ERR_REFUSED);
    verify.step = 120;
    assert_int_equal(fs_join(path, sizeof path, NULL, step_path, "manifest.json"), 0);
    put(path, "{\"schema\": \"boost.ch", 20);
    expect_damage(ERR_CORRUPT, "manifest.json");
}

/* What stands in the place of a file: never waited for, never followed, never "try again later". */
static void test_what_cannot_be_looked_at_is_no_damage(void **state)
{
    (void)state;
    struct arena mem;
    char **faults, path[PATH_MAX], name[300];
    size_t n;
    arena_init(&mem, 1 << 20);
    make_checkpoint();
    assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    shards[1].file = name; /* ENAMETOOLONG, in place of a disk that fails */
    assert_int_equal(checkpoint_faults(&verify, &mem, &faults, &n, &err), ERR_IO);
    assert_int_equal(n, 0);
    shard_file(0, path);
    assert_int_equal(truncate(path, 3), 0);
    assert_int_equal(checkpoint_faults(&verify, &mem, &faults, &n, &err), 0); /* damaged whatever the other is */
    assert_int_equal(n, 1);
    assert_non_null(strstr(faults[0], "3 bytes"));
    arena_free(&mem);
}

static void test_verify_of_other_things_than_files(void **state)
{
    (void)state;
    char path[PATH_MAX], kept[PATH_MAX];
    for (int i = 0; i < 2; i++) {
        make_checkpoint();
        assert_int_equal(checkpoint_write_manifest(&manifest, 17, &err), 0);
        if (i)
            assert_int_equal(fs_join(path, sizeof path, NULL, step_path, "manifest.json"), 0);
        else
            shard_file(1, path);
        const char *name = i ? "manifest.json" : names[1];
        assert_true(snprintf(kept, sizeof kept, "%s.kept", path) < (int)sizeof kept);
        assert_int_equal(rename(path, kept), 0);
        assert_int_equal(symlink(kept, path), 0);
        expect_damage(ERR_CORRUPT, name);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkfifo(path, 0644), 0);
        expect_damage(ERR_CORRUPT, name);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkdir(path, 0755), 0);
        expect_damage(ERR_CORRUPT, name);
        assert_int_equal(fs_remove_tree(step_path, &err), 0);
    }
    put(step_path, "a file", 6);
    expect_damage(ERR_CORRUPT, step_path);
    assert_int_equal(unlink(step_path), 0);
}

static void test_delete(void **state)
{
    (void)state;
    char path[PATH_MAX];
    make_checkpoint();
    assert_int_equal(checkpoint_delete(step_path, &err), 0);
    assert_false(fs_exists(step_path));
    assert_int_equal(checkpoint_delete(step_path, &err), 0); /* again */
    /* Killed between the two phases: the second call ends it. */
    snprintf(path, sizeof path, "%.*s.deleting", PATH_MAX - 20, step_path);
    assert_int_equal(fs_make_dirs(path, 0755, NULL), 0);
    assert_int_equal(checkpoint_delete(step_path, &err), 0);
    assert_false(fs_exists(path));
    static const char *const wrong[] = {"/",
                                        "/tmp",
                                        "step-1.a1",
                                        "/x/step-1",
                                        "/x/step-1.a",
                                        "/x/step-",
                                        "/x/step-1.a1/",
                                        "/x/step-1.a1/..",
                                        "/x/step-1.a1.deleting",
                                        "/x/step--1.a1",
                                        "/x/step-99999999999999999999.a1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(checkpoint_delete(wrong[i], &err), ERR_REFUSED);
    char target[PATH_MAX];
    path_in(target, "precious");
    assert_int_equal(mkdir(target, 0755), 0);
    assert_int_equal(symlink(target, step_path), 0); /* a link is not followed */
    assert_int_equal(checkpoint_delete(step_path, &err), ERR_REFUSED);
    assert_true(fs_exists(target));
}

/* Its parent is not there, as below a mount point without its file system: nothing has been deleted. */
static void test_delete_waits_for_what_is_not_mounted(void **state)
{
    (void)state;
    char parent[PATH_MAX], away[PATH_MAX], step[PATH_MAX];
    path_in(parent, "mounted");
    path_in(away, "away");
    assert_int_equal(fs_join(step, sizeof step, NULL, parent, "step-10.a1"), 0);
    assert_int_equal(fs_make_dirs(step, 0755, &err), 0);
    assert_int_equal(rename(parent, away), 0);
    assert_int_equal(checkpoint_delete(step, &err), ERR_BUSY);
    assert_non_null(strstr(err.message, "is its file system mounted?"));
    assert_string_not_equal(err.hint, "");
    put(parent, "a file", 6); /* in its place */
    assert_int_equal(checkpoint_delete(step, &err), ERR_BUSY);
    assert_int_equal(unlink(parent), 0);
    assert_int_equal(rename(away, parent), 0);
    assert_int_equal(checkpoint_delete(step, &err), 0);
    assert_false(fs_exists(step));
    assert_int_equal(checkpoint_delete(step, &err), 0);
    assert_int_equal(rmdir(parent), 0);
}

static void test_what_is_torn_goes(void **state)
{
    (void)state;
    static const char *const dirs[] = {"step-10.a1", "step-20.a2", "step-30.a3", "step-40.a4", "notes"};
    char path[PATH_MAX], parent[PATH_MAX];
    path_in(parent, "torn");
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(fs_join(path, sizeof path, NULL, parent, dirs[i]), 0);
        assert_int_equal(fs_make_dirs(path, 0755, &err), 0);
    }
    assert_int_equal(fs_join(path, sizeof path, NULL, parent, "step-20.a2/manifest.json"), 0);
    put(path, "{}", 2);
    assert_int_equal(checkpoints_clear_torn(parent, 1, 3, &err), 0);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(fs_join(path, sizeof path, NULL, parent, dirs[i]), 0);
        assert_int_equal(fs_exists(path), i != 0 && i != 2);
    }
    path_in(path, "nowhere");
    assert_int_equal(checkpoints_clear_torn(path, 1, 3, &err), 0);
}

/* ---- logs ---- */

static void make_log(const char *name, size_t bytes, time_t when)
{
    char attempt[PATH_MAX], path[PATH_MAX], text[4096] = {0};
    path_in(attempt, name);
    assert_int_equal(fs_make_dirs(attempt, 0755, NULL), 0);
    assert_int_equal(fs_join(path, sizeof path, NULL, attempt, "rank-0.log"), 0);
    put(path, text, bytes);
    struct timespec times[2] = {{.tv_sec = when}, {.tv_sec = when}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void test_logs_are_trimmed(void **state)
{
    (void)state;
    char logs[PATH_MAX], path[PATH_MAX];
    make_log("logs/b", 1000, 2000);
    make_log("logs/a", 1000, 3000);
    make_log("logs/c", 1000, 1000); /* the oldest */
    path_in(logs, "logs");
    assert_int_equal(agent_logs_trim(logs, 3000, &err), 0);
    path_in(path, "logs/c");
    assert_true(fs_exists(path));
    assert_int_equal(agent_logs_trim(logs, 2500, &err), 0);
    assert_false(fs_exists(path));
    path_in(path, "logs/b");
    assert_true(fs_exists(path));
    assert_int_equal(agent_logs_trim(logs, 0, &err), 0);
    assert_false(fs_exists(path));
    path_in(path, "logs/a");
    assert_false(fs_exists(path));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_preflight),
        TEST(test_own_directory),
        TEST(test_what_a_cache_holds),
        TEST(test_as_the_jobs_user),
        TEST(test_manifest),
        TEST(test_find),
        TEST(test_manifest_refuses),
        TEST(test_verify_names_the_damage),
        TEST(test_what_cannot_be_looked_at_is_no_damage),
        TEST(test_verify_of_other_things_than_files),
        TEST(test_delete),
        TEST(test_delete_waits_for_what_is_not_mounted),
        TEST(test_what_is_torn_goes),
        TEST(test_the_cuda_check_is_remembered),
        TEST(test_logs_are_trimmed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
