/* Signals of a worker process. No handler may run on the stack of a thread that computes: with oneDNN 2.6 a signal
 * frame pushed during dnnl_sgemm damages the heap (a handler on the normal stack at 2 kHz: "corrupted size" within a
 * second; on an alternate stack, never). So SIGTERM and SIGURG are blocked everywhere and waited for by a thread of
 * its own; the one handler there is, which tells where a thread is, runs on alternate stacks (worker/threads.h). */
#ifndef BOOST_WORKER_SIGNALS_H
#define BOOST_WORKER_SIGNALS_H

#include "proto/base/error.h"

/* Before any other thread is made: they inherit the mask. SIGTERM then asks every rank of the process to stop
 * (report_terminate), SIGURG a rank to look at what its control page asks (stacks_answer); SIGPIPE and SIGXFSZ become
 * errors of the calls that cause them. */
MUST_USE int signals_start(struct error *err);

#endif
