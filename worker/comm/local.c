/* LOCAL: the ranks are threads of one process and read each other's buffers.
 *
 * A call has two meetings. After the first every rank knows every buffer; then
 * each computes its own part of the result, summing in rank order, so that the
 * result is the same bit for bit on all ranks and in every run; after the second
 * the buffers belong to their ranks again. An abort ends waits at the first
 * meeting only: past it all ranks are inside the call, so none can be missing,
 * and none may leave while another still reads its buffer. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/bf16.h"
#include "worker/comm/comm.h"

enum { MAX_RANKS = 64, BLOCK = 512 /* elements reduced at a time, on the stack */ };

/* What a rank brings to a meeting. */
struct offer {
    enum comm_kind kind;
    enum comm_op op;
    const struct comm_segment *segments; /* all_reduce */
    int n;
    const void *data; /* reduce_scatter, all_gather */
    int64_t chunk;
    enum dtype dtype;
};

/* A message on its way; one at a time from each member to each other. */
struct post {
    enum { POST_NONE, POST_GIVEN, POST_MISMATCH } state;
    const struct comm_message *message;
};

struct local_group {
    struct local_world *world;
    int size, first, step; /* world rank of member i is first + i * step */
    pthread_mutex_t lock;
    pthread_cond_t met;
    int arrived;
    unsigned long meeting;
    struct offer *offers; /* [size] */
    struct post *posts;   /* [size * size], from * size + to */
};

struct local_world {
    int size;
    struct comm_layout layout;
    atomic_int lost;            /* world rank that aborted, or -1 */
    struct local_group *groups; /* [GROUP_COUNT * size], at its first member's rank; of size 0: no such group */
};

static struct local_group *group_at(struct local_world *w, int g, int first)
{
    return &w->groups[g * w->size + first];
}

static int group_open(struct local_group *g, struct local_world *w, const struct comm_place *place)
{
    size_t size = (size_t)place->size;
    g->offers = calloc(size, sizeof *g->offers);
    g->posts = calloc(size * size, sizeof *g->posts);
    if (!g->offers || !g->posts) {
        free(g->offers);
        free(g->posts);
        return ERR_NOMEM;
    }
    g->world = w;
    g->first = place->first;
    g->step = place->step;
    g->size = place->size;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->met, NULL);
    return ERR_OK;
}

static void group_close(struct local_group *g)
{
    if (!g->size)
        return;
    pthread_cond_destroy(&g->met);
    pthread_mutex_destroy(&g->lock);
    free(g->offers);
    free(g->posts);
}

int local_world_create(const struct comm_layout *layout, struct local_world **out, struct error *err)
{
    *out = NULL;
    int world = layout->tp < 1 || layout->dp < 1 || layout->pp < 1 || layout->tp > MAX_RANKS ||
                        layout->dp > MAX_RANKS || layout->pp > MAX_RANKS
                    ? 0
                    : comm_world_size(layout);
    if (world < 1 || world > MAX_RANKS)
        return error_set(err, ERR_INVALID, "a local world has 1 to %d ranks, not tp * dp * pp = %d * %d * %d",
                         MAX_RANKS, layout->tp, layout->dp, layout->pp);
    struct local_world *w = calloc(1, sizeof *w);
    int rc = ERR_NOMEM;
    if (w && (w->groups = calloc((size_t)(GROUP_COUNT * world), sizeof *w->groups))) {
        w->size = world;
        w->layout = *layout;
        atomic_init(&w->lost, -1);
        rc = ERR_OK;
    }
    for (int i = 0; i < GROUP_COUNT * world && !rc; i++) {
        struct comm_place place = comm_place_of(layout, i % world, (enum comm_group)(i / world));
        if (place.rank == 0 && place.size > 1)
            rc = group_open(&w->groups[i], w, &place);
    }
    if (rc) {
        local_world_destroy(w);
        return error_set(err, rc, "no memory for a local world of %d ranks", world);
    }
    *out = w;
    return ERR_OK;
}

void local_world_destroy(struct local_world *w)
{
    if (!w)
        return;
    for (int i = 0; w->groups && i < GROUP_COUNT * w->size; i++)
        group_close(&w->groups[i]);
    free(w->groups);
    free(w);
}

static void wake(struct local_group *g)
{
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->met);
    pthread_mutex_unlock(&g->lock);
}

void local_world_abort(struct local_world *w, int rank)
{
    int none = -1;
    atomic_compare_exchange_strong(&w->lost, &none, rank); /* the first one is the cause */
    for (int i = 0; i < GROUP_COUNT * w->size; i++)
        if (w->groups[i].size)
            wake(&w->groups[i]);
}

/* Waits until all members are here; false when the world was aborted first. */
static bool meet(struct local_group *g, bool may_abort)
{
    bool here = true;
    pthread_mutex_lock(&g->lock);
    unsigned long meeting = g->meeting;
    if (may_abort && atomic_load(&g->world->lost) >= 0) {
        here = false;
    } else if (++g->arrived == g->size) {
        g->arrived = 0;
        g->meeting++;
        pthread_cond_broadcast(&g->met);
    } else {
        while (g->meeting == meeting && !(may_abort && atomic_load(&g->world->lost) >= 0))
            pthread_cond_wait(&g->met, &g->lock);
        here = g->meeting != meeting;
    }
    pthread_mutex_unlock(&g->lock);
    return here;
}

static bool same_call(const struct offer *a, const struct offer *b)
{
    if (a->kind != b->kind || a->op != b->op || a->n != b->n || a->chunk != b->chunk || a->dtype != b->dtype)
        return false;
    for (int i = 0; i < a->n; i++)
        if (a->segments[i].count != b->segments[i].count || a->segments[i].dtype != b->segments[i].dtype)
            return false;
    return true;
}

/* First meeting. */
static int open_call(struct comm *c, const struct offer *mine, struct error *err)
{
    struct local_group *g = c->state;
    g->offers[c->rank] = *mine;
    if (!meet(g, true))
        return error_set(err, ERR_PEER_LOST, "rank %d is gone", atomic_load(&g->world->lost));
    /* All ranks compare all offers, so all come to the same verdict and none stays behind. */
    for (int i = 1; i < g->size; i++)
        if (!same_call(&g->offers[0], &g->offers[i])) {
            meet(g, false);
            return error_set(err, ERR_INTERNAL, "ranks %d and %d are in different calls", g->first,
                             g->first + i * g->step);
        }
    return ERR_OK;
}

static void close_call(struct comm *c)
{
    meet(c->state, false);
}

/* to[0, n) with from[0, n); a NaN wins a maximum, so that it is seen. */
#define COMBINE(type)                                                                  \
    static void combine_##type(enum comm_op op, void *to, const void *from, int64_t n) \
    {                                                                                  \
        type *acc = to;                                                                \
        const type *x = from;                                                          \
        for (int64_t i = 0; i < n; i++) {                                              \
            if (op == COMM_SUM)                                                        \
                acc[i] += x[i];                                                        \
            else if (x[i] > acc[i] || isnan(x[i]))                                     \
                acc[i] = x[i];                                                         \
        }                                                                              \
    }
COMBINE(float)
COMBINE(double)

static void combine_bf16(enum comm_op op, void *to, const void *from, int64_t n)
{
    uint16_t *acc = to;
    const uint16_t *x = from;
    for (int64_t i = 0; i < n; i++) {
        float a = from_bf16(acc[i]), b = from_bf16(x[i]);
        if (op == COMM_SUM)
            acc[i] = to_bf16(a + b);
        else if (b > a || isnan(b))
            acc[i] = x[i];
    }
}

/* Elements [from, to) of every `in`, reduced in rank order, to the start of every `out`. */
static void reduce(enum dtype dtype, enum comm_op op, int ranks, const void *const *in, int outs, void *const *out,
                   int64_t from, int64_t to)
{
    size_t size = dtype_size(dtype);
    double acc[BLOCK]; /* of any type */
    for (int64_t at = from; at < to; at += BLOCK) {
        int64_t n = to - at < BLOCK ? to - at : BLOCK;
        memcpy(acc, (const char *)in[0] + (size_t)at * size, (size_t)n * size);
        for (int r = 1; r < ranks; r++) {
            const char *x = (const char *)in[r] + (size_t)at * size;
            if (dtype == DTYPE_F64)
                combine_double(op, acc, x, n);
            else if (dtype == DTYPE_BF16)
                combine_bf16(op, acc, x, n);
            else
                combine_float(op, acc, x, n);
        }
        for (int r = 0; r < outs; r++)
            memcpy((char *)out[r] + (size_t)(at - from) * size, acc, (size_t)n * size);
    }
}

static int check_dtype(enum dtype dtype, struct error *err)
{
    if (dtype == DTYPE_F32 || dtype == DTYPE_F64 || dtype == DTYPE_BF16)
        return ERR_OK;
    return error_set(err, ERR_UNSUPPORTED, "LOCAL does not reduce %s", dtype_name(dtype));
}

static int local_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                            enum comm_op op, struct error *err)
{
    (void)ks;
    struct local_group *g = c->state;
    for (int i = 0; i < n; i++)
        if (check_dtype(segments[i].dtype, err))
            return ERR_UNSUPPORTED;
    struct offer mine = {.kind = COMM_ALL_REDUCE, .op = op, .segments = segments, .n = n};
    int rc = open_call(c, &mine, err);
    if (rc)
        return rc;
    /* Each rank reduces its own range and writes it to everyone: no one else touches that range. */
    for (int i = 0; i < n; i++) {
        const void *in[MAX_RANKS];
        void *out[MAX_RANKS];
        int64_t from = segments[i].count * c->rank / g->size, to = segments[i].count * (c->rank + 1) / g->size;
        for (int r = 0; r < g->size; r++) {
            void *data = g->offers[r].segments[i].data;
            in[r] = data;
            out[r] = (char *)data + (size_t)from * dtype_size(segments[i].dtype);
        }
        reduce(segments[i].dtype, op, g->size, in, g->size, out, from, to);
    }
    close_call(c);
    return ERR_OK;
}

static int local_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk,
                                enum dtype dtype, struct error *err)
{
    (void)ks;
    struct local_group *g = c->state;
    if (check_dtype(dtype, err))
        return ERR_UNSUPPORTED;
    struct offer mine = {.kind = COMM_REDUCE_SCATTER, .data = data, .chunk = chunk, .dtype = dtype};
    int rc = open_call(c, &mine, err);
    if (rc)
        return rc;
    const void *in[MAX_RANKS];
    for (int r = 0; r < g->size; r++)
        in[r] = g->offers[r].data;
    /* Chunk `rank` of every buffer is read by this rank alone. */
    reduce(dtype, COMM_SUM, g->size, in, 1, &out, chunk * c->rank, chunk * (c->rank + 1));
    char *own = (char *)data + (size_t)(chunk * c->rank) * dtype_size(dtype);
    if (own != out)
        memcpy(own, out, (size_t)chunk * dtype_size(dtype));
    close_call(c);
    return ERR_OK;
}

static int local_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk,
                            enum dtype dtype, struct error *err)
{
    (void)ks;
    struct local_group *g = c->state;
    struct offer mine = {.kind = COMM_ALL_GATHER, .data = in, .chunk = chunk, .dtype = dtype};
    int rc = open_call(c, &mine, err);
    if (rc)
        return rc;
    size_t bytes = (size_t)chunk * dtype_size(dtype);
    for (int r = 0; r < g->size; r++) {
        char *to = (char *)out + (size_t)r * bytes;
        if (to != g->offers[r].data)
            memcpy(to, g->offers[r].data, bytes);
    }
    close_call(c);
    return ERR_OK;
}

/* ---- messages ---- */

static bool same_segments(const struct comm_message *a, const struct comm_message *b)
{
    bool same = a->n == b->n;
    for (int i = 0; i < a->n && same; i++)
        same = a->segments[i].count == b->segments[i].count && a->segments[i].dtype == b->segments[i].dtype;
    return same;
}

/* Under the group's lock. Copies a given message and sets its sender free. */
static bool take(struct post *post, const struct comm_message *to)
{
    const struct comm_message *from = post->message;
    if (!same_segments(from, to)) {
        post->state = POST_MISMATCH;
        return false;
    }
    for (int i = 0; i < to->n; i++)
        memcpy(to->segments[i].data, from->segments[i].data,
               (size_t)to->segments[i].count * dtype_size(to->segments[i].dtype));
    post->state = POST_NONE;
    return true;
}

static int local_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send,
                          const struct comm_message *recv, struct error *err)
{
    (void)ks;
    struct local_group *g = c->state;
    struct post *give = send ? &g->posts[c->rank * g->size + send->peer] : NULL;
    struct post *get = recv ? &g->posts[recv->peer * g->size + c->rank] : NULL;
    const char *wrong = NULL;
    bool lost = false;
    pthread_mutex_lock(&g->lock);
    if (give)
        *give = (struct post){POST_GIVEN, send};
    pthread_cond_broadcast(&g->met);
    while (get && get->state != POST_GIVEN && !(lost = atomic_load(&g->world->lost) >= 0))
        pthread_cond_wait(&g->met, &g->lock);
    if (get && !lost && !take(get, recv))
        wrong = "send and receive differ in size or type";
    pthread_cond_broadcast(&g->met);
    while (give && give->state == POST_GIVEN && !(lost = lost || atomic_load(&g->world->lost) >= 0))
        pthread_cond_wait(&g->met, &g->lock);
    if (give && give->state == POST_MISMATCH)
        wrong = "receive and send differ in size or type";
    if (give)
        give->state = POST_NONE; /* nobody reads the message after the return */
    pthread_mutex_unlock(&g->lock);
    if (wrong)
        return error_set(err, ERR_INTERNAL, "rank %d: %s", c->world_rank, wrong);
    if (lost)
        return error_set(err, ERR_PEER_LOST, "rank %d is gone", atomic_load(&g->world->lost));
    return ERR_OK;
}

static void local_destroy(struct comm *c)
{
    (void)c; /* the groups are the world's */
}

static const struct comm_backend local_backend = {
    .name = "LOCAL",
    .all_reduce = local_all_reduce,
    .reduce_scatter = local_reduce_scatter,
    .all_gather = local_all_gather,
    .exchange = local_exchange,
    .destroy = local_destroy,
};

int local_comms_join(struct local_world *w, int rank, struct comms *out, struct error *err)
{
    memset(out, 0, sizeof *out);
    if (rank < 0 || rank >= w->size)
        return error_set(err, ERR_INVALID, "rank %d is not in a local world of %d", rank, w->size);
    for (int g = 0; g < GROUP_COUNT; g++) {
        struct comm_place place = comm_place_of(&w->layout, rank, (enum comm_group)g);
        *comms_group(out, (enum comm_group)g) = (struct comm){
            .backend = &local_backend,
            .group = (enum comm_group)g,
            .rank = place.rank,
            .size = place.size,
            .world_rank = rank,
            .counters = &out->counters,
            .seconds = &out->seconds[g],
            .state = place.size > 1 ? group_at(w, g, place.first) : NULL,
        };
    }
    return ERR_OK;
}
