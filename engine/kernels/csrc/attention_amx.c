/* Attention of models in bfloat16 on the matrix tiles of AMX.
 *
 * Queries, keys, values and the weights of the softmax are rounded to bfloat16 where they are
 * multiplied. Scores, maxima, the softmax and its sums, and the outputs' sums stay float32.
 *
 * Invariant: as in attention.h, the terms of a row's sums and their order depend only on its
 * own query, position and keys. A score adds the tile products of 32 dims one after the other,
 * a sum those of 32 keys one after the other; a key that a row does not see has weight 0 and changes
 * no bit. For few queries, vectors compute a tile product step by step; see few_halves.h.
 */
#include "kernels.h"

#ifdef HAVE_TILES
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma")
#endif
#pragma GCC diagnostic ignored "-Wunused-function" /* of the rows' kernels */

#include "lanes_avx512.h"

#include "kv_rows.h"

#include "elementwise.h"

#include "walk.h"

#include "exp2.h"

#include "soften_halves.h"

#include "few_halves.h"

#include "amx_tiles.h"

#define WIDE 16 /* queries, keys or dims of a tile */
#define TILE (TERMS * WIDE)
#define TILED_TOGETHER 192 /* like QUERIES_TOGETHER; a tile of keys is packed for this many */

/* A walk with the content of its tiles, all bfloat16. Blocks of queries have `tall` rows. */
typedef struct {
    Walk w;
    uint16_t *queries; /* [blocks, dim / 32, tall, 32] */
    uint16_t *keys;    /* [4, dim / 32, 16 pairs of dims, 16 keys, 2] */
    uint16_t *values;  /* [dim / 16, 2, 16 pairs of keys, 16 dims, 2] */
    uint16_t *weights; /* [2, tall, 32], of one block */
    int32_t *positions; /* of the queries; -1 after the last query */
} Tiled;

static inline int64_t tall_of(const Walk *w) { return w->count < WIDE ? w->count : WIDE; }

/* Round new queries; missing rows of the last block are zero. */
static void pack_queries(const Walk *w, const Place *at) {
    const Tiled *t = (const Tiled *)w;
    int64_t group = w->a->heads / w->a->kv_heads, i = 0;
    for (int64_t row = at->row; row < at->row + at->rows; row++)
        for (int64_t head = 0; head < group; head++) t->positions[i++] = w->a->positions[row];
    while (i % WIDE) t->positions[i++] = -1;
    if (w->count <= FEW) {
        round_floats(w->q, w->count * w->a->dim);
        return;
    }
    int64_t dim = w->a->dim, tall = tall_of(w), steps = dim / TERMS;
    int64_t padded = (w->count + tall - 1) / tall * tall;
    for (i = 0; i < padded; i++) {
        uint16_t *to = t->queries + (i / tall * steps * tall + i % tall) * TERMS;
        const float *from = w->q + i * dim;
        for (int64_t s = 0; s < steps; s++, to += tall * TERMS, from += TERMS)
            _mm512_storeu_si512(to, i < w->count ? halves_of(from, from + 16) : _mm512_setzero_si512());
        if (i >= w->count) memset(w->sums + i * w->padded, 0, (size_t)w->padded * sizeof(float));
    }
    configure(tall, TILE_BYTES);
}

/* Transpose the keys of a tile by pairs of dims. */
static void pack_keys(const Tiled *t, const Tile *tile) {
    int64_t steps = t->w.a->dim / TERMS;
    uint16_t *to = t->keys;
    for (int n = 0; n < tile->to; n += WIDE)
        for (int64_t s = 0; s < steps; s++, to += TILE) {
            float rows[WIDE][TERMS / 2];
            const float *from[WIDE];
            for (int j = 0; j < WIDE; j++) {
                const float *key = tile->key[n + j] + s * TERMS;
                _mm512_storeu_si512(rows[j], halves_of(key, key + 16));
                from[j] = rows[j];
            }
            for (int d = 0; d < TERMS / 2; d += 4) {
                vf at[4];
                v_columns(from, d, at);
                for (int i = 0; i < 4; i++) v_store((float *)to + (d + i) * WIDE, at[i]);
            }
        }
}

/* Values of a tile by pairs of keys. */
static void pack_values(const Tiled *t, const Tile *tile) {
    static const uint16_t turns[TERMS] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                          21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                          11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i turn = _mm512_loadu_si512(turns);
    int64_t dims = t->w.a->dim / WIDE;
    for (int j = 0; j < TILE_KEYS && j / TERMS * TERMS < tile->to; j += 2) {
        const float *a = tile->key[j] + tile->to_value, *b = tile->key[j + 1] + tile->to_value;
        uint16_t *to = t->values + j / TERMS * TILE + j % TERMS * WIDE;
        for (int64_t d = 0; d < dims; d++, to += 2 * TILE) {
            __m512i pair = halves_of(a + d * WIDE, b + d * WIDE);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(turn, pair));
        }
    }
}

/* Scores of a block of queries. */
static void score(const Tiled *t, const Tile *tile, int64_t first, int64_t tall) {
    int64_t steps = t->w.a->dim / TERMS;
    const uint16_t *q = t->queries + first * steps * TERMS, *k = t->keys;
    float *to = t->w.scores + first * TILE_KEYS;
    FENCE();
#define EACH(DO) DO(0, 6) DO(1, 7) DO(2, 6) DO(3, 7)
#define CLEAR(T, K) tile_zero(T);
#define SCORE(T, K)                                                                                \
    if (tile->to > (T)*WIDE) {                                                                     \
        tile_load(K, k + ((T)*steps + s) * TILE, 64);                                              \
        tile_halves(T, 4, K);                                                                      \
    }
#define KEEP(T, K)                                                                                 \
    if (tile->to > (T)*WIDE) tile_store(T, to + (T)*WIDE, TILE_KEYS * sizeof(float));
    EACH(CLEAR)
    for (int64_t s = 0; s < steps; s++) {
        tile_load(4, q + s * tall * TERMS, 64);
        EACH(SCORE)
    }
    EACH(KEEP)
#undef KEEP
#undef SCORE
#undef CLEAR
    FENCE();
}

/* Weights of a block of queries, rounded. */
static void soften(const Tiled *t, const Place *at, int64_t first, int64_t tall) {
    for (int64_t i = 0; i < tall; i++) {
        uint64_t seen = keys_seen(t->w.a, t->positions[first + i], at->start);
        uint16_t *to = t->weights + i * TERMS;
        vf p[WEIGHTS];
        soften_halves(&t->w, first + i, seen, p);
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
        _mm512_storeu_si512(to + tall * TERMS, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
    }
}

/* sums += weights times values, of a block of queries */
static void weigh(const Tiled *t, const Tile *tile, int64_t first, int64_t tall) {
    int64_t stride = t->w.padded * (int64_t)sizeof(float), dims = t->w.padded / WIDE;
    float *sums = t->w.sums + first * t->w.padded;
    const uint16_t *p = t->weights, *v = t->values;
    int more = tile->to > TERMS;
    FENCE();
    tile_load(4, p, 64);
    tile_load(5, p + tall * TERMS, 64);
#define FETCH(T, V)                                                                                \
    if (dims > (T)) tile_load(T, sums + (T)*WIDE, stride);
#define WEIGH(T, P, V, S)                                                                          \
    if (dims > (T)) {                                                                              \
        tile_load(V, v + ((T)*2 + (S)) * TILE, 64);                                                \
        tile_halves(T, P, V);                                                                      \
    }
#define FIRST(T, V) WEIGH(T, 4, V, 0)
#define SECOND(T, V) WEIGH(T, 5, V, 1)
#define KEEP(T, V)                                                                                 \
    if (dims > (T)) tile_store(T, sums + (T)*WIDE, stride);
    for (; dims > 0; dims -= 4, sums += 4 * WIDE, v += 8 * TILE) {
        EACH(FETCH)
        EACH(FIRST)
        if (more) { EACH(SECOND) }
        EACH(KEEP)
    }
#undef KEEP
#undef SECOND
#undef FIRST
#undef WEIGH
#undef FETCH
#undef EACH
    FENCE();
}

static void visit(const Walk *w, const Place *at, Tile *tile, const Tile *next) {
    const Tiled *t = (const Tiled *)w;
    int64_t tall = tall_of(w);
    open_tile(w->a, tile, w->rows);
    if (w->count <= FEW) {
        visit_few(w, at, t->positions, tile, next);
        return;
    }
    pack_keys(t, tile);
    pack_values(t, tile);
    const __m512i start = _mm512_set1_epi32((int)at->start);
    for (int64_t first = 0; first < w->count; first += tall) {
        __m512i positions = _mm512_loadu_si512(t->positions + first);
        if (!_mm512_cmpge_epi32_mask(positions, start)) continue;
        score(t, tile, first, tall);
        soften(t, at, first, tall);
        weigh(t, tile, first, tall);
    }
}

static uint16_t *cut_halves(float **from, int64_t halves) {
    return (uint16_t *)cut(from, halves / 2);
}

static int attend(void *shared, int64_t from, int64_t to, int seat) {
    const Shared *s = shared;
    const int64_t dim = s->a->dim;
    float *more;
    Tiled t = {.w = begin_walk(s, seat, &more)};
    t.positions = (int32_t *)cut(&more, s->most);
    t.queries = cut_halves(&more, s->most * dim);
    t.keys = cut_halves(&more, TILE_KEYS * dim);
    t.values = cut_halves(&more, TILE_KEYS * dim);
    t.weights = cut_halves(&more, TILE_KEYS * WIDE);
    t.w.rows = cut(&more, rows_of(s->a));
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSHED);
    walk(&t.w, s->together, from, to, pack_queries, visit);
    _mm_setcsr(mode);
    tile_release();
    return 0;
}

int attention_on_tiles(const Attention *a) {
    if (a->dim % TERMS) return kernels_avx512.attention(a);
    int64_t group = a->heads / a->kv_heads;
    int64_t together = group < TILED_TOGETHER ? TILED_TOGETHER / group : 1;
    int64_t most = (together * group + WIDE - 1) / WIDE * WIDE;
    int64_t floats = most * (1 + a->dim / 2) + TILE_KEYS * a->dim + TILE_KEYS * WIDE / 2 + rows_of(a);
    return attend_all(a, attend, together, most, a->dim, floats, 6);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
