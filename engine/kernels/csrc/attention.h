/* Causal attention over a paged cache, grouped query heads, online softmax.
 *
 * Invariant: what a row adds to its sums, and in which order, depends on its own query, position
 * and keys alone. Keys come in tiles of TILE_KEYS aligned to absolute positions; a key a row does
 * not see has weight 0, and adding 0 changes no bit. So a row may share a tile's loads with any
 * other rows and with the heads of its group.
 */

/* Rows times heads of a group that walk the tiles together. */
#define QUERIES_TOGETHER 96

/* Queries of one micro kernel, and the keys or dims it takes at once. */
#define QUERY_ROWS 6
#define STRIP (TILE_VECTORS * LANES)

#define STRIPS_OF(NV)                                                                              \
    MICRO(strip1_##NV, float, 1, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip2_##NV, float, 2, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip3_##NV, float, 3, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip4_##NV, float, 4, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip5_##NV, float, 5, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip6_##NV, float, 6, 1, NV, LOAD_FLOATS, 0)
#define STRIP_ROWS(NV) {strip1_##NV, strip2_##NV, strip3_##NV, strip4_##NV, strip5_##NV, strip6_##NV}

STRIPS_OF(1)
STRIPS_OF(2)
#if TILE_VECTORS == 4
STRIPS_OF(3)
STRIPS_OF(4)
static Micro *const strips[TILE_VECTORS][QUERY_ROWS] = {STRIP_ROWS(1), STRIP_ROWS(2), STRIP_ROWS(3),
                                                        STRIP_ROWS(4)};
#else
static Micro *const strips[TILE_VECTORS][QUERY_ROWS] = {STRIP_ROWS(1), STRIP_ROWS(2)};
#endif

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

typedef struct {
    int from, to;      /* keys of the tile some row sees */
    const float *key[TILE_KEYS];   /* rows of the cache; clamped into from..to */
    int64_t to_value;  /* from a key's row to its value's row */
} Tile;

static void find_tile(const Attention *a, const int32_t *table, int64_t kv_head, int64_t start,
                      int64_t low, int64_t high, Tile *tile) {
    int64_t plane = a->block_size * a->dim, stride = 2 * a->kv_heads * plane;
    tile->from = low > start ? (int)(low - start) : 0;
    tile->to = high + 1 - start < TILE_KEYS ? (int)(high + 1 - start) : TILE_KEYS;
    tile->to_value = a->kv_heads * plane;
    int64_t block = (start + tile->from) / a->block_size;
    int64_t offset = (start + tile->from) % a->block_size;
    for (int j = tile->from; j < tile->to; j++) {
        tile->key[j] = a->kv + table[block] * stride + kv_head * plane + offset * a->dim;
        if (++offset == a->block_size) block++, offset = 0;
    }
    for (int j = 0; j < tile->from; j++) tile->key[j] = tile->key[tile->from];
    for (int j = tile->to; j < TILE_KEYS; j++) tile->key[j] = tile->key[tile->to - 1];
}

static void transpose_keys(const Walk *w, const Tile *tile) {
    int64_t dim = w->a->dim;
    for (int j = 0; j < tile->to; j += LANES) {
        float *to = w->keys + j / STRIP * STRIP * dim + j % STRIP;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) v_transpose(tile->key + j, d, to + d * STRIP, STRIP);
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

static void copy_values(const Walk *w, const Tile *tile) {
    for (int j = tile->from; j < tile->to; j++)
        memcpy(w->values + j * w->padded, tile->key[j] + tile->to_value,
               (size_t)w->a->dim * sizeof(float));
}

/* sums += weights of keys from..to times their values, which lie `step` apart */
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

static inline int64_t lowest(const Attention *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

static void walk_tile(const Walk *w, int64_t row, int64_t start, const Tile *tile) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    int copied = w->count > 2 * QUERY_ROWS || w->padded != a->dim;
    transpose_keys(w, tile);
    if (copied) copy_values(w, tile);
    for (int64_t first = 0; first < w->count; first += QUERY_ROWS) {
        int64_t rows = w->count - first < QUERY_ROWS ? w->count - first : QUERY_ROWS;
        int some = 0;
        for (int64_t i = first; i < first + rows; i++)
            some |= a->positions[row + i / group] >= start;
        if (!some) continue;
        score(w, tile, first, rows);
        for (int64_t i = first; i < first + rows; i++) {
            int64_t p = a->positions[row + i / group], from = lowest(a, p) - start;
            int64_t to = p + 1 - start;
            from = from < 0 ? 0 : from > TILE_KEYS ? TILE_KEYS : from;
            to = to < 0 ? 0 : to > TILE_KEYS ? TILE_KEYS : to;
            soften(w, tile, i, (int)from, (int)to);
        }
        weigh(w, tile, copied, first, rows);
    }
}

static void begin(const Walk *w, int64_t row, int64_t kv_head) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = kv_head * group + i % group;
        const float *q = a->q + ((row + i / group) * a->heads + head) * a->dim;
        for (int64_t d = 0; d < a->dim; d++) w->q[i * a->dim + d] = q[d] * a->scale;
        w->peak[i] = -INFINITY;
    }
    memset(w->sums, 0, (size_t)(w->count * w->padded) * sizeof(float));
    memset(w->weight, 0, (size_t)(w->count * LANES) * sizeof(float));
}

static void finish(const Walk *w, int64_t row, int64_t kv_head) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = kv_head * group + i % group;
        float *out = a->out + ((row + i / group) * a->heads + head) * a->dim;
        float share = 1.0f / v_total(v_load(w->weight + i * LANES));
        for (int64_t d = 0; d < a->dim; d++) out[d] = w->sums[i * w->padded + d] * share;
    }
}

/* Rows row..row+rows of one sequence. */
static void walk_rows(Walk *w, const int32_t *table, int64_t row, int64_t rows) {
    const Attention *a = w->a;
    int64_t low = INT64_MAX, high = 0;
    for (int64_t t = row; t < row + rows; t++) {
        int64_t p = a->positions[t];
        low = lowest(a, p) < low ? lowest(a, p) : low;
        high = p > high ? p : high;
    }
    w->count = rows * (a->heads / a->kv_heads);
    for (int64_t h = 0; h < a->kv_heads; h++) {
        begin(w, row, h);
        for (int64_t start = low / TILE_KEYS * TILE_KEYS; start <= high; start += TILE_KEYS) {
            Tile tile;
            find_tile(a, table, h, start, low, high, &tile);
            walk_tile(w, row, start, &tile);
        }
        finish(w, row, h);
    }
}

static float *cut(float **from, int64_t floats) {
    float *piece = *from;
    *from += (floats + 15) / 16 * 16;
    return piece;
}

static int attention(const Attention *a) {
    int64_t group = a->heads / a->kv_heads;
    int64_t together = group < QUERIES_TOGETHER ? QUERIES_TOGETHER / group : 1;
    int64_t most = together * group, padded = (a->dim + LANES - 1) / LANES * LANES;
    size_t floats = (size_t)(most * (a->dim + TILE_KEYS + padded + LANES + 1) +
                             TILE_KEYS * (a->dim + padded) + 8 * 16);
    void *memory = malloc(floats * sizeof(float) + 64);
    if (!memory) return -1;
    float *free_from = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    Walk w = {.a = a, .padded = padded};
    w.q = cut(&free_from, most * a->dim);
    w.keys = cut(&free_from, TILE_KEYS * a->dim);
    w.values = cut(&free_from, TILE_KEYS * padded);
    w.scores = cut(&free_from, most * TILE_KEYS);
    w.sums = cut(&free_from, most * padded);
    w.weight = cut(&free_from, most * LANES);
    w.peak = cut(&free_from, most);
    memset(w.values, 0, (size_t)(TILE_KEYS * padded) * sizeof(float)); /* columns past dim */
    for (int64_t s = 0; s < a->sequences; s++)
        for (int64_t row = a->offsets[s]; row < a->offsets[s + 1]; row += together) {
            int64_t left = a->offsets[s + 1] - row;
            walk_rows(&w, a->tables + s * a->table_width, row, left < together ? left : together);
        }
    free(memory);
    return 0;
}
