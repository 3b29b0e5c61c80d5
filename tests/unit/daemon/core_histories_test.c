/* The controller core in a thousand random histories. */
#include "tests/unit/daemon/core_world.h"

enum { MAX_JOBS = 24 };
struct history {
    struct world *w;
    int seen_state[MAX_JOBS + 1];
    int seen_attempts[MAX_JOBS + 1];
    uint64_t seed;
};

static uint32_t pick(struct history *h, uint32_t n)
{
    h->seed ^= h->seed << 13;
    h->seed ^= h->seed >> 7;
    h->seed ^= h->seed << 17;
    return (uint32_t)((h->seed >> 11) % n);
}

static void check_invariants(struct history *h)
{
    struct world *w = h->w;
    for (struct job *job = core_next_job(w->core, 0); job; job = core_next_job(w->core, job->id)) {
        assert_true(job->id <= MAX_JOBS);
        int was = h->seen_state[job->id];
        if (was && job_state_terminal((Boost__JobState__Value)(was - 1)))
            assert_int_equal(job->state, was - 1); /* terminal is final */
        h->seen_state[job->id] = (int)job->state + 1;
        assert_true(job->n_attempts >= h->seen_attempts[job->id]); /* attempts only increase */
        h->seen_attempts[job->id] = job->n_attempts;
        for (int k = 0; k + 1 < job->n_attempts; k++)
            assert_true(job->attempts[k]->end_ns != 0); /* one live attempt at most */
        if (job_state_terminal(job->state))
            assert_null(job_live_attempt(job));
        if (job->state == STATE(STARTING) || job->state == STATE(RUNNING))
            assert_non_null(job_live_attempt(job));
    }
    struct arena mem;
    arena_init(&mem, 4 << 20);
    Boost__NodesReply *nodes = core_nodes(w->core, &mem);
    for (size_t i = 0; i < nodes->n_nodes; i++)
        /* One that has not registered yet counts what the store knows, the ended too. */
        if (nodes->nodes[i]->liveness != BOOST__NODE_LIVENESS__VALUE__JOINING &&
            nodes->nodes[i]->devices_busy > nodes->nodes[i]->devices)
            fail_msg("%s is over-committed: %d of %d, jobs %lld %lld %lld", nodes->nodes[i]->name,
                     nodes->nodes[i]->devices_busy, nodes->nodes[i]->devices, (long long)nodes->nodes[i]->jobs[0],
                     (long long)nodes->nodes[i]->jobs[1], (long long)nodes->nodes[i]->jobs[2]);
    arena_free(&mem);
    /* What really runs: two attempts of a job only when the older is on a node that was given up. */
    for (int i = 0; i < w->n_agents; i++) {
        int busy = 0;
        for (int k = 0; k < w->agents[i].n_attempts; k++)
            busy += w->agents[i].attempts[k].alive && !w->agents[i].attempts[k].forgotten
                        ? w->agents[i].attempts[k].n_ranks
                        : 0;
        assert_true(busy <= w->agents[i].slots);
    }
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    assert_int_equal(core_stats(w->core)->protocol_errors, 0);
}

static struct fake_attempt *any_alive(struct history *h, struct fake_agent **on)
{
    struct world *w = h->w;
    struct fake_agent *a = &w->agents[pick(h, (uint32_t)w->n_agents)];
    uint32_t start = pick(h, 64);
    for (int k = 0; k < a->n_attempts; k++) {
        struct fake_attempt *x = &a->attempts[(start + (uint32_t)k) % (uint32_t)a->n_attempts];
        if (x->alive && !x->forgotten) {
            *on = a;
            return x;
        }
    }
    return NULL;
}

/* Ranks keep working while their agent is away: what they did is told after it is back. */
static void something_of_a_rank(struct history *h)
{
    struct fake_agent *a;
    struct fake_attempt *x = any_alive(h, &a);
    if (!x || !a->connected)
        return;
    int i = (int)pick(h, (uint32_t)x->n_ranks);
    switch (pick(h, 10)) {
    case 0:
        say_end_of(h->w, a, x, i, (struct end){.signal = 9, .lost = false});
        break;
    case 1:
        say_end_of(h->w, a, x, i, (struct end){.exit_code = (int)(64 + pick(h, 4) % 3)});
        break;
    case 2:
        say_end_of(h->w, a, x, i, (struct end){.exit_code = 1});
        break;
    case 3:
        for (int r = 0; r < x->n_ranks; r++)
            if (x->ended[r])
                return;
        if (x->step < x->steps) {
            say_step(h->w, a, x, x->steps);
            say_finished(h->w, a, x);
        }
        break;
    case 4:
        say_shard(h->w, a, x, i, x->step + 1, "EIO");
        break;
    default: {
        int64_t step = x->step + 1 + pick(h, 9);
        if (step >= x->steps)
            break;
        say_step(h->w, a, x, step);
        if (pick(h, 2))
            say_checkpoint(h->w, a, x, step);
        say_metrics(h->w, a, x, 0, step, 3.0);
        break;
    }
    }
}

static void one_thing(struct history *h)
{
    struct world *w = h->w;
    struct fake_agent *a = &w->agents[pick(h, (uint32_t)w->n_agents)];
    int64_t jobs = core_next_job(w->core, 0) ? w->store->n_jobs : 0;
    switch (pick(h, 16)) {
    case 0:
        if (jobs + 4 < MAX_JOBS) { /* its preflight may take a while */
            struct arena mem;
            arena_init(&mem, 1 << 20);
            (void)submit_spec(w, spec_new(&mem), pick(h, 8) == 0);
            arena_free(&mem);
        }
        break;
    case 1:
        if (a->connected)
            disconnect(w, a);
        break;
    case 2:
        a->obeys_kill = pick(h, 4) != 0;
        a->obeys_term = pick(h, 3) != 0;
        break;
    case 3:
        if (pick(h, 3) == 0) {
            controller_restart(w);
            break;
        }
        break;
    case 4:
        a->answers = pick(h, 4) != 0;
        snprintf(a->verify_bad, sizeof a->verify_bad, "%s", pick(h, 3) ? "" : "step-");
        a->verify_code = pick(h, 2) ? ERR_CORRUPT : ERR_IO;
        break;
    case 5:
        a->beating = pick(h, 3) != 0;
        break;
    case 6:
        if (jobs) {
            static const Boost__ControlRequest__Verb verbs[] = {CANCEL, HOLD, RELEASE, RELEASE, CHECKPOINT};
            (void)control(w, verbs[pick(h, 5)], 1 + pick(h, (uint32_t)jobs), pick(h, 2) == 0);
        }
        break;
    case 7:
        advance(w, (int64_t)pick(h, 20000));
        break;
    case 8:
    case 9:
        advance(w, (int64_t)pick(h, 1500));
        break;
    default:
        something_of_a_rank(h);
        break;
    }
    for (int i = 0; i < w->n_agents; i++)
        if (!w->agents[i].connected && pick(h, 3) == 0)
            join_world(w, &w->agents[i]);
}

static void a_thousand_histories(void **state)
{
    (void)state;
    const char *only = getenv("CORE_SEED");
    const char *more = getenv("CORE_SEEDS");
    int first = only ? (int)strtol(only, NULL, 10) : 0;
    int count = more ? (int)strtol(more, NULL, 10) : only ? 1 : 1000;
    for (int seed = first; seed < first + count; seed++) {
        struct history h = {.w = world_new(), .seed = 0x9E3779B97F4A7C15ULL * (uint64_t)(seed + 1)};
        struct world *w = h.w;
        w->seed = h.seed;
        if (getenv("CORE_TRACE"))
            fprintf(stderr, "seed %d\n", seed);
        for (int i = 0; i < 2; i++)
            join_world(w, agent_add(w, i ? "n2" : "n1", 2 + i * 2));
        for (int i = 0; i < 60; i++) {
            one_thing(&h);
            pump(w);
            check_invariants(&h);
        }
        /* The weather clears: every job that is not held comes to its end. */
        for (int i = 0; i < w->n_agents; i++) {
            struct fake_agent *a = &w->agents[i];
            a->obeys_kill = a->obeys_term = a->answers = a->beating = true;
            a->verify_bad[0] = 0;
            if (a->connected)
                disconnect(w, a);
            join_world(w, a);
        }
        for (int round = 0; round < 400; round++) {
            bool open = false;
            advance(w, 2000);
            for (int i = 0; i < w->n_agents; i++) {
                struct fake_agent *a = &w->agents[i];
                for (int k = 0; k < a->n_attempts; k++) {
                    struct fake_attempt *x = &a->attempts[k];
                    bool whole = true;
                    for (int r = 0; r < x->n_ranks; r++)
                        whole = whole && !x->ended[r];
                    if (x->alive && !x->forgotten && x->kills && a->obeys_kill)
                        kill_all(w, a, x);
                    else if (x->alive && !x->forgotten && whole && x->step < x->steps)
                        say_finished(w, a, x);
                }
            }
            pump(w);
            check_invariants(&h);
            for (struct job *job = core_next_job(w->core, 0); job; job = core_next_job(w->core, job->id))
                open = open || (!job_state_terminal(job->state) && job->state != STATE(HELD));
            if (!open)
                break;
            if (round == 399)
                fail_msg("seed %d: a job never ends", seed);
        }
        world_free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_histories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
