// Where a thread's registers lie in a 64-row wgmma accumulator (see prim/wgmma.cuh): thread t of
// the warpgroup holds two rows, and of every 8 columns two neighbours.
//   value[4 j + 2 i + c]  =  D[row + 8 i][8 j + column + c],   i, c in {0, 1}
#pragma once

#include "prim/address.cuh"

namespace pantile::tile {

inline constexpr int kRowsPerThread = 2;

// Row of register i = 0 inside the warpgroup's 64 rows; i = 1 is 8 rows below.
PANTILE_DEVICE int fragment_row(int warp_in_group, int lane) {
  return warp_in_group * 16 + lane / 4;
}

// Column of register c = 0 inside each group of 8.
PANTILE_DEVICE int fragment_column(int lane) {
  return 2 * (lane & 3);
}

}  // namespace pantile::tile
