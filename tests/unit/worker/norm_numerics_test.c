/* The online norm's roundings. It applies R behind the latent's sum over ranks where the plain norm (SYNC) applies it
 * in front, so what is summed has the scale of the residual stream. On rows and channels that differ by orders of
 * magnitude, in fp32 and bf16, its error against fp64 is at most twice the plain norm's in the same precision:
 * forward (Y) and backward (dx, dgain, dA), separately for rows of each scale. The engine's own functions run on four
 * ranks. */
#include "tests/unit/worker/tiny.h"

#include "proto/base/bf16.h"
#include "worker/engine_internal.h"

enum { TP = 4, SEQ = 48, MICRO = 4, T = SEQ * MICRO, D = 128, W = D / TP, RANK = 12, COLUMNS = 3 * RANK };
enum scale { ORDINARY, HUGE_ROWS, TINY_ROWS, SCALES, ALL_ROWS = SCALES };
static const char *const scale_names[SCALES] = {"ordinary rows", "rows of 1e4", "rows of 1e-4"};

static const struct input {
    const char *name;
    bool outliers, zero_shard, scales;
} inputs[] = {
    {"plain", false, false, false},
    {"outlier channels", true, false, false},
    {"an all-zero shard", false, true, false},
    {"rows of 1e4 and 1e-4", false, false, true},
    {"all of these", true, true, true},
};
enum { INPUTS = sizeof inputs / sizeof *inputs };

enum precision { FP64_OF_FP32, FP64_OF_BF16, IN_FP32, IN_BF16 }; /* the reference, at the inputs that each can hold */

struct norm_run {
    const struct input *input;
    enum precision precision;
    bool online;
    double Y[T * COLUMNS], dx[T * D], dgain[D], dA[COLUMNS * D];
};

static enum scale scale_of(const struct input *in, int64_t row)
{
    return in->scales ? (enum scale)(row % SCALES) : ORDINARY;
}

/* Number i of a sequence of normal values, as the precision holds it. */
static double value(const struct norm_run *r, const char *name, int64_t i, double middle, double factor)
{
    double x;
    init_normal(init_key(11, name), (uint64_t)i, 1, &x);
    bool bf16 = r->precision == IN_BF16 || r->precision == FP64_OF_BF16;
    float held = (float)(middle + factor * x);
    return (double)(bf16 ? from_bf16(to_bf16(held)) : held);
}

/* Channel 5 of each rank is 300 times as large as the rest; rank 2 may have none but zeros. */
static double channel_factor(const struct input *in, int64_t column)
{
    return in->outliers && column % W == 5 ? 300 : 1;
}

static double x_at(const struct norm_run *r, int64_t row, int64_t column)
{
    static const double factors[SCALES] = {1, 1e4, 1e-4};
    double factor = factors[scale_of(r->input, row)] * channel_factor(r->input, column);
    if (r->input->zero_shard && column / W == 2)
        factor = 0;
    return value(r, "x", row * D + column, 0, factor);
}

/* Gains about one, any A; B passes the gradient of rank 0's first outputs on as that of the latents, unrounded. */
static void set_weights(struct engine *e, int rank, const struct norm_run *r)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        const struct plan_tensor *p = &t.tensor;
        for (int64_t k = 0; k < p->nrows * p->ncols; k++) {
            int64_t row = k / p->ncols, at = (p->row0 + row) * p->cols + p->col0 + k % p->ncols;
            double x = value(r, p->name, at, p->role == ROLE_GAIN ? 1 : 0, 0.3);
            if (p->role == ROLE_UP)
                x = rank == 0 && row == k % p->ncols;
            tiny_put(&t, k, x);
        }
    }
}

static void put_act(struct engine *e, void *to, const double *from, int64_t n)
{
    e->k->cast(e->ks, e->k->act, to, DTYPE_F64, from, n);
}

static int forward(struct engine *e, int rank, struct norm_run *r, struct error *err)
{
    void *x1 = engine_buffer(e, BUF_X1, 0);
    double *x = calloc((size_t)T * W, sizeof *x);
    for (int64_t i = 0; i < T * W; i++)
        x[i] = x_at(r, i / W, rank * W + i % W);
    put_act(e, x1, x, T * W);
    free(x);
    engine_set_pass(e, PASS_FORWARD);
    int rc = norm_forward(e, SITE_QKV, 0, &(struct addends){x1, NULL}, err);
    if (!rc)
        rc = e->strategy->latent(e, SITE_QKV, 0, norm_n(e, SITE_QKV, 0), err);
    if (!rc && e->strategy->settle) /* no output() follows */
        rc = e->strategy->settle(e, SITE_QKV, 0, err);
    if (!rc && rank == 0)
        e->k->cast(e->ks, DTYPE_F64, r->Y, e->k->act, engine_buffer(e, BUF_H_QKV, 0), T * COLUMNS);
    return rc;
}

static int backward(struct engine *e, int rank, struct norm_run *r, struct error *err)
{
    double *dy = calloc((size_t)T * 3 * W, sizeof *dy), *dx = calloc((size_t)T * W, sizeof *dx);
    for (int64_t i = 0; i < 3 * T * W && rank == 0; i++)
        dy[i] = i % W < RANK ? value(r, "dy", i, 0, 1) : 0;
    put_act(e, engine_buffer(e, BUF_DOUTER, 0), dy, 3 * T * W);
    put_act(e, engine_buffer(e, BUF_DX, 0), dx, T * W);
    engine_set_pass(e, PASS_BACKWARD);
    const void *outputs = engine_buffer(e, BUF_DOUTER, 0);
    int rc = ERR_OK;
    for (int i = 0; i < bundle_count(e, SITE_QKV) && !rc; i++) {
        struct bundle b = bundle_at(e, SITE_QKV, i);
        rc = e->strategy->dlatent(e, &b, 0, outputs, err);
    }
    if (!rc)
        rc = normed_dinput(e, SITE_QKV, 0, outputs, err);
    if (!rc)
        rc = norm_backward(e, SITE_QKV, 0, err);
    e->k->cast(e->ks, DTYPE_F64, dx, e->k->act, engine_buffer(e, BUF_DX, 0), T * W);
    for (int64_t i = 0; i < T * W; i++)
        r->dx[i / W * D + rank * W + i % W] = dx[i];
    free(dy);
    free(dx);
    return rc;
}

static int one_norm(struct engine *e, int rank, void *arg, struct error *err)
{
    struct norm_run *r = arg;
    set_weights(e, rank, r);
    int rc = engine_weights_changed(e, err);
    if (!rc)
        rc = forward(e, rank, r, err);
    if (!rc)
        rc = backward(e, rank, r, err);
    for (int64_t i = 0, branch = 0; i < engine_tensor_count(e) && !rc; i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_GRAD, &t);
        const struct plan_tensor *p = &t.tensor;
        bool gain = p->role == ROLE_GAIN && p->layer == 0 && p->projection == PROJ_Q;
        bool down = p->role == ROLE_DOWN && p->projection >= PROJ_Q && p->projection <= PROJ_V;
        for (int64_t k = 0; k < p->nrows * p->ncols && gain; k++)
            r->dgain[rank * W + k] = tiny_get(&t, k);
        for (int64_t k = 0; k < p->nrows * p->ncols && down; k++)
            r->dA[(branch * RANK + k / W) * D + rank * W + k % W] = tiny_get(&t, k);
        branch += down;
    }
    return rc;
}

static struct norm_run *run(const struct input *in, enum precision precision, bool online)
{
    struct norm_run *r = calloc(1, sizeof *r);
    struct tiny c = tiny_default;
    struct plan p;
    *r = (struct norm_run){.input = in, .precision = precision, .online = online};
    c.way = (struct tiny_way){.name = "SVD BTP", .factorization = SVD, .strategy = BTP, .sync = !online};
    c.fp64 = precision == FP64_OF_FP32 || precision == FP64_OF_BF16;
    c.bf16 = precision == IN_BF16;
    c.d = D, c.f = D, c.r = RANK, c.L = 1, c.V = 40, c.s = SEQ, c.micro = c.global = MICRO, c.tp = TP;
    tiny_plan(&c, &p);
    tiny_run(&p, 1, one_norm, r, NULL);
    return r;
}

/* Relative Frobenius error over the rows of one scale, of n columns each. ALL_ROWS: of gradients of channels, each
 * divided by the channel's scale, for else an outlier or two would be all that is seen. */
static double error_of(const struct input *in, enum scale scale, const double *got, const double *want, int64_t rows,
                       int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < rows * n; i++) {
        if (scale != ALL_ROWS && scale_of(in, i / n) != scale)
            continue;
        double size = scale == ALL_ROWS ? channel_factor(in, i % n) : 1;
        diff += pow((got[i] - want[i]) / size, 2);
        norm += pow(want[i] / size, 2);
    }
    return sqrt(diff / norm);
}

static double worst_ratio;

static void expect_twice(const struct norm_run *online, const char *what, const char *which, double ours, double plain)
{
    double ratio = ours / plain;
    worst_ratio = fmax(worst_ratio, ratio);
    if (!(ours <= 2 * plain))
        fail_msg("%s, %s: error of %s (%s) is %.3g, the plain norm's %.3g", online->input->name,
                 online->precision == IN_FP32 ? "fp32" : "bf16", what, which, ours, plain);
}

static void compare(const struct norm_run *online, const struct norm_run *plain, const struct norm_run *exact)
{
    const struct input *in = online->input;
    for (enum scale s = ORDINARY; s < (in->scales ? SCALES : HUGE_ROWS); s++) {
        expect_twice(online, "Y", scale_names[s], error_of(in, s, online->Y, exact->Y, T, COLUMNS),
                     error_of(in, s, plain->Y, exact->Y, T, COLUMNS));
        expect_twice(online, "dx", scale_names[s], error_of(in, s, online->dx, exact->dx, T, D),
                     error_of(in, s, plain->dx, exact->dx, T, D));
    }
    expect_twice(online, "dgain", "all", error_of(in, ALL_ROWS, online->dgain, exact->dgain, 1, D),
                 error_of(in, ALL_ROWS, plain->dgain, exact->dgain, 1, D));
    expect_twice(online, "dA", "all", error_of(in, ALL_ROWS, online->dA, exact->dA, COLUMNS, D),
                 error_of(in, ALL_ROWS, plain->dA, exact->dA, COLUMNS, D));
}

static void at_most_twice_the_plain_norm(void **state)
{
    (void)state;
    for (int i = 0; i < INPUTS; i++)
        for (enum precision precision = IN_FP32; precision <= IN_BF16; precision++) {
            enum precision reference = precision == IN_FP32 ? FP64_OF_FP32 : FP64_OF_BF16;
            struct norm_run *online = run(&inputs[i], precision, true), *plain = run(&inputs[i], precision, false);
            struct norm_run *exact = run(&inputs[i], reference, false);
            worst_ratio = 0;
            compare(online, plain, exact);
            print_message("%s, %s: error at most %.2f times the plain norm's; of Y %.1e (plain %.1e)\n", inputs[i].name,
                          precision == IN_FP32 ? "fp32" : "bf16", worst_ratio,
                          error_of(&inputs[i], ORDINARY, online->Y, exact->Y, T, COLUMNS),
                          error_of(&inputs[i], ORDINARY, plain->Y, exact->Y, T, COLUMNS));
            free(online);
            free(plain);
            free(exact);
        }
}

/* In fp64 both are one function, at every scale. */
static void the_same_function(void **state)
{
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        struct norm_run *online = run(&inputs[i], FP64_OF_FP32, true), *plain = run(&inputs[i], FP64_OF_FP32, false);
        const struct input *in = &inputs[i];
        for (enum scale s = ORDINARY; s < (in->scales ? SCALES : HUGE_ROWS); s++) {
            assert_true(error_of(in, s, online->Y, plain->Y, T, COLUMNS) < 1e-13);
            assert_true(error_of(in, s, online->dx, plain->dx, T, D) < 1e-12);
        }
        assert_true(error_of(in, ALL_ROWS, online->dgain, plain->dgain, 1, D) < 1e-12);
        assert_true(error_of(in, ALL_ROWS, online->dA, plain->dA, COLUMNS, D) < 1e-12);
        free(online);
        free(plain);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_most_twice_the_plain_norm),
        cmocka_unit_test(the_same_function),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
