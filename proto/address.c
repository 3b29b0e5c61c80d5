/* address.h */
#include "proto/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int bad(const char *text, const char *what, const char *why, struct error *err)
{
    error_set(err, ERR_INVALID, "%s: \"%.200s\" is no address: %s", what, text, why);
    return error_hint(err, "write host:port, e.g. controller.example:" ADDRESS_DEFAULT_PORT ", 10.0.0.1:"
                           ADDRESS_DEFAULT_PORT " or [fd00::1]:" ADDRESS_DEFAULT_PORT);
}

static bool good_port(const char *port, bool listen)
{
    size_t len = strspn(port, "0123456789");
    if (!len || port[len] || len > 5)
        return false;
    long n = strtol(port, NULL, 10);
    return n <= 65535 && (n > 0 || listen);
}

int address_parse(const char *text, bool listen, const char *what, struct address *out, struct error *err)
{
    const char *host = text, *port = NULL;
    size_t len;
    if (*text == '[') {
        const char *close = strchr(text, ']');
        if (!close)
            return bad(text, what, "a bracket is open", err);
        host = text + 1;
        len = (size_t)(close - host);
        if (close[1] && close[1] != ':')
            return bad(text, what, "only :port may follow the bracket", err);
        port = close[1] ? close + 2 : NULL;
    } else {
        const char *colon = strchr(text, ':');
        bool many = colon && strchr(colon + 1, ':'); /* IPv6 without brackets and port */
        len = colon && !many ? (size_t)(colon - text) : strlen(text);
        port = colon && !many ? colon + 1 : NULL;
    }
    if (!len || len >= sizeof out->host)
        return bad(text, what, len ? "the host is too long" : "there is no host", err);
    if (strcspn(host, " \t/@[]") < len)
        return bad(text, what, "a host has no spaces, brackets, '/' or '@'", err);
    if (port && !good_port(port, listen))
        return bad(text, what, listen ? "the port is not 0 to 65535" : "the port is not 1 to 65535", err);
    snprintf(out->host, sizeof out->host, "%.*s", (int)len, host);
    struct in6_addr ignored;
    if (strchr(out->host, ':') && inet_pton(AF_INET6, out->host, &ignored) != 1)
        return bad(text, what, "more than one colon, and no IPv6 address", err);
    snprintf(out->port, sizeof out->port, "%s", port ? port : ADDRESS_DEFAULT_PORT);
    bool colons = strchr(out->host, ':') != NULL;
    snprintf(out->text, sizeof out->text, "%s%s%s:%s", colons ? "[" : "", out->host, colons ? "]" : "", out->port);
    return ERR_OK;
}

void address_of(const struct sockaddr *from, char out[ADDRESS_TEXT_MAX])
{
    char host[INET6_ADDRSTRLEN] = "";
    if (from->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)from;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(out, ADDRESS_TEXT_MAX, "%s:%d", host, ntohs(in->sin_port));
    } else if (from->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)(const void *)from;
        inet_ntop(AF_INET6, &in->sin6_addr, host, sizeof host);
        snprintf(out, ADDRESS_TEXT_MAX, "[%s]:%d", host, ntohs(in->sin6_port));
    } else {
        snprintf(out, ADDRESS_TEXT_MAX, "?");
    }
}

int address_lookup_error(const struct address *a, int gai, struct error *err)
{
    error_set(err, ERR_UNREACHABLE, "cannot find the address of %s: %s", a->host, gai_strerror(gai));
    return error_hint(err, "see whether the name is right and DNS or /etc/hosts knows it, or give a number");
}
