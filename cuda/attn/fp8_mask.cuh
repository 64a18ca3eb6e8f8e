// Masks on scores that lie as pairs of fp16 in accumulators (fp8_softmax.cuh).
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::attn {

// Hides what lies outside [low, high) of row i; columns relative to the thread's first one.
// kLow: is there a lower bound at all?
template <bool kLow, int kRegisters>
PANTILE_DEVICE void mask_row(std::uint32_t (&S)[kRegisters], int i, int low, int high) {
  constexpr std::uint32_t kMinusInfinity = 0xfc00u;
#pragma unroll
  for (int j = 0; j < kRegisters / 2; ++j) {
    std::uint32_t& x = S[2 * j + i];
    if (8 * j + 1 >= high || (kLow && 8 * j + 1 < low)) {
      x = (x & 0xffffu) | kMinusInfinity << 16;
    }
    if (8 * j >= high || (kLow && 8 * j < low)) {
      x = (x & 0xffff0000u) | kMinusInfinity;
    }
  }
}

}  // namespace pantile::attn
