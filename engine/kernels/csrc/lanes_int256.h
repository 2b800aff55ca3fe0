/* 8 integer lanes of AVX2 for quantized_body.h; with DPBUSD, its dot product of bytes is used. */
#include <immintrin.h>

#include "quantized_values.h"

#define LANES 8
#define SIZES(F) F(1) F(2) F(3) F(4) F(8)

typedef __m256i ib, iv, part, scale;
typedef __m256 fv;
#define INLINE static inline __attribute__((always_inline))

INLINE ib b_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
/* bits of every byte, shifted right (left if negative) and masked */
INLINE ib b_bits(ib v, const int right, const int mask) {
    ib moved = right > 0 ? _mm256_srli_epi32(v, right)
               : right < 0 ? _mm256_slli_epi32(v, -right) : v;
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
INLINE ib b_or(ib a, ib b) { return _mm256_or_si256(a, b); }
INLINE ib b_look_up(ib v) {
    __m128i table = _mm_loadu_si128((const __m128i *)iq4_nl);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v);
}
INLINE iv i_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE iv i_pairs(const uint8_t *p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}
INLINE iv i_dot2(iv sum, iv pairs, int32_t x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, i_set(x)));
}
INLINE iv s_unsigned_32(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE iv s_signed_32(const uint8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
#ifdef DPBUSD
#define PARTS_OVERFLOW 0
#define DOT8_SIGNED 0
INLINE scale s_unsigned(const uint8_t *p) { return s_unsigned_32(p); }
INLINE scale s_signed(const uint8_t *p) { return s_signed_32(p); }
INLINE scale s_one(void) { return i_set(1); }
INLINE part p_start(int32_t start) { return i_set(start); }
INLINE part p_dot(part p, ib w, int32_t x) { return DPBUSD(p, w, i_set(x)); }
INLINE part p_dot8(part p, ib w, int32_t x) { return DPBUSD(p, w, i_set(x)); }
INLINE iv add_start(iv sum, int32_t start, scale s) { return (void)start, (void)s, sum; }
INLINE iv add_part(iv sum, part p, scale s) { return _mm256_add_epi32(sum, _mm256_mullo_epi32(p, s)); }
#else
/* A part has two int16 per output; a scale is there twice. */
#define PARTS_OVERFLOW 1
#define DOT8_SIGNED 1
INLINE scale twice(iv v) {
    return _mm256_blend_epi16(v, _mm256_slli_epi32(v, 16), 0xaa);
}
INLINE scale s_unsigned(const uint8_t *p) { return twice(s_unsigned_32(p)); }
INLINE scale s_signed(const uint8_t *p) { return twice(s_signed_32(p)); }
INLINE scale s_one(void) { return _mm256_set1_epi16(1); }
INLINE part p_start(int32_t start) { return (void)start, _mm256_setzero_si256(); }
INLINE part p_dot(part p, ib w, int32_t x) {
    return _mm256_add_epi16(p, _mm256_maddubs_epi16(w, i_set(x)));
}
/* w is larger by 128 than the weight; the result is that of the weight itself */
INLINE part p_dot8(part p, ib w, int32_t x) {
    ib weight = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    ib signs = _mm256_sign_epi8(i_set(x), weight);
    return _mm256_add_epi16(p, _mm256_maddubs_epi16(_mm256_abs_epi8(weight), signs));
}
/* start is a multiple of 32 and half of it fits into int16 */
INLINE iv add_start(iv sum, int32_t start, scale s) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(s, _mm256_set1_epi16((short)(start / 2))));
}
INLINE iv add_part(iv sum, part p, scale s) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(p, s));
}
#endif

INLINE fv f_halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE fv f_of(iv v) { return _mm256_cvtepi32_ps(v); }
INLINE fv f_set(float x) { return _mm256_set1_ps(x); }
INLINE fv f_mul(fv a, fv b) { return _mm256_mul_ps(a, b); }
INLINE fv f_add(fv a, fv b) { return _mm256_add_ps(a, b); }
INLINE fv f_sub(fv a, fv b) { return _mm256_sub_ps(a, b); }
INLINE fv f_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void f_store(float *p, fv v) { _mm256_storeu_ps(p, v); }
