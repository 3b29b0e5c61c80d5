/* streams.h */
#include "proto/base/streams.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int streams_hold(struct error *err)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0)
            continue;
        if (open("/dev/null", O_RDWR) < 0) /* the lowest free number: fd */
            return error_errno(err, errno, "standard stream %d is closed, and /dev/null cannot take its place", fd);
    }
    return ERR_OK;
}
