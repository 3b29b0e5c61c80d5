#include "tests/world/agents.h"

#include "tests/world/world.h"

struct fake_agent *agent_of(struct world *w, const char *name)
{
    for (int i = 0; i < w->n_agents; i++)
        if (strcmp(w->agents[i].name, name) == 0)
            return &w->agents[i];
    return NULL;
}

struct fake_attempt *fake_find(struct fake_agent *a, int64_t job, int attempt)
{
    for (int i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == job && a->attempts[i].attempt == attempt && !a->attempts[i].forgotten)
            return &a->attempts[i];
    return NULL;
}

void say(struct world *w, const char *node, const Boost__AgentMessage *m)
{
    struct queued *q = calloc(1, sizeof *q);
    assert_non_null(q);
    snprintf(q->node, sizeof q->node, "%s", node);
    q->len = boost__agent_message__get_packed_size(m);
    q->bytes = malloc(q->len + 1);
    boost__agent_message__pack(m, q->bytes);
    if (!w->queue)
        w->tail = &w->queue;
    *w->tail = q;
    w->tail = &q->next;
}

void say_update(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int phase, int64_t step)
{
    Boost__RankUpdate u = BOOST__RANK_UPDATE__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    u.has_job = u.has_attempt = u.has_rank = u.has_phase = u.has_step = u.has_progress = 1;
    u.job = x->job;
    u.attempt = x->attempt;
    u.rank = x->ranks[i];
    u.phase = (Boost__RankUpdate__Phase)phase;
    u.step = step;
    u.progress = (uint64_t)step * 4;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_RANK_UPDATE;
    m.rank_update = &u;
    if (step > x->step)
        x->step = step;
    say(w, a->name, &m);
}

void say_step(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step)
{
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_update(w, a, x, i, BOOST__RANK_UPDATE__PHASE__TRAINING, step);
}

void say_end_of(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, struct end e)
{
    Boost__ExitRecord r = BOOST__EXIT_RECORD__INIT;
    Boost__RankEnd body = BOOST__RANK_END__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_job = r.has_attempt = r.has_rank = r.has_seq = r.has_last_step = 1;
    r.job = x->job;
    r.attempt = x->attempt;
    r.rank = x->ranks[i];
    e.seq = e.seq ? e.seq : ++x->seq;
    x->ends[i] = e;
    r.seq = e.seq;
    r.has_exit_code = !e.signal && !e.lost;
    r.exit_code = e.exit_code;
    r.has_signal = e.signal != 0;
    r.signal = e.signal;
    r.has_killed_by_us = r.killed_by_us = e.killed;
    r.has_done = r.done = e.done;
    r.has_oom = r.oom = e.oom;
    r.has_lost = r.lost = e.lost;
    r.error = (char *)(uintptr_t)e.error;
    r.device = (char *)(uintptr_t)e.device;
    r.last_step = x->step;
    if (e.log) {
        r.has_log_tail = 1;
        r.log_tail.data = (uint8_t *)(uintptr_t)e.log;
        r.log_tail.len = strlen(e.log);
    }
    body.record = &r;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_RANK_END;
    m.rank_end = &body;
    x->ended[i] = true;
    say(w, a->name, &m);
}

void say_node_end(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    Boost__NodeEnd body = BOOST__NODE_END__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    body.has_job = body.has_attempt = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_NODE_END;
    m.node_end = &body;
    x->alive = false;
    say(w, a->name, &m);
}

void say_shard(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step, const char *error)
{
    Boost__ShardRecord r = BOOST__SHARD_RECORD__INIT;
    Boost__ShardRecord *list = &r;
    Boost__ShardBatch body = BOOST__SHARD_BATCH__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    char dir[512], file[64];
    snprintf(dir, sizeof dir, "%s/step-%lld.a%d", x->ckpt_dir, (long long)step, x->attempt);
    snprintf(file, sizeof file, "shard-%d.safetensors", x->ranks[i]);
    r.has_seq = r.has_step = r.has_rank = r.has_bytes = r.has_crc32c = r.has_write_ms = 1;
    r.seq = ++x->shards_seq[i];
    r.step = step;
    r.rank = x->ranks[i];
    r.file = file;
    r.bytes = 1000 + x->ranks[i];
    r.crc32c = (uint32_t)step;
    r.write_ms = 20;
    r.dir = dir;
    if (error) {
        r.has_failed = r.failed = 1;
        r.error = (char *)(uintptr_t)error;
    }
    body.has_job = body.has_attempt = body.has_rank = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    body.rank = x->ranks[i];
    body.n_records = 1;
    body.records = &list;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_SHARDS;
    m.shards = &body;
    say(w, a->name, &m);
}

void say_checkpoint(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step)
{
    for (int i = 0; i < x->n_ranks; i++)
        say_shard(w, a, x, i, step, NULL);
}

void say_values(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step,
                const struct named_value *values, size_t n)
{
    Boost__Metric v[MOST_VALUES], *list[MOST_VALUES];
    Boost__MetricRecord r = BOOST__METRIC_RECORD__INIT, *records = &r;
    Boost__MetricBatch body = BOOST__METRIC_BATCH__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    assert_true(n <= MOST_VALUES);
    for (size_t k = 0; k < n; k++) {
        list[k] = &v[k];
        boost__metric__init(&v[k]);
        v[k].name = (char *)(uintptr_t)values[k].name;
        v[k].has_value = 1;
        v[k].value = values[k].value;
    }
    r.has_seq = r.has_step = 1;
    r.seq = ++x->metrics_seq[i];
    r.step = step;
    r.n_values = n;
    r.values = list;
    r.warning = (char *)(uintptr_t)x->warning;
    body.has_job = body.has_attempt = body.has_rank = 1;
    body.job = x->job;
    body.attempt = x->attempt;
    body.rank = x->ranks[i];
    body.n_records = 1;
    body.records = &records;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_METRICS;
    m.metrics = &body;
    say(w, a->name, &m);
}

void say_metrics(struct world *w, struct fake_agent *a, struct fake_attempt *x, int i, int64_t step, double loss)
{
    say_values(w, a, x, i, step, &(struct named_value){"loss", loss}, 1);
}

void checkpoint_at(struct world *w, struct fake_agent *a, struct fake_attempt *x, int64_t step)
{
    say_step(w, a, x, step);
    say_checkpoint(w, a, x, step);
    pump(w);
}

void say_finished(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    say_step(w, a, x, x->steps);
    say_checkpoint(w, a, x, x->steps);
    for (int i = 0; i < x->n_ranks; i++)
        say_end_of(w, a, x, i, (struct end){.done = true});
    say_node_end(w, a, x);
}

void kill_all(struct world *w, struct fake_agent *a, struct fake_attempt *x)
{
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_end_of(w, a, x, i, (struct end){.signal = 9, .killed = true});
    say_node_end(w, a, x);
}

/* Who has the GPU; NULL: nobody. *rank becomes its rank. */
static const struct fake_attempt *gpu_user(const struct fake_agent *a, int gpu, int *rank)
{
    for (int i = 0; i < a->n_attempts; i++) {
        const struct fake_attempt *x = &a->attempts[i];
        for (int k = 0; x->alive && x->cuda && k < x->n_ranks; k++)
            if (x->gpus[k] == gpu) {
                *rank = x->ranks[k];
                return x;
            }
    }
    return NULL;
}

Boost__DeviceReport *gpu_report(const struct fake_agent *a)
{
    static Boost__DeviceReport report;
    static Boost__DeviceInfo info[8], *list[8];
    boost__device_report__init(&report);
    report.devices = list;
    report.driver = (char *)(uintptr_t) "580.1";
    for (int g = 0; g < a->gpus; g++) {
        int rank;
        const struct fake_attempt *x = gpu_user(a, g, &rank);
        boost__device_info__init(&info[g]);
        info[g].has_index = info[g].has_memory_mib = 1;
        info[g].index = g;
        info[g].memory_mib = GPU_MIB;
        info[g].uuid = (char *)(uintptr_t) "GPU-x";
        info[g].name = (char *)(uintptr_t) "NVIDIA H200";
        info[g].trouble = (char *)(uintptr_t)a->gpu_trouble[g];
        info[g].has_taken = info[g].taken = a->gpu_taken[g];
        info[g].has_job = info[g].has_attempt = info[g].has_rank = x != NULL;
        info[g].job = x ? x->job : 0;
        info[g].attempt = x ? x->attempt : 0;
        info[g].rank = x ? rank : 0;
        list[report.n_devices++] = &info[g];
    }
    return &report;
}

void say_devices(struct world *w, struct fake_agent *a)
{
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_DEVICES;
    m.devices = gpu_report(a);
    say(w, a->name, &m);
}

static void on_start(struct world *w, struct fake_agent *a, const Boost__AttemptStart *s)
{
    struct fake_attempt *x = fake_find(a, s->job, s->attempt);
    /* Elsewhere an older attempt may only run on when its node was given up and it is fenced. */
    for (int i = 0; i < w->n_agents; i++) {
        const struct fake_agent *b = &w->agents[i];
        for (int k = 0; k < b->n_attempts; k++) {
            const struct fake_attempt *y = &b->attempts[k];
            if (y->job != s->job || y->attempt == s->attempt || !y->alive || y->forgotten)
                continue;
            assert_true(y->attempt < s->attempt);
            assert_true(job_attempt(core_job(w->core, y->job), y->attempt)->fenced);
        }
    }
    if (x) {
        x->starts++;
        return;
    }
    /* D7: a node that runs an attempt of a job must never be given its next one. */
    for (int i = 0; i < a->n_attempts; i++)
        if (a->attempts[i].job == s->job && a->attempts[i].alive && !a->attempts[i].forgotten)
            fail_msg("attempt %d of job %lld sent to %s, which still runs attempt %d", s->attempt, (long long)s->job,
                     a->name, a->attempts[i].attempt);
    int busy = 0;
    bool cuda = s->spec->resources && s->spec->resources->device == BOOST__DEVICE__VALUE__CUDA;
    for (int i = 0; i < a->n_attempts; i++)
        busy += a->attempts[i].alive && a->attempts[i].cuda == cuda ? a->attempts[i].n_ranks : 0;
    assert_true(busy + (int)s->n_ranks <= (cuda ? a->gpus : a->slots));
    assert_true(a->n_attempts < 256);
    x = &a->attempts[a->n_attempts++];
    memset(x, 0, sizeof *x);
    x->job = s->job;
    x->attempt = s->attempt;
    x->world = s->world;
    x->dp = s->spec->parallel->dp;
    x->micro_batch = s->spec->parallel->micro_batch;
    assert_int_equal(s->world, s->spec->parallel->tp * s->spec->parallel->pp * s->spec->parallel->dp);
    x->alive = true;
    x->starts = 1;
    x->steps = s->spec->run->steps;
    assert_true(s->n_ranks <= 8);
    for (size_t i = 0; i < s->n_ranks; i++)
        x->ranks[x->n_ranks++] = s->ranks[i];
    x->cuda = cuda;
    x->alive = false; /* none of its own yet */
    for (int i = 0, g = 0, rank; cuda && i < x->n_ranks; g++) {
        assert_true(g < a->gpus); /* else it was sent more than there is */
        if (!gpu_user(a, g, &rank) && !a->gpu_trouble[g] && !a->gpu_taken[g])
            x->gpus[i++] = g;
    }
    x->alive = true;
    if (cuda)
        say_devices(w, a);
    snprintf(x->ckpt_dir, sizeof x->ckpt_dir, "%s", s->checkpoint_dir);
    if (s->resume) {
        x->from_step = s->resume->step;
        snprintf(x->resume, sizeof x->resume, "%s", s->resume->path);
    }
    x->step = x->from_step;
}

static void on_stop(struct world *w, struct fake_agent *a, const Boost__StopAttempt *s)
{
    struct fake_attempt *x = fake_find(a, s->job, s->attempt);
    if (!x)
        return;
    if (s->how == BOOST__STOP_ATTEMPT__HOW__KILL) {
        x->kills++;
        if (a->obeys_kill && x->alive)
            kill_all(w, a, x);
        return;
    }
    x->terms++;
    if (!a->obeys_term || !x->alive)
        return;
    say_step(w, a, x, x->step + 1);
    say_checkpoint(w, a, x, x->step);
    for (int i = 0; i < x->n_ranks; i++)
        if (!x->ended[i])
            say_end_of(w, a, x, i, (struct end){.done = true});
    say_node_end(w, a, x);
}

void say_task(struct world *w, const char *node, uint64_t task, Boost__Failure *failure)
{
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    r.has_id = 1;
    r.id = task;
    r.failure = failure;
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK;
    m.task = &r;
    say(w, node, &m);
}

static void on_task(struct world *w, struct fake_agent *a, const Boost__Task *t)
{
    Boost__TaskReply r = BOOST__TASK_REPLY__INIT;
    Boost__Failure f = BOOST__FAILURE__INIT;
    Boost__AgentMessage m = BOOST__AGENT_MESSAGE__INIT;
    Boost__RankStacks stacks[9], *stack_list[9];
    int code = 0;
    r.has_id = 1;
    r.id = a->last_task = t->id;
    switch (t->body_case) {
    case BOOST__TASK__BODY_PREFLIGHT:
        a->preflights++;
        code = a->preflight_code;
        break;
    case BOOST__TASK__BODY_VERIFY:
        a->verifies++;
        assert_true(t->verify->n_shards <= 8); /* 0: what its manifest lists */
        snprintf(a->verify_mirror, sizeof a->verify_mirror, "%s", t->verify->mirror ? t->verify->mirror : "");
        if (a->verify_bad[0] && strstr(t->verify->dir, a->verify_bad))
            code = a->verify_code;
        break;
    case BOOST__TASK__BODY_CHECKPOINT_TOOL:
        r.faults = &a->tool_fault;
        r.n_faults = a->tool_fault != NULL;
        break;
    case BOOST__TASK__BODY_WRITE_MANIFEST:
        a->manifests++;
        code = a->manifest_code;
        break;
    case BOOST__TASK__BODY_DELETE_CHECKPOINT:
        a->deletes++;
        snprintf(a->deleted, sizeof a->deleted, "%s", t->delete_checkpoint->dir);
        snprintf(a->deleted_copy, sizeof a->deleted_copy, "%s",
                 t->delete_checkpoint->mirror ? t->delete_checkpoint->mirror : "");
        code = a->delete_code;
        break;
    case BOOST__TASK__BODY_MIRROR_CHECKPOINT:
        a->mirrors++;
        snprintf(a->mirrored, sizeof a->mirrored, "%s %s", t->mirror_checkpoint->dir, t->mirror_checkpoint->mirror);
        code = a->mirror_code;
        if (a->silent_mirror)
            return;
        break;
    case BOOST__TASK__BODY_FETCH_DATA:
        a->fetches++;
        a->fetched_init = t->fetch_data->init;
        a->fetch_tries = t->fetch_data->tries;
        code = a->fetch_code;
        if (a->silent_fetch)
            return;
        break;
    case BOOST__TASK__BODY_READ_LOG:
        r.has_data = r.has_next_offset = r.has_finished = 1;
        r.data.data = (uint8_t *)(uintptr_t) "hello\n";
        r.data.len = 6;
        r.next_offset = t->read_log->offset + 6;
        break;
    case BOOST__TASK__BODY_COLLECT_STACKS:
        code = a->stacks_code;
        for (size_t i = 0; i < t->collect_stacks->n_ranks && i < 8; i++) {
            boost__rank_stacks__init(&stacks[i]);
            stacks[i].has_rank = stacks[i].has_answered = stacks[i].answered = 1;
            stacks[i].rank = t->collect_stacks->ranks[i];
            stack_list[r.n_stacks++] = &stacks[i];
        }
        boost__rank_stacks__init(&stacks[8]); /* that nobody asked for */
        stacks[8].has_rank = 1;
        stacks[8].rank = 77;
        stack_list[r.n_stacks++] = &stacks[8];
        r.stacks = stack_list;
        break;
    case BOOST__TASK__BODY_FIND_CHECKPOINTS:
        a->finds++;
        r.found = a->found;
        r.n_found = a->n_found;
        break;
    case BOOST__TASK__BODY_PROVE_SHARED:
        a->proofs++;
        code = a->shared_code;
        break;
    default:
        fail_msg("unknown task");
    }
    if (!a->answers)
        return;
    if (code) {
        f.has_code = 1;
        f.code = code;
        f.message = (char *)(uintptr_t)(a->failure_text ? a->failure_text : "data.bin is not there");
        f.hint = (char *)(uintptr_t) "check the path";
        r.failure = &f;
    }
    m.body_case = BOOST__AGENT_MESSAGE__BODY_TASK;
    m.task = &r;
    say(w, a->name, &m);
}

static void on_ack(struct fake_agent *a, const Boost__Ack *k)
{
    struct fake_attempt *x = fake_find(a, k->job, k->attempt);
    for (int i = 0; x && i < x->n_ranks; i++)
        if (k->rank_end && x->ranks[i] == k->rank)
            x->end_acked[i] = true;
    if (x && k->node_end)
        x->node_end_acked = true;
}

static void on_verdicts(struct world *w, struct fake_agent *a, const Boost__Registered *r)
{
    for (size_t i = 0; i < r->n_verdicts; i++) {
        struct fake_attempt *x = fake_find(a, r->verdicts[i]->job, r->verdicts[i]->attempt);
        assert_non_null(x);
        if (r->verdicts[i]->what == BOOST__VERDICT__WHAT__FENCE) {
            x->kills++;
            if (a->obeys_kill && x->alive)
                kill_all(w, a, x);
        } else if (r->verdicts[i]->what == BOOST__VERDICT__WHAT__FORGET) {
            assert_false(x->alive);
            x->forgotten = !x->epilog; /* else behind it */
        }
    }
}

bool world_send(void *arg, const char *node, const Boost__ControllerMessage *m)
{
    struct world *w = arg;
    struct fake_agent *a = agent_of(w, node);
    assert_non_null(a);
    if (!a->connected)
        return false;
    /* A real one goes over a socket: everything in it has to pack. */
    size_t len = boost__controller_message__get_packed_size(m);
    uint8_t *bytes = malloc(len + 1);
    boost__controller_message__pack(m, bytes);
    Boost__ControllerMessage *copy = boost__controller_message__unpack(NULL, len, bytes);
    assert_non_null(copy);
    switch (copy->body_case) {
    case BOOST__CONTROLLER_MESSAGE__BODY_START:
        on_start(w, a, copy->start->start);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_STOP:
        on_stop(w, a, copy->stop);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_TASK:
        on_task(w, a, copy->task);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_REGISTERED:
        on_verdicts(w, a, copy->registered);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_ACK:
        on_ack(a, copy->ack);
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_FORGET: {
        struct fake_attempt *x = fake_find(a, copy->forget->job, copy->forget->attempt);
        if (x) {
            assert_false(x->alive);
            x->forgotten = !x->epilog; /* else behind it */
        }
        break;
    }
    case BOOST__CONTROLLER_MESSAGE__BODY_CHECKPOINT: {
        struct fake_attempt *x = fake_find(a, copy->checkpoint->job, copy->checkpoint->attempt);
        if (x)
            x->checkpoints_asked++;
        break;
    }
    case BOOST__CONTROLLER_MESSAGE__BODY_CANCEL_TASK:
        a->cancelled = copy->cancel_task->id;
        break;
    case BOOST__CONTROLLER_MESSAGE__BODY_KV:
        w->kv_answers++;
        w->kv_ok = copy->kv->result->ok;
        snprintf(w->kv_text, sizeof w->kv_text, "%.*s",
                 (int)(copy->kv->result->ok ? copy->kv->result->value.len : strlen(copy->kv->result->error)),
                 copy->kv->result->ok ? (char *)copy->kv->result->value.data : copy->kv->result->error);
        break;
    default:
        break;
    }
    boost__controller_message__free_unpacked(copy, NULL);
    free(bytes);
    return true;
}
