/* Where a rank's threads are, written into its run directory when its control page asks (rank-<r>.stacks). */
#ifndef BOOST_WORKER_STACKS_H
#define BOOST_WORKER_STACKS_H

#include "proto/base/error.h"
#include "worker/report.h"

/* From now on stacks_answer() answers for this rank, until NULL; `report` is the caller's. A process has one rank. */
void stacks_serve(const struct report *report);
/* SIGURG came: answers if the control page asks. The thread that waits for signals. */
void stacks_answer(void);
/* The file of one request, by rename. One caller at a time, no thread whose stack is wanted. */
MUST_USE int stacks_write(const Boost__AttemptStart *start, int rank, uint32_t request, struct error *err);

#endif
