// Addresses of KV blocks: in a paged pool [L, NB, 2, Hk, BS, D] of bf16 and in a contiguous payload
// [layers, blocks, 2, heads, payload BS, D]. The payload may have the heads of one shard, another block
// size or another element type.
//
// A *vector* is 8 elements: 16 bytes of bf16 or fp16, 8 bytes of fp8 or int8. A *run* is contiguous
// on both sides: a block, the heads of a shard, or the tokens shared by both block sizes. Runs follow
// each other in the payload. A *tile* is the runs of one (block, K/V, head) of the payload, or one
// run that joins several of them. With scales, tiles are never joined. Their scales (one, or one per
// token, padded to an even number) follow all elements.
#pragma once
#include "device.cuh"

struct Divisor {
    unsigned by, factor, shift;
};

// The parameters of a move, for all threads; engine/kernels/cuda/blocks.py sets them.
struct Geometry {
    long long pool_start, layer_stride;                 // vectors of the pool
    long long scales_at, payload_bytes;                 // bytes of the payload
    unsigned block_stride, side_stride, head_stride;    // vectors of the pool
    unsigned tile_vectors, pieces, tiles;               // of the payload
    unsigned pool_ids, scales;                          // scales of a tile, padding included
    Divisor run_vectors, pieces_per_run, runs_per_tile, heads, sides, blocks, runs_per_pool_block;
    Divisor token_vectors;  // head_dim / 8
};

struct Split {
    unsigned quotient, rest;
};

// n / d and n % d for n < 2^31 (Granlund and Montgomery 1994).
__device__ __forceinline__ Split split(unsigned n, const Divisor& d) {
    const unsigned quotient = d.by == 1 ? n : __umulhi(n, d.factor) >> d.shift;
    return {quotient, n - quotient * d.by};
}

// Position of a tile in the pool: its K/V side and head in block 0, and its first run among those of
// all pool blocks.
struct Place {
    long long start;
    unsigned first_run;
};

__device__ __forceinline__ Place place_of(const Geometry& g, unsigned tile) {
    const Split head = split(tile, g.heads), side = split(head.quotient, g.sides);
    const Split layer = split(side.quotient, g.blocks);
    return {g.pool_start + layer.quotient * g.layer_stride +
                static_cast<long long>(side.rest) * g.side_stride + head.rest * g.head_stride,
            layer.rest * g.runs_per_tile.by};
}

static constexpr long long kAbsent = -1;

// Start of run `k` of a tile in the pool; kAbsent after the pool's last block.
__device__ __forceinline__ long long run_in_pool(const Geometry& g, const int* __restrict__ ids,
                                                 const Place& place, unsigned k) {
    const Split block = split(place.first_run + k, g.runs_per_pool_block);
#ifdef BATON_PLANT_TABLE
    const int id = __ldg(ids + min(block.quotient + 1, g.pool_ids - 1));
#else
    const int id = __ldg(ids + min(block.quotient, g.pool_ids - 1));
#endif
    const long long start = place.start + static_cast<long long>(id) * g.block_stride +
                            block.rest * g.run_vectors.by;
    return block.quotient < g.pool_ids ? start : kAbsent;
}

__device__ __forceinline__ uint4 load(const uint4* p) { return ldg16(p); }
__device__ __forceinline__ uint2 load(const uint2* p) { return __ldcs(p); }
__device__ __forceinline__ void store(uint4* p, const uint4& v) { stg16(p, v); }
__device__ __forceinline__ void store(uint2* p, const uint2& v) { __stcs(p, v); }

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }
