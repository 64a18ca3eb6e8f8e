// Tiles, stages and register budgets of the backward kernels, checked by the C++ compiler too.
//
// Two kernels share the work of one tile of keys differently:
// - paired   (head dims up to 128): two consumer warpgroups with 64 of 128 keys each do everything
//   for their keys; only dQ needs both.
// - pipeline (head dims up to 256): 64 keys; S, P, dV in one warpgroup, dP, dS, dK in the second,
//   dQ in the third, because dK and dV together do not fit the registers of one.
// docs/design/hopper-backward.md draws both, docs/experiments/hopper-backward.md says what else was
// tried.
#pragma once

#include "hopper/limits.h"
#include "pantile/dtype.h"

namespace pantile::hopper {

inline constexpr int kSmemPerBlock = kSharedMemoryBytes;
inline constexpr int kWarpgroup = kWarpgroupThreads;
inline constexpr int kPanel = 64;  // columns of a 128-byte swizzled panel, 16-bit types

// dQ is summed over tiles of keys that run in any order: in fp32, or, so that the order does not
// show in the result, as integers with one power-of-two scale a row.
enum class SumKind { floating, integer };

// What the warpgroups of a block can trade, in registers a thread summed over the warpgroups. A
// block gets as many at launch as the largest multiple of 8 that fits; asking for more than the
// others have given up waits forever.
constexpr int registers_to_share(int warpgroups) {
  return 65536 / (warpgroups * kWarpgroup) / 8 * 8 * warpgroups;
}

constexpr int panels(int columns) {
  return (columns + kPanel - 1) / kPanel;
}

// Rows and keys of a tile. At head dim 64 a step of 128 rows halves the shared-memory reads a
// product; above, two accumulators of 64 x 128 beside dK and dV would not fit.
constexpr int backward_tile_q(int head_dim) {
  return head_dim == 64 ? 128 : 64;
}

constexpr int backward_tile_k(int head_dim) {
  return head_dim <= 128 ? 128 : 64;
}

// Whether score i of a thread is exponentiated by polynomial, not by the special-function unit. At
// head dim 64 that unit holds 64 results of a thread in flight, and with integer sums ptxas spills
// unless two of them go the other way. More of them cost speed: 5-9 % for a quarter.
constexpr bool is_by_polynomial(int head_dim, SumKind sum, int i) {
  return head_dim == 64 && sum == SumKind::integer && i % 32 == 31;
}

template <DType kDTypeOf, int kHeadDimOf, int kHeadDimVOf>
struct PairedConfig {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kHeadDim = kHeadDimOf;    // of Q, K
  static constexpr int kHeadDimV = kHeadDimVOf;  // of V, dO
  static constexpr int kTileQ = backward_tile_q(kHeadDim);
  static constexpr int kTileK = backward_tile_k(kHeadDim);
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kQueryStages = 3;  // a step early for S, a step late for dK
  static constexpr int kGradStages = 2;   // dO
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kPanelsV = panels(kHeadDimV);
  static constexpr bool kBulkAdds = true;  // dQ goes through shared memory into global memory

  static_assert(kHeadDim == kHeadDimV, "smaller values are padded to the head dim of the keys");
  static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                registers_to_share(1 + kConsumers));
};

template <DType kDTypeOf, int kHeadDimOf, int kHeadDimVOf, SumKind kSum>
struct PipelineConfig {
  static constexpr DType kDType = kDTypeOf;
  static constexpr int kHeadDim = kHeadDimOf;
  static constexpr int kHeadDimV = kHeadDimVOf;
  static constexpr int kTileQ = backward_tile_q(kHeadDim);
  static constexpr int kTileK = backward_tile_k(kHeadDim);
  static constexpr int kThreads = 4 * kWarpgroup;
  // Head dim 192 leaves shared memory for a third stage of Q and dO or for dQ. Additions of fp32
  // are as fast from registers; pairs of integers are slower than integers from shared memory.
  static constexpr bool kBulkAdds = kHeadDim == 192 && kSum == SumKind::integer;
  static constexpr int kStages = kHeadDim == 192 && !kBulkAdds ? 3 : 2;  // of Q and dO
  static constexpr int kScoreGradStages = 2;                             // dS
  // Found by compiling: an N = 64 product of two shared tiles needs 64 registers, and more than
  // 208 for the two accumulating warpgroups leaves none for dQ.
  static constexpr int kProducerRegisters = 32;
  static constexpr int kAccumulatorRegisters = 208;  // each of the two warpgroups
  static constexpr int kQueryGradRegisters = 64;
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kPanelsV = panels(kHeadDimV);
  static constexpr int kStagedPanels = kBulkAdds ? kPanels : 0;

  static_assert(kHeadDim == 192 || kHeadDim == 256);
  static_assert(kHeadDimV == 128 || kHeadDimV == 192 || kHeadDimV == 256);
  static_assert(kProducerRegisters + 2 * kAccumulatorRegisters + kQueryGradRegisters <=
                registers_to_share(4));
};

template <DType kDType, int kHeadDim, int kHeadDimV, SumKind kSum,
          bool kPaired = backward_tile_k(kHeadDim) == 128>
struct BackwardConfigOf {
  using Type = PairedConfig<kDType, kHeadDim, kHeadDimV>;
};

template <DType kDType, int kHeadDim, int kHeadDimV, SumKind kSum>
struct BackwardConfigOf<kDType, kHeadDim, kHeadDimV, kSum, false> {
  using Type = PipelineConfig<kDType, kHeadDim, kHeadDimV, kSum>;
};

template <DType kDType, int kHeadDim, int kHeadDimV, SumKind kSum>
using BackwardConfig = typename BackwardConfigOf<kDType, kHeadDim, kHeadDimV, kSum>::Type;

}  // namespace pantile::hopper
