/* The rendezvous exchange: attempts, in each a list of keys with their waiters. */
#include "daemon/kv.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/buffer.h"

struct waiter {
    struct waiter *next;
    struct kv_asker asker;
    int64_t deadline_ns;
};

struct entry {
    struct entry *next; /* of its hash bucket */
    uint64_t hash;
    char *group, *key;
    bool set;
    void *value;
    size_t len;
    struct waiter *waiters;
};

enum { BUCKETS = 256 };

struct space { /* one attempt's */
    struct space *next;
    int64_t job;
    int attempt;
    size_t bytes;
    struct entry *buckets[BUCKETS];
};

struct kv {
    struct space *spaces;
    kv_answer_fn answer;
    void *arg;
};

struct kv *kv_create(kv_answer_fn answer, void *arg)
{
    struct kv *kv = calloc(1, sizeof *kv);
    if (kv) {
        kv->answer = answer;
        kv->arg = arg;
    }
    return kv;
}

static void entry_free(struct entry *e)
{
    while (e->waiters) {
        struct waiter *w = e->waiters;
        e->waiters = w->next;
        free(w);
    }
    free(e->group);
    free(e->key);
    free(e->value);
    free(e);
}

static void space_free(struct space *s)
{
    for (int b = 0; b < BUCKETS; b++) {
        while (s->buckets[b]) {
            struct entry *e = s->buckets[b];
            s->buckets[b] = e->next;
            entry_free(e);
        }
    }
    free(s);
}

void kv_free(struct kv *kv)
{
    if (!kv)
        return;
    while (kv->spaces) {
        struct space *s = kv->spaces;
        kv->spaces = s->next;
        space_free(s);
    }
    free(kv);
}

/* FNV-1a over group, a NUL, key. */
static uint64_t hash_of(const char *group, const char *key)
{
    uint64_t h = UINT64_C(14695981039346656037);
    for (const char *s = group; *s; s++)
        h = (h ^ (uint8_t)*s) * UINT64_C(1099511628211);
    h *= UINT64_C(1099511628211);
    for (const char *s = key; *s; s++)
        h = (h ^ (uint8_t)*s) * UINT64_C(1099511628211);
    return h;
}

static struct space *space_of(struct kv *kv, int64_t job, int attempt)
{
    for (struct space *s = kv->spaces; s; s = s->next)
        if (s->job == job && s->attempt == attempt)
            return s;
    struct space *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->job = job;
    s->attempt = attempt;
    s->next = kv->spaces;
    kv->spaces = s;
    return s;
}

/* Charges `bytes` to the attempt, so that a rank gone wild cannot eat the controller. */
static int charge(struct space *s, size_t bytes, struct error *err)
{
    if (s->bytes + bytes > KV_MAX_ATTEMPT_BYTES)
        return error_set(err, ERR_REFUSED, "rendezvous of job %lld attempt %d holds %d MiB already", (long long)s->job,
                         s->attempt, KV_MAX_ATTEMPT_BYTES >> 20);
    s->bytes += bytes;
    return ERR_OK;
}

static int entry_of(struct kv *kv, const struct kv_asker *asker, const char *group, const char *key,
                    struct space **space, struct entry **out, struct error *err)
{
    size_t group_len = strlen(group), key_len = strlen(key);
    if (!key_len || group_len > KV_MAX_NAME || key_len > KV_MAX_NAME)
        return error_set(err, ERR_INVALID, "rendezvous group and key have to be at most %d bytes and the key not empty",
                         KV_MAX_NAME);
    struct space *s = space_of(kv, asker->job, asker->attempt);
    if (!s)
        return error_set(err, ERR_NOMEM, "out of memory");
    *space = s;
    uint64_t hash = hash_of(group, key);
    struct entry **bucket = &s->buckets[hash % BUCKETS];
    for (struct entry *e = *bucket; e; e = e->next) {
        if (e->hash == hash && strcmp(e->group, group) == 0 && strcmp(e->key, key) == 0) {
            *out = e;
            return ERR_OK;
        }
    }
    int rc = charge(s, sizeof(struct entry) + group_len + key_len, err);
    if (rc)
        return rc;
    struct entry *e = calloc(1, sizeof *e);
    if (e) {
        e->group = strdup(group);
        e->key = strdup(key);
    }
    if (!e || !e->group || !e->key) {
        if (e)
            entry_free(e);
        return error_set(err, ERR_NOMEM, "out of memory");
    }
    e->hash = hash;
    e->next = *bucket;
    *bucket = e;
    *out = e;
    return ERR_OK;
}

int kv_set(struct kv *kv, const struct kv_asker *asker, const char *group, const char *key, const void *value,
           size_t len, struct error *err)
{
    struct space *s;
    struct entry *e;
    if (len > LIMIT_KV_VALUE)
        return error_set(err, ERR_INVALID, "rendezvous key %s/%s: %zu bytes, at most %d", group, key, len,
                         LIMIT_KV_VALUE);
    int rc = entry_of(kv, asker, group, key, &s, &e, err);
    if (rc)
        return rc;
    if (e->set) {
        if (e->len == len && (len == 0 || memcmp(e->value, value, len) == 0))
            return ERR_OK;
        return error_set(err, ERR_REFUSED, "rendezvous key %s/%s has another value already", group, key);
    }
    rc = charge(s, len, err);
    if (rc)
        return rc;
    e->value = malloc(len ? len : 1);
    if (!e->value)
        return error_set(err, ERR_NOMEM, "out of memory");
    if (len)
        memcpy(e->value, value, len);
    e->len = len;
    e->set = true;
    while (e->waiters) {
        struct waiter *w = e->waiters;
        e->waiters = w->next;
        s->bytes -= sizeof *w;
        kv->answer(kv->arg, &w->asker, e->value, e->len, NULL);
        free(w);
    }
    return ERR_OK;
}

static bool same_asker(const struct kv_asker *x, const struct kv_asker *y)
{
    return x->id == y->id && x->rank == y->rank && strcmp(x->node, y->node) == 0;
}

int kv_get(struct kv *kv, const struct kv_asker *asker, const char *group, const char *key, int64_t deadline_ns,
           const void **value, size_t *len, struct error *err)
{
    struct space *s;
    struct entry *e;
    int rc = entry_of(kv, asker, group, key, &s, &e, err);
    if (rc)
        return rc;
    if (e->set) {
        *value = e->value;
        *len = e->len;
        return ERR_OK;
    }
    for (struct waiter *w = e->waiters; w; w = w->next) {
        if (same_asker(&w->asker, asker)) {
            w->deadline_ns = deadline_ns;
            return ERR_BUSY;
        }
    }
    rc = charge(s, sizeof(struct waiter), err);
    if (rc)
        return rc;
    struct waiter *w = calloc(1, sizeof *w);
    if (!w)
        return error_set(err, ERR_NOMEM, "out of memory");
    w->asker = *asker;
    w->deadline_ns = deadline_ns;
    w->next = e->waiters;
    e->waiters = w;
    return ERR_BUSY;
}

static int64_t expire_entry(struct kv *kv, struct space *s, struct entry *e, int64_t now_ns)
{
    int64_t next = INT64_MAX;
    for (struct waiter **at = &e->waiters; *at;) {
        struct waiter *w = *at;
        if (w->deadline_ns > now_ns) {
            if (w->deadline_ns < next)
                next = w->deadline_ns;
            at = &w->next;
            continue;
        }
        *at = w->next;
        s->bytes -= sizeof *w;
        char text[KV_MAX_NAME * 2 + 64];
        snprintf(text, sizeof text, "nobody set %s/%s in time", e->group, e->key);
        kv->answer(kv->arg, &w->asker, NULL, 0, text);
        free(w);
    }
    return next;
}

int64_t kv_expire(struct kv *kv, int64_t now_ns)
{
    int64_t next = INT64_MAX;
    for (struct space *s = kv->spaces; s; s = s->next) {
        for (int b = 0; b < BUCKETS; b++) {
            for (struct entry *e = s->buckets[b]; e; e = e->next) {
                int64_t due = expire_entry(kv, s, e, now_ns);
                if (due < next)
                    next = due;
            }
        }
    }
    return next;
}

void kv_drop(struct kv *kv, int64_t job, int attempt, const char *why)
{
    for (struct space **at = &kv->spaces; *at; at = &(*at)->next) {
        struct space *s = *at;
        if (s->job != job || s->attempt != attempt)
            continue;
        *at = s->next;
        for (int b = 0; b < BUCKETS; b++)
            for (struct entry *e = s->buckets[b]; e; e = e->next)
                for (struct waiter *w = e->waiters; w; w = w->next)
                    kv->answer(kv->arg, &w->asker, NULL, 0, why);
        space_free(s);
        return;
    }
}
