/* boost-agent: runs the ranks of one node for boostd. */
#include <stdio.h>
#include <unistd.h>

#include "daemon/agent_main.h"
#include "proto/base/streams.h"

int main(int argc, char **argv)
{
    struct error err;
    if (streams_hold(&err)) {
        fprintf(stderr, "boost-agent: %s\n", err.message);
        return 1;
    }
    int status = agent_main(argc, argv);
    fflush(stdout);
    /* Not exit(): libuv would wait there for threads that may hang on a dead file system. */
    _exit(status);
}
