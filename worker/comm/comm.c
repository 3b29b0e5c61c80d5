/* comm.h: the calls that model code makes. Counting, timing and naming happen here, once,
 * so that every backend is counted alike. */
#include <string.h>

#include "proto/base/clock.h"
#include "worker/comm/comm.h"

static const char *const group_names[GROUP_COUNT] = {"world", "tp", "pp", "dp"};
static const char *const kind_names[COMM_KIND_COUNT] = {"all_reduce", "reduce_scatter", "all_gather"};
static const char *const pass_names[PASS_COUNT] = {"forward", "backward", "recompute", "step", "eval"};

const char *comm_group_name(enum comm_group g)
{
    return (unsigned)g < GROUP_COUNT ? group_names[g] : "?";
}

const char *comm_kind_name(enum comm_kind k)
{
    return (unsigned)k < COMM_KIND_COUNT ? kind_names[k] : "?";
}

const char *comm_pass_name(enum comm_pass p)
{
    return (unsigned)p < PASS_COUNT ? pass_names[p] : "?";
}

static int64_t enter(struct comm *c, const char *what)
{
    if (c->note)
        c->note(c->note_arg, what);
    return clock_mono_ns();
}

/* Counts a call that went through; gives context to one that did not. */
static int leave(struct comm *c, enum comm_kind kind, int64_t elements, int64_t bytes, int64_t started,
                 const char *what, int rc, struct error *err)
{
    *c->seconds += (double)(clock_mono_ns() - started) / (double)NS_PER_S;
    if (rc) {
        error_context(err, "%s \"%s\" in group %s of rank %d", comm_kind_name(kind), what, comm_group_name(c->group),
                      c->world_rank);
        return rc;
    }
    struct comm_count *count = &c->counters->by[c->group][kind][c->pass];
    count->calls++;
    count->elements += elements;
    count->bytes += bytes;
    return ERR_OK;
}

int comm_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                    const char *what, struct error *err)
{
    if (c->size == 1)
        return ERR_OK;
    int64_t elements = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        elements += segments[i].count;
        bytes += segments[i].count * (int64_t)dtype_size(segments[i].dtype);
    }
    int64_t started = enter(c, what);
    int rc = c->backend->all_reduce(c, ks, segments, n, op, err);
    return leave(c, COMM_ALL_REDUCE, elements, bytes, started, what, rc, err);
}

int comm_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                        const char *what, struct error *err)
{
    int64_t elements = c->size * chunk, bytes = elements * (int64_t)dtype_size(dtype);
    if (c->size == 1) {
        if (data != out)
            memcpy(out, data, (size_t)bytes);
        return ERR_OK;
    }
    int64_t started = enter(c, what);
    int rc = c->backend->reduce_scatter(c, ks, data, out, chunk, dtype, err);
    return leave(c, COMM_REDUCE_SCATTER, elements, bytes, started, what, rc, err);
}

int comm_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                    const char *what, struct error *err)
{
    int64_t elements = c->size * chunk, bytes = elements * (int64_t)dtype_size(dtype);
    if (c->size == 1) {
        if (in != out)
            memcpy(out, in, (size_t)bytes);
        return ERR_OK;
    }
    int64_t started = enter(c, what);
    int rc = c->backend->all_gather(c, ks, in, out, chunk, dtype, err);
    return leave(c, COMM_ALL_GATHER, elements, bytes, started, what, rc, err);
}

void comm_destroy(struct comm *c)
{
    if (c->backend && c->backend->destroy)
        c->backend->destroy(c);
    c->backend = NULL;
    c->state = NULL;
}

void comms_destroy(struct comms *c)
{
    comm_destroy(&c->tp);
    comm_destroy(&c->world);
}
