/* elsa_format._native: the kernels for Python. Checks every argument, as _pure.py does (which
 * describes the functions), so that nothing is read or written out of bounds whatever is passed. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "delivery.h"
#include "kernels.h"

typedef enum { WORDS, INDICES, UINT8, UINT64, INT64, ANY_WORDS } kind;

static const char *const kind_names[] = {"uint16/uint32/uint64", "int32/int64", "uint8", "uint64",
                                         "int64", "uint8/uint16/uint32/uint64"};

/* The buffers of one call, released together. */
typedef struct {
    Py_buffer views[6];
    int count;
} arguments;

static void release(arguments *held)
{
    while (held->count > 0)
        PyBuffer_Release(&held->views[--held->count]);
}

static bool has_kind(const Py_buffer *view, kind wanted)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=') /* native byte order; the sizes are in itemsize */
        format++;
    if (format[0] == '\0' || format[1] != '\0')
        return false;
    const bool is_unsigned = strchr("BHILQ", *format) != NULL;
    const bool is_signed = strchr("bhilq", *format) != NULL;
    const Py_ssize_t size = view->itemsize;
    switch (wanted) {
    case WORDS: return is_unsigned && (size == 2 || size == 4 || size == 8);
    case INDICES: return is_signed && (size == 4 || size == 8);
    case UINT8: return is_unsigned && size == 1;
    case UINT64: return is_unsigned && size == 8;
    case INT64: return is_signed && size == 8;
    case ANY_WORDS: return is_unsigned;
    }
    return false;
}

static size_t length(const Py_buffer *view)
{
    return (size_t)(view->len / view->itemsize);
}

/* Take an array; like = NULL, or one whose element type it must have. NULL with an error set. */
static Py_buffer *take(arguments *held, PyObject *object, const char *name, kind wanted,
                       const Py_buffer *like, int ndim, bool writable)
{
    Py_buffer *view = &held->views[held->count];
    if (PyObject_GetBuffer(object, view, PyBUF_FULL_RO) < 0)
        return NULL;
    held->count++;
    if (!has_kind(view, wanted) || (like != NULL && view->itemsize != like->itemsize))
        PyErr_Format(PyExc_TypeError, "%s: expected an array of %s%s", name, kind_names[wanted],
                     like == NULL ? "" : " of the same size as the other words or indices");
    else if (view->ndim != ndim || !PyBuffer_IsContiguous(view, 'C'))
        PyErr_Format(PyExc_ValueError, "%s: expected a contiguous %d-dimensional array", name, ndim);
    else if (writable && view->readonly)
        PyErr_Format(PyExc_ValueError, "%s: is read-only", name);
    else
        return view;
    return NULL;
}

static bool check_length(const Py_buffer *view, const char *name, size_t expected)
{
    if (length(view) == expected)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zu elements, expected %zu", name, length(view), expected);
    return false;
}

static bool check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (low <= value && value <= high)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %lld is not in %lld..%lld", name, (long long)value,
                 (long long)low, (long long)high);
    return false;
}

static bool check_level(int64_t bits, int64_t level)
{
    return check_range("bits", bits, 1, 8) && check_range("level", level, 1, (1 << bits) - 1);
}

static bool check_inf(const Py_buffer *words, int64_t inf)
{
    return check_range("inf", inf, 1, (int64_t)(UINT64_MAX >> (65 - 8 * words->itemsize)));
}

static bool check_disjoint(const Py_buffer *written, const Py_buffer *other)
{
    const uintptr_t a = (uintptr_t)written->buf, b = (uintptr_t)other->buf;
    if (written->len == 0 || other->len == 0 || a + (size_t)written->len <= b ||
        b + (size_t)other->len <= a)
        return true;
    PyErr_SetString(PyExc_ValueError, "an output overlaps another argument");
    return false;
}

static bool check_same_or_disjoint(const Py_buffer *src, const Py_buffer *dst)
{
    return src->buf == dst->buf || check_disjoint(dst, src);
}

/* Converter for PyArg_Parse: any integer; what doesn't fit is out of every range we accept. */
static int integer(PyObject *object, void *result)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return 0;
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow)
        PyErr_SetString(PyExc_ValueError, "integer out of range");
    if (overflow || (value == -1 && PyErr_Occurred()))
        return 0;
    *(int64_t *)result = value;
    return 1;
}

static const elsa_kernels *kernels(const Py_buffer *words)
{
    return elsa_kernels_for((size_t)words->itemsize);
}

static PyObject *py_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "dst", "bits", "level", NULL};
    PyObject *src_object, *dst_object, *result = NULL;
    int64_t bits, level;
    arguments held = {.count = 0};
    Py_buffer *src, *dst;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO&O&:mask", names, &src_object, &dst_object,
                                    integer, &bits, integer, &level) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (dst = take(&held, dst_object, "dst", WORDS, src, 1, true)) != NULL &&
        check_length(dst, "dst", length(src)) && check_level(bits, level) &&
        check_same_or_disjoint(src, dst)) {
        size_t kept;
        Py_BEGIN_ALLOW_THREADS
        kept = kernels(src)->mask(src->buf, dst->buf, length(src), (unsigned)bits, (unsigned)level);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(kept);
    }
    release(&held);
    return result;
}

static PyObject *py_count(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "bits", "out", NULL};
    PyObject *src_object, *out_object, *result = NULL;
    int64_t bits;
    arguments held = {.count = 0};
    Py_buffer *src, *out;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&O:count", names, &src_object, integer, &bits,
                                    &out_object) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        check_range("bits", bits, 1, 8) &&
        (out = take(&held, out_object, "out", INT64, NULL, 1, true)) != NULL &&
        check_length(out, "out", (size_t)1 << bits) && check_disjoint(out, src)) {
        Py_BEGIN_ALLOW_THREADS
        kernels(src)->count(src->buf, length(src), (unsigned)bits, out->buf);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(&held);
    return result;
}

static PyObject *py_compact(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "bits", "level", "bitmask", "values", NULL};
    PyObject *src_object, *bitmask_object, *values_object, *result = NULL;
    int64_t bits, level;
    arguments held = {.count = 0};
    Py_buffer *src, *bitmask, *values;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&O&OO:compact", names, &src_object, integer,
                                    &bits, integer, &level, &bitmask_object, &values_object) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (bitmask = take(&held, bitmask_object, "bitmask", UINT8, NULL, 1, true)) != NULL &&
        check_length(bitmask, "bitmask", (length(src) + 7) / 8) &&
        (values = take(&held, values_object, "values", WORDS, src, 1, true)) != NULL &&
        check_level(bits, level) && check_disjoint(bitmask, src) &&
        check_disjoint(bitmask, values) && check_disjoint(values, src)) {
        size_t used;
        Py_BEGIN_ALLOW_THREADS
        used = kernels(src)->compact(src->buf, length(src), (unsigned)bits, (unsigned)level,
                                     bitmask->buf, values->buf, length(values));
        Py_END_ALLOW_THREADS
        if (used == ELSA_FAILED)
            PyErr_Format(PyExc_ValueError, "values: room for %zu, more are kept", length(values));
        else
            result = PyLong_FromSize_t(used);
    }
    release(&held);
    return result;
}

/* Whether `stop` elements fit a matrix, of which rows * cols may be too large to compute. */
static bool in_matrix(uint64_t stop, uint64_t rows, uint64_t cols)
{
    return stop == 0 || (cols > 0 && (stop - 1) / cols < rows);
}

static PyObject *py_csr(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src",    "bits",    "level",  "start", "cols",
                            "kept", "indptr", "indices", "values", NULL};
    PyObject *src_object, *indptr_object, *indices_object, *values_object, *result = NULL;
    int64_t bits, level, start, cols, kept;
    arguments held = {.count = 0};
    Py_buffer *src, *indptr, *indices, *values;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&O&O&O&O&OOO:csr", names, &src_object, integer,
                                    &bits, integer, &level, integer, &start, integer, &cols,
                                    integer, &kept, &indptr_object, &indices_object,
                                    &values_object) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (indptr = take(&held, indptr_object, "indptr", INDICES, NULL, 1, true)) != NULL &&
        (indices = take(&held, indices_object, "indices", INDICES, indptr, 1, true)) != NULL &&
        (values = take(&held, values_object, "values", WORDS, src, 1, true)) != NULL &&
        check_level(bits, level)) {
        const int64_t largest = indptr->itemsize == 4 ? INT32_MAX : INT64_MAX;
        const size_t n = length(src);
        if (!check_range("cols", cols, 0, largest) || !check_range("start", start, 0, INT64_MAX) ||
            !check_range("kept", kept, 0, largest))
            ;
        else if (length(indptr) == 0 ||
                 !in_matrix((uint64_t)start + n, length(indptr) - 1, (uint64_t)cols))
            PyErr_SetString(PyExc_ValueError, "src: not all of it is in the matrix");
        else if (check_disjoint(indptr, indices) && check_disjoint(indptr, values) &&
                 check_disjoint(indptr, src) && check_disjoint(indices, values) &&
                 check_disjoint(indices, src) && check_disjoint(values, src)) {
            size_t room = length(indices) < length(values) ? length(indices) : length(values);
            if ((uint64_t)(largest - kept) < room)
                room = (size_t)(largest - kept);
            const elsa_csr_block block = {
                .row = n == 0 ? 0 : (size_t)(start / cols),
                .col = n == 0 ? 0 : (size_t)(start % cols),
                .cols = (size_t)cols,
                .kept = kept,
                .indptr = indptr->buf,
                .indices = indices->buf,
                .index_size = (size_t)indptr->itemsize,
            };
            size_t used;
            Py_BEGIN_ALLOW_THREADS
            used = kernels(src)->csr(src->buf, n, (unsigned)bits, (unsigned)level, &block,
                                     values->buf, room);
            Py_END_ALLOW_THREADS
            if (used == ELSA_FAILED)
                PyErr_Format(PyExc_ValueError, "indices, values: room for %zu, more are kept", room);
            else
                result = PyLong_FromSize_t(used);
        }
    }
    release(&held);
    return result;
}

static PyObject *py_expand(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"bitmask", "values", "dst", NULL};
    PyObject *bitmask_object, *values_object, *dst_object, *result = NULL;
    arguments held = {.count = 0};
    Py_buffer *bitmask, *values, *dst;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO:expand", names, &bitmask_object,
                                    &values_object, &dst_object) &&
        (dst = take(&held, dst_object, "dst", WORDS, NULL, 1, true)) != NULL &&
        (bitmask = take(&held, bitmask_object, "bitmask", UINT8, NULL, 1, false)) != NULL &&
        check_length(bitmask, "bitmask", (length(dst) + 7) / 8) &&
        (values = take(&held, values_object, "values", WORDS, dst, 1, false)) != NULL &&
        check_disjoint(dst, bitmask) && check_disjoint(dst, values)) {
        const size_t n = length(dst);
        if (n % 8 != 0 && ((const uint8_t *)bitmask->buf)[n / 8] >> (n % 8) != 0)
            PyErr_SetString(PyExc_ValueError, "bitmask: a bit past the last element is set");
        else {
            size_t used;
            Py_BEGIN_ALLOW_THREADS
            used = kernels(dst)->expand(bitmask->buf, values->buf, length(values), dst->buf, n);
            Py_END_ALLOW_THREADS
            if (used == ELSA_FAILED)
                PyErr_Format(PyExc_ValueError, "values: %zu are too few for the bitmask",
                             length(values));
            else
                result = PyLong_FromSize_t(used);
        }
    }
    release(&held);
    return result;
}

static PyObject *py_expand_csr(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"indptr", "indices", "values", "cols", "dst", NULL};
    PyObject *indptr_object, *indices_object, *values_object, *dst_object, *result = NULL;
    int64_t cols;
    arguments held = {.count = 0};
    Py_buffer *indptr, *indices, *values, *dst;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOOO&O:expand_csr", names, &indptr_object,
                                    &indices_object, &values_object, integer, &cols,
                                    &dst_object) &&
        (dst = take(&held, dst_object, "dst", WORDS, NULL, 1, true)) != NULL &&
        (indptr = take(&held, indptr_object, "indptr", INDICES, NULL, 1, false)) != NULL &&
        (indices = take(&held, indices_object, "indices", INDICES, indptr, 1, false)) != NULL &&
        (values = take(&held, values_object, "values", WORDS, dst, 1, false)) != NULL &&
        check_length(values, "values", length(indices)) &&
        check_range("cols", cols, 0, INT64_MAX) && check_disjoint(dst, indptr) &&
        check_disjoint(dst, indices) && check_disjoint(dst, values)) {
        const size_t n = length(dst), lengths = length(indptr);
        /* rows * cols == n, without a product that may be too large. */
        if (lengths == 0 || !in_matrix(n, lengths - 1, (uint64_t)cols) ||
            (lengths > 1 && (uint64_t)cols > n / (lengths - 1)))
            PyErr_Format(PyExc_ValueError, "dst: %zu words, not %zd rows x %lld columns", n,
                         (Py_ssize_t)lengths - 1, (long long)cols);
        else {
            elsa_csr_error error;
            Py_BEGIN_ALLOW_THREADS
            error = kernels(dst)->expand_csr(indptr->buf, indices->buf, (size_t)indptr->itemsize,
                                             values->buf, lengths - 1, (size_t)cols,
                                             length(indices), dst->buf);
            Py_END_ALLOW_THREADS
            switch (error) {
            case ELSA_CSR_OK: result = Py_NewRef(Py_None); break;
            case ELSA_CSR_INDPTR:
                PyErr_Format(PyExc_ValueError, "indptr: does not rise from 0 to %zu",
                             length(indices));
                break;
            case ELSA_CSR_COLUMN:
                PyErr_Format(PyExc_ValueError, "indices: a column is not in 0..%lld",
                             (long long)cols - 1);
                break;
            case ELSA_CSR_ORDER:
                PyErr_SetString(PyExc_ValueError, "indices: columns do not rise within a row");
                break;
            }
        }
    }
    release(&held);
    return result;
}

static PyObject *py_embed(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "counters", "dst", "bits", "inf", "levels", "nearest", NULL};
    PyObject *src_object, *counters_object, *dst_object, *result = NULL;
    int64_t bits, inf, levels;
    int nearest;
    arguments held = {.count = 0};
    Py_buffer *src, *counters, *dst;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOOO&O&O&p:embed", names, &src_object,
                                    &counters_object, &dst_object, integer, &bits, integer, &inf,
                                    integer, &levels, &nearest) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (counters = take(&held, counters_object, "counters", UINT8, NULL, 1, false)) != NULL &&
        check_length(counters, "counters", length(src)) &&
        (dst = take(&held, dst_object, "dst", WORDS, src, 1, true)) != NULL &&
        check_length(dst, "dst", length(src)) && check_range("bits", bits, 1, 8) &&
        check_inf(src, inf) && check_range("levels", levels, 0, (1 << bits) - 1) &&
        check_disjoint(dst, src) && check_disjoint(dst, counters)) {
        const size_t n = length(src);
        size_t found;
        Py_BEGIN_ALLOW_THREADS
        found = kernels(src)->embed(src->buf, counters->buf, dst->buf, n, (unsigned)bits,
                                    (uint64_t)inf, (unsigned)levels, nearest != 0);
        Py_END_ALLOW_THREADS
        result = found == n ? PyLong_FromLong(-1) : PyLong_FromSize_t(found);
    }
    release(&held);
    return result;
}

static PyObject *py_find_unpackable(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "counters", "inf", "levels", NULL};
    PyObject *src_object, *counters_object, *result = NULL;
    int64_t inf, levels;
    arguments held = {.count = 0};
    Py_buffer *src, *counters = NULL;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO&O&:find_unpackable", names, &src_object,
                                    &counters_object, integer, &inf, integer, &levels) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (counters_object == Py_None ||
         ((counters = take(&held, counters_object, "counters", UINT8, NULL, 1, false)) != NULL &&
          check_length(counters, "counters", length(src)))) &&
        check_inf(src, inf) && check_range("levels", levels, 0, ELSA_MAX_LEVELS)) {
        const size_t n = length(src);
        size_t found;
        Py_BEGIN_ALLOW_THREADS
        found = kernels(src)->find_unpackable(src->buf, counters == NULL ? NULL : counters->buf, n,
                                              (uint64_t)inf, (unsigned)levels);
        Py_END_ALLOW_THREADS
        result = found == n ? PyLong_FromLong(-1) : PyLong_FromSize_t(found);
    }
    release(&held);
    return result;
}

static PyObject *py_nest(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"dense", "sparse", "level", "counters", NULL};
    PyObject *dense_object, *sparse_object, *counters_object, *result = NULL;
    int64_t level;
    arguments held = {.count = 0};
    Py_buffer *dense, *sparse, *counters;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO&O:nest", names, &dense_object, &sparse_object,
                                    integer, &level, &counters_object) &&
        (dense = take(&held, dense_object, "dense", WORDS, NULL, 1, false)) != NULL &&
        (sparse = take(&held, sparse_object, "sparse", WORDS, dense, 1, false)) != NULL &&
        check_length(sparse, "sparse", length(dense)) &&
        check_range("level", level, 1, ELSA_MAX_LEVELS) &&
        (counters = take(&held, counters_object, "counters", UINT8, NULL, 1, true)) != NULL &&
        check_length(counters, "counters", length(dense)) && check_disjoint(counters, dense) &&
        check_disjoint(counters, sparse)) {
        const size_t n = length(dense);
        size_t found;
        Py_BEGIN_ALLOW_THREADS
        found = kernels(dense)->nest(dense->buf, sparse->buf, (unsigned)level, counters->buf, n);
        Py_END_ALLOW_THREADS
        result = found == n ? PyLong_FromLong(-1) : PyLong_FromSize_t(found);
    }
    release(&held);
    return result;
}

static bool rises(const elsa_u64 *numbers, size_t n)
{
    for (size_t i = 1; i < n; i++)
        if (numbers[i] <= numbers[i - 1])
            return false;
    return true;
}

static PyObject *py_histogram(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "shift", "width", "prefixes", "out", NULL};
    PyObject *src_object, *prefixes_object, *out_object, *result = NULL;
    int64_t shift, width;
    arguments held = {.count = 0};
    Py_buffer *src, *prefixes, *out;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&O&OO:histogram", names, &src_object, integer,
                                    &shift, integer, &width, &prefixes_object, &out_object) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        check_range("width", width, 1, 24) &&
        check_range("shift", shift, 0, 8 * src->itemsize - width) &&
        (prefixes = take(&held, prefixes_object, "prefixes", UINT64, NULL, 1, false)) != NULL &&
        (out = take(&held, out_object, "out", UINT64, NULL, 2, true)) != NULL &&
        check_disjoint(out, src) && check_disjoint(out, prefixes)) {
        const size_t rows = length(prefixes);
        if (out->shape[0] != (Py_ssize_t)rows || out->shape[1] != (Py_ssize_t)1 << width)
            PyErr_Format(PyExc_ValueError, "out: %zd x %zd, expected %zu x %zd", out->shape[0],
                         out->shape[1], rows, (Py_ssize_t)1 << width);
        else if (!rises(prefixes->buf, rows))
            PyErr_SetString(PyExc_ValueError, "prefixes: not sorted and unique");
        else {
            Py_BEGIN_ALLOW_THREADS
            kernels(src)->histogram(src->buf, length(src), (unsigned)shift, (unsigned)width,
                                    prefixes->buf, rows, out->buf);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
    }
    release(&held);
    return result;
}

static bool falls(const elsa_u64 *numbers, size_t n)
{
    for (size_t i = 1; i < n; i++)
        if (numbers[i] > numbers[i - 1])
            return false;
    return true;
}

static PyObject *py_assign(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"src", "thresholds", "ties", "counters", NULL};
    PyObject *src_object, *thresholds_object, *ties_object, *counters_object, *result = NULL;
    arguments held = {.count = 0};
    Py_buffer *src, *thresholds, *ties, *counters;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOOO:assign", names, &src_object,
                                    &thresholds_object, &ties_object, &counters_object) &&
        (src = take(&held, src_object, "src", WORDS, NULL, 1, false)) != NULL &&
        (thresholds = take(&held, thresholds_object, "thresholds", UINT64, NULL, 1, false)) !=
            NULL &&
        check_range("number of thresholds", (int64_t)length(thresholds), 1, ELSA_MAX_LEVELS) &&
        (ties = take(&held, ties_object, "ties", INT64, NULL, 1, true)) != NULL &&
        check_length(ties, "ties", length(thresholds)) &&
        (counters = take(&held, counters_object, "counters", UINT8, NULL, 1, true)) != NULL &&
        check_length(counters, "counters", length(src)) && check_disjoint(counters, src) &&
        check_disjoint(counters, thresholds) && check_disjoint(counters, ties) &&
        check_disjoint(ties, src) && check_disjoint(ties, thresholds)) {
        if (!falls(thresholds->buf, length(thresholds)))
            PyErr_SetString(PyExc_ValueError, "thresholds: they rise");
        else {
            Py_BEGIN_ALLOW_THREADS
            kernels(src)->assign(src->buf, length(src), thresholds->buf, ties->buf,
                                 length(thresholds), counters->buf);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
    }
    release(&held);
    return result;
}

/* --- Delivery files, as elsa_format._delivery._pure has it ------------------------------------ */

static const elsa_delivery *delivery(const Py_buffer *words)
{
    return elsa_delivery_for((size_t)words->itemsize);
}

/* A block's words; a mantissa of 0 is that of a dtype without counters. */
static bool check_words(const Py_buffer *words, int64_t mantissa, int64_t bits, int64_t levels)
{
    const Py_ssize_t size = words->itemsize;
    if (!check_range("number of words", (int64_t)length(words), 1, ELSA_LARGEST_BLOCK))
        return false;
    if (mantissa != 0 && !(size == 2 && (mantissa == 7 || mantissa == 10)) &&
        !(size == 4 && mantissa == 23) && !(size == 8 && mantissa == 52)) {
        PyErr_Format(PyExc_ValueError, "mantissa: no words of %zd bytes have %lld bits", size,
                     (long long)mantissa);
        return false;
    }
    return (levels == 0 && bits == 0) ||
           (check_range("bits", bits, 1, mantissa < 8 ? mantissa : 8) &&
            check_range("levels", levels, 1, (1 << bits) - 1));
}

static bool check_scratch(const Py_buffer *scratch, const Py_buffer *words)
{
    return check_range("scratch", scratch->len,
                       (int64_t)elsa_delivery_scratch(length(words), (size_t)words->itemsize),
                       INT64_MAX);
}

static bool check_sizes(const Py_buffer *sizes, const Py_buffer *data)
{
    const elsa_i64 *numbers = sizes->buf;
    int64_t left = data->len;
    for (size_t i = 0; i < length(sizes); i++) {
        if (!check_range("sizes", numbers[i], 0, left))
            return false;
        left -= numbers[i];
    }
    return check_range("bytes behind the payloads", left, 0, 0);
}

static PyObject *py_delivery_memory(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"n", "itemsize", NULL};
    int64_t n, itemsize;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O&O&:delivery_memory", names, integer, &n,
                                     integer, &itemsize) ||
        !check_range("n", n, 1, ELSA_LARGEST_BLOCK) || !check_range("itemsize", itemsize, 1, 8))
        return NULL;
    return Py_BuildValue("nn", (Py_ssize_t)elsa_delivery_scratch((size_t)n, (size_t)itemsize),
                         (Py_ssize_t)elsa_delivery_room((size_t)n, (size_t)itemsize));
}

static PyObject *py_decode_nested(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"data",     "sizes", "first",  "words",   "mantissa",
                            "bits", "levels", "scratch", NULL};
    PyObject *data_object, *sizes_object, *words_object, *scratch_object, *result = NULL;
    int64_t first, mantissa, bits, levels;
    arguments held = {.count = 0};
    Py_buffer *data, *sizes, *words, *scratch;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO&OO&O&O&O:decode_nested", names, &data_object,
                                    &sizes_object, integer, &first, &words_object, integer,
                                    &mantissa, integer, &bits, integer, &levels, &scratch_object) &&
        (data = take(&held, data_object, "data", UINT8, NULL, 1, false)) != NULL &&
        (sizes = take(&held, sizes_object, "sizes", INT64, NULL, 1, false)) != NULL &&
        (words = take(&held, words_object, "words", WORDS, NULL, 1, true)) != NULL &&
        (scratch = take(&held, scratch_object, "scratch", UINT8, NULL, 1, true)) != NULL &&
        check_range("levels", levels, 1, ELSA_MAX_LEVELS) &&
        check_words(words, mantissa, bits, levels) && check_sizes(sizes, data) &&
        check_range("first", first, 1, levels + 1) &&
        check_range("number of payloads", (int64_t)length(sizes), 1, levels + 2 - first) &&
        check_scratch(scratch, words) && check_disjoint(words, data) &&
        check_disjoint(words, sizes) && check_disjoint(words, scratch) &&
        check_disjoint(scratch, data) && check_disjoint(scratch, sizes)) {
        const elsa_words of = {(unsigned)mantissa, (unsigned)bits, (unsigned)levels};
        const char *wrong;
        int stored;
        Py_BEGIN_ALLOW_THREADS
        wrong = delivery(words)->decode_nested(data->buf, sizes->buf, length(sizes),
                                               (unsigned)first, words->buf, length(words), of,
                                               scratch->buf, &stored);
        Py_END_ALLOW_THREADS
        if (wrong != NULL)
            PyErr_SetString(PyExc_ValueError, wrong);
        else
            result = PyBool_FromLong(stored);
    }
    release(&held);
    return result;
}

static PyObject *py_decode_plain(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"data", "words", "mantissa", "scratch", NULL};
    PyObject *data_object, *words_object, *scratch_object, *result = NULL;
    int64_t mantissa;
    arguments held = {.count = 0};
    Py_buffer *data, *words, *scratch;
    if (PyArg_ParseTupleAndKeywords(args, named, "OOO&O:decode_plain", names, &data_object,
                                    &words_object, integer, &mantissa, &scratch_object) &&
        (data = take(&held, data_object, "data", UINT8, NULL, 1, false)) != NULL &&
        (words = take(&held, words_object, "words", ANY_WORDS, NULL, 1, true)) != NULL &&
        (scratch = take(&held, scratch_object, "scratch", UINT8, NULL, 1, true)) != NULL &&
        check_words(words, mantissa, 0, 0) && check_scratch(scratch, words) &&
        check_disjoint(words, data) && check_disjoint(words, scratch) &&
        check_disjoint(scratch, data)) {
        const elsa_words of = {.mantissa = (unsigned)mantissa};
        const char *wrong;
        Py_BEGIN_ALLOW_THREADS
        wrong = delivery(words)->decode_plain(data->buf, (size_t)data->len, words->buf,
                                              length(words), of, scratch->buf);
        Py_END_ALLOW_THREADS
        if (wrong != NULL)
            PyErr_SetString(PyExc_ValueError, wrong);
        else
            result = Py_NewRef(Py_None);
    }
    release(&held);
    return result;
}

static bool check_room(const Py_buffer *out, const Py_buffer *words)
{
    return check_range("out", out->len,
                       (int64_t)elsa_delivery_room(length(words), (size_t)words->itemsize),
                       INT64_MAX);
}

static PyObject *py_encode_nested(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"words", "mantissa", "bits", "levels", "out", "sizes", "scratch", NULL};
    PyObject *words_object, *out_object, *sizes_object, *scratch_object, *result = NULL;
    int64_t mantissa, bits, levels;
    arguments held = {.count = 0};
    Py_buffer *words, *out, *sizes, *scratch;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&O&O&OOO:encode_nested", names, &words_object,
                                    integer, &mantissa, integer, &bits, integer, &levels,
                                    &out_object, &sizes_object, &scratch_object) &&
        (words = take(&held, words_object, "words", WORDS, NULL, 1, false)) != NULL &&
        (out = take(&held, out_object, "out", UINT8, NULL, 1, true)) != NULL &&
        (sizes = take(&held, sizes_object, "sizes", INT64, NULL, 1, true)) != NULL &&
        (scratch = take(&held, scratch_object, "scratch", UINT8, NULL, 1, true)) != NULL &&
        check_range("levels", levels, 1, ELSA_MAX_LEVELS) &&
        check_words(words, mantissa, bits, levels) &&
        check_length(sizes, "sizes", (size_t)levels + 1) && check_room(out, words) &&
        check_scratch(scratch, words) && check_disjoint(out, words) &&
        check_disjoint(sizes, words) && check_disjoint(scratch, words) &&
        check_disjoint(out, sizes) && check_disjoint(out, scratch) &&
        check_disjoint(sizes, scratch)) {
        const elsa_words of = {(unsigned)mantissa, (unsigned)bits, (unsigned)levels};
        size_t size;
        Py_BEGIN_ALLOW_THREADS
        size = delivery(words)->encode_nested(words->buf, length(words), of, out->buf, sizes->buf,
                                              scratch->buf);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(size);
    }
    release(&held);
    return result;
}

static PyObject *py_encode_plain(PyObject *Py_UNUSED(module), PyObject *args, PyObject *named)
{
    static char *names[] = {"words", "mantissa", "out", "scratch", NULL};
    PyObject *words_object, *out_object, *scratch_object, *result = NULL;
    int64_t mantissa;
    arguments held = {.count = 0};
    Py_buffer *words, *out, *scratch;
    if (PyArg_ParseTupleAndKeywords(args, named, "OO&OO:encode_plain", names, &words_object,
                                    integer, &mantissa, &out_object, &scratch_object) &&
        (words = take(&held, words_object, "words", ANY_WORDS, NULL, 1, false)) != NULL &&
        (out = take(&held, out_object, "out", UINT8, NULL, 1, true)) != NULL &&
        (scratch = take(&held, scratch_object, "scratch", UINT8, NULL, 1, true)) != NULL &&
        check_words(words, mantissa, 0, 0) && check_room(out, words) &&
        check_scratch(scratch, words) && check_disjoint(out, words) &&
        check_disjoint(scratch, words) && check_disjoint(out, scratch)) {
        const elsa_words of = {.mantissa = (unsigned)mantissa};
        size_t size;
        Py_BEGIN_ALLOW_THREADS
        size = delivery(words)->encode_plain(words->buf, length(words), of, out->buf, scratch->buf);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(size);
    }
    release(&held);
    return result;
}

#define METHOD(name)                                                                               \
    {#name, (PyCFunction)(void (*)(void))py_##name, METH_VARARGS | METH_KEYWORDS, NULL}

static PyMethodDef methods[] = {
    METHOD(mask),  METHOD(count),           METHOD(compact),   METHOD(csr),
    METHOD(expand), METHOD(expand_csr), METHOD(embed), METHOD(find_unpackable),
    METHOD(nest),   METHOD(histogram),  METHOD(assign), METHOD(delivery_memory),
    METHOD(decode_nested), METHOD(decode_plain), METHOD(encode_nested), METHOD(encode_plain),
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    elsa_fill_tables();
    elsa_fill_delivery_tables();
    return PyModule_AddStringConstant(module, "ISA", elsa_kernels_for(2)->isa);
}

/* By way of an integer: ISO C turns no function into a void *. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)(uintptr_t)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "elsa_format._native",
    .m_doc = "The inner loops over weights in C; described in elsa_format._pure.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
