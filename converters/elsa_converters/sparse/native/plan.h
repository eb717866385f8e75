/* Geometry of a product, and the plan for it. */
#ifndef ELSA_SPARSE_PLAN_H
#define ELSA_SPARSE_PLAN_H

#include "sparse.h"

#define ELSA_NO_MEMORY "out of memory"

typedef struct {
    int64_t key[2]; /* tells it from the same layer's others */
    int64_t bits;   /* of the integers to multiply; 0: floats */
    bool transposed;
    int64_t vectors; /* in a block; 0 to choose what suits the columns */
    int64_t columns, length, pitch, width, area; /* as in elsa_plan */
    int64_t phases[2]; /* planes that a channel is split into by the strides */
    int64_t taps[2];   /* rows and columns of the kernel in one of them */
} elsa_geometry;

elsa_plan *elsa_planned(elsa_layer *, const elsa_geometry *, const elsa_host *, bool *kept);
void elsa_unplan(elsa_plan *);

/* Whether a plan is there, or would be kept. */
bool elsa_keeps(elsa_layer *, const elsa_geometry *);

/* Windows for blocks of so many vectors, in chunks of about so many bytes; false if a chunk were too large. */
bool elsa_cut(elsa_plan *, const elsa_geometry *, int64_t vectors, int64_t width, int64_t chunk,
              int64_t element);

/* A column of weights: the plane of its input, and where in its chunk that begins. */
typedef struct {
    int64_t plane, offset;
} elsa_place;

elsa_place elsa_place_of(const elsa_layer *, const elsa_geometry *, const elsa_plan *, int64_t column);

/* Run it for so many columns; sum and y begin at the output's first one. What is wrong, or NULL. */
const char *elsa_multiply(elsa_layer *, const elsa_plan *, const elsa_host *, int64_t columns,
                          const float *x, const float *sum, float *y);

/* How many tasks are worth it for so many multiplications. */
size_t elsa_tasks(double work);

#endif
