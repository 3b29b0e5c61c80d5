/* A job on fewer nodes: which numbers of nodes will do, and what becomes of its layout. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/base/arena.h"
#include "proto/jobfile.h"
#include "worker/plan/plan.h"

static const char text[] =
    "spec_version: 1 name: \"x\"\n"
    "model { factorization: COLA hidden: 64 layers: 4 heads: 4 intermediate: 128 rank: 16 vocab: 256 }\n"
    "data { train { path: \"/t.txt\" } seq_len: 32 } optimizer { lr: 1e-3 } run { steps: 10 }\n"
    "checkpoint { dir: \"/c\" }\n";

static Boost__JobSpec *resolve(const char *more, struct error *err)
{
    struct job_file f;
    char all[1024];
    Boost__JobSpec *out = NULL;
    snprintf(all, sizeof all, "%s%s", text, more);
    if (jobfile_parse(&f, "test", all, strlen(all), JOB_FORMAT_TEXT, false, err))
        fail_msg("%s", err->message);
    if (plan_resolve(f.spec, &(struct plan_machine){0}, &out, err))
        out = NULL;
    jobfile_free(&f);
    return out;
}

static void whole_replicas_that_divide_the_batch(void **state)
{
    (void)state;
    struct error err;
    /* 4 nodes of 4: replicas of 2 x 2 ranks, one a node. */
    Boost__JobSpec *s =
        resolve("parallel { tp: 2 pp: 2 dp: 4 micro_batch: 2 global_batch: 24 } resources { nodes: 4 }", &err);
    assert_non_null(s);
    static const int replicas[] = {0, 1, 2, 3, 4, 0};
    for (int n = 0; n < 6; n++)
        assert_int_equal(plan_replicas_on(s, n), replicas[n]);
    for (int n = 1; n <= 4; n++) {
        Boost__JobSpec *less = NULL;
        struct plan p;
        assert_int_equal(plan_on_fewer_nodes(s, n, &less, &err), ERR_OK);
        assert_int_equal(plan_validate(less, &err), ERR_OK);
        assert_int_equal(plan_make(less, &p, &err), ERR_OK);
        assert_int_equal(p.dp, n);
        assert_int_equal(p.world, 4 * n);
        assert_int_equal(p.global_batch, 24);
        assert_int_equal(p.micro_batch * p.dp * p.accumulation, 24);
        assert_int_equal(less->resources->nodes, n);
        boost__job_spec__free_unpacked(less, NULL);
    }
    boost__job_spec__free_unpacked(s, NULL);
    /* A replica over two nodes: only even numbers; three replicas do not share 32 sequences. */
    s = resolve("parallel { tp: 2 pp: 2 dp: 4 micro_batch: 2 global_batch: 32 } resources { nodes: 8 min_nodes: 2 }",
                &err);
    assert_non_null(s);
    static const int halves[] = {0, 0, 1, 0, 2, 0, 0, 0, 4};
    for (int n = 0; n < 9; n++)
        assert_int_equal(plan_replicas_on(s, n), halves[n]);
    Boost__JobSpec *less = NULL;
    assert_int_equal(plan_on_fewer_nodes(s, 6, &less, &err), ERR_INVALID);
    assert_null(less);
    boost__job_spec__free_unpacked(s, NULL);
}

/* 12 sequences: 3 replicas with 4 each, 2 have 6, which are not two of 4. */
static void micro_batch_divides_what_a_replica_has(void **state)
{
    (void)state;
    struct error err;
    Boost__JobSpec *s = resolve("parallel { dp: 3 micro_batch: 4 global_batch: 12 } resources { nodes: 3 }", &err),
                   *less;
    assert_int_equal(plan_on_fewer_nodes(s, 2, &less, &err), ERR_OK);
    assert_int_equal(less->parallel->micro_batch, 3);
    boost__job_spec__free_unpacked(less, NULL);
    assert_int_equal(plan_on_fewer_nodes(s, 1, &less, &err), ERR_OK);
    assert_int_equal(less->parallel->micro_batch, 4);
    boost__job_spec__free_unpacked(less, NULL);
    boost__job_spec__free_unpacked(s, NULL);
}

static void min_nodes_that_cannot_be(void **state)
{
    (void)state;
    struct error err;
    assert_null(resolve("parallel { tp: 4 dp: 2 global_batch: 8 } resources { nodes: 4 min_nodes: 1 }", &err));
    assert_non_null(
        strstr(err.message, "resources.min_nodes = 1 nodes hold no whole replicas (tp * pp = 4 ranks each)"));
    assert_non_null(strstr(err.hint, "set resources.min_nodes: 2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_replicas_that_divide_the_batch),
        cmocka_unit_test(micro_batch_divides_what_a_replica_has),
        cmocka_unit_test(min_nodes_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
