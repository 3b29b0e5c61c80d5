/* boostd's loop: the listening sockets, the sessions, the core and the store, and what
 * wakes them. One thread; the loop never waits for a disk or a peer.
 *
 * Each iteration ends, before it sleeps, with core_run() and rpc_settle(). */
#ifndef BOOST_DAEMON_SERVER_H
#define BOOST_DAEMON_SERVER_H

#include <stdbool.h>
#include <uv.h>

#include "proto/base/error.h"
#include "proto/config.pb-c.h"
#include "store/store.h"

struct server;

/* Creates the core on the store and listens on `socket_path`: a missing directory is made (0755 as root, else
 * 0700), a socket that nobody listens on any more is replaced. The socket is open to all users; peer credentials
 * decide what each may do.
 * adopted: see core_adopted(). Then on the configuration's TCP addresses, with its certificates (read again on SIGHUP).
 * ERR_BUSY: another daemon listens there. ERR_INVALID: something else has that name. config and store stay the caller's
 * and outlive the server. */
MUST_USE int server_create(uv_loop_t *loop, const Boost__BoostdConfig *config, struct store *store,
                           const char *socket_path, bool adopted, struct server **out, struct error *err);
/* The i-th TCP address that it listens on, with its port; NULL behind the last. */
const char *server_address(const struct server *server, size_t i);
/* Runs the loop until SIGTERM or SIGINT. */
void server_run(struct server *server);
/* Closes the socket and every session, and runs the loop until they are gone. After it no input reaches the
 * core; the store may be closed. False when a look-up of a user's name does not come back (a directory service that
 * hangs): its thread still uses the server and the loop, which must then be left to _exit(). */
MUST_USE bool server_stop(struct server *server);
/* After store_close(): the core and the memory. */
void server_destroy(struct server *server);

#endif
