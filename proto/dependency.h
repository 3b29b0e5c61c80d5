/* Dependencies between jobs, as `after` lists them: KIND:JOB with
 *
 *   after       the job has started, or has ended without
 *   afterany    it has ended, however
 *   afterok     it has COMPLETED
 *   afternotok  it has ended otherwise: FAILED, TIMEOUT, CANCELLED
 */
#ifndef BOOST_PROTO_DEPENDENCY_H
#define BOOST_PROTO_DEPENDENCY_H

#include <stdbool.h>
#include <stdint.h>

enum dependency_kind { AFTER, AFTER_ANY, AFTER_OK, AFTER_NOT_OK };

/* False: it is none. */
bool dependency_parse(const char *text, enum dependency_kind *kind, int64_t *job);

#endif
