/* What the tests of checkpoints that go on in another layout begin with: a leg, which is a run from a state to a state,
 * and the layouts it is of. */
#ifndef BOOST_TESTS_WORKER_RELAYOUT_H
#define BOOST_TESTS_WORKER_RELAYOUT_H

#include "tests/unit/worker/layouts.h"

#include <dirent.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "worker/checkpoint.h"
#include "worker/safetensors.h"

enum { TRAINED = 20, IO_TEXT = 256 };
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
    snprintf(path, sizeof path, "%s/step-%lld.a1/rank-%05d-of-%05d.safetensors", l->to, (long long)step, rank,
             p->world);
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
        rc = checkpoint_open(&start, p, e, rank, NULL, NULL, &c, err);
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

/* ---- layouts ---- */

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

#endif
