/* Training steps of one process on the CPU, on order: for tests/bench/run.py, which lets another program train the
 * same model from the same weights on the same tokens in turn with this one.
 *
 * Usage: train_bench JOB THREADS WEIGHTS [--set's of the job...]
 * First line out: the model and optimizer as a JSON object; WEIGHTS then holds the initial weights, fp32, tensor behind
 * tensor. For each number on standard input: that many steps, then {"seconds": , "tokens": , "losses": [of each]}. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/jobfile.h"
#include "worker/comm/comm.h"
#include "worker/engine.h"

/* Steps go round a few global batches. */
enum { BATCHES = 4 };
static const double rate = 1e-3;

struct bench {
    struct plan plan;
    struct local_world *alone;
    struct comms comms;
    struct engine *engine;
    struct micro_batch *micro; /* [BATCHES][accumulation] */
    int32_t *tokens;
    int64_t step;
};

static int read_plan(const char *path, int n, char **set, struct plan *plan, struct error *err)
{
    struct job_file f;
    Boost__JobSpec *spec = NULL;
    int rc = jobfile_load(&f, path, JOB_FORMAT_AUTO, false, err);
    for (int i = 0; i < n && !rc; i++)
        rc = jobfile_set(f.spec, &f.arena, set[i], err);
    if (!rc)
        rc = plan_resolve(f.spec, &(struct plan_machine){0}, &spec, err);
    if (!rc)
        rc = plan_make(spec, plan, err);
    if (!rc && (plan->world != 1 || plan->precision != BOOST__PRECISION__VALUE__FP32 || plan->lax || plan->tied ||
                plan->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK))
        rc = error_set(err, ERR_UNSUPPORTED, "the benchmark is of untied low-rank pairs, FP32, one rank");
    if (spec)
        boost__job_spec__free_unpacked(spec, NULL);
    jobfile_free(&f);
    return rc;
}

/* Token number i of a stream that has no pattern a model could learn in a few steps. */
static int32_t token(uint32_t i, int64_t vocab)
{
    uint32_t x = i * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    return (int32_t)((x ^ x >> 16) % (uint32_t)vocab);
}

/* Sequence i has tokens [i (s + 1), (i + 1) (s + 1)): its inputs are the first s, its targets the last s. */
static int make_batches(struct bench *b, struct error *err)
{
    const struct plan *p = &b->plan;
    int64_t n = BATCHES * p->accumulation;
    b->micro = calloc((size_t)n, sizeof *b->micro);
    b->tokens = malloc((size_t)(n * p->T * 2) * sizeof *b->tokens);
    if (!b->micro || !b->tokens)
        return error_set(err, ERR_NOMEM, "no memory for the batches");
    for (int64_t m = 0; m < n; m++) {
        int32_t *inputs = b->tokens + m * p->T * 2, *targets = inputs + p->T;
        for (int64_t i = 0; i < p->T; i++) {
            int64_t at = (m * p->micro_batch + i / p->s) * (p->s + 1) + i % p->s;
            inputs[i] = token((uint32_t)at, p->V);
            targets[i] = token((uint32_t)at + 1, p->V);
        }
        b->micro[m] = (struct micro_batch){inputs, targets};
    }
    return ERR_OK;
}

static int write_weights(const struct bench *b, const char *path, struct error *err)
{
    FILE *f = fopen(path, "w");
    if (!f)
        return error_set(err, ERR_IO, "cannot write %s", path);
    bool written = true;
    for (int64_t i = 0; i < engine_tensor_count(b->engine) && written; i++) {
        struct state_tensor t;
        engine_tensor(b->engine, i, STATE_WEIGHT, &t);
        size_t n = (size_t)(t.tensor.nrows * t.tensor.ncols);
        written = fwrite(t.device, sizeof(float), n, f) == n;
    }
    return fclose(f) || !written ? error_set(err, ERR_IO, "cannot write %s", path) : ERR_OK;
}

static void describe(const struct bench *b, const char *weights)
{
    const struct plan *p = &b->plan;
    printf("{\"hidden\": %lld, \"layers\": %lld, \"heads\": %lld, \"kv_heads\": %lld, \"intermediate\": %lld, ",
           (long long)p->d, (long long)p->L, (long long)p->h, (long long)p->hk, (long long)p->f);
    printf("\"rank\": %lld, \"vocab\": %lld, \"seq_len\": %lld, \"micro_batch\": %lld, \"accumulation\": %lld, ",
           (long long)p->r, (long long)p->V, (long long)p->s, (long long)p->micro_batch, (long long)p->accumulation);
    printf("\"theta\": %.17g, \"norm_eps\": %.17g, \"latent_silu\": %s, \"mlp_silu\": %s, ", p->rope_theta, p->norm_eps,
           p->latent_silu ? "true" : "false", p->mlp_silu ? "true" : "false");
    printf("\"lr\": %.17g, \"beta1\": %.17g, \"beta2\": %.17g, \"eps\": %.17g, \"weight_decay\": %.17g, ", rate,
           p->beta1, p->beta2, p->eps, p->weight_decay);
    printf("\"decay_embeddings\": %s, \"grad_clip\": %.17g, \"batches\": %d, \"parameters\": %lld, ",
           p->decay_embeddings ? "true" : "false", p->grad_clip, BATCHES, (long long)plan_parameters(p));
    printf("\"weights\": \"%s\"}\n", weights);
    fflush(stdout);
}

static int steps(struct bench *b, int64_t n, struct error *err)
{
    int rc = ERR_OK;
    double *losses = calloc((size_t)n, sizeof *losses);
    if (!losses)
        return error_set(err, ERR_NOMEM, "no memory for the losses");
    int64_t start = clock_mono_ns();
    for (int64_t i = 0; i < n && !rc; i++, b->step++) {
        struct step_request request = {.lr = rate};
        struct step_result result;
        rc = engine_step(b->engine, b->micro + b->step % BATCHES * b->plan.accumulation, &request, &result, NULL, NULL,
                         err);
        losses[i] = result.loss;
    }
    double seconds = (double)(clock_mono_ns() - start) / (double)NS_PER_S;
    printf("{\"seconds\": %.9g, \"tokens\": %lld, \"losses\": [", seconds,
           (long long)(n * b->plan.T * b->plan.accumulation));
    for (int64_t i = 0; i < n && !rc; i++)
        printf("%s%.9g", i ? ", " : "", losses[i]);
    printf("]}\n");
    fflush(stdout);
    free(losses);
    return rc;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    struct error err = {0};
    if (argc < 4) {
        fprintf(stderr, "usage: train_bench JOB THREADS WEIGHTS [FIELD=VALUE...]\n");
        return 2;
    }
    int threads = (int)strtol(argv[2], NULL, 10);
    int rc = read_plan(argv[1], argc - 4, argv + 4, &b.plan, &err);
    if (!rc)
        rc = local_world_create(&(struct comm_layout){.tp = 1, .dp = 1, .pp = 1}, &b.alone, &err);
    if (!rc)
        rc = local_comms_join(b.alone, 0, &b.comms, &err);
    if (!rc)
        rc = engine_create(&b.plan, kernels_cpu_fp32(), &b.comms, 0, threads, &b.engine, &err);
    if (!rc)
        rc = engine_init_weights(b.engine, &err);
    if (!rc)
        rc = make_batches(&b, &err);
    if (!rc)
        rc = write_weights(&b, argv[3], &err);
    if (!rc)
        describe(&b, argv[3]);
    char line[32];
    while (!rc && fgets(line, sizeof line, stdin)) {
        int64_t n = strtoll(line, NULL, 10);
        if (n > 0)
            rc = steps(&b, n, &err);
    }
    if (rc)
        fprintf(stderr, "train_bench: %s\n", err.message);
    engine_destroy(b.engine);
    comms_destroy(&b.comms);
    local_world_destroy(b.alone);
    free(b.micro);
    free(b.tokens);
    return rc ? 1 : 0;
}
