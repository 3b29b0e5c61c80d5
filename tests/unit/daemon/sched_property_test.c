/* The scheduler against trying everything, on many small clusters: nothing over-committed, all or nothing, best fit,
 * the head never delayed, preemption with the fewest and least. */
#include "sched_world.h"

enum { CASES = 20000 };

/* A queue goes through one picture, with the first that waits as its head. */
static void queue_of_jobs(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0001)};
    int placed = 0, backfilled = 0, behind = 0, heads = 0, timed = 0;
    for (int k = 0; k < CASES; k++) {
        struct cluster c;
        cluster_random(&c, &r);
        struct sched *s = cluster_sched(&c);
        struct sched_request head = {0};
        int64_t promised = -1;
        int before_head = 0;
        for (int j = 0, jobs = pick(&r, 1, 8); j < jobs; j++) {
            struct sched_request q = request_random(&r, j + 1);
            int chosen[3];
            int now = fitting(&c, &q, 0);
            enum sched_verdict v = sched_place(s, &q, chosen);
            if (v == SCHED_PLACED) {
                assert_true(now >= q.nodes);
                cluster_take(&c, &q, chosen);
                placed++;
                backfilled += promised >= 0;
            } else if (v == SCHED_BEHIND) {
                assert_true(now >= q.nodes && promised >= 0);
                behind++;
            } else {
                assert_true(now < q.nodes);
            }
            if (promised < 0)
                assert_true((v == SCHED_PLACED) == (now >= q.nodes)); /* nobody waits without need */
            struct cluster empty = c;
            empty.n_parts = 0;
            if (v != SCHED_PLACED && v != SCHED_BEHIND)
                assert_int_equal(v == SCHED_NEVER, fitting(&empty, &q, 0) < q.nodes);
            if (v == SCHED_WAIT && promised < 0) {
                int64_t when;
                head = q;
                before_head = c.n_parts;
                promised = earliest(&c, &q);
                sched_reserve(s, &q);
                assert_int_equal(sched_head(s, SCHED_CPU, &when), q.id);
                assert_int_equal(when, promised);
                heads++;
                timed += promised != SCHED_ENDLESS;
            } else if (promised >= 0) {
                assert_true(earliest(&c, &head) <= promised); /* never later */
            }
        }
        /* A head without a time: nobody without an end came to where it could go. */
        for (int p = before_head; promised == SCHED_ENDLESS && p < c.n_parts; p++)
            assert_true(c.parts[p].ends != SCHED_ENDLESS ||
                        c.nodes[c.parts[p].node].slots[SCHED_CPU] < head.devices_per_node);
        assert_false(sched_failed(s));
        sched_free(s);
    }
    /* The cases are worth something. */
    assert_true(placed > CASES / 2 && backfilled > CASES / 10 && behind > CASES / 20 && heads > CASES / 4);
    assert_true(timed > CASES / 20);
}

/* One node: the one with the least left over. Several: together the least. */
static void best_fit(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0002)};
    for (int k = 0; k < CASES; k++) {
        struct cluster c;
        cluster_random(&c, &r);
        struct sched *s = cluster_sched(&c);
        struct sched_request q = request_random(&r, 1);
        int chosen[3];
        if (sched_place(s, &q, chosen) == SCHED_PLACED) {
            bool mine[MAX_NODES] = {false};
            int most = 0;
            for (int i = 0; i < q.nodes; i++) {
                int left = free_at(&c, &q, chosen[i], 0);
                mine[chosen[i]] = true;
                most = left > most ? left : most;
                assert_true(i == 0 || chosen[i] > chosen[i - 1]);
            }
            for (int i = 0; i < c.n; i++) /* none was passed over that had less to spare */
                assert_true(mine[i] || free_at(&c, &q, i, 0) < q.devices_per_node || free_at(&c, &q, i, 0) >= most);
        }
        sched_free(s);
    }
}

/* A switch that has enough nodes is enough, and the one with the fewest to spare. */
static void switches_stay_together(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0003)};
    int together = 0, apart = 0;
    for (int k = 0; k < CASES; k++) {
        struct cluster c;
        cluster_random(&c, &r);
        for (int i = 0; i < c.n; i++)
            c.nodes[i].group = pick(&r, -1, 2);
        struct sched *s = cluster_sched(&c);
        struct sched_request q = request_random(&r, 1);
        int chosen[3], have[3] = {0}, best = -1, used = 0;
        for (int i = 0; i < c.n; i++)
            if (c.nodes[i].group >= 0 && free_at(&c, &q, i, 0) >= q.devices_per_node)
                have[c.nodes[i].group]++;
        for (int g = 0; g < 3; g++)
            if (have[g] >= q.nodes && (best < 0 || have[g] < have[best]))
                best = g;
        if (sched_place(s, &q, chosen) == SCHED_PLACED && q.nodes > 1) {
            bool seen[3] = {false};
            for (int i = 0; i < q.nodes; i++) {
                int g = c.nodes[chosen[i]].group;
                assert_true(best < 0 || (g >= 0 && have[g] == have[best]));
                /* What hangs on one switch stands together in the order of ranks. */
                assert_true(i == 0 || g == c.nodes[chosen[i - 1]].group || g < 0 || !seen[g]);
                used += g >= 0 && !seen[g];
                if (g >= 0)
                    seen[g] = true;
            }
            assert_true(best < 0 || used == 1);
            together += best >= 0;
            apart += best < 0;
        }
        sched_free(s);
    }
    assert_true(together > 500 && apart > 500);
}

static bool unsplit(const int *islands, int n, int tp, int devices)
{
    int whole = 0;
    for (int i = 0; i < n; i++)
        whole += islands[i] / tp;
    return devices % tp != 0 || whole >= devices / tp;
}

/* Tensor parallel groups share NVLink wherever nodes allow it. */
static void groups_are_not_split(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0004)};
    int split = 0, whole = 0;
    for (int k = 0; k < CASES; k++) {
        struct cluster c = {0};
        int islands[MAX_NODES][2], chosen[3], good = 0;
        struct sched_request q = {
            .id = 1, .pool = SCHED_GPU, .nodes = pick(&r, 1, 2), .tp = 2, .devices_per_node = 2 * pick(&r, 1, 2)};
        q.runs_ns = SCHED_ENDLESS;
        for (int n = pick(&r, 1, MAX_NODES); n > 0; n--) {
            int i = c.n;
            cluster_node(&c, 8, 0);
            islands[i][0] = pick(&r, 0, 4);
            islands[i][1] = pick(&r, 0, 4);
            c.nodes[i].free[SCHED_GPU] = islands[i][0] + islands[i][1];
            c.nodes[i].islands = islands[i];
            c.nodes[i].n_islands = 2;
            good += c.nodes[i].free[SCHED_GPU] >= q.devices_per_node && unsplit(islands[i], 2, 2, q.devices_per_node);
        }
        struct sched *s = cluster_sched(&c);
        if (sched_place(s, &q, chosen) == SCHED_PLACED)
            for (int i = 0; i < q.nodes; i++) {
                bool ok = unsplit(islands[chosen[i]], 2, 2, q.devices_per_node);
                assert_true(ok || good < q.nodes);
                whole += ok;
                split += !ok;
            }
        sched_free(s);
    }
    assert_true(split > 100 && whole > 1000);
}

/* ---- two pools, memory, whole nodes -------------------------------------------------------- */

static int64_t needs_mib(const struct cluster *c, const struct sched_request *q, int node)
{
    const struct sched_node *n = &c->nodes[node];
    if (q->mib_per_rank)
        return q->mib_per_rank * q->devices_per_node;
    return q->pool == SCHED_CPU ? n->memory_mib * q->devices_per_node / n->slots[SCHED_CPU] : 0;
}

/* All that the contract says of one node at a time. */
static bool node_takes(const struct cluster *c, const struct sched_request *q, int node, int64_t when)
{
    const struct sched_node *n = &c->nodes[node];
    int devices = q->devices_per_node, there = 0;
    int64_t mib = needs_mib(c, q, node);
    bool whole = false;
    for (int k = 0; k < c->n_parts; k++) {
        const struct held_part *p = &c->parts[k];
        if (p->node != node || (p->ends != SCHED_ENDLESS && p->ends <= when))
            continue;
        devices += p->pool == (int)q->pool ? p->slots : 0;
        mib += p->mib;
        whole |= p->exclusive;
        there++;
    }
    return n->up && n->open && !whole && !(q->exclusive && there) && devices <= n->slots[q->pool] &&
           mib <= n->memory_mib;
}

static int nodes_taking(const struct cluster *c, const struct sched_request *q, int64_t when)
{
    int n = 0;
    for (int i = 0; i < c->n; i++)
        n += node_takes(c, q, i, when);
    return n;
}

static int64_t earliest_of_all(const struct cluster *c, const struct sched_request *q)
{
    int64_t best = nodes_taking(c, q, 0) >= q->nodes ? 0 : SCHED_ENDLESS;
    for (int k = 0; k < c->n_parts; k++)
        if (c->parts[k].ends < best && nodes_taking(c, q, c->parts[k].ends) >= q->nodes)
            best = c->parts[k].ends;
    return best;
}

static void book(struct cluster *c, const struct sched_request *q, int node, int64_t ends, int runner)
{
    c->parts[c->n_parts++] = (struct held_part){.node = node,
                                                .slots = q->devices_per_node,
                                                .pool = (int)q->pool,
                                                .mib = needs_mib(c, q, node),
                                                .ends = ends,
                                                .exclusive = q->exclusive,
                                                .runner = runner};
}

static struct sched_request request_mixed(struct rng *r, int64_t id)
{
    struct sched_request q = request_random(r, id);
    q.pool = (enum sched_pool)pick(r, 0, 1);
    q.nodes = pick(r, 1, 2);
    q.mib_per_rank = pick(r, 0, 2) ? 0 : pick(r, 1, 6) * 10;
    return q;
}

/* What runs was placed by somebody who kept the rules. */
static void cluster_mixed(struct cluster *c, struct rng *r)
{
    *c = (struct cluster){0};
    for (int n = pick(r, 1, 4); n > 0; n--) {
        cluster_node(c, pick(r, 1, 4), pick(r, 4, 12) * 10);
        c->nodes[c->n - 1].slots[SCHED_GPU] = pick(r, 0, 4);
    }
    for (int k = pick(r, 0, 6); k > 0; k--) {
        struct sched_request q = request_mixed(r, 0);
        int node = pick(r, 0, c->n - 1),
            runner = cluster_runner(c, 50, pick(r, 0, 2) ? pick(r, 1, 8) * 10 : SCHED_ENDLESS);
        if (!node_takes(c, &q, node, 0))
            continue;
        book(c, &q, node, c->runners[runner].ends, runner);
        const struct held_part *p = &c->parts[c->n_parts - 1];
        c->held[c->n_held++] = (struct sched_held){.node = node,
                                                   .runner = runner,
                                                   .pool = q.pool,
                                                   .slots = p->slots,
                                                   .mib = p->mib,
                                                   .exclusive = p->exclusive};
    }
    for (int i = 0; i < c->n; i++) {
        struct sched_node *n = &c->nodes[i];
        bool whole = false;
        n->free[SCHED_GPU] = n->slots[SCHED_GPU];
        for (int k = 0; k < c->n_parts; k++) {
            const struct held_part *p = &c->parts[k];
            if (p->node != i)
                continue;
            n->free[p->pool] -= p->slots;
            n->free_mib -= p->mib;
            n->used = true;
            whole |= p->exclusive;
        }
        if (whole)
            n->free[SCHED_CPU] = n->free[SCHED_GPU] = 0;
    }
}

static void two_pools_and_memory(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0006)};
    int placed = 0, behind = 0, both = 0;
    for (int k = 0; k < CASES; k++) {
        struct cluster c;
        cluster_mixed(&c, &r);
        struct sched *s = cluster_sched(&c);
        struct sched_request heads[SCHED_POOLS];
        int64_t promised[SCHED_POOLS] = {-1, -1}, when;
        for (int j = 0, jobs = pick(&r, 1, 8); j < jobs; j++) {
            struct sched_request q = request_mixed(&r, j + 1);
            int chosen[2];
            enum sched_verdict v = sched_place(s, &q, chosen);
            bool alone = promised[0] < 0 && promised[1] < 0;
            if (alone)
                assert_true((v == SCHED_PLACED) == (nodes_taking(&c, &q, 0) >= q.nodes));
            behind += v == SCHED_BEHIND;
            if (v == SCHED_PLACED) {
                for (int i = 0; i < q.nodes; i++)
                    assert_true(node_takes(&c, &q, chosen[i], 0) && (i == 0 || chosen[i] != chosen[i - 1]));
                for (int i = 0; i < q.nodes; i++)
                    book(&c, &q, chosen[i], q.runs_ns, -1);
                placed++;
            }
            for (int p = 0; p < SCHED_POOLS; p++)
                assert_true(promised[p] < 0 || earliest_of_all(&c, &heads[p]) <= promised[p]);
            if (v == SCHED_WAIT && sched_head(s, q.pool, &when) < 0) {
                sched_reserve(s, &q);
                heads[q.pool] = q;
                sched_head(s, q.pool, &when);
                /* Of the second head the time is not before what it would be alone, and is kept. */
                assert_true(when >= earliest_of_all(&c, &q));
                promised[q.pool] = when;
                both += promised[0] >= 0 && promised[1] >= 0;
            }
        }
        assert_false(sched_failed(s));
        sched_free(s);
    }
    assert_true(placed > CASES / 2 && behind > CASES / 40 && both > CASES / 20);
}

/* ---- preemption -------------------------------------------------------------------------- */

static int fit_without(const struct cluster *c, const struct sched_request *q, unsigned gone)
{
    struct cluster left = *c;
    left.n_parts = 0;
    for (int k = 0; k < c->n_parts; k++)
        if (!(gone >> c->parts[k].runner & 1) && !c->runners[c->parts[k].runner].leaving)
            left.parts[left.n_parts++] = c->parts[k];
    return fitting(&left, q, 0);
}

static void who_has_to_go(void **state)
{
    (void)state;
    struct rng r = {UINT64_C(0x5eed0005)};
    int some = 0, none = 0;
    for (int k = 0; k < CASES; k++) {
        struct cluster c;
        cluster_random(&c, &r);
        for (int i = 0; i < c.n_runners; i++) {
            c.runners[i].leaving = pick(&r, 0, 5) == 0;
            c.runners[i].firm = pick(&r, 0, 5) == 0;
        }
        struct sched_request q = request_random(&r, 1);
        int priority = pick(&r, 0, 6) * 10, victims[16], chosen[3];
        struct sched *s = cluster_sched(&c);
        if (sched_place(s, &q, chosen) != SCHED_WAIT) {
            sched_free(s);
            continue;
        }
        int n = sched_preempt(s, &q, priority, 10, victims);
        unsigned allowed = 0, gone = 0;
        int dearest = -1, least_dearest = 1000;
        for (int i = 0; i < c.n_runners; i++)
            if (!c.runners[i].firm && !c.runners[i].leaving && c.runners[i].priority + 10 <= priority)
                allowed |= 1U << i;
        for (int i = 0; i < n; i++) {
            gone |= 1U << victims[i];
            dearest = c.runners[victims[i]].priority > dearest ? c.runners[victims[i]].priority : dearest;
        }
        assert_int_equal(gone & ~allowed, 0);
        for (unsigned set = 0; set < 1U << c.n_runners; set++) {
            int worst = -1;
            if ((set & ~allowed) || fit_without(&c, &q, set) < q.nodes)
                continue;
            for (int i = 0; i < c.n_runners; i++)
                if (set >> i & 1 && c.runners[i].priority > worst)
                    worst = c.runners[i].priority;
            least_dearest = worst < least_dearest ? worst : least_dearest;
            assert_false(n > 0 && set != gone && (set & ~gone) == 0); /* nobody goes for nothing */
        }
        if (n) {
            assert_true(fit_without(&c, &q, gone) >= q.nodes);
            assert_int_equal(dearest, least_dearest); /* nobody of a priority that could be spared */
            some++;
        } else {
            assert_true(least_dearest == 1000 || least_dearest == -1);
            none++;
        }
        sched_free(s);
    }
    assert_true(some > 500 && none > 500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queue_of_jobs),          cmocka_unit_test(best_fit),
        cmocka_unit_test(switches_stay_together), cmocka_unit_test(groups_are_not_split),
        cmocka_unit_test(two_pools_and_memory),   cmocka_unit_test(who_has_to_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
