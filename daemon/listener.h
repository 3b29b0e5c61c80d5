/* The listening Unix socket of boostd. Blocking calls, all short; boot only. */
#ifndef BOOST_DAEMON_LISTENER_H
#define BOOST_DAEMON_LISTENER_H

#include "proto/base/error.h"
#include "proto/socket_path.h"

struct listener {
    char path[SOCKET_PATH_MAX];
    int fd;   /* listening, non-blocking; -1 = closed or given away */
    int file; /* the socket file (O_PATH), to know it again: while this is open its number is not used again */
};
/* As server_create() says of its socket. The caller holds the lock of the state directory. */
MUST_USE int listener_open(struct listener *l, const char *path, struct error *err);
/* Closes fd and removes the socket file, if it is still the one made here. */
void listener_close(struct listener *l);

#endif
