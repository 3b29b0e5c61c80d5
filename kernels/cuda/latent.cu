/* cuda.h: the bottleneck's norm and activation, a warp to a row. */
#include "kernels/cuda/latent.cuh"

namespace
{

template <int V>
__global__ void __launch_bounds__(BLOCK) latent_forward(int64_t T, int64_t n, float inv_d, float eps, bool silu,
                                                        const bf16 *H, const float *S, float *R, bf16 *z)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float r = row_factor(row, inv_d, eps, S, R);
    for (int64_t j = first_column<V>(); j < n; j += LANES * V) {
        float y[V];
        load<V>(H + row * n + j, y);
        if (R)
            apply_factor(y, r);
        if (silu)
            apply_silu(y);
        if (R || z != H)
            store(z + row * n + j, y);
    }
}

template <int V>
__global__ void __launch_bounds__(BLOCK) latent_backward(int64_t T, int64_t n, float inv_d, bool silu,
                                                         const bf16 *latent, const float *R, bf16 *dz, float *k)
{
    int64_t row = warp_row();
    if (row >= T)
        return;
    float r = R ? R[row] : 1, c = 0;
    for (int64_t j = first_column<V>(); j < n; j += LANES * V) {
        float dy[V];
        load<V>(dz + row * n + j, dy);
        c += latent_gradient<V>(latent + row * n + j, R != nullptr, r, silu, dy);
        store(dz + row * n + j, dy);
    }
    if (!k)
        return;
    c = warp_sum(c);
    if (lane() == 0)
        k[row] = r * r * inv_d * c;
}

} // namespace

void cuda_latent_forward(struct kstream *ks, int64_t T, int64_t n, int64_t d, double eps, enum latent_act act,
                         const void *H, const void *S, void *R, void *z)
{
    if (T <= 0 || (!R && z == H))
        return;
    by_width(wide(n, H, z), [&](auto V) {
        launch(ks, "latent_forward", grid_of(blocks_of(T, WARPS)), BLOCK, latent_forward<decltype(V)::value>, T, n,
               (float)(1 / (double)d), (float)eps, act == LATENT_SILU, (const bf16 *)H, (const float *)S, (float *)R,
               (bf16 *)z);
    });
}

void cuda_latent_backward(struct kstream *ks, int64_t T, int64_t n, int64_t d, enum latent_act act, const void *latent,
                          const void *R, void *dz, void *k)
{
    if (T <= 0 || (!R && act == LATENT_IDENTITY))
        return;
    by_width(wide(n, latent, dz), [&](auto V) {
        launch(ks, "latent_backward", grid_of(blocks_of(T, WARPS)), BLOCK, latent_backward<decltype(V)::value>, T, n,
               (float)(1 / (double)d), act == LATENT_SILU, (const bf16 *)latent, (const float *)R, (bf16 *)dz,
               (float *)k);
    });
}
