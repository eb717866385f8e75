/* Few rows of x with AVX-512 VNNI and VBMI2: 64 values are put where their bits say, and meet all rows of x. */
#include "integer.h"

#if ELSA_X86
#include "integer_avx512.h"

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,popcnt,avx512f,avx512vl,avx512dq,avx512bw,avx512vnni,avx512vbmi2")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

enum { BLOCK = 64, LANES = 16, AHEAD = 1024 /* bytes that are fetched before they are needed */ };

TARGET void elsa_spread_avx512(const float *x, int64_t count, float inverse, int32_t zero, uint8_t *high, uint8_t *low)
{
    __m512 factor = _mm512_set1_ps(inverse);
    for (int64_t i = 0; i < elsa_parts(count, BLOCK) * BLOCK; i += LANES) {
        int64_t left = count - i;
        __mmask16 mask = (__mmask16)(left >= LANES ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0);
        __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor));
        n = _mm512_add_epi32(n, _mm512_set1_epi32(zero));
        __m128i *to = (__m128i *)(void *)(high + i);
        if (low) {
            _mm_storeu_si128(to, _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 8)));
            _mm_storeu_si128((__m128i *)(void *)(low + i), _mm512_cvtepi32_epi8(n));
        } else {
            _mm_storeu_si128(to, _mm512_cvtusepi32_epi8(_mm512_max_epi32(n, _mm512_setzero_si512())));
        }
    }
}

TARGET INLINE void rows_of(const elsa_few_job *job, int64_t from, int64_t to, const int rows, const bool wide)
{
    const elsa_layer *layer = job->layer;
    const elsa_plan *p = job->plan;
    const int sets = rows == 1 ? 2 : 1, each = wide ? 2 : 1; /* else a product would wait for the one before */
    int64_t stride = each * job->blocks * BLOCK;
    for (int64_t r = from; r < to; r++) {
        const int8_t *values = (const int8_t *)p->values + elsa_start(layer, r);
        const uint64_t *masks = p->masks + r * job->blocks;
        __m512i a[2][2 * ELSA_MOST_FEW];
        UNROLLED
        for (int s = 0; s < sets; s++)
            UNROLLED
            for (int v = 0; v < each * rows; v++)
                a[s][v] = _mm512_setzero_si512();
        for (int64_t b = 0; b < job->blocks; b += sets) {
            __builtin_prefetch(values + AHEAD);
            __builtin_prefetch(masks + b + AHEAD / 8);
            UNROLLED
            for (int s = 0; s < sets; s++) {
                if (b + s >= job->blocks)
                    break;
                __m512i w = _mm512_setzero_si512();
                __asm__("" : "+v"(w)); /* AMD's processors wait for the old target, even where it is not kept */
                w = _mm512_mask_expand_epi8(w, masks[b + s], _mm512_loadu_si512(values));
                const uint8_t *x = job->packed + (b + s) * BLOCK;
                values += __builtin_popcountll(masks[b + s]);
                UNROLLED
                for (int j = 0; j < rows; j++)
                    UNROLLED
                    for (int v = 0; v < each; v++) {
                        const uint8_t *from_x = x + j * stride + v * job->blocks * BLOCK;
                        a[s][each * j + v] = _mm512_dpbusd_epi32(a[s][each * j + v], _mm512_load_si512(from_x), w);
                    }
            }
        }
        UNROLLED
        for (int j = 0; j < rows; j++) {
            int64_t total = -(int64_t)job->zero[j] * p->totals[r], at = j * layer->outputs + r;
            UNROLLED
            for (int s = 0; s < sets; s++)
                UNROLLED
                for (int v = 0; v < each; v++)
                    total += (int64_t)_mm512_reduce_add_epi32(a[s][each * j + v]) * (wide && v == 0 ? 256 : 1);
            float y = (float)total * p->scales[r] * job->scale[j] + layer->bias[r];
            if (job->sum)
                y += job->sum[at];
            job->y[at] = layer->relu && y < 0 ? 0 : y;
        }
    }
}

TARGET void elsa_few_avx512(void *data, size_t task)
{
    const elsa_few_job *job = data;
    int64_t from = elsa_share_of(job->layer->outputs, task, job->tasks);
    int64_t to = elsa_share_of(job->layer->outputs, task + 1, job->tasks);
    switch (job->rows) {
#define ROWS(n)                                              \
    case n:                                                  \
        rows_of(job, from, to, n, (n) <= ELSA_FEW_WIDE);     \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}
#else
typedef int elsa_no_few; /* a file must declare something */
#endif
