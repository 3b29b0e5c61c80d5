/* The rendezvous exchange: keys of an attempt's groups, set by one rank and waited
 * for by others. Keyed (job, attempt, group, key), so that an old attempt can never
 * meet a new one. In memory only: a rendezvous that a controller restart cuts off
 * is repeated by the ranks or ends with its attempt's deadline.
 *
 * Pure: the caller gives the time (monotonic ns) and gets answers through one
 * function. One thread. */
#ifndef BOOST_DAEMON_KV_H
#define BOOST_DAEMON_KV_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/error.h"

/* Who asked; given back with the answer. */
struct kv_asker {
    char node[65];
    uint64_t id;
    int64_t job;
    int attempt, rank;
};
/* error NULL: ok. Never called from inside kv_set or kv_get for the asker of that very call. */
typedef void (*kv_answer_fn)(void *arg, const struct kv_asker *asker, const void *value, size_t len, const char *error);

enum {
    KV_MAX_NAME = 256,              /* bytes of a group or key   */
    KV_MAX_ATTEMPT_BYTES = 64 << 20 /* keys, values and waiters of one attempt */
};

struct kv;
struct kv *kv_create(kv_answer_fn answer, void *arg); /* NULL: out of memory */
void kv_free(struct kv *kv);                          /* waiters get no answer */

/* Keeps a copy and answers who waits for it. The same value again is fine (a repeat after a lost answer),
 * another one is ERR_REFUSED: somebody may have read the first. */
MUST_USE int kv_set(struct kv *kv, const struct kv_asker *asker, const char *group, const char *key, const void *value,
                    size_t len, struct error *err);
/* ERR_OK with *value (the exchange's, until the next call), or ERR_BUSY: it will be answered by the deadline.
 * The same asker (node, id, job, attempt, rank) again replaces its earlier wait. */
MUST_USE int kv_get(struct kv *kv, const struct kv_asker *asker, const char *group, const char *key,
                    int64_t deadline_ns, const void **value, size_t *len, struct error *err);
/* Answers the waits whose deadline has come; returns the next one, INT64_MAX when nothing waits. */
int64_t kv_expire(struct kv *kv, int64_t now_ns);
/* The attempt is over: its waits are answered with `why`, its keys go. */
void kv_drop(struct kv *kv, int64_t job, int attempt, const char *why);

#endif
