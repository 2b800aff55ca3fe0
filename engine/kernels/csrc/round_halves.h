/* Rounding of x to bfloat16, 32 floats at a time, for products with bfloat16 weights. */
#define TERMS 32

/* The nearest bfloat16 of 32 floats, ties to even. A finite number that would become infinite is
 * truncated instead, so that it stays finite as in the rest of the model. */
static inline void round_step(__m512 a, __m512 b, uint16_t *to) {
    const __m512i sign = _mm512_set1_epi16((short)0x8000), end = _mm512_set1_epi16(0x7f80);
    __m512i h = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    __mmask32 ends = _mm512_cmpeq_epi16_mask(_mm512_andnot_si512(sign, h), end);
    _mm512_storeu_si512(to, h);
    if (__builtin_expect(ends != 0, 0)) {
        uint32_t bits[TERMS];
        _mm512_storeu_ps(bits, a);
        _mm512_storeu_ps(bits + 16, b);
        for (int i = 0; i < TERMS; i++)
            if (ends >> i & 1) to[i] = (uint16_t)(bits[i] >> 16);
    }
}
