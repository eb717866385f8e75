/* Geometry of a product, and the plan for it. */
#ifndef ELSA_SPARSE_PLAN_H
#define ELSA_SPARSE_PLAN_H

#include "sparse.h"

#define ELSA_NO_MEMORY "out of memory"

typedef struct {
    int64_t key[2]; /* tells it from the same layer's others */
    bool transposed;
    int64_t columns, length, pitch, width, area; /* as in elsa_plan */
    int64_t phases[2]; /* planes that a channel is split into by the strides */
    int64_t taps[2];   /* rows and columns of the kernel in one of them */
} elsa_geometry;

elsa_plan *elsa_planned(elsa_layer *, const elsa_geometry *, bool *kept);
void elsa_unplan(elsa_plan *);

/* Run it; sum and y begin at the output's first column. What is wrong, or NULL. */
const char *elsa_multiply(elsa_layer *, const elsa_plan *, const elsa_host *, const float *x,
                          const float *sum, float *y);

/* How many tasks are worth it for so many multiplications. */
size_t elsa_tasks(double work);

#endif
