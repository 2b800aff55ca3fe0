/* Causal attention over a paged cache, grouped query heads, online softmax.
 *
 * Invariant: the terms of a row's sums and their order depend only on its own query, position
 * and keys. Keys come in tiles of TILE_KEYS aligned to absolute positions. A key that a row does
 * not see has weight 0, and adding 0 changes no bit. So a row may share a tile's loads with any
 * other rows and with the heads of its group.
 */

#include "walk.h"

#include "strips.h"

#include "few.h"

/* Turn the scores of one query into weights relative to its running maximum. from..to: keys seen. */
static void soften(const Walk *w, const Tile *tile, int64_t i, int from, int to) {
    const vf none = v_set(-INFINITY);
    float *s = w->scores + i * TILE_KEYS, *sums = w->sums + i * w->padded;
    vf top = none;
    for (int j = 0; j < tile->to; j += LANES) {
        vf v = v_load(s + j);
        int inside = from - j < 0 ? 0 : from - j < LANES ? from - j : LANES;
        int beyond = to - j < 0 ? 0 : to - j < LANES ? to - j : LANES;
        if (inside > 0 || beyond < LANES) v = v_between(v, none, inside, beyond);
        v_store(s + j, v);
        top = v_max(top, v);
    }
    float highest = v_largest(top), peak = w->peak[i] > highest ? w->peak[i] : highest;
    float minus = peak == -INFINITY ? 0.0f : -peak;
    vf total = v_load(w->weight + i * LANES), shift = v_set(minus);
    if (peak != w->peak[i]) {
        vf fade = v_exp(v_set(w->peak[i] + minus));
        total = v_mul(total, fade);
        for (int64_t d = 0; d < w->padded; d += LANES)
            v_store(sums + d, v_mul(v_load(sums + d), fade));
        w->peak[i] = peak;
    }
    for (int j = 0; j < tile->to; j += LANES) {
        vf v = v_exp(v_add(v_load(s + j), shift));
        v_store(s + j, v);
        total = v_add(total, v);
    }
    v_store(w->weight + i * LANES, total);
}

/* Turn the scores of queries first..first+rows into weights. */
static void soften_rows(const Walk *w, const Place *at, const Tile *tile, int64_t first,
                        int64_t rows) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = first; i < first + rows; i++) {
        int64_t p = a->positions[at->row + i / group];
        int64_t from = lowest(a, p) - at->start, to = p + 1 - at->start;
        from = from < 0 ? 0 : from > TILE_KEYS ? TILE_KEYS : from;
        to = to < 0 ? 0 : to > TILE_KEYS ? TILE_KEYS : to;
        soften(w, tile, i, (int)from, (int)to);
    }
}

static void transpose_keys(const Walk *w, const Tile *tile) {
    int64_t dim = w->a->dim;
    for (int j = 0; j < tile->to; j += LANES) {
        float *to = w->keys + j / STRIP * STRIP * dim + j % STRIP;
        int64_t d = 0;
        for (; d + 4 <= dim; d += 4) {
            vf at[4];
            v_columns(tile->key + j, d, at);
            for (int i = 0; i < 4; i++) v_store(to + (d + i) * STRIP, at[i]);
        }
        for (; d < dim; d++)
            for (int i = 0; i < LANES; i++) to[d * STRIP + i] = tile->key[j + i][d];
    }
}

static void score(const Walk *w, const Tile *tile, int64_t first, int64_t rows) {
    int64_t dim = w->a->dim;
    for (int j = 0; j < tile->to; j += STRIP) {
        int vectors = (tile->to - j + LANES - 1) / LANES;
        if (vectors > TILE_VECTORS) vectors = TILE_VECTORS;
        strips[vectors - 1][rows - 1](w->q + first * dim, dim, w->keys + j * dim, STRIP, 0, dim,
                                     zeros, 0, w->scores + first * TILE_KEYS + j, TILE_KEYS);
    }
}

static void copy_values(const Walk *w, const Tile *tile) {
    for (int j = tile->from; j < tile->to; j++)
        memcpy(w->values + j * w->padded, tile->key[j] + tile->to_value,
               (size_t)w->a->dim * sizeof(float));
}

/* sums += weights of keys from..to times their values, which are `step` apart */
static void add_values(const Walk *w, int64_t first, int64_t rows, int from, int to,
                       const float *values, int64_t step) {
    for (int64_t d = 0; d < w->padded; d += STRIP) {
        int64_t vectors = (w->padded - d) / LANES;
        if (vectors > TILE_VECTORS) vectors = TILE_VECTORS;
        float *sums = w->sums + first * w->padded + d;
        strips[vectors - 1][rows - 1](w->scores + first * TILE_KEYS + from, TILE_KEYS, values + d,
                                     step, 0, to - from, sums, w->padded, sums, w->padded);
    }
}

static void weigh(const Walk *w, const Tile *tile, int copied, int64_t first, int64_t rows) {
    if (copied) {
        add_values(w, first, rows, tile->from, tile->to, w->values + tile->from * w->padded,
                   w->padded);
        return;
    }
    for (int j = tile->from, next; j < tile->to; j = next) { /* runs inside one block */
        for (next = j + 1; next < tile->to; next++)
            if (tile->key[next] != tile->key[next - 1] + w->a->dim) break;
        add_values(w, first, rows, j, next, tile->key[j] + tile->to_value, w->a->dim);
    }
}

static void walk_few(const Walk *w, const Place *at, const Tile *tile, const Tile *next) {
    score_few[w->count - 1](w, tile, next);
    soften_rows(w, at, tile, 0, w->count);
    weigh_few[w->count - 1](w, tile, next);
}

static void walk_many(const Walk *w, const Place *at, const Tile *tile) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    int copied = w->count > 2 * QUERY_ROWS || w->padded != a->dim;
    transpose_keys(w, tile);
    if (copied) copy_values(w, tile);
    for (int64_t first = 0; first < w->count; first += QUERY_ROWS) {
        int64_t rows = w->count - first < QUERY_ROWS ? w->count - first : QUERY_ROWS;
        int some = 0;
        for (int64_t i = first; i < first + rows; i++)
            some |= a->positions[at->row + i / group] >= at->start;
        if (!some) continue;
        score(w, tile, first, rows);
        soften_rows(w, at, tile, first, rows);
        weigh(w, tile, copied, first, rows);
    }
}

static void visit(const Walk *w, const Place *at, Tile *tile, const Tile *next) {
    open_tile(w->a, tile, w->rows);
    if (w->count <= FEW && w->padded == w->a->dim) walk_few(w, at, tile, next);
    else walk_many(w, at, tile);
}

static int attend(void *shared, int64_t from, int64_t to, int seat) {
    const Shared *s = shared;
    float *more;
    Walk w = begin_walk(s, seat, &more);
    w.keys = cut(&more, TILE_KEYS * s->a->dim);
    w.values = cut(&more, TILE_KEYS * s->padded);
    w.rows = cut(&more, rows_of(s->a));
    memset(w.values, 0, (size_t)(TILE_KEYS * s->padded) * sizeof(float)); /* columns past dim */
    walk(&w, s->together, from, to, NULL, visit);
    return 0;
}

static int attention(const Attention *a) {
    int64_t group = a->heads / a->kv_heads;
    int64_t together = group < QUERIES_TOGETHER ? QUERIES_TOGETHER / group : 1;
    int64_t padded = (a->dim + LANES - 1) / LANES * LANES;
    return attend_all(a, attend, together, together * group, padded,
                      TILE_KEYS * (a->dim + padded) + rows_of(a), 3);
}
