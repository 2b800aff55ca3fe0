/* The Python interface of the kernels.
 *
 * Every array is checked for type, contiguity, shape and range of its indices before the first
 * byte is written; a failed check raises ValueError. Long kernels run without the GIL.
 */
#include "arrays.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"
#include "quantized.h"

/* ---- instruction sets ---- */

typedef struct {
    const Kernels *kernels;
    int usable;
    const Products *products; /* with quantized weights; all give the same bits */
} Choice;

#if defined(__x86_64__)
static Kernels kernels_amx, kernels_avx512bf16;
#endif

static Choice choices[] = {
#if defined(__x86_64__)
    {&kernels_amx, 0, &products_avx2},
    {&kernels_avx512bf16, 0, &products_avx2},
    {&kernels_avx512, 0, &products_avx2},
    {&kernels_avx2, 0, &products_avx2},
#endif
    {&kernels_plain, 1, &products_plain},
};
#define CHOICES ((int64_t)(sizeof choices / sizeof *choices))

#if defined(__x86_64__)
/* AMD's VDPBF16PS multiplies pairs of bfloat16 twice as fast as float32 is multiplied (Zen 4), Intel's
 * half as fast (Emerald Rapids without AMX: 85 and 150 GFLOP/s). */
static int pairs_are_fast(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx;
}
#endif

static void find_usable(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    __get_cpuid(1, &a, &b, &c, &d);
    choices[2].usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    choices[3].usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi2") && (c >> 29 & 1); /* f16c */
    choices[0].usable = choices[2].usable && add_tiles(&kernels_amx);
    choices[1].usable = choices[2].usable && add_pairs(&kernels_avx512bf16);
#ifdef HAVE_VNNI256
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1)) /* avx_vnni */
        for (int i = 0; i < 4; i++) choices[i].products = &products_vnni256;
#endif
    if (choices[2].usable && __builtin_cpu_supports("avx512vnni"))
        for (int i = 0; i < 3; i++) choices[i].products = &products_vnni512;
#ifdef HAVE_TILES
    if (choices[0].usable && choices[0].products == &products_vnni512)
        choices[0].products = &products_amx;
#endif
    if (!pairs_are_fast()) {
        Choice pairs = choices[1];
        choices[1] = choices[2], choices[2] = pairs;
    }
#endif
}

/* The first argument of most functions: the index of an instruction set, and above THREADS_SHIFT the
 * number of further threads that the call may use. */
#define THREADS_SHIFT 8

static const Kernels *chosen(PyObject *index) {
    int64_t i;
    if (!get_int(index, &i)) return NULL;
    if (i >= 0) i &= (1 << THREADS_SHIFT) - 1;
    if (i >= 0 && i < CHOICES && choices[i].usable) return choices[i].kernels;
    PyErr_SetString(PyExc_ValueError, "no such instruction set on this machine");
    return NULL;
}

/* instruction_sets() -> [(index, name, panel width of f32, of bf16, terms of bf16)], best first */
static PyObject *py_instruction_sets(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < CHOICES; i++) {
        if (!choices[i].usable) continue;
        const Kernels *k = choices[i].kernels;
        PyObject *item = Py_BuildValue("(isiii)", i, k->name, k->panel_floats, k->panel_halves,
                                       k->terms_halves);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Bytes that a thread reads, approximately, while another one takes its part. */
#define SHARED_BYTES (128 << 10)

/* The threads for a call that reads `bytes`, approximately. */
static int threads_for(PyObject *index, int64_t bytes) {
    int64_t most = 1 + (PyLong_AsLongLong(index) >> THREADS_SHIFT), useful = 1 + bytes / SHARED_BYTES;
    if (most > MOST_THREADS) most = MOST_THREADS;
    return (int)(useful < most ? useful : most);
}

/* start_threads(threads) -> number of threads that calls can use, fewer if the system refuses some */
static PyObject *py_start_threads(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    int64_t threads;
    if (!has_arguments(n, 1) || !get_int(a[0], &threads)) return NULL;
    if (threads < 1 || threads > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "threads must be 1 to %d", MOST_THREADS);
    return PyLong_FromLong(start_threads((int)threads));
}

/* ---- the GIL ---- */

/* A call that releases the GIL may find it taken afterwards: a worker's I/O thread holds it
 * for about as long as reading 4 MB takes, a quarter of a millisecond, and the wake-up costs more
 * than a small kernel. So only long calls release it. If no matrix is that large,
 * the limit is a quarter of the largest packed matrix. */
#define LONG_BYTES (4 << 20)

static int64_t largest_packed;

/* Set by the thread that loads the weights, before other threads compute. */
static void note_packed(int64_t bytes) {
    if (bytes > largest_packed) largest_packed = bytes;
}

/* note_packed(bytes): the same for a matrix that another process packed */
static PyObject *py_note_packed(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    int64_t bytes;
    if (!has_arguments(n, 1) || !get_int(a[0], &bytes)) return NULL;
    note_packed(bytes);
    Py_RETURN_NONE;
}

/* Release the GIL if a call reads many `bytes` (approximately); pass the result to take_back. */
static PyThreadState *let_go(int64_t bytes) {
    int64_t share = largest_packed / 4;
    return bytes >= (share < LONG_BYTES ? share : LONG_BYTES) ? PyEval_SaveThread() : NULL;
}

static void take_back(PyThreadState *lock) {
    if (lock) PyEval_RestoreThread(lock);
}

/* ---- matrices ---- */

/* `columns` rounded up to whole panels. */
static int64_t whole_panels(const Kernels *k, int64_t columns, int64_t bf16) {
    int64_t panel = bf16 ? k->panel_halves : k->panel_floats;
    return (columns + panel - 1) / panel * panel;
}

/* Bytes of the panels of `columns` columns of `in` terms each. */
static int64_t panel_bytes(const Kernels *k, int64_t columns, int64_t in, int64_t bf16) {
    int64_t terms = bf16 ? (in + k->terms_halves - 1) / k->terms_halves * k->terms_halves : in;
    return whole_panels(k, columns, bf16) * terms * (bf16 ? 2 : 4);
}

typedef struct {
    const Kernels *k;
    const void *part;
    void *panels;
    int from_bf16, bf16;
    int64_t start, out, in;
} Packing;

/* Panels from..to, counted from the one of column `start`. */
static int pack_panels(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Packing *p = at;
    int64_t width = p->bf16 ? p->k->panel_halves : p->k->panel_floats, first = p->start / width;
    int64_t column = (first + from) * width, stop = (first + to) * width;
    if (column < p->start) column = p->start;
    if (stop > p->start + p->out) stop = p->start + p->out;
    int64_t skip = (column - p->start) * p->in * (p->from_bf16 ? 2 : 4);
    p->k->pack((const char *)p->part + skip, p->from_bf16, p->panels, p->bf16, column,
               stop - column, p->in);
    return 0;
}

/* pack(isa, part, panels, in_features, start): part as columns start.. of uint8 panels */
static PyObject *py_pack(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    int64_t bf16, start;
    if (!has_arguments(n, 5) || !(k = chosen(a[0]))) return NULL;
    if (!get_int(a[3], &bf16) || !get_int(a[4], &start)) return NULL;
    const Py_buffer *panels = take(&arrays, a[2], "panels", 'B', 1, 1);
    const Py_buffer *part = panels ? take(&arrays, a[1], "weights", 'f', 2, 0) : NULL;
    int from_bf16 = 0;
    if (panels && !part && arrays.count == 2 && is_type(&arrays.held[1], 'H') &&
        arrays.held[1].ndim == 2) {
        PyErr_Clear();
        part = &arrays.held[1];
        from_bf16 = 1;
    }
    if (!part) return refuse(&arrays);
    int64_t out = part->shape[0], in = part->shape[1];
    if ((bf16 && !from_bf16) || start < 0 ||
        panel_bytes(k, start + out, in, bf16) > panels->len) {
        PyErr_SetString(PyExc_ValueError, "panels are too small, or of the wrong type");
        return refuse(&arrays);
    }
    Packing p = {k, part->buf, panels->buf, from_bf16, bf16 != 0, start, out, in};
    int64_t width = bf16 ? k->panel_halves : k->panel_floats;
    int threads = threads_for(a[0], panels->len);
    Py_BEGIN_ALLOW_THREADS
    run(threads, (start + out + width - 1) / width - start / width, 1, pack_panels, &p);
    Py_END_ALLOW_THREADS
    return done(&arrays);
}

/* out[t] = row t of x times the panels, plus bias. With `convolves`, row t begins at row t of x, and is as
 * many rows of x long as there are more rows in x than in out, and one. */
static PyObject *multiply(PyObject *const *a, Py_ssize_t n, int convolves) {
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *panels, *bias = NULL, *y;
    const Kernels *k;
    int64_t bf16;
    int failed;
    if (!has_arguments(n, 6) || !(k = chosen(a[0])) || !get_int(a[3], &bf16)) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(panels = take(&arrays, a[2], "panels", 'B', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[5], "out", 'f', 2, 1))) return refuse(&arrays);
    if (a[4] != Py_None && !(bias = take(&arrays, a[4], "bias", 'f', 1, 0)))
        return refuse(&arrays);
    int64_t step = x->shape[1], rows = convolves ? y->shape[0] : x->shape[0], out = y->shape[1];
    int64_t in = convolves ? (x->shape[0] - rows + 1) * step : step;
    if (in <= 0 || (convolves && (rows == 0 || bf16))) {
        PyErr_SetString(PyExc_ValueError,
                        convolves ? "x or out has no rows, or the weights are bfloat16"
                                  : "x has no columns");
        return refuse(&arrays);
    }
    if (!has_length(y, "out", 0, rows) || !apart(x, y, "x and out")) return refuse(&arrays);
    if (!has_length(panels, "panels", 0, panel_bytes(k, out, in, bf16))) return refuse(&arrays);
    if (bias && !has_length(bias, "bias", 0, whole_panels(k, out, bf16))) return refuse(&arrays);
    /* Reading the weights dominates for few rows; each further row adds time. */
    int64_t bytes = panels->len * (1 + rows / 8);
    Product p = {.x = x->buf, .panels = panels->buf, .bias = bias ? bias->buf : NULL, .y = y->buf,
                 .rows = rows, .step = step, .in = in, .out = out, .bf16 = bf16 != 0,
                 .threads = threads_for(a[0], bytes)};
    PyThreadState *lock = let_go(bytes);
    failed = k->product(&p);
    take_back(lock);
    drop(&arrays);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* linear(isa, x, panels, bf16, bias or None, out) */
static PyObject *py_linear(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return multiply(a, n, 0);
}

/* convolve(isa, x, panels, bf16, bias or None, out) */
static PyObject *py_convolve(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return multiply(a, n, 1);
}

static int take_weights(Arrays *arrays, const Kernels *k, PyObject *panels, PyObject *bias,
                        const char *name, int64_t columns, int64_t in, const void **weights,
                        const float **added) {
    const Py_buffer *b = take(arrays, panels, name, 'B', 1, 0);
    if (!b || !has_length(b, name, 0, panel_bytes(k, columns, in, 1))) return 0;
    *weights = b->buf;
    *added = NULL;
    if (bias == Py_None) return 1;
    if (!(b = take(arrays, bias, "bias", 'f', 1, 0))) return 0;
    *added = b->buf;
    return has_length(b, "bias", 0, whole_panels(k, columns, 1));
}

/* gated_mlp(isa, x, gate_up, bias or None, width, down, bias or None, out) -> True if computed:
 * False if the instruction set has no such kernel. Weights are panels of bfloat16. */
static PyObject *py_gated_mlp(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *y;
    const Kernels *k;
    GatedMlp m;
    int failed;
    if (!has_arguments(n, 8) || !(k = chosen(a[0])) || !get_int(a[4], &m.width)) return NULL;
    if (!k->gated_mlp || m.width <= 0 || m.width % k->panel_halves) Py_RETURN_FALSE;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[7], "out", 'f', 2, 1))) return refuse(&arrays);
    m.x = x->buf, m.y = y->buf, m.rows = x->shape[0], m.in = x->shape[1], m.out = y->shape[1];
    if (m.in == 0 || m.out == 0) {
        PyErr_SetString(PyExc_ValueError, "x or out has no columns");
        return refuse(&arrays);
    }
    if (!has_length(y, "out", 0, m.rows) || !apart(x, y, "x and out")) return refuse(&arrays);
    if (!take_weights(&arrays, k, a[2], a[3], "gate_up", 2 * m.width, m.in, &m.gate_up,
                      &m.gate_up_bias))
        return refuse(&arrays);
    if (!take_weights(&arrays, k, a[5], a[6], "down", m.out, m.width, &m.down, &m.down_bias))
        return refuse(&arrays);
    int64_t weights = panel_bytes(k, 2 * m.width, m.in, 1) + panel_bytes(k, m.out, m.width, 1);
    int64_t bytes = weights * (1 + m.rows / 8);
    m.threads = threads_for(a[0], bytes);
    PyThreadState *lock = let_go(bytes);
    failed = k->gated_mlp(&m);
    take_back(lock);
    drop(&arrays);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_TRUE;
}

#include "quantized_module.h"

/* ---- rows ---- */

/* A kernel that computes each row by itself. */
typedef struct {
    const Kernels *k;
    const float *x;
    float *residual; /* or NULL */
    const float *weight, *bias;
    float eps;
    float *y;
    int64_t kind, width; /* of y */
} Rows;

static float *skip(float *x, int64_t floats) { return x ? x + floats : NULL; }

static int rms_norm_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rows *r = at;
    int64_t start = from * r->width;
    r->k->rms_norm(r->x + start, skip(r->residual, start), r->weight, r->eps, r->y + start,
                   to - from, r->width);
    return 0;
}

static int layer_norm_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rows *r = at;
    int64_t start = from * r->width;
    r->k->layer_norm(r->x + start, skip(r->residual, start), r->weight, r->bias, r->eps,
                     r->y + start, to - from, r->width);
    return 0;
}

static int silu_mul_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rows *r = at;
    r->k->silu_mul(r->x + from * 2 * r->width, r->y + from * r->width, to - from, r->width);
    return 0;
}

static int gelu_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rows *r = at;
    r->k->gelu(r->x + from * r->width, r->y + from * r->width, to - from, r->width);
    return 0;
}

static int activate_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rows *r = at;
    int64_t start = from * r->width;
    r->k->activate(r->kind, r->x + start, r->y + start, (to - from) * r->width);
    return 0;
}

typedef struct {
    const Kernels *k;
    const RopeAppend *all;
} Rope;

static int rope_append_rows(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Rope *rope = at;
    RopeAppend r = *rope->all;
    r.qkv += from * (r.heads + 2 * r.kv_heads) * r.dim;
    r.positions += from, r.slots += from, r.q_out += from * r.heads * r.dim;
    r.rows = to - from;
    rope->k->rope_append(&r);
    return 0;
}

/* Run a kernel of rows that reads `bytes`. */
static void run_rows(PyObject *index, int64_t bytes, int64_t rows, Task *task, void *argument) {
    int threads = threads_for(index, bytes);
    PyThreadState *lock = let_go(bytes);
    run(threads, rows, 1, task, argument);
    take_back(lock);
}

static void widen_row(const uint16_t *from, float *to, int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

static void embed(const Py_buffer *ids, const Py_buffer *table, int bf16, float *y) {
    int64_t width = table->shape[1];
    for (int64_t t = 0; t < ids->shape[0]; t++, y += width) {
        int64_t at = ((const int32_t *)ids->buf)[t] * width;
        if (bf16) widen_row((const uint16_t *)table->buf + at, y, width);
        else memcpy(y, (const float *)table->buf + at, (size_t)width * sizeof(float));
    }
}

/* embed(ids, table, bf16, out) */
static PyObject *py_embed(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *ids, *table, *y;
    int64_t bf16;
    if (!has_arguments(n, 4) || !get_int(a[2], &bf16)) return NULL;
    if (!(ids = take(&arrays, a[0], "ids", 'i', 1, 0))) return refuse(&arrays);
    if (!(table = take(&arrays, a[1], "table", bf16 ? 'H' : 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[3], "out", 'f', 2, 1))) return refuse(&arrays);
    if (!has_length(y, "out", 0, ids->shape[0])) return refuse(&arrays);
    if (!has_length(y, "out", 1, table->shape[1])) return refuse(&arrays);
    if (!all_below(ids, "ids", table->shape[0])) return refuse(&arrays);
    PyThreadState *lock = let_go(y->len);
    embed(ids, table, bf16 != 0, y->buf);
    take_back(lock);
    return done(&arrays);
}

/* rms_norm(isa, x, residual or None, weight, eps, out) */
static PyObject *py_rms_norm(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *residual = NULL, *weight, *y;
    const Kernels *k;
    float eps;
    if (!has_arguments(n, 6) || !(k = chosen(a[0])) || !get_float(a[4], &eps)) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(weight = take(&arrays, a[3], "weight", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[5], "out", 'f', 2, 1))) return refuse(&arrays);
    if (a[2] != Py_None && !(residual = take(&arrays, a[2], "residual", 'f', 2, 1)))
        return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++) {
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
        if (residual && !has_length(residual, "residual", axis, x->shape[axis]))
            return refuse(&arrays);
    }
    if (!has_length(weight, "weight", 0, x->shape[1])) return refuse(&arrays);
    if (residual && !apart(residual, y, "residual and out")) return refuse(&arrays);
    Rows r = {.k = k, .x = x->buf, .residual = residual ? residual->buf : NULL,
              .weight = weight->buf, .eps = eps, .y = y->buf, .width = x->shape[1]};
    run_rows(a[0], x->len, x->shape[0], rms_norm_rows, &r);
    return done(&arrays);
}

/* silu_mul(isa, gate_up, out) */
static PyObject *py_silu_mul(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *y;
    const Kernels *k;
    if (!has_arguments(n, 3) || !(k = chosen(a[0]))) return NULL;
    if (!(x = take(&arrays, a[1], "gate_up", 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[2], "out", 'f', 2, 1))) return refuse(&arrays);
    if (!has_length(x, "gate_up", 0, y->shape[0])) return refuse(&arrays);
    if (!has_length(x, "gate_up", 1, 2 * y->shape[1])) return refuse(&arrays);
    if (!apart(x, y, "gate_up and out")) return refuse(&arrays);
    Rows r = {.k = k, .x = x->buf, .y = y->buf, .width = y->shape[1]};
    run_rows(a[0], x->len, y->shape[0], silu_mul_rows, &r);
    return done(&arrays);
}

/* layer_norm(isa, x, residual or None, weight, bias, eps, out) */
static PyObject *py_layer_norm(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *residual = NULL, *weight, *bias, *y;
    const Kernels *k;
    float eps;
    if (!has_arguments(n, 7) || !(k = chosen(a[0])) || !get_float(a[5], &eps)) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(weight = take(&arrays, a[3], "weight", 'f', 1, 0))) return refuse(&arrays);
    if (!(bias = take(&arrays, a[4], "bias", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[6], "out", 'f', 2, 1))) return refuse(&arrays);
    if (a[2] != Py_None && !(residual = take(&arrays, a[2], "residual", 'f', 2, 1)))
        return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++) {
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
        if (residual && !has_length(residual, "residual", axis, x->shape[axis]))
            return refuse(&arrays);
    }
    if (!has_length(weight, "weight", 0, x->shape[1])) return refuse(&arrays);
    if (!has_length(bias, "bias", 0, x->shape[1])) return refuse(&arrays);
    if (residual && !apart(residual, y, "residual and out")) return refuse(&arrays);
    Rows r = {.k = k, .x = x->buf, .residual = residual ? residual->buf : NULL,
              .weight = weight->buf, .bias = bias->buf, .eps = eps, .y = y->buf,
              .width = x->shape[1]};
    run_rows(a[0], x->len, x->shape[0], layer_norm_rows, &r);
    return done(&arrays);
}

/* gelu(isa, x, out) */
static PyObject *py_gelu(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *y;
    const Kernels *k;
    if (!has_arguments(n, 3) || !(k = chosen(a[0]))) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[2], "out", 'f', 2, 1))) return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++)
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
    if (!apart(x, y, "x and out")) return refuse(&arrays);
    Rows r = {.k = k, .x = x->buf, .y = y->buf, .width = x->shape[1]};
    run_rows(a[0], x->len, x->shape[0], gelu_rows, &r);
    return done(&arrays);
}

/* ---- audio ---- */

/* snake(isa, x, residual or None, scales, out) */
static PyObject *py_snake(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *residual = NULL, *scales, *y;
    const Kernels *k;
    if (!has_arguments(n, 5) || !(k = chosen(a[0]))) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(scales = take(&arrays, a[3], "scales", 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[4], "out", 'f', 2, 1))) return refuse(&arrays);
    if (a[2] != Py_None && !(residual = take(&arrays, a[2], "residual", 'f', 2, 1)))
        return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++) {
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
        if (residual && !has_length(residual, "residual", axis, x->shape[axis]))
            return refuse(&arrays);
    }
    if (!has_length(scales, "scales", 0, 2)) return refuse(&arrays);
    if (!has_length(scales, "scales", 1, x->shape[1])) return refuse(&arrays);
    if (residual && !apart(residual, y, "residual and out")) return refuse(&arrays);
    PyThreadState *lock = let_go(x->len);
    k->snake(x->buf, residual ? residual->buf : NULL, scales->buf, y->buf, x->shape[0],
             x->shape[1]);
    take_back(lock);
    return done(&arrays);
}

/* depthwise(isa, x, weight, bias, dilation, scales or None, out) */
static PyObject *py_depthwise(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *weight, *bias, *scales = NULL, *y;
    const Kernels *k;
    int64_t dilation;
    if (!has_arguments(n, 7) || !(k = chosen(a[0])) || !get_int(a[4], &dilation)) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(weight = take(&arrays, a[2], "weight", 'f', 2, 0))) return refuse(&arrays);
    if (!(bias = take(&arrays, a[3], "bias", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[6], "out", 'f', 2, 1))) return refuse(&arrays);
    if (a[5] != Py_None && !(scales = take(&arrays, a[5], "scales", 'f', 2, 0)))
        return refuse(&arrays);
    int64_t rows = x->shape[0], width = x->shape[1], taps = weight->shape[0];
    if (taps % 2 == 0 || dilation < 1 || dilation > (1 << 20)) {
        PyErr_SetString(PyExc_ValueError, "the taps are even, or the dilation is out of range");
        return refuse(&arrays);
    }
    if (!has_length(weight, "weight", 1, width) || !has_length(bias, "bias", 0, width) ||
        !has_length(y, "out", 0, rows) || !has_length(y, "out", 1, width))
        return refuse(&arrays);
    if (scales && (!has_length(scales, "scales", 0, 2) || !has_length(scales, "scales", 1, width)))
        return refuse(&arrays);
    if (!apart(x, y, "x and out")) return refuse(&arrays);
    Depthwise d = {.x = x->buf, .weight = weight->buf, .bias = bias->buf,
                   .scales = scales ? scales->buf : NULL, .y = y->buf,
                   .rows = rows, .width = width, .taps = taps, .dilation = dilation};
    PyThreadState *lock = let_go(x->len);
    k->depthwise(&d);
    take_back(lock);
    return done(&arrays);
}

/* soft_clip(isa, x, out) */
static PyObject *py_soft_clip(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *y;
    const Kernels *k;
    if (!has_arguments(n, 3) || !(k = chosen(a[0]))) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[2], "out", 'f', 1, 1))) return refuse(&arrays);
    if (!has_length(y, "out", 0, x->shape[0])) return refuse(&arrays);
    PyThreadState *lock = let_go(x->len);
    k->soft_clip(x->buf, y->buf, x->shape[0]);
    take_back(lock);
    return done(&arrays);
}

/* ---- text encoders and pictures ---- */

/* activate(isa, kind, x, out); out may be x */
static PyObject *py_activate(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *y;
    const Kernels *k;
    int64_t kind;
    if (!has_arguments(n, 4) || !(k = chosen(a[0])) || !get_int(a[1], &kind)) return NULL;
    if (kind < 0 || kind >= ACTIVATIONS)
        return PyErr_Format(PyExc_ValueError, "no activation %lld", (long long)kind);
    if (!(x = take(&arrays, a[2], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[3], "out", 'f', 2, 1))) return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++)
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
    if (x->buf != y->buf && !apart(x, y, "x and out")) return refuse(&arrays);
    Rows r = {.k = k, .x = x->buf, .y = y->buf, .kind = kind, .width = x->shape[1]};
    run_rows(a[0], x->len, x->shape[0], activate_rows, &r);
    return done(&arrays);
}

/* add_scaled(isa, x, scale, residual) */
static PyObject *py_add_scaled(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *scale, *y;
    const Kernels *k;
    if (!has_arguments(n, 4) || !(k = chosen(a[0]))) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(scale = take(&arrays, a[2], "scale", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[3], "residual", 'f', 2, 1))) return refuse(&arrays);
    for (int axis = 0; axis < 2; axis++)
        if (!has_length(y, "residual", axis, x->shape[axis])) return refuse(&arrays);
    if (!has_length(scale, "scale", 0, x->shape[1])) return refuse(&arrays);
    if (!apart(x, y, "x and residual")) return refuse(&arrays);
    PyThreadState *lock = let_go(x->len);
    k->add_scaled(x->buf, scale->buf, y->buf, x->shape[0], x->shape[1]);
    take_back(lock);
    return done(&arrays);
}

/* A Python function that a kernel calls while it runs, with or without the GIL. */
typedef struct {
    PyObject *call;
    PyThreadState *lock; /* from let_go */
} Watcher;

#define RAISED (-2)

static int call_watcher(void *at) {
    Watcher *watcher = at;
    PyThreadState *lock = watcher->lock;
    take_back(lock);
    PyObject *result = PyObject_CallNoArgs(watcher->call);
    int failed = result ? 0 : RAISED;
    Py_XDECREF(result);
    watcher->lock = lock ? PyEval_SaveThread() : NULL;
    return failed;
}

static Watch watch_of(Watcher *watcher) {
    return (Watch){.after_part = watcher->call == Py_None ? NULL : call_watcher,
                   .argument = watcher};
}

/* group_norm(isa, x, groups, weight, bias, eps, silu, out, after_part or None) */
static PyObject *py_group_norm(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Py_buffer *x, *weight, *bias, *y;
    const Kernels *k;
    GroupNorm g;
    int failed;
    if (!has_arguments(n, 9) || !(k = chosen(a[0])) || !get_int(a[2], &g.groups)) return NULL;
    if (!get_float(a[5], &g.eps) || !get_int(a[6], &g.silu)) return NULL;
    if (!(x = take(&arrays, a[1], "x", 'f', 2, 0))) return refuse(&arrays);
    if (!(weight = take(&arrays, a[3], "weight", 'f', 1, 0))) return refuse(&arrays);
    if (!(bias = take(&arrays, a[4], "bias", 'f', 1, 0))) return refuse(&arrays);
    if (!(y = take(&arrays, a[7], "out", 'f', 2, 1))) return refuse(&arrays);
    g.rows = x->shape[0], g.width = x->shape[1];
    for (int axis = 0; axis < 2; axis++)
        if (!has_length(y, "out", axis, x->shape[axis])) return refuse(&arrays);
    if (!has_length(weight, "weight", 0, g.width) || !has_length(bias, "bias", 0, g.width))
        return refuse(&arrays);
    if (g.groups < 1 || g.width < 1 || g.width % g.groups) {
        PyErr_Format(PyExc_ValueError, "%lld columns do not divide into %lld groups",
                     (long long)g.width, (long long)g.groups);
        return refuse(&arrays);
    }
    if (x->buf != y->buf && !apart(x, y, "x and out")) return refuse(&arrays);
    g.x = x->buf, g.weight = weight->buf, g.bias = bias->buf, g.y = y->buf;
    Watcher watcher = {.call = a[8]};
    g.watch = watch_of(&watcher);
    watcher.lock = let_go(x->len);
    failed = k->group_norm(&g);
    take_back(watcher.lock);
    drop(&arrays);
    if (failed == RAISED) return NULL;
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int take_dense(Arrays *arrays, PyObject *const *a, DenseAttention *t) {
    const Py_buffer *q, *kv, *bias = NULL, *out;
    if (!(q = take(arrays, a[1], "q", 'f', 3, 0))) return 0;
    if (!(kv = take(arrays, a[2], "kv", 'f', 4, 0))) return 0;
    if (!(out = take(arrays, a[5], "out", 'f', 2, 1))) return 0;
    int64_t rows = q->shape[0], heads = q->shape[1], dim = q->shape[2], keys = kv->shape[2];
    if (!has_length(kv, "kv", 0, 2) || !has_length(kv, "kv", 1, heads)) return 0;
    if (!has_length(kv, "kv", 3, dim) || !has_length(out, "out", 0, rows)) return 0;
    if (!has_length(out, "out", 1, heads * dim)) return 0;
    if (heads < 1 || keys < 1 || dim < 1) {
        PyErr_SetString(PyExc_ValueError, "q or kv is empty");
        return 0;
    }
    if (!apart(q, out, "q and out") || !apart(kv, out, "kv and out")) return 0;
    *t = (DenseAttention){.q = q->buf, .kv = kv->buf, .out = out->buf, .rows = rows,
                          .keys = keys, .heads = heads, .dim = dim};
    if (a[3] != Py_None) {
        if (!(bias = take(arrays, a[3], "bias", 'f', 3, 0))) return 0;
        if (bias->shape[0] != 1 && !has_length(bias, "bias", 0, heads)) return 0;
        if (!has_length(bias, "bias", 1, rows) || !has_length(bias, "bias", 2, keys)) return 0;
        t->bias = bias->buf, t->bias_heads = bias->shape[0];
    }
    return get_float(a[4], &t->scale);
}

/* dense_attention(isa, q, kv, bias or None, scale, out, after_part or None) */
static PyObject *py_dense_attention(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    DenseAttention t;
    int failed;
    if (!has_arguments(n, 7) || !(k = chosen(a[0]))) return NULL;
    if (!take_dense(&arrays, a, &t)) return refuse(&arrays);
    Watcher watcher = {.call = a[6]};
    t.watch = watch_of(&watcher);
    int64_t bytes = t.rows * t.keys * t.heads * t.dim / 4;
    t.threads = threads_for(a[0], bytes);
    watcher.lock = let_go(bytes);
    failed = k->dense_attention(&t);
    take_back(watcher.lock);
    drop(&arrays);
    if (failed == RAISED) return NULL;
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- paged cache ---- */

/* Type of keys and values by the format of their array: float32, uint16 (bfloat16) or int8; -1 for
 * another one. */
static int64_t kind_of(const Py_buffer *kv) {
    return is_type(kv, 'f') ? KV_FLOATS : is_type(kv, 'H') ? KV_HALVES : is_type(kv, 'b') ? KV_INT8 : -1;
}

/* Elements of a row of the cache after its values: int8 codes have a scale of 2 bytes. */
static int64_t beside(int64_t kind) { return kind == KV_INT8 ? 2 : 0; }

/* A C-contiguous array with `ndim` axes of one of the types of keys and values. */
static const Py_buffer *take_kv(Arrays *arrays, PyObject *object, const char *name, int ndim,
                                int writable, int64_t *kind) {
    Py_buffer *b = &arrays->held[arrays->count];
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, b, flags) < 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s is no C-contiguous%s array", name,
                     writable ? " writable" : "");
        return NULL;
    }
    arrays->count++;
    *kind = kind_of(b);
    if (b->ndim == ndim && *kind >= 0) return b;
    PyErr_Format(PyExc_ValueError, "%s has %d axes of format %s, not %d of f, H or b", name, b->ndim,
                 b->format, ndim);
    return NULL;
}

static int cache_fits(const Py_buffer *kv, int64_t kind, const Py_buffer *q, int64_t dim) {
    if (!has_length(kv, "kv_layer", 1, 2)) return 0;
    if (!has_length(kv, "kv_layer", 4, dim + beside(kind))) return 0;
    if (kind != KV_FLOATS && dim > MOST_DIM) {
        PyErr_Format(PyExc_ValueError, "heads of %lld dims need keys in float32", (long long)dim);
        return 0;
    }
    if (kv->shape[2] > 0 && kv->shape[3] > 0 && q->shape[1] % kv->shape[2] == 0) return 1;
    PyErr_Format(PyExc_ValueError, "%zd query heads do not group over %zd KV heads", q->shape[1],
                 kv->shape[2]);
    return 0;
}

static int take_norm(Arrays *arrays, PyObject *object, const char *name, int64_t dim,
                     const float **weight) {
    *weight = NULL;
    if (object == Py_None) return 1;
    const Py_buffer *b = take(arrays, object, name, 'f', 1, 0);
    if (!b || !has_length(b, name, 0, dim)) return 0;
    *weight = b->buf;
    return 1;
}

static int take_rope_append(Arrays *arrays, PyObject *const *a, RopeAppend *r) {
    const Py_buffer *qkv, *positions, *slots, *table, *kv, *q;
    if (!(qkv = take(arrays, a[1], "qkv", 'f', 2, 0))) return 0;
    if (!(positions = take(arrays, a[2], "positions", 'i', 1, 0))) return 0;
    if (!(slots = take(arrays, a[3], "slots", 'q', 1, 0))) return 0;
    if (!(table = take(arrays, a[4], "cos_sin", 'f', 2, 0))) return 0;
    if (!(kv = take_kv(arrays, a[8], "kv_layer", 5, 1, &r->kind))) return 0;
    if (!(q = take(arrays, a[9], "q_out", 'f', 3, 1))) return 0;
    int64_t rows = qkv->shape[0], dim = q->shape[2];
    if (!cache_fits(kv, r->kind, q, dim)) return 0;
    int64_t width = (q->shape[1] + 2 * kv->shape[2]) * dim;
    if (!get_int(a[10], &r->rounding)) return 0;
    if (r->rounding < 0) r->rounding = r->kind;
    if (r->rounding < r->kind || r->rounding > KV_INT8 || (r->rounding && dim > MOST_DIM)) {
        PyErr_SetString(PyExc_ValueError, "keys cannot be rounded to this type");
        return 0;
    }
    if (!has_length(qkv, "qkv", 1, width) || !has_length(q, "q_out", 0, rows)) return 0;
    if (!has_length(positions, "positions", 0, rows) || !has_length(slots, "slots", 0, rows))
        return 0;
    if (!has_length(table, "cos_sin", 1, dim / 2 * 2)) return 0;
    if (!has_length(table, "cos_sin", 1, dim)) return 0;
    if (!all_below(positions, "positions", table->shape[0])) return 0;
    if (!all_below(slots, "slots", kv->shape[0] * kv->shape[3])) return 0;
    if (!take_norm(arrays, a[5], "q_norm", dim, &r->q_norm)) return 0;
    if (!take_norm(arrays, a[6], "k_norm", dim, &r->k_norm)) return 0;
    r->qkv = qkv->buf, r->positions = positions->buf, r->slots = slots->buf;
    r->cos_sin = table->buf, r->kv = kv->buf, r->q_out = q->buf;
    r->rows = rows, r->heads = q->shape[1], r->kv_heads = kv->shape[2];
    r->block_size = kv->shape[3], r->dim = dim, r->row_bytes = kv->shape[4] * kv->itemsize;
    return get_float(a[7], &r->eps);
}

/* rope_append(isa, qkv, positions, slots, cos_sin, q_norm, k_norm, eps, kv_layer, q_out, rounding):
 * rounding is the type to which keys and values are rounded, -1 for the array's own */
static PyObject *py_rope_append(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    RopeAppend r;
    if (!has_arguments(n, 11) || !(k = chosen(a[0]))) return NULL;
    if (!take_rope_append(&arrays, a, &r)) return refuse(&arrays);
    int64_t width = (r.heads + 2 * r.kv_heads) * r.dim;
    Rope rope = {k, &r};
    run_rows(a[0], r.rows * width * (int64_t)sizeof(float), r.rows, rope_append_rows, &rope);
    return done(&arrays);
}

/* Check that row offsets ascend from 0 to all rows, and that positions and blocks exist. */
static int rows_readable(const Attention *a, int64_t rows, int64_t blocks) {
    int64_t most = a->table_width * a->block_size, next = 0;
    for (int64_t s = 0; s < a->sequences; s++) {
        int64_t low = INT64_MAX, high = -1;
        if (a->offsets[s] != next || a->offsets[s + 1] < next || a->offsets[s + 1] > rows) break;
        for (; next < a->offsets[s + 1]; next++) {
            int64_t p = a->positions[next];
            if (p < 0 || p >= most) {
                PyErr_Format(PyExc_ValueError, "position %lld is outside the block table",
                             (long long)p);
                return 0;
            }
            int64_t from = a->window && p >= a->window ? p - a->window + 1 : 0;
            low = from < low ? from : low;
            high = p > high ? p : high;
        }
        for (int64_t b = low / a->block_size; high >= 0 && b <= high / a->block_size; b++) {
            int64_t id = a->tables[s * a->table_width + b];
            if (id >= 0 && id < blocks) continue;
            PyErr_Format(PyExc_ValueError, "block %lld is outside 0..%lld", (long long)id,
                         (long long)blocks - 1);
            return 0;
        }
    }
    if (next == rows && a->offsets[a->sequences] == rows) return 1;
    PyErr_SetString(PyExc_ValueError, "row_offsets do not ascend from 0 to the number of rows");
    return 0;
}

static int take_attention(Arrays *arrays, PyObject *const *a, Attention *t) {
    const Py_buffer *q, *kv, *tables, *offsets, *positions, *out;
    if (!(q = take(arrays, a[1], "q", 'f', 3, 0))) return 0;
    int64_t kind;
    if (!(kv = take_kv(arrays, a[2], "kv_layer", 5, 0, &kind))) return 0;
    if (!(tables = take(arrays, a[3], "block_tables", 'i', 2, 0))) return 0;
    if (!(offsets = take(arrays, a[4], "row_offsets", 'i', 1, 0))) return 0;
    if (!(positions = take(arrays, a[5], "positions", 'i', 1, 0))) return 0;
    if (!(out = take(arrays, a[8], "out", 'f', 2, 1))) return 0;
    int64_t rows = q->shape[0], dim = q->shape[2];
    if (!cache_fits(kv, kind, q, dim)) return 0;
    if (!has_length(offsets, "row_offsets", 0, tables->shape[0] + 1)) return 0;
    if (!has_length(positions, "positions", 0, rows) || !has_length(out, "out", 0, rows)) return 0;
    if (!has_length(out, "out", 1, q->shape[1] * dim)) return 0;
    if (!apart(q, out, "q and out") || !apart(kv, out, "kv_layer and out")) return 0;
    *t = (Attention){.q = q->buf, .kv = kv->buf, .tables = tables->buf, .offsets = offsets->buf,
                     .positions = positions->buf, .out = out->buf,
                     .sequences = tables->shape[0], .table_width = tables->shape[1],
                     .heads = q->shape[1], .kv_heads = kv->shape[2],
                     .block_size = kv->shape[3], .dim = dim, .kind = kind,
                     .row_bytes = kv->shape[4] * kv->itemsize};
    if (!get_float(a[6], &t->scale) || !get_int(a[7], &t->window)) return 0;
    if (!get_int(a[9], &t->halves)) return 0;
    if (t->window < 0) {
        PyErr_SetString(PyExc_ValueError, "window is negative");
        return 0;
    }
    return rows_readable(t, rows, kv->shape[0]);
}

    /* Bytes read from the cache: all rows of a sequence read the keys before them. */
static int64_t bytes_read(const Attention *t) {
    int64_t positions = 0;
    for (int64_t row = 0; row < t->offsets[t->sequences]; row++) {
        int64_t seen = t->positions[row] + 1;
        positions += t->window && seen > t->window ? t->window : seen;
    }
    return positions * t->kv_heads * t->row_bytes * 2;
}

/* attention(isa, q, kv_layer, block_tables, row_offsets, positions, scale, window, out,
 * halves) */
static PyObject *py_attention(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    Attention t;
    int failed;
    if (!has_arguments(n, 10) || !(k = chosen(a[0]))) return NULL;
    if (!take_attention(&arrays, a, &t)) return refuse(&arrays);
    int64_t bytes = bytes_read(&t);
    t.threads = threads_for(a[0], bytes);
    PyThreadState *lock = let_go(bytes);
    failed = k->attention(&t);
    take_back(lock);
    drop(&arrays);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- moving blocks ---- */

static int get_layers(PyObject *const *a, const Py_buffer *pool, int64_t *start, int64_t *layers) {
    if (!get_int(a[0], start) || !get_int(a[1], layers)) return 0;
    if (*start >= 0 && *layers >= 0 && *layers <= pool->shape[0] - *start) return 1;
    PyErr_Format(PyExc_ValueError, "layers %lld+%lld are outside the pool's %zd",
                 (long long)*start, (long long)*layers, pool->shape[0]);
    return 0;
}

static const Py_buffer *take_ids(Arrays *arrays, PyObject *object, const char *name,
                                 const Py_buffer *pool) {
    const Py_buffer *ids = take(arrays, object, name, 'i', 1, 0);
    return ids && all_below(ids, name, pool->shape[1]) ? ids : NULL;
}

static int64_t block_bytes(const Py_buffer *pool) {
    return pool->itemsize * pool->shape[2] * pool->shape[3] * pool->shape[4] * pool->shape[5];
}

static End end_of(const Py_buffer *pool, const Py_buffer *ids, int64_t start) {
    return (End){.data = (char *)pool->buf + start * pool->shape[1] * block_bytes(pool),
                 .ids = ids->buf, .blocks = pool->shape[1]};
}

/* (pool, layer_start, layer_count, block_ids): first arguments of all but copies; the pool's end */
static int take_pool(Arrays *arrays, PyObject *const *a, int writable, End *end, Move *m) {
    const Py_buffer *pool, *ids;
    int64_t start, kind;
    if (!(pool = take_kv(arrays, a[0], "pool", 6, writable, &kind))) return 0;
    if (!get_layers(a + 1, pool, &start, &m->layers)) return 0;
    if (!(ids = take_ids(arrays, a[3], "block_ids", pool))) return 0;
    *end = end_of(pool, ids, start);
    m->count = ids->shape[0], m->bytes = (size_t)block_bytes(pool);
    return 1;
}

static int take_move(Arrays *arrays, PyObject *const *a, int gather, Move *m) {
    if (!take_pool(arrays, a, !gather, gather ? &m->from : &m->to, m)) return 0;
    const Py_buffer *pool = &arrays->held[0];
    const Py_buffer *payload = take(arrays, a[4], "payload", 'B', 1, gather);
    if (!payload) return 0;
    if (!has_length(payload, "payload", 0, m->layers * m->count * (int64_t)m->bytes)) return 0;
    if (!apart(pool, payload, "pool and payload")) return 0;
    *(gather ? &m->to : &m->from) = (End){.data = payload->buf};
    return 1;
}

static int take_copy(Arrays *arrays, PyObject *const *a, Move *m) {
    const Py_buffer *source, *target, *from, *to;
    int64_t start, kind, other;
    if (!(source = take_kv(arrays, a[0], "source", 6, 0, &kind))) return 0;
    if (!(target = take_kv(arrays, a[1], "target", 6, 1, &other))) return 0;
    if (kind != other) {
        PyErr_SetString(PyExc_ValueError, "source and target have different types");
        return 0;
    }
    for (int axis = 0; axis < 6; axis++)
        if (axis != 1 && !has_length(target, "target", axis, source->shape[axis])) return 0;
    if (!get_layers(a + 2, source, &start, &m->layers)) return 0;
    if (!(from = take_ids(arrays, a[4], "source_ids", source))) return 0;
    if (!(to = take_ids(arrays, a[5], "target_ids", target))) return 0;
    if (!has_length(to, "target_ids", 0, from->shape[0])) return 0;
    if (!apart(source, target, "source and target")) return 0;
    m->from = end_of(source, from, start), m->to = end_of(target, to, start);
    m->count = from->shape[0], m->bytes = (size_t)block_bytes(source);
    return 1;
}

/* Stripes are read as little-endian words; the kernels do not handle shorter or odd blocks. */
static int can_sum(const Move *m) {
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && m->bytes % 64 == 0 &&
           m->layers * m->count * (int64_t)m->bytes >= SUM_MIN;
}

/* Release the arrays; return the XXH3-64 of the moved blocks, or None if it was not computed. */
static PyObject *moved(Arrays *arrays, const Kernels *k, const Move *m) {
    uint64_t sum;
    if (!can_sum(m)) return done(arrays);
    Py_BEGIN_ALLOW_THREADS
    sum = k->move(m);
    Py_END_ALLOW_THREADS
    drop(arrays);
    return PyLong_FromUnsignedLongLong(sum);
}

static void move_plainly(const Move *m, int gather) {
    End pool = gather ? m->from : m->to;
    char *payload = gather ? m->to.data : m->from.data;
    for (int64_t i = 0; i < m->layers * m->count; i++, payload += m->bytes) {
        int64_t block = i / m->count * pool.blocks + pool.ids[i % m->count];
        char *at = pool.data + block * (int64_t)m->bytes;
        memcpy(gather ? payload : at, gather ? at : payload, m->bytes);
    }
}

/* gather(isa, pool, layer_start, layer_count, block_ids, payload) and scatter(the same) ->
 * XXH3-64 of the payload, or None if it was copied without a checksum */
static PyObject *move_blocks(PyObject *const *a, Py_ssize_t n, int gather) {
    Arrays arrays = {.count = 0};
    const Kernels *k;
    Move m = {.count = 0};
    if (!has_arguments(n, 6) || !(k = chosen(a[0]))) return NULL;
    if (!take_move(&arrays, a + 1, gather, &m)) return refuse(&arrays);
    if (!can_sum(&m)) {
        Py_BEGIN_ALLOW_THREADS
        move_plainly(&m, gather);
        Py_END_ALLOW_THREADS
    }
    return moved(&arrays, k, &m);
}

static PyObject *py_gather(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return move_blocks(a, n, 1);
}

static PyObject *py_scatter(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return move_blocks(a, n, 0);
}

/* copy_blocks(isa, source, target, layer_start, layer_count, source_ids, target_ids) ->
 * XXH3-64 of the blocks, or None if it cannot be computed and nothing was copied */
static PyObject *py_copy_blocks(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    Move m = {.count = 0};
    if (!has_arguments(n, 7) || !(k = chosen(a[0]))) return NULL;
    if (!take_copy(&arrays, a + 1, &m)) return refuse(&arrays);
    return moved(&arrays, k, &m);
}

static KvEnd kv_end(const Py_buffer *pool, const Py_buffer *ids, int64_t start, int64_t kind) {
    End end = end_of(pool, ids, start);
    return (KvEnd){.data = end.data, .ids = end.ids, .blocks = end.blocks, .count = ids->shape[0],
                   .block_size = pool->shape[4], .kind = kind,
                   .row_bytes = pool->shape[5] * pool->itemsize};
}

static int take_conversion(Arrays *arrays, PyObject *const *a, Conversion *c) {
    const Py_buffer *source, *target, *from, *to;
    int64_t kind, other, start, first, layers;
    if (!(source = take_kv(arrays, a[0], "source", 6, 0, &kind))) return 0;
    if (!(target = take_kv(arrays, a[1], "target", 6, 1, &other))) return 0;
    if (!has_length(source, "source", 2, 2) || !has_length(target, "target", 2, 2)) return 0;
    if (!has_length(target, "target", 3, source->shape[3])) return 0;
    c->dim = source->shape[5] - beside(kind), c->kv_heads = source->shape[3];
    if (!has_length(target, "target", 5, c->dim + beside(other))) return 0;
    if (!get_layers(a + 2, source, &start, &layers)) return 0;
    if (!get_layers(a + 4, target, &first, &c->layers)) return 0;
    PyObject *const *rest = a + 6;
    if (!(from = take_ids(arrays, rest[0], "source_ids", source))) return 0;
    if (!(to = take_ids(arrays, rest[1], "target_ids", target))) return 0;
    if (layers != c->layers || !get_int(rest[2], &c->first) || c->first < 0 || c->dim < 1 ||
        c->dim > MOST_DIM || source->shape[4] < 1 || target->shape[4] < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "layers, tokens or rows cannot be converted");
        return 0;
    }
    if (!apart(source, target, "source and target")) return 0;
    c->from = kv_end(source, from, start, kind), c->to = kv_end(target, to, first, other);
    return 1;
}

/* convert_blocks(isa, source, target, source_layer, layers, target_layer, layers, source_ids,
 * target_ids, first): token first + i of the source's blocks becomes token i of the target's */
static PyObject *py_convert_blocks(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    Conversion c;
    if (!has_arguments(n, 10) || !(k = chosen(a[0]))) return NULL;
    if (!take_conversion(&arrays, a + 1, &c)) return refuse(&arrays);
    Py_BEGIN_ALLOW_THREADS
    k->convert(&c);
    Py_END_ALLOW_THREADS
    return done(&arrays);
}

/* sum_blocks(isa, pool, layer_start, layer_count, block_ids) -> XXH3-64 of the blocks, or None */
static PyObject *py_sum_blocks(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    Move m = {.count = 0};
    if (!has_arguments(n, 5) || !(k = chosen(a[0]))) return NULL;
    if (!take_pool(&arrays, a + 1, 0, &m.from, &m)) return refuse(&arrays);
    return moved(&arrays, k, &m);
}

/* checksum(isa, payload) -> XXH3-64, or None for a payload too short for the kernel */
static PyObject *py_checksum(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    const Py_buffer *payload;
    uint64_t sum;
    if (!has_arguments(n, 2) || !(k = chosen(a[0]))) return NULL;
    if (!(payload = take(&arrays, a[1], "payload", 'B', 1, 0))) return refuse(&arrays);
    if (__BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || payload->len < SUM_MIN) return done(&arrays);
    Py_BEGIN_ALLOW_THREADS
    sum = k->checksum(payload->buf, payload->len);
    Py_END_ALLOW_THREADS
    drop(&arrays);
    return PyLong_FromUnsignedLongLong(sum);
}

/* ---- sampling ---- */

/* draw(isa, weights, top_p, min_p, uniform) -> index, or -1 if rounding could decide */
static PyObject *py_draw(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    float min_p;
    if (!has_arguments(n, 5) || !(k = chosen(a[0])) || !get_float(a[3], &min_p)) return NULL;
    double top_p = PyFloat_AsDouble(a[2]), uniform = PyFloat_AsDouble(a[4]);
    if (PyErr_Occurred()) return NULL;
    const Py_buffer *w = take(&arrays, a[1], "weights", 'f', 1, 0);
    if (!w) return refuse(&arrays);
    int64_t count = w->shape[0], index = -1;
    size_t blocks = (size_t)count / SUM_BLOCK + 1;
    char *memory = malloc(blocks * 16 + (size_t)(count + DRAW_SLACK) * sizeof(float));
    if (!memory || count == 0) {
        free(memory);
        drop(&arrays);
        if (count == 0) return PyErr_Format(PyExc_ValueError, "there are no weights");
        return PyErr_NoMemory();
    }
    PyThreadState *lock = let_go(16 * count);
    index = k->draw(w->buf, count, top_p, min_p, uniform, (float *)(memory + blocks * 16),
                    (double *)memory, (int64_t *)(memory + blocks * 8));
    take_back(lock);
    free(memory);
    drop(&arrays);
    return PyLong_FromLongLong(index);
}

/* payload_digest(isa, payload), or None on a big-endian machine */
static PyObject *py_payload_digest(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    Arrays arrays = {.count = 0};
    const Kernels *k;
    const Py_buffer *payload;
    uint64_t digest;
    if (!has_arguments(n, 2) || !(k = chosen(a[0]))) return NULL;
    if (!(payload = take(&arrays, a[1], "payload", 'B', 1, 0))) return refuse(&arrays);
    if (__BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__) return done(&arrays);
    Py_BEGIN_ALLOW_THREADS
    digest = k->payload_digest(payload->buf, payload->len);
    Py_END_ALLOW_THREADS
    drop(&arrays);
    return PyLong_FromUnsignedLongLong(digest);
}

/* ---- module ---- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, NULL},
    {"quantized_kinds", py_quantized_kinds, METH_NOARGS, NULL},
    FAST(pack_quantized), FAST(quantized_linear), FAST(embed_quantized),
    FAST(start_threads), FAST(note_packed), FAST(pack), FAST(linear), FAST(gated_mlp), FAST(embed), FAST(rms_norm), FAST(silu_mul), FAST(rope_append),
    FAST(layer_norm), FAST(gelu), FAST(convolve), FAST(snake), FAST(depthwise), FAST(soft_clip),
    FAST(activate), FAST(add_scaled), FAST(group_norm), FAST(dense_attention),
    FAST(attention), FAST(gather), FAST(scatter), FAST(copy_blocks), FAST(convert_blocks),
    FAST(sum_blocks),
    FAST(checksum), FAST(payload_digest), FAST(draw), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu",
                                    "Compiled kernels; see cpu.py.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) {
    find_usable();
    return PyModule_Create(&module);
}
