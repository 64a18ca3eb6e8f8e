// Hadamard's matrix times rows that lie across lanes: the additions of core/hadamard.h, in its
// order. The matrix is symmetric, so the same sums rotate a row and rotate it back.
//
// kLanes lanes share a row; lane r holds the chunks r, r + kLanes, r + 2 kLanes and r + 3 kLanes of
// eight channels each.
#pragma once

#include <cstdint>

#include "core/hadamard.h"
#include "prim/warp.cuh"

namespace pantile::common {

// The signs of two neighbouring channels of the rotation in bits 15 and 31.
struct SignPairs {
  alignas(16) std::uint32_t pairs[core::kMaxRotatedDim / 2];
};

constexpr SignPairs make_sign_pairs() {
  SignPairs result{};
  for (int c = 0; c < core::kMaxRotatedDim; ++c) {
    const std::uint32_t sign = core::hadamard_sign_word(c / 32) >> (c % 32) & 1u;
    result.pairs[c / 2] |= sign << (c % 2 == 0 ? 15 : 31);
  }
  return result;
}

static __device__ const SignPairs kSignPairs = make_sign_pairs();

template <int kDistance, int kRows>
PANTILE_DEVICE void add_pairs(float (&x)[kRows][32]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      if ((k & kDistance) == 0) {
        const float a = x[row][k], b = x[row][k + kDistance];
        x[row][k] = __fadd_rn(a, b);
        x[row][k + kDistance] = __fsub_rn(a, b);
      }
    }
  }
}

// Distances ascend: inside a chunk, then between lanes, then between the chunks of a lane.
template <int kLanes, int kRows>
PANTILE_DEVICE void rotate_rows(float (&x)[kRows][32], int lane, int group) {
  if (group > 1) {
    add_pairs<1>(x);
  }
  if (group > 2) {
    add_pairs<2>(x);
  }
  if (group > 4) {
    add_pairs<4>(x);
  }
#pragma unroll
  for (int o = 1; o < kLanes; o *= 2) {
    if (group > 8 * o) {
      const float sign = (lane & o) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int k = 0; k < 32; ++k) {
          const float other = __shfl_xor_sync(prim::kAllLanes, x[row][k], o);
          x[row][k] = fmaf(x[row][k], sign, other);  // exact product: one rounding
        }
      }
    }
  }
  if (group > 8 * kLanes) {
    add_pairs<8>(x);
  }
  if (group > 16 * kLanes) {
    add_pairs<16>(x);
  }
}

}  // namespace pantile::common
