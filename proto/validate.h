/* What can be said about a JobSpec without a layout: presence, ranges, enum
 * numbers, names, list lengths, and rules between fields. The table in validate.c
 * and the comments of job.proto say the same. Client and server run it; the
 * layout (divisibility, memory, what applies to a strategy) is worker/plan's.
 *
 * A spec whose defaults were made explicit by reflect_fill_defaults() is as valid
 * as before, so the rules between fields look at values that differ from the
 * default, not at presence. */
#ifndef BOOST_PROTO_VALIDATE_H
#define BOOST_PROTO_VALIDATE_H

#include <stdbool.h>

#include "proto/base/error.h"
#include "proto/job.pb-c.h"

/* ERR_OK, or ERR_INVALID with every fault in the message, separated by "; "
 * ("model.rank = -4 is out of range (1 to 1048576); run.steps is required"), as many
 * as fit, then "and N more"; the hint is the mend of the first. Pure, any thread. */
MUST_USE int validate_job_spec(const Boost__JobSpec *spec, struct error *err);
/* 1 to 64 bytes of [A-Za-z0-9._-], for job and node names. */
bool validate_name(const char *name);
/* Whether a rank's variable of this name is set by its node, whatever a job says. */
bool validate_env_is_ours(const char *key);

#endif
