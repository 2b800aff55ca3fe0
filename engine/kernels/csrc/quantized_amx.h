/* Quantized products of more than 16 rows on the tiles of AMX; a part of quantized_vnni512.c, whose
 * products serve fewer rows.
 *
 * Weights of a panel are unpacked once for all rows. In kinds with blocks of 256, each weight is then
 * multiplied with the scale of its part, which takes 13 bits: the low byte and the high byte are
 * two tiles, so the sum of a block is two chains of tile products, and no part has a sum of its
 * own. In kinds with blocks of 32, a block is one tile of half the depth.
 *
 * x is stored by 16 rows: tiles of a unit, then words as in X_WIDE and X_NARROW, one of each row after
 * the other: sums of 32 in pairs of int16, scale; or minus the sum, scale.
 *
 * Invariant: the integers that become floats are those of all other products, and floats are added in
 * the same order, so the bits are the same.
 */
#include "amx_tiles.h"

#define X_TILE (TILE_ROWS * TILE_BYTES)
#define WIDE_TILES (4 * X_TILE)
#define NARROW_TILES (TILE_ROWS * 32)
#define WIDE_UNIT (WIDE_TILES + TILE_ROWS * (16 + 4))
#define NARROW_UNIT (NARROW_TILES + TILE_ROWS * (4 + 4))

/* Unpacked bytes of a unit of weights. */
#define WIDE_PANEL (8 * X_TILE)
#define NARROW_PANEL (8 * TILE_BYTES)

static inline int64_t unit_of(const QuantizedRows *q) { return q->wide ? WIDE_UNIT : NARROW_UNIT; }
static inline int64_t units_in(const QuantizedRows *q) { return q->in / (q->wide ? 256 : 32); }

/* ---- activations ---- */

/* A row after the last one is zero. */
static void put_row(const QuantizedRows *q, int64_t row) {
    const int64_t r = row % TILE_ROWS, span = q->wide ? 256 : 32;
    const float *x = q->x + row * q->in;
    uint8_t *to = q->to + row / TILE_ROWS * units_in(q) * unit_of(q);
    for (int64_t i = 0; i < units_in(q); i++, to += unit_of(q)) {
        int8_t v[256] = {0};
        float d = row < q->rows ? to_int8(x + i * span, (int)span, v) : 0;
        int32_t *words = (int32_t *)(to + (q->wide ? WIDE_TILES : NARROW_TILES)) + r;
        if (q->wide) {
            for (int t = 0; t < 4; t++) memcpy(to + t * X_TILE + r * TILE_BYTES, v + 64 * t, 64);
            for (int part = 0; part < 8; part++) {
                int16_t sum = (int16_t)sum_of(v + 32 * part, 32);
                memcpy((int16_t *)(words + part / 2 * TILE_ROWS) + part % 2, &sum, 2);
            }
            memcpy(words + 4 * TILE_ROWS, &d, 4);
        } else {
            memcpy(to + r * 32, v, 32);
            words[0] = -sum_of(v, 32);
            memcpy(words + TILE_ROWS, &d, 4);
        }
    }
}

static void quantize_for_tiles(const QuantizedRows *q, int64_t first, int64_t end) {
    if (q->rows <= TILE_ROWS) {
        quantize(q, first, end);
        return;
    }
    int64_t stop = end * TOGETHER;
    if (stop >= q->rows) stop = (q->rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int64_t row = first * TOGETHER; row < stop; row++) put_row(q, row);
}

/* ---- weights ---- */

/* Two int16 of each lane: a scale, which is a byte. */
ALWAYS ib twice(iv scale) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, scale, _mm512_slli_epi32(scale, 16));
}

/* Unpack a step of a panel: [4 tiles of 64 weights][low bytes, high bytes]. */
ALWAYS void unpack_wide(const int FORM, const uint8_t *w, uint8_t *to) {
    const int mins = FORM == FORM_4 || FORM == FORM_5;
    const ib low_byte = _mm512_set1_epi16(255), less = _mm512_set1_epi16(mins ? 0 : 32);
    const uint8_t *q = w + 320;
    for (int j = 0; j < 8; j++, q += WIDE_BODY(FORM)) {
        uint8_t *tile = to + j / 2 * 2 * X_TILE + j % 2 * 8 * TILE_BYTES;
        UNROLL for (int g = 0; g < 8; g++, tile += TILE_BYTES) {
            const uint8_t *scale = w + 64 + (mins ? j : 2 * j + g / 4) * PANEL;
            ib s = twice(mins ? s_unsigned(scale) : s_signed(scale)), v = granule(FORM, q, g);
            ib even = _mm512_sub_epi16(_mm512_and_si512(v, low_byte), less);
            ib odd = _mm512_sub_epi16(_mm512_srli_epi16(v, 8), less);
            even = _mm512_mullo_epi16(even, s), odd = _mm512_mullo_epi16(odd, s);
            ib low = _mm512_or_si512(_mm512_and_si512(even, low_byte), _mm512_slli_epi16(odd, 8));
            ib high = _mm512_or_si512(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(low_byte, odd));
            _mm512_store_si512(tile, low);
            _mm512_store_si512(tile + X_TILE, high);
        }
    }
}

/* Unpack block i of a panel, as signed bytes. */
ALWAYS void unpack_narrow(const int FORM, const int SHIFT, const int MINS, const uint8_t *w,
                          int64_t i, uint8_t *to) {
    const int64_t head = MINS ? 128 : 64;
    const uint8_t *q = w + i / 2 * (head + 2 * NARROW_BODY(FORM)) + head + i % 2 * NARROW_BODY(FORM);
    const ib less = _mm512_set1_epi8((char)(SHIFT < 0 ? 0 : 1 << SHIFT));
    UNROLL for (int g = 0; g < 8; g++)
        _mm512_store_si512(to + g * TILE_BYTES, _mm512_sub_epi8(granule(FORM, q, g), less));
}

/* ---- products ---- */

/* 16 rows of x from a unit on, `next` bytes before the next 16; their number. */
typedef struct {
    const uint8_t *x;
    int64_t next, rows;
} Tall;

/* acc[rows][PANEL] += one step of a panel, unpacked in b; TALL tiles of rows. */
ALWAYS void tiles_of_step(const int FORM, const int TALL, const uint8_t *w, const uint8_t *b,
                          const Tall *at, float *acc) {
    const int mins = FORM == FORM_4 || FORM == FORM_5;
    int32_t low[2 * TILE_ROWS][PANEL] __attribute__((aligned(64)));
    int32_t high[2 * TILE_ROWS][PANEL] __attribute__((aligned(64)));
    const uint8_t *x = at->x, *y = x + at->next;
    tile_zero(0);
    tile_zero(1);
    if (TALL == 2) {
        tile_zero(2);
        tile_zero(3);
    }
    for (int t = 0; t < 4; t++, x += X_TILE, y += X_TILE, b += 2 * X_TILE) {
        tile_load(6, b, TILE_BYTES);
        tile_stream(4, x, TILE_BYTES);
        tile_unsigned(0, 4, 6);
        tile_load(7, b + X_TILE, TILE_BYTES);
        tile_signed(1, 4, 7);
        if (TALL == 2) {
            tile_stream(5, y, TILE_BYTES);
            tile_unsigned(2, 5, 6);
            tile_signed(3, 5, 7);
        }
    }
    tile_store(0, low, TILE_BYTES);
    tile_store(1, high, TILE_BYTES);
    if (TALL == 2) {
        tile_store(2, low + TILE_ROWS, TILE_BYTES);
        tile_store(3, high + TILE_ROWS, TILE_BYTES);
    }
    FENCE();
    iv pairs[4];
    fv d = f_halves(w), least = f_halves(w + 32);
    if (FORM == FORM_3) d = f_mul(d, f_set(0.125f));
    for (int i = 0; mins && i < 4; i++) pairs[i] = i_pairs(w + 192 + i * 32);
    for (int64_t r = 0; r < at->rows; r++, acc += PANEL) {
        const uint8_t *after = (r < TILE_ROWS ? x : y) + r % TILE_ROWS * 4;
        iv sum = _mm512_add_epi32(_mm512_load_si512(low[r]),
                                  _mm512_slli_epi32(_mm512_load_si512(high[r]), 8));
        fv dx = f_set(*(const float *)(after + 4 * TILE_ROWS * 4));
        fv term = f_mul(f_mul(d, dx), f_of(sum));
        if (mins) {
            iv less = i_set(0);
            UNROLL for (int i = 0; i < 4; i++)
                less = i_dot2(less, pairs[i], *(const int32_t *)(after + i * TILE_ROWS * 4));
            term = f_sub(term, f_mul(f_mul(least, dx), f_of(less)));
        }
        f_store(acc, f_add(f_load(acc), term));
    }
}

/* acc[rows][PANEL] += COUNT blocks from i on, an even number, unpacked in b. */
ALWAYS void tiles_of_blocks(const int FORM, const int MINS, const int COUNT, const uint8_t *w,
                            int64_t i, const uint8_t *b, const Tall *at, float *acc) {
    int32_t sums[2][2 * TILE_ROWS][PANEL] __attribute__((aligned(64)));
    const uint8_t *x = at->x, *y = x + at->next;
#define BLOCK(T, U, N)                                                                             \
    tile_zero(T);                                                                                  \
    tile_load(6, b + (N)*NARROW_PANEL, TILE_BYTES);                                                \
    tile_load(4, x + (N)*NARROW_UNIT, 32);                                                         \
    tile_signed(T, 4, 6);                                                                          \
    tile_store(T, sums[N], TILE_BYTES);                                                            \
    if (at->rows > TILE_ROWS) {                                                                    \
        tile_zero(U);                                                                              \
        tile_load(5, y + (N)*NARROW_UNIT, 32);                                                     \
        tile_signed(U, 5, 6);                                                                      \
        tile_store(U, sums[N] + TILE_ROWS, TILE_BYTES);                                            \
    }
    BLOCK(0, 1, 0)
    if (COUNT == 2) { BLOCK(2, 3, 1) }
#undef BLOCK
    FENCE();
    fv d[2], least[2];
    w += i / 2 * ((MINS ? 128 : 64) + 2 * NARROW_BODY(FORM));
    for (int n = 0; n < COUNT; n++) d[n] = f_halves(w + 32 * n), least[n] = f_halves(w + 32 * n + 64);
    for (int64_t r = 0; r < at->rows; r++, acc += PANEL) {
        const uint8_t *after = (r < TILE_ROWS ? x : y) + NARROW_TILES + r % TILE_ROWS * 4;
        fv sum = f_load(acc);
        UNROLL for (int n = 0; n < COUNT; n++, after += NARROW_UNIT) {
            fv dx = f_set(*(const float *)(after + TILE_ROWS * 4));
            fv term = f_mul(f_mul(d[n], dx), f_of(_mm512_load_si512(sums[n][r])));
            if (MINS) term = f_sub(term, f_mul(f_mul(least[n], dx), f_set((float)*(const int32_t *)after)));
            sum = f_add(sum, term);
        }
        f_store(acc, sum);
    }
}

/* Units first.. of a panel, with all rows. */
typedef struct {
    const QuantizedRows *q;
    const QuantizedLinear *l;
    int64_t panel, first, count;
} Part;

/* acc += the part, unpacked in b, with the rows of `at` */
ALWAYS void tiles_of_rows(const int KIND, const Part *p, const uint8_t *w, const uint8_t *b,
                          const Tall *at, float *acc) {
    Tall now = *at;
    if (KIND < Q8_0) {
        for (int64_t i = 0; i < p->count; i++, now.x += WIDE_UNIT, b += WIDE_PANEL) {
            const uint8_t *step = w + (p->first + i) * quantized_kinds[KIND].step;
            if (at->rows > TILE_ROWS) tiles_of_step(WIDE_FORM(KIND), 2, step, b, &now, acc);
            else tiles_of_step(WIDE_FORM(KIND), 1, step, b, &now, acc);
        }
        return;
    }
    for (int64_t i = 0; i < p->count; i += 2, now.x += 2 * NARROW_UNIT, b += 2 * NARROW_PANEL) {
        int64_t block = p->first + i;
        if (i + 1 < p->count) tiles_of_blocks(NARROW_FORM(KIND), HAS_MINS(KIND), 2, w, block, b, &now, acc);
        else tiles_of_blocks(NARROW_FORM(KIND), HAS_MINS(KIND), 1, w, block, b, &now, acc);
    }
}

/* y of one panel, for all rows; after the first part, y has sums. */
ALWAYS void part_on_tiles(const int KIND, const Part *p) {
    const QuantizedRows *q = p->q;
    const QuantizedLinear *l = p->l;
    const QuantizedKind *k = &quantized_kinds[KIND];
    uint8_t b[SLICE * PANEL * 2] __attribute__((aligned(64)));
    float acc[2 * TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t next = units_in(q) * unit_of(q), width = l->out - p->panel * PANEL, rows;
    size_t bytes = (size_t)(width < PANEL ? width : PANEL) * sizeof(float);
    const uint8_t *w = l->panels + p->panel * ((q->in + k->span - 1) / k->span) * k->step;
    for (int64_t i = 0; i < p->count; i++) {
        if (KIND < Q8_0) unpack_wide(WIDE_FORM(KIND), w + (p->first + i) * k->step, b + i * WIDE_PANEL);
        else unpack_narrow(NARROW_FORM(KIND), NARROW_SHIFT(KIND), HAS_MINS(KIND), w, p->first + i,
                           b + i * NARROW_PANEL);
    }
    for (int64_t row = 0; row < q->rows; row += rows) {
        rows = q->rows - row < 2 * TILE_ROWS ? q->rows - row : 2 * TILE_ROWS;
        float *y = l->y + row * l->ldy + p->panel * PANEL;
        Tall at = {q->to + row / TILE_ROWS * next + p->first * unit_of(q), next, rows};
        if (!p->first && !l->bias) memset(acc, 0, sizeof acc);
        for (int64_t r = 0; r < rows && (p->first || l->bias); r++)
            memcpy(acc + r * PANEL, p->first ? y + r * l->ldy : l->bias + p->panel * PANEL,
                   p->first ? bytes : sizeof(float) * PANEL);
        tiles_of_rows(KIND, p, w, b, &at, acc);
        for (int64_t r = 0; r < rows; r++) memcpy(y + r * l->ldy, acc + r * PANEL, bytes);
    }
}

#define PART_OF(KIND)                                                                              \
    static void part_##KIND(const Part *p) { part_on_tiles(KIND, p); }
PART_OF(Q4_K) PART_OF(Q5_K) PART_OF(Q6_K) PART_OF(Q3_K) PART_OF(Q8_0)
PART_OF(Q5_0) PART_OF(Q4_0) PART_OF(IQ4_NL) PART_OF(Q4_1) PART_OF(Q5_1)

static void (*const parts_of[QUANTIZED_KINDS])(const Part *) = {
    [Q4_K] = part_Q4_K, [Q5_K] = part_Q5_K, [Q6_K] = part_Q6_K, [Q3_K] = part_Q3_K,
    [Q8_0] = part_Q8_0, [Q5_0] = part_Q5_0, [Q4_0] = part_Q4_0, [IQ4_NL] = part_IQ4_NL,
    [Q4_1] = part_Q4_1, [Q5_1] = part_Q5_1,
};

static void product_on_tiles(const QuantizedRows *q, const QuantizedLinear *l, int64_t first,
                             int64_t end) {
    if (q->rows <= TILE_ROWS) {
        product(q, l, first, end);
        return;
    }
    int64_t slice = SLICE / (q->wide ? 256 : 32), all = units_in(q);
    configure(TILE_ROWS, q->wide ? TILE_BYTES : 32);
    for (int64_t panel = first; panel < end; panel++)
        for (int64_t i = 0; i < all; i += slice) {
            Part p = {q, l, panel, i, all - i < slice ? all - i : slice};
            parts_of[l->kind](&p);
        }
    tile_release();
}

const Products products_amx = {
    .name = "amx", .quantize = quantize_for_tiles, .product = product_on_tiles};
