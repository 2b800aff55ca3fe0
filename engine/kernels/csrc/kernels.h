/* The table of kernels that an instruction set provides, and their argument structs.
 *
 * Kernels do not check their arguments: cpu_module.c has done so. Floats are float32, counts are
 * int64. Sums have one fixed order (strictly over k in products), fused multiply-adds are explicit
 * and the compiler must not contract others, so a table's name determines the bits. Kernels with
 * `threads` divide their work among so many threads, which changes no bit.
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

/* Whether this compiler supports the matrix tiles of AMX; the processor is checked at run time. */
#if defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>) && __has_include(<amxint8intrin.h>)
#define HAVE_TILES
#endif
/* The same of products of pairs of bfloat16. */
#if __has_include(<avx512bf16intrin.h>)
#define HAVE_PAIRS
#endif
#endif

/* Keys of an attention tile; tiles are aligned to absolute positions. */
#define TILE_KEYS 64
/* Types of keys and values; see kv_rows.h. */
enum { KV_FLOATS, KV_HALVES, KV_INT8 };
/* Largest head size of other types than KV_FLOATS. */
#define MOST_DIM 1024
/* Entries of a block of the sums for drawing, and spare floats after its scratch memory. */
#define SUM_BLOCK 128
#define DRAW_SLACK 16

typedef struct {
    const float *x;      /* row t begins at x + t * step; rows may overlap */
    const void *panels;
    const float *bias;   /* padded to whole panels, or NULL */
    float *y;            /* [rows, out] */
    int64_t rows, step, in, out;
    int bf16, threads;
} Product;

typedef struct {
    const float *q;          /* [rows, heads, dim] */
    const char *kv;          /* [blocks, 2, kv_heads, block_size] rows of row_bytes */
    int64_t kind, row_bytes;
    const int32_t *tables;   /* [sequences, table_width] */
    const int32_t *offsets;  /* [sequences + 1] */
    const int32_t *positions;/* [rows] */
    float *out;              /* [rows, heads * dim] */
    float scale;
    int64_t window, sequences, table_width, heads, kv_heads, block_size, dim;
    int64_t halves;          /* factors may be rounded to bfloat16 */
    int threads;
} Attention;

typedef struct {
    const float *qkv;        /* [rows, (heads + 2 * kv_heads) * dim] */
    const int32_t *positions;
    const int64_t *slots;
    const float *cos_sin;    /* [max_position, dim] */
    const float *q_norm, *k_norm; /* [dim] or NULL */
    char *kv;                /* as in Attention */
    int64_t kind, row_bytes;
    int64_t rounding;        /* type to which keys and values are rounded */
    float *q_out;            /* [rows, heads, dim] */
    float eps;
    int64_t rows, heads, kv_heads, block_size, dim;
} RopeAppend;

typedef struct {
    const float *x; /* [rows, in] */
    float *y;       /* [rows, out] */
    const void *gate_up, *down; /* panels of bf16 weights [2 * width, in], [out, width] */
    const float *gate_up_bias, *down_bias; /* padded to whole panels, or NULL */
    int64_t rows, in, width, out;
    int threads;
} GatedMlp;

typedef struct {
    const float *x;      /* [rows, width] */
    const float *weight; /* [taps, width] */
    const float *bias;   /* [width] */
    const float *scales; /* [2, width], for snake after the convolution, or NULL */
    float *y;            /* [rows, width] */
    int64_t rows, width, taps, dilation;
} Depthwise;

/* Called between parts of a long call, by the calling thread. A result other than 0 ends the call and is its result. */
typedef struct {
    int (*after_part)(void *); /* or NULL */
    void *argument;
} Watch;

typedef struct {
    const float *q;    /* [rows, heads, dim] */
    const float *kv;   /* [2, heads, keys, dim] */
    const float *bias; /* [bias_heads, rows, keys], bias_heads 1 or heads; or NULL */
    float *out;        /* [rows, heads * dim] */
    float scale;
    int64_t rows, keys, heads, dim, bias_heads;
    int threads;
    Watch watch;
} DenseAttention;

typedef struct {
    const float *x, *weight, *bias; /* [rows, width], [width] */
    float *y;
    float eps;
    int64_t silu; /* whether silu follows */
    int64_t rows, width, groups;
    Watch watch;
} GroupNorm;

/* Kinds of activate. */
enum { SILU, GELU_TANH, QUICK_GELU, TANH, ACTIVATIONS };

/* One end of a move: blocks of a pool, or a payload with contiguous blocks. */
typedef struct {
    char *data;         /* of the first layer wanted */
    const int32_t *ids; /* [count]; NULL for a payload */
    int64_t blocks;     /* of a layer, wanted or not */
} End;

/* Moves blocks layer-major from one end to the other; without data at `to`, they are only read. */
typedef struct {
    End from, to;
    int64_t layers;
    int64_t count; /* blocks of a layer */
    size_t bytes;  /* of one block of one layer, a multiple of 64 */
} Move;

/* One end of a conversion: `count` blocks of each layer. */
typedef struct {
    char *data;         /* of the first layer wanted */
    const int32_t *ids; /* [count] */
    int64_t blocks;     /* of a layer, wanted or not */
    int64_t count, block_size, kind, row_bytes;
} KvEnd;

/* Copies tokens from blocks to blocks of another size or type: token first + i to token i. Tokens
 * after the last of `from` are zeros. */
typedef struct {
    KvEnd from, to;
    int64_t layers, kv_heads, dim, first;
} Conversion;

/* Shortest input for the kernels that compute checksums. */
#define SUM_MIN 241

typedef struct {
    const char *name;
    int panel_floats, panel_halves; /* columns of a packed panel of f32 and bf16 weights */
    int terms_halves; /* a panel of bf16 weights is padded to a multiple of so many terms */
    /* pack rows of w[out, in] as columns start.. of the panels; source and target both bf16 or f32 */
    void (*pack)(const void *w, int from_bf16, void *panels, int to_bf16, int64_t start,
                 int64_t out, int64_t in);
    /* y[t] = x[t * step .. t * step + in] @ panels + bias. Returns 0, or -1 if scratch memory cannot be
     * allocated; so do all functions that return int. */
    int (*product)(const Product *);
    /* down(silu(gate) * up), for widths of whole panels; NULL if it would not be faster */
    int (*gated_mlp)(const GatedMlp *);
    void (*rms_norm)(const float *x, float *residual, const float *weight, float eps, float *y,
                     int64_t rows, int64_t width);
    void (*rope_append)(const RopeAppend *);
    int (*attention)(const Attention *);
    void (*silu_mul)(const float *gate_up, float *y, int64_t rows, int64_t width);
    void (*layer_norm)(const float *x, float *residual, const float *weight, const float *bias,
                       float eps, float *y, int64_t rows, int64_t width);
    void (*gelu)(const float *x, float *y, int64_t rows, int64_t width);
    /* scales[2, width]: alpha, and the factor of the squared sine */
    void (*snake)(const float *x, float *residual, const float *scales, float *y, int64_t rows,
                  int64_t width);
    void (*depthwise)(const Depthwise *);
    void (*soft_clip)(const float *x, float *y, int64_t count);
    int (*dense_attention)(const DenseAttention *);
    void (*activate)(int64_t kind, const float *x, float *y, int64_t count);
    void (*add_scaled)(const float *x, const float *scale, float *residual, int64_t rows,
                       int64_t width);
    int (*group_norm)(const GroupNorm *);
    /* index of the weight drawn, or -1 if the caller must use the exact method */
    int64_t (*draw)(const float *weights, int64_t count, double top_p, float min_p, double uniform,
                    float *kept, double *ends, int64_t *starts);
    /* XXH3-64 of the blocks in the order of the move; at least SUM_MIN bytes */
    uint64_t (*move)(const Move *);
    void (*convert)(const Conversion *);
    uint64_t (*checksum)(const char *data, int64_t bytes);
    uint64_t (*payload_digest)(const char *data, int64_t bytes);
} Kernels;

/* The module offers the tables that the processor supports. */
extern const Kernels kernels_avx512, kernels_avx2, kernels_plain;

/* The AVX-512 kernels with bf16 products on the matrix tiles of AMX; 0 if the processor, the
 * system or the compiler does not support AMX. Asks the system for permission once per process. */
int add_tiles(Kernels *);

/* The AVX-512 kernels with bf16 products and attention by instructions for pairs of bfloat16; 0 as
 * add_tiles. */
int add_pairs(Kernels *);

/* Attention with all factors rounded to bfloat16. Dims that do not fill whole tiles use
 * the AVX-512 kernel. */
int attention_on_tiles(const Attention *);

#endif
