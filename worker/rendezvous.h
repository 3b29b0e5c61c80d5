/* The rank's side of the rendezvous: keys and values of an attempt, exchanged through
 * the node's agent and the controller while STARTING. Blocking, one thread. An agent
 * that restarts meanwhile is waited for: requests are idempotent and are sent again. */
#ifndef BOOST_WORKER_RENDEZVOUS_H
#define BOOST_WORKER_RENDEZVOUS_H

#include <stdint.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "worker/comm/comm.h"

struct rendezvous_client {
    const char *socket_path; /* the caller's */
    int64_t job;
    int32_t attempt;
    int32_t rank;
    int timeout_ms; /* of a set, and how long past its own deadline a get waits for the agent */
    /* private */
    int fd;
    uint64_t next_id;
    struct buffer in, out;
};

/* Does not connect yet. ERR_INVALID: the path is longer than a socket address holds. */
MUST_USE int rendezvous_open(struct rendezvous_client *c, const char *socket_path, int64_t job, int32_t attempt,
                             int32_t rank, int timeout_ms, struct error *err);
void rendezvous_close(struct rendezvous_client *c);

/* Publishes a value of at most LIMIT_KV_VALUE bytes. */
MUST_USE int rendezvous_set(struct rendezvous_client *c, const char *group, const char *key, const void *value,
                            size_t len, struct error *err);
/* Waits for the key and appends its value to `value`. ERR_TIMEOUT names group and key. */
MUST_USE int rendezvous_get(struct rendezvous_client *c, const char *group, const char *key, int timeout_ms,
                            struct buffer *value, struct error *err);

/* What the collectives take (worker/comm/comm.h); lives as long as the client. */
struct rendezvous rendezvous_table(struct rendezvous_client *c);

#endif
