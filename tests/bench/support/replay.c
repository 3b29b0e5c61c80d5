/* replay.h */
#include "tests/bench/support/replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"

enum { BLOCK = 4194301 /* prime: rows of no matrix repeat */, CALLS_MOST = 256, ALIGN = 256 };

/* ---- memory ---- */

/* bf16, near a normal distribution of variance 1. */
static void spread(uint16_t *x, int64_t n)
{
    uint64_t state = 7;
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint64_t z = (state ^ state >> 33) * 0xff51afd7ed558ccdu;
        float sum = 0, value;
        uint32_t bits;
        for (int j = 0; j < 4; j++)
            sum += (float)((z >> (16 * j)) & 0xffff) / 65535.0f;
        value = (sum - 2) * sqrtf(3);
        memcpy(&bits, &value, sizeof bits);
        x[i] = (uint16_t)(bits >> 16);
    }
}

static int fill(struct replay *r, struct error *err)
{
    size_t piece = BLOCK * sizeof(uint16_t);
    uint16_t *block = r->k->host_alloc(piece, err);
    if (!block)
        return err->code;
    spread(block, BLOCK);
    for (size_t done = 0; done < r->in.bytes; done += piece)
        r->k->upload(r->ks, r->in.base + done, block, r->in.bytes - done < piece ? r->in.bytes - done : piece);
    int rc = r->k->stream_sync(r->ks, err);
    r->k->host_release(block);
    return rc;
}

int replay_open(struct replay *r, const struct options *o, const struct device *d, size_t workspace, struct error *err)
{
    const size_t mib = 1 << 20;
    struct scratch_shape shape = {.T = 1 << 16, .width = 1 << 15, .vocab = 1 << 17};
    *r = (struct replay){.k = d->kernels, .copy = d->alone.world.backend->copy, .captures = !o->cpu};
    r->in.bytes = o->cpu ? 32 * mib : 4096 * mib;
    r->out.bytes = o->cpu ? 32 * mib : 4096 * mib;
    r->sums.bytes = o->cpu ? 32 * mib : 2048 * mib;
    r->workspace_bytes = workspace;
    int rc = r->k->stream_create(1, &r->ks, err);
    if (rc)
        return rc;
    size_t scratch = r->k->scratch_bytes ? r->k->scratch_bytes(&shape) : 0;
    if (!(r->in.base = r->k->alloc(r->in.bytes, err)) || !(r->out.base = r->k->alloc(r->out.bytes, err)) ||
        !(r->sums.base = r->k->alloc(r->sums.bytes, err)) || (scratch && !(r->scratch = r->k->alloc(scratch, err))) ||
        (workspace && !(r->workspace = r->k->alloc(workspace, err))))
        return err->code;
    if (scratch)
        r->k->set_scratch(r->ks, r->scratch, scratch);
    r->k->zero(r->ks, r->out.base, r->out.bytes);
    r->k->zero(r->ks, r->sums.base, r->sums.bytes);
    return fill(r, err);
}

void replay_close(struct replay *r)
{
    void *const all[] = {r->in.base, r->out.base, r->sums.base, r->scratch, r->workspace};
    if (r->ks)
        r->k->stream_destroy(r->ks);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i])
            r->k->release(all[i]);
    *r = (struct replay){.k = NULL};
}

static void *next(char *base, size_t all, size_t *at, size_t bytes)
{
    if (bytes > all)
        return NULL;
    if (*at + bytes > all)
        *at = 0;
    void *p = base + *at;
    *at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

const void *replay_in(struct replay *r, size_t bytes)
{
    return next(r->in.base, r->in.bytes, &r->in.at, bytes);
}
void *replay_out(struct replay *r, size_t bytes)
{
    return next(r->out.base, r->out.bytes, &r->out.at, bytes);
}
void *replay_sums(struct replay *r, size_t bytes)
{
    return next(r->sums.base, r->sums.bytes, &r->sums.at, bytes);
}

static size_t extent(int64_t rows, int64_t columns, int64_t ld, int batch, int64_t stride, size_t element)
{
    int64_t last = (batch - 1) * (batch > 1 ? stride : 0) + (rows - 1) * ld + columns;
    return (size_t)last * element;
}

size_t replay_gemm_bytes(const struct gemm *g, char operand)
{
    switch (operand) {
    case 'a':
        return extent(g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->lda, g->batch, g->stride_a, 2);
    case 'b':
        return extent(g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->ldb, g->batch, g->stride_b, 2);
    default:
        return extent(g->m, g->n, g->ldc, g->batch, g->stride_c, g->c_grad ? 4 : 2);
    }
}

bool replay_gemm_fits(const struct replay *r, const struct gemm *g)
{
    return replay_gemm_bytes(g, 'a') <= r->in.bytes && replay_gemm_bytes(g, 'b') <= r->in.bytes &&
           replay_gemm_bytes(g, 'c') <= (g->c_grad ? r->sums.bytes : r->out.bytes) &&
           (!g->add || replay_gemm_bytes(g, 'c') <= r->in.bytes);
}

void replay_gemm(struct replay *r, const struct gemm *g)
{
    const void *a = replay_in(r, replay_gemm_bytes(g, 'a')), *b = replay_in(r, replay_gemm_bytes(g, 'b'));
    size_t bytes = replay_gemm_bytes(g, 'c');
    struct gemm here = *g;
    if (g->add)
        here.add = replay_in(r, bytes);
    r->k->gemm(r->ks, &here, a, b, g->c_grad ? replay_sums(r, bytes) : replay_out(r, bytes));
}

void replay_attention(struct replay *r, const struct attention *a, bool backward)
{
    size_t rows = (size_t)(a->b * a->s), q = rows * (size_t)a->ldq * 2, k = rows * (size_t)a->ldk * 2;
    size_t v = rows * (size_t)a->ldv * 2, o = rows * (size_t)a->ldo * 2, lse = rows * (size_t)a->h * 4;
    const void *qs = replay_in(r, q), *ks = replay_in(r, k), *vs = replay_in(r, v);
    if (!backward) {
        void *out = replay_out(r, o);
        r->k->attention_forward(r->ks, a, qs, ks, vs, out, replay_out(r, lse), r->workspace);
        return;
    }
    const void *os = replay_in(r, o), *stats = replay_in(r, lse), *dout = replay_in(r, o);
    void *dq = replay_out(r, q), *dk = replay_out(r, k), *dv = replay_out(r, v);
    r->k->attention_backward(r->ks, a, qs, ks, vs, os, stats, dout, dq, dk, dv, r->workspace);
}

/* ---- time ---- */

int repeated_make(struct replay *r, struct repeated *x, double ms, struct error *err)
{
    int64_t start;
    double one;
    x->graph = NULL;
    x->calls = 1;
    x->body(r, x->arg);
    int rc = r->k->stream_sync(r->ks, err);
    start = clock_mono_ns();
    for (int i = 0; i < 2 && !rc; i++)
        x->body(r, x->arg);
    if (!rc)
        rc = r->k->stream_sync(r->ks, err);
    one = (double)(clock_mono_ns() - start) / (double)NS_PER_MS / 2;
    if (rc || !r->captures || !r->k->capture_begin)
        return rc;
    x->calls = (int)fmin(fmax(ms / fmax(one, 1e-3), 1), CALLS_MOST);
    rc = r->k->capture_begin(r->ks, err);
    for (int i = 0; i < x->calls && !rc; i++)
        x->body(r, x->arg);
    return rc ? rc : r->k->capture_end(r->ks, &x->graph, err);
}

static void launch(struct replay *r, const struct repeated *x)
{
    if (x->graph)
        r->k->graph_launch(r->ks, x->graph);
    else
        x->body(r, x->arg);
}

/* The host waits after 10 ms of work or more: what a wait costs is far below that. */
int repeated_run(struct replay *r, const struct repeated *x, double seconds, double *ms, struct error *err)
{
    int64_t start = clock_mono_ns(), now = start;
    int64_t launches = 0;
    int rc = ERR_OK, burst = 1;
    while (!rc && (double)(now - start) < seconds * (double)NS_PER_S) {
        int64_t before = now;
        for (int i = 0; i < burst; i++)
            launch(r, x);
        rc = r->k->stream_sync(r->ks, err);
        now = clock_mono_ns();
        launches += burst;
        if (now - before < 10 * NS_PER_MS && burst < 1 << 10)
            burst *= 2;
    }
    *ms = (double)(now - start) / (double)NS_PER_MS / (double)(launches * x->calls);
    return rc;
}

void repeated_free(struct replay *r, struct repeated *x)
{
    if (x->graph)
        r->k->graph_destroy(x->graph);
    x->graph = NULL;
}

static void big_product(struct replay *r, const void *arg)
{
    replay_gemm(r, arg);
}

int replay_warm(struct replay *r, double seconds, struct error *err)
{
    int64_t n = r->captures ? 8192 : 64;
    struct gemm g = {.m = n, .n = n, .k = n, .trans_b = true, .lda = n, .ldb = n, .ldc = n, .batch = 1};
    struct repeated x = {.body = big_product, .arg = &g};
    double ms;
    int rc = repeated_make(r, &x, 5, err);
    if (!rc)
        rc = repeated_run(r, &x, seconds, &ms, err);
    repeated_free(r, &x);
    return rc;
}
