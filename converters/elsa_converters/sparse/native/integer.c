/* Layers computed in integers: which of them, and how inputs and weights become integers.
 *
 * 16 bits: an input x becomes round(x / s), s = max|x| / 16383, of the column it belongs to. A weight w becomes
 * round(w / t); t is so large for each row's part of a chunk that the integers' sizes add up to at most 131072.
 * So no sum exceeds 131072 × 16383 < 2^31, whatever the signs and the order; chunks are added up as floats.
 *
 * 8 bits: an input becomes round(x / s) + z from 0 to 255, s = (max - min) / 255 of the column, with 0 among them; a
 * weight round(w / t) from -127 to 127, t = max|w| / 127 of the row. At most 65536 products: 65536 × 127 × 255 < 2^31.
 * What z adds is a row's total times z, as large at most; the difference is exact, since both wrap alike. */
#include "integer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK = 32 << 10,       /* bytes of packed input, in the first-level cache beside values and sums */
    MOST_WEIGHTS = 131072,  /* sizes of the 16-bit values of a row in a chunk */
    MOST_PLANES = 256,      /* in a chunk of a matrix product: the fewer, the finer are 16-bit values */
    FEWEST_COLUMNS = 6,     /* of what floats multiply as fast */
};
static const float SMALLEST = 0x1p-60f, LARGEST = 0x1p60f; /* sizes whose scales and products are normal floats */

_Static_assert((int64_t)MOST_WEIGHTS * ELSA_MOST_INPUT <= INT32_MAX, "16 bits do not overflow");
_Static_assert((int64_t)ELSA_MOST_COLUMNS * 127 * 255 <= INT32_MAX, "8 bits do not overflow");

const elsa_integer_kernels *elsa_integers(void)
{
#if ELSA_X86
    if (elsa_chosen() == &elsa_kernels_avx512 && __builtin_cpu_supports("avx512vnni"))
        return __builtin_cpu_supports("avx512vbmi2") ? &elsa_integers_vbmi2 : &elsa_integers_avx512;
#endif
    return NULL;
}

static const elsa_integer_kernel *kernel_of(int64_t bits)
{
    const elsa_integer_kernels *kernels = elsa_integers();
    return !kernels ? NULL : bits == 16 ? &kernels->words : bits == 8 ? &kernels->bytes : NULL;
}

/* ---- weights ---- */

bool elsa_suits(float weight)
{
    float size = fabsf(weight);
    return size == 0 || (size >= SMALLEST && size <= LARGEST);
}

typedef struct {
    elsa_plan *plan;
    const elsa_layer *layer;
    const elsa_geometry *g;
    const elsa_integer_kernel *kernel;
    size_t tasks;
    atomic_bool unfit;
} quantising;

/* Of a row, the first value from i on that belongs to a chunk after c: chunks have whole channels. */
static int64_t part_end(const quantising *q, int64_t r, int64_t i, int64_t c)
{
    int64_t channels = (c + 1) * q->plan->chunk / (q->g->phases[0] * q->g->phases[1]);
    int64_t limit = channels * q->layer->kernel[0] * q->layer->kernel[1];
    int64_t end = elsa_start(q->layer, r + 1);
    while (i < end && elsa_column_of(q->layer, r, i) < limit)
        i++;
    return i;
}

/* How many groups each row has in each chunk, and whether its sizes suit. */
static void count_groups(void *data, size_t task)
{
    quantising *q = data;
    const elsa_plan *p = q->plan;
    int64_t outputs = q->layer->outputs, last = elsa_share_of(outputs, task + 1, q->tasks);
    for (int64_t r = elsa_share_of(outputs, task, q->tasks); r < last; r++) {
        int64_t i = elsa_start(q->layer, r);
        for (int64_t c = 0; c < p->chunks; c++) {
            int64_t end = part_end(q, r, i, c);
            p->parts[c * outputs + r] = (int32_t)elsa_parts(end - i, q->kernel->group);
            for (; i < end; i++)
                if (!elsa_suits(elsa_number(q->layer, i)))
                    atomic_store(&q->unfit, true);
        }
    }
}

/* What an integer of 16 bits is worth, for the values i up to end of a row. */
static float words_scale(const elsa_layer *layer, int64_t i, int64_t end)
{
    double sum = 0, largest = 0, room = MOST_WEIGHTS - 2 - (double)(end - i) / 2; /* each rounds up by half at most */
    for (; i < end; i++) {
        double size = fabs((double)elsa_number(layer, i));
        sum += size;
        largest = size > largest ? size : largest;
    }
    double wanted = sum / room;
    wanted = wanted > largest / 32766 ? wanted : largest / 32766;
    return (float)(wanted * (1 + 0x1p-20)); /* however it is rounded, not smaller */
}

static float bytes_scale(const elsa_layer *layer, int64_t i, int64_t end)
{
    double largest = 0;
    for (; i < end; i++)
        largest = fmax(largest, fabs((double)elsa_number(layer, i)));
    return (float)(largest / 127);
}

static void fill_groups(void *data, size_t task)
{
    quantising *q = data;
    const elsa_layer *layer = q->layer;
    const elsa_plan *p = q->plan;
    int64_t outputs = layer->outputs, last = elsa_share_of(outputs, task + 1, q->tasks);
    for (int64_t r = elsa_share_of(outputs, task, q->tasks); r < last; r++) {
        int64_t i = elsa_start(layer, r), total = 0;
        float scale = p->bits == 8 ? bytes_scale(layer, i, elsa_start(layer, r + 1)) : 0;
        for (int64_t c = 0; c < p->chunks; c++) {
            int64_t at = p->parts[c * outputs + r] * q->kernel->group;
            int64_t stop = p->parts[c * outputs + r + 1] * q->kernel->group, next = part_end(q, r, i, c);
            if (p->bits == 16)
                p->scales[c * outputs + r] = scale = words_scale(layer, i, next);
            uint16_t offset = 0; /* fillers are 0 times any input */
            for (; at < stop; at++) {
                long value = 0;
                if (i < next) {
                    value = scale > 0 ? lrint((double)elsa_number(layer, i) / (double)scale) : 0;
                    offset = (uint16_t)elsa_place_of(layer, q->g, p, elsa_column_of(layer, r, i)).offset;
                    i++;
                }
                p->offsets[at] = offset;
                if (p->bits == 16)
                    ((int16_t *)p->values)[at] = (int16_t)value;
                else
                    ((int8_t *)p->values)[at] = (int8_t)value;
                total += value;
            }
        }
        if (p->bits == 8) {
            p->scales[r] = scale;
            p->totals[r] = (int32_t)total;
        }
    }
}

/* A rough count of cycles, to choose the number of vectors in a block. */
static double cost(const elsa_layer *layer, const elsa_plan *p, int64_t columns,
                   const elsa_integer_kernel *kernel)
{
    double vectors = (double)p->vectors, groups = (double)layer->count / (double)kernel->group;
    double blocks = (double)elsa_parts(columns, kernel->width * p->vectors);
    double parts = (double)(p->chunks * layer->outputs), each = kernel->group == 2 ? 2 : 5;
    double packing = (double)(p->planes * p->segments * p->segment) / 8;
    return blocks * (parts * (20 + 4 * vectors) + (groups + parts / 2) * fmax(each * vectors, 4) + packing);
}

static bool lay_out(elsa_plan *p, const elsa_layer *layer, const elsa_geometry *g,
                    const elsa_integer_kernel *kernel)
{
    int64_t element = p->bits / 8;
    if (p->transposed) /* the key is the number of vectors: any number of rows takes the same integers */
        return elsa_cut(p, g, g->key[0], kernel->width,
                        elsa_smaller(CHUNK, MOST_PLANES * g->key[0] * kernel->width * element), element);
    int64_t all = elsa_parts(g->columns, kernel->width), best = 0;
    double least = 0;
    for (int64_t vectors = 1; vectors <= elsa_smaller(kernel->most_vectors, all); vectors++) {
        if (!elsa_cut(p, g, vectors, kernel->width, CHUNK, element))
            break;
        double now = cost(layer, p, g->columns, kernel);
        if (!best || now < least) {
            best = vectors;
            least = now;
        }
    }
    return best && elsa_cut(p, g, best, kernel->width, CHUNK, element);
}

static bool fill(quantising *q, const elsa_host *host)
{
    elsa_plan *p = q->plan;
    const elsa_layer *layer = q->layer;
    if (!lay_out(p, layer, q->g, q->kernel))
        return false;
    int64_t outputs = layer->outputs, parts = p->chunks * outputs, groups = 0;
    p->parts = calloc((size_t)parts + 1, sizeof *p->parts);
    p->scales = malloc((size_t)(p->bits == 16 ? parts : outputs) * sizeof *p->scales);
    p->totals = p->bits == 8 ? malloc((size_t)outputs * sizeof *p->totals) : NULL;
    if (!p->parts || !p->scales || (p->bits == 8 && !p->totals))
        return false;
    q->tasks = (size_t)elsa_smaller((int64_t)elsa_tasks((double)layer->count * 16), outputs);
    host->run(host, count_groups, q->tasks, q);
    for (int64_t i = 0; i <= parts; i++) {
        int64_t these = p->parts[i];
        if (groups > INT32_MAX)
            return false;
        p->parts[i] = (int32_t)groups;
        groups += these;
    }
    if (atomic_load(&q->unfit))
        return false;
    size_t places = (size_t)(groups * q->kernel->group);
    p->offsets = malloc(places * sizeof *p->offsets);
    p->values = malloc(places * (size_t)p->bits / 8);
    if (!p->offsets || !p->values)
        return false;
    host->run(host, fill_groups, q->tasks, q);
    return true;
}

void elsa_quantise(elsa_plan *p, const elsa_layer *layer, const elsa_geometry *g, const elsa_host *host)
{
    quantising q = {.plan = p, .layer = layer, .g = g, .kernel = kernel_of(p->bits)};
    if (g->key[0] < 0 ? elsa_quantise_few(p, layer, host) : fill(&q, host))
        return;
    free(p->values);
    p->values = NULL;
}

/* ---- inputs ---- */

static float from_bits(uint32_t bits)
{
    union { uint32_t bits; float number; } u = {bits};
    return u.number;
}

bool elsa_scale_of(int32_t highest, uint32_t lowest, float steps, float *scale, float *inverse, int32_t *zero)
{
    float high = highest > 0 ? from_bits((uint32_t)highest) : 0;
    float low = lowest > INT32_MAX ? from_bits(lowest) : 0;
    float largest = high > -low ? high : -low; /* infinite or no number only if there are such */
    *scale = *inverse = 0;
    if (zero)
        *zero = 0;
    if (high == 0 && low == 0)
        return true;
    if (!(high <= LARGEST && low >= -LARGEST && largest >= SMALLEST))
        return false;
    float span = zero ? high - low : largest;
    *scale = span / steps;
    *inverse = steps / span;
    if (zero)
        *zero = (int32_t)lrintf(-low * *inverse);
    return true;
}

static void set_scale(elsa_integer_job *job, int64_t column, int32_t highest, uint32_t lowest)
{
    bool words = job->plan->bits == 16;
    if (!elsa_scale_of(highest, lowest, words ? ELSA_MOST_INPUT : 255, job->scale + column, job->inverse + column,
                       words ? NULL : job->zero + column))
        atomic_store(&job->unfit, true);
}

static void find_range(void *data, size_t task)
{
    elsa_integer_job *job = data;
    const elsa_plan *p = job->plan;
    const elsa_integer_kernels *kernels = elsa_integers();
    if (p->transposed) {
        int64_t last = elsa_share_of(job->columns, task + 1, job->range_parts);
        for (int64_t j = elsa_share_of(job->columns, task, job->range_parts); j < last; j++) {
            int32_t highest = 0;
            uint32_t lowest = 0;
            kernels->range(job->x + j * elsa_pitch(job->layer), p->planes, &highest, &lowest);
            set_scale(job, j, highest, lowest);
        }
        return;
    }
    int64_t first = elsa_share_of(p->planes, task, job->range_parts), last = elsa_share_of(p->planes, task + 1, job->range_parts);
    kernels->range(job->x + first * job->length, (last - first) * job->length, &job->highest[task],
                   &job->lowest[task]);
}

static void find_scales(elsa_integer_job *job, const elsa_host *host)
{
    const elsa_plan *p = job->plan;
    int64_t items = p->transposed ? job->columns : p->planes;
    double numbers = (double)p->planes * (double)(p->transposed ? job->columns : job->length);
    job->range_parts = (size_t)elsa_smaller((int64_t)elsa_tasks(numbers), items);
    host->run(host, find_range, job->range_parts, job);
    if (p->transposed)
        return;
    int32_t highest = 0;
    uint32_t lowest = 0;
    for (size_t i = 0; i < job->range_parts; i++) {
        highest = job->highest[i] > highest ? job->highest[i] : highest;
        lowest = job->lowest[i] > lowest ? job->lowest[i] : lowest;
    }
    set_scale(job, 0, highest, lowest);
}

/* ---- the product ---- */

/* Whether integers are faster than floats here. Rounding the input and finishing the output take longer than in floats:
 * the values of a layer must be worth that (fitted to the layers of ResNet-50). Few rows of x: integer_few.c. */
static const elsa_integer_kernel *worth(const elsa_layer *layer, const elsa_geometry *g)
{
    if (!layer->bits || (g->transposed && g->columns < FEWEST_COLUMNS))
        return NULL;
    int64_t planes = layer->channels * g->phases[0] * g->phases[1];
    int64_t least = layer->bits == 16 ? 9 * planes : 3 * planes + 2 * layer->outputs;
    return !g->transposed && layer->count < least ? NULL : kernel_of(layer->bits);
}

static bool run(elsa_integer_job *job, const elsa_integer_kernel *kernel)
{
    const elsa_plan *p = job->plan;
    const elsa_host *host = job->host;
    int64_t block = kernel->width * p->vectors, blocks = elsa_parts(job->columns, block);
    int64_t columns = p->transposed ? blocks * block : 1, element = p->bits / 8;
    size_t packed, scales = (size_t)columns * (2 * sizeof(float) + sizeof(int32_t));
    if (__builtin_mul_overflow((size_t)blocks, (size_t)(p->planes * p->segments * p->segment * element), &packed))
        return false;
    char *taken = host->take(host, packed + scales + 64);
    if (!taken)
        return false;
    char *aligned = taken + (-(uintptr_t)taken & 63);
    job->packed = (uint8_t *)aligned;
    job->scale = (float *)(void *)(aligned + packed); /* packed is a multiple of 64 */
    job->inverse = job->scale + columns;
    job->zero = (int32_t *)(void *)(job->inverse + columns);
    memset(job->scale, 0, scales);
    job->blocks = (size_t)blocks;
    size_t wanted = elsa_tasks((double)p->planes * (double)job->columns);
    job->pack_parts = (size_t)elsa_smaller(elsa_parts((int64_t)wanted, blocks), elsa_parts(p->planes, ELSA_LINE));
    wanted = elsa_tasks((double)job->layer->count * (double)job->columns / 2);
    job->row_parts = (size_t)elsa_smaller(elsa_parts((int64_t)wanted, blocks), job->layer->outputs);
    find_scales(job, host);
    if (!atomic_load(&job->unfit)) {
        host->run(host, kernel->pack, job->blocks * job->pack_parts, job);
        host->run(host, kernel->multiply, job->blocks * job->row_parts, job);
    }
    host->give(host, taken);
    return !atomic_load(&job->unfit) && !atomic_load(&job->failed);
}

bool elsa_multiply_integers(elsa_layer *layer, const elsa_geometry *g, const elsa_host *host,
                            const float *x, const float *sum, float *y)
{
    const elsa_integer_kernel *kernel = worth(layer, g);
    if (!kernel)
        return false;
    elsa_geometry mine = *g;
    mine.bits = layer->bits;
    if (g->transposed) {
        int64_t all = elsa_parts(g->columns, kernel->width);
        mine.key[0] = elsa_parts(all, elsa_parts(all, kernel->most_vectors));
        mine.key[1] = 0;
    }
    bool kept; /* rounding the weights at each run would take longer than it saves */
    elsa_plan *plan = elsa_keeps(layer, &mine) ? elsa_planned(layer, &mine, host, &kept) : NULL;
    if (!plan)
        return false;
    elsa_integer_job job = {.layer = layer, .plan = plan, .host = host, .x = x, .sum = sum, .y = y,
                            .columns = g->columns, .length = g->length};
    bool done = plan->values && run(&job, kernel);
    if (!kept)
        elsa_unplan(plan);
    return done;
}
