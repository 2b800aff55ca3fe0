/* Powers of 2 with a relative error of 3e-6, for results that are rounded to bfloat16 next. */
#define LOG2_E 1.44269504f

/* 2^x for x < 128; 0 if that is below the normal numbers, NaN stays NaN. The polynomial has
 * the least relative error on 0..1 among those that are exact at 0. */
static inline vf v_exp2(vf x) {
    vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    vf p = v_set(0.0134267202f);
    p = v_fma(p, r, v_set(0.0522424169f));
    p = v_fma(p, r, v_set(0.241280228f));
    p = v_fma(p, r, v_set(0.693044841f));
    p = v_fma(p, r, v_set(1.0f));
    return v_scale2(p, x);
}
