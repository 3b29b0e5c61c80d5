/* overlap.h */
#include "worker/overlap.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

struct entry {
    struct overlap_call call;
    struct comm comm; /* the rank sets the pass of its own for the calls to come */
    int rc;
    struct error err;
};

struct overlap {
    const struct kernels *k;
    struct kstream *beside; /* NULL: the thread */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t begun, done; /* calls so far; number i lies at i % capacity */
    bool stop;
    int64_t capacity;
    struct entry entries[];
};

static int make(struct entry *x, struct kstream *ks)
{
    const struct overlap_call *call = &x->call;
    if (call->kind == COMM_REDUCE_SCATTER)
        return comm_reduce_scatter(&x->comm, ks, call->data, call->out, call->chunk, call->dtype, call->what, &x->err);
    return comm_all_reduce(&x->comm, ks, call->segments, call->n, COMM_SUM, call->what, &x->err);
}

/* ---- on a thread ---- */

static void *work(void *arg)
{
    struct overlap *o = arg;
    pthread_mutex_lock(&o->lock);
    for (;;) {
        while (o->done == o->begun && !o->stop)
            pthread_cond_wait(&o->changed, &o->lock);
        if (o->stop)
            break;
        struct entry *x = &o->entries[o->done % o->capacity];
        pthread_mutex_unlock(&o->lock);
        x->rc = make(x, x->call.ks);
        pthread_mutex_lock(&o->lock);
        o->done++;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

static int start_thread(struct overlap *o, struct error *err)
{
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->changed, NULL);
    if (!pthread_create(&o->thread, NULL, work, o))
        return ERR_OK;
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
    return error_set(err, ERR_NOMEM, "no thread for overlapped collectives");
}

static void stop_thread(struct overlap *o)
{
    pthread_mutex_lock(&o->lock);
    o->stop = true;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    pthread_join(o->thread, NULL);
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
}

static void queue(struct overlap *o)
{
    pthread_mutex_lock(&o->lock);
    assert(o->begun - o->done < o->capacity);
    o->begun++;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
}

static void wait_for_thread(struct overlap *o, int64_t number)
{
    pthread_mutex_lock(&o->lock);
    while (o->done <= number)
        pthread_cond_wait(&o->changed, &o->lock);
    pthread_mutex_unlock(&o->lock);
}

/* ---- on a stream ---- */

/* Its calls are in order, so a slot that a later one has marked again is waited for longer, never too briefly. */
static int slot_of(int64_t number)
{
    return (int)(number % KSTREAM_MARKS);
}

static void enqueue(struct overlap *o, struct entry *x)
{
    o->k->mark(x->call.ks, OVERLAP_MARK);
    o->k->await(o->beside, x->call.ks, OVERLAP_MARK);
    x->rc = make(x, o->beside);
    o->k->mark(o->beside, slot_of(o->begun));
    o->done = ++o->begun;
}

/* ---- either ---- */

int overlap_create(const struct kernels *k, struct kstream *ks, int64_t capacity, struct overlap **out,
                   struct error *err)
{
    *out = NULL;
    struct overlap *o = calloc(1, sizeof *o + (size_t)capacity * sizeof o->entries[0]);
    if (!o)
        return error_set(err, ERR_NOMEM, "no memory for a queue of %lld overlapped collectives", (long long)capacity);
    o->k = k;
    o->capacity = capacity;
    int rc = k->stream_beside ? k->stream_beside(ks, &o->beside, err) : start_thread(o, err);
    if (rc)
        free(o);
    else
        *out = o;
    return rc;
}

void overlap_destroy(struct overlap *o)
{
    if (!o)
        return;
    if (o->beside)
        o->k->stream_destroy(o->beside);
    else
        stop_thread(o);
    free(o);
}

int64_t overlap_begin(struct overlap *o, const struct overlap_call *call)
{
    assert(call->kind == COMM_REDUCE_SCATTER || (call->kind == COMM_ALL_REDUCE && call->n <= OVERLAP_SEGMENTS));
    int64_t number = o->begun;
    struct entry *x = &o->entries[number % o->capacity];
    *x = (struct entry){.call = *call, .comm = *call->comm};
    x->comm.note = NULL; /* the page is written by the rank's thread alone, in overlap_wait() */
    if (o->beside)
        enqueue(o, x);
    else
        queue(o);
    return number;
}

static struct comm_call describe(const struct overlap_call *call)
{
    int64_t bytes = call->comm->size * call->chunk * (int64_t)dtype_size(call->dtype);
    for (int i = 0; call->kind == COMM_ALL_REDUCE && i < call->n; i++)
        bytes = (i ? bytes : 0) + call->segments[i].count * (int64_t)dtype_size(call->segments[i].dtype);
    return (struct comm_call){call->what, comm_kind_name(call->kind), call->comm->group, bytes};
}

int overlap_wait(struct overlap *o, int64_t number, struct error *err)
{
    const struct entry *x = &o->entries[number % o->capacity];
    const struct comm *comm = x->call.comm;
    const struct comm_call call = describe(&x->call);
    bool note = comm->note && !o->beside; /* on a stream the rank does not wait here, and its device tells */
    if (note)
        comm->note(comm->note_arg, &call, true);
    if (o->beside)
        o->k->await(x->call.ks, o->beside, slot_of(number));
    else
        wait_for_thread(o, number);
    if (note && !x->rc)
        comm->note(comm->note_arg, &call, false);
    if (x->rc && err)
        *err = x->err;
    return x->rc;
}
