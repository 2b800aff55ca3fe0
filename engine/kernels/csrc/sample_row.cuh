// Sampling parameters of one row, its logits after penalties, mask and bans, and its weights.
//
// Every value here is a pure function of the row: neither its place in the batch nor the number of
// thread blocks changes a bit. Operations that must round as NumPy does use intrinsics, which
// the compiler does not contract.
#pragma once
#include "device.cuh"

constexpr int kGroup = 64;     // entries under one maximum: 256 bytes of float32
constexpr int kSumBlock = 128; // entries of a running sum's block (docs/sampling.md)
constexpr int kChunk = 4096;   // entries of a thread block in the passes over the vocabulary
constexpr int kChunkGroups = kChunk / kGroup, kChunkSums = kChunk / kSumBlock;
constexpr int kMaxGroups = 4096;
constexpr int kMaxChunks = kMaxGroups / kChunkGroups, kMaxSums = kMaxChunks * kChunkSums;
constexpr unsigned kAll = 0xffffffffu;
constexpr unsigned kWeightOfBest = 0x3f800000u;  // 1
constexpr unsigned kInfinity = 0x7f800000u;

// engine/kernels/cuda/sampling.py packs it.
struct SampleRow {
    unsigned long long seed;
    long long position;
    double top_p;
    float temperature, min_p, repetition, frequency, presence;
    int top_k;     // 0: all
    int logprobs;  // most likely tokens to report; 0: no log-probabilities
    int mask;      // row of `masks`, -1: every token is allowed
    int history;   // row of `seen` and `counts`, -1: no penalties
    int banned;    // how many of `ban` are set
    int ban[8];
};

__device__ __forceinline__ bool is_greedy(const SampleRow& row) {
    return row.top_k == 1 || (__float_as_uint(row.temperature) << 1) == 0;
}
__device__ __forceinline__ bool keeps_top_k(const SampleRow& row, int vocab) {
    return row.top_k > 0 && row.top_k < vocab;
}
// True if the draw needs the sum of the weights of all tokens.
__device__ __forceinline__ bool sums_all(const SampleRow& row, int vocab) {
    return !is_greedy(row) && !keeps_top_k(row, vocab) &&
           (row.top_p < 1.0 || (__float_as_uint(row.min_p) << 1) == 0);
}

// ---------------------------------------------------------------- logits

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float4 load4(const float* p) {
    return __ldcg(reinterpret_cast<const float4*>(p));
}
__device__ __forceinline__ float4 load4(const bf16* p) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
    float4 f;
    f.x = low_bf16(v.x), f.y = high_bf16(v.x), f.z = low_bf16(v.y), f.w = high_bf16(v.y);
    return f;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return bf16_to_float(x); }

template <class T> struct RowLogits {
    const T* logits;
    const unsigned* allowed;  // bit per token, or null
    const unsigned* seen;     // bit per token of prompt or answer, or null
    const int* counts;        // how often a token was generated
    const SampleRow* row;
    int vocab;
    bool inside;

    __device__ __forceinline__ RowLogits(const T* all, int stride, int vocab_, const SampleRow* rows,
                                         const unsigned* masks, const unsigned* all_seen,
                                         const int* all_counts, int mask_rows, int history_rows, int at)
        : logits(all + static_cast<long long>(at) * stride), allowed(nullptr), seen(nullptr),
          counts(nullptr), vocab(vocab_) {
        const long long words = (vocab + 31) / 32;
#ifdef BATON_PLANT_SAMPLE_STALE_ROW
        row = rows;
#else
        row = rows + at;
#endif
        inside = row->mask < mask_rows && row->history < history_rows && row->banned >= 0 &&
                 row->banned <= 8;
        if (!inside) return;
        if (row->mask >= 0) allowed = masks + row->mask * words;
        if (row->history < 0) return;
        seen = all_seen + row->history * words;
        counts = all_counts + row->history * static_cast<long long>(vocab);
    }

    // True if the mask and history that the row names exist.
    __device__ __forceinline__ bool valid() const { return inside; }
    __device__ __forceinline__ bool plain() const { return !allowed && !seen && (row->banned == 0 || !inside); }

    // Logits i .. i+3 (i % 4 == 0); minus infinity after the end of the vocabulary.
    __device__ __forceinline__ float4 raw(int i) const {
        float4 x;
        x.x = x.y = x.z = x.w = minus_infinity();
        if (i >= vocab) return x;
        x = load4(logits + i);
        if (i + 3 < vocab) return x;
        if (i + 1 >= vocab) x.y = minus_infinity();
        if (i + 2 >= vocab) x.z = minus_infinity();
        x.w = minus_infinity();
        return x;
    }

    // The same after penalties, bans and mask.
    __device__ __forceinline__ float4 adjust(float4 x, int i) const {
        if (i >= vocab) return x;
        if (seen) {
            unsigned here = seen[i >> 5] >> (i & 31) & 0xfu;
#pragma unroll 1
            for (; here; here &= here - 1) {  // few tokens were seen: short code is faster
                const int j = __ffs(static_cast<int>(here)) - 1;
                const float y = penalized(j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w, i + j);
                if (j == 0) x.x = y;
                if (j == 1) x.y = y;
                if (j == 2) x.z = y;
                if (j == 3) x.w = y;
            }
        }
#pragma unroll 1
        for (int n = 0; n < row->banned && inside; n++) {
            const int at = row->ban[n] - i;
            if (at == 0) x.x = minus_infinity();
            if (at == 1) x.y = minus_infinity();
            if (at == 2) x.z = minus_infinity();
            if (at == 3) x.w = minus_infinity();
        }
#ifndef BATON_PLANT_SAMPLE_MASK
        if (allowed) {
            const unsigned here = allowed[i >> 5] >> (i & 31);
            if (!(here & 1u)) x.x = minus_infinity();
            if (!(here & 2u)) x.y = minus_infinity();
            if (!(here & 4u)) x.z = minus_infinity();
            if (!(here & 8u)) x.w = minus_infinity();
        }
#endif
        return x;
    }

    __device__ __forceinline__ float4 adjusted(int i) const { return adjust(raw(i), i); }

  private:
    __device__ __forceinline__ float penalized(float x, int id) const {
        const float repetition = row->repetition;
        if (repetition != 1.0f) x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        const int count = counts[id];
        if (count == 0) return x;
        x = __fsub_rn(x, __fmul_rn(row->frequency, static_cast<float>(count)));
        return __fsub_rn(x, row->presence);
    }
};

// The larger value; NaN if one of them is NaN.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ float larger(const float4& x) {
    return larger(larger(x.x, x.y), larger(x.z, x.w));
}

// The row's largest logit from the maxima of its chunks, in every lane. Whole warps only.
__device__ __forceinline__ float row_maximum(const float* chunk_maxima, int chunks) {
    float best = minus_infinity();
#ifdef BATON_PLANT_SAMPLE_CHUNKS
    chunks = min(chunks, 32);
#endif
    for (int c = threadIdx.x % 32; c < chunks; c += 32) best = larger(best, __ldcg(chunk_maxima + c));
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1)
        best = larger(best, __shfl_xor_sync(kAll, best, lanes));
    return best;
}
__device__ __forceinline__ bool is_finite(float x) {
    return (__float_as_uint(x) & kInfinity) != kInfinity;
}

// ---------------------------------------------------------------- weights

// exp(x) for x <= 0, 0 below -87: within 0.88 of a unit in the last place. It uses only fused
// multiply-adds, so the bits are the same on every device. If it is not monotonic, the error is one
// unit. Reduction by the nearest power of 2, then a polynomial fitted to the remainder.
__device__ __forceinline__ float exp_weight(float x) {
    const float shifted = __fmaf_rn(x, 0x1.715476p+0f, 12582912.0f);
    const float power = __fsub_rn(shifted, 12582912.0f);
    float r = __fmaf_rn(power, -0x1.62e4p-1f, x);
    r = __fmaf_rn(power, -0x1.7f7d1cp-20f, r);
    float p = __fmaf_rn(r, 0x1.6a215ap-10f, 0x1.123b9ap-7f);
    p = __fmaf_rn(p, r, 0x1.5558fcp-5f);
    p = __fmaf_rn(p, r, 0x1.55549p-3f);
    p = __fmaf_rn(p, r, 0x1.fffffcp-2f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    const unsigned bits = (__float_as_uint(shifted) << 23) + __float_as_uint(p);
    return x < -87.0f ? 0.0f : __uint_as_float(bits);
}
constexpr unsigned kWeightSlack = 4;  // above the largest deviation from monotonic

// Division by the temperature: two products and a correction of the quotient.
struct Temperature {
    float value, inverse;

    __device__ __forceinline__ explicit Temperature(float t) {
        // Limited to 2^-126 .. 2^126: denormals, also of the inverse, would be flushed to 0.
        value = __uint_as_float(min(max(__float_as_uint(t), 0x00800000u), 0x7e800000u));
        inverse = __frcp_rn(value);
    }
    __device__ __forceinline__ float divide(float x) const {
        const float q = __fmul_rn(x, inverse);
        const float rest = __fmaf_rn(-q, value, x);
        return q < -128.0f ? q : __fmaf_rn(rest, inverse, q);  // weight 0; and -inf - -inf is NaN
    }
};

// ---------------------------------------------------------------- random numbers

// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011), the first two
// words as a multiple of 2^-53 in [0, 1); engine/philox.py.
__device__ __forceinline__ double uniform(unsigned long long seed, long long position) {
    unsigned c0 = static_cast<unsigned>(position), c1 = 0, c2 = 0;
    unsigned c3 = static_cast<unsigned>(static_cast<unsigned long long>(position) >> 32);
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
        const unsigned high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    const unsigned long long bits = (static_cast<unsigned long long>(c0 >> 5) << 26) + (c1 >> 6);
    return static_cast<double>(static_cast<long long>(bits)) * (1.0 / 9007199254740992.0);
}
