// Thread and block indices that are read where they are used. The compiler keeps threadIdx and what
// follows from it in registers across a whole kernel; what is needed in rare branches and at the
// end only is better worked out again there (measured: up to 124 bytes of spills in a loop that
// holds 250 registers).
#pragma once

#include "prim/address.cuh"

namespace pantile::prim {

PANTILE_DEVICE int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

PANTILE_DEVICE int fresh_block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

}  // namespace pantile::prim
