// The largest logit of a head, gathered from the rows of all blocks. Floats are compared as
// integers: those without a sign bit as they are, those with one in reverse order. A NaN without a
// sign bit is above all numbers, so that it stays once it is there.
#pragma once

#include "prim/warp.cuh"

namespace pantile::attn {

inline constexpr int kSmallestLogit = static_cast<int>(0x807fffff);  // -inf
inline constexpr int kNanLogit = 0x7fffffff;

// A number that orders like the logit; the same twice gives the bits back.
PANTILE_DEVICE int logit_order(float logit) {
  const int bits = __float_as_int(logit);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// What a finished row contributes: its largest logit, nothing when it saw no key, NaN when it sums
// to that.
PANTILE_DEVICE int row_logit_order(float logit, float row_sum) {
  return row_sum == 0.0f ? kSmallestLogit : row_sum == row_sum ? logit_order(logit) : kNanLogit;
}

// Raises *entry to the largest of the warp's values. All lanes call it.
PANTILE_DEVICE void raise_max_logit(float* entry, int order) {
  const int largest = __reduce_max_sync(prim::kAllLanes, order);
  if (prim::lane_index() == 0) {
    if (largest >= 0) {
      atomicMax(reinterpret_cast<int*>(entry), largest);
    } else {
      atomicMin(reinterpret_cast<unsigned*>(entry), static_cast<unsigned>(largest ^ 0x7fffffff));
    }
  }
}

}  // namespace pantile::attn
