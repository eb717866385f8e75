/* The inner loops, compiled for every set of instructions. */
#ifndef ELSA_SPARSE_KERNELS_H
#define ELSA_SPARSE_KERNELS_H

#include "sparse.h"

/* Rows of weights times vectors: a part of a matrix product with few rows. */
typedef struct {
    const elsa_layer *layer;
    const float *x, *sum;
    float *y;
    int64_t rows, pitch; /* of x, one vector each */
    const float *wide; /* n:m: x, spread where the kernel wants it so */
    size_t tasks;
} elsa_gemv;

/* Weights times a matrix of many columns.
 *
 * The input is a number of planes, each with `length` columns at x + plane * length, or, transposed,
 * columns at x + column * pitch. A task takes a block of columns and some rows of weights. It walks
 * over the planes in chunks that fit the first-level cache: packs a window of each plane, then adds up
 * what each row has in the chunk. */
typedef struct {
    const elsa_layer *layer;
    const elsa_plan *plan;
    const elsa_host *host;
    const float *x, *sum;
    float *y;
    int64_t columns; /* of the output, with the gaps between rows of a picture */
    int64_t pitch;   /* of the input, transposed */
    size_t row_parts, blocks;
    atomic_bool failed; /* no memory */
} elsa_spmm;

struct elsa_plan {
    int64_t key[2], bits;
    bool transposed;  /* x and y have the columns outermost */
    int64_t length;   /* of an input plane */
    int64_t planes;
    int64_t pitch, width; /* a picture's row in the input planes, and in the output */
    int64_t area;     /* outputs of a row of weights */
    int64_t vectors;  /* of columns in a block */
    int64_t segments, segment; /* a plane's window: as many pieces of so many columns, pitch apart */
    int64_t chunks, chunk; /* chunks of so many planes */
    int32_t *parts;    /* [chunks + 1][outputs]: where in the values a row's part of a chunk begins */
    uint16_t *offsets; /* of each value's input in the packed chunk */
    int shift;         /* without offsets: an input begins at (column - the chunk's first) << shift */

    /* For integers, see integer.c: parts are [chunks][outputs] and one more, counted in groups of values. */
    void *values;
    float *scales;   /* of 16 bits: [chunks][outputs]; of 8: [outputs] */
    int32_t *totals; /* of 8 bits: the sum of a row */
    uint64_t *masks; /* for few rows of x: which columns have values, a bit each, 64 at a time */
};

typedef struct {
    const char *name;
    int64_t width;        /* floats in a vector */
    int64_t lanes;        /* for which x is spread for n:m; 0 if it is taken as it is */
    int64_t most_vectors; /* accumulators of a row */
    void (*gemv[2])(void *, size_t); /* for floats, for halves */
    void (*nm[2])(void *, size_t);
    void (*spmm[2])(void *, size_t);
} elsa_kernels;

extern const elsa_kernels elsa_kernels_base;
#if defined(__GNUC__) && defined(__x86_64__)
#define ELSA_X86 1
extern const elsa_kernels elsa_kernels_avx2, elsa_kernels_avx512;
#endif

/* Those for this processor. */
const elsa_kernels *elsa_chosen(void);

enum { ELSA_LINE = 16 }; /* floats in a cache line */

/* Column of value i in row r. */
uint32_t elsa_column(const elsa_layer *, int64_t r, int64_t i);

/* The values of rows r and up begin here. */
static inline int64_t elsa_start(const elsa_layer *layer, int64_t r)
{
    return layer->starts ? layer->starts[r] : r * (elsa_columns(layer) / layer->m * layer->n);
}

#endif
