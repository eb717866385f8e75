#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

enum {
    AHEAD = 512,       /* values that are fetched before they are needed */
    CACHED = 256 << 10, /* at most so many values are in the cache from the last run */
};

/* Where share `i` of `count` equal shares of the whole begins. */
static int64_t elsa_share(int64_t whole, size_t i, size_t count)
{
    /* Rows of weights (31 bits) by some dozens, or vectors in memory by fewer blocks of them: both fit. */
    return (int64_t)((uint64_t)whole * i / count);
}

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(x) JOIN(x, KIND, ISA)
#define TABLE_(isa) elsa_kernels_##isa
#define TABLE(isa) TABLE_(isa)
#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)

#define KERNELS(isa)                                                                    \
    const elsa_kernels TABLE(isa) = {                                                   \
        QUOTE(isa), W, PERMUTES ? 0 : LANES, MOST,                                                            \
        {JOIN(gemv, floats, isa), JOIN(gemv, halves, isa)},                             \
        {JOIN(nm, floats, isa), JOIN(nm, halves, isa)},                                 \
        {JOIN(spmm, floats, isa), JOIN(spmm, halves, isa)},                             \
    }

/* SSE2 on x86-64, NEON on ARM. */
#define ISA base
#define TARGET
#define W 4
#define LANES 4
#define MOST 12
#define PAIRED 4
#define PERMUTES 0
#define KIND floats
#define VALUE float
#define HALF 0
#include "kernels_body.h"
#undef KIND
#define KIND halves
#define VALUE uint16_t
#define HALF 1
#include "kernels_body.h"
#undef KIND
KERNELS(base);
#undef ISA
#undef TARGET
#undef W
#undef LANES
#undef MOST
#undef PAIRED
#undef PERMUTES

#if ELSA_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#define W 8
#define LANES 8
#define MOST 12
#define PAIRED 6
#define PERMUTES 1
#define KIND floats
#define VALUE float
#define HALF 0
#include "kernels_body.h"
#undef KIND
#define KIND halves
#define VALUE uint16_t
#define HALF 1
#include "kernels_body.h"
#undef KIND
KERNELS(avx2);
#undef ISA
#undef TARGET
#undef W
#undef MOST
#undef PAIRED

#define ISA avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw")))
#define W 16
#define MOST 12
#define PAIRED 12
#define KIND floats
#define VALUE float
#define HALF 0
#include "kernels_body.h"
#undef KIND
#define KIND halves
#define VALUE uint16_t
#define HALF 1
#include "kernels_body.h"
#undef KIND
KERNELS(avx512);
#endif

static const elsa_kernels *choose(void)
{
#if ELSA_X86
    const char *asked = getenv("ELSA_SPARSE_ISA"); /* to test and compare */
    __builtin_cpu_init();
    if (asked && strcmp(asked, "base") == 0)
        return &elsa_kernels_base;
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    if (avx512 && !(asked && strcmp(asked, "avx2") == 0))
        return &elsa_kernels_avx512;
    if (avx2)
        return &elsa_kernels_avx2;
#endif
    return &elsa_kernels_base;
}

const elsa_kernels *elsa_chosen(void)
{
    static _Atomic(const elsa_kernels *) chosen;
    const elsa_kernels *known = atomic_load(&chosen);
    if (!known)
        atomic_store(&chosen, known = choose()); /* others would choose the same */
    return known;
}

const char *elsa_isa(void)
{
    return elsa_chosen()->name;
}
