/* signals.h */
#include "worker/signals.h"

#include <pthread.h>
#include <signal.h>

#include "worker/report.h"
#include "worker/stacks.h"
#include "worker/threads.h"

/* SIGURG does nothing to a process that does not expect it: one that is just being started. */
static void waited_for(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGURG);
}

static void *wait_for_signals(void *arg)
{
    (void)arg;
    sigset_t set;
    waited_for(&set);
    for (int got;;) {
        if (sigwait(&set, &got) != 0)
            continue;
        if (got == SIGTERM)
            report_terminate();
        else
            stacks_answer();
    }
    return NULL;
}

int signals_start(struct error *err)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGPIPE, &ignore, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
    sigset_t set;
    waited_for(&set);
    pthread_t thread;
    int rc = threads_start(err);
    if (rc)
        return rc;
    int errnum = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (!errnum)
        errnum = pthread_create(&thread, NULL, wait_for_signals, NULL);
    if (errnum)
        return error_errno(err, errnum, "cannot watch for signals");
    pthread_detach(thread);
    return ERR_OK;
}
