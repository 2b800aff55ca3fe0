/* Keys and values in bfloat16. */

/* Round 32 floats to bfloat16, `low` ones first. */
static inline __m512i halves_of(const float *low, const float *high) {
    return (__m512i)_mm512_cvtne2ps_pbh(v_load(high), v_load(low));
}
