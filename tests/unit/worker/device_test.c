/* What the engine does for a device whose operations are done later than they are asked for: captured steps, sums on
 * streams beside, copies of the state, the head in chunks. All numbers are those of the CPU to the bit. */
#include "tests/unit/worker/tiny.h"

#include "proto/base/fs.h"
#include "tests/unit/worker/late.h"
#include "worker/checkpoint.h"
#include "worker/safetensors.h"

#define REQUIRE(condition)                                                            \
    do {                                                                              \
        if (!(condition))                                                             \
            return error_set(err, ERR_INTERNAL, "line %d: %s", __LINE__, #condition); \
    } while (0)

enum { STEPS = 6, RANKS = 4, MICRO = 4 };

static struct tiny_device late(void)
{
    return (struct tiny_device){late_kernels(), late_comms};
}

/* ---- captured steps ---- */

struct run {
    struct tiny c;
    bool plain;
    struct step_result steps[RANKS][STEPS];
    double eval[RANKS][2], adam_t[RANKS];
    float *state[RANKS]; /* weights and moments */
    size_t n[RANKS];
    int told[RANKS], progress[RANKS];
    char launched[RANKS][128];
};

struct listener {
    struct run *run;
    int rank;
};

static void hear(void *arg, const char *doing)
{
    struct listener *l = arg;
    if (strstr(doing, "at once"))
        snprintf(l->run->launched[l->rank], sizeof l->run->launched[0], "%s", doing);
    l->run->told[l->rank]++;
}

static void count(void *arg)
{
    struct listener *l = arg;
    l->run->progress[l->rank]++;
}

static void keep_state(struct engine *e, struct run *r, int rank)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            r->state[rank] = realloc(r->state[rank], (r->n[rank] + (size_t)t.count + 1) * sizeof(float));
            if (t.count)
                memcpy(r->state[rank] + r->n[rank], t.own, (size_t)t.count * sizeof(float));
            r->n[rank] += (size_t)t.count;
        }
}

/* Rate, tokens, masks and votes change from step to step; an evaluation comes between. */
static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct run *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch batches[MICRO];
    struct micro_batch micro[MICRO];
    struct listener l = {r, rank};
    int n = c->global / c->micro / c->dp, dp_rank = rank / c->tp % c->dp;
    engine_set_capture(e, !r->plain);
    engine_watch(e, hear, &l);
    int rc = engine_init_weights(e, err);
    for (int s = 0; s < STEPS && !rc; s++) {
        struct step_request request = {.lr = 1e-2 / (s + 1), .stop = s == 5, .checkpoint = s == 3 && rank == 0};
        for (int m = 0; m < n; m++) {
            tiny_batch(c, ((int64_t)s * n + m) * c->dp + dp_rank, 2 + s, &batches[m]);
            micro[m] = batches[m].micro;
        }
        rc = engine_step(e, micro, &request, &r->steps[rank][s], count, &l, err);
        memset(batches, 0x7f, sizeof batches); /* nobody looks at them any more */
        if (!rc && s == 2) {
            tiny_batch(c, 100, 0, &batches[0]);
            rc = engine_eval(e, &batches[0].micro, &r->eval[rank][0], &r->eval[rank][1], err);
        }
    }
    if (rc)
        return rc;
    r->adam_t[rank] = tiny_adam_t(e);
    keep_state(e, r, rank);
    return ERR_OK;
}

static void same(const char *what, const struct plan *p, const struct run *a, const struct run *b,
                 const struct comm_counters *ca, const struct comm_counters *cb)
{
    for (int rank = 0; rank < p->world; rank++) {
        for (int s = 0; s < STEPS; s++)
            if (memcmp(&a->steps[rank][s], &b->steps[rank][s], offsetof(struct step_result, skipped)) ||
                a->steps[rank][s].stop != (s == 5) || b->steps[rank][s].stop != (s == 5) ||
                a->steps[rank][s].checkpoint != (s == 3) || b->steps[rank][s].checkpoint != (s == 3))
                fail_msg("%s: step %d of rank %d: loss %.17g and %.17g", what, s + 1, rank, a->steps[rank][s].loss,
                         b->steps[rank][s].loss);
        assert_true(!memcmp(a->eval[rank], b->eval[rank], sizeof a->eval[rank]));
        assert_true(a->adam_t[rank] == STEPS && b->adam_t[rank] == STEPS);
        assert_true(a->n[rank] == b->n[rank]);
        if (memcmp(a->state[rank], b->state[rank], a->n[rank] * sizeof(float)))
            fail_msg("%s: the state of rank %d differs", what, rank);
        assert_memory_equal(&ca[rank], &cb[rank], sizeof ca[rank]);
    }
}

static void forget(struct run *r)
{
    for (int rank = 0; rank < RANKS; rank++)
        free(r->state[rank]);
}

static const struct tiny_way overlapped = {
    .name = "COLA BTP overlap", .factorization = COLA, .strategy = BTP, .overlap = true};
static const struct tiny_way vanilla = {.name = "COLA VANILLA", .factorization = COLA, .strategy = VANILLA};
static const struct tiny_way lax = {.name = "LAX LINEAR BTP", .factorization = LAX, .strategy = BTP, .gate = LINEAR};
static const struct tiny_way dense = {.name = "FULL", .factorization = FULL_RANK, .strategy = FULL};

static const struct {
    const struct tiny_way *way;
    int tp, dp, pp, zero, micros, recompute, L;
    int64_t bucket_bytes, head_bytes;
    bool tied;
} cases[] = {
    {&overlapped, 1, 1, 1, 0, 3, 0, 2, 0, 0, false},
    {&overlapped, 2, 1, 1, 0, 2, 0, 2, 0, 1024, true},
    {&overlapped, 2, 2, 1, 1, 2, LAYER, 3, 1, 0, false},
    {&vanilla, 2, 2, 1, 0, 1, 0, 3, 1, 1024, false},
    {&lax, 1, 1, 2, 0, 3, LOW_RANK, 4, 0, 0, true},
    {&dense, 1, 2, 2, 1, 4, 0, 40, 1, 2048, true}, /* more buckets than a stream has marks */
};
enum { CASES = sizeof cases / sizeof cases[0] };

static struct tiny case_of(int i)
{
    struct tiny c = tiny_default;
    c.way = *cases[i].way;
    c.fp64 = false;
    c.r = 4;
    c.L = cases[i].L;
    c.tp = cases[i].tp, c.dp = cases[i].dp, c.pp = cases[i].pp, c.zero = cases[i].zero;
    c.recompute = cases[i].recompute;
    c.tied = cases[i].tied;
    c.bucket_bytes = cases[i].bucket_bytes;
    c.global = c.micro * c.dp * cases[i].micros;
    return c;
}

static void captured_steps_are_the_plain_ones(void **state)
{
    (void)state;
    for (int i = 0; i < CASES; i++) {
        struct plan p;
        struct run cpu = {.c = case_of(i)}, plain = {.c = cpu.c, .plain = true}, captured = {.c = cpu.c};
        struct comm_counters of_cpu[RANKS], of_plain[RANKS], of_captured[RANKS];
        tiny_plan(&cpu.c, &p);
        p.head_bytes = cases[i].head_bytes;
        tiny_run(&p, 1, train, &cpu, of_cpu);
        late_launches = 0;
        tiny_run_on(&p, late(), 1, train, &plain, of_plain);
        assert_int_equal(late_launches, 0);
        tiny_run_on(&p, late(), 1, train, &captured, of_captured);
        assert_int_equal(late_launches, p.world * 2 * (STEPS - 1));
        same("beside", &p, &cpu, &plain, of_cpu, of_plain);
        same("captured", &p, &cpu, &captured, of_cpu, of_captured);
        for (int rank = 0; rank < p.world; rank++) {
            assert_int_equal(cpu.progress[rank], STEPS * p.accumulation * (p.pp > 1 ? 2 : 1));
            assert_int_equal(plain.progress[rank], STEPS); /* only what is done */
            assert_int_equal(captured.progress[rank], STEPS);
            assert_int_equal(captured.told[rank], 2 * p.accumulation + 2 * (STEPS - 1));
            assert_string_equal(captured.launched[rank], "the update, launched at once");
            assert_string_equal(plain.launched[rank], "");
        }
        forget(&cpu);
        forget(&plain);
        forget(&captured);
    }
}

/* ---- the head in chunks ---- */

struct chunks {
    struct tiny c;
    double loss[RANKS], eval[RANKS];
    double *grads[RANKS], *logits[RANKS];
    size_t n;
    int64_t columns;
};

static int gradients_and_logits(struct engine *e, int rank, void *arg, struct error *err)
{
    struct chunks *r = arg;
    struct tiny_batch b;
    double tokens;
    tiny_batch(&r->c, 0, 5, &b);
    tiny_randomize(e, 3);
    int rc = engine_gradients(e, &b.micro, &r->loss[rank], err);
    if (rc)
        return rc;
    size_t at = 0;
    r->grads[rank] = calloc(r->n, sizeof(double));
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        for (int64_t k = 0; k < t.tensor.nrows * t.tensor.ncols; k++)
            r->grads[rank][at++] = tiny_get(&t, k);
    }
    REQUIRE(at <= r->n);
    r->logits[rank] = calloc((size_t)(r->c.micro * r->c.s * r->columns), sizeof(double));
    rc = engine_logits(e, &b.micro, r->logits[rank], err);
    return rc ? rc : engine_eval(e, &b.micro, &r->eval[rank], &tokens, err);
}

/* Two calls of the loss in a training's and in an evaluation's forward become eight; all else stays. */
static void same_but_for_the_loss(const struct comm_counters *whole, const struct comm_counters *parts)
{
    for (int pass = 0; pass < PASS_COUNT; pass++)
        for (int kind = 0; kind < COMM_KIND_COUNT; kind++) {
            const struct comm_count *a = &whole->by[GROUP_TP][kind][pass], *b = &parts->by[GROUP_TP][kind][pass];
            bool loss = kind == COMM_ALL_REDUCE && (pass == PASS_FORWARD || pass == PASS_EVAL);
            assert_true(b->calls - a->calls == (loss ? 6 : 0));
            assert_true(a->elements == b->elements && a->bytes == b->bytes);
        }
}

/* Of 12 rows 3 at a time: 4 chunks. All is the same, but for the order in which the head's gradient and the loss are
 * summed: 12 additions, each off by at most 1.1e-16 of what is summed so far. */
static void a_head_in_chunks_is_the_head(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * TINY_WAYS; i++) {
        struct chunks whole = {.c = tiny_of(i / 2)}, parts;
        struct plan p;
        struct comm_counters of_whole[RANKS], of_parts[RANKS];
        struct plan_comm_counts formula;
        whole.c.tp = i % 2 ? 2 : 1;
        whole.c.tied = i / 2 % 2;
        tiny_plan(&whole.c, &p);
        whole.n = (size_t)plan_parameter_elements(&p);
        whole.columns = p.V_pad / p.tp;
        parts = whole;
        assert_true(plan_head_rows(&p) == 12 && p.T == 12);
        tiny_run(&p, 1, gradients_and_logits, &whole, of_whole);
        p.head_bytes = 3 * whole.columns * (int64_t)sizeof(double);
        assert_true(plan_head_rows(&p) == 3);
        tiny_run(&p, 1, gradients_and_logits, &parts, of_parts);
        plan_comm_counts(&p, &formula);
        for (int rank = 0; rank < p.tp; rank++) {
            double worst = 0, largest = 0;
            for (size_t k = 0; k < whole.n; k++) {
                worst = fmax(worst, fabs(whole.grads[rank][k] - parts.grads[rank][k]));
                largest = fmax(largest, fabs(whole.grads[rank][k]));
            }
            if (!(worst <= 2e-15 * largest))
                fail_msg("%s, tp %d: gradients differ by %.1e of %.1e", whole.c.way.name, p.tp, worst, largest);
            assert_memory_equal(whole.logits[rank], parts.logits[rank], (size_t)(12 * whole.columns) * sizeof(double));
            assert_true(fabs(whole.loss[rank] / parts.loss[rank] - 1) < 2e-15);
            assert_true(fabs(whole.eval[rank] / parts.eval[rank] - 1) < 2e-15);
            if (p.tp > 1)
                same_but_for_the_loss(&of_whole[rank], &of_parts[rank]);
            for (int kind = 0; kind < COMM_KIND_COUNT; kind++) {
                const struct comm_count *got = &of_parts[rank].by[GROUP_TP][kind][PASS_FORWARD];
                const struct plan_comm *want = &formula.tp[kind][PLAN_FORWARD];
                assert_true(got->calls == want->calls && got->elements == want->elements);
            }
            free(whole.grads[rank]);
            free(whole.logits[rank]);
            free(parts.grads[rank]);
            free(parts.logits[rank]);
        }
    }
}

/* ---- one rank alone, in the test's own thread ---- */

struct alone {
    struct tiny c;
    struct plan p;
    struct local_world *world;
    struct comms comms;
    struct engine *e;
};

static void alone_plan(struct alone *a)
{
    memset(a, 0, sizeof *a);
    a->c = tiny_default;
    a->c.fp64 = false;
    tiny_plan(&a->c, &a->p);
}

static int alone_try(struct alone *a, const struct kernels *k, struct error *err)
{
    const struct comm_layout layout = {.tp = 1, .dp = 1, .pp = 1};
    assert_int_equal(local_world_create(&layout, &a->world, err), 0);
    assert_int_equal(local_comms_join(a->world, 0, &a->comms, err), 0);
    return engine_create(&a->p, k, &a->comms, 0, 1, &a->e, err);
}

static void alone_open(struct alone *a, const struct kernels *k)
{
    struct error err;
    alone_plan(a);
    if (alone_try(a, k, &err))
        fail_msg("%s", err.message);
    assert_int_equal(engine_init_weights(a->e, &err), 0);
}

static void alone_close(struct alone *a)
{
    engine_destroy(a->e);
    comms_destroy(&a->comms);
    local_world_destroy(a->world);
}

static void alone_steps(struct alone *a, int first, int n)
{
    struct error err;
    for (int s = first; s < first + n; s++) {
        struct tiny_batch b;
        struct step_request request = {.lr = 1e-2};
        struct step_result result;
        tiny_batch(&a->c, s, 0, &b);
        if (engine_step(a->e, &b.micro, &request, &result, NULL, NULL, &err))
            fail_msg("%s", err.message);
    }
}

/* ---- checkpoints ---- */

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-device-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

struct saving {
    Boost__AttemptStart start;
    Boost__JobSpec spec;
    Boost__Checkpoint options;
    char run[96], to[96];
    struct checkpoint *c;
};

static void saving_open(struct saving *s, struct alone *a, const char *name)
{
    struct error err;
    s->start = (Boost__AttemptStart)BOOST__ATTEMPT_START__INIT;
    s->spec = (Boost__JobSpec)BOOST__JOB_SPEC__INIT;
    s->options = (Boost__Checkpoint)BOOST__CHECKPOINT__INIT;
    s->start.spec = &s->spec;
    s->spec.checkpoint = &s->options;
    s->start.attempt = 1;
    snprintf(s->run, sizeof s->run, "%s/%s-run", dir, name);
    snprintf(s->to, sizeof s->to, "%s/%s", dir, name);
    s->start.run_dir = s->run;
    s->start.checkpoint_dir = s->to;
    assert_int_equal(fs_make_dirs(s->run, 0755, &err), 0);
    if (checkpoint_open(&s->start, &a->p, a->e, 0, NULL, NULL, &s->c, &err))
        fail_msg("%s", err.message);
}

static void snapshot(struct saving *s, struct alone *a, int64_t step)
{
    struct error err;
    struct run_position at = {.step = step, .samples = step * a->p.global_batch, .adam_t = tiny_adam_t(a->e)};
    if (checkpoint_snapshot(s->c, &at, &err))
        fail_msg("%s", err.message);
}

static void settle(struct saving *s)
{
    struct error err;
    if (checkpoint_wait(s->c, &err))
        fail_msg("%s", err.message);
}

static void shard_path(char out[192], const char *name, int step)
{
    snprintf(out, 192, "%s/%s/step-%d.a1/rank-00000-of-00001.safetensors", dir, name, step);
}

static void equal_files(const char *a, const char *b, int step)
{
    struct buffer x, y;
    struct error err;
    char path[192];
    buffer_init(&x, 1 << 24);
    buffer_init(&y, 1 << 24);
    shard_path(path, a, step);
    assert_int_equal(fs_read_file(path, &x, &err), 0);
    shard_path(path, b, step);
    assert_int_equal(fs_read_file(path, &y, &err), 0);
    assert_true(x.len == y.len && !memcmp(x.data, y.data, x.len));
    buffer_free(&x);
    buffer_free(&y);
}

/* The writer, to whom the copies belong, is held until steps have followed: its file still is of the step it says,
 * since the next update waits for the copies and not for the writer. */
static void a_snapshot_is_of_its_step(void **state)
{
    (void)state;
    struct alone cpu, a;
    struct saving reference, s;
    sem_t hold;
    alone_open(&cpu, kernels_cpu_fp32());
    saving_open(&reference, &cpu, "cpu");
    for (int step = 1; step <= 3; step++) {
        alone_steps(&cpu, step, 1);
        snapshot(&reference, &cpu, step);
        settle(&reference);
    }
    checkpoint_close(reference.c);
    alone_close(&cpu);

    sem_init(&hold, 0, 0);
    late_hold = &hold;
    alone_open(&a, late_kernels());
    saving_open(&s, &a, "late");
    alone_steps(&a, 1, 1);
    snapshot(&s, &a, 1); /* between a plain and a captured step */
    alone_steps(&a, 2, 1);
    assert_true(checkpoint_busy(s.c));
    sem_post(&hold);
    settle(&s);
    snapshot(&s, &a, 2);
    alone_steps(&a, 3, 1);
    sem_post(&hold);
    snapshot(&s, &a, 3); /* waits for the one before by itself */
    sem_post(&hold);
    snapshot(&s, &a, 3); /* once more, without a step between */
    sem_post(&hold);
    settle(&s);
    alone_steps(&a, 4, 1);
    snapshot(&s, &a, 4);
    sem_post(&hold);
    checkpoint_close(s.c); /* while it is copied: written or given up */
    alone_close(&a);
    late_hold = NULL;
    sem_destroy(&hold);
    for (int step = 1; step <= 3; step++)
        equal_files("late", "cpu", step);
}

/* ---- choices ---- */

static const char choices[] = "gemm 16384x2048 \"algo\": 7\n\tgemm 12x3 \\ 9\n";
static char loaded[128];
static size_t more_choices;
static int load_rc;

static int save_choices(struct kstream *ks, struct buffer *out, struct error *err)
{
    (void)ks;
    buffer_append_str(out, choices);
    for (size_t i = 0; i < more_choices; i++)
        buffer_append_str(out, "\n");
    return out->failed ? error_set(err, ERR_NOMEM, "too many choices") : ERR_OK;
}

static int load_choices(struct kstream *ks, const char *text, size_t len, struct error *err)
{
    (void)ks;
    assert_true(len == strlen(text));
    snprintf(loaded, sizeof loaded, "%s", text);
    return load_rc ? error_set(err, (enum error_code)load_rc, "made by another library") : ERR_OK;
}

static int restore(const char *name, const struct kernels *k, char note[512], struct error *err)
{
    struct alone a;
    struct run_position at;
    char path[128];
    loaded[0] = '\0';
    alone_open(&a, k);
    snprintf(path, sizeof path, "%s/%s/step-1.a1", dir, name);
    int rc = checkpoint_restore(path, &a.p, a.e, 0, NULL, &at, err);
    const char *text = engine_note(a.e);
    snprintf(note, 512, "%s", text ? text : "");
    assert_null(engine_note(a.e));
    alone_close(&a);
    return rc;
}

static void choices_go_along(void **state)
{
    (void)state;
    struct kernels k = *late_kernels();
    struct error err;
    char note[512], path[192];
    k.choices_save = save_choices;
    k.choices_load = load_choices;
    /* Some; more than the room; no more than the room until they are written as JSON. */
    static const struct {
        const char *name;
        size_t more;
        bool kept;
    } kinds[] = {{"some", 0, true}, {"many", 1 << 20, false}, {"wide", 60 << 10, false}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct safetensors_file f;
        struct alone a;
        struct saving s;
        more_choices = kinds[i].more;
        alone_open(&a, &k);
        saving_open(&s, &a, kinds[i].name);
        alone_steps(&a, 1, 1);
        snapshot(&s, &a, 1);
        settle(&s);
        const char *told = engine_note(a.e);
        assert_true((told && strstr(told, "not in the checkpoint")) == !kinds[i].kept);
        checkpoint_close(s.c);
        alone_close(&a);
        shard_path(path, kinds[i].name, 1);
        assert_int_equal(safetensors_open(&f, path, &err), 0);
        assert_true((safetensors_meta(&f, "choices") != NULL) == kinds[i].kept);
        safetensors_close(&f);
        load_rc = ERR_OK;
        assert_int_equal(restore(kinds[i].name, &k, note, &err), 0);
        assert_string_equal(loaded, kinds[i].kept ? choices : "");
        assert_true((note[0] != '\0') == !kinds[i].kept);
    }
    load_rc = ERR_UNSUPPORTED;
    assert_int_equal(restore("some", &k, note, &err), 0);
    assert_string_equal(note, "computes on another device or library: same model, other last bits (made by another "
                              "library)");
    load_rc = ERR_DEVICE;
    assert_int_equal(restore("some", &k, note, &err), ERR_DEVICE);
    /* Who makes no choices passes over them. */
    assert_int_equal(restore("some", late_kernels(), note, &err), 0);
    assert_string_equal(note, "");
}

/* ---- what the engine asks of the backend when it is made ---- */

static int attention_rc;
static int attention_checks;
static bool ran_own, ran_library, accumulates;
static size_t allocated;

static int check(struct kstream *ks, const struct attention *a, void *workspace, struct error *err)
{
    (void)ks;
    attention_checks++;
    assert_true(!a->own && workspace != NULL);
    return attention_rc ? error_set(err, (enum error_code)attention_rc, "rows of -inf give NaN") : ERR_OK;
}

static void forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v, void *o,
                    void *lse, void *workspace)
{
    *(a->own ? &ran_own : &ran_library) = true;
    accumulates = a->accumulate;
    late_attention_forward(ks, a, q, k, v, o, lse, workspace);
}

static size_t workspace_of(const struct attention *a, bool backward)
{
    return a->own ? 3 << 20 : backward ? 2 << 20 : 1 << 20;
}

static void *note_bytes(size_t bytes, struct error *err)
{
    allocated = bytes;
    return kernels_cpu_fp32()->alloc(bytes, err);
}

static int attend(const struct kernels *k, bool own, bool cudnn, char note[512], struct error *err)
{
    struct alone a;
    attention_checks = 0;
    ran_own = ran_library = false;
    note[0] = '\0';
    alone_plan(&a);
    a.p.attention_own = own;
    a.p.attention_cudnn = cudnn;
    a.p.deterministic = own;
    int rc = alone_try(&a, k, err);
    if (!rc) {
        const char *text = engine_note(a.e);
        snprintf(note, 512, "%s", text ? text : "");
        assert_int_equal(engine_init_weights(a.e, err), 0);
        alone_steps(&a, 1, 1);
        assert_true(accumulates == !own);
    }
    alone_close(&a);
    return rc;
}

static void attention_is_checked_first(void **state)
{
    (void)state;
    struct kernels k = *late_kernels();
    struct error err;
    char note[512];
    k.attention_forward = forward;
    k.attention_workspace = workspace_of;
    k.alloc = note_bytes;
    k.attention_check = check;
    attention_rc = ERR_OK;
    assert_int_equal(attend(&k, false, false, note, &err), 0);
    size_t automatic = allocated;
    assert_true(ran_library && !ran_own && attention_checks == 1 && !note[0]);
    assert_int_equal(attend(&k, false, true, note, &err), 0);
    assert_true(automatic - allocated == 1 << 20); /* AUTO has room for the larger of the two */
    assert_true(ran_library && !ran_own && attention_checks == 1 && !note[0]);
    assert_int_equal(attend(&k, true, false, note, &err), 0);
    assert_true(allocated == automatic);
    assert_true(ran_own && !ran_library && attention_checks == 0 && !note[0]);
    attention_rc = ERR_UNSUPPORTED;
    assert_int_equal(attend(&k, false, false, note, &err), 0);
    assert_true(ran_own && !ran_library && strstr(note, "own kernel: rows of -inf give NaN"));
    assert_int_equal(attend(&k, false, true, note, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "parallel.attention: CUDNN: rows of -inf give NaN"));
    assert_non_null(strstr(err.hint, "OWN"));
    k.attention_check = NULL; /* there is no library */
    assert_int_equal(attend(&k, false, false, note, &err), 0);
    assert_true(ran_own && !ran_library && note[0]);
    assert_int_equal(attend(&k, false, true, note, &err), ERR_UNSUPPORTED);
}

static void *no_memory(size_t bytes, struct error *err)
{
    error_set(err, ERR_NOMEM, "out of device memory: %zu bytes asked for, 11 MiB are free", bytes);
    return NULL;
}

static void what_does_not_fit_is_told(void **state)
{
    (void)state;
    struct kernels k = *late_kernels();
    struct alone a;
    struct error err;
    struct plan_backend b;
    struct plan_memory m;
    char expected[256];
    k.alloc = no_memory;
    alone_plan(&a);
    a.p.L = 4000;
    a.p.f = 4096;
    plan_backend_estimate(&a.p, &b);
    plan_memory(&a.p, &b, &m);
    assert_true(m.bytes[MEM_SAVED] >> 20 > 0);
    assert_int_equal(alone_try(&a, &k, &err), ERR_NOMEM);
    snprintf(
        expected, sizeof expected, "wants %lld MiB of its device: weights %lld, master weights 0, gradients %lld, ",
        (long long)(m.total >> 20), (long long)(m.bytes[MEM_WEIGHTS] >> 20), (long long)(m.bytes[MEM_GRADS] >> 20));
    assert_non_null(strstr(err.message, expected));
    snprintf(expected, sizeof expected, "saved activations %lld (recompute NONE)",
             (long long)(m.bytes[MEM_SAVED] >> 20));
    assert_non_null(strstr(err.message, expected));
    assert_non_null(strstr(err.message, "11 MiB are free"));
    assert_string_equal(err.hint, "lower parallel.micro_batch, or set parallel.recompute, or raise parallel.tp");
    alone_close(&a);
}

static void *memory_of_others(size_t bytes, struct error *err)
{
    error_set(err, ERR_DEVICE, "out of device memory: %zu bytes asked for", bytes);
    error_hint(err, "end what else runs on the device");
    return NULL;
}

/* On a device: what it can never hold is the job's fault, memory that others have is not. */
static void whose_fault_no_memory_is(void **state)
{
    (void)state;
    static const struct {
        void *(*alloc)(size_t bytes, struct error *err);
        enum error_code code;
        const char *hint;
    } refusals[] = {{no_memory, ERR_INVALID, "raise parallel.tp"},
                    {memory_of_others, ERR_DEVICE, "end what else runs"}};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct kernels k = *late_kernels();
        struct alone a;
        struct error err;
        k.alloc = refusals[i].alloc;
        alone_plan(&a);
        a.p.cuda = true;
        assert_int_equal(alone_try(&a, &k, &err), refusals[i].code);
        assert_int_equal(err.code, refusals[i].code);
        assert_non_null(strstr(err.message, "of its device: weights"));
        assert_non_null(strstr(err.hint, refusals[i].hint));
        alone_close(&a);
    }
}

static struct {
    void *at;
    size_t bytes;
    struct scratch_shape shape;
} scratch;

static size_t scratch_bytes(const struct scratch_shape *shape)
{
    scratch.shape = *shape;
    return 5 << 20;
}

static void set_scratch(struct kstream *ks, void *at, size_t bytes)
{
    (void)ks;
    scratch.at = at;
    scratch.bytes = bytes;
}

static void scratch_lies_in_the_arena(void **state)
{
    (void)state;
    struct kernels k = *late_kernels();
    struct alone without, with;
    k.alloc = note_bytes;
    alone_open(&without, &k);
    size_t before = allocated;
    alone_close(&without);
    k.scratch_bytes = scratch_bytes;
    k.set_scratch = set_scratch;
    alone_open(&with, &k);
    assert_true(allocated - before == 5 << 20 && scratch.bytes == 5 << 20);
    assert_true(scratch.shape.T == with.p.T && scratch.shape.vocab == with.p.V);
    assert_true(scratch.shape.width == 3 * with.p.r); /* three latents side by side, wider here than d */
    memset(scratch.at, 0x7f, scratch.bytes);          /* nobody else's */
    alone_steps(&with, 1, 2);
    for (size_t i = 0; i < scratch.bytes; i += 4096)
        assert_int_equal(((char *)scratch.at)[i], 0x7f);
    alone_close(&with);
}

static int ranges, depth, deepest;

static void range_begin(const char *name)
{
    ranges += name[0] != '\0';
    deepest = ++depth > deepest ? depth : deepest;
}

static void range_end(void)
{
    depth--;
}

static void ranges_are_closed(void **state)
{
    (void)state;
    struct kernels k = *late_kernels();
    struct alone a;
    k.range_begin = range_begin;
    k.range_end = range_end;
    alone_open(&a, &k);
    alone_steps(&a, 1, 1);
    assert_int_equal(ranges, 2 * a.c.L + 2); /* blocks each way, the head, the update */
    alone_steps(&a, 2, 1); /* captured, then launched */
    ranges = 0;
    alone_steps(&a, 3, 1);
    assert_int_equal(ranges, 2); /* each sequence */
    assert_true(depth == 0 && deepest == 1);
    alone_close(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(captured_steps_are_the_plain_ones),
        cmocka_unit_test(a_head_in_chunks_is_the_head),
        cmocka_unit_test(a_snapshot_is_of_its_step),
        cmocka_unit_test(choices_go_along),
        cmocka_unit_test(attention_is_checked_first),
        cmocka_unit_test(what_does_not_fit_is_told),
        cmocka_unit_test(whose_fault_no_memory_is),
        cmocka_unit_test(scratch_lies_in_the_arena),
        cmocka_unit_test(ranges_are_closed),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
