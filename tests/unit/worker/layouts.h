/* A model in any layout against one rank in fp64: initial weights, the loss and every gradient of step 1, ten steps of
 * losses and norms, the weights and moments behind them, wherever they lie; counters. */
#ifndef BOOST_TESTS_WORKER_LAYOUTS_H
#define BOOST_TESTS_WORKER_LAYOUTS_H

#include "tests/unit/worker/processes.h"
#include "tests/unit/worker/tiny.h"

#define UNUSED __attribute__((unused))

#include <sys/mman.h>

enum { STEPS = 10, MAX_TENSORS = 512, MAX_WORLD = 64 };

/* What a run leaves, whole tensors put together from all ranks. */
struct whole {
    char name[PLAN_NAME_MAX];
    int64_t rows, cols;
    double *values[STATE_KINDS];
    unsigned char *seen[STATE_KINDS]; /* times an element was given */
};
struct result {
    struct tiny c;
    int steps;
    double loss[STEPS], norm[STEPS], eval, eval_tokens;
    int64_t tokens;
    int n;
    struct whole tensors[MAX_TENSORS];
    pthread_mutex_t lock;
    struct comm_counters counters[MAX_WORLD];
    size_t used, room; /* of the memory behind this, which processes share */
};
enum { SHARED_BYTES = 16 << 20 };

static void *allocate(struct result *r, size_t bytes)
{
    char *at = (char *)r + r->used;
    r->used += (bytes + 63) / 64 * 64;
    if (r->used > r->room)
        abort();
    return at;
}

static struct whole *find(struct result *r, const struct plan_tensor *p)
{
    for (int i = 0; i < r->n; i++)
        if (!strcmp(r->tensors[i].name, p->name))
            return &r->tensors[i];
    struct whole *w = &r->tensors[r->n++];
    snprintf(w->name, sizeof w->name, "%s", p->name);
    w->rows = p->rows;
    w->cols = p->cols;
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        w->values[kind] = allocate(r, (size_t)(p->rows * p->cols) * sizeof(double));
        w->seen[kind] = allocate(r, (size_t)(p->rows * p->cols));
    }
    return w;
}

/* What this rank owns of every tensor that it counts, to its place; `kinds` are bits of enum state_kind. */
static void gather(struct engine *e, struct result *r, int kinds)
{
    pthread_mutex_lock(&r->lock);
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_KINDS; kind++) {
            if (!(kinds >> kind & 1))
                continue;
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            const struct plan_tensor *p = &t.tensor;
            struct whole *w = find(r, p);
            int64_t n = p->counted ? t.count : 0;
            double *own = calloc((size_t)n + 1, sizeof *own);
            tiny_download(e, t.dtype, t.own, n, own);
            for (int64_t k = 0; k < n; k++) {
                int64_t at = t.first + k, to = (p->row0 + at / p->ncols) * p->cols + p->col0 + at % p->ncols;
                w->values[kind][to] = own[k];
                w->seen[kind][to]++;
            }
            free(own);
        }
    pthread_mutex_unlock(&r->lock);
}

/* The samples of a step that belong to a rank, as data.c deals them: number (m * dp + k) * micro + j. */
static void deal(const struct tiny *c, const struct plan *p, int rank, int64_t step, struct tiny_batch *batches,
                 struct micro_batch *micro)
{
    for (int64_t m = 0; m < p->accumulation; m++) {
        struct tiny_batch *b = &batches[m];
        tiny_batch(c, step * c->global + (m * p->dp + plan_dp_rank(p, rank)) * c->micro, 0, b);
        for (int i = 0; i < c->micro; i++) /* sequences of unequal weight, by their number in the step */
            for (int j = 0; j < (int)((m * p->dp + plan_dp_rank(p, rank)) * c->micro + i) % c->s; j++)
                b->targets[i * c->s + j] = -1;
        micro[m] = b->micro;
    }
}

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct result *r = arg;
    const struct tiny *c = &r->c;
    struct plan p;
    tiny_plan(c, &p);
    struct tiny_batch *batches = calloc((size_t)p.accumulation, sizeof *batches);
    struct micro_batch micro[32];
    int rc = ERR_OK;
    if (r->steps) /* weights at which no gradient is small; else the real initial ones */
        tiny_randomize(e, 5);
    else
        rc = engine_init_weights(e, err);
    for (int s = 0; s < r->steps && !rc; s++) {
        struct step_request request = {.lr = c->lr};
        struct step_result result;
        deal(c, &p, rank, s % 3, batches, micro);
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && rank == p.world - 1) { /* every rank gives the same */
            r->loss[s] = result.loss;
            r->norm[s] = result.grad_norm;
            r->tokens = result.tokens;
        }
        if (s == 0)
            gather(e, r, 1 << STATE_GRAD);
    }
    double loss = 0, tokens = 0;
    for (int i = plan_dp_rank(&p, rank); i < 5 && !rc; i += p.dp) { /* five micro-batches over the replicas */
        double sum, count;
        tiny_batch(c, 1000 + i * c->micro, 4, &batches[0]);
        rc = engine_eval(e, &batches[0].micro, &sum, &count, err);
        loss += sum;
        tokens += count;
    }
    if (!rc)
        rc = engine_eval_total(e, &loss, &tokens, err);
    if (rank == 0) {
        r->eval = loss;
        r->eval_tokens = tokens;
    }
    gather(e, r, 1 << STATE_WEIGHT | 1 << STATE_MOMENT1 | 1 << STATE_MOMENT2);
    free(batches);
    return rc;
}

/* ---- a run, its ranks being threads or processes ---- */

/* How processes are connected, and what they compute with. */
struct platform {
    connect_rank *connect;
    const struct kernels *(*kernels)(const struct plan *p);
};
static UNUSED const struct platform on_cpu = {connect_gloo, tiny_kernels};

static const struct platform *process_platform;
static const struct plan *process_plan;
static struct result *process_result;

static int process_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct engine *e;
    struct error err = {0};
    int rank = comms->world.rank;
    int rc = engine_create(process_plan, process_platform->kernels(process_plan), comms, rank, 1, &e, &err);
    if (!rc)
        rc = train(e, rank, process_result, &err);
    if (rc)
        fprintf(stderr, "# rank %d: %s\n", rank, err.message);
    process_result->counters[rank] = comms->counters;
    engine_destroy(e);
    return rc != 0;
}

/* platform: of processes; NULL: threads. */
static struct result *run_on(const struct tiny *c, const struct plan *p, int steps, const struct platform *platform)
{
    struct result *r = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(r != MAP_FAILED);
    r->c = *c;
    r->steps = steps;
    r->used = (sizeof *r + 63) / 64 * 64;
    r->room = SHARED_BYTES;
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&r->lock, &shared);
    if (!platform) {
        tiny_run(p, 1, train, r, r->counters);
        return r;
    }
    struct comm_layout layout = engine_layout(p);
    struct world w;
    process_platform = platform;
    process_plan = p;
    process_result = r;
    start_connected(&w, p->world, &layout, 560000, platform->connect, process_body);
    all_end_well(&w);
    return r;
}

static struct result *run(const struct tiny *c, int steps, bool processes)
{
    struct plan p;
    tiny_plan(c, &p);
    return run_on(c, &p, steps, processes ? &on_cpu : NULL);
}

static void result_free(struct result *r)
{
    munmap(r, SHARED_BYTES);
}

static double relative(double a, double b)
{
    return fabs(a - b) / fabs(b);
}

/* Every element of the model has exactly one owner; the largest of the tensors' relative Frobenius distances. */
static double compare(const char *layout, struct result *a, struct result *b, int kinds, double bound)
{
    double worst = 0;
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        struct plan_tensor p;
        snprintf(p.name, sizeof p.name, "%s", a->tensors[i].name);
        p.rows = a->tensors[i].rows;
        p.cols = a->tensors[i].cols;
        struct whole *x = &a->tensors[i], *y = find(b, &p);
        for (int kind = 0; kind < STATE_KINDS; kind++) {
            double diff = 0, norm = 0;
            if (!(kinds >> kind & 1))
                continue;
            for (int64_t k = 0; k < x->rows * x->cols; k++) {
                if (x->seen[kind][k] != 1)
                    fail_msg("%s: element %lld of %s has %d owners", layout, (long long)k, x->name, x->seen[kind][k]);
                diff += pow(x->values[kind][k] - y->values[kind][k], 2);
                norm += pow(y->values[kind][k], 2);
            }
            if (!(sqrt(diff) <= bound * sqrt(norm)))
                fail_msg("%s: %s, kind %d, differs by %.2e", layout, x->name, kind, sqrt(diff / norm));
            worst = fmax(worst, norm > 0 ? sqrt(diff / norm) : 0);
        }
    }
    return worst;
}

static const char *layout_text(const struct tiny *c, char out[200])
{
    static const char *const recompute[] = {"", " NONE", " LOW_RANK", " LAYER"};
    snprintf(out, 200, "tp %d dp %d pp %d%s, %s%s%s%s%s, V %d, %d layers, %d heads for %d, %d micro-batches%s", c->tp,
             c->dp, c->pp, c->zero ? " zero" : "", c->way.name, c->mlp_silu ? " silu" : "", c->tied ? " tied" : "",
             recompute[c->recompute], c->fp64 ? "" : " fp32", c->V, c->L, c->hk, c->h, c->global / c->micro / c->dp,
             c->bucket_bytes ? ", small buckets" : "");
    return out;
}

static void check_counters_of(const struct plan *p, int steps, const struct comm_counters *counters)
{
    for (int rank = 0; rank < p->world; rank++) {
        struct plan_comm_counts f;
        plan_stage_comm_counts(p, plan_pp_rank(p, rank), &f);
        const struct plan_comm(*of[GROUP_COUNT])[PLAN_PASSES] = {f.world, f.tp, f.pp, f.dp, f.ends};
        int evals = (5 - plan_dp_rank(p, rank) + p->dp - 1) / p->dp;
        if (p->dp * p->pp > 1) /* the evaluation's total */
            f.world[PLAN_ALL_REDUCE][PLAN_EVAL] = (struct plan_comm){1, 2, 0};
        struct plan_comm *gathers = &f.dp[PLAN_ALL_GATHER][PLAN_STEP];
        bool masters = p->precision == BOOST__PRECISION__VALUE__BF16; /* cut, so the first weights are gathered too */
        for (int g = 0; g < GROUP_COUNT; g++)
            for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
                for (int pass = 0; pass < PASS_COUNT; pass++) {
                    int times = pass != PASS_EVAL ? steps : g == GROUP_WORLD ? 1 : evals;
                    const struct comm_count *got = &counters[rank].by[g][kind][pass];
                    const struct plan_comm *want = &of[g][kind][pass];
                    times += want == gathers && masters;
                    if (got->calls != times * want->calls || got->elements != times * want->elements)
                        fail_msg("rank %d %s %s %s: %lld calls of %lld, expected %lld of %lld", rank,
                                 comm_group_name((enum comm_group)g), comm_kind_name((enum comm_kind)kind),
                                 comm_pass_name((enum comm_pass)pass), (long long)got->calls, (long long)got->elements,
                                 (long long)(times * want->calls), (long long)(times * want->elements));
                }
    }
}

static void check_counters(const struct tiny *c, int steps, const struct comm_counters *counters)
{
    struct plan p;
    tiny_plan(c, &p);
    check_counters_of(&p, steps, counters);
}

/* Before any step: the same weights to the bit, and a loss that is that of guessing. Logits have a spread of
 * 0.02 |n| = 0.02 sqrt(d) around zero, of which five are never left. */
static void starts_equal(const char *text, const struct tiny *c, const struct tiny *alone)
{
    struct result *first = run(alone, 0, false), *start = run(c, 0, false);
    if (c->fp64)
        compare(text, start, first, 1 << STATE_WEIGHT, 0);
    assert_true(relative(start->eval, first->eval) < (c->fp64 ? 1e-12 : 1e-6));
    assert_true(fabs(start->eval / start->eval_tokens - log(c->V)) < 5 * 0.02 * sqrt(c->d));
    result_free(first);
    result_free(start);
}

/* The first step of c in single precision against that of `one`: loss, all gradients and hence their norm. (Behind it
 * roundings of small gradients grow at once, since Adam's first updates are nearly signs.) */
static void equals_in_fp32(const char *text, const struct tiny *c, struct result *one, bool processes, double bound)
{
    struct result *many = run(c, 1, processes);
    double worst = compare(text, many, one, 1 << STATE_GRAD, bound);
    double loss = relative(many->loss[0], one->loss[0]), norm = relative(many->norm[0], one->norm[0]);
    if (!(loss < 1e-6 && norm < bound))
        fail_msg("%s: loss differs by %.1e, norm by %.1e", text, loss, norm);
    print_message("; fp32 %.1e\n", worst);
    check_counters(c, 1, many->counters);
    result_free(many);
}

/* The same in double precision: ten steps. Roundings grow in them too, from 1e-16. How far the gradients are off. */
static double equals_in_fp64(const char *text, const struct tiny *c, struct result *one, bool processes)
{
    struct result *many = run(c, STEPS, processes);
    double worst = compare(text, many, one, 1 << STATE_GRAD, 1e-9);
    check_counters(c, STEPS, many->counters);
    assert_true(many->tokens == one->tokens && many->eval_tokens == one->eval_tokens);
    double loss = 0, norm = 0;
    for (int s = 0; s < STEPS; s++) {
        loss = fmax(loss, relative(many->loss[s], one->loss[s]));
        norm = fmax(norm, relative(many->norm[s], one->norm[s]));
    }
    print_message("%s%s: loss %.1e, norm %.1e, gradients %.1e", processes ? "Gloo, " : "", text, loss, norm, worst);
    assert_true(loss < 1e-9 && norm < 1e-8 && relative(many->eval, one->eval) < 1e-9);
    compare(text, many, one, 1 << STATE_WEIGHT | 1 << STATE_MOMENT1 | 1 << STATE_MOMENT2, 1e-6);
    result_free(many);
    return worst;
}

enum transport { THREADS = 1, PROCESSES = 2 }; /* bits */

/* The model of c as the finite differences of gradient_test.c know it: one rank, nothing cut, kept again or apart. */
static struct tiny alone_of(const struct tiny *c)
{
    struct tiny one = *c;
    one.tp = one.dp = one.pp = 1;
    one.zero = one.recompute = 0;
    one.bucket_bytes = 0;
    one.fp64 = true;
    one.way.strategy = c->way.factorization == FULL_RANK ? FULL : BTP;
    one.way.ungrouped = one.way.sync = one.way.published = false;
    return one;
}

/* The model of c in its layout, in both precisions, against one rank in fp64. Gradients in fp32: within 1e-4; not strict:
 * or, where a tensor is so ill-conditioned, twice what the same layout's fp64 is off, in roundings 2^29 times as large. */
static UNUSED void equals_one_rank(const struct tiny *c, int transports, bool strict)
{
    char text[200];
    struct tiny alone = alone_of(c), half = *c, whole = *c;
    whole.fp64 = true;
    half.fp64 = false;
    struct result *one = run(&alone, STEPS, false);
    starts_equal(layout_text(&whole, text), &whole, &alone);
    for (int bit = THREADS; bit <= PROCESSES; bit <<= 1)
        if (transports & bit) {
            double off = equals_in_fp64(layout_text(&whole, text), &whole, one, bit == PROCESSES);
            double bound = strict ? 1e-4 : fmax(1e-4, 2 * 0x1p29 * off);
            equals_in_fp32(layout_text(&half, text), &half, one, bit == PROCESSES, bound);
        }
    result_free(one);
}

#endif
