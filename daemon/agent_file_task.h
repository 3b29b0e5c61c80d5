/* What a task that works on files does, in its thread and as the job's user: preflight, manifest, verify, delete,
 * copies, downloads, checkpoint tools. */
#ifndef BOOST_DAEMON_AGENT_FILE_TASK_H
#define BOOST_DAEMON_AGENT_FILE_TASK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "daemon/agent_tool.h"
#include "daemon/remote/http.h"
#include "proto/agent.pb-c.h"
#include "proto/base/arena.h"
#include "proto/base/error.h"

struct agent;

struct file_task {
    struct agent *agent;       /* of it only what stays as it is */
    const Boost__Task *order;  /* the caller's */
    bool gpus;                 /* the node has some */
    /* Between the thread and the loop. */
    atomic_bool stop; /* what is moved is left off */
    struct http_progress progress;
    /* The thread's until it is done; then results, in `mem`. */
    int64_t moved;          /* bytes to or from an object store, or from a URL */
    Boost__TaskReply found; /* its `found` only */
    struct tool_output tool;
    struct arena mem;
};
/* What order and agent point at lives until file_task_free(). */
void file_task_init(struct file_task *t, struct agent *agent, const Boost__Task *order, bool gpus);
void file_task_free(struct file_task *t);
/* Blocks. ERR_UNSUPPORTED: the order is none of these. */
MUST_USE int file_task_run(struct file_task *t, struct error *err);

#endif
