/* What taking a checkpoint asks of the other ranks: nothing; and which states it refuses. */
#include <math.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "tests/unit/worker/tiny.h"
#include "worker/checkpoint.h"

static char dir[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-ckpt-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return fs_remove_tree(dir, NULL);
}

struct leg {
    struct tiny c;
    const struct plan *plan;
    bool saves;
};

/* What open_checkpoint() points to. */
struct orders {
    char run[96], to[96];
    Boost__AttemptStart start;
    Boost__JobSpec spec;
    Boost__Checkpoint options;
};

static int open_checkpoint(struct orders *o, const struct plan *p, struct engine *e, int rank, struct checkpoint **c,
                           struct error *err)
{
    boost__attempt_start__init(&o->start);
    boost__job_spec__init(&o->spec);
    boost__checkpoint__init(&o->options);
    snprintf(o->run, sizeof o->run, "%s/run", dir);
    snprintf(o->to, sizeof o->to, "%s/ckpt", dir);
    o->spec.checkpoint = &o->options;
    o->start.spec = &o->spec;
    o->start.attempt = 1;
    o->start.run_dir = o->run;
    o->start.checkpoint_dir = o->to;
    int rc = fs_make_dirs(o->run, 0755, err);
    return rc ? rc : checkpoint_open(&o->start, p, e, rank, NULL, NULL, c, err);
}

/* Three steps, with or without a checkpoint behind each. */
static int steps(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct leg *l = arg;
    struct orders o;
    struct checkpoint *c = NULL;
    struct tiny_batch batches[4];
    struct micro_batch micro[4];
    int rc = engine_init_weights(e, err);
    if (!rc && l->saves)
        rc = open_checkpoint(&o, l->plan, e, rank, &c, err);
    for (int64_t n = 1; n <= 3 && !rc; n++) {
        struct step_request request = {.lr = 1e-3, .checkpoint = l->saves, .busy = c && checkpoint_busy(c)};
        struct step_result result;
        struct run_position at = {.step = n, .samples = n * l->c.global};
        int own = l->plan->accumulation;
        for (int i = 0; i < own; i++) {
            tiny_batch(&l->c, (n * own + i) * l->c.micro, 0, &batches[i]);
            micro[i] = batches[i].micro;
        }
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && c)
            rc = engine_adam_t(e, &at.adam_t, err);
        if (!rc && c)
            rc = checkpoint_snapshot(c, &at, err);
    }
    if (!rc && c)
        rc = checkpoint_wait(c, err);
    checkpoint_close(c);
    return rc;
}

static void a_checkpoint_issues_no_collective(void **state)
{
    (void)state;
    static const struct {
        int tp, dp, pp, zero;
    } layouts[] = {{1, 1, 1, 0}, {2, 1, 1, 0}, {1, 2, 1, 0}, {1, 2, 1, 1}, {1, 1, 2, 0}, {2, 2, 2, 1}};
    for (int way = 0; way < TINY_WAYS; way++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            struct leg l = {.c = tiny_of(way)};
            l.c.tp = layouts[i].tp;
            l.c.dp = layouts[i].dp;
            l.c.pp = layouts[i].pp;
            l.c.zero = layouts[i].zero;
            l.c.global = 4;
            if (!tiny_is_valid(&l.c))
                continue;
            struct plan p;
            struct comm_counters without[8] = {0}, with[8] = {0};
            tiny_plan(&l.c, &p);
            l.plan = &p;
            tiny_run(&p, 1, steps, &l, without);
            l.saves = true;
            tiny_run(&p, 1, steps, &l, with);
            for (int rank = 0; rank < p.world; rank++)
                assert_memory_equal(with[rank].by, without[rank].by, sizeof with[rank].by);
            /* they count: the agreement's sum of each step */
            assert_int_equal(with[0].by[GROUP_WORLD][COMM_ALL_REDUCE][PASS_STEP].calls, p.world > 1 ? 3 : 0);
        }
}

/* One value of a state, wherever it lies, is enough; the message says where. */
static int spoil_and_save(struct engine *e, int rank, void *arg, struct error *err)
{
    const struct leg *l = arg;
    struct orders o;
    struct checkpoint *c;
    static const enum state_kind kinds[] = {STATE_WEIGHT, STATE_MOMENT1, STATE_MOMENT2};
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    int rc = engine_init_weights(e, err);
    if (!rc)
        rc = open_checkpoint(&o, l->plan, e, rank, &c, err);
    if (rc)
        return rc;
    struct run_position at = {.step = 1};
    rc = checkpoint_snapshot(c, &at, err);
    if (!rc)
        rc = checkpoint_wait(c, err);
    for (int64_t i = 0; i < engine_tensor_count(e) && !rc; i++)
        for (int k = 0; k < 3 && !rc; k++) {
            struct state_tensor t;
            struct error why;
            double was, last = 0;
            engine_tensor(e, i, kinds[k], &t);
            int64_t where[] = {0, t.count / 2, t.count - 1};
            char *own = t.own;
            size_t size = dtype_size(t.dtype);
            for (int j = 0; j < 3 && !rc; j++) {
                tiny_download(e, t.dtype, own + (size_t)where[j] * size, 1, &was);
                tiny_upload(e, t.dtype, own + (size_t)where[j] * size, 1, &bad[(j + k) % 3]);
                at.step++;
                rc = checkpoint_snapshot(c, &at, err);
                if (!rc && (checkpoint_wait(c, &why) != ERR_REFUSED || !strstr(why.message, t.tensor.name)))
                    rc = error_set(err, ERR_INTERNAL, "%s, kind %d, element %lld: %s", t.tensor.name, k,
                                   (long long)where[j], why.message);
                last = was;
                tiny_upload(e, t.dtype, own + (size_t)where[j] * size, 1, &last);
            }
        }
    at.step++;
    if (!rc)
        rc = checkpoint_snapshot(c, &at, err);
    if (!rc)
        rc = checkpoint_wait(c, err);
    checkpoint_close(c);
    return rc;
}

static void one_value_that_is_not_finite_is_enough(void **state)
{
    (void)state;
    for (int fp64 = 0; fp64 < 2; fp64++) {
        struct leg l = {.c = tiny_default};
        struct plan p;
        l.c.fp64 = fp64;
        tiny_plan(&l.c, &p);
        l.plan = &p;
        tiny_run(&p, 1, spoil_and_save, &l, NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_checkpoint_issues_no_collective, set_up, tear_down),
        cmocka_unit_test_setup_teardown(one_value_that_is_not_finite_is_enough, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
