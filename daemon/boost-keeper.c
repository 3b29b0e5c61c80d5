/* boost-keeper: parent of the ranks of one attempt on one node. */
#include "daemon/keeper_main.h"

int main(int argc, char **argv)
{
    return keeper_main(argc, argv);
}
