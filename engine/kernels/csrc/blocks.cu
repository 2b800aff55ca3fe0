// Moves KV blocks between a paged pool and a contiguous payload (geometry.cuh), or between two pools.
// One pass over the bytes selects the heads of one shard, changes block size and element type, and
// computes the digest of the payload.
//
// In kernels that only copy or read a payload, a warp takes one *piece* of a run at a time. In kernels
// that quantise, a thread block takes a tile (quantize.cuh). Grids of any size step through all work.
#include "codes.cuh"
#include "digest.cuh"
#include "geometry.cuh"
#include "quantize.cuh"

// The current piece of a warp.
struct Piece {
    long long in_pool, in_payload;  // vectors; in_pool may be kAbsent
    unsigned vectors;
    unsigned tile, first;  // of its run's tile: number and first vector
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

// pool -> payload, without scales. After the pool's last block the payload is filled with zeros.
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

// Adds the digest of a tile's scales, by one warp.
__device__ __forceinline__ u64 digest_of_scales(const float* scales, const Geometry& g,
                                                unsigned tile, unsigned lane) {
    const unsigned words = g.scales / 2;
    const uint2* const at = reinterpret_cast<const uint2*>(scales) + static_cast<u64>(tile) * words;
    const u64 index = g.scales_at / 8 + static_cast<u64>(tile) * words;
    u64 sum = 0;
    for (unsigned i = lane; i < words; i += 32) sum += digest_of(__ldg(at + i), key_of(index + i));
    return sum;
}

// payload -> pool. Payload after the pool's last block is included in the digest but not written.
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

// pool -> pool with the same heads and block size; with kWrite false, only the digest. With kReslice,
// heads or block size may differ, and tokens without a source block become zeros. The digest is the one
// of the payload that a gather would write.
template <bool kWrite, bool kReslice = false>
__device__ __forceinline__ u64 copy_pieces(const uint4* __restrict__ source,
                                           const int* __restrict__ source_ids, const Geometry& here,
                                           uint4* __restrict__ target,
                                           const int* __restrict__ target_ids,
                                           const Geometry& there) {
    constexpr int kSlots = 4;
    const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    u64 sum = 0;
    for (unsigned number = (blockIdx.x * blockDim.x + threadIdx.x) / 32; number < here.pieces;
         number += warps) {
        const Piece p = piece_at<kSlots>(here, source_ids, number);
        const uint4* const from = source + p.in_pool + lane;
        const unsigned present = kReslice && p.in_pool == kAbsent ? 0 : p.vectors;
        uint4* to = nullptr;
        if (kReslice) {
            const Split run = split(p.first, there.run_vectors);
            to = target + run_in_pool(there, target_ids, place_of(there, p.tile), run.quotient) +
                 run.rest + lane;
        } else if (kWrite)
            to = target + run_in_pool(there, target_ids, place_of(there, p.tile), 0) + p.first + lane;
        const u64 key = key_of((p.in_payload + lane) * 2);
        uint4 held[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; s++)
            held[s] = lane + 32 * s < present ? load(from + 32 * s) : zeros();
#pragma unroll
        for (int s = 0; s < kSlots; s++) {
            if (lane + 32 * s >= p.vectors) continue;
            if (kWrite) store(to + 32 * s, held[s]);
            sum += digest_of(held[s], key + 64 * s * kPlace);
        }
    }
    return sum;
}

// ---------------------------------------------------------------- kernels

// Threads of a piece kernel, and thread blocks of it that fit on an SM: 4 x 256 threads with 4 x 16 bytes
// each in flight are 64 KiB, several times what is needed to hide the latency of the memory.
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
    extern "C" __global__ void __launch_bounds__(512, BATON_TILE_BLOCKS) gather_##name(            \
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

extern "C" __global__ void PIECES copy_bf16(
    const uint4* __restrict__ source, const int* __restrict__ source_ids, const Geometry here,
    uint4* __restrict__ target, const int* __restrict__ target_ids, const Geometry there,
    u64* workspace, u64* digest) {
    const u64 sum = copy_pieces<true>(source, source_ids, here, target, target_ids, there);
    finish_digest(sum, here.payload_bytes, workspace, digest);
}
extern "C" __global__ void PIECES reslice_bf16(
    const uint4* __restrict__ source, const int* __restrict__ source_ids, const Geometry here,
    uint4* __restrict__ target, const int* __restrict__ target_ids, const Geometry there,
    u64* workspace, u64* digest) {
    const u64 sum = copy_pieces<true, true>(source, source_ids, here, target, target_ids, there);
    finish_digest(sum, here.payload_bytes, workspace, digest);
}
extern "C" __global__ void PIECES sum_bf16(const uint4* __restrict__ pool,
                                           const int* __restrict__ ids, u64* workspace, u64* digest,
                                           const Geometry g) {
    const u64 sum = copy_pieces<false>(pool, ids, g, nullptr, nullptr, g);
    finish_digest(sum, g.payload_bytes, workspace, digest);
}
