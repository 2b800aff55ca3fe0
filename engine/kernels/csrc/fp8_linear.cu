// out[m, N] = x[m, K] W[N, K]^T with W in e4m3 with scales, as skinny_linear.cu for bf16.
//
// A weight becomes the bf16 nearest to code * scale in registers. Columns lie so that 16 bytes of a lane
// are its operands of two matrix instructions of skinny_linear.cu, and all sums have the order there.
// So a row has the bits that it has with these bf16 weights, and half the bytes are read.
//
// One tile of 16 weight rows, except that gate and up are one each: with more, or with 16 rows of x for
// two tiles, some compilers spill.
#include "skinny.cuh"

// e4m3 [N, K rounded up to pieces of 64 columns], zeros behind K. Of a piece, the 16 bytes of a lane are
// its 8 columns of the first and of the second 32. Scales [N, groups]; a group has `pieces` pieces.
struct Narrow {
    const uint4* codes;
    const float* scales;
    int groups, pieces;
};

__device__ __forceinline__ unsigned widen_two(unsigned codes, float scale) {
    const float2 pair = unpack_fp8(codes);
    return pack_bf16(pair.x * scale, pair.y * scale);
}
__device__ __forceinline__ uint4 widen(const uint2& codes, float scale) {
    return make_uint4(widen_two(codes.x, scale), widen_two(codes.x >> 16, scale),
                      widen_two(codes.y, scale), widen_two(codes.y >> 16, scale));
}

// Holds 16 rows of each tile in kPieces pieces of 64 columns.
template <int kTiles, int kPieces> struct Weights {
    uint4 w[kPieces][kTiles][2];  // piece, tile, rows g and g + 8
    float scale[kPieces][kTiles][2];

    __device__ __forceinline__ uint4 at(int p, int tile, int upper, int part) const {
        const uint4& both = w[p][tile][upper];
        const uint2 codes = part ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y);
        return widen(codes, scale[p][tile][upper]);
    }

    __device__ __forceinline__ void load(const Narrow& matrix, const Tiles<kTiles>& tiles, int k,
                                         int piece) {
        const int width = (k + kPiece - 1) / kPiece;
#pragma unroll
        for (int p = 0; p < kPieces; p++) {
            const int place = piece + p * kWarps;
            // A group of all columns has as many pieces, so that this is its number 0.
            const int group = place / matrix.pieces;
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int r = lane_row() + 8 * upper;
                    const bool inside = place < width && r < tiles.rows[tile];
                    const int row = tiles.first[tile] + r;
                    w[p][tile][upper] =
                        inside ? ldg16(matrix.codes + (row * width + place) * 4 + lane_part()) : zero16();
#ifdef BATON_PLANT_SCALE_GROUP
                    scale[p][tile][upper] = inside ? __ldg(matrix.scales + row * matrix.groups) : 0.0f;
#else
                    scale[p][tile][upper] =
                        inside ? __ldg(matrix.scales + row * matrix.groups + group) : 0.0f;
#endif
                }
        }
    }
};

// out = x W^T + bias, plus the content of out if `add`. bias: float32 or null. Rows of x beyond 16 are
// computed in groups of 16 by neighbouring blocks, which find the weights in the cache.
template <int kHalves, class Out>
__device__ __forceinline__ void linear(const bf16* x, const Narrow& w, const float* bias, Out* out, int m,
                                       int n, int k, int add) {
    __shared__ Sums<1, kHalves> shared;
    constexpr int kTogether = 2 * kHalfRows;
    const int parts = (m + kTogether - 1) / kTogether;
    const int block = static_cast<int>(blockIdx.x) / parts;
    const int row = (static_cast<int>(blockIdx.x) - block * parts) * kTogether;
    const int first = block * kTileRows, rows = min(m - row, kTogether);
    products<Weights, 1, kHalves>(x + static_cast<long long>(row) * k, w, Tiles<1>{{first}, {n - first}},
                                  rows, k, shared);
    put_products<kTileRows>(shared, bias, out, first, row, rows, n, add);
}

#define FP8_LINEAR(halves, Out, name)                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) fp8_linear_##halves##_##name(       \
        const bf16* __restrict__ x, const uint4* __restrict__ codes,                              \
        const float* __restrict__ scales, const float* bias, Out* out, int m, int n, int k,       \
        int add, int groups, int pieces) {                                                        \
        begin_after_previous();                                                                   \
        linear<halves, Out>(x, Narrow{codes, scales, groups, pieces}, bias, out, m, n, k, add);   \
    }
FP8_LINEAR(1, bf16, bf16)
FP8_LINEAR(2, bf16, bf16)
FP8_LINEAR(1, float, f32)
FP8_LINEAR(2, float, f32)

// out[m, F] = silu(x G^T) * (x U^T) for up to 8 rows, with W[2 F, K] holding the rows of G, then those of
// U. Both products are rounded to bf16, as by the two kernels.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    fp8_linear_silu_mul(const bf16* __restrict__ x, const uint4* __restrict__ codes,
                        const float* __restrict__ scales, bf16* out, int m, int f, int k, int groups,
                        int pieces) {
    begin_after_previous();
    __shared__ Sums<2, 1> shared;
    const int first = static_cast<int>(blockIdx.x) * kTileRows;
    products<Weights, 2, 1>(x, Narrow{codes, scales, groups, pieces},
                            Tiles<2>{{first, f + first}, {f - first, f - first}}, m, k, shared);
    put_silu_mul<kTileRows>(shared, out, first, m, f);
}

// out[rows, K] = the bf16 weights of rows first, first + 1 .. of a Narrow matrix, for cuBLAS.
extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_widen(const uint4* __restrict__ codes, const float* __restrict__ scales, uint4* out, int first,
              int rows, int k, int groups, int pieces) {
    begin_after_previous();
    const int width = (k + kPiece - 1) / kPiece, words = width * 4;
    const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (i >= rows * words) return;
    const int r = i / words, place = (i - r * words) / 4, row = first + r;
    const uint4 both = ldg16(codes + static_cast<long long>(row) * words + (i - r * words));
    const float scale = scales[row * groups + place / pieces];
    uint4* to = out + static_cast<long long>(r) * (k / 8);
    const int column = place * 8 + i % 4;  // in eights: of the first 32 columns; 4 more for the others
    if (column < k / 8) stg16(to + column, widen(make_uint2(both.x, both.y), scale));
    if (column + 4 < k / 8) stg16(to + column + 4, widen(make_uint2(both.z, both.w), scale));
}
