/* Starting one rank: environment, credentials, descriptors, its own process group. */
#ifndef BOOST_DAEMON_KEEPER_RANK_H
#define BOOST_DAEMON_KEEPER_RANK_H

#include <sys/types.h>

#include "daemon/cgroup.h"
#include "proto/base/error.h"
#include "proto/worker.pb-c.h"

struct rank_launch {
    const Boost__AttemptStart *start;
    int local_rank; /* index into start->ranks */
    const struct cgroup *cgroup;
};
struct rank_process {
    pid_t pid;     /* leader of its process group */
    int output_fd; /* read end of its stdout and stderr, non-blocking */
};

/* Runs `<worker_path> --run-dir <run_dir> --rank <rank>` as the job's user with stdin from /dev/null and no descriptor
 * but 0, 1, 2; the working directory is the spec's workdir, else the run directory. The environment is the
 * caller's (with GOMP_SPINCOUNT, if it has none), then BOOST_* and OMP_NUM_THREADS, then the spec's.
 * On failure nothing runs, and err->code is ERR_INVALID when the job is at fault (its workdir), else another. */
MUST_USE int keeper_rank_start(const struct rank_launch *launch, struct rank_process *out, struct error *err);

#endif
