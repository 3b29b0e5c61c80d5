/* out.h */
#include "ctl/out.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/ctl.h"

static bool was_ignored;
static int why; /* errno of the first write that failed, -1 where nothing told it */

void out_begin(void)
{
    was_ignored = signal(SIGPIPE, SIG_IGN) == SIG_IGN;
}

static bool is_pipe(void)
{
    struct stat st;
    return fstat(STDOUT_FILENO, &st) == 0 && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode));
}

bool out_try(void)
{
    errno = 0;
    if (!why && fflush(stdout) != 0)
        why = errno ? errno : -1;
    if (!why && ferror(stdout))
        why = is_pipe() ? EPIPE : -1;
    return !why;
}

void out_flush(void)
{
    if (out_try() || why != EPIPE || was_ignored)
        return;
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
}

int out_end(int code)
{
    out_flush();
    if (!why)
        return code;
    fprintf(stderr, "boostctl: the output could not be written: %s\n",
            why > 0 ? strerror(why) : "an error of the file");
    return code ? code : EXIT_REFUSED;
}
