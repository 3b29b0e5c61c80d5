/* What a checkpoint keeps of the training data, and which changes of it are told: those that change which sample is
 * number n, and no others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/support/token_files.h"
#include "worker/data.h"

enum { FILES = 3, TOKENS = 101 };

struct set {
    Boost__JobSpec job;
    Boost__Data data;
    Boost__Run run;
    Boost__TokenFile file[FILES], *list[FILES];
    char path[FILES][640];
    struct plan plan;
};

static void make_set(struct set *s, int files)
{
    *s = (struct set){.job = BOOST__JOB_SPEC__INIT, .data = BOOST__DATA__INIT, .run = BOOST__RUN__INIT};
    s->plan = (struct plan){.s = 10, .V = 256, .tp = 1, .pp = 1, .dp = 1, .world = 1, .micro_batch = 1};
    s->plan.global_batch = s->plan.accumulation = 1;
    s->plan.T = 10;
    for (int i = 0; i < files; i++) {
        char name[32];
        snprintf(name, sizeof name, "file-%d", i);
        snprintf(s->path[i], sizeof s->path[i], "%s", write_tokens(name, TOKENS, 1));
        boost__token_file__init(&s->file[i]);
        s->file[i].path = s->path[i];
        s->list[i] = &s->file[i];
    }
    s->data.train = s->list;
    s->data.n_train = (size_t)files;
    s->data.format = BOOST__FORMAT__VALUE__TEXT;
    s->job.data = &s->data;
    s->job.run = &s->run;
}

static void identity(struct set *s, char out[256])
{
    struct data d;
    struct buffer text;
    struct error err;
    buffer_init(&text, 255);
    assert_int_equal(data_open(&d, &s->job, &s->plan, 0, &err), 0);
    assert_int_equal(data_identity(&d, &text, &err), 0);
    snprintf(out, 256, "%s", (char *)text.data);
    buffer_free(&text);
    data_close(&d);
}

/* The count, and what is told into `said`. */
static int changes(struct set *s, const char *was, char said[600])
{
    struct data d;
    struct error err;
    assert_int_equal(data_open(&d, &s->job, &s->plan, 0, &err), 0);
    int n = data_changes(&d, was, said, 600);
    data_close(&d);
    return n;
}

static void expect(struct set *s, const char *was, const char *words)
{
    char said[600];
    assert_int_equal(changes(s, was, said), 1);
    if (!strstr(said, words))
        fail_msg("no '%s' in: %s", words, said);
}

static void the_same_data_is_no_change(void **state)
{
    (void)state;
    struct set s;
    char was[256], said[600];
    make_set(&s, FILES);
    identity(&s, was);
    assert_int_equal(strncmp(was, "10 3 3;101,10,1,", 16), 0);
    assert_int_equal(changes(&s, was, said), 0);
    assert_string_equal(said, "");
    /* Elsewhere, or longer by less than a window: the samples are the same. */
    snprintf(s.path[0], sizeof s.path[0], "%s", write_tokens("moved", TOKENS + 9, 1));
    assert_int_equal(changes(&s, was, said), 0);
    for (int i = 0; i < FILES; i++) /* shares count, not their scale */
        s.file[i].weight = 7;
    assert_int_equal(changes(&s, was, said), 0);
}

static void what_moves_samples_is_told(void **state)
{
    (void)state;
    struct set s;
    char was[256], words[700], said[600];
    make_set(&s, FILES);
    identity(&s, was);
    write_tokens("file-1", TOKENS - 30, 1);
    snprintf(words, sizeof words, "data.train[1] (%s) has 71 tokens in 7 windows, it had 101 in 10", s.path[1]);
    expect(&s, was, words);
    write_tokens("file-1", TOKENS + 10, 1);
    expect(&s, was, "has 111 tokens in 11 windows, it had 101 in 10");
    char other[TOKENS];
    memset(other, 'x', sizeof other);
    write_file("file-1", other, sizeof other);
    expect(&s, was, "has as many windows as it had, of other tokens");
    write_tokens("file-1", TOKENS, 1);
    s.plan.s = s.plan.T = 20;
    expect(&s, was, "data.seq_len is 20, it was 10");
    s.plan.s = s.plan.T = 10;
    s.data.n_train = 2;
    expect(&s, was, "data.train has 2 files, it had 3");
    s.data.n_train = FILES;
    s.file[2].weight = 2;
    assert_int_equal(changes(&s, was, said), 3);
    assert_non_null(strstr(said, "data.train[2].weight gives 2 of 4 samples, it gave 1 of 3"));
}

static void more_than_has_room_is_counted(void **state)
{
    (void)state;
    struct set s;
    struct data d;
    struct error err;
    char was[256], said[120];
    make_set(&s, FILES);
    identity(&s, was);
    for (int i = 0; i < FILES; i++)
        write_tokens((const char *[]){"file-0", "file-1", "file-2"}[i], 2 * TOKENS, 1);
    s.plan.s = s.plan.T = 20;
    assert_int_equal(data_open(&d, &s.job, &s.plan, 0, &err), 0);
    assert_int_equal(data_changes(&d, was, said, sizeof said), 4);
    assert_string_equal(said, "data.seq_len is 20, it was 10; and 3 more");
    data_close(&d);
}

/* Of a later version, or damaged: nothing is known. */
static void another_text_tells_nothing(void **state)
{
    (void)state;
    struct set s;
    char said[600];
    make_set(&s, 1);
    static const char *const texts[] = {"", "x", "10", "10 3", "10 3 x;", "-1 1 1;", "10 1 1;", "10 1 1;5", "10 1 1;5,4,1,",
                                        "10 1 1;5,4,1,;", "9999999999999999999999 1 1;x"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (changes(&s, texts[i], said))
            fail_msg("'%s': %s", texts[i], said);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_data_is_no_change),
        cmocka_unit_test(what_moves_samples_is_told),
        cmocka_unit_test(more_than_has_room_is_counted),
        cmocka_unit_test(another_text_tells_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
