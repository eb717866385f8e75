/* Words of one WIDTH for one instruction set. Arithmetic is on uint64_t where WORD is narrower than
 * int, or the width of a shift depends on it. */

/* A word is put together as sign | magnitude | rest | counter; all but WORD is the same for a payload. */
typedef struct {
    unsigned shift;  /* s: bits below the magnitude */
    unsigned tau;    /* bits of the counter */
    unsigned rest;   /* R: bits of each rest */
    uint64_t top, counter;
    size_t escapes;
    const uint8_t *distances, *escape, *planes[8], *packed;
} NAME(values);

/* Find the fields of k words (ELSA-D-029 to ELSA-D-031). */
static const char *NAME(read_values)(elsa_fields *fields, size_t k, unsigned counter, elsa_words of,
                                     const decode_memory *memory, NAME(values) * found)
{
    if (elsa_left(fields) < 1)
        return elsa_too_short;
    const unsigned h = *fields->at++;
    const char *wrong;
    *found = (NAME(values)){.tau = of.bits, .counter = counter, .rest = WIDTH - of.bits};
    if (h != WHOLE) {
        if (h > MOST_BITS || of.mantissa == 0 || h + of.bits > of.mantissa)
            return "an h that its words cannot have";
        found->shift = of.mantissa - h;
        found->rest = found->shift - of.bits + 1;
        if ((wrong = elsa_read_varint(fields, &found->top)) != NULL)
            return wrong;
        if (found->top >> (WIDTH - 1 - found->shift) != 0)
            return "a top that is no magnitude of its words";
        if ((wrong = elsa_read_stream(fields, k, memory->bytes, &found->distances)) != NULL)
            return wrong;
        size_t escapes;
        if (farthest(found->distances, k, &escapes) > found->top)
            return "a distance that is larger than the top";
        found->escapes = escapes;
        found->escape = fields->at;
        if (elsa_left(fields) / sizeof(WORD) < escapes)
            return elsa_too_short;
        fields->at += escapes * sizeof(WORD);
        const uint64_t mask = ((uint64_t)1 << of.bits) - 1;
        for (size_t i = 0; i < escapes; i++)
            if ((((const WORD *)(const void *)found->escape)[i] & mask) != counter)
                return "an escape with another counter";
    }
    for (unsigned p = 0; p < found->rest / 8; p++)
        if ((wrong = elsa_read_stream(fields, k, memory->planes[p], &found->planes[p])) != NULL)
            return wrong;
    const size_t bits = k * (found->rest % 8), size = (bits + 7) / 8;
    if (elsa_left(fields) < size)
        return elsa_too_short;
    found->packed = fields->at;
    fields->at += size;
    if (bits % 8 != 0 && found->packed[size - 1] >> (bits % 8) != 0)
        return "unused bits of the rest are set";
    return NULL;
}

/* Narrow words have no vector shift by a variable, but are multiplied quickly; wide ones are not. */
#if WIDTH <= 16
#define SHIFTED(word, bits) ((WORD)((word) * (WORD)(1u << (bits))))
#else
#define SHIFTED(word, bits) ((WORD)((WORD)(word) << (bits)))
#endif

/* Magnitude, rest and counter in one word. The sign is above the rest, at the lowest bit of the
 * magnitude: where it is set, it is added where it belongs and taken away from there. */
INLINE WORD NAME(join)(const NAME(values) * from, WORD rest, uint8_t distance)
{
    const WORD low = (WORD)((uint64_t)1 << from->shift), high = (WORD)((uint64_t)1 << (WIDTH - 1));
    const WORD magnitude = SHIFTED((WORD)((WORD)from->top - distance), from->shift);
    const WORD below = SHIFTED(rest, from->tau);
    const WORD sign = (WORD)((below & low) == low ? (WORD)(high - low) : 0);
    return (WORD)((WORD)(magnitude + below) + (WORD)(sign + (WORD)from->counter));
}

/* The rests: their planes, and the fields above them. */
TARGET static void NAME(join_rests)(const NAME(values) * from, size_t start, size_t n,
                                    const uint8_t *restrict fields, WORD *restrict out)
{
    const unsigned planes = from->rest / 8, above = planes == sizeof(WORD) ? 0 : 8 * planes;
    for (size_t i = 0; i < n; i++)
        out[i] = (WORD)((uint64_t)fields[i] << above); /* 0 if there are none */
    for (unsigned p = 0; p < planes; p++) {
        const uint8_t *restrict plane = from->planes[p] + start;
        for (size_t i = 0; i < n; i++)
            out[i] = (WORD)(out[i] | (WORD)((WORD)plane[i] << 8 * p));
    }
}

/* Escapes in the place of words whose distance is 255; behind those that were used. */
TARGET static const uint8_t *NAME(put_escapes)(const uint8_t *distances, size_t n,
                                               const uint8_t *escape, WORD *restrict out)
{
    enum { GROUP = 64 }; /* distances, seldom with an escape */
    size_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        uint8_t any = 0;
        for (size_t j = 0; j < GROUP; j++)
            any |= (uint8_t)(distances[i + j] == 255);
        for (size_t j = 0; any && j < GROUP; j += 8)
            for (uint64_t left = find_escapes(load_bits(distances + i + j)); left; left &= left - 1) {
                memcpy(&out[i + j + lowest_bit(left) / 8], escape, sizeof(WORD));
                escape += sizeof(WORD);
            }
    }
    for (; i < n; i++)
        if (distances[i] == 255) {
            memcpy(&out[i], escape, sizeof(WORD));
            escape += sizeof(WORD);
        }
    return escape;
}

/* Words start..start + n of a payload. */
TARGET static void NAME(join_values)(const NAME(values) * from, size_t k, size_t start, size_t n,
                                     const uint8_t **escape, WORD *restrict out)
{
    uint8_t fields[CHUNK];
    const NAME(values) of = *from; /* which nothing that is written here changes */
    const unsigned planes = of.rest / 8, above = of.rest % 8;
    if (above > 0) {
        const size_t size = (k * above + 7) / 8, skip = start / 8 * above;
        unpack_bits(of.packed + skip, size - skip, above, n, fields);
    } else
        memset(fields, 0, n);
    if (of.distances == NULL) {
        NAME(join_rests)(from, start, n, fields, out);
        for (size_t i = 0; i < n; i++)
            out[i] = (WORD)(out[i] << of.tau | (WORD)of.counter);
        return;
    }
    const uint8_t *restrict distances = of.distances + start;
    /* In one pass where there are few planes, as of F32 and BF16. */
    if (planes == 0)
        for (size_t i = 0; i < n; i++)
            out[i] = NAME(join)(&of, fields[i], distances[i]);
#if WIDTH == 32
    else if (planes == 2) {
        const uint8_t *restrict low = of.planes[0] + start, *restrict high = of.planes[1] + start;
        for (size_t i = 0; i < n; i++) {
            const WORD rest = (WORD)fields[i] << 16 | (WORD)high[i] << 8 | low[i];
            out[i] = NAME(join)(&of, rest, distances[i]);
        }
    }
#endif
    else {
        NAME(join_rests)(from, start, n, fields, out);
        for (size_t i = 0; i < n; i++)
            out[i] = NAME(join)(&of, out[i], distances[i]);
    }
    if (of.escapes > 0)
        *escape = NAME(put_escapes)(distances, n, *escape, out);
}

/* All words of a block. */
TARGET static void NAME(put_all)(const NAME(values) * from, size_t n, WORD *words)
{
    const uint8_t *escape = from->escape;
    for (size_t start = 0; start < n; start += CHUNK)
        NAME(join_values)(from, n, start, n - start < CHUNK ? n - start : CHUNK, &escape,
                          words + start);
}

/* Few words, each at its place. If all others are 0, these are set just ahead, so that each line of
 * memory is touched once. */
TARGET static void NAME(put_some)(const NAME(values) * from, size_t k, const uint32_t *places,
                                  WORD *words, size_t n, bool first)
{
    enum { AT_ONCE = 64 };
    WORD chunk[CHUNK];
    const uint8_t *escape = from->escape;
    size_t zeroed = 0;
    for (size_t start = 0; start < k; start += CHUNK) {
        const size_t size = k - start < CHUNK ? k - start : CHUNK;
        NAME(join_values)(from, k, start, size, &escape, chunk);
        for (size_t i = 0; i < size;) {
            const size_t end = size - i < AT_ONCE ? size : i + AT_ONCE;
            if (first) {
                const size_t next = places[start + end - 1] + 1;
                memset(words + zeroed, 0, (next - zeroed) * sizeof(WORD));
                zeroed = next;
            }
            for (; i < end; i++)
                words[places[start + i]] = chunk[i];
        }
    }
    if (first)
        memset(words + zeroed, 0, (n - zeroed) * sizeof(WORD));
}

TARGET static void NAME(find_places)(const uint8_t *taken, size_t n, uint32_t *places)
{
    list_bits(taken, n, places);
}

/* Many words: the gaps between them are opened eight at a time; what is there has no bit in common. */
TARGET static void NAME(put_many)(const NAME(values) * from, size_t k, const uint8_t *taken,
                                  WORD *words, size_t n)
{
    WORD joined[2 * CHUNK], opened[CHUNK];
    const elsa_kernels *kernels = elsa_kernels_for(sizeof(WORD));
    const uint8_t *escape = from->escape;
    size_t start = 0, ready = 0;
    for (size_t at = 0; at < n; at += CHUNK) {
        const size_t size = n - at < CHUNK ? n - at : CHUNK;
        if (ready < size && start < k) {
            const size_t more = k - start < CHUNK ? k - start : CHUNK;
            NAME(join_values)(from, k, start, more, &escape, joined + ready);
            start += more;
            ready += more;
        }
        const size_t used = kernels->expand(taken + at / 8, joined, ready, opened, size);
        for (size_t i = 0; i < size; i++)
            words[at + i] = (WORD)(words[at + i] | opened[i]);
        ready -= used;
        memmove(joined, joined + used, ready * sizeof(WORD));
    }
}

static const char *NAME(decode_plain)(const uint8_t *data, size_t size, void *words, size_t n,
                                      elsa_words of, uint8_t *scratch)
{
    const decode_memory memory = for_decoding(on_a_line(scratch), n, sizeof(WORD));
    elsa_fields fields = {data, data + size};
    NAME(values) found;
    of.bits = 0;
    const char *wrong = NAME(read_values)(&fields, n, 0, of, &memory, &found);
    if (wrong == NULL && fields.at != fields.end)
        wrong = "bytes behind the last field";
    if (wrong == NULL)
        NAME(put_all)(&found, n, words);
    return wrong;
}

/* A block on its way from level to level. */
typedef struct {
    WORD *words;
    size_t n;
    elsa_words of;
    remaining left;
    bool is_fresh; /* nothing was put yet, not even zeros */
} NAME(block);

static void NAME(clear)(NAME(block) * block)
{
    if (block->is_fresh)
        memset(block->words, 0, block->n * sizeof(WORD));
    block->is_fresh = false;
}

/* The words of a stored block that the level has; all of them for the dense network (ELSA-D-022). */
static const char *NAME(decode_stored)(elsa_fields *fields, uint64_t k, WORD *words, size_t n,
                                       elsa_words of, unsigned level)
{
    const WORD *stored = (const WORD *)(const void *)fields->at;
    const uint64_t mask = ((uint64_t)1 << of.bits) - 1;
    size_t ones = 0, highest = 0;
    if (elsa_left(fields) != n * sizeof(WORD))
        return "a stored block of another size";
    for (size_t i = 0; i < n; i++) {
        const size_t counter = (size_t)(stored[i] & mask);
        ones += counter == 1;
        highest = counter > highest ? counter : highest;
        words[i] = level > of.levels || (counter > 0 && counter <= level) ? stored[i] : 0;
    }
    return ones != k || highest > of.levels ? "other counters than those of a stored block" : NULL;
}

/* A word that is taken has a counter, and is not 0. */
TARGET static void NAME(find_left)(const WORD *words, size_t n, remaining *left)
{
    const size_t size = bitmap_size(n);
    for (size_t i = 0; i < size; i++) {
        unsigned byte = 0;
        for (size_t j = 0; j < 8 && 8 * i + j < n; j++)
            byte |= (unsigned)(words[8 * i + j] == 0) << j;
        left->bits[i] = (uint8_t)byte;
    }
    memset(left->bits + size, 0, TAIL);
    left->count = bits_set(left->bits, size);
    left->all = left->count == n;
}

/* One payload of a block that is not stored, behind k. */
static const char *NAME(decode_payload)(elsa_fields *fields, uint64_t k, unsigned counter,
                                        NAME(block) * block, bool is_last,
                                        const decode_memory *memory)
{
    remaining *const left = &block->left;
    const size_t n = block->n;
    if (k > left->count || (counter == 0 && k != left->count))
        return "another number of words than are left";
    bool listed;
    const char *wrong = read_positions(fields, (size_t)k, left, n, is_last, memory, &listed);
    NAME(values) found;
    if (wrong == NULL)
        wrong = NAME(read_values)(fields, (size_t)k, counter, block->of, memory, &found);
    if (wrong == NULL && fields->at != fields->end)
        wrong = "bytes behind the last field";
    if (wrong != NULL)
        return wrong;
    if (k == n)
        NAME(put_all)(&found, n, block->words);
    else if (are_few((size_t)k, n)) {
        if (!listed)
            NAME(find_places)(memory->taken, n, memory->places);
        NAME(put_some)(&found, (size_t)k, memory->places, block->words, n, block->is_fresh);
    } else {
        NAME(clear)(block);
        NAME(put_many)(&found, (size_t)k, memory->taken, block->words, n);
    }
    block->is_fresh = false;
    return NULL;
}

static const char *NAME(decode_nested)(const uint8_t *data, const elsa_i64 *sizes, size_t count,
                                       unsigned first, void *into, size_t n, elsa_words of,
                                       uint8_t *scratch, int *stored)
{
    const decode_memory memory = for_decoding(on_a_line(scratch), n, sizeof(WORD));
    NAME(block) block = {into, n, of, {memory.left, n, true}, first == 1};
    *stored = 0;
    if (first > 1)
        NAME(find_left)(block.words, n, &block.left);
    else
        set_all(block.left.bits, n);
    for (size_t i = 0; i < count; i++) {
        const unsigned level = first + (unsigned)i, counter = level > of.levels ? 0 : level;
        elsa_fields fields = {data, data + sizes[i]};
        data = fields.end;
        if (sizes[i] == 0) {
            if (counter == 0 && block.left.count > 0)
                return "words that are in no part";
            continue;
        }
        uint64_t k;
        const char *wrong = elsa_read_varint(&fields, &k);
        if (wrong != NULL)
            return wrong;
        if (counter == 1 && elsa_left(&fields) > 0 && *fields.at == STORED) {
            fields.at++;
            *stored = 1;
            block.left.count = 0;
            block.is_fresh = false;
            wrong = NAME(decode_stored)(&fields, k, block.words, n, of, first + (unsigned)count - 1);
        } else
            wrong = NAME(decode_payload)(&fields, k, counter, &block, i + 1 == count, &memory);
        if (wrong != NULL)
            return wrong;
    }
    NAME(clear)(&block);
    return NULL;
}

/* --- Encoding ---------------------------------------------------------------------------------- */

/* The h of a Writer, and `top` with it (ELSA-D-032). */
TARGET static unsigned NAME(plan_values)(const WORD *words, size_t k, elsa_words of,
                                         uint32_t *table, uint64_t *top)
{
    if (of.mantissa == 0)
        return WHOLE;
    const unsigned finest =
        of.mantissa - of.bits < MOST_BITS ? of.mantissa - of.bits : (unsigned)MOST_BITS;
    const unsigned shift = of.mantissa - finest;
    const uint64_t mask = ((uint64_t)1 << (WIDTH - 1)) - 1;
    WORD largest = 0;
    for (size_t i = 0; i < k; i++) {
        const WORD magnitude = (WORD)(words[i] & (WORD)mask);
        largest = magnitude > largest ? magnitude : largest;
    }
    const size_t highest = (size_t)((uint64_t)largest >> shift);
    memset(table, 0, (highest + 1) * sizeof *table);
    for (size_t i = 0; i < k; i++)
        table[(size_t)((uint64_t)(words[i] & (WORD)mask) >> shift)]++;
    const unsigned h = choose_h(table, highest, k, WIDTH, finest, of);
    *top = h == WHOLE ? 0 : (uint64_t)largest >> (of.mantissa - h);
    return h;
}

TARGET static void NAME(split_distances)(const WORD *words, size_t k, unsigned shift, uint64_t top,
                                         uint8_t *out)
{
    const WORD mask = (WORD)(((uint64_t)1 << (WIDTH - 1)) - 1), highest = (WORD)top;
    for (size_t i = 0; i < k; i++) {
        const WORD distance = (WORD)(highest - (WORD)((words[i] & mask) >> shift));
        out[i] = (uint8_t)(distance < 255 ? distance : 255);
    }
}

/* Bits at..at + 7 of the rests, R of them in all, the sign being the highest unless R is W - tau. */
TARGET static void NAME(split_rest)(const WORD *words, size_t k, unsigned at, unsigned bits,
                                    unsigned tau, uint8_t *out)
{
    const unsigned low = at + tau;
    if (at + 8 < bits || bits == WIDTH - tau) {
        for (size_t i = 0; i < k; i++)
            out[i] = (uint8_t)(words[i] >> low);
        return;
    }
    /* The field with the sign, which stands above those below it. */
    const unsigned below = bits - 1 - at;
    const WORD mask = (WORD)((1u << below) - 1);
    for (size_t i = 0; i < k; i++)
        out[i] = (uint8_t)(((words[i] >> low) & mask) | (words[i] >> (WIDTH - 1)) << below);
}

static uint8_t *NAME(write_stream)(const uint8_t *bytes, size_t n, uint8_t *out)
{
    elsa_stream stream;
    elsa_plan_stream(bytes, n, &stream);
    return elsa_write_stream(bytes, n, &stream, out);
}

static uint8_t *NAME(write_values)(const WORD *words, size_t k, elsa_words of,
                                   const encode_memory *memory, uint8_t *out)
{
    uint64_t top = 0;
    const unsigned h = NAME(plan_values)(words, k, of, memory->table, &top);
    unsigned bits = WIDTH - of.bits;
    *out++ = (uint8_t)h;
    if (h != WHOLE) {
        const unsigned shift = of.mantissa - h;
        bits = shift - of.bits + 1;
        out = elsa_write_varint(out, top);
        NAME(split_distances)(words, k, shift, top, memory->bytes);
        out = NAME(write_stream)(memory->bytes, k, out);
        for (size_t i = 0; i < k; i++)
            if (memory->bytes[i] == 255) {
                memcpy(out, &words[i], sizeof(WORD));
                out += sizeof(WORD);
            }
    }
    unsigned at = 0;
    for (; at + 8 <= bits; at += 8) {
        NAME(split_rest)(words, k, at, bits, of.bits, memory->fields);
        out = NAME(write_stream)(memory->fields, k, out);
    }
    if (at < bits) {
        NAME(split_rest)(words, k, at, bits, of.bits, memory->fields);
        out = pack_bits(memory->fields, k, bits - at, out);
    }
    return out;
}

static size_t NAME(encode_plain)(const void *words, size_t n, elsa_words of, uint8_t *out,
                                 uint8_t *scratch)
{
    const encode_memory memory = for_encoding(on_a_line(scratch), n, sizeof(WORD));
    of.bits = 0;
    return (size_t)(NAME(write_values)(words, n, of, &memory, out) - out);
}

static size_t NAME(write_stored)(const WORD *words, size_t n, size_t k, uint8_t *out)
{
    uint8_t *const start = out;
    out = elsa_write_varint(out, k);
    *out++ = STORED;
    memcpy(out, words, n * sizeof(WORD));
    return (size_t)(out + n * sizeof(WORD) - start);
}

/* The words that are taken, k of n, one after the other. */
TARGET static void NAME(collect)(const WORD *words, size_t n, size_t k, uint8_t counter,
                                 const encode_memory *memory, WORD *out)
{
    if (k < n / MANY) {
        for (size_t base = 0; base < n; base += 64)
            for (uint64_t bits = load_bits(memory->taken + base / 8); bits; bits &= bits - 1)
                *out++ = words[base + lowest_bit(bits)];
        return;
    }
    for (size_t i = 0, used = 0; i < n; i++) {
        out[used] = words[i]; /* there is room for one more */
        used += memory->counters[i] == counter;
    }
}

static size_t NAME(encode_nested)(const void *from, size_t n, elsa_words of, uint8_t *out,
                                  elsa_i64 *sizes, uint8_t *scratch)
{
    const encode_memory memory = for_encoding(on_a_line(scratch), n, sizeof(WORD));
    const WORD *const words = from, mask = (WORD)((1u << of.bits) - 1);
    const size_t most = most_of_a_block(n * sizeof(WORD));
    int64_t counts[256] = {0};
    elsa_kernels_for(sizeof(WORD))->count(words, n, of.bits, counts);
    for (size_t i = 0; i < n; i++)
        memory.counters[i] = (uint8_t)(words[i] & mask);
    set_all(memory.left, n);
    uint8_t *end = out;
    size_t left = n, checksums = 0;
    for (size_t part = 0; part <= of.levels; part++) {
        const uint8_t counter = (uint8_t)(part < of.levels ? part + 1 : 0);
        const size_t k = (size_t)counts[counter];
        uint8_t *const start = end;
        if (k > 0) {
            find_counter(memory.counters, n, counter, memory.taken);
            end = elsa_write_varint(end, k);
            end = write_positions(&memory, n, left, k, end);
            NAME(collect)(words, n, k, counter, &memory, memory.values);
            end = NAME(write_values)(memory.values, k, of, &memory, end);
            left -= k;
            checksums += CHECKSUM;
        }
        sizes[part] = end - start;
        if ((size_t)(end - out) + checksums > most) {
            memset(sizes, 0, (of.levels + 1) * sizeof *sizes);
            sizes[0] = (int64_t)NAME(write_stored)(words, n, (size_t)counts[1], out);
            return (size_t)sizes[0];
        }
    }
    return (size_t)(end - out);
}

static const elsa_delivery NAME(delivery) = {NAME(decode_nested), NAME(decode_plain),
                                             NAME(encode_nested), NAME(encode_plain)};

#undef SHIFTED
#undef WIDTH
#undef WORD
