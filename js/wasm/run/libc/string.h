// What the sparse kernels need of string.h: instructions of WebAssembly.
#ifndef ELSA_STRING_H
#define ELSA_STRING_H
#include <stddef.h>
#define memcpy __builtin_memcpy
#define memset __builtin_memset
#endif
