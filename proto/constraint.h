/* Constraints on node labels, as resources.constraint writes them:
 *
 *   any   = all { "|" all }            either
 *   all   = one { "&" one }            both; binds closer than |
 *   one   = "!" one | "(" any ")" | label
 *   label = key [ "=" value ]          of [A-Za-z0-9._-]
 *
 * "gpu" holds on a node that has a label of that key, whatever its value; "gpu=h200" on one whose value is h200.
 * "gpu=h200&!rack=r3|fast": h200 and not in rack r3, or labelled fast. Blanks between the parts are passed over.
 * Compiled once and asked of many nodes. Pure. */
#ifndef BOOST_PROTO_CONSTRAINT_H
#define BOOST_PROTO_CONSTRAINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

enum { CONSTRAINT_MAX = 1024 /* bytes */, CONSTRAINT_STEPS = 256, CONSTRAINT_DEPTH = 32 };

/* Postfix: operands are pushed, operators take theirs from the top. Points into the text it was made of. */
struct constraint {
    int n;
    struct constraint_step {
        char op; /* 'k' key, '=' key and value, '!', '&', '|' */
        const char *key, *value;
        uint16_t key_len, value_len;
    } steps[CONSTRAINT_STEPS];
};

/* text outlives *out. ERR_INVALID says what is wrong at which character. "" holds everywhere. */
MUST_USE int constraint_compile(const char *text, struct constraint *out, struct error *err);

/* Calls value_of(arg, key, len) for the value of a label, NULL when there is none of that key. */
bool constraint_holds(const struct constraint *c, const char *(*value_of)(const void *arg, const char *key, size_t len),
                      const void *arg);

#endif
