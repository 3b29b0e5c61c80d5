/* nccl_rank.h: what happens when another rank is lost, and the end.
 *
 * Nothing bounds a call, nor the wait for the device. A thread watches the other ranks (worker/comm/peers.h) and the
 * communicators instead, and ends the process when one is lost. It does not abort the communicators first: the rank's
 * thread would come out of its wait with sums that were never made, and go on. */
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "worker/comm/nccl_rank.h"

enum {
    WATCH_MS = 100,   /* between two looks at the communicators; lost ranks are news at once */
    LEAVE_MS = 10000, /* for the end in order */
    ABORT_MS = 5000,  /* for an abort, and for what the rank frees after it */
};

/* ---- watching -------------------------------------------------------------------- */

static int communicators(const struct nccl_rank *r, ncclComm_t out[NCCL_COMMUNICATORS])
{
    int n = 0;
    for (int g = 0; g < GROUP_COUNT; g++)
        if (r->members[g].comm)
            out[n++] = r->members[g].comm;
    if (r->root)
        out[n++] = r->root;
    return n;
}

/* The first status of a communicator that is not success. A call under way is left alone: NCCL's own bookkeeping of it
 * is not safe against two threads, and it returns its error itself. */
static ncclResult_t look(struct nccl_rank *r)
{
    ncclResult_t found = ncclSuccess;
    if (pthread_mutex_trylock(&r->calls))
        return found;
    ncclComm_t all[NCCL_COMMUNICATORS];
    int n = atomic_load(&r->aborted) ? 0 : communicators(r, all);
    for (int i = 0; i < n && found == ncclSuccess; i++) {
        ncclResult_t now, asked = ncclCommGetAsyncError(all[i], &now);
        found = asked != ncclSuccess ? asked : now == ncclInProgress ? ncclSuccess : now;
    }
    pthread_mutex_unlock(&r->calls);
    return found;
}

static void tell_reached_of(struct nccl_rank *r, int group)
{
    uint32_t count = r->stamps->count[group], value = r->stamps->value[group];
    if (count == r->told[group] || !value)
        return;
    r->told[group] = count;
    r->watch.reached(r->watch.arg, &r->kinds[value - 1], count);
}

/* Which calls the device has come to; the last one last. */
static void tell_reached(struct nccl_rank *r)
{
    uint32_t last = r->stamps->last;
    for (int g = 0; g < GROUP_COUNT; g++)
        if ((uint32_t)g != last)
            tell_reached_of(r, g);
    tell_reached_of(r, (int)last);
}

static void *watch(void *arg)
{
    struct nccl_rank *r = arg;
    struct error why;
    error_clear(&why);
    while (!atomic_load(&r->stop)) {
        if (atomic_load(&r->aborted)) { /* the cause is known; what remains is that the rank comes to its end */
            if (!clock_left_ms(r->deadline_ns)) {
                r->watch.lost(r->watch.arg, &r->why);
                break;
            }
            nccl_pause_us(1000);
            continue;
        }
        int lost = peers_blame(r->peers, WATCH_MS);
        tell_reached(r);
        ncclResult_t status = lost < 0 ? look(r) : ncclSuccess;
        if (lost < 0 && status == ncclSuccess)
            continue;
        if (lost >= 0)
            nccl_say_lost(lost, &why);
        else
            nccl_explain(r, status, NCCL_BLAME_WAIT_MS, &why);
        if (atomic_load(&r->stop) || atomic_load(&r->aborted))
            continue;
        r->watch.lost(r->watch.arg, &why);
        break;
    }
    return NULL;
}

int nccl_watch_start(struct nccl_rank *r, struct error *err)
{
    int errnum = pthread_create(&r->watcher, NULL, watch, r);
    if (errnum)
        return error_errno(err, errnum, "cannot watch the other ranks");
    r->watching = true;
    return ERR_OK;
}

static void stop_watching(struct nccl_rank *r)
{
    if (!r->watching)
        return;
    atomic_store(&r->stop, true);
    pthread_join(r->watcher, NULL);
    r->watching = false;
}

/* ---- the end --------------------------------------------------------------------- */

static void *abort_one(void *comm)
{
    ncclCommAbort(comm);
    return NULL;
}

/* Group by group, the root last: a communicator's calls and its end never overlap another one's end. */
static void *finish_all(void *arg)
{
    struct nccl_rank *r = arg;
    ncclComm_t all[NCCL_COMMUNICATORS];
    int n = communicators(r, all);
#if CUDA_HAS_REACH
    for (int g = 0; g < GROUP_COUNT; g++)
        if (r->members[g].window) {
            cuda_reach_destroy(r->members[g].comm, r->members[g].reach);
            ncclCommWindowDeregister(r->members[g].comm, r->members[g].window);
        }
#endif
    for (int i = 0; i < n; i++) {
        ncclResult_t status = ncclCommFinalize(all[i]);
        while (status == ncclInProgress) {
            nccl_pause_us(1000);
            if (ncclCommGetAsyncError(all[i], &status) != ncclSuccess)
                break;
        }
        ncclCommDestroy(all[i]);
    }
    return NULL;
}

static void *run_ending(void *arg)
{
    struct ending *e = arg;
    e->body(e->arg);
    atomic_store(&e->done, true);
    return NULL;
}

static void start_ending(struct nccl_rank *r, void *(*body)(void *), void *arg)
{
    struct ending *e = &r->endings[r->n_endings];
    e->body = body;
    e->arg = arg;
    if (!pthread_create(&e->thread, NULL, run_ending, e))
        r->n_endings++;
}

/* False when one is not done by the deadline; it is left alone then. */
static bool join_endings(struct nccl_rank *r, int64_t deadline_ns)
{
    bool all = true;
    for (int i = 0; i < r->n_endings; i++) {
        struct ending *e = &r->endings[i];
        while (!atomic_load(&e->done) && clock_left_ms(deadline_ns))
            nccl_pause_us(1000);
        if (!e->joined && atomic_load(&e->done))
            e->joined = !pthread_join(e->thread, NULL);
        all = all && e->joined;
    }
    return all;
}

/* Kernels for memory that ranks share look for no abort (NCCL 2.28): such a communicator is left alone, since its abort
 * would take away memory that they read. If one waits for a rank it waits until the process is ended. */
static bool has_window(const struct nccl_rank *r, ncclComm_t comm)
{
#if CUDA_HAS_REACH
    for (int g = 0; g < GROUP_COUNT; g++)
        if (r->members[g].comm == comm && r->members[g].window)
            return true;
#else
    (void)r, (void)comm;
#endif
    return false;
}

/* All at once, each from its own thread: the abort of one may wait for another. The kernels that wait for other ranks
 * end; a communicator goes only when the captured sequences that hold it have gone. */
void nccl_abort_start(struct nccl_rank *r, const struct error *why)
{
    ncclComm_t all[NCCL_COMMUNICATORS];
    bool locked = false; /* a call that hangs in NCCL for longer than a second is what an abort is for */
    for (int tries = 0; tries < 1000 && !(locked = !pthread_mutex_trylock(&r->calls)); tries++)
        nccl_pause_us(1000);
    if (!atomic_load(&r->aborted)) {
        r->why = *why;
        r->deadline_ns = clock_mono_ns() + ABORT_MS * NS_PER_MS;
        atomic_store(&r->aborted, true);
        int n = communicators(r, all);
        for (int i = 0; i < n; i++)
            if (!has_window(r, all[i]))
                start_ending(r, abort_one, all[i]);
    }
    if (locked)
        pthread_mutex_unlock(&r->calls);
}

static void free_rank(struct nccl_rank *r)
{
    peers_close(r->peers);
    cuda_host_release((void *)r->stamps);
    pthread_mutex_destroy(&r->calls);
    free(r);
}

/* After an abort. What cannot be ended in time ends with the process. */
static void leave_aborted(struct nccl_rank *r)
{
    bool done = join_endings(r, r->deadline_ns);
    stop_watching(r);
    if (!done)
        r->watch.lost(r->watch.arg, &r->why);
    else
        free_rank(r);
}

static void leave_in_order(struct nccl_rank *r)
{
    stop_watching(r);
    peers_leave(r->peers);
    start_ending(r, finish_all, r);
    if (join_endings(r, clock_mono_ns() + LEAVE_MS * NS_PER_MS))
        free_rank(r);
    else /* all its work is done: no reason to fail; its threads still use `r` */
        r->watch.say(r->watch.arg, "NCCL did not end its communicators in time; they end with the process");
}

void nccl_leave(struct nccl_rank *r)
{
    if (atomic_load(&r->aborted))
        leave_aborted(r);
    else
        leave_in_order(r);
}
