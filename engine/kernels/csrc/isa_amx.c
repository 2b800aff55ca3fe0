/* Products with bfloat16 weights on the matrix tiles of AMX (Sapphire Rapids and later); all
 * other kernels are the AVX-512 ones.
 *
 * x is rounded to bfloat16, because tiles multiply only bfloat16. Frameworks that run a bfloat16
 * checkpoint in its own type compute the same. Sums stay float32.
 *
 * Attention of such models is in attention_amx.c, their gated MLP in gated_amx.h.
 *
 * Invariant: an output starts at the bias and adds the tile product of every 32 terms in order,
 * whichever rows and panels share the tiles and wherever the chain is split and stored.
 */
#include "kernels.h"

#ifdef HAVE_TILES
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif
#pragma GCC diagnostic ignored "-Wunused-function" /* of the lanes */

#include "lanes_avx512.h"

#include "exp2.h"

#include "round_halves.h"

#include "amx_tiles.h"

#define COLUMNS 16   /* of a panel */
#define WEIGHT_TILE (TERMS * COLUMNS) /* bfloat16 of a panel's step; pairs of terms lie together */
#define WIDE 4       /* adjacent panels for few rows */
/* Rounded rows that fit into the second-level cache beside the streamed weights. */
#define ROUNDED_BYTES (1 << 20)

/* ---- weights ---- */

static inline int64_t steps_of(int64_t in) { return (in + TERMS - 1) / TERMS; }

/* Columns start.. of panels [ceil(out / 16), ceil(in / 32), 16 pairs, 16 columns, 2]. */
static void pack(const void *w, int from_bf16, void *panels, int to_bf16, int64_t start,
                 int64_t out, int64_t in) {
    if (!to_bf16) {
        kernels_avx512.pack(w, from_bf16, panels, to_bf16, start, out, in);
        return;
    }
    for (int64_t row = 0; row < out; row++) {
        const uint16_t *from = (const uint16_t *)w + row * in;
        int64_t c = start + row;
        uint16_t *to = (uint16_t *)panels + c / COLUMNS * steps_of(in) * WEIGHT_TILE;
        to += c % COLUMNS * 2;
        for (int64_t k = 0; k < in; k++) to[k / 2 * 2 * COLUMNS + k % 2] = from[k];
    }
}

/* ---- x in bfloat16 ---- */

/* Rows of x as tiles [ceil(rows / tall), steps, tall, 32]; missing rows and terms are zero. */
static void round_rows(const float *x, int64_t rows, int64_t in, int64_t tall, uint16_t *tiles) {
    int64_t steps = steps_of(in), tile = tall * TERMS, whole = in / TERMS, rest = in % TERMS;
    int64_t padded = (rows + tall - 1) / tall * tall;
    __mmask32 there = (__mmask32)((1u << rest) - 1);
    for (int64_t row = 0; row < padded; row++) {
        uint16_t *to = tiles + row / tall * steps * tile + row % tall * TERMS;
        const float *from = x + row * in;
        if (row >= rows) {
            for (int64_t s = 0; s < steps; s++) memset(to + s * tile, 0, TERMS * 2);
            continue;
        }
        for (int64_t s = 0; s < whole; s++, to += tile, from += TERMS)
            round_step(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16), to);
        if (rest)
            round_step(_mm512_maskz_loadu_ps((__mmask16)there, from),
                       _mm512_maskz_loadu_ps((__mmask16)(there >> 16), from + 16), to);
    }
}

typedef struct {
    const float *x;
    int64_t rows, in, tall;
    uint16_t *tiles;
} Rounding;

/* Tiles of rows from..to. */
static int round_tiles(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rounding *r = at;
    int64_t row = from * r->tall, stop = to * r->tall < r->rows ? to * r->tall : r->rows;
    round_rows(r->x + row * r->in, stop - row, r->in, r->tall,
               r->tiles + row * steps_of(r->in) * TERMS);
    return 0;
}

static void round_all(int threads, const float *x, int64_t rows, int64_t in, int64_t tall,
                      uint16_t *tiles) {
    Rounding r = {x, rows, in, tall, tiles};
    run(threads, (rows + tall - 1) / tall, 1, round_tiles, &r);
}

/* ---- tile products ---- */

typedef struct {
    const uint16_t *tiles; /* rows of the first tile; the next tile follows after `next` */
    int64_t tall, next;
    const uint16_t *panels; /* the first panel; the others are `stride` apart */
    int64_t stride, steps;
    const float *init; /* start values of every row's sums, panels `apart` */
    int64_t apart;
    float *y;
    int64_t ldy;
    const uint16_t *later; /* weights to prefetch, `share` cache lines per step */
    int64_t share;
} Block;

/* A quarter of a tile of each of four panels. */
static inline void fetch(const uint16_t *tiles, int64_t stride, int quarter) {
    _Pragma("GCC unroll 4") for (int line = 4 * quarter; line < 4 * quarter + 4; line++)
        _Pragma("GCC unroll 4") for (int panel = 0; panel < WIDE; panel++)
            _mm_prefetch((const char *)(tiles + panel * stride + line * 32), _MM_HINT_T0);
}

#define START(T, PANEL) tile_load(T, b->init + (PANEL)*b->apart, 0)
#define STORE(T, ROW, PANEL)                                                                       \
    tile_store(T, b->y + (ROW)*b->ldy * TILE_ROWS + (PANEL)*COLUMNS, b->ldy * 4)

/* One tile of rows with four panels. The processor's own prefetcher stops at each page, so the code
 * prefetches weights one step ahead, at the end those of the next four panels. */
static void one_by_four(const Block *b) {
    const uint16_t *x = b->tiles, *w = b->panels;
    int64_t tile = b->tall * TERMS, stride = b->stride;
    FENCE();
    START(0, 0);
    START(1, 1);
    START(2, 2);
    START(3, 3);
#define WITH_PANEL(T, W, P)                                                                        \
    fetch(ahead, stride, P);                                                                       \
    tile_load(W, w + (P)*stride, 64);                                                              \
    tile_halves(T, 4, W)
    for (int64_t s = 1; s <= b->steps; s++, x += tile, w += WEIGHT_TILE) {
        const uint16_t *ahead = w + WEIGHT_TILE + (s < b->steps ? 0 : (WIDE - 1) * stride);
        tile_load(4, x, 64);
        WITH_PANEL(0, 6, 0);
        WITH_PANEL(1, 7, 1);
        WITH_PANEL(2, 6, 2);
        WITH_PANEL(3, 7, 3);
    }
#undef WITH_PANEL
    STORE(0, 0, 0);
    STORE(1, 0, 1);
    STORE(2, 0, 2);
    STORE(3, 0, 3);
}

static void one_by_two(const Block *b) {
    const uint16_t *x = b->tiles, *w = b->panels;
    int64_t tile = b->tall * TERMS, stride = b->stride;
    FENCE();
    START(0, 0);
    START(1, 1);
    for (int64_t s = 0; s < b->steps; s++, x += tile, w += WEIGHT_TILE) {
        tile_load(4, x, 64);
        tile_load(6, w, 64);
        tile_load(7, w + stride, 64);
        tile_halves(0, 4, 6);
        tile_halves(1, 4, 7);
    }
    STORE(0, 0, 0);
    STORE(1, 0, 1);
}

static void one_by_one(const Block *b) {
    const uint16_t *x = b->tiles, *w = b->panels;
    int64_t tile = b->tall * TERMS;
    FENCE();
    START(0, 0);
    for (int64_t s = 0; s < b->steps; s++, x += tile, w += WEIGHT_TILE) {
        tile_load(4, x, 64);
        tile_load(6, w, 64);
        tile_halves(0, 4, 6);
    }
    STORE(0, 0, 0);
}

/* Two tiles of rows with two panels. Rows are streamed (hence the loads that bypass the first-level
 * cache), while the panels are reused with the next rows. */
static void two_by_two(const Block *b) {
    const uint16_t *x = b->tiles, *w = b->panels, *later = b->later;
    int64_t tile = b->tall * TERMS, next = b->next, stride = b->stride;
    FENCE();
    START(0, 0);
    START(1, 1);
    START(2, 0);
    START(3, 1);
    for (int64_t s = 0; s < b->steps; s++, x += tile, w += WEIGHT_TILE) {
        for (int64_t line = 0; line < b->share; line++, later += 32)
            _mm_prefetch((const char *)later, _MM_HINT_T1);
        tile_load(6, w, 64);
        tile_stream(4, x, 64);
        tile_halves(0, 4, 6);
        tile_load(7, w + stride, 64);
        tile_halves(1, 4, 7);
        tile_stream(5, x + next, 64);
        tile_halves(2, 5, 6);
        tile_halves(3, 5, 7);
    }
    STORE(0, 0, 0);
    STORE(1, 0, 1);
    STORE(2, 1, 0);
    STORE(3, 1, 1);
}

/* ---- linear ---- */

typedef struct {
    const uint16_t *tiles, *panels;
    const float *bias; /* padded to whole panels, or NULL */
    float *y;
    int64_t rows, tall, steps, out;
    int threads;
} Tiles;

static const float zeros[WIDE * COLUMNS];

/* `rows` from `row` on with `count` panels. Outputs partly outside of y are computed in a copy. */
static void block(const Tiles *p, int64_t row, int64_t rows, int64_t panel, int64_t count,
                  int64_t fetched, int64_t share) {
    int64_t stride = p->steps * WEIGHT_TILE, next = p->steps * p->tall * TERMS;
    int64_t tiles = rows > TILE_ROWS ? 2 : 1, columns = p->out - panel * COLUMNS;
    int whole = rows == tiles * p->tall && columns >= count * COLUMNS;
    float beside[2 * TILE_ROWS * WIDE * COLUMNS], *y = p->y + row * p->out + panel * COLUMNS;
    const uint16_t *panels = p->panels + panel * stride;
    Block b = {.tiles = p->tiles + row / p->tall * next, .tall = p->tall, .next = next,
               .panels = panels, .stride = stride, .steps = p->steps,
               .init = p->bias ? p->bias + panel * COLUMNS : zeros, .apart = COLUMNS,
               .y = whole ? y : beside, .ldy = whole ? p->out : WIDE * COLUMNS,
               .later = panels + count * stride + fetched * 32, .share = share};
    if (tiles == 2) two_by_two(&b);
    else if (count == WIDE) one_by_four(&b);
    else if (count == 2) one_by_two(&b);
    else one_by_one(&b);
    if (columns > count * COLUMNS) columns = count * COLUMNS;
    for (int64_t r = 0; !whole && r < rows; r++)
        memcpy(y + r * p->out, beside + r * b.ldy, (size_t)columns * sizeof(float));
}

static int few_panels(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Tiles *p = at;
    int64_t panel = from;
    configure(p->tall, TILE_BYTES);
    for (; panel + WIDE <= to; panel += WIDE) block(p, 0, p->rows, panel, WIDE, 0, 0);
    for (; panel < to; panel++) block(p, 0, p->rows, panel, 1, 0, 0);
    tile_release();
    return 0;
}

/* Two panels with all rows; the next two panels are prefetched, 32 cache lines per step. */
static int many_panels(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Tiles *p = at;
    int64_t pairs = (p->rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), rows;
    configure(p->tall, TILE_BYTES);
    for (int64_t panel = from; panel < to; panel += 2) {
        int64_t count = to - panel < 2 ? 1 : 2, fetched = 0;
        int64_t share = panel + 4 <= to ? (32 + pairs - 1) / pairs : 0;
        for (int64_t row = 0; row < p->rows; row += rows, fetched += share * p->steps) {
            rows = p->rows - row < count * TILE_ROWS ? p->rows - row : count * TILE_ROWS;
            if (fetched + share * p->steps > 32 * p->steps) share = 0;
            block(p, row, rows, panel, count, fetched, share);
        }
    }
    tile_release();
    return 0;
}

static void all_panels(const Tiles *p) {
    int64_t panels = (p->out + COLUMNS - 1) / COLUMNS;
    if (p->rows <= TILE_ROWS) run(p->threads, panels, WIDE, few_panels, (void *)p);
    else run(p->threads, panels, 2, many_panels, (void *)p);
}

/* Number of rows to round at a time: even shares that fit into `bytes` of the cache. */
static int64_t rows_at_once(int64_t rows, int64_t row_bytes, int64_t bytes) {
    const int64_t pair = 2 * TILE_ROWS;
    int64_t fits = bytes / (row_bytes * pair), pairs = (rows + pair - 1) / pair;
    int64_t passes = fits < 1 ? pairs : (pairs + fits - 1) / fits;
    return passes > 1 ? (pairs + passes - 1) / passes * pair : rows;
}

static int product(const Product *l) {
    if (!l->bf16) return kernels_avx512.product(l);
    if (l->rows == 0 || l->out == 0) return 0;
    int64_t rows = l->rows, in = l->in;
    int64_t steps = steps_of(in), row_bytes = steps * TERMS * (int64_t)sizeof(uint16_t);
    int64_t tall = rows < TILE_ROWS ? rows : TILE_ROWS, most = rows_at_once(rows, row_bytes, ROUNDED_BYTES);
    uint16_t *tiles = aligned_alloc(64, (size_t)((most + tall - 1) / tall * tall * row_bytes));
    if (!tiles) return -1;
    for (int64_t row = 0; row < rows; row += most) {
        Tiles p = {tiles, l->panels, l->bias, l->y + row * l->out, rows - row, tall, steps, l->out,
                   l->threads};
        if (p.rows > most) p.rows = most;
        round_all(l->threads, l->x + row * in, p.rows, in, tall, tiles);
        all_panels(&p);
    }
    free(tiles);
    return 0;
}

#include "gated_amx.h"

static int attention(const Attention *a) {
    return a->halves ? attention_on_tiles(a) : kernels_avx512.attention(a);
}

/* ---- detecting the machine's abilities ---- */

static int has_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 0; /* avx512_bf16 */
    return may_use_tiles();
}

int add_tiles(Kernels *kernels) {
    if (!has_tiles()) return 0;
    *kernels = kernels_avx512;
    kernels->name = "amx";
    kernels->panel_halves = COLUMNS;
    kernels->terms_halves = TERMS;
    kernels->pack = pack;
    kernels->product = product;
    kernels->gated_mlp = gated_mlp;
    kernels->attention = attention;
    return 1;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
int add_tiles(Kernels *kernels) {
    (void)kernels;
    return 0;
}
#endif
