/* The scheduler: one request against pictures of nodes, and what it says. sched_property_test.c tries everything. */
#include "sched_world.h"

static struct sched_node node(const char *name, int slots, int free)
{
    return (struct sched_node){.name = name,
                               .slots = {[SCHED_CPU] = slots},
                               .free = {[SCHED_CPU] = free},
                               .up = true,
                               .open = true,
                               .used = free < slots,
                               .group = -1};
}

static struct sched_answer ask(struct sched_node *nodes, int n, const struct sched_request *r, int *chosen)
{
    struct sched *s = sched_new(nodes, n, NULL, 0, NULL, 0, 0);
    struct sched_answer a;
    assert_non_null(s);
    sched_explain(s, r, &a);
    enum sched_verdict v = sched_place(s, r, chosen);
    assert_int_equal(v, a.verdict); /* to look is not to change */
    sched_free(s);
    return a;
}

static struct sched_answer place(struct sched_node *nodes, int n, int want_nodes, int devices, uint32_t uid,
                                 int *chosen)
{
    struct sched_request r = {.nodes = want_nodes, .devices_per_node = devices, .uid = uid, .runs_ns = SCHED_ENDLESS};
    for (int i = 0; i < want_nodes; i++)
        chosen[i] = -1;
    return ask(nodes, n, &r, chosen);
}

static void least_left_over(void **state)
{
    (void)state;
    int chosen[2];
    struct sched_node nodes[] = {node("a", 4, 4), node("b", 4, 1), node("c", 4, 2)};
    struct sched_answer a = place(nodes, 3, 1, 2, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 2);
    a = place(nodes, 3, 2, 2, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 0);
    assert_int_equal(chosen[1], 2);
    /* All or nothing. */
    a = place(nodes, 3, 2, 3, 1000, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_int_equal(chosen[0], -1);
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
    struct sched_request r = {.pool = SCHED_GPU, .nodes = 1, .devices_per_node = 2, .runs_ns = SCHED_ENDLESS};
    struct sched_answer a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 2 GPUs; no node that is up has any that works");
    nodes[1].slots[SCHED_GPU] = 4;
    nodes[1].free[SCHED_GPU] = 1;
    a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_string_equal(a.text, "needs 2 GPUs, 1 of 4 free");
    nodes[1].free[SCHED_GPU] = 2;
    a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    r.devices_per_node = 5;
    a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 5 GPUs on a node; the largest has 4");
    r.pool = SCHED_CPU;
    a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 0);
}

static Boost__KeyValue pair(const char *key, const char *value)
{
    Boost__KeyValue kv = BOOST__KEY_VALUE__INIT;
    kv.key = (char *)(uintptr_t)key;
    kv.value = (char *)(uintptr_t)value;
    return kv;
}

static void labels_and_lists(void **state)
{
    (void)state;
    int chosen[2];
    struct sched_node nodes[] = {node("gpu01", 2, 2), node("gpu02", 2, 2), node("gpu10", 2, 1)};
    Boost__KeyValue h200 = pair("gpu", "h200"), r3 = pair("rack", "r3"), fast = pair("fast", "");
    Boost__KeyValue *first[] = {&h200, &r3}, *second[] = {&h200}, *third[] = {&fast};
    nodes[0].labels = first;
    nodes[0].n_labels = 2;
    nodes[1].labels = second;
    nodes[1].n_labels = 1;
    nodes[2].labels = third;
    nodes[2].n_labels = 1;
    struct sched_request r = {
        .nodes = 1, .devices_per_node = 1, .constraint = "gpu=h200&!rack=r3", .runs_ns = SCHED_ENDLESS};
    assert_int_equal(ask(nodes, 3, &r, chosen).verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    r.nodes = 2;
    struct sched_answer a = ask(nodes, 3, &r, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 2 nodes with gpu=h200&!rack=r3, 1 up");
    r.constraint = "gpu=h200&!rack=r3|fast";
    assert_int_equal(ask(nodes, 3, &r, chosen).verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    assert_int_equal(chosen[1], 2);
    r = (struct sched_request){
        .nodes = 1, .devices_per_node = 2, .nodelist = "gpu[02-10]", .exclude = "gpu02", .runs_ns = SCHED_ENDLESS};
    a = ask(nodes, 3, &r, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_string_equal(a.text, "needs 2 devices of gpu[02-10] other than gpu02, 1 of 2 free");
    r.nodelist = "gpu[01-02]";
    assert_int_equal(ask(nodes, 3, &r, chosen).verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 0);
}

static void whole_nodes_and_memory(void **state)
{
    (void)state;
    int chosen[1];
    struct sched_node nodes[] = {node("a", 4, 3), node("b", 8, 8)};
    nodes[0].memory_mib = nodes[1].memory_mib = 1000;
    nodes[0].free_mib = 750;
    nodes[1].free_mib = 1000;
    struct sched_request r = {.nodes = 1, .devices_per_node = 1, .exclusive = true, .runs_ns = SCHED_ENDLESS};
    assert_int_equal(ask(nodes, 2, &r, chosen).verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    nodes[1].used = true;
    assert_string_equal(ask(nodes, 2, &r, chosen).text, "needs 1 whole node, 0 of 2 empty");
    r.exclusive = false;
    r.mib_per_rank = 800;
    assert_int_equal(ask(nodes, 2, &r, chosen).verdict, SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    nodes[1].free_mib = 700;
    struct sched_answer a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_WAIT);
    assert_string_equal(a.text, "needs 800 MiB of memory on a node, 750 free");
    r.devices_per_node = 2;
    a = ask(nodes, 2, &r, chosen);
    assert_int_equal(a.verdict, SCHED_NEVER);
    assert_string_equal(a.text, "needs 1600 MiB of memory on each of 1 node; nodes with so much: 0");
}

/* A job that has to wait says so, and for whom others wait. */
static void behind_the_head(void **state)
{
    (void)state;
    int chosen[2];
    struct cluster c = {0};
    cluster_node(&c, 4, 0);
    cluster_node(&c, 4, 0);
    cluster_hold(&c, cluster_runner(&c, 50, 100), 0, 2);
    cluster_hold(&c, cluster_runner(&c, 50, SCHED_ENDLESS), 1, 3);
    struct sched *s = cluster_sched(&c);
    struct sched_request big = {.id = 7, .nodes = 1, .devices_per_node = 4, .runs_ns = SCHED_ENDLESS};
    struct sched_request small = {.id = 8, .nodes = 1, .devices_per_node = 2, .runs_ns = SCHED_ENDLESS};
    struct sched_answer a;
    int64_t when;
    assert_int_equal(sched_head(s, SCHED_CPU, &when), -1);
    assert_int_equal(sched_place(s, &big, chosen), SCHED_WAIT);
    sched_reserve(s, &big);
    assert_int_equal(sched_head(s, SCHED_CPU, &when), 7);
    assert_int_equal(when, 100);
    sched_explain(s, &small, &a);
    assert_int_equal(a.verdict, SCHED_BEHIND);
    assert_string_equal(a.text, "waits for priority: job 7 is ahead and needs 4 devices, 2 of 4 free");
    small.runs_ns = 101;
    assert_int_equal(sched_place(s, &small, chosen), SCHED_BEHIND);
    small.devices_per_node = 1; /* the head leaves that over */
    small.runs_ns = SCHED_ENDLESS;
    assert_int_equal(sched_place(s, &small, chosen), SCHED_PLACED);
    assert_int_equal(chosen[0], 1);
    small.devices_per_node = 2;
    small.runs_ns = 100;
    assert_false(sched_full(s, SCHED_CPU));
    assert_int_equal(sched_place(s, &small, chosen), SCHED_PLACED);
    assert_int_equal(chosen[0], 0);
    assert_true(sched_full(s, SCHED_CPU));
    sched_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(least_left_over),  cmocka_unit_test(what_it_waits_for),
        cmocka_unit_test(who_may_where),    cmocka_unit_test(two_pools),
        cmocka_unit_test(labels_and_lists), cmocka_unit_test(whole_nodes_and_memory),
        cmocka_unit_test(behind_the_head),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
