// Shared memory of the ampere kernels: one struct a kernel.
#pragma once

#include <cstdint>

#include "ampere/config.h"
#include "ampere/operand.cuh"
#include "core/geometry.h"

namespace pantile::ampere {

// The rows that a block of the forward works on. They lie in shared memory because the loop has no
// registers left for what is needed again at the end.
struct ForwardWork {
  int head;
  int row0;  // the block's first row, in the sequence
  SequenceRows sequence;
};

template <class Config>
struct ForwardStorage {
  struct Stage {
    alignas(128) std::uint16_t k[Config::kTileK * Config::kHeadDim];
    alignas(128) std::uint16_t v[Config::kTileK * Config::kHeadDimV];
  };
  // Q; at the end each warp turns the rows it owns into O on their way to global memory.
  alignas(128) std::uint16_t q[Config::kTileQ * Config::kHeadDim];
  Stage stages[Config::kStages];
  alignas(kWorkBytes) ForwardWork work;
};

// With the row sums of earlier key tiles (softmax.cuh).
template <class Config>
struct SummedStorage : ForwardStorage<Config> {
  float earlier_sums[Config::kTileQ];
};

// With each warp's piece of a tile of a 16-bit bias (ampere/bias.cuh): kBytes of 16 rows.
template <class Config, int kBytes>
struct BiasedStorage : SummedStorage<Config> {
  static constexpr int kWarpBytes = kBytes * Config::kRowTiles;
  alignas(128) unsigned char bias[Config::kThreads / 32][kWarpBytes];
};
template <class Config>
struct BiasedStorage<Config, 0> : SummedStorage<Config> {};

// What a block of the backward works on. It lies in shared memory because the loop has no registers
// left for what it needs once a step.
struct BackwardWork {
  int key0;              // first key, of the attended ones (common/attended.h)
  core::Mask mask;       // of the attended part
  core::TilePlan rows;   // tiles of attended rows that see the block's keys
  SequenceRows queries;  // the attended ones
  int head0;             // first query head
  int row_number0;       // number of row tile 0
  // Where rows of dS are summed, too: what the sums are multiplied by, else 0.
  float row_sum_unit;
};

// The same block, for a variant: where its part of the sequences lies, and how long they are.
struct WholeSequences {
  int first_row, first_key;
  int rows, keys;
  int key_tile;  // number of the block's tile (common/attended.h)
};

template <class Config>
struct BackwardStorage {
  struct Stage {
    alignas(128) std::uint16_t q[Config::kTileQ * Config::kHeadDim];
    alignas(128) std::uint16_t grad_o[Config::kTileQ * Config::kHeadDimV];
  };
  // K and V; at the end dK and dV on their way to global memory.
  alignas(128) std::uint16_t k[Config::kTileK * Config::kHeadDim];
  alignas(128) std::uint16_t v[Config::kTileK * Config::kHeadDimV];
  Stage stages[Config::kStages];
  // Of step i in i % kTermBuffers: the terms of the step whose dQ is outstanding, of the running
  // and of the next one.
  alignas(128) float row_terms[Config::kTermBuffers][kRowTerms][Config::kTileQ];
  // dS of step i in i % kGradSBuffers, and behind them P if warps share it. Transposed: one row a
  // key, one column a query row.
  alignas(128) std::uint16_t weights[Config::kWeightBuffers][Config::kTileK * Config::kTileQ];
  alignas(kWorkBytes) BackwardWork work;
  WholeSequences whole;  // in the room behind it; variants only
};

// With each warp's piece of a tile of a 16-bit bias.
template <class Config, bool kHasBias>
struct BiasedBackwardStorage : BackwardStorage<Config> {
  static constexpr int kWarpBytes = 2 * Config::kWarpRows * Config::kWarpKeys;
  alignas(128) unsigned char bias[Config::kThreads / 32][kWarpBytes];
};
template <class Config>
struct BiasedBackwardStorage<Config, false> : BackwardStorage<Config> {};

}  // namespace pantile::ampere
