/* Threads that share the work of one kernel call.
 *
 * run() divides `units` of work into parts and calls task(argument, from, to, seat) for each, on the
 * calling thread and on helper threads. `seat` numbers the thread within the call, below `threads`;
 * seat 0 is the calling thread. A thread takes its next part when it has finished one, so a helper
 * that is late or was interrupted leaves its work to the others.
 *
 * Invariant: a task computes each unit from its inputs alone, so results do not depend on the
 * number of threads or on the limits of the parts.
 */
#ifndef BATON_POOL_H
#define BATON_POOL_H

#include <stdint.h>

#define MOST_THREADS 256

/* A result other than 0 ends the run: threads finish their parts and take no more. */
typedef int Task(void *argument, int64_t from, int64_t to, int seat);

/* Run all units; return 0 or the first other result. Parts begin at multiples of `grain` units. With
 * one thread, or while another call uses the helpers, the calling thread does everything. */
int run(int threads, int64_t units, int64_t grain, Task *task, void *argument);

/* Whether the current run has ended early; for long parts of helpers. */
int run_ended(void);

/* Start helpers for `threads` threads; return the number of threads that runs can use. */
int start_threads(int threads);

#endif
