/* ONLINE against the plain norm (SYNC) in fp32, both against fp64, where a norm has it hard: rows of 1e4 and of 1e-4,
 * channels a hundred times as large as the rest, a shard of zeros. ONLINE multiplies by R behind the product instead of
 * in front, so its latents are of the size of x in between; its error may be twice the plain norm's at most. */
#include "tests/unit/worker/tiny.h"

enum { TP = 4, TOKENS = 64 };

struct found {
    struct tiny c;
    int64_t count;
    struct plan_tensor tensors[TINY_TENSORS];
    double *grads[TINY_TENSORS];
    double *logits; /* [T, V] */
    pthread_mutex_t lock;
};

/* Embedding rows of three sizes, two large channels, and nothing in the columns of rank 2. */
static void make_hard(struct engine *e, const struct tiny *c)
{
    struct state_tensor t;
    struct error err;
    engine_tensor(e, 0, STATE_WEIGHT, &t);
    for (int64_t k = 0; k < t.tensor.nrows * t.tensor.ncols; k++) {
        int64_t row = t.tensor.row0 + k / t.tensor.ncols, col = t.tensor.col0 + k % t.tensor.ncols;
        double x = tiny_get(&t, k) * (double[]){1, 1e4, 1e-4}[row % 3];
        if (col == 1 || col == c->d - 3)
            x *= 100;
        if (col / (c->d / TP) == 2)
            x = 0;
        tiny_put(&t, k, (double)(float)x);
    }
    (void)!engine_weights_changed(e, &err);
}

static int measure(struct engine *e, int rank, void *arg, struct error *err)
{
    struct found *f = arg;
    const struct tiny *c = &f->c;
    struct tiny_batch b;
    double loss;
    int64_t T = c->micro * c->s, columns = 128;
    tiny_batch(c, 0, 5, &b);
    tiny_randomize(e, 7);
    make_hard(e, c);
    int rc = engine_gradients(e, &b.micro, &loss, err);
    if (rc)
        return rc;
    bool fp64 = engine_kernels(e)->act == DTYPE_F64;
    void *mine = calloc((size_t)(T * columns), sizeof(double));
    rc = engine_logits(e, &b.micro, mine, err);
    pthread_mutex_lock(&f->lock);
    f->count = engine_tensor_count(e);
    for (int64_t i = 0; i < f->count; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        const struct plan_tensor *p = &t.tensor;
        if (!f->grads[i])
            f->grads[i] = calloc((size_t)(p->rows * p->cols), sizeof(double));
        f->tensors[i] = *p;
        for (int64_t k = 0; k < p->nrows * p->ncols; k++)
            f->grads[i][(p->row0 + k / p->ncols) * p->cols + p->col0 + k % p->ncols] = tiny_get(&t, k);
    }
    if (!f->logits)
        f->logits = calloc((size_t)(T * c->V), sizeof(double));
    for (int64_t i = 0; i < T; i++)
        for (int64_t v = 0; v < columns && rank * columns + v < c->V; v++)
            f->logits[i * c->V + rank * columns + v] =
                fp64 ? ((double *)mine)[i * columns + v] : (double)((float *)mine)[i * columns + v];
    pthread_mutex_unlock(&f->lock);
    free(mine);
    return rc;
}

static struct found *run(bool svd, bool sync, bool fp64)
{
    struct found *f = calloc(1, sizeof *f);
    struct plan p;
    f->c = tiny_default;
    f->c.way = (struct tiny_way){.name = "", .factorization = svd ? SVD : COLA, .strategy = BTP, .sync = sync};
    f->c.fp64 = fp64;
    f->c.d = 64, f->c.f = 96, f->c.r = 16, f->c.V = 60, f->c.s = 16, f->c.micro = f->c.global = 4;
    f->c.tp = TP;
    pthread_mutex_init(&f->lock, NULL);
    tiny_plan(&f->c, &p);
    tiny_run(&p, 1, measure, f, NULL);
    return f;
}

static void drop(struct found *f)
{
    for (int64_t i = 0; i < f->count; i++)
        free(f->grads[i]);
    free(f->logits);
    free(f);
}

static double distance(const double *a, const double *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += pow(a[i] - b[i], 2);
        norm += pow(b[i], 2);
    }
    return sqrt(diff / norm);
}

/* Root of the mean square over the tensors of their relative errors: of one tensor alone it depends on luck. */
static double gradient_error(const struct found *a, const struct found *exact)
{
    double squares = 0;
    for (int64_t i = 0; i < a->count; i++)
        squares += pow(distance(a->grads[i], exact->grads[i], a->tensors[i].rows * a->tensors[i].cols), 2);
    return sqrt(squares / (double)a->count);
}

static void online_is_as_good_as_the_plain_norm(void **state)
{
    (void)state;
    for (int svd = 0; svd < 2; svd++) {
        struct found *exact = run(svd, true, true), *exact_online = run(svd, false, true);
        struct found *sync = run(svd, true, false), *online = run(svd, false, false);
        int64_t logits = TOKENS * exact->c.V;
        /* The same function, in fp64 to its precision. */
        assert_true(distance(exact_online->logits, exact->logits, logits) < 1e-12);
        assert_true(gradient_error(exact_online, exact) < 1e-11);
        double plain = distance(sync->logits, exact->logits, logits);
        double ours = distance(online->logits, exact->logits, logits);
        double plain_grad = gradient_error(sync, exact), our_grad = gradient_error(online, exact);
        print_message("%s: logits ONLINE %.2e, SYNC %.2e; gradients ONLINE %.2e, SYNC %.2e\n", svd ? "SVD" : "COLA",
                      ours, plain, our_grad, plain_grad);
        assert_true(plain > 0 && plain < 1e-4);
        assert_true(ours <= 2 * plain);
        assert_true(our_grad <= 2 * plain_grad);
        drop(exact);
        drop(exact_online);
        drop(sync);
        drop(online);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(online_is_as_good_as_the_plain_norm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
