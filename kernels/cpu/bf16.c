/* bf16.h: the scratch, conversion, and the table. */
#include "kernels/cpu/bf16.h"

#include <stdlib.h>

#include "proto/base/bf16.h"

float *bf16_scratch(struct kstream *ks, int64_t floats)
{
    if (ks->scratch.floats >= floats)
        return ks->scratch.at;
    free(ks->scratch.at);
    ks->scratch.at = malloc((size_t)floats * sizeof(float));
    ks->scratch.floats = ks->scratch.at ? floats : 0;
    if (!ks->scratch.at)
        cpu_fault(ks, ERR_NOMEM, "out of memory for the fp32 copies of a bf16 operation, %lld MiB",
                  (long long)(floats >> 18));
    return ks->scratch.at;
}

/* How a conversion is shared out: `runs` of `length` elements, `distance` apart in bf16. Rows that follow one
 * another are cut anew, as one. */
struct runs {
    int64_t runs, length, distance, all;
};
static struct runs runs_of(int64_t rows, int64_t w, int64_t ld)
{
    if (w != ld)
        return (struct runs){rows, w, ld, rows * w};
    return (struct runs){(rows * w + FP32_CHUNK - 1) / FP32_CHUNK, FP32_CHUNK, FP32_CHUNK, rows * w};
}

void bf16_widen(struct kstream *ks, int64_t rows, int64_t w, const void *from, int64_t ld, float *to)
{
    struct runs r = runs_of(rows, w, ld);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && r.all > FP32_CHUNK)
    for (int64_t i = 0; i < r.runs; i++) {
        const uint16_t *x = bf16_at(from, i * r.distance);
        float *y = to + i * r.length;
        int64_t n = fp32_min(r.length, r.all - i * r.length);
        for (int64_t j = 0; j < n; j++)
            y[j] = from_bf16(x[j]);
    }
}

void bf16_narrow(struct kstream *ks, int64_t rows, int64_t w, const float *from, void *to, int64_t ld)
{
    struct runs r = runs_of(rows, w, ld);
#pragma omp parallel for num_threads(ks->threads) schedule(static) if (ks->threads > 1 && r.all > FP32_CHUNK)
    for (int64_t i = 0; i < r.runs; i++) {
        const float *x = from + i * r.length;
        uint16_t *y = bf16_to(to, i * r.distance);
        int64_t n = fp32_min(r.length, r.all - i * r.length);
        for (int64_t j = 0; j < n; j++)
            y[j] = to_bf16(x[j]);
    }
}

const struct kernels *kernels_cpu_bf16(void)
{
    static const struct kernels table = {
        .name = "cpu-bf16",
        .act = DTYPE_BF16,
        .stat = DTYPE_F32,
        .grad = DTYPE_F32,
        .stream_create = fp32_stream_create,
        .stream_destroy = cpu_stream_destroy,
        .stream_sync = cpu_stream_sync,
        .gemm_seconds = cpu_gemm_seconds,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .host_alloc = cpu_alloc,
        .host_release = cpu_release,
        .upload = cpu_upload,
        .download = cpu_download,
        .zero = cpu_zero,
        .zero_each = cpu_zero_each,
        .cast = cpu_cast,
        .gemm = bf16_gemm,
        .embed = bf16_embed,
        .embed_backward = bf16_embed_backward,
        .residual_gain = bf16_residual_gain,
        .norm_apply = bf16_norm_apply,
        .gain_backward = bf16_gain_backward,
        .norm_forward = bf16_norm_forward,
        .norm_backward = bf16_norm_backward,
        .latent_forward = bf16_latent_forward,
        .latent_backward = bf16_latent_backward,
        .cross_sum = bf16_cross_sum,
        .cross_forward = bf16_cross_forward,
        .cross_backward_sums = bf16_cross_backward_sums,
        .cross_backward = bf16_cross_backward,
        .rope = bf16_rope,
        .attention_workspace = bf16_attention_workspace,
        .attention_forward = bf16_attention_forward,
        .attention_backward = bf16_attention_backward,
        .glu_forward = bf16_glu_forward,
        .glu_backward = bf16_glu_backward,
        .ce_max = bf16_ce_max,
        .ce_sums = bf16_ce_sums,
        .ce_backward = bf16_ce_backward,
        .row_dot = bf16_row_dot,
        .norm_k = fp32_norm_k, /* statistics only */
        .copy_rows = bf16_copy_rows,
        .interleave = bf16_interleave,
        .grad_squares = fp32_grad_squares,
        .step_finish = cpu_step_finish,
        .adamw = bf16_adamw,
    };
    return &table;
}
