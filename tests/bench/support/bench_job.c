/* bench_job.h */
#include "tests/bench/support/bench_job.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/jobfile.h"
#include "proto/reflect.h"
#include "proto/text.h"

enum { TEXT_MAX = 1024, BLOCK = 4194301 /* prime: rows of no matrix repeat */ };

static const struct size {
    const char *name;
    int hidden, layers, heads, intermediate, rank, vocab, seq_len, micro_batch, tp;
} sizes[] = {
    {"tiny", 64, 2, 4, 128, 32, 256, 64, 2, 2},
    {"60m", 512, 8, 8, 1376, 128, 32000, 2048, 8, 1},
    {"350m", 1024, 24, 16, 2736, 256, 32000, 2048, 8, 1},
    {"1b", 2048, 24, 32, 5440, 512, 32000, 2048, 8, 1},
    {"3b", 3072, 32, 24, 8192, 768, 32000, 4096, 4, 2},
    {"7b", 4096, 32, 32, 11008, 1024, 32000, 4096, 4, 4},
    {"13b", 5120, 40, 40, 13824, 1280, 32000, 4096, 4, 4},
    {"30b", 8192, 60, 64, 22016, 2048, 32000, 4096, 4, 4},
};
static const struct kind {
    const char *name, *factorization;
} kinds[] = {{"full", "FULL_RANK"}, {"svd", "SVD"}, {"cola", "COLA"}, {"lax", "LAX"}};

static int find(const char *model, const struct size **size, const struct kind **kind, struct error *err)
{
    const char *comma = strchr(model, ',');
    size_t len = comma ? (size_t)(comma - model) : strlen(model);
    *size = NULL, *kind = NULL;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strlen(sizes[i].name) == len && !strncmp(sizes[i].name, model, len))
            *size = &sizes[i];
    for (size_t i = 0; comma && i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].name, comma + 1))
            *kind = &kinds[i];
    if (*size && *kind)
        return ERR_OK;
    error_set(err, ERR_INVALID, "\"%s\" is no model of the benchmarks", model);
    return error_hint(err, "SIZE,KIND: tiny 60m 350m 1b 3b 7b 13b 30b; full svd cola lax");
}

int bench_job_tp(const char *model, int *tp, struct error *err)
{
    const struct size *size;
    const struct kind *kind;
    int rc = find(model, &size, &kind, err);
    *tp = rc ? 0 : size->tp;
    return rc;
}

static void write_spec(const struct bench_job *job, const struct size *s, const struct kind *kind, char text[TEXT_MAX])
{
    char rank[32] = "", tp[32] = "";
    if (strcmp(kind->name, "full") != 0)
        snprintf(rank, sizeof rank, "rank: %d", s->rank);
    if (job->tp)
        snprintf(tp, sizeof tp, "tp: %d", job->tp);
    snprintf(text, TEXT_MAX,
             "spec_version: 1 name: \"bench\" model { factorization: %s %s hidden: %d layers: %d heads: %d "
             "intermediate: %d vocab: %d } parallel { %s recompute: NONE micro_batch: %d global_batch: %d } "
             "data { train { path: \"/none\" } seq_len: %d } optimizer { lr: 0.0001 } run { steps: 1 precision: BF16 } "
             "checkpoint { dir: \"/none\" } resources { device: %s }",
             kind->factorization, rank, s->hidden, job->layers ? job->layers : s->layers, s->heads, s->intermediate,
             s->vocab, tp, s->micro_batch, s->micro_batch, s->seq_len, job->cuda ? "CUDA" : "CPU");
}

int bench_job_plan(const struct bench_job *job, struct plan *out, struct error *err)
{
    const struct size *size;
    const struct kind *kind;
    struct arena arena;
    char text[TEXT_MAX];
    Boost__JobSpec *resolved = NULL;
    int rc = find(job->model, &size, &kind, err);
    if (rc)
        return rc;
    arena_init(&arena, 1 << 20);
    write_spec(job, size, kind, text);
    ProtobufCMessage *spec = reflect_new(&arena, &boost__job_spec__descriptor);
    rc = spec ? text_read(spec, &arena, job->model, text, strlen(text), NULL, err)
              : error_set(err, ERR_NOMEM, "no memory for a job");
    for (int i = 0; i < job->n && !rc; i++)
        rc = jobfile_set((Boost__JobSpec *)spec, &arena, job->set[i], err);
    if (!rc)
        rc = plan_resolve((Boost__JobSpec *)spec, &(struct plan_machine){.has_cuda = job->cuda}, &resolved, err);
    if (!rc)
        rc = plan_make(resolved, out, err);
    if (resolved)
        boost__job_spec__free_unpacked(resolved, NULL);
    arena_free(&arena);
    return rc;
}

/* ---- weights and tokens ---- */

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Of variance 1: the sum of four uniform numbers, which is near enough to normal. */
static void spread(float *x, int64_t n)
{
    uint64_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = next(&state);
        double sum = (double)(z & 0xffff) + (double)(z >> 16 & 0xffff) + (double)(z >> 32 & 0xffff) + (double)(z >> 48);
        x[i] = (float)((sum / 65535 - 2) * sqrt(3));
    }
}

/* One tensor from the block, scaled into `staged`, over and over. */
static int fill(struct engine *e, const struct state_tensor *t, const float *block, float *staged, struct error *err)
{
    const struct kernels *k = engine_kernels(e);
    int64_t n = t->tensor.nrows * t->tensor.ncols, piece = n < BLOCK ? n : BLOCK;
    float scale = t->tensor.init == INIT_ONE || t->tensor.init == INIT_ZERO ? 0 : (float)t->tensor.init_std;
    float offset = t->tensor.init == INIT_ONE;
    for (int64_t i = 0; i < piece; i++)
        staged[i] = offset + scale * block[i];
    for (int64_t done = 0; done < n; done += piece) {
        int64_t count = n - done < piece ? n - done : piece;
        k->upload(engine_stream(e), (float *)t->device + done, staged, (size_t)count * sizeof *staged);
    }
    return k->stream_sync(engine_stream(e), err);
}

int bench_fill_weights(struct engine *e, struct error *err)
{
    const struct kernels *k = engine_kernels(e);
    float *block = malloc(BLOCK * sizeof *block);
    float *staged = k->host_alloc(BLOCK * sizeof *staged, err);
    int rc = block && staged ? ERR_OK : ERR_NOMEM;
    if (!block)
        error_set(err, ERR_NOMEM, "no memory for weights");
    if (!rc)
        spread(block, BLOCK);
    for (int64_t i = 0; i < engine_tensor_count(e) && !rc; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        if (t.dtype != DTYPE_F32 || !t.device)
            rc = error_set(err, ERR_UNSUPPORTED, "the benchmark wants whole fp32 master weights");
        else
            rc = fill(e, &t, block, staged, err);
    }
    if (!rc)
        rc = engine_weights_changed(e, err);
    if (staged)
        k->host_release(staged);
    free(block);
    return rc;
}

int bench_tokens(const struct plan *p, int steps, struct micro_batch **micro, int32_t **tokens, struct error *err)
{
    int64_t n = steps * p->accumulation, slice = p->V_pad / p->tp;
    uint64_t vocab = (uint64_t)(slice < p->V ? slice : p->V), state = 2;
    *micro = calloc((size_t)n, sizeof **micro);
    *tokens = malloc((size_t)(n * p->T * 2) * sizeof **tokens);
    if (!*micro || !*tokens)
        return error_set(err, ERR_NOMEM, "no memory for the tokens");
    for (int64_t i = 0; i < n * p->T * 2; i++)
        (*tokens)[i] = (int32_t)(next(&state) % vocab);
    for (int64_t m = 0; m < n; m++)
        (*micro)[m] = (struct micro_batch){*tokens + m * p->T * 2, *tokens + m * p->T * 2 + p->T};
    return ERR_OK;
}
