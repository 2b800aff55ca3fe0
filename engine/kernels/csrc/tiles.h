/* The tiles of attention: addresses of their keys and values, and the order of the tiles. */

/* The current tile: of rows row..row+rows of one sequence, from position `start` on. */
typedef struct {
    int64_t sequence, row, rows;
    int64_t low, high; /* positions that some row sees */
    int64_t kv_head, start;
} Place;

typedef struct {
    int from, to;      /* keys of the tile that some row sees */
    const char *stored[TILE_KEYS]; /* rows of the cache, of from..to */
    int64_t to_stored;             /* from a key's row to its value's row, in bytes */
    const float *key[TILE_KEYS];   /* the same rows to read, clamped into from..to */
    int64_t to_value;  /* from a key to its value, in floats */
} Tile;

static void find_tile(const Attention *a, const Place *p, Tile *tile) {
    const int32_t *table = a->tables + p->sequence * a->table_width;
    int64_t plane = a->block_size * a->row_bytes, stride = 2 * a->kv_heads * plane;
    tile->from = p->low > p->start ? (int)(p->low - p->start) : 0;
    tile->to = p->high + 1 - p->start < TILE_KEYS ? (int)(p->high + 1 - p->start) : TILE_KEYS;
    tile->to_stored = a->kv_heads * plane;
    int64_t block = (p->start + tile->from) / a->block_size;
    int64_t offset = (p->start + tile->from) % a->block_size;
    for (int j = tile->from; j < tile->to; j++) {
        tile->stored[j] = a->kv + table[block] * stride + p->kv_head * plane + offset * a->row_bytes;
        if (++offset == a->block_size) block++, offset = 0;
    }
}

/* Floats of the memory into which the rows of a tile are read. */
static inline int64_t rows_of(const Attention *a) {
    return a->kind == KV_FLOATS ? 0 : 2 * TILE_KEYS * a->dim;
}

/* Rows before and after the keys that some row sees are the first and the last of these. */
static inline void clamp(Tile *tile) {
    for (int j = 0; j < tile->from; j++) tile->key[j] = tile->key[tile->from];
    for (int j = tile->to; j < TILE_KEYS; j++) tile->key[j] = tile->key[tile->to - 1];
}

/* Make the rows of a tile readable, in `rows` unless the cache has floats. */
static void open_tile(const Attention *a, Tile *tile, float *rows) {
    const int64_t dim = a->dim;
    tile->to_value = a->kind == KV_FLOATS ? tile->to_stored / 4 : TILE_KEYS * dim;
    for (int j = tile->from; j < tile->to; j++) {
        float *row = rows + j * dim;
        tile->key[j] = a->kind == KV_FLOATS ? (const float *)tile->stored[j] : row;
        if (a->kind == KV_FLOATS) continue;
        open_row(a->kind, tile->stored[j], row, dim);
        open_row(a->kind, tile->stored[j] + tile->to_stored, row + tile->to_value, dim);
    }
    clamp(tile);
}

/* First position that a row sees. */
static inline int64_t lowest(const Attention *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

static inline int64_t first_start(const Place *p) { return p->low / TILE_KEYS * TILE_KEYS; }

/* Go to the rows from `row` on, at most `together`; returns 0 if none are left. */
static int enter(const Attention *a, int64_t row, int64_t together, Place *p) {
    while (p->sequence < a->sequences && row >= a->offsets[p->sequence + 1]) p->sequence++;
    if (p->sequence == a->sequences) return 0;
    int64_t left = a->offsets[p->sequence + 1] - row;
    p->row = row, p->rows = left < together ? left : together;
    p->low = INT64_MAX, p->high = 0, p->kv_head = 0;
    for (int64_t t = row; t < row + p->rows; t++) {
        int64_t at = a->positions[t], low = lowest(a, at);
        p->low = low < p->low ? low : p->low;
        p->high = at > p->high ? at : p->high;
    }
    p->start = first_start(p);
    return 1;
}

/* Go to the next tile of the head, head of the rows, rows, sequence; returns 0 after the last. */
static int advance(const Attention *a, int64_t together, Place *p) {
    p->start += TILE_KEYS;
    if (p->start <= p->high) return 1;
    p->start = first_start(p);
    if (++p->kv_head < a->kv_heads) return 1;
    return enter(a, p->row + p->rows, together, p);
}
