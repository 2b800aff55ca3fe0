/* Kernels of text encoders and pictures: attention over whole rows, group norm, activations.
 *
 * Invariant: a row's bits depend on its own inputs alone, in attention also on all keys.
 */

/* Rows of queries whose scores are held at once. */
#define DENSE_ROWS 48
/* Numbers of scores between two calls of after_part, at least; each has 2 dim products. */
#define DENSE_PART (1 << 20)
/* Fewest rows of queries for which a head's keys and values are packed once more. */
#define LEAST_BAND 192

/* Copy values[keys, dim] into panels for the product of weights[rows, keys] with them. */
static void pack_values(const float *values, float *panels, int64_t keys, int64_t dim) {
    const int64_t width = panel_of(0);
    for (int64_t start = 0; start < dim; start += width) {
        int64_t n = dim - start < width ? dim - start : width;
        float *to = panels + start * keys;
        if (n < width) memset(to, 0, (size_t)(keys * width) * sizeof(float));
        for (int64_t k = 0; k < keys; k++)
            memcpy(to + k * width, values + k * dim + start, (size_t)n * sizeof(float));
    }
}

/* Replace one row of scores by e^(score + bias - maximum); return the inverse of their sum. */
static float soften_row(float *scores, const float *bias, int64_t keys) {
    const vf none = v_set(-INFINITY);
    vf top = none, total = v_set(0);
    for (int64_t i = 0; i < keys; i += LANES) {
        int n = keys - i < LANES ? (int)(keys - i) : LANES;
        vf v = v_load_n(scores + i, n);
        if (bias) v = v_add(v, v_load_n(bias + i, n));
        if (n < LANES) v = v_between(v, none, 0, n);
        v_store_n(scores + i, v, n);
        top = v_max(top, v);
    }
    float peak = v_largest(top);
    vf shift = v_set(peak == -INFINITY ? 0.0f : -peak);
    for (int64_t i = 0; i < keys; i += LANES) {
        int n = keys - i < LANES ? (int)(keys - i) : LANES;
        vf v = v_exp(v_add(v_load_n(scores + i, n), shift));
        if (n < LANES) v = v_between(v, v_set(0), 0, n);
        v_store_n(scores + i, v, n);
        total = v_add(total, v);
    }
    return 1.0f / v_total(total);
}

typedef struct {
    float *keys, *values, *q, *scores, *sums;
} DenseSpace;

/* Rows row.. row + rows of one head. */
static void dense_rows(const DenseAttention *a, const DenseSpace *s, int64_t head, int64_t row,
                       int64_t rows) {
    const int64_t dim = a->dim, step = a->heads * dim;
    for (int64_t i = 0; i < rows; i++) {
        const float *q = a->q + (row + i) * step + head * dim;
        for (int64_t d = 0; d < dim; d++) s->q[i * dim + d] = q[d] * a->scale;
    }
    multiply(s->q, s->keys, s->scores, rows, dim, a->keys);
    float share[DENSE_ROWS];
    int64_t plane = a->bias_heads > 1 ? head : 0;
    for (int64_t i = 0; i < rows; i++) {
        const float *bias = a->bias ? a->bias + (plane * a->rows + row + i) * a->keys : NULL;
        share[i] = soften_row(s->scores + i * a->keys, bias, a->keys);
    }
    multiply(s->scores, s->values, s->sums, rows, a->keys, dim);
    for (int64_t i = 0; i < rows; i++) {
        float *out = a->out + (row + i) * step + head * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = s->sums[i * dim + d] * share[i];
    }
}

typedef struct {
    const DenseAttention *a;
    int64_t band, bands; /* rows of a unit, units of a head */
    float *memory;
    int64_t floats;      /* of each thread's memory */
} Dense;

static DenseSpace dense_space(const Dense *t, int seat) {
    const int64_t width = panel_of(0), keys = t->a->keys, dim = t->a->dim;
    int64_t all = (keys + width - 1) / width * width, dims = (dim + width - 1) / width * width;
    float *at = t->memory + seat * t->floats;
    DenseSpace s;
    s.keys = cut(&at, all * dim), s.values = cut(&at, dims * keys);
    s.q = cut(&at, DENSE_ROWS * dim), s.sums = cut(&at, DENSE_ROWS * dim);
    s.scores = cut(&at, DENSE_ROWS * keys);
    memset(s.keys + (all - width) * dim, 0, (size_t)(width * dim) * sizeof(float));
    return s;
}

/* Helpers have no part of the caller's watch, but end with it. */
static int end_with_run(void *none) {
    (void)none;
    return run_ended() ? -1 : 0;
}

/* Bands of rows of all heads. Keys and values are packed once for adjacent bands of a head. */
static int dense_bands(void *at, int64_t from, int64_t to, int seat) {
    const Dense *t = at;
    const DenseAttention *a = t->a;
    const Watch watch = seat ? (Watch){.after_part = end_with_run} : a->watch;
    const DenseSpace s = dense_space(t, seat);
    int64_t scores = 0, packed = -1;
    for (int64_t unit = from; unit < to; unit++) {
        int64_t head = unit / t->bands, row = unit % t->bands * t->band;
        int64_t stop = row + t->band < a->rows ? row + t->band : a->rows;
        const float *keys = a->kv + head * a->keys * a->dim;
        if (head != packed) {
            pack(keys, 0, s.keys, 0, 0, a->keys, a->dim);
            pack_values(keys + a->heads * a->keys * a->dim, s.values, a->keys, a->dim);
            packed = head;
        }
        for (int64_t rows; row < stop; row += rows) {
            rows = stop - row < DENSE_ROWS ? stop - row : DENSE_ROWS;
            dense_rows(a, &s, head, row, rows);
            scores += rows * a->keys;
            if (scores < DENSE_PART || !watch.after_part) continue;
            int ended = watch.after_part(watch.argument);
            if (ended) return ended;
            scores = 0;
        }
    }
    return 0;
}

/* A head's rows are divided only if there are few heads: each part packs its keys again. */
static int dense_attention(const DenseAttention *a) {
    const int64_t width = panel_of(0), dim = a->dim, most = a->rows / LEAST_BAND;
    int64_t keys = (a->keys + width - 1) / width * width, dims = (dim + width - 1) / width * width;
    int64_t bands = a->threads > 1 ? (4 * a->threads + a->heads - 1) / a->heads : 1;
    if (a->rows == 0) return 0;
    Dense t = {.a = a};
    t.bands = bands < most ? bands : most > 1 ? most : 1;
    t.band = (a->rows + t.bands - 1) / t.bands;
    t.bands = (a->rows + t.band - 1) / t.band;
    t.floats = keys * dim + dims * a->keys + DENSE_ROWS * (2 * dim + a->keys) + 5 * 16;
    t.memory = malloc((size_t)(t.floats * a->threads) * sizeof(float));
    if (!t.memory) return -1;
    int failed = run(a->threads, a->heads * t.bands, 1, dense_bands, &t);
    free(t.memory);
    return failed;
}

static inline vf v_sigmoid_mul(vf x, vf u) { /* x / (1 + e^-u) */
    return v_div(x, v_add(v_set(1), v_exp(v_sub(v_set(0), u))));
}

/* In place if y is x. */
static void activate(int64_t kind, const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        int n = count - i < LANES ? (int)(count - i) : LANES;
        vf v = v_load_n(x + i, n), u = v;
        if (kind == TANH) {
            v_store_n(y + i, v_tanh(v), n);
            continue;
        }
        if (kind == QUICK_GELU) u = v_mul(v, v_set(1.702f));
        if (kind == GELU_TANH) { /* 2 * sqrt(2 / pi) * (v + 0.044715 v^3) */
            vf w = v_fma(v_mul(v, v), v_set(0.071354816f), v_set(1.5957691f));
            u = v_mul(v, w);
        }
        v_store_n(y + i, v_sigmoid_mul(v, u), n);
    }
}

/* residual += x * scale, with one scale per column */
static void add_scaled(const float *x, const float *scale, float *residual, int64_t rows,
                       int64_t width) {
    for (int64_t t = 0; t < rows; t++, x += width, residual += width)
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            vf r = v_load_n(residual + i, n);
            v_store_n(residual + i, v_fma(v_load_n(x + i, n), v_load_n(scale + i, n), r), n);
        }
}

/* Rows whose float sums are added to the double sums at once. */
#define NORM_ROWS 64
/* Numbers that are read between two calls of after_part, at least. */
#define NORM_PART (1 << 22)

/* Call after_part if `done` rows end a part, whose rows are a multiple of NORM_ROWS. */
static int after_rows(const GroupNorm *a, int64_t done) {
    if (!a->watch.after_part || done % NORM_ROWS) return 0;
    int64_t part = (NORM_PART / a->width / NORM_ROWS + 1) * NORM_ROWS;
    return done % part ? 0 : a->watch.after_part(a->watch.argument);
}

/* sums[c] = sum over rows of x - mean, or of its square */
static int channel_sums(const GroupNorm *a, const float *mean, int squares, float *part,
                        double *sums) {
    const int64_t rows = a->rows, width = a->width;
    const float *x = a->x;
    for (int64_t c = 0; c < width; c++) sums[c] = 0;
    for (int64_t row = 0; row < rows; row += NORM_ROWS) {
        int64_t stop = row + NORM_ROWS < rows ? row + NORM_ROWS : rows;
        memset(part, 0, (size_t)width * sizeof(float));
        for (int64_t t = row; t < stop; t++)
            for (int64_t c = 0; c < width; c += LANES) {
                int n = width - c < LANES ? (int)(width - c) : LANES;
                vf v = v_sub(v_load_n(x + t * width + c, n), v_load_n(mean + c, n));
                vf p = v_load_n(part + c, n);
                v_store_n(part + c, squares ? v_fma(v, v, p) : v_add(p, v), n);
            }
        for (int64_t c = 0; c < width; c++) sums[c] += part[c];
        int ended = after_rows(a, stop);
        if (ended) return ended;
    }
    return 0;
}

/* mean over rows and the channels of each group, written to all channels of the group */
static void group_means(const double *sums, float *mean, int64_t rows, int64_t width,
                        int64_t groups) {
    int64_t each = width / groups;
    for (int64_t g = 0; g < groups; g++) {
        double total = 0;
        for (int64_t c = g * each; c < (g + 1) * each; c++) total += sums[c];
        for (int64_t c = g * each; c < (g + 1) * each; c++)
            mean[c] = (float)(total / (double)(rows * each));
    }
}

/* y = (x - mean) * scale + bias, then silu */
static int normalise(const GroupNorm *a, const float *mean, const float *scale) {
    const int64_t width = a->width;
    for (int64_t t = 0; t < a->rows; t++) {
        for (int64_t c = 0; c < width; c += LANES) {
            int n = width - c < LANES ? (int)(width - c) : LANES;
            vf v = v_sub(v_load_n(a->x + t * width + c, n), v_load_n(mean + c, n));
            v = v_fma(v, v_load_n(scale + c, n), v_load_n(a->bias + c, n));
            v_store_n(a->y + t * width + c, a->silu ? v_sigmoid_mul(v, v) : v, n);
        }
        int ended = after_rows(a, t + 1);
        if (ended) return ended;
    }
    return 0;
}

static int group_norm(const GroupNorm *a) {
    const int64_t width = a->width;
    double *sums = malloc((size_t)width * (sizeof(double) + 3 * sizeof(float)));
    if (!sums) return -1;
    float *part = (float *)(sums + width), *mean = part + width, *scale = mean + width;
    memset(mean, 0, (size_t)width * sizeof(float));
    int ended = channel_sums(a, mean, 0, part, sums);
    if (!ended) {
        group_means(sums, mean, a->rows, width, a->groups);
        ended = channel_sums(a, mean, 1, part, sums);
    }
    if (!ended) {
        group_means(sums, scale, a->rows, width, a->groups);
        for (int64_t c = 0; c < width; c++) scale[c] = a->weight[c] / sqrtf(scale[c] + a->eps);
        ended = normalise(a, mean, scale);
    }
    free(sums);
    return ended;
}
