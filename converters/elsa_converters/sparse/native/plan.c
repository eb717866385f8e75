/* How a layer's weights are walked over for inputs of one shape, made once and kept. */
#include "integer.h"

#include <stdlib.h>

#ifndef ELSA_LARGE_CHUNK
#define ELSA_LARGE_CHUNK (112 << 10)
#endif

enum {
    CHUNK = 40 << 10,        /* bytes of packed input: about the first-level cache (measured) */
    LARGE_CHUNK = ELSA_LARGE_CHUNK, /* the same for few columns: rows of weights in longer parts */
    REACH = 1 << 16,         /* floats that an offset can reach */
};

/* A rough count of cycles, fitted to the layers of ResNet-50, to choose the number of vectors in a block. */
static double cost(const elsa_layer *layer, const elsa_plan *p, int64_t columns, int64_t width)
{
    double parts = (double)(p->chunks * layer->outputs), each = (double)layer->count / parts;
    double vectors = (double)p->vectors, blocks = (double)elsa_parts(columns, width * p->vectors);
    double row = 30 + 2 * vectors + each * 1.4 * (vectors > 3 ? vectors : 3);
    double packing = (double)(p->planes * p->segments * p->segment / width) * 4;
    return blocks * (parts * row + packing);
}

bool elsa_cut(elsa_plan *p, const elsa_geometry *g, int64_t vectors, int64_t width, int64_t bytes,
              int64_t element)
{
    int64_t line = ELSA_LINE * (int64_t)sizeof(float) / element;
    int64_t block = vectors * width;
    int64_t whole = block + (g->taps[0] - 1) * p->pitch + g->taps[1] - 1, piece = block + g->taps[1] - 1;
    whole = elsa_parts(whole, line) * line;
    piece = elsa_parts(piece, line) * line;
    bool pieces = piece * g->taps[0] < whole; /* of a wide picture only the rows that are needed */
    p->vectors = vectors;
    p->segments = pieces ? g->taps[0] : 1;
    p->segment = pieces ? piece : whole;
    int64_t channel = g->phases[0] * g->phases[1], window = channel * p->segments * p->segment;
    int64_t channels = p->planes / channel;
    if (window > REACH)
        return false;
    int64_t most = elsa_larger(bytes / element / window, 1);
    p->chunks = elsa_parts(channels, most);
    p->chunk = elsa_parts(channels, p->chunks) * channel;
    p->chunks = elsa_parts(p->planes, p->chunk);
    return true;
}

static bool cut(elsa_plan *p, const elsa_geometry *g, int64_t vectors, int64_t width)
{
    return elsa_cut(p, g, vectors, width, p->transposed ? LARGE_CHUNK : CHUNK, sizeof(float));
}

elsa_place elsa_place_of(const elsa_layer *layer, const elsa_geometry *g, const elsa_plan *p,
                         int64_t column)
{
    int64_t area = layer->kernel[0] * layer->kernel[1];
    if (area == 1) /* as below, without a dozen divisions */
        return (elsa_place){column, column % p->chunk * p->segment};
    int64_t channel = column / area, y = column % area / layer->kernel[1];
    int64_t x = column % layer->kernel[1];
    int64_t plane = (channel * g->phases[0] + y % layer->stride[0]) * g->phases[1] +
                    x % layer->stride[1];
    int64_t down = y / layer->stride[0], right = x / layer->stride[1];
    int64_t window = plane % p->chunk * p->segments + (p->segments > 1 ? down : 0);
    int64_t offset = window * p->segment + right + (p->segments > 1 ? 0 : down * p->pitch);
    return (elsa_place){plane, offset};
}

static bool fill(elsa_plan *p, const elsa_layer *layer, const elsa_geometry *g)
{
    int64_t outputs = layer->outputs;
    p->parts = malloc((size_t)(p->chunks + 1) * (size_t)outputs * sizeof *p->parts);
    bool plain = p->transposed && layer->columns; /* the columns say it, so that nothing is stored twice */
    p->offsets = plain ? NULL : malloc((size_t)layer->count * sizeof *p->offsets);
    if (!p->parts || !(plain || p->offsets))
        return false;
    while (plain && (int64_t)1 << p->shift < p->segment)
        p->shift++;
    for (int64_t r = 0; r < outputs; r++) {
        int64_t chunk = 0, end = elsa_start(layer, r + 1);
        p->parts[r] = (int32_t)elsa_start(layer, r);
        for (int64_t i = elsa_start(layer, r); i < end; i++) {
            elsa_place place = elsa_place_of(layer, g, p, elsa_column(layer, r, i));
            for (; place.plane / p->chunk > chunk; chunk++)
                p->parts[(chunk + 1) * outputs + r] = (int32_t)i;
            if (!plain)
                p->offsets[i] = (uint16_t)place.offset;
        }
        for (; chunk < p->chunks; chunk++)
            p->parts[(chunk + 1) * outputs + r] = (int32_t)end;
    }
    return true;
}

static elsa_plan *make(const elsa_layer *layer, const elsa_geometry *g, const elsa_host *host)
{
    const elsa_kernels *kernels = elsa_chosen();
    elsa_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->key[0] = g->key[0];
    p->key[1] = g->key[1];
    p->bits = g->bits;
    p->transposed = g->transposed;
    p->length = g->length;
    p->planes = layer->channels * g->phases[0] * g->phases[1];
    p->pitch = g->pitch;
    p->width = g->width;
    p->area = g->area;
    if (g->bits) {
        elsa_quantise(p, layer, g, host);
        return p;
    }
    int64_t all = elsa_parts(g->columns, kernels->width), best = g->vectors;
    double least = 0;
    for (int64_t vectors = 1; !g->vectors && vectors <= elsa_smaller(kernels->most_vectors, all); vectors++) {
        /* Blocks of about the same size. */
        if (vectors > 1 && elsa_parts(all, vectors) == elsa_parts(all, vectors - 1))
            continue;
        if (!cut(p, g, vectors, kernels->width))
            break;
        double now = cost(layer, p, g->columns, kernels->width);
        if (!best || now < least) {
            best = vectors;
            least = now;
        }
    }
    if (best && cut(p, g, best, kernels->width) && fill(p, layer, g))
        return p;
    elsa_unplan(p);
    return NULL;
}

void elsa_unplan(elsa_plan *p)
{
    if (!p)
        return;
    free(p->parts);
    free(p->offsets);
    free(p->values);
    free(p->scales);
    free(p->totals);
    free(p->masks);
    free(p);
}

static bool is_for(const elsa_plan *p, const elsa_geometry *g)
{
    return p->key[0] == g->key[0] && p->key[1] == g->key[1] && p->bits == g->bits;
}

bool elsa_keeps(elsa_layer *layer, const elsa_geometry *g)
{
    for (int i = 0; i < ELSA_SHAPES; i++) {
        const elsa_plan *known = atomic_load(&layer->plans[i]);
        if (!known || is_for(known, g))
            return true;
    }
    return false;
}

/* The plan may be one that others use at the same time; kept ones stay until the layer is forgotten. */
elsa_plan *elsa_planned(elsa_layer *layer, const elsa_geometry *g, const elsa_host *host, bool *kept)
{
    *kept = true;
    for (int i = 0; i < ELSA_SHAPES; i++) {
        elsa_plan *known = atomic_load(&layer->plans[i]);
        if (known && is_for(known, g))
            return known;
    }
    elsa_plan *mine = make(layer, g, host);
    if (!mine)
        return NULL;
    for (int i = 0; i < ELSA_SHAPES; i++) {
        elsa_plan *nobody = NULL;
        if (atomic_compare_exchange_strong(&layer->plans[i], &nobody, mine))
            return mine;
        if (is_for(nobody, g)) {
            elsa_unplan(mine); /* another thread was faster */
            return nobody;
        }
    }
    *kept = false;
    return mine;
}

void elsa_forget(elsa_layer *layer)
{
    for (int i = 0; i < ELSA_SHAPES; i++)
        elsa_unplan(atomic_exchange(&layer->plans[i], NULL));
}
