/* One rank from its orders to its DONE record: plan, pages, collectives, training, exit
 * code. The same for a process started by a keeper and for a thread of a standalone run. */
#ifndef BOOST_WORKER_RANK_H
#define BOOST_WORKER_RANK_H

#include <stdio.h>

#include "proto/base/error.h"
#include "proto/worker.pb-c.h"
#include "worker/comm/comm.h"

struct rank_orders {
    const Boost__AttemptStart *start; /* complete: run_dir, checkpoint_dir, threads_per_rank, ... */
    int rank;
    struct local_world *local; /* collectives between threads; NULL: Gloo or NCCL between processes */
    FILE *log;
    /* Ends the process at once with an exit code. On a device a rank may wait for a lost one in a call that never
     * returns; then this is called, from another thread, once the DONE record is written. */
    void (*end_process)(int exit_code);
};

/* Runs the rank to its end and writes the DONE record whatever happens. Returns the exit code of
 * the contract (proto/rankfiles.h); *err says why when it is not 0. */
int rank_run(const struct rank_orders *orders, struct error *err);
/* RANK_EXIT_* of an error. */
int rank_exit_code(const struct error *err);

#endif
