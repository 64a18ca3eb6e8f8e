// Shared memory of the backward kernels, and the cursor that walks a ring of stages.
//
// 16-bit tiles are panels of [rows][64 columns], 128-byte swizzled: k-major operands when the sum
// runs over the columns, mn-major when it runs over the rows, so one load serves both products.
#pragma once

#include <cstdint>

#include "hopper/backward/config.h"
#include "hopper/backward/params.cuh"
#include "prim/mbarrier.cuh"
#include "prim/wgmma.cuh"
#include "prim/wgmma_row_terms.cuh"

namespace pantile::hopper {

template <int kStages>
struct StageCursor {
  int stage = 0;
  std::uint32_t parity = 0;

  PANTILE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A ring of stages. `full` completes by bytes, or by one arrival a warp of its writers; `empty` by
// one arrival a warp of its readers.
template <int kStages>
struct Ring {
  prim::Mbarrier full[kStages];
  prim::Mbarrier empty[kStages];

  PANTILE_DEVICE void init(int reader_warps, int arrivals = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      prim::init(full[stage], arrivals);
      prim::init(empty[stage], reader_warps);
    }
  }
};

// The tiles of keys that a block works on, one after the other: the scheduler describes the next
// one while the other roles are at work on the one before.
struct WorkQueue {
  KeyTile tiles[2];  // batch -1: no more
  Ring<2> ring;      // full: described; empty: done with
  prim::Mbarrier careful_known[2];
  prim::Mbarrier wanted;  // the loader has requested all of the last tile

  PANTILE_DEVICE void init(int reader_warps) {
    ring.init(reader_warps);
    prim::init(wanted, 1);
    prim::init(careful_known[0], 1);
    prim::init(careful_known[1], 1);
  }
};

// A role's walk through the queue.
class WorkReader {
 public:
  PANTILE_DEVICE explicit WorkReader(WorkQueue& queue) : queue_(queue) {}

  // The next tile, or null when there is none.
  PANTILE_DEVICE const KeyTile* next() {
    prim::wait(queue_.ring.full[cursor_.stage], cursor_.parity);
    const KeyTile* key_tile = &queue_.tiles[cursor_.stage];
    return key_tile->batch < 0 ? nullptr : key_tile;
  }

  // Of the tile that next() returned.
  PANTILE_DEVICE bool is_careful() const {
    prim::wait(queue_.careful_known[cursor_.stage], cursor_.parity);
    return queue_.tiles[cursor_.stage].careful;
  }

  // One thread of each warp says that the warp is done with it.
  PANTILE_DEVICE void done(bool speaks) {
    if (speaks) {
      prim::arrive(queue_.ring.empty[cursor_.stage]);
    }
    cursor_.advance();
  }

 private:
  WorkQueue& queue_;
  StageCursor<2> cursor_;
};

template <int kRows, int kPanels>
struct alignas(1024) Tile {
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  std::uint8_t bytes[kBytes];
};

template <int kRows>
struct RowTerms {
  static constexpr int kBytes = kRows * 16;
  uint4 row[kRows];  // hi, mid, lo; with lse the integer scale of dQ (word 2), row slot (word 3)
};

// Descriptor of K's columns as operand of dQ = dS K, 64 of them at `columns`, followed by ones: the
// distance to the next panel leads to them. Both count from the step's first key, so that a step of
// 16 keys makes the distance shorter by as much.
PANTILE_DEVICE std::uint32_t columns_and_ones(std::uint32_t columns, std::uint32_t ones) {
  return prim::descriptor(columns, static_cast<int>(ones - columns));
}

PANTILE_DEVICE constexpr std::uint32_t ones_step(int step) {
  const std::uint32_t keys = prim::descriptor_step(step * 2048);
  return keys - (keys << 16);
}

// A fragment of dQ on its way to global memory, in register order, and sums of dS of its rows.
struct alignas(128) QueryGradientFragment {
  float values[64 * 64];
  float row_sums[64];
};

// Ones that stand for 8 more columns of K in dQ = dS K, which so become the sums of dS over the
// keys of a row: 16 keys, the same for every step of the product. All of a panel's columns are
// ones, so that the swizzle does not matter.
template <DType kDType>
struct alignas(1024) OnesPanel {
  std::uint32_t words[16 * 128 / 4];

  PANTILE_DEVICE void init() {
    for (int i = static_cast<int>(threadIdx.x); i < 16 * 128 / 4;
         i += static_cast<int>(blockDim.x)) {
      words[i] = kDType == DType::bf16 ? 0x3f803f80u : 0x3c003c00u;
    }
  }
};

template <class Config>
struct PairedStorage {
  static constexpr int kRows = Config::kTileQ;
  Tile<Config::kTileK, Config::kPanels> k;
  Tile<Config::kTileK, Config::kPanelsV> v;
  Tile<kRows, Config::kPanels> q[Config::kQueryStages];
  Tile<kRows, Config::kPanelsV> grad_o[Config::kGradStages];
  Tile<kRows, panels(Config::kTileK)> dS[2];  // [query][key], one panel a warpgroup
  OnesPanel<Config::kDType> key_ones;
  QueryGradientFragment dQ[Config::kConsumers];
  RowTerms<kRows> lse[Config::kQueryStages];
  RowTerms<kRows> delta[Config::kGradStages];
  alignas(256) std::uint32_t ones[prim::kOnesTileBytes / 4];
  Ring<1> key, value;
  WorkQueue work;
  Ring<Config::kQueryStages> query;
  Ring<Config::kGradStages> grad;
  Ring<2> dS_ring;  // head dim 64 only
  prim::Mbarrier dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
};

template <int kCount>
struct StagedFragments {
  QueryGradientFragment fragment[kCount];
  Ring<kCount> ring;
};

template <>
struct StagedFragments<0> {};

template <class Config>
struct PipelineStorage {
  static constexpr int kRows = Config::kTileQ;
  static constexpr int kKeyPanelBytes = Config::kTileK * 128;
  Tile<Config::kTileK, Config::kPanels> k;
  Tile<Config::kTileK, Config::kPanelsV> v;
  Tile<kRows, Config::kPanels> q[Config::kStages];
  Tile<kRows, Config::kPanelsV> grad_o[Config::kStages];
  Tile<kRows, 1> dS[Config::kScoreGradStages];
  OnesPanel<Config::kDType> key_ones;
  uint4 P[4][kWarpgroup];  // fp16, thread to thread: both warpgroups hold the same elements
  alignas(256) std::uint32_t ones[prim::kOnesTileBytes / 4];
  RowTerms<kRows> lse[Config::kStages];
  RowTerms<kRows> delta[Config::kStages];
  Ring<1> key, value;
  WorkQueue work;
  Ring<Config::kStages> query, grad;
  Ring<Config::kScoreGradStages> ds;
  prim::Mbarrier p_full, p_empty;
  StagedFragments<Config::kStagedPanels> dQ;
};

// Dynamic shared memory starts 16-byte aligned; the slack lets the kernels align their storage.
template <class Storage>
inline constexpr int kStorageBytes = static_cast<int>(sizeof(Storage)) + 1024;

template <class Storage>
PANTILE_DEVICE Storage& aligned_storage(std::uint8_t* dynamic_smem) {
  static_assert(kStorageBytes<Storage> <= kSmemPerBlock);
  const std::uint32_t misalignment = prim::shared_address(dynamic_smem) & 1023;
  return *reinterpret_cast<Storage*>(dynamic_smem + ((1024 - misalignment) & 1023));
}

}  // namespace pantile::hopper
