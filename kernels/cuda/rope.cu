/* cuda.h: rotary positions. A block has a few positions of a few sequences, so that an angle is computed once for all
 * heads and sequences, and no table is kept. */
#include "kernels/cuda/device.cuh"

namespace
{

/* A thread computes one angle: POSITIONS * PAIRS = BLOCK. */
enum { POSITIONS = 4, PAIRS = BLOCK / POSITIONS, SEQUENCES = 8 };

struct shape {
    int64_t T, s, ld, sequences;
    int heads, half;
    double theta;
    bool inverse;
};

/* Grid (positions / POSITIONS, sequences / SEQUENCES, pairs / PAIRS). */
template <int V> __global__ void __launch_bounds__(BLOCK) rope(struct shape c, bf16 *x)
{
    __shared__ __align__(16) float cosine[POSITIONS][PAIRS], sine[POSITIONS][PAIRS];
    int64_t position = (int64_t)blockIdx.x * POSITIONS, sequence = (int64_t)blockIdx.y * SEQUENCES;
    int first = blockIdx.z * PAIRS, pairs = min((int)PAIRS, c.half - first);
    {
        int p = threadIdx.x / PAIRS, j = threadIdx.x % PAIRS;
        /* In half turns, which sincospi() reduces exactly and without a table in memory. */
        double turns = (double)(position + p) * (pow(c.theta, -(double)(first + j) / c.half) / M_PI), si, co;
        sincospi(turns, &si, &co);
        cosine[p][j] = (float)co;
        sine[p][j] = (float)(c.inverse ? -si : si);
    }
    __syncthreads();
    int here = (int)min((int64_t)SEQUENCES, c.sequences - sequence) * POSITIONS;
    int a_head = pairs / V, a_row = c.heads * a_head;
    for (int i = threadIdx.x; i < here * a_row; i += BLOCK) {
        int r = i / a_row, rest = i - r * a_row, head = rest / a_head, j = (rest - head * a_head) * V;
        int p = r % POSITIONS;
        int64_t row = (sequence + r / POSITIONS) * c.s + position + p;
        if (position + p >= c.s || row >= c.T)
            continue;
        bf16 *at = x + row * c.ld + (int64_t)head * 2 * c.half + first + j;
        float a[V], b[V], co[V], si[V];
        load<V>(at, a);
        load<V>(at + c.half, b);
        load<V>(&cosine[p][j], co);
        load<V>(&sine[p][j], si);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float turned = a[k] * co[k] - b[k] * si[k];
            b[k] = b[k] * co[k] + a[k] * si[k];
            a[k] = turned;
        }
        store(at, a);
        store(at + c.half, b);
    }
}

} // namespace

void cuda_rope(struct kstream *ks, int64_t T, int64_t s, int64_t heads, int64_t e, int64_t ld, double theta,
               bool inverse, void *x)
{
    int64_t half = e / 2;
    if (T <= 0 || heads <= 0 || half <= 0)
        return;
    struct shape c = {T, s, ld, blocks_of(T, s), (int)heads, (int)half, theta, inverse};
    dim3 grid = grid_of(blocks_of(at_most(s, T), POSITIONS), blocks_of(c.sequences, SEQUENCES), blocks_of(half, PAIRS));
    by_width(wide(half, x) && ld % 8 == 0,
             [&](auto V) { launch(ks, "rope", grid, BLOCK, rope<decltype(V)::value>, c, (bf16 *)x); });
}
