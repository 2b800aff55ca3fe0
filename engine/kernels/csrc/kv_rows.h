/* Rows of the KV cache: the keys or values of one token and head, in one of three types.
 *
 * KV_FLOATS: float32. KV_HALVES: bfloat16. KV_INT8: dim codes q of 8 bits, then the largest magnitude
 * of the row as a bfloat16 m; the values are q * (m / 127), rounded to 8 significant bits.
 *
 * Invariants: the values of int8 rows are bfloat16 numbers, and those are float32 numbers. A row
 * that was rounded to a type once is not changed by storing it in that type or a wider one, and
 * not by reading it and rounding it again. Rounding a row needs that row alone.
 */
#ifndef BATON_KV_ROWS_H
#define BATON_KV_ROWS_H

#define CODES 127.0f     /* largest code of KV_INT8 */
#define ROUNDED 0x8000u  /* half of the last bit that a bfloat16 has */
#define HALF 0xffff0000u /* bits of a bfloat16 in a float32 */
#define INFINITE 0x7f800000u
#define LEAST (27u << 23) /* 2^-100: rows of smaller numbers become zeros in KV_INT8 */
#define NO_NUMBER 0x7fffu /* NaN as bfloat16 */

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t half_at(const char *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return half;
}

/* The nearest bfloat16, ties to even. */
static inline uint16_t half_of(float x) {
    uint32_t bits = bits_of(x);
    uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > INFINITE ? NO_NUMBER : nearest);
}

/* The value of a code. Ties go away from zero, which takes two instructions. */
static inline float value_of(float code, float step) {
    return float_of((bits_of(code * step) + ROUNDED) & HALF);
}

/* Largest magnitude of a row as a bfloat16; NaN if a number of the row is not finite. */
static inline uint16_t largest_of(const float *x, int64_t dim) {
    uint32_t top = 0;
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits = bits_of(x[d]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    if (top < LEAST) return 0;
    uint16_t half = top > INFINITE ? NO_NUMBER : half_of(float_of(top));
    return (uint32_t)half << 16 >= INFINITE ? NO_NUMBER : half;
}

/* The code of a number, as a float; adding 1.5 * 2^23 rounds it, ties to even. */
static inline float code_of(float x, float inverse) {
    const float magic = 12582912.0f;
    return (x * inverse + magic) - magic;
}

/* Read a row. */
static inline void open_row(int64_t kind, const char *from, float *to, int64_t dim) {
    if (kind == KV_FLOATS) {
        memcpy(to, from, (size_t)dim * sizeof(float));
    } else if (kind == KV_HALVES) {
        for (int64_t d = 0; d < dim; d++) to[d] = float_of((uint32_t)half_at(from + 2 * d) << 16);
    } else {
        float step = float_of((uint32_t)half_at(from + dim) << 16) / CODES;
        const int8_t *codes = (const int8_t *)from;
        for (int64_t d = 0; d < dim; d++) to[d] = value_of((float)codes[d], step);
    }
}

/* Write a row whose numbers `kind` holds, or those nearest to it. */
static inline void store_row(int64_t kind, const float *x, char *to, int64_t dim) {
    if (kind == KV_FLOATS) {
        memcpy(to, x, (size_t)dim * sizeof(float));
    } else if (kind == KV_HALVES) {
        for (int64_t d = 0; d < dim; d++) {
            uint16_t half = half_of(x[d]);
            memcpy(to + 2 * d, &half, sizeof half);
        }
    } else {
        uint16_t largest = largest_of(x, dim);
        float inverse = largest ? CODES / float_of((uint32_t)largest << 16) : 0.0f;
        int8_t *codes = (int8_t *)to;
        if (largest == NO_NUMBER) memset(codes, 1, (size_t)dim);
        else
            for (int64_t d = 0; d < dim; d++) codes[d] = (int8_t)code_of(x[d], inverse);
        memcpy(to + dim, &largest, sizeof largest);
    }
}

/* Write a row after rounding it to `rounding`, a type that is not wider than `kind`. */
static inline void append_row(int64_t kind, int64_t rounding, const float *x, char *to,
                              int64_t dim) {
    float rounded[MOST_DIM];
    char row[MOST_DIM * sizeof(float)];
    if (kind != rounding) {
        store_row(rounding, x, row, dim);
        open_row(rounding, row, rounded, dim);
        x = rounded;
    }
    store_row(kind, x, to, dim);
}

#endif
