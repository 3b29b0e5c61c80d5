/* Shards from which no layout goes on: they lack, repeat or mix something, or are of another model. It is named. */
#include "tests/unit/worker/relayout.h"

static const struct pair small = {
    .name = "small", .factorization = COLA, .V = 20, .d = 8, .a = {2, 1, 2, 0, BTP}, .b = {1, 1, 1, 0, BTP}};

static void write_small(const char *name, int steps, char from[128])
{
    struct leg *l = new_leg(&small, &small.a, 0, steps);
    char to[96];
    snprintf(to, sizeof to, "%s/%s", dir, name);
    snprintf(from, 128, "%s/step-%d.a1", to, steps);
    l->to = to;
    run_leg(l);
    free_leg(l);
}

/* One rank of `c` alone (the layout must be of one) takes the checkpoint: the code, and the message. */
static int take(const struct tiny *c, const char *from, struct error *err)
{
    struct plan p;
    struct local_world *world;
    struct comms comms;
    struct engine *e;
    struct run_position at;
    error_clear(err);
    tiny_plan(c, &p);
    struct comm_layout layout = engine_layout(&p);
    assert_int_equal(local_world_create(&layout, &world, err), 0);
    assert_int_equal(local_comms_join(world, 0, &comms, err), 0);
    assert_int_equal(engine_create(&p, tiny_kernels(&p), &comms, 0, 1, &e, err), 0);
    int rc = checkpoint_restore(from, &p, e, 0, NULL, &at, err);
    engine_destroy(e);
    comms_destroy(&comms);
    local_world_destroy(world);
    return rc;
}

static void expect(const struct tiny *c, const char *from, int code, const char *const *words)
{
    struct error err;
    int rc = take(c, from, &err);
    if (rc != code)
        fail_msg("code %d, not %d: %s", rc, code, rc ? err.message : "");
    for (; *words; words++)
        if (!strstr(err.message, *words))
            fail_msg("no '%s' in: %s", *words, err.message);
}
#define EXPECT(c, from, code, ...) expect(c, from, code, (const char *const[]){__VA_ARGS__, NULL})

static void shard_of(const char *from, int rank, char out[256])
{
    snprintf(out, 256, "%s/rank-%05d-of-00004.safetensors", from, rank);
}

static void read_shard(const char *from, int rank, struct buffer *b)
{
    char path[256];
    struct error err;
    shard_of(from, rank, path);
    buffer_init(b, 1 << 24);
    assert_int_equal(fs_read_file(path, b, &err), 0);
}

static void write_shard(const char *from, int rank, const struct buffer *b, size_t len)
{
    char path[256];
    struct error err;
    shard_of(from, rank, path);
    assert_int_equal(fs_write_atomic(path, b->data, len, 0644, &err), 0);
}

/* Puts `with` in place of `text` of the same length in a shard's header. */
static void change(const char *from, int rank, const char *text, const char *with)
{
    struct buffer b;
    read_shard(from, rank, &b);
    char *at = memmem(b.data, b.len, text, strlen(text));
    assert_true(at && strlen(text) == strlen(with));
    memcpy(at, with, strlen(with));
    write_shard(from, rank, &b, b.len);
    buffer_free(&b);
}

static void damage_is_named(void **state)
{
    (void)state;
    char from[128], other[128], path[256], aside[260];
    struct buffer mine, theirs;
    struct tiny one = tiny_cut(&small, &small.b);
    struct error err;
    write_small("damage", 2, from);
    write_small("foreign", 3, other);
    assert_int_equal(take(&one, from, &err), 0);

    shard_of(from, 3, path);
    snprintf(aside, sizeof aside, "%s.x", path);
    assert_int_equal(rename(path, aside), 0);
    EXPECT(&one, from, ERR_CORRUPT, "lacks the shard rank-00003-of-00004.safetensors");
    assert_int_equal(rename(aside, path), 0);

    read_shard(from, 1, &mine);
    write_shard(from, 1, &mine, mine.len - 40);
    EXPECT(&one, from, ERR_CORRUPT, "rank-00001-of-00004", "size of the data");
    write_shard(from, 1, &mine, 100);
    EXPECT(&one, from, ERR_CORRUPT, "rank-00001-of-00004");
    read_shard(other, 1, &theirs);
    write_shard(from, 1, &theirs, theirs.len);
    EXPECT(&one, from, ERR_CORRUPT, "different checkpoints", "rank-00001-of-00004", "step 2");
    write_shard(from, 2, &mine, mine.len);
    write_shard(from, 1, &mine, mine.len);
    EXPECT(&one, from, ERR_CORRUPT, "rank-00002-of-00004", "written by rank 1");
    write_small("damage", 2, from);

    change(from, 1, "\"attempt\":\"1\"", "\"attempt\":\"2\"");
    EXPECT(&one, from, ERR_CORRUPT, "different checkpoints", "attempt 1", "rank-00001-of-00004", "has 2");
    change(from, 1, "\"attempt\":\"2\"", "\"attempt\":\"1\"");
    assert_int_equal(take(&one, from, &err), 0);

    /* A directory with shards of two worlds. */
    snprintf(path, sizeof path, "%s/rank-00000-of-00002.safetensors", from);
    assert_int_equal(fs_write_atomic(path, mine.data, mine.len, 0644, &err), 0);
    EXPECT(&one, from, ERR_CORRUPT, "shards of", "4", "2");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(fs_make_dirs(aside, 0755, &err), 0);
    EXPECT(&one, aside, ERR_CORRUPT, "has no shards");
    buffer_free(&mine);
    buffer_free(&theirs);
}

/* The rank of the given tp rank that wrote the whole slice of a tensor; what it says of it. */
static int writer_of(const char *from, int tp_rank, const char *key, char value[64])
{
    int writer = -1;
    for (int rank = tp_rank; rank < 4; rank += 2) {
        char path[256];
        struct safetensors_file f;
        struct error err;
        shard_of(from, rank, path);
        assert_int_equal(safetensors_open(&f, path, &err), 0);
        const char *text = safetensors_meta(&f, key);
        if (text) {
            assert_int_equal(writer, -1);
            writer = rank;
            snprintf(value, 64, "%s", text);
        }
        safetensors_close(&f);
    }
    assert_true(writer >= 0);
    return writer;
}

/* Writes the shard anew without one of its entries. */
static void leave_out(const char *from, int rank, const char *name)
{
    char path[256];
    struct safetensors_file f;
    struct error err;
    struct buffer data, out;
    shard_of(from, rank, path);
    assert_int_equal(safetensors_open(&f, path, &err), 0);
    struct safetensors_entry *left = calloc(f.n, sizeof *left);
    size_t n = 0;
    buffer_init(&data, 1 << 24);
    buffer_init(&out, 1 << 24);
    for (size_t i = 0; i < f.n; i++) {
        if (!strcmp(f.entries[i].name, name))
            continue;
        size_t bytes = f.entries[i].end - f.entries[i].begin;
        char *values = malloc(bytes + 1);
        assert_int_equal(safetensors_read(&f, &f.entries[i], values, &err), 0);
        left[n] = f.entries[i];
        left[n].begin = data.len;
        buffer_append(&data, values, bytes);
        left[n++].end = data.len;
        free(values);
    }
    assert_true(n == f.n - 1);
    assert_int_equal(safetensors_header(&out, left, n, f.meta, f.n_meta, 0, &err), 0);
    buffer_append(&out, data.data, data.len);
    write_shard(from, rank, &out, out.len);
    buffer_free(&data);
    buffer_free(&out);
    free(left);
    safetensors_close(&f);
}

/* q.A is [4, 8], cut by columns in two. */
static void gaps_and_overlaps_are_named(void **state)
{
    (void)state;
    char from[128], value[64], shard[2][64], text[128], with[128];
    const char *key = "shard:layers.1.q.A";
    struct tiny one = tiny_cut(&small, &small.b);
    struct error err;
    write_small("overlap", 2, from);
    int left = writer_of(from, 0, key, value), right = writer_of(from, 1, key, value);
    assert_string_equal(value, "4,8,0,4");
    snprintf(shard[0], sizeof shard[0], "rank-%05d-of-00004", left);
    snprintf(shard[1], sizeof shard[1], "rank-%05d-of-00004", right);
    snprintf(text, sizeof text, "\"%s\":\"4,8,0,4\"", key);
    snprintf(with, sizeof with, "\"%s\":\"4,8,0,3\"", key);
    change(from, right, text, with);
    EXPECT(&one, from, ERR_CORRUPT, "rows 0 to 3, columns 3 to 3 of tensor layers.1.q.A twice", shard[0], shard[1]);
    change(from, right, with, text);
    snprintf(with, sizeof with, "\"%s\":\"4,8,1,4\"", key);
    change(from, right, text, with);
    EXPECT(&one, from, ERR_CORRUPT, shard[1], "layers.1.q.A' is impossible");
    snprintf(with, sizeof with, "\"%s\":\"4,8,0;4\"", key);
    write_small("overlap", 2, from);
    change(from, right, text, with);
    EXPECT(&one, from, ERR_CORRUPT, shard[1], "layers.1.q.A' does not say");
    write_small("overlap", 2, from);
    assert_int_equal(take(&one, from, &err), 0);
    leave_out(from, right, "layers.1.q.A.m");
    EXPECT(&one, from, ERR_CORRUPT, "not all of tensor layers.1.q.A.m: rows 0 to 3, columns 0 to 7", shard[0]);
    assert_null(strstr((take(&one, from, &err), err.message), shard[1]));
    leave_out(from, left, "layers.1.q.A.m");
    EXPECT(&one, from, ERR_INVALID, "has no tensor layers.1.q.A.m");
}

static void another_model_is_refused(void **state)
{
    (void)state;
    char from[128];
    struct tiny one = tiny_cut(&small, &small.b), c;
    struct error err;
    write_small("model", 2, from);
    c = one;
    c.L = 2;
    EXPECT(&c, from, ERR_INVALID, "layers.2.", "does not have");
    c = one;
    c.L = 4;
    EXPECT(&c, from, ERR_INVALID, "has no tensor layers.3.");
    c = one;
    c.V = 21;
    EXPECT(&c, from, ERR_INVALID, "embedding", "[20, 8]", "[21, 8]");
    c = one;
    c.tied = true;
    EXPECT(&c, from, ERR_INVALID, "head");
    c = one;
    c.way.factorization = FULL_RANK;
    c.way.strategy = FULL;
    EXPECT(&c, from, ERR_INVALID, "does not have");
    c = one;
    c.fp64 = true;
    EXPECT(&c, from, ERR_INVALID, "F32", "F64");
    c = one;
    c.global = 4;
    EXPECT(&c, from, ERR_INVALID, "global_batch");
    c = one;
    c.mlp_silu = !one.mlp_silu;
    EXPECT(&c, from, ERR_INVALID, "model.mlp_activation", one.mlp_silu ? "has ON" : "has OFF");
    assert_int_equal(take(&one, from, &err), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damage_is_named),
        cmocka_unit_test(gaps_and_overlaps_are_named),
        cmocka_unit_test(another_model_is_refused),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
