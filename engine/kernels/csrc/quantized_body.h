/* The products of quantized.h, compiled for the integer lanes included before.
 *
 * Lanes: LANES outputs at a time. `ib` holds their granules, 4 bytes of each output. `part` sums
 * products of granules; a kind says how many granules fit into one before it goes, times its
 * scale, to the sum `iv`. SIZES(F) lists the numbers of rows with a compiled loop.
 */
#include <string.h>

#include "quantized.h"

#define ALWAYS static inline __attribute__((always_inline))
#ifdef SMALL_CODE
#define UNROLL _Pragma("GCC unroll 1")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define EACH_ROW UNROLL for (int r = 0; r < R; r++)

/* How the 32 weights of an output are stored. */
enum { FORM_4, FORM_5, FORM_6, FORM_3, FORM_8, FORM_TABLE };

/* ---- activations ---- */

#define ROUND 12582912.0f /* 1.5 * 2^23: adding it rounds to a whole number, ties to even */

/* The largest magnitude of `n` floats; not finite if one of them is not. */
static inline float largest(const float *x, int n) {
    int32_t bits = 0;
    for (int i = 0; i < n; i++) {
        int32_t one;
        memcpy(&one, x + i, 4);
        one &= 0x7fffffff;
        bits = one > bits ? one : bits;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* `n` floats in int8; returns the scale. If a float is not finite, the scale is NaN. */
static inline float to_int8(const float *x, int n, int8_t *q) {
    float most = largest(x, n), inverse = 127.0f / most;
    if (!(most >= 1e-30f && most <= 3e38f)) {
        memset(q, 0, (size_t)n);
        return most < 1e-30f ? 0.0f : (most - most) / 0.0f;
    }
    for (int i = 0; i < n; i++) {
        float rounded = x[i] * inverse + ROUND;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        q[i] = (int8_t)(bits - 0x4B400000);
    }
    return most / 127.0f;
}

static inline int32_t sum_of(const int8_t *q, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += q[i];
    return sum;
}

/* 256 values of row r of R; see X_WIDE. Words of one place lie together, those of all rows. */
static inline void put_wide_x(const float *x, uint8_t *to, int64_t R, int64_t r) {
    int8_t q[256];
    int32_t *words = (int32_t *)to + r;
    float d = to_int8(x, 256, q);
    for (int i = 0; i < 64; i++) memcpy(words + i * R, q + 4 * i, 4);
    for (int i = 0; i < 8; i++) {
        int32_t a = sum_of(q + 32 * i, 16), b = sum_of(q + 32 * i + 16, 16);
        words[(64 + 2 * i) * R] = -32 * a;
        words[(65 + 2 * i) * R] = -32 * b;
        int16_t both = (int16_t)(a + b);
        memcpy((int16_t *)(words + (80 + i / 2) * R) + i % 2, &both, 2);
    }
    memcpy(words + 84 * R, &d, 4);
}

static inline void put_narrow_x(const float *x, uint8_t *to, int64_t R, int64_t r) {
    int8_t q[32];
    int32_t *words = (int32_t *)to + r;
    float d = to_int8(x, 32, q);
    for (int i = 0; i < 8; i++) memcpy(words + i * R, q + 4 * i, 4);
    words[8 * R] = -sum_of(q, 32);
    memcpy(words + 9 * R, &d, 4);
}

/* Rows of group g, and the rows that are stored for them: one of SIZES. */
static inline int64_t rows_of(const QuantizedRows *q, int64_t g) {
    int64_t left = q->rows - g * TOGETHER;
    return left < TOGETHER ? left : TOGETHER;
}

static inline int64_t stored(int64_t rows) {
#define FITS(N) if (rows <= N) return N;
    SIZES(FITS)
#undef FITS
    return TOGETHER;
}

static inline int64_t row_bytes(const QuantizedRows *q) {
    return q->wide ? q->in / 256 * X_WIDE : q->in / 32 * X_NARROW;
}

static void quantize(const QuantizedRows *q, int64_t first, int64_t end) {
    for (int64_t g = first; g < end; g++) {
        int64_t rows = rows_of(q, g), R = stored(rows), span = q->wide ? 256 : 32;
        int64_t each = R * (q->wide ? X_WIDE : X_NARROW);
        uint8_t *to = q->to + g * TOGETHER * row_bytes(q);
        if (rows < R) memset(to, 0, (size_t)(R * row_bytes(q)));
        for (int64_t r = 0; r < rows; r++) {
            const float *x = q->x + (g * TOGETHER + r) * q->in;
            for (int64_t i = 0; i < q->in / span; i++) {
                if (q->wide) put_wide_x(x + i * span, to + i * each, R, r);
                else put_narrow_x(x + i * span, to + i * each, R, r);
            }
        }
    }
}

/* ---- weights ---- */

#define NARROW_FORM(KIND)                                                                          \
    ((KIND) == Q8_0 ? FORM_8 : (KIND) == IQ4_NL ? FORM_TABLE                                       \
     : (KIND) == Q5_0 || (KIND) == Q5_1 ? FORM_5 : FORM_4)
/* Weights of blocks of 32 are their numbers less 2^shift, unless it is negative. */
#define NARROW_SHIFT(KIND)                                                                         \
    ((KIND) == Q8_0 || (KIND) == IQ4_NL ? 7 : (KIND) == Q5_0 ? 4 : (KIND) == Q4_0 ? 3 : -1)
#define HAS_MINS(KIND) ((KIND) == Q4_1 || (KIND) == Q5_1)
#define WIDE_FORM(KIND)                                                                            \
    ((KIND) == Q4_K ? FORM_4 : (KIND) == Q5_K ? FORM_5 : (KIND) == Q6_K ? FORM_6 : FORM_3)
/* Bytes of the 32 weights of each output of a panel. */
#define WIDE_BODY(FORM)                                                                            \
    ((FORM) == FORM_4 ? 256 : (FORM) == FORM_5 ? 320 : (FORM) == FORM_6 ? 384 : 192)
#define NARROW_BODY(FORM) ((FORM) == FORM_8 ? 512 : (FORM) == FORM_5 ? 320 : 256)

/* Granule g of the 32 weights at `q`, unsigned. Those of FORM_3 are times 8. */
ALWAYS ib granule(const int FORM, const uint8_t *q, const int g) {
    if (FORM == FORM_8) return b_load(q + g * 64);
    if (FORM == FORM_3) {
        ib low = b_bits(b_load(q + g / 4 * 64), g % 4 * 2 - 3, 0x18);
        return b_or(low, b_bits(b_load(q + 128), g - 5, 0x20));
    }
    ib low = b_bits(b_load(q + g / 2 * 64), g % 2 * 4, 15);
    if (FORM == FORM_5) return b_or(low, b_bits(b_load(q + 256), g - 4, 16));
    if (FORM == FORM_6) return b_or(low, b_bits(b_load(q + 256 + g / 4 * 64), g % 4 * 2 - 4, 48));
    if (FORM == FORM_TABLE) return b_look_up(low);
    return low;
}

/* Granules whose products fit into a part. */
#define FITTING(FORM) ((FORM) == FORM_4 ? 8 : (FORM) == FORM_5 ? 4 : (FORM) < FORM_8 ? 2 : 1)
#define EIGHT_BITS(FORM) ((FORM) == FORM_8 || (FORM) == FORM_TABLE)

/* sum += scale * (products of granules first..end-1 with x), parts starting at `start`. */
ALWAYS void add_products(const int FORM, const int R, const uint8_t *q, const int first,
                         const int end, const int32_t *x, const int32_t *start, scale s, iv *sum) {
    part p[R];
    EACH_ROW p[r] = p_start(start ? start[r] : 0);
    EACH_ROW sum[r] = add_start(sum[r], start ? start[r] : 0, s);
    UNROLL for (int g = first; g < end; g++) {
        ib w = granule(FORM, q, g);
        EACH_ROW p[r] = EIGHT_BITS(FORM) ? p_dot8(p[r], w, x[g * R + r]) : p_dot(p[r], w, x[g * R + r]);
        if ((PARTS_OVERFLOW && (g + 1 - first) % FITTING(FORM) == 0) || g + 1 == end) {
            EACH_ROW sum[r] = add_part(sum[r], p[r], s);
            EACH_ROW p[r] = p_start(0);
        }
    }
}

/* Fetch lines of weights. Few rows wait for memory: fetched just before use, the lines keep the
 * order in which the processor's own prefetcher looks ahead. With more rows, which take longer than
 * the prefetcher looks, lines are fetched well before. */
ALWAYS void prefetch(const int R, const uint8_t *from, const int64_t bytes) {
    const int64_t ahead = R <= 4 ? 0 : 4096;
    UNROLL for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + ahead + line);
}

/* acc[R][PANEL] += one step of a panel of Q4_K, Q5_K, Q6_K or Q3_K. */
ALWAYS void wide_step(const int FORM, const int R, const uint8_t *w, const uint8_t *xs, float *acc) {
    const int64_t body = WIDE_BODY(FORM);
    const int mins = FORM == FORM_4 || FORM == FORM_5;
    const int32_t *x = (const int32_t *)xs;
    const float *dx = (const float *)xs + 84 * R;
    for (int64_t o = 0; o < PANEL; o += LANES) {
        const uint8_t *q = w + 320 + o * 4, *scales = w + 64 + o;
        iv sum[R], low[R];
        EACH_ROW sum[r] = low[r] = i_set(0);
        for (int j = 0; j < 8; j++, q += body) {
            if (o == 0) prefetch(R, q, body);
            const int32_t *at = x + 8 * j * R, *starts = x + (64 + 2 * j) * R;
            if (mins) {
                add_products(FORM, R, q, 0, 8, at, NULL, s_unsigned(scales + j * PANEL), sum);
            } else {
                scale a = s_signed(scales + 2 * j * PANEL), b = s_signed(scales + (2 * j + 1) * PANEL);
                add_products(FORM, R, q, 0, 4, at, starts, a, sum);
                add_products(FORM, R, q, 4, 8, at, starts + R, b, sum);
            }
        }
        for (int i = 0; mins && i < 4; i++) {
            iv pair = i_pairs(w + 192 + i * 32 + o * 2);
            EACH_ROW low[r] = i_dot2(low[r], pair, x[(80 + i) * R + r]);
        }
        fv d = f_halves(w + o * 2), least = f_halves(w + 32 + o * 2);
        if (FORM == FORM_3) d = f_mul(d, f_set(0.125f));
        EACH_ROW {
            fv term = f_mul(f_mul(d, f_set(dx[r])), f_of(sum[r]));
            if (mins) term = f_sub(term, f_mul(f_mul(least, f_set(dx[r])), f_of(low[r])));
            f_store(acc + r * PANEL + o, f_add(f_load(acc + r * PANEL + o), term));
        }
    }
}

/* acc[R][PANEL] += block i of a panel of a kind with blocks of 32. */
ALWAYS void narrow_block(const int FORM, const int SHIFT, const int MINS, const int R,
                         const uint8_t *w, int64_t i, const uint8_t *xs, float *acc) {
    const int64_t body = NARROW_BODY(FORM), head = MINS ? 128 : 64;
    const int32_t *x = (const int32_t *)xs;
    const float *dx = (const float *)xs + 9 * R;
    w += i / 2 * (head + 2 * body);
    for (int64_t o = 0; o < PANEL; o += LANES) {
        const uint8_t *q = w + head + i % 2 * body + o * 4;
        iv sum[R];
        EACH_ROW sum[r] = SHIFT < 0 || (SHIFT == 7 && DOT8_SIGNED) ? i_set(0) : i_set(x[8 * R + r] * (1 << (SHIFT & 7)));
        add_products(FORM, R, q, 0, 8, x, NULL, s_one(), sum);
        fv d = f_halves(w + i % 2 * 32 + o * 2);
        EACH_ROW {
            fv term = f_mul(f_mul(d, f_set(dx[r])), f_of(sum[r]));
            if (MINS) {
                fv least = f_mul(f_halves(w + 64 + i % 2 * 32 + o * 2), f_set(dx[r]));
                term = f_sub(term, f_mul(least, f_set((float)x[8 * R + r])));
            }
            f_store(acc + r * PANEL + o, f_add(f_load(acc + r * PANEL + o), term));
        }
    }
}

/* acc[R][PANEL] += units first.. of a panel; a unit is as many weights as share a scale of x. */
ALWAYS void units(const int KIND, const int R, const uint8_t *panel, const uint8_t *x,
                  int64_t first, int64_t count, float *acc) {
    const int64_t step = quantized_kinds[KIND].step;
    for (int64_t i = first; i < first + count; i++) {
        if (KIND < Q8_0) {
            const uint8_t *w = panel + i * step;
            prefetch(R, w, 320);
            wide_step(WIDE_FORM(KIND), R, w, x + i * X_WIDE * R, acc);
        } else {
            prefetch(R, panel + i / 2 * step + i % 2 * (step / 2), step / 2);
            narrow_block(NARROW_FORM(KIND), NARROW_SHIFT(KIND), HAS_MINS(KIND), R, panel, i,
                         x + i * X_NARROW * R, acc);
        }
    }
}

typedef void Units(const uint8_t *panel, const uint8_t *x, int64_t first, int64_t count, float *acc);

#define OF_KIND(KIND, N)                                                                           \
    static void units_##KIND##_##N(const uint8_t *panel, const uint8_t *x, int64_t first,          \
                                   int64_t count, float *acc) {                                    \
        units(KIND, N, panel, x, first, count, acc);                                               \
    }
#define KINDS_OF(N)                                                                                \
    OF_KIND(Q4_K, N) OF_KIND(Q5_K, N) OF_KIND(Q6_K, N) OF_KIND(Q3_K, N) OF_KIND(Q8_0, N)           \
    OF_KIND(Q5_0, N) OF_KIND(Q4_0, N) OF_KIND(IQ4_NL, N) OF_KIND(Q4_1, N) OF_KIND(Q5_1, N)
SIZES(KINDS_OF)

#define ENTRY(N)                                                                                   \
    [N] = {[Q4_K] = units_Q4_K_##N, [Q5_K] = units_Q5_K_##N, [Q6_K] = units_Q6_K_##N,              \
           [Q3_K] = units_Q3_K_##N, [Q8_0] = units_Q8_0_##N, [Q5_0] = units_Q5_0_##N,              \
           [Q4_0] = units_Q4_0_##N, [IQ4_NL] = units_IQ4_NL_##N, [Q4_1] = units_Q4_1_##N,          \
           [Q5_1] = units_Q5_1_##N},
static Units *const units_of[TOGETHER + 1][QUANTIZED_KINDS] = {SIZES(ENTRY)};

/* ---- the product ---- */

/* Weights that all groups of rows use before the next are read; panels that share a group's x. */
#define SLICE 1024
#define PANELS_TOGETHER 4

/* Units first.. of one panel with one group of rows; after the first slice, y has their sums. */
static void panel_with_group(const QuantizedRows *q, const QuantizedLinear *l, int64_t panel,
                             int64_t g, int64_t first, int64_t count) {
    const QuantizedKind *k = &quantized_kinds[l->kind];
    float acc[TOGETHER * PANEL];
    int64_t rows = rows_of(q, g), R = stored(rows), width = l->out - panel * PANEL;
    size_t bytes = (size_t)(width < PANEL ? width : PANEL) * sizeof(float);
    float *y = l->y + g * TOGETHER * l->ldy + panel * PANEL;
    memset(acc, 0, sizeof acc);
    for (int64_t r = 0; r < rows; r++) {
        if (first) memcpy(acc + r * PANEL, y + r * l->ldy, bytes);
        else if (l->bias) memcpy(acc + r * PANEL, l->bias + panel * PANEL, sizeof(float) * PANEL);
    }
    const uint8_t *w = l->panels + panel * ((q->in + k->span - 1) / k->span) * k->step;
    units_of[R][l->kind](w, q->to + g * TOGETHER * row_bytes(q), first, count, acc);
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * l->ldy, acc + r * PANEL, bytes);
}

static void product(const QuantizedRows *q, const QuantizedLinear *l, int64_t first, int64_t end) {
    int64_t unit = q->wide ? 256 : 32, all = q->in / unit;
    int64_t groups = (q->rows + TOGETHER - 1) / TOGETHER, slice = groups > 1 ? SLICE / unit : all;
    for (int64_t from = first; from < end; from += PANELS_TOGETHER) {
        int64_t to = end - from < PANELS_TOGETHER ? end : from + PANELS_TOGETHER;
        for (int64_t i = 0; i < all; i += slice)
            for (int64_t g = 0; g < groups; g++)
                for (int64_t panel = from; panel < to; panel++)
                    panel_with_group(q, l, panel, g, i, all - i < slice ? all - i : slice);
    }
}

const Products TABLE = {.name = TABLE_NAME, .quantize = quantize, .product = product};
