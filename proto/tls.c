/* tls.h */
#include "proto/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/tls_internal.h"

enum { READ_CHUNK = 16 << 10 };

struct tls {
    SSL *ssl;
    bool server;
    bool ready, closed;
    bool spoke; /* a byte of the peer has come */
    struct tls_peer peer;
    struct buffer out;
    char host[256];
};

static const char *const role_names[] = {
    [TLS_NOBODY] = "nobody", [TLS_CONTROLLER] = "controller", [TLS_NODE] = "node", [TLS_USER] = "user",
    [TLS_ADMIN] = "admin"};

const char *tls_role_name(enum tls_role role)
{
    return role_names[role];
}

bool tls_looks_like(unsigned char first_byte)
{
    return first_byte == 0x16;
}

/* ---- making ------------------------------------------------------------------ */

static int set_host(struct tls *t, const char *host, struct error *err)
{
    X509_VERIFY_PARAM *param = SSL_get0_param(t->ssl);
    snprintf(t->host, sizeof t->host, "%s", host);
    if (X509_VERIFY_PARAM_set1_ip_asc(param, host) == 1)
        return ERR_OK;
    ERR_clear_error();
    X509_VERIFY_PARAM_set_hostflags(param, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    if (X509_VERIFY_PARAM_set1_host(param, host, 0) == 1 && SSL_set_tlsext_host_name(t->ssl, host) == 1)
        return ERR_OK;
    ERR_clear_error();
    return error_set(err, ERR_INVALID, "\"%.200s\" cannot be the name of a host", host);
}

int tls_create(struct tls_context *context, const char *host, struct tls **out, struct error *err)
{
    struct tls *t = calloc(1, sizeof *t);
    BIO *in = BIO_new(BIO_s_mem()), *sink = BIO_new(BIO_s_mem());
    *out = NULL;
    if (t)
        t->ssl = SSL_new(context->ssl);
    if (!t || !t->ssl || !in || !sink) {
        ERR_clear_error();
        BIO_free(in);
        BIO_free(sink);
        tls_free(t);
        return error_set(err, ERR_NOMEM, "no memory for a TLS connection");
    }
    BIO_set_mem_eof_return(in, -1);
    BIO_set_mem_eof_return(sink, -1);
    SSL_set_bio(t->ssl, in, sink);
    t->server = context->server;
    buffer_init(&t->out, TLS_OUT_MAX);
    int rc = ERR_OK;
    struct buffer nothing;
    buffer_init(&nothing, 1);
    if (t->server) {
        SSL_set_accept_state(t->ssl);
    } else if (!host) {
        rc = error_set(err, ERR_INTERNAL, "TLS: a client that means nobody");
    } else {
        SSL_set_connect_state(t->ssl);
        rc = set_host(t, host, err);
        if (!rc)
            rc = tls_receive(t, NULL, 0, &nothing, err);
    }
    buffer_free(&nothing);
    if (rc)
        tls_free(t);
    else
        *out = t;
    return rc;
}

void tls_free(struct tls *t)
{
    if (!t)
        return;
    SSL_free(t->ssl);
    buffer_free(&t->out);
    free(t);
}

/* ---- what went wrong --------------------------------------------------------- */

/* The certificate that the peer has shown was not good. */
static int peer_untrusted(const struct tls *t, long why, struct error *err)
{
    const char *whose = t->server ? "the peer's certificate" : "the controller's certificate";
    if (why == X509_V_ERR_HOSTNAME_MISMATCH || why == X509_V_ERR_IP_ADDRESS_MISMATCH) {
        error_set(err, ERR_REFUSED, "%s is not for %s", whose, t->host);
        return error_hint(err, "use a name that is in it, or make it anew with this one (deploy/make-certs.sh)");
    }
    error_set(err, ERR_REFUSED, "%s is not accepted: %s", whose, X509_verify_cert_error_string(why));
    if (why == X509_V_ERR_CERT_HAS_EXPIRED || why == X509_V_ERR_CERT_NOT_YET_VALID)
        return error_hint(err, "make it a new certificate (deploy/make-certs.sh), and see that both clocks are right");
    if (why == X509_V_ERR_CERT_REVOKED)
        return error_hint(err, "make it a new one (deploy/make-certs.sh), if it should have one");
    return error_hint(err, "both sides need certificates of one CA, and that CA's ca.crt");
}

/* What an alert of the peer says about this side's certificate. */
static const struct alert {
    int reason;
    const char *text, *hint;
} alerts[] = {
    {SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED, "the peer asks for a certificate and none was shown",
     "give certificate, key and CA (deploy/make-certs.sh makes them)"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED, "the peer does not accept this side's certificate: it has expired",
     "make a new one (deploy/make-certs.sh), and see that both clocks are right"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED, "the peer does not accept this side's certificate: it was revoked",
     "ask for a new one (deploy/make-certs.sh)"},
    {SSL_R_TLSV1_ALERT_UNKNOWN_CA, "the peer does not accept this side's certificate: it is of another CA",
     "both sides need certificates of one CA, and that CA's ca.crt"},
    {SSL_R_TLSV1_ALERT_DECRYPT_ERROR, "the peer does not accept this side's certificate: it is of another CA",
     "both sides need certificates of one CA, and that CA's ca.crt"},
    {SSL_R_SSLV3_ALERT_BAD_CERTIFICATE, "the peer does not accept this side's certificate: it is not valid",
     "make a new one (deploy/make-certs.sh), and see that both clocks are right"},
    {SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE,
     "the peer does not accept this side's certificate: it is not for this use",
     "a controller's certificate is for servers, those of nodes and users are for clients"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN, "the peer does not accept this side's certificate", "see the peer's log"},
    {SSL_R_TLSV1_ALERT_PROTOCOL_VERSION, "the peer speaks another version of TLS than 1.3",
     "install the same version of BOOST on both sides"},
};

static int broken(const struct tls *t, struct error *err)
{
    unsigned long first = ERR_peek_error();
    int reason = ERR_GET_REASON(first);
    long verified = SSL_get_verify_result(t->ssl);
    char text[160];
    ERR_error_string_n(first, text, sizeof text);
    ERR_clear_error();
    if (verified != X509_V_OK && !t->ready)
        return peer_untrusted(t, verified, err);
    if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
        error_set(err, ERR_REFUSED, "the peer shows no certificate");
        return error_hint(err, "give it certificate, key and CA (deploy/make-certs.sh makes them)");
    }
    for (size_t i = 0; i < sizeof alerts / sizeof *alerts; i++) {
        if (reason != alerts[i].reason)
            continue;
        error_set(err, ERR_REFUSED, "%s", alerts[i].text);
        return error_hint(err, "%s", alerts[i].hint);
    }
    if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST || reason == SSL_R_HTTPS_PROXY_REQUEST ||
        reason == SSL_R_UNKNOWN_PROTOCOL) {
        error_set(err, ERR_PROTOCOL, "the peer does not speak TLS");
        return error_hint(err, t->server ? "connect with boostctl --host or controller_address"
                                         : "see that it is boostd's `listen` address, and its port");
    }
    if (reason == SSL_R_UNSUPPORTED_PROTOCOL) {
        error_set(err, ERR_PROTOCOL, "the peer speaks another version of TLS than 1.3");
        return error_hint(err, "install the same version of BOOST on both sides");
    }
    return error_set(err, ERR_PROTOCOL, "TLS: %s", text);
}

/* ---- bytes ------------------------------------------------------------------- */

/* What OpenSSL has written. */
static int collect(struct tls *t, struct error *err)
{
    BIO *sink = SSL_get_wbio(t->ssl);
    char *data;
    long len = BIO_get_mem_data(sink, &data);
    int rc = len > 0 ? buffer_append(&t->out, data, (size_t)len) : ERR_OK;
    if (BIO_reset(sink) != 1)
        ERR_clear_error();
    return rc ? error_set(err, ERR_NOMEM, "no memory for a TLS connection") : ERR_OK;
}

static int handshaken(struct tls *t, struct error *err)
{
    X509 *cert = SSL_get0_peer_certificate(t->ssl);
    if (!cert || SSL_get_verify_result(t->ssl) != X509_V_OK)
        return error_set(err, ERR_INTERNAL, "TLS: the peer's certificate was not verified");
    int rc = tls_identify(cert, &t->peer, err);
    if (rc)
        return rc;
    if (!t->server && t->peer.role != TLS_CONTROLLER) {
        error_set(err, ERR_REFUSED, "what answers at %s shows the certificate of %s %s, not of a controller", t->host,
                  tls_role_name(t->peer.role), t->peer.name);
        return error_hint(err, "see that it is boostd's `listen` address; boostd needs a controller certificate");
    }
    t->ready = true;
    return ERR_OK;
}

/* Everything that OpenSSL can do with what it has. */
static int advance(struct tls *t, struct buffer *plain, struct error *err)
{
    for (;;) {
        int n;
        ERR_clear_error();
        if (!t->ready) {
            n = SSL_do_handshake(t->ssl);
            if (n == 1) {
                int rc = handshaken(t, err);
                if (rc)
                    return rc;
                continue;
            }
        } else {
            uint8_t *room = buffer_reserve(plain, READ_CHUNK);
            if (!room)
                return error_set(err, ERR_NOMEM, "no memory for a message");
            n = SSL_read(t->ssl, room, READ_CHUNK);
            if (n > 0) {
                plain->len += (size_t)n;
                plain->data[plain->len] = '\0';
                continue;
            }
        }
        switch (SSL_get_error(t->ssl, n)) {
        case SSL_ERROR_WANT_READ:
        case SSL_ERROR_WANT_WRITE:
            return ERR_OK;
        case SSL_ERROR_ZERO_RETURN:
            t->closed = true;
            return ERR_OK;
        default:
            return broken(t, err);
        }
    }
}

int tls_receive(struct tls *t, const void *data, size_t len, struct buffer *plain, struct error *err)
{
    const unsigned char *bytes = data;
    if (len && !t->spoke) {
        t->spoke = true;
        /* Records begin with 20 to 23; OpenSSL's own words for this are many. */
        if (bytes[0] < 20 || bytes[0] > 23) {
            error_set(err, ERR_PROTOCOL, "the peer does not speak TLS");
            return error_hint(err, t->server ? "connect with boostctl --host or controller_address"
                                             : "see that it is boostd's `listen` address, and its port");
        }
    }
    if (len && BIO_write(SSL_get_rbio(t->ssl), data, (int)len) != (int)len) {
        ERR_clear_error();
        return error_set(err, ERR_NOMEM, "no memory for a TLS connection");
    }
    int rc = advance(t, plain, err);
    struct error second;
    int collected = collect(t, &second);
    return rc ? rc : collected ? error_set(err, second.code, "%s", second.message) : ERR_OK;
}

int tls_send(struct tls *t, const void *data, size_t len, struct error *err)
{
    if (!t->ready)
        return error_set(err, ERR_INTERNAL, "TLS: the handshake is not through");
    const char *at = data;
    while (len) {
        int part = len > 1 << 20 ? 1 << 20 : (int)len;
        ERR_clear_error();
        int n = SSL_write(t->ssl, at, part);
        if (n <= 0)
            return broken(t, err);
        at += n;
        len -= (size_t)n;
        int rc = collect(t, err);
        if (rc)
            return rc;
    }
    return ERR_OK;
}

struct buffer *tls_out(struct tls *t)
{
    return &t->out;
}

bool tls_ready(const struct tls *t)
{
    return t->ready;
}

bool tls_closed(const struct tls *t)
{
    return t->closed;
}

const struct tls_peer *tls_peer(const struct tls *t)
{
    return &t->peer;
}
