// What the main backward kernel is told, and the compile-time face of its tile sizes.
#pragma once

#include <cstdint>

#include "ampere/config.h"
#include "ampere/operand.cuh"
#include "common/attended.h"
#include "core/integer.h"
#include "core/integer_unit.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

struct BackwardParams {
  Operand q, k, v, grad_o, grad_k, grad_v;
  core::SequenceSide queries, keys;  // lengths only
  core::TileOrder order;             // of the key tiles
  common::TileNumbers row_tiles;
  std::int64_t row_tile_count;    // numbers of row_tiles
  int heads_k, group;             // group: query heads per key head
  int window_left, window_right;  // core::kNoBound lifts a side
  int head_dim, head_dim_v;       // of the tensors, at most the kernel's
  int q_columns;                  // head_dim; with a scale of 0 none: then Q counts as zeros
  float scale, scale_log2;        // scale_log2: times log2(e)
  bool integer_sums;              // dQ is summed as integers: the order does not show
  // With integer sums, else null or false: see common::RowPass. The second of two passes repeats
  // the heads that the first has measured, and runs only if `measured` is not 0.
  std::uint32_t* row_max;
  const core::KeyBounds* key_bounds;
  const int* measured;
  bool repeats;
  const int* large_means;  // these two: see common::RowPass; or null
  float* row_sums;         //
  float* dq_sum;           // [heads_q][row_tile_count][tile_q * kernel head dim], quads
  const float* row_terms;  // [heads_q][row_tile_count][kRowTerms][tile_q]
};

template <int kHeadDimOf, int kHeadDimVOf, BackwardTile kTile>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDimOf;    // of Q, K
  static constexpr int kHeadDimV = kHeadDimVOf;  // of V, dO
  static constexpr int kTileQ = kTile.tile_q;
  static constexpr int kTileK = kTile.tile_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kColumnWarps = kTile.column_warps;
  static constexpr bool kSharesWeights = kColumnWarps > 1;
  static constexpr int kPasses = kTile.passes;
  static constexpr GradQueries kGradQueries = kTile.grad_queries;
  static constexpr int kGradSBuffers = kTile.grad_s_buffers();
  static constexpr int kWeightBuffers = kGradSBuffers + (kSharesWeights ? 1 : 0);
  static constexpr int kTermBuffers = 2 * kGradSBuffers;
  // Of one warp: keys; rows whose scores it computes at a time; columns of dK and dV.
  static constexpr int kWarpKeys = kTileK / kTile.key_warps;
  static constexpr int kWarpRows = kTileQ / (kSharesWeights ? kColumnWarps : kPasses);
  static constexpr int kColumnsK = kHeadDim / kColumnWarps;
  static constexpr int kColumnsV = kHeadDimV / kColumnWarps;
  // Of one warp: rows and columns of dQ.
  static constexpr int kGradRowWarps = kTile.grad_q_warps;
  static constexpr int kGradRows = kTileQ / kGradRowWarps;
  static constexpr int kGradColumns = kHeadDim / (kTile.warps() / kGradRowWarps);
  using QCopy = tile::RowCopy<kTileQ, kHeadDim, kThreads>;
  using GradCopy = tile::RowCopy<kTileQ, kHeadDimV, kThreads>;
  using KCopy = tile::RowCopy<kTileK, kHeadDim, kThreads>;
  using VCopy = tile::RowCopy<kTileK, kHeadDimV, kThreads>;
  static_assert(kWarpKeys % 16 == 0 && kWarpRows % 16 == 0 && kGradRows % 16 == 0);
  static_assert(kColumnsK % 16 == 0 && kColumnsV % 16 == 0 && kGradColumns % 16 == 0);
  static_assert(!kSharesWeights || kPasses == 1);
  static_assert(kStages == 1 || kStages == 2);
  static_assert(kGradSBuffers == 1 || (kGradSBuffers == 2 && kStages == 2));
};

}  // namespace pantile::ampere
