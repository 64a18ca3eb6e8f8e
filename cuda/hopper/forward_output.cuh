// How the math warpgroups of the Hopper forward hand over O.
#pragma once

#include "hopper/config.h"
#include "prim/convert.cuh"
#include "prim/matrix.cuh"
#include "prim/nonfinite.cuh"

namespace pantile::hopper {

// A warp's rows of O, divided by the row sums, to a tile in shared memory at `to`. True if some
// lane's values are not finite and the mask is such that an unattended V may be the cause.
template <ForwardConfig kConfig, DType kDType, MaskKind kMask>
PANTILE_DEVICE bool store_fragment(std::uint32_t to, const float (&O)[kConfig.head_dim_v / 2],
                                   const float (&inverse)[2], int warp, int lane) {
  prim::NonFiniteScan<kDType> scan;
  // 16 rows x 16 columns at a time; lane l gives the address of row l % 16, half l / 16.
  const int row = warp * 16 + (lane & 15);
#pragma unroll
  for (int j = 0; j < kConfig.head_dim_v / 16; ++j) {
    uint4 packed;
    packed.x = prim::pack<kDType>(O[8 * j] * inverse[0], O[8 * j + 1] * inverse[0]);
    packed.y = prim::pack<kDType>(O[8 * j + 2] * inverse[1], O[8 * j + 3] * inverse[1]);
    packed.z = prim::pack<kDType>(O[8 * j + 4] * inverse[0], O[8 * j + 5] * inverse[0]);
    packed.w = prim::pack<kDType>(O[8 * j + 6] * inverse[1], O[8 * j + 7] * inverse[1]);
    if constexpr (kMask != MaskKind::full) {
      scan.add(packed);
    }
    const int column = 16 * j + lane / 16 * 8;
    prim::store_matrix_x4(to + kConfig.o_tile().offset(row, column), packed.x, packed.y, packed.z,
                          packed.w);
  }
  if constexpr (kMask == MaskKind::full) {
    return false;
  }
  return scan.any();
}

}  // namespace pantile::hopper
