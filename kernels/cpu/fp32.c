/* fp32.h: streams and the table. */
#include "kernels/cpu/fp32.h"

int fp32_stream_create(int threads, struct kstream **out, struct error *err)
{
    const struct fp32_loops *loops;
    *out = NULL;
    int rc = fp32_loops_choose(&loops, err);
    if (rc == ERR_OK)
        rc = cpu_stream_create(threads, out, err);
    if (rc == ERR_OK)
        (*out)->loops = loops;
    return rc;
}

const struct kernels *kernels_cpu_fp32(void)
{
    static const struct kernels table = {
        .name = "cpu-fp32",
        .act = DTYPE_F32,
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
        .gemm = fp32_gemm,
        .embed = fp32_embed,
        .embed_backward = fp32_embed_backward,
        .residual_gain = fp32_residual_gain,
        .norm_apply = fp32_norm_apply,
        .gain_backward = fp32_gain_backward,
        .norm_forward = fp32_norm_forward,
        .norm_backward = fp32_norm_backward,
        .latent_forward = fp32_latent_forward,
        .latent_backward = fp32_latent_backward,
        .cross_sum = fp32_cross_sum,
        .cross_forward = fp32_cross_forward,
        .cross_backward_sums = fp32_cross_backward_sums,
        .cross_backward = fp32_cross_backward,
        .rope = fp32_rope,
        .attention_workspace = fp32_attention_workspace,
        .attention_forward = fp32_attention_forward,
        .attention_backward = fp32_attention_backward,
        .glu_forward = fp32_glu_forward,
        .glu_backward = fp32_glu_backward,
        .ce_max = fp32_ce_max,
        .ce_sums = fp32_ce_sums,
        .ce_backward = fp32_ce_backward,
        .row_dot = fp32_row_dot,
        .norm_k = fp32_norm_k,
        .copy_rows = fp32_copy_rows,
        .interleave = fp32_interleave,
        .grad_squares = fp32_grad_squares,
        .step_finish = cpu_step_finish,
        .adamw = fp32_adamw,
    };
    return &table;
}
