// Keeps keys that a mask hides out of the gradients. Lists leave out hidden tiles; a key that no
// query sees may still lie in a tile that is visited, where P and dS are 0, but 0 * NaN and 0 * Inf
// are NaN. So non-finite elements of K and V become zeros in shared memory, in tiles of keys whose
// list has a tile that is visible in part. Where a query does attend to such an element, its LSE or
// its delta is not finite, and its gradients come out so all the same.
#pragma once

#include "core/geometry.h"
#include "hopper/backward/storage.cuh"
#include "prim/named_barrier.cuh"
#include "prim/nonfinite.cuh"
#include "prim/tma.cuh"

namespace pantile::hopper {

// kRows rows from `first` on, by the kWarpgroup threads of a warpgroup, which must meet before they
// issue a product that reads them.
template <DType kDType, int kRows, int kTileRows, int kPanels>
PANTILE_DEVICE void zero_nonfinite_rows(Tile<kTileRows, kPanels>& tile, int first) {
  constexpr int kChunks = kRows * 128 / 16;  // of a panel
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    auto* const rows =
        reinterpret_cast<uint4*>(tile.bytes + panel * tile.kPanelBytes + first * 128);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < kChunks; i += kWarpgroup) {
      const uint4 x = rows[i];
      const uint4 finite{prim::zero_nonfinite<kDType>(x.x), prim::zero_nonfinite<kDType>(x.y),
                         prim::zero_nonfinite<kDType>(x.z), prim::zero_nonfinite<kDType>(x.w)};
      if (finite.x != x.x || finite.y != x.y || finite.z != x.z || finite.w != x.w) {
        rows[i] = finite;
      }
    }
  }
  prim::fence_async_proxy();
}

}  // namespace pantile::hopper
