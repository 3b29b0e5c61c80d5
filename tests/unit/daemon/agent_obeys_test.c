/* Which controllers an agent has obeyed, through restarts and damage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/agent_obeys.h"
#include "proto/base/fs.h"

#define ADOPTION(n, low) ((uint64_t)(n) << 32 | (low))

static void remembered(void **state)
{
    (void)state;
    struct obeys o;
    struct error err;
    assert_int_equal(obeys_load(&o, "controllers", &err), ERR_OK);
    assert_true(obeys_epoch(&o, "00112233") == 0);
    assert_int_equal(obeys_set(&o, "00112233", ADOPTION(1, 7), &err), ERR_OK);
    assert_int_equal(obeys_set(&o, "ffeeddcc", ADOPTION(4, UINT32_MAX), &err), ERR_OK);
    assert_int_equal(obeys_set(&o, "00112233", ADOPTION(2, 3), &err), ERR_OK);
    assert_int_equal(obeys_set(&o, "00112233", ADOPTION(1, 9), &err), ERR_OK); /* an earlier one changes nothing */
    assert_int_equal(obeys_load(&o, "controllers", &err), ERR_OK);
    assert_int_equal(o.n, 2);
    assert_true(obeys_epoch(&o, "00112233") == ADOPTION(2, 3));
    assert_true(obeys_epoch(&o, "ffeeddcc") == ADOPTION(4, UINT32_MAX));
    assert_string_equal(o.list[1].store, "00112233"); /* the one met last */
    for (unsigned i = 0; i < 3 * OBEYS_STORES; i++) {
        char store[17];
        snprintf(store, sizeof store, "%08x", i);
        assert_int_equal(obeys_set(&o, store, ADOPTION(1, i + 1), &err), ERR_OK);
    }
    assert_int_equal(obeys_load(&o, "controllers", &err), ERR_OK);
    assert_int_equal(o.n, OBEYS_STORES);
    assert_int_equal(unlink("controllers"), 0);
}

static void damaged(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "00112233", "00112233 \n", "00112233 x\n", "zz 1\n", "00112233 0\n",
                                        "00112233 99999999999999999999999\n", "001122334455667788 1\n",
                                        "aabbccdd 4294967297\n00112233 1"};
    struct obeys o;
    struct error err;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        assert_int_equal(fs_write_atomic("controllers", texts[i], strlen(texts[i]), 0600, &err), ERR_OK);
        assert_int_equal(obeys_load(&o, "controllers", &err), ERR_CORRUPT);
        assert_true(fs_exists("controllers.damaged") && !fs_exists("controllers"));
        assert_int_equal(obeys_set(&o, "00112233", 5, &err), ERR_OK);
        assert_int_equal(unlink("controllers"), 0);
    }
    assert_true(obeys_epoch(&o, "aabbccdd") == ADOPTION(1, 1)); /* the whole line of the last text */
    assert_int_equal(unlink("controllers.damaged"), 0);
    /* Where nothing can be written it still counts while the agent runs. */
    assert_int_equal(obeys_load(&o, "/nowhere/controllers", &err), ERR_OK);
    assert_int_not_equal(obeys_set(&o, "00112233", 5, &err), ERR_OK);
    assert_true(obeys_epoch(&o, "00112233") == 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(remembered), cmocka_unit_test(damaged)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
