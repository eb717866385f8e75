/* The inner loops for one set of instructions and one kind of values; included by kernels.c, which
 * defines
 *
 *     NAME(x)  a name of its own        VALUE, HALF  the type of a stored value, and whether it is
 *     TARGET   attribute of functions                half a float
 *     W        floats in a vector       LANES        floats gathered at once
 *     MOST     accumulators             PAIRED       at most so many are worth two sets of them
 *     PERMUTES whether there is an instruction that permutes the floats of a vector
 *
 * Vectors are GNU C's: but for one permutation, the same code on every processor. */

#define VEC NAME(vec)
#define GATHERED NAME(gathered)
#define CODES NAME(codes)
typedef float VEC __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef float GATHERED __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

TARGET INLINE float NAME(number)(const VALUE *values, int64_t i)
{
#if HALF
    union { uint32_t bits; float number; } u = {(uint32_t)values[i] << 16};
    return u.number;
#else
    return values[i];
#endif
}

TARGET INLINE GATHERED NAME(numbers)(const VALUE *values, int64_t i)
{
#if HALF
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint32_t wholes __attribute__((vector_size(4 * LANES)));
    halves h = *(const halves *)(values + i);
    wholes bits = __builtin_convertvector(h, wholes) << 16;
    return (GATHERED)bits;
#else
    return *(const GATHERED *)(values + i);
#endif
}

TARGET INLINE GATHERED NAME(gather)(const float *x, const uint16_t *c)
{
    /* Scalar loads into a vector are faster than a gather instruction, and columns that are read
     * four at a time leave room for them (little-endian, as all that ONNX Runtime has packages for). */
    uint64_t p;
    memcpy(&p, c, sizeof p);
#if LANES == 8
    uint64_t q;
    memcpy(&q, c + 4, sizeof q);
    return (GATHERED){x[p & 0xFFFF], x[p >> 16 & 0xFFFF], x[p >> 32 & 0xFFFF], x[p >> 48],
                      x[q & 0xFFFF], x[q >> 16 & 0xFFFF], x[q >> 32 & 0xFFFF], x[q >> 48]};
#else
    return (GATHERED){x[p & 0xFFFF], x[p >> 16 & 0xFFFF], x[p >> 32 & 0xFFFF], x[p >> 48]};
#endif
}

TARGET INLINE float NAME(total)(GATHERED a)
{
#if LANES == 8
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
#else
    return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}

TARGET INLINE float NAME(rectified)(float a, bool relu)
{
    return relu && a < 0 ? 0 : a; /* NaN stays */
}

/* ---- few rows of x ---- */

TARGET INLINE float NAME(dot)(const VALUE *values, const uint16_t *columns, int64_t count,
                              const float *x, const bool large)
{
    GATHERED a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        if (large) { /* The processor alone is late: this saves up to half of the time; cached, it costs 5 %. */
            __builtin_prefetch(values + i + AHEAD);
            __builtin_prefetch(columns + i + AHEAD);
        }
        a += NAME(gather)(x, columns + i) * NAME(numbers)(values, i);
        b += NAME(gather)(x, columns + i + LANES) * NAME(numbers)(values, i + LANES);
    }
    if (i + LANES <= count) {
        a += NAME(gather)(x, columns + i) * NAME(numbers)(values, i);
        i += LANES;
    }
    float rest = 0;
    for (; i < count; i++)
        rest += NAME(number)(values, i) * x[columns[i]];
    return NAME(total)(a + b) + rest;
}

TARGET static void NAME(gemv)(void *data, size_t task)
{
    const elsa_gemv *g = data;
    const elsa_layer *layer = g->layer;
    int64_t outputs = layer->outputs, width = elsa_columns(layer);
    int64_t last = elsa_share(outputs, task + 1, g->tasks);
    for (int64_t r = elsa_share(outputs, task, g->tasks); r < last; r++) {
        int64_t start = layer->starts[r], count = layer->starts[r + 1] - start;
        const VALUE *values = (const VALUE *)layer->values + start;
        for (int64_t j = 0; j < g->rows; j++) {
            const float *x = g->x + j * width;
            float s = layer->count > CACHED
                          ? NAME(dot)(values, layer->columns + start, count, x, true)
                          : NAME(dot)(values, layer->columns + start, count, x, false);
            s += layer->bias[r];
            if (g->sum)
                s += g->sum[j * outputs + r];
            g->y[j * outputs + r] = NAME(rectified)(s, layer->relu);
        }
    }
}

/* ---- n:m, few rows of x ---- */

typedef int32_t CODES __attribute__((vector_size(4 * LANES), may_alias));

TARGET INLINE CODES NAME(pick)(CODES a, CODES b, CODES second)
{
    return a ^ ((a ^ b) & second);
}

TARGET INLINE CODES NAME(codes_of)(const uint8_t *codes, int64_t block, CODES lanes, const int m)
{
    const int bits = m == 4 ? 2 : 4;
    int32_t read = 0;
    memcpy(&read, codes + LANES * bits / 8 * block, (size_t)(LANES * bits / 8));
    return ((CODES){0} + read) >> (bits * lanes) & (m - 1);
}

/* The input of each value of a block, which its code chooses among m. */
#if PERMUTES
TARGET INLINE GATHERED NAME(select)(const float *x, const uint8_t *codes, int64_t block, const int n,
                                    const int m)
{
    const CODES lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    CODES at = NAME(codes_of)(codes, block, lanes, m) + (lanes / n * m & 7), part[8];
    const int vectors = m / n; /* of the input, for one of values; lane l is in vector l * vectors / 8 */
    UNROLLED
    for (int v = 0; v < vectors; v++)
        part[v] = (CODES)__builtin_ia32_permvarsf256(
            *(const GATHERED *)(x + 8 * vectors * block + 8 * v), at);
    UNROLLED
    for (int step = 1; step < 8; step *= 2)
        UNROLLED
        for (int v = 0; v + step < vectors; v += 2 * step)
            part[v] = NAME(pick)(part[v], part[v + step], -(lanes * vectors / 8 / step & 1));
    return (GATHERED)part[0];
}
#else
TARGET INLINE GATHERED NAME(select)(const float *x, const uint8_t *codes, int64_t block, const int n,
                                    const int m)
{
    (void)n; /* spread in matmul.c took care of it, and of the alignment */
    const CODES lanes = {0, 1, 2, 3}, *wide = (const CODES *)(const void *)x + m * block;
    CODES c = NAME(codes_of)(codes, block, lanes, m);
    CODES first = -(c & 1), second = -(c >> 1 & 1);
    CODES low = NAME(pick)(NAME(pick)(wide[0], wide[1], first),
                           NAME(pick)(wide[2], wide[3], first), second);
    if (m == 4)
        return (GATHERED)low;
    CODES third = -(c >> 2 & 1);
    CODES high = NAME(pick)(NAME(pick)(wide[4], wide[5], first),
                            NAME(pick)(wide[6], wide[7], first), second);
    return (GATHERED)NAME(pick)(low, high, third);
}
#endif

TARGET INLINE float NAME(nm_dot)(const VALUE *values, const uint8_t *codes, int64_t count,
                                 const float *x, const int n, const int m)
{
    GATHERED a = {0}, b = {0};
    for (int64_t i = 0; i < count / LANES; i += 2) { /* elsa_check: an even number */
        __builtin_prefetch(values + LANES * i + AHEAD);
        a += NAME(select)(x, codes, i, n, m) * NAME(numbers)(values, LANES * i);
        b += NAME(select)(x, codes, i + 1, n, m) * NAME(numbers)(values, LANES * (i + 1));
    }
    return NAME(total)(a + b);
}

TARGET static void NAME(nm)(void *data, size_t task)
{
    const elsa_gemv *g = data;
    const elsa_layer *layer = g->layer;
    int64_t outputs = layer->outputs, width = elsa_columns(layer), n = layer->n, m = layer->m;
    int64_t count = width / m * n, bits = m == 4 ? 2 : 4, stride = PERMUTES ? width : width * n;
    int64_t last = elsa_share(outputs, task + 1, g->tasks);
    for (int64_t r = elsa_share(outputs, task, g->tasks); r < last; r++) {
        const VALUE *values = (const VALUE *)layer->values + r * count;
        const uint8_t *codes = layer->codes + r * count * bits / 8;
        for (int64_t j = 0; j < g->rows; j++) {
            const float *x = g->wide + j * stride;
            float s = m == 4 ? n == 1 ? NAME(nm_dot)(values, codes, count, x, 1, 4)
                                      : NAME(nm_dot)(values, codes, count, x, 2, 4)
                      : n == 1 ? NAME(nm_dot)(values, codes, count, x, 1, 8)
                      : n == 2 ? NAME(nm_dot)(values, codes, count, x, 2, 8)
                               : NAME(nm_dot)(values, codes, count, x, 4, 8);
            s += layer->bias[r];
            if (g->sum)
                s += g->sum[j * outputs + r];
            g->y[j * outputs + r] = NAME(rectified)(s, layer->relu);
        }
    }
}

/* ---- many columns ---- */

TARGET static void NAME(copy)(float *to, const float *from, int64_t count, int64_t room)
{
    count = elsa_smaller(elsa_larger(count, 0), room);
    int64_t i = 0;
    for (; i + W <= count; i += W)
        *(VEC *)(to + i) = *(const VEC *)(from + i);
    for (; i < count; i++)
        to[i] = from[i];
    for (; i < room; i++)
        to[i] = 0;
}

/* Windows of the planes of a chunk, one after the other. */
TARGET static void NAME(pack)(const elsa_spmm *s, int64_t chunk, int64_t start, int64_t columns,
                              float *packed)
{
    const elsa_plan *p = s->plan;
    int64_t first = chunk * p->chunk, last = elsa_smaller(first + p->chunk, p->planes);
    if (p->transposed) {
        int64_t there = elsa_smaller(columns, p->columns - start), j = 0;
        for (; j + 4 <= there; j += 4) {
            const float *x = s->x + (start + j) * p->planes;
            float *to = packed + j;
            for (int64_t c = first; c < last; c++, to += p->segment) {
                typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
                *(four *)to = (four){x[c], x[p->planes + c], x[2 * p->planes + c],
                                     x[3 * p->planes + c]};
            }
        }
        for (; j < columns; j++) {
            float *to = packed + j;
            for (int64_t c = first; c < last; c++, to += p->segment)
                *to = j < there ? s->x[(start + j) * p->planes + c] : 0;
        }
        return;
    }
    /* What lies beyond the block are the columns that the kernel's other places want. */
    int64_t room = columns + (p->segment - p->vectors * W);
    for (int64_t c = first; c < last; c++) {
        const float *plane = s->x + c * p->length;
        for (int64_t k = 0; k < p->segments; k++, packed += p->segment) {
            int64_t at = elsa_smaller(start + k * p->pitch, p->length);
            NAME(copy)(packed, plane + at, p->length - at, room);
        }
    }
}

/* Add to a row's accumulators what its values from `i` to `end` contribute. Two sets of them where
 * there are registers: else a value would wait for the one before. */
TARGET INLINE void NAME(add_row)(const int vectors, int64_t i, int64_t end, const uint16_t *offsets,
                                 const VALUE *values, const float *packed, VEC *a)
{
    if (vectors <= PAIRED) {
        VEC b[MOST];
        UNROLLED
        for (int v = 0; v < vectors; v++)
            b[v] = (VEC){0};
        for (; i + 2 <= end; i += 2) {
            const float *x = packed + offsets[i], *z = packed + offsets[i + 1];
            float w = NAME(number)(values, i), u = NAME(number)(values, i + 1);
            UNROLLED
            for (int v = 0; v < vectors; v++) {
                a[v] += w * *(const VEC *)(x + W * v);
                b[v] += u * *(const VEC *)(z + W * v);
            }
        }
        UNROLLED
        for (int v = 0; v < vectors; v++)
            a[v] += b[v];
    }
    for (; i < end; i++) {
        const float *x = packed + offsets[i];
        float w = NAME(number)(values, i);
        UNROLLED
        for (int v = 0; v < vectors; v++)
            a[v] += w * *(const VEC *)(x + W * v);
    }
}

/* Add a row's sums to y, where its columns are next to each other but for the gaps. */
TARGET static void NAME(finish)(const elsa_spmm *s, int64_t r, int64_t start, int64_t columns,
                                const float *row)
{
    const elsa_plan *p = s->plan;
    bool relu = s->layer->relu;
    int64_t end = elsa_smaller(start + columns, p->columns);
    bool gaps = p->pitch != p->width;
    int64_t pitch = gaps ? p->pitch : p->columns, width = gaps ? p->width : p->columns;
    float *y = s->y + r * p->area;
    const float *sum = s->sum ? s->sum + r * p->area : NULL;
    for (int64_t at = start; at < end;) {
        int64_t line = at / pitch, column = at % pitch;
        int64_t next = elsa_smaller((line + 1) * pitch, end);
        int64_t there = elsa_smaller(next - at, width - column);
        const float *from = row + (at - start), *more = sum ? sum + line * width + column : NULL;
        float *to = y + line * width + column;
        int64_t i = 0;
        for (; i + W <= there; i += W) {
            VEC a = *(const VEC *)(from + i);
            if (more)
                a += *(const VEC *)(more + i);
            if (relu) {
                typedef int32_t mask __attribute__((vector_size(4 * W)));
                a = (VEC)((mask)a & ~(a < 0)); /* NaN stays */
            }
            *(VEC *)(to + i) = a;
        }
        for (; i < there; i++)
            to[i] = NAME(rectified)(more ? from[i] + more[i] : from[i], relu);
        at = next;
    }
}

/* The same where a column's rows are next to each other: `count` rows from r on. */
TARGET static void NAME(finish_transposed)(const elsa_spmm *s, int64_t r, int64_t count,
                                           int64_t start, int64_t columns, const float *rows,
                                           int64_t stride)
{
    int64_t there = elsa_smaller(columns, s->plan->columns - start), outputs = s->layer->outputs;
    bool relu = s->layer->relu;
    for (int64_t first = 0; first < count; first += ELSA_LINE) {
        int64_t last = elsa_smaller(first + ELSA_LINE, count);
        for (int64_t j = 0; j < there; j++) {
            int64_t at = (start + j) * outputs + r;
            const float *from = rows + j, *more = s->sum ? s->sum + at : NULL;
            for (int64_t k = first; k < last; k++) {
                float a = more ? from[k * stride] + more[k] : from[k * stride];
                s->y[at + k] = NAME(rectified)(a, relu);
            }
        }
    }
}

TARGET INLINE void NAME(add_rows)(const int vectors, const elsa_spmm *s, int64_t chunk,
                                  int64_t first, int64_t last, int64_t start, const float *packed,
                                  float *sums, int64_t stride)
{
    const elsa_plan *p = s->plan;
    const int32_t *parts = p->parts + chunk * s->layer->outputs;
    const VALUE *values = s->layer->values;
    bool finish = chunk == p->chunks - 1 && !p->transposed;
    for (int64_t r = first; r < last; r++, sums += stride) {
        /* Parts of rows are too short for the processor to see where the next will be. */
        const int32_t *next = parts + elsa_smaller(r + 2, last - 1);
        for (int64_t i = next[0]; i < next[s->layer->outputs]; i += ELSA_LINE) {
            __builtin_prefetch(values + i);
            __builtin_prefetch(p->offsets + i);
        }
        VEC a[MOST];
        UNROLLED
        for (int v = 0; v < vectors; v++)
            if (chunk)
                a[v] = *(const VEC *)(sums + W * v);
            else
                a[v] = (VEC){0} + s->layer->bias[r];
        NAME(add_row)(vectors, parts[r], parts[s->layer->outputs + r], p->offsets, values, packed, a);
        UNROLLED
        for (int v = 0; v < vectors; v++)
            *(VEC *)(sums + W * v) = a[v];
        if (finish)
            NAME(finish)(s, r, start, vectors * W, sums);
    }
}

TARGET static void NAME(spmm)(void *data, size_t task)
{
    elsa_spmm *s = data;
    const elsa_plan *p = s->plan;
    int64_t part = (int64_t)(task % s->row_parts);
    int64_t first = elsa_share(s->layer->outputs, (size_t)part, s->row_parts);
    int64_t last = elsa_share(s->layer->outputs, (size_t)part + 1, s->row_parts);
    int64_t all = elsa_parts(p->columns, W);
    int64_t begin = elsa_share(all, task / s->row_parts, s->blocks);
    int64_t vectors = elsa_share(all, task / s->row_parts + 1, s->blocks) - begin;
    int64_t start = begin * W, columns = vectors * W;
    /* With one chunk a row is done at once, and its sums need no place of their own. */
    int64_t stride = p->chunks > 1 || p->transposed ? columns : 0;
    int64_t window = p->chunk * p->segments * p->segment;
    int64_t floats = window + (stride ? (last - first) * stride : columns) + ELSA_LINE;
    char *taken = s->host->take(s->host, (size_t)floats * sizeof(float));
    if (!taken) {
        atomic_store(&s->failed, true);
        return;
    }
    float *packed = (float *)(void *)(taken + (-(uintptr_t)taken & 63)), *sums = packed + window;
    for (int64_t chunk = 0; chunk < p->chunks; chunk++) {
        NAME(pack)(s, chunk, start, columns, packed);
        switch (vectors) {
#define ROWS(n)                                                                     \
    case n:                                                                         \
        if (n <= MOST)                                                              \
            NAME(add_rows)(n <= MOST ? n : MOST, s, chunk, first, last, start, packed, sums, stride); \
        break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10)
            ROWS(11) ROWS(12)
#undef ROWS
        }
    }
    if (p->transposed)
        NAME(finish_transposed)(s, first, last - first, start, columns, sums, stride);
    s->host->give(s->host, taken);
}

#undef VEC
#undef GATHERED
#undef CODES
#undef VALUE
#undef HALF
