/* The inner loops over weights, without Python: one table of functions for each word width.
 *
 * Callers have checked every size; the loops check what depends on the data (room for kept
 * values, columns, row ends). Pointers need not be aligned: tensors lie anywhere in a file. */
#ifndef ELSA_KERNELS_H
#define ELSA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Words are read through types that may be unaligned and may alias (they are often floats). */
#if defined(__GNUC__)
#define ELSA_ANYWHERE __attribute__((aligned(1), may_alias))
#else
#define ELSA_ANYWHERE /* MSVC's targets read unaligned words, and it assumes no strict aliasing */
#endif
typedef uint16_t elsa_u16 ELSA_ANYWHERE;
typedef uint32_t elsa_u32 ELSA_ANYWHERE;
typedef uint64_t elsa_u64 ELSA_ANYWHERE;
typedef int32_t elsa_i32 ELSA_ANYWHERE;
typedef int64_t elsa_i64 ELSA_ANYWHERE;

#define ELSA_FAILED SIZE_MAX /* more values than room, or fewer than bits */
#define ELSA_MAX_LEVELS 255

/* A block of a row-major matrix, and where its CSR form goes. */
typedef struct {
    size_t row, col, cols; /* where the block starts */
    int64_t kept;          /* words kept before it */
    void *indptr, *indices;
    size_t index_size; /* 4 or 8 bytes */
} elsa_csr_block;

typedef enum { ELSA_CSR_OK, ELSA_CSR_INDPTR, ELSA_CSR_COLUMN, ELSA_CSR_ORDER } elsa_csr_error;

typedef struct {
    const char *isa; /* the instruction set that they need */
    size_t (*mask)(const void *src, void *dst, size_t n, unsigned bits, unsigned level);
    void (*count)(const void *src, size_t n, unsigned bits, elsa_i64 *out);
    size_t (*compact)(const void *src, size_t n, unsigned bits, unsigned level, uint8_t *bitmask,
                      void *values, size_t room);
    size_t (*csr)(const void *src, size_t n, unsigned bits, unsigned level,
                  const elsa_csr_block *block, void *values, size_t room);
    size_t (*expand)(const uint8_t *bitmask, const void *values, size_t available, void *dst,
                     size_t n);
    elsa_csr_error (*expand_csr)(const void *indptr, const void *indices, size_t index_size,
                                 const void *values, size_t rows, size_t cols, size_t kept,
                                 void *dst);
    size_t (*embed)(const void *src, const uint8_t *counters, void *dst, size_t n, unsigned bits,
                    uint64_t inf, unsigned levels, bool nearest); /* as find_unpackable */
    size_t (*find_unpackable)(const void *src, const uint8_t *counters, size_t n, uint64_t inf,
                              unsigned levels); /* n if there is none */
    size_t (*nest)(const void *dense, const void *sparse, unsigned level, uint8_t *counters,
                   size_t n); /* n if all is nested */
    void (*histogram)(const void *src, size_t n, unsigned shift, unsigned width,
                      const elsa_u64 *prefixes, size_t rows, elsa_u64 *out);
    void (*assign)(const void *src, size_t n, const elsa_u64 *thresholds, elsa_i64 *ties,
                   size_t levels, uint8_t *counters);
} elsa_kernels;

/* Call once, before any kernel. */
void elsa_fill_tables(void);

/* The fastest functions this processor can run, for words of 2, 4 or 8 bytes. */
const elsa_kernels *elsa_kernels_for(size_t itemsize);

#endif
