/* Values of codes in the blocks of GGUF files. */
#include <stdint.h>
#include <string.h>

/* The values of IQ4_NL, plus 128. */
static const uint8_t iq4_nl[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};

/* A float16 in two bytes. */
static inline float of_half(const uint8_t *p) {
    uint32_t half = p[0] | (uint32_t)p[1] << 8, exponent = half >> 10 & 31, rest = half & 1023;
    uint32_t sign = half >> 15 << 31, bits = sign | (exponent + 112) << 23 | rest << 13;
    float value = (float)rest * 0x1p-24f; /* subnormal */
    if (exponent == 31) bits = sign | 0x7f800000 | rest << 13;
    if (exponent == 0) {
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}
