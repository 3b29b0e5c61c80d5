/* Which ranks the others wait for, from the collectives that each has come to. Pure. */
#ifndef BOOST_CTL_BEHIND_H
#define BOOST_CTL_BEHIND_H

#include <stddef.h>

#include "proto/rpc.pb-c.h"

struct behind {
    const Boost__RankStacks *rank; /* that the others wait for */
    const char *group;
    unsigned long long calls;              /* of the group, begun by the rank */
    const Boost__CollectiveInfo *waits_in; /* the call that the others wait in */
    const Boost__RankStacks **waiting;     /* by rank */
    size_t n_waiting;
};

/* ranks: by rank, of one attempt of this layout. A rank is behind when, in a group none of whose members gets further,
 * others wait in a call that it has not begun, and it waits in no call itself: who does, is held up by somebody else.
 * Returns how many, in *out (behind_free); (size_t)-1 when memory is out. */
size_t behind_find(const Boost__RankStacks *const *ranks, size_t n, const Boost__StacksReply *layout,
                   struct behind **out);
void behind_free(struct behind *list, size_t n);

#endif
