// Rows of an int8 KV pool on a GPU: the numbers of kv_rows.h, laid out for tensor cores.
//
// A row is the keys or values of one token and head: D codes q and the row's largest magnitude m as bf16.
// Its values are q * (m / 127), rounded to 8 significant bits. Eight tokens of a block and head form a
// *group*: their rows of D codes, then their eight magnitudes, 8 (D + 2) bytes in all. So every row of
// codes and the magnitudes of a group are aligned to 16 bytes, and row r of a pool begins at
// (r - r % 8) (D + 2) + (r % 8) D.
//
// Codes are stored as the byte q + 128. Of each 16 dims, the order of the bytes is 0 1 8 9, 2 3 10 11, and
// so on: then ldmatrix gives a lane the two pairs of dims that its fragment of mma.m16n8k16 needs.
//
// A byte c becomes the float 2^15 + c by one permutation, and q * s by one multiplication and addition:
// with s of 16 significant bits the sum is exact, and rounding it to bf16 gives the value of the code.
// tests/cuda/test_int8_rows.py tries all codes with all m of a binade. Magnitudes from 2^112 on overflow
// here, and are read as numbers that are not finite.
#pragma once
#include "device.cuh"

constexpr int kCodeGroup = 8;  // tokens of a group
constexpr float kCodes = 127.0f;
constexpr unsigned kLeastBits = 27u << 23;  // 2^-100: rows of smaller numbers are zeros

// What turns the codes of a row into values.
struct Step {
    float by, base;
};

__device__ __forceinline__ Step step_of(unsigned magnitude_bits) {  // bits of a float
    const float step = __uint_as_float(magnitude_bits) * (1.0f / kCodes);
#ifdef BATON_PLANT_STEP_BITS
    const float by = __uint_as_float(__float_as_uint(step) & 0xffff8000u);
#else
    const float by = __uint_as_float((__float_as_uint(step) + 0x80u) & 0xffffff00u);
#endif
    return {by, by * -32896.0f};
}

template <int kByte> __device__ __forceinline__ float code_value(unsigned word, const Step& step) {
    const float shifted = __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404 | kByte << 4));
    return fmaf(shifted, step.by, step.base);
}

// Two values as a pair of bf16, the first in the low half.
template <int kFirst, int kSecond>
__device__ __forceinline__ unsigned two_values(unsigned word, const Step& first, const Step& second) {
    return pack_bf16(code_value<kFirst>(word, first), code_value<kSecond>(word, second));
}

// The largest magnitude of a row as bf16, from the largest bits of its floats without signs; 0 for rows that
// are zeros, NaN for rows with a number that is not finite.
__device__ __forceinline__ unsigned magnitude_of(unsigned top) {
    if (top < kLeastBits) return 0u;
    const unsigned half = float_to_bf16(__uint_as_float(top));
    return top > 0x7f800000u || half >= 0x7f80u ? 0x7fffu : half;
}

// The byte of a number's code, in the low byte: adding rounds to the nearest unit, ties to even.
__device__ __forceinline__ unsigned code_of(float x, float inverse) {
#ifdef BATON_PLANT_TRUNCATE
    return static_cast<unsigned>(static_cast<int>(__fmul_rn(x, inverse)) + 128);
#else
    return __float_as_uint(__fadd_rn(__fmul_rn(x, inverse), 12582912.0f + 128.0f));
#endif
}
__device__ __forceinline__ unsigned four_codes(const float* x, float inverse) {
    const unsigned low = __byte_perm(code_of(x[0], inverse), code_of(x[1], inverse), 0x0040);
    const unsigned high = __byte_perm(code_of(x[2], inverse), code_of(x[3], inverse), 0x0040);
    return __byte_perm(low, high, 0x5410);
}
