#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(ELSA_PLAIN)
#define ELSA_X86 1
#include <immintrin.h>
#endif

/* Each word depends on itself alone, so a loop may be vectorised even where dst is src. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define INDEPENDENT __pragma(loop(ivdep))
#else
#define INDEPENDENT
#endif

/* For loops of a few instructions, which would else mostly count. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll_count(8)")
#elif defined(__GNUC__)
#define UNROLLED _Pragma("GCC unroll 8")
#else
#define UNROLLED
#endif

enum {
    CHECKED = 512,     /* words that are checked together */
    CHUNK = 4096,      /* words counted together: their counters stay in the first-level cache */
    BUCKETS = 1 << 14, /* of magnitudes between thresholds; likewise */
};

/* Bytes of output from which streaming stores win, even if it is read right after (measured). */
#define STREAMED (8u << 20)

static inline size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int64_t get_index(const void *array, size_t size, size_t i)
{
    return size == 4 ? ((const elsa_i32 *)array)[i] : ((const elsa_i64 *)array)[i];
}

static void put_index(void *array, size_t size, size_t i, int64_t value)
{
    if (size == 4)
        ((elsa_i32 *)array)[i] = (int32_t)value;
    else
        ((elsa_i64 *)array)[i] = value;
}

static inline size_t bits_set(uint64_t x)
{
#if defined(__GNUC__)
    return (size_t)__builtin_popcountll(x);
#else
    size_t n = 0;
    for (; x; x &= x - 1)
        n++;
    return n;
#endif
}

/* For every byte of a bitmask: the places of its set bits, and for every place the number of set
 * bits below it, or UNSET. As byte shuffles they close and open the gaps of eight words at once. */
#define UNSET 0xC0 /* negative, and still so when doubled: both mean zero to the shuffles */
static uint8_t set_places[256][8];
static uint8_t set_ranks[256][8];

void elsa_fill_tables(void)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        uint8_t rank = 0;
        for (uint8_t place = 0; place < 8; place++) {
            bool set = byte >> place & 1;
            set_ranks[byte][place] = set ? rank : UNSET;
            if (set)
                set_places[byte][rank++] = place;
        }
    }
}

/* kernels_body.h is compiled for every width, in plain C and, on x86, once more with AVX2. */
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(x) JOIN(x, WIDTH, ISA)
#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)

#define ISA plain
#define TARGET
#define AVX2 0
#define WIDTH 16
#define WORD elsa_u16
#include "kernels_body.h"
#define WIDTH 32
#define WORD elsa_u32
#include "kernels_body.h"
#define WIDTH 64
#define WORD elsa_u64
#include "kernels_body.h"
#undef ISA
#undef TARGET
#undef AVX2

#if ELSA_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,bmi,popcnt")))
#define AVX2 1
#define WIDTH 16
#define WORD elsa_u16
#include "kernels_body.h"
#define WIDTH 32
#define WORD elsa_u32
#include "kernels_body.h"
#define WIDTH 64
#define WORD elsa_u64
#include "kernels_body.h"
#endif

const elsa_kernels *elsa_kernels_for(size_t itemsize)
{
#if ELSA_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("popcnt"))
        return itemsize == 2   ? &kernels_16_avx2
               : itemsize == 4 ? &kernels_32_avx2
                               : &kernels_64_avx2;
#endif
    return itemsize == 2 ? &kernels_16_plain : itemsize == 4 ? &kernels_32_plain : &kernels_64_plain;
}
