/* Who is gone: one quiet TCP connection between every two ranks, whatever carries the
 * collectives. A transport's own error names an address at best, and a rank that fails
 * because another one died closes its connections too. So a rank that leaves after a
 * loss first tells the others which rank it was, and blame falls on those that left
 * without a word. Nothing is sent while all is well; a host that no longer answers is
 * found by TCP's own probes within two minutes. */
#ifndef BOOST_WORKER_COMM_PEERS_H
#define BOOST_WORKER_COMM_PEERS_H

#include "proto/base/error.h"
#include "worker/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

struct peers;

/* Connects to all other ranks; collective. ERR_TIMEOUT names a rank that did not come. */
MUST_USE int peers_connect(int rank, int world, const char *bind_address, const struct rendezvous *rv, int timeout_ms,
                           struct peers **out, struct error *err);
void peers_close(struct peers *p);

/* The rank whose end came first as far as is known here, waiting at most wait_ms for the news; -1 when
 * all are there or left in order. The others are told. Blocking; any thread, calls wait for each other. */
int peers_blame(struct peers *p, int wait_ms);
/* Tells the others that this rank needs nobody any more and that its end is no loss. */
void peers_leave(struct peers *p);

#ifdef __cplusplus
}
#endif

#endif
