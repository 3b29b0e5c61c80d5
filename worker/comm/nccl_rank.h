/* Private to nccl*.c: one rank's communicators, and how they are connected, watched and ended. */
#ifndef BOOST_WORKER_COMM_NCCL_RANK_H
#define BOOST_WORKER_COMM_NCCL_RANK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "kernels/cuda/reach.h"
#include "proto/base/clock.h"
#include "worker/comm/comm.h"
#include "worker/comm/peers.h"

enum {
    NCCL_BLAME_WAIT_MS = 1000, /* after an error, for the news of who is gone */
    NCCL_COMMUNICATORS = GROUP_COUNT + 1,
    NCCL_CALLS = 256, /* of different kinds */
};

/* One rank's end of one group. */
struct member {
    struct nccl_rank *rank;
    ncclComm_t comm;
#if CUDA_HAS_REACH
    ncclWindow_t window; /* of comms_share(); NULL: none */
    struct kreach *reach;
#endif
};

/* A thread that ends a communicator, or all. */
struct ending {
    pthread_t thread;
    void *(*body)(void *arg);
    void *arg;
    atomic_bool done;
    bool joined;
};

struct nccl_rank {
    int rank, world;
    struct comms_watch watch;
    struct peers *peers;
    ncclComm_t root; /* of all ranks; makes the others */
    bool tp_on_one_host; /* and each of its ranks has a device of its own */
    struct member members[GROUP_COUNT];
    volatile struct cuda_stamps *stamps; /* page-locked; by group, values are 1 + a number in `kinds` */
    struct comm_call kinds[NCCL_CALLS];
    atomic_int n_kinds;
    uint32_t told[GROUP_COUNT]; /* counts as last told; the watcher's */
    pthread_mutex_t calls; /* held in every call on a communicator once the ranks are connected */
    pthread_t watcher;
    bool watching;
    atomic_bool stop;    /* the watcher shall end */
    atomic_bool aborted; /* set once, after `why` and deadline_ns */
    struct error why;    /* of the abort */
    int64_t deadline_ns; /* of the end after it */
    struct ending endings[NCCL_COMMUNICATORS];
    int n_endings;
};

static inline void nccl_pause_us(long us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

/* ---- nccl_connect.c ---- */
/* The error of a rank that is gone. */
int nccl_say_lost(int rank, struct error *err);
/* What a status that is not success means: another rank's end if there is news of one within wait_ms, else NCCL's own
 * words. */
int nccl_explain(struct nccl_rank *r, ncclResult_t status, int wait_ms, struct error *err);
/* Peers, the root and the groups' communicators; after an error some may be there. */
MUST_USE int nccl_connect(struct nccl_rank *r, const struct comm_layout *layout, const char *bind_address,
                          const struct rendezvous *rv, int timeout_ms, struct error *err);

/* ---- nccl_watch.c ---- */
MUST_USE int nccl_watch_start(struct nccl_rank *r, struct error *err);
/* Gives up all calls at once; returns at once. Any thread that makes no call. */
void nccl_abort_start(struct nccl_rank *r, const struct error *why);
/* Ends the communicators and frees `r`, in order or after an abort. */
void nccl_leave(struct nccl_rank *r);

#endif
