/* 16 float lanes of AVX-512. */
#define LANES 16
#define CHAINS 24       /* sums that fit into the registers beside the added values */
#define MATRIX_ROWS 12  /* most rows in one pass over weights */
#define GROUP_ROWS 8   /* rows of a pass if one pass is not enough */
#define FLOAT_VECTORS 1 /* vectors of a panel of float32 weights */
#define HALF_VECTORS 2  /* the same of bfloat16 */
#define TILE_VECTORS 4  /* vectors of an attention tile at once */

typedef __m512 vf;

static inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void v_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
static inline vf v_set(float x) { return _mm512_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b if either is NaN */
static inline vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline float v_largest(vf v) { return _mm512_reduce_max_ps(v); }
/* value if x >= limit or x is NaN, else 0 */
static inline vf v_keep(vf value, vf x, vf limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}
/* value in lanes from..to-1, else other */
static inline vf v_between(vf value, vf other, int from, int to) {
    return _mm512_mask_mov_ps(other, first(to) & ~first(from), value);
}
/* store the lanes >= limit contiguously (a whole vector is written); return their number */
static inline int v_squeeze(float *p, vf v, vf limit) {
    __mmask16 stay = _mm512_cmp_ps_mask(v, limit, _CMP_GE_OQ);
    v_store(p, _mm512_maskz_compress_ps(stay, v));
    return __builtin_popcount(stay);
}
/* y * 2^n, n a whole number in -126..127 */
static inline vf v_scale2(vf y, vf n) { return _mm512_scalef_ps(y, n); }
/* 32 bfloat16 in pair order: low halves are lanes 0..15, high halves lanes 16..31 */
static inline void v_pair(const uint16_t *p, vf *low, vf *high) {
    __m512i v = _mm512_loadu_si512(p);
    *low = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *high = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}

/* at[i][j] = from[j][d + i] for LANES keys j and four dims d + i.
 * Four keys at a time are inserted into one register directly from memory, so that only the
 * two shuffle steps inside 128-bit lanes remain. */
static inline __m512 quarters(const float *const *from, int key, int64_t d) {
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(from[key] + d));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from[key + 4] + d), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from[key + 8] + d), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(from[key + 12] + d), 3);
}
static inline void v_columns(const float *const *from, int64_t d, vf at[4]) {
    __m512 a = quarters(from, 0, d), b = quarters(from, 1, d);
    __m512 c = quarters(from, 2, d), e = quarters(from, 3, d);
    __m512 ab = _mm512_unpacklo_ps(a, b), ce = _mm512_unpacklo_ps(c, e);
    __m512 ba = _mm512_unpackhi_ps(a, b), ec = _mm512_unpackhi_ps(c, e);
    at[0] = _mm512_shuffle_ps(ab, ce, 0x44);
    at[1] = _mm512_shuffle_ps(ab, ce, 0xee);
    at[2] = _mm512_shuffle_ps(ba, ec, 0x44);
    at[3] = _mm512_shuffle_ps(ba, ec, 0xee);
}

/* Stripes of 64 bytes and the accumulators of their checksum; see blocks.h. */
typedef __m512i Stripe;
typedef __m512i Sum;

static inline Stripe s_load(const char *p) { return _mm512_loadu_si512(p); }
static inline void s_store(char *p, Stripe s) { _mm512_storeu_si512(p, s); }
static inline void s_stream(char *p, Stripe s) { _mm512_stream_si512((__m512i *)p, s); }
static inline void s_fence(void) { _mm_sfence(); }
static inline Sum sum_load(const uint64_t *p) { return _mm512_loadu_si512(p); }
static inline void sum_store(uint64_t *p, Sum s) { _mm512_storeu_si512(p, s); }
static inline Sum sum_add(Sum sum, Stripe s, const uint8_t *key) {
    __m512i mixed = _mm512_xor_si512(s, _mm512_loadu_si512(key));
    __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    __m512i swapped = _mm512_shuffle_epi32(s, _MM_PERM_BADC);
    return _mm512_add_epi64(product, _mm512_add_epi64(sum, swapped));
}
static inline Sum sum_scramble(Sum sum, const uint8_t *key) {
    __m512i mixed = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
    mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(key));
    __m512i prime = _mm512_set1_epi64(0x9E3779B1), high = _mm512_srli_epi64(mixed, 32);
    __m512i product = _mm512_slli_epi64(_mm512_mul_epu32(high, prime), 32);
    return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), product);
}
