/* The files of an attempt's run directory, through which rank, keeper and agent
 * talk: no socket, so each can die and come back without the others noticing.
 *
 *   start.pb            AttemptStart, durable, before the keeper starts   agent  -> keeper, ranks
 *   keeper.id           process identity of the keeper (text, procid)     keeper -> agent
 *   keeper.end          every rank ended and its processes are gone       keeper -> agent
 *   epilog.end          the site's epilog has run                         agent  -> agent
 *   rank-<r>.pid        process identity of the rank                      keeper -> agent
 *   rank-<r>.status     struct rank_status, memory-mapped                 rank   -> agent
 *   rank-<r>.control    struct rank_control, memory-mapped                agent  -> rank
 *   rank-<r>.metrics    record log of MetricRecord                        rank   -> agent
 *   rank-<r>.shards     record log of ShardRecord, durable                rank   -> agent
 *   rank-<r>.stacks     StackRecord, by rename, each time it is asked      rank   -> agent
 *   rank-<r>.done       DoneRecord, by rename                             rank   -> keeper
 *   rank-<r>.exit       ExitRecord, by rename, durable                    keeper -> agent
 *   rank-<r>.log        its output; rotated once to .log.1; .log.pos says where
 *                       each begins in the whole stream, .log.times when
 *                       it came where (keeper_log.h)                       keeper -> agent
 *   keeper.cgroup       path of the attempt's cgroup, where there is one   keeper -> agent
 *   stop                text "kill": the keeper kills all now             agent  -> keeper
 *
 * The agent makes status and control files (zeroed but for the magic) before the
 * keeper starts. Scalars are accessed with the atomic built-ins; the texts are
 * for people and may tear. */
#ifndef BOOST_PROTO_RANKFILES_H
#define BOOST_PROTO_RANKFILES_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

enum {
    RANK_FILE_BYTES = 4096,
    RANK_STATUS_MAGIC = 0x31535442,  /* "BTS1" */
    RANK_CONTROL_MAGIC = 0x31435442, /* "BTC1" */
    /* exit codes of boost-worker */
    RANK_EXIT_SPEC = 64,  /* spec or data error: no restart can help   */
    RANK_EXIT_PEER = 65,  /* a peer was lost: never the cause          */
    RANK_EXIT_INFRA = 66, /* device, driver, the checkpoints' disk     */
    RANK_EXIT_APP = 70,   /* everything else that the worker noticed   */
};

/* How a DONE record's error begins where the disk of checkpoints is why the rank ended with RANK_EXIT_INFRA. */
#define RANK_FINAL_CHECKPOINT "final checkpoint"

/* The last collective that a rank entered in one of its groups. */
struct rank_collective {
    uint64_t seq;    /* calls of this group begun by the rank, this one included; the same call has the same on each */
    uint64_t bytes;  /* of it, all ranks' parts together where they are gathered or scattered */
    uint32_t inside; /* RANK_INSIDE, RANK_LEFT, RANK_REACHED */
    char group[12];  /* "tp"; "": none yet */
    char kind[16];   /* "all_reduce" */
    char what[48];   /* "latent qkv" */
};
enum {
    RANK_LEFT,    /* it is over */
    RANK_INSIDE,  /* the rank waits in it */
    RANK_REACHED, /* the device has come to it; whether it is over is not known */
    RANK_GROUPS = 5,
};

struct rank_status {
    uint32_t magic;
    uint32_t phase;    /* Boost__RankUpdate__Phase */
    uint64_t progress; /* micro-batches done (in training on a GPU: steps), eval ones too; any forward move counts */
    uint64_t bytes;    /* of loading or checkpoint writing, cumulative               */
    int64_t step;      /* steps done                                                 */
    uint64_t collective_seq;
    char collective[96]; /* last one begun: "latent qkv"                             */
    char doing[96];      /* "waiting for rank 1 at rendezvous"                       */
    struct rank_collective groups[RANK_GROUPS];
    uint32_t group; /* of the last one begun, in `groups` */
};
_Static_assert(sizeof(struct rank_status) <= RANK_FILE_BYTES, "status page");

struct rank_control {
    uint32_t magic;
    uint32_t stop;       /* 1: stop at the agreed step, after a checkpoint */
    uint32_t checkpoint; /* counter: a new value asks for one checkpoint   */
    uint32_t stacks;     /* counter: a new value, then SIGURG, asks for rank-<r>.stacks with that number */
};

/* The last collective of a page for people: "all_reduce \"latent qkv\" in group tp (call 1234, 512 KiB)", with ", done"
 * when it is over; of a page of an older worker its name alone; "" when there is none. Control bytes and bytes
 * that are not ASCII become '?'. Returns out. */
char *rank_collective_text(const struct rank_status *page, char *out, size_t cap);
enum { RANK_COLLECTIVE_TEXT = 192 };

/* Maps `<run_dir>/rank-<r>.<suffix>` shared; creates it with `magic` when `create`.
 * NULL and *err on failure. Unmap with rank_file_unmap. */
void *rank_file_map(const char *run_dir, int rank, const char *suffix, uint32_t magic, int create, struct error *err);
void rank_file_unmap(void *page);
/* "<run_dir>/rank-<r>.<suffix>" */
MUST_USE int rank_file_path(char *out, size_t cap, const char *run_dir, int rank, const char *suffix,
                            struct error *err);

#endif
