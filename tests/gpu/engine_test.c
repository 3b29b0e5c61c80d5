/* time limit: 600 s
 * The engine on a GPU against the same engine on the CPU, one rank: gradients and loss of one micro-batch in every
 * way and recompute mode, and curves of losses.
 *
 * The bound of a gradient is relative to emulated BF16 on the CPU, which rounds where the GPU rounds and differs in the
 * order of its fp32 sums and in attention, where cuDNN rounds probabilities to bf16: at most twice its error against
 * fp64, the rule by which a kernel may not be worse than the plain computation in the same precision. Errors of tensors
 * whose bf16 error happens to be small are compared with the model's mean error, since one draw of roundings is no
 * measure of their size. */
#include "tests/unit/worker/tiny_grads.h"

#include <unistd.h>

#include "proto/base/bf16.h"
#include "worker/cuda.h"

enum { STEPS = 200, MODES = 3 };

static const struct cuda_library *library;

/* A machine that has a GPU must not pass by skipping, unless this build has no CUDA backend. */
static void need_gpu(void)
{
    struct error err = {0};
    struct kstream *ks;
    if (library)
        return;
    const struct cuda_library *found = NULL;
    int rc = cuda_library_open(&found, &err);
    if (!rc)
        rc = found->kernels()->stream_create(1, &ks, &err);
    if (!rc) {
        found->kernels()->stream_destroy(ks);
        library = found;
        return;
    }
    print_message("no CUDA: %s\n", err.message);
    if (getenv("BOOST_CUDA_LIBRARY") || (!access("/dev/nvidia0", F_OK) && rc != ERR_UNSUPPORTED))
        fail_msg("CUDA cannot be used here");
    skip();
}

/* Groups of one rank whose copies are the device's. */
static void gpu_comms(struct comms *c)
{
    static const struct comm_layout alone = {.tp = 1, .dp = 1, .pp = 1};
    struct error err = {0};
    comms_destroy(c);
    if (library->comms_create(0, &alone, NULL, NULL, 0, NULL, c, &err)) {
        fprintf(stderr, "# %s\n", err.message);
        abort();
    }
}
static struct tiny_device gpu(void)
{
    return (struct tiny_device){library->kernels(), gpu_comms};
}

/* Wide enough that a norm's row and a head are more than a vector; sequences longer than a tile of attention. */
static struct tiny model(int way)
{
    struct tiny c = tiny_of(way);
    c.d = 128, c.f = 192, c.h = 4, c.hk = way & 1 ? 4 : 2, c.V = 96, c.s = 96, c.micro = c.global = 8;
    c.r = 32;
    c.tied = way >> 1 & 1;
    c.mlp_silu = way & 1;
    c.fp64 = false;
    c.bf16 = true;
    return c;
}

static const int modes[MODES] = {BOOST__RECOMPUTE__VALUE__NONE, LOW_RANK, LAYER};
static const char *const mode_names[MODES] = {"NONE", "LOW_RANK", "LAYER"};

/* The plan of a rank on a GPU; its head in three chunks. */
static void gpu_plan(const struct tiny *c, struct plan *p)
{
    tiny_plan(c, p);
    p->cuda = true;
    p->head_bytes = p->T / 3 * p->V_pad * 2;
}

static void gradients_on_gpu(const struct tiny *c, bool initial, struct grads *out)
{
    struct plan p;
    gpu_plan(c, &p);
    gradients_on(c, &p, gpu(), initial, out);
}

static void compare(const struct tiny *c, const char *mode, bool initial, const struct grads *exact,
                    const struct grads *emulated, const struct grads *cuda)
{
    double whole = grads_whole_distance(cuda, exact), allowed = grads_whole_distance(emulated, exact), worst = 0;
    double loss = fabs(cuda->loss / exact->loss - 1), loss_allowed = fabs(emulated->loss / exact->loss - 1);
    for (int64_t i = 0; i < exact->count; i++) {
        double error = grads_distance(cuda, exact, i), plain = fmax(grads_distance(emulated, exact, i), allowed);
        worst = fmax(worst, error / plain);
        if (!(error <= 2 * plain))
            fail_msg("%s, recompute %s, %s weights: %s is off by %.2e, emulated bf16 by %.2e (all: %.2e)", c->way.name,
                     mode, initial ? "initial" : "random", exact->tensors[i].name, error,
                     grads_distance(emulated, exact, i), allowed);
    }
    print_message("%s, recompute %s, %s weights: all gradients %.1e (emulated %.1e), a tensor at most %.2f of that; "
                  "loss %.1e (%.1e)\n",
                  c->way.name, mode, initial ? "initial" : "random", whole, allowed, worst, loss, loss_allowed);
    assert_true(whole <= 2 * allowed);
    /* a mean over 600 tokens of errors that bf16's logits have, 2^-9 of some units */
    assert_true(loss <= fmax(2 * loss_allowed, 1e-3));
}

static void gradients_of_every_way(void **state)
{
    (void)state;
    need_gpu();
    for (int i = 0; i < TINY_WAYS; i++) {
        for (int initial = 0; initial < 2; initial++) {
            struct tiny c = model(i), reference = c;
            struct grads exact, emulated, cuda, first = {0};
            reference.fp64 = true;
            gradients_at(&reference, initial, &exact);
            gradients_at(&c, initial, &emulated);
            for (int m = 0; m < MODES; m++) {
                c.recompute = modes[m];
                if (!tiny_is_valid(&c))
                    continue; /* LOW_RANK wants latents */
                gradients_on_gpu(&c, initial, &cuda);
                compare(&c, mode_names[m], initial, &exact, &emulated, &cuda);
                if (m == 0) {
                    first = cuda;
                    continue;
                }
                /* The same operations on the same numbers. */
                if (grads_whole_distance(&cuda, &first) != 0)
                    fail_msg("%s: recompute %s changes gradients by %.2e", c.way.name, mode_names[m],
                             grads_whole_distance(&cuda, &first));
                grads_free(&cuda);
            }
            grads_free(&first);
            grads_free(&exact);
            grads_free(&emulated);
        }
    }
}

/* ---- losses ---- */

struct curve {
    struct tiny c;
    bool plain;   /* nothing is captured */
    bool rounded; /* the initial weights, to bf16 */
    double loss[STEPS], norm[STEPS];
};

static void round_weights(struct engine *e)
{
    for (int64_t i = 0; i < engine_tensor_count(e); i++) {
        struct state_tensor t;
        engine_tensor(e, i, STATE_WEIGHT, &t);
        int64_t n = t.tensor.nrows * t.tensor.ncols;
        double *values = calloc((size_t)n + 1, sizeof *values);
        tiny_download(e, t.dtype, t.device, n, values);
        for (int64_t k = 0; k < n; k++)
            values[k] = from_bf16(to_bf16((float)values[k]));
        tiny_upload(e, t.dtype, t.device, n, values);
        free(values);
    }
}

static int train(struct engine *e, int rank, void *arg, struct error *err)
{
    struct curve *r = arg;
    const struct tiny *c = &r->c;
    struct tiny_batch *batches = calloc(2, sizeof *batches);
    struct micro_batch micro[2];
    (void)rank;
    engine_set_capture(e, !r->plain);
    int rc = engine_init_weights(e, err);
    if (!rc && r->rounded) {
        round_weights(e);
        rc = engine_weights_changed(e, err);
    }
    for (int step = 0; step < STEPS && !rc; step++) {
        for (int m = 0; m < 2; m++) {
            tiny_batch(c, (int64_t)(step % 25) * c->global + m * c->micro, 0, &batches[m]);
            micro[m] = batches[m].micro;
        }
        struct step_request request = {.lr = c->lr * fmin(1, (step + 1) / 20.0)};
        struct step_result result;
        rc = engine_step(e, micro, &request, &result, NULL, NULL, err);
        if (!rc && result.skipped)
            rc = error_set(err, ERR_INTERNAL, "step %d was skipped", step + 1);
        r->loss[step] = rc ? 0 : result.loss;
        r->norm[step] = rc ? 0 : result.grad_norm;
    }
    free(batches);
    return rc;
}

static struct curve curve_of(const struct tiny *c, bool on_gpu, bool plain, bool rounded)
{
    struct curve r = {.c = *c, .plain = plain, .rounded = rounded};
    struct plan p;
    tiny_plan(c, &p);
    if (on_gpu)
        gpu_plan(c, &p);
    tiny_run_on(&p, on_gpu ? gpu() : (struct tiny_device){.kernels = tiny_kernels(&p)}, 1, train, &r, NULL);
    return r;
}

/* Of means over 20 steps, so that what differs is where the curve lies and not the noise of one batch. */
static double gap(const struct curve *a, const struct curve *b)
{
    double most = 0;
    for (int first = 0; first + 20 <= STEPS; first += 20) {
        double x = 0, y = 0;
        for (int s = first; s < first + 20; s++)
            x += a->loss[s], y += b->loss[s];
        most = fmax(most, fabs(x / y - 1));
    }
    return most;
}

static void losses_overlay(void **state)
{
    (void)state;
    need_gpu();
    static const int some[] = {0, 1, 2, 8, 12, 14}; /* each factorisation, each strategy */
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        struct tiny c = model(some[i]), f = c;
        c.s = f.s = 32;
        c.micro = f.micro = 4;
        c.global = f.global = 8;
        f.bf16 = false;
        struct curve fp32 = curve_of(&f, false, false, false), rounded = curve_of(&f, false, false, true);
        struct curve emulated = curve_of(&c, false, false, false);
        struct curve cuda = curve_of(&c, true, false, false);
        struct curve plain = curve_of(&c, true, true, false);
        double yardstick = fmax(gap(&emulated, &fp32), gap(&rounded, &fp32)), off = gap(&cuda, &fp32);
        print_message("%s: %.4f to %.4f in %d steps (fp32 %.4f, emulated %.4f); off by %.1e (yardstick %.1e)\n",
                      c.way.name, cuda.loss[0], cuda.loss[STEPS - 1], STEPS, fp32.loss[STEPS - 1],
                      emulated.loss[STEPS - 1], off, yardstick);
        assert_true(cuda.loss[STEPS - 1] < 0.7 * cuda.loss[0]);
        assert_true(off <= 2 * yardstick);
        for (int s = 0; s < STEPS; s++)
            if (cuda.loss[s] != plain.loss[s] || cuda.norm[s] != plain.norm[s])
                fail_msg("%s: the captured step %d has loss %.17g, the plain one %.17g", c.way.name, s + 1,
                         cuda.loss[s], plain.loss[s]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_every_way),
        cmocka_unit_test(losses_overlay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
