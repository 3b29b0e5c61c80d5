/* cuda.h: embedding. Forward a warp copies a token's row. Backward each row of the table must be summed in token order
 * without one block going through all tokens: the tokens of each row are gathered in a list in whatever order they
 * come, then each finds its place by counting those before it, and the first of a list adds them all up. */
#include "kernels/cuda/device.cuh"

namespace
{

struct shape {
    int64_t T, first, rows, width, w; /* w = width / parts */
    const int32_t *tokens;
};

/* The table's row of a token; not below c.rows: none. */
__device__ inline uint64_t row_of(const struct shape &c, int64_t token)
{
    return (uint64_t)((int64_t)c.tokens[token] - c.first);
}

template <int V> __global__ void __launch_bounds__(BLOCK) embed(struct shape c, const bf16 *table, bf16 *out)
{
    int64_t token = warp_row(), part = blockIdx.y;
    if (token >= c.T)
        return;
    uint64_t row = row_of(c, token);
    const bf16 *from = table + row * c.width + part * c.w;
    bf16 *to = out + (part * c.T + token) * c.w;
    for (int64_t j = first_column<V>(); j < c.w; j += LANES * V) {
        packed<V> x = {};
        if (row < (uint64_t)c.rows)
            x = load_packed<V>(from + j);
        store_packed<V>(to + j, x);
    }
}

/* By row of the table: how many tokens, and where its list begins in `gathered` and `ordered`. By token: its place in
 * the unordered list, then the lists themselves. */
struct lists {
    int *count, *begin, *used;
    int *place, *gathered, *ordered;
};

__device__ inline int64_t this_token()
{
    return (int64_t)blockIdx.x * BLOCK + threadIdx.x;
}

__global__ void __launch_bounds__(BLOCK) count_tokens(struct shape c, struct lists l)
{
    int64_t token = this_token();
    if (token >= c.T)
        return;
    uint64_t row = row_of(c, token);
    if (row < (uint64_t)c.rows)
        l.place[token] = atomicAdd(&l.count[row], 1);
}

/* The first to have come takes room for its list; a warp asks once. Where lists lie is of no consequence. */
__global__ void __launch_bounds__(BLOCK) place_lists(struct shape c, struct lists l)
{
    int64_t token = this_token();
    uint64_t row = token < c.T ? row_of(c, token) : UINT64_MAX;
    bool opens = row < (uint64_t)c.rows && l.place[token] == 0;
    int mine = opens ? l.count[row] : 0, upto = mine, base = 0;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        int below = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane() >= distance)
            upto += below;
    }
    if (lane() == LANES - 1)
        base = atomicAdd(l.used, upto);
    base = __shfl_sync(0xffffffffu, base, LANES - 1);
    if (opens)
        l.begin[row] = base + upto - mine;
}

__global__ void __launch_bounds__(BLOCK) gather_tokens(struct shape c, struct lists l)
{
    int64_t token = this_token();
    if (token >= c.T)
        return;
    uint64_t row = row_of(c, token);
    if (row < (uint64_t)c.rows)
        l.gathered[l.begin[row] + l.place[token]] = (int)token;
}

__global__ void __launch_bounds__(BLOCK) order_tokens(struct shape c, struct lists l)
{
    int64_t token = this_token();
    if (token >= c.T)
        return;
    uint64_t row = row_of(c, token);
    if (row >= (uint64_t)c.rows)
        return;
    const int *list = l.gathered + l.begin[row];
    int count = l.count[row], before = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++)
        before += list[i] < (int)token;
    l.ordered[l.begin[row] + before] = (int)token;
}

template <int V> __device__ inline void add(packed<V> x, float (&sum)[V])
{
    float wide[V];
    widen(x, wide);
#pragma unroll
    for (int i = 0; i < V; i++)
        sum[i] += wide[i];
}

/* A warp to a token and LANES * V columns; it works if the token is the first of its list. */
template <int V>
__global__ void __launch_bounds__(BLOCK) add_lists(struct shape c, struct lists l, const bf16 *dout, float *dtable)
{
    enum { AHEAD = 8 };
    int64_t token = warp_row(), column = ((int64_t)blockIdx.y * LANES + lane()) * V;
    if (token >= c.T || column >= c.width)
        return;
    uint64_t row = row_of(c, token);
    if (row >= (uint64_t)c.rows)
        return;
    const int *list = l.ordered + l.begin[row];
    if (list[0] != (int)token)
        return;
    int64_t part = column / c.w;
    const bf16 *from = dout + part * c.T * c.w + (column - part * c.w);
    float *to = dtable + row * c.width + column, sum[V];
    load<V>(to, sum);
    int count = l.count[row], i = 0;
    if (count >= AHEAD) { /* a frequent token: AHEAD loads are always under way */
        packed<V> next[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            next[k] = load_packed<V>(from + list[k] * c.w);
        for (; i + 2 * AHEAD <= count; i += AHEAD) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                add(next[k], sum);
                next[k] = load_packed<V>(from + list[i + AHEAD + k] * c.w);
            }
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            add(next[k], sum);
        i += AHEAD;
    }
    for (; i < count; i++)
        add(load_packed<V>(from + list[i] * c.w), sum);
    store(to, sum);
}

} // namespace

void cuda_embed(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                const int32_t *tokens, const void *table, void *out)
{
    if (T <= 0 || width <= 0)
        return;
    struct shape c = {T, first, rows, width, width / parts, tokens};
    by_width(wide(c.w, table, out), [&](auto V) {
        launch(ks, "embed", grid_of(blocks_of(T, WARPS), parts), BLOCK, embed<decltype(V)::value>, c,
               (const bf16 *)table, (bf16 *)out);
    });
}

void cuda_embed_backward(struct kstream *ks, int64_t T, int64_t first, int64_t rows, int64_t width, int parts,
                         const int32_t *tokens, const void *dout, void *dtable)
{
    static const char what[] = "embed_backward";
    if (T <= 0 || rows <= 0 || width <= 0)
        return;
    struct shape c = {T, first, rows, width, width / parts, tokens};
    int *at = (int *)cuda_scratch(ks, (size_t)scratch_lists_bytes(T, rows), what);
    if (!at)
        return;
    struct lists l = {at + 1, at + 1 + rows, at, at + 1 + 2 * rows, at + 1 + 2 * rows + T, at + 1 + 2 * rows + 2 * T};
    dim3 grid = grid_of(blocks_of(T, BLOCK));
    if (!cuda_ok(ks, cudaMemsetAsync(at, 0, sizeof(int) * (size_t)(1 + rows), ks->stream), what))
        return;
    launch(ks, what, grid, BLOCK, count_tokens, c, l);
    launch(ks, what, grid, BLOCK, place_lists, c, l);
    launch(ks, what, grid, BLOCK, gather_tokens, c, l);
    launch(ks, what, grid, BLOCK, order_tokens, c, l);
    by_width(wide(c.w, dout, dtable), [&](auto V) {
        constexpr int N = decltype(V)::value;
        launch(ks, what, grid_of(blocks_of(T, WARPS), blocks_of(width, LANES * N)), BLOCK, add_lists<N>, c, l,
               (const bf16 *)dout, (float *)dtable);
    });
}
