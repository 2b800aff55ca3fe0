// One KV head of one sequence in a paged pool [NB, 2, Hk, BS, D], brought into shared memory.
//
// Positions are taken in groups of eight. A block holds a multiple of eight tokens, so a group lies
// in one block and one number, its first row in the pool (a row is D elements), finds all eight; a
// value lies Hk * BS rows after its key. Only positions in [begin, end) are read: what lies outside
// may be stale, may be NaN, may be in a block of somebody else. Zeros take its place, because a
// weight of zero does not silence a NaN.
//
// Rows lie in shared memory in pieces of 16 bytes, swizzled: piece c of row r is found at c ^ (r %
// 8). Eight rows at one piece, what ldmatrix reads at once, then touch all 32 banks.
#pragma once
#include "device.cuh"

constexpr int kGroup = 8;  // positions found by one look-up
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLowest = -1.0e30f;  // a peak before any key; finite, so that no difference is NaN

// Where 16-byte piece `piece` of row `row` lies, in pieces.
template <int D> __device__ __forceinline__ int swizzled(int row, int piece) {
    return row * (D / 8) + (piece ^ (row & 7));
}

struct PagedHead {
    const bf16* pool;
    const int* table;  // block ids of the sequence
    int block_size, kv_heads, head;
    int begin, end;  // positions that may be read

    __device__ __forceinline__ bool readable(int position) const {
        return static_cast<unsigned>(position - begin) < static_cast<unsigned>(end - begin);
    }

    // First row of a group in the pool; 0 where none of its positions may be read.
    __device__ __forceinline__ unsigned row_of_group(int group) const {
        const int first = group * kGroup;
        if (first >= end || first + kGroup <= begin) return 0;
        const int block = first / block_size, offset = first - block * block_size;
#ifdef BATON_PLANT_BLOCK_TABLE
        const unsigned id = table[block > 0 ? block - 1 : 0];
#else
        const unsigned id = table[block];
#endif
        return (id * 2 * kv_heads + head) * block_size + offset;
    }

    __device__ __forceinline__ long long value_distance() const {  // in rows
        return static_cast<long long>(kv_heads) * block_size;
    }
};

// Copies 16 bytes into shared memory, or zeros; what is not wanted is not read.
__device__ __forceinline__ void copy_or_zero(uint4* to, const bf16* from, bool wanted) {
    cp_async16_fill(to, from, wanted ? 16u : 0u);
}

// 2^d for a whole d <= 0. Exact, unlike the hardware's exponential: rescaling by it rounds nothing.
__device__ __forceinline__ float power_of_two(float d) {
    const unsigned exponent = static_cast<unsigned>(127 + static_cast<int>(fmaxf(d, -127.0f)));
    return __uint_as_float(exponent << 23);
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
