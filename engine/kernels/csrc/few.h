/* Attention of few queries, limited by memory: the heads of one group of a decode row.
 *
 * The arithmetic is that of attention.h, in the same order. The difference is in memory access: keys
 * are transposed in registers instead of in a tile. While one tile is computed, the lines
 * of the next are prefetched, a few per step, because a burst would stall the computation.
 */
#define FEW 8

/* Bytes of four cache lines. */
#define BITE 256

/* Prefetch state of one half of a tile, keys or values. */
typedef struct {
    const char *const *row, *const *stop;
    int64_t side, offset, bytes; /* of a row */
    int64_t pace; /* bites per step */
} Ahead;

/* Prefetch keys (side 0) or values of a tile within `steps` steps. */
static inline Ahead ahead_of(const Tile *tile, int64_t bytes, int64_t side, int64_t steps) {
    int64_t bites = (tile->to - tile->from) * ((bytes + BITE - 1) / BITE);
    return (Ahead){tile->stored + tile->from, tile->stored + tile->to, side, 0, bytes,
                   (bites + steps - 1) / steps};
}

static inline void fetch(Ahead *ahead) {
    for (int64_t n = ahead->pace; n > 0 && ahead->row < ahead->stop; n--) {
        const char *at = *ahead->row + ahead->side + ahead->offset;
        for (int line = 0; line < BITE; line += 64) __builtin_prefetch(at + line, 0, 2);
        ahead->offset += BITE;
        if (ahead->offset >= ahead->bytes) ahead->offset = 0, ahead->row++;
    }
}

#define EVER static inline __attribute__((always_inline)) void
#define UNROLLED(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)

/* Scores of R queries with the keys of a tile. */
EVER score_them(const Walk *w, const Tile *tile, const Tile *next, const int R) {
    const int64_t dim = w->a->dim, groups = (tile->to + LANES - 1) / LANES;
    const float *q = w->q;
    Ahead ahead = ahead_of(next, w->a->row_bytes, 0, groups * (dim / 4));
    for (int j = 0; j < tile->to; j += LANES) {
        vf sum[FEW];
        UNROLLED(m, R) sum[m] = v_set(0);
        for (int64_t d = 0; d < dim; d += 4) {
            vf at[4];
            fetch(&ahead);
            v_columns(tile->key + j, d, at);
            UNROLLED(i, 4)
            UNROLLED(m, R) sum[m] = v_fma(v_set(q[m * dim + d + i]), at[i], sum[m]);
        }
        UNROLLED(m, R) v_store(w->scores + m * TILE_KEYS + j, sum[m]);
    }
}

/* The same for NV vectors of dims from d on: sums += weights times values. */
EVER weigh_dims(const Walk *w, const Tile *tile, Ahead *ahead, int64_t d, const int R,
                const int NV) {
    const int64_t dim = w->a->dim;
    vf sum[FEW][TILE_VECTORS], at[TILE_VECTORS];
    float *sums = w->sums + d;
    UNROLLED(m, R) UNROLLED(i, NV) sum[m][i] = v_load(sums + m * dim + i * LANES);
    for (int j = tile->from; j < tile->to; j++) {
        const float *value = tile->key[j] + tile->to_value + d;
        fetch(ahead);
        UNROLLED(i, NV) at[i] = v_load(value + i * LANES);
        UNROLLED(m, R) {
            vf share = v_set(w->scores[m * TILE_KEYS + j]);
            UNROLLED(i, NV) sum[m][i] = v_fma(share, at[i], sum[m][i]);
        }
    }
    UNROLLED(m, R) UNROLLED(i, NV) v_store(sums + m * dim + i * LANES, sum[m][i]);
}

EVER weigh_them(const Walk *w, const Tile *tile, const Tile *next, const int R) {
    const int wide = R * TILE_VECTORS <= CHAINS ? TILE_VECTORS : TILE_VECTORS / 2;
    const int64_t dim = w->a->dim;
    Ahead ahead = ahead_of(next, w->a->row_bytes, next->to_stored, tile->to - tile->from);
    int64_t d = 0;
    for (; d + wide * LANES <= dim; d += wide * LANES) weigh_dims(w, tile, &ahead, d, R, wide);
    for (; d < dim; d += LANES) weigh_dims(w, tile, &ahead, d, R, 1);
}

typedef void Few(const Walk *, const Tile *, const Tile *);

#define FEW_OF(R)                                                                                  \
    static void score_##R(const Walk *w, const Tile *t, const Tile *n) { score_them(w, t, n, R); } \
    static void weigh_##R(const Walk *w, const Tile *t, const Tile *n) { weigh_them(w, t, n, R); }

FEW_OF(1)
FEW_OF(2)
FEW_OF(3)
FEW_OF(4)
FEW_OF(5)
FEW_OF(6)
FEW_OF(7)
FEW_OF(8)

static Few *const score_few[FEW] = {score_1, score_2, score_3, score_4,
                                    score_5, score_6, score_7, score_8};
static Few *const weigh_few[FEW] = {weigh_1, weigh_2, weigh_3, weigh_4,
                                    weigh_5, weigh_6, weigh_7, weigh_8};
