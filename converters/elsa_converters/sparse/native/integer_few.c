/* Few rows of x, weights of 8 bits: each row of weights is read once, and takes little memory.
 *
 * Up to 4 rows of x have 16 bits, from 0 to 65535 with 32768 for 0, as high and low bytes; the bounds of integer.c
 * hold for the sums of each. What both come to is added up in 64 bits, exactly. */
#include "integer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64 };

typedef struct {
    elsa_plan *plan;
    const elsa_layer *layer;
    size_t tasks;
    atomic_bool unfit;
} quantising;

static void fill(void *data, size_t task)
{
    quantising *q = data;
    const elsa_layer *layer = q->layer;
    elsa_plan *p = q->plan;
    int8_t *values = p->values;
    int64_t blocks = elsa_parts(elsa_columns(layer), BLOCK);
    int64_t last = elsa_share_of(layer->outputs, task + 1, q->tasks);
    for (int64_t r = elsa_share_of(layer->outputs, task, q->tasks); r < last; r++) {
        int64_t start = elsa_start(layer, r), end = elsa_start(layer, r + 1), total = 0;
        float largest = 0;
        for (int64_t i = start; i < end; i++) {
            float number = elsa_number(layer, i);
            if (!elsa_suits(number)) {
                atomic_store(&q->unfit, true);
                return;
            }
            largest = fmaxf(largest, fabsf(number));
        }
        double inverse = largest > 0 ? 127 / (double)largest : 0;
        p->scales[r] = largest / 127;
        for (int64_t i = start; i < end; i++) {
            int64_t column = elsa_column_of(layer, r, i);
            p->masks[r * blocks + column / BLOCK] |= (uint64_t)1 << column % BLOCK;
            values[i] = (int8_t)lrint((double)elsa_number(layer, i) * inverse);
            total += values[i];
        }
        p->totals[r] = (int32_t)total;
    }
}

bool elsa_quantise_few(elsa_plan *p, const elsa_layer *layer, const elsa_host *host)
{
    size_t outputs = (size_t)layer->outputs, blocks = (size_t)elsa_parts(elsa_columns(layer), BLOCK);
    p->masks = calloc(outputs * blocks, sizeof *p->masks);
    p->scales = malloc(outputs * sizeof *p->scales);
    p->totals = malloc(outputs * sizeof *p->totals);
    p->values = calloc((size_t)layer->count + BLOCK, 1); /* as many are read at once */
    if (!p->masks || !p->scales || !p->totals || !p->values)
        return false;
    quantising q = {.plan = p, .layer = layer};
    q.tasks = (size_t)elsa_smaller((int64_t)elsa_tasks((double)layer->count * 16), layer->outputs);
    host->run(host, fill, q.tasks, &q);
    return !atomic_load(&q.unfit);
}

/* Whether this is faster than floats, or than many rows: with few nonzero weights those have less to do. */
static bool worth(const elsa_layer *layer, int64_t rows)
{
    double nonzero = (double)layer->count / ((double)layer->outputs * (double)elsa_columns(layer));
    return layer->bits == 8 && rows <= ELSA_MOST_FEW && nonzero > (rows > 8 ? 0.15 : 0.07);
}

static bool run(elsa_few_job *job, const elsa_integer_kernels *kernels, const elsa_host *host)
{
    int64_t width = elsa_columns(job->layer), bytes = job->blocks * BLOCK;
    bool wide = job->rows <= ELSA_FEW_WIDE;
    int64_t stride = wide ? 2 * bytes : bytes;
    char *taken = host->take(host, (size_t)(job->rows * stride) + BLOCK);
    if (!taken)
        return false;
    float scale[ELSA_MOST_FEW], inverse;
    int32_t zero[ELSA_MOST_FEW];
    bool suits = true;
    job->packed = (uint8_t *)taken + (-(uintptr_t)taken & (BLOCK - 1));
    job->scale = scale;
    job->zero = zero;
    for (int64_t j = 0; j < job->rows && suits; j++) {
        const float *x = job->x + j * elsa_pitch(job->layer);
        uint8_t *high = job->packed + j * stride;
        int32_t highest;
        uint32_t lowest;
        kernels->range(x, width, &highest, &lowest);
        suits = elsa_scale_of(highest, lowest, wide ? 32767 : 255, &scale[j], &inverse, wide ? NULL : &zero[j]);
        if (wide)
            zero[j] = 32768;
        if (suits)
            kernels->spread(x, width, inverse, zero[j], high, wide ? high + bytes : NULL);
    }
    if (suits) {
        job->tasks = elsa_tasks((double)job->layer->outputs * (double)job->blocks * 64);
        job->tasks = (size_t)elsa_smaller((int64_t)job->tasks, job->layer->outputs);
        host->run(host, kernels->few, job->tasks, job);
    }
    host->give(host, taken);
    return suits;
}

bool elsa_multiply_few(elsa_layer *layer, const elsa_host *host, const float *x, int64_t rows,
                       const float *sum, float *y)
{
    const elsa_integer_kernels *kernels = elsa_integers();
    if (!kernels || !kernels->few || !worth(layer, rows))
        return false;
    elsa_geometry g = {.key = {-1, 0}, .bits = 8, .transposed = true, .length = 1, .area = 1};
    bool kept;
    elsa_plan *plan = elsa_keeps(layer, &g) ? elsa_planned(layer, &g, host, &kept) : NULL;
    if (!plan)
        return false;
    elsa_few_job job = {.layer = layer, .plan = plan, .x = x, .sum = sum, .y = y, .rows = rows,
                        .blocks = elsa_parts(elsa_columns(layer), BLOCK)};
    bool done = plan->values && run(&job, kernels, host);
    if (!kept)
        elsa_unplan(plan);
    return done;
}
