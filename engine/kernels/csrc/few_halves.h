/* Attention in bfloat16 of few queries, limited by memory; computes what tiles would compute.
 *
 * A tile product (TDPBF16PS) adds, from zero, the products of even terms and of odd terms in
 * two chains of fused multiply-adds, then adds both sums and the previous value; subnormal
 * numbers are zero. Vectors do the same here, bit by bit, so that no tile
 * is packed for one row, and prefetching works as in few.h.
 */
#include "few.h"

#include "halves.h"

#define TERMS 32       /* dims or keys of one tile product */
#define FLUSHED 0x8040 /* of MXCSR: flush subnormal numbers to zero when read or written */

static inline vf half_low(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
static inline vf half_high(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

static inline vf v_round(vf x) {
    return half_low(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)));
}

/* Replace floats, a multiple of 16, by the values of their bfloat16. */
static void round_floats(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) v_store(x + i, v_round(v_load(x + i)));
}

/* Scores of R queries with the keys of a tile. */
EVER score_halves(const Walk *w, const Tile *tile, const Tile *next, const int R) {
    const int64_t dim = w->a->dim, groups = (tile->to + LANES - 1) / LANES;
    Ahead ahead = ahead_of(next, w->a->row_bytes, 0, groups * (dim / 8));
    float rows[LANES][TERMS / 2]; /* pairs of dims */
    const float *from[LANES];
    for (int k = 0; k < LANES; k++) from[k] = rows[k];
    for (int j = 0; j < tile->to; j += LANES) {
        vf sum[FEW];
        UNROLLED(m, R) sum[m] = v_set(0);
        for (int64_t s = 0; s < dim; s += TERMS) {
            vf even[FEW], odd[FEW];
            UNROLLED(m, R) even[m] = odd[m] = v_set(0);
            for (int k = 0; k < LANES; k++)
                _mm512_storeu_si512(rows[k], halves_of(tile->key[j + k] + s, tile->key[j + k] + s + 16));
            for (int64_t d = 0; d < TERMS / 2; d += 4) {
                const float *q = w->q + s + 2 * d;
                vf at[4];
                fetch(&ahead);
                v_columns(from, d, at);
                UNROLLED(i, 4) {
                    __m512i pairs = _mm512_castps_si512(at[i]);
                    vf low = half_low(pairs), high = half_high(pairs);
                    UNROLLED(m, R) {
                        even[m] = v_fma(v_set(q[m * dim + 2 * i]), low, even[m]);
                        odd[m] = v_fma(v_set(q[m * dim + 2 * i + 1]), high, odd[m]);
                    }
                }
            }
            UNROLLED(m, R) sum[m] = v_add(sum[m], v_add(even[m], odd[m]));
        }
        UNROLLED(m, R) v_store(w->scores + m * TILE_KEYS + j, sum[m]);
    }
}

/* The same for NV vectors of dims from d on: sums += weights times values. */
EVER weigh_half_dims(const Walk *w, const Tile *tile, Ahead *ahead, int64_t d, const int R,
                     const int NV) {
    const int64_t dim = w->a->dim, side = tile->to_value + d;
    float *sums = w->sums + d;
    for (int first = 0; first < tile->to; first += TERMS) {
        int last = tile->to < first + TERMS ? tile->to : first + TERMS;
        vf even[FEW][2], odd[FEW][2];
        UNROLLED(m, R) UNROLLED(i, NV) even[m][i] = odd[m][i] = v_set(0);
        for (int j = first; j < last; j += 2) {
            fetch(ahead);
            UNROLLED(i, NV) {
                vf low = v_round(v_load(tile->key[j] + side + i * LANES));
                vf high = v_round(v_load(tile->key[j + 1] + side + i * LANES));
                UNROLLED(m, R) {
                    const float *share = w->scores + m * TILE_KEYS + j;
                    even[m][i] = v_fma(v_set(share[0]), low, even[m][i]);
                    odd[m][i] = v_fma(v_set(share[1]), high, odd[m][i]);
                }
            }
        }
        UNROLLED(m, R) UNROLLED(i, NV) {
            float *to = sums + m * dim + i * LANES;
            v_store(to, v_add(v_load(to), v_add(even[m][i], odd[m][i])));
        }
    }
}

EVER weigh_halves(const Walk *w, const Tile *tile, const Tile *next, const int R) {
    const int wide = R <= 4 ? 2 : 1;
    const int64_t dim = w->a->dim;
    Ahead ahead = ahead_of(next, w->a->row_bytes, next->to_stored, (tile->to + 1) / 2 * (dim / wide / LANES));
    for (int64_t d = 0; d < dim; d += wide * LANES)
        weigh_half_dims(w, tile, &ahead, d, R, wide);
}

#define HALVES_OF(R)                                                                               \
    static void score_halves_##R(const Walk *w, const Tile *t, const Tile *n) {                    \
        score_halves(w, t, n, R);                                                                  \
    }                                                                                              \
    static void weigh_halves_##R(const Walk *w, const Tile *t, const Tile *n) {                    \
        weigh_halves(w, t, n, R);                                                                  \
    }

HALVES_OF(1)
HALVES_OF(2)
HALVES_OF(3)
HALVES_OF(4)
HALVES_OF(5)
HALVES_OF(6)
HALVES_OF(7)
HALVES_OF(8)

static Few *const score_few_halves[FEW] = {score_halves_1, score_halves_2, score_halves_3,
                                           score_halves_4, score_halves_5, score_halves_6,
                                           score_halves_7, score_halves_8};
static Few *const weigh_few_halves[FEW] = {weigh_halves_1, weigh_halves_2, weigh_halves_3,
                                           weigh_halves_4, weigh_halves_5, weigh_halves_6,
                                           weigh_halves_7, weigh_halves_8};

static void visit_few(const Walk *w, const Place *at, const int32_t *positions, const Tile *tile,
                      const Tile *next) {
    score_few_halves[w->count - 1](w, tile, next);
    for (int64_t i = 0; i < w->count; i++) {
        vf p[WEIGHTS];
        soften_halves(w, i, keys_seen(w->a, positions[i], at->start), p);
        for (int v = 0; v < WEIGHTS; v++)
            v_store(w->scores + i * TILE_KEYS + v * LANES, v_round(p[v]));
    }
    weigh_few_halves[w->count - 1](w, tile, next);
}
