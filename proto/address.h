/* Where a controller listens on the network, as text: "host:port", "1.2.3.4:port", "[::1]:port"; the port may be left
 * out. Only text: nothing is looked up here. */
#ifndef BOOST_PROTO_ADDRESS_H
#define BOOST_PROTO_ADDRESS_H

#include <netdb.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "proto/base/error.h"

#define ADDRESS_DEFAULT_PORT "7443"
enum { ADDRESS_HOST_MAX = 254, ADDRESS_TEXT_MAX = ADDRESS_HOST_MAX + 16 };

struct address {
    char host[ADDRESS_HOST_MAX]; /* a name or a number, without brackets */
    char port[8];
    char text[ADDRESS_TEXT_MAX]; /* for messages: with brackets where the host has colons, and always with the port */
};

/* ERR_INVALID names `what` (the option or field that it came from). Port 0 only where `listen`. */
MUST_USE int address_parse(const char *text, bool listen, const char *what, struct address *out, struct error *err);
/* The text of a numeric socket address; "?" when it is none of IPv4 or IPv6. */
void address_of(const struct sockaddr *from, char out[ADDRESS_TEXT_MAX]);
/* getaddrinfo()'s trouble with a name, as this product says it. */
int address_lookup_error(const struct address *a, int gai, struct error *err);

#endif
