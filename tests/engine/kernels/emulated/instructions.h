/* The instructions of AMX for processors without it: what Intel's manual says they compute.
 *
 * What would be a fault ends the process: a configuration beyond palette 1, a tile that is not
 * configured, factors whose shapes do not fit. Each thread has tiles of its own. Included by
 * amx_tiles.h, as TILE_INSTRUCTIONS.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Products computed since the start, by all files that include this one. */
enum { HALVES, SIGNED, UNSIGNED, TILE_PRODUCTS };
__attribute__((weak)) uint64_t emulated_products[TILE_PRODUCTS];

#define MOST_TILES 8
#define MOST_ROWS 16
#define MOST_BYTES 64

typedef struct {
    int rows, bytes;
    uint8_t data[MOST_ROWS][MOST_BYTES]; /* zero after `bytes` */
} EmulatedTile;

static __thread EmulatedTile emulated[MOST_TILES];
static __thread int emulated_palette;

static inline __attribute__((noreturn)) void tile_fault(const char *instruction, const char *what) {
    fprintf(stderr, "emulated %s: %s\n", instruction, what);
    abort();
}

static inline void tile_configure(const void *memory) {
    const uint8_t *config = memory;
    if (config[0] != 1) tile_fault("ldtilecfg", "the palette is not 1");
    for (int i = 1; i < 64; i++) {
        int used = (i >= 16 && i < 16 + 2 * MOST_TILES) || (i >= 48 && i < 48 + MOST_TILES);
        if (!used && config[i]) tile_fault("ldtilecfg", "a reserved byte is not zero");
    }
    memset(emulated, 0, sizeof emulated);
    for (int t = 0; t < MOST_TILES; t++) {
        int bytes = config[16 + 2 * t] | config[17 + 2 * t] << 8, rows = config[48 + t];
        if (rows > MOST_ROWS) tile_fault("ldtilecfg", "more than 16 rows");
        if (bytes > MOST_BYTES) tile_fault("ldtilecfg", "more than 64 bytes in a row");
        if (!rows != !bytes) tile_fault("ldtilecfg", "rows without bytes, or bytes without rows");
        emulated[t].rows = rows, emulated[t].bytes = bytes;
    }
    emulated_palette = 1;
}

static inline void tile_release(void) {
    memset(emulated, 0, sizeof emulated);
    emulated_palette = 0;
}

static inline EmulatedTile *tile_at(const char *instruction, int t) {
    if (!emulated_palette) tile_fault(instruction, "no tiles are configured");
    if (t < 0 || t >= MOST_TILES) tile_fault(instruction, "no such tile");
    if (!emulated[t].rows) tile_fault(instruction, "a tile without rows");
    return &emulated[t];
}

static inline void tile_zero(int t) { memset(tile_at("tilezero", t)->data, 0, sizeof emulated[t].data); }

static inline void tile_load(int t, const void *from, int64_t stride) {
    EmulatedTile *tile = tile_at("tileloadd", t);
    memset(tile->data, 0, sizeof tile->data);
    for (int row = 0; row < tile->rows; row++)
        memcpy(tile->data[row], (const char *)from + row * stride, (size_t)tile->bytes);
}

static inline void tile_stream(int t, const void *from, int64_t stride) { tile_load(t, from, stride); }

static inline void tile_store(int t, void *to, int64_t stride) {
    const EmulatedTile *tile = tile_at("tilestored", t);
    for (int row = 0; row < tile->rows; row++)
        memcpy((char *)to + row * stride, tile->data[row], (size_t)tile->bytes);
}

typedef struct {
    EmulatedTile *sum;
    const EmulatedTile *a, *b;
    int steps; /* of four bytes */
} TileFactors;

static inline TileFactors tile_factors(const char *instruction, int t, int a, int b, int kind) {
    TileFactors f = {tile_at(instruction, t), tile_at(instruction, a), tile_at(instruction, b), 0};
    if (t == a || t == b || a == b) tile_fault(instruction, "one tile is used twice");
    if ((f.sum->bytes | f.a->bytes | f.b->bytes) % 4) tile_fault(instruction, "rows of broken words");
    if (f.sum->rows != f.a->rows) tile_fault(instruction, "sums and rows differ in rows");
    if (f.sum->bytes != f.b->bytes) tile_fault(instruction, "sums and columns differ in columns");
    if (f.a->bytes / 4 != f.b->rows) tile_fault(instruction, "rows and columns differ in terms");
    f.steps = f.b->rows;
    __atomic_fetch_add(&emulated_products[kind], 1, __ATOMIC_RELAXED);
    return f;
}

/* One row of TDPBF16PS: from zero, a chain of fused multiply-adds of the even terms and one of the
 * odd terms, then both are added, and the old value. */
static __attribute__((noinline)) void tile_row_of_halves(TileFactors f, int row) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512 even = _mm512_setzero_ps(), odd = even, old = _mm512_loadu_ps(f.sum->data[row]);
    for (int k = 0; k < f.steps; k++) {
        int32_t pair;
        memcpy(&pair, f.a->data[row] + 4 * k, 4);
        __m512i two = _mm512_set1_epi32(pair), b = _mm512_loadu_si512(f.b->data[k]);
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(two, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(two, high)),
                              _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
    }
    _mm512_storeu_ps(f.sum->data[row], _mm512_add_ps(old, _mm512_add_ps(even, odd)));
}

/* Rounds to the nearest, with subnormal numbers as zero, whatever the thread's mode is. */
static inline void tile_halves(int t, int a, int b) {
    TileFactors f = tile_factors("tdpbf16ps", t, a, b, HALVES);
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);
    for (int row = 0; row < f.sum->rows; row++) tile_row_of_halves(f, row);
    _mm_setcsr(mode);
}

/* Integer sums, which wrap around. A word of a row has four terms, as has one of each column. */
static inline void tile_of_bytes(TileFactors f, int b_is_signed) {
    for (int row = 0; row < f.sum->rows; row++) {
        __m512i sum = _mm512_loadu_si512(f.sum->data[row]);
        for (int i = 0; i < 4 * f.steps; i++) {
            __m512i x = _mm512_set1_epi32((int8_t)f.a->data[row][i]);
            __m512i b = _mm512_loadu_si512(f.b->data[i / 4]);
            b = _mm512_slli_epi32(b, (unsigned)(24 - i % 4 * 8));
            b = b_is_signed ? _mm512_srai_epi32(b, 24) : _mm512_srli_epi32(b, 24);
            sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(x, b));
        }
        _mm512_storeu_si512(f.sum->data[row], sum);
    }
}

static inline void tile_signed(int t, int a, int b) {
    tile_of_bytes(tile_factors("tdpbssd", t, a, b, SIGNED), 1);
}

static inline void tile_unsigned(int t, int a, int b) {
    tile_of_bytes(tile_factors("tdpbsud", t, a, b, UNSIGNED), 0);
}

static inline int may_use_tiles(void) { return 1; }
