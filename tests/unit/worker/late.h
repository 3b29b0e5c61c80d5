/* A device that computes late: the fp32 kernels of the CPU behind queues. Nothing runs before somebody waits for a
 * stream; then what that stream was given, in order, and of other streams what it awaits and no more. So an order that
 * the engine forgot to ask for shows in its numbers. A captured sequence keeps what it was given by value and reads
 * memory anew at every launch. */
#ifndef BOOST_TESTS_WORKER_LATE_H
#define BOOST_TESTS_WORKER_LATE_H

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "worker/engine.h"

enum { LATE_STREAMS = 8, LATE_SEGMENTS = 5 };

struct late_queue;
struct late_op {
    void (*run)(struct kstream *real, const void *args, struct error *fault);
    struct late_queue *awaits; /* instead: as far as `upto` */
    size_t upto;
    const struct kgraph *graph; /* instead: a launch */
    void *args;
};
struct late_queue {
    struct late_op *ops;
    size_t n, room, done;
    struct kgraph *of; /* NULL: of a stream */
    size_t joined;     /* what the capturing stream awaits of it */
};
struct late_device {
    pthread_mutex_t lock;
    struct kstream *real;
    struct error fault;
    struct kstream *streams[LATE_STREAMS]; /* the first is the rank's; kept until that one goes */
    int n;
};
struct kgraph {
    struct late_queue *queues[LATE_STREAMS]; /* by stream */
};
/* Its `struct kstream` has that name here only: fp32's is another translation unit's. */
struct late_stream {
    struct late_device *device;
    int index;
    struct late_queue live, *to; /* what is enqueued goes to; a graph's while it is captured */
    struct {
        struct late_queue *queue;
        size_t at;
    } marks[KSTREAM_MARKS];
};

static int late_launches; /* by all ranks */
static sem_t *late_hold;  /* NULL, or what a thread other than the rank's waits for before it waits for a stream */
static __thread bool late_is_rank;

static struct late_stream *late_of(struct kstream *ks)
{
    return (struct late_stream *)(void *)ks;
}

static struct late_op *late_push(struct late_queue *q, size_t args)
{
    if (q->n == q->room) {
        q->room = q->room ? 2 * q->room : 64;
        q->ops = realloc(q->ops, q->room * sizeof *q->ops);
    }
    struct late_op *op = &q->ops[q->n++];
    *op = (struct late_op){.args = args ? malloc(args) : NULL};
    return op;
}

static void late_run(struct late_device *d, struct late_queue *q, size_t upto)
{
    while (q->done < upto) {
        struct late_op op = q->ops[q->done++]; /* others may be pushed meanwhile */
        if (op.awaits)
            late_run(d, op.awaits, op.upto);
        else if (op.graph) {
            for (int i = 0; i < LATE_STREAMS; i++)
                if (op.graph->queues[i])
                    op.graph->queues[i]->done = 0;
            late_run(d, op.graph->queues[0], op.graph->queues[0]->n);
        } else {
            op.run(d->real, op.args, &d->fault);
        }
    }
}

static void late_queue_free(struct late_queue *q)
{
    for (size_t i = 0; i < q->n; i++)
        free(q->ops[i].args);
    free(q->ops);
}

/* ---- streams ---- */

static struct kstream *late_add(struct late_device *d)
{
    struct late_stream *s = calloc(1, sizeof *s);
    s->device = d;
    s->index = d->n;
    s->to = &s->live;
    d->streams[d->n++] = (struct kstream *)(void *)s;
    return (struct kstream *)(void *)s;
}
static int late_stream_create(int threads, struct kstream **out, struct error *err)
{
    struct late_device *d = calloc(1, sizeof *d);
    pthread_mutex_init(&d->lock, NULL);
    int rc = kernels_cpu_fp32()->stream_create(threads, &d->real, err);
    *out = late_add(d);
    late_is_rank = true;
    return rc;
}
static void late_stream_destroy(struct kstream *ks)
{
    struct late_device *d = late_of(ks)->device;
    if (late_of(ks)->index)
        return;
    for (int i = 0; i < d->n; i++) {
        late_queue_free(&late_of(d->streams[i])->live);
        free(d->streams[i]);
    }
    kernels_cpu_fp32()->stream_destroy(d->real);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
static int late_stream_beside(struct kstream *ks, struct kstream **out, struct error *err)
{
    struct late_device *d = late_of(ks)->device;
    if (d->n == LATE_STREAMS)
        return error_set(err, ERR_INTERNAL, "too many streams");
    *out = late_add(d);
    return ERR_OK;
}
static int late_stream_sync(struct kstream *ks, struct error *err)
{
    struct late_stream *s = late_of(ks);
    struct late_device *d = s->device;
    if (late_hold && !late_is_rank)
        sem_wait(late_hold);
    pthread_mutex_lock(&d->lock);
    if (s->to != &s->live)
        error_set(&d->fault, ERR_INTERNAL, "a wait inside a capture");
    late_run(d, &s->live, s->live.n);
    struct error fault = d->fault;
    error_clear(&d->fault);
    if (!fault.code)
        kernels_cpu_fp32()->stream_sync(d->real, &fault);
    pthread_mutex_unlock(&d->lock);
    if (fault.code && err)
        *err = fault;
    return (int)fault.code;
}
static double late_gemm_seconds(struct kstream *ks)
{
    return kernels_cpu_fp32()->gemm_seconds(late_of(ks)->device->real);
}
static void late_mark(struct kstream *ks, int slot)
{
    struct late_stream *s = late_of(ks);
    pthread_mutex_lock(&s->device->lock);
    s->marks[slot].queue = s->to;
    s->marks[slot].at = s->to->n;
    pthread_mutex_unlock(&s->device->lock);
}
static void late_await(struct kstream *ks, struct kstream *of, int slot)
{
    struct late_stream *s = late_of(ks), *o = late_of(of);
    struct late_device *d = s->device;
    struct late_queue *queue = o->marks[slot].queue;
    pthread_mutex_lock(&d->lock);
    if (queue && queue->of && s->to == &s->live) { /* joins the capture */
        s->to = queue->of->queues[s->index] = calloc(1, sizeof *s->to);
        s->to->of = queue->of;
    }
    if (queue && queue->of != s->to->of)
        error_set(&d->fault, ERR_INTERNAL, "a capture that awaits what is outside of it");
    if (queue) {
        struct late_op *op = late_push(s->to, 0);
        op->awaits = queue;
        op->upto = o->marks[slot].at;
        if (s->index == 0)
            queue->joined = op->upto;
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- captures ---- */

static int late_capture_begin(struct kstream *ks, struct error *err)
{
    (void)err;
    struct late_stream *s = late_of(ks);
    struct kgraph *g = calloc(1, sizeof *g);
    s->to = g->queues[s->index] = calloc(1, sizeof *s->to);
    s->to->of = g;
    return ERR_OK;
}
static void late_graph_destroy(struct kgraph *g)
{
    for (int i = 0; i < LATE_STREAMS; i++)
        if (g->queues[i]) {
            late_queue_free(g->queues[i]);
            free(g->queues[i]);
        }
    free(g);
}
static int late_capture_end(struct kstream *ks, struct kgraph **out, struct error *err)
{
    struct late_device *d = late_of(ks)->device;
    struct kgraph *g = late_of(ks)->to->of;
    bool all = true;
    for (int i = 0; i < d->n; i++) {
        struct late_stream *s = late_of(d->streams[i]);
        if (s->to == &s->live)
            continue;
        all = all && (i == 0 || s->to->joined == s->to->n);
        s->to = &s->live;
        memset(s->marks, 0, sizeof s->marks); /* a mark within means nothing outside */
    }
    if (all) {
        *out = g;
        return ERR_OK;
    }
    late_graph_destroy(g);
    return error_set(err, ERR_INTERNAL, "a stream that the capture does not await");
}
static void late_graph_launch(struct kstream *ks, const struct kgraph *graph)
{
    struct late_stream *s = late_of(ks);
    pthread_mutex_lock(&s->device->lock);
    late_push(s->to, 0)->graph = graph;
    pthread_mutex_unlock(&s->device->lock);
    __atomic_fetch_add(&late_launches, 1, __ATOMIC_RELAXED);
}

/* ---- operations: parameters X(type, name); C: of a struct that is copied ---- */

#define LATE_PARAM(type, name)   , type name
#define LATE_PARAM_C(type, name) , const type *name
#define LATE_FIELD(type, name)   type name;
#define LATE_STORE(type, name)   x->name = name;
#define LATE_STORE_C(type, name) x->name = *name;
#define LATE_PASS(type, name)    , x->name
#define LATE_PASS_C(type, name)  , &x->name
#define LATE(op)                                                                           \
    struct late_##op {                                                                     \
        ARGS_##op(LATE_FIELD, LATE_FIELD)                                                  \
    };                                                                                     \
    static void late_run_##op(struct kstream *real, const void *args, struct error *fault) \
    {                                                                                      \
        const struct late_##op *x = args;                                                  \
        (void)fault;                                                                       \
        kernels_cpu_fp32()->op(real ARGS_##op(LATE_PASS, LATE_PASS_C));                    \
    }                                                                                      \
    static void late_##op(struct kstream *ks ARGS_##op(LATE_PARAM, LATE_PARAM_C))          \
    {                                                                                      \
        struct late_stream *s = late_of(ks);                                               \
        pthread_mutex_lock(&s->device->lock);                                              \
        struct late_op *late = late_push(s->to, sizeof(struct late_##op));                 \
        struct late_##op *x = late->args;                                                  \
        late->run = late_run_##op;                                                         \
        ARGS_##op(LATE_STORE, LATE_STORE_C) pthread_mutex_unlock(&s->device->lock);        \
    }

#define ARGS_upload(X, C)   X(void *, dst) X(const void *, host) X(size_t, bytes)
#define ARGS_download(X, C) X(void *, host) X(const void *, src) X(size_t, bytes)
#define ARGS_zero(X, C)     X(void *, dst) X(size_t, bytes)
#define ARGS_zero_each(X, C) X(void *, dst) X(size_t, bytes) X(size_t, stride) X(int64_t, times)
#define ARGS_cast(X, C)     X(enum dtype, to) X(void *, dst) X(enum dtype, from) X(const void *, src) X(int64_t, n)
#define ARGS_gemm(X, C)     C(struct gemm, g) X(const void *, a) X(const void *, b) X(void *, c)
#define ARGS_embed(X, C)                                                                          \
    X(int64_t, T)                                                                                 \
    X(int64_t, first) X(int64_t, rows) X(int64_t, width) X(int, parts) X(const int32_t *, tokens) \
        X(const void *, table) X(void *, out)
#define ARGS_embed_backward(X, C)                                                                 \
    X(int64_t, T)                                                                                 \
    X(int64_t, first) X(int64_t, rows) X(int64_t, width) X(int, parts) X(const int32_t *, tokens) \
        X(const void *, dout) X(void *, dtable)
#define ARGS_residual_gain(X, C)                                                                             \
    X(int64_t, T)                                                                                            \
    X(int64_t, w) X(const void *, in) X(const void *, y) X(const void *, gain) X(void *, x_out) X(void *, n) \
        X(void *, S)
#define ARGS_norm_apply(X, C)                                                                               \
    X(int64_t, T)                                                                                           \
    X(int64_t, w) X(int64_t, d) X(double, eps) X(const void *, in) X(const void *, gain) X(const void *, S) \
        X(void *, R) X(void *, n)
#define ARGS_gain_backward(X, C)                                                                                      \
    X(int64_t, T)                                                                                                     \
    X(int64_t, w) X(const void *, in) X(const void *, gain) X(const void *, R) X(const void *, k) X(const void *, dn) \
        X(bool, accumulate) X(void *, dx) X(void *, dgain)
#define ARGS_norm_forward(X, C)                                                                                       \
    X(int64_t, T)                                                                                                     \
    X(int64_t, d) X(double, eps) X(const void *, in) X(const void *, y) X(const void *, gain) X(void *, x_out)        \
        X(void *, R) X(void *, n)
#define ARGS_norm_backward(X, C)                                                                               \
    X(int64_t, T)                                                                                              \
    X(int64_t, d) X(const void *, in) X(const void *, gain) X(const void *, R) X(const void *, dn) X(void *, dx) \
        X(void *, k) X(void *, dgain)
#define ARGS_latent_forward(X, C)                                                                                   \
    X(int64_t, T)                                                                                                   \
    X(int64_t, n) X(int64_t, d) X(double, eps) X(enum latent_act, act) X(const void *, H) X(const void *, S) X(void *, R) \
        X(void *, z)
#define ARGS_latent_backward(X, C)                                                                          \
    X(int64_t, T)                                                                                           \
    X(int64_t, n) X(int64_t, d) X(enum latent_act, act) X(const void *, latent) X(const void *, R) X(void *, dz) \
        X(void *, k)
#define ARGS_cross_sum(X, C) \
    C(struct crossing, c)    \
    X(const void *, Y) X(const void *, G) X(int64_t, ldg) X(const void *, bias) X(void *, u) X(void *, sums)
#define ARGS_cross_forward(X, C) \
    C(struct crossing, c)        \
    X(const void *, u) X(const void *, sums) X(const void *, gain) X(const void *, bias) X(void *, z)
#define ARGS_cross_backward_sums(X, C)                                                                                 \
    C(struct crossing, c)                                                                                              \
    X(const void *, u) X(const void *, sums) X(const void *, gain) X(const void *, bias) X(void *, dz) X(void *, back) \
        X(void *, dgain) X(void *, dbias)
#define ARGS_cross_backward(X, C)                                                                      \
    C(struct crossing, c)                                                                              \
    X(const void *, u) X(const void *, sums) X(const void *, gain) X(const void *, back) X(void *, dv) \
        X(void *, dbias)
#define ARGS_rope(X, C) \
    X(int64_t, T)       \
    X(int64_t, len) X(int64_t, heads) X(int64_t, e) X(int64_t, ld) X(double, theta) X(bool, inverse) X(void *, in)
#define ARGS_attention_forward(X, C) \
    C(struct attention, a)           \
    X(const void *, q) X(const void *, k) X(const void *, v) X(void *, o) X(void *, lse) X(void *, workspace)
#define ARGS_attention_backward(X, C)                                                                \
    C(struct attention, a)                                                                           \
    X(const void *, q) X(const void *, k) X(const void *, v) X(const void *, o) X(const void *, lse) \
        X(const void *, d_o) X(void *, dq) X(void *, dk) X(void *, dv) X(void *, workspace)
#define ARGS_glu_forward(X, C) \
    X(int64_t, rows)            \
    X(int64_t, n) X(int64_t, ld) X(bool, silu) X(const void *, gate) X(const void *, up) X(void *, out)
#define ARGS_glu_backward(X, C) \
    X(int64_t, rows)            \
    X(int64_t, n) X(int64_t, ld) X(bool, silu) X(const void *, gate) X(const void *, up) X(const void *, dout) X(void *, dgate) X(void *, dup) X(void *, out)
#define ARGS_ce_max(X, C) X(int64_t, T) X(int64_t, ld) X(int64_t, valid) X(const void *, logits) X(void *, m)
#define ARGS_ce_sums(X, C)                                                                        \
    X(int64_t, T)                                                                                 \
    X(int64_t, ld) X(int64_t, valid) X(int64_t, first) X(const void *, logits) X(const void *, m) \
        X(const int32_t *, targets) X(void *, sums)
#define ARGS_ce_backward(X, C)                                                                                    \
    X(int64_t, T)                                                                                                 \
    X(int64_t, ld) X(int64_t, valid) X(int64_t, first) X(void *, logits) X(const void *, m) X(const void *, sums) \
        X(const int32_t *, targets) X(double *, loss) X(void *, c)
#define ARGS_row_dot(X, C) X(int64_t, T) X(int64_t, w) X(const void *, a) X(const void *, b) X(void *, out)
#define ARGS_norm_k(X, C)  X(int64_t, T) X(int64_t, d) X(const void *, R) X(const void *, c) X(void *, k)
#define ARGS_copy_rows(X, C) \
    X(int64_t, rows) X(int64_t, w) X(const void *, in) X(int64_t, ldx) X(bool, accumulate) X(void *, y) X(int64_t, ldy)
#define ARGS_interleave(X, C)   X(int, parts) X(int64_t, T) X(int64_t, w) X(const void *, in) X(void *, out)
#define ARGS_grad_squares(X, C) X(int64_t, n) X(const void *, grad) X(double *, acc)
#define ARGS_step_finish(X, C)  X(struct step_block *, block) X(double, beta1) X(double, beta2) X(double, clip)
#define ARGS_adamw(X, C)                                                                                       \
    X(int64_t, n)                                                                                              \
    C(struct adamw, hyper) X(const struct step_block *, block) X(const void *, grad) X(void *, m) X(void *, v) \
        X(void *, master) X(void *, weight)

#define LATE_OPS(X)                                                                                                 \
    X(upload)                                                                                                       \
    X(download) X(zero) X(zero_each) X(cast) X(gemm) X(embed) X(embed_backward) X(residual_gain) X(norm_apply)      \
        X(gain_backward) X(norm_forward) X(norm_backward)                                                           \
        X(latent_forward) X(latent_backward) X(cross_sum) X(cross_forward) X(cross_backward_sums) X(cross_backward) \
            X(rope) X(attention_forward) X(attention_backward) X(glu_forward) X(glu_backward) X(ce_max) X(ce_sums)  \
                X(ce_backward) X(row_dot) X(norm_k) X(copy_rows) X(interleave) X(grad_squares) X(step_finish) X(adamw)
LATE_OPS(LATE)

static inline const struct kernels *late_kernels(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct kernels table;
    pthread_mutex_lock(&lock);
    if (!table.name) {
        struct kernels k = *kernels_cpu_fp32(); /* types, memory, the attention's workspace */
#define LATE_ROW(op) k.op = late_##op;
        LATE_OPS(LATE_ROW)
        LATE_ROW(stream_create)
        LATE_ROW(stream_destroy)
        LATE_ROW(stream_sync)
        LATE_ROW(gemm_seconds)
        LATE_ROW(stream_beside)
        LATE_ROW(mark)
        LATE_ROW(await)
        LATE_ROW(capture_begin)
        LATE_ROW(capture_end)
        LATE_ROW(graph_launch)
        LATE_ROW(graph_destroy)
#undef LATE_ROW
        k.name = "late";
        table = k;
    }
    pthread_mutex_unlock(&lock);
    return &table;
}

/* ---- collectives: LOCAL's, when their stream comes to them ---- */

static const struct comm_backend *late_local;

struct late_call {
    enum comm_kind kind;
    struct comm c;
    struct comm_segment segments[LATE_SEGMENTS], more[LATE_SEGMENTS];
    int n;
    enum comm_op op;
    void *data, *out;
    const void *in;
    int64_t chunk;
    enum dtype dtype;
    struct comm_message send, recv;
    bool sends, receives;
};

static void late_make(struct kstream *real, const void *args, struct error *fault)
{
    struct late_call x = *(const struct late_call *)args;
    struct error err = {.code = ERR_OK};
    int rc;
    if (fault->code)
        return;
    x.send.segments = x.segments;
    x.recv.segments = x.more;
    if (x.kind == COMM_ALL_REDUCE)
        rc = late_local->all_reduce(&x.c, real, x.segments, x.n, x.op, &err);
    else if (x.kind == COMM_REDUCE_SCATTER)
        rc = late_local->reduce_scatter(&x.c, real, x.data, x.out, x.chunk, x.dtype, &err);
    else if (x.kind == COMM_ALL_GATHER)
        rc = late_local->all_gather(&x.c, real, x.in, x.out, x.chunk, x.dtype, &err);
    else
        rc = late_local->exchange(&x.c, real, x.sends ? &x.send : NULL, x.receives ? &x.recv : NULL, &err);
    if (rc)
        *fault = err;
}
static int late_call(struct kstream *ks, const struct late_call *x)
{
    struct late_stream *s = late_of(ks);
    pthread_mutex_lock(&s->device->lock);
    struct late_op *op = late_push(s->to, sizeof *x);
    op->run = late_make;
    memcpy(op->args, x, sizeof *x);
    pthread_mutex_unlock(&s->device->lock);
    return ERR_OK;
}
static int late_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                           enum comm_op op, struct error *err)
{
    struct late_call x = {.kind = COMM_ALL_REDUCE, .c = *c, .n = n, .op = op};
    (void)err;
    memcpy(x.segments, segments, (size_t)n * sizeof *segments);
    return late_call(ks, &x);
}
static int late_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk,
                               enum dtype dtype, struct error *err)
{
    (void)err;
    return late_call(
        ks, &(struct late_call){
                .kind = COMM_REDUCE_SCATTER, .c = *c, .data = data, .out = out, .chunk = chunk, .dtype = dtype});
}
static int late_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk,
                           enum dtype dtype, struct error *err)
{
    (void)err;
    return late_call(ks, &(struct late_call){
                             .kind = COMM_ALL_GATHER, .c = *c, .in = in, .out = out, .chunk = chunk, .dtype = dtype});
}
static int late_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send,
                         const struct comm_message *recv, struct error *err)
{
    struct late_call x = {.kind = COMM_SEND, .c = *c, .sends = send != NULL, .receives = recv != NULL};
    (void)err;
    if (send) {
        x.send = *send;
        memcpy(x.segments, send->segments, (size_t)send->n * sizeof *x.segments);
    }
    if (recv) {
        x.recv = *recv;
        memcpy(x.more, recv->segments, (size_t)recv->n * sizeof *x.more);
    }
    return late_call(ks, &x);
}
/* What was joined as LOCAL. */
static inline void late_comms(struct comms *c)
{
    static struct comm_backend late;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!late.name) {
        late_local = c->world.backend;
        late = *late_local;
        late.all_reduce = late_all_reduce;
        late.reduce_scatter = late_reduce_scatter;
        late.all_gather = late_all_gather;
        late.exchange = late_exchange;
    }
    pthread_mutex_unlock(&lock);
    for (int g = 0; g < GROUP_COUNT; g++)
        comms_group(c, (enum comm_group)g)->backend = &late;
}

#endif
