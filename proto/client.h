/* A blocking connection to boostd, by its Unix socket or by TCP with TLS: hello, then requests and replies matched by
 * id. For boostctl and tests. One thread. */
#ifndef BOOST_PROTO_CLIENT_H
#define BOOST_PROTO_CLIENT_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/address.h"
#include "proto/base/arena.h"
#include "proto/base/buffer.h"
#include "proto/base/error.h"
#include "proto/rpc.pb-c.h"
#include "proto/socket_path.h"
#include "proto/tls.h"

struct client {
    int fd; /* -1 when closed */
    struct tls *tls;             /* NULL: a Unix socket */
    char path[ADDRESS_TEXT_MAX]; /* or address, for messages */
    bool remote;      /* by TCP                  */
    struct buffer in; /* received, not yet taken */
    struct buffer wire;
    uint64_t last_id;
    int protocol;          /* agreed version                   */
    char peer_version[32]; /* boostd's, from its hello         */
    char peer_build[32];
    /* NULL, or a flag of the caller's signal handler: a wait that a signal interrupts while the flag is
     * set ends with ERR_CANCELLED. */
    const volatile sig_atomic_t *interrupted;
};
#define CLIENT_INIT \
    {               \
        .fd = -1    \
    } /* what every struct client starts as */

/* Connects and exchanges hellos within timeout_ms. `node`: the agent's name, NULL for others.
 * ERR_UNREACHABLE (nobody listens, no answer, connection lost; names the path and the mend), ERR_REFUSED or
 * what the server's hello says, ERR_PROTOCOL. On failure *c is closed. */
MUST_USE int client_open(struct client *c, const char *path, Boost__Component__Value component, const char *node,
                         int timeout_ms, struct error *err);
/* The same by TCP. ERR_REFUSED also when a certificate, of either side, is not good enough. */
MUST_USE int client_open_tls(struct client *c, const struct address *address, const struct tls_files *files,
                             Boost__Component__Value component, const char *node, int timeout_ms, struct error *err);
void client_close(struct client *c); /* also of a closed one */

/* Gives the request the next id and sends it. */
MUST_USE int client_send(struct client *c, Boost__Request *request, int timeout_ms, struct error *err);
/* The next reply with this id into the arena (replies of other ids are dropped); `more` says whether
 * another one follows. A Failure reply becomes *err with the server's code, message and hint.
 * timeout_ms < 0 waits for ever; ERR_UNREACHABLE when it is over or the connection is gone. */
MUST_USE int client_receive(struct client *c, uint64_t id, int timeout_ms, struct arena *a, Boost__Reply **out,
                            struct error *err);
/* Both, for requests with a single reply. A long poll needs a timeout above its wait_ms. */
MUST_USE int client_call(struct client *c, Boost__Request *request, int timeout_ms, struct arena *a, Boost__Reply **out,
                         struct error *err);

/* *err from a Failure of the wire; an unknown code becomes ERR_INTERNAL. Returns the code. */
int client_failure(const Boost__Failure *failure, struct error *err);

#endif
