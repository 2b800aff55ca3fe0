/* Helper threads, one set for the process, used by one call at a time.
 *
 * A helper without work spins for a while, because the next call of a step follows within
 * microseconds, then sleeps until a call wakes it. The calling thread does the same while it waits
 * for the last parts. On a crowded machine, calls use no helpers. Helpers never touch Python.
 *
 * After fork() the child has no helpers; its first call starts new ones.
 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#if defined(__linux__)
#include <sys/prctl.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#define ROUNDING() _mm_getcsr()
#define SET_ROUNDING(mode) _mm_setcsr(mode)
#else
#define PAUSE() ((void)0)
#define ROUNDING() 0
#define SET_ROUNDING(mode) ((void)(mode))
#endif

/* A part that waits for a sleeping helper costs tens of microseconds, a spinning helper takes the
 * processor from other threads. */
#ifndef SPIN_NS
#define SPIN_NS 50000
#endif
/* A spinning thread that did not run for so long gave its processor to another one. */
#define AWAY_NS 200000
#define LEAST_ALONE_NS 10000000
#define MOST_ALONE_NS 320000000
/* More than one part per thread evens out threads of different speed. */
#define PARTS_EACH 4

/* The ticket of a run: its number, the next part to take and the number of parts. All in one word, so
 * that a part is taken from this run or not at all. */
#define NUMBER(ticket) ((uint32_t)((ticket) >> 32))
#define NEXT(ticket) ((int64_t)((ticket) >> 16 & 0xffff))
#define PARTS(ticket) ((int64_t)((ticket)&0xffff))
#define ONE_PART ((uint64_t)1 << 16)

static struct {
    _Atomic uint64_t ticket;
    /* The run. Written before its ticket; valid as long as a part can be taken. */
    Task *_Atomic task;
    void *_Atomic argument;
    _Atomic int64_t units, grain;
    _Atomic int threads;
    _Atomic unsigned rounding; /* mode of the calling thread */
    _Atomic int result;
    _Atomic int64_t done; /* parts */
    _Atomic int busy;     /* whether a call uses the helpers */
    _Atomic int helpers;
    _Atomic int refused;  /* whether the system refused a further helper */
    _Atomic int sleeping; /* helpers */
    _Atomic int64_t crowded_until, alone_ns; /* see note_crowd */
    _Atomic int waiting;  /* whether the calling thread sleeps */
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .finished = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Other threads want the processors: compute without helpers for a while, for longer each time that
 * this is found again soon. */
static void note_crowd(int64_t now) {
    int64_t until = atomic_load(&pool.crowded_until), alone = atomic_load(&pool.alone_ns);
    if (now < until) return;
    alone = now - until < alone ? 2 * alone : LEAST_ALONE_NS;
    alone = alone < MOST_ALONE_NS ? alone : MOST_ALONE_NS;
    atomic_store(&pool.alone_ns, alone);
    atomic_store(&pool.crowded_until, now + alone);
}

/* Spin until `reached` is true or the time is over; return whether it is true. Threads that wait for
 * the processor get it. */
static int spin(int (*reached)(uint64_t), uint64_t argument) {
    for (int64_t end = 0, before = 0;;) {
        for (int i = 0; i < 32; i++) {
            if (reached(argument)) return 1;
            PAUSE();
        }
        sched_yield();
        int64_t now = now_ns();
        if (before && now - before > AWAY_NS) note_crowd(now);
        before = now;
        if (!end) end = now + SPIN_NS;
        if (now >= end) return reached(argument);
    }
}

static int has_new_run(uint64_t number) { return NUMBER(atomic_load(&pool.ticket)) != number; }

static int all_done(uint64_t parts) { return atomic_load(&pool.done) >= (int64_t)parts; }

static void add_done(int64_t parts, int64_t all) {
    if (atomic_fetch_add(&pool.done, parts) + parts < all || !atomic_load(&pool.waiting)) return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_signal(&pool.finished);
    pthread_mutex_unlock(&pool.lock);
}

/* Let nobody take the parts that are left. */
static void end_early(int result) {
    int none = 0;
    atomic_compare_exchange_strong(&pool.result, &none, result);
    uint64_t ticket = atomic_load(&pool.ticket);
    for (;;) {
        int64_t left = PARTS(ticket) - NEXT(ticket);
        if (left <= 0) return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket,
                                          ticket + (uint64_t)left * ONE_PART))
            continue;
        add_done(left, PARTS(ticket));
        return;
    }
}

static int64_t limit(int64_t part, int64_t parts, int64_t units, int64_t grain) {
    int64_t at = (units + grain - 1) / grain * part / parts * grain;
    return at < units ? at : units;
}

/* Take a part of the current run and compute it; return 0 if there is none for this seat. */
static int take_part(int seat) {
    uint64_t ticket = atomic_load(&pool.ticket);
    while (NEXT(ticket) < PARTS(ticket) && seat < atomic_load(&pool.threads)) {
        Task *task = atomic_load(&pool.task);
        void *argument = atomic_load(&pool.argument);
        int64_t units = atomic_load(&pool.units), grain = atomic_load(&pool.grain);
        unsigned rounding = atomic_load(&pool.rounding);
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + ONE_PART)) continue;
        int64_t part = NEXT(ticket), parts = PARTS(ticket);
        if (seat) SET_ROUNDING(rounding);
        int result = task(argument, limit(part, parts, units, grain),
                          limit(part + 1, parts, units, grain), seat);
        if (result) end_early(result);
        add_done(1, parts);
        return 1;
    }
    return 0;
}

static void sleep_until_new_run(uint32_t number) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!has_new_run(number)) pthread_cond_wait(&pool.work, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *help(void *seat) {
#if defined(__linux__)
    prctl(PR_SET_NAME, "baton-compute");
#endif
    for (;;) {
        uint32_t number = NUMBER(atomic_load(&pool.ticket));
        while (take_part((int)(intptr_t)seat)) continue;
        if (!spin(has_new_run, number)) sleep_until_new_run(number);
    }
    return NULL;
}

/* In the child of fork(): its only thread is the one that called fork(). */
static void forget_helpers(void) {
    pthread_mutex_init(&starting, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.finished, NULL);
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.busy, 0);
    atomic_store(&pool.helpers, 0);
    atomic_store(&pool.refused, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.waiting, 0);
    atomic_store(&pool.crowded_until, 0);
}

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};

static int start_helper(int seat) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals go to the threads of Python, but not a helper's own faults */
    for (int i = 0; i < (int)(sizeof faults / sizeof *faults); i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = !pthread_create(&thread, &attributes, help, (void *)(intptr_t)seat);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

int start_threads(int threads) {
    static int handles_fork;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    pthread_mutex_lock(&starting);
    if (!handles_fork) handles_fork = !pthread_atfork(NULL, NULL, forget_helpers);
    int helpers = atomic_load(&pool.helpers);
    while (handles_fork && helpers + 1 < threads && start_helper(helpers + 1)) helpers++;
    atomic_store(&pool.helpers, helpers);
    atomic_store(&pool.refused, helpers + 1 < threads);
    atomic_store(&pool.crowded_until, 0);
    pthread_mutex_unlock(&starting);
    return helpers + 1 < threads ? helpers + 1 : threads;
}

static int available(int threads) {
    int all = atomic_load(&pool.helpers) + 1;
    if (threads <= all) return threads;
    return atomic_load(&pool.refused) ? all : start_threads(threads);
}

/* Publish a run; `ticket` has its number and parts. */
static void begin(uint64_t ticket, int threads, int64_t units, int64_t grain, Task *task,
                  void *argument) {
    atomic_store(&pool.task, task);
    atomic_store(&pool.argument, argument);
    atomic_store(&pool.units, units);
    atomic_store(&pool.grain, grain);
    atomic_store(&pool.threads, threads);
    atomic_store(&pool.rounding, ROUNDING());
    atomic_store(&pool.result, 0);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, ticket);
    if (!atomic_load(&pool.sleeping)) return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
}

static void wait_until_done(int64_t parts) {
    if (spin(all_done, (uint64_t)parts)) return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.waiting, 1);
    while (!all_done((uint64_t)parts)) pthread_cond_wait(&pool.finished, &pool.lock);
    atomic_store(&pool.waiting, 0);
    pthread_mutex_unlock(&pool.lock);
}

int run(int threads, int64_t units, int64_t grain, Task *task, void *argument) {
    int64_t grains = (units + grain - 1) / grain;
    if (units <= 0) return 0;
    if (threads > grains) threads = (int)grains;
    threads = available(threads);
    if (threads < 2 || now_ns() < atomic_load(&pool.crowded_until) ||
        atomic_exchange(&pool.busy, 1))
        return task(argument, 0, units, 0);
    int64_t parts = threads * PARTS_EACH < grains ? threads * PARTS_EACH : grains;
    uint64_t number = NUMBER(atomic_load(&pool.ticket)) + (uint64_t)1;
    begin(number << 32 | (uint64_t)parts, threads, units, grain, task, argument);
    while (take_part(0)) continue;
    wait_until_done(parts);
    int result = atomic_load(&pool.result);
    atomic_store(&pool.busy, 0);
    return result;
}

int run_ended(void) { return atomic_load(&pool.result) != 0; }
