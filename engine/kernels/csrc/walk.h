/* Queries on their walk over the tiles: their scores become weights, with a running peak. */

#include "tiles.h"

/* Rows times heads of a group that walk the tiles together. */
#define QUERIES_TOGETHER 96

typedef struct {
    const Attention *a;
    int64_t count;     /* queries: rows * group, row-major */
    int64_t padded;    /* dim rounded up to whole vectors */
    float *q;          /* [count, dim], scaled */
    float *keys;       /* transposed tile: [TILE_KEYS / STRIP, dim, STRIP] */
    float *values;     /* tile, [TILE_KEYS, padded], where it must be copied */
    float *scores;     /* [count, TILE_KEYS] */
    float *sums;       /* [count, padded] */
    float *weight;     /* [count, LANES] partial sums of the softmax */
    float *peak;       /* [count] largest score so far */
} Walk;

/* Turn the scores of one query into weights relative to its running peak. from..to: keys seen. */
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

/* Queries first..first+rows: their scores become weights. */
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

/* The queries of a head of the place's rows, nothing seen yet. */
static void begin(Walk *w, const Place *at) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    w->count = at->rows * group;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = at->kv_head * group + i % group;
        const float *q = a->q + ((at->row + i / group) * a->heads + head) * a->dim;
        for (int64_t d = 0; d < a->dim; d++) w->q[i * a->dim + d] = q[d] * a->scale;
        w->peak[i] = -INFINITY;
    }
    memset(w->sums, 0, (size_t)(w->count * w->padded) * sizeof(float));
    memset(w->weight, 0, (size_t)(w->count * LANES) * sizeof(float));
}

static void finish(const Walk *w, const Place *at) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = at->kv_head * group + i % group;
        float *out = a->out + ((at->row + i / group) * a->heads + head) * a->dim;
        float share = 1.0f / v_total(v_load(w->weight + i * LANES));
        for (int64_t d = 0; d < a->dim; d++) out[d] = w->sums[i * w->padded + d] * share;
    }
}

/* What is done with one tile; `next` is fetched meanwhile. */
typedef void Visit(const Walk *, const Place *, const Tile *, const Tile *next);

/* All tiles of all rows, each found one ahead of its turn. `ready` is told of new queries. */
static void walk(Walk *w, int64_t together, void (*ready)(const Walk *), Visit *visit) {
    const Attention *a = w->a;
    Place here = {0}, there;
    Tile tiles[2], *tile = tiles, *next = tiles + 1;
    int more = enter(a, 0, together, &here);
    if (more) find_tile(a, &here, tile);
    for (; more; here = there) {
        there = here;
        more = advance(a, together, &there);
        if (more) find_tile(a, &there, next);
        if (here.start == first_start(&here)) {
            begin(w, &here);
            if (ready) ready(w);
        }
        visit(w, &here, tile, more ? next : tile);
        if (here.start + TILE_KEYS > here.high) finish(w, &here);
        Tile *done = tile;
        tile = next, next = done;
    }
}

static float *cut(float **from, int64_t floats) {
    float *piece = *from;
    *from += (floats + 15) / 16 * 16;
    return piece;
}
