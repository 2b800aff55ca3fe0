// KV blocks on the move: a paged pool [L, NB, 2, Hk, BS, D] of bf16 to and from a contiguous
// payload [layers, blocks, 2, heads, payload BS, D], with the heads of one shard, another block
// size, another element type and the digest of the payload, all in one pass over the bytes.
//
// A *vector* is 8 elements: 16 bytes of bf16 or fp16, 8 bytes of fp8 or int8. A *run* is contiguous
// on both sides: a block, the heads of a shard, or the tokens that both block sizes share; runs follow
// each other in the payload. A *tile* is the runs of one (block, K/V, head) of the payload, or the one
// run that joins several of them. With scales tiles are never joined; theirs (one, or one per token,
// an even number with padding) lie behind all elements.
//
// What only copies or reads a payload gives a warp a *piece* of a run at a time. What quantises
// gives a thread block a tile at a time, which stays in registers between the search for its
// largest number and the conversion. Grids may have any size; they step through all the work.
#include "codes.cuh"
#include "digest.cuh"

struct Divisor {
    unsigned by, factor, shift;
};

// What all threads know; engine/kernels/cuda/geometry.py fills it in.
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

// Where a tile lies in the pool: its K/V side and head in block 0, and its first run among those of
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

// Where run `k` of a tile begins in the pool; kAbsent behind the pool's last block.
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

// The piece a warp has in hand.
struct Piece {
    long long in_pool, in_payload;  // vectors; in_pool may be kAbsent
    unsigned vectors;
    unsigned tile, first;  // of its run's tile: number, first vector
};

template <int kSlots>
__device__ __forceinline__ Piece piece_at(const Geometry& g, const int* __restrict__ ids,
                                          unsigned number) {
    const Split run = split(number, g.pieces_per_run), k = split(run.quotient, g.runs_per_tile);
    const unsigned start = run.rest * (32 * kSlots), left = g.run_vectors.by - start;
    const long long in_pool = run_in_pool(g, ids, place_of(g, k.quotient), k.rest);
    Piece p;
    p.in_pool = in_pool == kAbsent ? kAbsent : in_pool + start;
    p.in_payload = static_cast<long long>(run.quotient) * g.run_vectors.by + start;
    p.vectors = min(left, 32u * kSlots);
    p.tile = k.quotient, p.first = k.rest * g.run_vectors.by + start;
    return p;
}

// pool -> payload, without scales. Behind the pool's last block the payload gets zeros.
template <class Codec, int kSlots>
__device__ __forceinline__ u64 gather_pieces(const uint4* __restrict__ pool,
                                             typename Codec::Packed* __restrict__ payload,
                                             const int* __restrict__ ids, const Geometry& g) {
    typedef typename Codec::Packed Packed;
    constexpr u64 kWords = sizeof(Packed) / 8;
    const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    u64 sum = 0;
    for (unsigned number = (blockIdx.x * blockDim.x + threadIdx.x) / 32; number < g.pieces;
         number += warps) {
        const Piece p = piece_at<kSlots>(g, ids, number);
        const unsigned present = p.in_pool == kAbsent ? 0 : p.vectors;
        const uint4* const from = pool + p.in_pool + lane;
        Packed* const to = payload + p.in_payload + lane;
        const u64 key = key_of((p.in_payload + lane) * kWords);
        uint4 held[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; s++)
            held[s] = lane + 32 * s < present ? load(from + 32 * s) : zeros();
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
            if (lane + 32 * s >= p.vectors) continue;
            const Packed packed = Codec::pack(held[s]);
            store(to + 32 * s, packed);
            sum += digest_of(packed, key + 32 * s * kWords * kPlace);
        }
    }
    return sum;
}

// The digest of a tile's scales, by one warp.
__device__ __forceinline__ u64 digest_of_scales(const float* scales, const Geometry& g,
                                                unsigned tile, unsigned lane) {
    const unsigned words = g.scales / 2;
    const uint2* const at = reinterpret_cast<const uint2*>(scales) + static_cast<u64>(tile) * words;
    const u64 index = g.scales_at / 8 + static_cast<u64>(tile) * words;
    u64 sum = 0;
    for (unsigned i = lane; i < words; i += 32) sum += digest_of(__ldg(at + i), key_of(index + i));
    return sum;
}

// payload -> pool. What lies behind the pool's last block is summed and dropped.
template <class Codec, bool kPerToken, int kSlots>
__device__ __forceinline__ u64 scatter_pieces(const typename Codec::Packed* __restrict__ payload,
                                              uint4* __restrict__ pool,
                                              const int* __restrict__ ids, const Geometry& g) {
    typedef typename Codec::Packed Packed;
    constexpr u64 kWords = sizeof(Packed) / 8;
    const float* const scales =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(payload) + g.scales_at);
    const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    u64 sum = 0;
    for (unsigned number = (blockIdx.x * blockDim.x + threadIdx.x) / 32; number < g.pieces;
         number += warps) {
        const Piece p = piece_at<kSlots>(g, ids, number);
        const Packed* const from = payload + p.in_payload + lane;
        uint4* const to = pool + p.in_pool + lane;
        const u64 key = key_of((p.in_payload + lane) * kWords);
        const float* const of_tile = scales + static_cast<u64>(p.tile) * g.scales;
        const float scale = Codec::kScaled && !kPerToken ? __ldg(of_tile) : 1.0f;
        Packed held[kSlots];
        float of_token[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
            if (lane + 32 * s >= p.vectors) continue;
            held[s] = load(from + 32 * s);
            if (kPerToken)
                of_token[s] = __ldg(of_tile + split(p.first + lane + 32 * s, g.token_vectors).quotient);
        }
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
            if (lane + 32 * s >= p.vectors) continue;
            sum += digest_of(held[s], key + 32 * s * kWords * kPlace);
            if (p.in_pool == kAbsent) continue;
            store(to + 32 * s, Codec::unpack(held[s], kPerToken ? of_token[s] : scale));
        }
        if (Codec::kScaled && p.first == 0) sum += digest_of_scales(scales, g, p.tile, lane);
    }
    return sum;
}

static constexpr int kTileSlots = 8;  // vectors of a tile that a thread holds

__device__ __forceinline__ void barrier_of_a_tile() {
#ifndef BATON_PLANT_NO_BARRIER
    __syncthreads();
#endif
}

// Of `rows` largest numbers (bits of bf16; a row is a token, or all of the tile) three sets are used
// in turns. The next tile's is cleared before this tile's barrier; it was last read before the
// barrier of the tile before.
class Peaks {
  public:
    __device__ __forceinline__ Peaks(unsigned* of_all, unsigned rows)
        : of_all_(of_all), rows_(rows), turn_(0) {
        for (unsigned i = threadIdx.x; i < 3 * rows; i += blockDim.x) of_all[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ unsigned* now() const { return of_all_ + turn_ * rows_; }
    // All threads have raised the peaks of this tile; clears those of the next.
    __device__ __forceinline__ void complete() const {
#ifndef BATON_PLANT_STALE_SCALE
        unsigned* const next = of_all_ + (turn_ == 2 ? 0 : turn_ + 1) * rows_;
        for (unsigned i = threadIdx.x; i < rows_; i += blockDim.x) next[i] = 0;
#endif
        barrier_of_a_tile();
    }
    __device__ __forceinline__ void next_tile() { turn_ = turn_ == 2 ? 0 : turn_ + 1; }

  private:
    unsigned* of_all_;
    unsigned rows_, turn_;
};

// What a thread holds of a tile; zeros behind the tile and behind the pool.
struct Share {
    uint4 held[kTileSlots];
    bool finite;  // all of it
};

__device__ __forceinline__ void load_tile(const Geometry& g, const uint4* __restrict__ pool,
                                          const int* __restrict__ ids, unsigned tile,
                                          Share& share) {
    const Place place = place_of(g, tile);
    const unsigned thread = threadIdx.x, threads = blockDim.x;
    if (g.runs_per_tile.by == 1) {
        const long long start = run_in_pool(g, ids, place, 0);
        const unsigned present = start == kAbsent ? 0 : g.tile_vectors;
        const uint4* const from = pool + start + thread;
#pragma unroll
        for (int s = 0; s < kTileSlots; s++)
            share.held[s] = thread + s * threads < present ? load(from + s * threads) : zeros();
        return;
    }
#pragma unroll
    for (int s = 0; s < kTileSlots; s++) {
        const Split run = split(thread + s * threads, g.run_vectors);
        const long long start = run_in_pool(g, ids, place, run.quotient);
        const bool present = thread + s * threads < g.tile_vectors && start != kAbsent;
        share.held[s] = present ? load(pool + start + run.rest) : zeros();
    }
}

// Raises the peak of a tile with one scale.
__device__ __forceinline__ void raise_peak(Share& share, unsigned* peak) {
    unsigned two = magnitudes_of(share.held[0]);
#pragma unroll
    for (int s = 1; s < kTileSlots; s++) two = max_bf16x2(two, magnitudes_of(share.held[s]));
    unsigned largest = larger_half(two);
    share.finite = largest < kInfinityBits;
    if (!share.finite) {
        largest = 0;
#pragma unroll
        for (int s = 0; s < kTileSlots; s++) largest = max(largest, largest_finite(share.held[s]));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) atomicMax(peak, largest);
}

// Raises the peak of each token of a tile. Up to four neighbouring lanes share a token as far as the
// power of two that divides its vectors goes; one of them speaks for all.
__device__ __forceinline__ void raise_peaks(const Geometry& g, Share& share, unsigned* peaks) {
    const unsigned width = g.token_vectors.by, lanes = width % 4 == 0 ? 4 : width % 2 == 0 ? 2 : 1;
    share.finite = true;
#pragma unroll
    for (int s = 0; s < kTileSlots; s++) {
        const unsigned v = threadIdx.x + s * blockDim.x;
        unsigned largest = larger_half(magnitudes_of(share.held[s]));
        if (largest >= kInfinityBits) {
            share.finite = false;
            largest = largest_finite(share.held[s]);
        }
        if (lanes > 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        if (lanes > 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (v < g.tile_vectors && v % lanes == 0)
            atomicMax(peaks + split(v, g.token_vectors).quotient, largest);
    }
}

// Writes a tile's scales, two to a word, the last with zero beside it if it is alone; and their
// factors to shared memory.
template <class Codec>
__device__ __forceinline__ u64 write_scales(const Geometry& g, const unsigned* peaks, unsigned rows,
                                            unsigned tile, uint2* __restrict__ payload,
                                            float* factors) {
    const u64 index = g.scales_at / 8 + static_cast<u64>(tile) * (g.scales / 2);
    u64 sum = 0;
    for (unsigned i = threadIdx.x; i < g.scales / 2; i += blockDim.x) {
        const Scaling low = scaling_for<Codec>(peaks[2 * i]);
        Scaling high = {0.0f, 0.0f};
        if (2 * i + 1 < rows) high = scaling_for<Codec>(peaks[2 * i + 1]);
        factors[2 * i] = low.factor, factors[2 * i + 1] = high.factor;
        const uint2 word = make_uint2(__float_as_uint(low.scale), __float_as_uint(high.scale));
        store(payload + index + i, word);
        sum += digest_of(word, key_of(index + i));
    }
    return sum;
}

// pool -> payload with scales: one thread block per tile, one read of it.
template <class Codec, bool kPerToken>
__device__ __forceinline__ u64 quantize_tiles(const uint4* __restrict__ pool,
                                              uint2* __restrict__ payload,
                                              const int* __restrict__ ids, const Geometry& g,
                                              unsigned* shared) {
    const unsigned rows = kPerToken ? split(g.tile_vectors, g.token_vectors).quotient : 1;
    float* const factors = reinterpret_cast<float*>(shared + 3 * rows);  // rounded up to even
    Peaks peaks(shared, rows);
    u64 sum = 0;
    for (unsigned tile = blockIdx.x; tile < g.tiles; tile += gridDim.x, peaks.next_tile()) {
        Share share;
        load_tile(g, pool, ids, tile, share);
        unsigned* const peak = peaks.now();
        if (kPerToken) raise_peaks(g, share, peak);
        else raise_peak(share, peak);
        peaks.complete();
        sum += write_scales<Codec>(g, peak, rows, tile, payload, factors);
        barrier_of_a_tile();
        const u64 start = static_cast<u64>(tile) * g.tile_vectors + threadIdx.x;
        const u64 key = key_of(start), key_step = blockDim.x * kPlace;
        uint2* const to = payload + start;
#pragma unroll
        for (int s = 0; s < kTileSlots; s++) {
            const unsigned v = threadIdx.x + s * blockDim.x;
            if (v >= g.tile_vectors) continue;
            const unsigned row = kPerToken ? split(v, g.token_vectors).quotient : 0;
            uint4 vector = share.held[s];
            if (!share.finite) vector = Codec::prepared(vector, peak[row]);
            const uint2 packed = Codec::pack(vector, factors[row]);
            store(to + s * blockDim.x, packed);
            sum += digest_of(packed, key + s * key_step);
        }
    }
    return sum;
}

// ---------------------------------------------------------------- kernels

// Threads of a piece kernel, and thread blocks to an SM they leave room for: 4 x 256 threads with
// 4 x 16 bytes each in flight are 64 KiB, several times what hides the memory's latency.
#define PIECES __launch_bounds__(256, 4)

#define GATHER(name, Codec)                                                                        \
    extern "C" __global__ void PIECES gather_##name(                                               \
        const uint4* __restrict__ pool, uint4* __restrict__ payload, const int* __restrict__ ids,  \
        u64* workspace, u64* digest, const Geometry g) {                                           \
        const u64 sum = gather_pieces<Codec, 4>(pool, payload, ids, g);                            \
        finish_digest(sum, g.payload_bytes, workspace, digest);                                    \
    }
#define SCATTER(name, Codec, per_token, slots)                                                     \
    extern "C" __global__ void PIECES scatter_##name(                                              \
        uint4* __restrict__ pool, const Codec::Packed* __restrict__ payload,                       \
        const int* __restrict__ ids, u64* workspace, u64* digest, const Geometry g) {              \
        const u64 sum = scatter_pieces<Codec, per_token, slots>(payload, pool, ids, g);            \
        finish_digest(sum, g.payload_bytes, workspace, digest);                                    \
    }
#define QUANTIZE(name, Codec, per_token)                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2) gather_##name(                              \
        const uint4* __restrict__ pool, uint2* __restrict__ payload, const int* __restrict__ ids,  \
        u64* workspace, u64* digest, const Geometry g) {                                           \
        DYNAMIC_SHARED(shared);                                                                    \
        const u64 sum = quantize_tiles<Codec, per_token>(pool, payload, ids, g,                    \
                                                         reinterpret_cast<unsigned*>(shared));     \
        finish_digest(sum, g.payload_bytes, workspace, digest);                                    \
    }

GATHER(bf16, Copy)
GATHER(fp16, Half)
QUANTIZE(fp8_head, Fp8, false)
QUANTIZE(fp8_token, Fp8, true)
QUANTIZE(int8_head, Int8, false)
QUANTIZE(int8_token, Int8, true)
SCATTER(bf16, Copy, false, 4)
SCATTER(fp16, Half, false, 4)
SCATTER(fp8_head, Fp8, false, 8)
SCATTER(fp8_token, Fp8, true, 8)
SCATTER(int8_head, Int8, false, 8)
SCATTER(int8_token, Int8, true, 8)
