/* null_comms.h */
#include "tests/bench/support/null_comms.h"

#include <string.h>

static void put(struct comm *c, struct kstream *ks, void *to, const void *from, size_t bytes)
{
    if (to == from)
        return;
    if (c->backend->copy)
        c->backend->copy(ks, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static int all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                      struct error *err)
{
    (void)c, (void)ks, (void)segments, (void)n, (void)op, (void)err;
    return ERR_OK;
}

static int reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                          struct error *err)
{
    (void)err;
    size_t bytes = (size_t)chunk * dtype_size(dtype);
    put(c, ks, out, (const char *)data + (size_t)c->rank * bytes, bytes);
    return ERR_OK;
}

static int all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                      struct error *err)
{
    (void)err;
    size_t bytes = (size_t)chunk * dtype_size(dtype);
    put(c, ks, (char *)out + (size_t)c->rank * bytes, in, bytes); /* the others' parts are what was there before */
    return ERR_OK;
}

static int exchange(struct comm *c, struct kstream *ks, const struct comm_message *send,
                    const struct comm_message *recv, struct error *err)
{
    (void)ks, (void)send, (void)recv;
    return error_set(err, ERR_UNSUPPORTED, "%s has no neighbours", c->backend->name);
}

void null_comms(const struct plan *p, int rank,
                void (*copy)(struct kstream *ks, void *to, const void *from, size_t bytes), struct comms *out)
{
    static struct comm_backend backend = {.name = "NULL",
                                          .all_reduce = all_reduce,
                                          .reduce_scatter = reduce_scatter,
                                          .all_gather = all_gather,
                                          .exchange = exchange};
    struct comm_layout layout = engine_layout(p);
    backend.copy = copy;
    backend.enqueues = p->cuda;
    *out = (struct comms){.seconds = {0}};
    for (int g = 0; g < GROUP_COUNT; g++) {
        struct comm_place place = comm_place_of(&layout, rank, (enum comm_group)g);
        *comms_group(out, (enum comm_group)g) = (struct comm){.backend = &backend,
                                                              .group = (enum comm_group)g,
                                                              .rank = place.rank,
                                                              .size = place.size,
                                                              .world_rank = rank,
                                                              .counters = &out->counters,
                                                              .seconds = &out->seconds[g]};
    }
}
