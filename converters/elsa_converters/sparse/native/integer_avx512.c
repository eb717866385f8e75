/* Products in integers with AVX-512 VNNI.
 *
 * The values of a group, 2 of 16 bits or 4 of 8, stand in one word; their planes, wherever they are, are interleaved in
 * registers, and one instruction multiplies both and adds up. Interleaving works within 128 bits, so sums stand
 * in another order than columns until a row is done. */
#include "integer.h"

#if ELSA_X86
#include "integer_avx512.h"

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw,avx512vnni")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

enum {
    LANES = 16, /* floats and sums in a vector */
    ROWS = 256, /* of weights, whose sums stay in the second-level cache */
    MOST_WORDS = 4,
    MOST_BYTES = 3,
};

TARGET INLINE __mmask16 first(int64_t count)
{
    return (__mmask16)(count >= LANES ? 0xFFFF : (1u << count) - 1);
}

TARGET static void range(const float *x, int64_t count, int32_t *highest, uint32_t *lowest)
{
    __m512i high = _mm512_setzero_si512(), low = high, high2 = high, low2 = high;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + LANES);
        high = _mm512_max_epi32(high, a), low = _mm512_max_epu32(low, a);
        high2 = _mm512_max_epi32(high2, b), low2 = _mm512_max_epu32(low2, b);
    }
    for (; i < count; i += LANES) {
        __m512i a = _mm512_maskz_loadu_epi32(first(count - i), x + i);
        high = _mm512_max_epi32(high, a), low = _mm512_max_epu32(low, a);
    }
    *highest = _mm512_reduce_max_epi32(_mm512_max_epi32(high, high2));
    *lowest = _mm512_reduce_max_epu32(_mm512_max_epu32(low, low2));
}

TARGET INLINE void transpose(__m512i *r)
{
    __m512i t[LANES];
    UNROLLED
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) { /* r[4i + k] has column 4l + k of rows 4i.. in lane l */
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLLED
    for (int k = 0; k < 4; k++) {
        __m512i a = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88), b = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xDD);
        __m512i c = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
        __m512i d = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xDD);
        t[k] = _mm512_shuffle_i32x4(a, c, 0x88), t[8 + k] = _mm512_shuffle_i32x4(a, c, 0xDD);
        t[4 + k] = _mm512_shuffle_i32x4(b, d, 0x88), t[12 + k] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
    UNROLLED
    for (int i = 0; i < LANES; i++)
        r[i] = t[i];
}

/* ---- the input as integers ---- */

TARGET INLINE __m512i integers(__m512 x, float inverse, int32_t zero)
{
    return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse))), _mm512_set1_epi32(zero));
}

TARGET INLINE void store(uint8_t *to, int64_t at, __m512i numbers, const int bits)
{
    if (bits == 16)
        _mm256_storeu_si256((__m256i *)(void *)(to + 2 * at), _mm512_cvtepi32_epi16(numbers));
    else
        _mm_storeu_si128((__m128i *)(void *)(to + at),
                         _mm512_cvtusepi32_epi8(_mm512_max_epi32(numbers, _mm512_setzero_si512())));
}

/* Columns of the input stand one after the other: a square of 16 × 16 at a time is turned. */
TARGET INLINE void pack_turned(const elsa_integer_job *job, int64_t block, int64_t from, int64_t to, const int bits)
{
    const elsa_plan *p = job->plan;
    int64_t start = block * p->segment; /* here a segment is a block */
    uint8_t *packed = job->packed + block * p->planes * p->segment * bits / 8;
    for (int64_t k = from; k < to; k += LANES)
        for (int64_t v = 0; v < p->segment; v += LANES) {
            __m512i t[LANES];
            UNROLLED
            for (int i = 0; i < LANES; i++) {
                int64_t column = start + v + i;
                t[i] = _mm512_setzero_si512();
                if (column < job->columns)
                    t[i] = integers(_mm512_maskz_loadu_ps(first(to - k), job->x + column * elsa_pitch(job->layer) + k),
                                    job->inverse[column], job->zero[column]);
            }
            transpose(t);
            UNROLLED
            for (int i = 0; i < LANES; i++)
                if (k + i < to)
                    store(packed, (k + i) * p->segment + v, t[i], bits);
        }
}

TARGET INLINE void pack_planes(const elsa_integer_job *job, int64_t block, int64_t from, int64_t to,
                               const int64_t width, const int bits)
{
    const elsa_plan *p = job->plan;
    int64_t start = block * p->vectors * width, at = (block * p->planes + from) * p->segments * p->segment;
    float inverse = job->inverse[0];
    int32_t zero = job->zero[0];
    for (int64_t c = from; c < to; c++)
        for (int64_t k = 0; k < p->segments; k++, at += p->segment) {
            int64_t begin = elsa_smaller(start + k * p->pitch, job->length);
            int64_t there = elsa_smaller(job->length - begin, p->segment);
            const float *x = job->x + c * job->length + begin;
            int64_t i = 0;
            for (; i + LANES <= there; i += LANES)
                store(job->packed, at + i, integers(_mm512_loadu_ps(x + i), inverse, zero), bits);
            for (; i < p->segment; i += LANES) {
                __m512 rest = _mm512_maskz_loadu_ps(first(elsa_larger(there - i, 0)), x + i);
                store(job->packed, at + i, integers(rest, inverse, zero), bits);
            }
        }
}

TARGET INLINE void pack(const elsa_integer_job *job, size_t task, const int64_t width, const int bits)
{
    int64_t block = (int64_t)(task / job->pack_parts);
    size_t part = task % job->pack_parts;
    int64_t squares = elsa_parts(job->plan->planes, LANES);
    int64_t from = elsa_share_of(squares, part, job->pack_parts) * LANES;
    int64_t to = elsa_smaller(elsa_share_of(squares, part + 1, job->pack_parts) * LANES, job->plan->planes);
    if (job->plan->transposed)
        pack_turned(job, block, from, to, bits);
    else
        pack_planes(job, block, from, to, width, bits);
}

TARGET static void pack_words(void *job, size_t task)
{
    pack(job, task, 32, 16);
}

TARGET static void pack_bytes(void *job, size_t task)
{
    pack(job, task, 64, 8);
}

/* ---- rows of weights ---- */

/* Columns in order again, of a vector of planes. */
TARGET INLINE void order_words(__m512i *a)
{
    __m512i low = _mm512_permutex2var_epi64(a[0], _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), a[1]);
    a[1] = _mm512_permutex2var_epi64(a[0], _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), a[1]);
    a[0] = low;
}

TARGET INLINE void order_bytes(__m512i *a)
{
    __m512i b = _mm512_shuffle_i32x4(a[0], a[1], 0x44), c = _mm512_shuffle_i32x4(a[0], a[1], 0xEE);
    __m512i d = _mm512_shuffle_i32x4(a[2], a[3], 0x44), e = _mm512_shuffle_i32x4(a[2], a[3], 0xEE);
    a[0] = _mm512_shuffle_i32x4(b, d, 0x88), a[1] = _mm512_shuffle_i32x4(b, d, 0xDD);
    a[2] = _mm512_shuffle_i32x4(c, e, 0x88), a[3] = _mm512_shuffle_i32x4(c, e, 0xDD);
}

TARGET INLINE void add_words(const int vectors, const elsa_plan *p, int64_t i, int64_t end, const int16_t *packed,
                             __m512i *a)
{
    const uint16_t *offsets = p->offsets;
    const char *values = p->values;
    for (; i < end; i++) {
        const int16_t *x = packed + offsets[2 * i], *z = packed + offsets[2 * i + 1];
        int32_t pair;
        memcpy(&pair, values + 4 * i, 4);
        __m512i w = _mm512_set1_epi32(pair);
        UNROLLED
        for (int v = 0; v < vectors; v++) {
            __m512i b = _mm512_loadu_si512(x + 32 * v), c = _mm512_loadu_si512(z + 32 * v);
            a[2 * v] = _mm512_dpwssd_epi32(a[2 * v], _mm512_unpacklo_epi16(b, c), w);
            a[2 * v + 1] = _mm512_dpwssd_epi32(a[2 * v + 1], _mm512_unpackhi_epi16(b, c), w);
        }
    }
}

TARGET INLINE void add_bytes(const int vectors, const elsa_plan *p, int64_t i, int64_t end, const uint8_t *packed,
                             __m512i *a)
{
    const uint16_t *offsets = p->offsets;
    const char *values = p->values;
    for (; i < end; i++) {
        const uint8_t *x = packed + offsets[4 * i], *y = packed + offsets[4 * i + 1];
        const uint8_t *z = packed + offsets[4 * i + 2], *u = packed + offsets[4 * i + 3];
        int32_t quad;
        memcpy(&quad, values + 4 * i, 4);
        __m512i w = _mm512_set1_epi32(quad);
        UNROLLED
        for (int v = 0; v < vectors; v++) {
            __m512i b = _mm512_loadu_si512(x + 64 * v), c = _mm512_loadu_si512(y + 64 * v);
            __m512i d = _mm512_loadu_si512(z + 64 * v), e = _mm512_loadu_si512(u + 64 * v);
            __m512i l = _mm512_unpacklo_epi8(b, c), h = _mm512_unpackhi_epi8(b, c);
            __m512i m = _mm512_unpacklo_epi8(d, e), k = _mm512_unpackhi_epi8(d, e);
            a[4 * v] = _mm512_dpbusd_epi32(a[4 * v], _mm512_unpacklo_epi16(l, m), w);
            a[4 * v + 1] = _mm512_dpbusd_epi32(a[4 * v + 1], _mm512_unpackhi_epi16(l, m), w);
            a[4 * v + 2] = _mm512_dpbusd_epi32(a[4 * v + 2], _mm512_unpacklo_epi16(h, k), w);
            a[4 * v + 3] = _mm512_dpbusd_epi32(a[4 * v + 3], _mm512_unpackhi_epi16(h, k), w);
        }
    }
}

TARGET INLINE __m512 rectified(__m512 a)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NLT_UQ), a); /* NaN stays */
}

/* Up to 16 numbers to y, at `place` of the output. */
TARGET INLINE void finish(const elsa_integer_job *job, __m512 a, int64_t place, __mmask16 mask)
{
    if (job->sum)
        a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(mask, job->sum + place));
    if (job->layer->relu)
        a = rectified(a);
    _mm512_mask_storeu_ps(job->y + place, mask, a);
}

/* A row's numbers to y, where its columns are next to each other but for the gaps. */
TARGET static void finish_row(const elsa_integer_job *job, int64_t r, int64_t start, int64_t columns, const float *row)
{
    const elsa_plan *p = job->plan;
    int64_t end = elsa_smaller(start + columns, job->columns);
    bool gaps = p->pitch != p->width;
    int64_t pitch = gaps ? p->pitch : job->columns, width = gaps ? p->width : job->columns;
    for (int64_t at = start; at < end;) {
        int64_t line = at / pitch, column = at % pitch, place = r * p->area + line * width + column;
        int64_t next = elsa_smaller((line + 1) * pitch, end);
        int64_t there = elsa_smaller(next - at, width - column), i = 0;
        const float *from = row + (at - start);
        for (; i + LANES <= there; i += LANES)
            finish(job, _mm512_loadu_ps(from + i), place + i, 0xFFFF);
        if (i < there)
            finish(job, _mm512_maskz_loadu_ps(first(there - i), from + i), place + i, first(there - i));
        at = next;
    }
}

/* The same where a column's rows are next to each other: up to 16 rows from r on, and up to 16 columns, whose sums are
 * floats or, of 8 bits, integers. */
TARGET INLINE void finish_square(const elsa_integer_job *job, int64_t r, int64_t rows, int64_t start, int64_t there,
                                 const int32_t *sums, int64_t columns, const int bits)
{
    const elsa_layer *layer = job->layer;
    __mmask16 mask = first(rows);
    __m512 bias = _mm512_maskz_loadu_ps(mask, layer->bias + r), scale = bias;
    __m512i totals = _mm512_setzero_si512();
    if (bits == 8) {
        scale = _mm512_maskz_loadu_ps(mask, job->plan->scales + r);
        totals = _mm512_maskz_loadu_epi32(mask, job->plan->totals + r);
    }
    __m512i t[LANES];
    UNROLLED
    for (int i = 0; i < LANES; i++)
        t[i] = i < rows ? _mm512_loadu_si512(sums + i * columns) : _mm512_setzero_si512();
    transpose(t);
    UNROLLED
    for (int i = 0; i < LANES; i++)
        if (i < there) {
            __m512 a = _mm512_castsi512_ps(t[i]);
            if (bits == 8) {
                __m512i zero = _mm512_mullo_epi32(totals, _mm512_set1_epi32(job->zero[start + i]));
                a = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(t[i], zero)), scale);
            }
            a = _mm512_fmadd_ps(a, _mm512_set1_ps(job->scale[start + i]), bias);
            finish(job, a, (start + i) * layer->outputs + r, mask);
        }
}

/* All rows of 16 columns, then of the next: what is written lies in few pages, and one after the other. */
TARGET INLINE void finish_turned(const elsa_integer_job *job, int64_t from, int64_t to, int64_t start,
                                 int64_t columns, const int32_t *sums, const int bits)
{
    int64_t there = elsa_smaller(columns, job->columns - start);
    for (int64_t v = 0; v < there; v += LANES)
        for (int64_t r = from; r < to; r += LANES)
            finish_square(job, r, elsa_smaller(to - r, LANES), start + v, elsa_smaller(there - v, LANES),
                          sums + (r - from) * columns + v, columns, bits);
}

/* What some rows have in a chunk. Sums of 16 bits are floats from one chunk to the next, those of 8 integers. */
TARGET INLINE void add_rows(const int vectors, const elsa_integer_job *job, int64_t chunk, int64_t from, int64_t to,
                            int64_t start, const uint8_t *packed, int32_t *sums, const int bits)
{
    const elsa_plan *p = job->plan;
    const elsa_layer *layer = job->layer;
    const int each = 32 / bits, count = vectors * each; /* vectors of sums in a vector, in a row */
    int64_t columns = count * LANES;
    const int32_t *parts = p->parts + chunk * layer->outputs;
    bool last = chunk == p->chunks - 1;
    bool whole = !p->transposed && p->pitch == p->width && start + columns <= job->columns;
    for (int64_t r = from; r < to; r++, sums += columns) {
        __m512i a[4 * MOST_BYTES];
        UNROLLED
        for (int v = 0; v < count; v++)
            a[v] = bits == 8 && chunk ? _mm512_loadu_si512(sums + LANES * v) : _mm512_setzero_si512();
        if (bits == 16) {
            add_words(vectors, p, parts[r], parts[r + 1], (const int16_t *)(const void *)packed, a);
            __m512 scale = _mm512_set1_ps(p->scales[chunk * layer->outputs + r]);
            UNROLLED
            for (int v = 0; v < count; v++) {
                __m512 sum = chunk ? _mm512_loadu_ps(sums + LANES * v) : _mm512_setzero_ps();
                a[v] = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_cvtepi32_ps(a[v]), scale, sum));
            }
        } else {
            add_bytes(vectors, p, parts[r], parts[r + 1], packed, a);
        }
        if (last) {
            UNROLLED
            for (int v = 0; v < vectors; v++)
                if (bits == 16)
                    order_words(a + 2 * v);
                else
                    order_bytes(a + 4 * v);
        }
        if (last && !p->transposed) {
            __m512 scale = _mm512_set1_ps(job->scale[0]), bias = _mm512_set1_ps(layer->bias[r]);
            __m512i zero = _mm512_setzero_si512();
            if (bits == 8)
                zero = _mm512_set1_epi32((int32_t)((int64_t)job->zero[0] * p->totals[r]));
            UNROLLED
            for (int v = 0; v < count; v++) {
                __m512 sum = _mm512_castsi512_ps(a[v]);
                if (bits == 8)
                    sum = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(a[v], zero)), _mm512_set1_ps(p->scales[r]));
                a[v] = _mm512_castps_si512(_mm512_fmadd_ps(sum, scale, bias));
            }
        }
        if (last && whole) {
            UNROLLED
            for (int v = 0; v < count; v++)
                finish(job, _mm512_castsi512_ps(a[v]), r * p->area + start + LANES * v, 0xFFFF);
            continue;
        }
        UNROLLED
        for (int v = 0; v < count; v++)
            _mm512_storeu_si512(sums + LANES * v, a[v]);
        if (last && !p->transposed)
            finish_row(job, r, start, columns, (const float *)(const void *)sums);
    }
}

TARGET INLINE void multiply(elsa_integer_job *job, size_t task, const int64_t width, const int bits)
{
    const elsa_plan *p = job->plan;
    int64_t block = (int64_t)(task / job->row_parts), columns = p->vectors * width, start = block * columns;
    int64_t from = elsa_share_of(job->layer->outputs, task % job->row_parts, job->row_parts);
    int64_t to = elsa_share_of(job->layer->outputs, task % job->row_parts + 1, job->row_parts);
    int64_t window = p->segments * p->segment * bits / 8;
    const uint8_t *packed = job->packed + block * p->planes * window;
    int32_t *sums = job->host->take(job->host, (size_t)(ROWS * columns) * sizeof *sums);
    if (!sums) {
        atomic_store(&job->failed, true);
        return;
    }
    for (; from < to; from += ROWS) {
        int64_t end = elsa_smaller(from + ROWS, to);
        for (int64_t chunk = 0; chunk < p->chunks; chunk++) {
            const uint8_t *x = packed + chunk * p->chunk * window;
            switch (p->vectors) {
            case 1: add_rows(1, job, chunk, from, end, start, x, sums, bits); break;
            case 2: add_rows(2, job, chunk, from, end, start, x, sums, bits); break;
            case 3: add_rows(3, job, chunk, from, end, start, x, sums, bits); break;
            case 4: if (bits == 16) add_rows(4, job, chunk, from, end, start, x, sums, 16); break;
            }
        }
        if (p->transposed)
            finish_turned(job, from, end, start, columns, sums, bits);
    }
    job->host->give(job->host, sums);
}

TARGET static void multiply_words(void *job, size_t task)
{
    multiply(job, task, 32, 16);
}

TARGET static void multiply_bytes(void *job, size_t task)
{
    multiply(job, task, 64, 8);
}

const elsa_integer_kernels elsa_integers_avx512 = {
    range,
    {32, 2, MOST_WORDS, pack_words, multiply_words},
    {64, 4, 2, pack_bytes, multiply_bytes},
    NULL,
    NULL,
};
const elsa_integer_kernels elsa_integers_vbmi2 = {
    range,
    {32, 2, MOST_WORDS, pack_words, multiply_words},
    {64, 4, 2, pack_bytes, multiply_bytes},
    elsa_few_avx512,
    elsa_spread_avx512,
};
#else
typedef int elsa_nothing; /* a file must declare something */
#endif
