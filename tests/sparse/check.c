/* Random layers against the definition, without ONNX Runtime: check [rounds [seed]].
 *
 * Built with sanitizers, and for processors that are only emulated here. Threads run the same layer at once. */
#include "sparse.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static uint64_t bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull >> 16;
}

static int64_t between(int64_t low, int64_t high)
{
    return low + (int64_t)(bits() % (uint64_t)(high - low + 1));
}

static float number(void)
{
    return (float)between(-1000, 1000) / 256;
}

static void run_here(const elsa_host *host, void (*task)(void *, size_t), size_t count, void *data)
{
    (void)host;
    for (size_t i = count; i-- > 0;)
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

static float from_bits(uint32_t word)
{
    float made;
    memcpy(&made, &word, sizeof made);
    return made;
}

static void *must(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        abort();
    return memory;
}

typedef struct {
    elsa_layer layer;
    float *dense; /* the weights again */
    bool convolution, poisoned; /* with NaN or infinities: as in floats */
    int64_t batch, in[2], out[2];
    float *x, *sum, *expected, *tolerance;
    const char *found;
} test;

static void make_weights(test *t)
{
    elsa_layer *layer = &t->layer;
    int64_t width = elsa_columns(layer), rows = layer->outputs;
    t->dense = must((size_t)(rows * width), sizeof(float));
    bool pattern = !t->convolution && between(0, 2) == 0;
    if (pattern) {
        layer->m = 4 << between(0, 1);
        layer->n = 1 << between(0, layer->m == 8 ? 2 : 1);
        width = layer->channels = layer->m * 16 / layer->n * between(1, 4);
        t->dense = realloc(t->dense, (size_t)(rows * width) * sizeof(float));
        if (!t->dense)
            abort();
        memset(t->dense, 0, (size_t)(rows * width) * sizeof(float));
        layer->count = rows * width / layer->m * layer->n;
    }
    int64_t percent = between(0, 100), room = pattern ? layer->count : rows * width;
    float *values = must((size_t)room, sizeof *values);
    uint16_t *halves = must((size_t)room, sizeof *halves), *columns = must((size_t)room, 2);
    int32_t *starts = must((size_t)rows + 1, sizeof *starts);
    uint8_t *codes = must((size_t)room, 1);
    int64_t count = 0, code_bits = layer->m == 4 ? 2 : 4;
    layer->half = between(0, 1);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < width; k++) {
            bool here = between(0, 99) < percent || (k == width - 1 && starts[r] == count);
            if (pattern) {
                int64_t group = k % layer->m;
                if (group == 0)
                    starts[r] = (int32_t)count; /* of the group */
                int64_t have = count - starts[r], left = layer->m - group;
                here = have < layer->n && (left <= layer->n - have || between(0, 1));
            }
            if (!here)
                continue;
            values[count] = number();
            if (layer->half) {
                uint32_t word;
                memcpy(&word, &values[count], 4);
                word &= 0xFFFF0000;
                memcpy(&values[count], &word, 4);
                halves[count] = (uint16_t)(word >> 16);
            }
            t->dense[r * width + k] = values[count];
            columns[count] = (uint16_t)k;
            if (pattern)
                codes[count * code_bits / 8] |=
                    (uint8_t)((uint64_t)(k % layer->m) << (count * code_bits % 8));
            count++;
        }
        starts[r + 1] = (int32_t)count;
    }
    /* Exactly as large as they may be read. */
    layer->count = count;
    void *exact = must((size_t)count, layer->half ? 2 : 4);
    memcpy(exact, layer->half ? (void *)halves : (void *)values, (size_t)count * (layer->half ? 2 : 4));
    layer->values = exact;
    uint16_t *exact_columns = must((size_t)count, 2);
    memcpy(exact_columns, columns, (size_t)count * 2);
    uint8_t *exact_codes = must((size_t)(count * code_bits / 8), 1);
    memcpy(exact_codes, codes, (size_t)(count * code_bits / 8));
    layer->columns = pattern ? NULL : exact_columns;
    layer->starts = pattern ? NULL : starts;
    layer->codes = pattern ? exact_codes : NULL;
    float *bias = must((size_t)rows, sizeof *bias);
    for (int64_t r = 0; r < rows; r++)
        bias[r] = number();
    layer->bias = bias;
    layer->relu = between(0, 1);
    const char *wrong = elsa_check(layer, rows + 1, count, count * code_bits / 8, rows);
    if (wrong) {
        fprintf(stderr, "a good layer was refused: %s\n", wrong);
        exit(1);
    }
    if (pattern)
        free(starts), free(exact_columns);
    else
        free(exact_codes);
    free(values), free(halves), free(columns), free(codes);
}

/* Numbers from one input of the batch to the next; a product's may have a gap between them. */
static int64_t pitch_of(const test *t)
{
    return t->layer.pitch ? t->layer.pitch : t->layer.channels * t->in[0] * t->in[1];
}

/* Half of what an integer of an input is worth, as integer.c states it, and of a row of weights. */
static double input_error(const test *t, int64_t batch)
{
    int64_t inputs = t->layer.channels * t->in[0] * t->in[1];
    double high = 0, low = 0;
    for (int64_t i = batch * pitch_of(t), last = i + inputs; i < last; i++) {
        high = fmax(high, (double)t->x[i]);
        low = fmin(low, (double)t->x[i]);
    }
    return t->layer.bits == 16 ? fmax(high, -low) / 16383 / 2 : (high - low) / 255 / 2;
}

static double weight_error(const test *t, int64_t row)
{
    int64_t width = elsa_columns(&t->layer);
    double largest = 0, sum = 0, count = 0;
    for (int64_t k = row * width; k < (row + 1) * width; k++) {
        double size = fabs((double)t->dense[k]);
        largest = fmax(largest, size);
        sum += size;
        count += size != 0;
    }
    return (t->layer.bits == 16 ? fmax(largest / 32766, sum / (131070 - count / 2)) : largest / 127) / 2;
}

static void make_expected(test *t)
{
    const elsa_layer *layer = &t->layer;
    int64_t plane = t->in[0] * t->in[1], area = t->out[0] * t->out[1], width = elsa_columns(layer);
    size_t outputs = (size_t)(t->batch * layer->outputs * area);
    int64_t pitch = pitch_of(t), inputs = t->batch * pitch, special = between(0, 15);
    t->x = must((size_t)inputs, sizeof(float));
    for (int64_t i = 0; i < inputs; i++) {
        t->x[i] = number();
        if (special == 0 || (special == 1 && !between(0, 3)))
            t->x[i] = between(0, 1) ? 0.0f : -0.0f;
        if (special == 2)
            t->x[i] = from_bits((uint32_t)between(0, 0x7FFFFF)); /* denormal */
        if (special == 3)
            t->x[i] = 1000.0f / 256; /* sums as large as they can be */
        if (special == 4)
            t->x[i] = fabsf(t->x[i]);
    }
    int64_t any = between(0, t->batch - 1) * pitch + between(0, layer->channels * plane - 1);
    if (special == 5)
        t->x[any] = 3e5f;
    t->poisoned = special == 6 && (!t->convolution || t->batch == 1);
    if (t->poisoned)
        t->x[any] = between(0, 1) ? NAN : between(0, 1) ? INFINITY : -INFINITY;
    t->sum = between(0, 1) ? must(outputs, sizeof(float)) : NULL;
    t->expected = must(outputs, sizeof(float));
    t->tolerance = must(outputs, sizeof(float));
    size_t at = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        double half_input = input_error(t, b);
        for (int64_t r = 0; r < layer->outputs; r++) {
            double half_weight = weight_error(t, r);
            for (int64_t y = 0; y < t->out[0]; y++)
                for (int64_t x = 0; x < t->out[1]; x++, at++) {
                    double s = layer->bias[r], magnitude = fabs(s);
                    double rounded = 0;
                    for (int64_t k = 0; k < width; k++) {
                        int64_t across = k % layer->kernel[1], down = k / layer->kernel[1];
                        int64_t c = down / layer->kernel[0];
                        down %= layer->kernel[0];
                        down += y * layer->stride[0] - layer->pad[0];
                        across += x * layer->stride[1] - layer->pad[1];
                        if (down < 0 || across < 0 || down >= t->in[0] || across >= t->in[1])
                            continue;
                        double w = (double)t->dense[r * width + k];
                        double from = t->x[b * pitch + c * plane + down * t->in[1] + across];
                        double term = w * from;
                        if (w != 0)
                            rounded += fabs(w) * half_input + fabs(from) * half_weight + half_input * half_weight;
                        s += term;
                        magnitude += fabs(term);
                    }
                    if (t->sum) {
                        t->sum[at] = number();
                        s += t->sum[at];
                        magnitude += fabs((double)t->sum[at]);
                    }
                    t->expected[at] = (float)(layer->relu && s < 0 ? 0 : s);
                    /* Beside one huge term every sum of floats rounds as far as that. */
                    t->tolerance[at] = (float)(magnitude * (2e-6 + 1e-7 * sqrt((double)width)));
                    if (layer->bits)
                        t->tolerance[at] += (float)(rounded * 1.00001);
                }
        }
    }
}

static void *run_test(void *data)
{
    test *t = data;
    elsa_host host = {run_here, take, give};
    size_t outputs = (size_t)(t->batch * t->layer.outputs * t->out[0] * t->out[1]);
    float *y = must(outputs, sizeof *y);
    memset(y, 0xFF, outputs * sizeof *y); /* NaN */
    const char *found =
        t->convolution ? elsa_conv(&t->layer, &host, t->x, t->batch, t->in, t->sum, y)
                       : elsa_matmul(&t->layer, &host, t->x, t->batch, t->sum, y);
    bool same = false;
    if (!found && t->poisoned) { /* what sees NaN or an infinity is computed in floats */
        elsa_layer floats = t->layer;
        float *expected = must(outputs, sizeof *y);
        floats.bits = 0;
        memset(floats.plans, 0, sizeof floats.plans);
        found = t->convolution ? elsa_conv(&floats, &host, t->x, t->batch, t->in, t->sum, expected)
                               : elsa_matmul(&floats, &host, t->x, t->batch, t->sum, expected);
        same = memcmp(y, expected, outputs * sizeof *y) == 0;
        elsa_forget(&floats);
        free(expected);
    }
    for (size_t i = 0; !found && i < outputs && !same; i++)
        if (!(fabsf(y[i] - t->expected[i]) <= t->tolerance[i])) {
            fprintf(stderr, "output %zu is %g, expected %g\n", i, (double)y[i], (double)t->expected[i]);
            found = "a wrong output";
        }
    free(y);
    return (void *)(uintptr_t)found;
}

static const char *run_round(void)
{
    test t = {.convolution = between(0, 3) > 0};
    elsa_layer *layer = &t.layer;
    layer->outputs = between(1, 40);
    layer->channels = between(1, between(0, 4) ? 40 : 600);
    t.batch = t.convolution ? between(1, 3) : between(1, between(0, 3) ? 9 : 150);
    for (int i = 0; i < 2; i++) {
        layer->kernel[i] = t.convolution ? between(1, between(0, 5) ? 3 : 9) : 1;
        layer->stride[i] = t.convolution ? between(1, between(0, 5) ? 2 : 9) : 1;
        t.in[i] = t.convolution ? between(1, between(0, 9) ? 20 : 90) : 1;
        for (int side = i; side < 4; side += 2) {
            layer->pad[side] = t.convolution && between(0, 1) ? between(0, 4) : 0;
            if (i && !between(0, 9) && t.convolution)
                layer->pad[side] = between(0, 12);
        }
        if (t.in[i] + layer->pad[i] + layer->pad[i + 2] < layer->kernel[i])
            t.in[i] = layer->kernel[i];
    }
    layer->bits = between(0, 2) * 8;
    make_weights(&t);
    if (!t.convolution && between(0, 1)) /* after that: the channels may be others for a pattern */
        layer->pitch = layer->channels + between(0, 40);
    if (!elsa_conv_size(layer, t.in, t.out))
        return "no size";
    make_expected(&t);
    const char *found = run_test(&t);
    if (!found && between(0, 9) == 0) { /* several at once, on a layer that was not run before */
        elsa_forget(layer);
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            if (pthread_create(&threads[i], NULL, run_test, &t))
                abort();
        for (int i = 0; i < 4; i++) {
            void *result;
            pthread_join(threads[i], &result);
            found = result ? result : found;
        }
    }
    if (found)
        fprintf(stderr,
                "%s: %s %lld outputs %lld channels kernel %lld %lld stride %lld %lld pads %lld %lld %lld "
                "%lld batch %lld in %lld %lld pattern %lld:%lld bits %lld\n",
                elsa_isa(), t.convolution ? "conv" : "matmul", (long long)layer->outputs,
                (long long)layer->channels, (long long)layer->kernel[0], (long long)layer->kernel[1],
                (long long)layer->stride[0], (long long)layer->stride[1], (long long)layer->pad[0],
                (long long)layer->pad[1], (long long)layer->pad[2], (long long)layer->pad[3],
                (long long)t.batch, (long long)t.in[0], (long long)t.in[1], (long long)layer->n,
                (long long)layer->m, (long long)layer->bits);
    elsa_forget(layer);
    free((void *)(uintptr_t)layer->values), free((void *)(uintptr_t)layer->columns);
    free((void *)(uintptr_t)layer->starts), free((void *)(uintptr_t)layer->codes);
    free((void *)(uintptr_t)layer->bias);
    free(t.dense), free(t.x), free(t.sum), free(t.expected), free(t.tolerance);
    return found;
}

int main(int count, char **arguments)
{
    long rounds = count > 1 ? atol(arguments[1]) : 1000;
    state = count > 2 ? strtoull(arguments[2], NULL, 10) * 2 + 1 : 88172645463325252ull;
    for (long i = 0; i < rounds; i++) {
        const char *found = run_round();
        if (found) {
            fprintf(stderr, "round %ld: %s\n", i, found);
            return 1;
        }
    }
    printf("%s: %ld rounds\n", elsa_isa(), rounds);
    return 0;
}
