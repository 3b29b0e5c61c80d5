/* Who goes first, where to, and why the others wait: the scheduler inside the core. */
#include "tests/unit/daemon/core_wants.h"

static void priority_then_age(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "gpu01", 1));
    int64_t first = submit_want(w, (struct want){0}), second = submit_want(w, (struct want){0});
    int64_t third = submit_want(w, (struct want){0}), urgent = submit_want(w, (struct want){.priority = 60});
    assert_state(w, first, STARTING);
    assert_string_equal(info(w, urgent), "needs 1 device, 0 of 1 free");
    assert_state(w, third, QUEUED);
    ends(w, first);
    assert_state(w, urgent, STARTING);
    ends(w, urgent);
    assert_state(w, second, STARTING);
    assert_state(w, third, QUEUED);
    ends(w, second);
    assert_state(w, third, STARTING);
    world_free(w);
}

/* Whatever is submitted, raised and lowered: one after the other goes by priority and then by age. */
static void any_order(void **state)
{
    (void)state;
    enum { JOBS = 24 };
    struct world *w = world_new();
    w->config.fair_share_half_life_s = 0;
    reconfigured(w);
    uint64_t seed = 0x5eed0007;
    int priority[JOBS + 1] = {0};
    for (int k = 1; k <= JOBS; k++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407ULL;
        priority[k] = 1 + (int)(seed >> 33) % 7;
        assert_int_equal(submit_want(w, (struct want){.priority = priority[k], .user = k % 3 ? &user_ann : &user_bob}),
                         k);
    }
    for (int k = 1; k <= JOBS; k += 5) {
        Boost__UpdateRequest u = BOOST__UPDATE_REQUEST__INIT;
        struct core_user root = {.uid = 0, .name = "root"};
        u.has_priority = 1;
        u.priority = priority[k] = (priority[k] * 3) % 8;
        core_update(w->core, &u, k, &root, on_control, w);
        pump(w);
        assert_int_equal(w->reply_rc, ERR_OK);
    }
    join_world(w, agent_add(w, "gpu01", 1));
    pump(w);
    for (int n = 0; n < JOBS; n++) {
        int first = 0;
        for (int k = 1; k <= JOBS; k++)
            if (priority[k] >= 0 && (!first || priority[k] > priority[first]))
                first = k;
        assert_state(w, first, STARTING);
        priority[first] = -1;
        ends(w, first);
    }
    world_free(w);
}

/* Users who have used the same take turns within one pass. */
static void equals_take_turns(void **state)
{
    (void)state;
    struct world *w = world_new();
    int started[2] = {0};
    for (int k = 0; k < 8; k++)
        submit_want(w, (struct want){.user = k < 4 ? &user_ann : &user_bob});
    join_world(w, agent_add(w, "gpu01", 4));
    pump(w);
    for (int k = 0; k < 8; k++)
        started[k / 4] += job_of(w, k + 1)->state == STATE(STARTING);
    assert_int_equal(started[0], 2);
    assert_int_equal(started[1], 2);
    world_free(w);
}

/* Time passes while a job is placed. */
static void slow_log(void *arg, enum core_log_level level, const char *text)
{
    struct world *w = arg;
    (void)level;
    if (strstr(text, "started"))
        w->now += 10 * NS_PER_MS;
}

/* A pass that took long is not followed by the next at once, so that others are answered meanwhile. */
static void slow_passes_pause(void **state)
{
    (void)state;
    struct world *w = world_new();
    w->ops.log = slow_log;
    reconfigured(w);
    join_world(w, agent_add(w, "gpu01", 4));
    int64_t first = submit_want(w, (struct want){0}), second = submit_want(w, (struct want){0});
    assert_state(w, first, STARTING);
    assert_state(w, second, QUEUED);
    advance(w, 25);
    assert_state(w, second, QUEUED);
    advance(w, 10);
    assert_state(w, second, STARTING);
    world_free(w);
}

/* Who has used less goes first, also after a restart, and what is long ago counts little. */
static void fair_share(void **state)
{
    (void)state;
    struct world *w = world_new();
    w->config.fair_share_half_life_s = 100;
    reconfigured(w);
    struct fake_agent *a = agent_add(w, "gpu01", 1);
    join_world(w, a);
    int64_t ann = submit_want(w, (struct want){0}), ann_next = submit_want(w, (struct want){0});
    int64_t bob = submit_want(w, (struct want){.user = &user_bob});
    runs(w, ann);
    advance(w, 50000);
    ends(w, ann);
    assert_state(w, bob, STARTING);
    assert_state(w, ann_next, QUEUED);
    runs(w, bob);
    advance(w, 20000);
    controller_restart(w);
    join_world(w, a);
    advance(w, 1000);
    int64_t bob_next = submit_want(w, (struct want){.user = &user_bob});
    ends(w, bob); /* 21 s of late against some 50 of before that */
    assert_state(w, bob_next, STARTING);
    assert_state(w, ann_next, QUEUED);
    runs(w, bob_next);
    advance(w, 60000);
    int64_t bob_last = submit_want(w, (struct want){.user = &user_bob});
    ends(w, bob_next);
    assert_state(w, ann_next, STARTING);
    assert_state(w, bob_last, QUEUED);
    world_free(w);
}

/* The first that waits is promised the devices of those that end; only who is gone by then, or is in nobody's way,
 * goes before. */
static void backfill(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "gpu01", 2));
    join_world(w, agent_add(w, "gpu02", 4));
    int64_t limited = submit_want(w, (struct want){.tp = 1, .limit_s = 100, .nodelist = "gpu02"});
    int64_t head = submit_want(w, (struct want){.tp = 4, .priority = 60});
    assert_string_equal(info(w, head), "needs 4 devices, 3 of 4 free");
    int64_t endless = submit_want(w, (struct want){.tp = 2, .nodelist = "gpu02"});
    assert_string_equal(info(w, endless), "waits for priority: job 2 is ahead and needs 4 devices, 3 of 4 free");
    int64_t late = submit_want(w, (struct want){.tp = 2, .limit_s = 101, .nodelist = "gpu02"});
    assert_state(w, late, QUEUED);
    int64_t fits = submit_want(w, (struct want){.tp = 2, .limit_s = 90, .nodelist = "gpu02"});
    assert_state(w, fits, STARTING);
    int64_t aside = submit_want(w, (struct want){.tp = 2}); /* where the head cannot go */
    assert_state(w, aside, STARTING);
    ends(w, limited);
    assert_state(w, head, QUEUED);
    ends(w, fits);
    assert_state(w, head, STARTING);
    world_free(w);
}

static void whole_nodes(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "gpu01", 2));
    join_world(w, agent_add(w, "gpu02", 2));
    int64_t small = submit_want(w, (struct want){0}), whole = submit_want(w, (struct want){.exclusive = true});
    assert_state(w, whole, STARTING);
    assert_string_equal(job_live_attempt(job_of(w, whole))->parts[0].node, "gpu02");
    int64_t two = submit_want(w, (struct want){.tp = 2}), next = submit_want(w, (struct want){.exclusive = true});
    assert_string_equal(info(w, two), "needs 2 devices, 1 of 2 free");
    ends(w, small);
    assert_state(w, two, STARTING);
    assert_string_equal(info(w, next), "needs 1 whole node, 0 of 2 empty");
    ends(w, whole);
    assert_state(w, next, STARTING);
    world_free(w);
}

static void memory(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "gpu01", 4)); /* of 4096 MiB */
    int64_t big = submit_want(w, (struct want){.mib = 3000}), same = submit_want(w, (struct want){.mib = 1500});
    int64_t share = submit_want(w, (struct want){0});
    assert_state(w, big, STARTING);
    assert_string_equal(info(w, same), "needs 1500 MiB of memory on a node, 1096 free");
    assert_says(info(w, share), "waits for priority: job 2 is ahead");
    ends(w, big);
    assert_state(w, same, STARTING);
    assert_state(w, share, STARTING);
    world_free(w);
}

/* Consecutive ranks share a node, so that tensor parallel groups do. */
static void several_nodes(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "gpu01", 2));
    join_world(w, agent_add(w, "gpu02", 1));
    int64_t id = submit_want(w, (struct want){.tp = 4, .nodes = 2});
    assert_string_equal(info(w, id), "needs 2 nodes of 2 devices; nodes that large: 1");
    join_world(w, agent_add(w, "gpu03", 2));
    pump(w);
    struct attempt *a = job_live_attempt(job_of(w, id));
    assert_non_null(a);
    assert_int_equal(a->n_parts, 2);
    for (int r = 0; r < 4; r++)
        assert_string_equal(a->parts[a->ranks[r].part].node, r < 2 ? "gpu01" : "gpu03");
    struct fake_attempt *x = newest(w, agent_of(w, "gpu03"), id);
    assert_int_equal(x->world, 4);
    assert_int_equal(x->ranks[0], 2);
    runs(w, id);
    ends(w, id);
    world_free(w);
}

static void labelled(struct world *w, struct fake_agent *a, const char *key, const char *value, const char *net)
{
    Boost__Register r = BOOST__REGISTER__INIT;
    Boost__KeyValue kv = BOOST__KEY_VALUE__INIT, *list = &kv;
    struct error err;
    kv.key = (char *)(uintptr_t)key;
    kv.value = (char *)(uintptr_t)value;
    r.node = a->name;
    r.boot_id = a->boot;
    r.instance = a->instance;
    r.has_cpu_slots = r.has_memory_mib = r.has_uid = 1;
    r.cpu_slots = a->slots;
    r.memory_mib = 4096;
    r.label = &list;
    r.n_label = 1;
    r.switch_ = (char *)(uintptr_t)net;
    a->connected = true;
    assert_int_equal(core_agent_register(w->core, &r, &err), ERR_OK);
    pump(w);
}

static void labels_and_switches(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = agent_add(w, "gpu01", 1);
    labelled(w, a, "gpu", "h100", "s1");
    labelled(w, agent_add(w, "gpu02", 2), "gpu", "h200", "s2");
    labelled(w, agent_add(w, "gpu03", 2), "gpu", "h200", "s2");
    int64_t both = submit_want(w, (struct want){.tp = 2, .nodes = 2});
    struct attempt *x = job_live_attempt(job_of(w, both));
    assert_string_equal(x->parts[0].node, "gpu02"); /* though gpu01 is the best fit for one of its ranks */
    assert_string_equal(x->parts[1].node, "gpu03");
    int64_t h200 = submit_want(w, (struct want){.constraint = "gpu=h200"});
    assert_string_equal(job_live_attempt(job_of(w, h200))->parts[0].node, "gpu02");
    int64_t h300 = submit_want(w, (struct want){.constraint = "gpu=h300"});
    assert_string_equal(info(w, h300), "needs 1 node with gpu=h300, 0 up");
    int64_t named = submit_want(w, (struct want){.nodelist = "gpu[05-09]"});
    assert_string_equal(info(w, named), "needs 1 node of gpu[05-09], 0 up");
    disconnect(w, a);
    labelled(w, a, "gpu", "h300", "s1");
    advance(w, 100);
    assert_state(w, h300, STARTING);
    world_free(w);
}

/* Off unless asked for; of lower priority by the gap; no more than need be; and the victim goes on afterwards. */
static void preemption(void **state)
{
    (void)state;
    struct world *w = world_new();
    w->config.preempt = true;
    w->config.preempt_gap = 20;
    reconfigured(w);
    join_world(w, agent_add(w, "gpu01", 4));
    join_world(w, agent_add(w, "gpu02", 4));
    int64_t near = submit_want(w, (struct want){.tp = 4, .priority = 41});
    int64_t low = submit_want(w, (struct want){.tp = 2, .priority = 10}),
            lower = submit_want(w, (struct want){.tp = 2, .priority = 5});
    runs(w, near);
    runs(w, low);
    runs(w, lower);
    int64_t one = submit_want(w, (struct want){.tp = 2, .priority = 60});
    advance(w, 2000);
    assert_state(w, one, STARTING);
    assert_state(w, lower, QUEUED);
    assert_state(w, low, RUNNING);
    assert_state(w, near, RUNNING);
    assert_string_equal(info(w, lower), "needs 2 devices, 0 of 4 free");
    int64_t two = submit_want(w, (struct want){.tp = 4, .priority = 60});
    advance(w, 2000);
    assert_state(w, two, QUEUED); /* both nodes have somebody of too high a priority */
    assert_state(w, low, RUNNING);
    ends(w, near);
    advance(w, 100);
    assert_state(w, two, STARTING);
    runs(w, one);
    ends(w, one);
    advance(w, 100);
    assert_state(w, lower, STARTING);
    assert_int_equal(core_stats(w->core)->illegal_transitions, 0);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(priority_then_age),   cmocka_unit_test(any_order),  cmocka_unit_test(equals_take_turns),
        cmocka_unit_test(slow_passes_pause),   cmocka_unit_test(fair_share), cmocka_unit_test(backfill),
        cmocka_unit_test(whole_nodes),         cmocka_unit_test(memory),     cmocka_unit_test(several_nodes),
        cmocka_unit_test(labels_and_switches), cmocka_unit_test(preemption),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
