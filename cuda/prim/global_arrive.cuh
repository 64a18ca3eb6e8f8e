// A counter in global memory with which blocks tell each other that data are there. PTX ISA,
// "atom", "Memory Consistency Model".
#pragma once

#include "prim/address.cuh"

namespace pantile::prim {

// Adds and returns the sum before. What this thread has seen written by then, its block's writes
// before a barrier among it, is visible to whoever acquires the sum; and the other way round.
PANTILE_DEVICE int arrive_global(int* counter, int count) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count)
               : "memory");
  return before;
}

}  // namespace pantile::prim
