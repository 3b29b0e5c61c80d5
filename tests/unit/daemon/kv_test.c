/* The rendezvous exchange. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/kv.h"
#include "proto/base/buffer.h"

static struct {
    int n;
    uint64_t id[16];
    char text[16][128];
    int ok[16];
} seen;

static void answer(void *arg, const struct kv_asker *asker, const void *value, size_t len, const char *error)
{
    (void)arg;
    assert_true(seen.n < 16);
    seen.id[seen.n] = asker->id;
    seen.ok[seen.n] = error == NULL;
    snprintf(seen.text[seen.n], sizeof seen.text[0], "%.*s", (int)(error ? strlen(error) : len),
             error ? error : (const char *)value);
    seen.n++;
}

static struct kv_asker asker(uint64_t id, int64_t job, int attempt, int rank)
{
    struct kv_asker a = {.id = id, .job = job, .attempt = attempt, .rank = rank};
    snprintf(a.node, sizeof a.node, "n1");
    return a;
}

static struct kv *fresh(void)
{
    memset(&seen, 0, sizeof seen);
    struct kv *kv = kv_create(answer, NULL);
    assert_non_null(kv);
    return kv;
}

static int set(struct kv *kv, int64_t job, int attempt, const char *group, const char *key, const char *value)
{
    struct kv_asker a = asker(1, job, attempt, 0);
    struct error err;
    return kv_set(kv, &a, group, key, value, strlen(value), &err);
}

static int get(struct kv *kv, uint64_t id, int64_t job, int attempt, const char *group, const char *key,
               int64_t deadline, char *out)
{
    struct kv_asker a = asker(id, job, attempt, 1);
    struct error err;
    const void *value;
    size_t len;
    int rc = kv_get(kv, &a, group, key, deadline, &value, &len, &err);
    if (rc == ERR_OK)
        snprintf(out, 64, "%.*s", (int)len, (const char *)value);
    return rc;
}

static void a_value_is_there_or_comes(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    char out[64];
    assert_int_equal(set(kv, 1, 1, "world", "a", "x"), ERR_OK);
    assert_int_equal(get(kv, 7, 1, 1, "world", "a", 100, out), ERR_OK);
    assert_string_equal(out, "x");
    assert_int_equal(get(kv, 8, 1, 1, "world", "b", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 9, 1, 1, "world", "b", 100, out), ERR_BUSY);
    assert_int_equal(seen.n, 0);
    assert_int_equal(set(kv, 1, 1, "world", "b", "y"), ERR_OK);
    assert_int_equal(seen.n, 2);
    assert_true(seen.ok[0] && seen.ok[1]);
    assert_string_equal(seen.text[0], "y");
    assert_int_equal(kv_expire(kv, 1000), INT64_MAX);
    assert_int_equal(seen.n, 2);
    kv_free(kv);
}

static void set_is_idempotent_and_final(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    assert_int_equal(set(kv, 1, 1, "w", "a", "x"), ERR_OK);
    assert_int_equal(set(kv, 1, 1, "w", "a", "x"), ERR_OK);
    assert_int_equal(set(kv, 1, 1, "w", "a", "z"), ERR_REFUSED);
    assert_int_equal(set(kv, 1, 1, "w", "empty", ""), ERR_OK);
    kv_free(kv);
}

/* Job, attempt, group and key all tell apart; "ab"+"c" is not "a"+"bc". */
static void names_do_not_meet(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    char out[64];
    assert_int_equal(set(kv, 1, 1, "ab", "c", "x"), ERR_OK);
    assert_int_equal(get(kv, 1, 1, 1, "a", "bc", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 2, 1, 2, "ab", "c", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 3, 2, 1, "ab", "c", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 4, 1, 1, "ab", "c", 100, out), ERR_OK);
    kv_free(kv);
}

static void deadlines_name_the_key(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    char out[64];
    assert_int_equal(get(kv, 1, 1, 1, "world", "late", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 2, 1, 1, "tp0", "later", 300, out), ERR_BUSY);
    assert_int_equal(kv_expire(kv, 99), 100);
    assert_int_equal(seen.n, 0);
    assert_int_equal(kv_expire(kv, 100), 300);
    assert_int_equal(seen.n, 1);
    assert_false(seen.ok[0]);
    assert_string_equal(seen.text[0], "nobody set world/late in time");
    /* The same asker again moves its own deadline and is answered once. */
    assert_int_equal(get(kv, 2, 1, 1, "tp0", "later", 500, out), ERR_BUSY);
    assert_int_equal(kv_expire(kv, 400), 500);
    assert_int_equal(set(kv, 1, 1, "tp0", "later", "v"), ERR_OK);
    assert_int_equal(seen.n, 2);
    kv_free(kv);
}

static void an_attempt_goes_whole(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    char out[64];
    assert_int_equal(set(kv, 1, 1, "w", "a", "x"), ERR_OK);
    assert_int_equal(set(kv, 1, 2, "w", "a", "y"), ERR_OK);
    assert_int_equal(get(kv, 5, 1, 1, "w", "never", 100, out), ERR_BUSY);
    kv_drop(kv, 1, 1, "the attempt has ended");
    assert_int_equal(seen.n, 1);
    assert_string_equal(seen.text[0], "the attempt has ended");
    assert_int_equal(get(kv, 6, 1, 1, "w", "a", 100, out), ERR_BUSY);
    assert_int_equal(get(kv, 7, 1, 2, "w", "a", 100, out), ERR_OK);
    assert_string_equal(out, "y");
    kv_drop(kv, 9, 9, "nothing there");
    kv_free(kv);
}

static void limits(void **state)
{
    (void)state;
    struct kv *kv = fresh();
    struct error err;
    struct kv_asker a = asker(1, 1, 1, 0);
    char *big = calloc(1, LIMIT_KV_VALUE + 1);
    char name[KV_MAX_NAME + 2];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(kv_set(kv, &a, "w", "a", big, LIMIT_KV_VALUE + 1, &err), ERR_INVALID);
    assert_int_equal(kv_set(kv, &a, "w", name, "", 0, &err), ERR_INVALID);
    assert_int_equal(kv_set(kv, &a, "w", "", "", 0, &err), ERR_INVALID);
    int rc = ERR_OK, n = 0;
    for (; n < 2000 && rc == ERR_OK; n++) {
        snprintf(name, sizeof name, "key-%d", n);
        rc = kv_set(kv, &a, "w", name, big, LIMIT_KV_VALUE, &err);
    }
    assert_int_equal(rc, ERR_REFUSED);
    assert_true(n > 1000 && n <= 1024); /* 64 MiB of 64 KiB each */
    /* Another attempt is not affected. */
    assert_int_equal(set(kv, 1, 2, "w", "a", "x"), ERR_OK);
    free(big);
    kv_free(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_value_is_there_or_comes), cmocka_unit_test(set_is_idempotent_and_final),
        cmocka_unit_test(names_do_not_meet),         cmocka_unit_test(deadlines_name_the_key),
        cmocka_unit_test(an_attempt_goes_whole),     cmocka_unit_test(limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
