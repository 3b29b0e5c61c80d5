/* Logits and loss against an independent numpy implementation: tests/golden/make_logits.py. */
#include "tests/unit/worker/tiny.h"

struct golden {
    unsigned char *bytes;
    size_t size, at;
    int64_t seed;
    int32_t model, tied, mlp_silu, d, f, r, L, h, hk, V, s, b;
    double theta, eps;
    int32_t tensors;
    size_t tensors_at; /* where the list begins */
    struct micro_batch micro;
    const unsigned char *logits, *loss;
    double worst, off; /* found: largest logit difference, relative loss difference */
};

static void take(struct golden *g, void *out, size_t n)
{
    if (g->at + n > g->size)
        fail_msg("the golden file is cut short");
    memcpy(out, g->bytes + g->at, n);
    g->at += n;
}

static const void *pass_over(struct golden *g, size_t n)
{
    const void *at = g->bytes + g->at;
    if (g->at + n > g->size)
        fail_msg("the golden file is cut short");
    g->at += n;
    return at;
}

static void load(const char *name, struct golden *g)
{
    const char *root = getenv("BOOST_ROOT");
    char path[512], magic[8];
    snprintf(path, sizeof path, "%s/tests/golden/logits_%s.bin", root ? root : ".", name);
    FILE *f = fopen(path, "rbe");
    if (!f)
        fail_msg("cannot open %s (run from the repository or set BOOST_ROOT)", path);
    enum { MOST = 1 << 20 };
    *g = (struct golden){.bytes = malloc(MOST)};
    g->size = fread(g->bytes, 1, MOST, f);
    fclose(f);
    take(g, magic, sizeof magic);
    assert_memory_equal(magic, "BGOLD001", 8);
    take(g, &g->seed, sizeof g->seed);
    take(g, &g->model, 12 * sizeof(int32_t)); /* the twelve of the struct in the file's order */
    take(g, &g->theta, sizeof g->theta);
    take(g, &g->eps, sizeof g->eps);
    take(g, &g->tensors, sizeof g->tensors);
    g->tensors_at = g->at;
    for (int i = 0; i < g->tensors; i++) {
        int32_t len;
        int64_t shape[2];
        take(g, &len, sizeof len);
        pass_over(g, (size_t)len);
        take(g, shape, sizeof shape);
        pass_over(g, (size_t)(shape[0] * shape[1]) * sizeof(double));
    }
    size_t tokens = (size_t)(g->b * g->s) * sizeof(int32_t);
    static int32_t inputs[256], targets[256];
    assert_true(tokens <= sizeof inputs);
    take(g, inputs, tokens);
    take(g, targets, tokens);
    g->micro = (struct micro_batch){inputs, targets};
    g->logits = pass_over(g, (size_t)(g->b * g->s * g->V) * sizeof(double));
    g->loss = pass_over(g, sizeof(double));
    assert_int_equal(g->at, g->size);
}

/* Copies this rank's slice of the named tensor from the file; false when the file lacks it. */
static bool fill(const struct golden *file, const struct state_tensor *t)
{
    struct golden g = *file;
    g.at = g.tensors_at;
    for (int i = 0; i < g.tensors; i++) {
        int32_t len;
        int64_t shape[2];
        take(&g, &len, sizeof len);
        const char *name = pass_over(&g, (size_t)len);
        take(&g, shape, sizeof shape);
        const unsigned char *values = pass_over(&g, (size_t)(shape[0] * shape[1]) * sizeof(double));
        const struct plan_tensor *p = &t->tensor;
        if (strlen(p->name) != (size_t)len || memcmp(p->name, name, (size_t)len))
            continue;
        if (shape[0] != p->rows || shape[1] != p->cols)
            return false;
        for (int64_t k = 0; k < p->nrows * p->ncols; k++) {
            int64_t from = (p->row0 + k / p->ncols) * p->cols + p->col0 + k % p->ncols;
            double x;
            memcpy(&x, values + (size_t)from * sizeof x, sizeof x);
            tiny_put(t, k, x);
        }
        return true;
    }
    return false;
}

static int compare(struct engine *e, int rank, void *arg, struct error *err)
{
    struct golden *g = arg;
    if (engine_tensor_count(e) != g->tensors)
        return error_set(err, ERR_INTERNAL, "the file has %d tensors", g->tensors);
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        if (!fill(g, &t))
            return error_set(err, ERR_INTERNAL, "%s is not in the file with this shape", t.tensor.name);
    }
    double loss, tokens, expected;
    int rc = engine_weights_changed(e, err);
    if (!rc)
        rc = engine_eval(e, &g->micro, &loss, &tokens, err);
    if (rc)
        return rc;
    if (tokens != g->b * g->s - 2)
        return error_set(err, ERR_INTERNAL, "%g tokens", tokens);
    if (rank == 0) {
        memcpy(&expected, g->loss, sizeof expected);
        g->off = fabs(loss - expected) / expected;
    }
    /* Every rank compares its own columns, one after the other through the golden's `worst`. */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int64_t columns = 128, T = g->b * g->s;
    double *mine = calloc((size_t)(T * columns), sizeof *mine);
    rc = engine_logits(e, &g->micro, mine, err);
    bool fp64 = engine_kernels(e)->act == DTYPE_F64;
    pthread_mutex_lock(&lock);
    for (int64_t i = 0; i < T && !rc; i++)
        for (int64_t v = 0; v < columns && rank * columns + v < g->V; v++) {
            double x;
            memcpy(&x, g->logits + (size_t)(i * g->V + rank * columns + v) * sizeof x, sizeof x);
            double got = fp64 ? mine[i * columns + v] : (double)((float *)mine)[i * columns + v];
            g->worst = fmax(g->worst, fabs(got - x));
        }
    pthread_mutex_unlock(&lock);
    free(mine);
    return rc;
}

static void check(const char *name, bool fp64, int tp, double bound)
{
    struct golden g;
    load(name, &g);
    static const struct tiny_way ways[] = {
        {.name = "COLA", .factorization = COLA, .strategy = BTP},
        {.name = "SVD", .factorization = SVD, .strategy = BTP},
        {.name = "FULL_RANK", .factorization = FULL_RANK, .strategy = FULL},
        {.name = "LAX", .factorization = LAX, .strategy = BTP},
        {.name = "LAX LINEAR", .factorization = LAX, .strategy = BTP, .svd_base = true, .gate = LINEAR},
        {.name = "LAX TENSOR", .factorization = LAX, .strategy = BTP, .gate = TENSOR},
    };
    struct tiny c = {.way = ways[g.model],
                     .tied = g.tied,
                     .mlp_silu = g.mlp_silu,
                     .fp64 = fp64,
                     .d = g.d,
                     .f = g.f,
                     .r = g.r,
                     .L = g.L,
                     .h = g.h,
                     .hk = g.hk,
                     .V = g.V,
                     .s = g.s,
                     .micro = g.b,
                     .global = g.b,
                     .tp = tp,
                     .lr = 1e-3};
    struct plan p;
    tiny_plan(&c, &p);
    assert_true(p.rope_theta == g.theta && p.norm_eps == g.eps);
    tiny_run(&p, 1, compare, &g, NULL);
    print_message("%s %s tp %d: logits within %.1e, loss %.1e\n", name, fp64 ? "fp64" : "fp32", tp, g.worst, g.off);
    assert_true(g.worst < bound);
    assert_true(g.off < bound);
    free(g.bytes);
}

/* Logits are of order ten and a few hundred additions deep. */
static void logits_equal_numpy(void **state)
{
    (void)state;
    static const char *const cases[] = {"cola_gqa_untied", "svd_tied_silu",  "full_rank_gqa_silu",
                                        "lax_identity",    "lax_svd_linear", "lax_tensor"};
    for (int i = 0; i < 6; i++) {
        check(cases[i], true, 1, 1e-11);
        check(cases[i], true, 2, 1e-11);
        check(cases[i], false, 1, 1e-4);
        check(cases[i], false, 2, 1e-4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(logits_equal_numpy)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
