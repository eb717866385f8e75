#include "door.h"
#include "../threads.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 512 }; /* of bfloat16 that are floats at the same time */

typedef struct {
    elsa_host host; /* first */
    size_t threads;
} runner;

struct elsa_door {
    int64_t parts;
    float *no_bias;
    elsa_layer part[];
};

/* ---- packing ---- */

int64_t elsa_count(const void *dense, int half, int64_t outputs, int64_t parts, const int64_t *bounds,
                   int32_t *starts)
{
    int64_t width = bounds[parts], all = 0;
    for (int64_t p = 0; p < parts; p++, starts += outputs + 1) {
        int64_t count = 0;
        starts[0] = 0;
        for (int64_t r = 0; r < outputs; r++) {
            uint32_t kept = 0; /* a row has at most 65536 columns */
            if (half) {
                const uint16_t *row = (const uint16_t *)dense + r * width;
                for (int64_t c = bounds[p]; c < bounds[p + 1]; c++)
                    kept += (row[c] & 0x7FFF) != 0;
            } else {
                const uint32_t *row = (const uint32_t *)dense + r * width;
                for (int64_t c = bounds[p]; c < bounds[p + 1]; c++)
                    kept += (row[c] & 0x7FFFFFFF) != 0;
            }
            count += kept ? kept : 1;
            if (count >= INT32_MAX)
                return -1;
            starts[r + 1] = (int32_t)count;
        }
        all += count;
    }
    return all;
}

#define PACK(word)                                                                           \
    do {                                                                                     \
        const word *rows = dense;                                                            \
        word *to = values;                                                                   \
        for (int64_t p = 0; p < parts; p++, starts += outputs + 1, end += starts[-1])        \
            for (int64_t r = 0; r < outputs; r++) {                                          \
                const word *row = rows + r * width + bounds[p];                              \
                int64_t c = 0, last = bounds[p + 1] - bounds[p];                             \
                int64_t at = end + starts[r], stop = end + starts[r + 1];                    \
                /* Without a branch for each: which weights are kept cannot be predicted. */ \
                for (; c < last && at < stop; c++) {                                         \
                    to[at] = row[c];                                                         \
                    columns[at] = (uint16_t)c;                                               \
                    at += (word)(row[c] << 1) != 0;                                          \
                }                                                                            \
                if (at < stop) { /* a row of zeros */                                        \
                    to[at] = 0;                                                              \
                    columns[at] = 0;                                                         \
                }                                                                            \
            }                                                                                \
    } while (0)

void elsa_pack(const void *dense, int half, int64_t outputs, int64_t parts, const int64_t *bounds,
               const int32_t *starts, uint16_t *columns, void *values)
{
    int64_t width = bounds[parts], end = 0;
    if (half)
        PACK(uint16_t);
    else
        PACK(uint32_t);
}

#define UNPACK(word)                                                                \
    do {                                                                            \
        const word *from = values;                                                  \
        word *rows = dense;                                                         \
        for (int64_t p = 0; p < parts; p++, starts += outputs + 1, end += starts[-1]) \
            for (int64_t r = 0; r < outputs; r++)                                   \
                for (int64_t i = end + starts[r]; i < end + starts[r + 1]; i++)     \
                    rows[r * width + bounds[p] + columns[i]] = from[i];             \
    } while (0)

void elsa_unpack(const int32_t *starts, const uint16_t *columns, const void *values, int half,
                 int64_t outputs, int64_t parts, const int64_t *bounds, void *dense)
{
    int64_t width = bounds[parts], end = 0;
    if (half)
        UNPACK(uint16_t);
    else
        UNPACK(uint32_t);
}

/* ---- layers ---- */

elsa_door *elsa_open(const int64_t *shape, int64_t parts, const int64_t *bounds, int half,
                const int32_t *starts, const uint16_t *columns, const void *values, int64_t count,
                const char **wrong)
{
    int64_t outputs = shape[0];
    *wrong = "the weights must have outputs and inputs";
    if (outputs < 1 || outputs >= INT32_MAX || parts < 1 || parts > ELSA_MOST_COLUMNS)
        return NULL;
    *wrong = "out of memory";
    elsa_door *d = calloc(1, sizeof *d + (size_t)parts * sizeof *d->part);
    if (d)
        d->no_bias = calloc((size_t)outputs, sizeof *d->no_bias);
    if (!d || !d->no_bias) {
        free(d);
        return NULL;
    }
    d->parts = parts;
    *wrong = NULL;
    int64_t at = 0;
    for (int64_t p = 0; p < parts && !*wrong; p++, starts += outputs + 1) {
        elsa_layer *layer = &d->part[p];
        layer->outputs = outputs;
        layer->channels = parts > 1 ? bounds[p + 1] - bounds[p] : shape[1];
        layer->pitch = parts > 1 ? shape[1] : 0;
        memcpy(layer->kernel, shape + 2, sizeof layer->kernel);
        memcpy(layer->stride, shape + 4, sizeof layer->stride);
        memcpy(layer->pad, shape + 6, sizeof layer->pad);
        layer->starts = starts;
        layer->columns = columns + at;
        layer->values = half ? (const void *)((const uint16_t *)values + at)
                             : (const void *)((const float *)values + at);
        layer->half = half;
        layer->count = starts[outputs];
        layer->bias = d->no_bias;
        if (layer->count < 1 || layer->count > count - at)
            *wrong = "indptr must end with the number of values";
        else
            *wrong = elsa_check(layer, outputs + 1, layer->count, 0, outputs);
        at += layer->count;
    }
    if (!*wrong && (at != count || (parts > 1 && (bounds[0] || bounds[parts] != shape[1]))))
        *wrong = "the parts must have all columns and values";
    if (!*wrong)
        return d;
    elsa_close(d);
    return NULL;
}

void elsa_close(elsa_door *d)
{
    if (!d)
        return;
    for (int64_t p = 0; p < d->parts; p++)
        elsa_forget(&d->part[p]);
    free(d->no_bias);
    free(d);
}

/* ---- running ---- */

static void run(const elsa_host *host, void (*task)(void *, size_t), size_t count, void *data)
{
    elsa_share_out(task, count, data, ((const runner *)(const void *)host)->threads);
}

static void *take(const elsa_host *host, size_t bytes)
{
    (void)host;
    return malloc(bytes);
}

static void give(const elsa_host *host, void *memory)
{
    (void)host;
    free(memory);
}

static void widen(const uint16_t *from, int64_t count, float *to)
{
    uint32_t *words = (uint32_t *)(void *)to;
    for (int64_t i = 0; i < count; i++)
        words[i] = (uint32_t)from[i] << 16;
}

/* To the nearest, ties to even, as PyTorch does. */
static void narrow(const float *from, int64_t count, uint16_t *to)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, from + i, sizeof word);
        uint32_t rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

static const char *product(elsa_door *d, const runner *r, const float *x, int64_t rows, const float *bias,
                           float *y)
{
    int64_t outputs = d->part[0].outputs, at = 0;
    const float *sum = NULL;
    if (bias) {
        for (int64_t j = 0; j < rows; j++)
            memcpy(y + j * outputs, bias, (size_t)outputs * sizeof *y);
        sum = y;
    }
    const char *problem = NULL;
    for (int64_t p = 0; p < d->parts && !problem; p++, sum = y) {
        problem = elsa_matmul(&d->part[p], &r->host, x + at, rows, sum, y);
        at += d->part[p].channels;
    }
    return problem;
}

const char *elsa_linear(elsa_door *d, const void *x, int half, int64_t rows, const float *bias, void *y,
                        int64_t threads)
{
    runner r = {{run, take, give}, (size_t)threads};
    if (!half)
        return product(d, &r, x, rows, bias, y);
    int64_t width = elsa_pitch(&d->part[0]), outputs = d->part[0].outputs;
    int64_t most = elsa_smaller(rows, ROWS);
    float *wide = malloc((size_t)(most * (width + outputs)) * sizeof *wide);
    if (!wide)
        return "out of memory";
    const char *problem = NULL;
    for (int64_t j = 0; j < rows && !problem; j += most) {
        int64_t now = elsa_smaller(most, rows - j);
        float *result = wide + now * width;
        widen((const uint16_t *)x + j * width, now * width, wide);
        problem = product(d, &r, wide, now, bias, result);
        narrow(result, now * outputs, (uint16_t *)y + j * outputs);
    }
    free(wide);
    return problem;
}

const char *elsa_conv2d(elsa_door *d, const void *x, int half, int64_t batch, int64_t height, int64_t width,
                        const float *bias, void *y, int64_t threads)
{
    runner r = {{run, take, give}, (size_t)threads};
    elsa_layer *layer = &d->part[0];
    int64_t in[2] = {height, width}, out[2];
    if (d->parts != 1 || !elsa_conv_size(layer, in, out))
        return "the kernel is larger than the padded input";
    int64_t inputs = layer->channels * height * width, area = out[0] * out[1];
    int64_t outputs = layer->outputs * area;
    float *wide = NULL, *result = NULL;
    if (half) {
        wide = malloc((size_t)(inputs + outputs) * sizeof *wide);
        if (!wide)
            return "out of memory";
        result = wide + inputs;
    }
    const char *problem = NULL;
    for (int64_t b = 0; b < batch && !problem; b++) {
        const float *picture = wide;
        if (half)
            widen((const uint16_t *)x + b * inputs, inputs, wide);
        else {
            picture = (const float *)x + b * inputs;
            result = (float *)y + b * outputs;
        }
        for (int64_t c = 0; bias && c < layer->outputs; c++)
            for (int64_t i = 0; i < area; i++)
                result[c * area + i] = bias[c];
        problem = elsa_conv(layer, &r.host, picture, 1, in, bias ? result : NULL, result);
        if (half)
            narrow(result, outputs, (uint16_t *)y + b * outputs);
    }
    free(wide);
    return problem;
}
