/* Products with weights that stay in the blocks of a GGUF file, in integers.
 *
 * Activations are rounded to int8 per row: 256 values share a scale for the kinds with blocks of 256
 * weights, 32 for the others. Sums of products inside a block are integers, hence exact in any
 * order. Floats are multiplied and added one by one, block after block, without fused
 * multiply-adds. So all instruction sets give the same bits, and a row's bits depend on this row
 * alone.
 *
 * A panel has 16 outputs. 32 weights of each output are 8 granules of 64 bytes: 4 consecutive
 * weights of output 0, then of output 1 and so on. Bits of several granules share a byte.
 */
#ifndef BATON_QUANTIZED_H
#define BATON_QUANTIZED_H

#include <stdint.h>

#define PANEL 16
/* Rows of activations that are stored together; with tiles, rows of two such groups are. */
#define TOGETHER 8
/* Bytes of 256 activations of a row: int8, minus 32 times the sums of 16, sums of 32, scale.
 * Bytes of 32: int8, minus the sum, scale. */
#define X_WIDE (256 + 64 + 16 + 4)
#define X_NARROW (32 + 4 + 4)

/* Kinds of weights; cpu_module.c has their names. From Q8_0 on a block has 32 weights. */
enum { Q4_K, Q5_K, Q6_K, Q3_K, Q8_0, Q5_0, Q4_0, IQ4_NL, Q4_1, Q5_1, QUANTIZED_KINDS };

typedef struct {
    const char *name;
    int64_t weights, bytes;  /* of a block in the file */
    int64_t span, step;      /* weights of an output, and bytes of a panel, in one step */
} QuantizedKind;

extern const QuantizedKind quantized_kinds[QUANTIZED_KINDS];

/* Activations in int8: groups of TOGETHER rows, the last one padded; see quantized_body.h. */
typedef struct {
    const float *x; /* [rows, in] */
    int64_t rows, in;
    int wide;       /* whether 256 values share a scale */
    uint8_t *to;    /* quantized_x_bytes() bytes */
} QuantizedRows;

typedef struct {
    int kind;
    const uint8_t *panels; /* [ceil(out / 16), ceil(in / span), step] */
    const float *bias;     /* padded to whole panels, or NULL */
    float *y;              /* the first output of the first row */
    int64_t ldy, out;
} QuantizedLinear;

typedef struct {
    const char *name;
    /* groups first..end-1 of TOGETHER rows */
    void (*quantize)(const QuantizedRows *, int64_t first, int64_t end);
    /* y of panels first..end-1, for all rows */
    void (*product)(const QuantizedRows *, const QuantizedLinear *, int64_t first, int64_t end);
} Products;

extern const Products products_amx, products_vnni512, products_vnni256, products_avx2, products_plain;

/* Whether this compiler supports AVX-VNNI. */
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<avxvnniintrin.h>)
#define HAVE_VNNI256
#endif
#endif

int64_t quantized_x_bytes(const QuantizedRows *);

/* rows of blocks[out, in / weights, bytes] as columns start.. of zeroed panels */
void pack_quantized(int kind, const uint8_t *blocks, uint8_t *panels, int64_t start, int64_t out,
                    int64_t in);

/* y[in] = the row of blocks as floats, rounded as ggml rounds */
void dequantize_row(int kind, const uint8_t *blocks, float *y, int64_t in);

#endif
