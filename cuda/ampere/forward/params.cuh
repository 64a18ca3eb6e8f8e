// What the forward kernel is told, and the compile-time face of its tile sizes.
#pragma once

#include <cstdint>

#include "ampere/config.h"
#include "ampere/operand.cuh"
#include "core/geometry.h"
#include "core/integer.h"
#include "core/sequence.h"
#include "core/tile_order.h"
#include "tile/row_copy_sm80.cuh"

namespace pantile::ampere {

// When a row's reference follows its maximum, in base-2 logits above the reference.
struct ReferenceRules {
  float look_limit;    // some row must exceed it for references to be looked at; -inf: always
  float raise_limit;   // a row that exceeds it takes its maximum for the reference
  float p_offset;      // log2 of P at the maximum
  float shared_reach;  // how far a row's maximum may lie below a reference of 16 rows
};

// What a row's reference is before its first visible key, negated: finite, so that a row without
// keys has logits of -inf + this = -inf and P = 0, and no infinity meets another one; and so large
// that every finite logit outgrows it.
inline constexpr float kNothingSeen = 0x1.fffffep127f;

// From which reference on a row is NaN. P = exp2(FFMA(score, scale, -reference)), and the FFMA does
// not round the product, so that the weights of a row are right beside each other however large its
// logits are. But the reference is a rounded product. It is rounded up, so that P is never larger
// for it, and all of a row is smaller by one factor of at most 2 to the reference's last place:
// below 2^30 that is 2^64, which bf16 does not notice, below 2^27 it is 2^8, which leaves f16 its
// digits.
template <DType kDType>
inline constexpr float kReferenceLimit = kDType == DType::bf16 ? 0x1p30f : 0x1p27f;

struct ForwardParams {
  Operand q, k, v, o;
  // From a row to the one that the same thread copies next, and to the same row of the next tile.
  std::int64_t q_pass_bytes, k_pass_bytes, k_tile_bytes, v_pass_bytes, v_tile_bytes;
  float* lse;                        // null when not wanted
  std::int64_t lse_head_stride;      // rows of one head of LSE
  std::int8_t* o_low;                // contiguous, shape of O (core/low_bits.h); null: not wanted
  float* max_logit;                  // [batch][heads_q]; null when not wanted
  bool output_f32;                   // O is fp32; its strides are in elements, as always
  bool lse_packed;                   // [heads, total] instead of [batch, heads, rows]
  core::SequenceSide queries, keys;  // lengths only
  core::FastDivmod group;            // query heads per key head
  int heads_q;
  core::TileOrder order;
  int window_left, window_right;  // core::kNoBound lifts a side
  int head_dim, head_dim_v;       // of the tensors, at most the kernel's
  float scale;                    // times log2(e), positive
  bool negate_q;                  // the problem's scale is negative
  bool zero_q;                    // the problem's scale is 0: Q counts as Q * 0
  ReferenceRules references;
  const float* sinks;  // [heads_q], natural logits; or null
  // Of other key sources than rows of sequences (keys.cuh).
  const std::int32_t *k_begin, *mask_shift, *block_table;
  std::int64_t table_stride;  // between rows of the table
  core::FastDivmod page_size;
};

// Where keys lie, and whether the caller gives the shift of the mask: part of a variant.
struct KeySource {
  bool ranges = false;  // the keys of a sequence begin at row k_begin[b]
  bool pages = false;   // key j is slot j % page_size of page block_table[b][j / page_size]
  bool shift = false;   // query i sits at key position i + mask_shift[b]
};

// Whether pipelined kernels with vector row sums take masked tiles in the order that needs fewer
// registers: up to 3 % slower on sm_90, where the spills it avoids cost nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kSparesRegisters = true;
#else
inline constexpr bool kSparesRegisters = false;
#endif

template <int kHeadDimOf, int kHeadDimVOf, ForwardTile kTile, SoftmaxKind kSoftmaxOf,
          bool kLongRowsOf = false>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimOf;    // of Q, K
  static constexpr int kHeadDimV = kHeadDimVOf;  // of V, O
  static constexpr int kTileQ = kTile.tile_q;
  static constexpr int kTileK = kTile.tile_k;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr bool kQInRegisters = kTile.q_in_registers;
  static constexpr Schedule kSchedule = kTile.schedule;
  static constexpr SoftmaxKind kSoftmax = kSoftmaxOf;
  static constexpr bool kLongRows = kLongRowsOf;  // P V and P are summed key tile by key tile
  static constexpr int kWarpRows = kTileQ / kTile.warps;
  static constexpr int kRowTiles = kWarpRows / 16;
  using QCopy = tile::RowCopy<kTileQ, kHeadDim, kThreads>;
  using KCopy = tile::RowCopy<kTileK, kHeadDim, kThreads>;
  using VCopy = tile::RowCopy<kTileK, kHeadDimV, kThreads>;
  static_assert(kWarpRows % 16 == 0 && kTileK % 16 == 0);
  static_assert(kHeadDimV <= kHeadDim, "O takes the place of Q");
  static_assert(kStages == 2 || (kStages == 1 && kSchedule == Schedule::sequential));
};

}  // namespace pantile::ampere
