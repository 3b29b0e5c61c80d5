/* Private to the CUDA backend: the stream and what its files share. bf16 activations, fp32 statistics, fp32 gradients,
 * moments and master weights. C and CUDA C++ files include it alike. */
#ifndef BOOST_KERNELS_CUDA_CUDA_H
#define BOOST_KERNELS_CUDA_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/cuda/scratch_size.h"
#include "kernels/kernels.h"

struct cuda_gemms;      /* gemm.c: plans by shape */
struct cuda_attentions; /* attention.c: cuDNN plans by shape */

/* On the process's first visible device. Operations of one stream run in order, so all share one scratch. */
struct kstream {
    cudaStream_t stream;
    int sms;            /* multiprocessors: the grid of a kernel that strides */
    int spare;          /* of these, that products leave alone */
    struct error fault; /* the first since the last sync; code ERR_OK = none */
    char *scratch;      /* the caller's, set_scratch() */
    size_t scratch_bytes;
    cublasLtHandle_t lt;
    struct cuda_gemms *gemms;
    struct cuda_attentions *attentions;
    cudaEvent_t marks[KSTREAM_MARKS];
    bool marked[KSTREAM_MARKS];
    unsigned long long marked_in[KSTREAM_MARKS]; /* the captured sequence it was made in; 0: none */
};

/* Remembers the first fault of the stream. */
void cuda_fault(struct kstream *ks, enum error_code code, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* The same for a CUDA call's status, and for the launch just made; `what` names the operation. True: fine. */
bool cuda_ok(struct kstream *ks, cudaError_t status, const char *what);
bool cuda_launched(struct kstream *ks, const char *what);
/* The stream's scratch; a fault and NULL when it has fewer bytes. */
void *cuda_scratch(struct kstream *ks, size_t bytes, const char *what);

/* ---- the table's entries, by file ---- */

/* stream.c */
int cuda_stream_create(int threads, struct kstream **out, struct error *err);
void cuda_stream_destroy(struct kstream *ks);
int cuda_stream_sync(struct kstream *ks, struct error *err);
void *cuda_alloc(size_t bytes, struct error *err);
void cuda_release(void *p);
void *cuda_host_alloc(size_t bytes, struct error *err);
void cuda_host_release(void *p);
size_t cuda_scratch_bytes(const struct scratch_shape *shape);
void cuda_set_scratch(struct kstream *ks, void *scratch, size_t bytes);
int cuda_stream_beside(struct kstream *ks, struct kstream **out, struct error *err);
void cuda_set_spare(struct kstream *ks, int processors);
void cuda_mark(struct kstream *ks, int slot);
void cuda_await(struct kstream *ks, struct kstream *of, int slot);
int cuda_capture_begin(struct kstream *ks, struct error *err);
int cuda_capture_end(struct kstream *ks, struct kgraph **out, struct error *err);
void cuda_graph_launch(struct kstream *ks, const struct kgraph *graph);
void cuda_graph_destroy(struct kgraph *graph);
void cuda_range_begin(const char *name);
void cuda_range_end(void);
void cuda_upload(struct kstream *ks, void *dst, const void *host, size_t bytes);
void cuda_download(struct kstream *ks, void *host, const void *src, size_t bytes);
void cuda_zero(struct kstream *ks, void *dst, size_t bytes);
void cuda_zero_each(struct kstream *ks, void *dst, size_t bytes, size_t stride, int64_t times);

/* gemm.c */
void cuda_gemm(struct kstream *ks, const struct gemm *g, const void *a, const void *b, void *c);
int cuda_choices_save(struct kstream *ks, struct buffer *out, struct error *err);
int cuda_choices_load(struct kstream *ks, const char *text, size_t len, struct error *err);
void cuda_gemms_destroy(struct cuda_gemms *g);

/* attention.c: cuDNN's, and which of the two runs; attention_own.cu: the own kernel */
int cuda_attention_check(struct kstream *ks, const struct attention *a, void *workspace, struct error *err);
size_t cuda_attention_workspace(const struct attention *a, bool backward);
void cuda_attention_forward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                            void *o, void *lse, void *workspace);
void cuda_attention_backward(struct kstream *ks, const struct attention *a, const void *q, const void *k, const void *v,
                             const void *o, const void *lse, const void *d_o, void *dq, void *dk, void *dv,
                             void *workspace);
void cuda_attentions_destroy(struct cuda_attentions *a);
/* Of the cuDNN that the stream's attention goes through, as its cudnnGetVersion(); 0: of none. */
size_t cuda_attention_version(const struct kstream *ks);

/* norm.cu, norm_rows.cu, latent.cu, cross.cu, embed.cu, rope.cu, glu.cu, loss.cu, layout.cu, update.cu: kernels.h */
/* Scratch that the row and column sums of these want for such shapes. */
size_t cuda_sums_scratch(const struct scratch_shape *shape);
void cuda_cast(struct kstream *ks, enum dtype to, void *dst, enum dtype from, const void *src, int64_t n);
void cuda_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out);
void cuda_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable);
void cuda_residual_gain(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *y, const void *gain,
                        void *x_out, void *n, void *S);
void cuda_norm_apply(struct kstream *ks, int64_t T, int64_t w, int64_t d, double eps, const void *x, const void *gain,
                     const void *S, void *R, void *n);
void cuda_gain_backward(struct kstream *ks, int64_t T, int64_t w, const void *x, const void *gain, const void *R,
                        const void *k, const void *dn, bool accumulate, void *dx, void *dgain);
void cuda_norm_forward(struct kstream *ks, int64_t T, int64_t d, double eps, const void *x, const void *y,
                       const void *gain, void *x_out, void *R, void *n);
void cuda_norm_backward(struct kstream *ks, int64_t T, int64_t d, const void *x, const void *gain, const void *R,
                        const void *dn, void *dx, void *k, void *dgain);
void cuda_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z);
void cuda_latent_sum_forward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                             double eps, enum latent_act act, const void *part, const void *S, void *H, void *R,
                             void *z);
void cuda_latent_sum_backward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                              enum latent_act act, const void *latent, const void *R, const void *part, void *dz,
                              void *k);
void cuda_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k);
void cuda_cross_sum(struct kstream *ks, const struct crossing *c, const void *Y, const void *G, int64_t ldg,
                    const void *bias, void *u, void *sums);
void cuda_cross_forward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums, const void *gain,
                        const void *bias, void *z);
void cuda_cross_backward_sums(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                              const void *gain, const void *bias, void *dz, void *back, void *dgain, void *dbias);
void cuda_cross_backward(struct kstream *ks, const struct crossing *c, const void *u, const void *sums,
                         const void *gain, const void *back, void *dv, void *dbias);
void cuda_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x);
void cuda_glu_forward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                      const void *up, void *out);
void cuda_glu_backward(struct kstream *ks, int64_t rows, int64_t n, int64_t ld, bool silu, const void *gate,
                       const void *up, const void *dout, void *dgate, void *dup, void *out);
void cuda_ce_max(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, const void *logits, void *m);
void cuda_ce_sums(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, const void *logits,
                  const void *m, const int32_t *targets, void *sums);
void cuda_ce_backward(struct kstream *ks, int64_t T, int64_t ld, int64_t valid, int64_t first, void *logits,
                      const void *m, const void *sums, const int32_t *targets, double *loss, void *c);
void cuda_row_dot(struct kstream *ks, int64_t T, int64_t w, const void *a, const void *b, void *out);
void cuda_norm_k(struct kstream *ks, int64_t T, int64_t d, const void *R, const void *c, void *k);
void cuda_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy);
/* How far a device has come, by slot; page-locked host memory. Scalars are written one by one. */
enum { CUDA_STAMPS = 8 };
struct cuda_stamps {
    uint32_t value[CUDA_STAMPS]; /* of the last stamp */
    uint32_t count[CUDA_STAMPS]; /* of stamps since the process began, launches of captured ones too */
    uint32_t last;               /* slot that was stamped last */
};
/* When the stream comes to it: value and count of the slot. A slot is stamped by one stream at a time. Not of the
 * table: the collectives use it. */
void cuda_stamp(struct kstream *ks, volatile struct cuda_stamps *host, int slot, uint32_t value);
void cuda_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out);
void cuda_grad_squares(struct kstream *ks, int64_t n, const void *grad, double *acc);
void cuda_step_finish(struct kstream *ks, struct step_block *block, double beta1, double beta2, double clip);
void cuda_adamw(struct kstream *ks, int64_t n, const struct adamw *hyper, const struct step_block *block,
                const void *grad, void *m, void *v, void *master, void *weight);

#ifdef __cplusplus
}
#endif

#endif
