/* The scheduler: one request against pictures of nodes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/sched.h"

static struct sched_node node(const char *name, int slots, int free)
{
    return (struct sched_node){
        .name = name, .slots = {[SCHED_CPU] = slots}, .free = {[SCHED_CPU] = free}, .up = true, .open = true};
}

static struct sched_answer place(struct sched_node *nodes, int n, int want_nodes, int devices, uint32_t uid,
                                 int *chosen)
{
    struct sched_answer a;
    struct sched_request r = {.nodes = want_nodes, .devices_per_node = devices, .uid = uid};
    for (int i = 0; i < want_nodes; i++)
        chosen[i] = -1;
    sched_place(nodes, n, &r, chosen, &a);
    return a;
}

static void first_fit_in_order(void **state)
{
    (void)state;
    int chosen[2];
    struct sched_node nodes[] = {node("a", 4, 1), node("b", 4, 2), node("c", 4, 4)};
    struct sched_answer a = place(nodes, 3, 1, 2, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    a = place(nodes, 3, 2, 2, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    assert_int_equal(chosen[1], 2);
    /* All or nothing. */
    a = place(nodes, 3, 2, 3, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_string_equal(a.text, "needs 2 nodes of 3 devices; nodes with them free: 1");
}

static void what_it_waits_for(void **state)
{
    (void)state;
    int chosen[8];
    struct sched_node nodes[] = {node("a", 2, 1), node("b", 4, 0)};
    struct sched_answer a = place(nodes, 2, 1, 2, 0, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_int_equal(a.reason, BOOST__REASON__VALUE__NoDevices);
    assert_string_equal(a.text, "needs 2 devices, 1 of 2 free");
    a = place(nodes, 2, 1, 8, 0, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 8 devices on a node; the largest has 4");
    a = place(nodes, 2, 8, 1, 0, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_int_equal(a.reason, BOOST__REASON__VALUE__NodesDown);
    assert_string_equal(a.text, "needs 8 nodes, 2 up");
    a = place(nodes, 2, 2, 4, 0, chosen);
    assert_string_equal(a.text, "needs 2 nodes of 4 devices; nodes that large: 1");
    a = place(nodes, 0, 1, 1, 0, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "no node is up");
}

static void who_may_where(void **state)
{
    (void)state;
    int chosen[1];
    struct sched_node nodes[] = {node("a", 2, 2), node("b", 2, 2), node("c", 2, 2)};
    nodes[0].up = false;
    nodes[1].uid = 1001;
    nodes[2].open = false;
    struct sched_answer a = place(nodes, 3, 1, 1, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "node b takes only jobs of uid 1001 (its agent does not run as root)");
    a = place(nodes, 3, 1, 1, 1001, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    nodes[1].open = false;
    a = place(nodes, 3, 1, 1, 1001, chosen);
    assert_string_equal(a.text, "no node takes new work: 2 up, all cordoned or draining");
    /* root's agents take everyone's */
    nodes[2].open = true;
    a = place(nodes, 3, 1, 1, 1000, chosen);
    assert_int_equal(chosen[0], 2);
}

/* GPUs are counted for themselves, and called what they are. */
static void two_pools(void **state)
{
    (void)state;
    int chosen[1];
    struct sched_node nodes[] = {node("a", 64, 64), node("b", 1, 0)};
    struct sched_answer a;
    struct sched_request r = {.pool = SCHED_GPU, .nodes = 1, .devices_per_node = 2};
    sched_place(nodes, 2, &r, chosen, &a);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 2 GPUs; no node that is up has any that works");
    nodes[1].slots[SCHED_GPU] = 4;
    nodes[1].free[SCHED_GPU] = 1;
    sched_place(nodes, 2, &r, chosen, &a);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_string_equal(a.text, "needs 2 GPUs, 1 of 4 free");
    nodes[1].free[SCHED_GPU] = 2;
    sched_place(nodes, 2, &r, chosen, &a);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    r.devices_per_node = 5;
    sched_place(nodes, 2, &r, chosen, &a);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 5 GPUs on a node; the largest has 4");
    r.pool = SCHED_CPU;
    sched_place(nodes, 2, &r, chosen, &a);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 0);
}

/* Against a plain search: whenever enough nodes have room it places, and only on such nodes. */
static void against_counting(void **state)
{
    (void)state;
    uint64_t seed = 12345;
    for (int round = 0; round < 20000; round++) {
        struct sched_node nodes[6];
        int chosen[4], n = (int)(seed % 7), can = 0;
        for (int i = 0; i < n; i++) {
            seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
            nodes[i] = node("x", 1 + (int)((seed >> 33) % 8), 0);
            nodes[i].free[SCHED_CPU] = (int)((seed >> 40) % (uint64_t)(nodes[i].slots[SCHED_CPU] + 1));
            /* The other pool must not matter, whatever it has. */
            nodes[i].slots[SCHED_GPU] = (int)((seed >> 45) % 9);
            nodes[i].free[SCHED_GPU] = (int)((seed >> 21) % (uint64_t)(nodes[i].slots[SCHED_GPU] + 1));
            nodes[i].up = (seed >> 50) % 4 != 0;
            nodes[i].open = (seed >> 53) % 4 != 0;
            nodes[i].uid = (seed >> 56) % 3 ? 0 : 1000 + (uint32_t)((seed >> 58) % 2);
        }
        seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
        int want = 1 + (int)((seed >> 33) % 3), devices = 1 + (int)((seed >> 40) % 8);
        for (int i = 0; i < n; i++)
            can += nodes[i].up && nodes[i].open && (nodes[i].uid == 0 || nodes[i].uid == 1000) &&
                   nodes[i].free[SCHED_CPU] >= devices;
        struct sched_answer a = place(nodes, n, want, devices, 1000, chosen);
        assert_int_equal(a.verdict == SCHED_PLACED, can >= want);
        if (a.verdict != SCHED_PLACED) {
            assert_true(a.text[0] != 0 && a.reason != BOOST__REASON__VALUE__NONE);
            continue;
        }
        for (int i = 0; i < want; i++) {
            const struct sched_node *x = &nodes[chosen[i]];
            assert_true(x->up && x->open && x->free[SCHED_CPU] >= devices && (x->uid == 0 || x->uid == 1000));
            assert_true(i == 0 || chosen[i] > chosen[i - 1]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_fit_in_order), cmocka_unit_test(what_it_waits_for), cmocka_unit_test(who_may_where),
        cmocka_unit_test(against_counting),   cmocka_unit_test(two_pools),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
