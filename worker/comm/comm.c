/* comm.h: the calls that model code makes. Counting, timing and naming happen here, once,
 * so that every backend is counted alike. */
#include <math.h>
#include <string.h>

#include "proto/base/clock.h"
#include "worker/comm/comm.h"

static const char *const group_names[GROUP_COUNT] = {"world", "tp", "pp", "dp", "ends"};
static const char *const kind_names[COMM_KIND_COUNT] = {"all_reduce", "reduce_scatter", "all_gather", "send", "recv"};
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

static int64_t enter(struct comm *c, struct kstream *ks, const struct comm_call *call)
{
    if (c->backend->stamp)
        c->backend->stamp(c, ks, call);
    else if (c->note)
        c->note(c->note_arg, call, true);
    return clock_mono_ns();
}

/* Not of one that failed: it stays where the rank was last. */
static void note_left(struct comm *c, const struct comm_call *call)
{
    if (!c->backend->stamp && c->note)
        c->note(c->note_arg, call, false);
}

static void count(struct comm *c, enum comm_kind kind, enum comm_pass pass, int64_t elements, int64_t bytes)
{
    struct comm_count *to = &c->counters->by[c->group][kind][pass];
    to->calls++;
    to->elements += elements;
    to->bytes += bytes;
}

/* Counts a call that went through; gives context to one that did not. */
static int leave(struct comm *c, enum comm_kind kind, int64_t elements, const struct comm_call *call, int64_t started,
                 int rc, struct error *err)
{
    *c->seconds += (double)(clock_mono_ns() - started) / (double)NS_PER_S;
    if (rc) {
        error_context(err, "%s \"%s\" in group %s of rank %d", call->kind, call->what, comm_group_name(c->group),
                      c->world_rank);
        return rc;
    }
    note_left(c, call);
    count(c, kind, c->pass, elements, call->bytes);
    return ERR_OK;
}

/* What a call leaves in a group of one. */
static void copy_alone(struct comm *c, struct kstream *ks, void *to, const void *from, int64_t bytes)
{
    if (to == from)
        return;
    if (c->backend->copy)
        c->backend->copy(ks, to, from, (size_t)bytes);
    else
        memcpy(to, from, (size_t)bytes);
}

struct comm_own_sum comm_own_sum_begin(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                                       const char *what)
{
    int64_t elements = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        elements += segments[i].count;
        bytes += segments[i].count * (int64_t)dtype_size(segments[i].dtype);
    }
    const struct comm_call call = {what, comm_kind_name(COMM_ALL_REDUCE), c->group, bytes};
    return (struct comm_own_sum){call, elements, enter(c, ks, &call)};
}

void comm_own_sum_end(struct comm *c, const struct comm_own_sum *sum)
{
    (void)leave(c, COMM_ALL_REDUCE, sum->elements, &sum->call, sum->started, ERR_OK, NULL);
}

int comm_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                    const char *what, struct error *err)
{
    if (c->size == 1)
        return ERR_OK;
    struct comm_own_sum sum = comm_own_sum_begin(c, ks, segments, n, what);
    int rc = c->backend->all_reduce(c, ks, segments, n, op, err);
    return leave(c, COMM_ALL_REDUCE, sum.elements, &sum.call, sum.started, rc, err);
}

int comm_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                        const char *what, struct error *err)
{
    int64_t elements = c->size * chunk, bytes = elements * (int64_t)dtype_size(dtype);
    if (c->size == 1) {
        copy_alone(c, ks, out, data, bytes);
        return ERR_OK;
    }
    const struct comm_call call = {what, comm_kind_name(COMM_REDUCE_SCATTER), c->group, bytes};
    int64_t started = enter(c, ks, &call);
    int rc = c->backend->reduce_scatter(c, ks, data, out, chunk, dtype, err);
    return leave(c, COMM_REDUCE_SCATTER, elements, &call, started, rc, err);
}

int comm_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                    const char *what, struct error *err)
{
    int64_t elements = c->size * chunk, bytes = elements * (int64_t)dtype_size(dtype);
    if (c->size == 1) {
        copy_alone(c, ks, out, in, bytes);
        return ERR_OK;
    }
    const struct comm_call call = {what, comm_kind_name(COMM_ALL_GATHER), c->group, bytes};
    int64_t started = enter(c, ks, &call);
    int rc = c->backend->all_gather(c, ks, in, out, chunk, dtype, err);
    return leave(c, COMM_ALL_GATHER, elements, &call, started, rc, err);
}

static int64_t message_bytes(const struct comm_message *m)
{
    int64_t bytes = 0;
    for (int i = 0; m && i < m->n; i++)
        bytes += m->segments[i].count * (int64_t)dtype_size(m->segments[i].dtype);
    return bytes;
}

static void count_message(struct comm *c, enum comm_kind kind, const struct comm_message *m)
{
    int64_t elements = 0;
    for (int i = 0; i < m->n; i++)
        elements += m->segments[i].count;
    count(c, kind, m->pass, elements, message_bytes(m));
}

int comm_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send, const struct comm_message *recv,
                  const char *what, struct error *err)
{
    if (!send && !recv)
        return ERR_OK;
    const struct comm_call call = {what, "exchange", c->group, message_bytes(send) + message_bytes(recv)};
    int64_t started = enter(c, ks, &call);
    int rc = c->backend->exchange(c, ks, send, recv, err);
    *c->seconds += (double)(clock_mono_ns() - started) / (double)NS_PER_S;
    if (rc) {
        error_context(err, "exchange \"%s\" in group %s of rank %d", what, comm_group_name(c->group), c->world_rank);
        return rc;
    }
    note_left(c, &call);
    if (send)
        count_message(c, COMM_SEND, send);
    if (recv)
        count_message(c, COMM_RECV, recv);
    return ERR_OK;
}

void comm_destroy(struct comm *c)
{
    if (c->backend && c->backend->destroy)
        c->backend->destroy(c);
    c->backend = NULL;
    c->state = NULL;
}

int comms_share(struct comms *c, void *memory, size_t bytes, struct error *err)
{
    struct comm *tp = &c->tp;
    if (tp->size < 2 || !tp->backend->share)
        return ERR_OK;
    int rc = tp->backend->share(tp, memory, bytes, err);
    return rc ? error_context(err, "sharing %zu MiB with the ranks of group tp", bytes >> 20) : ERR_OK;
}

void comms_abort(struct comms *c, const struct error *why)
{
    if (c->world.backend && c->world.backend->abort)
        c->world.backend->abort(&c->world, why);
}

void comms_destroy(struct comms *c)
{
    for (int g = GROUP_COUNT - 1; g >= 0; g--)
        comm_destroy(comms_group(c, (enum comm_group)g));
}

/* ---- groups ---------------------------------------------------------------------- */

int comm_world_size(const struct comm_layout *l)
{
    return l->tp * l->dp * l->pp;
}

struct comm_place comm_place_of(const struct comm_layout *l, int rank, enum comm_group g)
{
    int tp_rank = rank % l->tp, dp_rank = rank / l->tp % l->dp, pp_rank = rank / l->tp / l->dp;
    int stage = l->tp * l->dp; /* ranks of a stage */
    switch (g) {
    case GROUP_WORLD:
        return (struct comm_place){rank, comm_world_size(l), 0, 1};
    case GROUP_TP:
        return (struct comm_place){tp_rank, l->tp, rank - tp_rank, 1};
    case GROUP_DP:
        return (struct comm_place){dp_rank, l->dp, rank - dp_rank * l->tp, l->tp};
    case GROUP_PP:
        return (struct comm_place){pp_rank, l->pp, rank % stage, stage};
    case GROUP_ENDS:
        if (l->ends && l->pp > 1 && (pp_rank == 0 || pp_rank == l->pp - 1))
            return (struct comm_place){pp_rank > 0, 2, rank % stage, (l->pp - 1) * stage};
        break;
    default:
        break;
    }
    return (struct comm_place){0, 1, rank, 1};
}

struct comm *comms_group(struct comms *c, enum comm_group g)
{
    struct comm *const groups[GROUP_COUNT] = {&c->world, &c->tp, &c->pp, &c->dp, &c->ends};
    return groups[g];
}

double comms_seconds(const struct comms *c)
{
    double sum = c->world.backend->enqueues ? (double)NAN : 0;
    for (int g = 0; g < GROUP_COUNT; g++)
        sum += c->seconds[g];
    return sum;
}

void comms_set_pass(struct comms *c, enum comm_pass pass)
{
    for (int g = 0; g < GROUP_COUNT; g++)
        comms_group(c, (enum comm_group)g)->pass = pass;
}

void comms_set_note(struct comms *c, void (*note)(void *arg, const struct comm_call *call, bool entered), void *arg)
{
    for (int g = 0; g < GROUP_COUNT; g++) {
        comms_group(c, (enum comm_group)g)->note = note;
        comms_group(c, (enum comm_group)g)->note_arg = arg;
    }
}
