// Moving registers between warpgroups, and pinning values in registers.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::prim {

// setmaxnreg: executed by all warps of a warpgroup; a multiple of 8 in 24..256. ptxas ignores it
// (advisory C7508) unless the kernel's entry register count is known from __launch_bounds__.
template <int kRegisters>
PANTILE_DEVICE void grow_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
PANTILE_DEVICE void shrink_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Marks the values as read and rewritten here, so that no use of an accumulator moves above the
// wait of the wgmma that fills it. Costs no instruction.
template <int kCount>
PANTILE_DEVICE void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(values[i])::"memory");
  }
}

template <int kCount>
PANTILE_DEVICE void pin(std::uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(values[i])::"memory");
  }
}

template <int kRows, int kColumns>
PANTILE_DEVICE void pin(std::uint32_t (&values)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      asm volatile("" : "+r"(values[i][j])::"memory");
    }
  }
}

// 0, but only the hardware knows: made of all `values` and of `zero`, which is 0 and must be
// unknown to ptxas. Added to the operand of an instruction that stays above some wait, it keeps
// those there that compute the values: ptxas moves arithmetic below a wait when its result is only
// used there.
template <int kCount>
PANTILE_DEVICE std::uint32_t made_of(const std::uint32_t (&values)[kCount], int zero) {
  std::uint32_t all = values[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    all ^= values[i];
  }
  return all & static_cast<std::uint32_t>(zero);
}

}  // namespace pantile::prim
