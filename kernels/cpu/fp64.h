/* The reference backend: each operation written as its formula, one thread, fp64 throughout, summed in
 * index order. Slow on purpose; what it computes is what the others are measured against. Contracts,
 * shapes and letters are those of kernels.h. */
#ifndef BOOST_KERNELS_CPU_FP64_H
#define BOOST_KERNELS_CPU_FP64_H

#include "kernels/cpu/cpu.h"

void fp64_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c);

void fp64_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out);
void fp64_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable);
void fp64_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy);
void fp64_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out);

void fp64_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S);
void fp64_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n);
void fp64_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain);
void fp64_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n);
void fp64_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain);
void fp64_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z);
void fp64_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k);
void fp64_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out);
void fp64_norm_k(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k);

void fp64_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums);
void fp64_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z);
void fp64_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias);
void fp64_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias);

void fp64_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x);
size_t fp64_attention_workspace(const struct attention *a, bool backward);
void fp64_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace);
void fp64_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace);

void fp64_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out);
void fp64_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out);

void fp64_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m);
void fp64_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums);
void fp64_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c);

void fp64_grad_squares(struct kstream *ks, int64_t n, const void *grad, double *acc);
void fp64_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight);

#endif
