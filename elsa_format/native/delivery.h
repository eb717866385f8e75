/* Payloads of delivery files (delivery-1.0 §5 to §7), without Python: one table of functions for
 * each word width.
 *
 * Callers have checked n <= 2^20, that mantissa and bits fit the width, and the sizes of all
 * arrays. What is in a payload is checked here; what is wrong with it is told in words. */
#ifndef ELSA_DELIVERY_H
#define ELSA_DELIVERY_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "streams.h"

enum { ELSA_LARGEST_BLOCK = 1 << 20 };

/* What the words of a block are: `mantissa` is 0 for a dtype that carries no counters, and `bits` 0
 * for a plain block. */
typedef struct {
    unsigned mantissa, bits, levels;
} elsa_words;

typedef struct {
    /* The words with the counters first, first + 1, … of a nested block, where levels + 1 stands for
     * the counter 0, into `words`, where words that are left are 0; from `first` = 1 on they need
     * not be so before. Sets `stored` if the block is a stored one, which `first` = 1 alone finds. */
    const char *(*decode_nested)(const uint8_t *data, const elsa_i64 *sizes, size_t count,
                                 unsigned first, void *words, size_t n, elsa_words of,
                                 uint8_t *scratch, int *stored);
    const char *(*decode_plain)(const uint8_t *data, size_t size, void *words, size_t n,
                                elsa_words of, uint8_t *scratch);
    /* The payloads of a nested block in all parts, one after the other; their sizes. */
    size_t (*encode_nested)(const void *words, size_t n, elsa_words of, uint8_t *out,
                            elsa_i64 *sizes, uint8_t *scratch);
    size_t (*encode_plain)(const void *words, size_t n, elsa_words of, uint8_t *out,
                           uint8_t *scratch);
} elsa_delivery;

/* Call once, before any other. */
void elsa_fill_delivery_tables(void);

/* For words of 1, 2, 4 or 8 bytes. */
const elsa_delivery *elsa_delivery_for(size_t itemsize);

/* Bytes of scratch memory for n words, and of the output of encoding them: all payloads of a block
 * that is not stored, and one payload that makes it so. */
size_t elsa_delivery_scratch(size_t n, size_t itemsize);
size_t elsa_delivery_room(size_t n, size_t itemsize);

#endif
