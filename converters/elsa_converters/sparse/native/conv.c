/* Convolutions: a product of the weights with the input as it is seen by each place of the kernel.
 *
 * In planes that are padded, and split by the strides into phases (every second row and column, say), a
 * step of the kernel is a step of one column or one row, and all outputs of a channel are one run of
 * columns, with gaps where a row of the input ends. */
#include "integer.h"

#include <string.h>

bool elsa_conv_size(const elsa_layer *layer, const int64_t in[2], int64_t out[2])
{
    for (int i = 0; i < 2; i++) {
        int64_t room = in[i] + layer->pad[i] + layer->pad[i + 2] - layer->kernel[i];
        if (in[i] < 0 || room < 0)
            return false;
        out[i] = room / layer->stride[i] + 1;
    }
    return true;
}

typedef struct {
    const elsa_layer *layer;
    const float *x;
    float *planes;
    int64_t in[2], rows, pitch;
    const int64_t *phases;
    size_t tasks;
} padding;

/* One row of a plane from a row of the input: every stride-th column from `first` on. */
static void pad_row(float *to, int64_t count, const float *from, int64_t width, int64_t first,
                    int64_t stride)
{
    int64_t before = first < 0 ? elsa_smaller(elsa_parts(-first, stride), count) : 0;
    int64_t begin = first + before * stride;
    int64_t there = begin < width ? elsa_parts(width - begin, stride) : 0;
    there = elsa_smaller(there, count - before);
    memset(to, 0, (size_t)before * sizeof *to);
    if (stride == 1)
        memcpy(to + before, from + begin, (size_t)there * sizeof *to);
    else if (stride == 2) /* with a constant, the compiler finds the vector instructions */
        for (int64_t i = 0; i < there; i++)
            to[before + i] = from[begin + i * 2];
    else
        for (int64_t i = 0; i < there; i++)
            to[before + i] = from[begin + i * stride];
    memset(to + before + there, 0, (size_t)(count - before - there) * sizeof *to);
}

static void pad(void *data, size_t task)
{
    const padding *p = data;
    const elsa_layer *layer = p->layer;
    int64_t first = (int64_t)((uint64_t)layer->channels * task / p->tasks);
    int64_t last = (int64_t)((uint64_t)layer->channels * (task + 1) / p->tasks);
    float *to = p->planes + first * p->phases[0] * p->phases[1] * p->rows * p->pitch;
    for (int64_t c = first; c < last; c++) {
        const float *x = p->x + c * p->in[0] * p->in[1];
        for (int64_t a = 0; a < p->phases[0]; a++)
            for (int64_t b = 0; b < p->phases[1]; b++)
                for (int64_t r = 0; r < p->rows; r++, to += p->pitch) {
                    int64_t line = r * layer->stride[0] + a - layer->pad[0];
                    if (line < 0 || line >= p->in[0])
                        memset(to, 0, (size_t)p->pitch * sizeof *to);
                    else
                        pad_row(to, p->pitch, x + line * p->in[1], p->in[1], b - layer->pad[1],
                                layer->stride[1]);
                }
    }
}

/* Bytes of the planes of one picture; 0 if that is more than there can be. */
static size_t planes_size(const elsa_layer *layer, const elsa_geometry *g)
{
    size_t size = sizeof(float);
    int64_t factors[] = {layer->channels, g->phases[0], g->phases[1], g->length};
    for (int i = 0; i < 4; i++)
        if (__builtin_mul_overflow(size, (size_t)factors[i], &size) || size > PTRDIFF_MAX / 2)
            return 0;
    return size;
}

const char *elsa_conv(elsa_layer *layer, const elsa_host *host, const float *x, int64_t batch,
                      const int64_t in[2], const float *sum, float *y)
{
    int64_t out[2];
    if (!elsa_conv_size(layer, in, out))
        return "the kernel is larger than the padded input";
    const int64_t *kernel = layer->kernel, *stride = layer->stride, *pads = layer->pad;
    bool as_it_is = kernel[0] == 1 && kernel[1] == 1 && stride[0] == 1 && stride[1] == 1 &&
                    !pads[0] && !pads[1] && !pads[2] && !pads[3];
    if (as_it_is && in[0] == 1 && in[1] == 1)
        return elsa_matmul(layer, host, x, batch, sum, y);

    elsa_geometry g = {.key = {in[0], in[1]}, .width = out[1]};
    for (int i = 0; i < 2; i++) {
        g.phases[i] = elsa_smaller(stride[i], kernel[i]);
        g.taps[i] = (kernel[i] - 1) / stride[i] + 1;
    }
    g.pitch = out[1] + g.taps[1] - 1;
    if (stride[1] == 1) /* what pads a row on its right is what pads the next one on its left */
        g.pitch -= elsa_smaller(pads[1], pads[3]);
    g.pitch = elsa_larger(g.pitch, out[1]);
    int64_t rows = out[0] + g.taps[0] - 1;
    if (__builtin_mul_overflow(rows, g.pitch, &g.length) ||
        __builtin_mul_overflow(out[0], out[1], &g.area))
        return "the output is too large";
    g.columns = (out[0] - 1) * g.pitch + out[1];

    size_t size = as_it_is ? 0 : planes_size(layer, &g);
    if (!as_it_is && !size)
        return "the padded input is too large";
    bool kept = true;
    elsa_plan *plan = NULL;
    float *planes = size ? host->take(host, size) : NULL;
    const char *problem = size && !planes ? ELSA_NO_MEMORY : NULL;
    padding job = {.layer = layer, .planes = planes, .in = {in[0], in[1]}, .rows = rows,
                   .pitch = g.pitch, .phases = g.phases, .tasks = elsa_tasks((double)size / 4)};
    job.tasks = (size_t)elsa_smaller((int64_t)job.tasks, layer->channels);
    for (int64_t b = 0; b < batch && !problem; b++) {
        job.x = x + b * layer->channels * in[0] * in[1];
        if (planes)
            host->run(host, pad, job.tasks, &job);
        int64_t at = b * layer->outputs * g.area;
        const float *from = planes ? planes : job.x, *more = sum ? sum + at : NULL;
        if (elsa_multiply_integers(layer, &g, host, from, more, y + at))
            continue;
        plan = plan ? plan : elsa_planned(layer, &g, host, &kept);
        problem = plan ? elsa_multiply(layer, plan, host, g.columns, from, more, y + at) : ELSA_NO_MEMORY;
    }
    if (planes)
        host->give(host, planes);
    if (plan && !kept)
        elsa_unplan(plan);
    return problem;
}
