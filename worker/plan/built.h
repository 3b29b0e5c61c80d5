/* What this version acts on, field by field. A test walks the JobSpec descriptor and
 * holds that every field stands here exactly once, so that no option is ever read and
 * then ignored. When something gets built, its row changes and nothing else here. */
#ifndef BOOST_WORKER_PLAN_BUILT_H
#define BOOST_WORKER_PLAN_BUILT_H

#include <stddef.h>
#include <stdint.h>

enum built_kind {
    BUILT_ANY,    /* every valid value works                                  */
    BUILT_ONLY,   /* this number (or enum value, or 0/1 of a bool) only       */
    BUILT_VALUES, /* enum values whose bit is set in `value`                  */
    BUILT_EMPTY,  /* an empty string or list                                  */
    BUILT_ABSENT, /* not to be given                                          */
};
struct built_rule {
    const char *path; /* "parallel.pp" */
    enum built_kind kind;
    int64_t value;
    const char *what; /* the thing that is missing, for the message */
};
extern const struct built_rule built_rules[];
extern const size_t built_rule_count;

#endif
