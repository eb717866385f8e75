// The other operators, on floats. Every array has room for a multiple of 4 of them, so that loops need no ends of their own.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <wasm_simd128.h>
#define EXPORT(name) __attribute__((export_name(#name))) name
#define LOAD wasm_v128_load
#define STORE wasm_v128_store
#define SPLAT wasm_f32x4_splat
#define ADD wasm_f32x4_add
#define SUB wasm_f32x4_sub
#define MUL wasm_f32x4_mul
#define DIV wasm_f32x4_div
// NaN stays if it is the first, and it takes one instruction.
#define MIN wasm_f32x4_pmin
#define MAX wasm_f32x4_pmax
#define INLINE static inline __attribute__((always_inline))

// e^x: x is n ln 2 + r, and e^r a polynomial (Cephes). Beside a large number, n is in the lowest bits.
static v128_t exponential(v128_t x)
{
    x = MAX(MIN(x, SPLAT(88)), SPLAT(-87.3f));
    v128_t beside = ADD(MUL(x, SPLAT(1.44269504f)), SPLAT(12582912)), n = SUB(beside, SPLAT(12582912));
    v128_t r = SUB(SUB(x, MUL(n, SPLAT(0.693359375f))), MUL(n, SPLAT(-2.12194440e-4f)));
    v128_t p = ADD(MUL(SPLAT(1.9875691500e-4f), r), SPLAT(1.3981999507e-3f));
    p = ADD(MUL(p, r), SPLAT(8.3334519073e-3f));
    p = ADD(MUL(p, r), SPLAT(4.1665795894e-2f));
    p = ADD(MUL(p, r), SPLAT(1.6666665459e-1f));
    p = ADD(MUL(p, r), SPLAT(0.5f));
    p = ADD(MUL(p, MUL(r, r)), ADD(r, SPLAT(1)));
    return MUL(p, wasm_i32x4_shl(wasm_i32x4_add(beside, wasm_i32x4_splat(127)), 23));
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
static v128_t error_function(v128_t x)
{
    v128_t sign = wasm_v128_and(x, wasm_i32x4_splat(INT32_MIN)), a = wasm_f32x4_abs(x);
    v128_t t = DIV(SPLAT(1), ADD(SPLAT(1), MUL(SPLAT(0.3275911f), a)));
    v128_t p = ADD(MUL(SPLAT(1.061405429f), t), SPLAT(-1.453152027f));
    p = ADD(MUL(p, t), SPLAT(1.421413741f));
    p = ADD(MUL(p, t), SPLAT(-0.284496736f));
    p = ADD(MUL(p, t), SPLAT(0.254829592f));
    return wasm_v128_or(SUB(SPLAT(1), MUL(MUL(p, t), exponential(wasm_f32x4_neg(MUL(a, a))))), sign);
}

static v128_t sigmoid(v128_t x)
{
    return DIV(SPLAT(1), ADD(SPLAT(1), exponential(wasm_f32x4_neg(x))));
}

static v128_t tangent(v128_t x)
{
    return SUB(SPLAT(1), DIV(SPLAT(2), ADD(SPLAT(1), exponential(ADD(x, x)))));
}

INLINE v128_t clip(v128_t x, float a, float b)
{
    return MIN(MAX(x, SPLAT(a)), SPLAT(b));
}

// The numbers are those of UNARY in operators.js.
void EXPORT(unary)(int32_t op, const float *x, float *y, int32_t n, float a, float b)
{
    switch (op) {
#define EACH(number, value)                       \
    case number:                                  \
        for (int32_t i = 0; i < n; i += 4) {      \
            v128_t v = LOAD(x + i);               \
            STORE(y + i, value);                  \
        }                                         \
        return;
        EACH(0, MAX(v, SPLAT(0)))
        EACH(1, clip(v, a, b))
        EACH(2, sigmoid(v))
        EACH(3, clip(ADD(MUL(v, SPLAT(a)), SPLAT(b)), 0, 1))
        EACH(4, MUL(v, clip(ADD(MUL(v, SPLAT(a)), SPLAT(b)), 0, 1)))
        EACH(5, tangent(v))
        EACH(6, error_function(v))
        EACH(7, MUL(MUL(v, SPLAT(0.5f)), ADD(SPLAT(1), error_function(MUL(v, SPLAT(0.70710678f))))))
        EACH(8, exponential(v))
        EACH(9, wasm_f32x4_sqrt(v))
        EACH(10, wasm_f32x4_neg(v))
        EACH(11, DIV(SPLAT(1), v))
        EACH(12, wasm_f32x4_abs(v))
        EACH(13, ADD(MAX(v, SPLAT(0)), MUL(MIN(v, SPLAT(0)), SPLAT(a))))
        EACH(14, MUL(v, sigmoid(v)))
        EACH(15, MUL(v, v))
        EACH(16, MUL(MUL(v, SPLAT(0.5f)), ADD(SPLAT(1), tangent(MUL(MUL(v, SPLAT(0.79788456f)), ADD(SPLAT(1), MUL(SPLAT(0.044715f), MUL(v, v))))))))
#undef EACH
    }
}

// Rows of a op b, of three outer dimensions: sizes, then what a step in each is in a and in b, the row's last.
void EXPORT(binary)(int32_t op, const float *a, const float *b, float *y, const int32_t *d)
{
    const int32_t *s = d + 4, *t = d + 8, n = d[3];
    for (int32_t i = 0; i < d[0]; i++)
        for (int32_t j = 0; j < d[1]; j++)
            for (int32_t k = 0; k < d[2]; k++, y += n) {
                const float *u = a + i * s[0] + j * s[1] + k * s[2], *v = b + i * t[0] + j * t[1] + k * t[2];
                // One number for the whole row is read again and again.
                v128_t su = SPLAT(*u), sv = SPLAT(*v);
                const char *p = s[3] ? (const char *)u : (const char *)&su, *q = t[3] ? (const char *)v : (const char *)&sv;
                int32_t m = 16 * s[3], l = 16 * t[3];
                switch (op) {
#define EACH(number, f)                                                        \
    case number: {                                                             \
        int32_t x = 0;                                                         \
        for (; x + 4 <= n; x += 4, p += m, q += l)                             \
            STORE(y + x, f(LOAD(p), LOAD(q)));                                 \
        if (x < n) {                                                           \
            v128_t last = f(LOAD(p), LOAD(q));                                 \
            memcpy(y + x, &last, 4 * (size_t)(n - x));                         \
        }                                                                      \
        break;                                                                 \
    }
                    EACH(0, ADD)
                    EACH(1, SUB)
                    EACH(2, MUL)
                    EACH(3, DIV)
                    EACH(4, wasm_f32x4_max)
                    EACH(5, wasm_f32x4_min)
#undef EACH
                }
            }
}

INLINE float total(v128_t a)
{
    return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1) + wasm_f32x4_extract_lane(a, 2) + wasm_f32x4_extract_lane(a, 3);
}

void EXPORT(softmax)(const float *x, float *y, int32_t rows, int32_t n)
{
    for (; rows--; x += n, y += n) {
        float most = x[0], sum = 0;
        for (int32_t i = 1; i < n; i++)
            most = x[i] > most ? x[i] : most;
        int32_t i = 0;
        v128_t all = SPLAT(0), v;
        for (; i + 4 <= n; i += 4) {
            STORE(y + i, v = exponential(SUB(LOAD(x + i), SPLAT(most))));
            all = ADD(all, v);
        }
        for (; i < n; i++)
            sum += y[i] = wasm_f32x4_extract_lane(exponential(SPLAT(x[i] - most)), 0);
        sum = 1 / (sum + total(all));
        for (i = 0; i < n; i++)
            y[i] *= sum;
    }
}

// Layer normalization; b may be null.
void EXPORT(norm)(const float *x, const float *w, const float *b, float *y, int32_t rows, int32_t n, float epsilon)
{
    for (; rows--; x += n, y += n) {
        float mean = 0, square = 0;
        v128_t sum = SPLAT(0), many = sum;
        int32_t i = 0, whole = n & ~3;
        for (; i < whole; i += 4)
            sum = ADD(sum, LOAD(x + i));
        for (; i < n; i++)
            mean += x[i];
        mean = (mean + total(sum)) / (float)n;
        for (i = 0; i < whole; i += 4) {
            v128_t v = SUB(LOAD(x + i), SPLAT(mean));
            many = ADD(many, MUL(v, v));
        }
        for (; i < n; i++)
            square += (x[i] - mean) * (x[i] - mean);
        float scale = 1 / __builtin_sqrtf((square + total(many)) / (float)n + epsilon);
        for (i = 0; i < whole; i += 4) {
            v128_t v = MUL(MUL(SUB(LOAD(x + i), SPLAT(mean)), SPLAT(scale)), LOAD(w + i));
            STORE(y + i, b ? ADD(v, LOAD(b + i)) : v);
        }
        for (; i < n; i++)
            y[i] = (x[i] - mean) * scale * w[i] + (b ? b[i] : 0);
    }
}

// A product of two dense matrices, [m, k] and [k, n], four rows at once.
void EXPORT(dense)(const float *a, const float *b, float *y, int32_t m, int32_t n, int32_t k)
{
    for (int32_t i = 0; i < m; i += 4, a += 4 * k, y += 4 * n) {
        int32_t rows = m - i < 4 ? m - i : 4, j = 0;
        const float *p[4];
        for (int32_t r = 0; r < 4; r++)
            p[r] = a + (r < rows ? r : 0) * k;
        for (; j < n; j += 8) {
            v128_t s[4][2];
            for (int32_t r = 0; r < 4; r++)
                s[r][0] = s[r][1] = SPLAT(0);
            const float *q = b + j;
            for (int32_t l = 0; l < k; l++, q += n) {
                v128_t u = LOAD(q), v = LOAD(q + 4);
#pragma clang loop unroll(full)
                for (int32_t r = 0; r < 4; r++) {
                    v128_t w = wasm_v128_load32_splat(p[r] + l);
                    s[r][0] = ADD(s[r][0], MUL(w, u));
                    s[r][1] = ADD(s[r][1], MUL(w, v));
                }
            }
            int32_t columns = n - j < 8 ? n - j : 8;
            for (int32_t r = 0; r < rows; r++)
                if (columns == 8) {
                    STORE(y + r * n + j, s[r][0]);
                    STORE(y + r * n + j + 4, s[r][1]);
                } else
                    memcpy(y + r * n + j, s[r], 4 * (size_t)columns);
        }
    }
}

// Five dimensions: sizes, then what a step in each is in x and in y.
void EXPORT(copy)(const float *x, float *y, const int32_t *d)
{
    const int32_t *s = d + 5, *t = d + 10, n = d[4];
    for (int32_t a = 0; a < d[0]; a++)
        for (int32_t b = 0; b < d[1]; b++)
            for (int32_t c = 0; c < d[2]; c++)
                for (int32_t e = 0; e < d[3]; e++) {
                    const float *from = x + a * s[0] + b * s[1] + c * s[2] + e * s[3];
                    float *to = y + a * t[0] + b * t[1] + c * t[2] + e * t[3];
                    if (s[4] == 1 && t[4] == 1)
                        memcpy(to, from, 4 * (size_t)n);
                    else
                        for (int32_t i = 0; i < n; i++)
                            to[i * t[4]] = from[i * s[4]];
                }
}

// Sums, or the largest, of n numbers that are `inner` apart.
void EXPORT(reduce)(int32_t most, const float *x, float *y, int32_t outer, int32_t n, int32_t inner, float scale)
{
    for (; outer--; x += n * inner)
        for (int32_t i = 0; i < inner; i++) {
            float s = x[i];
            if (!most && inner == 1) {
                v128_t sum = SPLAT(0);
                int32_t j = 0;
                for (; j + 4 <= n; j += 4)
                    sum = ADD(sum, LOAD(x + j));
                for (s = total(sum); j < n; j++)
                    s += x[j];
            } else
                for (int32_t j = 1; j < n; j++) {
                    float v = x[j * inner + i];
                    s = most ? v > s ? v : s : s + v;
                }
            *y++ = s * scale;
        }
}

// Rows of a table whose rows are sparse, or dense if starts is null.
void EXPORT(gather)(const int32_t *starts, const uint16_t *columns, const float *values, int32_t width,
                    const int32_t *ids, int32_t count, float *y)
{
    for (; count--; y += width, ids++) {
        if (!starts) {
            memcpy(y, values + *ids * width, 4 * (size_t)width);
            continue;
        }
        memset(y, 0, 4 * (size_t)width);
        for (int32_t i = starts[*ids]; i < starts[*ids + 1]; i++)
            y[columns[i]] = values[i];
    }
}

// A kernel for each channel. d: channels, input, output, kernel, strides, top and left pad, padded width.
// `padded` has room for a channel with its pads and 4 more than a row needs.
void EXPORT(depthwise)(const float *x, const float *w, const float *bias, float *y, float *padded, const int32_t *d, int32_t relu)
{
    int32_t h = d[1], width = d[2], oh = d[3], ow = d[4], kh = d[5], kw = d[6], sy = d[7], sx = d[8], top = d[9], left = d[10];
    int32_t pitch = d[11], lines = d[12];
    memset(padded, 0, 4 * (size_t)(pitch * lines + 16));
    for (int32_t c = 0; c < d[0]; c++, x += h * width, w += kh * kw, y += oh * ow) {
        for (int32_t r = 0; r < h && r + top < lines; r++)
            memcpy(padded + (r + top) * pitch + left, x + r * width, 4 * (size_t)width);
        for (int32_t r = 0; r < oh; r++)
            for (int32_t j = 0; j < ow; j += 8) {
                v128_t a = SPLAT(bias[c]), b = a;
                for (int32_t u = 0; u < kh; u++) {
                    const float *p = padded + (r * sy + u) * pitch + j * sx;
                    for (int32_t v = 0; v < kw; v++, p++) {
                        v128_t k = SPLAT(w[u * kw + v]);
                        if (sx == 1) {
                            a = ADD(a, MUL(k, LOAD(p)));
                            b = ADD(b, MUL(k, LOAD(p + 4)));
                        } else {
                            a = ADD(a, MUL(k, wasm_f32x4_make(p[0], p[sx], p[2 * sx], p[3 * sx])));
                            b = ADD(b, MUL(k, wasm_f32x4_make(p[4 * sx], p[5 * sx], p[6 * sx], p[7 * sx])));
                        }
                    }
                }
                v128_t s[2] = {a, b};
                if (relu)
                    for (int32_t v = 0; v < 2; v++)
                        s[v] = MAX(s[v], SPLAT(0));
                memcpy(y + r * ow + j, s, 4 * (size_t)(ow - j < 8 ? ow - j : 8));
            }
    }
}

// Largest or mean of windows; d as for depthwise, and whether pads count for a mean.
void EXPORT(pool)(int32_t most, const float *x, float *y, const int32_t *d)
{
    int32_t h = d[1], width = d[2];
    for (int32_t c = 0; c < d[0]; c++, x += h * width)
        for (int32_t r = 0; r < d[3]; r++)
            for (int32_t j = 0; j < d[4]; j++) {
                float s = most ? -__builtin_inff() : 0;
                int32_t count = 0;
                for (int32_t u = r * d[7] - d[9]; u < r * d[7] - d[9] + d[5]; u++)
                    for (int32_t v = j * d[8] - d[10]; v < j * d[8] - d[10] + d[6]; v++) {
                        if (u < 0 || v < 0 || u >= h || v >= width)
                            continue;
                        float a = x[u * width + v];
                        s = most ? a > s ? a : s : s + a;
                        count++;
                    }
                *y++ = most ? s : s / (float)(d[13] ? d[5] * d[6] : count);
            }
}
