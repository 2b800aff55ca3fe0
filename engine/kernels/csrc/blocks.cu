// Moves KV blocks between a paged pool [L, NB, 2, Hk, BS, D] of bf16 and a contiguous payload [layers,
// blocks, 2, Hk, BS, D], or between two pools. One pass over the bytes also computes the digest of the
// payload. A *vector* is 16 bytes, 8 elements. A warp takes one *piece* of a block at a time; grids of any
// size step through all work.
#include "digest.cuh"

struct Divisor {
    unsigned by, factor, shift;
};

// The parameters of a move, for all threads; engine/kernels/cuda/blocks.py sets them.
struct Geometry {
    long long pool_start, layer_stride, payload_bytes;  // vectors of the pool; bytes
    unsigned block_vectors, pieces;
    Divisor pieces_per_block, blocks;
};

struct Split {
    unsigned quotient, rest;
};

// n / d and n % d for n < 2^31 (Granlund and Montgomery 1994).
__device__ __forceinline__ Split split(unsigned n, const Divisor& d) {
    const unsigned quotient = d.by == 1 ? n : __umulhi(n, d.factor) >> d.shift;
    return {quotient, n - quotient * d.by};
}

static constexpr int kSlots = 4;  // vectors of a piece that a lane has in flight

// The current piece of a warp, in vectors.
struct Piece {
    long long in_pool, in_payload;
    unsigned vectors;
};

__device__ __forceinline__ Piece piece_at(const Geometry& g, const int* __restrict__ ids,
                                          unsigned number) {
    const Split piece = split(number, g.pieces_per_block), block = split(piece.quotient, g.blocks);
    const unsigned start = piece.rest * (32 * kSlots);
#ifdef BATON_PLANT_TABLE
    const int id = __ldg(ids + min(block.rest + 1, g.blocks.by - 1));
#else
    const int id = __ldg(ids + block.rest);
#endif
    Piece p;
    p.in_pool = g.pool_start + block.quotient * g.layer_stride +
                static_cast<long long>(id) * g.block_vectors + start;
    p.in_payload = static_cast<long long>(piece.quotient) * g.block_vectors + start;
    p.vectors = min(g.block_vectors - start, 32u * kSlots);
    return p;
}

// Copies a piece and returns its digest, of vector `first` of the payload and the following; without kWrite,
// only returns the digest.
template <bool kWrite>
__device__ __forceinline__ u64 move_piece(const uint4* from, uint4* to, unsigned vectors, u64 first) {
    const unsigned lane = threadIdx.x % 32;
    const u64 key = key_of((first + lane) * 2);
    uint4 held[kSlots];
    u64 sum = 0;
#pragma unroll
    for (int s = 0; s < kSlots; s++)
        if (lane + 32 * s < vectors) held[s] = ldg16(from + lane + 32 * s);
#pragma unroll
    for (int s = 0; s < kSlots; s++) {
        if (lane + 32 * s >= vectors) continue;
        if (kWrite) stg16(to + lane + 32 * s, held[s]);
        sum += digest_of(held[s], key + 64 * s * kPlace);
    }
    return sum;
}

// ---------------------------------------------------------------- kernels

// Thread blocks of 256 threads of which 4 fit on an SM: with 4 x 16 bytes of each thread in flight, 64 KiB,
// several times what is needed to hide the latency of the memory.
#define MOVE(name, write, from, to, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(256, 4)                                           \
        name(__VA_ARGS__, u64* workspace, u64* digest, const Geometry g) {                         \
        const unsigned warps = gridDim.x * (blockDim.x / 32);                                      \
        u64 sum = 0;                                                                               \
        for (unsigned number = (blockIdx.x * blockDim.x + threadIdx.x) / 32; number < g.pieces;    \
             number += warps) {                                                                    \
            const Piece p = piece_at(g, ids, number);                                              \
            sum += move_piece<write>(from, to, p.vectors, p.in_payload);                           \
        }                                                                                          \
        finish_digest(sum, g.payload_bytes, workspace, digest);                                    \
    }
MOVE(gather_bf16, true, pool + p.in_pool, payload + p.in_payload, const uint4* __restrict__ pool,
     uint4* __restrict__ payload, const int* __restrict__ ids)
MOVE(scatter_bf16, true, payload + p.in_payload, pool + p.in_pool, uint4* __restrict__ pool,
     const uint4* __restrict__ payload, const int* __restrict__ ids)
MOVE(copy_bf16, true, pool + p.in_pool, target + piece_at(there, target_ids, number).in_pool,
     const uint4* __restrict__ pool, const int* __restrict__ ids, uint4* __restrict__ target,
     const int* __restrict__ target_ids, const Geometry there)
MOVE(sum_bf16, false, pool + p.in_pool, nullptr, const uint4* __restrict__ pool,
     const int* __restrict__ ids)
