// Threads that share the parts of a task with their caller.
//
// Threads take parts until none is left. Helpers that find none spin for a while, since the next
// task follows within microseconds, and then return to their owner (helpers.py), which puts them to
// sleep.

#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef void Part(const void* task, int64_t index);

// Compute the parts of a task, fewer than 2^32, on the calling thread and, if `is_shared`, on
// helpers. One caller at a time may share.
void run_parts(Part* part, const void* task, int64_t num_parts, bool is_shared);
