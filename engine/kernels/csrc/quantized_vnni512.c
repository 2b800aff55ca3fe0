/* Quantized products with the integer dot products of AVX-512 (VNNI), and on the tiles of AMX. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif

#include "quantized_values.h"

#define LANES 16
#define SIZES(F) F(1) F(2) F(3) F(4) F(6) F(8)
#define PARTS_OVERFLOW 0
#define DOT8_SIGNED 0

typedef __m512i ib, iv, part, scale;
typedef __m512 fv;
#define INLINE static inline __attribute__((always_inline))

INLINE ib b_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
/* bits of every byte, shifted right (left if negative) and masked */
INLINE ib b_bits(ib v, const int right, const int mask) {
    ib moved = right > 0 ? _mm512_srli_epi32(v, (unsigned)right)
               : right < 0 ? _mm512_slli_epi32(v, (unsigned)-right) : v;
    return _mm512_and_si512(moved, _mm512_set1_epi8((char)mask));
}
INLINE ib b_or(ib a, ib b) { return _mm512_or_si512(a, b); }
INLINE ib b_look_up(ib v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)iq4_nl)), v);
}
INLINE iv i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE iv i_pairs(const uint8_t *p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE iv i_dot2(iv sum, iv pairs, int32_t x) { return _mm512_dpwssd_epi32(sum, pairs, i_set(x)); }
INLINE scale s_unsigned(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE scale s_signed(const uint8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE scale s_one(void) { return i_set(1); }
INLINE part p_start(int32_t start) { return i_set(start); }
INLINE part p_dot(part p, ib w, int32_t x) { return _mm512_dpbusd_epi32(p, w, i_set(x)); }
INLINE part p_dot8(part p, ib w, int32_t x) { return _mm512_dpbusd_epi32(p, w, i_set(x)); }
INLINE iv add_start(iv sum, int32_t start, scale s) { return (void)start, (void)s, sum; }
INLINE iv add_part(iv sum, part p, scale s) {
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(p, s));
}
INLINE fv f_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE fv f_of(iv v) { return _mm512_cvtepi32_ps(v); }
INLINE fv f_set(float x) { return _mm512_set1_ps(x); }
INLINE fv f_mul(fv a, fv b) { return _mm512_mul_ps(a, b); }
INLINE fv f_add(fv a, fv b) { return _mm512_add_ps(a, b); }
INLINE fv f_sub(fv a, fv b) { return _mm512_sub_ps(a, b); }
INLINE fv f_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float *p, fv v) { _mm512_storeu_ps(p, v); }

#define TABLE products_vnni512
#define TABLE_NAME "vnni512"
#include "quantized_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#include "kernels.h"

#ifdef HAVE_TILES
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("amx-tile,amx-int8")
#endif

#include "quantized_amx.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
#endif
