/* Matrix products: rows of weights times vectors while there are few, else as a matrix of columns. */
#include "integer.h"

enum {
    FEW = 4,          /* rows from which packing them pays */
    TASK = 60 * 1000, /* multiplications, in vectors, worth a task of their own: about 2 microseconds */
    SCALAR = 8,       /* what a multiplication costs for which one number is fetched at a time */
    MOST_TASKS = 8,
};

size_t elsa_tasks(double work)
{
    size_t tasks = 1; /* a power of two: two threads share it evenly */
    while (tasks < MOST_TASKS && work > (double)(2 * tasks) * TASK)
        tasks *= 2;
    return tasks;
}

const char *elsa_multiply(elsa_layer *layer, const elsa_plan *plan, const elsa_host *host,
                          int64_t columns, const float *x, const float *sum, float *y)
{
    const elsa_kernels *kernels = elsa_chosen();
    elsa_spmm job = {.layer = layer, .plan = plan, .host = host, .x = x, .sum = sum, .y = y,
                     .columns = columns, .pitch = elsa_pitch(layer)};
    job.blocks = (size_t)elsa_parts(elsa_parts(columns, kernels->width), plan->vectors);
    size_t wanted = elsa_tasks((double)layer->count * (double)columns);
    /* Each part of the rows packs the input anew. */
    job.row_parts = (wanted + job.blocks - 1) / job.blocks;
    job.row_parts = (size_t)elsa_smaller((int64_t)job.row_parts, layer->outputs);
    host->run(host, kernels->spmm[layer->half], job.blocks * job.row_parts, &job);
    return atomic_load(&job.failed) ? ELSA_NO_MEMORY : NULL;
}

/* For n:m each vector of values meets m vectors of candidates, out of which the codes choose. */
static void spread(const elsa_layer *layer, int64_t lanes, const float *x, float *wide)
{
    int64_t groups = lanes / layer->n, m = layer->m;
    for (int64_t at = 0; at < elsa_columns(layer); at += groups * m)
        for (int64_t c = 0; c < m; c++)
            for (int64_t lane = 0; lane < lanes; lane++)
                *wide++ = x[at + lane / layer->n * m + c];
}

static const char *few_rows(elsa_layer *layer, const elsa_host *host, const float *x, int64_t rows,
                            const float *sum, float *y)
{
    const elsa_kernels *kernels = elsa_chosen();
    elsa_gemv job = {.layer = layer, .x = x, .sum = sum, .y = y, .rows = rows,
                    .pitch = elsa_pitch(layer)};
    job.tasks = elsa_tasks((double)layer->count * (double)rows * SCALAR);
    job.tasks = (size_t)elsa_smaller((int64_t)job.tasks, layer->outputs);
    if (layer->starts) {
        host->run(host, kernels->gemv[layer->half], job.tasks, &job);
        return NULL;
    }
    if (!kernels->lanes) {
        job.wide = x;
        host->run(host, kernels->nm[layer->half], job.tasks, &job);
        return NULL;
    }
    int64_t width = elsa_columns(layer), wide = width * layer->n;
    char *taken = host->take(host, (size_t)(rows * wide + ELSA_LINE) * sizeof(float));
    if (!taken)
        return ELSA_NO_MEMORY;
    float *aligned = (float *)(void *)(taken + (-(uintptr_t)taken & 63));
    for (int64_t j = 0; j < rows; j++)
        spread(layer, kernels->lanes, x + j * job.pitch, aligned + j * wide);
    job.wide = aligned;
    host->run(host, kernels->nm[layer->half], job.tasks, &job);
    host->give(host, taken);
    return NULL;
}

const char *elsa_matmul(elsa_layer *layer, const elsa_host *host, const float *x, int64_t rows,
                        const float *sum, float *y)
{
    if (rows && elsa_multiply_few(layer, host, x, rows, sum, y))
        return NULL;
    if (rows < FEW)
        return rows ? few_rows(layer, host, x, rows, sum, y) : NULL;
    /* Blocks of a few widths only: inputs of any number of rows find the layer prepared. */
    const elsa_kernels *kernels = elsa_chosen();
    int64_t vectors = 1;
    while (vectors * kernels->width < rows && 2 * vectors <= kernels->most_vectors)
        vectors *= 2;
    elsa_geometry g = {.key = {vectors, 0}, .transposed = true, .vectors = vectors, .columns = rows,
                       .length = 1, .area = 1, .phases = {1, 1}, .taps = {1, 1}};
    if (elsa_multiply_integers(layer, &g, host, x, sum, y))
        return NULL;
    bool kept;
    elsa_plan *plan = elsa_planned(layer, &g, host, &kept);
    if (!plan)
        return ELSA_NO_MEMORY;
    const char *problem = elsa_multiply(layer, plan, host, rows, x, sum, y);
    if (!kept)
        elsa_unplan(plan);
    return problem;
}
