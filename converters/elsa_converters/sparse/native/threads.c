/* A pool whose work is claimed, never assigned: a thread that does not wake up costs nothing.
 *
 * OpenMP waits at the end of a region until all its threads have come, even those that had nothing to
 * do. Where the other core is busy with something else, that is a time slice of the scheduler. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

enum {
    MOST_THREADS = 64,
    SPIN = 200 * 1000, /* nanoseconds that a thread waits for more before it sleeps */
};

static struct {
    pthread_mutex_t use;  /* held by the thread whose job this is */
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t more;
    size_t workers, sleeping;
    /* The job: its number in the upper half of the ticket, how many tasks are unclaimed in the lower. */
    _Atomic uint64_t ticket;
    _Atomic size_t left; /* tasks that are not done */
    void (*_Atomic task)(void *, size_t);
    void *_Atomic data;
    _Atomic size_t threads; /* that may take part */
} pool = {.use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Do tasks of the current job until none is left. */
static void help(void)
{
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        size_t unclaimed = (uint32_t)ticket;
        if (!unclaimed)
            return;
        /* What is read here belongs to the ticket if that is still the same afterwards: a job's tasks are
         * all claimed before the next one is written. */
        void (*task)(void *, size_t) = atomic_load(&pool.task);
        void *data = atomic_load(&pool.data);
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1))
            continue;
        task(data, unclaimed - 1);
        atomic_fetch_sub(&pool.left, 1);
    }
}

static void *work(void *data)
{
    size_t number = (size_t)(uintptr_t)data;
    uint64_t seen = 0;
    for (;;) {
        for (int64_t until = now() + SPIN; atomic_load(&pool.ticket) >> 32 == seen && now() < until;)
            for (int i = 0; i < 32; i++)
                pause_();
        if (atomic_load(&pool.ticket) >> 32 == seen) {
            pthread_mutex_lock(&pool.lock);
            pool.sleeping++;
            while (atomic_load(&pool.ticket) >> 32 == seen)
                pthread_cond_wait(&pool.more, &pool.lock);
            pool.sleeping--;
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.ticket) >> 32;
        if (number < atomic_load(&pool.threads))
            help();
    }
    return NULL;
}

/* In the child of a fork there are no workers, and a lock may be held by a thread that is gone. */
static void forget(void)
{
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t none = PTHREAD_COND_INITIALIZER;
    pool.use = pool.lock = fresh;
    pool.more = none;
    pool.workers = pool.sleeping = 0;
    atomic_store(&pool.ticket, atomic_load(&pool.ticket) >> 32 << 32);
}

static void remember_forks(void)
{
#if !defined(_WIN32)
    pthread_atfork(NULL, NULL, forget);
#endif
}

static void start_workers(size_t wanted)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, remember_forks);
    while (pool.workers + 1 < wanted && pool.workers + 1 < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(uintptr_t)(pool.workers + 1)))
            return; /* then those that there are */
        pthread_detach(thread);
        pool.workers++;
    }
}

void elsa_share_out(void (*task)(void *, size_t), size_t count, void *data, size_t threads)
{
    if (threads < 2 || count < 2 || count > UINT32_MAX || pthread_mutex_trylock(&pool.use)) {
        for (size_t i = 0; i < count; i++) /* another thread's job has the workers */
            task(data, i);
        return;
    }
    start_workers(threads);
    atomic_store(&pool.task, task);
    atomic_store(&pool.data, data);
    atomic_store(&pool.left, count);
    atomic_store(&pool.threads, threads);
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.ticket, ((atomic_load(&pool.ticket) >> 32) + 1) << 32 | count);
    if (pool.sleeping)
        pthread_cond_broadcast(&pool.more);
    pthread_mutex_unlock(&pool.lock);
    help();
    for (int turn = 0; atomic_load(&pool.left); turn++)
        if (turn < 10000)
            pause_();
        else
            sched_yield();
    pthread_mutex_unlock(&pool.use);
}
