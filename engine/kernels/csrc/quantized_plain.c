/* Quantized products for any processor. */
#include <stdint.h>
#include <string.h>

#include "quantized_values.h"

#define LANES 4
#define SIZES(F) F(1) F(4) F(8)
#define SMALL_CODE
#define PARTS_OVERFLOW 0
#define DOT8_SIGNED 0

typedef int32_t iv __attribute__((vector_size(4 * LANES)));
typedef int16_t pairs __attribute__((vector_size(4 * LANES)));
typedef float fv __attribute__((vector_size(4 * LANES)));
typedef iv ib, part, scale;
#define INLINE static inline __attribute__((always_inline))

INLINE ib b_load(const uint8_t *p) {
    ib v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* bits of every byte, shifted right (left if negative) and masked */
INLINE ib b_bits(ib v, const int right, const int mask) {
    uint32_t all = (uint32_t)mask * 0x01010101;
    return (right > 0 ? v >> right : v << -right) & (int32_t)all;
}
INLINE ib b_or(ib a, ib b) { return a | b; }
INLINE ib b_look_up(ib v) {
    uint8_t byte[sizeof v];
    memcpy(byte, &v, sizeof v);
    for (size_t i = 0; i < sizeof v; i++) byte[i] = iq4_nl[byte[i]];
    return b_load(byte);
}
INLINE iv i_set(int32_t x) { return (iv){x, x, x, x}; }
INLINE iv i_pairs(const uint8_t *p) { /* two int16 in each lane */
    iv v;
    for (int i = 0; i < LANES; i++) v[i] = p[2 * i] | p[2 * i + 1] << 16;
    return v;
}
INLINE iv i_dot2(iv sum, iv two, int32_t x) {
    return sum + (two & 0xffff) * (int16_t)x + (two >> 16) * (x >> 16);
}
INLINE scale s_unsigned(const uint8_t *p) { return (iv){p[0], p[1], p[2], p[3]}; }
INLINE scale s_signed(const uint8_t *p) {
    return (iv){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
}
INLINE scale s_one(void) { return i_set(1); }
INLINE part p_start(int32_t start) { return i_set(start); }
/* products of the even (or odd) bytes of w and x as pairs of int16, which hold 255 * 127 */
INLINE pairs p_half(ib w, int32_t x, const int odd) {
    pairs values = (pairs)i_set(x);
    return (pairs)((odd ? w >> 8 : w) & 0x00ff00ff) * (odd ? values >> 8 : values << 8 >> 8);
}
INLINE iv p_sum(pairs products) {
    iv both = (iv)products;
    return (both >> 16) + (both << 16 >> 16);
}
INLINE part p_dot(part p, ib w, int32_t x) { return p + p_sum(p_half(w, x, 0) + p_half(w, x, 1)); }
INLINE part p_dot8(part p, ib w, int32_t x) {
    return p + p_sum(p_half(w, x, 0)) + p_sum(p_half(w, x, 1));
}
INLINE iv add_start(iv sum, int32_t start, scale s) { return (void)start, (void)s, sum; }
INLINE iv add_part(iv sum, part p, scale s) { return sum + p * s; }

INLINE fv f_halves(const uint8_t *p) {
    return (fv){of_half(p), of_half(p + 2), of_half(p + 4), of_half(p + 6)};
}
INLINE fv f_of(iv v) { return __builtin_convertvector(v, fv); }
INLINE fv f_set(float x) { return (fv){x, x, x, x}; }
INLINE fv f_mul(fv a, fv b) { return a * b; }
INLINE fv f_add(fv a, fv b) { return a + b; }
INLINE fv f_sub(fv a, fv b) { return a - b; }
INLINE fv f_load(const float *p) {
    fv v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void f_store(float *p, fv v) { memcpy(p, &v, sizeof v); }

#define TABLE products_plain
#define TABLE_NAME "plain"
#include "quantized_body.h"
