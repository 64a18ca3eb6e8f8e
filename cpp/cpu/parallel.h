// Loops over work items on several threads: the library's own pool, or a loop that a framework
// lends through pantile::set_parallel_for.
#pragma once

#include <cstdint>

#include "pantile/status.h"

namespace pantile::cpu {

// `worker` is in [0, workers) and no two calls with the same worker overlap in time.
using ItemFunction = void (*)(int item, int worker, void* context);

// Calls function(item, worker, context) for every item in [0, items). Items are started in
// ascending order, by at most `workers` threads. With one worker nothing leaves the calling thread.
Status for_each_item(int items, int workers, ItemFunction function, void* context);

// For loops that wait for another thread: pauses, and gives the core away after many rounds.
void pause_while_waiting(int round);

}  // namespace pantile::cpu
