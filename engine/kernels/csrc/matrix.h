/* Products of a few rows with a matrix whose columns are stored in panels.
 *
 * Invariant: an output is one chain of fused multiply-adds over k = 0, 1, 2 ..., starting at the
 * bias, whichever rows and panels share the loop and wherever the chain is split and stored.
 *
 * With few rows, loading the weights limits the speed, so the loop is shaped by memory. A panel is one
 * cache line wide if the vectors allow it. As many adjacent panels as fit into the registers are read
 * together, because a core fetches several streams faster than one.
 */

/* With PAIRS, a number of x and of the weights stands for a pair of bfloat16; see isa_avx512bf16.c. */
#ifndef PAIRS
#define ADD_TERM(row, column, sum) v_fma(row, column, sum)
#endif

/* Columns of one micro kernel are P panels, pstep apart, of NV vectors each. */
#define MICRO(NAME, TYPE, MR, P, NV, LOAD, AHEAD)                                                  \
    static void NAME(const float *x, int64_t ldx, const TYPE *w, int64_t ldw, int64_t pstep,       \
                     int64_t k, const float *init, int64_t ldi, float *y, int64_t ldy) {           \
        vf sum[MR][P][NV];                                                                         \
        const int64_t width = (NV)*LANES, beyond = k * ldw == pstep ? (P - 1) * pstep : 0;         \
        _Pragma("GCC unroll 16") for (int m = 0; m < MR; m++)                                      \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                               \
                    sum[m][p][j] = v_load(init + m * ldi + p * width + j * LANES);                 \
        for (int64_t i = 0; i < k; i++) {                                                          \
            vf b[P][NV];                                                                           \
            const int64_t ahead = AHEAD * width + (i + AHEAD < k ? 0 : beyond);                    \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) {                                  \
                const TYPE *at = w + i * ldw + p * pstep;                                          \
                for (int line = 0; line < (AHEAD ? width : 0); line += 64 / (int)sizeof *w)        \
                    __builtin_prefetch(at + ahead + line);                                         \
                LOAD(at, b[p], NV);                                                                \
            }                                                                                      \
            _Pragma("GCC unroll 16") for (int m = 0; m < MR; m++) {                                \
                vf row = v_set(x[m * ldx + i]);                                                    \
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                \
                    _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                           \
                        sum[m][p][j] = ADD_TERM(row, b[p][j], sum[m][p][j]);                       \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 16") for (int m = 0; m < MR; m++)                                      \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                               \
                    v_store(y + m * ldy + p * width + j * LANES, sum[m][p][j]);                    \
    }

#define LOAD_FLOATS(at, b, NV)                                                                     \
    _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)(b)[j] = v_load((at) + j * LANES)
#define LOAD_PAIRS(at, b, NV)                                                                      \
    _Pragma("GCC unroll 8") for (int j = 0; j < NV; j += 2)                                        \
        v_pair((at) + j * LANES, &(b)[j], &(b)[j + 1])

typedef void Micro(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t pstep,
                   int64_t k, const float *init, int64_t ldi, float *y, int64_t ldy);
typedef void MicroHalf(const float *x, int64_t ldx, const uint16_t *w, int64_t ldw, int64_t pstep,
                       int64_t k, const float *init, int64_t ldi, float *y, int64_t ldy);

/* Rows of a panel to prefetch: the processor's own prefetcher stops at each page. After
 * the end of adjacent panels, these are the first rows of the next panels. */
#define FETCH 32

/* Number of adjacent panels for R rows: limited by the registers and by the useful number of
 * streams. */
#define SIDE 3
#define BESIDE(R, NV)                                                                              \
    (CHAINS / ((R) * (NV)) > SIDE ? SIDE : CHAINS / ((R) * (NV)) < 1 ? 1 : CHAINS / ((R) * (NV)))

#define PANELS_OF(R)                                                                               \
    MICRO(floats_##R, float, R, BESIDE(R, FLOAT_VECTORS), FLOAT_VECTORS, LOAD_FLOATS, FETCH)       \
    MICRO(floats1_##R, float, R, 1, FLOAT_VECTORS, LOAD_FLOATS, FETCH)                             \
    MICRO(halves_##R, uint16_t, R, BESIDE(R, HALF_VECTORS), HALF_VECTORS, LOAD_PAIRS, FETCH)       \
    MICRO(halves1_##R, uint16_t, R, 1, HALF_VECTORS, LOAD_PAIRS, FETCH)

PANELS_OF(1)
PANELS_OF(2)
PANELS_OF(3)
PANELS_OF(4)
PANELS_OF(5)
PANELS_OF(6)
#if MATRIX_ROWS == 6
#define EACH(NAME) {NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6}
#else
PANELS_OF(7)
PANELS_OF(8)
PANELS_OF(9)
PANELS_OF(10)
PANELS_OF(11)
PANELS_OF(12)
#define EACH(NAME)                                                                                 \
    {NAME##1, NAME##2, NAME##3, NAME##4,  NAME##5,  NAME##6,                                       \
     NAME##7, NAME##8, NAME##9, NAME##10, NAME##11, NAME##12}
#endif

static Micro *const many_floats[MATRIX_ROWS] = EACH(floats_);
static Micro *const lone_floats[MATRIX_ROWS] = EACH(floats1_);
static MicroHalf *const many_halves[MATRIX_ROWS] = EACH(halves_);
static MicroHalf *const lone_halves[MATRIX_ROWS] = EACH(halves1_);

/* Columns of a panel. */
static inline int64_t panel_of(int bf16) { return (bf16 ? HALF_VECTORS : FLOAT_VECTORS) * LANES; }

/* Position of column c in a panel row; bfloat16 rows are stored in pair order. */
static inline int64_t place(int64_t c, int bf16) {
    if (!bf16) return c;
    int64_t pair = c / (2 * LANES), lane = c % (2 * LANES);
    return pair * 2 * LANES + 2 * (lane % LANES) + lane / LANES;
}

static void pack(const void *w, int from_bf16, void *panels, int to_bf16, int64_t start,
                 int64_t out, int64_t in) {
    const float *floats = w;
    const uint16_t *halves = w;
    const int64_t panel = panel_of(to_bf16);
    for (int64_t c = start; c < start + out;) {
        int64_t base = c / panel * panel, stop = base + panel;
        if (stop > start + out) stop = start + out;
        for (int64_t k = 0; k < in; k++)
            for (int64_t n = c; n < stop; n++) {
                int64_t from = (n - start) * in + k;
                int64_t to = (base * in) + k * panel + place(n - base, to_bf16);
                if (to_bf16) {
                    ((uint16_t *)panels)[to] = halves[from];
                } else {
                    uint32_t bits = (uint32_t)(from_bf16 ? halves[from] : 0) << 16;
                    float value;
                    memcpy(&value, &bits, 4);
                    ((float *)panels)[to] = from_bf16 ? value : floats[from];
                }
            }
        c = stop;
    }
}

/* Columns of a panel, and groups of rows that share a pass over the weights. */
static inline int64_t width_of(const Product *l) { return panel_of(l->bf16); }

static inline int64_t groups_of(const Product *l) {
    return l->rows <= MATRIX_ROWS ? 1 : (l->rows + GROUP_ROWS - 1) / GROUP_ROWS;
}

/* Weights that are used for all groups of rows before the next weights are read. */
#define SLICE_BYTES (256 << 10)

static const float zeros[SIDE * 2 * LANES];

typedef struct {
    int64_t panel, beside; /* columns panel * width .., of `beside` adjacent panels */
    int64_t k, depth;      /* terms k .. k + depth */
} Slice;

/* One group of rows; slices after the first continue from the content of y. */
static void slice_group(const Product *l, const Slice *s, int64_t row, int64_t rows, float *y,
                        int64_t ldy) {
    const int64_t width = width_of(l);
    int64_t at = (s->panel * l->in + s->k) * width, step = l->in * width, m = rows - 1;
    const float *x = l->x + row * l->step + s->k;
    const float *init = s->k ? y : l->bias ? l->bias + s->panel * width : zeros;
    int64_t ldi = s->k ? ldy : 0;
    if (l->bf16) {
        MicroHalf *f = s->beside > 1 ? many_halves[m] : lone_halves[m];
        f(x, l->step, (const uint16_t *)l->panels + at, width, step, s->depth, init, ldi, y, ldy);
    } else {
        Micro *f = s->beside > 1 ? many_floats[m] : lone_floats[m];
        f(x, l->step, (const float *)l->panels + at, width, step, s->depth, init, ldi, y, ldy);
    }
}

/* Size of the next of `groups` groups that share `left` rows evenly. */
static inline int64_t share(int64_t left, int64_t groups) { return (left + groups - 1) / groups; }

static inline int64_t beside(const Product *l, int64_t rows) {
    return l->bf16 ? BESIDE(rows, HALF_VECTORS) : BESIDE(rows, FLOAT_VECTORS);
}

/* `count` panels, processed together by every group that can take that many. */
static void full_panels(const Product *l, int64_t panel, int64_t count) {
    const int64_t width = width_of(l), groups = groups_of(l);
    int64_t bytes = count * width * (l->bf16 ? 2 : 4), rows;
    int64_t deepest = groups > 1 ? SLICE_BYTES / bytes : l->in;
    for (int64_t k = 0; k < l->in; k += deepest) {
        int64_t depth = l->in - k < deepest ? l->in - k : deepest, row = 0;
        for (int64_t g = groups; g > 0; g--, row += rows) {
            rows = share(l->rows - row, g);
            float *y = l->y + row * l->out + panel * width;
            int64_t each = beside(l, rows) == count ? count : 1;
            for (int64_t p = 0; p < count; p += each) {
                Slice s = {panel + p, each, k, depth};
                slice_group(l, &s, row, rows, y + p * width, l->out);
            }
        }
    }
}

/* The last columns, fewer than a panel: computed as a whole panel in a copy of y. */
static void tail_panel(const Product *l) {
    const int64_t width = width_of(l), groups = groups_of(l);
    float y[MATRIX_ROWS * 2 * LANES];
    int64_t start = l->out / width * width, rows, row = 0;
    Slice s = {l->out / width, 1, 0, l->in};
    for (int64_t g = groups; g > 0; g--, row += rows) {
        rows = share(l->rows - row, g);
        slice_group(l, &s, row, rows, y, width);
        for (int64_t m = 0; m < rows; m++)
            memcpy(l->y + (row + m) * l->out + start, y + m * width,
                   (size_t)(l->out - start) * sizeof(float));
    }
}

/* Panels from..to. */
static int product_panels(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Product *l = at;
    int64_t full = l->out / width_of(l), stop = to < full ? to : full;
    int64_t panel = from, count = beside(l, share(l->rows, groups_of(l)));
    for (; panel + count <= stop; panel += count) full_panels(l, panel, count);
    for (; panel < stop; panel++) full_panels(l, panel, 1);
    if (to > full) tail_panel(l);
    return 0;
}

static int product(const Product *l) {
    if (l->rows == 0) return 0;
    int64_t panels = (l->out + width_of(l) - 1) / width_of(l);
    int64_t grain = beside(l, share(l->rows, groups_of(l)));
    return run(l->threads, panels, grain, product_panels, (void *)l);
}

/* y = x @ panels of float32, by the calling thread */
static void multiply(const float *x, const float *panels, float *y, int64_t rows, int64_t in,
                     int64_t out) {
    Product l = {.x = x, .panels = panels, .y = y, .rows = rows, .step = in, .in = in, .out = out,
                 .threads = 1};
    product(&l);
}
