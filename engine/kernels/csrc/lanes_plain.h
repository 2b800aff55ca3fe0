/* 4 float lanes in the compiler's vector extension: any processor, no fused multiply-add. */
#include <string.h>

#define LANES 4
#define CHAINS 12       /* sums that fit into the registers beside the added values */
#define MATRIX_ROWS 6  /* most rows in one pass over weights */
#define GROUP_ROWS 6   /* rows of a pass if one pass is not enough */
#define FLOAT_VECTORS 2 /* vectors of a panel of float32 weights */
#define HALF_VECTORS 2  /* the same of bfloat16 */
#define TILE_VECTORS 2  /* vectors of an attention tile at once */

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

static inline vf v_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf v_load_n(const float *p, int n) {
    vf v = {0};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}
static inline void v_store_n(float *p, vf v, int n) {
    for (int i = 0; i < n; i++) p[i] = v[i];
}
static inline vf v_set(float x) { return (vf){x, x, x, x}; }
static inline vf v_add(vf a, vf b) { return a + b; }
static inline vf v_sub(vf a, vf b) { return a - b; }
static inline vf v_mul(vf a, vf b) { return a * b; }
static inline vf v_div(vf a, vf b) { return a / b; }
static inline vf v_fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf v_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
static inline vf v_max(vf a, vf b) { return v_select((vi)(a > b), a, b); } /* b if NaN */
static inline vf v_min(vf a, vf b) { return v_select((vi)(a < b), a, b); }
static inline float v_largest(vf v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}
/* value if x >= limit or x is NaN, else 0 */
static inline vf v_keep(vf value, vf x, vf limit) { return (vf)(~(vi)(x < limit) & (vi)value); }
/* value in lanes from..to-1, else other */
static inline vf v_between(vf value, vf other, int from, int to) {
    vi lane = {0, 1, 2, 3};
    return v_select((vi)(lane >= from) & (vi)(lane < to), value, other);
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
    vi power = __builtin_convertvector(n, vi);
    return y * (vf)((power + 127) << 23);
}
/* 8 bfloat16 in pair order: low halves are lanes 0..3, high halves lanes 4..7 */
static inline void v_pair(const uint16_t *p, vf *low, vf *high) {
    vi v;
    memcpy(&v, p, sizeof v);
    *low = (vf)(v << 16);
    *high = (vf)(v & (int32_t)0xffff0000);
}

/* at[i][j] = from[j][d + i] for LANES keys j and four dims d + i */
static inline void v_columns(const float *const *from, int64_t d, vf at[4]) {
    for (int i = 0; i < 4; i++)
        at[i] = (vf){from[0][d + i], from[1][d + i], from[2][d + i], from[3][d + i]};
}

/* Stripes of 64 bytes and the accumulators of their checksum; see blocks.h. */
typedef struct {
    uint64_t word[8];
} Stripe;
typedef Stripe Sum;

static inline Stripe s_load(const void *p) {
    Stripe s;
    memcpy(&s, p, sizeof s);
    return s;
}
static inline void s_store(void *p, Stripe s) { memcpy(p, &s, sizeof s); }
static inline void s_stream(char *p, Stripe s) { s_store(p, s); }
static inline void s_fence(void) {}
static inline Sum sum_load(const uint64_t *p) { return s_load(p); }
static inline void sum_store(uint64_t *p, Sum s) { s_store(p, s); }
static inline Sum sum_add(Sum sum, Stripe s, const uint8_t *key) {
    Stripe k = s_load(key);
    for (int i = 0; i < 8; i++) {
        uint64_t mixed = s.word[i] ^ k.word[i];
        sum.word[i] += s.word[i ^ 1] + (mixed & 0xffffffff) * (mixed >> 32);
    }
    return sum;
}
static inline Sum sum_scramble(Sum sum, const uint8_t *key) {
    Stripe k = s_load(key);
    for (int i = 0; i < 8; i++) {
        sum.word[i] = (sum.word[i] ^ sum.word[i] >> 47 ^ k.word[i]) * 0x9E3779B1;
    }
    return sum;
}
