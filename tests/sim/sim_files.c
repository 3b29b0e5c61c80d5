/* The checkpoint directories, on the file system that all nodes share, and the work on
 * files that agents do for the controller. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

struct saved *saved_find(struct sim *s, int64_t job, int64_t step, int attempt)
{
    for (int i = s->n_saved - 1; i >= 0; i--)
        if (s->saved[i].job == job && s->saved[i].step == step && s->saved[i].attempt == attempt)
            return &s->saved[i];
    return NULL;
}

bool saved_name(const char *dir, int64_t *job, int64_t *step, int *attempt)
{
    const char *j = strstr(dir, MEM_STORE_ID "-");
    const char *n = strstr(dir, "/step-");
    const char *k = n ? strstr(n, ".a") : NULL;
    if (!j || !k)
        return false;
    *job = strtoll(j + strlen(MEM_STORE_ID) + 1, NULL, 10);
    *step = strtoll(n + 6, NULL, 10);
    *attempt = (int)strtol(k + 2, NULL, 10);
    return true;
}

void saved_shard(struct sim *s, int64_t job, int64_t step, int attempt, int world, int rank)
{
    struct saved *k = saved_find(s, job, step, attempt);
    if (!k) {
        if (s->n_saved == s->cap_saved) {
            s->cap_saved = s->cap_saved ? 2 * s->cap_saved : 32;
            s->saved = realloc(s->saved, (size_t)s->cap_saved * sizeof *s->saved);
            if (!s->saved)
                abort();
        }
        k = &s->saved[s->n_saved++];
        *k = (struct saved){.job = job, .step = step, .attempt = attempt, .world = world};
    }
    k->shard[rank] = true;
}

bool saved_whole(const struct saved *k)
{
    for (int i = 0; i < k->world; i++)
        if (!k->shard[i])
            return false;
    return true;
}

static void saved_remove(struct sim *s, struct saved *k)
{
    *k = s->saved[--s->n_saved];
}

/* ---- tasks ---- */

static struct saved *saved_of(struct sim *s, const char *dir)
{
    int64_t job, step;
    int attempt;
    return saved_name(dir, &job, &step, &attempt) ? saved_find(s, job, step, attempt) : NULL;
}

static int work(struct sim *s, const struct sim_node *n, const Boost__Task *t)
{
    struct saved *k;
    switch (t->body_case) {
    case BOOST__TASK__BODY_VERIFY:
        k = saved_of(s, t->verify->dir);
        if (!k)
            return ERR_NOT_FOUND;
        return k->damaged || !k->manifest || !saved_whole(k) ? ERR_CORRUPT : ERR_OK;
    case BOOST__TASK__BODY_WRITE_MANIFEST:
        k = saved_of(s, t->write_manifest->dir);
        if (n->disk_full)
            return ERR_NOSPACE;
        if (!k || !saved_whole(k))
            return ERR_NOT_FOUND;
        k->manifest = true;
        return ERR_OK;
    case BOOST__TASK__BODY_DELETE_CHECKPOINT:
        k = saved_of(s, t->delete_checkpoint->dir);
        if (!k)
            return ERR_NOT_FOUND;
        check_delete(s, k);
        saved_remove(s, k);
        return ERR_OK;
    default:
        return ERR_OK;
    }
}

static void reply(struct sim *s, struct sim_node *n, uint64_t id, int code)
{
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__Failure f = BOOST__FAILURE__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_id = true;
    r.id = id;
    if (code) {
        f.has_code = true;
        f.code = code;
        f.message = (char *)(uintptr_t) "so the file system says";
        r.failure = &f;
    }
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK;
    m.task = &r;
    if (n->registered)
        link_up(s, n, &m);
}

static void done(struct sim *s, struct event *e)
{
    struct sim_node *n = &s->nodes[e->node];
    if (!n->agent_up || n->instance != e->guard)
        return;
    Boost__Task *t = boost__task__unpack(NULL, e->len, e->data);
    if (!t)
        abort();
    int code = work(s, n, t);
    trace(s, "%s: task %llu (%s): %s", n->name, (unsigned long long)t->id,
          protobuf_c_message_descriptor_get_field(t->base.descriptor, t->body_case)->name, code ? "fails" : "done");
    reply(s, n, t->id, code);
    boost__task__free_unpacked(t, NULL);
}

void file_task(struct sim *s, struct sim_node *n, const Boost__Task *t)
{
    size_t len = boost__task__get_packed_size(t);
    uint8_t *bytes = malloc(len + 1);
    if (!bytes)
        abort();
    boost__task__pack(t, bytes);
    int64_t takes = one_in(s, 30) && !s->healed ? between(s, 5 * S, 90 * S) : between(s, 2 * MS, 500 * MS);
    struct event *e = at(s, s->now + takes, done, "task");
    e->node = n->index;
    e->guard = n->instance;
    e->data = bytes;
    e->len = len;
}
