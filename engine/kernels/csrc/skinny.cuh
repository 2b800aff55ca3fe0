// What products with few rows of x have in common, whatever the type of the weights.
//
// A block owns whole rows of W, in tiles of 16. Its warps take pieces of 64 columns in turn, and their
// sums are added in the order of the warps.
#pragma once
#include "device.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPiece = 64;           // columns of a warp's step: 128 bytes of each row
constexpr int kTileRows = 16;        // weight rows of one matrix instruction
constexpr int kHalfRows = 8;         // rows of x of one matrix instruction

__device__ __forceinline__ uint4 zero16() { return make_uint4(0, 0, 0, 0); }

__device__ __forceinline__ int lane_row() { return static_cast<int>(threadIdx.x % 32) / 4; }
__device__ __forceinline__ int lane_part() { return static_cast<int>(threadIdx.x % 4); }

__device__ __forceinline__ bool is_inside(int column, int k) {
#ifdef BATON_PLANT_LINEAR_TAIL
    return true;
#else
    return column < k;
#endif
}

// First weight row of each tile, and the number of rows from there on.
template <int kTiles> struct Tiles {
    int first[kTiles], rows[kTiles];
};

__device__ __forceinline__ void store(float* out, float v) { *out = v; }
__device__ __forceinline__ void store(bf16* out, float v) { *out = float_to_bf16(v); }
__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const bf16* p) { return bf16_to_float(*p); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Sums of one block: part[warp][weight row][row of x].
template <int kTiles, int kHalves> struct Sums {
    float part[kWarps][kTiles * kTileRows][kHalves * kHalfRows + 1];

    // Stores the sums of all warps, from registers.
    __device__ __forceinline__ void put(const float (&sums)[kTiles][kHalves][4]) {
        const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < kHalves; half++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    part[warp][tile * kTileRows + lane_row() + i / 2 * 8]
                               [half * kHalfRows + lane_part() * 2 + i % 2] = sums[tile][half][i];
#ifndef BATON_PLANT_LINEAR_BARRIER
        __syncthreads();
#endif
    }

    __device__ __forceinline__ float total(int row, int column) const {
        float sum = part[0][row][column];
#pragma unroll
        for (int warp = 1; warp < kWarps; warp++) sum += part[warp][row][column];
        return sum;
    }
};

// Adds 16 weight rows times 8 rows of x, in 16 columns and then in the next 16. low, high: a lane's 8
// columns of rows g and g + 8.
__device__ __forceinline__ void multiply_tile(float (&sums)[4], const uint4& low, const uint4& high,
                                              const uint4& x) {
    const unsigned b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
    const unsigned first[4] = {low.x, high.x, low.y, high.y};
#ifdef BATON_PLANT_LINEAR_ORDER
    const unsigned second[4] = {low.z, low.w, high.z, high.w};
#else
    const unsigned second[4] = {low.z, high.z, low.w, high.w};
#endif
    mma_bf16_16816(sums, first, b0);
    mma_bf16_16816(sums, second, b1);
}

// Computes the products of the block's weight rows with all rows of x, in `shared`. Weights hold 16 rows
// of each tile in kPieces pieces of a matrix. While a step is multiplied, the weights of the next one
// are in flight; the part of x is small and cached.
template <template <int, int> class Weights, int kTiles, int kHalves, class Matrix>
__device__ __forceinline__ void products(const bf16* x, const Matrix& w, const Tiles<kTiles>& tiles,
                                         int m, int k, Sums<kTiles, kHalves>& shared) {
    constexpr int kPieces = kTiles * kHalves == 1 ? 2 : 1;  // as many as fit into 128 registers
    const int warp = static_cast<int>(threadIdx.x / 32);
    float sums[kTiles][kHalves][4] = {};
    Weights<kTiles, kPieces> now, next;
    now.load(w, tiles, k, warp);
#pragma unroll 2
    for (int piece = warp; piece * kPiece < k; piece += kWarps * kPieces) {
        next.load(w, tiles, k, piece + kWarps * kPieces);
#pragma unroll
        for (int p = 0; p < kPieces; p++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int column = (piece + p * kWarps) * kPiece + part * 32 + lane_part() * 8;
                uint4 low[kTiles], high[kTiles];
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++) {
                    low[tile] = now.at(p, tile, 0, part);
                    high[tile] = now.at(p, tile, 1, part);
                }
#pragma unroll
                for (int half = 0; half < kHalves; half++) {
                    const int r = lane_row() + kHalfRows * half;
                    const bool inside = is_inside(column, k) && r < m;
                    const int at = r * (k / 8) + column / 8;
                    const uint4 other =
                        inside ? __ldg(reinterpret_cast<const uint4*>(x) + at) : zero16();
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++)
                        multiply_tile(sums[tile][half], low[tile], high[tile], other);
                }
            }
        now = next;
    }
    shared.put(sums);
}

// out = the sums + bias, plus the content of out if `add`: weight rows first to first + kRows for rows row
// to row + m of x. bias: float32 or null.
template <int kRows, class Sums, class Out>
__device__ __forceinline__ void put_products(const Sums& sums, const float* bias, Out* out, int first,
                                             int row, int m, int n, int add) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * m; i += kThreads) {
        const int r = i % kRows, at = i / kRows;
        if (first + r >= n) continue;
        float v = sums.total(r, at);
        if (bias) v += bias[first + r];
        Out* to = out + static_cast<long long>(row + at) * n + first + r;
        if (add) v += load(to);
        store(to, v);
    }
}

// out[m, F] = silu(gate) * up: the sums hold kRows weight rows of gate, then those of up. Both are rounded
// to bf16, so that the bits are those of a product and silu_mul in turn.
template <int kRows, class Sums>
__device__ __forceinline__ void put_silu_mul(const Sums& sums, bf16* out, int first, int m, int f) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * m; i += kThreads) {
        const int r = i % kRows, at = i / kRows;
        if (first + r >= f) continue;
        const float gate = bf16_to_float(float_to_bf16(sums.total(r, at)));
        const float up = bf16_to_float(float_to_bf16(sums.total(kRows + r, at)));
        out[static_cast<long long>(at) * f + first + r] = float_to_bf16(silu(gate) * up);
    }
}
