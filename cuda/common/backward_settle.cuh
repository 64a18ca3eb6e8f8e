// Between the two main passes of deterministic mode, where a head has keys so loud that a bound on
// its rows would cost them their precision (core/integer_unit.h): the units of its rows from the
// largest additions that the first pass has seen, and zeros in its sums for the second.
#pragma once

#include <cstdint>

#include "common/backward_rows.cuh"
#include "core/integer_unit.h"
#include "prim/grid_dependency.cuh"

namespace pantile::common {

inline constexpr int kSettleThreads = 256;

// The scale of a row after measuring, from the negative one before; 0 stays, and from it dQ becomes
// NaN, as where an addition was not finite.
PANTILE_DEVICE float settled_scale(float scale, std::uint32_t largest, int terms) {
  if (scale == 0.0f || !core::is_finite_bits(largest)) {
    return 0.0f;
  }
  return core::unit_scale(core::measured_bound(__uint_as_float(largest), terms));
}

// Params is a family's, with pass, tile_k (keys of an addition), claimed (the
// main kernel's work counter, set to 0, or null) and scale_of(index, row), the scale of a row of a
// tile.
// Nearly always nothing is to be done: few blocks, which then share the tiles.
template <class Params, int kTileQ>
__global__ void __launch_bounds__(kSettleThreads)
    settle_units(const __grid_constant__ Params params) {
  prim::allow_next_grid();
  prim::wait_for_previous_grid();
  const RowPass& pass = params.pass;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0 && params.claimed != nullptr) {
    *params.claimed = 0;
  }
  if (*pass.measured == 0) {
    return;
  }
  const int tiles = pass.row_tile_count * pass.heads_q;
  for (int work = static_cast<int>(blockIdx.x); work < tiles; work += static_cast<int>(gridDim.x)) {
    const RowTile row_tile = locate_row_tile(pass, work, tiles);
    if (row_tile.tile * kTileQ >= row_tile.rows ||
        pass.key_bounds[key_head_of(pass, row_tile)].measured == 0) {
      continue;
    }
    const int terms = additions(pass, row_tile, params.tile_k);
    for (int row = thread; row < kTileQ; row += kSettleThreads) {
      float& scale = params.scale_of(row_tile.index, row);
      scale = settled_scale(scale, pass.row_max[row_tile.index * kTileQ + row], terms);
    }
    float4* sum = reinterpret_cast<float4*>(pass.dq_sum + row_tile.index * pass.tile_floats);
    for (int i = thread; i < pass.tile_floats / 4; i += kSettleThreads) {
      sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    clear_row_sums(pass, row_tile, kSettleThreads);
  }
}

}  // namespace pantile::common
