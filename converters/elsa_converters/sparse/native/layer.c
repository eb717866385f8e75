/* What a layer must be like. Models come from anywhere, so all that the kernels rely on is checked, once. */
#include "kernels.h"

uint32_t elsa_column(const elsa_layer *layer, int64_t r, int64_t i)
{
    if (layer->columns)
        return layer->columns[i];
    int64_t in_row = i - elsa_start(layer, r), bits = layer->m == 4 ? 2 : 4, at = i * bits;
    uint32_t code = (uint32_t)layer->codes[at / 8] >> (at % 8) & ((1u << bits) - 1);
    return (uint32_t)(in_row / layer->n * layer->m) + code;
}

static const char *check_rows(const elsa_layer *layer, int64_t starts, int64_t columns)
{
    if (starts != layer->outputs + 1)
        return "indptr must have one element more than there are outputs";
    if (columns != layer->count)
        return "indices and values must be as many";
    if (layer->starts[0] != 0 || layer->starts[layer->outputs] != layer->count)
        return "indptr must begin with 0 and end with the number of values";
    for (int64_t r = 0; r < layer->outputs; r++)
        if (layer->starts[r] >= layer->starts[r + 1])
            return "indptr must rise with every row"; /* so the bounds of all are those checked above */
    int64_t width = elsa_columns(layer);
    for (int64_t r = 0; r < layer->outputs; r++)
        for (int64_t i = layer->starts[r], before = -1; i < layer->starts[r + 1]; i++) {
            if (layer->columns[i] <= before || layer->columns[i] >= width)
                return "indices must rise within a row and be less than its length";
            before = layer->columns[i];
        }
    return NULL;
}

static const char *check_codes(const elsa_layer *layer, int64_t codes)
{
    int64_t n = layer->n, m = layer->m, width = elsa_columns(layer);
    if ((m != 4 && m != 8) || (n != 1 && n != 2 && n != 4) || n >= m)
        return "n must be 1, 2 or 4 and m a larger 4 or 8";
    if (width % m || width / m * n % 16)
        return "rows must have a multiple of 16 values";
    if (layer->count != layer->outputs * (width / m * n))
        return "there must be n values in each m columns";
    if (codes != layer->count * (m == 4 ? 2 : 4) / 8)
        return "there must be a code for each value";
    for (int64_t r = 0, i = 0; r < layer->outputs; r++)
        for (int64_t group = 0; group < width / m; group++) {
            int64_t before = group * m - 1;
            for (int64_t k = 0; k < n; k++, i++) {
                int64_t column = elsa_column(layer, r, i);
                if (column <= before || column >= (group + 1) * m)
                    return "codes must rise within m columns and be less than m";
                before = column;
            }
        }
    return NULL;
}

const char *elsa_check(const elsa_layer *layer, int64_t starts, int64_t columns, int64_t codes,
                       int64_t biases)
{
    if (layer->outputs < 1 || layer->outputs >= INT32_MAX || layer->channels < 1)
        return "the weights must have outputs and inputs";
    if (layer->channels > ELSA_MOST_COLUMNS)
        return "a row of weights can have at most 65536 columns";
    for (int i = 0; i < 2; i++) {
        if (layer->kernel[i] < 1 || layer->kernel[i] > ELSA_MOST_KERNEL)
            return "the kernel must have 1 to 32 rows and columns";
        if (layer->stride[i] < 1 || layer->stride[i] > ELSA_MOST_EXTENT)
            return "strides must be from 1 to 65536";
    }
    for (int i = 0; i < 4; i++)
        if (layer->pad[i] < 0 || layer->pad[i] > ELSA_MOST_EXTENT)
            return "pads must be from 0 to 65536";
    if (elsa_columns(layer) > ELSA_MOST_COLUMNS)
        return "a row of weights can have at most 65536 columns";
    if (layer->count < 1 || layer->count >= INT32_MAX)
        return "there must be 1 to 2147483646 values";
    if (biases != layer->outputs)
        return "there must be a bias for each output";
    return layer->starts ? check_rows(layer, starts, columns) : check_codes(layer, codes);
}
