/* Attention of models in bfloat16 by VDPBF16PS.
 *
 * Queries, keys, values and the weights of the softmax are rounded to bfloat16 where they are
 * multiplied. Scores, maxima, the softmax and its sums, and the outputs' sums stay float32. A float
 * that holds a pair of bfloat16 is two dims of a query or key, or two keys' weights or values.
 *
 * Invariant: as in attention.h, the terms of a row's sums and their order depend only on its
 * own query, position and keys. A score is one chain over pairs of dims, a sum one over pairs of keys;
 * a key that a row does not see has weight 0 and changes no bit. Rows of the cache in any type that
 * holds the same numbers give the same bits.
 */
#include "walk.h"

#include "strips.h"

#include "few.h"

#include "halves.h"

#include "exp2.h"

#include "soften_halves.h"

#define PAIRS_OF_TILE (TILE_KEYS / 2)
#define TOGETHER 192 /* like QUERIES_TOGETHER; a tile of keys is packed for this many */

/* A walk with the content of its tile as pairs. */
typedef struct {
    Walk w;
    float *queries; /* [count, dim / 2] */
    float *keys;    /* [dim / 2, TILE_KEYS] */
    float *values;  /* [PAIRS_OF_TILE, dim] */
    float *weights; /* [QUERY_ROWS, PAIRS_OF_TILE] */
} Paired;

static void round_floats(const float *x, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i += TERMS)
        _mm512_storeu_si512(to + i / 2, halves_of(x + i, x + i + 16));
}

static void round_queries(const Walk *w, const Place *at) {
    (void)at;
    round_floats(w->q, ((const Paired *)w)->queries, w->count * w->a->dim);
}

/* Read a row of the cache. */
static void open_pairs(int64_t kind, const char *from, float *to, int64_t dim) {
    float row[MOST_DIM];
    if (kind != KV_FLOATS) open_row(kind, from, row, dim);
    round_floats(kind == KV_FLOATS ? (const float *)from : row, to, dim);
}

static int64_t rows_of_pairs(const Attention *a) {
    return a->kind == KV_HALVES ? 0 : TILE_KEYS * a->dim;
}

/* Make the rows of a tile readable as pairs of dims, in `rows` unless the cache has bfloat16. */
static void open_tile_of_pairs(const Attention *a, Tile *tile, float *rows) {
    const int64_t pairs = a->dim / 2;
    tile->to_value = a->kind == KV_HALVES ? tile->to_stored / 4 : TILE_KEYS * pairs;
    for (int j = tile->from; j < tile->to; j++) {
        float *row = rows + j * pairs;
        tile->key[j] = a->kind == KV_HALVES ? (const float *)tile->stored[j] : row;
        if (a->kind == KV_HALVES) continue;
        open_pairs(a->kind, tile->stored[j], row, a->dim);
        open_pairs(a->kind, tile->stored[j] + tile->to_stored, row + tile->to_value, a->dim);
    }
    clamp(tile);
}

/* Transpose the keys; the next tile's are prefetched. */
static void pack_keys(const Paired *t, const Tile *tile, const Tile *next) {
    int64_t pairs = t->w.a->dim / 2, groups = (tile->to + LANES - 1) / LANES;
    Ahead ahead = ahead_of(next, t->w.a->row_bytes, 0, groups * (pairs / 4));
    for (int j = 0; j < tile->to; j += LANES)
        for (int64_t d = 0; d < pairs; d += 4) {
            vf at[4];
            fetch(&ahead);
            v_columns(tile->key + j, d, at);
            UNROLLED(i, 4) v_store(t->keys + (d + i) * TILE_KEYS + j, at[i]);
        }
}

/* Values of a key and of the next one, by dims; the next tile's are prefetched. */
static void pack_values(const Paired *t, const Tile *tile, const Tile *next) {
    static const uint16_t turns[2 * TERMS] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_loadu_si512(turns), high = _mm512_loadu_si512(turns + TERMS);
    const int64_t dim = t->w.a->dim;
    Ahead ahead = ahead_of(next, t->w.a->row_bytes, next->to_stored, (tile->to + 1) / 2);
    for (int j = 0; j < tile->to; j += 2) {
        const float *a = tile->key[j] + tile->to_value, *b = tile->key[j + 1] + tile->to_value;
        float *to = t->values + j / 2 * dim;
        fetch(&ahead);
        for (int64_t d = 0; d < dim; d += TERMS, to += TERMS) {
            __m512i one = _mm512_loadu_si512(a + d / 2), two = _mm512_loadu_si512(b + d / 2);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(one, low, two));
            _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(one, high, two));
        }
    }
}

/* Weights of queries first..first+rows. */
static void soften(const Paired *t, const Place *at, int64_t first, int64_t rows) {
    const Attention *a = t->w.a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = first; i < first + rows; i++) {
        float *to = t->weights + (i - first) * PAIRS_OF_TILE;
        vf p[WEIGHTS];
        soften_halves(&t->w, i, keys_seen(a, a->positions[at->row + i / group], at->start), p);
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
        _mm512_storeu_si512(to + LANES, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
    }
}

/* Queries first..first+rows, which see `seen` keys of the tile. */
static void visit_queries(const Paired *t, const Place *at, int64_t first, int64_t rows,
                          int64_t seen) {
    const int64_t dim = t->w.a->dim;
    float *scores = t->w.scores + first * TILE_KEYS, *sums = t->w.sums + first * dim;
    strips[(seen - 1) / LANES][rows - 1](t->queries + first * dim / 2, dim / 2, t->keys, TILE_KEYS, 0,
                                         dim / 2, zeros, 0, scores, TILE_KEYS);
    soften(t, at, first, rows);
    for (int64_t d = 0; d < dim; d += STRIP) {
        int64_t vectors = dim - d < STRIP ? (dim - d) / LANES : TILE_VECTORS;
        strips[vectors - 1][rows - 1](t->weights, PAIRS_OF_TILE, t->values + d, dim, 0,
                                      (seen + 1) / 2, sums + d, dim, sums + d, dim);
    }
}

static void visit(const Walk *w, const Place *at, Tile *tile, const Tile *next) {
    const Attention *a = w->a;
    const Paired *t = (const Paired *)w;
    int64_t group = a->heads / a->kv_heads;
    open_tile_of_pairs(a, tile, w->rows);
    pack_keys(t, tile, next);
    pack_values(t, tile, next);
    for (int64_t first = 0; first < w->count; first += QUERY_ROWS) {
        int64_t rows = w->count - first < QUERY_ROWS ? w->count - first : QUERY_ROWS, seen = 0;
        for (int64_t i = first; i < first + rows; i++) {
            int64_t sees = a->positions[at->row + i / group] + 1 - at->start;
            seen = sees > seen ? sees : seen;
        }
        if (seen) visit_queries(t, at, first, rows, seen < tile->to ? seen : tile->to);
    }
}

static int attend(void *shared, int64_t from, int64_t to, int seat) {
    const Shared *s = shared;
    const int64_t dim = s->a->dim;
    float *more;
    Paired t = {.w = begin_walk(s, seat, &more)};
    t.w.rows = cut(&more, rows_of_pairs(s->a));
    t.queries = cut(&more, s->most * dim / 2);
    t.keys = cut(&more, TILE_KEYS * dim / 2);
    t.values = cut(&more, TILE_KEYS * dim / 2);
    t.weights = cut(&more, QUERY_ROWS * PAIRS_OF_TILE);
    walk(&t.w, s->together, from, to, round_queries, visit);
    return 0;
}

static int attention_of_pairs(const Attention *a) {
    if (!a->halves || a->dim % TERMS) return kernels_avx512.attention(a);
    int64_t group = a->heads / a->kv_heads;
    int64_t together = group < TOGETHER ? TOGETHER / group : 1, most = together * group;
    int64_t floats = rows_of_pairs(a) + most * a->dim / 2 + TILE_KEYS * a->dim +
                     QUERY_ROWS * PAIRS_OF_TILE;
    return attend_all(a, attend, together, most, a->dim, floats, 5);
}
