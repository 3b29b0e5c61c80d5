/* Lists of node names, and constraints on labels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto/constraint.h"
#include "proto/nodelist.h"

static void lists(void **state)
{
    (void)state;
    static const struct {
        const char *list, *in, *out;
    } rows[] = {
        {"gpu01", "gpu01", "gpu1 gpu010 gpu gpu02"},
        {"gpu[01-04,07],login", "gpu01 gpu03 gpu04 gpu07 login", "gpu1 gpu05 gpu08 gpu001 login1 logi"},
        {"n[1-12]", "n1 n9 n10 n12", "n0 n01 n13 n012"},
        {"n[08-11]", "n08 n10 n11", "n8 n7 n12 n008"},
        {"r[1-2]n[01-02]", "r1n01 r2n02", "r3n01 r1n03 r1n1"},
        {"[1-3][0-1]", "10 31 20", "12 1 410"},
        {"a-b.c_[7]", "a-b.c_7", "a-b.c_ a-b.c_8"},
        {"", "", "x"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct error err;
        char name[32];
        assert_int_equal(nodelist_check(rows[i].list, &err), ERR_OK);
        for (int in = 0; in < 2; in++) {
            const char *s = in ? rows[i].in : rows[i].out;
            for (size_t len; *s; s += len + (s[len] == ' ')) {
                len = strcspn(s, " ");
                snprintf(name, sizeof name, "%.*s", (int)len, s);
                if (nodelist_has(rows[i].list, name) != (in == 1))
                    fail_msg("'%s' %s '%s'", rows[i].list, in ? "lacks" : "has", name);
            }
        }
    }
    static const char *const bad[] = {",",
                                      "a,",
                                      "[",
                                      "a[",
                                      "a[]",
                                      "a[1",
                                      "a[1-",
                                      "a[-1]",
                                      "a[x]",
                                      "a[2-1]",
                                      "a[1,]",
                                      "a]",
                                      "a b",
                                      "a[001-9]",
                                      "a/b",
                                      "a[1]b,",
                                      "a[[1]]",
                                      "a[1-2-3]",
                                      "a[1][1][1][1][1]",
                                      "a[1234567890123456789]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err;
        if (nodelist_check(bad[i], &err) != ERR_INVALID)
            fail_msg("'%s' is taken", bad[i]);
        assert_non_null(strstr(err.hint, "brackets"));
    }
}

static const char *value(const void *arg, const char *key, size_t len)
{
    /* "k=v k=v" */
    for (const char *s = arg; *s;) {
        size_t n = strcspn(s, " ="), all = strcspn(s, " ");
        static char out[32];
        if (n == len && memcmp(s, key, len) == 0) {
            snprintf(out, sizeof out, "%.*s", all > n ? (int)(all - n - 1) : 0, s + n + (all > n));
            return out;
        }
        s += all + (s[all] == ' ');
    }
    return NULL;
}

static void constraints(void **state)
{
    (void)state;
    static const struct {
        const char *text, *labels;
        bool holds;
    } rows[] = {
        {"", "", true},
        {"gpu", "gpu=h200", true},
        {"gpu", "gp=h200", false},
        {"gpu=h200", "gpu=h100", false},
        {"gpu=h200", "gpu=h2000", false},
        {"!gpu=h200", "gpu=h100", true},
        {"a&b", "a b", true},
        {"a&b", "a", false},
        {"a|b&c", "a", true}, /* & binds closer */
        {"(a|b)&c", "a", false},
        {"(a|b)&c", "b c", true},
        {"!a&b", "b", true}, /* ! closest */
        {"!(a&b)", "a", true},
        {"!!a", "a", true},
        {"gpu=h200&!rack=r3|fast", "gpu=h200 rack=r3", false},
        {"gpu=h200&!rack=r3|fast", "gpu=h200 rack=r4", true},
        {"gpu=h200&!rack=r3|fast", "fast", true},
        {" gpu = h200 & fast ", "gpu=h200 fast", true},
    };
    struct constraint c;
    struct error err;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(constraint_compile(rows[i].text, &c, &err), ERR_OK);
        if (constraint_holds(&c, value, rows[i].labels) != rows[i].holds)
            fail_msg("'%s' on '%s'", rows[i].text, rows[i].labels);
    }
    static const char *const bad[] = {"&",  "a&",  "a|",   "|a", "!",  "(a",  "a)",
                                      "()", "a b", "a==b", "a=", "=a", "a,b", "a&&b"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (constraint_compile(bad[i], &c, &err) != ERR_INVALID)
            fail_msg("'%s' is taken", bad[i]);
        assert_non_null(strstr(err.message, "is not a constraint"));
    }
    char deep[200];
    memset(deep, '(', sizeof deep - 1);
    deep[sizeof deep - 1] = '\0';
    assert_int_equal(constraint_compile(deep, &c, &err), ERR_INVALID);
    memset(deep, '!', sizeof deep - 1);
    assert_int_equal(constraint_compile(deep, &c, &err), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lists), cmocka_unit_test(constraints)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
