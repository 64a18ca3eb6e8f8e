// Accumulators of several m16n8 tiles: [rows / 16][columns / 8][4], see prim/mma_sync.cuh.
#pragma once

#include "prim/address.cuh"

namespace pantile::tile {

template <int kRowTiles, int kColumnTiles>
PANTILE_DEVICE void clear_accumulators(float (&x)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[m][j][c] = 0.0f;
      }
    }
  }
}

}  // namespace pantile::tile
