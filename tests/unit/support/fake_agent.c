/* fake_agent.h */
#include "tests/unit/support/fake_agent.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/frame.h"
#include "proto/worker.pb-c.h"

enum { MAX_CLIENTS = 64, MAX_KEYS = 1024, KEY_TEXT = 160 };

struct client {
    int fd;
    struct buffer in;
    Boost__RankRequest *waiting; /* a GET whose key is not there yet */
    int64_t deadline_ns;
};
struct pair {
    char key[KEY_TEXT];
    uint8_t *value;
    size_t len;
};
struct fake_agent {
    pthread_t thread;
    int listener;
    int stop[2];
    int drop; /* atomic */
    struct client clients[MAX_CLIENTS];
    int n_clients;
    struct pair pairs[MAX_KEYS];
    int n_pairs;
};

static void key_of(char out[KEY_TEXT], const Boost__RankRequest *r)
{
    snprintf(out, KEY_TEXT, "%lld/%d/%s/%s", (long long)r->job, r->attempt, r->op->group, r->op->key);
}

static struct pair *find(struct fake_agent *a, const char *key)
{
    for (int i = 0; i < a->n_pairs; i++)
        if (!strcmp(a->pairs[i].key, key))
            return &a->pairs[i];
    return NULL;
}

static void answer(struct client *c, uint64_t id, const struct pair *value, const char *error)
{
    Boost__RankReply reply = BOOST__RANK_REPLY__INIT;
    Boost__KvResult result = BOOST__KV_RESULT__INIT;
    reply.has_id = result.has_ok = true;
    reply.id = id;
    reply.result = &result;
    result.ok = !error;
    result.error = (char *)(uintptr_t)error;
    if (value) {
        result.has_value = true;
        result.value.data = value->value;
        result.value.len = value->len;
    }
    struct buffer out;
    buffer_init(&out, LIMIT_FRAME + FRAME_HEADER);
    if (!frame_append(&out, &reply.base, NULL) && send(c->fd, out.data, out.len, MSG_NOSIGNAL) != (ssize_t)out.len)
        shutdown(c->fd, SHUT_RDWR);
    buffer_free(&out);
}

static void store(struct fake_agent *a, const char *key, const ProtobufCBinaryData *value)
{
    struct pair *p = find(a, key);
    if (!p && a->n_pairs == MAX_KEYS)
        abort();
    if (!p)
        p = &a->pairs[a->n_pairs++];
    free(p->value);
    snprintf(p->key, sizeof p->key, "%s", key);
    p->value = malloc(value->len + 1);
    p->len = value->len;
    if (value->len)
        memcpy(p->value, value->data, value->len);
}

/* Answers waiting GETs whose key came or whose time is over. */
static void settle(struct fake_agent *a)
{
    for (int i = 0; i < a->n_clients; i++) {
        struct client *c = &a->clients[i];
        if (!c->waiting)
            continue;
        char key[KEY_TEXT], text[KEY_TEXT + 32];
        key_of(key, c->waiting);
        const struct pair *p = find(a, key);
        snprintf(text, sizeof text, "key %s never came", c->waiting->op->key);
        if (p)
            answer(c, c->waiting->id, p, NULL);
        else if (clock_mono_ns() >= c->deadline_ns)
            answer(c, c->waiting->id, NULL, text);
        else
            continue;
        boost__rank_request__free_unpacked(c->waiting, NULL);
        c->waiting = NULL;
    }
}

/* False: close the connection. */
static bool handle(struct fake_agent *a, struct client *c, const uint8_t *payload, size_t len)
{
    Boost__RankRequest *r = boost__rank_request__unpack(NULL, len, payload);
    if (!r || !r->op || (__atomic_load_n(&a->drop, __ATOMIC_RELAXED) && !__atomic_sub_fetch(&a->drop, 1, __ATOMIC_RELAXED))) {
        if (r)
            boost__rank_request__free_unpacked(r, NULL);
        return false;
    }
    char key[KEY_TEXT];
    key_of(key, r);
    if (r->op->kind == BOOST__KV_OP__KIND__SET) {
        store(a, key, &r->op->value);
        answer(c, r->id, NULL, NULL);
        boost__rank_request__free_unpacked(r, NULL);
    } else {
        c->waiting = r;
        c->deadline_ns = clock_mono_ns() + r->op->timeout_ms * NS_PER_MS;
    }
    settle(a);
    return true;
}

static bool receive(struct fake_agent *a, struct client *c)
{
    uint8_t *at = buffer_reserve(&c->in, 65536);
    ssize_t n = at ? recv(c->fd, at, 65536, MSG_DONTWAIT) : -1;
    if (n <= 0)
        return false;
    c->in.len += (size_t)n;
    const uint8_t *payload;
    size_t len, used;
    while (!frame_next(c->in.data, c->in.len, &payload, &len, &used, NULL) && used) {
        if (!handle(a, c, payload, len))
            return false;
        buffer_consume(&c->in, used);
    }
    return true;
}

static void drop_client(struct fake_agent *a, int i)
{
    struct client *c = &a->clients[i];
    close(c->fd);
    buffer_free(&c->in);
    if (c->waiting)
        boost__rank_request__free_unpacked(c->waiting, NULL);
    *c = a->clients[--a->n_clients];
}

static void *serve(void *arg)
{
    struct fake_agent *a = arg;
    for (;;) {
        struct pollfd p[MAX_CLIENTS + 2] = {{a->stop[0], POLLIN, 0}, {a->listener, POLLIN, 0}};
        int n = a->n_clients;
        for (int i = 0; i < n; i++)
            p[i + 2] = (struct pollfd){a->clients[i].fd, POLLIN, 0};
        poll(p, (nfds_t)n + 2, 20); /* wakes up for the deadlines of GETs */
        if (p[0].revents)
            return NULL;
        for (int i = n - 1; i >= 0; i--)
            if (p[i + 2].revents && !receive(a, &a->clients[i]))
                drop_client(a, i);
        if (p[1].revents && a->n_clients < MAX_CLIENTS) {
            struct client *c = &a->clients[a->n_clients];
            *c = (struct client){.fd = accept4(a->listener, NULL, NULL, SOCK_CLOEXEC)};
            buffer_init(&c->in, LIMIT_FRAME * 2);
            if (c->fd >= 0)
                a->n_clients++;
        }
        settle(a);
    }
}

struct fake_agent *fake_agent_start(const char *socket_path)
{
    struct fake_agent *a = calloc(1, sizeof *a);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path);
    a->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(socket_path);
    if (a->listener < 0 || bind(a->listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(a->listener, MAX_CLIENTS) < 0 || pipe2(a->stop, O_CLOEXEC) < 0 ||
        pthread_create(&a->thread, NULL, serve, a)) {
        perror("fake agent");
        free(a);
        return NULL;
    }
    return a;
}

void fake_agent_drop(struct fake_agent *a, int nth)
{
    __atomic_store_n(&a->drop, nth, __ATOMIC_RELAXED);
}

void fake_agent_stop(struct fake_agent *a)
{
    close(a->stop[1]);
    pthread_join(a->thread, NULL);
    while (a->n_clients)
        drop_client(a, 0);
    for (int i = 0; i < a->n_pairs; i++)
        free(a->pairs[i].value);
    close(a->stop[0]);
    close(a->listener);
    free(a);
}
