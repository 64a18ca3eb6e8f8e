// Reductions over the four lanes (a quad) that share the rows of an accumulator.
#pragma once

#include "prim/warp.cuh"

namespace pantile::tile {

// fmaxf drops NaN: the maximum of a row with NaN scores is that of its other scores.
template <int kRows>
PANTILE_DEVICE void quad_max(float (&x)[kRows]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = fmaxf(x[i], __shfl_xor_sync(prim::kAllLanes, x[i], distance));
    }
  }
}

PANTILE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(prim::kAllLanes, x, 1);
  x += __shfl_xor_sync(prim::kAllLanes, x, 2);
  return x;
}

}  // namespace pantile::tile
