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
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t begun, done; /* calls so far; number i lies at i % capacity */
    bool stop;
    int64_t capacity;
    struct entry entries[];
};

static int make(struct entry *x)
{
    const struct overlap_call *call = &x->call;
    if (call->kind == COMM_REDUCE_SCATTER)
        return comm_reduce_scatter(&x->comm, call->ks, call->data, call->out, call->chunk, call->dtype, call->what,
                                   &x->err);
    return comm_all_reduce(&x->comm, call->ks, call->segments, call->n, COMM_SUM, call->what, &x->err);
}

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
        x->rc = make(x);
        pthread_mutex_lock(&o->lock);
        o->done++;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

int overlap_create(int64_t capacity, struct overlap **out, struct error *err)
{
    *out = NULL;
    struct overlap *o = calloc(1, sizeof *o + (size_t)capacity * sizeof o->entries[0]);
    if (!o)
        return error_set(err, ERR_NOMEM, "no memory for a queue of %lld overlapped collectives", (long long)capacity);
    o->capacity = capacity;
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->changed, NULL);
    if (pthread_create(&o->thread, NULL, work, o)) {
        pthread_cond_destroy(&o->changed);
        pthread_mutex_destroy(&o->lock);
        free(o);
        return error_set(err, ERR_NOMEM, "no thread for overlapped collectives");
    }
    *out = o;
    return ERR_OK;
}

void overlap_destroy(struct overlap *o)
{
    if (!o)
        return;
    pthread_mutex_lock(&o->lock);
    o->stop = true;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    pthread_join(o->thread, NULL);
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
    free(o);
}

int64_t overlap_begin(struct overlap *o, const struct overlap_call *call)
{
    assert(call->kind == COMM_REDUCE_SCATTER || (call->kind == COMM_ALL_REDUCE && call->n <= OVERLAP_SEGMENTS));
    pthread_mutex_lock(&o->lock);
    int64_t number = o->begun;
    assert(number - o->done < o->capacity);
    struct entry *x = &o->entries[number % o->capacity];
    *x = (struct entry){.call = *call, .comm = *call->comm};
    x->comm.note = NULL; /* the page is written by the rank's thread alone, in overlap_wait() */
    o->begun++;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    return number;
}

int overlap_wait(struct overlap *o, int64_t number, struct error *err)
{
    const struct entry *x = &o->entries[number % o->capacity];
    if (x->call.comm->note)
        x->call.comm->note(x->call.comm->note_arg, x->call.what);
    pthread_mutex_lock(&o->lock);
    while (o->done <= number)
        pthread_cond_wait(&o->changed, &o->lock);
    int rc = x->rc;
    if (rc && err)
        *err = x->err;
    pthread_mutex_unlock(&o->lock);
    return rc;
}
