/* agent_attempts.h: the site's script behind the last process of an attempt. The end is told while it runs, so that
 * the job goes on; its devices are free when it is told again. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/agent_node.h"
#include "daemon/log.h"
#include "proto/base/clock.h"
#include "proto/base/fs.h"

struct epilog {
    uv_work_t work;
    struct agent_attempt *a;
    int rc;
    struct error err;
};

/* In a run directory, so that an agent after us does not run it again. */
static bool marker_path(const struct agent_attempt *a, char path[PATH_MAX])
{
    return !fs_join(path, PATH_MAX, NULL, a->run_dir, "epilog.end");
}

static bool has_run(const struct agent_attempt *a)
{
    char path[PATH_MAX];
    struct stat st;
    return marker_path(a, path) && lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid();
}

static void run(uv_work_t *work)
{
    struct epilog *e = work->data;
    const struct agent_attempt *a = e->a;
    const Boost__AgentConfig *c = a->agent->config;
    char path[PATH_MAX];
    struct stat st;
    e->rc = site_script("epilog", c->epilog, c->epilog_timeout_ms, -1, a->agent->node, a->start, &e->err);
    /* Not in a directory that is gone: there is nothing to come back to. A mark that cannot be made costs no more than
     * a second run. */
    struct error err;
    if (lstat(a->run_dir, &st) == 0 && marker_path(a, path) && fs_write_durable(path, "over\n", 5, 0644, &err))
        log_error(LOG_WARN, &err, "an epilog may run again");
}

static void over(uv_work_t *work, int status)
{
    struct epilog *e = work->data;
    struct agent_attempt *a = e->a;
    struct agent *agent = a->agent;
    a->epilog_runs = false;
    a->epilog_over = true;
    if (status == UV_ECANCELED || agent->closing) {
        free(e);
        return;
    }
    if (e->rc)
        health_failed(agent, "epilog", e->err.message);
    a->end_sent = a->end_acked = false;
    if (!attempt_is_ours(a))
        link_up_again(agent->link, "the epilog of another controller's attempt has ended, which frees its devices");
    attempt_poll(a);
    free(e);
}

void attempt_epilog(struct agent_attempt *a)
{
    if (!*a->agent->config->epilog || a->epilog_runs || has_run(a))
        return;
    struct epilog *e = calloc(1, sizeof *e);
    if (!e) {
        health_failed(a->agent, "epilog", "no memory to run it");
        return;
    }
    e->a = a;
    e->work.data = e;
    a->epilog_runs = uv_queue_work(a->agent->loop, &e->work, run, over) == 0;
    if (!a->epilog_runs)
        free(e);
}
