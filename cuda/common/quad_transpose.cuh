// Accumulator fragments hold two neighbouring elements a lane. Four lanes that share a row trade
// words so that each then holds 16 contiguous bytes of it: one vector store instead of four.
#pragma once

#include <cstdint>

#include "prim/warp.cuh"

namespace pantile::common {

// Word j of lane q of a quad becomes word q of lane j.
PANTILE_DEVICE void quad_transpose(std::uint32_t (&words)[4]) {
  const int lane = prim::lane_index();
  const bool odd = (lane & 1) != 0;
  const bool upper = (lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const std::uint32_t other = __shfl_xor_sync(prim::kAllLanes, odd ? words[j] : words[j + 1], 1);
    (odd ? words[j] : words[j + 1]) = other;
  }
  const std::uint32_t other0 = __shfl_xor_sync(prim::kAllLanes, upper ? words[0] : words[2], 2);
  const std::uint32_t other1 = __shfl_xor_sync(prim::kAllLanes, upper ? words[1] : words[3], 2);
  if (upper) {
    words[0] = other0;
    words[1] = other1;
  } else {
    words[2] = other0;
    words[3] = other1;
  }
}

}  // namespace pantile::common
