/* Job files for tests. */
#ifndef BOOST_TESTS_SPEC_H
#define BOOST_TESTS_SPEC_H

#include "proto/base/arena.h"
#include "proto/job.pb-c.h"

/* A tiny CoLA model on two CPU slots, 100 steps, a checkpoint in /ckpt every 20: valid as it is. In `mem`. */
Boost__JobSpec *spec_new(struct arena *mem);

#endif
