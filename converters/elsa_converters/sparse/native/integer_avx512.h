/* What the table in integer_avx512.c takes from other files. */
#ifndef ELSA_SPARSE_INTEGER_AVX512_H
#define ELSA_SPARSE_INTEGER_AVX512_H

#include <stddef.h>
#include <stdint.h>

void elsa_spread_avx512(const float *x, int64_t count, float inverse, int32_t zero, uint8_t *high, uint8_t *low);
void elsa_few_avx512(void *job, size_t task);

#endif
