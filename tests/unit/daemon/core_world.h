/* What the core's tests begin with. */
#ifndef BOOST_TESTS_CORE_WORLD_H
#define BOOST_TESTS_CORE_WORLD_H

#include "tests/world/world.h"

#define HELPER static __attribute__((unused))

#endif
