/* overlap.h */
#include "worker/overlap.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

struct call {
    struct comm *c;
    struct kstream *ks;
    struct comm_segment segments[OVERLAP_SEGMENTS];
    int n;
    const char *what;
    int rc;
    struct error err;
};

struct overlap {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t begun, done; /* calls so far; number i lies at i % OVERLAP_CALLS */
    bool stop;
    struct call calls[OVERLAP_CALLS];
};

static void *work(void *arg)
{
    struct overlap *o = arg;
    pthread_mutex_lock(&o->lock);
    for (;;) {
        while (o->done == o->begun && !o->stop)
            pthread_cond_wait(&o->changed, &o->lock);
        if (o->done == o->begun)
            break;
        struct call *call = &o->calls[o->done % OVERLAP_CALLS];
        pthread_mutex_unlock(&o->lock);
        call->rc = comm_all_reduce(call->c, call->ks, call->segments, call->n, COMM_SUM, call->what, &call->err);
        pthread_mutex_lock(&o->lock);
        o->done++;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

int overlap_create(struct overlap **out, struct error *err)
{
    *out = NULL;
    struct overlap *o = calloc(1, sizeof *o);
    if (!o)
        return error_set(err, ERR_NOMEM, "no memory for the queue of overlapped collectives");
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

int64_t overlap_begin(struct overlap *o, struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                      const char *what)
{
    assert(n <= OVERLAP_SEGMENTS);
    pthread_mutex_lock(&o->lock);
    int64_t number = o->begun;
    assert(number - o->done < OVERLAP_CALLS);
    struct call *call = &o->calls[number % OVERLAP_CALLS];
    *call = (struct call){.c = c, .ks = ks, .n = n, .what = what};
    for (int i = 0; i < n; i++)
        call->segments[i] = segments[i];
    o->begun++;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    return number;
}

int overlap_wait(struct overlap *o, int64_t number, struct error *err)
{
    pthread_mutex_lock(&o->lock);
    while (o->done <= number)
        pthread_cond_wait(&o->changed, &o->lock);
    const struct call *call = &o->calls[number % OVERLAP_CALLS];
    int rc = call->rc;
    if (rc && err)
        *err = call->err;
    pthread_mutex_unlock(&o->lock);
    return rc;
}
