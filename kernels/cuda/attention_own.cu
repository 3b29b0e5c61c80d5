/* The own attention: causal, grouped heads, any length, head width up to 256.
 *
 * A warp owns 16 rows of a tile of queries (of keys in the pass for dk and dv) and walks the tiles that these can see.
 * Scores of its strip against a tile go through shared memory, where two lanes share a row. Products are bf16 on tensor
 * cores with fp32 sums; the weights and the gradients of the scores are rounded to bf16 as operands of the second
 * product. The forward first finds each row's maximum and sum and then makes the scores again, so what it adds up is
 * never rescaled. There are no atomics: dq is summed by tiles of keys in one pass, dk and dv by query heads and tiles
 * of queries in another, each in a fixed order. */
#include <cuda_bf16.h>
#include <mma.h>

#include "kernels/cuda/attention.h"

namespace
{

using namespace nvcuda;
using bf16 = __nv_bfloat16;

constexpr int STRIP = 16;
using left = wmma::fragment<wmma::matrix_a, STRIP, 16, 16, bf16, wmma::row_major>;
using right = wmma::fragment<wmma::matrix_b, STRIP, 16, 16, bf16, wmma::row_major>;
using right_transposed = wmma::fragment<wmma::matrix_b, STRIP, 16, 16, bf16, wmma::col_major>;
using sums = wmma::fragment<wmma::accumulator, STRIP, 16, 16, float>;

/* Of a head width of at most E. The rows of all arrays are a little longer than their contents, so that those of a
 * column fall on different banks. */
template <int E> struct tile {
    static constexpr int rows = E > 128 ? 32 : 64, threads = rows / STRIP * 32;
    static constexpr int ld = E + 8, ld_scores = rows + 4, ld_weights = rows + 8;
    static constexpr int elements = rows * ld;
    static constexpr int per_lane = rows / 2; /* columns of a row of scores */
    static constexpr int chunk = rows < E ? rows : E;
    /* `tensors` tiles, scores, weights, and two numbers a row. */
    static constexpr size_t bytes(int tensors)
    {
        return sizeof(bf16) * tensors * elements + sizeof(float) * rows * ld_scores + sizeof(bf16) * rows * ld_weights +
               sizeof(float) * 2 * rows;
    }
};

/* A warp's part of the block's shared memory, and a lane's place in it. */
template <int E> struct place {
    bf16 *tensor[4];
    float *scores;  /* of the strip [STRIP, ld_scores] */
    bf16 *weights;  /* of the strip [STRIP, ld_weights] */
    float *numbers; /* of the tile [2, rows] */
    int strip;      /* first row of the strip in the tile */
    int row, half;  /* the lane has columns half, half + 2, ... of this row of the strip */

    __device__ place(unsigned char *memory, int tensors)
    {
        using T = tile<E>;
        int lane = threadIdx.x % 32;
        strip = threadIdx.x / 32 * STRIP;
        row = lane / 2;
        half = lane % 2;
        bf16 *at = reinterpret_cast<bf16 *>(memory);
        for (int i = 0; i < 4; i++)
            tensor[i] = i < tensors ? at + i * T::elements : nullptr;
        float *all_scores = reinterpret_cast<float *>(at + tensors * T::elements);
        bf16 *all_weights = reinterpret_cast<bf16 *>(all_scores + T::rows * T::ld_scores);
        numbers = reinterpret_cast<float *>(all_weights + T::rows * T::ld_weights);
        scores = all_scores + strip * T::ld_scores;
        weights = all_weights + strip * T::ld_weights;
    }
    __device__ int column(int j) const
    {
        return 2 * j + half;
    }
    __device__ float &score(int j) const
    {
        return scores[row * tile<E>::ld_scores + column(j)];
    }
    __device__ bf16 &weight(int j) const
    {
        return weights[row * tile<E>::ld_weights + column(j)];
    }
};

/* The rows of one head from `from` on, of which `rows` exist, into a tile; the rest of it is zero. whole: rows start on
 * 16 bytes and e is a multiple of 8. */
template <int E> __device__ void load(bf16 *to, const bf16 *from, int64_t ld, int64_t rows, int e, bool whole)
{
    using T = tile<E>;
    if (whole) {
        constexpr int words = E / 8;
        for (int i = threadIdx.x; i < T::rows * words; i += T::threads) {
            int r = i / words, x = i % words * 8;
            uint4 word = make_uint4(0, 0, 0, 0);
            if (r < rows && x < e)
                word = *reinterpret_cast<const uint4 *>(from + r * ld + x);
            *reinterpret_cast<uint4 *>(to + r * T::ld + x) = word;
        }
        return;
    }
    for (int i = threadIdx.x; i < T::rows * E; i += T::threads) {
        int r = i / E, x = i % E;
        to[r * T::ld + x] = r < rows && x < e ? from[r * ld + x] : __float2bfloat16(0);
    }
}

/* scores := the strip's rows of a times all rows of b. */
template <int E> __device__ void score(const place<E> &p, const bf16 *a, const bf16 *b)
{
    using T = tile<E>;
    constexpr int n = T::rows / 16;
    sums c[n];
#pragma unroll
    for (int j = 0; j < n; j++)
        wmma::fill_fragment(c[j], 0.0f);
#pragma unroll
    for (int x = 0; x < E; x += 16) {
        left fa;
        wmma::load_matrix_sync(fa, a + p.strip * T::ld + x, T::ld);
#pragma unroll
        for (int j = 0; j < n; j++) {
            right_transposed fb;
            wmma::load_matrix_sync(fb, b + j * 16 * T::ld + x, T::ld);
            wmma::mma_sync(c[j], fa, fb, c[j]);
        }
    }
    __syncwarp(); /* what was in scores has been read */
#pragma unroll
    for (int j = 0; j < n; j++)
        wmma::store_matrix_sync(p.scores + 16 * j, c[j], T::ld_scores, wmma::mem_row_major);
    __syncwarp();
}

/* c += the strip's weights times all rows of y. */
template <int E> __device__ void add_weighted(const place<E> &p, const bf16 *y, sums (&c)[E / 16])
{
    using T = tile<E>;
    __syncwarp(); /* weights are written */
#pragma unroll
    for (int k = 0; k < T::rows; k += 16) {
        left fa;
        wmma::load_matrix_sync(fa, p.weights + k, T::ld_weights);
#pragma unroll
        for (int n = 0; n < E / 16; n++) {
            right fb;
            wmma::load_matrix_sync(fb, y + k * T::ld + 16 * n, T::ld);
            wmma::mma_sync(c[n], fa, fb, c[n]);
        }
    }
    __syncwarp(); /* and read */
}

template <int E> __device__ void clear(sums (&c)[E / 16])
{
#pragma unroll
    for (int n = 0; n < E / 16; n++)
        wmma::fill_fragment(c[n], 0.0f);
}

/* The strip's sums to the rows of one head, of which `rows` exist. */
template <int E>
__device__ void store(const place<E> &p, const sums (&c)[E / 16], bf16 *to, int64_t ld, int64_t rows, int e)
{
    using T = tile<E>;
#pragma unroll
    for (int first = 0; first < E; first += T::chunk) {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < T::chunk / 16; n++)
            wmma::store_matrix_sync(p.scores + 16 * n, c[first / 16 + n], T::ld_scores, wmma::mem_row_major);
        __syncwarp();
        for (int i = threadIdx.x % 32; i < STRIP * T::chunk; i += 32) {
            int r = i / T::chunk, x = i % T::chunk;
            if (r < rows && first + x < e)
                to[r * ld + first + x] = __float2bfloat16(p.scores[r * T::ld_scores + x]);
        }
    }
}

__device__ bool sees(int64_t query, int64_t key, int64_t s)
{
    return key <= query && key < s;
}

/* ---- forward ---------------------------------------------------------------------- */

/* One block a tile of queries of one head, the longest first. */
template <int E>
__global__ void __launch_bounds__(tile<E>::threads)
    forward(const struct attention a, float scale, bool whole, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o,
            float *lse)
{
    using T = tile<E>;
    extern __shared__ __align__(128) unsigned char memory[];
    const place<E> p(memory, 2);
    bf16 *tq = p.tensor[0], *tk = p.tensor[1];
    int64_t pairs = a.b * a.h, tiles = (a.s + T::rows - 1) / T::rows;
    int64_t last = tiles - 1 - blockIdx.x / pairs, pair = blockIdx.x % pairs, i = pair / a.h, n = pair % a.h;
    int64_t nk = n / (a.h / a.hk), first = last * T::rows, query = first + p.strip + p.row;
    int e = (int)a.e;
    k += i * a.s * a.ldk + nk * e;
    v += i * a.s * a.ldv + nk * e;
    load<E>(tq, q + (i * a.s + first) * a.ldq + n * e, a.ldq, a.s - first, e, whole);

    float top = -INFINITY, sum = 0;
    for (int64_t t = 0; t <= last; t++) {
        int64_t key = t * T::rows;
        __syncthreads();
        load<E>(tk, k + key * a.ldk, a.ldk, a.s - key, e, whole);
        __syncthreads();
        score<E>(p, tq, tk);
        float before = top, part = 0;
#pragma unroll
        for (int j = 0; j < T::per_lane; j++)
            if (sees(query, key + p.column(j), a.s))
                top = fmaxf(top, scale * p.score(j));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
#pragma unroll
        for (int j = 0; j < T::per_lane; j++)
            if (sees(query, key + p.column(j), a.s))
                part += expf(scale * p.score(j) - top);
        part += __shfl_xor_sync(0xffffffffu, part, 1);
        sum = sum * expf(before - top) + part; /* key 0 is seen by all, so top is finite from the first tile on */
    }

    sums out[E / 16];
    clear<E>(out);
    for (int64_t t = 0; t <= last; t++) {
        int64_t key = t * T::rows;
        __syncthreads();
        load<E>(tk, k + key * a.ldk, a.ldk, a.s - key, e, whole);
        __syncthreads();
        score<E>(p, tq, tk);
#pragma unroll
        for (int j = 0; j < T::per_lane; j++)
            p.weight(j) =
                __float2bfloat16(sees(query, key + p.column(j), a.s) ? expf(scale * p.score(j) - top) / sum : 0.0f);
        __syncthreads();
        load<E>(tk, v + key * a.ldv, a.ldv, a.s - key, e, whole);
        __syncthreads();
        add_weighted<E>(p, tk, out);
    }
    int64_t row = first + p.strip;
    store<E>(p, out, o + (i * a.s + row) * a.ldo + n * e, a.ldo, a.s - row, e);
    if (p.half == 0 && query < a.s)
        lse[pair * a.s + query] = top + logf(sum);
}

/* ---- backward --------------------------------------------------------------------- */

/* rows [b, h, s] := <dO, O>; one warp a row. */
constexpr int ROW_WARPS = 8;
__global__ void row_products(const struct attention a, const bf16 *o, const bf16 *d_o, float *rows)
{
    int64_t index = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32, token = index / a.h, n = index % a.h;
    if (token >= a.b * a.s)
        return;
    int lane = threadIdx.x % 32;
    float sum = 0;
    for (int64_t x = lane; x < a.e; x += 32) {
        int64_t at = token * a.ldo + n * a.e + x;
        sum += __bfloat162float(o[at]) * __bfloat162float(d_o[at]);
    }
    for (int offset = 16; offset; offset /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0)
        rows[(token / a.s * a.h + n) * a.s + token % a.s] = sum;
}

/* One block a tile of queries of one head, the longest first. */
template <int E>
__global__ void __launch_bounds__(tile<E>::threads)
    backward_q(const struct attention a, float scale, bool whole, const bf16 *q, const bf16 *k, const bf16 *v,
               const float *lse, const bf16 *d_o, const float *rows, bf16 *dq)
{
    using T = tile<E>;
    extern __shared__ __align__(128) unsigned char memory[];
    const place<E> p(memory, 4);
    bf16 *tq = p.tensor[0], *tg = p.tensor[1], *tk = p.tensor[2], *tv = p.tensor[3];
    int64_t pairs = a.b * a.h, tiles = (a.s + T::rows - 1) / T::rows;
    int64_t last = tiles - 1 - blockIdx.x / pairs, pair = blockIdx.x % pairs, i = pair / a.h, n = pair % a.h;
    int64_t nk = n / (a.h / a.hk), first = last * T::rows, query = first + p.strip + p.row;
    int e = (int)a.e;
    k += i * a.s * a.ldk + nk * e;
    v += i * a.s * a.ldv + nk * e;
    load<E>(tq, q + (i * a.s + first) * a.ldq + n * e, a.ldq, a.s - first, e, whole);
    load<E>(tg, d_o + (i * a.s + first) * a.ldo + n * e, a.ldo, a.s - first, e, whole);
    float log_sum = query < a.s ? lse[pair * a.s + query] : 0, row_product = query < a.s ? rows[pair * a.s + query] : 0;

    sums out[E / 16];
    clear<E>(out);
    for (int64_t t = 0; t <= last; t++) {
        int64_t key = t * T::rows;
        __syncthreads();
        load<E>(tk, k + key * a.ldk, a.ldk, a.s - key, e, whole);
        load<E>(tv, v + key * a.ldv, a.ldv, a.s - key, e, whole);
        __syncthreads();
        float weight[T::per_lane];
        score<E>(p, tq, tk);
#pragma unroll
        for (int j = 0; j < T::per_lane; j++)
            weight[j] = sees(query, key + p.column(j), a.s) ? expf(scale * p.score(j) - log_sum) : 0.0f;
        score<E>(p, tg, tv);
#pragma unroll
        for (int j = 0; j < T::per_lane; j++)
            p.weight(j) = __float2bfloat16(weight[j] * (p.score(j) - row_product) * scale);
        add_weighted<E>(p, tk, out);
    }
    int64_t row = first + p.strip;
    store<E>(p, out, dq + (i * a.s + row) * a.ldq + n * e, a.ldq, a.s - row, e);
}

/* One block a tile of keys of one key-value head, the longest first; scores are transposed, [key, query]. */
template <int E>
__global__ void __launch_bounds__(tile<E>::threads)
    backward_kv(const struct attention a, float scale, bool whole, const bf16 *q, const bf16 *k, const bf16 *v,
                const float *lse, const bf16 *d_o, const float *rows, bf16 *dk, bf16 *dv)
{
    using T = tile<E>;
    extern __shared__ __align__(128) unsigned char memory[];
    const place<E> p(memory, 4);
    bf16 *tk = p.tensor[0], *tv = p.tensor[1], *tq = p.tensor[2], *tg = p.tensor[3];
    float *log_sums = p.numbers, *row_sums = p.numbers + T::rows;
    int64_t pairs = a.b * a.hk, tiles = (a.s + T::rows - 1) / T::rows;
    int64_t own = blockIdx.x / pairs, pair = blockIdx.x % pairs, i = pair / a.hk, nk = pair % a.hk;
    int64_t group = a.h / a.hk, first = own * T::rows, key = first + p.strip + p.row;
    int e = (int)a.e;
    load<E>(tk, k + (i * a.s + first) * a.ldk + nk * e, a.ldk, a.s - first, e, whole);
    load<E>(tv, v + (i * a.s + first) * a.ldv + nk * e, a.ldv, a.s - first, e, whole);

    sums sum_k[E / 16], sum_v[E / 16];
    clear<E>(sum_k);
    clear<E>(sum_v);
    for (int64_t n = nk * group; n < (nk + 1) * group; n++) {
        for (int64_t t = own; t < tiles; t++) {
            int64_t query = t * T::rows, at = (i * a.h + n) * a.s + query;
            __syncthreads();
            load<E>(tq, q + (i * a.s + query) * a.ldq + n * e, a.ldq, a.s - query, e, whole);
            load<E>(tg, d_o + (i * a.s + query) * a.ldo + n * e, a.ldo, a.s - query, e, whole);
            for (int r = threadIdx.x; r < T::rows; r += T::threads) {
                log_sums[r] = query + r < a.s ? lse[at + r] : 0;
                row_sums[r] = query + r < a.s ? rows[at + r] : 0;
            }
            __syncthreads();
            float weight[T::per_lane];
            score<E>(p, tk, tq);
#pragma unroll
            for (int j = 0; j < T::per_lane; j++) {
                int r = p.column(j);
                weight[j] = sees(query + r, key, a.s) ? expf(scale * p.score(j) - log_sums[r]) : 0.0f;
                p.weight(j) = __float2bfloat16(weight[j]);
            }
            add_weighted<E>(p, tg, sum_v);
            score<E>(p, tv, tg);
#pragma unroll
            for (int j = 0; j < T::per_lane; j++)
                p.weight(j) = __float2bfloat16(weight[j] * (p.score(j) - row_sums[p.column(j)]) * scale);
            add_weighted<E>(p, tq, sum_k);
        }
    }
    int64_t row = first + p.strip;
    store<E>(p, sum_k, dk + (i * a.s + row) * a.ldk + nk * e, a.ldk, a.s - row, e);
    store<E>(p, sum_v, dv + (i * a.s + row) * a.ldv + nk * e, a.ldv, a.s - row, e);
}

/* ---- launches --------------------------------------------------------------------- */

bool on_16_bytes(const void *p)
{
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

struct launch {
    float scale;
    bool whole; /* every row of every operand starts on 16 bytes */
};

struct launch launch_of(const struct attention *a, const struct attention_tensors *t)
{
    bool widths = a->e % 8 == 0 && a->ldq % 8 == 0 && a->ldk % 8 == 0 && a->ldv % 8 == 0 && a->ldo % 8 == 0;
    return {(float)(1 / sqrt((double)a->e)),
            widths && on_16_bytes(t->q) && on_16_bytes(t->k) && on_16_bytes(t->v) && on_16_bytes(t->d_o)};
}

/* Blocks of a kernel that has one for each tile of `pairs` pairs of sequence and head; 0 with a fault. */
template <int E> unsigned blocks(struct kstream *ks, const struct attention *a, int64_t pairs)
{
    int64_t n = (a->s + tile<E>::rows - 1) / tile<E>::rows * pairs;
    if (n > 0 && n <= INT32_MAX)
        return (unsigned)n;
    cuda_fault(ks, ERR_UNSUPPORTED, "attention: %lld sequences of %lld tokens are more than a launch has blocks for",
               (long long)a->b, (long long)a->s);
    return 0;
}

/* More shared memory than a kernel has without asking. */
bool allow(struct kstream *ks, const void *kernel, size_t bytes, const char *what)
{
    return cuda_ok(ks, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), what);
}

const bf16 *in(const void *p)
{
    return static_cast<const bf16 *>(p);
}

bf16 *out(void *p)
{
    return static_cast<bf16 *>(p);
}

template <int E> void run_forward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t)
{
    constexpr size_t bytes = tile<E>::bytes(2);
    struct launch l = launch_of(a, t);
    unsigned n = blocks<E>(ks, a, a->b * a->h);
    if (!n || !allow(ks, reinterpret_cast<const void *>(forward<E>), bytes, "attention"))
        return;
    forward<E><<<n, tile<E>::threads, bytes, ks->stream>>>(*a, l.scale, l.whole, in(t->q), in(t->k), in(t->v),
                                                           out(t->o), static_cast<float *>(t->lse));
    cuda_launched(ks, "attention");
}

template <int E>
void run_backward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t, float *rows)
{
    constexpr size_t bytes = tile<E>::bytes(4);
    struct launch l = launch_of(a, t);
    const float *lse = static_cast<const float *>(t->lse);
    unsigned by_query = blocks<E>(ks, a, a->b * a->h), by_key = blocks<E>(ks, a, a->b * a->hk);
    if (!by_query || !by_key ||
        !allow(ks, reinterpret_cast<const void *>(backward_q<E>), bytes, "attention backward") ||
        !allow(ks, reinterpret_cast<const void *>(backward_kv<E>), bytes, "attention backward"))
        return;
    int64_t all = a->b * a->s * a->h;
    row_products<<<(unsigned)((all + ROW_WARPS - 1) / ROW_WARPS), ROW_WARPS * 32, 0, ks->stream>>>(*a, in(t->o),
                                                                                                   in(t->d_o), rows);
    if (!cuda_launched(ks, "attention backward, rows"))
        return;
    backward_q<E><<<by_query, tile<E>::threads, bytes, ks->stream>>>(*a, l.scale, l.whole, in(t->q), in(t->k), in(t->v),
                                                                     lse, in(t->d_o), rows, out(t->dq));
    if (!cuda_launched(ks, "attention backward, dq"))
        return;
    backward_kv<E><<<by_key, tile<E>::threads, bytes, ks->stream>>>(*a, l.scale, l.whole, in(t->q), in(t->k), in(t->v),
                                                                    lse, in(t->d_o), rows, out(t->dk), out(t->dv));
    cuda_launched(ks, "attention backward, dk and dv");
}

void too_wide(struct kstream *ks, const struct attention *a)
{
    cuda_fault(ks, ERR_UNSUPPORTED, "attention: heads of %lld columns; the own kernel has at most 256",
               (long long)a->e);
}

} // namespace

void attention_own_forward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t)
{
    if (a->e <= 32)
        run_forward<32>(ks, a, t);
    else if (a->e <= 64)
        run_forward<64>(ks, a, t);
    else if (a->e <= 128)
        run_forward<128>(ks, a, t);
    else if (a->e <= 256)
        run_forward<256>(ks, a, t);
    else
        too_wide(ks, a);
}

void attention_own_backward(struct kstream *ks, const struct attention *a, const struct attention_tensors *t,
                            float *rows)
{
    if (a->e <= 32)
        run_backward<32>(ks, a, t, rows);
    else if (a->e <= 64)
        run_backward<64>(ks, a, t, rows);
    else if (a->e <= 128)
        run_backward<128>(ks, a, t, rows);
    else if (a->e <= 256)
        run_backward<256>(ks, a, t, rows);
    else
        too_wide(ks, a);
}
