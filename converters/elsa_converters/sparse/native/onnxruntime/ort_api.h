/* The few entries of ONNX Runtime's C interface that a custom operator needs, by their place in its table.
 *
 * Places never change (version 17 of the table, ONNX Runtime 1.17 and newer), and the headers come with
 * none of the packages that people install, so none are needed to build this. */
#ifndef ELSA_ORT_API_H
#define ELSA_ORT_API_H

#include <stddef.h>
#include <stdint.h>

enum { ORT_VERSION = 17 };

typedef struct ort_status ort_status; /* NULL: all is well */
typedef struct ort_value ort_value;
typedef struct ort_shape ort_shape;
typedef struct ort_info ort_info;       /* of a kernel that is being made */
typedef struct ort_context ort_context; /* of a run */
typedef struct ort_domain ort_domain;
typedef struct ort_options ort_options;
typedef struct ort_memory_info ort_memory_info;

typedef struct ort_allocator {
    uint32_t version;
    void *(*alloc)(struct ort_allocator *, size_t);
    void (*free)(struct ort_allocator *, void *);
} ort_allocator;

typedef void (*ort_function)(void);
typedef const ort_function *ort_api;

typedef struct {
    ort_api (*get_api)(uint32_t version);
    const char *(*version)(void);
} ort_base;

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ORT_ANY = 0, ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_UINT16 = 4, ORT_INT32 = 6, ORT_BFLOAT16 = 16 };
enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };
enum { ORT_DEVICE_ALLOCATOR = 0, ORT_ARENA_ALLOCATOR = 1, ORT_MEMORY_DEFAULT = 0 };

/* ORT(api, name)(arguments) calls the function in the place that is given here. */
#define ORT(api, name) ((ort_##name)(api)[ORT_PLACE_##name])
#define ORT_FUNCTION(place, result, name, ...) \
    enum { ORT_PLACE_##name = place };         \
    typedef result (*ort_##name)(__VA_ARGS__)

ORT_FUNCTION(0, ort_status *, create_status, int code, const char *message);
ORT_FUNCTION(26, ort_status *, create_domain, const char *name, ort_domain **);
ORT_FUNCTION(27, ort_status *, add_operator, ort_domain *, const void *operator_);
ORT_FUNCTION(28, ort_status *, add_domain, ort_options *, ort_domain *);
ORT_FUNCTION(51, ort_status *, get_data, ort_value *, void **);
ORT_FUNCTION(60, ort_status *, get_type, const ort_shape *, int *);
ORT_FUNCTION(61, ort_status *, get_rank, const ort_shape *, size_t *);
ORT_FUNCTION(62, ort_status *, get_dimensions, const ort_shape *, int64_t *, size_t rank);
ORT_FUNCTION(65, ort_status *, get_shape, const ort_value *, ort_shape **);
ORT_FUNCTION(69, ort_status *, create_memory_info, int allocator, int memory, ort_memory_info **);
ORT_FUNCTION(86, ort_status *, get_integer, const ort_info *, const char *name, int64_t *);
ORT_FUNCTION(90, ort_status *, get_input, const ort_context *, size_t, const ort_value **);
ORT_FUNCTION(91, ort_status *, get_output, ort_context *, size_t, const int64_t *, size_t rank,
             ort_value **);
ORT_FUNCTION(93, void, release_status, ort_status *);
ORT_FUNCTION(94, void, release_memory_info, ort_memory_info *);
ORT_FUNCTION(99, void, release_shape, ort_shape *);
ORT_FUNCTION(101, void, release_domain, ort_domain *);
ORT_FUNCTION(132, void, release_allocator, ort_allocator *);
ORT_FUNCTION(163, ort_status *, get_integers, const ort_info *, const char *name, int64_t *,
             size_t *count);
ORT_FUNCTION(244, ort_status *, get_node_name, const ort_info *, char *, size_t *);
ORT_FUNCTION(249, ort_status *, get_constant, const ort_info *, size_t, int *, const ort_value **);
ORT_FUNCTION(253, ort_status *, get_allocator, const ort_context *, const ort_memory_info *,
             ort_allocator **);
ORT_FUNCTION(274, ort_status *, run_parallel, const ort_context *, void (*)(void *, size_t),
             size_t total, size_t batches, void *);

/* What ONNX Runtime asks an operator. */
typedef struct ort_operator {
    uint32_t version;
    void *(*create)(const struct ort_operator *, ort_api, const ort_info *); /* not used: see below */
    const char *(*name)(const struct ort_operator *);
    const char *(*provider)(const struct ort_operator *);
    int (*input_type)(const struct ort_operator *, size_t);
    size_t (*inputs)(const struct ort_operator *);
    int (*output_type)(const struct ort_operator *, size_t);
    size_t (*outputs)(const struct ort_operator *);
    void (*compute)(void *, ort_context *); /* not used */
    void (*destroy)(void *);
    int (*input_kind)(const struct ort_operator *, size_t);
    int (*output_kind)(const struct ort_operator *, size_t);
    int (*input_memory)(const struct ort_operator *, size_t);
    int (*variadic[4])(const struct ort_operator *);
    /* These two can fail. */
    ort_status *(*create_or_fail)(const struct ort_operator *, ort_api, const ort_info *, void **);
    ort_status *(*compute_or_fail)(void *, ort_context *);
    void (*later[7])(void); /* shape inference, versions, memory that is used again */
} ort_operator;

#endif
