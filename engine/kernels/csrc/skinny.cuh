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
