/* A checkpoint written in one layout goes on in another: masters and moments are A's, element by element and bit by
 * bit, and the steps that follow have the losses of an engine in layout B into which the test itself put A's state; so
 * have those behind B's checkpoint, resumed in A. A rank reads no byte of the shards' data that it does not need.
 *
 * time limit: 300 s */
#include "tests/unit/worker/layouts.h"

#include <dirent.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "worker/checkpoint.h"
#include "worker/safetensors.h"

enum { TRAINED = 20, MORE = 3, AGAIN = 2, IO_TEXT = 256 };
enum { STATE = 1 << STATE_WEIGHT | 1 << STATE_MOMENT1 | 1 << STATE_MOMENT2 };

/* Of a replica's share: the buffers that are cut have holes between tensors, to align them. */
static const double UNEVEN = 0.02;

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-relayout-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

/* ---- a run ---- */

/* What each rank does: takes its state from a checkpoint, from `put`, or draws it; then steps, then saves. */
struct leg {
    struct tiny c;
    const char *from;           /* checkpoint directory */
    const struct result *put;   /* whose state */
    int first, steps;           /* number of the first step */
    const char *to;             /* below which it saves when done; NULL: it does not */
    struct result *begin, *end; /* the state before and behind the steps; NULL: not wanted */
    double loss[TRAINED], norm[TRAINED];
    double adam_t;
    struct run_position at; /* as restored, by rank 0 */
    bool shared;            /* replicas are asked to have written the same */
    int64_t read, needed;   /* bytes of all ranks: while restoring, less the shards' headers; of their own state */
};

static struct result *result_new(void)
{
    struct result *r = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(r != MAP_FAILED);
    r->used = (sizeof *r + 63) / 64 * 64;
    r->room = SHARED_BYTES;
    pthread_mutex_init(&r->lock, NULL);
    return r;
}

/* What a rank holds of the whole tensors in r, by the rule of struct state_tensor. */
static int put_state(struct engine *e, const struct result *r, double adam_t, struct error *err)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            const struct plan_tensor *p = &t.tensor;
            const struct whole *w = NULL;
            for (int k = 0; k < r->n && !w; k++)
                w = strcmp(r->tensors[k].name, p->name) ? NULL : &r->tensors[k];
            int64_t first = t.device ? 0 : t.first, n = t.device ? p->nrows * p->ncols : t.count;
            double *values = calloc((size_t)n + 1, sizeof *values);
            for (int64_t k = 0; k < n; k++)
                values[k] =
                    w->values[kind][(p->row0 + (first + k) / p->ncols) * p->cols + p->col0 + (first + k) % p->ncols];
            tiny_upload(e, t.dtype, t.device ? t.device : t.own, n, values);
            free(values);
        }
    int rc = engine_set_adam_t(e, adam_t, err);
    return rc ? rc : engine_weights_changed(e, err);
}

/* What this rank has written, against an even share of the slices that it and its replicas hold. */
static int check_share(const struct leg *l, const struct plan *p, struct engine *e, int rank, int64_t step,
                       struct error *err)
{
    char path[256];
    struct safetensors_file f;
    int64_t held = 0, data = 0;
    snprintf(path, sizeof path, "%s/step-%lld.a1/rank-%05d-of-%05d.safetensors", l->to, (long long)step, rank, p->world);
    int rc = safetensors_open(&f, path, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < f.n; i++)
        data = (int64_t)f.entries[i].end > data ? (int64_t)f.entries[i].end : data;
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            held += t.tensor.nrows * t.tensor.ncols * (int64_t)dtype_size(t.dtype);
        }
    safetensors_close(&f);
    double share = (double)data * p->dp / (double)held;
    if (share > 1 + UNEVEN || share < 1 - UNEVEN)
        return error_set(err, ERR_INTERNAL, "rank %d wrote %lld bytes, %.2f of an even share", rank, (long long)data,
                         share);
    return ERR_OK;
}

static int save(const struct leg *l, const struct plan *p, struct engine *e, int rank, struct error *err)
{
    char run[96];
    Boost__AttemptStart start = BOOST__ATTEMPT_START__INIT;
    Boost__JobSpec spec = BOOST__JOB_SPEC__INIT;
    Boost__Checkpoint options = BOOST__CHECKPOINT__INIT;
    struct checkpoint *c;
    snprintf(run, sizeof run, "%s/run", dir);
    spec.checkpoint = &options;
    start.spec = &spec;
    start.attempt = 1;
    start.run_dir = run;
    start.checkpoint_dir = (char *)l->to;
    int rc = fs_make_dirs(run, 0755, err);
    if (!rc)
        rc = checkpoint_open(&start, p, e, rank, NULL, &c, err);
    if (rc)
        return rc;
    int64_t step = l->first + l->steps;
    struct run_position at = {.step = step,
                              .samples = step * p->global_batch,
                              .adam_t = tiny_adam_t(e),
                              .tokens = 17 * step,
                              .skipped = 3,
                              .spike = {.count = step, .weight = 1.5, .squares = 2, .mean = 3.25, .deviations = 0.125}};
    rc = checkpoint_snapshot(c, &at, err);
    if (!rc)
        rc = checkpoint_wait(c, err);
    checkpoint_close(c);
    return rc || !l->shared ? rc : check_share(l, p, e, rank, step, err);
}

/* Bytes that this thread has read from files. -1: the kernel does not say. */
static int64_t bytes_read(void)
{
    char line[128];
    int64_t n = -1;
    FILE *f = fopen("/proc/thread-self/io", "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "rchar: ", 7))
            n = strtoll(line + 7, NULL, 10);
    if (f)
        fclose(f);
    return n;
}

/* Of the shards of a checkpoint, all that is not data. */
static int64_t header_bytes(const char *from)
{
    int64_t sum = 0;
    DIR *d = opendir(from);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        char path[512];
        struct safetensors_file f;
        struct error err;
        if (strncmp(e->d_name, "rank-", 5))
            continue;
        snprintf(path, sizeof path, "%s/%s", from, e->d_name);
        assert_int_equal(safetensors_open(&f, path, &err), 0);
        sum += (int64_t)f.data_at;
        safetensors_close(&f);
    }
    closedir(d);
    return sum;
}

/* Restores, and counts what is read by it. What a rank needs is what it keeps. */
static int restore(struct leg *l, const struct plan *p, struct engine *e, int rank, struct run_position *at,
                   struct error *err)
{
    int64_t needed = 0, headers = header_bytes(l->from), before = bytes_read();
    int rc = checkpoint_restore(l->from, p, e, rank, NULL, at, err);
    int64_t read = bytes_read() - before - headers;
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_GRAD; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            needed += (t.device ? t.tensor.nrows * t.tensor.ncols : t.count) * (int64_t)dtype_size(t.dtype);
        }
    __atomic_fetch_add(&l->read, before < 0 ? needed : read, __ATOMIC_RELAXED);
    __atomic_fetch_add(&l->needed, needed, __ATOMIC_RELAXED);
    if (!rc && before >= 0 && (read < needed || read > needed + IO_TEXT)) /* the counter's own text is read too */
        return error_set(err, ERR_INTERNAL, "rank %d read %lld bytes of data, its state has %lld", rank,
                         (long long)read, (long long)needed);
    return rc;
}

static int leg_body(struct engine *e, int rank, void *arg, struct error *err)
{
    struct leg *l = arg;
    const struct tiny *c = &l->c;
    struct plan p;
    struct run_position at;
    tiny_plan(c, &p);
    struct tiny_batch *batches = calloc((size_t)p.accumulation, sizeof *batches);
    struct micro_batch micro[32];
    int rc = l->from  ? restore(l, &p, e, rank, &at, err)
             : l->put ? put_state(e, l->put, l->adam_t, err)
                      : engine_init_weights(e, err);
    if (!rc && l->begin)
        gather(e, l->begin, STATE);
    if (!rc && l->from && rank == 0)
        l->at = at;
    for (int s = 0; s < l->steps && !rc; s++) {
        struct step_request request = {.lr = c->lr};
        struct step_result result;
        deal(c, &p, rank, l->first + s, batches, micro);
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && rank == p.world - 1) {
            l->loss[s] = result.loss;
            l->norm[s] = result.grad_norm;
        }
    }
    if (!rc && l->end)
        gather(e, l->end, STATE);
    if (!rc && l->to)
        rc = save(l, &p, e, rank, err);
    if (!rc && rank == 0)
        l->adam_t = tiny_adam_t(e);
    free(batches);
    return rc;
}

static void run_leg(struct leg *l)
{
    struct plan p;
    tiny_plan(&l->c, &p);
    tiny_run(&p, 1, leg_body, l, NULL);
}

/* ---- pairs ---- */

struct cut {
    int tp, pp, dp, zero, strategy;
    bool published;
};
struct pair {
    const char *name;
    int factorization, gate;
    bool tied, fp64, from_bf16, to_bf16;
    bool six; /* heads */
    int V, d; /* d 0: 24, so that parts of slices begin within rows */
    struct cut a, b;
};

static const struct pair pairs[] = {
    {.name = "the same", .factorization = COLA, .V = 20, .a = {2, 1, 2, 0, BTP}, .b = {2, 1, 2, 0, BTP}},
    {.name = "zero off", .factorization = COLA, .V = 20, .a = {1, 1, 2, 1, BTP}, .b = {1, 1, 2, 0, BTP}},
    {.name = "tp to dp", .factorization = COLA, .V = 20, .a = {4, 1, 1, 0, BTP}, .b = {1, 1, 4, 1, BTP}},
    {.name = "dp to tp, bf16",
     .factorization = SVD,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 20,
     .a = {1, 1, 4, 1, BTP},
     .b = {4, 1, 1, 0, BTP}},
    {.name = "halves to thirds",
     .factorization = COLA,
     .six = true,
     .V = 37,
     .a = {2, 1, 2, 0, BTP},
     .b = {3, 1, 1, 0, BTP}},
    {.name = "one to all", .factorization = COLA, .V = 37, .a = {1, 1, 1, 0, BTP}, .b = {2, 2, 2, 1, BTP}},
    {.name = "all to one, bf16 to fp32",
     .factorization = COLA,
     .from_bf16 = true,
     .V = 37,
     .a = {2, 2, 2, 1, BTP},
     .b = {1, 1, 1, 0, BTP}},
    {.name = "stages, tied",
     .factorization = COLA,
     .tied = true,
     .V = 37,
     .a = {2, 3, 1, 0, BTP},
     .b = {1, 2, 2, 1, BTP}},
    {.name = "untied stages, fp64",
     .factorization = SVD,
     .fp64 = true,
     .V = 21,
     .a = {1, 3, 2, 1, BTP},
     .b = {4, 1, 1, 0, VANILLA}},
    {.name = "sliced to BTP", .factorization = COLA, .V = 20, .a = {2, 1, 2, 1, VANILLA}, .b = {4, 1, 1, 0, BTP}},
    {.name = "BTP to published, tied, fp32 to bf16",
     .factorization = SVD,
     .tied = true,
     .to_bf16 = true,
     .V = 37,
     .a = {4, 1, 2, 1, BTP},
     .b = {2, 2, 2, 0, VANILLA, true}},
    {.name = "published to sliced",
     .factorization = COLA,
     .V = 37,
     .a = {4, 1, 1, 0, VANILLA, true},
     .b = {2, 1, 2, 1, VANILLA}},
    {.name = "dense", .factorization = FULL_RANK, .V = 37, .a = {4, 1, 1, 0, FULL}, .b = {2, 2, 2, 1, FULL}},
    {.name = "dense, tied, bf16",
     .factorization = FULL_RANK,
     .tied = true,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 37,
     .a = {2, 1, 4, 1, FULL},
     .b = {1, 3, 1, 0, FULL}},
    {.name = "LAX",
     .factorization = LAX,
     .gate = IDENTITY,
     .V = 37,
     .a = {2, 1, 2, 1, BTP},
     .b = {4, 2, 1, 0, VANILLA}},
    {.name = "LAX LINEAR",
     .factorization = LAX,
     .gate = LINEAR,
     .tied = true,
     .V = 37,
     .a = {4, 1, 2, 1, VANILLA},
     .b = {1, 3, 1, 0, BTP}},
    {.name = "LAX TENSOR, bf16",
     .factorization = LAX,
     .gate = TENSOR,
     .from_bf16 = true,
     .to_bf16 = true,
     .V = 37,
     .a = {2, 3, 1, 0, BTP},
     .b = {4, 1, 2, 1, VANILLA, true}},
};
enum { PAIRS = sizeof pairs / sizeof pairs[0] };

static bool same_cut(const struct pair *p)
{
    const struct cut *a = &p->a, *b = &p->b;
    return a->tp == b->tp && a->pp == b->pp && a->dp == b->dp && a->zero == b->zero && a->strategy == b->strategy &&
           a->published == b->published;
}

static struct tiny tiny_cut(const struct pair *pair, const struct cut *cut)
{
    struct tiny c = tiny_default;
    c.way = (struct tiny_way){.name = pair->name,
                              .factorization = pair->factorization,
                              .strategy = cut->strategy,
                              .published = cut->published,
                              .gate = pair->gate};
    c.L = 3;
    c.r = pair->gate == TENSOR ? 12 : 4;
    c.d = pair->d ? pair->d : 24;
    c.f = pair->six ? 24 : 20;
    c.h = c.hk = pair->six ? 6 : 4;
    c.V = pair->V;
    c.tied = pair->tied;
    c.fp64 = pair->fp64;
    c.bf16 = cut == &pair->a ? pair->from_bf16 : pair->to_bf16;
    c.tp = cut->tp;
    c.pp = cut->pp;
    c.dp = cut->dp;
    c.zero = cut->zero;
    c.micro = cut == &pair->a || same_cut(pair) ? 1 : 2; /* another micro-batch too */
    c.global = 8;
    c.bucket_bytes = cut->zero ? 300 : 0;
    return c;
}

/* Every element has one owner in both, and the same bits (doubles hold a float and its sign of zero exactly). */
static void same_state(const char *what, const struct result *got, const struct result *want)
{
    assert_int_equal(got->n, want->n);
    for (int i = 0; i < want->n; i++) {
        const struct whole *w = &want->tensors[i], *g = NULL;
        for (int k = 0; k < got->n && !g; k++)
            g = strcmp(got->tensors[k].name, w->name) ? NULL : &got->tensors[k];
        assert_non_null(g);
        for (int kind = 0; kind < STATE_GRAD; kind++)
            for (int64_t k = 0; k < w->rows * w->cols; k++)
                if (g->seen[kind][k] != 1 || w->seen[kind][k] != 1 ||
                    memcmp(&g->values[kind][k], &w->values[kind][k], sizeof(double)))
                    fail_msg("%s: element %lld of %s, kind %d: %.17g, not %.17g", what, (long long)k, w->name, kind,
                             g->values[kind][k], w->values[kind][k]);
    }
}

static void free_leg(struct leg *l)
{
    if (l->begin)
        result_free(l->begin);
    if (l->end)
        result_free(l->end);
    free(l);
}

static struct leg *new_leg(const struct pair *pair, const struct cut *cut, int first, int steps)
{
    struct leg *l = calloc(1, sizeof *l);
    l->c = tiny_cut(pair, cut);
    l->first = first;
    l->steps = steps;
    l->begin = result_new();
    l->end = result_new();
    return l;
}

/* A; B from A's checkpoint; B from what the test puts in; A again from B's checkpoint, and from what the test puts in. */
static void goes_on(const struct pair *pair)
{
    char to[2][96], from[2][128];
    struct run_position want = {.step = TRAINED, .samples = 8 * TRAINED, .tokens = 17 * TRAINED, .skipped = 3};
    for (int i = 0; i < 2; i++) {
        snprintf(to[i], sizeof to[i], "%s/%s/%d", dir, pair->name, i);
        snprintf(from[i], sizeof from[i], "%s/step-%d.a1", to[i], TRAINED + i * MORE);
    }
    struct leg *a = new_leg(pair, &pair->a, 0, TRAINED), *on = new_leg(pair, &pair->a, TRAINED, MORE);
    struct leg *b = new_leg(pair, &pair->b, TRAINED, MORE), *put = new_leg(pair, &pair->b, TRAINED, MORE);
    struct leg *back = new_leg(pair, &pair->a, TRAINED + MORE, AGAIN);
    struct leg *again = new_leg(pair, &pair->a, TRAINED + MORE, AGAIN);
    a->to = to[0];
    run_leg(a);
    on->put = put->put = a->end;
    on->adam_t = put->adam_t = a->adam_t;
    run_leg(on);
    run_leg(put);
    b->from = from[0];
    b->to = to[1];
    run_leg(b);
    same_state(pair->name, b->begin, a->end);
    same_state(pair->name, b->end, put->end);
    assert_true(b->adam_t == TRAINED + MORE && b->at.adam_t == TRAINED);
    assert_true(b->at.step == want.step && b->at.samples == want.samples && b->at.tokens == want.tokens &&
                b->at.skipped == want.skipped && b->at.spike.mean == 3.25);
    for (int s = 0; s < MORE; s++)
        assert_true(b->loss[s] == put->loss[s] && b->norm[s] == put->norm[s]);
    /* The function is A's too: the first loss to the rounding of a forward pass (fp32: layouts.h has 1e-6; bf16: 2^-9,
     * as if each logit were rounded once more). To the bit where nothing changed. */
    double apart = relative(b->loss[0], on->loss[0]);
    bool bf16 = pair->from_bf16 || pair->to_bf16;
    print_message("%s: first loss %.9f, %.1e from A's; %lld bytes read, %lld of state\n", pair->name, b->loss[0], apart,
                  (long long)b->read, (long long)b->needed);
    assert_true(apart < (bf16 ? 0x1p-9 : 1e-6));
    if (same_cut(pair)) {
        assert_memory_equal(b->loss, on->loss, sizeof b->loss);
        same_state(pair->name, b->end, on->end);
    }
    back->from = from[1];
    run_leg(back);
    same_state(pair->name, back->begin, b->end);
    again->put = b->end;
    again->adam_t = b->adam_t;
    run_leg(again);
    same_state(pair->name, back->end, again->end);
    for (int s = 0; s < AGAIN; s++)
        assert_true(back->loss[s] == again->loss[s] && back->norm[s] == again->norm[s]);
    free_leg(again);
    free_leg(a);
    free_leg(on);
    free_leg(b);
    free_leg(put);
    free_leg(back);
}

static void every_pair(void **state)
{
    (void)state;
    for (int i = 0; i < PAIRS; i++)
        goes_on(&pairs[i]);
}

/* ---- replicas share what they hold ---- */

/* A model that is large beside the holes that align tensors, with a vocabulary that is not padded. With zero 0 and with
 * zero 1 each replica writes its 1/dp. */
static void replicas_write_even_shares(void **state)
{
    (void)state;
    static const struct pair large[] = {
        {.name = "two", .factorization = COLA, .V = 1536, .d = 192, .a = {2, 1, 2, 0, BTP}, .b = {2, 1, 2, 1, BTP}},
        {.name = "three", .factorization = SVD, .V = 1536, .d = 192, .a = {1, 2, 3, 0, BTP}, .b = {1, 2, 3, 1, BTP}},
        {.name = "four", .factorization = FULL_RANK, .V = 1536, .d = 192, .a = {1, 1, 4, 0, FULL}, .b = {2, 1, 4, 1, FULL}},
    };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        for (int b = 0; b < 2; b++) {
            struct leg *l = new_leg(&large[i], b ? &large[i].b : &large[i].a, 0, 0);
            char to[96];
            snprintf(to, sizeof to, "%s/%s%d", dir, large[i].name, b);
            l->c.global = 12;
            l->c.micro = 1;
            l->to = to;
            l->shared = true;
            result_free(l->begin);
            result_free(l->end);
            l->begin = l->end = NULL;
            run_leg(l);
            free_leg(l);
        }
}

/* ---- slices of more bytes than are read at once ---- */

struct large {
    const char *from;
    const struct plan *plan;
    int64_t differ, compared;
};

/* Initial weights do not depend on the layout: those of a checkpoint from another one are those drawn here. */
static int restores_initial_weights(struct engine *e, int rank, void *arg, struct error *err)
{
    struct large *l = arg;
    struct run_position at;
    int64_t n = engine_tensor_count(e);
    double **drawn = calloc((size_t)n, sizeof *drawn);
    int rc = engine_init_weights(e, err);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < n; i++) {
            struct state_tensor t;
            engine_tensor(e, i, STATE_WEIGHT, &t);
            int64_t count = t.device ? t.tensor.nrows * t.tensor.ncols : t.count;
            double *now = calloc((size_t)count + 1, sizeof *now);
            tiny_download(e, t.dtype, t.device ? t.device : t.own, count, now);
            for (int64_t k = 0; k < count && pass; k++)
                __atomic_fetch_add(&l->differ, now[k] != drawn[i][k], __ATOMIC_RELAXED);
            __atomic_fetch_add(&l->compared, pass ? count : 0, __ATOMIC_RELAXED);
            free(drawn[i]);
            drawn[i] = pass ? NULL : now;
            if (pass)
                free(now);
        }
        if (!pass) {
            tiny_randomize(e, 9);
            rc = rc ? rc : checkpoint_restore(l->from, l->plan, e, rank, NULL, &at, err);
        }
    }
    free(drawn);
    return rc;
}

/* An embedding [70000, 8], cut along hidden in slices of rows of 16 bytes: one of 1.1 MB, which is read in pieces that
 * go row by row to their places, or row by row. */
static void large_slices(void **state)
{
    (void)state;
    static const struct pair wide = {
        .name = "wide", .factorization = COLA, .V = 70000, .d = 8, .a = {2, 1, 1, 0, BTP}, .b = {1, 1, 1, 0, BTP}};
    for (int i = 0; i < 2; i++) {
        struct leg *l = new_leg(&wide, i ? &wide.b : &wide.a, 0, 0);
        struct tiny c = tiny_cut(&wide, i ? &wide.a : &wide.b);
        struct plan p;
        struct large large = {0};
        char to[96], from[128];
        result_free(l->begin);
        result_free(l->end);
        l->begin = l->end = NULL;
        snprintf(to, sizeof to, "%s/wide%d", dir, i);
        snprintf(from, sizeof from, "%s/step-0.a1", to);
        l->to = to;
        run_leg(l);
        free_leg(l);
        tiny_plan(&c, &p);
        large.from = from;
        large.plan = &p;
        tiny_run(&p, 1, restores_initial_weights, &large, NULL);
        assert_int_equal(large.differ, 0);
        assert_true(large.compared >= 2 * 70000 * 8); /* embedding and head, of one rank or of all */
    }
}

/* ---- what is refused ---- */

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
    assert_int_equal(take(&one, from, &err), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair),
        cmocka_unit_test(replicas_write_even_shares),
        cmocka_unit_test(large_slices),
        cmocka_unit_test(damage_is_named),
        cmocka_unit_test(gaps_and_overlaps_are_named),
        cmocka_unit_test(another_model_is_refused),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
