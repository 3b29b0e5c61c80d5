/* peers.h */
#include "worker/comm/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/clock.h"

enum { ADDRESS_MAX = 128, KEY_MAX = 32, HELLO_MS = 5000 };
enum { SAID_NOTHING = -1, SAID_LEAVING = -2 }; /* else the rank that is lost */

struct peer {
    int fd;    /* -1: ourselves */
    bool gone; /* its end of the connection is closed */
    int said;
};
struct peers {
    int rank, world;
    pthread_mutex_t lock; /* of all that changes once the ranks are connected */
    int listener;
    uint64_t nonce;       /* what a connecting rank has to know: it read our entry of the rendezvous */
    int blamed;           /* once decided, for ever; -1: nobody yet */
    struct pollfd *polls; /* [world] */
    struct peer peer[];
};

/* First message on a connection. One byte order: all ranks of a job run one build. */
struct hello {
    uint64_t nonce;
    int32_t rank;
    int32_t unused;
};

static void key_of(char out[KEY_MAX], int rank)
{
    snprintf(out, KEY_MAX, "peer-%d", rank);
}

/* ---- connecting ------------------------------------------------------------------ */

static int resolve(const char *host, const char *port, struct addrinfo **out, struct error *err)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE, .ai_socktype = SOCK_STREAM};
    int rc = getaddrinfo(host, port, &hints, out);
    if (!rc)
        return ERR_OK;
    error_set(err, ERR_INVALID, "'%s' is not an IP address: %s", host, gai_strerror(rc));
    return error_hint(err, "set the agent's data address to an IP address of its machine");
}

/* Listens on any port of the address and publishes "<nonce> <host> <port>". */
static int listen_and_publish(struct peers *p, const char *bind_address, const struct rendezvous *rv, struct error *err)
{
    struct addrinfo *a;
    int rc = resolve(bind_address, "0", &a, err);
    if (rc)
        return rc;
    p->listener = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_storage own;
    socklen_t len = sizeof own;
    char host[ADDRESS_MAX], port[16], text[ADDRESS_MAX + 48], key[KEY_MAX];
    if (p->listener < 0 || bind(p->listener, a->ai_addr, a->ai_addrlen) < 0 || listen(p->listener, p->world) < 0 ||
        getsockname(p->listener, (struct sockaddr *)&own, &len) < 0) {
        rc = error_errno(err, errno, "cannot listen on %s", bind_address);
        error_hint(err, "set the agent's data address to an IP address of its machine");
    } else if (getnameinfo((struct sockaddr *)&own, len, host, sizeof host, port, sizeof port,
                           NI_NUMERICHOST | NI_NUMERICSERV)) {
        rc = error_set(err, ERR_INTERNAL, "cannot print the address of %s", bind_address);
    } else {
        key_of(key, p->rank);
        int used = snprintf(text, sizeof text, "%016" PRIx64 " %s %s", p->nonce, host, port);
        rc = rv->set(rv->arg, "world", key, text, (size_t)used, err);
    }
    freeaddrinfo(a);
    return rc;
}

/* Splits "<nonce> <host> <port>" in place. */
static int parse_entry(char *text, uint64_t *nonce, char **host, char **port)
{
    char *end;
    *nonce = strtoull(text, &end, 16);
    if (end == text || *end != ' ')
        return ERR_PROTOCOL;
    *host = end + 1;
    char *space = strchr(*host, ' ');
    if (!space)
        return ERR_PROTOCOL;
    *space = '\0';
    *port = space + 1;
    return ERR_OK;
}

static int connect_to(struct peers *p, int other, const struct rendezvous *rv, int64_t deadline_ns, struct error *err)
{
    struct buffer entry;
    struct addrinfo *a = NULL;
    char key[KEY_MAX], *host = NULL, *port = NULL;
    struct hello hello = {.rank = p->rank};
    buffer_init(&entry, ADDRESS_MAX + 64);
    key_of(key, other);
    int rc = rv->get(rv->arg, "world", key, clock_left_ms(deadline_ns) + 1, &entry, err);
    if (rc == ERR_TIMEOUT)
        error_context(err, "rank %d did not come to the rendezvous", other);
    if (!rc && parse_entry((char *)entry.data, &hello.nonce, &host, &port))
        rc = error_set(err, ERR_PROTOCOL, "the address of rank %d cannot be read", other);
    if (!rc)
        rc = resolve(host, port, &a, err);
    if (rc)
        goto out;
    int fd = p->peer[other].fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = clock_left_ms(deadline_ns) / 1000 + 1};
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) < 0 ||
        connect(fd, a->ai_addr, a->ai_addrlen) < 0 ||
        send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello) {
        error_errno(err, errno, "cannot connect to rank %d at %s port %s", other, host, port);
        rc = err->code = ERR_PEER_LOST;
    }
out:
    if (a)
        freeaddrinfo(a);
    buffer_free(&entry);
    return rc;
}

/* So that the end of a rank whose host is cut off is seen too: after 60 s without a packet, 6 probes 10 s apart. */
static void probe_when_quiet(int fd)
{
    int on = 1, idle = 60, interval = 10, count = 6;
    (void)!setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

static int first_missing(const struct peers *p)
{
    for (int i = p->rank + 1; i < p->world; i++)
        if (p->peer[i].fd < 0)
            return i;
    return -1;
}

/* Takes a connection whose hello is right; any other is closed. */
static void accept_one(struct peers *p)
{
    int fd = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    struct timeval limit = {.tv_sec = HELLO_MS / 1000};
    struct hello hello;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 &&
        recv(fd, &hello, sizeof hello, MSG_WAITALL) == (ssize_t)sizeof hello && hello.nonce == p->nonce &&
        hello.rank > p->rank && hello.rank < p->world && p->peer[hello.rank].fd < 0)
        p->peer[hello.rank].fd = fd;
    else
        close(fd);
}

static int accept_higher(struct peers *p, int timeout_ms, int64_t deadline_ns, struct error *err)
{
    for (int missing; (missing = first_missing(p)) >= 0;) {
        struct pollfd poll_one = {.fd = p->listener, .events = POLLIN};
        int n = poll(&poll_one, 1, clock_left_ms(deadline_ns));
        if (n > 0)
            accept_one(p);
        else if (n == 0)
            return error_set(err, ERR_TIMEOUT, "rank %d did not come to the rendezvous within %d ms", missing,
                             timeout_ms);
        else if (errno != EINTR)
            return error_errno(err, errno, "poll");
    }
    return ERR_OK;
}

int peers_connect(int rank, int world, const char *bind_address, const struct rendezvous *rv, int timeout_ms,
                  struct peers **out, struct error *err)
{
    int64_t deadline = clock_mono_ns() + timeout_ms * NS_PER_MS;
    struct peers *p = calloc(1, sizeof *p + (size_t)world * sizeof p->peer[0]);
    if (!p || !(p->polls = calloc((size_t)world, sizeof *p->polls))) {
        free(p);
        return error_set(err, ERR_NOMEM, "out of memory");
    }
    p->rank = rank;
    p->world = world;
    p->listener = -1;
    p->blamed = -1;
    pthread_mutex_init(&p->lock, NULL);
    for (int i = 0; i < world; i++)
        p->peer[i] = (struct peer){.fd = -1, .said = SAID_NOTHING};
    int rc = getrandom(&p->nonce, sizeof p->nonce, 0) == (ssize_t)sizeof p->nonce
                 ? listen_and_publish(p, bind_address, rv, err)
                 : error_errno(err, errno, "getrandom");
    for (int i = 0; i < rank && !rc; i++)
        rc = connect_to(p, i, rv, deadline, err);
    if (!rc)
        rc = accept_higher(p, timeout_ms, deadline, err);
    for (int i = 0; i < world && !rc; i++)
        if (p->peer[i].fd >= 0)
            probe_when_quiet(p->peer[i].fd);
    if (p->listener >= 0)
        close(p->listener);
    p->listener = -1;
    if (rc) {
        peers_close(p);
        return rc;
    }
    *out = p;
    return ERR_OK;
}

void peers_close(struct peers *p)
{
    if (!p)
        return;
    for (int i = 0; i < p->world; i++)
        if (p->peer[i].fd >= 0)
            close(p->peer[i].fd);
    pthread_mutex_destroy(&p->lock);
    free(p->polls);
    free(p);
}

/* ---- blame --------------------------------------------------------------------------- */

/* Reads what a peer said and whether it has left; what it said comes before its end. */
static void hear(struct peer *peer)
{
    for (;;) {
        int32_t said;
        ssize_t n = recv(peer->fd, &said, sizeof said, MSG_DONTWAIT);
        if (n == (ssize_t)sizeof said) {
            peer->said = said;
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        peer->gone = true;
        return;
    }
}

static void tell_all(struct peers *p, int32_t word)
{
    for (int i = 0; i < p->world; i++)
        if (p->peer[i].fd >= 0 && !p->peer[i].gone)
            (void)!send(p->peer[i].fd, &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Waits for news and hears it; false when there is none within the time. */
static bool wait_for_news(struct peers *p, int timeout_ms)
{
    nfds_t n = 0;
    for (int i = 0; i < p->world; i++)
        p->polls[n++] = (struct pollfd){.fd = p->peer[i].gone ? -1 : p->peer[i].fd, .events = POLLIN};
    if (poll(p->polls, n, timeout_ms) <= 0)
        return false;
    for (int i = 0; i < p->world; i++)
        if (p->polls[i].fd >= 0 && p->polls[i].revents)
            hear(&p->peer[i]);
    return true;
}

static int verdict(const struct peers *p)
{
    for (int i = 0; i < p->world; i++)
        if (p->peer[i].said >= 0 && p->peer[i].said != p->rank)
            return p->peer[i].said;
    for (int i = 0; i < p->world; i++)
        if (p->peer[i].gone && p->peer[i].said == SAID_NOTHING)
            return i;
    return -1;
}

int peers_blame(struct peers *p, int wait_ms)
{
    int64_t deadline = clock_mono_ns() + wait_ms * NS_PER_MS;
    pthread_mutex_lock(&p->lock);
    while (p->blamed < 0) {
        bool news = wait_for_news(p, clock_left_ms(deadline));
        p->blamed = verdict(p);
        if (!news && !clock_left_ms(deadline))
            break;
    }
    int blamed = p->blamed;
    if (blamed >= 0)
        tell_all(p, blamed);
    pthread_mutex_unlock(&p->lock);
    return blamed;
}

void peers_leave(struct peers *p)
{
    pthread_mutex_lock(&p->lock);
    tell_all(p, SAID_LEAVING);
    pthread_mutex_unlock(&p->lock);
}
