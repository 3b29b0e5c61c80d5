/* comm.h: NCCL, the operations. nccl_connect.c and nccl_watch.c have the rest. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "worker/comm/nccl_rank.h"

static const ncclDataType_t types[DTYPE_COUNT] = {
    [DTYPE_F32] = ncclFloat32, [DTYPE_F64] = ncclFloat64, [DTYPE_BF16] = ncclBfloat16, [DTYPE_I32] = ncclInt32};
/* NCCL's maximum passes over a NaN: one among the logits is in the sums of the loss that follow. */
static const ncclRedOp_t ops[] = {[COMM_SUM] = ncclSum, [COMM_MAX] = ncclMax};

static int begin(struct nccl_rank *r, struct error *err)
{
    pthread_mutex_lock(&r->calls);
    if (!atomic_load(&r->aborted))
        return ERR_OK;
    pthread_mutex_unlock(&r->calls);
    error_set(err, ERR_PEER_LOST, "the groups were given up: %s", r->why.message);
    return ERR_PEER_LOST;
}

/* In progress, though these communicators block: NCCL_COMM_BLOCKING=0 in the environment makes them non-blocking. The
 * call must be through before the next one; while it is not, the watcher sees to lost ranks. */
static int end(struct member *m, ncclResult_t status, struct error *err)
{
    while (status == ncclInProgress) {
        ncclResult_t now, asked = ncclCommGetAsyncError(m->comm, &now);
        status = asked == ncclSuccess ? now : asked;
        if (status == ncclInProgress)
            nccl_pause_us(20);
    }
    pthread_mutex_unlock(&m->rank->calls);
    return status == ncclSuccess ? ERR_OK : nccl_explain(m->rank, status, NCCL_BLAME_WAIT_MS, err);
}

static bool fine(ncclResult_t status)
{
    return status == ncclSuccess || status == ncclInProgress;
}

/* Closes a group of calls; the first error counts. */
static ncclResult_t group_end(ncclResult_t status)
{
    ncclResult_t ended = ncclGroupEnd();
    return fine(status) ? ended : status;
}

/* In a window NCCL's kernels for small calls take bf16 that begins between two words for other numbers from the fourth
 * on (2.28.9). Such calls are made in another way. */
static bool off_a_word(const struct member *m, const void *data, size_t chunk_bytes)
{
#if CUDA_HAS_REACH
    return m->window && ((uintptr_t)data % 4 || chunk_bytes % 4);
#else
    (void)m, (void)data, (void)chunk_bytes;
    return false;
#endif
}

/* Two calls of a group go by another kernel; the second one begins on a word. */
static int64_t first_call(const struct member *m, const struct comm_segment *s)
{
    return s->count > 1 && off_a_word(m, s->data, 0) ? 1 : s->count;
}

static ncclResult_t reduce_segment(const struct member *m, struct kstream *ks, const struct comm_segment *s,
                                   enum comm_op op)
{
    ncclResult_t status = ncclSuccess;
    int64_t size = (int64_t)dtype_size(s->dtype), n = first_call(m, s);
    for (int64_t at = 0; at < s->count && fine(status); at += n, n = s->count - at) {
        char *data = (char *)s->data + at * size;
        status = ncclAllReduce(data, data, (size_t)n, types[s->dtype], ops[op], m->comm, ks->stream);
    }
    return status;
}

static int nccl_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                           enum comm_op op, struct error *err)
{
    struct member *m = c->state;
    int rc = begin(m->rank, err);
    if (rc)
        return rc;
    ncclResult_t status = ncclGroupStart();
    if (status != ncclSuccess)
        return end(m, status, err);
    for (int i = 0; i < n && fine(status); i++)
        status = reduce_segment(m, ks, &segments[i], op);
    return end(m, group_end(status), err);
}

static int nccl_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk,
                               enum dtype dtype, struct error *err)
{
    struct member *m = c->state;
    int rc = begin(m->rank, err);
    if (rc)
        return rc;
    size_t bytes = (size_t)chunk * dtype_size(dtype);
    if (!off_a_word(m, data, bytes))
        return end(m, ncclReduceScatter(data, out, (size_t)chunk, types[dtype], ncclSum, m->comm, ks->stream), err);
    ncclResult_t status = ncclGroupStart();
    for (int i = 0; i < c->size && fine(status); i++) {
        char *part = (char *)data + (size_t)i * bytes;
        status =
            ncclReduce(part, i == c->rank ? out : part, (size_t)chunk, types[dtype], ncclSum, i, m->comm, ks->stream);
    }
    return end(m, group_end(status), err);
}

static int nccl_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk,
                           enum dtype dtype, struct error *err)
{
    struct member *m = c->state;
    int rc = begin(m->rank, err);
    if (rc)
        return rc;
    size_t bytes = (size_t)chunk * dtype_size(dtype);
    if (!off_a_word(m, in, bytes))
        return end(m, ncclAllGather(in, out, (size_t)chunk, types[dtype], m->comm, ks->stream), err);
    ncclResult_t status = ncclGroupStart();
    for (int i = 0; i < c->size && fine(status); i++)
        status =
            ncclBroadcast(in, (char *)out + (size_t)i * bytes, (size_t)chunk, types[dtype], i, m->comm, ks->stream);
    return end(m, group_end(status), err);
}

static int nccl_exchange(struct comm *c, struct kstream *ks, const struct comm_message *give,
                         const struct comm_message *take, struct error *err)
{
    struct member *m = c->state;
    int rc = begin(m->rank, err);
    if (rc)
        return rc;
    ncclResult_t status = ncclGroupStart();
    if (status != ncclSuccess)
        return end(m, status, err);
    for (int i = 0; give && i < give->n && fine(status); i++)
        status = ncclSend(give->segments[i].data, (size_t)give->segments[i].count, types[give->segments[i].dtype],
                          give->peer, m->comm, ks->stream);
    for (int i = 0; take && i < take->n && fine(status); i++)
        status = ncclRecv(take->segments[i].data, (size_t)take->segments[i].count, types[take->segments[i].dtype],
                          take->peer, m->comm, ks->stream);
    return end(m, group_end(status), err);
}

#if CUDA_HAS_REACH
/* NCCL's window over memory of ncclMemAlloc(): its kernels for symmetric memory read and write the other ranks' through
 * it, without copies into NCCL's own buffers. */
static int nccl_share(struct comm *c, void *memory, size_t bytes, struct error *err)
{
    struct member *m = c->state;
    struct nccl_rank *r = m->rank;
    if (!r->tp_on_one_host)
        return ERR_OK;
    int rc = begin(r, err);
    if (!rc)
        rc = end(m, ncclCommWindowRegister(m->comm, memory, bytes, &m->window, NCCL_WIN_COLL_SYMMETRIC), err);
    if (!rc && c->size == 2) {
        rc = begin(r, err);
        if (!rc)
            rc = end(m, cuda_reach_create(m->comm, m->window, memory, &m->reach), err);
        if (!rc && !m->reach)
            r->watch.say(r->watch.arg, "kernels do not reach the other rank's memory (without NCCL's windows, or with "
                                       "another NCCL than this was built for): latents are summed by calls");
    }
    c->reach = m->reach;
    if (rc == ERR_DEVICE || rc == ERR_INTERNAL)
        error_hint(err, "NCCL_WIN_ENABLE=0 in the environment of the job goes without; NCCL_DEBUG=WARN says more");
    return rc;
}
#endif

/* The texts are constants. */
static void nccl_stamp(struct comm *c, struct kstream *ks, const struct comm_call *call)
{
    struct nccl_rank *r = ((struct member *)c->state)->rank;
    int n = atomic_load(&r->n_kinds), i = 0;
    while (i < n && !(r->kinds[i].what == call->what && r->kinds[i].group == call->group &&
                      r->kinds[i].kind == call->kind && r->kinds[i].bytes == call->bytes))
        i++;
    if (i == NCCL_CALLS) /* counted all the same; the name is of one before it */
        i = NCCL_CALLS - 1;
    if (i == n) {
        r->kinds[i] = *call;
        atomic_store(&r->n_kinds, n + 1);
    }
    cuda_stamp(ks, r->stamps, (int)c->group, (uint32_t)i + 1);
}

static void nccl_copy(struct kstream *ks, void *to, const void *from, size_t bytes)
{
    cuda_ok(ks, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ks->stream), "a copy in a group of one");
}

static void nccl_abort(struct comm *world, const struct error *why)
{
    struct member *m = world->state;
    if (m)
        nccl_abort_start(m->rank, why);
}

/* The world's end takes the others with it. */
static void nccl_destroy(struct comm *c)
{
    struct member *m = c->state;
    if (c->group == GROUP_WORLD && m)
        nccl_leave(m->rank);
}

static const struct comm_backend nccl_backend = {
    .name = "NCCL",
    .all_reduce = nccl_all_reduce,
    .reduce_scatter = nccl_reduce_scatter,
    .all_gather = nccl_all_gather,
    .exchange = nccl_exchange,
    .destroy = nccl_destroy,
#if CUDA_HAS_REACH
    .share = nccl_share,
#endif
    .enqueues = true,
    .stamp = nccl_stamp,
    .copy = nccl_copy,
    .abort = nccl_abort,
};

/* ---- creating -------------------------------------------------------------------- */

/* A group of one has no state: nothing is called there. */
static void join(struct comms *all, const struct comm_layout *layout, int rank, struct nccl_rank *r)
{
    for (int i = 0; i < GROUP_COUNT; i++) {
        enum comm_group g = (enum comm_group)i;
        struct comm_place place = comm_place_of(layout, rank, g);
        *comms_group(all, g) = (struct comm){
            .backend = &nccl_backend,
            .group = g,
            .rank = place.rank,
            .size = place.size,
            .world_rank = rank,
            .counters = &all->counters,
            .seconds = &all->seconds[g],
            .state = r && place.size > 1 ? &r->members[g] : NULL,
        };
    }
}

int nccl_comms_create(int rank, const struct comm_layout *layout, const char *bind_address, const struct rendezvous *rv,
                      int connect_timeout_ms, const struct comms_watch *watcher, struct comms *out, struct error *err)
{
    struct error unread;
    int world = comm_world_size(layout);
    if (!err)
        err = &unread;
    memset(out, 0, sizeof *out);
    if (world == 1) {
        join(out, layout, rank, NULL);
        return ERR_OK;
    }
    struct nccl_rank *r = calloc(1, sizeof *r);
    if (!r)
        return error_set(err, ERR_NOMEM, "out of memory");
    r->rank = rank;
    r->world = world;
    r->watch = *watcher;
    _Static_assert((int)GROUP_COUNT <= (int)CUDA_STAMPS, "a place for each group");
    r->stamps = cuda_host_alloc(sizeof *r->stamps, err);
    if (!r->stamps) {
        free(r);
        return err->code;
    }
    memset((void *)r->stamps, 0, sizeof *r->stamps);
    pthread_mutex_init(&r->calls, NULL);
    for (int g = 0; g < GROUP_COUNT; g++)
        r->members[g].rank = r;
    int rc = nccl_connect(r, layout, bind_address, rv, connect_timeout_ms, err);
    if (!rc)
        rc = nccl_watch_start(r, err);
    if (rc) {
        nccl_abort_start(r, err);
        nccl_leave(r);
        return rc;
    }
    join(out, layout, rank, r);
    return ERR_OK;
}
