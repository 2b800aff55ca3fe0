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

/* One and two rows take several panels at once: their few chains could not fill the pipeline. */
#define WIDE1 (8 / PANEL_VECTORS)
#define WIDE2 (4 / PANEL_VECTORS)
#define FAR (32 * PANEL)

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
    const float *bias; /* one panel's worth per panel, or NULL */
    float *y;
    int64_t rows, in, out;
} Linear;

static const float zeros[64 * WIDE1 * WIDE2];

static inline const float *panel_bias(const Linear *l, int64_t panel) {
    return l->bias ? l->bias + panel * PANEL : zeros;
}

/* Up to MAX_ROWS rows against all of k of `wide` panels, straight from memory. */
static void stream_panels(const Linear *l, int64_t panel, int wide, float *y, int64_t ldy) {
    int64_t at = panel * l->in * PANEL, step = l->in * PANEL, m = l->rows - 1;
    const float *init = panel_bias(l, panel);
    if (l->bf16) {
        MicroHalf *f = wide > 1 ? wide_halves[m] : stream_halves[m];
        f(l->x, l->in, (const uint16_t *)l->panels + at, PANEL, step, l->in, init, 0, y, ldy);
    } else {
        Micro *f = wide > 1 ? wide_floats[m] : stream_floats[m];
        f(l->x, l->in, (const float *)l->panels + at, PANEL, step, l->in, init, 0, y, ldy);
    }
}

/* Few rows: every weight is used by one pass and is read once. */
static void linear_few(const Linear *l) {
    int64_t full = l->out / PANEL, panel = 0;
    int wide = l->rows == 1 ? WIDE1 : l->rows == 2 ? WIDE2 : 1;
    for (; panel + wide <= full; panel += wide)
        stream_panels(l, panel, wide, l->y + panel * PANEL, l->out);
    for (; panel < full; panel++) stream_panels(l, panel, 1, l->y + panel * PANEL, l->out);
    if (full * PANEL == l->out) return;
    float tail[MAX_ROWS * PANEL];
    stream_panels(l, full, 1, tail, PANEL);
    for (int64_t m = 0; m < l->rows; m++)
        memcpy(l->y + m * l->out + full * PANEL, tail + m * PANEL,
               (size_t)(l->out - full * PANEL) * sizeof(float));
}

/* Many rows: a slice of a panel (DEPTH of k) stays in the first cache while the rows of a band,
 * which fits in the second, pass by in groups of up to MAX_ROWS. */
#define DEPTH (8192 / PANEL)
#define BAND_BYTES (512 << 10)

typedef struct {
    const float *x;
    const float *w;
    int64_t k;
    const float *init; /* bias of the panel for the first slice, NULL to go on from y */
    float *y;
    int64_t ldx, ldy;
} Slice;

static void slice_rows(const Slice *s, int64_t rows, int vectors) {
    int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t g = 0, row = 0; g < groups; g++) {
        int64_t take = (rows - row + groups - g - 1) / (groups - g);
        float *y = s->y + row * s->ldy;
        micro[vectors - 1][take - 1](s->x + row * s->ldx, s->ldx, s->w, PANEL, 0, s->k,
                                     s->init ? s->init : y, s->init ? 0 : s->ldy, y, s->ldy);
        row += take;
    }
}

static const float *slice_weights(const Linear *l, int64_t panel, int64_t k, int64_t depth,
                                  float *wide) {
    int64_t at = (panel * l->in + k) * PANEL;
    if (!l->bf16) return (const float *)l->panels + at;
    const uint16_t *from = (const uint16_t *)l->panels + at;
    for (int64_t i = 0; i < depth * PANEL; i += 2 * LANES) {
        vf low, high;
        v_pair(from + i, &low, &high);
        v_store(wide + i, low);
        v_store(wide + i + LANES, high);
    }
    return wide;
}

/* One panel for the rows of a band; y has room for a whole panel. */
static void band_panel(const Linear *l, const float *x, int64_t rows, int64_t panel, float *y,
                       int64_t ldy) {
    float wide[DEPTH * PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0; k < l->in || k == 0; k += DEPTH) {
        int64_t depth = l->in - k < DEPTH ? l->in - k : DEPTH;
        Slice s = {.x = x + k, .w = slice_weights(l, panel, k, depth, wide), .k = depth,
                   .init = k ? NULL : panel_bias(l, panel), .y = y, .ldx = l->in, .ldy = ldy};
        slice_rows(&s, rows, PANEL_VECTORS);
    }
}

static void linear_many(const Linear *l, int64_t band) {
    int64_t full = l->out / PANEL;
    float tail[MAX_ROWS * PANEL];
    for (int64_t row = 0; row < l->rows; row += band) {
        int64_t rows = l->rows - row < band ? l->rows - row : band;
        const float *x = l->x + row * l->in;
        float *y = l->y + row * l->out;
        for (int64_t panel = 0; panel < full; panel++)
            band_panel(l, x, rows, panel, y + panel * PANEL, l->out);
        if (full * PANEL == l->out) continue;
        for (int64_t m = 0; m < rows; m += MAX_ROWS) {
            int64_t take = rows - m < MAX_ROWS ? rows - m : MAX_ROWS;
            band_panel(l, x + m * l->in, take, full, tail, PANEL);
            for (int64_t r = 0; r < take; r++)
                memcpy(y + (m + r) * l->out + full * PANEL, tail + r * PANEL,
                       (size_t)(l->out - full * PANEL) * sizeof(float));
        }
    }
}

static void linear(const float *x, const void *panels, int bf16, const float *bias, float *y,
                   int64_t rows, int64_t in, int64_t out) {
    Linear l = {x, panels, bf16, bias, y, rows, in, out};
    int64_t band = BAND_BYTES / (int64_t)sizeof(float) / (in > 0 ? in : 1) / MAX_ROWS * MAX_ROWS;
    if (band < 4 * MAX_ROWS) band = 4 * MAX_ROWS;
    if (rows == 0) return;
    if (rows <= MAX_ROWS) linear_few(&l);
    else linear_many(&l, band);
}
