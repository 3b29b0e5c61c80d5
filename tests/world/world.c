#include "tests/world/world.h"

#include <poll.h>

static int64_t world_mono(void *arg)
{
    return ((struct world *)arg)->now;
}

int64_t world_wall(void *arg)
{
    return ((struct world *)arg)->now + ((struct world *)arg)->wall_offset;
}

static uint64_t world_random(void *arg)
{
    struct world *w = arg;
    w->seed ^= w->seed << 13;
    w->seed ^= w->seed >> 7;
    w->seed ^= w->seed << 17;
    return w->seed;
}

static void world_changed(void *arg, int64_t job)
{
    (void)job;
    ((struct world *)arg)->changed++;
}

static void world_log(void *arg, enum core_log_level level, const char *text)
{
    struct world *w = arg;
    if (getenv("CORE_TRACE"))
        fprintf(stderr, "%9.3f %d %s\n", (double)w->now / 1e9, (int)level, text);
}

void boot(struct world *w)
{
    struct error err;
    assert_null(w->core);
    if (core_create(&w->config, &w->api, &w->ops, &w->core, &err))
        fail_msg("core_create: %s", err.message);
}

struct world *world_new(void)
{
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->store = mem_new();
    w->store_id = MEM_STORE_ID;
    w->now = 1000 * NS_PER_S;
    w->wall_offset = INT64_C(1700000000) * NS_PER_S;
    w->seed = 88172645463325252ULL;
    boost__boostd_config__init(&w->config);
    w->api = mem_api(w->store);
    w->ops = (struct core_ops){.arg = w,
                               .mono_ns = world_mono,
                               .wall_ns = world_wall,
                               .random = world_random,
                               .send = world_send,
                               .changed = world_changed,
                               .log = world_log,
                               .uid = 500};
    boot(w);
    return w;
}

void queue_drop(struct world *w)
{
    while (w->queue) {
        struct queued *q = w->queue;
        w->queue = q->next;
        free(q->bytes);
        free(q);
    }
}

void world_free(struct world *w)
{
    mem_crash(w->store);
    core_destroy(w->core);
    queue_drop(w);
    mem_free(w->store);
    free(w);
}

void deliver_one(struct world *w)
{
    struct queued *q = w->queue;
    w->queue = q->next;
    struct fake_agent *a = agent_of(w, q->node);
    if (a->connected && w->core) {
        Boost__AgentMessage *m = boost__agent_message__unpack(NULL, q->len, q->bytes);
        assert_non_null(m);
        core_agent_message(w->core, q->node, m);
        boost__agent_message__free_unpacked(m, NULL);
    }
    free(q->bytes);
    free(q);
}

static bool settle(struct world *w)
{
    if (!w->real)
        return mem_settle(w->store);
    struct pollfd p = {.fd = store_fd(w->real), .events = POLLIN};
    if (poll(&p, 1, 120) <= 0)
        return false;
    store_dispatch(w->real);
    return true;
}

void pump(struct world *w)
{
    for (int i = 0; i < 10000; i++) {
        bool moved = false;
        core_run(w->core);
        if (w->queue) {
            deliver_one(w);
            moved = true;
        }
        moved = settle(w) || moved;
        if (!moved && core_run(w->core) > w->now)
            return;
    }
    fail_msg("the core never comes to rest");
}

static void beat(struct world *w)
{
    for (int i = 0; i < w->n_agents; i++) {
        struct fake_agent *a = &w->agents[i];
        if (!a->connected || !a->beating || w->now < a->next_beat)
            continue;
        Boost__Heartbeat h = BOOST__HEARTBEAT__INIT;
        Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
        m.body_case = BOOST__AGENT_MESSAGE__BODY_HEARTBEAT;
        m.heartbeat = &h;
        say(w, a->name, &m);
        a->next_beat = w->now + NS_PER_S;
    }
}

void advance(struct world *w, int64_t ms)
{
    int64_t until = w->now + ms * NS_PER_MS;
    pump(w);
    while (w->now < until) {
        int64_t due = core_run(w->core);
        int64_t next = w->now + 500 * NS_PER_MS;
        if (due < next)
            next = due;
        if (next > until)
            next = until;
        if (next <= w->now)
            next = w->now + NS_PER_MS;
        w->now = next;
        beat(w);
        pump(w);
    }
}

struct fake_agent *agent_add(struct world *w, const char *name, int slots)
{
    struct fake_agent *a = &w->agents[w->n_agents++];
    memset(a, 0, sizeof *a);
    snprintf(a->name, sizeof a->name, "%s", name);
    snprintf(a->boot, sizeof a->boot, "boot-%s-1", name);
    snprintf(a->instance, sizeof a->instance, "instance-%s-1", name);
    a->slots = slots;
    a->beating = a->obeys_kill = a->obeys_term = a->answers = true;
    a->next_beat = w->now;
    return a;
}

int try_register(struct world *w, struct fake_agent *a, struct error *err)
{
    Boost__Register r = BOOST__REGISTER__INIT;
    Boost__LiveAttempt live[256];
    Boost__LiveAttempt *list[256];
    r.node = a->name;
    r.boot_id = a->boot;
    r.instance = a->instance;
    r.has_cpu_slots = r.has_memory_mib = r.has_uid = 1;
    r.cpu_slots = a->slots;
    r.has_cores = a->cores > 0;
    r.cores = a->cores;
    r.memory_mib = 4096;
    r.uid = a->uid;
    r.data_address = (char *)(uintptr_t) "127.0.0.1";
    r.attempts = list;
    r.devices = a->gpus_unknown ? NULL : gpu_report(a);
    for (int i = 0; i < a->n_attempts; i++) {
        struct fake_attempt *x = &a->attempts[i];
        if (x->forgotten)
            continue;
        Boost__LiveAttempt *l = &live[r.n_attempts];
        boost__live_attempt__init(l);
        l->has_job = l->has_attempt = l->has_alive = 1;
        l->job = x->job;
        l->attempt = x->attempt;
        l->store_id = (char *)(uintptr_t)w->store_id;
        l->alive = x->alive || x->epilog;
        l->has_epilog = 1;
        l->epilog = x->epilog;
        l->n_ranks = (size_t)x->n_ranks;
        l->ranks = x->ranks;
        l->has_cuda = 1;
        l->cuda = x->cuda;
        list[r.n_attempts++] = l;
    }
    a->connected = true;
    int rc = core_agent_register(w->core, &r, err);
    if (rc)
        return rc;
    a->next_beat = w->now + NS_PER_S;
    /* What is owed goes again. */
    for (int i = 0; i < a->n_attempts; i++) {
        struct fake_attempt *x = &a->attempts[i];
        for (int k = 0; k < x->n_ranks && !x->forgotten; k++)
            if (x->ended[k] && !x->end_acked[k])
                say_end_of(w, a, x, k, x->ends[k]);
        if (!x->forgotten && !x->alive && !x->epilog && !x->node_end_acked)
            say_node_end(w, a, x);
    }
    return ERR_OK;
}

void join_world(struct world *w, struct fake_agent *a)
{
    struct error err;
    if (try_register(w, a, &err))
        fail_msg("register: %s", err.message);
}

void disconnect(struct world *w, struct fake_agent *a)
{
    if (a->connected && w->core)
        core_agent_disconnected(w->core, a->name);
    a->connected = false;
}

void controller_restart(struct world *w)
{
    mem_crash(w->store);
    core_destroy(w->core);
    w->core = NULL;
    queue_drop(w);
    for (int i = 0; i < w->n_agents; i++)
        w->agents[i].connected = false;
    boot(w);
}

void on_submit(void *arg, int rc, const struct error *err, int64_t job)
{
    struct world *w = arg;
    w->replies++;
    w->reply_rc = rc;
    w->reply_job = job;
    snprintf(w->reply_text, sizeof w->reply_text, "%s", rc ? err->message : "");
    snprintf(w->reply_hint, sizeof w->reply_hint, "%s", rc ? err->hint : "");
}

void on_control(void *arg, int rc, const struct error *err, const char *text)
{
    struct world *w = arg;
    w->replies++;
    w->reply_rc = rc;
    snprintf(w->reply_text, sizeof w->reply_text, "%s", rc ? err->message : text);
}

int64_t submit_spec(struct world *w, const Boost__JobSpec *spec, bool held)
{
    w->reply_rc = -1;
    core_submit(w->core, spec, &user_ann, held, on_submit, w);
    pump(w);
    return w->reply_rc == ERR_OK ? w->reply_job : 0;
}

int64_t submit(struct world *w)
{
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t id = submit_spec(w, spec_new(&mem), false);
    arena_free(&mem);
    if (!id)
        fail_msg("submit: %d %s", w->reply_rc, w->reply_text);
    return id;
}

int control(struct world *w, Boost__ControlRequest__Verb verb, int64_t job, bool now)
{
    w->reply_rc = -1;
    core_control(w->core, verb, job, now, &user_ann, on_control, w);
    pump(w);
    return w->reply_rc;
}

struct job *job_of(struct world *w, int64_t id)
{
    struct job *job = core_job(w->core, id);
    assert_non_null(job);
    return job;
}

const struct store_event *event_of(struct world *w, int64_t job, const char *kind)
{
    for (int i = w->store->n_events - 1; i >= 0; i--)
        if (w->store->events[i].job == job && strcmp(w->store->events[i].kind, kind) == 0)
            return &w->store->events[i];
    return NULL;
}

int count_events(struct world *w, int64_t job, const char *kind)
{
    int n = 0;
    for (int i = 0; i < w->store->n_events; i++)
        n += w->store->events[i].job == job && strcmp(w->store->events[i].kind, kind) == 0;
    return n;
}

struct fake_attempt *newest(struct world *w, struct fake_agent *a, int64_t job)
{
    struct fake_attempt *x = fake_find(a, job, job_of(w, job)->n_attempts);
    assert_non_null(x);
    return x;
}

struct fake_attempt *run_job(struct world *w, struct fake_agent *a, int64_t *id)
{
    *id = submit(w);
    pump(w);
    assert_state(w, *id, STARTING);
    struct fake_attempt *x = newest(w, a, *id);
    say_step(w, a, x, x->from_step + 1);
    pump(w);
    assert_state(w, *id, RUNNING);
    return x;
}

struct fake_attempt *recovered(struct world *w, struct fake_agent *a, int64_t id)
{
    for (int i = 0; i < 2000 && job_of(w, id)->state == STATE(RECOVERING); i++)
        advance(w, 250);
    assert_state(w, id, STARTING);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, x->from_step + 1);
    pump(w);
    assert_state(w, id, RUNNING);
    return x;
}
