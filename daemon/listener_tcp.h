/* The listening TCP sockets of boostd. Looking names up blocks: boot only. */
#ifndef BOOST_DAEMON_LISTENER_TCP_H
#define BOOST_DAEMON_LISTENER_TCP_H

#include <uv.h>

#include "proto/address.h"
#include "proto/base/error.h"

struct tcp_listener {
    uv_tcp_t tcp;
    char text[ADDRESS_TEXT_MAX]; /* with the port that it got, where the configuration says 0 */
};
struct tcp_listeners {
    struct tcp_listener **list;
    size_t n;
};

/* Listens on every address that each of `addresses` (host:port; host "*": all of this machine's) has. `on_connection`
 * gets the stream with `data` as its data. After a failure too tcp_listeners_close() has to be called.
 * ERR_INVALID: no address; ERR_BUSY: taken by another program. */
MUST_USE int tcp_listeners_open(uv_loop_t *loop, char *const *addresses, size_t n, uv_connection_cb on_connection,
                                void *data, struct tcp_listeners *out, struct error *err);
/* The memory goes with tcp_listeners_free(), once the loop has run the close callbacks. */
void tcp_listeners_close(struct tcp_listeners *l);
void tcp_listeners_free(struct tcp_listeners *l);

#endif
