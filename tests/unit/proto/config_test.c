/* Configuration files: defaults, text, --set, ranges, and what the errors name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/config.h"
#include "proto/base/fs.h"

struct fixture {
    struct arena arena;
    char path[64];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    if (!f)
        return -1;
    arena_init(&f->arena, 1 << 20);
    snprintf(f->path, sizeof f->path, "config.%ld.conf", (long)getpid());
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    unlink(f->path);
    arena_free(&f->arena);
    free(f);
    return 0;
}

static void write_config(struct fixture *f, const char *text)
{
    struct error err;
    assert_int_equal(fs_write_atomic(f->path, text, strlen(text), 0600, &err), 0);
}

static int load_boostd(struct fixture *f, const char *path, const char *set, Boost__BoostdConfig **out,
                       struct error *err)
{
    const char *sets[] = {set};
    return config_load_boostd(path, NULL, sets, set ? 1 : 0, &f->arena, out, err);
}

static void defaults_are_explicit(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__BoostdConfig *c = NULL;
    assert_int_equal(load_boostd(f, NULL, NULL, &c, &err), 0);
    assert_string_equal(c->state_dir, "/var/lib/boost");
    assert_string_equal(c->socket, "");
    assert_int_equal(c->heartbeat_ms, 1000);
    assert_int_equal(c->node_timeout_ms, 10000);
    assert_int_equal(c->backoff_max_ms, 300000);
    assert_true(c->has_backoff_max_ms);
    Boost__AgentConfig *a = NULL;
    assert_int_equal(config_load_agent(NULL, NULL, NULL, 0, &f->arena, &a, &err), 0);
    assert_string_equal(a->data_address, "127.0.0.1");
    assert_int_equal(a->log_keep_bytes, 1 << 30);
}

static void file_then_sets(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__BoostdConfig *c = NULL;
    write_config(f, "# a comment\nstate_dir: \"/x/y\"\nbackoff_min_ms: 200\nlog_level: \"debug\"\n");
    assert_int_equal(load_boostd(f, f->path, "backoff_min_ms=100", &c, &err), 0);
    assert_string_equal(c->state_dir, "/x/y");
    assert_int_equal(c->backoff_min_ms, 100);
    assert_string_equal(c->log_level, "debug");
    assert_int_equal(c->suspect_ms, 3000);
    /* Strings need no quotes but may have them. */
    assert_int_equal(load_boostd(f, f->path, "state_dir=/a b=c", &c, &err), 0);
    assert_string_equal(c->state_dir, "/a b=c");
    assert_int_equal(load_boostd(f, f->path, "state_dir=\"/q\"", &c, &err), 0);
    assert_string_equal(c->state_dir, "/q");
}

static void the_fallback_may_be_missing_a_named_file_not(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__BoostdConfig *c = NULL;
    assert_int_equal(config_load_boostd(NULL, "/nonexistent/boostd.conf", NULL, 0, &f->arena, &c, &err), 0);
    assert_int_equal(load_boostd(f, "/nonexistent/boostd.conf", NULL, &c, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "/nonexistent/boostd.conf"));
    write_config(f, "heartbeat_ms: 77\n");
    assert_int_equal(config_load_boostd(NULL, f->path, NULL, 0, &f->arena, &c, &err), 0);
    assert_int_equal(c->heartbeat_ms, 77);
}

static void errors_name_the_place_and_the_mend(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__BoostdConfig *c = NULL;
    write_config(f, "state_dir: \"/x\"\n  heartbeet_ms: 5\n");
    assert_int_equal(load_boostd(f, f->path, NULL, &c, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, ":2:3"));
    assert_non_null(strstr(err.message, "heartbeet_ms"));
    assert_non_null(strstr(err.hint, "heartbeat_ms"));

    static const struct {
        const char *set;
        int code;
        const char *says;
    } bad[] = {
        {"heartbeat_ms=9", ERR_INVALID, "heartbeat_ms = 9"},
        {"heartbeat_ms=60001", ERR_INVALID, "heartbeat_ms = 60001"},
        {"heartbeat_ms=99999999999", ERR_INVALID, "heartbeat_ms"},
        {"heartbeat_ms=ten", ERR_INVALID, "heartbeat_ms"},
        {"heartbeat_ms=", ERR_INVALID, "heartbeat_ms"},
        {"suspect_ms=20000", ERR_INVALID, "node_timeout_ms"},
        {"heartbeat_ms=4000", ERR_INVALID, "suspect_ms"},
        {"backoff_min_ms=400000", ERR_INVALID, "backoff_max_ms"},
        {"log_level=loud", ERR_INVALID, "loud"},
        {"state_dir=", ERR_INVALID, "state_dir"},
        {"heartbeat", ERR_USAGE, "heartbeat"},
        {"=5", ERR_USAGE, "=5"},
        {"no_such=5", ERR_INVALID, "no_such"},
        {"listen=127.0.0.1:99999", ERR_INVALID, "listen: \"127.0.0.1:99999\""},
        {"listen=x:-1", ERR_INVALID, "listen"},
        {"listen=", ERR_INVALID, "there is no host"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int rc = load_boostd(f, NULL, bad[i].set, &c, &err);
        if (rc != bad[i].code || !strstr(err.message, bad[i].says))
            fail_msg("--set %s: %d, \"%s\"", bad[i].set, rc, err.message);
    }
}

static void the_edges_of_ranges_are_inside(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__BoostdConfig *c = NULL;
    assert_int_equal(load_boostd(f, NULL, "heartbeat_ms=10", &c, &err), 0);
    assert_int_equal(load_boostd(f, NULL, "restart_grace_ms=0", &c, &err), 0);
    assert_int_equal(load_boostd(f, NULL, "suspect_ms=10000", &c, &err), 0);
    const char *sets[] = {"hang_min_ms=700000"};
    Boost__AgentConfig *a = NULL;
    assert_int_equal(config_load_agent(NULL, NULL, sets, 1, &f->arena, &a, &err), ERR_INVALID);
    assert_non_null(strstr(err.message, "hang_max_ms"));
    assert_int_equal(load_boostd(f, NULL, "listen=*:0", &c, &err), 0);
    assert_int_equal(load_boostd(f, NULL, "listen=[::1]:65535", &c, &err), 0);
    static const char *const out[] = {"ranks_per_gpu=0", "ranks_per_gpu=65", "peak_tflops=-1", "peak_tflops=nan",
                                      "controller_address=x:0"};
    for (size_t i = 0; i < sizeof out / sizeof *out; i++)
        assert_int_equal(config_load_agent(NULL, NULL, &out[i], 1, &f->arena, &a, &err), ERR_INVALID);
    const char *gpus[] = {"ranks_per_gpu=64", "peak_tflops=989.4", "nvml_library="};
    assert_int_equal(config_load_agent(NULL, NULL, gpus, 3, &f->arena, &a, &err), 0);
    assert_true(a->ranks_per_gpu == 64 && a->peak_tflops == 989.4 && !*a->nvml_library);
}

static void what_a_node_is(void **state)
{
    struct fixture *f = *state;
    struct error err;
    Boost__AgentConfig *a = NULL;
    write_config(f, "label { key: \"rack\" value: \"r1\" } label { key: \"fast\" } switch: \"leaf1\"\n"
                    "env { key: \"NCCL_SOCKET_IFNAME\" value: \"eth0\" } prolog: \"/bin/true\"\n");
    assert_int_equal(config_load_agent(f->path, NULL, NULL, 0, &f->arena, &a, &err), 0);
    assert_true(a->n_label == 2 && a->n_env == 1 && a->health_interval_ms == 60000 && a->memory_floor_mib == 256);
    assert_string_equal(a->switch_, "leaf1");
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"label { value: \"x\" }", "label \"\""},
        {"label { key: \"a b\" }", "label \"a b\""},
        {"label { key: \"a\" value: \"\\001\" }", "label \"a\""},
        {"label { key: \"a\" } label { key: \"a\" value: \"1\" }", "twice"},
        {"switch: \"a/b\"", "switch \"a/b\""},
        {"env { key: \"BOOST_RANK\" value: \"1\" }", "BOOST_RANK"},
        {"env { key: \"CUDA_VISIBLE_DEVICES\" value: \"1\" }", "CUDA_VISIBLE_DEVICES"},
        {"env { key: \"A=B\" value: \"1\" }", "A=B"},
        {"env { value: \"1\" }", "env \"\""},
        {"prolog: \"true\"", "no absolute path"},
        {"health_script: \"/nonexistent/check\"", "/nonexistent/check cannot be run"},
        {"epilog: \"/etc/passwd\"", "epilog = /etc/passwd cannot be run"},
        {"health_interval_ms: -1", "health_interval_ms"},
        {"health_interval_ms: 1", "health_interval_ms = 1 "},
        {"health_interval_ms: 99", "health_interval_ms = 99 "},
        {"epilog_timeout_ms: 99", "epilog_timeout_ms"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_config(f, bad[i].text);
        int rc = config_load_agent(f->path, NULL, NULL, 0, &f->arena, &a, &err);
        if (rc != ERR_INVALID || !strstr(err.message, bad[i].says) || !*err.hint)
            fail_msg("%s: %d, \"%s\" (%s)", bad[i].text, rc, err.message, err.hint);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(defaults_are_explicit, setup, teardown),
        cmocka_unit_test_setup_teardown(file_then_sets, setup, teardown),
        cmocka_unit_test_setup_teardown(the_fallback_may_be_missing_a_named_file_not, setup, teardown),
        cmocka_unit_test_setup_teardown(errors_name_the_place_and_the_mend, setup, teardown),
        cmocka_unit_test_setup_teardown(what_a_node_is, setup, teardown),
        cmocka_unit_test_setup_teardown(the_edges_of_ranges_are_inside, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
