// Memory: what stays is placed at the top; what comes and goes is kept in lists of pieces of about the same size.
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#define EXPORT(name) __attribute__((export_name(#name))) name

enum { LISTS = 128, HEAD = 16 };
typedef struct piece {
    uint32_t list;
    struct piece *next;
} piece;

extern unsigned char __heap_base;
static uintptr_t top;
static piece *lists[LISTS];

// So many bytes for good, at a multiple of 16; 0 if there are none.
void *EXPORT(place)(size_t bytes)
{
    if (!top)
        top = (uintptr_t)&__heap_base;
    uintptr_t at = (top + 15) & ~(uintptr_t)15;
    uint64_t end = (uint64_t)at + bytes, have = (uint64_t)__builtin_wasm_memory_size(0) << 16;
    if (end > have && (end > UINT32_MAX || __builtin_wasm_memory_grow(0, (size_t)(end - have + 65535) >> 16) == (size_t)-1))
        return NULL;
    top = (uintptr_t)end;
    return (void *)at;
}

// Sizes of 4 to 7 times a power of two: at most a quarter is not used.
void *EXPORT(malloc)(size_t bytes)
{
    bytes = bytes < 64 ? 64 : bytes;
    uint32_t shift = 29 - (uint32_t)__builtin_clz((uint32_t)bytes - 1);
    uint32_t steps = (uint32_t)((bytes - 1) >> shift) + 1, list = 4 * shift + steps - 4;
    piece *found = list < LISTS ? lists[list] : NULL;
    if (found)
        lists[list] = found->next;
    else if (list >= LISTS || !(found = place(HEAD + ((size_t)steps << shift))))
        return NULL;
    found->list = list;
    return (char *)found + HEAD;
}

void EXPORT(free)(void *p)
{
    if (!p)
        return;
    piece *unused = (piece *)(void *)((char *)p - HEAD);
    unused->next = lists[unused->list];
    lists[unused->list] = unused;
}

void *calloc(size_t count, size_t each)
{
    void *p = malloc(count * each);
    if (p)
        memset(p, 0, count * each);
    return p;
}
