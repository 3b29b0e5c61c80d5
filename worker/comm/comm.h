/* Collectives behind one small interface: LOCAL (ranks as threads of one process,
 * fixed order, for tests), GLOO (processes), NCCL (processes with a CUDA device each).
 *
 * A struct comm is one rank's end of one group. All ranks of a group call the
 * same operations in the same order. A call is enqueued on the rank's kernel stream
 * (on the CPU: runs now and blocks). A call of several segments is one call, on
 * the wire and in the counters. Errors: ERR_PEER_LOST or ERR_TIMEOUT with the
 * group, the operation and the rank in the text; after an error the comm is dead.
 * A group is used by one thread at a time; several groups of a rank may be in calls at the same time, but not two of
 * the same ranks. */
#ifndef BOOST_WORKER_COMM_COMM_H
#define BOOST_WORKER_COMM_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "proto/base/buffer.h"
#include "proto/base/error.h"

/* tp: the slices of a layer; pp: the stages of a pipeline; dp: the replicas of a stage; ends: first
 * and last stage of a model with tied tables. */
enum comm_group { GROUP_WORLD, GROUP_TP, GROUP_PP, GROUP_DP, GROUP_ENDS, GROUP_COUNT };
enum comm_kind { COMM_ALL_REDUCE, COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_SEND, COMM_RECV, COMM_KIND_COUNT };
enum comm_op { COMM_SUM, COMM_MAX };
/* What a call belongs to; the formulas of worker/plan/README.md are per pass. */
enum comm_pass { PASS_FORWARD, PASS_BACKWARD, PASS_RECOMPUTE, PASS_STEP, PASS_EVAL, PASS_COUNT };

struct comm_segment {
    void *data; /* in place */
    int64_t count;
    enum dtype dtype;
};

/* One direction of an exchange with a rank of the group. */
struct comm_message {
    int peer; /* within the group */
    const struct comm_segment *segments;
    int n;
    enum comm_pass pass; /* counted under */
};

/* Elements are the payload of the formulas: count of an all_reduce, the full (unsharded) tensor
 * of a reduce_scatter or all_gather. bytes = elements x the dtype's size. Calls in a group of one
 * rank are not made and not counted. */
struct comm_count {
    int64_t calls;
    int64_t elements;
    int64_t bytes;
};
struct comm_counters {
    struct comm_count by[GROUP_COUNT][COMM_KIND_COUNT][PASS_COUNT];
};

/* A call as people are told of it. */
struct comm_call {
    const char *what; /* the caller's constant text */
    const char *kind; /* "all_reduce"; of a pipeline's messages "exchange" */
    enum comm_group group;
    int64_t bytes; /* as counted; of an exchange both ways */
};

struct comm {
    const struct comm_backend *backend;
    enum comm_group group;
    int rank, size;                 /* within the group */
    int world_rank;                 /* for messages */
    enum comm_pass pass;            /* set by the step */
    struct comm_counters *counters; /* the rank's, shared by its groups */
    double *seconds;                /* in this group's calls */
    /* For the status page: a call was entered, or left again. By the thread that makes the call; may be NULL. */
    void (*note)(void *arg, const struct comm_call *call, bool entered);
    void *note_arg;
    /* Of comms_share(), for kernels that make a sum over this group themselves; the backend's. NULL: none. */
    const struct kreach *reach;
    void *state; /* the backend's */
};

struct comm_backend {
    const char *name;
    int (*all_reduce)(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n, enum comm_op op,
                      struct error *err);
    /* data is [size][chunk] of dtype; out gets the sum of chunk number `rank`, in whose place it may lie. The rest of
     * data is undefined afterwards. */
    int (*reduce_scatter)(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk, enum dtype dtype,
                          struct error *err);
    /* out [size][chunk] from each rank's in [chunk]. */
    int (*all_gather)(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk, enum dtype dtype,
                      struct error *err);
    /* Sends and receives (either may be NULL) at once: done when both are. Sender and receiver give equal segments.
     * For neighbours, an even and an odd rank: a send may wait for its receive, and the even one sends first. */
    int (*exchange)(struct comm *c, struct kstream *ks, const struct comm_message *send,
                    const struct comm_message *recv, struct error *err);
    void (*destroy)(struct comm *c);
    bool enqueues; /* calls are done when the stream comes to them: the host cannot tell how long they take */
    /* Enqueued in front of each call, where the host cannot tell which one is under way: instead of the comm's note,
     * the device then says that it has come to it (struct comms_watch's `reached`). NULL: the note. */
    void (*stamp)(struct comm *c, struct kstream *ks, const struct comm_call *call);
    /* In the memory that the calls work on, for a group of one; NULL: memcpy. */
    void (*copy)(struct kstream *ks, void *to, const void *from, size_t bytes);
    void (*abort)(struct comm *world, const struct error *why); /* comms_abort(); NULL: not needed */
    /* comms_share(); may set c->reach. NULL: not needed. */
    int (*share)(struct comm *c, void *memory, size_t bytes, struct error *err);
};

/* The calls model code makes (comm.c): they count, time, note, and do nothing in a group of one
 * (reduce_scatter and all_gather then copy). `what` is a short constant text: "latent qkv". */
MUST_USE int comm_all_reduce(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                             enum comm_op op, const char *what, struct error *err);
/* An all-reduce that is made by kernels which the caller enqueues (the group has a `reach`): begun in front of them,
 * ended behind them, by the thread that makes the group's calls. Noted and counted alike; of the segments, count and
 * dtype are read. */
struct comm_own_sum {
    struct comm_call call;
    int64_t elements, started;
};
struct comm_own_sum comm_own_sum_begin(struct comm *c, struct kstream *ks, const struct comm_segment *segments, int n,
                                       const char *what);
void comm_own_sum_end(struct comm *c, const struct comm_own_sum *sum);
MUST_USE int comm_reduce_scatter(struct comm *c, struct kstream *ks, void *data, void *out, int64_t chunk,
                                 enum dtype dtype, const char *what, struct error *err);
MUST_USE int comm_all_gather(struct comm *c, struct kstream *ks, const void *in, void *out, int64_t chunk,
                             enum dtype dtype, const char *what, struct error *err);
/* Counts as a send and as a receive, each under its message's pass. Both NULL: nothing. */
MUST_USE int comm_exchange(struct comm *c, struct kstream *ks, const struct comm_message *send,
                           const struct comm_message *recv, const char *what, struct error *err);
void comm_destroy(struct comm *c);

const char *comm_group_name(enum comm_group g); /* "world", "tp", ... */
const char *comm_kind_name(enum comm_kind k);   /* "all_reduce", ... */
const char *comm_pass_name(enum comm_pass p);

/* ---- groups ---- */

/* World rank = (pp_rank * dp + dp_rank) * tp + tp_rank. */
struct comm_layout {
    int tp, dp, pp;
    bool ends; /* first and last stage share a table: they get a group when pp > 1 */
};
/* A rank's place in a group: its world ranks are first + i * step, i < size. A group of one has no state. */
struct comm_place {
    int rank, size, first, step;
};
struct comm_place comm_place_of(const struct comm_layout *layout, int world_rank, enum comm_group g);
int comm_world_size(const struct comm_layout *layout);

/* A device's processors that a collective over tp takes, where devices do the work. Two H200, 25 to 100 MB in shared
 * memory: NCCL's own choice gives 220 GB/s, 8 give 245, 16 to 48 give 300 to 330. */
enum { COMM_PROCESSORS = 16 };

/* A rank's set of groups. */
struct comms {
    struct comm world, tp, pp, dp, ends;
    struct comm_counters counters; /* an entry is one group's, so written by one thread at a time */
    double seconds[GROUP_COUNT];
};
/* In collectives so far, those under the rank's computation too; NaN where the host cannot tell. While none is under
 * way. */
double comms_seconds(const struct comms *c);
struct comm *comms_group(struct comms *c, enum comm_group g);
void comms_set_pass(struct comms *c, enum comm_pass pass);
void comms_set_note(struct comms *c, void (*note)(void *arg, const struct comm_call *call, bool entered), void *arg);
/* Gives the ranks of group tp the reach of one another's memory, where they have a way to use it: calls over tp whose
 * segments all lie in it then take the other ranks' part from where it is and add it up in an order of their own, the
 * same each time. By every rank of the group at once, before its first call, once; blocks. `memory` is of the kernels'
 * alloc(), as large on each rank, and used alike there: a call's segments are at the same offsets. It may be released
 * before the groups end; the device has it back after both. Errors are those of a call, and ERR_DEVICE. */
MUST_USE int comms_share(struct comms *c, void *memory, size_t bytes, struct error *err);
/* For a rank that fails because of `why`, before it frees what its calls work on: ends the calls under way, which may
 * wait for other ranks for ever; those in memory that ranks share end with the process. Only comms_destroy() may
 * follow. */
void comms_abort(struct comms *c, const struct error *why);
void comms_destroy(struct comms *c);

/* ---- LOCAL: worker/comm/local.c ---- */
struct local_world; /* shared by the ranks of one process */
MUST_USE int local_world_create(const struct comm_layout *layout, struct local_world **out, struct error *err);
void local_world_destroy(struct local_world *w); /* after every rank's comms_destroy */
MUST_USE int local_comms_join(struct local_world *w, int rank, struct comms *out, struct error *err);
/* Makes every waiting and later call fail with ERR_PEER_LOST naming `rank`: for a rank that fails. */
void local_world_abort(struct local_world *w, int rank);

/* ---- GLOO: worker/comm/gloo.cc ---- */
/* Rendezvous by key and value, blocking with a deadline; worker/rendezvous.c talks to the agent. */
struct rendezvous {
    int (*set)(void *arg, const char *group, const char *key, const void *value, size_t len, struct error *err);
    /* Waits for the key; appends the value to `out`. ERR_TIMEOUT names the key. */
    int (*get)(void *arg, const char *group, const char *key, int timeout_ms, struct buffer *out, struct error *err);
    void *arg;
};
MUST_USE int gloo_comms_create(int rank, const struct comm_layout *layout, const char *bind_address,
                               const struct rendezvous *rv, int connect_timeout_ms, int op_timeout_ms,
                               struct comms *out, struct error *err);

/* ---- NCCL: worker/comm/nccl.c, in the CUDA library ---- */
/* How the groups of a rank speak to it. */
struct comms_watch {
    /* Another rank or the connection to it is lost (why->code), seen by a thread that watches while the rank waits for
     * its device: that wait may never end, so this has to end the process. Called at most once. */
    void (*lost)(void *arg, const struct error *why);
    /* The device has come to this call of its group, the `seq`th there; told some time later, of several at once the
     * last one. The thread that watches. */
    void (*reached)(void *arg, const struct comm_call *call, uint64_t seq);
    /* A line for the rank's log. The thread of nccl_comms_create(), comms_share() or comms_destroy(). */
    void (*say)(void *arg, const char *line);
    void *arg;
};
/* On the process's first visible device; a process has one rank. Every operation takes the kstream of the CUDA kernels
 * and may be captured. bind_address and rv serve as for Gloo (both unused when the layout has one rank). Ends by
 * connect_timeout_ms whatever the others do. Ranks that share a device are connected as if each were on a host of its
 * own, by variables set in this process's environment: correct, never fast. ERR_DEVICE: the device, the driver, NCCL's
 * own trouble. comms_destroy() in order says so to the other ranks, after comms_abort() it does not; both end by a
 * deadline. */
MUST_USE int nccl_comms_create(int rank, const struct comm_layout *layout, const char *bind_address,
                               const struct rendezvous *rv, int connect_timeout_ms, const struct comms_watch *watch,
                               struct comms *out, struct error *err);

#endif
