/* All gradients of a small model, whatever its layout, and how far two sets of them are apart. */
#ifndef BOOST_TESTS_WORKER_TINY_GRADS_H
#define BOOST_TESTS_WORKER_TINY_GRADS_H

#include "tests/unit/worker/tiny.h"

enum { TINY_MASK = 5 }; /* every fifth target is without loss */

/* All gradients of a model, by canonical tensor, unsharded. */
struct grads {
    struct tiny c;
    bool initial; /* at the initial weights, not at random ones */
    int64_t count;
    struct plan_tensor tensors[TINY_TENSORS];
    double *values[TINY_TENSORS];
    pthread_mutex_t lock;
    double loss;
};

static inline int grads_weights(struct engine *e, const struct grads *g, struct error *err)
{
    if (g->initial)
        return engine_init_weights(e, err);
    tiny_randomize(e, 7);
    return ERR_OK;
}

/* Puts this rank's slices into their places. */
static inline int grads_collect(struct engine *e, int rank, void *arg, struct error *err)
{
    struct grads *g = arg;
    struct tiny_batch b;
    double loss;
    tiny_batch(&g->c, 0, TINY_MASK, &b);
    int rc = engine_gradients(e, &b.micro, &loss, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&g->lock);
    if (rank == 0)
        g->loss = loss;
    g->count = engine_tensor_count(e);
    for (int64_t i = 0; i < g->count; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        const struct plan_tensor *p = &t.tensor;
        if (!g->values[i])
            g->values[i] = calloc((size_t)(p->rows * p->cols), sizeof(double));
        g->tensors[i] = *p;
        double *slice = calloc((size_t)(p->nrows * p->ncols) + 1, sizeof *slice);
        tiny_download(e, t.dtype, t.device, p->nrows * p->ncols, slice);
        for (int64_t k = 0; k < p->nrows * p->ncols; k++)
            g->values[i][(p->row0 + k / p->ncols) * p->cols + p->col0 + k % p->ncols] = slice[k];
        free(slice);
    }
    pthread_mutex_unlock(&g->lock);
    return ERR_OK;
}

static inline int grads_body(struct engine *e, int rank, void *arg, struct error *err)
{
    int rc = grads_weights(e, arg, err);
    return rc ? rc : grads_collect(e, rank, arg, err);
}

static inline void gradients_on(const struct tiny *c, const struct plan *p, struct tiny_device device, bool initial,
                                struct grads *out)
{
    *out = (struct grads){.c = *c, .initial = initial, .lock = PTHREAD_MUTEX_INITIALIZER};
    tiny_run_on(p, device, 1, grads_body, out, NULL);
}

static inline void gradients_at(const struct tiny *c, bool initial, struct grads *out)
{
    struct plan p;
    tiny_plan(c, &p);
    gradients_on(c, &p, (struct tiny_device){.kernels = tiny_kernels(&p)}, initial, out);
}

static inline void gradients_of(const struct tiny *c, struct grads *out)
{
    gradients_at(c, false, out);
}

static inline void grads_free(struct grads *g)
{
    for (int64_t i = 0; i < g->count; i++)
        free(g->values[i]);
}

/* Relative Frobenius distance over all tensors. */
static inline double grads_whole_distance(const struct grads *a, const struct grads *b)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t k = 0; k < a->tensors[i].rows * a->tensors[i].cols; k++) {
            diff += pow(a->values[i][k] - b->values[i][k], 2);
            norm += pow(b->values[i][k], 2);
        }
    return sqrt(diff / norm);
}

/* Relative Frobenius distance of tensor number i. */
static inline double grads_distance(const struct grads *a, const struct grads *b, int64_t i)
{
    double diff = 0, norm = 0;
    for (int64_t k = 0; k < a->tensors[i].rows * a->tensors[i].cols; k++) {
        diff += pow(a->values[i][k] - b->values[i][k], 2);
        norm += pow(b->values[i][k], 2);
    }
    assert_true(norm > 0);
    return sqrt(diff / norm);
}

#endif
