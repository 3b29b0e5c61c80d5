/* The agent's GPUs, from a stand-in for NVML: which rank gets which, and what is said of them. */
#include "tests/unit/daemon/agent_world.h"

static void fake_gpus(struct fixture *f, const char *lines)
{
    char dir[PATH_MAX], path[PATH_MAX];
    path_in(f, "gpus", path);
    assert_int_equal(fs_write_atomic(path, lines, strlen(lines), 0644, NULL), 0);
    setenv("FAKE_NVML", path, 1);
    assert_int_equal(fs_self_dir(dir, sizeof dir, NULL), 0);
    assert_int_equal(fs_join(f->nvml, sizeof f->nvml, NULL, dir, "../fakes/nvml.so"), 0);
    f->cuda = true;
}

/* Of the start order that an attempt is run by. */
static Boost__AttemptStart *order_on_disk(struct fixture *f, int attempt)
{
    char path[PATH_MAX];
    struct buffer packed;
    run_path(f, attempt, "start.pb", path);
    await_path(path, true);
    buffer_init(&packed, LIMIT_FRAME);
    assert_int_equal(fs_read_file(path, &packed, NULL), 0);
    Boost__AttemptStart *s = boost__attempt_start__unpack(NULL, packed.len, packed.data);
    assert_non_null(s);
    buffer_free(&packed);
    return s;
}

static void test_gpus_are_given_and_remembered(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 4\n1 ecc 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->devices->n_devices, 4);
    assert_string_equal(f->registered->devices->devices[1]->trouble, "1 uncorrected memory error since its last reset");
    order_start(f, "steps", 1, 2);
    Boost__AttemptStart *s = order_on_disk(f, 1);
    assert_int_equal(s->n_devices, 2);
    assert_true(s->devices[0]->index == 0 && s->devices[1]->index == 2);
    assert_string_equal(s->devices[1]->uuid, "GPU-fake-2");
    assert_string_equal(s->device_name, "NVIDIA H200");
    assert_true(s->peak_flops == 989.4e12);
    assert_int_equal(s->threads_per_rank, 1);
    boost__attempt_start__free_unpacked(s, NULL);
    await_log(f, 1, 1);
    kill_agent(f, SIGKILL);
    start_agent(f);
    Boost__Verdict keep = BOOST__VERDICT__INIT;
    keep.has_job = keep.has_attempt = true;
    keep.job = 17;
    keep.attempt = 1;
    accept_agent(f, &keep);
    Boost__DeviceReport *d = f->registered->devices;
    assert_true(d->devices[0]->has_job && d->devices[0]->job == 17 && d->devices[0]->rank == 0);
    assert_true(d->devices[2]->has_job && d->devices[2]->rank == 1 && d->devices[2]->attempt == 1);
    assert_false(d->devices[1]->has_job || d->devices[3]->has_job);
    assert_true(f->registered->attempts[0]->cuda);
    touch(f, 1, "go");
    /* Its end frees them, and the controller hears so. */
    for (bool freed = false; !freed;) {
        Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_DEVICES);
        freed = !m->devices->devices[0]->has_job && !m->devices->devices[2]->has_job;
        boost__agent_message__free_unpacked(m, NULL);
    }
    kill_agent(f, SIGTERM);
}

static void test_gpus_that_cannot_be_had_are_named(void **state)
{
    struct fixture *f = *state;
    char lines[96], pid[32];
    snprintf(lines, sizeof lines, "count 2\n0 ecc 2\n1 pid %ld\n", (long)getpid());
    snprintf(pid, sizeof pid, "process %ld uses it", (long)getpid());
    fake_gpus(f, lines);
    start_agent(f);
    accept_agent(f, NULL);
    assert_true(f->registered->devices->devices[1]->taken);
    order_start(f, "exit7", 1, 1);
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_ATTEMPT_REFUSED);
    assert_int_equal(m->attempt_refused->class_, BOOST__EXIT_CLASS__VALUE__INFRA);
    assert_int_equal(m->attempt_refused->reason, BOOST__REASON__VALUE__NoDevices);
    assert_non_null(strstr(m->attempt_refused->text, "0 of 1 GPUs can be had on node n1"));
    assert_non_null(strstr(m->attempt_refused->text, "gpu 0: 2 uncorrected memory errors"));
    assert_non_null(strstr(m->attempt_refused->text, pid));
    boost__agent_message__free_unpacked(m, NULL);
    /* The CPU is not concerned. */
    f->cuda = false;
    order_start(f, "exit7", 2, 1);
    expect_end(f, 2, 7);
    kill_agent(f, SIGTERM);
}

/* The end of a rank whose device failed waits until the driver was asked why. */
static void test_the_device_of_a_failed_rank_is_named(void **state)
{
    struct fixture *f = *state;
    char path[PATH_MAX];
    fake_gpus(f, "count 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "exit66", 1, 1);
    await_log(f, 1, 0);
    path_in(f, "gpus", path);
    assert_int_equal(fs_write_atomic(path, "count 1\n0 xid 79\n", 17, 0644, NULL), 0);
    touch(f, 1, "go");
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_RANK_END);
    assert_int_equal(m->rank_end->record->exit_code, 66);
    assert_string_equal(m->rank_end->record->device, "gpu 0 (NVIDIA H200): Xid 79 (fell off the bus)");
    boost__agent_message__free_unpacked(m, NULL);
    kill_agent(f, SIGTERM);
}

/* The next report of GPUs in which one has this trouble; the caller frees it. */
static Boost__AgentMessage *expect_trouble(struct fixture *f, const char *text)
{
    for (;;) {
        Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_DEVICES);
        for (size_t i = 0; i < m->devices->n_devices; i++)
            if (strstr(m->devices->devices[i]->trouble, text))
                return m;
        boost__agent_message__free_unpacked(m, NULL);
    }
}

/* It leaves the driver's list under its rank: it is told with its rank, so that the others are counted right. */
static void test_a_gpu_that_vanishes_under_its_rank(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 3\n");
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "", 1, 3);
    boost__attempt_start__free_unpacked(order_on_disk(f, 1), NULL);
    fake_gpus(f, "count 2\n");
    Boost__AgentMessage *m = expect_trouble(f, "no longer lists it");
    assert_int_equal(m->devices->n_devices, 3);
    const Boost__DeviceInfo *d = m->devices->devices[2];
    assert_string_equal(d->uuid, "GPU-fake-2");
    assert_true(d->index == 2 && d->has_job && d->job == 17 && d->attempt == 1 && d->rank == 2);
    assert_string_equal(m->devices->devices[0]->trouble, "");
    boost__agent_message__free_unpacked(m, NULL);
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    kill_agent(f, SIGTERM);
}

/* D45: memory of a GPU that none of the processes which are known has is not free to give. */
static void test_memory_of_nobody_takes_a_gpu(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 2\n0 used 900\n1 used 300\n1 link 0\n");
    start_agent(f);
    accept_agent(f, NULL);
    const Boost__DeviceReport *r = f->registered->devices;
    assert_int_equal(r->n_devices, 2);
    assert_true(r->devices[0]->taken && !r->devices[1]->taken);
    assert_string_equal(r->devices[0]->note, "900 MiB of it are used by no process that is known");
    assert_true(r->devices[1]->has_nvlink_group && r->devices[1]->nvlink_group == 0);
    order_start(f, "", 1, 2);
    expect_refused(f, BOOST__EXIT_CLASS__VALUE__INFRA, BOOST__REASON__VALUE__NoDevices,
                   "1 of 2 GPUs can be had on node n1: gpu 0: 900 MiB of it are used");
    order_start(f, "exit7", 2, 1);
    expect_end(f, 2, 7);
    kill_agent(f, SIGTERM);
}

/* A driver that has to start its GPUs: the clock runs meanwhile, and finds parts that are not there yet. */
static void test_a_driver_that_is_slow_to_start(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 1\n0 slow 800\n");
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->devices->n_devices, 1);
    kill_agent(f, SIGTERM);
}

/* One GPU in trouble is its own affair, all of them are the node's. */
static void test_no_gpu_that_works_is_told_of_the_node(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 2\n0 ecc 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    assert_int_equal(f->registered->health->n_failed, 0);
    fake_gpus(f, "count 2\n0 ecc 1\n1 mig 1\n");
    Boost__AgentMessage *m = expect(f, BOOST__AGENT_MESSAGE__BODY_HEALTH);
    assert_int_equal(m->health->n_failed, 1);
    assert_string_equal(m->health->failed[0]->check, "device");
    assert_string_equal(m->health->failed[0]->text,
                        "none of 2 GPUs works; gpu 0: 1 uncorrected memory error since its last reset");
    boost__agent_message__free_unpacked(m, NULL);
    fake_gpus(f, "count 2\n0 ecc 1\n");
    m = expect(f, BOOST__AGENT_MESSAGE__BODY_HEALTH);
    assert_int_equal(m->health->n_failed, 0);
    boost__agent_message__free_unpacked(m, NULL);
    kill_agent(f, SIGTERM);
}

/* By number they would be 1 and 2, which nothing joins. */
static void test_ranks_get_gpus_that_nvlink_joins(void **state)
{
    struct fixture *f = *state;
    fake_gpus(f, "count 4\n1 link 0\n3 link 2\n0 ecc 1\n");
    start_agent(f);
    accept_agent(f, NULL);
    order_start(f, "", 1, 2);
    Boost__AttemptStart *s = order_on_disk(f, 1);
    assert_string_equal(s->devices[0]->uuid, "GPU-fake-2");
    assert_string_equal(s->devices[1]->uuid, "GPU-fake-3");
    boost__attempt_start__free_unpacked(s, NULL);
    order_stop(f, 1, BOOST__STOP_ATTEMPT__HOW__KILL, 0);
    pass(f, BOOST__AGENT_MESSAGE__BODY_NODE_END);
    kill_agent(f, SIGTERM);
}

int main(int argc, char **argv)
{
    int status = agent_world(argc, argv);
    if (status >= 0)
        return status;
    const struct CMUnitTest tests[] = {
        AGENT_TEST(test_gpus_are_given_and_remembered),        AGENT_TEST(test_gpus_that_cannot_be_had_are_named),
        AGENT_TEST(test_the_device_of_a_failed_rank_is_named), AGENT_TEST(test_a_gpu_that_vanishes_under_its_rank),
        AGENT_TEST(test_memory_of_nobody_takes_a_gpu),         AGENT_TEST(test_a_driver_that_is_slow_to_start),
        AGENT_TEST(test_no_gpu_that_works_is_told_of_the_node),
        AGENT_TEST(test_ranks_get_gpus_that_nvlink_joins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
