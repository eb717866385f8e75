/* Layers with sparse weights: y = relu(w x + bias + sum), as a matrix product or a convolution.
 *
 * Nothing in here knows a runtime; a folder of its own brings each of them together with it. A layer does not change after
 * it was checked, so that any number of threads may run it at once. */
#ifndef ELSA_SPARSE_H
#define ELSA_SPARSE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ELSA_EXPORTED __declspec(dllexport)
#else
#define ELSA_EXPORTED __attribute__((visibility("default")))
#endif

enum {
    ELSA_MOST_COLUMNS = 1 << 16, /* of a row of weights: indices have 16 bits */
    ELSA_MOST_KERNEL = 32,       /* rows and columns: a chunk of one channel fits, see plan.c */
    ELSA_MOST_EXTENT = 1 << 16,  /* of strides and pads */
    ELSA_SHAPES = 4,             /* a convolution's input shapes, or a product's block widths, a layer is
                                  * prepared for; other shapes cost time, other widths there are none */
};

/* Where memory and threads come from. */
typedef struct elsa_host {
    void (*run)(const struct elsa_host *, void (*task)(void *, size_t), size_t count, void *data);
    void *(*take)(const struct elsa_host *, size_t bytes); /* NULL if there is none */
    void (*give)(const struct elsa_host *, void *);
} elsa_host;

typedef struct elsa_plan elsa_plan;

/* The weights are a matrix of `outputs` rows and `channels` × kernel columns, the kernel's own
 * columns fastest. Row r holds values[starts[r]] to values[starts[r + 1] - 1] at these columns, ascending.
 *
 * Or they are n:m sparse (starts is NULL): each m columns hold n values, whose places among the m are
 * in codes, the first in the lowest bits: 2 bits each for m = 4, 4 bits each for m = 8. */
typedef struct {
    int64_t outputs, channels;
    int64_t pitch; /* floats from one row of a product's input to the next; 0: they are next to each other */
    int64_t kernel[2], stride[2], pad[4]; /* pads: top, left, bottom, right */
    const int32_t *starts;
    const uint16_t *columns;
    const uint8_t *codes;
    int64_t n, m;
    const void *values; /* float, or the upper halves of floats */
    bool half;
    int64_t bits;  /* of the integers to multiply where that is faster, 16 or 8; 0: floats only */
    int64_t count; /* of values */
    const float *bias;
    bool relu;
    _Atomic(elsa_plan *) plans[ELSA_SHAPES];
} elsa_layer;

/* What is wrong with a layer whose arrays have these many elements, or NULL. The rest relies on it. */
const char *elsa_check(const elsa_layer *layer, int64_t starts, int64_t columns, int64_t codes,
                       int64_t biases);

/* Rows of `channels` numbers each; sum and y have `outputs` in a row. sum may be NULL. What is wrong, or NULL. */
const char *elsa_matmul(elsa_layer *, const elsa_host *, const float *x, int64_t rows,
                        const float *sum, float *y);

/* Height and width of a convolution's output; false if the kernel does not fit the input. */
bool elsa_conv_size(const elsa_layer *, const int64_t in[2], int64_t out[2]);

const char *elsa_conv(elsa_layer *, const elsa_host *, const float *x, int64_t batch,
                      const int64_t in[2], const float *sum, float *y);

/* Forgets what running it has left behind, when no thread runs it any more. */
void elsa_forget(elsa_layer *);

/* The instructions that are used here: "avx512", "avx2" or "base". */
const char *elsa_isa(void);

static inline int64_t elsa_columns(const elsa_layer *layer)
{
    return layer->channels * layer->kernel[0] * layer->kernel[1];
}

static inline int64_t elsa_pitch(const elsa_layer *layer)
{
    return layer->pitch ? layer->pitch : elsa_columns(layer);
}

static inline int64_t elsa_smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t elsa_larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Quotient rounded up. */
static inline int64_t elsa_parts(int64_t whole, int64_t part)
{
    return whole / part + (whole % part != 0);
}

#endif
