/* init.h, and the engine's initial weights. */
#include "worker/init.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "worker/engine_internal.h"

/* The finaliser of MurmurHash3: every input bit reaches every output bit. */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    x ^= x >> 33;
    x *= UINT64_C(0xc4ceb9fe1a85ec53);
    x ^= x >> 33;
    return x;
}

uint64_t init_key(uint64_t seed, const char *name)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a, 64 bits */
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        h = (h ^ *c) * UINT64_C(0x100000001b3);
    return mix(h ^ mix(seed + UINT64_C(0x9e3779b97f4a7c15)));
}

static void philox(uint64_t key, uint64_t counter, uint64_t out[2])
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = UINT64_C(0xD2511F53) * c0, b = UINT64_C(0xCD9E8D57) * c2;
        uint32_t next0 = (uint32_t)(b >> 32) ^ c1 ^ k0, next2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = next0;
        c2 = next2;
        k0 += UINT32_C(0x9E3779B9);
        k1 += UINT32_C(0xBB67AE85);
    }
    out[0] = (uint64_t)c1 << 32 | c0;
    out[1] = (uint64_t)c3 << 32 | c2;
}

/* Numbers 2 pair and 2 pair + 1. */
static void normal_pair(uint64_t key, uint64_t pair, double out[2])
{
    uint64_t bits[2];
    philox(key, pair, bits);
    double u = ((double)(bits[0] >> 11) + 1) * 0x1p-53; /* (0, 1]: its logarithm is finite */
    double angle = 2 * acos(-1.0) * ((double)(bits[1] >> 11) * 0x1p-53);
    double radius = sqrt(-2 * log(u));
    out[0] = radius * cos(angle);
    out[1] = radius * sin(angle);
}

static void uniform_pair(uint64_t key, uint64_t pair, double out[2])
{
    uint64_t bits[2];
    philox(key, pair, bits);
    for (int half = 0; half < 2; half++)
        out[half] = sqrt(3) * ((double)(bits[half] >> 11) * 0x1p-52 - 1);
}

static void sequence(void (*pair_of)(uint64_t, uint64_t, double[2]), uint64_t key, uint64_t first, int64_t n,
                     double *out)
{
    for (int64_t i = 0; i < n;) {
        uint64_t at = first + (uint64_t)i;
        double pair[2];
        pair_of(key, at / 2, pair);
        for (uint64_t half = at % 2; half < 2 && i < n; half++)
            out[i++] = pair[half];
    }
}

void init_normal(uint64_t key, uint64_t first, int64_t n, double *out)
{
    sequence(normal_pair, key, first, n, out);
}

void init_uniform(uint64_t key, uint64_t first, int64_t n, double *out)
{
    sequence(uniform_pair, key, first, n, out);
}

/* Elements [first, first + n) of this rank's slice, row-major. */
static void draw(const struct plan_tensor *p, uint64_t key, int64_t first, int64_t n, double *out)
{
    bool drawn = p->init == INIT_NORMAL || p->init == INIT_UNIFORM;
    for (int64_t at = first, piece; at < first + n; at += piece) {
        int64_t row = at / p->ncols, from = at % p->ncols, left = first + n - at;
        double *values = out + (at - first);
        piece = p->ncols - from < left ? p->ncols - from : left;
        for (int64_t j = 0; j < piece && !drawn; j++)
            values[j] = p->init == INIT_ONE ? 1 : 0;
        if (!drawn)
            continue;
        sequence(p->init == INIT_NORMAL ? normal_pair : uniform_pair, key,
                 (uint64_t)(p->row0 + row) * (uint64_t)p->cols + (uint64_t)(p->col0 + from), piece, values);
        for (int64_t j = 0; j < piece; j++)
            values[j] *= p->init_std;
    }
}

enum {
    INIT_PIECE = 1 << 18, /* elements of a thread: a device is waited for once for those of all */
    INIT_THREADS = 16,    /* at most */
    INIT_RANKS = 8,       /* of a job on one machine, of which the engine knows nothing: seldom more */
};

/* A thread's part of a tensor, in host memory. */
struct drawing {
    const struct plan_tensor *tensor;
    uint64_t key;
    enum dtype dtype;
    int64_t first, n;
    double *values;
    void *host;
};

static void *draw_part(void *arg)
{
    const struct drawing *d = arg;
    draw(d->tensor, d->key, d->first, d->n, d->values);
    for (int64_t j = 0; j < d->n; j++) {
        if (d->dtype == DTYPE_F64)
            ((double *)d->host)[j] = d->values[j];
        else
            ((float *)d->host)[j] = (float)d->values[j];
    }
    return NULL;
}

/* What no thread can be had for is drawn here. */
static void draw_parts(const struct drawing *whole, int threads)
{
    struct drawing parts[INIT_THREADS];
    pthread_t ids[INIT_THREADS];
    bool started[INIT_THREADS] = {false};
    int64_t size = (whole->n + threads - 1) / threads;
    int n = 0;
    if (size < INIT_PIECE / 4)
        size = INIT_PIECE / 4;
    for (int64_t at = 0; at < whole->n; at += size, n++) {
        parts[n] = *whole;
        parts[n].first += at;
        parts[n].n = whole->n - at < size ? whole->n - at : size;
        parts[n].values += at;
        parts[n].host = (char *)whole->host + (size_t)at * dtype_size(whole->dtype);
    }
    for (int i = 1; i < n; i++)
        started[i] = !pthread_create(&ids[i], NULL, draw_part, &parts[i]);
    for (int i = 0; i < n; i++) {
        if (started[i])
            pthread_join(ids[i], NULL);
        else
            draw_part(&parts[i]);
    }
}

/* This rank's slice, or the part of it that is here, through host memory. */
static int init_tensor(struct engine *e, const struct state_tensor *t, int threads, double *values, void *host,
                       struct error *err)
{
    const struct plan_tensor *p = &t->tensor;
    struct drawing part = {
        .tensor = p, .key = init_key(e->plan->init_seed, p->name), .dtype = t->dtype, .values = values, .host = host};
    int64_t first = t->device ? 0 : t->first, end = t->device ? p->nrows * p->ncols : first + t->count;
    char *to = t->device ? t->device : t->own;
    size_t bytes = dtype_size(t->dtype);
    for (part.first = first; part.first < end; part.first += part.n) {
        part.n = end - part.first < threads * INIT_PIECE ? end - part.first : threads * INIT_PIECE;
        draw_parts(&part, threads);
        e->k->upload(e->ks, to + (size_t)(part.first - first) * bytes, host, (size_t)part.n * bytes);
        int rc = e->k->stream_sync(e->ks, err); /* `host` is used again */
        if (rc)
            return rc;
    }
    return ERR_OK;
}

/* The numbers do not depend on it; drawing those of billions of parameters takes one thread minutes. */
static int init_threads(const struct plan *p)
{
    cpu_set_t cpus;
    int found = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    int n = found / (p->world < INIT_RANKS ? p->world : INIT_RANKS);
    return n < 1 ? 1 : n > INIT_THREADS ? INIT_THREADS : n;
}

int engine_init_weights(struct engine *e, struct error *err)
{
    int threads = init_threads(e->plan);
    size_t bytes = (size_t)threads * INIT_PIECE * sizeof(double);
    double *values = malloc(bytes), *host = malloc(bytes);
    int rc = values && host ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for initial weights");
    for (int64_t i = 0; i < e->tensor_count && !rc; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        rc = init_tensor(e, &t, threads, values, host, err);
    }
    free(values);
    free(host);
    return rc ? rc : engine_weights_changed(e, err);
}
