/* Any mix of tp, dp and pp against one rank in fp64: the loss and every gradient of step 1, and ten steps
 * of losses and norms; the weights and moments behind them, wherever they lie; counters. */
#include "tests/unit/worker/processes.h"
#include "tests/unit/worker/tiny.h"

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

/* What this rank owns of every tensor that it counts, to its place. */
static void gather(struct engine *e, struct result *r)
{
    pthread_mutex_lock(&r->lock);
    for (int64_t i = 0; i < engine_tensor_count(e); i++)
        for (int kind = 0; kind < STATE_KINDS; kind++) {
            struct state_tensor t;
            engine_tensor(e, i, (enum state_kind)kind, &t);
            const struct plan_tensor *p = &t.tensor;
            struct whole *w = find(r, p);
            struct state_tensor own = t;
            own.device = t.own;
            for (int64_t k = 0; k < t.count && p->counted; k++) {
                int64_t at = t.first + k, to = (p->row0 + at / p->ncols) * p->cols + p->col0 + at % p->ncols;
                w->values[kind][to] = tiny_get(&own, k);
                w->seen[kind][to]++;
            }
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
    gather(e, r);
    free(batches);
    return rc;
}

/* ---- a run, its ranks being threads or processes ---- */

static const struct plan *process_plan;
static struct result *process_result;

static int process_body(struct comms *comms, int to_test)
{
    (void)to_test;
    struct engine *e;
    struct error err = {0};
    int rank = comms->world.rank;
    int rc = engine_create(process_plan, tiny_kernels(process_plan), comms, rank, 1, &e, &err);
    if (!rc)
        rc = train(e, rank, process_result, &err);
    if (rc)
        fprintf(stderr, "# rank %d: %s\n", rank, err.message);
    process_result->counters[rank] = comms->counters;
    engine_destroy(e);
    return rc != 0;
}

static struct result *run(const struct tiny *c, int steps, bool processes)
{
    struct plan p;
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
    tiny_plan(c, &p);
    if (!processes) {
        tiny_run(&p, 1, train, r, r->counters);
        return r;
    }
    struct comm_layout layout = engine_layout(&p);
    struct world w;
    process_plan = &p;
    process_result = r;
    start_layout(&w, p.world, &layout, 560000, process_body);
    all_end_well(&w);
    return r;
}

static void result_free(struct result *r)
{
    munmap(r, SHARED_BYTES);
}

static double relative(double a, double b)
{
    return fabs(a - b) / fabs(b);
}

/* Every element of the model has exactly one owner; relative Frobenius distance of each tensor. */
static void compare(const char *layout, struct result *a, struct result *b, int kinds, double bound)
{
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        struct plan_tensor p;
        snprintf(p.name, sizeof p.name, "%s", a->tensors[i].name);
        p.rows = a->tensors[i].rows;
        p.cols = a->tensors[i].cols;
        struct whole *x = &a->tensors[i], *y = find(b, &p);
        for (int kind = 0; kind < STATE_KINDS; kind++) {
            double diff = 0, norm = 0;
            for (int64_t k = 0; k < x->rows * x->cols; k++) {
                if (x->seen[kind][k] != 1)
                    fail_msg("%s: element %lld of %s has %d owners", layout, (long long)k, x->name, x->seen[kind][k]);
                diff += pow(x->values[kind][k] - y->values[kind][k], 2);
                norm += pow(y->values[kind][k], 2);
            }
            if (kinds >> kind & 1 && !(sqrt(diff) <= bound * sqrt(norm)))
                fail_msg("%s: %s, kind %d, differs by %.2e", layout, x->name, kind, sqrt(diff / norm));
        }
    }
}

static const char *layout_text(const struct tiny *c, char out[200])
{
    snprintf(out, 200,
             "tp %d dp %d pp %d zero %d %s%s%s%s, V %d, %d layers, %d heads for %d, %d micro-batches, buckets of %lld",
             c->tp, c->dp, c->pp, c->zero, c->way.name, c->tied ? " tied" : "",
             c->recompute == LOW_RANK ? " LOW_RANK"
             : c->recompute == LAYER  ? " LAYER"
                                      : "",
             c->fp64 ? "" : " fp32", c->V, c->L, c->hk, c->h, c->global / c->micro / c->dp, (long long)c->bucket_bytes);
    return out;
}

static void check_counters(const struct tiny *c, int steps, const struct comm_counters *counters)
{
    struct plan p;
    tiny_plan(c, &p);
    for (int rank = 0; rank < p.world; rank++) {
        struct plan_comm_counts f;
        plan_stage_comm_counts(&p, plan_pp_rank(&p, rank), &f);
        const struct plan_comm(*of[GROUP_COUNT])[PLAN_PASSES] = {f.world, f.tp, f.pp, f.dp, f.ends};
        int evals = (5 - plan_dp_rank(&p, rank) + p.dp - 1) / p.dp;
        if (p.dp * p.pp > 1) /* the evaluation's total */
            f.world[PLAN_ALL_REDUCE][PLAN_EVAL] = (struct plan_comm){1, 2};
        for (int g = 0; g < GROUP_COUNT; g++)
            for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
                for (int pass = 0; pass < PASS_COUNT; pass++) {
                    int times = pass != PASS_EVAL ? steps : g == GROUP_WORLD ? 1 : evals;
                    const struct comm_count *got = &counters[rank].by[g][kind][pass];
                    const struct plan_comm *want = &of[g][kind][pass];
                    if (got->calls != times * want->calls || got->elements != times * want->elements)
                        fail_msg("rank %d %s %s %s: %lld calls of %lld, expected %lld of %lld", rank,
                                 comm_group_name((enum comm_group)g), comm_kind_name((enum comm_kind)kind),
                                 comm_pass_name((enum comm_pass)pass), (long long)got->calls, (long long)got->elements,
                                 (long long)(times * want->calls), (long long)(times * want->elements));
                }
    }
}

/* The layout of c against one rank. */
static void equals_one_rank(const struct tiny *c, bool processes)
{
    char text[200];
    struct tiny alone = *c;
    alone.tp = alone.dp = alone.pp = 1;
    alone.zero = 0;
    alone.bucket_bytes = 0;
    alone.recompute = 0;
    alone.fp64 = true;
    layout_text(c, text);
    /* Before any step: the same weights to the bit, and a loss that is that of guessing. Logits have a spread of
     * 0.02 |n| = 0.02 sqrt(d) around zero, of which five are never left. */
    struct result *first = run(&alone, 0, false), *start = run(c, 0, processes);
    if (c->fp64)
        compare(text, start, first, 1 << STATE_WEIGHT, 0);
    assert_true(relative(start->eval, first->eval) < (c->fp64 ? 1e-12 : 1e-6));
    assert_true(fabs(start->eval / start->eval_tokens - log(c->V)) < 5 * 0.02 * sqrt(c->d));
    result_free(first);
    result_free(start);
    /* Step 1 alone, for its gradients. */
    struct result *one = run(&alone, 1, false), *many = run(c, 1, processes);
    compare(text, many, one, 1 << STATE_GRAD, c->fp64 ? 1e-9 : 1e-4);
    struct result *one10 = run(&alone, STEPS, false), *many10 = run(c, STEPS, processes);
    check_counters(c, STEPS, many10->counters);
    assert_true(many10->tokens == one10->tokens && many10->eval_tokens == one10->eval_tokens);
    /* In fp32 Adam's first updates, which are nearly signs, make roundings grow at once: two steps there, and the
     * norm of the second is within 1.3e-5 (tied SVD; 1e-5 without overlap). */
    double loss = 0, norm = 0;
    for (int s = 0; s < (c->fp64 ? STEPS : 2); s++) {
        loss = fmax(loss, relative(many10->loss[s], one10->loss[s]));
        norm = fmax(norm, relative(many10->norm[s], one10->norm[s]));
    }
    print_message("%s%s: loss %.1e, norm %.1e\n", processes ? "Gloo, " : "", text, loss, norm);
    assert_true(loss < (c->fp64 ? 1e-9 : 1e-5) && norm < (c->fp64 ? 1e-8 : 3e-5));
    assert_true(relative(many10->eval, one10->eval) < (c->fp64 ? 1e-9 : 1e-3));
    /* The same growth, from 1e-16. */
    if (c->fp64)
        compare(text, many10, one10, 1 << STATE_WEIGHT | 1 << STATE_MOMENT1 | 1 << STATE_MOMENT2, 1e-6);
    result_free(one);
    result_free(many);
    result_free(one10);
    result_free(many10);
}

static struct tiny base(void)
{
    struct tiny c = tiny_default;
    c.L = 4;
    c.r = 4; /* VANILLA cuts the latent */
    c.micro = 1;
    c.global = 8;
    return c;
}

/* ---- a list that covers every pair of values of two factors ---- */

enum factor { WAY, RECOMPUTE, TP, DP, PP, ZERO, TIED, HEADS, BUCKETS, BATCHES, VOCABULARY, FACTORS, MAX_VALUES = 64 };
static const int values[FACTORS] = {TINY_WAYS, 3, 3, 3, 3, 2, 2, 2, 2, 3, 2};

static struct tiny cell(const int x[FACTORS])
{
    struct tiny c = base();
    c.way = tiny_ways[x[WAY]];
    c.recompute = (int[]){0, LOW_RANK, LAYER}[x[RECOMPUTE]];
    c.tp = 1 << x[TP];
    c.dp = 1 << x[DP];
    c.pp = 1 << x[PP];
    c.zero = x[ZERO];
    c.tied = x[TIED];
    c.hk = x[HEADS] ? 2 : 4;
    c.bucket_bytes = x[BUCKETS];
    c.global = c.dp * (int[]){1, 3, 6}[x[BATCHES]];
    c.V = x[VOCABULARY] ? 20 : 128;
    return c;
}

static bool is_legal(const int x[FACTORS])
{
    struct tiny c = cell(x);
    return c.hk % c.tp == 0 && (!c.zero || c.dp > 1) && (!c.bucket_bytes || c.dp > 1) &&
           (c.recompute != LOW_RANK || c.way.factorization != FULL_RANK) && c.tp * c.dp * c.pp <= MAX_WORLD;
}

typedef bool pairs[FACTORS][MAX_VALUES][FACTORS][MAX_VALUES];

static int walk(const int x[FACTORS], pairs seen, bool mark)
{
    int fresh = 0;
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) {
            fresh += !seen[a][x[a]][b][x[b]];
            if (mark)
                seen[a][x[a]][b][x[b]] = true;
        }
    return fresh;
}

static bool next(int x[FACTORS])
{
    for (int f = 0; f < FACTORS; f++) {
        if (++x[f] < values[f])
            return true;
        x[f] = 0;
    }
    return false;
}

/* Greedy: always the first of the cells that cover most new pairs. */
static void any_mix_equals_one_rank(void **state)
{
    (void)state;
    static pairs seen;
    /* Some cells are run by processes over Gloo too: a few small ones, or as many as BOOST_LAYOUTS says. */
    const char *wanted = getenv("BOOST_LAYOUTS");
    long as_processes = wanted ? strtol(wanted, NULL, 10) : 3;
    int largest = wanted ? MAX_PROCESSES : 4;
    assert_true((int)TINY_WAYS <= (int)MAX_VALUES);
    int cells = 0;
    for (;; cells++) {
        int x[FACTORS] = {0}, best[FACTORS], most = 0;
        do {
            int fresh = is_legal(x) ? walk(x, seen, false) : 0;
            if (fresh > most) {
                most = fresh;
                memcpy(best, x, sizeof best);
            }
        } while (next(x));
        if (!most)
            break;
        walk(best, seen, true);
        struct tiny c = cell(best);
        bool fits = c.tp * c.dp * c.pp <= largest && c.tp * c.dp * c.pp > 1;
        equals_one_rank(&c, false);
        if (fits && as_processes-- > 0)
            equals_one_rank(&c, true);
    }
    print_message("%d cells cover every legal pair\n", cells);
}

/* Degrees that divide nothing: layers over stages, parameters over replicas; and single precision. */
static void odd_degrees_and_fp32(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        struct tiny c = base();
        c.way = tiny_ways[(2 * i + 1) % TINY_WAYS];
        c.pp = (int[]){3, 1, 3, 2, 1, 2}[i];
        c.dp = (int[]){1, 3, 3, 1, 2, 2}[i];
        c.tp = (int[]){1, 1, 1, 2, 2, 1}[i];
        c.zero = i == 2 || i == 5;
        c.tied = i & 1;
        c.bucket_bytes = c.dp > 1 ? 9000 : 0; /* about two layers */
        c.L = c.pp == 3 ? 5 : 4;
        c.global = 6;
        c.fp64 = i < 3;
        equals_one_rank(&c, false);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mix_equals_one_rank),
        cmocka_unit_test(odd_degrees_and_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
