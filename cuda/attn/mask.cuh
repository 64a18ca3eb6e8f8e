// Masks on a fragment of scores. Columns are counted from the thread's first column, so that every
// comparison is with a constant.
#pragma once

#include "core/softmax_state.h"
#include "tile/fragment.cuh"

namespace pantile::attn {

inline constexpr float kMaskedScore = -core::kInfinity;

// Hides columns >= end[i] of row i.
template <int kCount>
PANTILE_DEVICE void mask_from(float (&S)[kCount], const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c >= end[i]) {
          S[4 * j + 2 * i + c] = kMaskedScore;
        }
      }
    }
  }
}

// Hides columns outside begin[i]..end[i] - 1 of row i.
template <int kCount>
PANTILE_DEVICE void mask_outside(float (&S)[kCount], const int (&begin)[2], const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c >= end[i] || 8 * j + c < begin[i]) {
          S[4 * j + 2 * i + c] = kMaskedScore;
        }
      }
    }
  }
}

}  // namespace pantile::attn
