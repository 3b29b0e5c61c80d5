/* Which controllers this agent has obeyed: of each store the greatest epoch, on disk before it is acted on, so that a
 * controller that was replaced by an adopted copy of its store is never obeyed again. */
#ifndef BOOST_DAEMON_AGENT_OBEYS_H
#define BOOST_DAEMON_AGENT_OBEYS_H

#include <limits.h>
#include <stdint.h>

#include "proto/base/error.h"

enum { OBEYS_STORES = 16 };

struct obeys {
    char path[PATH_MAX]; /* "": not on disk */
    struct {
        char store[17];
        uint64_t epoch;
    } list[OBEYS_STORES]; /* the newest last */
    int n;
};

/* A file that is damaged is set aside under another name, and *err says so (ERR_CORRUPT): what could be read counts. */
MUST_USE int obeys_load(struct obeys *o, const char *path, struct error *err);
/* 0: not known. */
uint64_t obeys_epoch(const struct obeys *o, const char *store);
/* Durable when it returns 0; in memory in any case. A lower epoch than is known changes nothing. */
MUST_USE int obeys_set(struct obeys *o, const char *store, uint64_t epoch, struct error *err);

#endif
