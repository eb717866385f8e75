/* Threads of this library's own, for runtimes that offer none to plain C. */
#ifndef ELSA_SPARSE_THREADS_H
#define ELSA_SPARSE_THREADS_H

#include <stddef.h>

/* Run the tasks in at most so many threads, this one among them. */
void elsa_share_out(void (*task)(void *, size_t), size_t count, void *data, size_t threads);

#endif
