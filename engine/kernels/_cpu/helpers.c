// Threads that share the parts of a task with their caller; helpers.py starts and wakes them.

#include "helpers.h"

#include <stdatomic.h>
#include <time.h>

#include "vectors.h"

#ifndef _WIN32
#include <sched.h>
#endif

enum { kSpinNs = 500000 };     // time that an idle helper spins, ns
enum { kLateNs = 500000 };     // time after which a helper that is waited for is late, ns
enum { kAloneNs = 50000000 };  // time without helpers after one was late, ns

// A task in parts.
typedef struct {
  Part* part;
  const void* task;
} Work;

// The task that threads share, one at a time. `ticket` is its number (high half) and its parts
// that nobody has taken (low half): a thread that takes one late cannot take another task's.
// SAFETY: `shared` is written while no part can be taken and none is unfinished, and read only by
// a thread that has taken a part and not finished it.
static Work shared;
static _Atomic uint64_t ticket;
static _Atomic int64_t num_unfinished;

static bool take_part(int64_t* index) {
  uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
  while ((uint32_t)seen != 0) {
    if (atomic_compare_exchange_weak_explicit(&ticket, &seen, seen - 1, memory_order_acquire,
                                              memory_order_acquire)) {
      *index = (int64_t)(uint32_t)seen - 1;
      return true;
    }
  }
  return false;
}

static bool work(void) {
  int64_t index;
  if (!take_part(&index)) return false;
  shared.part(shared.task, index);
  atomic_fetch_sub_explicit(&num_unfinished, 1, memory_order_release);
  return true;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static void yield_core(void) {
#ifndef _WIN32
  sched_yield();
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
#ifdef CLOCK_MONOTONIC
  clock_gettime(CLOCK_MONOTONIC, &now);
#else
  timespec_get(&now, TIME_UTC);
#endif
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void wait_for_helpers(void) {
  int spins = 0;
  while (atomic_load_explicit(&num_unfinished, memory_order_acquire) > 0) {
    pause_briefly();
    if (++spins > 1000) yield_core();  // the helper may wait for this core
  }
}

void run_parts(Part* part, const void* task, int64_t num_parts, bool is_shared) {
  // A helper whose core is taken from it in the midst of a part holds the task up, so there are
  // none for a while then.
  static int64_t alone_until = 0;
  const int64_t begin = is_shared ? now_ns() : 0;
  if (!is_shared || begin < alone_until) {
    for (int64_t index = 0; index < num_parts; index++) part(task, index);
    return;
  }
  shared = (Work){part, task};
  atomic_store_explicit(&num_unfinished, num_parts, memory_order_relaxed);
  const uint64_t number = (atomic_load_explicit(&ticket, memory_order_relaxed) >> 32) + 1;
  atomic_store_explicit(&ticket, number << 32 | (uint64_t)num_parts, memory_order_release);
  while (work()) {
  }
  const int64_t middle = now_ns();
  wait_for_helpers();
  const int64_t end = now_ns();
  if (end - middle > kLateNs && end - middle > middle - begin) alone_until = end + kAloneNs;
}

// Help with tasks until there has been none for kSpinNs.
EXPORT void helpers_help(void) {
  int64_t deadline = now_ns() + kSpinNs;
  while (now_ns() < deadline) {
    if (work()) {
      deadline = now_ns() + kSpinNs;
    } else {
      for (int spins = 0; spins < 16; spins++) pause_briefly();
    }
  }
}

// Forget a task that was shared when the process was forked: its helpers exist in the parent only.
EXPORT void helpers_reset(void) {
  atomic_store(&ticket, 0);
  atomic_store(&num_unfinished, 0);
}
