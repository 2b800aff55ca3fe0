/* Checks the arrays and numbers of one call from Python, one by one.
 *
 * A failed check sets ValueError and returns 0 or NULL. The caller then returns
 * refuse(arrays), which releases all arrays taken so far.
 */
#ifndef BATON_ARRAYS_H
#define BATON_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST_ARRAYS 9

typedef struct {
    Py_buffer held[MOST_ARRAYS];
    int count;
} Arrays;

static void drop(Arrays *arrays) {
    for (int i = 0; i < arrays->count; i++) PyBuffer_Release(&arrays->held[i]);
}

static PyObject *refuse(Arrays *arrays) {
    drop(arrays);
    return NULL;
}

static PyObject *done(Arrays *arrays) {
    drop(arrays);
    Py_RETURN_NONE;
}

static int is_type(const Py_buffer *b, char type) {
    const char *format = b->format ? b->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    if (type == 'q') return (*format == 'q' || *format == 'l') && b->itemsize == 8;
    if (type == 'i') return (*format == 'i' || *format == 'l') && b->itemsize == 4;
    return *format == type && format[1] == 0;
}

/* A C-contiguous array of `type` (f i q H B) with `ndim` axes, or NULL with ValueError set. */
static const Py_buffer *take(Arrays *arrays, PyObject *object, const char *name, char type,
                             int ndim, int writable) {
    Py_buffer *b = &arrays->held[arrays->count];
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, b, flags) < 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s is no C-contiguous%s array", name,
                     writable ? " writable" : "");
        return NULL;
    }
    arrays->count++;
    if (b->ndim != ndim || !is_type(b, type)) {
        PyErr_Format(PyExc_ValueError, "%s has %d axes of format %s, not %d of %c", name, b->ndim,
                     b->format, ndim, type);
        return NULL;
    }
    return b;
}

static int has_length(const Py_buffer *b, const char *name, int axis, int64_t expected) {
    if (b->shape[axis] == expected) return 1;
    PyErr_Format(PyExc_ValueError, "axis %d of %s is %zd, not %lld", axis, name, b->shape[axis],
                 (long long)expected);
    return 0;
}

static int all_below(const Py_buffer *b, const char *name, int64_t limit) {
    int64_t n = b->len / b->itemsize, value = 0;
    for (int64_t i = 0; i < n; i++) {
        value = b->itemsize == 8 ? ((const int64_t *)b->buf)[i] : ((const int32_t *)b->buf)[i];
        if (value >= 0 && value < limit) continue;
        PyErr_Format(PyExc_ValueError, "%s: %lld is outside 0..%lld", name, (long long)value,
                     (long long)limit - 1);
        return 0;
    }
    return 1;
}

static int apart(const Py_buffer *a, const Py_buffer *b, const char *names) {
    const char *p = a->buf, *q = b->buf;
    if (p + a->len <= q || q + b->len <= p) return 1;
    PyErr_Format(PyExc_ValueError, "%s overlap", names);
    return 0;
}

static int has_arguments(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
    return 0;
}

static int get_float(PyObject *object, float *value) {
    *value = (float)PyFloat_AsDouble(object);
    return !(*value == -1.0f && PyErr_Occurred());
}

static int get_int(PyObject *object, int64_t *value) {
    *value = PyLong_AsLongLong(object);
    return !(*value == -1 && PyErr_Occurred());
}

#endif
