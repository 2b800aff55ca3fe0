/* 8 float lanes of AVX2 with FMA. */
#define LANES 8
#define CHAINS 12       /* sums that fit into the registers beside the added values */
#define MATRIX_ROWS 6  /* most rows in one pass over weights */
#define GROUP_ROWS 6   /* rows of a pass if one pass is not enough */
#define FLOAT_VECTORS 2 /* vectors of a panel of float32 weights */
#define HALF_VECTORS 2  /* the same of bfloat16 */
#define TILE_VECTORS 2  /* vectors of an attention tile at once */

typedef __m256 vf;

static inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, first(n)); }
static inline void v_store_n(float *p, vf v, int n) { _mm256_maskstore_ps(p, first(n), v); }
static inline vf v_set(float x) { return _mm256_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b if either is NaN */
static inline vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline float v_largest(vf v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
/* value if x >= limit or x is NaN, else 0 */
static inline vf v_keep(vf value, vf x, vf limit) {
    return _mm256_and_ps(value, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
}
/* value in lanes from..to-1, else other */
static inline vf v_between(vf value, vf other, int from, int to) {
    __m256i inside = _mm256_andnot_si256(first(from), first(to));
    return _mm256_blendv_ps(other, value, _mm256_castsi256_ps(inside));
}
/* store the lanes >= limit contiguously (a whole vector is written); return their number */
static inline int v_squeeze(float *p, vf v, vf limit) {
    float x[LANES], from[LANES];
    int count = 0;
    v_store(x, v);
    v_store(from, limit);
    for (int i = 0; i < LANES; i++) {
        p[count] = x[i];
        count += x[i] >= from[0];
    }
    return count;
}
/* y * 2^n, n a whole number in -126..127 */
static inline vf v_scale2(vf y, vf n) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    __m256i one = _mm256_set1_epi32(127 << 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_add_epi32(bits, one)));
}
/* 16 bfloat16 in pair order: low halves are lanes 0..7, high halves lanes 8..15 */
static inline void v_pair(const uint16_t *p, vf *low, vf *high) {
    __m256i v = _mm256_loadu_si256((const __m256i *)p);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    *high = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
}

/* at[i][j] = from[j][d + i] for LANES keys j and four dims d + i */
static inline __m256 halves(const float *const *from, int key, int64_t d) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from[key] + d)),
                                _mm_loadu_ps(from[key + 4] + d), 1);
}
static inline void v_columns(const float *const *from, int64_t d, vf at[4]) {
    __m256 a = halves(from, 0, d), b = halves(from, 1, d);
    __m256 c = halves(from, 2, d), e = halves(from, 3, d);
    __m256 ab = _mm256_unpacklo_ps(a, b), ce = _mm256_unpacklo_ps(c, e);
    __m256 ba = _mm256_unpackhi_ps(a, b), ec = _mm256_unpackhi_ps(c, e);
    at[0] = _mm256_shuffle_ps(ab, ce, 0x44);
    at[1] = _mm256_shuffle_ps(ab, ce, 0xee);
    at[2] = _mm256_shuffle_ps(ba, ec, 0x44);
    at[3] = _mm256_shuffle_ps(ba, ec, 0xee);
}

/* Stripes of 64 bytes and the accumulators of their checksum; see blocks.h. */
typedef struct {
    __m256i half[2];
} Stripe;
typedef Stripe Sum;

static inline __m256i load_half(const void *p, int i) {
    return _mm256_loadu_si256((const __m256i *)p + i);
}
static inline Stripe s_load(const char *p) { return (Stripe){{load_half(p, 0), load_half(p, 1)}}; }
static inline void s_store(char *p, Stripe s) {
    for (int i = 0; i < 2; i++) _mm256_storeu_si256((__m256i *)p + i, s.half[i]);
}
static inline void s_stream(char *p, Stripe s) {
    for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i *)p + i, s.half[i]);
}
static inline void s_fence(void) { _mm_sfence(); }
static inline Sum sum_load(const uint64_t *p) { return s_load((const char *)p); }
static inline void sum_store(uint64_t *p, Sum s) { s_store((char *)p, s); }
static inline Sum sum_add(Sum sum, Stripe s, const uint8_t *key) {
    for (int i = 0; i < 2; i++) {
        __m256i mixed = _mm256_xor_si256(s.half[i], load_half(key, i));
        __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        __m256i swapped = _mm256_shuffle_epi32(s.half[i], 0x4e);
        sum.half[i] = _mm256_add_epi64(product, _mm256_add_epi64(sum.half[i], swapped));
    }
    return sum;
}
static inline Sum sum_scramble(Sum sum, const uint8_t *key) {
    __m256i prime = _mm256_set1_epi64x(0x9E3779B1);
    for (int i = 0; i < 2; i++) {
        __m256i mixed = _mm256_xor_si256(sum.half[i], _mm256_srli_epi64(sum.half[i], 47));
        mixed = _mm256_xor_si256(mixed, load_half(key, i));
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        sum.half[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
    return sum;
}
