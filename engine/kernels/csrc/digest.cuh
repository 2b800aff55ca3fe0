// The digest of a payload: a sum over its 64-bit words, each mixed with its position, so any thread
// may add any word in any order (decision 12; engine/kernels/digest.py is the same in NumPy).
//
// Source: randomize-then-combine (Bellare and Micciancio 1997, "AdHash") with addition modulo 2^64;
// the mixing is the final avalanche of XXH64, a bijection of 64-bit words.
#pragma once
#include "device.cuh"

typedef unsigned long long u64;

static constexpr u64 kPlace = 0x9E3779B185EBCA87ull;  // XXH64's primes: 1, 5, 2, 3, 4
static constexpr u64 kStart = 0x27D4EB2F165667C5ull;
static constexpr u64 kMix1 = 0xC2B2AE3D27D4EB4Full;
static constexpr u64 kMix2 = 0x165667B19E3779F9ull;
static constexpr u64 kLength = 0x85EBCA77C2B2AE63ull;

__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 33)) * kMix1;
    x = (x ^ (x >> 29)) * kMix2;
    return x ^ (x >> 32);
}

// Key of the word at `index`; the keys of words k apart differ by k * kPlace.
__device__ __forceinline__ u64 key_of(u64 index) { return kStart + index * kPlace; }

__device__ __forceinline__ u64 word_of(unsigned low, unsigned high) {
    return (u64)high << 32 | low;
}
__device__ __forceinline__ u64 digest_of(uint2 words, u64 key) {
    return mixed(word_of(words.x, words.y) ^ key);
}
__device__ __forceinline__ u64 digest_of(uint4 words, u64 key) {
    return mixed(word_of(words.x, words.y) ^ key) +
           mixed(word_of(words.z, words.w) ^ (key + kPlace));
}

// Adds up the sums of all threads of the grid. The last thread block writes the digest and resets
// `workspace` (two zero words before the first launch) to zero. All threads must call this.
__device__ __forceinline__ void finish_digest(u64 sum, u64 bytes, u64* workspace, u64* digest) {
    __shared__ u64 of_warp[32];
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll 1
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) sum += of_warp[warp];
    atomicAdd(workspace, sum);
    __threadfence();  // the sum must be visible before the ticket
    if (atomicAdd(workspace + 1, 1ull) != gridDim.x - 1) return;
    __threadfence();
    *digest = mixed(atomicExch(workspace, 0ull) + bytes * kLength);
    atomicExch(workspace + 1, 0ull);
}
