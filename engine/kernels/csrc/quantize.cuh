// Quantises from the pool to the payload. A thread block takes one tile at a time and keeps
// it in registers between the search for its largest number and the conversion: one read, whatever
// the granularity of the scales.
#pragma once
#include "codes.cuh"
#include "digest.cuh"
#include "geometry.cuh"

static constexpr int kTileSlots = 8;  // vectors of a tile that a thread holds

__device__ __forceinline__ void barrier_of_a_tile() {
#ifndef BATON_PLANT_NO_BARRIER
    __syncthreads();
#endif
}

// Three sets of `rows` largest numbers (bits of bf16; a row is a token, or the whole tile) are used
// in rotation. The next tile's set is cleared before this tile's barrier; it was last read before the
// previous tile's barrier.
class Peaks {
  public:
    __device__ __forceinline__ Peaks(unsigned* of_all, unsigned rows)
        : of_all_(of_all), rows_(rows), turn_(0) {
        for (unsigned i = threadIdx.x; i < 3 * rows; i += blockDim.x) of_all[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ unsigned* now() const { return of_all_ + turn_ * rows_; }
    // Call after all threads have raised the maxima of this tile; clears those of the next.
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

// The part of a tile that a thread holds; zeros after the end of the tile and of the pool.
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

// Raises the maximum of a tile with one scale.
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

// Raises the maximum of each token of a tile. Up to four neighbouring lanes share a token, as far as
// the power of two in its number of vectors allows; one lane writes for all of them.
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

// Writes a tile's scales, two to a word, padding a single last scale with zero; and their
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

// pool -> payload with scales: one thread block and one read per tile.
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
