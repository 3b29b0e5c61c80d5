/* Shared by tls.c and tls_files.c. */
#ifndef BOOST_PROTO_TLS_INTERNAL_H
#define BOOST_PROTO_TLS_INTERNAL_H

#include <openssl/ssl.h>

#include "proto/tls.h"

struct tls_context {
    SSL_CTX *ssl;
    bool server;
};

/* Whom the certificate is for. ERR_REFUSED: several roles in one, or a name that cannot be one. */
MUST_USE int tls_identify(X509 *cert, struct tls_peer *out, struct error *err);

#endif
