/* The operations of a training step: one table, several backends.
 *
 * A backend (fp64 reference, fp32 and emulated bf16 on the CPU; bf16 on CUDA) is a
 * `struct kernels`. Model code calls through the table, holds tensors as void *
 * and names no C float type. Every operation only enqueues on a stream: it does not
 * wait, allocates nothing, and what changes from step to step is read from a
 * struct step_block in device memory, so that a captured sequence stays valid.
 * Faults are sticky in the stream and reported by stream_sync(). On the CPU
 * "enqueue" means "run now on the calling thread and the stream's pool".
 *
 * Letters: T rows (tokens of the micro-batch), w the local width of a hidden-wide
 * tensor (d/t), d the global one, c branches of a group, r rank, V/t local
 * vocabulary rows, b sequences, s sequence length, h/hk query and key-value
 * heads of this rank, e head width. Tensors are row-major and dense unless a
 * leading dimension (ld, in elements) is given. Weights are [out, in] ("[N, K]"):
 * a down-projection pair's A is [r, d/t], its B is [out/t, r].
 *
 * dtypes of a backend:   act   activations, their gradients, weights used in GEMMs
 *                        stat  row statistics S, R, c, log-sum-exp, maxima and sums
 *                        grad  weight gradients, master weights, Adam moments
 * Pointers below are tagged with these three words. Outputs never alias inputs
 * unless it says "may alias". All formulas: worker/README.md. */
#ifndef BOOST_KERNELS_KERNELS_H
#define BOOST_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/error.h"

struct kstream; /* used by one thread at a time */
struct kreach;  /* memory that two ranks reach of each other's, made by who connects them */
struct kgraph;  /* a captured sequence of operations */
struct buffer;

/* C[m,n] = op(A)[m,k] op(B)[k,n] + beta C, `batch` times at the given element strides; with `add` in C's place on the
 * right when that is not NULL. op(X) is X or its transpose; lda/ldb/ldc are those of the matrices as stored. A and B
 * are act; C is act, or grad when c_grad (fp32 accumulation of weight gradients). m, n, k and batch are at
 * least 1, a leading dimension at least a row, and no c_grad beside `add`; else the stream gets a fault and nothing is
 * computed. */
struct gemm {
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldc;
    int batch; /* 1 = plain */
    int64_t stride_a, stride_b, stride_c;
    double beta; /* 0: C is only written, never read */
    bool c_grad;
    const void *add; /* act, of C's leading dimension and stride, shares no memory with C. NULL: C itself */
};

/* Causal attention over b independent sequences of s tokens, token-major:
 * element (sequence i, token j, head n, x) of q is q[((i*s + j) * ldq) + n*e + x].
 * Query head n reads key-value head n / (h/hk). softmax(q k^T * scale), scale = 1/sqrt(e). */
struct attention {
    int64_t b, s, h, hk, e;
    int64_t ldq, ldk, ldv, ldo; /* of the gradients too */
    bool own;                   /* the backend's own kernel rather than a library's, where it has both */
    bool accumulate;            /* dq may be added up in any order: faster where there is a choice, not reproducible */
};

enum latent_act { LATENT_IDENTITY, LATENT_SILU };

/* The agreement of a step, one world all-reduce (SUM) of 8 fp64, and what follows
 * from it. Lives in device memory; the host uploads what is marked (host). */
enum agreement_slot {
    AGREE_LOSS,       /* sum of the token losses                                 */
    AGREE_TOKENS,     /* unmasked tokens                                         */
    AGREE_SQUARES,    /* sum of squared gradients (of the loss SUM) owned by this rank */
    AGREE_NONFINITE,  /* > 0: some gradient or loss is not finite                */
    AGREE_STOP,       /* > 0: some rank was asked to stop (host)                 */
    AGREE_CHECKPOINT, /* > 0: a checkpoint is due (host)                        */
    AGREE_BUSY,       /* > 0: some rank's checkpoint writer is still busy (host) */
    AGREE_ASKED,      /* of checkpoints asked for, worker/agreement.c (host)    */
    AGREE_SLOTS
};
struct step_block {
    double agree[AGREE_SLOTS];
    double lr;     /* (host) */
    double adam_t; /* updates applied so far; moved by step_finish, not by a skipped step */
    /* written by step_finish */
    double grad_norm;    /* of the mean loss: sqrt(SQUARES) / TOKENS */
    double grad_scale;   /* what adamw multiplies a gradient by: clip / TOKENS */
    double skip;         /* 1: this update does not happen */
    double bias1, bias2; /* 1 - beta^adam_t */
};

struct adamw {
    double beta1, beta2, eps;
    double weight_decay; /* of this tensor: 0 for gains */
};

/* Latents that take in those of the block before: `rows` latents of which this rank has w of r columns, row i being
 * branch i % branches. With u the sum of both, mean and variance over all r columns of a row:
 *   xhat = (u - mean) / sqrt(variance + eps),  v = gain * xhat + bias,  z = activation(v).
 * gain and bias are act [branches, w]. sums [rows, 2] stat is what cross_sum leaves the others to take mean and
 * variance from. w < r: the sums of u and of u^2, over the group. w == r: up to the backend, since nobody adds them up;
 * not the same sums in fp32, whose difference is off by 1 + mean^2/variance roundings. */
struct crossing {
    int64_t rows, w, r;
    int branches;
    double eps;
    enum latent_act act;
};

/* The shapes that scratch_bytes() is asked for: the largest of each that the stream will see. */
struct scratch_shape {
    int64_t T;     /* rows */
    int64_t width; /* columns of a norm */
    int64_t vocab; /* rows of an embedding table */
};

enum { KSTREAM_MARKS = 32 };

struct kernels {
    const char *name; /* "cpu-fp32" */
    enum dtype act, stat, grad;

    /* ---- streams and memory ---- */
    /* threads >= 1: workers of this stream's GEMMs and loops. */
    int (*stream_create)(int threads, struct kstream **out, struct error *err);
    void (*stream_destroy)(struct kstream *ks);
    /* Waits for all that was enqueued; the first fault since the last call. */
    int (*stream_sync)(struct kstream *ks, struct error *err);
    /* Seconds this stream has spent in GEMMs so far by the host's clock; NULL where the host cannot tell. */
    double (*gemm_seconds)(struct kstream *ks);
    /* Device memory, 256-byte aligned; never inside a step. NULL: ERR_NOMEM, or ERR_DEVICE where the device is large
     * enough and others have its memory. */
    void *(*alloc)(size_t bytes, struct error *err);
    void (*release)(void *p);
    /* Host memory that upload and download use without waiting for the host (page-locked where that matters).
     * An upload from it inside a captured sequence reads it anew at every launch. */
    void *(*host_alloc)(size_t bytes, struct error *err);
    void (*host_release)(void *p);
    /* Device memory that operations use between their own launches: bytes needed for tensors of these shapes, and
     * its address, given once before the first operation and kept by the caller while the stream lives. Both NULL
     * where none is needed. */
    size_t (*scratch_bytes)(const struct scratch_shape *shape);
    void (*set_scratch)(struct kstream *ks, void *scratch, size_t bytes);

    /* ---- several streams; NULL where an operation is done when it returns ---- */
    /* Another stream of ks's device, for copies and collectives beside it: of two that could run, what is there goes
     * first. It has no scratch. */
    int (*stream_beside)(struct kstream *ks, struct kstream **out, struct error *err);
    /* Products from here on leave so many of the device's processors alone, for what runs beside them: one that takes
     * all of them lets nothing in before its end. 0: none, as at first. */
    void (*set_spare)(struct kstream *ks, int processors);
    /* What is enqueued on ks after await() runs after what `of` had been given when it marked `slot`
     * (0 <= slot < KSTREAM_MARKS); a slot not marked yet is not waited for. A mark made inside a captured sequence
     * counts as not made outside it, and the other way round: the stream that captures awaits what it needs before.
     * Meanwhile another thread may be in stream_sync(of). */
    void (*mark)(struct kstream *ks, int slot);
    void (*await)(struct kstream *ks, struct kstream *of, int slot);

    /* ---- captured sequences; NULL where there are none ---- */
    /* What is enqueued on ks (and on streams that awaited it meanwhile and that it awaited again) between the two
     * is recorded, not run. */
    int (*capture_begin)(struct kstream *ks, struct error *err);
    int (*capture_end)(struct kstream *ks, struct kgraph **out, struct error *err);
    void (*graph_launch)(struct kstream *ks, const struct kgraph *graph);
    void (*graph_destroy)(struct kgraph *graph);

    /* ---- for profilers; NULL: none ---- */
    void (*range_begin)(const char *name);
    void (*range_end)(void);

    /* ---- choices that a backend made by what it found, such as the algorithm of each product; NULL: none ---- */
    /* Text that a later stream takes back so that it computes the same bits. choices_load: ERR_UNSUPPORTED when they
     * were made on another device or library version; the stream then makes its own. */
    int (*choices_save)(struct kstream *ks, struct buffer *out, struct error *err);
    int (*choices_load)(struct kstream *ks, const char *text, size_t len, struct error *err);
    void (*upload)(struct kstream *ks, void *dst, const void *host, size_t bytes);
    void (*download)(struct kstream *ks, void *host, const void *src, size_t bytes); /* valid after stream_sync */
    void (*zero)(struct kstream *ks, void *dst, size_t bytes);
    /* `bytes` at dst, and at each `stride` bytes behind it (at least `bytes`): `times` places, one launch. */
    void (*zero_each)(struct kstream *ks, void *dst, size_t bytes, size_t stride, int64_t times);
    void (*cast)(struct kstream *ks, enum dtype to, void *dst, enum dtype from, const void *src, int64_t n);

    /* ---- matrix products ---- */
    void (*gemm)(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c);

    /* ---- embedding ---- */
    /* out[p][T][width/parts], p < parts: row of `table` [rows, width] act for each token in
     * [first, first + rows), zeros for any other token. tokens: i32 [T]. */
    void (*embed)(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                  const int32_t *tokens, const void *table, void *out);
    /* dtable [rows, width] grad += the transpose of embed; each row summed in token order (deterministic). */
    void (*embed_backward)(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                           const int32_t *tokens, const void *dout, void *dtable);

    /* ---- norm and residual ---- */
    /* x_out = x + y (y may be NULL); S[T] stat = sum over w of x_out^2 (fp64 or fp32
     * accumulation of the stored values); n = x_out * gain unless n is NULL. x_out may alias x. */
    void (*residual_gain)(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                          void *x_out, void *n, void *S);
    /* R[T] stat = (S/d + eps)^-1/2; n = R * x * gain. The plain norm. R may alias S; S NULL: R is given. */
    void (*norm_apply)(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                       const void *S, void *R, void *n);
    /* Backward of both: with u = dn * (R or 1 when R is NULL):
     *   dx += u * gain - k * x  (dx = when !accumulate);   dgain[w] grad += sum over rows of x * u.
     * k[T] stat is (R^2/d) c with c = <dY, Y> over the latents, or from cross-entropy for the last norm. */
    void (*gain_backward)(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                          const void *k, const void *dn, bool accumulate, void *dx, void *dgain);
    /* The plain norm where a rank has whole rows, each way in one pass. x_out = x + y (y may be NULL); R[T] stat =
     * (S/d + eps)^-1/2 with S = sum over d of x_out^2, of the stored values; n = R * x_out * gain, with the bits that
     * norm_apply makes of x_out and R. x_out may alias x. */
    void (*norm_forward)(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                         const void *gain, void *x_out, void *R, void *n);
    /* With u = R * dn: k[T] stat = (R^2/d) sum over d of u * x * gain;  dx += u * gain - k * x;
     * dgain[d] grad += sum over rows of x * u. */
    void (*norm_backward)(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                          const void *dn, void *dx, void *k, void *dgain);

    /* ---- bottleneck ---- */
    /* latent H [T, n] act: R = (S/d + eps)^-1/2 and Y = R H (online norm; R may alias S; S NULL: R is given;
     * S, R NULL: no norm, R = 1), z = activation(Y) of Y as act holds it. z may alias H only for LATENT_IDENTITY;
     * H stays else. */
    void (*latent_forward)(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                           const void *H, const void *S, void *R, void *z);
    /* dz [T, n] := R * dY with dY = dz * activation'(Y); k[T] stat = (R^2/d) <dY, Y> (R, k NULL: no norm). latent: H of
     * the forward, from which Y comes anew with the same bits; for LATENT_IDENTITY its z, which is Y. */
    void (*latent_backward)(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act,
                            const void *latent, const void *R, void *dz, void *k);
    /* Both with the sum over two ranks in front, in one pass: H, or dz in front of the activation, is the two ranks'
     * part [T, n] act added up in the order of the ranks and rounded; S [T] stat (R not NULL) likewise. Each with the
     * bits that a sum by itself and the operation above make. By both ranks, in the same order and with parts at the
     * same places of the memory in `reach`. A part (and S) may be written again once a later one of these operations is
     * done, of which the part was another: two in turn do. z = H for LATENT_IDENTITY only. NULL: not here. */
    void (*latent_sum_forward)(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                               double eps, enum latent_act act, const void *part, const void *S, void *H, void *R,
                               void *z);
    void (*latent_sum_backward)(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                                enum latent_act act, const void *latent, const void *R, const void *part, void *dz,
                                void *k);

    /* ---- crossing latents ---- */
    /* u = Y + G (+ bias); row i of G is at i * ldg; bias NULL: none. This rank's sums, unless NULL. */
    void (*cross_sum)(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                      const void *bias, void *u, void *sums);
    void (*cross_forward)(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                          const void *gain, const void *bias, void *z);
    /* dz := dv = dz * activation'(v); dgain += sum over rows of dv * xhat; dbias += sum over rows of dv (both grad);
     * back [rows, 2] stat = this rank's sums over the columns of g and of g * xhat, with g = dv * gain. */
    void (*cross_backward_sums)(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                                const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias);
    /* dv := du = (g - back[0]/r - xhat * back[1]/r) / sqrt(variance + eps); dbias (of cross_sum) grad += sum over
     * rows of du, unless NULL. */
    void (*cross_backward)(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                           const void *gain, const void *back, void *dv, void *dbias);

    /* ---- attention ---- */
    /* Rotary positions, non-interleaved halves, in place on x [T, heads, e] with row stride ld; the
     * position of row i is i % s. inverse: the backward. */
    void (*rope)(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
                 bool inverse, void *x);
    /* Whether the library's attention is there and right for this shape: computes it beside the own kernel, very
     * negative scores among its inputs. Not inside a step; makes its plans. Else an error that says why, and
     * `own` is to be used. NULL: there is no library's. */
    int (*attention_check)(struct kstream *ks, const struct attention *a, void *workspace, struct error *err);
    /* Bytes of scratch that the two below need. */
    size_t (*attention_workspace)(const struct attention *a, bool backward);
    /* lse [b, h, s] stat. */
    void (*attention_forward)(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                              const void *v, void *o, void *lse, void *workspace);
    void (*attention_backward)(struct kstream *ks, const struct attention *a, const void *q, const void *k,
                               const void *v, const void *o, const void *lse, const void *d_o, void *dq, void *dk,
                               void *dv, void *workspace);

    /* ---- gated MLP ---- */
    /* out = f(gate) * up, f = SiLU or identity. Rows of n: out's lie close, those of all others at a stride of ld. */
    void (*glu_forward)(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                        const void *up, void *out);
    /* dgate may alias gate, dup may alias up; dout [rows, n]; out [rows, n] as the forward made it, unless NULL. */
    void (*glu_backward)(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                         const void *up, const void *dout, void *dgate, void *dup, void *out);

    /* ---- head and loss: vocabulary rows [first, first + valid) of this rank; logits [T, ld] act ---- */
    /* m[T] stat = max over the valid columns. Columns from `valid` to ld are padding and are never read as logits. */
    void (*ce_max)(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m);
    /* sums[T][3] stat = sum exp(l - m), sum exp(l - m) * l, and the target's logit if the target is here else 0.
     * targets: i32 [T], below 0 = masked. */
    void (*ce_sums)(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                    const void *m, const int32_t *targets, void *sums);
    /* With m and sums reduced over the group: adds the loss sum and token count of the micro-batch to
     * loss[0] and loss[1] (fp64 device memory; NULL on ranks that do not report them), and, unless
     * c is NULL (evaluation), logits := d(loss sum)/d logits (padding columns := 0) and
     * c[T] stat = sum_v p_v l_v - l_target (0 for masked rows), the last norm's <dn, n>. */
    void (*ce_backward)(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                        const void *m, const void *sums, const int32_t *targets, double *loss, void *c);
    /* out[T] stat = sum over w of a * b: a plain norm's c = <dn, n>, or this rank's part of it. */
    void (*row_dot)(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out);
    /* k[T] stat = (R^2/d) c: what gain_backward wants for a plain norm. k may alias c. */
    void (*norm_k)(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k);

    /* ---- layout ---- */
    /* y = x, or y += x, of w columns in each of `rows` rows; ldx, ldy the distances of rows. */
    void (*copy_rows)(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                      int64_t ldy);
    /* in [parts][T][w] -> out [T][parts*w]: what an all-gather of hidden shards leaves, made dense. */
    void (*interleave)(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out);

    /* ---- update ---- */
    /* acc[0] += sum of squares in fp64 (a gradient of 1e19 must not overflow); acc[1] += 1 if any is not finite. */
    void (*grad_squares)(struct kstream *ks, int64_t n, const void *grad, double *acc);
    /* From the reduced agreement: grad_norm, grad_scale (clip 0 = none), skip (any non-finite, or no tokens), and
     * unless skipped adam_t += 1; bias1, bias2 from adam_t. */
    void (*step_finish)(struct kstream *ks, struct step_block *block, double beta1, double beta2, double clip);
    /* Decoupled decay (Loshchilov and Hutter): m, v, master are grad; weight (act) gets the new value, and may
     * be the same memory as master when the dtypes are equal. Does nothing when block->skip. */
    void (*adamw)(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                  const void *grad, void *m, void *v, void *master, void *weight);
};

const struct kernels *kernels_cpu_fp64(void); /* the reference: plain loops, fp64 throughout */
const struct kernels *kernels_cpu_fp32(void); /* dnnl_sgemm, vectorised loops */
const struct kernels *kernels_cpu_bf16(void); /* a GPU's bf16, emulated: that of fp32 between bf16 tensors */
const struct kernels *kernels_cuda(void);     /* bf16; in a library of its own, kernels/library.h */

#endif
