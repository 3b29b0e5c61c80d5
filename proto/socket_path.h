/* Where boostd's Unix socket is: one rule for boostd, boost-agent and boostctl. */
#ifndef BOOST_PROTO_SOCKET_PATH_H
#define BOOST_PROTO_SOCKET_PATH_H

#include "proto/base/error.h"

enum { SOCKET_PATH_MAX = 108 }; /* sun_path of sockaddr_un, with its NUL */

enum socket_side { SOCKET_CONNECT, SOCKET_LISTEN };

/* The first of these that is set: `option` (--socket), `configured` (the configuration's field, by file or --set),
 * $BOOST_SOCKET, then the default. NULL and "" are not set.
 * The default is $XDG_RUNTIME_DIR/boost/boostd.sock or, without that variable, /run/boost/boostd.sock.
 * To listen: root always takes /run/boost. To connect: of the two the first that exists, so that a user
 * with a login session reaches the system's boostd. ERR_INVALID: longer than 107 bytes. */
MUST_USE int socket_path_find(enum socket_side side, const char *option, const char *configured,
                              char out[SOCKET_PATH_MAX], struct error *err);

#endif
