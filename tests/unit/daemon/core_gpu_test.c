/* The controller core with nodes that have GPUs: two pools, devices that fail, what is shown. */
#include "tests/unit/daemon/core_world.h"

#include "worker/plan/plan.h"

/* A job of `ranks` ranks on that device (AUTO: left out); 0 when it is refused. */
static int64_t submit_on(struct world *w, Boost__Device__Value device, int ranks)
{
    struct arena mem;
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    arena_init(&mem, 1 << 20);
    Boost__JobSpec *spec = spec_new(&mem);
    spec->parallel->tp = ranks;
    resources.has_device = device != BOOST__DEVICE__VALUE__AUTO;
    resources.device = device;
    spec->resources = &resources;
    int64_t id = submit_spec(w, spec, false);
    arena_free(&mem);
    return id;
}
#define CPU  BOOST__DEVICE__VALUE__CPU
#define CUDA BOOST__DEVICE__VALUE__CUDA
#define AUTO BOOST__DEVICE__VALUE__AUTO

static const char *info_of(struct world *w, int64_t id, struct arena *mem)
{
    return core_summary(w->core, job_of(w, id), mem)->info;
}

static Boost__NodeInfo *node_info(struct world *w, const char *name, struct arena *mem)
{
    Boost__NodesReply *r = core_nodes(w->core, mem);
    for (size_t i = 0; i < r->n_nodes; i++)
        if (strcmp(r->nodes[i]->name, name) == 0)
            return r->nodes[i];
    fail_msg("no node %s", name);
    return NULL;
}

static struct fake_agent *gpu_node(struct world *w, const char *name, int slots, int gpus)
{
    struct fake_agent *a = agent_add(w, name, slots);
    a->gpus = gpus;
    join_world(w, a);
    pump(w);
    return a;
}

static void auto_is_cuda_where_a_node_has_gpus(void **state)
{
    (void)state;
    struct world *w = world_new();
    join_world(w, agent_add(w, "n1", 2));
    int64_t before = submit_on(w, AUTO, 2);
    assert_int_equal(job_of(w, before)->resolved->resources->device, CPU);
    struct fake_agent *a = gpu_node(w, "n2", 2, 4);
    int64_t after = submit_on(w, AUTO, 2);
    const Boost__JobSpec *s = job_of(w, after)->resolved;
    assert_int_equal(s->resources->device, CUDA);
    assert_int_equal(s->run->precision, BOOST__PRECISION__VALUE__BF16);
    assert_int_equal(job_of(w, before)->resolved->resources->device, CPU);
    assert_true(newest(w, a, after)->cuda && newest(w, a, after)->gpus[0] == 0 && newest(w, a, after)->gpus[1] == 1);
    assert_says(event_of(w, 0, "node-up")->text, "n2 is up: 4 GPUs (NVIDIA H200), 2 CPU slots");
    world_free(w);
}

/* While the node is away AUTO stays what it was: a restarted controller has it from the store. */
static void gpus_are_remembered(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 4);
    controller_restart(w);
    int64_t id = submit_on(w, AUTO, 2);
    assert_int_equal(job_of(w, id)->resolved->resources->device, CUDA);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    Boost__NodeInfo *n = node_info(w, "n1", &mem);
    assert_true(n->devices == 4 && n->n_gpus == 0);
    assert_string_equal(n->device_kind, "NVIDIA H200");
    a->gpus_unknown = true;
    join_world(w, a);
    n = node_info(w, "n1", &mem);
    assert_true(n->devices == 4 && n->n_gpus == 0);
    pump(w);
    assert_state(w, id, STARTING);
    assert_int_equal(node_info(w, "n1", &mem)->n_gpus, 4);
    /* Its devices are held over another restart, before anybody has said so. */
    controller_restart(w);
    assert_int_equal(node_info(w, "n1", &mem)->devices_busy, 2);
    assert_int_equal(node_info(w, "n1", &mem)->cpu_slots_busy, 0);
    /* An agent that gives none away says so. */
    a->gpus = 0;
    a->gpus_unknown = false;
    join_world(w, a);
    pump(w);
    assert_string_equal(node_info(w, "n1", &mem)->device_kind, "cpu");
    arena_free(&mem);
    world_free(w);
}

/* A job that waits for one pool holds nobody of the other up; within a pool the order stands. */
static void pools_do_not_wait_for_each_other(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 4);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t gpus = submit_on(w, CUDA, 2), slots = submit_on(w, CPU, 2);
    assert_true(newest(w, a, gpus)->cuda && !newest(w, a, slots)->cuda);
    int64_t waits = submit_on(w, CPU, 1), large = submit_on(w, CUDA, 4), small = submit_on(w, CUDA, 2);
    assert_says(info_of(w, waits, &mem), "needs 1 device, 0 of 2 free");
    assert_says(info_of(w, large, &mem), "needs 4 GPUs, 2 of 4 free");
    assert_says(info_of(w, small, &mem), "waits for priority: job");
    Boost__NodeInfo *n = node_info(w, "n1", &mem);
    assert_true(n->devices == 4 && n->devices_busy == 2 && n->cpu_slots == 2 && n->cpu_slots_busy == 2);
    Boost__Totals *t = core_totals(w->core, &mem);
    assert_true(t->devices == 4 && t->devices_busy == 2 && t->cpu_slots == 2 && t->cpu_slots_busy == 2);
    assert_int_equal(control(w, CANCEL, large, true), ERR_OK);
    assert_int_equal(newest(w, a, small)->gpus[0], 2);
    assert_state(w, waits, QUEUED);
    arena_free(&mem);
    world_free(w);
}

static void no_gpus_anywhere(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    join_world(w, agent_add(w, "n1", 2));
    int64_t id = submit_on(w, CUDA, 1), other = submit_on(w, CPU, 1);
    assert_says(info_of(w, id, &mem), "needs 1 GPU; no node that is up has any that works");
    assert_state(w, other, STARTING);
    arena_free(&mem);
    world_free(w);
}

/* The smallest device of any node bounds what AUTO chooses, less what the arena cannot have. */
static void memory_of_the_smallest_gpu(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    gpu_node(w, "n1", 2, 2);
    Boost__JobSpec *spec = spec_new(&mem);
    Boost__Resources resources = BOOST__RESOURCES__INIT;
    resources.has_device = 1;
    resources.device = CUDA;
    spec->resources = &resources;
    /* fp32 moments and master, gradients, bf16 weights: 18 bytes an element and more than GPU_MIB in all. */
    spec->model->hidden = 16384, spec->model->layers = 64, spec->model->intermediate = 65536, spec->model->rank = 4096;
    spec->parallel->tp = 1;
    assert_int_equal(submit_spec(w, spec, true), 0);
    char want[64];
    snprintf(want, sizeof want, "the smallest GPU gives it %d MiB", GPU_MIB - (int)(plan_cuda_reserve() >> 20));
    assert_says(w->reply_text, want);
    arena_free(&mem);
    world_free(w);
}

static void a_device_that_fails_is_passed_over(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 4);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t first = submit_on(w, CUDA, 2);
    assert_true(newest(w, a, first)->gpus[0] == 0 && newest(w, a, first)->gpus[1] == 1);
    a->gpu_trouble[0] = "Xid 79 (fell off the bus)";
    say_devices(w, a);
    pump(w);
    assert_says(event_of(w, 0, "device-unhealthy")->text,
                "gpu 0 (NVIDIA H200) of n1 is not given to new attempts: Xid 79 (fell off the bus)");
    say_devices(w, a);
    pump(w);
    assert_int_equal(count_events(w, 0, "device-unhealthy"), 1); /* once */
    assert_says(node_info(w, "n1", &mem)->reason, "gpu 0: Xid 79");
    /* It broke under the job: the two that nobody has are still free. */
    int64_t second = submit_on(w, CUDA, 2);
    assert_state(w, second, STARTING);
    /* The job's rank dies of it: infrastructure, and the text says which device. */
    struct fake_attempt *x = newest(w, a, first);
    say_step(w, a, x, 1);
    say_end_of(w, a, x, 0,
               (struct end){.exit_code = 66, .error = "CUDA error 719", .device = "gpu 0 (NVIDIA H200): Xid 79 (...)"});
    pump(w);
    assert_says(event_of(w, first, "rank-exit")->text,
                "exit code 66 (device or driver) on gpu 0 (NVIDIA H200): Xid 79 (...): CUDA error 719");
    assert_says(event_of(w, first, "rank-exit")->text, "infrastructure, no restart used");
    say_devices(w, a);
    advance(w, 3000);
    assert_says(info_of(w, first, &mem), "needs 2 GPUs, 1 of 3 free");
    int64_t all = submit_on(w, CUDA, 4);
    assert_says(info_of(w, all, &mem), "needs 4 GPUs on a node; the largest has 3");
    a->gpu_trouble[0] = NULL;
    say_devices(w, a);
    pump(w);
    assert_says(event_of(w, 0, "device-healthy")->text, "gpu 0 (NVIDIA H200) of n1 works again");
    assert_state(w, first, STARTING);
    arena_free(&mem);
    world_free(w);
}

/* A counter that rises every other second is one event, another trouble another. */
static void a_rising_counter_is_told_once(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 2);
    const char *says[] = {"9 uncorrected memory errors", "10 uncorrected memory errors",
                          "4711 uncorrected memory errors", "Xid 48 (double-bit memory error)"};
    for (int i = 0; i < 4; i++) {
        a->gpu_trouble[1] = says[i];
        say_devices(w, a);
        pump(w);
        assert_int_equal(count_events(w, 0, "device-unhealthy"), i < 3 ? 1 : 2);
    }
    world_free(w);
}

/* One that the driver no longer lists, under a job that has it too. */
static void a_device_that_vanishes_is_told(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 4);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t id = submit_on(w, CUDA, 4);
    assert_state(w, id, STARTING);
    a->gpus = 3;
    say_devices(w, a);
    pump(w);
    assert_int_equal(count_events(w, 0, "device-gone"), 1);
    assert_says(event_of(w, 0, "device-gone")->text, "gpu 3 (NVIDIA H200) of n1 is no longer there");
    int64_t next = submit_on(w, CUDA, 1);
    assert_says(info_of(w, next, &mem), "needs 1 GPU, 0 of 3 free");
    arena_free(&mem);
    world_free(w);
}

static void a_strangers_process_takes_a_device(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct arena mem;
    arena_init(&mem, 1 << 20);
    struct fake_agent *a = agent_add(w, "n1", 2);
    a->gpus = 2;
    a->gpu_taken[0] = true;
    join_world(w, a);
    int64_t both = submit_on(w, CUDA, 2);
    assert_says(info_of(w, both, &mem), "needs 2 GPUs, 1 of 2 free");
    a->gpu_taken[0] = false;
    say_devices(w, a);
    pump(w);
    assert_state(w, both, STARTING);
    arena_free(&mem);
    world_free(w);
}

/* What the agent adopts it lists with its pool, other controllers' attempts too. */
static void an_agent_restart_keeps_the_pools(void **state)
{
    (void)state;
    struct world *w = world_new();
    struct fake_agent *a = gpu_node(w, "n1", 2, 2);
    struct arena mem;
    arena_init(&mem, 1 << 20);
    int64_t id = submit_on(w, CUDA, 2);
    struct fake_attempt *x = newest(w, a, id);
    say_step(w, a, x, 1);
    pump(w);
    disconnect(w, a);
    snprintf(a->instance, sizeof a->instance, "instance-2");
    join_world(w, a);
    pump(w);
    assert_state(w, id, RUNNING);
    Boost__NodeInfo *n = node_info(w, "n1", &mem);
    assert_true(n->devices_busy == 2 && n->cpu_slots_busy == 0);
    Boost__ShowReply *s = core_show(w->core, job_of(w, id), &mem);
    assert_int_equal(s->n_devices, 2);
    assert_string_equal(s->devices[1]->node, "n1");
    assert_true(s->devices[1]->index == 1 && s->devices[1]->rank == 1 && s->devices[1]->job == id);
    /* A controller of another store sees them taken as GPUs. */
    struct world *v = world_new();
    v->store_id = "feedbeef";
    struct fake_agent *b = agent_add(v, "n1", 2);
    b->gpus = 2;
    b->attempts[b->n_attempts++] = *x;
    join_world(v, b);
    pump(v);
    n = node_info(v, "n1", &mem);
    assert_true(n->devices_busy == 2 && n->cpu_slots_busy == 0);
    arena_free(&mem);
    world_free(v);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(auto_is_cuda_where_a_node_has_gpus), cmocka_unit_test(gpus_are_remembered),
        cmocka_unit_test(pools_do_not_wait_for_each_other),   cmocka_unit_test(no_gpus_anywhere),
        cmocka_unit_test(memory_of_the_smallest_gpu),         cmocka_unit_test(a_device_that_fails_is_passed_over),
        cmocka_unit_test(a_rising_counter_is_told_once),      cmocka_unit_test(a_device_that_vanishes_is_told),
        cmocka_unit_test(a_strangers_process_takes_a_device), cmocka_unit_test(an_agent_restart_keeps_the_pools),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
