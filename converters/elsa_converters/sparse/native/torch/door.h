/* What Python calls, by way of ctypes, for PyTorch: pack dense weights, check packed ones, run them.
 *
 * A matrix is cut into parts of columns, one after the other in all arrays: bounds[parts + 1] says where. Numbers
 * are float, or, if `half`, bfloat16 as the upper halves of floats. */
#ifndef ELSA_SPARSE_DOOR_H
#define ELSA_SPARSE_DOOR_H

#include "../sparse.h"

/* What was checked of each part. */
typedef struct elsa_door elsa_door;

/* Fills starts[parts][outputs + 1], from 0 in each part. Kept is what is neither 0 nor -0, by its bits: so is a
 * denormal, whatever the processor's mode. A row has at least one value, if need be a zero.
 * How many values there are, or -1 if they are too many for a part's numbers. */
ELSA_EXPORTED int64_t elsa_count(const void *dense, int half, int64_t outputs, int64_t parts,
                                 const int64_t *bounds, int32_t *starts);

/* Fills what elsa_count has counted. */
ELSA_EXPORTED void elsa_pack(const void *dense, int half, int64_t outputs, int64_t parts,
                             const int64_t *bounds, const int32_t *starts, uint16_t *columns,
                             void *values);

/* The other way round, into zeros, for arrays that elsa_open has taken. */
ELSA_EXPORTED void elsa_unpack(const int32_t *starts, const uint16_t *columns, const void *values,
                               int half, int64_t outputs, int64_t parts, const int64_t *bounds,
                               void *dense);

/* Shape: outputs, channels, the kernel's 2 sides, 2 strides, 4 pads. NULL, with what is wrong, if the arrays
 * are not what the kernels rely on; they stay the caller's. */
ELSA_EXPORTED elsa_door *elsa_open(const int64_t *shape, int64_t parts, const int64_t *bounds, int half,
                                   const int32_t *starts, const uint16_t *columns, const void *values,
                                   int64_t count, const char **wrong);
ELSA_EXPORTED void elsa_close(elsa_door *);

/* Rows next to each other, of as many numbers as there are columns; y has `outputs` in a row. bias may be
 * NULL. What is wrong, or NULL. */
ELSA_EXPORTED const char *elsa_linear(elsa_door *, const void *x, int half, int64_t rows,
                                      const float *bias, void *y, int64_t threads);
ELSA_EXPORTED const char *elsa_conv2d(elsa_door *, const void *x, int half, int64_t batch,
                                      int64_t height, int64_t width, const float *bias, void *y,
                                      int64_t threads);

#endif
