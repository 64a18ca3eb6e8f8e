// Masks on scores that lie as pairs of fp16 in accumulators of 64 x 128.
#pragma once

#include <cstdint>

#include "prim/address.cuh"

namespace pantile::hopper {

// Hides what lies outside [low, high) of row i; columns relative to the thread's first one.
// kLow: is there a lower bound at all?
template <bool kLow>
PANTILE_DEVICE void mask_row(std::uint32_t (&S)[32], int i, int low, int high) {
  constexpr std::uint32_t kMinusInfinity = 0xfc00u;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    std::uint32_t& x = S[2 * j + i];
    if (8 * j + 1 >= high || (kLow && 8 * j + 1 < low)) {
      x = (x & 0xffffu) | kMinusInfinity << 16;
    }
    if (8 * j >= high || (kLow && 8 * j < low)) {
      x = (x & 0xffff0000u) | kMinusInfinity;
    }
  }
}

}  // namespace pantile::hopper
