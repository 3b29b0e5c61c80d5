/* BTP at tp 2 where each rank reaches the other's memory: sums over tp of latents and of their gradients are left to
 * the kernels that use them. Fakes of those kernels meet the other rank once, in front, as a device's do, and use all
 * that their contract gives: what may be written again is overwritten at once, and one of the two reads late. All
 * numbers and counts are those of the same plan with plain all-reduces, to the bit. */
#include "tests/unit/worker/tiny.h"
#include <sched.h>
#include <stdatomic.h>

enum { STEPS = 3, MICRO = 3, RANKS = 4, LATE = 400 /* yields, at most */ };

/* ---- kernels that sum ---- */

struct pair {
    pthread_barrier_t met;
    atomic_long begun[2];
    char *base[2]; /* of each rank's memory; the other's is read behind the first meeting */
};
/* A rank's end. */
struct end {
    struct pair *pair;
    int rank;
    size_t bytes; /* of its memory */
    long sums;
    double *written[2]; /* part and statistic of its last sum, and how much of each */
    int64_t count[2];
    bool strange; /* parts that no kernel could find */
};
struct kreach {
    struct end *end;
};

static struct pair pairs[RANKS / 2];
static struct end ends[RANKS];
static const struct kreach reaches[RANKS] = {{&ends[0]}, {&ends[1]}, {&ends[2]}, {&ends[3]}};
static __thread struct end *mine;

static void reach(struct comms *c)
{
    mine = &ends[c->tp.world_rank];
    mine->pair = &pairs[c->tp.world_rank / 2];
    mine->rank = c->tp.world_rank % 2; /* in the pair */
    c->tp.reach = &reaches[c->tp.world_rank];
}

static void *alloc(size_t bytes, struct error *err)
{
    char *memory = kernels_cpu_fp64()->alloc(bytes, err);
    if (mine) {
        mine->pair->base[mine->rank] = memory;
        mine->bytes = bytes;
    }
    return memory;
}

/* The other rank has begun this sum, so it has read what this one gave to the last: those places may hold anything. */
static void overwrite_last(struct end *m)
{
    for (int i = 0; i < 2; i++)
        for (int64_t j = 0; j < m->count[i]; j++)
            m->written[i][j] = NAN;
}

/* One of the two, in turn irregularly, reads when the other is about to begin its next sum, unless that waits for this
 * rank on the way. */
static void be_late(struct end *m)
{
    long n = m->sums;
    if (((uint64_t)n * UINT64_C(0x9e3779b97f4a7c15) >> 40 & 1) == (unsigned)m->rank)
        for (int i = 0; i < LATE && atomic_load(&m->pair->begun[!m->rank]) <= n; i++)
            sched_yield();
}

static void meet(struct end *m, const void *part, int64_t count, const void *S, int64_t rows)
{
    m->sums++;
    atomic_store(&m->pair->begun[m->rank], m->sums);
    pthread_barrier_wait(&m->pair->met);
    overwrite_last(m);
    m->written[0] = (double *)part;
    m->count[0] = count;
    m->written[1] = (double *)S;
    m->count[1] = S ? rows : 0;
    be_late(m);
}

/* Of what lies at the same place of both memories; NaN where that is no place. */
static void add_up(struct end *m, const void *part, int64_t count, double *out)
{
    const char *at = part, *own = m->pair->base[m->rank];
    bool inside = at >= own && at + count * (int64_t)sizeof(double) <= own + m->bytes;
    m->strange = m->strange || !inside;
    const double *of[2];
    for (int i = 0; i < 2; i++)
        of[i] = (const double *)(const void *)(m->pair->base[i] + (inside ? at - own : 0));
    for (int64_t j = 0; j < count; j++)
        out[j] = inside ? of[0][j] + of[1][j] : NAN;
}

static void sum_forward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d, double eps,
                        enum latent_act act, const void *part, const void *S, void *H, void *R, void *z)
{
    struct end *m = reach->end;
    meet(m, part, T * n, S, T);
    m->strange = m->strange || !S != !R;
    add_up(m, part, T * n, H);
    if (S && R)
        add_up(m, S, T, R);
    kernels_cpu_fp64()->latent_forward(ks, T, n, d, eps, act, H, R, R, z);
}

static void sum_backward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                         enum latent_act act, const void *latent, const void *R, const void *part, void *dz, void *k)
{
    struct end *m = reach->end;
    meet(m, part, T * n, NULL, 0);
    add_up(m, part, T * n, dz);
    kernels_cpu_fp64()->latent_backward(ks, T, n, d, act, latent, R, dz, k);
}

/* ---- a run ---- */

/* All numbers that a rank has seen, in order. */
struct seen {
    double *values;
    int64_t count;
};
struct outcome {
    struct tiny c;
    struct seen seen[RANKS];
    struct comm_counters counters[RANKS];
    long sums[RANKS];
};

static double *room(struct seen *s, int64_t n)
{
    s->values = realloc(s->values, (size_t)(s->count + n) * sizeof *s->values);
    s->count += n;
    return s->values + s->count - n;
}

static void see_tensors(struct engine *e, enum state_kind kind, struct seen *s)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, kind, &t);
        int64_t n = t.tensor.nrows * t.tensor.ncols;
        tiny_download(e, t.dtype, t.device, n, room(s, n));
    }
}

/* Behind each step but the last an evaluation: forwards without a backward. */
static int steps(struct engine *e, int rank, void *arg, struct error *err)
{
    struct outcome *o = arg;
    struct seen *s = &o->seen[rank];
    struct step_request request = {.lr = 1e-2};
    int n = o->c.global / o->c.micro, rc = ERR_OK;
    tiny_randomize(e, 7);
    for (int step = 0; step < STEPS && !rc; step++) {
        struct tiny_batch b[MICRO];
        struct micro_batch micro[MICRO];
        struct step_result result;
        for (int i = 0; i < n; i++) {
            tiny_batch(&o->c, step * o->c.global + i * o->c.micro, 5, &b[i]);
            micro[i] = b[i].micro;
        }
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (rc)
            return rc;
        double *v = room(s, 2);
        v[0] = result.loss;
        v[1] = result.grad_norm;
        see_tensors(e, STATE_GRAD, s);
        if (step + 1 < STEPS) {
            v = room(s, 2);
            rc = engine_eval(e, micro, &v[0], &v[1], err);
        }
    }
    see_tensors(e, STATE_WEIGHT, s);
    return rc;
}

static void run(struct outcome *o, bool reaches_it)
{
    struct kernels k = *kernels_cpu_fp64();
    struct plan p;
    k.alloc = alloc;
    k.latent_sum_forward = sum_forward;
    k.latent_sum_backward = sum_backward;
    memset(ends, 0, sizeof ends);
    for (int i = 0; i < RANKS / 2; i++) {
        memset(&pairs[i], 0, sizeof pairs[i]);
        pthread_barrier_init(&pairs[i].met, NULL, 2);
    }
    tiny_plan(&o->c, &p);
    p.cuda = true; /* of the plan; the kernels are given */
    tiny_run_on(&p, (struct tiny_device){.kernels = &k, .comms = reaches_it ? reach : NULL}, 1, steps, o, o->counters);
    for (int i = 0; i < RANKS; i++) {
        o->sums[i] = ends[i].sums;
        assert_false(ends[i].strange);
    }
    for (int i = 0; i < RANKS / 2; i++)
        pthread_barrier_destroy(&pairs[i].met);
}

static void compare(const struct tiny *c, bool in_kernels)
{
    struct outcome plain = {.c = *c}, own = {.c = *c};
    long forwards = STEPS * (c->global / c->micro), evaluations = STEPS - 1;
    long again = c->recompute == LAYER ? forwards : 0;
    long sums = in_kernels ? c->L / c->pp * SITE_COUNT * (2 * forwards + again + evaluations) : 0;
    run(&plain, false);
    run(&own, true);
    for (int i = 0; i < c->tp * c->pp; i++) {
        const struct seen *a = &own.seen[i], *b = &plain.seen[i];
        assert_true(a->count == b->count);
        for (int64_t k = 0; k < a->count; k++)
            if (!isfinite(b->values[k]) || memcmp(&a->values[k], &b->values[k], sizeof(double)) != 0)
                fail_msg("%s, recompute %d, pp %d, rank %d: number %lld of %lld is %.17g, not %.17g", c->way.name,
                         c->recompute, c->pp, i, (long long)k, (long long)a->count, a->values[k], b->values[k]);
        assert_memory_equal(&own.counters[i], &plain.counters[i], sizeof own.counters[i]);
        assert_int_equal(plain.sums[i], 0);
        assert_int_equal(own.sums[i], sums);
        free(a->values);
        free(b->values);
    }
}

static struct tiny model(int factorization, bool sync)
{
    struct tiny c = tiny_default;
    c.way.name = factorization == COLA ? sync ? "COLA SYNC" : "COLA" : sync ? "SVD SYNC" : "SVD";
    c.way.factorization = factorization;
    c.way.sync = sync;
    c.tp = 2;
    c.global = MICRO * c.micro;
    return c;
}

static void all_numbers_are_those_of_calls(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct tiny c = model(i & 1 ? COLA : SVD, i & 2);
        c.pp = i & 4 ? 2 : 1;
        c.L = 4;
        for (c.recompute = 0; c.recompute <= LAYER; c.recompute++)
            compare(&c, true);
    }
}

static void a_step_of_one_micro_batch(void **state)
{
    (void)state;
    struct tiny c = model(COLA, false);
    c.L = 1;
    c.global = c.micro;
    compare(&c, true);
}

/* What these kernels cannot do stays with calls, reach or not. */
static void other_plans_call(void **state)
{
    (void)state;
    for (int i = 0; i < TINY_WAYS; i++) {
        struct tiny c = tiny_of(i);
        c.tp = 2;
        c.global = c.micro;
        bool other = c.way.factorization == LAX || c.way.ungrouped || c.way.overlap || c.way.strategy != BTP;
        if (other && tiny_is_valid(&c))
            compare(&c, false);
    }
    struct tiny c = model(COLA, false);
    c.tp = 4;
    compare(&c, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_numbers_are_those_of_calls),
        cmocka_unit_test(a_step_of_one_micro_batch),
        cmocka_unit_test(other_plans_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
