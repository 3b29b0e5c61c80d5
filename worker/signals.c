/* signals.h */
#include "worker/signals.h"

#include <pthread.h>
#include <signal.h>

#include "worker/report.h"

static void *wait_for_term(void *arg)
{
    (void)arg;
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    for (int got;;)
        if (sigwait(&term, &got) == 0)
            report_terminate();
    return NULL;
}

int signals_start(struct error *err)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGPIPE, &ignore, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_t thread;
    int errnum = pthread_sigmask(SIG_BLOCK, &term, NULL);
    if (!errnum)
        errnum = pthread_create(&thread, NULL, wait_for_term, NULL);
    if (errnum)
        return error_errno(err, errnum, "cannot watch for signals");
    pthread_detach(thread);
    return ERR_OK;
}
