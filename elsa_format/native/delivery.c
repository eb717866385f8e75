#include "delivery.h"

#include <stdbool.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ELSA_PLAIN)
#define ELSA_X86 1
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

enum {
    STORED = 4,    /* the mode of a stored block */
    WHOLE = 255,   /* the h of words that are not split */
    MOST_BITS = 5, /* of the mantissa in a distance */
    CHUNK = 2048,  /* words put together at a time: they stay in the first-level cache */
    MANY = 4,      /* one in so many words, from which on opening gaps is quicker (measured) */
    LARGEST_TABLE = 1 << 16, /* of magnitudes: exponents of 11 bits, and 5 of the mantissa */
};

static uint64_t load_bits(const uint8_t *bytes)
{
    uint64_t bits;
    memcpy(&bits, bytes, 8);
    return bits;
}

#if ELSA_X86
#define BMI2 __attribute__((target("bmi,bmi2,popcnt")))

/* The first two Zens do these in microcode, more slowly than tables. */
static bool has_bmi2(void)
{
    return __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("znver1") &&
           !__builtin_cpu_is("znver2");
}

BMI2 static void unpack_bmi2(const uint8_t *packed, unsigned b, size_t n, uint8_t *out)
{
    const uint64_t mask = ((1u << b) - 1) * (uint64_t)0x0101010101010101;
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t spread = _pdep_u64(load_bits(packed + i / 8 * b), mask);
        memcpy(out + i, &spread, 8);
    }
}
#endif

static void unpack_plain(const uint8_t *packed, unsigned b, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t bits = load_bits(packed + i / 8 * b);
        uint64_t spread = 0;
        for (unsigned j = 0; j < 8; j++)
            spread |= (bits >> (j * b) & ((1u << b) - 1)) << (8 * j);
        memcpy(out + i, &spread, 8);
    }
}

/* Fields that do not fill a byte: b highest bits of each rest, from bit 0 of the first byte on. */
static void unpack_bits(const uint8_t *packed, size_t size, unsigned b, size_t n, uint8_t *out)
{
    /* Eight fields are b bytes; eight bytes are loaded for them. */
    const size_t loads = size < 8 ? 0 : (size - 8) / b + 1;
    const size_t quick = (n / 8 < loads ? n / 8 : loads) * 8;
#if ELSA_X86
    if (has_bmi2())
        unpack_bmi2(packed, b, quick, out);
    else
#endif
        unpack_plain(packed, b, quick, out);
    for (size_t i = quick; i < n; i++) {
        const size_t bit = i * b, byte = bit / 8;
        const unsigned both = packed[byte] | (byte + 1 < size ? (unsigned)packed[byte + 1] << 8 : 0);
        out[i] = (uint8_t)(both >> bit % 8 & ((1u << b) - 1));
    }
}

static uint8_t *pack_bits(const uint8_t *fields, size_t n, unsigned b, uint8_t *out)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t bits = 0;
        for (unsigned j = 0; j < 8; j++)
            bits |= (uint64_t)fields[i + j] << (j * b);
        memcpy(out, &bits, 8); /* what is too much is overwritten, or slack */
        out += b;
    }
    uint64_t bits = 0;
    for (unsigned j = 0; i + j < n; j++)
        bits |= (uint64_t)fields[i + j] << (j * b);
    memcpy(out, &bits, 8);
    return out + ((n - i) * b + 7) / 8;
}

/* --- Tables ----------------------------------------------------------------------------------- */

/* The bits set in every byte; and for a byte as a mask: where the lowest bits of another go if they
 * take the places of those set, and the way back. */
static uint8_t bit_counts[256], deposits[256][256], extracts[256][256];

void elsa_fill_delivery_tables(void)
{
    for (unsigned mask = 0; mask < 256; mask++)
        for (unsigned byte = 0; byte < 256; byte++) {
            unsigned used = 0, spread = 0, joined = 0;
            for (unsigned place = 0; place < 8; place++)
                if (mask >> place & 1) {
                    spread |= (byte >> used & 1) << place;
                    joined |= (byte >> place & 1) << used++;
                }
            deposits[mask][byte] = (uint8_t)spread;
            extracts[mask][byte] = (uint8_t)joined;
            bit_counts[mask] = (uint8_t)used;
        }
}

/* --- Memory ------------------------------------------------------------------------------------ */

static size_t rounded(size_t size)
{
    return (size + ELSA_SLACK + 63) / 64 * 64;
}

/* What decoding needs, and encoding. */
typedef struct {
    uint8_t *left, *marks, *taken; /* bitmaps */
    uint32_t *places;              /* of few words */
    uint8_t *bytes;                /* gaps, then distances */
    uint8_t *planes[8];            /* of the rests */
} decode_memory;

typedef struct {
    uint8_t *left, *marks, *taken; /* bitmaps */
    uint32_t *table;               /* of magnitudes */
    void *values;                  /* the words of one counter */
    uint8_t *counters;
    uint8_t *bytes;  /* gaps, then distances */
    uint8_t *fields; /* of the rests */
} encode_memory;

static decode_memory for_decoding(uint8_t *scratch, size_t n, size_t itemsize)
{
    decode_memory memory;
    memory.left = scratch;
    memory.marks = scratch += rounded(n / 8);
    memory.taken = scratch += rounded(n / 8);
    memory.places = (uint32_t *)(void *)(scratch += rounded(n / 8));
    memory.bytes = scratch += rounded(n / MANY * sizeof(uint32_t));
    for (size_t i = 0; i < itemsize; i++)
        memory.planes[i] = scratch += rounded(n);
    return memory;
}

static encode_memory for_encoding(uint8_t *scratch, size_t n, size_t itemsize)
{
    encode_memory memory;
    memory.left = scratch;
    memory.marks = scratch += rounded(n / 8);
    memory.taken = scratch += rounded(n / 8);
    memory.table = (uint32_t *)(void *)(scratch += rounded(n / 8));
    memory.values = scratch += rounded(itemsize == 8 ? 4 * LARGEST_TABLE : 4 << 13);
    memory.counters = scratch += rounded(itemsize * n);
    memory.bytes = scratch += rounded(n);
    memory.fields = scratch += rounded(n);
    return memory;
}

size_t elsa_delivery_scratch(size_t n, size_t itemsize)
{
    const size_t decoding = 3 * rounded(n / 8) + rounded(n / MANY * 4) + (1 + itemsize) * rounded(n);
    const size_t table = rounded(itemsize == 8 ? 4 * LARGEST_TABLE : 4 << 13);
    const size_t encoding = 3 * rounded(n / 8) + table + rounded(itemsize * n) + 3 * rounded(n);
    return (decoding > encoding ? decoding : encoding) + 64; /* it starts on a cache line */
}

enum { CHECKSUM = 8 }; /* bytes before every payload that is not empty */

/* The most bytes that payloads of a block, checksums included, have together (ELSA-D-023). */
static size_t most_of_a_block(size_t size)
{
    return size + size / 1024 + 64;
}

size_t elsa_delivery_room(size_t n, size_t itemsize)
{
    return most_of_a_block(n * itemsize) + n * itemsize + n / 8 + 1024;
}

static uint8_t *on_a_line(uint8_t *scratch)
{
    return scratch + (-(uintptr_t)scratch & 63);
}

/* --- Positions (§6) --------------------------------------------------------------------------- */

/* A set of a block's words is a bitmap, bit i % 8 of byte i / 8; bits from n on, to the end of the
 * 64 that they are in, are 0. */
enum { TAIL = 16 }; /* bytes that are cleared behind a bitmap, for this and to read on */

static size_t bitmap_size(size_t n)
{
    return (n + 7) / 8;
}

INLINE unsigned lowest_bit(uint64_t bits)
{
#if defined(__GNUC__)
    return (unsigned)__builtin_ctzll(bits);
#else
    unsigned place = 0;
    for (; (bits & 1) == 0; bits >>= 1)
        place++;
    return place;
#endif
}

INLINE size_t bits_in(uint64_t bits)
{
#if defined(__GNUC__)
    return (size_t)__builtin_popcountll(bits);
#else
    size_t count = 0;
    for (; bits; bits >>= 8)
        count += bit_counts[bits & 255];
    return count;
#endif
}

static void toggle(uint8_t *bitmap, const uint8_t *by, size_t size)
{
    for (size_t i = 0; i < size; i += 8) {
        const uint64_t bits = load_bits(bitmap + i) ^ load_bits(by + i);
        memcpy(bitmap + i, &bits, 8);
    }
}

static size_t bits_set(const uint8_t *bitmap, size_t size)
{
    size_t count = 0, i = 0;
    for (; i < size; i++)
        count += bit_counts[bitmap[i]];
    return count;
}

/* The words that no payload had so far. */
typedef struct {
    uint8_t *bits;
    size_t count;
    bool all; /* every word of the block */
} remaining;

/* Whether so few of n words are taken that they are put one by one, at their `places`. */
static bool are_few(size_t k, size_t n)
{
    return k < n / MANY;
}

/* Whole words are stored, the last one again and again: reading a byte back to add a bit waits for
 * the store before. */
static void mark_gaps(const uint8_t *gaps, size_t g, uint8_t *bitmap, size_t size)
{
    size_t at = 0, word = 0;
    uint64_t bits = 0;
    memset(bitmap, 0, size);
    for (size_t i = 0; i < g; i++) {
        const unsigned gap = gaps[i], mark = gap != 255;
        at += gap;
        bits &= -(uint64_t)(at / 64 == word); /* no branch: none could be foreseen */
        word = at / 64; /* a step beyond the last word of the block marks none */
        bits |= (uint64_t)mark << at % 64;
        memcpy(bitmap + 8 * word, &bits, 8);
        at += mark;
    }
}

/* The same as a list, which has room for one more than are marked. */
static void list_gaps(const uint8_t *gaps, size_t g, uint32_t *places)
{
    uint32_t at = 0;
    for (size_t i = 0; i < g; i++) {
        const uint32_t gap = gaps[i], mark = gap != 255;
        *places = at + gap;
        places += mark;
        at += gap + mark;
    }
}

/* The places of the bits that are set, of n. Eight are written for any 64 bits, of few words seldom
 * more, so that how many there are is seldom guessed wrongly; the list has room for seven too many. */
INLINE void list_bits(const uint8_t *bitmap, size_t n, uint32_t *places)
{
    for (size_t base = 0; base < n; base += 64) {
        uint64_t bits = load_bits(bitmap + base / 8);
        const size_t count = bits_in(bits);
        for (size_t i = 0; i < count; i += 8)
            for (size_t j = 0; j < 8; j++, bits &= bits - 1)
                places[i + j] = (uint32_t)base + lowest_bit(bits | (uint64_t)1 << 63);
        places += count;
    }
}

/* From marks among the words that are left to marks among all words. */
static void deposit_plain(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
    size_t at = 0;
    for (size_t i = 0; i < size; i++) {
        const unsigned mask = left[i];
        const unsigned both = marks[at / 8] | (unsigned)marks[at / 8 + 1] << 8;
        out[i] = deposits[mask][both >> at % 8 & 255];
        at += bit_counts[mask];
    }
}

/* And back; `out` is cleared before. */
static void extract_plain(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
    size_t at = 0;
    for (size_t i = 0; i < size; i++) {
        const unsigned mask = left[i];
        const unsigned both = (unsigned)extracts[mask][marks[i]] << at % 8;
        out[at / 8] |= (uint8_t)both;
        out[at / 8 + 1] |= (uint8_t)(both >> 8);
        at += bit_counts[mask];
    }
}

#if ELSA_X86
BMI2 static void deposit_bmi2(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
    size_t at = 0;
    for (size_t i = 0; i < size; i += 8) {
        const uint64_t mask = load_bits(left + i);
        const unsigned shift = at % 8;
        uint64_t bits = load_bits(marks + at / 8) >> shift;
        bits |= shift == 0 ? 0 : (uint64_t)marks[at / 8 + 8] << (64 - shift);
        bits = _pdep_u64(bits, mask);
        memcpy(out + i, &bits, 8);
        at += (size_t)_mm_popcnt_u64(mask);
    }
}

BMI2 static void extract_bmi2(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
    size_t at = 0;
    for (size_t i = 0; i < size; i += 8) {
        const uint64_t mask = load_bits(left + i), bits = _pext_u64(load_bits(marks + i), mask);
        const unsigned shift = at % 8;
        const uint64_t joined = load_bits(out + at / 8) | bits << shift;
        memcpy(out + at / 8, &joined, 8);
        out[at / 8 + 8] = (uint8_t)(shift == 0 ? 0 : bits >> (64 - shift));
        at += (size_t)_mm_popcnt_u64(mask);
    }
}

#endif

static void deposit(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
#if ELSA_X86
    if (has_bmi2()) {
        deposit_bmi2(marks, left, size, out);
        return;
    }
#endif
    deposit_plain(marks, left, size, out);
}

static void extract(const uint8_t *marks, const uint8_t *left, size_t size, uint8_t *out)
{
#if ELSA_X86
    if (has_bmi2()) {
        extract_bmi2(marks, left, size, out);
        return;
    }
#endif
    extract_plain(marks, left, size, out);
}

/* All n bits, in whole words of 64. */
static void set_all(uint8_t *bitmap, size_t n)
{
    memset(bitmap, 255, n / 8);
    memset(bitmap + n / 8, 0, TAIL + 1);
    if (n % 8 != 0)
        bitmap[n / 8] = (uint8_t)((1 << n % 8) - 1);
}

/* Read which words are taken, k of those that are left: as a bitmap of all n words, or as a list,
 * or, unless this is the last payload, as both. */
static const char *read_positions(elsa_fields *fields, size_t k, remaining *left, size_t n,
                                  bool is_last, const decode_memory *memory, bool *listed)
{
    const size_t r = left->count, size = bitmap_size(n), marks_size = bitmap_size(r);
    uint8_t *const taken = memory->taken, *const marks = left->all ? taken : memory->marks;
    *listed = false;
    if (elsa_left(fields) < 1)
        return elsa_too_short;
    const unsigned mode = *fields->at++;
    if (k < 1 || k > r || (mode == 0 && k != r) || ((mode == 1 || mode == 2) && k == r))
        return "a number of words that does not fit those that are left";
    if (mode == 0)
        memcpy(taken, left->bits, size + TAIL);
    else if (mode == 1 || mode == 2) {
        uint64_t g;
        const uint8_t *gaps;
        const char *wrong = elsa_read_varint(fields, &g);
        if (wrong == NULL && g > r)
            wrong = "more gaps than words that are left";
        if (wrong == NULL)
            wrong = elsa_read_stream(fields, (size_t)g, memory->bytes, &gaps);
        if (wrong != NULL)
            return wrong;
        uint32_t reach = 0, steps = 0; /* of at most 2^20 gaps */
        for (size_t i = 0; i < g; i++) {
            reach += gaps[i];
            steps += gaps[i] == 255;
        }
        const size_t found = (size_t)g - steps;
        if (g > 0 && gaps[g - 1] == 255)
            return "gaps that end with 255";
        if (reach + found > r)
            return "gaps that lead beyond the words that are left";
        if (found != (mode == 1 ? k : r - k))
            return "another number of gaps than of words";
        if (mode == 1 && left->all && are_few(k, n)) {
            list_gaps(gaps, (size_t)g, memory->places);
            *listed = true;
            if (is_last)
                return NULL;
        }
        mark_gaps(gaps, (size_t)g, marks, marks_size + TAIL);
    } else if (mode == 3) {
        if (elsa_left(fields) < marks_size)
            return elsa_too_short;
        memcpy(marks, fields->at, marks_size);
        memset(marks + marks_size, 0, TAIL);
        fields->at += marks_size;
        if (r % 8 != 0 && marks[marks_size - 1] >> (r % 8) != 0)
            return "unused bits of the positions are set";
        if (bits_set(marks, marks_size) != k)
            return "another number of bits than of words";
    } else
        return "positions of unknown mode";
    if (mode != 0 && !left->all)
        deposit(marks, left->bits, size, taken);
    if (mode == 2)
        toggle(taken, left->bits, size);
    toggle(left->bits, taken, size);
    left->count = r - k;
    left->all = false;
    return NULL;
}

/* Which of n counters are c; `bitmap` has whole words of 64 bits. */
static void find_counter(const uint8_t *counters, size_t n, uint8_t c, uint8_t *bitmap)
{
    const uint64_t ones = 0x0101010101010101, low = 0x7f7f7f7f7f7f7f7f;
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t differ = load_bits(counters + i) ^ c * ones;
        const uint64_t same = ~(((differ & low) + low) | differ | low) >> 7; /* 1 in each byte */
        bitmap[i / 8] = (uint8_t)(same * 0x0102040810204080 >> 56);
    }
    if (n % 8 != 0)
        bitmap[n / 8] &= (uint8_t)((1 << n % 8) - 1);
    memset(bitmap + bitmap_size(n), 0, TAIL);
}

/* The steps to the bits that are set, or to those of r bits that are not. */
static size_t gaps_between(const uint8_t *bitmap, size_t r, bool set, uint8_t *gaps)
{
    size_t g = 0, next = 0;
    for (size_t base = 0; base < r; base += 64) {
        uint64_t bits = load_bits(bitmap + base / 8);
        if (!set)
            bits = ~bits & (r - base < 64 ? ((uint64_t)1 << (r - base)) - 1 : UINT64_MAX);
        for (; bits; bits &= bits - 1) {
            const size_t at = base + lowest_bit(bits);
            size_t gap = at - next;
            for (; gap >= 255; gap -= 255)
                gaps[g++] = 255;
            gaps[g++] = (uint8_t)gap;
            next = at + 1;
        }
    }
    return g;
}

/* Take k of the words that are left, of which r are so. */
static uint8_t *write_positions(const encode_memory *memory, size_t n, size_t r, size_t k,
                                uint8_t *out)
{
    if (k == r) {
        *out++ = 0;
        return out;
    }
    const size_t size = bitmap_size(n), marks_size = bitmap_size(r);
    const uint8_t *marks = memory->taken;
    if (r < n) {
        memset(memory->marks, 0, marks_size + TAIL);
        extract(memory->taken, memory->left, size, memory->marks);
        marks = memory->marks;
    }
    toggle(memory->left, memory->taken, size);
    const bool taken = 2 * k <= r;
    const size_t g = gaps_between(marks, r, taken, memory->bytes);
    elsa_stream stream;
    elsa_plan_stream(memory->bytes, g, &stream);
    uint8_t *const end = elsa_write_varint(out + 1, g);
    if ((size_t)(end - out - 1) + stream.size <= marks_size) {
        *out = taken ? 1 : 2;
        return elsa_write_stream(memory->bytes, g, &stream, end);
    }
    *out++ = 3;
    memcpy(out, marks, marks_size);
    return out + marks_size;
}

/* Which of eight distances are 255: the highest bit of each such byte. */
static uint64_t find_escapes(uint64_t distances)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    return ((distances & low) + 0x0101010101010101) & distances & ~low;
}

/* The largest distance that is one, and the number of escapes. */
static unsigned farthest(const uint8_t *distances, size_t k, size_t *escapes)
{
    enum { COUNTED = 128 }; /* that a byte can count */
    uint8_t next = 0; /* to the largest; that to an escape is 0 */
    size_t i = 0;
    *escapes = 0;
    for (; i + COUNTED <= k; i += COUNTED) {
        uint8_t found = 0;
        for (size_t j = 0; j < COUNTED; j++) {
            const uint8_t after = (uint8_t)(distances[i + j] + 1);
            next = after > next ? after : next;
            found = (uint8_t)(found + (after == 0));
        }
        *escapes += found;
    }
    for (; i < k; i++) {
        const uint8_t after = (uint8_t)(distances[i] + 1);
        next = after > next ? after : next;
        *escapes += after == 0;
    }
    return next == 0 ? 0 : next - 1u;
}

/* --- Choice of h (§7) -------------------------------------------------------------------------- */

/* The expected bits of the words by the histogram of their magnitudes, down from `top` (ELSA-D-032). */
static uint64_t distances_cost(const uint32_t *table, size_t top, size_t k, unsigned width,
                               unsigned rest)
{
    uint32_t count[256] = {0};
    const size_t near = top < 254 ? top + 1 : 255;
    uint64_t escapes = k;
    unsigned used = 0, last = 0;
    for (unsigned d = 0; d < near; d++) {
        count[d] = table[top - d];
        escapes -= count[d];
    }
    count[255] = (uint32_t)escapes;
    for (unsigned d = 0; d < 256; d++)
        if (count[d]) {
            used++;
            last = d;
        }
    uint64_t coded = 0;
    if (used > 1) {
        uint8_t lengths[256];
        elsa_code_lengths(count, lengths);
        for (unsigned d = 0; d <= last; d++)
            coded += (uint64_t)count[d] * lengths[d];
        coded += elsa_lengths_bits(lengths, last) + 64;
        coded = coded < 8 * k ? coded : 8 * k;
    }
    return coded + k * (uint64_t)rest + escapes * width;
}

/* The h of a Writer; the table counts magnitudes with `finest` bits of the mantissa up to `top`. */
static unsigned choose_h(uint32_t *table, size_t top, size_t k, unsigned width, unsigned finest,
                         elsa_words of)
{
    uint64_t best = UINT64_MAX;
    unsigned h = finest, found = WHOLE;
    for (;; h--) {
        const uint64_t cost = distances_cost(table, top, k, width, of.mantissa - h - of.bits + 1);
        if (cost <= best) { /* of equal ones the smallest */
            best = cost;
            found = h;
        }
        if (h == 0)
            break;
        for (size_t q = 0; q <= top / 2; q++)
            table[q] = table[2 * q] + (2 * q < top ? table[2 * q + 1] : 0);
        top /= 2;
    }
    return k * (uint64_t)(width - of.bits) < best ? WHOLE : found;
}

/* delivery_body.h is compiled for every width, in plain C and, on x86, once more with AVX2. */
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(x) JOIN(x, WIDTH, ISA)

#define ISA plain
#define TARGET
#define WIDTH 8
#define WORD uint8_t
#include "delivery_body.h"
#define WIDTH 16
#define WORD elsa_u16
#include "delivery_body.h"
#define WIDTH 32
#define WORD elsa_u32
#include "delivery_body.h"
#define WIDTH 64
#define WORD elsa_u64
#include "delivery_body.h"
#undef ISA
#undef TARGET

#if ELSA_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define WIDTH 8
#define WORD uint8_t
#include "delivery_body.h"
#define WIDTH 16
#define WORD elsa_u16
#include "delivery_body.h"
#define WIDTH 32
#define WORD elsa_u32
#include "delivery_body.h"
#define WIDTH 64
#define WORD elsa_u64
#include "delivery_body.h"
#endif

const elsa_delivery *elsa_delivery_for(size_t itemsize)
{
#if ELSA_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
        return itemsize == 1   ? &delivery_8_avx2
               : itemsize == 2 ? &delivery_16_avx2
               : itemsize == 4 ? &delivery_32_avx2
                               : &delivery_64_avx2;
#endif
    return itemsize == 1   ? &delivery_8_plain
           : itemsize == 2 ? &delivery_16_plain
           : itemsize == 4 ? &delivery_32_plain
                           : &delivery_64_plain;
}
