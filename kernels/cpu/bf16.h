/* The bf16 backend: what a GPU computes in bf16, emulated. Activations, their gradients and the weights of the products
 * are bf16; statistics, weight gradients, moments and master weights are fp32. Each operation widens its bf16 inputs,
 * runs the fp32 operation of fp32.h on them and rounds what it stores once, to nearest even. Where an operation's
 * later outputs are functions of an earlier one (S of x_out, z of Y, the sums of u), they are so of what was or would
 * be stored, as in the other backends: a re-forward that starts from the stored tensor gives the same bits.
 *
 * Tensors are worked on in pieces, so that the fp32 copies are small: BF16_CHUNK elements or one row, whichever
 * is more, in a scratch of the stream that grows when a larger shape first appears. */
#ifndef BOOST_KERNELS_CPU_BF16_H
#define BOOST_KERNELS_CPU_BF16_H

#include "kernels/cpu/fp32.h"

enum { BF16_CHUNK = 8 * FP32_CHUNK };

/* Rows of the given width in a piece of a tensor of T rows. */
static inline int64_t bf16_rows(int64_t T, int64_t width)
{
    return fp32_min(T, width < BF16_CHUNK ? BF16_CHUNK / width : 1);
}

/* `floats` of the stream's scratch, until the next operation; NULL, and a fault of the stream, without memory. */
float *bf16_scratch(struct kstream *ks, int64_t floats);
/* The next n floats of a scratch. */
static inline float *bf16_carve(float **scratch, int64_t n)
{
    float *p = *scratch;
    *scratch += n;
    return p;
}

/* Element number i of a bf16 tensor. */
static inline const void *bf16_at(const void *p, int64_t i)
{
    return (const uint16_t *)p + i;
}
static inline void *bf16_to(void *p, int64_t i)
{
    return (uint16_t *)p + i;
}

/* rows of w elements, ld apart in bf16, dense in fp32. */
void bf16_widen(struct kstream *ks, int64_t rows, int64_t w, const void *from, int64_t ld, float *to);
void bf16_narrow(struct kstream *ks, int64_t rows, int64_t w, const float *from, void *to, int64_t ld);

void bf16_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c);

void bf16_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out);
void bf16_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable);
void bf16_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy);
void bf16_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out);

void bf16_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S);
void bf16_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n);
void bf16_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain);
void bf16_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n);
void bf16_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain);
void bf16_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z);
void bf16_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k);
void bf16_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out);

void bf16_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums);
void bf16_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z);
void bf16_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias);
void bf16_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias);

void bf16_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x);
size_t bf16_attention_workspace(const struct attention *a, bool backward);
void bf16_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace);
void bf16_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace);

void bf16_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out);
void bf16_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out);

void bf16_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m);
void bf16_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums);
void bf16_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c);

void bf16_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight);

#endif
