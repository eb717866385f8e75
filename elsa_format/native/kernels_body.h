/* The loops for one word width and one instruction set; kernels.c includes this file for each.
 * Takes WIDTH, WORD, ISA, TARGET and AVX2; gives the table kernels_<WIDTH>_<ISA>. */

#define SIGN ((WORD)((WORD)1 << (WIDTH - 1)))
#define ABSOLUTE ((WORD)(SIGN - 1))
#define LOW(bits) ((WORD)((1u << (bits)) - 1))

/* The type of local arrays: gcc vectorises no loop over arrays whose elements may be unaligned. */
#define UINT_(width) uint##width##_t
#define UINT(width) UINT_(width)
#define LOCAL UINT(WIDTH)

/* Counter 0 wraps round to the largest word, so that one comparison decides. */
#define KEPT(w) ((WORD)(((w)&low) - 1) < top)

#if AVX2
#define JOIN_EPI_(name, width) name##_epi##width
#define JOIN_EPI(name, width) JOIN_EPI_(name, width)
#define EPI(name) JOIN_EPI(name, WIDTH)
#if WIDTH == 64
#define SPREAD(w) _mm256_set1_epi64x((int64_t)(w))
#elif WIDTH == 32
#define SPREAD(w) _mm256_set1_epi32((int32_t)(w))
#else
#define SPREAD(w) _mm256_set1_epi16((int16_t)(w))
#endif

/* All ones where a word is kept: KEPT with the order shifted, as AVX2 compares signed words. */
#define KEPT_LANES(w)                                                                              \
    EPI(_mm256_cmpgt)                                                                              \
    (SPREAD(SIGN + top), EPI(_mm256_add)(_mm256_and_si256(w, SPREAD(low)), SPREAD(ABSOLUTE)))
#endif

TARGET static size_t NAME(mask)(const void *source, void *target, size_t n, unsigned bits,
                                unsigned level)
{
    const WORD *src = source;
    WORD *dst = target;
    const WORD low = LOW(bits), top = (WORD)level;
    size_t i = 0, kept = 0;
#if AVX2
    const size_t lanes = 32 / sizeof *dst;
    size_t kept_bytes = 0;
    /* What is larger than the cache goes past it: two thirds of the traffic, as in memcpy. */
    if (n >= STREAMED / sizeof *dst && dst != src && (uintptr_t)dst % sizeof *dst == 0) {
        for (; (uintptr_t)(dst + i) % 32 != 0; i++) {
            kept += KEPT(src[i]);
            dst[i] = KEPT(src[i]) ? src[i] : 0;
        }
        for (; n - i >= lanes; i += lanes) {
            __m256i w = _mm256_loadu_si256((const __m256i_u *)(src + i)), k = KEPT_LANES(w);
            kept_bytes += bits_set((unsigned)_mm256_movemask_epi8(k));
            _mm256_stream_si256((__m256i *)(dst + i), _mm256_and_si256(w, k));
        }
        _mm_sfence();
    }
    UNROLLED
    for (; n - i >= lanes; i += lanes) {
        __m256i w = _mm256_loadu_si256((const __m256i_u *)(src + i)), k = KEPT_LANES(w);
        kept_bytes += bits_set((unsigned)_mm256_movemask_epi8(k));
        _mm256_storeu_si256((__m256i_u *)(dst + i), _mm256_and_si256(w, k));
    }
    kept += kept_bytes / sizeof *dst;
#endif
    INDEPENDENT
    for (; i < n; i++) {
        WORD w = src[i];
        kept += KEPT(w);
        dst[i] = KEPT(w) ? w : 0;
    }
    return kept;
}

#if AVX2
/* Add to out[0..3] how many of at most CHUNK bytes equal first, first + 1, ... */
TARGET static void NAME(count_bytes)(const uint8_t *bytes, size_t n, unsigned first, int64_t *out)
{
    /* Sums of one byte per lane, which see at most CHUNK / 32 = 128 bytes each. */
    __m256i lanes[4], wanted[4];
    for (unsigned j = 0; j < 4; j++) {
        lanes[j] = _mm256_setzero_si256();
        wanted[j] = _mm256_set1_epi8((char)(first + j));
    }
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i found = _mm256_loadu_si256((const __m256i_u *)(bytes + i));
        for (unsigned j = 0; j < 4; j++)
            lanes[j] = _mm256_sub_epi8(lanes[j], _mm256_cmpeq_epi8(found, wanted[j]));
    }
    for (unsigned j = 0; j < 4; j++) {
        __m256i sums = _mm256_sad_epu8(lanes[j], _mm256_setzero_si256());
        out[j] += _mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 1) +
                  _mm256_extract_epi64(sums, 2) + _mm256_extract_epi64(sums, 3);
    }
    for (; i < n; i++)
        for (unsigned j = 0; j < 4; j++)
            out[j] += bytes[i] == first + j;
}
#endif

TARGET static void NAME(count)(const void *source, size_t n, unsigned bits, elsa_i64 *out)
{
    const WORD *src = source;
    const WORD low = LOW(bits);
    const unsigned counters = 1u << bits;
    int64_t tables[4][256] = {{0}};
    size_t i = 0;
#if AVX2
    /* Up to 16 counters it is faster to compare with each of them than to look up a table. */
    while (bits <= 4 && i < n) {
        uint8_t chunk[CHUNK];
        const size_t size = smaller(n - i, CHUNK);
        for (size_t j = 0; j < size; j++)
            chunk[j] = (uint8_t)(src[i + j] & low);
        for (unsigned first = 0; first < counters; first += 4)
            NAME(count_bytes)(chunk, size, first, &tables[0][first]);
        i += size;
    }
#endif
    /* Most counters are equal (0): in a single table each increment would wait for the last. */
    for (; n - i >= 4; i += 4)
        for (unsigned j = 0; j < 4; j++)
            tables[j][src[i + j] & low]++;
    for (; i < n; i++)
        tables[0][src[i] & low]++;
    for (unsigned c = 0; c < counters; c++)
        out[c] += tables[0][c] + tables[1][c] + tables[2][c] + tables[3][c];
}

/* Write the kept ones of 8 words next to each other, and undefined words up to the eighth;
 * return which were kept. */
TARGET static inline unsigned NAME(close_gaps)(const WORD *src, WORD *values, WORD low, WORD top)
{
#if AVX2 && WIDTH == 16
    __m128i w = _mm_loadu_si128((const __m128i_u *)src);
    __m128i kept = _mm256_castsi256_si128(KEPT_LANES(_mm256_castsi128_si256(w)));
    unsigned byte = (unsigned)_mm_movemask_epi8(_mm_packs_epi16(kept, _mm_setzero_si128()));
    __m128i even = _mm_loadl_epi64((const __m128i_u *)set_places[byte]);
    even = _mm_add_epi8(even, even);
    __m128i order = _mm_unpacklo_epi8(even, _mm_add_epi8(even, _mm_set1_epi8(1)));
    _mm_storeu_si128((__m128i_u *)values, _mm_shuffle_epi8(w, order));
    return byte;
#elif AVX2 && WIDTH == 32
    __m256i w = _mm256_loadu_si256((const __m256i_u *)src);
    unsigned byte = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(KEPT_LANES(w)));
    __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)set_places[byte]));
    _mm256_storeu_si256((__m256i_u *)values, _mm256_permutevar8x32_epi32(w, order));
    return byte;
#elif AVX2 && WIDTH == 64
    unsigned byte = 0;
    for (unsigned half = 0; half < 8; half += 4) {
        __m256i w = _mm256_loadu_si256((const __m256i_u *)(src + half));
        unsigned bits = (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(KEPT_LANES(w)));
        /* The permutation moves halves of words: places 2p and 2p + 1. */
        __m256i even = _mm256_cvtepu8_epi64(_mm_loadl_epi64((const __m128i_u *)set_places[bits]));
        even = _mm256_add_epi64(even, even);
        __m256i odd = _mm256_slli_epi64(_mm256_add_epi64(even, _mm256_set1_epi64x(1)), 32);
        __m256i closed = _mm256_permutevar8x32_epi32(w, _mm256_or_si256(even, odd));
        _mm256_storeu_si256((__m256i_u *)values, closed);
        values += bits_set(bits);
        byte |= bits << half;
    }
    return byte;
#else
    unsigned byte = 0;
    for (unsigned j = 0; j < 8; j++) {
        WORD w = src[j];
        unsigned kept = KEPT(w);
        *values = w;
        values += kept;
        byte |= kept << j;
    }
    return byte;
#endif
}

/* The reverse: 8 words, the next of the values where a bit is set and zero elsewhere. May read
 * 8 values whatever the bits. */
TARGET static inline void NAME(open_gaps)(unsigned byte, const WORD *values, WORD *dst)
{
#if AVX2 && WIDTH == 16
    __m128i even = _mm_loadl_epi64((const __m128i_u *)set_ranks[byte]);
    even = _mm_add_epi8(even, even);
    __m128i order = _mm_unpacklo_epi8(even, _mm_add_epi8(even, _mm_set1_epi8(1)));
    __m128i w = _mm_loadu_si128((const __m128i_u *)values);
    _mm_storeu_si128((__m128i_u *)dst, _mm_shuffle_epi8(w, order));
#elif AVX2 && WIDTH == 32
    __m256i order = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)set_ranks[byte]));
    __m256i w = _mm256_loadu_si256((const __m256i_u *)values);
    __m256i unset = _mm256_srai_epi32(order, 31);
    __m256i open = _mm256_permutevar8x32_epi32(w, order);
    _mm256_storeu_si256((__m256i_u *)dst, _mm256_andnot_si256(unset, open));
#elif AVX2 && WIDTH == 64
    for (unsigned half = 0; half < 8; half += 4) {
        unsigned bits = byte >> half & 15;
        __m256i even = _mm256_cvtepi8_epi64(_mm_loadl_epi64((const __m128i_u *)set_ranks[bits]));
        __m256i unset = _mm256_cmpgt_epi64(_mm256_setzero_si256(), even);
        even = _mm256_add_epi64(even, even);
        __m256i odd = _mm256_slli_epi64(_mm256_add_epi64(even, _mm256_set1_epi64x(1)), 32);
        __m256i order = _mm256_blend_epi32(even, odd, 0xAA);
        __m256i w = _mm256_loadu_si256((const __m256i_u *)values);
        __m256i open = _mm256_permutevar8x32_epi32(w, order);
        _mm256_storeu_si256((__m256i_u *)(dst + half), _mm256_andnot_si256(unset, open));
        values += bits_set(bits);
    }
#else
    for (unsigned j = 0; j < 8; j++) {
        unsigned set = byte >> j & 1;
        dst[j] = (WORD)(*values & (WORD)(0 - (WORD)set));
        values += set;
    }
#endif
}

/* Eight columns, from a base and the places of the kept words (gcc does not vectorise the loops). */
TARGET static inline void NAME(columns_32)(elsa_i32 *indices, int32_t base, const uint8_t *places)
{
#if AVX2
    __m256i offsets = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)places));
    _mm256_storeu_si256((__m256i_u *)indices, _mm256_add_epi32(offsets, _mm256_set1_epi32(base)));
#else
    for (unsigned j = 0; j < 8; j++)
        indices[j] = base + places[j];
#endif
}

TARGET static inline void NAME(columns_64)(elsa_i64 *indices, int64_t base, const uint8_t *places)
{
#if AVX2
    __m128i offsets = _mm_loadl_epi64((const __m128i_u *)places);
    __m256i low = _mm256_cvtepu8_epi64(offsets);
    __m256i high = _mm256_cvtepu8_epi64(_mm_srli_si128(offsets, 4));
    __m256i first = _mm256_set1_epi64x(base);
    _mm256_storeu_si256((__m256i_u *)indices, _mm256_add_epi64(low, first));
    _mm256_storeu_si256((__m256i_u *)(indices + 4), _mm256_add_epi64(high, first));
#else
    for (unsigned j = 0; j < 8; j++)
        indices[j] = base + places[j];
#endif
}

/* In the next three, as many groups of 8 words as can't run out of room, whatever they keep, go
 * without checks; what is left over goes one by one. */

TARGET static size_t NAME(compact)(const void *restrict source, size_t n, unsigned bits,
                                   unsigned level, uint8_t *restrict bitmask,
                                   void *restrict target, size_t room)
{
    const WORD *restrict src = source;
    WORD *restrict values = target;
    const WORD low = LOW(bits), top = (WORD)level;
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        size_t groups = smaller(n - i, room - used) / 8;
        if (groups == 0) {
            unsigned byte = 0;
            for (unsigned j = 0; j < 8 && i + j < n; j++) {
                WORD w = src[i + j];
                if (!KEPT(w))
                    continue;
                if (used == room)
                    return ELSA_FAILED;
                values[used++] = w;
                byte |= 1u << j;
            }
            bitmask[i / 8] = (uint8_t)byte;
            i += 8;
        }
        for (; groups >= 8; groups -= 8) { /* one store of eight bytes is quicker than eight */
            uint8_t bytes[8];
            UNROLLED
            for (unsigned j = 0; j < 8; j++, i += 8) {
                bytes[j] = (uint8_t)NAME(close_gaps)(src + i, values + used, low, top);
                used += bits_set(bytes[j]);
            }
            memcpy(bitmask + i / 8 - 8, bytes, 8);
        }
        for (; groups > 0; groups--, i += 8) {
            unsigned byte = NAME(close_gaps)(src + i, values + used, low, top);
            bitmask[i / 8] = (uint8_t)byte;
            used += bits_set(byte);
        }
    }
    return used;
}

TARGET static size_t NAME(csr)(const void *restrict source, size_t n, unsigned bits,
                               unsigned level, const elsa_csr_block *block, void *restrict target,
                               size_t room)
{
    const WORD *restrict src = source;
    WORD *restrict values = target;
    const WORD low = LOW(bits), top = (WORD)level;
    const size_t cols = block->cols, index_size = block->index_size;
    elsa_i32 *restrict narrow = block->indices;
    elsa_i64 *restrict wide = block->indices;
    size_t used = 0, row = block->row, col = block->col;
    for (size_t i = 0; i < n;) {
        size_t groups = smaller(smaller(n - i, cols - col), room - used) / 8;
        if (groups == 0) {
            WORD w = src[i];
            if (KEPT(w)) {
                if (used == room)
                    return ELSA_FAILED;
                put_index(block->indices, index_size, used, (int64_t)col);
                values[used++] = w;
            }
            i++;
            col++;
        }
        for (; groups > 0; groups--, i += 8, col += 8) {
            unsigned byte = NAME(close_gaps)(src + i, values + used, low, top);
            if (index_size == 4)
                NAME(columns_32)(narrow + used, (int32_t)col, set_places[byte]);
            else
                NAME(columns_64)(wide + used, (int64_t)col, set_places[byte]);
            used += bits_set(byte);
        }
        if (col == cols) {
            put_index(block->indptr, index_size, ++row, block->kept + (int64_t)used);
            col = 0;
        }
    }
    return used;
}

TARGET static size_t NAME(expand)(const uint8_t *restrict bitmask, const void *restrict source,
                                  size_t available, void *restrict target, size_t n)
{
    const WORD *restrict values = source;
    WORD *restrict dst = target;
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        size_t groups = smaller(n - i, available - used) / 8;
        if (groups == 0) {
            const unsigned byte = bitmask[i / 8];
            for (unsigned j = 0; j < 8 && i + j < n; j++) {
                const bool set = byte >> j & 1;
                if (set && used == available)
                    return ELSA_FAILED;
                dst[i + j] = set ? values[used++] : 0;
            }
            i += 8;
        }
        for (; groups > 0; groups--, i += 8) {
            const unsigned byte = bitmask[i / 8];
            NAME(open_gaps)(byte, values + used, dst + i);
            used += bits_set(byte);
        }
    }
    return used;
}

TARGET static elsa_csr_error NAME(expand_csr)(const void *indptr, const void *indices,
                                              size_t index_size, const void *source, size_t rows,
                                              size_t cols, size_t kept, void *target)
{
    const WORD *values = source;
    WORD *dst = target;
    const size_t n = rows * cols;
    size_t k = 0, zeroed = 0;
    if (get_index(indptr, index_size, 0) != 0)
        return ELSA_CSR_INDPTR;
    for (size_t row = 0; row < rows; row++) {
        const int64_t end = get_index(indptr, index_size, row + 1);
        int64_t last = -1;
        if (end < (int64_t)k || (uint64_t)end > kept)
            return ELSA_CSR_INDPTR;
        for (; k < (size_t)end; k++) {
            const int64_t col = get_index(indices, index_size, k);
            if (col < 0 || (uint64_t)col >= cols)
                return ELSA_CSR_COLUMN;
            if (col <= last)
                return ELSA_CSR_ORDER;
            last = col;
            const size_t place = row * cols + (size_t)col;
            /* Zero just ahead of the values, so that each line is touched once. */
            while (place >= zeroed) {
                const size_t size = n - zeroed < CHUNK ? n - zeroed : CHUNK;
                memset(dst + zeroed, 0, size * sizeof *dst);
                zeroed += size;
            }
            dst[place] = values[k];
        }
    }
    if (k != kept)
        return ELSA_CSR_INDPTR;
    if (zeroed < n)
        memset(dst + zeroed, 0, (n - zeroed) * sizeof *dst);
    return ELSA_CSR_OK;
}

/* What can't be packed: not finite, a counter that no level has, a zero with a counter. */
#define UNPACKABLE(magnitude, c)                                                                   \
    (((magnitude) >= end) | ((c) > most) | (((magnitude) == 0) & ((c) > 0)))

/* The first of some words that can't be packed, given that there is one. */
TARGET static size_t NAME(first_unpackable)(const WORD *src, const uint8_t *counters, WORD end,
                                            WORD most)
{
    size_t i = 0;
    while (!UNPACKABLE(src[i] & ABSOLUTE, counters == NULL ? 0 : counters[i]))
        i++;
    return i;
}

/* These look for any in a block without branches, then for the first in the block that has one. */

TARGET static size_t NAME(find_unpackable)(const void *source, const uint8_t *counters, size_t n,
                                           uint64_t inf, unsigned levels)
{
    const WORD *src = source;
    const WORD end = (WORD)inf, most = (WORD)levels;
    for (size_t begin = 0; begin < n; begin += CHECKED) {
        const size_t stop = begin + smaller(n - begin, CHECKED);
        WORD any = 0;
        if (counters == NULL)
            for (size_t i = begin; i < stop; i++)
                any |= (src[i] & ABSOLUTE) >= end ? (WORD)1 : (WORD)0;
        else
            for (size_t i = begin; i < stop; i++) {
                const WORD magnitude = src[i] & ABSOLUTE, c = counters[i];
                any |= UNPACKABLE(magnitude, c) ? (WORD)1 : (WORD)0;
            }
        if (any)
            return begin + NAME(first_unpackable)(src + begin,
                                                  counters == NULL ? NULL : counters + begin, end,
                                                  most);
    }
    return n;
}

TARGET static size_t NAME(embed)(const void *source, const uint8_t *counters, void *target,
                                 size_t n, unsigned bits, uint64_t inf, unsigned levels,
                                 bool nearest)
{
    const WORD *restrict src = source;
    WORD *restrict dst = target;
    const WORD low = LOW(bits), half = (WORD)(low / 2 + 1), end = (WORD)inf, most = (WORD)levels;
    for (size_t begin = 0; begin < n; begin += CHECKED) {
        const size_t stop = begin + smaller(n - begin, CHECKED);
        WORD any = 0;
        for (size_t i = begin; i < stop; i++) {
            const WORD w = src[i], magnitude = w & ABSOLUTE, c = counters[i];
            any |= UNPACKABLE(magnitude, c) ? (WORD)1 : (WORD)0;
            const WORD here = (WORD)((magnitude & ~low) + c);
            /* Ties go to the smaller magnitude: up only beyond half a step. Below zero wraps. */
            const WORD closest = (WORD)((WORD)((magnitude - c + half - 1) & ~low) + c);
            dst[i] = (WORD)((w & SIGN) | (nearest && closest < end ? closest : here));
        }
        if (any)
            return begin + NAME(first_unpackable)(src + begin, counters + begin, end, most);
    }
    return n;
}

TARGET static size_t NAME(nest)(const void *whole, const void *part, unsigned level,
                                uint8_t *restrict counters, size_t n)
{
    const WORD *dense = whole, *sparse = part;
    const uint8_t number = (uint8_t)level;
    for (size_t begin = 0; begin < n; begin += CHECKED) {
        const size_t size = smaller(n - begin, CHECKED);
        uint8_t kept[CHECKED], differs[CHECKED], any = 0;
        for (size_t i = 0; i < size; i++) {
            const WORD w = sparse[begin + i];
            kept[i] = (w & ABSOLUTE) != 0 ? UINT8_MAX : 0;
            differs[i] = w != dense[begin + i] ? UINT8_MAX : 0;
        }
        for (size_t i = 0; i < size; i++) { /* a loop over bytes alone, which is vectorised */
            const uint8_t c = counters[begin + i];
            const uint8_t unset = c == 0 ? UINT8_MAX : 0;
            any |= (uint8_t)((kept[i] & differs[i]) | (~kept[i] & c));
            counters[begin + i] = (uint8_t)(c | (kept[i] & unset & number));
        }
        for (size_t i = 0; any && i < size; i++)
            if (kept[i] ? differs[i] : counters[begin + i])
                return begin + i;
    }
    return n;
}

#define DIGIT(w) ((size_t)(((w)&ABSOLUTE) >> shift) & (digits - 1))

/* Whether any of some words begins with one of a few prefixes: vectorised, and mostly none does. */
TARGET static inline bool NAME(any_begins)(const WORD *src, size_t n, unsigned above,
                                           const WORD *prefixes, size_t rows)
{
    WORD any = 0;
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < n; i++)
            any |= (WORD)(((src[i] & ABSOLUTE) >> above) == prefixes[row] ? 1 : 0);
    return any != 0;
}

TARGET static void NAME(histogram)(const void *source, size_t n, unsigned shift, unsigned width,
                                   const elsa_u64 *prefixes, size_t rows, elsa_u64 *out)
{
    enum { BLOCK = 256, SLOTS = 4096, FEW = 8, GROUP = 32 };
    const WORD *src = source;
    const size_t digits = (size_t)1 << width;
    const unsigned above = shift + width;
    if (rows == 0)
        return;
    if (above >= WIDTH - 1) { /* nothing but the sign is above: every prefix is 0 */
        if (prefixes[0] == 0)
            for (size_t i = 0; i < n; i++)
                out[DIGIT(src[i])]++;
        return;
    }
    WORD few[FEW] = {0};
    for (size_t row = 0; row < smaller(rows, FEW); row++)
        few[row] = prefixes[row] < SIGN ? (WORD)prefixes[row] : SIGN; /* begins no magnitude */
    /* Some row + 1 whose prefix ends in these bits, or 0: prefixes lie close together, so this
     * settles nearly all. Candidates are collected without branches, which would be mispredicted;
     * counting them afterwards lets the cache misses in a large `out` overlap. */
    uint16_t hint[SLOTS] = {0};
    for (size_t row = 0; row < rows; row++)
        hint[prefixes[row] % SLOTS] = (uint16_t)smaller(row + 1, UINT16_MAX);
    for (size_t begin = 0, end; begin < n; begin = end) {
        end = begin + smaller(n - begin, rows <= FEW ? GROUP : BLOCK);
        if (rows <= FEW && !NAME(any_begins)(src + begin, end - begin, above, few, rows))
            continue;
        LOCAL keys[BLOCK];
        size_t candidates = 0;
        for (size_t i = begin; i < end; i++) {
            const WORD key = src[i] & ABSOLUTE;
            keys[candidates] = key;
            candidates += hint[(key >> above) % SLOTS] != 0;
        }
        for (size_t i = 0; i < candidates; i++) {
            const uint64_t prefix = (uint64_t)keys[i] >> above;
            size_t row = hint[prefix % SLOTS] - 1u;
            if (prefixes[row] != prefix) {
                row = 0;
                for (size_t left = rows; left > 1; left -= left / 2)
                    row += prefixes[row + left / 2] <= prefix ? left / 2 : 0;
            }
            if (prefixes[row] == prefix)
                out[(row << width) + DIGIT(keys[i])]++;
        }
    }
}

/* Bucket 0 is below the lowest threshold; the others are equal steps up from it. */
TARGET static inline WORD NAME(bucket)(WORD key, WORD lowest, unsigned shift)
{
    const WORD step = (WORD)((WORD)(key - lowest) >> shift);
    const WORD bounded = (WORD)(step < BUCKETS - 2 ? step : BUCKETS - 2);
    return (WORD)(key < lowest ? 0 : bounded + 1);
}

TARGET static void NAME(assign)(const void *source, size_t n, const elsa_u64 *thresholds,
                                elsa_i64 *ties, size_t levels, uint8_t *counters)
{
    enum { BLOCK = 256, FEW = 8 };
    const WORD *src = source;
    const WORD never = SIGN, last = (WORD)levels; /* above every magnitude */
    /* From 1, as levels are, with an end that nothing is below. */
    WORD limit[ELSA_MAX_LEVELS + 2] = {0}, equal[ELSA_MAX_LEVELS + 1];
    limit[0] = equal[0] = never;
    for (size_t t = 1; t <= levels; t++) {
        limit[t] = thresholds[t - 1] < never ? (WORD)thresholds[t - 1] : never;
        equal[t] = limit[t] == 0 ? never : limit[t]; /* zero is never kept */
    }

    /* more[b]: how many thresholds are in higher buckets than b, so that only those in the same
     * bucket, mostly none, are left to compare, however many levels there are. */
    uint8_t more[BUCKETS] = {0};
    const WORD lowest = limit[levels] == 0 ? 1 : limit[levels];
    unsigned shift = 0;
    while (limit[1] >> shift >= (lowest >> shift) + (BUCKETS - 2))
        shift++;
    for (size_t t = levels, b = 0; t > 0; t--)
        for (; b < NAME(bucket)(limit[t], lowest, shift); b++)
            more[b] = (uint8_t)t;
    more[0] = (uint8_t)levels; /* holds zero, whatever the lowest threshold */

    for (size_t begin = 0; begin < n; begin += BLOCK) {
        const size_t size = smaller(n - begin, BLOCK);
        LOCAL key[BLOCK], above[BLOCK]; /* how many thresholds are at least the key */
        for (size_t i = 0; i < size; i++)
            key[i] = src[begin + i] & ABSOLUTE;
        WORD tied = 0;
        if (levels <= FEW) {
            memset(above, 0, sizeof above);
            for (size_t t = 1; t <= levels; t++) {
                const WORD most = limit[t], same = equal[t];
                for (size_t i = 0; i < size; i++) {
                    above[i] = (WORD)(above[i] + (key[i] <= most ? 1 : 0));
                    tied |= key[i] == same ? (WORD)1 : (WORD)0;
                }
            }
        } else {
            /* A loop of its own, which is vectorised: its branches would be mispredicted. */
            for (size_t i = 0; i < size; i++)
                above[i] = NAME(bucket)(key[i], lowest, shift);
            for (size_t i = 0; i < size; i++) {
                WORD found = more[above[i]];
                while ((WORD)(key[i] - 1) < limit[found + 1]) /* key <= limit, never for zero */
                    found++;
                above[i] = found;
                tied |= key[i] == equal[found] ? (WORD)1 : (WORD)0;
            }
        }
        for (size_t i = 0; i < size; i++)
            counters[begin + i] = (uint8_t)(above[i] == last ? 0 : above[i] + 1);
        for (size_t i = 0; tied && i < size; i++) {
            if (equal[above[i]] != key[i])
                continue;
            size_t t = above[i]; /* the last of the levels that share this threshold */
            while (equal[t - 1] == key[i])
                t--;
            while (t <= above[i] && ties[t - 1] <= 0)
                t++;
            if (t <= above[i])
                counters[begin + i] = (uint8_t)t;
            for (; t <= above[i]; t++)
                ties[t - 1]--;
        }
    }
}

static const elsa_kernels NAME(kernels) = {
    QUOTE(ISA),
    NAME(mask),  NAME(count),           NAME(compact), NAME(csr),       NAME(expand), NAME(expand_csr),
    NAME(embed), NAME(find_unpackable), NAME(nest),    NAME(histogram), NAME(assign),
};

#undef SIGN
#undef ABSOLUTE
#undef LOW
#undef UINT_
#undef UINT
#undef LOCAL
#undef DIGIT
#undef UNPACKABLE
#undef KEPT
#if AVX2
#undef SPREAD
#undef KEPT_LANES
#undef JOIN_EPI_
#undef JOIN_EPI
#undef EPI
#endif
#undef WIDTH
#undef WORD
