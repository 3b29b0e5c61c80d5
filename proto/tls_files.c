/* tls.h: certificates, keys and what they say. */
#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/tls_internal.h"
#include "proto/validate.h"

#define SCHEME "boost://"

/* ---- who ---------------------------------------------------------------------- */

static int role_of(const char *uri, size_t len, struct tls_peer *out, struct error *err)
{
    static const enum tls_role roles[] = {TLS_CONTROLLER, TLS_NODE, TLS_USER, TLS_ADMIN};
    const char *rest = uri + strlen(SCHEME);
    for (size_t i = 0; i < sizeof roles / sizeof *roles && memchr(uri, '\0', len) == NULL; i++) {
        const char *role = tls_role_name(roles[i]);
        size_t n = strlen(role);
        if (strncmp(rest, role, n) != 0 || rest[n] != '/')
            continue;
        const char *name = rest + n + 1;
        if (out->role != TLS_NOBODY)
            return error_set(err, ERR_REFUSED, "a certificate is for one only, this one is for %s %s and for %.100s",
                             tls_role_name(out->role), out->name, uri);
        if (!validate_name(name) || strlen(name) > TLS_NAME_MAX)
            break;
        out->role = roles[i];
        snprintf(out->name, sizeof out->name, "%s", name);
        return ERR_OK;
    }
    error_set(err, ERR_REFUSED, "a certificate is for %.100s, which is nobody", uri);
    return error_hint(err, "make it with deploy/make-certs.sh");
}

int tls_identify(X509 *cert, struct tls_peer *out, struct error *err)
{
    int seconds;
    *out = (struct tls_peer){.role = TLS_NOBODY};
    if (ASN1_TIME_diff(&out->days_left, &seconds, NULL, X509_get0_notAfter(cert)) != 1)
        out->days_left = 0;
    GENERAL_NAMES *names = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
    int rc = ERR_OK;
    for (int i = 0; !rc && names && i < sk_GENERAL_NAME_num(names); i++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
        if (name->type != GEN_URI)
            continue;
        const ASN1_IA5STRING *s = name->d.uniformResourceIdentifier;
        const char *uri = (const char *)ASN1_STRING_get0_data(s);
        int len = ASN1_STRING_length(s);
        char text[256];
        if (len < (int)strlen(SCHEME) || len >= (int)sizeof text || strncmp(uri, SCHEME, strlen(SCHEME)) != 0)
            continue;
        memcpy(text, uri, (size_t)len);
        text[len] = '\0';
        rc = role_of(text, (size_t)len, out, err);
    }
    GENERAL_NAMES_free(names);
    ERR_clear_error();
    return rc;
}

/* ---- files -------------------------------------------------------------------- */

static const char making[] = "make it with deploy/make-certs.sh, or name another file";

/* OpenSSL's complaint, short. */
static int bad_file(const char *what, const char *path, struct error *err)
{
    unsigned long code = ERR_peek_last_error();
    const char *why = ERR_reason_error_string(code);
    error_set(err, ERR_REFUSED, "%s %s cannot be used: %s", what, path, why ? why : "it is not PEM");
    ERR_clear_error();
    return error_hint(err, "%s", making);
}

static int readable(const char *what, const char *path, bool secret, struct error *err)
{
    struct stat st;
    if (!path || !*path) {
        error_set(err, ERR_REFUSED, "no %s is given", what);
        return error_hint(err, "%s", making);
    }
    FILE *f = fopen(path, "re");
    if (!f || fstat(fileno(f), &st) < 0) {
        int rc = error_errno(err, errno, "cannot read the %s %s", what, path);
        if (f)
            fclose(f);
        err->code = ERR_REFUSED;
        error_hint(err, "%s", making);
        return rc ? ERR_REFUSED : ERR_OK;
    }
    fclose(f);
    if (secret && st.st_mode & 077) {
        error_set(err, ERR_REFUSED, "the %s %s can be read by others (mode %04o)", what, path,
                  (unsigned)st.st_mode & 07777);
        return error_hint(err, "chmod 600 %s; if others may have seen it, make a new one", path);
    }
    return ERR_OK;
}

/* The certificate against its own CA, as a peer would. */
static int check_own(SSL_CTX *ssl, bool server, const struct tls_files *files, struct tls_peer *own,
                     struct error *err)
{
    X509 *cert = SSL_CTX_get0_certificate(ssl);
    X509_STORE_CTX *store = X509_STORE_CTX_new();
    STACK_OF(X509) *chain = NULL;
    SSL_CTX_get0_chain_certs(ssl, &chain);
    int rc = ERR_OK;
    if (!cert || !store || X509_STORE_CTX_init(store, SSL_CTX_get_cert_store(ssl), cert, chain) != 1) {
        rc = error_set(err, ERR_NOMEM, "no memory to check %s", files->certificate);
    } else {
        X509_STORE_CTX_set_purpose(store, server ? X509_PURPOSE_SSL_SERVER : X509_PURPOSE_SSL_CLIENT);
        if (X509_verify_cert(store) != 1) {
            int why = X509_STORE_CTX_get_error(store);
            error_set(err, ERR_REFUSED, "the certificate %s is not good under the CA %s: %s", files->certificate,
                      files->ca, X509_verify_cert_error_string(why));
            rc = error_hint(err, why == X509_V_ERR_CERT_HAS_EXPIRED || why == X509_V_ERR_CERT_NOT_YET_VALID
                                     ? "make a new one (deploy/make-certs.sh), and see that the clock is right"
                                     : "take certificate and ca.crt from the same place (deploy/make-certs.sh)");
        }
    }
    X509_STORE_CTX_free(store);
    ERR_clear_error();
    if (!rc)
        rc = tls_identify(cert, own, err);
    return rc ? error_context(err, "TLS") : ERR_OK;
}

/* Lists of revoked certificates are looked at where there are any. */
static void heed_revocations(SSL_CTX *ssl)
{
    X509_STORE *store = SSL_CTX_get_cert_store(ssl);
    STACK_OF(X509_OBJECT) *objects = X509_STORE_get0_objects(store);
    for (int i = 0; i < sk_X509_OBJECT_num(objects); i++) {
        if (X509_OBJECT_get_type(sk_X509_OBJECT_value(objects, i)) == X509_LU_CRL)
            X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK);
    }
}

static int load(SSL_CTX *ssl, bool server, const struct tls_files *files, struct tls_peer *own, struct error *err)
{
    int rc = readable("CA", files->ca, false, err);
    if (!rc)
        rc = readable("certificate", files->certificate, false, err);
    if (!rc)
        rc = readable("private key", files->key, true, err);
    if (rc)
        return rc;
    if (SSL_CTX_load_verify_locations(ssl, files->ca, NULL) != 1)
        return bad_file("the CA", files->ca, err);
    heed_revocations(ssl);
    if (SSL_CTX_use_certificate_chain_file(ssl, files->certificate) != 1)
        return bad_file("the certificate", files->certificate, err);
    if (SSL_CTX_use_PrivateKey_file(ssl, files->key, SSL_FILETYPE_PEM) != 1)
        return bad_file("the private key", files->key, err);
    if (SSL_CTX_check_private_key(ssl) != 1)
        return bad_file("the private key", files->key, err);
    return check_own(ssl, server, files, own, err);
}

/* A key under a pass phrase must not make a daemon ask on its terminal. */
static int no_phrase(char *out, int size, int writing, void *arg)
{
    (void)out;
    (void)size;
    (void)writing;
    (void)arg;
    return 0;
}

int tls_context_create(bool server, const struct tls_files *files, struct tls_peer *own, struct tls_context **out,
                       struct error *err)
{
    struct tls_peer self;
    struct tls_context *c = calloc(1, sizeof *c);
    *out = NULL;
    if (c)
        c->ssl = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (!c || !c->ssl || SSL_CTX_set_min_proto_version(c->ssl, TLS1_3_VERSION) != 1) {
        tls_context_free(c);
        ERR_clear_error();
        return error_set(err, ERR_NOMEM, "no memory for TLS");
    }
    c->server = server;
    SSL_CTX_set_default_passwd_cb(c->ssl, no_phrase);
    SSL_CTX_set_options(c->ssl, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET);
    SSL_CTX_set_num_tickets(c->ssl, 0);
    SSL_CTX_set_session_cache_mode(c->ssl, SSL_SESS_CACHE_OFF);
    /* A thousand idle agents must not hold two record buffers each. */
    SSL_CTX_set_mode(c->ssl, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE);
    SSL_CTX_set_verify(c->ssl, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    int rc = load(c->ssl, server, files, &self, err);
    if (rc) {
        tls_context_free(c);
        return rc;
    }
    if (own)
        *own = self;
    *out = c;
    return ERR_OK;
}

void tls_context_free(struct tls_context *c)
{
    if (!c)
        return;
    SSL_CTX_free(c->ssl);
    free(c);
}
