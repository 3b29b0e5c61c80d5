/* cuda.h: copies of rows. */
#include "kernels/cuda/device.cuh"

namespace
{

/* Columns along x, rows along y, and matrix z at z * stride. */
template <int V, bool ADD>
__global__ void __launch_bounds__(BLOCK) copy_rows(int64_t rows, int64_t w, const bf16 *x, int64_t ldx,
                                                   int64_t stride_x, bf16 *y, int64_t ldy, int64_t stride_y)
{
    x += blockIdx.z * stride_x;
    y += blockIdx.z * stride_y;
    int64_t down = (int64_t)gridDim.x * blockDim.y, across = (int64_t)gridDim.y * blockDim.x * V;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; i < rows; i += down)
        for (int64_t j = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * V; j < w; j += across) {
            if constexpr (ADD) {
                float a[V], b[V];
                load<V>(x + i * ldx + j, a);
                load<V>(y + i * ldy + j, b);
#pragma unroll
                for (int k = 0; k < V; k++)
                    b[k] += a[k];
                store(y + i * ldy + j, b);
            } else {
                store_packed<V>(y + i * ldy + j, load_packed<V>(x + i * ldx + j));
            }
        }
}

/* A block as wide as a row needs, a power of two, and as high as is left. */
void launch_copy(struct kstream *ks, const char *what, int64_t matrices, int64_t rows, int64_t w, const void *x,
                 int64_t ldx, int64_t stride_x, bool add, void *y, int64_t ldy, int64_t stride_y)
{
    if (matrices <= 0 || rows <= 0 || w <= 0)
        return;
    bool vectors = wide(w, x, y) && ldx % 8 == 0 && ldy % 8 == 0 && stride_x % 8 == 0 && stride_y % 8 == 0;
    int64_t columns = vectors ? w / 8 : w, width = 1;
    while (width < columns && width < BLOCK)
        width *= 2;
    dim3 block((unsigned)width, (unsigned)(BLOCK / width));
    dim3 grid =
        grid_of(at_most(blocks_of(rows, BLOCK / width), 1 << 20), at_most(blocks_of(columns, width), 1024), matrices);
    by_width(vectors, [&](auto V) {
        constexpr int N = decltype(V)::value;
        launch(ks, what, grid, block, add ? copy_rows<N, true> : copy_rows<N, false>, rows, w, (const bf16 *)x, ldx,
               stride_x, (bf16 *)y, ldy, stride_y);
    });
}

} // namespace

void cuda_copy_rows(struct kstream *ks, int64_t rows, int64_t w, const void *x, int64_t ldx, bool accumulate, void *y,
                    int64_t ldy)
{
    if (w == ldx && w == ldy) { /* one long row, so that its own width does not matter */
        int64_t n = rows * w, whole = n / 8 * 8;
        launch_copy(ks, "copy_rows", 1, 1, whole, x, whole, 0, accumulate, y, whole, 0);
        launch_copy(ks, "copy_rows", 1, 1, n - whole, (const bf16 *)x + whole, n, 0, accumulate, (bf16 *)y + whole, n,
                    0);
        return;
    }
    launch_copy(ks, "copy_rows", 1, rows, w, x, ldx, 0, accumulate, y, ldy, 0);
}

void cuda_interleave(struct kstream *ks, int parts, int64_t T, int64_t w, const void *in, void *out)
{
    launch_copy(ks, "interleave", parts, T, w, in, w, T * w, false, out, parts * w, w);
}
