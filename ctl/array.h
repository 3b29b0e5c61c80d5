/* submit --array: which tasks, and what --set says to each of them. Pure. */
#ifndef BOOST_CTL_ARRAY_H
#define BOOST_CTL_ARRAY_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

enum { ARRAY_TASKS = 1000, ARRAY_INDEX = 999999 };

struct array {
    int n; /* 0: no array */
    int32_t index[ARRAY_TASKS];
    int32_t limit; /* so many at once; 0: all */
};

/* "0-9", "1,3,5-7", "0-100:10" (every tenth), each with "%4" behind it for at most 4 at once; numbers ascend. */
MUST_USE int array_parse(const char *text, struct array *out, struct error *err);
/* What the k-th task has for an assignment of --set: "{i}" becomes its index, "{a|b|c}" the k-th of these, which have
 * to be as many as there are tasks. Braces without either stay as they are. *out is the caller's to free. */
MUST_USE int array_substitute(const struct array *a, int k, const char *assignment, char **out, struct error *err);

#endif
