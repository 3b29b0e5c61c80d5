/* TLS over memory: handshakes good and bad, roles, damaged and cut records, and addresses as text. The certificates are
 * made here, with OpenSSL's own functions; deploy/make-certs.sh is tested by tests/e2e. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include "proto/address.h"
#include "proto/tls.h"

enum { YEAR = 31536000, BIG = 300000 };

struct identity {
    EVP_PKEY *key;
    X509 *cert;
};

static struct identity ca, other_ca;

static void extension(X509 *cert, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, cert, NULL, NULL, 0);
    X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    assert_non_null(e);
    assert_int_equal(X509_add_ext(cert, e, -1), 1);
    X509_EXTENSION_free(e);
}

/* san NULL: a CA. from, to: seconds from now. */
static struct identity make(const struct identity *issuer, const char *san, const char *use, long from, long to)
{
    static long serial = 1;
    struct identity id = {.key = EVP_EC_gen("P-256"), .cert = X509_new()};
    assert_non_null(id.key);
    X509_set_version(id.cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(id.cert), serial++);
    X509_gmtime_adj(X509_getm_notBefore(id.cert), from);
    X509_gmtime_adj(X509_getm_notAfter(id.cert), to);
    X509_set_pubkey(id.cert, id.key);
    X509_NAME *name = X509_get_subject_name(id.cert);
    char text[32];
    snprintf(text, sizeof text, "test %ld", serial);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)text, -1, -1, 0);
    X509 *by = issuer ? issuer->cert : id.cert;
    X509_set_issuer_name(id.cert, X509_get_subject_name(by));
    extension(id.cert, by, NID_basic_constraints, san ? "critical,CA:FALSE" : "critical,CA:TRUE");
    if (san && *san)
        extension(id.cert, by, NID_subject_alt_name, san);
    if (use)
        extension(id.cert, by, NID_ext_key_usage, use);
    assert_true(X509_sign(id.cert, issuer ? issuer->key : id.key, EVP_sha256()) > 0);
    return id;
}

static void drop(struct identity *id)
{
    EVP_PKEY_free(id->key);
    X509_free(id->cert);
}

static void put(const char *path, const struct identity *id, bool key, mode_t mode)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    if (key)
        assert_int_equal(PEM_write_PrivateKey(f, id->key, NULL, NULL, 0, NULL, NULL), 1);
    else
        assert_int_equal(PEM_write_X509(f, id->cert), 1);
    fclose(f);
    assert_int_equal(chmod(path, mode), 0);
}

static const struct tls_files files = {.certificate = "t.crt", .key = "t.key", .ca = "t.ca"};

static int context_of(bool server, const struct identity *id, const struct identity *trusted, struct tls_peer *own,
                      struct tls_context **out, struct error *err)
{
    put(files.certificate, id, false, 0644);
    put(files.key, id, true, 0600);
    put(files.ca, trusted, false, 0644);
    return tls_context_create(server, &files, own, out, err);
}

static struct tls_context *good_context(bool server, const char *san, const struct identity *trusted)
{
    struct identity id = make(trusted, san, server ? "serverAuth" : "clientAuth", -60, YEAR);
    struct tls_context *c;
    struct error err;
    if (context_of(server, &id, trusted, NULL, &c, &err))
        fail_msg("%s", err.message);
    drop(&id);
    return c;
}

#define SERVER_SAN "URI:boost://controller/c,DNS:c.example,IP:10.0.0.1"

/* ---- two ends in memory ---- */

struct pair {
    struct tls *a, *b; /* client, server */
    struct buffer plain_a, plain_b;
    struct error err_a, err_b;
    int rc_a, rc_b;
};

static void hand(struct tls *from, struct tls *to, struct buffer *plain, int *rc, struct error *err, size_t piece)
{
    struct buffer *out = tls_out(from);
    while (out->len && !*rc) {
        size_t n = piece && piece < out->len ? piece : out->len;
        *rc = tls_receive(to, out->data, n, plain, err);
        buffer_consume(out, n);
    }
    buffer_clear(out);
}

static void talk(struct pair *p, size_t piece)
{
    for (int i = 0; i < 8; i++) {
        hand(p->a, p->b, &p->plain_b, &p->rc_b, &p->err_b, piece);
        hand(p->b, p->a, &p->plain_a, &p->rc_a, &p->err_a, piece);
    }
}

static struct pair meet(struct tls_context *client, struct tls_context *server, const char *host, size_t piece)
{
    struct pair p = {0};
    buffer_init(&p.plain_a, 1 << 20);
    buffer_init(&p.plain_b, 1 << 20);
    assert_int_equal(tls_create(client, host, &p.a, &p.err_a), 0);
    assert_int_equal(tls_create(server, NULL, &p.b, &p.err_b), 0);
    talk(&p, piece);
    return p;
}

static void part(struct pair *p)
{
    tls_free(p->a);
    tls_free(p->b);
    buffer_free(&p->plain_a);
    buffer_free(&p->plain_b);
}

static void both_ways(void **state)
{
    (void)state;
    struct tls_context *client = good_context(false, "URI:boost://node/gpu-01.a", &ca);
    struct tls_context *server = good_context(true, SERVER_SAN, &ca);
    static const char *const hosts[] = {"c.example", "10.0.0.1"};
    char *big = malloc(BIG);
    assert_non_null(big);
    for (int i = 0; i < BIG; i++)
        big[i] = (char)(i * 7);
    for (size_t h = 0; h < 2; h++) {
        struct pair p = meet(client, server, hosts[h], h ? 1 : 0); /* in pieces of one byte too */
        assert_int_equal(p.rc_a, 0);
        assert_int_equal(p.rc_b, 0);
        assert_true(tls_ready(p.a) && tls_ready(p.b));
        assert_int_equal(tls_peer(p.a)->role, TLS_CONTROLLER);
        assert_string_equal(tls_peer(p.a)->name, "c");
        assert_int_equal(tls_peer(p.b)->role, TLS_NODE);
        assert_string_equal(tls_peer(p.b)->name, "gpu-01.a");
        assert_int_equal(tls_send(p.a, big, BIG, &p.err_a), 0);
        assert_int_equal(tls_send(p.b, "hello", 5, &p.err_b), 0);
        talk(&p, h ? 1000 : 0);
        assert_int_equal(p.plain_b.len, BIG);
        assert_memory_equal(p.plain_b.data, big, BIG);
        assert_int_equal(p.plain_a.len, 5);
        part(&p);
    }
    free(big);
    tls_context_free(client);
    tls_context_free(server);
}

static void every_role(void **state)
{
    (void)state;
    static const struct {
        const char *san;
        enum tls_role role;
        const char *name;
    } cases[] = {
        {"URI:boost://user/alice", TLS_USER, "alice"},
        {"URI:https://elsewhere/x,URI:boost://admin/root,DNS:a.b", TLS_ADMIN, "root"},
        {"DNS:gpu01", TLS_NOBODY, ""},
        {"", TLS_NOBODY, ""},
    };
    struct tls_context *server = good_context(true, SERVER_SAN, &ca);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tls_context *client = good_context(false, cases[i].san, &ca);
        struct pair p = meet(client, server, "c.example", 0);
        assert_true(tls_ready(p.b));
        assert_int_equal(tls_peer(p.b)->role, cases[i].role);
        assert_string_equal(tls_peer(p.b)->name, cases[i].name);
        part(&p);
        tls_context_free(client);
    }
    tls_context_free(server);
}

static void names_that_are_nobody(void **state)
{
    (void)state;
    static const char *const sans[] = {
        "URI:boost://node/a,URI:boost://user/b", "URI:boost://king/a", "URI:boost://node/", "URI:boost://node/a/b",
        "URI:boost://node/a b",
        "URI:boost://user/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    };
    for (size_t i = 0; i < sizeof sans / sizeof *sans; i++) {
        struct identity id = make(&ca, sans[i], "clientAuth", -60, YEAR);
        struct tls_context *c;
        struct error err;
        assert_int_equal(context_of(false, &id, &ca, NULL, &c, &err), ERR_REFUSED);
        assert_non_null(strstr(err.message, "a certificate is for"));
        assert_null(c);
        drop(&id);
    }
}

static void refused(struct pair *p, const char *client_says, const char *server_says)
{
    if (client_says)
        assert_non_null(strstr(p->err_a.message, client_says));
    if (server_says)
        assert_non_null(strstr(p->err_b.message, server_says));
    assert_false(tls_ready(p->b) && tls_ready(p->a) && !p->rc_a && !p->rc_b);
}

static void strangers(void **state)
{
    (void)state;
    struct tls_context *ours = good_context(true, SERVER_SAN, &ca), *theirs = good_context(true, SERVER_SAN, &other_ca);
    struct tls_context *client = good_context(false, "URI:boost://node/a", &ca);
    struct tls_context *stranger = good_context(false, "URI:boost://node/a", &other_ca);
    struct pair p = meet(client, theirs, "c.example", 0);
    assert_int_equal(p.rc_a, ERR_REFUSED);
    refused(&p, "the controller's certificate is not accepted", "of another CA");
    part(&p);
    p = meet(stranger, ours, "c.example", 0);
    refused(&p, "not accepted", "of another CA");
    part(&p);
    p = meet(client, ours, "d.example", 0);
    assert_int_equal(p.rc_a, ERR_REFUSED);
    refused(&p, "is not for d.example", "not accept this side's certificate");
    part(&p);
    p = meet(client, ours, "10.0.0.2", 0);
    refused(&p, "is not for 10.0.0.2", NULL);
    part(&p);
    tls_context_free(stranger);
    tls_context_free(theirs);
    tls_context_free(ours);
    /* A node's certificate that may be a server's does not make it a controller. */
    struct tls_context *node = good_context(true, "URI:boost://node/a,DNS:c.example", &ca);
    p = meet(client, node, "c.example", 0);
    assert_int_equal(p.rc_a, ERR_REFUSED);
    refused(&p, "the certificate of node a, not of a controller", NULL);
    assert_false(tls_ready(p.a));
    part(&p);
    tls_context_free(node);
    tls_context_free(client);
}

/* One that trusts ours and is not trusted by them: the peer has another CA file. */
static void a_client_of_another_ca(void **state)
{
    (void)state;
    struct identity cross = make(&other_ca, "URI:boost://node/a", "clientAuth", -60, YEAR);
    struct tls_context *server = good_context(true, SERVER_SAN, &ca), *client;
    struct error err;
    FILE *f;
    put(files.certificate, &cross, false, 0644);
    put(files.key, &cross, true, 0600);
    put(files.ca, &other_ca, false, 0644);
    f = fopen(files.ca, "ae"); /* both */
    assert_non_null(f);
    PEM_write_X509(f, ca.cert);
    fclose(f);
    assert_int_equal(tls_context_create(false, &files, NULL, &client, &err), 0);
    struct pair p = meet(client, server, "c.example", 0);
    assert_int_equal(p.rc_b, ERR_REFUSED);
    refused(&p, "does not accept this side's certificate", "the peer's certificate is not accepted");
    part(&p);
    tls_context_free(client);
    tls_context_free(server);
    drop(&cross);
}

static void own_files(void **state)
{
    (void)state;
    struct tls_context *c;
    struct tls_peer own;
    struct error err;
    struct identity good = make(&ca, "URI:boost://node/a", "clientAuth", -60, YEAR);
    struct identity old = make(&ca, "URI:boost://node/a", "clientAuth", -YEAR, -60);
    struct identity early = make(&ca, "URI:boost://node/a", "clientAuth", 3600, YEAR);
    struct identity server = make(&ca, SERVER_SAN, "serverAuth", -60, YEAR);
    assert_int_equal(context_of(false, &good, &ca, &own, &c, &err), 0);
    assert_string_equal(own.name, "a");
    tls_context_free(c);
    assert_int_equal(context_of(false, &old, &ca, NULL, &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "expired"));
    assert_int_equal(context_of(false, &early, &ca, NULL, &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "not yet valid"));
    assert_int_equal(context_of(false, &good, &other_ca, NULL, &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "not good under the CA"));
    assert_int_equal(context_of(false, &server, &ca, NULL, &c, &err), ERR_REFUSED); /* a controller's, as a client's */
    /* The key of another, one for all to read, none, and rubbish. */
    assert_int_equal(context_of(false, &good, &ca, NULL, &c, &err), 0);
    tls_context_free(c);
    put(files.key, &server, true, 0600);
    assert_int_equal(tls_context_create(false, &files, NULL, &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, files.key));
    put(files.key, &good, true, 0640);
    assert_int_equal(tls_context_create(false, &files, NULL, &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "chmod 600"));
    assert_int_equal(unlink(files.key), 0);
    assert_int_equal(tls_context_create(false, &files, NULL, &c, &err), ERR_REFUSED);
    put(files.key, &good, false, 0600);
    assert_int_equal(tls_context_create(false, &files, NULL, &c, &err), ERR_REFUSED);
    drop(&good);
    drop(&old);
    drop(&early);
    drop(&server);
}

static void other_talk(void **state)
{
    (void)state;
    static const char *const words[] = {"GET / HTTP/1.0\r\n\r\n", "SSH-2.0-OpenSSH\r\n", "\0\0\0\4abcd"};
    struct tls_context *server = good_context(true, SERVER_SAN, &ca);
    struct tls_context *client = good_context(false, "URI:boost://node/a", &ca);
    struct buffer plain;
    struct error err;
    struct tls *t;
    buffer_init(&plain, 1 << 20);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(tls_create(server, NULL, &t, &err), 0);
        assert_int_equal(tls_receive(t, words[i], i < 2 ? strlen(words[i]) : 8, &plain, &err), ERR_PROTOCOL);
        assert_non_null(strstr(err.message, "does not speak TLS"));
        tls_free(t);
        assert_int_equal(tls_create(client, "c.example", &t, &err), 0);
        assert_int_equal(tls_receive(t, words[i], i < 2 ? strlen(words[i]) : 8, &plain, &err), ERR_PROTOCOL);
        assert_int_equal(tls_send(t, "x", 1, &err), ERR_INTERNAL);
        tls_free(t);
    }
    /* Damaged at every byte of the first flight: an error, or a handshake that does not come through. */
    for (size_t at = 0; at < 300; at += 3) {
        struct tls *a, *b;
        assert_int_equal(tls_create(client, "c.example", &a, &err), 0);
        assert_int_equal(tls_create(server, NULL, &b, &err), 0);
        struct buffer *out = tls_out(a);
        if (at < out->len)
            out->data[at] ^= 0x41;
        struct pair p = {.a = a, .b = b};
        buffer_init(&p.plain_a, 1 << 20);
        buffer_init(&p.plain_b, 1 << 20);
        talk(&p, 0);
        assert_false(at < 200 && tls_ready(a) && tls_ready(b));
        part(&p);
    }
    /* And a record damaged later. */
    struct pair p = meet(client, server, "c.example", 0);
    assert_int_equal(tls_send(p.a, "words", 5, &err), 0);
    tls_out(p.a)->data[8] ^= 1;
    talk(&p, 0);
    assert_int_equal(p.rc_b, ERR_PROTOCOL);
    assert_int_equal(p.plain_b.len, 0);
    part(&p);
    buffer_free(&plain);
    tls_context_free(client);
    tls_context_free(server);
}

static void addresses(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool listen;
        const char *host, *port, *shown; /* host NULL: refused */
    } cases[] = {
        {"a.example:80", false, "a.example", "80", "a.example:80"},
        {"a.example", false, "a.example", ADDRESS_DEFAULT_PORT, "a.example:" ADDRESS_DEFAULT_PORT},
        {"10.0.0.1:65535", false, "10.0.0.1", "65535", "10.0.0.1:65535"},
        {"[fd00::1]:99", false, "fd00::1", "99", "[fd00::1]:99"},
        {"[::1]", false, "::1", ADDRESS_DEFAULT_PORT, "[::1]:" ADDRESS_DEFAULT_PORT},
        {"fd00::1", false, "fd00::1", ADDRESS_DEFAULT_PORT, "[fd00::1]:" ADDRESS_DEFAULT_PORT},
        {"*:0", true, "*", "0", "*:0"},
        {"a:0", false, NULL, NULL, NULL},
        {"a:65536", false, NULL, NULL, NULL},
        {"a:", false, NULL, NULL, NULL},
        {"a:x", false, NULL, NULL, NULL},
        {":80", false, NULL, NULL, NULL},
        {"", false, NULL, NULL, NULL},
        {"[::1", false, NULL, NULL, NULL},
        {"[::1]80", false, NULL, NULL, NULL},
        {"a:b:c", false, NULL, NULL, NULL},
        {"a b:80", false, NULL, NULL, NULL},
        {"http://a:80", false, NULL, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct address a;
        struct error err;
        int rc = address_parse(cases[i].text, cases[i].listen, "--host", &a, &err);
        if (!cases[i].host) {
            assert_int_equal(rc, ERR_INVALID);
            assert_non_null(strstr(err.message, "--host"));
            continue;
        }
        assert_int_equal(rc, 0);
        assert_string_equal(a.host, cases[i].host);
        assert_string_equal(a.port, cases[i].port);
        assert_string_equal(a.text, cases[i].shown);
    }
}

int main(void)
{
    ca = make(NULL, NULL, NULL, -3600, 10 * YEAR);
    other_ca = make(NULL, NULL, NULL, -3600, 10 * YEAR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_ways),  cmocka_unit_test(every_role), cmocka_unit_test(names_that_are_nobody),
        cmocka_unit_test(strangers),  cmocka_unit_test(own_files),  cmocka_unit_test(a_client_of_another_ca),
        cmocka_unit_test(other_talk), cmocka_unit_test(addresses),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    drop(&ca);
    drop(&other_ca);
    return failed;
}
