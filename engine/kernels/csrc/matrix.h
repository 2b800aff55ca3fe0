/* Products of a few rows with a matrix whose columns lie in panels.
 *
 * Invariant: an output is one chain of fused multiply-adds over k = 0, 1, 2 ..., starting at the
 * bias, whichever rows and panels share the loop and wherever the chain is cut and stored.
 */

/* Columns of one micro kernel are P panels, pstep apart, of NV vectors each. */
#define MICRO(NAME, TYPE, MR, P, NV, LOAD, AHEAD)                                                  \
    static void NAME(const float *x, int64_t ldx, const TYPE *w, int64_t ldw, int64_t pstep,       \
                     int64_t k, const float *init, int64_t ldi, float *y, int64_t ldy) {           \
        vf sum[MR][P][NV];                                                                         \
        _Pragma("GCC unroll 8") for (int m = 0; m < MR; m++)                                       \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                               \
                    sum[m][p][j] = v_load(init + m * ldi + p * PANEL + j * LANES);                 \
        for (int64_t i = 0; i < k; i++) {                                                          \
            vf b[P][NV];                                                                           \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) {                                  \
                const TYPE *at = w + i * ldw + p * pstep;                                          \
                for (int line = 0; line < (AHEAD ? NV * LANES : 0); line += 64 / (int)sizeof *w)   \
                    __builtin_prefetch(at + AHEAD + line);                                         \
                LOAD(at, b[p], NV);                                                                \
            }                                                                                      \
            _Pragma("GCC unroll 8") for (int m = 0; m < MR; m++) {                                 \
                vf row = v_set(x[m * ldx + i]);                                                    \
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                \
                    _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                           \
                        sum[m][p][j] = v_fma(row, b[p][j], sum[m][p][j]);                          \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 8") for (int m = 0; m < MR; m++)                                       \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++)                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < NV; j++)                               \
                    v_store(y + m * ldy + p * PANEL + j * LANES, sum[m][p][j]);                    \
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

/* The matrix kernels read FAR ahead: the processor's own prefetcher stops at each page. */
#define FAR (32 * PANEL)

/* One and two rows take several panels at once: their few chains could not fill the pipeline. */
#define WIDE1 (8 / PANEL_VECTORS)
#define WIDE2 (4 / PANEL_VECTORS)

#define ROWS(NV, LOAD)                                                                             \
    MICRO(micro1x##NV, float, 1, 1, NV, LOAD, 0)                                                   \
    MICRO(micro2x##NV, float, 2, 1, NV, LOAD, 0)                                                   \
    MICRO(micro3x##NV, float, 3, 1, NV, LOAD, 0)                                                   \
    MICRO(micro4x##NV, float, 4, 1, NV, LOAD, 0)                                                   \
    MICRO(micro5x##NV, float, 5, 1, NV, LOAD, 0)                                                   \
    MICRO(micro6x##NV, float, 6, 1, NV, LOAD, 0)
#define ROWS_OF(NV) {micro1x##NV, micro2x##NV, micro3x##NV, micro4x##NV, micro5x##NV, micro6x##NV}

ROWS(1, LOAD_FLOATS)
ROWS(2, LOAD_FLOATS)
#if PANEL_VECTORS == 4
ROWS(3, LOAD_FLOATS)
ROWS(4, LOAD_FLOATS)
static Micro *const micro[PANEL_VECTORS][MAX_ROWS] = {ROWS_OF(1), ROWS_OF(2), ROWS_OF(3),
                                                      ROWS_OF(4)};
#else
static Micro *const micro[PANEL_VECTORS][MAX_ROWS] = {ROWS_OF(1), ROWS_OF(2)};
#endif

#define STREAM(NAME, TYPE, LOAD)                                                                   \
    MICRO(NAME##1, TYPE, 1, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##2, TYPE, 2, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##3, TYPE, 3, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##4, TYPE, 4, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##5, TYPE, 5, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##6, TYPE, 6, 1, PANEL_VECTORS, LOAD, FAR)                                           \
    MICRO(NAME##1wide, TYPE, 1, WIDE1, PANEL_VECTORS, LOAD, FAR)                                   \
    MICRO(NAME##2wide, TYPE, 2, WIDE2, PANEL_VECTORS, LOAD, FAR)
STREAM(floats, float, LOAD_FLOATS)
STREAM(halves, uint16_t, LOAD_PAIRS)

static Micro *const stream_floats[MAX_ROWS] = {floats1, floats2, floats3,
                                               floats4, floats5, floats6};
static MicroHalf *const stream_halves[MAX_ROWS] = {halves1, halves2, halves3,
                                                   halves4, halves5, halves6};
static Micro *const wide_floats[2] = {floats1wide, floats2wide};
static MicroHalf *const wide_halves[2] = {halves1wide, halves2wide};

/* Place of column c of a panel row; bfloat16 rows are stored in pair order. */
static inline int64_t place(int64_t c, int bf16) {
    if (!bf16) return c;
    int64_t pair = c / (2 * LANES), lane = c % (2 * LANES);
    return pair * 2 * LANES + 2 * (lane % LANES) + lane / LANES;
}

static void pack(const void *w, int from_bf16, void *panels, int to_bf16, int64_t start,
                 int64_t out, int64_t in) {
    const float *floats = w;
    const uint16_t *halves = w;
    for (int64_t c = start; c < start + out;) {
        int64_t base = c / PANEL * PANEL, stop = base + PANEL;
        if (stop > start + out) stop = start + out;
        for (int64_t k = 0; k < in; k++)
            for (int64_t n = c; n < stop; n++) {
                int64_t from = (n - start) * in + k;
                int64_t to = (base * in) + k * PANEL + place(n - base, to_bf16);
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

typedef struct {
    const float *x;
    const void *panels;
    int bf16;
    const float *bias; /* padded to whole panels, or NULL */
    float *y;
    int64_t rows, in, out;
} Linear;

/* Weights of a panel that are used for all rows before the next ones are touched. */
#define SLICE_BYTES (256 << 10)

static const float zeros[64 * WIDE1 * WIDE2];

typedef struct {
    int64_t panel, k, depth; /* columns panel * PANEL .., terms k .. k + depth */
    int wide;                /* panels at once */
} Slice;

/* One group of up to MAX_ROWS rows; terms after the first slice go on from what y holds. */
static void slice_group(const Linear *l, const Slice *s, int64_t row, int64_t rows, float *y,
                        int64_t ldy) {
    int64_t at = (s->panel * l->in + s->k) * PANEL, step = l->in * PANEL, m = rows - 1;
    const float *x = l->x + row * l->in + s->k;
    const float *init = s->k ? y : l->bias ? l->bias + s->panel * PANEL : zeros;
    int64_t ldi = s->k ? ldy : 0;
    if (l->bf16) {
        MicroHalf *f = s->wide > 1 ? wide_halves[m] : stream_halves[m];
        f(x, l->in, (const uint16_t *)l->panels + at, PANEL, step, s->depth, init, ldi, y, ldy);
    } else {
        Micro *f = s->wide > 1 ? wide_floats[m] : stream_floats[m];
        f(x, l->in, (const float *)l->panels + at, PANEL, step, s->depth, init, ldi, y, ldy);
    }
}

/* Size of the next of `groups` groups that share `left` rows evenly. */
static inline int64_t share(int64_t left, int64_t groups) { return (left + groups - 1) / groups; }

static void full_panels(const Linear *l, int64_t panel, int wide) {
    int64_t groups = (l->rows + MAX_ROWS - 1) / MAX_ROWS, rows;
    int64_t deepest = groups > 1 ? SLICE_BYTES / (PANEL * (l->bf16 ? 2 : 4)) : l->in;
    for (int64_t k = 0; k < l->in; k += deepest) {
        Slice s = {panel, k, l->in - k < deepest ? l->in - k : deepest, wide};
        for (int64_t g = groups, row = 0; g > 0; g--, row += rows) {
            rows = share(l->rows - row, g);
            slice_group(l, &s, row, rows, l->y + row * l->out + panel * PANEL, l->out);
        }
    }
}

/* The last columns, fewer than a panel: computed as a whole panel beside y. */
static void tail_panel(const Linear *l) {
    float y[MAX_ROWS * PANEL];
    int64_t start = l->out / PANEL * PANEL, rows;
    Slice s = {l->out / PANEL, 0, l->in, 1};
    for (int64_t row = 0; row < l->rows; row += rows) {
        rows = l->rows - row < MAX_ROWS ? l->rows - row : MAX_ROWS;
        slice_group(l, &s, row, rows, y, PANEL);
        for (int64_t m = 0; m < rows; m++)
            memcpy(l->y + (row + m) * l->out + start, y + m * PANEL,
                   (size_t)(l->out - start) * sizeof(float));
    }
}

static void linear(const float *x, const void *panels, int bf16, const float *bias, float *y,
                   int64_t rows, int64_t in, int64_t out) {
    Linear l = {x, panels, bf16, bias, y, rows, in, out};
    int64_t full = out / PANEL, panel = 0;
    int wide = rows == 1 ? WIDE1 : rows == 2 ? WIDE2 : 1;
    for (; panel + wide <= full; panel += wide) full_panels(&l, panel, wide);
    for (; panel < full; panel++) full_panels(&l, panel, 1);
    if (full * PANEL < out) tail_panel(&l);
}
