/* cuda.h, reach.h: the bottleneck of two ranks in one pass: their parts of the latents, added up, norm and activation.
 *
 * A warp takes a row and reads the other rank's part of it over the link. A block waits for the other rank's block of
 * the same number first: that one has begun, so the products in front of the kernel are done there and its part is
 * complete. Nothing waits at the end: kernels.h says when a part may be written again. */
#include "kernels/cuda/latent.cuh"
#include "kernels/cuda/reach.h"

#if CUDA_HAS_REACH
#include <nccl_device.h>

struct kreach {
    ncclDevComm comm;
    ncclWindow_t window;
    const char *base;
};

namespace
{

/* Of the grid at most, each with a place to wait at. Two to a multiprocessor of an H200. A block may wait for one that
 * has not begun: blocks begin in order, on both ranks as many, and nothing else holds every multiprocessor until this
 * ends. */
constexpr int BLOCKS = 264;

/* What a lane loads of both parts before it uses any of it: the link's latency is long. */
constexpr int DEEP = 3;

struct parts {
    ncclWindow_t window;
    size_t latents, statistics; /* bytes from the window's start */
};

__device__ inline void wait_for_other(const ncclDevComm &comm)
{
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
}

/* Of the first rank's part and of the second's, whichever this one is: the sum is the same on both. */
template <class E> __device__ inline const E *part_of(const parts &p, size_t offset, int rank)
{
    return static_cast<const E *>(ncclGetLsaPointer(p.window, offset, rank));
}

/* f(j, h) for this lane's columns j of the row, h being V of the sum as bf16 holds it. */
template <int V, class F>
__device__ inline void sum_row(const bf16 *first, const bf16 *second, int64_t at, int64_t n, F f)
{
    for (int64_t j0 = first_column<V>(); j0 - first_column<V>() < n; j0 += DEEP * LANES * V) {
        packed<V> a[DEEP] = {}, b[DEEP] = {};
#pragma unroll
        for (int u = 0; u < DEEP; u++) {
            int64_t j = j0 + u * LANES * V;
            if (j < n) {
                a[u] = load_packed<V>(first + at + j);
                b[u] = load_packed<V>(second + at + j);
            }
        }
        after_loads(a);
        after_loads(b);
#pragma unroll
        for (int u = 0; u < DEEP; u++) {
            int64_t j = j0 + u * LANES * V;
            if (j >= n)
                continue;
            float h[V], other[V];
            widen(a[u], h);
            widen(b[u], other);
#pragma unroll
            for (int i = 0; i < V; i++)
                h[i] += other[i];
            round_stored(h);
            f(j, h);
        }
    }
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    latent_sum_forward(ncclDevComm comm, parts p, int64_t T, int64_t n, float inv_d, float eps, bool silu, bf16 *H,
                       float *R, bf16 *z)
{
    wait_for_other(comm);
    const bf16 *first = part_of<bf16>(p, p.latents, 0), *second = part_of<bf16>(p, p.latents, 1);
    for (int64_t row = warp_row(); row < T; row += (int64_t)gridDim.x * WARPS) {
        float r = 1;
        if (R) {
            float S = part_of<float>(p, p.statistics, 0)[row] + part_of<float>(p, p.statistics, 1)[row];
            r = 1 / sqrtf(fmaf(S, inv_d, eps));
            if (lane() == 0)
                R[row] = r;
        }
        sum_row<V>(first, second, row * n, n, [&](int64_t j, float(&y)[V]) {
            if (z != H)
                store(H + row * n + j, y);
            if (R)
                apply_factor(y, r);
            if (silu)
                apply_silu(y);
            store(z + row * n + j, y);
        });
    }
}

template <int V>
__global__ void __launch_bounds__(BLOCK)
    latent_sum_backward(ncclDevComm comm, parts p, int64_t T, int64_t n, float inv_d, bool silu, const bf16 *latent,
                        const float *R, bf16 *dz, float *k)
{
    wait_for_other(comm);
    const bf16 *first = part_of<bf16>(p, p.latents, 0), *second = part_of<bf16>(p, p.latents, 1);
    for (int64_t row = warp_row(); row < T; row += (int64_t)gridDim.x * WARPS) {
        float r = R ? R[row] : 1, c = 0;
        sum_row<V>(first, second, row * n, n, [&](int64_t j, float(&dy)[V]) {
            if (R || silu)
                c += latent_gradient<V>(latent + row * n + j, R != nullptr, r, silu, dy);
            store(dz + row * n + j, dy);
        });
        if (!k)
            continue;
        c = warp_sum(c);
        if (lane() == 0)
            k[row] = r * r * inv_d * c;
    }
}

parts parts_at(const struct kreach *reach, const void *part, const void *S)
{
    return {reach->window, (size_t)(static_cast<const char *>(part) - reach->base),
            S ? (size_t)(static_cast<const char *>(S) - reach->base) : 0};
}

dim3 grid_for(int64_t T)
{
    return grid_of(at_most(blocks_of(T, WARPS), BLOCKS));
}

} // namespace

void cuda_latent_sum_forward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                             double eps, enum latent_act act, const void *part, const void *S, void *H, void *R,
                             void *z)
{
    if (T <= 0)
        return;
    by_width(wide(n, part, H, z), [&](auto V) {
        launch(ks, "latent_sum_forward", grid_for(T), BLOCK, latent_sum_forward<decltype(V)::value>, reach->comm,
               parts_at(reach, part, S), T, n, (float)(1 / (double)d), (float)eps, act == LATENT_SILU, (bf16 *)H,
               (float *)R, (bf16 *)z);
    });
}

void cuda_latent_sum_backward(struct kstream *ks, const struct kreach *reach, int64_t T, int64_t n, int64_t d,
                              enum latent_act act, const void *latent, const void *R, const void *part, void *dz,
                              void *k)
{
    if (T <= 0)
        return;
    by_width(wide(n, part, latent, dz), [&](auto V) {
        launch(ks, "latent_sum_backward", grid_for(T), BLOCK, latent_sum_backward<decltype(V)::value>, reach->comm,
               parts_at(reach, part, nullptr), T, n, (float)(1 / (double)d), act == LATENT_SILU, (const bf16 *)latent,
               (const float *)R, (bf16 *)dz, (float *)k);
    });
}

ncclResult_t cuda_reach_create(ncclComm_t comm, ncclWindow_t window, const void *base, struct kreach **out)
{
    int version = 0;
    *out = nullptr;
    ncclResult_t status = ncclGetVersion(&version);
    if (status != ncclSuccess || version != NCCL_VERSION_CODE)
        return status;
    struct kreach *r = static_cast<struct kreach *>(calloc(1, sizeof *r));
    if (!r)
        return ncclSystemError;
    r->window = window;
    r->base = static_cast<const char *>(base);
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER
    ncclDevCommRequirements wants = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
    ncclDevCommRequirements wants = {};
#endif
    wants.lsaBarrierCount = BLOCKS;
    status = ncclDevCommCreate(comm, &wants, &r->comm);
    while (status == ncclInProgress) { /* NCCL_COMM_BLOCKING=0: it still writes to `r` */
        ncclResult_t asked = ncclCommGetAsyncError(comm, &status);
        status = asked == ncclSuccess ? status : asked;
    }
    if (status == ncclSuccess && r->comm.lsaSize == 2) {
        *out = r;
        return ncclSuccess;
    }
    if (status == ncclSuccess)
        ncclDevCommDestroy(comm, &r->comm);
    free(r);
    return status == ncclInvalidUsage ? ncclSuccess : status; /* that is what a communicator without such memory says */
}

void cuda_reach_destroy(ncclComm_t comm, struct kreach *reach)
{
    if (!reach)
        return;
    ncclDevCommDestroy(comm, &reach->comm);
    free(reach);
}
#endif
