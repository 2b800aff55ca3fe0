/* Attention of models in bfloat16 on the matrix tiles of AMX.
 *
 * Queries, keys, values and the weights of the softmax are rounded to bfloat16 where they are
 * multiplied; scores, peaks, the softmax and its sums, and the outputs' sums stay float32.
 *
 * Invariant: as in attention.h, what a row adds to its sums, and in which order, depends on its
 * own query, position and keys alone. A score takes the tile products of 32 dims after the other,
 * a sum those of 32 keys after the other; a key a row does not see has weight 0 and changes no
 * bit. Few queries take the steps of a tile product one by one; see few_halves.h.
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

#include "elementwise.h"

#include "walk.h"

#include "few_halves.h"

#define WIDE 16  /* queries, keys or dims of a tile */
#define TILE (TERMS * WIDE)

/* The compiler moves plain loads and stores past tile instructions unless told not to. */
#define FENCE() __asm__ volatile("" ::: "memory")

/* A walk with what its tiles are made of, all bfloat16. Blocks of queries are `tall` rows. */
typedef struct {
    Walk w;
    uint16_t *queries; /* [blocks, dim / 32, tall, 32] */
    uint16_t *keys;    /* [4, dim / 32, 16 pairs of dims, 16 keys, 2] */
    uint16_t *values;  /* [dim / 16, 2, 16 pairs of keys, 16 dims, 2] */
    uint16_t *weights; /* [2, tall, 32], of one block */
} Tiled;

static inline int64_t tall_of(const Walk *w) { return w->count < WIDE ? w->count : WIDE; }

/* Tiles 0..3 hold sums, 4 and 5 rows of queries or weights, 6 and 7 keys or values. */
static void configure(int64_t tall) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = 64;
        config.rows[t] = (uint8_t)(t < 6 ? tall : WIDE);
    }
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* New queries, rounded; rows of the last block that there are none for are zero. */
static void pack_queries(const Walk *w) {
    const Tiled *t = (const Tiled *)w;
    if (w->count <= FEW) {
        round_floats(w->q, w->count * w->a->dim);
        return;
    }
    int64_t dim = w->a->dim, tall = tall_of(w), steps = dim / TERMS;
    int64_t padded = (w->count + tall - 1) / tall * tall;
    for (int64_t i = 0; i < padded; i++) {
        uint16_t *to = t->queries + (i / tall * steps * tall + i % tall) * TERMS;
        const float *from = w->q + i * dim;
        for (int64_t s = 0; s < steps; s++, to += tall * TERMS, from += TERMS)
            _mm512_storeu_si512(to, i < w->count ? halves_of(from, from + 16) : _mm512_setzero_si512());
        if (i >= w->count) memset(w->sums + i * w->padded, 0, (size_t)w->padded * sizeof(float));
    }
    configure(tall);
}

/* Keys of a tile, turned round by pairs of dims. */
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
#define SCORE(T, K)                                                                                \
    if (tile->to > (T)*WIDE) {                                                                     \
        _tile_zero(T);                                                                             \
        for (int64_t s = 0; s < steps; s++) {                                                      \
            _tile_loadd(4, q + s * tall * TERMS, 64);                                              \
            _tile_loadd(K, k + ((T)*steps + s) * TILE, 64);                                        \
            _tile_dpbf16ps(T, 4, K);                                                               \
        }                                                                                          \
        _tile_stored(T, to + (T)*WIDE, TILE_KEYS * sizeof(float));                                 \
    }
    SCORE(0, 6)
    SCORE(1, 7)
    SCORE(2, 6)
    SCORE(3, 7)
#undef SCORE
    FENCE();
}

/* Weights of a block of queries, rounded; zero behind the tile's last key. */
static void round_weights(const Tiled *t, const Tile *tile, int64_t first, int64_t tall) {
    int there = (tile->to + WIDE - 1) / WIDE * WIDE;
    for (int64_t i = 0; i < tall; i++) {
        const float *from = t->w.scores + (first + i) * TILE_KEYS;
        uint16_t *to = t->weights + i * TERMS;
        int real = first + i < t->w.count;
        for (int s = 0; s < TILE_KEYS / TERMS; s++, from += TERMS, to += tall * TERMS) {
            __m512 low = real && there > s * TERMS ? v_load(from) : v_set(0);
            __m512 high = real && there > s * TERMS + WIDE ? v_load(from + WIDE) : v_set(0);
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* sums += weights times values, of a block of queries */
static void weigh(const Tiled *t, const Tile *tile, int64_t first, int64_t tall) {
    int64_t stride = t->w.padded * (int64_t)sizeof(float);
    float *sums = t->w.sums + first * t->w.padded;
    const uint16_t *p = t->weights, *v = t->values;
    FENCE();
#define WEIGH(T, V)                                                                                \
    _tile_loadd(T, sums + (T)*WIDE, stride);                                                       \
    _tile_loadd(V, v + (T)*2 * TILE, 64);                                                          \
    _tile_dpbf16ps(T, 4, V);                                                                       \
    if (more) {                                                                                    \
        _tile_loadd(V, v + ((T)*2 + 1) * TILE, 64);                                                \
        _tile_dpbf16ps(T, 5, V);                                                                   \
    }                                                                                              \
    _tile_stored(T, sums + (T)*WIDE, stride)
    int more = tile->to > TERMS;
    _tile_loadd(4, p, 64);
    _tile_loadd(5, p + tall * TERMS, 64);
    for (int64_t d = 0; d < t->w.padded; d += 2 * WIDE, sums += 2 * WIDE, v += 4 * TILE) {
        WEIGH(0, 6);
        WEIGH(1, 7);
    }
#undef WEIGH
    FENCE();
}

static void visit(const Walk *w, const Place *at, const Tile *tile, const Tile *next) {
    const Tiled *t = (const Tiled *)w;
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads, tall = tall_of(w);
    if (w->count <= FEW) {
        visit_few(w, at, tile, next);
        return;
    }
    pack_keys(t, tile);
    pack_values(t, tile);
    for (int64_t first = 0; first < w->count; first += tall) {
        int64_t rows = w->count - first < tall ? w->count - first : tall;
        int some = 0;
        for (int64_t i = first; i < first + rows; i++)
            some |= a->positions[at->row + i / group] >= at->start;
        if (!some) continue;
        score(t, tile, first, tall);
        soften_rows(w, at, tile, first, rows);
        round_weights(t, tile, first, tall);
        weigh(t, tile, first, tall);
    }
}

static uint16_t *cut_halves(float **from, int64_t halves) {
    return (uint16_t *)cut(from, halves / 2);
}

int attention_on_tiles(const Attention *a) {
    if (a->dim % TERMS) return kernels_avx512.attention(a);
    int64_t group = a->heads / a->kv_heads;
    int64_t together = group < QUERIES_TOGETHER ? QUERIES_TOGETHER / group : 1;
    int64_t most = (together * group + WIDE - 1) / WIDE * WIDE;
    size_t floats = (size_t)(most * (a->dim + a->dim / 2 + TILE_KEYS + a->dim + LANES + 1) +
                             TILE_KEYS * a->dim + TILE_KEYS * WIDE / 2 + 10 * 16);
    void *memory = malloc(floats * sizeof(float) + 64);
    if (!memory) return -1;
    float *free_from = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    Tiled t = {.w = {.a = a, .padded = a->dim}};
    t.w.q = cut(&free_from, most * a->dim);
    t.w.scores = cut(&free_from, most * TILE_KEYS);
    t.w.sums = cut(&free_from, most * a->dim);
    t.w.weight = cut(&free_from, most * LANES);
    t.w.peak = cut(&free_from, most);
    t.queries = cut_halves(&free_from, most * a->dim);
    t.keys = cut_halves(&free_from, TILE_KEYS * a->dim);
    t.values = cut_halves(&free_from, TILE_KEYS * a->dim);
    t.weights = cut_halves(&free_from, TILE_KEYS * WIDE);
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSHED);
    walk(&t.w, together, pack_queries, visit);
    _mm_setcsr(mode);
    _tile_release();
    free(memory);
    return 0;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
