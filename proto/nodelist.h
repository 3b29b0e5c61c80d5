/* Lists of node names as resources.nodelist and resources.exclude write them:
 *
 *   list  = name { "," name }
 *   name  = part { part }
 *   part  = characters of [A-Za-z0-9._-] | "[" range { "," range } "]"
 *   range = number [ "-" number ]
 *
 * "gpu[01-04,07],login" names gpu01 ... gpu04, gpu07 and login. A range's numbers are as wide as it writes them:
 * [01-12] has 01 and not 1; [1-12] has 1 and not 01. A bracket can stand anywhere in a name, at most 4 of them.
 * Nothing is expanded: a range of a billion costs nothing. Pure. */
#ifndef BOOST_PROTO_NODELIST_H
#define BOOST_PROTO_NODELIST_H

#include <stdbool.h>

#include "proto/base/error.h"

enum { NODELIST_MAX = 4096 /* bytes */ };

/* ERR_INVALID says what is wrong at which character. "" is in order and names nobody. */
MUST_USE int nodelist_check(const char *list, struct error *err);
/* Whether a list that was checked names the node. */
bool nodelist_has(const char *list, const char *node);

#endif
