/* Where a checkpoint tool may write, by what lies there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/base/fs.h"
#include "worker/ckpt_place.h"

static char root[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/boost-place-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(root, NULL);
}

static void put(const char *dir, const char *file, const char *text)
{
    struct error err;
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, dir);
    assert_int_equal(fs_make_dirs(path, 0755, &err), 0);
    snprintf(path, sizeof path, "%s/%s/%s", root, dir, file);
    assert_int_equal(fs_write_atomic(path, text, strlen(text), 0644, &err), 0);
}

static void manifest(const char *dir, const char *store, int job)
{
    char text[128];
    snprintf(text, sizeof text, "{\"schema\": \"boost.checkpoint/1\", \"store_id\": \"%s\", \"job\": %d}", store, job);
    put(dir, "manifest.json", text);
}

static void allowed(const char *to)
{
    struct error err = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, to);
    int rc = ckpt_place_check(path, &err);
    if (rc)
        fail_msg("%s: %s", to, err.message);
}

static void refused(const char *to, const char *why)
{
    struct error err = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, to);
    assert_int_equal(ckpt_place_check(path, &err), ERR_REFUSED);
    if (!strstr(err.message, why))
        fail_msg("\"%s\" does not say \"%s\"", err.message, why);
    assert_string_not_equal(err.hint, "");
}

static void among_the_checkpoints_of_a_job(void **state)
{
    (void)state;
    manifest("ckpt/0badcafe-3/step-20.a1", "0badcafe", 3);
    refused("ckpt/0badcafe-3/step-20.a2", "holds step-20.a1, a checkpoint of job 3 (0badcafe-3)");
    refused("ckpt/0badcafe-3/step-0.a1", "job 3");
    refused("ckpt/0badcafe-3/hf", "job 3");
    refused("ckpt/0badcafe-3/not/there/yet", "job 3");
    refused("ckpt/0badcafe-3/step-20.a1/in", "directory of a checkpoint");
    char path[256], link[256];
    snprintf(path, sizeof path, "%s/ckpt/0badcafe-3", root);
    snprintf(link, sizeof link, "%s/link", root);
    assert_int_equal(symlink(path, link), 0);
    refused("link/hf", "job 3");
    allowed("ckpt/hf");
    allowed("ckpt/other/step-0.a1");
}

static void beside_one_that_a_job_has_not_finished(void **state)
{
    (void)state;
    put("ckpt/0badcafe-4/step-20.a1", ".rank-0.tmp", "");
    refused("ckpt/0badcafe-4/step-0.a1", "step-20.a1, which is no whole checkpoint");
    refused("ckpt/0badcafe-4/hf", "step-20.a1, which is no whole checkpoint");
    put("alone/step-7.a1", "rank-0", "");
    refused("alone/step-0.a1", "no whole checkpoint");
    put("damaged/step-7.a1", "manifest.json", "{");
    refused("damaged/step-0.a1", "no whole checkpoint");
}

/* Nobody goes on from what is there, or deletes it; a checkpoint beside it would still be taken for another. */
static void beside_a_copy_of_one(void **state)
{
    (void)state;
    manifest("mine/step-20.a1", "0badcafe", 3);
    refused("mine/step-0.a1", "a checkpoint of job 3");
    allowed("mine/hf");
    manifest("20261130-1/step-20.a1", "0badcafe", 3); /* a date, and no store */
    allowed("20261130-1/hf");
}

static void beside_what_tools_made(void **state)
{
    (void)state;
    manifest("low/step-0.a1", "", 0);
    allowed("low/step-20.a1");
    allowed("low/step-0.a1"); /* in the way, which is said elsewhere */
    char path[256];
    struct error err;
    snprintf(path, sizeof path, "%s/low/step-5.a1", root);
    assert_int_equal(fs_make_dirs(path, 0755, &err), 0);
    allowed("low/step-5.a1");
    allowed("low/hf");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(among_the_checkpoints_of_a_job),
        cmocka_unit_test(beside_one_that_a_job_has_not_finished),
        cmocka_unit_test(beside_a_copy_of_one),
        cmocka_unit_test(beside_what_tools_made),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
