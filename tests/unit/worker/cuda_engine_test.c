/* The engine on a GPU: its memory is the plan's, captured steps are the plain ones to the bit, also in another engine
 * that took over the first one's choices, and a snapshot is of its step although training goes on meanwhile.
 * Without a GPU it skips; with BOOST_CUDA_LIBRARY set it must not.
 * time limit: 300 s */
#include "tests/unit/worker/tiny.h"

#include "proto/base/fs.h"
#include "worker/checkpoint.h"
#include "worker/cuda.h"

enum { STEPS = 5, MICROS = 2, ROWS = 2 * 64 };

static const struct kernels *k;
static char dir[64];

static int open_all(void **state)
{
    (void)state;
    const struct cuda_library *library;
    struct error err;
    struct kstream *ks;
    snprintf(dir, sizeof dir, "/tmp/boost-cuda-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    int rc = cuda_library_open(&library, &err);
    if (!rc)
        rc = library->kernels()->stream_create(1, &ks, &err);
    if (rc) {
        print_message("# no CUDA: %s\n", err.message);
        return getenv("BOOST_CUDA_LIBRARY") ? -1 : 0;
    }
    k = library->kernels();
    k->stream_destroy(ks);
    return 0;
}

static int remove_all(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

static void need_device(void)
{
    if (!k)
        skip();
}

/* Widths that the device's products and attention like. */
static struct tiny model(int way)
{
    struct tiny c = tiny_of(way);
    c.fp64 = false;
    c.bf16 = true;
    c.d = 128, c.f = 256, c.r = c.way.gate == TENSOR ? 64 : 32, c.h = c.hk = 2, c.V = 300;
    c.s = ROWS / 2;
    c.micro = 2;
    c.global = c.micro * MICROS;
    return c;
}

static void device_plan(const struct tiny *c, struct plan *p)
{
    tiny_plan(c, p);
    p->cuda = true;
    p->attention_own = false;
}

/* ---- memory ---- */

static int64_t attention_bytes_of(const struct plan *p)
{
    struct plan_widths w;
    plan_widths(p, &w);
    int64_t most = 0;
    for (int own = p->attention_own; own < 2; own++)
        for (int backward = 0; backward < 2; backward++) {
            struct attention a = {.b = p->micro_batch,
                                  .s = p->s,
                                  .h = w.heads,
                                  .hk = w.kv_heads,
                                  .e = p->e,
                                  .own = own,
                                  .accumulate = !p->deterministic};
            int64_t bytes = (int64_t)k->attention_workspace(&a, backward);
            most = bytes > most ? bytes : most;
        }
    return most;
}

static void memory_is_the_plans(void **state)
{
    (void)state;
    need_device();
    for (int i = 0; i < 4 * TINY_WAYS; i++) {
        struct tiny c = model(i / 4);
        struct plan p;
        struct plan_backend b;
        struct plan_largest l;
        c.s = i % 2 ? 4096 : 100;
        c.V = i % 4 == 3 ? 128000 : 300;
        c.tp = i % 3 == 1 ? 2 : 1;
        device_plan(&c, &p);
        p.attention_own = i % 3 == 2;
        p.deterministic = i % 4 < 2;
        plan_backend_estimate(&p, &b);
        plan_largest(&p, &l);
        struct scratch_shape shape = {.T = l.T, .width = l.width, .vocab = l.vocab};
        assert_true(b.act == k->act && b.stat == k->stat && b.grad == k->grad);
        assert_int_equal(b.scratch, k->scratch_bytes(&shape));
        assert_int_equal(b.attention_workspace, attention_bytes_of(&p));
    }
}

/* ---- one rank alone ---- */

struct alone {
    struct tiny c;
    struct plan p;
    struct local_world *world;
    struct comms comms;
    struct engine *e;
    struct step_result steps[STEPS + 1];
};

/* With the choices of an earlier engine, unless there are none. */
static void alone_open(struct alone *a, int way, int64_t head_bytes, bool captures, const struct buffer *choices)
{
    const struct comm_layout layout = {.tp = 1, .dp = 1, .pp = 1};
    struct error err = {0};
    memset(a, 0, sizeof *a);
    a->c = model(way);
    device_plan(&a->c, &a->p);
    a->p.head_bytes = head_bytes;
    assert_int_equal(local_world_create(&layout, &a->world, &err), 0);
    assert_int_equal(local_comms_join(a->world, 0, &a->comms, &err), 0);
    int rc = engine_create(&a->p, k, &a->comms, 0, 1, &a->e, &err);
    if (!rc) {
        const char *note = engine_note(a->e);
        if (note)
            print_message("# %s\n", note);
        engine_set_capture(a->e, captures);
        rc = engine_init_weights(a->e, &err);
    }
    if (!rc && choices && k->choices_load)
        rc = k->choices_load(engine_stream(a->e), (const char *)choices->data, choices->len, &err);
    if (rc)
        fail_msg("%s: %s", a->c.way.name, err.message);
}

static void alone_close(struct alone *a)
{
    engine_destroy(a->e);
    comms_destroy(&a->comms);
    local_world_destroy(a->world);
}

static void alone_step(struct alone *a, int n)
{
    struct error err;
    struct tiny_batch batches[MICROS];
    struct micro_batch micro[MICROS];
    struct step_request request = {.lr = 1e-3 / n};
    for (int m = 0; m < MICROS; m++) {
        tiny_batch(&a->c, (int64_t)(n * MICROS + m) * a->c.micro, 3 + n, &batches[m]);
        micro[m] = batches[m].micro;
    }
    if (engine_step(a->e, micro, &request, &a->steps[n], NULL, NULL, &err))
        fail_msg("%s, step %d: %s", a->c.way.name, n, err.message);
    assert_false(a->steps[n].skipped);
}

/* Weights and moments, as bytes. */
static void keep_state(struct alone *a, struct buffer *out)
{
    struct error err;
    buffer_init(out, 1 << 28);
    for (int64_t i = 0; i < engine_tensor_count(a->e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(a->e, i, (enum state_kind)kind, &t);
            size_t bytes = (size_t)t.count * dtype_size(t.dtype);
            uint8_t *to = bytes ? buffer_reserve(out, bytes) : NULL;
            if (!bytes)
                continue;
            assert_non_null(to);
            k->download(engine_stream(a->e), to, t.own, bytes);
            assert_int_equal(k->stream_sync(engine_stream(a->e), &err), 0);
            out->len += bytes;
        }
}

/* ---- captured steps ---- */

struct outcome {
    struct step_result steps[STEPS + 1];
    struct buffer state, choices;
};

static void train(int way, int64_t head_bytes, bool captures, const struct buffer *choices, struct outcome *out)
{
    struct alone a;
    struct error err;
    alone_open(&a, way, head_bytes, captures, choices);
    for (int n = 1; n <= STEPS; n++)
        alone_step(&a, n);
    memcpy(out->steps, a.steps, sizeof a.steps);
    keep_state(&a, &out->state);
    buffer_init(&out->choices, 1 << 20);
    if (k->choices_save)
        assert_int_equal(k->choices_save(engine_stream(a.e), &out->choices, &err), 0);
    alone_close(&a);
}

static void forget(struct outcome *o)
{
    buffer_free(&o->state);
    buffer_free(&o->choices);
}

static void captured_steps_are_the_plain_ones(void **state)
{
    (void)state;
    need_device();
    for (int way = 0; way < TINY_WAYS; way++) {
        struct outcome plain, captured;
        int64_t head_bytes = way % 2 ? 32 * 384 * 2 : 0; /* 32 rows of 384 logits: four chunks, or one */
        train(way, head_bytes, false, NULL, &plain);
        train(way, head_bytes, true, &plain.choices, &captured);
        for (int n = 1; n <= STEPS; n++) {
            const struct step_result *a = &plain.steps[n], *b = &captured.steps[n];
            if (a->loss != b->loss || a->grad_norm != b->grad_norm || a->tokens != b->tokens)
                fail_msg("%s, step %d: loss %.17g plain, %.17g captured; norm %.17g, %.17g", tiny_ways[way].name, n,
                         a->loss, b->loss, a->grad_norm, b->grad_norm);
        }
        if (plain.state.len != captured.state.len || memcmp(plain.state.data, captured.state.data, plain.state.len))
            fail_msg("%s: captured steps leave another state", tiny_ways[way].name);
        forget(&plain);
        forget(&captured);
    }
}

/* ---- snapshots ---- */

/* The shard of step 2, and 2 more steps before anybody waits for it, or none. */
static void shard_of(const char *name, int more, const struct buffer *choices, struct buffer *out)
{
    struct alone a;
    struct checkpoint *c;
    struct error err;
    Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
    Boost__JobSpec spec = BOOST__JOB_SPEC__INIT;
    Boost__Checkpoint options = BOOST__CHECKPOINT__INIT;
    char run[96], to[96], path[192];
    snprintf(run, sizeof run, "%s/%s-run", dir, name);
    snprintf(to, sizeof to, "%s/%s", dir, name);
    start.spec = &spec;
    spec.checkpoint = &options;
    start.attempt = 1;
    start.run_dir = run;
    start.checkpoint_dir = to;
    assert_int_equal(fs_make_dirs(run, 0755, &err), 0);
    alone_open(&a, 2, 0, true, choices);
    assert_int_equal(checkpoint_open(&start, &a.p, a.e, 0, NULL, NULL, &c, &err), 0);
    alone_step(&a, 1);
    alone_step(&a, 2);
    struct run_position at = {.step = 2, .samples = 2 * a.p.global_batch, .adam_t = tiny_adam_t(a.e)};
    if (checkpoint_snapshot(c, &at, &err))
        fail_msg("%s", err.message);
    for (int n = 3; n < 3 + more; n++)
        alone_step(&a, n);
    if (checkpoint_wait(c, &err))
        fail_msg("%s", err.message);
    checkpoint_close(c);
    alone_close(&a);
    snprintf(path, sizeof path, "%s/step-2.a1/rank-00000-of-00001.safetensors", to);
    buffer_init(out, 1 << 28);
    assert_int_equal(fs_read_file(path, out, &err), 0);
}

static void a_snapshot_is_of_its_step(void **state)
{
    (void)state;
    need_device();
    struct outcome first;
    struct buffer alone, under_way;
    train(2, 0, false, NULL, &first); /* for its choices */
    shard_of("alone", 0, &first.choices, &alone);
    shard_of("under-way", 2, &first.choices, &under_way);
    assert_true(alone.len == under_way.len && !memcmp(alone.data, under_way.data, alone.len));
    buffer_free(&alone);
    buffer_free(&under_way);
    forget(&first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_the_plans),
        cmocka_unit_test(captured_steps_are_the_plain_ones),
        cmocka_unit_test(a_snapshot_is_of_its_step),
    };
    return cmocka_run_group_tests(tests, open_all, remove_all);
}
