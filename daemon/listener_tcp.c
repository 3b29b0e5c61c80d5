/* listener_tcp.h */
#include "daemon/listener_tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BACKLOG = 1024 };

static int listen_error(int uv, const char *text, struct error *err)
{
    error_errno(err, -uv, "cannot listen on %s", text);
    if (uv == UV_EADDRINUSE) {
        err->code = ERR_BUSY;
        return error_hint(err, "another program has this port: stop it, or name another one in `listen`");
    }
    if (uv == UV_EADDRNOTAVAIL)
        error_hint(err, "`listen` has to name an address of this machine, or *");
    if (uv == UV_EACCES)
        error_hint(err, "ports below 1024 are root's: name another one in `listen`");
    return err->code;
}

static int add(uv_loop_t *loop, const struct addrinfo *info, const struct address *from, uv_connection_cb on_connection,
               void *data, struct tcp_listeners *out, struct error *err)
{
    struct tcp_listener **list = realloc(out->list, (out->n + 1) * sizeof *list);
    if (!list)
        return error_set(err, ERR_NOMEM, "no memory for a listening socket");
    out->list = list;
    struct tcp_listener *l = calloc(1, sizeof *l);
    if (!l)
        return error_set(err, ERR_NOMEM, "no memory for a listening socket");
    int uv = uv_tcp_init_ex(loop, &l->tcp, (unsigned)info->ai_family);
    if (uv < 0) {
        free(l);
        return listen_error(uv, from->text, err);
    }
    list[out->n++] = l;
    l->tcp.data = data;
    uv = uv_tcp_bind(&l->tcp, info->ai_addr, info->ai_family == AF_INET6 ? UV_TCP_IPV6ONLY : 0);
    if (!uv)
        uv = uv_listen((uv_stream_t *)&l->tcp, BACKLOG, on_connection);
    struct sockaddr_storage bound;
    int len = sizeof bound;
    if (!uv)
        uv = uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&bound, &len);
    if (uv < 0)
        return listen_error(uv, from->text, err);
    address_of((struct sockaddr *)&bound, l->text);
    return ERR_OK;
}

int tcp_listeners_open(uv_loop_t *loop, char *const *addresses, size_t n, uv_connection_cb on_connection, void *data,
                       struct tcp_listeners *out, struct error *err)
{
    *out = (struct tcp_listeners){0};
    int rc = ERR_OK;
    for (size_t i = 0; !rc && i < n; i++) {
        struct address a;
        struct addrinfo *found = NULL;
        rc = address_parse(addresses[i], true, "listen", &a, err);
        if (rc)
            break;
        const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
        int gai = getaddrinfo(strcmp(a.host, "*") ? a.host : NULL, a.port, &hints, &found);
        if (gai)
            return address_lookup_error(&a, gai, err);
        for (const struct addrinfo *x = found; !rc && x; x = x->ai_next)
            rc = add(loop, x, &a, on_connection, data, out, err);
        freeaddrinfo(found);
    }
    return rc;
}

void tcp_listeners_close(struct tcp_listeners *l)
{
    for (size_t i = 0; i < l->n; i++) {
        if (!uv_is_closing((uv_handle_t *)&l->list[i]->tcp))
            uv_close((uv_handle_t *)&l->list[i]->tcp, NULL);
    }
}

void tcp_listeners_free(struct tcp_listeners *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->list[i]);
    free(l->list);
    *l = (struct tcp_listeners){0};
}
