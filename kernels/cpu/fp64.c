/* fp64.h: the table. */
#include "kernels/cpu/fp64.h"

const struct kernels *kernels_cpu_fp64(void)
{
    static const struct kernels table = {
        .name = "cpu-fp64",
        .act = DTYPE_F64,
        .stat = DTYPE_F64,
        .grad = DTYPE_F64,
        .stream_create = cpu_stream_create,
        .stream_destroy = cpu_stream_destroy,
        .stream_sync = cpu_stream_sync,
        .gemm_seconds = cpu_gemm_seconds,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .upload = cpu_upload,
        .download = cpu_download,
        .zero = cpu_zero,
        .cast = cpu_cast,
        .gemm = fp64_gemm,
        .embed = fp64_embed,
        .embed_backward = fp64_embed_backward,
        .residual_gain = fp64_residual_gain,
        .norm_apply = fp64_norm_apply,
        .gain_backward = fp64_gain_backward,
        .latent_forward = fp64_latent_forward,
        .latent_backward = fp64_latent_backward,
        .rope = fp64_rope,
        .attention_workspace = fp64_attention_workspace,
        .attention_forward = fp64_attention_forward,
        .attention_backward = fp64_attention_backward,
        .glu_forward = fp64_glu_forward,
        .glu_backward = fp64_glu_backward,
        .ce_max = fp64_ce_max,
        .ce_sums = fp64_ce_sums,
        .ce_backward = fp64_ce_backward,
        .row_dot = fp64_row_dot,
        .norm_k = fp64_norm_k,
        .copy_rows = fp64_copy_rows,
        .interleave = fp64_interleave,
        .grad_squares = fp64_grad_squares,
        .step_finish = cpu_step_finish,
        .adamw = fp64_adamw,
    };
    return &table;
}
