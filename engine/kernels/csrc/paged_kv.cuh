// Copies one KV head of one sequence from a paged pool [NB, 2, Hk, BS, D] to shared memory.
//
// Positions are processed in groups of eight. A block holds a multiple of eight tokens, so a group is
// in one block, and its first row in the pool (a row is D elements) locates all eight. A
// value is Hk * BS rows after its key. Only positions in [begin, end) are read: other positions
// may be stale or NaN, or belong to another sequence. They are replaced by zeros, because a
// weight of zero does not cancel a NaN.
//
// Rows are stored in shared memory in pieces of 16 bytes. ldmatrix reads one piece of eight rows at
// once, and these must touch all 32 banks. If a row has a multiple of 8 pieces, piece c of row r is at
// c ^ (r % 8) (swizzled). With 4 pieces, two rows fill the banks, and piece c of row r is at
// c ^ (r / 2 % 4). Otherwise rows are an odd number of pieces apart.
#pragma once
#include "device.cuh"

constexpr int kGroup = 8;  // positions located by one lookup
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLowest = -1.0e30f;  // the maximum before any key; finite, so no difference is NaN

// Pieces from one row to the next.
template <int D> constexpr int kRowPieces = D % 64 && D != 32 ? D / 8 | 1 : D / 8;

// Position of 16-byte piece `piece` of row `row`, in pieces.
template <int D> __device__ __forceinline__ int swizzled(int row, int piece) {
    if (D == 32) return row * 4 + (piece ^ ((row >> 1) & 3));
    return row * kRowPieces<D> + (D % 64 ? piece : piece ^ (row & 7));
}

template <class Element = bf16> struct PagedHead {
    const Element* pool;
    const int* table;  // block ids of the sequence
    int block_size, kv_heads, head;
    int begin, end;  // positions that may be read

    __device__ __forceinline__ bool readable(int position) const {
        return static_cast<unsigned>(position - begin) < static_cast<unsigned>(end - begin);
    }

    // First row of a group in the pool; 0 if none of its positions may be read.
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

// Copies 16 bytes into shared memory, or zeros; unwanted bytes are not read.
__device__ __forceinline__ void copy_or_zero(uint4* to, const void* from, bool wanted) {
    cp_async16_fill(to, from, wanted ? 16u : 0u);
}

// 2^d for an integer d <= 0. Exact, unlike the hardware's exponential: rescaling does not round.
__device__ __forceinline__ float power_of_two(float d) {
    const unsigned exponent = static_cast<unsigned>(127 + static_cast<int>(fmaxf(d, -127.0f)));
    return __uint_as_float(exponent << 23);
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
