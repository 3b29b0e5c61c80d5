/* The picture of a node's GPUs, from a library that stands in for NVIDIA's (tests/fakes/nvml.c). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/agent_nvml.h"
#include "proto/base/fs.h"

static char library[PATH_MAX], file[PATH_MAX];

static void gpus(const char *lines)
{
    assert_int_equal(fs_write_atomic(file, lines, strlen(lines), 0644, NULL), 0);
}

static int setup(void **state)
{
    char dir[PATH_MAX];
    const char *base = getenv("BOOST_TEST_DIR");
    (void)state;
    if (fs_self_dir(dir, sizeof dir, NULL) || fs_join(library, sizeof library, NULL, dir, "../fakes/nvml.so"))
        return -1;
    snprintf(file, sizeof file, "%s/gpus.%ld", base ? base : "/tmp", (long)getpid());
    setenv("FAKE_NVML", file, 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return unlink(file);
}

static struct nvml *opened(void)
{
    struct nvml *n;
    struct error err;
    if (nvml_open(library, &n, &err))
        fail_msg("%s", err.message);
    return n;
}

static void look(struct nvml *n, struct nvml_picture *p)
{
    struct error err;
    if (nvml_look(n, p, &err))
        fail_msg("%s", err.message);
}

static void what_there_is(void **state)
{
    (void)state;
    struct nvml_picture p;
    gpus("count 2\n1 pid 11\n1 pid 12\n");
    struct nvml *n = opened();
    look(n, &p);
    assert_int_equal(p.n, 2);
    assert_string_equal(p.driver, "580.00.fake");
    assert_string_equal(p.gpus[1].uuid, "GPU-fake-1");
    assert_string_equal(p.gpus[1].name, "NVIDIA H200");
    assert_string_equal(p.gpus[1].bus, "00000000:02:00.0");
    assert_true(p.gpus[1].memory_bytes == INT64_C(143771) << 20 && p.gpus[1].used_bytes == INT64_C(771) << 20);
    assert_int_equal(p.gpus[0].n_processes, 0);
    assert_int_equal(p.gpus[1].n_processes, 2);
    assert_true(p.gpus[1].processes[0].pid == 11 && p.gpus[1].processes[1].pid == 12);
    assert_string_equal(p.gpus[0].trouble, "");
    nvml_close(n);
}

/* A list that is too short is not an idle GPU. */
static void more_processes_than_a_list_holds(void **state)
{
    (void)state;
    struct nvml_picture p;
    char lines[NVML_PROCESSES_MAX * 16 + 64] = "count 1\n";
    size_t used = strlen(lines);
    for (int i = 0; i < NVML_PROCESSES_MAX; i++)
        used += (size_t)snprintf(lines + used, sizeof lines - used, "0 pid %d\n", 100 + i);
    gpus(lines);
    struct nvml *n = opened();
    look(n, &p);
    assert_true(p.gpus[0].n_processes == NVML_PROCESSES_MAX && !p.gpus[0].crowded);
    snprintf(lines + used, sizeof lines - used, "0 pid 99\n");
    gpus(lines);
    look(n, &p);
    assert_true(p.gpus[0].n_processes == 0 && p.gpus[0].crowded);
    nvml_close(n);
}

/* Those that a reset or a technician has to mend take the device out; a program's own faults do not. */
static void which_xids_count(void **state)
{
    (void)state;
    static const struct {
        unsigned xid;
        bool out;
    } rows[] = {{13, false}, {31, false}, {43, false}, {45, false}, {63, false}, {92, false},
                {48, true},  {62, true},  {64, true},  {74, true},  {79, true},  {94, true},
                {95, true},  {119, true}, {120, true}, {140, true}, {143, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char lines[64], want[16];
        struct nvml_picture p;
        gpus("count 2\n");
        struct nvml *n = opened();
        look(n, &p);
        snprintf(lines, sizeof lines, "count 2\n1 xid %u\n", rows[i].xid);
        snprintf(want, sizeof want, "Xid %u (", rows[i].xid);
        gpus(lines);
        look(n, &p);
        assert_string_equal(p.gpus[0].trouble, "");
        if (rows[i].out ? strncmp(p.gpus[1].trouble, want, strlen(want)) != 0 : p.gpus[1].trouble[0] != 0)
            fail_msg("Xid %u: \"%s\"", rows[i].xid, p.gpus[1].trouble);
        assert_true(p.gpus[1].last_xid == rows[i].xid && p.gpus[1].last_xid_ns > 0 && p.gpus[0].last_xid == 0);
        look(n, &p); /* came once, counts on */
        assert_int_equal(p.gpus[1].trouble[0] != 0, rows[i].out);
        nvml_close(n);
    }
}

static void counters_and_lost_devices(void **state)
{
    (void)state;
    struct nvml_picture p;
    gpus("count 3\n0 ecc 1\n2 lost 1\n");
    struct nvml *n = opened();
    look(n, &p);
    assert_string_equal(p.gpus[0].trouble, "1 uncorrected memory error since its last reset");
    assert_string_equal(p.gpus[1].trouble, "");
    assert_string_equal(p.gpus[2].trouble, "GPU is lost");
    assert_string_equal(p.gpus[2].uuid, "");
    gpus("count 3\n"); /* reset */
    look(n, &p);
    for (int i = 0; i < 3; i++)
        assert_string_equal(p.gpus[i].trouble, "");
    nvml_close(n);
}

/* Texts end and print, a size beyond 2^63 is none, and no number that kill() takes for a group is a process. */
static void a_driver_that_fills_in_anything(void **state)
{
    (void)state;
    struct nvml_picture p;
    gpus("count 2\n0 wild 1\n");
    struct nvml *n = opened();
    look(n, &p);
    const struct nvml_gpu *g = &p.gpus[0];
    const char *texts[] = {g->uuid, g->name, g->bus};
    const size_t rooms[] = {sizeof g->uuid, sizeof g->name, sizeof g->bus};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(strnlen(texts[i], rooms[i]), rooms[i] - 1);
        assert_int_equal(strspn(texts[i], "?"), rooms[i] - 1);
    }
    assert_true(g->memory_bytes == 0 && g->used_bytes == 0);
    assert_int_equal(g->n_processes, 0);
    assert_string_equal(p.gpus[1].uuid, "GPU-fake-1");
    nvml_close(n);
}

static void no_driver(void **state)
{
    (void)state;
    struct nvml *n;
    struct error err;
    gpus("");
    assert_int_equal(nvml_open("/nowhere/libnvidia-ml.so.1", &n, &err), ERR_NOT_FOUND);
    assert_null(n);
    /* A library that is none of NVIDIA's. */
    assert_int_equal(nvml_open("libm.so.6", &n, &err), ERR_DEVICE);
    assert_non_null(strstr(err.message, "has no nvmlInit_v2"));
}

static void what_cannot_be_given_is_said(void **state)
{
    (void)state;
    struct nvml_picture p;
    gpus("count 4\n0 mig 1\n2 same 1\n");
    struct nvml *n = opened();
    look(n, &p);
    assert_string_equal(p.gpus[0].trouble, "MIG mode: not supported");
    assert_string_equal(p.gpus[1].trouble, "gpu 2 has the same UUID");
    assert_string_equal(p.gpus[2].trouble, "gpu 1 has the same UUID");
    assert_string_equal(p.gpus[3].trouble, "");
    gpus("count 4\n");
    look(n, &p);
    for (int i = 0; i < 4; i++)
        assert_string_equal(p.gpus[i].trouble, "");
    nvml_close(n);
}

/* 0-1-2 by two links, 4-5 by one, 3 by itself. */
static void groups_that_nvlink_joins(void **state)
{
    (void)state;
    struct nvml_picture p;
    static const int group[] = {0, 0, 0, -1, 4, 4};
    gpus("count 6\n2 link 1\n1 link 0\n5 link 4\n");
    struct nvml *n = opened();
    look(n, &p);
    look(n, &p);
    for (int i = 0; i < 6; i++)
        assert_int_equal(p.gpus[i].nvlink_group, group[i]);
    nvml_close(n);
}

/* What is used less what the named processes use, each 1 MiB here. */
static void memory_that_nobody_is_known_to_use(void **state)
{
    (void)state;
    struct nvml_picture p;
    gpus("count 4\n0 used 900\n1 used 2\n1 pid 11\n1 pid 12\n2 used 7\n2 pid 11\n3 used 701\n3 screen 700\n");
    struct nvml *n = opened();
    look(n, &p);
    assert_true(p.gpus[0].unknown_bytes == INT64_C(900) << 20 && p.gpus[0].minor == 0);
    assert_true(p.gpus[1].unknown_bytes == 0 && p.gpus[1].minor == 1);
    assert_true(p.gpus[2].unknown_bytes == INT64_C(6) << 20);
    assert_true(p.gpus[3].unknown_bytes == INT64_C(1) << 20 && p.gpus[3].n_processes == 0);
    nvml_close(n);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {TEST(what_there_is),
                                       TEST(more_processes_than_a_list_holds),
                                       TEST(which_xids_count),
                                       TEST(counters_and_lost_devices),
                                       TEST(a_driver_that_fills_in_anything),
                                       TEST(no_driver),
                                       TEST(what_cannot_be_given_is_said),
                                       TEST(groups_that_nvlink_joins),
                                       TEST(memory_that_nobody_is_known_to_use)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
