// The sizes of config.h as constants of one instance of the kernel.
#pragma once

#include "decode/config.h"

namespace pantile::decode {

template <Shape kShape_, int kColumns_, SharedClass kShared_>
struct Config {
  static constexpr Shape kShape = kShape_;
  static constexpr int kHeadDim = kShape.head_dim;
  static constexpr int kHeadDimV = kShape.head_dim_v;
  static constexpr CacheFormat kFormat = kShape.format;
  static constexpr int kBytes = kShape.element_bytes();  // of an element of the cache
  static constexpr bool kVInK = kShape.v_in_k;
  static constexpr int kColumns = kColumns_;
  static constexpr SharedClass kShared = kShared_;

  static constexpr int kSlices = slices(kShape, kColumns, kShared_);
  static constexpr int kTileKeys = tile_keys(kShape, kColumns, kShared_);
  static constexpr int kWarpColumns = warp_columns(kShape, kColumns);
  static constexpr int kTeam = kColumns / kWarpColumns;
  static constexpr int kThreads = threads(kShape, kColumns, kShared_);
  static constexpr int kBlocks = resident_blocks(kShape, kColumns, kShared_);
  static constexpr int kStages = stages(kShape, kColumns, kShared_, kBlocks);

  static constexpr int kKPitch = row_pitch_bytes(kHeadDim, kBytes);
  static constexpr int kVPitch = kVInK ? kKPitch : row_pitch_bytes(kHeadDimV, kBytes);
  static constexpr int kVOffset = kVInK ? 0 : kSliceKeys * kKPitch;  // of V in a slice
  static constexpr int kScaleOffset = kVOffset + kSliceKeys * kVPitch;
  static constexpr int kSliceBytes = slice_bytes(kShape);
  static constexpr int kOutPitch = output_pitch(kShape);  // floats
  static constexpr int kQPitch = row_pitch_bytes(kHeadDim, 2);

  static constexpr int kKSteps = kHeadDim / 16;     // of S^T = K Q^T
  static constexpr int kVTiles = kHeadDimV / 16;    // tiles of 16 dims of O^T
  static constexpr int kQTiles = kWarpColumns / 8;  // tiles of 8 queries
  // Operand B of S^T: in registers unless it takes more than 48 of them.
  static constexpr bool kQShared = kKSteps * kQTiles * 2 > 48;

  static_assert(kQPitch <= kOutPitch * 4);  // Q lies in the memory of O
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);
  static_assert(kKPitch % 32 == 16 && kVPitch % 32 == 16);
  static_assert(kStages >= 2 && kThreads <= 256);
};

}  // namespace pantile::decode
