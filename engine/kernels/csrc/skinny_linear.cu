// out[m, N] = x[m, K] W[N, K]^T for up to 16 rows of x, limited by the time to load the weights.
//
// Each weight is loaded once from memory to a register and into a tensor core: W is the 16-row operand,
// up to 8 rows of x (or twice 8) the other one. A matrix product does not depend on the order of
// columns if both operands agree. So a lane takes 8 neighbouring columns of its row, 16 bytes, where
// the fragment layout would gather pairs. While one step is multiplied, the next is in flight:
// 32 rows of 128 bytes for each of 8 warps, 32 KB per block, two blocks per SM.
//
// A block owns whole rows of W. Its warps take pieces of 64 columns in turn, and their sums are added
// in the order of the warps. That order is the same for every m and every block size, so a row
// of out has the same bits whatever else is in the batch. For the same reason, one row also uses the
// tensor cores: fused multiply-adds of one lane would add in another order.
#include "skinny.cuh"

// Holds 16 rows of each tile in kPieces pieces of 64 columns.
template <int kTiles, int kPieces> struct Weights {
    uint4 w[kPieces][kTiles][2][2];  // piece, tile, rows g and g + 8, first and second 32 columns

    __device__ __forceinline__ const uint4& at(int p, int tile, int upper, int part) const {
        return w[p][tile][upper][part];
    }

    __device__ __forceinline__ void load(const bf16* all, const Tiles<kTiles>& tiles, int k, int piece) {
#pragma unroll
        for (int p = 0; p < kPieces; p++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int column = (piece + p * kWarps) * kPiece + part * 32 + lane_part() * 8;
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                    for (int upper = 0; upper < 2; upper++) {
                        const int r = lane_row() + 8 * upper;
                        const bool inside = is_inside(column, k) && r < tiles.rows[tile];
                        // In units of 16 bytes, so that int can address 32 GiB.
                        const int at = (tiles.first[tile] + r) * (k / 8) + column / 8;
                        w[p][tile][upper][part] =
                            inside ? ldg16(reinterpret_cast<const uint4*>(all) + at) : zero16();
                    }
            }
    }
};

// out = x W^T + bias, plus the content of out if `add`. bias: float32 or null.
template <int kTiles, int kHalves, class Out>
__device__ __forceinline__ void linear(const bf16* x, const bf16* w, const float* bias, Out* out, int m,
                                       int n, int k, int add) {
    __shared__ Sums<kTiles, kHalves> shared;
    constexpr int kRows = kTiles * kTileRows;
    const int first = static_cast<int>(blockIdx.x) * kRows;
    Tiles<kTiles> tiles;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
        tiles.first[tile] = first + tile * kTileRows, tiles.rows[tile] = n - tiles.first[tile];
    products<Weights, kTiles, kHalves>(x, w, tiles, m, k, shared);
    put_products<kRows>(shared, bias, out, first, 0, m, n, add);
}

// out[m, F] = silu(x G^T) * (x U^T) with W[2 F, K] holding the rows of G, then those of U. Both products
// are rounded to bf16, so that the bits are those of skinny_linear and silu_mul in turn.
template <int kHalves>
__device__ __forceinline__ void linear_silu_mul(const bf16* x, const bf16* w, bf16* out, int m, int f,
                                                int k) {
    __shared__ Sums<2, kHalves> shared;
    const int first = static_cast<int>(blockIdx.x) * kTileRows;
    products<Weights, 2, kHalves>(x, w, Tiles<2>{{first, f + first}, {f - first, f - first}}, m, k, shared);
    put_silu_mul<kTileRows>(shared, out, first, m, f);
}

#define LINEAR(tiles, halves, Out, name)                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                     \
        skinny_linear_##tiles##_##halves##_##name(const bf16* __restrict__ x,                     \
                                                  const bf16* __restrict__ w, const float* bias,  \
                                                  Out* out, int m, int n, int k, int add) {       \
        begin_after_previous();                                                                   \
        linear<tiles, halves, Out>(x, w, bias, out, m, n, k, add);                                \
    }
LINEAR(1, 1, bf16, bf16)
LINEAR(1, 2, bf16, bf16)
LINEAR(2, 1, bf16, bf16)
LINEAR(2, 2, bf16, bf16)
LINEAR(1, 1, float, f32)
LINEAR(1, 2, float, f32)
LINEAR(2, 1, float, f32)
LINEAR(2, 2, float, f32)

#define SILU_MUL(halves)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                     \
        skinny_linear_silu_mul_##halves(const bf16* __restrict__ x, const bf16* __restrict__ w,   \
                                        bf16* out, int m, int f, int k) {                         \
        begin_after_previous();                                                                   \
        linear_silu_mul<halves>(x, w, out, m, f, k);                                              \
    }
SILU_MUL(1)
SILU_MUL(2)

// out += bias for each row, after cuBLAS computed the product.
template <class Out>
__device__ __forceinline__ void add_bias(Out* out, const float* bias, int n) {
    Out* row = out + static_cast<long long>(blockIdx.x) * n;
    for (int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x); i < n;
         i += static_cast<int>(gridDim.y * blockDim.x))
        store(row + i, load(row + i) + bias[i]);
}
extern "C" __global__ void __launch_bounds__(kThreads) add_bias_bf16(bf16* out, const float* bias, int n) {
    begin_after_previous();
    add_bias(out, bias, n);
}
extern "C" __global__ void __launch_bounds__(kThreads) add_bias_f32(float* out, const float* bias, int n) {
    begin_after_previous();
    add_bias(out, bias, n);
}
