/* Byte streams of delivery files (delivery-1.0 §8): raw, constant, or in a canonical Huffman code.
 *
 * What is wrong with a stream is told in words; NULL is for nothing. */
#ifndef ELSA_STREAMS_H
#define ELSA_STREAMS_H

#include <stddef.h>
#include <stdint.h>

enum {
    ELSA_SLACK = 64, /* bytes that may be written behind an output, or read behind decoded bytes */
};

/* A payload, field after field. */
typedef struct {
    const uint8_t *at, *end;
} elsa_fields;

static inline size_t elsa_left(const elsa_fields *fields)
{
    return (size_t)(fields->end - fields->at);
}

extern const char elsa_too_short[];

const char *elsa_read_varint(elsa_fields *fields, uint64_t *number);
uint8_t *elsa_write_varint(uint8_t *out, uint64_t number);

/* The n bytes of a stream: where they lie in the payload, or decoded into `room`, which has n +
 * ELSA_SLACK bytes. */
const char *elsa_read_stream(elsa_fields *fields, size_t n, uint8_t *room, const uint8_t **bytes);

/* How a Writer codes a stream, found before it is written. */
typedef struct {
    unsigned type;
    size_t size;     /* bytes in all, the type included */
    size_t parts[4]; /* bytes of the bit streams */
    unsigned last;
    uint8_t lengths[256];
} elsa_stream;

void elsa_plan_stream(const uint8_t *bytes, size_t n, elsa_stream *stream);

/* Writes `size` bytes, and up to ELSA_SLACK bytes of nothing behind them. */
uint8_t *elsa_write_stream(const uint8_t *bytes, size_t n, const elsa_stream *stream, uint8_t *out);

/* The lengths of a Writer's code, for two symbols or more that occur (ELSA-D-037). */
void elsa_code_lengths(const uint32_t count[256], uint8_t lengths[256]);

/* The bits that the lengths of symbols 0…last take in a stream (ELSA-D-038). */
size_t elsa_lengths_bits(const uint8_t lengths[256], unsigned last);

#endif
