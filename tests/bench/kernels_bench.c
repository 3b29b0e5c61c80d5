/* Speed of the fp32 kernels at the shapes of the demo model (d 256, t 2, f 704, r 64, 2048 tokens): one JSON line
 * per operation, {"name", "value", "unit"}. Best of several rounds on an otherwise idle machine.
 * Usage: kernels_bench [threads] */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "proto/base/clock.h"

enum { T = 2048, S = 256, D = 256, W = 128, F = 352, RANK = 64, HEADS = 4, HEAD = 32, VOCAB = 256, ROUNDS = 7 };

static const struct kernels *k;
static struct kstream *ks;

static void *values(int64_t n)
{
    struct error err;
    float *p = k->alloc((size_t)n * sizeof *p, &err);
    if (!p) {
        fprintf(stderr, "kernels_bench: %s\n", err.message);
        exit(1);
    }
    uint32_t x = 12345;
    for (int64_t i = 0; i < n; i++) {
        x = x * 1664525 + 1013904223;
        p[i] = (float)(x >> 8) * 0x1p-23f - 1;
    }
    return p;
}

/* Seconds of one call: the best round of about 20 ms. */
static double measure(void (*body)(void))
{
    double best = 1e9;
    int calls = 1;
    for (int round = 0; round < ROUNDS;) {
        int64_t start = clock_mono_ns();
        for (int i = 0; i < calls; i++)
            body();
        double seconds = (double)(clock_mono_ns() - start) / 1e9;
        if (seconds < 0.02 && calls < 1 << 20) {
            calls *= 2;
            continue;
        }
        if (seconds / calls < best)
            best = seconds / calls;
        round++;
    }
    return best;
}

static void report(const char *name, double value, const char *unit)
{
    printf("{\"name\": \"kernels_%s\", \"value\": %.4g, \"unit\": \"%s\"}\n", name, value, unit);
}

/* ---- products ------------------------------------------------------------------- */

static struct gemm shape;
static void *a, *b, *c;

static void body_gemm(void)
{
    k->gemm(ks, &shape, a, b, c);
}

static void gemm_line(const char *name, int64_t m, int64_t n, int64_t depth, bool trans_a, bool trans_b)
{
    shape = (struct gemm){.m = m,
                          .n = n,
                          .k = depth,
                          .trans_a = trans_a,
                          .trans_b = trans_b,
                          .lda = trans_a ? m : depth,
                          .ldb = trans_b ? depth : n,
                          .ldc = n,
                          .batch = 1,
                          .c_grad = trans_a,
                          .beta = trans_a ? 1 : 0};
    double flops = 2.0 * (double)m * (double)n * (double)depth;
    report(name, flops / measure(body_gemm) / 1e9, "GFLOP/s");
}

/* ---- the others: nanoseconds an element -------------------------------------------- */

static float *x, *y, *gain, *n_out, *stat, *stat2, *grad_gain, *m1, *m2, *m3, *lse, *workspace, *sums;
static int32_t *tokens;
static double acc[2];
static struct step_block block = {.lr = 1e-3, .bias1 = 0.1, .bias2 = 0.05, .grad_scale = 1e-3};
static const struct adamw hyper = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.01};
static const struct attention att = {
    .b = T / S, .s = S, .h = HEADS, .hk = HEADS, .e = HEAD, .ldq = W, .ldk = W, .ldv = W, .ldo = W};

static void body_residual_gain(void)
{
    k->residual_gain(ks, T, W, x, y, gain, m1, n_out, stat2);
}
static void body_gain_backward(void)
{
    k->gain_backward(ks, T, W, x, gain, NULL, stat, y, true, n_out, grad_gain);
}
static void body_latent_forward(void)
{
    k->latent_forward(ks, T, 3 * RANK, D, 1e-6, LATENT_SILU, m1, stat, stat2, n_out);
}
static void body_latent_backward(void)
{
    /* In place, so it needs a fresh gradient each time (its copy is in the figure): repeated it would reach denormals.
     */
    k->upload(ks, m2, y, (size_t)T * 3 * RANK * sizeof(float));
    k->latent_backward(ks, T, 3 * RANK, D, LATENT_SILU, x, stat, m2, stat2);
}
static void body_rope(void)
{
    k->rope(ks, T, S, HEADS, HEAD, W, 10000, false, m1);
}
static void body_glu_forward(void)
{
    k->glu_forward(ks, T, F, F, false, x, y, n_out);
}
static void body_glu_silu_forward(void)
{
    k->glu_forward(ks, T, F, F, true, x, y, n_out);
}
static void body_glu_silu_backward(void)
{
    k->glu_backward(ks, T, F, F, true, x, y, n_out, m1, m2, NULL);
}
static void body_attention_forward(void)
{
    k->attention_forward(ks, &att, x, y, n_out, m1, lse, workspace);
}
static void body_attention_backward(void)
{
    k->attention_backward(ks, &att, x, y, n_out, m1, lse, m1, m2, m3, gain, workspace);
}
static void body_ce_max(void)
{
    k->ce_max(ks, T, VOCAB, VOCAB, x, stat2);
}
static void body_ce_sums(void)
{
    k->ce_sums(ks, T, VOCAB, VOCAB, 0, x, stat2, tokens, sums);
}
static void body_ce_backward(void)
{
    k->ce_backward(ks, T, VOCAB, VOCAB, 0, m3, stat2, sums, tokens, acc, stat);
}
static void body_embed(void)
{
    k->embed(ks, T, 0, VOCAB, W, 1, tokens, x, n_out);
}
static void body_embed_backward(void)
{
    k->embed_backward(ks, T, 0, VOCAB, W, 1, tokens, x, n_out);
}
static void body_grad_squares(void)
{
    k->grad_squares(ks, T * F, x, acc);
}
static void body_adamw(void)
{
    k->adamw(ks, T * F, &hyper, &block, x, m1, m2, m3, m3);
}

static void line(const char *name, void (*body)(void), int64_t elements)
{
    report(name, measure(body) * 1e9 / (double)elements, "ns/element");
}

int main(int argc, char **argv)
{
    struct error err;
    k = kernels_cpu_fp32();
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 1;
    if (k->stream_create(threads, &ks, &err) != ERR_OK) {
        fprintf(stderr, "kernels_bench: %s\n", err.message);
        return 1;
    }
    a = values(T * 1024);
    b = values(T * 1024);
    c = values(T * 1024);
    gemm_line("gemm_down_qkv", T, 3 * RANK, W, false, true);
    gemm_line("gemm_up_q", T, W, RANK, false, true);
    gemm_line("gemm_up_gate", T, F, RANK, false, true);
    gemm_line("gemm_down_mlp", T, RANK, F, false, true);
    gemm_line("gemm_head", T, VOCAB / 2, D, false, true);
    gemm_line("gemm_dgrad_up_gate", T, RANK, F, false, false);
    gemm_line("gemm_wgrad_qkv", 3 * RANK, W, T, true, false);
    gemm_line("gemm_wgrad_up_gate", F, RANK, T, true, false);

    float **big[] = {&x, &y, &n_out, &m1, &m2, &m3, &gain};
    for (size_t i = 0; i < sizeof big / sizeof *big; i++)
        *big[i] = values(T * F);
    for (int64_t i = 0; i < T * F; i++)
        m2[i] *= m2[i]; /* second moments are not negative */
    stat = values(T);
    stat2 = values(T);
    for (int i = 0; i < T; i++)
        stat[i] = stat[i] * stat[i] + 1;
    grad_gain = values(W);
    lse = values(T * HEADS);
    sums = values(T * 3);
    tokens = values(T);
    for (int i = 0; i < T; i++)
        tokens[i] = i * 37 % VOCAB;
    size_t bytes = k->attention_workspace(&att, true);
    workspace = values((int64_t)(bytes / sizeof(float)));

    line("adamw", body_adamw, T * F);
    line("grad_squares", body_grad_squares, T * F);
    line("embed", body_embed, T * W);
    line("embed_backward", body_embed_backward, T * W);
    line("residual_gain", body_residual_gain, T * W);
    line("gain_backward", body_gain_backward, T * W);
    line("latent_forward", body_latent_forward, T * 3 * RANK);
    line("latent_backward", body_latent_backward, T * 3 * RANK);
    line("rope", body_rope, T * W);
    line("glu_forward", body_glu_forward, T * F);
    line("glu_silu_forward", body_glu_silu_forward, T * F);
    line("glu_silu_backward", body_glu_silu_backward, T * F);
    line("ce_max", body_ce_max, T * VOCAB);
    line("ce_sums", body_ce_sums, T * VOCAB);
    line("ce_backward", body_ce_backward, T * VOCAB);

    /* Useful work only: 2 products forward, 5 backward, below the diagonal. */
    double product = (double)(T / S) * HEADS * S * S * HEAD;
    double forward = measure(body_attention_forward), backward = measure(body_attention_backward);
    report("attention_forward", forward * 1e6, "us");
    report("attention_forward_rate", 2 * product / forward / 1e9, "GFLOP/s");
    report("attention_backward", backward * 1e6, "us");
    report("attention_backward_rate", 5 * product / backward / 1e9, "GFLOP/s");
    if (k->stream_sync(ks, &err) != ERR_OK) {
        fprintf(stderr, "kernels_bench: %s\n", err.message);
        return 1;
    }
    k->stream_destroy(ks);
    return 0;
}
