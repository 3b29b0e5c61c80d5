/* From a user's spec to one without a default or an AUTO left, and to its numbers. */
#include <string.h>

#include "proto/reflect.h"
#include "worker/plan/arena.h"
#include "worker/plan/internal.h"
#include "worker/plan/plan.h"

enum { RESOLVE_ARENA = 8 * LIMIT_JOB_FILE, MICRO_BATCH_UNKNOWN_MEMORY = 8 };

/* Presence last: a value may be worked out from the field's absence. */
#define SET(message, field, val) ((message)->field = (val), (message)->has_##field = 1)
#define RESOLVE(message, field, auto_value, val) \
    do {                                         \
        if ((message)->field == (auto_value))    \
            SET(message, field, val);            \
    } while (0)

/* A context with the kernels of all libraries loaded takes 0.5 to 0.7 GiB on devices of sm_80 to sm_100, NCCL some
 * 0.3 GiB for the communicators of three groups, a cuDNN handle with its plans and cuBLASLt less than 0.2 GiB; the rest
 * is left, for a rank that finds no memory after hours costs more than a slightly smaller micro-batch. */
int64_t plan_cuda_reserve(void)
{
    return (int64_t)1536 << 20;
}

static bool on_cuda(const Boost__JobSpec *s)
{
    return s->resources->device == BOOST__DEVICE__VALUE__CUDA;
}

/* Everything but what memory decides. `s` has all sub-messages. */
static void resolve_fields(Boost__JobSpec *s, const struct plan_machine *machine)
{
    Boost__Model *m = s->model;
    bool full_rank = m->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    if (!m->has_kv_heads)
        SET(m, kv_heads, m->heads);
    if (m->factorization == BOOST__FACTORIZATION__VALUE__LAX && !m->has_lax_base)
        SET(m, lax_base, BOOST__LAX_BASE__VALUE__COLA);
    if (m->factorization == BOOST__FACTORIZATION__VALUE__LAX && !m->has_lax_gate)
        SET(m, lax_gate, BOOST__LAX_GATE__VALUE__IDENTITY);
    RESOLVE(m, mlp_activation, BOOST__SWITCH__VALUE__AUTO,
            full_rank || m->factorization == BOOST__FACTORIZATION__VALUE__SVD ? BOOST__SWITCH__VALUE__ON
                                                                              : BOOST__SWITCH__VALUE__OFF);

    Boost__Parallel *par = s->parallel;
    if (!par->has_strategy)
        SET(par, strategy, spec_strategy(s));
    /* Where there is no choice, AUTO stands. */
    if (par->strategy == BOOST__STRATEGY__VALUE__BTP)
        RESOLVE(par, norm, BOOST__NORM__VALUE__AUTO, BOOST__NORM__VALUE__ONLINE);
    if (par->strategy == BOOST__STRATEGY__VALUE__VANILLA && !par->has_vanilla_attention)
        SET(par, vanilla_attention, BOOST__VANILLA_ATTENTION__VALUE__SLICED);
    if (!full_rank)
        RESOLVE(par, grouped, BOOST__SWITCH__VALUE__AUTO, BOOST__SWITCH__VALUE__ON);
    RESOLVE(par, overlap, BOOST__SWITCH__VALUE__AUTO, BOOST__SWITCH__VALUE__OFF);

    RESOLVE(s->data, format, BOOST__FORMAT__VALUE__AUTO, spec_format(s->data));

    Boost__Resources *res = s->resources;
    RESOLVE(res, device, BOOST__DEVICE__VALUE__AUTO, spec_device(s));
    RESOLVE(res, device, BOOST__DEVICE__VALUE__AUTO,
            machine->has_cuda ? BOOST__DEVICE__VALUE__CUDA : BOOST__DEVICE__VALUE__CPU);
    RESOLVE(s->run, precision, BOOST__PRECISION__VALUE__AUTO,
            on_cuda(s) ? BOOST__PRECISION__VALUE__BF16 : BOOST__PRECISION__VALUE__FP32);
    if (!on_cuda(s)) /* on CUDA, AUTO is settled where cuDNN can be tried */
        RESOLVE(par, attention, BOOST__ATTENTION__VALUE__AUTO, BOOST__ATTENTION__VALUE__OWN);
    if (!res->has_min_nodes)
        SET(res, min_nodes, res->nodes);
    if (!res->has_devices_per_node)
        SET(res, devices_per_node, par->tp * par->pp * par->dp / res->nodes);
}

static int64_t rank_bytes(const Boost__JobSpec *resolved)
{
    struct plan p;
    if (plan_make(resolved, &p, NULL))
        return INT64_MAX;
    struct plan_backend backend;
    plan_backend_estimate(&p, &backend);
    struct plan_memory memory;
    plan_memory(&p, &backend, &memory);
    return memory.total;
}

/* All divisors of n, largest first; the count of them. */
enum { MAX_DIVISORS = 1536 }; /* no 32-bit number has more */
static int divisors_down(int32_t n, int32_t out[MAX_DIVISORS])
{
    int32_t small[MAX_DIVISORS / 2];
    int n_small = 0, count = 0;
    for (int32_t i = 1; (int64_t)i * i <= n; i++)
        if (n % i == 0)
            small[n_small++] = i;
    for (int i = 0; i < n_small; i++)
        out[count++] = n / small[i];
    for (int i = n_small - 1; i >= 0; i--)
        if (small[i] != n / small[i])
            out[count++] = small[i];
    return count;
}

/* Whether the micro-batch that is given fits, or the largest divisor of a replica's sequences that does; `need`
 * becomes the bytes of the last one tried. */
static bool micro_batch_fits(Boost__JobSpec *s, bool given, int64_t limit, int64_t *need)
{
    Boost__Parallel *par = s->parallel;
    int32_t tries[MAX_DIVISORS] = {par->micro_batch};
    int count = given ? 1 : divisors_down(par->global_batch / par->dp, tries);
    for (int i = 0; i < count; i++) {
        if (!given &&
            ((!limit && tries[i] > MICRO_BATCH_UNKNOWN_MEMORY) || (int64_t)tries[i] * s->data->seq_len > INT32_MAX))
            continue;
        SET(par, micro_batch, tries[i]);
        *need = limit ? rank_bytes(s) : 0;
        if (*need <= limit)
            return true;
    }
    return false;
}

/* Micro-batch and recompute. What is given must fit. Recomputing costs time whatever the micro-batch, so it is
 * AUTO's choice only where nothing fits without. */
static int resolve_memory(Boost__JobSpec *s, const struct plan_machine *machine, struct error *err)
{
    static const Boost__Recompute__Value cheapest_first[] = {
        BOOST__RECOMPUTE__VALUE__NONE, BOOST__RECOMPUTE__VALUE__LOW_RANK, BOOST__RECOMPUTE__VALUE__LAYER};
    Boost__Parallel *par = s->parallel;
    bool given = par->has_micro_batch, automatic = par->recompute == BOOST__RECOMPUTE__VALUE__AUTO;
    bool full_rank = s->model->factorization == BOOST__FACTORIZATION__VALUE__FULL_RANK;
    int64_t reserved = s->resources->memory_mib << 20;
    int64_t need = 0, limit = on_cuda(s) ? machine->cuda_bytes : reserved ? reserved : machine->memory_bytes;
    for (size_t i = 0; i < sizeof cheapest_first / sizeof cheapest_first[0]; i++) {
        if (automatic ? full_rank && cheapest_first[i] == BOOST__RECOMPUTE__VALUE__LOW_RANK
                      : cheapest_first[i] != par->recompute)
            continue;
        SET(par, recompute, cheapest_first[i]);
        if (micro_batch_fits(s, given, limit, &need))
            return ERR_OK;
    }
    error_set(err, ERR_INVALID, "a rank needs %lld MiB at parallel.micro_batch = %d, and the %s gives it %lld MiB",
              (long long)(need >> 20), par->micro_batch,
              on_cuda(s) ? "smallest GPU" : reserved ? "job (resources.memory_mib)" : "machine",
              (long long)(limit >> 20));
    return error_hint(err, "lower %sdata.seq_len or the model's size, raise parallel.tp%s",
                      par->micro_batch > 1 ? "parallel.micro_batch, " : "",
                      automatic ? "" : ", or leave parallel.recompute out");
}

int plan_resolve(const Boost__JobSpec *spec, const struct plan_machine *machine, Boost__JobSpec **out,
                 struct error *err)
{
    *out = NULL;
    int rc = plan_validate(spec, err);
    if (rc)
        return rc;
    struct arena a;
    arena_init(&a, RESOLVE_ARENA);
    Boost__JobSpec *s = (Boost__JobSpec *)reflect_copy(&a, &spec->base);
    if (!s) {
        rc = error_set(err, ERR_NOMEM, "no memory to resolve the job");
        goto out;
    }
    rc = reflect_fill_defaults(&s->base, &a, err);
    if (rc)
        goto out;
    resolve_fields(s, machine);
    rc = resolve_memory(s, machine, err);
    if (rc)
        goto out;
    *out = (Boost__JobSpec *)reflect_clone(&s->base); /* the arena goes */
    if (!*out)
        rc = error_set(err, ERR_NOMEM, "no memory to resolve the job");
out:
    arena_free(&a);
    return rc;
}

int plan_make(const Boost__JobSpec *resolved, struct plan *out, struct error *err)
{
    memset(out, 0, sizeof *out);
    const Boost__Model *m = resolved->model;
    const Boost__Parallel *par = resolved->parallel;
    const Boost__Data *data = resolved->data;
    const Boost__Optimizer *opt = resolved->optimizer;
    const Boost__Run *run = resolved->run;
    if (!m || !par || !data || !opt || !run || !m->has_kv_heads || !par->has_strategy || !par->has_micro_batch ||
        m->mlp_activation == BOOST__SWITCH__VALUE__AUTO || par->recompute == BOOST__RECOMPUTE__VALUE__AUTO ||
        run->precision == BOOST__PRECISION__VALUE__AUTO)
        return error_set(err, ERR_INTERNAL, "the job was not resolved before it was planned");
    bool lax = m->factorization == BOOST__FACTORIZATION__VALUE__LAX;
    *out = (struct plan){
        .factorization = m->factorization,
        .strategy = par->strategy,
        .d = m->hidden,
        .f = m->intermediate,
        .r = m->rank,
        .V = m->vocab,
        .L = m->layers,
        .h = m->heads,
        .hk = m->kv_heads,
        .e = m->hidden / m->heads,
        .s = data->seq_len,
        .rope_theta = m->rope_theta,
        .norm_eps = m->norm_eps,
        .tied = m->tie_embeddings,
        .mlp_silu = m->mlp_activation == BOOST__SWITCH__VALUE__ON,
        .latent_silu = m->factorization == BOOST__FACTORIZATION__VALUE__COLA ||
                       (lax && m->lax_base == BOOST__LAX_BASE__VALUE__COLA),
        .lax = lax,
        .lax_gate = m->lax_gate,
        .grouped = par->grouped != BOOST__SWITCH__VALUE__OFF,
        .norm_online = par->norm == BOOST__NORM__VALUE__ONLINE,
        .overlap = par->overlap == BOOST__SWITCH__VALUE__ON && par->tp > 1,
        .published = par->vanilla_attention == BOOST__VANILLA_ATTENTION__VALUE__PUBLISHED,
        .recompute = par->recompute,
        .tp = par->tp,
        .pp = par->pp,
        .dp = par->dp,
        .world = par->tp * par->pp * par->dp,
        .micro_batch = par->micro_batch,
        .global_batch = par->global_batch,
        .zero = par->zero,
        .bucket_bytes = (int64_t)par->bucket_mib << 20,
        .precision = run->precision,
        .cuda = resolved->resources && resolved->resources->device == BOOST__DEVICE__VALUE__CUDA,
        .attention_own = par->attention == BOOST__ATTENTION__VALUE__OWN,
        .attention_cudnn = par->attention == BOOST__ATTENTION__VALUE__CUDNN,
        .deterministic = par->deterministic,
        .init_seed = (uint64_t)run->seed,
        .data_seed = (uint64_t)data->seed,
        .beta1 = opt->beta1,
        .beta2 = opt->beta2,
        .eps = opt->eps,
        .weight_decay = opt->weight_decay,
        .grad_clip = opt->grad_clip,
        .decay_embeddings = opt->decay_embeddings,
    };
    enum { VOCAB_MULTIPLE = 128 };
    out->V_pad = round_up(out->V, (int64_t)VOCAB_MULTIPLE * out->tp);
    out->accumulation = out->global_batch / (out->micro_batch * out->dp);
    out->T = out->micro_batch * out->s;
    /* 8192 rows of 32k columns in bf16. The head's gradient is read and written once a chunk, and the last wave of
     * tiles is a smaller part of a larger product. */
    enum { HEAD_BYTES = 512 << 20 };
    out->head_bytes = out->cuda ? HEAD_BYTES : 0;
    return ERR_OK;
}
