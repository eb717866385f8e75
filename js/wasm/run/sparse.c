// The sparse kernels of converters/elsa_converters/sparse/native for WebAssembly: those for floats that stand anywhere.
#include "integer.h"

#include <stdlib.h>
#include <string.h>
#define EXPORT(name) __attribute__((export_name(#name))) name

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")
enum { AHEAD = 512, CACHED = 256 << 10 };
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(x) JOIN(x, KIND, ISA)

static int64_t elsa_share(int64_t whole, size_t i, size_t count)
{
    return (int64_t)((uint64_t)whole * i / count);
}

#define ISA wasm
#define TARGET
#define W 4
#define LANES 4
#define MOST 8
#define PAIRED 4
#define PERMUTES 0
#define KIND floats
#define VALUE float
#define HALF 0
#include "kernels_body.h"

static const elsa_kernels kernels = {
    "wasm", W, LANES, MOST, {gemv_floats_wasm, NULL}, {NULL, NULL}, {spmm_floats_wasm, NULL}};

const elsa_kernels *elsa_chosen(void)
{
    return &kernels;
}

static void run(const elsa_host *host, void (*task)(void *, size_t), size_t count, void *data)
{
    (void)host;
    for (size_t i = 0; i < count; i++)
        task(data, i);
}
static void *take(const elsa_host *host, size_t bytes)
{
    (void)host;
    return malloc(bytes);
}
static void give(const elsa_host *host, void *memory)
{
    (void)host;
    free(memory);
}
static const elsa_host host = {run, take, give};

// Layers here have no bits of integers, which integer.c is for.
bool elsa_multiply_integers(elsa_layer *l, const elsa_geometry *g, const elsa_host *h, const float *x, const float *sum, float *y)
{
    (void)l, (void)g, (void)h, (void)x, (void)sum, (void)y;
    return false;
}

bool elsa_multiply_few(elsa_layer *l, const elsa_host *h, const float *x, int64_t rows, const float *sum, float *y)
{
    (void)l, (void)h, (void)x, (void)rows, (void)sum, (void)y;
    return false;
}

void elsa_quantise(elsa_plan *p, const elsa_layer *l, const elsa_geometry *g, const elsa_host *h)
{
    (void)p, (void)l, (void)g, (void)h;
}

// A layer of arrays that stay where they are; 0 if they are no layer. Shape: outputs, channels, kernel, strides, pads.
elsa_layer *EXPORT(layer)(const int32_t *shape, const int32_t *starts, const uint16_t *columns, const float *values,
                          int32_t count, const float *bias)
{
    elsa_layer *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->outputs = shape[0];
    l->channels = shape[1];
    for (int i = 0; i < 2; i++) {
        l->kernel[i] = shape[2 + i];
        l->stride[i] = shape[4 + i];
    }
    for (int i = 0; i < 4; i++)
        l->pad[i] = shape[6 + i];
    l->starts = starts;
    l->columns = columns;
    l->values = values;
    l->count = count;
    l->bias = bias;
    return elsa_check(l, l->outputs + 1, count, 0, l->outputs) ? NULL : l;
}

int32_t EXPORT(matmul)(elsa_layer *l, const float *x, int32_t rows, const float *sum, float *y, int32_t relu)
{
    l->relu = relu;
    return elsa_matmul(l, &host, x, rows, sum, y) != NULL;
}

int32_t EXPORT(conv)(elsa_layer *l, const float *x, int32_t batch, int32_t height, int32_t width, const float *sum, float *y,
                     int32_t relu)
{
    l->relu = relu;
    const int64_t in[2] = {height, width};
    return elsa_conv(l, &host, x, batch, in, sum, y) != NULL;
}

// compiler-rt has this: the product of 128 bits with which conv.c looks for overflow.
typedef struct { uint64_t low, high; } pair;
void __multi3(pair *out, uint64_t a, uint64_t ah, uint64_t b, uint64_t bh)
{
    uint64_t al = (uint32_t)a, au = a >> 32, bl = (uint32_t)b, bu = b >> 32;
    uint64_t mid = al * bu + (al * bl >> 32), other = au * bl + (uint32_t)mid;
    out->low = a * b;
    out->high = au * bu + (mid >> 32) + (other >> 32) + ah * b + a * bh;
}
