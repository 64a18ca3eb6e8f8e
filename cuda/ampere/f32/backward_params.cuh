// What the fp32 backward kernels are told, and the compile-time face of their tile sizes.
#pragma once

#include <cstdint>

#include "ampere/f32/config.h"
#include "ampere/operand.cuh"
#include "common/attended.h"
#include "core/geometry.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

// Copies and buffers count columns of 16 bits, two for each float; so do the strides of operands.
struct BackwardParamsF32 {
  Operand q, k, v, grad_o, grad_q, grad_k, grad_v;
  core::SequenceSide queries, keys;  // lengths only
  core::TileOrder query_order;       // of the row tiles of query heads: dQ
  core::TileOrder key_order;         // of the key tiles of key heads: dK, dV
  int group;                         // query heads per key head
  int window_left, window_right;     // core::kNoBound lifts a side
  int head_dim, head_dim_v;          // 16-bit columns of the tensors
  int q_columns;                     // head_dim; with a scale of 0 none: then Q counts as zeros
  float scale, scale_log2;           // scale_log2: times log2(e)
  // Minus LSE, base 2, and dLSE - rowsum(dO * O): [heads_q][term_rows], rows of all sequences.
  const float2* row_terms;
  std::int64_t term_rows;
};

// What one launch computes. It owns tiles of the first side's rows and walks over the other's.
enum class GradientsF32 { queries, keys_and_values, keys, values };

template <int kHeadDimOf, BackwardTileF32 kTile>
struct BackwardConfigF32 {
  static constexpr int kDepth = kHeadDimOf;  // floats
  static constexpr int kColumns = 2 * kHeadDimOf;
  static constexpr int kOwn = kTile.own;
  static constexpr int kOther = kTile.other;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr bool kSplitsKeys = kTile.splits_keys;
  static constexpr int kRowWarps = kTile.row_warps;
  static constexpr int kOtherWarps = kTile.other_warps;
  static constexpr int kWarpRows = kOwn / kRowWarps;
  static constexpr int kWarpOthers = kOther / kOtherWarps;
  static constexpr int kRowTiles = kWarpRows / 16;
  using OwnCopy = tile::RowCopy<kOwn, kColumns, kThreads>;
  using OtherCopy = tile::RowCopy<kOther, kColumns, kThreads>;
  static_assert(kWarpRows % 16 == 0 && kWarpOthers % 16 == 0);
  static_assert(kOtherWarps == 1 || kOtherWarps == 2);
  static_assert(kStages == 1 || kStages == 2);
};

// The tile that a block owns.
struct OwnTileF32 {
  int head;  // query head (dQ) or key head
  int tile;  // of the attended own rows, and slice of the whole sequence
  SequenceRows queries, keys;
  common::Attended part;
  core::TilePlan others;  // tiles of the other side's attended rows
};

// x are rows that scores multiply (Q, K), y those that meet the gradient (dO, V).
template <class Config>
struct BackwardStorageF32 {
  struct Stage {
    alignas(128) std::uint16_t x[Config::kOther * Config::kColumns];
    alignas(128) std::uint16_t y[Config::kOther * Config::kColumns];
  };
  // At the end the gradients of x and y on their way to global memory.
  alignas(128) std::uint16_t own_x[Config::kOwn * Config::kColumns];
  alignas(128) std::uint16_t own_y[Config::kOwn * Config::kColumns];
  Stage stages[Config::kStages];
  // In shared memory, because the loop has no registers left for what it needs once a step.
  alignas(kWorkBytes) OwnTileF32 own;
};

}  // namespace pantile::ampere
