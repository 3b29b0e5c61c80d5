/* TLS 1.3 with certificates on both sides, over memory: bytes from the wire go in, bytes for the wire come out.
 * Sockets, and waiting, belong to the caller; so does the deadline of a handshake. No session is resumed, nothing is
 * compressed, no older version is spoken.
 *
 * Who a certificate is for stands in one URI of its subjectAltName, and nowhere else:
 *   boost://controller/NAME   boostd; the hosts that clients may reach it by are DNS or IP entries beside it
 *   boost://node/NAME         the agent of node NAME, of no other
 *   boost://user/NAME         a user, by the name that the controller's machine knows
 *   boost://admin/NAME        likewise, who may do all
 * deploy/make-certs.sh makes them. Any thread, each object by one at a time. */
#ifndef BOOST_PROTO_TLS_H
#define BOOST_PROTO_TLS_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/buffer.h"
#include "proto/base/error.h"

enum { TLS_NAME_MAX = 64, TLS_OUT_MAX = 24 << 20, TLS_RECORD_MAX = 17 << 10 };

enum tls_role { TLS_NOBODY, TLS_CONTROLLER, TLS_NODE, TLS_USER, TLS_ADMIN };
const char *tls_role_name(enum tls_role role); /* "node" */

struct tls_peer {
    enum tls_role role; /* TLS_NOBODY: a certificate of the CA without a role of BOOST */
    char name[TLS_NAME_MAX + 1];
    int days_left; /* of the certificate's validity */
};
enum { TLS_DAYS_WARN = 14 }; /* with fewer left somebody should be told */

/* PEM files. The key must not be readable by group or others. ca may hold revocation lists too: then no certificate
 * that stands in one is taken. */
struct tls_files {
    const char *certificate, *key, *ca;
};

struct tls_context;
/* Reads the files and checks that they fit each other, are of the CA, and are valid now. own (may be NULL): who the
 * certificate says one is. Blocking file access. ERR_REFUSED names the file and the mend. */
MUST_USE int tls_context_create(bool server, const struct tls_files *files, struct tls_peer *own,
                                struct tls_context **out, struct error *err);
void tls_context_free(struct tls_context *context); /* NULL: nothing; connections made of it live on */

struct tls;
/* host: whom a client means to reach, checked against the certificate of the controller; NULL on the server's side.
 * A client's first bytes are in tls_out() when this returns. */
MUST_USE int tls_create(struct tls_context *context, const char *host, struct tls **out, struct error *err);
void tls_free(struct tls *t);

/* Bytes of the wire; what they hold is appended to `plain`. After an error, tls_out() may hold an alert for the
 * peer, then the connection has to go. ERR_REFUSED: a certificate, of either side, is not good enough, and which and
 * why; ERR_PROTOCOL: the peer speaks something else. */
MUST_USE int tls_receive(struct tls *t, const void *data, size_t len, struct buffer *plain, struct error *err);
/* Plain bytes, into tls_out(). Only once tls_ready(). */
MUST_USE int tls_send(struct tls *t, const void *data, size_t len, struct error *err);
/* What waits for the wire; the caller takes it with buffer_consume() or buffer_clear(). */
struct buffer *tls_out(struct tls *t);
bool tls_ready(const struct tls *t);  /* the handshake is through, the peer's certificate is good            */
bool tls_closed(const struct tls *t); /* the peer has said that nothing more comes                           */
const struct tls_peer *tls_peer(const struct tls *t); /* once tls_ready()                                     */

/* Does this byte begin a TLS record of a handshake? And: the first bytes of frames never do. */
bool tls_looks_like(unsigned char first_byte);

#endif
