#include "streams.h"

#include <stdbool.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ELSA_PLAIN)
#define ELSA_X86 1
#endif

enum {
    LONGEST = 12,           /* bits of a codeword */
    LENGTHS = LONGEST + 1,  /* that a codeword may have, and that of none */
    WINDOWS = 1 << LONGEST, /* each begins with one codeword */
    AT_ONCE = 4,            /* symbols from one load: 4 * 12 bits and 7 that were used before */
    FILLED = 6 + 8,         /* bytes that those 55 bits pass at most, and those of the next load */
    TOO_SHORT = 8,          /* no bit of a byte */
};

const char elsa_too_short[] = "a payload that ends within a field";

const char *elsa_read_varint(elsa_fields *fields, uint64_t *number)
{
    *number = 0;
    for (unsigned i = 0; i < 9; i++) {
        if (fields->at == fields->end)
            return elsa_too_short;
        const uint8_t byte = *fields->at++;
        *number |= (uint64_t)(byte & 127) << (7 * i);
        if (byte < 128)
            return byte == 0 && i > 0 ? "a varint with more bytes than it needs" : NULL;
    }
    return "a varint of 2^63 or more";
}

uint8_t *elsa_write_varint(uint8_t *out, uint64_t number)
{
    for (; number >= 128; number >>= 7)
        *out++ = (uint8_t)(number | 128);
    *out++ = (uint8_t)number;
    return out;
}

static size_t varint_size(uint64_t number)
{
    size_t size = 1;
    for (; number >= 128; number >>= 7)
        size++;
    return size;
}

/* How many of n symbols each of the four bit streams has (ELSA-D-038). */
static void quarters(size_t n, size_t counts[4])
{
    const size_t q = (n + 3) / 4;
    for (size_t i = 0; i < 4; i++) {
        counts[i] = n < q ? n : q;
        n -= counts[i];
    }
}

/* --- Codes ------------------------------------------------------------------------------------ */

/* By rising count, byte by byte of it; what is equal keeps its order, which is that of symbols. */
static void sort(uint32_t *leaves, size_t n)
{
    uint32_t sorted[256];
    for (unsigned shift = 8; shift < 32; shift += 8) {
        uint16_t places[257] = {0};
        for (size_t i = 0; i < n; i++)
            places[(leaves[i] >> shift & 255) + 1]++;
        if (places[1] == n)
            continue;
        for (size_t byte = 1; byte < 256; byte++)
            places[byte] = (uint16_t)(places[byte] + places[byte - 1]);
        for (size_t i = 0; i < n; i++)
            sorted[places[leaves[i] >> shift & 255]++] = leaves[i];
        memcpy(leaves, sorted, n * sizeof *leaves);
    }
}

void elsa_code_lengths(const uint32_t count[256], uint8_t lengths[256])
{
    uint32_t halved[256];
    memcpy(halved, count, sizeof halved);
    for (;;) {
        /* Leaves are (count, symbol) in one number: a block has at most 2^20 words. */
        uint32_t leaves[256], weights[512];
        uint16_t parents[512];
        size_t n = 0;
        for (uint32_t symbol = 0; symbol < 256; symbol++)
            if (halved[symbol])
                leaves[n++] = halved[symbol] << 8 | symbol;
        sort(leaves, n);
        for (size_t i = 0; i < n; i++)
            weights[i] = leaves[i] >> 8;
        /* Trees follow the leaves in the order in which they are made; both queues rise. */
        size_t leaf = 0, tree = n, end = n;
        for (; end < 2 * n - 1; end++) {
            uint32_t sum = 0;
            for (int twice = 0; twice < 2; twice++) {
                const bool is_leaf = leaf < n && (tree == end || weights[leaf] <= weights[tree]);
                const size_t taken = is_leaf ? leaf++ : tree++;
                sum += weights[taken];
                parents[taken] = (uint16_t)end;
            }
            weights[end] = sum;
        }
        uint8_t depths[512], deepest = 0;
        depths[end - 1] = 0;
        memset(lengths, 0, 256);
        for (size_t i = end - 1; i-- > 0;) {
            depths[i] = (uint8_t)(depths[parents[i]] + 1);
            if (i < n) {
                lengths[leaves[i] & 255] = depths[i];
                deepest = depths[i] > deepest ? depths[i] : deepest;
            }
        }
        if (deepest <= LONGEST)
            return;
        for (size_t symbol = 0; symbol < 256; symbol++)
            halved[symbol] = (halved[symbol] + 1) >> 1;
    }
}

/* The codewords of symbols 0…last, the bit that is read first lowest (ELSA-D-036). */
static void codewords(const uint8_t lengths[256], unsigned last, uint16_t codes[256])
{
    unsigned next[LONGEST + 2] = {0}, counts[LONGEST + 1] = {0};
    for (unsigned symbol = 0; symbol <= last; symbol++)
        counts[lengths[symbol]]++;
    counts[0] = 0;
    for (unsigned length = 1; length <= LONGEST; length++)
        next[length + 1] = (next[length] + counts[length]) << 1;
    for (unsigned symbol = 0; symbol <= last; symbol++) {
        unsigned code = next[lengths[symbol]]++, reversed = 0;
        for (unsigned bit = 0; bit < lengths[symbol]; bit++, code >>= 1)
            reversed = reversed << 1 | (code & 1);
        codes[symbol] = (uint16_t)reversed;
    }
}

/* The list in which lengths have their places, at first; one that occurs moves to the front, so that
 * those which occur often have few bits (ELSA-D-038). */
static const uint8_t first_lengths[LENGTHS] = {4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 3, 2, 1};

static void to_front(uint8_t list[LENGTHS], unsigned place)
{
    const uint8_t length = list[place];
    memmove(list + 1, list, place);
    list[0] = length;
}

static unsigned place_in(uint8_t list[LENGTHS], uint8_t length)
{
    unsigned place = 0;
    while (list[place] != length)
        place++;
    to_front(list, place);
    return place;
}

size_t elsa_lengths_bits(const uint8_t lengths[256], unsigned last)
{
    uint8_t list[LENGTHS];
    size_t bits = 0;
    memcpy(list, first_lengths, sizeof list);
    for (unsigned symbol = 0; symbol <= last; symbol++)
        bits += place_in(list, lengths[symbol]) + 1;
    return bits;
}

/* --- Reading ---------------------------------------------------------------------------------- */

/* A bit stream on its way: the next bit is `bit` (0…7) of the byte at `at`. */
typedef struct {
    const uint8_t *at;
    unsigned bit;
} place;

INLINE unsigned leading_zeros(uint64_t bits)
{
#if defined(__GNUC__)
    return (unsigned)__builtin_clzll(bits);
#else
    unsigned zeros = 0;
    for (unsigned half = 32; half > 0; half /= 2)
        if (bits >> (64 - half) == 0) {
            zeros += half;
            bits <<= half;
        }
    return zeros;
#endif
}

INLINE uint64_t window(const place *p, const uint8_t *end)
{
    uint64_t bits = 0;
    const size_t left = (size_t)(end - p->at);
    memcpy(&bits, p->at, left < 8 ? left : 8);
    return bits >> p->bit;
}

/* For every window of 12 bits the symbol that it begins with, and below it the bits that this takes. */
typedef uint16_t table[WINDOWS];

/* The next symbol, and then the bits behind it. */
#define SYMBOL(bits, out)                                                                          \
    do {                                                                                           \
        const unsigned found = symbols[(bits) & (WINDOWS - 1)];                                    \
        (out) = (uint8_t)(found >> 8);                                                             \
        (bits) >>= found & 63;                                                                     \
    } while (0)

/* A bit stream in the quick loop. Bit 63 of eight bytes that are loaded is replaced by a mark, which
 * moves down with every bit that is used, so that these need not be counted. */
typedef struct {
    const uint8_t *at; /* of the bytes that were loaded */
    uint64_t bits;
} reservoir;

static const uint64_t MARK = (uint64_t)1 << 63;

INLINE unsigned bits_used(const reservoir *r)
{
    return leading_zeros(r->bits);
}

INLINE void fill(reservoir *r)
{
    const unsigned used = bits_used(r);
    uint64_t bits;
    r->at += used / 8;
    memcpy(&bits, r->at, 8);
    r->bits = (bits | MARK) >> used % 8;
}

INLINE place place_of(const reservoir *r)
{
    const unsigned used = bits_used(r);
    return (place){r->at + used / 8, used % 8};
}

/* As many symbols of each stream as `counts`; where they end is not looked at before the last one
 * is read, but nothing behind `end` is: a stream that is too short gives nonsense until then. */
INLINE void decode(const uint16_t *restrict symbols, place places[4], const size_t counts[4],
                   uint8_t *restrict out, const uint8_t *end)
{
    const size_t q = counts[0];
    size_t done = 0;
    if (end - places[0].at >= FILLED) {
        reservoir a = {places[0].at, MARK}, b = {places[1].at, MARK}, c = {places[2].at, MARK},
                  d = {places[3].at, MARK};
        const uint8_t *const last = end - FILLED;
        while (done + AT_ONCE <= counts[3] && a.at <= last && b.at <= last && c.at <= last &&
               d.at <= last) {
            fill(&a);
            fill(&b);
            fill(&c);
            fill(&d);
            for (size_t i = 0; i < AT_ONCE; i++, done++) {
                SYMBOL(a.bits, out[done]);
                SYMBOL(b.bits, out[q + done]);
                SYMBOL(c.bits, out[2 * q + done]);
                SYMBOL(d.bits, out[3 * q + done]);
            }
        }
        places[0] = place_of(&a), places[1] = place_of(&b);
        places[2] = place_of(&c), places[3] = place_of(&d);
    }
    for (size_t s = 0; s < 4; out += counts[s++])
        for (size_t i = done; i < counts[s]; i++) {
            if (places[s].at >= end) {
                places[s].bit = TOO_SHORT; /* even if all codewords so far fill their bytes */
                break;
            }
            const unsigned found = symbols[window(&places[s], end) & (WINDOWS - 1)];
            out[i] = (uint8_t)(found >> 8);
            places[s].bit += found & 63;
            places[s].at += places[s].bit / 8;
            places[s].bit %= 8;
        }
}

static void decode_plain(const uint16_t *symbols, place places[4], const size_t counts[4],
                         uint8_t *out, const uint8_t *end)
{
    decode(symbols, places, counts, out, end);
}

#if ELSA_X86
/* Shifts by any register, without waiting for flags. */
__attribute__((target("bmi,bmi2,lzcnt"))) static void decode_bmi2(const uint16_t *symbols,
                                                            place places[4],
                                                            const size_t counts[4], uint8_t *out,
                                                            const uint8_t *end)
{
    decode(symbols, places, counts, out, end);
}
#endif

/* A table of `length` bits is that of one bit less twice, but for the codewords of this length: a
 * shorter one is followed by either bit. The code being complete, every entry is set in the end. */
static void fill_table(const uint8_t lengths[256], unsigned last, uint16_t *symbols)
{
    uint16_t codes[256];
    uint8_t sorted[256];
    unsigned ends[LONGEST + 1] = {0};
    codewords(lengths, last, codes);
    for (unsigned symbol = 0; symbol <= last; symbol++)
        ends[lengths[symbol]]++;
    ends[0] = 0;
    for (unsigned length = 1; length <= LONGEST; length++)
        ends[length] += ends[length - 1];
    const unsigned count = ends[LONGEST];
    for (unsigned symbol = last + 1; symbol-- > 0;)
        if (lengths[symbol])
            sorted[--ends[lengths[symbol]]] = (uint8_t)symbol; /* ends become starts */
    unsigned next = 0;
    symbols[0] = 0;
    for (unsigned length = 1; length <= LONGEST; length++) {
        const size_t half = (size_t)1 << (length - 1);
        memcpy(symbols + half, symbols, half * sizeof *symbols);
        for (; next < count && lengths[sorted[next]] == length; next++)
            symbols[codes[sorted[next]]] = (uint16_t)((unsigned)sorted[next] << 8 | length);
    }
}

static const char *read_lengths(elsa_fields *fields, unsigned last, uint8_t lengths[256])
{
    uint8_t list[LENGTHS];
    place p = {fields->at, 0};
    memcpy(list, first_lengths, sizeof list);
    for (unsigned symbol = 0; symbol <= last; symbol++) {
        const uint64_t bits = window(&p, fields->end); /* and zeros behind the end */
        unsigned place = 0;
        while (bits >> place & 1)
            place++;
        if (place >= LENGTHS)
            return "a length that is not in the list";
        p.bit += place + 1;
        p.at += p.bit / 8;
        p.bit %= 8;
        if (p.at > fields->end || (p.at == fields->end && p.bit > 0))
            return elsa_too_short;
        to_front(list, place);
        lengths[symbol] = list[0];
    }
    if (p.bit > 0 && *p.at >> p.bit != 0)
        return "unused bits of the lengths are set";
    fields->at = p.at + (p.bit > 0);
    return NULL;
}

static const char *read_code(elsa_fields *fields, uint16_t *symbols)
{
    if (elsa_left(fields) < 1)
        return elsa_too_short;
    const unsigned last = *fields->at++;
    uint8_t lengths[256] = {0};
    const char *wrong = read_lengths(fields, last, lengths);
    if (wrong != NULL)
        return wrong;
    unsigned used = 0, filled = 0;
    for (unsigned symbol = 0; symbol <= last; symbol++) {
        used += lengths[symbol] > 0;
        filled += lengths[symbol] > 0 ? (unsigned)WINDOWS >> lengths[symbol] : 0;
    }
    if (lengths[last] == 0)
        return "another last symbol than the code has";
    if (used < 2 || filled != WINDOWS)
        return "codewords that do not fill the code";
    fill_table(lengths, last, symbols);
    return NULL;
}

static const char *read_huffman(elsa_fields *fields, size_t n, uint8_t *out)
{
    table symbols;
    const char *wrong = read_code(fields, symbols);
    uint64_t sizes[4];
    for (size_t s = 0; s < 4 && wrong == NULL; s++)
        wrong = elsa_read_varint(fields, &sizes[s]);
    if (wrong != NULL)
        return wrong;
    place places[4];
    const uint8_t *ends[4];
    for (size_t s = 0; s < 4; s++) {
        if (sizes[s] > elsa_left(fields))
            return elsa_too_short;
        places[s] = (place){fields->at, 0};
        ends[s] = fields->at += sizes[s];
    }
    size_t counts[4];
    quarters(n, counts);
#if ELSA_X86
    if (__builtin_cpu_supports("bmi2"))
        decode_bmi2(symbols, places, counts, out, fields->end);
    else
#endif
        decode_plain(symbols, places, counts, out, fields->end);
    for (size_t s = 0; s < 4; s++) {
        const place p = places[s];
        if (counts[s] == 0 ? sizes[s] != 0 : p.at + (p.bit > 0) != ends[s] || p.bit == TOO_SHORT)
            return "a bit stream that is not as long as its codewords";
        if (p.bit > 0 && *p.at >> p.bit != 0)
            return "unused bits of a bit stream are set";
    }
    return NULL;
}

const char *elsa_read_stream(elsa_fields *fields, size_t n, uint8_t *room, const uint8_t **bytes)
{
    *bytes = room;
    if (n == 0)
        return NULL;
    if (elsa_left(fields) < 1)
        return elsa_too_short;
    switch (*fields->at++) {
    case 0:
        if (elsa_left(fields) < n)
            return elsa_too_short;
        *bytes = fields->at;
        fields->at += n;
        return NULL;
    case 1:
        if (elsa_left(fields) < 1)
            return elsa_too_short;
        memset(room, *fields->at++, n);
        return NULL;
    case 2: return read_huffman(fields, n, room);
    default: return "a byte stream of unknown type";
    }
}

/* --- Writing ---------------------------------------------------------------------------------- */

void elsa_plan_stream(const uint8_t *bytes, size_t n, elsa_stream *stream)
{
    /* Counted by quarters: four counts at a time wait less for one another, and the size of every
     * bit stream is known before it is written. */
    uint32_t counts[4][256] = {{0}}, total[256];
    size_t sizes[4];
    quarters(n, sizes);
    const uint8_t *quarter[4] = {bytes, bytes + sizes[0], bytes + sizes[0] + sizes[1],
                                 bytes + sizes[0] + sizes[1] + sizes[2]};
    for (size_t i = 0; i < sizes[3]; i++)
        for (size_t s = 0; s < 4; s++)
            counts[s][quarter[s][i]]++;
    for (size_t s = 0; s < 3; s++)
        for (size_t i = sizes[3]; i < sizes[s]; i++)
            counts[s][quarter[s][i]]++;
    unsigned used = 0;
    stream->last = 0;
    for (unsigned symbol = 0; symbol < 256; symbol++) {
        total[symbol] = counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
        if (total[symbol]) {
            used++;
            stream->last = symbol;
        }
    }
    if (used <= 1) {
        stream->type = 1;
        stream->size = n == 0 ? 0 : 2;
        return;
    }
    elsa_code_lengths(total, stream->lengths);
    size_t coded = 1 + (elsa_lengths_bits(stream->lengths, stream->last) + 7) / 8;
    for (size_t s = 0; s < 4; s++) {
        uint64_t bits = 0;
        for (unsigned symbol = 0; symbol <= stream->last; symbol++)
            bits += (uint64_t)counts[s][symbol] * stream->lengths[symbol];
        stream->parts[s] = (size_t)((bits + 7) / 8);
        coded += varint_size(stream->parts[s]) + stream->parts[s];
    }
    stream->type = coded < n ? 2 : 0;
    stream->size = 1 + (coded < n ? coded : n);
}

/* Of each symbol the codeword, and its length above it. */
static uint8_t *write_bits(const uint8_t *bytes, size_t n, const uint32_t codes[256], uint8_t *out)
{
    uint64_t pending = 0;
    unsigned bits = 0;
    size_t i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) {
        const uint32_t a = codes[bytes[i]], b = codes[bytes[i + 1]], c = codes[bytes[i + 2]],
                       d = codes[bytes[i + 3]];
        const uint64_t ab = (a & 0xffff) | (uint64_t)(b & 0xffff) << (a >> 16);
        const uint64_t cd = (c & 0xffff) | (uint64_t)(d & 0xffff) << (c >> 16);
        const unsigned first = (a >> 16) + (b >> 16);
        pending |= (ab | cd << first) << bits;
        bits += first + (c >> 16) + (d >> 16);
        memcpy(out, &pending, 8);
        out += bits / 8;
        pending >>= bits & ~7u; /* at most 48 + 7 bits */
        bits &= 7;
    }
    for (; i < n; i++) {
        const uint32_t a = codes[bytes[i]];
        pending |= (uint64_t)(a & 0xffff) << bits;
        bits += a >> 16;
        while (bits >= 8) {
            *out++ = (uint8_t)pending;
            pending >>= 8;
            bits -= 8;
        }
    }
    if (bits > 0)
        *out++ = (uint8_t)pending;
    return out;
}

static uint8_t *write_lengths(const uint8_t lengths[256], unsigned last, uint8_t *out)
{
    uint8_t list[LENGTHS];
    unsigned pending = 0, bits = 0;
    memcpy(list, first_lengths, sizeof list);
    for (unsigned symbol = 0; symbol <= last; symbol++) {
        const unsigned place = place_in(list, lengths[symbol]);
        pending |= ((1u << place) - 1) << bits;
        for (bits += place + 1; bits >= 8; bits -= 8, pending >>= 8)
            *out++ = (uint8_t)pending;
    }
    if (bits > 0)
        *out++ = (uint8_t)pending;
    return out;
}

uint8_t *elsa_write_stream(const uint8_t *bytes, size_t n, const elsa_stream *stream, uint8_t *out)
{
    if (n == 0)
        return out;
    *out++ = (uint8_t)stream->type;
    if (stream->type == 1) {
        *out++ = bytes[0];
        return out;
    }
    if (stream->type == 0) {
        memcpy(out, bytes, n);
        return out + n;
    }
    uint16_t words[256];
    uint32_t codes[256];
    codewords(stream->lengths, stream->last, words);
    *out++ = (uint8_t)stream->last;
    out = write_lengths(stream->lengths, stream->last, out);
    for (unsigned symbol = 0; symbol <= stream->last; symbol++)
        codes[symbol] = (uint32_t)stream->lengths[symbol] << 16 | words[symbol];
    for (size_t s = 0; s < 4; s++)
        out = elsa_write_varint(out, stream->parts[s]);
    size_t counts[4];
    quarters(n, counts);
    for (size_t s = 0; s < 4; s++) {
        out = write_bits(bytes, counts[s], codes, out);
        bytes += counts[s];
    }
    return out;
}
