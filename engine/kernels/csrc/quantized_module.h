/* The Python interface of quantized products; a part of cpu_module.c. */

static const Products *products_of(PyObject *index) {
    int64_t i;
    if (!chosen(index) || !get_int(index, &i)) return NULL;
    return choices[i & ((1 << THREADS_SHIFT) - 1)].products;
}

/* quantized_kinds() -> [(name, weights of a block, its bytes, weights of a step, bytes of a step)] */
static PyObject *py_quantized_kinds(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < QUANTIZED_KINDS; i++) {
        const QuantizedKind *k = &quantized_kinds[i];
        PyObject *item = Py_BuildValue("(sLLLL)", k->name, (long long)k->weights,
                                       (long long)k->bytes, (long long)k->span, (long long)k->step);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static int get_kind(PyObject *object, int64_t *kind) {
    if (!get_int(object, kind)) return 0;
    if (*kind >= 0 && *kind < QUANTIZED_KINDS) return 1;
    PyErr_Format(PyExc_ValueError, "no kind %lld of quantized weights", (long long)*kind);
    return 0;
}

/* Weights of a row of blocks[rows, bytes]. */
static int has_blocks(const Py_buffer *blocks, int64_t kind, int64_t *in) {
    const QuantizedKind *k = &quantized_kinds[kind];
    *in = blocks->shape[1] / k->bytes * k->weights;
    if (blocks->shape[1] > 0 && blocks->shape[1] % k->bytes == 0) return 1;
    PyErr_Format(PyExc_ValueError, "rows of %zd bytes are not whole blocks of %s",
                 blocks->shape[1], k->name);
    return 0;
}

static int64_t quantized_bytes(int64_t kind, int64_t out, int64_t in) {
    const QuantizedKind *k = &quantized_kinds[kind];
    return (out + PANEL - 1) / PANEL * ((in + k->span - 1) / k->span) * k->step;
}

/* pack_quantized(kind, blocks, panels, start): rows as columns start.. of zeroed uint8 panels */
static PyObject *py_pack_quantized(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *blocks, *panels;
    int64_t kind, start, in;
    if (!has_arguments(n, 4) || !get_kind(a[0], &kind) || !get_int(a[3], &start)) return NULL;
    if (!(blocks = take(&arrays, a[1], "blocks", 'B', 2, 0))) return refuse(&arrays);
    if (!(panels = take(&arrays, a[2], "panels", 'B', 1, 1))) return refuse(&arrays);
    if (!has_blocks(blocks, kind, &in)) return refuse(&arrays);
    if (start < 0 || quantized_bytes(kind, start + blocks->shape[0], in) > panels->len) {
        PyErr_SetString(PyExc_ValueError, "panels are too small");
        return refuse(&arrays);
    }
    Py_BEGIN_ALLOW_THREADS
    pack_quantized((int)kind, blocks->buf, panels->buf, start, blocks->shape[0], in);
    Py_END_ALLOW_THREADS
    return done(&arrays);
}

static int take_quantized(Arrays *arrays, PyObject *const *a, QuantizedRows *q, QuantizedLinear *l) {
    const Py_buffer *x, *panels, *bias = NULL, *y;
    int64_t kind, first;
    if (!get_kind(a[1], &kind) || !get_int(a[6], &first) || !get_int(a[7], &l->out)) return 0;
    if (!(x = take(arrays, a[2], "x", 'f', 2, 0))) return 0;
    if (!(panels = take(arrays, a[3], "panels", 'B', 1, 0))) return 0;
    if (a[4] != Py_None && !(bias = take(arrays, a[4], "bias", 'f', 1, 0))) return 0;
    if (!(y = take(arrays, a[5], "out", 'f', 2, 1))) return 0;
    *q = (QuantizedRows){.x = x->buf, .rows = x->shape[0], .in = x->shape[1],
                         .wide = quantized_kinds[kind].weights == 256};
    if (q->in == 0 || q->in % quantized_kinds[kind].weights) {
        PyErr_Format(PyExc_ValueError, "%lld columns are not whole blocks of %s",
                     (long long)q->in, quantized_kinds[kind].name);
        return 0;
    }
    if (first < 0 || l->out < 1 || first > y->shape[1] || l->out > y->shape[1] - first) {
        PyErr_SetString(PyExc_ValueError, "the columns are outside of out");
        return 0;
    }
    if (!has_length(y, "out", 0, q->rows) || !apart(x, y, "x and out")) return 0;
    if (!has_length(panels, "panels", 0, quantized_bytes(kind, l->out, q->in))) return 0;
    if (bias && !has_length(bias, "bias", 0, (l->out + PANEL - 1) / PANEL * PANEL)) return 0;
    l->kind = (int)kind, l->panels = panels->buf, l->bias = bias ? bias->buf : NULL;
    l->y = (float *)y->buf + first, l->ldy = y->shape[1];
    return 1;
}

/* Rows whose int8 form is in memory at once; each further part reads the weights again. */
#define QUANTIZED_ROWS 512

typedef struct {
    const Products *p;
    const QuantizedRows *q;
    const QuantizedLinear *l;
} Quantized;

static int quantize_part(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Quantized *t = at;
    t->p->quantize(t->q, from, to);
    return 0;
}

static int quantized_part(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Quantized *t = at;
    t->p->product(t->q, t->l, from, to);
    return 0;
}

static int quantized_rows(const Products *p, QuantizedRows all, QuantizedLinear l, int threads) {
    QuantizedRows q = all;
    Quantized t = {p, &q, &l};
    if (q.rows > QUANTIZED_ROWS) q.rows = QUANTIZED_ROWS;
    q.to = malloc((size_t)quantized_x_bytes(&q));
    if (!q.to) return -1;
    for (int64_t row = 0; row < all.rows; row += q.rows) {
        if (q.rows > all.rows - row) q.rows = all.rows - row;
        q.x = all.x + row * q.in;
        l.y += row ? QUANTIZED_ROWS * l.ldy : 0;
        int few = q.rows * q.in * 4 < SHARED_BYTES;
        run(few ? 1 : threads, (q.rows + TOGETHER - 1) / TOGETHER, 1, quantize_part, &t);
        run(threads, (l.out + PANEL - 1) / PANEL, 1, quantized_part, &t);
    }
    free(q.to);
    return 0;
}

/* quantized_linear(isa, kind, x, panels, bias or None, out, first column, columns) */
static PyObject *py_quantized_linear(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Products *p;
    QuantizedRows q;
    QuantizedLinear l;
    if (!has_arguments(n, 8) || !(p = products_of(a[0]))) return NULL;
    if (!take_quantized(&arrays, a, &q, &l)) return refuse(&arrays);
    int64_t bytes = quantized_bytes(l.kind, l.out, q.in) * (1 + q.rows / 8);
    int threads = threads_for(a[0], bytes);
    PyThreadState *lock = let_go(bytes);
    int failed = q.rows && quantized_rows(p, q, l, threads);
    take_back(lock);
    drop(&arrays);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* embed_quantized(ids, kind, blocks, out) */
static PyObject *py_embed_quantized(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *ids, *blocks, *y;
    int64_t kind, in;
    if (!has_arguments(n, 4) || !get_kind(a[1], &kind)) return NULL;
    if (!(ids = take(&arrays, a[0], "ids", 'i', 1, 0))) return refuse(&arrays);
    if (!(blocks = take(&arrays, a[2], "blocks", 'B', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[3], "out", 'f', 2, 1))) return refuse(&arrays);
    if (!has_blocks(blocks, kind, &in) || !has_length(y, "out", 0, ids->shape[0]) ||
        !has_length(y, "out", 1, in) || !all_below(ids, "ids", blocks->shape[0]))
        return refuse(&arrays);
    PyThreadState *lock = let_go(y->len);
    for (int64_t t = 0; t < ids->shape[0]; t++)
        dequantize_row((int)kind, (const uint8_t *)blocks->buf +
                       ((const int32_t *)ids->buf)[t] * blocks->shape[1], (float *)y->buf + t * in, in);
    take_back(lock);
    return done(&arrays);
}
