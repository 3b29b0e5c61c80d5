/* Signals of a worker process. No handler may run on a thread that computes: with oneDNN 2.6 a signal frame
 * pushed during dnnl_sgemm damages the heap (a handler on the normal stack at 2 kHz: "corrupted size"
 * within a second; on an alternate stack, never). So SIGTERM is blocked everywhere and waited for by
 * a thread of its own, and the worker installs no handler at all. */
#ifndef BOOST_WORKER_SIGNALS_H
#define BOOST_WORKER_SIGNALS_H

#include "proto/base/error.h"

/* Before any other thread is made: they inherit the mask. SIGTERM then asks every rank of the process to
 * stop (report_terminate); SIGPIPE and SIGXFSZ become errors of the calls that cause them. */
MUST_USE int signals_start(struct error *err);

#endif
