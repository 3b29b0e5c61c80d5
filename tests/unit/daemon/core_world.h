/* What the core's tests begin with. */
#ifndef BOOST_TESTS_CORE_WORLD_H
#define BOOST_TESTS_CORE_WORLD_H

#include "tests/world/world.h"

#define HELPER static __attribute__((unused))

HELPER struct checkpoint *ckpt(struct world *w, int64_t id, int64_t step, int attempt)
{
    struct checkpoint *k = job_checkpoint(job_of(w, id), step, attempt);
    assert_non_null(k);
    return k;
}

#endif
