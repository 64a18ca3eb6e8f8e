// Shared memory of a decode block.
#pragma once

#include "decode/schedule.cuh"
#include "decode/tile.cuh"
#include "prim/named_barrier.cuh"

namespace pantile::decode {

// ring    a slice's stage: kSliceKeys rows of K, then as many of V, then their scales. Written and
//         read by the warps of one team only
// output  Q of a piece, from its start to its end; then O, summed over the slices (finish.cuh)
// reference, sum   of the softmax, by slice
// q_unit  8-bit caches: the power of two that a row of Q was divided by
template <class Config>
struct Storage {
  alignas(16) unsigned char ring[Config::kStages][Config::kSlices][Config::kSliceBytes];
  alignas(16) float output[Config::kColumns][Config::kOutPitch];
  float reference[Config::kSlices][Config::kColumns];
  float sum[Config::kSlices][Config::kColumns];
  float q_unit[Config::kColumns];
  Range range;
  int arrived;
};

// Of the warps that share a slice.
template <class Config>
PANTILE_DEVICE void sync_team(int slice) {
  if constexpr (Config::kTeam == 1) {
    __syncwarp();
  } else {
    prim::barrier_sync(1 + slice, 32 * Config::kTeam);
  }
}

}  // namespace pantile::decode
