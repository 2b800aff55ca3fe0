// Element types of a payload. A codec converts a vector (8 bf16 elements) of the pool to its payload
// form and back.
//
// Each type has one NaN, so that every target gives the same bits: 0x7fff in bf16 and fp16, 0x7f in
// fp8; int8 has no NaN and stores 0. A value too large for a type, including infinity, becomes its
// largest number.
#pragma once
#include "device.cuh"

static constexpr unsigned kInfinityBits = 0x7f80;

struct Copy {
    typedef uint4 Packed;
    static constexpr bool kScaled = false;
    static __device__ __forceinline__ Packed pack(const uint4& v) { return v; }
    static __device__ __forceinline__ uint4 unpack(const Packed& p, float) { return p; }
};

struct Half {
    typedef uint4 Packed;
    static constexpr bool kScaled = false;
    static __device__ __forceinline__ unsigned pack_two(unsigned word) {
        return pack_half_saturating(low_bf16(word), high_bf16(word));
    }
    static __device__ __forceinline__ unsigned unpack_two(unsigned word) {
        return pack_bf16(half_to_float(static_cast<unsigned short>(word)),
                         half_to_float(static_cast<unsigned short>(word >> 16)));
    }
    static __device__ __forceinline__ Packed pack(const uint4& v) {
        return make_uint4(pack_two(v.x), pack_two(v.y), pack_two(v.z), pack_two(v.w));
    }
    static __device__ __forceinline__ uint4 unpack(const Packed& p, float) {
        return make_uint4(unpack_two(p.x), unpack_two(p.y), unpack_two(p.z), unpack_two(p.w));
    }
};

// Codecs with scales multiply by `factor` when encoding and by `scale` when decoding. A vector with a
// NaN or infinity is first passed through `prepared`; `largest` are the bits of its tile's largest
// finite magnitude.
struct Fp8 {
    typedef uint2 Packed;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 448.0f;

    static __device__ __forceinline__ unsigned pack_four(unsigned front, unsigned back, float factor) {
        return pack_fp8(low_bf16(front) * factor, high_bf16(front) * factor) |
               pack_fp8(low_bf16(back) * factor, high_bf16(back) * factor) << 16;
    }
    static __device__ __forceinline__ uint4 prepared(const uint4& v, unsigned) { return v; }
    static __device__ __forceinline__ Packed pack(const uint4& v, float factor) {
        return make_uint2(pack_four(v.x, v.y, factor), pack_four(v.z, v.w, factor));
    }
    static __device__ __forceinline__ unsigned unpack_two(unsigned word, float scale) {
        const float2 pair = unpack_fp8(word);
        return pack_bf16(pair.x * scale, pair.y * scale);
    }
    static __device__ __forceinline__ uint4 unpack(const Packed& p, float scale) {
        return make_uint4(unpack_two(p.x, scale), unpack_two(p.x >> 16, scale),
                          unpack_two(p.y, scale), unpack_two(p.y >> 16, scale));
    }
};

struct Int8 {
    typedef uint2 Packed;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 127.0f;
    static constexpr float kUnits = 12582912.0f;  // 1.5 * 2^23: floats near it are 1 apart

    static __device__ __forceinline__ unsigned prepared_half(unsigned bits, unsigned largest) {
        const unsigned size = bits & 0x7fffu;
        const unsigned finite = size > kInfinityBits ? 0 : largest;
        return size < kInfinityBits ? bits & 0xffffu : finite | (bits & 0x8000u);
    }
    static __device__ __forceinline__ unsigned prepared_two(unsigned word, unsigned largest) {
        return prepared_half(word, largest) | prepared_half(word >> 16, largest) << 16;
    }
    static __device__ __forceinline__ uint4 prepared(const uint4& v, unsigned largest) {
        return make_uint4(prepared_two(v.x, largest), prepared_two(v.y, largest),
                          prepared_two(v.z, largest), prepared_two(v.w, largest));
    }
    // The code of x in the low byte. Adding rounds to the nearest unit, ties to even.
    static __device__ __forceinline__ unsigned code_of(float x, float factor) {
        return __float_as_uint(__fmaf_rn(x, factor, kUnits));
    }
    static __device__ __forceinline__ unsigned pack_four(unsigned front, unsigned back, float factor) {
        const unsigned low = __byte_perm(code_of(low_bf16(front), factor),
                                         code_of(high_bf16(front), factor), 0x0040);
        const unsigned high = __byte_perm(code_of(low_bf16(back), factor),
                                          code_of(high_bf16(back), factor), 0x0040);
        return __byte_perm(low, high, 0x5410);
    }
    static __device__ __forceinline__ Packed pack(const uint4& v, float factor) {
        return make_uint2(pack_four(v.x, v.y, factor), pack_four(v.z, v.w, factor));
    }
    static __device__ __forceinline__ float number_at(unsigned word, int byte) {
        return static_cast<float>(static_cast<signed char>(word >> 8 * byte));
    }
    static __device__ __forceinline__ uint4 unpack(const Packed& p, float scale) {
        return make_uint4(pack_bf16(number_at(p.x, 0) * scale, number_at(p.x, 1) * scale),
                          pack_bf16(number_at(p.x, 2) * scale, number_at(p.x, 3) * scale),
                          pack_bf16(number_at(p.y, 0) * scale, number_at(p.y, 1) * scale),
                          pack_bf16(number_at(p.y, 2) * scale, number_at(p.y, 3) * scale));
    }
};

// ---------------------------------------------------------------- scales

// Magnitudes as bits of bf16, which have the order of the numbers. For each of two positions of a
// vector, returns the larger one, or NaN if one of them is NaN.
__device__ __forceinline__ unsigned magnitudes_of(const uint4& v) {
    constexpr unsigned kMagnitudes = 0x7fff7fffu;
    return max_bf16x2(max_bf16x2(v.x & kMagnitudes, v.y & kMagnitudes),
                      max_bf16x2(v.z & kMagnitudes, v.w & kMagnitudes));
}
__device__ __forceinline__ unsigned larger_half(unsigned two) {
    return max(two & 0xffffu, two >> 16);
}

// The largest finite magnitude of a vector that also contains other values.
__device__ __forceinline__ unsigned finite_or_zero(unsigned bits) {
    return (bits & 0x7fffu) < kInfinityBits ? bits & 0x7fffu : 0;
}
__device__ __forceinline__ unsigned largest_finite(const uint4& v) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        largest = max(largest, max(finite_or_zero(words[i]), finite_or_zero(words[i] >> 16)));
    return largest;
}

// A tile or token with all magnitudes below 2^-100 is treated as zeros: its scale and the scale's
// inverse would not fit into float32.
static constexpr unsigned kSmallestBits = 27u << 7;

struct Scaling {
    float scale, factor;
};

template <class Codec> __device__ __forceinline__ Scaling scaling_for(unsigned largest_bits) {
    if (largest_bits < kSmallestBits) return {0.0f, 1.0f};
    const float largest = __uint_as_float(largest_bits << 16);
    return {largest * (1.0f / Codec::kLargest), __fdiv_rn(Codec::kLargest, largest)};
}
