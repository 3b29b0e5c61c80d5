/* What agents say: registering, and the dispatch of every other message to what it
 * is about. A report of an attempt that is not live is refused here. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core_internal.h"
#include "proto/validate.h"

enum { SLOTS_MAX = 1 << 20, MEMORY_MAX_MIB = 1 << 30 }; /* sums over all nodes and products of them fit */
enum { DOING_MAX_MS = 7 * 86400 * 1000 };

/* ---- registering ------------------------------------------------------------------------ */

static struct attempt_part *live_part(struct core *c, const char *node, int64_t job_id, int attempt, struct job **job,
                                      struct attempt **a)
{
    *job = core_job(c, job_id);
    *a = *job ? job_live_attempt(*job) : NULL;
    if (!*a || (*a)->number != attempt)
        return NULL;
    for (int p = 0; p < (*a)->n_parts; p++)
        if (strcmp((*a)->parts[p].node, node) == 0)
            return &(*a)->parts[p];
    return NULL;
}

/* An attempt of the list that is live under the name of another node, which is away: one whose agent may have changed
 * its name. Verdicts go by names, and the one for a stranger's attempt kills. */
static const struct attempt_part *of_another_name(struct core *c, const Boost__Register *m, const Boost__LiveAttempt *x)
{
    struct job *job;
    struct attempt *a;
    if ((x->store_id && strcmp(x->store_id, core_store_id(c)) != 0) ||
        live_part(c, m->node, x->job, x->attempt, &job, &a) || !a || a->number != x->attempt)
        return NULL;
    for (int p = 0; p < a->n_parts; p++) {
        const struct node *n = node_find(c, a->parts[p].node);
        if (n && !n->connected && !a->parts[p].gone && !a->parts[p].lost)
            return &a->parts[p];
    }
    return NULL;
}

static int check_names(struct core *c, const Boost__Register *m, struct error *err)
{
    for (size_t i = 0; i < m->n_attempts; i++) {
        const Boost__LiveAttempt *x = m->attempts[i];
        const struct attempt_part *part = of_another_name(c, m, x);
        if (!part)
            continue;
        error_set(err, ERR_REFUSED, "node %s has attempt %" PRId64 ".%d, which was placed on node %s, and that is away",
                  m->node, x->job, x->attempt, part->node);
        error_hint(err,
                   "start this agent with --node %s until its jobs are over; once %s is DOWN, %s is taken and the "
                   "attempt is killed there",
                   part->node, part->node, m->node);
        return ERR_REFUSED;
    }
    return ERR_OK;
}

static int check_register(struct core *c, const Boost__Register *m, struct error *err)
{
    if (!m->node || !validate_name(m->node))
        return error_set(err, ERR_PROTOCOL, "an agent registers without a valid node name");
    if (!m->boot_id || !*m->boot_id || !m->instance || !*m->instance || m->cpu_slots < 1 || m->cpu_slots > SLOTS_MAX ||
        m->memory_mib < 0 || m->memory_mib > MEMORY_MAX_MIB)
        return error_set(err, ERR_PROTOCOL, "agent of node %s registers without boot id, instance, devices or memory",
                         m->node);
    const struct node *n = node_find(c, m->node);
    if (n && n->connected && n->liveness == LIVENESS(UP) && n->instance && strcmp(n->instance, m->instance) != 0) {
        error_set(err, ERR_REFUSED, "another agent of node %s is connected", m->node);
        error_hint(err, "give each agent its own node name (node in agent.conf), or stop the other one");
        return ERR_REFUSED;
    }
    return check_names(c, m, err);
}

static const Boost__LiveAttempt *listed(const Boost__Register *m, const char *store_id, int64_t job, int attempt)
{
    for (size_t i = 0; i < m->n_attempts; i++) {
        const Boost__LiveAttempt *x = m->attempts[i];
        if (x->job == job && x->attempt == attempt && (!x->store_id || strcmp(x->store_id, store_id) == 0))
            return x;
    }
    return NULL;
}

/* It has ended, and the row that says so is not on the disk yet: after a crash its agent has to tell it again. */
static bool ending(struct core *c, int64_t job_id, int attempt)
{
    const struct job *job = core_job(c, job_id);
    const struct attempt *a = job ? job_attempt(job, attempt) : NULL;
    return a && a->end_ns && job->unsettled;
}

static Boost__Verdict__What verdict(struct core *c, const struct node *n, const Boost__LiveAttempt *x)
{
    struct job *job;
    struct attempt *a;
    const struct attempt_part *part = live_part(c, n->name, x->job, x->attempt, &job, &a);
    if (part && !part->lost && !part->gone)
        return BOOST__VERDICT__WHAT__KEEP;
    if (x->alive && x->epilog)
        return BOOST__VERDICT__WHAT__KEEP; /* nothing is left to kill, and its NodeEnd is answered with a ForgetAttempt */
    if (x->alive)
        return BOOST__VERDICT__WHAT__FENCE;
    if (ending(c, x->job, x->attempt))
        return BOOST__VERDICT__WHAT__KEEP;
    /* Lost with the node and now confirmed: its attempt may still be open for other nodes' sake. */
    return BOOST__VERDICT__WHAT__FORGET;
}

/* What takes the node's devices, from what the agent lists and what the core has begun there. */
static void rebuild_holdings(struct core *c, struct node *n, const Boost__Register *m)
{
    const char *store_id = core_store_id(c);
    for (int i = n->n_holdings - 1; i >= 0; i--) {
        struct job *job;
        struct attempt *a;
        struct holding *h = &n->holdings[i];
        const struct attempt_part *part = live_part(c, n->name, h->job, h->attempt, &job, &a);
        h->kill_due = 0; /* what was sent may be lost: sent again below */
        h->epilog = false;
        if (h->reserved || h->spare || (part && !part->gone && !part->lost) || listed(m, store_id, h->job, h->attempt))
            continue;
        node_release(c, n, h->job, h->attempt);
    }
    for (size_t i = 0; i < m->n_attempts; i++) {
        const Boost__LiveAttempt *x = m->attempts[i];
        bool ours = !x->store_id || strcmp(x->store_id, store_id) == 0;
        if (!x->alive) {
            if (ours) /* nothing of it runs; its NodeEnd says the rest */
                node_release(c, n, x->job, x->attempt);
            continue;
        }
        /* Another store's attempt takes devices too: its job number is kept apart by its sign. */
        struct holding *h =
            node_hold(n, ours ? x->job : -x->job, x->attempt, x->cuda ? SCHED_GPU : SCHED_CPU, (int)x->n_ranks);
        /* Drained by an earlier run of the controller: what it waited for is among these. */
        if (h && ours && verdict(c, n, x) == BOOST__VERDICT__WHAT__FENCE && n->admin == ADMIN(DRAINING))
            h->overdue = true;
        if (h && ours && x->epilog) { /* that it is dead is confirmed with this */
            h->epilog = true;
            h->overdue = false;
        }
    }
    spares_give_way(c, n);
    node_undrain(c, n);
    node_emptied(c, n);
}

static void send_registered(struct core *c, struct node *n, const Boost__Register *m)
{
    Boost__Registered body = BOOST__REGISTERED__INIT;
    Boost__ControllerMessage message = BOOST__CONTROLLER_MESSAGE__INIT;
    Boost__Verdict *verdicts = calloc(m->n_attempts + 1, sizeof *verdicts);
    Boost__Verdict **list = calloc(m->n_attempts + 1, sizeof *list);
    char store_id[16];
    snprintf(store_id, sizeof store_id, "%s", core_store_id(c));
    for (size_t i = 0; verdicts && list && i < m->n_attempts; i++) {
        const Boost__LiveAttempt *x = m->attempts[i];
        if (x->store_id && strcmp(x->store_id, store_id) != 0)
            continue;
        Boost__Verdict *v = &verdicts[body.n_verdicts];
        boost__verdict__init(v);
        v->has_job = v->has_attempt = v->has_what = true;
        v->job = x->job;
        v->attempt = x->attempt;
        v->what = verdict(c, n, x);
        list[body.n_verdicts++] = v;
        struct holding *h = node_holding(n, x->job, x->attempt);
        if (v->what == BOOST__VERDICT__WHAT__FENCE && h)
            holding_kill_sent(c, h);
    }
    body.store_id = store_id;
    body.has_heartbeat_ms = true;
    body.heartbeat_ms = (int32_t)(c->heartbeat_ns / NS_PER_MS);
    body.verdicts = list;
    message.body_case = BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED;
    message.registered = &body;
    send_to(c, n, &message);
    free(verdicts);
    free(list);
}

/* An adopted store is behind: what it does not know of was begun since, and its numbers are taken. That counts until a
 * job is begun here: a node that makes numbers up has others skipped no more than once. */
static void learn_numbers(struct core *c, const Boost__Register *m)
{
    if (!c->adopted)
        return;
    for (size_t i = 0; i < m->n_attempts; i++) {
        const Boost__LiveAttempt *x = m->attempts[i];
        if (x->store_id && strcmp(x->store_id, core_store_id(c)) != 0)
            continue;
        struct job *job = core_job(c, x->job);
        if (job && !job->searched && x->attempt > job->attempt_floor && x->attempt <= job->n_attempts + CORE_ADOPTED_GAP)
            job->attempt_floor = x->attempt;
        if (x->job >= c->next_job_id && x->job < c->learn_below)
            c->next_job_id = x->job + 1;
    }
}

/* The parts of live attempts here: go on, begin after all, or gone. */
static void reconcile(struct core *c, struct node *n, const Boost__Register *m)
{
    for (struct job *job = c->busy.head, *next; job; job = next) {
        next = job->busy.next;
        struct attempt *a = job_live_attempt(job);
        for (int p = 0; a && p < a->n_parts; p++) {
            struct attempt_part *part = &a->parts[p];
            if (strcmp(part->node, n->name) != 0 || part->gone || part->lost)
                continue;
            if (listed(m, core_store_id(c), job->id, a->number)) {
                part->heard = true;
                if (job->unsettled == 0 || a->kill)
                    attempt_send(c, job, ACT_KILL | ACT_STOP_TERM, n->name);
            } else if (job->state == STATE(STARTING) && !part->heard && !a->kill) {
                /* Never got there, or nothing came of it. */
                attempt_send(c, job, ACT_START, n->name);
            } else {
                attempt_part_over(c, job, a, n->name, false, "its agent came back without the attempt");
            }
            break;
        }
    }
}

static void say_up(struct core *c, struct node *n, bool rebooted)
{
    char gpus[128] = "";
    if (n->gpus)
        snprintf(gpus, sizeof gpus, "%d GPU%s (%.60s), ", n->gpus, n->gpus == 1 ? "" : "s", n->gpu_name);
    add_event(c, NULL, 0, n->name, "controller", "node-up", "%s is up: %s%d %s%s%s", n->name, gpus, n->cpu_slots,
              n->gpus ? "CPU slot" : "device", n->cpu_slots == 1 ? "" : "s", rebooted ? ", rebooted" : "");
}

int core_agent_register(struct core *c, const Boost__Register *msg, struct error *err)
{
    int rc = check_register(c, msg, err);
    if (rc)
        return rc;
    struct node *n = node_get(c, msg->node);
    if (!n)
        return error_set(err, ERR_NOMEM, "out of memory");
    bool rebooted = n->boot_id && *n->boot_id && strcmp(n->boot_id, msg->boot_id) != 0;
    Boost__NodeLiveness__Value was = n->liveness;
    bool another = !n->instance || strcmp(n->instance, msg->instance) != 0;
    bool changed = rebooted || !n->boot_id || !*n->boot_id || n->cpu_slots != msg->cpu_slots || n->uid != msg->uid ||
                   n->memory_mib != msg->memory_mib;
    n->connected = false; /* of an earlier connection that may not have been seen to break */
    tasks_lost(c, n);
    text_set(&n->boot_id, msg->boot_id);
    text_set(&n->instance, msg->instance);
    text_set(&n->version, msg->version);
    text_set(&n->data_address, msg->data_address);
    n->cpu_slots = msg->cpu_slots;
    n->cores = msg->has_cores && msg->cores > 0 ? msg->cores : 0;
    n->memory_mib = msg->memory_mib;
    n->uid = msg->uid;
    n->connected = true;
    n->registered = true;
    n->liveness = LIVENESS(UP);
    n->last_seen = now_mono(c);
    if (changed)
        mark_node(c, n);
    picture_forget(c);
    node_told(n, msg);
    node_devices(c, n, msg->devices);
    if (was != LIVENESS(UP) && was != LIVENESS(SUSPECT))
        say_up(c, n, rebooted);
    learn_numbers(c, msg);
    rebuild_holdings(c, n, msg);
    node_health(c, n, msg->health);
    send_registered(c, n, msg);
    if (was == LIVENESS(DOWN))
        (void)node_recheck(c, n, false);
    reconcile(c, n, msg);
    if (another)
        mirrors_hurry(c);
    checkpoints_hurry(c);
    c->schedule = true;
    c->work = true;
    due_at(c, n->last_seen + c->suspect_ns);
    change_commit(c);
    return ERR_OK;
}

void core_agent_disconnected(struct core *c, const char *node)
{
    struct node *n = node_find(c, node);
    if (!n || !n->connected)
        return;
    n->connected = false;
    n->cut_since = now_mono(c);
    for (int i = 0; i < n->n_holdings; i++)
        n->holdings[i].kill_due = 0;
    tasks_lost(c, n);
    c->schedule = true;
    change_commit(c);
}

/* ---- stale reports ------------------------------------------------------------------------- */

void send_forget(struct core *c, struct node *n, int64_t job, int attempt)
{
    Boost__ForgetAttempt body = BOOST__FORGET_ATTEMPT__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    body.has_job = body.has_attempt = true;
    body.job = job;
    body.attempt = attempt;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_FORGET;
    m.forget = &body;
    send_to(c, n, &m);
}

static void ack_stale_end(struct core *c, struct node *n, int64_t job, int attempt, int rank)
{
    Boost__Ack ack = BOOST__ACK__INIT;
    ack.has_job = ack.has_attempt = true;
    ack.job = job;
    ack.attempt = attempt;
    if (rank >= 0) {
        ack.has_rank = ack.has_rank_end = ack.rank_end = true;
        ack.rank = rank;
    } else {
        ack.has_node_end = ack.node_end = true;
    }
    send_ack(c, n->name, &ack);
}

/* Of an attempt that is not live on this node: the agent is told to end it. */
static void stale(struct core *c, struct node *n, int64_t job, int attempt)
{
    struct holding *h = node_holding(n, job, attempt);
    c->stats.stale_reports++;
    if (h && !h->kill_due)
        holding_kill(c, n, h);
}

/* Refused reports are acknowledged all the same, or the agent would keep them, and send them, for ever. */
static void refuse_shards(struct core *c, struct node *n, const Boost__ShardBatch *b)
{
    Boost__Ack ack = BOOST__ACK__INIT;
    ack.has_job = ack.has_attempt = ack.has_rank = ack.has_shards_seq = true;
    ack.job = b->job;
    ack.attempt = b->attempt;
    ack.rank = b->rank;
    for (size_t i = 0; i < b->n_records; i++)
        ack.shards_seq = b->records[i]->seq > ack.shards_seq ? b->records[i]->seq : ack.shards_seq;
    send_ack(c, n->name, &ack);
}

static void refuse_metrics(struct core *c, struct node *n, const Boost__MetricBatch *b)
{
    Boost__Ack ack = BOOST__ACK__INIT;
    ack.has_job = ack.has_attempt = ack.has_rank = ack.has_metrics_seq = true;
    ack.job = b->job;
    ack.attempt = b->attempt;
    ack.rank = b->rank;
    for (size_t i = 0; i < b->n_records; i++)
        ack.metrics_seq = b->records[i]->seq > ack.metrics_seq ? b->records[i]->seq : ack.metrics_seq;
    send_ack(c, n->name, &ack);
}

/* The job and its attempt when this node has a part in it and `live` asks for no more than that it exists. */
static struct attempt *attempt_for(struct core *c, struct node *n, int64_t job_id, int number, int rank, bool live,
                                   struct job **job)
{
    *job = core_job(c, job_id);
    struct attempt *a = *job ? job_attempt(*job, number) : NULL;
    if (a && rank >= 0 && (rank >= a->world || strcmp(a->parts[a->ranks[rank].part].node, n->name) != 0)) {
        c->stats.protocol_errors++;
        return NULL;
    }
    if (!a || a->fenced || (live && a->end_ns)) {
        stale(c, n, job_id, number);
        return NULL;
    }
    if (rank >= 0)
        a->parts[a->ranks[rank].part].heard = true;
    return a;
}

/* ---- messages --------------------------------------------------------------------------------- */

static void on_rank_end(struct core *c, struct node *n, const Boost__ExitRecord *x)
{
    struct job *job = core_job(c, x->job);
    struct attempt *a = job ? job_attempt(job, x->attempt) : NULL;
    if (a && (x->rank < 0 || x->rank >= a->world || strcmp(a->parts[a->ranks[x->rank].part].node, n->name) != 0)) {
        c->stats.protocol_errors++;
    } else if (!a || a->end_ns || a->parts[a->ranks[x->rank].part].lost) {
        /* All is decided: it is only taken off the agent's hands. */
        c->stats.stale_reports++;
        if (!ending(c, x->job, x->attempt))
            ack_stale_end(c, n, x->job, x->attempt, x->rank);
    } else {
        attempt_rank_end(c, job, a, n, x);
    }
}

static void on_node_end(struct core *c, struct node *n, const Boost__NodeEnd *x)
{
    struct job *job;
    struct attempt *a;
    struct attempt_part *part = live_part(c, n->name, x->job, x->attempt, &job, &a);
    struct holding *h = node_holding(n, x->job, x->attempt);
    if (h)
        h->epilog = x->epilog;
    if (part && !part->gone && !part->lost) {
        attempt_part_over(c, job, a, n->name, false, x->note);
        return;
    }
    node_release(c, n, x->job, x->attempt);
    if ((part && part->gone) || ending(c, x->job, x->attempt))
        return; /* acknowledged when the attempt is closed, and that is durable */
    ack_stale_end(c, n, x->job, x->attempt, -1);
    send_forget(c, n, x->job, x->attempt);
}

/* What stops it there (a directory that is not mounted, GPUs that others use) may not stop it elsewhere. */
static void remember_refusal(struct core *c, const struct node *n, struct job *job)
{
    enum { ROOM = sizeof job->refusals / sizeof *job->refusals };
    int at = 0;
    while (at < job->n_refusals && strcmp(job->refusals[at].node, n->name) != 0)
        at++;
    if (at == ROOM) { /* the oldest goes */
        memmove(job->refusals, job->refusals + 1, (ROOM - 1) * sizeof *job->refusals);
        at = ROOM - 1;
    }
    snprintf(job->refusals[at].node, sizeof job->refusals[at].node, "%s", n->name);
    job->refusals[at].until = now_mono(c) + CORE_REFUSED_NS;
    if (at >= job->n_refusals)
        job->n_refusals = at + 1;
}

static void on_refused(struct core *c, struct node *n, const Boost__AttemptRefused *x)
{
    struct job *job;
    struct holding *h = node_holding(n, x->job, x->attempt);
    if (h && x->epilog) {
        h->epilog = true;
        node_release(c, n, x->job, x->attempt); /* not yet, but nothing of it is left to kill */
    }
    struct attempt *a = attempt_for(c, n, x->job, x->attempt, -1, true, &job);
    struct attempt_part *part = a ? live_part(c, n->name, x->job, x->attempt, &job, &a) : NULL;
    if (!part || part->gone || part->lost)
        return;
    char text[1024];
    const char *why = x->text && *x->text ? x->text : "no reason given";
    snprintf(text, sizeof text, "%s refused to start it: %.500s%s%.300s", n->name, why, x->hint && *x->hint ? "; " : "",
             x->hint ? x->hint : "");
    Boost__Reason__Value reason = x->reason;
    /* A job that has trained was right: a disk is full, read-only or away. That passes, or the job comes to be HELD
     * until somebody has seen to it. */
    bool spec = x->class_ == CLASS(SPEC) && reason != REASON(DiskFull) && !job_has_trained(job);
    if (reason == REASON(NONE))
        reason = spec ? REASON(SpecError) : REASON(RankExit);
    remember_refusal(c, n, job);
    /* Nothing of it runs there: that is what refusing means. */
    part->gone = true;
    node_release(c, n, job->id, a->number);
    if (a->failing || a->kill)
        attempt_try_close(c, job);
    else
        attempt_fail(c, job, a, spec ? CLASS(SPEC) : CLASS(INFRA), reason, "attempt-refused", n->name, text);
}

static void on_hang(struct core *c, struct node *n, const Boost__HangReport *x)
{
    struct job *job;
    struct attempt *a = attempt_for(c, n, x->job, x->attempt, x->rank, true, &job);
    if (!a || x->rank < 0)
        return;
    attempt_hang(c, job, a, x->rank, x->text && *x->text ? x->text : "no progress");
}

/* ---- rendezvous --------------------------------------------------------------------------------- */

void kv_answered(void *arg, const struct kv_asker *asker, const void *value, size_t len, const char *error)
{
    struct core *c = arg;
    struct node *n = node_find(c, asker->node);
    Boost__KvResult result = BOOST__KV_RESULT__INIT;
    Boost__KvAnswer body = BOOST__KV_ANSWER__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    result.has_ok = true;
    result.ok = error == NULL;
    if (error) {
        result.error = (char *)(uintptr_t)error;
    } else if (value) {
        result.has_value = true;
        result.value.data = (uint8_t *)(uintptr_t)value;
        result.value.len = len;
    }
    body.has_id = body.has_job = body.has_attempt = body.has_rank = true;
    body.id = asker->id;
    body.job = asker->job;
    body.attempt = asker->attempt;
    body.rank = asker->rank;
    body.result = &result;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_KV;
    m.kv = &body;
    if (n)
        send_to(c, n, &m);
}

static void on_kv(struct core *c, struct node *n, const Boost__KvForward *x)
{
    struct job *job;
    struct kv_asker asker = {.id = x->id, .job = x->job, .attempt = x->attempt, .rank = x->rank};
    snprintf(asker.node, sizeof asker.node, "%s", n->name);
    struct attempt *a = attempt_for(c, n, x->job, x->attempt, x->rank, true, &job);
    if (!a || a->failing) {
        kv_answered(c, &asker, NULL, 0, "the attempt is over");
        return;
    }
    struct error err;
    const char *group = x->op && x->op->group ? x->op->group : "";
    const char *key = x->op && x->op->key ? x->op->key : "";
    const void *value = NULL;
    size_t len = 0;
    int rc;
    if (x->op && x->op->kind == BOOST__KV_OP__KIND__SET) {
        rc = kv_set(c->kv, &asker, group, key, x->op->value.data, x->op->value.len, &err);
    } else {
        int64_t deadline = now_mono(c) + (x->op ? x->op->timeout_ms : 0) * NS_PER_MS;
        rc = kv_get(c->kv, &asker, group, key, deadline, &value, &len, &err);
        if (rc == ERR_BUSY) {
            if (deadline < c->kv_due)
                c->kv_due = deadline;
            due_at(c, deadline);
            return;
        }
    }
    kv_answered(c, &asker, value, len, rc ? err.message : NULL);
}

/* ---- dispatch ------------------------------------------------------------------------------------- */

static void on_heartbeat(struct core *c, struct node *n, const Boost__Heartbeat *x)
{
    Boost__HeartbeatAck body = BOOST__HEARTBEAT_ACK__INIT;
    Boost__ControllerMessage m = BOOST__CONTROLLER_MESSAGE__INIT;
    body.has_seq = true;
    body.seq = x->seq;
    m.body_case = BOOST__CONTROLLER_MESSAGE__BODY_HEARTBEAT_ACK;
    m.heartbeat_ack = &body;
    send_to(c, n, &m);
}

static void dispatch(struct core *c, struct node *n, const Boost__AgentMessage *msg)
{
    struct job *job;
    struct attempt *a;
    switch (msg->body_case) {
    case BOOST__AGENT_MESSAGE__BODY_HEARTBEAT:
        on_heartbeat(c, n, msg->heartbeat);
        break;
    case BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE:
        a = attempt_for(c, n, msg->rank_update->job, msg->rank_update->attempt, msg->rank_update->rank, true, &job);
        if (a && msg->rank_update->rank >= 0)
            attempt_rank_update(c, job, a, n, msg->rank_update);
        break;
    case BOOST__AGENT_MESSAGE__BODY_RANK_END:
        if (msg->rank_end->record)
            on_rank_end(c, n, msg->rank_end->record);
        break;
    case BOOST__AGENT_MESSAGE__BODY_NODE_END:
        on_node_end(c, n, msg->node_end);
        break;
    case BOOST__AGENT_MESSAGE__BODY_SHARDS:
        a = attempt_for(c, n, msg->shards->job, msg->shards->attempt, msg->shards->rank, false, &job);
        if (a && msg->shards->rank >= 0)
            checkpoints_shards(c, job, a, msg->shards);
        else
            refuse_shards(c, n, msg->shards);
        break;
    case BOOST__AGENT_MESSAGE__BODY_METRICS:
        a = attempt_for(c, n, msg->metrics->job, msg->metrics->attempt, msg->metrics->rank, false, &job);
        if (a && msg->metrics->rank >= 0)
            metrics_batch(c, job, a, n, msg->metrics);
        else
            refuse_metrics(c, n, msg->metrics);
        break;
    case BOOST__AGENT_MESSAGE__BODY_LOG_TAIL:
        a = attempt_for(c, n, msg->log_tail->job, msg->log_tail->attempt, msg->log_tail->rank, true, &job);
        if (a && msg->log_tail->rank >= 0)
            log_tail(a, msg->log_tail);
        break;
    case BOOST__AGENT_MESSAGE__BODY_KV:
        on_kv(c, n, msg->kv);
        break;
    case BOOST__AGENT_MESSAGE__BODY_TASK:
        task_reply(c, n, msg->task);
        break;
    case BOOST__AGENT_MESSAGE__BODY_TASK_PROGRESS:
        task_progress(c, n, msg->task_progress);
        break;
    case BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED:
        on_refused(c, n, msg->attempt_refused);
        break;
    case BOOST__AGENT_MESSAGE__BODY_HANG:
        on_hang(c, n, msg->hang);
        break;
    case BOOST__AGENT_MESSAGE__BODY_DEVICES:
        node_devices(c, n, msg->devices);
        break;
    case BOOST__AGENT_MESSAGE__BODY_DOING: {
        struct attempt_part *part = live_part(c, n->name, msg->doing->job, msg->doing->attempt, &job, &a);
        if (part) {
            int64_t limit_ms = msg->doing->limit_ms;
            bool good = limit_ms >= 0 && limit_ms < DOING_MAX_MS;
            text_set(&part->doing, msg->doing->text);
            part->doing_until = now_mono(c) + (good ? limit_ms : DOING_MAX_MS) * NS_PER_MS;
            progress_changed(c, job);
        }
        break;
    }
    case BOOST__AGENT_MESSAGE__BODY_HEALTH:
        node_health(c, n, msg->health);
        break;
    default:
        c->stats.protocol_errors++;
        break;
    }
}

void core_agent_alive(struct core *c, const char *node, const char *instance)
{
    struct node *n = node_find(c, node);
    if (!n || !n->registered || !n->instance || strcmp(n->instance, instance) != 0)
        return;
    /* Without its other connection it can be told nothing: for a while that is a bad network, then it is no node. */
    if (!n->connected &&
        (n->liveness == LIVENESS(DOWN) || now_mono(c) - n->cut_since > CORE_HEART_ALONE * c->node_timeout_ns))
        return;
    node_seen(c, n);
    change_commit(c);
}

void core_agent_message(struct core *c, const char *node, const Boost__AgentMessage *msg)
{
    struct node *n = node_find(c, node);
    if (!n || !n->registered || !n->connected) {
        c->stats.protocol_errors++;
        return;
    }
    node_seen(c, n);
    dispatch(c, n, msg);
    change_commit(c);
}
