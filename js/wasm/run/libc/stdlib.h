// What the sparse kernels need of stdlib.h: memory.c has it.
#ifndef ELSA_STDLIB_H
#define ELSA_STDLIB_H
#include <stddef.h>
void *malloc(size_t);
void *calloc(size_t, size_t);
void free(void *);
#endif
