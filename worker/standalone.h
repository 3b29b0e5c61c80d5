/* A whole job in one process: every rank is a thread, collectives are LOCAL, the files are
 * those of a real attempt. For tests, benchmarks and looking at things without daemons. */
#ifndef BOOST_WORKER_STANDALONE_H
#define BOOST_WORKER_STANDALONE_H

#include <stddef.h>

#include "proto/base/error.h"

struct standalone {
    const char *job_file;
    const char *run_dir;    /* made if it is not there */
    const char *resume;     /* checkpoint directory or NULL */
    const char *const *set; /* "a.b=v" overrides */
    size_t n_set;
};

/* Checkpoints go to <checkpoint.dir>/step-<n>.a<k>, k one above the resumed attempt's. Returns the
 * exit code of the first rank that failed on its own, *err is its error. */
int standalone_run(const struct standalone *s, struct error *err);

#endif
