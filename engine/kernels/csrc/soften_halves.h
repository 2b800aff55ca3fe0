/* The softmax of attention in bfloat16: turns the scores of a query into weights, 64 keys at once.
 *
 * The weights are rounded to eight bits afterwards, so powers with an error of 3e-6 suffice. The
 * maximum they are relative to need only be near the largest score: it is raised, and the sums so
 * far are scaled, if a score is more than SLACK above it. Both depend only on the query's own scores.
 * Sums use the weights before rounding.
 */
#define SLACK 5.0f
#define WEIGHTS (TILE_KEYS / LANES) /* vectors of a query's weights */

/* Mask of the keys before the n-th, out of 64. */
static inline uint64_t keys_before(int64_t n) {
    return n <= 0 ? 0 : n >= TILE_KEYS ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1;
}

/* Number of keys of the tile from `start` that a row at `position` sees; none at -1. */
static inline uint64_t keys_seen(const Attention *a, int64_t position, int64_t start) {
    return keys_before(position + 1 - start) & ~keys_before(lowest(a, position) - start);
}

static __attribute__((noinline)) void raise_peak(const Walk *w, int64_t i, float peak) {
    float *sums = w->sums + i * w->padded, *total = w->weight + i * LANES;
    vf fade = v_exp2(v_set((w->peak[i] - peak) * LOG2_E));
    v_store(total, v_mul(v_load(total), fade));
    for (int64_t d = 0; d < w->padded; d += LANES)
        v_store(sums + d, v_mul(v_load(sums + d), fade));
    w->peak[i] = peak;
}

/* Weights of query i, not yet rounded. */
static inline void soften_halves(const Walk *w, int64_t i, uint64_t seen, vf p[WEIGHTS]) {
    const float *scores = w->scores + i * TILE_KEYS;
    if (!seen) {
        for (int v = 0; v < WEIGHTS; v++) p[v] = v_set(0);
        return;
    }
    for (int v = 0; v < WEIGHTS; v++) p[v] = v_load(scores + v * LANES);
    if (~seen)
        for (int v = 0; v < WEIGHTS; v++)
            p[v] = _mm512_mask_mov_ps(v_set(-INFINITY), (__mmask16)(seen >> v * LANES), p[v]);
    vf top = v_max(v_max(p[0], p[1]), v_max(p[2], p[3]));
    if (_mm512_cmp_ps_mask(top, v_set(w->peak[i] + SLACK), _CMP_GT_OQ))
        raise_peak(w, i, v_largest(top));
    float peak = w->peak[i];
    vf shift = v_set(peak == -INFINITY ? 0.0f : -peak * LOG2_E);
    for (int v = 0; v < WEIGHTS; v++) p[v] = v_exp2(v_fma(p[v], v_set(LOG2_E), shift));
    float *total = w->weight + i * LANES;
    v_store(total, v_add(v_load(total), v_add(v_add(p[0], p[1]), v_add(p[2], p[3]))));
}
