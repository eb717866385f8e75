/* The operators elsa.SparseMatMul, SparseConv and NMMatMul, with Add and Relu in their names where they
 * add another input and end in a ReLU, for ONNX Runtime's register_custom_ops_library. Their definition in
 * stock operators is in each model, as functions of the same names: see onnx/_fast/functions.py. */
#include "ort_api.h"
#include "../sparse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MATMUL, CONV, NM };
enum { MOST_DIMENSIONS = 16 };

typedef struct {
    ort_operator ort; /* first: ONNX Runtime gives back a pointer to it */
    const char *name;
    int kind;
    bool add, relu;
} operator_;

typedef struct {
    ort_api api;
    const operator_ *op;
    ort_memory_info *memory;
    elsa_layer layer;
    int64_t rank; /* of a convolution's input */
} kernel;

typedef struct {
    void *data;
    int64_t count;
    int type;
    size_t rank;
    int64_t dims[MOST_DIMENSIONS];
} tensor;

static ort_status *problem(ort_api api, const char *what)
{
    return ORT(api, create_status)(ORT_INVALID_ARGUMENT, what);
}

static ort_status *look_at(ort_api api, const ort_value *value, tensor *t)
{
    ort_shape *shape = NULL;
    ort_status *status = ORT(api, get_data)((ort_value *)value, &t->data);
    if (!status)
        status = ORT(api, get_shape)(value, &shape);
    if (!status)
        status = ORT(api, get_type)(shape, &t->type);
    if (!status)
        status = ORT(api, get_rank)(shape, &t->rank);
    if (!status && t->rank > MOST_DIMENSIONS)
        status = problem(api, "a tensor has more than 16 dimensions");
    if (!status)
        status = ORT(api, get_dimensions)(shape, t->dims, t->rank);
    if (shape)
        ORT(api, release_shape)(shape);
    t->count = 1;
    for (size_t i = 0; !status && i < t->rank; i++)
        t->count *= t->dims[i]; /* it is in memory, so this does not overflow */
    return status;
}

/* ---- making a kernel ---- */

static ort_status *describe(ort_api api, const ort_info *info, const operator_ *op, const char *what)
{
    char name[512] = "", text[1024];
    size_t room = sizeof name;
    ort_status *status = ORT(api, get_node_name)(info, name, &room);
    if (status) {
        ORT(api, release_status)(status);
        name[0] = 0;
    }
    snprintf(text, sizeof text, "elsa.%s '%s': %s", op->name, name, what);
    return problem(api, text);
}

static ort_status *constant(ort_api api, const ort_info *info, const operator_ *op, size_t i, tensor *t)
{
    int is_constant = 0;
    const ort_value *value = NULL;
    ort_status *status = ORT(api, get_constant)(info, i, &is_constant, &value);
    if (!status && (!is_constant || !value))
        return describe(api, info, op, "weights must be constants");
    return status ? status : look_at(api, value, t);
}

/* Up to `most` integers of an attribute; how many, or -1. */
static int64_t integers(ort_api api, const ort_info *info, const char *name, int64_t *to, size_t most)
{
    int64_t read[MOST_DIMENSIONS];
    size_t count = MOST_DIMENSIONS;
    ort_status *status = ORT(api, get_integers)(info, name, read, &count);
    if (status)
        ORT(api, release_status)(status);
    if (status || count > most)
        return -1;
    memcpy(to, read, count * sizeof *to);
    return (int64_t)count;
}

/* Of the integers to compute with; 0 for floats, where a model asks for none. */
static const char *set_bits(kernel *k, ort_api api, const ort_info *info)
{
    ort_status *status = ORT(api, get_integer)(info, "bits", &k->layer.bits);
    if (status) {
        ORT(api, release_status)(status);
        k->layer.bits = 0;
        return NULL;
    }
    return k->layer.bits == 16 || k->layer.bits == 8 ? NULL : "bits must be 16 or 8";
}

static const char *set_shape(kernel *k, ort_api api, const ort_info *info)
{
    elsa_layer *layer = &k->layer;
    int64_t shape[4], rank = integers(api, info, "shape", shape, 4);
    for (int i = 0; i < 2; i++)
        layer->kernel[i] = layer->stride[i] = 1;
    if (k->op->kind != CONV) {
        if (rank != 2)
            return "shape must be 2 integers";
    } else {
        if (rank != 3 && rank != 4)
            return "shape must be 3 or 4 integers";
        int64_t strides[2], pads[4], sides = rank - 2;
        if (integers(api, info, "strides", strides, 2) != sides)
            return "strides must be one for each side of the kernel";
        if (integers(api, info, "pads", pads, 4) != 2 * sides)
            return "pads must be two for each side of the kernel";
        for (int64_t i = 0; i < sides; i++) { /* one side: that of columns */
            layer->kernel[2 - sides + i] = shape[2 + i];
            layer->stride[2 - sides + i] = strides[i];
            layer->pad[2 - sides + i] = pads[i];
            layer->pad[4 - sides + i] = pads[sides + i];
        }
    }
    layer->outputs = shape[0];
    layer->channels = shape[1];
    k->rank = rank;
    return NULL;
}

static const char *set_weights(kernel *k, const tensor *values, const tensor *places,
                               const tensor *starts, const tensor *bias)
{
    elsa_layer *layer = &k->layer;
    if (values->type != ORT_FLOAT && values->type != ORT_BFLOAT16)
        return "values must be float or bfloat16";
    if (bias->type != ORT_FLOAT)
        return "bias must be float";
    layer->half = values->type == ORT_BFLOAT16;
    layer->values = values->data;
    layer->count = values->count;
    layer->bias = bias->data;
    layer->relu = k->op->relu;
    if (k->op->kind == NM) {
        if (places->type != ORT_UINT8)
            return "codes must be uint8";
        layer->codes = places->data;
        return elsa_check(layer, 0, 0, places->count, bias->count);
    }
    if (places->type != ORT_UINT16 || starts->type != ORT_INT32)
        return "indices must be uint16 and indptr int32";
    layer->columns = places->data;
    layer->starts = starts->data;
    if (!layer->columns || !layer->starts)
        return "there must be values";
    return elsa_check(layer, starts->count, places->count, 0, bias->count);
}

static void destroy(void *data)
{
    kernel *k = data;
    elsa_forget(&k->layer);
    if (k->memory)
        ORT(k->api, release_memory_info)(k->memory);
    free(k);
}

static ort_status *create(const ort_operator *ort, ort_api api, const ort_info *info, void **made)
{
    const operator_ *op = (const operator_ *)(const void *)ort;
    kernel *k = calloc(1, sizeof *k);
    if (!k)
        return describe(api, info, op, "out of memory");
    k->api = api;
    k->op = op;
    const char *what = set_shape(k, api, info);
    if (!what)
        what = set_bits(k, api, info);
    if (!what && op->kind == NM) {
        int64_t pattern[2];
        if (integers(api, info, "pattern", pattern, 2) != 2)
            what = "pattern must be 2 integers";
        else {
            k->layer.n = pattern[0];
            k->layer.m = pattern[1];
        }
    }
    tensor values = {0}, places = {0}, starts = {0}, bias = {0};
    ort_status *status = what ? NULL : constant(api, info, op, 1, &values);
    if (!what && !status)
        status = constant(api, info, op, 2, &places);
    if (!what && !status && op->kind != NM)
        status = constant(api, info, op, 3, &starts);
    if (!what && !status)
        status = constant(api, info, op, op->kind == NM ? 3 : 4, &bias);
    if (!what && !status)
        what = set_weights(k, &values, &places, &starts, &bias);
    if (!what && !status)
        status = ORT(api, create_memory_info)(ORT_ARENA_ALLOCATOR, ORT_MEMORY_DEFAULT, &k->memory);
    if (!what && !status) {
        *made = k;
        return NULL;
    }
    destroy(k);
    return what ? describe(api, info, op, what) : status;
}

/* ---- running it ---- */

typedef struct {
    elsa_host host; /* first */
    ort_api api;
    const ort_context *context;
    ort_allocator *allocator;
} runner;

static void run(const elsa_host *host, void (*task)(void *, size_t), size_t count, void *data)
{
    const runner *r = (const runner *)(const void *)host;
    ort_status *status = NULL;
    if (count > 1)
        status = ORT(r->api, run_parallel)(r->context, task, count, 0, data);
    if (status || count == 1) { /* without its threads, then here */
        if (status)
            ORT(r->api, release_status)(status);
        for (size_t i = 0; i < count; i++)
            task(data, i);
    }
}

static void *take(const elsa_host *host, size_t bytes)
{
    const runner *r = (const runner *)(const void *)host;
    return r->allocator->alloc(r->allocator, bytes);
}

static void give(const elsa_host *host, void *memory)
{
    const runner *r = (const runner *)(const void *)host;
    r->allocator->free(r->allocator, memory);
}

static ort_status *get_input(const kernel *k, const ort_context *context, size_t i, tensor *t)
{
    const ort_value *value = NULL;
    ort_status *status = ORT(k->api, get_input)(context, i, &value);
    return status ? status : look_at(k->api, value, t);
}

static const char *set_output_shape(const kernel *k, tensor *x, tensor *y)
{
    if (k->op->kind != CONV) {
        if (x->rank < 1 || x->dims[x->rank - 1] != k->layer.channels)
            return "the input's last dimension is not that of the weights";
        *y = *x;
        y->dims[x->rank - 1] = k->layer.outputs;
        return NULL;
    }
    if ((int64_t)x->rank != k->rank || x->dims[1] != k->layer.channels)
        return "the input has not the dimensions and channels of the weights";
    int64_t in[2] = {1, x->dims[x->rank - 1]}, out[2];
    if (k->rank == 4)
        in[0] = x->dims[2];
    if (!elsa_conv_size(&k->layer, in, out))
        return "the kernel is larger than the padded input";
    *y = *x;
    y->dims[1] = k->layer.outputs;
    memcpy(y->dims + 2, out + (k->rank == 4 ? 0 : 1), (size_t)(k->rank - 2) * sizeof *out);
    return NULL;
}

static bool same_shape(const tensor *a, const tensor *b)
{
    return a->rank == b->rank && memcmp(a->dims, b->dims, a->rank * sizeof *a->dims) == 0;
}

static ort_status *compute(void *data, ort_context *context)
{
    kernel *k = data;
    ort_api api = k->api;
    tensor x = {0}, y = {0}, sum = {0};
    ort_status *status = get_input(k, context, 0, &x);
    if (!status && k->op->add)
        status = get_input(k, context, k->op->kind == NM ? 4 : 5, &sum);
    if (status)
        return status;
    if (x.type != ORT_FLOAT || (k->op->add && sum.type != ORT_FLOAT))
        return problem(api, "inputs must be float");
    const char *what = set_output_shape(k, &x, &y);
    if (!what && k->op->add && !same_shape(&sum, &y))
        what = "what is added has not the shape of the output";
    if (what)
        return problem(api, what);
    ort_value *output = NULL;
    status = ORT(api, get_output)(context, 0, y.dims, y.rank, &output);
    if (!status)
        status = ORT(api, get_data)(output, &y.data);
    runner r = {{run, take, give}, api, context, NULL};
    if (!status)
        status = ORT(api, get_allocator)(context, k->memory, &r.allocator);
    if (status)
        return status;
    int64_t elements = 1;
    for (size_t i = 0; i < y.rank; i++)
        elements *= y.dims[i];
    if (elements && k->op->kind == CONV) {
        int64_t in[2] = {k->rank == 4 ? x.dims[2] : 1, x.dims[x.rank - 1]};
        what = elsa_conv(&k->layer, &r.host, x.data, x.dims[0], in, sum.data, y.data);
    } else if (elements) {
        what = elsa_matmul(&k->layer, &r.host, x.data, x.count / k->layer.channels, sum.data, y.data);
    }
    ORT(api, release_allocator)(r.allocator);
    return what ? problem(api, what) : NULL;
}

/* ---- what ONNX Runtime asks ---- */

static const char *get_name(const ort_operator *op)
{
    return ((const operator_ *)(const void *)op)->name;
}

static const char *get_provider(const ort_operator *op)
{
    (void)op;
    return NULL; /* the CPU's */
}

static size_t get_inputs(const ort_operator *op)
{
    const operator_ *o = (const operator_ *)(const void *)op;
    return (o->kind == NM ? 4u : 5u) + o->add;
}

static int get_input_type(const ort_operator *op, size_t i)
{
    bool nm = ((const operator_ *)(const void *)op)->kind == NM;
    switch (i) {
    case 1: return ORT_ANY; /* checked in set_weights */
    case 2: return nm ? ORT_UINT8 : ORT_UINT16;
    case 3: return nm ? ORT_FLOAT : ORT_INT32;
    default: return ORT_FLOAT;
    }
}

static size_t get_outputs(const ort_operator *op)
{
    (void)op;
    return 1;
}

static int get_output_type(const ort_operator *op, size_t i)
{
    (void)op, (void)i;
    return ORT_FLOAT;
}

static int get_required(const ort_operator *op, size_t i)
{
    (void)op, (void)i;
    return ORT_REQUIRED;
}

static int get_memory(const ort_operator *op, size_t i)
{
    (void)op, (void)i;
    return ORT_MEMORY_DEFAULT;
}

static int get_variadic(const ort_operator *op)
{
    (void)op;
    return 1;
}

#define OPERATOR(text, kind, add, relu)                                                           \
    {{ORT_VERSION, NULL, get_name, get_provider, get_input_type, get_inputs, get_output_type,      \
      get_outputs, NULL, destroy, get_required, get_required, get_memory,                          \
      {get_variadic, get_variadic, get_variadic, get_variadic}, create, compute, {NULL}},          \
     text, kind, add, relu}
#define OPERATORS(text, kind)                                                          \
    OPERATOR(text, kind, false, false), OPERATOR(text "Add", kind, true, false),       \
    OPERATOR(text "Relu", kind, false, true), OPERATOR(text "AddRelu", kind, true, true)

static const operator_ OPERATORS_[] = {
    OPERATORS("SparseMatMul", MATMUL),
    OPERATORS("SparseConv", CONV),
    OPERATORS("NMMatMul", NM),
};

ELSA_EXPORTED ort_status *RegisterCustomOps(ort_options *, const ort_base *);
ELSA_EXPORTED const char *elsa_sparse_isa(void);

const char *elsa_sparse_isa(void)
{
    return elsa_isa();
}

ort_status *RegisterCustomOps(ort_options *options, const ort_base *base)
{
    ort_api api = base->get_api(ORT_VERSION);
    if (!api) { /* older than 1.17; what version 1 has is the same */
        api = base->get_api(1);
        return api ? ORT(api, create_status)(ORT_FAIL, "elsa: needs ONNX Runtime 1.17 or newer") : NULL;
    }
    /* Options do not own a domain, and the sessions they make use it: one, for as long as the process. */
    static _Atomic(ort_domain *) shared;
    ort_domain *domain = atomic_load(&shared), *nobody = NULL;
    if (domain)
        return ORT(api, add_domain)(options, domain);
    ort_status *status = ORT(api, create_domain)("elsa", &domain);
    for (size_t i = 0; !status && i < sizeof OPERATORS_ / sizeof *OPERATORS_; i++)
        status = ORT(api, add_operator)(domain, &OPERATORS_[i].ort);
    if (!status && atomic_compare_exchange_strong(&shared, &nobody, domain))
        return ORT(api, add_domain)(options, domain);
    if (domain) /* it failed, or another thread was faster */
        ORT(api, release_domain)(domain);
    return status ? status : ORT(api, add_domain)(options, nobody);
}
