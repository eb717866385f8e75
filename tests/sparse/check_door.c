/* Random layers through PyTorch's door, without PyTorch: check_door [rounds]. Threads share the pool, and a child
 * of a fork has its own. */
#include "torch/door.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t state = 88172645463325252ull;

static int64_t between(int64_t low, int64_t high)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return low + (int64_t)((state * 0x2545F4914F6CDD1Dull >> 16) % (uint64_t)(high - low + 1));
}

static void *must(int64_t count, size_t size)
{
    void *memory = calloc(count ? (size_t)count : 1, size);
    if (!memory)
        abort();
    return memory;
}

/* Numbers that bfloat16 has, too. */
static float *numbers(int64_t count, int64_t percent)
{
    float *made = must(count, sizeof *made);
    for (int64_t i = 0; i < count; i++)
        made[i] = between(0, 99) < percent ? (float)between(-100, 100) / 16 : 0;
    return made;
}

static void *as(const float *from, int64_t count, int half)
{
    uint16_t *halves = must(count, half ? 2 : 4);
    if (!half)
        return memcpy(halves, from, (size_t)count * sizeof *from);
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, from + i, 4);
        halves[i] = (uint16_t)(word >> 16);
    }
    return halves;
}

typedef struct {
    elsa_door *door;
    const void *x;
    const float *bias, *expected, *tolerance;
    int half, failed;
    int64_t rows, outputs, threads;
} product;

static void *run(void *data)
{
    product *p = data;
    int64_t count = p->rows * p->outputs;
    void *y = must(count, p->half ? 2 : 4);
    const char *wrong = elsa_linear(p->door, p->x, p->half, p->rows, p->bias, y, p->threads);
    for (int64_t i = 0; i < count && !wrong; i++) {
        float found;
        if (p->half) {
            uint32_t word = (uint32_t)((uint16_t *)y)[i] << 16;
            memcpy(&found, &word, 4);
        } else
            found = ((float *)y)[i];
        if (!(fabsf(found - p->expected[i]) <= p->tolerance[i]))
            wrong = "a wrong output";
    }
    free(y);
    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    p->failed = wrong != NULL;
    return NULL;
}

static int run_round(void)
{
    int64_t outputs = between(1, 60), parts = between(1, 3), bounds[4] = {0};
    for (int64_t i = 0; i < parts; i++)
        bounds[i + 1] = bounds[i] + between(1, 60);
    int64_t columns = bounds[parts], rows = between(0, 3) ? between(1, 12) : between(1, 150);
    int half = (int)between(0, 1), half_x = (int)between(0, 1);
    float *dense = numbers(outputs * columns, between(0, 60)), *x = numbers(rows * columns, 100);
    float *bias = between(0, 1) ? numbers(outputs, 100) : NULL;
    void *stored = as(dense, outputs * columns, half), *input = as(x, rows * columns, half_x);
    int32_t *starts = must(parts * (outputs + 1), sizeof *starts);
    int64_t count = elsa_count(stored, half, outputs, parts, bounds, starts);
    uint16_t *places = must(count, 2);
    void *values = must(count, half ? 2 : 4), *again = must(outputs * columns, half ? 2 : 4);
    elsa_pack(stored, half, outputs, parts, bounds, starts, places, values);
    const char *wrong;
    int64_t shape[10] = {outputs, columns, 1, 1, 1, 1, 0, 0, 0, 0};
    elsa_door *door = elsa_open(shape, parts, bounds, half, starts, places, values, count, &wrong);
    if (!door) {
        fprintf(stderr, "a good layer was refused: %s\n", wrong);
        return 1;
    }
    elsa_unpack(starts, places, values, half, outputs, parts, bounds, again);
    int failed = memcmp(again, stored, (size_t)(outputs * columns) * (half ? 2 : 4)) != 0;
    float *expected = must(rows * outputs, 4), *tolerance = must(rows * outputs, 4);
    for (int64_t j = 0; j < rows; j++)
        for (int64_t r = 0; r < outputs; r++) {
            double sum = bias ? bias[r] : 0, magnitude = fabs(sum);
            for (int64_t k = 0; k < columns; k++) {
                double term = (double)dense[r * columns + k] * x[j * columns + k];
                sum += term;
                magnitude += fabs(term);
            }
            expected[j * outputs + r] = (float)sum;
            tolerance[j * outputs + r] = (float)(magnitude * 2e-6 + (half_x ? fabs(sum) / 256 : 0));
        }
    product p = {door, input, bias, expected, tolerance, half_x, 0, rows, outputs, between(1, 3)};
    run(&p);
    failed |= p.failed;
    if (between(0, 9) == 0) {
        product same[3] = {p, p, p};
        pthread_t threads[3];
        for (int i = 0; i < 3; i++)
            if (pthread_create(&threads[i], NULL, run, &same[i]))
                abort();
        for (int i = 0; i < 3; i++) {
            pthread_join(threads[i], NULL);
            failed |= same[i].failed;
        }
    }
    int64_t changed = between(0, count - 1);
    places[changed] = (uint16_t)between(0, 200);
    elsa_door *other = elsa_open(shape, parts, bounds, half, starts, places, values, count, &wrong);
    elsa_close(other); /* taken or refused, as the place may be a good one */
    elsa_close(door);
    free(dense), free(x), free(bias), free(stored), free(input), free(starts), free(places);
    free(values), free(again), free(expected), free(tolerance);
    return failed;
}

static void count_up(void *data, size_t task)
{
    ((_Atomic int64_t *)data)[task % 4]++;
}

void elsa_share_out(void (*task)(void *, size_t), size_t count, void *data, size_t threads);

static int shares_all(void)
{
    _Atomic int64_t found[4] = {0};
    for (int i = 0; i < 2000; i++)
        elsa_share_out(count_up, 8, found, 3);
    return found[0] == 4000 && found[1] == 4000 && found[2] == 4000 && found[3] == 4000;
}

int main(int count, char **arguments)
{
    long rounds = count > 1 ? atol(arguments[1]) : 1000;
    for (long i = 0; i < rounds; i++)
        if (run_round()) {
            fprintf(stderr, "round %ld\n", i);
            return 1;
        }
    if (!shares_all()) {
        fprintf(stderr, "tasks were lost or run twice\n");
        return 1;
    }
    pid_t child = fork();
    if (child == 0)
        _exit(!shares_all());
    int status = 1;
    if (waitpid(child, &status, 0) != child || status) {
        fprintf(stderr, "the child of a fork failed\n");
        return 1;
    }
    printf("%s: %ld rounds\n", elsa_isa(), rounds);
    return 0;
}
