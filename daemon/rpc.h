/* Requests of users (rpc.proto) on the sessions whose component is CTL: unpacking,
 * answering from the core and the store, and the long polls that wait for a change.
 *
 * Nothing is answered from inside core_ops.changed: it only marks, and rpc_settle(),
 * called once an iteration of the loop, answers what has become due. */
#ifndef BOOST_DAEMON_RPC_H
#define BOOST_DAEMON_RPC_H

#include <stdint.h>

#include "daemon/core.h"
#include "daemon/session.h"
#include "daemon/users.h"
#include "store/store.h"

enum {
    RPC_MAX_WAIT_MS = 60000,  /* a longer wait_ms counts as this                        */
    RPC_MAX_PARKED = 20000,   /* long polls at once; more are answered without waiting  */
    RPC_PAGE_BYTES = 1 << 20, /* a reply is cut into pages of about this                */
    RPC_MAX_REFS = 10000,     /* jobs named in one request                              */
};

struct rpc;
/* The core is given later, before the first request: it calls rpc_changed() while it is created.
 * ERR_NOMEM. */
MUST_USE int rpc_create(struct store *store, struct users *users, struct rpc **out, struct error *err);
void rpc_set_core(struct rpc *rpc, struct core *core);
/* After the core and the store are gone: drops what never got its answer. */
void rpc_destroy(struct rpc *rpc);

/* session_handler's, for a CTL session. */
MUST_USE int rpc_opened(const struct session *s, struct error *err);
MUST_USE int rpc_frame(struct rpc *rpc, struct session *s, const uint8_t *payload, size_t len, struct error *err);
void rpc_drained(struct rpc *rpc, struct session *s);
void rpc_closed(struct rpc *rpc, struct session *s);

/* core_ops.changed. */
void rpc_changed(struct rpc *rpc, int64_t job);
/* Answers what is due. Returns the monotonic ns of the next end of a wait, INT64_MAX when none. */
int64_t rpc_settle(struct rpc *rpc, int64_t now_ns);

#endif
