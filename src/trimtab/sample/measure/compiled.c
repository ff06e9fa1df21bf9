/* The readings of a healthy step in a few calls, where a compiler was there when trimtab was installed.
 *
 * Between two steps the processor's caches are filled with the training itself: every function of Python, NumPy and
 * PyTorch that a step enters then costs several times what it costs in a loop of its own. What is read here could be
 * read with them, and is (sample/probes, sample/measure/reference.py) wherever this module is missing or says None:
 * for anything that is not a plain, contiguous float32 tensor on the CPU.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define VERSION 5 /* of what the functions take and return: native.py uses no other */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_THIS_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_THIS_CPU
#endif

#define LANES 32
#define CHUNK 2048 /* elements that are summed in float before the sum is widened: keeps its error below 1e-6 */

static PyObject *tensor_type, *float32, *int64, *name_grad, *name_dtype, *name_is_cpu, *name_is_contiguous, *name_data_ptr,
    *name_numel, *name_dim, *name_stride, *name_version, *zero, *written;

/* -- sums ---------------------------------------------------------------------------------------------------------- */

FOR_THIS_CPU static float square_lanes(const float *x, Py_ssize_t n) {
    float lanes[LANES] = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += x[i + k] * x[i + k];
    for (int k = 0; i < n; i++, k++) lanes[k] += x[i] * x[i];
    float sum = 0;
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    return sum;
}

static double squares(const float *x, Py_ssize_t n) {
    double sum = 0;
    for (Py_ssize_t start = 0; start < n; start += CHUNK) {
        Py_ssize_t num = n - start < CHUNK ? n - start : CHUNK;
        float part = square_lanes(x + start, num);
        if (isfinite(part) && part > 1e-30f) {
            sum += part;
        } else { /* squares that float32 cannot hold, or a value that is not finite: only a wide sum tells */
            for (Py_ssize_t i = start; i < start + num; i++) sum += (double)x[i] * (double)x[i];
        }
    }
    return sum;
}

FOR_THIS_CPU static float distance_lanes(const float *restrict x, const float *restrict y, Py_ssize_t n) {
    float lanes[LANES] = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            float by = x[i + k] - y[i + k];
            lanes[k] += by * by;
        }
    for (int k = 0; i < n; i++, k++) lanes[k] += (x[i] - y[i]) * (x[i] - y[i]);
    float sum = 0;
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    return sum;
}

/* Squares of how far the values are from others, as `squares` adds them up. */
static double distances(const float *x, const float *y, Py_ssize_t n) {
    double sum = 0;
    for (Py_ssize_t start = 0; start < n; start += CHUNK) {
        Py_ssize_t num = n - start < CHUNK ? n - start : CHUNK;
        float part = distance_lanes(x + start, y + start, num);
        if (isfinite(part) && part > 1e-30f) {
            sum += part;
        } else {
            for (Py_ssize_t i = start; i < start + num; i++) {
                double by = x[i] - y[i];
                sum += by * by;
            }
        }
    }
    return sum;
}

/* PyTorch's own norm, bit for bit: how many sums it keeps, and how it adds what is left over, differ between processors
 * and between its releases. native.py finds out which of the ways below is that of this process, if any. */
static int sums_kept = 8, rest_plain = 4;

#define CHAINS 4 /* tensors that are read side by side: each of the eight sums waits for its last addition */
typedef float Eight __attribute__((vector_size(32)));
typedef float Unaligned __attribute__((vector_size(32), aligned(4), may_alias));

FOR_THIS_CPU static void add_squares(const float *const *x, Eight *sums, Py_ssize_t times) {
    Eight a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    for (Py_ssize_t i = 0; i < 8 * times; i += 8) {
        Eight p = *(const Unaligned *)(x[0] + i), q = *(const Unaligned *)(x[1] + i);
        Eight r = *(const Unaligned *)(x[2] + i), s = *(const Unaligned *)(x[3] + i);
        a += p * p, b += q * q, c += r * r, d += s * s;
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* The norm, where `sum` is that of the squares of the first `i` values. */
static float with_rest(const float *x, Py_ssize_t n, Py_ssize_t i, float sum) {
    if (n == 1) return fabsf(x[0]);
    for (; rest_plain && i + rest_plain <= n; i += rest_plain)
        for (int k = 0; k < rest_plain; k++) sum += x[i + k] * x[i + k];
    for (; i < n; i++) sum = fmaf(x[i], x[i], sum);
    return sqrtf(sum);
}

static float torch_norm_any(const float *x, Py_ssize_t n) {
    float sums[16] = {0};
    Py_ssize_t i = 0;
    for (; i + sums_kept <= n; i += sums_kept)
        for (int k = 0; k < sums_kept; k++) sums[k] += x[i + k] * x[i + k];
    for (int k = 1; k < sums_kept; k++) sums[0] += sums[k];
    return with_rest(x, n, i, sums[0]);
}

/* The norms of `num` arrays, of `sizes` values. */
static void torch_norms(const float *const *x, const Py_ssize_t *sizes, Py_ssize_t num, float *out) {
    if (sums_kept != 8) {
        for (Py_ssize_t i = 0; i < num; i++) out[i] = torch_norm_any(x[i], sizes[i]);
        return;
    }
    const float *at[CHAINS];
    Py_ssize_t of[CHAINS], left[CHAINS], next = 0;
    Eight sums[CHAINS] = {{0}};
    int busy = 0; /* chains that are under way: the first ones */
    for (;;) {
        for (; busy < CHAINS && next < num; next++) {
            if (sizes[next] < 8) {
                out[next] = with_rest(x[next], sizes[next], 0, 0);
                continue;
            }
            at[busy] = x[next], of[busy] = next, left[busy] = sizes[next] / 8, sums[busy] = (Eight){0};
            busy++;
        }
        if (!busy) return;
        Py_ssize_t times = left[0];
        for (int c = 1; c < busy; c++) times = left[c] < times ? left[c] : times;
        for (int c = busy; c < CHAINS; c++) at[c] = at[0]; /* idle: its sum is not used */
        add_squares(at, sums, times);
        for (int c = busy - 1; c >= 0; c--) {
            at[c] += 8 * times, left[c] -= times;
            if (left[c]) continue;
            float sum = sums[c][0];
            for (int k = 1; k < 8; k++) sum += sums[c][k];
            out[of[c]] = with_rest(x[of[c]], sizes[of[c]], sizes[of[c]] / 8 * 8, sum);
            busy--;
            at[c] = at[busy], of[c] = of[busy], left[c] = left[busy], sums[c] = sums[busy];
        }
    }
}

FOR_THIS_CPU static void multiply(float *x, Py_ssize_t n, float by) {
    for (Py_ssize_t i = 0; i < n; i++) x[i] *= by;
}

static uint32_t crc_table[8][256];

static void make_crc_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int k = 0; k < 8; k++) crc = crc & 1 ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
        crc_table[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[t][i] = (crc_table[t - 1][i] >> 8) ^ crc_table[0][crc_table[t - 1][i] & 0xFF];
}

/* The checksum of zlib: what is on record must not depend on which of the two was used. */
static uint32_t crc32_of(const void *values, Py_ssize_t n) {
    const unsigned char *bytes = values;
    uint32_t crc = 0xFFFFFFFFu;
    for (; n >= 8; n -= 8, bytes += 8) {
        uint32_t a = crc ^ ((uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                            (uint32_t)bytes[3] << 24);
        crc = crc_table[7][a & 0xFF] ^ crc_table[6][a >> 8 & 0xFF] ^ crc_table[5][a >> 16 & 0xFF] ^
              crc_table[4][a >> 24] ^ crc_table[3][bytes[4]] ^ crc_table[2][bytes[5]] ^ crc_table[1][bytes[6]] ^
              crc_table[0][bytes[7]];
    }
    for (; n > 0; n--, bytes++) crc = (crc >> 8) ^ crc_table[0][(crc ^ *bytes) & 0xFF];
    return crc ^ 0xFFFFFFFFu;
}

/* -- tensors ------------------------------------------------------------------------------------------------------- */

/* A number that a method returns; -1 with an error set where it does not. */
static long long asked(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, method, NULL);
    if (answer == NULL) return -1;
    long long value = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return value;
}

static int says(PyObject *tensor, PyObject *attribute, PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(tensor, attribute);
    if (value == NULL) return 0;
    int same = value == wanted;
    Py_DECREF(value);
    return same;
}

/* The values of a plain tensor of this type and their number; 0, perhaps with an error set, for any other. */
static int find_values(PyObject *tensor, PyObject *dtype, const void **values, Py_ssize_t *num) {
    if ((PyObject *)Py_TYPE(tensor) != tensor_type) return 0;
    if (!says(tensor, name_dtype, dtype) || !says(tensor, name_is_cpu, Py_True)) return 0;
    PyObject *straight = PyObject_CallMethodObjArgs(tensor, name_is_contiguous, NULL);
    if (straight == NULL) return 0;
    Py_DECREF(straight);
    if (straight != Py_True) return 0;
    long long size = asked(tensor, name_numel), at = asked(tensor, name_data_ptr);
    if (PyErr_Occurred() || (size && !at)) return 0; /* memory that was given back, as sharding does between steps */
    *num = (Py_ssize_t)size;
    *values = (const void *)(intptr_t)at;
    return 1;
}

static PyObject *not_for_this(void) {
    PyErr_Clear();
    Py_RETURN_NONE;
}

static int floats_in(PyObject *array, Py_buffer *view, Py_ssize_t num) {
    if (PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) return 0;
    if (view->len != num * (Py_ssize_t)sizeof(float)) {
        PyBuffer_Release(view);
        PyErr_Format(PyExc_ValueError, "got room for %zd bytes, expected %zd", view->len,
                     num * (Py_ssize_t)sizeof(float));
        return 0;
    }
    return 1;
}

static PyObject *pair(double first, double second) {
    return Py_BuildValue("dd", first, second);
}

PyDoc_STRVAR(grad_norms_doc, "grad_norms(params, out)\n--\n\n"
             "Fill `out` (float32) with the norm of each parameter's gradient. Returns the norm of all and the smallest\n"
             "one; None where a gradient is missing or not plain.");

static PyObject *grad_norms(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of parameters and an array");
        return NULL;
    }
    Py_ssize_t num = PyList_Size(args[0]);
    Py_buffer room;
    if (!floats_in(args[1], &room, num)) return NULL;
    float *out = room.buf;
    double whole = 0, least = INFINITY;
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *grad = PyObject_GetAttr(PyList_GetItem(args[0], i), name_grad);
        Py_ssize_t size = 0;
        const void *values = NULL;
        int plain = grad != NULL && find_values(grad, float32, &values, &size);
        double square = plain ? squares(values, size) : 0;
        Py_XDECREF(grad);
        if (!plain) {
            PyBuffer_Release(&room);
            return not_for_this();
        }
        out[i] = (float)sqrt(square);
        whole += square;
        least = out[i] < least ? out[i] : least;
    }
    PyBuffer_Release(&room);
    return pair(sqrt(whole), least);
}

PyDoc_STRVAR(imitate_doc, "imitate(sums, plain, tensors, out)\n--\n\n"
             "Fill `out` (float32) with the norm of each tensor, added up in `sums` sums and the rest `plain` at a time\n"
             "(0: each product fused with its sum), as `clip` does from then on. None where a tensor is not plain.");

static PyObject *imitate(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    long sums = num_args == 4 ? PyLong_AsLong(args[0]) : -1, plain = num_args == 4 ? PyLong_AsLong(args[1]) : -1;
    if (PyErr_Occurred()) return NULL;
    if (sums < 1 || sums > 16 || plain < 0 || plain > 16 || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected two numbers up to 16, a list of tensors and an array");
        return NULL;
    }
    Py_ssize_t num = PyList_Size(args[2]);
    Py_buffer room;
    if (!floats_in(args[3], &room, num)) return NULL;
    const float **found = PyMem_Malloc((size_t)(num ? num : 1) * sizeof(float *));
    Py_ssize_t *sizes = PyMem_Malloc((size_t)(num ? num : 1) * sizeof(Py_ssize_t)), i = 0;
    sums_kept = (int)sums, rest_plain = (int)plain;
    for (; found != NULL && sizes != NULL && i < num; i++) {
        const void *values = NULL;
        if (!find_values(PyList_GetItem(args[2], i), float32, &values, &sizes[i])) break;
        found[i] = values;
    }
    int all = found != NULL && sizes != NULL && i == num;
    if (all) torch_norms(found, sizes, num, room.buf);
    PyMem_Free(found);
    PyMem_Free(sizes);
    PyBuffer_Release(&room);
    if (!all) return not_for_this();
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(clip_doc, "clip(params, limit, above, ceiling, out)\n--\n\n"
             "Clip the gradients as `clip_grad_norm_` does, bit for bit, if their norm is larger than `above`, and fill\n"
             "`out` (float32) with their norms before. Returns the norm of all, the smallest one and the factor. None, with\n"
             "nothing changed, where a gradient is missing or not plain, or the norm not below `ceiling`.");

static PyObject *clip(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    double given[3];
    if (num_args != 5 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of parameters, three numbers and an array");
        return NULL;
    }
    for (int k = 0; k < 3; k++) {
        given[k] = PyFloat_AsDouble(args[1 + k]);
        if (PyErr_Occurred()) return NULL;
    }
    Py_ssize_t num = PyList_Size(args[0]);
    Py_buffer room;
    if (!floats_in(args[4], &room, num)) return NULL;
    float *out = room.buf, least = INFINITY;
    float **found = PyMem_Malloc((size_t)(num ? num : 1) * sizeof(float *));
    Py_ssize_t *sizes = PyMem_Malloc((size_t)(num ? num : 1) * sizeof(Py_ssize_t));
    PyObject *grads = PyList_New(0), *answer = NULL; /* keeps what is written to alive */
    Py_ssize_t plain = 0;
    if (found == NULL || sizes == NULL || grads == NULL) goto done;
    for (; plain < num; plain++) {
        PyObject *grad = PyObject_GetAttr(PyList_GetItem(args[0], plain), name_grad);
        const void *values = NULL;
        int fits = grad != NULL && find_values(grad, float32, &values, &sizes[plain]) && !PyList_Append(grads, grad);
        Py_XDECREF(grad);
        if (!fits) break;
        found[plain] = (float *)values;
    }
    if (plain < num || num == 0) goto done;
    float norm;
    const float *each = out;
    torch_norms((const float *const *)found, sizes, num, out);
    torch_norms(&each, &num, 1, &norm);
    for (Py_ssize_t i = 0; i < num; i++) least = out[i] < least ? out[i] : least;
    float coef = 1.0f / (norm + 1e-6f) * (float)given[0];
    if (!(norm < given[2]) || !isfinite(norm) || !(coef > 1e-30f)) goto done; /* so small a factor takes more care */
    if (coef < 1.0f && norm > given[1]) {
        for (Py_ssize_t i = 0; i < num; i++) multiply(found[i], sizes[i], coef);
        PyObject *noted = PyObject_CallFunctionObjArgs(written, grads, NULL); /* for who keeps one for a backward pass */
        if (noted == NULL) {
            PyErr_Clear();
        }
        Py_XDECREF(noted);
    } else {
        coef = 1.0f;
    }
    answer = Py_BuildValue("ddd", (double)norm, (double)least, (double)coef);
done:
    PyMem_Free(found);
    PyMem_Free(sizes);
    Py_XDECREF(grads);
    PyBuffer_Release(&room);
    return answer != NULL ? answer : not_for_this();
}

/* -- all columns --------------------------------------------------------------------------------------------------- */

typedef struct {
    float sum, largest;
    int tiny, zero;
} Shares;

FOR_THIS_CPU static Shares look_at(const float *x, Py_ssize_t n, float smallest) {
    float sums[LANES] = {0}, most[LANES] = {0};
    int tiny[LANES] = {0}, zero[LANES] = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            float value = x[i + k], size = fabsf(value);
            sums[k] += value;
            most[k] = size > most[k] ? size : most[k];
            tiny[k] += size < smallest;
            zero[k] += size == 0;
        }
    for (int k = 0; i < n; i++, k++) {
        float value = x[i], size = fabsf(value);
        sums[k] += value;
        most[k] = size > most[k] ? size : most[k];
        tiny[k] += size < smallest;
        zero[k] += size == 0;
    }
    Shares all = {0, 0, 0, 0};
    for (int k = 0; k < LANES; k++) {
        all.sum += sums[k];
        all.largest = most[k] > all.largest ? most[k] : all.largest;
        all.tiny += tiny[k];
        all.zero += zero[k];
    }
    return all;
}

static void columns_of(const float *x, Py_ssize_t n, float smallest, float *row) {
    double square = squares(x, n), sum = 0, largest = 0, tiny = 0, zero = 0, nan = 0, inf = 0;
    for (Py_ssize_t start = 0; start < n; start += CHUNK) {
        Py_ssize_t num = n - start < CHUNK ? n - start : CHUNK;
        Shares part = look_at(x + start, num, smallest);
        if (isfinite(part.sum)) {
            sum += part.sum;
        } else {
            for (Py_ssize_t i = start; i < start + num; i++) {
                sum += x[i];
                nan += isnan(x[i]) != 0;
                inf += isinf(x[i]) != 0;
            }
        }
        largest = part.largest > largest ? part.largest : largest;
        tiny += part.tiny;
        zero += part.zero;
    }
    row[0] = nan ? NAN : (float)sqrt(square);
    row[1] = nan ? NAN : (float)largest;
    row[2] = n ? (float)(sum / n) : 0;
    row[3] = (float)nan;
    row[4] = (float)inf;
    row[5] = n ? (float)(zero / n) : 0;
    row[6] = n ? (float)((tiny - zero) / n) : 0;
}

PyDoc_STRVAR(columns_doc, "columns(tensors, smallest, out)\n--\n\n"
             "Fill a row of seven for each tensor: norm, largest magnitude, mean, numbers of NaN and Inf, shares of zeros\n"
             "and of values nearer to 0 than `smallest`. None where a tensor is not plain.");

static PyObject *columns(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of tensors, a number and an array");
        return NULL;
    }
    double smallest = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t num = PyList_Size(args[0]);
    Py_buffer room;
    if (!floats_in(args[2], &room, 7 * num)) return NULL;
    for (Py_ssize_t i = 0; i < num; i++) {
        const void *values = NULL;
        Py_ssize_t size = 0;
        if (!find_values(PyList_GetItem(args[0], i), float32, &values, &size)) {
            PyBuffer_Release(&room);
            return not_for_this();
        }
        columns_of(values, size, (float)smallest, (float *)room.buf + 7 * i);
    }
    PyBuffer_Release(&room);
    Py_RETURN_TRUE;
}

/* -- parts of tensors, copied ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *tensors;
    const int64_t *at, *counts;
    float *kept;
    Py_ssize_t num;
    Py_buffer at_view, counts_view, kept_view;
} Part;

static void release(Part *part) {
    PyBuffer_Release(&part->at_view);
    PyBuffer_Release(&part->counts_view);
    PyBuffer_Release(&part->kept_view);
}

/* Arguments (tensors, at, counts, kept): where the values of each lie as far as is known, how many of them are kept. */
static int read_part(PyObject *const *args, Py_ssize_t num_args, Part *part) {
    if (num_args != 4 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of tensors and three arrays");
        return 0;
    }
    part->tensors = args[0];
    part->num = PyList_Size(args[0]);
    if (PyObject_GetBuffer(args[1], &part->at_view, PyBUF_C_CONTIGUOUS) < 0) return 0;
    if (PyObject_GetBuffer(args[2], &part->counts_view, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&part->at_view);
        return 0;
    }
    if (PyObject_GetBuffer(args[3], &part->kept_view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&part->at_view);
        PyBuffer_Release(&part->counts_view);
        return 0;
    }
    part->at = part->at_view.buf, part->counts = part->counts_view.buf, part->kept = part->kept_view.buf;
    Py_ssize_t bytes = part->num * (Py_ssize_t)sizeof(int64_t), total = 0;
    if (part->at_view.len == bytes && part->counts_view.len == bytes) {
        for (Py_ssize_t i = 0; i < part->num; i++) total += part->counts[i];
        if (part->kept_view.len == total * (Py_ssize_t)sizeof(float)) return 1;
    }
    release(part);
    PyErr_SetString(PyExc_ValueError, "the arrays do not belong to these tensors");
    return 0;
}

static int is_still_there(const Part *part, Py_ssize_t i) {
    return asked(PyList_GetItem(part->tensors, i), name_data_ptr) == part->at[i];
}

PyDoc_STRVAR(same_doc, "same(tensors, at, counts, kept)\n--\n\n"
             "Whether the leading values of the tensors are what is kept of them; None where one lies elsewhere now.");

static PyObject *same(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    Part part;
    if (!read_part(args, num_args, &part)) return NULL;
    const float *kept = part.kept;
    int equal = 1;
    for (Py_ssize_t i = 0; i < part.num; kept += part.counts[i], i++) {
        if (!is_still_there(&part, i)) {
            release(&part);
            return not_for_this();
        }
        equal = equal && memcmp((const float *)(intptr_t)part.at[i], kept, part.counts[i] * sizeof(float)) == 0;
    }
    release(&part);
    return PyBool_FromLong(equal);
}

PyDoc_STRVAR(keep_doc, "keep(tensors, at, counts, kept)\n--\n\n"
             "Copy the leading values of the tensors to `kept`. Returns the sum of their squares, and that of their\n"
             "distances from what was kept; None, and nothing changed, where one lies elsewhere now.");

static PyObject *keep(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    Part part;
    if (!read_part(args, num_args, &part)) return NULL;
    for (Py_ssize_t i = 0; i < part.num; i++)
        if (!is_still_there(&part, i)) {
            release(&part);
            return not_for_this();
        }
    double size = 0, moved = 0;
    float *kept = part.kept;
    for (Py_ssize_t i = 0; i < part.num; kept += part.counts[i], i++) {
        const float *now = (const float *)(intptr_t)part.at[i];
        size += squares(now, part.counts[i]);
        moved += distances(now, kept, part.counts[i]);
        memcpy(kept, now, part.counts[i] * sizeof(float));
    }
    release(&part);
    return pair(size, moved);
}

PyDoc_STRVAR(versions_doc, "versions(tensors, known)\n--\n\n"
             "Whether the version counters of the tensors are the known ones (int64), which are replaced if not.");

static PyObject *versions(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of tensors and an array");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[1], &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) return NULL;
    Py_ssize_t num = PyList_Size(args[0]);
    int64_t *known = view.buf;
    int equal = view.len == num * (Py_ssize_t)sizeof(int64_t);
    if (!equal) PyErr_SetString(PyExc_ValueError, "the array does not belong to these tensors");
    for (Py_ssize_t i = 0; i < num && !PyErr_Occurred(); i++) {
        PyObject *version = PyObject_GetAttr(PyList_GetItem(args[0], i), name_version);
        if (version == NULL) break;
        int64_t now = PyLong_AsLongLong(version);
        Py_DECREF(version);
        equal = equal && now == known[i];
        known[i] = now;
    }
    PyBuffer_Release(&view);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(equal);
}

PyDoc_STRVAR(marks_doc, "marks(params)\n--\n\n"
             "A number that changes when the gradient of one of them is replaced or written to.");

static PyObject *marks(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 1 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list of parameters");
        return NULL;
    }
    uint64_t mark = 0xCBF29CE484222325u;
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++) {
        PyObject *grad = PyObject_GetAttr(PyList_GetItem(args[0], i), name_grad);
        if (grad == NULL) return NULL;
        uint64_t version = 0;
        if (grad != Py_None) {
            PyObject *counter = PyObject_GetAttr(grad, name_version);
            version = counter == NULL ? 0 : 1 + (uint64_t)PyLong_AsLongLong(counter);
            Py_XDECREF(counter);
        }
        mark = (mark ^ (uint64_t)(uintptr_t)grad) * 0x100000001B3u;
        mark = (mark ^ version) * 0x100000001B3u;
        Py_DECREF(grad);
        if (PyErr_Occurred()) return NULL;
    }
    return PyLong_FromUnsignedLongLong(mark);
}

PyDoc_STRVAR(held_doc, "held(slots, held)\n--\n\n"
             "Whether each slot, a dict and a key, holds the very object that is listed; None where one is no dict.");

static PyObject *held(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
        PyList_Size(args[0]) != PyList_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists of the same length");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++) {
        PyObject *slot = PyList_GetItem(args[0], i);
        if (!PyTuple_Check(slot) || PyTuple_Size(slot) != 2 || !PyDict_Check(PyTuple_GetItem(slot, 0)))
            return not_for_this();
        PyObject *there = PyDict_GetItemWithError(PyTuple_GetItem(slot, 0), PyTuple_GetItem(slot, 1));
        if (there == NULL && PyErr_Occurred()) return NULL;
        if (there != PyList_GetItem(args[1], i)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* -- an input ------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(leading_doc, "leading(tensor, slice, marked)\n--\n\n"
             "Of the first `slice` values of a plain tensor: their number, the mean of their squares, the checksum of the\n"
             "first `marked`, and whether its first two rows begin alike. Of integers (int64) there are no squares. None\n"
             "for any other tensor.");

static PyObject *leading(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "expected a tensor and two numbers");
        return NULL;
    }
    Py_ssize_t slice = PyLong_AsSsize_t(args[1]), marked = PyLong_AsSsize_t(args[2]), num = 0;
    if (PyErr_Occurred()) return NULL;
    const void *values = NULL;
    int is_float = find_values(args[0], float32, &values, &num);
    if (!is_float && (PyErr_Occurred() || !find_values(args[0], int64, &values, &num))) return not_for_this();
    if (num == 0) return not_for_this();
    const float *floats = values;
    const int64_t *numbers = values;
    num = num < slice ? num : slice;
    int alike = 0;
    if (asked(args[0], name_dim) > 1) {
        PyObject *stride = PyObject_CallMethodObjArgs(args[0], name_stride, zero, NULL);
        Py_ssize_t width = stride == NULL ? -1 : PyLong_AsSsize_t(stride);
        Py_XDECREF(stride);
        if (width < 0) return not_for_this();
        alike = width >= num || (is_float ? floats[0] == floats[width] : numbers[0] == numbers[width]);
    }
    double mark = crc32_of(values, (num < marked ? num : marked) * (is_float ? sizeof(float) : sizeof(int64_t)));
    if (is_float) return Py_BuildValue("nddO", num, squares(floats, num) / num, mark, alike ? Py_True : Py_False);
    return Py_BuildValue("nOdO", num, Py_None, mark, alike ? Py_True : Py_False);
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(begin_doc, "begin(tensor_type, float32, int64, written)\n--\n\n"
             "Say what a plain tensor is, its class and its dtypes, and whom to tell that some were written to.");

static PyObject *begin(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "expected a class, two dtypes and a function");
        return NULL;
    }
    Py_XDECREF(tensor_type);
    Py_XDECREF(float32);
    Py_XDECREF(int64);
    Py_XDECREF(written);
    tensor_type = Py_NewRef(args[0]);
    float32 = Py_NewRef(args[1]);
    int64 = Py_NewRef(args[2]);
    written = Py_NewRef(args[3]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, begin_doc},
    {"grad_norms", (PyCFunction)(void (*)(void))grad_norms, METH_FASTCALL, grad_norms_doc},
    {"imitate", (PyCFunction)(void (*)(void))imitate, METH_FASTCALL, imitate_doc},
    {"clip", (PyCFunction)(void (*)(void))clip, METH_FASTCALL, clip_doc},
    {"columns", (PyCFunction)(void (*)(void))columns, METH_FASTCALL, columns_doc},
    {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, same_doc},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL, keep_doc},
    {"versions", (PyCFunction)(void (*)(void))versions, METH_FASTCALL, versions_doc},
    {"marks", (PyCFunction)(void (*)(void))marks, METH_FASTCALL, marks_doc},
    {"held", (PyCFunction)(void (*)(void))held, METH_FASTCALL, held_doc},
    {"leading", (PyCFunction)(void (*)(void))leading, METH_FASTCALL, leading_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "compiled", "The readings of a healthy step in a few calls.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_compiled(void) {
    make_crc_table();
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_grad, "grad"},         {&name_dtype, "dtype"},       {&name_is_cpu, "is_cpu"},
        {&name_numel, "numel"},       {&name_data_ptr, "data_ptr"}, {&name_is_contiguous, "is_contiguous"},
        {&name_version, "_version"},  {&name_dim, "dim"},           {&name_stride, "stride"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
    if ((zero = PyLong_FromLong(0)) == NULL) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntMacro(module, VERSION) < 0) Py_CLEAR(module);
    return module;
}
