/* Products with bfloat16 weights by VDPBF16PS (Zen 4, Cooper Lake and later); all other kernels are
 * the AVX-512 ones. The instruction multiplies twice as many numbers as one of float32.
 *
 * x is rounded to bfloat16 as for matrix tiles (isa_amx.c). Sums stay float32. Attention of such
 * models is in attention_pairs.h.
 *
 * Invariant: an output starts at the bias and takes the pairs of terms in order, of each pair the odd
 * term first, by a fused multiply-add; subnormal numbers are zero. So matrix.h computes it, if a
 * number there stands for a pair.
 */
#include "kernels.h"

#ifdef HAVE_PAIRS
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2")
#endif
#pragma GCC diagnostic ignored "-Wunused-function" /* of the lanes and of matrix.h */

#include "lanes_avx512.h"

#include "round_halves.h"

#define PAIRS
#define ADD_TERM(row, column, sum) _mm512_dpbf16_ps(sum, (__m512bh)(row), (__m512bh)(column))
#include "matrix.h"

#define COLUMNS (FLOAT_VECTORS * LANES)
/* Rounded rows that share a pass over the weights: they are read again for each slice of these. */
#define ROUNDED_BYTES (4 << 20)

static inline int64_t pairs_of(int64_t in) { return (in + 1) / 2; }

/* Columns start.. of panels [ceil(out / 16), ceil(in / 2), 16 columns, 2]. */
static void pack_pairs(const void *w, int from_bf16, void *panels, int to_bf16, int64_t start,
                       int64_t out, int64_t in) {
    if (!to_bf16) {
        kernels_avx512.pack(w, from_bf16, panels, to_bf16, start, out, in);
        return;
    }
    for (int64_t row = 0; row < out; row++) {
        const uint16_t *from = (const uint16_t *)w + row * in;
        int64_t c = start + row;
        uint16_t *to = (uint16_t *)panels + c / COLUMNS * pairs_of(in) * 2 * COLUMNS;
        to += c % COLUMNS * 2;
        for (int64_t k = 0; k < in; k++) to[k / 2 * 2 * COLUMNS + k % 2] = from[k];
    }
}

typedef struct {
    const float *x;
    int64_t step, in, padded; /* bfloat16 of a rounded row */
    uint16_t *rounded;
} Rounding;

/* Rows from..to; terms after the last one are zero. */
static int round_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rounding *r = at;
    int64_t whole = r->in / TERMS, rest = r->in % TERMS;
    __mmask32 there = (__mmask32)((1u << rest) - 1);
    for (int64_t row = from; row < to; row++) {
        const float *x = r->x + row * r->step;
        uint16_t *y = r->rounded + row * r->padded;
        for (int64_t s = 0; s < whole; s++, x += TERMS, y += TERMS)
            round_step(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), y);
        if (rest)
            round_step(_mm512_maskz_loadu_ps((__mmask16)there, x),
                       _mm512_maskz_loadu_ps((__mmask16)(there >> 16), x + 16), y);
    }
    return 0;
}

static int product_pairs(const Product *l) {
    if (!l->bf16) return kernels_avx512.product(l);
    if (l->rows == 0 || l->out == 0) return 0;
    int64_t padded = (l->in + TERMS - 1) / TERMS * TERMS, row_bytes = padded * 2;
    int64_t most = ROUNDED_BYTES / row_bytes / GROUP_ROWS * GROUP_ROWS;
    int64_t passes = most < 1 ? l->rows : (l->rows + most - 1) / most;
    most = (l->rows + passes - 1) / passes;
    uint16_t *rounded = aligned_alloc(64, (size_t)(most * row_bytes));
    if (!rounded) return -1;
    int failed = 0;
    for (int64_t row = 0; row < l->rows && !failed; row += most) {
        int64_t rows = l->rows - row < most ? l->rows - row : most;
        Rounding r = {l->x + row * l->step, l->step, l->in, padded, rounded};
        run(rows > 1 ? l->threads : 1, rows, 1, round_rows, &r);
        Product pairs = *l;
        pairs.x = (const float *)rounded, pairs.step = padded / 2, pairs.in = pairs_of(l->in);
        pairs.y = l->y + row * l->out, pairs.rows = rows, pairs.bf16 = 0;
        failed = product(&pairs);
    }
    free(rounded);
    return failed;
}

#include "kv_rows.h"

#include "elementwise.h"

#include "attention_pairs.h"

static int has_pairs(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

int add_pairs(Kernels *kernels) {
    if (!has_pairs()) return 0;
    *kernels = kernels_avx512;
    kernels->name = "avx512bf16";
    kernels->panel_halves = COLUMNS;
    kernels->terms_halves = 2;
    kernels->pack = pack_pairs;
    kernels->product = product_pairs;
    kernels->attention = attention_of_pairs;
    return 1;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
int add_pairs(Kernels *kernels) {
    (void)kernels;
    return 0;
}
#endif
