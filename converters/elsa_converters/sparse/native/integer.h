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

typedef struct {
    /* The largest bits of floats, seen as signed integers and as unsigned ones. */
    void (*range)(const float *x, int64_t count, int32_t *highest, uint32_t *lowest);
    elsa_integer_kernel words, bytes; /* of 16 and 8 bits */
} elsa_integer_kernels;

/* Those for this processor, or NULL. */
const elsa_integer_kernels *elsa_integers(void);
#if ELSA_X86
extern const elsa_integer_kernels elsa_integers_avx512;
#endif

/* Give a plan its weights as integers. Without any (p->values), floats are to do it. */
void elsa_quantise(elsa_plan *p, const elsa_layer *, const elsa_geometry *, const elsa_host *);

/* As elsa_multiply, in integers. False if floats are to do it: they gain nothing, the instructions are missing,
 * memory is, or the input or the weights have NaN, infinities or sizes below 2^-60 or above 2^60. */
bool elsa_multiply_integers(elsa_layer *, const elsa_geometry *, const elsa_host *, const float *x,
                            const float *sum, float *y);

#endif
