/* boost-keeper: parent of the ranks of one attempt on one node. */
#include <stdio.h>

#include "daemon/keeper_main.h"
#include "proto/base/streams.h"

int main(int argc, char **argv)
{
    struct error err;
    if (streams_hold(&err)) {
        fprintf(stderr, "boost-keeper: %s\n", err.message);
        return 1;
    }
    return keeper_main(argc, argv);
}
