/* node_certs.h */
#include "tests/bench/support/node_certs.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/stat.h>

enum { DAY_S = 86400 };

static X509 *ca;
static EVP_PKEY *ca_key, *node_key;
static long serial = 1;

static int failed(struct error *err, const char *what)
{
    char text[160];
    ERR_error_string_n(ERR_peek_error(), text, sizeof text);
    ERR_clear_error();
    return error_set(err, ERR_INTERNAL, "%s: %s", what, text);
}

/* The file of this name in the directory; NULL: cannot be opened. */
static FILE *open_in(const char *dir, const char *name, const char *mode)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return fopen(path, mode);
}

int node_certs_open(const char *dir, struct error *err)
{
    FILE *crt = open_in(dir, "ca.crt", "r"), *key = open_in(dir, "ca.key", "r");
    if (crt)
        ca = PEM_read_X509(crt, NULL, NULL, NULL);
    if (key)
        ca_key = PEM_read_PrivateKey(key, NULL, NULL, NULL);
    if (crt)
        fclose(crt);
    if (key)
        fclose(key);
    node_key = EVP_EC_gen("P-256");
    if (!ca || !ca_key || !node_key)
        return failed(err, "the CA");
    mode_t mask = umask(077);
    FILE *out = open_in(dir, "node-bench.key", "w");
    umask(mask);
    int rc = out && PEM_write_PrivateKey(out, node_key, NULL, NULL, 0, NULL, NULL) == 1 ? ERR_OK
                                                                                        : failed(err, "a node's key");
    if (out && fclose(out))
        rc = failed(err, "a node's key");
    return rc;
}

static int extend(X509 *x, int nid, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, ca, x, NULL, NULL, 0);
    X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    int done = e && X509_add_ext(x, e, -1);
    X509_EXTENSION_free(e);
    return done;
}

static int sign(X509 *x, const char *node)
{
    char san[128];
    snprintf(san, sizeof san, "URI:boost://node/%s", node);
    X509_NAME *name = X509_get_subject_name(x);
    return X509_set_version(x, X509_VERSION_3) && ASN1_INTEGER_set(X509_get_serialNumber(x), serial++) &&
           X509_gmtime_adj(X509_getm_notBefore(x), -DAY_S) && X509_gmtime_adj(X509_getm_notAfter(x), DAY_S) &&
           X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)node, -1, -1, 0) &&
           X509_set_issuer_name(x, X509_get_subject_name(ca)) && X509_set_pubkey(x, node_key) &&
           extend(x, NID_basic_constraints, "critical,CA:FALSE") &&
           extend(x, NID_key_usage, "critical,digitalSignature") && extend(x, NID_ext_key_usage, "clientAuth") &&
           extend(x, NID_subject_key_identifier, "hash") && extend(x, NID_authority_key_identifier, "keyid") &&
           extend(x, NID_subject_alt_name, san) && X509_sign(x, ca_key, EVP_sha256()) > 0;
}

int node_context(const char *dir, const char *node, struct tls_context **out, struct error *err)
{
    char crt[512], key[512], root[512];
    snprintf(crt, sizeof crt, "%s/node-bench.crt", dir);
    snprintf(key, sizeof key, "%s/node-bench.key", dir);
    snprintf(root, sizeof root, "%s/ca.crt", dir);
    X509 *x = X509_new();
    FILE *f = fopen(crt, "w");
    int rc = x && f && sign(x, node) && PEM_write_X509(f, x) == 1 ? ERR_OK : failed(err, "a node's certificate");
    if (f && fclose(f))
        rc = failed(err, "a node's certificate");
    X509_free(x);
    const struct tls_files files = {.certificate = crt, .key = key, .ca = root};
    return rc ? rc : tls_context_create(false, &files, NULL, out, err);
}
