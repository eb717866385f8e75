/* Products in integers of 16 or 8 bits: the inner loops for each set of instructions that has them.
 *
 * A column of the input has a scale (rows of x in a matrix product, else the whole picture), a row of weights has
 * one (with 16 bits, for each chunk). What the integers are, and why no sum overflows, says integer.c. */
#ifndef ELSA_SPARSE_INTEGER_H
#define ELSA_SPARSE_INTEGER_H

#include "kernels.h"
#include "plan.h"

enum {
    ELSA_MOST_INPUT = 16383, /* of 16 bits */
    ELSA_MOST_TASKS = 8,
};

typedef struct {
    const elsa_layer *layer;
    const elsa_plan *plan;
    const elsa_host *host;
    const float *x, *sum;
    float *y;
    int64_t columns, length; /* as in elsa_geometry */
    size_t blocks, row_parts, pack_parts, range_parts;
    uint8_t *packed; /* [block][plane][segments][segment], integers */
    /* For each column that a block can have, if the plan is transposed; else one for all. */
    float *scale, *inverse;
    int32_t *zero; /* of 8 bits: what 0 becomes */
    int32_t highest[ELSA_MOST_TASKS];
    uint32_t lowest[ELSA_MOST_TASKS];
    atomic_bool unfit, failed; /* a column that floats must do; no memory */
} elsa_integer_job;

typedef struct {
    int64_t width, group, most_vectors; /* columns in a vector, values in a step, vectors in a block */
    void (*pack)(void *job, size_t task);
    void (*multiply)(void *job, size_t task);
} elsa_integer_kernel;

/* Rows of weights times few rows of x: bits say which columns have values, and the values stand close together. */
typedef struct {
    const elsa_layer *layer;
    const elsa_plan *plan;
    const float *x, *sum;
    float *y;
    int64_t rows, blocks; /* of 64 columns */
    uint8_t *packed;      /* [rows][high bytes, low bytes][blocks][64]; with inputs of 8 bits no low ones */
    const float *scale;   /* of each row of x */
    const int32_t *zero;
    size_t tasks;
} elsa_few_job;

typedef struct {
    /* The largest bits of floats, seen as signed integers and as unsigned ones. */
    void (*range)(const float *x, int64_t count, int32_t *highest, uint32_t *lowest);
    elsa_integer_kernel words, bytes; /* of 16 and 8 bits */
    /* Few rows. NULL if the processor does not have their instructions. */
    void (*few)(void *job, size_t task);
    void (*spread)(const float *x, int64_t count, float inverse, int32_t zero, uint8_t *high, uint8_t *low);
} elsa_integer_kernels;

/* Those for this processor, or NULL. */
const elsa_integer_kernels *elsa_integers(void);
#if ELSA_X86
extern const elsa_integer_kernels elsa_integers_avx512, elsa_integers_vbmi2; /* without and with `few` */
#endif

enum {
    ELSA_FEW_WIDE = 4, /* rows of x that are rounded to 16 bits; more, to 8 */
    ELSA_MOST_FEW = 12,
};

/* As elsa_multiply_integers, for few rows of x and 8 bits. */
bool elsa_multiply_few(elsa_layer *, const elsa_host *, const float *x, int64_t rows, const float *sum, float *y);

/* Its weights. */
bool elsa_quantise_few(elsa_plan *p, const elsa_layer *, const elsa_host *);

/* A stored value as a float. */
static inline float elsa_number(const elsa_layer *layer, int64_t i)
{
    if (!layer->half)
        return ((const float *)layer->values)[i];
    union { uint32_t bits; float number; } u = {(uint32_t)((const uint16_t *)layer->values)[i] << 16};
    return u.number;
}

/* As elsa_column, without a call for most. */
static inline int64_t elsa_column_of(const elsa_layer *layer, int64_t r, int64_t i)
{
    return layer->columns ? layer->columns[i] : elsa_column(layer, r, i);
}

/* Where share `i` of `count` equal shares of the whole begins. */
static inline int64_t elsa_share_of(int64_t whole, size_t i, size_t count)
{
    return (int64_t)((uint64_t)whole * i / count);
}

/* Scale, and what to multiply by, of numbers in steps; false if they are not for integers. Bits as range gives them.
 * Without `zero`, 0 is in their middle. */
bool elsa_scale_of(int32_t highest, uint32_t lowest, float steps, float *scale, float *inverse, int32_t *zero);

/* Whether a weight is for integers. */
bool elsa_suits(float weight);

/* Give a plan its weights as integers. Without any (p->values), floats are to do it. */
void elsa_quantise(elsa_plan *p, const elsa_layer *, const elsa_geometry *, const elsa_host *);

/* As elsa_multiply, in integers. False if floats are to do it: they gain nothing, the instructions are missing,
 * memory is, or the input or the weights have NaN, infinities or sizes below 2^-60 or above 2^60. */
bool elsa_multiply_integers(elsa_layer *, const elsa_geometry *, const elsa_host *, const float *x,
                            const float *sum, float *y);

#endif
